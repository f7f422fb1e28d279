//! Which files of a repository make a model.

use crate::error::HubError;
use crate::reference::HubReference;

/// The most files of a safetensors model. The largest models have some hundred shards.
const MOST_FILES: usize = 1000;

/// The files of a repository that make a model.
#[derive(Debug, PartialEq)]
pub(crate) enum Selection {
    /// A `.nemo` archive, or the file that a reference names.
    File(String),
    /// All files of a safetensors model, which are in one folder.
    Folder(Vec<String>),
}

impl Selection {
    /// Paths within the repository.
    pub fn files(&self) -> &[String] {
        match self {
            Selection::File(file) => std::slice::from_ref(file),
            Selection::Folder(files) => files,
        }
    }
}

/// Selects among the files of a repository: the file that the reference names, else the `.nemo` archive, else the files
/// of a safetensors model.
///
/// # Errors
/// Where none of these is there, there are several archives, or a model has more files than any has.
pub(crate) fn select(reference: &HubReference, files: &[String]) -> Result<Selection, HubError> {
    if let Some(file) = &reference.file {
        if files.contains(file) {
            return Ok(Selection::File(file.clone()));
        }
        return Err(HubError::unavailable(
            format!("there is no file {file} in {}", reference.repository()),
            format!("it holds: {}", shown(files)),
        ));
    }
    let archives: Vec<&String> = files.iter().filter(|file| file.ends_with(".nemo")).collect();
    match archives.as_slice() {
        [one] => return Ok(Selection::File((*one).clone())),
        [] => {}
        several => {
            let names: Vec<String> = several.iter().copied().cloned().collect();
            return Err(HubError::unavailable(
                format!(
                    "{} holds several .nemo archives: {}",
                    reference.repository(),
                    shown(&names)
                ),
                format!("name the one that is meant: {}/{}", reference, names[0]),
            ));
        }
    }
    let top = |file: &&String| !file.contains('/');
    let parts = |file: &str| {
        [".safetensors", ".json", ".model", ".yaml", ".txt"]
            .iter()
            .any(|end| file.ends_with(end))
    };
    if files.iter().filter(top).any(|file| file.ends_with(".safetensors"))
        && files
            .iter()
            .any(|file| file == "config.json" || file.ends_with("_config.yaml"))
    {
        let parts: Vec<String> = files.iter().filter(top).filter(|file| parts(file)).cloned().collect();
        if parts.len() > MOST_FILES {
            return Err(HubError::unavailable(
                format!(
                    "{} has {} files beside its configuration; a model of more than {MOST_FILES} is not fetched",
                    reference.repository(),
                    parts.len()
                ),
                format!("check the name, or name the file that is meant: {reference}/FILE"),
            ));
        }
        return Ok(Selection::Folder(parts));
    }
    Err(HubError::unavailable(
        format!(
            "{} holds neither a .nemo archive nor config.json with safetensors",
            reference.repository()
        ),
        format!("it holds: {}", shown(files)),
    ))
}

fn shown(files: &[String]) -> String {
    let mut names: Vec<&str> = files.iter().take(12).map(String::as_str).collect();
    if names.is_empty() {
        names.push("nothing");
    }
    if files.len() > names.len() {
        names.push("...");
    }
    names.join(", ")
}
