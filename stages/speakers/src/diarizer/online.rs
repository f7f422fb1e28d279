//! Who speaks, said a few seconds after it was spoken: [`OnlineDiarizer`] takes samples as they come and gives turns that never
//! change.
//!
//! Windows of ten seconds go through the networks, each some time after the one before. The speakers of a window are assigned to
//! those that are known so far by the distance of their embeddings, two of a window never to the same one; who is far from all
//! of them, and speaks long enough, is a new one. Frames are decided once a delay has passed: by then several windows heard
//! them, each of which has a vote, as in [`reconstruct`](mod@crate::reconstruct). After Coria et al., "Overlap-aware
//! low-latency online speaker diarization" (2021).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use flow_kernels::threads::install;

use super::{CHUNK, Diarizer, GEOMETRY, KnownSpeakers, SAMPLE_RATE};
use crate::assignment::least_cost;
use crate::error::{Error, Result};
use crate::fbank::{BANDS, FRAME, SHIFT, subtract_mean};
use crate::pyannet::{FRAME_STEP, MAX_SAMPLE, RECEPTIVE_FIELD};
use crate::turns::{Turn, sort};

/// Frames of features of a whole window.
const WINDOW_FEATURES: usize = 1 + (CHUNK - FRAME) / SHIFT;
/// A known speaker's centroid follows a voice that is heard alone for at least so long in a window, in seconds.
const LEAST_UPDATE: f64 = 1.0;
/// The distance from everybody of a voice of which too little is heard for an embedding.
const UNHEARD: f64 = 1.5;

/// How speakers are distinguished while they speak.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OnlineSettings {
    /// From the end of one window to that of the next, in seconds: 0.1 to 5, in steps of 0.01.
    pub step: f64,
    /// How long after it a frame is decided, in seconds, from 0 to 9: longer is better, up to a step less than a window.
    pub delay: f64,
    /// A voice whose cosine distance from all centroids is larger is a new speaker: above 0, and 2 at most.
    pub new_speaker_distance: f64,
    /// How long a voice has to be heard alone in a window before it may be a new speaker, in seconds, from 0 to 10.
    pub min_speech: f64,
    /// Most speakers, from 1 to 1000. Once there are as many, no other is new: a voice has the nearest of them.
    pub max_speakers: usize,
}

impl Default for OnlineSettings {
    /// For the bundled networks.
    fn default() -> Self {
        Self {
            step: 1.0,
            delay: 5.0,
            new_speaker_distance: 0.5,
            min_speech: 1.5,
            max_speakers: 20,
        }
    }
}

impl OnlineSettings {
    /// # Errors
    /// The name of a setting that is out of its range.
    pub fn check(&self) -> Result<()> {
        let seconds = [
            ("step", self.step, 0.1, 5.0),
            ("delay", self.delay, 0.0, 9.0),
            (
                "new_speaker_distance",
                self.new_speaker_distance,
                f64::MIN_POSITIVE,
                2.0,
            ),
            ("min_speech", self.min_speech, 0.0, 10.0),
        ];
        for (name, value, least, most) in seconds {
            if !(least..=most).contains(&value) {
                let least = if least < 0.1 { 0.0 } else { least };
                return Err(Error::Input(format!(
                    "{name} is {value}; it is a number from {least} to {most}"
                )));
            }
        }
        if !(1..=1000).contains(&self.max_speakers) {
            let given = self.max_speakers;
            return Err(Error::Input(format!(
                "max_speakers is {given}; it is a number from 1 to 1000"
            )));
        }
        Ok(())
    }

    /// From window to window, in samples: whole frames of features.
    fn step_samples(&self) -> usize {
        (self.step * f64::from(SAMPLE_RATE) / SHIFT as f64).round() as usize * SHIFT
    }

    fn delay_samples(&self) -> usize {
        (self.delay * f64::from(SAMPLE_RATE)).round() as usize
    }

    /// What is said is decided when at most this many samples have come after it.
    pub fn latency(&self) -> usize {
        self.step_samples() + self.delay_samples() + RECEPTIVE_FIELD
    }
}

/// Who speaks in a stretch that was decided. Times in seconds since the beginning. A turn that goes on is given in pieces, each
/// of which begins where the one before it ends; after [`OnlineDiarizer::settle`] the next one may begin up to a frame (17 ms)
/// later, and remains a turn of its own.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Decided {
    /// In order of start, end and name. Those of different speakers may overlap.
    pub turns: Vec<Turn>,
    /// One speaker at a time.
    pub exclusive: Vec<Turn>,
}

