//! Lists recordings that users name: files, folders, and patterns.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use flow_kind::glob::path_fits;
use flow_kind::{Shared, StageError};
use flow_storage::{Location, ObjectUrl, Storage, StorageError, is_url};

/// A recording, and the name of result files about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recording {
    /// The name of its transcripts and other results, without their ending: its path below the named folder, without
    /// its own ending, with `/` between folders.
    pub name: String,
    /// The same path with its ending.
    pub file: String,
    /// Its path; the file may not exist.
    pub path: PathBuf,
}

/// Endings of files that are taken from folders, including formats that cannot be decoded, which are reported to the
/// user.
const ENDINGS: [&str; 32] = [
    "3g2", "3gp", "aac", "aif", "aifc", "aiff", "amr", "bw64", "caf", "flac", "m4a", "m4b", "m4r", "m4v", "mka", "mkv",
    "mov", "mp2", "mp3", "mp4", "mpga", "oga", "ogg", "opus", "rf64", "spx", "w64", "wav", "wave", "weba", "webm",
    "wma",
];

/// Those of films, which may be beside their sound.
const OF_FILMS: [&str; 7] = ["3g2", "3gp", "m4v", "mkv", "mov", "mp4", "webm"];

/// Whether a name with this ending is one of a film.
pub fn is_of_film(ending: &str) -> bool {
    OF_FILMS.iter().any(|known| ending.eq_ignore_ascii_case(known))
}

/// Whether a folder is one that programs put beside what people have.
pub fn is_of_program(folder: &OsStr) -> bool {
    ["__MACOSX", ".ipynb_checkpoints", "lost+found"]
        .iter()
        .any(|known| folder == *known)
}

/// Whether a file or folder is not looked at where the folder that it is in is named.
pub fn is_passed_over(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b".") || is_of_program(name)
}

/// Whether a name with this ending is one of a recording.
pub fn is_of_recording(ending: &str) -> bool {
    ENDINGS.iter().any(|known| ending.eq_ignore_ascii_case(known))
}

/// Endings of result files: a result for `talk.json` must not overwrite it. One list for all stages, so that a
/// recording has the same name in each.
pub const ENDINGS_OF_RESULTS: [&str; 9] = ["txt", "json", "srt", "vtt", "tsv", "ctm", "jsonl", "parquet", "rttm"];

/// Why recordings cannot be listed: what is wrong with the setting `input`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ListingError(String);

impl From<ListingError> for StageError {
    fn from(error: ListingError) -> Self {
        StageError::setting("input", error)
    }
}

type Result<T> = std::result::Result<T, ListingError>;

/// The recordings that `input` names, sorted by name. Each text is a file (whatever its ending; it need not be there), a
/// folder (all its files with an extension of audio, also in its subfolders, without hidden ones), or, where
/// there is nothing of that name, a pattern: `*` and `?` match parts of a name, `**` matches folders.
///
/// A URL of object storage is an object, whatever its ending, a prefix (all its objects with an extension of audio), or
/// a pattern of `*` and `**`.
///
/// Names have no ending, unless two recordings would then have one name, or the ending is one of [`ENDINGS_OF_RESULTS`].
/// What is named twice is taken once.
///
/// # Errors
/// If a folder or prefix has no recording or cannot be read, a pattern fits nothing, or two recordings have the same path below
/// different folders.
pub fn recordings(storage: &Storage, input: &[String]) -> Result<Vec<Recording>> {
    let mut found = BTreeMap::new();
    for text in input {
        let wrong = ListingError;
        if text.is_empty() {
            return Err(wrong("a name is empty".to_owned()));
        }
        let path = match is_url(text).then(|| Location::parse(text)).transpose() {
            Ok(None) => PathBuf::from(text),
            Ok(Some(Location::Local(path))) => path,
            Ok(Some(Location::Object(url))) => {
                add(&mut found, objects(storage, &url)?)?;
                continue;
            }
            Err(error) => return Err(wrong(error.to_string())),
        };
        let path = path.as_path();
        if path.is_dir() {
            let mut files = files_below(path)?;
            files.retain(|(file, _)| has_ending_of_audio(file));
            if files.is_empty() {
                return Err(wrong(format!("{text} holds no recording ({})", ENDINGS.join(", "))));
            }
            add(&mut found, files)?;
        } else if path.symlink_metadata().is_ok() || !text.contains(['*', '?']) {
            let name = path
                .file_name()
                .ok_or_else(|| wrong(format!("`{text}` names no file")))?;
            add(&mut found, vec![(text_of(name), path.to_owned())])?;
        } else {
            let files = fitting(path)?;
            if files.is_empty() {
                return Err(wrong(format!("nothing fits `{text}`")));
            }
            add(&mut found, files)?;
        }
    }
    Ok(named(found))
}

