//! How a manifest or corpus is read.

use std::path::{Path, PathBuf};

use flow_kind::StageError;
use flow_text::language_tag::is_language;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Layout;
use crate::column_names::renamed;
use crate::files::Format;
use crate::places::{Places, leads_through_link};
use crate::quoting::Quoting;
use crate::row_rules::{Regions, RowRules};

/// How files of the Hugging Face hub are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Fetch {
    /// They are downloaded whole into the hub's cache.
    #[default]
    Files,
    /// They stay on the hub. Rows name their recordings by the addresses of files at a commit, and parts that are read are kept in the
    /// cache of object storage, which is bounded.
    Ranges,
}

/// Reads an existing manifest, or a corpus as it is on disk.
///
/// # What it does
///
/// A corpus of Lhotse, Kaldi, Hugging Face, NeMo, Common Voice and others is recognised by what is in its folder, and the log says
/// what it was taken for: [docs/corpora.md](../corpora.md) has an example of each. Where several layouts fit, it is an error that
/// names them, and `layout` says which one is read. Recordings that are within other files are named by their place there,
/// `data.arrow#offset=4096&size=20304` or `train.parquet#column=0&row_group=2&row=17`; all stages that read `audio_path` know
/// these names.
///
/// Otherwise it reads one of four forms:
///
/// - parquet: files with the columns that `manifest.write` writes (`segment_id, text, duration` are needed, `lang,
///   shard_id, tar_member_name, tar_path, source, audio_path` or `audio_filepath`, times (below) and `extra` read if
///   they are there, others left out; columns for file, text, language and id may be called as in a table, and where there is
///   one for the file, id and duration may be missing as there; dictionaries and other widths of text and numbers are read as text and float64, whole
///   numbers where a text is wanted as their text). A
///   shard is a partition, `<lang>/<shard_id>` as the tar's folders are named; so the rows keep the order of the file. An
///   `extra` that is not a JSON object is kept as the text of the key `extra`.
/// - nemo: one JSON object to a line with `audio_filepath, duration, text`, a language (`lang`, `language`,
///   `target_lang`, `source_lang` or `locale`) and optionally times (below), `segment_id`, `shard_id`,
///   `source`, `tar_path` and `tar_member_name`; other keys go into `extra`. `audio_filepath` (in old lines `audio_filename`) is
///   relative to the manifest's folder, or else to the current one. With `tars` it is a member of a tar. File and text may have the keys that
///   tables have for them, such as `file_name` and `transcription` in Hugging Face's `metadata.jsonl`. Numbers that JSON does not have (`NaN`, `Infinity`), as Python writes them, are null. 8,192
///   lines are a partition.
/// - table: CSV (RFC 4180; with semicolons, tabs or bars where its heading has no comma, and with semicolons perhaps decimal
///   commas) or TSV (quotes are letters, as Common Voice writes it, or as in CSV, as pandas and Excel do:
///   `quoting`). The first line names a column for the file
///   (`audio_filepath, audio_path, audio, path, file, file_name, filename, wav, wav_filename` or `audio_file_name`) and one for the text (`text, sentence,
///   transcript, transcription` or `normalized_text`), perhaps times (below), `lang` (or `language`,
///   `locale`), `segment_id` (or `id`), `shard_id` and `source`; other columns go into `extra` as texts, but empty fields. The
///   file is looked for in a folder `clips` beside the table, beside the table, and in the current folder. 1,000 rows are a
///   partition.
/// - folder: a folder with a table, `metadata.csv`, `metadata.tsv`, `metadata.jsonl` or `metadata.parquet`, perhaps in its
///   folder `train`; a folder of Common Voice (`clips` and
///   `validated.tsv` without the rows of `dev.tsv` and `test.tsv`, or else `train.tsv`); or else the recordings (flac, wav, mp3, m4a, ogg, webm,
///   mka, aiff, caf, mov and others) in it and below it, each with a `.txt` or `.lab` beside it (also in capitals), a `.normalized.txt` as LibriTTS has it, or a line
///   `<name> <text>` in a `.trans.txt` of its folder, as LibriSpeech has it. What macOS, archives, notebooks and file systems
///   add (`._*`, `__MACOSX`, `.ipynb_checkpoints`, `lost+found`) is passed over. A transcript beside recordings that belongs to none, a second line of one utterance and a name that
///   is not UTF-8 are refused (`missing_audio`, `duplicate_utterance`, `unsafe_name`), and so are labels with times
///   instead of a text, as Audacity and TIMIT have them (`unread_time`). Links to folders are followed, and a folder is read once. More than 64 folders in one another are an
///   error.
///
/// Recordings of rows without a duration are decoded to measure it.
///
/// Rows that are parts of longer recordings begin at `offset`, `start`, `start_time`, `begin` or `begin_time`, and end at `end`,
/// `end_time`, `stop` or `stop_time`, or are `duration` long: in seconds. Where `start` and `end` are both given, and most of a sample of rows would end
/// long after their recordings, by the headers of FLAC and WAV files, but not in milliseconds, they are milliseconds; the log
/// says so. Times that contradict each other are refused. A column that seems to be such a time under another name
/// (`start_ms`, or `from` beside `to`) is an error, in JSON lines a reject (`unread_time`), unless others say where the row begins
/// and how long it is: `columns: [start_ms=start]` has it read, `[start_ms=extra]` kept with the other columns. Rows with different texts on exactly the same part of the same
/// recording are reported in a warning.
///
/// A row without a language gets `lang`; else, in tables and folders, the first folder of its path, if those of all such rows
/// are named like languages (codes of two or three letters, perhaps with a region; other words of three letters beside such codes
/// alone; the log says what was decided); else the one in a tag
/// that its text begins with (`<|hi|> ...`). With `lang: und`, the code for an undetermined language, rows get it where nothing
/// else tells: for data of one language and models whose texts carry no tags. `en-US` and `en_US` become `en`, unless `regions` is `keep`. A language has the
/// form of BCP 47: two or three letters, perhaps with script, region and variant (`hi`, `zh-Hant-TW`), and is written in the
/// case that BCP 47 recommends: `EN` is `en`, `EN-us` is `en-US`. An empty text is taken as it is.
///
/// Columns out: `_row, segment_id, shard_id, text, duration, lang, tar_member_name, tar_path, source, audio_path, start,
/// offset, size, extra`. `audio_path` is the recording's file; where `offset` and `size` are not null, it is the tar that holds
/// the recording, at that offset in bytes. `start` is where the row begins in the recording, in seconds; null for its
/// beginning. The row is `duration` seconds of the recording from there on; one from the beginning that is as long as the
/// recording, give or take 0.1 s, is all of it. So `sampling.load`, `training.train` and `evaluation.decode` read these rows
/// without an extraction. `extra` is a JSON object of the keys that have no column, each value as it is written, or null; in
/// SQL `json_text(extra, 'speaker')` gives one of them. `manifest.write` writes them back.
///
/// A recording named by `tar_path` and `tar_member_name` is looked for below `audio`
/// (`<audio>/<lang>/<shard_id>/<member>`), then beside the tar, then in it.
///
/// Rows are refused (class `rule`) as `duration_too_short` and `duration_too_long` by `min_duration` and `max_duration`, and
/// (class `fault`) as `bad_json`, `unread_time`, `bad_line`, `not_utf8`, `line_too_long` (1 MiB), `missing_field`, `bad_type`,
/// `bad_language` (the detail names the value and its field), `too_much_text` (of a partition beyond 1 GiB), `duration_invalid`, `offset_invalid`, `duration_past_end` (the row begins
/// after its recording, or ends more than 0.1 s after it, by the header of a FLAC or WAV file; of other formats, and with
/// `check_audio: false`, decoding finds it), `missing_text`, `missing_audio`, `unsafe_name`, `decode_error`; of corpora also `missing_recording`, `mixed_audio`,
/// `transformed_audio`, `several_channels`, `several_languages`, `shell_command`, `text_beyond_cut`, `unsupported_cut`,
/// `unsupported_source`, and (class `rule`) `no_speech`, `other_split` and `skipme` (a line whose `_skipme` is set); the reject holds the original. Each
/// run looks at the recordings' sizes, times and inodes (unless `check_audio` is false): a partition with one that was changed, went away or turned up is read again. A manifest without rows is an error.
///
/// A file of a folder that `manifest.write` wrote is refused if the set there is incomplete: `flow.json` is missing, or says
/// that the file is another.
///
/// With an input and an empty `manifest`, the rows of the input go on as they are: so one pipeline starts from shards
/// or from manifests. No setting applies to them.
///
/// # Example
///
/// ```yaml
/// train_rows:
///   uses: manifest.read
///   with: {manifest: /data/train_manifest.jsonl}
/// tarred:
///   uses: manifest.read
///   with: {manifest: "/data/manifest__OP_0..127_CL_.json", tars: "/data/audio__OP_0..127_CL_.tar", lang: en}
/// clips:
///   uses: manifest.read
///   with: {manifest: /data/cv-corpus/de/train.tsv, max_duration: 20}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ReadSettings {
    /// The file or folder. Several files as a range or list: `m_{0..15}.json`, `{a,b}.parquet`, or as NeMo writes it,
    /// `m__OP_0..15_CL_.json`. Or a dataset of the Hugging Face hub, `hf://datasets/OWNER/NAME[@REVISION][/CONFIG][:SPLIT]`, which
    /// is downloaded into the hub's own cache.
    pub manifest: String,
    /// What kind of manifest it is.
    pub format: Format,
    /// How the corpus is arranged, where that should not be found out.
    #[serde(skip_serializing_if = "is_default")]
    pub layout: Layout,
    /// The split that is read of a layout with several: by its name, or by another of the same (`dev` is `validation`); `all` reads
    /// all. Empty: those for training. Of tables as text and JSON lines it chooses rows by their column `split`; empty: all rows.
    #[serde(skip_serializing_if = "is_default")]
    pub split: String,
    /// How the files of a dataset of the hub are read: `files` downloads them whole into the hub's cache; `ranges` leaves them there,
    /// and each time reads the parts that are needed.
    #[serde(skip_serializing_if = "is_default")]
    pub fetch: Fetch,
    /// Folder of extracted recordings, `<audio>/<lang>/<shard_id>/<member>`, as `audio.extract` makes it.
    pub audio: PathBuf,
    /// Folder that is put before a relative `tar_path`.
    pub shards: PathBuf,
    /// Tars that hold the recordings of a NeMo manifest, written like `manifest`: as many as manifests, or with the
    /// number at the end of their names that a line gives as `shard_id`.
    pub tars: String,
    /// Language of rows without one; `und` means undetermined, for rows without a language in folder or tag.
    pub lang: String,
    /// Columns and keys of JSON lines with other names, each as `THEIRS=OURS`: `[wav_file=audio_filepath, words=text]`.
    /// `THEIRS=extra` puts one into `extra`, whatever it is called; of parquet it is left out, as other columns are. A table of
    /// text must have the columns that are named.
    pub columns: Vec<String>,
    /// Whether fields of CSV and TSV may be in double quotes.
    pub quoting: Quoting,
    /// Whether the region of a language (`en-US`, `en_US`) is kept.
    pub regions: Regions,
    /// Least length of a row in seconds; one of exactly this length stays. Nothing: no limit.
    pub min_duration: Option<f64>,
    /// Largest length of a row in seconds; one of exactly this length stays. Nothing: no limit.
    pub max_duration: Option<f64>,
    /// Value of the column `source` where the manifest has none.
    pub source: String,
    /// Check that each recording exists and is long enough for its row, and reject the row if not.
    pub check_audio: bool,
}

