//! One file: its text, and the head that says what it is.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::Reader;
use crate::diagnostic::Diagnostic;
use crate::params::brief;
use crate::pipeline::FORMAT;
use crate::source::{Place, SourceFile};
use crate::yaml::{self, Mapping, Part, Steps, Value};
use flow_base::regular_file::{is_open_pipe, open_regular_file};

/// Largest file that is read, in bytes; a larger one is not a pipeline.
const MAX_BYTES: u64 = 16 << 20;

/// Most bytes of an overlay that comes through a pipe.
const MAX_PIPE_BYTES: u64 = 4 << 20;

/// The word for an overlay in messages.
pub(super) const OVERLAY: &str = "an overlay";

/// The most files of a pipeline, each counted as often as it is included.
pub(super) const MOST_DOCUMENTS: usize = 1_000;

/// A file and the map at its head.
pub(super) struct Document {
    pub source: Arc<SourceFile>,
    pub root: Mapping,
}

impl Document {
    pub fn at(&self, steps: &Steps, part: Part) -> Place {
        Place::of(&self.source, steps, part)
    }
}

impl Reader<'_> {
    /// Reads a file and checks its head: a map with `flow: 1` and no keys but `known`.
    pub(super) fn document(
        &mut self,
        path: &Path,
        named_at: Option<Place>,
        what: &str,
        known: &[&str],
    ) -> Option<Document> {
        // Files that include each other twice are doubled by each.
        self.documents += 1;
        if self.documents > MOST_DOCUMENTS {
            return None;
        }
        let text = match read_text(path, what == OVERLAY) {
            Ok(text) => text,
            Err(message) => {
                self.found.push(Diagnostic {
                    message: format!("cannot read {what} from {}: {message}", path.display()),
                    place: named_at,
                    help: None,
                });
                return None;
            }
        };
        let source = Arc::new(SourceFile::new(path.to_path_buf(), text));
        let root = match yaml::parse_text(&source.text) {
            Ok(Value::Mapping(root)) => root,
            Ok(other) => {
                self.found.push(
                    Diagnostic::new(format!(
                        "expected {what}, a map with `flow: {FORMAT}` at its head, found {}",
                        yaml::describe(&other)
                    ))
                    .at(Place::at(&source, 1, 1)),
                );
                return None;
            }
            Err(error) => {
                let (line, column) = error.at.unwrap_or((1, 1));
                let message = match error.is_doubled_key {
                    true => error.message,
                    false => format!("this is not YAML: {}", error.message),
                };
                let mut diagnostic = Diagnostic::new(message).at(Place::at(&source, line, column));
                if !error.is_doubled_key
                    && source
                        .text
                        .lines()
                        .nth(line.saturating_sub(1))
                        .is_some_and(|text| text.contains("${"))
                {
                    diagnostic = diagnostic.help("within { } or [ ] put quotes around a text that holds ${...}");
                }
                self.found.push(diagnostic);
                return None;
            }
        };
        let document = Document { source, root };
        let version = Steps::default().key("flow");
        match document.root.get("flow").map(|value| (value, value.as_u64())) {
            None => {
                self.found.push(
                    Diagnostic::new(format!("`flow: {FORMAT}` is missing"))
                        .at(Place::at(&document.source, 1, 1))
                        .help(format!("{what} begins with its format: flow: {FORMAT}")),
                );
                return None;
            }
            Some((_, Some(FORMAT))) => {}
            Some((_, Some(newer))) if newer > FORMAT => {
                let message = format!(
                    "{} is of format {newer}, and this binary reads formats up to {FORMAT}",
                    path.display()
                );
                self.wrong_with(
                    document.at(&version, Part::Value),
                    message,
                    Some("use a newer `flow`".to_string()),
                );
                return None;
            }
            Some((other, _)) => {
                self.wrong(
                    document.at(&version, Part::Value),
                    format!(
                        "`flow` must be {FORMAT}, the version of the format, found {}",
                        brief(other)
                    ),
                );
                return None;
            }
        }
        if let Some(steps) = tagged(&Value::Mapping(document.root.clone()), &Steps::default()) {
            self.wrong(
                document.at(&steps, Part::Value),
                "YAML tags (`!name`) have no meaning here".to_string(),
            );
            return None;
        }
        let known: Vec<&str> = known.iter().copied().chain(["flow"]).collect();
        self.unknown_keys(&document, &Steps::default(), &document.root, &known);
        Some(document)
    }
}

/// The first tagged value, if there is one.
fn tagged(value: &Value, steps: &Steps) -> Option<Steps> {
    match value {
        Value::Tagged(_) => Some(steps.clone()),
        Value::Sequence(items) => items
            .iter()
            .enumerate()
            .find_map(|(index, item)| tagged(item, &steps.index(index))),
        Value::Mapping(map) => map.iter().find_map(|(key, inner)| match key {
            Value::Tagged(_) => Some(steps.clone()),
            key => tagged(inner, &steps.key(key.as_str().unwrap_or_default())),
        }),
        _ => None,
    }
}

fn read_all(file: File, most: u64) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    file.take(most + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| error.to_string())?;
    if bytes.len() as u64 > most {
        return Err(format!("it is larger than {} MiB", most >> 20));
    }
    Ok(bytes)
}

/// What the shell gives as `<(...)` is read to its end, where pipes may be read.
fn read_text(path: &Path, with_pipes: bool) -> Result<String, String> {
    // In one process the path always names the same pipe, so its text can be kept.
    static PIPES: Mutex<BTreeMap<PathBuf, Vec<u8>>> = Mutex::new(BTreeMap::new());
    let bytes = if with_pipes && is_open_pipe(path) {
        // A pipe gives its bytes once, and a command may read its overlays more than once.
        let mut pipes = PIPES.lock().unwrap_or_else(PoisonError::into_inner);
        match pipes.get(path) {
            Some(bytes) => bytes.clone(),
            None => {
                let bytes = read_all(File::open(path).map_err(|error| error.to_string())?, MAX_PIPE_BYTES)?;
                pipes.insert(path.to_path_buf(), bytes.clone());
                bytes
            }
        }
    } else {
        read_all(open_regular_file(path).map_err(|error| error.to_string())?, MAX_BYTES)?
    };
    let text = String::from_utf8(bytes);
    let text = text.map_err(|error| format!("it is not UTF-8 (byte {})", error.utf8_error().valid_up_to()))?;
    // Places in messages count from behind the mark.
    Ok(yaml::without_mark(&text).to_string())
}
