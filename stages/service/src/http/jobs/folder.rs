//! The folder of jobs. Each job is a folder of its own, named by its id:
//!
//! | file | |
//! |---|---|
//! | `request.json` | what was asked for; never changed |
//! | `audio` | the recording, until the job has ended |
//! | `attempts.json` | how often the job was begun without progress since, and how much of the log there was then |
//! | `progress`, `progress.2`, ... | the logs of what is done of the recording, or of each of its channels, until the job has ended |
//! | `outcome` | the end of the job: a line of JSON, and the result. Its rename to this name is the commit |
//! | `delivery.json` | the state of the webhook |
//!
//! A job is made within the private folder of this process and accepted by the rename of its folder; it is removed by a rename
//! into the private folder. So whenever the process dies, each job is there as a whole or not at all.

use std::fmt::Display;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use flow_kind::store::{remove_left, write_atomically};
use flow_kind::{open_regular_file, random_hex};
use flow_storage::is_one_file;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tempfile::TempPath;

use super::super::channels::{MOST_LOGS, log_of};
use super::super::form::Asked;
use crate::engine::{Logged, TempFolder};

const LOCK: &str = "lock";
const REQUEST: &str = "request.json";
const AUDIO: &str = "audio";
const ATTEMPTS: &str = "attempts.json";
const OUTCOME: &str = "outcome";
const PROGRESS: &str = "progress";
const DELIVERY: &str = "delivery.json";

/// Prefix of ids, before 32 hexadecimal digits.
const PREFIX: &str = "job_";

/// Most bytes of `request.json` and of the first line of `outcome`, which are far smaller.
const MOST: u64 = 1 << 20;

/// What a client asked for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobRequest {
    pub id: String,
    /// Jobs are run in the order of their numbers.
    pub number: u64,
    /// Seconds since 1970.
    pub created_at: u64,
    /// The digest of the API key; none where the service had no keys.
    pub owner: Option<String>,
    /// The header `Idempotency-Key`.
    pub idempotency_key: Option<String>,
    /// The client's name of the recording.
    pub file_name: String,
    /// Of the recording; 0 where it is fetched.
    pub bytes: u64,
    /// Where the recording is fetched, where the client sent none.
    #[serde(default)]
    pub url: Option<String>,
    pub asked: Asked,
    /// The URL that is told of the end.
    pub webhook: Option<String>,
}

impl JobRequest {
    /// Whether another request is the same, as far as its fields and the size of its recording say.
    pub fn asks_same(&self, other: &Self) -> bool {
        self.file_name == other.file_name
            && self.bytes == other.bytes
            && self.url == other.url
            && self.webhook == other.webhook
            && self.asked.is_like(&other.asked)
    }
}

/// How a job has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    Done,
    Failed,
    Cancelled,
}

impl End {
    pub fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// The end of a job, without the bytes of the result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    pub end: End,
    /// Seconds since 1970.
    pub finished_at: u64,
    /// Length of the recording, where it was transcribed.
    pub audio_seconds: Option<f64>,
    /// Of the result, where there is one.
    pub content_type: Option<String>,
    /// That of the response to a request that fails likewise.
    pub error: Option<Value>,
}

/// The state of a webhook.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Delivery {
    pub attempts: u32,
    /// Seconds since 1970 before which there is no next attempt.
    pub next_at: u64,
    pub state: DeliveryState,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeliveryState {
    #[default]
    Pending,
    Delivered,
    GivenUp,
}

impl DeliveryState {
    pub fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Delivered => "delivered",
            Self::GivenUp => "given_up",
        }
    }
}

/// How often a job was begun.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
struct Attempts {
    /// Since there was progress.
    count: u32,
    /// Records of the log when it was begun last.
    records: u64,
}

/// A job as it is found in the folder.
#[derive(Debug, PartialEq)]
pub struct StoredJob {
    pub request: JobRequest,
    /// How often it was begun without progress.
    pub attempts: u32,
    /// How much of it is done.
    pub logged: Logged,
    pub outcome: Option<Outcome>,
    pub delivery: Delivery,
    /// Of the recording or the result.
    pub bytes: u64,
}

/// The folder, held by this process.
pub struct JobFolder {
    path: PathBuf,
    /// What is at the path, as it was opened.
    opened: Metadata,
    /// Below `path`, for uploads, and for what is made or removed.
    pub private: TempFolder,
    /// Locked as long as it is open.
    _lock: File,
}

