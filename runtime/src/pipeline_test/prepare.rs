//! Prepares a test to run: resolves its parameters, converts its rows to the schemas of their ports, and selects the
//! stages of the pipeline that are needed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use super::PreparedTest;
use super::given::{Batches, GivenKind, GivenRows};
use super::rows::{ExpectedValues, Mistakes, batch, expected};
use flow_kind::kind::Role;
use flow_kind::registry::Registry;
use flow_spec::yaml::{Part, Steps};
use flow_spec::{
    self, Checked, CheckedInput, CheckedStage, Diagnostic, Diagnostics, ExpectedRows, Overrides, Place, PortName,
    TestCase, did_you_mean,
};

/// The expected output of a stage.
pub(super) struct Expected {
    pub place: Place,
    /// As it is written: `split.train`.
    pub port_name: PortName,
    /// Index into the stages of the test.
    pub stage: usize,
    /// Index into the stage's outputs; none where it has no outputs.
    pub port: Option<usize>,
    pub rows: Option<Rows>,
    /// By reason, none of them 0.
    pub rejects: Option<BTreeMap<String, u64>>,
}

pub(super) enum Rows {
    Count(u64),
    Values(ExpectedValues),
}

/// Makes a test of the pipeline at `path` ready to run. `overrides` are those of the command line.
///
/// # Errors
/// Whatever is wrong with the pipeline under the test's parameters, or with the test.
pub fn prepare(
    path: &Path,
    overrides: &Overrides,
    registry: &Registry,
    test: &TestCase,
) -> Result<PreparedTest, Diagnostics> {
    let pipeline = flow_spec::load_for_test(path, overrides, registry, test)?;
    let checked = flow_spec::check(pipeline, registry)?;
    let mut found = Vec::new();
    let given = given_rows(&checked, test, &mut found);
    let mut all = Vec::new();
    for expectation in &test.expect {
        all.extend(expectation_of(&checked, test, expectation, &given, &mut found));
    }
    Diagnostics::unless_empty(found, ())?;
    let stages: BTreeSet<usize> = all.iter().map(|expected| expected.stage).collect();
    let needed = needed(&checked, &stages, &given);
    let (checked, positions) = reduced(checked, &needed, &stages, given);
    for expected in &mut all {
        expected.stage = positions[expected.stage];
    }
    Ok(PreparedTest {
        name: test.name.clone(),
        checked: Arc::new(checked),
        expected: all,
    })
}

/// Finds a stage and a port, or reports an error.
fn find(
    checked: &Checked,
    test: &TestCase,
    name: &PortName,
    steps: &Steps,
    found: &mut Vec<Diagnostic>,
) -> Option<(usize, Option<usize>)> {
    let mut wrong = |message: String, help: String| {
        let place = test.place(steps, Part::Key);
        found.push(Diagnostic::new(message).at(place).help(help));
    };
    let Some(stage) = checked.position(&name.stage) else {
        let off = checked.pipeline.switched_off.iter().find(|off| off.stage == name.stage);
        match off {
            Some(off) => wrong(format!("stage `{}` is switched off", name.stage), off.reason.clone()),
            None => wrong(
                format!("the pipeline has no stage `{}`", name.stage),
                checked.suggest(&name.stage),
            ),
        }
        return None;
    };
    let outputs = &checked.stages[stage].shape.outputs;
    let Some(port) = &name.port else {
        return Some((stage, (!outputs.is_empty()).then_some(0)));
    };
    match outputs.iter().position(|output| output.name == *port) {
        Some(port) => Some((stage, Some(port))),
        None => {
            let help = did_you_mean(port, outputs.iter().map(|output| output.name.as_str()), "ports");
            wrong(format!("stage `{}` has no port `{port}`", name.stage), help);
            None
        }
    }
}

/// By stage, the rows that it gives.
fn given_rows(checked: &Checked, test: &TestCase, found: &mut Vec<Diagnostic>) -> BTreeMap<usize, Batches> {
    let mut given: BTreeMap<usize, Batches> = BTreeMap::new();
    let mut ports = BTreeSet::new();
    for rows in &test.rows {
        let steps = Steps::default().key("rows").key(&rows.port.to_string());
        let Some((stage, port)) = find(checked, test, &rows.port, &steps, found) else {
            continue;
        };
        let wrong = match port {
            None => format!("stage `{}` has no outputs", rows.port.stage),
            Some(_) if !ports.insert((stage, port)) => format!("the rows of `{}` are given twice", rows.port),
            Some(port) => {
                let schema = &checked.stages[stage].shape.outputs[port].schema;
                let of_stage = given.entry(stage).or_default();
                for (partition, rows) in &rows.partitions {
                    let mut mistakes = Mistakes {
                        test,
                        steps: steps.key(partition.as_str()),
                        found: &mut *found,
                    };
                    if let Some(batch) = batch(schema, rows, &mut mistakes) {
                        of_stage.entry(partition.clone()).or_default().push((port, batch));
                    }
                }
                continue;
            }
        };
        found.push(Diagnostic::new(wrong).at(test.place(&steps, Part::Key)));
    }
    given
}

