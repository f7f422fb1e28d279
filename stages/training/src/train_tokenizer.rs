//! The kind `tokenizer.train`.

use std::collections::{BTreeSet, BinaryHeap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, BinaryArray, Int32Array, RecordBatch, StringArray, UInt32Array};
use arrow::compute::cast;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_hub::HubReference;
use flow_kind::store::path_in_set;
use flow_kind::{
    Artifact, Body, ColumnType, Context, InputCount, InputPort, Inputs, Kind, Out, OutputPort, Partition, Port, ROW,
    ReadOnce, Secret, Shape, Source, SourcePartition, StageError, WithShared, read_regular_file,
};
use flow_model::checkpoint::OpenModel;
use flow_model::tokenizer::train::{self, Normalisation, Recipe};
use flow_model::tokenizer::{Algorithm, Tokenizer};
use flow_text::language_tag::tag_of;
use rayon::ThreadPoolBuilder;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::error::TrainingError;
use crate::init::fetch_for_stage;

/// Most language tags; more are probably not languages.
const MOST_LANGUAGES: usize = 1000;

/// Trains a SentencePiece tokenizer on the texts of a manifest.
///
/// # What it does
///
/// Reads the column `text` of every input and learns pieces by SentencePiece's algorithms. The output `tokenizer` is one row:
/// `model` (the bytes of a `.model` file, which SentencePiece and NeMo read), `vocabulary` (the text of a `.vocab` file),
/// `pieces` (their number) and `digest`. Give it to `training.train` as its input `tokenizer`, and to `tokenizer.write`, which puts
/// the files into a folder.
///
/// Piece 0 is `<unk>`, then come those of `special`, the language tags, those of `reserve`, and the learned ones. A
/// language tag is a prefix of a text of the form `<|hi|>`; each one that occurs becomes a piece that is never split.
///
/// The same rows give the same bytes, in whatever order they come and whatever the number of threads. BPE gives the pieces
/// that SentencePiece gives; unigram follows its published steps, and splits texts into about as many tokens.
///
/// # Example
///
/// ```yaml
/// tokenizer:
///   uses: tokenizer.train
///   from: manifest/split.train
///   with: {type: bpe, vocab_size: 1024}
/// train:
///   uses: training.train
///   from: {batches: load, validation: manifest/split.val, tokenizer: tokenizer}
///   with: {checkpoints: work/checkpoints}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct TrainTokenizerSettings {
    /// `bpe` merges the most frequent neighbours; `unigram` keeps the pieces that make the texts most probable.
    pub r#type: TokenizerType,
    /// Number of pieces, all kinds together. Too few for the characters of the texts, or more than the texts yield, is
    /// an error that names the possible range.
    pub vocab_size: u32,
    /// Share of all characters, counted as often as they come, that get a piece: 1.0 for all, 0.9995 where there are
    /// thousands of rare ones. The others become `<unk>`.
    pub character_coverage: f64,
    /// Make a piece of each language tag (`<|hi|>`) that a text begins with.
    pub languages: bool,
    /// Pieces that text never becomes, such as `<pad>`.
    pub special: Vec<String>,
    /// More pieces that are never split, such as tags of languages to be added later: `["<|fr|>"]`.
    pub reserve: Vec<String>,
    /// Characters without a piece become bytes, for which 256 pieces are added.
    pub byte_fallback: bool,
    /// A BPE tokenizer to learn more pieces for: a SentencePiece `.model`, or the model that holds it (a `.nemo`
    /// archive, a model folder, a Hugging Face folder, or a model of the hub, which is downloaded when this stage runs), such
    /// as the one that is to be fine-tuned. All its pieces stay, with their ids, so that the texts it was trained for are split
    /// as before; `vocab_size` counts them too. Its normalisation, `special` pieces and bytes are its own.
    pub extend: String,
    /// `nmt_nfkc` (SentencePiece's default, as in NVIDIA's models) or `identity`.
    pub normalisation: NormalisationSetting,
    /// Learn from this many texts at most, chosen by a hash of `segment_id` and text. Bounds the memory.
    pub max_sentences: u64,
    /// Longer texts, in bytes, are not learned from.
    pub max_sentence_bytes: u64,
    /// A token for the Hugging Face hub, from a parameter with `secret: true`. Default: `HF_TOKEN`, or the token that
    /// `hf auth login` stored.
    pub hub_token: Option<Secret>,
}

