//! Number types in which a model that decodes computes, as settings name them.

use candle_core::DType;
use flow_kernels::device::DeviceChoice;
use flow_kernels::product::low_precision::LowPrecision;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Weights;

/// What the factors of products with weights are rounded to: those of the encoder's layers and of the joint network. All else is
/// computed in 32 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Precision {
    #[default]
    F32,
    Bf16,
    Int8,
}

impl Precision {
    /// The number type, if it is not f32.
    pub fn low(self) -> Option<LowPrecision> {
        match self {
            Precision::F32 => None,
            Precision::Bf16 => Some(LowPrecision::Bf16),
            Precision::Int8 => Some(LowPrecision::Int8),
        }
    }

    /// Whether it goes with where the model is computed and with how its matrices are kept.
    ///
    /// # Errors
    /// Why it does not.
    pub fn check(self, weights: Weights, device: DeviceChoice) -> Result<(), String> {
        let name = self.name();
        if self == Precision::F32 {
            return Ok(());
        }
        if device != DeviceChoice::Cpu {
            return Err(format!(
                "`precision: {name}` is for the CPU; on `{device}` leave it out (`weights: bf16` computes products in bf16 there)"
            ));
        }
        if DType::from(weights) != DType::F32 {
            return Err(format!(
                "`weights` is for `precision: f32`; with `precision: {name}` matrices are kept in that type: leave out one of the two"
            ));
        }
        Ok(())
    }

    /// What is said where this processor computes it no faster than f32.
    pub fn warning(self) -> Option<String> {
        let missing = self.low()?.missing_instructions()?;
        let name = self.name();
        Some(format!(
            "precision {name} is no faster than f32 here: this processor has no {missing}; the result is the same"
        ))
    }

    /// As settings name it.
    pub fn name(self) -> &'static str {
        match self {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
            Precision::Int8 => "int8",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn low_precision_is_for_the_cpu_and_for_weights_of_its_own() {
        let cuda = DeviceChoice::Cuda(None);
        for (precision, weights, device, fits) in [
            (Precision::F32, Weights::Bf16, cuda, true),
            (Precision::Int8, Weights::F32, DeviceChoice::Cpu, true),
            (Precision::Bf16, Weights::F32, DeviceChoice::Cpu, true),
            (Precision::Int8, Weights::F32, cuda, false),
            (Precision::Bf16, Weights::F32, cuda, false),
            (Precision::Int8, Weights::F16, DeviceChoice::Cpu, false),
        ] {
            let checked = precision.check(weights, device);
            assert_eq!(checked.is_ok(), fits, "{precision:?} {weights:?} {device}");
            if let Err(why) = checked {
                assert!(why.contains(precision.name()), "{why}");
            }
        }
    }
}
