//! Crashes at every step of committing: a group is committed completely or not at all.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use flow_storage::{Location, Storage};
use flow_storage_testing::TestServer;
use proptest::prelude::*;
use tempfile::TempDir;

use super::super::crash::{Crash, Remains};
use super::super::remote_tests::PATIENCE;
use super::super::*;
use super::exports::export;
use super::hooks::kill_at;
use super::{key, names, read, recipe, rows, schema, write};
use flow_base::partition::Partition;

/// What a run does, step by step: groups of partitions, with an index now and then.
#[derive(Clone, Debug)]
enum Act {
    Commit(Vec<(u8, u8)>),
    Finish,
    Reopen,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let commit = prop::collection::vec((0u8..6, 0u8..3), 1..4).prop_map(Act::Commit);
    prop::collection::vec(
        prop_oneof![4 => commit, 1 => Just(Act::Finish), 1 => Just(Act::Reopen)],
        1..8,
    )
}

fn content(partition: u8, version: u8) -> u64 {
    u64::from(partition) * 3 + u64::from(version)
}

/// Runs `acts` until one fails; returns the groups that were certainly committed, and the one in progress.
type Keys = BTreeSet<(u8, u8)>;
fn perform(dir: &Path, acts: &[Act], files: Files) -> (Keys, Keys, bool) {
    perform_in(
        &|access| Store::open_with(&Storage::default(), dir, access, files.clone()),
        acts,
    )
}

/// The same, in the state directory that is opened so.
fn perform_in(open: &dyn Fn(Access) -> Result<Store, StoreError>, acts: &[Act]) -> (Keys, Keys, bool) {
    let mut sure = Keys::new();
    let open = || -> Result<(Store, ArtifactWriter), StoreError> {
        let store = open(Access::Run { run_id: "t".into() })?;
        let writer = store.writer(&recipe(1), &serde_json::Value::Null)?;
        Ok((store, writer))
    };
    let Ok((mut store, mut writer)) = open() else {
        return (sure, Keys::new(), false);
    };
    for act in acts {
        let mut in_hand = Keys::new();
        let done = match act {
            Act::Finish => writer.finish([]),
            Act::Reopen => {
                drop((store, writer));
                match open() {
                    Ok(opened) => {
                        (store, writer) = opened;
                        Ok(())
                    }
                    Err(_) => return (sure, in_hand, false),
                }
            }
            Act::Commit(group) => {
                in_hand.extend(group.iter().copied());
                let pending: Result<Vec<Pending>, StoreError> = in_hand
                    .iter()
                    .map(|&(p, v)| write(&writer, &format!("p{p}"), content(p, v), usize::from(p) + 1))
                    .collect();
                pending.and_then(|pending| writer.commit(pending)).map(|_| ())
            }
        };
        match done {
            Ok(()) => sure.extend(in_hand),
            Err(_) => return (sure, in_hand, false),
        }
    }
    (sure, Keys::new(), writer.finish([]).is_ok())
}

/// What stands, after checking that every record can be read and has its own rows.
fn standing(dir: &Path) -> Keys {
    standing_in(&read(dir))
}

fn standing_in(store: &Store) -> Keys {
    let records = store.records(&recipe(1)).unwrap();
    assert!(records.lost().is_empty(), "{:?}", records.lost());
    let mut keys = Keys::new();
    for (p, v) in (0..6).flat_map(|p| (0..3).map(move |v| (p, v))) {
        let name = Partition::new(format!("p{p}"));
        let Some(record) = records.get(&name, &key(content(p, v))) else {
            continue;
        };
        let artifact = store.artifact(&recipe(1), "rows", schema(), [record]).unwrap();
        assert_eq!(
            artifact.read_whole(&name, None).unwrap(),
            rows(content(p, v), usize::from(p) + 1)
        );
        let rejects = store.reject_set(&[("s".into(), recipe(1), vec![record.clone()])]);
        assert_eq!(rejects.iter().map(Result::unwrap).count() as u64, record.rejects.rows);
        keys.insert((p, v));
    }
    keys
}

/// The files that count, with their contents.
fn files_of(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let data = dir.join("artifacts").join(recipe(1).short()).join("data");
    names(&data)
        .into_iter()
        .map(|name| (name.clone(), std::fs::read(data.join(name)).unwrap()))
        .collect()
}

/// Never stops, but spares the disk.
fn unstopped() -> Files {
    Files::stopping(&Crash::after(u64::MAX))
}

/// What stands is what was committed, with the group in hand or without it.
fn check_groups((sure, in_hand, whole): &(Keys, Keys, bool), stands: &Keys) {
    assert!(sure.is_subset(stands), "{sure:?} was committed, {stands:?} stands");
    let more: Keys = stands.difference(sure).copied().collect();
    let group: Keys = in_hand.difference(sure).copied().collect();
    assert!(
        more.is_empty() || more == group,
        "{more:?} of the group {group:?} stands"
    );
    assert!(!whole || more.is_empty());
}

