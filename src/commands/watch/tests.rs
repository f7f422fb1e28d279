use std::sync::mpsc;

use super::*;
use crate::arguments::{Command, parse};

/// Sources that are listed for no other reason within the time of a test.
#[test]
fn a_shard_is_taken_up_because_the_file_system_tells_of_it() {
    let place = tempfile::tempdir().unwrap();
    let shards = place.path().join("shards");
    std::fs::create_dir_all(shards.join("de/de_0001")).unwrap();
    std::fs::write(shards.join("de/de_0001/metadata.parquet"), "").unwrap();
    let pipeline = place.path().join("pipeline.yaml");
    let stages = format!(
        "scan: {{uses: manifest.scan, with: {{shards: \"{}\"}}}}",
        shards.display()
    );
    std::fs::write(&pipeline, format!("flow: 1\nstages:\n  {stages}\n")).unwrap();
    let state = place.path().join("state");
    let words = [
        "flow",
        "run",
        pipeline.to_str().unwrap(),
        "--watch",
        "--settle",
        "0.2",
        "--state",
    ];
    let words = words.into_iter().chain(state.to_str());
    let Command::Run(arguments) = parse(words).unwrap().command else {
        panic!("it is another command");
    };
    let registry = Registry::new(crate::kinds::all()).unwrap();
    let mut watch = Watch {
        arguments: &arguments,
        registry: &registry,
        settle: Duration::from_secs_f64(arguments.settle),
        seldom: Duration::from_secs(86_400),
        events: None,
    };
    let signals = Signals {
        came: Arc::default(),
        ids: Vec::new(),
    };
    // A test that would wait for ever fails.
    let came = Arc::clone(&signals.came);
    let (_ends, ended) = mpsc::channel::<()>();
    thread::spawn(move || {
        if ended.recv_timeout(Duration::from_secs(300)) == Err(mpsc::RecvTimeoutError::Timeout) {
            came.store(SIGTERM as usize, Ordering::Release);
        }
    });
    let before = watch
        .listing()
        .unwrap_or_else(|failure| panic!("{}", failure.render(screen::style())));
    assert!(
        watch.waiting().contains("the file system tells of them"),
        "{}",
        watch.waiting()
    );
    let added = place.path().join("added");
    std::fs::create_dir_all(&added).unwrap();
    std::fs::write(added.join("metadata.parquet"), "").unwrap();
    std::fs::rename(&added, shards.join("de/de_0002")).unwrap();
    match watch.wait(Some(before), false, &signals) {
        Waited::Listed(now) => assert!(now.is_some() && now != Some(before)),
        Waited::Signal => panic!("nobody told of the shard"),
    }
}
