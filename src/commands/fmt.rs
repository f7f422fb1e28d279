//! `flow fmt`: writes pipelines in one form. Values and comments stay.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use flow_store::write_atomically;
use pretty_yaml::config::{FormatOptions, LanguageOptions, LayoutOptions};
use serde_yaml::Value;

use crate::arguments::FmtArguments;
use flow_cli::failure::{Exit, Failure};

/// A map in braces that makes its line longer, in characters, is written as a block.
const WIDTH: usize = 120;
/// Most bytes of a file.
const MOST_BYTES: u64 = 16 << 20;
/// How often a text is formatted at most, until it stays as it is.
const PASSES: usize = 4;

pub fn fmt(arguments: &FmtArguments, input: &mut dyn Read, out: &mut dyn Write) -> Result<Exit, Failure> {
    let mut differ = 0;
    for path in &arguments.paths {
        if path == Path::new("-") {
            let text = read(&mut *input).map_err(|why| Failure::unreadable(format!("standard input: {why}")))?;
            let done = formatted(&text).map_err(|why| Failure::unreadable(format!("standard input: {why}")))?;
            match arguments.check {
                true => differ += usize::from(done != text),
                false => out.write_all(done.as_bytes())?,
            }
            continue;
        }
        for path in pipelines(path)? {
            let failed = |why: String| Failure::unreadable(format!("{}: {why}", path.display()));
            let text = File::open(&path).map_err(|error| error.to_string()).and_then(read);
            let text = text.map_err(failed)?;
            let done = formatted(&text).map_err(failed)?;
            if done == text {
                continue;
            }
            differ += 1;
            if arguments.check {
                writeln!(out, "{} is not formatted", path.display())?;
                continue;
            }
            // A link stays one.
            let target = path.canonicalize().map_err(|error| failed(error.to_string()))?;
            write_atomically(&target, done.as_bytes())?;
            writeln!(out, "formatted {}", path.display())?;
        }
    }
    match arguments.check && differ > 0 {
        true => Ok(Exit::Failed),
        false => Ok(Exit::Done),
    }
}

/// A file, or the pipelines in a folder and the folders in it, in order.
fn pipelines(path: &Path) -> Result<Vec<PathBuf>, Failure> {
    let failed = |path: &Path, error: io::Error| Failure::unreadable(format!("{}: {error}", path.display()));
    if !fs::metadata(path).map_err(|error| failed(path, error))?.is_dir() {
        return Ok(vec![path.to_path_buf()]);
    }
    let (mut found, mut folders) = (Vec::new(), vec![path.to_path_buf()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).map_err(|error| failed(&folder, error))? {
            let entry = entry.map_err(|error| failed(&folder, error))?;
            let path = entry.path();
            let kind = entry.file_type().map_err(|error| failed(&path, error))?;
            let is_hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
            let is_yaml = path
                .extension()
                .is_some_and(|ending| ending == "yaml" || ending == "yml");
            if kind.is_dir() && !is_hidden {
                folders.push(path);
            } else if is_yaml && path.is_file() && is_pipeline(&path) {
                found.push(path);
            }
        }
    }
    found.sort();
    match found.is_empty() {
        true => Err(Failure::usage(
            format!("{} has no pipelines", path.display()),
            "pipelines are files *.yaml with the key `flow`",
        )),
        false => Ok(found),
    }
}

/// Whether a file has the key that every pipeline has. One that cannot be read counts, so that the error is seen.
fn is_pipeline(path: &Path) -> bool {
    let text = File::open(path).map_err(|error| error.to_string()).and_then(read);
    text.map_or(true, |text| text.lines().any(|line| line.starts_with("flow:")))
}

fn read(from: impl Read) -> Result<String, String> {
    let mut bytes = Vec::new();
    let mut limited = from.take(MOST_BYTES + 1);
    limited.read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(format!("it is larger than {} MiB", MOST_BYTES >> 20));
    }
    String::from_utf8(bytes).map_err(|error| format!("it is not UTF-8: {error}"))
}

/// The text in the form of `flow fmt`. It has the same values.
///
/// # Errors
/// If the text is not YAML, or another text would have other values.
fn formatted(text: &str) -> Result<String, String> {
    let values = values(text)?;
    let mut done = text.to_owned();
    for _ in 0..PASSES {
        let next = once(&done, &values)?;
        if next == done {
            break;
        }
        done = next;
    }
    Ok(done)
}

fn once(text: &str, expected: &Value) -> Result<String, String> {
    let options = FormatOptions {
        // Texts are never broken, and lists and maps in brackets stay on their line.
        layout: LayoutOptions {
            print_width: usize::MAX >> 1,
            ..LayoutOptions::default()
        },
        language: LanguageOptions {
            brace_spacing: false,
            trailing_comma: false,
            ..LanguageOptions::default()
        },
    };
    // What looks like a long map may be part of a text in quotes.
    let blocks = Some(with_blocks(text)).filter(|blocks| values(blocks).is_ok_and(|values| values == *expected));
    let done = pretty_yaml::format_text(blocks.as_deref().unwrap_or(text), &options)
        .map_err(|error| format!("it cannot be formatted: {error}"))?;
    match values(&done) {
        Ok(values) if values == *expected => Ok(done),
        _ => Err("it cannot be formatted without changing its values; the file is as it was".to_owned()),
    }
}

