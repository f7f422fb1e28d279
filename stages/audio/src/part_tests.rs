use flow_storage::Storage;
use proptest::prelude::*;

use super::*;
use crate::decode::decode;
use crate::flac::{self, Samples, StreamInfo};
use crate::flac_encode;
use crate::recording_reader::DECODED_FRAMES;
use crate::test_data::{good_members, raw_wav, tone, wav};

/// A decoded part.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Part {
    /// 16 kHz, mono, in [-1, 1].
    pub signal: Vec<f32>,
    /// How many frames of the recording were decoded for it; none where it was decoded from the beginning.
    pub decoded_frames: Option<u64>,
}

/// As [`decode_row`], but what ends with the recording may end before it should.
pub(crate) fn decode_part(
    path: &Path,
    range: Option<(u64, u64)>,
    start: f64,
    seconds: f64,
    max_seconds: f64,
) -> Result<Part, AudioError> {
    let bytes = StoredBytes::open(&Storage::default(), path, range)?;
    let wanted = sample_at(start)..sample_at(start + seconds);
    let decoded = around(&bytes, path, &wanted, max_seconds, &mut Mixing::default())?;
    Ok(Part {
        signal: decoded.cut(&wanted, start)?.to_vec(),
        decoded_frames: decoded.decoded_frames,
    })
}

/// As it was done before parts could be decoded alone.
fn from_the_whole(bytes: &[u8], start: f64, seconds: f64) -> Option<Vec<f32>> {
    let mut signal = decode(bytes, 1e6).unwrap();
    let sample = |seconds: f64| (seconds * f64::from(SAMPLE_RATE)).round() as usize;
    signal.truncate(sample(start + seconds));
    (sample(start) < signal.len()).then(|| signal.split_off(sample(start)))
}

struct Stored(tempfile::TempDir);

impl Stored {
    /// The bytes as a file, and as a member of something larger.
    fn new(bytes: &[u8]) -> Stored {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("alone"), bytes).unwrap();
        let within = [&[0xff; 700][..], bytes, &[0xff; 5_000]].concat();
        std::fs::write(folder.path().join("within"), within).unwrap();
        Stored(folder)
    }

    fn part(&self, start: f64, seconds: f64) -> Result<Part, AudioError> {
        decode_part(&self.0.path().join("alone"), None, start, seconds, 3600.0)
    }

    fn part_within(&self, size: usize, start: f64, seconds: f64) -> Result<Part, AudioError> {
        decode_part(
            &self.0.path().join("within"),
            Some((700, size as u64)),
            start,
            seconds,
            3600.0,
        )
    }
}

/// Noise over a hum, `seconds` long.
fn sound(rate: u32, channels: u16, seconds: f64) -> Vec<i16> {
    let frames = (f64::from(rate) * seconds) as usize;
    let mut state = 1u32;
    (0..frames * usize::from(channels))
        .map(|at| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let hum = (at as f64 / 37.0).sin() * 9_000.0;
            (hum + f64::from(state >> 20)) as i16
        })
        .collect()
}

fn flac(rate: u32, channels: u16, samples: &[i16]) -> Vec<u8> {
    let info = StreamInfo {
        sample_rate: rate,
        channels: channels.into(),
        bits: 16,
        total_frames: 0,
        md5: [0; 16],
    };
    let interleaved = samples.iter().map(|&sample| i32::from(sample) << 16).collect();
    flac_encode::encode(&Samples { info, interleaved }).unwrap()
}

