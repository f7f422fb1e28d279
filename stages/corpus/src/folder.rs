//! A folder of recordings with transcripts: in files beside them, or in LibriSpeech's lists.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::DirEntry;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flow_kind::{Partition, SourcePartition, StageError};
use flow_storage::Storage;

use crate::ManifestError;
use crate::corpus::LaidOut;
use crate::files::{Format, format_of, format_of_name};
use crate::folder_languages::FolderLanguages;
use crate::lines::LineManifest;
use crate::listing::{AUDIO, Listed, Transcript, list, stem};
use crate::looks::{Chain, looks_of};
use crate::manifest::{Manifest, Opened};
use crate::manifest_row::{ManifestRow, Refusal, Wanted, line_values, refuse};
use crate::naming::{language, named, names_all};
use crate::rows::Rows;
use crate::tables::TableManifest;
use crate::text_tables::TextTables;
use crate::transcripts::{transcript, transcripts_of};
use crate::{ReadSettings, file_stem};

/// Tables of a folder by Hugging Face's convention; the first that exists counts.
const TABLES: [&str; 4] = ["metadata.csv", "metadata.tsv", "metadata.jsonl", "metadata.parquet"];
/// Tables of a folder of Common Voice beside `clips`; the first that exists counts.
const COMMON_VOICE: [&str; 2] = ["validated.tsv", "train.tsv"];
/// Tables that are read only where they are named.
const OF_COMMON_VOICE: [&str; 4] = ["dev.tsv", "test.tsv", "other.tsv", "invalidated.tsv"];
/// The folder of the split that is read of a folder of split folders, each with a table.
const TRAIN: &str = "train";
/// Extensions of transcripts that are not read.
const OF_OTHER_PROGRAMS: [&str; 8] = ["srt", "vtt", "TextGrid", "textgrid", "eaf", "json", "ctm", "stm"];
/// Names of a folder that an error shows.
const SHOWN: usize = 10;

/// The first of some files of a folder that is there.
pub fn first_of<S: AsRef<str>>(root: &Path, names: &[S]) -> Option<PathBuf> {
    names
        .iter()
        .map(|name| root.join(name.as_ref()))
        .find(|path| path.is_file())
}

/// The tables of a folder by Hugging Face's convention, below one in it (empty: in the folder itself).
pub fn tables(below: &str) -> Vec<String> {
    let slash = if below.is_empty() { "" } else { "/" };
    TABLES.iter().map(|table| format!("{below}{slash}{table}")).collect()
}

/// The table of a folder; none where transcripts are beside the recordings.
///
/// # Errors
/// Where a folder of Common Voice has tables, but none of all recordings.
pub fn table_of(root: &Path) -> Result<Option<PathBuf>, ManifestError> {
    if let Some(table) = first_of(root, &TABLES) {
        return Ok(Some(table));
    }
    if !root.join("clips").is_dir() {
        return Ok(first_of(root, &TABLES.map(|table| format!("{TRAIN}/{table}"))));
    }
    if let Some(table) = first_of(root, &COMMON_VOICE) {
        return Ok(Some(table));
    }
    let others = OF_COMMON_VOICE.into_iter().filter(|name| root.join(name).is_file());
    let others: Vec<&str> = others.collect();
    match others.as_slice() {
        [] => Ok(None),
        others => Err(ManifestError::manifest(
            root,
            format!(
                "beside clips there is no {}; name the table to read: {}",
                COMMON_VOICE.join(" or "),
                others.join(", ")
            ),
        )),
    }
}

/// Opens a table of the recordings of a folder.
///
/// # Errors
/// When it cannot be opened.
pub fn open_table(
    storage: &Storage,
    table: &Path,
    root: &Path,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let files = vec![table.to_path_buf()];
    Ok(match format_of(table) {
        Some(Format::Nemo) => LaidOut::of_lines(LineManifest::open(storage, files, Vec::new(), settings)?, settings),
        Some(Format::Parquet) => Box::new(TableManifest::open(storage, files, settings, scratch)?),
        _ => LaidOut::of_lines(TextTables::open(storage, files, Some(root), settings)?, settings),
    })
}

/// A folder of recordings, cut into blocks.
pub struct AudioFolder {
    root: PathBuf,
    blocks: Vec<(Partition, Vec<Listed>)>,
    lang: String,
    folders: FolderLanguages,
    source: String,
    /// A table in the folder above this one or in one of its folders, which may have the texts of recordings that lack them.
    table: Option<PathBuf>,
}

/// Transcripts of a list, by utterance.
type Lines<'f> = HashMap<&'f str, Result<String, Refusal>>;

