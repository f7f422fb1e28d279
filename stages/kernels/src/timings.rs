//! Times of kernels and matrix products on a device, taken by events in its stream around each of them. For benchmarks.
//!
//! Nothing waits while the work is timed, so launches overlap with the device as they do without. Two events cost the host a few
//! microseconds for each launch, and a time contains the gap before the next launch where the device waits for the host. What candle
//! computes by itself (copies of transposed tensors, zeros) is not timed.

use std::cell::RefCell;
use std::collections::HashMap;

use candle_core::{Device, Tensor};

use crate::device::Moment;
use crate::error::Result;

/// What one kind of launch took.
#[derive(Clone, Debug, PartialEq)]
pub struct Timing {
    /// Of a kernel its name, of a product its sizes (m x k x n) and its type.
    pub name: String,
    pub launches: usize,
    pub seconds: f64,
    /// Bytes of the tensors that it was given, each counted once. A kernel that gathers reads fewer, and one that reads a tensor
    /// twice reads more.
    pub bytes: u64,
    /// Floating-point operations of products.
    pub flops: u64,
}

/// A launch between two moments.
struct Launch {
    name: String,
    bytes: u64,
    flops: u64,
    begun: Moment,
    ended: Moment,
}

thread_local! {
    static LAUNCHES: RefCell<Option<Vec<Launch>>> = const { RefCell::new(None) };
}

/// Does `work`, and times what this thread launches meanwhile; the longest first. Waits for the device at the end.
///
/// # Errors
/// If the device fails.
pub fn timed<R>(work: impl FnOnce() -> R) -> Result<(R, Vec<Timing>)> {
    struct Back(Option<Vec<Launch>>);
    impl Drop for Back {
        fn drop(&mut self) {
            LAUNCHES.set(self.0.take());
        }
    }
    let back = Back(LAUNCHES.replace(Some(Vec::new())));
    let result = work();
    let launches = LAUNCHES.take().unwrap_or_default();
    drop(back);
    let mut by_name: HashMap<String, Timing> = HashMap::new();
    for launch in launches {
        let timing = by_name.entry(launch.name).or_insert_with_key(|name| Timing {
            name: name.clone(),
            launches: 0,
            seconds: 0.0,
            bytes: 0,
            flops: 0,
        });
        timing.launches += 1;
        timing.seconds += launch.ended.since(&launch.begun)?;
        timing.bytes += launch.bytes;
        timing.flops += launch.flops;
    }
    let mut timings: Vec<Timing> = by_name.into_values().collect();
    timings.sort_by(|a, b| b.seconds.total_cmp(&a.seconds).then_with(|| a.name.cmp(&b.name)));
    Ok((result, timings))
}

/// What is launched: name, bytes and floating-point operations.
pub(crate) type Described = (String, u64, u64);

/// Launches `work`, between two moments where this thread is [`timed`].
pub(crate) fn around<R>(
    device: &Device,
    described: impl FnOnce() -> Described,
    work: impl FnOnce() -> Result<R>,
) -> Result<R> {
    if LAUNCHES.with_borrow(Option::is_none) {
        return work();
    }
    let begun = Moment::of(device)?;
    let result = work()?;
    let ended = Moment::of(device)?;
    let (name, bytes, flops) = described();
    LAUNCHES.with_borrow_mut(|launches| {
        if let Some(launches) = launches {
            launches.push(Launch {
                name,
                bytes,
                flops,
                begun,
                ended,
            });
        }
    });
    Ok(result)
}

/// Bytes of a tensor's values.
pub(crate) fn bytes(tensor: &Tensor) -> u64 {
    (tensor.elem_count() * tensor.dtype().size_in_bytes()) as u64
}

/// A product, for its times.
pub(crate) fn product(out: &Tensor, a: &Tensor, b: &Tensor) -> Described {
    let (m, k, n) = (a.dims()[a.rank() - 2], a.dims()[a.rank() - 1], b.dims()[b.rank() - 1]);
    let count = out.elem_count() / (m * n).max(1);
    let times = if count > 1 {
        format!("{count} x ")
    } else {
        String::new()
    };
    let name = format!("{times}{m} x {k} x {n} {}", a.dtype().as_str());
    let bytes = [out, a, b].map(bytes).iter().sum();
    (name, bytes, 2 * (count * m * k * n) as u64)
}

#[cfg(test)]
mod tests {
    use candle_core::DType;

    use super::*;
    use crate::flow_cuda_emulator::{cublaslt as stand_in, emulator};
    use crate::ops::elementwise::add_in_place;
    use crate::product::product;

    #[test]
    fn launches_are_timed_by_name() {
        let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap();
        let (a, b) = (ones(&[3, 5]), ones(&[5, 7]));
        let work = || {
            add_in_place(&ones(&[12]), &ones(&[12])).unwrap();
            add_in_place(&ones(&[4]), &ones(&[4])).unwrap();
            product(&a, &b).unwrap();
        };
        let emulated = || stand_in::with(|| emulator::with(true, || timed(work).unwrap().1));
        let (mut found, again) = (emulated(), emulated());
        found.sort_by(|a, b| b.name.cmp(&a.name));
        assert!(found.iter().all(|timing| timing.seconds > 0.0), "{found:?}");
        let shown: Vec<_> = found
            .iter()
            .map(|timing| (timing.name.as_str(), timing.launches, timing.bytes, timing.flops))
            .collect();
        let product = ("3 x 5 x 7 f32", 1, 4 * (15 + 35 + 21), 2 * 3 * 5 * 7);
        assert_eq!(shown, [("add_in_place", 2, 4 * 2 * 16, 0), product]);
        // The longest comes first, and nothing is kept from before.
        assert!(again.len() == 2 && again[0].seconds >= again[1].seconds);
        assert!(LAUNCHES.with_borrow(Option::is_none));
    }
}