/// Gives how many frames were decoded; none where there is no such part, or the recording was decoded whole.
fn check(bytes: &[u8], start: f64, seconds: f64) -> Option<u64> {
    let stored = Stored::new(bytes);
    let expected = from_the_whole(bytes, start, seconds);
    let got = [
        stored.part(start, seconds),
        stored.part_within(bytes.len(), start, seconds),
    ];
    let mut decoded = None;
    for got in got {
        match (got, &expected) {
            (Ok(part), Some(expected)) => {
                let bits = |signal: &[f32]| signal.iter().map(|sample| sample.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&part.signal), bits(expected), "{start} s, {seconds} s");
                decoded = part.decoded_frames;
            }
            (Err(AudioError::Decode(why)), None) => assert!(why.contains("ends before"), "{why}"),
            (got, expected) => panic!("{got:?} instead of {:?}", expected.as_ref().map(Vec::len)),
        }
    }
    decoded
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    /// Any part of FLAC and WAV, at any rate, has the bits that it has in the whole.
    #[test]
    fn a_part_is_what_it_is_in_the_whole(
        rate in prop_oneof![Just(8_000u32), Just(11_025), Just(16_000), Just(22_050), Just(44_100), Just(48_000), 4_000u32..50_000],
        channels in 1u16..3,
        length in 0.01f64..3.0,
        start in -0.1f64..3.2,
        seconds in -0.1f64..2.0,
        as_wav in any::<bool>(),
    ) {
        let samples = sound(rate, channels, length);
        let bytes = if as_wav { wav(rate, channels, &samples) } else { flac(rate, channels, &samples) };
        let decoded = check(&bytes, start, seconds);
        prop_assert_eq!(decoded.is_some(), from_the_whole(&bytes, start, seconds).is_some(), "decoded alone");
    }
}

#[test]
fn other_formats_have_the_same_bits_too() {
    for name in ["tone.mp3", "tone.m4a", "tone.ogg"] {
        let bytes = tone(name);
        let whole = decode(&bytes, 1e6).unwrap().len() as f64 / 16_000.0;
        for (start, seconds) in [
            (0.0, 0.1),
            (whole * 0.3, whole * 0.2),
            (whole * 0.5, whole),
            (whole + 0.1, 1.0),
        ] {
            check(&bytes, start, seconds);
        }
    }
}

/// As other encoders write it, with blocks of their own and metadata of every kind.
#[test]
fn parts_of_the_bundled_recordings_are_decoded_alone() {
    let members = good_members("mini", "hi", "hi_0001");
    assert!(!members.is_empty());
    for bytes in members.iter().take(10) {
        let seconds = decode(bytes, 1e6).unwrap().len() as f64 / 16_000.0;
        for (start, part) in [(0.0, 0.3), (seconds * 0.4, seconds * 0.2), (seconds - 0.2, 1.0)] {
            assert!(check(bytes, start, part).is_some(), "{start} s of {seconds} s");
        }
    }
}

/// Twenty minutes, and parts of a second or two: what is decoded does not depend on where the part stands, nor on how
/// long the recording is.
#[test]
fn a_part_of_a_long_recording_decodes_little_more_than_the_part() {
    let samples = sound(16_000, 1, 1_200.0);
    for bytes in [flac(16_000, 1, &samples), wav(16_000, 1, &samples)] {
        let stored = Stored::new(&bytes);
        for (start, seconds) in [(0.0, 1.0), (1.5, 2.0), (601.2, 1.0), (1_198.9, 1.0), (1_199.5, 2.0)] {
            let part = stored.part(start, seconds).unwrap();
            let frames = 16_000 * seconds as u64;
            let decoded = part.decoded_frames.unwrap();
            assert!(decoded < frames + 6 * 8_192, "{decoded} frames for {frames}");
            let from = (start * 16_000.0) as usize;
            let expected: Vec<f32> = samples[from..(from + frames as usize).min(samples.len())]
                .iter()
                .map(|&sample| (f64::from(i32::from(sample) << 16) / 2_147_483_648.0) as f32)
                .collect();
            assert_eq!(part.signal, expected, "{start} s");
        }
    }
}

