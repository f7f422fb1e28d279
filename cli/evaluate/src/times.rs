//! `flow evaluate times`: how far the times of words are from those of a reference.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::Path;

use flow_base::escape::escape_line;
use flow_evaluation::normalize::Normalizer;
use flow_evaluation::wer::words;
use flow_evaluation::word_times::{Spread, TimeDifferences, TimedWord};
use flow_inspect::table::{count, lines};
use flow_kind::Storage;
use flow_speakers::stages::recording_name;
use flow_store::write_atomically;
use flow_text::language_tag::usual_language;
use flow_transcription::Transcript;
use serde_json::json;

use crate::arguments::EvaluateTimesArguments;
use crate::files::{TRANSCRIBE, check_page, read};
use crate::normalizer::normalizer;
use crate::texts::forms::words_of_ctm;
use crate::texts::named;
use crate::times_page::{TimesPage, TimesRow};
use flow_cli::failure::{Exit, Failure};
use flow_cli::files::files_below;

/// Endings of files that have times of words.
const ENDINGS: &[&str] = &["ctm", "json"];

/// Words in order of their beginnings, by recording.
type Words = BTreeMap<String, Vec<TimedWord>>;

pub fn times(storage: &Storage, arguments: &EvaluateTimesArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    if let Some(page) = &arguments.page {
        check_page(page, [&arguments.reference, &arguments.hypothesis])?;
    }
    let normalizer = normalizer(&arguments.normalization)?;
    let reference = timed_words(storage, &arguments.reference, &normalizer)?;
    let hypothesis = timed_words(storage, &arguments.hypothesis, &normalizer)?;
    let mut all = TimeDifferences::default();
    let mut recordings = Vec::new();
    let mut missing = Vec::new();
    for (recording, reference) in &reference {
        let Some(hypothesis) = hypothesis.get(recording) else {
            missing.push(recording.clone());
            continue;
        };
        let mut here = TimeDifferences::default();
        here.add(reference, hypothesis);
        recordings.push(TimesRow::new(recording, &here));
        all.extend(here);
    }
    let Some([beginnings, ends]) = all.spreads() else {
        return Err(Failure::usage(
            "no recording of the reference has a word in common with the hypothesis",
            "recordings are compared by name: that in the CTM, or the name of the file that was transcribed or aligned",
        ));
    };
    let (said, not_said, both) = (all.words, all.not_said as u64, all.compared() as u64);
    if !missing.is_empty() {
        let missing = escape_line(&named(&missing)).into_owned();
        writeln!(
            io::stderr(),
            "warning: the hypothesis has no {missing}, which is left out"
        )?;
    }
    if let Some(path) = &arguments.page {
        let page = TimesPage {
            all: TimesRow::new("all", &all),
            recordings,
            differences: &all.seconds,
        };
        write_atomically(path, page.html().as_bytes())?;
    }
    if arguments.json {
        let document = json!({
            "words": said,
            "compared": both,
            "not_said": not_said,
            "beginnings": beginnings.figures(),
            "ends": ends.figures(),
        });
        writeln!(out, "{document}")?;
        return Ok(Exit::Done);
    }
    writeln!(
        out,
        "{} of {} words are in both; differences of their times in seconds",
        count(both),
        count(said as u64)
    )?;
    if not_said > 0 {
        writeln!(
            out,
            "{} not said, by the alignment, and have no times to compare",
            count(not_said)
        )?;
    }
    let head = ["", "median", "95 % within", "signed median"].map(str::to_owned);
    for line in lines(&[head.to_vec(), cells("beginnings", &beginnings), cells("ends", &ends)]) {
        writeln!(out, "{line}")?;
    }
    Ok(Exit::Done)
}

fn cells(name: &str, spread: &Spread) -> Vec<String> {
    std::iter::once(name.to_owned()).chain(spread.texts()).collect()
}

/// The words of files, or of those in folders and below them.
fn timed_words(storage: &Storage, path: &Path, normalizer: &Normalizer) -> Result<Words, Failure> {
    let mut all = Words::new();
    for path in files_below(&[path.to_owned()], ENDINGS, TRANSCRIBE)? {
        let found = read(storage, &path, |text| of_file(&path, text, normalizer))?;
        for (recording, words) in found {
            if all.insert(recording.clone(), words).is_some() {
                let message = format!("{recording} is in {} and in a file before it", path.display());
                return Err(Failure::usage(message, "give one file for each recording"));
            }
        }
    }
    for words in all.values_mut() {
        words.sort_by(|one, other| one.times[0].total_cmp(&other.times[0]));
    }
    Ok(all)
}