impl Default for ReadSettings {
    fn default() -> Self {
        ReadSettings {
            manifest: String::new(),
            format: Format::default(),
            layout: Layout::default(),
            split: String::new(),
            fetch: Fetch::default(),
            audio: PathBuf::new(),
            shards: PathBuf::new(),
            tars: String::new(),
            lang: String::new(),
            columns: Vec::new(),
            quoting: Quoting::default(),
            regions: Regions::default(),
            min_duration: None,
            max_duration: None,
            source: "manifest".into(),
            check_audio: true,
        }
    }
}

impl ReadSettings {
    /// The identity of what is opened.
    pub fn name(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    pub fn places(&self, folder: &Path) -> Places {
        Places {
            folder: folder.to_path_buf(),
            plain: !leads_through_link(folder),
            audio: self.audio.clone(),
            shards: self.shards.clone(),
        }
    }

    pub fn row_rules(&self) -> RowRules {
        RowRules {
            regions: self.regions,
            min_duration: self.min_duration,
            max_duration: self.max_duration,
        }
    }

    /// Refuses a default language that is not of the form of BCP 47.
    pub fn check_lang(&self) -> Result<(), StageError> {
        if self.lang.is_empty() || is_language(&self.lang) {
            return Ok(());
        }
        Err(StageError::setting(
            "lang",
            format!("{:?} is not a language code such as `hi` or `en-US`", self.lang),
        ))
    }

    /// Refuses invalid new names of columns.
    pub fn check_columns(&self) -> Result<(), StageError> {
        match renamed(&self.columns) {
            Ok(_) => Ok(()),
            Err(why) => Err(StageError::setting("columns", why)),
        }
    }

    /// Refuses limits of the duration that are negative or not finite, or that no row can satisfy.
    pub fn check_durations(&self) -> Result<(), StageError> {
        for (name, limit) in [("min_duration", self.min_duration), ("max_duration", self.max_duration)] {
            if let Some(seconds) = limit.filter(|seconds| !(seconds.is_finite() && *seconds >= 0.0)) {
                return Err(StageError::setting(
                    name,
                    format!("{seconds} is not a length in seconds"),
                ));
            }
        }
        match (self.min_duration, self.max_duration) {
            (Some(least), Some(most)) if least > most => {
                let why = format!("it is {most} s, less than `min_duration`, {least} s");
                Err(StageError::setting("max_duration", why))
            }
            _ => Ok(()),
        }
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}
