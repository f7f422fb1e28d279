//! Boosted phrases need speech.

use candle_core::{DType, Device};
use flow_model::decoding::DecodingSettings;
use flow_speakers::silero::SAMPLE_RATE;
use flow_storage::Storage;

use super::tests::settings;
use super::*;
use crate::long_audio::{ChunkSettings, FullSettings};
use crate::test_data;

const PHRASES: [&str; 3] = ["north", "garden", "teacher"];

/// Two parts of a recording with five seconds of noise between them, and where the noise is.
fn with_noise(amplitude: f32) -> (Vec<f32>, Range<f64>) {
    let file = test_data::root().join("tests/data/golden/times/en.flac");
    let recording = flow_audio::samples::samples(&Storage::default(), &file, 100.0)
        .unwrap()
        .unwrap();
    let seconds = |seconds: f64| (seconds * f64::from(SAMPLE_RATE)) as usize;
    // Between two sentences.
    let (first, second) = recording[..seconds(9.0)].split_at(seconds(4.8));
    let mut draw = 7u32;
    let noise = (0..seconds(5.0)).map(|_| {
        draw = draw.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        amplitude * ((draw >> 8) as f32 / (1 << 24) as f32 - 0.5)
    });
    let samples = first
        .iter()
        .copied()
        .chain(noise)
        .chain(second.iter().copied())
        .collect();
    (samples, 4.8..9.8)
}

fn boosted(beam: usize) -> Recognizer {
    let mut model = Recognizer::load(&test_data::bundled_model(), DType::F32, &Device::Cpu).unwrap();
    let usual = DecodingSettings {
        beam,
        ..DecodingSettings::default()
    };
    model.set_decoding(usual).unwrap();
    let request = DecodingRequest {
        phrases: PHRASES.map(str::to_owned).to_vec(),
        boost_weight: Some(10.0),
        ..DecodingRequest::default()
    };
    model.with_request(&request).unwrap()
}

/// The words within a range that begin as a phrase does, and the others that do.
fn phrases_in(found: &Recognized, range: &Range<f64>) -> (usize, usize) {
    let words = found.segments.iter().flat_map(|segment| &segment.words);
    let words = words.filter(|word| PHRASES.iter().any(|phrase| word.word.starts_with(phrase)));
    let (within, others): (Vec<_>, Vec<_>) = words.partition(|word| range.contains(&word.start));
    (within.len(), others.len())
}

#[test]
fn phrases_are_not_written_where_nobody_speaks() {
    let noises = [0.03, 0.05, 0.1].map(with_noise);
    let modes = [
        LongAudio::Vad,
        LongAudio::Chunked(ChunkSettings {
            left: 10.0,
            chunk: 10.0,
            right: 5.0,
        }),
        LongAudio::Full(FullSettings {
            full_attention: 600.0,
            attention_context: 128,
        }),
    ];
    for (long_audio, beam) in modes.map(|mode| (mode, 0)).into_iter().chain([(LongAudio::Vad, 4)]) {
        let model = boosted(beam);
        let heard = |(samples, noise): &(Vec<f32>, Range<f64>), voice_activity: VoiceActivity| {
            let settings = RecognitionSettings {
                long_audio,
                // One window with the noise in it.
                min_pause: 20.0,
                max_window: 60.0,
                ..settings(voice_activity)
            };
            let found = model.transcribe(samples, &settings, &|| false).unwrap().unwrap();
            let inner = noise.start + 2.0 * REACH..noise.end - 2.0 * REACH;
            let (in_noise, in_speech) = phrases_in(&found, &inner);
            let boosted = found.boosted.unwrap();
            let times = boosted.phrases.iter().flat_map(|phrase| &phrase.times);
            assert!(
                times.filter(|time| inner.contains(time)).count() <= in_noise,
                "{boosted:?}"
            );
            // Most of them are not what the model alone would have written.
            let changed: u64 = boosted.phrases.iter().map(|phrase| phrase.changed).sum();
            assert!(changed > 0, "{boosted:?}");
            (in_noise, in_speech)
        };
        // Where nobody looks for speech, phrases are heard in noise.
        let off: Vec<_> = noises.iter().map(|noise| heard(noise, VoiceActivity::Off)).collect();
        assert!(
            off.iter().any(|(in_noise, _)| *in_noise > 0),
            "{long_audio:?}, beam {beam}: {off:?}"
        );
        for noise in &noises {
            let (in_noise, in_speech) = heard(noise, VoiceActivity::Neural);
            assert_eq!(in_noise, 0, "{long_audio:?}, beam {beam}");
            assert!(in_speech > 0, "{long_audio:?}, beam {beam}");
        }
    }
    // Without phrases nothing is told of them.
    let model = Recognizer::load(&test_data::bundled_model(), DType::F32, &Device::Cpu).unwrap();
    let found = model.transcribe(&noises[0].0, &settings(VoiceActivity::Neural), &|| false);
    assert_eq!(found.unwrap().unwrap().boosted, None);
}
