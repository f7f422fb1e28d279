//! Names of parameters in NeMo and Hugging Face, and the parameters of the bundled pipelines that correspond to them.

use flow_runtime::spec::UsualNames;

const RATE: &[&str] = &["lr", "phase1_lr", "phase2_lr"];
const BATCH: &[&str] = &["max_batch_seconds", "grad_accum"];
const STEPS: &[&str] = &["max_steps"];
const WARMUP: &[&str] = &["warmup", "warmup_steps", "phase2_warmup"];
const VALIDATE: &[&str] = &["eval_every"];
const SAVE: &[&str] = &["checkpoint_every"];
const MODEL: &[&str] = &["init", "model"];

/// The usual name of a parameter, and the last parts of the names that it has here.
pub const USUAL_NAMES: UsualNames = &[
    ("lr", RATE),
    ("learning_rate", RATE),
    ("max_lr", RATE),
    ("batch_size", BATCH),
    ("per_device_train_batch_size", BATCH),
    ("batch_duration", BATCH),
    ("gradient_accumulation_steps", &["grad_accum"]),
    ("accumulate_grad_batches", &["grad_accum"]),
    ("epochs", STEPS),
    ("num_epochs", STEPS),
    ("max_epochs", STEPS),
    ("num_train_epochs", STEPS),
    ("steps", STEPS),
    ("num_steps", STEPS),
    ("warmup", WARMUP),
    ("warmup_steps", WARMUP),
    ("num_warmup_steps", WARMUP),
    ("eval_steps", VALIDATE),
    ("val_check_interval", VALIDATE),
    ("save_steps", SAVE),
    ("every_n_train_steps", SAVE),
    ("save_total_limit", &["keep_checkpoints"]),
    ("save_top_k", &["keep_checkpoints"]),
    ("max_grad_norm", &["clip"]),
    ("gradient_clip_val", &["clip"]),
    ("ema_decay", &["average_decay"]),
    ("gpus", &["ranks", "device"]),
    ("devices", &["ranks", "device"]),
    ("num_gpus", &["ranks", "device"]),
    ("bf16", &["precision"]),
    ("allow_tf32", &["tf32"]),
    ("float32_matmul_precision", &["tf32"]),
    ("gradient_checkpointing", &["recompute"]),
    ("init_from_nemo_model", MODEL),
    ("init_from_pretrained_model", MODEL),
    ("pretrained_model", MODEL),
    ("model_name_or_path", MODEL),
    ("train_ds", &["train_manifest"]),
    ("train_file", &["train_manifest"]),
    ("validation_ds", &["val_manifest"]),
    ("validation_file", &["val_manifest"]),
    ("manifest_filepath", &["manifest", "train_manifest", "val_manifest"]),
    ("output_dir", &["checkpoints", "model_out"]),
    ("exp_dir", &["checkpoints", "model_out"]),
    ("random_seed", &["seed"]),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use flow_runtime::registry::Registry;
    use flow_runtime::spec::{self, Overrides};

    use super::*;

    #[test]
    fn every_name_leads_to_a_parameter_of_a_pipeline() {
        let registry = Registry::new(crate::kinds::all()).unwrap();
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("pipelines");
        let mut known = BTreeSet::new();
        for name in ["finetune", "new_language", "pretrain_small", "evaluate"] {
            let path = folder.join(name).with_extension("yaml");
            let pipeline = spec::load(&path, &Overrides::default(), &registry)
                .map_err(|found| found.to_string())
                .unwrap();
            let last = |name: &str| name.rsplit('.').next().unwrap_or_default().to_string();
            known.extend(pipeline.params.iter().map(|param| last(&param.name)));
        }
        let mut seen = BTreeSet::new();
        for (name, targets) in USUAL_NAMES {
            assert!(seen.insert(name), "{name} stands twice");
            assert_eq!(*name, name.to_lowercase());
            assert!(!targets.is_empty());
            for target in *targets {
                assert!(known.contains(*target), "{name}: no parameter is called {target}");
            }
        }
    }

    #[test]
    fn names_of_other_programs_are_answered_with_those_of_the_main_job() {
        let registry = Registry::new(crate::kinds::all()).unwrap();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("pipelines/finetune.yaml");
        for (set, expected) in [
            ("train.lr=1e-4", &["train.phase1_lr", "train.phase2_lr"][..]),
            ("train.learning_rate=1e-4", &["train.phase1_lr", "train.phase2_lr"]),
            ("lr=1e-4", &["train.phase1_lr", "train.phase2_lr"]),
            ("train.batch_size=16", &["train.max_batch_seconds", "train.grad_accum"]),
            ("batch_size=16", &["train.max_batch_seconds", "train.grad_accum"]),
            ("train.epochs=3", &["train.max_steps"]),
            ("train.num_epochs=3", &["train.max_steps"]),
            ("epochs=3", &["train.max_steps"]),
        ] {
            let overrides = Overrides {
                set: vec![set.to_string()],
                usual_names: USUAL_NAMES,
                ..Overrides::default()
            };
            let said = spec::load(&path, &overrides, &registry)
                .map(drop)
                .unwrap_err()
                .to_string();
            for name in expected {
                assert!(said.contains(&format!("`{name}`")), "{set}: {said}");
            }
        }
    }
}
