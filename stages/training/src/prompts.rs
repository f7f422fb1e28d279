//! With which language prompt a row is trained, for models that have prompts.

use std::collections::BTreeMap;

pub use flow_evaluation::prompts::{PromptMode, PromptSettings};
use flow_kernels::Noise;
use flow_kind::{Artifact, StageError};
use flow_model::ModelConfig;
use flow_model::config::PromptConfig;

use crate::error::TrainingError;
use crate::transcripts::Transcripts;

/// The prompts of rows for a model.
#[derive(Clone, Debug)]
pub struct RowPrompts {
    prompt: PromptConfig,
    settings: PromptSettings,
    noise: Noise,
}

impl RowPrompts {
    /// Those of a model with this configuration; none where it has no prompts.
    ///
    /// # Errors
    /// Where the settings name a prompt that the model does not have.
    pub fn of_model(
        config: &ModelConfig,
        settings: &PromptSettings,
        seed: u64,
    ) -> Result<Option<RowPrompts>, TrainingError> {
        let Some(prompt) = &config.prompt else {
            return match settings.is_default() {
                true => Ok(None),
                false => Err(TrainingError::setting("prompts", "the model has no language prompts")),
            };
        };
        if let Err((name, why)) = settings.check(prompt) {
            return Err(TrainingError::setting(name, why));
        }
        if settings.default_prompt_mode != PromptMode::LangId && prompt.default_prompt().is_none() {
            let why = "the model has no prompt `auto`: write `default_prompt_mode: langID`";
            return Err(TrainingError::setting("prompts.default_prompt_mode", why));
        }
        Ok(Some(RowPrompts {
            prompt: prompt.clone(),
            settings: settings.clone(),
            noise: Noise::new(seed),
        }))
    }

    /// The number of the prompt with which a row of a language is evaluated: without a draw.
    ///
    /// # Errors
    /// Where the model has none for it; with `auto` it is not asked for.
    pub fn evaluated(&self, language: &str) -> Result<usize, String> {
        self.settings.of_language(&self.prompt, language)
    }

    /// The number of the prompt with which a segment of a language is trained in a step.
    ///
    /// # Errors
    /// As [`RowPrompts::evaluated`].
    pub fn trained(&self, step: u64, segment: &str, language: &str) -> Result<usize, String> {
        let own = self.evaluated(language)?;
        if self.settings.default_prompt_mode != PromptMode::Unified {
            return Ok(own);
        }
        let drawn = self
            .noise
            .derive(&format!("language prompt {step} {segment}"))
            .uniform();
        let auto = self
            .prompt
            .default_prompt()
            .filter(|_| drawn < self.settings.unified_auto_ratio);
        Ok(auto.unwrap_or(own))
    }

    /// Refuses rows of languages without a prompt; `what` names the rows.
    ///
    /// # Errors
    /// Where there are some, with their languages and numbers.
    pub fn check(&self, what: &str, rows_of: &BTreeMap<String, u64>) -> Result<(), TrainingError> {
        let without = rows_of.iter().filter(|(language, _)| self.evaluated(language).is_err());
        let without: Vec<String> = without
            .map(|(language, rows)| match language.as_str() {
                "" => format!("no language ({rows} rows)"),
                language => format!("{language} ({rows} rows)"),
            })
            .collect();
        if without.is_empty() {
            return Ok(());
        }
        let names: Vec<&str> = self.prompt.dictionary.iter().map(|(name, _)| name.as_str()).collect();
        Err(TrainingError::refused(
            format!(
                "{what} has languages that the model has no prompt for: {}",
                without.join(", ")
            ),
            format!(
                "map each to a prompt with `prompts.prompt_of`, or set `prompts.default_prompt_mode: auto`; the model has {}",
                names.join(", ")
            ),
        ))
    }

    /// The same for the rows of an input.
    ///
    /// # Errors
    /// As [`RowPrompts::check`], and where the rows cannot be read.
    pub(crate) fn check_input(&self, input: &str, rows: &Artifact) -> Result<(), StageError> {
        let mut rows_of: BTreeMap<String, u64> = BTreeMap::new();
        for batch in Transcripts::of_rows(rows) {
            let batch = batch?;
            for row in 0..batch.len() {
                *rows_of.entry(batch.language(row).to_owned()).or_default() += 1;
            }
        }
        Ok(self.check(&format!("the input `{input}`"), &rows_of)?)
    }
}

#[cfg(test)]
mod tests {
    use flow_model::config::PromptConfig;

    use super::*;

