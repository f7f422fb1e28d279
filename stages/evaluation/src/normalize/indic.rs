//! Texts in Indic scripts as AI4Bharat's Vistaar compares them: without punctuation, and with one spelling for what can be
//! encoded in several ways, as the Indic NLP Library writes it with its default options.

use super::characters::ascii_digit;

/// A script, with its rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Script {
    Devanagari,
    Bengali,
    Gurmukhi,
    Gujarati,
    Oriya,
    Tamil,
    Telugu,
    Kannada,
    Malayalam,
}

const SCRIPTS: [Script; 9] = [
    Script::Devanagari,
    Script::Bengali,
    Script::Gurmukhi,
    Script::Gujarati,
    Script::Oriya,
    Script::Tamil,
    Script::Telugu,
    Script::Kannada,
    Script::Malayalam,
];

type Replacements = &'static [(&'static str, &'static str)];

impl Script {
    /// The script of a language by its code.
    fn of_language(language: &str) -> Option<Script> {
        Some(match language {
            "hi" | "mr" | "sa" | "kok" | "ne" | "sd" => Script::Devanagari,
            "bn" | "as" => Script::Bengali,
            "pa" => Script::Gurmukhi,
            "gu" => Script::Gujarati,
            "or" => Script::Oriya,
            "ta" => Script::Tamil,
            "te" => Script::Telugu,
            "kn" => Script::Kannada,
            "ml" => Script::Malayalam,
            _ => return None,
        })
    }

    /// The script with the most characters in a text; of several, the first in Unicode.
    fn of_text(text: &str) -> Option<Script> {
        let mut counts = [0usize; SCRIPTS.len()];
        for c in text.chars() {
            if let Some(place) = SCRIPTS.iter().position(|script| script.has(c)) {
                counts[place] += 1;
            }
        }
        let most = counts.into_iter().max().filter(|most| *most > 0)?;
        SCRIPTS
            .into_iter()
            .zip(counts)
            .find(|(_, count)| *count == most)
            .map(|(script, _)| script)
    }

    /// The first character of its block, which has 128.
    fn block(self) -> u32 {
        match self {
            Script::Devanagari => 0x900,
            Script::Bengali => 0x980,
            Script::Gurmukhi => 0xa00,
            Script::Gujarati => 0xa80,
            Script::Oriya => 0xb00,
            Script::Tamil => 0xb80,
            Script::Telugu => 0xc00,
            Script::Kannada => 0xc80,
            Script::Malayalam => 0xd00,
        }
    }

    fn has(self, c: char) -> bool {
        (self.block()..self.block() + 0x80).contains(&u32::from(c))
    }

    /// The sign that is written with a colon.
    fn visarga(self) -> char {
        char::from_u32(self.block() + 3).unwrap_or(':')
    }

    /// What is replaced before the rules of all scripts, one after the other.
    fn first(self) -> Replacements {
        match self {
            // Independent vowels that are written as a carrier and a sign.
            Script::Gurmukhi => &[
                ("\u{a05}\u{a3e}", "\u{a06}"),
                ("\u{a72}\u{a3f}", "\u{a07}"),
                ("\u{a72}\u{a40}", "\u{a08}"),
                ("\u{a73}\u{a41}", "\u{a09}"),
                ("\u{a73}\u{a42}", "\u{a0a}"),
                ("\u{a72}\u{a47}", "\u{a0f}"),
                ("\u{a05}\u{a48}", "\u{a10}"),
                ("\u{a73}\u{a4b}", "\u{a13}"),
                ("\u{a05}\u{a4c}", "\u{a14}"),
            ],
            // Chillus as Unicode 5.0 wrote them.
            Script::Malayalam => &[
                ("\u{d23}\u{d4d}\u{200d}", "\u{d7a}"),
                ("\u{d28}\u{d4d}\u{200d}", "\u{d7b}"),
                ("\u{d30}\u{d4d}\u{200d}", "\u{d7c}"),
                ("\u{d32}\u{d4d}\u{200d}", "\u{d7d}"),
                ("\u{d33}\u{d4d}\u{200d}", "\u{d7e}"),
                ("\u{d15}\u{d4d}\u{200d}", "\u{d7f}"),
            ],
            _ => &[],
        }
    }

