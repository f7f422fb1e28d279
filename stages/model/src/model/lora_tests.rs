//! LoRA: the model with thin matrices beside its weights, its gradients, and its files.

use flow_cuda_emulator::DeviceUnderTest;
use flow_kernels::testing::values;

use super::*;
use crate::checkpoint::{ADAPTER_WEIGHTS, Adapter, base_and_adapter};
use crate::config::Reduction;
use crate::testing::{golden, quiet};
use flow_nn::parameters::Gradients;
use flow_nn::parameters::ParameterId;

const ALL: [&str; 4] = [r"linear_.*", "linear[12]", "pointwise_conv[12]", "joint.(enc|pred)"];

fn config(rank: usize, alpha: f64, targets: &[&str]) -> LoraConfig {
    LoraConfig {
        rank,
        alpha,
        targets: targets.iter().map(|target| target.to_string()).collect(),
        base: "base".into(),
    }
}

fn base(dtype: DType, device: &Device) -> TdtModel {
    TdtModel::load(&golden::file("model.nemo"), dtype, device).unwrap()
}

fn batch() -> MicroBatch {
    MicroBatch {
        signals: golden::waves("train")[..2].to_vec(),
        tokens: vec![vec![3, 5, 7, 5], vec![2]],
        prompts: Vec::new(),
    }
}

/// An adapted model whose matrices B are not zero.
fn adapted(model: TdtModel, lora: LoraConfig) -> TdtModel {
    let mut model = model.with_lora(lora, Vec::new(), 3).unwrap();
    let noise = flow_kernels::Noise::new(11);
    let ids: Vec<(ParameterId, String)> = (model.parameters.iter())
        .filter(|(_, p)| p.name.ends_with(lora::B))
        .map(|(id, p)| (id, p.name.clone()))
        .collect();
    for (id, name) in ids {
        let mut noise = noise.derive(&name);
        let old = model.parameters.get(id).clone();
        let drawn: Vec<f64> = (0..old.elem_count()).map(|_| 0.05 * noise.normal()).collect();
        let drawn = Tensor::from_vec(drawn, old.dims(), &Device::Cpu).unwrap();
        let drawn = drawn.to_dtype(old.dtype()).unwrap().to_device(old.device()).unwrap();
        model.parameters.set(id, drawn).unwrap();
    }
    model
}

fn trained(model: &mut TdtModel, options: &TrainOptions) -> (MicroBatchOutput, Gradients) {
    let mut gradients = Gradients::new(&model.parameters);
    let output = model.train_micro_batch(&batch(), options, &mut gradients).unwrap();
    (output, gradients)
}

/// The adapted model, and one whose weights are the sums, all trained: the same loss, and `dA = s B^T dW`, `dB = s dW A^T`. Nothing
/// else has a gradient.
#[test]
fn gradients_are_those_of_the_merged_weights() {
    let place = tempfile::tempdir().unwrap();
    let mut model = adapted(base(DType::F64, &Device::Cpu), config(3, 5.0, &ALL));
    model.save(place.path()).unwrap();
    let mut merged = TdtModel::load(place.path(), DType::F64, &Device::Cpu).unwrap();
    for model in [&mut model, &mut merged] {
        model.set_batch_norm(BatchNorm::Frozen);
    }
    let (output, gradients) = trained(&mut model, &quiet());
    let (expected, whole) = trained(&mut merged, &quiet());
    assert!((output.loss - expected.loss).abs() < 1e-9 * expected.loss, "{output:?}");
    let scale = 5.0 / 3.0;
    let mut modules = 0;
    for (id, gradient) in gradients.iter() {
        let name = &model.parameters.parameter(id).name;
        let module = lora::module_of(name).unwrap_or_else(|| panic!("{name} has a gradient"));
        let of_merged = merged.parameters.id(&format!("{module}.weight")).unwrap();
        let d_weight = whole.get(of_merged).unwrap().flatten_from(1).unwrap();
        let matrix = |ending: &str| {
            let id = model.parameters.id(&format!("{module}{ending}")).unwrap();
            model.parameters.get(id).clone()
        };
        let product = match name.ends_with(lora::A) {
            true => matrix(lora::B).t().unwrap().matmul(&d_weight).unwrap(),
            false => d_weight.matmul(&matrix(lora::A).t().unwrap()).unwrap(),
        };
        let (found, expected) = (values(gradient), values(&(product * scale).unwrap()));
        let size = expected.iter().fold(0.0f64, |size, x| size.max(x.abs()));
        for (found, expected) in found.iter().zip(&expected) {
            assert!(
                (found - expected).abs() <= 1e-9 * size.max(1e-6),
                "{name}: {found}, {expected}"
            );
        }
        modules += 1;
    }
    // Attention 5, feed-forward 4, convolution 2 in each of two layers, and two projections: two matrices each.
    assert_eq!(modules, 2 * (2 * 11 + 2));
}

