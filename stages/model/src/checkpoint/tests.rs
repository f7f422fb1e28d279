use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Device};
use flow_kernels::testing::values;
use flow_nn::tensor_files::pickle::Pickle;
use flow_nn::tensor_files::read_packed;

use super::*;
use crate::Result;
use crate::config::ModelConfig;
use crate::model::TdtModel;
use crate::testing::golden;
use crate::tokenizer::Tokenizer;

fn archive() -> Vec<u8> {
    std::fs::read(golden::file("model.nemo")).unwrap()
}

fn read(bytes: &[u8]) -> Result<StoredModel> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), bytes).unwrap();
    OpenModel::open(file.path())?.load()
}

#[test]
fn tensors_are_those_that_candle_reads() {
    let stored = read(&archive()).unwrap();
    let (_, other) = golden::model();
    assert_eq!(stored.tensors.len(), other.len());
    for (name, tensor) in other {
        let (_, found) = stored.tensors.iter().find(|(found, _)| *found == name).unwrap();
        assert_eq!(found.dtype(), tensor.dtype());
        assert_eq!(values(found), values(&tensor), "{name}");
    }
    assert_eq!(
        stored.tokenizer.unwrap(),
        std::fs::read(golden::file("tokenizer/tokenizer.model")).unwrap()
    );
    assert!(stored.config_yaml.contains("EncDecRNNTBPEModel"));
}

#[test]
fn a_folder_with_one_archive_stands_for_it() {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    let refused = || {
        let said = OpenModel::open(place.path()).unwrap_err().to_string();
        assert_eq!(OpenModel::files(place.path()).unwrap_err().to_string(), said);
        said
    };
    assert!(refused().contains("no .nemo archive"), "{}", refused());
    // Neither of these is an archive.
    std::fs::write(path("._model.nemo"), b"of another system").unwrap();
    std::fs::create_dir(path("folder.nemo")).unwrap();
    assert!(refused().contains("no .nemo archive"), "{}", refused());
    std::fs::write(path("model.nemo"), archive()).unwrap();
    let opened = OpenModel::open(place.path()).unwrap();
    assert_eq!((opened.path, opened.format), (path("model.nemo"), Format::Nemo));
    assert_eq!(OpenModel::files(place.path()).unwrap(), [path("model.nemo")]);
    std::fs::write(path("b.nemo"), b"").unwrap();
    assert!(
        refused().contains("holds 2 .nemo archives; name one: b.nemo, model.nemo"),
        "{}",
        refused()
    );
}

#[test]
fn a_gzipped_archive_is_read_alike() {
    let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut packer, &archive()).unwrap();
    let packed = packer.finish().unwrap();
    let (plain, unpacked) = (read(&archive()).unwrap(), read(&packed).unwrap());
    assert_eq!(plain.tensors.len(), unpacked.tensors.len());
    assert_eq!(plain.tokenizer, unpacked.tokenizer);
    assert!(read(&packed[..packed.len() / 2]).is_err());
}

#[test]
fn truncated_archives_are_errors() {
    let bytes = archive();
    for end in [
        0,
        1,
        100,
        511,
        512,
        5000,
        300_000,
        bytes.len() / 2,
        bytes.len() - 20_000,
    ] {
        let end = end.min(bytes.len() - 20_000);
        assert!(read(&bytes[..end]).is_err(), "cut at {end}");
    }
}

#[test]
fn damaged_archives_are_errors_or_still_read() {
    let bytes = archive();
    // The pickle, the headers of the zip and its directory are where structure lies.
    let structure: Vec<usize> = [
        &b"data.pkl"[..],
        b"PK\x01\x02",
        b"PK\x05\x06",
        b"PK\x03\x04",
        b"_rebuild_tensor_v2",
    ]
    .iter()
    .flat_map(|mark| {
        let at = bytes.windows(mark.len()).position(|window| window == *mark).unwrap();
        at.saturating_sub(40)..at + 160
    })
    .step_by(3)
    .collect();
    for at in structure {
        for change in [0xff, 0x80, 0x01] {
            let mut damaged = bytes.clone();
            damaged[at] ^= change;
            drop(read(&damaged));
        }
    }
}

