//! Values of parameters and settings.

use super::*;

#[test]
fn values_must_fit_the_defaults() {
    let text = "flow: 1
params:
  text: a
  count: 3
  share: 0.5
  flag: true
  list: [1, 2]
  free: {default: {}}
  map: {default: {a: 1, b: {c: x}}}
  any: null
  free_end: .inf
  lone: '${env:NONE:-4}'
  group: {inner: 1}
  part: {default: 0.5, range: [0, 1]}
stages: {s: {uses: toy.count, with: {rows: 1}}}
";
    let files = Files::new(&[("p.yaml", text)]);
    let value = |set: &[&str], name: &str| match files.load(&[], set) {
        Ok(pipeline) => serde_json::to_string(&pipeline.params.iter().find(|p| p.name == name).unwrap().value).unwrap(),
        Err(diagnostics) => diagnostics.to_string(),
    };
    for (set, name, expected) in [
        ("text=0042", "text", r#""0042""#),
        ("text=", "text", r#""""#),
        ("text='a b'", "text", r#""a b""#),
        ("text=a: b # c", "text", r#""a: b # c""#),
        ("text=${count}", "text", r#""3""#),
        ("count=-7", "count", "-7"),
        ("share=2", "share", "2.0"),
        ("share=3e-4", "share", "0.0003"),
        ("count=1e5", "count", "100000"),
        ("count=-2.0", "count", "-2"),
        ("count=100k", "count", "100000"),
        ("count=1.5k", "count", "1500"),
        ("count=2M", "count", "2000000"),
        ("count=0k", "count", "0"),
        ("list=[3, 1k]", "list", "[3,1000]"),
        ("text=100k", "text", r#""100k""#),
        ("flag=false", "flag", "false"),
        ("list=[3]", "list", "[3]"),
        ("list=3", "list", "[3]"),
        ("free={x: 1}", "free", r#"{"x":1}"#),
        ("free.x.y=1", "free", r#"{"x":{"y":1}}"#),
        ("map={a: 2}", "map", r#"{"a":2,"b":{"c":"x"}}"#),
        ("map.b.c=y", "map", r#"{"a":1,"b":{"c":"y"}}"#),
        ("any=[1, x]", "any", r#"[1,"x"]"#),
        ("lone=5", "lone", "5"),
        // The default says that it may be infinite.
        ("free_end=-.inf", "free_end", "null"),
        ("group.inner=2", "group.inner", "2"),
        ("part=1", "part", "1.0"),
    ] {
        assert_eq!(value(&[set], name), expected, "{set}");
    }
    // Parts are merged, whatever the default is.
    assert_eq!(
        value(&["any={x: 1, z: {a: 1}}", "any.y=6", "any.z.b=2"], "any"),
        r#"{"x":1,"z":{"a":1,"b":2},"y":6}"#
    );
    assert_eq!(value(&["any.x=5", "any=7"], "any"), "7");
    assert_eq!(
        value(&["free={z: {a: 1}}", "free.z.b=2"], "free"),
        r#"{"z":{"a":1,"b":2}}"#
    );
    for (set, expected) in [
        (
            "count=1.5",
            "error: --set count=1.5: parameter `count`: expected a whole number like its default 3, found 1.5",
        ),
        ("count=", "found nothing"),
        ("count=1.5e-1", "found 0.15"),
        ("count=1e300", "expected a whole number"),
        ("count=.inf", "expected a whole number"),
        (
            "share=.nan",
            "error: --set share=.nan: parameter `share`: expected a finite number, found .nan",
        ),
        ("share=.inf", "expected a finite number, found .inf"),
        ("any=-.inf", "expected a finite number, found -.inf"),
        ("any=[1, {x: .nan}]", "expected a finite number, found .nan"),
        ("free.x=.inf", "expected a finite number, found .inf"),
        ("lone=.inf", "expected a finite number, found .inf"),
        ("share=${free_end}", "expected a finite number, found .inf"),
        (
            "part=1.5",
            "error: --set part=1.5: parameter `part`: expected a number from 0 to 1, found 1.5",
        ),
        ("part=-0.1", "expected a number from 0 to 1, found -0.1"),
        ("part=${count}", "expected a number from 0 to 1, found 3.0"),
        ("count=1.2345k", "expected a whole number"),
        ("count=k", "expected a whole number"),
        ("count=1.k", "expected a whole number"),
        ("count=-1k", "expected a whole number"),
        ("count=99999999999999999M", "expected a whole number"),
        ("flag=1", "expected true or false like its default true, found 1"),
        ("list=[x]", "item 1: expected a whole number"),
        ("list=x", "expected a whole number"),
        ("map.d=1", "unknown key `d`"),
        ("map.b.d=1", "unknown key `d`; did you mean `c`?"),
        (
            "cuont=1",
            "error: --set cuont=1: unknown parameter `cuont`\n  help: did you mean `count`?",
        ),
        ("count", "error: --set count: expected NAME=VALUE"),
        ("group=1", "`group` is a group of parameters"),
        (
            "count.x=1",
            "expected a whole number like its default 3, found {\"x\":1}",
        ),
        ("=1", "unknown parameter ``"),
        ("share=[", "error: --set share=["),
        ("share=${nope}", "unknown parameter `nope`"),
        ("share=${text}", "expected a number like its default 0.5, found \"a\""),
    ] {
        let said = value(&[set], "text");
        assert!(said.contains(expected), "{set}: {said}");
    }
    assert_eq!(value(&["free.x=1", "free.y=2"], "free"), r#"{"x":1,"y":2}"#);
}

#[test]
fn usual_names_of_other_programs_lead_to_the_parameters_here() {
    let text = "flow: 1
params:
  train: {phase1_lr: 1e-3, phase2_lr: 1e-4, max_steps: 9, warmup_steps: 1, clip: 1.0}
  max_rows: 3
stages: {s: {uses: toy.count, with: {rows: 1}}}
";
    let files = Files::new(&[("p.yaml", text), ("o.yaml", "flow: 1\nparams: {train: {epochs: 3}}\n")]);
    for (set, expected) in [
        (
            "train.learning_rate=1",
            "here that is `train.phase1_lr` and `train.phase2_lr`",
        ),
        (
            "Learning-Rate=1",
            "here that is `train.phase1_lr` and `train.phase2_lr`",
        ),
        ("epochs=1", "here that is `train.max_steps`"),
        ("patience=1", "training does not stop early: see `train.max_steps`"),
        ("train.workers=1", "help: `--workers` sets it"),
        // Where the pipeline has nothing of the kind.
        ("train.lora=1", "the parameters in `train` are "),
        // As similar as the name of the group alone makes it.
        ("train.noise=1", "the parameters in `train` are "),
        // A parameter of that name in another group, or in none.
        ("max_steps=1", "did you mean `train.max_steps`?"),
        ("train.max_rows=1", "did you mean `max_rows`?"),
        ("train.max_stesp=1", "did you mean `train.max_steps`?"),
        ("train.warmup=1", "the parameters in `train` are `train.warmup_steps`, "),
    ] {
        let said = files.load(&[], &[set]).map(drop).unwrap_err().to_string();
        assert!(
            said.contains("unknown parameter") && said.contains(expected),
            "{set}: {said}"
        );
    }
    let said = files.load(&["o.yaml"], &[]).map(drop).unwrap_err().to_string();
    assert!(
        said.contains("o.yaml") && said.contains("here that is `train.max_steps`"),
        "{said}"
    );
}

#[test]
fn values_in_overlays_and_includes_are_checked_where_they_stand() {
    let files = Files::new(&[
        (
            "p.yaml",
            "flow: 1\nparams: {n: 1, m: {required: true}}\ninclude:\n  g: {pipeline: DIR/inner.yaml, params: {row: 1, label: [x]}}\n",
        ),
        ("inner.yaml", INNER),
        ("o.yaml", "flow: 1\nparams:\n  n: many\n  nn: 2\nstages: {}\n"),
    ]);
    insta::assert_snapshot!(files.said(files.load(&["o.yaml"], &[]).unwrap_err()));
    let said = files.said(files.load(&["none.yaml"], &["m=1"]).unwrap_err());
    assert!(said.contains("cannot read an overlay from none.yaml"), "{said}");
}

#[test]
fn a_limit_that_is_no_number_is_refused_in_overlays_but_an_include_may_be_without_one() {
    let files = Files::new(&[
        (
            "p.yaml",
            "flow: 1\nparams: {most: 20.0, needed: {required: true}}\ninclude:\n  g: {pipeline: DIR/inner.yaml, params: {row: 1, most: .inf}}\n",
        ),
        (
            "inner.yaml",
            "flow: 1\nparams: {row: 1, most: 3.0}\nstages: {s: {uses: toy.count, with: {rows: '${row}'}}}\n",
        ),
        ("o.yaml", "flow: 1\nparams:\n  most: .nan\n  needed: .inf\n"),
    ]);
    let said = files.said(files.load(&["o.yaml"], &[]).unwrap_err());
    assert!(said.contains("o.yaml:3:9"), "{said}");
    for (name, found) in [("most", ".nan"), ("needed", ".inf")] {
        let wrong = format!("parameter `{name}`: expected a finite number, found {found}");
        assert!(said.contains(&wrong), "{said}");
    }
    files.load(&[], &["needed=1"]).map(drop).unwrap();
}

#[test]
fn numbers_that_stand_in_settings_are_finite() {
    let files = Files::new(&[(
        "p.yaml",
        "flow: 1\nparams: {endless: .inf}\nstages:\n  s: {uses: toy.count, with: {rows: [1, {x: .nan}]}}\n  t: {uses: toy.count, with: {rows: '${endless}'}}\n",
    )]);
    let said = files.said(files.load(&[], &[]).unwrap_err());
    assert!(
        said.contains("stage `s`: expected a finite number, found .nan"),
        "{said}"
    );
    assert!(
        said.contains("p.yaml:4:45") && !said.contains("stage `t`: expected a finite"),
        "{said}"
    );
}

#[test]
fn files_may_begin_with_a_byte_order_mark() {
    let files = Files::new(&[
        (
            "p.yaml",
            "\u{feff}flow: 1\nparams: {n: 1}\nstages: {s: {uses: toy.count, with: {rows: '${n}'}}}\n",
        ),
        ("o.yaml", "\u{feff}flow: 1\nparams: {n: 7}\n"),
        ("wrong.yaml", "\u{feff}flow: 2\n"),
    ]);
    let pipeline = files.load(&["o.yaml"], &[]).unwrap_or_else(|found| panic!("{found}"));
    assert_eq!(pipeline.params[0].value, yaml::Value::from(7));
    let said = files.said(files.load(&["wrong.yaml"], &[]).map(drop).unwrap_err());
    assert!(said.contains("wrong.yaml:1:7"), "{said}");
    assert_eq!(yaml::from_text::<Vec<u32>>("\u{feff}[1]"), Ok(vec![1]));
}

#[test]
fn sql_gets_bound_values_and_other_settings_get_types() {
    let text = "flow: 1
params: {min: 0.5, why: low}
stages:
  a: {uses: toy.count, with: {rows: 1}}
  b: {uses: sql, from: a, with: {query: 'SELECT ${min}', rejects: [{reason: '${why}', when: '${min}'}], params: {own: '${why}'}}}
";
    let checked = Files::new(&[("p.yaml", text)]).check(&["min=2"]).unwrap();
    assert_eq!(
        checked.stages[1].settings.all().to_string(),
        r#"{"params":{"own":"low","p_min":2.0},"query":"SELECT $p_min","rejects":[{"reason":"low","when":"$p_min"}]}"#
    );
}
