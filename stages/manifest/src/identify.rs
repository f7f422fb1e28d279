//! Identifies the language of a text among several languages of one script, by its letter n-grams.
//!
//! [`crate::language`] uses scripts and letters, which do not distinguish Hindi from Marathi. The crate `lingua` does,
//! with a confidence that is low for short texts: most single words remain undecided.

use std::sync::LazyLock;

use lingua::{Language, LanguageDetector, LanguageDetectorBuilder};

/// The languages that are distinguished, by their codes in manifests. All have one script; the crate has no model of
/// the other languages written in Devanagari (Nepali, Maithili, ...), nor of Assamese beside Bengali.
const TOLD_APART: [(&str, Language); 2] = [("hi", Language::Hindi), ("mr", Language::Marathi)];

static DETECTOR: LazyLock<LanguageDetector> =
    LazyLock::new(|| LanguageDetectorBuilder::from_languages(&TOLD_APART.map(|(_, language)| language)).build());

/// The language of a text that is labelled `lang`: another one only if its confidence is at least `least` (0 to 1).
/// Languages that are not distinguished are unchanged, and with a `least` that is not above 0 all are.
pub fn identify_language<'a>(clean: &str, lang: &'a str, least: f64) -> &'a str {
    let asked = least > 0.0;
    if !asked || !TOLD_APART.iter().any(|(code, _)| *code == lang) {
        return lang;
    }
    // Sorted by confidence, the surest first.
    let Some((surest, confidence)) = DETECTOR.compute_language_confidence_values(clean).into_iter().next() else {
        return lang;
    };
    let code = TOLD_APART.iter().find(|(_, language)| *language == surest);
    match code {
        Some((code, _)) if confidence >= least => code,
        _ => lang,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_language_needs_the_confidence_that_is_asked_for() {
        let marathi = "मोठे शाळा नागपूर मध्ये आहे";
        assert_eq!(identify_language(marathi, "hi", 0.8), "mr");
        assert_eq!(identify_language(marathi, "mr", 0.8), "mr");
        assert_eq!(identify_language(marathi, "hi", 0.999), "hi", "not as sure as that");
        for off in [0.0, -1.0, f64::NAN] {
            assert_eq!(identify_language(marathi, "hi", off), "hi");
        }
        assert_eq!(
            identify_language(marathi, "ne", 0.5),
            "ne",
            "no model tells Nepali apart"
        );
        assert_eq!(
            identify_language("मुझे तीन गाड़ी चाहिए", "hi", 0.8),
            "hi",
            "0.63 for Marathi"
        );
        assert_eq!(identify_language("", "hi", 0.1), "hi");
        assert_eq!(identify_language("42 \u{0}", "mr", 0.6), "mr");
    }
}
