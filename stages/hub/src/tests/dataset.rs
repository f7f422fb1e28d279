//! Datasets of the hub: references, lists of files, and fetching.

use super::*;
use crate::{DatasetReference, RepositoryKind};

fn dataset(text: &str) -> DatasetReference {
    DatasetReference::parse(text).unwrap().unwrap()
}

#[test]
fn references_to_datasets_are_read_and_hostile_ones_refused() {
    for (text, revision, config, split) in [
        ("hf://datasets/o/n", "main", None, None),
        ("hf://datasets/o/n@v1", "v1", None, None),
        (
            "hf://datasets/o/n/hi_in:train.clean.100",
            "main",
            Some("hi_in"),
            Some("train.clean.100"),
        ),
        (
            "hf://datasets/o/n@refs/convert/parquet/hi_in",
            "refs/convert/parquet",
            Some("hi_in"),
            None,
        ),
        ("hf://datasets/o/n/train/hindi", "main", Some("train/hindi"), None),
        ("hf://datasets/o/n@refs/pr/3:test", "refs/pr/3", None, Some("test")),
    ] {
        let reference = dataset(text);
        assert_eq!(reference.repository.kind, RepositoryKind::Dataset);
        assert_eq!(reference.repository.repository(), "o/n");
        let read = (reference.config.as_deref(), reference.split.as_deref());
        assert_eq!(
            (reference.repository.revision.as_str(), read),
            (revision, (config, split)),
            "{text}"
        );
        assert_eq!(reference.to_string(), text);
    }
    assert!(DatasetReference::parse("hf://o/n").is_none());
    for bad in [
        "hf://datasets/",
        "hf://datasets/o",
        "hf://datasets/o/",
        "hf://datasets/../n",
        "hf://datasets/o/n@",
        "hf://datasets/o/n@refs/..",
        "hf://datasets/o/n@refs/convert/..",
        "hf://datasets/o/n/",
        "hf://datasets/o/n/..",
        "hf://datasets/o/n/a//b",
        "hf://datasets/o/n:",
        "hf://datasets/o/n:a/b",
        "hf://datasets/o/n:a\nb",
    ] {
        assert!(DatasetReference::parse(bad).unwrap().is_err(), "{bad}");
    }
    // A dataset is not taken for a model.
    assert!(HubReference::parse("hf://datasets/o/n").unwrap().is_err());
}

/// The repository of a dataset, with other addresses than that of a model.
fn served(files: &[(&str, Vec<u8>)], request: &Request) -> Answer {
    let path = &request.path;
    let as_model = match path.strip_prefix("/datasets") {
        Some(rest) => Some(rest.to_owned()),
        None => path
            .strip_prefix("/api/datasets/")
            .map(|rest| format!("/api/models/{rest}")),
    };
    match as_model {
        Some(path) => {
            let request = Request {
                path,
                ..request.clone()
            };
            repository(files, &request)
        }
        None => Answer::refused(404, "RepoNotFound"),
    }
}

#[test]
fn files_of_a_dataset_are_listed_then_fetched_once() {
    let files = vec![
        ("README.md", b"hello".to_vec()),
        ("hi/a.parquet", bytes()),
        ("hi/b.parquet", b"b".to_vec()),
    ];
    let server = Server::new(move |request, _| served(&files, request));
    let test_cache = TestCache::new();
    let mut hub = test_cache.hub(&server.address, Some("secret"));
    let reference = dataset("hf://datasets/o/n@refs/convert/parquet").repository;
    let listed = hub.dataset(&reference, &mut |_| true).unwrap().unwrap();
    assert_eq!(listed.files, ["README.md", "hi/a.parquet", "hi/b.parquet"]);
    let [request] = &server.requests()[..] else {
        panic!("one request");
    };
    assert_eq!(request.path, "/api/datasets/o/n/revision/refs%2Fconvert%2Fparquet");
    assert_eq!(request.headers["authorization"], "Bearer secret");
    let root = hub.cache.join("datasets--o--n");
    assert!(!root.join("blobs").exists(), "listing downloads nothing");
    assert_eq!(
        std::fs::read_to_string(root.join("refs/refs/convert/parquet")).unwrap(),
        COMMIT
    );

    let paths = hub
        .fetch_files(&listed, &["hi/a.parquet"], &mut |_| true)
        .unwrap()
        .unwrap();
    assert_eq!(paths, [root.join("snapshots").join(COMMIT).join("hi/a.parquet")]);
    assert_eq!(std::fs::read(&paths[0]).unwrap(), bytes());
    let before = server.requests().len();
    hub.fetch_files(&listed, &["hi/a.parquet"], &mut |_| true)
        .unwrap()
        .unwrap();
    assert_eq!(server.requests().len(), before, "it is in the cache");

    // Without the network all files are still known, and one that was not fetched is an error.
    hub.offline = true;
    let again = hub.dataset(&reference, &mut |_| true).unwrap().unwrap();
    assert_eq!(
        (again.files, again.commit),
        (listed.files.clone(), listed.commit.clone())
    );
    assert!(hub.fetch_files(&listed, &["hi/a.parquet"], &mut |_| true).is_ok());
    match hub.fetch_files(&listed, &["hi/a.parquet", "hi/b.parquet"], &mut |_| true) {
        Err(HubError::Unavailable { message, .. }) => assert!(message.contains("hi/b.parquet"), "{message}"),
        other => panic!("{other:?}"),
    }
    assert_eq!(server.requests().len(), before);
    hub.offline = false;
    assert!(
        hub.fetch_files(&listed, &["hi/b.parquet"], &mut |_| false)
            .unwrap()
            .is_none()
    );
}

#[test]
fn a_hub_that_fails_leaves_the_files_listed_before_and_a_gated_dataset_is_explained() {
    let files = vec![("a.parquet", b"a".to_vec())];
    let server = Server::new(move |request, number| match number {
        1 => served(&files, request),
        2 => Answer::new(503, &[], b""),
        _ => Answer::refused(403, "GatedRepo"),
    });
    let test_cache = TestCache::new();
    let hub = test_cache.hub(&server.address, None);
    let reference = dataset("hf://datasets/o/n").repository;
    let list = || hub.dataset(&reference, &mut |_| true);
    let first = list().unwrap().unwrap();
    assert_eq!(list().unwrap().unwrap().files, first.files);
    match list() {
        Err(HubError::Unavailable { message, help }) => {
            assert!(message.contains("gated"), "{message}");
            assert!(help.contains("/datasets/o/n"), "{help}");
        }
        other => panic!("{other:?}"),
    }
}
