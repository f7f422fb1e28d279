//! Groups of parameters that stages are given whole: `with: {<<: "${train}", steps: 7}`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use super::diagnostic::Diagnostic;
use super::pipeline::Pipeline;
use super::source::Place;
use super::yaml::{Mapping, Part, Steps, Value};
use flow_base::suggest::did_you_mean;
use flow_kind::registry::Registry;

/// Gives each stage the members of the groups in its `<<` that its kind has settings for, where the stage does not set
/// them itself. A member that no stage takes is a mistake, as a setting of that name would be; so is one that two groups give
/// with different values.
pub(super) fn merge_groups(pipeline: &mut Pipeline, registry: &Registry, found: &mut Vec<Diagnostic>) {
    let names_of = |kind: &str| -> Option<BTreeSet<String>> {
        let schema = registry.get(kind)?.schema();
        let properties = schema.get("properties")?.as_object()?;
        Some(properties.keys().cloned().collect())
    };
    // By file and group: its first place, its members, those that were taken, and the settings of its stages.
    type Use = (Place, BTreeMap<String, bool>, BTreeSet<String>);
    let mut uses: BTreeMap<(PathBuf, String), Use> = BTreeMap::new();
    for stage in &mut pipeline.stages {
        // What groups gave to this stage, by setting.
        let mut given: BTreeMap<String, (String, Value)> = BTreeMap::new();
        for merged in std::mem::take(&mut stage.merged) {
            // An unknown kind is reported when the stage is checked.
            let Some(names) = names_of(&stage.uses) else { continue };
            let place = stage
                .origin
                .place(&Steps::default().key("with").join(&merged.steps), Part::Value);
            let of = (stage.origin.source.path.clone(), merged.group.clone());
            let (_, taken, settings) = uses
                .entry(of)
                .or_insert_with(|| (place, BTreeMap::new(), BTreeSet::new()));
            if stage.with.is_null() {
                stage.with = Value::Mapping(Mapping::new());
            }
            let Value::Mapping(with) = &mut stage.with else {
                continue;
            };
            for (key, value) in merged.values {
                let Some(name) = key.as_str().map(str::to_string) else {
                    continue;
                };
                let written = format!("${{{}.{name}}}", merged.group);
                let used = taken
                    .entry(name.clone())
                    .or_insert_with(|| stage.origin.source.text.contains(&written));
                if !names.contains(&name) {
                    continue;
                }
                *used = true;
                if let Some((first, of_first)) = given.get(&name) {
                    if *of_first != value {
                        let message = format!(
                            "`{name}` is a member of the groups `{first}` and `{}`, with different values",
                            merged.group
                        );
                        let help = format!("say under `with` which one counts: `{name}: ${{{first}.{name}}}`");
                        let steps = Steps::default().key("with").join(&merged.steps);
                        found.push(
                            Diagnostic::new(message)
                                .at(stage.origin.place(&steps, Part::Value))
                                .help(help),
                        );
                    }
                } else if !with.contains_key(&key) {
                    given.insert(name.clone(), (merged.group.clone(), value.clone()));
                    with.insert(key, value);
                    let step = Steps::default().key(&name);
                    let member = merged.members.iter().find(|member| member.steps == step);
                    stage.put_in.extend(member.cloned());
                }
            }
            settings.extend(names);
        }
    }
    for ((_, group), (place, members, settings)) in uses {
        for (name, _) in members.iter().filter(|(_, used)| !**used) {
            let message = format!("no stage that takes the group `{group}` has a setting `{name}`");
            let help = did_you_mean(name, settings.iter().map(String::as_str), "settings");
            found.push(Diagnostic::new(message).at(place.clone()).help(help));
        }
    }
}
