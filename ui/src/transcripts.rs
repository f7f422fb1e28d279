//! JSON transcripts of `flow transcribe`, on the page of `flow serve` ([`flow_service::page`]): the recording plays along.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{Query, State};
use axum::http::header::{ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use flow_audio::RecordingReader;
use flow_audio::decode::read_range;
use flow_audio::recording_reader::Channels;
use flow_inspect::table::{duration, plural};
use flow_service::page::{CAPTURE, TRANSCRIBE_SCRIPT, TRANSCRIPT, TRANSCRIPT_SCRIPT};
use flow_storage::Storage;
use flow_transcription::Transcript;
use maud::{Markup, PreEscaped, html};

use super::address::address;
use super::app::{App, Shared, answer};
use super::corrections::{SPEAKER, of as corrections_of, speaker_form};
use super::layout::{Section, page, said};
use super::page_error::PageError;
use super::sound::wanted_range;
use super::state_directory::when;
use super::table_ref::{Pairs, value_of};

/// Transcripts that are listed, those of a page, and how deep folders are looked through.
const LISTED: usize = 100_000;
const PAGE: usize = 50;
const DEPTH: usize = 4;
/// For reading those of a page.
const LIST_TIME: Duration = Duration::from_secs(3);
/// Of larger ones the list shows no more than the name.
const MAX_LISTED_BYTES: u64 = 4 << 20;
/// Letters of a text that the list shows.
const SHOWN_LETTERS: usize = 160;
/// The largest transcript that is shown: some days of speech.
const MAX_BYTES: u64 = 64 << 20;
/// Bytes of a recording in one answer; a browser asks for more.
const PART: usize = 2 << 20;

/// Transcripts by their names in URLs, and whether there are more.
fn listed(app: &App) -> (Vec<(String, PathBuf)>, bool) {
    let given = &app.settings.transcripts;
    let mut found = Vec::new();
    for path in given {
        if path.is_dir() {
            // Two folders may hold files of the same name.
            let root = if given.len() == 1 {
                path.as_path()
            } else {
                Path::new("")
            };
            walk(root, path, DEPTH, &mut found);
        } else {
            found.push((path.display().to_string(), path.clone()));
        }
    }
    found.sort();
    found.dedup();
    let are_more = found.len() > LISTED;
    found.truncate(LISTED);
    (found, are_more)
}

/// Adds the transcripts in a folder, one more than are listed at most. Links are not followed.
fn walk(root: &Path, folder: &Path, depth: usize, found: &mut Vec<(String, PathBuf)>) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        // Such as the state directory of `flow transcribe`.
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() && depth > 0 {
            walk(root, &path, depth - 1, found);
        } else if kind.is_file() && path.extension().is_some_and(|ending| ending == "json") && found.len() <= LISTED {
            let name = path.strip_prefix(root).unwrap_or(&path).display().to_string();
            found.push((name, path));
        }
    }
}

fn read(path: &Path, max_bytes: u64) -> Result<Transcript, PageError> {
    let unreadable = |why: String| PageError::unreadable(format!("{}: {why}", path.display()));
    let size = path.metadata().map_err(|error| unreadable(error.to_string()))?.len();
    if size > max_bytes {
        return Err(unreadable("it is too large".into()));
    }
    let bytes = flow_kind::read_local_file(path).map_err(|error| unreadable(error.to_string()))?;
    let text = String::from_utf8(bytes).map_err(|error| unreadable(error.to_string()))?;
    Transcript::from_json(&text).map_err(|error| unreadable(error.to_string()))
}

/// The transcript that an address names: one of those that are listed.
fn named(app: &App, pairs: &[(String, String)]) -> Result<(String, PathBuf, Transcript), PageError> {
    let name = value_of(pairs, "name");
    let found = listed(app)
        .0
        .into_iter()
        .find(|(known, _)| Some(known.as_str()) == name);
    let (name, path) = found.ok_or_else(|| PageError::absent("transcript"))?;
    let transcript = read(&path, MAX_BYTES)?;
    Ok((name, path, transcript))
}

/// The recording of a transcript: below one of `folders`, at its original path, or beside the transcript.
fn recording(storage: &Storage, path: &Path, transcript: &Transcript, folders: &[PathBuf]) -> Result<PathBuf, String> {
    let source = PathBuf::from(&transcript.metadata.source_file);
    let stays_below = source
        .components()
        .all(|component| matches!(component, Component::Normal(_) | Component::CurDir));
    let folders = folders
        .iter()
        .filter(|_| stays_below)
        .map(|folder| folder.join(&source));
    let beside = source.file_name().and_then(|name| Some(path.parent()?.join(name)));
    let mut places = folders.chain([source.clone()]).chain(beside);
    let found = places
        .find(|path| path.is_file())
        .ok_or_else(|| format!("{} does not exist; --recordings names its folder", source.display()))?;
    // Other files that a transcript may name are not served.
    RecordingReader::open(storage, &found, None, Channels::Mix)
        .map_err(|error| format!("{}: {error}", found.display()))?;
    Ok(found)
}

