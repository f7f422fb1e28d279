use std::sync::Arc;

use arrow::array::{ArrayRef, AsArray, Float64Array, RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, Field, Float64Type, Schema, SchemaRef, UInt32Type};
use flow_kind::yaml;
use flow_kind::{Kind, ROW, StageError};
use flow_runtime::harness::{Harness, Output};
use proptest::prelude::*;

use super::*;

fn schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new(ROW, DataType::UInt32, false),
        Field::new("segment_id", DataType::Utf8, true),
        Field::new("duration_s", DataType::Float64, true),
    ]))
}

fn rows(rows: &[(u32, Option<&str>, Option<f64>)]) -> RecordBatch {
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from_iter_values(rows.iter().map(|row| row.0))),
        Arc::new(rows.iter().map(|row| row.1).collect::<StringArray>()),
        Arc::new(rows.iter().map(|row| row.2).collect::<Float64Array>()),
    ];
    RecordBatch::try_new(schema(), columns).unwrap()
}

fn three() -> RecordBatch {
    rows(&[
        (0, Some("a"), Some(1.5)),
        (1, Some("b"), None),
        (4, None, Some(f64::NAN)),
    ])
}

fn stage(with: &str) -> Harness<Sql> {
    Harness::from_yaml(with)
        .unwrap_or_else(|e| panic!("{e:?}"))
        .input("scan", schema())
}

fn run(with: &str, batch: RecordBatch) -> Result<Output, StageError> {
    stage(with).feed("scan", "a/x", batch).id_column("segment_id").run()
}

fn numbers(output: &Output, partition: &str) -> Vec<u32> {
    output
        .rows("rows", partition)
        .column_by_name(ROW)
        .unwrap()
        .as_primitive::<UInt32Type>()
        .values()
        .to_vec()
}

#[track_caller]
fn setting_error(with: &str) -> (String, Option<(usize, usize)>, String) {
    match stage(with).shape() {
        Err(StageError::Setting {
            path,
            offset,
            message,
            help,
        }) => (path, offset, format!("{message} / {}", help.unwrap_or_default())),
        other => panic!("{other:?}"),
    }
}

