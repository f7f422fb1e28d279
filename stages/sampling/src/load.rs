//! The kind `sampling.load`.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use flow_audio::AudioError;
use flow_audio::decode::SAMPLE_RATE;
use flow_audio::resample::resample;
use flow_kind::{
    Body, Context, Digest, InputPort, Inputs, Kind, Out, OutputPort, Partition, Port, Shape, Shared, Source,
    SourcePartition, StageError, UrlUse,
};
use flow_shards::probe::MEMBER_COLUMNS;
use flow_storage::Storage;
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::augment::{self, Augmenter, Step};
use crate::curriculum::{self, Curriculum, StageSize, Wanted};
use crate::dataset::{AudioColumns, Dataset, ROW_COLUMNS, Utterance, hashes_of_kept};
use crate::dealing::{process_of, rank_of};
use crate::error::SamplingError;
use crate::loaded_batch::{Loaded, micro_batch, staged, staged_schema};
use crate::plan::{Balance, Packing};
use crate::plan_batches::refused;
use crate::planned::Planned;

pub use crate::loaded_batch::loaded_schema;
use crate::sampling_record::SamplingRecord;

/// Loads the micro-batches of training, step by step.
///
/// # What it does
///
/// `rows` are the train rows: `segment_id, text, duration, lang`, and where their audio is: `audio_path` (as
/// `audio.extract` and `manifest.read` give it), or `tar_path` (below `shards`), `offset` and `size`, or `tar_member_name`, which is
/// looked up in `members`, the port of an `audio.probe`. Partition `step-000000012` is optimizer step 12
/// (the first is 0): `grad_accum` micro-batches for each of `ranks` ranks. Batches are planned epoch after epoch
/// as `sampling.plan` does; epoch e uses `seed + e`. With `balance: order` (the default) every row comes once in an
/// epoch and languages come as often as the manifest holds them, whatever the temperature; with `balance: quota`
/// each language gets its share of the epoch's time.
///
/// One row per utterance: `_row, rank, micro, epoch, segment_id, lang, duration, text, signal`; `signal` is
/// 16 kHz mono, a list of float32. Rows come by rank, micro-batch, and place within it. A recording that cannot be
/// decoded is reported, and its row has a signal without samples: training leaves it out. Rows of `manifest.read` that are
/// parts of a recording (see `start` there) are cut out of it; of FLAC and WAV only the part is read and decoded: it
/// must be intact, and the recording begin and end as its header says, but damage elsewhere, and so a wrong MD5 in the
/// header, is not detected. Recordings of other formats are decoded whole for each such row. An empty micro-batch is
/// one row with an empty `segment_id` and `text` and a signal of a single zero, so that every rank takes part in every
/// step.
///
/// Where training is spread over processes that share the state directory, each process loads the micro-batches of its
/// own ranks. Micro-batches of other processes are empty ones there, whose `duration` is the seconds of their utterances:
/// training compares these to see that all processes planned the same.
///
/// With a `curriculum` the run goes through growing parts of the rows. A stage of n rows has of each language its share of
/// n (every language has a row before any has a second), chosen by a hash of their names: a stage holds all rows of the
/// one before, and the same rows whatever the order or the number of workers. Stages get steps in proportion to the steps
/// of their first epochs: stage k ends at the nearest whole number to steps × (epoch steps of stages 1 to k) / (those of
/// all stages), half up, with at least one step for each; so all have the same number of epochs of their own rows. Another
/// number of `steps` moves these ends; `curriculum_steps` sets them. A stage with more rows than there are is one of `all`.
/// Epochs count from 0 within a stage, with `seed` + 2^32 × (stage, from 0) in place of `seed`. Two more columns say
/// where a step is: `stage` (as the curriculum names it) and `stage_end` (steps that are done when the stage ends).
///
/// How the micro-batches are made is recorded in the metadata of their schema: `training.train` stores it in its
/// checkpoints and detects changes.
///
/// # Example
///
/// ```yaml
/// load:
///   uses: sampling.load
///   from: {rows: manifest/split.train, members: manifest/probe.members}
///   with: {shards: /corpus/shards, steps: 2000, ranks: 1, grad_accum: 2}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LoadSettings {
    /// Folder with `<lang>/<shard_id>/` folders, which is put before the paths of tars.
    pub shards: PathBuf,
    /// Number of optimizer steps.
    pub steps: u64,
    /// Number of training replicas.
    pub ranks: u32,
    /// Micro-batches that make one optimizer step on a rank.
    pub grad_accum: u32,
    /// What the temperature does: `order` (default) or `quota`.
    pub balance: Balance,
    /// With `balance: order` the exponent of a language's number of rows in its weight, which decides which clips share a
    /// batch; with `balance: quota` the exponent of its seconds in its share of an epoch's time: 1 for the manifest's own
    /// shares, 0.3 to 0.5 to lift rare languages, 0 for equal shares.
    pub temperature: f64,
    /// Most seconds of audio in a micro-batch. A longer clip is a micro-batch of its own.
    pub max_batch_seconds: f64,
    /// Upper edges of the duration buckets, in seconds; a clip on an edge falls into the bucket above it.
    pub boundaries: Vec<f64>,
    /// Upper edges by which each duration bucket is split again, in characters (Unicode code points) of the text with its
    /// language tag, so that a batch holds texts of like length too: `[40, 80, 120]`. Empty: durations alone count.
    pub token_boundaries: Vec<u32>,
    /// Clips in a micro-batch of each bucket, in place of `max_batch_seconds` (`bucket_batch_size` in NeMo and Lhotse): one number
    /// for each duration bucket, the last of which has no upper edge; with `token_boundaries` those of its text buckets, one after
    /// the other. `flow memory --bucket-batch-size` gives the largest that fit. Empty: `max_batch_seconds` counts.
    pub bucket_batch_size: Vec<u32>,
    /// Seed of the random order. Epoch e uses `seed + e`.
    pub seed: i64,
    /// Factors of speed perturbation, one of which is drawn for each utterance in each epoch; `[0.9, 1.0, 1.1]` is
    /// usual where data is scarce. Pitch changes with speed. 0.5 to 2; a factor below 1 makes a micro-batch longer than
    /// `max_batch_seconds` accordingly.
    pub speeds: Vec<f64>,
    /// Steps that change the signals of training, in this order: `[{mix: {path: /data/noise, prob: 0.5, snr: [10, 20]}}]`.
    /// Each is drawn again for each utterance in each epoch. They follow `speeds`. docs/training.md lists them.
    #[serde(deserialize_with = "augment::steps")]
    pub augment: Vec<Step>,
    /// Number of optimizer steps, from the first, to which `speeds` and `augment` apply. Later ones see the recordings as they
    /// are. Left out: all.
    pub augment_steps: Option<u64>,
    /// Train on this many rows only, chosen by a hash of their names; a larger number keeps the rows of a smaller
    /// one. Left out: all.
    pub max_samples: Option<u64>,
    /// Folder of the checkpoints of the training that reads these batches. Where they were made with another number of
    /// ranks or micro-batches, the current epoch ends as it was planned, so that each of its rows comes once.
    pub checkpoints: Option<PathBuf>,
    /// Progressive training: the rows of each stage, growing, such as `[100k, 500k, 1M, all]`. Empty: all rows from the
    /// first step on. With `max_samples` it goes through those.
    pub curriculum: Vec<StageSize>,
    /// Steps of each stage of the curriculum but the last, which has the rest. Empty: divided so that all stages have
    /// the same number of epochs.
    pub curriculum_steps: Vec<u64>,
    /// Lists the recordings of `augment`; not a setting.
    #[serde(skip)]
    pub storage: Storage,
}