impl Default for TrainTokenizerSettings {
    fn default() -> Self {
        TrainTokenizerSettings {
            r#type: TokenizerType::Bpe,
            vocab_size: 1024,
            character_coverage: 1.0,
            languages: true,
            special: Vec::new(),
            reserve: Vec::new(),
            byte_fallback: false,
            extend: String::new(),
            normalisation: NormalisationSetting::NmtNfkc,
            max_sentences: 1_000_000,
            max_sentence_bytes: 4192,
            hub_token: None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TokenizerType {
    Bpe,
    Unigram,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NormalisationSetting {
    NmtNfkc,
    Identity,
}

impl TrainTokenizerSettings {
    /// The tokenizer that is to be extended, if one is.
    fn extended(&self, read: &ReadOnce<Vec<u8>>, context: &Context) -> Result<Option<Arc<Vec<u8>>>, StageError> {
        if self.extend.trim().is_empty() {
            return Ok(None);
        }
        read.get(&self.extend, || self.read_extended(context)).map(Some)
    }

    fn read_extended(&self, context: &Context) -> Result<Vec<u8>, StageError> {
        let is_file = Path::new(&self.extend)
            .extension()
            .is_some_and(|ending| ending == "model");
        let fetch = || fetch_for_stage(context, "extend", &self.extend, self.hub_token.as_ref());
        if !is_file {
            return tokenizer_of_model("extend", &fetch()?);
        }
        let path = match self.hub()? {
            Some(_) => fetch()?,
            None => PathBuf::from(&self.extend),
        };
        let read = path_in_set(&context.storage, &path).map_err(std::io::Error::other);
        let read = read.and_then(|path| read_regular_file(&context.storage, &path));
        read.map_err(|error| StageError::setting("extend", format!("cannot read {}: {error}", self.extend)))
    }

    /// The model of the hub that `extend` names, if it is one.
    fn hub(&self) -> Result<Option<HubReference>, StageError> {
        let reference = HubReference::parse(&self.extend).transpose();
        reference.map_err(|error| StageError::setting("extend", error))
    }

    fn recipe(&self, languages: &BTreeSet<String>, extends: Option<Vec<u8>>) -> Recipe {
        let mut user_defined: Vec<String> = languages.iter().cloned().collect();
        user_defined.extend(self.reserve.iter().filter(|piece| !languages.contains(*piece)).cloned());
        Recipe {
            algorithm: match self.r#type {
                TokenizerType::Bpe => Algorithm::Bpe,
                TokenizerType::Unigram => Algorithm::Unigram,
            },
            vocabulary_size: self.vocab_size as usize,
            character_coverage: self.character_coverage,
            control: self.special.clone(),
            user_defined,
            byte_fallback: self.byte_fallback,
            normalisation: match self.normalisation {
                NormalisationSetting::NmtNfkc => Normalisation::NmtNfkc,
                NormalisationSetting::Identity => Normalisation::Identity,
            },
            extends,
        }
    }

    fn check(&self) -> Result<(), StageError> {
        let refuse = |name: &str, why: &str| Err(StageError::setting(name, format!("`{name}` {why}")));
        if !(2..=1_000_000).contains(&self.vocab_size) {
            return refuse("vocab_size", "is from 2 to 1,000,000");
        }
        if !(0.9..=1.0).contains(&self.character_coverage) {
            return refuse("character_coverage", "is from 0.9 to 1");
        }
        if self.max_sentences == 0 || self.max_sentence_bytes == 0 {
            return refuse("max_sentences", "and `max_sentence_bytes` are at least 1");
        }
        let recipe = self.recipe(&BTreeSet::new(), None);
        recipe.check().map_err(|error| StageError::setting("special", error))?;
        if self.r#type != TokenizerType::Bpe && !self.extend.trim().is_empty() {
            return refuse("extend", "takes `type: bpe`");
        }
        self.hub()?;
        Ok(())
    }
}

/// Columns of the output.
pub fn tokenizer_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new(ROW, DataType::UInt32, false),
        Field::new("model", DataType::Binary, false),
        Field::new("vocabulary", DataType::Utf8, false),
        Field::new("pieces", DataType::Int32, false),
        Field::new("digest", DataType::Utf8, false),
    ]))
}