impl Decided {
    /// Adds what was decided next; pieces of a turn become one.
    pub fn append(&mut self, next: Decided) {
        append(&mut self.turns, next.turns);
        append(&mut self.exclusive, next.exclusive);
    }
}

/// Turns that end where the first new one may begin are at the end of those that stand.
fn append(turns: &mut Vec<Turn>, next: Vec<Turn>) {
    for piece in next {
        let before = turns.iter_mut().rev().find(|turn| turn.speaker == piece.speaker);
        match before {
            Some(turn) if turn.end == piece.start => turn.end = piece.end,
            _ => turns.push(piece),
        }
    }
    sort(turns);
}

/// A speaker that is known so far.
struct Centroid {
    name: String,
    /// Sum of embeddings of length 1, each times the seconds that it was made of.
    sum: Vec<f64>,
}

/// What windows say of a frame that is not decided.
#[derive(Clone, Default)]
struct Frame {
    windows: u32,
    /// Active speakers over all windows.
    active: u32,
    /// Windows in which a speaker is active; those who are not there have none.
    votes: Vec<u32>,
}

/// Tells who speaks in samples that come in blocks. What it says does not depend on the size of the blocks, but for where turns
/// are cut into pieces. Its memory is bounded, however long it listens: samples and features of a window, frames of a window and
/// the delay, and a centroid for each speaker.
///
/// The first windows are shorter than ten seconds: they hold what there is. Speech that is decided before somebody has spoken
/// for `min_speech`, or of a voice beside others of which less than that is heard, is nobody's and in no turn.
pub struct OnlineDiarizer {
    diarizer: Arc<Diarizer>,
    known: Option<KnownSpeakers>,
    settings: OnlineSettings,
    /// Samples from number `first` on, which is where a window may begin.
    samples: Vec<f32>,
    first: u64,
    /// Where the last window ended, or 0.
    heard: u64,
    /// Features from a frame on (one each [`SHIFT`] samples since the beginning).
    features: Vec<f32>,
    first_feature: u64,
    speakers: Vec<Centroid>,
    /// Frames from number `decided` on.
    frames: VecDeque<Frame>,
    decided: u64,
}

impl std::fmt::Debug for OnlineDiarizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OnlineDiarizer")
            .field("settings", &self.settings)
            .field("speakers", &self.speakers.len())
            .finish_non_exhaustive()
    }
}

impl OnlineDiarizer {
    /// New speakers whose voices are `known` have these names, each of which is given once; the others are `SPEAKER_00`,
    /// `SPEAKER_01` and so on, in the order in which they were new.
    ///
    /// # Errors
    /// If a setting is out of range, or known voices are from other networks.
    pub fn new(diarizer: Arc<Diarizer>, settings: OnlineSettings, known: Option<KnownSpeakers>) -> Result<Self> {
        settings.check()?;
        if let Some(known) = &known {
            known.check_dimension(diarizer.dimension())?;
        }
        Ok(Self {
            diarizer,
            known,
            settings,
            samples: Vec::new(),
            first: 0,
            heard: 0,
            features: Vec::new(),
            first_feature: 0,
            speakers: Vec::new(),
            frames: VecDeque::new(),
            decided: 0,
        })
    }

    /// Samples that came.
    fn fed(&self) -> u64 {
        self.first + self.samples.len() as u64
    }

    /// Up to when all is decided, in seconds since the beginning: what is decided later begins there or after.
    pub fn decided_until(&self) -> f64 {
        if self.decided == 0 {
            return 0.0;
        }
        let seconds = self.fed() as f64 / f64::from(SAMPLE_RATE);
        middle(self.decided).min(seconds)
    }

    /// Names of those who were heard so far.
    pub fn speakers(&self) -> impl Iterator<Item = &str> {
        self.speakers.iter().map(|speaker| speaker.name.as_str())
    }