impl Default for LoadSettings {
    fn default() -> Self {
        let packing = Packing::default();
        LoadSettings {
            shards: PathBuf::new(),
            steps: 0,
            ranks: 1,
            grad_accum: packing.grad_accum,
            balance: packing.balance,
            temperature: packing.temperature,
            max_batch_seconds: packing.max_batch_seconds,
            boundaries: packing.boundaries,
            token_boundaries: packing.token_boundaries,
            bucket_batch_size: packing.bucket_batch_size,
            seed: packing.seed,
            speeds: vec![1.0],
            augment: Vec::new(),
            augment_steps: None,
            max_samples: None,
            checkpoints: None,
            curriculum: Vec::new(),
            curriculum_steps: Vec::new(),
            storage: Storage::default(),
        }
    }
}

impl LoadSettings {
    fn packing(&self) -> Packing {
        Packing {
            world_size: self.ranks,
            grad_accum: self.grad_accum,
            balance: self.balance,
            temperature: self.temperature,
            max_batch_seconds: self.max_batch_seconds,
            boundaries: self.boundaries.clone(),
            token_boundaries: self.token_boundaries.clone(),
            bucket_batch_size: self.bucket_batch_size.clone(),
            seed: self.seed,
        }
    }

    /// # Errors
    /// If the recordings of a step of augmentation are not there.
    fn record(&self) -> Result<SamplingRecord, StageError> {
        let augment = augment::identified(&self.storage, &self.augment).map_err(wrong_step)?;
        Ok(SamplingRecord {
            packing: self.packing(),
            steps: self.steps,
            speeds: self.speeds.clone(),
            augment,
            augment_steps: self.augment_steps,
            max_samples: self.max_samples,
            curriculum: self.curriculum.clone(),
            curriculum_steps: self.curriculum_steps.clone(),
        })
    }

