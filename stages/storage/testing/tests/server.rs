//! Against a server of S3's protocol on this machine.

use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::time::Duration;

use bytes::Bytes;
use flow_storage::{Entry, FileVersion, Location, ObjectUrl, ObjectVersion, Storage, StorageError, StorageFault};
use flow_storage_testing::{Fault, FaultRule, SECRET_ACCESS_KEY, TestServer};

fn url(text: &str) -> ObjectUrl {
    match Location::parse(text).unwrap() {
        Location::Object(url) => url,
        Location::Local(path) => panic!("{} is a path", path.display()),
    }
}

/// A server with the bucket `bucket`, and its folder.
fn server() -> (tempfile::TempDir, TestServer) {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("bucket")).unwrap();
    let server = TestServer::start(folder.path()).unwrap();
    (folder, server)
}

fn bytes(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at * at / 7 + at) as u8).collect()
}

fn write(folder: &tempfile::TempDir, key: &str, bytes: &[u8]) {
    let path = folder.path().join("bucket").join(key);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, bytes).unwrap();
}

#[test]
fn prefixes_are_listed_whole_and_by_folder() {
    let (folder, server) = server();
    let storage = server.storage();
    // More than a page of a thousand.
    for at in 0..1_050 {
        write(&folder, &format!("shards/hi/{at:04}/a"), b"x");
    }
    write(&folder, "shards/ta/0000/क ख+%20.tar", b"tar");
    write(&folder, "shards/readme", b"r");
    write(&folder, "shards-not/x", b"r");
    let all: Vec<Entry> = storage
        .list_and_remember(&url("s3://bucket/shards"))
        .unwrap()
        .iter()
        .collect();
    assert_eq!(all.len(), 1_052);
    assert!(all.is_sorted_by(|a, b| a.url < b.url));
    let folder_of = storage.list_folder(&url("s3://bucket/shards")).unwrap();
    assert_eq!(
        folder_of.folders,
        [url("s3://bucket/shards/hi"), url("s3://bucket/shards/ta")]
    );
    assert_eq!(folder_of.objects.len(), 1);
    assert_eq!(
        storage
            .list_folder(&url("s3://bucket/shards/hi"))
            .unwrap()
            .folders
            .len(),
        1_050
    );
    // What was listed needs no further request, whether it is there or not.
    let before = storage.counts().requests();
    let odd = url("s3://bucket/shards/ta/0000/क ख+%20.tar");
    assert_eq!(storage.look(&odd).unwrap().unwrap().size, 3);
    assert_eq!(storage.look(&url("s3://bucket/shards/none")).unwrap(), None);
    assert_eq!(storage.counts().requests(), before);
    assert_eq!(&storage.read(&odd, 10).unwrap()[..], b"tar");
    assert!(storage.list(&url("s3://bucket/none")).unwrap().is_empty());
    storage.delete(&odd).unwrap();
    storage.delete(&odd).unwrap();
    assert_eq!(storage.look(&odd).unwrap(), None);
}

/// Looks at `count` objects of `s3://bucket/looked` from the first on, and says how many requests that takes.
fn looks(storage: &Storage, count: usize) -> u64 {
    let before = storage.counts().requests();
    for at in 0..count {
        let found = storage
            .look_at_many(&url(&format!("s3://bucket/looked/{at:04}")))
            .unwrap();
        let alone = storage.stat(&url(&format!("s3://bucket/looked/{at:04}"))).unwrap();
        assert_eq!(
            FileVersion::of_object(&found.unwrap()),
            FileVersion::of_object(&alone),
            "{at}"
        );
    }
    // One for each of `stat`.
    storage.counts().requests() - before - count as u64
}

