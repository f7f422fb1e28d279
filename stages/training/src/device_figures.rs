//! What a run tells of its device: the memory of tensors, and how much of the published rate of a card's arithmetic the
//! model's products take.

use candle_core::Device;
use flow_kernels::device::{DeviceMemory, forget_peak_memory, memory, name};
use flow_model::ModelConfig;
use serde_json::{Map, Value, json};

use crate::memory::BatchShape;
use crate::resolved_settings::ResolvedSettings;
use crate::roofline::{Card, Part, parts};
use crate::settings::Precision;
use crate::trainer::{BatchFigures, LoadedBatch, SAMPLE_RATE};

/// Parts of a step that a frozen encoder computes forward alone.
const ENCODER: [&str; 4] = ["sub-sampling", "feed-forward", "attention", "convolution"];

/// The device of the first rank.
#[derive(Debug)]
pub struct DeviceFigures {
    device: Device,
    card: Option<&'static Card>,
}

impl DeviceFigures {
    pub fn of(device: &Device) -> Self {
        DeviceFigures {
            device: device.clone(),
            card: name(device).and_then(|name| Card::of_device(&name)),
        }
    }

    /// Memory now, and the most since the last call with `anew`.
    pub fn memory(&self, anew: bool) -> Option<DeviceMemory> {
        let now = memory(&self.device);
        if anew {
            forget_peak_memory(&self.device);
        }
        now
    }

    /// Operations of a step, where the card is known: those of `own` micro-batches, and as many for each second of `elsewhere`.
    pub fn flops(
        &self,
        (config, settings): (&ModelConfig, &ResolvedSettings),
        own: &[LoadedBatch],
        elsewhere: &[BatchFigures],
        frozen: bool,
    ) -> f64 {
        if self.card.is_none() {
            return 0.0;
        }
        let flops: f64 = own
            .iter()
            .map(|loaded| model_flops(config, settings, loaded, frozen))
            .sum();
        let seconds: f64 = own.iter().map(LoadedBatch::padded_seconds).sum();
        let others: f64 = elsewhere.iter().map(|figures| figures.padded_seconds).sum();
        if seconds > 0.0 {
            flops * (1.0 + others / seconds)
        } else {
            0.0
        }
    }

    /// The share of the card's rate that so many operations in this many seconds are, over all ranks. None where the card is not
    /// known.
    pub fn utilisation(&self, settings: &ResolvedSettings, flops: f64, seconds: f64) -> Option<f64> {
        utilisation(self.card?, settings, flops, seconds)
    }
}

fn utilisation(card: &Card, settings: &ResolvedSettings, flops: f64, seconds: f64) -> Option<f64> {
    let rate = match settings.precision {
        Precision::Bf16 => card.bf16,
        Precision::F32 if settings.uses_tf32() => card.tf32,
        Precision::F32 => card.f32,
    };
    let most = rate * seconds * f64::from(settings.ranks.max(1));
    (most > 0.0).then(|| flops / most)
}

/// Operations of the matrix products of the forward and the backward pass of a micro-batch, as if each clip were as long as
/// the longest; without those that are computed again.
fn model_flops(config: &ModelConfig, settings: &ResolvedSettings, loaded: &LoadedBatch, frozen: bool) -> f64 {
    let samples = loaded.batch.signals.iter().map(Vec::len).max().unwrap_or(0);
    let shape = BatchShape {
        utterances: loaded.batch.signals.len(),
        seconds: samples as f64 / SAMPLE_RATE,
        tokens: loaded.batch.tokens.iter().map(Vec::len).max().unwrap_or(0),
    };
    let of_part = |part: Part| {
        // A backward pass has two products for each of the forward pass.
        let share = if frozen && ENCODER.contains(&part.name) {
            1.0 / 3.0
        } else {
            1.0
        };
        share * part.work.model.all()
    };
    parts(config, settings, shape, true).into_iter().map(of_part).sum()
}

