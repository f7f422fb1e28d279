use std::path::{Path, PathBuf};
use std::time::Duration;

use flow_hub::Hub;
use safetensors::SafeTensors;

use super::written::{CONFIG_COMMUNITY_1, checkpoint, community_1, config_3_1, npy, pipeline_3_1, put, zip};
use super::*;
use crate::clustering::Clusters;
use crate::diarizer::{Diarized, SAMPLE_RATE};
use crate::error_rate::{Scoring, errors};
use crate::formula::{self, Tensors};
use crate::golden;
use crate::turns::Turn;
use crate::weights::unpack;

const NEVER: &dyn Fn() -> bool = &|| false;
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn find(folder: &Path) -> Result<Pipeline> {
    let found = Pipeline::find(folder.to_str().unwrap(), None, &mut |_| true)?;
    Ok(found.expect("nothing was cancelled"))
}

fn refused(folder: &Path) -> String {
    find(folder).unwrap_err().to_string()
}

/// The weights of segmentation-3.0 itself, which are carried.
fn segmentation_bytes() -> Vec<u8> {
    unpack(include_bytes!("../../weights/segmentation-3.0.safetensors.zst"), 4).unwrap()
}

fn segmentation() -> Tensors {
    let bytes = segmentation_bytes();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = |(name, tensor): (String, safetensors::tensor::TensorView)| {
        let (values, _) = tensor.data().as_chunks();
        let values = values.iter().map(|&value| f32::from_le_bytes(value)).collect();
        (name, (tensor.shape().to_vec(), values))
    };
    file.tensors().into_iter().map(tensor).collect()
}

fn embedding() -> Tensors {
    formula::tensors("wespeaker_formula.json")
}

/// A PLDA of no meaning, well-conditioned.
fn plda() -> Tensors {
    let values = |seed: usize, count: usize, size: f32| -> Vec<f32> {
        let value = |at: usize| (((at + seed) * 7919 % 2003) as f32 / 1001.5 - 1.0) * size;
        (0..count).map(value).collect()
    };
    let mut tr = values(5, REDUCED * REDUCED, 0.01);
    (0..REDUCED).for_each(|at| tr[at * REDUCED + at] += 1.0);
    let psi = (0..REDUCED).map(|at| 10.0 / (1 + at) as f32).collect();
    Tensors::from([
        ("mean1".into(), (vec![DIMENSION], values(1, DIMENSION, 0.1))),
        (
            "lda".into(),
            (vec![DIMENSION, REDUCED], values(2, DIMENSION * REDUCED, 0.2)),
        ),
        ("mean2".into(), (vec![REDUCED], values(3, REDUCED, 0.1))),
        ("mu".into(), (vec![REDUCED], values(4, REDUCED, 0.1))),
        ("tr".into(), (vec![REDUCED, REDUCED], tr)),
        ("psi".into(), (vec![REDUCED], psi)),
    ])
}

/// Networks that are read from memory.
fn diarizer(method: Method) -> Diarizer {
    let segmentation = PyanNet::from_safetensors(&segmentation_bytes()).unwrap();
    let embedding = WeSpeakerResNet34::from_safetensors(&formula::file(&embedding())).unwrap();
    let steps = Steps {
        method,
        as_pyannote: true,
    };
    Diarizer::new(Box::new(segmentation), Box::new(embedding), steps).unwrap()
}

/// Some seconds of the conversation in which both people speak: few chunks.
fn samples() -> Vec<f32> {
    golden::speech(13 * SAMPLE_RATE as usize)
}

fn diarized(pipeline: &Pipeline, samples: &[f32]) -> Diarized {
    let diarizer = pipeline.diarizer().unwrap();
    diarizer.diarize(samples, &pipeline.settings(), NEVER).unwrap().unwrap()
}

