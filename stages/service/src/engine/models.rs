//! The models of the engine: loaded on demand, unloaded after some time without requests or when other models need the
//! memory.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use candle_core::Device;
use flow_model::checkpoint::OpenModel;
use flow_model::decoding::DecodingOptions;
use flow_model::decoding_memory::{WeightParts, batch_bytes};
use flow_model::{Precision, Weights};
use flow_speakers::silero::SAMPLE_RATE;
use flow_transcription::recognizer::Recognizer;

use super::batcher::{Batcher, guarded};
use super::schedule::Limits;
use super::{EngineError, EngineSettings, ModelState, Observer};

/// A loaded model, with the thread that decodes its batcher's windows.
pub(crate) struct LoadedModel {
    pub recognizer: Recognizer,
    pub batcher: Batcher,
}

/// A callback that receives a model, or the error.
type Waiter = Box<dyn FnOnce(Result<Lease, EngineError>) + Send>;

pub(crate) struct Models {
    slots: Mutex<Vec<Slot>>,
    device: Device,
    weights: Weights,
    precision: Precision,
    decoding: DecodingOptions,
    language_weight: f64,
    limits: Limits,
    idle_unload: Option<Duration>,
    budget: Option<u64>,
    /// In seconds.
    max_window: f64,
    /// What a batch needs, by the configuration of its model.
    batch_bytes: Mutex<HashMap<String, u64>>,
    /// Whether unknown names mean the first model.
    accept_any: bool,
    observer: Arc<dyn Observer>,
    stopped: AtomicBool,
    /// Held while computing on a device other than the CPU, whose single stream the models share.
    turn: Option<Arc<Mutex<()>>>,
}

struct Slot {
    name: String,
    path: PathBuf,
    language_prior: Option<PathBuf>,
    loading: Loading,
    digest: Option<String>,
    languages: Vec<String>,
    /// Those that have a [`Lease`].
    users: usize,
    last_used: Instant,
    /// What it needs, where there is a memory budget and it is loaded or being loaded.
    needs: Needs,
    waiters: Vec<Waiter>,
}

enum Loading {
    Not,
    Begun,
    Done(Arc<LoadedModel>, JoinHandle<()>),
}

/// Bytes that a model needs.
#[derive(Clone, Default)]
struct Needs {
    weights: Arc<WeightParts>,
    /// For a batch, beside the weights.
    batch: u64,
}

impl Needs {
    /// Those of several models. On the CPU they share tensors and decode all at the same time; on a device they do neither
    /// (`in_turn`).
    fn together<'a>(all: impl Iterator<Item = &'a Needs>, in_turn: bool) -> u64 {
        let all: Vec<&Needs> = all.collect();
        let sum = |of: fn(&Needs) -> u64| all.iter().copied().map(of).fold(0, u64::saturating_add);
        let (weights, batches) = match in_turn {
            true => (
                sum(|needs| needs.weights.bytes()),
                all.iter().map(|needs| needs.batch).max().unwrap_or(0),
            ),
            false => (
                WeightParts::together(all.iter().map(|needs| &*needs.weights)),
                sum(|needs| needs.batch),
            ),
        };
        weights.saturating_add(batches)
    }
}

/// A model in use: it stays in memory.
pub(crate) struct Lease {
    models: Arc<Models>,
    index: usize,
    model: Arc<LoadedModel>,
}

impl Lease {
    pub fn model(&self) -> &Arc<LoadedModel> {
        &self.model
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut slots = self.models.lock();
        slots[self.index].users -= 1;
        slots[self.index].last_used = Instant::now();
    }
}

