//! Times as the formats write them.

/// A time that can be written: what is negative or no number is 0.
pub fn seconds(time: f64) -> f64 {
    if time.is_finite() && time > 0.0 { time } else { 0.0 }
}

/// Whole milliseconds, halves to even, as Python's `round(1000 * seconds)`; 30,000 years at most, so that sums of them
/// do not overflow.
pub fn milliseconds(time: f64) -> u64 {
    (seconds(time) * 1000.0).round_ties_even().min(1e15) as u64
}

/// `HH:MM:SS,mmm`, as SRT has it; more digits for 100 hours and more.
pub fn srt_time(milliseconds: u64) -> String {
    let (hours, rest) = (milliseconds / 3_600_000, minutes(milliseconds));
    format!("{hours:02}:{rest},{:03}", milliseconds % 1000)
}

/// `MM:SS.mmm`, with `HH:` before it from one hour on, as WhisperX writes WebVTT.
pub fn vtt_time(milliseconds: u64) -> String {
    let (hours, rest) = (milliseconds / 3_600_000, minutes(milliseconds));
    let hours = if hours > 0 {
        format!("{hours:02}:")
    } else {
        String::new()
    };
    format!("{hours}{rest}.{:03}", milliseconds % 1000)
}

fn minutes(milliseconds: u64) -> String {
    let seconds = milliseconds / 1000;
    format!("{:02}:{:02}", seconds / 60 % 60, seconds % 60)
}

/// Milliseconds as seconds with three decimals.
pub fn decimal_seconds(milliseconds: u64) -> String {
    format!("{}.{:03}", milliseconds / 1000, milliseconds % 1000)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::test_data;

    #[test]
    fn times_are_pythons() {
        let cases = test_data::speakers_json("timestamps.json");
        let cases = cases.as_array().unwrap();
        assert!(!cases.is_empty());
        for case in cases {
            let time = milliseconds(case["seconds"].as_f64().unwrap());
            assert_eq!(srt_time(time), case["srt"], "{case}");
            assert_eq!(vtt_time(time), case["vtt_short"], "{case}");
        }
    }

    #[test]
    fn hours_over_99_and_what_is_no_time() {
        assert_eq!(srt_time(milliseconds(360_000.0)), "100:00:00,000");
        assert_eq!(vtt_time(milliseconds(4_500_001.25)), "1250:00:01.250");
        assert_eq!(decimal_seconds(milliseconds(360_000.004)), "360000.004");
        for time in [-1.0, -0.0, f64::NAN, f64::NEG_INFINITY, f64::INFINITY] {
            assert_eq!(milliseconds(time), 0, "{time}");
        }
        // Far too long to be a recording, but no panic.
        assert_eq!(srt_time(milliseconds(f64::MAX)), "277777777:46:40,000");
    }

    proptest! {
        #[test]
        fn rounding_keeps_the_order(a in 0.0..1e7f64, b in 0.0..1e7f64) {
            let (first, second) = if a <= b { (a, b) } else { (b, a) };
            prop_assert!(milliseconds(first) <= milliseconds(second));
        }
    }
}
