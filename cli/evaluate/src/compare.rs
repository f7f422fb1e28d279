//! `flow evaluate compare`: two results on the same references.

use std::collections::{BTreeMap, HashSet};
use std::io::Write;
use std::path::Path;

use flow_base::escape::escape_line;
use flow_evaluation::bootstrap::{Clusters, Difference, Intervals, RATES, Ratio, Resampling, ratios};
use flow_evaluation::normalize::Normalizer;
use flow_evaluation::wer::{EditCounts, Score, UtteranceScore, score_with};
use flow_inspect::table::{count, lines, plural};
use flow_kind::Storage;
use flow_text::language_tag::split_tag;
use serde_json::{Value, json};

use crate::arguments::{CompareFormat, EvaluateCompareArguments};
use crate::normalizer::normalizer;
use crate::texts::forms::Form;
use crate::texts::pairs::{Pair, paired};
use crate::texts::{check_columns, cluster, columns, edits, language, named, rate};
use flow_cli::failure::{Exit, Failure};

/// The rates, as JSON and as titles of tables.
const NAMES: [(&str, &str); RATES] = [
    ("wer", "Word error rate"),
    ("cer", "Character error rate"),
    ("normalized_wer", "Normalised word error rate"),
    ("normalized_cer", "Normalised character error rate"),
];
const LANGUAGE: &str = "language";

pub fn compare(storage: &Storage, arguments: &EvaluateCompareArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let normalizer = normalizer(&arguments.normalization)?;
    let columns = columns(&arguments.by, &arguments.draw);
    let read = |path: &Path| Form::read(storage, path, arguments.ids, &columns);
    let reference = arguments.reference.as_deref().map(read).transpose()?;
    // The utterances, and the names of those that the reference does not have.
    let side = |path: &Path| -> Result<(Vec<Pair>, Vec<String>), Failure> {
        let form = read(path)?;
        let paired = match &reference {
            Some(reference) => paired(reference.clone(), Some(form))?,
            None => paired(form, None)?,
        };
        let pairs = uniquely_named(paired.pairs).map_err(|name| {
            Failure::usage(
                format!("{}: two lines are of {name}", path.display()),
                "an utterance has one line in each result",
            )
        })?;
        Ok((pairs, paired.left_out))
    };
    let ((a, unknown_of_a), (b, unknown_of_b)) = (side(&arguments.a)?, side(&arguments.b)?);
    let mut matched = matched(a, b);
    matched.unknown = unknown_of_a;
    matched.unknown.extend(unknown_of_b);
    matched.unknown.sort_unstable();
    matched.unknown.dedup();
    if matched.pairs.is_empty() {
        let message = format!(
            "{} and {} have no utterance with the same name and reference",
            arguments.a.display(),
            arguments.b.display()
        );
        let what = matched.left_out().into_iter().find(|(_, _, names)| !names.is_empty());
        let first = what.map_or(String::new(), |(_, what, names)| format!("; {what}: {}", named(names)));
        let help = "compare results on the same references, or name the reference of both with --reference";
        return Err(Failure::usage(message + &first, help));
    }
    let of_a: Vec<Pair> = matched.pairs.iter().map(|(a, _)| a.clone()).collect();
    check_columns(&columns, &of_a)?;
    let compared = Compared::new(&matched.pairs, arguments, &normalizer);
    match arguments.json || arguments.format == CompareFormat::Json {
        true => writeln!(out, "{}", compared.document(&matched, arguments))?,
        false => {
            for line in compared.lines(&matched, arguments) {
                writeln!(out, "{line}")?;
            }
        }
    }
    Ok(Exit::Done)
}

/// Names utterances that several sets have by their sets, too. The error is a name that two lines have even so.
fn uniquely_named(mut pairs: Vec<Pair>) -> Result<Vec<Pair>, String> {
    let twice = |pairs: &[Pair]| {
        let mut names = HashSet::new();
        pairs
            .iter()
            .find(|pair| !names.insert(pair.name.as_str()))
            .map(|pair| pair.name.clone())
    };
    if twice(&pairs).is_some() {
        for pair in &mut pairs {
            if let Some(set) = &pair.set {
                pair.name = format!("{} of {set}", pair.name);
                pair.short = format!("{} of {set}", pair.short);
            }
        }
    }
    match twice(&pairs) {
        Some(name) => Err(name),
        None => Ok(pairs),
    }
}

