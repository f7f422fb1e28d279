//! Suggestions for misspelt names.

/// The candidate with the smallest edit distance to `name`, if it is small enough for a typing error.
pub fn nearest<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let lower = name.to_lowercase();
    let allowed = ((name.chars().count() + 1) / 3).max(1);
    candidates
        .into_iter()
        .filter(|candidate| *candidate != name)
        .map(|candidate| {
            (
                strsim::damerau_levenshtein(&lower, &candidate.to_lowercase()),
                candidate,
            )
        })
        .filter(|(distance, _)| *distance <= allowed)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// `did you mean `x`?`, or else the list of what there is (`what` names it in the plural).
pub fn did_you_mean<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>, what: &str) -> String {
    let candidates: Vec<&str> = candidates.into_iter().collect();
    match nearest(name, candidates.iter().copied()) {
        Some(near) => format!("did you mean `{near}`?"),
        None if candidates.is_empty() => format!("there are no {what} here"),
        None => format!("the {what} are {}", list(&candidates)),
    }
}

/// The candidates: those that contain `name` first, then those that are nearest to it.
pub fn nearest_first<'a>(name: &str, candidates: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let lower = name.to_lowercase();
    let mut candidates: Vec<&str> = candidates.into_iter().collect();
    candidates.sort_by_cached_key(|candidate| {
        let candidate = candidate.to_lowercase();
        (
            !candidate.contains(&lower),
            strsim::damerau_levenshtein(&lower, &candidate),
        )
    });
    candidates
}

fn list(names: &[&str]) -> String {
    // A longer list does not help the reader.
    const SHOWN: usize = 20;
    let mut text = names
        .iter()
        .take(SHOWN)
        .map(|name| format!("`{name}`"))
        .collect::<Vec<_>>()
        .join(", ");
    if names.len() > SHOWN {
        text.push_str(&format!(" and {} more", names.len() - SHOWN));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slips_are_recognised_and_other_words_are_not() {
        assert_eq!(nearest("dedpu", ["scan", "dedup", "split"]), Some("dedup"));
        assert_eq!(
            nearest("min_qualty", ["max_quality", "min_quality"]),
            Some("min_quality")
        );
        assert_eq!(nearest("Scan", ["scan"]), Some("scan"));
        assert_eq!(nearest("train", ["scan", "dedup"]), None);
        assert_eq!(nearest_first("dedpu", ["split", "scan", "dedup"])[0], "dedup");
        assert_eq!(
            did_you_mean("x", ["scan", "dedup"], "stages"),
            "the stages are `scan`, `dedup`"
        );
    }
}
