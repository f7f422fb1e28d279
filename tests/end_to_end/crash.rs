//! `kill -9` anywhere loses at most what was in flight: the next run ends with the same bytes.

use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::Duration;

use crate::binary::{Workplace, expect_code, stderr, with_failpoints};

/// The named points of the commit protocol: `runtime/src/failpoints.rs`.
const KILL_POINTS: [&str; 7] = [
    "data-written",
    "data-renamed",
    "record-written",
    "record-linked",
    "index-written",
    "export-renaming",
    "export-done",
];

#[test]
fn killed_at_every_point_of_the_commit_protocol() {
    let whole = Workplace::new("micro");
    whole.build_manifests(&[]);
    let expected = whole.out_bytes();
    for point in KILL_POINTS {
        let place = Workplace::new("micro");
        for pass in [1, 3] {
            let output = with_failpoints(&place.manifest_command("run", &[]))
                .env("FLOW_KILL_AT", format!("{point}:{pass}"))
                .output()
                .unwrap();
            // A later pass may not come, when what is left to do is less: then the run simply ends well.
            let killed = output.status.signal() == Some(9);
            assert!(killed || output.status.success(), "{point}:{pass}\n{}", stderr(&output));
            if pass == 1 {
                assert!(killed, "the run never came to {point}");
            }
        }
        place.build_manifests(&[]);
        assert!(place.out_bytes() == expected, "other bytes after a kill at {point}");
    }
}

#[test]
fn the_program_itself_has_no_failpoints() {
    let place = Workplace::new("micro");
    let mut run = place.manifest_command("run", &[]);
    expect_code(&run.env("FLOW_KILL_AT", "data-written:1").output().unwrap(), 0);
}

#[test]
fn killed_at_random_times() {
    let whole = Workplace::new("micro");
    whole.build_manifests(&[]);
    let expected = whole.out_bytes();
    let place = Workplace::new("micro");
    // Spread over the length of a run; what is committed shortens the next.
    for milliseconds in [30, 90, 170, 260, 110, 400, 60, 700] {
        let mut child = place
            .manifest_command("run", &[])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(milliseconds));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    place.build_manifests(&[]);
    assert!(place.out_bytes() == expected, "other bytes after random kills");
}

#[test]
fn a_second_run_on_one_state_directory_is_refused() {
    let place = Workplace::new("micro");
    place.build_manifests(&[]);
    let lock = std::fs::OpenOptions::new()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(place.path("state").join("lock"))
        .unwrap();
    lock.lock().unwrap();
    let output = place.manifest_command("run", &["min_quality=0.6"]).output().unwrap();
    expect_code(&output, 3);
    drop(lock);
    place.build_manifests(&["min_quality=0.6"]);
}

#[test]
fn interrupt_ends_with_130_and_keeps_what_was_done() {
    let place = Workplace::new("mini");
    let mut child = place
        .manifest_command("run", &[])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(300));
    // SAFETY: kill(2) with a process id of our own child; no memory is involved.
    let sent = unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    assert_eq!(sent, 0);
    let code = child.wait().unwrap().code();
    assert!(matches!(code, Some(130 | 0)), "{code:?}");
    place.build_manifests(&[]);
    let whole = Workplace::new("mini");
    whole.build_manifests(&[]);
    assert!(place.out_bytes() == whole.out_bytes());
}
