use std::fs;

use arrow::array::{
    ArrayRef, AsArray, Decimal128Array, Float32Array, Float64Array, Int32Array, Int64Array, NullArray, RecordBatch,
    StringArray,
};
use arrow::datatypes::{Float64Type, Int64Type, UInt32Type};
use flow_runtime::harness::{Harness, Output};
use parquet::arrow::ArrowWriter;

use super::*;

fn harness(folder: &tempfile::TempDir, name: &str, bytes: &[u8], more: &str) -> Harness<Table> {
    let path = folder.path().join(name);
    fs::write(&path, bytes).unwrap();
    Harness::from_yaml(&format!("path: {}\n{more}", path.display())).unwrap()
}

fn run(name: &str, text: &str, more: &str) -> Result<Output, StageError> {
    let folder = tempfile::tempdir().unwrap();
    harness(&folder, name, text.as_bytes(), more).run()
}

fn names(output: &Output) -> Vec<String> {
    let rows = output.rows("rows", ALL);
    rows.schema()
        .fields()
        .iter()
        .map(|field| field.name().clone())
        .collect()
}

/// By row: its number and the values of all columns, as text.
fn shown(output: &Output) -> Vec<Vec<String>> {
    let rows = output.rows("rows", ALL);
    let options = arrow::util::display::FormatOptions::new().with_null("-");
    let columns: Vec<_> = rows
        .columns()
        .iter()
        .map(|column| arrow::util::display::ArrayFormatter::try_new(column, &options).unwrap())
        .collect();
    (0..rows.num_rows())
        .map(|row| columns.iter().map(|column| column.value(row).to_string()).collect())
        .collect()
}

fn rejects(output: &Output) -> Vec<(u32, String)> {
    let rejects = output.rejects().iter();
    rejects
        .map(|(_, reject)| (reject.row.unwrap(), format!("{}: {}", reject.reason, reject.detail)))
        .collect()
}

#[test]
fn columns_of_a_heading_are_text_unless_they_are_declared() {
    let text = "\u{feff}speaker, age ,born,new\r\na,41,1.5,true\r\n\r\n\"b, \"\"c\"\"\",,,\n";
    let output = run("a.csv", text, "").unwrap();
    assert_eq!(names(&output), ["_row", "speaker", "age", "born", "new"]);
    let expected = [["0", "a", "41", "1.5", "true"], ["1", "b, \"c\"", "", "", ""]];
    assert_eq!(shown(&output), expected);
    let declared = "columns: {speaker: text, new: bool, born: float64, age: int64}";
    let output = run("a.csv", text, declared).unwrap();
    assert_eq!(names(&output), ["_row", "age", "born", "new", "speaker"]);
    assert_eq!(
        shown(&output),
        [["0", "41", "1.5", "true", "a"], ["1", "-", "-", "-", "b, \"c\""]]
    );
    // Tabs; another name than the format's, and fewer columns than the file has.
    let output = run("a.txt", "x\ty\n\"1\"\t2\n", "format: tsv\ncolumns: {x: text}").unwrap();
    assert_eq!(shown(&output), [["0", "\"1\""]]);
}

#[test]
fn a_line_that_cannot_be_read_is_refused_and_keeps_its_number() {
    let output = run(
        "a.csv",
        "x,y\n1,a\nz,b\n2\n\"3,c\n4,d\n5,\n",
        "columns: {x: int64, y: text}",
    )
    .unwrap();
    assert_eq!(shown(&output), [["0", "1", "a"], ["4", "4", "d"], ["5", "5", ""]]);
    assert_eq!(
        rejects(&output),
        [
            (
                1,
                "bad_value: column `x`: \"z\" is not a whole number of 64 bits".to_string()
            ),
            (2, "bad_line: it has 1 fields, the heading has 2".to_string()),
            (3, "bad_line: a quote is not closed".to_string()),
        ]
    );
    let folder = tempfile::tempdir().unwrap();
    let output = harness(&folder, "a.tsv", b"x\na\nb\xff\n", "").run().unwrap();
    assert_eq!(shown(&output), [["0", "a"]]);
    assert_eq!(rejects(&output)[0].0, 1);
    assert!(rejects(&output)[0].1.starts_with("not_utf8"));
}

