//! The People's Speech: `train/clean.json` with a line for each session, `{"identifier", "training_data": {"duration_ms": [..],
//! "label": [..], "name": [..]}}`, and its clips in the folder `train/clean` or the tar `train/clean.tar`.

use std::io::Read;
use std::path::{Path, PathBuf};

use flow_corpus::files::label;
use flow_corpus::manifest_row::{ManifestRow, Refusal, Wanted, line_values, refuse};
use flow_corpus::names::unsafe_name;
use flow_corpus::tree;
use flow_corpus::{Corpus, LaidOut, Manifest, ManifestError, Part, ReadSettings, Take};
use flow_kind::{Partition, StageError, Storage};
use serde::Deserialize;

use super::folder_entries::{MOST_FOLDERS, entries_of};
use super::line_file::{Block, LineFile};
use super::splits::chosen;
use super::utterance::{Common, Utterance, text_of};

#[derive(Deserialize)]
struct Session {
    identifier: String,
    training_data: Clips,
}

/// Lists of equal length.
#[derive(Deserialize)]
struct Clips {
    /// In milliseconds.
    duration_ms: Vec<f64>,
    label: Vec<String>,
    name: Vec<String>,
}

/// A list of sessions.
#[derive(Clone)]
struct Subset {
    path: PathBuf,
    /// Of the file, `clean`.
    name: String,
    /// Of its folder, `train`.
    split: String,
    /// Of its clips, if it is there.
    tar: Option<PathBuf>,
}

/// Whether the first line of a file begins as that of a session.
fn has_sessions(storage: &Storage, path: &Path) -> bool {
    let mut head = Vec::new();
    let Some(file) = tree::open_head(storage, path) else {
        return false;
    };
    tree::or_note(path, file.take(1 << 12).read_to_end(&mut head));
    let head = String::from_utf8_lossy(&head);
    let has = |key: &str| head.contains(&format!("\"{key}\""));
    head.trim_start().starts_with('{') && has("identifier") && has("training_data")
}

fn subset(storage: &Storage, path: PathBuf) -> Option<Subset> {
    let is_list = path.extension().is_some_and(|extension| extension == "json") && tree::is_file(storage, &path);
    if !is_list || !has_sessions(storage, &path) {
        return None;
    }
    let absolute = tree::absolute(&path);
    let split = absolute.parent()?.file_name().unwrap_or_default();
    Some(Subset {
        name: path.file_stem()?.to_str()?.to_owned(),
        split: split.to_str()?.to_owned(),
        tar: Some(path.with_extension("tar")).filter(|tar| tree::is_file(storage, tar)),
        path,
    })
}

/// The lists of a folder and of the folders in it; or the one that `root` is.
fn subsets(storage: &Storage, root: &Path) -> Vec<Subset> {
    if tree::is_file(storage, root) {
        return subset(storage, root.to_path_buf()).into_iter().collect();
    }
    let entries = entries_of(storage, root);
    let folders = entries.folders.iter().take(MOST_FOLDERS).map(|name| root.join(name));
    let folders = std::iter::once(root.to_path_buf()).chain(folders);
    let lists = folders.flat_map(|folder| {
        let entries = entries_of(storage, &folder);
        let lists = entries.names.iter().filter(|name| name.ends_with(".json"));
        lists.map(|name| folder.join(name)).collect::<Vec<_>>()
    });
    lists.filter_map(|list| subset(storage, list)).collect()
}

pub fn detect(storage: &Storage, root: &Path) -> Option<String> {
    let first = subsets(storage, root).into_iter().next()?.path;
    Some(first.strip_prefix(root).unwrap_or(&first).display().to_string())
}

struct PeoplesSpeech {
    subsets: Vec<(Subset, LineFile, Vec<Block>)>,
    common: Common,
    told: String,
}

pub fn open(
    storage: &Storage,
    root: &Path,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let all = subsets(storage, root);
    if all.is_empty() {
        return Err(ManifestError::manifest(
            root,
            "there is no train/clean.json in it, or another list of sessions",
        ));
    }
    // `clean` is a subset, `train` the split of several.
    let is_subset = |subset: &&Subset| subset.name.eq_ignore_ascii_case(&settings.split);
    let mut wanted: Vec<Subset> = all.iter().filter(is_subset).cloned().collect();
    let mut told = None;
    if wanted.is_empty() {
        let names: Vec<&str> = all.iter().map(|subset| subset.split.as_str()).collect();
        let (places, of_splits) = chosen(&names, &settings.split, root)?;
        wanted = places.into_iter().map(|place| all[place].clone()).collect();
        told = of_splits;
    }
    let names: Vec<&str> = wanted.iter().map(|subset| subset.name.as_str()).collect();
    let told = told.map_or_else(String::new, |told| format!("; {told}"));
    let told = format!("The People's Speech; its subsets {} are read{told}", names.join(", "));
    let open = |subset: Subset| {
        let file = LineFile::open(storage, &subset.path, scratch)?;
        let blocks = file.blocks(|_, _| {})?;
        Ok((subset, file, blocks))
    };
    let corpus = PeoplesSpeech {
        subsets: wanted.into_iter().map(open).collect::<Result<_, ManifestError>>()?,
        common: Common::of(settings),
        told,
    };
    LaidOut::of(corpus, root, settings)
}

