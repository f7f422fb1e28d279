//! The work of each part of a training step.
//!
//! `n` rows are the encoder's frames of all clips, padding included, of width `d`; passes of kernels are listed in the
//! order in which a layer launches them, as numbers read and written.

use flow_kernels::subsample::halved;
use flow_model::ModelConfig;
use flow_model::config::{PromptConfig, TransducerConfig};
use flow_model::joint::cells_computed_again;
use flow_nn::layers::attention::attention_blocks;

use super::work::{Matrix, WIDE, Work};
use crate::memory::BatchShape;
use crate::optimizer::moment_bytes;
use crate::resolved_settings::ResolvedSettings;
use crate::settings::Optimizer;

/// Cells of the lattices whose logits, and whose hidden values, the joint network has at once (`flow_model::joint`).
const ON_DEVICE: (f64, f64) = (12_288.0, 61_440.0);
const ON_CPU: (f64, f64) = (512.0, 512.0);

/// A part of a training step and its work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Part {
    pub name: &'static str,
    pub work: Work,
}

/// Forward and backward pass.
struct Passes {
    forward: Work,
    backward: Work,
}

impl Passes {
    /// Both, and the forward pass once more where it is computed again.
    fn together(&self, computed_again: bool) -> Work {
        let again = if computed_again {
            self.forward.again()
        } else {
            Work::default()
        };
        self.forward + self.backward + again
    }
}

/// The sizes that formulas are made of.
struct Sizes<'a> {
    config: &'a ModelConfig,
    /// Clips.
    batch: f64,
    /// Log-mel frames of a clip, padding included.
    mel_frames: usize,
    /// The encoder's frames of a clip, padding included.
    time: usize,
    /// Rows of the encoder's activations.
    n: f64,
    d: f64,
    /// States of the prediction network for each clip.
    states: f64,
    /// Cells of the loss.
    cells: f64,
    /// Bytes of a number of a stored matrix.
    stored: f64,
}

impl Sizes<'_> {
    fn matrix(&self, inputs: f64, outputs: f64, bias: bool) -> Matrix {
        let stored = self.stored;
        Matrix {
            inputs,
            outputs,
            stored,
            bias,
        }
    }
}

/// The parts of a training step over a micro-batch of this shape, of the settings' precision, optimizer, ranks and
/// `recompute`. `on_device`: as on a GPU, where logits are kept for fewer cells.
pub fn parts(config: &ModelConfig, settings: &ResolvedSettings, shape: BatchShape, on_device: bool) -> Vec<Part> {
    let front_end = &config.preprocessor;
    let hop = ((front_end.window_stride * front_end.sample_rate as f64).round() as usize).max(1);
    let whole = (shape.seconds * front_end.sample_rate as f64) as usize / hop;
    let (time, valid) = (config.encoder.subsampled(1 + whole), config.encoder.subsampled(whole));
    let (batch, states) = (shape.utterances as f64, shape.tokens as f64 + 1.0);
    let sizes = Sizes {
        config,
        batch,
        mel_frames: 1 + whole,
        time,
        n: batch * time as f64,
        d: config.encoder.d_model as f64,
        states,
        cells: batch * valid as f64 * states,
        stored: settings.precision.matrices().size_in_bytes() as f64,
    };
    let layers = config.encoder.n_layers as f64;
    let layer = |passes: Passes| passes.together(settings.recompute) * layers;
    let mut parts = vec![
        ("sub-sampling", subsampling(&sizes).together(false)),
        ("feed-forward", layer(feed_forward(&sizes))),
        ("attention", layer(attention(&sizes, on_device))),
        ("convolution", layer(convolution(&sizes))),
    ];
    if let Some(transducer) = &config.transducer {
        parts.push(("prediction network", prediction(&sizes, transducer).together(false)));
        parts.push(("joint network and loss", joint(&sizes, transducer, on_device)));
    }
    if config.ctc.as_ref().is_some_and(|ctc| ctc.weight > 0.0) {
        parts.push(("CTC head", ctc(&sizes).together(false)));
    }
    if let Some(prompt) = &config.prompt {
        parts.push(("language prompt", language_prompt(&sizes, prompt).together(false)));
    }
    parts.push(("optimizer", optimizer(config, settings)));
    if settings.ranks > 1 {
        parts.push(("gradient exchange", exchange(config, settings)));
    }
    parts.into_iter().map(|(name, work)| Part { name, work }).collect()
}

