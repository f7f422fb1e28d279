//! `flow align`: times of the words and segments of a text that is known.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use flow_audio::recording_reader::Channels;
use flow_audio::samples::OnDamage;
use flow_inspect::table::plural;
use flow_kernels::device::DeviceChoice;
use flow_kind::open_regular_file_or_open_pipe;
use flow_model::Weights;
use flow_storage::{Storage, is_one_file};
use flow_store::write_atomically;
use flow_transcription::Format;
use flow_transcription::alignment::{AlignmentSettings, segments_of_text};
use flow_transcription::recognizer::Recognizer;
use flow_transcription::streamed::StreamedRecording;
use flow_transcription::transcribe::{MAX_DURATION, TranscribeSettings};

use super::recordings::carried;
use crate::arguments::AlignArguments;
use flow_cli::failure::{Exit, Failure};
use flow_cli::fetch::{local_model, tell};

/// Most bytes of a text: some 500 hours of speech.
const MOST_BYTES: u64 = 64 << 20;
/// The text that is standard input.
const STDIN: &str = "-";
/// Most parts that do not fit that are told on the screen.
const MOST_TOLD: usize = 5;

pub fn align(storage: &Storage, arguments: &AlignArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    if !(0.0..=1.0).contains(&arguments.delay) {
        let message = format!("--delay is {}; it must be from 0 to 1 second", arguments.delay);
        return Err(Failure::usage(message, "the default suits transducers"));
    }
    if let Some(output) = &arguments.output {
        for (input, what) in [(&arguments.audio, "recording"), (&arguments.text, "text")] {
            if is_same_file(output, input) {
                let message = format!("--output {} is the {what} itself", output.display());
                return Err(Failure::usage(message, "name another file"));
            }
        }
    }
    let format = format(arguments)?;
    let text = segments(storage, &arguments.text)?;
    let model: PathBuf = match &arguments.model {
        Some(model) => local_model(storage, model, true)?,
        None => {
            let pipeline = carried("transcribe")?;
            let folder = pipeline.parent().and_then(Path::parent).unwrap_or(&pipeline);
            folder.join("configs/models/small.nemo")
        }
    };
    let device: DeviceChoice = arguments
        .device
        .parse()
        .map_err(|error| Failure::usage(format!("--device: {error}"), "cpu, cuda or cuda:1"))?;
    let device = device.open(0).map_err(Failure::unreadable)?;
    let recognizer = Recognizer::load(&model, Weights::default().into(), &device).map_err(Failure::unreadable)?;
    let shown = arguments.audio.display();
    let of_audio = |error: &dyn std::fmt::Display| Failure::unreadable(format!("{shown}: {error}"));
    let recognition = TranscribeSettings::new(Vec::new(), "").recognition();
    let settings = AlignmentSettings {
        delay: arguments.delay,
        ..AlignmentSettings::default()
    };
    let recording = StreamedRecording::new(storage, &arguments.audio, Channels::Mix);
    let mut first = recognizer.first_pass(&recognition);
    let extent = recording.first_pass(MAX_DURATION, OnDamage::Keep, &mut |block| {
        first.feed(block).map(|()| true)
    });
    let extent = extent.map_err(|error| of_audio(&error))?;
    let extent = extent.map_err(|refusal| of_audio(&refusal.detail))?;
    for note in extent.note.iter().chain(&extent.damage) {
        tell(&format!("{shown}: {note}"));
    }
    let found = recognizer.align_again(first, &recording, &text, (&recognition, &settings), &|| false);
    let found = found.map_err(|error| {
        let text = arguments.text.display();
        Failure::unreadable(format!("{text}, with {shown}: {error}"))
    })?;
    let Some(found) = found else {
        return Err(Failure::unreadable("stopped"));
    };
    if found.words_said() == 0 {
        let text = arguments.text.display();
        let message = format!("no word of {text} was said in {shown} (score {:.2})", found.score);
        return Err(Failure::unreadable(message));
    }
    let name = arguments.audio.file_name().unwrap_or_default().to_string_lossy();
    let transcript = recognizer.aligned_transcript(&found, &name, extent.samples);
    let bytes = found.write(&transcript, format).map_err(Failure::unreadable)?;
    match &arguments.output {
        Some(file) => write_atomically(file, &bytes)?,
        None => out.write_all(&bytes)?,
    }
    report(&found);
    Ok(Exit::Done)
}

