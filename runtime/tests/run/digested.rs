//! Sources that digest the files that they read.

use std::fs;

use crate::Place;
use crate::toys::once::write_aged;

/// The runtime would see the files as they were before.
const WRITTEN_WHEN_READ: &str = "before: '12'";

fn place(with: &str) -> Place {
    let place = Place::new();
    fs::remove_dir_all(place.path("shards")).unwrap();
    fs::create_dir(place.path("shards")).unwrap();
    for name in ["a", "b", "c"] {
        write_aged(&place.path(&format!("shards/{name}.txt")), "7");
    }
    pipeline(&place, with);
    place
}

fn pipeline(place: &Place, with: &str) {
    let more = if with.is_empty() {
        String::new()
    } else {
        format!(", {with}")
    };
    place.pipeline(&format!(
        "flow: 1\nparams:\n  shards: {{required: true}}\n  out: {{required: true}}\nstages:\n  \
         once: {{uses: toy.once, with: {{folder: \"${{shards}}\"{more}}}}}\n  \
         out: {{uses: toy.write, from: once, with: {{folder: \"${{out}}\"}}}}\n"
    ));
}

#[test]
fn files_are_not_read_before_the_source_reads_them() {
    let place = place(WRITTEN_WHEN_READ);
    place.run(&[]);
    let rows = || fs::read_to_string(place.path("out/rows.txt")).unwrap();
    assert_eq!(rows(), "a 0 12\nb 0 12\nc 0 12\n");
    // What was read is what is known: nothing to do, and another content is seen.
    pipeline(&place, "");
    assert!(place.plan(&[]).is_empty());
    write_aged(&place.path("shards/b.txt"), "345");
    let summary = place.run(&[]);
    assert_eq!((summary.stages[0].ran, summary.stages[0].reused), (1, 2));
    assert_eq!(rows(), "a 0 12\nb 0 345\nc 0 12\n");
    // The same content as at first, digested by the runtime: the same keys.
    write_aged(&place.path("shards/b.txt"), "12");
    pipeline(&place, "leave: true");
    fs::remove_file(place.path("state/sources.json")).unwrap();
    assert_eq!(place.run(&[]).stages[0].ran, 0);
}

/// Which shows that the test above sees a reading by the runtime.
#[test]
fn files_that_the_runtime_digests_must_not_change_when_they_are_read() {
    let place = place(&format!("leave: true, {WRITTEN_WHEN_READ}"));
    let error = place.try_run(&[]).unwrap_err().to_string();
    assert!(error.contains("changed while they were read"), "{error}");
}

#[test]
fn a_file_that_changes_while_the_source_reads_it_ends_the_run() {
    let place = place("between: '99'");
    let error = place.try_run(&[]).unwrap_err().to_string();
    assert!(
        error.contains("changes while it is read") || error.contains("fill whole buffer"),
        "{error}"
    );
    assert!(!place.path("out/rows.txt").exists());
}