/// Two strided depthwise convolutions with a pointwise one each, after one from a single channel; then a linear layer over
/// channels and bands.
fn subsampling(sizes: &Sizes) -> Passes {
    let config = &sizes.config.encoder;
    let channels = config.subsampling_conv_channels as f64;
    let (mut time, mut bands) = (sizes.mel_frames, config.feat_in);
    let features = sizes.batch * (time * bands) as f64;
    let mut halve = || {
        (time, bands) = (halved(time), halved(bands));
        sizes.batch * (time * bands) as f64
    };
    // Rows of `channels` numbers after each convolution.
    let rows = [halve(), halve(), halve()];
    let width = channels * bands as f64;
    let Sizes { n, d, .. } = *sizes;
    let pointwise = sizes.matrix(channels, channels, false);
    let (mut forward, mut backward) = (Work::default(), Work::default());
    forward.pass(features + rows[0] * channels);
    backward.pass(features + rows[0] * channels);
    for stage in [1, 2] {
        let (before, after) = (rows[stage - 1] * channels, rows[stage] * channels);
        // The convolution; bias and ReLU behind the pointwise one.
        forward.pass(before + after);
        forward.linear(rows[stage], pointwise);
        forward.pass(2.0 * after);
        backward.linear_backward(rows[stage], pointwise);
        // Bias; taps; gradient of the input, through its ReLU.
        backward.pass(after);
        backward.pass(before + after);
        backward.pass(2.0 * before + after);
    }
    forward.product(1.0, n, width, d);
    // Bias; dropout.
    forward.pass(2.0 * n * d);
    forward.pass(2.0 * n * d);
    // Dropout; bias; ReLU.
    backward.pass(2.0 * n * d);
    backward.product(1.0, d, n, width);
    backward.pass(n * d);
    backward.product(1.0, n, d, width);
    backward.pass(3.0 * rows[2] * channels);
    Passes { forward, backward }
}

/// A norm of rows of width `d` on the way of a residual.
fn norm(passes: &mut Passes, rows: f64) {
    passes.forward.pass(2.0 * rows);
    // Gradient of the input, plus that of the residual; weights.
    passes.backward.pass(4.0 * rows);
    passes.backward.pass(2.0 * rows);
}

/// The residual that a module's output is added to, with dropout.
fn residual(passes: &mut Passes, rows: f64) {
    passes.forward.pass(3.0 * rows);
    passes.backward.pass(2.0 * rows);
}

fn none() -> Passes {
    Passes {
        forward: Work::default(),
        backward: Work::default(),
    }
}

/// Both feed-forward modules of a layer, and its last norm.
fn feed_forward(sizes: &Sizes) -> Passes {
    let Sizes { n, d, .. } = *sizes;
    let hidden = d * sizes.config.encoder.ff_expansion_factor as f64;
    let bias = sizes.config.encoder.use_bias;
    let (up, down) = (sizes.matrix(d, hidden, bias), sizes.matrix(hidden, d, bias));
    let mut passes = none();
    for _ in 0..2 {
        norm(&mut passes, n * d);
        residual(&mut passes, n * d);
        passes.forward.linear(n, up);
        passes.forward.linear(n, down);
        passes.backward.linear_backward(n, up);
        passes.backward.linear_backward(n, down);
        // SiLU with dropout.
        passes.forward.pass(2.0 * n * hidden);
        passes.backward.pass(3.0 * n * hidden);
    }
    passes.forward.pass(2.0 * n * d);
    passes.backward.pass(5.0 * n * d);
    passes
}

