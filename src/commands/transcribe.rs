//! `flow transcribe`: recordings to transcripts, by the pipeline `transcribe` that the program carries.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use flow_kind::registry::Registry;
use flow_model::ModelConfig;
use flow_model::checkpoint::OpenModel;
use flow_model::heads::HeadKind;
use flow_model::tokenizer::Tokenizer;
use flow_transcription::Format;
use flow_transcription::channels;
use flow_transcription::language_prior::parse_languages;
use flow_transcription::manifest_rows::is_manifest;
use flow_transcription::recognizer::languages;

use flow_cli::fetch::local_model;

use super::fetch::fetch_diarization_model;
use super::recordings::{Work, WrittenFormat, carried, formats, given, json, names_of, speakers, work};
use super::transcribe_stream::transcribe_stream;
use crate::arguments::{ChannelUse, Coverage, Decoder, Progress, TranscribeArguments, written};
use flow_cli::failure::{Exit, Failure};

/// The pipeline, and its stage that transcribes.
const TRANSCRIBE: &str = "transcribe";
/// The stage of the pipeline that writes transcripts.
const WRITE: &str = "write";
/// The stages that diarize, and write turns as RTTM.
const DIARIZE: &str = "diarize";
const WRITE_TURNS: &str = "write_turns";
/// Parameters of the pipeline that options set.
const OPTIONS: &[(&str, &str)] = &[
    ("input", "INPUT..."),
    ("channels", "--channels"),
    ("window", "--window"),
    ("coverage", "--coverage"),
    ("decoder", "--decoder"),
    ("out", "--out"),
    ("keep", "--overwrite"),
    ("track", "--track"),
    ("formats", "--format"),
    ("write_transcripts", "--format"),
    ("write_rttm", "--format"),
    ("beam", "--beam"),
    ("lm", "--lm"),
    ("boost", "--boost"),
    ("languages", "--language"),
    ("language_prior", "--language-prior"),
    ("device", "--device"),
    ("precision", "--precision"),
    ("diarize", "--diarize"),
    ("diarization_model", "--diarization-model"),
    ("num_speakers", "--num-speakers"),
    ("min_speakers", "--min-speakers"),
    ("max_speakers", "--max-speakers"),
    ("known_speakers", "--known-speakers"),
];
/// Turns, which are known only where recordings are diarized.
const RTTM: WrittenFormat = WrittenFormat {
    name: "rttm",
    stage: WRITE_TURNS,
};

