use std::collections::BTreeSet;
use std::time::Duration;

use flow_storage::{Location, ObjectUrl, Storage};
use flow_storage_testing::{Fault, FaultRule, TestServer};
use tempfile::TempDir;

use super::lease::Patience;
use super::tests::{key, names, recipe, rows, write, writer};
use super::*;

pub(super) const PATIENCE: Patience = Patience {
    beat: Duration::from_millis(100),
    fresh: Duration::from_secs(2),
    stale: Duration::from_secs(4),
    look: Duration::from_millis(50),
    wait: Duration::from_secs(20),
};

/// A bucket called `bucket`, and folders for the copies of several machines.
struct Place {
    server: TestServer,
    root: TempDir,
}

impl Place {
    fn new() -> Place {
        let root = TempDir::new().unwrap();
        std::fs::create_dir_all(root.path().join("served/bucket")).unwrap();
        Place {
            server: TestServer::start(&root.path().join("served")).unwrap(),
            root,
        }
    }

    /// The state directory, opened on this machine.
    fn open(&self, machine: &str, access: Access) -> Result<Store, StoreError> {
        let copy = self.copy(machine);
        Store::open_remote(
            &self.server.storage(),
            &url(),
            &copy,
            access,
            PATIENCE,
            Files::default(),
        )
    }

    fn run(&self, machine: &str) -> Result<Store, StoreError> {
        self.open(machine, Access::Run { run_id: "one".into() })
    }

    fn read(&self, machine: &str) -> Store {
        self.open(machine, Access::Read).unwrap()
    }

    fn copy(&self, machine: &str) -> PathBuf {
        self.root.path().join(machine)
    }

    /// The objects of the state directory as files.
    fn objects(&self) -> PathBuf {
        self.server.root().join("bucket/state")
    }

    fn object_names(&self) -> BTreeSet<String> {
        let folder = self.objects();
        if folder.exists() {
            names(&folder)
        } else {
            BTreeSet::new()
        }
    }

    fn put(&self, key: &str, bytes: &'static [u8]) {
        self.server.storage().put(&url().join(key).unwrap(), bytes).unwrap();
    }

    /// The key of the only data file of a partition.
    fn data_of(&self, partition: &str) -> String {
        let records = self.read("looking").records(&recipe(1)).unwrap();
        let (file, _) = records.of(&partition.into())[0].files().next().unwrap();
        format!("artifacts/{}/data/{file}", recipe(1).short())
    }
}

fn url() -> ObjectUrl {
    match Location::parse("s3://bucket/state").unwrap() {
        Location::Object(url) => url,
        Location::Local(path) => panic!("{}", path.display()),
    }
}

/// Commits partitions, each with its number as content.
fn commit(store: &Store, numbers: &[u64]) -> Result<(), StoreError> {
    let writer = store.writer(&recipe(1), &serde_json::json!({"kind": "test"}))?;
    let group: Result<Vec<_>, _> = numbers
        .iter()
        .map(|n| write(&writer, &format!("p{n}"), *n, 50))
        .collect();
    writer.commit(group?).map(drop)
}

fn partitions(store: &Store) -> Vec<String> {
    let records = store.records(&recipe(1)).unwrap();
    assert!(records.lost().is_empty(), "{:?}", records.lost());
    records.partitions().map(ToString::to_string).collect()
}

/// The bytes of all files of artifacts, by their names.
fn artifacts(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let folder = folder.join("artifacts");
    let named = names(&folder).into_iter();
    named
        .map(|name| (name.clone(), std::fs::read(folder.join(&name)).unwrap()))
        .collect()
}

#[test]
fn objects_are_the_files_of_a_folder_and_are_fetched_when_they_are_read() {
    let place = Place::new();
    let folder = place.copy("folder");
    for store in [
        place.run("a").unwrap(),
        Store::open(&Storage::default(), &folder, Access::Run { run_id: "one".into() }).unwrap(),
    ] {
        commit(&store, &[1, 3]).unwrap();
        commit(&store, &[5]).unwrap();
        writer(&store).finish([]).unwrap();
        commit(&store, &[7]).unwrap();
    }
    assert_eq!(artifacts(&place.objects()), artifacts(&folder));

    let store = place.read("b");
    place.server.clear();
    assert_eq!(partitions(&store), ["p1", "p3", "p5", "p7"]);
    assert_eq!(place.server.requests("/data/"), 0);
    let records = store.records(&recipe(1)).unwrap();
    let all = records.partitions().flat_map(|partition| records.of(partition));
    let artifact = store.artifact(&recipe(1), "rows", rows(0, 0).schema(), all).unwrap();
    assert_eq!(artifact.read_whole(&"p3".into(), None).unwrap(), rows(3, 50));
    let fetched = names(&place.copy("b"))
        .into_iter()
        .filter(|name| name.contains("/data/"));
    assert_eq!(fetched.count(), 1);

    // It is in the copy now, and goes on from there.
    place.server.clear();
    assert_eq!(artifact.read_whole(&"p3".into(), None).unwrap(), rows(3, 50));
    assert_eq!(place.server.requests("/data/"), 0);
    drop((artifact, store));
    let store = place.run("b").unwrap();
    commit(&store, &[3, 9]).unwrap();
    writer(&store).finish([]).unwrap();
    drop(store);
    assert_eq!(partitions(&place.read("a")), ["p1", "p3", "p5", "p7", "p9"]);
}

