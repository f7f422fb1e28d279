use std::fs;
use std::sync::Arc;

use arrow::array::{RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{Field, Schema};
use flow_kind::{Reject, RejectClass};
use flow_runtime::harness::Harness;

use super::*;
use crate::extract::{Extract, ExtractSettings, Store};
use crate::probe::{AudioFrom, Probe, ProbeSettings, members_schema};
use crate::test_data::{member, tar_of, wav};

const SHARD: &str = "hi/hi_0000";

/// A shard with four recordings, of which three were extracted as FLAC.
struct Place {
    temp: tempfile::TempDir,
    members: RecordBatch,
    rows: RecordBatch,
}

impl Place {
    fn new() -> Place {
        let temp = tempfile::tempdir().unwrap();
        let folder = temp.path().join("shards").join(SHARD);
        fs::create_dir_all(&folder).unwrap();
        let (one, two) = (
            member("as", "as_0000", "rec_as_0004_000.flac"),
            wav(16_000, 1, &[9; 3000]),
        );
        let tar = tar_of(&[
            ("a.flac", &one),
            ("b.wav", &two),
            ("c.flac", &one),
            ("unwanted.flac", &one),
        ]);
        fs::write(folder.join("hi_0000.tar"), tar).unwrap();
        let mut place = Place {
            members: RecordBatch::new_empty(members_schema()),
            rows: RecordBatch::new_empty(members_schema()),
            temp,
        };
        place.members = place.probe().unwrap();
        let schema = Arc::new(Schema::new(vec![
            Field::new("_row", DataType::UInt32, false),
            Field::new("tar_member_name", DataType::Utf8, false),
        ]));
        let rows = RecordBatch::try_new(
            schema.clone(),
            vec![
                Arc::new(UInt32Array::from(vec![0, 1, 2])),
                Arc::new(StringArray::from(vec!["a.flac", "./b.wav", "c.flac"])),
            ],
        );
        let settings = ExtractSettings {
            shards: place.shards(),
            audio: place.temp.path().join("audio"),
            store: Store::Flac,
            watch: true,
        };
        let output = Harness::<Extract>::new(settings)
            .input("rows", schema)
            .input("members", members_schema())
            .feed("rows", SHARD, rows.unwrap())
            .feed("members", SHARD, place.members.clone())
            .run()
            .unwrap();
        place.rows = output.rows("rows", SHARD);
        assert_eq!(place.rows.num_rows(), 3);
        place
    }

    fn shards(&self) -> PathBuf {
        self.temp.path().join("shards")
    }

    fn tar(&self) -> PathBuf {
        self.shards().join(SHARD).join("hi_0000.tar")
    }

    fn file(&self, name: &str) -> PathBuf {
        self.temp.path().join("audio").join(SHARD).join(name)
    }

    fn probe(&self) -> Result<RecordBatch, StageError> {
        let settings = ProbeSettings {
            shards: self.shards(),
            audio_from: AudioFrom::Auto,
            formats: Format::ALL.to_vec(),
        };
        Harness::<Probe>::new(settings)
            .run()
            .map(|output| output.rows("members", SHARD))
    }

    /// Runs the stage; gives the line about the shard.
    fn run(&self, reject: Option<&str>) -> String {
        let settings = DeleteTarsSettings {
            shards: self.shards(),
            out: self.temp.path().join("list"),
        };
        let mut harness = Harness::<DeleteTars>::new(settings)
            .input("members", self.members.schema())
            .input("rows", self.rows.schema())
            .feed("members", SHARD, self.members.clone())
            .feed("rows", SHARD, self.rows.clone());
        if let Some(reason) = reject {
            let reject = Reject {
                row: Some(7),
                id: None,
                reason: reason.into(),
                class: RejectClass::Fault,
                detail: String::new(),
                values: String::new(),
            };
            harness = harness.rejected("extract", SHARD, reject);
        }
        harness.run().unwrap();
        fs::read_to_string(self.temp.path().join("list/tars.jsonl")).unwrap()
    }
}

#[test]
fn a_tar_goes_when_everything_wanted_of_it_is_safe() {
    let place = Place::new();
    let size = fs::metadata(place.tar()).unwrap().len();
    assert!(place.tar().exists());
    let line = place.run(Some("quality_too_low"));
    assert!(
        line.contains("\"deleted\"") && line.contains(&size.to_string()),
        "{line}"
    );
    assert!(!place.tar().exists());
    // It is not deleted twice, and decoding it again is an error that says what to do.
    assert!(place.run(None).contains("earlier"));
    let error = place.probe().unwrap_err();
    assert!(
        error
            .to_string()
            .contains("deleted after its recordings were extracted"),
        "{error}"
    );
}

#[test]
fn a_tar_stays_while_there_is_a_doubt() {
    type Spoil = fn(&Place);
    let spoil: [(Spoil, &str); 7] = [
        (|place| fs::remove_file(place.file("a.flac")).unwrap(), "does not exist"),
        (
            |place| fs::write(place.file("b.wav.flac"), b"short").unwrap(),
            "does not exist",
        ),
        (
            |place| {
                let mut bytes = fs::read(place.file("c.flac")).unwrap();
                *bytes.last_mut().unwrap() ^= 1;
                fs::write(place.file("c.flac"), bytes).unwrap();
            },
            "c.flac",
        ),
        // The same samples in a file of the same size, but with other bytes than the member.
        (
            |place| {
                let mut bytes = fs::read(place.file("a.flac")).unwrap();
                // The sizes of frames in STREAMINFO tell nothing of the samples; 0 is not known.
                bytes[12..18].fill(0);
                fs::write(place.file("a.flac"), bytes).unwrap();
            },
            "other bytes",
        ),
        (
            |place| {
                let mut bytes = fs::read(place.tar()).unwrap();
                bytes.truncate(2048);
                fs::write(place.tar(), bytes).unwrap();
            },
            "changed since",
        ),
        (
            |place| {
                fs::remove_file(place.file("a.flac")).unwrap();
                std::os::unix::fs::symlink(place.tar(), place.file("a.flac")).unwrap();
            },
            "does not exist",
        ),
        (|place| fs::remove_file(place.tar()).unwrap(), "there is no tar"),
    ];
    for (spoil, why) in spoil {
        let place = Place::new();
        spoil(&place);
        let before = place.tar().exists();
        let line = place.run(None);
        assert!(line.contains("\"kept\"") && line.contains(why), "{why}: {line}");
        assert_eq!(place.tar().exists(), before);
    }
    let place = Place::new();
    assert!(place.run(Some("unsafe_path")).contains("could not be placed"));
    let mut place = Place::new();
    place.rows = place.rows.slice(0, 0);
    assert!(place.run(None).contains("nothing of it was extracted"));
    assert!(place.tar().exists());
}

#[test]
fn tars_that_are_read_from_are_not_deleted() {
    let place = Place::new();
    let fields = ["tar_path", "offset"].map(|name| Field::new(name, DataType::Utf8, false));
    let train = Arc::new(Schema::new(fields.to_vec()));
    let settings = || DeleteTarsSettings {
        shards: place.shards(),
        out: place.temp.path().join("list"),
    };
    let harness = || Harness::<DeleteTars>::new(settings()).input("members", place.members.schema());
    assert!(harness().input("train", place.rows.schema()).shape().is_ok());
    let error = harness().input("train", train).shape().unwrap_err();
    assert!(
        error.to_string().contains("`train` leaves its recordings in the tars"),
        "{error}"
    );
    assert!(harness().shape().is_err());
}

/// A change of these lines asks for a higher [`Kind::VERSION`].
#[test]
fn version_guards_the_output() {
    let place = Place::new();
    let lines = [place.run(Some("quality_too_low")), place.run(None)].concat();
    let lines = lines.replace(place.temp.path().to_str().unwrap(), "TEMP");
    assert_eq!(
        (
            DeleteTars::VERSION,
            flow_kind::Digest::of(lines.as_bytes()).short().to_string()
        ),
        (1, "9f74c3dcd59caf3a".to_string()),
        "{lines}"
    );
}

#[test]
fn a_tar_goes_only_after_what_was_extracted_is_on_the_disk() {
    let place = Place::new();
    let names = ["a.flac", "b.wav.flac", "c.flac"];
    let files: Vec<Extracted> = names
        .iter()
        .map(|name| Extracted {
            name: name.to_string(),
            path: place.file(name),
            bytes: 0,
        })
        .collect();
    let flushed = std::sync::Mutex::new(Vec::new());
    let note = |path: &Path| {
        flushed.lock().unwrap().push(path.to_path_buf());
        bring_to_disk(path)
    };
    assert_eq!(unflushed(&files, note), None);
    let mut flushed = flushed.into_inner().unwrap();
    // The names last: they are of no use before what they name.
    assert_eq!(flushed.pop().as_deref(), place.file("a.flac").parent());
    flushed.sort();
    assert_eq!(flushed, names.map(|name| place.file(name)));
    // A disk that does not take a file, or the names.
    let folder = place.file("c.flac").parent().unwrap().to_owned();
    for broken in [place.file("c.flac"), folder] {
        let broken = broken.as_path();
        let flush = |path: &Path| match path == broken {
            true => Err(io::Error::from_raw_os_error(5)),
            false => Ok(()),
        };
        let why = unflushed(&files, flush).unwrap();
        assert!(
            why.contains(&broken.display().to_string()) && why.contains("disk"),
            "{why}"
        );
    }
    fs::remove_file(place.file("b.wav.flac")).unwrap();
    assert!(unflushed(&files, bring_to_disk).is_some());
}
