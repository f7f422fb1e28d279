//! The kind `tokenizer.language_tags`.

use std::borrow::Cow;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, RecordBatch, StringArray};
use arrow::compute::cast;
use arrow::datatypes::DataType;
use flow_kind::event::Event;
use flow_kind::{
    Body, ColumnType, Context, InputPort, Inputs, Kind, Operator, Out, OutputPort, Partition, Port, Progress, Shape,
    StageError,
};
use flow_model::tokenizer::Tokenizer;
use flow_text::language_tag::{UNDETERMINED, codes_of, is_language, same_language, split_tag};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::train_tokenizer::{TOKENIZER_COLUMNS, TokenizerInput};

/// Makes the texts of all rows begin with the tag of their language, or none of them, as the tokenizer has such tags or not.
///
/// # What it does
///
/// `rows` have a column `text` and a column `lang`, the tokenizer comes of a `tokenizer.read` or a `tokenizer.train`. With
/// `tags: auto` a text without a tag gets that of its language (`<|hi|> ...`) where the tokenizer has a piece for it, and a
/// text that begins with the tag of its row's language, for which the tokenizer has no piece, loses it: it would be learned
/// letter by letter. Other tags stay. Where there is no piece for a code with a region (`pt-BR`), that of the language alone
/// (`pt`, or `por`) counts, and replaces the tag in texts that have one with the region. Codes of two and of three letters name
/// the same language. So it does not matter whether rows come of shards, whose texts are tagged, or of
/// manifests and folders, whose texts mostly are not. Nothing else of a row changes.
///
/// # Example
///
/// ```yaml
/// texts:
///   uses: tokenizer.language_tags
///   from: {rows: train_rows, tokenizer: pieces}
/// ```
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LanguageTagsSettings {
    /// Whether texts begin with the tag of their language.
    pub tags: LanguageTags,
}

/// Whether texts begin with the tag of their language.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LanguageTags {
    /// Where the tokenizer has a piece for it.
    #[default]
    Auto,
    /// A tag of a language at the beginning of a text is removed.
    Never,
    /// Texts stay as they are.
    AsIs,
}

/// The kind `tokenizer.language_tags`.
pub struct TagTexts;

impl Kind for TagTexts {
    const NAME: &'static str = "tokenizer.language_tags";
    const VERSION: u32 = 3;
    const INPUTS: &'static [InputPort] = &[
        InputPort::streamed("rows", "rows with texts and their languages")
            .columns(&[("text", ColumnType::AnyText), ("lang", ColumnType::AnyText)]),
        InputPort::whole(
            "tokenizer",
            "says which tags there are: of a tokenizer.train or a tokenizer.read",
        )
        .columns(TOKENIZER_COLUMNS),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "all rows, with their texts so")];
    type Settings = LanguageTagsSettings;

    fn shape(_: &LanguageTagsSettings, inputs: &Inputs) -> Result<Shape, StageError> {
        let port = Port::new("rows", inputs.required("rows")?.schema.clone());
        Ok(Shape::local(vec![port]))
    }

    fn open(settings: &LanguageTagsSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Local(Box::new(Tagger {
            tags: settings.tags,
            context: context.clone(),
            tokenizer: TokenizerInput::default(),
            told: false,
        })))
    }
}

struct Tagger {
    tags: LanguageTags,
    context: Context,
    tokenizer: TokenizerInput,
    /// Whether the warning that rows of unknown languages get no tag was sent.
    told: bool,
}

impl Operator for Tagger {
    fn batch(&mut self, input: &str, _: &Partition, batch: RecordBatch, out: &mut Out) -> Result<(), StageError> {
        if input == "rows" {
            let batch = match self.tags {
                LanguageTags::AsIs => batch,
                _ => self.with_tags(batch)?,
            };
            out.send(0, batch);
        }
        Ok(())
    }

    fn partition_complete(&mut self, _: &Partition, _: &mut Out) -> Result<Progress, StageError> {
        Ok(Progress::Done)
    }
}

impl Tagger {
    fn with_tags(&mut self, batch: RecordBatch) -> Result<RecordBatch, StageError> {
        let tags = self.tags;
        let tokenizer = self.tokenizer.get(&self.context)?;
        let place = batch.schema().index_of("text")?;
        let (texts, languages) = (text_column(&batch, "text")?, text_column(&batch, "lang")?);
        let (texts, languages): (&StringArray, &StringArray) = (texts.as_string(), languages.as_string());
        let mut is_changed = false;
        let tagged: StringArray = (0..texts.len())
            .map(|row| {
                let text = texts.is_valid(row).then(|| texts.value(row))?;
                let language = if languages.is_null(row) {
                    ""
                } else {
                    languages.value(row)
                };
                let tagged = with_tag(text, language, tags, tokenizer);
                is_changed |= tagged != text;
                Some(tagged)
            })
            .collect();
        // Searches the whole vocabulary.
        let untagged = !self.told
            && tags == LanguageTags::Auto
            && languages.iter().flatten().any(|language| language == UNDETERMINED)
            && has_language_tags(tokenizer);
        if untagged {
            self.told = true;
            self.context.events.send(Event::note(format!(
                    "{}: rows of the language `{UNDETERMINED}` get no tag, though the tokenizer has tags of languages; where the \
                     model is to tell languages, name that of the rows (`lang`)",
                    self.context.stage
                )));
        }
        if !is_changed {
            return Ok(batch);
        }
        let mut columns = batch.columns().to_vec();
        let tagged: ArrayRef = Arc::new(tagged);
        columns[place] = cast(&tagged, columns[place].data_type())?;
        Ok(RecordBatch::try_new(batch.schema(), columns)?)
    }
}

fn has_language_tags(tokenizer: &Tokenizer) -> bool {
    let pieces = (0..tokenizer.vocabulary_size() as u32).filter_map(|id| tokenizer.piece(id));
    pieces
        .filter_map(|piece| split_tag(piece).0)
        .any(|tag| is_language(tag) && tag != UNDETERMINED)
}

fn text_column(batch: &RecordBatch, name: &str) -> Result<ArrayRef, StageError> {
    let column = batch
        .column_by_name(name)
        .ok_or_else(|| StageError::failed(format!("the rows have no `{name}`")))?;
    Ok(cast(column, &DataType::Utf8)?)
}

fn with_tag<'a>(text: &'a str, language: &str, tags: LanguageTags, tokenizer: &Tokenizer) -> Cow<'a, str> {
    let is_piece = |tag: &str| !tag.is_empty() && tokenizer.id(&format!("<|{tag}|>")).is_some();
    // `<|pt-BR|>`, or else `<|pt|>` or `<|por|>`.
    let own = || codes_of(language).into_iter().find(|code| is_piece(code));
    let with_own = |text: &'a str| match own() {
        Some(code) => Cow::Owned(format!("<|{code}|> {text}")),
        None => Cow::Borrowed(text),
    };
    let (tag, rest) = split_tag(text);
    match (tags, tag) {
        (LanguageTags::Auto, None) => with_own(text),
        (LanguageTags::Auto, Some(tag)) if same_language(tag, language) && !is_piece(tag) => with_own(rest),
        (LanguageTags::Never, Some(tag)) if is_language(tag) => Cow::Borrowed(rest),
        _ => Cow::Borrowed(text),
    }
}
