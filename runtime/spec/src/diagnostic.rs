//! Errors in a pipeline, with the place and a picture of it.

use std::borrow::Cow;
use std::fmt;

use super::source::Place;
use flow_base::escape::{escape_line, escape_lines, mask};

/// One thing that is wrong with a pipeline, an overlay or a parameter given on the command line.
#[derive(Clone, Debug, PartialEq)]
pub struct Diagnostic {
    pub message: String,
    /// None where the mistake is in no file, as with `--set`.
    pub place: Option<Place>,
    pub help: Option<String>,
}

impl Diagnostic {
    pub fn new(message: impl Into<String>) -> Self {
        Diagnostic {
            message: message.into(),
            place: None,
            help: None,
        }
    }

    pub fn at(mut self, place: Place) -> Self {
        self.place = Some(place);
        self
    }

    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// The message with a picture of the place.
    pub fn render(&self, style: Style) -> String {
        let theme = match style {
            Style::Plain => return escape_lines(&self.to_string()).into_owned(),
            Style::Unicode => miette::GraphicalTheme::unicode_nocolor(),
            Style::Colour => miette::GraphicalTheme::unicode(),
        };
        let mut text = String::new();
        match miette::GraphicalReportHandler::new_themed(theme)
            .with_links(false)
            .render_report(&mut text, &Picture::of(self))
        {
            Ok(()) => text,
            Err(fmt::Error) => escape_lines(&self.to_string()).into_owned(),
        }
    }
}

/// How diagnostics are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Text that begins with `file:line:column`, for files and programs.
    Plain,
    /// Box characters, for a terminal without colours.
    Unicode,
    /// Box characters and colours, for a terminal.
    Colour,
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            None => write!(f, "error: {}", self.message)?,
            Some(place) if !place.is_shown => write!(f, "{place}: error: {}", self.message)?,
            Some(place) => {
                let line = place.source.text.lines().nth(place.line - 1).unwrap_or_default();
                let number = place.line.to_string();
                let shown = place
                    .source
                    .text
                    .get(place.offset..place.offset + place.length)
                    .unwrap_or_default();
                write!(
                    f,
                    "{place}: error: {}\n {number} | {line}\n {:blank$} | {:indent$}{}",
                    self.message,
                    "",
                    "",
                    "^".repeat(shown.chars().count().max(1)),
                    blank = number.len(),
                    indent = place.column - 1
                )?;
            }
        }
        if let Some(help) = &self.help {
            write!(f, "\n  help: {help}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Diagnostic {}

/// The diagnostic for miette: without the place in the message, as the picture shows it, and with the user's text
/// escaped, as miette adds colours.
#[derive(Debug)]
struct Picture<'a> {
    message: Cow<'a, str>,
    help: Option<Cow<'a, str>>,
    place: Option<&'a Place>,
    source: Option<Source<'a>>,
}

/// The text of a file, and its name.
#[derive(Debug)]
struct Source<'a> {
    name: String,
    text: Cow<'a, str>,
}

impl<'a> Picture<'a> {
    fn of(diagnostic: &'a Diagnostic) -> Self {
        let place = diagnostic.place.as_ref().filter(|place| place.is_shown);
        // A place without a picture is named.
        let message = match (&diagnostic.place, place) {
            (Some(unshown), None) => Cow::Owned(format!("{unshown}: {}", diagnostic.message)),
            _ => Cow::Borrowed(diagnostic.message.as_str()),
        };
        Picture {
            message: Cow::Owned(escape_lines(&message).into_owned()),
            help: diagnostic.help.as_deref().map(escape_lines),
            place,
            source: place.map(|place| Source {
                name: escape_line(&place.source.path.to_string_lossy()).into_owned(),
                text: mask(&place.source.text),
            }),
        }
    }
}

impl fmt::Display for Picture<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Picture<'_> {}

impl miette::Diagnostic for Picture<'_> {
    fn severity(&self) -> Option<miette::Severity> {
        Some(miette::Severity::Error)
    }

    fn help<'a>(&'a self) -> Option<Box<dyn fmt::Display + 'a>> {
        self.help.as_ref().map(|help| Box::new(help) as Box<dyn fmt::Display>)
    }

    fn source_code(&self) -> Option<&dyn miette::SourceCode> {
        self.source.as_ref().map(|source| source as &dyn miette::SourceCode)
    }

    fn labels(&self) -> Option<Box<dyn Iterator<Item = miette::LabeledSpan> + '_>> {
        let place = self.place?;
        Some(Box::new(std::iter::once(miette::LabeledSpan::new(
            None,
            place.offset,
            place.length,
        ))))
    }
}

impl miette::SourceCode for Source<'_> {
    fn read_span<'a>(
        &'a self,
        span: &miette::SourceSpan,
        lines_before: usize,
        lines_after: usize,
    ) -> Result<Box<dyn miette::SpanContents<'a> + 'a>, miette::MietteError> {
        let found = self.text.as_ref().read_span(span, lines_before, lines_after)?;
        Ok(Box::new(miette::MietteSpanContents::new_named(
            self.name.clone(),
            found.data(),
            *found.span(),
            found.line(),
            found.column(),
            found.line_count(),
        )))
    }
}

/// All diagnostics, in the order of the files.
#[derive(Clone, Debug, PartialEq)]
pub struct Diagnostics(pub Vec<Diagnostic>);

impl Diagnostics {
    /// `value` if nothing is wrong.
    pub fn unless_empty<T>(found: Vec<Diagnostic>, value: T) -> Result<T, Diagnostics> {
        if found.is_empty() {
            Ok(value)
        } else {
            Err(Diagnostics::sorted(found))
        }
    }

    /// By file, in the order in which files first appear, then by line; diagnostics without a file come first.
    pub fn sorted(mut found: Vec<Diagnostic>) -> Diagnostics {
        let mut files: Vec<std::path::PathBuf> = Vec::new();
        for place in found.iter().filter_map(|diagnostic| diagnostic.place.as_ref()) {
            if !files.contains(&place.source.path) {
                files.push(place.source.path.clone());
            }
        }
        found.sort_by_key(|diagnostic| {
            diagnostic.place.as_ref().map(|place| {
                (
                    files.iter().position(|file| *file == place.source.path),
                    place.line,
                    place.column,
                )
            })
        });
        Diagnostics(found)
    }

    pub fn render(&self, style: Style) -> String {
        self.0
            .iter()
            .map(|diagnostic| diagnostic.render(style))
            .collect::<Vec<_>>()
            .join("\n")
    }
}

impl fmt::Display for Diagnostics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(Style::Plain))
    }
}

impl std::error::Error for Diagnostics {}
