//! Sentences: word lists and templates of a language, read from a file, and drawn from.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::Path;

use flow_kind::yaml;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::invented::InventedWords;
use super::random::{Random, place_of};
use super::words::{Excluded, is_silent, normal_words};
use flow_audio::AudioError;

/// Largest file of a language, in bytes.
const LARGEST_FILE: u64 = 1 << 20;
/// Most draws for one sentence: enough for a language with few sentences left.
const MOST_DRAWS: usize = 20_000;

/// The parsed file.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    /// Name of the espeak-ng voice.
    voice: String,
    /// Words by class.
    words: BTreeMap<String, Vec<String>>,
    /// Sentences that are words in a row.
    #[serde(default)]
    sequences: Vec<Sequence>,
    /// Sentences with places for words: `{class}`.
    #[serde(default)]
    templates: Vec<String>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sequence {
    /// Classes; each word is of one of them.
    of: Vec<String>,
    /// Fewest and most words.
    length: [u32; 2],
    /// Share of all sentences that are of this form. Templates share the rest.
    share: f64,
}

/// A part of a template.
#[derive(Clone, Debug, PartialEq)]
enum Part {
    Words(String),
    Class(String),
}

/// A language to speak.
#[derive(Clone, Debug)]
pub struct Language {
    pub name: String,
    file: File,
    templates: Vec<Vec<Part>>,
    /// Share of the words in places of templates and in sequences that are invented, and from what they are drawn.
    invented: (f64, InventedWords),
}

/// On which side of the split between training and validation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Train,
    Val,
}

impl Side {
    /// The part of a shard's name.
    pub fn name(self) -> &'static str {
        match self {
            Side::Train => "train",
            Side::Val => "val",
        }
    }
}

/// Which sentences may be drawn.
#[derive(Clone, Copy)]
pub struct Choice<'a> {
    pub side: Side,
    /// Share of all sentences, in percent, that are for validation alone; 0: every sentence is for both.
    pub held_out: f64,
    pub excluded: &'a Excluded,
}

impl Choice<'_> {
    pub fn allows(&self, normal: &str) -> bool {
        // By a hash of the words alone, so that a sentence is on the same side in every language, shard and run.
        let held_out = place_of(normal) * 100.0 < self.held_out;
        let right_side = self.held_out <= 0.0 || held_out == (self.side == Side::Val);
        right_side && !self.excluded.holds(normal)
    }
}

impl Language {
    /// Reads `<name>.yaml` of a folder.
    pub fn read(folder: &Path, name: &str) -> Result<Language, AudioError> {
        let path = folder.join(format!("{name}.yaml"));
        let failed = |source| AudioError::read(&path, source);
        let file = std::fs::File::open(&path).map_err(failed)?;
        let mut bytes = Vec::new();
        file.take(LARGEST_FILE + 1).read_to_end(&mut bytes).map_err(failed)?;
        let wrong = |why: String| AudioError::Sentences {
            path: path.clone(),
            why,
        };
        if bytes.len() as u64 > LARGEST_FILE {
            return Err(wrong("larger than 1 MiB".into()));
        }
        let text = String::from_utf8(bytes).map_err(|error| wrong(format!("not UTF-8: {error}")))?;
        Language::parse(name, &text).map_err(wrong)
    }