#[test]
fn mistakes_are_found_before_a_run_and_say_where() {
    let mut wrong = Vec::new();
    for (with, path, offset, said) in [
        (
            "query: SELECT _row FROM scan WHERE duration_s > 1",
            "query",
            Some((1, 23)),
            "WHERE makes rows vanish",
        ),
        (
            "query: SELECT DISTINCT _row FROM scan",
            "query",
            Some((1, 8)),
            "DISTINCT",
        ),
        (
            "query: SELECT _row FROM scan GROUP BY _row",
            "query",
            Some((1, 23)),
            "GROUP BY",
        ),
        ("query: SELECT _row FROM scan LIMIT 2", "query", Some((1, 23)), "LIMIT"),
        (
            "query: WITH a AS (SELECT * FROM scan WHERE true) SELECT * FROM a",
            "query",
            Some((1, 31)),
            "WHERE",
        ),
        (
            "query: SELECT * FROM (SELECT * FROM scan OFFSET 1)",
            "query",
            Some((1, 35)),
            "OFFSET",
        ),
        (
            "query: SELECT duration_s FROM scan",
            "query",
            None,
            "does not carry `_row`",
        ),
        (
            "query: SELECT CAST(_row AS BIGINT) AS _row FROM scan",
            "query",
            None,
            "has to stay as it is",
        ),
        (
            "query: |\n  SELECT _row,\n    duraton_s\n  FROM scan",
            "query",
            Some((2, 3)),
            "did you mean `duration_s`",
        ),
        (
            "query: SELECT _row, scan.lang FROM scan",
            "query",
            Some((1, 14)),
            "`scan` has no column `lang`",
        ),
        (
            "query: SELECT _row FROM scam",
            "query",
            Some((1, 18)),
            "did you mean `scan`",
        ),
        (
            "query: SELECT _row, claen_text(segment_id) FROM scan",
            "query",
            None,
            "clean_text",
        ),
        ("query: SELECT _row FORM scan x", "query", Some((1, 18)), "expected"),
        (
            "query: SELECT _row, now() FROM scan",
            "query",
            Some((1, 14)),
            "another result in every run",
        ),
        (
            "query: SELECT _row, random() FROM scan",
            "query",
            Some((1, 14)),
            "another result in every run",
        ),
        (
            "query: CREATE TABLE t (a int)",
            "query",
            Some((1, 1)),
            "only one SELECT",
        ),
        (
            "query: COPY scan TO 'x.parquet'",
            "query",
            Some((1, 1)),
            "only one SELECT",
        ),
        (
            "query: SELECT _row FROM scan; SELECT _row FROM scan",
            "query",
            Some((1, 1)),
            "only one SELECT",
        ),
        (
            "query: SELECT _row, $p_q AS q FROM scan\nparams: {p_w: 1}",
            "query",
            Some((1, 14)),
            "did you mean `$p_w`",
        ),
        (
            "query: SELECT _row FROM scan\nrejects: [{reason: short, when: durtion_s < 1}]",
            "rejects[0].when",
            Some((1, 1)),
            "did you mean `duration_s`",
        ),
        (
            "query: SELECT _row FROM scan\nrejects: [{reason: a, when: 'true'}, {reason: short, when: duration_s + 1}]",
            "rejects[1].when",
            None,
            "true or false",
        ),
        (
            "query: SELECT _row FROM scan\nrejects: [{reason: short, when: duration_s < }]",
            "rejects[0].when",
            Some((1, 13)),
            "expected",
        ),
        (
            "query: SELECT _row FROM scan\nrejects: [{reason: short, when: 'duration_s < 1 WHERE true'}]",
            "rejects[0].when",
            None,
            "expression",
        ),
        (
            "query: SELECT _row FROM scan\nrejects: [{reason: Too Short, when: duration_s < 1}]",
            "rejects[0].reason",
            None,
            "snake case",
        ),
        (
            "query: SELECT _row FROM scan\nrejects: [{reason: short, when: duration_s < 1, detail: nothing}]",
            "rejects[0].detail",
            Some((1, 1)),
            "no column `nothing`",
        ),
        (
            "query: SELECT _row FROM scan\nlanguages: /nowhere/table.yaml",
            "languages",
            None,
            "/nowhere/table.yaml",
        ),
        (
            "query: SELECT _row FROM scan\ntext: {tags: '['}",
            "text.tags",
            None,
            "pattern",
        ),
    ] {
        let (at, place, message) = setting_error(with);
        let says = message.to_lowercase().contains(&said.to_lowercase());
        if at != path || !says || (offset.is_some() && place != offset) {
            wrong.push(format!(
                "{with}\n  expected {path} {offset:?} {said}\n  found {at} {place:?} {message}"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_syntax_error_has_its_place() {
    let (_, place, message) = setting_error("query: |\n  SELECT _row\n  FROM scan JOIN");
    assert_eq!(place, Some((2, 15)), "{message}: the end of the text");
    assert!(!message.contains("Line:"), "{message}");
}

/// Rules have the functions that queries have, also those that are rewritten into others.
#[test]
fn rules_have_the_functions_of_queries() {
    for when in [
        "coalesce(nullif(duration_s, 1.5), -1.0) < 0",
        "nvl(nullif(duration_s, 1.5), -1.0) < 0",
        "nullif(duration_s, 1.5) IS NULL",
        "CASE WHEN duration_s = 1.5 THEN true END",
    ] {
        let with = format!("query: SELECT _row FROM input\nrejects: [{{reason: absent, when: \"{when}\"}}]");
        let found = run(&with, three()).unwrap();
        let kept = run(
            &format!("rows: new\nquery: SELECT _row FROM input WHERE ({when}) IS NOT TRUE"),
            three(),
        )
        .unwrap();
        assert_eq!(numbers(&found, "a/x"), numbers(&kept, "a/x"), "{when}");
        assert_eq!(found.rejects().len(), 3 - numbers(&kept, "a/x").len(), "{when}");
    }
}

#[test]
fn rules_are_tried_in_order_and_null_is_not_true() {
    let with = "
query: SELECT _row, duration_s * 2 AS double FROM input
rejects:
  - {reason: not_a_number, when: isnan(duration_s), class: fault, detail: \"'row ' || _row\"}
  - {reason: long, when: duration_s > 1}
  - {reason: longer, when: duration_s > 0}
";
    let output = run(with, three()).unwrap();
    assert_eq!(numbers(&output, "a/x"), [1]);
    let rejects: Vec<_> = output
        .rejects()
        .iter()
        .map(|(_, r)| (r.row, r.reason.as_str(), r.class.as_str(), r.detail.as_str()))
        .collect();
    assert_eq!(
        rejects,
        [
            (Some(0), "long", "rule", ""),
            (Some(4), "not_a_number", "fault", "row 4")
        ]
    );
    assert_eq!(output.rejects()[0].1.id.as_deref(), Some("a"));
    assert!(
        output.rejects()[0].1.values.contains("\"duration_s\":1.5"),
        "{}",
        output.rejects()[0].1.values
    );
}

#[test]
fn params_are_values_never_text() {
    let with = "
query: \"SELECT _row, $p_text AS t, duration_s - $p_low AS d, $p_flag AS f, -$p_low AS n, $p_inf AS i, $p_null AS z FROM scan\"
params: {p_text: \"x' OR '1'='1\", p_low: -2, p_flag: true, p_inf: .inf, p_null: null}
";
    let output = run(with, rows(&[(0, Some("a"), Some(1.5))])).unwrap();
    let batch = output.rows("rows", "a/x");
    assert_eq!(batch.column(1).as_string::<i32>().value(0), "x' OR '1'='1");
    assert_eq!(batch.column(2).as_primitive::<Float64Type>().value(0), 3.5);
    assert!(batch.column(3).as_boolean().value(0));
    assert_eq!(
        batch.column(4).as_primitive::<arrow::datatypes::Int64Type>().value(0),
        2
    );
    assert_eq!(batch.column(5).as_primitive::<Float64Type>().value(0), f64::INFINITY);
    assert!(batch.column(6).is_null(0));
}

fn other_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new(ROW, DataType::UInt32, false),
        Field::new("name", DataType::Utf8, true),
    ]))
}

fn others(names: &[&str]) -> RecordBatch {
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from_iter_values(0..names.len() as u32)),
        Arc::new(StringArray::from_iter_values(names)),
    ];
    RecordBatch::try_new(other_schema(), columns).unwrap()
}

#[test]
fn a_join_is_planned_once_and_sees_each_partition_alone() {
    let join = "SELECT scan.*, o.name FROM scan LEFT JOIN other o ON o.name = scan.segment_id";
    let with =
        format!("join: {join}\nquery: SELECT _row, name FROM input\nrejects: [{{reason: alone, when: name IS NULL}}]");
    let output = stage(&with)
        .input("other", other_schema())
        .feed("scan", "a/x", three())
        .feed("other", "a/x", others(&["b"]))
        .feed("scan", "a/y", three())
        .feed("other", "a/y", others(&["a", "c"]))
        .feed("scan", "a/z", three())
        .feed("other", "b/only", others(&["a"]))
        .run()
        .unwrap();
    assert_eq!(numbers(&output, "a/x"), [1]);
    assert_eq!(numbers(&output, "a/y"), [0]);
    assert_eq!(numbers(&output, "a/z"), [0u32; 0]);
    assert_eq!(output.rejects().len(), 2 + 2 + 3);
}

#[test]
fn a_join_that_loses_or_doubles_rows_fails_and_names_them() {
    for (join, others_given, said) in [
        (
            "SELECT scan.* FROM scan JOIN other o ON o.name = scan.segment_id",
            &["a"][..],
            "loses 2 rows (`_row` 1, 4)",
        ),
        (
            "SELECT scan.* FROM scan LEFT JOIN other o ON o.name = scan.segment_id",
            &["a", "a"],
            "doubles or makes up 1 rows (`_row` 0)",
        ),
    ] {
        for (with, setting) in [
            (format!("join: {join}\nquery: SELECT * FROM input"), "`join`"),
            (format!("query: {join}"), "`query`"),
        ] {
            let run = stage(&with)
                .input("other", other_schema())
                .feed("scan", "a/x", three())
                .feed("other", "a/x", others(others_given))
                .run();
            let error = run.unwrap_err().to_string();
            assert!(error.contains(said) && error.contains(setting), "{error}");
        }
    }
}

#[test]
fn new_rows_are_numbered_and_may_be_filtered() {
    let with = "rows: new\nquery: SELECT segment_id, count(*) AS n FROM scan WHERE segment_id IS NOT NULL GROUP BY segment_id ORDER BY segment_id DESC";
    let output = run(with, three()).unwrap();
    let batch = output.rows("rows", "a/x");
    assert_eq!(numbers(&output, "a/x"), [0, 1]);
    assert_eq!(
        batch.column_by_name("segment_id").unwrap().as_string::<i32>().value(0),
        "b"
    );
    let counted = stage("rows: new\nquery: SELECT count(*) AS n FROM scan")
        .empty_partition("scan", "a/x")
        .run()
        .unwrap();
    assert_eq!(numbers(&counted, "a/x"), [0]);
}

#[test]
fn new_rows_that_share_a_number_fail_and_name_it() {
    let run = |query: &str| {
        stage(&format!("rows: new\nquery: {query}"))
            .input("other", other_schema())
            .feed("scan", "a/x", three())
            .feed("other", "a/x", others(&["a", "b", "b"]))
            .run()
    };
    let join = "FROM scan LEFT JOIN other o ON o.name = scan.segment_id";
    let error = run(&format!("SELECT scan.* {join}")).unwrap_err();
    assert!(
        error.to_string().contains("two rows have the number 1 in `_row`"),
        "{error}"
    );
    let help = matches!(&error, StageError::Failed { help: Some(help), .. } if help.contains("select no `_row`"));
    assert!(help, "{error:?}");
    // What the help says.
    let anew = run(&format!("SELECT scan.segment_id {join}")).unwrap();
    assert_eq!(numbers(&anew, "a/x"), [0, 1, 2, 3]);
    let once = run(&format!("SELECT DISTINCT scan.* {join}")).unwrap();
    assert_eq!(numbers(&once, "a/x"), [0, 1, 4]);
}

#[test]
fn rows_come_back_in_their_order() {
    let output = run(
        "query: SELECT * FROM scan ORDER BY duration_s DESC NULLS FIRST",
        three(),
    )
    .unwrap();
    assert_eq!(numbers(&output, "a/x"), [0, 1, 4]);
    let none = stage("query: SELECT * FROM scan")
        .empty_partition("scan", "a/x")
        .run()
        .unwrap();
    assert_eq!(numbers(&none, "a/x"), [0u32; 0]);
}

#[test]
fn a_value_that_cannot_be_computed_fails_the_stage() {
    let error = run("query: SELECT _row, CAST(segment_id AS INT) AS n FROM scan", three()).unwrap_err();
    assert!(matches!(error, StageError::Failed { .. }), "{error:?}");
}

#[test]
fn inputs_that_do_not_fit_are_named() {
    let without_row = Arc::new(Schema::new(vec![Field::new("a", DataType::Int32, true)]));
    let harness: Harness<Sql> = Harness::from_yaml("query: SELECT a FROM scan").unwrap();
    let error = harness.input("scan", without_row).shape().unwrap_err();
    assert!(
        matches!(&error, StageError::Input { name, .. } if name == "scan"),
        "{error:?}"
    );
    let twice = stage("query: SELECT * FROM scan")
        .input("scan", schema())
        .shape()
        .unwrap_err();
    assert!(matches!(&twice, StageError::Input { .. }), "{twice:?}");
    let none: Harness<Sql> = Harness::from_yaml("query: SELECT a FROM scan").unwrap();
    assert!(none.shape().is_err());
}

#[test]
fn layout_is_no_change_and_everything_else_is() {
    let identity = |with: &str| Sql::identity(&yaml::from_text(with).unwrap());
    let base = identity("query: SELECT _row, clean_text(a) AS b FROM scan");
    assert_eq!(
        base,
        identity("query: |\n  select  _row, -- the row\n    clean_text( a ) as b\n  from scan")
    );
    assert_ne!(base, identity("query: SELECT _row, clean_text(a) AS c FROM scan"));
    assert_ne!(
        base,
        identity("query: SELECT _row, clean_text(a) AS b FROM scan\ntext: {punctuation: '.'}")
    );
    let rule = |class: &str| {
        identity(&format!(
            "query: SELECT _row FROM scan\nrejects: [{{reason: a, when: b>1, class: {class}}}]"
        ))
    };
    assert_eq!(
        rule("rule"),
        identity("query: SELECT _row FROM scan\nrejects: [{reason: a, when: 'b  >  1'}]")
    );
    assert_ne!(rule("rule"), rule("fault"));
    let param = |value: &str| {
        identity(&format!(
            "query: SELECT _row, $p AS p FROM scan\nparams: {{p: {value}}}"
        ))
    };
    assert_ne!(param("0.5"), param("0.6"));
    assert_ne!(param(".inf"), param("null"));
    let table = |with: &str| {
        identity(&format!(
            "query: SELECT _row, correct_language(a, b, c) AS l FROM scan\n{with}"
        ))
    };
    let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/languages.yaml");
    assert_eq!(
        table(""),
        table(&format!("languages: {shipped}")),
        "the contents count, not the path"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// No text whatever makes planning panic.
    #[test]
    fn hostile_sql_is_an_error(text in "(SELECT|_row|FROM|scan|\\(|\\)|,|\\*|'|\"|\\$x|::|--|/\\*|[ -~]){0,12}") {
        let settings: <Sql as Kind>::Settings = serde_json::from_value(serde_json::json!({"query": text, "rejects": [{"reason": "a", "when": text}]})).unwrap();
        let _ = Sql::identity(&settings);
        let _ = Harness::<Sql>::new(settings).input("scan", schema()).shape();
    }
}

#[test]
fn rows_of_a_partition_that_only_another_input_has_do_not_vanish() {
    let with = |rows: &str| format!("query: SELECT * FROM scan UNION ALL SELECT * FROM known\nrows: {rows}");
    let run = |rows: &str| {
        let harness = stage(&with(rows)).input("known", schema());
        harness
            .feed("scan", "a/x", three())
            .empty_partition("known", "a/x")
            .feed("known", "b/y", three())
            .empty_partition("scan", "b/y")
            .run()
    };
    assert_eq!(numbers(&run("new").unwrap(), "b/y"), [0, 1, 4]);
    let error = run("keep").unwrap_err().to_string();
    assert!(error.contains("row"), "{error}");
}

/// The table whose digest is in the key is the one that is used, though another is there when the stage opens.
#[test]
fn a_language_table_that_is_swapped_after_the_plan_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("table.yaml");
    let table = |lang: &str| {
        let table =
            format!("aliases: {{}}\nscripts: [{{name: Latin, ranges: [\"0041-007A\"], languages: [{lang}]}}]\n");
        std::fs::write(&path, table).unwrap();
    };
    let with = format!(
        "query: SELECT _row, correct_language(segment_id, 'xx', 'xx') AS lang FROM scan\nlanguages: {}",
        path.display()
    );
    table("one");
    let value: <Sql as Kind>::Settings = flow_kind::yaml::from_text(&with).unwrap();
    let planned = Sql::identity(&value);
    table("two");
    let output = Harness::<Sql>::new(value.clone())
        .input("scan", schema())
        .feed("scan", "a/x", rows(&[(0, Some("abc"), None)]))
        .run()
        .unwrap();
    let batch = output.rows("rows", "a/x");
    let lang = batch.column_by_name("lang").unwrap().as_string::<i32>();
    assert_eq!((lang.value(0), Sql::identity(&value)), ("one", planned.clone()));
    // Another run sees the new one.
    let next: <Sql as Kind>::Settings = flow_kind::yaml::from_text(&with).unwrap();
    assert_ne!(Sql::identity(&next), planned);
}

fn speakers() -> (SchemaRef, RecordBatch) {
    let schema = Arc::new(Schema::new(vec![
        Field::new(ROW, DataType::UInt32, false),
        Field::new("id", DataType::Utf8, true),
        Field::new("age", DataType::Float64, true),
    ]));
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from(vec![0, 1])),
        Arc::new(StringArray::from(vec!["b", "a"])),
        Arc::new(Float64Array::from(vec![40.0, 30.0])),
    ];
    (Arc::clone(&schema), RecordBatch::try_new(schema, columns).unwrap())
}

