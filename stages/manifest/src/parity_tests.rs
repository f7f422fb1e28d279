//! The shipped pipeline, stage by stage through the harness, against the reference's manifests. The results of
//! `audio.probe` are taken from the reference's decisions here; the pipeline with audio is tested end to end.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Int32Array, Int64Array, RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, Field, Float64Type, Schema, SchemaRef};
use flow_corpus::columns::MANIFEST_COLUMNS;
use flow_corpus::names::{strip_dot_slash, unsafe_name};
use flow_corpus::partitions::partition_order;
use flow_kind::event::Event;
use flow_kind::registry::{Registry, kind};
use flow_kind::{Artifact, Digest, Kind, Partition, ROW, Reject};
use flow_runtime::harness::{Harness, Output};
use flow_spec::{Overrides, Pipeline, load, yaml};
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

use crate::dedup::Dedup;
use crate::pieces::Standing;
use crate::recipe::Recipe;
use crate::scan::Scan;
use crate::split::Split;
use crate::sql::Sql;
use crate::write::Write;
use crate::write_settings::WriteSettings;

fn repository(path: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join(path)
}

fn root(variable: &str, default: &str) -> PathBuf {
    std::env::var_os(variable).map_or_else(|| repository(default), PathBuf::from)
}

fn shards(corpus: &str) -> PathBuf {
    root("FLOW_TEST_CORPUS", "tests/data/corpus")
        .join(corpus)
        .join("shards")
}

fn golden(corpus: &str, file: &str) -> PathBuf {
    root("FLOW_TEST_GOLDEN", "tests/data/golden/data")
        .join(corpus)
        .join(file)
}

fn read(path: &Path) -> Vec<RecordBatch> {
    let file = std::fs::File::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    ParquetRecordBatchReaderBuilder::try_new(file)
        .unwrap()
        .build()
        .unwrap()
        .map(Result::unwrap)
        .collect()
}

/// One row of a manifest, `duration` by its bits.
fn manifest_rows(batches: &[RecordBatch]) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    for batch in batches {
        let text = |name: &str, row| {
            let column = batch.column_by_name(name).unwrap();
            assert!(column.is_valid(row), "{name} is null");
            match name {
                "duration" => format!("{:?}", column.as_primitive::<Float64Type>().value(row)),
                _ => column.as_string::<i32>().value(row).to_string(),
            }
        };
        rows.extend((0..batch.num_rows()).map(|row| MANIFEST_COLUMNS.map(|name| text(name, row)).to_vec()));
    }
    rows
}

type PortRows = (SchemaRef, BTreeMap<Partition, Vec<RecordBatch>>);

struct Stages {
    pipeline: Pipeline,
    /// By stage and port.
    ports: HashMap<(String, String), PortRows>,
    rejects: Vec<(String, Partition, Reject)>,
    events: Vec<Event>,
}

impl Stages {
    fn new(corpus: &str, settings: &[(&str, &str)]) -> Stages {
        let mut overrides = Overrides::default();
        let shards = shards(corpus).display().to_string();
        overrides.set.push(format!("shards={shards}"));
        overrides
            .set
            .extend(settings.iter().map(|(name, value)| format!("{name}={value}")));
        // Those whose texts are SQL; the others are read by name below.
        let registry = Registry::new(vec![kind::<Sql>()]).unwrap();
        let path = repository("pipelines/build_manifest_v2.yaml");
        let pipeline = load(&path, &overrides, &registry).unwrap_or_else(|e| panic!("{e:?}"));
        Stages {
            pipeline,
            ports: HashMap::new(),
            rejects: Vec::new(),
            events: Vec::new(),
        }
    }

    fn run<K: Kind>(&mut self, name: &str) {
        let stage = self.pipeline.stages.iter().find(|stage| stage.name == name).unwrap();
        assert_eq!(stage.uses, K::NAME);
        let mut harness = Harness::<K>::new(
            yaml::typed::<K::Settings>(&stage.with).unwrap_or_else(|e| panic!("{name}: {}", e.message)),
        )
        .id_column("segment_id");
        for edge in &stage.from {
            // The pipeline is not checked, and nothing ran of stages that are switched off.
            let made = edge.choices().find_map(|choice| {
                let port = choice.port.clone().unwrap_or_else(|| "rows".into());
                self.ports.get(&(choice.stage.clone(), port))
            });
            let (schema, partitions) = made.unwrap_or_else(|| panic!("{name}: nothing is in {}", edge.input));
            harness = harness.input(&edge.input, Arc::clone(schema));
            for (partition, batches) in partitions {
                harness = harness.empty_partition(&edge.input, partition.as_str());
                for batch in batches {
                    harness = harness.feed(&edge.input, partition.as_str(), batch.clone());
                }
            }
        }
        for (stage, partition, reject) in &self.rejects {
            harness = harness.rejected(stage, partition.as_str(), reject.clone());
        }
        let output = harness.run().unwrap_or_else(|e| panic!("{name}: {e:?}"));
        self.keep(name, &output);
    }

