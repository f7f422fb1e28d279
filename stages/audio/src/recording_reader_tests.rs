use std::f64::consts::PI;

use flow_storage::Storage;
use opus_pure::{Application, MAX_PACKET_BYTES, OggOpusWriter, OpusEncoder, OpusHead};

use super::*;
use crate::decode::decode;
use crate::flac::Samples;
use crate::flac_encode;
use crate::test_data::{raw_wav, tone, wav};
use crate::wave64::tests::as_rf64;

/// Two seconds at 16 kHz of something that changes all the time.
fn sound(channels: u16) -> Vec<i16> {
    let frames = 32_000 * usize::from(channels);
    (0..frames).map(|at| (at * at % 20_011) as i16 - 10_000).collect()
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

/// AIFF of 16 bits at 16 kHz.
fn aiff(channels: u16, samples: &[i16]) -> Vec<u8> {
    let data: Vec<u8> = samples.iter().flat_map(|sample| sample.to_be_bytes()).collect();
    let frames = (samples.len() / usize::from(channels)) as u32;
    let mut common = channels.to_be_bytes().to_vec();
    common.extend(frames.to_be_bytes());
    common.extend(16u16.to_be_bytes());
    // 16,000 as an extended number of 80 bits: 2^13 times 1.953125.
    common.extend([0x40, 0x0c, 0xfa, 0, 0, 0, 0, 0, 0, 0]);
    let chunk = |name: &[u8; 4], content: &[u8]| [name, &(content.len() as u32).to_be_bytes()[..], content].concat();
    let sound = [&[0; 8][..], &data].concat();
    let content = [b"AIFF".to_vec(), chunk(b"COMM", &common), chunk(b"SSND", &sound)].concat();
    chunk(b"FORM", &content)
}

/// CAF of 16 bits at 16 kHz, little-endian.
fn caf(channels: u16, samples: &[i16]) -> Vec<u8> {
    let data: Vec<u8> = samples.iter().flat_map(|sample| sample.to_le_bytes()).collect();
    let chunk = |name: &[u8; 4], content: &[u8]| [name, &(content.len() as u64).to_be_bytes()[..], content].concat();
    let numbers = [2, 2 * u32::from(channels), 1, u32::from(channels), 16];
    let numbers: Vec<u8> = numbers.iter().flat_map(|number| number.to_be_bytes()).collect();
    let description = [&16_000f64.to_be_bytes()[..], b"lpcm", &numbers].concat();
    let data = [&[0; 4][..], &data].concat();
    [
        b"caff\0\x01\0\0".to_vec(),
        chunk(b"desc", &description),
        chunk(b"data", &data),
    ]
    .concat()
}

/// A WAV with one byte for each sample, coded as G.711 has it: 6 is A-law, 7 is mu-law.
fn g711(code: u16, data: &[u8]) -> Vec<u8> {
    let mut bytes = raw_wav(8_000, 1, code, 8, data);
    // The longer kind of header, which goes on to say that there is nothing more to say.
    bytes[16] = 18;
    bytes.splice(36..36, [0, 0]);
    bytes[4] += 2;
    bytes
}

/// Opus in Ogg, in pages of a few packets, of a signal at 48 kHz whose channels are in turn.
fn opus(channels: usize, signal: &[f32]) -> Vec<u8> {
    const FRAME: usize = 960;
    let mut encoder = OpusEncoder::new(48_000, channels, Application::Audio).unwrap();
    encoder.bitrate_bps = 64_000;
    let head = OpusHead::for_encoder(&encoder, 48_000);
    let pre_skip = u64::from(head.pre_skip);
    let frames = (signal.len() / channels) as u64;
    let mut writer = OggOpusWriter::new(Vec::new(), head).unwrap();
    writer.set_page_target(1_000);
    let packets = (frames + pre_skip).div_ceil(FRAME as u64);
    let mut packet = vec![0; MAX_PACKET_BYTES];
    for number in 0..packets as usize {
        let mut block: Vec<f32> = signal
            .iter()
            .skip(number * FRAME * channels)
            .take(FRAME * channels)
            .copied()
            .collect();
        block.resize(FRAME * channels, 0.0);
        let length = encoder.encode(&block, FRAME, &mut packet).unwrap();
        let left = frames + pre_skip - (number * FRAME) as u64;
        let duration = left.min(FRAME as u64) as u32;
        writer.write_packet_with_duration(&packet[..length], duration).unwrap();
    }
    writer.finish().unwrap()
}

/// Seconds of a tone at 48 kHz.
fn hum(seconds: f64, hertz: f64) -> Vec<f32> {
    let value = |at: usize| (0.4 * (2.0 * PI * hertz * at as f64 / 48_000.0).sin()) as f32;
    (0..(seconds * 48_000.0) as usize).map(value).collect()
}

#[derive(PartialEq)]
struct Read {
    samples: Vec<f32>,
    end: Progress,
}

fn read_channels(bytes: &[u8], channels: Channels) -> Result<Read, AudioError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("recording");
    // As part of something larger, as in a tar.
    std::fs::write(&path, [&[0x55; 700][..], bytes, &[0x55; 3_000]].concat()).unwrap();
    let mut reader = RecordingReader::open(&Storage::default(), &path, Some((700, bytes.len() as u64)), channels)?;
    let mut samples = Vec::new();
    let end = loop {
        match reader.read(&mut samples)? {
            Progress::More => {}
            end => break end,
        }
    };
    let length = samples.len();
    assert_eq!(reader.read(&mut samples).unwrap(), Progress::End, "after the end");
    assert_eq!(samples.len(), length);
    Ok(Read { samples, end })
}

