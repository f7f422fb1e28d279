//! What a run of training tells of its settings and texts before the first step.

use std::collections::BTreeMap;

use flow_kind::{Artifact, StageError};
use flow_model::checkpoint::OpenModel;
use flow_model::model::TdtModel;
use flow_model::tokenizer::Tokenizer;
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::error::TrainingError;
use crate::resolved_settings::ResolvedSettings;
use crate::transcripts::Transcripts;

/// More tokens a word than these mean that a tokenizer does not fit a language: the model writes it nearly letter by letter.
const MANY_TOKENS: f64 = 4.0;

/// Rate and batches that a model was trained with, as its `model_config.yaml` says. Texts, since NeMo's recipes have numbers and
/// lists there.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BaseRecipe {
    pub optimizer: Option<String>,
    pub rate: Option<String>,
    pub schedule: Option<String>,
    /// `batch_duration 360`, `batch_size 16` or both.
    pub batch: Option<String>,
}

impl BaseRecipe {
    /// Reads a `model_config.yaml`. What it does not say is none.
    pub fn of(config_yaml: &str) -> Self {
        let text = |value: &serde_yaml::Value| match value {
            serde_yaml::Value::Number(number) => Some(number.to_string()),
            serde_yaml::Value::String(text) => Some(text.clone()).filter(|text| !text.is_empty()),
            serde_yaml::Value::Sequence(all) => serde_json::to_string(all).ok(),
            _ => None,
        };
        let guarded = flow_yaml_guard::check(config_yaml).is_ok();
        let read = guarded.then(|| serde_yaml::from_str::<serde_yaml::Value>(config_yaml).ok());
        let Some(config) = read.flatten() else {
            return BaseRecipe::default();
        };
        let (optim, data) = (&config["optim"], &config["train_ds"]);
        let sizes = ["batch_duration", "batch_size", "bucket_batch_size"];
        let sizes = sizes
            .into_iter()
            .filter_map(|name| Some(format!("{name} {}", text(&data[name])?)));
        let sizes: Vec<String> = sizes.collect();
        BaseRecipe {
            optimizer: text(&optim["name"]),
            rate: text(&optim["lr"]),
            schedule: text(&optim["sched"]["name"]),
            batch: (!sizes.is_empty()).then(|| sizes.join(", ")),
        }
    }

    /// That of the model that training begins from; nothing with `init: none`.
    ///
    /// # Errors
    /// Where the model cannot be opened.
    pub fn of_init(settings: &ResolvedSettings) -> Result<Self, TrainingError> {
        if settings.init == "none" {
            return Ok(BaseRecipe::default());
        }
        Ok(BaseRecipe::of(&OpenModel::open(settings.init_path())?.config_yaml))
    }
}

/// Words and tokens of the texts of a language.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WordsAndTokens {
    pub words: u64,
    pub tokens: u64,
}

impl WordsAndTokens {
    pub fn tokens_per_word(&self) -> f64 {
        self.tokens as f64 / self.words.max(1) as f64
    }
}

/// Counts words and tokens by language. A language tag is one token and no word.
///
/// # Errors
/// Where the rows cannot be read.
pub fn words_and_tokens(
    rows: &Artifact,
    tokenizer: &Tokenizer,
) -> Result<BTreeMap<String, WordsAndTokens>, StageError> {
    let mut languages: BTreeMap<String, WordsAndTokens> = BTreeMap::new();
    for batch in Transcripts::of_rows(rows) {
        let batch = batch?;
        let counts: Vec<(usize, u64, u64)> = (0..batch.len())
            .into_par_iter()
            .filter_map(|row| {
                let text = flow_text::language_tag::split_tag(batch.text(row)?).1;
                let words = text.split_whitespace().count() as u64;
                Some((row, words, tokenizer.encode(text).len() as u64))
            })
            .collect();
        for (row, words, tokens) in counts {
            let language = languages.entry(batch.language(row).to_owned()).or_default();
            language.words += words;
            language.tokens += tokens;
        }
    }
    Ok(languages)
}

