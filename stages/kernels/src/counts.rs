//! What a thread computes, counted: kernels that it launches on a device, matrix products, and copies between host and
//! device. For tests and for reports; nothing is counted unless it was asked for.
//!
//! Counts are of one thread. Whoever calls the functions of this crate is counted, not the threads that share the work of
//! one function out among them. What candle computes by itself on a device (copies of transposed tensors, zeros) is not
//! counted.

use std::cell::RefCell;
use std::collections::BTreeMap;

/// Copies in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copies {
    pub count: usize,
    pub bytes: u64,
}

/// What was counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Launches of each kernel for devices.
    pub kernels: BTreeMap<&'static str, usize>,
    /// Matrix products; one of a stack of matrices is one.
    pub products: usize,
    /// Floating-point operations of the products: `2 m k n` for (m, k) times (k, n).
    pub product_flops: u64,
    /// Changes of a factor's number type before a product on a device. Each is a launch.
    pub conversions: usize,
    /// From host memory to a device.
    pub to_device: Copies,
    /// From a device to host memory. Each waits for the device.
    pub to_host: Copies,
}

impl Counts {
    /// Launches of all kernels.
    pub fn launches(&self) -> usize {
        self.kernels.values().sum()
    }

    /// What came since `before`, an earlier state of the same counts.
    pub fn since(&self, before: &Counts) -> Counts {
        let copies = |now: Copies, then: Copies| Copies {
            count: now.count - then.count,
            bytes: now.bytes - then.bytes,
        };
        let kernels = self.kernels.iter().map(|(&name, &count)| {
            let then = before.kernels.get(name).copied().unwrap_or(0);
            (name, count - then)
        });
        Counts {
            kernels: kernels.filter(|&(_, count)| count > 0).collect(),
            products: self.products - before.products,
            product_flops: self.product_flops - before.product_flops,
            conversions: self.conversions - before.conversions,
            to_device: copies(self.to_device, before.to_device),
            to_host: copies(self.to_host, before.to_host),
        }
    }
}

thread_local! {
    static COUNTS: RefCell<Option<Counts>> = const { RefCell::new(None) };
}

/// Does `work` and counts what this thread computes meanwhile. What a count within another one counts is not in the outer
/// one.
pub fn counted<R>(work: impl FnOnce() -> R) -> (R, Counts) {
    struct Back(Option<Counts>);
    impl Drop for Back {
        fn drop(&mut self) {
            COUNTS.set(self.0.take());
        }
    }
    let _back = Back(COUNTS.replace(Some(Counts::default())));
    let result = work();
    (result, so_far())
}

/// What the innermost [`counted`] of this thread has counted until now; nothing outside of one.
pub fn so_far() -> Counts {
    COUNTS.with_borrow(|counts| counts.clone().unwrap_or_default())
}

fn note(change: impl FnOnce(&mut Counts)) {
    COUNTS.with_borrow_mut(|counts| {
        if let Some(counts) = counts {
            change(counts);
        }
    });
}

pub(crate) fn launched(kernel: &'static str) {
    note(|counts| *counts.kernels.entry(kernel).or_default() += 1);
}

/// `count` products of (m, k) and (k, n).
pub(crate) fn multiplied(count: usize, m: usize, k: usize, n: usize) {
    note(|counts| {
        counts.products += 1;
        counts.product_flops += 2 * (count as u64) * (m as u64) * (k as u64) * (n as u64);
    });
}

pub(crate) fn converted() {
    note(|counts| counts.conversions += 1);
}

pub(crate) fn copied_to_device(bytes: usize) {
    note(|counts| {
        counts.to_device.count += 1;
        counts.to_device.bytes += bytes as u64;
    });
}

pub(crate) fn copied_to_host(bytes: usize) {
    note(|counts| {
        counts.to_host.count += 1;
        counts.to_host.bytes += bytes as u64;
    });
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};

    use super::*;
    use crate::product::product;

    #[test]
    fn products_are_counted_where_it_is_asked_for() {
        let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap();
        let multiply = || {
            product(&ones(&[3, 5]), &ones(&[5, 7])).unwrap();
            product(&ones(&[2, 3, 5]), &ones(&[2, 5, 1])).unwrap();
        };
        let ((first, inner), all) = counted(|| {
            multiply();
            let first = so_far();
            let ((), inner) = counted(multiply);
            multiply();
            (first, inner)
        });
        let flops = 2 * (3 * 5 * 7 + 2 * 3 * 5);
        assert_eq!((first.products, first.product_flops), (2, flops));
        assert_eq!(inner, first);
        assert_eq!((all.products, all.product_flops), (4, 2 * flops));
        assert_eq!(all.since(&first), first);
        multiply();
        assert_eq!(so_far(), Counts::default());
    }
}