/// Frames whose numbers do not begin with 0 (a recording cut out of another one without decoding it), and a header that
/// does not know how long the recording is: places say nothing there, and the whole counts.
#[test]
fn where_frames_do_not_say_where_they_stand_the_whole_is_decoded() {
    let bytes = flac(16_000, 1, &sound(16_000, 1, 20.0));
    let forget = |bytes: &mut Vec<u8>, total: u64| {
        // Bytes 10 to 33 of STREAMINFO: the lower 36 bits of eight are the number of frames, then comes the MD5.
        let mut packed = u64::from_be_bytes(bytes[18..26].try_into().unwrap());
        packed = packed >> 36 << 36 | total;
        bytes[18..26].copy_from_slice(&packed.to_be_bytes());
        bytes[26..42].fill(0);
    };
    let mut unknown = bytes.clone();
    forget(&mut unknown, 0);
    assert_eq!(flac::probe(&unknown).unwrap().info.total_frames, 0);
    assert_eq!(check(&unknown, 10.0, 1.0), None);
    // The second frame begins like the first, with 1 where that has its number.
    let second = (43..bytes.len()).find(|&at| bytes[at..at + 4] == bytes[42..46] && bytes[at + 4] == 1);
    let mut cut = [&bytes[..42], &bytes[second.unwrap()..]].concat();
    forget(&mut cut, 20 * 16_000 - 4_096);
    assert_eq!(flac::probe(&cut).unwrap().frames, 20 * 16_000 - 4_096);
    assert_eq!(check(&cut, 10.0, 1.0), None);
    // Where the header knows, the part is decoded alone.
    assert!(check(&bytes, 10.0, 1.0).is_some_and(|decoded| decoded < 16_000 + 6 * 4_096));
}

#[test]
fn damage_in_the_part_and_a_missing_end_are_noticed() {
    let samples = sound(16_000, 1, 60.0);
    let bytes = flac(16_000, 1, &samples);
    let mut damaged = bytes.clone();
    let middle = bytes.len() / 2;
    damaged[middle..middle + 40].fill(0);
    let stored = Stored::new(&damaged);
    assert!(stored.part(29.5, 1.0).is_err(), "the damage is in the part");
    // Outside of it, nothing is promised; what is given is right.
    assert_eq!(
        stored.part(10.0, 1.0).unwrap().signal,
        Stored::new(&bytes).part(10.0, 1.0).unwrap().signal
    );
    // The end is missing.
    let cut = Stored::new(&bytes[..bytes.len() - 5_000]);
    assert!(cut.part(30.0, 1.0).is_err() && cut.part(59.5, 1.0).is_err());
    let short = wav(16_000, 1, &samples);
    assert!(Stored::new(&short[..short.len() - 5_000]).part(30.0, 1.0).is_err());
    for short in [0, 3, 10, 41, 42, 60, 200] {
        assert!(Stored::new(&bytes[..short]).part(0.0, 1.0).is_err(), "{short}");
    }
    let past = decode_part(&stored.0.path().join("alone"), Some((10, u64::MAX)), 0.0, 1.0, 10.0);
    assert!(matches!(past, Err(AudioError::PastEnd { .. })));
    let long = decode_part(&stored.0.path().join("alone"), None, 0.0, 11.0, 10.0);
    assert!(matches!(long, Err(AudioError::Decode(_) | AudioError::TooLong { .. })));
    let silent = raw_wav(16_000, 1, 1, 16, &[]);
    assert!(Stored::new(&silent).part(0.0, 1.0).is_err());
}

