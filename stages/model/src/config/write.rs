//! A [`ModelConfig`] into NeMo's `model_config.yaml`.

use serde::Serialize;
use serde_yaml::{Mapping, Value};

use super::read::CHUNKED;
use super::{AttentionContext, CausalConfig, EncoderConfig, ModelConfig, TimeWidth, ctc, prompt, transducer};
use crate::{Error, Result};

/// Writes what is causal. A model in which nothing is gets no keys for it.
fn write_causal(causal: &CausalConfig, root: &mut Mapping) {
    if causal.subsampling {
        put(root, &["encoder", "causal_downsampling"], true);
    }
    if causal.convolution {
        put(root, &["encoder", "conv_context_size"], "causal");
    }
    if !causal.contexts.is_empty() {
        put(root, &["encoder", "att_context_style"], CHUNKED);
    }
    if !causal.probabilities.is_empty() {
        put(root, &["encoder", "att_context_probs"], causal.probabilities.clone());
    }
}

impl ModelConfig {
    /// The document in NeMo's format: as it was read, updated with the values of this configuration.
    pub fn to_nemo_yaml(&self) -> Result<String> {
        let mut root = self.source.clone();
        if root.is_empty() {
            let of_transducer = self.transducer.is_some();
            put(&mut root, &["preprocessor", "_target_"], PREPROCESSOR);
            put(&mut root, &["encoder", "_target_"], ENCODER);
            if of_transducer {
                put(&mut root, &["decoder", "_target_"], DECODER);
                put(&mut root, &["joint", "_target_"], JOINT);
            }
            put(&mut root, &["target"], self.own_class());
            put(&mut root, &["decoding", "strategy"], "greedy_batch");
            if of_transducer {
                put(&mut root, &["decoder", "blank_as_pad"], true);
                put(&mut root, &["joint", "log_softmax"], Value::Null);
            }
        }
        let p = &self.preprocessor;
        put(&mut root, &["sample_rate"], p.sample_rate);
        put(&mut root, &["preprocessor", "sample_rate"], p.sample_rate);
        let normalize = if p.normalized { "per_feature" } else { "NA" };
        put(&mut root, &["preprocessor", "normalize"], normalize);
        put(&mut root, &["preprocessor", "window"], "hann");
        put(&mut root, &["preprocessor", "window_size"], p.window_size);
        put(&mut root, &["preprocessor", "window_stride"], p.window_stride);
        put(&mut root, &["preprocessor", "features"], p.features);
        put(&mut root, &["preprocessor", "n_fft"], p.n_fft);
        put(&mut root, &["preprocessor", "dither"], p.dither);
        put(&mut root, &["preprocessor", "preemph"], p.preemphasis);
        put(&mut root, &["preprocessor", "lowfreq"], p.low_frequency);
        put(&mut root, &["preprocessor", "highfreq"], p.high_frequency);
        put(&mut root, &["preprocessor", "log"], true);
        put(&mut root, &["preprocessor", "pad_to"], 0);
        put(&mut root, &["preprocessor", "pad_value"], 0.0);
        let e = &self.encoder;
        put(&mut root, &["encoder", "feat_in"], e.feat_in);
        put(&mut root, &["encoder", "n_layers"], e.n_layers);
        put(&mut root, &["encoder", "d_model"], e.d_model);
        put(&mut root, &["encoder", "use_bias"], e.use_bias);
        put(&mut root, &["encoder", "subsampling"], "dw_striding");
        put(
            &mut root,
            &["encoder", "subsampling_factor"],
            EncoderConfig::SUBSAMPLING,
        );
        put(
            &mut root,
            &["encoder", "subsampling_conv_channels"],
            e.subsampling_conv_channels,
        );
        put(&mut root, &["encoder", "ff_expansion_factor"], e.ff_expansion_factor);
        put(&mut root, &["encoder", "n_heads"], e.n_heads);
        let pair = |left: usize, right: usize| Value::from(vec![Value::from(left), Value::from(right)]);
        let (kind, context) = match e.attention_context {
            AttentionContext::Full => ("rel_pos", vec![-1, -1].into()),
            AttentionContext::Band(width) => ("rel_pos_local_attn", pair(width, width)),
            AttentionContext::Chunks(_) => {
                let side = |limit: Option<usize>| limit.map_or(Value::from(-1), Value::from);
                let contexts = e.causal.contexts.iter();
                let pairs = contexts.map(|context| Value::from(vec![side(context.left), side(context.right)]));
                ("rel_pos", Value::from(pairs.collect::<Vec<_>>()))
            }
        };
        put(&mut root, &["encoder", "self_attention_model"], kind);
        put(&mut root, &["encoder", "att_context_size"], context);
        write_causal(&e.causal, &mut root);
        put(&mut root, &["encoder", "xscaling"], e.xscaling);
        put(&mut root, &["encoder", "untie_biases"], true);
        put(&mut root, &["encoder", "conv_kernel_size"], e.conv_kernel_size);
        let norm = if e.causal.layer_norm {
            "layer_norm"
        } else {
            "batch_norm"
        };
        put(&mut root, &["encoder", "conv_norm_type"], norm);
        put(&mut root, &["encoder", "dropout"], e.dropout);
        put(&mut root, &["encoder", "dropout_pre_encoder"], e.dropout_pre_encoder);
        put(&mut root, &["encoder", "dropout_emb"], e.dropout_emb);
        put(&mut root, &["encoder", "dropout_att"], e.dropout_att);
        let (vocab_size, labels) = (self.vocab_size, &self.labels);
        match (&self.transducer, &self.ctc) {
            (Some(transducer), _) => transducer::write(transducer, &mut root, e, vocab_size, labels),
            (None, Some(ctc)) => ctc::write(ctc, &mut root, e, vocab_size, labels),
            (None, None) => {}
        }
        let s = &self.spec_augment;
        if s.freq_masks + s.time_masks > 0 || root.contains_key("spec_augment") {
            put(
                &mut root,
                &["spec_augment", "_target_"],
                "nemo.collections.asr.modules.SpectrogramAugmentation",
            );
            put(&mut root, &["spec_augment", "freq_masks"], s.freq_masks);
            put(&mut root, &["spec_augment", "time_masks"], s.time_masks);
            put(&mut root, &["spec_augment", "freq_width"], s.freq_width);
            match s.time_width {
                TimeWidth::Frames(n) => put(&mut root, &["spec_augment", "time_width"], n),
                TimeWidth::Share(x) => put(&mut root, &["spec_augment", "time_width"], x),
            }
        }
        match (&self.transducer, &self.ctc) {
            (Some(_), Some(ctc)) => ctc::write_auxiliary(ctc, &mut root, e, vocab_size, labels),
            _ => {
                root.remove("aux_ctc");
            }
        }
        if let Some(prompt) = &self.prompt {
            prompt::write(prompt, &mut root);
        }
        let t = &self.tokenizer;
        put(&mut root, &["tokenizer", "type"], t.kind.clone());
        for (key, value) in [
            ("model_path", &t.model_path),
            ("vocab_path", &t.vocab_path),
            ("spe_tokenizer_vocab", &t.spe_tokenizer_vocab),
        ] {
            if let Some(value) = value {
                put(&mut root, &["tokenizer", key], value.clone());
            }
        }
        serde_yaml::to_string(&root).map_err(|error| Error::Config(error.to_string()))
    }

