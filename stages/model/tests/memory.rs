//! The memory of the joint network and of decoding, as the allocator counts it.

use std::alloc::System;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};
use flow_kernels::Noise;
use flow_model::allocation::{Count, Counted};
use flow_model::checkpoint::{OpenModel, TensorEntry, write_adapter};
use flow_model::config::{AttentionContext, CausalConfig, ChunkContext, EncoderConfig};
use flow_model::decoding_memory::{WeightParts, batch_bytes, weight_bytes};
use flow_model::encoder::Encoder;
use flow_model::encoder::cached::stream_bytes;
use flow_model::joint::{Joint, JointSizes};
use flow_model::loss::TdtLoss;
use flow_model::model::TdtModel;
use flow_model::{Gradients, Mode, ParameterBuilder, Precision, Weights};
use flow_nn::lora::LoraConfig;

#[global_allocator]
static ALLOCATOR: Counted<System> = Counted(System);

/// What all threads allocate is counted.
static COUNTED: Mutex<()> = Mutex::new(());

/// Runs one test at a time, on a thread that has ended when the next one begins: what a thread keeps for itself is freed at its end.
fn alone(test: fn()) {
    let _alone = COUNTED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Err(panic) = std::thread::spawn(test).join() {
        std::panic::resume_unwind(panic);
    }
}

/// The joint network and its loss never hold all logits of a batch.
#[test]
fn loss_and_gradients_need_a_small_part_of_the_logits_memory() {
    alone(|| {
        let (batch, frames, tokens, vocabulary, width) = (4, 60, 100, 4096, 32);
        let mut builder = ParameterBuilder::random(DType::F32, Device::Cpu, 1);
        let sizes = JointSizes {
            encoder: width,
            prediction: width,
            hidden: width,
            vocabulary,
            durations: 5,
            dropout: 0.1,
        };
        let joint = Joint::new(&sizes, "joint", &mut builder).unwrap();
        let (parameters, _) = builder.finish();
        let encoded = Tensor::ones((batch, frames, width), DType::F32, &Device::Cpu).unwrap();
        let predicted = Tensor::ones((batch, tokens + 1, width), DType::F32, &Device::Cpu).unwrap();
        let targets: Vec<Vec<u32>> = vec![(0..tokens as u32).collect(); batch];
        let settings = TdtLoss {
            durations: vec![0, 1, 2, 3, 4],
            sigma: 0.02,
            fastemit: 0.0,
            clamp: -1.0,
            rnnt: false,
        };
        let mut gradients = Gradients::new(&parameters);
        let count = Count::begin().expect("nobody else counts");
        assert!(Count::begin().is_none(), "one at a time");
        let loss = joint
            .loss(
                &parameters,
                &settings,
                (&encoded, &[frames; 4]),
                (&predicted, &targets),
                Mode::Train(&mut Noise::new(1)),
            )
            .unwrap();
        joint
            .backward(&parameters, &settings, &loss, &[0.25; 4], false, &mut gradients)
            .unwrap();
        let most = count.most() as usize;
        // 397 MB of logits. What is kept of them has a fixed limit of 32 MiB; the rest are some chunks of 512 cells (8 MB
        // each) and some hundred bytes per cell.
        let logits = batch * frames * (tokens + 1) * (vocabulary + 6) * 4;
        assert!(most > 1 << 20, "nothing was counted");
        assert!(most * 5 < logits, "{most} bytes beside {logits} of logits");
    });
}

#[test]
fn the_memory_of_decoding_is_that_of_the_whole_model() {
    alone(|| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/small.nemo");
        for (weights, precision) in [
            (Weights::F32, Precision::F32),
            (Weights::Bf16, Precision::F32),
            (Weights::F32, Precision::Int8),
        ] {
            let open = || OpenModel::open(&path).unwrap();
            let counted = Count::begin().expect("nobody else counts");
            let model = TdtModel::load_for_decoding(&path, weights.into(), precision, &Device::Cpu).unwrap();
            let held = counted.held() as f64;
            drop(counted);
            // Beside its tensors a model has a tokenizer and tables, whatever its size.
            let predicted = weight_bytes(&open(), weights, precision) as f64;
            assert!(
                (0.0..4e6).contains(&(held - predicted)),
                "{predicted} predicted, {held} held"
            );
            // The longest windows need most in one case, the shortest ones in the other.
            for (window, batch) in [(20.0, 60.0), (2.0, 90.0)] {
                let predicted = batch_bytes(open(), weights, precision, window, batch).unwrap().unwrap();
                let of = |seconds: f64| {
                    let signal = vec![0.1; (16_000.0 * seconds) as usize];
                    let signals = vec![&signal[..]; (batch / seconds) as usize];
                    let counted = Count::begin().expect("nobody else counts");
                    model.transcribe(&signals).unwrap();
                    counted.most()
                };
                let (needed, predicted) = (of(1.0).max(of(window)) as f64, predicted as f64);
                assert!(
                    (0.95..1.1).contains(&(predicted / needed)),
                    "{weights:?}, {precision:?}, {window} s: {predicted} predicted, {needed} needed"
                );
            }
        }
    });
}

