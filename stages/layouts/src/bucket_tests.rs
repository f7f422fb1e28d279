//! Each folder and file that a test of this crate reads is read from a bucket, too, and gives the same there.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use arrow::util::display::{ArrayFormatter, FormatOptions};
use flow_audio::decode::{read_file, read_range};
use flow_kind::Partition;
use flow_storage_testing::{Fault, FaultRule, TestServer};

use super::forms::{lay_out, with_lang};
use super::*;

static SERVER: LazyLock<(tempfile::TempDir, TestServer)> = LazyLock::new(|| {
    let root = tempfile::tempdir().unwrap();
    let server = TestServer::start(root.path()).unwrap();
    (root, server)
});
static COPIES: AtomicUsize = AtomicUsize::new(0);

/// A copy in a bucket: the folder above it, and the URL of that in the bucket.
struct Copied {
    above: String,
    url: String,
}

impl Copied {
    /// The settings of the copy.
    fn settings(&self, settings: &ReadSettings) -> ReadSettings {
        let of = |text: &String| text.replace(&self.above, &self.url);
        ReadSettings {
            manifest: of(&settings.manifest),
            tars: of(&settings.tars),
            ..settings.clone()
        }
    }

    /// A text in which the copy is named as what was copied.
    fn back(&self, text: &str) -> String {
        text.replace(&self.url, &self.above)
    }
}

/// Copies what is to be read, with all that is beside it. None where object storage cannot have it: links, names that are not UTF-8,
/// or a manifest elsewhere.
fn copied(settings: &ReadSettings) -> Option<Copied> {
    let data = repository("stages/layouts/tests/data");
    let temporary = std::env::temp_dir();
    let manifest = Path::new(&settings.manifest);
    let (above, name) = [&data, &temporary].into_iter().find_map(|above| {
        let name = manifest.strip_prefix(above).ok()?.components().next()?;
        Some((above, name))
    })?;
    if !settings.audio.as_os_str().is_empty() || !settings.shards.as_os_str().is_empty() {
        return None;
    }
    let (root, _) = &*SERVER;
    let number = COPIES.fetch_add(1, Ordering::Relaxed);
    let bucket = root.path().join(format!("bucket{number}"));
    fs::create_dir(&bucket).unwrap();
    copy(&above.join(name), &bucket.join(name)).then(|| Copied {
        above: above.display().to_string().trim_end_matches('/').to_string(),
        url: format!("s3://bucket{number}"),
    })
}

fn copy(from: &Path, to: &Path) -> bool {
    let found = from.symlink_metadata().unwrap();
    let is_named = from.to_str().is_some();
    if found.is_file() {
        return is_named && fs::copy(from, to).is_ok();
    }
    if !found.is_dir() || !is_named {
        return false;
    }
    fs::create_dir(to).unwrap();
    let inner: Vec<PathBuf> = fs::read_dir(from).unwrap().map(|entry| entry.unwrap().path()).collect();
    if inner.is_empty() {
        // There is no folder without an object in it.
        fs::write(to.join(".keep"), b"x").unwrap();
    }
    inner.iter().all(|path| copy(path, &to.join(path.file_name().unwrap())))
}

/// The rows of each partition, and the rejects without their details, which have messages of the system.
fn shown(output: &Output) -> Vec<String> {
    let mut shown = Vec::new();
    for partition in &output.partitions {
        for batch in output.batches("rows", partition.as_str()) {
            let options = FormatOptions::default().with_null("null");
            let columns: Vec<ArrayFormatter<'_>> = batch
                .columns()
                .iter()
                .map(|column| ArrayFormatter::try_new(column, &options).unwrap())
                .collect();
            for row in 0..batch.num_rows() {
                let values: Vec<String> = columns.iter().map(|column| column.value(row).to_string()).collect();
                shown.push(format!("{partition}: {}", values.join(" | ")));
            }
        }
    }
    let rejects = output.rejects().iter();
    shown.extend(rejects.map(|(partition, reject)| {
        let (row, reason, class) = (reject.row, &reject.reason, reject.class);
        format!("{partition}: {row:?} {reason} {class:?} {:?}", reject.values)
    }));
    shown
}

