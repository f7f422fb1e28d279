//! A folder of recordings with transcripts: in files beside them, or in LibriSpeech's lists.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flow_kind::store::on_threads;
use flow_kind::{Partition, SourcePartition, StageError};
use flow_storage::{Storage, is_url};

use crate::ManifestError;
use crate::files::format_of_name;
use crate::folder_languages::FolderLanguages;
use crate::listing::{AUDIO, Listed, Transcript, list, stem};
use crate::looks::{Chain, looks_of};
use crate::manifest::Opened;
use crate::manifest_row::{ManifestRow, Refusal, Wanted, line_values, refuse};
use crate::naming::{language, named, names_all};
use crate::rows::Rows;
use crate::transcripts::{transcript, transcripts_of};
use crate::tree::{self, TreeEntry};
use crate::unpacking::{misnamed, unpacking};
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
/// Transcripts that are read at the same time, of which those in object storage are waited for; and how many are held.
const OBJECTS: usize = 16;
const HELD: usize = 128;

/// The first of some files of a folder that is there.
pub fn first_of<S: AsRef<str>>(storage: &Storage, root: &Path, names: &[S]) -> Option<PathBuf> {
    names
        .iter()
        .map(|name| root.join(name.as_ref()))
        .find(|path| tree::is_file(storage, path))
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
pub fn table_of(storage: &Storage, root: &Path) -> Result<Option<PathBuf>, ManifestError> {
    if let Some(table) = first_of(storage, root, &TABLES) {
        return Ok(Some(table));
    }
    if !tree::is_folder(storage, &root.join("clips")) {
        return Ok(first_of(storage, root, &TABLES.map(|table| format!("{TRAIN}/{table}"))));
    }
    if let Some(table) = first_of(storage, root, &COMMON_VOICE) {
        return Ok(Some(table));
    }
    let others = OF_COMMON_VOICE
        .into_iter()
        .filter(|name| tree::is_file(storage, &root.join(name)));
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

/// A folder of recordings, cut into blocks.
pub struct AudioFolder {
    root: PathBuf,
    blocks: Vec<(Partition, Vec<Listed>)>,
    lang: String,
    folders: FolderLanguages,
    /// What it was taken for, and which splits are read.
    told: String,
    source: String,
    /// A table in the folder above this one or in one of its folders, which may have the texts of recordings that lack them.
    table: Option<PathBuf>,
}

/// Transcripts of a list, by utterance.
type Lines<'f> = HashMap<&'f str, Result<String, Refusal>>;

impl AudioFolder {
    /// Of the folders right in it those named by `only`, or all. `told` is what the log says of it.
    ///
    /// # Errors
    /// When the folder cannot be read, or nothing is in it.
    pub fn open(
        storage: &Storage,
        root: &Path,
        settings: &ReadSettings,
        only: Option<&BTreeSet<String>>,
        told: String,
    ) -> Result<Self, ManifestError> {
        let blocks = list(storage, root, only)?;
        if blocks.is_empty() {
            let misnamed = [".tar", ".tar.gz", ".tgz"].iter().find_map(|ending| {
                let first = first_with(storage, root, ending)?;
                Some(ManifestError::manifest(&first, misnamed(storage, &first)?))
            });
            if let Some(misnamed) = misnamed {
                return Err(misnamed);
            }
            let packed = [".tar.gz", ".tgz", ".zip"]
                .iter()
                .find_map(|ending| first_with(storage, root, ending));
            let tars = if let Some(packed) = packed {
                format!(
                    ", but archives: recordings are read at their places in a tar, so unpack each ({})",
                    unpacking(&packed).unwrap_or_default()
                )
            } else if first_with(storage, root, ".tar").is_some() {
                ", but tars, which `audio.webdataset` reads (`manifest.read` reads them where a manifest names their members: `tars`)".to_owned()
            } else {
                String::new()
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
                    contents_of(storage, root)
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
                        .filter(|listed| !matches!(listed.transcript, Transcript::Refused(_)))
                        .map(|listed| listed.file.as_str()),
                )
            },
            blocks,
            told,
            table: table_nearby(storage, root),
            lang: settings.lang.clone(),
            source: settings.source.clone(),
        })
    }

    /// Whether a recording has a text, as far as files tell it.
    pub fn has_texts(&self, storage: &Storage) -> bool {
        let mut all = self.blocks.iter().flat_map(|(_, files)| files);
        all.any(|listed| match &listed.transcript {
            Transcript::Refused { .. } => false,
            Transcript::Line(_) => true,
            Transcript::Beside(extension) => tree::is_file(storage, &self.beside(&listed.file, extension)),
        })
    }

    fn text(
        &self,
        storage: &Storage,
        file: &str,
        place: &Transcript,
        lists: &BTreeMap<&Arc<Path>, Lines<'_>>,
    ) -> Result<String, Refusal> {
        match place {
            Transcript::Refused(refusal) => Err(refusal.as_ref().clone()),
            Transcript::Beside(extension) => transcript(storage, &self.beside(file, extension)).map_err(|refusal| {
                if refusal.reason != "missing_text" {
                    return refusal;
                }
                let above = Path::new(file).ancestors().skip(1);
                let table = above
                    .filter_map(|above| first_of(storage, &self.beyond(above), &TABLES))
                    .next();
                let mut others = OF_OTHER_PROGRAMS.iter().map(|extension| self.beside(file, extension));
                let hint = match table.as_ref().or(self.table.as_ref()) {
                    Some(table) => format!("; {} is a table: name it in place of the folder", table.display()),
                    None => others
                        .find(|other| tree::is_file(storage, other))
                        .map_or_else(String::new, |other| {
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

    /// A folder below this one, which may have no name.
    fn beyond(&self, folder: &Path) -> PathBuf {
        match folder.as_os_str().is_empty() {
            true => self.root.clone(),
            false => self.root.join(folder),
        }
    }

    fn wanted(&self, file: &str) -> Wanted {
        Wanted::file(self.root.join(file))
    }
}

impl Opened for AudioFolder {
    fn decision(&self) -> Option<String> {
        let folders = self.folders.decision().into_iter();
        Some(folders.fold(self.told.clone(), |told, folders| format!("{told}; {folders}")))
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
                        if is_readable_or_missing(storage, &text) {
                            texts.push(text);
                        }
                    }
                    Transcript::Line(list) if lists.insert(list) => texts.push(list.to_path_buf()),
                    Transcript::Line(_) | Transcript::Refused(_) => {}
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
        let threads = if is_url(&self.root) { OBJECTS } else { 1 };
        let text = |listed: &Listed| tree::answered(|| self.text(storage, &listed.file, &listed.transcript, &lists));
        for files in files.chunks(HELD) {
            for (Listed { file, .. }, text) in files.iter().zip(on_threads(files, threads, text)) {
                rows.push(text?.map(|text| self.row(file, text)), || line_values(file))?;
            }
        }
        Ok(())
    }
}

/// What is in a folder, in the order of names; nothing of one that cannot be read.
fn entries_of(storage: &Storage, folder: &Path) -> Vec<TreeEntry> {
    let mut entries = tree::entries(storage, folder).unwrap_or_default();
    entries.sort();
    entries
}

/// The first table by Hugging Face's convention in the folder above `root` or in one of its folders, or else the only manifest in
/// `root`, whatever it is called.
fn table_nearby(storage: &Storage, root: &Path) -> Option<PathBuf> {
    let above = tree::folder_above(root).map(|above| match above.as_os_str().is_empty() {
        true => PathBuf::from("."),
        false => above.to_path_buf(),
    });
    let entries = entries_of(storage, root);
    let inner = entries.iter().filter(|entry| entry.is_folder);
    let mut folders = above.into_iter().chain(inner.map(|entry| root.join(&entry.name)));
    folders
        .find_map(|folder| first_of(storage, &folder, &TABLES))
        .or_else(|| only_manifest(storage, root, &entries))
}

fn only_manifest(storage: &Storage, root: &Path, entries: &[TreeEntry]) -> Option<PathBuf> {
    let files = entries.iter().filter(|entry| !entry.is_folder);
    let mut manifests = files
        .map(|entry| root.join(&entry.name))
        .filter(|path| format_of_name(path).is_some() && tree::is_file(storage, path));
    manifests.next().filter(|_| manifests.next().is_none())
}

/// The first file with this ending in a folder, or in its folders.
fn first_with(storage: &Storage, root: &Path, ending: &str) -> Option<PathBuf> {
    let is_one = |entry: &&TreeEntry| !entry.is_folder && entry.name.as_encoded_bytes().ends_with(ending.as_bytes());
    let entries = entries_of(storage, root);
    let own = entries.iter().find(is_one).map(|entry| root.join(&entry.name));
    let of_folder = |folder: PathBuf| {
        let entries = entries_of(storage, &folder);
        entries.iter().find(is_one).map(|entry| folder.join(&entry.name))
    };
    let mut inner = entries.iter().filter(|entry| entry.is_folder);
    own.or_else(|| inner.find_map(|entry| of_folder(root.join(&entry.name))))
}

/// The first names in a folder, for an error.
fn contents_of(storage: &Storage, folder: &Path) -> String {
    let entries = entries_of(storage, folder);
    let shown = entries.iter().take(SHOWN).map(|entry| {
        let slash = if entry.is_folder { "/" } else { "" };
        format!("{}{slash}", entry.name.to_string_lossy())
    });
    let names = shown.collect::<Vec<String>>().join(", ");
    match entries.len() {
        0 => "nothing".into(),
        count if count <= SHOWN => names,
        count => format!("{names} and {} more", count - SHOWN),
    }
}

/// Objects that cannot be read are told when their rows are made.
fn is_readable_or_missing(storage: &Storage, path: &Path) -> bool {
    if is_url(path) {
        return tree::is_file(storage, path);
    }
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
