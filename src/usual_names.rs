//! Names of parameters in NeMo and Hugging Face, and the parameters of the bundled pipelines that correspond to them.

use flow_spec::UsualNames;

const ADAPTERS: &str =
    "`lora` is a map such as {rank: 16, alpha: 32, targets: [linear_q, linear_v]} (docs/training.md)";
const AUGMENT: &str = "`augment` is a list of steps such as {mix: {path: NOISE}} (docs/training.md)";
const FIGURES: &str =
    "each step's figures go to metrics.jsonl and to TensorBoard's event files, in the folder of the checkpoints";
const STOP: &str = "`early_stopping` is a map such as {patience: 10, min_delta: 0.001} (docs/training.md)";
const MLFLOW: &str = "`mlflow` is a map such as {folder: mlruns, experiment_name: flow} (docs/training.md)";
const RESUMED: &str = "the next run continues from the last checkpoint by itself";
const THREADS: &str = "`flow run --workers` sets how many threads work";
const ANY_RATE: &str = "recordings of any sample rate are taken";

/// What parameters of other programs are called here.
pub const USUAL_NAMES: UsualNames = UsualNames { same: SAME, near: NEAR };

/// The last parts of the names of parameters here, and what others call them.
const SAME: &[(&str, &str)] = &[
    ("phase1_lr phase2_lr", "lr learning_rate max_lr"),
    (
        "max_batch_seconds grad_accum",
        "batch_size per_device_train_batch_size batch_duration",
    ),
    ("grad_accum", "gradient_accumulation_steps accumulate_grad_batches"),
    (
        "max_steps",
        "epochs num_epochs max_epochs num_train_epochs steps num_steps",
    ),
    ("warmup_steps phase2_warmup", "warmup warmup_steps num_warmup_steps"),
    ("schedule", "scheduler sched lr_scheduler lr_scheduler_type"),
    ("optimizer", "optim"),
    ("weight_decay", "wd"),
    ("eval_every", "eval_steps val_check_interval"),
    ("checkpoint_every", "save_steps every_n_train_steps"),
    ("keep_best", "save_top_k"),
    ("keep_checkpoints", "save_total_limit"),
    ("monitor", "metric_for_best_model"),
    ("model_from", "load_best_model_at_end"),
    ("clip", "max_grad_norm gradient_clip_val grad_clip"),
    ("average_decay", "ema ema_decay"),
    ("ranks device", "gpus devices num_gpus"),
    ("ranks", "num_nodes world_size nproc_per_node"),
    ("precision", "bf16 fp16 amp mixed_precision dtype torch_dtype"),
    ("tf32", "allow_tf32 float32_matmul_precision"),
    ("recompute", "gradient_checkpointing activation_checkpointing"),
    ("unfreeze_step", "freeze_encoder freeze_feature_encoder freeze_steps"),
    ("spec_augment", "specaugment specaug"),
    ("frequency_masks", "freq_masks"),
    ("frequency_width", "freq_width"),
    ("speeds", "speed speed_perturb speed_perturbation"),
    (
        "init model",
        "init_from_nemo_model init_from_pretrained_model pretrained_model model_name_or_path model_path base_model \
         restore_from checkpoint ckpt ckpt_path",
    ),
    ("train_manifest shards", "dataset data data_dir train_data"),
    ("train_manifest", "train_ds train_file"),
    (
        "val_manifest",
        "validation_ds validation_file eval_dataset dev_manifest",
    ),
    ("manifest train_manifest val_manifest", "manifest_filepath"),
    ("val_percent val_per_language", "val_split validation_split test_size"),
    ("lang", "language"),
    ("max_tokens", "max_length max_label_length"),
    ("max_duration", "max_duration_in_seconds"),
    ("min_duration", "min_duration_in_seconds"),
    ("vocab_size", "vocabulary_size"),
    ("checkpoints model_out", "output_dir exp_dir"),
    ("seed", "random_seed"),
    ("hub_token", "token hf_token"),
    ("tokenizer_out", "tokenizer"),
    ("beam", "beam_size num_beams"),
    ("lm", "kenlm_model"),
    ("boost", "hotwords"),
    ("normalize", "lowercase"),
];

/// Why there is no such parameter here, the last parts of the names of what comes nearest, and what others call it.
const NEAR: &[(&str, &str, &str)] = &[
    (
        STOP,
        "early_stopping",
        "patience min_delta early_stopping early_stopping_patience early_stopping_threshold create_early_stopping_callback",
    ),
    (
        ADAPTERS,
        "lora",
        "lora lora_r lora_rank lora_alpha peft adapter adapters",
    ),
    (
        AUGMENT,
        "augment speeds",
        "noise noise_manifest noise_prob snr musan rir augmentor augmentation",
    ),
    (
        FIGURES,
        "checkpoints",
        "wandb wandb_project create_wandb_logger report_to logger logging_dir logging_steps log_every_n_steps \
         tensorboard create_tensorboard_logger",
    ),
    (MLFLOW, "mlflow", "mlflow create_mlflow_logger mlflow_logger_kwargs"),
    (
        RESUMED,
        "on_change checkpoints",
        "resume resume_if_exists resume_from_checkpoint",
    ),
    (
        "ranks share the state of the optimizer",
        "ranks offload",
        "deepspeed fsdp strategy",
    ),
    (THREADS, "", "num_workers dataloader_num_workers workers threads"),
    (ANY_RATE, "", "sample_rate sampling_rate"),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use flow_kind::registry::Registry;
    use flow_spec::Overrides;

    use super::*;

    #[test]
    fn every_name_leads_to_a_parameter_of_a_pipeline() {
        let registry = Registry::new(crate::kinds::all()).unwrap();
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("pipelines");
        let mut known = BTreeSet::new();
        for name in ["finetune", "new_language", "pretrain_small", "evaluate"] {
            let path = folder.join(name).with_extension("yaml");
            let pipeline = flow_spec::load(&path, &Overrides::default(), &registry)
                .map_err(|found| found.to_string())
                .unwrap();
            let last = |name: &str| name.rsplit('.').next().unwrap_or_default().to_string();
            known.extend(pipeline.params.iter().map(|param| last(&param.name)));
        }
        let mut seen = BTreeSet::new();
        assert!(SAME.iter().all(|(targets, _)| !targets.is_empty()));
        let near = NEAR.iter().map(|(_, targets, names)| (targets, names));
        for (targets, names) in SAME.iter().map(|(targets, names)| (targets, names)).chain(near) {
            for name in names.split(' ') {
                assert!(seen.insert(name), "{name} appears twice");
                assert_eq!(*name, name.to_lowercase());
            }
            for target in targets.split_whitespace() {
                assert!(known.contains(target), "{names}: no parameter is called {target}");
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
            let said = flow_spec::load(&folder.join(pipeline).with_extension("yaml"), &overrides, &registry)
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
            ("create_mlflow_logger=true", &["train.mlflow"]),
            ("hf_token=abc", &["hub_token"]),
        ] {
            let overrides = Overrides {
                set: vec![set.to_string()],
                usual_names: USUAL_NAMES,
                ..Overrides::default()
            };
            let said = flow_spec::load(&path, &overrides, &registry)
                .map(drop)
                .unwrap_err()
                .to_string();
            for name in expected {
                assert!(said.contains(&format!("`{name}`")), "{set}: {said}");
            }
        }
    }
}
