use std::path::PathBuf;

use flow_kind::Storage;
use proptest::prelude::*;

use super::*;
use crate::test_data::parity_golden;

const SHIPPED: [&str; 13] = [
    "as", "bn", "en", "gu", "hi", "kn", "ml", "mr", "or", "pa", "ta", "te", "ur",
];

fn folder() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/speech"))
}

fn drawn(language: &Language, choice: &Choice<'_>, seed: u64, count: usize) -> Vec<String> {
    let mut random = Random::of(seed, &[&language.name]);
    (0..count)
        .map(|_| language.draw(&mut random, choice).unwrap())
        .collect()
}

/// First and last code point of the letters that a language is written with.
fn letters_of(name: &str) -> (u32, u32) {
    match name {
        "en" => (0x61, 0x7a),
        "hi" | "mr" => (0x0900, 0x097f),
        "bn" | "as" => (0x0980, 0x09ff),
        "pa" => (0x0a00, 0x0a7f),
        "gu" => (0x0a80, 0x0aff),
        "or" => (0x0b00, 0x0b7f),
        "ta" => (0x0b80, 0x0bff),
        "te" => (0x0c00, 0x0c7f),
        "kn" => (0x0c80, 0x0cff),
        "ml" => (0x0d00, 0x0d7f),
        "ur" => (0x0600, 0x06ff),
        other => panic!("no letters known of {other}"),
    }
}

#[test]
fn every_shipped_language_gives_thousands_of_sentences_in_its_own_letters() {
    let none = Excluded::default();
    let choice = Choice {
        side: Side::Train,
        held_out: 0.0,
        excluded: &none,
    };
    let mut files: Vec<String> = std::fs::read_dir(folder())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    assert_eq!(files, SHIPPED.map(|name| format!("{name}.yaml")));
    for name in SHIPPED {
        let language = Language::read(&folder(), name).unwrap();
        let count: usize = language.words().map(|(_, words)| words.len()).sum();
        assert!((110..=260).contains(&count), "{name} has {count} words");
        assert!(
            (15..=30).contains(&language.template_count()),
            "{name}: {} templates",
            language.template_count()
        );
        let (first, last) = letters_of(name);
        let sentences = drawn(&language, &choice, 1, 4_000);
        for sentence in &sentences {
            let words = sentence.split(' ').count();
            assert!((2..=12).contains(&words), "{name}: {sentence:?} has {words} words");
            for c in sentence
                .chars()
                .filter(|c| !matches!(c, ' ' | '\'' | '\u{200c}' | '\u{200d}'))
            {
                assert!((first..=last).contains(&u32::from(c)), "{name}: {c:?} in {sentence:?}");
            }
        }
        // Every template fills, with every class there is: none is idle.
        let mut random = Random::of(2, &[name]);
        for template in &language.templates {
            let sentence = language.fill(template, &mut random);
            assert!(
                !sentence.is_empty() && !sentence.contains(['{', '}']),
                "{name}: {sentence:?}"
            );
        }
        let used: BTreeSet<&str> = language
            .templates
            .iter()
            .flatten()
            .filter_map(|part| match part {
                Part::Class(class) => Some(class.as_str()),
                Part::Words(_) => None,
            })
            .chain(
                language
                    .file
                    .sequences
                    .iter()
                    .flat_map(|sequence| sequence.of.iter().map(String::as_str)),
            )
            .collect();
        let classes: BTreeSet<&str> = language.words().map(|(class, _)| class).collect();
        assert_eq!(used, classes, "{name}");
        let different: BTreeSet<&String> = sentences.iter().collect();
        assert!(
            different.len() > 3_000,
            "{name}: {} different of 4,000",
            different.len()
        );
    }
}