    /// Takes samples (mono, 16 kHz, in [-1, 1]), and gives what was decided with them.
    ///
    /// # Errors
    /// If a sample is not finite or larger than 1e9: nothing is taken. Else if a network fails, after which no more may be asked.
    pub fn feed(&mut self, samples: &[f32]) -> Result<Decided> {
        let is_wrong = |sample: &f32| sample.is_nan() || sample.abs() > MAX_SAMPLE;
        if let Some(at) = samples.iter().position(is_wrong) {
            return Err(Error::Sample {
                at: at as u64,
                value: samples[at],
                limit: MAX_SAMPLE,
            });
        }
        let (mut decided, mut rest) = (Decided::default(), samples);
        let step = self.settings.step_samples() as u64;
        loop {
            let end = (self.heard / step + 1) * step;
            let missing = usize::try_from(end - self.fed()).unwrap_or(usize::MAX);
            let (block, after) = rest.split_at(rest.len().min(missing));
            self.samples.extend_from_slice(block);
            rest = after;
            if self.fed() < end {
                return Ok(decided);
            }
            self.hear(end)?;
            let whole = (RECEPTIVE_FIELD + self.settings.delay_samples()) as u64;
            let frames = end.checked_sub(whole).map_or(0, |last| last / FRAME_STEP as u64 + 1);
            decided.append(self.decide(frames));
        }
    }

    /// Decides all that came, without waiting for what comes next: the last frames are heard in fewer windows. More samples
    /// may follow.
    ///
    /// # Errors
    /// If a network fails, after which no more may be asked.
    pub fn settle(&mut self) -> Result<Decided> {
        let end = self.fed();
        if end > self.heard {
            self.hear(end)?;
        }
        Ok(self.decide(self.decided + self.frames.len() as u64))
    }

    /// Hears the window that ends with a sample: the speakers of its frames have votes then.
    fn hear(&mut self, end: u64) -> Result<()> {
        // Windows begin with a frame of features.
        let start = end.saturating_sub(CHUNK as u64).next_multiple_of(SHIFT as u64);
        let from = (start - self.first) as usize;
        let given = &self.samples[from..(end - self.first) as usize];
        let (length, mut window) = (given.len(), given.to_vec());
        window.resize(CHUNK, 0.0);
        let activities = self.segmented(&window, frames_of(length))?;
        let features = self.window_features(start, end)?;
        let locals = self.diarizer.segmentation.speakers();
        if activities.contains(&1) {
            let embeddings = install(|| self.diarizer.of_chunk(&features, &activities))?;
            let speakers = self.assign(&activities, &embeddings)?;
            self.vote(start, &activities, &speakers, frames_of(length));
        } else {
            self.vote(start, &activities, &vec![None; locals], frames_of(length));
        }
        self.heard = end;
        // The next window begins no earlier.
        let first_feature = end.saturating_sub(CHUNK as u64) / SHIFT as u64;
        let first = first_feature * SHIFT as u64;
        self.samples.drain(..(first - self.first) as usize);
        let gone = (first_feature - self.first_feature) as usize * BANDS;
        self.features.drain(..gone.min(self.features.len()));
        (self.first, self.first_feature) = (first, first_feature);
        Ok(())
    }

    /// Who is active in a window, (frames, speakers), nobody after the first `frames` frames.
    fn segmented(&self, window: &[f32], frames: usize) -> Result<Vec<u8>> {
        let network = &self.diarizer.segmentation;
        let mut activities = network.chunk(window)?;
        let (all, locals) = (network.frames(), network.speakers());
        if activities.len() != all * locals {
            return Err(Error::Input(format!(
                "the segmentation of a window has {} values, not {all} frames of {locals} speakers",
                activities.len()
            )));
        }
        activities[frames.min(all) * locals..].fill(0);
        Ok(activities)
    }

    /// Features of a window less their mean. What it lacks of ten seconds is filled up with zeros, which are the mean.
    fn window_features(&mut self, start: u64, end: u64) -> Result<Vec<f32>> {
        let next = self.first_feature + (self.features.len() / BANDS) as u64;
        let from = (next * SHIFT as u64 - self.first) as usize;
        let to = (end - self.first) as usize;
        if let Some(new) = self.samples.get(from..to) {
            self.features.extend(self.diarizer.embedding.fbank().compute(new)?);
        }
        let skipped = (start / SHIFT as u64 - self.first_feature) as usize * BANDS;
        let mut features = self.features.get(skipped..).unwrap_or_default().to_vec();
        if !features.is_empty() {
            subtract_mean(&mut features);
        }
        features.resize(WINDOW_FEATURES * BANDS, 0.0);
        Ok(features)
    }

