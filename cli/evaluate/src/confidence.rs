//! `flow evaluate confidence`: how far confidences of words are from the share of words that are right, and calibration.

use std::io::Write;
use std::path::{Path, PathBuf};

use flow_base::escape::escape_line;
use flow_evaluation::normalize::Normalizer;
use flow_evaluation::word_confidence::{self, Reliability};
use flow_inspect::table::plural;
use flow_kind::Storage;
use flow_store::write_atomically;
use flow_text::language_tag::usual_language;
use flow_transcription::Transcript;
use flow_transcription::calibration::Calibration;
use serde_json::json;

use crate::arguments::EvaluateConfidenceArguments;
use crate::files::{TRANSCRIBE, read};
use crate::normalizer::normalizer;
use flow_cli::failure::{Exit, Failure};
use flow_cli::files::files_below;

/// Confidences of words with whether these are right.
type Scored = Vec<(f64, bool)>;

pub fn confidence(
    storage: &Storage,
    arguments: &EvaluateConfidenceArguments,
    out: &mut dyn Write,
) -> Result<Exit, Failure> {
    let normalizer = normalizer(&arguments.normalization)?;
    let mut recordings: Vec<Scored> = Vec::new();
    let mut digest: Option<String> = None;
    for path in files_below(&arguments.transcripts, &["json"], TRANSCRIBE)? {
        let transcript = read(storage, &path, Transcript::from_json)?;
        let found = scored(&path, &transcript, &normalizer)?;
        let other = &transcript.metadata.model_digest;
        if digest.as_ref().is_some_and(|digest| digest != other) {
            let message = format!("{} is of another model than the transcripts before", path.display());
            return Err(Failure::usage(message, "give transcripts of one model"));
        }
        digest = Some(other.clone());
        recordings.push(found);
    }
    let all: Scored = recordings.concat();
    let digest = digest.unwrap_or_default();
    let calibration = Calibration::fit(&all, &digest)
        .map_err(|error| Failure::usage(error.to_string(), "give transcripts with words that have confidences"))?;
    let reliability: Reliability = all.iter().copied().collect();
    let (right, mean) = (reliability.all().accuracy(), reliability.all().mean_confidence());
    let before = reliability.expected_calibration_error();
    let after = held_out(&recordings, &digest)?;
    let written = arguments
        .calibrate
        .as_deref()
        .map(|model| write(model, &calibration))
        .transpose()?;
    if arguments.json {
        let document = json!({
            "words": all.len(),
            "right": right,
            "mean_confidence": mean,
            "expected_calibration_error": before,
            "expected_calibration_error_after": after,
            "calibration": written,
        });
        writeln!(out, "{document}")?;
        return Ok(Exit::Done);
    }
    writeln!(
        out,
        "{} in {}, {:.1} % of them right; mean confidence {mean:.3}",
        plural(all.len() as u64, "word"),
        plural(recordings.len() as u64, "recording"),
        100.0 * right
    )?;
    writeln!(out, "expected calibration error: {before:.3}")?;
    if let Some(after) = after {
        writeln!(
            out,
            "after calibration: {after:.3} (each half of the recordings with the other one's)"
        )?;
    }
    if let Some(path) = written {
        writeln!(out, "calibration written to {}", escape_line(&path.to_string_lossy()))?;
    }
    Ok(Exit::Done)
}

/// The words of a transcript that have a confidence.
fn scored(path: &Path, transcript: &Transcript, normalizer: &Normalizer) -> Result<Scored, Failure> {
    let row = transcript.metadata.row.as_ref();
    let of_row = |key: &str| row.and_then(|row| row.get(key)).and_then(|value| value.as_str());
    let Some(said) = of_row("text") else {
        let message = format!(
            "{} does not say what was said: it has no `metadata.row.text`",
            path.display()
        );
        return Err(Failure::usage(
            message,
            "transcribe the manifest: flow transcribe MANIFEST --format json",
        ));
    };
    let language = usual_language(of_row("lang").unwrap_or_default());
    let heard = transcript.segments.iter().flat_map(|segment| &segment.words);
    let heard = heard.map(|word| (word.word.as_str(), word.confidence));
    Ok(word_confidence::scored(said, heard, normalizer, &language))
}

/// The expected calibration error of the words of each half of the recordings with what the other half gives. None where a half has no
/// words.
fn held_out(recordings: &[Scored], digest: &str) -> Result<Option<f64>, Failure> {
    let half = |parity: usize| -> Scored {
        let recordings = recordings.iter().enumerate();
        recordings
            .filter(|(number, _)| number % 2 == parity)
            .flat_map(|(_, scored)| scored.iter().copied())
            .collect()
    };
    let halves = [half(0), half(1)];
    if halves.iter().any(Vec::is_empty) {
        return Ok(None);
    }
    let mut calibrated = Scored::new();
    for (own, other) in [(0, 1), (1, 0)] {
        let fitted = Calibration::fit(&halves[other], digest).map_err(Failure::unreadable)?;
        let words = halves[own].iter();
        calibrated.extend(words.map(|(confidence, right)| (fitted.probability(*confidence), *right)));
    }
    let calibrated: Reliability = calibrated.into_iter().collect();
    Ok(Some(calibrated.expected_calibration_error()))
}

