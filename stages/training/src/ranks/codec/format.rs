//! Codes of data types, which the message and its reader have in common.

use candle_core::DType;

use crate::error::TrainingError;

/// The data types of tensors that can be sent; the code of a type is its index here.
pub(super) const DTYPES: [DType; 6] = [DType::F32, DType::F64, DType::I64, DType::U32, DType::BF16, DType::F16];

/// The code of a data type.
///
/// # Errors
/// Where tensors of that type are not sent.
pub(super) fn dtype_code(dtype: DType) -> Result<u8, TrainingError> {
    let at = DTYPES.iter().position(|known| *known == dtype);
    at.map(|at| at as u8)
        .ok_or_else(|| TrainingError::data(format!("tensors of type {dtype:?} are not sent between processes")))
}

/// The error where a message of another process cannot be decoded.
pub(in crate::ranks) fn malformed_message() -> TrainingError {
    TrainingError::data("what another process sent cannot be read")
}