#[test]
fn sentences_are_the_same_again_and_none_is_excluded_or_on_both_sides() {
    let mut excluded = Excluded::default();
    excluded
        .read(&Storage::default(), &parity_golden("mini").join("manifest_v1.parquet"))
        .unwrap();
    let side = |side, held_out| Choice {
        side,
        held_out,
        excluded: &excluded,
    };
    let (mut met, mut without) = (0, 0);
    for name in SHIPPED {
        let language = Language::read(&folder(), name).unwrap();
        let train = drawn(&language, &side(Side::Train, 10.0), 7, 3_000);
        assert_eq!(train, drawn(&language, &side(Side::Train, 10.0), 7, 3_000));
        assert_ne!(train, drawn(&language, &side(Side::Train, 10.0), 8, 3_000));
        let val = drawn(&language, &side(Side::Val, 10.0), 7, 300);
        let normal = |sentences: &[String]| -> BTreeSet<String> { sentences.iter().map(|s| normal_words(s)).collect() };
        let (train, val) = (normal(&train), normal(&val));
        assert!(train.is_disjoint(&val), "{name}");
        assert!(
            train.iter().chain(&val).all(|sentence| !excluded.holds(sentence)),
            "{name}"
        );
        // The exclusion matters: without it, sentences of the manifest do come.
        let none = Excluded::default();
        let free = Choice {
            side: Side::Train,
            held_out: 0.0,
            excluded: &none,
        };
        let sentences = drawn(&language, &free, 7, 3_000);
        met += sentences.iter().filter(|s| excluded.holds(&normal_words(s))).count();
        without += sentences.len();
    }
    assert!(met > 0, "no sentence of mini among {without}");
    // Of all sentences, the asked share is held out.
    let none = Excluded::default();
    let choice = Choice {
        side: Side::Val,
        held_out: 10.0,
        excluded: &none,
    };
    let held_out = (0..20_000).filter(|n| choice.allows(&format!("sentence {n}"))).count();
    assert!((1_850..2_150).contains(&held_out), "{held_out} of 20,000");
}

#[test]
fn a_share_of_the_words_is_invented() {
    let none = Excluded::default();
    let free = Choice {
        side: Side::Train,
        held_out: 0.0,
        excluded: &none,
    };
    for name in SHIPPED {
        let language = Language::read(&folder(), name).unwrap();
        let known: BTreeSet<String> = language
            .words()
            .flat_map(|(_, words)| words.to_vec())
            .flat_map(|words| words.split(' ').map(str::to_owned).collect::<Vec<_>>())
            .collect();
        let without = drawn(&language, &free, 7, 500);
        assert_eq!(without, drawn(&language.clone().with_invented(0.0), &free, 7, 500));
        let sentences = drawn(&language.clone().with_invented(0.5), &free, 7, 500);
        let in_templates: BTreeSet<&str> = without.iter().flat_map(|sentence| sentence.split(' ')).collect();
        let words: Vec<&str> = sentences.iter().flat_map(|sentence| sentence.split(' ')).collect();
        let new: BTreeSet<&str> = words
            .iter()
            .copied()
            .filter(|word| !known.contains(*word) && !in_templates.contains(word))
            .collect();
        let count = words.iter().filter(|word| new.contains(*word)).count();
        // Templates have words of their own, and some invented ones come twice.
        assert!(
            count > words.len() / 6 && new.len() > 200,
            "{name}: {count} of {}",
            words.len()
        );
        assert!(new.iter().all(|word| check_words(word).is_ok()), "{name}: {new:?}");
    }
}

#[test]
fn where_no_sentence_is_left_there_is_none() {
    let text = "voice: en\nwords: {a: [one, two]}\nsequences: [{of: [a], length: [1, 1], share: 1}]";
    let language = Language::parse("en", text).unwrap();
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("all.jsonl");
    std::fs::write(&path, "{\"text\": \"One.\"}\n{\"text\": \"<|en|> two\"}\n").unwrap();
    let mut excluded = Excluded::default();
    excluded.read(&Storage::default(), &path).unwrap();
    let choice = Choice {
        side: Side::Train,
        held_out: 0.0,
        excluded: &excluded,
    };
    assert_eq!(language.draw(&mut Random::of(1, &[]), &choice), None);
}

