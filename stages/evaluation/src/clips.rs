//! The audio of the worst utterances, as FLAC files that browsers play.

use std::collections::BTreeMap;

use flow_audio::decode::SAMPLE_RATE;
use flow_audio::flac::{Samples, StreamInfo};
use flow_audio::flac_encode::encode;

use crate::audio_rows::AudioRows;
use crate::figures::worse;
use crate::transcribe::Outcome;

/// Clips by index of their utterance: of the `count` with the most errors, as many as `bytes` hold, the worst first.
pub fn worst(rows: &AudioRows, outcomes: &[Outcome], count: usize, bytes: usize) -> BTreeMap<usize, Vec<u8>> {
    let mut order: Vec<usize> = (0..outcomes.len())
        .filter(|&index| matches!(&outcomes[index], Outcome::Transcript { score, .. } if score.words.errors() > 0))
        .collect();
    let key = |index: usize| match &outcomes[index] {
        Outcome::Transcript { score, reference, .. } => {
            let id = rows.utterances.get(index).map_or("", |utterance| &utterance.segment_id);
            (score.words, id, reference.as_str())
        }
        Outcome::Unreadable { .. } => Default::default(),
    };
    order.sort_by(|&a, &b| worse(key(a), key(b)));
    let mut clips = BTreeMap::new();
    let mut left = bytes;
    for index in order.into_iter().take(count) {
        // It was read for transcription before; if it cannot be read any more, there is no clip.
        let clip = rows.signal(index).ok().and_then(|signal| flac(&signal));
        if let Some(clip) = clip.filter(|clip| clip.len() <= left) {
            left -= clip.len();
            clips.insert(index, clip);
        }
    }
    clips
}

/// 16 bits wide, mono, 16 kHz.
fn flac(signal: &[f32]) -> Option<Vec<u8>> {
    let sample = |value: &f32| ((value * 32768.0).round().clamp(-32768.0, 32767.0) as i32) << 16;
    encode(&Samples {
        info: StreamInfo {
            sample_rate: SAMPLE_RATE,
            channels: 1,
            bits: 16,
            total_frames: signal.len() as u64,
            md5: [0; 16],
        },
        interleaved: signal.iter().map(sample).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clip_is_the_signal_to_sixteen_bits() {
        let signal: Vec<f32> = (0..20_000).map(|n| (n as f32 * 0.03).sin() * 1.1).collect();
        let clip = flac(&signal).expect("a clip");
        let decoded = flow_audio::decode::decode(&clip, 10.0).expect("it decodes");
        assert_eq!(decoded.len(), signal.len());
        for (ours, theirs) in decoded.iter().zip(&signal) {
            assert!(
                (ours - theirs.clamp(-1.0, 1.0)).abs() <= 1.0 / 32768.0,
                "{ours} {theirs}"
            );
        }
        assert_eq!(flac(&[]), None);
    }
}