/// An id that nobody can guess.
///
/// # Errors
/// If the system gives no random bytes.
pub fn new_id() -> io::Result<String> {
    Ok(format!("{PREFIX}{}", random_hex::<16>()?))
}

fn is_id(name: &str) -> bool {
    let digits = name.strip_prefix(PREFIX).unwrap_or_default();
    digits.len() == 32 && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

impl JobFolder {
    /// Makes the folder where it is missing, locks it, and reads its jobs, in the order of their numbers. Jobs that cannot be
    /// read stay where they are; what is wrong with them is returned, too.
    ///
    /// # Errors
    /// If it cannot be used, or another process has it.
    pub fn open(path: &Path, max_bytes: u64) -> io::Result<(Self, Vec<StoredJob>, Vec<String>)> {
        if !path.is_dir() {
            DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        }
        let lock_path = path.join(LOCK);
        let lock = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(false)
            .open(lock_path)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(io::Error::other("another service has it")),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        let private = TempFolder::new(path, max_bytes)?;
        let (mut jobs, mut faults) = (Vec::new(), Vec::new());
        for entry in path.read_dir()? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if !is_id(&name) {
                continue;
            }
            match stored(&entry.path(), &name) {
                Ok(job) => jobs.push(job),
                Err(error) => faults.push(format!("the job {name} cannot be read and is left as it is: {error}")),
            }
        }
        jobs.sort_by_key(|job| job.request.number);
        let folder = Self {
            opened: path.metadata()?,
            path: path.to_owned(),
            private,
            _lock: lock,
        };
        Ok((folder, jobs, faults))
    }

    /// The folder of a job.
    pub fn of(&self, id: &str) -> PathBuf {
        self.path.join(id)
    }

    /// Whether somebody has deleted the folder of a job, while the folder of all jobs is the one that was opened: a file system that
    /// is not mounted for a while has all jobs still.
    pub fn is_gone(&self, id: &str) -> bool {
        let is_gone = match fs::symlink_metadata(self.of(id)) {
            Ok(found) => !found.is_dir(),
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        };
        is_gone
            && self
                .path
                .metadata()
                .is_ok_and(|found| is_one_file(&found, &self.opened))
    }

    /// Bytes of a job that has not ended: its recording and the logs of what is done.
    ///
    /// # Errors
    /// If its recording cannot be looked at.
    pub fn bytes(&self, id: &str) -> io::Result<u64> {
        bytes_of_work(&self.of(id))
    }

    /// Accepts a job: it is on disk when this returns. The upload is in the private folder.
    ///
    /// # Errors
    /// If it cannot be written; then there is no such job.
    pub fn accept(&self, request: &JobRequest, upload: TempPath) -> io::Result<()> {
        let made = self.private.path().join(&request.id);
        let accepted = || {
            DirBuilder::new().mode(0o700).create(&made)?;
            let audio = made.join(AUDIO);
            upload.persist(&audio).map_err(|error| error.error)?;
            File::open(&audio)?.sync_all()?;
            write(&made.join(REQUEST), request)?;
            fs::rename(&made, self.of(&request.id))?;
            self.sync()
        };
        let accepted = accepted();
        if accepted.is_err() {
            for left in [&made, &self.of(&request.id)] {
                let _ = fs::remove_dir_all(left);
            }
        }
        accepted
    }

    /// The recording of a job, which the returned path does not delete.
    ///
    /// # Errors
    /// If the present folder is not known.
    pub fn audio(&self, id: &str) -> io::Result<TempPath> {
        let mut path = TempPath::try_from_path(self.of(id).join(AUDIO))?;
        path.disable_cleanup(true);
        Ok(path)
    }

    /// Whether there is a recording of a job with more than no bytes.
    pub fn has_audio(&self, id: &str) -> bool {
        fs::metadata(self.of(id).join(AUDIO)).is_ok_and(|found| found.len() > 0)
    }

    /// Takes the recording of a job, which was fetched into the private folder and flushed.
    ///
    /// # Errors
    /// If it cannot be moved.
    pub fn put_audio(&self, id: &str, fetched: TempPath) -> io::Result<()> {
        fetched.persist(self.of(id).join(AUDIO)).map_err(|error| error.error)?;
        File::open(self.of(id))?.sync_all()
    }

    /// Where the log of a job is, or that of its first channel.
    pub fn log(&self, id: &str) -> PathBuf {
        self.of(id).join(PROGRESS)
    }

    /// How much of a job is done.
    pub fn logged(&self, id: &str) -> Logged {
        logged(&self.of(id))
    }

    /// A log of a job that is not one: it is neither read nor written.
    pub fn unusable_log(&self, id: &str) -> Option<PathBuf> {
        let folder = self.of(id);
        let mut logs = logs(&folder);
        logs.find(|(_, found)| !found.is_file()).map(|(log, _)| log)
    }

    /// Notes how often a job was begun without progress; the next progress is what is more than these `records` of its log.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn note_attempts(&self, id: &str, count: u32, records: u64) -> io::Result<()> {
        write(&self.of(id).join(ATTEMPTS), &Attempts { count, records })
    }

    /// Commits the end of a job, with its result, and deletes the recording.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn commit(&self, id: &str, outcome: &Outcome, result: &[u8]) -> io::Result<()> {
        let mut bytes = serde_json::to_vec(outcome)?;
        bytes.push(b'\n');
        bytes.extend_from_slice(result);
        write_atomically(&self.of(id).join(OUTCOME), &bytes).map_err(io::Error::other)?;
        remove_work(&self.of(id));
        Ok(())
    }

    /// The result of a job that is done.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn result(&self, id: &str) -> io::Result<Vec<u8>> {
        let mut bytes = fs::read(self.of(id).join(OUTCOME))?;
        let line = bytes.iter().position(|byte| *byte == b'\n');
        let line = line.ok_or_else(|| io::Error::other("its outcome has no first line"))?;
        bytes.drain(..=line);
        Ok(bytes)
    }

    /// # Errors
    /// If it cannot be written.
    pub fn note_delivery(&self, id: &str, delivery: &Delivery) -> io::Result<()> {
        write(&self.of(id).join(DELIVERY), delivery)
    }

    /// Removes a job: it is gone when this returns, also where the process dies afterwards.
    ///
    /// # Errors
    /// If it cannot be removed.
    pub fn remove(&self, id: &str) -> io::Result<()> {
        let removed = self.private.path().join(id);
        match fs::rename(self.of(id), &removed) {
            // Somebody else has removed it, or an earlier try has.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            renamed => renamed?,
        }
        self.sync()?;
        // What is left goes with the private folder.
        let _ = fs::remove_dir_all(&removed);
        Ok(())
    }

    /// Flushes the names in the folder.
    fn sync(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }
}

