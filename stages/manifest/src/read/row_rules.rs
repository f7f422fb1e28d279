//! Rules for rows of every format: the form of languages, and limits of the duration.

use flow_audio::language_tag::is_language;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::rows::{Refusal, refuse_by_rule};

/// Names of folders of three letters that are no languages in the folders of a corpus, though some are ISO 639-3 codes.
const NO_LANGUAGES: [&str; 13] = [
    "aac", "all", "dev", "lab", "oga", "ogg", "raw", "set", "spk", "txt", "utt", "val", "wav",
];

/// The codes of ISO 639-1: no other folder of two letters names a language.
const TWO_LETTERS: &str = "aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de \
    dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu \
    ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng \
    nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg sh si sk sl sm sn so sq sr ss st su sv sw \
    ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu";

/// Whether the region of a language tag is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Regions {
    /// `en-US`, `en_US` and `pt-BR` become `en` and `pt`.
    #[default]
    Drop,
    /// Tags keep theirs: `EN-us` becomes `en-US`.
    Keep,
}

/// The rules that every row is checked by.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RowRules {
    pub regions: Regions,
    /// In seconds; a row of exactly this length stays.
    pub min_duration: Option<f64>,
    /// In seconds; a row of exactly this length stays.
    pub max_duration: Option<f64>,
}

impl RowRules {
    /// The language as the column `lang` has it.
    pub fn language(&self, tag: String) -> String {
        match (self.regions, language_and_region(&tag)) {
            (Regions::Drop, Some((language, _))) => language.to_ascii_lowercase(),
            _ if is_language(&tag) => in_usual_case(&tag),
            _ => tag,
        }
    }

    /// # Errors
    /// Where the row is too short or too long.
    pub fn duration(&self, seconds: f64) -> Result<(), Refusal> {
        if let Some(least) = self.min_duration.filter(|&least| seconds < least) {
            let why = format!("{seconds} s; `min_duration` is {least} s");
            return Err(refuse_by_rule("duration_too_short", why));
        }
        if let Some(most) = self.max_duration.filter(|&most| seconds > most) {
            let why = format!("{seconds} s; `max_duration` is {most} s");
            return Err(refuse_by_rule("duration_too_long", why));
        }
        Ok(())
    }
}

/// A tag in the case that BCP 47 recommends, so that a language has one name: `en`, `zh-Hant-TW`, `sl-rozaj`. Its separators
/// stay.
fn in_usual_case(tag: &str) -> String {
    let mut written = String::with_capacity(tag.len());
    let mut after_singleton = false;
    for part in tag.split_inclusive(['-', '_']) {
        let length = part.trim_end_matches(['-', '_']).len();
        let mut cased = part.to_ascii_lowercase();
        match length {
            _ if written.is_empty() || after_singleton => {}
            2 => cased.make_ascii_uppercase(),
            4 if part.starts_with(|letter: char| letter.is_ascii_alphabetic()) => cased[..1].make_ascii_uppercase(),
            _ => {}
        }
        after_singleton |= length == 1;
        written.push_str(&cased);
    }
    written
}

/// A language of two or three letters and a region as BCP 47 has it, two letters or three digits: `en-US`, `es_419`. Tags
/// with more or other parts, such as `zh-Hant-TW` and `sr-Latn`, are none.
fn language_and_region(tag: &str) -> Option<(&str, &str)> {
    let (language, region) = tag.split_once(['-', '_'])?;
    let letters = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphabetic());
    let is_region = match region.len() {
        2 => letters(region),
        3 => region.bytes().all(|byte| byte.is_ascii_digit()),
        _ => false,
    };
    ((2..=3).contains(&language.len()) && letters(language) && is_region).then_some((language, region))
}