#[test]
fn a_folder_of_3_1_gives_what_its_networks_give() {
    let place = tempfile::tempdir().unwrap();
    let samples = samples();
    let settings = DiarizationSettings {
        clustering_threshold: 0.704_565_496_394_579_9,
        ..DiarizationSettings::default()
    };
    let method = Method::Agglomerative {
        min_cluster_size: 12,
        assignment: Assignment::Nearest,
    };
    let expected = diarizer(method).diarize(&samples, &settings, NEVER).unwrap().unwrap();
    assert!(!expected.turns.is_empty());
    for checkpoints in [true, false] {
        let folder = place.path().join(checkpoints.to_string());
        pipeline_3_1(&folder, &segmentation(), &embedding(), checkpoints);
        let pipeline = find(&folder).unwrap();
        assert_eq!(pipeline.settings(), settings);
        assert_eq!(pipeline.files.all().len(), 3);
        assert_eq!(diarized(&pipeline, &samples), expected);
    }
}

#[test]
fn a_folder_of_community_1_gives_what_its_networks_give() {
    let place = tempfile::tempdir().unwrap();
    let samples = samples();
    let tensors = plda();
    community_1(place.path(), &segmentation(), &embedding(), &tensors);
    let pipeline = find(place.path()).unwrap();
    assert_eq!(pipeline.files.all().len(), 5);
    let part = |name: &str| tensors[name].1.iter().copied().map(f64::from).collect();
    let parts = PldaParts {
        mean1: part("mean1"),
        lda: part("lda"),
        mean2: part("mean2"),
        mu: part("mu"),
        tr: part("tr"),
        psi: part("psi"),
    };
    let settings = DiarizationSettings {
        clustering_threshold: 0.6,
        ..DiarizationSettings::default()
    };
    let method = Method::Vbx {
        fa: 0.07,
        fb: 0.8,
        plda: Box::new(Plda::new(&parts, REDUCED).unwrap()),
    };
    let expected = diarizer(method).diarize(&samples, &settings, NEVER).unwrap().unwrap();
    assert!(!expected.turns.is_empty());
    assert_eq!(diarized(&pipeline, &samples), expected);
}

