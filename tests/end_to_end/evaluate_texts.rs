//! `flow evaluate texts`: what other systems wrote is scored.

use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::binary::{expect_code, program, stderr};

fn evaluate(folder: &Path, arguments: &[&str]) -> Output {
    let mut flow = program();
    flow.current_dir(folder).args(["evaluate", "texts"]).args(arguments);
    flow.output().unwrap()
}

fn scores(folder: &Path, arguments: &[&str]) -> Value {
    let output = evaluate(folder, &[&["--json"], arguments].concat());
    expect_code(&output, 0);
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Substitutions, insertions and deletions of words, and words of the reference.
fn words(scores: &Value) -> [u64; 4] {
    ["substitutions", "insertions", "deletions", "total"].map(|key| scores["wer"][key].as_u64().unwrap())
}

#[test]
fn texts_of_every_form_are_scored() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
    // One substitution, one insertion and one deletion in seven words.
    write(
        "both.json",
        "\u{feff}{\"audio_filepath\": \"a.wav\", \"duration\": NaN, \"text\": \"one two three\", \"pred_text\": \"one too three\", \"lang\": \"en\"}\n\
         {\"audio_filepath\": \"b.wav\", \"text\": \"eins zwei\", \"pred_text\": \"eins zwei drei\", \"lang\": \"de\"}\n\
         {\"audio_filepath\": \"b.wav\", \"offset\": 2.5, \"text\": \"vier fünf\", \"pred_text\": \"vier\", \"lang\": \"DE-at\"}\n",
    );
    let expected = [1, 1, 1, 7];
    let both = scores(folder, &["both.json", "--worst", "1"]);
    assert_eq!(words(&both), expected);
    assert_eq!(both["languages"]["en"]["wer"]["substitutions"], 1);
    assert_eq!(both["languages"]["de"]["utterances"], 2);
    assert_eq!(both["utterances"], 3);
    assert_eq!(both["worst"].as_array().unwrap().len(), 1);
    write(
        "reference.jsonl",
        "{\"audio_filepath\": \"clips/a.wav\", \"text\": \"one two three\"}\n{\"audio_filepath\": \"clips/b.wav\", \"text\": \"eins zwei\"}\n\
         {\"audio_filepath\": \"clips/b.wav\", \"offset\": 2.5, \"text\": \"vier fünf\"}\n",
    );
    // In another order, with whole paths.
    write(
        "heard.jsonl",
        "{\"audio_filepath\": \"/data/clips/b.wav\", \"offset\": 2.5, \"text\": \"vier fünf\", \"pred_text\": \"vier\"}\n\
         {\"audio_filepath\": \"/data/clips/a.wav\", \"pred_text\": \"one too three\"}\n{\"audio_filepath\": \"/data/clips/b.wav\", \"text\": \"eins zwei drei\"}\n",
    );
    // `file_name` beside NeMo's key says something else, and a text may begin with a brace.
    write(
        "named.jsonl",
        "{\"audio_filepath\": \"a.wav\", \"file_name\": \"1\", \"text\": \"one two three\"}\n\
         {\"audio_filepath\": \"b.wav\", \"file_name\": \"2\", \"text\": \"eins zwei vier fünf\"}\n",
    );
    write("braces.txt", "{one} two three\neins zwei\nvier fünf\n");
    write("reference.txt", "one two three\neins zwei\nvier fünf\n");
    write("heard.txt", "one too three\neins zwei drei\nvier\n");
    write("text", "a one two three\nb eins zwei\nc vier fünf\n");
    write("heard", "c vier\nb eins zwei drei\na one too three\n");
    write("reference.trn", "one two three (a)\neins zwei (b)\nvier fünf (c)\n");
    write("heard.trn", "vier (c)\neins zwei drei (b)\none too three (a)\n");
    write(
        "r.stm",
        ";; a comment\na 1 x 0 3 <o,f0,female> one two three\nb 1 x 0 2 eins zwei\nb 1 x 2.5 5 vier fünf\n",
    );
    write(
        "h.ctm",
        "a 1 0.1 0.5 one 0.9\na 1 1.0 0.5 too\na 1 2.0 0.5 three\nb 1 1.9 0.5 drei\nb 1 0 0.5 eins\nb 1 0.6 0.5 zwei\nb 1 2.6 0.3 vier\n",
    );
    // Whose rows are not in the order of time.
    write(
        "mixed.jsonl",
        "{\"path\": \"b.wav\", \"start\": 2.5, \"sentence\": \"vier fünf\"}\n{\"path\": \"b.wav\", \"sentence\": \"eins zwei\"}\n\
         {\"path\": \"a.wav\", \"sentence\": \"one two three\"}\n",
    );
    for arguments in [
        &["reference.jsonl", "heard.jsonl"][..],
        &["mixed.jsonl", "heard.jsonl"],
        &["mixed.jsonl", "h.ctm"],
        &["r.stm", "heard.jsonl"],
        &["reference.txt", "heard.txt"],
        &["reference.jsonl", "heard.txt"],
        &["--ids", "text", "heard"],
        &["reference.trn", "heard.trn"],
        &["--ids", "text", "heard.trn"],
        &["r.stm", "h.ctm"],
        &["reference.jsonl", "h.ctm"],
        &["named.jsonl", "h.ctm"],
    ] {
        assert_eq!(words(&scores(folder, arguments)), expected, "{arguments:?}");
    }
    assert_eq!(words(&scores(folder, &["braces.txt", "heard.txt"])), [2, 1, 1, 7]);
    let table = evaluate(folder, &["both.json", "--normalize", "keep_marks", "--worst", "1"]);
    let table = String::from_utf8(table.stdout).unwrap();
    for said in ["normalised WER", "42.86 %", "hypothesis: one too three", "\nde "] {
        assert!(table.contains(said), "{table}");
    }
}

