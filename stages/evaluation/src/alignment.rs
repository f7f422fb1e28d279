//! Alignment of a hypothesis with its reference: matches, substitutions, deletions and insertions.

/// One step from a reference to a hypothesis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edit<'t> {
    Match(&'t str),
    /// Substitution: the word of the reference, and that of the hypothesis.
    Substitution(&'t str, &'t str),
    /// Insertion: a word of the hypothesis only.
    Insertion(&'t str),
    /// Deletion: a word of the reference only.
    Deletion(&'t str),
}

/// Most cells of a table: texts of some two thousand words each.
const CELLS: usize = 4 << 20;

/// The predecessor of a cell.
#[derive(Clone, Copy, PartialEq)]
enum Step {
    Diagonal,
    Insertion,
    Deletion,
}

/// The edits of a shortest path from `reference` to `hypothesis`, in order: the path that [`crate::wer::edits`] counts.
/// None for long texts.
pub fn align<'t>(reference: &[&'t str], hypothesis: &[&'t str]) -> Option<Vec<Edit<'t>>> {
    let (mut row, mut column) = (0, 0);
    let edit = |step| match step {
        Step::Diagonal => {
            (row, column) = (row + 1, column + 1);
            match (reference[row - 1], hypothesis[column - 1]) {
                (said, heard) if said == heard => Edit::Match(said),
                (said, heard) => Edit::Substitution(said, heard),
            }
        }
        Step::Insertion => {
            column += 1;
            Edit::Insertion(hypothesis[column - 1])
        }
        Step::Deletion => {
            row += 1;
            Edit::Deletion(reference[row - 1])
        }
    };
    Some(steps(reference, hypothesis)?.into_iter().map(edit).collect())
}

/// The places (in `reference`, in `hypothesis`) of the units that match or are substituted on a shortest way, in order, for
/// texts of any length. Short texts go the way that [`crate::wer::edits`] counts. Long ones are cut in two where the two
/// parts together have the fewest edits (Hirschberg 1975), until the parts are short: the number of edits is the same.
pub fn aligned<T: PartialEq>(reference: &[T], hypothesis: &[T]) -> Vec<(usize, usize)> {
    if let Some(steps) = steps(reference, hypothesis) {
        let (mut row, mut column) = (0, 0);
        let mut pairs = Vec::new();
        for step in steps {
            if step == Step::Diagonal {
                pairs.push((row, column));
            }
            row += usize::from(step != Step::Insertion);
            column += usize::from(step != Step::Deletion);
        }
        return pairs;
    }
    // The longer one is cut in its middle; it has two units or more.
    if reference.len() < hypothesis.len() {
        let pairs = aligned(hypothesis, reference).into_iter();
        return pairs.map(|(column, row)| (row, column)).collect();
    }
    let middle = reference.len() / 2;
    let before = distances(reference[..middle].iter(), || hypothesis.iter());
    let mut after = distances(reference[middle..].iter().rev(), || hypothesis.iter().rev());
    after.reverse();
    let sums = before.iter().zip(&after).map(|(before, after)| before + after);
    let cut = sums.enumerate().min_by_key(|(_, sum)| *sum).map_or(0, |(cut, _)| cut);
    let mut pairs = aligned(&reference[..middle], &hypothesis[..cut]);
    let rest = aligned(&reference[middle..], &hypothesis[cut..]).into_iter();
    pairs.extend(rest.map(|(row, column)| (row + middle, column + cut)));
    pairs
}

/// The edit distances of all of `reference` to each beginning of `hypothesis`, from the empty one to the whole.
pub(crate) fn distances<'t, T: PartialEq + 't, H: Iterator<Item = &'t T>>(
    reference: impl Iterator<Item = &'t T>,
    hypothesis: impl Fn() -> H,
) -> Vec<u32> {
    let mut errors: Vec<u32> = (0..=hypothesis().count() as u32).collect();
    for said in reference {
        let mut diagonal = errors[0];
        errors[0] += 1;
        let mut last = errors[0];
        for (cell, heard) in errors[1..].iter_mut().zip(hypothesis()) {
            let kept = diagonal + u32::from(said != heard);
            diagonal = *cell;
            last = kept.min(last.min(diagonal) + 1);
            *cell = last;
        }
    }
    errors
}

/// The steps of a shortest path, in order: the path that [`crate::wer::edits`] counts. None for long texts.
fn steps<T: PartialEq>(reference: &[T], hypothesis: &[T]) -> Option<Vec<Step>> {
    let height = reference.len() + 1;
    let cells = height
        .checked_mul(hypothesis.len() + 1)
        .filter(|cells| *cells <= CELLS)?;
    // Column by column, one for each word of the hypothesis; row i represents the first i words of the reference.
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
    let mut way = Vec::with_capacity(height.max(hypothesis.len()));
    let (mut row, mut column) = (reference.len(), hypothesis.len());
    while row > 0 || column > 0 {
        let step = steps[column * height + row];
        row -= usize::from(step != Step::Insertion);
        column -= usize::from(step != Step::Deletion);
        way.push(step);
    }
    way.reverse();
    Some(way)
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

    /// Errors, matches and substitutions included, that a list of aligned places leaves.
    fn errors_of(pairs: &[(usize, usize)], reference: &[u32], hypothesis: &[u32]) -> usize {
        assert!(pairs.windows(2).all(|two| two[0].0 < two[1].0 && two[0].1 < two[1].1));
        let changed = pairs
            .iter()
            .filter(|(row, column)| reference[*row] != hypothesis[*column]);
        reference.len() + hypothesis.len() - 2 * pairs.len() + changed.count()
    }

    #[test]
    fn long_texts_are_aligned_in_parts() {
        // Some 4500 words against 4000: over the limit of one table by four times.
        let mut state = 3u64;
        let mut next = |below: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        let reference: Vec<u32> = (0..4500).map(|_| next(50) as u32).collect();
        let mut hypothesis = Vec::new();
        for &word in &reference {
            match next(10) {
                0 => {}
                1 => hypothesis.push(next(50) as u32),
                _ => hypothesis.push(word),
            }
        }
        for (a, b) in [(&reference, &hypothesis), (&hypothesis, &reference)] {
            assert!(steps(a, b).is_none());
            assert_eq!(errors_of(&aligned(a, b), a, b) as u64, edits(a, b).errors());
        }
        assert_eq!(aligned(&reference, &[]), []);
    }

    proptest! {
        #[test]
        fn aligned_places_leave_the_fewest_errors(
            reference in prop::collection::vec(0..4u32, 0..14),
            hypothesis in prop::collection::vec(0..4u32, 0..14),
        ) {
            let errors = edits(&reference, &hypothesis).errors();
            prop_assert_eq!(errors_of(&aligned(&reference, &hypothesis), &reference, &hypothesis) as u64, errors);
            let distance = distances(reference.iter(), || hypothesis.iter());
            prop_assert_eq!(u64::from(*distance.last().unwrap()), errors);
            for (length, &distance) in distance.iter().enumerate() {
                prop_assert_eq!(u64::from(distance), edits(&reference, &hypothesis[..length]).errors());
            }
        }

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