/// The same, cached while the result is in use: the workers of a run share it.
///
/// # Errors
/// As [`recordings`].
pub fn shared_recordings(storage: &Storage, input: &[String]) -> Result<Arc<Vec<Recording>>> {
    static LISTED: Shared<Vec<String>, Vec<Recording>> = Shared::new();
    LISTED.get(input.to_owned(), || recordings(storage, input))
}

type Found = BTreeMap<String, PathBuf>;

fn add(found: &mut Found, files: Files) -> Result<()> {
    for (file, path) in files {
        let Some(standing) = found.insert(file.clone(), path.clone()) else {
            continue;
        };
        let real = |path: &Path| path.canonicalize().ok();
        if standing != path && (real(&standing).is_none() || real(&standing) != real(&path)) {
            let why = format!(
                "{} and {} would both be `{file}`: name the folder that holds both",
                standing.display(),
                path.display()
            );
            return Err(ListingError(why));
        }
    }
    Ok(())
}

/// Whether the name of a file has an ending of audio.
pub fn has_ending_of_audio(file: &str) -> bool {
    let ending = Path::new(file)
        .extension()
        .map(|ending| ending.to_string_lossy().to_lowercase());
    ending.is_some_and(|ending| ENDINGS.contains(&ending.as_str()))
}

/// How many files of the folders that `input` names are not taken for recordings, by their endings in small letters. Results and texts
/// are not counted, as they may be beside recordings. A folder that cannot be listed counts for nothing: [`recordings`] says so.
pub fn left_out(input: &[String]) -> BTreeMap<String, u64> {
    let mut endings = BTreeMap::new();
    for folder in input.iter().filter(|text| !is_url(text)).map(Path::new) {
        let files = match folder.is_dir() {
            true => files_below(folder).unwrap_or_default(),
            false => continue,
        };
        for (file, _) in files.iter().filter(|(file, _)| !has_ending_of_audio(file)) {
            let ending = Path::new(file).extension();
            let ending = ending
                .map(|ending| ending.to_string_lossy().to_lowercase())
                .unwrap_or_default();
            if !ENDINGS_OF_RESULTS.contains(&ending.as_str()) {
                *endings.entry(ending).or_default() += 1;
            }
        }
    }
    endings
}

/// Files with their paths below the folder that was named.
type Files = Vec<(String, PathBuf)>;

/// All files below a folder that are not hidden, nor in folders of programs ([`is_of_program`]). A folder that several links lead to is looked into once.
fn files_below(top: &Path) -> Result<Files> {
    let mut files = Vec::new();
    walk(top, top, &mut HashSet::new(), &mut files)?;
    Ok(files)
}

fn walk(top: &Path, folder: &Path, seen: &mut HashSet<PathBuf>, files: &mut Files) -> Result<()> {
    let failed = |error: std::io::Error| ListingError(format!("{} cannot be listed: {error}", folder.display()));
    if !seen.insert(folder.canonicalize().map_err(failed)?) {
        return Ok(());
    }
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let path = entry.path();
        if is_passed_over(&entry.file_name()) {
            continue;
        }
        if path.is_dir() {
            walk(top, &path, seen, files)?;
        } else {
            files.push((relative(top, &path), path));
        }
    }
    Ok(())
}

/// The recordings that a URL names, with their names below the prefix.
fn objects(storage: &Storage, url: &ObjectUrl) -> Result<Files> {
    let failed = |error: StorageError| ListingError(error.to_string());
    let path = |url: &ObjectUrl| PathBuf::from(url.to_string());
    let mut top = url.clone();
    while top.key().contains('*')
        && let Some(parent) = top.parent()
    {
        top = parent;
    }
    let pattern = url.below(&top).filter(|_| top != *url);
    if pattern.is_none() && !url.key().is_empty() && storage.look(url).map_err(failed)?.is_some() {
        return Ok(vec![(url.name().to_owned(), path(url))]);
    }
    let mut files = Vec::new();
    for entry in storage.list_and_remember(&top).map_err(failed)?.iter() {
        let below = entry.url.below(&top).unwrap_or_default();
        let fits = match pattern {
            Some(pattern) => path_fits(pattern, below),
            None => has_ending_of_audio(below),
        };
        if !fits || below.split('/').any(|part| is_passed_over(part.as_ref())) {
            continue;
        }
        files.push((below.to_owned(), path(&entry.url)));
    }
    match (files.is_empty(), pattern) {
        (false, _) => Ok(files),
        (true, Some(_)) => Err(ListingError(format!("nothing fits `{url}`"))),
        (true, None) => Err(ListingError(format!(
            "{url}: there is no such object, and no recording below it ({})",
            ENDINGS.join(", ")
        ))),
    }
}

