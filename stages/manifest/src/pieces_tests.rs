use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use arrow::array::{ArrayRef, Float64Array, RecordBatch, StringArray, UInt32Array};
use flow_corpus::columns::manifest_schema;
use flow_kind::{ROW, Reject, RejectClass, StageError};
use flow_runtime::harness::Harness;
use proptest::prelude::*;

use super::*;
use crate::statistics::Durations;
use crate::write::Write;
use crate::write_parts::{FileOfParts, write_parts};

fn part(name: &str, rows: u64, content: &str) -> Part {
    Part {
        name: name.into(),
        rows,
        digest: Digest::of(content.as_bytes()),
    }
}

/// Each run as the names of its parts.
fn names(parts: &[Part]) -> Vec<Vec<String>> {
    let names = |run: Range<usize>| parts[run].iter().map(|part| part.name.clone()).collect();
    runs(parts).into_iter().map(names).collect()
}

#[test]
fn runs_cover_all_parts_in_order_and_fit_into_row_groups() {
    assert_eq!(runs(&[]), Vec::<Range<usize>>::new());
    let sizes = [1, 40_000, 26_000, 65_536, 65_537, 200_000, 3, 32_768, 32_768, 1, 5];
    let parts: Vec<Part> = (0..600)
        .map(|at| {
            part(
                &format!("en/en_{at:05}"),
                sizes[at % sizes.len()] / (1 + at as u64 / 60),
                "x",
            )
        })
        .filter(|part| part.rows > 0)
        .collect();
    let runs = runs(&parts);
    let mut next = 0;
    for run in &runs {
        assert_eq!(run.start, next);
        next = run.end;
        let rows: u64 = parts[run.clone()].iter().map(|part| part.rows).sum();
        assert!(run.len() == 1 || rows <= ROW_GROUP as u64, "{run:?}: {rows}");
        let followed_by = parts.get(run.end).map(|part| part.rows);
        assert!(
            rows >= SHORTEST || followed_by.is_none_or(|more| rows + more > ROW_GROUP as u64),
            "{run:?}: {rows}"
        );
    }
    assert_eq!(next, parts.len());
}

#[test]
fn a_part_that_comes_changes_few_runs() {
    let name = |at: usize| format!("en/en_{at:05}");
    let all: Vec<usize> = (0..2_000).filter(|at| at % 100 != 50).collect();
    let parts = |all: &[usize]| -> Vec<Part> { all.iter().map(|at| part(&name(*at), 2_600, "x")).collect() };
    let before = names(&parts(&all));
    assert!((70..160).contains(&before.len()), "{}", before.len());
    let mut changed = 0;
    for new in (50..2_000).step_by(100) {
        let mut more = all.clone();
        more.push(new);
        more.sort_unstable();
        let after = names(&parts(&more));
        changed += after.iter().filter(|run| !before.contains(run)).count();
    }
    assert!(changed < 100, "20 new parts changed {changed} runs");
}

/// Rows of a partition, which follow from its name and a number.
fn rows_of(name: &str, content: u64, rows: u64) -> RecordBatch {
    let texts =
        |text: &dyn Fn(u64) -> String| -> ArrayRef { Arc::new(StringArray::from_iter_values((0..rows).map(text))) };
    let columns = vec![
        texts(&|row| format!("{name}-{row}")),
        texts(&|_| name.into()),
        texts(&|row| format!("words {content} {}", row * (content + 7) % 10_007)),
        Arc::new(Float64Array::from_iter_values(
            (0..rows).map(|row| ((row + content) % 997) as f64 / 50.0),
        )),
        texts(&|row| if row % 5 == content % 5 { "hi" } else { "en" }.into()),
        texts(&|row| format!("{row}.flac")),
        texts(&|_| format!("{name}/all.tar")),
        texts(&|_| "test".into()),
    ];
    RecordBatch::try_new(manifest_schema(), columns).unwrap()
}

/// What is read of the parts, and what the file holds then.
fn written(path: &Path, parts: &[Part], recipe: &str, standing: &Standing) -> (Vec<String>, Vec<Piece>) {
    let read = Mutex::new(Vec::new());
    let file = FileOfParts {
        path,
        schema: manifest_schema(),
        recipe: Digest::of(recipe.as_bytes()),
        parts,
        standing,
    };
    let to = fs::File::create(path).unwrap();
    let written = write_parts(to, &file, Some(Durations::default()), |at, push| {
        let part = &parts[at];
        read.lock().unwrap().push(part.name.clone());
        push(rows_of(&part.name, u64::from(part.digest.as_bytes()[0]), part.rows))
    })
    .unwrap();
    let rows: u64 = parts.iter().map(|part| part.rows).sum();
    assert_eq!(written.figures.unwrap().all.rows as u64, rows);
    (read.into_inner().unwrap(), written.pieces)
}

