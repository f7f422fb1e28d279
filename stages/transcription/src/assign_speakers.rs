//! The kind `transcription.assign_speakers`: who said which word.

use std::collections::HashMap;

use arrow::array::RecordBatch;
use flow_kind::{
    Body, Conservation, Context, InputPort, Inputs, Kind, Operator, Out, OutputPort, Partition, Port, Progress, Shape,
    StageError,
};
use flow_speakers::stages::rows::{TURN_COLUMNS, read_turns};
use flow_speakers::turns::Turn;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Segment;
use crate::rows::{SEGMENT_COLUMNS, Speakers, read_segments, segments_batch, segments_schema};
use crate::speakers::{AssignmentRules, Rule, assign_speakers};

/// Assigns a speaker to each word of a transcript, by the turns of a diarization.
///
/// # What it does
///
/// With the rule `words` (the default) each word gets the speaker with the largest overlap, by the exclusive turns,
/// which do not overlap each other. A word between turns gets the speaker of the turn with the nearest edge, if that is
/// within `max_gap`, else `UNKNOWN`. Segments are split where the speaker changes. With `majority` segments stay whole,
/// and each gets the speaker of most of its words. `whisperx` gives exactly WhisperX's results: by the turns, which may
/// overlap, segments and words independently; those without overlap with a turn get no speaker, or with `fill_nearest`
/// that of the turn with the nearest middle.
///
/// Without turns (their stage is switched off by `when`) segments pass unchanged, without speakers.
///
/// Port `segments`, one row per segment: those of `transcription.transcribe` with a column `speaker`, also in `words`.
///
/// # Example
///
/// ```yaml
/// speakers:
///   uses: transcription.assign_speakers
///   from: {segments: transcribe.segments, turns: diarize.turns, exclusive: diarize.exclusive}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AssignSpeakersSettings {
    /// How words get their speakers: `words`, `majority` or `whisperx`.
    #[serde(default)]
    pub rule: Rule,
    /// `words` and `majority`: largest distance in seconds between a word without overlap and the nearest turn.
    #[serde(default = "max_gap")]
    pub max_gap: f64,
    /// `whisperx`: words and segments without overlap get the speaker of the turn with the nearest middle.
    #[serde(default)]
    pub fill_nearest: bool,
}

fn max_gap() -> f64 {
    AssignmentRules::default().max_gap
}

impl AssignSpeakersSettings {
    fn rules(&self) -> AssignmentRules {
        AssignmentRules {
            rule: self.rule,
            max_gap: self.max_gap,
            fill_nearest: self.fill_nearest,
        }
    }
}

/// The kind `transcription.assign_speakers`.
pub struct AssignSpeakers;

impl Kind for AssignSpeakers {
    const NAME: &'static str = "transcription.assign_speakers";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[
        InputPort::streamed("segments", "the port `segments` of a transcription.transcribe").columns(SEGMENT_COLUMNS),
        InputPort::streamed("turns", "the port `turns` of a speakers.diarize of the same recordings")
            .optional()
            .columns(TURN_COLUMNS),
        InputPort::streamed(
            "exclusive",
            "the port `exclusive` of the same stage: `words` and `majority` take these turns where they are given",
        )
        .optional()
        .columns(TURN_COLUMNS),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new(
        "segments",
        "one row for each segment, with its speaker and those of its words",
    )];
    type Settings = AssignSpeakersSettings;

    fn shape(settings: &AssignSpeakersSettings, inputs: &Inputs) -> Result<Shape, StageError> {
        if !(settings.max_gap >= 0.0 && settings.max_gap.is_finite()) {
            let message = format!(
                "`max_gap` is {}; it must be a number of seconds, 0 or more",
                settings.max_gap
            );
            return Err(StageError::setting("max_gap", message));
        }
        let is_whisperx = settings.rule == Rule::Whisperx;
        if settings.fill_nearest && !is_whisperx {
            let message = "`fill_nearest` is of the rule `whisperx`; the others have `max_gap`";
            return Err(StageError::setting("fill_nearest", message));
        }
        if is_whisperx && inputs.has("exclusive") && !inputs.has("turns") {
            return Err(StageError::input(
                "exclusive",
                "the rule `whisperx` needs the input `turns`, which is not given",
            ));
        }
        let segments = Port::new("segments", segments_schema(Speakers::Named));
        Ok(Shape {
            conservation: Conservation::NewRows,
            ..Shape::local(vec![segments])
        })
    }

    fn open(settings: &AssignSpeakersSettings, context: &Context) -> Result<Body, StageError> {
        let wants_exclusive = settings.rule != Rule::Whisperx;
        let turns = ["exclusive", "turns"]
            .into_iter()
            .filter(|name| wants_exclusive || *name == "turns")
            .find(|name| context.inputs.has(name));
        Ok(Body::Local(Box::new(Assigner {
            rules: settings.rules(),
            turns,
            waiting: HashMap::new(),
        })))
    }
}

/// The inputs of a partition collected so far.
#[derive(Default)]
struct Waiting {
    segments: Vec<Segment>,
    turns: Vec<Turn>,
}

struct Assigner {
    rules: AssignmentRules,
    /// The input with the turns for the rule, if there is one.
    turns: Option<&'static str>,
    waiting: HashMap<Partition, Waiting>,
}

impl Operator for Assigner {
    fn batch(&mut self, input: &str, partition: &Partition, batch: RecordBatch, _: &mut Out) -> Result<(), StageError> {
        let waiting = self.waiting.entry(partition.clone()).or_default();
        if input == "segments" {
            waiting.segments.extend(read_segments(&batch)?);
        } else if Some(input) == self.turns {
            waiting.turns.extend(read_turns(&batch)?);
        }
        Ok(())
    }

    fn partition_complete(&mut self, partition: &Partition, out: &mut Out) -> Result<Progress, StageError> {
        let Waiting { segments, turns } = self.waiting.remove(partition).unwrap_or_default();
        let segments = match self.turns {
            Some(_) => assign_speakers(segments, &turns, &self.rules),
            None => segments,
        };
        out.send(0, segments_batch(&segments, Speakers::Named)?);
        Ok(Progress::Done)
    }
}

#[cfg(test)]
#[path = "assign_speakers_tests.rs"]
mod tests;
