//! The thread of a dataflow, and the way to it.

use std::thread;

use crossbeam_channel::{Receiver, Sender, bounded};

use super::choice::Choice;
use super::groups::Groups;
use crate::{Decided, Decision};
use flow_base::error::StageError;
use flow_base::panic_guard::catch_panic;
use flow_store::Artifact;

/// Key rows to take over.
struct Generation {
    decision: Decision,
    keys: Artifact,
    decided: Sender<Result<Decided, StageError>>,
}

/// A dataflow on a thread of its own, which ends when this is dropped.
pub(super) struct Held {
    generations: Sender<Generation>,
    /// Of the generation that is being loaded.
    loading: Option<Receiver<Result<Decided, StageError>>>,
}

impl Held {
    /// Starts a dataflow, which begins to take over `keys`. None if there is no thread for it.
    pub fn load(decision: &Decision, keys: &Artifact) -> Option<Held> {
        let (generations, given) = bounded(1);
        let builder = thread::Builder::new().name("decisions".into());
        builder.spawn(move || run(given)).ok()?;
        let loading = send(&generations, decision, keys).ok();
        Some(Held { generations, loading })
    }

    /// Waits until the key rows are taken over that it was started with, and gives the decisions about them.
    pub fn loaded(&mut self) -> Result<Option<Decided>, StageError> {
        let loading = self.loading.take();
        loading.map(|loading| loading.recv().map_err(|_| ended())?).transpose()
    }

    /// Decides. None while it is still loading.
    ///
    /// # Errors
    /// When the dataflow failed: it is of no more use.
    pub fn decide(&mut self, decision: &Decision, keys: &Artifact) -> Result<Option<Decided>, StageError> {
        if let Some(loading) = &self.loading {
            match loading.try_recv() {
                Ok(loaded) => drop(loaded?),
                Err(crossbeam_channel::TryRecvError::Empty) => return Ok(None),
                Err(crossbeam_channel::TryRecvError::Disconnected) => return Err(ended()),
            }
            self.loading = None;
        }
        let decided = send(&self.generations, decision, keys)?;
        decided.recv().map_err(|_| ended())?.map(Some)
    }
}

fn ended() -> StageError {
    StageError::failed("the thread that decides has ended")
}

fn send(
    to: &Sender<Generation>,
    decision: &Decision,
    keys: &Artifact,
) -> Result<Receiver<Result<Decided, StageError>>, StageError> {
    let (decided, receiver) = bounded(1);
    let generation = Generation {
        decision: decision.clone(),
        keys: keys.clone(),
        decided,
    };
    to.send(generation).map_err(|_| ended())?;
    Ok(receiver)
}

/// The function of the thread: one generation after the other, until nobody sends more, or one fails.
fn run(given: Receiver<Generation>) {
    // Timely's own loop after this function ends with the inputs, which are dropped here.
    timely::execute_directly(move |worker| {
        let Ok(first) = given.recv() else { return };
        let mut flow = match &first.decision {
            Decision::Groups(_) => Flow::Groups(Box::new(Groups::new(worker))),
            Decision::Choice(_) => Flow::Choice(Box::new(Choice::new(worker))),
        };
        let mut next = Some(first);
        while let Some(Generation {
            decision,
            keys,
            decided,
        }) = next.take().or_else(|| given.recv().ok())
        {
            let outcome = catch_panic(|| match (&mut flow, &decision) {
                (Flow::Groups(flow), Decision::Groups(groups)) => flow.decide(worker, groups.as_ref(), &keys),
                (Flow::Choice(flow), Decision::Choice(choice)) => flow.decide(worker, choice.as_ref(), &keys),
                _ => Err(StageError::failed("the kind decides in another way than before")),
            });
            let failed = outcome.is_err();
            // Nobody may wait for it any more.
            let _ = decided.send(outcome);
            if failed {
                return;
            }
        }
    });
}

enum Flow {
    Groups(Box<Groups>),
    Choice(Box<Choice>),
}
