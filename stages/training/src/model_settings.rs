//! The settings of `training.train` for the architecture of a new model and for the initialisation of new pieces of a
//! vocabulary.

use flow_model::ModelConfig;
use flow_model::config::{CtcConfig, Reduction};
use flow_model::heads::HeadKind;
use flow_model::vocabulary;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::TrainingError;

/// How the rows of a piece are initialised that is in `tokenizer` but not in the tokenizer of `init`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NewPieces {
    /// As the mean of the rows of the pieces into which the old tokenizer splits it; at random where it knows none.
    #[default]
    Mean,
    /// At random, as in a model that begins from nothing.
    Random,
}

impl From<NewPieces> for vocabulary::NewPieces {
    fn from(how: NewPieces) -> Self {
        match how {
            NewPieces::Mean => vocabulary::NewPieces::Mean,
            NewPieces::Random => vocabulary::NewPieces::Random,
        }
    }
}

/// Sizes of a new model (`init: none`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ModelSettings {
    /// Path of a SentencePiece `.model`, where `tokenizer` is empty and none comes as an input.
    pub tokenizer: String,
    /// Mel bands.
    pub mels: usize,
    /// Width of the encoder.
    pub d_model: usize,
    /// Conformer layers.
    pub layers: usize,
    /// Attention heads; divides `d_model`.
    pub heads: usize,
    /// Channels of the sub-sampling convolutions.
    pub conv_channels: usize,
    /// Width of the depthwise convolution in frames; odd.
    pub conv_kernel: usize,
    /// Width of the feed-forward layers, in multiples of `d_model`.
    pub feed_forward_factor: usize,
    /// Width of the prediction network.
    pub pred_hidden: usize,
    /// LSTM layers of the prediction network.
    pub pred_layers: usize,
    /// Width of the joint network.
    pub joint_hidden: usize,
    /// Dropout of the encoder.
    pub dropout: f64,
    /// Dropout of the prediction and the joint network.
    pub decoder_dropout: f64,
    /// The heads: `transducer`, with a CTC head beside it where `ctc_weight` is above 0, or `ctc` alone.
    #[serde(skip_serializing_if = "is_transducer")]
    pub head: HeadKind,
    /// Share of the loss of a CTC head beside the transducer, as in NeMo's hybrid models; 0 for no such head. It finds
    /// alignments soon where data is scarce.
    pub ctc_weight: f64,
    /// Durations that a token can have, in encoder frames. None (`[]`): an RNN-T, without `sigma` and `omega`.
    pub durations: Vec<usize>,
    /// Subtracted from every token log-probability of the loss, which favours long durations.
    pub sigma: f64,
    /// Probability that a batch is trained with the plain RNN-T loss.
    pub omega: f64,
    /// How the losses of a micro-batch become one: `mean_batch`, `mean`, `mean_volume` or `sum`.
    pub reduction: String,
    /// SpecAugment: how many frequency masks.
    pub frequency_masks: usize,
    /// SpecAugment: the widest frequency mask, in mel bands.
    pub frequency_width: usize,
    /// SpecAugment: how many time masks.
    pub time_masks: usize,
    /// SpecAugment: the widest time mask, as a share of the utterance.
    pub time_width: f64,
    /// Tokens per frame at most, in decoding.
    pub max_symbols: usize,
}

fn is_transducer(head: &HeadKind) -> bool {
    *head == HeadKind::Transducer
}

impl Default for ModelSettings {
    fn default() -> Self {
        ModelSettings {
            tokenizer: String::new(),
            mels: 80,
            d_model: 144,
            layers: 4,
            heads: 4,
            conv_channels: 64,
            conv_kernel: 9,
            feed_forward_factor: 4,
            pred_hidden: 144,
            pred_layers: 1,
            joint_hidden: 256,
            dropout: 0.1,
            decoder_dropout: 0.2,
            head: HeadKind::Transducer,
            ctc_weight: 0.0,
            durations: vec![0, 1, 2, 3, 4],
            sigma: 0.02,
            omega: 0.0,
            reduction: "mean_batch".into(),
            frequency_masks: 2,
            frequency_width: 27,
            time_masks: 10,
            time_width: 0.05,
            max_symbols: 10,
        }
    }
}