/// Gradients against finite differences of the loss in 64 bits, with dropout and recomputed layers.
#[test]
fn gradients_agree_with_finite_differences() {
    let mut model = adapted(
        base(DType::F64, &Device::Cpu),
        config(2, 4.0, &["linear_q", "linear_pos", "joint.pred"]),
    );
    model.set_batch_norm(BatchNorm::Frozen);
    model.set_recompute(true);
    let options = TrainOptions {
        seed: 9,
        ..TrainOptions::default()
    };
    let (_, gradients) = trained(&mut model, &options);
    let found: Vec<(ParameterId, Vec<f64>)> = gradients.iter().map(|(id, gradient)| (id, values(gradient))).collect();
    assert!(!found.is_empty());
    for (id, gradient) in found {
        let original = model.parameters.get(id).clone();
        let at = gradient
            .iter()
            .enumerate()
            .max_by(|a, b| a.1.abs().total_cmp(&b.1.abs()))
            .unwrap()
            .0;
        let mut loss_at = |step: f64| {
            let mut moved = values(&original);
            moved[at] += step;
            let moved = Tensor::from_vec(moved, original.dims(), &Device::Cpu).unwrap();
            model.parameters.set(id, moved).unwrap();
            trained(&mut model, &options).0.loss
        };
        let step = 1e-5;
        let slope = (loss_at(step) - loss_at(-step)) / (2.0 * step);
        model.parameters.set(id, original).unwrap();
        let name = &model.parameters.parameter(id).name;
        let difference = (slope - gradient[at]).abs();
        assert!(
            difference <= 1e-6 * gradient[at].abs().max(1e-2),
            "{name}: {slope}, {}",
            gradient[at]
        );
    }
}