/// The attention module of a layer. On a device it is one kernel each way between the products with stored matrices, whose scores
/// never go through memory and are computed again in the backward pass.
fn attention(sizes: &Sizes, on_device: bool) -> Passes {
    let Sizes { n, d, batch, .. } = *sizes;
    let config = &sizes.config.encoder;
    let heads = config.n_heads as f64;
    let k = d / heads.max(1.0);
    let (blocks, positions) = attention_blocks(config.attention_context, sizes.time);
    let positions = positions as f64;
    let mut passes = none();
    norm(&mut passes, n * d);
    residual(&mut passes, n * d);
    // Queries, keys and values, which are one product on a device; output.
    let bias = config.use_bias;
    let products: &[f64] = if on_device && !bias { &[3.0, 1.0] } else { &[1.0; 4] };
    for columns in products {
        let matrix = sizes.matrix(d, columns * d, bias);
        passes.forward.linear(n, matrix);
        passes.backward.linear_backward(n, matrix);
    }
    let position = sizes.matrix(d, d, false);
    passes.forward.linear(positions, position);
    passes.backward.linear_weights(positions, position);
    let mut within = none();
    for (queries, keys) in blocks {
        let (queries, keys) = (queries.len() as f64, keys.len() as f64);
        let scores = heads * batch * queries * keys;
        let by_position = heads * batch * queries * positions;
        let stack = heads * batch;
        let mut scored = Work::default();
        scored.product(stack, queries, k, keys);
        scored.product(heads, batch * queries, k, positions);
        within.forward += scored;
        if on_device {
            within.backward += scored.again();
        }
        within.forward.product(stack, queries, keys, k);
        for _ in 0..2 {
            // Of each of these, the gradients of both factors.
            within.backward += scored;
            within.backward.product(stack, queries, keys, k);
        }
        // Softmax, dropout.
        within.forward.pass(2.0 * scores + by_position);
        within.backward.pass(3.0 * scores + by_position);
        if config.dropout_att > 0.0 {
            within.forward.pass(2.0 * scores);
            within.backward.pass(4.0 * scores);
        }
    }
    if on_device {
        let in_bf16 = sizes.stored < WIDE;
        within.forward = within.forward.in_one_kernel(in_bf16);
        within.backward = within.backward.in_one_kernel(in_bf16);
        // Queries, keys, values, positions and the context; the logarithm of each query's sum.
        within.forward.pass((3.0 + 1.0) * n * d + positions * d + n * heads);
        // The same, the gradient of the context; and the gradients of the first four.
        within
            .backward
            .pass((3.0 + 1.0 + 1.0 + 3.0) * n * d + 2.0 * positions * d + n * heads);
    } else {
        // Heads: two kinds of queries, keys, values and positions; and the context back to rows.
        within
            .forward
            .pass((4.0 + 2.0 + 2.0 + 2.0) * n * d + 2.0 * positions * d);
        // Gradients: of the context; of both biases; of positions; of queries, keys and values, and their sums.
        within
            .backward
            .pass((2.0 + 2.0 + 3.0 + 2.0 * 2.0 + 2.0 * 3.0) * n * d + 2.0 * positions * d);
    }
    passes.forward += within.forward;
    passes.backward += within.backward;
    passes
}

/// The convolution module of a layer.
fn convolution(sizes: &Sizes) -> Passes {
    let Sizes { n, d, .. } = *sizes;
    let bias = sizes.config.encoder.use_bias;
    let mut passes = none();
    norm(&mut passes, n * d);
    residual(&mut passes, n * d);
    for (matrix, rows) in [(sizes.matrix(d, 2.0 * d, bias), n), (sizes.matrix(d, d, bias), n)] {
        passes.forward.linear(rows, matrix);
        passes.backward.linear_backward(rows, matrix);
    }
    // Gates; taps; statistics, in two readings; batch normalisation with SiLU.
    passes.forward.pass((3.0 + 2.0 + 2.0 + 2.0) * n * d);
    // Batch normalisation, sums and gradient; taps and their gradient; gates.
    passes.backward.pass((2.0 + 3.0 + 2.0 + 2.0 + 5.0) * n * d);
    passes
}

/// Embedding and LSTM.
fn prediction(sizes: &Sizes, transducer: &TransducerConfig) -> Passes {
    let config = &transducer.prediction;
    let width = config.pred_hidden as f64;
    let (rows, recurrent) = (sizes.states * sizes.batch, (sizes.states - 1.0) * sizes.batch);
    let mut passes = none();
    passes.forward.pass(2.0 * rows * width);
    // The table's gradient is all zeros first.
    passes
        .backward
        .pass(rows * width + (sizes.config.vocab_size as f64 + 1.0) * width);
    for _ in 0..config.pred_rnn_layers {
        // Gates of all inputs at once, then step by step of the outputs before.
        passes.forward.product(1.0, rows, width, 4.0 * width);
        passes.forward.product(1.0, recurrent, width, 4.0 * width);
        for rows in [rows, recurrent] {
            passes.backward.product(1.0, rows, 4.0 * width, width);
            passes.backward.product(1.0, 4.0 * width, rows, width);
        }
        // Gates read twice and written, cells, outputs; dropout.
        passes.forward.pass((12.0 + 2.0 + 1.0) * rows * width);
        // Gates and their gradients, cells and theirs, outputs' gradients; biases; dropout.
        passes.backward.pass((8.0 + 4.0 + 2.0 + 4.0) * rows * width);
        if config.dropout > 0.0 {
            passes.forward.pass(2.0 * rows * width);
            passes.backward.pass(2.0 * rows * width);
        }
    }
    passes
}

