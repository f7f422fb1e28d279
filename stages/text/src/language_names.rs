//! English names of languages, as folders of corpora and clients of the service write them.

/// Names in lower case and their codes, sorted.
const NAMES: [(&str, &str); 100] = [
    ("afrikaans", "af"),
    ("albanian", "sq"),
    ("amharic", "am"),
    ("arabic", "ar"),
    ("armenian", "hy"),
    ("assamese", "as"),
    ("azerbaijani", "az"),
    ("basque", "eu"),
    ("belarusian", "be"),
    ("bengali", "bn"),
    ("bodo", "brx"),
    ("bosnian", "bs"),
    ("bulgarian", "bg"),
    ("burmese", "my"),
    ("cantonese", "yue"),
    ("catalan", "ca"),
    ("chinese", "zh"),
    ("croatian", "hr"),
    ("czech", "cs"),
    ("danish", "da"),
    ("dogri", "doi"),
    ("dutch", "nl"),
    ("english", "en"),
    ("estonian", "et"),
    ("finnish", "fi"),
    ("french", "fr"),
    ("galician", "gl"),
    ("georgian", "ka"),
    ("german", "de"),
    ("greek", "el"),
    ("gujarati", "gu"),
    ("hausa", "ha"),
    ("hebrew", "he"),
    ("hindi", "hi"),
    ("hungarian", "hu"),
    ("icelandic", "is"),
    ("indonesian", "id"),
    ("irish", "ga"),
    ("italian", "it"),
    ("japanese", "ja"),
    ("javanese", "jv"),
    ("kannada", "kn"),
    ("kashmiri", "ks"),
    ("kazakh", "kk"),
    ("khmer", "km"),
    ("konkani", "kok"),
    ("korean", "ko"),
    ("lao", "lo"),
    ("latvian", "lv"),
    ("lithuanian", "lt"),
    ("macedonian", "mk"),
    ("maithili", "mai"),
    ("malay", "ms"),
    ("malayalam", "ml"),
    ("maltese", "mt"),
    ("mandarin", "zh"),
    ("manipuri", "mni"),
    ("maori", "mi"),
    ("marathi", "mr"),
    ("mongolian", "mn"),
    ("nepali", "ne"),
    ("norwegian", "no"),
    ("odia", "or"),
    ("oriya", "or"),
    ("pashto", "ps"),
    ("persian", "fa"),
    ("polish", "pl"),
    ("portuguese", "pt"),
    ("punjabi", "pa"),
    ("romanian", "ro"),
    ("russian", "ru"),
    ("sanskrit", "sa"),
    ("santali", "sat"),
    ("serbian", "sr"),
    ("sindhi", "sd"),
    ("sinhala", "si"),
    ("slovak", "sk"),
    ("slovenian", "sl"),
    ("somali", "so"),
    ("spanish", "es"),
    ("sundanese", "su"),
    ("swahili", "sw"),
    ("swedish", "sv"),
    ("tagalog", "tl"),
    ("tajik", "tg"),
    ("tamil", "ta"),
    ("tatar", "tt"),
    ("telugu", "te"),
    ("thai", "th"),
    ("tibetan", "bo"),
    ("turkish", "tr"),
    ("turkmen", "tk"),
    ("ukrainian", "uk"),
    ("urdu", "ur"),
    ("uzbek", "uz"),
    ("vietnamese", "vi"),
    ("welsh", "cy"),
    ("yiddish", "yi"),
    ("yoruba", "yo"),
    ("zulu", "zu"),
];

/// The code of a language by its English name, in any case and with white space around it.
///
/// ```
/// # use flow_text::language_names::code_of_name;
/// assert_eq!(code_of_name(" German"), Some("de"));
/// assert_eq!(code_of_name("de"), None);
/// ```
pub fn code_of_name(name: &str) -> Option<&'static str> {
    let lower = name.trim().to_lowercase();
    let place = NAMES.binary_search_by(|(known, _)| (*known).cmp(&lower)).ok()?;
    Some(NAMES[place].1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::language_tag::is_language;

    #[test]
    fn every_name_is_found_and_has_a_code() {
        for (name, code) in NAMES {
            assert_eq!(code_of_name(&name.to_uppercase()), Some(code));
            assert!(is_language(code), "{name}");
        }
    }
}
