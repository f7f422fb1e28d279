//! A row as a manifest has it, and why one is refused.

use std::path::PathBuf;

use flow_kind::RejectClass;
use flow_text::language_tag::is_language;

/// Bytes of a refused line that are kept.
pub const KEPT_OF_A_LINE: usize = 64 << 10;
/// Letters of a wrong language that a reject shows.
const SHOWN_OF_A_LANGUAGE: usize = 40;

/// Why a row is refused.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    pub reason: &'static str,
    pub class: RejectClass,
    pub detail: String,
}

/// Something is broken.
pub fn refuse(reason: &'static str, detail: impl Into<String>) -> Refusal {
    Refusal {
        reason,
        class: RejectClass::Fault,
        detail: detail.into(),
    }
}

/// A rule of the settings.
pub fn refuse_by_rule(reason: &'static str, detail: impl Into<String>) -> Refusal {
    Refusal {
        class: RejectClass::Rule,
        ..refuse(reason, detail)
    }
}

/// Where a row's recording may be.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Wanted {
    /// Candidate files, in order of precedence.
    pub files: Vec<PathBuf>,
    /// A tar and the name of a member, if it is none of the files.
    pub member: Option<(PathBuf, String)>,
}

impl Wanted {
    pub fn file(path: impl Into<PathBuf>) -> Wanted {
        Wanted {
            files: vec![path.into()],
            member: None,
        }
    }
}

/// One row of a manifest, before its recording was looked for.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ManifestRow {
    pub segment_id: String,
    pub shard_id: String,
    pub text: String,
    /// In seconds; none where the recording has to tell.
    pub duration: Option<f64>,
    pub lang: String,
    /// The key or column that names the language; empty where it is named by none.
    pub lang_field: &'static str,
    pub tar_member_name: String,
    pub tar_path: String,
    pub source: String,
    /// Where the row begins in its recording, in seconds; none for its beginning.
    pub start: Option<f64>,
    pub wanted: Wanted,
    /// Whether a recording with several channels is refused.
    pub one_channel: bool,
    /// What else the manifest says: a JSON object.
    pub extra: Option<String>,
}

impl ManifestRow {
    /// Of its texts.
    pub fn bytes(&self) -> usize {
        let texts = [
            &self.segment_id,
            &self.shard_id,
            &self.text,
            &self.lang,
            &self.tar_member_name,
            &self.tar_path,
            &self.source,
        ];
        texts.iter().map(|text| text.len()).sum::<usize>() + self.extra.as_ref().map_or(0, String::len)
    }

    pub fn check(&self) -> Result<(), Refusal> {
        if let Some(seconds) = self.duration
            && !(seconds.is_finite() && seconds > 0.0)
        {
            return Err(refuse("duration_invalid", format!("{seconds} s")));
        }
        if let Some(start) = self.start
            && !(start.is_finite() && start >= 0.0)
        {
            return Err(refuse("offset_invalid", format!("{start} s")));
        }
        if self.lang.trim().is_empty() {
            return Err(refuse(
                "missing_field",
                "lang: the row names none; the setting `lang`, such as `--set lang=en`, gives one to all such rows (`und` where it does not matter)",
            ));
        }
        if !is_language(&self.lang) {
            // Of a wrong column this may be anything.
            let shown: String = self.lang.chars().take(SHOWN_OF_A_LANGUAGE).collect();
            let field = match self.lang_field {
                "" => "the tag that its text begins with".to_string(),
                field => format!("`{field}`"),
            };
            return Err(refuse(
                "bad_language",
                format!("{shown:?} in {field} is not a language code such as `hi` or `en-US`"),
            ));
        }
        Ok(())
    }
}

/// A line as the values of a reject.
pub fn line_values(line: &str) -> String {
    let mut end = line.len().min(KEPT_OF_A_LINE);
    while !line.is_char_boundary(end) {
        end -= 1;
    }
    serde_json::json!({ "line": &line[..end] }).to_string()
}