/// The utterances of two results.
#[derive(Debug, Default)]
struct Matched {
    /// Those that are compared, of the first and of the second result.
    pairs: Vec<(Pair, Pair)>,
    /// Names of those that one of both alone has, and that neither has where the reference names them.
    only_a: Vec<String>,
    only_b: Vec<String>,
    neither: Vec<String>,
    /// Names of those whose references differ.
    different: Vec<String>,
    /// Names of those that the reference does not have.
    unknown: Vec<String>,
}

impl Matched {
    /// What is not compared: key, description and names.
    fn left_out(&self) -> [(&'static str, &'static str, &[String]); 5] {
        [
            ("only_a", "only A has", &self.only_a),
            ("only_b", "only B has", &self.only_b),
            ("neither", "neither has", &self.neither),
            ("different_references", "another reference in B", &self.different),
            ("not_in_reference", "not in the reference", &self.unknown),
        ]
    }
}

/// Matches utterances by their names: whole paths, or where these differ throughout, names of files.
fn matched(mut a: Vec<Pair>, mut b: Vec<Pair>) -> Matched {
    let names: HashSet<&str> = b.iter().map(|pair| pair.name.as_str()).collect();
    if !a.iter().any(|pair| names.contains(pair.name.as_str())) {
        let is_unique = |pairs: &[Pair]| {
            let mut names = HashSet::new();
            pairs
                .iter()
                .all(|pair| !pair.short.is_empty() && names.insert(pair.short.as_str()))
        };
        let shorts: HashSet<&str> = b.iter().map(|pair| pair.short.as_str()).collect();
        let meet = a.iter().any(|pair| shorts.contains(pair.short.as_str()));
        if meet && is_unique(&a) && is_unique(&b) {
            for pair in a.iter_mut().chain(&mut b) {
                pair.name.clone_from(&pair.short);
            }
        }
    }
    let mut b: BTreeMap<String, Pair> = b.into_iter().map(|pair| (pair.name.clone(), pair)).collect();
    let mut matched = Matched::default();
    let text = |pair: &Pair| split_tag(&pair.reference).1.trim().to_owned();
    for a in a {
        match (b.remove(&a.name), a.is_missing) {
            (Some(b), true) if b.is_missing => matched.neither.push(a.name),
            (Some(_), true) => matched.only_b.push(a.name),
            (None, true) => matched.neither.push(a.name),
            (Some(b), false) if b.is_missing => matched.only_a.push(a.name),
            (None, false) => matched.only_a.push(a.name),
            (Some(b), false) if text(&a) != text(&b) => matched.different.push(a.name),
            (Some(b), false) => matched.pairs.push((a, b)),
        }
    }
    for (name, pair) in b {
        match pair.is_missing {
            true => matched.neither.push(name),
            false => matched.only_b.push(name),
        }
    }
    matched
}

/// A group of utterances.
#[derive(Clone, Debug, Default)]
struct Group {
    a: Score,
    b: Score,
    intervals: Option<(Intervals, Intervals)>,
    differences: Option<[Difference; RATES]>,
}

impl Group {
    /// The counts of a rate, of A and of B.
    fn edits(&self, rate: usize) -> [&EditCounts; 2] {
        [&self.a, &self.b].map(|score| match rate {
            0 => &score.words,
            1 => &score.characters,
            2 => &score.normalized_words,
            _ => &score.normalized_characters,
        })
    }
}

/// Groups of utterances by name.
type Groups = BTreeMap<String, Group>;

struct Compared {
    overall: Group,
    /// What is compared by, and its groups: the language, then columns.
    by: Vec<(String, Groups)>,
    is_normalized: bool,
}

