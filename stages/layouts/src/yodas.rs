//! YODAS: `text/00000000.txt` with a line `UTTERANCE TEXT` for each recording in `audio/00000000.tar.gz`, once that is unpacked.

use std::path::{Path, PathBuf};

use flow_corpus::manifest_row::{Wanted, refuse};
use flow_corpus::tree;
use flow_corpus::unpacking::{misnamed, unpacking};
use flow_corpus::{LaidOut, Manifest, ManifestError, ReadSettings};
use flow_storage::Storage;

use super::folder_entries::entries_of;
use super::table_lines::TableLines;
use super::utterance::{Common, Utterance, text_of};

/// Letters of the number of a shard.
const NUMBER: usize = 8;

/// A shard: its list of texts, and what its recordings are in, without the ending.
pub struct Shard {
    pub text: PathBuf,
    audio: PathBuf,
    /// The tar, if it is there.
    tar: Option<PathBuf>,
}

/// Where a recording may be: files, a member of a tar, and the same as path and name, which are empty without a tar.
type Place = (Vec<PathBuf>, Option<(PathBuf, String)>, String, String);

impl Shard {
    pub fn name(&self) -> String {
        self.text.file_stem().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// Where the recording `name.wav` may be.
    pub fn recording(&self, name: &str) -> Place {
        let member = format!("{name}.wav");
        let (tar_path, tar_member_name) = match self.tar.as_ref().and_then(|tar| tar.to_str()) {
            Some(path) => (path.to_owned(), member.clone()),
            None => Default::default(),
        };
        let files = vec![tree::join(&self.audio, &member)];
        let tar = self.tar.clone().filter(|_| !tar_path.is_empty());
        let member = tar.map(|tar| (tar, member));
        (files, member, tar_path, tar_member_name)
    }
}

/// The shards of a folder, by their numbers.
pub fn shards(storage: &Storage, root: &Path, ending: &str) -> Vec<Shard> {
    let entries = entries_of(storage, &root.join("text"));
    let shard = |name: &String| {
        let number = name.strip_suffix(ending)?.strip_suffix('.')?;
        let is_number = number.len() == NUMBER && number.bytes().all(|byte| byte.is_ascii_digit());
        let audio = root.join("audio").join(number);
        is_number.then(|| Shard {
            text: root.join("text").join(name),
            tar: Some(audio.with_extension("tar")).filter(|tar| tree::is_file(storage, tar)),
            audio,
        })
    };
    entries.names.iter().filter_map(shard).collect()
}

/// Refuses shards whose recordings are not there, or in an archive that is packed.
pub fn unpacked(storage: &Storage, root: &Path, shards: &[Shard]) -> Result<(), ManifestError> {
    let missing = |shard: &&Shard| shard.tar.is_none() && !tree::is_folder(storage, &shard.audio);
    let Some(Shard { audio, .. }) = shards.iter().find(missing) else {
        return Ok(());
    };
    let packed = audio.with_extension("tar.gz");
    let why = match tree::is_file(storage, &packed) {
        true => {
            let command = || format!("cannot be read at places; {}", unpacking(&packed).unwrap_or_default());
            format!(
                "{} {}",
                packed.display(),
                misnamed(storage, &packed).map_or_else(command, |why| format!(": {why}"))
            )
        }
        false => format!(
            "the recordings of its texts do not exist: {} or {0}.tar",
            audio.display()
        ),
    };
    Err(ManifestError::manifest(root, why))
}

pub fn detect(storage: &Storage, root: &Path) -> Option<String> {
    let Shard { text, .. } = shards(storage, root, "txt").into_iter().next()?;
    tree::is_folder(storage, &root.join("audio"))
        .then(|| format!("text/{} beside audio", text.file_name().unwrap_or_default().display()))
}

/// The language of `hi000`, whose digits say how the subtitles were made, and which part it is.
pub fn language_of(root: &Path) -> Option<String> {
    let absolute = tree::absolute(root);
    let lang = absolute
        .file_name()?
        .to_str()?
        .trim_end_matches(|c: char| c.is_ascii_digit());
    (!lang.is_empty()).then(|| lang.to_owned())
}

pub fn open(
    storage: &Storage,
    root: &Path,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let shards = shards(storage, root, "txt");
    let files: Vec<PathBuf> = shards.iter().map(|shard| shard.text.clone()).collect();
    unpacked(storage, root, &shards)?;
    let (common, lang) = (Common::of(settings), language_of(root));
    let row = move |file: usize, line: &str| {
        let (id, text) = line.trim_start().split_once([' ', '\t']).unwrap_or((line, ""));
        if flow_corpus::names::unsafe_name(id) {
            return Err(refuse("unsafe_name", format!("{id:?}")));
        }
        let shard = &shards[file];
        let (files, member, tar_path, tar_member_name) = shard.recording(id);
        Ok(Utterance {
            id: id.to_owned(),
            shard: shard.name(),
            text: text_of(text, "the line has no text")?,
            folder_lang: lang.clone(),
            wanted: Wanted { files, member },
            tar_path,
            tar_member_name,
            ..Utterance::default()
        }
        .row(&common))
    };
    LaidOut::of(
        TableLines::open(storage, &files, false, "YODAS".into(), scratch, row)?,
        root,
        settings,
    )
}
