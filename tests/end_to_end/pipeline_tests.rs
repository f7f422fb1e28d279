//! `flow test`: tests that pass, fail or are invalid.

use std::path::Path;
use std::process::Output;

use crate::binary::{Workplace, expect_code, program, stderr};

/// A pipeline whose source is never read: there are no such shards.
const PIPELINE: &str = "flow: 1
params:
  shards: /no/such/shards
  least: 1.0
  out: OUT
stages:
  scan: {uses: manifest.scan, with: {shards: '${shards}'}}
  cleaned:
    uses: sql
    from: scan
    with:
      rejects: [{reason: too_short, when: 'duration_s < ${least}'}]
      query: SELECT _row, segment_id, duration_s, duration_s / 3 AS third, path_lang AS lang, transcription_native AS norm FROM scan
  split: {uses: manifest.split, from: cleaned, with: {val_percent: 0}}
  off: {uses: sql, from: cleaned, when: '${least} < 0', with: {query: SELECT * FROM cleaned}}
  write: {uses: sampling.write, from: {batches: plan.batches, summary: plan.summary}, with: {out: '${out}'}}
  plan: {uses: sampling.plan, with: {manifest: '${shards}'}}
";

const ROWS: &str = "
    rows:
      scan:
        hi/b: [{segment_id: c, path_lang: hi, duration_s: 3.0, transcription_native: x}]
        hi/a:
          - {segment_id: a, path_lang: hi, duration_s: 0.5}
          - {segment_id: b, path_lang: hi, duration_s: 1.0, _row: 7}
";

/// `flow test` on the pipeline with these tests. Gives the line on which these begin, too.
fn test(place: &Workplace, tests: &str, arguments: &[&str]) -> (Output, usize) {
    let pipeline = PIPELINE.replace("OUT", &place.out().join("batches.parquet").display().to_string());
    let path = place.path("p.yaml");
    std::fs::write(&path, format!("{pipeline}{tests}")).unwrap();
    let mut flow = program();
    flow.arg("test").arg(&path).args(arguments);
    // Nothing may be left behind, not even among temporary files.
    std::fs::create_dir_all(place.path("temporary")).unwrap();
    flow.env("TMPDIR", place.path("temporary"));
    let output = flow.output().unwrap();
    let left: Vec<_> = std::fs::read_dir(place.path("temporary")).unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(!place.out().exists());
    (output, pipeline.lines().count() + 1)
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn the_shipped_pipelines_pass_their_tests() {
    // Those of long pipelines are in files of their own.
    let folders = ["pipelines", "tests/pipelines"].map(|name| Path::new(env!("CARGO_MANIFEST_DIR")).join(name));
    let mut tested = 0;
    for entry in folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap()) {
        let path = entry.unwrap().path();
        if path.is_dir() {
            // What other pipelines include.
            continue;
        }
        let output = program().arg("test").arg(&path).output().unwrap();
        expect_code(&output, 0);
        let said = stdout(&output);
        if std::fs::read_to_string(&path).unwrap().contains("\ntests:\n") {
            tested += 1;
            assert!(said.ends_with(", all as expected\n"), "{said}");
        } else {
            assert!(said.ends_with(": no tests\n"), "{said}");
        }
    }
    assert!(tested >= 2, "{tested}");
}

#[test]
fn a_test_that_holds_is_counted() {
    let place = Workplace::new("micro");
    let tests = format!(
        "tests:
  all:{ROWS}
    expect:
      cleaned:
        rows:
          - {{_row: 7, segment_id: b, third: 0.3333333}}
          - {{segment_id: c, duration_s: 3}}
        rejects: {{too_short: 1}}
      split: {{rows: [{{}}, {{lang: hi}}]}}
      split.val: {{rows: 0}}
  strict:
    params: {{least: 3.0}}{ROWS}
    expect:
      cleaned: {{rows: 1, rejects: {{too_short: 2, other: 0}}}}
"
    );
    let (output, _) = test(&place, &tests, &[]);
    expect_code(&output, 0);
    assert_eq!(
        stdout(&output),
        "ok      all: 3 expectations, 4 rows, 1 reject\nok      strict: 1 expectation, 1 row, 2 rejects\n2 tests, all as expected\n"
    );
    let (output, _) = test(&place, &tests, &["--only", "strict"]);
    expect_code(&output, 0);
    assert_eq!(stdout(&output).lines().count(), 2);
    // The command line has the last word.
    let (output, _) = test(&place, &tests, &["--only", "strict", "--set", "least=0"]);
    expect_code(&output, 1);
    let (output, _) = test(&place, &tests, &["--only", "strikt"]);
    expect_code(&output, 2);
    assert!(
        stderr(&output).contains("did you mean `strict`?"),
        "{}",
        stderr(&output)
    );
    // What is wrong with a test's form is wrong for other commands, too; what it expects is not looked at.
    let check = |tests: &str| {
        let (_, line) = test(&place, tests, &[]);
        let output = program().arg("check").arg(place.path("p.yaml")).output().unwrap();
        (output, line)
    };
    expect_code(&check(&tests.replace("rows: 1,", "rows: 5,")).0, 0);
    let (output, line) = check("tests:\n  a: {expct: {}}\n");
    expect_code(&output, 2);
    let said = stderr(&output);
    assert!(
        said.contains(&format!("p.yaml:{}:7: error: unknown key `expct`", line + 1)),
        "{said}"
    );
}

