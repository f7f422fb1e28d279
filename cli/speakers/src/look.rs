//! `flow speakers list`, `show` and `review`.

use std::io::Write;
use std::path::Path;

use flow_cli::failure::Failure;
use flow_inspect::table::{duration, lines, plural};
use flow_speakers::voices::{Appearance, SpeakerKey, VoiceId, Voices, review as find};
use serde_json::{Value, json};

use crate::arguments::{ReviewArguments, ShowArguments};
use crate::voice::{open, quoted, shown, voice};

/// Voices: those with names first, then those who are heard longest.
pub fn list(folder: &Path, is_json: bool, out: &mut dyn Write) -> Result<(), Failure> {
    let store = open(folder)?;
    let voices = store.voices();
    let seconds = |id: VoiceId| -> f64 {
        voices
            .appearances(id)
            .map(|(_, member)| member.appearance.seconds)
            .sum()
    };
    let mut all: Vec<(VoiceId, f64)> = voices.voices().keys().map(|id| (*id, seconds(*id))).collect();
    let name = |id: VoiceId| voices.voices()[&id].name.as_deref();
    all.sort_by(|(a, first), (b, second)| {
        let by_name = name(*a)
            .is_none()
            .cmp(&name(*b).is_none())
            .then_with(|| name(*a).cmp(&name(*b)));
        by_name.then(second.total_cmp(first)).then(a.cmp(b))
    });
    if is_json {
        let voice = |(id, seconds): &(VoiceId, f64)| {
            json!({
                "voice": id.to_string(),
                "name": name(*id),
                "seconds": seconds,
                "recordings": voices.voices()[id].speakers.len(),
            })
        };
        let document = json!({"voices": all.iter().map(voice).collect::<Value>()});
        writeln!(out, "{document}")?;
        return Ok(());
    }
    let mut rows = vec![
        ["voice", "name", "recordings", "speech", "for example"]
            .map(str::to_owned)
            .to_vec(),
    ];
    for (id, seconds) in &all {
        let longest = voices
            .appearances(*id)
            .max_by(|(_, a), (_, b)| a.appearance.seconds.total_cmp(&b.appearance.seconds));
        rows.push(vec![
            id.to_string(),
            name(*id).unwrap_or("-").to_owned(),
            voices.voices()[id].speakers.len().to_string(),
            duration(*seconds),
            longest.map_or_else(String::new, |(key, member)| listen(&key, &member.appearance, 1)),
        ]);
    }
    print(&rows, out)?;
    writeln!(
        out,
        "{}, {}",
        plural(all.len() as u64, "voice"),
        plural(voices.recordings().len() as u64, "recording")
    )?;
    Ok(())
}

/// `monday 1:02.5-1:09.1`, with at most `most` stretches.
fn listen(key: &SpeakerKey, appearance: &Appearance, most: usize) -> String {
    format!("{} {}", key.recording, times(appearance, most))
}

/// The longest stretches, in order of time.
fn times(appearance: &Appearance, most: usize) -> String {
    let mut longest = appearance.stretches.clone();
    longest.sort_by(|a, b| (b[1] - b[0]).total_cmp(&(a[1] - a[0])));
    longest.truncate(most);
    longest.sort_by(|a, b| a[0].total_cmp(&b[0]));
    let shown: Vec<String> = longest
        .iter()
        .map(|[start, end]| format!("{}-{}", clock(*start), clock(*end)))
        .collect();
    shown.join(" ")
}

/// A place in a recording: `1:02.5`, `1:00:02.5`.
fn clock(seconds: f64) -> String {
    let tenths = (seconds * 10.0).round() as u64;
    let (minutes, rest) = (tenths / 600, tenths % 600);
    let rest = format!("{:02}.{}", rest / 10, rest % 10);
    match minutes / 60 {
        0 => format!("{minutes}:{rest}"),
        hours => format!("{hours}:{:02}:{rest}", minutes % 60),
    }
}