#[test]
fn json_lines_have_the_columns_of_the_first_or_those_declared() {
    let text = "{\"b\":1,\"a\":\"x\",\"c\":1.5,\"d\":true,\"e\":[1],\"f\":null}\n\
                {\"b\":2}\n\n{\"b\":1.5}\n[1]\n{\"b\":\"7\",\"a\":3,\"c\":2,\"d\":false,\"g\":1}\n";
    let output = run("a.jsonl", text, "").unwrap();
    assert_eq!(names(&output), ["_row", "a", "b", "c", "d", "e", "f"]);
    assert_eq!(
        shown(&output),
        [
            ["0", "x", "1", "1.5", "true", "[1]", "-"],
            ["1", "-", "2", "-", "-", "-", "-"],
            ["4", "3", "7", "2.0", "false", "-", "-"],
        ]
    );
    assert_eq!(
        rejects(&output),
        [
            (
                2,
                "bad_value: column `b`: \"1.5\" is not a whole number of 64 bits".to_string()
            ),
            (3, "bad_line: it is not a JSON object".to_string()),
        ]
    );
    let output = run("a.json", text, "columns: {b: float64, g: int64}").unwrap();
    assert_eq!(
        shown(&output),
        [
            ["0", "1.0", "-"],
            ["1", "2.0", "-"],
            ["2", "1.5", "-"],
            ["4", "7.0", "1"]
        ]
    );
}

#[test]
fn parquet_has_its_own_types() {
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("n", Arc::new(Int32Array::from(vec![Some(1), None, Some(3)]))),
        ("x", Arc::new(Float32Array::from(vec![0.5, 1.5, 2.5]))),
        ("t", Arc::new(StringArray::from(vec!["1", "2", "z"]))),
        ("d", Arc::new(Decimal128Array::from(vec![1, 2, 3]))),
    ];
    let batch =
        RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, column)| (name, column, true)));
    let batch = batch.unwrap();
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let output = harness(&folder, "a.parquet", &bytes, "").run().unwrap();
    // A decimal is none of the four types.
    assert_eq!(names(&output), ["_row", "n", "x", "t"]);
    let rows = output.rows("rows", ALL);
    assert_eq!(rows.column(0).as_primitive::<UInt32Type>().values(), &[0, 1, 2]);
    assert_eq!(rows.column(1).as_primitive::<Int64Type>().value(2), 3);
    assert!(rows.column(1).is_null(1));
    assert_eq!(rows.column(2).as_primitive::<Float64Type>().values(), &[0.5, 1.5, 2.5]);
    // A text as a number, where it is one.
    let output = harness(&folder, "a.parquet", &bytes, "columns: {t: int64}")
        .run()
        .unwrap();
    assert_eq!(shown(&output), [["0", "1"], ["1", "2"]]);
    assert_eq!(
        rejects(&output),
        [(2, "bad_value: column `t`: \"z\" is not of its type".to_string())]
    );
    let damaged = harness(&folder, "b.parquet", &bytes[..bytes.len() - 3], "").shape();
    assert!(damaged.is_err());
}