#[test]
fn pickles_that_do_more_than_state_dicts_are_refused() {
    // os.system("true"), an unknown instruction, a self-reference, a cut number.
    for hostile in [
        &b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."[..],
        b"\x80\x02\xff.",
        b"}q\x00X\x01\x00\x00\x00ah\x00s.",
        b"\x80",
    ] {
        assert!(Pickle::read(hostile).and_then(|pickle| pickle.state_dict()).is_err());
    }
}

/// Bits of every tensor by name, with type and shape.
fn bits(model: &OpenModel) -> BTreeMap<String, (DType, Vec<usize>, Vec<u8>)> {
    let entry = |entry: &TensorEntry| {
        let bytes = entry.bytes_as(entry.dtype()).unwrap();
        (entry.name.clone(), (entry.dtype(), entry.shape().to_vec(), bytes))
    };
    model.tensors.iter().map(entry).collect()
}

fn opened(name: &str) -> OpenModel {
    OpenModel::open(&golden::file(name)).unwrap()
}

#[test]
fn an_archive_comes_back_from_a_folder_with_the_same_bits() {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    let original = opened("model.nemo");
    original.write(&path("folder"), Format::Folder, None, false).unwrap();
    let folder = OpenModel::open(&path("folder")).unwrap();
    assert_eq!(folder.format, Format::Folder);
    assert_eq!(bits(&folder), bits(&original));
    folder.write(&path("again.nemo"), Format::Nemo, None, false).unwrap();
    let again = OpenModel::open(&path("again.nemo")).unwrap();
    assert_eq!(again.format, Format::Nemo);
    assert_eq!(bits(&again), bits(&original));
    assert_eq!(again.tokenizer, original.tokenizer);
    let config = |model: &OpenModel| ModelConfig::from_nemo_yaml(&model.config_yaml).unwrap();
    let (ours, theirs) = (config(&again), config(&original));
    assert_eq!(
        (&ours.encoder, &ours.transducer, &ours.labels),
        (&theirs.encoder, &theirs.transducer, &theirs.labels)
    );

    // The tokenizer's side files are those that NeMo wrote.
    let members = |path: &Path| {
        let mut found = BTreeMap::new();
        for entry in tar::Archive::new(std::fs::File::open(path).unwrap()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let name = entry.path().unwrap().to_string_lossy().into_owned();
            let mut bytes = Vec::new();
            std::io::Read::read_to_end(&mut entry, &mut bytes).unwrap();
            let name = name.trim_start_matches("./");
            found.insert(name.split_once('_').map_or(name, |(_, rest)| rest).to_string(), bytes);
        }
        found
    };
    let (ours, theirs) = (members(&path("again.nemo")), members(&golden::file("model.nemo")));
    for name in ["vocab.txt", "tokenizer.vocab", "tokenizer.model"] {
        assert_eq!(ours[name], theirs[name], "{name}");
    }

    // The same model, the same bytes; and nothing is overwritten unasked.
    original.write(&path("direct.nemo"), Format::Nemo, None, false).unwrap();
    folder.write(&path("third.nemo"), Format::Nemo, None, false).unwrap();
    let bytes = |name: &str| std::fs::read(path(name)).unwrap();
    assert!(bytes("again.nemo") == bytes("third.nemo"));
    let error = folder
        .write(&path("again.nemo"), Format::Nemo, None, false)
        .unwrap_err();
    assert!(error.to_string().contains("is there already"), "{error}");
    folder.write(&path("again.nemo"), Format::Nemo, None, true).unwrap();
    assert!(bytes("again.nemo") == bytes("third.nemo"));
}