/// As [`check_crash`], in object storage: the process is killed, and what it did in the bucket remains. The next run is on this
/// machine, with its copy, or on `another` one.
fn check_crash_in_bucket(server: &TestServer, root: &Path, acts: &[Act], at: u64, another: bool) -> u64 {
    let (storage, state) = (server.storage(), format!("state-{at}-{another}"));
    let Ok(Location::Object(url)) = Location::parse(&format!("s3://bucket/{state}")) else {
        panic!("{state}");
    };
    let open = |machine: &str, access, files| {
        let copy = root.join(&state).join(machine);
        Store::open_remote(&storage, &url, &copy, access, PATIENCE, files)
    };
    let looked_at = |machine: &str| standing_in(&open(machine, Access::Read, Files::default()).unwrap());
    let crash = Crash::after(at);
    let done = perform_in(&|access| open("one", access, Files::stopping(&crash)), acts);
    check_groups(&done, &looked_at("looking"));
    let next = if another { "another" } else { "one" };
    let (_, _, again) = perform_in(&|access| open(next, access, unstopped()), acts);
    assert!(again);
    let undisturbed = TempDir::new().unwrap();
    perform(undisturbed.path(), acts, unstopped());
    let expected = standing(undisturbed.path());
    // Who looked before the crash was mended, and one who never looked.
    for machine in ["looking", next, "new"] {
        assert_eq!(looked_at(machine), expected, "{machine}");
    }
    let objects = names(&server.root().join("bucket").join(&state));
    assert!(
        !objects
            .iter()
            .any(|name| name.contains(".tmp") || name.contains("records/")),
        "{objects:?}"
    );
    crash.steps_done()
}

fn check_crash(acts: &[Act], at: u64, remains: Remains) -> u64 {
    let dir = TempDir::new().unwrap();
    let crash = Crash::after(at);
    let done = perform(dir.path(), acts, Files::stopping(&crash));
    crash.settle(remains);
    check_groups(&done, &standing(dir.path()));
    // The next run ends with the same bytes as an uninterrupted one, and leaves no other files.
    let (_, _, again) = perform(dir.path(), acts, unstopped());
    assert!(again);
    let undisturbed = TempDir::new().unwrap();
    perform(undisturbed.path(), acts, unstopped());
    assert_eq!(standing(dir.path()), standing(undisturbed.path()));
    assert_eq!(files_of(dir.path()), files_of(undisturbed.path()));
    assert!(
        !names(dir.path())
            .iter()
            .any(|name| name.contains(".tmp") || name.contains("records/"))
    );
    crash.steps_done()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]
    #[test]
    fn a_crash_anywhere_leaves_groups_whole_or_not_at_all(acts in acts(), at in 0u64..120, power in any::<bool>()) {
        check_crash(&acts, at, if power { Remains::Flushed } else { Remains::All });
    }
}

#[test]
fn a_crash_at_every_single_step_is_survived() {
    let acts = [
        Act::Commit(vec![(0, 0), (1, 0)]),
        Act::Commit(vec![(2, 0), (0, 1)]),
        Act::Finish,
        Act::Commit(vec![(1, 0), (3, 2)]),
        Act::Reopen,
        Act::Commit(vec![(4, 1)]),
    ];
    for remains in [Remains::All, Remains::Flushed] {
        let steps = check_crash(&acts, u64::MAX, remains);
        assert!(steps > 60, "{steps}");
        for at in 0..steps {
            assert_eq!(check_crash(&acts, at, remains), at);
        }
    }
}

#[test]
fn a_crash_at_every_single_step_is_survived_in_object_storage() {
    let root = TempDir::new().unwrap();
    std::fs::create_dir_all(root.path().join("served/bucket")).unwrap();
    let server = TestServer::start(&root.path().join("served")).unwrap();
    let acts = [
        Act::Commit(vec![(0, 0), (1, 0)]),
        Act::Commit(vec![(0, 1)]),
        Act::Finish,
        Act::Reopen,
        Act::Commit(vec![(1, 0), (3, 2)]),
    ];
    let steps = check_crash_in_bucket(&server, root.path(), &acts, u64::MAX, false);
    assert!(steps > 40, "{steps}");
    for at in 0..steps {
        let another = at % 2 == 1;
        assert_eq!(check_crash_in_bucket(&server, root.path(), &acts, at, another), at);
    }
}