/// Whether a folder is named like a language: a code of ISO 639-1 or three letters, perhaps with a region (`hi`, `en-IN`), and
/// none of the names that folders of a corpus often have (`dev`, `wav`).
pub fn names_language(folder: &str) -> bool {
    // A number after letters is more often that of a speaker (`spk_001`) than a region's.
    let tag = language_and_region(folder).filter(|(_, region)| region.len() == 2);
    let language = tag.map_or(folder, |(language, _)| language);
    let language = language.to_ascii_lowercase();
    match language.len() {
        2 => TWO_LETTERS.split(' ').any(|code| code == language),
        3 => language.bytes().all(|byte| byte.is_ascii_alphabetic()) && !NO_LANGUAGES.contains(&language.as_str()),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flow_runtime::RejectClass;

    #[test]
    fn folders_of_speakers_and_sets_name_no_language() {
        for (folder, is_language) in [
            ("hi", true),
            ("en-IN", true),
            ("nan_tw", true),
            ("spk_001", false),
            ("utt-042", false),
            ("wav", false),
            ("wav_001", false),
            ("dev-us", false),
            ("dr", false),
            ("spk", false),
            ("a", false),
        ] {
            assert_eq!(names_language(folder), is_language, "{folder}");
        }
    }

    #[test]
    fn regions_go_and_other_parts_of_tags_stay() {
        let drop = RowRules::default();
        let keep = RowRules {
            regions: Regions::Keep,
            ..drop
        };
        for (tag, language) in [
            ("en-US", "en"),
            ("en_US", "en"),
            ("pt-BR", "pt"),
            ("EN-us", "en"),
            ("es-419", "es"),
            ("nan-tw", "nan"),
            ("en", "en"),
            ("hin", "hin"),
            ("Klingon", "Klingon"),
            ("zh-Hant", "zh-Hant"),
            ("zh-Hant-TW", "zh-Hant-TW"),
            ("rm-sursilv", "rm-sursilv"),
            ("e-US", "e-US"),
            ("en-", "en-"),
            ("en-é", "en-é"),
            ("", ""),
        ] {
            assert_eq!(drop.language(tag.into()), language, "{tag}");
        }
        for (tag, language) in [
            ("EN", "en"),
            ("en", "en"),
            ("EN-US", "en-US"),
            ("EN_us", "en_US"),
            ("en-US", "en-US"),
            ("es-419", "es-419"),
            ("ZH-hANT-tw", "zh-Hant-TW"),
            ("SL-ROZAJ-1994", "sl-rozaj-1994"),
            ("en-", "en-"),
            ("en-É", "en-É"),
            ("Klingon", "Klingon"),
            ("", ""),
        ] {
            assert_eq!(keep.language(tag.into()), language, "{tag}");
        }
        for (tag, language) in [("EN", "en"), ("HIN", "hin"), ("ZH-hant", "zh-Hant")] {
            assert_eq!(drop.language(tag.into()), language, "{tag}");
        }
    }

    #[test]
    fn rows_at_the_limit_stay() {
        let rules = RowRules {
            min_duration: Some(1.0),
            max_duration: Some(20.0),
            ..RowRules::default()
        };
        let reason = |seconds: f64| {
            let refusal = rules.duration(seconds).err()?;
            assert_eq!(refusal.class, RejectClass::Rule);
            Some(refusal.reason)
        };
        assert_eq!((reason(1.0), reason(20.0)), (None, None));
        assert_eq!(reason(1.0_f64.next_down()), Some("duration_too_short"));
        assert_eq!(reason(20.0_f64.next_up()), Some("duration_too_long"));
        assert_eq!(RowRules::default().duration(1e9), Ok(()));
    }

    #[test]
    fn folders_of_splits_and_formats_are_no_languages() {
        for name in ["hi", "hin", "en-IN", "pt_BR", "Hi"] {
            assert!(names_language(name), "{name}");
        }
        for name in [
            "dev",
            "dev-clean",
            "wav",
            "WAV",
            "wavs",
            "train",
            "a",
            "h1",
            "en-clean",
            "",
        ] {
            assert!(!names_language(name), "{name}");
        }
    }
}
