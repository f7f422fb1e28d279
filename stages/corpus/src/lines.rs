//! NeMo's manifests: one JSON object to a line.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flow_kind::{Partition, StageError, open_input_file};
use flow_storage::{FileVersion, InputFile, Storage};
use serde_json::{Map, Value};

use crate::ManifestError;
use crate::column_names::{FILE_COLUMNS, ID_COLUMNS, LANGUAGE_COLUMNS, TEXT_COLUMNS, names_like, renamed};
use crate::decoded_text::no_text;
use crate::extra::{self, EXTRA};
use crate::files::{label, trailing_number};
use crate::folder_languages::FolderLanguages;
use crate::json_line;
use crate::looks::{check_version, version_of};
use crate::manifest_row::{ManifestRow, Refusal, refuse, refuse_by_rule};
use crate::names::strip_dot_slash;
use crate::naming::{language, named, names_all};
use crate::places::Places;
use crate::times::{DURATION, ENDS, STARTS, TIME_KEYS, Times, Unit, UnitSample, is_time, unread, unread_among};
use crate::unpacking::misnamed_or;
use crate::{Corpus, Part, Take, take_line};
use crate::{ReadSettings, file_stem};

/// Lines that make a partition, and bytes that end one sooner.
const BLOCK_LINES: u64 = 8_192;
const BLOCK_BYTES: u64 = 64 << 20;
/// Longest line that is read.
const LONGEST_LINE: u64 = 1 << 20;

/// Keys that name the language; the first that exists counts.
pub const LANGUAGE_KEYS: [&str; 5] = ["lang", "language", "target_lang", "source_lang", "locale"];
/// The key that names the recording, and the one in lines of Hugging Face's `metadata.jsonl`.
const AUDIO_FILEPATH: &str = "audio_filepath";
/// What old lines of NeMo call that one.
const AUDIO_FILENAME: &str = "audio_filename";
const FILE_NAME: &str = "file_name";

/// Manifests of lines, cut into blocks.
pub struct LineManifest {
    /// The metadata of each before it was divided.
    files: Vec<(PathBuf, FileVersion)>,
    blocks: Vec<(Partition, Block)>,
    rules: LineRules,
    tars: Tars,
    /// Keys that the setting `columns` names and no line has.
    absent: Vec<String>,
}

#[derive(Clone, Copy)]
struct Block {
    file: usize,
    /// In bytes.
    start: u64,
    end: u64,
    /// Number of its first line in the file, from 1.
    first_line: u64,
}

/// Defaults of lines.
#[derive(Clone, Debug, Default)]
pub struct LineRules {
    pub places: Places,
    pub lang: String,
    /// Of recordings that lines name as tables do.
    pub folders: Arc<FolderLanguages>,
    pub source: String,
    /// Of `start` and `end`.
    pub unit: Unit,
    /// Keys of other names, each with that of ours.
    pub names: NewNames,
}