impl Subset {
    /// Where the clip of a name may be.
    fn row(&self, session: &str, (ms, text, name): (f64, &str, &str), common: &Common) -> Result<ManifestRow, Refusal> {
        if unsafe_name(name) {
            return Err(refuse("unsafe_name", format!("{name:?}")));
        }
        if !(ms.is_finite() && ms > 0.0) {
            return Err(refuse("duration_invalid", format!("{ms} ms")));
        }
        let clips = self.path.with_extension("");
        let tar_path = self.tar.as_ref().and_then(|tar| tar.to_str());
        let tar_path = tar_path.unwrap_or_default().to_owned();
        let is_in_tar = !tar_path.is_empty();
        let file_name = Path::new(name).file_stem().unwrap_or_default();
        Ok(Utterance {
            id: file_name.to_string_lossy().into_owned(),
            shard: self.name.clone(),
            text: text_of(text, "`label` is empty")?,
            folder_lang: Some("en".into()),
            duration: Some(ms / 1000.0),
            wanted: Wanted {
                files: vec![tree::join(&clips, name)],
                member: self.tar.clone().filter(|_| is_in_tar).map(|tar| (tar, name.to_owned())),
            },
            tar_member_name: if is_in_tar { name.to_owned() } else { String::new() },
            tar_path,
            extra: [("session".to_owned(), session.into())].into_iter().collect(),
            ..Utterance::default()
        }
        .row(common))
    }
}

impl PeoplesSpeech {
    fn places(&self) -> impl Iterator<Item = (usize, usize)> {
        let subsets = self.subsets.iter().enumerate();
        subsets.flat_map(|(subset, (_, _, blocks))| (0..blocks.len()).map(move |block| (subset, block)))
    }
}

fn session(line: &str) -> Result<Session, Refusal> {
    let session: Session = serde_json::from_str(line).map_err(|error| refuse("bad_json", error.to_string()))?;
    let Clips {
        duration_ms,
        label,
        name,
    } = &session.training_data;
    if duration_ms.len() != name.len() || label.len() != name.len() {
        let (of_times, of_texts) = (duration_ms.len(), label.len());
        let why = format!("{} names, {of_texts} labels and {of_times} durations", name.len());
        return Err(refuse("bad_json", why));
    }
    Ok(session)
}

impl Corpus for PeoplesSpeech {
    fn told(&self) -> String {
        self.told.clone()
    }

    fn parts(&self) -> Vec<Part> {
        let part = |(number, (subset, block)): (usize, (usize, usize))| {
            let path = &self.subsets[subset].0.path;
            Part {
                name: Partition::from(format!("{}/{block:06}", label(subset, path))),
                number,
                files: vec![path.clone()],
                looks: String::new(),
            }
        };
        self.places().enumerate().map(part).collect()
    }

    fn each(&self, storage: &Storage, part: &Part, take: &mut Take<'_>) -> Result<(), StageError> {
        let Some((place, block)) = self.places().nth(part.number) else {
            return Ok(());
        };
        let (subset, file, blocks) = &self.subsets[place];
        file.still(storage)?;
        file.lines(blocks[block], &mut |line| {
            let number = line.number;
            let found = line
                .text
                .and_then(|text| session(text).map_err(|refusal| (refusal, text.to_owned())));
            let Session {
                identifier,
                training_data,
            } = match found {
                Ok(session) => session,
                Err((refusal, text)) => return take(Some(number), Err(refusal), &|| line_values(&text)),
            };
            let Clips {
                duration_ms,
                label,
                name,
            } = training_data;
            for ((ms, text), name) in duration_ms.into_iter().zip(label).zip(name) {
                let row = subset.row(&identifier, (ms, &text, &name), &self.common);
                take(Some(number), row, &|| {
                    serde_json::json!({"identifier": identifier, "name": name, "label": text, "duration_ms": ms})
                        .to_string()
                })?;
            }
            Ok(())
        })
    }
}
