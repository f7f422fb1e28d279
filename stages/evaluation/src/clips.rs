//! The audio of the worst utterances, as FLAC files that browsers play.

use std::collections::BTreeMap;

use flow_audio::decode::SAMPLE_RATE;
use flow_audio::flac_encode::encode_signal;
use flow_kind::Storage;

use crate::audio_rows::AudioRows;
use crate::figures::worse;
use crate::transcribe::Outcome;

/// Clips by index of their utterance: of the `count` with the most errors, as many as `bytes` hold, the worst first.
pub fn worst(
    storage: &Storage,
    rows: &AudioRows,
    outcomes: &[Outcome],
    count: usize,
    bytes: usize,
) -> BTreeMap<usize, Vec<u8>> {
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
        let clip = rows
            .signal(storage, index)
            .ok()
            .and_then(|signal| encode_signal(&signal, SAMPLE_RATE));
        if let Some(clip) = clip.filter(|clip| clip.len() <= left) {
            left -= clip.len();
            clips.insert(index, clip);
        }
    }
    clips
}