/// Pairs of the setting `columns`: a key of lines, and ours.
pub type NewNames = Arc<[(String, &'static str)]>;

/// The setting `columns`, for lines: one name of ours for each field that is read by one alone.
fn new_names(settings: &ReadSettings) -> NewNames {
    // Invalid ones were refused when the settings were checked.
    let pairs = renamed(&settings.columns).unwrap_or_default().into_iter();
    let known = pairs.filter_map(|(theirs, ours)| {
        let ours = names_like(ours)?.iter().find(|name| **name == ours)?;
        let ours = match ours {
            ours if ID_COLUMNS.contains(ours) => ID_COLUMNS[0],
            // The key that counts before all others of the language, such as `target_lang`.
            ours if LANGUAGE_COLUMNS.contains(ours) => LANGUAGE_KEYS[0],
            ours => ours,
        };
        Some((theirs.to_string(), ours))
    });
    known.collect()
}

/// The tars of a tarred manifest.
enum Tars {
    None,
    /// One for each manifest file.
    ByFile(Vec<PathBuf>),
    /// By the number in their name, which is a line's `shard_id`.
    ByNumber(HashMap<u64, PathBuf>),
}

impl Tars {
    fn new(tars: Vec<PathBuf>, manifests: usize) -> Result<Tars, ManifestError> {
        if tars.is_empty() {
            return Ok(Tars::None);
        }
        if tars.len() == manifests {
            return Ok(Tars::ByFile(tars));
        }
        let number = |tar: PathBuf| {
            let number = trailing_number(&tar).ok_or_else(|| {
                let why = format!(
                    "{manifests} manifests need as many tars, or tars with a number at the end of their names, which is \
                     then the `shard_id` of a line"
                );
                ManifestError::manifest(&tar, why)
            })?;
            Ok::<_, ManifestError>((number, tar))
        };
        let mut by_number = HashMap::new();
        for tar in tars {
            let (number, tar) = number(tar)?;
            if let Some(other) = by_number.insert(number, tar.clone()) {
                let why = format!(
                    "{} has the same number, which is the `shard_id` of a line: read the manifests of each by themselves",
                    other.display()
                );
                return Err(ManifestError::manifest(&tar, why));
            }
        }
        Ok(Tars::ByNumber(by_number))
    }

    /// The tar of a line. None where no tar has its number, also of those that belong to a file, where NeMo named them.
    fn of(&self, file: usize, shard: Option<u64>) -> Option<&Path> {
        match self {
            Tars::None => None,
            Tars::ByFile(tars) => tars
                .get(file)
                .filter(|tar| shard.is_none() || of_nemo(tar).is_none_or(|number| Some(number) == shard)),
            Tars::ByNumber(tars) => tars.get(&shard?),
        }
        .map(PathBuf::as_path)
    }
}

/// The number of a tar that is called as NeMo calls them: `audio_12.tar`.
fn of_nemo(tar: &Path) -> Option<u64> {
    tar.file_stem()?.to_str()?.strip_prefix("audio_")?.parse().ok()
}

impl LineManifest {
    /// # Errors
    /// When a file cannot be read, or the tars do not fit the manifests.
    pub fn open(
        storage: &Storage,
        files: Vec<PathBuf>,
        tars: Vec<PathBuf>,
        settings: &ReadSettings,
    ) -> Result<Self, ManifestError> {
        let tars = Tars::new(tars, files.len())?;
        let look = |path: PathBuf| match version_of(storage, &path) {
            Ok(look) => Ok((path, look)),
            Err(error) => Err(ManifestError::io(&path, error)),
        };
        let files = files.into_iter().map(look).collect::<Result<Vec<_>, _>>()?;
        let (mut blocks, mut folders) = (Vec::new(), FolderLanguages::default());
        let decide = !names_all(&settings.lang);
        let tarred = !matches!(tars, Tars::None);
        let names = new_names(settings);
        let mut sample = UnitSample::default();
        let mut absent: Vec<String> = names.iter().map(|(theirs, _)| theirs.clone()).collect();
        for (file, (path, _)) in files.iter().enumerate() {
            check_beginning(storage, path)?;
            let label = label(file, path);
            let places = settings.places(path.parent().unwrap_or(Path::new("")));
            let add = |line: &[u8]| {
                if !absent.is_empty() {
                    note_keys(line, &mut absent);
                }
                if decide {
                    add_folder(line, &names, tarred, &mut folders);
                }
                if settings.check_audio && !tarred {
                    add_times(line, &names, &places, &mut sample);
                }
            };
            let found = blocks_of(storage, path, add).map_err(|e| ManifestError::io(path, e))?;
            blocks.extend(found.into_iter().enumerate().map(|(number, block)| {
                let name = Partition::from(format!("{label}/{number:06}"));
                (name, Block { file, ..block })
            }));
        }
        if let (true, Some((first, _))) = (blocks.is_empty(), files.first()) {
            return Err(ManifestError::manifest(first, "there are no rows in it"));
        }
        let rules = LineRules {
            places: settings.places(Path::new("")),
            lang: settings.lang.clone(),
            folders: Arc::new(folders),
            source: settings.source.clone(),
            unit: sample.unit(storage),
            names,
        };
        Ok(LineManifest {
            files,
            blocks,
            rules,
            tars,
            absent,
        })
    }

    fn row(&self, line: &str, number: u64, file: usize) -> Result<ManifestRow, Refusal> {
        let (path, _) = &self.files[file];
        let mut rules = self.rules.clone();
        rules.places.folder = path.parent().map(Path::to_path_buf).unwrap_or_default();
        row_of(
            line,
            number,
            &rules,
            &file_stem(path),
            |shard| self.tars.of(file, shard),
            !matches!(self.tars, Tars::None),
        )
    }

    /// Gives each line that begins within the block with its number; one that is too long or not UTF-8 with what is wrong
    /// with it.
    fn each_line(
        &self,
        storage: &Storage,
        block: Block,
        mut each: impl FnMut(u64, Result<&str, (Refusal, String)>) -> Result<(), StageError>,
    ) -> Result<(), StageError> {
        let (path, _) = &self.files[block.file];
        let failed = |error| ManifestError::io(path, error);
        let mut reader = BufReader::with_capacity(1 << 16, InputFile::open(storage, path).map_err(failed)?);
        reader.seek(SeekFrom::Start(block.start)).map_err(failed)?;
        let (mut at, mut number) = (block.start, block.first_line);
        let mut line = Vec::new();
        while at < block.end {
            line.clear();
            let (length, whole) = read_line(&mut reader, &mut line).map_err(failed)?;
            if length == 0 {
                break;
            }
            let bytes = without_mark(&line, at);
            at += length;
            let lossy = || String::from_utf8_lossy(bytes).into_owned();
            let text = match std::str::from_utf8(bytes) {
                _ if !whole => Err((refuse("line_too_long", format!("{length} bytes")), lossy())),
                Ok(text) => Ok(text.trim_end_matches(['\n', '\r'])),
                Err(error) => Err((refuse("not_utf8", error.to_string()), lossy())),
            };
            each(number, text)?;
            number += 1;
        }
        Ok(())
    }
}

impl Corpus for LineManifest {
    /// What was decided about the names of folders, where they count, and which keys of `columns` are of no line.
    fn told(&self) -> String {
        let both = self
            .rules
            .folders
            .decision()
            .into_iter()
            .chain(self.rules.unit.decision());
        let absent = self.absent.first().map(|_| {
            let keys: Vec<String> = self.absent.iter().map(|key| format!("`{key}`")).collect();
            format!("no line has {}, which `columns` names", keys.join(", "))
        });
        both.chain(absent).collect::<Vec<String>>().join("; ")
    }

    fn parts(&self) -> Vec<Part> {
        let part = |(number, (name, block)): (usize, &(Partition, Block))| Part {
            name: name.clone(),
            number,
            files: vec![self.files[block.file].0.clone()],
            looks: [self.rules.folders.in_key(), self.rules.unit.in_key()].concat(),
        };
        self.blocks.iter().enumerate().map(part).collect()
    }

    fn each(&self, storage: &Storage, part: &Part, take: &mut Take<'_>) -> Result<(), StageError> {
        let (_, block) = self.blocks[part.number];
        let (path, look) = &self.files[block.file];
        check_version(storage, *look, path)?;
        self.each_line(storage, block, |number, line| match line {
            Ok(line) if line.trim().is_empty() => Ok(()),
            line => take_line(take, number, line, |line| self.row(line, number, block.file)),
        })
    }
}

/// What no line of is read.
///
/// # Errors
/// Names it.
fn check_beginning(storage: &Storage, path: &Path) -> Result<(), ManifestError> {
    let mut bytes = Vec::new();
    let read = open_input_file(storage, path).and_then(|file| file.take(1 << 10).read_to_end(&mut bytes));
    read.map_err(|e| ManifestError::io(path, e))?;
    let is_array = without_mark(&bytes, 0).trim_ascii_start().starts_with(b"[");
    let array = is_array.then_some("it is one JSON array; write one object to a line (`jq -c '.[]'` does)");
    // As `jq` and `json.dump` with `indent` write them.
    let first = without_mark(&bytes, 0)
        .trim_ascii_start()
        .split(|byte| *byte == b'\n')
        .next();
    let is_spread = first.is_some_and(|line| line.trim_ascii() == b"{");
    let spread = is_spread.then_some("an object goes over several lines; write one object to a line (`jq -c .` does)");
    let Some(why) = no_text(&bytes).or(array).or(spread) else {
        return Ok(());
    };
    Err(misnamed_or(storage, path, ManifestError::manifest(path, why)))
}

/// Removes the keys that may be in a line, which may write their letters as escapes.
fn note_keys(line: &[u8], absent: &mut Vec<String>) {
    let Ok(line) = std::str::from_utf8(line) else { return };
    if line.contains("\\u") {
        absent.clear();
    }
    absent.retain(|key| !line.contains(key.as_str()));
}

/// Adds the folder of a recording that a line names as tables do, without naming a language.
fn add_folder(line: &[u8], names: &NewNames, tarred: bool, folders: &mut FolderLanguages) {
    let Ok(line) = std::str::from_utf8(line) else { return };
    if (!names.is_empty() || line.contains(FILE_NAME) || !line.contains(AUDIO_FILEPATH))
        && let Ok((Value::Object(fields), read)) = json_line::parse(line)
    {
        let fields = Fields::new(line, &read, fields, names);
        if let Some(key) = fields.file_key(tarred)
            && let (Ok(None), Ok(Some(file))) = (fields.language(), fields.text(key))
        {
            folders.add(file);
        }
    }
}

/// Adds the times of a line that says where its row begins and ends, if it is one of those that are looked at.
fn add_times(line: &[u8], names: &NewNames, places: &Places, sample: &mut UnitSample) {
    let Ok(line) = std::str::from_utf8(line) else { return };
    if (!names.is_empty() || ENDS.iter().any(|name| line.contains(name)))
        && sample.is_due()
        && let Ok((Value::Object(fields), read)) = json_line::parse(line)
    {
        let fields = Fields::new(line, &read, fields, names);
        let key = fields.file_key(false).unwrap_or(AUDIO_FILEPATH);
        if let (Ok(times), Ok(Some(file))) = (fields.times(), fields.text(key)) {
            times.add_to(sample, places.of_path(file).files);
        }
    }
}

/// Blocks of whole lines of a file; none where all are blank. `each` is given all lines that are not too long.
fn blocks_of(storage: &Storage, path: &Path, mut each: impl FnMut(&[u8])) -> io::Result<Vec<Block>> {
    let mut reader = BufReader::with_capacity(1 << 20, open_input_file(storage, path)?);
    let (mut blocks, mut start, mut at, mut lines, mut first_line) = (Vec::new(), 0, 0, 0, 1);
    let (mut line, mut has_rows) = (Vec::new(), false);
    loop {
        line.clear();
        let (length, whole) = read_line(&mut reader, &mut line)?;
        let written = without_mark(&line, at);
        has_rows |= !written.trim_ascii().is_empty();
        if whole {
            each(written);
        }
        if length > 0 {
            at += length;
            lines += 1;
        }
        if at > start && (length == 0 || lines == BLOCK_LINES || at - start >= BLOCK_BYTES) {
            blocks.push(Block {
                file: 0,
                start,
                end: at,
                first_line,
            });
            (start, first_line, lines) = (at, first_line + lines, 0);
        }
        if length == 0 {
            return Ok(if has_rows { blocks } else { Vec::new() });
        }
    }
}

/// Adds the next line to `line`, or of one that is too long the beginning. Its length in bytes, 0 at the end of the file, and
/// whether all of it was added.
fn read_line(reader: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<(u64, bool)> {
    let length = reader.by_ref().take(LONGEST_LINE).read_until(b'\n', line)? as u64;
    if line.last() == Some(&b'\n') || length < LONGEST_LINE {
        return Ok((length, true));
    }
    Ok((length + reader.skip_until(b'\n')? as u64, false))
}

/// A line without the byte order mark that a file may begin with.
fn without_mark(line: &[u8], at: u64) -> &[u8] {
    match line.strip_prefix(b"\xef\xbb\xbf") {
        Some(rest) if at == 0 => rest,
        _ => line,
    }
}

/// The row that a line represents, which has this number in its file. `tar` finds the tar of a `shard_id`; `tarred` says
/// whether there are any.
pub fn row_of<'t>(
    line: &str,
    number: u64,
    rules: &LineRules,
    stem: &str,
    tar: impl Fn(Option<u64>) -> Option<&'t Path>,
    tarred: bool,
) -> Result<ManifestRow, Refusal> {
    let (fields, read) = match json_line::parse(line) {
        Ok((Value::Object(fields), read)) => (fields, read),
        Ok(_) => return Err(refuse("bad_json", format!("line {number} is not a JSON object"))),
        Err(error) => return Err(bad_json(&error, number)),
    };
    // As NeMo's loader leaves such rows out.
    let is_skipped = match fields.get("_skipme") {
        None | Some(Value::Null | Value::Bool(false)) => false,
        Some(Value::Number(number)) => number.as_f64() != Some(0.0),
        Some(Value::String(text)) => !text.is_empty(),
        Some(_) => true,
    };
    if is_skipped {
        return Err(refuse_by_rule("skipme", "`_skipme` is set"));
    }
    let fields = Fields::new(line, &read, fields, &rules.names);
    if let Some(key) = fields.file_key(tarred) {
        return row_as_of_table(&fields, key, rules, stem);
    }
    let word = |key| Ok(fields.text(key)?.unwrap_or_default().to_string());
    let text_key = fields.text_key().ok_or_else(|| fields.missing("text"))?;
    let text = fields.text(text_key)?.unwrap_or_default().to_string();
    let (start, duration) = fields.times()?.place(rules.unit)?;
    let shard = fields.shard()?;
    let said = fields.language()?;
    let lang_field = said.map_or("", |(key, _)| key);
    let lang = language(said.map(|(_, lang)| lang), &rules.lang, None, &text);
    let (tar_path, member) = (word("tar_path")?, word("tar_member_name")?);
    let path = fields.text(AUDIO_FILEPATH)?.filter(|path| !path.is_empty());
    // As `manifest.write` writes rows in tars: NeMo's form, but with the tar.
    let is_member = path.is_some_and(|path| path == strip_dot_slash(&member) && !tar_path.is_empty());
    let tar_of_number = is_member.then(|| trailing_number(Path::new(&tar_path))).flatten();
    let shard_id = match &shard {
        Some(shard) if tar_of_number.is_some_and(|number| number.to_string() == *shard) => {
            file_stem(Path::new(&tar_path))
        }
        Some(shard) => shard.clone(),
        None => stem.to_string(),
    };
    let mut row = ManifestRow {
        segment_id: fields.name("segment_id")?.unwrap_or_default(),
        shard_id,
        text,
        duration,
        lang,
        lang_field,
        source: fields.text("source")?.unwrap_or(&rules.source).to_string(),
        start,
        extra: fields.extra(&[AUDIO_FILEPATH, text_key]),
        ..ManifestRow::default()
    };
    match path {
        Some(path) if tarred => {
            let number = shard.as_deref().and_then(|shard| shard.parse().ok());
            let tar = tar(number).ok_or_else(|| {
                refuse(
                    "missing_audio",
                    format!("no tar has the number of shard {:?}", row.shard_id),
                )
            })?;
            row.wanted.member = Some((tar.to_path_buf(), path.to_string()));
            row.tar_path = tar.display().to_string();
            row.tar_member_name = path.to_string();
        }
        _ => {
            if let Some(path) = path.filter(|_| !is_member) {
                row.wanted = rules.places.of_path(path);
            }
            if !tar_path.is_empty() && !member.is_empty() {
                let in_shard = rules.places.of_member(&tar_path, &member, &row.shard_id)?;
                row.wanted.files.extend(in_shard.files);
                row.wanted.member = in_shard.member;
            }
            row.tar_path = tar_path;
            row.tar_member_name = member;
        }
    }
    if path.is_none() && row.wanted.files.is_empty() {
        return Err(fields.missing(AUDIO_FILEPATH));
    }
    if row.segment_id.is_empty() {
        row.segment_id = file_stem(Path::new(path.unwrap_or(&row.tar_member_name)));
        if let Some(start) = row.start {
            row.segment_id.push_str(&format!("@{start}"));
        }
    }
    Ok(row)
}

/// The row of a line that names its recording by a key as tables have it, such as `file_name` in Hugging Face's
/// `metadata.jsonl`.
fn row_as_of_table(
    fields: &Fields<'_>,
    file_key: &'static str,
    rules: &LineRules,
    stem: &str,
) -> Result<ManifestRow, Refusal> {
    let file = match fields.path(file_key) {
        None => fields.text(file_key)?,
        path => path,
    };
    let file = file.filter(|file| !file.is_empty());
    let file = file.ok_or_else(|| refuse("missing_field", file_key))?;
    let key = fields.text_key();
    let key = key.ok_or_else(|| {
        let names = TEXT_COLUMNS.join(", ");
        refuse("missing_field", format!("one of {names}; `columns` maps other names"))
    })?;
    let text = fields.text(key)?.unwrap_or_default();
    let (start, duration) = fields.times()?.place(rules.unit)?;
    let names = named(file, start);
    let id = fields.name("segment_id")?.filter(|id| !id.is_empty());
    let said = fields.language()?;
    Ok(ManifestRow {
        segment_id: id.unwrap_or(names.segment_id),
        shard_id: fields.shard()?.or(names.shard_id).unwrap_or_else(|| stem.to_string()),
        text: text.to_string(),
        duration,
        lang: language(
            said.map(|(_, lang)| lang),
            &rules.lang,
            rules.folders.language(file),
            text,
        ),
        lang_field: said.map_or("", |(key, _)| key),
        source: fields.text("source")?.unwrap_or(&rules.source).to_string(),
        start,
        wanted: rules.places.of_path(file),
        extra: fields.extra(&[file_key, key]),
        ..ManifestRow::default()
    })
}

/// What is wrong with a line, with its number in the file instead of the one that the JSON reader counts.
fn bad_json(error: &serde_json::Error, number: u64) -> Refusal {
    let text = error.to_string();
    let column = error.column();
    let place = format!(" at line {} column {column}", error.line());
    let what = text.strip_suffix(&place).unwrap_or(&text);
    refuse("bad_json", format!("{what} at line {number} column {column}"))
}

struct Fields<'l> {
    /// As it is written, and as it was parsed: numbers that JSON does not have are null.
    written: &'l str,
    line: &'l str,
    fields: Map<String, Value>,
    /// Pairs of the setting `columns` whose key the line has.
    names: Vec<&'l (String, &'static str)>,
}

