//! Common Voice, and folders with a table by Hugging Face's convention.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use flow_corpus::folder::{first_of, table_of, tables};
use flow_corpus::manifest_row::{Wanted, refuse};
use flow_corpus::text_tables::TextTables;
use flow_corpus::{LaidOut, Manifest, ManifestError, ReadSettings};
use flow_storage::Storage;
use serde_json::Map;

use flow_corpus::tree;

use super::chosen_rows::{ChosenRows, open_table};
use super::folder_entries::entries_of;
use super::line_file::LineFile;
use super::ljspeech;
use super::splits::usual;
use super::table_lines::{Heading, TableLines};
use super::utterance::{Common, Utterance, text_of};
use super::{tables_below, zip_folder};

const CLIPS: &str = "clips";
/// The table with the rows of all splits.
const VALIDATED: &str = "validated";
/// Tables of clips, and not of sentences or reports.
const OF_CLIPS: [&str; 6] = [VALIDATED, "train", "dev", "test", "other", "invalidated"];

pub fn detect(storage: &Storage, root: &Path) -> Option<String> {
    if !tree::is_folder(storage, &root.join(CLIPS)) || first_of(storage, root, &tables("")).is_some() {
        return None;
    }
    let table = OF_CLIPS
        .iter()
        .map(|name| format!("{name}.tsv"))
        .find(|name| tree::is_file(storage, &root.join(name)))?;
    Some(format!("{table} beside {CLIPS}"))
}

