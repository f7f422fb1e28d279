//! Tests that a pipeline holds, on toy stages.

use std::path::PathBuf;

use flow_kind::registry::Registry;
use flow_runtime::pipeline_test::{TestOutcome, prepare};
use flow_spec::{Diagnostics, Overrides, Style, load, load_tests};
use flow_storage::Storage;
use proptest::prelude::*;
use tempfile::TempDir;

mod toys;

/// Neither folder is there.
const PIPELINE: &str = r#"flow: 1
params: {least: 3}
stages:
  scan: {uses: toy.count, with: {folder: /no/such/folder}}
  clean: {uses: toy.double, from: scan, with: {least: "${least}"}, max_rejects: 0}
  dedup: {uses: toy.dedup, from: clean}
  again: {uses: toy.dedup, from: dedup, with: {modulo: 4}}
  odd: {uses: toy.double, from: clean.odd}
  out: {uses: toy.write, from: [dedup, odd], with: {folder: /no/such/out}}
"#;

const TESTS: &str = r#"tests:
  all:
    params: {least: 4}
    rows:
      scan:
        b: [{value: 4}, {value: 6}]
        a: [{value: 3}, {value: 4}, {value: 5, _row: 9}]
    expect:
      clean: {rows: [{_row: 1, value: 8}, {_row: 0, value: 8}, {_row: 1, value: 12}], rejects: {too_small: 1}}
      clean.odd: {rows: [{_row: 9, value: 10}]}
      dedup: {rows: [{value: 8}, {value: 12}], rejects: {duplicate: 1}}
      again: {rows: 1, rejects: {duplicate: 1}}
"#;

struct Place(TempDir);

impl Place {
    fn new(tests: &str) -> Place {
        let place = Place(tempfile::tempdir().unwrap());
        std::fs::write(place.file(), format!("{PIPELINE}{tests}")).unwrap();
        place
    }

    fn file(&self) -> PathBuf {
        self.0.path().join("p.yaml")
    }

    /// Runs all tests, each in a new state directory.
    fn run(&self, set: &[&str]) -> Result<Vec<TestOutcome>, Diagnostics> {
        let registry = Registry::new(toys::kinds()).unwrap();
        let overrides = Overrides {
            set: set.iter().map(|set| set.to_string()).collect(),
            ..Overrides::default()
        };
        let tests = load_tests(&self.file(), &registry)?;
        let ready: Result<Vec<_>, _> = tests
            .iter()
            .map(|test| prepare(&self.file(), &overrides, &registry, test))
            .collect();
        let run = ready?.into_iter().map(|test| {
            let state = tempfile::tempdir().unwrap();
            test.run(&Storage::default(), &state.path().join("state"), false)
                .unwrap_or_else(|error| panic!("{}: {error}", test.name))
        });
        Ok(run.collect())
    }
}

#[test]
fn stages_run_on_the_rows_of_the_test() {
    let outcomes = Place::new(TESTS).run(&[]).unwrap();
    let wanted = TestOutcome {
        expectations: 4,
        rows: 7,
        rejects: 3,
        failures: Vec::new(),
    };
    assert_eq!(outcomes, [wanted]);
}

#[test]
fn what_is_not_as_expected_is_told_with_its_place() {
    let outcomes = Place::new(TESTS).run(&["least=5"]).unwrap();
    let first_line = PIPELINE.lines().count();
    let told = outcomes[0].failures.iter();
    let told: Vec<_> = told
        .map(|failure| {
            (
                failure.place.line - first_line,
                failure.place.column,
                failure.message.as_str(),
            )
        })
        .collect();
    assert_eq!(
        told,
        [
            (9, 7, "`clean`: 3 rows are expected, 1 came (rejects: too_small 3)"),
            (9, 7, "`clean`: other rejects than expected"),
            (11, 7, "`dedup`: 2 rows are expected, 1 came"),
            (11, 7, "`dedup`: other rejects than expected"),
            (12, 7, "`again`: other rejects than expected"),
        ]
    );
    let table = outcomes[0].failures[0].table.iter().map(|row| row.join("|"));
    assert_eq!(
        table.collect::<Vec<_>>(),
        [
            "|partition|_row|value",
            "expected||1|8",
            "came|b|1|12",
            "expected||0|8",
            "expected||1|12"
        ]
    );
}

#[test]
fn tests_are_no_part_of_what_runs() {
    let registry = Registry::new(toys::kinds()).unwrap();
    let frozen = |tests| {
        let place = Place::new(tests);
        let pipeline = load(&place.file(), &Overrides::default(), &registry).unwrap();
        pipeline.frozen().replace(&place.file().display().to_string(), "")
    };
    assert_eq!(frozen(TESTS), frozen(""));
}

proptest! {
    /// Whatever becomes of the text of tests, they are made ready or there are mistakes, each with a place in the text.
    #[test]
    fn damaged_tests_never_panic(cuts in prop::collection::vec((0usize..600, 0usize..40, "[ -~\n]{0,4}"), 1..4)) {
        let mut text = TESTS.to_string();
        for (at, length, new) in cuts {
            let at = at.min(text.len());
            text.replace_range(at..(at + length).min(text.len()), &new);
        }
        let place = Place::new(&text);
        let registry = Registry::new(toys::kinds()).unwrap();
        let found = match load_tests(&place.file(), &registry) {
            Err(Diagnostics(found)) => found,
            Ok(tests) => {
                let ready = tests.iter().map(|test| prepare(&place.file(), &Overrides::default(), &registry, test));
                ready.filter_map(Result::err).flat_map(|Diagnostics(found)| found).collect()
            }
        };
        for diagnostic in found {
            diagnostic.render(Style::Unicode);
            if let Some(place) = diagnostic.place {
                prop_assert!(place.source.text.get(place.offset..place.offset + place.length).is_some());
            }
        }
    }
}
