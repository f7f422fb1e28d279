//! Ranges of a tar in object storage are asked for together, and before they are needed.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::{io, ops};

use flow_storage::{AskedRange, InputFile};

use super::wanted::Job;

/// Recordings of a tar in object storage that lie close together are asked for by one request: of this many bytes at most.
const SPAN: u64 = 8 << 20;
/// Bytes that one request asks for at least, where there are enough for all threads.
const LEAST_SPAN: u64 = 1 << 20;
/// Most bytes between two recordings of one request.
const GAP: u64 = 64 << 10;

/// Ranges of a tar that are asked for beyond the one that is needed next.
const AHEAD: usize = 4;
/// Bytes of such ranges, of all tars together, in this process.
const AHEAD_BYTES: u64 = 128 << 20;

/// Recordings that are read together.
#[derive(Debug, PartialEq)]
pub(super) struct Span {
    /// Where they are in the tar.
    pub range: ops::Range<u64>,
    /// Places of the jobs, in the order of the tar.
    pub jobs: Vec<usize>,
    /// Whether the range is asked for as a whole, before the jobs are done.
    pub is_asked_for: bool,
}

/// The jobs in the order of the tar, those together whose recordings are in one range of it. `is_read` says whether the recording
/// of a job will be read.
pub(super) fn spans(jobs: &[Job<'_>], threads: usize, is_read: impl Fn(usize) -> bool) -> Vec<Span> {
    let mut places: Vec<usize> = (0..jobs.len()).collect();
    places.sort_by_key(|place| jobs[*place].member.offset);
    let all: u64 = jobs.iter().fold(0, |sum, job| sum.saturating_add(job.member.size));
    let most = (all / (2 * threads.max(1) as u64)).clamp(LEAST_SPAN, SPAN);
    let mut spans: Vec<Span> = Vec::new();
    for place in places {
        let member = &jobs[place].member;
        // What was probed is compared with the length of the tar where it is asked for.
        let range = member.offset..member.offset.saturating_add(member.size);
        match spans.last_mut() {
            Some(span)
                if member.in_tar
                    && jobs[span.jobs[0]].member.in_tar
                    && range.start <= span.range.end.saturating_add(GAP)
                    && range.end.saturating_sub(span.range.start) <= most =>
            {
                span.range.end = span.range.end.max(range.end);
                span.jobs.push(place);
                span.is_asked_for = true;
            }
            _ => spans.push(Span {
                is_asked_for: member.in_tar && member.size <= SPAN && is_read(place),
                range,
                jobs: vec![place],
            }),
        }
    }
    spans
}

/// Bytes of ranges that were asked for in this process and are not needed yet.
static AHEAD_NOW: AtomicU64 = AtomicU64::new(0);

/// A share of [`AHEAD_BYTES`], given back when it is dropped.
struct Room(u64);

impl Room {
    fn take(bytes: u64) -> Option<Room> {
        let more = |now: u64| now.checked_add(bytes).filter(|sum| *sum <= AHEAD_BYTES);
        let taken = AHEAD_NOW.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        // No room is made where none was taken: it would be given back.
        taken.ok().map(|_| Room(bytes))
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        AHEAD_NOW.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// Hands out the spans of a tar, one after the other, whose ranges were asked for while those before them were used.
pub(super) struct ReadAhead<'a> {
    tar: Option<&'a InputFile>,
    spans: &'a [Span],
    state: Mutex<Handed>,
}

#[derive(Default)]
struct Handed {
    /// Spans that were handed out.
    handed: usize,
    /// Those that come next, with what was asked for.
    asked: VecDeque<(Asked, Room)>,
}

/// A range that was asked for; none where nothing is to be asked for.
pub(super) type Asked = io::Result<Option<AskedRange>>;

impl<'a> ReadAhead<'a> {
    /// `tar` is none where nothing is to be asked for.
    pub fn new(tar: Option<&'a InputFile>, spans: &'a [Span]) -> Self {
        ReadAhead {
            tar,
            spans,
            state: Mutex::default(),
        }
    }

    fn ask(&self, span: &Span) -> Asked {
        match self.tar.filter(|_| span.is_asked_for) {
            Some(tar) => tar.ask_for(span.range.clone()),
            None => Ok(None),
        }
    }

    /// The next span.
    pub fn next(&self) -> Option<(&'a Span, Asked)> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let span = self.spans.get(state.handed)?;
        state.handed += 1;
        let asked = match state.asked.pop_front() {
            Some((asked, _)) => asked,
            None => self.ask(span),
        };
        while state.asked.len() < AHEAD
            && let Some(next) = self.spans.get(state.handed + state.asked.len())
        {
            let bytes = if next.is_asked_for {
                next.range.end - next.range.start
            } else {
                0
            };
            let Some(room) = Room::take(bytes) else { break };
            state.asked.push_back((self.ask(next), room));
        }
        Some((span, asked))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use flow_storage::{Location, ObjectUrl};
    use flow_storage_testing::TestServer;

    use super::super::wanted::Member;
    use super::*;

    pub fn member(offset: u64, size: u64, in_tar: bool) -> Member {
        Member {
            status: "ok".into(),
            offset,
            size,
            in_tar,
            audio_hash: String::new(),
            is_flac: true,
            decoded_bytes: 0,
        }
    }

    pub fn url(text: &str) -> ObjectUrl {
        match Location::parse(text).unwrap() {
            Location::Object(url) => url,
            Location::Local(path) => panic!("{} is a path", path.display()),
        }
    }

    /// Bytes of a tar, and recordings in it as if they had been probed: many small ones close together, some apart, and one that
    /// is read in several ranges.
    pub fn tar() -> (Vec<u8>, Vec<Member>) {
        let bytes: Vec<u8> = (0..40u64 << 20).map(|at| (at * at / 7 + at) as u8).collect();
        let mut members: Vec<Member> = (0..200).map(|at| member(512 + at * 60_000, 59_000, true)).collect();
        members.extend((0..5).map(|at| member((14 << 20) + at * 500_000, 200_000, true)));
        members.push(member(17 << 20, 20 << 20, true));
        members.push(member(38 << 20, 2 << 20, true));
        (bytes, members)
    }

    /// Tests that ask for ranges, whose bytes are counted in the whole process.
    pub static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

    /// An object with these bytes, and what serves it.
    pub fn served(bytes: &[u8]) -> (tempfile::TempDir, TestServer, InputFile) {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("bucket")).unwrap();
        std::fs::write(root.path().join("bucket/a.tar"), bytes).unwrap();
        let server = TestServer::start(root.path()).unwrap();
        let object = server.storage().open(&url("s3://bucket/a.tar")).unwrap();
        (root, server, object.into())
    }

    /// Whether all room was given back.
    pub fn is_all_given_back() -> bool {
        AHEAD_NOW.load(Ordering::Relaxed) == 0
    }

    #[test]
    fn recordings_that_lie_close_together_are_read_together() {
        let mebibyte = 1 << 20;
        // Behind one another in another order; then one behind a gap, one that is too long, one with a wild size, a file.
        let mut members: Vec<Member> = (0..40).rev().map(|at| member(at * mebibyte, mebibyte, true)).collect();
        members.push(member(100 * mebibyte, 5, true));
        members.push(member(200 * mebibyte, 20 * mebibyte, true));
        members.push(member(u64::MAX - 3, 10, true));
        members.push(member(0, 5, false));
        let job = |member| Job {
            components: vec!["a"],
            member,
            encode: false,
        };
        let jobs: Vec<Job<'_>> = members.iter().map(job).collect();
        let spans = spans(&jobs, 2, |_| true);
        let mut places: Vec<usize> = spans.iter().flat_map(|span| span.jobs.clone()).collect();
        places.sort_unstable();
        assert_eq!(places, (0..members.len()).collect::<Vec<_>>());
        for Span {
            range,
            jobs: places,
            is_asked_for,
        } in &spans
        {
            let alone = places.len() == 1;
            assert!(alone || range.end - range.start <= SPAN, "{range:?}");
            assert!(!is_asked_for || range.end - range.start <= SPAN, "{range:?}");
            assert!(alone || *is_asked_for);
            for place in places {
                let member = &members[*place];
                assert!(alone || member.in_tar);
                assert!(member.offset >= range.start && member.offset.saturating_add(member.size) <= range.end);
            }
        }
        assert!(spans.len() <= 10, "{spans:?}");
    }

    /// What is asked for ahead stays below its bound however many tars are read, and the range that is needed is asked for in any
    /// case.
    #[test]
    fn what_is_asked_for_ahead_is_bounded_in_the_whole_process() {
        let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let large = |at: u64| Span {
            range: at * SPAN..(at + 1) * SPAN,
            jobs: vec![0],
            is_asked_for: true,
        };
        let spans: Vec<Span> = (0..8).map(large).collect();
        let tars: Vec<ReadAhead<'_>> = (0..10).map(|_| ReadAhead::new(None, &spans)).collect();
        for (round, span) in spans.iter().enumerate() {
            for tar in &tars {
                assert_eq!(tar.next().unwrap().0, span);
                let asked = tars
                    .iter()
                    .map(|tar| tar.state.lock().unwrap().asked.len() as u64 * SPAN);
                let asked: u64 = asked.sum();
                assert!(asked <= AHEAD_BYTES, "{asked}");
                assert_eq!(AHEAD_NOW.load(Ordering::Relaxed), asked);
            }
            if round == 0 {
                assert_eq!(AHEAD_NOW.load(Ordering::Relaxed), AHEAD_BYTES, "all of it is used");
            }
        }
        drop(tars);
        assert_eq!(AHEAD_NOW.load(Ordering::Relaxed), 0, "room is given back");
    }

    #[test]
    fn some_ranges_are_asked_for_before_they_are_needed() {
        let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let (bytes, members) = tar();
        let (_root, server, object) = served(&bytes);
        let jobs: Vec<Job<'_>> = members[..200]
            .iter()
            .map(|member| Job {
                components: vec!["a"],
                member,
                encode: false,
            })
            .collect();
        let spans = spans(&jobs, 64, |_| true);
        assert!(spans.len() > AHEAD + 4, "{}", spans.len());
        let ahead = ReadAhead::new(Some(&object), &spans);
        for taken in 0..spans.len() {
            let (span, asked) = ahead.next().unwrap();
            assert_eq!(span, &spans[taken]);
            let wanted = (taken + 1 + AHEAD).min(spans.len()) as u64;
            let begun = std::time::Instant::now();
            while server.requests("GET") < wanted {
                assert!(begun.elapsed().as_secs() < 60, "{} of {wanted}", server.requests("GET"));
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            let got = asked.unwrap().unwrap().bytes().unwrap();
            assert!(got == bytes[span.range.start as usize..span.range.end as usize]);
            assert_eq!(server.requests("GET"), wanted, "no more than these");
        }
        assert!(ahead.next().is_none());
    }
}
