//! A folder of recordings with transcripts: a `.txt` beside each, or a `metadata.csv` or `metadata.tsv`.

use std::fs::{self, File};
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use flow_runtime::{Partition, SourcePartition, StageError};

use super::looks::{Chain, FileLook, looks_of};
use super::recordings::Wanted;
use super::rows::{ManifestRow, Refusal, Rows, line_values, refuse};
use super::table_text::{Record, records};
use super::{ReadSettings, file_stem};
use crate::error::ManifestError;

/// Recordings that make a partition.
const BLOCK: usize = 1_000;
/// Longest transcript, and largest table, in bytes.
const LONGEST_TRANSCRIPT: u64 = 1 << 20;
const LARGEST_TABLE: u64 = 4 << 30;

const AUDIO: [&str; 9] = ["flac", "wav", "mp3", "m4a", "mp4", "aac", "ogg", "oga", "opus"];
const FILE_COLUMNS: [&str; 6] = ["file_name", "audio_filepath", "audio_path", "audio", "path", "file"];
const TEXT_COLUMNS: [&str; 5] = ["text", "transcription", "transcript", "sentence", "normalized_text"];
const LANGUAGE_COLUMNS: [&str; 3] = ["lang", "language", "locale"];
const ID_COLUMNS: [&str; 2] = ["segment_id", "id"];

/// A folder of recordings, cut into blocks.
pub struct AudioFolder {
    root: PathBuf,
    contents: Contents,
    lang: String,
    source: String,
}

enum Contents {
    /// Recordings relative to the root, block by block.
    Files(Vec<(Partition, Vec<String>)>),
    Table {
        path: PathBuf,
        /// How the file looked before it was read.
        look: FileLook,
        columns: Columns,
        records: Vec<Record>,
        blocks: Vec<(Partition, Range<usize>)>,
    },
}

/// Where in a record the fields are.
struct Columns {
    count: usize,
    file: usize,
    text: usize,
    lang: Option<usize>,
    duration: Option<usize>,
    id: Option<usize>,
}

impl AudioFolder {
    /// # Errors
    /// When the folder or its table cannot be read, or nothing is in it.
    pub fn open(root: &Path, settings: &ReadSettings) -> Result<Self, ManifestError> {
        let table = ["metadata.csv", "metadata.tsv"].map(|name| root.join(name));
        let contents = match table.into_iter().find(|table| table.is_file()) {
            Some(path) => read_table(path)?,
            None => {
                let blocks = list(root)?;
                if blocks.is_empty() {
                    return Err(ManifestError::Manifest {
                        path: root.to_path_buf(),
                        why: format!(
                            "the folder holds no recording ({}) and no metadata.csv or .tsv",
                            AUDIO.join(", ")
                        ),
                    });
                }
                Contents::Files(blocks)
            }
        };
        Ok(AudioFolder {
            root: root.to_path_buf(),
            contents,
            lang: settings.lang.clone(),
            source: settings.source.clone(),
        })
    }

    pub fn partitions(&self) -> Vec<SourcePartition> {
        let looks = |files: &mut dyn Iterator<Item = &str>| {
            let wanted: Vec<Wanted> = files.map(|file| self.wanted(file)).collect();
            let mut chain = Chain::default();
            looks_of(&wanted).iter().for_each(|look| chain.add(look));
            chain.to_hex()
        };
        match &self.contents {
            Contents::Files(blocks) => blocks
                .iter()
                .map(|(name, files)| SourcePartition {
                    name: name.clone(),
                    files: files
                        .iter()
                        .map(|file| self.root.join(file).with_extension("txt"))
                        .collect(),
                    extra: looks(&mut files.iter().map(String::as_str)),
                })
                .collect(),
            Contents::Table {
                path,
                columns,
                records,
                blocks,
                ..
            } => blocks
                .iter()
                .map(|(name, range)| SourcePartition {
                    name: name.clone(),
                    files: vec![path.clone()],
                    extra: looks(
                        &mut records[range.clone()]
                            .iter()
                            .filter_map(|record| record.fields.get(columns.file).map(String::as_str)),
                    ),
                })
                .collect(),
        }
    }