/// The memory of a device as figures of a line of `metrics.jsonl`, in MiB: of tensors now, the most since the last line, and
/// what the allocator holds. Null where there is no such device.
pub fn memory_figures(memory: Option<DeviceMemory>) -> Map<String, Value> {
    let mib = |of: fn(DeviceMemory) -> u64| json!(memory.map(|memory| of(memory) >> 20));
    [
        ("device_memory_mib", mib(|memory| memory.used)),
        ("device_memory_peak_mib", mib(|memory| memory.peak)),
        ("device_memory_reserved_mib", mib(|memory| memory.reserved)),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value))
    .collect()
}

#[cfg(test)]
mod tests {
    use flow_model::model::MicroBatch;
    use flow_storage::Storage;

    use super::*;
    use crate::init::configuration;
    use crate::settings::TrainSettings;

    #[test]
    fn memory_is_told_in_mib_and_as_null_without_a_device() {
        let memory = DeviceMemory {
            used: 5 << 20,
            peak: (7 << 20) + 5,
            reserved: 9 << 20,
        };
        let figures = Value::Object(memory_figures(Some(memory)));
        let expected = json!({ "device_memory_mib": 5, "device_memory_peak_mib": 7, "device_memory_reserved_mib": 9 });
        assert_eq!(figures, expected);
        let none = memory_figures(DeviceFigures::of(&Device::Cpu).memory(true));
        assert!(none.len() == 3 && none.values().all(Value::is_null));
    }

    #[test]
    fn utilisation_is_a_share_of_the_rate_of_the_precision() {
        let tokenizer = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/tokenizers/mini.model");
        let settings: TrainSettings = serde_json::from_value(json!({
            "checkpoints": "work", "init": "none", "tokenizer": tokenizer, "ranks": 2, "precision": "bf16",
        }))
        .unwrap();
        let settings = ResolvedSettings::from(settings);
        let config = configuration(&Storage::default(), &settings, None).unwrap();
        let loaded = |clips: usize| LoadedBatch {
            batch: MicroBatch {
                signals: vec![vec![0.0; 160_000]; clips],
                tokens: vec![vec![1; 40]; clips],
                prompts: Vec::new(),
            },
            ..LoadedBatch::default()
        };
        let known = DeviceFigures {
            device: Device::Cpu,
            card: Card::of_device("NVIDIA H100 80GB HBM3"),
        };
        let both = (&config, &settings);
        let one = known.flops(both, &[loaded(1)], &[], false);
        let frozen = known.flops(both, &[loaded(1)], &[], true);
        assert!(0.0 < frozen && frozen < one);
        let four = known.flops(both, &[loaded(1), loaded(3)], &[], false);
        let three = known.flops(both, &[loaded(3)], &[], false);
        assert!((four - one - three).abs() < 1e-9 * four, "{four} {one} {three}");
        // The table of positions is projected once for all clips.
        assert!(2.9 * one < three && three < 3.0 * one, "{one} {three}");
        let elsewhere = known.flops(both, &[loaded(1)], &[loaded(3).figures()], false);
        assert!((elsewhere - 4.0 * one).abs() < 1e-9 * four);
        let share = known.utilisation(&settings, 989.5e12, 1.0).unwrap();
        assert!((share - 0.5).abs() < 1e-12, "{share}");
        let rounded = ResolvedSettings::from(TrainSettings {
            device: "cuda".into(),
            tf32: Some(true),
            ..TrainSettings::default()
        });
        assert_eq!(known.utilisation(&rounded, 494.5e12, 1.0), Some(1.0));
        let unknown = DeviceFigures::of(&Device::Cpu);
        assert_eq!(unknown.flops(both, &[loaded(1)], &[], false), 0.0);
        assert_eq!(unknown.utilisation(&settings, 1.0, 1.0), None);
        // Of other cards of a generation, the rates are not those of the data sheet.
        for (name, card) in [
            ("NVIDIA H200", Some("h200")),
            ("NVIDIA L4", Some("l4")),
            ("NVIDIA L40S", None),
        ] {
            assert_eq!(Card::of_device(name).map(|card| card.name), card);
        }
        assert_eq!(Card::of_device("NVIDIA H100 PCIe"), None);
    }
}
