use candle_core::{DType, Device, Tensor};
use flow_kind::processes::Payload;
use flow_model::ParameterGroup;
use flow_model::model::MicroBatch;
use flow_model::parameter_groups::StatisticsPass;
use flow_nn::layers::convolution::BatchNorm;

use super::format::DTYPES;
use super::{Message, MessageReader};
use crate::concatenate::Concatenate;
use crate::error::TrainingError;
use crate::loaded_rows::RowRules;
use crate::long_texts::{OverLimit, TextLimit};
use crate::optimizer::AdamWConfig;
use crate::prompts::{PromptMode, PromptSettings};
use crate::ranks::{CollectiveKey, CollectiveOp, LoadedShare, OutOfMemory, RankReport};
use crate::row_losses::RowLoss;
use crate::schedule::{Recipe, Schedule};
use crate::settings::{ReduceDtype, ReduceEvery};
use crate::trainer::{LoadedBatch, TrainerConfig};

fn written(message: &Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.write(&mut bytes).unwrap();
    assert_eq!(bytes.len() as u64, message.size());
    bytes
}

fn message() -> Message {
    let mut message = Message::new(9);
    for dtype in DTYPES {
        let numbers = Tensor::new(&[[1.5f32, 2.0, 0.0], [7.0, 1.0, 3.0]], &Device::Cpu).unwrap();
        message = message
            .with_tensor(&numbers.to_dtype(dtype).unwrap().t().unwrap())
            .unwrap();
    }
    let key = CollectiveKey {
        step: 5,
        round: 2,
        op: CollectiveOp::ReduceGradients(ParameterGroup::Layer(17)),
    };
    let message = message.with_tensor(&Tensor::new(3i64, &Device::Cpu).unwrap()).unwrap();
    let message = message.with(&key).with(&loaded()).with(&report()).with(&share());
    let message = message.with(&config()).with(&AdamWConfig::default()).with(&rules());
    message.with(&Some([7u8; 128])).with(&None::<u64>).with(&statistics())
}

fn statistics() -> CollectiveKey {
    CollectiveKey {
        step: 6,
        round: 1,
        op: CollectiveOp::GatherStatistics(StatisticsPass::Backward, 3),
    }
}

fn loaded() -> LoadedBatch {
    LoadedBatch {
        epoch: 3,
        rank: 1,
        micro: 2,
        place: 4,
        segments: vec!["a".into(), String::new(), "b".into()],
        joined: vec![1, 2],
        batch: MicroBatch {
            signals: vec![vec![0.25, -1.0], vec![]],
            tokens: vec![vec![], vec![7, 8, 9]],
            prompts: vec![101, 0],
        },
    }
}

fn share() -> LoadedShare {
    LoadedShare {
        step: 7,
        seconds: vec![1.5, 0.0],
        batches: vec![loaded().figures()],
        lost: vec!["c".into()],
        dropped: Vec::new(),
        too_long: vec!["d".into(), "e".into()],
    }
}

fn report() -> RankReport {
    RankReport {
        loss: f64::INFINITY,
        gradient_norm: 0.1,
        skipped: true,
        bad_segments: vec!["b".into()],
        tokens: 12,
        flops_left_out: 2.5e9,
        wait_seconds: 0.5,
        out_of_memory: vec![OutOfMemory {
            segments: vec!["f".into(), "g".into()],
            seconds: 12.5,
            tokens: 40,
            parts: 2,
        }],
        rows: vec![RowLoss {
            segment: "h".into(),
            loss: 0.5,
        }],
    }
}

fn rules() -> (RowRules, PromptSettings) {
    let rows = RowRules {
        limit: TextLimit {
            max_tokens: 9,
            rule: OverLimit::Truncate,
        },
        concatenate: Some(Concatenate {
            gap_seconds: 0.25,
            duration_factor: 2.0,
            max_duration: Some(30.0),
        }),
    };
    let prompts = PromptSettings {
        default_prompt_mode: PromptMode::Auto,
        unified_auto_ratio: 0.1,
        prompt_of: [("hi".into(), "hi-IN".into()), ("en".into(), "en-US".into())].into(),
    };
    (rows, prompts)
}

