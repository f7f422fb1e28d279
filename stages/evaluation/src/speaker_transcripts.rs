//! Readers of transcripts with speakers: STM (segment time mark, NIST) and SegLST (segment-wise long-form speech
//! transcription annotation, JSON), the formats of meeteval and of the CHiME challenges.

use std::collections::BTreeMap;

use flow_speakers::{Error, Result};
use serde_json::Value;

use crate::utterance::Utterance;

/// Times beyond this many seconds (31 years) are refused.
const MAX_SECONDS: f64 = 1e9;

/// The mark of segments that NIST's scoring tools exclude.
const IGNORED: &str = "ignore_time_segment_in_scoring";

/// The utterances of each recording, by its name, in the order of the file. A line has the recording, the channel
/// (ignored), the speaker, start and end in seconds, and the words; a label in angle brackets before them, such as
/// `<o,f0,male>`, is skipped. Empty lines and comments (`;`) are, too. Alternatives (`{ a / b }`) are read as words. A
/// line with missing or invalid fields, that ends before it starts, or that is excluded from scoring is an error that
/// names it.
pub fn read_stm(text: &str) -> Result<BTreeMap<String, Vec<Utterance>>> {
    let mut recordings: BTreeMap<String, Vec<Utterance>> = BTreeMap::new();
    for (line, text) in (1..).zip(text.lines()) {
        let mut rest = text.trim();
        if rest.is_empty() || rest.starts_with(';') {
            continue;
        }
        let wrong = |why: String| Error::Line { line, why };
        let mut fields = [""; 5];
        for (place, field) in fields.iter_mut().enumerate() {
            if rest.is_empty() {
                return Err(wrong(format!("a line of STM has at least 5 fields, not {place}")));
            }
            let end = rest.find(char::is_whitespace).unwrap_or(rest.len());
            (*field, rest) = (&rest[..end], rest[end..].trim_start());
        }
        let [recording, _, speaker, start, end] = fields;
        let number = |field: &str, what: &str| {
            let value = field
                .parse::<f64>()
                .ok()
                .filter(|value| (0.0..=MAX_SECONDS).contains(value));
            value.ok_or_else(|| {
                wrong(format!(
                    "{what} is {field:?}; it must be a number of seconds, 0 or more"
                ))
            })
        };
        let (start, end) = (number(start, "start")?, number(end, "end")?);
        if end < start {
            return Err(wrong(format!("ends at {end} s, before its start at {start} s")));
        }
        if rest.to_lowercase().contains(IGNORED) {
            return Err(wrong(format!(
                "{IGNORED} is not supported: take the line out, and name the parts that are scored in a UEM"
            )));
        }
        let utterance = Utterance::new(start, end, speaker, without_label(rest));
        recordings.entry(recording.to_owned()).or_default().push(utterance);
    }
    Ok(recordings)
}

/// A label is one field in angle brackets that contains a comma; the language tag `<|hi|>` and `<unk>` are not labels.
fn without_label(text: &str) -> &str {
    let end = text.find(char::is_whitespace).unwrap_or(text.len());
    let first = &text[..end];
    let is_label = first.starts_with('<') && first.ends_with('>') && first.contains(',') && !first.starts_with("<|");
    if is_label { text[end..].trim_start() } else { text }
}