/// A row from the beginning is as much of the recording as it says, whatever the format; one that is as long as the
/// recording, but for rounding, is all of it; and none reaches far past its end.
#[test]
fn a_row_is_as_long_as_it_says() {
    let samples = sound(16_000, 1, 4.25);
    let all = [
        ("flac", flac(16_000, 1, &samples), Some(4.25)),
        ("wav", wav(16_000, 1, &samples), Some(4.25)),
        ("mp3", tone("tone.mp3"), None),
    ];
    for (name, bytes, length) in all {
        let whole = decode(&bytes, 1e6).unwrap();
        let seconds = whole.len() as f64 / 16_000.0;
        let stored = Stored::new(&bytes);
        let places = [("alone", None), ("within", Some((700, bytes.len() as u64)))];
        for (file, range) in places {
            let path = stored.0.path().join(file);
            let row = |start: f64, seconds: f64| decode_row(&Storage::default(), &path, range, start, seconds, 3600.0);
            assert_eq!(stated_seconds(&Storage::default(), &path, range), length, "{name}");
            for off in [-0.09, -0.003, 0.0, 0.003, 0.09] {
                assert_eq!(row(0.0, seconds + off).unwrap(), whole, "{name} {off}");
            }
            let half = (seconds / 2.0 * 16_000.0).round() as usize;
            assert_eq!(row(0.0, seconds / 2.0).unwrap(), whole[..half], "{name}");
            assert_eq!(row(0.001, seconds / 2.0 - 0.001).unwrap(), whole[16..half], "{name}");
            // The end of the recording, with a duration that was rounded up.
            assert_eq!(row(0.25, seconds - 0.25 + 0.09).unwrap(), whole[4_000..], "{name}");
            for (start, seconds) in [
                (0.0, seconds + 0.11),
                (0.25, seconds - 0.25 + 0.11),
                (0.0, seconds * 9.0),
            ] {
                let error = row(start, seconds).unwrap_err().to_string();
                assert!(error.contains("the row ends at"), "{name}: {error}");
            }
        }
    }
    let none = Stored::new(b"RIFFxxxxWAVEfmt ");
    assert_eq!(
        stated_seconds(&Storage::default(), &none.0.path().join("alone"), None),
        None
    );
    assert_eq!(
        stated_seconds(&Storage::default(), &none.0.path().join("no such file"), None),
        None
    );
}

/// What is checked of a recording as a whole is checked where a row is all of it: here the MD5 of its samples.
#[test]
fn a_row_that_is_a_whole_recording_is_checked_as_one() {
    let samples = sound(16_000, 1, 2.0);
    let mut bytes = flac(16_000, 1, &samples);
    bytes[26] ^= 1; // In the MD5 of STREAMINFO.
    let stored = Stored::new(&bytes);
    let row = |seconds: f64| {
        decode_row(
            &Storage::default(),
            &stored.0.path().join("alone"),
            None,
            0.0,
            seconds,
            3600.0,
        )
    };
    assert_eq!(row(1.0).unwrap().len(), 16_000);
    assert_eq!(row(2.004).is_err(), decode(&bytes, 60.0).is_err());
}

/// A row of a lossy recording needs what comes before it, and nothing of what comes after.
#[test]
fn of_a_lossy_recording_no_more_is_decoded_than_up_to_the_end_of_the_row() {
    let whole = tone("tone.mp3");
    let samples = decode(&whole, 1e6).unwrap();
    let seconds = samples.len() as f64 / 16_000.0;
    let mut damaged = whole.clone();
    let late = damaged.len() * 9 / 10;
    damaged[late..].fill(0);
    let stored = Stored::new(&damaged);
    let path = stored.0.path().join("alone");
    let half = (seconds / 2.0 * 16_000.0).round() as usize;
    let row = |start, seconds, most| decode_row(&Storage::default(), &path, None, start, seconds, most);
    assert_eq!(row(0.25, seconds / 2.0 - 0.25, 3600.0).unwrap(), samples[4_000..half]);
    assert!(row(0.25, seconds - 0.25, 3600.0).is_err(), "its end is damaged");
    // The limit is that of what is decoded, or of the length that the recording states.
    assert!(matches!(
        row(0.25, seconds / 2.0 - 0.25, seconds / 4.0),
        Err(AudioError::TooLong { .. })
    ));
    for name in ["tone.m4a", "tone.ogg"] {
        let stored = Stored::new(&tone(name));
        let path = stored.0.path().join("alone");
        let reader = RecordingReader::open(&Storage::default(), &path, None, Channels::Mix).unwrap();
        if let Some(stated) = reader.stated_seconds() {
            let refused = decode_row(&Storage::default(), &path, None, 0.0, 0.1, stated - 0.01);
            assert!(matches!(refused, Err(AudioError::TooLong { .. })), "{name}");
        }
    }
}

