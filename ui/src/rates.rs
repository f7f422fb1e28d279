//! Error rates of an evaluation.

/// Totals of an evaluation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    pub utterances: u64,
    pub seconds: f64,
    pub word_errors: f64,
    pub words: f64,
    pub char_errors: f64,
    pub chars: f64,
}

impl Rates {
    /// NaN where there are no words.
    pub fn wer(&self) -> f64 {
        self.word_errors / self.words
    }

    pub fn cer(&self) -> f64 {
        self.char_errors / self.chars
    }

    pub fn hours(&self) -> String {
        format!("{:.2}", self.seconds / 3600.0)
    }
}
