//! Names of parameters in NeMo and Hugging Face, and the parameters of the bundled pipelines that correspond to them.

use flow_runtime::spec::UsualNames;

const RATE: &[&str] = &["phase1_lr", "phase2_lr"];
const BATCH: &[&str] = &["max_batch_seconds", "grad_accum"];
const STEPS: &[&str] = &["max_steps"];
const WARMUP: &[&str] = &["warmup_steps", "phase2_warmup"];
const VALIDATE: &[&str] = &["eval_every"];
const SAVE: &[&str] = &["checkpoint_every"];
const VALIDATION: &[&str] = &["val_percent", "val_per_language"];
const TRAIN_DATA: &[&str] = &["train_manifest", "shards"];
const MODEL: &[&str] = &["init", "model"];

const ADAPTERS: &str =
    "`lora` is a map such as {rank: 16, alpha: 32, targets: [linear_q, linear_v]} (docs/training.md)";
const AUGMENT: &str = "`augment` is a list of steps such as {mix: {path: NOISE}} (docs/training.md)";
const FIGURES: &str =
    "each step's figures go to metrics.jsonl and to TensorBoard's event files, in the folder of the checkpoints";
const STOP: &str = "`early_stopping` is a map such as {patience: 10, min_delta: 0.001} (docs/training.md)";
const RESUMED: &str = "the next run goes on from the last checkpoint by itself";
const THREADS: &str = "`flow run --workers` sets how many threads work";
const ANY_RATE: &str = "recordings of any sample rate are taken";

/// What parameters of other programs are called here.
pub const USUAL_NAMES: UsualNames = UsualNames { same: SAME, near: NEAR };

/// The usual name of a parameter, and the last parts of the names that it has here.
const SAME: &[(&str, &[&str])] = &[
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
    ("scheduler", &["schedule"]),
    ("sched", &["schedule"]),
    ("lr_scheduler", &["schedule"]),
    ("lr_scheduler_type", &["schedule"]),
    ("optim", &["optimizer"]),
    ("wd", &["weight_decay"]),
    ("eval_steps", VALIDATE),
    ("val_check_interval", VALIDATE),
    ("save_steps", SAVE),
    ("every_n_train_steps", SAVE),
    ("save_total_limit", &["keep_checkpoints"]),
    ("save_top_k", &["keep_best"]),
    ("metric_for_best_model", &["monitor"]),
    ("load_best_model_at_end", &["model_from"]),
    ("max_grad_norm", &["clip"]),
    ("gradient_clip_val", &["clip"]),
    ("grad_clip", &["clip"]),
    ("ema", &["average_decay"]),
    ("ema_decay", &["average_decay"]),
    ("gpus", &["ranks", "device"]),
    ("devices", &["ranks", "device"]),
    ("num_gpus", &["ranks", "device"]),
    ("num_nodes", &["ranks"]),
    ("world_size", &["ranks"]),
    ("nproc_per_node", &["ranks"]),
    ("bf16", &["precision"]),
    ("fp16", &["precision"]),
    ("amp", &["precision"]),
    ("mixed_precision", &["precision"]),
    ("dtype", &["precision"]),
    ("torch_dtype", &["precision"]),
    ("allow_tf32", &["tf32"]),
    ("float32_matmul_precision", &["tf32"]),
    ("gradient_checkpointing", &["recompute"]),
    ("activation_checkpointing", &["recompute"]),
    ("freeze_encoder", &["unfreeze_step"]),
    ("freeze_feature_encoder", &["unfreeze_step"]),
    ("freeze_steps", &["unfreeze_step"]),
    ("specaugment", &["spec_augment"]),
    ("specaug", &["spec_augment"]),
    ("freq_masks", &["frequency_masks"]),
    ("freq_width", &["frequency_width"]),
    ("speed", &["speeds"]),
    ("speed_perturb", &["speeds"]),
    ("speed_perturbation", &["speeds"]),
    ("init_from_nemo_model", MODEL),
    ("init_from_pretrained_model", MODEL),
    ("pretrained_model", MODEL),
    ("model_name_or_path", MODEL),
    ("model_path", MODEL),
    ("base_model", MODEL),
    ("restore_from", MODEL),
    ("checkpoint", MODEL),
    ("ckpt", MODEL),
    ("ckpt_path", MODEL),
    ("dataset", TRAIN_DATA),
    ("data", TRAIN_DATA),
    ("data_dir", TRAIN_DATA),
    ("train_data", TRAIN_DATA),
    ("train_ds", &["train_manifest"]),
    ("train_file", &["train_manifest"]),
    ("validation_ds", &["val_manifest"]),
    ("validation_file", &["val_manifest"]),
    ("eval_dataset", &["val_manifest"]),
    ("dev_manifest", &["val_manifest"]),
    ("manifest_filepath", &["manifest", "train_manifest", "val_manifest"]),
    ("val_split", VALIDATION),
    ("validation_split", VALIDATION),
    ("test_size", VALIDATION),
    ("language", &["lang"]),
    ("max_length", &["max_tokens"]),
    ("max_label_length", &["max_tokens"]),
    ("max_duration_in_seconds", &["max_duration"]),
    ("min_duration_in_seconds", &["min_duration"]),
    ("vocabulary_size", &["vocab_size"]),
    ("output_dir", &["checkpoints", "model_out"]),
    ("exp_dir", &["checkpoints", "model_out"]),
    ("random_seed", &["seed"]),
    ("token", &["hub_token"]),
    ("hf_token", &["hub_token"]),
    // Former names in pretrain_small.yaml and new_language.yaml.
    ("tokenizer", &["tokenizer_out"]),
    ("beam_size", &["beam"]),
    ("num_beams", &["beam"]),
    ("kenlm_model", &["lm"]),
    ("hotwords", &["boost"]),
    ("lowercase", &["normalize"]),
];

