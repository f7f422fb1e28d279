//! Manual corrections: texts of segments, bad segments, and names of speakers. They are kept in a Parquet file to which
//! rows are only added, and which a pipeline takes (`corrections` of `pipelines/build_manifest_v2.yaml`). Of several
//! rows of a segment the last counts.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow::array::{Array, AsArray, BooleanArray, RecordBatch, StringArray, new_null_array};
use arrow::compute::concat_batches;
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use axum::body::Bytes;
use axum::extract::{Query, State};
use axum::http::header::LOCATION;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use flow_parquet::ForeignParquet;
use flow_store::write_atomically;
use flow_text::language_tag::split_tag;
use maud::{Markup, html};
use parquet::arrow::{ArrowWriter, ProjectionMask};

use super::address::address;
use super::app::{App, Shared, answer};
use super::page_error::PageError;
use super::table_ref::{Pairs, value_of};
use super::tables::value;

/// The longest text that is taken, in letters.
const MAX_LETTERS: usize = 5000;
/// Largest file of corrections, in bytes.
const MAX_ROWS: usize = 5_000_000;
/// Rows that are decoded at a time.
const BATCH_ROWS: usize = 1024;
/// For others who add rows.
const LOCK_TIME: Duration = Duration::from_secs(3);
const LOCK_PAUSE: Duration = Duration::from_millis(20);
/// Columns that hold what was said, the first that a row has.
const TEXTS: [&str; 5] = ["text", "reference", "transcription_native", "clean", "norm"];

/// Values of the column `what`.
pub const TEXT: &str = "text";
pub const SPEAKER: &str = "speaker";

/// A row of the file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Correction {
    /// [`TEXT`] or [`SPEAKER`].
    pub what: String,
    /// The segment; of a speaker, the recording as its transcript names it.
    pub segment_id: String,
    /// The former text, or the label of the speaker.
    pub old_text: String,
    /// None where the text stays.
    pub new_text: Option<String>,
    /// The segment is to be left out.
    pub bad: bool,
    pub who: String,
    /// RFC 3339.
    pub at: String,
}

/// The columns of the file.
pub fn schema() -> SchemaRef {
    let text = |name: &str, nullable| Field::new(name, DataType::Utf8, nullable);
    Arc::new(Schema::new(vec![
        text("what", false),
        text("segment_id", false),
        text("old_text", true),
        text("new_text", true),
        Field::new("bad", DataType::Boolean, false),
        text("who", true),
        text("at", false),
    ]))
}

/// All rows of the file; none if it is not there.
fn read(path: &Path) -> Result<Vec<RecordBatch>, PageError> {
    let unreadable = |error: &dyn std::fmt::Display| PageError::unreadable(format!("{}: {error}", path.display()));
    if !path.exists() {
        return Ok(Vec::new());
    }
    let file = ForeignParquet::open_local(path).map_err(|error| unreadable(&error))?;
    let metadata = file.metadata().map_err(|error| unreadable(&error))?;
    let wanted = schema();
    let (fields, wanted_fields) = (metadata.schema().fields().iter(), wanted.fields().iter());
    if !fields
        .map(|field| field.name())
        .eq(wanted_fields.map(|field| field.name()))
    {
        return Err(unreadable(&"it is not a file of corrections"));
    }
    let batches = file.rows(&metadata, ProjectionMask::all(), BATCH_ROWS, None);
    let batches: Result<Vec<RecordBatch>, _> = batches.map_err(|error| unreadable(&error))?.collect();
    let batches = batches.map_err(|error| unreadable(&error))?;
    let same = batches.into_iter().map(|batch| {
        // A program that saw no value wrote a column of no type.
        let columns = batch.columns().iter().zip(wanted.fields());
        let columns = columns.map(|(column, field)| match column.data_type() {
            DataType::Null => new_null_array(field.data_type(), column.len()),
            _ => Arc::clone(column),
        });
        RecordBatch::try_new(Arc::clone(&wanted), columns.collect())
    });
    same.collect::<Result<_, _>>().map_err(|error| unreadable(&error))
}

