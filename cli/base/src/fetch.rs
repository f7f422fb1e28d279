//! Models in command-line arguments: those of the hub or in object storage are fetched first, with progress on standard error.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use flow_base::escape::escape_line;
use flow_kind::{Storage, open_regular_file};
use flow_model::tokenizer::Tokenizer;
use flow_training::TrainingError;

use crate::failure::Failure;

/// A line of progress, with control characters escaped: it may contain text from the hub.
pub fn tell(line: &str) {
    tell_to(&mut io::stderr(), line);
}

fn tell_to(screen: &mut dyn Write, line: &str) {
    // A failure to write to the screen must not end the download.
    let _ = writeln!(screen, "{}", escape_line(line));
}

/// The path of a model, which is fetched first if it is one of the hub or in object storage. `speaks`: with progress of the download.
pub fn local_model(storage: &Storage, model: &str, speaks: bool) -> Result<PathBuf, Failure> {
    let mut progress = |line: &str| {
        if speaks {
            tell(line);
        }
    };
    flow_training::init::local_model(storage, model, &mut progress).map_err(|error| match error {
        TrainingError::Hub { message, help } => Failure::Unreadable {
            message,
            help: Some(help).filter(|help| !help.is_empty()),
        },
        error => Failure::unreadable(error),
    })
}

/// The tokenizer in a SentencePiece `.model` file.
pub fn tokenizer_of_file(path: &Path) -> Result<Tokenizer, Failure> {
    open_regular_file(path).map_err(|error| Failure::unreadable(format!("{}: {error}", path.display())))?;
    Tokenizer::load(path).map_err(Failure::unreadable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_that_is_no_reference_is_a_path() {
        assert_eq!(
            local_model(&Storage::default(), "models/a.nemo", false).unwrap(),
            Path::new("models/a.nemo")
        );
        assert!(local_model(&Storage::default(), "hf://only-one-part", false).is_err());
    }

    #[test]
    fn what_a_terminal_would_obey_is_shown() {
        let mut screen = Vec::new();
        tell_to(&mut screen, "fetching hf://a/b\u{1b}]0;x\u{7}\nsecond");
        let shown = String::from_utf8(screen).unwrap();
        assert_eq!(shown, "fetching hf://a/b\\u{1b}]0;x\\u{7}\\nsecond\n");
    }
}
