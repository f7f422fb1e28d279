//! `flow lm`: n-gram language models for transcription.

use std::fs;
use std::io::Write;

use flow_manifest::read::texts::read_texts;
use flow_model::checkpoint::OpenModel;
use flow_model::fusion::{Corpus, write_witten_bell};
use flow_model::tokenizer::Tokenizer;
use flow_runtime::escape::escape_line;
use flow_runtime::store::write_atomically;

use super::fetch::{local_model, tokenizer_of_file};
use crate::arguments::{LmBuildArguments, LmCommand};
use crate::failure::{Exit, Failure};
use crate::table::plural;

pub fn lm(command: &LmCommand, out: &mut dyn Write) -> Result<Exit, Failure> {
    match command {
        LmCommand::Build(arguments) => build(arguments, out),
    }
}

fn build(arguments: &LmBuildArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let tokenizer = tokenizer(arguments)?;
    let unknown = tokenizer.unknown_id();
    let mut corpus = Corpus::default();
    let (mut without, mut with_unknown) = (0, 0u64);
    let mut failure = None;
    for manifest in &arguments.manifests {
        let mut add = |text: &str, _: &str| {
            let tokens = tokenizer.encode(text);
            if tokens.contains(&unknown) {
                // Skipped: the model never emits the unknown token, and without it the tokens around it would count as
                // neighbours.
                with_unknown += 1;
            } else if let Err(error) = corpus.add(&tokens) {
                failure.get_or_insert(error);
            }
        };
        without += read_texts(manifest, &mut add).map_err(Failure::unreadable)?;
    }
    if let Some(failure) = failure {
        return Err(Failure::unreadable(failure));
    }
    if corpus.sequences() == 0 {
        let help = "name manifests whose texts the tokenizer knows";
        return Err(Failure::usage("there is no text to count", help));
    }
    let mut bytes = Vec::new();
    let ngrams = write_witten_bell(&corpus, usize::from(arguments.order), &mut bytes).map_err(Failure::unreadable)?;
    if let Some(folder) = arguments.out.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        fs::create_dir_all(folder)?;
    }
    write_atomically(&arguments.out, &bytes)?;
    let orders = ngrams
        .iter()
        .enumerate()
        .map(|(order, count)| format!("{}-grams: {count}", order + 1));
    writeln!(
        out,
        "{}: {}, {}; {}",
        escape_line(&arguments.out.to_string_lossy()),
        plural(corpus.sequences() as u64, "text"),
        plural(corpus.tokens() as u64, "token"),
        orders.collect::<Vec<_>>().join(", ")
    )?;
    if without > 0 {
        writeln!(out, "left out: {} without a text", plural(without, "row"))?;
    }
    if with_unknown > 0 {
        let rows = plural(with_unknown, "row");
        writeln!(out, "left out: {rows} with characters that the tokenizer does not know")?;
    }
    Ok(Exit::Done)
}

fn tokenizer(arguments: &LmBuildArguments) -> Result<Tokenizer, Failure> {
    if let Some(path) = &arguments.tokenizer {
        return tokenizer_of_file(path);
    }
    let Some(model) = &arguments.model else {
        return Err(Failure::usage("no tokenizer is named", "give --model or --tokenizer"));
    };
    let path = local_model(model, true)?;
    let opened = OpenModel::open(&path).map_err(Failure::unreadable)?;
    let Some(bytes) = &opened.tokenizer else {
        let message = format!("{} holds no tokenizer", path.display());
        return Err(Failure::usage(
            message,
            "name its SentencePiece .model file with --tokenizer",
        ));
    };
    Tokenizer::from_bytes(bytes).map_err(Failure::unreadable)
}
