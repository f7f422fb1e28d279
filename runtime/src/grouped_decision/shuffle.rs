//! What the processes that make one grouped decision send each other.
//!
//! Rows that one process sends another arrive in order, and the rows of a phase (to reducers, back to partitions, decisions)
//! end with a mark. A process that fails tells all others, which then leave.
//!
//! A process sends another one more rows only as that one takes what it was sent (credit-based flow control), and takes what
//! it is sent itself meanwhile: so none waits for one that waits for it. How much may be on its way to a process follows from
//! its own memory, which it tells the others; until then each of them has one message on its way.

use std::collections::VecDeque;
use std::io::Cursor;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arrow::array::{Array, AsArray, RecordBatch};
use arrow::datatypes::{DataType, Field, Schema, UInt32Type};
use arrow::error::ArrowError;
use arrow::ipc::reader::StreamReader;
use arrow::ipc::writer::StreamWriter;
use serde_json::Value;

use super::ShuffledRows;
use super::passes::Pass;
use crate::available_memory::available_memory;
use crate::error::StageError;
use crate::processes::Processes;

/// How often a process that waits for others checks whether one is lost.
const LOOK: Duration = Duration::from_millis(20);

/// Kinds of messages: their first byte.
const ROWS: u8 = 0;
/// The sender sends this process no more rows in this phase.
const END: u8 = 1;
/// What one reducer leaves to the next.
const CARRIED: u8 = 2;
/// From process 0: the next pass, or none in this round.
const PASS: u8 = 3;
/// The sender left; with the error of the stage, or null where it was asked to stop.
const FAILED: u8 = 4;
/// So many bytes of rows that were sent to the sender were taken.
const TAKEN: u8 = 5;
/// So many bytes of rows may be on their way to the sender.
const MAY: u8 = 6;

/// Bytes of rows that may be on their way to a process, shared by those that send them;
const WINDOW: u64 = 256 << 20;
/// no more than this share of the memory that is available there;
const MEMORY_SHARE: u64 = 8;
/// of each at least so many. A message that is larger goes alone.
const LEAST_WINDOW: u64 = 1 << 20;

/// How far a process may be ahead of another one: it ends a phase, and the one that follows, before the other has ended the
/// first. What is more is no message of ours.
const MOST_ENDS: usize = 8;
const MOST_CARRIED: usize = 8;
const MOST_PASSES: usize = 1 << 10;

/// Why a decision was not made.
#[derive(Debug)]
pub(crate) enum Stopped {
    /// Of the stage, in this process.
    Stage(StageError),
    /// Another process failed; none where it was asked to stop.
    Elsewhere(Option<StageError>),
    /// A process is lost; the text names it.
    Lost(String),
    /// A signal came.
    Signal(i32),
}

impl From<StageError> for Stopped {
    fn from(error: StageError) -> Self {
        Stopped::Stage(error)
    }
}

/// One process among those that make a decision together.
pub(crate) struct Shuffle {
    /// None where this process decides alone.
    peers: Option<Peers>,
    /// The signal that asks the run to end.
    stop: Box<dyn Fn() -> Option<i32> + Send + Sync>,
}

struct Peers {
    processes: Arc<Processes>,
    topic: u32,
    inbox: Arc<Inbox>,
}

struct Inbox {
    /// This process.
    own: usize,
    /// Bytes of rows that may be on their way to this process from each other one.
    window: u64,
    received: Mutex<Received>,
    changed: Condvar,
}

/// Messages that came and were not taken yet.
struct Received {
    /// By sender; an end mark is [`Rows::End`].
    rows: Vec<VecDeque<Rows>>,
    /// By sender, bytes of rows that came and were not taken.
    waiting: Vec<u64>,
    /// By receiver, bytes of rows that were sent to it and that it has not taken.
    on_the_way: Vec<u64>,
    /// By receiver, how many of them there may be; 0 until it is told.
    may: Vec<u64>,
    carried: VecDeque<Vec<u8>>,
    passes: VecDeque<Vec<u8>>,
    failed: Option<Vec<u8>>,
}

enum Rows {
    /// The message, with its kind.
    Batch(Vec<u8>),
    End,
}

impl Received {
    fn new(processes: usize) -> Received {
        Received {
            rows: (0..processes).map(|_| VecDeque::new()).collect(),
            waiting: vec![0; processes],
            on_the_way: vec![0; processes],
            may: vec![0; processes],
            carried: VecDeque::new(),
            passes: VecDeque::new(),
            failed: None,
        }
    }

