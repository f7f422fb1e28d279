//! VoxPopuli: `transcribed_data/<lang>/asr_train.tsv`, and recordings in folders of years (`2009/<id>.ogg`). Where there are none,
//! its annotations of whole sessions.

use std::path::{Path, PathBuf};

use flow_corpus::column_names::renamed;
use flow_corpus::manifest_row::{Wanted, refuse};
use flow_corpus::tree;
use flow_corpus::{LaidOut, Manifest, ManifestError, ReadSettings};
use flow_storage::Storage;
use serde_json::Map;

use super::folder_entries::{MOST_FOLDERS, entries_of};
use super::splits::chosen;
use super::table_lines::{Heading, TableLines, first_line};
use super::utterance::{Common, Utterance, text_of};
use super::voxpopuli_sessions;

const TEXT: &str = "normalized_text";
const OTHER_TEXT: &str = "raw_text";
/// Letters of an id that name the folder of its year.
pub const YEAR: usize = 4;

/// The tables of a folder of one language, by split.
fn tables_in(storage: &Storage, folder: &Path) -> Vec<(PathBuf, String)> {
    let entries = entries_of(storage, folder);
    let names = &entries.names;
    let table = |name: &String| {
        let split = name.strip_prefix("asr_")?.strip_suffix(".tsv")?;
        let path = folder.join(name);
        let heading = Heading::of(&first_line(storage, &path)?, '\t');
        (heading.has("id") && heading.has(OTHER_TEXT)).then(|| (path, split.to_string()))
    };
    names.iter().filter_map(table).collect()
}

/// The tables of a folder of one language, or of all below `transcribed_data`: the path, the split, the language.
fn tables(storage: &Storage, root: &Path) -> Vec<(PathBuf, String, String)> {
    let above = match root.join("transcribed_data") {
        inner if tree::is_folder(storage, &inner) => inner,
        _ => root.to_path_buf(),
    };
    let name = |folder: &Path| {
        let absolute = tree::absolute(folder);
        absolute.file_name().unwrap_or_default().to_string_lossy().into_owned()
    };
    let entries = entries_of(storage, &above);
    // A folder for each language.
    let folders = entries.folders.iter().take(MOST_FOLDERS).map(|name| above.join(name));
    let folders = std::iter::once(above.clone()).chain(folders);
    folders
        .flat_map(|folder| {
            let lang = name(&folder);
            tables_in(storage, &folder)
                .into_iter()
                .map(move |(path, split)| (path, split, lang.clone()))
        })
        .collect()
}

pub fn detect(storage: &Storage, root: &Path) -> Option<String> {
    let first = tables(storage, root).into_iter().next().map(|(path, ..)| path);
    let path = first.or_else(|| voxpopuli_sessions::tables(storage, root).into_iter().next())?;
    Some(path.file_name()?.to_string_lossy().into_owned())
}

/// The column whose texts are read, which `columns` may name; else the first of the two that there are.
///
/// # Errors
/// Where `columns` names another field.
pub fn text_column(root: &Path, settings: &ReadSettings, texts: [&str; 2]) -> Result<String, ManifestError> {
    let pairs = renamed(&settings.columns).map_err(|why| ManifestError::manifest(root, why))?;
    let [usual, other] = texts;
    if let Some((theirs, ours)) = pairs.iter().find(|(_, ours)| *ours != "text") {
        let why = format!("`columns` has {theirs}={ours}, but of VoxPopuli it says which text is read: [{other}=text]");
        return Err(ManifestError::manifest(root, why));
    }
    Ok(pairs.first().map_or(usual, |(theirs, _)| theirs).to_owned())
}

pub fn open(
    storage: &Storage,
    root: &Path,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let all = tables(storage, root);
    if all.is_empty() && !voxpopuli_sessions::tables(storage, root).is_empty() {
        return voxpopuli_sessions::open(storage, root, settings, scratch);
    }
    let names: Vec<&str> = all.iter().map(|(_, split, _)| split.as_str()).collect();
    let (places, told) = chosen(&names, &settings.split, root)?;
    let tables: Vec<(PathBuf, String, String)> = places.into_iter().map(|place| all[place].clone()).collect();
    let files: Vec<PathBuf> = tables.iter().map(|(path, ..)| path.clone()).collect();
    let headings = files.iter().map(|path| {
        let line = first_line(storage, path).ok_or_else(|| ManifestError::manifest(path, "it cannot be read"))?;
        Ok(Heading::of(&line, '\t'))
    });
    let headings = headings.collect::<Result<Vec<Heading>, ManifestError>>()?;
    let text = text_column(root, settings, [TEXT, OTHER_TEXT])?;
    if let Some((path, _)) = files.iter().zip(&headings).find(|(_, heading)| !heading.has(&text)) {
        return Err(ManifestError::manifest(
            path,
            format!("it has no column {text:?}, which `columns` names"),
        ));
    }
    let told = told.map_or_else(String::new, |told| format!("; {told}"));
    let told = format!("VoxPopuli; texts are of the column {text}{told}");
    let common = Common::of(settings);
    let row = move |file: usize, line: &str| {
        let heading = &headings[file];
        let fields = heading.fields(line, '\t')?;
        let get = |name: &str| heading.get(&fields, name);
        let id = get("id");
        if id.is_empty() || flow_corpus::names::unsafe_name(id) {
            return Err(refuse("unsafe_name", format!("{id:?}")));
        }
        let year: String = id.chars().take(YEAR).collect();
        let (table, split, lang) = &tables[file];
        let folder = table.parent().unwrap_or(Path::new(""));
        let mut extra = Map::new();
        for name in heading
            .names()
            .filter(|name| ![text.as_str(), "id", "split"].contains(name))
        {
            let key = if name == "speaker_id" { "speaker" } else { name };
            extra.insert(key.to_string(), get(name).into());
        }
        Ok(Utterance {
            id: id.to_string(),
            shard: format!("{lang}_{split}"),
            text: text_of(get(&text), &text)?,
            folder_lang: super::utterance::language_called(lang).map(str::to_string),
            wanted: Wanted::file(folder.join(year).join(format!("{id}.ogg"))),
            extra,
            ..Utterance::default()
        }
        .row(&common))
    };
    LaidOut::of(
        TableLines::open(storage, &files, true, told, scratch, row)?,
        root,
        settings,
    )
}