    /// The message of an error says where in the text the mistake is.
    pub fn parse(name: &str, text: &str) -> Result<Language, String> {
        let file: File = yaml::from_text(text)?;
        if file.voice.is_empty()
            || !file
                .voice
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        {
            return Err(format!(
                "voice: {:?} is not a name of a voice such as `hi` or `en-us`",
                file.voice
            ));
        }
        for (class, words) in &file.words {
            let plain = |b: u8| b.is_ascii_lowercase() || b == b'_';
            if class.is_empty() || !class.bytes().all(plain) {
                return Err(format!(
                    "words: the class {class:?} must be named with small letters and `_`"
                ));
            }
            let at = || format!("words.{class}");
            if words.is_empty() {
                return Err(format!("{}: has no words", at()));
            }
            let mut seen = BTreeSet::new();
            for (number, word) in words.iter().enumerate() {
                check_words(word).map_err(|why| format!("{}[{number}]{}: {why}", at(), line_of(text, word)))?;
                if !seen.insert(word) {
                    return Err(format!(
                        "{}[{number}]{}: {word:?} appears twice",
                        at(),
                        line_of(text, word)
                    ));
                }
            }
        }
        let known = |class: &str| {
            if file.words.contains_key(class) {
                return Ok(());
            }
            let classes: Vec<&str> = file.words.keys().map(String::as_str).collect();
            Err(format!("no class is named `{class}`; there are {}", classes.join(", ")))
        };
        let mut shares = 0.0;
        for (number, sequence) in file.sequences.iter().enumerate() {
            let at = format!("sequences[{number}]");
            if sequence.of.is_empty() {
                return Err(format!("{at}.of: names no class"));
            }
            for class in &sequence.of {
                known(class).map_err(|why| format!("{at}.of: {why}"))?;
            }
            let [fewest, most] = sequence.length;
            if fewest == 0 || fewest > most || most > 100 {
                return Err(format!(
                    "{at}.length: [{fewest}, {most}] is not a range of 1 to 100 words"
                ));
            }
            if !(sequence.share > 0.0 && sequence.share <= 1.0) {
                return Err(format!("{at}.share: {} is not above 0 and up to 1", sequence.share));
            }
            shares += sequence.share;
        }
        if shares > 1.0 + 1e-9 {
            return Err(format!("sequences: their shares add up to {shares}, more than 1"));
        }
        if file.templates.is_empty() && shares < 1.0 - 1e-9 {
            return Err("templates: there are none, and the sequences' shares do not add up to 1".into());
        }
        let mut templates = Vec::with_capacity(file.templates.len());
        for (number, template) in file.templates.iter().enumerate() {
            let parts = parts_of(template)
                .and_then(|parts| {
                    parts.iter().try_for_each(|part| match part {
                        Part::Class(class) => known(class),
                        Part::Words(words) => check_words(words),
                    })?;
                    Ok(parts)
                })
                .map_err(|why| format!("templates[{number}]{}: {why}", line_of(text, template)))?;
            templates.push(parts);
        }
        Ok(Language {
            name: name.to_owned(),
            file,
            templates,
            invented: (0.0, InventedWords::default()),
        })
    }

    /// With so large a share of invented words, 0 to 1, among those of the classes. They are spelled as all words of the file.
    pub fn with_invented(mut self, share: f64) -> Self {
        if share > 0.0 {
            let of_classes = self.file.words.values().flatten().map(String::as_str);
            let of_templates = self.templates.iter().flatten().filter_map(|part| match part {
                Part::Words(words) => Some(words.as_str()),
                Part::Class(_) => None,
            });
            self.invented = (share, InventedWords::of(of_classes.chain(of_templates)));
        }
        self
    }

    pub fn voice(&self) -> &str {
        &self.file.voice
    }

    /// Equal for equal contents, whatever the layout of the file.
    pub fn digest(&self) -> String {
        // Plain data with string keys: cannot fail to serialise.
        let json = serde_json::to_vec(&(&self.name, &self.file)).unwrap_or_default();
        hex::encode(Sha256::digest(&json))
    }

    /// Every class with its words.
    #[cfg(test)]
    pub fn words(&self) -> impl Iterator<Item = (&str, &[String])> {
        self.file
            .words
            .iter()
            .map(|(class, words)| (class.as_str(), words.as_slice()))
    }

    #[cfg(test)]
    pub fn template_count(&self) -> usize {
        self.templates.len()
    }

    /// A sentence that may be spoken; none where none was found in many draws.
    pub fn draw(&self, random: &mut Random, choice: &Choice<'_>) -> Option<String> {
        for _ in 0..MOST_DRAWS {
            let sentence = self.any(random);
            if choice.allows(&normal_words(&sentence)) {
                return Some(sentence);
            }
        }
        None
    }

