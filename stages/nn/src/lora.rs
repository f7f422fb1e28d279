//! LoRA: the matrix `W` of a linear layer stays as it is, and the product of two thin matrices, which are trained in its place, is
//! added to it: `W + (alpha / rank) B A` (Hu et al., 2021, arXiv:2106.09685).

use candle_core::Tensor;
use flow_kernels::elementwise::{add_in_place, scale_in_place};
use flow_kernels::product::product;

use crate::parameters::{Gradients, Initialise, ParameterBuilder, ParameterId, Parameters};
use crate::patterns::NamePattern;
use crate::{Error, Result};

/// Which linear layers and pointwise convolutions of a model have thin matrices, and how these count.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// Rows of `A` and columns of `B`.
    pub rank: usize,
    /// The product `B A` is multiplied by `alpha / rank`.
    pub alpha: f64,
    /// Patterns ([`NamePattern`]) of the names of modules, as NeMo or as transformers names them.
    pub targets: Vec<String>,
    /// The model that is adapted, as PEFT's `base_model_name_or_path` names it.
    pub base: String,
}

impl LoraConfig {
    /// What `B A` is multiplied by.
    pub fn scale(&self) -> f64 {
        self.alpha / self.rank as f64
    }
}

/// Ending of the name of `A`, (rank, in), after that of the module.
pub const A: &str = ".lora_A.weight";
/// Ending of the name of `B`, (out, rank).
pub const B: &str = ".lora_B.weight";

/// The module of a thin matrix; none of another parameter.
pub fn module_of(name: &str) -> Option<&str> {
    name.strip_suffix(A).or_else(|| name.strip_suffix(B))
}

/// The targets while modules are made.
pub struct Targets {
    config: LoraConfig,
    /// The name that a module has elsewhere; patterns may name it by this one too.
    other_name: fn(&str) -> String,
    /// Whether each matched a module.
    patterns: Vec<(NamePattern, bool)>,
}

impl Targets {
    pub fn new(config: LoraConfig, other_name: fn(&str) -> String) -> Result<Self> {
        if config.rank == 0 || !config.alpha.is_finite() || config.alpha <= 0.0 {
            return Err(Error::Input("LoRA needs a rank and an alpha above 0".into()));
        }
        if config.targets.is_empty() {
            return Err(Error::Input(
                "LoRA needs targets: patterns of the names of modules".into(),
            ));
        }
        let patterns = config.targets.iter().map(|text| Ok((NamePattern::new(text)?, false)));
        Ok(Targets {
            patterns: patterns.collect::<Result<_>>()?,
            config,
            other_name,
        })
    }

    /// Whether a module is among them.
    fn have(&mut self, module: &str) -> bool {
        let other = (self.other_name)(module);
        let mut any = false;
        for (pattern, matched) in &mut self.patterns {
            if pattern.matches(module) || pattern.matches(&other) {
                (any, *matched) = (true, true);
            }
        }
        any
    }

    /// An error where a target is no module that LoRA is for.
    pub fn check(&self) -> Result<()> {
        match self.patterns.iter().find(|(_, matched)| !matched) {
            None => Ok(()),
            Some((pattern, _)) => Err(Error::Input(format!(
                "LoRA: `{}` matches the name of no linear layer or pointwise convolution; there are, for instance, `linear_q` \
                 (or `q_proj`), `linear1`, `pointwise_conv1` and `joint.enc` (the LSTM, the embedding and the last layer of the \
                 joint network cannot be adapted)",
                pattern.text()
            ))),
        }
    }
}

/// The thin matrices of one linear layer: `A` (rank, in) and `B` (out, rank).
#[derive(Clone, Copy, Debug)]
pub struct LowRank {
    a: ParameterId,
    b: ParameterId,
    scale: f64,
}

impl LowRank {
    /// Those of a module, if it is to have some. In a new model `B` is 0 and `A` uniform within `1 / sqrt(in)`, as PEFT begins.
    pub fn of(module: &str, (input, output): (usize, usize), builder: &mut ParameterBuilder) -> Result<Option<Self>> {
        let Some(targets) = builder.lora_targets() else {
            return Ok(None);
        };
        if !targets.have(module) {
            return Ok(None);
        }
        let (rank, scale) = (targets.config.rank, targets.config.scale());
        let bound = Initialise::Uniform(1.0 / (input as f64).sqrt());
        let a = builder.added(&format!("{module}{A}"), &[rank, input], bound)?;
        let b = builder.added(&format!("{module}{B}"), &[output, rank], Initialise::Constant(0.0))?;
        Ok(Some(LowRank { a, b, scale }))
    }

    /// An activation in the number type of the thin matrices; it may be in bf16 for other products.
    fn wide(&self, parameters: &Parameters, x: &Tensor) -> Result<Tensor> {
        let dtype = parameters.get(self.a).dtype();
        match x.dtype() == dtype {
            true => Ok(x.clone()),
            false => Ok(x.to_dtype(dtype)?),
        }
    }

    /// `scale x A^T`, (rows, rank).
    fn inner(&self, parameters: &Parameters, x: &Tensor) -> Result<Tensor> {
        let inner = product(&self.wide(parameters, x)?, &parameters.get(self.a).t()?)?;
        scale_in_place(&inner, self.scale)?;
        Ok(inner)
    }

    /// `scale dy B`, (rows, rank).
    fn d_inner(&self, parameters: &Parameters, dy: &Tensor) -> Result<Tensor> {
        let d_inner = product(&self.wide(parameters, dy)?, parameters.get(self.b))?;
        scale_in_place(&d_inner, self.scale)?;
        Ok(d_inner)
    }

    /// Adds `scale x A^T B^T` to the output of the layer, in place.
    pub fn add_output(&self, parameters: &Parameters, x: &Tensor, y: &Tensor) -> Result<()> {
        let added = product(&self.inner(parameters, x)?, &parameters.get(self.b).t()?)?;
        Ok(add_in_place(y, &added)?)
    }

    /// Adds `scale dy B A` to the gradient of the input, in place.
    pub fn add_input_gradient(&self, parameters: &Parameters, dy: &Tensor, dx: &Tensor) -> Result<()> {
        let added = product(&self.d_inner(parameters, dy)?, parameters.get(self.a))?;
        Ok(add_in_place(dx, &added)?)
    }

    /// Adds the gradients of both matrices: `dB = scale dy^T (x A^T)` and `dA = scale (dy B)^T x`.
    pub fn add_gradients(
        &self,
        parameters: &Parameters,
        x: &Tensor,
        dy: &Tensor,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let (x, dy) = (&self.wide(parameters, x)?, &self.wide(parameters, dy)?);
        if gradients.wants(self.b) {
            let inner = self.inner(parameters, x)?;
            gradients.add(self.b, product(&dy.t()?, &inner)?)?;
        }
        if gradients.wants(self.a) {
            let d_inner = self.d_inner(parameters, dy)?;
            gradients.add(self.a, product(&d_inner.t()?, x)?)?;
        }
        Ok(())
    }
}
