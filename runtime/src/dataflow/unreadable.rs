//! Source files that cannot be read: their partition is refused, and the run goes on.

use super::job::Digested;
use crate::digest::Digest;
use crate::kind::{Source, StageError};
use crate::out::Out;
use crate::partition::Partition;
use crate::plan::ledger::guarded;
use crate::reject::{RejectClass, UNREADABLE};

/// What a source gives for a partition, and the digest of the files that it was made of.
///
/// A partition with a file that cannot be read is refused under a digest of its own: whether the file can be read is
/// found before the source reads, or afterwards, when the source fails. A fault that passes is given a second chance.
///
/// # Errors
/// Where the source fails though its files can be read, or they change while it reads them.
pub(super) fn give(
    body: &mut dyn Source,
    partition: &Partition,
    digest: impl Fn(bool) -> Result<Digested, StageError>,
    leaving: impl Fn() -> bool,
) -> Result<(Out, Digest), StageError> {
    let mut afresh = false;
    loop {
        let before = digest(afresh)?;
        let mut out = Out::new(partition.clone());
        if let Some(why) = before.unreadable {
            out.reject_partition(UNREADABLE, RejectClass::Fault, why);
            return Ok((out, before.digest));
        }
        let failure = match guarded(|| body.read(partition, &mut out)) {
            Ok(()) => {
                // Costs a look at the files' times, and another reading only if they moved.
                let after = digest(false)?;
                if after.digest == before.digest {
                    return Ok((out, before.digest));
                }
                StageError::failed("its source files changed while they were read")
                    .with_help("wait until they are written, then run again")
            }
            Err(error) => error,
        };
        if afresh || leaving() {
            return Err(failure);
        }
        // A note of an earlier run says nothing about whether the files can be read now.
        afresh = true;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::kind::SourcePartition;

    /// Fails at its first calls.
    struct Flaky(u32);

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

    fn file(content: &str, unreadable: bool) -> Digested {
        Digested {
            digest: Digest::of(content.as_bytes()),
            unreadable: unreadable.then(|| "cannot read a.tar".to_string()),
        }
    }

    /// What comes of it, and how often the files were digested.
    fn attempt(failures: u32, states: &[Digested]) -> (Result<(Out, Digest), StageError>, usize) {
        let asked = Cell::new(0);
        let digest = |afresh: bool| {
            let at = asked.replace(asked.get() + 1);
            assert_eq!(afresh, at > 0 && failures > 0 && at == 1, "asked for the {at}th time");
            Ok(states[at.min(states.len() - 1)].clone())
        };
        let given = give(&mut Flaky(failures), &Partition::new("p"), digest, || false);
        (given, asked.get())
    }

    #[test]
    fn a_partition_whose_file_cannot_be_read_is_refused_once() {
        let (given, asked) = attempt(0, &[file("none", true)]);
        let (out, digest) = given.unwrap();
        assert_eq!((asked, digest), (1, Digest::of(b"none")));
        assert_eq!(out.read, [], "the source was not asked");
        let [(_, reject)] = out.rejects.as_slice() else {
            panic!("{:?}", out.rejects)
        };
        assert_eq!(
            (reject.reason.as_str(), reject.class, reject.row),
            (UNREADABLE, RejectClass::Fault, None)
        );
        assert_eq!(reject.detail, "cannot read a.tar");
    }

    #[test]
    fn what_fails_while_it_is_read_is_looked_at_afresh() {
        // Noted as good, and not to be read any more: refused, under the digest of what cannot be read.
        let (given, _) = attempt(1, &[file("good", false), file("none", true)]);
        let (out, digest) = given.unwrap();
        assert_eq!((out.rejects.len(), out.read.len(), digest), (1, 0, Digest::of(b"none")));
        // A fault that passed: nothing of the first attempt is left.
        let (given, _) = attempt(1, &[file("good", false)]);
        let (out, digest) = given.unwrap();
        assert_eq!((out.rejects.len(), out.read.len(), digest), (0, 1, Digest::of(b"good")));
        // The files are fine, and the source is not.
        let (given, _) = attempt(2, &[file("good", false)]);
        assert!(given.err().unwrap().to_string().contains("os error 5"));
    }

    #[test]
    fn files_that_change_all_the_time_end_the_run() {
        let asked = Cell::new(0u8);
        let digest = |_: bool| {
            asked.set(asked.get() + 1);
            Ok(file(&asked.get().to_string(), false))
        };
        let given = give(&mut Flaky(0), &Partition::new("p"), digest, || false);
        assert!(
            given
                .err()
                .unwrap()
                .to_string()
                .contains("changed while they were read")
        );
        assert_eq!(asked.get(), 4);
        // Nobody waits for files when the run is being given up.
        asked.set(0);
        assert!(give(&mut Flaky(0), &Partition::new("p"), digest, || true).is_err());
        assert_eq!(asked.get(), 2);
    }
}