#[test]
fn only_what_changed_is_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let mut parts: Vec<Part> = (0..30).map(|at| part(&format!("en/{at:02}"), 5_000, "one")).collect();
    parts[20].rows = 150_000; // Three row groups.
    let (read, pieces) = written(&path("first"), &parts, "recipe", &Standing::default());
    assert_eq!(read.len(), 30);
    let runs = runs(&parts);
    assert!(runs.len() > 3 && pieces.len() == runs.len() + 2, "{runs:?}");

    let standing = || Standing::open(&path("first"), &pieces);
    let (read, again) = written(&path("second"), &parts, "recipe", &standing());
    assert!(read.is_empty(), "{read:?}");
    assert_eq!(again, pieces);
    assert!(fs::read(path("second")).unwrap() == fs::read(path("first")).unwrap());

    // Another recipe takes over nothing.
    let (read, _) = written(&path("second"), &parts, "another", &standing());
    assert_eq!(read.len(), 30);

    // Of a part that changed, the run that has it is read.
    parts[2].digest = Digest::of(b"two");
    let (read, _) = written(&path("second"), &parts, "recipe", &standing());
    let run = runs.iter().find(|run| run.contains(&2)).unwrap();
    assert_eq!(read.len(), run.len());
    written(&path("from nothing"), &parts, "recipe", &Standing::default());
    assert!(fs::read(path("second")).unwrap() == fs::read(path("from nothing")).unwrap());
}

#[test]
fn a_file_that_is_not_the_one_that_was_written_gives_nothing_false() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let parts: Vec<Part> = (0..24).map(|at| part(&format!("en/{at:02}"), 6_000, "one")).collect();
    let (_, pieces) = written(&path("right"), &parts, "recipe", &Standing::default());
    let right = fs::read(path("right")).unwrap();
    let others: Vec<Part> = (0..24).map(|at| part(&format!("hi/{at:02}"), 6_000, "two")).collect();
    written(&path("other"), &others, "recipe", &Standing::default());
    let other = fs::read(path("other")).unwrap();

    let mut flipped = right.clone();
    flipped[right.len() / 2] ^= 1;
    let mut footer = right.clone();
    footer[right.len() - 20] ^= 1;
    let longer = [right.as_slice(), b"more"].concat();
    let moved = [b"more", right.as_slice()].concat();
    let files = [
        flipped,
        footer,
        longer,
        moved,
        other,
        right[..right.len() / 2].to_vec(),
        Vec::new(),
    ];
    for (at, bytes) in files.iter().enumerate() {
        fs::write(path("standing"), bytes).unwrap();
        written(
            &path("out"),
            &parts,
            "recipe",
            &Standing::open(&path("standing"), &pieces),
        );
        assert!(fs::read(path("out")).unwrap() == right, "file {at}");
    }

    // Notes that say something else.
    type Edit = fn(&mut Piece);
    let edits: [Edit; 6] = [
        |piece| piece.start += 1,
        |piece| piece.start = u64::MAX,
        |piece| piece.bytes = u64::MAX,
        |piece| piece.bytes -= 1,
        |piece| piece.tail = piece.tail.replace('0', "1"),
        |piece| piece.tail = "no digits".into(),
    ];
    for (at, edit) in edits.iter().enumerate() {
        let mut pieces = pieces.clone();
        pieces.iter_mut().for_each(edit);
        written(&path("out"), &parts, "recipe", &Standing::open(&path("right"), &pieces));
        assert!(fs::read(path("out")).unwrap() == right, "notes {at}");
    }
    // Neither a folder nor nothing is a file.
    for name in ["", "not there"] {
        written(&path("out"), &parts, "recipe", &Standing::open(&path(name), &pieces));
        assert!(fs::read(path("out")).unwrap() == right, "{name:?}");
    }
}

#[test]
fn parts_with_other_rows_than_they_say_are_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let parts = [part("en/a", 10, "x")];
    let file = FileOfParts {
        path: &folder.path().join("out"),
        schema: manifest_schema(),
        recipe: Digest::of(b""),
        parts: &parts,
        standing: &Standing::default(),
    };
    let written = write_parts(Vec::new(), &file, None, |_, push| push(rows_of("en/a", 1, 9)));
    let error = written.map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("en/a: 9 rows"), "{error}");
}