/// Those of `pipeline.json` were made by pyannote with the networks of segmentation-3.0 and of the formula.
#[test]
fn turns_are_pyannotes_from_the_samples_on() {
    if !golden::file("pipeline.json").exists() {
        golden::not_compared("pipeline.json", "it is not among the golden data");
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let tensors = golden::Tensors::load("pipeline_plda.safetensors");
    let plda: Tensors = tensors
        .names()
        .into_iter()
        .map(|name| (name.clone(), tensors.floats(&name)))
        .collect();
    let folder = |kind: &str| place.path().join(kind);
    pipeline_3_1(&folder("AgglomerativeClustering"), &segmentation(), &embedding(), true);
    community_1(&folder("VBxClustering"), &segmentation(), &embedding(), &plda);
    let recordings = golden::recordings();
    let cases = golden::json("pipeline.json");
    // Of each pipeline one case, as they are slow.
    let mut compared: Vec<&str> = Vec::new();
    for case in cases.as_array().unwrap() {
        let (key, kind) = (case["key"].as_str().unwrap(), case["clustering"].as_str().unwrap());
        let of_case = recordings
            .iter()
            .find(|(name, _)| case["conversation"] == name.as_str());
        let Some((_, samples)) = of_case.filter(|_| !compared.contains(&kind)) else {
            continue;
        };
        let pipeline = find(&folder(kind)).unwrap();
        let number = |name: &str| case["arguments"][name].as_u64().map(|number| number as usize);
        let settings = DiarizationSettings {
            clusters: Clusters {
                number: number("num_speakers"),
                least: number("min_speakers"),
                most: number("max_speakers"),
            },
            ..pipeline.settings()
        };
        let diarizer = pipeline.diarizer().unwrap();
        let found = diarizer.diarize(samples, &settings, NEVER).unwrap().unwrap();
        for (found, expected) in [
            (&found.turns, &case["turns"]),
            (&found.exclusive, &case["exclusive_turns"]),
        ] {
            let turn = |turn: &serde_json::Value| Turn {
                start: turn[0].as_f64().unwrap(),
                end: turn[1].as_f64().unwrap(),
                speaker: turn[2].as_str().unwrap().to_owned(),
            };
            let expected: Vec<Turn> = expected.as_array().unwrap().iter().map(turn).collect();
            let (errors, _) = errors(&expected, found, &Scoring::default()).unwrap();
            // Rounding may put a frame in a thousand on the other side of a threshold.
            assert!(errors.der() < 1e-3, "{key}: {errors:?}");
        }
        compared.push(kind);
    }
    if compared.is_empty() {
        golden::not_compared("pipeline.json", "its recordings are not in the folder");
    }
}

#[test]
fn what_is_not_known_is_refused_by_file_and_field() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    assert!(refused(folder).contains("config.yaml does not exist"));
    for name in [
        "segmentation/pytorch_model.bin",
        "embedding/pytorch_model.bin",
        "plda/plda.npz",
    ] {
        put(&folder.join(name), "");
    }
    put(&folder.join("plda/xvec_transform.npz"), "");
    let config_3_1 = config_3_1("segmentation", "embedding");
    let of = |config: &str| {
        put(&folder.join("config.yaml"), config);
        find(folder)
    };
    assert!(of(&config_3_1).is_ok() && of(CONFIG_COMMUNITY_1).is_ok());
    let cases: [(&str, &str, &str, &str); 19] = [
        (
            &config_3_1,
            "SpeakerDiarization",
            "Resegmentation",
            "`pipeline.name` is pyannote.audio.pipelines.Resegmentation",
        ),
        (
            &config_3_1,
            "AgglomerativeClustering",
            "OracleClustering",
            "`pipeline.params.clustering` is OracleClustering",
        ),
        (
            &config_3_1,
            "method: centroid",
            "method: ward",
            "`params.clustering.method` is ward",
        ),
        (&config_3_1, "0.7045654963945799", "-1", "`params.clustering.threshold`"),
        (
            &config_3_1,
            "0.7045654963945799",
            ".nan",
            "`params.clustering.threshold`",
        ),
        (
            &config_3_1,
            "size: 12",
            "size: 1.5",
            "`params.clustering.min_cluster_size`",
        ),
        (
            &config_3_1,
            "size: 12",
            "size: 12\n    Fa: 0.07",
            "`params.clustering.Fa` is not known",
        ),
        (
            &config_3_1,
            "overlap: true",
            "overlap: false",
            "`pipeline.params.embedding_exclude_overlap`",
        ),
        (
            &config_3_1,
            "embedding_exclude_overlap",
            "segmentation_step",
            "`pipeline.params.embedding_exclude_overlap`",
        ),
        (
            &config_3_1,
            "segmentation_batch_size: 32",
            "segmentation_step: 0.5",
            "`pipeline.params.segmentation_step`",
        ),
        (
            &config_3_1,
            "min_duration_off: 0.0",
            "min_duration_off: -1",
            "`params.segmentation.min_duration_off`",
        ),
        (
            &config_3_1,
            "min_duration_off: 0.0",
            "onset: 0.5",
            "`params.segmentation.onset` is not known",
        ),
        (&config_3_1, "version: 3.1.0", "freeze: {}", "`freeze` is not known"),
        (
            &config_3_1,
            "segmentation: segmentation",
            "segmentation: 5",
            "`pipeline.params.segmentation` is not text",
        ),
        (
            &config_3_1,
            "segmentation: segmentation",
            "segmentation: ../../x",
            "`pipeline.params.segmentation`",
        ),
        (
            CONFIG_COMMUNITY_1,
            "$model/plda",
            "$model/../plda",
            "`pipeline.params.plda`",
        ),
        (
            CONFIG_COMMUNITY_1,
            "    plda: $model/plda\n",
            "",
            "`pipeline.params.plda` is missing",
        ),
        (
            CONFIG_COMMUNITY_1,
            "$model/plda",
            "$model/segmentation",
            "holds no xvec_transform.npz",
        ),
        (CONFIG_COMMUNITY_1, "Fb: 0.8", "Fb: 0", "`params.clustering.Fb`"),
    ];
    for (config, from, to, said) in cases {
        assert!(config.contains(from), "{from}");
        let error = of(&config.replacen(from, to, 1)).unwrap_err().to_string();
        assert!(error.contains(said) && error.contains("config.yaml"), "{to}: {error}");
    }
    for bad in ["", "- 1", "{", "pipeline: 3", &"a".repeat(2 << 20)] {
        let error = of(bad).unwrap_err().to_string();
        assert!(error.contains("config.yaml"), "{error}");
    }
    assert!(of(&"[".repeat(100_000)).unwrap_err().to_string().contains("128 deep"));
    let no_file = Pipeline::find("hf://o/n/config.yaml", None, &mut |_| true).unwrap_err();
    assert!(no_file.to_string().contains("whole repository"));
    let meant = Pipeline::find("pyannote/speaker-diarization-3.1", None, &mut |_| true).unwrap_err();
    assert!(meant.to_string().contains("hf://pyannote/speaker-diarization-3.1"));
}

