use super::*;

fn word(text: &str, start: f64, end: f64, said: bool) -> AlignedWord {
    AlignedWord {
        word: text.to_owned(),
        start,
        end,
        logprob: said.then_some(-0.5),
        said,
        spelled: true,
    }
}

fn aligned() -> Aligned {
    let words = vec![
        word("one", 0.5, 0.75, true),
        word("two", 0.75, 0.75, false),
        word("three", 0.75, 0.75, false),
        word("four", 1.0, 1.5, true),
        word("five", 1.5, 1.5, false),
    ];
    Aligned {
        words,
        score: -0.25,
        ..Aligned::default()
    }
}

#[test]
fn segments_of_the_text_are_kept_with_the_times_of_what_was_said() {
    let found = aligned()
        .with_segments(&[2, 1, 0, 2], &SegmentRules::default())
        .unwrap();
    let times: Vec<_> = found
        .segments
        .iter()
        .map(|segment| (&segment.text[..], segment.start, segment.end))
        .collect();
    assert_eq!(
        times,
        [
            ("one two", 0.5, 0.75),
            ("three", 0.75, 0.75),
            ("", 0.0, 0.0),
            ("four five", 1.0, 1.5)
        ]
    );
    let confidences: Vec<_> = found.segments[0]
        .words
        .iter()
        .map(|word| word.confidence.unwrap())
        .collect();
    assert_eq!(confidences, [(-0.5f64).exp(), 0.0]);
    let not_said: Vec<_> = found
        .not_said
        .iter()
        .map(|words| (words.segment, words.at, &words.text[..]))
        .collect();
    assert_eq!(not_said, [(0, 0.75, "two three"), (3, 1.5, "five")]);
    assert_eq!(found.words_said(), 2);
}

#[test]
fn a_text_without_segments_is_divided_by_rules() {
    let rules = SegmentRules {
        max_gap: 0.2,
        max_duration: 30.0,
    };
    let found = aligned().with_segments(&[5], &rules).unwrap();
    let texts: Vec<_> = found.segments.iter().map(|segment| &segment.text[..]).collect();
    assert_eq!(texts, ["one two three", "four five"]);
    let transcript = Transcript::from_segments(
        crate::Metadata::default(),
        crate::Performance::default(),
        found.segments.clone(),
    );
    let json = found.to_json(&transcript).unwrap();
    // It is a transcript for those who know nothing of alignment.
    assert_eq!(Transcript::from_json(&json).unwrap().segments.len(), 2);
    let document: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (&document["alignment"]["score"], &document["alignment"]["words_said"]),
        (&(-0.25).into(), &2.into())
    );
    assert_eq!(document["alignment"]["not_said"][0]["text"], "two three");
}

/// A dash between words that were not said does not divide them, and none of the words of another script was found.
#[test]
fn words_that_the_model_cannot_spell_have_no_evidence() {
    let mut found = aligned();
    for at in [2, 4] {
        found.words[at].spelled = false;
    }
    found.words.push(word("six", 1.5, 1.5, false));
    let found = found.with_segments(&[6], &SegmentRules::default()).unwrap();
    let confidences: Vec<_> = (found.segments.iter().flat_map(|segment| &segment.words))
        .map(|word| word.confidence)
        .collect();
    let said = Some((-0.5f64).exp());
    assert_eq!(confidences, [said, Some(0.0), None, said, None, Some(0.0)]);
    let not_said: Vec<_> = found.not_said.iter().map(|words| &words.text[..]).collect();
    assert_eq!(not_said, ["two", "six"]);
    assert_eq!((found.words_said(), found.words_not_spelled()), (2, 2));
    assert_eq!(found.report()["words_not_spelled"], 2);
}

/// The path passed over the frame of the last word's only token, but not over what lasts of it.
#[test]
fn the_last_word_without_text_is_told() {
    let heard = |text: &str, start: f64, end: f64| Word {
        word: text.to_owned(),
        start,
        end,
        ..Word::default()
    };
    let all = [
        heard("one", 0.5, 0.8),
        heard("more", 2.0, 2.2),
        heard("word", 2.4, 2.72),
        heard("four", 3.0, 3.5),
        heard("noise", 6.0, 6.2),
    ];
    let mut found = Aligned {
        words: vec![word("one", 0.5, 0.8, true), word("four", 3.0, 3.5, true)],
        silent: vec![1.9..2.48, 7.0..8.0],
        ..Aligned::default()
    };
    found.tell_without_text(all.into_iter().map(|word| (word, false)));
    assert_eq!(
        found.without_text,
        [WithoutText {
            start: 2.0,
            end: 2.72,
            text: "more word".to_owned()
        }]
    );
}
