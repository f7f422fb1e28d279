//! Against the kernels for the CPU, in the emulator or on a device.

use candle_core::Tensor;

use crate::noise::Noise;
use crate::ops::lstm;
use crate::ops::lstm::LstmWeights;
use crate::testing::on_device::{BOUND, random, same};

#[test]
fn lstm_layer() {
    let mut noise = Noise::new(6);
    // With a width of 45 a block has the same units in all steps; with 150 there are more units than blocks that run at once.
    for (steps, batch, inputs, width) in [(1, 1, 1, 1), (4, 3, 5, 2), (5, 6, 4, 45), (6, 2, 3, 150)] {
        let x = random(&[steps, batch, inputs], &mut noise);
        // As large as those of networks: with larger ones what is rounded grows from step to step.
        let [input, hidden] = [inputs, width].map(|of| {
            let weights = random(&[4 * width, of], &mut noise);
            weights.affine(1.0 / (of as f64).sqrt(), 0.0).unwrap()
        });
        let [a, b] = [(); 2].map(|()| random(&[4 * width], &mut noise));
        let dy = random(&[steps, batch, width], &mut noise);
        let parts = [&input, &hidden, &a, &b];
        fn weights(parts: &[Tensor; 4]) -> LstmWeights<'_> {
            let [input, hidden, input_bias, hidden_bias] = parts;
            LstmWeights {
                input,
                hidden,
                input_bias,
                hidden_bias,
            }
        }
        same("LSTM", BOUND, |on| {
            let parts = parts.map(on);
            let (y, saved) = lstm::lstm(&on(&x), weights(&parts))?;
            let d = lstm::lstm_backward(&on(&dy), &saved, weights(&parts))?;
            let of_weights = [d.input_weight()?, d.hidden_weight()?, d.bias()?.total()?];
            Ok([vec![y, d.input], of_weights.to_vec()].concat())
        });
        let (state, cell) = (random(&[batch, width], &mut noise), random(&[batch, width], &mut noise));
        let take: Vec<bool> = (0..batch).map(|b| b % 2 == 0).collect();
        same("LSTM step", BOUND, |on| {
            let (parts, state) = (parts.map(on), on(&state));
            let (hidden, cell) = lstm::lstm_step(&on(&x).get(0)?, &state, &on(&cell), weights(&parts))?;
            let replaced = lstm::replace_rows(&state, &hidden, &take)?;
            Ok(vec![hidden, cell, replaced])
        });
    }
}
