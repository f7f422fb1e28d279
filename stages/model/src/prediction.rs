//! The prediction network: an embedding of the tokens so far and an LSTM over them.

use candle_core::{Device, Tensor};
use flow_kernels::column_sums::totals;
use flow_kernels::device::to_device;
use flow_kernels::elementwise::drop_scaled;
use flow_kernels::embedding::{ListedRows, add_to_rows};
use flow_kernels::greedy::Search;
use flow_kernels::lstm::{LstmSaved, LstmWeights, lstm, lstm_backward, lstm_step, replace_rows};
use flow_kernels::noise::DropMask;
use flow_kernels::{dispatch, is_gpu, slice, tensor};

use crate::{Error, Result};
use flow_nn::layers::dropout;
use flow_nn::parameters::{Gradients, Initialise, Mode, ParameterBuilder, ParameterId, Parameters};

/// Embedding and LSTM. Its first input is the embedding of blank. In NeMo's models that row is zero and stays so; models
/// that were trained with transformers may have learned another.
#[derive(Debug, Clone)]
pub struct Prediction {
    embedding: ParameterId,
    layers: Vec<Layer>,
    width: usize,
    vocabulary: usize,
    dropout: f64,
}

#[derive(Debug, Clone, Copy)]
struct Layer {
    input: ParameterId,
    hidden: ParameterId,
    input_bias: ParameterId,
    hidden_bias: ParameterId,
}

impl Layer {
    fn weights<'a>(&self, parameters: &'a Parameters) -> LstmWeights<'a> {
        LstmWeights {
            input: parameters.get(self.input),
            hidden: parameters.get(self.hidden),
            input_bias: parameters.get(self.input_bias),
            hidden_bias: parameters.get(self.hidden_bias),
        }
    }
}

/// What the backward pass needs.
#[derive(Debug)]
pub struct PredictionSaved {
    layers: Vec<LstmSaved>,
    /// Dropout after each layer.
    masks: Vec<Option<DropMask>>,
    tokens: Tokens,
}

/// The token that entered at each (step, utterance), step major; none for the first step and for padding.
#[derive(Debug)]
enum Tokens {
    Host(Vec<Option<u32>>),
    /// As rows of the embedding on a device: that of blank for none.
    Device(ListedRows),
}

/// State of the LSTM between two steps of decoding, one row per utterance.
#[derive(Debug, Clone)]
pub struct PredictionState {
    hidden: Vec<Tensor>,
    cells: Vec<Tensor>,
}

impl PredictionState {
    /// The same in tensors of its own.
    pub fn copied(&self) -> Result<Self> {
        let copy = |states: &[Tensor]| states.iter().map(Tensor::copy).collect::<candle_core::Result<Vec<_>>>();
        Ok(PredictionState {
            hidden: copy(&self.hidden)?,
            cells: copy(&self.cells)?,
        })
    }

    /// The states of these rows, in this order; a row may come several times.
    pub fn select(&self, rows: &[u32]) -> Result<Self> {
        let select = |states: &[Tensor]| -> Result<Vec<Tensor>> {
            let selected = states.iter().map(|state| select_rows(state, rows));
            selected.collect()
        };
        Ok(PredictionState {
            hidden: select(&self.hidden)?,
            cells: select(&self.cells)?,
        })
    }
}

/// These rows of a matrix, in this order; a row may come several times.
pub fn select_rows(matrix: &Tensor, rows: &[u32]) -> Result<Tensor> {
    Ok(matrix.index_select(&Tensor::new(rows, matrix.device())?, 0)?)
}