#[test]
fn what_cannot_be_paired_is_told() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
    write("two.txt", "one\ntwo\n");
    write("one.txt", "one\n");
    write(
        "a.jsonl",
        "{\"audio_filepath\": \"a.wav\", \"text\": \"one\"}\n{\"audio_filepath\": \"b.wav\", \"text\": \"two\"}\n",
    );
    write(
        "b.jsonl",
        "{\"audio_filepath\": \"a.wav\", \"text\": \"one\"}\n{\"audio_filepath\": \"c.wav\", \"text\": \"two\"}\n",
    );
    write("c.jsonl", "{\"audio_filepath\": \"x.wav\", \"text\": \"one\"}\n");
    write(
        "twice.jsonl",
        "{\"audio_filepath\": \"a.wav\", \"text\": \"one\"}\n{\"audio_filepath\": \"a.wav\", \"text\": \"two\"}\n",
    );
    write(
        "folders.jsonl",
        "{\"audio_filepath\": \"x/a.wav\", \"text\": \"one\"}\n{\"audio_filepath\": \"y/a.wav\", \"text\": \"two\"}\n",
    );
    write("bad.ctm", "a 1 x 0.5 one\n");
    write("channels.ctm", ";; a comment\na 1 0 0.5 one\na 2 0 0.5 two\n");
    write("channels.stm", "a A x 0 3 one\na B x 0 3 two\n");
    write("r.stm", "r 1 x 0 3 one\nr 1 x 3 4 two\n");
    write("h.ctm", "h 1 0 0.5 one\nh 1 1 0.5 two\n");
    write("nameless.jsonl", "{\"text\": \"one\"}\n");
    write("empty.txt", "");
    write(
        "mute.jsonl",
        "{\"audio_filepath\": \"a.wav\", \"text\": \"one\", \"pred_text\": null}\n{\"audio_filepath\": \"b.wav\", \"text\": \"two\", \"pred_text\": \"two\"}\n",
    );
    write(
        "other.jsonl",
        "{\"audio_filepath\": \"a.wav\", \"prediction\": \"one\"}\n",
    );
    write("brace.csv", "{\"a\": 1},text\n");
    write("table.csv", "audio_filepath,text\na.wav,one\n");
    write("a.srt", "1\n00:00:00,000 --> 00:00:01,000\none\n");
    write("array.json", "[{\"audio_filepath\": \"a.wav\", \"text\": \"one\"}]");
    for (arguments, said) in [
        (
            &["two.txt", "one.txt"][..],
            "the reference has 2 lines, the hypothesis 1",
        ),
        (&["two.txt"], "is not a manifest with both texts"),
        (&["a.jsonl"], "a.wav: there is no `pred_text`"),
        (&["a.jsonl", "c.jsonl"], "no utterance has the same name"),
        (&["a.jsonl", "twice.jsonl"], "two lines are of a.wav"),
        (&["a.jsonl", "bad.ctm"], "line 1: start is \"x\""),
        (&["a.jsonl", "channels.ctm"], "a has the channels 1 and 2"),
        (&["channels.stm", "h.ctm"], "a has the channels A and B"),
        (&["r.stm", "h.ctm"], "no utterance has the same name"),
        (
            &["nameless.jsonl", "a.jsonl"],
            "line 1 names neither its recording nor itself",
        ),
        (&["h.ctm", "twice.jsonl"], "two lines are of a.wav"),
        (&["h.ctm", "folders.jsonl"], "x/a.wav and y/a.wav both have the name a"),
        (&["folders.jsonl", "h.ctm"], "x/a.wav and y/a.wav both have the name a"),
        (&["brace.csv", "brace.csv"], "csv is not read here"),
        (&["empty.txt", "empty.txt"], "nothing to score"),
        (
            &["a.jsonl", "other.jsonl"],
            "other.jsonl: no line has `pred_text` or `text`",
        ),
        (&["one.txt", "two.txt"], "the reference has 1 line, the hypothesis 2"),
        (&["table.csv", "table.csv"], "csv is not read here"),
        (&["a.srt", "a.srt"], "srt is not read here"),
        (&["array.json"], "line 1 is not a JSON object"),
        (&["gone.txt", "one.txt"], "gone.txt"),
    ] {
        let output = evaluate(folder, arguments);
        expect_code(&output, 2);
        assert!(stderr(&output).contains(said), "{arguments:?}: {}", stderr(&output));
    }
    // Where nothing was heard, `text` is the reference and no hypothesis.
    let output = evaluate(folder, &["--json", "a.jsonl", "mute.jsonl"]);
    expect_code(&output, 0);
    assert!(
        stderr(&output).contains("the hypothesis has nothing of a.wav"),
        "{}",
        stderr(&output)
    );
    let mute: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(words(&mute), [0, 0, 1, 2]);
    let output = evaluate(folder, &["--json", "a.jsonl", "b.jsonl"]);
    expect_code(&output, 0);
    assert!(
        stderr(&output).contains("the hypothesis has nothing of b.wav"),
        "{}",
        stderr(&output)
    );
    assert!(
        stderr(&output).contains("the reference does not name c.wav"),
        "{}",
        stderr(&output)
    );
    let scores: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(words(&scores), [0, 0, 1, 2]);
}

