//! The kind `audio.probe`.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arrow::array::{ArrayRef, Int32Array, Int64Array, RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_kind::context::Cancel;
use flow_kind::store::{DigestedFile, OpeningFile, has_tombstone};
use flow_kind::{
    Body, ColumnType, Context, InputPort, Inputs, Kind, Out, OutputPort, Partition, Port, ROW, Shape, Source,
    SourcePartition, StageError,
};
use flow_storage::{Location, Storage, StorageError, StorageFault};
use rayon::{ThreadPool, ThreadPoolBuilder};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::examine::{self, Examined, ExaminedShard};
use crate::shards::{self, Shard};
use crate::space::{self, Room};
use flow_audio::flac;
use flow_audio::format::Format;

/// Where the recordings of a shard are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AudioFrom {
    /// In its tar.
    #[default]
    Tar,
    /// As files in its folder: extracted earlier, without the tar.
    Files,
    /// In its tar where there is one, otherwise as files.
    Auto,
}

/// Decodes every recording once and records the results.
///
/// # What it does
///
/// Every folder two levels below `shards`, `<lang>/<shard_id>`, is a partition. All members of its tar are
/// decoded from beginning to end and compared with their own checksums. No filter setting affects this stage, so a tar
/// is decoded only once. No files are written.
///
/// Port `members`, one row per name of a member (the later one of a name counts, a leading `./` is left out):
/// `_row, name, status, offset, size, sample_rate, channels, bits, frames, audio_hash, format, stored, detail`.
/// `status` is `ok`, or what is wrong: `not_regular_file`, `tar_truncated`, `empty_file`, `not_flac` (where
/// FLAC alone is allowed), `unsupported_format`, `decode_error`, `no_audio`; `detail` says it in words. `offset` and `size` are bytes in the tar, or in the
/// file where `stored` is `file` instead of `tar`. The columns from `sample_rate` to `format` are null
/// unless `status` is `ok`. `audio_hash` is the SHA-256 of `"{sample_rate}:{channels}:"` and the samples as
/// left-justified little-endian 32-bit numbers, so that it does not depend on how they were compressed.
/// Lossy recordings are taken as the 16-bit numbers nearest to what they decode to, floating-point and 32-bit
/// WAV as 24-bit ones. (What a lossy recording decodes to may differ in its
/// last bit between processors. An M4A keeps the encoder's delay, mostly 1,024 frames of silence, at its beginning.)
///
/// A tar that `audio.delete_tars` deleted counts as unchanged: what was found in it stays, and only a reason to
/// decode it again (another setting, a lost state directory) is an error.
///
/// A shard with a file that cannot be read is refused as a whole (`unreadable_file`, class `fault`), and
/// looked at again by the next run.
///
/// Port `tars`, one row per partition: `_row, status, members, detail`; `status` is `ok`, `tar_truncated` or
/// `missing_tar`.
///
/// # Example
///
/// ```yaml
/// probe: {uses: audio.probe, with: {shards: /corpus/shards, audio_from: tar}}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProbeSettings {
    /// Folder that holds `<lang>/<shard_id>/` folders.
    pub shards: PathBuf,
    /// Where the recordings are: `tar`, `files` (in the shard's folder) or `auto` (the tar if there is one).
    #[serde(default)]
    pub audio_from: AudioFrom,
    /// Formats to accept, detected by content and not by name: `flac`, `wav` (PCM), `mp3`, `m4a` (MP4 and QuickTime),
    /// `ogg` (Vorbis), `opus` (in Ogg), `aiff`, `caf`, `mkv` (Matroska and WebM), `aac` (without a container), `rf64` (WAV with
    /// sizes of 64 bits). Others are `unsupported_format`; with `[flac]` alone, `not_flac`.
    #[serde(default = "only_flac")]
    pub formats: Vec<Format>,
}

pub(crate) fn only_flac() -> Vec<Format> {
    vec![Format::Flac]
}

/// Sorted, each once: their order in a pipeline does not matter.
pub(crate) fn in_order(formats: &[Format]) -> Vec<Format> {
    let mut formats = formats.to_vec();
    formats.sort_unstable();
    formats.dedup();
    formats
}

