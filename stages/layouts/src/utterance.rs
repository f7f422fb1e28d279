//! What layouts make rows of.

use serde_json::{Map, Value};

use flow_corpus::ReadSettings;
use flow_corpus::manifest_row::{ManifestRow, Refusal, Wanted, refuse};
use flow_corpus::naming::language;
use flow_corpus::times::TIME_KEYS;
use flow_text::language_names::code_of_name;
use flow_text::language_tag::is_language;

/// The code of a language that is called by its English name; a code as it is. None of another text.
pub fn language_called(name: &str) -> Option<&str> {
    code_of_name(name).or_else(|| is_code(name).then_some(name))
}

/// Whether a name is a code of two or three letters, perhaps with a region (`hi`, `hi_in`).
fn is_code(name: &str) -> bool {
    use flow_corpus::row_rules::{Likeness, names_language};
    is_language(name) && names_language(name) == Likeness::Code
}

/// Values of all rows.
#[derive(Clone, Debug)]
pub struct Common {
    pub lang: String,
    pub source: String,
}

impl Common {
    pub fn of(settings: &ReadSettings) -> Common {
        Common {
            lang: settings.lang.clone(),
            source: settings.source.clone(),
        }
    }
}

/// An utterance of a corpus.
#[derive(Clone, Debug, Default)]
pub struct Utterance {
    pub id: String,
    pub shard: String,
    pub text: String,
    /// What the corpus says of its language, and the name of the field that says it.
    pub lang: Option<String>,
    pub lang_field: &'static str,
    /// The language of the folder that it is in.
    pub folder_lang: Option<String>,
    /// In seconds.
    pub start: f64,
    pub duration: Option<f64>,
    pub wanted: Wanted,
    /// Whether a recording with several channels is refused.
    pub one_channel: bool,
    pub tar_path: String,
    pub tar_member_name: String,
    pub extra: Map<String, Value>,
}

impl Utterance {
    pub fn row(mut self, common: &Common) -> ManifestRow {
        self.extra.retain(|key, value| {
            let is_empty = value.is_null() || value.as_str().is_some_and(str::is_empty);
            !is_empty && !flow_corpus::extra::has_column(key)
        });
        // A time under such a key would be read as one of the row.
        for key in TIME_KEYS {
            if let Some(value) = self.extra.remove(key) {
                self.extra.insert(format!("original_{key}"), value);
            }
        }
        let said = self.lang.as_deref().map(str::trim).filter(|said| !said.is_empty());
        let lang = language(
            said.map(|said| language_called(said).unwrap_or(said)),
            &common.lang,
            self.folder_lang.as_deref(),
            &self.text,
        );
        ManifestRow {
            segment_id: self.id,
            shard_id: self.shard,
            lang,
            lang_field: said.map_or("", |_| self.lang_field),
            text: self.text,
            duration: self.duration,
            tar_member_name: self.tar_member_name,
            tar_path: self.tar_path,
            source: common.source.clone(),
            start: (self.start != 0.0).then_some(self.start),
            wanted: self.wanted,
            one_channel: self.one_channel,
            extra: (!self.extra.is_empty()).then(|| Value::Object(self.extra).to_string()),
        }
    }
}

/// A text without what surrounds it; one without a word is refused.
///
/// # Errors
/// Of the reason `missing_text`.
pub fn text_of(text: &str, what: &str) -> Result<String, Refusal> {
    match text.trim() {
        "" => Err(refuse("missing_text", what.to_string())),
        text => Ok(text.to_string()),
    }
}