    /// The document for a `.nemo` archive, with everything that NeMo needs to restore the model, also where flow does
    /// not use it. Existing values stay.
    pub fn to_nemo_archive_yaml(&self) -> Result<String> {
        let mut root: Mapping =
            serde_yaml::from_str(&self.to_nemo_yaml()?).map_err(|error| Error::Config(error.to_string()))?;
        put(&mut root, &["tokenizer", "dir"], Value::Null);
        let class = self.nemo_class(&root);
        put(&mut root, &["target"], class);
        self.put_missing_data_sections(&mut root);
        // Settings of one schedule are not those of another, so that one that is there stays as it is.
        if root.get("optim").and_then(|optim| optim.get("sched")).is_none() {
            put(&mut root, &["optim", "sched", "name"], "CosineAnnealing");
            put(&mut root, &["optim", "sched", "warmup_steps"], 1000);
            put(&mut root, &["optim", "sched", "min_lr"], 1e-6);
        }
        let nothing = Value::Null;
        let of_transducer = [
            ("decoder", "_target_", DECODER.into()),
            ("decoder", "normalization_mode", nothing.clone()),
            ("decoder", "random_state_sampling", false.into()),
            ("decoder", "blank_as_pad", true.into()),
            ("joint", "_target_", JOINT.into()),
            ("joint", "log_softmax", nothing.clone()),
            ("joint", "preserve_memory", false.into()),
            ("joint", "fuse_loss_wer", false.into()),
            ("joint", "fused_batch_size", nothing.clone()),
        ];
        let of_transducer = of_transducer.into_iter().filter(|_| self.transducer.is_some());
        let of_all = [
            ("preprocessor", "_target_", PREPROCESSOR.into()),
            ("preprocessor", "frame_splicing", 1.into()),
            ("encoder", "_target_", ENCODER.into()),
            ("encoder", "feat_out", (-1).into()),
            ("encoder", "causal_downsampling", false.into()),
            ("encoder", "att_context_style", "regular".into()),
            ("encoder", "pos_emb_max_len", 5000.into()),
            ("encoder", "conv_context_size", nothing.clone()),
            ("decoding", "strategy", "greedy_batch".into()),
            ("optim", "name", "adamw".into()),
            ("optim", "lr", 1e-4.into()),
            ("optim", "weight_decay", 1e-3.into()),
        ];
        for (section, key, value) in of_all.into_iter().chain(of_transducer) {
            put_missing(&mut root, &[section, key], value);
        }
        put_missing(&mut root, &["optim", "betas"], vec![0.9, 0.98].into());
        if self.transducer.is_some() && self.ctc.is_some() {
            put_missing(&mut root, &["aux_ctc", "decoding", "strategy"], "greedy".into());
        }
        serde_yaml::to_string(&root).map_err(|error| Error::Config(error.to_string()))
    }