    fn keep(&mut self, name: &str, output: &Output) {
        for port in &output.shape.outputs {
            let of = |partition: &Partition| {
                (
                    partition.clone(),
                    output.batches(&port.name, partition.as_str()).to_vec(),
                )
            };
            let partitions = output.partitions.iter().map(of).collect();
            self.ports
                .insert((name.into(), port.name.clone()), (Arc::clone(&port.schema), partitions));
        }
        self.rejects.extend(
            output
                .rejects()
                .iter()
                .map(|(partition, reject)| (name.to_string(), partition.clone(), reject.clone())),
        );
        self.events.extend(output.events.iter().cloned());
    }

    /// All rows of a port in the order of the manifest.
    fn rows(&self, stage: &str, port: &str) -> Vec<RecordBatch> {
        let (_, partitions) = &self.ports[&(stage.to_string(), port.to_string())];
        let mut names: Vec<&Partition> = partitions.keys().collect();
        names.sort_by(|a, b| partition_order(a, b));
        names.into_iter().flat_map(|name| partitions[name].clone()).collect()
    }

    /// What `audio.probe` would give, from the reference.
    fn probe(&mut self, corpus: &str) {
        // Packed here, plain in a folder that the environment names.
        let extracted = match std::fs::read(golden(corpus, "extracted.jsonl.zst")) {
            Ok(packed) => String::from_utf8(zstd::decode_all(packed.as_slice()).unwrap()).unwrap(),
            Err(_) => std::fs::read_to_string(golden(corpus, "extracted.jsonl")).unwrap(),
        };
        let measured: HashMap<String, (i64, i64)> = extracted
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
            .map(|row| {
                (
                    row["path"].as_str().unwrap().to_string(),
                    (row["frames"].as_i64().unwrap(), row["sample_rate"].as_i64().unwrap()),
                )
            })
            .collect();
        let folders: HashMap<String, String> = self.ports[&("scan".to_string(), "rows".to_string())]
            .1
            .keys()
            .map(|partition| {
                (
                    partition.as_str().split_once('/').unwrap().1.to_string(),
                    partition.to_string(),
                )
            })
            .collect();
        type Member = (String, Option<(i64, i64)>, Option<String>);
        let mut members: BTreeMap<String, BTreeMap<String, Member>> =
            folders.values().map(|name| (name.clone(), BTreeMap::new())).collect();
        let mut missing = std::collections::BTreeSet::new();
        for batch in read(&golden(corpus, "decisions.parquet")) {
            let text = |name: &str, row: usize| {
                let column = batch.column_by_name(name).unwrap().as_string::<i32>();
                column.is_valid(row).then(|| column.value(row).to_string())
            };
            for row in 0..batch.num_rows() {
                let (stage, reason) = (text("stage", row).unwrap(), text("reason", row).unwrap());
                let Some(name) = text("tar_member_name", row).filter(|name| stage != "v1" && !unsafe_name(name)) else {
                    continue;
                };
                let folder = &folders[&text("shard_id", row).unwrap()];
                let name = strip_dot_slash(&name).to_string();
                let status = match (stage.as_str(), reason.as_str()) {
                    ("audio", "missing_tar") => {
                        missing.insert(folder.clone());
                        continue;
                    }
                    ("audio", "missing_member") => continue,
                    ("audio", "actual_duration_out_of_range") | ("dedup" | "", _) => "ok",
                    (_, broken) => broken,
                };
                let facts = measured.get(&format!("shards/{folder}/{name}")).copied();
                assert_eq!(facts.is_some(), status == "ok", "{folder}/{name}");
                members
                    .get_mut(folder)
                    .unwrap()
                    .insert(name, (status.into(), facts, text("audio_hash", row)));
            }
        }
        let members_schema = Arc::new(Schema::new(vec![
            Field::new(ROW, DataType::UInt32, false),
            Field::new("name", DataType::Utf8, false),
            Field::new("status", DataType::Utf8, false),
            Field::new("sample_rate", DataType::Int32, true),
            Field::new("frames", DataType::Int64, true),
            Field::new("audio_hash", DataType::Utf8, true),
            Field::new("detail", DataType::Utf8, false),
        ]));
        let tars_schema = Arc::new(Schema::new(vec![
            Field::new(ROW, DataType::UInt32, false),
            Field::new("status", DataType::Utf8, false),
        ]));
        let (mut of_members, mut of_tars) = (BTreeMap::new(), BTreeMap::new());
        for (folder, members) in members {
            let count = members.len() as u32;
            let columns: Vec<ArrayRef> = vec![
                Arc::new(UInt32Array::from_iter_values(0..count)),
                Arc::new(StringArray::from_iter_values(members.keys())),
                Arc::new(StringArray::from_iter_values(members.values().map(|m| &m.0))),
                Arc::new(
                    members
                        .values()
                        .map(|m| m.1.map(|(_, rate)| rate as i32))
                        .collect::<Int32Array>(),
                ),
                Arc::new(
                    members
                        .values()
                        .map(|m| m.1.map(|(frames, _)| frames))
                        .collect::<Int64Array>(),
                ),
                Arc::new(members.values().map(|m| m.2.clone()).collect::<StringArray>()),
                Arc::new(StringArray::from_iter_values(members.values().map(|_| ""))),
            ];
            let status = if missing.contains(&folder) { "missing_tar" } else { "ok" };
            let tar: Vec<ArrayRef> = vec![
                Arc::new(UInt32Array::from(vec![0])),
                Arc::new(StringArray::from(vec![status])),
            ];
            let partition = Partition::from(folder);
            of_members.insert(
                partition.clone(),
                vec![RecordBatch::try_new(Arc::clone(&members_schema) as SchemaRef, columns).unwrap()],
            );
            of_tars.insert(
                partition,
                vec![RecordBatch::try_new(Arc::clone(&tars_schema) as SchemaRef, tar).unwrap()],
            );
        }
        self.ports
            .insert(("probe".into(), "members".into()), (members_schema, of_members));
        self.ports
            .insert(("probe".into(), "tars".into()), (tars_schema, of_tars));
    }