/// The utterances of each recording, by its name, in the order of the file: a list of objects with `session_id`, `speaker`,
/// `start_time`, `end_time` (numbers, or texts that are numbers) and `words`. Other keys are passed over. An entry that lacks
/// one of these, or ends before it starts, is an error that names its place, counted from 0.
pub fn read_seglst(json: &Value) -> Result<BTreeMap<String, Vec<Utterance>>> {
    let Some(entries) = json.as_array() else {
        return Err(Error::Input("SegLST is a list of objects".to_owned()));
    };
    let mut recordings: BTreeMap<String, Vec<Utterance>> = BTreeMap::new();
    for (place, entry) in entries.iter().enumerate() {
        let wrong = |why: String| Error::Input(format!("[{place}]: {why}"));
        let text = |key: &str| {
            let value = entry.get(key).ok_or_else(|| wrong(format!("`{key}` is missing")))?;
            value
                .as_str()
                .map(str::to_owned)
                .ok_or_else(|| wrong(format!("`{key}` is not text")))
        };
        let number = |key: &str| {
            let value = entry.get(key).ok_or_else(|| wrong(format!("`{key}` is missing")))?;
            let number = value.as_f64().or_else(|| value.as_str()?.trim().parse().ok());
            let number = number.filter(|number| (0.0..=MAX_SECONDS).contains(number));
            number.ok_or_else(|| wrong(format!("`{key}` is {value}; it must be a number of seconds, 0 or more")))
        };
        let (start, end) = (number("start_time")?, number("end_time")?);
        if end < start {
            return Err(wrong(format!("ends at {end} s, before its start at {start} s")));
        }
        let utterance = Utterance::new(start, end, text("speaker")?, text("words")?);
        recordings.entry(text("session_id")?).or_default().push(utterance);
    }
    Ok(recordings)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::utterance::tests::utterance;

    #[test]
    fn stm_is_read() {
        let text = ";; a comment\n\nb 1 Ann 1.5 3 <o,f0,female> well  yes\na A Bob 0 2\na A Bob 2 4 <|hi|> ek\r\n";
        let found = read_stm(text).unwrap();
        assert_eq!(found["b"], [utterance(1.5, 3.0, "Ann", "well  yes")]);
        assert_eq!(
            found["a"],
            [utterance(0.0, 2.0, "Bob", ""), utterance(2.0, 4.0, "Bob", "<|hi|> ek")]
        );
        assert_eq!(found.len(), 2);
        for text in ["<unk> yes", "<noise>", "<|en,x|> yes", "a,b yes"] {
            let found = read_stm(&format!("a 1 Ann 0 1 {text}")).unwrap();
            assert_eq!(found["a"], [utterance(0.0, 1.0, "Ann", text)]);
        }
        let error = |text: &str| read_stm(text).unwrap_err().to_string();
        assert_eq!(
            error("\na 1 Ann 3"),
            "line 2: a line of STM has at least 5 fields, not 4"
        );
        for bad in ["x", "NaN", "-1", "inf", "1e300"] {
            assert!(
                error(&format!("a 1 Ann {bad} 2 yes")).starts_with("line 1: start is"),
                "{bad}"
            );
        }
        assert!(error("a 1 Ann 2 1 yes").contains("before its start"));
        assert!(error("a 1 Ann 1 2 IGNORE_TIME_SEGMENT_IN_SCORING").contains("not supported"));
    }

    #[test]
    fn seglst_is_read() {
        let entry = json!({"session_id": "a", "speaker": "Ann", "start_time": "1.50", "end_time": 3, "words": "well yes", "x": 1});
        let found = read_seglst(&json!([entry])).unwrap();
        assert_eq!(
            found,
            BTreeMap::from([("a".to_owned(), vec![utterance(1.5, 3.0, "Ann", "well yes")])])
        );
        assert_eq!(read_seglst(&json!([])).unwrap(), BTreeMap::new());
        let error = |json: &Value| read_seglst(json).unwrap_err().to_string();
        for key in ["session_id", "speaker", "start_time", "end_time", "words"] {
            let mut without = entry.clone();
            without.as_object_mut().unwrap().remove(key);
            assert_eq!(error(&json!([entry, without])), format!("[1]: `{key}` is missing"));
            let mut wrong = entry.clone();
            wrong[key] = json!([]);
            assert!(error(&json!([wrong])).contains(key));
        }
        let mut backwards = entry.clone();
        backwards["end_time"] = json!(1);
        assert!(error(&json!([backwards])).contains("before its start"));
        assert!(read_seglst(&json!({})).is_err() && read_seglst(&json!([1])).is_err());
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "([a-z<>|; {}0-9.-]{0,6}[ \n]){0,30}") {
            if let Ok(found) = read_stm(&text) {
                for utterance in found.values().flatten() {
                    prop_assert!(utterance.turn.end >= utterance.turn.start && utterance.turn.start >= 0.0);
                }
            }
        }
    }
}