#[test]
fn a_folder_is_listed_where_many_of_its_objects_are_looked_at() {
    let (folder, server) = server();
    for at in 0..1_050 {
        write(&folder, &format!("looked/{at:04}"), &vec![b'x'; at]);
    }
    // A folder that a program shows by an object.
    write(&folder, "looked/0003.d/x", b"x");
    server.list_etags();
    let storage = server.storage();
    // Eight looks, and two pages.
    assert_eq!(looks(&storage, 900), 10);
    assert_eq!(storage.look_at_many(&url("s3://bucket/looked/none")).unwrap(), None);
    assert_eq!(looks(&storage, 1_050), 0);

    // After two folders the ones beside them are listed at once.
    for at in 0..60 {
        write(&folder, &format!("beside/{}/{:02}", at / 20, at % 20), b"x");
    }
    let before = storage.counts().requests();
    for at in 0..60 {
        let at = url(&format!("s3://bucket/beside/{}/{:02}", at / 20, at % 20));
        assert!(storage.look_at_many(&at).unwrap().is_some());
    }
    assert_eq!(storage.counts().requests() - before, 8 + 1 + 8 + 1 + 1);

    // What is written is looked at again.
    storage.put(&url("s3://bucket/looked/0007"), &b"other"[..]).unwrap();
    assert_eq!(looks(&storage, 9), 1);

    // A folder with more than eight pages is listed after more looks.
    for at in 0..8_000 {
        write(&folder, &format!("looked/more/{at:04}"), b"");
    }
    let storage = server.storage();
    let requests = looks(&storage, 100);
    // 32 looks, eight pages (or one more) for nothing, ten that are kept.
    assert!((49..=52).contains(&requests), "{requests}");

    // Where listings are forbidden, all are looked at.
    server.fault(FaultRule {
        method: Some("GET"),
        ..FaultRule::always(Fault::Status(403), "list-type")
    });
    let storage = server.storage();
    assert_eq!(looks(&storage, 100), 102);
    server.clear();

    // Listings without ETags say another thing than looks.
    let (folder, server) = self::server();
    for at in 0..50 {
        write(&folder, &format!("looked/{at:04}"), b"x");
    }
    assert_eq!(looks(&server.storage(), 50), 52);
}

#[test]
fn an_object_is_read_like_a_file() {
    let (folder, server) = server();
    let storage = server.storage();
    let all = bytes(3_000_017);
    write(&folder, "large", &all);
    write(&folder, "empty", b"");
    let mut reader = storage.open(&url("s3://bucket/large")).unwrap();
    let mut read = Vec::new();
    reader.read_to_end(&mut read).unwrap();
    assert!(read == all);
    // Ranges grow: few requests for many bytes.
    assert!(storage.counts().get <= 6, "{:?}", storage.counts());
    let mut part = vec![0; 1_000];
    for at in [2_999_017u64, 5, 1_500_000, 1_500_500] {
        reader.seek(SeekFrom::Start(at)).unwrap();
        reader.read_exact(&mut part).unwrap();
        assert!(part == all[at as usize..at as usize + 1_000], "{at}");
    }
    reader.seek(SeekFrom::End(-1)).unwrap();
    assert_eq!(reader.read(&mut part).unwrap(), 1);
    assert_eq!(reader.read(&mut part).unwrap(), 0);
    assert!(reader.seek(SeekFrom::Current(-4_000_000)).is_err());
    assert!(reader.read_range(10..20).unwrap() == all[10..20]);
    assert!(reader.read_range(3_000_000..3_000_018).is_err());
    let mut copy = Vec::new();
    reader.download(folder.path()).unwrap().read_to_end(&mut copy).unwrap();
    assert!(copy == all);
    // A folder that is not there is made, where it can be.
    reader.download(&folder.path().join("made/here")).unwrap();
    write(&folder, "file", b"x");
    let error = reader.download(&folder.path().join("bucket/file/none")).unwrap_err();
    let fault = flow_storage::StorageError::in_io(&error).map(|error| error.fault);
    assert_eq!(fault, Some(StorageFault::Cache), "{error}");
    let mut empty = storage.open(&url("s3://bucket/empty")).unwrap();
    assert_eq!(empty.read(&mut part).unwrap(), 0);
    assert_eq!(
        storage.read(&url("s3://bucket/large"), 100).unwrap_err().fault,
        StorageFault::TooLarge
    );
}

#[test]
fn an_object_that_changes_is_not_mixed_with_the_one_before() {
    let (folder, server) = server();
    let storage = server.storage();
    write(&folder, "a", &vec![1; 1_000_000]);
    let mut reader = storage.open(&url("s3://bucket/a")).unwrap();
    reader.read_exact(&mut [0; 10]).unwrap();
    write(&folder, "a", &vec![2; 1_000_000]);
    reader.seek(SeekFrom::Start(900_000)).unwrap();
    let error = reader.read(&mut [0; 10]).unwrap_err().to_string();
    assert!(
        error.starts_with("s3://bucket/a: it was changed while it is read"),
        "{error}"
    );
}

