//! The scripts that languages are written in.

use flow_text::language_tag::{is_language, shortest};
use unicode_script::{Script, UnicodeScript};

/// Scripts, and the codes of languages (ISO 639) that are written in them. A language may be in several rows.
const SCRIPTS: &[(&[Script], &str)] = &[
    (
        &[Script::Latin],
        "af ak an ast ay az bem bi bm br bs ca ceb ch co cs cy da de ee en eo es et eu ff fi fil fj fo fr fy ga gd gl gn gv ha \
         haw hmn ho hr ht hu ia id ie ig io is it jv kl kw la lb lg li ln lt lu luo lv mg mh mi ms mt na nb nd ng nl nn no nr \
         nso nv ny oc om pap pl pt qu rm rn ro rw sc se sg sk sl sm sn so sq sr ss st su sv sw sz tk tl tn to tr ts tw ty uz \
         ve vi vo wa wo xh yo za zu eng deu fra spa ita por nld pol",
    ),
    (
        &[Script::Cyrillic],
        "ab av ba be bg ce cu cv kk kv ky mk mn os ru sah sr tg tt tyv udm uk rus ukr",
    ),
    (&[Script::Greek], "el ell"),
    (&[Script::Armenian], "hy"),
    (&[Script::Georgian], "ka"),
    (&[Script::Hebrew], "he iw yi"),
    (&[Script::Arabic], "ar arz ary ckb fa ks pnb prs ps sd ug ur ara urd"),
    (&[Script::Thaana], "dv"),
    (
        &[Script::Devanagari],
        "awa bho brx doi hi hne kok ks mag mai mr ne npi sa sd hin mar nep san",
    ),
    (&[Script::Bengali], "as bn mni asm ben"),
    (&[Script::Gurmukhi], "pa pan"),
    (&[Script::Gujarati], "gu guj"),
    (&[Script::Oriya], "or od ori ory"),
    (&[Script::Tamil], "ta tam"),
    (&[Script::Telugu], "te tel"),
    (&[Script::Kannada], "kn kan"),
    (&[Script::Malayalam], "ml mal"),
    (&[Script::Sinhala], "si"),
    (&[Script::Meetei_Mayek], "mni"),
    (&[Script::Ol_Chiki], "sat"),
    (&[Script::Thai], "th"),
    (&[Script::Lao], "lo"),
    (&[Script::Myanmar], "my"),
    (&[Script::Khmer], "km"),
    (&[Script::Tibetan], "bo dz"),
    (&[Script::Ethiopic], "am ti"),
    (&[Script::Han], "cmn lzh yue zh zho"),
    (&[Script::Han, Script::Hiragana, Script::Katakana], "ja jpn"),
    (&[Script::Hangul, Script::Han], "ko kor"),
];

/// The scripts that a language is written in: those of its code's script subtag (`sr-Latn`), or else the usual ones. None where they
/// are not known.
pub fn scripts_of_language(code: &str) -> Option<Vec<Script>> {
    if !is_language(code) {
        return None;
    }
    let subtag = code.split(['-', '_']).skip(1).find(|subtag| subtag.len() == 4);
    if let Some(subtag) = subtag.filter(|subtag| subtag.bytes().all(|byte| byte.is_ascii_alphabetic())) {
        let (first, rest) = subtag.split_at(1);
        let name = first.to_ascii_uppercase() + &rest.to_ascii_lowercase();
        return match name.as_str() {
            "Hans" | "Hant" => Some(vec![Script::Han]),
            "Jpan" => Some(vec![Script::Han, Script::Hiragana, Script::Katakana]),
            "Kore" => Some(vec![Script::Hangul, Script::Han]),
            name => Script::from_short_name(name).map(|script| vec![script]),
        };
    }
    let code = shortest(code).to_ascii_lowercase();
    let rows = SCRIPTS
        .iter()
        .filter(|(_, codes)| codes.split_whitespace().any(|known| known == code));
    let scripts: Vec<Script> = rows.flat_map(|(scripts, _)| scripts.iter().copied()).collect();
    (!scripts.is_empty()).then_some(scripts)
}

/// The scripts of the letters, marks and digits of a text, each once, in order. What all scripts share has none.
pub fn scripts_of_text(text: &str) -> Vec<Script> {
    let mut scripts = Vec::new();
    for script in text.chars().map(|c| c.script()) {
        let is_shared = matches!(script, Script::Common | Script::Inherited | Script::Unknown);
        if !is_shared && !scripts.contains(&script) {
            scripts.push(script);
        }
    }
    scripts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn languages_have_the_scripts_of_their_codes() {
        for (code, scripts) in [
            ("fr", &[Script::Latin][..]),
            ("pt-BR", &[Script::Latin]),
            ("eng", &[Script::Latin]),
            ("HI", &[Script::Devanagari]),
            ("sr", &[Script::Latin, Script::Cyrillic]),
            ("sr-latn", &[Script::Latin]),
            ("zh-Hant-TW", &[Script::Han]),
            ("mni", &[Script::Bengali, Script::Meetei_Mayek]),
        ] {
            assert_eq!(scripts_of_language(code).as_deref(), Some(scripts), "{code}");
        }
        for unknown in ["xx", "", "english", "und", "fr-Xxxx"] {
            assert_eq!(scripts_of_language(unknown), None, "{unknown}");
        }
        for (_, codes) in SCRIPTS {
            assert!(codes.split_whitespace().all(is_language), "{codes}");
        }
    }

    #[test]
    fn what_scripts_share_has_none() {
        assert_eq!(scripts_of_text("\u{2581}12 .,!?-'"), []);
        assert_eq!(scripts_of_text("\u{2581}the क्"), [Script::Latin, Script::Devanagari]);
    }
}