    fn run_all(corpus: &str, settings: &[(&str, &str)]) -> Stages {
        let mut stages = Stages::new(corpus, settings);
        stages.run::<Scan>("scan");
        for name in ["cleaned", "v1", "master", "corrected"] {
            stages.run::<Sql>(name);
        }
        stages.probe(corpus);
        stages.run::<Sql>("checked");
        stages.run::<Dedup>("unique");
        stages.run::<Split>("split");
        stages
    }

    #[track_caller]
    fn assert_manifest(&self, stage: &str, port: &str, corpus: &str, file: &str) {
        let mut reference = manifest_rows(&read(&golden(corpus, file)));
        for row in &mut reference {
            row[6] = row[6].strip_prefix("shards/").unwrap().to_string();
        }
        let ours = manifest_rows(&self.rows(stage, port));
        for (position, (our, their)) in ours.iter().zip(&reference).enumerate() {
            assert_eq!(our, their, "{corpus}: row {position} of {stage}.{port}");
        }
        assert_eq!(ours.len(), reference.len(), "{corpus}: rows of {stage}.{port}");
    }
}

#[test]
fn every_manifest_is_the_references() {
    for corpus in ["micro", "mini"] {
        let mut stages = Stages::run_all(corpus, &[]);
        stages.assert_manifest("master", "rows", corpus, "manifest_v1.parquet");
        stages.assert_manifest("unique", "rows", corpus, "manifest_v2.parquet");
        stages.assert_manifest("split", "train", corpus, "train_manifest_v2.parquet");
        stages.assert_manifest("split", "val", corpus, "val_manifest_v2.parquet");
        // The pipeline has no stage that gives text and corrected language before the audio is looked at.
        let query = "SELECT *, tagged_text(clean, lang) AS text FROM corrected";
        let (schema, partitions) = stages.ports[&("corrected".to_string(), "rows".to_string())].clone();
        let mut harness = Harness::<Sql>::from_yaml(&format!("query: {query}"))
            .unwrap()
            .input("corrected", schema);
        for (partition, batches) in &partitions {
            for batch in batches {
                harness = harness.feed("corrected", partition.as_str(), batch.clone());
            }
        }
        stages.keep("v1_lang", &harness.run().unwrap());
        stages.assert_manifest("v1_lang", "rows", corpus, "manifest_v1_lang.parquet");
    }
}

