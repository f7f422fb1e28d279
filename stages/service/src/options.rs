//! What clients say of how a recording is transcribed: the fields that forms of requests and jobs, and the sessions of live
//! transcription have in common.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use flow_speakers::clustering::Clusters;
use flow_speakers::diarizer::KnownSpeakers;
use flow_text::written_form::nfc;
use flow_transcription::decoding_request::{DecodingRequest, phrases_of_prompt};
use flow_transcription::language_prior::parse_languages;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Most bytes of a value, but for references.
const MAX_VALUE: usize = 16 << 10;
/// Most speakers that a request may name the number of.
pub const MAX_SPEAKERS: usize = 100;
/// Most known speakers of a request, as with OpenAI.
const MAX_KNOWN: usize = 4;
/// Most bytes of the reference of one, as base64.
const MAX_REFERENCE: usize = 4 << 20;
/// The longest name of a known speaker, in bytes: each of their words has it.
const MAX_SPEAKER_NAME: usize = 256;

/// The names of fields; those that may come several times end with `[]` in forms, and are lists in JSON.
const LANGUAGE: &str = "language";
const LANGUAGES: &str = "languages[]";
const PROMPT: &str = "prompt";
const PHRASES: &str = "phrases[]";
const BOOST_WEIGHT: &str = "boost_weight";
const NUMBERS: &str = "numbers";
const FILLERS: &str = "fillers";
const NUM_SPEAKERS: &str = "num_speakers";
const MIN_SPEAKERS: &str = "min_speakers";
const MAX_SPEAKERS_FIELD: &str = "max_speakers";
const KNOWN_NAMES: &str = "known_speaker_names[]";
const KNOWN_REFERENCES: &str = "known_speaker_references[]";
const FIELDS: [&str; 12] = [
    LANGUAGE,
    LANGUAGES,
    PROMPT,
    PHRASES,
    BOOST_WEIGHT,
    NUMBERS,
    FILLERS,
    NUM_SPEAKERS,
    MIN_SPEAKERS,
    MAX_SPEAKERS_FIELD,
    KNOWN_NAMES,
    KNOWN_REFERENCES,
];

/// A value that is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrongOption {
    pub field: &'static str,
    pub code: &'static str,
    pub message: String,
}

impl WrongOption {
    fn value(field: &'static str, message: impl Into<String>) -> Self {
        WrongOption {
            field,
            code: "invalid_value",
            message: message.into(),
        }
    }

    /// The field's name in JSON.
    pub fn json_name(&self) -> &'static str {
        self.field.trim_end_matches("[]")
    }
}

/// What was said so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    /// How the recording is decoded.
    pub decoding: DecodingRequest,
    /// The number of speakers, or limits of it.
    pub clusters: Clusters,
    /// Known speakers, and for each, in the same order, a file with a recording of the voice.
    known_names: Vec<String>,
    references: Vec<Vec<u8>>,
    given: Vec<&'static str>,
}

impl Options {
    /// How many fields there are.
    #[cfg(test)]
    pub const FIELDS: usize = FIELDS.len();

    /// The name of a field, which forms may have without `[]`, and the most bytes of its value. None: it is none of these.
    pub fn field(name: &str) -> Option<(&'static str, usize)> {
        let is_name = |field: &&&'static str| **field == name || field.strip_suffix("[]") == Some(name);
        let field = *FIELDS.iter().find(is_name)?;
        let most = match field {
            KNOWN_REFERENCES => MAX_REFERENCE,
            KNOWN_NAMES => MAX_SPEAKER_NAME,
            _ => MAX_VALUE,
        };
        Some((field, most))
    }

