//! Which words of a reference were heard, which as others, which not at all, and which were made up.

/// One step from a reference to a hypothesis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edit<'t> {
    Match(&'t str),
    /// The word of the reference, and the one heard for it.
    Substitution(&'t str, &'t str),
    /// A word that was heard and not said.
    Insertion(&'t str),
    /// A word that was said and not heard.
    Deletion(&'t str),
}

/// More cells than this are not computed: texts of some two thousand words each.
const CELLS: usize = 4 << 20;

/// The way a cell was reached from.
#[derive(Clone, Copy, PartialEq)]
enum Step {
    Diagonal,
    Insertion,
    Deletion,
}

/// The edits of a shortest way from `reference` to `hypothesis`, in order: that way which [`crate::wer::edits`] counts. None
/// for long texts.
pub fn align<'t>(reference: &[&'t str], hypothesis: &[&'t str]) -> Option<Vec<Edit<'t>>> {
    let height = reference.len() + 1;
    let cells = height
        .checked_mul(hypothesis.len() + 1)
        .filter(|cells| *cells <= CELLS)?;
    // Column by column, one for each word of the hypothesis; row i stands for the first i words of the reference.
    let mut steps = vec![Step::Deletion; cells];
    let mut errors: Vec<u32> = (0..).take(height).collect();
    for (place, heard) in hypothesis.iter().enumerate() {
        let column = &mut steps[(place + 1) * height..(place + 2) * height];
        let mut diagonal = errors[0];
        errors[0] += 1;
        column[0] = Step::Insertion;
        for (row, said) in (1..).zip(reference) {
            let insertion = errors[row] + 1;
            let deletion = errors[row - 1] + 1;
            let kept = diagonal + u32::from(said != heard);
            diagonal = errors[row];
            (errors[row], column[row]) = if kept < insertion && kept < deletion {
                (kept, Step::Diagonal)
            } else if deletion < insertion {
                (deletion, Step::Deletion)
            } else {
                (insertion, Step::Insertion)
            };
        }
    }
    let mut edits = Vec::with_capacity(height.max(hypothesis.len()));
    let (mut row, mut column) = (reference.len(), hypothesis.len());
    while row > 0 || column > 0 {
        edits.push(match steps[column * height + row] {
            Step::Diagonal => {
                (row, column) = (row - 1, column - 1);
                match (reference[row], hypothesis[column]) {
                    (said, heard) if said == heard => Edit::Match(said),
                    (said, heard) => Edit::Substitution(said, heard),
                }
            }
            Step::Insertion => {
                column -= 1;
                Edit::Insertion(hypothesis[column])
            }
            Step::Deletion => {
                row -= 1;
                Edit::Deletion(reference[row])
            }
        });
    }
    edits.reverse();
    Some(edits)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wer::{EditCounts, edits, words};

    #[test]
    fn words_are_told_apart() {
        let align = |a: &'static str, b: &'static str| align(&words(a), &words(b)).unwrap();
        assert_eq!(
            align("a b c d", "a x d e"),
            [
                Edit::Match("a"),
                Edit::Substitution("b", "x"),
                Edit::Deletion("c"),
                Edit::Match("d"),
                Edit::Insertion("e"),
            ]
        );
        assert_eq!(align("a", ""), [Edit::Deletion("a")]);
        assert_eq!(align("", "a"), [Edit::Insertion("a")]);
        assert_eq!(align("", ""), []);
    }

    #[test]
    fn long_texts_are_left_alone() {
        let long = vec!["a"; 3000];
        assert_eq!(super::align(&long, &long), None);
    }

    proptest! {
        /// As many of each as are counted, and both texts come out whole.
        #[test]
        fn edits_are_those_that_are_counted(
            reference in prop::collection::vec("[abc]", 0..12),
            hypothesis in prop::collection::vec("[abc]", 0..12),
        ) {
            let reference: Vec<&str> = reference.iter().map(String::as_str).collect();
            let hypothesis: Vec<&str> = hypothesis.iter().map(String::as_str).collect();
            let aligned = align(&reference, &hypothesis).unwrap();
            let (mut said, mut heard) = (Vec::new(), Vec::new());
            let mut counts = EditCounts { units: reference.len() as u64, ..EditCounts::default() };
            for edit in aligned {
                match edit {
                    Edit::Match(word) => {
                        said.push(word);
                        heard.push(word);
                    }
                    Edit::Substitution(word, other) => {
                        said.push(word);
                        heard.push(other);
                        counts.substitutions += 1;
                    }
                    Edit::Insertion(word) => {
                        heard.push(word);
                        counts.insertions += 1;
                    }
                    Edit::Deletion(word) => {
                        said.push(word);
                        counts.deletions += 1;
                    }
                }
            }
            prop_assert_eq!(said, reference.clone());
            prop_assert_eq!(heard, hypothesis.clone());
            prop_assert_eq!(counts, edits(&reference, &hypothesis));
        }
    }
}