fn read(bytes: &[u8]) -> Read {
    read_channels(bytes, Channels::Mix).unwrap_or_else(|error| panic!("{error}"))
}

fn bits(samples: &[f32]) -> Vec<u32> {
    samples.iter().map(|sample| sample.to_bits()).collect()
}

/// Every format, at rates that need resampling too, gives what decoding all of it in memory gives.
#[test]
fn blocks_have_the_bits_of_the_whole() {
    let (one, two) = (sound(1), sound(2));
    let mut all = vec![
        ("flac", flac(16_000, 1, &one)),
        ("flac of 44.1 kHz", flac(44_100, 2, &two)),
        ("wav", wav(16_000, 1, &one)),
        ("wav of 8 kHz", wav(8_000, 2, &two)),
        ("wav of 48 kHz", wav(48_000, 1, &one)),
        ("aiff", aiff(2, &two)),
        ("caf", caf(2, &two)),
        ("mu-law", g711(7, &[0x12; 5_000])),
        ("opus", opus(1, &hum(1.3, 300.0))),
        ("opus of two channels", opus(2, &hum(1.0, 300.0))),
        ("rf64", as_rf64(&wav(48_000, 2, &two), 4 * 32_000)),
        ("rf64 without sizes", as_rf64(&wav(16_000, 1, &one), 0)),
    ];
    let names = [
        "tone.mp3",
        "tone.m4a",
        "tone.aac",
        "tone.ogg",
        "tone.opus",
        "tone.webm",
        "tone.mov",
        "tone.mkv",
        "tone.caf",
    ];
    all.extend(names.map(|name| (name, tone(name))));
    for (name, bytes) in all {
        let whole = decode(&bytes, 1e6).unwrap_or_else(|error| panic!("{name}: {error}"));
        let read = read(&bytes);
        assert_eq!(read.end, Progress::End, "{name}");
        assert_eq!(bits(&read.samples), bits(&whole), "{name}");
    }
}

#[test]
fn formats_without_loss_are_the_wav_of_the_same_sound() {
    for channels in [1, 2] {
        let samples = sound(channels);
        let expected = read(&wav(16_000, channels, &samples)).samples;
        assert_eq!(expected.len(), 32_000);
        let wide: Vec<u8> = samples
            .iter()
            .flat_map(|sample| [[0, 0], sample.to_le_bytes()].concat())
            .collect();
        let medium: Vec<u8> = samples
            .iter()
            .flat_map(|sample| [&[0][..], &sample.to_le_bytes()].concat())
            .collect();
        let floats = samples
            .iter()
            .flat_map(|sample| (f32::from(*sample) / 32_768.0).to_le_bytes());
        let floats: Vec<u8> = floats.collect();
        for (name, bytes) in [
            ("flac", flac(16_000, channels, &samples)),
            ("aiff", aiff(channels, &samples)),
            ("caf", caf(channels, &samples)),
            ("caf that is filled up", [caf(channels, &samples), vec![0]].concat()),
            ("24 bits", raw_wav(16_000, channels, 1, 24, &medium)),
            ("32 bits", raw_wav(16_000, channels, 1, 32, &wide)),
            ("floats", raw_wav(16_000, channels, 3, 32, &floats)),
        ] {
            assert_eq!(bits(&read(&bytes).samples), bits(&expected), "{name}");
        }
    }
    // Eight bits are unsigned.
    assert_eq!(
        read(&raw_wav(16_000, 1, 1, 8, &[0, 64, 128])).samples,
        [-1.0, -0.5, 0.0]
    );
    // ITU-T G.711: the largest and the smallest of either sign.
    let exact = |bytes: &[u8]| -> Vec<i32> {
        let samples = crate::recording::decode(bytes, 100).unwrap().interleaved;
        samples.iter().map(|sample| sample >> 16).collect()
    };
    assert_eq!(exact(&g711(6, &[0x2a, 0xaa, 0xd5, 0x55])), [-32_256, 32_256, 8, -8]);
    assert_eq!(exact(&g711(7, &[0x00, 0x80, 0xff, 0x7f])), [-32_124, 32_124, 0, 0]);
}

/// What the recordings of tests/data/make.py hold.
fn rising(at: f64) -> f64 {
    let t = at / 16_000.0;
    0.5 * (2.0 * PI * (200.0 * t + 500.0 * t * t)).sin()
}

/// What comes of SILK's frames at 48 kHz is this many samples of 16 kHz earlier than what libopus gives at 16 kHz: the decoder
/// does not have the delay of libopus's resampler.
const OPUS_EARLY: f64 = 0.75;

/// How far the difference is below the tone, in dB, where the first sample is the one of the number `delay`, and all are
/// `early` samples too early.
fn distance(samples: &[f32], delay: usize, early: f64) -> f64 {
    let (mut signal, mut noise) = (0.0, 0.0);
    for (at, got) in samples.iter().skip(delay).take(16_000).enumerate() {
        let expected = rising(at as f64 + early);
        signal += expected * expected;
        noise += (expected - f64::from(*got)).powi(2);
    }
    10.0 * (signal / noise).log10()
}

