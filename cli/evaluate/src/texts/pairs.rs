//! Which text of the hypothesis belongs to which of the reference.

use std::collections::{BTreeMap, HashSet};

use flow_evaluation::utterance::Utterance;
use flow_inspect::table::plural;

use super::forms::{Content, Form, Row};
use flow_cli::failure::Failure;

/// An utterance on both sides.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pair {
    pub name: String,
    pub lang: Option<String>,
    pub seconds: f64,
    pub reference: String,
    pub hypothesis: String,
    /// The hypothesis does not name it: its text is empty.
    pub is_missing: bool,
    /// The name with the name of the file in place of its path, if it has one.
    pub short: String,
    /// The set of a report that it belongs to.
    pub set: Option<String>,
    /// Names the recording that it is from.
    pub source: String,
    /// Values of columns.
    pub columns: BTreeMap<String, String>,
}

#[derive(Debug, Default, PartialEq)]
pub struct Paired {
    pub pairs: Vec<Pair>,
    /// Names that both sides have.
    pub matched: usize,
    /// Names that the hypothesis does not have.
    pub missing: Vec<String>,
    /// Names that the reference does not have.
    pub left_out: Vec<String>,
}

/// Pairs the utterances of both sides: by name, by time where words have times, or line by line. Without a hypothesis a
/// manifest has both sides.
pub fn paired(reference: Form, hypothesis: Option<Form>) -> Result<Paired, Failure> {
    let both = match &hypothesis {
        Some(hypothesis) => format!("{} and {}", reference.path.display(), hypothesis.path.display()),
        None => reference.path.display().to_string(),
    };
    let wrong = |why: String, help: &str| Failure::usage(format!("{both}: {why}"), help);
    let Some(hypothesis) = hypothesis else {
        let Content::Manifest(rows) = reference.content else {
            return Err(wrong(
                "there is one file, which is not a manifest with both texts".into(),
                "name the hypothesis after the reference, or one manifest with `text` and `pred_text`",
            ));
        };
        return of_one_manifest(rows).map_err(|why| wrong(why, "a line needs `text` and `pred_text`"));
    };
    let hypothesis = match hypothesis.content {
        Content::Manifest(rows) => {
            let heard = heard_rows(rows).map_err(|why| {
                Failure::usage(
                    format!("{}: {why}", hypothesis.path.display()),
                    "a line needs `pred_text` or `text`",
                )
            })?;
            Content::Manifest(heard)
        }
        other => other,
    };
    let paired = match (reference.content, hypothesis) {
        (Content::Manifest(reference), Content::Manifest(heard)) => of_two_manifests(reference, heard),
        (Content::Manifest(reference), Content::Lines(heard)) => {
            from_rows(reference).and_then(|said| by_lines(said, heard))
        }
        (Content::Manifest(reference), heard) => {
            from_rows_by_recording(reference).and_then(|said| by_names(said, in_one(heard)))
        }
        (Content::Lines(said), Content::Lines(heard)) => by_lines(from_lines(said), heard),
        (Content::Lines(said), Content::Manifest(heard)) => {
            let heard = heard.into_iter().map(|row| row.heard.unwrap_or_default());
            by_lines(from_lines(said), heard.collect())
        }
        (Content::Timed(said), Content::Timed(heard)) => Ok(by_times(said, heard)),
        (Content::Lines(_), _) | (_, Content::Lines(_)) => {
            Err("lines without names can be paired with lines alone".into())
        }
        (said, Content::Manifest(heard)) => {
            heard_by_recording(heard).and_then(|heard| by_names(from_named(in_one(said)), heard))
        }
        (said, heard) => by_names(from_named(in_one(said)), in_one(heard)),
    };
    let help = "files of lines need as many lines; with --ids each line begins with the name of its utterance";
    let paired = paired.map_err(|why| wrong(why, help))?;
    if paired.pairs.is_empty() {
        return Err(wrong("there is nothing to score".into(), help));
    }
    if paired.matched == 0
        && let (Some(missing), Some(left_out)) = (paired.missing.first(), paired.left_out.first())
    {
        let why = format!("no utterance has the same name on both sides: {missing} and {left_out}");
        return Err(wrong(why, help));
    }
    Ok(paired)
}

/// The rows of a hypothesis with what was heard: `pred_text`, or `text` in a line without that key.
fn heard_rows(mut rows: Vec<Row>) -> Result<Vec<Row>, String> {
    for row in rows.iter_mut().filter(|row| !row.heard_nothing) {
        row.heard = row.heard.take().or(row.text.take());
    }
    match rows.iter().any(|row| row.heard.is_some() || row.heard_nothing) || rows.is_empty() {
        true => Ok(rows),
        false => Err("no line has `pred_text` or `text`".into()),
    }
}

