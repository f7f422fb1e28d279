//! Alignment of a text that is known with its recording.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use flow_audio::recording_reader::Channels;
use flow_audio::samples::OnDamage;
use flow_transcription::alignment::{Aligned, AlignmentSettings};
use flow_transcription::streamed::StreamedRecording;
use flow_transcription::{Transcript, TranscriptionError};
use tempfile::TempPath;

use super::batcher::guarded;
use super::cancellable::cancellable;
use super::models::Lease;
use super::preparation::{refused, unreadable};
use super::shared::Shared;
use super::{Engine, EngineError};

/// A request for the times of a text.
#[derive(Debug)]
pub struct AlignmentRequest {
    /// Name of the model; none: the first one.
    pub model: Option<String>,
    /// A private file, deleted with the request.
    pub audio: TempPath,
    /// Name of the recording in `metadata.source_file` and messages.
    pub source_name: String,
    /// The segments of the text.
    pub text: Vec<String>,
    pub settings: AlignmentSettings,
}

impl Engine {
    /// Aligns a text with its recording, one at a time; dropping the future cancels it. It takes the place of a request while it waits
    /// and runs.
    ///
    /// # Errors
    /// As [`Engine::submit`]; [`EngineError::Audio`] if the recording cannot be read, [`EngineError::Text`] if the text does not fit
    /// it, and [`EngineError::Timeout`].
    pub async fn align(&self, request: AlignmentRequest) -> Result<(Aligned, Transcript), EngineError> {
        let shared = &self.inner.shared;
        let index = shared.models.find(request.model.as_deref())?;
        let place = shared.alignment_place()?;
        // Held until the work has ended, also where its client has gone.
        let alone = Arc::clone(&shared.aligning).lock_owned().await;
        let lease = self.lease(index).await?;
        let of_task = Arc::clone(shared);
        let computed = cancellable(move |is_cancelled| {
            let (_place, _alone, lease) = (place, alone, lease);
            guarded(|| align(&of_task, &lease, &request, is_cancelled)).map_err(EngineError::Failed)?
        });
        computed.await.map_err(|error| EngineError::Failed(error.to_string()))?
    }
}

fn align(
    shared: &Shared,
    lease: &Lease,
    request: &AlignmentRequest,
    is_cancelled: &dyn Fn() -> bool,
) -> Result<(Aligned, Transcript), EngineError> {
    let recognizer = &lease.model().recognizer;
    let name = &request.source_name;
    let limit = shared.settings.decode_timeout;
    let begun = Instant::now();
    let is_late = || begun.elapsed() > Duration::from_secs_f64(limit);
    let stops = || is_cancelled() || is_late();
    let stopped = || match is_late() {
        true => EngineError::Timeout(limit),
        false => EngineError::Cancelled,
    };
    let max_duration = shared.settings.max_duration;
    let recording = StreamedRecording::new(&shared.storage, &request.audio, Channels::Mix);
    let mut first = recognizer.first_pass(&shared.recognition);
    let extent = recording.first_pass(max_duration, OnDamage::Keep, &mut |block| {
        first.feed(block)?;
        Ok(!stops())
    });
    if stops() {
        return Err(stopped());
    }
    let of_client = (&*request.audio, &name[..]);
    let extent = extent.map_err(|error| unreadable(of_client, error))?;
    let extent = extent.map_err(|refusal| refused(of_client, refusal, max_duration))?;
    let turn = shared.models.turn();
    let _alone = turn.map(|turn| turn.lock().unwrap_or_else(PoisonError::into_inner));
    let settings = (&shared.recognition, &request.settings);
    let found = recognizer.align_again(first, &recording, &request.text, settings, &stops);
    let found = found.map_err(|error| match error {
        TranscriptionError::Text { reason, why } => EngineError::Text { reason, detail: why },
        error => unreadable(of_client, error),
    })?;
    let found = found.ok_or_else(stopped)?;
    if found.words_said() == 0 {
        let detail = format!("no word of the text was said in {name} (score {:.2})", found.score);
        let reason = "not_said";
        return Err(EngineError::Text { reason, detail });
    }
    let transcript = recognizer.aligned_transcript(&found, name, extent.samples);
    Ok((found, transcript))
}