/// The corrections of a segment's text, or of the names of a recording's speakers, the last one last.
pub fn of(path: &Path, what: &str, segment_id: &str) -> Result<Vec<Correction>, PageError> {
    Ok(among(&read(path)?, what, segment_id))
}

fn among(batches: &[RecordBatch], what: &str, segment_id: &str) -> Vec<Correction> {
    let mut found = Vec::new();
    for batch in batches {
        let text = |column: usize, row: usize| {
            let column = batch.column(column).as_string::<i32>();
            column.is_valid(row).then(|| column.value(row).to_owned())
        };
        let (kinds, ids) = (batch.column(0).as_string::<i32>(), batch.column(1).as_string::<i32>());
        for row in (0..batch.num_rows()).filter(|row| kinds.value(*row) == what && ids.value(*row) == segment_id) {
            found.push(Correction {
                what: what.to_owned(),
                segment_id: segment_id.to_owned(),
                old_text: text(2, row).unwrap_or_default(),
                new_text: text(3, row),
                bad: batch.column(4).as_boolean().value(row),
                who: text(5, row).unwrap_or_default(),
                at: text(6, row).unwrap_or_default(),
            });
        }
    }
    found
}

/// Adds a row. Others who add at the same time, in this process or another, wait; the file is whole at any time. `seen` is when
/// the segment was last corrected, as far as the person knows (empty: never), where that is to be looked at.
pub fn append(path: &Path, correction: &Correction, seen: Option<&str>) -> Result<(), PageError> {
    let lock = lock(path, LOCK_TIME)?;
    let mut batches = read(path)?;
    let before = among(&batches, &correction.what, &correction.segment_id);
    if let (Some(last), Some(seen)) = (before.last(), seen)
        && last.at != seen
    {
        let text = last.new_text.as_ref().unwrap_or(&last.old_text);
        let (who, at) = (&last.who, &last.at);
        let message = format!(
            "{who} corrected this at {at}, after your page was loaded, to: {text} - nothing was kept; load the page of the row again"
        );
        return Err(PageError::new(StatusCode::CONFLICT, message.trim_start()));
    }
    // The text that stays may be an earlier correction, as rows that were made with it show.
    let was_changed = before.iter().any(|one| one.new_text.is_some());
    let staying = || (was_changed && !correction.old_text.is_empty()).then_some(correction.old_text.as_str());
    let new_text = correction.new_text.as_deref().or_else(staying);
    let texts = |text: &str| Arc::new(StringArray::from(vec![text]));
    let row = RecordBatch::try_new(
        schema(),
        vec![
            texts(&correction.what),
            texts(&correction.segment_id),
            texts(&correction.old_text),
            Arc::new(StringArray::from(vec![new_text])),
            Arc::new(BooleanArray::from(vec![correction.bad])),
            texts(&correction.who),
            texts(&correction.at),
        ],
    );
    batches.push(row.map_err(PageError::unreadable)?);
    if batches.iter().map(RecordBatch::num_rows).sum::<usize>() > MAX_ROWS {
        return Err(PageError::unreadable(
            "there are too many corrections in one file: name another one with --corrections",
        ));
    }
    let all = concat_batches(&schema(), &batches).map_err(PageError::unreadable)?;
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut bytes, schema(), None).map_err(PageError::unreadable)?;
    writer.write(&all).map_err(PageError::unreadable)?;
    writer.close().map_err(PageError::unreadable)?;
    write_atomically(path, &bytes)?;
    drop(lock);
    Ok(())
}

/// Held while a row is added; released by the system when the process ends.
fn lock(path: &Path, patience: Duration) -> Result<File, PageError> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let name = PathBuf::from(name);
    let failed = |error: std::io::Error| PageError::unreadable(format!("{}: {error}", name.display()));
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&name)
        .map_err(failed)?;
    let deadline = Instant::now() + patience;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(LOCK_PAUSE),
            Err(TryLockError::WouldBlock) => {
                let message = format!(
                    "{}: another process holds the lock; nothing was kept, try again",
                    name.display()
                );
                return Err(PageError::new(StatusCode::SERVICE_UNAVAILABLE, message));
            }
        }
    }
}