/// A name as a text: bytes that are no UTF-8 are written as `%FF`, so that two such names differ.
fn text_of(name: &OsStr) -> String {
    let mut text = String::with_capacity(name.len());
    for chunk in name.as_encoded_bytes().utf8_chunks() {
        text.push_str(chunk.valid());
        text.extend(chunk.invalid().iter().map(|byte| format!("%{byte:02X}")));
    }
    text
}

/// The path below `top`, with `/` between its parts.
fn relative(top: &Path, path: &Path) -> String {
    let below = path.strip_prefix(top).unwrap_or(path);
    let parts = below.components().filter_map(|part| match part {
        Component::Normal(name) => Some(text_of(name)),
        _ => None,
    });
    parts.collect::<Vec<_>>().join("/")
}

/// The files that fit a pattern, with their paths below its folders that have no wildcard.
fn fitting(pattern: &Path) -> Result<Files> {
    let has_wildcard = |part: &Component| part.as_os_str().to_string_lossy().contains(['*', '?']);
    let parts: Vec<Component> = pattern.components().collect();
    let first = parts.iter().position(has_wildcard).unwrap_or(parts.len());
    let mut top: PathBuf = parts[..first].iter().collect();
    if top.as_os_str().is_empty() {
        top = PathBuf::from(".");
    }
    let wanted: Vec<_> = parts[first..]
        .iter()
        .map(|part| part.as_os_str().to_string_lossy())
        .collect();
    let wanted = wanted.join("/");
    if !top.is_dir() {
        return Ok(Vec::new());
    }
    let mut files = files_below(&top)?;
    files.retain(|(file, _)| path_fits(&wanted, file));
    Ok(files)
}

