//! Synthetic speech: shards of sentences that espeak-ng speaks, by the kind `audio.synthesize`.

mod clip;
mod espeak;
mod invented;
mod known;
mod plan;
mod random;
mod rows;
mod sentences;
mod settings;
mod shard_files;
mod sound;
#[cfg(test)]
#[path = "tests/test_data.rs"]
mod test_data;
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use flow_kind::output_files::missing_by_size;
use flow_kind::{
    Artifact, Body, Context, InputPort, Inputs, Kind, Out, OutputPort, Partition, Port, ReadOnce, Reject, RejectClass,
    Shape, Source, SourcePartition, StageError, Storage, WithShared,
};
use rayon::ThreadPool;

use clip::{Clip, Maker, Refused};
use espeak::Espeak;
use flow_audio::AudioError;
use flow_shards::place::{Content, Target};
use flow_shards::probe::decoding_pool;
use flow_shards::{examine, shards, space};
use known::{Known, PlannedShard};
use sentences::{Choice, Language, Side};
pub use settings::{HeldOut, JoinedSettings, NoiseSettings, RoomSettings, SynthesizeSettings};
use words::Excluded;

/// Faults that a shard may have in addition to one per clip.
const FEW_FAULTS: usize = 10;
/// Most clips that are made before it is known whether they are needed.
const WAVE: u32 = 256;

pub struct Synthesize;

impl Kind for Synthesize {
    const NAME: &'static str = "audio.synthesize";
    const VERSION: u32 = 3;
    const INPUTS: &'static [InputPort] = &[];
    const OUTPUTS: &'static [OutputPort] = &[
        OutputPort::new("files", "the tars that were written"),
        OutputPort::new("train", "rows for training"),
        OutputPort::new("val", "rows for validation"),
    ];
    /// Shared: the languages' files and the excluded sentences.
    type Settings = WithShared<SynthesizeSettings, ReadOnce<Known>>;

    fn shape(settings: &Self::Settings, _: &Inputs) -> Result<Shape, StageError> {
        settings.check()?;
        let port = |name: &str, schema| Port::new(name, schema);
        let outputs = vec![
            port("files", rows::files_schema()),
            port("train", rows::clips_schema()),
            port("val", rows::clips_schema()),
        ];
        Ok(Shape {
            expensive: true,
            ..Shape::source(outputs)
        })
    }

    fn open(settings: &Self::Settings, context: &Context) -> Result<Body, StageError> {
        let limit = Duration::try_from_secs_f64(settings.time_limit).map_err(StageError::failed)?;
        Ok(Body::Source(Box::new(Synthesizer {
            espeak: Espeak::new(&settings.program, limit),
            known: settings.shared.clone(),
            settings: settings.in_order(),
            context: context.clone(),
            pool: decoding_pool(context)?,
        })))
    }

    /// The identity of all shards; that of one shard (its length, its language) is part of the shard.
    fn identity(settings: &Self::Settings) -> serde_json::Value {
        let settings = settings.in_order();
        let mut identity = serde_json::json!({
            "seed": settings.seed,
            "held_out": {"voices": settings.held_out.voices, "sentences": settings.held_out.sentences},
            "variants": settings.variants,
            "speed": settings.speed,
            "pitch": settings.pitch,
            "gain": settings.gain,
            "silence": settings.silence,
            "min_duration": settings.min_duration,
            "max_duration": settings.max_duration,
            "noise": settings.noise,
            "room": settings.room,
        });
        if settings.joined.share > 0.0 {
            identity["joined"] = serde_json::json!(settings.joined);
        }
        identity
    }

    fn missing_outputs(
        settings: &Self::Settings,
        storage: &Storage,
        committed: &Artifact,
        threads: usize,
    ) -> Result<BTreeMap<Partition, String>, StageError> {
        missing_by_size(
            storage,
            committed,
            ["path", "bytes"],
            &settings.out,
            &settings.out,
            threads,
        )
    }
}

struct Synthesizer {
    settings: SynthesizeSettings,
    /// The languages' files and the excluded sentences.
    known: ReadOnce<Known>,
    espeak: Espeak,
    context: Context,
    pool: ThreadPool,
}