#[test]
fn a_value_of_parquet_is_kept_only_where_it_is_the_same_in_the_declared_type() {
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("f", Arc::new(Float64Array::from(vec![3.0, 3.7, f64::NAN, 1e300]))),
        ("i", Arc::new(Int64Array::from(vec![1, 7, 0, (1 << 53) + 1]))),
        ("t", Arc::new(StringArray::from(vec!["true", "yes", " ", "1"]))),
        (
            "n",
            Arc::new(StringArray::from(vec![Some(" 5 "), Some("5.5"), None, Some("x")])),
        ),
    ];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    let folder = tempfile::tempdir().unwrap();
    for (column, cell, kept) in [
        ("f", "int64", vec![("0", "3")]),
        ("i", "bool", vec![("0", "true"), ("2", "false")]),
        ("i", "float64", vec![("0", "1.0"), ("1", "7.0"), ("2", "0.0")]),
        (
            "i",
            "text",
            vec![("0", "1"), ("1", "7"), ("2", "0"), ("3", "9007199254740993")],
        ),
        // As in tables of text: white space is no value, and only two words are of type bool.
        ("t", "bool", vec![("0", "true"), ("2", "-")]),
        ("n", "int64", vec![("0", "5"), ("2", "-")]),
    ] {
        let declared = format!("columns: {{{column}: {cell}}}");
        let output = harness(&folder, "a.parquet", &bytes, &declared).run().unwrap();
        let kept: Vec<Vec<String>> = kept
            .iter()
            .map(|(row, value)| vec![row.to_string(), value.to_string()])
            .collect();
        assert_eq!(shown(&output), kept, "{declared}");
        let refused = rejects(&output);
        assert_eq!(refused.len(), 4 - kept.len(), "{declared}");
        let said = format!("bad_value: column `{column}`: ");
        assert!(
            refused.iter().all(|(_, reject)| reject.starts_with(&said)),
            "{refused:?}"
        );
    }
}

fn parquet(columns: Vec<(&str, ArrayRef)>) -> Vec<u8> {
    let columns = columns.into_iter().map(|(name, column)| (name, column, true));
    let batch = RecordBatch::try_from_iter_with_nullable(columns).unwrap();
    let mut bytes = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut bytes, batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    bytes
}

/// As pandas writes a column in which it finds no value.
#[test]
fn a_column_without_values_fits_any_type() {
    let bytes = parquet(vec![
        ("k", Arc::new(StringArray::from(vec!["a", "b"]))),
        ("n", Arc::new(NullArray::new(2))),
    ]);
    let folder = tempfile::tempdir().unwrap();
    for cell in ["text", "int64", "float64", "bool"] {
        let declared = format!("columns: {{k: text, n: {cell}}}");
        let output = harness(&folder, "a.parquet", &bytes, &declared).run().unwrap();
        assert_eq!(shown(&output), [["0", "a", "-"], ["1", "b", "-"]], "{cell}");
        assert_eq!(rejects(&output), []);
    }
    let output = harness(&folder, "a.parquet", &bytes, "").run().unwrap();
    assert_eq!(names(&output), ["_row", "k", "n"]);
}

#[test]
fn a_file_of_which_every_row_is_refused_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let column: ArrayRef = Arc::new(StringArray::from(vec!["x", "y"]));
    let table = parquet(vec![("a", column)]);
    for (name, bytes) in [
        ("a.csv", &b"a\nx\ny\n"[..]),
        ("a.jsonl", b"{\"a\": \"x\"}\n"),
        ("a.parquet", &table),
    ] {
        let error = harness(&folder, name, bytes, "columns: {a: int64}").run().unwrap_err();
        let error = error.to_string();
        let said = "none of its rows can be read; the first: column `a`: ";
        assert!(error.contains(name) && error.contains(said), "{error}");
    }
    let output = run("a.csv", "a\n", "columns: {a: int64}").unwrap();
    assert_eq!(output.rows("rows", ALL).num_rows(), 0);
}

