//! The names that manifests have for where a row begins and ends in its recording: one rule for all who read them.

use serde_json::Value;

/// NeMo's name for where a row begins.
pub const OFFSET: &str = "offset";
/// Where a row begins and ends in its recording.
pub const STARTS: [&str; 5] = [OFFSET, "start", "start_time", "begin", "begin_time"];
pub const ENDS: [&str; 4] = ["end", "end_time", "stop", "stop_time"];

/// Words of names that say where a row begins or ends, and words that may stand beside these.
const OF_PLACES: [&str; 9] = [
    "start", "begin", "beg", "onset", "end", "stop", "offset", "tmin", "tmax",
];
const BESIDE: [&str; 28] = [
    "time",
    "times",
    "timestamp",
    "ts",
    "t",
    "sec",
    "secs",
    "second",
    "seconds",
    "s",
    "ms",
    "msec",
    "millis",
    "milliseconds",
    "pos",
    "position",
    "at",
    "in",
    "segment",
    "seg",
    "utterance",
    "utt",
    "clip",
    "audio",
    "speech",
    "sample",
    "samples",
    "frame",
];

/// Names that say it where both are there.
const PAIRS: [[&str; 2]; 3] = [["from", "to"], ["t0", "t1"], ["xmin", "xmax"]];

/// Whether a name says where a row begins or ends in its recording, but is none of those that are read: `start_ms`,
/// `segmentEnd`. With such a column left out, each row would be the whole recording.
fn is_unread(name: &str) -> bool {
    if STARTS.contains(&name) || ENDS.contains(&name) {
        return false;
    }
    // Asked of every key of every line, of which hardly any is one.
    let holds = |word: &&str| {
        name.as_bytes()
            .windows(word.len())
            .any(|part| part.eq_ignore_ascii_case(word.as_bytes()))
    };
    if !OF_PLACES.iter().any(|word| holds(&word)) {
        return false;
    }
    let mut words = vec![String::new()];
    let mut small = false;
    for letter in name.chars() {
        if !letter.is_alphanumeric() || (letter.is_uppercase() && small) {
            words.push(String::new());
        }
        small = letter.is_lowercase();
        if let Some(word) = words.last_mut()
            && letter.is_alphanumeric()
        {
            word.extend(letter.to_lowercase());
        }
    }
    words.retain(|word| !word.is_empty());
    // `starttime`
    let is_place = |word: &str| {
        let plain = word
            .strip_suffix("time")
            .filter(|plain| !plain.is_empty())
            .unwrap_or(word);
        OF_PLACES.contains(&plain)
    };
    words.iter().any(|word| is_place(word))
        && words
            .iter()
            .all(|word| is_place(word) || BESIDE.contains(&word.as_str()))
}

/// Whether a value beside a name says a time: a number, or a clock time.
pub fn is_time(value: &Value) -> bool {
    match value {
        Value::String(text) => {
            text.starts_with(|first: char| first.is_ascii_digit()) && !text.contains(char::is_alphabetic)
        }
        value => value.is_number(),
    }
}

/// The first of the names beside those of a row that nothing reads.
pub fn unread_among<'n>(names: impl Iterator<Item = &'n str> + Clone) -> Option<&'n str> {
    let has = |wanted: &&str| names.clone().any(|name| name.eq_ignore_ascii_case(wanted));
    let pair = PAIRS.iter().find(|pair| pair.iter().all(has));
    let is_of_pair = |name: &str| pair.is_some_and(|pair| pair.iter().any(|of| of.eq_ignore_ascii_case(name)));
    names.clone().find(|name| is_unread(name) || is_of_pair(name))
}

/// What is wrong with such a name.
pub fn unread(name: &str) -> String {
    format!(
        "`{name}` seems to say where a row begins or ends in its recording, but is not read: times are called {} and {}",
        STARTS.join(", "),
        ENDS.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_of_times_that_are_not_read_are_told_from_others() {
        for name in [
            "start_ms",
            "End (s)",
            "segment_start",
            "startTime",
            "endtime",
            "audio.offset",
            "tmin",
            "Start_Frame",
            // Tables of text alone read names in other cases.
            "End_Time",
        ] {
            assert!(is_unread(name), "{name}");
        }
        let others = [
            "start",
            "end_time",
            "offset",
            "duration",
            "start_date",
            "weekend",
            "gender",
            "endpoint",
            "time",
            "speaker",
            "sentence",
            "stops",
            "",
            "__",
            "trend",
            "audio",
            "backend_time",
        ];
        for name in others {
            assert!(!is_unread(name), "{name}");
        }
        for time in [json!(1.5), json!(-3), json!("12"), json!("00:01:02.5")] {
            assert!(is_time(&time), "{time}");
        }
        for other in [
            json!("2 s"),
            json!("left"),
            json!(""),
            json!(null),
            json!(true),
            json!([1]),
        ] {
            assert!(!is_time(&other), "{other}");
        }
        let among = |names: &[&'static str]| unread_among(names.iter().copied());
        assert_eq!(among(&["speaker", "To", "From"]), Some("To"));
        assert_eq!(among(&["from", "speaker", "xmin"]), None);
    }
}
