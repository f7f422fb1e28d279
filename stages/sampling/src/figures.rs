//! Statistics of a plan: batches, padding, and the share of each language.

use serde::Serialize;

use crate::manifest_rows::ManifestRows;
use crate::plan::BatchPlan;

/// Statistics of a plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanFigures {
    pub rows: u64,
    /// Rows that some rank gets, counting repetitions. The others were dropped when batches were dealt to ranks and cut
    /// to whole steps.
    pub rows_in_batches: u64,
    pub batches: u64,
    pub batches_per_rank: u64,
    /// Mean seconds of audio in a batch.
    pub seconds_per_batch: f64,
    pub longest_batch_seconds: f64,
    pub rows_per_batch: f64,
    /// Share of the padded batches that is padding, 0 to 1.
    pub padding_waste: f64,
    /// The same for the texts, in characters; none where the texts were not read.
    pub text_padding_waste: Option<f64>,
    /// By language code.
    pub languages: Vec<LanguageShare>,
}

/// What the manifest holds of a language, and what an epoch emits of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct LanguageShare {
    pub language: String,
    pub rows: u64,
    pub seconds: f64,
    pub rows_in_batches: u64,
    pub seconds_in_batches: f64,
    /// Share of the manifest's seconds, 0 to 1.
    pub share: f64,
    /// Share of the seconds in batches, 0 to 1.
    pub share_in_batches: f64,
}

/// Sums of lengths, with and without padding.
#[derive(Default)]
struct Padding {
    filled: f64,
    padded: f64,
}

impl Padding {
    fn add(&mut self, lengths: impl Iterator<Item = f64>) {
        let (mut count, mut longest) = (0u32, 0.0f64);
        for length in lengths {
            self.filled += length;
            longest = longest.max(length);
            count += 1;
        }
        self.padded += f64::from(count) * longest;
    }

    fn waste(&self) -> f64 {
        1.0 - share(self.filled, self.padded.max(self.filled), 1.0)
    }
}

fn share(part: f64, whole: f64, of_nothing: f64) -> f64 {
    if whole > 0.0 { part / whole } else { of_nothing }
}

impl PlanFigures {
    /// `rows` are those that were planned.
    pub fn of(plan: &BatchPlan, rows: &ManifestRows) -> Self {
        let with_texts = rows.text_lengths.len() == rows.durations.len();
        let mut languages: Vec<LanguageShare> = rows
            .languages
            .names()
            .iter()
            .map(|name| LanguageShare {
                language: name.clone(),
                ..LanguageShare::default()
            })
            .collect();
        for (&code, &seconds) in rows.languages.codes().iter().zip(&rows.durations) {
            let language = &mut languages[usize::from(code)];
            language.rows += 1;
            language.seconds += seconds;
        }
        let (mut audio, mut text) = (Padding::default(), Padding::default());
        let mut rows_in_batches = 0;
        let mut longest_batch = 0.0f64;
        for batch in (0..plan.world_size()).flat_map(|rank| plan.rank(rank)) {
            let lengths = || batch.iter().map(|&row| rows.durations[row as usize]);
            longest_batch = longest_batch.max(lengths().sum());
            audio.add(lengths());
            if with_texts {
                text.add(batch.iter().map(|&row| f64::from(rows.text_lengths[row as usize])));
            }
            rows_in_batches += batch.len() as u64;
            for &row in batch {
                let language = &mut languages[usize::from(rows.languages.codes()[row as usize])];
                language.rows_in_batches += 1;
                language.seconds_in_batches += rows.durations[row as usize];
            }
        }
        let seconds: f64 = rows.durations.iter().sum();
        for language in &mut languages {
            language.share = share(language.seconds, seconds, 0.0);
            language.share_in_batches = share(language.seconds_in_batches, audio.filled, 0.0);
        }
        languages.sort_by(|a, b| a.language.cmp(&b.language));
        let batches = plan.batches_per_rank() as u64 * u64::from(plan.world_size());
        PlanFigures {
            rows: rows.durations.len() as u64,
            rows_in_batches,
            batches,
            batches_per_rank: plan.batches_per_rank() as u64,
            seconds_per_batch: share(audio.filled, batches as f64, 0.0),
            longest_batch_seconds: longest_batch,
            rows_per_batch: share(rows_in_batches as f64, batches as f64, 0.0),
            padding_waste: audio.waste(),
            text_padding_waste: with_texts.then(|| text.waste()),
            languages,
        }
    }
}
