//! Number types of weights, as settings name them.

use candle_core::DType;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A number type of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Weights {
    #[default]
    F32,
    F16,
    Bf16,
}

impl From<Weights> for DType {
    fn from(weights: Weights) -> Self {
        match weights {
            Weights::F32 => DType::F32,
            Weights::F16 => DType::F16,
            Weights::Bf16 => DType::BF16,
        }
    }
}