    /// Whether the signals of an optimizer step are changed.
    fn augments(&self, step: u64) -> bool {
        self.augment_steps.is_none_or(|steps| step < steps)
    }
}

fn wrong_step(why: String) -> StageError {
    StageError::setting("augment", format!("`augment`: {why}"))
}

pub struct Load;

impl Kind for Load {
    const NAME: &'static str = "sampling.load";
    const VERSION: u32 = 2;
    const INPUTS: &'static [InputPort] = &[
        InputPort::whole("rows", "rows to train on, with where their recordings are").columns(ROW_COLUMNS),
        InputPort::whole(
            "members",
            "the port `members` of an audio.probe, to read recordings from tars",
        )
        .optional()
        .columns(MEMBER_COLUMNS),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new(
        "batches",
        "one partition for each step: the micro-batches of all ranks, with signals and texts",
    )];
    const URL_SETTINGS: &'static [(&'static str, UrlUse)] = &[
        ("shards", UrlUse::Read),
        ("checkpoints", UrlUse::Read),
        ("augment", UrlUse::Read),
    ];
    type Settings = LoadSettings;

    fn set_storage(settings: &mut LoadSettings, storage: &Storage) {
        settings.storage = storage.clone();
    }

    fn shape(settings: &LoadSettings, inputs: &Inputs) -> Result<Shape, StageError> {
        settings.packing().check().map_err(|(name, why)| {
            let name = if name == "world_size" { "ranks" } else { name };
            StageError::setting(name, format!("`{name}`: {why}"))
        })?;
        if settings.speeds.is_empty() || !settings.speeds.iter().all(|speed| (0.5..=2.0).contains(speed)) {
            return Err(StageError::setting("speeds", "`speeds` are numbers from 0.5 to 2"));
        }
        augment::check(&settings.augment).map_err(wrong_step)?;
        // Names of steps have nine digits, so that they sort by number.
        if settings.steps == 0 || settings.steps > 1_000_000_000 {
            return Err(StageError::setting(
                "steps",
                format!("{} steps; 1 to 1,000,000,000 are possible", settings.steps),
            ));
        }
        curriculum::check(&settings.curriculum, &settings.curriculum_steps, settings.steps)
            .map_err(|(name, why)| StageError::setting(name, format!("`{name}`: {why}")))?;
        match AudioColumns::of_input(inputs.required("rows")?, inputs.has("members"))? {
            AudioColumns::Path | AudioColumns::PathRange => {}
            AudioColumns::TarRange | AudioColumns::MemberName if settings.shards.as_os_str().is_empty() => {
                return Err(StageError::setting("shards", "`shards` is needed to read from tars"));
            }
            AudioColumns::TarRange | AudioColumns::MemberName => {}
        }
        let columns = if settings.curriculum.is_empty() {
            loaded_schema()
        } else {
            staged_schema()
        };
        let record = settings.record()?;
        Ok(Shape::source(vec![Port::new(
            "batches",
            record.written_to(&columns).map_err(StageError::failed)?,
        )]))
    }

    fn open(settings: &LoadSettings, context: &Context) -> Result<Body, StageError> {
        let threads = ThreadPoolBuilder::new()
            .num_threads(context.threads.max(1))
            .thread_name(|n| format!("load-{n}"));
        let pool = threads
            .build()
            .map_err(|error| StageError::failed(format!("cannot start threads for loading: {error}")))?;
        Ok(Body::Source(Box::new(LoadBody {
            settings: settings.clone(),
            context: context.clone(),
            pool,
            loader: None,
        })))
    }

    /// Without the folder: recordings are identified by their rows, those of `augment` by their names and
    /// sizes.
    fn identity(settings: &LoadSettings) -> serde_json::Value {
        let mut identity = json!({
            "packing": settings.packing(),
            "steps": settings.steps,
            "speeds": settings.speeds,
            "max_samples": settings.max_samples,
            "curriculum": [json!(settings.curriculum), json!(settings.curriculum_steps)],
        });
        // Left out where there is nothing, so that earlier results keep their keys.
        if !settings.augment.is_empty() {
            let augment = augment::identified(&settings.storage, &settings.augment);
            identity["augment"] = json!(augment.as_ref().unwrap_or(&settings.augment));
        }
        if let Some(steps) = settings.augment_steps {
            identity["augment_steps"] = json!(steps);
        }
        identity
    }
}

