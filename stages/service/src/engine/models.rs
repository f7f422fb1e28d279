//! The models of the engine: loaded on demand, unloaded after some time without requests or when other models need the
//! memory.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use candle_core::Device;
use flow_model::checkpoint::OpenModel;
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
    limits: Limits,
    idle_unload: Option<Duration>,
    budget: Option<u64>,
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
    loading: Loading,
    digest: Option<String>,
    languages: Vec<String>,
    /// Those that have a [`Lease`].
    users: usize,
    last_used: Instant,
    /// Bytes of the tensors, where there is a memory budget.
    bytes: u64,
    waiters: Vec<Waiter>,
}

enum Loading {
    Not,
    Begun,
    Done(Arc<LoadedModel>, JoinHandle<()>),
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
            loading: Loading::Not,
            digest: None,
            languages: Vec::new(),
            users: 0,
            last_used: Instant::now(),
            bytes: 0,
            waiters: Vec::new(),
        });
        Ok(Arc::new(Models {
            turn: (!device.is_cpu()).then(Arc::default),
            slots: Mutex::new(slots.collect()),
            device,
            weights: settings.weights,
            precision: settings.precision,
            limits: Limits {
                batch: samples(settings.batch_seconds),
                beside_live: samples((settings.batch_seconds / 4.0).max(settings.max_window)),
                share: settings.batch_share,
            },
            idle_unload: (settings.idle_unload > 0.0).then(|| Duration::from_secs_f64(settings.idle_unload)),
            budget: settings.memory_budget,
            accept_any: settings.accept_any_model,
            observer,
            stopped: AtomicBool::new(false),
        }))
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
        // In names of files that lie in a folder.
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
        slots[index].bytes = 0;
        let waiters = std::mem::take(&mut slots[index].waiters);
        drop(slots);
        for waiter in waiters {
            waiter(Err(error.clone()));
        }
    }

    fn load(self: Arc<Self>, index: usize) {
        let (name, path) = {
            let slots = self.lock();
            (slots[index].name.clone(), slots[index].path.clone())
        };
        let broken = |why: String| EngineError::Model(format!("the model `{name}` cannot be loaded: {why}"));
        let loaded = guarded(|| {
            if let Some(budget) = self.budget {
                let bytes =
                    needed_bytes(&path, self.weights, self.precision).map_err(|error| broken(error.to_string()))?;
                self.make_room(index, bytes, budget)?;
            }
            let turn = self.turn.as_deref();
            let _alone = turn.map(|turn| turn.lock().unwrap_or_else(PoisonError::into_inner));
            let recognizer = Recognizer::load_in(&path, self.weights.into(), self.precision, &self.device);
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

    /// Unloads unused models, least recently used first, until `bytes` fit into the budget, and reserves them.
    fn make_room(&self, index: usize, bytes: u64, budget: u64) -> Result<(), EngineError> {
        let mut slots = self.lock();
        let used: u64 = slots.iter().map(|slot| slot.bytes).sum();
        let is_idle = |slot: &Slot| slot.users == 0 && matches!(slot.loading, Loading::Done(..));
        let idle: u64 = slots.iter().filter(|slot| is_idle(slot)).map(|slot| slot.bytes).sum();
        if (used - idle).saturating_add(bytes) > budget {
            let in_use = slots.iter().filter(|slot| slot.bytes > 0 && !is_idle(slot));
            let in_use: Vec<String> = in_use
                .map(|slot| format!("`{}` ({} bytes)", slot.name, slot.bytes))
                .collect();
            let beside = match &in_use[..] {
                [] => String::new(),
                names => format!(" beside {}, which is in use", names.join(", ")),
            };
            return Err(EngineError::NoMemory(format!(
                "the model `{}` needs {bytes} bytes, for which there is no room in the budget of {budget}{beside}",
                slots[index].name
            )));
        }
        let mut free = budget.saturating_sub(used);
        let mut unloaded = Vec::new();
        while free < bytes {
            let oldest = slots.iter_mut().filter(|slot| is_idle(slot));
            let Some(oldest) = oldest.min_by_key(|slot| slot.last_used) else {
                break;
            };
            free += oldest.bytes;
            unloaded.extend(oldest.unload());
        }
        slots[index].bytes = bytes;
        drop(slots);
        for (model, thread) in unloaded {
            model.batcher.stop();
            // The thread held the last reference to the model.
            let _ = thread.join();
        }
        Ok(())
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
                self.bytes = 0;
                Some((model, thread))
            }
            other => {
                self.loading = other;
                None
            }
        }
    }
}

/// How much memory the tensors of a model take: all are of 32 bits, but for matrices, which are kept as `weights`, and those that
/// low precision is for.
fn needed_bytes(path: &Path, weights: Weights, precision: Precision) -> flow_model::Result<u64> {
    let matrix = if weights == Weights::F32 { 4 } else { 2 };
    let low = match precision {
        Precision::F32 => matrix,
        Precision::Bf16 => 2,
        Precision::Int8 => 1,
    };
    let tensors = OpenModel::open(path)?.tensors;
    let bytes = tensors.iter().map(|tensor| {
        let in_low = tensor.name.starts_with("encoder.layers.") || tensor.name.starts_with("joint.");
        let each = match tensor.shape().len() {
            0 | 1 => 4,
            _ if in_low => low,
            _ => matrix,
        };
        (tensor.elements() as u64).saturating_mul(each)
    });
    Ok(bytes.fold(0, u64::saturating_add))
}
