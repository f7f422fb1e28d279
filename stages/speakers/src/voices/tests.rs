use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

const TIME: &str = "2026-01-02T03:04:05Z";

fn json_of(speakers: &[(&str, f64, &[f32])]) -> Value {
    let turn = |at: usize, label: &str, seconds: f64| json!({"start": at * 100, "end": at as f64 * 100.0 + seconds, "speaker": label});
    let turns = |share: f64| -> Value {
        let turns = speakers.iter().enumerate();
        turns
            .map(|(at, (label, seconds, _))| turn(at, label, seconds * share))
            .collect()
    };
    let speaker = |(label, seconds, embedding): &(&str, f64, &[f32])| json!({"speaker": label, "seconds": seconds, "embedding": embedding});
    json!({
        "diarization": turns(1.0),
        "exclusive_diarization": turns(0.5),
        "speakers": speakers.iter().map(speaker).collect::<Value>(),
    })
}

fn new(recording: &str, speakers: &[(&str, f64, &[f32])]) -> New {
    let text = json_of(speakers).to_string();
    New {
        recording: recording.to_owned(),
        file: Recording {
            path: format!("/diarizations/{recording}.json"),
            digest: flow_kind::Digest::of(text.as_bytes()).to_hex(),
        },
        diarization: Diarization::read(text.as_bytes()).unwrap(),
    }
}

fn add(store: &mut VoiceStore, new: Vec<New>) {
    let change = added(store.voices(), new, store.next_voice(), &Grouping::default()).unwrap();
    store.change(change, TIME.to_owned()).unwrap();
}

/// The speakers of the same voice, with its name.
fn parts(voices: &Voices) -> BTreeSet<(Option<String>, Vec<String>)> {
    let part = |voice: &Voice| (voice.name.clone(), voice.keys().map(|key| key.to_string()).collect());
    voices.voices().values().map(part).collect()
}

fn part(name: Option<&str>, speakers: &[&str]) -> (Option<String>, Vec<String>) {
    (
        name.map(str::to_owned),
        speakers.iter().map(|speaker| (*speaker).to_owned()).collect(),
    )
}

fn keys(voices: &Voices, voice: VoiceId) -> Vec<SpeakerKey> {
    voices.appearances(voice).map(|(key, _)| key).collect()
}

fn name(store: &mut VoiceStore, voice: VoiceId, name: &str) {
    let settled = keys(store.voices(), voice);
    let name = name.to_owned();
    store
        .change(Change::Name { voice, name, settled }, TIME.to_owned())
        .unwrap();
}

/// The same state in its plainest form, to compare with.
#[derive(Default, Debug, PartialEq)]
struct Plain {
    speakers: BTreeMap<SpeakerKey, (VoiceId, bool)>,
    names: BTreeMap<VoiceId, String>,
}

impl Plain {
    fn of(voices: &Voices) -> Self {
        let mut plain = Self::default();
        for (id, voice) in voices.voices() {
            plain.names.extend(voice.name.clone().map(|name| (*id, name)));
            for key in voice.keys() {
                let member = &voices.members()[&key];
                assert_eq!(member.voice, *id);
                plain.speakers.insert(key, (*id, member.settled));
            }
            assert!(voice.name.is_some() || !voice.speakers.is_empty());
        }
        assert_eq!(plain.speakers.len(), voices.members().len());
        plain
    }

    fn after(changes: &[Change]) -> Self {
        let mut counts = vec![true; changes.len()];
        fn switch(changes: &[Change], counts: &mut [bool], at: usize, on: bool) {
            counts[at] = on;
            if let Change::Undo { change } = &changes[at] {
                switch(changes, counts, *change as usize - 1, !on);
            }
        }
        for (at, change) in changes.iter().enumerate() {
            if let Change::Undo { .. } = change {
                switch(changes, &mut counts, at, true);
            }
        }
        let mut plain = Self::default();
        for (change, counts) in changes.iter().zip(counts) {
            if counts {
                plain.make(change);
            }
        }
        plain
    }