/// Rows, plans and counts, shared by all workers of a process.
struct Loader {
    data: Dataset,
    curriculum: Curriculum,
    augmenter: Augmenter,
    left_out: AtomicU64,
}

/// The loaders in use, by their parameters.
static LOADERS: Shared<Digest, Loader> = Shared::new();

/// Why a curriculum cannot be made.
enum Stopped {
    Stage(StageError),
    Sampling(SamplingError),
}

impl From<SamplingError> for Stopped {
    fn from(error: SamplingError) -> Self {
        Stopped::Sampling(error)
    }
}

struct LoadBody {
    settings: LoadSettings,
    context: Context,
    pool: ThreadPool,
    loader: Option<Arc<Loader>>,
}

impl LoadBody {
    fn loader(&mut self) -> Result<Arc<Loader>, StageError> {
        if let Some(loader) = &self.loader {
            return Ok(loader.clone());
        }
        let rows = self.context.required("rows")?;
        let members = self.context.input("members");
        let data_digest = rows.digest().to_hex();
        let settings = serde_json::to_string(&self.settings).map_err(StageError::failed)?;
        let scratch = self.context.scratch.to_string_lossy().into_owned();
        let members_digest = members.map(|members| members.digest().to_hex()).unwrap_or_default();
        let plans = match &self.settings.checkpoints {
            Some(folder) => Planned::history(
                &self.context.storage,
                folder,
                self.settings.ranks,
                self.settings.grad_accum,
            )
            .map_err(|error| StageError::setting("checkpoints", error))?,
            None => Vec::new(),
        };
        let history = format!("{plans:?}");
        let key = Digest::of_parts([data_digest.as_str(), &members_digest, &settings, &scratch, &history]);
        let loader = LOADERS.get(key, || -> Result<Loader, StageError> {
            let settings = &self.settings;
            let data = Dataset::read(rows, members, &settings.shards, settings.max_samples)?;
            let wanted = Wanted {
                sizes: &settings.curriculum,
                stage_steps: &settings.curriculum_steps,
                steps: settings.steps,
                packing: &settings.packing(),
                plans: &plans,
                data: &format!("{data_digest} {:?}", settings.max_samples),
                notes: Some(&self.context.scratch),
            };
            let hashes = || hashes_of_kept(rows, settings.max_samples).map_err(Stopped::Stage);
            let made = self.pool.install(|| Curriculum::new(&data.rows, hashes, &wanted));
            let curriculum = made.map_err(|stopped| match stopped {
                Stopped::Stage(error) => error,
                Stopped::Sampling(error) => refused(error, &self.context.rejects),
            })?;
            Ok(Loader {
                data,
                curriculum,
                augmenter: Augmenter::open(&self.context.storage, &settings.augment).map_err(wrong_step)?,
                left_out: AtomicU64::new(0),
            })
        })?;
        Ok(self.loader.insert(loader).clone())
    }
}

