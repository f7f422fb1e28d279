//! With which language prompt a row is trained or decoded, for models that have prompts.

use std::collections::BTreeMap;

use flow_kind::StageError;
use flow_model::ModelConfig;
use flow_model::config::PromptConfig;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::transcribe::Utterance;

/// How the language prompts of rows are chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PromptSettings {
    /// Which prompt a row has.
    pub default_prompt_mode: PromptMode,
    /// With `unified`: the probability of `auto` in training.
    pub unified_auto_ratio: f64,
    /// Prompts of values of `lang`: `{hi: hi-IN}`. Others have the prompt of their name, or else the first one of the same language
    /// before the region; rows without a language have `auto`.
    pub prompt_of: BTreeMap<String, String>,
}

impl Default for PromptSettings {
    fn default() -> Self {
        PromptSettings {
            default_prompt_mode: PromptMode::Unified,
            unified_auto_ratio: 0.5,
            prompt_of: BTreeMap::new(),
        }
    }
}

impl PromptSettings {
    pub fn is_default(&self) -> bool {
        *self == PromptSettings::default()
    }

    /// Refuses names of prompts that the model does not have, with the name of the setting.
    pub fn check(&self, prompt: &PromptConfig) -> Result<(), (String, String)> {
        for (language, name) in &self.prompt_of {
            let named = |why: flow_model::Error| (format!("prompts.prompt_of.{language}"), why.to_string());
            prompt.find(name).map_err(named)?;
        }
        Ok(())
    }

    /// The number of the prompt of a language, without a draw.
    ///
    /// # Errors
    /// Where the model has none for it; with `auto` it is not asked for.
    pub fn of_language(&self, prompt: &PromptConfig, language: &str) -> Result<usize, String> {
        let named = self.prompt_of.get(language);
        let language = named.map_or(language, String::as_str);
        if self.default_prompt_mode == PromptMode::Auto || language.is_empty() {
            let auto = prompt.default_prompt();
            return auto.ok_or_else(|| "a row has no language, and the model has no prompt `auto`".into());
        }
        prompt.find(language).map_err(|error| error.to_string())
    }

    /// The number of the prompt of each utterance, none where the model has no prompts; and a warning, if some of them have `auto`
    /// because there is no prompt for their language.
    ///
    /// # Errors
    /// Where the settings name prompts that the model does not have, or a language has none and there is no `auto`.
    pub fn of_utterances(
        &self,
        config: &ModelConfig,
        utterances: &[Utterance],
    ) -> Result<(Vec<usize>, Option<String>), StageError> {
        let Some(prompt) = &config.prompt else {
            return match self.is_default() {
                true => Ok((Vec::new(), None)),
                false => Err(StageError::setting("prompts", "the model has no language prompts")),
            };
        };
        self.check(prompt)
            .map_err(|(name, why)| StageError::setting(name, why))?;
        let mut without: BTreeMap<&str, u64> = BTreeMap::new();
        let mut prompts = Vec::with_capacity(utterances.len());
        for Utterance { lang, .. } in utterances {
            let found = self.of_language(prompt, lang).ok();
            if found.is_none() {
                *without.entry(lang).or_default() += 1;
            }
            prompts.extend(found.or(prompt.default_prompt()));
        }
        let rows = without.iter().map(|(lang, rows)| match *lang {
            "" => format!("rows without a language ({rows})"),
            lang => format!("{lang} ({rows} rows)"),
        });
        let without = rows.collect::<Vec<_>>().join(", ");
        if without.is_empty() {
            return Ok((prompts, None));
        }
        if prompt.default_prompt().is_none() {
            let names: Vec<&str> = prompt.dictionary.iter().map(|(name, _)| name.as_str()).collect();
            let why = format!("the model has neither a prompt `auto` nor one for {without}");
            let help = format!(
                "map each to a prompt, such as {{hi: hi-IN}}; the model has {}",
                names.join(", ")
            );
            return Err(StageError::setting("prompts.prompt_of", why).with_help(help));
        }
        let warning = format!(
            "the model has no language prompt for {without}: `auto` is used; `prompts.prompt_of` maps them to others"
        );
        Ok((prompts, Some(warning)))
    }
}

/// NeMo's modes of prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PromptMode {
    /// That of its language.
    #[serde(rename = "langID")]
    LangId,
    /// `auto`, by which the model finds out the language.
    #[serde(rename = "auto")]
    Auto,
    /// That of its language; in training `auto` with the probability `unified_auto_ratio`, drawn for each row of each step from the
    /// seed.
    #[serde(rename = "unified")]
    Unified,
}