/// The output of the stages that give a tokenizer.
pub(crate) fn tokenizer_port() -> Port {
    Port::new("tokenizer", tokenizer_schema())
}

/// The tokenizer that a model holds: the bytes of a SentencePiece `.model`. `setting` names the model in errors.
pub(crate) fn tokenizer_of_model(setting: &str, path: &Path) -> Result<Vec<u8>, StageError> {
    let refuse = |why: String| StageError::setting(setting, why);
    let model = OpenModel::open(path).map_err(|error| refuse(error.to_string()))?;
    let none = model.no_tokenizer.unwrap_or_else(|| "it holds no tokenizer".into());
    model
        .tokenizer
        .ok_or_else(|| refuse(format!("{}: {none}", path.display())))
}

/// A tokenizer as the one row of the output.
pub(crate) fn tokenizer_row(tokenizer: &Tokenizer) -> Result<RecordBatch, StageError> {
    let bytes = tokenizer.bytes();
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from(vec![0])),
        Arc::new(BinaryArray::from(vec![bytes])),
        Arc::new(StringArray::from(vec![train::vocabulary_text(tokenizer)])),
        Arc::new(Int32Array::from(vec![tokenizer.vocabulary_size() as i32])),
        Arc::new(StringArray::from(vec![blake3::hash(bytes).to_hex().to_string()])),
    ];
    Ok(RecordBatch::try_new(tokenizer_schema(), columns)?)
}

/// Columns that an input with a tokenizer has.
pub const TOKENIZER_COLUMNS: &[(&str, ColumnType)] =
    &[("model", ColumnType::Binary), ("vocabulary", ColumnType::AnyText)];

/// The `.model` and the `.vocab` of a `tokenizer.train`.
pub fn read_tokenizer_files(artifact: &Artifact) -> Result<(Vec<u8>, String), StageError> {
    let missing = || StageError::failed("the tokenizer's stage gave no row");
    for item in artifact.batches(Some(&["model", "vocabulary"])) {
        let (_, batch) = item?;
        if batch.num_rows() == 0 {
            continue;
        }
        let model = batch
            .column_by_name("model")
            .and_then(|column| column.as_binary_opt::<i32>());
        let vocabulary = batch
            .column_by_name("vocabulary")
            .and_then(|column| column.as_string_opt::<i32>());
        let (Some(model), Some(vocabulary)) = (model, vocabulary) else {
            return Err(missing());
        };
        return Ok((model.value(0).to_vec(), vocabulary.value(0).to_owned()));
    }
    Err(missing())
}

/// The tokenizer of the input `tokenizer`, read when it is first asked for.
#[derive(Default)]
pub(crate) struct TokenizerInput(Option<Tokenizer>);

impl TokenizerInput {
    /// # Errors
    /// If there is no such input, or no tokenizer in it.
    pub fn get(&mut self, context: &Context) -> Result<&Tokenizer, StageError> {
        let tokenizer = match self.0.take() {
            Some(tokenizer) => tokenizer,
            None => {
                let (model, _) = read_tokenizer_files(context.required("tokenizer")?)?;
                Tokenizer::from_bytes(&model).map_err(StageError::failed)?
            }
        };
        Ok(self.0.insert(tokenizer))
    }
}

