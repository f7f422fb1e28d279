//! The kind `tokenizer.read`.

use std::path::{Path, PathBuf};

use flow_hub::HubReference;
use flow_kind::store::path_in_set;
use flow_kind::{
    Body, Context, InputPort, Inputs, Kind, Out, OutputPort, Partition, Secret, Shape, Source, SourcePartition,
    StageError, read_regular_file,
};
use flow_model::checkpoint::{OpenModel, TOKENIZER_FILE};
use flow_model::tokenizer::Tokenizer;
use flow_storage::is_url;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::checkpoint;
use crate::checkpoint::bucket::{Wanted, local_root};
use crate::error::TrainingError;
use crate::init::{fetch_for_stage, not_there};
use crate::train_tokenizer::{tokenizer_of_model, tokenizer_port, tokenizer_row};

/// Reads the tokenizer that a model is trained with.
///
/// # What it does
///
/// Gives one row, as `tokenizer.train` does: the tokenizer that `training.train` uses with the same settings, for
/// stages before it that need to tokenize texts ([tokenizer.limit](tokenizer.limit.md)).
///
/// # Example
///
/// ```yaml
/// pieces: {uses: tokenizer.read, with: {init: model.nemo}}
/// rows:
///   uses: tokenizer.limit
///   from: {rows: manifest/split.train, tokenizer: pieces}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ReadTokenizerSettings {
    /// The model that training begins from: `none`, a `.nemo` archive, a model folder, a Hugging Face folder, or a model of
    /// the hub, which is downloaded when this stage runs (training then finds it in the cache). Of a URL of object storage a
    /// copy is kept on this machine.
    pub init: String,
    /// Path of a SentencePiece `.model` that replaces that of `init`. Empty: none.
    pub tokenizer: String,
    /// Path of the `.model` with `init: none` where `tokenizer` is empty.
    pub from_nothing: String,
    /// Folder of the checkpoints of the training. If it has one that began from `init`, the tokenizer of that is used,
    /// and `init` itself is neither downloaded nor needed.
    pub checkpoints: String,
    /// A token for the Hugging Face hub, from a parameter with `secret: true`. Default: `HF_TOKEN`, or the token that
    /// `hf auth login` stored.
    pub hub_token: Option<Secret>,
}

impl Default for ReadTokenizerSettings {
    fn default() -> Self {
        ReadTokenizerSettings {
            init: "none".into(),
            tokenizer: String::new(),
            from_nothing: String::new(),
            checkpoints: String::new(),
            hub_token: None,
        }
    }
}

/// Where a tokenizer is read from.
enum Origin {
    /// A SentencePiece `.model`, and the setting that names it.
    File(PathBuf, &'static str),
    Model(PathBuf),
    Hub(HubReference),
}

impl ReadTokenizerSettings {
    fn source(&self) -> Result<Origin, StageError> {
        if !self.tokenizer.is_empty() {
            return Ok(Origin::File(PathBuf::from(&self.tokenizer), "tokenizer"));
        }
        if self.init == "none" {
            if self.from_nothing.is_empty() {
                let message = "with `init: none` a SentencePiece .model is needed";
                return Err(StageError::setting("from_nothing", message));
            }
            return Ok(Origin::File(PathBuf::from(&self.from_nothing), "from_nothing"));
        }
        Ok(
            match HubReference::parse(&self.init)
                .transpose()
                .map_err(TrainingError::from)?
            {
                Some(reference) => Origin::Hub(reference),
                None => Origin::Model(PathBuf::from(&self.init)),
            },
        )
    }
}

/// The kind `tokenizer.read`.
pub struct ReadTokenizer;

impl Kind for ReadTokenizer {
    const NAME: &'static str = "tokenizer.read";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("tokenizer", "the files of the tokenizer")];
    const URL_SETTINGS: &'static [(&'static str, flow_kind::UrlUse)] = &[
        ("checkpoints", flow_kind::UrlUse::Read),
        ("init", flow_kind::UrlUse::Read),
        ("tokenizer", flow_kind::UrlUse::Read),
        ("from_nothing", flow_kind::UrlUse::Read),
    ];
    type Settings = ReadTokenizerSettings;

    fn shape(settings: &ReadTokenizerSettings, _: &Inputs) -> Result<Shape, StageError> {
        settings.source()?;
        Ok(Shape::source(vec![tokenizer_port()]))
    }

    fn sources(settings: &ReadTokenizerSettings) -> Vec<(&'static str, PathBuf)> {
        match settings.source() {
            Ok(Origin::File(path, setting)) => vec![(setting, path)],
            // The tokenizer of a checkpoint may be used instead.
            Ok(Origin::Model(path)) if !is_url(&settings.checkpoints) && !Path::new(&settings.checkpoints).exists() => {
                vec![("init", path)]
            }
            _ => Vec::new(),
        }
    }

    fn open(settings: &ReadTokenizerSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Source(Box::new(Reader {
            settings: settings.clone(),
            context: context.clone(),
        })))
    }

    /// The digest of the file, not its path; for a model of the hub, its reference.
    fn identity(settings: &ReadTokenizerSettings) -> serde_json::Value {
        match settings.source() {
            Ok(Origin::Hub(reference)) => serde_json::json!({ "hub": reference.to_string() }),
            Ok(Origin::Model(_)) => serde_json::json!("model"),
            _ => serde_json::json!("file"),
        }
    }
}