#[test]
fn weights_are_written_in_half_the_bytes_where_that_is_asked_for() {
    let place = tempfile::tempdir().unwrap();
    let (original, of_transformers) = (opened("model.nemo"), opened("hf"));
    for (dtype, format, largest) in [
        (DType::F16, Format::Nemo, 1e-3),
        (DType::BF16, Format::Nemo, 8e-3),
        (DType::BF16, Format::Folder, 8e-3),
        (DType::F16, Format::HuggingFace, 1e-3),
    ] {
        let path = place.path().join(format!("{}-{}", dtype.as_str(), format.name()));
        // The one of transformers has the one width that a model has there.
        let original = match format {
            Format::HuggingFace => &of_transformers,
            _ => &original,
        };
        original.write(&path, format, Some(dtype), false).unwrap();
        let half = OpenModel::open(&path).unwrap();
        let mut halved = 0;
        for entry in &half.tensors {
            let before = original.tensors.iter().find(|other| other.name == entry.name).unwrap();
            let (found, expected) = (values(&entry.load().unwrap()), values(&before.load().unwrap()));
            let exact = entry.name.starts_with("preprocessor")
                || entry.name.contains("running")
                || entry.name.contains("num_batches");
            assert_eq!(entry.dtype() == dtype, !exact, "{}", entry.name);
            halved += usize::from(!exact);
            // Window and filter bank of a Hugging Face folder are computed, not stored.
            let largest = match exact {
                true if entry.name.starts_with("preprocessor") => 1e-5,
                true => 0.0,
                false => largest,
            };
            for (found, expected) in found.iter().zip(&expected) {
                let bound = if largest == 0.0 {
                    0.0
                } else {
                    largest * expected.abs() + 1e-7
                };
                assert!((found - expected).abs() <= bound, "{}", entry.name);
            }
        }
        assert!(halved > 20);
        // Such a model still works.
        let model = TdtModel::load(&path, DType::F32, &Device::Cpu).unwrap();
        assert_eq!(model.transcribe(&[&golden::wave("eval", 0)]).unwrap().len(), 1);
    }
    // A value that f16 cannot hold.
    let mut large = original.clone();
    let name = "joint.enc.bias";
    let entry = large.tensors.iter_mut().find(|entry| entry.name == name).unwrap();
    *entry = TensorEntry::in_memory(name, (entry.load().unwrap() * 1e9).unwrap());
    let path = place.path().join("large.nemo");
    let error = large.write(&path, Format::Nemo, Some(DType::F16), false).unwrap_err();
    assert!(error.to_string().contains(name) && !path.exists(), "{error}");
    large.write(&path, Format::Nemo, Some(DType::BF16), false).unwrap();
}

#[test]
fn a_model_of_transformers_gives_its_outputs() {
    let huggingface = opened("hf");
    assert_eq!(huggingface.format, Format::HuggingFace);
    let model = TdtModel::load(&golden::file("hf"), DType::F32, &Device::Cpu).unwrap();
    assert!(model.unused_tensors().is_empty());
    let expected = golden::tensors("eval.safetensors");
    let lengths = golden::lengths(&expected["encoded_len"]);
    let waves = golden::waves("eval");
    let waves: Vec<&[f32]> = waves.iter().map(Vec::as_slice).collect();
    let (frames, found) = model.encode(&waves).unwrap();
    assert_eq!(found, lengths);
    // The bound that NeMo's own weights meet from waves.
    let encoded = expected["encoded"].transpose(1, 2).unwrap();
    let difference = golden::valid_difference(&frames, &encoded, &lengths);
    assert!(
        difference < golden::FROM_WAVES * golden::magnitude(&encoded),
        "encoder differs by {difference}"
    );
    // Ids as NeMo's greedy rule gives them over transformers' own modules.
    let outputs: serde_json::Value =
        serde_json::from_slice(&read_packed(&golden::file("hf_outputs.json"), 1).unwrap()).unwrap();
    for (wave, expected) in waves
        .iter()
        .zip(outputs["hf_forward_with_nemo_rule"].as_array().unwrap())
    {
        let hypothesis = model.transcribe(&[wave]).unwrap().remove(0);
        assert_eq!(serde_json::json!(hypothesis.ids), expected["ids"]);
    }
    let tokenizer = model.tokenizer.as_ref().unwrap();
    for case in outputs["tokenizer"].as_array().unwrap() {
        let text = case["text"].as_str().unwrap();
        assert_eq!(serde_json::json!(tokenizer.encode(text)), case["hf"], "{text:?}");
    }
    // The same weights as in NeMo's archive, unless the copy had to be cut (see hf_outputs.json, `notes`).
    if outputs["notes"].as_object().unwrap().is_empty() {
        let archive = bits(&opened("model.nemo"));
        let copy = bits(&huggingface);
        assert_eq!(copy.len(), archive.len());
        // Window and filter bank are computed; everything else is the same to the bit.
        for (name, tensor) in copy.iter().filter(|(name, _)| !name.starts_with("preprocessor.")) {
            assert_eq!(*tensor, archive[name], "{name}");
        }
    }
}

