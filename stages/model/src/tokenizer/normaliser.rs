//! SentencePiece's normaliser: the longest rule of the compiled character map at each place, then spaces.

use super::SPACE;
use super::model_file::ModelFile;

#[derive(Debug, Clone)]
pub(super) struct Normaliser {
    /// A double-array trie over UTF-8 bytes (darts-clone's layout); empty for no rules.
    trie: Vec<u32>,
    /// Replacements, each ended by a zero byte.
    replacements: Vec<u8>,
    /// Symbols that are neither normalised nor merged, the longest first.
    user_defined: Vec<String>,
    add_dummy_prefix: bool,
    remove_extra_spaces: bool,
    spaces_as_suffix: bool,
    space: char,
}

impl Normaliser {
    pub fn new(character_map: &[u8], mut user_defined: Vec<String>, file: &ModelFile) -> Result<Self, String> {
        let (mut trie, mut replacements) = (Vec::new(), Vec::new());
        if !character_map.is_empty() {
            let damaged = "has a damaged character map";
            let (size, rest) = character_map.split_first_chunk::<4>().ok_or(damaged)?;
            let (units, texts) = rest
                .split_at_checked(u32::from_le_bytes(*size) as usize)
                .ok_or(damaged)?;
            let (units, odd) = units.as_chunks::<4>();
            if units.is_empty() || !odd.is_empty() || std::str::from_utf8(texts).is_err() {
                return Err(damaged.into());
            }
            trie = units.iter().map(|unit| u32::from_le_bytes(*unit)).collect();
            replacements = texts.to_vec();
        }
        user_defined.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        Ok(Normaliser {
            trie,
            replacements,
            user_defined,
            add_dummy_prefix: file.add_dummy_prefix,
            remove_extra_spaces: file.remove_extra_spaces,
            spaces_as_suffix: file.spaces_as_suffix,
            space: if file.escape_spaces { SPACE } else { ' ' },
        })
    }

    /// With SentencePiece's default treatment of spaces, and no symbols of the user's.
    pub fn for_training(character_map: &[u8]) -> Result<Self, String> {
        let defaults = ModelFile::default();
        Normaliser::new(character_map, Vec::new(), &defaults)
    }

    /// The normalised text, with spaces written as the model's pieces have them.
    pub fn normalise(&self, text: &str) -> String {
        let mut rest = text;
        if self.remove_extra_spaces {
            while let Some((" ", length)) = self.first(rest) {
                rest = &rest[length..];
            }
        }
        let mut out = String::with_capacity(rest.len() + 8);
        if rest.is_empty() {
            return out;
        }
        if self.add_dummy_prefix && !self.spaces_as_suffix {
            out.push(self.space);
        }
        let mut after_space = self.remove_extra_spaces;
        while let Some((part, length)) = self.first(rest) {
            let part = if after_space {
                part.trim_start_matches(' ')
            } else {
                part
            };
            if !part.is_empty() {
                out.extend(part.chars().map(|c| if c == ' ' { self.space } else { c }));
                after_space = self.remove_extra_spaces && part.ends_with(' ');
            }
            rest = &rest[length..];
        }
        if self.remove_extra_spaces {
            out.truncate(out.trim_end_matches(self.space).len());
        }
        if self.add_dummy_prefix && self.spaces_as_suffix {
            out.push(self.space);
        }
        out
    }

    /// Length of the symbol at the start of a non-empty text, and whether it is user-defined.
    pub fn symbol_length(&self, text: &str) -> (usize, bool) {
        match self.user_defined(text) {
            Some(length) => (length, true),
            None => (text.chars().next().map_or(1, char::len_utf8), false),
        }
    }

    fn user_defined(&self, text: &str) -> Option<usize> {
        self.user_defined
            .iter()
            .find(|symbol| text.starts_with(symbol.as_str()))
            .map(String::len)
    }

    /// The normalised form of the start of `text`, and how many bytes of it that covers; none at the end.
    fn first<'a>(&'a self, text: &'a str) -> Option<(&'a str, usize)> {
        let character = text.chars().next()?;
        if let Some(length) = self.user_defined(text) {
            return Some((&text[..length], length));
        }
        match self.longest_rule(text) {
            Some(rule) => Some(rule),
            None => Some((&text[..character.len_utf8()], character.len_utf8())),
        }
    }

    /// The longest rule that `text` starts with. A damaged trie ends the search early or replaces wrongly, no more.
    fn longest_rule(&self, text: &str) -> Option<(&str, usize)> {
        let offset = |unit: u32| ((unit >> 10) << ((unit & (1 << 9)) >> 6)) as usize;
        let mut position = offset(*self.trie.first()?);
        let mut longest = None;
        for (index, &byte) in text.as_bytes().iter().enumerate() {
            position ^= usize::from(byte);
            let Some(&unit) = self.trie.get(position) else { break };
            if unit & (1 << 31 | 0xff) != u32::from(byte) {
                break;
            }
            position ^= offset(unit);
            if unit >> 8 & 1 == 1 {
                longest = self
                    .trie
                    .get(position)
                    .map(|leaf| ((leaf & 0x7fff_ffff) as usize, index + 1));
            }
        }
        let (start, length) = longest?;
        let replacement = self.replacements.get(start..)?;
        let end = replacement
            .iter()
            .position(|&byte| byte == 0)
            .unwrap_or(replacement.len());
        let replacement = std::str::from_utf8(&replacement[..end]).ok()?;
        // A rule that covers part of a character would cut it: only a damaged trie has such.
        text.is_char_boundary(length).then_some((replacement, length))
    }
}