    fn any(&self, random: &mut Random) -> String {
        let mut at = random.unit();
        for sequence in &self.file.sequences {
            if at < sequence.share || (self.templates.is_empty() && at < sequence.share + 1e-6) {
                return self.sequence(sequence, random);
            }
            at -= sequence.share;
        }
        match random.pick(&self.templates) {
            Some(parts) => self.fill(parts, random),
            // The shares add up to 1 but for rounding.
            None => match self.file.sequences.last() {
                Some(sequence) => self.sequence(sequence, random),
                None => String::new(),
            },
        }
    }

    fn sequence(&self, sequence: &Sequence, random: &mut Random) -> String {
        let words = (0..random.whole(sequence.length)).filter_map(|_| self.word(random.pick(&sequence.of)?, random));
        words.collect::<Vec<_>>().join(" ")
    }

    fn word(&self, class: &str, random: &mut Random) -> Option<Cow<'_, str>> {
        let (share, invented) = &self.invented;
        if *share > 0.0
            && random.unit() < *share
            && let Some(word) = invented.draw(random)
        {
            return Some(Cow::Owned(word));
        }
        random
            .pick(self.file.words.get(class)?)
            .map(|word| Cow::Borrowed(word.as_str()))
    }

    /// A template with words in its places, none of them twice where the class has others.
    fn fill(&self, parts: &[Part], random: &mut Random) -> String {
        let mut used: Vec<Cow<'_, str>> = Vec::new();
        for part in parts {
            match part {
                Part::Words(words) => used.push(Cow::Borrowed(words)),
                Part::Class(class) => {
                    let mut word = self.word(class, random);
                    for _ in 0..8 {
                        if word.as_ref().is_none_or(|word| !used.contains(word)) {
                            break;
                        }
                        word = self.word(class, random);
                    }
                    used.extend(word);
                }
            }
        }
        used.join(" ")
    }
}

/// Parses `{name} went to {place}` into parts. Placeholders are separated from words by spaces.
fn parts_of(template: &str) -> Result<Vec<Part>, String> {
    let mut parts = Vec::new();
    for piece in template.split_whitespace() {
        match piece.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')) {
            Some(class) => parts.push(Part::Class(class.to_owned())),
            None if piece.contains(['{', '}']) => {
                return Err(format!(
                    "{piece:?} is neither a word nor a place such as {{name}}, with spaces around it"
                ));
            }
            None => match parts.last_mut() {
                Some(Part::Words(words)) => {
                    words.push(' ');
                    words.push_str(piece);
                }
                _ => parts.push(Part::Words(piece.to_owned())),
            },
        }
    }
    if parts.is_empty() {
        return Err("it is empty".into());
    }
    Ok(parts)
}

/// The speech must match the text: only words, without characters that espeak-ng treats as a command, a pause or a
/// symbol to be read out.
fn check_words(words: &str) -> Result<(), String> {
    if normal_words(words).is_empty() {
        return Err(format!("{words:?} has no letter"));
    }
    if words.trim() != words || words.chars().any(|c| c.is_whitespace() && c != ' ') {
        return Err(format!(
            "{words:?} has white space around it, or other than spaces in it"
        ));
    }
    // Apostrophes, hyphens and the two joiners belong to the spelling of words.
    match words
        .chars()
        .find(|c| is_silent(*c) && !matches!(c, '\'' | '-' | '\u{200c}' | '\u{200d}'))
    {
        Some(c) => Err(format!(
            "{words:?} has the character {c:?}, which is not part of a word"
        )),
        None => Ok(()),
    }
}

/// ` (line N)`, of the first line with these words.
fn line_of(text: &str, words: &str) -> String {
    match text.lines().position(|line| !words.is_empty() && line.contains(words)) {
        Some(line) => format!(" (line {})", line + 1),
        None => String::new(),
    }
}

#[cfg(test)]
#[path = "sentences_tests.rs"]
mod tests;
