//! Short recordings whose windows are decoded together.

use flow_kernels::is_gpu;
use flow_kernels::product::is_row_invariant;

use super::{FirstPass, Heard, RecognitionSettings, Recognized, Recognizer, SpeechWindows, recognized};
use crate::long_audio::LongAudio;
use crate::{Result, TranscriptionError};

impl Recognizer {
    /// Whether [`Recognizer::decode`] gives the same bits for a window in any company: on CPUs with AVX2 or AVX-512, where an
    /// element of a matrix product does not depend on the other rows.
    pub fn is_batch_invariant(&self) -> bool {
        is_row_invariant() && !is_gpu(self.model.parameters.device())
    }

    /// [`Recognizer::transcribe_again`] of several recordings whose samples the first passes have kept, with
    /// [`LongAudio::Vad`]: the windows of all are sorted by length and decoded together. None if `cancelled` returned true
    /// between two batches.
    ///
    /// # Errors
    /// As [`Recognizer::transcribe`], if a first pass has not kept its samples, and in another processing mode.
    pub fn transcribe_together(
        &self,
        recordings: Vec<FirstPass<'_>>,
        settings: &RecognitionSettings,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<Recognized>>> {
        let mut found: Vec<(Vec<f32>, SpeechWindows)> = Vec::with_capacity(recordings.len());
        for mut first in recordings {
            let samples = match (first.take_samples(), settings.long_audio) {
                (Some(samples), LongAudio::Vad) => samples,
                _ => {
                    return Err(TranscriptionError::Input(
                        "a recording that is not decoded with others".into(),
                    ));
                }
            };
            found.push((samples, SpeechWindows::of(first.activity, settings)?));
        }
        let signals: Vec<&[f32]> = found
            .iter()
            .flat_map(|(samples, windows)| {
                let windows = windows.windows.iter();
                windows.map(move |window| &samples[window.start as usize..window.end as usize])
            })
            .collect();
        let speech: Vec<_> = found
            .iter()
            .flat_map(|(_, windows)| (0..windows.windows.len()).map(|index| windows.stretches(index)))
            .collect();
        let Some(heard) = self.decode_covered(&signals, &speech, settings, cancelled)? else {
            return Ok(None);
        };
        let mut heard = heard.into_iter();
        let of_each = found.iter().map(|(_, windows)| {
            let of_this: Vec<Heard> = heard.by_ref().take(windows.windows.len()).collect();
            recognized(windows, of_this, settings, self.phrases.as_ref())
        });
        of_each.collect::<Result<Vec<_>>>().map(Some)
    }
}