    fn make(&mut self, change: &Change) {
        let mut settle = |keys: &[SpeakerKey]| {
            keys.iter().for_each(|key| self.speakers.get_mut(key).unwrap().1 = true);
        };
        match change {
            Change::Add {
                recordings,
                moved,
                named,
            } => {
                for added in recordings {
                    self.speakers.retain(|key, _| key.recording != added.recording);
                    for speaker in &added.speakers {
                        let key = SpeakerKey::new(&added.recording, &speaker.speaker);
                        self.speakers.insert(key, (speaker.voice, speaker.settled));
                    }
                }
                moved
                    .iter()
                    .for_each(|(key, voice)| self.speakers.get_mut(key).unwrap().0 = *voice);
                self.names.extend(named.iter().cloned());
            }
            Change::Name { voice, name, settled } => {
                settle(settled);
                self.names.insert(*voice, name.clone());
            }
            Change::Merge {
                voice,
                other,
                settled,
                moved,
            } => {
                settle(settled);
                settle(moved);
                self.speakers
                    .values_mut()
                    .filter(|of| of.0 == *other)
                    .for_each(|of| of.0 = *voice);
                if let Some(name) = self.names.remove(other) {
                    self.names.entry(*voice).or_insert(name);
                }
            }
            Change::Move {
                speaker,
                voice,
                settled,
            } => {
                settle(settled);
                self.speakers.insert(speaker.clone(), (*voice, true));
            }
            Change::Forget { voice, speakers } => {
                speakers.iter().for_each(|key| {
                    self.speakers.remove(key);
                });
                self.names.remove(voice);
            }
            Change::Undo { .. } => {}
        }
    }
}

/// A change that a user may try, out of some numbers.
fn attempt(store: &VoiceStore, kind: u8, a: usize, b: usize, embeddings: &[[f32; 3]]) -> Option<Change> {
    let voices = store.voices();
    let ids: Vec<VoiceId> = voices.voices().keys().copied().collect();
    let id = |number: usize| ids.get(number % ids.len().max(1)).copied();
    Some(match kind {
        0..=2 => {
            let labels = ["SPEAKER_00", "SPEAKER_01", ["SPEAKER_02", "Ann", "Bo"][b % 3]];
            let speakers: Vec<(&str, f64, &[f32])> = labels
                .into_iter()
                .zip(embeddings)
                .map(|(label, vector)| (label, 1.0 + b as f64, &vector[..]))
                .collect();
            let new = vec![new(&format!("r{}", a % 5), &speakers)];
            added(voices, new, store.next_voice(), &Grouping::default()).unwrap()
        }
        3 => Change::Name {
            voice: id(a)?,
            name: ["Ann", "Bo", "Cy"][b % 3].to_owned(),
            settled: keys(voices, id(a)?),
        },
        4 => Change::Merge {
            voice: id(a)?,
            other: id(b)?,
            settled: keys(voices, id(a)?),
            moved: keys(voices, id(b)?),
        },
        5 => {
            let speakers: Vec<&SpeakerKey> = voices.members().keys().collect();
            let speaker = (*speakers.get(a % speakers.len().max(1))?).clone();
            let voice = if b.is_multiple_of(3) {
                store.next_voice()
            } else {
                id(b)?
            };
            let from = voices.members()[&speaker].voice;
            let settled = keys(voices, from)
                .into_iter()
                .chain(keys(voices, voice))
                .filter(|key| *key != speaker)
                .collect();
            Change::Move {
                speaker,
                voice,
                settled,
            }
        }
        6 => Change::Forget {
            voice: id(a)?,
            speakers: keys(voices, id(a)?),
        },
        _ => Change::Undo {
            change: (a % 12) as u64,
        },
    })
}

