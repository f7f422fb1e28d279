//! Pipelines of several files, and stages that are switched off.

use super::*;

#[test]
fn a_pipeline_with_a_group_an_overlay_and_values_from_the_command_line() {
    let overlay = "flow: 1\nparams: {rows: 7, train: {steps: 10}}\n";
    let files = Files::new(&[("p.yaml", OUTER), ("inner.yaml", INNER), ("o.yaml", overlay)]);
    let pipeline = files.load(&["o.yaml"], &["train.steps=12", "share=1"]).unwrap();
    let values = pipeline.values();
    let place = |name: &str| values.iter().position(|(known, _)| known == name).expect(name);
    let of = |name: &str| values[place(name)].1.as_str();
    assert_eq!((of("train.steps"), of("stage more: with.rows")), ("12", "12"));
    assert_eq!(of("stage pair: from.left"), "\"inner/clean\"");
    // A parameter is named before the setting that uses it.
    assert!(place("train.steps") < place("stage more: with.rows"));
    let frozen = pipeline.frozen().replace(&files.0.path().display().to_string(), "DIR");
    insta::assert_snapshot!(frozen);
    let checked = check(pipeline, &registry()).unwrap();
    let inputs: Vec<_> = checked
        .stages
        .iter()
        .map(|stage| {
            (
                stage.name.as_str(),
                stage
                    .inputs
                    .iter()
                    .map(|i| (i.name.as_str(), i.stage, i.port))
                    .collect::<Vec<_>>(),
            )
        })
        .collect();
    assert_eq!(
        inputs,
        [
            ("inner/scan", vec![]),
            ("inner/clean", vec![("scan", 0, 0)]),
            ("pair", vec![("left", 1, 0)]),
            ("write", vec![("train", 2, 0), ("val", 2, 1)]),
            ("more", vec![]),
        ]
    );
    assert_eq!(
        checked.stages[2].max_rejects,
        Some(MaxRejects {
            limit: RejectLimit::Share(0.05),
            action: LimitAction::Warn
        })
    );
    assert_eq!(
        checked
            .pipeline
            .params
            .iter()
            .find(|p| p.name == "train.steps")
            .unwrap()
            .given_by,
        "--set train.steps=12"
    );
}