/// The formats in the identity. Some have a version number, which is raised for changes that affect them only, so that corpora of
/// FLAC are not decoded again. WAV: since 2, a file with sizes of 0xFFFFFFFF in its header is read to its end, since 3 one with 0,
/// since 4 one that is longer than its header says is damaged, and since 5 wrong sizes are mended and samples that come once more
/// are damage. MP3 since 2: files that were joined are read to their end, and a missing part is damage; the latter also in Ogg
/// Vorbis since 2. Since Ogg Vorbis 3 and Opus 2, several streams one after the other in a file are read to the end. Since M4A 2
/// and Matroska 2, HE-AAC is decoded, a cut file is damaged from there on, Opus in MP4 begins at its beginning, and a Matroska file
/// need not say where it ends. Since M4A 3 and Matroska 3, holes and a late beginning are silence, the track that is flagged as
/// default is decoded, of M4A only what its edit list presents, and of QuickTime big-endian samples, ALAC, A-law, mu-law and IMA4.
/// Since MP3 3 and AAC 2, zeros or the rest of a frame may come first; since Ogg Vorbis 4 and Opus 3 a film, and a damaged page
/// before the last one is damage; since CAF 2 Opus may lack its header, and since CAF 3 the last chunk may be filled up. Since WAV
/// 5, AIFF 2, CAF 2 and RF64 2, floating-point samples that are integers are damage, since AIFF 2 one that was written to a pipe is
/// decoded, and since M4A 3 Vorbis. Since WAV 6, CAF 4 and RF64 3, A-law and mu-law are decoded in all forms, since MP3 4 one in a WAV,
/// and one whose header counts itself is whole; since Ogg 5 FLAC in it; since M4A 4 PCM of MP4, wide PCM of GStreamer, and its Opus from the beginning on.
pub(crate) fn formats_identity(in_order: &[Format]) -> Vec<&'static str> {
    let name = |format: &Format| match format {
        Format::Wav => "wav 6",
        Format::Mp3 => "mp3 4",
        Format::Ogg => "ogg 5",
        Format::Opus => "opus 3",
        Format::M4a => "m4a 4",
        Format::Mkv => "mkv 3",
        Format::Aiff => "aiff 2",
        Format::Caf => "caf 4",
        Format::Aac => "aac 2",
        Format::Rf64 => "rf64 3",
        other => other.as_str(),
    };
    in_order.iter().map(name).collect()
}

pub(crate) fn check_formats(formats: &[Format]) -> Result<(), StageError> {
    if formats.is_empty() {
        let error = StageError::setting(
            "formats",
            "`formats` is empty, so that every recording would be refused",
        );
        return Err(error.with_help("say which are allowed, for example `formats: [flac, wav]`"));
    }
    Ok(())
}

pub struct Probe;

impl Kind for Probe {
    const NAME: &'static str = "audio.probe";
    const VERSION: u32 = 3;
    const INPUTS: &'static [InputPort] = &[];
    const OUTPUTS: &'static [OutputPort] = &[
        OutputPort::new(
            "members",
            "one row for each recording of a shard: its location and its format",
        ),
        OutputPort::new("tars", "one row for each shard: what its tar is"),
    ];
    const URL_SETTINGS: &'static [(&'static str, flow_kind::UrlUse)] = &[("shards", flow_kind::UrlUse::Read)];
    type Settings = ProbeSettings;

    fn shape(settings: &ProbeSettings, _: &Inputs) -> Result<Shape, StageError> {
        check_formats(&settings.formats)?;
        let port = |name: &str, schema| Port::new(name, schema);
        let outputs = vec![port("members", members_schema()), port("tars", tars_schema())];
        Ok(Shape {
            expensive: true,
            ..Shape::source(outputs)
        })
    }

    fn sources(settings: &ProbeSettings) -> Vec<(&'static str, PathBuf)> {
        vec![("shards", settings.shards.clone())]
    }

    fn open(settings: &ProbeSettings, context: &Context) -> Result<Body, StageError> {
        let pool = decoding_pool(context)?;
        Ok(Body::Source(Box::new(Prober {
            settings: ProbeSettings {
                formats: in_order(&settings.formats),
                ..settings.clone()
            },
            ahead: ReadAhead::new(context.cancel.clone()),
            context: context.clone(),
            pool,
        })))
    }

    /// Recordings are identified by their bytes, not by their paths.
    fn identity(settings: &ProbeSettings) -> serde_json::Value {
        let formats = in_order(&settings.formats);
        serde_json::json!({"audio_from": settings.audio_from, "formats": formats_identity(&formats)})
    }
}