impl Compared {
    fn new(pairs: &[(Pair, Pair)], arguments: &EvaluateCompareArguments, normalizer: &Normalizer) -> Self {
        let mut compared = Compared {
            overall: Group::default(),
            by: vec![(LANGUAGE.to_owned(), Groups::new())],
            is_normalized: normalizer.is_given(),
        };
        // Where a column is called as the language, it has a grouping of its own.
        compared
            .by
            .extend(arguments.by.iter().map(|column| (column.clone(), Groups::new())));
        let groupings: Vec<String> = (0..compared.by.len()).map(|place| place.to_string()).collect();
        let mut clusters = Clusters::<{ 2 * RATES }>::default();
        for (a, b) in pairs {
            let lang = language(a);
            let scored = |pair: &Pair| score_with(&a.reference, &pair.hypothesis, &lang, normalizer);
            let scores = [scored(a), scored(b)];
            let column = |column: &String| a.columns.get(column).map_or("", String::as_str);
            let names = [lang.as_str()].into_iter().chain(arguments.by.iter().map(column));
            let names: Vec<&str> = names.collect();
            add(&mut compared.overall, &scores, a.seconds);
            for ((_, groups), name) in compared.by.iter_mut().zip(&names) {
                add(groups.entry((*name).to_owned()).or_default(), &scores, a.seconds);
            }
            let [of_a, of_b] = scores.map(|score| ratios(&score));
            let both: [Ratio; 2 * RATES] = std::array::from_fn(|place| match place < RATES {
                true => of_a[place],
                false => of_b[place - RATES],
            });
            let groups = groupings.iter().map(String::as_str).zip(names);
            let groups = [("all", "")].into_iter().chain(groups);
            clusters.add(&cluster(a, &arguments.draw), groups, &both);
        }
        let resampling = Resampling {
            resamples: arguments.resamples as usize,
            seed: arguments.draw.seed,
        };
        let resample = |group: &mut Group, clusters: &[[Ratio; 2 * RATES]]| {
            let (intervals, differences) = resampling.compared(clusters);
            group.intervals = Some(intervals);
            group.differences = Some(differences);
        };
        resample(&mut compared.overall, &clusters.of("all", ""));
        for (grouping, (_, groups)) in groupings.iter().zip(&mut compared.by) {
            for (name, group) in groups {
                resample(group, &clusters.of(grouping, name));
            }
        }
        compared
    }

    /// How many of the rates there are.
    fn rates(&self) -> usize {
        if self.is_normalized { RATES } else { RATES / 2 }
    }

    fn lines(&self, matched: &Matched, arguments: &EvaluateCompareArguments) -> Vec<String> {
        let clusters = self.overall.intervals.map_or(0, |(a, _)| a.clusters as u64);
        let drawn = match &arguments.draw.cluster {
            None => plural(clusters, "recording"),
            Some(column) => format!("{} by `{column}`", plural(clusters, "group")),
        };
        let mut shown = vec![
            format!("A: {}", escape_line(&arguments.a.to_string_lossy())),
            format!("B: {}", escape_line(&arguments.b.to_string_lossy())),
            format!(
                "{} of {drawn}; {} of the bootstrap, seed {}",
                plural(matched.pairs.len() as u64, "utterance"),
                plural(u64::from(arguments.resamples), "resample"),
                arguments.draw.seed
            ),
        ];
        for (_, what, names) in matched.left_out() {
            if !names.is_empty() {
                let utterances = plural(names.len() as u64, "utterance");
                shown.push(format!(
                    "not compared: {utterances} ({what}): {}",
                    escape_line(&named(names))
                ));
            }
        }
        for (number, (_, title)) in NAMES.into_iter().enumerate().take(self.rates()) {
            for (by, groups) in &self.by {
                let is_language = by == LANGUAGE;
                // A single group is the whole.
                let each = groups.iter().filter(|_| !is_language || groups.len() > 1);
                let each = each.map(|(name, group)| (if name.is_empty() { "none" } else { name.as_str() }, group));
                let all = is_language.then_some(("all", &self.overall));
                let head = [by.as_str(), "A", "B", "B - A", "95 %", "p", "units", "utterances"];
                let mut rows = vec![head.map(str::to_owned).to_vec()];
                rows.extend(each.chain(all).map(|(name, group)| cells(name, group, number)));
                shown.push(String::new());
                shown.push(title.to_owned());
                shown.extend(lines(&rows));
            }
        }
        shown
    }

    fn document(&self, matched: &Matched, arguments: &EvaluateCompareArguments) -> Value {
        let figures = |group: &Group| {
            let mut figures = json!({
                "utterances": group.a.utterances,
                "clusters": group.intervals.map(|(a, _)| a.clusters),
            });
            for (number, (name, _)) in NAMES.into_iter().enumerate().take(self.rates()) {
                let [a, b] = group.edits(number).map(edits);
                let difference = group.differences.map(|differences| differences[number]);
                let test = difference.and_then(|difference| difference.test);
                figures[name] = json!({
                    "a": a,
                    "b": b,
                    "a_interval": group.intervals.and_then(|(a, _)| a.rates[number]),
                    "b_interval": group.intervals.and_then(|(_, b)| b.rates[number]),
                    "difference": difference.map(|one| one.difference).filter(|one| one.is_finite()),
                    "interval": test.map(|test| test.interval),
                    "p": test.map(|test| test.p),
                });
            }
            figures
        };
        let all = |groups: &Groups| -> Value {
            let each = groups.iter().map(|(name, group)| (name.clone(), figures(group)));
            Value::Object(each.collect())
        };
        let mut document = json!({
            "a": arguments.a.to_string_lossy(),
            "b": arguments.b.to_string_lossy(),
            "resamples": arguments.resamples,
            "seed": arguments.draw.seed,
            "overall": figures(&self.overall),
            "not_compared": {},
        });
        for (key, _, names) in matched.left_out() {
            document["not_compared"][key] = json!({ "utterances": names.len(), "names": names });
        }
        document["languages"] = all(&self.by[0].1);
        let columns = self.by[1..]
            .iter()
            .map(|(column, groups)| (column.clone(), all(groups)));
        document["columns"] = Value::Object(columns.collect());
        document
    }
}