/// Writes the calibration of a model, which has none.
fn write(model: &Path, calibration: &Calibration) -> Result<PathBuf, Failure> {
    let digest = flow_transcription::recognizer::digest(model).map_err(Failure::unreadable)?;
    if digest != calibration.model_digest {
        let message = format!("the transcripts are not of the model {}", model.display());
        return Err(Failure::usage(message, "name the model that wrote them"));
    }
    let path = Calibration::path_of(model);
    if path.exists() {
        let message = format!(
            "{} exists, so the confidences of these transcripts are calibrated",
            path.display()
        );
        return Err(Failure::usage(
            message,
            "delete it, transcribe again, and calibrate then",
        ));
    }
    write_atomically(&path, &calibration.to_json().map_err(Failure::unreadable)?)?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use flow_transcription::recognizer::digest;
    use flow_transcription::{Metadata, Performance, Segment, Word};
    use serde_json::Value;

    use super::*;
    use crate::arguments::{NormalizationArguments, Normalize};

    fn arguments(transcripts: &Path, calibrate: Option<PathBuf>) -> EvaluateConfidenceArguments {
        EvaluateConfidenceArguments {
            transcripts: vec![transcripts.to_owned()],
            normalization: NormalizationArguments {
                normalize: Normalize::KeepMarks,
                ..NormalizationArguments::default()
            },
            calibrate,
            json: true,
        }
    }

    /// A transcript of a row, whose words have confidences.
    fn write_transcript(path: &Path, said: Option<&str>, heard: &[(&str, f64)], model_digest: &str) {
        let word = |(number, (word, confidence)): (usize, &(&str, f64))| Word {
            word: (*word).to_owned(),
            start: number as f64,
            end: number as f64 + 0.5,
            confidence: Some(*confidence),
            speaker: None,
        };
        let words: Vec<Word> = heard.iter().enumerate().map(word).collect();
        let segment = Segment {
            text: words.iter().map(|word| &word.word[..]).collect::<Vec<_>>().join(" "),
            end: words.len() as f64,
            words,
            ..Segment::default()
        };
        let row = said.map(|said| serde_json::from_value(json!({"text": said, "lang": "en"})).unwrap());
        let metadata = Metadata {
            model_digest: model_digest.to_owned(),
            row,
            ..Metadata::default()
        };
        let transcript = Transcript::from_segments(metadata, Performance::default(), vec![segment]);
        fs::write(path, transcript.to_json().unwrap()).unwrap();
    }

    fn run(arguments: &EvaluateConfidenceArguments) -> Result<Value, Failure> {
        let mut out = Vec::new();
        confidence(&Storage::default(), arguments, &mut out)?;
        Ok(serde_json::from_slice(&out).unwrap())
    }

    #[test]
    fn words_are_compared_with_what_was_said_and_the_model_gets_its_calibration() {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("small.nemo");
        let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/small.nemo");
        fs::copy(bundled, &model).unwrap();
        let digest = digest(&model).unwrap();
        let transcripts = folder.path().join("transcripts");
        fs::create_dir_all(transcripts.join("b")).unwrap();
        // Right, right, wrong, and one too many.
        let heard = [("One,", 0.9), ("two", 0.9), ("tree", 0.9), ("-", 0.0), ("four", 0.1)];
        write_transcript(&transcripts.join("a.json"), Some("one two three"), &heard, &digest);
        write_transcript(&transcripts.join("b/c.json"), Some("five"), &[("five", 0.9)], &digest);
        fs::write(transcripts.join("d.txt"), "no transcript").unwrap();
        let found = run(&arguments(&transcripts, Some(model.clone()))).unwrap();
        assert_eq!((&found["words"], &found["right"]), (&json!(5), &json!(0.6)));
        // Four words of 0.9, of which three are right, and one of 0.1 that is wrong.
        let error = found["expected_calibration_error"].as_f64().unwrap();
        assert!((error - (4.0 * 0.15 + 0.1) / 5.0).abs() < 1e-9, "{error}");
        assert!(found["expected_calibration_error_after"].is_f64());
        let written = Calibration::of_model(&model, &digest).unwrap().unwrap();
        assert!((written.probability(0.9) - 0.75).abs() < 1e-9 && written.probability(0.05) == 0.0);
        // Calibrated confidences are not calibrated again.
        let again = run(&arguments(&transcripts, Some(model.clone())))
            .unwrap_err()
            .to_string();
        assert!(again.contains("exists"), "{again}");
        let other = run(&arguments(&transcripts, Some(folder.path().join("none.nemo")))).unwrap_err();
        assert!(other.to_string().contains("none.nemo"), "{other}");
    }

    #[test]
    fn transcripts_that_cannot_be_scored_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let refused = |expected: &str| {
            let error = run(&arguments(folder.path(), None)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        refused("ends in .json");
        let (first, second) = (folder.path().join("a.json"), folder.path().join("b.json"));
        fs::write(&first, "{").unwrap();
        refused("a.json");
        write_transcript(&first, None, &[("one", 0.5)], "x");
        refused("metadata.row.text");
        write_transcript(&first, Some("one"), &[], "x");
        refused("no words");
        write_transcript(&first, Some("one"), &[("one", 0.5)], "x");
        write_transcript(&second, Some("one"), &[("one", 0.5)], "y");
        refused("another model");
    }
}