    /// The speaker of each one of a window, if there is one; new speakers are added, and the centroids follow.
    fn assign(&mut self, activities: &[u8], embeddings: &[f32]) -> Result<Vec<Option<usize>>> {
        let (locals, dimension) = (self.diarizer.segmentation.speakers(), self.diarizer.dimension());
        let is_active = |local: &usize| {
            activities
                .iter()
                .skip(*local)
                .step_by(locals)
                .any(|active| *active == 1)
        };
        let heard: Vec<Local> = (0..locals)
            .filter(is_active)
            .map(|local| Local::new(local, activities, locals, &embeddings[local * dimension..][..dimension]))
            .collect();
        let (known, distance) = (self.speakers.len(), self.settings.new_speaker_distance);
        let may_be_new = |local: &Local| {
            local.voice.is_some()
                && local.seconds_alone >= self.settings.min_speech
                && known < self.settings.max_speakers
        };
        let news: Vec<bool> = heard.iter().map(may_be_new).collect();
        let places = self.nearest_known(&heard, &news)?;
        let mut assigned = vec![None; locals];
        for (row, local) in heard.iter().enumerate() {
            let place = places[row];
            assigned[local.number] = place;
            let Some(voice) = &local.voice else { continue };
            let weighted = |value: &f64| value * local.seconds_alone.max(f64::MIN_POSITIVE);
            if let Some(place) = place {
                let sum = &mut self.speakers[place].sum;
                if local.seconds_alone >= LEAST_UPDATE && local.distance(sum) <= distance {
                    sum.iter_mut()
                        .zip(voice)
                        .for_each(|(sum, value)| *sum += weighted(value));
                }
            } else if news[row] && self.speakers.len() < self.settings.max_speakers {
                // Of several new ones in a window the last ones may be too many.
                assigned[local.number] = Some(self.speakers.len());
                let name = self.new_name(voice);
                let sum = voice.iter().map(weighted).collect();
                self.speakers.push(Centroid { name, sum });
            }
        }
        Ok(assigned)
    }

    /// Who of those that are known speakers of a window are, no two of them the same one, so that the sum of distances is least.
    /// Who is farther from all that are left than a new speaker is nobody, if it may be new; else it is the nearest one that
    /// nobody else is.
    fn nearest_known(&self, heard: &[Local], may_be_new: &[bool]) -> Result<Vec<Option<usize>>> {
        let known = self.speakers.len();
        let distance = |local: &Local, place: usize| local.distance(&self.speakers[place].sum);
        // One column more for each speaker of the window: nobody. It costs as much for those who may not be new, or they would
        // take the place of one who is nearer, and make that one a new speaker.
        let columns = known + heard.len();
        let mut costs = Vec::with_capacity(heard.len() * columns);
        for local in heard {
            costs.extend((0..known).map(|place| distance(local, place)));
            costs.extend(std::iter::repeat_n(self.settings.new_speaker_distance, heard.len()));
        }
        let near = least_cost(&costs, columns)?.into_iter();
        let mut places: Vec<Option<usize>> = near.map(|place| place.filter(|place| *place < known)).collect();
        let left: Vec<usize> = (0..heard.len())
            .filter(|&row| places[row].is_none() && !may_be_new[row])
            .collect();
        let free: Vec<usize> = (0..known).filter(|place| !places.contains(&Some(*place))).collect();
        if left.is_empty() || free.is_empty() {
            return Ok(places);
        }
        let costs = left.iter().flat_map(|&row| free.iter().map(move |&place| (row, place)));
        let costs: Vec<f64> = costs.map(|(row, place)| distance(&heard[row], place)).collect();
        for (row, place) in left.into_iter().zip(least_cost(&costs, free.len())?) {
            places[row] = place.map(|place| free[place]);
        }
        Ok(places)
    }

    /// The name of a new speaker.
    fn new_name(&self, voice: &[f64]) -> String {
        let is_free = |name: &str| self.speakers.iter().all(|speaker| speaker.name != name);
        let known = self.known.as_ref().and_then(|known| known.nearest(voice, is_free));
        known.map_or_else(|| format!("SPEAKER_{:02}", self.speakers.len()), str::to_owned)
    }

    /// Adds what a window says of its first frames that are not decided.
    fn vote(&mut self, start: u64, activities: &[u8], speakers: &[Option<usize>], frames: usize) {
        let first = GEOMETRY.nearest_frame(start as f64 / f64::from(SAMPLE_RATE)) as u64;
        let rows = activities.chunks_exact(speakers.len()).take(frames);
        for (number, row) in (first..).zip(rows) {
            let Some(place) = number.checked_sub(self.decided) else {
                continue;
            };
            let place = place as usize;
            if place >= self.frames.len() {
                self.frames.resize(place + 1, Frame::default());
            }
            let frame = &mut self.frames[place];
            frame.windows += 1;
            for (&active, speaker) in row.iter().zip(speakers) {
                frame.active += u32::from(active);
                let Some(speaker) = *speaker else { continue };
                if active == 1 {
                    frame.votes.resize(frame.votes.len().max(speaker + 1), 0);
                    frame.votes[speaker] += 1;
                }
            }
        }
    }