fn embedding() -> impl Strategy<Value = [f32; 3]> {
    (0.1f32..1.0, -1.0f32..1.0, -1.0f32..1.0).prop_map(|(x, y, z)| [x, y, z])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever is changed and undone, the store is what the changes that count make of nothing, and so is the store that is read
    /// again, also from a log that is cut anywhere.
    #[test]
    fn a_store_is_what_its_changes_make(
        steps in prop::collection::vec((0u8..9, 0usize..60, 0usize..60, prop::collection::vec(embedding(), 0..4)), 1..16),
        cut in 0.0f64..1.0,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let mut store = VoiceStore::open_to_change(folder.path()).unwrap();
        let mut changes: Vec<Change> = Vec::new();
        let mut states = vec![Voices::default()];
        for (kind, a, b, embeddings) in steps {
            let Some(change) = attempt(&store, kind, a, b, &embeddings) else { continue };
            let before = store.voices().clone();
            match store.change(change.clone(), TIME.to_owned()) {
                Ok(_) => {
                    changes.push(change);
                    states.push(store.voices().clone());
                }
                // A refusal changes nothing.
                Err(error) => {
                    prop_assert!(matches!(error, VoiceStoreError::Refused(_)), "{error}");
                    prop_assert_eq!(store.voices(), &before);
                }
            }
            prop_assert_eq!(Plain::of(store.voices()), Plain::after(&changes));
        }
        drop(store);
        if changes.is_empty() {
            return Ok(());
        }
        let read = VoiceStore::open(folder.path()).unwrap();
        prop_assert_eq!(read.voices(), &states[states.len() - 1]);

        let log = folder.path().join("changes.jsonl");
        let bytes = fs::read(&log).unwrap();
        let cut = (cut * bytes.len() as f64) as usize;
        fs::write(&log, &bytes[..cut]).unwrap();
        let whole = bytes[..cut].iter().filter(|byte| **byte == b'\n').count();
        let is_open_ended = bytes.get(cut) == Some(&b'\n') && cut > 0 && bytes[cut - 1] != b'\n';
        let whole = whole + usize::from(is_open_ended);
        let mut store = VoiceStore::open_to_change(folder.path()).unwrap();
        prop_assert_eq!(store.voices(), &states[whole]);
        prop_assert_eq!(store.torn().is_some(), !is_open_ended && cut > 0 && bytes[cut - 1] != b'\n');
        add(&mut store, vec![new("after", &[("SPEAKER_00", 1.0, &[1.0, 0.0, 0.0])])]);
        let after = store.voices().clone();
        drop(store);
        let store = VoiceStore::open(folder.path()).unwrap();
        prop_assert_eq!((store.voices(), store.torn()), (&after, None));
        prop_assert_eq!(store.history().count(), whole + 1);
    }

    /// However files are divided among commands and ordered, they have the same voices, and no voice has two speakers of a recording.
    #[test]
    fn the_order_of_files_does_not_matter(
        recordings in prop::collection::vec(prop::collection::vec((embedding(), 1u8..9), 0..4), 1..9),
        order in prop::collection::vec(any::<prop::sample::Index>(), 16),
        commands in prop::collection::vec(0usize..3, 16),
        named in any::<prop::sample::Index>(),
    ) {
        let files: Vec<New> = recordings
            .iter()
            .enumerate()
            .map(|(at, speakers)| {
                let labels = ["SPEAKER_00", "Ann", "SPEAKER_02"];
                let speakers: Vec<(&str, f64, &[f32])> = labels
                    .into_iter()
                    .zip(speakers)
                    .map(|(label, (vector, seconds))| (label, f64::from(*seconds), &vector[..]))
                    .collect();
                new(&format!("r{at}"), &speakers)
            })
            .collect();
        let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let mut stores = folders.each_ref().map(|folder| VoiceStore::open_to_change(folder.path()).unwrap());
        // Both begin with somebody whom the user has named.
        let first = new("first", &[("SPEAKER_00", 3.0, &[1.0, 0.2, 0.1]), ("SPEAKER_01", 3.0, &[0.2, 1.0, 0.1])]);
        for store in &mut stores {
            add(store, vec![first.clone()]);
            let ids: Vec<VoiceId> = store.voices().voices().keys().copied().collect();
            name(store, *named.get(&ids), "Bo");
        }
        add(&mut stores[0], files.clone());
        let mut left = files;
        let mut shuffled: Vec<Vec<New>> = vec![Vec::new(); 3];
        for at in 0.. {
            if left.is_empty() {
                break;
            }
            let next = left.remove(order[at % order.len()].index(left.len()));
            shuffled[commands[at % commands.len()]].push(next);
        }
        for files in shuffled {
            add(&mut stores[1], files);
        }
        prop_assert_eq!(parts(stores[0].voices()), parts(stores[1].voices()));
        for voice in stores[0].voices().voices().values() {
            let recordings: BTreeSet<String> = voice.keys().map(|key| key.recording).collect();
            prop_assert_eq!(recordings.len(), voice.speakers.len());
        }
        // What is there already changes nothing.
        let again = added(stores[0].voices(), Vec::new(), stores[0].next_voice(), &Grouping::default()).unwrap();
        let nothing = Change::Add { recordings: Vec::new(), moved: Vec::new(), named: Vec::new() };
        prop_assert_eq!(again, nothing);
    }
}