fn with_speakers(with: &str) -> Harness<Sql> {
    let (schema, batch) = speakers();
    stage(with).input("speakers", schema).feed("speakers", "all", batch)
}

#[test]
fn an_input_that_is_read_whole_is_joined_with_every_partition() {
    for with in [
        "whole: [speakers]\nquery: SELECT scan.*, speakers.age FROM scan LEFT JOIN speakers ON segment_id = id",
        "whole: [speakers]\nquery: SELECT * FROM input LEFT JOIN speakers ON segment_id = id",
        "whole: [speakers]\njoin: SELECT * FROM scan LEFT JOIN speakers ON segment_id = id\nquery: SELECT * FROM input",
    ] {
        let output = with_speakers(with)
            .feed("scan", "p", three())
            .feed("scan", "q", rows(&[(7, Some("b"), None)]))
            .empty_partition("scan", "r")
            .run()
            .unwrap();
        assert_eq!(output.partitions.len(), 3, "{with}");
        let ages = |partition: &str| -> Vec<Option<f64>> {
            let rows = output.rows("rows", partition);
            let ages = rows.column_by_name("age").unwrap().as_primitive::<Float64Type>();
            ages.iter().collect()
        };
        assert_eq!(numbers(&output, "p"), [0, 1, 4]);
        assert_eq!(ages("p"), [Some(30.0), Some(40.0), None]);
        assert_eq!(ages("q"), [Some(40.0)]);
    }
}