/// The joint network and the loss of the transducer. All cells count in the backward pass, though it leaves out those that hardly any
/// alignment goes through.
fn joint(sizes: &Sizes, transducer: &TransducerConfig, on_device: bool) -> Work {
    let Sizes { n, d, cells, .. } = *sizes;
    let hidden = transducer.joint.joint_hidden as f64;
    let outputs = outputs(sizes.config, transducer);
    let states = sizes.states * sizes.batch;
    let mut work = Work::default();
    let projections = [(n, d), (states, transducer.prediction.pred_hidden as f64)];
    for (rows, inputs) in projections {
        let matrix = sizes.matrix(inputs, hidden, true);
        // On a device biases are added where hidden values are joined.
        let forward = Matrix {
            bias: !on_device,
            ..matrix
        };
        work.linear(rows, forward);
        work.linear_backward(rows, matrix);
    }
    // Factors of products, hidden values and gradients of logits among them, are in the type of matrices on a device, and so are
    // logits.
    let factor = if on_device { sizes.stored } else { WIDE };
    let (at_once, hidden_at_once) = if on_device { ON_DEVICE } else { ON_CPU };
    let (chunks, groups) = ((cells / at_once).ceil(), (cells / hidden_at_once).ceil());
    let weight = outputs * hidden;
    if on_device {
        // The weight in that type.
        work.bytes += (WIDE + factor) * weight;
    }
    // Forward, and again for the backward pass: sums of both projections, with ReLU and dropout. Cells are listed by four numbers.
    for _ in 0..2 {
        work.bytes += groups * WIDE * (n + states) * hidden + cells * (factor * hidden + 4.0 * WIDE);
    }
    let mut logits = Work::default();
    logits.model.matrices = 2.0 * cells * hidden * outputs;
    logits.bytes = factor * (cells * hidden + chunks * weight) + factor * cells * outputs;
    work += logits;
    let again = cells_computed_again(cells.min(1e15) as usize, outputs as usize, on_device) as f64;
    work += logits.again() * (again / cells.max(1.0));
    // Log probabilities of each cell, in 64 bits: a normaliser, those of blank, label and durations.
    let durations = transducer.loss.durations.len() as f64;
    let (terms, arcs) = (2.0 * WIDE * (3.0 + durations), 2.0 * WIDE * (2.0 + durations));
    work.bytes += cells * (factor * outputs + terms);
    // The sums over alignments, in numbers of 64 bits with an exponent of 32. Weights of arcs, a blank and a label for each duration,
    // are made of the terms, and read by the recursion from each end and for the posteriors; an RNN-T has one of each. The sums of
    // both recursions are written and read; posteriors are written, and whether the cell counts is written and read.
    let scaled = 3.0 * WIDE;
    let omega = if transducer.is_rnnt() {
        1.0
    } else {
        transducer.loss.omega
    };
    let arcs_of_cell = 2.0 * (omega + (1.0 - omega) * durations);
    work.bytes += cells * (terms + 4.0 * arcs_of_cell * scaled + 2.0 * 2.0 * scaled + arcs + 2.0);
    // Gradients of logits, and their sums for the bias.
    work.bytes += cells * (2.0 * factor * outputs + terms + arcs);
    // The gradient of the weight, to which each chunk adds; and of the hidden values.
    work.model.matrices += 2.0 * 2.0 * cells * hidden * outputs;
    work.bytes += factor * cells * (outputs + hidden) + chunks * 2.0 * WIDE * weight;
    work.bytes += factor * (cells * outputs + chunks * weight) + WIDE * cells * hidden;
    // Through ReLU and dropout: sums over states, and sums over frames.
    work.bytes += 2.0 * (cells * (WIDE + factor) * hidden) + (1.0 + 2.0 * groups) * WIDE * (n + states) * hidden;
    work
}

/// The CTC head.
fn ctc(sizes: &Sizes) -> Passes {
    let tokens = sizes.config.vocab_size as f64 + 1.0;
    // The labels, with a blank before, between and after them.
    let states = 2.0 * sizes.states - 1.0;
    let matrix = sizes.matrix(sizes.d, tokens, true);
    let mut passes = none();
    passes.forward.linear(sizes.n, matrix);
    // Normalisers; gradient. Sums over paths from both sides, in 64 bits, are written and read.
    passes
        .forward
        .pass((1.0 + 2.0) * sizes.n * tokens + 2.0 * 2.0 * 2.0 * sizes.n * states);
    passes.backward.linear_backward(sizes.n, matrix);
    passes
}

