//! The language prompt: two linear layers between the encoder and the heads, the first of which also sees which language is spoken.
//! NeMo's `EncDecRNNTBPEModelWithPrompt` and its hybrid have them.

use candle_core::Tensor;

use crate::config::{ModelConfig, PromptConfig};
use crate::{Error, Result};
use flow_kernels::subsample::relu_backward;
use flow_nn::layers::linear::Linear;
use flow_nn::parameters::{Gradients, ParameterBuilder, Parameters};

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
        Self::new(config.encoder.d_model, prompt.prompts, builder).map(Some)
    }

    /// Layers of width D for so many prompts.
    pub(crate) fn new(width: usize, prompts: usize, builder: &mut ParameterBuilder) -> Result<Self> {
        Ok(PromptKernel {
            first: Linear::new(&format!("{NAME}0"), width + prompts, 2 * width, true, builder)?,
            second: Linear::new(&format!("{NAME}2"), 2 * width, width, true, builder)?,
            prompts,
        })
    }

    /// Frames (rows, D) -> (rows, D), by the prompt of this number.
    ///
    /// # Errors
    /// Where there is no such prompt.
    pub fn forward(&self, parameters: &Parameters, x: &Tensor, prompt: usize) -> Result<Tensor> {
        let (y, _) = self.forward_each(parameters, &x.unsqueeze(0)?, &[prompt])?;
        Ok(y.squeeze(0)?)
    }

    /// Frames (batch, frames, D) -> the same shape, each utterance by its own prompt, and what the backward pass needs. Frames that
    /// pad an utterance get values too.
    ///
    /// # Errors
    /// Where there is no such prompt, or the number of prompts is not that of utterances.
    pub fn forward_each(&self, parameters: &Parameters, x: &Tensor, prompts: &[usize]) -> Result<(Tensor, Saved)> {
        let (batch, frames, width) = x.dims3()?;
        if prompts.len() != batch {
            let given = prompts.len();
            return Err(Error::Input(format!(
                "{given} prompts are not those of {batch} utterances"
            )));
        }
        let mut one_hot = vec![0.0f32; batch * self.prompts];
        for (row, &prompt) in one_hot.chunks_exact_mut(self.prompts).zip(prompts) {
            let prompts = self.prompts;
            *row.get_mut(prompt)
                .ok_or_else(|| Error::Input(format!("prompt {prompt}: the model has {prompts}")))? = 1.0;
        }
        let one_hot = Tensor::from_vec(one_hot, (batch, 1, self.prompts), &candle_core::Device::Cpu)?;
        let one_hot = one_hot.to_dtype(x.dtype())?.to_device(x.device())?;
        let input = Tensor::cat(&[x, &one_hot.repeat((1, frames, 1))?], 2)?;
        let input = input.contiguous()?.reshape((batch * frames, width + self.prompts))?;
        let hidden = self.first.forward(parameters, &input)?.relu()?;
        let y = self
            .second
            .forward(parameters, &hidden)?
            .reshape((batch, frames, width))?;
        Ok((y, Saved { input, hidden }))
    }

    /// Adds the gradients of the layers' parameters for the gradient of the output, (batch, frames, D), and gives that of the
    /// frames, unless the encoder is frozen.
    ///
    /// # Errors
    /// Where the shape is not that of the forward pass.
    pub fn backward(
        &self,
        parameters: &Parameters,
        saved: &Saved,
        dy: &Tensor,
        encoder_frozen: bool,
        gradients: &mut Gradients,
    ) -> Result<Option<Tensor>> {
        let (batch, frames, width) = dy.dims3()?;
        let dy = dy.reshape((batch * frames, width))?;
        let d_hidden = self.second.backward(parameters, &saved.hidden, &dy, gradients)?;
        let d_hidden = relu_backward(&saved.hidden, &d_hidden)?;
        if encoder_frozen {
            self.first
                .backward_weights(parameters, &saved.input, &d_hidden, gradients)?;
            return Ok(None);
        }
        let d_input = self.first.backward(parameters, &saved.input, &d_hidden, gradients)?;
        let dx = d_input.narrow(1, 0, width)?.contiguous()?;
        Ok(Some(dx.reshape((batch, frames, width))?))
    }
}

/// What a forward pass keeps for the backward pass.
pub struct Saved {
    /// Frames with the prompts, (rows, D + P).
    input: Tensor,
    /// After the ReLU, (rows, 2 D).
    hidden: Tensor,
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
