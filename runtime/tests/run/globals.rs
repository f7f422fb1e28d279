//! Global stages: one behind another, and rows that are read instead of made again.

use super::*;

pub(super) const CHAIN: &str = r#"
flow: 1
params:
  shards: {required: true}
  noted: {required: true}
  out: {required: true}
  modulo: 7
stages:
  scan: {uses: toy.count, with: {folder: "${shards}", noted: "${noted}"}}
  clean: {uses: toy.double, from: scan, with: {noted: "${noted}"}}
  first: {uses: toy.dedup, from: clean, with: {noted: "${noted}"}}
  last: {uses: toy.dedup, from: first, with: {modulo: "${modulo}", last: true}}
  out: {uses: toy.write, from: last, with: {folder: "${out}"}}
"#;

fn chain() -> Place {
    let place = Place::new();
    place.pipeline(CHAIN);
    place
}

/// The first row of each even value, and of these the last with each remainder.
fn chained(place: &Place, modulo: i64) -> String {
    let mut firsts: BTreeMap<i64, (String, usize)> = BTreeMap::new();
    let mut shards: Vec<PathBuf> = fs::read_dir(place.path("shards"))
        .unwrap()
        .map(|file| file.unwrap().path())
        .collect();
    shards.sort();
    for shard in &shards {
        let name = shard.file_stem().unwrap().to_string_lossy().into_owned();
        for (row, value) in fs::read_to_string(shard).unwrap().lines().enumerate() {
            let value: i64 = value.parse().unwrap();
            if value % 2 == 0 {
                firsts.entry(value * 2).or_insert((name.clone(), row));
            }
        }
    }
    let mut lasts: BTreeMap<i64, ((String, usize), i64)> = BTreeMap::new();
    for (value, place) in firsts {
        let last = lasts.entry(value % modulo).or_insert((place.clone(), value));
        if place >= last.0 {
            *last = (place, value);
        }
    }
    let rows: std::collections::BTreeSet<_> = lasts.into_values().collect();
    rows.into_iter()
        .map(|((shard, row), value)| format!("{shard} {row} {value}\n"))
        .collect()
}

/// In a process that stays alive: what stands is used, whether or not the next decision can be made by changes.
#[test]
fn a_decision_stands_although_its_key_rows_cannot_be_held() {
    let mut place = chain();
    place.pipeline(&CHAIN.replace("modulo: 7", "modulo: 7\n  undecided: false").replace(
        "from: clean, with: {",
        "from: clean, with: {undecided: \"${undecided}\", ",
    ));
    place.run(&[]);
    place.options.standing = Some(Arc::default());
    let told = Arc::new(Mutex::new(Vec::new()));
    let events = Events::default();
    let telling = Arc::clone(&told);
    events.listen(move |event| {
        if let Event::Note { message } = event {
            telling.lock().unwrap().push(message.clone());
        }
    });
    run(&place.checked(&["undecided=true"]), &place.options, &events).unwrap();
    let told = told.lock().unwrap().join("\n");
    assert!(
        told.contains("first:decide will decide about all key rows") && told.contains("nothing can be decided"),
        "{told}"
    );
}

/// The second stage only decides on rows that passed the first, although its keys are computed before that.
#[test]
fn one_behind_another() {
    for (workers, as_bytes) in [(1, false), (3, true)] {
        let mut place = chain();
        place.options.workers = Some(workers);
        place.options.as_bytes = as_bytes;
        let regions: Vec<String> = place
            .plan(&[])
            .stages
            .iter()
            .map(|stage| format!("{} {}", stage.region, stage.stage))
            .collect();
        let together = ["0 scan", "0 clean", "0 first:keys", "0 last:keys"];
        assert!(
            together.iter().all(|node| regions.contains(&node.to_string())),
            "{regions:?}"
        );
        place.run(&[]);
        let rows = || fs::read_to_string(place.path("out/rows.txt")).unwrap();
        assert_eq!(rows(), chained(&place, 7));
        // A row that the first kept back comes through it now; others are made no more.
        place.shard("s00", "1\n3");
        place.shard("s05", "20\n22\n24\n26\n28\n30");
        fs::remove_file(place.path("shards/s07.txt")).unwrap();
        place.run(&[]);
        assert_eq!(rows(), chained(&place, 7));
        assert_eq!(place.worked()["clean"], ["s00", "s05"]);
        assert!(place.plan(&[]).is_empty(), "{:?}", counts(&place.plan(&[])));
    }
}

#[test]
fn what_stands_stored_is_read_instead_of_made_again() {
    let place = chain();
    place.run(&[]);
    let setting = ["modulo=5"];
    assert_eq!(stage(&place.plan(&setting), "last:keys").run, 11);
    place.run(&setting);
    assert!(place.worked().is_empty(), "{:?}", place.worked());
    assert_eq!(
        fs::read_to_string(place.path("out/rows.txt")).unwrap(),
        chained(&place, 5)
    );
    // With a partition that has to be made.
    place.shard("s04", "2\n4\n6");
    let setting = ["modulo=9"];
    place.run(&setting);
    assert_eq!(place.worked()["scan"], ["s04"]);
    assert_eq!(
        fs::read_to_string(place.path("out/rows.txt")).unwrap(),
        chained(&place, 9)
    );
    // Where the rows that stand are not those that would be made, they are made.
    place.pipeline(&CHAIN.replace("from: scan, with: {", "from: scan, with: {by: 4, "));
    place.run(&["modulo=8"]);
    assert_eq!(place.worked()["scan"].len(), 11);
    assert!(place.worked().contains_key("keys"), "{:?}", place.worked());
}

#[test]
fn every_row_has_a_key() {
    let place = chain();
    place.pipeline(&CHAIN.replace("{modulo:", "{lossy: true, modulo:"));
    let error = place.try_run(&[]).unwrap_err();
    assert!(error.to_string().contains("key rows for"), "{error}");
    assert!(error.to_string().contains("last"), "{error}");
}

/// Memory for a few key rows alone: they are sorted on disk, and groups are read a few at a time; the same bytes.
#[test]
fn a_decision_in_little_memory_gives_the_same_bytes() {
    let place = chain();
    place.run(&[]);
    let bytes = place.bytes();
    let at_once = place.worked()["whole"].len();
    for decide_bytes in [20, 100, 1000] {
        let mut place = chain();
        place.options.decide_bytes = Some(decide_bytes);
        place.run(&[]);
        assert_eq!(place.bytes(), bytes, "{decide_bytes}");
        assert!(place.worked()["whole"].len() > at_once, "{:?}", place.worked());
        // A row less, and what was kept back comes through.
        place.shard("s00", "1\n3");
        place.run(&[]);
        let rows = fs::read_to_string(place.path("out/rows.txt")).unwrap();
        assert_eq!(rows, chained(&place, 7), "{decide_bytes}");
    }
}