    fn rows_of(&mut self, from: usize) -> &mut VecDeque<Rows> {
        // A message comes from one of the processes.
        &mut self.rows[from]
    }
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, Received> {
        // Each change is one push or pop.
        self.received.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, from: usize, message: Vec<u8>) {
        let mut received = self.lock();
        if let Err(message) = received.put(self, from, message) {
            // What cannot be understood ends the decision, too.
            received.failed = received.failed.take().or(Some(message));
        }
        drop(received);
        self.changed.notify_all();
    }
}

impl Received {
    /// Gives back what tells of a failure, and what is no message of a process that keeps to its part.
    fn put(&mut self, inbox: &Inbox, from: usize, message: Vec<u8>) -> Result<(), Vec<u8>> {
        let processes = self.rows.len();
        let bytes = message.len() as u64;
        let ends = |rows: &VecDeque<Rows>| rows.iter().filter(|rows| matches!(rows, Rows::End)).count();
        match message.first() {
            Some(&ROWS) if self.waiting[from] == 0 || self.waiting[from] + bytes <= inbox.window => {
                self.waiting[from] += bytes;
                self.rows_of(from).push_back(Rows::Batch(message));
            }
            Some(&END) if ends(self.rows_of(from)) < MOST_ENDS => self.rows_of(from).push_back(Rows::End),
            Some(&CARRIED) if (from + 1) % processes == inbox.own && self.carried.len() < MOST_CARRIED => {
                self.carried.push_back(message);
            }
            Some(&PASS) if from == 0 && self.passes.len() < MOST_PASSES => self.passes.push_back(message),
            Some(&TAKEN) => {
                let taken = number_at(&message, 1).ok_or_else(Vec::new)?;
                self.on_the_way[from] = self.on_the_way[from].saturating_sub(taken);
            }
            Some(&MAY) => self.may[from] = number_at(&message, 1).ok_or_else(Vec::new)?,
            Some(&FAILED) => return Err(message),
            _ => return Err(Vec::new()),
        }
        Ok(())
    }
}