#[test]
fn faults_that_pass_are_waited_for() {
    let (folder, server) = server();
    let storage = server.storage();
    let all = bytes(700_000);
    write(&folder, "a/b", &all);
    for fault in [
        Fault::Drop,
        Fault::Status(503),
        Fault::Status(429),
        Fault::Status(500),
        Fault::Truncate,
        Fault::Delay(Duration::from_millis(300)),
    ] {
        server.clear();
        server.fault(FaultRule::first(2, fault, "bucket"));
        assert_eq!(storage.list(&url("s3://bucket/a")).unwrap().len(), 1, "{fault:?}");
        server.clear();
        server.fault(FaultRule::first(2, fault, "/bucket/a/b"));
        assert!(
            storage.read(&url("s3://bucket/a/b"), u64::MAX).unwrap() == all,
            "{fault:?}"
        );
        server.clear();
        server.fault(FaultRule::first(2, fault, "/bucket/new"));
        storage.put(&url("s3://bucket/new"), all.clone()).unwrap();
        assert!(fs::read(folder.path().join("bucket/new")).unwrap() == all, "{fault:?}");
    }
    assert!(storage.counts().failed >= 8, "{:?}", storage.counts());
}

#[test]
fn faults_that_stay_are_errors_that_name_the_object_and_no_secret() {
    let (folder, server) = server();
    write(&folder, "a", b"a");
    let with = |name: &str, value: &str| {
        let environment = server.environment().into_iter().filter(|(set, _)| set != name);
        Storage::with_environment(environment.chain([(name.to_string(), value.to_string())]))
    };
    let storage = with("FLOW_STORAGE_RETRIES", "2");
    let read = |storage: &Storage, key: &str| storage.read(&url(key), 100).unwrap_err();
    assert_eq!(read(&storage, "s3://bucket/none").fault, StorageFault::NotFound);
    let error = storage.list(&url("s3://missing/a")).unwrap_err();
    assert_eq!(error.fault, StorageFault::NoSuchBucket, "{error}");
    server.fault(FaultRule::always(Fault::Status(403), "/bucket/a"));
    let error = read(&storage, "s3://bucket/a");
    assert_eq!(error.fault, StorageFault::PermissionDenied);
    assert!(
        error.to_string().starts_with("s3://bucket/a: permission denied"),
        "{error}"
    );
    server.clear();
    server.fault(FaultRule::always(Fault::Status(503), "/bucket/a"));
    let error = read(&storage, "s3://bucket/a");
    assert!(
        error.to_string().contains("s3://bucket/a") && error.to_string().contains("503"),
        "{error}"
    );
    assert!(error.fault == StorageFault::Unavailable && !error.is_of_the_object());
    server.clear();
    server.fault(FaultRule::always(Fault::Drop, "/bucket/a"));
    assert_eq!(read(&storage, "s3://bucket/a").fault, StorageFault::Unavailable);
    server.clear();
    let wrong = with("AWS_SECRET_ACCESS_KEY", "wrong-secret-hush");
    let error = wrong.list(&url("s3://bucket/a")).unwrap_err();
    assert_eq!(error.fault, StorageFault::Credentials, "{error}");
    assert!(!error.to_string().contains("hush") && !error.to_string().contains(SECRET_ACCESS_KEY));
    let none = Storage::with_environment([("AWS_EC2_METADATA_DISABLED".to_string(), "true".to_string())]);
    let error = read(&none, "s3://bucket/a");
    assert_eq!(error.fault, StorageFault::Credentials);
    server.fault(FaultRule::always(Fault::Delay(Duration::from_secs(600)), "/bucket/a"));
    let slow = Storage::with_environment(slow_environment(&server));
    assert_eq!(read(&slow, "s3://bucket/a").fault, StorageFault::TimedOut);
    let bad = with("FLOW_STORAGE_RETRIES", "many");
    let error = read(&bad, "s3://bucket/a").to_string();
    assert_eq!(
        error,
        "the environment variable FLOW_STORAGE_RETRIES must be a whole number from 1 to 86400"
    );
}

