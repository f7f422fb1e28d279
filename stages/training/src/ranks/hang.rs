//! A test can make a rank hang, as one whose device no longer answers.
//!
//! With `FLOW_HANG_AT=rank:step` in the environment that rank stops for ever before that optimizer step. Without the
//! variable the check costs one load.

use std::sync::OnceLock;
use std::time::Duration;

fn parse(value: &str) -> Option<(usize, u64)> {
    let (rank, step) = value.split_once(':')?;
    Some((rank.parse().ok()?, step.parse().ok()?))
}

/// Hangs if this rank and optimizer step are those of `FLOW_HANG_AT`.
pub(super) fn hang_if_requested(rank: usize, step: u64) {
    static AT: OnceLock<Option<(usize, u64)>> = OnceLock::new();
    let at = AT.get_or_init(|| std::env::var("FLOW_HANG_AT").ok().and_then(|value| parse(&value)));
    if *at == Some((rank, step)) {
        loop {
            std::thread::sleep(Duration::from_secs(3600));
        }
    }
}
