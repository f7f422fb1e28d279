//! The language prompt: two linear layers between the encoder and the heads, the first of which also sees which language is spoken.
//! NeMo's `EncDecRNNTBPEModelWithPrompt` and its hybrid have them.

use candle_core::Tensor;

use crate::config::{ModelConfig, PromptConfig};
use crate::{Error, Result};
use flow_nn::layers::linear::Linear;
use flow_nn::parameters::{ParameterBuilder, Parameters};

/// What the names of its tensors begin with, as in NeMo.
pub const NAME: &str = "prompt_kernel.";

/// `y = W2 relu(W0 [x ; onehot(prompt)] + b0) + b2` at every frame: width D, P prompts, 2 D between.
#[derive(Clone, Debug)]
pub struct PromptKernel {
    first: Linear,
    second: Linear,
    prompts: usize,
}

impl PromptKernel {
    /// `prompt_kernel.0` and `prompt_kernel.2`, if the model has a prompt.
    pub fn of_model(config: &ModelConfig, builder: &mut ParameterBuilder) -> Result<Option<Self>> {
        let Some(prompt) = &config.prompt else { return Ok(None) };
        let (width, prompts) = (config.encoder.d_model, prompt.prompts);
        Ok(Some(PromptKernel {
            first: Linear::new(&format!("{NAME}0"), width + prompts, 2 * width, true, builder)?,
            second: Linear::new(&format!("{NAME}2"), 2 * width, width, true, builder)?,
            prompts,
        }))
    }

    /// Frames (rows, D) -> (rows, D), by the prompt of this number.
    ///
    /// # Errors
    /// Where there is no such prompt.
    pub fn forward(&self, parameters: &Parameters, x: &Tensor, prompt: usize) -> Result<Tensor> {
        if prompt >= self.prompts {
            let prompts = self.prompts;
            return Err(Error::Input(format!("prompt {prompt}: the model has {prompts}")));
        }
        let rows = x.dim(0)?;
        let mut one_hot = vec![0.0f32; self.prompts];
        one_hot[prompt] = 1.0;
        let one_hot = Tensor::from_vec(one_hot, (1, self.prompts), &candle_core::Device::Cpu)?;
        let one_hot = one_hot.to_dtype(x.dtype())?.to_device(x.device())?;
        let input = Tensor::cat(&[x, &one_hot.repeat((rows, 1))?], 1)?;
        let hidden = self.first.forward(parameters, &input.contiguous()?)?.relu()?;
        self.second.forward(parameters, &hidden)
    }
}

impl PromptConfig {
    /// The name of the prompt by which the model finds out the language itself.
    pub const AUTO: &str = "auto";

    /// The number of the prompt of a language: by its name in the dictionary (`de-DE`), in any case, or else by the part before its
    /// region (`de`, the first of these).
    ///
    /// # Errors
    /// Where the dictionary has no such language; it says which it has.
    pub fn find(&self, language: &str) -> Result<usize> {
        let main = |name: &str| name.split(['-', '_']).next().unwrap_or_default().to_lowercase();
        let all = &self.dictionary;
        let alike = |(name, _): &&(String, usize)| name.eq_ignore_ascii_case(language);
        let related = |(name, _): &&(String, usize)| main(name) == main(language);
        let found = all.iter().find(alike).or_else(|| all.iter().find(related));
        found.map(|(_, prompt)| *prompt).ok_or_else(|| {
            let shown: String = language.chars().take(40).collect();
            let known: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
            Error::Input(format!(
                "the model has no prompt for the language `{shown}`; it has {}",
                known.join(", ")
            ))
        })
    }

    /// The prompt where no language is named: `auto`, if there is one.
    pub fn default_prompt(&self) -> Option<usize> {
        let auto = self.dictionary.iter().find(|(name, _)| name == Self::AUTO);
        auto.map(|(_, prompt)| *prompt)
    }
}

#[cfg(test)]
#[path = "prompt_tests.rs"]
mod tests;