impl Prediction {
    /// Declares the parameters under `prefix` (`decoder.prediction`), filled as NeMo does: embedding N(0, 1) with a
    /// zero row for blank; LSTM uniform in 1 / sqrt(width), with a forget bias of one.
    pub fn new(
        vocabulary: usize,
        width: usize,
        layers: usize,
        dropout: f64,
        prefix: &str,
        builder: &mut ParameterBuilder,
    ) -> Result<Self> {
        let rows = vocabulary;
        let embedding = builder.parameter(
            &format!("{prefix}.embed.weight"),
            &[vocabulary + 1, width],
            Initialise::With(Box::new(move |noise| {
                let mut values: Vec<f64> = (0..rows * width).map(|_| noise.normal()).collect();
                values.resize((rows + 1) * width, 0.0);
                values
            })),
        )?;
        let bound = 1.0 / (width.max(1) as f64).sqrt();
        let bias = |forget: f64| {
            Initialise::With(Box::new(move |noise| {
                let mut values: Vec<f64> = (0..4 * width).map(|_| (2.0 * noise.uniform() - 1.0) * bound).collect();
                values[width..2 * width].fill(forget);
                values
            }))
        };
        let mut made = Vec::with_capacity(layers);
        for index in 0..layers {
            let name = |part: &str| format!("{prefix}.dec_rnn.lstm.{part}_l{index}");
            let square = [4 * width, width];
            made.push(Layer {
                input: builder.parameter(&name("weight_ih"), &square, Initialise::Uniform(bound))?,
                hidden: builder.parameter(&name("weight_hh"), &square, Initialise::Uniform(bound))?,
                input_bias: builder.parameter(&name("bias_ih"), &[4 * width], bias(1.0))?,
                hidden_bias: builder.parameter(&name("bias_hh"), &[4 * width], bias(0.0))?,
            });
        }
        Ok(Prediction {
            embedding,
            layers: made,
            width,
            vocabulary,
            dropout,
        })
    }

    /// Outputs for a batch of targets, padded to the longest: (batch, longest + 1, width). Row u of an utterance has
    /// seen its first u tokens.
    pub fn forward(
        &self,
        parameters: &Parameters,
        targets: &[Vec<u32>],
        mut mode: Mode,
    ) -> Result<(Tensor, PredictionSaved)> {
        let steps = targets.iter().map(Vec::len).max().unwrap_or(0) + 1;
        let batch = targets.len();
        let mut tokens = vec![None; steps * batch];
        for (b, target) in targets.iter().enumerate() {
            for (u, &token) in target.iter().enumerate() {
                tokens[(u + 1) * batch + b] = Some(token);
            }
        }
        self.check_tokens(&tokens)?;
        let tokens = match is_gpu(parameters.device()) {
            true => Tokens::Device(self.listed(&tokens, parameters.device())?),
            false => Tokens::Host(tokens),
        };
        let x = match &tokens {
            Tokens::Host(tokens) => self.embed(parameters, tokens)?,
            Tokens::Device(rows) => parameters.get(self.embedding).index_select(rows.rows(), 0)?,
        };
        let mut x = x.reshape((steps, batch, self.width))?;
        let (mut layers, mut masks) = (Vec::new(), Vec::new());
        for layer in &self.layers {
            let (y, saved) = lstm(&x, layer.weights(parameters))?;
            let mask = dropout::draw(self.dropout, &mut mode);
            x = drop_scaled(&y, 1.0, mask)?;
            layers.push(saved);
            masks.push(mask);
        }
        Ok((
            x.transpose(0, 1)?.contiguous()?,
            PredictionSaved { layers, masks, tokens },
        ))
    }

    /// Adds the parameters' gradients, given that of the outputs (batch, steps, width).
    pub fn backward(
        &self,
        parameters: &Parameters,
        saved: &PredictionSaved,
        dy: &Tensor,
        gradients: &mut Gradients,
    ) -> Result<()> {
        let of_layer = |layer: &Layer| [layer.input, layer.hidden, layer.input_bias, layer.hidden_bias];
        let mut ids = self.layers.iter().flat_map(of_layer).chain([self.embedding]);
        if !ids.any(|id| gradients.wants(id)) {
            return Ok(());
        }
        let mut dy = dy.transpose(0, 1)?.contiguous()?;
        let (mut biases, mut sums) = (Vec::new(), Vec::new());
        for ((layer, kept), &mask) in self.layers.iter().zip(&saved.layers).zip(&saved.masks).rev() {
            let d = lstm_backward(&drop_scaled(&dy, 1.0, mask)?, kept, layer.weights(parameters))?;
            if gradients.wants(layer.input) {
                gradients.add(layer.input, d.input_weight()?)?;
            }
            if gradients.wants(layer.hidden) {
                gradients.add(layer.hidden, d.hidden_weight()?)?;
            }
            let both = [layer.input_bias, layer.hidden_bias];
            if both.iter().any(|&id| gradients.wants(id)) {
                biases.push(both);
                sums.push(d.bias()?);
            }
            dy = d.input;
        }
        for (both, sum) in biases.into_iter().zip(totals(sums)?) {
            for id in both {
                gradients.add(id, sum.force_contiguous()?)?;
            }
        }
        if gradients.wants(self.embedding) {
            gradients.add(self.embedding, self.embedding_gradient(&dy, &saved.tokens)?)?;
        }
        Ok(())
    }