const SWITCHED: &str = "flow: 1
params: {manifest: '', rows: 3, label: {default: x}, train: {rows: 5, label: y}}
include:
  inner: {when: \"${manifest} == ''\", pipeline: DIR/inner.yaml, params: [rows, label]}
stages:
  given: {when: \"${manifest} != ''\", uses: toy.count, with: {rows: 1, label: '${manifest}'}}
  pair: {uses: toy.pair, from: {left: inner/clean}}
  base: {uses: toy.count, with: {rows: 2}}
  both: {uses: toy.both, from: {rows: base, built: pair.train, given: given}}
  more: {uses: toy.count, with: {<<: '${train}', rows: 7}}
  rest: {uses: toy.count, with: {<<: ['${train}']}}
";

#[test]
fn stages_that_are_switched_off_take_no_part_nor_do_those_that_need_them() {
    let files = Files::new(&[("p.yaml", SWITCHED), ("inner.yaml", INNER)]);
    let names = |checked: &Checked| {
        checked
            .stages
            .iter()
            .map(|stage| stage.name.clone())
            .collect::<Vec<_>>()
    };
    let off = |checked: &Checked| {
        let off = checked.pipeline.switched_off.iter();
        off.map(|off| format!("{} {}: {}", off.position, off.stage, off.reason))
            .collect::<Vec<_>>()
    };
    let built = files.check(&[]).unwrap();
    assert_eq!(
        names(&built),
        ["inner/scan", "inner/clean", "pair", "base", "both", "more", "rest"]
    );
    assert_eq!(off(&built), ["2 given: `when: ${manifest} != ''` does not hold"]);
    // The optional input is gone, the others stay where they were.
    let inputs = |checked: &Checked, stage: &str| {
        let stage = &checked.stages[checked.position(stage).unwrap()];
        let inputs = stage.inputs.iter();
        inputs
            .map(|input| (input.name.clone(), checked.stages[input.stage].name.clone()))
            .collect::<Vec<_>>()
    };
    let pair = |a: &str, b: &str| (a.to_string(), b.to_string());
    assert_eq!(inputs(&built, "both"), [pair("rows", "base"), pair("built", "pair")]);
    let given = files.check(&["manifest=t.jsonl"]).unwrap();
    assert_eq!(names(&given), ["given", "base", "both", "more", "rest"]);
    let group = "the group `inner` is switched off: `when: ${manifest} == ''` does not hold";
    assert_eq!(
        off(&given),
        [
            format!("0 inner/scan: {group}"),
            format!("1 inner/clean: {group}"),
            "3 pair: its input `left` comes from `clean`, which is switched off".to_string(),
        ]
    );
    let since: Vec<_> = given
        .pipeline
        .switched_off
        .iter()
        .map(|off| off.since.as_deref())
        .collect();
    assert_eq!(since, [None, None, Some("inner/clean")]);
    assert_eq!(inputs(&given, "both"), [pair("rows", "base"), pair("given", "given")]);
    assert!(given.pipeline.frozen().contains("switched_off"));
    // Settings of a group that is given whole, and one of the stage's own, which comes first.
    let all = |stage: &str| given.stages[given.position(stage).unwrap()].settings.all().to_string();
    assert_eq!(all("more"), r#"{"label":"y","rows":7}"#);
    assert_eq!(all("rest"), r#"{"label":"y","rows":5}"#);
}

#[test]
fn of_a_list_the_first_stage_is_read_that_takes_part() {
    let text = "flow: 1
params: {manifest: '', split: false}
stages:
  built: {when: \"${manifest} == ''\", uses: toy.count, with: {rows: 1}}
  below: {uses: toy.pass, from: built}
  divided: {when: '${split}', uses: toy.pair, from: {left: base}}
  base: {uses: toy.count, with: {rows: 2}}
  reads: {uses: toy.both, from: {rows: [divided.val, below, base]}}
  none: {uses: toy.both, from: {rows: [divided, below]}}
";
    let files = Files::new(&[("p.yaml", text)]);
    let reads = |set: &[&str]| {
        let checked = files.check(set).unwrap();
        let stage = &checked.stages[checked.position("reads").unwrap()];
        let [input] = &stage.inputs[..] else {
            panic!("one input")
        };
        (checked.stages[input.stage].name.clone(), input.port)
    };
    assert_eq!(reads(&["split=true"]), ("divided".to_string(), 1));
    assert_eq!(reads(&[]), ("below".to_string(), 0));
    // `below` has no `when` of its own: it is off with what it reads.
    assert_eq!(reads(&["manifest=x"]), ("base".to_string(), 0));
    let checked = files.check(&["manifest=x"]).unwrap();
    let off = checked.pipeline.switched_off.iter().find(|off| off.stage == "none");
    assert!(
        off.unwrap().reason.contains("`below`, which is switched off"),
        "{off:?}"
    );
    assert!(
        checked.pipeline.frozen().contains("rows: base"),
        "what was read is recorded"
    );
}

#[test]
fn two_groups_do_not_give_one_setting() {
    let of = |first: &str, second: &str, own: &str| {
        format!(
            "flow: 1
params: {{one: {{rows: {first}}}, two: {{rows: {second}, label: x}}}}
stages:
  a: {{uses: toy.count, with: {{<<: ['${{one}}', '${{two}}']{own}}}}}
"
        )
    };
    let said = mistakes(&of("1", "2", ""));
    assert!(
        said.contains("`rows` is a member of the groups `one` and `two`, with different values"),
        "{said}"
    );
    assert!(said.contains("`rows: ${one.rows}`"), "{said}");
    for right in [of("1", "1", ""), of("1", "2", ", rows: 3")] {
        Files::new(&[("p.yaml", right.as_str())]).check(&[]).unwrap();
    }
}

#[test]
fn lists_of_stages_are_checked_as_a_whole() {
    let of = |list: &str| {
        mistakes(&format!(
            "flow: 1\nstages:\n  a: {{uses: toy.count, with: {{rows: 1}}}}\n  b: {{uses: toy.both, from: {{rows: {list}}}}}\n"
        ))
    };
    let said = of("[]");
    assert!(said.contains("the list of stages for `rows` is empty"), "{said}");
    let said = of("[a, 3]");
    assert!(
        said.contains("p.yaml:4:") && said.contains("found a whole number"),
        "{said}"
    );
    // One that is not read has to be there, too.
    let said = of("[a, aa]");
    assert!(
        said.contains("there is no stage `aa`") && said.contains("did you mean `a`?"),
        "{said}"
    );
    let said = of("[a, b]");
    assert!(said.contains("in a circle: b -> b"), "{said}");
}

#[test]
fn layout_comments_and_order_of_keys_change_no_identity() {
    let one = Files::new(&[(
        "p.yaml",
        "flow: 1\nstages:\n  a: {uses: toy.count, with: {rows: 1, label: x}}\n",
    )]);
    let two = Files::new(&[(
        "p.yaml",
        "stages:\n  a:   # here\n    with:\n      label: 'x'\n      rows: ${n}\n    uses: toy.count\nparams: {n: 1}\nflow: 1\n",
    )]);
    let identity = |files: &Files| files.check(&[]).unwrap().stages[0].settings.identity();
    assert_eq!(identity(&one), identity(&two));
}

#[test]
fn circles_are_shown() {
    let said = mistakes(
        "flow: 1\nstages:\n  d: {uses: sql, from: b}\n  a: {uses: sql, from: c}\n  b: {uses: sql, from: a}\n  c: {uses: sql, from: b}\n",
    );
    assert!(said.contains("in a circle: a -> b -> c -> a"), "{said}");
    let files = Files::new(&[
        (
            "p.yaml",
            "flow: 1\ninclude: {g: {pipeline: DIR/q.yaml, params: inherit}}\n",
        ),
        (
            "q.yaml",
            "flow: 1\ninclude: {h: {pipeline: DIR/p.yaml, params: inherit}}\n",
        ),
    ]);
    let said = files.said(files.load(&[], &[]).unwrap_err());
    assert!(
        said.contains("q.yaml:2:25: error: pipelines include each other in a circle: p.yaml -> q.yaml -> p.yaml"),
        "{said}"
    );
    let files = Files::new(&[(
        "p.yaml",
        "flow: 1\nparams: {a: '${b}', b: 'x${a}'}\nstages: {s: {uses: toy.count}}\n",
    )]);
    let said = files.said(files.load(&[], &[]).unwrap_err());
    assert!(said.contains("refers to itself"), "{said}");
}

#[test]
fn a_group_that_inherits_has_its_parameters_in_the_pipeline_around_it() {
    let files = Files::new(&[
        (
            "p.yaml",
            "flow: 1\nparams: {label: outer}\ninclude:\n  g: {pipeline: DIR/below/middle.yaml, params: inherit}\n",
        ),
        (
            "below/middle.yaml",
            "flow: 1\nparams: {label: {default: own, help: a word}, where: '${file_dir}', set: {one: 1, two: 2}}\ninclude:\n  h: {pipeline: inner.yaml, params: inherit}\n\
             stages:\n  own: {uses: toy.count, with: {rows: '${set.two}', label: '${label} ${where}'}}\n",
        ),
        (
            "below/inner.yaml",
            "flow: 1\nparams: {rows: {default: 3, help: rows to count}, label: inner}\nstages:\n  scan: {uses: toy.count, with: {rows: '${rows}', label: '${label}'}}\n",
        ),
    ]);
    let settings = |checked: &Checked, stage: &str| {
        let stage = &checked.stages[checked.position(stage).unwrap()];
        stage.settings.all().to_string()
    };
    let below = files.path("below");
    let checked = files.check(&[]).unwrap();
    let own = format!(r#"{{"label":"outer {}","rows":2}}"#, below.display());
    assert_eq!(settings(&checked, "g/own"), own);
    assert_eq!(settings(&checked, "g/h/scan"), r#"{"label":"outer","rows":3}"#);
    let params = checked.pipeline.params.iter();
    let names: Vec<&str> = params.map(|param| param.name.as_str()).collect();
    assert_eq!(names, ["label", "where", "set.one", "set.two", "rows"]);
    assert_eq!(checked.pipeline.params[4].help.as_deref(), Some("rows to count"));
    let set = files.check(&["rows=7", "set.two=5", "label=new"]).unwrap();
    assert_eq!(settings(&set, "g/h/scan"), r#"{"label":"new","rows":7}"#);
    assert!(settings(&set, "g/own").contains("\"rows\":5"));
    // What is wrong with the included file is reported once.
    let wrong = Files::new(&[
        (
            "p.yaml",
            "flow: 1\ninclude:\n  g: {pipeline: DIR/q.yaml, params: inherit}\n",
        ),
        (
            "q.yaml",
            "flow: 1\nparams: {n: {help: nothing}}\nstages:\n  scan: {uses: toy.count, with: {rows: 1}}\n",
        ),
    ]);
    let said = wrong.check(&[]).err().unwrap().to_string();
    assert_eq!(said.matches("parameter `n` has neither").count(), 1, "{said}");
}

#[test]
fn members_of_a_group_of_parameters_that_the_file_around_it_lacks_are_inherited() {
    let files = Files::new(&[
        (
            "p.yaml",
            "flow: 1\nparams: {set: {one: 7, three: 3}}\ninclude:\n  g: {pipeline: '${file_dir}/q.yaml', params: inherit}\n\
             stages: {own: {uses: toy.count, with: {rows: '${set.three}'}}}\n",
        ),
        (
            "q.yaml",
            "flow: 1\nparams: {set: {one: 1, two: 2}}\nstages:\n  a: {uses: toy.count, with: {rows: '${set.one}'}}\n  b: {uses: toy.count, with: {rows: '${set.two}'}}\n",
        ),
    ]);
    let rows = |checked: &Checked, stage: &str| {
        let stage = &checked.stages[checked.position(stage).unwrap()];
        stage.settings.all()["rows"].clone()
    };
    let checked = files.check(&[]).unwrap();
    assert_eq!([rows(&checked, "g/a"), rows(&checked, "g/b")], [7, 2]);
    let names: Vec<&str> = checked
        .pipeline
        .params
        .iter()
        .map(|param| param.name.as_str())
        .collect();
    assert_eq!(names, ["set.one", "set.three", "set.two"]);
    let set = files.check(&["set.two=5"]).unwrap();
    assert_eq!([rows(&set, "g/a"), rows(&set, "g/b")], [7, 5]);
}

#[test]
fn what_cannot_be_inherited_is_refused_by_name() {
    let stages = "stages:\n  scan: {uses: toy.count, with: {rows: '${n}'}}\n";
    let siblings = |params: &str, other: &str| {
        let include =
            "include:\n  g: {pipeline: DIR/q.yaml, params: inherit}\n  h: {pipeline: DIR/r.yaml, params: inherit}\n";
        Files::new(&[
            ("p.yaml", format!("flow: 1\n{params}{include}").as_str()),
            ("q.yaml", format!("flow: 1\nparams: {{n: 1}}\n{stages}").as_str()),
            ("r.yaml", format!("flow: 1\nparams: {other}\n{stages}").as_str()),
        ])
    };
    let said = siblings("", "{n: 2}").check(&[]).err().unwrap().to_string();
    assert!(
        said.contains("the groups `g` and `h` inherit the parameter `n` with different defaults (1 and 2)")
            && said.contains("p.yaml:4:"),
        "{said}"
    );
    siblings("", "{n: {default: 1, help: the same}}").check(&[]).unwrap();
    siblings("params: {n: 3}\n", "{n: 2}").check(&[]).unwrap();
    let files = Files::new(&[
        (
            "p.yaml",
            "flow: 1\nparams: {which: q}\ninclude:\n  g: {pipeline: 'DIR/${which}.yaml', params: inherit}\n",
        ),
        ("q.yaml", &format!("flow: 1\nparams: {{n: 1}}\n{stages}")),
    ]);
    let said = files.check(&[]).err().unwrap().to_string();
    assert!(
        said.contains("`pipeline` refers to the parameter `which`") && said.contains("p.yaml:4:"),
        "{said}"
    );
}