impl Source for Synthesizer {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        let known = self.known()?;
        let version = self.check_program(&known)?;
        self.refuse_other_shards(&known.shards)?;
        let excluded = known.excluded.digest();
        let mut partitions = Vec::with_capacity(known.shards.len());
        for (name, shard) in &known.shards {
            let Some(language) = known.languages.get(&shard.lang) else {
                continue;
            };
            let mut decided_by = serde_json::json!({
                "espeak": version,
                "language": language.digest(),
                "excluded": excluded,
                "side": shard.side.name(),
                "seconds": shard.seconds,
            });
            if self.settings.joined.share > 0.0 && self.settings.joined.languages > 0.0 {
                let all: Vec<String> = known.languages.values().map(Language::digest).collect();
                decided_by["languages"] = serde_json::json!(all);
            }
            partitions.push(SourcePartition::new(
                Partition::new(name),
                Vec::new(),
                decided_by.to_string(),
            ));
        }
        Ok(partitions)
    }

    fn read(&mut self, partition: &Partition, out: &mut Out) -> Result<(), StageError> {
        let known = self.known()?;
        let unknown = || StageError::failed(format!("`{partition}` is not a shard of these settings"));
        let shard = known.shards.get(partition.as_str()).ok_or_else(unknown)?;
        let language = known.languages.get(&shard.lang).ok_or_else(unknown)?;
        let [train, val] = self.settings.variants_of_sides();
        let others: Vec<&Language> = known
            .languages
            .values()
            .filter(|other| other.name != language.name)
            .collect();
        let maker = Maker {
            settings: &self.settings,
            language,
            others: &others,
            choice: Choice {
                side: shard.side,
                held_out: self.settings.held_out.sentences,
                excluded: &known.excluded,
            },
            shard_id: &shard.shard_id,
            variants: if shard.side == Side::Val { &val } else { &train },
            espeak: &self.espeak,
        };
        let (clips, refused) = self.speak(&maker, shard.seconds)?;
        for refused in refused {
            out.reject(Reject {
                row: Some(refused.number),
                id: Some(refused.segment_id),
                reason: refused.why.reason.into(),
                class: if refused.by_rule {
                    RejectClass::Rule
                } else {
                    RejectClass::Fault
                },
                detail: refused.why.detail,
                values: refused.values,
            });
        }
        self.write(shard, &clips, out)
    }
}

impl Synthesizer {
    fn known(&self) -> Result<Arc<Known>, StageError> {
        // The identity of all settings identifies the set of files.
        let name = serde_json::to_string(&self.settings).map_err(StageError::failed)?;
        self.known.get(&name, || self.read_files())
    }

    fn read_files(&self) -> Result<Known, StageError> {
        let shards = plan::shards(&self.settings)?;
        let names: BTreeSet<&String> = shards.values().map(|shard| &shard.lang).collect();
        let mut languages = BTreeMap::new();
        for name in names {
            let language = Language::read(&self.settings.texts, name).map_err(|error| {
                let help = "see the page of audio.synthesize for what such a file holds";
                StageError::setting("texts", error).with_help(help)
            })?;
            languages.insert(name.clone(), language.with_invented(self.settings.invented));
        }
        let mut excluded = Excluded::default();
        for (number, path) in self.settings.exclude.iter().enumerate() {
            excluded.read(&self.context.storage, path).map_err(|error| {
                let help = "`exclude` names manifests, as parquet or JSON lines, with a column `text`";
                StageError::setting(format!("exclude[{number}]"), error).with_help(help)
            })?;
        }
        Ok(Known {
            shards,
            languages,
            excluded,
        })
    }

    /// Checks that the program exists and has the voices; returns its version.
    fn check_program(&self, known: &Known) -> Result<String, StageError> {
        let failed = |error: AudioError| StageError::setting("program", error).with_help(espeak::INSTALL);
        let version = self.espeak.version().map_err(failed)?;
        let voices = self.espeak.voices().map_err(failed)?;
        for language in known.languages.values() {
            if !voices.contains(language.voice()) {
                let message = format!(
                    "{version} has no voice `{}`, which speaks `{}`",
                    language.voice(),
                    language.name
                );
                let help = "see `espeak-ng --voices`; install a newer espeak-ng (and espeak-ng-data), or name another voice in the language's file";
                return Err(StageError::setting("texts", message).with_help(help));
            }
        }
        let variants = self.espeak.variants().map_err(failed)?;
        if let Some(number) = self.settings.variants.iter().position(|name| !variants.contains(name)) {
            // espeak-ng itself would silently use the plain voice.
            let message = format!("{version} has no variant `{}`", self.settings.variants[number]);
            let help = "see `espeak-ng --voices=variant`: what follows `!v/` there can be named";
            return Err(StageError::setting("variants", message).with_help(help));
        }
        Ok(version)
    }

    /// Refuses a folder with shards of other settings: they would be read with the others, and may contain held-out
    /// sentences.
    fn refuse_other_shards(&self, planned: &BTreeMap<String, PlannedShard>) -> Result<(), StageError> {
        let out = &self.settings.out;
        if !out.exists() {
            return Ok(());
        }
        let standing = shards::list(&self.context.storage, out).map_err(|error| StageError::setting("out", error))?;
        let others: Vec<String> = standing.iter().map(shards::Shard::name).collect();
        let others: Vec<&String> = others.iter().filter(|name| !planned.contains_key(*name)).collect();
        let Some(first) = others.first() else {
            return Ok(());
        };
        let message = format!(
            "{} holds {} shards that these settings do not make, such as {first}",
            out.display(),
            others.len()
        );
        Err(StageError::refused(
            message,
            "choose another `out`, or delete them: who reads the folder would read them too",
        ))
    }

