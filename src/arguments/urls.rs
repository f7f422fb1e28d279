//! Arguments that are paths of this machine take no URLs.

use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{ArgMatches, Command};
use flow_kind::{NO_URL_HELP, no_url, url_scheme};
use flow_storage::{Location, Scheme, is_url};

/// Commands whose state directory is a folder of this machine. That of the others may be a bucket.
const NO_BUCKET: [&str; 2] = ["transcribe", "diarize"];

/// Refuses the first path that is a URL.
///
/// # Errors
/// When there is one; it names the argument.
pub fn refuse(command: &Command, matches: &ArgMatches) -> Result<(), clap::Error> {
    for id in matches.ids() {
        // What is not a path has another type, and groups have one of their own.
        let Ok(Some(mut paths)) = matches.try_get_many::<PathBuf>(id.as_str()) else {
            continue;
        };
        // It may be a model.
        if id == "pipeline" && command.get_name() == "memory" {
            continue;
        }
        let may_be_bucket = id == "state" && !NO_BUCKET.contains(&command.get_name());
        let mut refused = None;
        for path in paths.by_ref() {
            if may_be_bucket && is_url(path) {
                match Location::of_path(path) {
                    Ok(Location::Object(url)) if !matches!(url.scheme(), Scheme::Https | Scheme::Http) => continue,
                    Ok(_) => {}
                    Err(error) => return Err(clap::Error::raw(ErrorKind::ValueValidation, format!("{error}\n"))),
                }
            }
            refused = path.to_str().and_then(url_scheme);
            if refused.is_some() {
                break;
            }
        }
        let Some(scheme) = refused else {
            continue;
        };
        let argument = command.get_arguments().find(|argument| argument.get_id() == id);
        let name = argument.map_or_else(|| id.to_string(), ToString::to_string);
        let message = format!("{}; {NO_URL_HELP}\n", no_url(&name, scheme));
        return Err(clap::Error::raw(ErrorKind::ValueValidation, message));
    }
    let Some((name, below)) = matches.subcommand() else {
        return Ok(());
    };
    match command.find_subcommand(name) {
        Some(command) => refuse(command, below),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::parse;

    #[test]
    fn urls_where_paths_are_meant_are_refused_by_name() {
        for (words, name) in [
            ("flow run p.yaml --state https://hush/state", "--state <DIR>"),
            ("flow run s3://hush/p.yaml", "<PIPELINE>"),
            (
                "flow run p.yaml --config a.yaml --config gs://hush/b.yaml",
                "--config <FILE>",
            ),
            ("flow rejects p.yaml --state file:///hush", "--state <DIR>"),
            ("flow transcribe a.wav --state file:///tmp/state", "--state <DIR>"),
            (
                "flow lm build a.jsonl --model a.nemo --out s3://hush/out",
                "--out <FILE.arpa>",
            ),
            ("flow model convert a.nemo s3://hush/b.nemo", "<TO>"),
        ] {
            let error = parse(words.split(' ')).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(&format!("{name} takes no URL")), "{words}: {text}");
            assert!(!text.contains("hush"), "{text}");
            assert_eq!(error.exit_code(), 2);
        }
        // Values of parameters are looked at where settings are read.
        parse("flow run p.yaml --set out=s3://hush/out".split(' ')).unwrap();
        for words in [
            "flow run p.yaml --state s3://a/b",
            "flow memory hf://owner/model",
            "flow gc --state az://a",
            "flow ui --state gs://a/b/c",
        ] {
            parse(words.split(' ')).unwrap();
        }
        let error = parse("flow run p.yaml --state s3://key:hush@a/b".split(' ')).unwrap_err();
        assert!(!error.to_string().contains("hush"), "{error}");
        assert_eq!(error.exit_code(), 2);
    }
}