/// Threads for decoding: what the stage may use beside its worker.
///
/// # Errors
/// Where they cannot be started.
pub fn decoding_pool(context: &Context) -> Result<ThreadPool, StageError> {
    ThreadPoolBuilder::new()
        .num_threads(context.threads.max(1))
        .thread_name(|number| format!("decode-{number}"))
        .build()
        .map_err(|error| StageError::failed(format!("cannot start threads for decoding: {error}")))
}

struct Prober {
    settings: ProbeSettings,
    context: Context,
    pool: ThreadPool,
    ahead: ReadAhead,
}

impl Prober {
    fn reads_tar(&self, shard: &Shard) -> Result<bool, StageError> {
        let tar = shard.tar();
        Ok(match self.settings.audio_from {
            AudioFrom::Tar => true,
            AudioFrom::Files => false,
            // Where there is neither, it is the tar that is missing.
            AudioFrom::Auto => {
                flow_storage::is_file(&self.context.storage, &tar)
                    .map_err(|error| StageError::failed(format!("{}: {error}", tar.display())))?
                    || has_tombstone(&tar)
                    || shards::recordings(&self.context.storage, shard).is_ok_and(|recordings| recordings.is_empty())
            }
        })
    }
}

/// Probers of this process: each needs room for a copy of a tar.
static PROBERS: AtomicU64 = AtomicU64::new(0);

/// Tars in object storage are copied to be read: the next one of a prober while one is decoded.
struct ReadAhead {
    cancel: Cancel,
    /// The partition that is read after the next one.
    next: Option<Partition>,
    /// Its tar, once it is being copied, and the room that was reserved for it.
    opening: Option<(Partition, OpeningFile, Room)>,
    /// There was no room for two copies.
    is_off: bool,
}

impl ReadAhead {
    fn new(cancel: Cancel) -> ReadAhead {
        PROBERS.fetch_add(1, Ordering::Relaxed);
        ReadAhead {
            cancel,
            next: None,
            opening: None,
            is_off: false,
        }
    }

    /// The tar of a partition that begins to be copied, if it was.
    fn take(&mut self, partition: &Partition) -> Option<OpeningFile> {
        let opening = self.opening.take_if(|(of, ..)| of == partition);
        opening.map(|(_, opening, _)| opening)
    }

    /// Begins to copy the tar of the next partition, if there is room for it beside one of each prober.
    fn begin(&mut self, storage: &Storage, settings: &ProbeSettings) {
        if self.is_off || self.opening.is_some() || settings.audio_from == AudioFrom::Files {
            return;
        }
        let Some(next) = self.next.take() else { return };
        let Some(shard) = Shard::named(&settings.shards, next.as_str()) else {
            return;
        };
        let tar = shard.tar();
        let Ok(Location::Object(url)) = Location::of_path(&tar) else {
            return;
        };
        // What does not work now is said when the tar is read.
        let Ok(Some(found)) = storage.look(&url) else {
            return;
        };
        if has_tombstone(&tar) {
            return;
        }
        let folder = storage.cache_folder();
        if std::fs::create_dir_all(&folder).is_err() {
            return;
        }
        let others = found.size.saturating_mul(PROBERS.load(Ordering::Relaxed));
        let Ok(room) = space::reserve(&folder, found.size.saturating_add(others)) else {
            return;
        };
        room.used(others);
        let cancel = self.cancel.clone();
        let opening = DigestedFile::open_ahead(storage, &tar, move || !cancel.is_set());
        self.opening = opening.ok().map(|opening| (next, opening, room));
    }