/// A page of the list.
#[derive(serde::Deserialize)]
pub struct ListQuery {
    /// What names have in them, whatever the case of letters.
    #[serde(default)]
    name: String,
    /// From 0.
    #[serde(default)]
    page: usize,
}

pub async fn list(State(app): State<Shared>, Query(query): Query<ListQuery>) -> Response {
    answer(&app, move |app| {
        let (mut found, are_more) = listed(app);
        let wanted = query.name.trim().to_lowercase();
        found.retain(|(name, _)| name.to_lowercase().contains(&wanted));
        let first = query.page.saturating_mul(PAGE);
        let shown = found.iter().skip(first).take(PAGE);
        // Those that were read in time have figures.
        let deadline = Instant::now() + LIST_TIME;
        let read_in_time = |path: &Path| (Instant::now() < deadline).then(|| read(path, MAX_LISTED_BYTES));
        let shown: Vec<_> = shown.map(|(name, path)| (name, read_in_time(path))).collect();
        let at = |page: usize| address("/transcripts", [("name", query.name.as_str()), ("page", &page.to_string())]);
        let main = html! {
            @if app.settings.transcripts.is_empty() {
                p { "No transcripts are named: " code { "flow ui --transcripts FOLDER" } " shows those that " code { "flow transcribe" } " wrote as JSON." }
            }
            @if app.transcribes {
                (PreEscaped(CAPTURE)) (PreEscaped(TRANSCRIPT))
                script type="module" src=(TRANSCRIBE_SCRIPT) {}
            } @else {
                p.quiet { "To transcribe a recording or what you say on this page, start " code { "flow ui --model MODEL" } ". " code { "flow serve" } " has a page for that, too." }
            }
            @if !app.settings.transcripts.is_empty() {
                form.filters action="/transcripts" method="get" role="search" {
                    label { "name contains" input type="search" name="name" value=(query.name) dir="auto" autocomplete="off" data-search; }
                    button { "Show" }
                }
                p { (plural(found.len() as u64, "transcript")) @if are_more { ", and more, which are not listed" } }
                div.scroll { table.rows {
                    thead { tr { th { "Transcript" } th.n { "Duration" } th.n { "Speakers" } th { "Text" } th { "Made (UTC)" } } }
                    tbody { @for (name, read) in &shown { (row_of(name, read.as_ref())) } }
                } }
                nav.pages aria-label="Pages of transcripts" {
                    @if query.page > 0 { a rel="prev" href=(at(query.page - 1)) { "← Before" } }
                    span { "Page " (query.page.saturating_add(1)) }
                    @if found.len() > first.saturating_add(PAGE) { a rel="next" href=(at(query.page + 1)) { "Next →" } }
                }
            }
        };
        Ok(page(app, Section::Transcripts, "Transcripts", &main))
    })
    .await
}

/// A line of the list; of a transcript that was not read, its name.
fn row_of(name: &str, read: Option<&Result<Transcript, PageError>>) -> Markup {
    let link = address("/transcripts/show", [("name", name)]);
    html! {
        tr data-href=(link) {
            td { a href=(link) dir="auto" { (name) } }
            @match read {
                Some(Ok(transcript)) => {
                    @let metadata = &transcript.metadata;
                    @let begin: String = transcript.text.chars().take(SHOWN_LETTERS).collect();
                    td.n { (duration(metadata.duration_s)) }
                    td.n { @if !transcript.speakers.is_empty() { (transcript.speakers.len()) } }
                    td.words { (said(&begin, language(transcript))) @if begin.len() < transcript.text.len() { "…" } }
                    td.whole { (when(&metadata.processed_at)) }
                }
                Some(Err(error)) => { td {} td {} td.failed dir="auto" { (error.message) } td {} }
                None => { td {} td {} td {} td {} }
            }
        }
    }
}

/// The language of a transcript that is in one.
fn language(transcript: &Transcript) -> Option<&str> {
    match transcript.metadata.languages.as_slice() {
        [only] => Some(only.as_str()),
        _ => None,
    }
}