#[test]
fn a_folder_of_transformers_is_written_as_it_writes_it() {
    let place = tempfile::tempdir().unwrap();
    let original = opened("hf");
    let path = place.path().join("hf");
    let notes = original.write(&path, Format::HuggingFace, None, false).unwrap();
    assert!(notes[0].contains("sigma"));
    let json = |path: PathBuf| -> serde_json::Value { serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap() };
    for name in [
        "config.json",
        "generation_config.json",
        "processor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        let mut expected = json(golden::file("hf").join(name));
        if let Some(fields) = expected.as_object_mut() {
            fields.remove("transformers_version");
        }
        assert_eq!(json(path.join(name)), expected, "{name}");
    }
    let (ours, theirs) = ("model.safetensors", golden::file("hf").join("model.safetensors"));
    assert!(std::fs::read(path.join(ours)).unwrap() == std::fs::read(theirs).unwrap());

    // A vocabulary without a piece for padding pads with blank.
    let archive = opened("model.nemo");
    let config = ModelConfig::from_nemo_yaml(&archive.config_yaml).unwrap();
    let transducer = config.transducer.as_ref().unwrap();
    if transducer.joint.joint_hidden == transducer.prediction.pred_hidden {
        let path = place.path().join("from-nemo");
        archive.write(&path, Format::HuggingFace, None, false).unwrap();
        assert_eq!(json(path.join("config.json"))["pad_token_id"], config.vocab_size);
        let back = OpenModel::open(&path).unwrap();
        let (before, after) = (bits(&archive), bits(&back));
        for (name, tensor) in after.iter().filter(|(name, _)| !name.starts_with("preprocessor.")) {
            assert_eq!(*tensor, before[name], "{name}");
        }
        let tokenizer = |model: &OpenModel| Tokenizer::from_bytes(model.tokenizer.as_deref().unwrap()).unwrap();
        let (ours, theirs) = (tokenizer(&back), tokenizer(&archive));
        assert_eq!(ours.pieces(), theirs.pieces());
        let cases: serde_json::Value =
            serde_json::from_slice(&std::fs::read(golden::file("tokenizer_cases.json")).unwrap()).unwrap();
        for case in cases["cases"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            assert_eq!(ours.encode(text), theirs.encode(text), "{text:?}");
        }
    }
}