/// The logs of a job that are there; links are not followed.
fn logs(path: &Path) -> impl Iterator<Item = (PathBuf, Metadata)> {
    let log = path.join(PROGRESS);
    (0..MOST_LOGS)
        .map(move |channel| log_of(&log, channel))
        .filter_map(|log| fs::symlink_metadata(&log).ok().map(|found| (log, found)))
}

fn bytes_of_work(path: &Path) -> io::Result<u64> {
    let logs: u64 = logs(path).map(|(_, found)| found.len()).sum();
    let audio = path.join(AUDIO);
    let found = fs::metadata(&audio).map_err(|error| of_file(&audio, &error))?;
    Ok(found.len().saturating_add(logs))
}

/// An error that names its file.
fn of_file(path: &Path, error: &dyn Display) -> io::Error {
    io::Error::other(format!("{}: {error}", path.display()))
}

fn logged(path: &Path) -> Logged {
    let all = logs(path).map(|(log, _)| Logged::read(&log));
    all.reduce(Logged::and).unwrap_or_default()
}

/// Deletes what a job that has ended needs no more. What is left is deleted at the next start.
fn remove_work(path: &Path) {
    for left in logs(path).map(|(log, _)| log).chain([path.join(AUDIO)]) {
        let _ = fs::remove_file(left);
    }
}