/// What is kept of a recording that comes in chunks grows to a bound, also where the context has no limit.
#[test]
fn the_memory_of_a_stream_is_bounded() {
    alone(|| {
        let contexts = [(Some(70), 0), (Some(70), 13), (None, 200)];
        let contexts = contexts.map(|(left, right)| ChunkContext {
            left,
            right: Some(right),
        });
        let config = EncoderConfig {
            feat_in: 8,
            n_layers: 1,
            d_model: 16,
            use_bias: false,
            subsampling_conv_channels: 2,
            ff_expansion_factor: 1,
            n_heads: 1,
            attention_context: AttentionContext::Chunks(contexts[0]),
            xscaling: false,
            conv_kernel_size: 5,
            causal: CausalConfig {
                subsampling: true,
                convolution: true,
                layer_norm: true,
                contexts: contexts.to_vec(),
                probabilities: Vec::new(),
            },
            dropout: 0.0,
            dropout_pre_encoder: 0.0,
            dropout_emb: 0.0,
            dropout_att: 0.0,
        };
        let mut builder = ParameterBuilder::random(DType::F32, Device::Cpu, 1);
        let encoder = Encoder::new(&config, "encoder", &mut builder).unwrap();
        let (parameters, _) = builder.finish();
        for context in contexts {
            let (of_stream, _) = stream_bytes(&config, context).unwrap();
            let plan = encoder.chunk_plan(&parameters, context).unwrap();
            let hear = |rows: usize| {
                let mut cache = encoder.cache(&parameters).unwrap();
                let mut frames = 0;
                while frames < rows {
                    let features = vec![0.1; plan.next_chunk(&cache) * config.feat_in];
                    let step = &mut [(&mut cache, &features[..])];
                    let encoded = encoder.step(&parameters, &plan, step).unwrap();
                    frames += encoded[0].dim(0).unwrap();
                }
                cache
            };
            // Positions, and buffers of threads that multiply.
            let longest = context.rows_kept() + 700;
            drop(hear(longest));
            for rows in [context.rows_kept() + 201, longest] {
                let count = Count::begin().expect("nobody else counts");
                let cache = hear(rows);
                let held = count.held() as f64;
                drop((count, cache));
                // Tensors have shapes and places beside their values.
                let predicted = of_stream as f64;
                assert!(
                    0.5 * predicted < held && held < predicted + 4e3,
                    "{context}, {rows}: {held} of {predicted}"
                );
            }
        }
    });
}

/// An adapter of two matrices of the first layer, in a folder of its own.
fn adapter(folder: &Path, model: &OpenModel, module: &str, seed: u64) {
    let shape = |name: &str| {
        let mut tensors = model.tensors.iter();
        tensors.find(|tensor| tensor.name == name).unwrap().shape().to_vec()
    };
    let mut noise = Noise::new(seed);
    let mut matrix = |rows: usize, columns: usize| {
        let values: Vec<f32> = (0..rows * columns).map(|_| 0.1 * noise.normal() as f32).collect();
        Tensor::from_vec(values, (rows, columns), &Device::Cpu).unwrap()
    };
    let parts = (1..=2).flat_map(|number| {
        let name = format!("encoder.layers.0.{module}.linear{number}");
        let shape = shape(&format!("{name}.weight"));
        [
            (format!("{name}.lora_A.weight"), matrix(4, shape[1])),
            (format!("{name}.lora_B.weight"), matrix(shape[0], 4)),
        ]
    });
    let parts: Vec<(String, Tensor)> = parts.collect();
    let lora = LoraConfig {
        rank: 4,
        alpha: 8.0,
        targets: vec!["linear[12]".into()],
        base: "base".into(),
    };
    write_adapter(
        folder,
        &lora,
        parts.iter().map(|(name, matrix)| (name.as_str(), matrix, 2)),
    )
    .unwrap();
}

