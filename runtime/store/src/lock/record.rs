//! The content of a lock file.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::machine::boot_id;
use crate::error::Holder;
use flow_base::digest::Digest;
use flow_base::host::host_name;

/// Maximum size of a record in bytes; `flow` writes no larger one.
const LONGEST: usize = 1 << 14;

/// The owner of a lock. Fields may be missing in files of older versions and in a file that was just created.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct LockRecord {
    host: String,
    pid: u32,
    run: String,
    /// The boot id of the owner's kernel.
    boot: String,
    /// A random token of this acquisition of the lock.
    pub token: String,
    /// The counter that is incremented while the owner lives.
    pub beat: u64,
    /// The owner has released the lock, and left the file because of the names in it.
    pub released: bool,
    /// Names in the folder that are not the user's.
    pub temporary: Vec<String>,
    /// The file, as it was read.
    #[serde(skip)]
    text: String,
}

/// A unique token.
pub fn new_token() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let named = format!("{} {} {number} {:?}", boot_id(), std::process::id(), SystemTime::now());
    Digest::of(named.as_bytes()).short()
}

impl LockRecord {
    /// This process as owner.
    pub fn new(run: &str, temporary: Vec<String>) -> LockRecord {
        LockRecord {
            host: host_name(),
            pid: std::process::id(),
            run: run.to_string(),
            boot: boot_id().to_string(),
            token: new_token(),
            temporary,
            ..LockRecord::default()
        }
    }

    pub fn text(&self) -> &str {
        &self.text
    }

    pub fn is_of_boot(&self, boot: &str) -> bool {
        !boot.is_empty() && self.boot == boot
    }

    pub fn is_of_run(&self, run: &str) -> bool {
        self.run == run
    }

    pub fn holder(&self) -> Holder {
        Holder::new(&self.host, self.pid, &self.run)
    }

    /// Writes the record over the one before, without a moment at which the file is empty.
    pub fn write(&self, file: &File) -> io::Result<()> {
        let text = serde_json::to_string(self).map_err(io::Error::other)?;
        file.write_all_at(text.as_bytes(), 0)?;
        file.set_len(text.len() as u64)
    }

    /// Whether the file that is now at `path` has the record of this acquisition.
    pub fn is_at(&self, path: &Path) -> bool {
        at(path).is_ok_and(|found| found.is_some_and(|found| found.token == self.token))
    }
}

/// The record of an open file; an empty one where there is none.
pub(super) fn read(file: &File) -> LockRecord {
    let mut bytes = vec![0; LONGEST];
    let mut length = 0;
    while length < bytes.len() {
        match file.read_at(&mut bytes[length..], length as u64) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    let text = String::from_utf8_lossy(&bytes[..length]).into_owned();
    // After a crash the end of a longer record may follow.
    let mut values = serde_json::Deserializer::from_str(&text).into_iter::<LockRecord>();
    let record = values.next().and_then(Result::ok).unwrap_or_default();
    LockRecord { text, ..record }
}

/// The record of the file at `path`, opened anew so that a network file system asks its server; none if it is gone.
pub(super) fn at(path: &Path) -> io::Result<Option<LockRecord>> {
    match File::open(path) {
        Ok(file) => Ok(Some(read(&file))),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}