#[test]
fn the_tone_stands_in_its_place_in_every_container() {
    // Opus in Ogg ends where its last page says, which is to the sample.
    let read_tone = |name: &str| read(&tone(name)).samples;
    let opus = read_tone("tone.opus");
    assert_eq!(opus.len(), 16_000);
    assert!(
        distance(&opus, 0, OPUS_EARLY) > 30.0,
        "{} dB",
        distance(&opus, 0, OPUS_EARLY)
    );
    // In WebM its last packet is there as a whole: at most 20 ms more.
    let webm = read_tone("tone.webm");
    assert!((16_000..=16_320).contains(&webm.len()), "{}", webm.len());
    assert!(
        distance(&webm, 0, OPUS_EARLY) > 22.0,
        "{} dB",
        distance(&webm, 0, OPUS_EARLY)
    );
    // The delay of AAC's encoder is left out where an edit list says so.
    for (name, delay) in [("tone.mov", 0), ("tone.mkv", 1024)] {
        let far = distance(&read_tone(name), delay, 0.0);
        assert!(far > 20.0, "{name}: {far} dB");
    }
    let alac = read_tone("tone.caf");
    assert!((3_200..=4_096).contains(&alac.len()), "{}", alac.len());
    for (at, sample) in alac.iter().take(3_200).enumerate() {
        // To the rounding to 16 bits.
        assert!(
            (f64::from(*sample) - rising(at as f64)).abs() < 0.51 / 32_768.0,
            "sample {at}"
        );
    }
}

#[test]
fn opus_is_as_long_as_what_was_encoded() {
    for frames in [1, 959, 960, 48_000, 61_234] {
        let signal = &hum(2.0, 200.0)[..frames];
        let samples = crate::recording::decode(&opus(1, signal), u64::MAX).unwrap();
        assert_eq!(samples.interleaved.len(), frames);
        assert_eq!((samples.info.sample_rate, samples.info.channels), (48_000, 1));
    }
}

#[test]
fn a_channel_is_what_it_is_alone() {
    let samples = sound(2);
    let of = |channel: usize| -> Vec<i16> { samples.iter().skip(channel).step_by(2).copied().collect() };
    for rate in [16_000, 44_100] {
        let bytes = wav(rate, 2, &samples);
        for channel in 0..2 {
            let got = read_channels(&bytes, Channels::One(channel)).unwrap().samples;
            let alone = read(&wav(rate, 1, &of(channel as usize))).samples;
            assert_eq!(bits(&got), bits(&alone), "channel {channel}");
        }
    }
    let error = read_channels(&wav(16_000, 2, &samples), Channels::One(2)).map(|read| read.samples.len());
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("2 channels, and none of the number 3")
    );
    // Two speakers in Opus.
    let (left, right) = (hum(1.0, 250.0), hum(1.0, 700.0));
    let both: Vec<f32> = left
        .iter()
        .zip(&right)
        .flat_map(|(left, right)| [*left, *right])
        .collect();
    let bytes = opus(2, &both);
    for (channel, hertz) in [(0, 250.0), (1, 700.0)] {
        let samples = read_channels(&bytes, Channels::One(channel)).unwrap().samples;
        let power = |hertz: f64| {
            let turn = |at: usize| 2.0 * PI * hertz * at as f64 / 16_000.0;
            let part = |wave: fn(f64) -> f64| -> f64 {
                let terms = samples
                    .iter()
                    .enumerate()
                    .map(|(at, sample)| f64::from(*sample) * wave(turn(at)));
                terms.sum()
            };
            part(f64::sin).hypot(part(f64::cos))
        };
        let other = 950.0 - hertz;
        assert!(
            power(hertz) > 10.0 * power(other),
            "channel {channel}: {} {}",
            power(hertz),
            power(other)
        );
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a");
    assert_eq!(channel_count(&Storage::default(), &path, None, None), None);
    std::fs::write(&path, &bytes).unwrap();
    assert_eq!(channel_count(&Storage::default(), &path, None, None), Some(2));
    std::fs::write(&path, b"a text").unwrap();
    assert_eq!(channel_count(&Storage::default(), &path, None, None), None);
}

/// What came before the damage is given, and it is right.
#[test]
fn what_is_before_the_damage_is_kept() {
    let samples = sound(1);
    let whole = read(&wav(16_000, 1, &samples)).samples;
    let prefix = |name: &str, bytes: &[u8], least: usize| {
        let read = read(bytes);
        assert!(
            matches!(&read.end, Progress::Damaged(why) if !why.is_empty()),
            "{name}: {:?}",
            read.end
        );
        let length = read.samples.len();
        assert!((least..whole.len()).contains(&length), "{name}: {length}");
        assert_eq!(bits(&read.samples), bits(&whole[..length]), "{name}");
    };
    let bytes = wav(16_000, 1, &samples);
    prefix("wav", &bytes[..44 + 40_000], 18_000);
    let bytes = aiff(1, &samples);
    prefix("aiff", &bytes[..bytes.len() - 30_000], 16_000);
    let bytes = flac(16_000, 1, &samples);
    let mut damaged = bytes.clone();
    let middle = bytes.len() / 2;
    damaged[middle..middle + 60].fill(0);
    prefix("flac", &damaged, 4_000);
    prefix("a flac that is cut", &bytes[..middle], 4_000);
    // Without its first frame all would come too early.
    let mut damaged = bytes.clone();
    let frame = (42..)
        .find(|&at| bytes[at] == 0xff && bytes[at + 1] & 0xfe == 0xf8)
        .unwrap();
    damaged[frame + 20] ^= 0xff;
    let refused = read_channels(&damaged, Channels::Mix).map(|read| read.samples.len());
    assert!(matches!(refused, Err(AudioError::Decode(_))), "{refused:?}");
    // A page of Opus that is damaged: what is given is what comes of the pages before it.
    let bytes = opus(1, &hum(4.0, 300.0));
    let whole = read(&bytes).samples;
    let mut damaged = bytes.clone();
    damaged[bytes.len() / 2] ^= 0xff;
    let read = read(&damaged);
    assert!(matches!(read.end, Progress::Damaged(_)), "{:?}", read.end);
    assert!((16_000..48_000).contains(&read.samples.len()), "{}", read.samples.len());
    assert_eq!(bits(&read.samples[..16_000]), bits(&whole[..16_000]));
    // The one before the last, where the reader looks for the end and gives up.
    let mut pages = bytes.windows(4).enumerate().filter(|(_, head)| head == b"OggS").rev();
    let mut damaged = bytes.clone();
    damaged[pages.nth(1).unwrap().0 + 500] ^= 1;
    let read = self::read(&damaged);
    assert!(matches!(read.end, Progress::Damaged(_)), "{:?}", read.end);
}