pub fn transcribe(arguments: &TranscribeArguments, registry: &Registry, out: &mut dyn Write) -> Result<Exit, Failure> {
    if arguments.stream {
        return transcribe_stream(registry.storage(), arguments, out);
    }
    let speaks = !matches!(arguments.recordings.progress, Progress::None | Progress::Json);
    let formats = transcript_formats(&arguments.format, arguments.diarize)?;
    if arguments.recordings.stdout
        && formats
            .first()
            .is_some_and(|format| format.name == Format::Parquet.name())
    {
        return Err(Failure::usage(
            "`parquet` is not text, so it is not printed",
            "leave out --stdout, or name another format first",
        ));
    }
    let speakers = speakers(&arguments.speakers)?;
    let split = arguments.channels == ChannelUse::Split;
    if split && arguments.diarize {
        return Err(Failure::usage(
            "`--channels split` and `--diarize` are both about who speaks",
            "take the first where each speaker has a channel, the second where not",
        ));
    }
    if arguments.diarize
        && let Some(manifest) = arguments.recordings.input.iter().find(|text| is_manifest(text))
    {
        return Err(Failure::usage(
            format!("{manifest} is a manifest, and the speakers of its rows are not known"),
            "name the recordings themselves, or leave out --diarize",
        ));
    }
    if !arguments.diarize
        && let Some(given) = speakers.first()
    {
        let name = given.split('=').next().unwrap_or_default().replace('_', "-");
        return Err(Failure::usage(
            format!("`--{name}` is about who speaks, which is not asked for"),
            "add --diarize",
        ));
    }
    check_words_of_coverage(arguments)?;
    let decoder = arguments.decoding.decoder.map(|decoder| match decoder {
        Decoder::Transducer => HeadKind::Transducer,
        Decoder::Ctc => HeadKind::Ctc,
    });
    fetch_diarization_model(&arguments.speakers, &arguments.recordings)?;
    let precision = flow_model::Precision::from(arguments.decoding.precision);
    if speaks && let Some(warning) = precision.warning() {
        let _ = writeln!(io::stderr(), "warning: {warning}");
    }
    let transcripts = names_of(&formats, WRITE);
    let has_transcripts = formats.iter().any(|format| format.stage == WRITE);
    let mut set = vec![
        format!("write_transcripts={has_transcripts}"),
        format!("write_rttm={}", formats.contains(&RTTM)),
        format!("device={}", arguments.decoding.device),
        format!("precision={}", precision.name()),
        format!("channels={}", written(arguments.channels)),
        format!("window={}", written(arguments.decoding.window)),
        format!("diarize={}", arguments.diarize),
    ];
    if has_transcripts {
        set.push(format!("formats={transcripts}"));
    }
    set.extend(speakers);
    set.extend(arguments.decoding.beam.map(|beam| format!("beam={beam}")));
    set.extend(decoder.map(|decoder| format!("decoder={}", decoder.name())));
    let required = arguments.require_coverage;
    let coverage = arguments.coverage.or(required.map(|_| Coverage::Recover));
    set.extend(coverage.map(|coverage| format!("coverage={}", written(coverage))));
    if let Some(given) = &arguments.decoding.language {
        let languages = parse_languages(given);
        let languages =
            languages.map_err(|why| Failure::usage(format!("--language: {why}"), "such as fr, or hi,en"))?;
        set.push(format!("languages={}", json(&languages)));
    }
    for (name, file) in [
        ("lm", &arguments.decoding.lm),
        ("boost", &arguments.boost),
        ("language_prior", &arguments.decoding.language_prior),
    ] {
        if let Some(file) = file {
            let Some(path) = file.to_str() else {
                let message = format!("{} is not UTF-8", file.display());
                let option = name.replace('_', "-");
                return Err(Failure::usage(
                    message,
                    format!("give --{option} a file of another name"),
                ));
            };
            set.push(format!("{name}={}", json(&[path.to_owned()])[0]));
        }
    }
    match &arguments.decoding.model {
        Some(model) => {
            let path = local_model(registry.storage(), model, speaks)?;
            check_decoder(decoder, &path)?;
            set.push(format!("model={}", json(&[path.to_string_lossy().into_owned()])[0]));
        }
        None if !given(&arguments.recordings.set, "model") => {
            let path = bundled_model(&carried(TRANSCRIBE)?);
            check_decoder(decoder, &path)?;
            if speaks {
                tell_languages(&path);
            }
        }
        None => {}
    }
    let mut stages = vec![(TRANSCRIBE, "transcribed")];
    if arguments.diarize {
        stages.push((DIARIZE, "diarized"));
    }
    let transcription = Work {
        pipeline: TRANSCRIBE,
        result: "transcript",
        stages,
        formats,
        set,
        options: OPTIONS,
        channels: match arguments.channels {
            ChannelUse::Mix => channels::ChannelUse::Mix,
            ChannelUse::Split => channels::ChannelUse::Split,
        },
        coverage: coverage.map(|_| required.unwrap_or(0.0)),
        boosts: true,
    };
    work(&transcription, &arguments.recordings, registry, out)
}