fn of_one_manifest(rows: Vec<Row>) -> Result<Paired, String> {
    let pair = |row: Row| match (row.text, row.heard) {
        (Some(reference), Some(hypothesis)) => Ok(Pair {
            name: row.name,
            lang: row.lang,
            seconds: row.seconds,
            reference,
            hypothesis,
            is_missing: false,
            short: row.short,
            set: row.set,
            source: row.source,
            columns: row.columns,
        }),
        (None, _) => Err(format!("{}: there is no `text`", row.name)),
        (_, None) => Err(format!("{}: there is no `pred_text`", row.name)),
    };
    let pairs: Vec<Pair> = rows.into_iter().map(pair).collect::<Result<_, _>>()?;
    Ok(Paired {
        matched: pairs.len(),
        pairs,
        ..Paired::default()
    })
}

/// Rows of the same recordings, named by their whole paths, or where these differ throughout, by the names of the files.
fn of_two_manifests(mut said: Vec<Row>, mut heard: Vec<Row>) -> Result<Paired, String> {
    check_names(&said)?;
    check_names(&heard)?;
    let names: HashSet<&str> = heard.iter().map(|row| row.name.as_str()).collect();
    if !said.iter().any(|row| names.contains(row.name.as_str())) {
        for row in said.iter_mut().chain(&mut heard) {
            row.name.clone_from(&row.short);
        }
    }
    by_name(said.iter().map(|row| (row.name.clone(), ())))?;
    by_name(heard.iter().map(|row| (row.name.clone(), ())))?;
    let heard = by_name(heard.into_iter().filter_map(|row| Some((row.name, row.heard?))))?;
    by_names(from_rows(said)?, heard)
}

/// Pairs that have no hypothesis yet.
fn from_rows(rows: Vec<Row>) -> Result<Vec<Pair>, String> {
    let pair = |row: Row| match row.text {
        Some(reference) => Ok(Pair {
            name: row.name,
            lang: row.lang,
            seconds: row.seconds,
            reference,
            short: row.short,
            set: row.set,
            source: row.source,
            columns: row.columns,
            ..Pair::default()
        }),
        None => Err(format!("{}: there is no `text`", row.name)),
    };
    rows.into_iter().map(pair).collect()
}

/// Refuses a manifest in which a line has no name, or two have the same.
fn check_names(rows: &[Row]) -> Result<(), String> {
    if let Some(row) = rows.iter().find(|row| !row.is_named) {
        return Err(format!("{} names neither its recording nor itself", row.name));
    }
    by_name(rows.iter().map(|row| (row.name.clone(), ()))).map(drop)
}

/// Refuses recordings of several folders that have one name: their texts would be joined.
fn check_recordings(rows: &[Row]) -> Result<(), String> {
    let mut files: BTreeMap<&str, &str> = BTreeMap::new();
    for row in rows {
        let Some(file) = &row.file else { continue };
        let first = *files.entry(&row.recording).or_insert(file);
        if first != file {
            return Err(format!(
                "{first} and {file} both have the name {}; rename one of them",
                row.recording
            ));
        }
    }
    Ok(())
}

/// What was heard of each recording, in the order of time.
fn heard_by_recording(mut rows: Vec<Row>) -> Result<BTreeMap<String, String>, String> {
    check_names(&rows)?;
    check_recordings(&rows)?;
    rows.sort_by(|one, other| one.offset.total_cmp(&other.offset));
    let mut heard: BTreeMap<String, String> = BTreeMap::new();
    for row in rows {
        let Some(text) = row.heard else { continue };
        match heard.get_mut(&row.recording) {
            None => {
                heard.insert(row.recording, text);
            }
            Some(whole) => *whole = format!("{whole} {text}"),
        }
    }
    Ok(heard)
}

/// The same, named and joined by recording, in the order of time, as CTM and STM have it.
fn from_rows_by_recording(mut rows: Vec<Row>) -> Result<Vec<Pair>, String> {
    check_names(&rows)?;
    check_recordings(&rows)?;
    rows.sort_by(|one, other| one.offset.total_cmp(&other.offset));
    let mut by_recording: BTreeMap<String, Pair> = BTreeMap::new();
    for row in rows {
        let recording = row.recording.clone();
        for pair in from_rows(vec![row])? {
            match by_recording.get_mut(&recording) {
                None => {
                    let name = recording.clone();
                    by_recording.insert(recording.clone(), Pair { name, ..pair });
                }
                Some(whole) => {
                    whole.reference = format!("{} {}", whole.reference, pair.reference);
                    whole.seconds += pair.seconds;
                    for (column, value) in &mut whole.columns {
                        if pair.columns.get(column) != Some(value) {
                            *value = SEVERAL.to_owned();
                        }
                    }
                }
            }
        }
    }
    Ok(by_recording.into_values().collect())
}

/// The value of a column of which the rows of a recording have several.
const SEVERAL: &str = "several";