/// The number at a place in a message.
fn number_at(message: &[u8], at: usize) -> Option<u64> {
    let bytes = message.get(at..at + 8)?;
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

/// Takes rows of a process.
pub(crate) type Add<'a> = dyn FnMut(usize, ShuffledRows) -> Result<(), StageError> + 'a;

/// The senders of a phase that have not ended it.
pub(crate) struct Phase {
    open: Vec<bool>,
}

impl Shuffle {
    /// A process that decides alone.
    pub fn alone(stop: impl Fn() -> Option<i32> + Send + Sync + 'static) -> Shuffle {
        Shuffle {
            peers: None,
            stop: Box::new(stop),
        }
    }

    /// One of `processes`, which send each other messages of `topic` and listen to it from now on.
    pub fn among(
        processes: &Arc<Processes>,
        topic: u32,
        stop: impl Fn() -> Option<i32> + Send + Sync + 'static,
    ) -> Shuffle {
        let others = processes.count().saturating_sub(1).max(1) as u64;
        let all = window_in(available_memory());
        Shuffle::with_window((all / others).max(LEAST_WINDOW), processes, topic, stop)
    }

    fn with_window(
        window: u64,
        processes: &Arc<Processes>,
        topic: u32,
        stop: impl Fn() -> Option<i32> + Send + Sync + 'static,
    ) -> Shuffle {
        let inbox = Arc::new(Inbox {
            own: processes.process(),
            window,
            received: Mutex::new(Received::new(processes.count())),
            changed: Condvar::new(),
        });
        let into = Arc::clone(&inbox);
        processes.listen(topic, move |from, message| into.put(from, message));
        let shuffle = Shuffle {
            peers: Some(Peers {
                processes: Arc::clone(processes),
                topic,
                inbox,
            }),
            stop: Box::new(stop),
        };
        let mut message = vec![MAY];
        message.extend(window.to_le_bytes());
        shuffle.send_all(&message);
        shuffle
    }

    pub fn processes(&self) -> usize {
        self.peers.as_ref().map_or(1, |peers| peers.processes.count())
    }

    pub fn process(&self) -> usize {
        self.peers.as_ref().map_or(0, |peers| peers.processes.process())
    }

    fn send(&self, to: usize, message: Vec<u8>) {
        if let Some(peers) = &self.peers {
            peers.processes.send(to, peers.topic, Box::new(message));
        }
    }

    fn send_all(&self, message: &[u8]) {
        for to in (0..self.processes()).filter(|to| *to != self.process()) {
            self.send(to, message.to_vec());
        }
    }

    /// # Errors
    /// Where the processes are not to go on.
    pub fn check(&self) -> Result<(), Stopped> {
        if let Some(peers) = &self.peers {
            self.go_on(&mut peers.inbox.lock())?;
        }
        match (self.stop)() {
            Some(signal) => Err(Stopped::Signal(signal)),
            None => Ok(()),
        }
    }

    fn go_on(&self, received: &mut Received) -> Result<(), Stopped> {
        if let Some(message) = received.failed.take() {
            let told = message
                .split_first()
                .and_then(|(_, told)| serde_json::from_slice(told).ok());
            // The others do not know of what this process alone cannot read.
            let unreadable = || StageError::failed("another process sent what cannot be read");
            return Err(told.map_or_else(|| unreadable().into(), Stopped::Elsewhere));
        }
        if let Some(loss) = self.peers.as_ref().and_then(|peers| peers.processes.lost()) {
            return Err(Stopped::Lost(loss.message));
        }
        Ok(())
    }

    /// Waits for what `take` finds among the messages that came; it finds nothing where there are no other processes.
    fn wait<T>(&self, mut take: impl FnMut(&mut Received) -> Option<T>) -> Result<T, Stopped> {
        let Some(peers) = &self.peers else {
            return Err(StageError::failed("there is no process to wait for: a fault of the runtime").into());
        };
        let mut received = peers.inbox.lock();
        loop {
            if let Some(found) = take(&mut received) {
                return Ok(found);
            }
            self.go_on(&mut received)?;
            if let Some(signal) = (self.stop)() {
                return Err(Stopped::Signal(signal));
            }
            received = match peers.inbox.changed.wait_timeout(received, LOOK) {
                Ok((received, _)) => received,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
    }

    /// Tells the others that this process leaves, unless they know why: each sees for itself that a process is lost.
    pub fn leave(&self, why: &Stopped) {
        let told = match why {
            Stopped::Stage(error) => Some(error),
            Stopped::Signal(_) => None,
            Stopped::Elsewhere(_) | Stopped::Lost(_) => return,
        };
        let mut message = vec![FAILED];
        // An error of a stage is texts and numbers.
        message.extend(serde_json::to_vec(&told).unwrap_or_default());
        self.send_all(&message);
    }

    /// At process 0: begins a pass in all processes, or ends the round.
    pub fn send_pass(&self, pass: Option<Pass>) {
        let Pass { number, passes } = pass.unwrap_or(Pass { number: 0, passes: 0 });
        let mut message = vec![PASS];
        message.extend(number.to_le_bytes());
        message.extend(passes.to_le_bytes());
        self.send_all(&message);
    }

    /// At the others: what process 0 begins.
    pub fn receive_pass(&self) -> Result<Option<Pass>, Stopped> {
        let message = self.wait(|received| received.passes.pop_front())?;
        match (number_at(&message, 1), number_at(&message, 9)) {
            (Some(_), Some(0)) => Ok(None),
            (Some(number), Some(passes)) => Ok(Some(Pass { number, passes })),
            _ => Err(StageError::failed("process 0 sent a pass that cannot be read").into()),
        }
    }

    pub fn send_carried(&self, to: usize, carried: &Value) {
        let mut message = vec![CARRIED];
        // Its keys are texts, as it is JSON already.
        message.extend(serde_json::to_vec(carried).unwrap_or_default());
        self.send(to, message);
    }

    /// What the reducer before left.
    pub fn receive_carried(&self) -> Result<Value, Stopped> {
        let message = self.wait(|received| received.carried.pop_front())?;
        let read = serde_json::from_slice(message.get(1..).unwrap_or_default());
        Ok(read.map_err(|error| StageError::failed(format!("another process sent what cannot be read: {error}")))?)
    }

    /// Sends rows once the other process has taken enough of what it was sent before. Meanwhile rows of the phase that come are
    /// taken here.
    pub fn send_rows(
        &self,
        to: usize,
        rows: &ShuffledRows,
        phase: &mut Phase,
        add: &mut Add<'_>,
    ) -> Result<(), Stopped> {
        if self.peers.is_none() {
            return Ok(());
        }
        let message = encode(rows).map_err(StageError::from)?;
        let bytes = message.len() as u64;
        // None: it may be sent.
        while let Some(came) = self.wait(|received| {
            let (on_the_way, may) = (&mut received.on_the_way[to], received.may[to]);
            if *on_the_way == 0 || on_the_way.saturating_add(bytes) <= may {
                *on_the_way += bytes;
                return Some(None);
            }
            next_rows(received, phase).map(Some)
        })? {
            self.take(came, add)?;
        }
        self.send(to, message);
        Ok(())
    }

    /// Takes rows that came, and tells their sender.
    fn take(&self, (from, message): (usize, Vec<u8>), add: &mut Add<'_>) -> Result<(), Stopped> {
        let bytes = message.len() as u64;
        let rows = decode(&message).map_err(StageError::from)?;
        drop(message);
        add(from, rows)?;
        let mut taken = vec![TAKEN];
        taken.extend(bytes.to_le_bytes());
        self.send(from, taken);
        Ok(())
    }

    /// Ends this process's part of a phase for the others.
    pub fn end_rows(&self) {
        self.send_all(&[END]);
    }

    /// Ends it for one process.
    pub fn end_rows_for(&self, to: usize) {
        self.send(to, vec![END]);
    }

    /// A phase in which all others send rows.
    pub fn phase(&self) -> Phase {
        let others = 0..self.processes();
        Phase {
            open: others.map(|process| process != self.process()).collect(),
        }
    }

    /// A phase in which this process is sent nothing.
    pub fn phase_of_sending(&self) -> Phase {
        Phase {
            open: vec![false; self.processes()],
        }
    }

    /// Takes rows of the phase that are there.
    pub fn take_some(&self, phase: &mut Phase, add: &mut Add<'_>) -> Result<(), Stopped> {
        let Some(peers) = &self.peers else { return Ok(()) };
        loop {
            let next = next_rows(&mut peers.inbox.lock(), phase);
            let Some(came) = next else { return Ok(()) };
            self.take(came, add)?;
        }
    }

    /// Takes rows until all have ended the phase.
    pub fn take_all(&self, phase: &mut Phase, add: &mut Add<'_>) -> Result<(), Stopped> {
        while phase.open.contains(&true) {
            let next = self.wait(|received| match next_rows(received, phase) {
                Some(came) => Some(Some(came)),
                None => (!phase.open.contains(&true)).then_some(None),
            })?;
            if let Some(came) = next {
                self.take(came, add)?;
            }
        }
        Ok(())
    }
}

/// Bytes of rows that may be on their way to a process with so much memory; where it is not known, half of the most.
fn window_in(available: Option<u64>) -> u64 {
    available.map_or(WINDOW / 2, |bytes| (bytes / MEMORY_SHARE).min(WINDOW))
}

/// The next rows of any sender, with the sender, without those that follow the end of its phase.
fn next_rows(received: &mut Received, phase: &mut Phase) -> Option<(usize, Vec<u8>)> {
    for (from, (rows, open)) in received.rows.iter_mut().zip(&mut phase.open).enumerate() {
        if !*open {
            continue;
        }
        match rows.pop_front() {
            Some(Rows::Batch(message)) => {
                received.waiting[from] = received.waiting[from].saturating_sub(message.len() as u64);
                return Some((from, message));
            }
            Some(Rows::End) => *open = false,
            None => {}
        }
    }
    None
}

impl Drop for Shuffle {
    fn drop(&mut self) {
        if let Some(peers) = &self.peers {
            peers.processes.close(peers.topic);
        }
    }
}

/// The kind of the message, and an Arrow IPC stream of the rows, whose last column are the partitions.
fn encode(rows: &ShuffledRows) -> Result<Vec<u8>, ArrowError> {
    let mut fields: Vec<_> = rows.rows.schema_ref().fields().iter().cloned().collect();
    fields.push(Arc::new(Field::new("partition", DataType::UInt32, false)));
    let mut columns = rows.rows.columns().to_vec();
    columns.push(Arc::new(rows.partitions.clone()));
    let batch = RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)?;
    let mut writer = StreamWriter::try_new(vec![ROWS], batch.schema_ref())?;
    writer.write(&batch)?;
    writer.into_inner()
}

fn decode(message: &[u8]) -> Result<ShuffledRows, ArrowError> {
    let wrong = |what: &str| ArrowError::IpcError(format!("rows of another process {what}"));
    let (_, stream) = message.split_first().ok_or_else(|| wrong("are cut short"))?;
    let batch = StreamReader::try_new(Cursor::new(stream), None)?
        .next()
        .ok_or_else(|| wrong("are cut short"))??;
    let last = batch
        .num_columns()
        .checked_sub(1)
        .ok_or_else(|| wrong("have no columns"))?;
    let partitions = batch.column(last).as_primitive_opt::<UInt32Type>();
    let partitions = partitions
        .filter(|partitions| partitions.null_count() == 0)
        .ok_or_else(|| wrong("do not name their partitions"))?
        .clone();
    let columns: Vec<usize> = (0..last).collect();
    Ok(ShuffledRows {
        partitions,
        rows: batch.project(&columns)?,
    })
}

#[cfg(test)]
mod tests {
    use arrow::array::{ArrayRef, StringArray, UInt32Array};

    use super::*;
    use crate::harness::joined_processes;

    fn rows() -> ShuffledRows {
        let texts: ArrayRef = Arc::new(StringArray::from(vec![Some("a"), None, Some("")]));
        let schema = Schema::new(vec![Field::new("text", DataType::Utf8, true)]);
        ShuffledRows {
            partitions: UInt32Array::from(vec![7, 7, 3]),
            rows: RecordBatch::try_new(Arc::new(schema), vec![texts]).unwrap(),
        }
    }

    #[test]
    fn rows_go_and_come_and_cut_short_they_are_an_error() {
        let message = encode(&rows()).unwrap();
        let read = decode(&message).unwrap();
        assert_eq!((read.partitions, read.rows), (rows().partitions, rows().rows));
        for end in [0, 1, 5, message.len() / 2] {
            assert!(decode(&message[..end]).is_err(), "{end}");
        }
        let runs: Vec<(u32, usize)> = rows()
            .by_partition()
            .map(|(partition, rows)| (partition, rows.num_rows()))
            .collect();
        assert_eq!(runs, [(7, 2), (3, 1)]);
    }

    /// A sender that is ahead has ended this phase and begun the next one.
    #[test]
    fn rows_of_the_next_phase_stay() {
        let mut received = Received::new(2);
        let sent = [Rows::Batch(vec![1]), Rows::End, Rows::Batch(vec![2])];
        received.rows_of(1).extend(sent);
        let mut phase = Phase {
            open: vec![false, true],
        };
        assert_eq!(next_rows(&mut received, &mut phase), Some((1, vec![1])));
        assert_eq!(next_rows(&mut received, &mut phase), None);
        assert_eq!(next_rows(&mut received, &mut phase), None);
        assert_eq!((phase.open[1], received.rows[1].len()), (false, 1));
    }

    /// `count` rows with a text of `bytes` bytes each, of a partition.
    fn long_rows(place: u32, count: usize, bytes: usize) -> ShuffledRows {
        let texts: ArrayRef = Arc::new(StringArray::from(vec!["x".repeat(bytes); count]));
        let schema = Schema::new(vec![Field::new("text", DataType::Utf8, true)]);
        ShuffledRows {
            partitions: UInt32Array::from(vec![place; count]),
            rows: RecordBatch::try_new(Arc::new(schema), vec![texts]).unwrap(),
        }
    }

    /// Topics above those of stages and of a run's invitations.
    const TOPIC: u32 = (1 << 31) + 7;

    #[test]
    fn a_process_sends_no_more_than_another_one_takes() {
        const WINDOW: u64 = 100_000;
        let processes = joined_processes(2);
        let [to, from] = [0, 1].map(|at| Shuffle::with_window(WINDOW, &processes[at], TOPIC, || None));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut phase = from.phase_of_sending();
                for _ in 0..40 {
                    from.send_rows(0, &long_rows(1, 1, 20_000), &mut phase, &mut |_, _| Ok(()))
                        .unwrap();
                }
                // Larger than what may be on its way.
                from.send_rows(0, &long_rows(1, 2, 90_000), &mut phase, &mut |_, _| Ok(()))
                    .unwrap();
                from.end_rows();
            });
            // All that is sent before anything is taken.
            let inbox = &to.peers.as_ref().unwrap().inbox;
            to.wait(|received| (received.waiting[1] + 20_000 > WINDOW).then_some(()))
                .unwrap();
            let (mut phase, mut rows) = (to.phase(), 0);
            to.take_all(&mut phase, &mut |from, came| {
                assert_eq!(from, 1);
                let waiting = inbox.lock().waiting[1];
                assert!(waiting <= WINDOW || waiting > 180_000, "{waiting}");
                rows += came.rows.num_rows();
                Ok(())
            })
            .unwrap();
            assert_eq!(rows, 42);
        });
    }

    /// Of a process with little memory, by what it says itself: one with much cannot know.
    #[test]
    fn a_process_is_sent_what_it_has_room_for_whatever_others_have() {
        let processes = joined_processes(2);
        let to = Shuffle::with_window(50_000, &processes[0], TOPIC, || None);
        let from = Shuffle::with_window(1 << 30, &processes[1], TOPIC, || None);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut phase = from.phase_of_sending();
                for _ in 0..20 {
                    let sent = from.send_rows(0, &long_rows(1, 1, 20_000), &mut phase, &mut |_, _| Ok(()));
                    sent.unwrap();
                }
                from.end_rows();
            });
            let (mut phase, mut rows) = (to.phase(), 0);
            let taken = to.take_all(&mut phase, &mut |_, came| {
                // Slower than they are sent.
                std::thread::sleep(Duration::from_millis(2));
                rows += came.rows.num_rows();
                Ok(())
            });
            taken.unwrap();
            assert_eq!(rows, 20);
        });
        assert_eq!(window_in(Some(512 << 20)), 64 << 20);
        assert_eq!(window_in(Some(24 << 30)), WINDOW);
    }

    /// Each takes what it is sent while it waits for the others to take what it sends.
    #[test]
    fn processes_that_send_each_other_more_than_may_be_on_its_way_do_not_wait_for_each_other() {
        let processes = joined_processes(3);
        let sum = |process: &Arc<Processes>| {
            let shuffle = Shuffle::with_window(50_000, process, TOPIC, || None);
            let (mut phase, mut rows) = (shuffle.phase(), [0; 3]);
            let mut add = |from: usize, came: ShuffledRows| {
                rows[from] += came.rows.num_rows();
                Ok(())
            };
            for _ in 0..30 {
                for to in (0..3).filter(|to| *to != shuffle.process()) {
                    shuffle
                        .send_rows(to, &long_rows(0, 1, 20_000), &mut phase, &mut add)
                        .unwrap();
                }
            }
            shuffle.end_rows();
            shuffle.take_all(&mut phase, &mut add).unwrap();
            rows
        };
        let sum = &sum;
        std::thread::scope(|scope| {
            let all: Vec<_> = processes
                .iter()
                .map(|process| scope.spawn(move || sum(process)))
                .collect();
            for (own, thread) in all.into_iter().enumerate() {
                let mut expected = [30; 3];
                expected[own] = 0;
                assert_eq!(thread.join().unwrap(), expected);
            }
        });
    }

    /// A message that no process sends ends the decision in all of them, and takes no memory.
    #[test]
    fn what_no_process_sends_ends_the_decision_for_all() {
        let processes = joined_processes(3);
        let number = |kind: u8, bytes: usize| {
            let mut message = vec![kind];
            message.resize(1 + bytes, 1);
            message
        };
        let wrong: [(usize, Vec<Vec<u8>>); 8] = [
            (1, vec![vec![]]),
            (1, vec![vec![99]]),
            // Without an error.
            (1, vec![vec![FAILED]]),
            (1, vec![number(TAKEN, 3)]),
            (1, vec![number(MAY, 7)]),
            // Of one that is not process 0, or not the one before.
            (1, vec![number(PASS, 16)]),
            (1, vec![number(CARRIED, 2)]),
            (2, vec![vec![END]; 20]),
        ];
        for (topic, (from, messages)) in (TOPIC..).zip(wrong) {
            let [first, second] = [0, 3 - from].map(|at| Shuffle::among(&processes[at], topic, || None));
            for message in messages {
                processes[from].send(0, topic, Box::new(message));
            }
            let why = first.wait(|_| None::<()>).unwrap_err();
            assert!(
                matches!(&why, Stopped::Stage(error) if error.to_string().contains("cannot be read")),
                "{why:?}"
            );
            first.leave(&why);
            let why = second.wait(|_| None::<()>).unwrap_err();
            assert!(matches!(&why, Stopped::Elsewhere(Some(_))), "{why:?}");
        }
    }

    /// A process that sends without waiting is refused.
    #[test]
    fn more_than_may_be_on_its_way_is_refused() {
        let processes = joined_processes(2);
        let first = Shuffle::with_window(50_000, &processes[0], TOPIC, || None);
        for _ in 0..4 {
            let message = encode(&long_rows(1, 1, 20_000)).unwrap();
            processes[1].send(0, TOPIC, Box::new(message));
        }
        let why = first.wait(|_| None::<()>).unwrap_err();
        assert!(matches!(why, Stopped::Stage(_)), "{why:?}");
        assert!(first.peers.as_ref().unwrap().inbox.lock().waiting[1] <= 50_000);
    }
}