/// The form for a row; nothing where nothing may be changed, or the row is of no segment.
pub fn form(app: &App, row: &RecordBatch, pairs: &[(String, String)]) -> Markup {
    let (Some(file), Some(segment)) = (&app.settings.corrections, value(row, "segment_id")) else {
        return html! {};
    };
    let Some((column, text)) = TEXTS.iter().find_map(|name| Some((*name, value(row, name)?))) else {
        return html! {};
    };
    let (tag, plain) = split_tag(&text);
    let lang = tag.map(str::to_owned).or_else(|| value(row, "lang"));
    let before = match of(file, TEXT, &segment) {
        Ok(mut all) => all.pop(),
        Err(error) => return html! { p.failed dir="auto" { (error.message) } },
    };
    let shown = before
        .as_ref()
        .and_then(|before| before.new_text.as_deref())
        .unwrap_or(plain);
    let back = address(
        "/row",
        pairs.iter().map(|(name, value)| (name.as_str(), value.as_str())),
    );
    html! {
        section {
            h2 { "Correct" }
            @if let Some(before) = &before { p.quiet { "Last corrected " (before.at) @if !before.who.is_empty() { " by " span dir="auto" { (before.who) } } @if before.bad { ": marked as bad" } } }
            form.correction action="/corrections" method="post" {
                input type="hidden" name="form_token" value=(app.access.form_token());
                input type="hidden" name="what" value=(TEXT);
                input type="hidden" name="segment_id" value=(segment);
                input type="hidden" name="old_text" value=(plain);
                input type="hidden" name="seen" value=(before.as_ref().map_or("", |before| &before.at));
                input type="hidden" name="back" value=(back);
                label { (column) textarea name="new_text" dir="auto" lang=[lang] rows="3" { (shown) } }
                label.check { input type="checkbox" name="bad" value="1" checked[before.as_ref().is_some_and(|before| before.bad)]; "The row is bad: leave it out" }
                button { "Keep" }
            }
        }
    }
}

/// The form for the name of a speaker; nothing where nothing may be changed.
pub fn speaker_form(app: &App, recording: &str, speaker: &str, shown: &str, back: &str) -> Markup {
    if app.settings.corrections.is_none() {
        return html! {};
    }
    html! {
        form.correction action="/corrections" method="post" {
            input type="hidden" name="form_token" value=(app.access.form_token());
            input type="hidden" name="what" value=(SPEAKER);
            input type="hidden" name="segment_id" value=(recording);
            input type="hidden" name="old_text" value=(speaker);
            input type="hidden" name="back" value=(back);
            label { span dir="auto" { "Name of " (speaker) } input name="new_text" value=(shown) dir="auto" autocomplete="off"; }
            button { "Keep" }
        }
    }
}

/// Reads the fields of a form.
///
/// # Errors
/// A message for the user.
fn correction(fields: &[(String, String)], who: &str, at: String) -> Result<Correction, String> {
    let field = |name: &str| value_of(fields, name).unwrap_or_default();
    let what = field("what");
    if what != TEXT && what != SPEAKER {
        return Err("the form does not say what it corrects".into());
    }
    let segment_id = field("segment_id");
    if segment_id.is_empty() || segment_id.chars().count() > MAX_LETTERS {
        return Err("the form names no segment".into());
    }
    let (old_text, bad) = (field("old_text").to_owned(), what == TEXT && field("bad") == "1");
    // One line, as texts of manifests are.
    let new_text = field("new_text").split_whitespace().collect::<Vec<_>>().join(" ");
    if new_text.chars().count() > MAX_LETTERS {
        return Err(format!("the text is longer than {MAX_LETTERS} letters"));
    }
    if let Some(control) = new_text.chars().find(|letter| letter.is_control()) {
        return Err(format!("the text holds a control character: {control:?}"));
    }
    if new_text.is_empty() && !bad {
        return Err(match what {
            SPEAKER => "the name is empty".into(),
            _ => "the text is empty: mark the row as bad instead".into(),
        });
    }
    Ok(Correction {
        what: what.to_owned(),
        segment_id: segment_id.to_owned(),
        new_text: (!new_text.is_empty() && new_text != old_text).then_some(new_text),
        old_text,
        bad,
        who: who.to_owned(),
        at,
    })
}