/// The character that represents what is not UTF-8 may be in a text itself.
#[test]
fn lines_are_refused_for_their_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let lines = b"{\"a\": \"\xef\xbf\xbd\"}\r\n\n{\"a\": \"\xff\"}\n{\"a\": \"b\"}";
    let table = b"a\n\xef\xbf\xbd\n\n\"\xff\n\"\nb\n";
    for (name, bytes) in [
        ("a.jsonl", &lines[..]),
        ("a.csv", &table[..]),
        ("b.tsv", b"a\n\xef\xbf\xbd\n\xff\nb\n"),
    ] {
        let output = harness(&folder, name, bytes, "").run().unwrap();
        assert_eq!(shown(&output), [["0", "\u{fffd}"], ["2", "b"]], "{name}");
        let not_utf8 = "not_utf8: the line is not UTF-8".to_string();
        assert_eq!(rejects(&output), [(1, not_utf8)], "{name}");
    }
}

#[test]
fn files_that_are_no_tables_are_named() {
    let folder = tempfile::tempdir().unwrap();
    for (name, text, more, said) in [
        ("a.csv", "", "", "it has no heading"),
        ("a.csv", "a,b,a\n1,2,3\n", "", "two columns are called `a`"),
        ("a.csv", "\"a\n", "", "its heading: a quote is not closed"),
        ("a.csv", "_row,b\n1,2\n", "", "cannot be called `_row`"),
        ("a.jsonl", "\n[1]\n", "", "its first line is not a JSON object"),
        ("a.jsonl", "\n", "", "it has no rows"),
        ("a.xlsx", "", "", "does not say what it is"),
        ("a.csv", "a\n", "columns: {_row: int64}", "cannot be called `_row`"),
    ] {
        let error = harness(&folder, name, text.as_bytes(), more).shape().unwrap_err();
        assert!(error.to_string().contains(said), "{name} {text:?}: {error}");
        assert!(matches!(error, StageError::Setting { .. }), "{error:?}");
    }
    let missing = Harness::<Table>::from_yaml("path: /no/such.csv").unwrap();
    assert!(missing.shape().unwrap_err().to_string().contains("/no/such.csv"));
    // Declared columns need no file to be checked, and one to be read.
    let missing = Harness::<Table>::from_yaml("path: /no/such.csv\ncolumns: {a: text}").unwrap();
    missing.shape().unwrap();
    assert!(missing.run().unwrap_err().to_string().contains("/no/such.csv"));
    let lacking = harness(&folder, "a.csv", b"a,b\n1,2\n", "columns: {c: text}").run();
    let error = lacking.unwrap_err().to_string();
    assert!(error.contains("no column `c`; its columns are a, b"), "{error}");
}

#[test]
fn what_decides_the_rows_is_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.csv");
    fs::write(&path, "a,b\n1,2\n").unwrap();
    let identity = |more: &str| {
        let text = format!("path: {}\n{more}", path.display());
        Table::identity(&flow_kind::yaml::from_text(&text).unwrap())
    };
    assert_eq!(identity(""), identity("columns: {a: text, b: text}"));
    assert_ne!(identity(""), identity("columns: {a: text, b: int64}"));
    assert_ne!(identity(""), identity("format: tsv"));
}

/// The names of R's and other tables in quotes are read, also where a row below them makes quotes letters.
#[test]
fn a_heading_in_quotes_stands_above_any_rows() {
    let table = "\"path\"\t\"text\"\na.wav\t12\" vinyl\n";
    for columns in ["", "columns: {path: text, text: text}"] {
        let output = run("t.tsv", table, columns).unwrap();
        assert_eq!(names(&output), ["_row", "path", "text"]);
        assert_eq!(shown(&output), [["0", "a.wav", "12\" vinyl"]]);
    }
}

#[test]
fn files_that_are_no_text_are_said_to_be_none() {
    let folder = tempfile::tempdir().unwrap();
    for (bytes, said) in [(&b"\xff\xfea\0"[..], "UTF-16"), (&b"\x1f\x8b\x08"[..], "gzip")] {
        for name in ["t.csv", "t.tsv", "t.jsonl"] {
            for columns in ["", "columns: {a: text}"] {
                let error = harness(&folder, name, bytes, columns).run().unwrap_err().to_string();
                assert!(error.contains(said), "{name}: {error}");
            }
        }
    }
}
