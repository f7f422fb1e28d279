//! Subtitles: SRT and WebVTT, laid out as by WhisperX, except that the width of lines includes the speaker's name, that
//! no subtitle crosses the end of a segment, and that text is escaped.

use std::fmt::Write;

use crate::lines::{LineLimits, fill, one_line, pieces};
use crate::times::{milliseconds, srt_time, vtt_time};
use crate::transcript::{Segment, Transcript, Word};

/// A subtitle. Times in seconds.
#[derive(Debug, Clone, PartialEq)]
struct Cue {
    start: f64,
    end: f64,
    lines: Vec<String>,
}

/// A cue with times in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
struct TimedCue {
    start: u64,
    end: u64,
    lines: Vec<String>,
}

/// A SubRip file: cues with numbers from 1. `-->` within a text becomes `->`, as that would be read as times.
pub fn srt(transcript: &Transcript, limits: &LineLimits) -> String {
    let mut file = String::new();
    for (number, cue) in (1..).zip(timed_cues(transcript, limits)) {
        let (start, end) = (srt_time(cue.start), srt_time(cue.end));
        let _ = write!(file, "{number}\n{start} --> {end}\n");
        for line in &cue.lines {
            let _ = writeln!(file, "{}", short_arrows(line));
        }
        file.push('\n');
    }
    file
}

