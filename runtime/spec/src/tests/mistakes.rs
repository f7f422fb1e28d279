//! Messages and places of mistakes.

use super::*;

#[test]
fn mistakes_in_conditions_and_groups_are_shown_where_they_stand() {
    let text = "flow: 1
params: {manifest: '', train: {rows: 5, lable: y}, list: [1]}
include:
  none: {when: [1], pipeline: DIR/p.yaml}
stages:
  a: {when: \"${manifst} == ''\", uses: toy.count, with: {rows: 1}}
  b:
    when: ${manifest}
    uses: toy.count
    with: {rows: 1}
  c: {when: false, uses: toy.count, with: {rows: many}}
  d: {uses: toy.count, with: {<<: '${list}', rows: 1}}
";
    let said = mistakes(text);
    assert!(
        said.contains("p.yaml:4:16: error: `when` must be a condition, found a list"),
        "{said}"
    );
    assert!(
        said.contains("p.yaml:6:14: error: `when`: unknown parameter `manifst`"),
        "{said}"
    );
    assert!(said.contains("did you mean `manifest`?"), "{said}");
    assert!(
        said.contains("p.yaml:8:11: error: `when`: expected true or false, found text"),
        "{said}"
    );
    assert!(
        said.contains("`<<` takes a group of parameters, found a list"),
        "{said}"
    );
    // Of a stage that is switched off the form of the settings is checked.
    let text = "flow: 1
params: {train: {rows: 5, lable: y}}
stages:
  c: {when: false, uses: toy.count, with: {rows: many}}
  d: {uses: toy.count, with: {<<: '${train}'}}
";
    let said = mistakes(text);
    assert!(said.contains("p.yaml:4:50: error: stage `c`"), "{said}");
    let unused = "p.yaml:5:35: error: no stage that takes the group `train` has a setting `lable`";
    assert!(
        said.contains(unused) && said.contains("did you mean `label`?"),
        "{said}"
    );
    let off = mistakes("flow: 1\nstages:\n  a: {when: false, uses: toy.count, with: {rows: 1}}\n");
    assert!(off.contains("every stage is switched off"), "{off}");
}

#[test]
fn mistakes_in_the_form_of_a_pipeline() {
    insta::assert_snapshot!(mistakes(
        "flow: 1
descripton: x
params:
  rows: {defualt: 1, help: [x]}
  a-b: 1
stages:
  scan: {uses: toy.count, with: {rows: '${rwos}'}, form: x}
  2x: {uses: toy.count}
  none: {with: {}}
  bad: {uses: toy.count, from: 7, with: [1], max_rejects: 500%}
  twice: {uses: sql, from: [scan.rows, scan.facts]}
  lost:
    uses: sql
    from: scna
    with:
      query: |
        SELECT '${rows}'
          , ${nothing}
"
    ));
}

#[test]
fn mistakes_against_kinds() {
    insta::assert_snapshot!(mistakes(
        "flow: 1
params: {many: {default: lots}, few: 1}
stages:
  scan: {uses: toy.cuont}
  count: {uses: toy.count, with: {rows: '${many}', lable: x}}
  lone:
    uses: toy.count
    with:
      rows: ${many}
  fine: {uses: toy.count, with: {rows: 1}}
  after: {uses: sql, from: fine.fact, with: {query: x}}
  sql:
    uses: sql
    from: fine
    with:
      rejects:
        - {reason: a, when: 'a > ${few}'}
        - {reason: b, when: nine}
      query: x
  block:
    uses: sql
    from: fine
    with:
      query: |
        SELECT a, ${few}, b
        FROM fine WHERE ${few} < nine
  pair: {uses: toy.pair, from: {right: fine}}
  write: {uses: toy.save}
  reads: {uses: sql, from: out, with: {query: x}}
  out: {uses: toy.write, from: fine}
  lonely: {uses: toy.pass}
"
    ));
}

#[test]
fn another_port_of_the_stage_that_fits_is_named() {
    let said = mistakes("flow: 1\nstages:\n  say: {uses: toy.speak}\n  hear: {uses: toy.hear, from: {heard: say}}\n");
    assert!(
        said.contains("has no column `text`") && said.contains("did you mean its port `say.words`?"),
        "{said}"
    );
}

#[test]
fn formats_of_the_future_are_refused_by_name() {
    assert!(mistakes("flow: 2\nstages: []\n").contains("is of format 2, and this binary reads formats up to 1"));
    assert!(mistakes("flow: one\n").contains("`flow` must be 1"));
    assert!(mistakes("stages: {}\n").contains("`flow: 1` is missing"));
    assert!(mistakes("").contains("expected a pipeline"));
    assert!(mistakes("flow: 1\n").contains("this pipeline has no stages"));
    assert!(mistakes("flow: 1\nstages: {a: !x {uses: b}}\n").contains("tags"));
    assert!(mistakes("flow: 1\nstages:\n\ta: 1\n").contains("p.yaml:3:1: error: this is not YAML"));
    let said = mistakes("flow: 1\nstages: {}\nparams: {a: 1, b: '${a}', a: 2}\n");
    assert!(
        said.contains("p.yaml:3:27: error: duplicate key: `a` is given twice") && !said.contains("YAML"),
        "{said}"
    );
    let said = mistakes("flow: 1\nstages: {a: {uses: x, with: {y: ${z}}}}\n");
    assert!(
        said.contains("help: within { } or [ ] put quotes around a text that holds ${...}"),
        "{said}"
    );
}

#[test]
fn errors_while_running_find_their_place() {
    let files = Files::new(&[(
        "p.yaml",
        "flow: 1\nparams: {n: 1}\nstages:\n  a: {uses: toy.count, with: {rows: '${n}'}}\n",
    )]);
    let checked = files.check(&["n=2"]).unwrap();
    let error = StageError::setting("rows", "too few");
    let said = files.said(Diagnostics(vec![checked.diagnose(0, &error)]));
    assert_eq!(
        said,
        "p.yaml:4:38: error: stage `a`: too few\n 4 |   a: {uses: toy.count, with: {rows: '${n}'}}\n   |                                      ^^^^^^\n  help: `${n}` is 2 (--set n=2)"
            .replace("4:38", "4:37")
            .replace("                                      ^", "                                     ^")
    );
    let error = StageError::setting("rows.each[1].least", "too few");
    let said = files.said(Diagnostics(vec![checked.diagnose(0, &error)]));
    assert!(said.contains("stage `a`: `n.each[1].least`: too few"), "{said}");
}

#[test]
fn a_terminal_gets_a_picture() {
    let files = Files::new(&[("p.yaml", "flow: 1\nstages:\n  a: {usse: toy.count}\n")]);
    let Err(Diagnostics(found)) = files.load(&[], &[]) else {
        panic!("accepted")
    };
    let picture = found[0]
        .render(Style::Unicode)
        .replace(&format!("{}/", files.0.path().display()), "");
    insta::assert_snapshot!(picture);
}