fn expectation_of(
    checked: &Checked,
    test: &TestCase,
    expectation: &flow_spec::Expectation,
    given: &BTreeMap<usize, Batches>,
    found: &mut Vec<Diagnostic>,
) -> Option<Expected> {
    let name = &expectation.port;
    let steps = Steps::default().key("expect").key(&name.to_string());
    let (stage, port) = find(checked, test, name, &steps, found)?;
    let place = test.place(&steps, Part::Key);
    let wrong = if given.contains_key(&stage) {
        Some((
            format!(
                "`{}` gives rows of the test, so that nothing can be expected of it",
                name.stage
            ),
            "expect something of a stage that reads it".to_string(),
        ))
    } else {
        not_run(checked, stage, given).map(|(other, why)| {
            let needs = if other == stage {
                format!("stage `{}` {why}: a test does not run it", name.stage)
            } else {
                let other = &checked.stages[other].name;
                format!(
                    "`{}` needs stage `{other}`, which {why}: a test does not run it",
                    name.stage
                )
            };
            let help = match other == stage {
                true => "expect something of the stages that it reads".to_string(),
                false => format!("give the rows of `{}` under `rows`", checked.stages[other].name),
            };
            (needs, help)
        })
    };
    if let Some((message, help)) = wrong {
        found.push(Diagnostic::new(message).at(place).help(help));
        return None;
    }
    let rows = match (&expectation.rows, port) {
        (None, _) => None,
        (Some(_), None) => {
            let message = format!("stage `{}` has no outputs, so that it gives no rows", name.stage);
            found.push(Diagnostic::new(message).at(test.place(&steps.key("rows"), Part::Key)));
            return None;
        }
        (Some(ExpectedRows::Count(count)), Some(_)) => Some(Rows::Count(*count)),
        (Some(ExpectedRows::Values(rows)), Some(port)) => {
            let schema = &checked.stages[stage].shape.outputs[port].schema;
            let mut mistakes = Mistakes {
                test,
                steps: steps.key("rows"),
                found,
            };
            let values = expected(schema, rows, &mut mistakes);
            Some(match values.columns.is_empty() {
                true => Rows::Count(rows.len() as u64),
                false => Rows::Values(values),
            })
        }
    };
    Some(Expected {
        place,
        port_name: name.clone(),
        stage,
        port,
        rows,
        rejects: expectation.rejects.clone(),
    })
}

/// The first stage among this one and those before it that has effects beyond the state directory by its role, and which.
fn not_run(checked: &Checked, stage: usize, given: &BTreeMap<usize, Batches>) -> Option<(usize, &'static str)> {
    let needed = needed(checked, &BTreeSet::from([stage]), given);
    let stages = checked.stages.iter().enumerate().rev();
    stages
        .filter(|(index, _)| needed[*index] && !given.contains_key(index))
        .find_map(|(index, stage)| match stage.shape.role {
            Role::Log => Some((index, "keeps a log of its own")),
            Role::Export => Some((index, "writes files of the user's")),
            Role::Source | Role::Local | Role::Global => None,
        })
}

/// The stages that these need, including themselves, but not beyond stages that are replaced by rows.
fn needed(checked: &Checked, stages: &BTreeSet<usize>, given: &BTreeMap<usize, Batches>) -> Vec<bool> {
    let mut needed = vec![false; checked.stages.len()];
    // Producers come before consumers.
    for (index, stage) in checked.stages.iter().enumerate().rev() {
        needed[index] |= stages.contains(&index);
        if needed[index] && !given.contains_key(&index) {
            for input in &stage.inputs {
                needed[input.stage] = true;
            }
        }
    }
    needed
}

/// The pipeline of the test, and the new index of each stage. Stages with expectations store their rows.
fn reduced(
    checked: Checked,
    needed: &[bool],
    expected: &BTreeSet<usize>,
    mut given: BTreeMap<usize, Batches>,
) -> (Checked, Vec<usize>) {
    let mut kept = 0;
    let positions: Vec<usize> = needed
        .iter()
        .map(|needed| {
            kept += usize::from(*needed);
            kept.saturating_sub(1)
        })
        .collect();
    let Checked {
        mut pipeline,
        stages,
        id_column,
    } = checked;
    let mut which = needed.iter();
    pipeline.stages.retain(|_| which.next() == Some(&true));
    let stages = stages.into_iter().enumerate().filter(|(index, _)| needed[*index]);
    let stages = stages.map(|(index, stage)| match given.remove(&index) {
        Some(batches) => giving(stage, batches),
        None => {
            let mut shape = stage.shape;
            shape.expensive |= expected.contains(&index);
            let inputs = stage.inputs.into_iter().map(|input| CheckedInput {
                stage: positions[input.stage],
                ..input
            });
            CheckedStage {
                inputs: inputs.collect(),
                shape,
                max_rejects: None,
                ..stage
            }
        }
    });
    let stages = stages.collect();
    let checked = Checked {
        pipeline,
        stages,
        id_column,
    };
    (checked, positions)
}

/// A stage that gives rows in place of this one.
fn giving(stage: CheckedStage, batches: Batches) -> CheckedStage {
    let given = GivenRows {
        stage: stage.name.clone(),
        outputs: stage.shape.outputs,
        batches: Arc::new(batches),
    };
    CheckedStage {
        name: stage.name,
        kind: Arc::new(GivenKind),
        shape: given.shape(),
        settings: Arc::new(given),
        inputs: Vec::new(),
        max_rejects: None,
    }
}