/// transformers has one width for prediction and joint network: the narrower one gets units that change nothing.
#[test]
fn two_widths_become_one_and_the_outputs_stay() {
    let place = tempfile::tempdir().unwrap();
    let original = opened("model.nemo");
    let tokenizer = || Tokenizer::from_bytes(original.tokenizer.as_deref().unwrap()).unwrap();
    let waves = golden::waves("eval");
    let waves: Vec<&[f32]> = waves.iter().map(Vec::as_slice).collect();
    for (prediction, joint, layers) in [(10, 24, 2), (24, 10, 1), (16, 16, 1)] {
        let mut config = ModelConfig::from_nemo_yaml(&original.config_yaml).unwrap();
        let transducer = config.transducer.as_mut().unwrap();
        transducer.prediction.pred_hidden = prediction;
        transducer.prediction.pred_rnn_layers = layers;
        transducer.joint.joint_hidden = joint;
        let config = ModelConfig::from_nemo_yaml(&config.to_nemo_yaml().unwrap()).unwrap();
        let mut model = TdtModel::new(config, Some(tokenizer()), 3, DType::F32, &Device::Cpu).unwrap();
        // Outputs of random weights are nearly even; these say something.
        let weight = model.parameters.id("joint.joint_net.2.weight").unwrap();
        let louder = (model.parameters.get(weight) * 20.0).unwrap();
        model.parameters.set(weight, louder).unwrap();
        let name = format!("{prediction}-{joint}");
        let (folder, theirs) = (place.path().join(&name), place.path().join(format!("{name}-hf")));
        model.save(&folder).unwrap();
        let notes = OpenModel::open(&folder)
            .unwrap()
            .write(&theirs, Format::HuggingFace, None, false)
            .unwrap();
        assert_eq!(
            notes.iter().any(|note| note.contains("are zero")),
            prediction != joint,
            "{notes:?}"
        );
        let wide = TdtModel::load(&theirs, DType::F32, &Device::Cpu).unwrap();
        let (width, transducer) = (prediction.max(joint), wide.config.transducer.as_ref().unwrap());
        assert_eq!(
            (transducer.prediction.pred_hidden, transducer.joint.joint_hidden),
            (width, width)
        );
        assert!(wide.unused_tensors().is_empty());
        let (before, after) = (model.transcribe(&waves).unwrap(), wide.transcribe(&waves).unwrap());
        assert!(before.iter().any(|hypothesis| hypothesis.ids.len() > 3), "{before:?}");
        for (before, after) in before.iter().zip(&after) {
            assert_eq!(
                (&before.ids, &before.frames, &before.durations),
                (&after.ids, &after.frames, &after.durations)
            );
            assert!((before.score - after.score).abs() <= 1e-6 * before.score.abs().max(1.0));
        }
        let batch = crate::model::MicroBatch {
            signals: waves.iter().map(|wave| wave.to_vec()).collect(),
            tokens: waves.iter().map(|_| vec![3, 5, 7, 5]).collect(),
            prompts: Vec::new(),
        };
        let loss = |model: &TdtModel| model.evaluate_loss(&batch).unwrap().loss;
        let (before, after) = (loss(&model), loss(&wide));
        assert!((before - after).abs() <= 1e-6 * before.abs(), "{before} {after}");
    }
}

#[test]
fn what_transformers_cannot_express_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let refused = |change: &dyn Fn(&mut OpenModel)| {
        let mut model = opened("hf");
        change(&mut model);
        let error = model
            .write(&place.path().join("hf"), Format::HuggingFace, None, false)
            .unwrap_err();
        assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0);
        error.to_string()
    };
    let config = |change: fn(&mut ModelConfig)| {
        move |model: &mut OpenModel| {
            let mut config = ModelConfig::from_nemo_yaml(&model.config_yaml).unwrap();
            change(&mut config);
            model.config_yaml = config.to_nemo_yaml().unwrap();
        }
    };
    assert!(
        refused(&config(
            |config| config.encoder.attention_context = crate::config::AttentionContext::Band(8)
        ))
        .contains("8 frames")
    );
    assert!(refused(&config(|config| config.preprocessor.low_frequency = 20.0)).contains("20 to"));
    let other_window = |model: &mut OpenModel| {
        let name = "preprocessor.featurizer.window";
        let window = model.tensors.iter_mut().find(|entry| entry.name == name).unwrap();
        let ones = Tensor::ones(window.shape(), DType::F32, &Device::Cpu).unwrap();
        *window = TensorEntry::in_memory(name, ones);
    };
    assert!(refused(&other_window).contains("featurizer.window"));
    let no_tokenizer = |model: &mut OpenModel| model.tokenizer = None;
    assert!(refused(&no_tokenizer).contains("SentencePiece"));
}