#[test]
fn files_that_are_damaged_or_of_other_networks_are_named() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    let (segmentation, embedding, plda) = (segmentation(), embedding(), plda());
    community_1(folder, &segmentation, &embedding, &plda);
    find(folder).unwrap().diarizer().unwrap();
    let wrong = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, bytes).unwrap();
        let error = find(folder).unwrap().diarizer().unwrap_err().to_string();
        std::fs::write(&path, whole).unwrap();
        assert!(error.contains(name), "{name}: {error}");
        error
    };
    let weights = "segmentation/pytorch_model.bin";
    let whole = checkpoint(&segmentation);
    for end in [0, 3, 100, whole.len() / 2, whole.len() - 1] {
        wrong(weights, &whole[..end]);
    }
    wrong(weights, b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.");
    wrong(weights, &u64::MAX.to_le_bytes());
    assert!(wrong(weights, &checkpoint(&embedding)).contains("sincnet."));
    let changed = |change: &dyn Fn(&mut Tensors)| {
        let mut tensors = segmentation.clone();
        change(&mut tensors);
        checkpoint(&tensors)
    };
    let not_finite = changed(&|tensors| tensors.get_mut("linear.0.bias").unwrap().1[5] = f32::NAN);
    assert!(wrong(weights, &not_finite).contains("linear.0.bias has values that are not finite"));
    let shape = changed(&|tensors| tensors.get_mut("linear.0.bias").unwrap().0 = vec![64, 2]);
    assert!(wrong(weights, &shape).contains("linear.0.bias"));
    // More values than the file has.
    let huge = changed(&|tensors| tensors.get_mut("linear.0.bias").unwrap().0 = vec![1 << 30]);
    assert!(wrong(weights, &huge).contains("linear.0.bias"));
    let sets = changed(&|tensors| {
        tensors.insert("classifier.weight".into(), (vec![3, 128], vec![0.0; 384]));
        tensors.insert("classifier.bias".into(), (vec![3], vec![0.0; 3]));
    });
    assert!(wrong(weights, &sets).contains("classifier.weight is"));
    let layers = changed(&|tensors| {
        for layer in 4..20 {
            let of_last = |name: &String| name.contains("_l3");
            let last: Vec<String> = tensors.keys().filter(|name| of_last(name)).cloned().collect();
            for name in last {
                let tensor = tensors[&name].clone();
                tensors.insert(name.replace("_l3", &format!("_l{layer}")), tensor);
            }
        }
    });
    assert!(wrong(weights, &layers).contains("more than 16 layers"));
    // An object where a tensor is expected.
    let mut pickle = b"\x80\x02}(X\x0a\0\0\0state_dict}(X\x01\0\0\0xcos\nsystem\n(X\x04\0\0\0truetRuu.".to_vec();
    let objects = zip(&[("archive/data.pkl".to_owned(), pickle.clone())]);
    assert!(wrong(weights, &objects).contains("not a plain tensor"));
    pickle.truncate(20);
    wrong(weights, &zip(&[("archive/data.pkl".to_owned(), pickle)]));

    assert!(wrong("embedding/pytorch_model.bin", &whole).contains("conv1"));
    let array = |name: &str, shape: &[usize], values: &[f32]| (format!("{name}.npy"), npy(shape, values));
    wrong("plda/plda.npz", b"PK");
    assert!(wrong("plda/xvec_transform.npz", &zip(&[])).contains("mean1"));
    let (tr, mu) = (&plda["tr"], &plda["mu"]);
    let parts = |psi: (String, Vec<u8>)| zip(&[array("mu", &mu.0, &mu.1), array("tr", &tr.0, &tr.1), psi]);
    assert!(wrong("plda/plda.npz", &parts(array("psi", &[64], &[1.0; 64]))).contains("psi"));
    assert!(wrong("plda/plda.npz", &parts(array("psi", &[128], &[-1.0; 128]))).contains("psi"));
    assert!(wrong("plda/plda.npz", &parts(array("psi", &[128], &[f32::INFINITY; 128]))).contains("psi"));
    let (psi, zeros) = (&plda["psi"], vec![0.0; tr.1.len()]);
    let singular = [
        ("mu", mu.1.as_slice()),
        ("tr", zeros.as_slice()),
        ("psi", psi.1.as_slice()),
    ];
    let singular = singular.map(|(name, values)| array(name, &plda[name].0, values));
    assert!(wrong("plda/plda.npz", &zip(&singular)).contains("tr is singular"));
}