/// Reads the folder of a job.
fn stored(path: &Path, id: &str) -> io::Result<StoredJob> {
    // What a killed process had begun to write.
    let _ = remove_left(path);
    let request_path = path.join(REQUEST);
    let request: Option<JobRequest> = read(&request_path)?;
    let request = request.ok_or_else(|| of_file(&request_path, &"there is no such file"))?;
    if request.id != id {
        return Err(of_file(&request_path, &format!("it is the request of {}", request.id)));
    }
    // A job is not lost for the sake of these: without them it counts as new.
    let attempts: Attempts = read(&path.join(ATTEMPTS)).ok().flatten().unwrap_or_default();
    let delivery = read(&path.join(DELIVERY)).ok().flatten().unwrap_or_default();
    let outcome = path.join(OUTCOME);
    let job = |outcome, logged: Logged, bytes| StoredJob {
        request,
        attempts: if logged.records > attempts.records {
            0
        } else {
            attempts.count
        },
        logged,
        outcome,
        delivery,
        bytes,
    };
    let of_outcome = |error: &dyn Display| of_file(&outcome, error);
    match open_regular_file(&outcome) {
        Ok(file) => {
            let bytes = file.metadata().map_err(|error| of_outcome(&error))?.len();
            let mut line = Vec::new();
            let read = BufReader::new(file.take(MOST)).read_until(b'\n', &mut line);
            read.map_err(|error| of_outcome(&error))?;
            let read = serde_json::from_slice(&line).map_err(|error| of_outcome(&error))?;
            remove_work(path);
            Ok(job(Some(read), Logged::default(), bytes))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(job(None, logged(path), bytes_of_work(path)?)),
        Err(error) => Err(of_outcome(&error)),
    }
}

fn write(path: &Path, value: &impl Serialize) -> io::Result<()> {
    write_atomically(path, &serde_json::to_vec(value)?).map_err(io::Error::other)
}

/// A JSON file; None where there is none.
fn read<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    let file = match open_regular_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file.map_err(|error| of_file(path, &error))?,
    };
    let mut bytes = Vec::new();
    let read = file.take(MOST).read_to_end(&mut bytes);
    read.map_err(|error| of_file(path, &error))?;
    let value = serde_json::from_slice(&bytes);
    value.map(Some).map_err(|error| of_file(path, &error))
}

#[cfg(test)]
pub mod tests {
    use std::io::Write;

    use serde_json::json;

    use super::super::super::form::tests::asked;
    use super::*;

    pub fn request(number: u64) -> JobRequest {
        JobRequest {
            id: new_id().unwrap(),
            number,
            created_at: 1_700_000_000,
            owner: None,
            idempotency_key: None,
            file_name: "talk.wav".to_owned(),
            bytes: 5,
            url: None,
            asked: asked(),
            webhook: None,
        }
    }

    fn open(path: &Path) -> (JobFolder, Vec<StoredJob>, Vec<String>) {
        JobFolder::open(path, 1 << 20).unwrap()
    }

    pub fn accepted(folder: &JobFolder, number: u64) -> JobRequest {
        let request = request(number);
        let mut upload = folder.private.file().unwrap();
        upload.write_all(b"audio").unwrap();
        folder.accept(&request, upload.into_temp_path()).unwrap();
        request
    }

    fn outcome(end: End) -> Outcome {
        Outcome {
            end,
            finished_at: 1_700_000_100,
            audio_seconds: Some(1.5),
            content_type: Some("text/plain".to_owned()),
            error: None,
        }
    }

    #[test]
    fn jobs_are_found_again_as_they_were_left() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("a/jobs");
        let (folder, jobs, faults) = open(&path);
        assert!(jobs.is_empty() && faults.is_empty());
        let second = accepted(&folder, 2);
        let first = accepted(&folder, 1);
        let third = accepted(&folder, 3);
        assert_eq!(fs::read(folder.audio(&first.id).unwrap()).unwrap(), b"audio");
        folder.note_attempts(&second.id, 3, 0).unwrap();
        fs::write(folder.log(&third.id), "left").unwrap();
        fs::write(log_of(&folder.log(&second.id), 0), "of left").unwrap();
        fs::write(log_of(&folder.log(&second.id), 1), "of right").unwrap();
        folder.commit(&third.id, &outcome(End::Done), b"a\nb\n").unwrap();
        let delivery = Delivery {
            attempts: 2,
            next_at: 7,
            state: DeliveryState::Delivered,
        };
        folder.note_delivery(&third.id, &delivery).unwrap();
        assert_eq!(folder.result(&third.id).unwrap(), b"a\nb\n");
        // What a process that dies in between leaves: an upload, and a job that is not accepted yet.
        fs::create_dir(folder.private.path().join("job_half")).unwrap();
        drop(folder);