fn store_at(folder: &Path) -> VoiceStore {
    VoiceStore::open_to_change(folder).unwrap()
}

#[test]
fn names_and_corrections_stay() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = store_at(folder.path());
    add(
        &mut store,
        vec![
            new(
                "a",
                &[
                    ("SPEAKER_00", 9.0, &[1.0, 0.0, 0.0]),
                    ("SPEAKER_01", 5.0, &[0.0, 1.0, 0.0]),
                ],
            ),
            new(
                "b",
                &[
                    ("SPEAKER_00", 9.0, &[0.1, 1.0, 0.0]),
                    ("SPEAKER_01", 1.0, &[0.2, 0.9, 0.3]),
                ],
            ),
        ],
    );
    let (one, two, three) = (VoiceId(1), VoiceId(2), VoiceId(3));
    // The two of `b` are alike, but two of one recording are two.
    assert_eq!(
        parts(store.voices()),
        BTreeSet::from([
            part(None, &["a/SPEAKER_00"]),
            part(None, &["a/SPEAKER_01", "b/SPEAKER_00"]),
            part(None, &["b/SPEAKER_01"])
        ])
    );
    let found = review(store.voices(), 0.5, 9);
    assert_eq!((found.near.len(), found.between.len()), (0, 1), "{found:?}");
    name(&mut store, one, "Ann Lee");
    let refused =
        |store: &mut VoiceStore, change: Change| store.change(change, TIME.to_owned()).unwrap_err().to_string();
    let ann = Change::Name {
        voice: two,
        name: "Ann_Lee".to_owned(),
        settled: Vec::new(),
    };
    assert!(refused(&mut store, ann).contains("V1 has the name"));
    let merge = Change::Merge {
        voice: two,
        other: three,
        settled: Vec::new(),
        moved: Vec::new(),
    };
    assert!(refused(&mut store, merge).contains("two speakers of one recording"));

    // A voice with a name takes whom a cluster would not: their distance is 0.87.
    add(&mut store, vec![new("c", &[("SPEAKER_00", 2.0, &[0.62, 0.0, 0.78])])]);
    assert_eq!(store.voices().members()[&SpeakerKey::new("c", "SPEAKER_00")].voice, one);
    // A correction stays when recordings come, and when the recording is diarized again and its labels change.
    let speaker = SpeakerKey::new("b", "SPEAKER_00");
    store
        .change(
            Change::Move {
                speaker,
                voice: one,
                settled: Vec::new(),
            },
            TIME.to_owned(),
        )
        .unwrap();
    add(
        &mut store,
        vec![
            new(
                "b",
                &[
                    ("SPEAKER_00", 1.0, &[0.2, 0.9, 0.3]),
                    ("SPEAKER_01", 9.0, &[0.1, 1.0, 0.0]),
                ],
            ),
            new(
                "d",
                &[("Ann Lee", 1.0, &[0.0, 0.1, 1.0]), ("V1", 1.0, &[0.5, 0.0, -0.8])],
            ),
        ],
    );
    let voice_of = |store: &VoiceStore, recording: &str, label: &str| {
        store.voices().members()[&SpeakerKey::new(recording, label)].voice
    };
    assert_eq!(voice_of(&store, "b", "SPEAKER_01"), one);
    // The diarization gave this name; the other label is no name.
    assert_eq!(voice_of(&store, "d", "Ann Lee"), one);
    assert_ne!(voice_of(&store, "d", "V1"), one);

    // An undo in the middle, on which later changes build, is refused; undone from behind it works, and so does its undo.
    let all = parts(store.voices());
    assert!(refused(&mut store, Change::Undo { change: 1 }).contains("undo 2 first"));
    assert_eq!(store.last_change(), Some(5));
    store.change(Change::Undo { change: 5 }, TIME.to_owned()).unwrap();
    assert!(!store.voices().recordings().contains_key("d"));
    assert!(refused(&mut store, Change::Undo { change: 5 }).contains("undone already"));
    assert!(refused(&mut store, Change::Undo { change: 7 }).contains("not before it"));
    assert_eq!(store.last_change(), Some(4));
    store.change(Change::Undo { change: 6 }, TIME.to_owned()).unwrap();
    assert_eq!(parts(store.voices()), all);
    let undone: Vec<bool> = store.history().map(|(_, undone)| undone).collect();
    assert_eq!(undone, [false, false, false, false, false, true, false]);
}

