//! Movies and Matroska files that are made here, byte by byte, with 16-bit samples where nothing else is said.

use flow_storage::Storage;

use crate::decode::decode;
use crate::error::AudioError;
use crate::format::{Format, recognise};
use crate::recording::probe;
use crate::recording_reader::{Channels, Progress, RecordingReader};
use crate::test_data::{raw_wav, tone, wav};

const RATE: u32 = 16_000;

fn boxed(name: &[u8; 4], parts: &[&[u8]]) -> Vec<u8> {
    let content = parts.concat();
    [&(content.len() as u32 + 8).to_be_bytes()[..], name, &content].concat()
}

fn numbers(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_be_bytes()).collect()
}

/// What a QuickTime movie of one track is made of.
struct Movie {
    kind: [u8; 4],
    /// Of the description: 1 of QuickTime, 0 of MP4.
    version: u16,
    channels: u16,
    /// Bytes of a sample, in the longer description, and what follows that.
    bytes: u32,
    extensions: Vec<u8>,
    /// Numbers of packets, and frames of each.
    times: Vec<(u32, u32)>,
    /// Duration and place, in frames; the place -1 is silence.
    edits: Vec<(u32, i32)>,
    packet: usize,
    data: Vec<u8>,
}

impl Movie {
    /// Of 16-bit samples in packets of 1,000.
    fn of(samples: &[i16]) -> Movie {
        let data: Vec<u8> = samples.iter().flat_map(|sample| sample.to_le_bytes()).collect();
        Movie {
            kind: *b"sowt",
            version: 1,
            channels: 1,
            bytes: 2,
            extensions: Vec::new(),
            times: vec![(samples.len() as u32 / 1_000, 1_000)],
            edits: Vec::new(),
            packet: 2_000,
            data,
        }
    }

    fn sound(&self) -> Vec<u8> {
        let mut entry = vec![0; 6];
        let bits = if self.version == 0 { 8 * self.bytes as u16 } else { 16 };
        for number in [1, self.version, 0, 0, 0, self.channels, bits, 0xfffe, 0] {
            entry.extend(u16::to_be_bytes(number));
        }
        entry.extend((RATE << 16).to_be_bytes());
        if self.version == 1 {
            entry.extend(numbers(&[1, self.bytes, self.bytes * u32::from(self.channels), 2]));
        }
        boxed(&self.kind, &[&entry, &self.extensions])
    }

    fn bytes(&self) -> Vec<u8> {
        let packets = (self.data.len() / self.packet) as u32;
        let ftyp = boxed(b"ftyp", &[b"qt  \0\0\0\0qt  "]);
        let place = ftyp.len() as u32 + 8;
        let times: Vec<u32> = self.times.iter().flat_map(|&(count, frames)| [count, frames]).collect();
        let stbl = boxed(
            b"stbl",
            &[
                &boxed(b"stsd", &[&numbers(&[0, 1]), &self.sound()]),
                &boxed(b"stts", &[&numbers(&[0, self.times.len() as u32]), &numbers(&times)]),
                &boxed(b"stsc", &[&numbers(&[0, 1, 1, packets, 1])]),
                &boxed(b"stsz", &[&numbers(&[0, self.packet as u32, packets])]),
                &boxed(b"stco", &[&numbers(&[0, 1, place])]),
            ],
        );
        let smhd = boxed(b"smhd", &[&[0; 8]]);
        let minf = boxed(b"minf", &[&smhd, &stbl]);
        let mdhd = boxed(b"mdhd", &[&numbers(&[0, 0, 0, RATE, 0, 0])]);
        let hdlr = boxed(b"hdlr", &[&[0; 4], b"mhlrsoun", &[0; 13]]);
        let mdia = boxed(b"mdia", &[&mdhd, &hdlr, &minf]);
        let edits: Vec<u32> = self
            .edits
            .iter()
            .flat_map(|&(duration, from)| [duration, from as u32, 1 << 16])
            .collect();
        let elst = boxed(b"elst", &[&numbers(&[0, self.edits.len() as u32]), &numbers(&edits)]);
        let mut tkhd = numbers(&[1, 0, 0, 1, 0, 0]);
        tkhd.resize(84, 0);
        let mut trak = vec![boxed(b"tkhd", &[&tkhd])];
        if !self.edits.is_empty() {
            trak.push(boxed(b"edts", &[&elst]));
        }
        trak.push(mdia);
        let mut mvhd = numbers(&[0, 0, 0, RATE, 0]);
        mvhd.resize(100, 0);
        let moov = boxed(
            b"moov",
            &[&boxed(b"mvhd", &[&mvhd]), &boxed(b"trak", &[&trak.concat()])],
        );
        [ftyp, boxed(b"mdat", &[&self.data]), moov].concat()
    }
}