/// A hub of which only the cache is used.
fn hub(cache: &Path) -> Hub {
    Hub {
        endpoint: "https://huggingface.co".into(),
        cache: cache.to_owned(),
        token: None,
        offline: true,
        timeout: Duration::from_secs(1),
    }
}

/// Puts a file of a repository into a cache.
fn cached(cache: &Path, repository: &str, file: &str, bytes: &[u8]) -> PathBuf {
    let folder = cache.join(format!("models--{}", repository.replace('/', "--")));
    put(&folder.join("refs/main"), COMMIT);
    let path = folder.join("snapshots").join(COMMIT).join(file);
    put(&path, bytes);
    path
}

#[test]
fn pipelines_of_the_hub_lie_in_its_cache() {
    let place = tempfile::tempdir().unwrap();
    let cache = place.path();
    let of = |model: &str| Pipeline::find(model, Some(hub(cache)), &mut |_| true);
    let (first, second) = (
        "pyannote/speaker-diarization-3.1",
        "pyannote/speaker-diarization-community-1",
    );
    let networks = ["pyannote/segmentation-3.0", "pyannote/wespeaker-voxceleb-resnet34-LM"];
    let config = cached(
        cache,
        first,
        "config.yaml",
        config_3_1(networks[0], networks[1]).as_bytes(),
    );
    // What the cache lacks is named.
    let error = of("hf://pyannote/speaker-diarization-3.1").unwrap_err();
    assert!(
        matches!(&error, Error::Hub { message, .. } if message.contains("pyannote/segmentation-3.0")),
        "{error:?}"
    );
    let segmentation = cached(cache, networks[0], "pytorch_model.bin", b"");
    let embedding = cached(cache, networks[1], "pytorch_model.bin", b"");
    let found = of("hf://pyannote/speaker-diarization-3.1").unwrap().unwrap();
    assert_eq!(found.files.all(), [config, segmentation.clone(), embedding.clone()]);

    // A folder may name repositories too.
    let folder = place.path().join("folder");
    put(&folder.join("config.yaml"), config_3_1(networks[0], networks[1]));
    let found = of(folder.to_str().unwrap()).unwrap().unwrap();
    assert_eq!(found.files.all(), [folder.join("config.yaml"), segmentation, embedding]);

    let mut files = vec![cached(cache, second, "config.yaml", CONFIG_COMMUNITY_1.as_bytes())];
    for file in [
        "segmentation/pytorch_model.bin",
        "embedding/pytorch_model.bin",
        "plda/xvec_transform.npz",
        "plda/plda.npz",
    ] {
        files.push(cached(cache, second, file, b""));
    }
    let found = of(&format!("hf://{second}@{COMMIT}")).unwrap().unwrap();
    assert_eq!(found.files.all(), files);
    // A repository cannot name files of this machine.
    let outside = place.path().join("folder").to_str().unwrap().to_owned();
    cached(
        cache,
        first,
        "config.yaml",
        config_3_1(&outside, networks[1]).as_bytes(),
    );
    let error = of("hf://pyannote/speaker-diarization-3.1").unwrap_err().to_string();
    assert!(error.contains("`pipeline.params.segmentation`"), "{error}");
}
