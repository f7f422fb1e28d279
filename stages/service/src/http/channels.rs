//! Requests whose channels are transcribed apart: one request of the engine for each channel, and one transcript of all in the
//! order of time.

use std::cmp::Ordering;
use std::path::{Path, PathBuf};

use flow_audio::recording_reader::channel_count;
use flow_storage::Storage;
use flow_transcription::tokens::Token;
use flow_transcription::{Segment, Transcript};
use futures::future::try_join_all;
use tempfile::TempPath;

use super::error::ApiError;
use super::form::Asked;
use crate::engine::{Engine, EngineError, Finished, Job, JobProgress, TranscriptionRequest};

/// Most channels that are transcribed apart.
const MAX_CHANNELS: u32 = 8;

/// Why nothing was submitted.
pub enum SubmitError {
    Engine(EngineError),
    Request(ApiError),
}

impl From<EngineError> for SubmitError {
    fn from(error: EngineError) -> Self {
        Self::Engine(error)
    }
}

/// A request that the engine accepted, of one recording.
pub struct Submitted {
    /// One, or one for each channel.
    jobs: Vec<Job>,
    is_split: bool,
    /// The recording, where several requests read it.
    _audio: Option<TempPath>,
}

/// The most logs of a request: of the whole recording, or of each channel.
pub const MOST_LOGS: u32 = MAX_CHANNELS;

/// The log of a channel, counted from 0; that of the first is also the log of a recording whose channels are not apart.
pub fn log_of(log: &Path, channel: u32) -> PathBuf {
    match channel {
        0 => log.to_owned(),
        _ => log.with_extension(format!("{}", channel + 1)),
    }
}

/// Submits what is asked for. `log`: where it is noted what is done ([`log_of`]), so that it goes on from there later.
///
/// # Errors
/// As [`Engine::submit`], and if the recording has too many channels.
pub async fn submit(
    engine: &Engine,
    asked: &Asked,
    audio: TempPath,
    name: String,
    log: Option<&Path>,
) -> Result<Submitted, SubmitError> {
    if !asked.split_channels {
        let request = TranscriptionRequest {
            log: log.map(Path::to_owned),
            ..asked.request(audio, name)
        };
        let job = engine.submit(request)?;
        return Ok(Submitted {
            jobs: vec![job],
            is_split: false,
            _audio: None,
        });
    }
    // An upload: a file of this machine.
    let path = audio.to_path_buf();
    let counted = tokio::task::spawn_blocking(move || channel_count(&Storage::default(), &path, None, None)).await;
    // One that cannot be opened is refused by the engine, which says why.
    let count = counted.ok().flatten().unwrap_or(1);
    // More than the queue has places for would never be taken.
    let most = MAX_CHANNELS.min(u32::try_from(engine.max_queue()).unwrap_or(u32::MAX));
    if count > most {
        let message = format!("the recording has {count} channels; at most {most} are transcribed apart");
        return Err(SubmitError::Request(ApiError::parameter(
            "channels",
            "too_many_channels",
            message,
        )));
    }
    let mut jobs = Vec::new();
    for channel in 0..count {
        let failed = |error: std::io::Error| EngineError::Failed(error.to_string());
        // The file goes with the last of them.
        let mut path = TempPath::try_from_path(audio.to_path_buf()).map_err(failed)?;
        path.disable_cleanup(true);
        let mut request = asked.request(path, name.clone());
        request.channel = (count > 1).then_some(channel);
        request.log = log.map(|log| log_of(log, channel));
        jobs.push(engine.submit(request)?);
    }
    Ok(Submitted {
        jobs,
        is_split: true,
        _audio: Some(audio),
    })
}

impl Submitted {
    /// Waits for the transcript. The first failure cancels the rest.
    ///
    /// # Errors
    /// Why there is none.
    pub async fn finish(self) -> Result<Finished, EngineError> {
        let finished = try_join_all(self.jobs.into_iter().map(Job::finish)).await?;
        let mut finished = finished.into_iter();
        let none = || EngineError::Failed("the recording has no channel".to_owned());
        if self.is_split {
            return together(finished.collect()).ok_or_else(none);
        }
        finished.next().ok_or_else(none)
    }

    /// The job, where the channels are not apart.
    pub fn into_single(self) -> Result<Job, EngineError> {
        let none = || EngineError::Failed("channels apart cannot be streamed".to_owned());
        self.jobs.into_iter().next().filter(|_| !self.is_split).ok_or_else(none)
    }

    pub fn progress(&self) -> JobProgress {
        JobProgress::of_all(self.jobs.iter().map(Job::progress))
    }
}

/// The name of a channel, from 0, as that of a speaker.
fn speaker(channel: usize) -> String {
    format!("CHANNEL_{}", channel + 1)
}

