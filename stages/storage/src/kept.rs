//! Copies of objects that are kept on this machine for later processes, in a folder of bounded size.
//!
//! ```text
//! <folder>/copies/<digest of URL and version>/lock             held shared while a process uses the copy
//! <folder>/copies/<digest of URL and version>/files            sizes and digests, written last: the copy is whole
//! <folder>/copies/<digest of URL and version>/content/<name>   the copy: a file, or a folder with files
//! <folder>/blocks/<digest of URL and version>/<number>         see `blocks.rs`
//! <folder>/work/<digest of URL and service>                    what is written here for a prefix, and never removed
//! <folder>/state/<digest of URL and service>                   the copy of a state directory, never removed, either
//! ```
//!
//! What was used last goes last: see `evict.rs`.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use crate::error::{StorageError, StorageFault};
use crate::evict;
use crate::kept_folder::{failed, folder_name, is_at, make_private, version_of};
use crate::location::{ObjectUrl, Scheme};
use crate::object_reader::ObjectReader;
use crate::open_bucket;
use crate::stat::Stat;
use crate::storage::Storage;

/// Most files of a copy that is a folder.
const MOST_FILES: usize = 10_000;

/// Times that a copy is made again when it is gone or damaged by the time that it is to be used.
const ATTEMPTS: usize = 3;

const LOCK: &str = "lock";
const FILES: &str = "files";
const CONTENT: &str = "content";

/// Is given lines of progress, about one a second. False ends what is under way.
pub type Progress<'a> = &'a mut dyn FnMut(&str) -> bool;

impl Storage {
    /// The path of a copy on this machine of the object of this URL, or of the folder of objects right below it whose names
    /// `wanted` takes. The copy is made if there is none of the object as it is now: in `flow` in `FLOW_STORAGE_CACHE`, or else in
    /// `flow/storage` where programs keep what they can get again (`$XDG_CACHE_HOME` or `~/.cache`). It stays for later processes, as
    /// far as `FLOW_STORAGE_CACHE_BYTES` allow it, and for this one until it ends. Its last part is the name that the object has.
    /// None: `progress` ended it.
    ///
    /// Each file is compared with its digest, and what was damaged is copied again.
    ///
    /// # Errors
    /// When there is no such object, it cannot be read, or the copy not be written.
    pub fn keep(
        &self,
        url: &ObjectUrl,
        wanted: &dyn Fn(&str) -> bool,
        progress: Progress<'_>,
    ) -> Result<Option<PathBuf>, StorageError> {
        if let Some(path) = self.remembered().kept.get(url) {
            return Ok(Some(path.clone()));
        }
        let sources = self.sources(url, wanted)?;
        let folder = self.kept()?;
        let version: String = sources
            .files
            .values()
            .map(|(url, stat)| version_of(url, stat))
            .collect();
        let copy = Copy {
            folder: folder.copies().join(folder_name(&version)),
            url,
            sources,
        };
        if self.held().contains_key(&copy.folder) {
            // Its digests were compared when this process began to use it.
            if copy.has_its_sizes() {
                self.remembered().kept.insert(url.clone(), copy.path());
                return Ok(Some(copy.path()));
            }
            // Somebody changed it; nobody else can mend it while it is held.
            self.held().remove(&copy.folder);
        }
        for _ in 0..ATTEMPTS {
            if let Some(lock) = copy.hold()? {
                self.held().insert(copy.folder.clone(), lock);
                self.remembered().kept.insert(url.clone(), copy.path());
                evict::to(&folder, folder.limit);
                return Ok(Some(copy.path()));
            }
            let Some(_lock) = copy.lock_alone(progress)? else {
                return Ok(None);
            };
            if copy.is_whole() {
                continue;
            }
            evict::to(&folder, folder.limit.saturating_sub(copy.sources.bytes()));
            if !copy.fill(self, progress)? {
                return Ok(None);
            }
        }
        let said = format!("{} does not stay as it is written", copy.folder.display());
        Err(StorageError::of(StorageFault::Cache, &url.to_string(), &said))
    }

