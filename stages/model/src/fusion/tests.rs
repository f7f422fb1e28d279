use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::checkpoint::OpenModel;
use crate::tokenizer::Tokenizer;
use flow_nn::tensor_files::read_packed;

/// NeMo's scores are stored with seven digits.
const TOLERANCE: f64 = 1e-5;

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn golden(name: &str) -> PathBuf {
    std::env::var_os("FLOW_TEST_GOLDEN_TRANSCRIPTION")
        .map_or_else(|| root().join("tests/data/golden/transcription"), PathBuf::from)
        .join(name)
}

/// The tokenizer of the model that the golden data are of: `small.nemo` beside them, or else the bundled one.
fn golden_tokenizer() -> Tokenizer {
    let beside = golden("small.nemo");
    tokenizer(&if beside.is_file() { beside } else { bundled_model() })
}

fn bundled_model() -> PathBuf {
    root().join("configs/models/small.nemo")
}

fn tokenizer(model: &Path) -> Tokenizer {
    let opened = OpenModel::open(model).unwrap();
    Tokenizer::from_bytes(&opened.tokenizer.unwrap()).unwrap()
}

/// The golden language model, which may be compressed.
fn language_model() -> BackoffAcceptor {
    let arpa = read_packed(&golden("lm.arpa"), 1).unwrap();
    parse_arpa(&arpa[..], golden_tokenizer().vocabulary_size()).unwrap()
}

fn json(name: &str) -> Value {
    let path = golden(name);
    let bytes = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&bytes).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    serde_json::from_value(value.clone()).unwrap()
}

/// The scores of tokens one after the other, the second time from the scores of all tokens, and the last state.
fn walk(model: &BackoffAcceptor, mut state: u32, tokens: &[u32]) -> (Vec<f32>, u32) {
    let mut all = Vec::new();
    let scores = tokens.iter().map(|&token| {
        model.scores(state, &mut all);
        let (score, next) = model.step(state, token);
        assert_eq!(
            score.to_bits(),
            all[token as usize].to_bits(),
            "token {token} in state {state}"
        );
        state = next;
        score
    });
    (scores.collect(), state)
}

fn close(found: &[f32], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        let allowed = TOLERANCE * expected.abs().max(1.0);
        assert!(
            (f64::from(*found) - expected).abs() <= allowed,
            "{what}: {found} is not {expected}"
        );
    }
}

#[test]
fn language_model_scores_are_nemos() {
    let golden_scores = json("lm_scores.json");
    let model = language_model();
    for (number, sequence) in golden_scores["sequences"].as_array().unwrap().iter().enumerate() {
        let tokens = ids(&sequence["ids"]);
        let (with_bos, end) = walk(&model, model.initial(), &tokens);
        close(
            &[model.end(end)],
            &[sequence["eos"].as_f64().unwrap()],
            &format!("{number} end"),
        );
        if tokens.is_empty() {
            continue;
        }
        close(
            &with_bos,
            &numbers(&sequence["with_bos"]),
            &format!("{number} from the beginning"),
        );
        let (without, _) = walk(&model, model.start(), &tokens);
        close(
            &without,
            &numbers(&sequence["without_bos"]),
            &format!("{number} without history"),
        );
    }
    let sums = numbers(&golden_scores["sum_of_probabilities_after_bos_and_empty_history"]);
    for (state, sum) in [model.initial(), model.start()].into_iter().zip(sums) {
        let mut scores = Vec::new();
        model.scores(state, &mut scores);
        let found: f64 = scores.iter().map(|&score| f64::from(score).exp()).sum();
        assert!((found - sum).abs() < 1e-5, "{found} is not {sum}");
    }
}

#[test]
fn files_are_read_by_name() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("a.arpa");
    std::fs::write(&path, bigrams()).unwrap();
    assert_eq!(read_arpa(&path, 3).unwrap().vocabulary(), 3);
    let error = read_arpa(&path, 1).unwrap_err().to_string();
    assert!(error.contains("a.arpa: line 10: token 1 is not below 1"), "{error}");
    assert!(read_arpa(&place.path().join("gone.arpa"), 3).is_err());
    let pipe = place.path().join("pipe.arpa");
    assert!(
        std::process::Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    let error = read_arpa(&pipe, 3).unwrap_err().to_string();
    assert!(error.contains("not a regular file"), "{error}");
}