/// The bytes of each row's recording, read as training reads them; none of one that cannot be read.
pub(super) fn recordings(storage: &Storage, output: &Output) -> Vec<Option<Vec<u8>>> {
    let batches = output
        .partitions
        .iter()
        .flat_map(|partition| output.batches("rows", partition.as_str()));
    let mut read = Vec::new();
    for batch in batches {
        let number = |name: &str| batch.column_by_name(name).unwrap().as_primitive::<Int64Type>();
        let (offsets, sizes) = (number("offset"), number("size"));
        let paths = batch.column_by_name("audio_path").unwrap().as_string::<i32>();
        for row in 0..batch.num_rows() {
            let path = Path::new(paths.value(row));
            let bytes = match offsets.is_valid(row) {
                true => read_range(storage, path, offsets.value(row) as u64, sizes.value(row) as u64),
                false => read_file(storage, path),
            };
            read.push(bytes.ok());
        }
    }
    read
}

/// Compares what was read of this machine with what is read of a bucket.
pub(super) fn compare(settings: &ReadSettings, output: &Output) {
    compare_with(&SERVER.1.storage(), settings, output);
}

fn compare_with(storage: &Storage, settings: &ReadSettings, output: &Output) {
    let Some(copied) = copied(settings) else { return };
    let of_bucket = Harness::<Read>::new(copied.settings(settings))
        .storage(storage)
        .run()
        .unwrap_or_else(|error| panic!("{}: {error:?}", settings.manifest));
    assert!(
        recordings(storage, &of_bucket) == recordings(&Storage::default(), output),
        "{}: the recordings in a bucket differ",
        settings.manifest
    );
    let expected = shown(output);
    let found: Vec<String> = shown(&of_bucket).iter().map(|row| copied.back(row)).collect();
    assert_eq!(found, expected, "{} in a bucket", settings.manifest);
}

/// A message without its commands, which name the files that were downloaded first.
fn without_commands(message: &str) -> String {
    let message = message.replace("download it, and run `", "run `");
    let mut parts = message.split("run `");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |before, part| {
        before + "run" + part.split_once('`').map_or(part, |(_, after)| after)
    })
}

/// What cannot be read of this machine cannot be read of a bucket.
pub(super) fn compare_failure(settings: &ReadSettings, message: &str) {
    // Storage has its own words for this.
    let is_missing = message.contains("does not exist (paths are relative");
    let Some(copied) = Some(settings)
        .filter(|settings| !is_missing && Path::new(&settings.manifest).exists())
        .and_then(copied)
    else {
        return;
    };
    let of_bucket = Harness::<Read>::new(copied.settings(settings))
        .storage(&SERVER.1.storage())
        .run();
    match of_bucket {
        Err(StageError::Setting { message: found, .. }) => {
            // A URL does not end in `/`, and a folder is not without an object.
            let found = copied.back(&found).replace("in it is .keep", "in it is nothing");
            let message = message.replace("/: ", ": ");
            assert_eq!(without_commands(&found), without_commands(&message), "in a bucket");
        }
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("{} in a bucket: it ran, in place of {message}", settings.manifest),
    }
}

fn partitions(storage: &Storage, settings: &ReadSettings) -> Vec<(Partition, Vec<PathBuf>, String)> {
    let manifest = open(storage, settings, &std::env::temp_dir(), &mut |_| true).unwrap();
    let partitions = manifest.partitions(storage).unwrap();
    let shown = partitions.into_iter();
    shown
        .map(|partition| (partition.name, partition.files, partition.extra))
        .collect()
}

#[test]
fn tars_that_do_not_fit_into_what_is_kept_are_read_all_the_same() {
    let mut environment = SERVER.1.environment();
    environment.push(("FLOW_STORAGE_CACHE_BYTES".into(), "1000".into()));
    for name in ["webdataset", "shar"] {
        let settings = with_lang(&repository("stages/layouts/tests/data/layouts").join(name), "hi");
        let output = Harness::<Read>::new(settings.clone()).run().unwrap();
        assert!(output.all_rows("rows").num_rows() > 0);
        compare_with(&Storage::with_environment(environment.clone()), &settings, &output);
    }
}

