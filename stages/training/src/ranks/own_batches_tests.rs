use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arrow::array::{ArrayRef, Float32Builder, Float64Array, Int32Array, ListBuilder, StringArray};
use crossbeam_channel::unbounded;

use super::super::loaded_step::LoadedElsewhere;
use super::*;
use crate::loaded_rows::micro_batches;
use crate::long_texts::{OverLimit, TextLimit};

const ROWS: RowRules = RowRules {
    limit: TextLimit {
        max_tokens: 100,
        rule: OverLimit::Reject,
    },
    concatenate: None,
};

/// Rank and number of the micro-batch, segment (none: the row of an empty micro-batch), seconds, signal.
type Row = (i32, i32, &'static str, f64, &'static [f32]);

fn rows(rows: &[Row]) -> RecordBatch {
    let mut signals = ListBuilder::new(Float32Builder::new());
    for (.., signal) in rows {
        signals.values().append_slice(signal);
        signals.append(true);
    }
    let numbers = |of: fn(&Row) -> i32| -> ArrayRef { Arc::new(Int32Array::from_iter_values(rows.iter().map(of))) };
    let segments: ArrayRef = Arc::new(StringArray::from_iter_values(rows.iter().map(|row| row.2)));
    RecordBatch::try_from_iter([
        ("rank", numbers(|row| row.0)),
        ("micro", numbers(|row| row.1)),
        ("epoch", numbers(|_| 0)),
        ("segment_id", Arc::clone(&segments)),
        ("text", segments),
        (
            "duration",
            Arc::new(Float64Array::from_iter_values(rows.iter().map(|row| row.3))),
        ),
        ("signal", Arc::new(signals.finish())),
    ])
    .unwrap()
}

fn tokenizer() -> Tokenizer {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/tokenizers/mini.model");
    Tokenizer::load(&file).unwrap()
}

/// Of process 1 of two, with one rank each.
fn rules() -> BatchRules {
    BatchRules {
        tokenizer: tokenizer(),
        rows: ROWS,
        prompts: None,
        layout: RankLayout::new(2, 2).unwrap(),
        ranks: 2,
        process: 1,
    }
}

fn arrived(step: u64, batch: RecordBatch, taken: &Arc<Mutex<Vec<u64>>>) -> ArrivedStep {
    let taken = Arc::clone(taken);
    ArrivedStep {
        step,
        batches: vec![batch],
        taken: Box::new(move || taken.lock().unwrap().push(step)),
    }
}

const A: Row = (0, 0, "a", 0.1, &[0.5, 0.25]);
const B: Row = (0, 0, "b", 0.2, &[0.5]);
const C: Row = (1, 0, "c", 0.4, &[]);
const D: Row = (2, 0, "d", 0.8, &[1.0, 2.0, 3.0]);
const E: Row = (2, 0, "e", 1.6, &[]);

/// The row that represents the micro-batch of another process.
fn elsewhere(rank: i32, seconds: f64) -> Row {
    (rank, 0, "", seconds, &[0.0])
}

fn of_two(told: Receiver<super::super::ShareOutcome>) -> LoadedElsewhere {
    LoadedElsewhere::new(told, Duration::from_secs(1), RankLayout::new(2, 2).unwrap(), 2, 2)
}

/// A step that was planned for three ranks, of which two processes with one rank each load what falls to them.
#[test]
fn the_parts_of_all_processes_are_the_step() {
    let whole = micro_batches(&[rows(&[A, B, C, D, E])], &tokenizer(), ROWS, None).unwrap();
    assert_eq!(
        (whole.planned, &whole.lost[..]),
        (3, &["c".to_owned(), "e".to_owned()][..])
    );

    let (tell, told) = unbounded();
    let mut at_first = of_two(told.clone());
    let first = rows(&[A, B, C, elsewhere(2, D.3 + E.3)]);
    let first = own_micro_batches(&[first], &tokenizer(), ROWS, None, |place, planned| {
        at_first.is_own(place, planned)
    });
    let first = first.unwrap();

    let taken = Arc::default();
    let mut second = OwnBatches::default();
    second.arrive(arrived(
        5,
        rows(&[elsewhere(0, A.3 + B.3), elsewhere(1, C.3), D, E]),
        &taken,
    ));
    let shares = second.convert(&rules()).unwrap();
    assert_eq!(shares.len(), 1);
    assert_eq!(at_first.missing(5), Some(1));
    tell.send((1, Ok(shares[0].clone()))).unwrap();
    at_first.note(told.recv().unwrap()).unwrap();
    assert_eq!((at_first.missing(5), at_first.missing(6)), (None, Some(1)));
    let others = at_first.take(5, &first.seconds).unwrap();
    assert_eq!([first.lost, others[0].lost.clone()].concat(), whole.lost);
    assert!(taken.lock().unwrap().is_empty());
    let batches = [first.batches, second.take(5, 1).unwrap()].concat();
    assert_eq!(batches, whole.batches);
    assert_eq!(*taken.lock().unwrap(), [5]);
    assert!(second.take(5, 1).is_err(), "taken twice");

    // A process that planned other batches, or cannot load its part, is named.
    let other = LoadedShare {
        step: 6,
        seconds: vec![A.3 + B.3, C.3, D.3],
        ..LoadedShare::default()
    };
    at_first.note((1, Ok(other))).unwrap();
    let error = at_first.take(6, &first.seconds).unwrap_err().to_string();
    assert!(
        error.contains("process 1 planned other micro-batches for step 7"),
        "{error}"
    );
    let failed = TrainingError::rank(1, "no memory");
    assert!(at_first.note((1, Err(failed))).is_err());
    assert!(at_first.late(7, 1).to_string().contains("process 1 did not load"));
}

/// The dataflow goes on after steps that no rank takes, and what process 0 was told of stays when it ends.
#[test]
fn steps_that_no_rank_takes_are_dropped() {
    let taken = Arc::default();
    let mut own = OwnBatches::default();
    for step in 0..5 {
        own.arrive(arrived(step, rows(&[elsewhere(0, 0.1), D]), &taken));
    }
    assert_eq!(own.convert(&rules()).unwrap().len(), 5);
    own.arrive(arrived(5, rows(&[elsewhere(0, 0.1), D]), &taken));
    own.feed_ended();
    own.skip(1);
    assert_eq!(*taken.lock().unwrap(), [0, 1]);
    assert_eq!(own.take(3, 1).unwrap().len(), 1);
    assert_eq!(*taken.lock().unwrap(), [0, 1, 2, 3]);
    assert_eq!(own.end(), 1);
    assert_eq!(*taken.lock().unwrap(), [0, 1, 2, 3, 4]);
    assert!(own.convert(&rules()).unwrap().is_empty());
}