    /// Takes a value of one of the fields of [`Options::field`]; an empty one counts as not given.
    ///
    /// # Errors
    /// If it is wrong, or given twice.
    pub fn set(&mut self, field: &'static str, text: &str) -> Result<(), WrongOption> {
        if text.trim().is_empty() {
            return Ok(());
        }
        if !field.ends_with("[]") && self.given.contains(&field) {
            return Err(WrongOption {
                code: "duplicate_parameter",
                ..WrongOption::value(field, format!("`{field}` is given twice"))
            });
        }
        let wrong = |why: String| WrongOption::value(field, why);
        match field {
            LANGUAGE | LANGUAGES => {
                for language in parse_languages(text).map_err(wrong)? {
                    if !self.decoding.languages.contains(&language) {
                        self.decoding.languages.push(language);
                    }
                }
                parse_languages(&self.decoding.languages.join(",")).map_err(wrong)?;
            }
            PROMPT => self.decoding.phrases.extend(phrases_of_prompt(text)),
            PHRASES => self.decoding.phrases.push(text.trim().to_owned()),
            BOOST_WEIGHT => {
                let number = text.trim().parse::<f64>().ok();
                let number = number.ok_or_else(|| wrong(format!("`{}` is not a number", shown(text))))?;
                self.decoding.boost_weight = Some(number);
            }
            NUMBERS => self.decoding.numbers = Some(one_of(text, &["keep", "digits", "words"]).map_err(wrong)?),
            FILLERS => self.decoding.fillers = Some(one_of(text, &["keep", "drop"]).map_err(wrong)?),
            NUM_SPEAKERS => self.clusters.number = Some(count(text).map_err(wrong)?),
            MIN_SPEAKERS => self.clusters.least = Some(count(text).map_err(wrong)?),
            MAX_SPEAKERS_FIELD => self.clusters.most = Some(count(text).map_err(wrong)?),
            KNOWN_NAMES => {
                if let Some(fault) = KnownSpeakers::fault_of_name(text) {
                    return Err(wrong(format!("`{}` {fault}", shown(text))));
                }
                if self.known_names.iter().any(|known| nfc(known) == nfc(text)) {
                    return Err(wrong(format!("`{}` is given twice", shown(text))));
                }
                self.known_names.push(text.to_owned());
                at_most_known(self.known_names.len()).map_err(wrong)?;
            }
            KNOWN_REFERENCES => {
                let bytes = data_of(text.trim()).ok_or_else(|| {
                    wrong("it is not a data URL in base64, such as `data:audio/wav;base64,...`".to_owned())
                })?;
                self.references.push(bytes);
                at_most_known(self.references.len()).map_err(wrong)?;
            }
            _ => return Ok(()),
        }
        self.given.push(field);
        let field_of = |name: &'static str| if name == "phrases" { PHRASES } else { BOOST_WEIGHT };
        self.decoding
            .check()
            .map_err(|(name, why)| WrongOption::value(field_of(name), why))
    }

    /// Takes a value of JSON: a text, a number, or a list of these for a field that may come several times. `null` is nothing.
    ///
    /// # Errors
    /// As [`Options::set`], and if it is of another type or too long.
    pub fn set_json(&mut self, (field, most): (&'static str, usize), value: &Value) -> Result<(), WrongOption> {
        let mut set = |text: &str| {
            if text.len() > most {
                return Err(WrongOption::value(field, format!("it has more than {most} bytes")));
            }
            self.set(field, text)
        };
        match value {
            Value::Null => Ok(()),
            Value::String(text) => set(text),
            Value::Number(number) => set(&number.to_string()),
            Value::Array(values) if field.ends_with("[]") => {
                for value in values {
                    let Value::String(text) = value else {
                        return Err(WrongOption::value(field, "it is not a list of texts"));
                    };
                    set(text)?;
                }
                Ok(())
            }
            _ => Err(WrongOption::value(field, "it has another type")),
        }
    }

    /// Whether fields fit together.
    ///
    /// # Errors
    /// The field that does not.
    pub fn check(&self) -> Result<(), WrongOption> {
        let Clusters { number, least, most } = self.clusters;
        let fewest = number.or(least).unwrap_or(1);
        if most.is_some_and(|most| most < fewest)
            || number.is_some_and(|number| least.is_some_and(|least| least > number))
        {
            let message = "`num_speakers`, `min_speakers` and `max_speakers` contradict each other";
            return Err(WrongOption::value(MAX_SPEAKERS_FIELD, message));
        }
        if self.known_names.len() != self.references.len() {
            let message = format!(
                "there are {} known_speaker_names[] and {} known_speaker_references[]: each name has one reference",
                self.known_names.len(),
                self.references.len()
            );
            return Err(WrongOption::value(KNOWN_REFERENCES, message));
        }
        Ok(())
    }

    /// The first field about speakers that was given.
    pub fn of_speakers(&self) -> Option<&'static str> {
        let fields = [
            NUM_SPEAKERS,
            MIN_SPEAKERS,
            MAX_SPEAKERS_FIELD,
            KNOWN_NAMES,
            KNOWN_REFERENCES,
        ];
        fields.into_iter().find(|field| self.given.contains(field))
    }

    /// Whether two say the same of speakers.
    pub fn has_same_speakers(&self, other: &Self) -> bool {
        self.clusters == other.clusters && self.known_names == other.known_names && self.references == other.references
    }

    /// The known speakers: a name, and a file with a recording of the voice.
    pub fn take_references(&mut self) -> Vec<(String, Vec<u8>)> {
        let names = std::mem::take(&mut self.known_names);
        names.into_iter().zip(std::mem::take(&mut self.references)).collect()
    }
}