fn slow_environment(server: &TestServer) -> Vec<(String, String)> {
    let mut environment = server.environment();
    environment.retain(|(name, _)| !name.starts_with("FLOW_STORAGE_"));
    environment.push(("FLOW_STORAGE_TIMEOUT_SECONDS".into(), "1".into()));
    environment.push(("FLOW_STORAGE_RETRY_SECONDS".into(), "1".into()));
    environment.push(("FLOW_STORAGE_RETRIES".into(), "1".into()));
    environment
}

#[test]
fn an_object_is_written_whole_or_not_at_all() {
    let (folder, server) = server();
    let storage = server.storage();
    let all = bytes((40 << 20) + 5);
    let large = url("s3://bucket/out/large");
    // Given up: nothing is there, and no upload stays.
    let mut writer = storage.create(&large).unwrap();
    writer.write_all(&all).unwrap();
    drop(writer);
    assert_eq!(storage.look(&large).unwrap(), None);
    assert_eq!(server.requests("DELETE /bucket/out/large?uploadId="), 1);
    // A part that cannot be written.
    let failing = Storage::with_environment(server.environment().into_iter().map(
        |(name, value)| match name.as_str() {
            "FLOW_STORAGE_RETRIES" => (name, "1".to_string()),
            _ => (name, value),
        },
    ));
    server.fault(FaultRule::always(Fault::Status(500), "partNumber=2"));
    let mut writer = failing.create(&large).unwrap();
    let written = writer.write_all(&all).map_err(|error| error.to_string());
    assert!(written.is_err() || writer.finish().is_err());
    assert_eq!(storage.look(&large).unwrap(), None);
    server.clear();
    server.fault(FaultRule::first(1, Fault::Drop, "partNumber=2"));
    let mut writer = storage.create(&large).unwrap();
    for piece in all.chunks(1_000_003) {
        writer.write_all(piece).unwrap();
    }
    assert_eq!(storage.look(&large).unwrap(), None);
    writer.finish().unwrap();
    assert!(fs::read(folder.path().join("bucket/out/large")).unwrap() == all);

    let small = url("s3://bucket/out/small");
    let mut writer = storage.create(&small).unwrap();
    writer.write_all(b"first").unwrap();
    writer.finish().unwrap();
    assert_eq!(
        storage.put_if_absent(&small, "second").unwrap_err().fault,
        StorageFault::AlreadyExists
    );
    assert_eq!(&storage.read(&small, 10).unwrap()[..], b"first");
    storage.put_if_absent(&url("s3://bucket/out/new"), "new").unwrap();
    let web = url("https://host/a");
    assert_eq!(storage.put(&web, "a").unwrap_err().fault, StorageFault::Unsupported);
    assert_eq!(storage.list(&web).unwrap_err().fault, StorageFault::Unsupported);
    assert_eq!(
        storage.put(&url("s3://bucket"), "a").unwrap_err().fault,
        StorageFault::Location
    );
}

#[test]
fn a_copy_that_is_given_up_asks_for_nothing_more_and_leaves_no_file() {
    let (folder, server) = server();
    let bytes = bytes(80 << 20);
    write(&folder, "a.tar", &bytes);
    let copies = tempfile::tempdir().unwrap();
    let reader = server.storage().open(&url("s3://bucket/a.tar")).unwrap();
    let asked = std::cell::Cell::new(0);
    let twice = || asked.replace(asked.get() + 1) < 2;
    assert!(reader.download_while(copies.path(), &twice).unwrap().is_none());
    // Of ten ranges those two, the third, and those that were under way meanwhile.
    assert!(server.requests("GET") <= 6, "{}", server.requests("GET"));
    let mut copy = Vec::new();
    let mut file = reader.download_while(copies.path(), &|| true).unwrap().unwrap();
    file.read_to_end(&mut copy).unwrap();
    assert!(copy == bytes);
    assert_eq!(fs::read_dir(copies.path()).unwrap().count(), 0);
}