#[test]
fn boosting_scores_are_nemos() {
    let golden = json("boosting.json");
    let tokenizer = golden_tokenizer();
    let phrases: Vec<String> = serde_json::from_value(golden["phrases"].clone()).unwrap();
    let tokens: Vec<Vec<u32>> = phrases.iter().map(|phrase| tokenizer.encode(phrase)).collect();
    let expected: Vec<Vec<u32>> = golden["phrase_ids"].as_array().unwrap().iter().map(ids).collect();
    assert_eq!(tokens, expected);
    let trees = golden["trees"].as_object().unwrap();
    let is_bundled = std::env::var_os("FLOW_TEST_GOLDEN_TRANSCRIPTION").is_none();
    assert!(trees.len() >= if is_bundled { 4 } else { 1 });
    for (name, tree) in trees {
        let config = &tree["config"];
        let number = |key: &str, default: f64| config[key].as_f64().unwrap_or(default);
        let plain = BoostingRules::default();
        let rules = BoostingRules {
            context_score: number("context_score", plain.context_score),
            depth_scaling: number("depth_scaling", plain.depth_scaling),
            unk_score: number("unk_score", plain.unk_score),
            uniform_weights: config["uniform_weights"].as_bool().unwrap_or(false),
        };
        // NeMo rounds what a character is worth to two digits.
        let of_character = |phrase: &String| {
            let score = number("score_per_phrase", 0.0) / phrase.chars().count() as f64;
            (score * 100.0).round_ties_even() / 100.0
        };
        let boosted: Vec<Phrase> = phrases
            .iter()
            .zip(&tokens)
            .map(|(phrase, tokens)| Phrase {
                tokens: tokens.clone(),
                context_score: Some(of_character(phrase)),
            })
            .collect();
        let model = boosting_tree(&boosted, &rules, tokenizer.vocabulary_size()).unwrap();
        assert_eq!(model.states() as u64, tree["num_states"].as_u64().unwrap(), "{name}");
        let walks = tree["walks"].as_array().unwrap();
        assert!(!walks.is_empty());
        for one in walks {
            let (scores, _) = walk(&model, model.initial(), &ids(&one["ids"]));
            close(&scores, &numbers(&one["scores"]), &format!("{name} {}", one["ids"]));
        }
    }
}

/// A model of order 2 over three tokens, of which the last is unknown.
fn bigrams() -> String {
    "\\data\\\nngram 1=5\nngram 2=2\n\n\\1-grams:\n-1\t<unk>\n-99\t<s>\t-0.25\n-0.5\t</s>\n-0.5\td\t-0.125\n-0.75\te\n\n\\2-grams:\n-0.1\t<s> e\n-0.2\td </s>\n\n\\end\\\n"
        .to_owned()
}

fn parse(text: &str) -> std::result::Result<BackoffAcceptor, String> {
    parse_arpa(text.as_bytes(), 3)
}

#[test]
fn arpa_files_are_read_by_hand() {
    let model = parse(&bigrams()).unwrap();
    let ten = std::f64::consts::LN_10;
    let (scores, state) = walk(&model, model.initial(), &[1, 0, 2, 1]);
    // `<s> e`, then `e` backs off without a cost, `d` with one of -0.125.
    close(&scores, &[-0.1 * ten, -0.5 * ten, -1.125 * ten, -0.75 * ten], "scores");
    close(&[model.end(state)], &[-0.5 * ten], "end after e");
    let (_, after_d) = model.step(model.initial(), 0);
    close(&[model.end(after_d)], &[-0.2 * ten], "end after d");
    // Windows' ends of lines.
    assert!(parse(&bigrams().replace('\n', "\r\n")).is_ok());
    // Two unknown tokens share the mass.
    let model = parse_arpa(bigrams().as_bytes(), 4).unwrap();
    close(&[model.step(0, 3).0], &[-ten - 2f64.ln()], "unknown");
}

