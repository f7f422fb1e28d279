//! Makes one rectangular batch of utterances of different lengths.

/// Tokens beyond this number are cut off.
pub const MAX_TOKENS: usize = 512;

/// A batch, padded with zeros. Row-major: `signals` is (batch, longest signal), `tokens` (batch, longest
/// token list).
#[derive(Clone, Debug, PartialEq)]
pub struct Collated {
    pub signals: Vec<f32>,
    pub signal_shape: [usize; 2],
    /// Samples of each signal.
    pub signal_lens: Vec<usize>,
    pub tokens: Vec<u32>,
    pub token_shape: [usize; 2],
    pub token_lens: Vec<usize>,
}

/// Pads signals (16 kHz samples) and tokens, which are cut to [`MAX_TOKENS`]. Without any utterance: one signal
/// of a single zero, and one zero token of length 0, so that a rank whose samples all failed still takes part.
pub fn collate(utterances: &[(&[f32], &[u32])]) -> Collated {
    if utterances.is_empty() {
        return Collated {
            signals: vec![0.0],
            signal_shape: [1, 1],
            signal_lens: vec![1],
            tokens: vec![0],
            token_shape: [1, 1],
            token_lens: vec![0],
        };
    }
    let signal_lens: Vec<usize> = utterances.iter().map(|(signal, _)| signal.len()).collect();
    let token_lens: Vec<usize> = utterances
        .iter()
        .map(|(_, tokens)| tokens.len().min(MAX_TOKENS))
        .collect();
    let signal_shape = [utterances.len(), signal_lens.iter().copied().max().unwrap_or(0)];
    let token_shape = [utterances.len(), token_lens.iter().copied().max().unwrap_or(0)];
    let mut signals = vec![0.0; signal_shape[0] * signal_shape[1]];
    let mut padded_tokens = vec![0; token_shape[0] * token_shape[1]];
    for (row, (signal, tokens)) in utterances.iter().enumerate() {
        signals[row * signal_shape[1]..][..signal.len()].copy_from_slice(signal);
        let length = token_lens[row];
        padded_tokens[row * token_shape[1]..][..length].copy_from_slice(&tokens[..length]);
    }
    Collated {
        signals,
        signal_shape,
        signal_lens,
        tokens: padded_tokens,
        token_shape,
        token_lens,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::{golden, train_rows};

    #[derive(serde::Deserialize)]
    struct Golden {
        batches: Vec<Shapes>,
        empty: Shapes,
    }

    #[derive(serde::Deserialize)]
    struct Shapes {
        #[serde(default)]
        rows: Vec<usize>,
        signal_padded: [usize; 2],
        signal_lens: Vec<usize>,
        token_padded: [usize; 2],
        token_lens: Vec<usize>,
    }

    /// The reference tokenizes into the UTF-8 bytes of the text, prefix included.
    #[test]
    fn shapes_equal_the_reference() {
        for corpus in ["micro", "mini"] {
            let text = std::fs::read(golden(corpus).join("collate.json")).unwrap();
            let expected: Golden = serde_json::from_slice(&text).unwrap();
            let rows = train_rows(corpus);
            assert!(!expected.batches.is_empty());
            for shapes in &expected.batches {
                let signals: Vec<Vec<f32>> = shapes.signal_lens.iter().map(|&length| vec![0.5; length]).collect();
                let tokens: Vec<Vec<u32>> = shapes
                    .rows
                    .iter()
                    .map(|&row| rows[row].text.bytes().map(u32::from).collect())
                    .collect();
                let utterances: Vec<(&[f32], &[u32])> = signals
                    .iter()
                    .zip(&tokens)
                    .map(|(signal, tokens)| (&signal[..], &tokens[..]))
                    .collect();
                let got = collate(&utterances);
                assert_eq!(
                    (got.signal_shape, got.token_shape),
                    (shapes.signal_padded, shapes.token_padded)
                );
                assert_eq!(
                    (&got.signal_lens, &got.token_lens),
                    (&shapes.signal_lens, &shapes.token_lens)
                );
                assert_eq!(got.signals.len(), got.signal_shape[0] * got.signal_shape[1]);
                for (row, &length) in got.signal_lens.iter().enumerate() {
                    let padded = &got.signals[row * got.signal_shape[1]..][..got.signal_shape[1]];
                    assert!(padded[..length].iter().all(|&x| x == 0.5) && padded[length..].iter().all(|&x| x == 0.0));
                }
            }
            let empty = collate(&[]);
            assert_eq!(
                (empty.signal_shape, empty.token_shape),
                (expected.empty.signal_padded, expected.empty.token_padded)
            );
            assert_eq!(
                (empty.signal_lens, empty.token_lens),
                (expected.empty.signal_lens, expected.empty.token_lens)
            );
        }
    }

    #[test]
    fn tokens_are_cut() {
        let tokens: Vec<u32> = (0..600).collect();
        let got = collate(&[(&[1.0], &tokens), (&[], &[7])]);
        assert_eq!((got.token_shape, got.token_lens), ([2, 512], vec![512, 1]));
        assert_eq!(got.tokens[511..514], [511, 7, 0]);
        assert_eq!((got.signal_shape, got.signals), ([2, 1], vec![1.0, 0.0]));
    }
}
