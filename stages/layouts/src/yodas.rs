//! YODAS: `text/00000000.txt` with a line `UTTERANCE TEXT` for each recording in `audio/00000000.tar.gz`, once that is unpacked.

use std::path::{Path, PathBuf};

use flow_corpus::manifest_row::{Wanted, refuse};
use flow_corpus::{ManifestError, ReadSettings};

use super::table_lines::TableLines;
use super::utterance::{Common, Utterance, text_of};
use super::{LaidOut, Manifest, entries_of, wrong};

/// Letters of the number of a shard.
const NUMBER: usize = 8;

/// The shards of a folder, by their numbers: lists of texts, and what the recordings are in.
fn shards(root: &Path) -> Vec<(PathBuf, PathBuf)> {
    let entries = entries_of(&root.join("text"));
    let shard = |name: &String| {
        let number = name.strip_suffix(".txt")?;
        let is_number = number.len() == NUMBER && number.bytes().all(|byte| byte.is_ascii_digit());
        is_number.then(|| (root.join("text").join(name), root.join("audio").join(number)))
    };
    entries.names.iter().filter_map(shard).collect()
}

pub fn detect(root: &Path) -> Option<String> {
    let (text, _) = shards(root).into_iter().next()?;
    root.join("audio")
        .is_dir()
        .then(|| format!("text/{} beside audio", text.file_name().unwrap_or_default().display()))
}

/// The language of `hi000`, whose digits say how the subtitles were made, and which part it is.
fn language_of(root: &Path) -> Option<String> {
    let absolute = std::path::absolute(root).ok()?;
    let lang = absolute
        .file_name()?
        .to_str()?
        .trim_end_matches(|c: char| c.is_ascii_digit());
    (!lang.is_empty()).then(|| lang.to_owned())
}

pub fn open(root: &Path, settings: &ReadSettings, scratch: &Path) -> Result<Manifest, ManifestError> {
    let shards = shards(root);
    let files: Vec<PathBuf> = shards.iter().map(|(text, _)| text.clone()).collect();
    if let Some((_, audio)) = shards
        .iter()
        .find(|(_, audio)| !audio.is_dir() && !audio.with_extension("tar").is_file())
    {
        let packed = audio.with_extension("tar.gz");
        let why = match packed.is_file() {
            true => format!("{} cannot be read at places: unpack it with gunzip", packed.display()),
            false => format!(
                "the recordings of its texts are not there: {} or {0}.tar",
                audio.display()
            ),
        };
        return Err(wrong(root, why));
    }
    let (common, lang) = (Common::of(settings), language_of(root));
    let row = move |file: usize, line: &str| {
        let (id, text) = line.trim_start().split_once([' ', '\t']).unwrap_or((line, ""));
        if flow_corpus::names::unsafe_name(id) {
            return Err(refuse("unsafe_name", format!("{id:?}")));
        }
        let (list, audio) = &shards[file];
        let tar = audio.with_extension("tar");
        let member = format!("{id}.wav");
        let (tar_path, tar_member_name) = match tar.to_str().filter(|_| tar.is_file()) {
            Some(path) => (path.to_owned(), member.clone()),
            None => Default::default(),
        };
        Ok(Utterance {
            id: id.to_owned(),
            shard: list.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
            text: text_of(text, "the line has no text")?,
            folder_lang: lang.clone(),
            wanted: Wanted {
                files: vec![audio.join(&member)],
                member: (!tar_path.is_empty()).then_some((tar, member)),
            },
            tar_path,
            tar_member_name,
            ..Utterance::default()
        }
        .row(&common))
    };
    LaidOut::of(
        TableLines::open(&files, false, "YODAS".into(), scratch, row)?,
        root,
        settings,
    )
}