/// A damaged page near the beginning, and one that is gone: what comes a page later is where it was.
#[test]
fn silence_takes_the_place_of_pages_that_are_missing() {
    let sound = opus(1, &hum(9.0, 300.0));
    let whole = read(&sound).samples;
    let mut pages = pages_with_serial(&sound, 1);
    assert!(pages.len() > 8);
    // Where pages end, in frames, which count what is left out at the beginning.
    let ends: Vec<u64> = pages
        .iter()
        .map(|page| u64::from_le_bytes(page[6..14].try_into().unwrap()))
        .collect();
    let skipped = u64::from(u16::from_le_bytes([pages[0][38], pages[0][39]]));
    // The reader takes the next page for the one that is missing.
    let at = ends[2] - skipped + ends[4] - ends[3];
    let missing = ends[3] - ends[2] + ends[6] - ends[5];
    pages.remove(6);
    pages[3][200] ^= 1;
    let damaged = pages.concat();
    assert!(matches!(read(&damaged).end, Progress::Damaged(_)));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.opus");
    std::fs::write(&path, &damaged).unwrap();
    let mut reader = RecordingReader::open(&Storage::default(), &path, None, Channels::Mix).unwrap();
    reader.fill_holes();
    let mut found = Vec::new();
    let end = loop {
        match reader.read(&mut found).unwrap() {
            Progress::More => {}
            end => break end,
        }
    };
    assert_eq!((end, found.len()), (Progress::End, whole.len()));
    let silent = found.iter().filter(|sample| **sample == 0.0).count();
    assert!(silent.abs_diff(missing as usize / 3) < 100, "{silent} of {missing}");
    let [of_end, of_whole] = [&found, &whole].map(|samples| &samples[samples.len() - 8_000..]);
    assert!(of_end.iter().zip(of_whole).all(|(a, b)| (a - b).abs() < 0.01));
    let note = reader.note().unwrap();
    let [at, missing] = [at, missing].map(|frames| frames as f64 / 48_000.0);
    let told = format!("from about {at:.1} s on: silence takes the place of {missing:.1} s");
    assert!(note.contains(&told), "{note}, not {told}");
    // Not of what manifests name.
    assert!(crate::recording::probe(&damaged, &Format::ALL).is_err());
}

/// As sox and ffmpeg write it to a pipe; and one that was cut, which is there up to the cut.
#[test]
fn an_aiff_that_does_not_know_its_sizes_is_what_it_is_as_a_file() {
    let samples = sound(1);
    let whole = aiff(1, &samples);
    let expected = crate::recording::probe(&whole, &Format::ALL).unwrap();
    let place = whole.windows(4).position(|name| name == b"SSND").unwrap() + 4;
    for (size, of_samples) in [(0, 0), (0x7f00_004e, 0x7f00_0008), (0x7fff_ffff, 0x7fff_fff0)] {
        let mut bytes = whole.clone();
        bytes[4..8].copy_from_slice(&u32::to_be_bytes(size));
        bytes[place..place + 4].copy_from_slice(&u32::to_be_bytes(of_samples));
        assert_eq!(crate::recording::probe(&bytes, &Format::ALL).unwrap(), expected);
        let found = read(&bytes);
        assert_eq!((found.end, found.samples), (Progress::End, read(&whole).samples));
    }
    let cut = &whole[..whole.len() - 20_001];
    assert!(crate::recording::probe(cut, &Format::ALL).is_err());
    let found = read(cut);
    assert!(matches!(found.end, Progress::Damaged(_)));
    assert_eq!(found.samples.len(), samples.len() - 10_001);
}

/// As ffmpeg writes it.
#[test]
fn vorbis_in_mp4_is_decoded() {
    let (found, expected) = (read(&tone("tone.vorbis.mp4")), read(&tone("tone.ogg")));
    assert_eq!((found.end, expected.samples.len()), (Progress::End, 16_000));
    assert!(found.samples.len().abs_diff(16_000) <= 256, "{}", found.samples.len());
    let pairs = || found.samples.iter().zip(&expected.samples).skip(1_000).take(14_000);
    let error: f32 = pairs().map(|(a, b)| (a - b) * (a - b)).sum();
    let energy: f32 = pairs().map(|(_, b)| b * b).sum();
    // It was compressed twice.
    assert!(error < 0.02 * energy, "{error} of {energy}");
}