fn sound(frames: u32) -> Vec<i16> {
    (0..frames).map(|at| (at * at % 20_011) as i16 - 10_000).collect()
}

struct Read {
    samples: Vec<f32>,
    end: Progress,
    note: Option<String>,
}

fn read(bytes: &[u8]) -> Result<Read, AudioError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("recording");
    std::fs::write(&path, bytes).unwrap();
    let mut reader = RecordingReader::open(&Storage::default(), &path, None, Channels::Mix)?;
    let mut samples = Vec::new();
    loop {
        match reader.read(&mut samples)? {
            Progress::More => {}
            end => {
                let note = reader.note();
                return Ok(Read { samples, end, note });
            }
        }
    }
}

/// The samples, which are the same however they are read.
fn whole(bytes: &[u8]) -> Vec<f32> {
    let found = read(bytes).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(found.end, Progress::End);
    assert_eq!(found.samples, decode(bytes, 1e6).unwrap());
    found.samples
}

fn plain(samples: &[i16]) -> Vec<f32> {
    samples.iter().map(|sample| f32::from(*sample) / 32_768.0).collect()
}

#[test]
fn quicktime_samples_have_the_order_of_bytes_that_the_movie_says() {
    let samples = sound(4_000);
    let wide = |sample: &i16| i32::from(*sample) << 16;
    type Encode = fn(i32) -> Vec<u8>;
    let forms: [(&[u8; 4], u32, Encode); 4] = [
        (b"in24", 3, |wide| wide.to_be_bytes()[..3].to_vec()),
        (b"in32", 4, |wide| wide.to_be_bytes().to_vec()),
        (b"fl32", 4, |wide| {
            (wide as f32 / 2_147_483_648.0).to_be_bytes().to_vec()
        }),
        (b"fl64", 8, |wide| {
            (f64::from(wide) / 2_147_483_648.0).to_be_bytes().to_vec()
        }),
    ];
    let wide_as = |kind: &[u8; 4], extensions: &[u8], version: u16, encode: &dyn Fn(i32) -> Vec<u8>| {
        let data: Vec<Vec<u8>> = samples.iter().map(|sample| encode(wide(sample))).collect();
        let bytes = data[0].len() as u32;
        let movie = Movie {
            kind: *kind,
            version,
            bytes,
            extensions: extensions.to_vec(),
            times: vec![(samples.len() as u32, 1)],
            packet: bytes as usize,
            data: data.concat(),
            ..Movie::of(&samples)
        };
        assert_eq!(
            whole(&movie.bytes()),
            plain(&samples),
            "{} {bytes}",
            kind.escape_ascii()
        );
    };
    // As GStreamer writes them.
    wide_as(b"twos", &[], 1, &|wide| wide.to_be_bytes()[..3].to_vec());
    wide_as(b"twos", &[], 1, &|wide| wide.to_be_bytes().to_vec());
    wide_as(b"sowt", &[], 1, &|wide| wide.to_le_bytes()[1..].to_vec());
    for kind in [b"twos", b"sowt"] {
        let data: Vec<u8> = samples.iter().map(|sample| (sample >> 8) as u8).collect();
        let coarse: Vec<i16> = samples.iter().map(|sample| sample & !0xff).collect();
        let movie = Movie {
            kind: *kind,
            bytes: 1,
            times: vec![(samples.len() as u32, 1)],
            packet: 1,
            data,
            ..Movie::of(&samples)
        };
        assert_eq!(whole(&movie.bytes()), plain(&coarse));
    }
    // As ffmpeg writes MP4: the order of bytes, and the bits of a sample.
    for bytes in [2, 3, 4] {
        let said = |little| boxed(b"pcmC", &[&[0, 0, 0, 0, little, bytes * 8]]);
        let bytes = usize::from(bytes);
        wide_as(b"ipcm", &said(1), 0, &|wide| wide.to_le_bytes()[4 - bytes..].to_vec());
        wide_as(b"ipcm", &said(0), 0, &|wide| wide.to_be_bytes()[..bytes].to_vec());
    }
    let float = |wide: i32| f64::from(wide) / 2_147_483_648.0;
    let said = |little, bits| boxed(b"pcmC", &[&[0, 0, 0, 0, little, bits]]);
    wide_as(b"fpcm", &said(1, 32), 0, &|wide| {
        (float(wide) as f32).to_le_bytes().to_vec()
    });
    wide_as(b"fpcm", &said(0, 64), 0, &|wide| float(wide).to_be_bytes().to_vec());
    let wave = |order: u16| {
        let enda = boxed(b"enda", &[&order.to_be_bytes()]);
        boxed(
            b"wave",
            &[&boxed(b"frma", &[b"in24"]), &enda, &[0, 0, 0, 8, 0, 0, 0, 0]],
        )
    };
    for (kind, bytes, big) in forms {
        let big: Vec<Vec<u8>> = samples.iter().map(wide).map(big).collect();
        let little = big.iter().flat_map(|sample| sample.iter().rev().copied());
        let little: Vec<u8> = little.collect();
        for (extensions, data) in [
            (Vec::new(), big.concat()),
            (wave(0), big.concat()),
            (wave(1), little.clone()),
            (boxed(b"enda", &[&[0, 1]]), little.clone()),
        ] {
            let movie = Movie {
                kind: *kind,
                bytes,
                extensions,
                packet: 1_000 * bytes as usize,
                data,
                ..Movie::of(&samples)
            };
            assert_eq!(whole(&movie.bytes()), plain(&samples), "{}", kind.escape_ascii());
        }
    }
}