/// A partition of a corpus: what its rows follow from, and which of them are in `val`.
#[derive(Clone, Debug)]
struct Shard {
    content: u64,
    rows: u64,
    val: u64,
}

type Corpus = BTreeMap<String, Shard>;

fn shard() -> impl Strategy<Value = Shard> {
    (0u64..5, prop_oneof![1 => Just(0u64), 5 => 1u64..12_000], 0u64..4).prop_map(|(content, rows, val)| Shard {
        content,
        rows,
        val,
    })
}

fn name() -> impl Strategy<Value = String> {
    (0..2usize, 0u8..12).prop_map(|(lang, at)| format!("{}/{at:02}", ["en", "hi"][lang]))
}

/// A shard that comes, takes the place of another, or goes.
fn edit() -> impl Strategy<Value = (String, Option<Shard>)> {
    (name(), prop::option::weighted(0.8, shard()))
}

/// Writes a set of `corpus` into `out`, and gives the bytes of its files.
fn set(corpus: &Corpus, out: &Path, scratch: &Path) -> Result<BTreeMap<String, Vec<u8>>, StageError> {
    let settings = format!(
        "{{out: {:?}, jsonl: true, shards: /data, allow_empty: true}}",
        out.to_str().unwrap()
    );
    let mut fields = vec![Arc::new(arrow::datatypes::Field::new(
        ROW,
        arrow::datatypes::DataType::UInt32,
        false,
    ))];
    fields.extend(manifest_schema().fields().iter().cloned());
    let schema = Arc::new(arrow::datatypes::Schema::new(fields));
    let mut harness = Harness::<Write>::from_yaml(&settings)?.scratch(scratch);
    for input in ["master", "train", "val"] {
        harness = harness.input(input, Arc::clone(&schema));
    }
    for (name, shard) in corpus {
        let rows = rows_of(name, shard.content, shard.rows);
        for input in ["master", "train", "val"] {
            let is_in = |row: &u64| input == "master" || (row % 4 == shard.val) == (input == "val");
            let chosen: Vec<u32> = (0..shard.rows).filter(is_in).map(|row| row as u32).collect();
            let chosen = UInt32Array::from(chosen);
            let taken = arrow::compute::take_record_batch(&rows, &chosen)?;
            let mut columns: Vec<ArrayRef> = vec![Arc::new(chosen)];
            columns.extend(taken.columns().iter().cloned());
            harness = harness.empty_partition(input, name);
            harness = harness.feed(input, name, RecordBatch::try_new(Arc::clone(&schema), columns)?);
        }
        for row in 0..shard.content as u32 {
            let reject = Reject {
                row: Some(row),
                id: None,
                reason: "too_short".into(),
                class: RejectClass::Rule,
                detail: format!("{} rows", shard.rows),
                values: "{}".into(),
            };
            harness = harness.rejected("clean", name, reject);
        }
    }
    harness.run()?;
    let files = fs::read_dir(out).unwrap().map(|entry| entry.unwrap());
    let files = files.filter(|entry| !entry.file_name().to_string_lossy().starts_with('.'));
    Ok(files
        .map(|entry| {
            let name = entry.file_name().into_string().unwrap();
            (name, fs::read(entry.path()).unwrap())
        })
        .collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4, ..ProptestConfig::default() })]

    #[test]
    fn after_any_edits_a_set_is_the_one_that_is_written_from_nothing(
        first in prop::collection::btree_map(name(), shard(), 10..20),
        edits in prop::collection::vec(edit(), 1..4),
    ) {
        let place = tempfile::tempdir().unwrap();
        let folder = |name: &str| {
            let folder = place.path().join(name);
            fs::create_dir_all(&folder).unwrap();
            folder
        };
        let mut corpus = first;
        let (out, scratch) = (place.path().join("out"), folder("scratch"));
        set(&corpus, &out, &scratch).unwrap();
        for (at, (name, shard)) in edits.into_iter().enumerate() {
            match shard {
                Some(shard) => drop(corpus.insert(name, shard)),
                None => drop(corpus.remove(&name)),
            }
            let incremental = set(&corpus, &out, &scratch).unwrap();
            let fresh = set(&corpus, &place.path().join(format!("fresh{at}")), &folder(&format!("s{at}"))).unwrap();
            prop_assert_eq!(incremental.keys().collect::<Vec<_>>(), fresh.keys().collect::<Vec<_>>());
            for (name, bytes) in &incremental {
                prop_assert!(fresh[name] == *bytes, "{}", name);
            }
        }
    }
}
