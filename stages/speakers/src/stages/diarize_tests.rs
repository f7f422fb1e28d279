use std::path::Path;

use arrow::array::AsArray;
use arrow::datatypes::{Float64Type, Int64Type};
use flow_runtime::harness::{Harness, Output};

use super::*;
use crate::error_rate::{Scoring, errors};
use crate::pyannote::written::{CONFIG_COMMUNITY_1, config_3_1, put};
use crate::rttm::read_rttm;
use crate::stages::rows::{read_speakers, read_turns};
use crate::turns::Turn;

/// A mono WAV file of 16 kHz and 16 bits, of silence.
fn silence(seconds: u32) -> Vec<u8> {
    let data = seconds * 32_000;
    let mut file = b"RIFF".to_vec();
    file.extend((36 + data).to_le_bytes());
    file.extend(b"WAVEfmt \x10\0\0\0\x01\0\x01\0");
    file.extend(16_000u32.to_le_bytes());
    file.extend(32_000u32.to_le_bytes());
    file.extend(b"\x02\0\x10\0data");
    file.extend(data.to_le_bytes());
    file.resize(file.len() + data as usize, 0);
    file
}

fn settings(folder: &Path) -> DiarizeSettings {
    DiarizeSettings::new(vec![folder.to_string_lossy().into_owned()])
}

fn run(settings: DiarizeSettings) -> Output {
    Harness::<Diarize>::new(settings).run().unwrap()
}

/// The bundled conversation of two voices, with the turns of its reference.
fn conversation() -> (Vec<u8>, Vec<Turn>) {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/golden/speakers"));
    let bytes = std::fs::read(folder.join("conv2.flac")).unwrap();
    let text = std::fs::read_to_string(folder.join("conv2.rttm")).unwrap();
    (bytes, read_rttm(&text).unwrap().remove("conv2").unwrap())
}

#[test]
fn recordings_become_turns_and_what_is_no_recording_a_reject() {
    let (conversation, reference) = conversation();
    let place = tempfile::tempdir().unwrap();
    std::fs::create_dir(place.path().join("talks")).unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(place.path().join(name), bytes).unwrap();
    write("talks/two.flac", &conversation);
    write("silence.wav", &silence(2));
    write("empty.wav", b"");
    write("text.wav", b"this is not audio");
    let mut settings = settings(place.path());
    settings
        .input
        .push(place.path().join("gone.wav").to_string_lossy().into_owned());
    let output = run(settings);

    let names: Vec<&str> = output.partitions.iter().map(Partition::as_str).collect();
    assert_eq!(names, ["empty", "gone", "silence", "talks/two", "text"]);
    for (name, reason) in [
        ("empty", "empty_file"),
        ("gone", "missing_file"),
        ("text", "unsupported_format"),
    ] {
        assert_eq!(output.reasons(name), [(None, reason)], "{name}");
    }
    assert_eq!(output.rejects().len(), 3);
    for (name, file, speakers) in [("silence", "silence.wav", 0), ("talks/two", "talks/two.flac", 2)] {
        let recording = output.rows("recordings", name);
        let column = |column: &str| recording.column_by_name(column).unwrap().clone();
        assert_eq!(column("recording").as_string::<i32>().value(0), file);
        assert_eq!(column("num_speakers").as_primitive::<Int64Type>().value(0), speakers);
        assert!(column("duration").as_primitive::<Float64Type>().value(0) > 1.0);
        assert_eq!(output.rows("timings", name).num_rows(), 1);
        assert_eq!(output.rows("speakers", name).num_rows() as i64, speakers);
    }
    assert_eq!(output.rows("turns", "silence").num_rows(), 0);
    let turns = read_turns(&output.rows("turns", "talks/two")).unwrap();
    let (found, _) = errors(&reference, &turns, &Scoring::default()).unwrap();
    assert!(found.der() < 0.05, "{found:?}");
    let exclusive = read_turns(&output.rows("exclusive", "talks/two")).unwrap();
    assert!(exclusive.windows(2).all(|pair| pair[0].end <= pair[1].start + 1e-9));
    let speakers = read_speakers(&output.rows("speakers", "talks/two")).unwrap();
    assert_eq!([&*speakers[0].name, &*speakers[1].name], ["SPEAKER_00", "SPEAKER_01"]);
    assert_eq!(turns[0].speaker, "SPEAKER_00");
}