fn config() -> TrainerConfig {
    TrainerConfig {
        recipe: Recipe {
            unfreeze_step: 3,
            phase1: Schedule::Constant { base: 0.1, warmup: 4 },
            phase2: Schedule::Cosine {
                base: 1e-3 / 3.0,
                minimum: 1e-6,
                warmup: 5,
                constant: 6,
                end: 7,
            },
        },
        clip: 1.0 / 3.0,
        ranks: 4,
        fold_update: false,
        tf32: true,
        offload: true,
        rank_timeout: std::time::Duration::from_millis(1500),
        device: flow_kernels::device::DeviceChoice::Cuda(Some(3)),
        recompute: true,
        batch_norm: BatchNorm::Frozen,
        reduce_dtype: ReduceDtype::Bf16,
        reduce_every: ReduceEvery::Step,
        seed: u64::MAX,
        spec_augment: true,
        dither: false,
        dropout: true,
        row_losses: true,
    }
}

fn read(bytes: &[u8]) -> Result<(), TrainingError> {
    let (kind, mut reader) = MessageReader::new(bytes)?;
    assert_eq!(kind, 9);
    for dtype in DTYPES {
        let tensor = reader.tensor()?;
        assert_eq!((tensor.dtype(), tensor.dims()), (dtype, &[3, 2][..]));
        let expected = if dtype.is_float() { 1.5 } else { 1.0 };
        let numbers = tensor.to_dtype(DType::F64)?.to_vec2::<f64>()?;
        assert_eq!(numbers, [[expected, 7.0], [2.0, 1.0], [0.0, 3.0]]);
    }
    assert_eq!(reader.tensor()?.to_scalar::<i64>()?, 3);
    assert_eq!(
        reader.value::<CollectiveKey>()?.to_string(),
        "the gradients of encoder layer 17, micro-batch 2, step 5"
    );
    assert_eq!(reader.value::<LoadedBatch>()?, loaded());
    assert_eq!(reader.value::<RankReport>()?, report());
    assert_eq!(reader.value::<LoadedShare>()?, share());
    assert_eq!(reader.value::<TrainerConfig>()?, config());
    assert_eq!(reader.value::<AdamWConfig>()?, AdamWConfig::default());
    assert_eq!(reader.value::<(RowRules, PromptSettings)>()?, rules());
    assert_eq!(reader.value::<Option<[u8; 128]>>()?, Some([7; 128]));
    assert_eq!(reader.value::<Option<u64>>()?, None);
    assert_eq!(reader.value::<CollectiveKey>()?, statistics());
    assert!(reader.rest().is_empty());
    Ok(())
}

#[test]
fn what_is_written_is_read_to_the_bit_and_what_is_cut_is_an_error() {
    let bytes = written(&message());
    read(&bytes).unwrap();
    for length in 0..bytes.len() {
        assert!(read(&bytes[..length]).is_err(), "{length} bytes");
    }
}

/// Lengths that lie are errors, and no memory is asked for on their word.
#[test]
fn damaged_messages_are_errors_and_never_panic() {
    let bytes = written(&message());
    for at in 1..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] = 0xff;
        let mut reader = MessageReader::new(&damaged).unwrap().1;
        let _ = (|| -> Result<(), TrainingError> {
            for _ in 0..=DTYPES.len() {
                reader.tensor()?;
            }
            reader.value::<CollectiveKey>()?;
            reader.value::<LoadedBatch>()?;
            reader.value::<RankReport>()?;
            reader.value::<LoadedShare>()?;
            reader.value::<TrainerConfig>()?;
            reader.value::<AdamWConfig>()?;
            reader.value::<(RowRules, PromptSettings)>()?;
            Ok(())
        })();
    }
}

#[test]
fn shapes_whose_strides_overflow_are_errors() {
    for shape in [vec![0, usize::MAX, usize::MAX], vec![usize::MAX, 2], vec![0; 99]] {
        let bytes = written(&Message::new(9).with_dtype(DType::F32).unwrap().with(&shape));
        assert!(MessageReader::new(&bytes).unwrap().1.tensor().is_err(), "{shape:?}");
    }
}