    /// Opens a tar that was begun to be copied, or not. Where it has no room beside the next one, that is given up first.
    fn open(&mut self, storage: &Storage, opening: Option<OpeningFile>, tar: &Path) -> io::Result<DigestedFile> {
        let cancel = self.cancel.clone();
        let open = || DigestedFile::open_while(storage, tar, &|| !cancel.is_set());
        let opened = opening.map_or_else(open, OpeningFile::wait);
        match &opened {
            Err(error) if is_of_the_cache(error) => {
                self.is_off = true;
                if let Some((_, opening, _)) = self.opening.take() {
                    opening.give_up();
                }
                open()
            }
            _ => opened,
        }
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        PROBERS.fetch_sub(1, Ordering::Relaxed);
    }
}

fn is_of_the_cache(error: &io::Error) -> bool {
    StorageError::in_io(error).is_some_and(|error| error.fault == StorageFault::Cache)
}

impl Source for Prober {
    fn upcoming(&mut self, partitions: &[Partition]) {
        self.ahead.next = partitions.first().cloned();
    }

    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        let listed = shards::list(&self.context.storage, &self.settings.shards).map_err(|error| {
            StageError::setting("shards", error).with_help("`shards` is the folder of `<lang>/<shard_id>/`")
        })?;
        if listed.is_empty() {
            let root = self.settings.shards.display();
            let message = format!("{root} holds no shard, that is, no folder <lang>/<shard_id>/");
            return Err(StageError::setting("shards", message).with_help("is the disk mounted that it is on?"));
        }
        let mut partitions = Vec::with_capacity(listed.len());
        for shard in listed {
            let name = Partition::from(shard.name());
            partitions.push(if self.reads_tar(&shard)? {
                SourcePartition::new(name, vec![shard.tar()], "tar")
            } else {
                let files = match shards::recordings(&self.context.storage, &shard) {
                    Ok(files) => files,
                    // Or a folder in place of a file: a file that cannot be read is rejected, with its path and the
                    // reason.
                    Err(error) if error.is_unreadable() => {
                        partitions.push(SourcePartition::new(name, vec![shard.folder], "files"));
                        continue;
                    }
                    Err(error) => return Err(StageError::failed(error)),
                };
                // Contents are digested by the runtime; names count too.
                let names: Vec<&str> = files.iter().map(|(name, _)| name.as_str()).collect();
                let extra = format!("files\n{}", names.join("\n"));
                SourcePartition::new(name, names.iter().map(|name| shard.folder.join(name)).collect(), extra)
            });
        }
        partitions.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(partitions)
    }

    fn digests(&self, partition: &SourcePartition) -> bool {
        partition.extra == "tar"
    }

    fn read(&mut self, partition: &Partition, out: &mut Out) -> Result<(), StageError> {
        let shard = Shard::named(&self.settings.shards, partition.as_str())
            .ok_or_else(|| StageError::failed(format!("`{partition}` is not the name of a shard")))?;
        let stop = self.context.gives_up();
        let reads_tar = self.reads_tar(&shard)?;
        let examined = if reads_tar {
            if has_tombstone(&shard.tar()) {
                let message = format!(
                    "{} has to be decoded again, but was deleted after its recordings were extracted",
                    shard.tar().display()
                );
                let help = "put the tar back, or set `audio_from: files` if the recordings are beside it";
                return Err(StageError::failed(message).with_help(help));
            }
            let opening = self.ahead.take(partition);
            self.ahead.begin(&self.context.storage, &self.settings);
            let open = |tar: &Path| self.ahead.open(&self.context.storage, opening, tar);
            examine::tar_of(&shard.tar(), open, &self.settings.formats, &self.pool, &stop).map(|examined| {
                let (shard, tar) = examined?;
                tar.into_iter().for_each(|tar| out.digested(tar));
                Some(shard)
            })
        } else {
            examine::files_of(&self.context.storage, &shard, &self.settings.formats, &self.pool, &stop)
        };
        // None: the run is being aborted.
        let examined = examined
            .map_err(StageError::failed)?
            .ok_or_else(|| StageError::failed("stopped"))?;
        out.send(
            0,
            members_batch(&examined.recordings, if reads_tar { "tar" } else { "file" })?,
        );
        out.send(1, tars_batch(&examined)?);
        Ok(())
    }
}