fn named(found: Found) -> Vec<Recording> {
    let stem = |file: &String| {
        let (folder, name) = file
            .rsplit_once('/')
            .map_or(("", file.as_str()), |(folder, name)| (folder, name));
        let ending = Path::new(name)
            .extension()
            .map(|ending| ending.to_string_lossy().to_lowercase());
        if ending.is_some_and(|ending| ENDINGS_OF_RESULTS.contains(&ending.as_str())) {
            return file.clone();
        }
        let stem = Path::new(name).file_stem().unwrap_or_default().to_string_lossy();
        if folder.is_empty() {
            stem.into_owned()
        } else {
            format!("{folder}/{stem}")
        }
    };
    let mut recordings: Vec<Recording> = found
        .into_iter()
        .map(|(file, path)| Recording {
            name: stem(&file),
            file,
            path,
        })
        .collect();
    // A name with its ending may be equal to the stem of another one, which then keeps its ending, too.
    loop {
        let mut count: HashMap<String, usize> = HashMap::new();
        for recording in &recordings {
            *count.entry(recording.name.clone()).or_default() += 1;
        }
        let mut changed = false;
        for recording in &mut recordings {
            if count[&recording.name] > 1 && recording.name != recording.file {
                recording.name.clone_from(&recording.file);
                changed = true;
            }
        }
        if !changed {
            break;
        }
    }
    recordings.sort_by(|a, b| a.name.cmp(&b.name));
    recordings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for file in files {
            let path = folder.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, b"x").unwrap();
        }
        folder
    }

    fn names(folder: &Path, input: &[&str]) -> Result<Vec<String>> {
        let input: Vec<String> = input
            .iter()
            .map(|text| folder.join(text).to_string_lossy().into_owned())
            .collect();
        Ok(recordings(&Storage::default(), &input)?
            .into_iter()
            .map(|recording| recording.name)
            .collect())
    }

    #[test]
    fn folders_keep_their_shape_and_only_audio_is_taken_of_them() {
        let place = tree(&[
            "talks/b.wav",
            "talks/2024/a.MP3",
            "talks/notes.txt",
            "talks/.hidden.wav",
            "talks/.flow/x.wav",
            "talks/._b.wav",
            "talks/__MACOSX/talks/b.wav",
            "talks/2024/.ipynb_checkpoints/a-checkpoint.mp3",
            "talks/lost+found/1.wav",
            "talks/2024/old.opus",
            "talks/2024/phone.3gp",
            "empty/readme.md",
        ]);
        let root = place.path();
        assert_eq!(
            names(root, &["talks"]).unwrap(),
            ["2024/a", "2024/old", "2024/phone", "b"]
        );
        // A named file is taken whatever its ending, even if it does not exist; duplicates count once.
        assert_eq!(
            names(root, &["talks/notes.txt", "talks/b.wav", "talks/b.wav", "gone.flac"]).unwrap(),
            ["b", "gone", "notes.txt"]
        );
        let error = names(root, &["empty"]).unwrap_err().to_string();
        assert!(error.contains("holds no recording"), "{error}");
        assert!(recordings(&Storage::default(), &[String::new()]).is_err());
    }

    #[test]
    fn files_that_are_left_out_are_counted_by_their_endings() {
        let place = tree(&[
            "talks/b.wav",
            "talks/b.txt",
            "talks/t.ac3",
            "talks/x/u.AC3",
            "talks/x/raw",
            "talks/.DS_Store",
        ]);
        let input = [place.path().join("talks"), place.path().join("talks/t.ac3")];
        let counted = left_out(&input.map(|path| path.to_string_lossy().into_owned()));
        assert_eq!(counted, BTreeMap::from([("ac3".to_owned(), 2), (String::new(), 1)]));
    }

    #[test]
    fn what_is_shared_is_listed_once_while_it_is_held() {
        let place = tree(&["a.wav"]);
        let input = [place.path().to_string_lossy().into_owned()];
        let first = shared_recordings(&Storage::default(), &input).unwrap();
        fs::write(place.path().join("b.wav"), b"x").unwrap();
        let second = shared_recordings(&Storage::default(), &input).unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        drop((first, second));
        assert_eq!(shared_recordings(&Storage::default(), &input).unwrap().len(), 2);
        assert!(shared_recordings(&Storage::default(), &["gone/*.wav".to_owned()]).is_err());
    }

    #[test]
    fn names_that_would_be_one_keep_their_ending() {
        let place = tree(&["a.wav", "a.mp3", "a.wav.mp3", "b/a.wav", "c/a.wav"]);
        let root = place.path();
        assert_eq!(
            names(root, &["a.wav", "a.mp3", "a.wav.mp3"]).unwrap(),
            ["a.mp3", "a.wav", "a.wav.mp3"]
        );
        let error = names(root, &["b/a.wav", "c/a.wav"]).unwrap_err().to_string();
        assert!(error.contains("would both be `a.wav`"), "{error}");
        assert_eq!(
            names(root, &["b", "c/a.wav"])
                .map_err(|error| error.to_string())
                .unwrap_err(),
            error
        );
    }

    #[test]
    fn patterns_fit_names_and_folders() {
        let place = tree(&["x/a1.wav", "x/a22.wav", "x/y/a3.wav", "x/b.flac", "x/a4.txt"]);
        let root = place.path();
        assert_eq!(names(root, &["x/a*.wav"]).unwrap(), ["a1", "a22"]);
        assert_eq!(names(root, &["x/a?.*"]).unwrap(), ["a1", "a4.txt"]);
        assert_eq!(names(root, &["x/**/a*.wav"]).unwrap(), ["a1", "a22", "y/a3"]);
        assert_eq!(names(root, &["*/b*"]).unwrap(), ["x/b"]);
        assert_eq!(names(root, &["x", "x/a1.*"]).unwrap(), names(root, &["x"]).unwrap());
        let error = names(root, &["x/*.ogg"]).unwrap_err().to_string();
        assert!(error.contains("nothing fits"), "{error}");
        let fits = path_fits;
        assert!(fits("*a*b*", "xxaxxb") && fits("", "") && fits("**", "") && fits("a?", "aé"));
        assert!(!fits("*a*b", "xxaxxbx") && !fits("a?", "a") && !fits("", "a"));
    }

    #[test]
    #[cfg(unix)]
    fn names_that_are_no_utf8_differ() {
        use std::os::unix::ffi::OsStrExt;

        let place = tree(&["x/a%FF.mp3"]);
        for name in [&b"a\xff.wav"[..], b"a\xfe.wav", b"\xe0\xa4.wav"] {
            fs::write(place.path().join("x").join(OsStr::from_bytes(name)), b"x").unwrap();
        }
        assert_eq!(
            names(place.path(), &["x"]).unwrap(),
            ["%E0%A4", "a%FE", "a%FF.mp3", "a%FF.wav"]
        );
    }

    #[test]
    #[cfg(unix)]
    fn a_link_that_leads_back_ends() {
        let place = tree(&["x/a.wav"]);
        std::os::unix::fs::symlink(place.path(), place.path().join("x/back")).unwrap();
        assert_eq!(names(place.path(), &["x"]).unwrap(), ["a"]);
    }
}
