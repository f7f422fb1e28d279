use proptest::prelude::*;

use super::*;
use crate::flac::{self, StreamInfo};
use crate::test_data::good_members;

fn samples(sample_rate: u32, channels: u32, bits: u32, values: &[i32]) -> Samples {
    let whole = values.len() / channels as usize * channels as usize;
    Samples {
        info: StreamInfo {
            sample_rate,
            channels,
            bits,
            total_frames: 0,
            md5: [0; 16],
        },
        // Kept to the width by shifting out what is above it.
        interleaved: values[..whole].iter().map(|value| value << (32 - bits)).collect(),
    }
}

/// Decoding gives the samples back; the decoder checks both checksums of frames, the count and the MD5.
#[track_caller]
fn returns(samples: &Samples) -> Vec<u8> {
    let file = encode(samples).expect("FLAC can hold them");
    let decoded = flac::decode(&file, u64::MAX).unwrap();
    assert_eq!(decoded.interleaved, samples.interleaved);
    let (got, given) = (&decoded.info, &samples.info);
    assert_eq!((got.sample_rate, got.channels), (given.sample_rate, given.channels));
    assert_eq!(got.bits, if given.bits <= 16 { 16 } else { 24 });
    assert_ne!(got.md5, [0; 16]);
    file
}

#[test]
fn speech_stays_the_same_and_small() {
    let (mut before, mut after) = (0, 0);
    for original in good_members("mini", "hi", "hi_0001") {
        let samples = flac::decode(&original, u64::MAX).unwrap();
        let file = returns(&samples);
        assert_eq!(
            flac::probe(&file).unwrap().audio_hash,
            flac::probe(&original).unwrap().audio_hash
        );
        before += original.len();
        after += file.len();
    }
    // The reference encoder predicts better; that is the price of simplicity.
    println!("{after} bytes instead of {before}");
    assert!(before > 0 && after * 10 < before * 13, "{after} of {before}");
}

#[test]
fn the_ends_of_every_range() {
    returns(&samples(1, 1, 16, &[5]));
    returns(&samples(MOST_RATE, 8, 24, &[-1; 8 * 5]));
    returns(&samples(
        16_000,
        1,
        16,
        &[i16::MAX.into(), i16::MIN.into()].repeat(5000),
    ));
    returns(&samples(
        16_000,
        2,
        24,
        &[(1 << 23) - 1, -(1 << 23), -(1 << 23), (1 << 23) - 1].repeat(3000),
    ));
    // Blocks of exactly one length, and one more frame.
    for frames in [4095, 4096, 4097, 8192] {
        let ramp: Vec<i32> = (0..frames).map(|n| n * 7 % 1000 - 500).collect();
        returns(&samples(16_000, 1, 16, &ramp));
    }
    // Frame numbers of one to three bytes.
    let long: Vec<i32> = (0..4096 * 2100).map(|n: i32| n / 4096 % 3).collect();
    returns(&samples(48_000, 1, 16, &long));
}

/// FFmpeg finds no duration of frames that leave their rate to STREAMINFO, and loses the last ones when it seeks. Codes are
/// those of RFC 9639, section 9.1.2.
#[test]
fn frames_say_their_sample_rate() {
    let own = [
        (88_200, 1),
        (176_400, 2),
        (192_000, 3),
        (8_000, 4),
        (16_000, 5),
        (22_050, 6),
        (24_000, 7),
        (32_000, 8),
        (44_100, 9),
        (48_000, 10),
        (96_000, 11),
        (200_000, 12),
        (11_025, 13),
        (1, 13),
        (255_990, 14),
        (600_000, 14),
        (MOST_RATE, 14),
        (123_457, 0),
    ];
    for (rate, code) in own {
        // A whole block, and a shorter one with its length.
        for values in [vec![3; 4096], vec![3; 17]] {
            let file = returns(&samples(rate, 1, 16, &values));
            // Behind the marker and STREAMINFO.
            let header = &file[42..];
            assert_eq!(header[2] & 0xf, code, "{rate}");
            let length = if values.len() == 4096 { 0 } else { 2 };
            let number = &header[5 + length..];
            match code {
                12 => assert_eq!(u32::from(number[0]) * 1_000, rate),
                13 => assert_eq!(u32::from(u16::from_be_bytes([number[0], number[1]])), rate),
                14 => assert_eq!(u32::from(u16::from_be_bytes([number[0], number[1]])) * 10, rate),
                _ => {}
            }
        }
    }
}

#[test]
fn what_flac_cannot_hold_is_refused() {
    assert!(encode(&samples(16_000, 1, 16, &[])).is_none());
    assert!(encode(&samples(16_000, 9, 16, &[0; 9])).is_none());
    assert!(encode(&samples(MOST_RATE + 1, 1, 16, &[0])).is_none());
    assert!(encode(&samples(0, 1, 16, &[0])).is_none());
    assert!(encode(&samples(16_000, 1, 32, &[0])).is_none());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// Noise of any width, steps, silence: whatever the signal, it comes back.
    #[test]
    fn whatever_goes_in_comes_out(
        channels in 1u32..=8,
        bits in 8u32..=24,
        rate in 1u32..=MOST_RATE,
        runs in prop::collection::vec((0u32..24, 1usize..3000, any::<u32>()), 1..6),
    ) {
        // Runs of noise of different loudness.
        let mut values = Vec::new();
        for (loudness, length, seed) in runs {
            let mut state = u64::from(seed) << 1 | 1;
            for _ in 0..length {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                values.push((state >> 33) as i32 >> (31 - loudness.min(bits - 1)));
            }
        }
        let samples = samples(rate, channels, bits, &values);
        prop_assume!(!samples.interleaved.is_empty());
        let file = encode(&samples).unwrap();
        prop_assert_eq!(&flac::decode(&file, u64::MAX).unwrap().interleaved, &samples.interleaved);
        prop_assert_eq!(encode(&samples).unwrap(), file);
    }
}

#[test]
fn a_signal_is_kept_to_sixteen_bits() {
    let signal: Vec<f32> = (0..20_000).map(|n| (n as f32 * 0.03).sin() * 1.1).collect();
    let clip = encode_signal(&signal, 16_000).unwrap();
    let decoded = crate::decode::decode(&clip, 10.0).unwrap();
    assert_eq!(decoded.len(), signal.len());
    for (ours, theirs) in decoded.iter().zip(&signal) {
        assert!(
            (ours - theirs.clamp(-1.0, 1.0)).abs() <= 1.0 / 32768.0,
            "{ours} {theirs}"
        );
    }
    assert_eq!(encode_signal(&[], 16_000), None);
}