#[test]
fn a_lookup_that_doubles_or_loses_rows_is_refused() {
    let (_, twice) = speakers();
    let with = "whole: [speakers]\nquery: SELECT scan.* FROM scan LEFT JOIN speakers ON segment_id = id";
    let doubled = with_speakers(with).feed("speakers", "more", twice);
    let error = doubled.feed("scan", "p", three()).run().unwrap_err();
    assert!(error.to_string().contains("doubles or makes up 2 rows"), "{error}");
    let inner = "whole: [speakers]\nquery: SELECT scan.* FROM scan JOIN speakers ON segment_id = id";
    let error = with_speakers(inner).feed("scan", "p", three()).run().unwrap_err();
    assert!(error.to_string().contains("loses 1 rows"), "{error}");
}

#[test]
fn inputs_to_be_read_whole_have_to_be_given_after_the_first() {
    for (whole, said) in [("scan", "is the first input"), ("speaker", "gives no input `speaker`")] {
        let error = with_speakers(&format!("whole: [{whole}]\nquery: SELECT * FROM scan"))
            .shape()
            .unwrap_err();
        assert!(
            matches!(&error, StageError::Setting { path, .. } if path == "whole"),
            "{error:?}"
        );
        assert!(error.to_string().contains(said), "{error}");
    }
}