#[test]
fn codecs_that_quicktime_describes_in_its_own_way_are_decoded() {
    let bytes: Vec<u8> = (0..4_000u32).map(|at| (at * at % 251) as u8).collect();
    for (kind, code, channels) in [(b"alaw", 6, 1), (b"ulaw", 7, 1), (b"ulaw", 7, 2)] {
        let movie = Movie {
            kind: *kind,
            channels,
            bytes: 1,
            times: vec![(4_000 / u32::from(channels), 1)],
            packet: channels.into(),
            data: bytes.clone(),
            ..Movie::of(&[])
        };
        let mut expected = raw_wav(RATE, channels, code, 8, &bytes);
        expected[16] = 18;
        expected.splice(36..36, [0, 0]);
        expected[4..8].copy_from_slice(&(4_038u32).to_le_bytes());
        assert_eq!(whole(&movie.bytes()), whole(&expected), "{}", kind.escape_ascii());
    }
    // Two packets of IMA4: a level to begin with, and steps that change it.
    let level = [0x10, 0x05].into_iter().chain((0..32).map(|at| at * 7));
    let packet: Vec<u8> = level.collect();
    let movie = Movie {
        kind: *b"ima4",
        times: vec![(2, 64)],
        packet: 34,
        data: packet.repeat(2),
        ..Movie::of(&[])
    };
    let samples = whole(&movie.bytes());
    assert_eq!(samples.len(), 128);
    assert!(
        (samples[0] - 0.125).abs() < 0.01 && samples[..64] == samples[64..],
        "{samples:?}"
    );

    // The one packet of a CAF, whose cookie QuickTime keeps two boxes deep.
    let caf = tone("tone.caf");
    let chunk = |name: &[u8; 4]| {
        let at = caf.windows(4).position(|found| found == name).unwrap();
        let length = u64::from_be_bytes(caf[at + 4..at + 12].try_into().unwrap()) as usize;
        &caf[at + 12..at + 12 + length]
    };
    let cookie = boxed(b"alac", &[&[0; 4], &chunk(b"kuki")[24..]]);
    let data = chunk(b"data")[4..].to_vec();
    let movie = Movie {
        kind: *b"alac",
        extensions: boxed(
            b"wave",
            &[&boxed(b"frma", &[b"alac"]), &cookie, &[0, 0, 0, 8, 0, 0, 0, 0]],
        ),
        times: vec![(1, 4_096)],
        packet: data.len(),
        data,
        ..Movie::of(&[])
    };
    assert_eq!(read(&movie.bytes()).unwrap().samples, whole(&caf));
}

