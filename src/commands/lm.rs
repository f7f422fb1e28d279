//! `flow lm`: n-gram language models for transcription.

use std::fs;
use std::io::Write;
use std::path::Path;

use flow_base::escape::escape_line;
use flow_corpus::texts::read_texts;
use flow_inspect::table::plural;
use flow_model::checkpoint::OpenModel;
use flow_model::fusion::{Corpus, write_witten_bell};
use flow_model::tokenizer::Tokenizer;
use flow_storage::Storage;
use flow_store::write_atomically;
use flow_text::language_tag::{is_language, tag_of, untagged, usual_language};
use flow_transcription::language_prior::LanguageCounts;

use crate::arguments::{LmBuildArguments, LmCommand};
use flow_cli::failure::{Exit, Failure};
use flow_cli::fetch::{local_model, tokenizer_of_file};

pub fn lm(storage: &Storage, command: &LmCommand, out: &mut dyn Write) -> Result<Exit, Failure> {
    match command {
        LmCommand::Build(arguments) => build(storage, arguments, out),
    }
}

fn build(storage: &Storage, arguments: &LmBuildArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let tokenizer = tokenizer(storage, arguments)?;
    if arguments.languages {
        return build_counts(storage, arguments, &tokenizer, out);
    }
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
        without += read_texts(storage, manifest, &mut add).map_err(Failure::unreadable)?;
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
    write(&arguments.out, &bytes)?;
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

/// Counts the tokens of texts by the language that their rows or tags name.
fn build_counts(
    storage: &Storage,
    arguments: &LmBuildArguments,
    tokenizer: &Tokenizer,
    out: &mut dyn Write,
) -> Result<Exit, Failure> {
    let mut counts = LanguageCounts::new(tokenizer);
    let (mut without, mut without_language) = (0, 0u64);
    for manifest in &arguments.manifests {
        let mut add = |text: &str, language: &str| {
            let language = Some(language).filter(|language| is_language(language));
            let language = language.or(tag_of(text).filter(|tag| is_language(tag)));
            match language {
                Some(language) => counts.add(&usual_language(language), &tokenizer.encode(untagged(text))),
                None => without_language += 1,
            }
        };
        without += read_texts(storage, manifest, &mut add).map_err(Failure::unreadable)?;
    }
    let languages: Vec<String> = counts
        .languages()
        .map(|(language, tokens)| format!("{language}: {}", plural(tokens, "token")))
        .collect();
    if languages.is_empty() {
        let help =
            "name manifests whose rows have a column or key `lang`, or whose texts begin with a tag such as <|fr|>";
        return Err(Failure::usage("there is no text of a language to count", help));
    }
    write(&arguments.out, &counts.to_json().map_err(Failure::unreadable)?)?;
    let shown = arguments.out.to_string_lossy();
    writeln!(out, "{}: {}", escape_line(&shown), languages.join(", "))?;
    if without > 0 {
        writeln!(out, "left out: {} without a text", plural(without, "row"))?;
    }
    if without_language > 0 {
        writeln!(out, "left out: {} without a language", plural(without_language, "row"))?;
    }
    Ok(Exit::Done)
}

/// Writes a file, with its folder.
fn write(path: &Path, bytes: &[u8]) -> Result<(), Failure> {
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        fs::create_dir_all(folder)?;
    }
    Ok(write_atomically(path, bytes)?)
}

fn tokenizer(storage: &Storage, arguments: &LmBuildArguments) -> Result<Tokenizer, Failure> {
    if let Some(path) = &arguments.tokenizer {
        return tokenizer_of_file(path);
    }
    let Some(model) = &arguments.model else {
        return Err(Failure::usage("no tokenizer is named", "give --model or --tokenizer"));
    };
    let path = local_model(storage, model, true)?;
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
