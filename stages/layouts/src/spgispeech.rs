//! SPGISpeech: `train.csv`, with bars between the fields and without quotes, beside the folder `train` of its recordings; `val` the
//! same.

use std::path::{Path, PathBuf};

use flow_corpus::manifest_row::{Wanted, refuse};
use flow_corpus::naming::named;
use flow_corpus::tree;
use flow_corpus::{LaidOut, Manifest, ManifestError, ReadSettings, file_stem};
use flow_storage::Storage;

use super::splits::{chosen, refuse_other};
use super::table_lines::{TableLines, fields, first_line};
use super::utterance::{Common, Utterance, text_of};

const HEADING: [&str; 3] = ["wav_filename", "wav_filesize", "transcript"];
const SPLITS: [&str; 3] = ["train", "val", "test"];

fn is_table(storage: &Storage, path: &Path) -> bool {
    let is_table = |line: String| line.split('|').map(str::trim).eq(HEADING);
    tree::is_file(storage, path) && first_line(storage, path).is_some_and(is_table)
}

/// The tables of a folder, or the one that is named.
fn tables(storage: &Storage, root: &Path) -> Vec<PathBuf> {
    let all = match tree::is_folder(storage, root) {
        true => SPLITS.map(|split| root.join(format!("{split}.csv"))).to_vec(),
        false if root.extension().is_some_and(|extension| extension == "csv") => vec![root.to_path_buf()],
        false => Vec::new(),
    };
    all.into_iter().filter(|table| is_table(storage, table)).collect()
}

pub fn detect(storage: &Storage, root: &Path) -> Option<String> {
    let table = tables(storage, root).into_iter().next()?;
    let name = table.file_name()?.to_string_lossy();
    Some(format!("{name} with {}", HEADING.join("|")))
}

pub fn open(
    storage: &Storage,
    root: &Path,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let all = tables(storage, root);
    if all.is_empty() {
        let why = format!("there is no train.csv with the heading {}", HEADING.join("|"));
        return Err(ManifestError::manifest(root, why));
    }
    let (tables, told) = match tree::is_folder(storage, root) {
        true => {
            let names: Vec<String> = all.iter().map(|table| file_stem(table)).collect();
            let (places, told) = chosen(&names, &settings.split, root)?;
            let tables: Vec<PathBuf> = places.into_iter().map(|place| all[place].clone()).collect();
            (tables, told.map_or_else(String::new, |told| format!("; {told}")))
        }
        false => {
            refuse_other(&file_stem(root), &settings.split, root)?;
            (all, String::new())
        }
    };
    let common = Common::of(settings);
    // Recordings are in the folder of the split, which may also be that of the table.
    let folders = |table: &PathBuf| {
        let folder = table.parent().unwrap_or(Path::new("")).to_path_buf();
        [folder.join(file_stem(table)), folder]
    };
    let folders: Vec<[PathBuf; 2]> = tables.iter().map(folders).collect();
    let row = move |file: usize, line: &str| {
        let fields = fields(line, '|', HEADING.len())?;
        let name = fields[0].trim();
        if name.is_empty() || flow_corpus::names::unsafe_name(name) {
            return Err(refuse("unsafe_name", format!("{name:?}")));
        }
        if fields.len() > HEADING.len() {
            let why = format!("{} fields in place of {}", fields.len(), HEADING.len());
            return Err(refuse("bad_line", why));
        }
        let names = named(name, None);
        Ok(Utterance {
            id: names.segment_id,
            shard: names.shard_id.unwrap_or_default(),
            text: text_of(fields[2], "the line has no transcript")?,
            folder_lang: Some("en".into()),
            wanted: Wanted {
                files: folders[file].iter().map(|folder| tree::join(folder, name)).collect(),
                member: None,
            },
            ..Utterance::default()
        }
        .row(&common))
    };
    let told = format!("SPGISpeech{told}");
    LaidOut::of(
        TableLines::open(storage, &tables, true, told, scratch, row)?,
        root,
        settings,
    )
}
