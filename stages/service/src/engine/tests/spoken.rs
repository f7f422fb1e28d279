//! Turns that are heard as they are spoken, with a cache-aware model.

use flow_storage::Storage;
use flow_transcription::decoding_request::DecodingRequest;
use flow_transcription::recognizer::listen::Spoken;
use futures::future::join_all;

use super::*;

/// The golden streaming model.
pub fn streaming_model() -> PathBuf {
    let path = root().join("tests/data/golden/streaming/model.nemo");
    let place = std::env::current_exe().unwrap().with_file_name("golden-spoken");
    flow_nn::testing::unpacked_copy(&path, &place).unwrap()
}

fn speech(name: &str) -> Vec<f32> {
    let path = root().join("tests/data/golden/streaming/audio").join(name);
    samples(&Storage::default(), &path, 100.0).unwrap().unwrap()
}

#[test]
fn turns_beside_each_other_and_beside_recordings_are_those_of_the_model_alone() {
    let settings = EngineSettings {
        models: vec![named("streaming", streaming_model()), named("small", model())],
        ..EngineSettings::default()
    };
    let engine = Engine::start(settings).unwrap();
    let recognizer = Recognizer::load(&streaming_model(), DType::F32, &Device::Cpu).unwrap();
    let turns = [
        ("eval0_en-gb.wav", None, 1_280),
        ("eval1_de.wav", Some(0.2), 3_000),
        ("eval1_de.wav", Some(10.0), 16_000),
    ];
    let heard = |name: &str, accepted: Option<f64>, block: usize| {
        let engine = engine.clone();
        let speech = speech(name);
        async move {
            let mut listener = engine.listen(None, accepted, Arc::default()).await.unwrap();
            let mut words = Vec::new();
            for block in speech.chunks(block) {
                let next;
                (listener, next) = engine.hear(listener, block.to_vec(), false).await.unwrap();
                words.extend(next.heard.words);
            }
            let (listener, next) = engine.hear(listener, Vec::new(), true).await.unwrap();
            words.extend(next.heard.words);
            assert!(engine.hear(listener, vec![0.0], false).await.is_err());
            words
        }
    };
    wait(async {
        let least = recognizer.latency(recognizer.context_for(Some(0.01)).unwrap());
        assert_eq!(engine.latency(None, Some(0.01)).await.unwrap(), Some(least));
        assert_eq!(engine.latency(Some("small"), None).await.unwrap(), None);
        assert!(engine.listen(Some("small"), None, Arc::default()).await.is_err());
        let listener = engine.listen(None, None, Arc::default()).await.unwrap();
        let refused = engine.hear(listener, vec![f32::NAN], false).await;
        assert!(matches!(refused, Err(EngineError::Audio { .. })));
        let found = join_all(turns.map(|(name, accepted, block)| heard(name, accepted, block))).await;
        let window = engine
            .decode_window(None, (speech("eval1_de.wav"), None), false, Arc::default())
            .await
            .unwrap();
        assert!(!window.words.is_empty());
        for ((name, accepted, _), found) in turns.into_iter().zip(found) {
            let context = recognizer.context_for(accepted).unwrap();
            let mut listener = recognizer.listen(context, &DecodingRequest::default()).unwrap();
            let samples = &speech(name)[..];
            let spoken = &mut [Spoken {
                listener: &mut listener,
                samples,
                is_last: true,
            }];
            let alone = recognizer.hear_next(spoken).unwrap().remove(0).heard.words;
            assert!(!alone.is_empty());
            assert_eq!(found, alone, "{name} {context}");
        }
    });
}