/// Two linear layers, the first over the frames with a column for each prompt, and a ReLU between them.
fn language_prompt(sizes: &Sizes, prompt: &PromptConfig) -> Passes {
    let (d, inputs) = (sizes.d, sizes.d + prompt.prompts as f64);
    let first = sizes.matrix(inputs, 2.0 * d, true);
    let second = sizes.matrix(2.0 * d, d, true);
    let mut passes = none();
    passes.forward.pass(sizes.n * (d + inputs));
    passes.forward.linear(sizes.n, first);
    passes.forward.pass(2.0 * sizes.n * 2.0 * d);
    passes.forward.linear(sizes.n, second);
    passes.backward.linear_backward(sizes.n, second);
    passes.backward.pass(3.0 * sizes.n * 2.0 * d);
    passes.backward.linear_backward(sizes.n, first);
    passes.backward.pass(2.0 * sizes.n * d);
    passes
}

/// Tokens, blank and durations.
fn outputs(config: &ModelConfig, transducer: &TransducerConfig) -> f64 {
    (config.vocab_size + 1 + transducer.loss.durations.len()) as f64
}

/// Numbers of all trainable parameters, and of those among them that are stored matrices.
pub fn parameter_counts(config: &ModelConfig) -> (f64, f64) {
    let encoder = &config.encoder;
    let d = encoder.d_model as f64;
    let bias = |count: f64| if encoder.use_bias { count } else { 0.0 };
    let channels = encoder.subsampling_conv_channels as f64;
    let bands = encoder.subsampled(encoder.feat_in) as f64;
    let subsampling = (
        2.0 * channels * channels,
        3.0 * 10.0 * channels + 2.0 * channels + d * channels * bands + d,
    );
    let hidden = d * encoder.ff_expansion_factor as f64;
    let layer = (
        4.0 * d * hidden + 5.0 * d * d + 3.0 * d * d,
        // Five norms, batch normalisation, biases of heads, taps.
        (10.0 + 2.0 + 2.0 + encoder.conv_kernel_size as f64) * d
            + bias(2.0 * (hidden + d) + 4.0 * d + (2.0 + 1.0 + 1.0) * d),
    );
    let vocabulary = config.vocab_size as f64;
    let (mut prediction, mut joint) = (0.0, (0.0, 0.0));
    if let Some(transducer) = &config.transducer {
        let width = transducer.prediction.pred_hidden as f64;
        let layers = transducer.prediction.pred_rnn_layers as f64;
        prediction = (vocabulary + 1.0) * width + layers * (8.0 * width * width + 8.0 * width);
        let hidden = transducer.joint.joint_hidden as f64;
        joint = (
            (d + width) * hidden,
            2.0 * hidden + (hidden + 1.0) * outputs(config, transducer),
        );
    }
    let ctc = match config.ctc {
        Some(_) => (d * (vocabulary + 1.0), vocabulary + 1.0),
        None => (0.0, 0.0),
    };
    let prompt = match &config.prompt {
        Some(prompt) => (2.0 * d * (d + prompt.prompts as f64) + 2.0 * d * d, 3.0 * d),
        None => (0.0, 0.0),
    };
    let layers = encoder.n_layers as f64;
    let matrices = subsampling.0 + layers * layer.0 + joint.0 + ctc.0 + prompt.0;
    let others = subsampling.1 + layers * layer.1 + prediction + joint.1 + ctc.1 + prompt.1;
    (matrices + others, matrices)
}

/// Bytes of all parameters as they are stored.
fn stored_bytes(config: &ModelConfig, settings: &ResolvedSettings) -> f64 {
    let (all, matrices) = parameter_counts(config);
    matrices * settings.precision.matrices().size_in_bytes() as f64 + 4.0 * (all - matrices)
}

/// The norm of all gradients, and AdamW: gradients are read; weights and moments are read and written.
fn optimizer(config: &ModelConfig, settings: &ResolvedSettings) -> Work {
    let (all, _) = parameter_counts(config);
    let eight_bit = settings.optimizer == Optimizer::Adamw8bit;
    // Of a large tensor: those of small ones stay in 32 bits, and are few.
    const LARGE: usize = 1 << 20;
    let moments = moment_bytes(LARGE, eight_bit) as f64 / LARGE as f64;
    let gradients = 2.0 * 4.0 * all;
    Work {
        bytes: gradients + 2.0 * stored_bytes(config, settings) + 2.0 * moments * all,
        ..Work::default()
    }
}

/// Of each rank: its gradients to their owners, and its part of the new weights to all others.
fn exchange(config: &ModelConfig, settings: &ResolvedSettings) -> Work {
    let (all, _) = parameter_counts(config);
    let others = f64::from(settings.ranks - 1) / f64::from(settings.ranks);
    Work {
        exchanged: others * (4.0 * all + stored_bytes(config, settings)),
        ..Work::default()
    }
}
