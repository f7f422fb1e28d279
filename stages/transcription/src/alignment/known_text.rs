//! The text that is aligned, as users write it.

use flow_audio::subtitle_cues::subtitle_texts;

/// The segments of a text: its lines, or the cues of subtitles (SRT or WebVTT).
///
/// # Errors
/// If there are none, or a line of times is none.
pub fn segments_of_text(text: &str, is_subtitles: bool) -> Result<Vec<String>, String> {
    let text = text.trim_start_matches('\u{feff}');
    let segments: Vec<String> = match is_subtitles {
        true => subtitle_texts(text)?,
        false => {
            let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
            lines.map(str::to_owned).collect()
        }
    };
    match segments.iter().all(|segment| segment.trim().is_empty()) {
        true if is_subtitles => Err(
            "there is no cue with a text: a cue is a line of times, such as 00:00:01,000 --> 00:00:02,000, with its text below".to_owned(),
        ),
        true => Err("the text is empty".to_owned()),
        false => Ok(segments),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_lines_or_cues() {
        assert_eq!(segments_of_text("\u{feff}a b \n\n c\r\n", false).unwrap(), ["a b", "c"]);
        let srt = "1\n00:00:01,000 --> 00:00:02,000\na\nb\n";
        assert_eq!(segments_of_text(srt, true).unwrap(), ["a b"]);
        for (text, is_subtitles) in [("", false), (" \n", false), ("a", true), ("x --> y\nz", true)] {
            assert!(segments_of_text(text, is_subtitles).is_err(), "{text}");
        }
    }
}