/// The values of a document. The parser refuses what is nested too deep, for the formatter as well.
fn values(text: &str) -> Result<Value, String> {
    flow_yaml_guard::check(text).map_err(|error| error.to_string())?;
    serde_yaml::from_str(text).map_err(|error| error.to_string())
}

/// The text with long lines `key: {a: 1, b: 2}` as blocks.
fn with_blocks(text: &str) -> String {
    let mut done = String::with_capacity(text.len());
    // The indentation of the key whose value is the text that these lines belong to.
    let mut of_text = None;
    for line in text.split_inclusive('\n') {
        let body = line.trim_end();
        let indent = body.len() - body.trim_start().len();
        if !body.is_empty() && of_text.is_some_and(|key| indent <= key) {
            of_text = None;
        }
        let block = of_text.is_none().then(|| as_block(body)).flatten();
        done.push_str(block.as_deref().unwrap_or(line));
        let last = body.rsplit(' ').next().unwrap_or_default();
        if of_text.is_none() && last.starts_with(['|', '>']) {
            of_text = Some(indent);
        }
    }
    done
}

fn as_block(line: &str) -> Option<String> {
    if line.chars().count() <= WIDTH {
        return None;
    }
    let (key, inner) = line.strip_suffix('}')?.split_once(": {")?;
    let name = key.trim_start();
    if name.starts_with(['-', '#', '\'', '"', '{', '[']) {
        return None;
    }
    let indent = " ".repeat(key.len() - name.len() + 2);
    let entries = entries(inner)?;
    Some(
        entries
            .iter()
            .fold(format!("{key}:\n"), |block, entry| format!("{block}{indent}{entry}\n")),
    )
}

/// The entries of a map in braces.
fn entries(inner: &str) -> Option<Vec<&str>> {
    let (mut depth, mut quote, mut begin) = (0_i32, None, 0);
    let mut found = Vec::new();
    let mut characters = inner.char_indices();
    while let Some((at, character)) = characters.next() {
        match (quote, character) {
            (Some('"'), '\\') => drop(characters.next()),
            (Some(open), _) if character == open => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(character),
            (None, '{' | '[') => depth += 1,
            (None, '}' | ']') => depth -= 1,
            (None, ',') if depth == 0 => {
                found.push(inner[begin..at].trim());
                begin = at + 1;
            }
            (None, _) => {}
        }
    }
    found.push(inner[begin..].trim());
    let is_whole = depth == 0 && quote.is_none() && found.iter().all(|entry| entry.contains(": "));
    is_whole.then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESSY: &str = "# about\nflow:   1\n\n\n\nparams:\n    a:  {default: \"\",   help: \"one, {two}\"} # why\n    long: {default: [1,2], help: \"a text that is so long that the line with it is longer than the hundred and twenty characters of a line, it's so\"}\nstages:\n    # the first\n    - {\"x\": 1}\n    -   |\n      key: {default: 1, help: \"in a text, which stays as it is, however long the line, since it is a text and none of the values of a map\"}\n";

    #[test]
    fn values_and_comments_stay_and_the_form_is_one() {
        let done = formatted(MESSY).unwrap();
        insta::assert_snapshot!(done);
        assert_eq!(formatted(&done).unwrap(), done);
    }

    #[test]
    fn files_are_written_only_where_they_differ_and_never_when_checked() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("b/x.yaml"), folder.path().join("other.yml"));
        fs::create_dir(folder.path().join("b")).unwrap();
        fs::write(&path, MESSY).unwrap();
        fs::write(&other, "name:   of another program\n").unwrap();
        let run = |check: bool| {
            let arguments = FmtArguments {
                paths: vec![folder.path().to_path_buf()],
                check,
            };
            let mut out = Vec::new();
            let exit = fmt(&arguments, &mut io::empty(), &mut out).unwrap();
            (exit, String::from_utf8(out).unwrap().lines().count())
        };
        assert_eq!(run(true), (Exit::Failed, 1));
        assert_eq!(fs::read_to_string(&path).unwrap(), MESSY);
        assert_eq!(run(false), (Exit::Done, 1));
        assert_eq!(run(true), (Exit::Done, 0));
        assert_eq!(fs::read_to_string(&other).unwrap(), "name:   of another program\n");
    }

    #[test]
    fn what_is_not_yaml_is_an_error() {
        for text in [
            "a: [1\n",
            "a: 1\na: 2\n",
            "a: \"\\x\"\n",
            &"[".repeat(1_000),
            &"- ".repeat(100_000),
        ] {
            formatted(text).unwrap_err();
        }
        for text in [&b"\xff"[..], &[b' '; (16 << 20) + 1]] {
            read(text).unwrap_err();
        }
        assert_eq!(formatted("# nothing else\n").unwrap(), "# nothing else\n");
    }

    /// The pipelines that the program carries are in its form.
    #[test]
    fn bundled_pipelines_are_formatted() {
        for path in pipelines(&Path::new(env!("CARGO_MANIFEST_DIR")).join("pipelines")).unwrap() {
            let text = fs::read_to_string(&path).unwrap();
            assert_eq!(
                formatted(&text).unwrap(),
                text,
                "{}: run `flow fmt pipelines`",
                path.display()
            );
        }
    }
}
