//! The text of a pipeline file, and places in it.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use super::yaml::{Indexed, Part, PlaceIndex, Step, Steps, locate};

/// A file that was read, kept so that any later error can point into it.
#[derive(Debug)]
pub struct SourceFile {
    /// As it was given, for the reader.
    pub path: PathBuf,
    pub text: String,
    /// Where each line begins, in bytes. Like `places` computed on first use, since most files have no mistake, and
    /// cached, so that many mistakes do not scan the text many times.
    lines: OnceLock<Vec<usize>>,
    /// Only for texts that were parsed as YAML: on others, such as extremely nested ones, the parser may not end.
    places: OnceLock<Option<PlaceIndex>>,
}

impl PartialEq for SourceFile {
    fn eq(&self, other: &Self) -> bool {
        (&self.path, &self.text) == (&other.path, &other.text)
    }
}

impl Eq for SourceFile {}

impl SourceFile {
    pub fn new(path: PathBuf, text: String) -> SourceFile {
        SourceFile {
            path,
            text,
            lines: OnceLock::new(),
            places: OnceLock::new(),
        }
    }

    /// Line and column (from 1, in characters) of what `steps` leads to, if the text, which is YAML, holds it.
    fn locate(&self, steps: &Steps, part: Part) -> Option<(usize, usize)> {
        let places = self.places.get_or_init(|| PlaceIndex::of(&self.text));
        match places.as_ref().map(|places| places.get(steps, part)) {
            Some(Indexed::At(place)) => Some(place),
            Some(Indexed::Absent) => None,
            Some(Indexed::Container) | None => locate(&self.text, steps, part),
        }
    }

    /// Byte offset and text of a line (from 1), without its end.
    fn line(&self, line: usize) -> (usize, &str) {
        let lines = self.lines.get_or_init(|| {
            let ends = self.text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n');
            std::iter::once(0).chain(ends.map(|(at, _)| at + 1)).collect()
        });
        match lines.get(line.saturating_sub(1)) {
            Some(&start) if line > 0 && start < self.text.len() => {
                let end = lines.get(line).copied().unwrap_or(self.text.len());
                (start, self.text[start..end].trim_end_matches(['\n', '\r']))
            }
            _ => (self.text.len(), ""),
        }
    }
}

/// A span of text in a file.
#[derive(Clone, PartialEq, Eq)]
pub struct Place {
    pub source: Arc<SourceFile>,
    /// From 1.
    pub line: usize,
    /// From 1, in characters.
    pub column: usize,
    /// In bytes.
    pub offset: usize,
    /// In bytes; within one line.
    pub length: usize,
    /// False where the file contains the value of a secret: then no message shows lines of it.
    pub is_shown: bool,
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.source.path.display(), self.line, self.column)
    }
}

impl Place {
    /// The place at `line` and `column`, as long as the word or scalar there.
    pub fn at(source: &Arc<SourceFile>, line: usize, column: usize) -> Place {
        let line = line.max(1);
        let (start, text) = source.line(line);
        let skipped: usize = text.chars().take(column.saturating_sub(1)).map(char::len_utf8).sum();
        let length = token_length(&text[skipped..]);
        Place {
            source: Arc::clone(source),
            line,
            column: column.max(1),
            offset: start + skipped,
            length,
            is_shown: true,
        }
    }

    /// The place of `steps`, or of its nearest ancestor that the text holds (values of parameters are not part of the
    /// text).
    pub fn of(source: &Arc<SourceFile>, steps: &Steps, part: Part) -> Place {
        let mut steps = steps.clone();
        let mut part = part;
        loop {
            if let Some((line, column)) = source.locate(&steps, part) {
                return Place::at(source, line, column);
            }
            if steps.0.pop().is_none() {
                return Place::at(source, 1, 1);
            }
            part = if matches!(steps.0.last(), Some(Step::Key(_))) {
                Part::Key
            } else {
                Part::Value
            };
        }
    }

    /// The place of line and column (from 1) within the text setting at `steps`.
    ///
    /// Exact for block text (`|`) and for text on one line without escapes; otherwise the place where the
    /// setting begins.
    pub fn within(source: &Arc<SourceFile>, steps: &Steps, offset: (usize, usize)) -> Place {
        let Some((line, column)) = source.locate(steps, Part::Value) else {
            return Place::of(source, steps, Part::Value);
        };
        let start = Place::at(source, line, column);
        let (begin, text) = source.line(line);
        let rest = &text[start.offset - begin..];
        if rest.starts_with('|') {
            return within_block(source, line, rest, offset).unwrap_or(start);
        }
        let quoted = rest.starts_with('\'') || rest.starts_with('"');
        let escaped = (rest.starts_with('"') && rest.contains('\\'))
            || (rest.starts_with('\'') && rest[1..].trim_end().trim_end_matches('\'').contains("''"));
        if offset.0 == 1 && !escaped && !rest.starts_with('>') {
            let column = column + usize::from(quoted) + offset.1.saturating_sub(1);
            if column <= text.chars().count() {
                return Place::at(source, line, column);
            }
        }
        start
    }
}