#[test]
fn what_is_before_the_damage_is_diarized_or_refused() {
    let (conversation, reference) = conversation();
    let place = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(place.path().join(name), bytes).unwrap();
    write("cut.flac", &conversation[..conversation.len() / 2]);
    write("stump.wav", &silence(2)[..44 + 20_000]);
    write("whole.wav", &silence(2));
    let kept = run(settings(place.path()));
    let seconds = |name: &str, column: &str| {
        let recording = kept.rows("recordings", name);
        let column = recording.column_by_name(column).unwrap().clone();
        column.as_primitive::<Float64Type>().iter().next().unwrap()
    };
    assert_eq!(seconds("whole", "damaged_at"), None);
    let at = seconds("cut", "damaged_at").unwrap();
    assert_eq!(seconds("cut", "duration"), Some(at));
    let turns = read_turns(&kept.rows("turns", "cut")).unwrap();
    assert!(
        !turns.is_empty() && turns.iter().all(|turn| turn.end <= at + 0.5),
        "{turns:?}"
    );
    assert!(at < reference.iter().map(|turn| turn.end).fold(0.0, f64::max), "{at}");
    assert_eq!(kept.reasons("stump"), [(None, "decode_error")]);
    let refused = run(DiarizeSettings {
        on_damage: OnDamage::Refuse,
        ..settings(place.path())
    });
    for name in ["cut", "stump"] {
        assert_eq!(refused.reasons(name), [(None, "decode_error")], "{name}");
    }
}

/// The embeddings of one run are the known speakers of the next: whoever is known keeps the name that is given.
#[test]
fn known_speakers_have_their_names() {
    let (conversation, _) = conversation();
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("two.flac"), conversation).unwrap();
    let first = run(settings(place.path()));
    let speakers = read_speakers(&first.rows("speakers", "two")).unwrap();
    let known = place.path().join("known.json");
    std::fs::write(&known, json!({"Ann": speakers[1].embedding}).to_string()).unwrap();
    let output = run(DiarizeSettings {
        known_speakers: known,
        ..settings(place.path())
    });
    let renamed = read_speakers(&output.rows("speakers", "two")).unwrap();
    let mut names: Vec<&str> = renamed.iter().map(|speaker| speaker.name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["Ann", "SPEAKER_00"]);
    let before = read_turns(&first.rows("turns", "two")).unwrap();
    let after = read_turns(&output.rows("turns", "two")).unwrap();
    for (before, after) in before.iter().zip(&after) {
        let is_ann = before.speaker == speakers[1].name;
        assert_eq!(after.speaker == "Ann", is_ann, "{before:?} {after:?}");
    }
    assert_eq!(before.len(), after.len());
}

#[test]
fn settings_that_cannot_be_are_named() {
    let refused = |change: fn(&mut DiarizeSettings)| {
        let mut settings = DiarizeSettings::new(vec!["a.wav".into()]);
        change(&mut settings);
        Harness::<Diarize>::new(settings).shape().unwrap_err().to_string()
    };
    assert!(refused(|s| (s.min_speakers, s.max_speakers) = (3, 2)).contains("`min_speakers` is 3"));
    assert!(refused(|s| (s.num_speakers, s.max_speakers) = (3, 2)).contains("`num_speakers` is 3"));
    assert!(refused(|s| (s.num_speakers, s.min_speakers) = (1, 2)).contains("`num_speakers` is 1"));
    assert!(refused(|s| s.clustering_threshold = Some(0.0)).contains("clustering_threshold"));
    assert!(refused(|s| s.clustering_threshold = Some(f64::NAN)).contains("clustering_threshold"));
    assert!(refused(|s| s.min_duration_on = -1.0).contains("min_duration_on"));
    assert!(refused(|s| s.min_duration_off = Some(f64::INFINITY)).contains("min_duration_off"));
    assert!(refused(|s| s.max_duration = 1e9).contains("max_duration"));
    assert!(refused(|s| s.known_threshold = 2.0).contains("known_threshold"));
    assert!(refused(|s| s.input.clear()).contains("names no recording"));
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("a.wav"), silence(1)).unwrap();
    let unknown = DiarizeSettings {
        known_speakers: place.path().join("gone.json"),
        ..settings(place.path())
    };
    let error = Harness::<Diarize>::new(unknown).run().unwrap_err().to_string();
    assert!(error.contains("gone.json"), "{error}");
}

#[test]
fn where_things_are_is_no_part_of_the_key() {
    let one = DiarizeSettings::new(vec!["a".into()]);
    let other = DiarizeSettings {
        // Matters only where speakers are known.
        known_threshold: 0.9,
        ..DiarizeSettings::new(vec!["b".into()])
    };
    assert_eq!(Diarize::identity(&one), Diarize::identity(&other));
    let fewer = DiarizeSettings {
        max_speakers: 2,
        ..one.clone()
    };
    assert_ne!(Diarize::identity(&one), Diarize::identity(&fewer));
}

/// A network of voices whose weights are those of a formula: it runs, and tells no one apart.
fn written_pipeline(folder: &Path) {
    let segmentation = crate::weights::unpack(include_bytes!("../../weights/segmentation-3.0.safetensors.zst"), 4);
    let segmentation = segmentation.unwrap();
    let embedding = crate::formula::file(&crate::formula::tensors("wespeaker_formula.json"));
    put(&folder.join("config.yaml"), config_3_1("segmentation", "embedding"));
    put(&folder.join("segmentation/model.safetensors"), segmentation);
    put(&folder.join("embedding/model.safetensors"), embedding);
}

