//! Tensors that models for decoding share: what one of them has read from a place of a file, the others take from it. So a model and
//! several adapters of it need the memory of the model, and of what the adapters change.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use candle_core::{DType, Tensor};
use flow_kernels::product::low_precision::LowPrecisionRhs;

use crate::Precision;
use crate::tensor_files::TensorSource;

/// Where a tensor is from, in which type it is kept, and in which precision if it is a matrix.
type Key = (TensorSource, &'static str, &'static str);

/// A tensor, and what is kept of it in low precision.
#[derive(Debug)]
pub struct Shared {
    pub tensor: Tensor,
    pub packed: Option<Arc<LowPrecisionRhs>>,
}

/// The place of a tensor: empty until the first model has read it, gone with the last model.
#[derive(Debug, Default)]
pub struct SharedTensor(Mutex<Option<Shared>>);

impl SharedTensor {
    pub fn lock(&self) -> MutexGuard<'_, Option<Shared>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

static PLACES: Mutex<Option<HashMap<Key, Weak<SharedTensor>>>> = Mutex::new(None);

/// The place of a tensor on the CPU.
pub fn place_of(source: TensorSource, dtype: DType, precision: Precision) -> Arc<SharedTensor> {
    let key = (source, dtype.as_str(), precision.name());
    let mut places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
    let places = places.get_or_insert_default();
    if let Some(place) = places.get(&key).and_then(Weak::upgrade) {
        return place;
    }
    let place = Arc::new(SharedTensor::default());
    places.insert(key, Arc::downgrade(&place));
    place
}

/// Forgets the places of models that are gone.
pub fn forget_unused() {
    let mut places = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(places) = places.as_mut() {
        places.retain(|_, place| place.strong_count() > 0);
    }
}