/// A model and its adapters need the memory of the model and of what the adapters change, compute what they compute alone, and
/// remain when the model goes.
#[test]
fn adapters_share_the_tensors_of_their_model() {
    alone(|| {
        let place = tempfile::tempdir().unwrap();
        let base = place.path().join("base.nemo");
        let small = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/models/small.nemo");
        std::fs::copy(small, &base).unwrap();
        let opened = OpenModel::open(&base).unwrap();
        let with = |name: &str| PathBuf::from(format!("{}+{}", base.display(), place.path().join(name).display()));
        adapter(&place.path().join("a"), &opened, "feed_forward1", 1);
        adapter(&place.path().join("b"), &opened, "feed_forward2", 2);
        let mut noise = Noise::new(3);
        let signal: Vec<f32> = (0..32_000).map(|_| 0.1 * noise.normal() as f32).collect();
        let frames = |model: &TdtModel| -> Vec<f32> {
            let (frames, _) = model.encode(&[&signal[..]]).unwrap();
            frames.flatten_all().unwrap().to_vec1().unwrap()
        };
        let paths = [base.clone(), with("a"), with("b")];
        for (weights, precision) in [
            (Weights::F32, Precision::F32),
            (Weights::Bf16, Precision::F32),
            (Weights::F32, Precision::Int8),
        ] {
            let load =
                |path: &Path| TdtModel::load_for_decoding(path, weights.into(), precision, &Device::Cpu).unwrap();
            let counted = || Count::begin().expect("nobody else counts");
            // Buffers of threads that multiply, once.
            drop(load(&paths[1]));
            let mut held = Vec::new();
            let mut models = Vec::new();
            for path in &paths {
                let count = counted();
                models.push(load(path));
                held.push(count.held());
            }
            let parts: Vec<WeightParts> = (paths.iter())
                .map(|path| WeightParts::of(&OpenModel::open(path).unwrap(), weights, precision))
                .collect();
            let whole = parts[0].bytes() as i64;
            assert_eq!(whole as u64, weight_bytes(&opened, weights, precision));
            for (number, more) in held.iter().enumerate().skip(1) {
                let changed = WeightParts::together([&parts[0], &parts[number]].into_iter()) as i64 - whole;
                assert!(0 < changed && changed < whole / 5, "{changed} of {whole}");
                // Of what the model needs, an adapter needs all but the tensors that it does not change.
                let less = held[0] - more;
                assert!(
                    less >= whole - changed - whole / 50,
                    "{weights:?}: {less} less, {changed} of {whole} changed"
                );
            }
            let together: Vec<Vec<f32>> = models.iter().map(frames).collect();
            assert!(together[0] != together[1] && together[1] != together[2]);
            // Gone with the last model that has them.
            let last = models.pop().unwrap();
            drop(models);
            assert_eq!(frames(&last), together[2]);
            drop(last);
            for (path, expected) in paths.iter().zip(&together) {
                let count = counted();
                let alone = load(path);
                assert!(count.held() >= whole, "tensors were left");
                drop(count);
                assert_eq!(frames(&alone), *expected);
            }
            if (weights, precision) == (Weights::F32, Precision::F32) {
                let merged = TdtModel::load(&paths[1], DType::F32, &Device::Cpu).unwrap();
                assert_eq!(frames(&merged), together[1]);
            }
        }
        // Another file of the same name is not taken for the first one.
        let (weights, precision) = (Weights::F32.into(), Precision::F32);
        let before = TdtModel::load_for_decoding(&base, weights, precision, &Device::Cpu).unwrap();
        opened_with_zeros(&opened)
            .write(&base, opened.format, None, true)
            .unwrap();
        let after = TdtModel::load_for_decoding(&base, weights, precision, &Device::Cpu).unwrap();
        assert_ne!(frames(&before), frames(&after));
    });
}

/// The model with the weights of a norm set to 0.
fn opened_with_zeros(opened: &OpenModel) -> OpenModel {
    let mut changed = opened.clone();
    let tensors = &mut changed.tensors;
    let tensor = tensors
        .iter_mut()
        .find(|tensor| tensor.name == "encoder.layers.0.norm_out.weight");
    let tensor = tensor.unwrap();
    let zeros = Tensor::zeros(tensor.shape(), DType::F32, &Device::Cpu).unwrap();
    *tensor = TensorEntry::in_memory(tensor.name.clone(), zeros);
    changed
}