pub fn open(
    storage: &Storage,
    root: &Path,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let is_there = |name: &&str| tree::is_file(storage, &root.join(format!("{name}.tsv")));
    let there: Vec<&str> = OF_CLIPS.into_iter().filter(is_there).collect();
    let all_of =
        |names: &[&'static str]| -> Vec<&str> { there.iter().copied().filter(|name| names.contains(name)).collect() };
    let named = match settings.split.as_str() {
        "" | "all" if there.contains(&VALIDATED) => vec![VALIDATED],
        "" => all_of(&["train"]),
        "all" => all_of(&["train", "dev", "test"]),
        split => {
            let exact = there.iter().find(|name| **name == split);
            let named = exact.or_else(|| there.iter().find(|name| usual(name) == usual(split)));
            named.copied().into_iter().collect()
        }
    };
    if named.is_empty() {
        // Says which table to name.
        table_of(storage, root)?;
        let why = match settings.split.as_str() {
            "" => "it has no table for training".to_owned(),
            split => format!("it has no table of the split {split:?}"),
        };
        let why = format!("{why}; its tables are {}", there.join(", "));
        return Err(ManifestError::manifest(root, why));
    }
    let path = |name: &str| root.join(format!("{name}.tsv"));
    let told = format!("Common Voice, {}.tsv", named.join(".tsv, "));
    let of_tests: Vec<PathBuf> = match (named.as_slice(), settings.split.as_str()) {
        ([VALIDATED], "") => all_of(&["dev", "test"]).into_iter().map(path).collect(),
        _ => Vec::new(),
    };
    let tables = TextTables::open(
        storage,
        named.iter().map(|name| path(name)).collect(),
        Some(root),
        settings,
    )?;
    let mut of_others = HashSet::new();
    for table in &of_tests {
        add_clips(storage, table, scratch, &mut of_others)?;
    }
    if of_others.is_empty() {
        return Ok(LaidOut::of_lines(ChosenRows::all(tables, told), settings));
    }
    let told = format!(
        "{told} without the {} of {} (`split: {VALIDATED}` reads them, too)",
        match of_others.len() {
            1 => "one row".into(),
            count => format!("{count} rows"),
        },
        all_of(&["dev", "test"]).join(".tsv and ") + ".tsv"
    );
    let rows = ChosenRows::all(tables, told).without(of_tests, move |row| {
        let name = row.wanted.files.first()?.file_stem()?.to_str()?;
        of_others
            .contains(name)
            .then(|| "the recording is in the table of dev or test".into())
    });
    Ok(LaidOut::of_lines(rows, settings))
}

/// Adds the names of a table's recordings, without their endings.
fn add_clips(
    storage: &Storage,
    table: &Path,
    scratch: &Path,
    clips: &mut HashSet<String>,
) -> Result<(), ManifestError> {
    let file = LineFile::open(storage, table, scratch)?;
    let mut heading = None;
    file.blocks(|_, line| {
        let heading = match &heading {
            None => {
                heading = Some(Heading::of(line, '\t'));
                return;
            }
            Some(heading) => heading,
        };
        let fields: Vec<&str> = line.split('\t').collect();
        let name = heading.get(&fields, "path");
        if let Some(stem) = Path::new(name).file_stem().and_then(|stem| stem.to_str()) {
            clips.insert(stem.to_owned());
        }
    })?;
    Ok(())
}

pub fn detect_audio_folder(storage: &Storage, root: &Path) -> Option<String> {
    if ljspeech::is_there(storage, root) {
        return None;
    }
    let own = first_of(storage, root, &tables(""));
    let of_split =
        || first_of(storage, root, &tables("train")).filter(|_| !tree::is_folder(storage, &root.join(CLIPS)));
    let Some(table) = own.or_else(of_split) else {
        return zip_folder::detect(storage, root);
    };
    let name = table.strip_prefix(root).unwrap_or(&table);
    Some(name.display().to_string())
}

/// That of the folder of the split which `split` names, or else the table of the folder.
pub fn open_folder(
    storage: &Storage,
    root: &Path,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let table = match settings.split.as_str() {
        "" => table_of(storage, root)?,
        split => {
            let found = entries_of(storage, root);
            let names = &found.folders;
            let folder = names.iter().find(|name| *name == split);
            let folder = folder.or_else(|| names.iter().find(|name| usual(name) == usual(split)));
            let of_split = folder.and_then(|folder| first_of(storage, root, &tables(folder)));
            of_split.or_else(|| first_of(storage, root, &tables("")))
        }
    };
    if table.is_none() && zip_folder::detect(storage, root).is_some() {
        return zip_folder::open(storage, root, settings, scratch);
    }
    if table.is_none()
        && let below = tables_below::find(storage, root)?
        && !below.is_empty()
    {
        return tables_below::open(storage, root, below, settings, scratch);
    }
    let table = table.ok_or_else(|| match settings.split.as_str() {
        "" => ManifestError::manifest(root, "there is no table in it"),
        split => ManifestError::manifest(root, format!("there is no folder with a table for the split {split:?}")),
    })?;
    open_table(storage, &table, root, settings, scratch)
}

/// The table of spontaneous speech in a folder.
fn spontaneous(storage: &Storage, root: &Path) -> Option<PathBuf> {
    let found = entries_of(storage, root);
    let table = found
        .names
        .iter()
        .find(|name| name.starts_with("ss-corpus-") && name.ends_with(".tsv"))?;
    tree::is_folder(storage, &root.join("audios")).then(|| root.join(table))
}

pub fn detect_spontaneous(storage: &Storage, root: &Path) -> Option<String> {
    spontaneous(storage, root).map(|table| {
        format!(
            "{} beside audios",
            table.file_name().unwrap_or_default().to_string_lossy()
        )
    })
}

pub fn open_spontaneous(
    storage: &Storage,
    root: &Path,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let table = spontaneous(storage, root)
        .ok_or_else(|| ManifestError::manifest(root, "there is no ss-corpus-<locale>.tsv beside audios in it"))?;
    let first = LineFile::open(storage, &table, scratch)?
        .first_line()
        .unwrap_or_default();
    let heading = Heading::of(&first, '\t');
    if let Some(lacking) = ["audio_file", "transcription"].iter().find(|name| !heading.has(name)) {
        return Err(ManifestError::manifest(&table, format!("it has no column {lacking}")));
    }
    let locale = table
        .file_stem()
        .and_then(|stem| stem.to_str())
        .and_then(|stem| stem.strip_prefix("ss-corpus-"));
    let locale = locale.map(str::to_string);
    let (common, folder) = (Common::of(settings), root.join("audios"));
    let wanted_split = settings.split.clone();
    let has_splits = heading.has("split");
    let read = match wanted_split.as_str() {
        "" if has_splits => "; rows of the splits validation and test are left out (`split: all` reads them)".into(),
        "" | "all" => String::new(),
        split if has_splits => format!("; of its splits `{split}` is read"),
        split => {
            let why = format!("it has no column split, so `split: {split}` cannot be read of it");
            return Err(ManifestError::manifest(&table, why));
        }
    };
    let is_wanted = move |split: &str| match wanted_split.as_str() {
        "all" => true,
        "" => !["validation", "test"].contains(&usual(split)),
        wanted => usual(split) == usual(wanted),
    };
    let row = move |_: usize, line: &str| {
        let fields = heading.fields(line, '\t')?;
        let get = |name: &str| heading.get(&fields, name);
        let file = get("audio_file");
        if file.is_empty() || flow_corpus::names::unsafe_name(file) {
            return Err(refuse("unsafe_name", format!("{file:?}")));
        }
        if !is_wanted(get("split")) {
            let why = format!("the row is of the split {:?}", get("split"));
            return Err(flow_corpus::manifest_row::refuse_by_rule("other_split", why));
        }
        let milliseconds: Option<f64> = get("duration_ms").parse().ok();
        let mut extra = Map::new();
        let used = ["audio_file", "transcription", "duration_ms", "language"];
        for name in heading.names().filter(|name| !used.contains(name)) {
            extra.insert(name.to_string(), get(name).into());
        }
        Ok(Utterance {
            id: file.rsplit_once('.').map_or(file, |(stem, _)| stem).to_string(),
            shard: "spontaneous".into(),
            text: text_of(get("transcription"), "the row has no transcription")?,
            lang: Some(get("language").to_string()),
            lang_field: "language",
            folder_lang: locale.clone(),
            duration: milliseconds.map(|milliseconds| milliseconds / 1e3),
            wanted: Wanted::file(tree::join(&folder, file)),
            extra,
            ..Utterance::default()
        }
        .row(&common))
    };
    let told = format!("spontaneous speech of Common Voice{read}");
    LaidOut::of(
        TableLines::open(storage, &[table], true, told, scratch, row)?,
        root,
        settings,
    )
}
