//! What a live session has to say, and what it asks for.

use std::ops::Range;

use flow_transcription::boosted::{Boosted, PhraseIndex};
use flow_transcription::tokens::Token;
use flow_transcription::{Segment, Word};

use crate::engine::EngineError;

/// What a session has to say. Items are turns, counted from 0; times are seconds since the beginning of the session.
#[derive(Clone, Debug)]
pub enum SessionEvent {
    SpeechStarted {
        item: u64,
        at: f64,
    },
    SpeechStopped {
        item: u64,
        at: f64,
    },
    /// No more audio comes to the item.
    Committed {
        item: u64,
    },
    /// More words of the item that will not change. `text` is to be put behind the texts before.
    Delta {
        item: u64,
        text: String,
        /// The tokens of each word, and whether these are the first words of the item.
        tokens: Vec<Vec<Token>>,
        first: bool,
    },
    /// What may come next: it may change.
    Partial {
        item: u64,
        text: String,
    },
    Completed {
        item: u64,
        transcript: ItemTranscript,
    },
    Failed {
        item: u64,
        error: EngineError,
    },
    /// Words of one speaker. Those of an item follow each other, and are all of its words in the end; the last ones may come
    /// after the item is completed or has failed.
    Segment {
        item: u64,
        segment: Segment,
    },
}

/// What was said in an item.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ItemTranscript {
    /// The words with spaces between: all deltas together, with numbers and fillers in the style of the session.
    pub text: String,
    /// With times since the beginning of the session.
    pub words: Vec<Word>,
    /// The tokens of each word.
    pub tokens: Vec<Vec<Token>>,
    pub languages: Vec<String>,
    /// Length of the item, in seconds.
    pub seconds: f64,
    /// What boosted phrases did, where there were any.
    pub boosted: Option<Boosted>,
    /// What of the session's options has no effect with the model.
    pub warnings: Vec<String>,
}

/// What a model makes of the phrases and languages of a session.
#[derive(Clone, Debug, Default)]
pub struct Requested {
    /// The phrases that are boosted, if there are any.
    pub phrases: Option<PhraseIndex>,
    /// What of the options has no effect.
    pub warnings: Vec<String>,
}

/// A window that is to be decoded: mono, 16 kHz.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodeRequest {
    pub samples: Vec<f32>,
    /// Which sample of the session the first one is.
    pub start: u64,
    /// Stretches of speech, in seconds from the first sample, in which phrases are boosted. Empty for parts of a turn that is heard as
    /// it is spoken, whose listeners look for speech themselves.
    pub speech: Vec<Range<f64>>,
    /// False for a window that still grows.
    pub is_final: bool,
    /// None: a window. Otherwise what comes next of a turn that is heard as it is spoken.
    pub spoken: Option<SpokenPart>,
}

/// A part of a turn that is heard as it is spoken: the samples go on where those of the part before ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpokenPart {
    /// The turn begins with it.
    pub begins: bool,
    /// The turn ends with it; it may then have no samples.
    pub ends: bool,
}