/// The usual name of a parameter that has none here, why, and the last parts of the names of what comes nearest.
const NEAR: &[(&str, &str, &[&str])] = &[
    ("patience", STOP, &["early_stopping"]),
    ("min_delta", STOP, &["early_stopping"]),
    ("early_stopping", STOP, &["early_stopping"]),
    ("early_stopping_patience", STOP, &["early_stopping"]),
    ("early_stopping_threshold", STOP, &["early_stopping"]),
    ("create_early_stopping_callback", STOP, &["early_stopping"]),
    ("lora", ADAPTERS, &["lora"]),
    ("lora_r", ADAPTERS, &["lora"]),
    ("lora_rank", ADAPTERS, &["lora"]),
    ("lora_alpha", ADAPTERS, &["lora"]),
    ("peft", ADAPTERS, &["lora"]),
    ("adapter", ADAPTERS, &["lora"]),
    ("adapters", ADAPTERS, &["lora"]),
    ("noise", AUGMENT, &["augment", "speeds"]),
    ("noise_manifest", AUGMENT, &["augment", "speeds"]),
    ("noise_prob", AUGMENT, &["augment", "speeds"]),
    ("snr", AUGMENT, &["augment", "speeds"]),
    ("musan", AUGMENT, &["augment", "speeds"]),
    ("rir", AUGMENT, &["augment", "speeds"]),
    ("augmentor", AUGMENT, &["augment", "speeds"]),
    ("augmentation", AUGMENT, &["augment", "speeds"]),
    ("wandb", FIGURES, &["checkpoints"]),
    ("wandb_project", FIGURES, &["checkpoints"]),
    ("create_wandb_logger", FIGURES, &["checkpoints"]),
    ("mlflow", FIGURES, &["checkpoints"]),
    ("report_to", FIGURES, &["checkpoints"]),
    ("logger", FIGURES, &["checkpoints"]),
    ("logging_dir", FIGURES, &["checkpoints"]),
    ("logging_steps", FIGURES, &["checkpoints"]),
    ("log_every_n_steps", FIGURES, &["checkpoints"]),
    ("tensorboard", FIGURES, &["checkpoints"]),
    ("create_tensorboard_logger", FIGURES, &["checkpoints"]),
    ("resume", RESUMED, &["on_change", "checkpoints"]),
    ("resume_if_exists", RESUMED, &["on_change", "checkpoints"]),
    ("resume_from_checkpoint", RESUMED, &["on_change", "checkpoints"]),
    (
        "deepspeed",
        "ranks share the state of the optimizer",
        &["ranks", "offload"],
    ),
    ("fsdp", "ranks share the state of the optimizer", &["ranks", "offload"]),
    (
        "strategy",
        "ranks share the state of the optimizer",
        &["ranks", "offload"],
    ),
    ("num_workers", THREADS, &[]),
    ("dataloader_num_workers", THREADS, &[]),
    ("workers", THREADS, &[]),
    ("threads", THREADS, &[]),
    ("sample_rate", ANY_RATE, &[]),
    ("sampling_rate", ANY_RATE, &[]),
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
        assert!(SAME.iter().all(|(_, targets)| !targets.is_empty()));
        let near = NEAR.iter().map(|(name, _, targets)| (name, targets));
        for (name, targets) in SAME.iter().map(|(name, targets)| (name, targets)).chain(near) {
            assert!(seen.insert(name), "{name} appears twice");
            assert_eq!(*name, name.to_lowercase());
            for target in *targets {
                assert!(known.contains(*target), "{name}: no parameter is called {target}");
            }
        }
        // Options that are named, too.
        let run = ["flow", "run", "p.yaml", "--workers", "2"];
        assert!(THREADS.contains(&format!("`flow run {}`", run[3])) && crate::arguments::parse(run).is_ok());
    }

    #[test]
    fn former_names_are_answered_with_the_new_ones() {
        let registry = Registry::new(crate::kinds::all()).unwrap();
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("pipelines");
        for (pipeline, set, expected) in [
            ("new_language", "max_steps=9", "train.max_steps"),
            ("new_language", "phase1_lr=1e-4", "train.phase1_lr"),
            ("new_language", "warmup_steps=9", "train.warmup_steps"),
            ("new_language", "eval_every=9", "train.eval_every"),
            ("new_language", "device=cuda", "train.device"),
            ("new_language", "seed=7", "train.seed"),
            ("new_language", "tokenizer=work/t", "tokenizer_out"),
            ("pretrain_small", "lr=1e-4", "train.phase2_lr"),
            ("pretrain_small", "warmup=9", "train.phase2_warmup"),
            ("pretrain_small", "max_batch_seconds=9", "train.max_batch_seconds"),
            ("pretrain_small", "speeds=[1.0]", "train.speeds"),
            ("pretrain_small", "average_decay=0.9", "train.average_decay"),
            ("pretrain_small", "ctc_weight=0.1", "model.ctc_weight"),
            ("pretrain_small", "checkpoint_every=9", "train.checkpoint_every"),
            ("pretrain_small", "tokenizer=work/t", "tokenizer_out"),
        ] {
            let overrides = Overrides {
                set: vec![set.to_string()],
                usual_names: USUAL_NAMES,
                ..Overrides::default()
            };
            let said = spec::load(&folder.join(pipeline).with_extension("yaml"), &overrides, &registry)
                .map(drop)
                .unwrap_err()
                .to_string();
            assert!(said.contains(&format!("`{expected}`")), "{pipeline} {set}: {said}");
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
            ("patience=3", &["train.early_stopping"]),
            ("train.patience=3", &["train.early_stopping"]),
            ("early_stopping=true", &["train.early_stopping"]),
            ("save_top_k=3", &["train.keep_best"]),
            ("lora=true", &["train.lora"]),
            ("lora_rank=8", &["train.lora"]),
            ("train.noise=0.1", &["train.augment", "train.speeds"]),
            ("wandb=my-project", &["checkpoints"]),
            ("hf_token=abc", &["hub_token"]),
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