/// What a request says of an object that is written while the request is under way is not remembered.
#[test]
fn what_was_asked_before_a_write_is_no_news_of_the_object() {
    let (_folder, server) = server();
    let storage = server.storage();
    let (prefix, object) = (url("s3://bucket/a"), url("s3://bucket/a/b"));
    // By a request for the object, and by a listing. Answers come late, as of before the write.
    for (method, path, ask) in [
        (
            "HEAD",
            "a/b",
            &(|| storage.open(&object).map(drop)) as &(dyn Fn() -> Result<(), StorageError> + Sync),
        ),
        ("GET", "list-type", &|| storage.list_and_remember(&prefix).map(drop)),
    ] {
        storage.forget_all();
        storage.put(&object, "one").unwrap();
        server.clear();
        server.fault(FaultRule {
            method: Some(method),
            ..FaultRule::first(1, Fault::Late(Duration::from_millis(500)), path)
        });
        std::thread::scope(|scope| {
            let asking = scope.spawn(ask);
            while server.requests(path) == 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            // The answer was made.
            std::thread::sleep(Duration::from_millis(200));
            storage.put(&object, "three").unwrap();
            asking.join().unwrap().unwrap();
        });
        assert_eq!(storage.look(&object).unwrap().unwrap().size, 5, "{method}");
        assert_eq!(&storage.read(&object, 10).unwrap()[..], b"three", "{method}");
    }
}

#[test]
fn calls_may_come_from_threads_of_another_runtime() {
    let (folder, server) = server();
    write(&folder, "a", b"a");
    let storage = server.storage();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let read = runtime.block_on(async move { storage.read(&url("s3://bucket/a"), 10) });
    assert_eq!(&read.unwrap()[..], b"a");
}

#[test]
fn an_object_is_replaced_only_where_it_is_the_version_that_was_seen() {
    let (_folder, server) = server();
    let storage = server.storage();
    let object = url("s3://bucket/state/lock");
    let write = |text: &'static str, of: Option<&ObjectVersion>| storage.put_if(&object, &Bytes::from(text), of);
    let first = write("one", None).unwrap();
    let fault = |result: Result<ObjectVersion, StorageError>| result.unwrap_err().fault;
    assert_eq!(fault(write("two", None)), StorageFault::AlreadyExists);
    let second = write("two", Some(&first)).unwrap();
    assert_eq!(fault(write("three", Some(&first))), StorageFault::Changed);
    let (version, bytes) = storage.read_now(&object, 10).unwrap().unwrap();
    assert_eq!((version, &bytes[..]), (second.clone(), &b"two"[..]));
    assert_eq!(storage.read_now(&object, 2).unwrap_err().fault, StorageFault::TooLarge);
    // Done, but not answered; neither; and not done.
    let mut version = second;
    for (fault, text) in [
        (Fault::LoseAnswer, "four"),
        (Fault::Drop, "five"),
        (Fault::Status(503), "six"),
    ] {
        server.clear();
        server.fault(FaultRule {
            method: Some("PUT"),
            ..FaultRule::first(1, fault, "lock")
        });
        version = write(text, Some(&version)).unwrap();
        assert_eq!(storage.read_now(&object, 10).unwrap().unwrap().0, version);
    }
    storage.delete(&object).unwrap();
    assert_eq!(fault(write("seven", Some(&version))), StorageFault::Changed);
    assert_eq!(storage.read_now(&object, 10).unwrap(), None);
}

/// What S3 says where two writes come at the same time, and of an object that is gone.
#[test]
fn a_write_with_a_condition_is_refused_for_what_another_one_wrote_alone() {
    let (_folder, server) = server();
    let storage = server.storage();
    let object = url("s3://bucket/state/lock");
    let write = |text: &'static str, of: Option<&ObjectVersion>| storage.put_if(&object, &Bytes::from(text), of);
    let mut version = None;
    for (status, text) in [(409, "one"), (409, "two"), (412, "three")] {
        server.clear();
        server.fault(FaultRule {
            method: Some("PUT"),
            ..FaultRule::first(1, Fault::Status(status), "lock")
        });
        version = Some(write(text, version.as_ref()).unwrap());
        assert_eq!(&storage.read_now(&object, 10).unwrap().unwrap().1[..], text.as_bytes());
    }
    // One that stays refused, though nobody wrote, is an error after some time.
    server.fault(FaultRule {
        method: Some("PUT"),
        ..FaultRule::always(Fault::Status(412), "lock")
    });
    let fault = |result: Result<ObjectVersion, StorageError>| result.unwrap_err().fault;
    assert_eq!(fault(write("four", version.as_ref())), StorageFault::Changed);
    for status in [404, 412] {
        server.clear();
        storage.delete(&object).unwrap();
        server.fault(FaultRule {
            method: Some("PUT"),
            ..FaultRule::first(1, Fault::Status(status), "lock")
        });
        assert_eq!(
            fault(write("five", version.as_ref())),
            StorageFault::Changed,
            "{status}"
        );
    }
}

