//! Turns: intervals of speech of one speaker, from scores of frames by thresholds with hysteresis, as pyannote.audio's
//! `Binarize`.

use crate::chunks::Geometry;
use crate::error::{Error, Result};

/// What is not longer than this, in seconds, is empty, and turns with no longer gap between them touch: pyannote's
/// `SEGMENT_PRECISION`.
pub const PRECISION: f64 = 1e-6;

/// A stretch of speech of one speaker, in seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Turn<S = String> {
    pub start: f64,
    pub end: f64,
    pub speaker: S,
}

impl<S> Turn<S> {
    pub fn duration(&self) -> f64 {
        self.end - self.start
    }
}

/// Settings for turning scores of frames into turns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Thresholds {
    /// A turn begins above this.
    pub onset: f32,
    /// It ends below this.
    pub offset: f32,
    /// Seconds added before and after each turn.
    pub pad_onset: f64,
    pub pad_offset: f64,
    /// Turns that are shorter are dropped, in seconds.
    pub min_duration_on: f64,
    /// Gaps that are shorter are filled, in seconds.
    pub min_duration_off: f64,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            onset: 0.5,
            offset: 0.5,
            pad_onset: 0.0,
            pad_offset: 0.0,
            min_duration_on: 0.0,
            min_duration_off: 0.0,
        }
    }
}

/// NaN counts as 0, as in the original.
fn number(score: f32) -> f32 {
    if score.is_nan() { 0.0 } else { score }
}

/// Turns of scores (frames, `classes`), in order of start, end and class. A turn begins at the middle of its first frame
/// and ends at that of the first frame after it, or of the last one. NaN counts as 0.
pub fn turns(scores: &[f32], classes: usize, geometry: &Geometry, thresholds: &Thresholds) -> Result<Vec<Turn<usize>>> {
    geometry.check()?;
    if classes == 0 || !scores.len().is_multiple_of(classes) {
        return Err(Error::Input(format!(
            "{} scores do not divide into frames of {classes} classes",
            scores.len()
        )));
    }
    let t = thresholds;
    let seconds = [t.pad_onset, t.pad_offset, t.min_duration_on, t.min_duration_off];
    if seconds.iter().any(|value| !value.is_finite()) || t.onset.is_nan() || t.offset.is_nan() {
        return Err(Error::Input(format!(
            "thresholds and durations are finite numbers: {t:?}"
        )));
    }
    let frames = scores.len() / classes;
    let mut found = Vec::new();
    for class in 0..classes {
        let mut of_class: Vec<Turn<usize>> = Vec::new();
        let mut add = |start: f64, end: f64| {
            let turn = Turn {
                start: start - t.pad_onset,
                end: end + t.pad_offset,
                speaker: class,
            };
            if turn.duration() > PRECISION {
                of_class.push(turn);
            }
        };
        let mut start = None;
        for frame in 0..frames {
            let score = number(scores[frame * classes + class]);
            match start {
                None if score > t.onset => start = Some(geometry.middle(frame)),
                Some(from) if score < t.offset => {
                    add(from, geometry.middle(frame));
                    start = None;
                }
                _ => {}
            }
        }
        if let Some(from) = start {
            add(from, geometry.middle(frames - 1));
        }
        if t.pad_onset > 0.0 || t.pad_offset > 0.0 || t.min_duration_off > 0.0 {
            of_class = joined(of_class, t.min_duration_off);
        }
        found.append(&mut of_class);
    }
    found.retain(|turn| turn.duration() >= t.min_duration_on);
    sort(&mut found);
    Ok(found)
}

/// Puts turns in order of start, end and speaker.
pub fn sort<S: Ord>(turns: &mut [Turn<S>]) {
    turns.sort_by(|a, b| {
        let times = a.start.total_cmp(&b.start).then(a.end.total_cmp(&b.end));
        times.then_with(|| a.speaker.cmp(&b.speaker))
    });
}

/// Turns of one speaker, in order of their starts, with those joined that overlap, touch, or have a gap shorter than
/// `shortest` between them.
pub fn joined<S>(turns: Vec<Turn<S>>, shortest: f64) -> Vec<Turn<S>> {
    let mut joined: Vec<Turn<S>> = Vec::with_capacity(turns.len());
    for turn in turns {
        match joined.last_mut() {
            Some(last) if turn.start - last.end <= PRECISION || turn.start - last.end < shortest => {
                last.end = last.end.max(turn.end);
            }
            _ => joined.push(turn),
        }
    }
    joined
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::golden;

    /// Asserts that turns are those of JSON, `[start, end, class]`, in order. Times are sums of a few doubles.
    pub fn assert_turns(found: &[Turn<usize>], expected: &serde_json::Value, what: &str) {
        let expected = expected.as_array().unwrap();
        assert_eq!(found.len(), expected.len(), "{what}");
        for (found, expected) in found.iter().zip(expected) {
            let close = |a: f64, b: &serde_json::Value| (a - b.as_f64().unwrap()).abs() < 1e-9;
            assert!(
                close(found.start, &expected[0])
                    && close(found.end, &expected[1])
                    && expected[2] == found.speaker as u64,
                "{what}: {found:?}, not {expected}"
            );
        }
    }

    #[test]
    fn turns_are_those_of_the_original() {
        let tensors = golden::Tensors::load("f_binarize.safetensors");
        let (shape, by_class) = tensors.floats("scores");
        let (classes, frames) = (shape[0], shape[1]);
        let scores: Vec<f32> = (0..classes * frames)
            .map(|at| by_class[at % classes * frames + at / classes])
            .collect();
        for case in golden::json("f_binarize.json").as_array().unwrap() {
            let arguments = &case["args"];
            let number = |name: &str, default: f64| arguments[name].as_f64().unwrap_or(default);
            let onset = number("onset", 0.5);
            let thresholds = Thresholds {
                onset: onset as f32,
                offset: number("offset", onset) as f32,
                pad_onset: number("pad_onset", 0.0),
                pad_offset: number("pad_offset", 0.0),
                min_duration_on: number("min_duration_on", 0.0),
                min_duration_off: number("min_duration_off", 0.0),
            };
            let found = turns(&scores, classes, &Geometry::SEGMENTATION, &thresholds).unwrap();
            assert_turns(&found, &case["turns"], &arguments.to_string());
        }
    }

    #[test]
    fn a_single_frame_is_no_turn_and_bad_input_is_refused() {
        let found = |scores: &[f32], classes| turns(scores, classes, &Geometry::SEGMENTATION, &Thresholds::default());
        assert_eq!(found(&[1.0], 1), Ok(Vec::new()));
        assert_eq!(found(&[], 1), Ok(Vec::new()));
        assert!(found(&[1.0], 2).is_err());
        assert!(found(&[1.0], 0).is_err());
    }
}