impl<'l> Fields<'l> {
    /// Of `names` those count whose key the line has.
    fn new(written: &'l str, line: &'l str, fields: Map<String, Value>, names: &'l [(String, &'static str)]) -> Self {
        let names = names.iter().filter(|(theirs, _)| fields.contains_key(theirs));
        Fields {
            names: names.collect(),
            written,
            line,
            fields,
        }
    }

    /// What the line calls one of our keys; none where it has another meaning there, or another key represents its field.
    fn written_key<'k>(&'k self, ours: &'k str) -> Option<&'k str> {
        if let Some((theirs, _)) = self.names.iter().find(|(_, name)| *name == ours) {
            return Some(theirs);
        }
        let is_taken = |(theirs, name): &&(String, &'static str)| {
            theirs == ours || *name != EXTRA && names_like(name).is_some_and(|names| names.contains(&ours))
        };
        let has = |key: &str| self.fields.contains_key(key);
        let written = match ours {
            AUDIO_FILEPATH if has(AUDIO_FILENAME) && !FILE_COLUMNS.into_iter().any(has) => AUDIO_FILENAME,
            ours => ours,
        };
        (!self.names.iter().any(is_taken)).then_some(written)
    }

    fn get(&self, key: &str) -> Option<&Value> {
        self.fields.get(self.written_key(key)?)
    }

    /// Whether there is such a key, with a value other than null.
    fn has(&self, key: &str) -> bool {
        self.get(key).is_some_and(|value| !value.is_null())
    }

    /// What the line says beside its row, whose file and text have the keys `used`.
    fn extra(&self, used: &[&'static str]) -> Option<String> {
        let times = TIME_KEYS.into_iter().filter(|key| !self.is_beside(key));
        let used = used
            .iter()
            .copied()
            .chain(times)
            .filter_map(|key| self.written_key(key));
        let renamed = self.names.iter().filter(|(_, name)| *name != EXTRA);
        let used: Vec<&str> = used.chain(renamed.map(|(theirs, _)| theirs.as_str())).collect();
        extra::of_line(self.line, &self.fields, &used)
    }

    /// Whether the line says in numbers where its row begins, and where it ends or how long it is.
    fn is_placed(&self) -> bool {
        let is_number = |key: &&str| self.get(key).is_some_and(Value::is_number);
        STARTS.iter().any(is_number) && ENDS.iter().chain([&DURATION]).any(is_number)
    }

    /// Whether a key that times have holds a text, which says something else where other keys say where the row is.
    fn is_beside(&self, key: &str) -> bool {
        TIME_KEYS.contains(&key) && self.get(key).is_some_and(Value::is_string) && self.is_placed()
    }

    /// The key that names the recording, where it is one that tables have for that, and not NeMo's.
    fn file_key(&self, tarred: bool) -> Option<&'static str> {
        if tarred || [AUDIO_FILEPATH, "tar_path"].iter().any(|key| self.has(key)) {
            return None;
        }
        let names_file = |key: &&str| *key == FILE_NAME && self.has(key) || self.path(key).is_some();
        FILE_COLUMNS.into_iter().find(names_file)
    }

    /// The path of a recording: a text, or that of an object `{"path": ..., "bytes": null}`, as Hugging Face's `to_json` writes a
    /// recording.
    fn path(&self, key: &str) -> Option<&str> {
        match self.get(key)? {
            Value::Object(recording) if recording.get("bytes").is_none_or(Value::is_null) => {
                recording.get("path").and_then(Value::as_str)
            }
            other => other.as_str(),
        }
    }

    /// The key of the text.
    fn text_key(&self) -> Option<&'static str> {
        TEXT_COLUMNS.into_iter().find(|key| self.has(key))
    }

    /// What the line says of the row's place.
    fn times(&self) -> Result<Times, Refusal> {
        let is_named = |name: &str| self.names.iter().any(|(theirs, _)| theirs == name);
        let others = self
            .fields
            .iter()
            .filter(|(name, value)| is_time(value) && !is_named(name));
        if let (false, Some(name)) = (self.is_placed(), unread_among(others.map(|(name, _)| name.as_str()))) {
            let why = format!(
                "{}; `columns` gives it such a name ([{name}=start]), or keeps it beside the row ([{name}=extra])",
                unread(name)
            );
            return Err(refuse("unread_time", why));
        }
        Times::of(|name| match self.is_beside(name) {
            true => Ok(None),
            false => self.number(name),
        })
    }

    /// A key that a row needs is not there.
    fn missing(&self, key: &str) -> Refusal {
        let is_lhotse = ["supervisions", "recording_id", "sources"]
            .iter()
            .any(|key| self.has(key));
        let detail = match is_lhotse {
            true => format!(
                "{key}: this is a line of Lhotse's; write one of NeMo's for each supervision, with `audio_filepath`, `offset`, \
                 `duration` and `text`"
            ),
            false => key.to_string(),
        };
        refuse("missing_field", detail)
    }

    /// A name, given by a text or a number.
    fn name(&self, key: &str) -> Result<Option<String>, Refusal> {
        Ok(match self.get(key) {
            Some(Value::Number(number)) => {
                let written = self.written_key(key).and_then(|key| written_value(self.line, key));
                let written = written.map(str::to_string);
                Some(written.unwrap_or_else(|| number.to_string()))
            }
            _ => self.text(key)?.map(str::to_string),
        })
    }

    /// The shard that the line names.
    fn shard(&self) -> Result<Option<String>, Refusal> {
        self.name("shard_id")
    }

    /// The language that the line names, and the key that does.
    fn language(&self) -> Result<Option<(&'static str, &str)>, Refusal> {
        let mut found = None;
        for key in LANGUAGE_KEYS {
            let lang = self.text(key)?.filter(|lang| !lang.is_empty());
            found = found.or(lang.map(|lang| (key, lang)));
        }
        Ok(found)
    }

    fn text(&self, key: &str) -> Result<Option<&str>, Refusal> {
        match self.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(refuse("bad_type", format!("`{key}` is {}, not text", kind_of(other)))),
        }
    }

    /// A number that JSON does not have.
    fn not_finite(&self, key: &str) -> Option<f64> {
        if std::ptr::eq(self.written.as_ptr(), self.line.as_ptr()) {
            return None;
        }
        let number = written_value(self.written, self.written_key(key)?)?
            .parse::<f64>()
            .ok()?;
        (!number.is_finite()).then_some(number)
    }

    /// Parses the number from its text: the JSON reader may be wrong in the last bit.
    fn number(&self, key: &str) -> Result<Option<f64>, Refusal> {
        match self.get(key) {
            None | Some(Value::Null) => Ok(self.not_finite(key)),
            Some(Value::Number(number)) => {
                let written = self.written_key(key).and_then(|key| written_value(self.line, key));
                let written = written.and_then(|written| written.parse().ok());
                Ok(written.or_else(|| number.as_f64()))
            }
            Some(other) => Err(refuse(
                "bad_type",
                format!("`{key}` is {}, not a number", kind_of(other)),
            )),
        }
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The text of a number in a line that is a valid JSON object: the value of the last `"key":` of the outermost object.
fn written_value<'l>(line: &'l str, key: &str) -> Option<&'l str> {
    let bytes = line.as_bytes();
    let (mut at, mut depth, mut found) = (0, 0, None);
    while at < bytes.len() {
        match bytes[at] {
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth -= 1,
            b'"' => {
                let begin = at + 1;
                at = begin;
                while at < bytes.len() && bytes[at] != b'"' {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                let rest = line.get(at + 1..)?.trim_start();
                if depth == 1
                    && line.get(begin..at) == Some(key)
                    && let Some(value) = rest.strip_prefix(':')
                {
                    let value = value.trim_start();
                    let end = value.find(|c: char| matches!(c, ',' | '}') || c.is_whitespace());
                    found = Some(&value[..end.unwrap_or(value.len())]);
                }
            }
            _ => {}
        }
        at += 1;
    }
    found
}

#[cfg(test)]
#[path = "lines_tests.rs"]
mod tests;
