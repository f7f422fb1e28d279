//! Who says the words of a session: words wait until it is decided who speaks at their time, and go out in segments of one
//! speaker each.

use std::collections::VecDeque;

use flow_speakers::diarizer::Decided;
use flow_speakers::silero::SAMPLE_RATE;
use flow_speakers::turns::Turn;
use flow_transcription::segments::ends_sentence;
use flow_transcription::speakers::{UNKNOWN, speaker_during, speaker_near};
use flow_transcription::{Segment, Word};

use super::settings::LiveSettings;

/// A word in no turn has the speaker of the nearest one, if it is no farther away, in seconds.
const MAX_GAP: f64 = 1.0;
/// A segment that is as long goes out, whether its sentence has ended or not, in seconds.
const LONGEST_SEGMENT: f64 = 15.0;
/// Most samples that the diarizer is given at once: 5 s.
const MOST_AT_ONCE: usize = 5 * SAMPLE_RATE as usize;

/// Samples that the diarizer is to hear.
#[derive(Clone, Debug, PartialEq)]
pub struct DiarizeRequest {
    pub samples: Vec<f32>,
    /// Whether all that came is to be decided then.
    pub settle: bool,
}

/// Words of an item that are in no segment yet.
struct Waiting {
    item: u64,
    words: Vec<Word>,
    /// No more words come.
    is_complete: bool,
}

/// What is decided of who speaks. Times are seconds since the beginning of the session.
struct Known {
    /// One speaker at a time, in order.
    turns: Vec<Turn>,
    decided: f64,
    /// What begins before this does not wait for what comes after it.
    settled: f64,
    /// Nothing more will be decided.
    is_over: bool,
}

/// The words of a session that wait for their speakers, and the samples that wait to be heard.
pub struct WordSpeakers {
    unheard: Vec<f32>,
    /// Samples that the diarizer was given.
    heard: u64,
    /// As many samples are worth a call.
    interval: usize,
    settle: bool,
    /// Up to which sample all was decided because it was asked for.
    settled: u64,
    /// Whether the call that runs settles.
    running: Option<bool>,
    known: Known,
    /// How long turns are kept, in seconds: longer than words wait to be decoded.
    kept: f64,
    items: VecDeque<Waiting>,
}

impl WordSpeakers {
    pub fn new(settings: &LiveSettings) -> Self {
        WordSpeakers {
            unheard: Vec::new(),
            heard: 0,
            // While `max_buffer` waits, no more comes.
            interval: (settings.speaker_step.min(settings.max_buffer) * f64::from(SAMPLE_RATE)) as usize,
            settle: false,
            settled: 0,
            running: None,
            known: Known {
                turns: Vec::new(),
                decided: 0.0,
                settled: 0.0,
                is_over: false,
            },
            kept: settings.max_buffer + 2.0 * settings.max_window + 60.0,
            items: VecDeque::new(),
        }
    }

    /// Takes samples of the session.
    pub fn feed(&mut self, samples: &[f32]) {
        if !self.known.is_over {
            self.unheard.extend_from_slice(samples);
        }
    }

    /// Samples that wait to be heard.
    pub fn waiting(&self) -> usize {
        self.unheard.len()
    }

    /// Who spoke up to now is to be decided without waiting for more.
    pub fn settle(&mut self) {
        self.settle = self.fed() > self.settled && !self.known.is_over;
    }

    /// What the diarizer is to hear now. There is nothing before [`WordSpeakers::decided`] or [`WordSpeakers::failed`] was told of
    /// the request before.
    pub fn next_request(&mut self) -> Option<DiarizeRequest> {
        let is_due = self.settle || self.unheard.len() >= self.interval;
        if self.running.is_some() || !is_due {
            return None;
        }
        let count = self.unheard.len().min(MOST_AT_ONCE);
        let samples: Vec<f32> = self.unheard.drain(..count).collect();
        self.heard += count as u64;
        let settle = self.settle && self.unheard.is_empty();
        self.settle &= !settle;
        self.running = Some(settle);
        Some(DiarizeRequest { samples, settle })
    }

    /// What was decided of the request, and up to when all is.
    pub fn decided(&mut self, decided: Decided, until: f64) {
        let known = &mut self.known;
        for piece in decided.exclusive {
            match known.turns.last_mut() {
                Some(turn) if turn.speaker == piece.speaker && turn.end == piece.start => turn.end = piece.end,
                _ => known.turns.push(piece),
            }
        }
        known.decided = until;
        if self.running.take() == Some(true) {
            self.settled = self.heard;
            known.settled = self.heard as f64 / f64::from(SAMPLE_RATE);
            self.settle &= !self.unheard.is_empty();
        }
        let old = known
            .turns
            .iter()
            .take_while(|turn| turn.end < until - self.kept)
            .count();
        known.turns.drain(..old);
    }