#[test]
fn intervals_columns_and_groups_of_words_are_printed() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).unwrap();
    let line = |number: usize| {
        let heard = if number.is_multiple_of(3) {
            "my office in york"
        } else {
            "Mein office in New York"
        };
        format!(
            "{{\"audio_filepath\": \"{}.wav\", \"offset\": {number}, \"gender\": \"{}\", \"lang\": \"de\", \
             \"text\": \"<|de|> mein <|en|> office <|de|> in New York\", \"pred_text\": \"<|de|> {heard}\"}}\n",
            number / 2,
            if number.is_multiple_of(2) { "f" } else { "m" }
        )
    };
    write("both.jsonl", &(0..24).map(line).collect::<String>());
    write(
        "train.jsonl",
        &"{\"text\": \"mein in in\", \"locale\": \"de-DE\"}\n".repeat(5),
    );
    write("english.jsonl", "{\"text\": \"twenty five\", \"lang\": \"en-GB\"}\n");
    write(
        "said.jsonl",
        "{\"audio_filepath\": \"a.wav\", \"lang\": \"en\", \"text\": \"25\", \"pred_text\": \"25\"}\n",
    );
    write("names.txt", "New York\n\n");
    let arguments = [
        "both.jsonl",
        "--normalize",
        "keep_marks",
        "--by",
        "gender",
        "--resamples",
        "400",
        "--train",
        "train.jsonl",
        "--names",
        "names.txt",
        "--switches",
    ];
    // Texts of training are normalised as those of their language.
    let english = scores(
        folder,
        &["said.jsonl", "--normalize", "by_language", "--train", "english.jsonl"],
    );
    let ranges = english["rare_words"].as_array().unwrap();
    assert_eq!((ranges.len(), &ranges[0]["training_count"]), (1, &"1 to 9".into()));
    let scores = scores(folder, &arguments);
    assert_eq!(scores["clusters"], 12);
    let interval = &scores["normalized_wer"]["interval"];
    assert!(interval[0].as_f64().unwrap() < scores["normalized_wer"]["rate"].as_f64().unwrap());
    assert_eq!(scores["columns"]["gender"]["f"]["clusters"], 12);
    assert_eq!(
        (&scores["names"]["occurrences"], &scores["names"]["correct"]),
        (&24.into(), &16.into())
    );
    let ranges = scores["rare_words"].as_array().unwrap();
    let labels: Vec<&str> = ranges
        .iter()
        .map(|range| range["training_count"].as_str().unwrap())
        .collect();
    assert_eq!(labels, ["0", "1 to 9", "10 to 99"]);
    assert_eq!(scores["switches"]["points"]["total"], 48);
    let table = evaluate(folder, &arguments);
    let table = String::from_utf8(table.stdout).unwrap();
    for said in [
        "WER 95 %",
        "gender",
        "10 to 99 times in training",
        "16 of 24 names",
        "where script or language change",
    ] {
        assert!(table.contains(said), "{table}");
    }
    for (arguments, said) in [
        (
            &["both.jsonl", "--by", "age"][..],
            "no utterance of the reference has `age`",
        ),
        (
            &["both.jsonl", "--train", "train.jsonl", "--training-counts", "5,5"],
            "--training-counts",
        ),
        (&["both.jsonl", "--normalize-language", "de=german"], "german"),
        (&["both.jsonl", "--ascii-digits"], "`--ascii-digits` needs `indic`"),
        (&["both.jsonl", "--cluster", "gender"], "--cluster needs --resamples"),
    ] {
        let output = evaluate(folder, arguments);
        expect_code(&output, 2);
        assert!(stderr(&output).contains(said), "{arguments:?}: {}", stderr(&output));
    }
}
