//! The help for a parameter that does not exist.

use super::Params;
use flow_base::suggest::{did_you_mean, nearest, nearest_first};

/// Members of a group that are named.
const NAMED: usize = 6;

impl Params {
    /// Which parameter was probably meant by `name`.
    pub fn suggest(&self, name: &str) -> String {
        let names: Vec<&str> = self.params.iter().map(|param| param.name.as_str()).collect();
        let (group, last) = name.rsplit_once('.').unwrap_or(("", name));
        let prefix = format!("{group}.");
        let is_in_group = |other: &&str| !group.is_empty() && other.starts_with(&prefix);
        let last_of = |other: &str| other.rsplit('.').next().unwrap_or_default().to_string();
        let usual = last.to_lowercase().replace('-', "_");
        // Parameters with these last parts.
        let called = |targets: &str| -> Vec<&str> {
            let of = |target| names.iter().copied().filter(move |name| last_of(name) == target);
            targets.split_whitespace().flat_map(of).collect()
        };
        let is_among = |others: &str| others.split(' ').any(|other| other == usual);
        if let Some((targets, _)) = self.usual_names.same.iter().find(|(_, others)| is_among(others)) {
            let meant = called(targets);
            if !meant.is_empty() {
                return format!("here that is {}", quoted(&meant, " and "));
            }
        }
        if let Some((why, targets, _)) = self.usual_names.near.iter().find(|(.., others)| is_among(others)) {
            let meant = called(targets);
            match (targets.is_empty(), meant.is_empty()) {
                (true, _) => return why.to_string(),
                (false, false) => return format!("{why}: see {}", quoted(&meant, " and ")),
                (false, true) => {}
            }
        }
        let namesakes: Vec<&str> = names.iter().copied().filter(|other| last_of(other) == last).collect();
        if !namesakes.is_empty() {
            return format!("did you mean {}?", quoted(&namesakes, " or "));
        }
        let members: Vec<&str> = names.iter().copied().filter(is_in_group).collect();
        if members.is_empty() {
            return did_you_mean(name, names, "parameters");
        }
        // By their last parts: what all have in common would make all similar.
        if let Some(near) = nearest(last, members.iter().map(|member| &member[prefix.len()..])) {
            return format!("did you mean `{prefix}{near}`?");
        }
        let first = nearest_first(name, members.iter().copied());
        let shown = &first[..first.len().min(NAMED)];
        match first.len() - shown.len() {
            0 => format!("the parameters in `{group}` are {}", quoted(shown, ", ")),
            more => format!("the nearest in `{group}` are {} and {more} more", quoted(shown, ", ")),
        }
    }
}

/// The names in quotes, `between` them.
fn quoted(names: &[&str], between: &str) -> String {
    let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
    names.join(between)
}
