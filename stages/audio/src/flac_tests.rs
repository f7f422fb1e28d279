use proptest::prelude::*;

use super::*;
use crate::test_data::member;

fn good() -> Vec<u8> {
    member("as", "as_0000", "rec_as_0004_000.flac")
}

fn status(bytes: &[u8]) -> Status {
    probe(bytes).map_or_else(|fault| fault.status, |_| Status::Ok)
}

#[test]
fn the_verdicts() {
    let good = good();
    let verdict = probe(&good).unwrap();
    assert_eq!(
        (
            verdict.info.sample_rate,
            verdict.info.channels,
            verdict.info.bits,
            verdict.frames
        ),
        (16000, 1, 16, 19920)
    );
    assert_eq!(
        verdict.audio_hash,
        "15b21c62fd8fe6154fe3832839022c81686eb358725641e807aaef21e6de82c8"
    );
    assert_eq!(status(b""), Status::EmptyFile);
    assert_eq!(status(b"RIFF...."), Status::NotFlac);
    assert_eq!(status(b"fLaC"), Status::DecodeError);
    assert_eq!(status(&good[..30]), Status::DecodeError);
    assert_eq!(status(&good[..good.len() - 1]), Status::DecodeError);
    assert_eq!(status(&good[..good.len() / 2]), Status::DecodeError);
    // Only the metadata.
    let mut at = 4;
    loop {
        let length = u32::from_be_bytes([0, good[at + 1], good[at + 2], good[at + 3]]) as usize;
        let last = good[at] & 0x80 != 0;
        at += 4 + length;
        if last {
            break;
        }
    }
    assert_eq!(status(&good[..at]), Status::NoAudio);
}

#[test]
fn streaminfo_is_held_against_the_samples() {
    let good = good();
    let total_at = 4 + 4 + 17;
    // STREAMINFO has one frame fewer, one more, does not know.
    for (low_byte, expected) in [(-1i8, Status::DecodeError), (1, Status::DecodeError)] {
        let mut bytes = good.clone();
        bytes[total_at] = bytes[total_at].wrapping_add_signed(low_byte);
        assert_eq!(status(&bytes), expected);
    }
    let mut unknown = good.clone();
    unknown[total_at - 3..=total_at].fill(0);
    assert_eq!(status(&unknown), Status::Ok);
    let mut other_md5 = good.clone();
    other_md5[total_at + 1] ^= 1;
    let fault = probe(&other_md5).unwrap_err();
    assert!(fault.detail.contains("MD5"), "{fault}");
    let mut no_md5 = good;
    no_md5[total_at + 1..total_at + 17].fill(0);
    assert_eq!(status(&no_md5), Status::Ok);
}

#[test]
fn decoding_stops_at_its_limit() {
    let good = good();
    let samples = decode(&good, 19920).unwrap();
    assert_eq!(samples.interleaved.len(), 19920);
    assert!(decode(&good, 19919).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    /// Whatever is damaged, there is a verdict; and where it is `ok`, the samples are the right ones, since
    /// the file has an MD5.
    #[test]
    fn damage_is_found(
        place in any::<prop::sample::Index>(),
        value in any::<u8>(),
        cut in any::<prop::sample::Index>(),
        do_cut in any::<bool>(),
    ) {
        let good = good();
        let hash = probe(&good).unwrap().audio_hash;
        let mut bytes = good.clone();
        let place = place.index(bytes.len());
        bytes[place] = value;
        if do_cut {
            bytes.truncate(cut.index(bytes.len() + 1));
        }
        match probe(&bytes) {
            // The rate enters the hash, and is outside the MD5.
            Ok(verdict) if verdict.info.sample_rate == 16000 && bytes[26..42] == good[26..42] => {
                prop_assert_eq!(verdict.audio_hash, hash);
            }
            Ok(_) => prop_assert!((18..42).contains(&place)),
            Err(fault) => prop_assert_ne!(fault.status, Status::Ok),
        }
    }
}
