use super::*;
use crate::flac_encode::encode;
use crate::test_data::{member, tone, wav};

const ALL: [Format; 9] = Format::ALL;

/// What the recordings of tests/data/make.py hold.
fn reference() -> Vec<f64> {
    let value = |n: usize| {
        let t = n as f64 / 16_000.0;
        0.5 * (2.0 * std::f64::consts::PI * (200.0 * t + 500.0 * t * t)).sin()
    };
    (0..16_000).map(value).collect()
}

/// How far the difference lies below the signal, in dB.
fn distance(samples: &Samples) -> f64 {
    let (mut signal, mut noise) = (0.0, 0.0);
    for (expected, got) in reference().iter().zip(&samples.interleaved) {
        signal += expected * expected;
        noise += (expected - f64::from(*got) / 2_147_483_648.0).powi(2);
    }
    10.0 * (signal / noise).log10()
}

#[test]
fn lossy_formats_give_the_tone_in_its_place() {
    // MP3 and Vorbis say how much to trim; the AAC decoder leaves its delay and padding in.
    for (name, format, frames) in [("tone.mp3", Format::Mp3, 16_000), ("tone.ogg", Format::Ogg, 16_000)] {
        let bytes = tone(name);
        let (found, verdict) = probe(&bytes, &ALL).unwrap();
        assert_eq!((found, verdict.frames), (format, frames), "{name}");
        assert_eq!(
            (verdict.info.sample_rate, verdict.info.channels, verdict.info.bits),
            (16_000, 1, 16)
        );
        let samples = decode(&bytes, u64::MAX).unwrap();
        assert!(distance(&samples) > 20.0, "{name}: {} dB", distance(&samples));
        as_flac(&samples, &verdict.audio_hash);
    }
    let bytes = tone("tone.m4a");
    let (found, verdict) = probe(&bytes, &ALL).unwrap();
    assert_eq!(found, Format::M4a);
    let mut samples = decode(&bytes, u64::MAX).unwrap();
    as_flac(&samples, &verdict.audio_hash);
    println!("m4a: {} frames", verdict.frames);
    let extra = samples.interleaved.len() - 16_000;
    assert!(extra < 2 * 1024 + 1024, "{extra}");
    samples.interleaved.drain(..1024);
    assert!(distance(&samples) > 20.0, "m4a: {} dB", distance(&samples));
}

fn as_flac(samples: &Samples, hash: &str) {
    assert_eq!(flac::probe(&encode(samples).unwrap()).unwrap().audio_hash, hash);
}

fn status(bytes: &[u8], formats: &[Format]) -> Status {
    probe(bytes, formats).map_or_else(|fault| fault.status, |_| Status::Ok)
}

#[test]
fn only_allowed_formats_pass() {
    let flac = member("as", "as_0000", "rec_as_0004_000.flac");
    let wav = wav(16_000, 1, &[1, 2, 3]);
    assert_eq!(status(&wav, &[Format::Flac]), Status::NotFlac);
    assert_eq!(status(&wav, &[Format::Flac, Format::Ogg]), Status::UnsupportedFormat);
    assert_eq!(status(&wav, &[Format::Wav]), Status::Ok);
    assert_eq!(status(&flac, &[Format::Wav]), Status::UnsupportedFormat);
    assert_eq!(status(b"hello", &ALL), Status::UnsupportedFormat);
    assert_eq!(status(b"", &ALL), Status::EmptyFile);
    let fault = probe(&tone("tone.opus"), &[Format::Ogg]).unwrap_err();
    assert_eq!(fault.status, Status::UnsupportedFormat);
    assert!(fault.detail.contains("opus"), "{fault}");
    // FLAC is judged as it is alone.
    assert_eq!(probe(&flac, &ALL).unwrap().1, flac::probe(&flac).unwrap());
}

#[test]
fn pcm_is_exact_at_every_width() {
    let decoded = |bytes: &[u8]| {
        let samples = decode(bytes, u64::MAX).unwrap();
        as_flac(&samples, &probe(bytes, &ALL).unwrap().1.audio_hash);
        (samples.info.bits, samples.interleaved)
    };
    assert_eq!(
        decoded(&wav(8_000, 1, &[1, -1, i16::MIN, i16::MAX])),
        (16, vec![1 << 16, -1 << 16, i32::MIN, 0x7fff << 16])
    );
    let raw = |format: u16, bits: u16, data: &[u8]| crate::test_data::raw_wav(16_000, 1, format, bits, data);
    assert_eq!(decoded(&raw(1, 8, &[0, 128, 255])), (8, vec![i32::MIN, 0, 0x7f << 24]));
    assert_eq!(
        decoded(&raw(1, 24, &[1, 2, 3, 0xff, 0xff, 0xff])),
        (24, vec![0x0302_0100, -256])
    );
    // 32 bits lose the last eight; floats are rounded, and cut off at full scale.
    assert_eq!(decoded(&raw(1, 32, &[0xff, 1, 2, 3])), (24, vec![0x0302_0100]));
    let floats: Vec<u8> = [0.5f32, -1.0, 1.5, 1e-9].iter().flat_map(|x| x.to_le_bytes()).collect();
    let full = ((1 << 23) - 1) << 8;
    assert_eq!(decoded(&raw(3, 32, &floats)), (24, vec![1 << 30, i32::MIN, full, 0]));
    assert_eq!(status(&raw(3, 32, &f32::NAN.to_le_bytes()), &ALL), Status::DecodeError);
    // MP3 in a WAV.
    assert_eq!(status(&raw(0x55, 16, &[0; 64]), &ALL), Status::UnsupportedFormat);
}

#[test]
fn what_is_cut_is_found() {
    let whole = wav(16_000, 1, &[7; 1000]);
    assert_eq!(status(&whole, &ALL), Status::Ok);
    for length in [whole.len() - 1, whole.len() / 2, 50] {
        assert_eq!(status(&whole[..length], &ALL), Status::DecodeError, "{length}");
    }
    assert_eq!(status(&wav(16_000, 1, &[]), &ALL), Status::NoAudio);
    for name in ["tone.mp3", "tone.m4a", "tone.ogg"] {
        let bytes = tone(name);
        for length in [bytes.len() / 2, 40] {
            assert_ne!(status(&bytes[..length], &ALL), Status::Ok, "{name} {length}");
        }
    }
    // A header that was not brought up to date: what follows is neither a chunk nor a tag.
    let mut shortened = whole.clone();
    shortened[40..44].copy_from_slice(&1000u32.to_le_bytes());
    assert_eq!(status(&shortened, &ALL), Status::DecodeError);
    assert!(decode(&shortened, 1000).is_err());
    assert_eq!(status(&[&whole[..], b"TAG", &[1; 500]].concat(), &ALL), Status::Ok);
    assert!(decode(&whole, 999).is_err());
    assert_eq!(decode(&whole, 1000).unwrap().interleaved.len(), 1000);
}
