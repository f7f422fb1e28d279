//! Files that other pipelines include and connect with their own stages.

use super::*;

const PART: &str = "flow: 1
params: {rows: {default: 1, help: how many}, label: a}
inputs:
  given: rows of the pipeline around
  more: {optional: true, help: other rows}
stages:
  own: {uses: toy.count, with: {rows: '${rows}', label: '${label}'}}
  pair: {uses: toy.pair, from: {left: given}}
  both: {uses: toy.both, from: {rows: [more, pair.train], built: own, given: more}}
outputs:
  best: [both, pair.val]
  val: pair.val
";

fn around(include: &str, stages: &str) -> Files {
    let text = format!(
        "flow: 1
params: {{split: true, rows: 5}}
include:
{include}stages:
  base: {{uses: toy.count, with: {{rows: 2}}}}
  halved: {{when: '${{split}}', uses: toy.pair, from: {{left: base}}}}
{stages}"
    );
    Files::new(&[("p.yaml", &text), ("part.yaml", PART)])
}

/// The inputs of a stage: `name=producer.port`.
fn inputs(checked: &Checked, stage: &str) -> Vec<String> {
    let stage = &checked.stages[checked.position(stage).unwrap()];
    let inputs = stage.inputs.iter().map(|input| {
        let producer = &checked.stages[input.stage];
        let port = &producer.shape.outputs[input.port].name;
        format!("{}={}.{port}", input.name, producer.name)
    });
    inputs.collect()
}