    /// What is replaced after them: letters with a nukta are decomposed, vowel signs of two parts composed, and the danda of
    /// the script becomes that of Devanagari.
    fn then(self) -> Replacements {
        match self {
            Script::Devanagari => &[
                ("\u{972}", "\u{90f}"),
                ("\u{929}", "\u{928}\u{93c}"),
                ("\u{931}", "\u{930}\u{93c}"),
                ("\u{934}", "\u{933}\u{93c}"),
                ("\u{958}", "\u{915}\u{93c}"),
                ("\u{959}", "\u{916}\u{93c}"),
                ("\u{95a}", "\u{917}\u{93c}"),
                ("\u{95b}", "\u{91c}\u{93c}"),
                ("\u{95c}", "\u{921}\u{93c}"),
                ("\u{95d}", "\u{922}\u{93c}"),
                ("\u{95e}", "\u{92b}\u{93c}"),
                ("\u{95f}", "\u{92f}\u{93c}"),
                ("|", "\u{964}"),
            ],
            Script::Bengali => &[
                ("\u{9dc}", "\u{9a1}\u{9bc}"),
                ("\u{9dd}", "\u{9a2}\u{9bc}"),
                ("\u{9df}", "\u{9af}\u{9bc}"),
                ("\u{9e4}", "\u{964}"),
                ("\u{9e5}", "\u{965}"),
                ("|", "\u{964}"),
                ("\u{9f7}", "\u{964}"),
                ("\u{9c7}\u{9be}", "\u{9cb}"),
                ("\u{9c7}\u{9d7}", "\u{9cc}"),
            ],
            Script::Gurmukhi => &[
                ("\u{a33}", "\u{a32}\u{a3c}"),
                ("\u{a36}", "\u{a38}\u{a3c}"),
                ("\u{a59}", "\u{a16}\u{a3c}"),
                ("\u{a5a}", "\u{a17}\u{a3c}"),
                ("\u{a5b}", "\u{a1c}\u{a3c}"),
                ("\u{a5e}", "\u{a2b}\u{a3c}"),
                ("\u{a64}", "\u{964}"),
                ("\u{a65}", "\u{965}"),
                ("|", "\u{964}"),
            ],
            Script::Gujarati => &[("\u{ae4}", "\u{964}"), ("\u{ae5}", "\u{965}")],
            Script::Oriya => &[
                ("\u{b05}\u{b3e}", "\u{b06}"),
                ("\u{b0f}\u{b57}", "\u{b10}"),
                ("\u{b13}\u{b57}", "\u{b14}"),
                ("\u{b5c}", "\u{b21}\u{b3c}"),
                ("\u{b5d}", "\u{b22}\u{b3c}"),
                ("\u{b64}", "\u{964}"),
                ("\u{b65}", "\u{965}"),
                ("\u{b7c}", "\u{964}"),
                ("\u{b35}", "\u{b2c}"),
                ("\u{b47}\u{b56}", "\u{b58}"),
                ("\u{b47}\u{b3e}", "\u{b4b}"),
                ("\u{b47}\u{b57}", "\u{b4c}"),
            ],
            Script::Tamil => &[
                ("\u{be4}", "\u{964}"),
                ("\u{be5}", "\u{965}"),
                ("\u{b92}\u{bd7}", "\u{b94}"),
                ("\u{bc6}\u{bbe}", "\u{bca}"),
                ("\u{bc7}\u{bbe}", "\u{bcb}"),
                ("\u{bc6}\u{bd7}", "\u{bcc}"),
            ],
            Script::Telugu => &[
                ("\u{c64}", "\u{964}"),
                ("\u{c65}", "\u{965}"),
                ("\u{c46}\u{c56}", "\u{c48}"),
            ],
            Script::Kannada => &[
                ("\u{ce4}", "\u{964}"),
                ("\u{ce5}", "\u{965}"),
                ("\u{cbf}\u{cd5}", "\u{cc0}"),
                ("\u{cc6}\u{cd5}", "\u{cc7}"),
                ("\u{cc6}\u{cd6}", "\u{cc8}"),
                ("\u{cc6}\u{cc2}", "\u{cca}"),
                ("\u{cca}\u{cd5}", "\u{ccb}"),
            ],
            Script::Malayalam => &[
                ("\u{d64}", "\u{964}"),
                ("\u{d65}", "\u{965}"),
                ("\u{d46}\u{d3e}", "\u{d4a}"),
                ("\u{d47}\u{d3e}", "\u{d4b}"),
                ("\u{d46}\u{d57}", "\u{d4c}"),
                ("\u{d57}", "\u{d4c}"),
            ],
        }
    }
}