/// A client that is not answered asks for the end of an upload again, which is not there any more.
#[test]
fn an_object_in_parts_is_written_though_the_last_answer_is_lost() {
    let (_folder, server) = server();
    let storage = server.storage();
    let object = url("s3://bucket/large");
    for (fault, times) in [
        (Fault::LoseAnswer, 1),
        (Fault::Drop, 1),
        (Fault::Status(503), 2),
        (Fault::LoseAnswer, 1),
    ] {
        server.clear();
        server.fault(FaultRule {
            method: Some("POST"),
            ..FaultRule::first(times, fault, "uploadId")
        });
        let content = bytes((20 << 20) + times as usize);
        let mut writer = storage.create(&object).unwrap();
        writer.write_all(&content).unwrap();
        writer.finish().unwrap();
        assert!(storage.read(&object, 1 << 30).unwrap() == content, "{fault:?}");
    }
    // Where it was not written, another object of the same size is none of ours.
    server.clear();
    server.fault(FaultRule {
        method: Some("POST"),
        ..FaultRule::always(Fault::Status(403), "uploadId")
    });
    let mut writer = storage.create(&object).unwrap();
    writer.write_all(&vec![7; (20 << 20) + 1]).unwrap();
    assert!(writer.finish().is_err());
}

/// Buckets of the same name on two servers have copies of their own.
#[test]
fn folders_for_a_prefix_are_of_one_service() {
    let (_first, first) = server();
    let (_second, second) = server();
    let state = url("s3://bucket/state");
    let folder = |server: &TestServer, more: &[(&str, &str)]| {
        let mut environment = server.environment();
        environment.push(("FLOW_STORAGE_CACHE".into(), "/tmp/one-cache".into()));
        environment.extend(more.iter().map(|(name, value)| (name.to_string(), value.to_string())));
        let storage = Storage::with_environment(environment);
        (
            storage.state_folder(&state).unwrap(),
            storage.working_folder(&state).unwrap(),
        )
    };
    assert_eq!(folder(&first, &[]), folder(&first, &[]));
    let (state_of_first, work_of_first) = folder(&first, &[]);
    let (state_of_second, work_of_second) = folder(&second, &[]);
    assert!(state_of_first != state_of_second && work_of_first != work_of_second);
    let container = url("az://container/state");
    let account = |name: &str| {
        let environment = [
            ("AZURE_STORAGE_ACCOUNT_NAME", name),
            ("FLOW_STORAGE_CACHE", "/tmp/one-cache"),
        ];
        let environment = environment.map(|(name, value)| (name.to_string(), value.to_string()));
        Storage::with_environment(environment)
            .working_folder(&container)
            .unwrap()
    };
    assert!(account("one") == account("one") && account("one") != account("two"));
}

#[test]
fn listings_have_the_etags_of_objects_where_the_server_gives_them() {
    let (folder, server) = server();
    write(&folder, "in a/ख & b.wav", b"one");
    let storage = server.storage();
    storage.put(&url("s3://bucket/in a/put"), b"put".to_vec()).unwrap();
    let etags = |storage: &Storage| -> Vec<Option<String>> {
        let listed = storage.list_and_remember(&url("s3://bucket/in a")).unwrap();
        listed.iter().map(|entry| entry.stat.etag).collect()
    };
    assert_eq!(etags(&storage), [None, None]);
    server.list_etags();
    storage.forget_all();
    let listed = etags(&storage);
    let asked = |key: &str| storage.stat(&url(&format!("s3://bucket/in a/{key}"))).unwrap().etag;
    assert_eq!(listed, [asked("put"), asked("ख & b.wav")]);
    assert!(listed.iter().all(Option::is_some));
    // Another object of the same size.
    write(&folder, "in a/ख & b.wav", b"two");
    storage.forget_all();
    let changed = etags(&storage);
    assert!(changed[0] == listed[0] && changed[1] != listed[1]);
}