#[test]
fn what_is_alike_is_reviewed_the_surest_first() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = store_at(folder.path());
    add(
        &mut store,
        vec![
            new("a", &[("SPEAKER_00", 5.0, &[1.0, 0.0, 0.0])]),
            new("b", &[("SPEAKER_00", 20.0, &[0.7, 0.714, 0.0])]),
            new("c", &[("SPEAKER_00", 5.0, &[0.1, 1.0, 0.0])]),
            new("d", &[("SPEAKER_00", 5.0, &[0.56, -0.83, 0.0])]),
        ],
    );
    // b and c are one; b is nearly a.
    let found = review(store.voices(), 0.5, 9);
    let near: Vec<(u32, u32)> = found.near.iter().map(|near| (near.voice.0, near.other.0)).collect();
    assert_eq!(near, [(1, 2), (1, 3)]);
    let between: Vec<(String, u32, u32)> = found
        .between
        .iter()
        .map(|between| (between.speaker.to_string(), between.voice.0, between.other.0))
        .collect();
    assert_eq!(between, [("b/SPEAKER_00".to_owned(), 2, 1)]);
    name(&mut store, VoiceId(3), "Dan");
    let found = review(store.voices(), 0.5, 9);
    assert_eq!((found.near[1].voice, found.near[1].other), (VoiceId(3), VoiceId(1)));
    name(&mut store, VoiceId(1), "Ann");
    name(&mut store, VoiceId(2), "Bo");
    assert_eq!(review(store.voices(), 0.5, 9), Review::default());
}