fn of_file(path: &Path, text: &str, normalizer: &Normalizer) -> Result<Words, String> {
    let word = |text: &str, language: &str, times: [f64; 2], said: bool| {
        let text = words(&normalizer.apply(text.trim(), language)).concat();
        // A lone punctuation mark may be nothing.
        (!text.is_empty()).then_some(TimedWord { text, times, said })
    };
    if path
        .extension()
        .is_some_and(|ending| ending.eq_ignore_ascii_case("ctm"))
    {
        let recordings = words_of_ctm(text)?.into_iter();
        let recordings = recordings.map(|(name, said)| {
            let words = said.iter();
            let words = words.filter_map(|said| word(&said.text, "", [said.turn.start, said.turn.end], true));
            (name, words.collect())
        });
        return Ok(recordings.collect());
    }
    let transcript = Transcript::from_json(text).map_err(|error| error.to_string())?;
    let language = transcript.metadata.languages.first();
    let language = language.map(|language| usual_language(language)).unwrap_or_default();
    let said = transcript.segments.iter().flat_map(|segment| &segment.words);
    let words = said.filter_map(|said| {
        let was_said = said.end > said.start || said.confidence != Some(0.0);
        word(&said.word, &language, [said.start, said.end], was_said)
    });
    let words: Vec<TimedWord> = words.collect();
    if words.is_empty() && !transcript.segments.is_empty() {
        return Err("it has no times of words".to_owned());
    }
    Ok(Words::from([(recording_name(&transcript.metadata.source_file), words)]))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use flow_transcription::{Metadata, Performance, Segment, Word};
    use serde_json::Value;

    use super::*;
    use crate::arguments::{NormalizationArguments, Normalize};

    const CTM: &str = ";; known\ntalk 1 1.0 0.5 One\ntalk 1 2.0 0.5 two\ntalk 1 3.0 0.5 three\nother 1 0 1 far\n";

    fn compared(reference: &str, hypothesis: (&str, &str)) -> Result<Value, Failure> {
        let folder = tempfile::tempdir().unwrap();
        let (known, found) = (folder.path().join("known.ctm"), folder.path().join(hypothesis.0));
        fs::write(&known, reference).unwrap();
        fs::write(&found, hypothesis.1).unwrap();
        let arguments = EvaluateTimesArguments {
            reference: known,
            hypothesis: found,
            normalization: NormalizationArguments {
                normalize: Normalize::KeepMarks,
                ..NormalizationArguments::default()
            },
            json: true,
            page: Some(folder.path().join("times.html")),
        };
        let mut out = Vec::new();
        times(&Storage::default(), &arguments, &mut out)?;
        let page = fs::read_to_string(arguments.page.unwrap()).unwrap();
        let figures: Value = serde_json::from_slice(&out).unwrap();
        let median = figures["beginnings"]["median"].as_f64().unwrap();
        assert!(page.contains(&format!("<td class=\"n\">{median:.3}</td>")), "{page}");
        Ok(figures)
    }

    fn near(value: &Value, expected: f64) {
        assert!((value.as_f64().unwrap() - expected).abs() < 1e-9, "{value}");
    }

    #[test]
    fn words_of_both_sides_are_compared() {
        let found = "talk 1 2.1 0.4 TWO\ntalk 1 0.9 0.5 one,\ntalk 1 3.3 0.3 tree\ntalk 1 3.5 0.1 three\n";
        let found = compared(CTM, ("found.ctm", found)).unwrap();
        assert_eq!((&found["words"], &found["compared"]), (&json!(3), &json!(3)));
        near(&found["beginnings"]["median"], 0.1);
        near(&found["beginnings"]["percentile_95"], 0.5);
        near(&found["beginnings"]["signed_median"], 0.1);
        near(&found["ends"]["signed_median"], 0.0);
    }

    #[test]
    fn transcripts_have_times_of_words() {
        let word = |text: &str, start: f64| Word {
            word: text.to_owned(),
            start,
            end: start + 0.5,
            ..Word::default()
        };
        let not_said = Word {
            end: 1.75,
            confidence: Some(0.0),
            ..word("two", 1.75)
        };
        let segment = Segment {
            start: 1.25,
            end: 3.75,
            text: "One two three.".to_owned(),
            words: vec![word("One", 1.25), not_said, word("three.", 3.25)],
            ..Segment::default()
        };
        let metadata = Metadata {
            source_file: "talks/talk.flac".to_owned(),
            ..Metadata::default()
        };
        let transcript = Transcript::from_segments(metadata, Performance::default(), vec![segment]);
        let found = compared(CTM, ("found.json", &transcript.to_json().unwrap())).unwrap();
        assert_eq!(found["not_said"], json!(1));
        assert_eq!((&found["words"], &found["compared"]), (&json!(3), &json!(2)));
        near(&found["beginnings"]["median"], 0.25);
        near(&found["ends"]["signed_median"], 0.25);
    }

    /// As the folder of `--out` has one, with files of its own.
    #[test]
    fn hidden_folders_have_no_results() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join(".flow")).unwrap();
        fs::write(folder.path().join(".flow/index.json"), r#"{"version": 2}"#).unwrap();
        fs::write(folder.path().join("talk.ctm"), CTM).unwrap();
        let normalizer = normalizer(&NormalizationArguments::default()).unwrap();
        let found = timed_words(&Storage::default(), folder.path(), &normalizer).unwrap();
        assert_eq!(found.keys().collect::<Vec<_>>(), ["other", "talk"]);
    }

    #[test]
    fn what_cannot_be_compared_is_an_error() {
        for (reference, hypothesis, why) in [
            (CTM, ("found.ctm", "elsewhere 1 0 1 one\n"), "a word in common"),
            (CTM, ("found.ctm", ""), "a word in common"),
            (CTM, ("found.ctm", "talk 1 0 1 one\ntalk 2 0 1 one\n"), "channels"),
            (CTM, ("found.ctm", "talk 1 nan 1 one\n"), "line 1"),
            (CTM, ("found.json", "{}"), "found.json"),
            ("talk 1 0\n", ("found.ctm", CTM), "known.ctm"),
        ] {
            let error = compared(reference, hypothesis).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