#[test]
fn a_group_is_committed_with_its_record_and_not_before() {
    let place = Place::new();
    let store = place.run("a").unwrap();
    commit(&store, &[1]).unwrap();
    place.server.fault(FaultRule {
        method: Some("PUT"),
        ..FaultRule::always(Fault::Status(403), "/records/")
    });
    let error = commit(&store, &[3, 5]).unwrap_err().to_string();
    assert!(error.contains("s3://bucket/state/artifacts/"), "{error}");
    place.server.clear();
    // Data without a record is nothing.
    assert_eq!(
        artifacts(&place.objects())
            .keys()
            .filter(|name| name.contains("/data/"))
            .count(),
        3
    );
    assert_eq!(partitions(&place.read("b")), ["p1"]);
    commit(&store, &[5, 7]).unwrap();
    assert_eq!(partitions(&place.read("b")), ["p1", "p5", "p7"]);
    drop(store);
    // Garbage collection knows of no run, and takes nothing away.
    let store = place.run("b").unwrap();
    assert_eq!(store.collect_garbage(1, false).unwrap(), GarbageSummary::default());
    assert_eq!(partitions(&store), ["p1", "p5", "p7"]);
    writer(&store).remove_orphans().unwrap();
    assert_eq!(
        artifacts(&place.objects())
            .keys()
            .filter(|name| name.contains("/data/"))
            .count(),
        3
    );
    assert_eq!(partitions(&place.read("c")), ["p1", "p5", "p7"]);
}

#[test]
fn lost_answers_and_cut_connections_change_nothing() {
    let place = Place::new();
    for (round, fault) in (0..).zip([Fault::LoseAnswer, Fault::Drop, Fault::Status(503)]) {
        for path in ["/state/lock", "/records/", "/index.json", "/data/", "/FORMAT"] {
            place.server.fault(FaultRule {
                method: Some("PUT"),
                ..FaultRule::first(1, fault, path)
            });
        }
        let store = place.run("a").unwrap();
        let first = 10 * round + 1;
        commit(&store, &[first, first + 2]).unwrap();
        commit(&store, &[first + 4]).unwrap();
        writer(&store).finish([]).unwrap();
        commit(&store, &[first + 6]).unwrap();
        drop(store);
        assert_eq!(partitions(&place.read("b")).len() as u64, 4 * (round + 1), "{fault:?}");
        place.server.clear();
    }
    assert!(place.run("c").is_ok());
}

#[test]
fn a_state_directory_that_is_held_is_refused_until_it_is_given_back() {
    let place = Place::new();
    let held = place.run("a").unwrap();
    commit(&held, &[1]).unwrap();
    for machine in ["a", "b"] {
        let error = place.run(machine).err().unwrap();
        assert!(error.is_held(), "{error}");
        let text = error.to_string();
        assert!(text.contains("s3://bucket/state") && text.contains("run one"), "{text}");
        // Looking is always allowed.
        assert_eq!(partitions(&place.read(machine)), ["p1"]);
    }
    assert_eq!(lease::holder_of(&place.server.storage(), &url()).unwrap().run, "one");
    drop(held);
    assert_eq!(lease::holder_of(&place.server.storage(), &url()), None);
    commit(&place.run("b").unwrap(), &[3]).unwrap();
}

#[test]
fn the_lock_of_a_dead_owner_is_taken_over_and_the_owner_writes_nothing_more() {
    const ANOTHER: &[u8] = b"{\"host\":\"elsewhere\",\"pid\":7,\"run\":\"two\",\"token\":\"another\"}";
    let place = Place::new();
    place.put("lock", ANOTHER);
    let store = place.run("a").unwrap();
    commit(&store, &[1]).unwrap();
    // While this process was away, another one has taken it. A renewal that the server has compared already, and not yet written,
    // goes over it.
    let refused = (3..1000).map(|n| {
        place.put("lock", ANOTHER);
        std::thread::sleep(Duration::from_millis(20));
        commit(&store, &[n])
    });
    let error = refused.filter_map(Result::err).next().unwrap();
    assert!(error.is_held() && error.to_string().contains("elsewhere"), "{error}");
    drop(store);
    // What it does not hold, it does not give back.
    assert_eq!(std::fs::read(place.objects().join("lock")).unwrap(), ANOTHER);
}