/// The kind `tokenizer.train`.
pub struct TrainTokenizer;

impl Kind for TrainTokenizer {
    const NAME: &'static str = "tokenizer.train";
    const VERSION: u32 = 2;
    const INPUTS: &'static [InputPort] = &[InputPort::whole(
        "rows",
        "rows whose texts are learned from; several inputs are learned from together",
    )
    .count(InputCount::Many)
    .columns(&[("text", ColumnType::AnyText)])];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("tokenizer", "the files of the tokenizer")];
    const URL_SETTINGS: &'static [(&'static str, flow_kind::UrlUse)] = &[("extend", flow_kind::UrlUse::Read)];
    /// Shared: the tokenizer that `extend` names.
    type Settings = WithShared<TrainTokenizerSettings, ReadOnce<Vec<u8>>>;

    fn shape(settings: &Self::Settings, _: &Inputs) -> Result<Shape, StageError> {
        settings.check()?;
        Ok(Shape {
            expensive: true,
            ..Shape::source(vec![tokenizer_port()])
        })
    }

    fn open(settings: &Self::Settings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Source(Box::new(TrainTokenizerBody {
            settings: settings.clone(),
            context: context.clone(),
        })))
    }

    /// Without the token for the hub.
    fn identity(settings: &Self::Settings) -> serde_json::Value {
        let mut settings = serde_json::to_value(settings).unwrap_or_default();
        if let Some(settings) = settings.as_object_mut() {
            settings.remove("hub_token");
        }
        settings
    }
}

struct TrainTokenizerBody {
    settings: WithShared<TrainTokenizerSettings, ReadOnce<Vec<u8>>>,
    context: Context,
}

impl Source for TrainTokenizerBody {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        // A model of the hub is not fetched for a plan: its reference, which is part of the recipe, stands for its bytes.
        let extended = match self.settings.hub()? {
            Some(_) => None,
            None => self.settings.extended(&self.settings.shared, &self.context)?,
        };
        Ok(vec![SourcePartition::new(
            Partition::from("tokenizer".to_owned()),
            Vec::new(),
            extended.map_or(String::new(), |bytes| blake3::hash(&bytes).to_hex().to_string()),
        )])
    }

    fn read(&mut self, _: &Partition, out: &mut Out) -> Result<(), StageError> {
        let mut sample = Sample::new(&self.settings);
        for (_, input) in self.context.whole("rows") {
            sample.add_rows(input, &self.context)?;
        }
        if sample.too_long > 0 {
            self.warn(format!(
                "{} texts of more than {} bytes are not learned from; `max_sentence_bytes` sets the limit",
                sample.too_long, self.settings.max_sentence_bytes
            ));
        }
        if sample.languages.len() > MOST_LANGUAGES {
            return Err(StageError::failed(format!(
                "more than {MOST_LANGUAGES} different language tags are at the beginning of texts"
            ))
            .with_help("set `languages: false`, or correct the texts"));
        }
        let languages = sample.languages.clone();
        let extends = self
            .settings
            .extended(&self.settings.shared, &self.context)?
            .map(|bytes| bytes.to_vec());
        let recipe = self.settings.recipe(&languages, extends);
        let failed = |error| StageError::from(TrainingError::from(error));
        let mut words = recipe.words().map_err(failed)?;
        let (seen, used) = (sample.seen, sample.chosen.len());
        for chosen in sample.chosen.into_vec() {
            words.add(&chosen.1);
        }
        if words.skipped() > 0 {
            self.warn(format!(
                "{} texts hold U+2585, which SentencePiece keeps for itself, and are not learned from",
                words.skipped()
            ));
        }
        self.context.report(serde_json::json!({ "line": format!("learning from {used} of {seen} texts, {} languages", languages.len()) }));
        let pool = ThreadPoolBuilder::new()
            .num_threads(self.context.threads.max(1))
            .build()
            .map_err(|error| StageError::failed(format!("cannot start threads: {error}")))?;
        let (context, cancel) = (&self.context, &self.context.cancel);
        let mut tell = |line: String| {
            context.report(serde_json::json!({ "line": line }));
            if cancel.is_set() {
                return Err(flow_model::Error::Tokenizer("stopped".into()));
            }
            Ok(())
        };
        let bytes = pool.install(|| recipe.train(words, &mut tell)).map_err(failed)?;
        let tokenizer = Tokenizer::from_bytes(&bytes).map_err(failed)?;
        out.send(0, tokenizer_row(&tokenizer)?);
        Ok(())
    }
}