/// Merges that SentencePiece would not do, or would do besides, leave a model without a tokenizer and say why.
#[test]
fn a_tokenizer_that_is_no_sentencepiece_model_is_not_guessed() {
    let text = std::fs::read(golden::file("hf").join("tokenizer.json")).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let blank = json["model"]["vocab"].as_object().unwrap().len();
    let read = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut json = json.clone();
        change(&mut json);
        hf_tokenizer::sentencepiece_model(&json, blank)
    };
    assert!(read(&|_| ()).is_ok());
    let last = json["model"]["merges"].as_array().unwrap().len() - 1;
    type Change<'a> = &'a dyn Fn(&mut serde_json::Value);
    let cases: [(Change, &str); 7] = [
        (
            &|json| drop(json["model"]["merges"].as_array_mut().unwrap().remove(last)),
            "does not merge",
        ),
        (
            &|json| json["model"]["merges"][last] = serde_json::json!(["x", "q"]),
            "merge",
        ),
        (&|json| json["model"]["type"] = "Unigram".into(), "Unigram"),
        (
            &|json| json["normalizer"] = serde_json::json!({ "type": "NFKC" }),
            "NFKC",
        ),
        (&|json| json["normalizer"] = serde_json::Value::Null, "spaces"),
        (
            &|json| json["pre_tokenizer"] = serde_json::json!({ "type": "Whitespace" }),
            "Whitespace",
        ),
        (
            &|json| {
                let pieces = json["model"]["vocab"].as_object_mut().unwrap();
                let last = pieces.keys().next_back().unwrap().clone();
                pieces.remove(&last);
            },
            "tokens",
        ),
    ];
    for (change, expected) in cases {
        let error = read(change).unwrap_err();
        assert!(error.contains(expected), "{error}");
    }
    // Such a folder opens, and tells when the tokenizer is needed.
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("hf");
    std::fs::create_dir(&path).unwrap();
    for name in ["config.json", "processor_config.json", "model.safetensors"] {
        std::fs::copy(golden::file("hf").join(name), path.join(name)).unwrap();
    }
    std::fs::write(path.join("tokenizer.json"), r#"{"model": {"type": "Unigram"}}"#).unwrap();
    let model = OpenModel::open(&path).unwrap();
    assert!(model.no_tokenizer.as_deref().unwrap().contains("Unigram"));
}