/// The fields of a form. Each is read by itself: all together may be longer than an address.
fn fields_of(body: &str) -> Option<Pairs> {
    let mut fields = Pairs::new();
    for field in body.split('&') {
        let uri: Uri = format!("/?{field}").parse().ok()?;
        fields.extend(Query::<Pairs>::try_from_uri(&uri).ok()?.0);
    }
    Some(fields)
}

pub async fn post(State(app): State<Shared>, body: Bytes) -> Response {
    answer(&app, move |app| {
        let Some(file) = &app.settings.corrections else {
            return Err(PageError::new(
                StatusCode::FORBIDDEN,
                "nothing may be changed here: start it with --allow-edit",
            ));
        };
        let unreadable = || PageError::bad_request("the form cannot be read, or is too long");
        let body = std::str::from_utf8(&body).map_err(|_| unreadable())?;
        let fields = fields_of(body).ok_or_else(unreadable)?;
        let field = |name: &str| value_of(&fields, name).unwrap_or_default();
        app.access.check_form(field("form_token"))?;
        let who = std::env::var("USER").unwrap_or_default();
        let at = chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Millis, true);
        let correction = correction(&fields, &who, at).map_err(PageError::bad_request)?;
        append(file, &correction, value_of(&fields, "seen"))?;
        // To the page that it came from, and to no other server's.
        let back = Some(field("back"))
            .filter(|back| {
                ["/row?", "/transcripts/show?"]
                    .iter()
                    .any(|page| back.starts_with(page))
            })
            .unwrap_or("/");
        Ok((StatusCode::SEE_OTHER, [(LOCATION, back.to_owned())]).into_response())
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(fields: &[(&str, &str)]) -> Pairs {
        fields
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    fn made(given: &[(&str, &str)]) -> Result<Correction, String> {
        let given: Vec<(&str, &str)> = [("what", TEXT)].iter().chain(given).copied().collect();
        correction(&fields(&given), "me", "now".into())
    }

    #[test]
    fn forms_become_corrections_or_are_refused() {
        let text = made(&[("segment_id", "s"), ("old_text", "a b"), ("new_text", " नमस्ते\n दुनिया ")]).unwrap();
        assert_eq!((text.new_text.as_deref(), text.bad), (Some("नमस्ते दुनिया"), false));
        let bad = made(&[
            ("segment_id", "s"),
            ("old_text", "a b"),
            ("new_text", "a b"),
            ("bad", "1"),
        ])
        .unwrap();
        assert_eq!((bad.new_text, bad.bad), (None, true));
        let long = "x".repeat(MAX_LETTERS + 1);
        for wrong in [
            vec![("new_text", "a")],
            vec![("segment_id", "s")],
            vec![("segment_id", "s"), ("new_text", "a\u{0}b")],
            vec![("segment_id", "s"), ("new_text", &long)],
        ] {
            assert!(made(&wrong).is_err(), "{wrong:?}");
        }
        let speaker = |name| {
            correction(
                &fields(&[
                    ("what", SPEAKER),
                    ("segment_id", "a.wav"),
                    ("old_text", "s1"),
                    ("new_text", name),
                    ("bad", "1"),
                ]),
                "",
                String::new(),
            )
        };
        let named = speaker("आशा").unwrap();
        assert_eq!((named.new_text.as_deref(), named.bad), (Some("आशा"), false));
        assert!(speaker(" ").is_err());
        assert!(
            correction(
                &fields(&[("what", "all"), ("segment_id", "s"), ("new_text", "a")]),
                "",
                String::new()
            )
            .is_err()
        );
    }

    #[test]
    fn rows_are_added_by_many_at_once_and_the_last_of_a_segment_counts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("corrections.parquet");
        assert_eq!(of(&path, TEXT, "s0").unwrap(), []);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let path = &path;
                scope.spawn(move || {
                    for number in 0..5 {
                        let segment_id = format!("s{thread}");
                        let new_text = Some(format!("text {number}"));
                        append(
                            path,
                            &Correction {
                                what: TEXT.into(),
                                segment_id,
                                new_text,
                                ..Correction::default()
                            },
                            None,
                        )
                        .unwrap();
                    }
                });
            }
        });
        assert_eq!(
            read(&path).unwrap().iter().map(RecordBatch::num_rows).sum::<usize>(),
            20
        );
        for thread in 0..4 {
            let all = of(&path, TEXT, &format!("s{thread}")).unwrap();
            assert_eq!((all.len(), all[4].new_text.as_deref()), (5, Some("text 4")));
            assert_eq!(of(&path, SPEAKER, &format!("s{thread}")).unwrap(), []);
        }
    }

    #[test]
    fn a_file_that_is_no_file_of_corrections_stays_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("corrections.parquet");
        std::fs::write(&path, "a letter").unwrap();
        assert!(append(&path, &Correction::default(), None).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"a letter");
    }

    fn text(old_text: &str, new_text: Option<&str>, at: &str) -> Correction {
        Correction {
            what: TEXT.into(),
            segment_id: "s".into(),
            old_text: old_text.into(),
            new_text: new_text.map(str::to_owned),
            at: at.into(),
            ..Correction::default()
        }
    }

    #[test]
    fn a_corrected_text_that_is_kept_again_is_not_taken_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("corrections.parquet");
        let last = || of(&path, TEXT, "s").unwrap().pop().unwrap().new_text;
        append(&path, &text("a", None, "1"), None).unwrap();
        assert_eq!(last(), None);
        append(&path, &text("a", Some("b"), "2"), None).unwrap();
        // The row of a manifest that was made with the correction, whose text is left as it is.
        append(&path, &text("b", None, "3"), None).unwrap();
        assert_eq!(last().as_deref(), Some("b"));
        // That of an earlier manifest, whose text is wanted again.
        append(&path, &text("a", None, "4"), None).unwrap();
        assert_eq!(last().as_deref(), Some("a"));
    }

    #[test]
    fn what_another_person_corrected_meanwhile_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("corrections.parquet");
        append(&path, &text("a", Some("b"), "1"), Some("")).unwrap();
        let late = append(&path, &text("a", Some("c"), "2"), Some("")).unwrap_err();
        assert_eq!(late.status, StatusCode::CONFLICT);
        assert!(late.message.contains("to: b"), "{}", late.message);
        append(&path, &text("a", Some("c"), "2"), Some("1")).unwrap();
        assert_eq!(of(&path, TEXT, "s").unwrap().len(), 2);
    }

    #[test]
    fn a_lock_that_is_not_let_go_of_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("corrections.parquet");
        let held = lock(&path, Duration::ZERO).unwrap();
        let refused = lock(&path, Duration::ZERO).unwrap_err();
        assert_eq!(refused.status, StatusCode::SERVICE_UNAVAILABLE);
        drop(held);
        assert!(lock(&path, Duration::ZERO).is_ok());
    }

    #[test]
    fn the_longest_texts_fit_into_a_form() {
        let long = "%E0%A4%A8".repeat(MAX_LETTERS);
        let body = format!("old_text={long}&new_text={long}&a=b+c&empty=");
        assert!(body.len() < super::super::MAX_FORM);
        let fields = fields_of(&body).unwrap();
        assert_eq!(fields[1].1, "न".repeat(MAX_LETTERS));
        assert_eq!(fields[2], ("a".to_owned(), "b c".to_owned()));
    }
}
