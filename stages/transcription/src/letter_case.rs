//! Models that write small letters alone, or capitals alone.

/// The case that a model writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    Lower,
    Upper,
}

impl Case {
    /// The one case of all letters that were heard; none where both were, or too few letters tell.
    pub fn of<'w>(heard: impl Iterator<Item = &'w str>) -> Option<Case> {
        /// Words that begin a sentence have capitals in a model that writes both.
        const FEWEST: usize = 12;
        let (mut lower, mut upper) = (0, 0);
        for c in heard.flat_map(str::chars) {
            lower += usize::from(c.is_lowercase());
            upper += usize::from(c.is_uppercase());
        }
        match (lower, upper) {
            (lower, 0) if lower >= FEWEST => Some(Case::Lower),
            (0, upper) if upper >= FEWEST => Some(Case::Upper),
            _ => None,
        }
    }

    /// A word in this case.
    pub fn applied(self, word: &str) -> String {
        match self {
            Case::Lower => word.to_lowercase(),
            Case::Upper => word.to_uppercase(),
        }
    }
}