    /// The diarizer has failed: words have the speakers that are known, or none.
    pub fn failed(&mut self) {
        self.known.is_over = true;
        (self.running, self.settle) = (None, false);
        self.unheard.clear();
    }

    /// More words of an item, with times since the beginning of the session.
    pub fn add(&mut self, item: u64, words: &[Word]) {
        if words.is_empty() {
            return;
        }
        match self.items.iter_mut().find(|waiting| waiting.item == item) {
            Some(waiting) => waiting.words.extend_from_slice(words),
            None => self.items.push_back(Waiting {
                item,
                words: words.to_vec(),
                is_complete: false,
            }),
        }
    }

    /// No more words come to an item.
    pub fn complete(&mut self, item: u64) {
        if let Some(waiting) = self.items.iter_mut().find(|waiting| waiting.item == item) {
            waiting.is_complete = true;
        }
    }

    /// The item was forgotten.
    pub fn remove(&mut self, item: u64) {
        self.items.retain(|waiting| waiting.item != item);
    }

    /// Segments, with their items, whose speakers and ends are known now and were not before. All words of a complete item are in
    /// segments once who speaks is decided up to its end.
    pub fn take_segments(&mut self) -> Vec<(u64, Segment)> {
        let latest = self.fed() as f64 / f64::from(SAMPLE_RATE);
        let mut segments = Vec::new();
        for waiting in &mut self.items {
            for word in &mut waiting.words {
                if word.speaker.is_none() {
                    word.speaker = self.known.speaker_of(word, latest);
                }
                if word.speaker.is_none() {
                    break;
                }
            }
            while let Some(count) = waiting.whole_segment() {
                segments.push((waiting.item, segment(waiting.words.drain(..count).collect())));
            }
        }
        self.items
            .retain(|waiting| !waiting.is_complete || !waiting.words.is_empty());
        segments
    }

    /// Whether nothing waits to be heard, and no word for its speaker.
    pub fn is_done(&self) -> bool {
        self.running.is_none() && !self.settle && self.items.is_empty()
    }

    /// Samples that came.
    fn fed(&self) -> u64 {
        self.heard + self.unheard.len() as u64
    }
}

impl Known {
    /// The speaker of a word, once nothing that comes could change it. No word begins after `latest`, the end of what came.
    fn speaker_of(&self, word: &Word, latest: f64) -> Option<String> {
        let is_settled = self.is_over || word.start.min((latest - 1e-3).max(0.0)) < self.settled;
        if self.decided < word.end && !is_settled {
            return None;
        }
        if let Some(speaker) = speaker_during(&self.turns, word.start, word.end) {
            return Some(speaker.to_owned());
        }
        if self.decided < word.end + MAX_GAP && !is_settled {
            return None;
        }
        let near = speaker_near(&self.turns, word.start, word.end, MAX_GAP);
        Some(near.unwrap_or(UNKNOWN).to_owned())
    }
}

impl Waiting {
    /// How many words are a segment whose end is known.
    fn whole_segment(&self) -> Option<usize> {
        let first = self.words.first()?;
        for (number, word) in self.words.iter().enumerate() {
            word.speaker.as_ref()?;
            if word.speaker != first.speaker {
                return Some(number);
            }
            if ends_sentence(&word.word) || word.end - first.start >= LONGEST_SEGMENT {
                return Some(number + 1);
            }
        }
        self.is_complete.then_some(self.words.len())
    }
}