#[test]
fn a_new_writer_removes_what_a_crash_left() {
    let dir = TempDir::new().unwrap();
    perform(dir.path(), &[Act::Commit(vec![(0, 0), (1, 0)])], unstopped());
    let folder = dir.path().join("artifacts").join(recipe(1).short());
    let before = names(dir.path());
    for left in [
        "data/0123.rows.4567.parquet",
        "data/.tmp-1-1",
        "records/.tmp-1-2",
        ".tmp-1-3",
    ] {
        std::fs::write(folder.join(left), "half").unwrap();
    }
    // Looking removes nothing: a run may be going on.
    assert_eq!(standing(dir.path()).len(), 2);
    assert_eq!(names(dir.path()).len(), before.len() + 4);
    // A run that reuses all opens no writer.
    let snapshots = dir.path().join("snapshots");
    let killed = dir.path().join("runs/20260102T030405678Z-1-ab12");
    for folder in [&snapshots, &killed] {
        std::fs::create_dir_all(folder).unwrap();
    }
    std::fs::write(snapshots.join(".tmp-1-4"), "half").unwrap();
    for left in [".tmp-1-5", ".flow-tmp-0123456789abcdef"] {
        std::fs::write(killed.join(left), "half").unwrap();
    }
    let run = Access::Run { run_id: "t".into() };
    drop(Store::open_with(&Storage::default(), dir.path(), run, unstopped()).unwrap());
    assert_eq!((names(&snapshots).len(), names(&killed).len()), (0, 0));
    std::fs::remove_dir_all(dir.path().join("runs")).unwrap();
    std::fs::remove_dir(&snapshots).unwrap();
    let among_data = |name: &&String| name.contains("/data/") && !before.contains(*name);
    assert_eq!(names(dir.path()).iter().filter(among_data).count(), 2);
    assert_eq!(names(dir.path()).len(), before.len() + 2);
    perform(dir.path(), &[], unstopped());
    assert_eq!(names(dir.path()), before);
    assert_eq!(standing(dir.path()).len(), 2);
}

/// The child of the test below: commits, finishes and exports, until it is killed.
#[test]
fn killed_child() {
    let Ok(dir) = std::env::var("FLOW_TEST_KILLED_CHILD") else {
        return;
    };
    if let Some(at) = std::env::var("FLOW_TEST_KILL_AT").ok().filter(|at| !at.is_empty()) {
        let kill = kill_at(&at, &flow_base::failpoints::STORE);
        flow_base::failpoints::set(move |point, _| kill(point));
    }
    let dir = Path::new(&dir);
    let acts = [Act::Commit(vec![(0, 0), (1, 0)]), Act::Commit(vec![(2, 0)])];
    let (_, _, whole) = perform(&dir.join("state"), &acts, Files::default());
    assert!(whole);
    export(&dir.join("out"), 1, &["a", "b"], Files::default()).unwrap();
}

#[test]
fn a_killed_process_leaves_what_it_committed() {
    use std::os::unix::process::ExitStatusExt;
    let child = |dir: &Path, at: &str| {
        std::process::Command::new(std::env::current_exe().unwrap())
            .args(
                ["--exact", concat!(module_path!(), "::killed_child")]
                    .map(|arg| arg.trim_start_matches(concat!(env!("CARGO_CRATE_NAME"), "::"))),
            )
            .env("FLOW_TEST_KILLED_CHILD", dir)
            .env("FLOW_TEST_KILL_AT", at)
            .output()
            .unwrap()
    };
    let all = Keys::from([(0, 0), (1, 0), (2, 0)]);
    let some = Keys::from([(0, 0), (1, 0)]);
    for (at, expected) in [
        ("data-written", Keys::new()),
        ("data-renamed:2", Keys::new()),
        ("record-written", Keys::new()),
        ("record-linked", some.clone()),
        ("data-renamed:5", some.clone()),
        ("record-written:2", some),
        ("index-written", all.clone()),
        ("export-renaming:1", all.clone()),
        ("export-done", all.clone()),
    ] {
        let dir = TempDir::new().unwrap();
        let output = child(dir.path(), at);
        assert_eq!(
            output.status.signal(),
            Some(9),
            "{at}: {}",
            String::from_utf8_lossy(&output.stdout)
        );
        assert_eq!(standing(&dir.path().join("state")), expected, "{at}");
        let exported =
            ExportSet::status(&dir.path().join("out"), "flow.json", &key(1), &SourceDigests::default()).unwrap();
        assert_eq!(exported == ExportStatus::Whole, at == "export-done", "{at}");
        let output = child(dir.path(), "");
        assert!(
            output.status.success(),
            "{at}: {}",
            String::from_utf8_lossy(&output.stdout)
        );
        assert_eq!(standing(&dir.path().join("state")), all, "{at}");
    }
    // A misspelt point is an error and not a test that kills nothing.
    let dir = TempDir::new().unwrap();
    assert!(!child(dir.path(), "data-writen").status.success());
}