/// As GStreamer writes it: with the header of Ogg, whose numbers have the other order of bytes.
#[test]
fn opus_in_mp4_begins_at_its_beginning_whatever_the_order_of_bytes() {
    let read_with = |rate: [u8; 4], delay: [u8; 2]| {
        let movie = Movie {
            kind: *b"Opus",
            version: 0,
            extensions: boxed(b"dOps", &[&[0, 1], &delay, &rate, &[0, 0, 0]]),
            times: vec![(50, 320)],
            packet: 3,
            data: [0xf8, 0xff, 0xfe].repeat(50),
            ..Movie::of(&[])
        };
        whole(&movie.bytes()).len()
    };
    // A second without the delay of the encoder, 312 frames of 48 kHz.
    let expected = 16_000 - 104;
    assert_eq!(read_with(48_000u32.to_be_bytes(), 312u16.to_be_bytes()), expected);
    assert_eq!(read_with(48_000u32.to_le_bytes(), 312u16.to_le_bytes()), expected);
}

#[test]
fn of_a_movie_only_what_its_edit_list_presents_is_decoded() {
    let samples = sound(8_000);
    let all = plain(&samples);
    let silence = |frames: usize| vec![0.0; frames];
    let of = |edits: &[(u32, i32)]| {
        let edits = edits.to_vec();
        whole(
            &Movie {
                edits,
                ..Movie::of(&samples)
            }
            .bytes(),
        )
    };
    assert_eq!(of(&[(8_000, 0)]), all);
    assert_eq!(of(&[(3_000, 1_500)]), all[1_500..4_500]);
    assert_eq!(of(&[(0, 1_500)]), all[1_500..]);
    assert_eq!(of(&[(70_000, -1), (8_000, 0)]), [silence(70_000), all.clone()].concat());
    let parts = [(500, 700), (1_000, -1), (100, 1_200), (2_000, 6_500)];
    let expected = [&all[700..1_200], &silence(1_000), &all[1_200..1_300], &all[6_500..]].concat();
    assert_eq!(of(&parts), expected);
    // A part twice cannot be followed without keeping all of it.
    let edits = vec![(500, 700), (500, 700)];
    let twice = read(
        &Movie {
            edits,
            ..Movie::of(&samples)
        }
        .bytes(),
    )
    .unwrap();
    assert_eq!(twice.samples, all);
    assert!(twice.note.is_some_and(|note| note.contains("edit list")));
    // Longer than anything, of silence and of sound.
    let edits = vec![(u32::MAX, -1), (u32::MAX, 0)];
    let huge = Movie {
        edits,
        ..Movie::of(&samples)
    }
    .bytes();
    assert!(read(&huge).is_err() && decode(&huge, 1e6).is_err());
    assert_eq!(of(&[(u32::MAX, 0)]), all);
    // What comes after the part that is presented need not be there.
    let m4a = tone("tone.m4a");
    let (_, verdict) = probe(&m4a, &Format::ALL).unwrap();
    assert_eq!(
        verdict.frames, 16_000,
        "without the delay of the encoder and the padding"
    );
}

#[test]
fn holes_of_a_movie_are_silence() {
    let samples = sound(8_000);
    let all = plain(&samples);
    let silence = vec![0.0; 70_000];
    let times = vec![(2, 1_000), (1, 71_000), (5, 1_000)];
    let movie = Movie {
        times,
        ..Movie::of(&samples)
    };
    assert_eq!(whole(&movie.bytes()), [&all[..3_000], &silence, &all[3_000..]].concat());
    let told = "packets are missing, from about 0.2 s on: silence takes the place of 4.4 s";
    assert_eq!(read(&movie.bytes()).unwrap().note.as_deref(), Some(told));
    // At the end, and too short to be one.
    for times in [vec![(7, 1_000), (1, 71_000)], vec![(4, 1_000), (1, 2_500), (3, 1_000)]] {
        let movie = Movie {
            times,
            ..Movie::of(&samples)
        };
        assert_eq!(whole(&movie.bytes()), all);
    }
    let times = vec![(2, 1_000), (1, u32::MAX), (5, 1_000)];
    let huge = read(
        &Movie {
            times,
            ..Movie::of(&samples)
        }
        .bytes(),
    )
    .unwrap();
    assert_eq!(huge.samples, all[..3_000]);
    assert!(
        matches!(&huge.end, Progress::Damaged(why) if why.starts_with("a hole of 2684")),
        "{:?}",
        huge.end
    );
}