/// One transcript of all channels, with their segments in the order of time; at the same time that of the first channel comes
/// first. None if there is none.
fn together(channels: Vec<Finished>) -> Option<Finished> {
    let mut channels = channels.into_iter();
    let mut first = channels.next()?;
    let mut segments = Vec::new();
    take(&mut segments, 0, &mut first);
    for (channel, mut finished) in (1..).zip(channels) {
        take(&mut segments, channel, &mut finished);
        let (all, one) = (&mut first.transcript.metadata, &mut finished.transcript.metadata);
        all.duration_s = all.duration_s.max(one.duration_s);
        all.damaged_at = all.damaged_at.or(one.damaged_at);
        for language in &one.languages {
            if !all.languages.contains(language) {
                all.languages.push(language.clone());
            }
        }
        if let Some(boosted) = one.boosted.take() {
            all.boosted.get_or_insert_default().add(boosted);
        }
        all.coverage = match (all.coverage.take(), one.coverage.take()) {
            (Some(mut coverage), Some(other)) => {
                coverage.add(other);
                Some(coverage)
            }
            (one, other) => one.or(other),
        };
        for warning in finished.warnings {
            if !first.warnings.contains(&warning) {
                first.warnings.push(warning);
            }
        }
        first.queue_seconds = first.queue_seconds.max(finished.queue_seconds);
        first.decode_seconds = first.decode_seconds.max(finished.decode_seconds);
        first.batches = first.batches.saturating_add(finished.batches);
    }
    first.transcript.metadata.channel = None;
    // It is stable.
    segments.sort_by(|(a, _): &(Segment, Vec<Vec<Token>>), (b, _)| {
        a.start.partial_cmp(&b.start).unwrap_or(Ordering::Equal)
    });
    let (segments, tokens): (Vec<Segment>, Vec<Vec<Vec<Token>>>) = segments.into_iter().unzip();
    let Transcript {
        metadata, performance, ..
    } = first.transcript;
    Some(Finished {
        transcript: Transcript::from_segments(metadata, performance, segments),
        tokens: tokens.into_iter().flatten().collect(),
        ..first
    })
}

/// Moves the segments of a channel, each with the tokens of its words.
fn take(segments: &mut Vec<(Segment, Vec<Vec<Token>>)>, channel: usize, finished: &mut Finished) {
    let mut tokens = std::mem::take(&mut finished.tokens).into_iter();
    for mut segment in std::mem::take(&mut finished.transcript.segments) {
        segment.speaker = Some(speaker(channel));
        for word in &mut segment.words {
            word.speaker = Some(speaker(channel));
        }
        let of_words = tokens.by_ref().take(segment.words.len()).collect();
        segments.push((segment, of_words));
    }
}

#[cfg(test)]
mod tests {
    use flow_transcription::coverage::{Coverage, Hole};
    use flow_transcription::{Metadata, Performance, Word};

    use super::*;

    fn finished(duration: f64, languages: &[&str], starts: &[(f64, &str)]) -> Finished {
        let metadata = Metadata {
            duration_s: duration,
            languages: languages.iter().map(|&language| language.to_owned()).collect(),
            ..Metadata::default()
        };
        let segments = starts.iter().map(|(start, text)| Segment {
            start: *start,
            end: start + 1.0,
            text: (*text).to_owned(),
            words: text
                .split(' ')
                .map(|word| Word {
                    word: word.to_owned(),
                    start: *start,
                    end: start + 1.0,
                    confidence: None,
                    speaker: None,
                })
                .collect(),
            ..Segment::default()
        });
        let segments: Vec<Segment> = segments.collect();
        let words: usize = segments.iter().map(|segment| segment.words.len()).sum();
        Finished {
            transcript: Transcript::from_segments(metadata, Performance::default(), segments),
            warnings: vec!["loud".to_owned()],
            tokens: (0..words).map(|_| Vec::new()).collect(),
            queue_seconds: duration,
            decode_seconds: 1.0,
            batches: 2,
        }
    }

    #[test]
    fn segments_of_all_channels_are_in_the_order_of_time() {
        let mut channels = vec![
            finished(9.0, &["de"], &[(0.5, "guten tag"), (4.0, "ja")]),
            finished(
                9.5,
                &["en", "de"],
                &[(0.0, "hello"), (2.0, "yes of course"), (4.0, "bye")],
            ),
        ];
        let covered = |share: f64, speech_s: f64, start: f64| Coverage {
            share,
            speech_s,
            holes: vec![Hole {
                start,
                end: start + 0.5,
            }],
            recovered: 1,
            suspects: Vec::new(),
        };
        channels[0].transcript.metadata.coverage = Some(covered(0.5, 1.0, 5.0));
        channels[1].transcript.metadata.coverage = Some(covered(0.75, 3.0, 3.0));
        let all = together(channels).unwrap();
        let coverage = all.transcript.metadata.coverage.as_ref().unwrap();
        assert_eq!(
            (coverage.share, coverage.speech_s, coverage.recovered),
            (0.6875, 4.0, 2)
        );
        assert_eq!(
            coverage.holes.iter().map(|hole| hole.start).collect::<Vec<_>>(),
            [3.0, 5.0]
        );
        let transcript = &all.transcript;
        assert_eq!(transcript.text, "hello guten tag yes of course ja bye");
        let speakers: Vec<&str> = transcript
            .segments
            .iter()
            .filter_map(|segment| segment.speaker.as_deref())
            .collect();
        assert_eq!(
            speakers,
            ["CHANNEL_2", "CHANNEL_1", "CHANNEL_2", "CHANNEL_1", "CHANNEL_2"]
        );
        assert_eq!(transcript.segments[1].words[1].speaker.as_deref(), Some("CHANNEL_1"));
        assert_eq!(transcript.metadata.languages, ["de", "en"]);
        assert_eq!((transcript.metadata.duration_s, all.batches), (9.5, 4));
        assert_eq!((all.tokens.len(), &all.warnings), (8, &vec!["loud".to_owned()]));
        assert_eq!(together(Vec::new()), None);
    }
}