#[test]
fn an_index_of_another_run_is_not_replaced() {
    let place = Place::new();
    let store = place.run("a").unwrap();
    commit(&store, &[1]).unwrap();
    let index = format!("artifacts/{}/index.json", recipe(1).short());
    place.put(&index, b"another's");
    let error = writer(&store).finish([]).unwrap_err();
    assert!(
        matches!(&error, StoreError::WrittenMeanwhile { url } if url.ends_with(&index)),
        "{error}"
    );
    assert_eq!(std::fs::read(place.objects().join(&index)).unwrap(), b"another's");
}

#[test]
fn storage_without_conditions_is_refused() {
    let place = Place::new();
    place.server.fault(FaultRule {
        method: Some("PUT"),
        ..FaultRule::always(Fault::Overwrite, "/state/lock")
    });
    let error = place.run("a").err().unwrap();
    assert!(matches!(error, StoreError::Conditions { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("s3://bucket/state") && text.contains("If-None-Match"),
        "{text}"
    );
    assert!(error.help().is_some());
    place.server.clear();
    assert_eq!(place.object_names(), BTreeSet::new());

    let mut environment = place.server.environment();
    environment.push(("AWS_CONDITIONAL_PUT".into(), "disabled".into()));
    let storage = Storage::with_environment(environment);
    let access = Access::Run { run_id: "one".into() };
    let error = Store::open_remote(&storage, &url(), &place.copy("a"), access, PATIENCE, Files::default())
        .err()
        .unwrap();
    assert!(matches!(error, StoreError::Conditions { .. }), "{error}");

    let web = Store::open(&Storage::default(), "https://127.0.0.1/state", Access::Read)
        .err()
        .unwrap();
    assert!(web.to_string().contains("read only"), "{web}");
}

/// Another process of the run uploads data, from this machine or another one, and process 0 commits it.
#[test]
fn what_a_process_of_the_run_placed_counts_once_process_0_has_committed_it() {
    let place = Place::new();
    let follow = |machine| place.open(machine, Access::Follow { run_id: "one".into() });
    assert!(follow("b").is_err());
    let store = place.run("a").unwrap();
    let leading = writer(&store);
    for (number, machine) in [(1, "b"), (3, "a")] {
        let following = follow(machine).unwrap();
        assert!(following.has_run("one").unwrap());
        let follower = following.follow_writer(&recipe(1), []).unwrap();
        let partition = format!("p{number}");
        // The first answers are lost, others are cut.
        for fault in [Fault::LoseAnswer, Fault::Status(503), Fault::Drop] {
            place.server.fault(FaultRule {
                method: Some("PUT"),
                ..FaultRule::first(1, fault, "/data/")
            });
        }
        let placed = follower
            .place(vec![write(&follower, &partition, number, 50).unwrap()])
            .unwrap();
        assert!(!partitions(&place.read("c")).contains(&partition));
        assert_eq!(leading.commit_with(Vec::new(), &placed).unwrap(), placed);
        assert!(partitions(&place.read("c")).contains(&partition));
        // Process 0 knows that the data is there, and reads it.
        let records = store.records(&recipe(1)).unwrap();
        let found = records.of(&partition.as_str().into());
        let artifact = store.artifact(&recipe(1), "rows", rows(0, 0).schema(), found).unwrap();
        let read = artifact.read_whole(&partition.as_str().into(), None).unwrap();
        assert_eq!(read, rows(number, 50));
        // What it does not commit does not count.
        drop(
            follower
                .place(vec![write(&follower, "late", number + 4, 50).unwrap()])
                .unwrap(),
        );
    }
    leading.finish([]).unwrap();
    drop((leading, store));
    assert_eq!(partitions(&place.read("d")), ["p1", "p3"]);
    assert!(follow("b").is_err());
}

/// What another process writes, on this machine or on one that uses the same copy, is left alone.
#[test]
fn who_follows_removes_old_files_of_processes_that_are_no_more_alone() {
    let place = Place::new();
    let store = place.run("a").unwrap();
    let leading = writer(&store);
    let following = place.open("b", Access::Follow { run_id: "one".into() }).unwrap();
    let data = following.recipe_folder(&recipe(1)).join("data");
    std::fs::create_dir_all(&data).unwrap();
    let own = std::process::id();
    // No process has the number.
    let old = [format!(".tmp-{own}-900"), ".tmp-4194999-1".into(), "x.parquet".into()];
    // Of another machine, perhaps, where a process has this one's number.
    let fetched = [format!(".fetch-{own}-1"), ".fetch-4194999-1".into()];
    let new = [".tmp-4194999-2", ".fetch-4194999-2"];
    for name in old.iter().chain(&fetched).map(String::as_str).chain(new) {
        std::fs::write(data.join(name), "half").unwrap();
    }
    for name in old.iter().chain(&fetched) {
        make_old(&data.join(name));
    }
    following.follow_writer(&recipe(1), []).unwrap();
    let left = [old[0].as_str(), &old[2], new[0], new[1]];
    assert_eq!(names(&data), left.map(|name| name.to_owned()).into());

    // A run keeps what may be being fetched, alone.
    for name in &fetched {
        std::fs::write(data.join(name), "half").unwrap();
    }
    make_old(&data.join(&fetched[0]));
    drop((leading, store));
    drop(place.run("b").unwrap());
    let left = [fetched[1].as_str(), new[1]];
    assert_eq!(names(&data), left.map(|name| name.to_owned()).into());
}

fn make_old(path: &Path) {
    let file = std::fs::File::options().write(true).open(path).unwrap();
    let before = std::time::SystemTime::now() - Duration::from_secs(2 * 24 * 3600);
    file.set_modified(before).unwrap();
}

#[test]
fn a_prefix_with_other_objects_is_left_alone() {
    let place = Place::new();
    place.put("mine.txt", b"mine");
    let error = place.run("a").err().unwrap();
    assert!(
        matches!(&error, StoreError::Foreign { found, .. } if found == "mine.txt"),
        "{error}"
    );
    assert_eq!(place.object_names(), BTreeSet::from(["mine.txt".to_string()]));
}

#[test]
fn data_that_is_gone_or_another_is_not_used() {
    let place = Place::new();
    let store = place.run("a").unwrap();
    commit(&store, &[1]).unwrap();
    commit(&store, &[3]).unwrap();
    commit(&store, &[5]).unwrap();
    drop(store);
    let [gone, short, other] = ["p1", "p3", "p5"].map(|partition| place.data_of(partition));
    std::fs::remove_file(place.objects().join(&gone)).unwrap();
    place.put(&short, b"PAR1");
    let bytes = std::fs::read(place.objects().join(&other)).unwrap();
    let storage = place.server.storage();
    storage.put(&url().join(&other).unwrap(), vec![0; bytes.len()]).unwrap();

    // Also where the copy still has them: others do not.
    for machine in ["a", "b"] {
        let store = place.run(machine).unwrap();
        let records = store.records(&recipe(1)).unwrap();
        let lost: Vec<_> = records
            .lost()
            .iter()
            .map(|lost| (lost.partition.to_string(), lost.found))
            .collect();
        assert_eq!(
            lost,
            [("p1".to_string(), None), ("p3".to_string(), Some(4))],
            "{machine}"
        );
        assert!(records.get(&"p5".into(), &key(5)).is_some());
    }
    let store = place.read("c");
    let records = store.records(&recipe(1)).unwrap();
    let artifact = store
        .artifact(&recipe(1), "rows", rows(0, 0).schema(), records.of(&"p5".into()))
        .unwrap();
    let error = artifact.read_whole(&"p5".into(), None).unwrap_err().to_string();
    assert!(
        error.contains("s3://bucket/state/") && error.contains("digest"),
        "{error}"
    );
    assert!(!names(&place.copy("c")).iter().any(|name| name.contains("/data/")));
}

#[test]
fn runs_are_found_on_other_machines_and_forgotten_where_they_are_removed() {
    let place = Place::new();
    let store = place.run("a").unwrap();
    let folder = store.create_run_folder("r1").unwrap();
    std::fs::write(folder.join("events.jsonl"), "one\n").unwrap();
    store.upload_run("r1").unwrap();
    std::fs::write(folder.join("events.jsonl"), "one\ntwo\n").unwrap();
    store.upload_run("r1").unwrap();
    drop(store);
    let store = place.read("b");
    assert_eq!(store.runs().unwrap(), ["r1"]);
    let events = store.run_folder("r1").unwrap().join("events.jsonl");
    assert_eq!(std::fs::read_to_string(events).unwrap(), "one\ntwo\n");
    std::fs::remove_dir_all(place.objects().join("runs")).unwrap();
    for machine in ["a", "b"] {
        assert_eq!(place.read(machine).runs().unwrap(), Vec::<String>::new());
    }
}