/// `header` is the rest of the line on which the block begins: `|`, `|-`, `|2`, with a comment perhaps.
fn within_block(source: &Arc<SourceFile>, line: usize, header: &str, offset: (usize, usize)) -> Option<Place> {
    let lines = || source.text.lines().skip(line);
    let first = lines().find(|text| !text.trim().is_empty())?;
    let first_indent = first.len() - first.trim_start_matches(' ').len();
    let indicator = header
        .chars()
        .skip(1)
        .take_while(|c| !c.is_whitespace())
        .find_map(|c| c.to_digit(10));
    let indent = match indicator {
        None => first_indent,
        // The digit counts from the indentation of the parent, which is that of the key on this line (or of
        // the item's first key after its dashes).
        Some(digit) => {
            let (_, key_line) = source.line(line);
            let parent = key_line.len() - key_line.trim_start_matches([' ', '-']).len();
            parent + digit as usize
        }
    };
    let wanted = lines().nth(offset.0.saturating_sub(1))?;
    let column = indent + offset.1.max(1);
    // One past the end is where "something is missing" points to.
    (column <= wanted.chars().count() + 1).then(|| Place::at(source, line + offset.0.max(1), column))
}

/// How many bytes of the rest of a line belong to the scalar that begins it.
fn token_length(rest: &str) -> usize {
    let quote = rest.chars().next().filter(|c| matches!(c, '"' | '\''));
    if rest.starts_with("${") {
        return rest.find('}').map_or(rest.len(), |at| at + 1);
    }
    if rest.starts_with(['[', '{']) {
        return bracket_length(rest);
    }
    let end = match quote {
        Some(quote) => rest[1..].find(quote).map_or(rest.len(), |at| at + 2),
        None => {
            let mut end = rest.len();
            for stop in [": ", " #", ", ", "}", "]", ","] {
                if let Some(at) = rest.find(stop).filter(|at| *at > 0) {
                    end = end.min(at);
                }
            }
            rest[..end].trim_end().trim_end_matches(':').len()
        }
    };
    end.max(rest.chars().next().map_or(0, char::len_utf8))
}

/// Up to the bracket that closes the first one, or that one alone if it closes on a later line.
fn bracket_length(rest: &str) -> usize {
    let mut depth = 0usize;
    for (at, c) in rest.char_indices() {
        match c {
            '[' | '{' => depth += 1,
            ']' | '}' if depth == 1 => return at + 1,
            ']' | '}' => depth -= 1,
            _ => {}
        }
    }
    1
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn source(text: &str) -> Arc<SourceFile> {
        Arc::new(SourceFile::new("p.yaml".into(), text.into()))
    }

    fn marked(place: &Place) -> &str {
        &place.source.text[place.offset..place.offset + place.length]
    }

    #[test]
    fn places_cover_the_word() {
        let source = source(
            "stages:\n  scan: {uses: manifest.scan, with: {shards: 'a b'}} # x\n  últ:\n    from: [scan, other]\n",
        );
        let of = |path: &str, part| Place::of(&source, &Steps::parse(path), part);
        assert_eq!(marked(&of("stages.scan.uses", Part::Value)), "manifest.scan");
        assert_eq!(marked(&of("stages.scan.with.shards", Part::Value)), "'a b'");
        assert_eq!(marked(&of("stages.scan", Part::Key)), "scan");
        assert_eq!(marked(&of("stages.últ", Part::Key)), "últ");
        assert_eq!(marked(&of("stages.últ.from[1]", Part::Value)), "other");
        let above = of("stages.scan.with.shards.deep.er", Part::Value);
        assert_eq!((marked(&above), above.to_string().as_str()), ("shards", "p.yaml:2:38"));
    }

    #[test]
    fn places_within_text_settings() {
        let text = "a: SELECT x\nb: 'SELECT y'\nc: |\n  SELECT\n    z,\n\n  w\nd:\n  - e: |2\n        SELECT v\n    f: >\n      SELECT\n      u\n";
        let source = source(text);
        let within = |path: &str, line, column| Place::within(&source, &Steps::parse(path), (line, column));
        assert_eq!(marked(&within("a", 1, 8)), "x");
        assert_eq!(&text[within("b", 1, 8).offset..][..1], "y");
        assert_eq!(&text[within("c", 2, 3).offset..][..1], "z");
        assert_eq!(&text[within("c", 4, 1).offset..][..1], "w");
        assert_eq!(&text[within("d[0].e", 1, 10).offset..][..1], "v");
        assert_eq!(within("d[0].f", 2, 1).line, 11);
    }

    proptest! {
        #[test]
        fn any_place_lies_in_the_text(text in "[ -~\né\r]{0,40}", line in 0usize..8, column in 0usize..50, inner in (0usize..5, 0usize..50)) {
            let source = source(&text);
            let place = Place::at(&source, line, column);
            prop_assert!(source.text.get(place.offset..place.offset + place.length).is_some());
            let place = Place::within(&source, &Steps::parse("a"), inner);
            prop_assert!(source.text.get(place.offset..place.offset + place.length).is_some());
        }
    }
}