#[test]
fn what_differs_is_shown_row_by_row() {
    let place = Workplace::new("micro");
    let tests = format!(
        "tests:
  wrong:{ROWS}
    expect:
      cleaned:
        rows:
          - {{segment_id: b, duration_s: 1.0}}
          - {{segment_id: d}}
        rejects: {{too_short: 2, gone: 1}}
      split.train: {{rows: 3}}
      split.val: {{rejects: {{}}}}
  right:{ROWS}
    expect: {{cleaned: {{rows: 2}}}}
"
    );
    let (output, line) = test(&place, &tests, &[]);
    expect_code(&output, 1);
    let at = |below: usize| format!("{}:{}:7", place.path("p.yaml").display(), line + below);
    let wanted = format!(
        "failed  wrong
  {}: `cleaned`: 1 of 2 rows is not as expected (rejects: too_short 1)
              partition  segment_id  duration_s
    same      hi/a       \"b\"                1.0
    expected             \"d\"                  -
    came      hi/b       \"c\"                3.0
  {}: `cleaned`: other rejects than expected
    reason     expected  came
    gone              1     0
    too_short         2     1
  {}: `split.train`: 3 rows are expected, 2 came
    came  partition  _row  segment_id  duration_s               third  lang  norm
       0  hi/a          7  \"b\"                1.0  0.3333333333333333  \"hi\"  null
       1  hi/b          0  \"c\"                3.0                 1.0  \"hi\"  \"x\"
  {}: `split.val`: no rows and no rejects came; where that is meant, expect `rows: 0`
ok      right: 1 expectation, 2 rows, 1 reject
2 tests, 1 failed
",
        at(10),
        at(10),
        at(15),
        at(16)
    );
    assert_eq!(stdout(&output), wanted);
}

