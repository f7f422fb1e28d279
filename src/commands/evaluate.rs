//! `flow evaluate`: the transcriptions that it needs are those of `flow transcribe`.

use std::ffi::OsString;
use std::io::{self, Write};

use clap::Parser;
use flow_cli::failure::{Exit, Failure};
use flow_cli_evaluate::{BoostedTranscription, EvaluateCommand};
use flow_kind::registry::Registry;

use super::transcribe::transcribe;
use crate::arguments::{Arguments, Command, TranscribeArguments};

pub fn evaluate(command: &EvaluateCommand, registry: &Registry, out: &mut dyn Write) -> Result<Exit, Failure> {
    let transcribe = |wanted: &BoostedTranscription<'_>| transcribe(&transcription(wanted)?, registry, &mut io::sink());
    flow_cli_evaluate::evaluate(registry.storage(), command, &transcribe, out)
}

/// The arguments of `flow transcribe`.
fn transcription(wanted: &BoostedTranscription<'_>) -> Result<TranscribeArguments, Failure> {
    let mut line: Vec<OsString> = ["flow", "transcribe", "--format", "json", "--progress", "none"]
        .map(Into::into)
        .to_vec();
    line.extend(["--boost".into(), wanted.boost.into()]);
    line.extend(["--out".into(), (&wanted.out).into()]);
    line.extend(["--state".into(), (&wanted.state).into()]);
    for set in &wanted.set {
        line.extend(["--set".into(), set.into()]);
    }
    line.extend(["--".into(), wanted.manifest.into()]);
    let parsed = Arguments::try_parse_from(line).map_err(|error| Failure::Bug(error.to_string()))?;
    match parsed.command {
        Command::Transcribe(parsed) => Ok(TranscribeArguments {
            decoding: wanted.decoding.clone(),
            ..parsed
        }),
        _ => Err(Failure::Bug(
            "the arguments of `flow transcribe` are those of another command".to_owned(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn recordings_are_decoded_as_by_transcribe() {
        let decoding = "--model m.nemo --window chunked --decoder ctc --beam 4 --lm l.arpa --language hi,en --language-prior p --device cuda:1 --precision bf16";
        let line = format!("flow evaluate boosting rows.jsonl --boost names.txt --set coverage=off {decoding}");
        let Command::Evaluate(EvaluateCommand::Boosting(given)) =
            Arguments::try_parse_from(line.split(' ')).unwrap().command
        else {
            panic!("another command");
        };
        let wanted = BoostedTranscription {
            manifest: &given.manifest,
            boost: &given.boost,
            set: [vec!["boost_weight=0.5".to_owned()], given.set.clone()].concat(),
            decoding: &given.decoding,
            out: Path::new("f/0").to_owned(),
            state: Path::new("f/state").to_owned(),
        };
        let found = transcription(&wanted).unwrap();
        let line = format!(
            "flow transcribe --format json --progress none --boost names.txt --out f/0 --state f/state --set boost_weight=0.5 \
             --set coverage=off {decoding} rows.jsonl"
        );
        let Command::Transcribe(expected) = Arguments::try_parse_from(line.split_whitespace()).unwrap().command else {
            panic!("another command");
        };
        assert_eq!(format!("{found:?}"), format!("{expected:?}"));
    }
}
