//! The kind `tokenizer.write`.

use std::path::PathBuf;

use flow_runtime::{
    Artifact, Body, Conservation, Context, Export, ExportSet, Input, Kind, Reads, RejectSet, Role, Shape, StageError,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::train_tokenizer::{is_tokenizer, read_tokenizer_files};

/// Writes the files of a trained tokenizer.
///
/// # What it does
///
/// Writes the output of `tokenizer.train` as `<name>.model` and `<name>.vocab` into the folder `out`, with
/// `<name>.flow.json`, which holds their digests. SentencePiece and NeMo read both; the setting `tokenizer` of
/// `training.train` takes the path of the `.model`.
///
/// # Example
///
/// ```yaml
/// write: {uses: tokenizer.write, from: tokenizer, with: {out: work/tokenizer}}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WriteTokenizerSettings {
    /// Folder that receives the files.
    pub out: String,
    /// Their name before `.model` and `.vocab`.
    #[serde(default = "default_name")]
    pub name: String,
}

fn default_name() -> String {
    "tokenizer".into()
}

/// The kind `tokenizer.write`.
pub struct WriteTokenizer;

impl Kind for WriteTokenizer {
    const NAME: &'static str = "tokenizer.write";
    const VERSION: u32 = 1;
    type Settings = WriteTokenizerSettings;

    fn shape(settings: &WriteTokenizerSettings, inputs: &[Input]) -> Result<Shape, StageError> {
        if settings.out.trim().is_empty() {
            return Err(StageError::setting("out", "`out` names no folder"));
        }
        let plain = |c: char| c.is_alphanumeric() || matches!(c, '-' | '_' | '.');
        if settings.name.is_empty() || settings.name.starts_with('.') || !settings.name.chars().all(plain) {
            return Err(StageError::setting(
                "name",
                "`name` has letters, digits, `-`, `_` and `.` only",
            ));
        }
        let [input] = inputs else {
            return Err(StageError::Input {
                name: "from".into(),
                message: format!("tokenizer.write takes one input, it was given {}", inputs.len()),
                help: Some("from: the stage of a tokenizer.train".into()),
            });
        };
        if !is_tokenizer(&input.schema) {
            return Err(StageError::Input {
                name: input.name.clone(),
                message: "it is no output of a tokenizer.train".into(),
                help: None,
            });
        }
        Ok(Shape {
            role: Role::Export,
            reads: vec![Reads::Whole],
            outputs: Vec::new(),
            dear: false,
            conservation: Conservation::NewRows,
        })
    }

    fn open(settings: &WriteTokenizerSettings, _: &Context) -> Result<Body, StageError> {
        Ok(Body::Export(Box::new(Writer(settings.clone()))))
    }

    /// The folder is left out: the files are the same wherever they lie.
    fn identity(settings: &WriteTokenizerSettings) -> serde_json::Value {
        serde_json::json!({ "name": settings.name })
    }
}

struct Writer(WriteTokenizerSettings);

impl Export for Writer {
    fn folder(&self) -> PathBuf {
        PathBuf::from(&self.0.out)
    }

    fn manifest(&self) -> String {
        format!("{}.flow.json", self.0.name)
    }

    fn write(&mut self, inputs: &[Artifact], _: &RejectSet, set: &mut ExportSet) -> Result<(), StageError> {
        let [tokenizer] = inputs else {
            return Err(StageError::failed("one input is needed"));
        };
        let (model, vocabulary) = read_tokenizer_files(tokenizer)?;
        for (end, bytes) in [("model", model.as_slice()), ("vocab", vocabulary.as_bytes())] {
            let path = set
                .file(&format!("{}.{end}", self.0.name))
                .map_err(StageError::failed)?;
            std::fs::write(&path, bytes)
                .map_err(|error| StageError::failed(format!("cannot write {}: {error}", path.display())))?;
        }
        Ok(())
    }
}