/// PEFT's own gradients, on transformers' model.
#[test]
fn gradients_are_those_of_peft() {
    let expected = golden::tensors_of(&golden::file_of("adapters", "lora.safetensors"));
    let hugging_face = golden::file("hf");
    for (case, rank, alpha, targets, loss) in [
        (
            "qkvo",
            4,
            8.0,
            &["q_proj", "k_proj", "v_proj", "o_proj"][..],
            6.764787673950195,
        ),
        (
            "conv1d",
            2,
            4.0,
            &["pointwise_conv1", "pointwise_conv2"][..],
            6.4010725021362305,
        ),
    ] {
        let adapter = Adapter::open(&golden::file_of("adapters", &format!("lora_{case}"))).unwrap();
        let matrices = adapter.matrices().unwrap();
        assert!(matrices.iter().all(|(.., scale)| *scale == 2.0));
        let matrices = matrices.into_iter().map(|(name, matrix, _)| (name, matrix)).collect();
        let model = TdtModel::load(&hugging_face, DType::F32, &Device::Cpu).unwrap();
        let mut model = model.with_lora(config(rank, alpha, targets), matrices, 0).unwrap();
        model.set_batch_norm(BatchNorm::Frozen);
        // As transformers reduces: the mean over utterances of the loss for each token, without sigma.
        if let Some(transducer) = &mut model.config.transducer {
            transducer.loss.reduction = Reduction::Mean;
            transducer.loss.sigma = 0.0;
        }
        let labels: Vec<Vec<i64>> = expected["labels"].to_vec2().unwrap();
        let labels = labels.into_iter().map(|row| {
            let valid = row.into_iter().filter(|&token| token != 92);
            valid.map(|token| u32::try_from(token).unwrap()).collect()
        });
        let batch = MicroBatch {
            signals: golden::waves("train")[..2].to_vec(),
            tokens: labels.collect(),
            prompts: Vec::new(),
        };
        let mut gradients = Gradients::new(&model.parameters);
        let output = model.train_micro_batch(&batch, &quiet(), &mut gradients).unwrap();
        assert!(
            (output.loss - loss).abs() < 1e-4 * loss,
            "{case}: {}, {loss}",
            output.loss
        );
        let mut compared = 0;
        for (id, gradient) in gradients.iter() {
            let name = &model.parameters.parameter(id).name;
            let module = lora::module_of(name).unwrap();
            let half = &name[module.len()..name.len() - ".weight".len()];
            let theirs = format!(
                "{case}.grad.base_model.model.{}{half}.default.weight",
                crate::checkpoint::huggingface_module(module)
            );
            let Some(theirs) = expected.get(&theirs) else { continue };
            let (found, theirs) = (values(gradient), values(theirs));
            let difference: f64 = found.iter().zip(&theirs).map(|(a, b)| (a - b).powi(2)).sum();
            let norm: f64 = theirs.iter().map(|x| x * x).sum();
            assert!(
                difference.sqrt() <= 1e-4 * norm.sqrt(),
                "{name}: {} of {}",
                difference.sqrt(),
                norm.sqrt()
            );
            compared += 1;
        }
        assert!(compared >= 4, "{case}");
    }
}

