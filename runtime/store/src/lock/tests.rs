use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::*;

/// As on a file system that other machines see.
const SHARED: Patience = Patience {
    beat: Duration::from_millis(5),
    stale: Duration::from_millis(400),
    look: Duration::from_millis(5),
    settle: Duration::from_millis(50),
    one_machine: Some(false),
    always_beats: false,
};

fn take(path: &Path, run: &str) -> Result<Lock, StoreError> {
    Lock::take(path, "the state directory", run)
}

/// A record as the process of another machine writes it. That its kernel's lock is not seen here is what some file
/// systems do.
fn of_another_machine(path: &Path, beat: u64) {
    let record = serde_json::json!({
        "host": "far", "pid": 77, "run": "theirs", "boot": "another", "token": "t", "beat": beat,
        "temporary": [".tmp-export-left"],
    });
    // Over what is there: a reader that comes meanwhile must not find an empty file.
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .unwrap();
    let record = record.to_string();
    file.write_all_at(record.as_bytes(), 0).unwrap();
    file.set_len(record.len() as u64).unwrap();
}

#[test]
fn the_second_is_told_who_the_first_is_and_a_dead_owner_is_no_obstacle() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lock");
    let first = take(&path, "run-1").unwrap();
    let Err(StoreError::Held { holder, .. }) = take(&path, "run-2") else {
        panic!("two owners");
    };
    assert_eq!((holder.run.as_str(), holder.pid), ("run-1", std::process::id()));
    assert!(!holder.host.is_empty());
    assert_eq!(holder_of(&path), Some(holder));
    drop(first);
    assert_eq!(holder_of(&path), None);
    assert!(!path.exists());
    // What the owner of an earlier version left, or one that died: a record and no lock of the kernel.
    for left in ["", "{\"host\":\"far\",\"pid\":7,\"run\":\"r\"}", "{\"host", "\0\0\0\0"] {
        std::fs::write(&path, left).unwrap();
        assert_eq!(holder_of(&path), None, "{left:?}");
        drop(take(&path, "run-2").unwrap());
    }
}

#[test]
fn a_lock_is_never_held_twice() {
    for patience in [PATIENCE, SHARED] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let (held, most, taken) = (AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        if let Ok(lock) = Lock::take_with(&path, "the folder", "r", &patience) {
                            most.fetch_max(held.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                            taken.fetch_add(1, Ordering::SeqCst);
                            held.fetch_sub(1, Ordering::SeqCst);
                            drop(lock);
                        }
                    }
                });
            }
        });
        assert_eq!(most.into_inner(), 1);
        assert!(taken.into_inner() > 0);
        assert!(!path.exists());
    }
}

#[test]
fn an_owner_is_dead_once_its_record_stood_still_by_the_watchers_own_clock() {
    let (start, stale) = (Instant::now(), Duration::from_secs(60));
    let after = |seconds| start + Duration::from_secs(seconds);
    let mut watch = Watch::default();
    assert_eq!(watch.look("beat 7", start, stale), Owner::Unknown);
    assert_eq!(watch.look("beat 7", after(59), stale), Owner::Unknown);
    assert_eq!(watch.look("beat 7", after(60), stale), Owner::Dead);
    // A move is a move, whatever the clock of the other machine says: backwards too.
    assert_eq!(watch.look("beat 6", after(61), stale), Owner::Lives);
}