/// The columns of the port `members` of an `audio.probe` that are needed to read recordings from tars.
pub const MEMBER_COLUMNS: &[(&str, ColumnType)] = &[
    ("name", ColumnType::AnyText),
    ("offset", ColumnType::Number),
    ("size", ColumnType::Number),
    ("stored", ColumnType::AnyText),
];

/// Schema of the port `members`.
pub fn members_schema() -> SchemaRef {
    let field = |name: &str, data_type, nullable| Field::new(name, data_type, nullable);
    Arc::new(Schema::new(vec![
        field(ROW, DataType::UInt32, false),
        field("name", DataType::Utf8, false),
        field("status", DataType::Utf8, false),
        field("offset", DataType::Int64, false),
        field("size", DataType::Int64, false),
        field("sample_rate", DataType::Int32, true),
        field("channels", DataType::Int32, true),
        field("bits", DataType::Int32, true),
        field("frames", DataType::Int64, true),
        field("audio_hash", DataType::Utf8, true),
        field("format", DataType::Utf8, true),
        field("stored", DataType::Utf8, false),
        field("detail", DataType::Utf8, false),
    ]))
}

/// Schema of the port `tars`.
pub fn tars_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new(ROW, DataType::UInt32, false),
        Field::new("status", DataType::Utf8, false),
        Field::new("members", DataType::Int64, false),
        Field::new("detail", DataType::Utf8, false),
    ]))
}

fn members_batch(recordings: &[Examined], stored: &str) -> Result<RecordBatch, StageError> {
    let rows = u32::try_from(recordings.len()).map_err(|_| StageError::failed("a tar has more than 2^32 members"))?;
    let texts = |text: fn(&Examined) -> &str| -> ArrayRef {
        Arc::new(
            recordings
                .iter()
                .map(|recording| Some(text(recording)))
                .collect::<StringArray>(),
        )
    };
    // File offsets are below 2^63; rates, channels and bits have 20, 3 and 5 bits.
    let longs = |number: fn(&Examined) -> Option<u64>| -> ArrayRef {
        Arc::new(
            recordings
                .iter()
                .map(|recording| number(recording).map(|n| n as i64))
                .collect::<Int64Array>(),
        )
    };
    let ints = |number: fn(&flac::StreamInfo) -> u32| -> ArrayRef {
        let of = |recording: &Examined| {
            recording
                .verdict
                .as_ref()
                .map(|(_, verdict)| number(&verdict.info) as i32)
        };
        Arc::new(recordings.iter().map(of).collect::<Int32Array>())
    };
    let hashes = recordings
        .iter()
        .map(|recording| recording.verdict.as_ref().map(|(_, verdict)| &verdict.audio_hash));
    let formats = recordings
        .iter()
        .map(|recording| recording.verdict.as_ref().map(|(format, _)| format.as_str()));
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from_iter_values(0..rows)),
        texts(|recording| &recording.name),
        texts(|recording| recording.status),
        longs(|recording| Some(recording.offset)),
        longs(|recording| Some(recording.size)),
        ints(|info| info.sample_rate),
        ints(|info| info.channels),
        ints(|info| info.bits),
        longs(|recording| recording.verdict.as_ref().map(|(_, verdict)| verdict.frames)),
        Arc::new(hashes.collect::<StringArray>()),
        Arc::new(formats.collect::<StringArray>()),
        Arc::new(recordings.iter().map(|_| Some(stored)).collect::<StringArray>()),
        texts(|recording| &recording.detail),
    ];
    Ok(RecordBatch::try_new(members_schema(), columns)?)
}

fn tars_batch(shard: &ExaminedShard) -> Result<RecordBatch, StageError> {
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from(vec![0])),
        Arc::new(StringArray::from(vec![shard.status])),
        Arc::new(Int64Array::from(vec![shard.members as i64])),
        Arc::new(StringArray::from(vec![shard.detail.as_str()])),
    ];
    Ok(RecordBatch::try_new(tars_schema(), columns)?)
}

#[cfg(test)]
#[path = "probe_tests.rs"]
mod tests;