impl Models {
    /// Loads nothing yet.
    ///
    /// # Errors
    /// If the device cannot be opened.
    pub fn new(settings: &EngineSettings, observer: Arc<dyn Observer>) -> Result<Arc<Self>, EngineError> {
        let device = settings.device.open(0);
        let device = device.map_err(|error| EngineError::setting("device", error.to_string()))?;
        let samples = |seconds: f64| (seconds * f64::from(SAMPLE_RATE)) as u64;
        let slots = settings.models.iter().map(|model| Slot {
            name: model.name.clone(),
            path: model.path.clone(),
            language_prior: model.language_prior.clone(),
            loading: Loading::Not,
            digest: None,
            languages: Vec::new(),
            users: 0,
            last_used: Instant::now(),
            needs: Needs::default(),
            waiters: Vec::new(),
        });
        let models = Arc::new(Models {
            turn: (!device.is_cpu()).then(Arc::default),
            slots: Mutex::new(slots.collect()),
            device,
            weights: settings.weights,
            precision: settings.precision,
            decoding: settings.decoding(),
            language_weight: settings.language_weight,
            limits: Limits {
                batch: samples(settings.batch_seconds),
                beside_live: samples((settings.batch_seconds / 4.0).max(settings.max_window)),
                share: settings.batch_share,
            },
            idle_unload: (settings.idle_unload > 0.0).then(|| Duration::from_secs_f64(settings.idle_unload)),
            budget: settings.memory_budget,
            max_window: settings.max_window,
            batch_bytes: Mutex::default(),
            accept_any: settings.accept_any_model,
            observer,
            stopped: AtomicBool::new(false),
        });
        if models.budget.is_some() {
            // Before there are requests, whose memory would count too. What is wrong with a model is said when it is loaded.
            for model in &settings.models {
                let _ = guarded(|| models.needs(&model.path));
            }
        }
        Ok(models)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn states(&self) -> Vec<ModelState> {
        let state = |slot: &Slot| ModelState {
            name: slot.name.clone(),
            loaded: matches!(slot.loading, Loading::Done(..)),
            digest: slot.digest.clone(),
            languages: slot.languages.clone(),
        };
        self.lock().iter().map(state).collect()
    }

    /// What is held while computing on a device that models share.
    pub fn turn(&self) -> Option<&Mutex<()>> {
        self.turn.as_deref()
    }

    /// The index of the model of a name, or of the first one where there is no name or any name is accepted.
    ///
    /// # Errors
    /// [`EngineError::UnknownModel`] with the names that there are.
    pub fn find(&self, name: Option<&str>) -> Result<usize, EngineError> {
        let slots = self.lock();
        let Some(name) = name else { return Ok(0) };
        let known = slots.iter().position(|slot| slot.name == name);
        known.or(self.accept_any.then_some(0)).ok_or_else(|| {
            let names: Vec<String> = slots.iter().map(|slot| format!("`{}`", slot.name)).collect();
            EngineError::UnknownModel(format!("there is no model `{name}`; there are {}", names.join(", ")))
        })
    }

    /// An error of loading a model as clients are told of it: of where the model lies, they see the last part alone.
    pub fn for_clients(&self, index: usize, error: EngineError) -> EngineError {
        let EngineError::Model(message) = error else {
            return error;
        };
        let path = self.lock()[index].path.to_string_lossy().into_owned();
        // In names of files that are in a folder.
        let path = path.trim_end_matches('/');
        let name = path.rsplit('/').next().unwrap_or_default();
        EngineError::Model(if path.is_empty() {
            message
        } else {
            message.replace(path, name)
        })
    }

    /// Passes a model to `waiter`: at once if it is loaded, otherwise from a thread that loads it, once for all
    /// concurrent requests.
    pub fn acquire(self: &Arc<Self>, index: usize, waiter: Waiter) {
        let mut slots = self.lock();
        let slot = &mut slots[index];
        if let Loading::Done(model, _) = &slot.loading {
            let model = Arc::clone(model);
            slot.users += 1;
            drop(slots);
            waiter(Ok(self.lease(index, model)));
            return;
        }
        slot.waiters.push(waiter);
        if !matches!(slot.loading, Loading::Not) {
            return;
        }
        slot.loading = Loading::Begun;
        drop(slots);
        let models = Arc::clone(self);
        let loader = std::thread::Builder::new().name("load model".to_owned());
        if let Err(error) = loader.spawn(move || models.load(index)) {
            self.failed(
                index,
                &EngineError::Failed(format!("no thread can be started: {error}")),
            );
        }
    }

    fn lease(self: &Arc<Self>, index: usize, model: Arc<LoadedModel>) -> Lease {
        Lease {
            models: Arc::clone(self),
            index,
            model,
        }
    }

    /// Calls all waiters with an error.
    fn failed(&self, index: usize, error: &EngineError) {
        let mut slots = self.lock();
        slots[index].loading = Loading::Not;
        slots[index].needs = Needs::default();
        let waiters = std::mem::take(&mut slots[index].waiters);
        drop(slots);
        for waiter in waiters {
            waiter(Err(error.clone()));
        }
    }

    fn load(self: Arc<Self>, index: usize) {
        let (name, path, prior) = {
            let slots = self.lock();
            let slot = &slots[index];
            (slot.name.clone(), slot.path.clone(), slot.language_prior.clone())
        };
        let broken = |why: String| EngineError::Model(format!("the model `{name}` cannot be loaded: {why}"));
        let loaded = guarded(|| {
            if let Some(budget) = self.budget {
                let needs = self.needs(&path).map_err(|error| broken(error.to_string()))?;
                self.make_room(index, needs, budget)?;
            }
            let turn = self.turn.as_deref();
            let _alone = turn.map(|turn| turn.lock().unwrap_or_else(PoisonError::into_inner));
            let recognizer = Recognizer::load_in(&path, self.weights.into(), self.precision, &self.device);
            let recognizer = recognizer.and_then(|recognizer| recognizer.with_decoding(&self.decoding));
            let recognizer = recognizer.and_then(|recognizer| match &prior {
                Some(prior) => recognizer.with_language_counts(prior, self.language_weight),
                None => Ok(recognizer),
            });
            recognizer.map_err(|error| broken(error.to_string()))
        });
        match loaded.unwrap_or_else(|panic| Err(broken(panic))) {
            Ok(recognizer) => self.loaded(index, recognizer),
            Err(error) => self.failed(index, &error),
        }
    }

    /// Starts the thread of a model and passes the model to all waiters.
    fn loaded(self: &Arc<Self>, index: usize, recognizer: Recognizer) {
        let model = Arc::new(LoadedModel {
            recognizer,
            batcher: Batcher::new(self.limits, self.turn.clone()),
        });
        // Before the thread starts, which may find at once that the model is unused and must not see another one in its
        // slot.
        let mut slots = self.lock();
        let thread = {
            let (models, model) = (Arc::clone(self), Arc::clone(&model));
            std::thread::Builder::new().name("batches".to_owned()).spawn(move || {
                let idle = || models.unload_idle(index, &model);
                model
                    .batcher
                    .run(&model.recognizer, &*models.observer, models.idle_unload, &idle);
            })
        };
        let thread = match thread {
            Ok(thread) => thread,
            Err(error) => {
                drop(slots);
                self.failed(
                    index,
                    &EngineError::Failed(format!("no thread can be started: {error}")),
                );
                return;
            }
        };
        if self.stopped.load(Ordering::SeqCst) {
            model.batcher.stop();
        }
        let slot = &mut slots[index];
        slot.digest = Some(model.recognizer.digest.clone());
        slot.languages = model.recognizer.languages();
        slot.loading = Loading::Done(Arc::clone(&model), thread);
        slot.last_used = Instant::now();
        let waiters = std::mem::take(&mut slot.waiters);
        slot.users += waiters.len();
        drop(slots);
        for waiter in waiters {
            waiter(Ok(self.lease(index, Arc::clone(&model))));
        }
    }

    /// Unloads a model that was unused for long enough, and returns None; otherwise returns how long it may stay.
    fn unload_idle(&self, index: usize, model: &Arc<LoadedModel>) -> Option<Duration> {
        let limit = self.idle_unload?;
        let mut slots = self.lock();
        let slot = &mut slots[index];
        // Another one is in its slot already.
        if !matches!(&slot.loading, Loading::Done(loaded, _) if Arc::ptr_eq(loaded, model)) {
            return None;
        }
        let unused = slot.last_used.elapsed();
        if slot.users > 0 {
            return Some(limit);
        }
        if unused < limit {
            return Some(limit - unused);
        }
        let unloaded = slot.unload();
        drop(slots);
        drop(unloaded);
        None
    }

    /// Unloads unused models, least recently used first, until what a model needs fits into the budget, and reserves it.
    fn make_room(&self, index: usize, needs: Needs, budget: u64) -> Result<(), EngineError> {
        let mut slots = self.lock();
        // Where models share a device, they decode one at a time.
        let in_turn = self.turn.is_some();
        let is_idle = |slot: &Slot| slot.users == 0 && matches!(slot.loading, Loading::Done(..));
        let in_use = slots
            .iter()
            .filter(|slot| slot.needs.weights.bytes() > 0 && !is_idle(slot));
        let in_use: Vec<(&str, &Needs)> = in_use.map(|slot| (slot.name.as_str(), &slot.needs)).collect();
        let least = Needs::together(in_use.iter().map(|(_, needs)| *needs).chain([&needs]), in_turn);
        if least > budget {
            let described = |needs: &Needs| {
                format!(
                    "{} bytes of weights and {} for a batch",
                    needs.weights.bytes(),
                    needs.batch
                )
            };
            let names: Vec<String> = in_use
                .iter()
                .map(|(name, needs)| format!("`{name}` ({})", described(needs)))
                .collect();
            let beside = match &names[..] {
                [] => String::new(),
                names => format!(" beside {}, which is in use", names.join(", ")),
            };
            return Err(EngineError::NoMemory(format!(
                "the model `{}` needs {}, for which there is no room in the budget of {budget}{beside}",
                slots[index].name,
                described(&needs)
            )));
        }
        let mut unloaded = Vec::new();
        while Needs::together(slots.iter().map(|slot| &slot.needs).chain([&needs]), in_turn) > budget {
            let oldest = slots.iter_mut().filter(|slot| is_idle(slot));
            let Some(oldest) = oldest.min_by_key(|slot| slot.last_used) else {
                break;
            };
            unloaded.extend(oldest.unload());
        }
        slots[index].needs = needs;
        drop(slots);
        for (model, thread) in unloaded {
            model.batcher.stop();
            // The thread held the last reference to the model.
            let _ = thread.join();
        }
        Ok(())
    }

    /// What a model needs.
    fn needs(&self, path: &Path) -> flow_model::Result<Needs> {
        let opened = OpenModel::open(path)?;
        let weights = Arc::new(WeightParts::of(&opened, self.weights, self.precision));
        let configuration = opened.config_yaml.clone();
        let mut measured = self.batch_bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let batch = match measured.get(&configuration) {
            Some(bytes) => *bytes,
            None => {
                let seconds = |samples: u64| samples as f64 / f64::from(SAMPLE_RATE);
                let (window, batch) = (self.max_window, seconds(self.limits.batch));
                // Where the allocator does not count, weights alone do.
                let bytes = batch_bytes(opened, self.weights, self.precision, window, batch)?.unwrap_or(0);
                measured.insert(configuration, bytes);
                bytes
            }
        };
        Ok(Needs { weights, batch })
    }

    /// Ends all threads.
    pub fn stop(&self) {
        let mut slots = self.lock();
        self.stopped.store(true, Ordering::SeqCst);
        let unloaded: Vec<_> = slots.iter_mut().filter_map(Slot::unload).collect();
        drop(slots);
        for (model, _) in unloaded {
            model.batcher.stop();
        }
    }
}

impl Slot {
    fn unload(&mut self) -> Option<(Arc<LoadedModel>, JoinHandle<()>)> {
        match std::mem::replace(&mut self.loading, Loading::Not) {
            Loading::Done(model, thread) => {
                self.needs = Needs::default();
                Some((model, thread))
            }
            other => {
                self.loading = other;
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};
    use flow_model::checkpoint::{OpenModel, TensorEntry};

    use super::*;

    #[test]
    fn batches_count_together_unless_models_take_turns() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/models/small.nemo");
        let mut opened = OpenModel::open(Path::new(path)).unwrap();
        opened.tensors.clear();
        let all = [(10, 5), (20, 7), (30, 0)].map(|(weights, batch)| {
            let tensor = Tensor::zeros(weights, DType::F32, &Device::Cpu).unwrap();
            opened.tensors = vec![TensorEntry::in_memory("tensor", tensor)];
            Needs {
                weights: Arc::new(WeightParts::of(&opened, Weights::F32, Precision::F32)),
                batch,
            }
        });
        assert_eq!(Needs::together(all.iter(), false), 4 * 60 + 12);
        assert_eq!(Needs::together(all.iter(), true), 4 * 60 + 7);
    }
}