impl AudioFolder {
    /// # Errors
    /// When the folder cannot be read, or nothing is in it.
    pub fn open(storage: &Storage, root: &Path, settings: &ReadSettings) -> Result<Self, ManifestError> {
        let blocks = list(storage, root)?;
        if blocks.is_empty() {
            let tars = match holds_tars(root) {
                true => {
                    ", but tars, which `audio.webdataset` reads (`manifest.read` reads them where a manifest names their members: `tars`)"
                }
                false => "",
            };
            return Err(ManifestError::manifest(
                root,
                format!(
                    "the folder holds no recording{tars} ({}; each with a .txt or .lab beside it or a line in a *.trans.txt, as \
                     LibriSpeech has it) and no table ({}, as Hugging Face has it, or {} beside clips, as Common Voice has it); \
                     in it is {}",
                    AUDIO.join(", "),
                    TABLES.join(", "),
                    COMMON_VOICE.join(", "),
                    contents_of(root)
                ),
            ));
        }
        Ok(AudioFolder {
            root: root.to_path_buf(),
            folders: if names_all(&settings.lang) {
                FolderLanguages::default()
            } else {
                FolderLanguages::of(
                    blocks
                        .iter()
                        .flat_map(|(_, files)| files)
                        .filter(|listed| !matches!(listed.transcript, Transcript::Refused { .. }))
                        .map(|listed| listed.file.as_str()),
                )
            },
            blocks,
            table: table_nearby(root),
            lang: settings.lang.clone(),
            source: settings.source.clone(),
        })
    }

    fn text(&self, file: &str, place: &Transcript, lists: &BTreeMap<&Arc<Path>, Lines<'_>>) -> Result<String, Refusal> {
        match place {
            Transcript::Refused { reason, detail } => Err(refuse(reason, detail.clone())),
            Transcript::Beside(extension) => transcript(&self.beside(file, extension)).map_err(|refusal| {
                if refusal.reason != "missing_text" {
                    return refusal;
                }
                let above = Path::new(file).ancestors().skip(1);
                let table = above
                    .filter_map(|above| first_of(&self.root.join(above), &TABLES))
                    .next();
                let mut others = OF_OTHER_PROGRAMS.iter().map(|extension| self.beside(file, extension));
                let hint = match table.as_ref().or(self.table.as_ref()) {
                    Some(table) => format!("; {} is a table: name it in place of the folder", table.display()),
                    None => others.find(|other| other.is_file()).map_or_else(String::new, |other| {
                        format!(
                            "; {} is not read: write a table or JSON lines with `start`, `end` and `text`",
                            other.display()
                        )
                    }),
                };
                refuse("missing_text", refusal.detail + &hint)
            }),
            Transcript::Line(list) => {
                let found = lists.get(list).and_then(|lines| lines.get(stem(file))).cloned();
                // It existed when the folder was listed.
                found.unwrap_or_else(|| Err(refuse("missing_text", format!("{} has no such line", list.display()))))
            }
        }
    }

    fn row(&self, file: &str, text: String) -> ManifestRow {
        let names = named(file, None);
        ManifestRow {
            segment_id: names.segment_id,
            shard_id: names.shard_id.unwrap_or_else(|| file_stem(&self.root)),
            lang: language(None, &self.lang, self.folders.language(file), &text),
            text,
            source: self.source.clone(),
            wanted: self.wanted(file),
            ..ManifestRow::default()
        }
    }

    fn beside(&self, file: &str, extension: &str) -> PathBuf {
        self.root.join(file).with_extension(extension)
    }

    fn wanted(&self, file: &str) -> Wanted {
        Wanted::file(self.root.join(file))
    }
}

impl Opened for AudioFolder {
    fn decision(&self) -> Option<String> {
        self.folders.decision()
    }

    fn names(&self) -> Vec<Partition> {
        self.blocks.iter().map(|(name, _)| name.clone()).collect()
    }