/// What does not fit, on standard error.
fn report(found: &flow_transcription::alignment::Aligned) {
    let words = plural(found.words.len() as u64, "word");
    let said = found.words_said();
    let were = if said == 1 { "was" } else { "were" };
    tell(&format!("{said} of {words} {were} said; score {:.2}", found.score));
    if !found.unknown.is_empty() {
        let unknown: Vec<String> = found.unknown.iter().map(char::to_string).collect();
        tell(&format!(
            "characters that the model does not know: {}",
            unknown.join(" ")
        ));
    }
    let not_spelled = found.words_not_spelled();
    if not_spelled > 0 {
        let words = plural(not_spelled as u64, "word");
        tell(&format!(
            "{words} without a letter that the model knows: their times are unknown"
        ));
    }
    for words in found.not_said.iter().take(MOST_TOLD) {
        tell(&format!("not said, at {:.2} s: {}", words.at, words.text));
    }
    for speech in found.without_text.iter().take(MOST_TOLD) {
        tell(&format!(
            "not in the text, {:.2} to {:.2} s: {}",
            speech.start, speech.end, speech.text
        ));
    }
    let more = found.not_said.len().saturating_sub(MOST_TOLD) + found.without_text.len().saturating_sub(MOST_TOLD);
    if more > 0 {
        let _ = writeln!(io::stderr(), "and {more} more, which --format json lists");
    }
}

fn ending(path: &Path) -> Option<String> {
    Some(path.extension()?.to_str()?.to_ascii_lowercase())
}

fn format(arguments: &AlignArguments) -> Result<Format, Failure> {
    let of_text = ending(&arguments.text).filter(|ending| matches!(&ending[..], "srt" | "vtt"));
    let of_output = arguments.output.as_deref().and_then(ending);
    let name = arguments.format.clone().or(of_output).or(of_text);
    let name = name.unwrap_or_else(|| Format::Json.name().to_owned());
    let known = name.parse().ok().filter(|format| *format != Format::Parquet);
    let format: Format = known.ok_or_else(|| {
        Failure::usage(
            format!("`{name}` is not a format of alignments"),
            "json, srt, vtt, ctm, tsv, txt or jsonl",
        )
    })?;
    Ok(format)
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    let (Ok(one), Ok(other)) = (one.metadata(), other.metadata()) else {
        return false;
    };
    is_one_file(&one, &other)
}

/// The segments of a text: cues of subtitles, or lines. A text without a name comes from standard input or a pipe that is open.
fn segments(storage: &Storage, path: &Path) -> Result<Vec<String>, Failure> {
    let is_stdin = path == Path::new(STDIN);
    let shown = if is_stdin {
        "standard input".into()
    } else {
        path.display().to_string()
    };
    let wrong = |why: &dyn std::fmt::Display| Failure::unreadable(format!("{shown}: {why}"));
    let file: Box<dyn Read> = if is_stdin {
        Box::new(io::stdin().lock())
    } else {
        Box::new(open_regular_file_or_open_pipe(storage, path).map_err(|error| wrong(&error))?)
    };
    let mut bytes = Vec::new();
    file.take(MOST_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| wrong(&error))?;
    if bytes.len() as u64 > MOST_BYTES {
        return Err(wrong(&"a text of more than 64 MiB"));
    }
    let text = String::from_utf8(bytes).map_err(|_| wrong(&"it is not UTF-8"))?;
    let is_subtitles = match ending(path) {
        Some(ending) => matches!(&ending[..], "srt" | "vtt"),
        // A pipe has no extension.
        None if !path.is_file() => text.lines().any(|line| line.contains(" --> ")),
        None => false,
    };
    segments_of_text(&text, is_subtitles).map_err(|why| wrong(&why))
}