/// As ffmpeg writes it, and telephones.
#[test]
fn opus_in_a_caf_without_its_header_is_decoded() {
    let chunk = |name: &[u8; 4], content: &[u8]| [name, &(content.len() as u64).to_be_bytes()[..], content].concat();
    let numbers = |numbers: &[u32]| -> Vec<u8> { numbers.iter().flat_map(|number| number.to_be_bytes()).collect() };
    let description = [&48_000f64.to_be_bytes()[..], b"opus", &numbers(&[0, 0, 960, 1, 0])].concat();
    // Packets, frames, frames at the beginning and at the end that do not count, and the lengths of packets.
    let packets = [numbers(&[0, 50, 0, 48_000, 0, 0]), vec![3; 50]].concat();
    let data = [numbers(&[0]), [0xf8, 0xff, 0xfe].repeat(50)].concat();
    let bytes = [
        &b"caff\0\x01\0\0"[..],
        &chunk(b"desc", &description),
        &chunk(b"pakt", &packets),
        &chunk(b"data", &data),
    ]
    .concat();
    let read = read(&bytes);
    assert_eq!((read.end, read.samples.len()), (Progress::End, 16_000));
}

/// As sox and libsndfile write it.
#[test]
fn telephony_in_a_caf_is_decoded() {
    let data: Vec<u8> = (0..4_000u32).map(|at| (at * at % 251) as u8).collect();
    for (kind, code) in [(b"alaw", 6), (b"ulaw", 7)] {
        let mut bytes = caf(1, &[]);
        bytes.truncate(20);
        bytes.extend(8_000f64.to_be_bytes());
        bytes.extend(kind);
        // Flags; bytes of a packet, frames of it, channels, bits.
        bytes.extend([0u32, 1, 1, 1, 8].iter().flat_map(|number| number.to_be_bytes()));
        bytes.extend([&b"data"[..], &4_004u64.to_be_bytes(), &[0; 4], &data].concat());
        let (found, expected) = (read(&bytes), read(&g711(code, &data)));
        assert_eq!(bits(&found.samples), bits(&expected.samples));
        assert_eq!((found.end, found.samples.len()), (Progress::End, 8_000));
    }
}

/// As GStreamer writes it: the frame of the header is counted.
#[test]
fn an_mp3_whose_header_counts_itself_is_whole() {
    let mut right = tone("tone.mp3");
    let at = right
        .windows(4)
        .position(|name| [b"Xing", b"Info"].contains(&name.try_into().unwrap()));
    let at = at.unwrap();
    // Without what LAME adds, whose checksum covers the numbers.
    right[at + 120..at + 156].fill(0);
    let number = |bytes: &[u8], at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
    let (frames, length) = (number(&right, at + 8), number(&right, at + 12));
    let mut bytes = right.clone();
    bytes[at + 8..at + 12].copy_from_slice(&(frames + 1).to_be_bytes());
    let (found, expected) = (read(&bytes), read(&right));
    assert_eq!(found.end, Progress::End);
    assert!(bits(&found.samples) == bits(&expected.samples));
    // A part is missing where there are fewer bytes than it says, or more than one frame too few.
    bytes[at + 12..at + 16].copy_from_slice(&(length + 2_000).to_be_bytes());
    assert!(matches!(read(&bytes).end, Progress::Damaged(_)));
    bytes[at + 12..at + 16].copy_from_slice(&length.to_be_bytes());
    bytes[at + 8..at + 12].copy_from_slice(&(frames + 2).to_be_bytes());
    assert!(matches!(read(&bytes).end, Progress::Damaged(_)));
}

/// As ffmpeg writes `.oga`; with the samples of the ALAC.
#[test]
fn flac_in_ogg_is_decoded() {
    let (oga, caf) = (tone("tone.oga"), tone("tone.caf"));
    let (found, expected) = (read(&oga), read(&caf));
    assert_eq!((found.end, found.samples.len()), (Progress::End, 3_200));
    assert!(bits(&found.samples) == bits(&expected.samples));
    let of = |bytes: &[u8]| crate::recording::probe(bytes, &crate::format::Format::ALL).unwrap().1;
    assert_eq!((of(&oga).audio_hash, of(&oga).info.bits), (of(&caf).audio_hash, 24));
    // It has one page of sound.
    assert!(read_channels(&oga[..oga.len() / 2], Channels::Mix).is_err());
}

/// As systems for telephones write it.
#[test]
fn an_mp3_in_a_wav_is_that_mp3() {
    let mp3 = tone("tone.mp3");
    let mut bytes = crate::test_data::raw_wav(16_000, 1, 0x55, 0, &mp3);
    bytes.extend(b"LIST\x04\0\0\0INFO");
    let (found, expected) = (read(&bytes), read(&mp3));
    assert_eq!(
        (found.end, bits(&found.samples)),
        (Progress::End, bits(&expected.samples))
    );
    assert_eq!(
        crate::decode::decode(&bytes, 10.0).unwrap(),
        crate::decode::decode(&mp3, 10.0).unwrap()
    );
}

/// An Ogg page of whole packets.
fn page(kind: u8, end: u64, number: u32, packets: &[&[u8]]) -> Vec<u8> {
    let mut bytes = [b"OggS\0", &[kind][..], &end.to_le_bytes(), &[7, 0, 0, 0]].concat();
    bytes.extend(number.to_le_bytes());
    bytes.extend([0; 4]);
    let lacing = packets.iter().flat_map(|packet| {
        let full = std::iter::repeat_n(255, packet.len() / 255);
        full.chain([(packet.len() % 255) as u8])
    });
    let lacing: Vec<u8> = lacing.collect();
    bytes.push(lacing.len() as u8);
    bytes.extend(lacing);
    bytes.extend(packets.concat());
    sealed(bytes)
}