#[test]
fn the_split_by_recording_is_the_references() {
    for corpus in ["micro", "mini"] {
        let stages = Stages::run_all(corpus, &[("split_by", "recording")]);
        stages.assert_manifest("split", "train", corpus, "train_manifest_v2_by_recording.parquet");
        stages.assert_manifest("split", "val", corpus, "val_manifest_v2_by_recording.parquet");
    }
}

/// Every row of the reference's decisions has the same fate here, with the same reason; every shard that it
/// put in quarantine is refused with the same reason.
#[test]
fn every_row_has_the_fate_that_the_reference_decided() {
    for corpus in ["micro", "mini"] {
        let stages = Stages::run_all(corpus, &[]);
        let mut theirs: BTreeMap<(String, Option<String>, String), usize> = BTreeMap::new();
        for batch in read(&golden(corpus, "decisions.parquet")) {
            let text = |name: &str, row: usize| {
                let column = batch.column_by_name(name).unwrap().as_string::<i32>();
                column.is_valid(row).then(|| column.value(row).to_string())
            };
            for row in 0..batch.num_rows() {
                let reason = text("reason", row).unwrap();
                if !reason.is_empty() {
                    *theirs
                        .entry((text("shard_id", row).unwrap(), text("segment_id", row), reason))
                        .or_default() += 1;
                }
            }
        }
        let report: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(golden(corpus, "report.json")).unwrap()).unwrap();
        let quarantined: BTreeMap<String, String> = report["shards"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|shard| shard["status"] == "quarantined")
            .map(|shard| {
                (
                    shard["shard_id"].as_str().unwrap().into(),
                    shard["reason"].as_str().unwrap().into(),
                )
            })
            .collect();
        let (mut ours, mut refused) = (BTreeMap::new(), BTreeMap::new());
        for (_, partition, reject) in &stages.rejects {
            let shard = partition.as_str().split_once('/').unwrap().1.to_string();
            match reject.row {
                Some(_) => {
                    *ours
                        .entry((shard, reject.id.clone(), reject.reason.clone()))
                        .or_default() += 1
                }
                None => assert!(refused.insert(shard, reject.reason.clone()).is_none()),
            }
        }
        assert_eq!(ours, theirs, "{corpus}");
        assert_eq!(refused, quarantined, "{corpus}");

        let mut lone: Vec<String> = Vec::new();
        for event in &stages.events {
            if let Event::StageFigures { figures, .. } = event
                && let Some(ids) = figures.get("for_example")
            {
                lone.extend(
                    ids.as_array()
                        .unwrap()
                        .iter()
                        .map(|id| id.as_str().unwrap().to_string()),
                );
            }
        }
        let mut reference: Vec<String> = report["shards"]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|shard| shard["index_without_metadata"].as_array().cloned().unwrap_or_default())
            .map(|id| id.as_str().unwrap().to_string())
            .filter(|id| id != "None") // An index row without an id: pandas names it so.
            .collect();
        lone.sort();
        reference.sort();
        assert_eq!(lone, reference, "{corpus}: index rows without metadata");
    }
}

#[test]
fn exported_files_hold_the_rows_and_do_not_depend_on_batches() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out");
    let mut stages = Stages::run_all("micro", &[("out", out.to_str().unwrap())]);
    let written = |stages: &mut Stages| {
        let rejects = stages.rejects.clone();
        stages.run::<Write>("write");
        stages.rejects = rejects;
        [
            "master_manifest.parquet",
            "train_manifest_v2.parquet",
            "val_manifest_v2.parquet",
            "rejects.parquet",
        ]
        .map(|file| std::fs::read(out.join(file)).unwrap())
    };
    let whole = written(&mut stages);
    for (file, reference) in [
        ("master_manifest.parquet", "manifest_v1.parquet"),
        ("train_manifest_v2.parquet", "train_manifest_v2.parquet"),
    ] {
        let ours = read(&out.join(file));
        let theirs = read(&golden("micro", reference));
        assert_eq!(ours[0].schema().fields(), theirs[0].schema().fields());
        let prefix = format!("{}/", shards("micro").display());
        let theirs: Vec<Vec<String>> = manifest_rows(&theirs)
            .into_iter()
            .map(|mut row| {
                row[6] = row[6].replacen("shards/", &prefix, 1);
                row
            })
            .collect();
        assert_eq!(manifest_rows(&ours), theirs, "{file}");
    }
    let rejects: usize = read(&out.join("rejects.parquet"))
        .iter()
        .map(RecordBatch::num_rows)
        .sum();
    assert_eq!(rejects, stages.rejects.len());
    // The same rows in batches of one.
    for (_, partitions) in stages.ports.values_mut() {
        for batches in partitions.values_mut() {
            *batches = batches
                .iter()
                .flat_map(|batch| (0..batch.num_rows()).map(|row| batch.slice(row, 1)))
                .collect();
        }
    }
    assert!(written(&mut stages) == whole);
}