impl ModelSettings {
    /// The model's configuration in NeMo's terms, for a vocabulary of these pieces.
    pub fn config(&self, labels: &[String]) -> Result<ModelConfig, TrainingError> {
        if self.mels == 0 || self.heads == 0 || !self.d_model.is_multiple_of(self.heads) {
            return Err(TrainingError::setting("model.heads", "it must divide d_model"));
        }
        let greedy = json!({ "max_symbols": self.max_symbols });
        if !(0.0..=1.0).contains(&self.ctc_weight) {
            return Err(TrainingError::setting("model.ctc_weight", "it must be from 0 to 1"));
        }
        let mut document = json!({
            "target": "nemo.collections.asr.models.rnnt_bpe_models.EncDecRNNTBPEModel",
            "sample_rate": 16000,
            "rnnt_reduction": self.reduction,
            "labels": labels,
            "tokenizer": { "type": "bpe" },
            "preprocessor": {
                "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
                "sample_rate": 16000, "normalize": "per_feature", "window_size": 0.025, "window_stride": 0.01, "window": "hann",
                "features": self.mels, "n_fft": 512, "log": true, "frame_splicing": 1, "dither": 1e-5, "pad_to": 0, "pad_value": 0.0,
            },
            "spec_augment": {
                "_target_": "nemo.collections.asr.modules.SpectrogramAugmentation",
                "freq_masks": self.frequency_masks, "time_masks": self.time_masks,
                "freq_width": self.frequency_width, "time_width": self.time_width,
            },
            "encoder": {
                "_target_": "nemo.collections.asr.modules.ConformerEncoder",
                "feat_in": self.mels, "feat_out": -1, "n_layers": self.layers, "d_model": self.d_model, "use_bias": false,
                "subsampling": "dw_striding", "subsampling_factor": 8, "subsampling_conv_channels": self.conv_channels,
                "causal_downsampling": false, "ff_expansion_factor": self.feed_forward_factor,
                "self_attention_model": "rel_pos", "n_heads": self.heads, "att_context_size": [-1, -1], "att_context_style": "regular",
                "xscaling": false, "untie_biases": true, "pos_emb_max_len": 5000, "conv_kernel_size": self.conv_kernel,
                "conv_norm_type": "batch_norm", "conv_context_size": null,
                "dropout": self.dropout, "dropout_pre_encoder": self.dropout, "dropout_emb": 0.0, "dropout_att": self.dropout,
            },
            "decoder": {
                "_target_": "nemo.collections.asr.modules.RNNTDecoder",
                "normalization_mode": null, "random_state_sampling": false, "blank_as_pad": true, "vocab_size": labels.len(),
                "prednet": { "pred_hidden": self.pred_hidden, "pred_rnn_layers": self.pred_layers, "t_max": null, "dropout": self.decoder_dropout },
            },
            "joint": {
                "_target_": "nemo.collections.asr.modules.RNNTJoint",
                "log_softmax": null, "preserve_memory": false, "fuse_loss_wer": false, "num_extra_outputs": self.durations.len(),
                "num_classes": labels.len(), "vocabulary": labels,
                "jointnet": {
                    "joint_hidden": self.joint_hidden, "activation": "relu", "dropout": self.decoder_dropout,
                    "encoder_hidden": self.d_model, "pred_hidden": self.pred_hidden,
                },
            },
            "decoding": { "strategy": "greedy_batch", "model_type": "tdt", "durations": self.durations, "greedy": greedy },
            "loss": {
                "loss_name": "tdt",
                "tdt_kwargs": { "fastemit_lambda": 0.0, "clamp": -1.0, "durations": self.durations, "sigma": self.sigma, "omega": self.omega },
            },
            "model_defaults": {
                "enc_hidden": self.d_model, "pred_hidden": self.pred_hidden, "joint_hidden": self.joint_hidden,
                "tdt_durations": self.durations, "num_tdt_durations": self.durations.len(),
            },
        });
        if self.head == HeadKind::Ctc {
            document["target"] = json!("nemo.collections.asr.models.ctc_bpe_models.EncDecCTCModelBPE");
            document["decoder"] = json!({
                "_target_": "nemo.collections.asr.modules.ConvASRDecoder",
                "feat_in": self.d_model, "num_classes": labels.len(), "vocabulary": labels,
            });
            document["ctc_reduction"] = json!(self.reduction);
            document["decoding"] = json!({ "strategy": "greedy_batch" });
            if let Some(document) = document.as_object_mut() {
                document
                    .retain(|key, _| !["joint", "loss", "model_defaults", "rnnt_reduction"].contains(&key.as_str()));
            }
        } else if self.durations.is_empty() {
            let remove = |section: &mut Value, keys: &[&str]| {
                if let Some(section) = section.as_object_mut() {
                    section.retain(|key, _| !keys.contains(&key.as_str()));
                }
            };
            document["loss"] = json!({
                "loss_name": "default", "warprnnt_numba_kwargs": { "fastemit_lambda": 0.0, "clamp": -1.0 },
            });
            remove(&mut document["joint"], &["num_extra_outputs"]);
            remove(&mut document["decoding"], &["model_type", "durations"]);
            remove(&mut document["model_defaults"], &["tdt_durations", "num_tdt_durations"]);
        }
        // JSON is YAML too.
        let mut config = ModelConfig::from_nemo_yaml(&document.to_string())?;
        if self.head == HeadKind::Transducer && self.ctc_weight > 0.0 {
            config.ctc = Some(CtcConfig {
                weight: self.ctc_weight,
                reduction: Reduction::MeanBatch,
            });
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_model_has_the_heads_that_are_asked_for() {
        let labels: Vec<String> = ["a", "b", "c"].map(String::from).to_vec();
        let heads = |change: &dyn Fn(&mut ModelSettings)| {
            let mut settings = ModelSettings::default();
            change(&mut settings);
            let config = settings.config(&labels).unwrap();
            assert_eq!(config.vocab_size, 3);
            let again = ModelConfig::from_nemo_yaml(&config.to_nemo_archive_yaml().unwrap()).unwrap();
            assert_eq!((&again.transducer, &again.ctc), (&config.transducer, &config.ctc));
            // Another vocabulary, as `init` with another tokenizer has it.
            let mut other = config.clone();
            other.vocab_size = 2;
            other.labels.truncate(2);
            let other = ModelConfig::from_nemo_yaml(&other.to_nemo_yaml().unwrap()).unwrap();
            assert_eq!(other.labels, labels[..2]);
            config.heads()
        };
        assert_eq!(heads(&|_| ()), "TDT");
        assert_eq!(heads(&|settings| settings.ctc_weight = 0.3), "TDT and CTC");
        assert_eq!(heads(&|settings| settings.durations.clear()), "RNN-T");
        assert_eq!(heads(&|settings| settings.head = HeadKind::Ctc), "CTC");
        // What was recorded before there was a choice stays as it was.
        let recorded = serde_json::to_value(ModelSettings::default()).unwrap();
        assert!(recorded.get("head").is_none());
    }
}