/// A page with its check sum, which is 0 in `bytes`.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let sum = bytes.iter().fold(0u32, |sum, byte| {
        let shift = |sum: u32, _| (sum << 1) ^ if sum >> 31 == 1 { 0x04c1_1db7 } else { 0 };
        (0..8).fold(sum ^ u32::from(*byte) << 24, shift)
    });
    bytes[22..26].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// The pages of an Ogg file of one stream, with another serial number.
fn pages_with_serial(mut ogg: &[u8], serial: u8) -> Vec<Vec<u8>> {
    let mut pages = Vec::new();
    while !ogg.is_empty() {
        let count = usize::from(ogg[26]);
        let length: usize = ogg[27..27 + count].iter().map(|lace| usize::from(*lace)).sum();
        let (page, rest) = ogg.split_at(27 + count + length);
        let mut page = page.to_vec();
        page[14..18].fill(serial);
        page[22..26].fill(0);
        pages.push(sealed(page));
        ogg = rest;
    }
    pages
}

fn with_serial(ogg: &[u8], serial: u8) -> Vec<u8> {
    pages_with_serial(ogg, serial).concat()
}

/// A film in Ogg: its pages of sound, with pages of pictures before, between and after them.
fn film(sound: &[Vec<u8>]) -> Vec<u8> {
    let picture = |kind, number| page(kind, 0, number, &[&[number as u8; 3_000]]);
    let mut bytes = [page(2, 0, 0, &[b"\x80theora"]), sound[0].clone()].concat();
    for (number, sound) in (1..).zip(&sound[1..]) {
        bytes.extend(picture(0, number));
        bytes.extend(sound);
    }
    bytes.extend(picture(4, sound.len() as u32));
    bytes
}

#[test]
fn the_sound_of_a_film_in_ogg_is_that_of_its_own_file() {
    for sound in [tone("tone.ogg"), tone("tone.opus"), opus(1, &hum(9.0, 300.0))] {
        let expected = read(&sound);
        assert_eq!(expected.end, Progress::End);
        let mut pages = pages_with_serial(&sound, 1);
        let whole = film(&pages);
        assert!(read(&whole) == expected);
        let [found, alone] = [&whole, &sound].map(|bytes| crate::recording::probe(bytes, &Format::ALL).unwrap());
        assert!(found == alone);
        // What is missing is missing in a film, too.
        assert!(matches!(read(&whole[..whole.len() - 1_000]).end, Progress::Damaged(_)));
        if pages.len() > 5 {
            pages.remove(pages.len() / 2);
            assert!(matches!(read(&film(&pages)).end, Progress::Damaged(_)));
        }
    }
}

/// As radio stations write them, and who writes one file after the other.
#[test]
fn streams_that_follow_in_one_ogg_are_read_to_the_end() {
    let samples = |bytes: &[u8]| crate::recording::decode(bytes, u64::MAX).unwrap().interleaved;
    let long = opus(1, &hum(9.0, 300.0));
    assert!(long.len() > 1 << 16, "more than is searched for an end at once");
    for (name, first, second) in [
        ("vorbis", tone("tone.ogg"), tone("tone.ogg")),
        ("opus", tone("tone.opus"), opus(1, &hum(1.3, 700.0))),
        ("opus, long", long.clone(), opus(1, &hum(0.5, 700.0))),
        ("opus, short before long", opus(1, &hum(0.5, 700.0)), long),
    ] {
        let parts = [&first, &second, &first];
        for serials in [[1, 2, 3], [7, 7, 7]] {
            let joined: Vec<Vec<u8>> = std::iter::zip(parts, serials)
                .map(|(part, serial)| with_serial(part, serial))
                .collect();
            let chain = joined.concat();
            let expected = parts.map(|part| samples(part)).concat();
            assert!(samples(&chain) == expected, "{name} {serials:?}");
            let whole = read(&chain);
            assert_eq!(whole.end, Progress::End, "{name}");
            assert_eq!(
                whole.samples.len(),
                parts.map(|part| read(part).samples.len()).iter().sum::<usize>(),
                "{name}"
            );
            // The last stream is cut, and one in the middle is damaged.
            let cut = read(&chain[..chain.len() - first.len() / 2]);
            assert!(matches!(cut.end, Progress::Damaged(_)), "{name}: {:?}", cut.end);
            assert!(cut.samples.len() > read(&first).samples.len(), "{name}");
            // By one serial number the reader does not find the end of a stream in the middle.
            if serials[0] != serials[1] {
                let mut damaged = chain.clone();
                damaged[first.len() + second.len() * 2 / 3] ^= 0xff;
                let damaged = read(&damaged);
                assert!(matches!(damaged.end, Progress::Damaged(_)), "{name}: {:?}", damaged.end);
            }
        }
    }
    // A layout is that of the whole recording.
    let chain = [opus(1, &hum(1.0, 300.0)), with_serial(&opus(2, &hum(1.0, 300.0)), 9)].concat();
    let read = read(&chain);
    let said =
        matches!(&read.end, Progress::Damaged(why) if why.contains("2 channels, 16 bits after 48000 Hz, 1 channels"));
    assert!(said, "{:?}", read.end);
    assert_eq!(read.samples.len(), 16_000);
    // Nor may it go on with another codec.
    let chain = [tone("tone.opus"), with_serial(&tone("tone.ogg"), 9)].concat();
    let other = read_channels(&chain, Channels::Mix).unwrap();
    assert!(
        matches!(&other.end, Progress::Damaged(why) if why.contains("another codec")),
        "{:?}",
        other.end
    );
}