#[test]
fn mistakes_are_named_with_their_place() {
    let with = |templates: &str, words: &str| {
        format!("voice: hi\nwords:\n  number: [एक, दो]\n{words}templates:\n  - \"{{number}} {{number}}\"\n{templates}")
    };
    for (text, expected) in [
        (
            with("  - \"{nummer} घर\"\n", ""),
            "templates[1] (line 6): no class is named `nummer`; there are number",
        ),
        (
            with("  - \"{number}घर\"\n", ""),
            "templates[1] (line 6): \"{number}घर\" is neither a word nor a place",
        ),
        (
            with("  - \"घर। {number}\"\n", ""),
            "templates[1] (line 6): \"घर।\" has the character '।'",
        ),
        (with("  - \"\"\n", ""), "templates[1]: it is empty"),
        (with("", "  noun: []\n"), "words.noun: has no words"),
        (
            with("", "  noun: [घर, घर]\n"),
            "words.noun[1] (line 4): \"घर\" appears twice",
        ),
        (
            with("", "  noun: [\"[[a]]\"]\n"),
            "words.noun[0] (line 4): \"[[a]]\" has the character '['",
        ),
        (with("", "  noun: [\" घर\"]\n"), "white space around it"),
        (with("", "  noun: [\"-\"]\n"), "has no letter"),
        (with("", "  Noun: [घर]\n"), "the class \"Noun\""),
        (with("", "  noun: 3\n"), "words.noun: invalid type"),
        (with("", "others: 1\n"), "unknown field `others`"),
        (
            with("sequences: [{of: [verb], length: [1, 2], share: 0.1}]\n", ""),
            "sequences[0].of: no class is named `verb`",
        ),
        (
            with("sequences: [{of: [], length: [1, 2], share: 0.1}]\n", ""),
            "sequences[0].of: names no class",
        ),
        (
            with("sequences: [{of: [number], length: [3, 2], share: 0.1}]\n", ""),
            "sequences[0].length: [3, 2]",
        ),
        (
            with("sequences: [{of: [number], length: [1, 2], share: .nan}]\n", ""),
            "sequences[0].share: NaN",
        ),
        (
            with(
                "sequences: [{of: [number], length: [1, 2], share: 0.6}, {of: [number], length: [1, 2], share: 0.6}]\n",
                "",
            ),
            "add up to 1.2",
        ),
        (
            "voice: \"hi; rm\"\nwords: {}\n".into(),
            "voice: \"hi; rm\" is not a name of a voice",
        ),
        ("voice: hi\nwords: {}\n".into(), "templates: there are none"),
        ("voice: hi\nwords: {a: [b\n".into(), "line"),
        (String::new(), "missing field"),
    ] {
        let message = Language::parse("hi", &text).unwrap_err();
        assert!(
            message.contains(expected),
            "{expected:?} is not in {message:?}, for\n{text}"
        );
    }
    let temp = tempfile::tempdir().unwrap();
    std::fs::write(temp.path().join("hi.yaml"), "voice: 3").unwrap();
    let message = Language::read(temp.path(), "hi").unwrap_err().to_string();
    assert!(message.contains("hi.yaml: "), "{message}");
    std::fs::write(temp.path().join("big.yaml"), vec![b'#'; (1 << 20) + 1]).unwrap();
    assert!(
        Language::read(temp.path(), "big")
            .unwrap_err()
            .to_string()
            .contains("larger than 1 MiB")
    );
}

proptest! {
    /// Whatever a file holds, reading it gives a language whose sentences are words, or a message.
    #[test]
    fn no_file_does_harm(
        cut in 0usize..4_000,
        put in "[\\[\\]{}:,\"'#&*!|>%@`~ \\n\\ta-z0-9.अ-ह।-]{0,12}",
        drop in 0usize..40,
    ) {
        let text = std::fs::read_to_string(folder().join("hi.yaml")).unwrap();
        let mut chars: Vec<char> = text.chars().collect();
        let at = cut.min(chars.len());
        let end = (at + drop).min(chars.len());
        chars.splice(at..end, put.chars());
        let text: String = chars.into_iter().collect();
        match Language::parse("hi", &text) {
            Ok(language) => {
                let none = Excluded::default();
                let choice = Choice { side: Side::Train, held_out: 0.0, excluded: &none };
                let sentence = language.draw(&mut Random::of(1, &[]), &choice).unwrap();
                prop_assert!(!normal_words(&sentence).is_empty());
                prop_assert!(!sentence.contains(['[', ']', '<', '>', '{', '}', '\n']), "{}", sentence);
            }
            Err(message) => prop_assert!(!message.is_empty()),
        }
    }

    /// Whatever words and templates say, an error names the place where they stand.
    #[test]
    fn wrong_words_are_named(word in "\\PC{0,6}", number in 0usize..3) {
        let mut words = ["एक".to_owned(), "दो".to_owned(), "तीन".to_owned()];
        words[number] = word;
        let quoted: Vec<String> = words.iter().map(|word| serde_json::to_string(word).unwrap()).collect();
        let text = format!("voice: hi\nwords: {{a: [{}]}}\ntemplates: [\"{{a}} {{a}}\"]\n", quoted.join(", "));
        if let Err(message) = Language::parse("hi", &text) {
            prop_assert!(message.contains("words.a[") || message.contains("line"), "{}", message);
        }
    }
}
