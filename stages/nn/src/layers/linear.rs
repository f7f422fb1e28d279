//! Linear layer, and pointwise convolution, which is the same with one more axis of size 1 in its weight.

use candle_core::{DType, Tensor};
use flow_kernels::bias::{add_bias, column_sum, column_sums};
use flow_kernels::is_gpu;
use flow_kernels::product::{add_product_in, product_in, product_rounded_in, product_with_bias_in};

use crate::error::Result;
use crate::lora::LowRank;
use crate::parameters::{Gradients, Initialise, ParameterBuilder, ParameterId, Parameters};
use crate::pending_sums::PendingSums;

/// `y = x W^T + b`.
#[derive(Clone, Debug)]
pub struct Linear {
    weight: ParameterId,
    bias: Option<ParameterId>,
    input: usize,
    output: usize,
    /// Shape of the weight as a parameter: (out, in), (out, in, 1) or (out, in, 1, 1).
    shape: Vec<usize>,
    /// Data type in which the weight is stored; on a device, products are computed in it.
    stored: DType,
    /// What is added to the weight.
    low_rank: Option<LowRank>,
}

impl Linear {
    /// A linear layer named `name`: `name.weight` (out, in) and, with `bias`, `name.bias` (out).
    pub fn new(name: &str, input: usize, output: usize, bias: bool, builder: &mut ParameterBuilder) -> Result<Self> {
        Self::with_shape(name, vec![output, input], bias, 1.0 / (input as f64).sqrt(), builder)
    }

    /// The same with a weight of shape (out, in, 1, ...), as a pointwise convolution has it, and a bound for the
    /// uniform initial values.
    pub fn with_shape(
        name: &str,
        shape: Vec<usize>,
        bias: bool,
        bound: f64,
        builder: &mut ParameterBuilder,
    ) -> Result<Self> {
        let (output, input) = (shape[0], shape[1]);
        let weight = builder.matrix(&format!("{name}.weight"), &shape, Initialise::Uniform(bound))?;
        let bias = bias
            .then(|| builder.parameter(&format!("{name}.bias"), &[output], Initialise::Uniform(bound)))
            .transpose()?;
        let low_rank = LowRank::of(name, (input, output), builder)?;
        Ok(Self {
            weight,
            bias,
            input,
            output,
            shape,
            stored: builder.matrix_dtype(),
            low_rank,
        })
    }

    /// The weight.
    pub fn weight_id(&self) -> ParameterId {
        self.weight
    }

    /// The bias, if there is one.
    pub fn bias(&self) -> Option<ParameterId> {
        self.bias
    }

    /// Whether LoRA's matrices are added to the weight.
    pub fn is_adapted(&self) -> bool {
        self.low_rank.is_some()
    }

    /// The type in which an input or an output's gradient, which now is `x`, is multiplied with the weight: that of `x`, but
    /// bf16 on a device where the weight is stored so.
    pub fn factors(&self, x: &Tensor) -> DType {
        match is_gpu(x.device()) && self.stored == DType::BF16 {
            true => DType::BF16,
            false => x.dtype(),
        }
    }

    /// Whether [`Linear::forward_rounded`] and [`Linear::backward_rounded`] round their results: where products with the weight are in
    /// bf16 on the device of `like`, and nothing is added to them.
    pub fn rounds(&self, like: &Tensor) -> bool {
        let plain = self.bias.is_none() && self.low_rank.is_none();
        plain && self.stored == DType::BF16 && is_gpu(like.device())
    }

    fn weight(&self, parameters: &Parameters) -> Result<Tensor> {
        let stored = parameters.get(self.weight);
        let weight = if is_gpu(stored.device()) {
            stored.clone()
        } else {
            parameters.matrix(self.weight)?
        };
        Ok(weight.reshape((self.output, self.input))?)
    }

    /// (rows, in) -> (rows, out).
    pub fn forward(&self, parameters: &Parameters, x: &Tensor) -> Result<Tensor> {
        let Some(bias) = self.bias.map(|id| parameters.get(id)) else {
            return self.product(parameters, x);
        };
        if parameters.packed(self.weight).is_none() {
            let weight = self.weight(parameters)?;
            let y = product_with_bias_in(self.stored, x, &weight.t()?, bias)?;
            return self.with_low_rank(parameters, x, y);
        }
        let y = self.product(parameters, x)?;
        add_bias(&y, bias)?;
        Ok(y)
    }