#[test]
fn sql_that_does_not_end_is_cut_off_by_its_timeout() {
    // Neither gives the engine a reason to yield for a long time.
    let joins = ", scan AS b, scan AS c, scan AS d, scan AS e, scan AS f, scan AS g, scan AS h, scan AS i";
    let many: Vec<(u32, Option<&str>, Option<f64>)> = (0..1000).map(|row| (row, Some("a"), Some(1.0))).collect();
    for query in [
        format!("SELECT count(*) AS n FROM scan AS a{joins} WHERE a.duration_s + b.duration_s * i.duration_s < 0"),
        "WITH RECURSIVE t AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM t) SELECT count(n) AS n FROM t".to_owned(),
    ] {
        let began = std::time::Instant::now();
        let error = run(&format!("rows: new\ntimeout: 0.2\nquery: {query}"), rows(&many)).unwrap_err();
        assert!(error.to_string().contains("longer than `timeout`, 0.2 s"), "{error}");
        assert!(began.elapsed().as_secs() < 5, "{query}");
    }
    let output = run("timeout: 100\nquery: SELECT * FROM scan", three()).unwrap();
    assert_eq!(numbers(&output, "a/x"), [0, 1, 4]);
    for wrong in ["0", "-1", ".nan", "1e10"] {
        let (path, _, said) = setting_error(&format!("timeout: {wrong}\nquery: SELECT * FROM scan"));
        assert!(path == "timeout" && said.contains("a number of seconds"), "{said}");
    }
}