#[test]
fn stages_read_across_files_through_inputs_and_outputs() {
    for is_group in [true, false] {
        let include = format!(
            "  a: {{pipeline: DIR/part.yaml, group: {is_group}, params: inherit, from: {{given: [halved.val, base]}}}}\n"
        );
        // `b` reads an output of `a`.
        let include = format!(
            "{include}  b: {{pipeline: DIR/part.yaml, params: {{<<: inherit, rows: 7}}, from: {{given: a/val, more: base}}}}\n"
        );
        let files = around(
            &include,
            "  end: {uses: toy.both, from: {rows: b/best, given: a/best}}\n",
        );
        let a = if is_group { "a/" } else { "" };
        let checked = files.check(&[]).unwrap();
        assert_eq!(inputs(&checked, &format!("{a}pair")), ["left=halved.val"]);
        // An optional input that is not given is left out, of a list as well.
        let both = [format!("rows={a}pair.train"), format!("built={a}own.rows")];
        assert_eq!(inputs(&checked, &format!("{a}both")), both);
        assert_eq!(inputs(&checked, "b/pair"), [format!("left={a}pair.val")]);
        assert_eq!(
            inputs(&checked, "b/both"),
            ["rows=base.rows", "built=b/own.rows", "given=base.rows"]
        );
        assert_eq!(
            inputs(&checked, "end"),
            ["rows=b/both.rows".to_string(), format!("given={a}both.rows")]
        );
        // What is given may be switched off: the next of its list is read.
        let off = files.check(&["split=false"]).unwrap();
        assert_eq!(inputs(&off, &format!("{a}pair")), ["left=base.rows"]);
        // Parameters: the value beside `<<: inherit`, the others, and the help of one that is declared without.
        let of = |stage: &str| {
            checked.stages[checked.position(stage).unwrap()]
                .settings
                .all()
                .to_string()
        };
        assert_eq!(of(&format!("{a}own")), r#"{"label":"a","rows":5}"#);
        assert_eq!(of("b/own"), r#"{"label":"a","rows":7}"#);
        let rows = checked
            .pipeline
            .params
            .iter()
            .find(|param| param.name == "rows")
            .unwrap();
        assert_eq!(rows.help.as_deref(), Some("how many"));
        let set = files.check(&["label=z"]).unwrap();
        let own = &set.stages[set.position("b/own").unwrap()];
        assert_eq!(own.settings.all().to_string(), r#"{"label":"z","rows":7}"#);
    }
}

#[test]
fn a_part_has_the_keys_of_the_same_pipeline_in_one_file() {
    let part = around(
        "  a: {pipeline: DIR/part.yaml, group: false, params: inherit, from: {given: base}}\n",
        "",
    );
    let whole = Files::new(&[(
        "p.yaml",
        "flow: 1
stages:
  base: {uses: toy.count, with: {rows: 2}}
  halved: {uses: toy.pair, from: {left: base}}
  own: {uses: toy.count, with: {rows: 5, label: a}}
  pair: {uses: toy.pair, from: {left: base}}
  both: {uses: toy.both, from: {rows: pair.train, built: own}}
",
    )]);
    let described = |files: &Files| {
        let checked = files.check(&[]).unwrap();
        let mut stages: Vec<String> = checked
            .stages
            .iter()
            .map(|stage| {
                format!(
                    "{} {:?} {}",
                    stage.name,
                    inputs(&checked, &stage.name),
                    stage.settings.all()
                )
            })
            .collect();
        stages.sort();
        stages
    };
    assert_eq!(described(&part), described(&whole));
}

#[test]
fn wrong_connections_are_told_where_they_are_written() {
    let said = |include: &str, stages: &str| {
        let files = around(include, stages);
        files.said(files.check(&[]).err().expect("a mistake"))
    };
    let given = |from: &str| format!("  a: {{pipeline: DIR/part.yaml, from: {{{from}}}}}\n");
    for (include, stages, expected) in [
        (
            given(""),
            "",
            "part.yaml:4:3: error: `a` is not given its input `given`",
        ),
        (given("given: base, moar: base"), "", "has no input `moar`\n"),
        (
            given("given: nowhere"),
            "",
            "error: the input `given`: there is no stage `nowhere`\n 4 |",
        ),
        (given("given: base.side"), "", "has no port `side`"),
        (given("given: 3"), "", "p.yaml:4:"),
        (
            given("given: base"),
            "  end: {uses: toy.pair, from: {left: a/worst}}\n",
            "there is no stage `a/worst`",
        ),
        (
            given("given: base"),
            "  end: {uses: toy.pair, from: {left: a/best.rows}}\n",
            "the output `best` of `a` has no ports",
        ),
        (given("given: a/best"), "", "wait for each other in a circle"),
        (
            "  a: {pipeline: DIR/part.yaml, group: 3, from: {given: base}}\n".into(),
            "",
            "`group` must be true or false",
        ),
        (
            "  a: {pipeline: DIR/part.yaml, group: false, from: {given: base}}\n".into(),
            "  pair: {uses: toy.pair, from: {left: base}}\n",
            "`pair` names both a stage of `a` and a stage",
        ),
        (
            "  a: {pipeline: DIR/part.yaml, from: [base]}\n".into(),
            "",
            "`from` of a group must be a map",
        ),
    ] {
        let said = said(&include, stages);
        assert!(said.contains(expected), "{include}{stages}: {said}");
    }
    // By itself such a file has no rows to work on.
    let alone = Files::new(&[("p.yaml", PART)]);
    let said = alone.said(alone.load(&[], &[]).unwrap_err());
    assert!(
        said.contains("p.yaml:4:3: error: this file is a part of other pipelines"),
        "{said}"
    );
}

#[test]
fn outputs_that_name_each_other_end() {
    // Each of a long row of outputs names the next one twice.
    let part = |count: usize, last: &str| {
        let outputs: String = (0..count)
            .map(|number| format!("  o{number}: [o{next}, o{next}]\n", next = number + 1))
            .collect();
        format!(
            "flow: 1\nstages:\n  own: {{uses: toy.count, with: {{rows: 1}}}}\noutputs:\n{outputs}  o{count}: {last}\n"
        )
    };
    let read = |count: usize, last: &str| {
        let files = Files::new(&[
            (
                "p.yaml",
                "flow: 1\ninclude: {a: {pipeline: DIR/part.yaml}}\nstages: {end: {uses: toy.pair, from: {left: a/o0}}}\n",
            ),
            ("part.yaml", &part(count, last)),
        ]);
        files
            .check(&[])
            .map(|checked| inputs(&checked, "end"))
            .map_err(|found| found.to_string())
    };
    assert_eq!(read(60, "own").unwrap(), ["left=a/own.rows"]);
    let said = read(2_000, "own").unwrap_err();
    assert!(said.contains("more than 64 names away"), "{said}");
    let said = read(60, "[o0, own]").unwrap_err();
    assert!(said.contains("refers to itself"), "{said}");
}

#[test]
fn files_that_are_doubled_again_and_again_end_with_an_error() {
    let mut all: Vec<(String, String)> = (0..20)
        .map(|level| {
            let next = level + 1;
            let text = format!(
                "flow: 1\ninclude: {{a: {{pipeline: e{next}.yaml}}, b: {{pipeline: e{next}.yaml}}}}\nstages: {{s: {{uses: toy.count, with: {{rows: 1}}}}}}\n"
            );
            (format!("e{level}.yaml"), text)
        })
        .collect();
    all.push((
        "e20.yaml".into(),
        "flow: 1\nstages: {s: {uses: toy.count, with: {rows: 1}}}\n".into(),
    ));
    all[0].0 = "p.yaml".into();
    let files: Vec<(&str, &str)> = all.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    let error = Files::new(&files).load(&[], &[]).err().unwrap().to_string();
    assert!(error.contains("includes more than 1000 files"), "{error}");
    assert_eq!(error.matches("includes more than").count(), 1, "{error}");
}