#[test]
fn rows_of_one_recording_are_the_same_together_and_alone() {
    for name in ["tone.mp3", "tone.m4a", "tone.ogg", "tone.opus", "tone.webm", "flac"] {
        let is_flac = name == "flac";
        let bytes = if is_flac {
            flac(16_000, 1, &sound(16_000, 1, 1.0))
        } else {
            tone(name)
        };
        let seconds = decode(&bytes, 1e6).unwrap().len() as f64 / 16_000.0;
        let stored = Stored::new(&bytes);
        // In no order, two that overlap, all of it, one that is too long, and one behind the end.
        let rows = [
            (0.6, 0.2),
            (0.1, 0.3),
            (0.3, 0.4),
            (0.0, seconds),
            (0.5, seconds),
            (seconds + 1.0, 0.2),
            (0.0, 0.1),
        ];
        for (file, range) in [("alone", None), ("within", Some((700, bytes.len() as u64)))] {
            let path = stored.0.path().join(file);
            assert_eq!(
                is_decoded_from_the_beginning(&Storage::default(), &path, range),
                !is_flac,
                "{name}"
            );
            let together = decode_rows(&Storage::default(), &path, range, &rows, 3600.0);
            assert_eq!(together.iter().filter(|row| row.is_ok()).count(), 5, "{name}");
            for (together, (start, seconds)) in together.into_iter().zip(rows) {
                let alone = decode_row(&Storage::default(), &path, range, start, seconds, 3600.0);
                assert_eq!(
                    together.map_err(|error| error.to_string()),
                    alone.map_err(|error| error.to_string()),
                    "{name} {start}"
                );
            }
        }
    }
    let gone = decode_rows(
        &Storage::default(),
        Path::new("no such file"),
        None,
        &[(0.0, 1.0), (1.0, 1.0)],
        10.0,
    );
    assert!(gone.len() == 2 && gone.iter().all(Result::is_err));
}

/// Where no more can be decoded, rows that are before it are there, also those that begin behind others which reach it; and
/// these have the error that they have alone, without being decoded again.
#[test]
fn rows_around_damage_are_decoded_once() {
    let mut damaged = tone("tone.mp3");
    let from = damaged.len() * 9 / 10;
    damaged[from..].fill(0);
    // A second each. Matroska does not say how many frames of Opus there are, so that the limit is met on the way.
    for (name, bytes, most) in [("damaged", damaged, 3600.0), ("too long", tone("tone.webm"), 0.75)] {
        let stored = Stored::new(&bytes);
        let path = stored.0.path().join("alone");
        let reaching = (0.2, 0.8);
        let rows = [
            (0.4, 0.1),
            (0.1, 0.3),
            reaching,
            (0.0, 0.2),
            (0.3, 2.0),
            (0.25, 0.2),
            (0.96, 0.02),
            (0.35, 0.2),
            (5.0, 0.1),
            (0.0, 1.0),
        ];
        let counted = |work: &dyn Fn() -> Vec<Result<Vec<f32>, AudioError>>| {
            let before = DECODED_FRAMES.get();
            (work(), DECODED_FRAMES.get() - before)
        };
        let (together, frames) = counted(&|| decode_rows(&Storage::default(), &path, None, &rows, most));
        let (alone, frames_of_one) = counted(&|| {
            vec![decode_row(
                &Storage::default(),
                &path,
                None,
                reaching.0,
                reaching.1,
                most,
            )]
        });
        let why = alone[0].as_ref().unwrap_err().to_string();
        assert!(!why.contains("the row ends at"), "{name}: {why}");
        assert_eq!(frames, frames_of_one, "{name}");
        assert!(frames > 0, "{name}");
        for ((start, seconds), together) in rows.into_iter().zip(together) {
            assert_eq!(together.is_ok(), start + seconds < 0.6, "{name} {start}");
            let alone = decode_row(&Storage::default(), &path, None, start, seconds, most);
            assert_eq!(
                together.map_err(|error| error.to_string()),
                alone.map_err(|error| error.to_string()),
                "{name} {start}"
            );
        }
    }
}