/// A warning about languages whose words are cut into many tokens.
pub fn many_tokens(languages: &BTreeMap<String, WordsAndTokens>) -> Option<String> {
    let many = languages
        .iter()
        .filter(|(_, count)| count.tokens_per_word() > MANY_TOKENS);
    let many = many.map(|(name, count)| {
        let name = if name.is_empty() { "no language" } else { name };
        format!("{name} {:.1}", count.tokens_per_word())
    });
    let many: Vec<String> = many.collect();
    (!many.is_empty()).then(|| {
        format!(
            "the tokenizer has few pieces for the words of a language, so that texts are long and hard to learn (tokens a word: {}). \
             `flow run train_tokenizer` with `extend` adds pieces",
            many.join(", ")
        )
    })
}

/// The table of a run's report: what is trained and how, beside what the first model was trained with.
///
/// # Errors
/// Where the first model cannot be opened.
pub fn table(
    settings: &ResolvedSettings,
    model: &TdtModel,
    languages: &BTreeMap<String, WordsAndTokens>,
) -> Result<Value, TrainingError> {
    let base = BaseRecipe::of_init(settings)?;
    let said = |value: Option<String>| value.unwrap_or_else(|| "not said".into());
    let rates = match settings.unfreeze_step {
        0 => format!("{:e}", settings.phase2_lr),
        step => format!(
            "{:e} for {step} steps, then {:e}",
            settings.phase1_lr, settings.phase2_lr
        ),
    };
    let (ranks, accumulated) = (f64::from(settings.ranks), f64::from(settings.grad_accum));
    let seconds = settings.max_batch_seconds() * ranks * accumulated;
    let count = |trained: bool| -> usize {
        let parameters = model.parameters.iter().filter(|(_, one)| !trained || one.trainable);
        parameters.map(|(_, one)| one.tensor.elem_count()).sum()
    };
    let trained = match (&settings.lora, settings.unfreeze_step) {
        (Some(lora), _) => format!("LoRA matrices of rank {}", lora.rank),
        (None, 0) => "encoder, decoder and joint".into(),
        (None, step) => format!("decoder and joint for {step} steps, then the encoder too"),
    };
    let trained = format!("{trained}: {} of {} values", count(true), count(false));
    let word = |(name, count): (&String, &WordsAndTokens)| format!("{name} {:.2}", count.tokens_per_word());
    let tokens: Vec<String> = languages.iter().map(word).collect();
    let rows = [
        json!(["optimizer", said(base.optimizer), json!(settings.optimizer)]),
        json!(["learning rate", said(base.rate), rates]),
        json!(["schedule", said(base.schedule), json!(settings.schedule)]),
        json!([
            "batch",
            said(base.batch),
            format!("at most {seconds} s of audio a step")
        ]),
        json!(["trained", "", trained]),
        json!(["tokens a word", "", tokens.join(", ")]),
    ];
    Ok(json!({ "table": {
        "title": "Before training",
        "columns": ["", "the first model", "this run"],
        "rows": rows,
    } }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_recipe_of_a_model_is_what_its_configuration_says() {
        let yaml = "optim: {name: adamw, lr: 0.0001, sched: {name: CosineAnnealing}}\ntrain_ds: {batch_size: null, batch_duration: 360, bucket_batch_size: [4, 2]}\n";
        let recipe = BaseRecipe::of(yaml);
        assert_eq!(recipe.rate.as_deref(), Some("0.0001"));
        assert_eq!(recipe.schedule.as_deref(), Some("CosineAnnealing"));
        assert_eq!(
            recipe.batch.as_deref(),
            Some("batch_duration 360, bucket_batch_size [4,2]")
        );
        for nothing in ["", "optim: 3", "a: [", "optim: {lr: {x: 1}}", &"[".repeat(1000)] {
            assert_eq!(BaseRecipe::of(nothing), BaseRecipe::default(), "{nothing:.20}");
        }
    }

    #[test]
    fn words_cut_into_letters_are_told() {
        let count = |words, tokens| WordsAndTokens { words, tokens };
        let languages = [("de".to_owned(), count(10, 15)), ("si".to_owned(), count(10, 62))];
        let said = many_tokens(&languages.into()).unwrap();
        assert!(said.contains("si 6.2") && !said.contains("de "), "{said}");
        assert_eq!(many_tokens(&[("de".to_owned(), count(0, 0))].into()), None);
    }
}