        let (folder, jobs, faults) = open(&path);
        assert_eq!(faults, [""; 0]);
        assert_eq!(
            jobs.iter().map(|job| &job.request).collect::<Vec<_>>(),
            [&first, &second, &third]
        );
        assert_eq!(jobs.iter().map(|job| job.attempts).collect::<Vec<_>>(), [0, 3, 0]);
        assert_eq!(jobs[2].outcome, Some(outcome(End::Done)));
        assert_eq!((jobs[2].delivery, jobs[1].delivery), (delivery, Delivery::default()));
        // The logs of what is done count.
        assert!(jobs[0].outcome.is_none() && jobs[0].bytes == 5);
        assert_eq!(jobs[1].bytes, 5 + 7 + 8);
        assert!(!folder.log(&third.id).exists());
        assert!(!folder.audio(&third.id).unwrap().exists() && folder.audio(&first.id).unwrap().exists());
        folder.remove(&first.id).unwrap();
        // Again: it is gone.
        folder.remove(&first.id).unwrap();
        drop(folder);
        assert_eq!(open(&path).1.len(), 2);
    }

    #[test]
    fn a_folder_has_one_owner() {
        let parent = tempfile::tempdir().unwrap();
        let (folder, ..) = open(parent.path());
        let second = JobFolder::open(parent.path(), 1).err().unwrap();
        assert_eq!(second.to_string(), "another service has it");
        drop(folder);
        open(parent.path());
    }

    #[test]
    fn damaged_jobs_are_told_and_left_and_others_are_read() {
        let parent = tempfile::tempdir().unwrap();
        let (folder, ..) = open(parent.path());
        let good = accepted(&folder, 9);
        // Without these a job counts as new.
        let kept = [(ATTEMPTS, "-1"), (DELIVERY, "{}")].map(|(file, content)| {
            let job = accepted(&folder, 1);
            fs::write(folder.of(&job.id).join(file), content).unwrap();
            job.id
        });
        let mut wrong = Vec::new();
        for (file, content) in [
            (REQUEST, ""),
            (REQUEST, "{\"id\": 1}"),
            (REQUEST, "[[["),
            (OUTCOME, ""),
            (OUTCOME, "\nresult"),
            (OUTCOME, "{\"end\":\"done\"}\nresult"),
        ] {
            let bad = accepted(&folder, 1);
            fs::write(folder.of(&bad.id).join(file), content).unwrap();
            wrong.push((bad.id, file));
        }
        for file in [REQUEST, AUDIO, OUTCOME] {
            let bad = accepted(&folder, 2);
            let _ = fs::remove_file(folder.of(&bad.id).join(file));
            if file == OUTCOME {
                fs::create_dir(folder.of(&bad.id).join(file)).unwrap();
            }
            wrong.push((bad.id, file));
        }
        // Of another id, and a file in the place of a folder.
        let (renamed, id) = (accepted(&folder, 3), new_id().unwrap());
        fs::rename(folder.of(&renamed.id), folder.of(&id)).unwrap();
        wrong.push((id, REQUEST));
        let id = new_id().unwrap();
        fs::write(folder.of(&id), "").unwrap();
        wrong.push((id, REQUEST));
        // Of nobody here.
        fs::create_dir(folder.of("job_of_mine")).unwrap();
        drop(folder);
        let (_folder, jobs, faults) = open(parent.path());
        let found: std::collections::BTreeSet<&str> = jobs.iter().map(|job| &job.request.id[..]).collect();
        assert_eq!(found, [&good.id[..], &kept[0], &kept[1]].into());
        assert!(jobs.iter().all(|job| job.attempts == 0));
        assert_eq!(faults.len(), wrong.len(), "{faults:#?}");
        for (id, file) in wrong {
            let path = parent.path().join(&id).join(file).display().to_string();
            let names = |fault: &&String| fault.starts_with(&format!("the job {id} ")) && fault.contains(&path);
            assert_eq!(faults.iter().filter(names).count(), 1, "{path}: {faults:#?}");
        }
    }

    #[test]
    fn ids_differ_and_have_their_form() {
        let ids: std::collections::BTreeSet<String> = (0..100).map(|_| new_id().unwrap()).collect();
        assert_eq!(ids.len(), 100);
        assert!(ids.iter().all(|id| is_id(id)));
        for wrong in [
            "job_",
            "job_0",
            "../job_00000000000000000000000000000000",
            "job_0000000000000000000000000000000G",
        ] {
            assert!(!is_id(wrong), "{wrong}");
        }
        let read: Value = json!(End::Cancelled);
        assert_eq!(read, End::Cancelled.name());
        assert_eq!(json!(DeliveryState::GivenUp), DeliveryState::GivenUp.name());
    }
}