impl TrainTokenizerBody {
    fn warn(&self, message: String) {
        self.context.warn(message);
    }
}

/// The texts with the smallest hashes, at most this many.
struct Sample {
    most: usize,
    longest: usize,
    tags: bool,
    /// The largest hash on top.
    chosen: BinaryHeap<([u8; 16], String)>,
    seen: u64,
    too_long: u64,
    languages: BTreeSet<String>,
}

impl Sample {
    fn new(settings: &TrainTokenizerSettings) -> Self {
        Sample {
            most: usize::try_from(settings.max_sentences).unwrap_or(usize::MAX),
            longest: usize::try_from(settings.max_sentence_bytes).unwrap_or(usize::MAX),
            tags: settings.languages,
            chosen: BinaryHeap::new(),
            seen: 0,
            too_long: 0,
            languages: BTreeSet::new(),
        }
    }

    fn add_rows(&mut self, rows: &Artifact, context: &Context) -> Result<(), StageError> {
        let columns = ["text", "segment_id"].into_iter();
        let columns: Vec<&str> = columns
            .filter(|name| rows.schema().column_with_name(name).is_some())
            .collect();
        for item in rows.batches(Some(&columns)) {
            let (_, batch) = item?;
            if context.cancel.is_set() {
                return Err(StageError::failed("stopped"));
            }
            let texts = |name: &str| -> Result<Option<StringArray>, StageError> {
                let Some(column) = batch.column_by_name(name) else {
                    return Ok(None);
                };
                Ok(cast(column, &DataType::Utf8)?.as_string_opt::<i32>().cloned())
            };
            let Some(text) = texts("text")? else { continue };
            let ids = texts("segment_id")?;
            for row in (0..batch.num_rows()).filter(|row| !text.is_null(*row)) {
                let id = ids
                    .as_ref()
                    .filter(|ids| !ids.is_null(row))
                    .map_or("", |ids| ids.value(row));
                self.add(id, text.value(row));
            }
        }
        Ok(())
    }

    fn add(&mut self, id: &str, text: &str) {
        if text.trim().is_empty() {
            return;
        }
        self.seen += 1;
        if self.tags
            && self.languages.len() <= MOST_LANGUAGES
            && let Some(tag) = tag_of(text)
        {
            self.languages.insert(format!("<|{tag}|>"));
        }
        if text.len() > self.longest {
            self.too_long += 1;
            return;
        }
        let mut hash = blake3::Hasher::new();
        hash.update(&(id.len() as u64).to_le_bytes());
        hash.update(id.as_bytes());
        hash.update(text.as_bytes());
        let mut key = [0; 16];
        key.copy_from_slice(&hash.finalize().as_bytes()[..16]);
        if self.chosen.len() < self.most {
            self.chosen.push((key, text.to_owned()));
        } else if self.chosen.peek().is_some_and(|(largest, _)| key < *largest) {
            self.chosen.pop();
            self.chosen.push((key, text.to_owned()));
        }
    }
}
