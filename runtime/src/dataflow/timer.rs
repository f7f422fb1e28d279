//! Calls an operator again after some time.

use std::time::{Duration, Instant};

use timely::scheduling::Activator;

/// At most one scheduled call of an operator. An operator is also activated for other reasons and sets its timer each
/// time; if each of these scheduled a call, which sets the timer again, their number would grow with every partition.
pub(super) struct Timer {
    activator: Activator,
    after: Duration,
    due: Option<Instant>,
}

impl Timer {
    pub fn new(activator: Activator, after: Duration) -> Self {
        Timer {
            activator,
            after,
            due: None,
        }
    }

    /// Schedules a call of the operator, unless one is scheduled already.
    pub fn set(&mut self) {
        if rings(&mut self.due, self.after, Instant::now()) {
            self.activator.activate_after(self.after);
        }
    }
}

/// Whether a call has to be scheduled now; `due` is the time of the one scheduled last.
fn rings(due: &mut Option<Instant>, after: Duration, now: Instant) -> bool {
    let asks = due.is_none_or(|due| due <= now);
    if asks {
        *due = Some(now + after);
    }
    asks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_one_call_to_come_however_often_it_is_asked_for() {
        let (start, after) = (Instant::now(), Duration::from_millis(50));
        let mut due = None;
        // An operator that is called every 7 ms for other reasons, and asks each time.
        let asked: Vec<u64> = (0..40)
            .map(|turn| turn * 7)
            .filter(|at| rings(&mut due, after, start + Duration::from_millis(*at)))
            .collect();
        assert_eq!(asked, [0, 56, 112, 168, 224]);
    }
}
