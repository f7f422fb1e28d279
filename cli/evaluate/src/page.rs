//! The page of timelines.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use flow_base::escape::escape_line;
use flow_evaluation::timeline::RecordingTimeline;
use flow_evaluation::timeline_page::{TIMELINES, TimelinePage, page};
use flow_kind::Storage;
use flow_speakers::error_rate::Scoring;
use flow_speakers::error_stretches::error_stretches;
use flow_store::write_atomically;

use crate::audio;
use crate::diarization::{HEAD, HEAD_OF_WORDS, Score, Uem, cannot_be_scored};
use crate::files::Side;
use flow_cli::failure::Failure;

/// The inputs of a page.
pub struct PageData<'a> {
    pub all: &'a Score,
    pub recordings: &'a [(&'a str, Score)],
    /// Reference and hypothesis.
    pub sides: [&'a Side; 2],
    pub uem: Option<&'a Uem>,
    pub scoring: &'a Scoring,
}

/// Writes the page. Recordings that are missing in the folder of `audio` are reported on standard error.
pub fn write_page(storage: &Storage, path: &Path, audio: Option<&Path>, data: &PageData) -> Result<(), Failure> {
    let names: Vec<&str> = data.recordings.iter().map(|(name, _)| *name).collect();
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    fs::create_dir_all(folder)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", folder.display())))?;
    let found = audio
        .map(|audio| audio::recordings(storage, audio, &names))
        .transpose()?;
    if let (Some(audio), Some(found)) = (audio, &found) {
        let missing: Vec<&str> = names
            .iter()
            .copied()
            .filter(|name| !found.contains_key(*name))
            .collect();
        if !missing.is_empty() {
            let missing = escape_line(&missing.join(", ")).into_owned();
            writeln!(
                io::stderr(),
                "warning: {} holds no recording of the name {missing}",
                audio.display()
            )?;
        }
    }
    let recordings = timelines(data, folder, found.as_ref())?;
    let all = figures(data.all, data);
    write_atomically(path, page(&TimelinePage { all, recordings }).as_bytes())?;
    Ok(())
}

/// Measures: names and values.
fn figures(score: &Score, data: &PageData) -> Vec<(String, String)> {
    let heads = HEAD[1..].iter().chain(&HEAD_OF_WORDS).map(|head| (*head).to_owned());
    heads.zip(score.cells(data.all.words.is_some())).collect()
}

/// The recordings as the page shows them; those that it does not draw have figures alone.
fn timelines(
    data: &PageData,
    folder: &Path,
    found: Option<&BTreeMap<String, PathBuf>>,
) -> Result<Vec<RecordingTimeline>, Failure> {
    let mut recordings: Vec<RecordingTimeline> = data
        .recordings
        .iter()
        .map(|(name, score)| RecordingTimeline {
            name: (*name).to_owned(),
            figures: figures(score, data),
            ..RecordingTimeline::default()
        })
        .collect();
    for (recording, (name, score)) in recordings.iter_mut().zip(data.recordings).take(TIMELINES) {
        let scoring = Scoring {
            uem: data.uem.and_then(|uem| uem.get(*name)).cloned(),
            ..data.scoring.clone()
        };
        let [reference, hypothesis] = data
            .sides
            .map(|side| side.turns.get(*name).map_or(&[][..], Vec::as_slice));
        let stretches = error_stretches(reference, hypothesis, &scoring, &score.mapping)
            .map_err(|error| cannot_be_scored(name, &error))?;
        [recording.reference, recording.hypothesis] = data.sides.map(|side| side.shown(name));
        let file = found.and_then(|found| found.get(*name));
        recording.mapping.clone_from(&score.mapping);
        recording.errors = stretches;
        recording.audio = file.map(|file| audio::address(folder, file)).transpose()?;
    }
    Ok(recordings)
}

#[cfg(test)]
mod tests {
    use flow_speakers::turns::Turn;

    use super::*;

    #[test]
    fn only_recordings_that_are_drawn_are_compared() {
        let names: Vec<String> = (0..TIMELINES + 2).map(|number| format!("{number:03}")).collect();
        let mut reference = Side::default();
        for name in &names {
            let turn = Turn {
                start: 0.0,
                end: 1.0,
                speaker: "x".to_owned(),
            };
            reference.turns.insert(name.clone(), vec![turn]);
        }
        let recordings: Vec<(&str, Score)> = names.iter().map(|name| (name.as_str(), Score::default())).collect();
        let data = PageData {
            all: &Score::default(),
            recordings: &recordings,
            sides: [&reference, &Side::default()],
            uem: None,
            scoring: &Scoring::default(),
        };
        let found = timelines(&data, Path::new("."), None).unwrap();
        assert_eq!(found.len(), names.len());
        assert!(found.iter().all(|recording| recording.figures.len() == HEAD.len() - 1));
        let (drawn, others) = found.split_at(TIMELINES);
        assert!(drawn.iter().all(|recording| recording.errors.len() == 1));
        assert!(
            others
                .iter()
                .all(|recording| recording.errors.is_empty() && recording.reference.is_empty())
        );
    }
}