/// The packets of an Ogg file of one stream, none of which crosses a page.
fn packets(mut ogg: &[u8]) -> Vec<Vec<u8>> {
    let mut packets = Vec::new();
    while !ogg.is_empty() {
        let count = usize::from(ogg[26]);
        let (head, mut data) = ogg.split_at(27 + count);
        let mut length = 0;
        for lace in &head[27..] {
            length += usize::from(*lace);
            if *lace < 255 {
                packets.push(data[..length].to_vec());
                data = &data[length..];
                length = 0;
            }
        }
        ogg = data;
    }
    packets
}

/// Readers go on behind what is missing as if it had never been there: all that follows would be too early.
#[test]
fn what_is_missing_in_the_middle_is_damage() {
    let packets = packets(&tone("tone.ogg"));
    let [head, comment, setup, spoken @ ..] = &packets[..] else {
        panic!("{} packets", packets.len());
    };
    let mut pages = vec![page(2, 0, 0, &[head]), page(0, 0, 1, &[comment, setup])];
    let parts = spoken.chunks(8);
    let last = parts.len() - 1;
    for (number, part) in parts.enumerate() {
        let part: Vec<&[u8]> = part.iter().map(Vec::as_slice).collect();
        // The first block, of 512, gives nothing; the second one, of 1,024, a quarter of both; each of the others half of it
        // but the last three, before which the blocks get short again: 15,616 come before the last two.
        let end = if number == last {
            16_000
        } else {
            (512 * (8 * number as u64 + 6) + 384).min(15_616)
        };
        let kind = if number == last { 4 } else { 0 };
        pages.push(page(kind, end, number as u32 + 2, &part));
    }
    let whole = read(&pages.concat());
    assert_eq!((whole.samples.len(), whole.end), (16_000, Progress::End));
    pages.remove(3);
    let cut = read(&pages.concat());
    assert!(matches!(cut.end, Progress::Damaged(_)), "{:?}", cut.end);
    assert!(cut.samples.len() < 9_000, "{}", cut.samples.len());

    let mp3 = tone("tone.mp3");
    let whole = read(&mp3).samples;
    let tag = |length: u8| {
        [
            &b"ID3\x04\0\0\0\0"[..],
            &[length, 0],
            &vec![0; usize::from(length) * 128],
        ]
        .concat()
    };
    for (between, damaged) in [
        (vec![], false),
        (vec![0; 2_000], false),
        (tag(70), false),
        (vec![0; 9_000], true),
    ] {
        let bytes = [&mp3[..], &between, &mp3].concat();
        let both = read(&bytes);
        assert_eq!(
            matches!(both.end, Progress::Damaged(_)),
            damaged,
            "{} bytes: {:?}",
            between.len(),
            both.end
        );
        assert_eq!(bits(&both.samples[..16_000]), bits(&whole), "{} bytes", between.len());
        // The first one says how long it is; its padding and the second one follow.
        let expected = if damaged { 16_000..17_000 } else { 32_000..35_000 };
        assert!(expected.contains(&both.samples.len()), "{}", both.samples.len());
        assert_eq!(decode(&bytes, 10.0).is_err(), damaged);
    }
    // Without the length in the frame that holds none of the sound, the end tells.
    let info = mp3.windows(4).position(|bytes| bytes == b"Info").unwrap();
    let frame = mp3[..info].iter().rposition(|byte| *byte == 0xff).unwrap();
    let next = frame
        + 4
        + mp3[frame + 4..]
            .windows(2)
            .position(|bytes| bytes == &mp3[frame..frame + 2])
            .unwrap();
    assert_eq!(read(&mp3[next..]).end, Progress::End);
    for (after, damaged) in [
        (vec![0; 9_000], false),
        (vec![0; 50_000], true),
        ([b"APETAGEX", &[0; 50_000][..]].concat(), false),
    ] {
        let end = read(&[&mp3[next..], &after].concat()).end;
        assert_eq!(
            matches!(end, Progress::Damaged(_)),
            damaged,
            "{} bytes: {end:?}",
            after.len()
        );
    }

    let mut short = wav(16_000, 1, &sound(1));
    short[40..44].copy_from_slice(&20_000u32.to_le_bytes());
    let read_short = read(&short);
    assert!(matches!(read_short.end, Progress::Damaged(_)), "{:?}", read_short.end);
    assert_eq!(read_short.samples.len(), 10_000);
}

#[test]
fn a_tag_before_a_flac_or_wav_is_skipped() {
    let bytes = flac(16_000, 1, &sound(1));
    let tagged = [&b"ID3\x04\0\0\0\0\0\x05.tag."[..], &bytes].concat();
    assert_eq!(bits(&read(&tagged).samples), bits(&read(&bytes).samples));
    let bytes = wav(16_000, 1, &sound(1));
    let tagged = [&b"ID3\x04\0\0\0\0\0\x05.tag."[..], &bytes].concat();
    assert_eq!(bits(&read(&tagged).samples), bits(&read(&bytes).samples));
}