/// A WebVTT file. `&`, `<` and `>` are written as the standard asks for, so that `<|en|>` or `-->` are shown.
pub fn vtt(transcript: &Transcript, limits: &LineLimits) -> String {
    let mut file = "WEBVTT\n\n".to_owned();
    for cue in timed_cues(transcript, limits) {
        let (start, end) = (vtt_time(cue.start), vtt_time(cue.end));
        let _ = writeln!(file, "{start} --> {end}");
        for line in &cue.lines {
            let _ = writeln!(file, "{}", escaped(line));
        }
        file.push('\n');
    }
    file
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The text with one hyphen left before each `>` that has several.
fn short_arrows(text: &str) -> String {
    let mut short = String::with_capacity(text.len());
    for c in text.chars() {
        while c == '>' && short.ends_with("--") {
            short.pop();
        }
        short.push(c);
    }
    short
}

/// The cues of all segments by their beginnings.
///
/// Each takes one millisecond at least, and one that begins after all before it have ended does so when times are
/// rounded, too. (Cues of speakers who talk at the same time overlap.)
fn timed_cues(transcript: &Transcript, limits: &LineLimits) -> Vec<TimedCue> {
    let mut cues: Vec<Cue> = Vec::new();
    for segment in &transcript.segments {
        segment_cues(segment, limits, &mut cues);
    }
    cues.sort_by(|a, b| a.start.total_cmp(&b.start));
    // The latest end of all cues so far, exact and rounded.
    let (mut meant, mut written) = (0.0, 0);
    let timed = cues.into_iter().map(|cue| {
        let mut start = milliseconds(cue.start);
        if cue.start >= meant {
            start = start.max(written);
        }
        let end = milliseconds(cue.end).max(start + 1);
        meant = cue.end.max(meant);
        written = end.max(written);
        TimedCue {
            start,
            end,
            lines: cue.lines,
        }
    });
    timed.collect()
}

/// Cuts a segment into cues. A speaker's name that leaves no room for text is left out.
fn segment_cues(segment: &Segment, limits: &LineLimits, cues: &mut Vec<Cue>) {
    let max_width = limits.max_line_width.unwrap_or(usize::MAX);
    let max_count = limits.max_line_count.unwrap_or(usize::MAX);
    let words = segment.timed_words();
    let speaker = segment.speaker.as_deref().map(one_line).filter(|name| !name.is_empty());
    let name = speaker.map(|name| Word {
        word: format!("[{name}]:"),
        ..Word::default()
    });
    let name = pieces(name.as_slice(), max_width);
    let all = pieces(&words, max_width);
    let mut rest = all.as_slice();
    while !rest.is_empty() {
        let (mut lines, mut taken) = fill(&name, rest, max_width, max_count);
        if taken == 0 {
            (lines, taken) = fill(&[], rest, max_width, max_count);
        }
        let (shown, after) = rest.split_at(taken);
        cues.push(Cue {
            start: shown.iter().map(|piece| piece.start).fold(f64::INFINITY, f64::min),
            end: shown.iter().map(|piece| piece.end).fold(0.0, f64::max),
            lines,
        });
        rest = after;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::lines::width;

    fn word(text: &str, start: f64, end: f64) -> Word {
        Word {
            word: text.to_owned(),
            start,
            end,
            ..Word::default()
        }
    }

    fn segment(speaker: Option<&str>, words: Vec<Word>) -> Segment {
        let texts: Vec<&str> = words.iter().map(|word| word.word.as_str()).collect();
        Segment {
            start: words[0].start,
            end: words[words.len() - 1].end,
            text: texts.join(" "),
            speaker: speaker.map(str::to_owned),
            words,
            ..Segment::default()
        }
    }

    fn transcript(segments: Vec<Segment>) -> Transcript {
        Transcript {
            segments,
            ..Transcript::default()
        }
    }

    fn limits(max_line_width: usize, max_line_count: usize) -> LineLimits {
        LineLimits {
            max_line_width: Some(max_line_width),
            max_line_count: Some(max_line_count),
        }
    }

    /// A sentence of words of half a second each, from a second on.
    fn spoken(from: f64, text: &str) -> Vec<Word> {
        let times = (0..).map(|index| from + f64::from(index) * 0.5);
        let words = text.split(' ').zip(times);
        words.map(|(text, start)| word(text, start, start + 0.5)).collect()
    }

    #[test]
    fn segments_are_cues() {
        let transcript = transcript(vec![
            segment(Some("SPEAKER_00"), spoken(0.5, "Good morning, everyone.")),
            segment(None, spoken(3599.0, "It is <|en|> late & over.")),
        ]);
        insta::assert_snapshot!(srt(&transcript, &LineLimits::default()), @r"
        1
        00:00:00,500 --> 00:00:02,000
        [SPEAKER_00]: Good morning, everyone.

        2
        00:59:59,000 --> 01:00:02,000
        It is <|en|> late & over.
        ");
        insta::assert_snapshot!(vtt(&transcript, &LineLimits::default()), @r"
        WEBVTT

        00:00.500 --> 00:02.000
        [SPEAKER_00]: Good morning, everyone.

        59:59.000 --> 01:00:02.000
        It is &lt;|en|&gt; late &amp; over.
        ");
        assert!(srt(&transcript, &LineLimits::default()).ends_with("over.\n\n"));
    }

    #[test]
    fn lines_and_cues_keep_to_their_limits() {
        let transcript = transcript(vec![segment(
            Some("Ann"),
            spoken(0.0, "we went over the hill and far away until the sea"),
        )]);
        insta::assert_snapshot!(srt(&transcript, &limits(16, 2)), @r"
        1
        00:00:00,000 --> 00:00:02,500
        [Ann]: we went
        over the hill

        2
        00:00:02,500 --> 00:00:05,000
        [Ann]: and far
        away until the

        3
        00:00:05,000 --> 00:00:05,500
        [Ann]: sea
        ");
        // A width alone gives more lines, not more cues.
        let width = LineLimits {
            max_line_count: None,
            ..limits(16, 2)
        };
        insta::assert_snapshot!(srt(&transcript, &width), @r"
        1
        00:00:00,000 --> 00:00:05,500
        [Ann]: we went
        over the hill
        and far away
        until the sea
        ");
        // The name would fill each cue: the text goes before.
        assert!(srt(&transcript, &limits(6, 1)).contains("\nwe\n"));
    }

    #[test]
    fn no_text_breaks_a_file() {
        let transcript = transcript(vec![
            segment(None, vec![word("a\n\n2\n00:00:09,000 --> 00:00:10,000\nb", 1.0, 2.0)]),
            segment(Some("\n"), vec![word("----->", 2.0, 3.0), word("\r\n", 3.0, 3.5)]),
            segment(None, vec![word(" \n", 4.0, 5.0), word("\u{0}", 5.0, 6.0)]),
        ]);
        insta::assert_snapshot!(srt(&transcript, &LineLimits::default()), @r"
        1
        00:00:01,000 --> 00:00:02,000
        a 2 00:00:09,000 -> 00:00:10,000 b

        2
        00:00:02,000 --> 00:00:03,000
        ->
        ");
        assert_eq!(vtt(&transcript, &LineLimits::default()).matches("-->").count(), 2);
        assert_eq!(srt(&Transcript::default(), &LineLimits::default()), "");
        assert_eq!(vtt(&Transcript::default(), &LineLimits::default()), "WEBVTT\n\n");
    }

    #[test]
    fn right_to_left_text_and_marks_stay_as_they_are() {
        let text = "\u{202b}می\u{200c}خواهم!\u{202c}";
        let transcript = transcript(vec![segment(
            None,
            vec![word(text, 0.0, 1.0), word("e\u{301}", 1.0, 2.0)],
        )]);
        let file = srt(&transcript, &limits(42, 2));
        assert_eq!(file, format!("1\n00:00:00,000 --> 00:00:02,000\n{text} e\u{301}\n\n"));
    }

    /// Punctuation marks have no duration in NeMo's time stamps, so a cue may have duration 0.
    #[test]
    fn a_cue_without_duration_is_shown_and_pushes_the_next() {
        let transcript = transcript(vec![
            segment(None, vec![word("a", 1.0, 1.0)]),
            segment(None, vec![word("b", 1.0002, 1.0002)]),
            segment(None, vec![word("c", 1.0003, 2.0)]),
        ]);
        let times: Vec<_> = timed_cues(&transcript, &LineLimits::default())
            .into_iter()
            .map(|cue| (cue.start, cue.end))
            .collect();
        assert_eq!(times, [(1000, 1001), (1001, 1002), (1002, 2000)]);
    }

    #[test]
    fn layout_is_whisperxs() {
        let cases = crate::test_data::whisperx_cases();
        assert!(!cases.is_empty());
        let mut compared = 0;
        for (transcript, written) in &cases {
            for (format, expected) in written {
                let found = match format.as_str() {
                    "srt" => srt(transcript, &LineLimits::default()),
                    "vtt" => vtt(transcript, &LineLimits::default()),
                    _ => continue,
                };
                assert_eq!(&found, expected, "{format}");
                compared += 1;
            }
        }
        assert!(compared > 0);
    }

    prop_compose! {
        fn segments()(
            parts in prop::collection::vec(
                (prop::option::of("[a-zא-ת \n]{0,9}"), prop::collection::vec((".{0,12}", 0.0..0.4f64, 0.0..0.4f64), 1..6)),
                0..5,
            )
        ) -> Vec<Segment> {
            let mut at = 0.0;
            parts.into_iter().map(|(speaker, words)| {
                let words = words.into_iter().map(|(text, gap, length)| {
                    let start = at + gap;
                    at = start + length;
                    word(&text, start, at)
                });
                segment(speaker.as_deref(), words.collect())
            }).collect()
        }
    }

    proptest! {
        #[test]
        fn cues_are_in_order_within_the_limits_and_complete(
            segments in segments(), max_width in 1..30usize, max_count in 1..4usize,
        ) {
            let transcript = transcript(segments);
            let cues = timed_cues(&transcript, &limits(max_width, max_count));
            for pair in cues.windows(2) {
                prop_assert!(pair[0].end <= pair[1].start, "{pair:?}");
            }
            for cue in &cues {
                prop_assert!(cue.start < cue.end && !cue.lines.is_empty() && cue.lines.len() <= max_count);
                prop_assert!(cue.lines.iter().all(|line| !line.trim().is_empty() && width(line) <= max_width), "{cue:?}");
            }
            // Without names, nothing but the words is shown, and all of them.
            let mut nameless = transcript.clone();
            for segment in &mut nameless.segments {
                segment.speaker = None;
            }
            let joined = |lines: Vec<String>| lines.concat().replace(' ', "");
            let cues = timed_cues(&nameless, &limits(max_width, max_count));
            let words = nameless.segments.iter().flat_map(Segment::timed_words).map(|word| word.word);
            prop_assert_eq!(joined(cues.into_iter().flat_map(|cue| cue.lines).collect()), joined(words.collect()));
        }

        #[test]
        fn files_have_as_many_blocks_as_cues(segments in segments(), max_width in 1..30usize) {
            let transcript = transcript(segments);
            let limits = limits(max_width, 2);
            let cues = timed_cues(&transcript, &limits).len();
            let (srt, vtt) = (srt(&transcript, &limits), vtt(&transcript, &limits));
            prop_assert_eq!(srt.split_terminator("\n\n").count(), cues);
            prop_assert_eq!(srt.matches(" --> ").count(), cues);
            prop_assert_eq!(vtt.split_terminator("\n\n").count(), cues + 1);
            prop_assert_eq!(vtt.matches("-->").count(), cues);
        }
    }
}
