//! A pyannote pipeline of the hub is fetched before it is used, with progress on standard error.

use flow_cli::failure::Failure;
use flow_cli::fetch::tell;
use flow_speakers::Error;
use flow_speakers::pyannote::Pipeline;

use crate::arguments::{Progress, RecordingsArguments, SpeakersArguments};

/// Fetches the named pyannote pipeline if it is one of the hub, with progress: the following run finds it in the hub's
/// cache.
pub fn fetch_diarization_model(speakers: &SpeakersArguments, recordings: &RecordingsArguments) -> Result<(), Failure> {
    let Some(model) = &speakers.diarization_model else {
        return Ok(());
    };
    let speaks = !matches!(recordings.progress, Progress::None | Progress::Json);
    let mut progress = |line: &str| {
        if speaks {
            tell(line);
        }
        true
    };
    match Pipeline::find(model, None, &mut progress) {
        Err(Error::Hub { message, help }) => Err(Failure::usage(message, help)),
        // Other errors are reported by the run, as for any parameter.
        Ok(_) | Err(_) => Ok(()),
    }
}