#[test]
fn a_folder_in_a_bucket_is_listed_once_and_its_changes_show() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join("corpora/lj").join(name);
    let ids: Vec<String> = (0..50).map(|number| format!("LJ{number}")).collect();
    let table: String = ids.iter().map(|id| format!("{id}|One|one\n")).collect();
    let mut files = vec![("corpora/lj/metadata.csv".to_string(), table)];
    files.extend(
        ids.iter()
            .map(|id| (format!("corpora/lj/wavs/{id}.wav"), String::new())),
    );
    let files: Vec<(&str, &str)> = files
        .iter()
        .map(|(name, text)| (name.as_str(), text.as_str()))
        .collect();
    lay_out(root.path(), &files);
    let server = TestServer::start(root.path()).unwrap();
    let storage = server.storage();
    let settings = with_lang(Path::new("s3://corpora/lj/"), "en");
    let before = partitions(&storage, &settings);
    assert_eq!(before.len(), 1);
    assert_eq!(before[0].1, [PathBuf::from("s3://corpora/lj/metadata.csv")]);
    assert_eq!(partitions(&storage, &settings), before);
    // The folder, and the one in it.
    assert_eq!(server.requests("list-type=2"), 2);
    assert_eq!(server.requests(".wav"), 0, "each recording is in the listing");
    // The listing of this server has no ETags yet, and times in seconds.
    fs::write(at("wavs/LJ7.wav"), [recording(), vec![0]].concat()).unwrap();
    storage.forget_all();
    assert_ne!(partitions(&storage, &settings), before);
    fs::write(at("wavs/LJ7.wav"), recording()).unwrap();
    // Another object of equal size and time: only an ETag tells it.
    let replace = || {
        let mut bytes = fs::read(at("wavs/LJ7.wav")).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        let time = fs::metadata(at("wavs/LJ7.wav")).unwrap().modified().unwrap();
        fs::write(at("wavs/LJ7.wav"), bytes).unwrap();
        let file = fs::File::options().append(true).open(at("wavs/LJ7.wav")).unwrap();
        file.set_modified(time).unwrap();
        storage.forget_all();
    };
    for has_etags in [false, true] {
        if has_etags {
            server.list_etags();
        }
        storage.forget_all();
        let before = partitions(&storage, &settings);
        replace();
        assert_eq!(partitions(&storage, &settings) != before, has_etags);
    }
    // A server that does not answer is not a corpus without files.
    server.fault(FaultRule::always(Fault::Status(403), "metadata.csv"));
    storage.forget_all();
    let error = open(&storage, &settings, &std::env::temp_dir(), &mut |_| true)
        .err()
        .unwrap();
    assert!(error.to_string().contains("s3://corpora/lj/metadata.csv"), "{error}");
    server.clear();
    // Who may list the corpus alone is denied what is above it.
    for path in ["/corpora/metadata", "/corpora/flow.json"] {
        server.fault(FaultRule::always(Fault::Status(403), path));
    }
    let storage = server.storage();
    fs::rename(at("metadata.csv"), at("list.csv")).unwrap();
    fs::write(at("wavs/LJ7.txt"), "seven").unwrap();
    let found = partitions(&storage, &settings);
    assert_eq!(found[0].0.as_str(), "wavs/000000");
    server.clear();
    for (url, said) in [
        ("s3://corpora/none", "there is no such object"),
        ("s3://none/lj", "s3://none"),
    ] {
        let settings = with_lang(Path::new(url), "en");
        let error = open(&storage, &settings, &std::env::temp_dir(), &mut |_| true)
            .err()
            .unwrap();
        assert!(error.to_string().contains(said), "{error}");
    }
    // The bucket itself.
    let all = partitions(&storage, &with_lang(Path::new("s3://corpora"), "en"));
    assert_eq!(all[0].0.as_str(), "lj/wavs/000000");
}