    /// Makes clips until they reach the shard's seconds. Clips are made in parallel and counted in their order, so that
    /// the result does not depend on the number of threads.
    fn speak(&self, maker: &Maker<'_>, seconds: f64) -> Result<(Vec<Clip>, Vec<Refused>), StageError> {
        let stop = || self.context.cancel.is_set();
        let (mut clips, mut refused) = (Vec::new(), Vec::new());
        let (mut spoken, mut next, mut faults) = (0.0, 0u32, 0usize);
        // Less than a millisecond is a rounding error, not worth a clip.
        while spoken < seconds - 1e-3 {
            // Twice as many as are likely needed, at least where that is few.
            let each = match clips.len() {
                0 => plan::CLIP_SECONDS,
                count => (spoken / count as f64).max(plan::CLIP_SECONDS),
            };
            let ahead = ((seconds - spoken) / each * 1.2) as u32 + self.context.threads as u32;
            let numbers: Vec<u32> = (next..next.saturating_add(ahead.clamp(1, WAVE))).collect();
            next = next.saturating_add(numbers.len() as u32);
            let made = examine::each(&self.pool, &stop, &numbers, |number| maker.make(*number));
            // None: the run is being aborted.
            let made = made.map_err(not_spoken)?.ok_or_else(|| StageError::failed("stopped"))?;
            for clip in made {
                if spoken >= seconds - 1e-3 {
                    break;
                }
                match clip {
                    None => return Err(nothing_left(maker)),
                    Some(Ok(clip)) => {
                        spoken += clip.duration();
                        clips.push(clip);
                    }
                    Some(Err(why)) => {
                        faults += usize::from(!why.by_rule);
                        refused.push(why);
                    }
                }
                if let Some(last) = refused.last()
                    && (faults > FEW_FAULTS + clips.len() || refused.len() > 20 * (FEW_FAULTS + clips.len()))
                {
                    let message = format!(
                        "{} clips were refused and {} spoken; the last one: {}: {}",
                        refused.len(),
                        clips.len(),
                        last.why.reason,
                        last.why.detail
                    );
                    let help = "look whether espeak-ng speaks this language, and at `max_duration` and `time_limit`";
                    return Err(StageError::failed(message).with_help(help));
                }
            }
        }
        Ok((clips, refused))
    }

    /// Writes the files of a shard, `metadata.parquet` last: without it the folder is not a valid shard.
    fn write(&self, shard: &PlannedShard, clips: &[Clip], out: &mut Out) -> Result<(), StageError> {
        let names: Vec<String> = clips.iter().map(Clip::member).collect();
        let members = names
            .iter()
            .zip(clips)
            .map(|(name, clip)| (name.as_str(), clip.flac.as_slice()));
        let (tar, offsets) = shard_files::tar(members).map_err(StageError::failed)?;
        let (train, val) = match shard.side {
            Side::Train => (clips, &[][..]),
            Side::Val => (&[][..], clips),
        };
        let (train, val) = (rows::clips(shard, train, &offsets)?, rows::clips(shard, val, &offsets)?);
        let tar_name = format!("{}.tar", shard.shard_id);
        let files = [
            (tar_name.as_str(), tar),
            (
                "audio_index.parquet",
                shard_files::audio_index(clips).map_err(StageError::failed)?,
            ),
            (
                "metadata.parquet",
                shard_files::metadata(clips, &shard.lang).map_err(StageError::failed)?,
            ),
        ];
        let target = Target::open(&self.settings.out).map_err(not_written)?;
        let bytes = files.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        let _room = space::reserve(&self.settings.out, bytes).map_err(not_written)?;
        for (name, bytes) in &files {
            let components = [shard.lang.as_str(), shard.shard_id.as_str(), name];
            target.place(&components, Content::Bytes(bytes)).map_err(not_written)?;
        }
        target.sync().map_err(not_written)?;
        let sizes: Vec<(&str, u64)> = files.iter().map(|(name, bytes)| (*name, bytes.len() as u64)).collect();
        out.send(0, rows::files(&shard.name(), &sizes)?);
        out.send(1, train);
        out.send(2, val);
        Ok(())
    }
}

fn nothing_left(maker: &Maker<'_>) -> StageError {
    let held_out = match maker.choice.side {
        Side::Val => "among those that are held out",
        Side::Train => "among those that are not held out",
    };
    let message = format!(
        "no sentence of `{}` is left to say {held_out}, in thousands of draws",
        maker.language.name
    );
    StageError::failed(message).with_help("add words and templates to its file, or exclude less")
}

fn not_spoken(error: AudioError) -> StageError {
    StageError::failed(error).with_help(espeak::INSTALL)
}

fn not_written(error: AudioError) -> StageError {
    let help = "check the space, the permissions and the quota of `out`; a rerun goes on here";
    StageError::failed(error).with_help(help)
}

#[cfg(test)]
#[path = "synthesize_tests.rs"]
mod tests;