/// Each mistake has its place and is said before anything runs.
#[test]
fn a_test_that_is_wrong_is_a_mistake_of_the_pipeline() {
    let place = Workplace::new("micro");
    let expect = "    expect: {cleaned: {rows: 1}}\n";
    for (test_of, place_and_message) in [
        (
            "    rows: {scam: {}}\nEXPECT",
            "+2:12: error: the pipeline has no stage `scam`",
        ),
        (
            "    rows: {scan.raws: {}}\nEXPECT",
            "+2:12: error: stage `scan` has no port `raws`",
        ),
        (
            "    rows: {scan: {hi/a: [{segmnt_id: a}]}}\nEXPECT",
            "+2:27: error: there is no column `segmnt_id`",
        ),
        (
            "    rows: {scan: {hi/a: [{duration_s: long}]}}\nEXPECT",
            "+2:39: error: column `duration_s`: expected a number, found the text \"long\"",
        ),
        (
            "    rows: {scan: {hi/a: [{segment_id: ~}]}}\nEXPECT",
            "+2:39: error: column `segment_id`: null is not allowed",
        ),
        (
            "    rows: {scan: {hi/a: [{_row: 1}, {_row: 1}]}}\nEXPECT",
            "+2:44: error: column `_row`: each row has a higher number",
        ),
        (
            "    rows: {scan: [], cleaned: {5: []}}\nEXPECT",
            "+2:18: error: the rows of `scan` by their partitions: expected a map, found a list",
        ),
        (
            "    rows: {scan: {}, scan.rows: {}}\nEXPECT",
            "+2:22: error: the rows of `scan.rows` are given twice",
        ),
        (
            "    rows: {cleaned: {}}\nEXPECT",
            "+3:14: error: `cleaned` gives rows of the test",
        ),
        (
            "    params: {leest: 1}\nEXPECT",
            "+2:14: error: unknown parameter `leest`",
        ),
        ("    params: {least: much}\nEXPECT", "+2:21: error: parameter `least`"),
        (
            "    expect: {off: {rows: 1}}\n",
            "+2:14: error: stage `off` is switched off",
        ),
        (
            "    expect: {write: {rejects: {}}}\n",
            "+2:14: error: stage `write` writes files of the user's",
        ),
        (
            "    expect: {cleaned: {rows: -1}}\n",
            "+2:30: error: `rows` is how many there are",
        ),
        (
            "    expect: {cleaned: {rows: [{third: a}]}}\n",
            "+2:39: error: column `third`: expected a number",
        ),
        (
            "    expect: {cleaned: {rejects: {x: many}}}\n",
            "+2:37: error: expected the number of rows refused as `x`",
        ),
        (
            "    expect: {cleaned: {}}\n",
            "+2:14: error: nothing is expected of `cleaned`",
        ),
        ("    expect: {a b: {rows: 1}}\n", "+2:14: error: `a b` names no stage"),
        ("    rows: {}\n", "+1:3: error: test `t` expects nothing"),
        ("    expect: {}\n", "+1:3: error: test `t` expects nothing"),
    ] {
        let test_of = test_of.replace("EXPECT", expect);
        let (output, line) = test(&place, &format!("tests:\n  t:\n{test_of}"), &[]);
        expect_code(&output, 2);
        assert_eq!(stdout(&output), "", "nothing runs");
        let said = stderr(&output);
        let (below, message) = place_and_message.strip_prefix('+').unwrap().split_once(':').unwrap();
        // Lines are counted from `tests:` on.
        let line = line + below.parse::<usize>().unwrap();
        let wanted = format!("p.yaml:{line}:{message}");
        assert!(said.contains(&wanted), "`{wanted}` is missing for\n{test_of}\n{said}");
    }
}

/// Rows of a run become a test that holds.
#[test]
fn rows_of_a_run_are_recorded() {
    let place = Workplace::bundled("micro");
    let record = |rows: &str| {
        let mut flow = program();
        flow.args(["test", "pipelines/build_manifest_v2.yaml", "--state"]);
        flow.arg(place.path("state")).args(["--record", rows]);
        flow.output().unwrap()
    };
    expect_code(&record("unique=hi/hi_0000"), 2);
    place.build_manifests(&[]);
    let output = record("unique=hi/hi_0000");
    expect_code(&output, 0);
    let recorded = stdout(&output);
    assert!(
        recorded.starts_with("tests:\n  recorded:\n    rows:\n      unique.rows:\n        hi/hi_0000:\n"),
        "{recorded}"
    );
    let rows = recorded
        .lines()
        .filter(|line| line.starts_with("          - {_row: "))
        .count();
    assert!((1..=5).contains(&rows), "{recorded}");
    // In place of the tests that are there.
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let pipeline = std::fs::read_to_string(root.join("pipelines/build_manifest_v2.yaml")).unwrap();
    let (pipeline, _) = pipeline.split_once("\ntests:\n").unwrap();
    let (recorded, _) = recorded.split_once("    expect:").unwrap();
    let expect = format!("    expect:\n      split.val: {{rows: 0}}\n      split.train: {{rows: {rows}}}\n");
    let path = place.path("recorded.yaml");
    std::fs::write(&path, format!("{pipeline}\n{recorded}{expect}")).unwrap();
    let output = program()
        .arg("test")
        .arg(&path)
        .args(["--set", "val_per_language=0"])
        .output()
        .unwrap();
    expect_code(&output, 0);

    for (wrong, said) in [
        ("unique=hi/hi_000", "did you mean `hi/hi_0000`?"),
        ("uniqe=hi/hi_0000", "did you mean `unique`?"),
        ("v1=hi/hi_0000", "stages that kept rows: "),
        ("probe.member=hi/hi_0000", "did you mean `members`?"),
        ("unique", "expected STAGE=PARTITION"),
    ] {
        let output = record(wrong);
        expect_code(&output, 2);
        assert!(stderr(&output).contains(said), "{wrong}: {}", stderr(&output));
    }
}
