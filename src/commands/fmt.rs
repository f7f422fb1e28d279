//! `flow fmt`: writes pipelines in one form. Values and comments stay.

use std::fs::{self, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};

use flow_base::regular_file::open_regular_file;
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
    let (mut differ, mut failed) = (0, Vec::new());
    for given in &arguments.paths {
        if given == Path::new("-") {
            let done = read(&mut *input).and_then(|text| Ok((formatted(&text)?, text)));
            match done {
                Ok((done, _)) if !arguments.check => out.write_all(done.as_bytes())?,
                Ok((done, text)) if done != text => {
                    differ += 1;
                    writeln!(out, "standard input is not formatted")?;
                }
                Ok(_) => {}
                Err(why) => failed.push(format!("standard input: {why}")),
            }
            continue;
        }
        for path in pipelines(given)? {
            let shown = path.display();
            match fmt_file(&path, arguments.check) {
                Ok(false) => {}
                Ok(true) if arguments.check => {
                    differ += 1;
                    writeln!(out, "{shown} is not formatted")?;
                }
                Ok(true) => writeln!(out, "formatted {shown}")?,
                Err(why) => failed.push(format!("{shown}: {why}")),
            }
        }
    }
    match (failed.is_empty(), differ) {
        (false, _) => Err(Failure::unreadable(failed.join("\n"))),
        (true, 0) => Ok(Exit::Done),
        (true, _) => Ok(Exit::Failed),
    }
}

/// Whether a file was, or is to be, formatted.
fn fmt_file(path: &Path, check: bool) -> Result<bool, String> {
    let text = read_file(path)?;
    let done = formatted(&text)?;
    if done == text || check {
        return Ok(done != text);
    }
    replace(path, done.as_bytes()).map_err(|error| format!("it cannot be written: {error}"))?;
    Ok(true)
}

/// Replaces a file as a whole. A link stays one, and owner and permissions stay.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let path = path.canonicalize()?;
    let of_file = fs::metadata(&path)?;
    if of_file.permissions().readonly() {
        return Err(io::Error::other("it is read-only"));
    }
    let folder = path.parent().unwrap_or(Path::new("/"));
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(bytes)?;
    // Only root may give a file to somebody else.
    let _ = chown(file.path(), Some(of_file.uid()), Some(of_file.gid()));
    let permissions: Permissions = of_file.permissions();
    file.as_file().set_permissions(permissions)?;
    file.as_file().sync_all()?;
    file.persist(&path)?;
    Ok(())
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

/// Whether a file has the key that every pipeline has. One that cannot be read counts if it may have it, so that the error is seen.
fn is_pipeline(path: &Path) -> bool {
    let Ok(text) = read_file(path) else { return true };
    match values(&text) {
        Ok(values) => values.get("flow").is_some(),
        Err(_) => text.lines().any(|line| line.starts_with("flow:")),
    }
}

fn read_file(path: &Path) -> Result<String, String> {
    read(open_regular_file(path).map_err(|error| error.to_string())?)
}

/// A text, without a byte order mark.
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
    let text = text.trim_start_matches('\u{feff}');
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
            // Those in texts belong to the text.
            trim_trailing_whitespaces: false,
            ..LanguageOptions::default()
        },
    };
    // What looks like a long map may be part of a text in quotes.
    let blocks = Some(with_blocks(text)).filter(|blocks| values(blocks).is_ok_and(|values| values == *expected));
    let text = blocks.as_deref().unwrap_or(text);
    let done = pretty_yaml::format_text(text, &options).map_err(|error| format!("it cannot be formatted: {error}"))?;
    let is_same = |text: &String| values(text).is_ok_and(|values| values == *expected);
    match [with_comments(text, &done), Some(done)]
        .into_iter()
        .flatten()
        .find(is_same)
    {
        Some(done) => Ok(done),
        None => Err("it cannot be formatted without changing its values; the file is as it was".to_owned()),
    }
}

/// The values of a document. The parser refuses what is nested too deep, for the formatter as well.
fn values(text: &str) -> Result<Value, String> {
    let text = text.trim_start_matches('\u{feff}');
    flow_yaml_guard::check(text).map_err(|error| error.to_string())?;
    serde_yaml::from_str(text).map_err(|error| error.to_string())
}