fn print(rows: &[Vec<String>], out: &mut dyn Write) -> Result<(), Failure> {
    for line in lines(rows) {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

pub fn show(folder: &Path, arguments: &ShowArguments, out: &mut dyn Write) -> Result<(), Failure> {
    let store = open(folder)?;
    let voices = store.voices();
    let id = voice(voices, &arguments.voice)?;
    let speakers: Vec<_> = voices.appearances(id).collect();
    let likeness = |key: &SpeakerKey| voices.likeness(key);
    if arguments.json {
        let speaker = |(key, member): &(SpeakerKey, &flow_speakers::voices::Member)| {
            json!({
                "recording": key.recording,
                "speaker": key.speaker,
                "file": voices.recordings().get(&key.recording).map(|recording| &recording.path),
                "seconds": member.appearance.seconds,
                "settled": member.settled,
                "cosine": likeness(key),
                "listen": member.appearance.stretches,
            })
        };
        let document = json!({
            "voice": id.to_string(),
            "name": voices.voices()[&id].name,
            "speakers": speakers.iter().map(speaker).collect::<Value>(),
        });
        writeln!(out, "{document}")?;
        return Ok(());
    }
    writeln!(
        out,
        "{}: {}",
        shown(voices, id),
        plural(speakers.len() as u64, "speaker")
    )?;
    let mut rows = vec![
        ["speaker", "speech", "settled", "cosine with the others", "listen"]
            .map(str::to_owned)
            .to_vec(),
    ];
    for (key, member) in &speakers {
        rows.push(vec![
            key.to_string(),
            duration(member.appearance.seconds),
            if member.settled { "yes" } else { "no" }.to_owned(),
            likeness(key).map_or_else(|| "-".to_owned(), |cosine| format!("{cosine:.3}")),
            times(&member.appearance, usize::MAX),
        ]);
    }
    print(&rows, out)
}

pub fn review(folder: &Path, arguments: &ReviewArguments, out: &mut dyn Write) -> Result<(), Failure> {
    let store = open(folder)?;
    let voices = store.voices();
    let found = find(voices, arguments.known_threshold, usize::from(arguments.limit));
    if arguments.json {
        let near = found.near.iter().map(
            |near| json!({"voice": near.voice.to_string(), "other": near.other.to_string(), "cosine": near.cosine}),
        );
        let between = found.between.iter().map(|between| {
            json!({
                "recording": between.speaker.recording,
                "speaker": between.speaker.speaker,
                "voice": between.voice.to_string(),
                "cosine": between.own,
                "other": between.other.to_string(),
                "other_cosine": between.cosine,
            })
        });
        let document = json!({"near": near.collect::<Value>(), "between": between.collect::<Value>()});
        writeln!(out, "{document}")?;
        return Ok(());
    }
    if found.near.is_empty() && found.between.is_empty() {
        writeln!(out, "nothing to review")?;
        return Ok(());
    }
    let command = |words: &[&str]| command(folder, words);
    if !found.near.is_empty() {
        writeln!(out, "Voices that may be one (different people: name both)")?;
        let mut rows = vec![["voices", "cosine", "listen", "the same"].map(str::to_owned).to_vec()];
        for near in &found.near {
            let (voice, other) = (near.voice, near.other);
            rows.push(vec![
                format!("{} and {}", shown(voices, voice), shown(voices, other)),
                format!("{:.3}", near.cosine),
                format!("{}; {}", example(voices, voice), example(voices, other)),
                command(&["merge", &voice.to_string(), &other.to_string()]),
            ]);
        }
        print(&rows, out)?;
    }
    if !found.between.is_empty() {
        writeln!(out, "Speakers that may have another voice")?;
        let head = ["speaker", "voice", "cosine", "or", "cosine", "the other one", "its own"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        for between in &found.between {
            let speaker = between.speaker.to_string();
            rows.push(vec![
                speaker.clone(),
                shown(voices, between.voice),
                format!("{:.3}", between.own),
                shown(voices, between.other),
                format!("{:.3}", between.cosine),
                command(&["move", &speaker, &between.other.to_string()]),
                command(&["move", &speaker, &between.voice.to_string()]),
            ]);
        }
        print(&rows, out)?;
    }
    Ok(())
}

/// Where to listen to a voice.
fn example(voices: &Voices, id: VoiceId) -> String {
    let longest = voices
        .appearances(id)
        .max_by(|(_, a), (_, b)| a.appearance.seconds.total_cmp(&b.appearance.seconds));
    longest.map_or_else(String::new, |(key, member)| listen(&key, &member.appearance, 1))
}

/// A command as a shell takes it.
fn command(folder: &Path, words: &[&str]) -> String {
    let mut line = "flow speakers".to_owned();
    for word in words {
        line.push(' ');
        line.push_str(&quoted(word));
    }
    if folder != Path::new("voices") {
        line.push_str(&format!(" --store {}", quoted(&folder.to_string_lossy())));
    }
    line
}