    /// The state before the first token.
    pub fn start(&self, parameters: &Parameters, batch: usize) -> Result<PredictionState> {
        let zeros = || Tensor::zeros((batch, self.width), parameters.dtype(), parameters.device());
        let make = || {
            self.layers
                .iter()
                .map(|_| zeros())
                .collect::<candle_core::Result<Vec<_>>>()
        };
        Ok(PredictionState {
            hidden: make()?,
            cells: make()?,
        })
    }

    /// One step for the utterances that have a token (the first step: none has), the others staying as they are. The
    /// result is the output of every utterance, (batch, width).
    pub fn step(
        &self,
        parameters: &Parameters,
        tokens: &[Option<u32>],
        moves: &[bool],
        state: &mut PredictionState,
    ) -> Result<Tensor> {
        let mut x = self.embed(parameters, tokens)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let (hidden, cell) = lstm_step(&x, &state.hidden[index], &state.cells[index], layer.weights(parameters))?;
            state.hidden[index] = replace_rows(&state.hidden[index], &hidden, moves)?;
            state.cells[index] = replace_rows(&state.cells[index], &cell, moves)?;
            x = state.hidden[index].clone();
        }
        Ok(x)
    }

    /// [`Prediction::step`] for the utterances that emitted a token in the last step of a search on a device. Rows of the
    /// state are replaced in place; the result shares them.
    pub fn step_of_search(
        &self,
        parameters: &Parameters,
        search: &Search,
        state: &mut PredictionState,
    ) -> Result<Tensor> {
        let mut x = search.embedded(parameters.get(self.embedding))?;
        for (layer, (hidden, cell)) in self.layers.iter().zip(state.hidden.iter().zip(&state.cells)) {
            search.lstm_step(&x, hidden, cell, layer.weights(parameters))?;
            x = hidden.clone();
        }
        Ok(x)
    }

    /// Embedding rows, that of blank where there is no token: (tokens, width).
    fn embed(&self, parameters: &Parameters, tokens: &[Option<u32>]) -> Result<Tensor> {
        self.check_tokens(tokens)?;
        let table = parameters.get(self.embedding);
        let width = self.width;
        if is_gpu(table.device()) {
            let rows = tokens.iter().map(|token| token.unwrap_or(self.vocabulary as u32));
            let rows = Tensor::from_iter(rows, &Device::Cpu)?;
            return Ok(table.index_select(&to_device(&rows, table.device())?, 0)?);
        }
        dispatch!(table.dtype(), T => {
            let table = slice::<T>(table)?;
            let mut out = vec![0.0 as T; tokens.len() * width];
            for (out, token) in out.chunks_exact_mut(width).zip(tokens) {
                let row = token.map_or(self.vocabulary, |token| token as usize);
                out.copy_from_slice(&table[row * width..][..width]);
            }
            Ok(tensor(out, (tokens.len(), width))?)
        })
    }

    fn check_tokens(&self, tokens: &[Option<u32>]) -> Result<()> {
        if let Some(token) = tokens
            .iter()
            .flatten()
            .find(|&&token| token as usize >= self.vocabulary)
        {
            return Err(Error::Input(format!(
                "token {token} is not below the vocabulary's {}",
                self.vocabulary
            )));
        }
        Ok(())
    }

    /// The rows of the embedding on a device, in an order in which their gradients can be added up.
    fn listed(&self, tokens: &[Option<u32>], device: &Device) -> Result<ListedRows> {
        let row = |token: &Option<u32>| token.map_or(self.vocabulary, |token| token as usize);
        let rows: Vec<usize> = tokens.iter().map(row).collect();
        Ok(ListedRows::copied(&rows, device)?)
    }

    /// Sums of the rows of `dx` per token. That of blank is never learned, as in NeMo, so its sum stays zero.
    fn embedding_gradient(&self, dx: &Tensor, tokens: &Tokens) -> Result<Tensor> {
        let dx = dx.contiguous()?;
        let sums = Tensor::zeros((self.vocabulary + 1, self.width), dx.dtype(), dx.device())?;
        match tokens {
            Tokens::Host(tokens) => {
                let rows: Vec<Option<usize>> = tokens.iter().map(|token| token.map(|token| token as usize)).collect();
                add_to_rows(&sums, &dx, &rows)?;
            }
            Tokens::Device(rows) => {
                let dx = dx.reshape((rows.rows().elem_count(), self.width))?;
                rows.add_to(&sums, &dx, self.vocabulary)?;
            }
        }
        Ok(sums)
    }
}
