use super::*;
use crate::flac_encode::encode;
use crate::stream::core_of_he_aac;
use crate::test_data::{member, tone, wav};

const ALL: [Format; 11] = Format::ALL;

/// What the recordings of tests/data/make.py hold.
fn reference() -> Vec<f64> {
    let value = |n: usize| {
        let t = n as f64 / 16_000.0;
        0.5 * (2.0 * std::f64::consts::PI * (200.0 * t + 500.0 * t * t)).sin()
    };
    (0..16_000).map(value).collect()
}

/// How far the difference is below the signal, in dB.
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
    // All of them say how much to trim: M4A by its edit list.
    for (name, format, frames) in [
        ("tone.mp3", Format::Mp3, 16_000),
        ("tone.ogg", Format::Ogg, 16_000),
        ("tone.m4a", Format::M4a, 16_000),
    ] {
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

/// The frames of `tone.m4a` as ADTS (ISO/IEC 14496-3 section 1.A.2.2): AAC-LC of one channel at 16 kHz, with or without the bytes of a
/// check sum.
fn adts_frames(checked: bool) -> Vec<Vec<u8>> {
    let source = MediaSourceStream::new(
        Box::new(Cursor::new(tone("tone.m4a"))),
        MediaSourceStreamOptions::default(),
    );
    let mut reader = IsoMp4Reader::try_new(source, FormatOptions::default()).unwrap();
    let mut frames = Vec::new();
    while let Some(packet) = reader.next_packet().unwrap() {
        let header = if checked { 9 } else { 7 };
        let length = header + packet.data.len();
        let mut frame = vec![
            0xff,
            if checked { 0xf0 } else { 0xf1 },
            0x60,
            0x40 | (length >> 11) as u8,
        ];
        frame.extend([(length >> 3) as u8, (length << 5) as u8 | 0x1f, 0xfc]);
        frame.resize(header, 0);
        frame.extend_from_slice(&packet.data);
        frames.push(frame);
    }
    frames
}

#[test]
fn aac_without_a_container_is_that_of_a_container() {
    let frames = adts_frames(false);
    let expected = decode(&frames.concat(), u64::MAX).unwrap();
    // Without a container nothing says what the delay of the encoder is.
    let presented = decode(&tone("tone.m4a"), u64::MAX).unwrap().interleaved;
    assert_eq!(expected.interleaved[1_024..][..16_000], presented);
    let is_expected = |bytes: &[u8], what: &str| {
        assert_eq!(recognise(bytes), Ok(Format::Aac), "{what}");
        let found = decode(bytes, u64::MAX).unwrap_or_else(|fault| panic!("{what}: {fault}"));
        assert_eq!(
            (&found.info, &found.interleaved),
            (&expected.info, &expected.interleaved),
            "{what}"
        );
        let (_, verdict) = probe(bytes, &ALL).unwrap();
        as_flac(&found, &verdict.audio_hash);
    };
    is_expected(&frames.concat(), "plain");
    is_expected(&adts_frames(true).concat(), "with check sums");
    // As segments of HTTP streams begin; joined ones have one in the middle, too.
    let tag = b"ID3\x04\0\0\0\0\0\x0bPRIV\0\0\0\x01\0\0x";
    let (first, last) = frames.split_at(frames.len() / 2);
    is_expected(&[tag, &first.concat()[..], tag, &last.concat()].concat(), "with tags");

    let said = |bytes: &[u8]| probe(bytes, &ALL).unwrap_err().to_string();
    let whole = frames.concat();
    assert!(said(&whole[..whole.len() - 5]).contains("the file is truncated"));
    let gap = [&first.concat()[..], &[0x55; 300], &last.concat()].concat();
    assert!(said(&gap).contains("a part is missing or damaged"), "{}", said(&gap));
    let empty = [0xff, 0xf1, 0x60, 0x40, 0, 0xff, 0xfc].repeat(20);
    assert!(said(&empty).contains("a frame without data"), "{}", said(&empty));
    // From within a frame on.
    let part = [&first.concat()[..first.concat().len() - 20], &last.concat()].concat();
    assert!(probe(&part, &ALL).is_err());
    assert!(probe(&[&whole[..], &[0x55; 30_000]].concat(), &ALL).is_err());
    // Channels that are named within the frames.
    let mut unnamed = whole.clone();
    unnamed[3] &= !0xc0;
    assert_eq!(status(&unnamed, &ALL), Status::UnsupportedFormat);
}

/// HE-AAC is AAC-LC at half the rate and what the upper half of the band is to be made of: the former is decoded.
#[test]
fn of_he_aac_its_core_is_decoded() {
    let mut bytes = tone("tone.m4a");
    let expected = decode(&bytes, u64::MAX).unwrap();
    let config = [0x14, 0x08, 0x56, 0xe5, 0];
    let place = bytes.windows(5).position(|found| found == config).unwrap();
    // HE-AAC at 32 kHz, and with parametric stereo.
    for config in [[0x2c, 0x0a, 0x88, 0, 0], [0xec, 0x0a, 0x88, 0, 0]] {
        bytes[place..place + 5].copy_from_slice(&config);
        let found = decode(&bytes, u64::MAX).unwrap();
        assert_eq!(found.interleaved, expected.interleaved, "{config:02x?}");
    }
    assert_eq!(core_of_he_aac(&[0x2c, 0x0a, 0x88]), Some([0x14, 0x08]));
    // AAC-LC, that with a rate of its own, and another codec within.
    for other in [
        &[0x14, 0x08, 0x56, 0xe5, 0][..],
        &[0x2f, 0x8a, 0x88],
        &[0x2c, 0x0a, 0x84],
        &[],
    ] {
        assert_eq!(core_of_he_aac(other), None, "{other:02x?}");
    }
}
