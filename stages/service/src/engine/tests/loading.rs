//! Which models are in memory.

use flow_storage::Storage;
use futures::future::join_all;

use super::*;

#[test]
fn models_that_cannot_be_loaded_say_which() {
    let missing = EngineSettings {
        models: vec![named("gone", "missing.nemo")],
        ..EngineSettings::default()
    };
    match Engine::start(missing) {
        Err(EngineError::Model(message)) => {
            assert!(
                message.contains("`gone`") && message.contains("missing.nemo"),
                "{message}"
            );
        }
        other => panic!("{other:?}"),
    }
    // Clients get the message, too, but not where the models lie.
    let folder = tempfile::tempdir().unwrap();
    let (damaged, incomplete) = (folder.path().join("damaged.nemo"), folder.path().join("incomplete/"));
    std::fs::write(&damaged, "no model").unwrap();
    std::fs::create_dir(&incomplete).unwrap();
    std::fs::write(incomplete.join("model_config.yaml"), "[").unwrap();
    let others = [
        ("gone", folder.path().join("missing.nemo"), "missing.nemo"),
        ("damaged", damaged, "damaged.nemo"),
        ("incomplete", incomplete, "incomplete"),
    ];
    let mut models = vec![named("small", model())];
    models.extend(others.iter().map(|(name, path, _)| named(name, path)));
    let settings = EngineSettings {
        models,
        ..EngineSettings::default()
    };
    let engine = Engine::start(settings).unwrap();
    for _ in 0..2 {
        for (name, _, file) in &others {
            let mut request = request(&wav(&two()));
            request.model = Some((*name).to_owned());
            let of_request = wait(engine.submit(request).unwrap().finish()).unwrap_err();
            let of_window =
                wait(engine.decode_window(Some(name), (vec![0.0; 16_000], None), false, Arc::default())).unwrap_err();
            for error in [of_request, of_window] {
                let EngineError::Model(message) = error else {
                    panic!("{error:?}");
                };
                assert!(
                    message.contains(&format!("`{name}`")) && message.contains(file),
                    "{message}"
                );
                assert!(!message.contains(folder.path().to_str().unwrap()), "{message}");
            }
        }
    }
    let states = engine.models();
    let loaded: Vec<(&str, bool)> = states.iter().map(|state| (&state.name[..], state.loaded)).collect();
    assert_eq!(
        loaded,
        [
            ("small", true),
            ("gone", false),
            ("damaged", false),
            ("incomplete", false)
        ]
    );
    let recognizer = recognizer();
    assert_eq!(states[0].digest.as_ref(), Some(&recognizer.digest));
    assert!(states[0].languages.contains(&"hi".to_owned()), "{states:?}");
    assert_eq!((&states[1].digest, states[1].languages.len()), (&None, 0));
}