#[test]
fn damage_in_the_middle_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let mut store = store_at(folder.path());
    for recording in ["a", "b", "c"] {
        add(
            &mut store,
            vec![new(recording, &[("SPEAKER_00", 1.0, &[1.0, 0.0, 0.0])])],
        );
    }
    let held = VoiceStore::open_to_change(folder.path()).unwrap_err();
    assert!(matches!(held, VoiceStoreError::Lock(_)), "{held}");
    drop(store);
    let log = folder.path().join("changes.jsonl");
    let text = fs::read_to_string(&log).unwrap();
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    for (damaged, said) in [
        (
            text.replacen("\"seconds\":1.0", "\"seconds\":2.0", 2),
            "line 1 is damaged",
        ),
        ([lines[0], "\n", lines[1]].concat(), "line 2 is damaged"),
        ([lines[0], lines[2]].concat(), "line 2 is damaged: it has the number 3"),
        (
            [lines[0], &lines[1][..99], "\n", lines[2]].concat(),
            "line 2 is damaged",
        ),
        (format!("{text}{{}}\n"), "line 4 is damaged"),
    ] {
        fs::write(&log, damaged).unwrap();
        let error = VoiceStore::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains("changes.jsonl: ") && error.contains(said), "{error}");
    }
    fs::remove_file(&log).unwrap();
    assert!(matches!(
        VoiceStore::open(folder.path()),
        Err(VoiceStoreError::Missing { .. })
    ));
}

#[test]
fn what_is_no_diarization_is_refused_with_the_reason() {
    let whole = json_of(&[("SPEAKER_00", 4.0, &[1.0, 0.5]), ("SPEAKER_01", 2.0, &[0.0, 0.0])]);
    let read = |json: &Value| Diarization::read(json.to_string().as_bytes());
    let found = read(&whole).unwrap();
    assert_eq!(found.voiceless, ["SPEAKER_01"]);
    // Where the speaker is alone.
    assert_eq!(found.speakers[0].appearance.stretches, [[0.0, 2.0]]);
    let named = |label: &str| (label == "SPEAKER_00").then(|| "Ann Lee".to_owned());
    assert_eq!(
        found
            .renamed_rttm("talks/a b.c", &named)
            .unwrap()
            .lines()
            .next()
            .unwrap(),
        "SPEAKER a_b.c 1 0.000 4.000 <NA> <NA> Ann_Lee <NA> <NA>"
    );
    let renamed: Value = serde_json::from_str(&found.renamed_json(&named)).unwrap();
    let expected = whole.to_string().replace("SPEAKER_00", "Ann Lee");
    assert_eq!(renamed, serde_json::from_str::<Value>(&expected).unwrap());

    let with = |pointer: &str, value: Value| {
        let mut json = whole.clone();
        *json.pointer_mut(pointer).unwrap() = value;
        json
    };
    for (json, said) in [
        (json!([]), "not a diarization"),
        (json!([[[0.5, 1.0, "SPEAKER_00"]], [], []]), "expected a JSON object"),
        (json!({"segments": []}), "transcript"),
        (json!({"diarization": []}), "speakers"),
        (with("/speakers/1/speaker", json!("SPEAKER_00")), "there twice"),
        (with("/speakers/0/speaker", json!("a\u{1b}")), "control characters"),
        (with("/speakers/0/seconds", json!(-1)), "seconds"),
        (with("/speakers/0/seconds", json!(1.5e308)), "10,000,000"),
        (with("/speakers/0/embedding", json!([])), "not a list"),
        (with("/speakers/0/embedding", json!([1e300, 1])), "not a list"),
        (with("/speakers/1/embedding", json!([1])), "another length"),
        (with("/diarization/0/end", json!(-1)), "from 0 to -1 s"),
    ] {
        let error = read(&json).unwrap_err().to_string();
        assert!(error.contains(said) && !error.contains('\u{1b}'), "{json}: {error}");
    }
    assert!(Diarization::read(b"\xff").is_err());

    let two = vec![
        new("a", &[("SPEAKER_00", 1.0, &[1.0, 0.0])]),
        new("b", &[("SPEAKER_00", 1.0, &[1.0, 0.0, 0.0])]),
    ];
    let error = added(&Voices::default(), two, VoiceId(1), &Grouping::default())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("b/SPEAKER_00 has 3 values") && error.contains("different networks"),
        "{error}"
    );
}