    fn config(prompts: &[(&str, usize)]) -> ModelConfig {
        let yaml = "
preprocessor: {sample_rate: 16000, window_size: 0.025, window_stride: 0.01, features: 16, n_fft: 512, pad_to: 0}
encoder:
  {feat_in: 16, n_layers: 1, d_model: 16, n_heads: 2, use_bias: false, xscaling: false, conv_kernel_size: 5,
   subsampling: dw_striding, subsampling_factor: 8, subsampling_conv_channels: 4}
decoder: {vocab_size: 8, prednet: {pred_hidden: 8, pred_rnn_layers: 1}}
joint: {jointnet: {joint_hidden: 8}}
loss: {tdt_kwargs: {durations: [0, 1, 2], sigma: 0.02}}
";
        let mut config = ModelConfig::from_nemo_yaml(yaml).unwrap();
        config.prompt = (!prompts.is_empty()).then(|| PromptConfig {
            prompts: 8,
            dictionary: prompts
                .iter()
                .map(|&(name, prompt)| (name.to_owned(), prompt))
                .collect(),
        });
        config
    }

    const PROMPTS: &[(&str, usize)] = &[("en-US", 0), ("hi-IN", 2), ("mr-IN", 3), ("auto", 7)];

    fn settings(change: impl FnOnce(&mut PromptSettings)) -> PromptSettings {
        let mut settings = PromptSettings::default();
        change(&mut settings);
        settings
    }

    #[test]
    fn modes_are_nemos() {
        let prompts = |mode, ratio| {
            let settings = settings(|settings| {
                settings.default_prompt_mode = mode;
                settings.unified_auto_ratio = ratio;
                settings.prompt_of.insert("bho".into(), "hi-IN".into());
            });
            RowPrompts::of_model(&config(PROMPTS), &settings, 5).unwrap().unwrap()
        };
        let language = prompts(PromptMode::LangId, 0.5);
        for (name, prompt) in [("en", 0), ("hi", 2), ("hi-IN", 2), ("mr", 3), ("bho", 2), ("", 7)] {
            assert_eq!(language.trained(3, "a", name), Ok(prompt), "{name}");
            assert_eq!(prompts(PromptMode::Auto, 0.5).trained(3, "a", name), Ok(7));
        }
        assert!(language.trained(3, "a", "xx").unwrap_err().contains("`xx`"));
        assert_eq!(prompts(PromptMode::Auto, 0.5).trained(3, "a", "xx"), Ok(7));

        // A draw depends on seed, step and segment alone. In 4,000 draws of probability 0.3 the share is within four standard
        // deviations of it.
        let unified = prompts(PromptMode::Unified, 0.3);
        let draws: Vec<usize> = (0..4_000)
            .map(|n| unified.trained(n / 40, &format!("s{}", n % 40), "hi").unwrap())
            .collect();
        let again: Vec<usize> = (0..4_000)
            .map(|n| unified.trained(n / 40, &format!("s{}", n % 40), "hi").unwrap())
            .collect();
        assert_eq!(draws, again);
        let share = draws.iter().filter(|&&prompt| prompt == 7).count() as f64 / 4_000.0;
        assert!((share - 0.3).abs() < 4.0 * (0.3f64 * 0.7 / 4_000.0).sqrt(), "{share}");
        assert!(draws.iter().all(|prompt| [2, 7].contains(prompt)));
        assert_ne!(draws[..40], draws[40..80]);
        assert_eq!(unified.evaluated("hi"), Ok(2));
        for (ratio, prompt) in [(0.0, 2), (1.0, 7)] {
            let all = prompts(PromptMode::Unified, ratio);
            assert!((0..100).all(|step| all.trained(step, "a", "hi") == Ok(prompt)));
        }
    }

    #[test]
    fn prompts_that_the_model_does_not_have_are_refused() {
        let refused = |prompts: &[(&str, usize)], settings: &PromptSettings| {
            RowPrompts::of_model(&config(prompts), settings, 5)
                .unwrap_err()
                .to_string()
        };
        assert!(
            RowPrompts::of_model(&config(&[]), &PromptSettings::default(), 5)
                .unwrap()
                .is_none()
        );
        let changed = settings(|settings| settings.unified_auto_ratio = 0.2);
        assert!(refused(&[], &changed).contains("no language prompts"));
        let unknown = settings(|settings| drop(settings.prompt_of.insert("hi".into(), "xx-YY".into())));
        assert!(refused(PROMPTS, &unknown).contains("`xx-YY`"));
        assert!(refused(&PROMPTS[..3], &PromptSettings::default()).contains("default_prompt_mode: langID"));

        let by_language = settings(|settings| settings.default_prompt_mode = PromptMode::LangId);
        let prompts = RowPrompts::of_model(&config(&PROMPTS[..3]), &by_language, 5)
            .unwrap()
            .unwrap();
        let rows_of =
            |languages: &[(&str, u64)]| languages.iter().map(|&(name, rows)| (name.to_owned(), rows)).collect();
        prompts
            .check("the input `train`", &rows_of(&[("en", 3), ("hi", 1)]))
            .unwrap();
        let error = prompts
            .check("the input `train`", &rows_of(&[("", 2), ("en", 3), ("ta", 4)]))
            .unwrap_err();
        let error = error.with_help();
        for part in [
            "the input `train`",
            "no language (2 rows)",
            "ta (4 rows)",
            "prompt_of",
            "mr-IN",
        ] {
            assert!(error.contains(part), "{error}");
        }
    }
}
