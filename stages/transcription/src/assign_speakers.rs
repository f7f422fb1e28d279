//! The kind `transcription.assign_speakers`: who said which word.

use std::collections::HashMap;

use arrow::array::RecordBatch;
use flow_runtime::{
    Body, ColumnType, Conservation, Context, InputPort, Inputs, Kind, Operator, Out, OutputPort, Partition, Port,
    Progress, Shape, StageError,
};
use flow_speakers::stages::rows::read_turns;
use flow_speakers::turns::Turn;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Segment;
use crate::rows::{Speakers, read_segments, segments_batch, segments_schema};
use crate::speakers::{AssignmentRules, Rule, assign_speakers};

/// Says of each word of a transcript who spoke it, by the turns of a diarization.
///
/// # What it does
///
/// With the rule `words` (the default) each word has the speaker with whom it has most time in common, by the exclusive turns,
/// of which no two are at the same time. A word that lies between turns has the speaker of the one whose edge is nearest, if that
/// is within `max_gap`, else `UNKNOWN`. Segments are cut where the speaker changes. With `majority` segments stay whole, and
/// each has the speaker of most of its words. `whisperx` is what WhisperX does, to the bit: by the turns as they are, which may
/// overlap, segments and words each for themselves; what has no time in common with a turn has no speaker, or with
/// `fill_nearest` that of the turn whose middle is nearest.
///
/// Without turns (the stage that gives them is switched off by `when`) segments go on as they are, and nobody has a name.
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
    /// `words` and `majority`: a turn may be this far from a word that has no time in common with any, in seconds.
    #[serde(default = "max_gap")]
    pub max_gap: f64,
    /// `whisperx`: what has no time in common with a turn gets the speaker of the one whose middle is nearest.
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

const TURN: &[(&str, ColumnType)] = &[
    ("start", ColumnType::Float64),
    ("end", ColumnType::Float64),
    ("speaker", ColumnType::Text),
];

impl Kind for AssignSpeakers {
    const NAME: &'static str = "transcription.assign_speakers";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[
        InputPort::streamed("segments", "the port `segments` of a transcription.transcribe").columns(&[
            ("start", ColumnType::Float64),
            ("end", ColumnType::Float64),
            ("text", ColumnType::Text),
            ("confidence", ColumnType::Float64),
            ("words", ColumnType::Any),
        ]),
        InputPort::streamed("turns", "the port `turns` of a speakers.diarize of the same recordings")
            .optional()
            .columns(TURN),
        InputPort::streamed(
            "exclusive",
            "the port `exclusive` of the same stage: `words` and `majority` take these turns where they are given",
        )
        .optional()
        .columns(TURN),
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
            return Err(StageError::Input {
                name: "exclusive".into(),
                message: "the rule `whisperx` goes by the input `turns`, which is not given".into(),
                help: None,
            });
        }
        let segments = Port {
            name: "segments".into(),
            schema: segments_schema(Speakers::Named),
        };
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

/// What is known of a partition.
#[derive(Default)]
struct Waiting {
    segments: Vec<Segment>,
    turns: Vec<Turn>,
}

struct Assigner {
    rules: AssignmentRules,
    /// The input by which speakers are told, if there is one.
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