#[test]
fn names_that_are_not_known_stand_for_the_first_model_where_any_is_accepted() {
    let transcribed_by = |name: &str, accept_any_model: bool| -> Result<Vec<bool>, EngineError> {
        let settings = EngineSettings {
            models: vec![named("first", model()), named("second", model())],
            accept_any_model,
            ..EngineSettings::default()
        };
        let engine = Engine::start(settings).unwrap();
        let mut request = request(&wav(&two()));
        request.model = Some(name.to_owned());
        wait(engine.submit(request)?.finish()).unwrap();
        let loaded: Vec<bool> = engine.models().iter().map(|state| state.loaded).collect();
        Ok(loaded)
    };
    assert_eq!(transcribed_by("whisper-1", true), Ok(vec![true, false]));
    assert_eq!(transcribed_by("second", true), Ok(vec![true, true]));
    match transcribed_by("whisper-1", false) {
        Err(EngineError::UnknownModel(message)) => assert!(message.contains("`second`"), "{message}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn models_that_nobody_uses_are_unloaded() {
    let settings = EngineSettings {
        idle_unload: 0.05,
        ..settings()
    };
    let (engine, gate) = gated(settings);
    until("unloading", || !engine.models()[0].loaded);
    assert!(engine.models()[0].digest.is_some() && engine.is_ready());
    let bytes = wav(&two());
    let jobs: Vec<Job> = (0..3).map(|_| engine.submit(request(&bytes)).unwrap()).collect();
    until("a batch", || gate.is_reached());
    std::thread::sleep(Duration::from_millis(200));
    assert!(engine.models()[0].loaded, "it is in use");
    gate.open();
    for finished in wait(join_all(jobs.into_iter().map(Job::finish))) {
        finished.unwrap();
    }
    until("unloading", || !engine.models()[0].loaded);
}

#[test]
fn models_share_a_budget_of_memory() {
    // Models of one file would share its tensors.
    let place = tempfile::tempdir().unwrap();
    let other = place.path().join("other.nemo");
    std::fs::copy(model(), &other).unwrap();
    let two_models = |budget| EngineSettings {
        models: vec![named("a", model()), named("b", &other)],
        memory_budget: Some(budget),
        ..EngineSettings::default()
    };
    match Engine::start(two_models(1_000)) {
        Err(EngineError::NoMemory(message)) => assert!(message.contains("`a`"), "{message}"),
        other => panic!("{other:?}"),
    }
    let size = model().metadata().unwrap().len();
    let loaded = |engine: &Engine| -> Vec<bool> { engine.models().iter().map(|state| state.loaded).collect() };
    let with = |model: &str| {
        let mut request = request(&wav(&two()));
        request.model = Some(model.to_owned());
        request
    };
    // Both have room: the archive is some hundred kilobytes more or less than its tensors in 32 bits, or a multiple.
    let engine = Engine::start(two_models(100 * size)).unwrap();
    wait(engine.submit(with("b")).unwrap().finish()).unwrap();
    assert_eq!(loaded(&engine), [true, true]);
    drop(engine);
    let bytes = flow_model::checkpoint::OpenModel::open(&model()).unwrap().tensors;
    let bytes: u64 = bytes.iter().map(|tensor| 4 * tensor.elements() as u64).sum();
    let (engine, gate) = gated(two_models(bytes + bytes / 2));
    // One has to go for the other, unless it is in use.
    let of_a = engine.submit(with("a")).unwrap();
    until("a batch", || gate.is_reached());
    match wait(engine.submit(with("b")).unwrap().finish()) {
        Err(EngineError::NoMemory(message)) => assert!(message.contains("`a`") && message.contains("`b`"), "{message}"),
        other => panic!("{other:?}"),
    }
    gate.open();
    wait(of_a.finish()).unwrap();
    wait(engine.submit(with("b")).unwrap().finish()).unwrap();
    assert_eq!(loaded(&engine), [false, true]);
    wait(engine.submit(with("a")).unwrap().finish()).unwrap();
    assert_eq!(loaded(&engine), [true, false]);
}

/// A request names a model with an adapter as it names any other, beside the model alone.
#[test]
fn requests_choose_a_model_or_the_same_with_an_adapter() {
    let golden = root().join("tests/data/golden");
    let place = std::env::current_exe().unwrap().with_file_name("golden-adapters");
    let base = flow_nn::testing::unpacked_copy(&golden.join("model/hf"), &place).unwrap();
    let mut with_adapter = base.clone().into_os_string();
    with_adapter.push("+");
    with_adapter.push(golden.join("adapters/lora_qkvo"));
    let paths = [("base", base), ("base+qkvo", PathBuf::from(with_adapter))];
    let settings = EngineSettings {
        models: paths.iter().map(|(name, path)| named(name, path)).collect(),
        ..EngineSettings::default()
    };
    let engine = Engine::start(settings).unwrap();
    let speech = samples(&Storage::default(), &golden.join("model/audio/eval0_en-us.wav"), 100.0)
        .unwrap()
        .unwrap();
    let heard = paths.map(|(name, path)| {
        let alone = Recognizer::load(&path, DType::F32, &Device::Cpu).unwrap();
        let expected = alone.decode(&[&speech]).unwrap().remove(0);
        let found = wait(engine.decode_window(Some(name), (speech.clone(), None), false, Arc::default())).unwrap();
        assert_eq!(found, expected, "{name}");
        found
    });
    assert_ne!(heard[0], heard[1]);
}