struct Reader {
    settings: ReadTokenizerSettings,
    context: Context,
}

impl Source for Reader {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        let files = match self.origin()? {
            Origin::File(path, _) => vec![path],
            Origin::Model(path) if !OpenModel::exists(&path) => {
                return Err(StageError::setting("init", not_there(&self.settings.init)));
            }
            Origin::Model(path) => OpenModel::files(&path).map_err(|error| StageError::setting("init", error))?,
            Origin::Hub(_) => Vec::new(),
        };
        Ok(vec![SourcePartition::new(Partition::new("tokenizer"), files, "")])
    }

    fn read(&mut self, _: &Partition, out: &mut Out) -> Result<(), StageError> {
        let bytes = match self.origin()? {
            Origin::File(path, setting) => read_regular_file(&self.context.storage, &path).map_err(|error| {
                let message = format!("{} cannot be read: {error}", path.display());
                StageError::setting(setting, message)
            })?,
            Origin::Model(path) => tokenizer_of_model("init", &path)?,
            Origin::Hub(_) => tokenizer_of_model("init", &self.fetched()?)?,
        };
        let read = Tokenizer::from_bytes(&bytes);
        let tokenizer = read.map_err(|error| StageError::setting("tokenizer", error))?;
        out.send(0, tokenizer_row(&tokenizer)?);
        Ok(())
    }
}

impl Reader {
    /// Where the tokenizer is read from in this run: the digest of that file is then in the key, whatever `init` is.
    fn origin(&self) -> Result<Origin, StageError> {
        let origin = match self.settings.source()? {
            Origin::File(path, setting) => {
                let path =
                    path_in_set(&self.context.storage, &path).map_err(|error| StageError::setting(setting, error))?;
                Origin::File(path, setting)
            }
            other => other,
        };
        let is_elsewhere = match &origin {
            Origin::File(..) => false,
            Origin::Model(path) => !OpenModel::exists(path),
            Origin::Hub(_) => true,
        };
        match is_elsewhere.then(|| self.of_checkpoint()).transpose()?.flatten() {
            Some(path) => Ok(Origin::File(path, "checkpoints")),
            None => match origin {
                // Its digest is in the key, as that of a file of this machine.
                Origin::Model(url) if is_url(&url) => Ok(Origin::Model(self.fetched()?)),
                origin => Ok(origin),
            },
        }
    }

    /// The tokenizer of the newest checkpoint, if it is that of `init`.
    fn of_checkpoint(&self) -> Result<Option<PathBuf>, StageError> {
        if self.settings.checkpoints.is_empty() {
            return Ok(None);
        }
        let root = local_root(&self.context.storage, &self.settings.checkpoints, Wanted::NEWEST)?;
        let folder = checkpoint::current(&root)?;
        let latest = match checkpoint::latest(&folder) {
            // A damaged checkpoint; training renames it.
            Err(TrainingError::Damaged { .. }) => None,
            latest => latest?,
        };
        let of_init = latest.filter(|(_, record)| {
            let identity = &record.identity;
            identity.init == self.settings.init && identity.tokenizer.is_none()
        });
        Ok(of_init.map(|(standing, _)| standing.path.join(TOKENIZER_FILE)))
    }

    /// The local path of `init`.
    fn fetched(&self) -> Result<PathBuf, StageError> {
        let ReadTokenizerSettings { init, hub_token, .. } = &self.settings;
        fetch_for_stage(&self.context, "init", init, hub_token.as_ref())
    }
}