    /// Decides the frames before a number: as many speakers as windows say on average, those with most votes.
    fn decide(&mut self, end: u64) -> Decided {
        let (first, last) = (self.decided, end.min(self.decided + self.frames.len() as u64));
        if last <= first {
            return Decided::default();
        }
        let frames: Vec<Vec<usize>> = self
            .frames
            .drain(..(last - first) as usize)
            .map(|frame| most_voted(&frame))
            .collect();
        self.decided = last;
        let seconds = self.fed() as f64 / f64::from(SAMPLE_RATE);
        let turns = |most: usize| {
            let mut turns = Vec::new();
            for (number, speaker) in self.speakers.iter().enumerate() {
                let is_active = |speakers: &Vec<usize>| speakers.iter().take(most).any(|active| *active == number);
                turns.extend(stretches(&frames, is_active).map(|stretch| Turn {
                    start: middle(first + stretch.start as u64),
                    end: middle(first + stretch.end as u64).min(seconds),
                    speaker: speaker.name.clone(),
                }));
            }
            turns.retain(|turn| turn.end > turn.start);
            sort(&mut turns);
            turns
        };
        Decided {
            turns: turns(usize::MAX),
            exclusive: turns(1),
        }
    }
}

/// A speaker of a window.
struct Local {
    number: usize,
    /// How long nobody else speaks at the same time.
    seconds_alone: f64,
    /// The embedding, of length 1, if enough is heard.
    voice: Option<Vec<f64>>,
}

impl Local {
    fn new(number: usize, activities: &[u8], locals: usize, embedding: &[f32]) -> Self {
        let is_alone = |frame: &&[u8]| frame[number] == 1 && frame.iter().filter(|active| **active == 1).count() == 1;
        let alone = activities.chunks_exact(locals).filter(is_alone).count();
        let length = embedding
            .iter()
            .map(|&value| f64::from(value).powi(2))
            .sum::<f64>()
            .sqrt();
        let is_voice = length.is_finite() && length > 0.0;
        Self {
            number,
            seconds_alone: alone as f64 * GEOMETRY.frame_step,
            voice: is_voice.then(|| embedding.iter().map(|&value| f64::from(value) / length).collect()),
        }
    }

    /// Cosine distance from a centroid.
    fn distance(&self, centroid: &[f64]) -> f64 {
        let Some(voice) = &self.voice else { return UNHEARD };
        let product: f64 = voice.iter().zip(centroid).map(|(a, b)| a * b).sum();
        let length = centroid.iter().map(|value| value * value).sum::<f64>().sqrt();
        if length > 0.0 { 1.0 - product / length } else { UNHEARD }
    }
}

/// When a frame of the recording is.
fn middle(frame: u64) -> f64 {
    let start = frame as f64 * GEOMETRY.frame_step;
    0.5 * (start + (start + GEOMETRY.frame_duration))
}

/// Frames of a window whose middles are in its first samples.
fn frames_of(samples: usize) -> usize {
    samples
        .checked_sub(RECEPTIVE_FIELD / 2)
        .map_or(0, |rest| rest.div_ceil(FRAME_STEP))
}

/// The speakers of a frame, those with most votes first, of equal ones the first; as many as windows say on average, of two
/// numbers the even one.
fn most_voted(frame: &Frame) -> Vec<usize> {
    let count = (f64::from(frame.active) / f64::from(frame.windows.max(1))).round_ties_even() as usize;
    let mut speakers: Vec<usize> = (0..frame.votes.len())
        .filter(|&speaker| frame.votes[speaker] > 0)
        .collect();
    speakers.sort_by_key(|&speaker| std::cmp::Reverse(frame.votes[speaker]));
    speakers.truncate(count);
    speakers
}

/// The stretches of frames for which something holds.
fn stretches<T>(frames: &[T], holds: impl Fn(&T) -> bool) -> impl Iterator<Item = Range<usize>> {
    let mut at = 0;
    let runs = frames
        .chunk_by(|a, b| holds(a) == holds(b))
        .map(|run| (holds(&run[0]), run.len()));
    let runs: Vec<(bool, usize)> = runs.collect();
    runs.into_iter().filter_map(move |(holds, length)| {
        at += length;
        holds.then(|| at - length..at)
    })
}

#[cfg(test)]
#[path = "online_tests.rs"]
mod tests;