    pub fn read(&self, partition: &Partition, rows: &mut Rows<'_>) -> Result<(), StageError> {
        let unknown = || StageError::failed(format!("the folder has no part {partition}"));
        match &self.contents {
            Contents::Files(blocks) => {
                let (_, files) = blocks.iter().find(|(name, _)| name == partition).ok_or_else(unknown)?;
                for file in files {
                    let row = transcript(&self.root.join(file).with_extension("txt"))
                        .map(|text| self.row(file, text, None, None, None));
                    rows.push(row, || line_values(file))?;
                }
            }
            Contents::Table {
                columns,
                records,
                blocks,
                path,
                look,
            } => {
                look.still(path)?;
                let (_, range) = blocks.iter().find(|(name, _)| name == partition).ok_or_else(unknown)?;
                for record in &records[range.clone()] {
                    rows.push(self.record(columns, record), || line_values(&record.line))?;
                }
            }
        }
        Ok(())
    }

    fn record(&self, columns: &Columns, record: &Record) -> Result<ManifestRow, Refusal> {
        if let Some(why) = record.broken {
            return Err(refuse("bad_line", why));
        }
        if record.fields.len() != columns.count {
            let (found, wanted) = (record.fields.len(), columns.count);
            return Err(refuse(
                "bad_line",
                format!("{found} fields under a heading of {wanted}"),
            ));
        }
        let field = |place: Option<usize>| {
            let field = place.and_then(|place| record.fields.get(place)).map(String::as_str);
            field.filter(|field| !field.is_empty())
        };
        let file = field(Some(columns.file)).ok_or_else(|| refuse("missing_field", "the recording's file"))?;
        let duration = match field(columns.duration) {
            None => None,
            Some(text) => Some(
                text.trim()
                    .parse()
                    .map_err(|_| refuse("bad_type", format!("duration {text:?}")))?,
            ),
        };
        let text = field(Some(columns.text)).unwrap_or_default().to_string();
        Ok(self.row(file, text, field(columns.lang), field(columns.id), duration))
    }

    fn row(
        &self,
        file: &str,
        text: String,
        lang: Option<&str>,
        id: Option<&str>,
        duration: Option<f64>,
    ) -> ManifestRow {
        let first = file.split_once('/').map(|(first, _)| first);
        let lang = match lang {
            Some(lang) => lang.to_string(),
            None if !self.lang.is_empty() => self.lang.clone(),
            None => first.filter(|first| is_tag(first)).unwrap_or_default().to_lowercase(),
        };
        let bare = file.rsplit_once('.').map_or(file, |(bare, _)| bare);
        ManifestRow {
            segment_id: id.unwrap_or(bare).to_string(),
            shard_id: file
                .rsplit_once('/')
                .map_or_else(|| file_stem(&self.root), |(folder, _)| folder.to_string()),
            text,
            duration,
            lang,
            source: self.source.clone(),
            wanted: self.wanted(file),
            ..ManifestRow::default()
        }
    }

    fn wanted(&self, file: &str) -> Wanted {
        Wanted {
            files: vec![self.root.join(file)],
            member: None,
        }
    }
}

/// Two or three letters, perhaps with a region: `hi`, `en-IN`.
fn is_tag(text: &str) -> bool {
    let language = text.split(['-', '_']).next().unwrap_or_default();
    (2..=3).contains(&language.len()) && language.bytes().all(|byte| byte.is_ascii_alphabetic())
}

fn transcript(path: &Path) -> Result<String, Refusal> {
    let missing = |error: std::io::Error| refuse("missing_text", format!("{}: {error}", path.display()));
    if !fs::metadata(path).map_err(missing)?.is_file() {
        return Err(refuse("missing_text", format!("{} is no file", path.display())));
    }
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(missing)?;
    file.take(LONGEST_TRANSCRIPT + 1)
        .read_to_end(&mut bytes)
        .map_err(missing)?;
    if bytes.len() as u64 > LONGEST_TRANSCRIPT {
        return Err(refuse(
            "line_too_long",
            format!("{} has more than 1 MiB", path.display()),
        ));
    }
    let text = String::from_utf8(bytes).map_err(|error| refuse("not_utf8", error.to_string()))?;
    Ok(text
        .trim_start_matches('\u{feff}')
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" "))
}

