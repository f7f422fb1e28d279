//! A point at which a test lets a rank hang.
//!
//! With `FLOW_HANG_AT=rank:step` that rank stops for ever before that optimizer step, as one would whose device no longer
//! answers. Without the variable it costs one load.

use std::sync::OnceLock;
use std::time::Duration;

fn parse(value: &str) -> Option<(usize, u64)> {
    let (rank, step) = value.split_once(':')?;
    Some((rank.parse().ok()?, step.parse().ok()?))
}

/// Called where a rank may be asked to hang.
pub(super) fn pass(rank: usize, step: u64) {
    static AT: OnceLock<Option<(usize, u64)>> = OnceLock::new();
    let at = AT.get_or_init(|| std::env::var("FLOW_HANG_AT").ok().and_then(|value| parse(&value)));
    if *at == Some((rank, step)) {
        loop {
            std::thread::sleep(Duration::from_secs(3600));
        }
    }
}