    fn partitions(&self, storage: &Storage) -> Result<Vec<SourcePartition>, ManifestError> {
        let partition = |(name, files): &(Partition, Vec<Listed>)| -> Result<SourcePartition, ManifestError> {
            let wanted: Vec<Wanted> = files.iter().map(|listed| self.wanted(&listed.file)).collect();
            let mut chain = Chain::default();
            looks_of(storage, &wanted)?.iter().for_each(|look| chain.add(look));
            // The names of files count, as rows are named by them, while a renamed file has the same metadata.
            let mut names = blake3::Hasher::new();
            for listed in files {
                names.update(listed.file.as_bytes()).update(b"\0");
            }
            // Each list once.
            let (mut texts, mut lists) = (Vec::new(), HashSet::new());
            for listed in files {
                match &listed.transcript {
                    Transcript::Beside(extension) => {
                        let text = self.beside(&listed.file, extension);
                        // A transcript that cannot be read makes its row a reject, not the partition.
                        if is_readable_or_missing(&text) {
                            texts.push(text);
                        }
                    }
                    Transcript::Line(list) if lists.insert(list) => texts.push(list.to_path_buf()),
                    Transcript::Line(_) | Transcript::Refused { .. } => {}
                }
            }
            Ok(SourcePartition::new(
                name.clone(),
                texts,
                format!(
                    "{} {}{}{}",
                    chain.to_hex(),
                    names.finalize().to_hex(),
                    self.folders.in_key(),
                    // Rejects name it.
                    if self.table.is_some() { " beside a table" } else { "" },
                ),
            ))
        };
        self.blocks.iter().map(partition).collect()
    }

    fn read(&self, storage: &Storage, partition: &Partition, rows: &mut Rows<'_>) -> Result<(), StageError> {
        let found = self.blocks.iter().find(|(name, _)| name == partition);
        let (_, files) = found.ok_or_else(|| StageError::failed(format!("the folder has no part {partition}")))?;
        let lists = lines_of_all(storage, files)?;
        for Listed { file, transcript } in files {
            let row = self.text(file, transcript, &lists).map(|text| self.row(file, text));
            rows.push(row, || line_values(file))?;
        }
        Ok(())
    }
}

/// The folders in a folder, in their order.
fn folders_of(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    // A folder may hold a million files: only links are looked up.
    let is_folder = |entry: &DirEntry| match entry.file_type() {
        Ok(kind) if kind.is_symlink() => entry.path().is_dir(),
        kind => kind.is_ok_and(|kind| kind.is_dir()),
    };
    let mut folders: Vec<PathBuf> = entries.filter(is_folder).map(|entry| entry.path()).collect();
    folders.sort();
    folders
}

/// The first table by Hugging Face's convention in the folder above `root` or in one of its folders, or else the only manifest in
/// `root`, whatever it is called.
fn table_nearby(root: &Path) -> Option<PathBuf> {
    let above = root.parent().map(|above| match above.as_os_str().is_empty() {
        true => PathBuf::from("."),
        false => above.to_path_buf(),
    });
    let mut folders = above.into_iter().chain(folders_of(root));
    folders
        .find_map(|folder| first_of(&folder, &TABLES))
        .or_else(|| only_manifest(root))
}

fn only_manifest(root: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(root).ok()?.flatten().map(|entry| entry.path());
    let mut manifests = entries.filter(|path| format_of_name(path).is_some() && path.is_file());
    manifests.next().filter(|_| manifests.next().is_none())
}

/// Whether a folder holds tars, or its folders do.
fn holds_tars(root: &Path) -> bool {
    let is_tar = |path: PathBuf| path.extension().is_some_and(|extension| extension == "tar");
    let mut folders = std::iter::once(root.to_path_buf()).chain(folders_of(root));
    folders.any(|folder| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).any(is_tar)
    })
}

/// The first names in a folder, for an error.
fn contents_of(folder: &Path) -> String {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| {
            let slash = if entry.path().is_dir() { "/" } else { "" };
            format!("{}{slash}", entry.file_name().to_string_lossy())
        })
        .collect();
    names.sort();
    let more = names.len().saturating_sub(SHOWN);
    names.truncate(SHOWN);
    match (names.as_slice(), more) {
        ([], _) => "nothing".into(),
        (names, 0) => names.join(", "),
        (names, more) => format!("{} and {more} more", names.join(", ")),
    }
}

fn is_readable_or_missing(path: &Path) -> bool {
    match std::fs::metadata(path) {
        Ok(found) => found.is_file() && std::fs::File::open(path).is_ok(),
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    }
}

/// The lines of all lists that these recordings have theirs in.
fn lines_of_all<'a>(
    storage: &Storage,
    files: &'a [Listed],
) -> Result<BTreeMap<&'a Arc<Path>, Lines<'a>>, ManifestError> {
    let mut wanted: BTreeMap<&Arc<Path>, Vec<&str>> = BTreeMap::new();
    for Listed { file, transcript } in files {
        if let Transcript::Line(list) = transcript {
            wanted.entry(list).or_default().push(stem(file));
        }
    }
    let mut lists = BTreeMap::new();
    for (list, utterances) in wanted {
        lists.insert(list, transcripts_of(storage, list, utterances.into_iter())?);
    }
    Ok(lists)
}
