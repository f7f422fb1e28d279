//! Recordings that were transcribed together with one before, and are not asked for yet.

use std::collections::BTreeMap;
use std::path::Path;

use flow_kind::Partition;
use flow_storage::FileVersion;

use crate::recognizer::Recognized;
use crate::streamed::Extent;

/// A recording that was transcribed.
pub(crate) struct Transcribed {
    pub extent: Extent,
    pub recognized: Recognized,
    /// How long it took, in seconds: for one that was decoded with others, its share by the seconds of its windows.
    pub seconds: f64,
}

/// Recordings by partition that are ready before they are asked for, and those that will be asked for next.
#[derive(Default)]
pub(crate) struct ReadAhead {
    pub upcoming: Vec<Partition>,
    ready: BTreeMap<Partition, (FileVersion, Transcribed)>,
}

impl ReadAhead {
    /// Replaces what is ready: what was not asked for in its order will not be.
    pub fn keep(&mut self, ready: BTreeMap<Partition, (FileVersion, Transcribed)>) {
        self.ready = ready;
    }

    /// The recording of a partition, if it is ready and its file is still the one that was read.
    pub fn take(&mut self, partition: &Partition, path: &Path) -> Option<Transcribed> {
        let (identity, transcribed) = self.ready.remove(partition)?;
        let is_same = FileVersion::settled(path)? == identity;
        #[cfg(test)]
        TAKEN.set(TAKEN.get() + usize::from(is_same));
        is_same.then_some(transcribed)
    }
}

#[cfg(test)]
thread_local! {
    /// How many recordings were ready when this thread asked for them.
    pub(crate) static TAKEN: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

#[cfg(test)]
mod tests {
    use std::fs::{File, FileTimes};
    use std::time::{Duration, SystemTime};

    use super::*;

    #[test]
    fn what_was_read_from_a_file_that_changed_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.wav");
        std::fs::write(&path, b"one").unwrap();
        let modified_at = |time: SystemTime| {
            let file = File::options().write(true).open(&path).unwrap();
            file.set_times(FileTimes::new().set_modified(time)).unwrap();
        };
        // However long this test is held up here.
        modified_at(SystemTime::now() + Duration::from_secs(3_600));
        assert!(FileVersion::settled(&path).is_none(), "just written");
        modified_at(SystemTime::now() - Duration::from_secs(3_600));
        assert!(FileVersion::settled(folder.path()).is_none());
        assert!(FileVersion::settled(Path::new("s3://bucket/a.wav")).is_none());
        std::thread::sleep(Duration::from_millis(3_100));
        let identity = FileVersion::settled(&path).unwrap();
        let of = |partition: &str| {
            let extent = Extent {
                samples: 1,
                ..Extent::default()
            };
            let transcribed = Transcribed {
                extent,
                recognized: Recognized::default(),
                seconds: 0.0,
            };
            let mut ahead = ReadAhead::default();
            ahead.keep([(Partition::new(partition), (identity, transcribed))].into());
            ahead
        };
        assert!(of("b").take(&Partition::new("a"), &path).is_none());
        let mut ahead = of("a");
        assert!(ahead.take(&Partition::new("a"), &path).is_some());
        assert!(ahead.take(&Partition::new("a"), &path).is_none(), "only once");
        // The same size, and the same time of modification.
        let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
        std::fs::write(&path, b"two").unwrap();
        modified_at(modified);
        assert!(of("a").take(&Partition::new("a"), &path).is_none());
        // Old enough again: now its identity alone tells.
        std::thread::sleep(Duration::from_millis(3_100));
        assert!(FileVersion::settled(&path).is_some());
        assert!(of("a").take(&Partition::new("a"), &path).is_none());
        std::fs::remove_file(&path).unwrap();
        assert!(of("a").take(&Partition::new("a"), &path).is_none());
    }
}