fn step_name(step: u64) -> String {
    format!("step-{step:09}")
}

fn step_number(partition: &Partition) -> Option<u64> {
    partition.as_str().strip_prefix("step-")?.parse().ok()
}

impl Source for LoadBody {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        // A plan that gives a rank nothing is refused before anything runs.
        let loader = self.loader()?;
        let pool = &self.pool;
        pool.install(|| loader.curriculum.check(&loader.data.rows))
            .map_err(|error| refused(error, &self.context.rejects))?;
        let partition = |step| SourcePartition::new(Partition::from(step_name(step)), Vec::new(), "");
        Ok((0..self.settings.steps).map(partition).collect())
    }

    fn read(&mut self, partition: &Partition, out: &mut Out) -> Result<(), StageError> {
        let number = step_number(partition)
            .ok_or_else(|| StageError::failed(format!("`{partition}` is not the name of a step")))?;
        let loader = self.loader()?;
        let stage = loader
            .curriculum
            .stage(number)
            .ok_or_else(|| StageError::failed("there is no stage"))?;
        let step = self
            .pool
            .install(|| stage.step(&loader.data.rows, number))
            .map_err(|error| refused(error, &self.context.rejects))?;
        let mut wanted: Vec<(u32, u32, Utterance<'_>)> = Vec::new();
        // By rank and number; the seconds of those that other processes load.
        let mut places: Vec<(u32, u32, f64)> = Vec::new();
        let planned = step.ranks.saturating_mul(step.grad_accum);
        for rank in 0..step.ranks {
            for micro in 0..step.grad_accum {
                let rows = step.micro_batch(rank, micro);
                let rows = rows.ok_or_else(|| {
                    StageError::failed(format!("step {number} has no micro-batch {micro} of rank {rank}"))
                })?;
                let utterances = rows.iter().filter_map(|&row| loader.data.utterance(stage.row(row)));
                if self.is_own(places.len() as u32, planned) {
                    places.push((rank, micro, 0.0));
                    wanted.extend(utterances.map(|utterance| (rank, micro, utterance)));
                } else {
                    let seconds = utterances.fold(0.0, |sum, utterance| sum + utterance.duration);
                    places.push((rank, micro, seconds));
                }
            }
        }
        let cancel = &self.context.cancel;
        let augments = self.settings.augments(number);
        let no_sound = OnceLock::new();
        let heard = |signal, utterance: &Utterance<'_>| {
            if !augments {
                return Ok(signal);
            }
            let (seed, epoch, segment_id) = (stage.seed(), step.epoch, utterance.segment_id);
            let signal = at_speed(signal, self.speed(seed, epoch, segment_id))?;
            let heard = loader.augmenter.apply(signal, seed, epoch, segment_id);
            heard.inspect_err(|error| drop(no_sound.set(error.to_string())))
        };
        let load = |(_, _, utterance): &(u32, u32, Utterance<'_>)| {
            if cancel.is_set() {
                Err(AudioError::Decode("stopped".into()))
            } else {
                utterance
                    .signal(&self.context.storage)
                    .and_then(|signal| heard(signal, utterance))
            }
        };
        let signals: Vec<Result<Vec<f32>, AudioError>> = self
            .pool
            .install(|| wanted.par_iter().with_max_len(1).map(load).collect());
        if cancel.is_set() {
            return Err(StageError::failed("stopped"));
        }
        if let Some(why) = no_sound.get() {
            return Err(StageError::failed(format!("`augment`: {why}")));
        }
        let loaded = self.told(&loader, number, wanted, signals)?;
        for message in loader.augmenter.newly_broken() {
            self.context.warn(message);
        }
        let mut row = 0;
        let mut rest = loaded.as_slice();
        for (rank, micro, seconds) in places {
            let count = rest.iter().take_while(|(r, m, ..)| (*r, *m) == (rank, micro)).count();
            let (these, others) = rest.split_at(count);
            rest = others;
            let mut batch = micro_batch(row, rank, micro, step.epoch, these, seconds)?;
            if !self.settings.curriculum.is_empty() {
                batch = staged(&batch, stage)?;
            }
            row += batch.num_rows() as u32;
            out.send(0, batch);
        }
        Ok(())
    }
}

