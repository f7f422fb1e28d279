//! The harness runs toy kinds of every role as a run would.

mod toys;

use flow_kind::{Partition, Reject, RejectClass};
use flow_runtime::harness::Harness;
use toys::{Count, Dedup, Double, Join, Steps, Train, Write_, rows, rows_schema};

#[test]
fn a_source() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a.txt"), "5\nx\n7\n9\n11").unwrap();
    std::fs::write(dir.path().join("b.txt"), "broken").unwrap();
    let output = Harness::<Count>::from_yaml(&format!("folder: {}", dir.path().display()))
        .unwrap()
        .run()
        .unwrap();
    assert_eq!(output.partitions, [Partition::new("a"), Partition::new("b")]);
    assert_eq!(output.rows("rows", "a"), rows(&[0, 2, 3, 4], &[5, 7, 9, 11]));
    assert_eq!(output.reasons("a"), [(Some(1), "not_a_number")]);
    assert_eq!(output.reasons("b"), [(None, "unreadable")]);
}

#[test]
fn a_local_stage_in_line_and_aside() {
    for with in ["{by: 3, least: 2}", "{by: 3, least: 2, aside: true}"] {
        let output = Harness::<Double>::from_yaml(with)
            .unwrap()
            .input("scan", rows_schema())
            .feed("scan", "b", rows(&[4, 1], &[8, 1]))
            .feed("scan", "a", rows(&[0], &[3]))
            .feed("scan", "b", rows(&[2], &[2]))
            .empty_partition("scan", "c")
            .run()
            .unwrap();
        assert_eq!(output.rows("rows", "b"), rows(&[2, 4], &[6, 24]));
        assert_eq!(output.all_rows("odd"), rows(&[0], &[9]));
        assert_eq!(output.reasons("b"), [(Some(1), "too_small")]);
        assert_eq!(output.partitions.len(), 3);
    }
}

#[test]
fn conservation_is_checked() {
    let error = Harness::<Double>::from_yaml("lose: 8")
        .unwrap()
        .input("scan", rows_schema())
        .feed("scan", "b", rows(&[4, 5], &[8, 1]))
        .run()
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("2 in, but 1 out + 0 rejected + 0 merged = 1"),
        "{error}"
    );
}

#[test]
fn a_wrong_setting_is_named() {
    let Err(error) = Harness::<Double>::from_yaml("{by: three}") else {
        panic!("accepted")
    };
    assert!(
        matches!(&error, flow_kind::StageError::Setting { path, .. } if path == "by"),
        "{error:?}"
    );
}

#[test]
fn two_inputs_a_global_stage_a_log_and_an_export() {
    let join = Harness::<Join>::from_yaml("")
        .unwrap()
        .input("left", rows_schema())
        .input("right", rows_schema())
        .feed("right", "a", rows(&[1], &[100]))
        .feed("left", "a", rows(&[0, 1], &[5, 6]))
        .run()
        .unwrap();
    assert_eq!(join.rows("rows", "a"), rows(&[0, 1], &[5, 106]));

    let dedup = Harness::<Dedup>::from_yaml("")
        .unwrap()
        .input("rows", rows_schema())
        .feed("rows", "b", rows(&[0, 1], &[5, 6]))
        .feed("rows", "a", rows(&[7, 3], &[6, 9]))
        .run()
        .unwrap();
    assert_eq!(dedup.rows("rows", "b"), rows(&[0], &[5]));
    assert_eq!(dedup.rows("rows", "a"), rows(&[3, 7], &[9, 6]));
    assert_eq!(dedup.rejects()[0].1.detail, "a/7");

    let dir = tempfile::tempdir().unwrap();
    let steps = Harness::<Steps>::from_yaml("steps: 3")
        .unwrap()
        .input("rows", rows_schema())
        .feed("rows", "a", rows(&[0, 1], &[5, 6]))
        .run()
        .unwrap();
    let mut train = Harness::<Train>::from_yaml(&format!("{{log: {}, steps: 3}}", dir.path().join("log").display()))
        .unwrap()
        .input("steps", rows_schema());
    for step in &steps.partitions {
        train = train.feed("steps", step.as_str(), steps.rows("rows", step.as_str()));
    }
    assert_eq!(train.run().unwrap().result.unwrap(), rows(&[0, 1], &[3, 3 + 6]));

    let reject = Reject {
        row: Some(1),
        id: None,
        reason: "r".into(),
        class: RejectClass::Rule,
        detail: "d".into(),
        values: String::new(),
    };
    Harness::<Write_>::from_yaml(&format!("folder: {}", dir.path().join("out").display()))
        .unwrap()
        .input("rows", rows_schema())
        .feed("rows", "a", rows(&[0], &[5]))
        .rejected("scan", "a", reject)
        .run()
        .unwrap();
    assert_eq!(
        std::fs::read_to_string(dir.path().join("out/rows.txt")).unwrap(),
        "a 0 5\n"
    );
    assert_eq!(
        std::fs::read_to_string(dir.path().join("out/rejects.txt")).unwrap(),
        "scan a Some(1) r d\n"
    );
}
