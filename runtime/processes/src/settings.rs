//! The settings of a process beside those of process 0, so that what differs can be named.

use std::collections::BTreeMap;

use super::greeting::SETTINGS;
use flow_base::digest::Digest;

/// Most differing settings that are named.
const NAMED: usize = 5;

/// Most characters of a setting's name or value that are shown; longer values are compared by digest.
const SHOWN: usize = 80;

/// The settings in the form in which they are sent and compared.
pub(super) fn in_short(settings: &[(String, String)]) -> Vec<(String, String)> {
    let short = |(name, value): &(String, String)| match value.chars().count() > SHOWN {
        true => (
            name.clone(),
            format!("a text with digest {}", Digest::of(value.as_bytes()).short()),
        ),
        false => (name.clone(), value.clone()),
    };
    settings.iter().map(short).collect()
}

/// The settings as a process sends them; no bytes where they are too many.
pub(super) fn encoded(settings: &[(String, String)]) -> Vec<u8> {
    let bytes = serde_json::to_vec(&in_short(settings)).unwrap_or_default();
    if bytes.len() > SETTINGS { Vec::new() } else { bytes }
}

/// Describes the differences between the settings of a connecting process and `own`. None where it did not send them,
/// they do not differ, or they are those of an entirely different run. The sent data is untrusted.
pub(super) fn differences(own: &[(String, String)], sent: &[u8]) -> Option<String> {
    let sent: Vec<(String, String)> = serde_json::from_slice(sent).ok()?;
    let theirs: BTreeMap<&str, &str> = sent
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .collect();
    let mine: BTreeMap<&str, &str> = own
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .collect();
    let common = mine.keys().filter(|name| theirs.contains_key(*name)).count();
    if common * 2 < mine.len().max(theirs.len()) {
        return None;
    }
    let shown = |text: &str| -> String {
        let visible = |c: char| if c.is_control() { '?' } else { c };
        text.chars().take(SHOWN).map(visible).collect()
    };
    let here = own.iter().filter_map(|(name, value)| {
        let name = name.as_str();
        match theirs.get(name) {
            Some(other) if *other == value.as_str() => None,
            Some(other) => Some(format!(
                "`{}` is {} instead of {}",
                shown(name),
                shown(other),
                shown(value)
            )),
            None => Some(format!("`{}` is missing", shown(name))),
        }
    });
    let more = theirs.iter().filter(|(name, _)| !mine.contains_key(*name));
    let more = more.map(|(name, value)| format!("`{}`, {}, is one too many", shown(name), shown(value)));
    let all: Vec<String> = here.chain(more).collect();
    let mut text = all.iter().take(NAMED).cloned().collect::<Vec<_>>().join("; ");
    if all.len() > NAMED {
        text.push_str(&format!("; and {} more", all.len() - NAMED));
    }
    (!all.is_empty()).then_some(text)
}
