//! `flow compare`: runs side by side, by the settings that differ and by their figures.

use std::collections::BTreeMap;
use std::io::Write;

use flow_base::event::Event;
use flow_inspect::frozen::Frozen;
use flow_inspect::past_run::PastRun;
use flow_inspect::progress::stage_of;
use flow_inspect::table::{duration, lines};
use flow_storage::Storage;
use serde_json::Value;

use super::past_run::opened_store;
use crate::arguments::CompareArguments;
use flow_cli::failure::{Exit, Failure};

/// Most characters of a value that is shown: lists may have thousands.
const LONGEST: usize = 60;

/// What is shown of a run: names and values.
type Values = BTreeMap<String, String>;

/// A run as its files have it.
#[derive(Default)]
struct Side {
    /// Its name, else its id.
    title: String,
    /// Id, pipeline, note, time and outcome.
    about: Vec<(&'static str, String)>,
    params: Values,
    settings: Values,
    figures: Values,
}

pub fn compare(storage: &Storage, arguments: &CompareArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let store = opened_store(storage, &arguments.state)?;
    let sides = arguments.runs.iter().map(|name| side(&PastRun::called(&store, name)?));
    let sides: Vec<Side> = sides.collect::<Result<_, Failure>>()?;
    let shown = |row: Vec<String>| {
        let mut row = row.into_iter();
        let name = row.next().map(without_middle);
        name.into_iter().chain(row.map(shortened)).collect()
    };
    let rows: Vec<Vec<String>> = rows(&sides).into_iter().map(shown).collect();
    for line in lines(&rows) {
        writeln!(out, "{line}")?;
    }
    Ok(Exit::Done)
}

/// A name of at most [`LONGEST`] characters: long ones differ at their ends.
fn without_middle(name: String) -> String {
    let characters: Vec<char> = name.chars().collect();
    if characters.len() <= LONGEST {
        return name;
    }
    let (begin, end) = (
        &characters[..LONGEST / 2],
        &characters[characters.len() - LONGEST / 2..],
    );
    begin.iter().chain(['…'].iter()).chain(end).collect()
}

/// A value cut to [`LONGEST`] characters.
fn shortened(value: String) -> String {
    match value.char_indices().nth(LONGEST) {
        None => value,
        Some((end, _)) => format!("{}…", &value[..end]),
    }
}

fn side(run: &PastRun) -> Result<Side, Failure> {
    let frozen = Frozen::read(&run.folder.join("spec.yaml"));
    let mut side = Side {
        title: run.id.clone(),
        params: frozen.params.into_iter().collect(),
        settings: frozen.settings.into_iter().collect(),
        ..Side::default()
    };
    let (mut ended, mut note) = ("not finished".to_owned(), String::new());
    for (_, logged) in run.events()? {
        match logged.event {
            Event::RunStarted {
                pipeline,
                name,
                note: of_run,
                ..
            } => {
                side.title = name.unwrap_or_else(|| run.id.clone());
                note = of_run.unwrap_or_default();
                side.about = vec![("run", run.id.clone()), ("pipeline", pipeline), ("started", logged.at)];
            }
            Event::RunFinished { outcome, seconds, .. } => {
                ended = format!("{} after {}", outcome.replace('_', " "), duration(seconds));
            }
            Event::StageFigures { stage, figures } => take_figures(&mut side.figures, stage_of(&stage), &figures),
            _ => {}
        }
    }
    let is_known = !(side.params.is_empty() && side.settings.is_empty());
    let settings = if is_known {
        ""
    } else {
        "not recorded: the run failed before it began"
    };
    side.about
        .extend([("ended", ended), ("note", note), ("settings", settings.to_owned())]);
    Ok(side)
}

/// Figures of a stage that compare runs, the last of each name: rates and losses, and the shares in tables.
fn take_figures(into: &mut Values, stage: &str, figures: &Value) {
    let named = |name: &str| name.ends_with("loss") || name.starts_with("validation_") || name == "model_step";
    for (name, value) in figures.as_object().into_iter().flatten() {
        if named(name) && value.is_number() {
            into.insert(format!("{stage}: {name}"), value.to_string());
        }
    }
    let table = &figures["table"];
    let (Some(title), Some(columns), Some(rows)) = (
        table["title"].as_str(),
        table["columns"].as_array(),
        table["rows"].as_array(),
    ) else {
        return;
    };
    for row in rows.iter().filter_map(Value::as_array) {
        let Some(key) = row.first().and_then(Value::as_str) else {
            continue;
        };
        for (column, cell) in columns.iter().zip(row).skip(1) {
            let share = cell.as_str().filter(|cell| {
                let number = cell.strip_suffix(" %");
                number.is_some_and(|number| number.parse::<f64>().is_ok())
            });
            if let (Some(column), Some(share)) = (column.as_str(), share) {
                into.insert(format!("{title}: {key}: {column}"), share.to_owned());
            }
        }
    }
}

/// The table: a column for each run. A setting that a run does not have is `-` there.
fn rows(sides: &[Side]) -> Vec<Vec<String>> {
    let mut rows = vec![
        std::iter::once(String::new())
            .chain(sides.iter().map(|side| side.title.clone()))
            .collect::<Vec<_>>(),
    ];
    let about: Vec<&str> = sides
        .iter()
        .flat_map(|side| side.about.iter().map(|(name, _)| *name))
        .collect();
    let mut shown: Vec<&str> = Vec::new();
    for name in about {
        let values: Vec<String> = (sides.iter())
            .map(|side| {
                let found = side.about.iter().find(|(known, _)| *known == name);
                found.map_or_else(|| "-".to_owned(), |(_, value)| value.clone())
            })
            .collect();
        if !shown.contains(&name) && values.iter().any(|value| !value.is_empty()) {
            shown.push(name);
            rows.push(std::iter::once(name.to_owned()).chain(values).collect());
        }
    }
    let params = differing(sides, |side| &side.params);
    // The settings of stages that are not simply the values of such parameters.
    let settings = differing(sides, |side| &side.settings).into_iter();
    let settings: Vec<Vec<String>> = settings
        .filter(|row| !params.iter().any(|param| param[1..] == row[1..]))
        .collect();
    rows.extend(params);
    rows.extend(settings);
    let names = sides.iter().flat_map(|side| side.figures.keys());
    let names: std::collections::BTreeSet<&String> = names.collect();
    rows.extend(names.into_iter().map(|name| row(sides, name, |side| &side.figures)));
    rows
}

fn row(sides: &[Side], name: &str, of: impl Fn(&Side) -> &Values) -> Vec<String> {
    let value = |side: &Side| match of(side).get(name) {
        None => "-".to_owned(),
        Some(value) if value.is_empty() => "(empty)".to_owned(),
        Some(value) => value.clone(),
    };
    std::iter::once(name.to_owned())
        .chain(sides.iter().map(value))
        .collect()
}

/// A row for each name whose values are not the same in all runs that have any.
fn differing(sides: &[Side], of: impl Fn(&Side) -> &Values + Copy) -> Vec<Vec<String>> {
    let names: std::collections::BTreeSet<&String> = sides.iter().flat_map(|side| of(side).keys()).collect();
    let differs = |name: &&String| {
        let mut values = sides
            .iter()
            .map(of)
            .filter(|values| !values.is_empty())
            .map(|values| values.get(*name));
        let first = values.next();
        values.any(|value| Some(value) != first)
    };
    let names = names.into_iter().filter(differs);
    names.map(|name| row(sides, name, of)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn side_with(title: &str, params: &[(&str, &str)], settings: &[(&str, &str)]) -> Side {
        let values = |pairs: &[(&str, &str)]| pairs.iter().map(|(a, b)| ((*a).into(), (*b).into())).collect();
        Side {
            title: title.into(),
            about: vec![("run", format!("id-{title}")), ("note", String::new())],
            params: values(params),
            settings: values(settings),
            figures: Values::new(),
        }
    }

    #[test]
    fn long_values_are_cut_between_characters() {
        assert_eq!(shortened("é".repeat(LONGEST)), "é".repeat(LONGEST));
        assert_eq!(shortened("é".repeat(LONGEST + 1)), format!("{}…", "é".repeat(LONGEST)));
    }

    #[test]
    fn what_differs_is_shown_once_beside_the_figures() {
        let mut warm = side_with(
            "warm",
            &[("lr", "1"), ("seed", "7"), ("out", "")],
            &[("train.lr", "1"), ("train.seed", "7"), ("load.extra", "x")],
        );
        let mut cold = side_with(
            "cold",
            &[("lr", "2"), ("seed", "7"), ("out", "b")],
            &[("train.lr", "2"), ("train.seed", "7")],
        );
        for (side, loss) in [(&mut warm, 3.5), (&mut cold, 4.5)] {
            take_figures(
                &mut side.figures,
                "train",
                &json!({ "loss": 9.0, "step": 1, "line": "x" }),
            );
            take_figures(
                &mut side.figures,
                "train",
                &json!({ "loss": loss, "validation_wer": null }),
            );
        }
        let table =
            json!({ "table": { "title": "Rates", "columns": ["lang", "n", "WER"], "rows": [["hi", 7, "12.5 %"], 3] } });
        take_figures(&mut warm.figures, "report", &table);
        // A run that failed before it began has no settings, which is no difference.
        let none = side_with("none", &[], &[]);
        let with_none = rows(&[side_with("one", &[("lr", "1")], &[]), none]);
        assert_eq!(with_none.len(), 2, "{with_none:?}");
        let rows = rows(&[warm, cold]);
        let lines: Vec<String> = rows.iter().map(|row| row.join("|")).collect();
        assert_eq!(
            lines,
            [
                "|warm|cold",
                "run|id-warm|id-cold",
                "lr|1|2",
                "out|(empty)|b",
                "load.extra|x|-",
                "Rates: hi: WER|12.5 %|-",
                "train: loss|3.5|4.5",
            ]
        );
    }
}
