//! The kind `tokenizer.write`.

use std::path::PathBuf;

use flow_kind::{Body, Context, Export, ExportSet, InputPort, Inputs, Kind, OutputPort, Shape, StageError, UrlUse};
use flow_model::tokenizer::Tokenizer;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::file_set;
use crate::train_tokenizer::{TOKENIZER_COLUMNS, read_tokenizer_files};

/// Writes the files of a trained tokenizer.
///
/// # What it does
///
/// Writes the output of `tokenizer.train` as `<name>.model` and `<name>.vocab` into the folder `out`, with
/// `<name>.flow.json`, which holds their digests. SentencePiece and NeMo read both; the setting `tokenizer` of
/// `training.train` takes the path of the `.model`. Under the name `tokenizer` (the default) there is `vocab.txt` too: NeMo
/// takes no folder of a tokenizer without it.
///
/// # Example
///
/// ```yaml
/// write: {uses: tokenizer.write, from: tokenizer, with: {out: work/tokenizer}}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WriteTokenizerSettings {
    /// Folder that receives the files; may be in object storage (`s3://bucket/folder`, see docs/storage.md).
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
    const VERSION: u32 = 2;
    const INPUTS: &'static [InputPort] =
        &[InputPort::whole("tokenizer", "of a tokenizer.train or a tokenizer.read").columns(TOKENIZER_COLUMNS)];
    const OUTPUTS: &'static [OutputPort] = &[];
    const URL_SETTINGS: &'static [(&'static str, UrlUse)] = &[("out", UrlUse::Write)];
    type Settings = WriteTokenizerSettings;

    fn shape(settings: &WriteTokenizerSettings, _: &Inputs) -> Result<Shape, StageError> {
        file_set::shape(&settings.out, &settings.name)
    }

    fn open(settings: &WriteTokenizerSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Export(Box::new(Writer {
            settings: settings.clone(),
            context: context.clone(),
        })))
    }

    /// Without the folder, which does not affect the files.
    fn identity(settings: &WriteTokenizerSettings) -> serde_json::Value {
        serde_json::json!({ "name": settings.name })
    }
}

struct Writer {
    settings: WriteTokenizerSettings,
    context: Context,
}

impl Export for Writer {
    fn folder(&self) -> PathBuf {
        PathBuf::from(&self.settings.out)
    }

    fn manifest(&self) -> String {
        format!("{}.flow.json", self.settings.name)
    }

    fn write(&mut self, set: &mut ExportSet) -> Result<(), StageError> {
        let tokenizer = self.context.required("tokenizer")?;
        let (model, vocabulary) = read_tokenizer_files(tokenizer)?;
        let name = &self.settings.name;
        let mut files = vec![
            (format!("{name}.model"), model.clone()),
            (format!("{name}.vocab"), vocabulary.into_bytes()),
        ];
        if *name == default_name() {
            let tokenizer = Tokenizer::from_bytes(&model).map_err(StageError::failed)?;
            files.push(("vocab.txt".into(), tokenizer.nemo_vocabulary().into_bytes()));
        }
        for (file, bytes) in files {
            let path = set.file(&file).map_err(StageError::failed)?;
            std::fs::write(&path, bytes)
                .map_err(|error| StageError::failed(format!("cannot write {}: {error}", path.display())))?;
        }
        Ok(())
    }
}