    /// The sections that NeMo's own calls look into: `transcribe` asks `validation_ds` how texts are marked, and who
    /// trains there sets paths in them. Unchanged, they load nothing. One that is there keeps what it says, and gets what
    /// is missing but for what chooses other rows: bounds of durations, and sizes of batches where Lhotse makes them.
    fn put_missing_data_sections(&self, root: &mut Mapping) {
        for section in ["train_ds", "validation_ds", "test_ds"] {
            let train = section == "train_ds";
            let is_new = !is_section(root, section);
            if is_new {
                put(root, &[section], Mapping::new());
            }
            let by_lhotse = root
                .get(section)
                .and_then(|ds| ds.get("use_lhotse"))
                .and_then(Value::as_bool);
            let is_known = |key: &str| {
                by_lhotse != Some(true) || ["manifest_filepath", "sample_rate", "use_start_end_token"].contains(&key)
            };
            let values: [(&str, Value); 7] = [
                ("manifest_filepath", Value::Null),
                ("sample_rate", self.preprocessor.sample_rate.into()),
                ("batch_size", 16.into()),
                ("shuffle", train.into()),
                ("num_workers", 4.into()),
                ("pin_memory", true.into()),
                ("use_start_end_token", false.into()),
            ];
            for (key, value) in values.into_iter().filter(|(key, _)| is_known(key)) {
                put_missing(root, &[section, key], value);
            }
            if train && is_new {
                put(root, &[section, "min_duration"], 0.1);
                put(root, &[section, "max_duration"], 20.0);
                put(root, &[section, "trim_silence"], false);
                put(root, &[section, "is_tarred"], false);
                put(root, &[section, "tarred_audio_filepaths"], Value::Null);
                put(root, &[section, "shuffle_n"], 2048);
                put(root, &[section, "bucketing_strategy"], "fully_randomized");
                put(root, &[section, "bucketing_batch_size"], Value::Null);
            }
        }
    }

    /// NeMo's class of a model with these heads.
    fn own_class(&self) -> &'static str {
        match (&self.transducer, &self.ctc) {
            (Some(_), Some(_)) => HYBRID_MODEL,
            (Some(_), None) => MODEL,
            (None, _) => CTC_MODEL,
        }
    }

    /// NeMo's class of this model: the one that the document names, unless it is that of other heads.
    fn nemo_class(&self, root: &Mapping) -> String {
        match root.get("target").and_then(Value::as_str) {
            Some(named) if ![MODEL, HYBRID_MODEL, CTC_MODEL].contains(&named) => named.to_string(),
            _ => self.own_class().to_string(),
        }
    }
}

const MODEL: &str = "nemo.collections.asr.models.rnnt_bpe_models.EncDecRNNTBPEModel";
const HYBRID_MODEL: &str = "nemo.collections.asr.models.hybrid_rnnt_ctc_bpe_models.EncDecHybridRNNTCTCBPEModel";
const CTC_MODEL: &str = "nemo.collections.asr.models.ctc_bpe_models.EncDecCTCModelBPE";
const PREPROCESSOR: &str = "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor";
const ENCODER: &str = "nemo.collections.asr.modules.ConformerEncoder";
const DECODER: &str = "nemo.collections.asr.modules.RNNTDecoder";
const JOINT: &str = "nemo.collections.asr.modules.RNNTJoint";

/// Whether the document has this section, with something in it.
fn is_section(root: &Mapping, name: &str) -> bool {
    root.get(name).is_some_and(Value::is_mapping)
}

/// Sets the value at a path if it is absent.
fn put_missing(map: &mut Mapping, path: &[&str], value: Value) {
    let mut at = path.iter();
    let mut found = at.next().and_then(|first| map.get(*first));
    for part in at {
        found = found.and_then(|value| value.get(*part));
    }
    if found.is_none() {
        put(map, path, value);
    }
}

/// Sets the value at a path, making mappings on the way.
pub(super) fn put(map: &mut Mapping, path: &[&str], value: impl Serialize) {
    let [first, rest @ ..] = path else { return };
    if rest.is_empty() {
        // Plain numbers, texts and lists cannot fail to become YAML.
        let value = serde_yaml::to_value(value).unwrap_or(Value::Null);
        map.insert(Value::from(*first), value);
        return;
    }
    let entry = map
        .entry(Value::from(*first))
        .or_insert_with(|| Value::Mapping(Mapping::new()));
    if !entry.is_mapping() {
        *entry = Value::Mapping(Mapping::new());
    }
    if let Value::Mapping(inner) = entry {
        put(inner, rest, value);
    }
}
