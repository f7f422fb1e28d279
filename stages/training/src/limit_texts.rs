//! The kind `tokenizer.limit`.

use arrow::array::{Array, AsArray, BooleanArray, RecordBatch, StringArray};
use arrow::compute::{cast, filter_record_batch};
use arrow::datatypes::DataType;
use flow_kind::{
    Body, ColumnType, Context, InputPort, Inputs, Kind, Operator, Out, OutputPort, Partition, Port, Progress,
    RejectClass, Shape, StageError,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::long_texts::OverLimit;
use crate::train_tokenizer::{TOKENIZER_COLUMNS, TokenizerInput};

/// Refuses rows whose transcript has more tokens than training takes.
///
/// # What it does
///
/// `rows` have a column `text`, `tokenizer` cuts it (of a `tokenizer.read` or a `tokenizer.train`). A row
/// whose text has more than `max_tokens` tokens is the reject `too_many_tokens` (class `rule`), and the others go on as
/// they are. A truncated transcript with its full audio teaches a model to leave out the end of utterances. With
/// `long_texts: truncate` all rows go on, and training learns such texts up to the limit.
///
/// # Example
///
/// ```yaml
/// rows:
///   uses: tokenizer.limit
///   from: {rows: manifest/split.train, tokenizer: pieces}
///   with: {max_tokens: 512}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct LimitTextsSettings {
    /// Most tokens of a text, as in `training.train`.
    pub max_tokens: usize,
    /// How to treat longer texts, as in `training.train`.
    pub long_texts: OverLimit,
}

impl Default for LimitTextsSettings {
    fn default() -> Self {
        LimitTextsSettings {
            max_tokens: 512,
            long_texts: OverLimit::default(),
        }
    }
}

/// The kind `tokenizer.limit`.
pub struct LimitTexts;

impl Kind for LimitTexts {
    const NAME: &'static str = "tokenizer.limit";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[
        InputPort::streamed("rows", "rows with texts").columns(&[("text", ColumnType::AnyText)]),
        InputPort::whole(
            "tokenizer",
            "what cuts their texts: of a tokenizer.train or a tokenizer.read",
        )
        .columns(TOKENIZER_COLUMNS),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "the rows that stay, as they came")];
    type Settings = LimitTextsSettings;

    fn shape(settings: &LimitTextsSettings, inputs: &Inputs) -> Result<Shape, StageError> {
        if settings.max_tokens == 0 {
            return Err(StageError::setting("max_tokens", "`max_tokens` is at least 1"));
        }
        let port = Port::new("rows", inputs.required("rows")?.schema.clone());
        Ok(Shape::local(vec![port]))
    }

    fn open(settings: &LimitTextsSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Local(Box::new(Limiter {
            settings: settings.clone(),
            context: context.clone(),
            tokenizer: TokenizerInput::default(),
        })))
    }
}

struct Limiter {
    settings: LimitTextsSettings,
    context: Context,
    tokenizer: TokenizerInput,
}

impl Operator for Limiter {
    fn batch(&mut self, input: &str, _: &Partition, batch: RecordBatch, out: &mut Out) -> Result<(), StageError> {
        if input != "rows" {
            return Ok(());
        }
        let over = match self.settings.long_texts {
            OverLimit::Truncate => Vec::new(),
            OverLimit::Reject => self.over(&batch)?,
        };
        if over.is_empty() {
            out.send(0, batch);
            return Ok(());
        }
        for &(row, tokens) in &over {
            let detail = format!("{tokens} tokens; at most {} are taken", self.settings.max_tokens);
            out.reject_rows(&batch, &[row], "too_many_tokens", RejectClass::Rule, &detail)?;
        }
        let mut stays = vec![true; batch.num_rows()];
        for (row, _) in over {
            stays[row] = false;
        }
        out.send(0, filter_record_batch(&batch, &BooleanArray::from(stays))?);
        Ok(())
    }

    fn partition_complete(&mut self, _: &Partition, _: &mut Out) -> Result<Progress, StageError> {
        Ok(Progress::Done)
    }
}

impl Limiter {
    /// Rows whose text has too many tokens, and how many it has.
    fn over(&mut self, batch: &RecordBatch) -> Result<Vec<(usize, usize)>, StageError> {
        let limit = self.settings.max_tokens;
        let tokenizer = self.tokenizer.get(&self.context)?;
        let column = batch
            .column_by_name("text")
            .ok_or_else(|| StageError::failed("the rows have no `text`"))?;
        let texts = cast(column, &DataType::Utf8)?;
        let texts: &StringArray = texts.as_string();
        let counted = (0..texts.len()).filter(|row| !texts.is_null(*row));
        Ok(counted
            .filter_map(|row| Some((row, tokenizer.tokens_over(texts.value(row), limit)?)))
            .collect())
    }
}