#[test]
fn what_cannot_be_opened_says_why() {
    let why = |bytes: &[u8]| match read_channels(bytes, Channels::Mix) {
        Ok(read) => panic!("{} samples", read.samples.len()),
        Err(error) => error,
    };
    assert!(matches!(
        why(b"a text that is not a recording"),
        AudioError::Unsupported(_)
    ));
    assert!(matches!(why(b""), AudioError::Unsupported(_)));
    assert!(matches!(
        why(&raw_wav(16_000, 1, 0x55, 16, &[0; 64])),
        AudioError::Unsupported(_)
    ));
    for name in ["tone.opus", "tone.webm", "tone.mov", "tone.mkv", "tone.caf"] {
        let error = why(&tone(name)[..60]);
        assert!(
            matches!(error, AudioError::Decode(_) | AudioError::Unsupported(_)),
            "{name}: {error}"
        );
    }
    assert!(matches!(why(&wav(16_000, 1, &[])), AudioError::Decode(_)));
    assert!(matches!(why(&wav(500, 1, &[1; 100])), AudioError::SampleRate(500)));
    let gone = RecordingReader::open(&Storage::default(), Path::new("/no/such/file"), None, Channels::Mix);
    assert!(matches!(gone, Err(AudioError::Read { .. })));
    // Opening a pipe waits until somebody writes to it.
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe.wav");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    assert_eq!(channel_count(&Storage::default(), &pipe, None, None), None);
    assert!(matches!(
        crate::decode::read_file(&Storage::default(), &pipe),
        Err(AudioError::Read { .. })
    ));
}

/// An MP4 whose index is before its samples, as those for downloads have it.
fn with_index_first(mp4: &[u8]) -> Vec<u8> {
    let mut boxes: Vec<(usize, usize)> = Vec::new();
    let mut at = 0;
    while at < mp4.len() {
        let length = u32::from_be_bytes(mp4[at..at + 4].try_into().unwrap()) as usize;
        boxes.push((at, at + length));
        at += length;
    }
    let is_index = |&(start, _): &(usize, usize)| &mp4[start + 4..start + 8] == b"moov";
    let (index, others): (Vec<_>, Vec<_>) = boxes.into_iter().partition(is_index);
    let mut moov = mp4[index[0].0..index[0].1].to_vec();
    let places = moov.windows(4).position(|name| name == b"stco").unwrap();
    let count = u32::from_be_bytes(moov[places + 8..places + 12].try_into().unwrap()) as usize;
    let moved = moov.len() as u32;
    for place in moov[places + 12..].chunks_exact_mut(4).take(count) {
        let offset = u32::from_be_bytes(place[..].try_into().unwrap());
        place.copy_from_slice(&(offset + moved).to_be_bytes());
    }
    let (first, rest) = others.split_first().unwrap();
    let rest = rest.iter().map(|&(start, end)| &mp4[start..end]);
    [&mp4[first.0..first.1], &moov]
        .into_iter()
        .chain(rest)
        .collect::<Vec<_>>()
        .concat()
}

#[test]
fn of_a_broken_download_of_an_mp4_what_is_there_is_decoded() {
    let mp4 = with_index_first(&tone("tone.m4a"));
    let whole = read(&mp4);
    assert_eq!(
        (whole.end, whole.samples.len()),
        (Progress::End, read(&tone("tone.m4a")).samples.len())
    );
    let part = read(&mp4[..mp4.len() * 2 / 3]);
    assert_eq!(part.end, Progress::Damaged("the file is truncated".to_owned()));
    let frames = part.samples.len();
    assert!(
        (whole.samples.len() / 2..whole.samples.len() - 3_000).contains(&frames),
        "{frames}"
    );
    // All but what the resampler would have made of the next frame.
    assert_eq!(bits(&part.samples[..frames - 64]), bits(&whole.samples[..frames - 64]));
    // In fragments, cut in the last and in one within.
    let mp4 = tone("tone.mp4");
    assert_eq!(read(&mp4).end, Progress::End);
    for length in [mp4.len() - 300, mp4.len() / 2] {
        let part = read(&mp4[..length]);
        assert!(matches!(part.end, Progress::Damaged(_)), "{length}: {:?}", part.end);
        assert!(part.samples.len() > length, "{length}: {}", part.samples.len());
    }
    // With a fragment of zeros, and a few bytes of one.
    let fragment = mp4.windows(4).rposition(|name| name == b"moof").unwrap() - 4;
    let mut hole = mp4.clone();
    hole[fragment..fragment + 400].fill(0);
    for bytes in [&hole, &mp4[..fragment + 5]] {
        assert!(matches!(read(bytes).end, Progress::Damaged(_)));
    }
    // A size that nothing can have.
    let mut huge = with_index_first(&tone("tone.m4a"));
    let place = huge.windows(4).position(|name| name == b"mdat").unwrap();
    huge[place - 4..place].copy_from_slice(&1u32.to_be_bytes());
    huge.splice(place + 4..place + 4, u64::MAX.to_be_bytes());
    let _ = read_channels(&huge, Channels::Mix);
}

/// Browsers write WebM without knowing how long it gets.
#[test]
fn matroska_that_is_cut_or_does_not_say_where_it_ends() {
    for name in ["tone.webm", "tone.mkv"] {
        let known = tone(name);
        let whole = read(&known);
        let segment = known.windows(4).position(|id| id == [0x18, 0x53, 0x80, 0x67]).unwrap();
        let mut unknown = known.clone();
        unknown[segment + 4] = 1;
        unknown[segment + 5..segment + 12].fill(0xff);
        let read_again = read(&unknown);
        assert_eq!(
            (read_again.end, bits(&read_again.samples)),
            (Progress::End, bits(&whole.samples)),
            "{name}"
        );
        for bytes in [&known, &unknown] {
            let part = read(&bytes[..bytes.len() * 2 / 3]);
            assert_eq!(
                part.end,
                Progress::Damaged("the file is truncated".to_owned()),
                "{name}"
            );
            let frames = part.samples.len();
            assert!(
                (whole.samples.len() / 3..whole.samples.len()).contains(&frames),
                "{name}: {frames}"
            );
        }
    }
}