#[test]
fn what_is_wrong_in_an_arpa_file_is_told_with_its_line() {
    let cases = [
        ("\\data\\", "data", "line 1: no ARPA file"),
        ("ngram 2=2", "ngram 3=2", "line 3: `ngram 2=COUNT` is expected"),
        (
            "ngram 2=2",
            "ngram 2=3",
            "line 15: 2 2-grams end here, and the header says 3",
        ),
        ("-0.5\td\t", "x\td\t", "line 9: `x` is not a logarithm"),
        ("-0.5\td\t", "NaN\td\t", "line 9: `NaN` is not a logarithm"),
        (
            "-0.5\td\t",
            "0.5\td\t",
            "line 9: the logarithm of a probability is above 0",
        ),
        (
            "-0.75\te",
            "-0.75 e",
            "line 10: a logarithm, a tab and tokens are expected",
        ),
        ("-0.75\te", "-0.75\te\t0\t0", "line 10: more than three fields"),
        ("-0.75\te", "-0.75\tz", "line 10: token 22 is not below 3"),
        ("-0.75\te", "-0.75\twords", "line 10: `words` is not a token"),
        ("-0.75\te", "-0.75\td", "line 10: this n-gram appears twice"),
        ("<s> e", "<s>", "line 13: 1 tokens in a 2-gram"),
        ("<s> e", "f e", "line 13: the n-gram before the last token is missing"),
        ("-0.2\td </s>", "-0.2\t<s> e", "line 14: this n-gram appears twice"),
        ("\\end\\", "", "line 17: the file ends here"),
        ("\\2-grams:", "\\3-grams:", "line 12: `\\2-grams:` is expected"),
    ];
    for (from, to, expected) in cases {
        let text = bigrams();
        assert!(text.contains(from), "{from}");
        let error = parse(&text.replacen(from, to, 1)).unwrap_err();
        assert!(error.starts_with(expected), "{to}: {error}");
    }
    assert!(
        parse(&format!("\\data\\\n{}", "x".repeat(10_000)))
            .unwrap_err()
            .contains("longer than")
    );
    assert!(parse("").unwrap_err().contains("the file ends here"));
}

proptest! {
    /// Whatever a file holds, it is read or refused, and what is read scores every token.
    #[test]
    fn damaged_files_break_nothing(place in 0usize..200, byte in any::<u8>(), cut in 0usize..200) {
        let mut bytes = bigrams().into_bytes();
        let length = bytes.len();
        bytes[place % length] = byte;
        if cut < length {
            bytes.truncate(length - cut);
        }
        if let Ok(model) = parse_arpa(&bytes[..], 3) {
            let mut scores = Vec::new();
            for state in 0..model.states() as u32 {
                model.scores(state, &mut scores);
                prop_assert_eq!(scores.len(), 3);
                model.end(state);
            }
        }
    }

    /// Probabilities of an estimated model sum to one in every state that tokens lead to.
    #[test]
    fn estimated_probabilities_sum_to_one(
        texts in prop::collection::vec(prop::collection::vec(0u32..6, 1..8), 1..12),
        order in 1usize..5,
    ) {
        let mut corpus = Corpus::default();
        for text in &texts {
            corpus.add(text).unwrap();
        }
        let mut bytes = Vec::new();
        write_witten_bell(&corpus, order, &mut bytes).unwrap();
        // One token that no text has takes the mass of `<unk>`.
        let model = parse_arpa(&bytes[..], 7).unwrap();
        let sum_in = |state: u32| {
            let mut scores = Vec::new();
            model.scores(state, &mut scores);
            let tokens: f64 = scores.iter().map(|&score| f64::from(score).exp()).sum();
            tokens + f64::from(model.end(state)).exp()
        };
        // Logarithms are written with seven digits.
        for text in &texts {
            let mut state = model.initial();
            prop_assert!((sum_in(state) - 1.0).abs() < 1e-5, "{}", sum_in(state));
            for &token in text {
                state = model.step(state, token).1;
                prop_assert!((sum_in(state) - 1.0).abs() < 1e-5, "{} in state {state}", sum_in(state));
            }
        }
    }
}

