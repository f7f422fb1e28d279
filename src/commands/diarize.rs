//! `flow diarize`: recordings to turns of speakers, by the pipeline `diarize` that the program carries.

use std::io::Write;

use flow_kind::registry::Registry;
use flow_speakers::stages::Format;
use flow_transcription::channels::ChannelUse;

use super::fetch::fetch_diarization_model;
use super::recordings::{Work, WrittenFormat, formats, names_of, speakers, work};
use crate::arguments::DiarizeArguments;
use flow_cli::failure::{Exit, Failure};

/// The pipeline, and its stage that diarizes.
const DIARIZE: &str = "diarize";
/// The stage of the pipeline that writes.
const WRITE: &str = "write_turns";
/// Parameters of the pipeline that options set.
const OPTIONS: &[(&str, &str)] = &[
    ("input", "INPUT..."),
    ("out", "--out"),
    ("keep", "--overwrite"),
    ("track", "--track"),
    ("formats", "--format"),
    ("diarization_model", "--diarization-model"),
    ("num_speakers", "--num-speakers"),
    ("min_speakers", "--min-speakers"),
    ("max_speakers", "--max-speakers"),
    ("known_speakers", "--known-speakers"),
];

pub fn diarize(arguments: &DiarizeArguments, registry: &Registry, out: &mut dyn Write) -> Result<Exit, Failure> {
    let known = Format::ALL.map(|format| WrittenFormat {
        name: format.name(),
        stage: WRITE,
    });
    let formats = formats(&arguments.format, &known)?;
    let mut set = vec![format!("formats={}", names_of(&formats, WRITE))];
    set.extend(speakers(&arguments.speakers)?);
    fetch_diarization_model(&arguments.speakers, &arguments.recordings)?;
    let diarization = Work {
        pipeline: DIARIZE,
        result: "diarization",
        stages: vec![(DIARIZE, "diarized")],
        formats,
        set,
        options: OPTIONS,
        channels: ChannelUse::Mix,
        coverage: None,
        boosts: false,
    };
    work(&diarization, &arguments.recordings, registry, out)
}
