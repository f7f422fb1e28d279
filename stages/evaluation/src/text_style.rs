//! How texts are written: with capital letters, marks and digits, or without.

use flow_text::language_tag::split_tag;

/// Numbers of texts by their style.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TextStyle {
    /// Texts with a word.
    pub texts: u64,
    /// Those with a letter that has case, and with a capital one.
    pub cased: u64,
    pub capitals: u64,
    /// Those with a mark that ends or divides sentences.
    pub marks: u64,
    /// Those with a decimal digit.
    pub digits: u64,
}

/// Marks that end or divide sentences, in the scripts of the languages that models of this kind know.
const MARKS: &str = ".,?!;:…¿¡।॥،؛؟۔。、，？！：；";

impl TextStyle {
    /// Adds a text, whose language tag does not count.
    pub fn add(&mut self, text: &str) {
        let text = split_tag(text).1;
        let has = |what: &dyn Fn(char) -> bool| u64::from(text.chars().any(what));
        if text.trim().is_empty() {
            return;
        }
        self.texts += 1;
        self.cased += has(&|c| c.is_lowercase() || c.is_uppercase());
        self.capitals += has(&char::is_uppercase);
        self.marks += has(&|c| MARKS.contains(c));
        self.digits += has(&|c| c.is_numeric());
    }

    /// The three shares with their names; a share of no text is none.
    fn shares(&self) -> [(&'static str, Option<f64>); 3] {
        let share = |count: u64, of: u64| (of > 0).then(|| count as f64 / of as f64);
        [
            ("capital letters", share(self.capitals, self.cased)),
            ("punctuation", share(self.marks, self.texts)),
            ("digits", share(self.digits, self.texts)),
        ]
    }

    /// `capital letters in 98 %` (of the texts), for each share that is known.
    pub fn in_words(&self) -> Vec<String> {
        let shares = self.shares().into_iter();
        let known = shares.filter_map(|(what, share)| Some(format!("{what} in {:.0} %", 100.0 * share?)));
        known.collect()
    }

    /// `capital letters in 98 % and 0 % of texts`, for each share that differs by at least `least` between these texts and
    /// others.
    pub fn differences(&self, others: &TextStyle, least: f64) -> Vec<String> {
        let pairs = self.shares().into_iter().zip(others.shares());
        let differing = pairs.filter_map(|((what, ours), (_, theirs))| {
            let (ours, theirs) = (ours?, theirs?);
            ((ours - theirs).abs() >= least)
                .then(|| format!("{what} in {:.0} % and {:.0} %", 100.0 * ours, 100.0 * theirs))
        });
        differing.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn style(texts: &[&str]) -> TextStyle {
        let mut style = TextStyle::default();
        texts.iter().for_each(|text| style.add(text));
        style
    }

    #[test]
    fn texts_of_another_style_are_told() {
        let plain = style(&["<|en|> one two", "three", "", "<|en|>"]);
        let written = style(&["<|en|> One, two.", "3 cats"]);
        assert_eq!((plain.texts, plain.capitals, plain.marks), (2, 0, 0));
        assert_eq!((written.capitals, written.marks, written.digits), (1, 1, 1));
        let differ = written.differences(&plain, 0.5);
        assert_eq!(
            differ,
            [
                "capital letters in 50 % and 0 %",
                "punctuation in 50 % and 0 %",
                "digits in 50 % and 0 %"
            ]
        );
        assert!(written.differences(&plain, 0.6).is_empty());
    }

    /// A script without case has none to differ in, and a danda is a mark.
    #[test]
    fn scripts_without_case_differ_in_marks_alone() {
        let plain = style(&["एक दो", "तीन"]);
        let written = style(&["एक दो।", "तीन।"]);
        assert_eq!(written.differences(&plain, 0.5), ["punctuation in 100 % and 0 %"]);
        assert!(style(&[]).differences(&plain, 0.1).is_empty());
    }
}