#[test]
fn weights_in_several_files_are_one_model() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("hf");
    std::fs::create_dir(&path).unwrap();
    for name in ["config.json", "processor_config.json", "tokenizer.json"] {
        std::fs::copy(golden::file("hf").join(name), path.join(name)).unwrap();
    }
    let all = read_safetensors(&golden::file("hf").join("model.safetensors")).unwrap();
    let mut map = serde_json::Map::new();
    for (number, part) in all.chunks(30).enumerate() {
        let file = format!("model-{number:05}-of-00003.safetensors");
        let tensors: Vec<(&str, &Tensor)> = part.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
        write_safetensors(&path.join(&file), &tensors).unwrap();
        map.extend(part.iter().map(|(name, _)| (name.clone(), file.clone().into())));
    }
    let write_index = |map: &serde_json::Map<String, serde_json::Value>| {
        let index = serde_json::json!({ "metadata": {}, "weight_map": map });
        std::fs::write(path.join("model.safetensors.index.json"), index.to_string()).unwrap();
    };
    write_index(&map);
    assert_eq!(bits(&OpenModel::open(&path).unwrap()), bits(&opened("hf")));
    let name = all[0].0.clone();
    for (wrong, expected) in [
        ("../model.safetensors", "is not a file of this folder"),
        ("model-00001-of-00003.safetensors", "lacks tensor"),
        ("model-9.safetensors", "model-9"),
    ] {
        let mut map = map.clone();
        map.insert(name.clone(), wrong.into());
        write_index(&map);
        let error = OpenModel::open(&path).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn safetensors_files_have_the_bytes_of_their_own_library() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("x.safetensors");
    let tensors = [
        ("b", Tensor::new(&[1.5f32, -2.0, 3.0], &Device::Cpu).unwrap()),
        ("a", Tensor::new(&[[1i64, 2]], &Device::Cpu).unwrap()),
        (
            "c",
            Tensor::new(0.5f32, &Device::Cpu)
                .unwrap()
                .to_dtype(DType::BF16)
                .unwrap(),
        ),
        ("aa", Tensor::zeros((0, 3), DType::F32, &Device::Cpu).unwrap()),
    ];
    let borrowed: Vec<(&str, &Tensor)> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
    write_safetensors(&path, &borrowed).unwrap();
    let about = std::collections::HashMap::from([("format".to_string(), "pt".to_string())]);
    let library = ::safetensors::serialize(
        tensors.iter().map(|(name, tensor)| (name.to_string(), tensor)),
        Some(about),
    );
    assert!(std::fs::read(&path).unwrap() == library.unwrap());
    let bytes = std::fs::read(&path).unwrap();
    for end in [0, 7, 8, 40, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..end]).unwrap();
        assert!(read_safetensors(&path).is_err(), "cut at {end}");
    }
    std::fs::write(&path, [&bytes[..], b"x"].concat()).unwrap();
    assert!(read_safetensors(&path).is_err());
}

/// Checkpoints that Lightning wrote, with OmegaConf's containers as hyper-parameters, optimizer states and objects.
#[test]
fn lightning_checkpoints_are_read() {
    for name in ["lightning.ckpt", "lightning_protocol4.ckpt"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../tests/data/models")
            .join(name);
        let model = OpenModel::open(&path).unwrap();
        assert_eq!(model.format, Format::Lightning);
        let config = ModelConfig::from_nemo_yaml(&model.config_yaml).unwrap();
        assert_eq!(
            (
                config.encoder.d_model,
                config.transducer.as_ref().unwrap().joint.joint_hidden
            ),
            (8, 4)
        );
        assert_eq!(config.labels, ["<unk>", "a", "b"]);
        assert_eq!(config.transducer.as_ref().unwrap().loss.durations, [0, 1, 2]);
        assert_eq!(model.tensors.len(), 5);
        let tensor = |name: &str| model.tensors.iter().find(|entry| entry.name == name).unwrap();
        let weight = tensor("decoder.prediction.dec_rnn.lstm.weight_ih_l0");
        assert_eq!(weight.shape(), [2, 4]);
        let expected: Vec<f64> = (4..12).map(|n| f64::from(n as f32 / 7.0)).collect();
        assert_eq!(values(&weight.load().unwrap()), expected);
        assert_eq!(tensor("joint.enc.weight").dtype(), DType::BF16);
        assert_eq!(
            tensor("encoder.layers.0.conv.batch_norm.num_batches_tracked")
                .load()
                .unwrap()
                .to_scalar::<i64>()
                .unwrap(),
            5
        );
        assert!(model.no_tokenizer.as_deref().unwrap().contains("no tokenizer"));

        let bytes = std::fs::read(&path).unwrap();
        for at in (0..bytes.len()).step_by(37) {
            drop(read(&bytes[..at]));
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x41;
            drop(read(&damaged));
        }
    }
}

#[test]
fn a_folder_with_other_files_is_not_replaced() {
    let place = tempfile::tempdir().unwrap();
    let model = opened("model.nemo");
    let path = place.path().join("model");
    model.write(&path, Format::Folder, None, false).unwrap();
    model.write(&path, Format::Folder, None, true).unwrap();
    std::fs::write(path.join("notes.txt"), "mine").unwrap();
    let error = model.write(&path, Format::Folder, None, true).unwrap_err();
    assert!(error.to_string().contains("notes.txt"), "{error}");
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 1);
}