/// Refuses `--coverage measure`, whose second word counts as a recording.
fn check_words_of_coverage(arguments: &TranscribeArguments) -> Result<(), Failure> {
    let is_value = |text: &&String| Coverage::from_str(text, false).is_ok() && !Path::new(text).exists();
    let input = &arguments.recordings.input;
    match input.iter().find(is_value).filter(|_| arguments.coverage.is_some()) {
        None => Ok(()),
        Some(value) => Err(Failure::usage(
            format!("there is no recording `{value}`"),
            format!("a value of --coverage follows `=`: --coverage={value}"),
        )),
    }
}

/// Refuses a head that the model does not have. Models that cannot be read are left to the run, which says what is wrong.
fn check_decoder(decoder: Option<HeadKind>, model: &Path) -> Result<(), Failure> {
    let Some(decoder) = decoder else { return Ok(()) };
    let opened = OpenModel::open(model).and_then(|opened| ModelConfig::from_nemo_yaml(&opened.config_yaml));
    let Ok(config) = opened else { return Ok(()) };
    config.check_decoder(decoder).map_err(|error| {
        Failure::usage(
            error.to_string(),
            "leave out --decoder, or name a model that has the head",
        )
    })
}

/// The formats that `--format` names.
fn transcript_formats(given: &[String], diarize: bool) -> Result<Vec<WrittenFormat>, Failure> {
    let transcripts = Format::ALL.map(|format| WrittenFormat {
        name: format.name(),
        stage: WRITE,
    });
    let known: Vec<WrittenFormat> = transcripts.into_iter().chain([RTTM]).collect();
    let formats = formats(given, &known)?;
    if formats.contains(&RTTM) && !diarize {
        return Err(Failure::usage(
            "`rttm` says who speaks, which is not asked for",
            "add --diarize",
        ));
    }
    Ok(formats)
}

/// The model that is bundled with a pipeline.
fn bundled_model(pipeline: &Path) -> PathBuf {
    let carried = pipeline.parent().and_then(Path::parent).unwrap_or(pipeline);
    carried.join("configs/models/small.nemo")
}

/// Prints a note about the quality of the bundled model.
fn tell_languages(model: &Path) {
    let opened = OpenModel::open(model).ok().and_then(|opened| opened.tokenizer);
    let Some(tokenizer) = opened.and_then(|bytes| Tokenizer::from_bytes(&bytes).ok()) else {
        // The run reports the error.
        return;
    };
    let _ = writeln!(
        io::stderr(),
        "no --model is given: the bundled small model, made for trying things out, knows {}",
        languages(&tokenizer).join(", ")
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_read_from_lists() {
        let of = |given: &[&str], diarize: bool| {
            let given: Vec<String> = given.iter().map(|text| (*text).to_owned()).collect();
            let formats = transcript_formats(&given, diarize)?;
            Ok::<_, Failure>(formats.into_iter().map(|format| format.name).collect::<Vec<_>>())
        };
        assert_eq!(of(&["srt,txt", " json", "txt"], false).unwrap(), ["srt", "txt", "json"]);
        assert!(
            of(&["docx"], false)
                .unwrap_err()
                .to_string()
                .contains("`docx` is not a format")
        );
        assert!(of(&[""], false).is_err());
        assert_eq!(of(&["rttm,txt"], true).unwrap(), ["rttm", "txt"]);
        assert!(of(&["rttm"], false).is_err());
    }

    /// No result file may overwrite a recording: names do not depend on formats.
    #[test]
    fn endings_of_all_formats_are_known_to_the_listing() {
        let formats = transcript_formats(&["txt".to_owned()], true).unwrap();
        assert_eq!(formats[0].stage, WRITE);
        for format in Format::ALL {
            assert!(flow_audio::listing::ENDINGS_OF_RESULTS.contains(&format.name()));
        }
        for format in flow_speakers::stages::Format::ALL {
            assert!(flow_audio::listing::ENDINGS_OF_RESULTS.contains(&format.name()));
        }
    }

    #[test]
    fn a_parameter_that_is_set_is_known_by_its_name() {
        assert!(given(&["model=x".to_owned()], "model") && !given(&["model_x=1".to_owned()], "model"));
    }
}