/// A segment of words of one speaker, of which there is at least one.
fn segment(words: Vec<Word>) -> Segment {
    let texts: Vec<&str> = words.iter().map(|word| word.word.trim()).collect();
    Segment {
        start: words.first().map_or(0.0, |word| word.start),
        end: words.last().map_or(0.0, |word| word.end),
        text: texts.join(" "),
        speaker: words.first().and_then(|word| word.speaker.clone()),
        confidence: None,
        words,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str, start: f64) -> Vec<Word> {
        let word = |(number, text): (usize, &str)| Word {
            word: text.to_owned(),
            start: start + number as f64 * 0.5,
            end: start + number as f64 * 0.5 + 0.4,
            ..Word::default()
        };
        text.split_whitespace().enumerate().map(word).collect()
    }

    fn decided(turns: &[(f64, f64, &str)]) -> Decided {
        let turn = |&(start, end, speaker): &(f64, f64, &str)| Turn {
            start,
            end,
            speaker: speaker.to_owned(),
        };
        Decided {
            turns: Vec::new(),
            exclusive: turns.iter().map(turn).collect(),
        }
    }

    /// Takes this many seconds of audio, and a call of the diarizer that says this of them.
    fn hear(speakers: &mut WordSpeakers, seconds: f64, turns: &[(f64, f64, &str)], until: f64) {
        speakers.feed(&vec![0.0; (seconds * f64::from(SAMPLE_RATE)) as usize]);
        speakers.next_request().expect("enough for a call");
        assert_eq!(speakers.next_request(), None, "one at a time");
        speakers.decided(decided(turns), until);
    }

    fn said(speakers: &mut WordSpeakers) -> Vec<(u64, String, String)> {
        let segments = speakers.take_segments().into_iter();
        segments
            .map(|(item, segment)| (item, segment.speaker.unwrap(), segment.text))
            .collect()
    }

    fn owned(item: u64, speaker: &str, text: &str) -> (u64, String, String) {
        (item, speaker.to_owned(), text.to_owned())
    }

    #[test]
    fn segments_end_where_the_speaker_changes_a_sentence_ends_or_the_item() {
        let mut speakers = WordSpeakers::new(&LiveSettings::default());
        // At 0, 0.5, 1, ...
        speakers.add(0, &words("a b c. d e f", 0.0));
        assert_eq!(said(&mut speakers), []);
        hear(&mut speakers, 2.0, &[(0.0, 0.9, "A")], 0.9);
        // Who says the third word is not decided.
        assert_eq!(said(&mut speakers), []);
        hear(&mut speakers, 2.0, &[(0.9, 2.0, "A"), (2.0, 2.9, "B")], 2.9);
        assert_eq!(said(&mut speakers), [owned(0, "A", "a b c."), owned(0, "A", "d")]);
        speakers.complete(0);
        assert_eq!(said(&mut speakers), [owned(0, "B", "e f")]);
        assert!(speakers.is_done());
        // An item that is forgotten is never said.
        speakers.add(1, &words("g", 2.0));
        speakers.remove(1);
        assert_eq!(said(&mut speakers), []);
        // A speaker who does not pause.
        speakers.add(2, &words(&"x ".repeat(40), 3.0));
        hear(&mut speakers, 25.0, &[(2.9, 8.0, "B")], 8.0);
        hear(&mut speakers, 5.0, &[(8.0, 30.0, "B")], 30.0);
        let long = said(&mut speakers);
        assert_eq!(long, [owned(2, "B", "x ".repeat(31).trim())]);
    }

    #[test]
    fn words_between_turns_wait_for_the_nearest_one_and_settling_waits_for_nothing() {
        let mut speakers = WordSpeakers::new(&LiveSettings::default());
        speakers.add(0, &words("a", 2.0));
        speakers.complete(0);
        hear(&mut speakers, 3.0, &[(0.0, 1.2, "A")], 3.0);
        assert_eq!(said(&mut speakers), []);
        hear(&mut speakers, 1.0, &[(3.0, 3.4, "B")], 3.5);
        // B is nearer than A.
        assert_eq!(said(&mut speakers), [owned(0, "B", "a")]);

        speakers.add(1, &words("b c", 3.5));
        speakers.complete(1);
        assert_eq!(said(&mut speakers), []);
        speakers.settle();
        assert_eq!(
            speakers.next_request(),
            Some(DiarizeRequest {
                samples: Vec::new(),
                settle: true
            })
        );
        speakers.decided(Decided::default(), 3.9);
        // The second word begins where the audio ends, as words in a window that is filled up do.
        assert_eq!(said(&mut speakers), [owned(1, "B", "b c")]);
        // There is nothing more to be settled.
        speakers.settle();
        assert!(speakers.is_done() && speakers.next_request().is_none());
    }

    #[test]
    fn without_the_diarizer_words_have_nobody() {
        let mut speakers = WordSpeakers::new(&LiveSettings::default());
        speakers.add(0, &words("a b", 0.0));
        speakers.complete(0);
        speakers.feed(&[0.0; 200_000]);
        assert_eq!(speakers.next_request().unwrap().samples.len(), MOST_AT_ONCE);
        speakers.failed();
        assert_eq!(said(&mut speakers), [owned(0, UNKNOWN, "a b")]);
        speakers.feed(&[0.0; 200_000]);
        speakers.settle();
        assert!(speakers.next_request().is_none() && speakers.waiting() == 0 && speakers.is_done());
    }

    #[test]
    fn a_full_buffer_is_enough_for_a_call() {
        let settings = LiveSettings {
            max_buffer: 1.0,
            speaker_step: 5.0,
            ..LiveSettings::default()
        };
        let mut speakers = WordSpeakers::new(&settings);
        speakers.feed(&[0.0; 16_000]);
        assert!(speakers.next_request().is_some());
    }

    #[test]
    fn turns_of_long_ago_are_forgotten() {
        let settings = LiveSettings::default();
        let mut speakers = WordSpeakers::new(&settings);
        for second in 0..1_000 {
            let (start, name) = (f64::from(second), format!("{}", second % 2));
            hear(&mut speakers, 1.0, &[(start, start + 0.5, &name)], start + 1.0);
        }
        assert!(speakers.known.turns.len() <= speakers.kept as usize + 1);
    }
}
