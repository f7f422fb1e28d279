//! How often each row comes in an epoch when every language has its quota of time.
//!
//! The rows of a language are arranged on a circle, in an order that depends only on the seed; a row takes an arc as
//! long as its recording. A quota is a number of whole turns and a rest: the turns give every row alike, and the rest
//! is the arc that begins where that of the epoch before ended. So an epoch is known from its number alone, no row
//! comes twice in an arc, and what one epoch leaves out comes first in the next. Times are whole microseconds, so that
//! the arcs of consecutive epochs meet exactly.

use crate::error::SamplingError;
use crate::manifest_rows::ManifestRows;
use crate::mt19937::Mt19937;
use crate::plan::Packing;

/// An epoch may have this many times the rows of the manifest, ...
const MOST_TIMES: u128 = 16;
/// ... and at least so many.
const ALWAYS_ALLOWED: u128 = 1 << 20;

/// The quota of one language.
struct Quota {
    rows: u64,
    /// Length of a turn, in microseconds.
    turn: u64,
    turns: u32,
    /// Where the arc begins, and how long it is: less than a turn.
    arc_start: u64,
    arc: u64,
}

impl Quota {
    fn holds(&self, place: u64) -> bool {
        let from_start = match place.checked_sub(self.arc_start) {
            Some(beyond) => beyond,
            None => self.turn - (self.arc_start - place),
        };
        from_start < self.arc
    }
}

/// For each row how many times it comes in `epoch`.
pub fn times(rows: &ManifestRows, packing: &Packing, epoch: u64) -> Result<Vec<u32>, SamplingError> {
    rows.check()?;
    let quotas = quotas(rows, packing, epoch)?;
    // Another generator than any epoch's, since epochs add less than 2^64 to the seed.
    let mut circle: Vec<u32> = (0..rows.durations.len() as u32).collect();
    Mt19937::new(i128::from(packing.seed) + (1 << 80)).shuffle(&mut circle);
    let mut ends = vec![0u64; quotas.len()];
    let mut times = vec![0; circle.len()];
    for row in circle {
        let row = row as usize;
        let language = usize::from(rows.languages.codes()[row]);
        let (quota, end) = (&quotas[language], &mut ends[language]);
        times[row] = quota.turns + u32::from(quota.holds(*end));
        *end += microseconds(rows.durations[row]);
    }
    Ok(times)
}

/// From 1 µs to 71 minutes: 2^32 rows of that length are less than 2^64 µs.
fn microseconds(seconds: f64) -> u64 {
    u64::from(((seconds * 1e6).round() as u32).max(1))
}

fn quotas(rows: &ManifestRows, packing: &Packing, epoch: u64) -> Result<Vec<Quota>, SamplingError> {
    let mut turns = vec![0u64; rows.languages.names().len()];
    for (&code, &seconds) in rows.languages.codes().iter().zip(&rows.durations) {
        turns[usize::from(code)] += microseconds(seconds);
    }
    let total: u64 = turns.iter().sum();
    let shares: Vec<f64> = turns
        .iter()
        .map(|&turn| match packing.temperature {
            temperature if temperature <= 0.0 => 1.0,
            temperature => (turn as f64 / total as f64).powf(temperature),
        })
        .collect();
    let sum: f64 = shares.iter().sum();
    let mut quotas = Vec::with_capacity(turns.len());
    let (mut epoch_rows, mut most) = (0u128, (0u64, 0));
    for (code, ((&turn, share), rows)) in turns.iter().zip(shares).zip(rows.languages.counts()).enumerate() {
        // Rounding must not drop a row where every row should come once.
        let quota = match packing.temperature {
            1.0 => turn,
            _ => (total as f64 * (share / sum)).round() as u64,
        };
        let (whole, arc) = (quota / turn, quota % turn);
        epoch_rows += u128::from(whole + 1) * u128::from(rows);
        most = most.max((whole, code));
        quotas.push(Quota {
            rows,
            turn,
            turns: u32::try_from(whole).unwrap_or(u32::MAX),
            arc_start: (u128::from(epoch) * u128::from(arc) % u128::from(turn)) as u64,
            arc,
        });
    }
    let allowed = (MOST_TIMES * rows.durations.len() as u128)
        .max(ALWAYS_ALLOWED)
        .min(u32::MAX.into());
    if epoch_rows > allowed {
        let (times, code) = most;
        return Err(SamplingError::Repeats {
            language: rows.languages.names()[code].clone(),
            rows: quotas[code].rows,
            times,
        });
    }
    Ok(quotas)
}

#[cfg(test)]
#[path = "quota_tests.rs"]
mod tests;