/// Of fragments only their own times tell.
#[test]
fn holes_between_fragments_are_silence() {
    let mp4 = tone("tone.mp4");
    let all = whole(&mp4);
    let times: Vec<usize> = mp4
        .windows(4)
        .enumerate()
        .filter(|(_, name)| name == b"tfdt")
        .map(|(at, _)| at)
        .collect();
    assert!(times.len() > 2);
    let time_at = |at: usize| -> u64 {
        match mp4[at + 4] {
            0 => u32::from_be_bytes(mp4[at + 8..at + 12].try_into().unwrap()).into(),
            _ => u64::from_be_bytes(mp4[at + 8..at + 16].try_into().unwrap()),
        }
    };
    let later = |from: usize, by: u64| {
        let mut bytes = mp4.clone();
        for &at in &times[from..] {
            let time = time_at(at) + by;
            match mp4[at + 4] {
                0 => bytes[at + 8..at + 12].copy_from_slice(&(time as u32).to_be_bytes()),
                _ => bytes[at + 8..at + 16].copy_from_slice(&time.to_be_bytes()),
            }
        }
        bytes
    };
    // All of them: a recording that begins at any time.
    assert_eq!(whole(&later(0, 1 << 30)), all);
    let hole = whole(&later(1, 50_000));
    assert_eq!(hole.len(), all.len() + 50_000);
    let begin = (0..hole.len()).find(|&at| hole[at..].iter().take(50_000).all(|sample| *sample == 0.0));
    let begin = begin.unwrap_or_else(|| panic!("no silence"));
    assert!((1_000..4_000).contains(&begin), "{begin}");
    assert_eq!(hole[begin + 50_000..], all[begin..]);
    let huge = read(&later(1, 1 << 31)).unwrap();
    assert!(matches!(huge.end, Progress::Damaged(_)), "{:?}", huge.end);
}

fn element(id: &[u8], content: &[u8]) -> Vec<u8> {
    // A size of eight bytes.
    let size = (1u64 << 56 | content.len() as u64).to_be_bytes();
    [id, &size, content].concat()
}

/// A Matroska file of tracks of 16-bit samples (whether a track is flagged as default), with blocks of 1,000 of them: track, time in
/// milliseconds, samples.
fn matroska(tracks: &[Option<u8>], blocks: &[(u8, u64, &[i16])]) -> Vec<u8> {
    matroska_with(&[], tracks, blocks)
}

/// With another element in the description of the first track.
fn matroska_with(more: &[u8], tracks: &[Option<u8>], blocks: &[(u8, u64, &[i16])]) -> Vec<u8> {
    let head = element(&[0x1a, 0x45, 0xdf, 0xa3], &element(&[0x42, 0x82], b"matroska"));
    let scale = element(&[0x2a, 0xd7, 0xb1], &1_000_000u32.to_be_bytes());
    let programs = [element(&[0x4d, 0x80], b"a"), element(&[0x57, 0x41], b"a")].concat();
    let info = element(&[0x15, 0x49, 0xa9, 0x66], &[scale, programs].concat());
    let mut entries = Vec::new();
    for (place, default) in tracks.iter().enumerate() {
        let number = place as u8 + 1;
        let audio = [
            element(&[0xb5], &f64::from(RATE).to_be_bytes()),
            element(&[0x9f], &[1]),
            element(&[0x62, 0x64], &[16]),
        ];
        let mut entry = [
            element(&[0xd7], &[number]),
            element(&[0x73, 0xc5], &[number]),
            element(&[0x83], &[2]),
            element(&[0x86], b"A_PCM/INT/LIT"),
            element(&[0xe1], &audio.concat()),
        ]
        .concat();
        entry.extend(default.iter().flat_map(|default| element(&[0x88], &[*default])));
        entry.extend(more.iter().filter(|_| place == 0));
        entries.extend(element(&[0xae], &entry));
    }
    let tracks = element(&[0x16, 0x54, 0xae, 0x6b], &entries);
    let clusters = blocks.iter().map(|(track, time, samples)| {
        let data: Vec<u8> = samples.iter().flat_map(|sample| sample.to_le_bytes()).collect();
        let block = [&[0x80 | track, 0, 0, 0x80][..], &data].concat();
        let content = [element(&[0xe7], &time.to_be_bytes()), element(&[0xa3], &block)].concat();
        element(&[0x1f, 0x43, 0xb6, 0x75], &content)
    });
    let clusters: Vec<u8> = clusters.flatten().collect();
    [
        head,
        element(&[0x18, 0x53, 0x80, 0x67], &[info, tracks, clusters].concat()),
    ]
    .concat()
}