fn from_lines(lines: Vec<String>) -> Vec<Pair> {
    let numbered = (1..).zip(lines);
    let pair = |(number, reference): (usize, String)| Pair {
        name: format!("line {number}"),
        source: format!("line {number}"),
        reference,
        ..Pair::default()
    };
    numbered.map(pair).collect()
}

fn from_named(named: BTreeMap<String, String>) -> Vec<Pair> {
    let pair = |(name, reference): (String, String)| Pair {
        source: name.clone(),
        name,
        reference,
        ..Pair::default()
    };
    named.into_iter().map(pair).collect()
}

/// The texts of a recording as one.
fn in_one(content: Content) -> BTreeMap<String, String> {
    match content {
        Content::Named(named) => named,
        Content::Timed(recordings) => recordings
            .into_iter()
            .map(|(name, said)| (name, joined(&said)))
            .collect(),
        Content::Manifest(_) | Content::Lines(_) => BTreeMap::new(),
    }
}

fn joined(utterances: &[Utterance]) -> String {
    utterances
        .iter()
        .map(|utterance| utterance.text.as_str())
        .collect::<Vec<_>>()
        .join(" ")
}

fn by_name<T>(rows: impl Iterator<Item = (String, T)>) -> Result<BTreeMap<String, T>, String> {
    let mut named = BTreeMap::new();
    for (name, value) in rows {
        if named.insert(name.clone(), value).is_some() {
            return Err(format!("two lines are of {name}"));
        }
    }
    Ok(named)
}

fn by_names(mut pairs: Vec<Pair>, mut heard: BTreeMap<String, String>) -> Result<Paired, String> {
    let mut missing = Vec::new();
    for pair in &mut pairs {
        match heard.remove(&pair.name) {
            Some(text) => pair.hypothesis = text,
            None => {
                pair.is_missing = true;
                missing.push(pair.name.clone());
            }
        }
    }
    Ok(Paired {
        matched: pairs.len() - missing.len(),
        pairs,
        missing,
        left_out: heard.into_keys().collect(),
    })
}

fn by_lines(mut pairs: Vec<Pair>, heard: Vec<String>) -> Result<Paired, String> {
    if pairs.len() != heard.len() {
        return Err(format!(
            "the reference has {}, the hypothesis {}",
            plural(pairs.len() as u64, "line"),
            heard.len()
        ));
    }
    for (pair, text) in pairs.iter_mut().zip(heard) {
        pair.hypothesis = text;
    }
    Ok(Paired {
        matched: pairs.len(),
        pairs,
        ..Paired::default()
    })
}

/// What was heard belongs to the utterance of the reference that is nearest to its middle, if it is single words; else the
/// texts of a recording are compared as one.
fn by_times(said: BTreeMap<String, Vec<Utterance>>, mut heard: BTreeMap<String, Vec<Utterance>>) -> Paired {
    let mut paired = Paired::default();
    for (recording, utterances) in said {
        let heard = heard.remove(&recording);
        match heard {
            None => paired.missing.push(recording.clone()),
            Some(_) => paired.matched += 1,
        }
        let is_missing = heard.is_none();
        let heard = heard.unwrap_or_default();
        let is_words = heard
            .iter()
            .all(|heard| !heard.text.trim().contains(char::is_whitespace));
        if !is_words {
            paired.pairs.push(Pair {
                source: recording.clone(),
                name: recording,
                is_missing,
                reference: joined(&utterances),
                hypothesis: joined(&heard),
                ..Pair::default()
            });
            continue;
        }
        let mut texts = vec![Vec::new(); utterances.len()];
        for word in &heard {
            let middle = (word.turn.start + word.turn.end) / 2.0;
            let distance = |utterance: &Utterance| {
                (utterance.turn.start - middle)
                    .max(middle - utterance.turn.end)
                    .max(0.0)
            };
            let nearest = (0..utterances.len())
                .min_by(|&one, &other| distance(&utterances[one]).total_cmp(&distance(&utterances[other])));
            if let Some(nearest) = nearest {
                texts[nearest].push(word.text.as_str());
            }
        }
        for (place, (utterance, words)) in utterances.iter().zip(texts).enumerate() {
            // Speakers may begin at the same time; utterances are in the order of their starts.
            let start = utterance.turn.start;
            let earlier = utterances[..place].iter().rev();
            let number = match earlier.take_while(|other| other.turn.start == start).count() {
                0 => String::new(),
                before => format!(" ({})", before + 1),
            };
            paired.pairs.push(Pair {
                name: format!("{recording} at {start} s{number}"),
                seconds: utterance.turn.end - utterance.turn.start,
                is_missing,
                source: recording.clone(),
                columns: BTreeMap::from([("speaker".to_owned(), utterance.turn.speaker.clone())]),
                reference: utterance.text.clone(),
                hypothesis: words.join(" "),
                ..Pair::default()
            });
        }
    }
    paired.left_out = heard.into_keys().collect();
    paired
}