/// The value that one of these names has.
fn one_of<T: DeserializeOwned>(text: &str, names: &[&str]) -> Result<T, String> {
    let found = serde_json::from_value(Value::from(text.trim()));
    found.map_err(|_| format!("`{}` is none of {}", shown(text), names.join(", ")))
}

/// A number of speakers.
fn count(text: &str) -> Result<usize, String> {
    let number = text.trim().parse::<usize>().ok();
    let number = number.filter(|number| (1..=MAX_SPEAKERS).contains(number));
    number.ok_or_else(|| format!("`{}` is not a whole number from 1 to {MAX_SPEAKERS}", shown(text)))
}

fn at_most_known(count: usize) -> Result<(), String> {
    match count > MAX_KNOWN {
        true => Err(format!("there are more than {MAX_KNOWN}")),
        false => Ok(()),
    }
}

/// The bytes of a data URL in base64.
fn data_of(url: &str) -> Option<Vec<u8>> {
    let (head, data) = url.split_once(',')?;
    let is_base64 = head.get(..5)?.eq_ignore_ascii_case("data:") && head.to_ascii_lowercase().ends_with(";base64");
    let bytes = is_base64.then(|| STANDARD.decode(data).ok())?;
    bytes.filter(|bytes| !bytes.is_empty())
}

/// A client's value, truncated for a message.
pub fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(40).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn data_urls_hold_bytes_in_base64() {
        assert_eq!(data_of("data:audio/wav;base64,AQID"), Some(vec![1, 2, 3]));
        assert_eq!(data_of("DATA:;BASE64,AQ=="), Some(vec![1]));
        for wrong in [
            "",
            "data:audio/wav;base64,",
            "data:audio/wav,AQID",
            "https://a/b.wav",
            "AQID",
            "data:;base64,AQ!",
        ] {
            assert_eq!(data_of(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn forms_and_json_say_the_same() {
        let (mut form, mut document) = (Options::default(), Options::default());
        for (name, text) in [
            ("language", "fr"),
            ("languages[]", "en"),
            ("languages[]", "fr"),
            ("prompt", "Ada Lovelace, Digique"),
            ("phrases[]", "Zürich"),
            ("boost_weight", "2"),
            ("numbers", "digits"),
            ("fillers", "drop"),
            ("max_speakers", "3"),
            ("known_speaker_names", "Ada"),
            ("known_speaker_references[]", "data:;base64,AQ=="),
        ] {
            let (field, most) = Options::field(name).unwrap();
            assert!(text.len() <= most);
            form.set(field, text).unwrap();
        }
        for (name, value) in [
            ("language", json!("fr")),
            ("languages", json!(["en", "fr"])),
            ("prompt", json!("Ada Lovelace, Digique")),
            ("phrases", json!(["Zürich"])),
            ("boost_weight", json!(2)),
            ("numbers", json!("digits")),
            ("fillers", json!("drop")),
            ("max_speakers", json!(3)),
            ("num_speakers", Value::Null),
            ("known_speaker_names", json!(["Ada"])),
            ("known_speaker_references", json!(["data:;base64,AQ=="])),
        ] {
            document.set_json(Options::field(name).unwrap(), &value).unwrap();
        }
        document.given.clear();
        form.given.clear();
        assert_eq!(form, document);
        assert_eq!(form.decoding.languages, ["fr", "en"]);
        assert_eq!(form.decoding.phrases, ["Ada Lovelace", "Digique", "Zürich"]);
        assert_eq!(form.check(), Ok(()));
        assert_eq!(form.take_references(), [("Ada".to_owned(), vec![1])]);
        assert_eq!(Options::field("model"), None);
    }

    #[test]
    fn wrong_values_name_their_field() {
        for (name, value) in [
            ("language", json!("klingon")),
            ("language", json!(["fr"])),
            ("languages", json!([1])),
            ("prompt", json!({})),
            ("prompt", json!("x".repeat(MAX_VALUE + 1))),
            ("phrases", json!(vec!["a"; 1001])),
            ("boost_weight", json!(-1)),
            ("boost_weight", json!("NaN")),
            ("numbers", json!("roman")),
            ("fillers", json!(1)),
            ("num_speakers", json!(0)),
            ("num_speakers", json!(2.5)),
            ("max_speakers", json!(true)),
            ("known_speaker_names", json!(["SPEAKER_00"])),
            ("known_speaker_names", json!(["Ren\u{e9}", "Rene\u{301}"])),
            ("known_speaker_references", json!(["AQ=="])),
        ] {
            let wrong = Options::default().set_json(Options::field(name).unwrap(), &value);
            assert_eq!(wrong.unwrap_err().json_name(), name, "{value}");
        }
    }
}
