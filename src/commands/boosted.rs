//! What boosted phrases did, as the last run of `flow transcribe` told of it.

use flow_base::escape::escape_line;
use flow_inspect::past_run::PastRun;
use flow_inspect::table::plural;
use flow_transcription::boosted::Boosted;

use flow_cli::failure::Failure;

/// Phrases that are named, at most.
const MOST_NAMED: usize = 5;

/// The line about all recordings of a stage of a run; none where no phrases were boosted.
pub fn summary(run: &PastRun, stage: &str) -> Result<Option<String>, Failure> {
    let snapshots = run.snapshots()?;
    let Some(snapshot) = snapshots.of(stage) else {
        return Ok(None);
    };
    let mut all: Option<Boosted> = None;
    for record in run.records_of(snapshot)? {
        let rows = run.store.first_rows(&snapshot.recipe, &record, "recordings", 1);
        for row in rows.map_err(Failure::unreadable)? {
            match row.iter().find(|(column, _)| column == "boosted") {
                Some((_, value)) => {
                    // The value of a column of texts is a text in JSON, and that is JSON itself.
                    let boosted = serde_json::from_str::<String>(value).and_then(|text| serde_json::from_str(&text));
                    let boosted = boosted.map_err(|error| Failure::unreadable(error.to_string()))?;
                    all.get_or_insert_default().add(boosted);
                }
                // All recordings of a stage have the same columns.
                None => return Ok(None),
            }
        }
    }
    Ok(all.map(line))
}

fn line(mut boosted: Boosted) -> String {
    // The most frequent first, of equal ones the first.
    boosted.phrases.sort_by_key(|phrase| std::cmp::Reverse(phrase.count));
    let count: u64 = boosted.phrases.iter().map(|phrase| phrase.count).sum();
    let changed: u64 = boosted.phrases.iter().map(|phrase| phrase.changed).sum();
    let mut line = format!("boosted phrases were written {}", plural(count, "time"));
    if changed > 0 {
        line += &format!(", {changed} of them because they were boosted");
    }
    let named = boosted.phrases.iter().take(MOST_NAMED);
    let named: Vec<String> = named
        .map(|phrase| format!("{} {}", escape_line(&phrase.phrase), phrase.count))
        .collect();
    if !named.is_empty() {
        let more = if boosted.phrases.len() > MOST_NAMED {
            ", ..."
        } else {
            ""
        };
        line += &format!(": {}{more}", named.join(", "));
    }
    if boosted.other_words > 0 {
        let words = plural(boosted.other_words, "word");
        line += &format!("; {words} of no phrase changed (see `boosted` in the JSON)");
    }
    line
}

#[cfg(test)]
mod tests {
    use flow_transcription::boosted::BoostedPhrase;

    use super::*;

    #[test]
    fn the_most_frequent_phrases_are_named() {
        let phrases = (1..=6).map(|count| BoostedPhrase {
            phrase: format!("name {count}"),
            count,
            changed: count / 3,
            times: Vec::new(),
        });
        let boosted = Boosted {
            phrases: phrases.collect(),
            other_words: 1,
        };
        assert_eq!(
            line(boosted),
            "boosted phrases were written 21 times, 5 of them because they were boosted: name 6 6, name 5 5, name 4 4, \
             name 3 3, name 2 2, ...; 1 word of no phrase changed (see `boosted` in the JSON)"
        );
        assert_eq!(line(Boosted::default()), "boosted phrases were written 0 times");
    }
}
