//! How what ranks exchange is written for another process, and read there.
//!
//! Numbers are little-endian, as on every machine that takes part (machines of another byte order are refused when they join). What is read
//! is checked against the bytes that are there: lengths are never believed.

mod parcel;
mod reader;
#[cfg(test)]
mod tests;

use candle_core::DType;

use crate::error::TrainingError;

pub(super) use parcel::Parcel;
pub(super) use reader::Reader;

/// What is sent of tensors' types; a type is written as its place among them.
const DTYPES: [DType; 6] = [DType::F32, DType::F64, DType::I64, DType::U32, DType::BF16, DType::F16];

fn code(dtype: DType) -> Result<u8, TrainingError> {
    let at = DTYPES.iter().position(|known| *known == dtype);
    at.map(|at| at as u8).ok_or_else(|| TrainingError::Data {
        message: format!("tensors of type {dtype:?} are not sent between processes"),
    })
}

pub(in crate::ranks) fn damaged() -> TrainingError {
    TrainingError::Data {
        message: "what another process sent cannot be read".into(),
    }
}