/// Recordings below a folder, by the folder they are in and then by name, in blocks. Links to folders are not
/// followed.
fn list(root: &Path) -> Result<Vec<(Partition, Vec<String>)>, ManifestError> {
    let mut blocks = Vec::new();
    let mut waiting = vec![String::new()];
    while let Some(below) = waiting.pop() {
        let folder = root.join(&below);
        let mut files = Vec::new();
        for entry in fs::read_dir(&folder).map_err(|e| ManifestError::io(&folder, e))? {
            let entry = entry.map_err(|e| ManifestError::io(&folder, e))?;
            // A manifest cannot name what is not UTF-8.
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            let path = if below.is_empty() {
                name
            } else {
                format!("{below}/{name}")
            };
            let kind = entry.file_type().map_err(|e| ManifestError::io(&folder, e))?;
            let extension = Path::new(&path).extension().and_then(|found| found.to_str());
            if kind.is_dir() {
                waiting.push(path);
            } else if extension.is_some_and(|found| AUDIO.contains(&found.to_ascii_lowercase().as_str())) {
                files.push(path);
            }
        }
        files.sort_unstable();
        let name = if below.is_empty() { "." } else { &below };
        blocks.extend(
            files
                .chunks(BLOCK)
                .enumerate()
                .map(|(number, files)| (Partition::from(format!("{name}/{number:06}")), files.to_vec())),
        );
    }
    blocks.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(blocks)
}

fn read_table(path: PathBuf) -> Result<Contents, ManifestError> {
    let wrong = |why: String| ManifestError::Manifest {
        path: path.clone(),
        why,
    };
    let look = FileLook::of(&path).map_err(|e| ManifestError::io(&path, e))?;
    let mut bytes = Vec::new();
    let file = File::open(&path).map_err(|e| ManifestError::io(&path, e))?;
    file.take(LARGEST_TABLE + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| ManifestError::io(&path, e))?;
    if bytes.len() as u64 > LARGEST_TABLE {
        return Err(wrong("it has more than 4 GiB; write it as JSON lines instead".into()));
    }
    // What is not UTF-8 is replaced here and refused line by line.
    let text = String::from_utf8_lossy(&bytes);
    let quoted = path.extension().is_some_and(|extension| extension == "csv");
    let mut records = records(text.trim_start_matches('\u{feff}'), quoted).into_iter();
    let heading = records.next().map(|record| record.fields).unwrap_or_default();
    let find = |names: &[&str]| {
        let is = |name: &str| {
            heading
                .iter()
                .position(|heading| heading.trim().eq_ignore_ascii_case(name))
        };
        names.iter().find_map(|name| is(name))
    };
    let needed = |names: &[&str], what: &str| {
        find(names).ok_or_else(|| {
            wrong(format!(
                "its first line names no column for {what} (one of {}); it says: {}",
                names.join(", "),
                heading.join(", ")
            ))
        })
    };
    let columns = Columns {
        count: heading.len(),
        file: needed(&FILE_COLUMNS, "the recording's file")?,
        text: needed(&TEXT_COLUMNS, "the text")?,
        lang: find(&LANGUAGE_COLUMNS),
        duration: find(&["duration"]),
        id: find(&ID_COLUMNS),
    };
    let records: Vec<Record> = records.collect();
    if records.is_empty() {
        return Err(wrong("there are no rows in it".into()));
    }
    let block = |first: usize| {
        let name = Partition::from(format!("metadata/{:06}", first / BLOCK));
        (name, first..records.len().min(first + BLOCK))
    };
    let blocks = (0..records.len()).step_by(BLOCK).map(block).collect();
    Ok(Contents::Table {
        path,
        look,
        columns,
        records,
        blocks,
    })
}