fn add(group: &mut Group, scores: &[UtteranceScore; 2], seconds: f64) {
    group.a.add(&scores[0], seconds);
    group.b.add(&scores[1], seconds);
}

fn cells(name: &str, group: &Group, number: usize) -> Vec<String> {
    let [a, b] = group.edits(number);
    let difference = group.differences.map(|differences| differences[number]);
    let test = difference.and_then(|difference| difference.test);
    let points = |share: f64| format!("{:+.2}", 100.0 * share);
    let difference = difference.map(|one| one.difference).filter(|one| one.is_finite());
    let none = || "-".to_owned();
    vec![
        name.to_owned(),
        rate(a),
        rate(b),
        difference.map_or_else(none, points),
        test.map_or_else(none, |test| {
            format!("{} to {}", points(test.interval.0), points(test.interval.1))
        }),
        test.map_or_else(none, |test| format!("{:.4}", test.p)),
        count(a.units),
        count(group.a.utterances),
    ]
}

#[cfg(test)]
mod tests {
    use std::fs;

    use clap::{Args, Command, FromArgMatches};

    use super::*;

    /// What the command prints, in a folder of files, whose name is left out.
    fn printed(files: &[(&str, String)], arguments: &[&str]) -> Result<String, String> {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(folder.path().join(name), text).unwrap();
        }
        let given = arguments.iter().map(|argument| match argument.contains('.') {
            true => folder.path().join(argument).display().to_string(),
            false => (*argument).to_owned(),
        });
        let command = EvaluateCompareArguments::augment_args(Command::new("compare").no_binary_name(true));
        let matches = command.try_get_matches_from(given).map_err(|error| error.to_string())?;
        let arguments = EvaluateCompareArguments::from_arg_matches(&matches).map_err(|error| error.to_string())?;
        let mut out = Vec::new();
        compare(&Storage::default(), &arguments, &mut out).map_err(|error| error.to_string())?;
        let place = format!("{}/", folder.path().display());
        Ok(String::from_utf8(out).unwrap().replace(&place, ""))
    }

    /// Sixty utterances of twenty recordings; B misses a word in each third one, A in each second one, of the first ones both.
    fn results(folder: &str) -> [String; 2] {
        let line = |number: usize, heard: &str| {
            let lang = if number.is_multiple_of(3) { "hi" } else { "en" };
            let (recording, speaker) = (number / 3, number % 4);
            format!(
                "{{\"audio_filepath\": \"{folder}/{recording}.wav\", \"offset\": {number}, \"duration\": 1, \"lang\": \"{lang}\", \
                 \"speaker\": {speaker}, \"text\": \"One two, three four.\", \"pred_text\": \"{heard}\"}}\n"
            )
        };
        let a = (0..60).map(|number| {
            line(
                number,
                if number % 2 == 0 {
                    "one two three"
                } else {
                    "One two, three four."
                },
            )
        });
        let b = (0..60).map(|number| {
            line(
                number,
                if number % 3 == 0 {
                    "One two, four."
                } else {
                    "one two, three four"
                },
            )
        });
        [a.collect(), b.collect()]
    }

    #[test]
    fn a_table_tells_both_rates_and_how_sure_their_difference_is() {
        let [mut a, mut b] = results("x");
        a += "{\"audio_filepath\": \"x/99.wav\", \"text\": \"one\", \"pred_text\": \"one\"}\n";
        b += "{\"audio_filepath\": \"x/98.wav\", \"text\": \"one\", \"pred_text\": \"one\"}\n";
        for (name, text) in [("97", "one"), ("96", "two")] {
            a += &format!("{{\"audio_filepath\": \"x/{name}.wav\", \"text\": \"one\", \"pred_text\": \"one\"}}\n");
            b += &format!("{{\"audio_filepath\": \"x/{name}.wav\", \"text\": \"{text}\", \"pred_text\": \"one\"}}\n");
        }
        let files = [("a.jsonl", a), ("b.jsonl", b)];
        let shown = printed(
            &files,
            &[
                "a.jsonl",
                "b.jsonl",
                "--normalize",
                "by_language",
                "--by",
                "speaker",
                "--resamples",
                "2000",
            ],
        );
        insta::assert_snapshot!(shown.unwrap());
    }

    #[test]
    fn identical_results_do_not_differ_and_the_order_of_lines_has_no_influence() {
        let [a, b] = results("x");
        let json = |files: &[(&str, String)]| -> Value {
            let shown = printed(files, &["a.jsonl", "b.jsonl", "--format", "json", "--resamples", "500"]);
            serde_json::from_str(&shown.unwrap()).unwrap()
        };
        let same = json(&[("a.jsonl", a.clone()), ("b.jsonl", a.clone())]);
        for figures in [&same["overall"], &same["languages"]["hi"]] {
            for rate in ["wer", "cer"] {
                let figures = &figures[rate];
                assert_eq!((&figures["difference"], &figures["p"]), (&json!(0.0), &json!(1.0)));
                assert_eq!(figures["interval"], json!([0.0, 0.0]));
                assert_eq!(figures["a_interval"], figures["b_interval"]);
            }
        }
        let forward = json(&[("a.jsonl", a.clone()), ("b.jsonl", b.clone())]);
        let reversed = |text: &str| {
            let mut lines: Vec<&str> = text.lines().collect();
            lines.reverse();
            lines.join("\n")
        };
        assert_eq!(json(&[("a.jsonl", reversed(&a)), ("b.jsonl", b.clone())]), forward);
        assert_eq!(forward["overall"]["clusters"], 20);
        // Changed about, the difference has the other sign.
        let back = json(&[("a.jsonl", b), ("b.jsonl", a)]);
        let difference = |document: &Value| document["overall"]["wer"]["difference"].as_f64().unwrap();
        assert_eq!(difference(&back), -difference(&forward));
        assert_eq!(back["overall"]["wer"]["p"], forward["overall"]["wer"]["p"]);
    }

    #[test]
    fn rows_of_one_result_alone_are_named() {
        let reference = "a one two\nb three\nc four\nd five\n".to_owned();
        let files = [
            ("r.txt", reference),
            ("a.txt", "a one two\nb three\n".to_owned()),
            ("b.txt", "a one too\nc four\ne six\n".to_owned()),
        ];
        let arguments = ["--ids", "--reference", "r.txt", "a.txt", "b.txt", "--json"];
        let document: Value = serde_json::from_str(&printed(&files, &arguments).unwrap()).unwrap();
        let names = |key: &str| document["not_compared"][key]["names"].clone();
        assert_eq!(names("only_a"), json!(["b"]));
        assert_eq!(names("only_b"), json!(["c"]));
        assert_eq!(names("neither"), json!(["d"]));
        assert_eq!(names("not_in_reference"), json!(["e"]));
        let overall = &document["overall"];
        assert_eq!(
            (&overall["utterances"], &overall["wer"]["p"]),
            (&json!(1), &Value::Null)
        );
        assert_eq!(overall["wer"]["difference"], json!(0.5));
        // Whole paths differ, names of files do not.
        let [a, _] = results("x");
        let [_, b] = results("/elsewhere");
        let shown = printed(&[("a.jsonl", a.clone()), ("b.jsonl", b)], &["a.jsonl", "b.jsonl"]).unwrap();
        assert!(
            shown.contains("60 utterances of 20 recordings") && !shown.contains("not compared"),
            "{shown}"
        );
        // Nothing in common, the same name twice, an unknown column.
        let other = "{\"audio_filepath\": \"z.wav\", \"text\": \"one\", \"pred_text\": \"one\"}\n".to_owned();
        let files = [
            ("a.jsonl", a.clone()),
            ("b.jsonl", other.clone()),
            ("c.jsonl", other.repeat(2)),
        ];
        for (arguments, said) in [
            (
                &["a.jsonl", "b.jsonl"][..],
                "no utterance with the same name and reference; only A has: x/0.wav",
            ),
            (&["b.jsonl", "c.jsonl"], "two lines are of z.wav"),
            (
                &["a.jsonl", "a.jsonl", "--by", "gender"],
                "no utterance of the reference has `gender`",
            ),
            (&["a.jsonl", "a.jsonl", "--resamples", "0"], "0 is not in 1..=1000000"),
        ] {
            let error = printed(&files, arguments).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }
}