    /// [`Linear::forward`]; with `rounded` the result is in bf16 if the layer [rounds](Linear::rounds), for kernels that read it so.
    pub fn forward_rounded(&self, parameters: &Parameters, x: &Tensor, rounded: bool) -> Result<Tensor> {
        match rounded && self.rounds(x) {
            true => Ok(product_rounded_in(self.stored, x, &self.weight(parameters)?.t()?)?),
            false => self.forward(parameters, x),
        }
    }

    /// The product alone, for callers that add the bias in a pass of their own.
    pub fn product(&self, parameters: &Parameters, x: &Tensor) -> Result<Tensor> {
        let y = match parameters.packed(self.weight) {
            Some(packed) => packed.product(x)?,
            None => product_in(self.stored, x, &self.weight(parameters)?.t()?)?,
        };
        self.with_low_rank(parameters, x, y)
    }

    /// The output with that of LoRA's matrices, if there are some.
    fn with_low_rank(&self, parameters: &Parameters, x: &Tensor, y: Tensor) -> Result<Tensor> {
        if let Some(low_rank) = &self.low_rank {
            low_rank.add_output(parameters, x, &y)?;
        }
        Ok(y)
    }

    /// The gradient of the input.
    fn input_gradient(&self, parameters: &Parameters, dy: &Tensor, rounded: bool) -> Result<Tensor> {
        if rounded && self.rounds(dy) {
            return Ok(product_rounded_in(self.stored, dy, &self.weight(parameters)?)?);
        }
        let dx = product_in(self.stored, dy, &self.weight(parameters)?)?;
        if let Some(low_rank) = &self.low_rank {
            low_rank.add_input_gradient(parameters, dy, &dx)?;
        }
        Ok(dx)
    }

    /// Adds the gradients of weight and bias for input `x` and output gradient `dy`, and gives that of `x`.
    pub fn backward(
        &self,
        parameters: &Parameters,
        x: &Tensor,
        dy: &Tensor,
        gradients: &mut Gradients,
    ) -> Result<Tensor> {
        self.backward_weights(parameters, x, dy, gradients)?;
        self.input_gradient(parameters, dy, false)
    }

    /// The same, with the gradient of the bias left in `sums`.
    pub fn backward_pending(
        &self,
        parameters: &Parameters,
        x: &Tensor,
        dy: &Tensor,
        gradients: &mut Gradients,
        sums: &mut PendingSums,
    ) -> Result<Tensor> {
        self.backward_rounded(parameters, x, (dy, false), gradients, sums)
    }

    /// The same; with `rounded` the gradient of `x` is in bf16 if the layer [rounds](Linear::rounds), for kernels that read it so.
    pub fn backward_rounded(
        &self,
        parameters: &Parameters,
        x: &Tensor,
        (dy, rounded): (&Tensor, bool),
        gradients: &mut Gradients,
        sums: &mut PendingSums,
    ) -> Result<Tensor> {
        self.backward_weight(parameters, x, dy, gradients)?;
        if let Some(bias) = self.bias
            && gradients.wants(bias)
        {
            sums.add(&[bias], column_sums(&wide(dy)?)?);
        }
        self.input_gradient(parameters, dy, rounded)
    }

    /// Adds the gradients of weight and bias only.
    pub fn backward_weights(
        &self,
        parameters: &Parameters,
        x: &Tensor,
        dy: &Tensor,
        gradients: &mut Gradients,
    ) -> Result<()> {
        self.backward_weight(parameters, x, dy, gradients)?;
        if let Some(bias) = self.bias
            && gradients.wants(bias)
        {
            gradients.add(bias, column_sum(&wide(dy)?)?)?;
        }
        Ok(())
    }

    fn backward_weight(
        &self,
        parameters: &Parameters,
        x: &Tensor,
        dy: &Tensor,
        gradients: &mut Gradients,
    ) -> Result<()> {
        if let Some(low_rank) = &self.low_rank {
            low_rank.add_gradients(parameters, x, dy, gradients)?;
        }
        if !gradients.wants(self.weight) {
            return Ok(());
        }
        match gradients.get(self.weight).filter(|sum| is_gpu(sum.device())) {
            Some(sum) => {
                let sum = sum.reshape((self.output, self.input))?;
                add_product_in(self.stored, &sum, &dy.t()?, x)?;
            }
            None => {
                let gradient = product_in(self.stored, &dy.t()?, x)?;
                gradients.add(self.weight, gradient.reshape(self.shape.as_slice())?)?;
            }
        }
        Ok(())
    }
}

/// A gradient that may be in bf16 for products, for sums.
fn wide(dy: &Tensor) -> Result<Tensor> {
    match dy.dtype() {
        DType::BF16 => Ok(dy.to_dtype(DType::F32)?),
        _ => Ok(dy.clone()),
    }
}