/// The formatted text with its comments where they were: on lines of their own, they are indented as the line after or before them
/// is. The formatter moves some of them out of their block. None where the lines of the two texts do not fit each other.
fn with_comments(text: &str, done: &str) -> Option<String> {
    let is_comment = |line: &str| line.trim_start().starts_with('#');
    let indent = |line: &str| line.len() - line.trim_start().len();
    let lines = |text: &str| -> Vec<String> {
        text.lines()
            .filter(|line| !line.trim().is_empty())
            .map(str::to_owned)
            .collect()
    };
    let (before, after) = (lines(text), lines(done));
    let fits = |(before, after): (&String, &String)| is_comment(before) == is_comment(after);
    if before.len() != after.len() || !before.iter().zip(&after).all(fits) {
        return None;
    }
    // For each line, the next one and the last one that are no comments.
    let mut content = None;
    let mut next = vec![None; before.len()];
    for (at, line) in before.iter().enumerate().rev() {
        next[at] = content;
        content = if is_comment(line) { content } else { Some(at) };
    }
    let mut last = None;
    let mut beside = Vec::with_capacity(before.len());
    for (at, line) in before.iter().enumerate() {
        if !is_comment(line) {
            last = Some(at);
        }
        let near = [next[at], last].into_iter().flatten();
        beside.push(
            near.filter(|_| is_comment(line))
                .find(|&other| indent(&before[other]) == indent(line)),
        );
    }
    let mut number = 0;
    let mut moved = String::with_capacity(done.len());
    for line in done.split_inclusive('\n') {
        if line.trim().is_empty() {
            moved.push_str(line);
            continue;
        }
        match beside[number] {
            Some(other) => {
                moved.push_str(&" ".repeat(indent(&after[other])));
                moved.push_str(line.trim_start());
            }
            None => moved.push_str(line),
        }
        number += 1;
    }
    Some(moved)
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
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const MESSY: &str = r#"# about
flow:   1



params:
    a:  {default: "",   help: "one, {two}"} # why
    # b: {default: 1}
    long: {default: [1,2], help: "a text that is so long that the line with it is longer than the hundred and twenty characters of a line, it's so"}
    last: 1 # of them
    # but this one
stages:
    # the first
    - {"x": 1}
    -   |
      key: {default: 1, help: "in a text, which stays as it is, however long the line, since it is a text and none of the values of a map"}
      # white space in a text stays: 
"#;

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
        fs::write(&path, format!("\u{feff}{MESSY}")).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink(&path, folder.path().join("link.yaml")).unwrap();
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
        assert_eq!(run(true), (Exit::Failed, 2));
        assert!(fs::read_to_string(&path).unwrap().ends_with(MESSY));
        assert_eq!(run(false), (Exit::Done, 1));
        assert_eq!(run(true), (Exit::Done, 0));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(
            fs::symlink_metadata(folder.path().join("link.yaml"))
                .unwrap()
                .is_symlink()
        );
        assert_eq!(fs::read_to_string(&other).unwrap(), "name:   of another program\n");
    }

    #[test]
    fn files_that_cannot_be_formatted_are_named_and_the_others_are_formatted() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("a.yaml"), "flow: [1\n").unwrap();
        fs::write(path("b.yaml"), "flow:   1\n").unwrap();
        fs::write(path("c.yaml"), "flow:   1\n").unwrap();
        fs::set_permissions(path("c.yaml"), Permissions::from_mode(0o444)).unwrap();
        let run = |paths: Vec<PathBuf>| fmt(&FmtArguments { paths, check: false }, &mut io::empty(), &mut Vec::new());
        let failed = run(vec![folder.path().to_path_buf(), "/dev/null".into()])
            .unwrap_err()
            .to_string();
        for (name, why) in [("a.yaml", "line 2"), ("c.yaml", "read-only"), ("/dev/null", "a device")] {
            let told = failed.lines().find(|line| line.contains(name));
            assert!(told.is_some_and(|line| line.contains(why)), "{failed}");
        }
        assert_eq!(fs::read_to_string(path("b.yaml")).unwrap(), "flow: 1\n");
        assert_eq!(fs::read_to_string(path("c.yaml")).unwrap(), "flow:   1\n");
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
            assert!(
                formatted(&text).unwrap() == text,
                "{}: run `flow fmt pipelines`",
                path.display()
            );
        }
    }
}