#[test]
fn of_several_tracks_the_default_one_is_decoded() {
    let (one, two) = (sound(1_000), vec![77; 1_000]);
    let blocks: [(u8, u64, &[i16]); 2] = [(1, 0, &one), (2, 0, &two)];
    for (tracks, expected) in [
        ([Some(0), None], &two),
        ([Some(0), Some(1)], &two),
        ([None, None], &one),
        ([Some(1), Some(0)], &one),
        ([Some(0), Some(0)], &one),
    ] {
        let found = read(&matroska(&tracks, &blocks)).unwrap();
        assert_eq!(
            (found.samples, found.end),
            (plain(expected), Progress::End),
            "{tracks:?}"
        );
        let number = if expected == &two { 2 } else { 1 };
        let note = format!("it has 2 audio tracks; number {number} is decoded (`track` chooses)");
        assert_eq!(found.note.as_deref(), Some(note.as_str()));
    }
    let alone = read(&matroska(&[Some(0)], &blocks[..1])).unwrap();
    assert_eq!((alone.samples, alone.note), (plain(&one), None));
}

/// mkvmerge's option `--compression`: the reader gives compressed packets to the decoder, of which noise comes.
#[test]
fn a_compressed_track_is_refused() {
    let encodings = element(&[0x6d, 0x80], &element(&[0x62, 0x40], &element(&[0x50, 0x34], &[])));
    let samples = sound(1_000);
    let tracks = [Some(1), Some(1)];
    let film = matroska_with(&encodings, &tracks[..1], &[(1, 0, &samples)]);
    let refused = read(&film).map(|read| read.samples).unwrap_err().to_string();
    assert!(refused.contains("ContentEncodings"), "{refused}");
    // Another track is there.
    let film = matroska_with(&encodings, &tracks, &[(1, 0, &[7; 500]), (2, 0, &samples)]);
    assert_eq!(read(&film).unwrap().samples, plain(&samples));
}

/// As some programs write them that take integers for floating-point numbers of the same scale.
#[test]
fn a_codec_that_is_not_supported_is_named() {
    let said = |bytes: &[u8]| probe(bytes, &Format::ALL).unwrap_err().to_string();
    let mut mkv = matroska(&[None], &[(1, 0, &sound(1_000))]);
    let name = b"A_PCM/INT/LIT";
    let at = mkv.windows(name.len()).position(|found| found == name).unwrap();
    mkv[at..at + name.len()].copy_from_slice(b"A_MS/ACM/ACM/");
    assert!(said(&mkv).contains("not supported: A_MS/ACM"), "{}", said(&mkv));
    let movie = Movie {
        kind: *b"ac-3",
        ..Movie::of(&sound(1_000))
    };
    assert!(
        said(&movie.bytes()).contains("not supported: ac-3"),
        "{}",
        said(&movie.bytes())
    );
}

#[test]
fn integers_as_floating_point_numbers_are_no_sound() {
    let wav = |values: [f32; 2]| {
        let data: Vec<u8> = values
            .iter()
            .cycle()
            .take(4_000)
            .flat_map(|value| value.to_le_bytes())
            .collect();
        raw_wav(RATE, 1, 3, 32, &data)
    };
    assert!(whole(&wav([2.0, -0.5]))[0] > 0.999);
    let refused = decode(&wav([20_000.0, -300.0]), 10.0).unwrap_err().to_string();
    assert!(refused.contains("20000, where 1 is full scale"), "{refused}");
}

