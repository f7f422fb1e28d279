//! The cues of subtitles: SRT and WebVTT.

/// Why a line of times is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadCue {
    /// The reason of a reject: `bad_line` or `duration_invalid`.
    pub reason: &'static str,
    pub detail: String,
}

/// The number of the line of times of a cue, from 1, and its beginning and end in seconds and its text.
pub type Cue = (u64, Result<(f64, f64, String), BadCue>);

/// A cue whose words are being read: the number of its line of times, these, and its words.
type OpenCue = (u64, Result<(f64, f64), BadCue>, Vec<String>);

/// The cues of subtitles (SRT or WebVTT), in order, their texts without tags.
pub fn cues(text: &str) -> Vec<Cue> {
    let mut cues = Vec::new();
    let mut open: Option<OpenCue> = None;
    let mut close = |open: &mut Option<OpenCue>| {
        if let Some((number, times, words)) = open.take() {
            cues.push((number, times.map(|(start, end)| (start, end, plain(&words.join(" "))))));
        }
    };
    for (number, line) in (1..).zip(text.lines()) {
        if line.contains("-->") {
            close(&mut open);
            open = Some((number, times_of(line), Vec::new()));
        } else if line.trim().is_empty() {
            close(&mut open);
        } else if let Some((_, _, words)) = &mut open {
            words.push(line.trim().to_string());
        }
    }
    close(&mut open);
    cues
}

/// The texts of the cues of subtitles (SRT or WebVTT) in order, without tags.
///
/// # Errors
/// The number of a line of times that is none, and why.
pub fn subtitle_texts(text: &str) -> Result<Vec<String>, String> {
    let text_of = |(number, cue): Cue| match cue {
        Ok((.., text)) => Ok(text),
        Err(bad) => Err(format!("line {number}: {}", bad.detail)),
    };
    cues(text).into_iter().map(text_of).collect()
}

/// `00:01:02,500 --> 00:01:04.000`, or without hours; settings may follow.
fn times_of(line: &str) -> Result<(f64, f64), BadCue> {
    let bad = || BadCue {
        reason: "bad_line",
        detail: format!(
            "{:?} is not a line of times, such as 00:00:01,000 --> 00:00:02,000",
            line.trim()
        ),
    };
    let (start, end) = line.split_once("-->").ok_or_else(bad)?;
    let start = seconds(start.trim()).ok_or_else(bad)?;
    let end = end.split_whitespace().next().and_then(seconds).ok_or_else(bad)?;
    match end > start {
        true => Ok((start, end)),
        false => Err(BadCue {
            reason: "duration_invalid",
            detail: format!("{:?} does not end after its beginning", line.trim()),
        }),
    }
}

fn seconds(time: &str) -> Option<f64> {
    let (whole, milliseconds) = time.split_once([',', '.'])?;
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let mut sum = 0u64;
    let parts: Vec<&str> = whole.split(':').collect();
    if !(2..=3).contains(&parts.len()) || milliseconds.len() != 3 || !is_number(milliseconds) {
        return None;
    }
    for part in parts {
        sum = sum
            .checked_mul(60)?
            .checked_add(part.parse::<u64>().ok().filter(|_| is_number(part))?)?;
    }
    let all = sum.checked_mul(1_000)?.checked_add(milliseconds.parse().ok()?)?;
    Some(all as f64 / 1e3)
}

/// A text without tags (`<i>`, `{\an8}`).
fn plain(text: &str) -> String {
    let mut rest = text;
    let mut plain = String::new();
    while let Some(begin) = rest.find(['<', '{']) {
        let close = if rest[begin..].starts_with('<') { '>' } else { '}' };
        let is_tag = rest[begin + 1..]
            .starts_with(|c: char| c.is_ascii_alphabetic() || c.is_ascii_digit() || c == '/' || c == '\\');
        match rest[begin..].find(close).filter(|_| is_tag) {
            Some(end) => {
                plain.push_str(&rest[..begin]);
                rest = &rest[begin + end + 1..];
            }
            None => {
                plain.push_str(&rest[..=begin]);
                rest = &rest[begin + 1..];
            }
        }
    }
    plain.push_str(rest);
    let plain = plain
        .replace("&amp;", "&")
        .replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&nbsp;", " ");
    plain.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cues_of_both_forms_are_read_and_bad_times_are_refused() {
        let srt = "1\r\n00:00:01,000 --> 00:00:02,500\r\n<i>Hello</i>,\r\nworld\r\n\r\n2\r\n00:00:03,000 --> 00:00:02,000\r\nback\r\n";
        let cue = |n: usize, text: &str| cues(text)[n].1.clone();
        assert_eq!(cue(0, srt), Ok((1.0, 2.5, "Hello, world".into())));
        assert_eq!(cue(1, srt).unwrap_err().reason, "duration_invalid");
        let vtt = "WEBVTT\n\nNOTE x\n\nid\n00:01.250 --> 01:00:02.000 align:start\n{\\an8}3 < 4 &amp; <00:01.500><c>so</c>\n\nx --> y\nz";
        assert_eq!(cue(0, vtt), Ok((1.25, 3602.0, "3 < 4 & so".into())));
        assert_eq!(cue(1, vtt).unwrap_err().reason, "bad_line");
        assert_eq!(cues("no cue at all").len(), 0);
        assert_eq!(seconds("99999999999999999999:00:00,000"), None);
        assert_eq!(plain("a < b {x <"), "a < b {x <");
    }
}