#[test]
fn a_pyannote_pipeline_takes_the_place_of_the_bundled_networks() {
    let place = tempfile::tempdir().unwrap();
    let model = place.path().join("model");
    written_pipeline(&model);
    let talks = place.path().join("talks");
    // The beginning of the conversation, and nothing.
    let bytes = conversation().0;
    let samples = flow_audio::decode::decode(&bytes, 1e5).unwrap();
    put(&talks.join("two.wav"), wave(&samples[..12 * 16_000]));
    put(&talks.join("silence.wav"), silence(2));
    let with = |change: &dyn Fn(&mut DiarizeSettings)| {
        let mut settings = DiarizeSettings {
            model: model.to_str().unwrap().to_owned(),
            ..settings(&talks)
        };
        change(&mut settings);
        Harness::<Diarize>::new(settings).run()
    };
    let output = with(&|_| ()).unwrap();
    assert_eq!(output.rows("turns", "silence").num_rows(), 0);
    assert!(output.rejects().is_empty());
    let speakers = read_speakers(&output.rows("speakers", "two")).unwrap();
    assert!(!speakers.is_empty() && speakers.iter().all(|speaker| speaker.embedding.len() == 256));
    let one = with(&|settings| settings.num_speakers = 1).unwrap();
    assert_eq!(read_speakers(&one.rows("speakers", "two")).unwrap().len(), 1);

    let refused = |change: &dyn Fn(&mut DiarizeSettings)| with(change).err().unwrap().to_string();
    assert!(refused(&|settings| settings.min_duration_on = 0.5).contains("min_duration_on"));
    assert!(refused(&|settings| settings.model = "hf://only-one-part".into()).contains("hf://only-one-part"));
    assert!(refused(&|settings| settings.model.push('x')).contains("config.yaml does not exist"));
    // Voices that other networks know are none of these.
    let known = place.path().join("known.json");
    put(&known, json!({"Ann": vec![0.5; 192]}).to_string());
    let error = refused(&|settings| settings.known_speakers.clone_from(&known));
    assert!(error.contains("192 values") && error.contains("256"), "{error}");
    put(&model.join("segmentation/model.safetensors"), "no weights");
    assert!(refused(&|_| ()).contains("segmentation/model.safetensors"));
}

/// A mono WAV file of 16 kHz and 16 bits.
fn wave(samples: &[f32]) -> Vec<u8> {
    let data = samples
        .iter()
        .flat_map(|sample| ((sample * 32_767.0) as i16).to_le_bytes());
    let mut file = b"RIFF".to_vec();
    file.extend((36 + 2 * samples.len() as u32).to_le_bytes());
    file.extend(&silence(0)[8..40]);
    file.extend((2 * samples.len() as u32).to_le_bytes());
    file.extend(data);
    file
}

/// The runtime digests the files of a partition for its key.
#[test]
fn what_a_model_is_made_of_belongs_to_the_key() {
    let place = tempfile::tempdir().unwrap();
    let model = place.path().join("model");
    put(&model.join("config.yaml"), CONFIG_COMMUNITY_1);
    let parts = [
        "config.yaml",
        "segmentation/pytorch_model.bin",
        "embedding/pytorch_model.bin",
        "plda/xvec_transform.npz",
        "plda/plda.npz",
    ];
    for part in &parts[1..] {
        put(&model.join(part), "");
    }
    let with_model = DiarizeSettings {
        model: model.to_str().unwrap().to_owned(),
        ..settings(place.path())
    };
    let pipeline = found(&with_model.model, true, &mut |_| true).unwrap().unwrap();
    assert_eq!(pipeline.files.all(), parts.map(|part| model.join(part)));
    assert_eq!(Diarize::sources(&with_model), [("model", model.clone())]);

    let bundled = settings(place.path());
    assert_ne!(Diarize::identity(&with_model), Diarize::identity(&bundled));
    // Not where it is; and where nothing is given, its configuration says it.
    let elsewhere = DiarizeSettings {
        model: "hf://pyannote/speaker-diarization-community-1".into(),
        ..bundled.clone()
    };
    assert_eq!(Diarize::identity(&with_model), Diarize::identity(&elsewhere));
    assert!(Diarize::sources(&elsewhere).is_empty());
    let given = DiarizeSettings {
        clustering_threshold: Some(0.7),
        ..elsewhere.clone()
    };
    assert_ne!(Diarize::identity(&given), Diarize::identity(&elsewhere));
    // The keys of the bundled networks are what they were, however their defaults are given.
    let spelled = DiarizeSettings {
        clustering_threshold: Some(0.7),
        min_duration_off: Some(0.0),
        ..bundled.clone()
    };
    assert_eq!(Diarize::identity(&spelled), Diarize::identity(&bundled));
    let identity = Diarize::identity(&bundled);
    assert_eq!(
        (&identity["clustering_threshold"], &identity["min_duration_off"]),
        (&json!(0.7), &json!(0.0))
    );
    assert!(identity.get("model").is_none());
}