#[test]
fn the_track_that_is_asked_for_is_decoded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("film");
    let (one, two) = (sound(1_000), vec![77; 1_000]);
    let write = |bytes: &[u8]| std::fs::write(&path, bytes).unwrap();
    let read = |track| {
        let mut reader = RecordingReader::open_track(&Storage::default(), &path, None, Channels::Mix, Some(track))?;
        let mut samples = Vec::new();
        while reader.read(&mut samples)? == Progress::More {}
        Ok::<_, AudioError>((samples, reader.note()))
    };
    write(&matroska(&[Some(0), Some(1)], &[(1, 0, &one), (2, 0, &two)]));
    for (track, expected) in [(1, &one), (2, &two)] {
        assert_eq!(read(track).unwrap(), (plain(expected), None));
    }
    for (track, bytes) in [
        (3, None),
        (0, None),
        (2, Some(crate::test_data::wav(RATE, 1, &one))),
        (2, Some(crate::test_data::tone("tone.mp3"))),
    ] {
        bytes.iter().for_each(|bytes| write(bytes));
        let error = read(track).unwrap_err().to_string();
        assert!(error.contains(&format!("and none of the number {track}")), "{error}");
        let first = read(1).unwrap();
        assert!(!first.0.is_empty());
    }
}

#[test]
fn an_mp3_or_aac_that_begins_before_a_frame_is_decoded_from_there() {
    for name in ["tone.mp3", "tone.aac"] {
        let mut bytes = crate::test_data::tone(name);
        if name == "tone.mp3" {
            // Without the frame that says its length, which is lost with the beginning.
            let mut frames = bytes
                .windows(4)
                .enumerate()
                .filter(|(_, head)| head.starts_with(&[0xff, 0xf3, 0x88]));
            let second = frames.nth(1).unwrap().0;
            bytes.drain(..second);
        }
        let right = whole(&bytes);
        for zeros in [1, 100, 70_000] {
            let shifted = [&vec![0; zeros][..], &bytes].concat();
            assert_eq!(whole(&shifted), right, "{name} after {zeros} zeros");
        }
        // The rest of a frame: what follows is decoded, but for the frames that need it.
        let cut = whole(&bytes[700..]);
        assert!(
            cut.len() > right.len() / 2 && cut.len() < right.len(),
            "{name}: {} of {}",
            cut.len(),
            right.len()
        );
        let tail = cut.len() / 2;
        let distance = cut[cut.len() - tail..]
            .iter()
            .zip(&right[right.len() - tail..])
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        assert!(distance < 1e-4, "{name}: {distance}");
    }
}

#[test]
fn the_sound_of_a_film_in_ogg_is_found() {
    // A first page of another codec before that of the sound.
    let film = [&b"OggS\0\x02"[..], &[0; 20], &[1, 7], b"\x80theora"].concat();
    for (name, format) in [("tone.ogg", Format::Ogg), ("tone.opus", Format::Opus)] {
        let sound = crate::test_data::tone(name);
        assert_eq!(recognise(&[&film[..], &sound].concat()), Ok(format));
    }
    assert!(recognise(&[&film[..], &film].concat()).is_err());
}

#[test]
fn holes_of_a_matroska_file_are_silence() {
    let all = sound(2_000);
    let (first, second) = all.split_at(1_000);
    let of = |blocks: &[(u8, u64, &[i16])]| whole(&matroska(&[None, Some(0)], blocks));
    // 1,000 frames are 62.5 ms.
    let expected = |before: usize, between: usize| {
        let silence = vec![0; before];
        plain(&[&silence[..], first, &vec![0; between], second].concat())
    };
    assert_eq!(of(&[(1, 0, first), (1, 62, second)]), expected(0, 0));
    assert_eq!(of(&[(1, 0, first), (1, 1_000, second)]), expected(0, 15_000));
    assert_eq!(
        of(&[(1, 700, first), (1, 1_700, second)]),
        expected(0, 15_000),
        "the recording begins with it"
    );
    assert_eq!(
        of(&[(2, 700, &[1]), (1, 5_700, first), (1, 5_763, second)]),
        expected(80_000, 0)
    );
    // Times that go back are not followed, and a beginning that cannot be is none.
    assert_eq!(of(&[(1, 900, first), (1, 0, second)]), expected(0, 0));
    assert_eq!(
        of(&[(2, 0, &[1]), (1, 1 << 40, first), (1, 1 << 40, second)]),
        expected(0, 0)
    );
    let huge = read(&matroska(&[None], &[(1, 0, first), (1, 1 << 40, second)])).unwrap();
    assert_eq!(huge.samples, plain(first));
    assert!(
        matches!(&huge.end, Progress::Damaged(why) if why.starts_with("a hole of")),
        "{:?}",
        huge.end
    );
    assert_eq!(whole(&wav(RATE, 1, first)), plain(first));
}
