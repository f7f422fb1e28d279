//! Source files that cannot be read, or change while they are read: their partition is refused, and the run goes on.

use super::job::{FilesDigest, changed};
use flow_base::digest::Digest;
use flow_base::error::StageError;
use flow_base::panic_guard::catch_panic;
use flow_base::partition::Partition;
use flow_base::reject::{CHANGED, RejectClass, UNREADABLE};
use flow_kind::kind::Source;
use flow_kind::out::Out;
use flow_store::DigestedFile;

/// The files of a partition, as [`give`] needs to know them.
pub(super) trait SourceFiles {
    /// Whether the source reads them from beginning to end itself, so that they need not be read before, for their digests.
    fn read_by_source(&self) -> bool;

    /// Their digest; read again in any case, if they are to be read `afresh`.
    fn digest(&self, afresh: bool) -> Result<FilesDigest, StageError>;

    /// Takes what the source has read itself. Gives the digest of the files, if these are all.
    fn note_read(&self, read: Vec<DigestedFile>) -> Result<Option<Digest>, StageError>;

    /// Whether the run is being aborted.
    fn leaving(&self) -> bool;
}

/// What a source gives for a partition, and the digest of the files that it was made of.
///
/// A partition with a file that cannot be read is rejected under a separate digest. Whether the files can be read is
/// checked before the source reads, or afterwards, when the source fails. After a failure that does not persist the
/// source reads once more.
///
/// Files that change while the source reads them, twice, end the run, or where [`Source::refuses_changed_files`] says so are a
/// reject. Its digest is that of no state of the files, so that the next run reads them again.
///
/// # Errors
/// Where the source fails though its files can be read and stay as they are, or where changes end the run.
pub(super) fn give(
    body: &mut dyn Source,
    partition: &Partition,
    id_column: &'static str,
    files: &impl SourceFiles,
) -> Result<(Out, Digest), StageError> {
    let mut afresh = false;
    loop {
        let before = match files.read_by_source() && !afresh {
            true => None,
            false => Some(files.digest(afresh)?),
        };
        let mut out = Out::new(partition.clone()).named_by(id_column);
        if let Some(FilesDigest {
            unreadable: Some(why),
            digest,
        }) = before
        {
            out.reject_partition(UNREADABLE, RejectClass::Fault, why);
            return Ok((out, digest));
        }
        let read = catch_panic(|| body.read(partition, &mut out));
        let failure = match read.and_then(|()| files.note_read(std::mem::take(&mut out.digested))) {
            Ok(own) => {
                // Compares the files' times, and reads the files again only if these changed.
                let after = files.digest(false)?;
                let read = before.as_ref().map(|before| before.digest).or(own);
                if read == Some(after.digest) && after.unreadable.is_none() {
                    return Ok((out, after.digest));
                }
                changed()
            }
            Err(error) => error,
        };
        if files.leaving() {
            return Err(failure);
        }
        if afresh {
            let Some(FilesDigest { digest, .. }) = before.filter(|_| body.refuses_changed_files()) else {
                return Err(failure);
            };
            // A source may fail on files that change, for example where one is shorter than when it was read before.
            if files.digest(false)?.digest == digest {
                return Err(failure);
            }
            let mut out = Out::new(partition.clone()).named_by(id_column);
            let why = "it changed while it was read: run again once it is written";
            out.reject_partition(CHANGED, RejectClass::Fault, why);
            return Ok((
                out,
                Digest::of_parts([b"flow: changed files".as_slice(), digest.as_bytes()]),
            ));
        }
        // A note of an earlier run says nothing about whether the files can be read now.
        afresh = true;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use flow_kind::kind::SourcePartition;

    /// Fails at its first calls.
    struct Flaky(u32);

    /// The same, which refuses files that change.
    struct Refusing(Flaky);

    impl Source for Refusing {
        fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
            Ok(Vec::new())
        }

        fn refuses_changed_files(&self) -> bool {
            true
        }

        fn read(&mut self, partition: &Partition, out: &mut Out) -> Result<(), StageError> {
            self.0.read(partition, out)
        }
    }

    impl Source for Flaky {
        fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
            Ok(Vec::new())
        }

        fn read(&mut self, _: &Partition, out: &mut Out) -> Result<(), StageError> {
            out.read(1);
            if self.0 > 0 {
                self.0 -= 1;
                return Err(StageError::failed("Input/output error (os error 5)"));
            }
            Ok(())
        }
    }

    fn file(content: &str, unreadable: bool) -> FilesDigest {
        FilesDigest {
            digest: Digest::of(content.as_bytes()),
            unreadable: unreadable.then(|| "cannot read a.tar".to_string()),
        }
    }

    /// Files with a fixed result for each check.
    struct Known<F> {
        digest: F,
        read_by_source: bool,
        /// What the source finds that it has read.
        own: Option<Digest>,
        leaving: bool,
    }

    impl<F: Fn(bool) -> FilesDigest> SourceFiles for Known<F> {
        fn read_by_source(&self) -> bool {
            self.read_by_source
        }

        fn digest(&self, afresh: bool) -> Result<FilesDigest, StageError> {
            Ok((self.digest)(afresh))
        }

        fn note_read(&self, _: Vec<DigestedFile>) -> Result<Option<Digest>, StageError> {
            Ok(self.own)
        }

        fn leaving(&self) -> bool {
            self.leaving
        }
    }

    /// What comes of it, and how often the files were digested.
    fn attempt(
        failures: u32,
        states: &[FilesDigest],
        read_by_source: bool,
    ) -> (Result<(Out, Digest), StageError>, usize) {
        let asked = Cell::new(0);
        let before = usize::from(!read_by_source);
        let digest = |afresh: bool| {
            let at = asked.replace(asked.get() + 1);
            assert_eq!(afresh, failures > 0 && at == before, "asked for the {at}th time");
            states[at.min(states.len() - 1)].clone()
        };
        let files = Known {
            digest,
            read_by_source,
            own: read_by_source.then(|| Digest::of(b"good")),
            leaving: false,
        };
        let given = give(&mut Flaky(failures), &Partition::new("p"), "id", &files);
        (given, asked.get())
    }

    #[test]
    fn files_that_the_source_reads_itself_are_not_read_before() {
        let (given, asked) = attempt(0, &[file("good", false)], true);
        assert_eq!((given.unwrap().1, asked), (Digest::of(b"good"), 1));
        // The source failed: only then it is checked whether the file is the cause.
        let (given, _) = attempt(1, &[file("none", true)], true);
        let (out, digest) = given.unwrap();
        assert_eq!((out.rejects.len(), digest), (1, Digest::of(b"none")));
        let (given, _) = attempt(1, &[file("good", false)], true);
        assert_eq!(given.unwrap().0.read.len(), 1);
    }

    #[test]
    fn a_source_that_read_other_bytes_than_there_are_now_reads_again() {
        // Replaced just after it was read, or not there at the moment when the source looked for it.
        for own in [Some(Digest::of(b"before")), None] {
            let afresh = Cell::new(0);
            let files = Known {
                digest: |again: bool| {
                    afresh.set(afresh.get() + u32::from(again));
                    file("good", false)
                },
                read_by_source: true,
                own,
                leaving: false,
            };
            let (out, digest) = give(&mut Flaky(0), &Partition::new("p"), "id", &files).unwrap();
            assert_eq!((out.read.len(), digest, afresh.get()), (1, Digest::of(b"good"), 1));
        }
    }

    #[test]
    fn a_partition_whose_file_cannot_be_read_is_refused_once() {
        let (given, asked) = attempt(0, &[file("none", true)], false);
        let (mut out, digest) = given.unwrap();
        assert_eq!((asked, digest), (1, Digest::of(b"none")));
        assert_eq!(out.read, [], "the source was not asked");
        assert_eq!(out.rejects.len(), 1);
        let (_, rejects) = out.rejects.pop().unwrap();
        let reject = rejects.sorted().next().unwrap().unwrap();
        assert_eq!(
            (reject.reason.as_str(), reject.class, reject.row),
            (UNREADABLE, RejectClass::Fault, None)
        );
        assert_eq!(reject.detail, "cannot read a.tar");
    }

    #[test]
    fn what_fails_while_it_is_read_is_looked_at_afresh() {
        // Noted as good, and not to be read any more: refused, under the digest of what cannot be read.
        let (given, _) = attempt(1, &[file("good", false), file("none", true)], false);
        let (out, digest) = given.unwrap();
        assert_eq!((out.rejects.len(), out.read.len(), digest), (1, 0, Digest::of(b"none")));
        // A fault that passed: nothing of the first attempt is left.
        let (given, _) = attempt(1, &[file("good", false)], false);
        let (out, digest) = given.unwrap();
        assert_eq!((out.rejects.len(), out.read.len(), digest), (0, 1, Digest::of(b"good")));
        // The files are fine, and the source is not.
        let (given, _) = attempt(2, &[file("good", false)], false);
        assert!(given.err().unwrap().to_string().contains("os error 5"));
    }

    #[test]
    fn files_that_change_all_the_time_end_the_run() {
        let asked = Cell::new(0u8);
        let mut files = Known {
            digest: |_: bool| {
                asked.set(asked.get() + 1);
                file(&asked.get().to_string(), false)
            },
            read_by_source: false,
            own: None,
            leaving: false,
        };
        let given = give(&mut Flaky(0), &Partition::new("p"), "id", &files);
        assert!(
            given
                .err()
                .unwrap()
                .to_string()
                .contains("changed while they were read")
        );
        assert_eq!(asked.get(), 4);
        // Some sources refuse them, whether they gave something or failed; what they gave is dropped.
        for failures in [0, 2] {
            asked.set(0);
            let source = &mut Refusing(Flaky(failures));
            let (out, digest) = give(source, &Partition::new("p"), "id", &files).unwrap();
            let (_, rejects) = out.rejects.into_iter().next().unwrap();
            let reject = rejects.sorted().next().unwrap().unwrap();
            assert_eq!((reject.reason.as_str(), reject.row, out.read.len()), (CHANGED, None, 0));
            // The next run finds nothing under the digest of what is there then.
            assert!((0..=u8::MAX).all(|state| digest != Digest::of(state.to_string().as_bytes())));
        }
        // A failure with files that stay as they are is none of theirs.
        let same = Known {
            digest: |_: bool| file("good", false),
            read_by_source: false,
            own: None,
            leaving: false,
        };
        let given = give(&mut Refusing(Flaky(2)), &Partition::new("p"), "id", &same);
        assert!(given.err().unwrap().to_string().contains("os error 5"));
        // Files are not waited for when the run is being aborted.
        asked.set(0);
        files.leaving = true;
        assert!(give(&mut Flaky(0), &Partition::new("p"), "id", &files).is_err());
        assert_eq!(asked.get(), 2);
    }
}