#[test]
fn estimates_are_those_by_hand() {
    let mut corpus = Corpus::default();
    corpus.add(&[0, 1]).unwrap();
    corpus.add(&[0, 0]).unwrap();
    corpus.add(&[]).unwrap();
    assert_eq!((corpus.sequences(), corpus.tokens()), (2, 4));
    let mut bytes = Vec::new();
    assert_eq!(write_witten_bell(&corpus, 2, &mut bytes).unwrap(), [5, 5]);
    let model = parse_arpa(&bytes[..], 3).unwrap();
    // Of 6 symbols 3 are token 0, 1 token 1, 2 the end; 3 types.
    let unigram = [3.0 / 9.0, 1.0 / 9.0, 3.0 / 9.0];
    let end = 2.0 / 9.0;
    let (scores, _) = walk(&model, model.start(), &[2]);
    close(&scores, &[f64::ln(unigram[2])], "unknown");
    // The beginning is followed by token 0 twice.
    let (scores, after_0) = walk(&model, model.initial(), &[0]);
    close(&scores, &[f64::ln((2.0 + unigram[0]) / 3.0)], "first");
    // Token 0 by 0, 1 and the end, once each.
    let (scores, after_1) = walk(&model, after_0, &[1]);
    close(&scores, &[f64::ln((1.0 + 3.0 * unigram[1]) / 6.0)], "second");
    close(&[model.end(after_1)], &[f64::ln((1.0 + end) / 2.0)], "end");
    close(&[model.step(after_1, 0).0], &[f64::ln(0.5 * unigram[0])], "never seen");

    assert!(write_witten_bell(&corpus, 0, &mut Vec::new()).is_err());
    assert!(write_witten_bell(&Corpus::default(), 2, &mut Vec::new()).is_err());
    assert!(Corpus::default().add(&[0xD800 - 100]).is_err());
    assert!(Corpus::default().add(&[u32::MAX]).is_err());
}

/// Without speech all tokens cost what it takes to leave the phrase, and the next phrase starts over. Language models go on.
#[test]
fn phrases_score_nothing_without_speech() {
    let phrase = |tokens: &[u32]| Phrase {
        tokens: tokens.to_vec(),
        context_score: None,
    };
    let tree = boosting_tree(&[phrase(&[0, 1, 2]), phrase(&[2])], &BoostingRules::default(), 3).unwrap();
    let lm = parse_arpa(bigrams().as_bytes(), 3).unwrap();
    let (mut both, mut alone, mut scores, mut expected) =
        (Fusion::default(), Fusion::default(), Vec::new(), Vec::new());
    both.add_phrases(tree.into(), 2.0).unwrap();
    both.add(lm.clone().into(), 0.5).unwrap();
    alone.add(lm.into(), 0.5).unwrap();
    assert!(both.has_phrases() && !alone.has_phrases());
    assert_eq!(
        (both.weight(true), both.weight(false), alone.weight(false)),
        (2.5, 0.5, 0.5)
    );
    let (mut state, mut state_alone) = (both.start(), alone.start());
    // The score of the first token, and those of the first two; a whole phrase keeps its score.
    let second = 2.0 + 2f32.ln();
    for (token, lost) in [(0, 1.0), (1, 1.0 + second), (2, 0.0)] {
        state = both.step(&state, token, true);
        state_alone = alone.step(&state_alone, token, true);
        both.scores(&state, false, &mut scores);
        alone.scores(&state_alone, false, &mut expected);
        for (score, expected) in scores.iter().zip(&expected) {
            assert!((score - (expected - 2.0 * lost)).abs() < 1e-5, "{scores:?} {expected}");
        }
        let left = both.step(&state, 1, false);
        let began = both.step(&both.start(), 1, false);
        assert_eq!(left[0], began[0]);
    }
}

#[test]
fn phrases_are_read_with_their_scores() {
    let tokenizer = tokenizer(&bundled_model());
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("phrases.txt");
    let read = |text: &str| {
        std::fs::write(&path, text).unwrap();
        read_phrases(&path, &tokenizer).map_err(|error| error.to_string())
    };
    let phrases = read("\u{feff}want\n\n  train \t2.5\n").unwrap().phrases;
    assert_eq!(phrases[0].tokens, tokenizer.encode("want"));
    assert_eq!(phrases[1].tokens, tokenizer.encode("train"));
    assert_eq!((phrases[0].context_score, phrases[1].context_score), (None, Some(2.5)));
    assert!(
        read("want\ntrain\tmuch")
            .unwrap_err()
            .contains("line 2: `much` is not a score")
    );
    let some = read("want\n\u{4e2d}\ntrain").unwrap();
    assert_eq!(
        (some.phrases.len(), some.left_out),
        (2, vec![(2, "\u{4e2d}".to_owned())])
    );
    assert!(
        read("\n\u{4e2d}")
            .unwrap_err()
            .contains("line 2: the model's tokenizer does not know")
    );
    assert!(read("\n\n").unwrap_err().contains("no phrase"));
    let outside = Phrase {
        tokens: vec![7],
        context_score: None,
    };
    assert!(boosting_tree(&[outside], &BoostingRules::default(), 7).is_err());
}