impl LoadBody {
    /// Whether this process loads the micro-batch at `place` among the `planned` ones of a step.
    fn is_own(&self, place: u32, planned: u32) -> bool {
        let ranks = self.settings.ranks as usize;
        self.context.share.is_none_or(|share| {
            let rank = rank_of(place, planned, ranks);
            process_of(rank, ranks, share.processes) == share.process
        })
    }

    /// Replaces signals that could not be decoded by empty ones, with a warning.
    ///
    /// # Errors
    /// If process 0 can read what this one cannot.
    fn told<'a>(
        &self,
        loader: &Loader,
        step: u64,
        wanted: Vec<(u32, u32, Utterance<'a>)>,
        signals: Vec<Result<Vec<f32>, AudioError>>,
    ) -> Result<Vec<Loaded<'a>>, StageError> {
        let total = wanted.len();
        let mut loaded = Vec::with_capacity(total);
        let mut broken: Vec<(String, AudioError)> = Vec::new();
        for ((rank, micro, utterance), signal) in wanted.into_iter().zip(signals) {
            let signal = match signal {
                Ok(signal) if signal.is_empty() => Err(AudioError::Decode("no frames".into())),
                signal => signal,
            };
            let signal = match signal {
                Ok(signal) => signal,
                Err(error) => {
                    if let AudioError::Read { path, .. } = &error {
                        self.context.compare_unreadable(path)?;
                    }
                    broken.push((utterance.segment_id.to_owned(), error));
                    Vec::new()
                }
            };
            loaded.push((rank, micro, utterance, signal));
        }
        let Some((segment_id, error)) = broken.first() else {
            return Ok(loaded);
        };
        let so_far = loader.left_out.fetch_add(broken.len() as u64, Ordering::Relaxed) + broken.len() as u64;
        // Numbered as in `metrics.jsonl`: the first step is 1.
        let step = step + 1;
        let message = format!(
            "step {step}: {} of {total} recordings left out ({so_far} so far); {segment_id}: {error}",
            broken.len()
        );
        self.context.report(json!({
            "recordings_left_out": so_far,
            "process": self.context.share.map_or(0, |share| share.process),
            "left_out": {"warning": message.as_str()},
        }));
        self.context.warn(message);
        Ok(loaded)
    }
}

impl LoadBody {
    /// The speed of an utterance in an epoch, drawn by a hash, so without state.
    fn speed(&self, seed: i64, epoch: u64, segment_id: &str) -> f64 {
        let speeds = &self.settings.speeds;
        if let [only] = speeds.as_slice() {
            return *only;
        }
        let mut hasher = blake3::Hasher::new();
        hasher
            .update(&seed.to_le_bytes())
            .update(&epoch.to_le_bytes())
            .update(segment_id.as_bytes());
        let hash = hasher.finalize();
        let number = hash
            .as_bytes()
            .iter()
            .take(8)
            .fold(0u64, |number, byte| number << 8 | u64::from(*byte));
        speeds[(number % speeds.len() as u64) as usize]
    }
}

/// The signal played `speed` times as fast, to the nearest thousandth: as if it had been recorded at another rate.
fn at_speed(signal: Vec<f32>, speed: f64) -> Result<Vec<f32>, AudioError> {
    let rate = f64::from(SAMPLE_RATE / 1000) * (speed * 1000.0).round();
    resample(signal, rate as u32, SAMPLE_RATE)
}

#[cfg(test)]
#[path = "load_tests.rs"]
mod tests;
