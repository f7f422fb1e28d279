//! The language prompt in NeMo's `model_config.yaml`: `model_defaults.{initialize_prompt_feature, num_prompts, prompt_dictionary}`.

use serde_yaml::{Mapping, Value};

use super::PromptConfig;
use super::section::{Section, wrong};
use super::write::put;
use crate::Result;

/// NeMo's number of prompts where the configuration says none.
const DEFAULT_PROMPTS: usize = 128;
const MOST_PROMPTS: usize = 4_096;

/// The prompt, if the model has one.
pub(super) fn read(root: &Section) -> Result<Option<PromptConfig>> {
    let section = root.section("model_defaults")?;
    if !section.flag("initialize_prompt_feature", false)? {
        return Ok(None);
    }
    let prompts = section.optional_size("num_prompts", 1..=MOST_PROMPTS)?;
    let prompts = prompts.unwrap_or(DEFAULT_PROMPTS);
    let names = section.section("prompt_dictionary")?;
    let mut dictionary = Vec::new();
    for (name, prompt) in names.map.into_iter().flatten() {
        let number = prompt.as_u64().and_then(|number| usize::try_from(number).ok());
        let name = match name {
            Value::String(name) => name.clone(),
            // Norwegian's code is a truth value to older readers of YAML.
            Value::Bool(false) => "no".to_owned(),
            other => return Err(wrong(&names.path, "names of languages", other)),
        };
        match number.filter(|&number| number < prompts) {
            Some(number) => dictionary.push((name, number)),
            None => {
                let expected = format!("a number below {prompts}");
                return Err(wrong(&names.key(&name), &expected, prompt));
            }
        }
    }
    Ok(Some(PromptConfig { prompts, dictionary }))
}

/// Writes what [`read`] reads.
pub(super) fn write(prompt: &PromptConfig, root: &mut Mapping) {
    put(root, &["model_defaults", "initialize_prompt_feature"], true);
    put(root, &["model_defaults", "num_prompts"], prompt.prompts);
    let dictionary: Mapping = (prompt.dictionary.iter())
        .map(|(name, number)| (Value::from(name.as_str()), Value::from(*number)))
        .collect();
    put(root, &["model_defaults", "prompt_dictionary"], dictionary);
}