    /// The objects that make a copy.
    fn sources(&self, url: &ObjectUrl, wanted: &dyn Fn(&str) -> bool) -> Result<Sources, StorageError> {
        let none = || StorageError::of(StorageFault::NotFound, &url.to_string(), "");
        let can_list = !matches!(url.scheme(), Scheme::Https | Scheme::Http);
        if !url.key().is_empty() {
            let found = match self.look(url) {
                // Those who may not list a bucket are denied what is not there.
                Err(error) if error.fault == StorageFault::PermissionDenied && can_list => None,
                found => found?,
            };
            if let Some(stat) = found {
                return Ok(Sources {
                    is_folder: false,
                    files: BTreeMap::from([(url.name().to_string(), (url.clone(), stat))]),
                });
            }
        }
        if !can_list {
            return Err(none());
        }
        let mut files = BTreeMap::new();
        for entry in self.list_folder(url)?.objects {
            let name = entry.url.name().to_string();
            if wanted(&name) {
                files.insert(name, (entry.url, entry.stat));
            }
        }
        if files.is_empty() {
            return Err(none());
        }
        if files.len() > MOST_FILES {
            let said = format!("{} objects are directly below it", files.len());
            return Err(StorageError::of(StorageFault::TooLarge, &url.to_string(), &said));
        }
        Ok(Sources { is_folder: true, files })
    }

    /// The folder on this machine for what is worked on here and belongs below the prefix `url`. It is beside the copies, and
    /// nothing is removed from it.
    ///
    /// # Errors
    /// When no variable of the environment names a folder for copies, or `FLOW_STORAGE_CACHE_BYTES` is not a number.
    pub fn working_folder(&self, url: &ObjectUrl) -> Result<PathBuf, StorageError> {
        Ok(self.kept()?.path.join("work").join(self.folder_of_prefix(url)))
    }

    /// The folder on this machine for the copy of the state directory at the prefix `url`. Nothing is removed from it.
    ///
    /// # Errors
    /// As [`Storage::working_folder`].
    pub fn state_folder(&self, url: &ObjectUrl) -> Result<PathBuf, StorageError> {
        Ok(self.kept()?.path.join("state").join(self.folder_of_prefix(url)))
    }

    /// The name of a folder for what belongs below a prefix of one service: a bucket of the same name elsewhere is another one.
    fn folder_of_prefix(&self, url: &ObjectUrl) -> String {
        match open_bucket::service_of(url, self.environment()).as_str() {
            "" => folder_name(&url.to_string()),
            service => folder_name(&format!("{url}\0{service}")),
        }
    }
}

/// The objects of a copy, by their names in it.
struct Sources {
    is_folder: bool,
    files: BTreeMap<String, (ObjectUrl, Stat)>,
}

impl Sources {
    fn bytes(&self) -> u64 {
        self.files.values().map(|(_, stat)| stat.size).sum()
    }
}

struct Copy<'a> {
    folder: PathBuf,
    url: &'a ObjectUrl,
    sources: Sources,
}