pub async fn show(State(app): State<Shared>, Query(pairs): Query<Pairs>) -> Response {
    answer(&app, move |app| {
        let (name, path, transcript) = named(app, &pairs)?;
        let recording = recording(&app.settings.storage, &path, &transcript, &app.settings.recordings);
        let source = transcript.metadata.source_file.clone();
        let renamed = renamed(app, &source)?;
        let at = |path: &str| address(path, [("name", name.as_str())]);
        let back = at("/transcripts/show");
        let metadata = &transcript.metadata;
        let stem = Path::new(&name).file_stem().unwrap_or_default().to_string_lossy();
        let main = html! {
            p.quiet { (duration(metadata.duration_s)) " · model " span dir="auto" { (metadata.model) } " · " (metadata.processed_at) }
            @if let Err(why) = &recording { p.failed dir="auto" { "No sound: " (why) } }
            @if app.settings.corrections.is_some() && !transcript.speakers.is_empty() { details { summary { "Name the speakers" }
                @for speaker in &transcript.speakers { (speaker_form(app, &source, speaker, shown(speaker, &renamed), &back)) }
            } }
            div data-transcript=(at("/transcripts/json")) data-sound=[recording.is_ok().then(|| at("/transcripts/sound"))] data-name=(stem) {
                (PreEscaped(TRANSCRIPT))
            }
            script type="module" src=(TRANSCRIPT_SCRIPT) {}
        };
        Ok(page(app, Section::Transcripts, &name, &main))
    })
    .await
}

/// A transcript as `flow transcribe` writes it, with the names that people gave the speakers.
pub async fn json(State(app): State<Shared>, Query(pairs): Query<Pairs>) -> Response {
    answer(&app, move |app| {
        let (_, path, mut transcript) = named(app, &pairs)?;
        let renamed = renamed(app, &transcript.metadata.source_file)?;
        rename(&mut transcript, &renamed);
        let json = transcript
            .to_json()
            .map_err(|error| PageError::unreadable(format!("{}: {error}", path.display())))?;
        Ok(([(CONTENT_TYPE, "application/json")], json).into_response())
    })
    .await
}

/// Two speakers of one name become one.
fn rename(transcript: &mut Transcript, renamed: &BTreeMap<String, String>) {
    let segments = transcript.segments.iter_mut();
    let spoken = segments.flat_map(|segment| {
        let words = segment.words.iter_mut().map(|word| &mut word.speaker);
        words.chain([&mut segment.speaker])
    });
    for speaker in spoken.flatten().chain(&mut transcript.speakers) {
        if let Some(name) = renamed.get(speaker) {
            speaker.clone_from(name);
        }
    }
    let mut seen = BTreeSet::new();
    transcript.speakers.retain(|speaker| seen.insert(speaker.clone()));
}

/// The names that people gave the speakers of a recording.
fn renamed(app: &App, recording: &str) -> Result<BTreeMap<String, String>, PageError> {
    let Some(file) = &app.settings.corrections else {
        return Ok(BTreeMap::new());
    };
    let all = corrections_of(file, SPEAKER, recording)?.into_iter();
    // The last one counts; an empty name restores the label.
    Ok(all
        .map(|one| (one.old_text.clone(), one.new_text.unwrap_or(one.old_text)))
        .collect())
}

fn shown<'n>(speaker: &'n str, renamed: &'n BTreeMap<String, String>) -> &'n str {
    renamed.get(speaker).map_or(speaker, String::as_str)
}

/// The recording of a transcript, as it is stored, part by part.
pub async fn sound(State(app): State<Shared>, Query(pairs): Query<Pairs>, headers: HeaderMap) -> Response {
    answer(&app, move |app| {
        let (_, path, transcript) = named(app, &pairs)?;
        let path = recording(&app.settings.storage, &path, &transcript, &app.settings.recordings)
            .map_err(PageError::unreadable)?;
        let length = usize::try_from(path.metadata()?.len()).unwrap_or(usize::MAX);
        let kind = (CONTENT_TYPE, kind_of(&path).to_owned());
        let accepts = (ACCEPT_RANGES, "bytes".to_owned());
        let (first, last) = match wanted_range(&headers, length) {
            Some(Some(range)) => range,
            Some(None) => {
                let range = (CONTENT_RANGE, format!("bytes */{length}"));
                return Ok((StatusCode::RANGE_NOT_SATISFIABLE, [range]).into_response());
            }
            None => {
                let whole = (CONTENT_LENGTH, length.to_string());
                return Ok((
                    [kind, accepts, whole],
                    in_parts(app.settings.storage.clone(), path, length as u64),
                )
                    .into_response());
            }
        };
        let last = last.min(first.saturating_add(PART - 1));
        let bytes = read_range(&app.settings.storage, &path, first as u64, (last - first + 1) as u64)
            .map_err(PageError::unreadable)?;
        let range = (CONTENT_RANGE, format!("bytes {first}-{last}/{length}"));
        Ok((StatusCode::PARTIAL_CONTENT, [kind, accepts, range], bytes).into_response())
    })
    .await
}