#[test]
fn a_living_owner_on_another_machine_is_believed_and_a_dead_one_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lock");
    // It beats, but this machine's kernel knows of no lock.
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        of_another_machine(&path, 0);
        scope.spawn(|| {
            for beat in 1.. {
                if ended.load(Ordering::SeqCst) {
                    break;
                }
                of_another_machine(&path, beat);
                thread::sleep(SHARED.beat);
            }
        });
        let refused = Lock::take_with(&path, "the folder", "ours", &SHARED);
        // Before anything is asserted: the scope waits for the beating thread.
        ended.store(true, Ordering::SeqCst);
        let Err(StoreError::Held { holder, .. }) = refused else {
            panic!("two machines have the lock");
        };
        assert_eq!(
            (holder.host.as_str(), holder.pid, holder.run.as_str()),
            ("far", 77, "theirs")
        );
    });
    // It has ended without a word; what it wrote down is known to whoever comes after it.
    let lock = Lock::take_with(&path, "the folder", "ours", &SHARED).unwrap();
    assert_eq!(lock.left(), [".tmp-export-left"]);
    lock.note(&[]).unwrap();
    drop(lock);
    assert!(!path.exists());
    // On a file system of one machine no other machine can be meant: it is not waited for.
    of_another_machine(&path, 0);
    let alone = Patience {
        stale: Duration::from_secs(3600),
        one_machine: Some(true),
        ..SHARED
    };
    drop(Lock::take_with(&path, "the folder", "ours", &alone).unwrap());
    // A process of this machine that died is not waited for either: the kernel knows.
    let dead = LockRecord::new("dead", Vec::new());
    dead.write(&File::create(&path).unwrap()).unwrap();
    let shared = Patience {
        stale: Duration::from_secs(3600),
        ..SHARED
    };
    drop(Lock::take_with(&path, "the folder", "ours", &shared).unwrap());
}

#[test]
fn an_owner_that_was_taken_for_dead_learns_of_it_and_leaves_the_other_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lock");
    let lock = Lock::take_with(&path, "the folder", "ours", &SHARED).unwrap();
    let first = std::fs::read_to_string(&path).unwrap();
    // It beats.
    while std::fs::read_to_string(&path).unwrap() == first {
        thread::sleep(SHARED.beat);
    }
    lock.check().unwrap();
    // The beat that is being written may go over it once.
    while lock.check().is_ok() {
        of_another_machine(&path, 3);
        thread::sleep(SHARED.beat * 4);
    }
    let Err(StoreError::Held { holder, .. }) = lock.note(&["x"]) else {
        panic!("a lost lock still writes");
    };
    assert_eq!(holder.host, "far");
    drop(lock);
    assert!(std::fs::read_to_string(&path).unwrap().contains("theirs"));
}

#[test]
fn names_that_were_written_down_outlive_their_owner() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lock");
    let lock = take(&path, "one").unwrap();
    assert!(lock.left().is_empty());
    lock.note(&[".tmp-export-long-name-that-goes", "b"]).unwrap();
    lock.note(&["c"]).unwrap();
    drop(lock);
    let lock = take(&path, "two").unwrap();
    assert_eq!(lock.left(), ["c"]);
    // Until they are taken back they stay: this owner may die before it has removed them.
    assert!(std::fs::read_to_string(&path).unwrap().contains("\"c\""));
    lock.note(&[]).unwrap();
    drop(lock);
    assert!(!path.exists());
}

#[test]
fn a_lock_file_that_cannot_be_opened_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lock");
    std::os::unix::fs::symlink(folder.path().join("none/at/all"), &path).unwrap();
    assert!(matches!(take(&path, "r"), Err(StoreError::Io { .. })));
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(matches!(take(&path, "r"), Err(StoreError::Io { .. })));
    assert!(take(&folder.path().join("no/folder"), "r").is_err());
}

#[test]
fn who_goes_on_is_waited_for_and_who_does_not_is_named() {
    let (beat, stale) = (Duration::from_millis(20), Duration::from_millis(400));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lock");
    let wait = || Lock::wait_for(&path, "the copy of the state directory", beat, stale);
    let held = wait().unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| wait().map(drop));
        thread::sleep(3 * stale);
        assert!(!waiting.is_finished());
        drop(held);
        waiting.join().unwrap().unwrap();
    });
    // As of a process that is stopped.
    let mut stopped = wait().unwrap();
    let (end, thread) = stopped.beating.take().unwrap();
    drop(end);
    thread.join().unwrap();
    let error = wait().map(drop).unwrap_err().to_string();
    assert!(
        error.contains(&format!("(process {} on ", std::process::id())),
        "{error}"
    );
    drop(stopped);
    wait().map(drop).unwrap();
}
