//! Recordings of the bundled corpus, and a decoder that knows what is said in them.

use std::path::Path;

use flow_speakers::silero::{SileroVad, WINDOW};
use flow_transcription::Word;
use flow_transcription::recognizer::Heard;
use flow_transcription::tokens::Token;

use super::session_event::DecodeRequest;

/// The folder of the workspace.
pub fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

/// Samples of a Hindi recording: mono, 16 kHz.
pub fn recording(name: &str) -> Vec<f32> {
    let tar = root().join("tests/data/corpus/mini/shards/hi/hi_0000/hi_0000.tar");
    let mut file = std::fs::File::open(&tar).unwrap();
    let length = file.metadata().unwrap().len();
    let listing = flow_audio::tar::list(&mut file, length).unwrap();
    let members = listing.last_of_each_name();
    let member = members.iter().find(|member| member.name.ends_with(name)).unwrap();
    let bytes =
        flow_audio::decode::read_range(&flow_storage::Storage::default(), &tar, member.offset, member.size).unwrap();
    flow_audio::decode::decode(&bytes, 100.0).unwrap()
}

/// Two recordings with a second of silence around each, then two without a pause between.
pub fn talk() -> Vec<f32> {
    let silence = vec![0.0; 16_000];
    let parts = [
        &silence[..],
        &recording("rec_hi_0001_000.flac"),
        &silence,
        &recording("rec_hi_0002_000.flac"),
        &silence,
        &recording("rec_hi_0004_003.flac"),
        &recording("rec_hi_0003_000.flac"),
        &silence,
    ];
    parts.concat()
}

/// Seconds of a frame of voice activity.
const FRAME: f64 = WINDOW as f64 / 16_000.0;
/// Frames of speech that a word needs, frames of the word itself (so that no cut between frames is in its middle), and frames from
/// one word to the next.
const OF_SPEECH: usize = 5;
const OF_WORD: usize = 1;
const APART: usize = 8;

/// Hears the same words in the same places of a recording, whatever window it is asked for. The last words of a window that
/// still grows are wrong, and otherwise each time.
pub struct Oracle {
    pub recording: Vec<f32>,
    /// Where there is speech: `w0 w1. w2 w3. …`
    pub words: Vec<Word>,
}

impl Oracle {
    pub fn new(recording: Vec<f32>) -> Self {
        let mut probabilities = Vec::new();
        let mut stream = SileroVad::shared().unwrap().stream();
        stream.feed(&recording, &mut probabilities).unwrap();
        let mut words: Vec<Word> = Vec::new();
        let mut at = 0;
        while at + OF_SPEECH <= probabilities.len() {
            if probabilities[at..at + OF_SPEECH]
                .iter()
                .any(|probability| *probability < 0.5)
            {
                at += 1;
                continue;
            }
            let dot = if words.len() % 2 == 1 { "." } else { "" };
            words.push(Word {
                word: format!("w{}{dot}", words.len()),
                start: at as f64 * FRAME,
                end: (at + OF_WORD) as f64 * FRAME,
                ..Word::default()
            });
            at += APART;
        }
        Oracle { recording, words }
    }

    /// All words, with spaces between.
    pub fn text(&self) -> String {
        let words: Vec<&str> = self.words.iter().map(|word| &word.word[..]).collect();
        words.join(" ")
    }

    pub fn hear(&self, request: &DecodeRequest) -> Heard {
        let from = request.start as usize;
        // What was filled up may end behind the recording.
        let recorded = self.recording.get(from..).unwrap_or_default();
        let recorded = recorded.iter().chain(std::iter::repeat(&0.0));
        let alike = request.samples.iter().zip(recorded).take_while(|(a, b)| a == b).count();
        // Windows are whole frames; one that was too short is filled up to what is not a whole number of them.
        let count = if request.samples.len().is_multiple_of(WINDOW) {
            assert_eq!(
                alike,
                request.samples.len(),
                "samples from {from} on are not those of the recording"
            );
            alike
        } else {
            alike / WINDOW * WINDOW
        };
        let (start, end) = (from as f64 / 16_000.0, (from + count) as f64 / 16_000.0);
        let middle = |word: &Word| (word.start + word.end) / 2.0;
        let heard = self.words.iter().filter(|word| (start..end).contains(&middle(word)));
        let words = heard.map(|word| {
            let is_sure = request.is_final || middle(word) < end - 0.3;
            Word {
                word: if is_sure {
                    word.word.clone()
                } else {
                    format!("{from}to{}", from + count)
                },
                start: (word.start - start).max(0.0),
                end: word.end - start,
                ..word.clone()
            }
        });
        let words: Vec<Word> = words.collect();
        let token = |word: &Word| Token {
            bytes: word.word.trim().as_bytes().to_vec(),
            logprob: -0.25,
            is_first_choice: true,
        };
        Heard {
            tokens: words.iter().map(|word| vec![token(word)]).collect(),
            words,
            languages: vec!["hi".to_owned()],
            ..Heard::default()
        }
    }
}
