//! Patterns of names of modules and parameters.

use regex::Regex;

use crate::{Error, Result};

/// A regular expression for names that have dots between their parts. It matches a name as a whole, or the end of one that begins
/// after a dot: `linear_q` matches `encoder.layers.0.self_attn.linear_q`, but not `linear_query`. (The keys of `rank_pattern` in
/// PEFT's files are such patterns.)
#[derive(Clone, Debug)]
pub struct NamePattern {
    text: String,
    regex: Regex,
}

impl NamePattern {
    /// # Errors
    /// Where it is empty, or no regular expression.
    pub fn new(text: &str) -> Result<Self> {
        if text.is_empty() {
            return Err(Error::Input("an empty pattern matches no name".into()));
        }
        // Alone too, so that no parenthesis of it closes the one around it.
        let wrong = |error: regex::Error| Error::Input(format!("`{text}` is not a regular expression: {error}"));
        Regex::new(text).map_err(wrong)?;
        let regex = Regex::new(&format!(r"\A(?:.*\.)?(?:{text})\z")).map_err(wrong)?;
        Ok(NamePattern {
            text: text.to_string(),
            regex,
        })
    }

    /// As it was written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether it matches this name.
    pub fn matches(&self, name: &str) -> bool {
        self.regex.is_match(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_matches_a_whole_name_or_its_end_after_a_dot() {
        let name = "encoder.layers.12.self_attn.linear_q";
        for (pattern, matches) in [
            ("linear_q", true),
            ("self_attn.linear_[qk]", true),
            (r"encoder\.layers\.\d+\..*", true),
            (".*", true),
            ("a|linear_q", true),
            ("linear", false),
            ("inear_q", false),
            ("encoder", false),
            ("linear_q|", true),
        ] {
            assert_eq!(NamePattern::new(pattern).unwrap().matches(name), matches, "{pattern}");
        }
        for wrong in ["", "(", "a)(b", "[", "x{99999999}"] {
            let error = NamePattern::new(wrong).unwrap_err().to_string();
            assert!(
                error.contains("pattern") || error.contains(&format!("`{wrong}`")),
                "{error}"
            );
        }
    }
}