/// The rules of all scripts: invisible characters go, quotation marks and dashes become those of ASCII.
const COMMON: Replacements = &[
    ("\u{feff}", ""),
    ("\u{fffe}", ""),
    ("\u{2060}", ""),
    ("\u{ad}", ""),
    ("\u{200b}", " "),
    ("\u{a0}", " "),
    ("\u{200c}", ""),
    ("\u{200d}", ""),
    ("„", "\""),
    ("“", "\""),
    ("”", "\""),
    ("–", "-"),
    ("—", " - "),
    ("´", "'"),
    ("‘", "'"),
    ("‚", "'"),
    ("’", "'"),
    ("''", "\""),
    ("…", "..."),
];

/// Languages whose texts are written in these scripts, by the rules of the Indic NLP Library.
pub(super) fn is_indic(language: &str) -> bool {
    language == "ur" || Script::of_language(language).is_some()
}

/// The normalised text. There may be one space at either end. Of Urdu, only punctuation and spaces are changed; an unknown
/// language has the rules of all scripts alone, and without a language the script of the text decides.
///
/// `ascii_digits`: digits of all scripts become ASCII. (Vistaar leaves them as they are.)
pub(super) fn normalized(text: &str, language: &str, ascii_digits: bool) -> String {
    let is_punctuation = |c: char| c.is_ascii_punctuation() || matches!(c, '।' | '۔' | '॥');
    let mut text: String = text.chars().filter(|c| !is_punctuation(*c)).collect();
    if language != "ur" {
        text = unified(&text, language);
    }
    if ascii_digits {
        text = text.chars().map(|c| ascii_digit(c).unwrap_or(c)).collect();
    }
    // Runs of spaces: other white space separates words as it is.
    let mut squeezed = String::with_capacity(text.len());
    for c in text.chars() {
        if c != ' ' || !squeezed.ends_with(' ') {
            squeezed.push(c);
        }
    }
    squeezed
}

/// One spelling for what can be encoded in several ways. Punctuation stays.
pub(super) fn unified(text: &str, language: &str) -> String {
    let script = match language {
        "" => Script::of_text(text),
        language => Script::of_language(language),
    };
    let mut text = text.to_owned();
    let mut replace = |replacements: Replacements| {
        for (from, to) in replacements {
            if text.contains(from) {
                text = text.replace(from, to);
            }
        }
    };
    replace(script.map_or(&[], Script::first));
    replace(COMMON);
    replace(script.map_or(&[], Script::then));
    let Some(script) = script.filter(|_| text.contains(':')) else {
        return text;
    };
    let mut written = String::with_capacity(text.len());
    let mut before = None;
    for c in text.chars() {
        let is_visarga = c == ':' && before.is_some_and(|before| script.has(before));
        let c = if is_visarga { script.visarga() } else { c };
        // What replaced a colon was read with the character before it: another colon behind it stays.
        before = (!is_visarga).then_some(c);
        written.push(c);
    }
    written
}
