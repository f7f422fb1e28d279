use flow_storage::Storage;
use serde::Deserialize;

use super::*;
use crate::flac;
use crate::test_data::{member_of, parity_corpus, parity_golden, wav};

#[derive(Deserialize)]
struct Clip {
    file: String,
    shard_id: String,
    segment_id: String,
    sample_rate: u32,
    channels: u32,
    bits: u32,
    out_len: usize,
}

/// The largest difference from the reference, which computes in `f64` and rounds once: one rounding of a mean
/// to `f32` here (6e-8 of a sample below 1) and the sum of the filter's taps over it.
const TOLERANCE: f32 = 2e-7;

#[test]
fn equals_the_reference_at_every_rate_width_and_number_of_channels() {
    let folder = parity_golden("micro").join("resample");
    let clips: Vec<Clip> = serde_json::from_slice(&std::fs::read(folder.join("index.json")).unwrap()).unwrap();
    assert!(!clips.is_empty());
    for clip in clips {
        // Packed here, plain in a folder that the environment names.
        let packed = std::fs::read(folder.join(format!("{}.zst", clip.file)));
        let expected = match packed {
            Ok(packed) => zstd::stream::decode_all(packed.as_slice()).unwrap(),
            Err(_) => std::fs::read(folder.join(&clip.file)).unwrap(),
        };
        let expected: Vec<f32> = expected
            .chunks_exact(4)
            .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
            .collect();
        let lang = &clip.shard_id[..2];
        let bytes = member_of(
            &parity_corpus("micro"),
            lang,
            &clip.shard_id,
            &format!("{}.flac", clip.segment_id),
        );
        let info = flac::probe(&bytes).unwrap().info;
        assert_eq!(
            (info.sample_rate, info.channels, info.bits),
            (clip.sample_rate, clip.channels, clip.bits)
        );
        let got = decode(&bytes, 20.0).unwrap();
        assert_eq!(
            (got.len(), expected.len()),
            (clip.out_len, clip.out_len),
            "{}",
            clip.file
        );
        let worst = got
            .iter()
            .zip(&expected)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        println!(
            "{} {} Hz {} ch: largest difference {worst:e}",
            clip.file, clip.sample_rate, clip.channels
        );
        assert!(worst <= TOLERANCE, "{}: {worst:e}", clip.file);
    }
}

#[test]
fn a_wav_is_the_mean_of_its_channels() {
    let got = decode(&wav(16_000, 2, &[100, 300, -32768, -32768, 1, 2]), 1.0).unwrap();
    assert_eq!(got, [200.0 / 32768.0, -1.0, 1.5 / 32768.0]);
    assert_eq!(decode(&wav(48_000, 1, &[0; 100]), 1.0).unwrap().len(), 34);
}

#[test]
fn what_cannot_be_decoded_says_so() {
    for bytes in [&b""[..], b"hello", b"RIFF\xff\xff\xff\xffWAVEfmt ", b"OggS", b"ID3\x04"] {
        assert!(
            decode(bytes, 1.0).is_err_and(|error| !matches!(error, AudioError::Read { .. })),
            "{bytes:?}"
        );
    }
    let second = wav(16_000, 1, &[0; 16_001]);
    assert!(matches!(decode(&second, 1.0), Err(AudioError::TooLong { .. })));
    assert!(decode(&second, f64::NAN).is_err());
    assert!(matches!(
        decode(&wav(500, 1, &[0; 10]), 1.0),
        Err(AudioError::SampleRate(500))
    ));
    let path = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"));
    assert!(matches!(
        read_range(&Storage::default(), path, 10, u64::MAX),
        Err(AudioError::TooLarge { .. })
    ));
    assert!(matches!(
        read_range(&Storage::default(), path, u64::MAX - 5, 100),
        Err(AudioError::PastEnd { .. })
    ));
    assert!(matches!(
        read_file(&Storage::default(), std::path::Path::new("/no/such/file")),
        Err(AudioError::Read { .. })
    ));
}