/// A new adapter changes nothing, and files keep what was trained to the bit.
#[test]
fn an_adapter_begins_with_nothing_and_is_kept_in_files() {
    let place = tempfile::tempdir().unwrap();
    let waves = golden::waves("eval");
    let waves = [&waves[0][..]];
    let model = base(DType::F32, &Device::Cpu);
    let before = values(&model.encode(&waves).unwrap().0);
    let fresh = model.with_lora(config(4, 8.0, &ALL), Vec::new(), 1).unwrap();
    assert_eq!(values(&fresh.encode(&waves).unwrap().0), before);
    let trainable = fresh.parameters.count_trainable();

    let model = adapted(base(DType::F32, &Device::Cpu), config(4, 8.0, &ALL));
    let copy = model.replica().unwrap();
    assert_eq!(
        (copy.lora(), copy.parameters.count_trainable()),
        (model.lora(), trainable)
    );
    model.save(place.path()).unwrap();
    let (opened, adapter) = OpenModel::open_apart(place.path()).unwrap();
    let adapter = adapter.unwrap();
    assert_eq!(adapter.base.as_deref(), Some("base"));
    let yaml = ModelConfig::from_nemo_yaml(&opened.config_yaml).unwrap();
    let again = TdtModel::from_open(opened, yaml, DType::F32, DType::F32, &Device::Cpu).unwrap();
    let matrices: Vec<_> = (adapter.matrices().unwrap().into_iter())
        .map(|(name, matrix, _)| (name, matrix))
        .collect();
    let again = again.with_lora(config(4, 8.0, &ALL), matrices.clone(), 77).unwrap();
    assert_eq!(again.parameters.len(), model.parameters.len());
    for (id, parameter) in model.parameters.iter() {
        let found = again
            .parameters
            .parameter(again.parameters.id(&parameter.name).unwrap());
        assert_eq!(values(&found.tensor), values(&parameter.tensor), "{}", parameter.name);
        assert_eq!(found.trainable, model.parameters.parameter(id).trainable);
    }
    let unmerged = model.encode(&waves).unwrap().0;
    assert_eq!(values(&copy.encode(&waves).unwrap().0), values(&unmerged));
    let merged = TdtModel::load(place.path(), DType::F32, &Device::Cpu).unwrap();
    let merged = merged.encode(&waves).unwrap().0;
    assert_ne!(values(&merged), before);
    let difference = flow_kernels::testing::max_difference(&merged, &unmerged);
    assert!(difference < 1e-5 * golden::magnitude(&unmerged), "{difference}");
    // The folder is PEFT's too, for the model without the adapter.
    let path = format!("{}+{}", golden::file("model.nemo").display(), place.path().display());
    assert!(base_and_adapter(Path::new(&path)).is_some() && place.path().join(ADAPTER_WEIGHTS).exists());
    let added = TdtModel::load(Path::new(&path), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(values(&added.encode(&waves).unwrap().0), values(&merged));

    // Matrices of other modules or ranks.
    for (other, words) in [
        (config(4, 8.0, &["linear_q"]), "belongs to no target"),
        (config(5, 8.0, &ALL), "has shape [4, "),
    ] {
        let model = base(DType::F32, &Device::Cpu);
        let error = model
            .with_lora(other, matrices.clone(), 0)
            .map(drop)
            .unwrap_err()
            .to_string();
        assert!(error.contains(words), "{error}");
    }
    for target in ["joint_net.*", "dec_rnn.*", "norm_out", "nothing", "(", ""] {
        let model = base(DType::F32, &Device::Cpu);
        let error = model.with_lora(config(4, 8.0, &["linear_q", target]), Vec::new(), 0);
        let error = error.map(drop).unwrap_err().to_string();
        assert!(
            error.contains("pattern") || error.contains(&format!("`{target}`")),
            "{error}"
        );
    }
}

/// On kernels for devices: the losses and gradients of the CPU, also where the other matrices are in bf16.
#[test]
fn an_adapter_is_trained_on_a_device() {
    for stored in [DType::F32, DType::BF16] {
        let train = |device: &Device| {
            let model = base(DType::F32, device).stored_as(stored).unwrap();
            let mut model = adapted(model, config(3, 6.0, &ALL));
            model.set_batch_norm(BatchNorm::Frozen);
            let (output, gradients) = trained(&mut model, &quiet());
            let of = |(id, gradient): (ParameterId, &Tensor)| {
                (model.parameters.parameter(id).name.clone(), values(gradient))
            };
            let gradients: Vec<(String, Vec<f64>)> = gradients.iter().map(of).collect();
            (output.loss, gradients)
        };
        let (loss, expected) = train(&Device::Cpu);
        let (found_loss, found) = DeviceUnderTest::get().run(train);
        // Products of factors in bf16 have 8 bits.
        let bound = if stored == DType::F32 { 1e-4 } else { 5e-2 };
        assert!((loss - found_loss).abs() <= bound * loss, "{loss}, {found_loss}");
        assert_eq!(expected.len(), found.len());
        let norm = |values: &[f64]| values.iter().map(|x| x * x).sum::<f64>().sqrt();
        let whole = norm(
            &expected
                .iter()
                .flat_map(|(_, values)| values.clone())
                .collect::<Vec<_>>(),
        );
        for ((name, expected), (other, found)) in expected.iter().zip(&found) {
            assert_eq!(name, other);
            let difference: Vec<f64> = expected.iter().zip(found).map(|(a, b)| a - b).collect();
            let (difference, size) = (norm(&difference), norm(expected));
            assert!(
                difference <= bound * (size + 1e-2 * whole),
                "{stored:?} {name}: {difference} of {size}"
            );
        }
    }
}