/// A threshold at its very edge, as a whole number and in another spelling, is the same threshold.
#[test]
fn parameters_are_values() {
    let rejects = |settings: &[(&str, &str)]| {
        let mut stages = Stages::new("micro", settings);
        stages.run::<Scan>("scan");
        stages.run::<Sql>("cleaned");
        stages.rejects.len()
    };
    assert_eq!(rejects(&[("min_duration", "1")]), rejects(&[]));
    assert!(rejects(&[("min_quality", "0.8")]) > rejects(&[]));
}

/// A change of a kind's output requires a new VERSION, or older stored results would be reused. Another encoding of the
/// same rows, or another parquet library, changes these digests too; that alone needs no new version, since older
/// results hold the same rows.
#[test]
fn the_same_version_gives_the_same_bytes() {
    if std::env::var_os("FLOW_TEST_CORPUS").is_some() {
        return; // The digests are those of the bundled corpus.
    }
    let stages = Stages::run_all("micro", &[]);
    let digest = |stage: &str, port: &str| {
        let (schema, partitions) = stages.ports[&(stage.to_string(), port.to_string())].clone();
        let rows = Artifact::in_memory(schema, partitions.into_iter().collect())
            .unwrap()
            .digest()
            .short();
        let rejects = stages
            .rejects
            .iter()
            .filter(|(of, ..)| of == stage)
            .map(|(_, partition, reject)| format!("{partition} {reject:?}").replace(" id: ", " segment_id: "));
        format!("{rows} {}", Digest::of_parts(rejects).short())
    };
    let found = [
        (Scan::NAME, Scan::VERSION, digest("scan", "rows")),
        (Sql::NAME, Sql::VERSION, digest("checked", "rows")),
        (Dedup::NAME, Dedup::VERSION, digest("unique", "rows")),
        (Split::NAME, Split::VERSION, digest("split", "val")),
    ];
    let known = [
        ("manifest.scan", 1, "1bcd43552fe79ced 18872e68012d31af"),
        ("sql", 3, "ce8ce5e423425d70 b25c3dca3e3ed271"),
        ("manifest.dedup", 3, "ee7528952700d31a 10efbef343fc865c"),
        ("manifest.split", 3, "8c0ad99eff806b27 af1349b9f5f9a1a6"),
    ];
    assert_eq!(
        found
            .each_ref()
            .map(|(name, version, digest)| (*name, *version, digest.as_str())),
        known
    );
}

/// The same for the files that `manifest.write` makes.
#[test]
fn the_same_version_writes_the_same_files() {
    if std::env::var_os("FLOW_TEST_CORPUS").is_some() {
        return; // The digests are those of the bundled corpus.
    }
    let stages = Stages::run_all("micro", &[]);
    let (schema, partitions) = stages.ports[&("split".to_string(), "train".to_string())].clone();
    let train = Artifact::in_memory(schema, partitions.into_iter().collect()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (parquet, lines) = (folder.path().join("train.parquet"), folder.path().join("train.jsonl"));
    let settings = serde_json::json!({"out": "manifests", "shards": "shards", "jsonl": true, "audio": "audio"});
    let settings: WriteSettings = serde_json::from_value(settings).unwrap();
    let extracted = crate::extracted::Extracted::new(&settings.audio, &settings.out);
    let (recipe, none) = (Recipe::of::<Write>(&settings).unwrap(), Standing::default());
    let create = |path| std::fs::File::create(path).unwrap();
    crate::write::write_manifest(&train, &extracted, &recipe, &none, &parquet, create(&parquet)).unwrap();
    crate::write_lines::write_lines(&train, &extracted, &recipe, &none, &lines, create(&lines)).unwrap();
    let digest = |path| Digest::of(&std::fs::read(path).unwrap()).short().to_string();
    assert_eq!(
        (Write::VERSION, digest(&parquet).as_str(), digest(&lines).as_str()),
        (9, "671f226b10960b3b", "b3c7320c374c9109")
    );
}

#[test]
fn all_kinds_are_documented_and_refuse_unknown_settings() {
    let kinds = vec![
        kind::<Scan>(),
        kind::<Sql>(),
        kind::<Dedup>(),
        kind::<Split>(),
        kind::<Write>(),
    ];
    assert_eq!(Registry::new(kinds).unwrap().faults(), Vec::<String>::new());
}