/// Streams a file, since a recording may be larger than the memory.
fn in_parts(storage: Storage, path: PathBuf, length: u64) -> Body {
    let parts = futures::stream::unfold((storage, path, 0u64), move |(storage, path, first)| async move {
        if first >= length {
            return None;
        }
        let end = length.min(first.saturating_add(PART as u64));
        let read = tokio::task::spawn_blocking(move || {
            let part = read_range(&storage, &path, first, end - first).map_err(std::io::Error::other);
            (storage, path, part)
        });
        let (storage, path, part) = read.await.ok()?;
        // The stream ends after an error.
        let next = if part.is_ok() { end } else { length };
        Some((part, (storage, path, next)))
    });
    Body::from_stream(parts)
}

/// The media type of a recording by the ending of its name; a browser looks at the bytes, too.
fn kind_of(path: &Path) -> &'static str {
    let ending = path
        .extension()
        .and_then(|ending| ending.to_str())
        .unwrap_or_default()
        .to_ascii_lowercase();
    match ending.as_str() {
        "flac" => "audio/flac",
        "mp3" => "audio/mpeg",
        "ogg" | "opus" | "oga" => "audio/ogg",
        "m4a" | "mp4" => "audio/mp4",
        "webm" => "audio/webm",
        _ => "audio/wav",
    }
}

#[cfg(test)]
mod tests {
    use flow_transcription::{Metadata, Performance, Segment, Word};

    use super::*;

    #[test]
    fn speakers_have_the_names_that_people_gave_them() {
        let word = |speaker: &str| Word {
            speaker: Some(speaker.into()),
            ..Word::default()
        };
        let segment = Segment {
            speaker: Some("SPEAKER_00".into()),
            words: vec![word("SPEAKER_00"), word("SPEAKER_01"), word("SPEAKER_02")],
            ..Segment::default()
        };
        let mut transcript = Transcript::from_segments(
            Metadata::default(),
            Performance::default(),
            vec![segment, Segment::default()],
        );
        assert_eq!(transcript.speakers.len(), 3);
        let names = [("SPEAKER_00", "आशा"), ("SPEAKER_02", "आशा"), ("SPEAKER_09", "Ravi")];
        rename(
            &mut transcript,
            &names
                .into_iter()
                .map(|(label, name)| (label.into(), name.into()))
                .collect(),
        );
        assert_eq!(transcript.speakers, ["आशा", "SPEAKER_01"]);
        let segment = &transcript.segments[0];
        assert_eq!(segment.speaker.as_deref(), Some("आशा"));
        let words: Vec<_> = segment
            .words
            .iter()
            .map(|word| word.speaker.as_deref().unwrap())
            .collect();
        assert_eq!(words, ["आशा", "SPEAKER_01", "आशा"]);
        assert_eq!(transcript.segments[1].speaker, None);
    }

    #[test]
    fn hidden_folders_hold_no_transcripts() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["a.json", "of/b.json", "of/c.txt", ".flow/runs/plan.json", ".d.json"] {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "{}").unwrap();
        }
        let mut found = Vec::new();
        walk(folder.path(), folder.path(), DEPTH, &mut found);
        let mut names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, ["a.json", "of/b.json"]);
    }

    #[test]
    fn a_transcript_names_recordings_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        let transcript = |source: &str| {
            let metadata = Metadata {
                source_file: source.into(),
                ..Metadata::default()
            };
            Transcript::from_segments(metadata, Performance::default(), Vec::new())
        };
        std::fs::write(folder.path().join("secret.txt"), "secret").unwrap();
        std::fs::write(folder.path().join("a.wav"), super::super::sound::wav(&[0.25; 16_000])).unwrap();
        assert!(recording(&Storage::default(), &path, &transcript("/gone/secret.txt"), &[]).is_err());
        assert!(recording(&Storage::default(), &path, &transcript(""), &[]).is_err());
        // Moved with its transcript.
        assert_eq!(
            recording(&Storage::default(), &path, &transcript("/gone/a.wav"), &[]),
            Ok(folder.path().join("a.wav"))
        );
        // Below a folder of recordings, and no way out of it.
        let talks = folder.path().join("talks");
        std::fs::create_dir_all(talks.join("day1")).unwrap();
        std::fs::rename(folder.path().join("a.wav"), talks.join("day1/a.wav")).unwrap();
        let folders = [folder.path().join("other"), talks.clone()];
        assert_eq!(
            recording(&Storage::default(), &path, &transcript("day1/a.wav"), &folders),
            Ok(talks.join("day1/a.wav"))
        );
        let why = recording(&Storage::default(), &path, &transcript("../talks/day1/a.wav"), &folders).unwrap_err();
        assert!(why.contains("--recordings"), "{why}");
    }
}