impl Copy<'_> {
    /// The name of the object or prefix; of a whole bucket its own.
    fn path(&self) -> PathBuf {
        let name = match self.url.name() {
            "" => self.url.bucket(),
            name => name,
        };
        self.folder.join(CONTENT).join(name)
    }

    fn file(&self, name: &str) -> PathBuf {
        match self.sources.is_folder {
            true => self.path().join(name),
            false => self.path(),
        }
    }

    /// The lock of a copy that is whole, held shared: as long as it is, nobody removes the copy. None where there is no such
    /// copy, or it is being made.
    fn hold(&self) -> Result<Option<File>, StorageError> {
        let path = self.folder.join(LOCK);
        let lock = match OpenOptions::new().read(true).write(true).open(&path) {
            Ok(lock) => lock,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(self.url, &path)(error)),
        };
        if matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock)) || !is_at(&lock, &path) || !self.is_whole() {
            return Ok(None);
        }
        // Says when the copy was used last.
        let _ = lock.set_modified(SystemTime::now());
        Ok(Some(lock))
    }

    /// The lock, held alone, or shared where the copy is whole by now. None: `progress` ended the wait.
    ///
    /// # Errors
    /// When the copy is damaged and others use it.
    fn lock_alone(&self, progress: Progress<'_>) -> Result<Option<File>, StorageError> {
        let path = self.folder.join(LOCK);
        let failed = failed(self.url, &path);
        loop {
            make_private(&self.folder).map_err(&failed)?;
            let opened = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path);
            let lock = match opened {
                Ok(lock) => lock,
                // The folder was removed in between.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(failed(error)),
            };
            // On a file system without locks none is taken.
            while matches!(lock.try_lock(), Err(TryLockError::WouldBlock)) {
                if !is_at(&lock, &path) {
                    break;
                }
                if lock.try_lock_shared().is_ok() {
                    // Nobody makes the copy, but others use it.
                    if self.is_whole() {
                        return Ok(Some(lock));
                    }
                    let why = "the copy is damaged, and another process uses it: end that, or remove the folder";
                    return Err(failed(io::Error::other(why)));
                }
                if !progress(&format!("{}: another process copies it; waiting", self.url)) {
                    return Ok(None);
                }
                std::thread::sleep(Duration::from_millis(500));
            }
            if is_at(&lock, &path) {
                return Ok(Some(lock));
            }
        }
    }

    fn has_its_sizes(&self) -> bool {
        let mut files = self.sources.files.iter();
        files.all(|(name, (_, stat))| fs::metadata(self.file(name)).is_ok_and(|found| found.len() == stat.size))
    }

    /// Whether all files are there and have the digests that were noted.
    fn is_whole(&self) -> bool {
        let Ok(text) = fs::read_to_string(self.folder.join(FILES)) else {
            return false;
        };
        let noted: BTreeMap<&str, &str> = text
            .lines()
            .filter_map(|line| line.split_once(' '))
            .map(|(digest, name)| (name, digest))
            .collect();
        let is_same = |(name, (_, stat)): (&String, &(ObjectUrl, Stat))| {
            let digest = digest_of(&self.file(name), stat.size);
            digest.is_ok_and(|digest| noted.get(name.as_str()) == Some(&digest.as_str()))
        };
        noted.len() == self.sources.files.len() && self.sources.files.iter().all(is_same)
    }

    /// Copies all files. False: `progress` ended it.
    fn fill(&self, storage: &Storage, progress: Progress<'_>) -> Result<bool, StorageError> {
        let noted = self.folder.join(FILES);
        let failed = failed(self.url, &self.folder);
        remove(&noted).map_err(&failed)?;
        match fs::remove_dir_all(self.folder.join(CONTENT)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let all = self.sources.bytes();
        let (mut done, mut told) = (0u64, None::<Instant>);
        let mut lines = String::new();
        for (name, (url, stat)) in &self.sources.files {
            let path = self.file(name);
            if let Some(parent) = path.parent() {
                fs::create_dir_all(parent).map_err(&failed)?;
            }
            let mut file = File::create(&path).map_err(&failed)?;
            let mut hasher = blake3::Hasher::new();
            let reader = ObjectReader::new(storage.clone(), url.clone(), stat.clone());
            let copied = reader.copy_to(&mut |bytes| {
                if told.is_none_or(|told| told.elapsed() >= Duration::from_secs(1)) {
                    told = Some(Instant::now());
                    let megabytes = |bytes: u64| bytes as f64 / 1e6;
                    let (done, all) = (megabytes(done), megabytes(all));
                    if !progress(&format!("{}: {done:.1} of {all:.1} MB copied", self.url)) {
                        return Ok(false);
                    }
                }
                done += bytes.len() as u64;
                hasher.update(bytes);
                file.write_all(bytes).map(|()| true)
            });
            match copied {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                Err(error) => match StorageError::in_io(&error) {
                    Some(error) => return Err(error.clone()),
                    None => return Err(failed(error)),
                },
            }
            file.sync_all().map_err(&failed)?;
            lines += &format!("{} {name}\n", hasher.finalize().to_hex());
        }
        let writing = self.folder.join("files.writing");
        let write = || -> io::Result<()> {
            let mut file = File::create(&writing)?;
            file.write_all(lines.as_bytes())?;
            file.sync_all()?;
            fs::rename(&writing, &noted)
        };
        write().map_err(&failed)?;
        Ok(true)
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// BLAKE3 of a file of this size.
fn digest_of(path: &Path, size: u64) -> io::Result<String> {
    let mut file = File::open(path)?;
    if file.metadata()?.len() != size {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finalize().to_hex().to_string()),
            count => hasher.update(&buffer[..count]),
        };
    }
}
