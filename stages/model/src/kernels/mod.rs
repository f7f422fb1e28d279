//! Kernels that candle lacks or does slowly, one file each, as functions on tensors.
//!
//! The CPU side works on contiguous slices, generic over f32 and f64, and shares rows or channels out over rayon's
//! threads. Work is always cut by the size of the data, never by the number of threads, and partial sums are added in
//! order, so the result is the same for any number of threads.
//!
//! For tensors on a CUDA device, each function hands its work to the one of its name in `cuda`, by the line that it begins
//! with.

pub mod adamw;
pub mod attention;
pub mod batch_norm;
pub mod bias;
#[cfg(any(test, feature = "cuda"))]
pub(crate) mod cuda;
pub mod depthwise;
pub mod elementwise;
pub mod glu;
pub mod joint;
pub mod layer_norm;
pub mod lstm;
pub mod product;
pub mod squares;
pub mod subsample;

#[cfg(test)]
mod not_a_number;

use std::array::from_fn;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::{Deref, Range};

use candle_core::{CpuStorage, DType, Device, InplaceOp1, Layout, Shape, Storage, Tensor, WithDType};
use rayon::prelude::*;

use crate::error::{Error, Result};

/// f32 or f64.
pub trait Float: WithDType + num_traits::Float + std::iter::Sum {
    /// From f64, rounded.
    fn of(value: f64) -> Self;
    /// To f64, exact.
    fn wide(self) -> f64;
    /// `e^x` to about two units in the last place, in a form that the compiler can vectorise; saturates at 1e-38 and
    /// 1e38 in f32 instead of reaching 0 and infinity. NaN stays NaN.
    fn exp_quick(self) -> Self;
    /// The values of a CPU storage of this type.
    fn values_mut(storage: &mut CpuStorage) -> Option<&mut Vec<Self>>;

    /// Logistic function.
    #[inline(always)]
    fn sigmoid(self) -> Self {
        Self::one() / (Self::one() + (-self).exp_quick())
    }

    /// `x` times its logistic function.
    #[inline(always)]
    fn silu(self) -> Self {
        self / (Self::one() + (-self).exp_quick())
    }
}

impl Float for f32 {
    #[inline(always)]
    fn of(value: f64) -> Self {
        value as f32
    }
    #[inline(always)]
    fn wide(self) -> f64 {
        f64::from(self)
    }
    #[inline(always)]
    fn exp_quick(self) -> Self {
        // e^x = 2^n * e^r, |r| <= ln(2)/2, with e^r = 1 + r + r^2 p(r): of all p of
        // degree 4 the one with the least relative error, 3e-9.
        // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits of the sum.
        const SHIFT: f32 = 12_582_912.0;
        let x = if self < -87.0 { -87.0 } else { self };
        let x = if x > 88.37 { 88.37 } else { x };
        let shifted = x.mul_add(std::f32::consts::LOG2_E, SHIFT);
        let n = shifted - SHIFT;
        let r = n.mul_add(-0.693_359_4, x);
        let r = n.mul_add(2.121_944_4e-4, r);
        let p = 0.0013814539f32;
        let p = p.mul_add(r, 0.008368745);
        let p = p.mul_add(r, 0.04166839);
        let p = p.mul_add(r, 0.16666521);
        let p = p.mul_add(r, 0.49999994);
        let p = p.mul_add(r * r, r) + 1.0;
        f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23))
    }
    fn values_mut(storage: &mut CpuStorage) -> Option<&mut Vec<Self>> {
        match storage {
            CpuStorage::F32(values) => Some(values),
            _ => None,
        }
    }
}

impl Float for f64 {
    #[inline(always)]
    fn of(value: f64) -> Self {
        value
    }
    #[inline(always)]
    fn wide(self) -> f64 {
        self
    }
    #[inline(always)]
    fn exp_quick(self) -> Self {
        self.exp()
    }
    fn values_mut(storage: &mut CpuStorage) -> Option<&mut Vec<Self>> {
        match storage {
            CpuStorage::F64(values) => Some(values),
            _ => None,
        }
    }
}

/// Runs `$body` with the type alias `$T` set to f32 or f64 after a [`DType`]; other types are an error.
macro_rules! dispatch {
    ($dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $T = f64;
                $body
            }
            other => Err($crate::kernels::unsupported(other)),
        }
    };
}
pub(crate) use dispatch;

/// Does the work of a function by the one of that name in `cuda` where a tensor lies on a device.
macro_rules! on_gpu {
    ($tensor:expr, $($call:tt)+) => {
        #[cfg(any(test, feature = "cuda"))]
        if $crate::kernels::cuda::holds($tensor) {
            return $crate::kernels::cuda::$($call)+;
        }
    };
}
pub(crate) use on_gpu;

/// Whether this device is one that the kernels in `cuda` are for.
pub(crate) fn is_gpu(device: &Device) -> bool {
    #[cfg(any(test, feature = "cuda"))]
    return cuda::is_for(device);
    #[cfg(not(any(test, feature = "cuda")))]
    device.is_cuda()
}

/// Does something that is done on the CPU whatever the device, with tensors on the CPU.
pub(crate) fn on_cpu<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(test)]
    return cuda::emulator::with(false, work);
    #[cfg(not(test))]
    work()
}

/// An error in a thread that emulates a device: a kernel for the CPU would not work there.
fn no_device() -> Result<()> {
    #[cfg(test)]
    if cuda::emulator::is_on() {
        return Err(Error::Input(
            "a kernel for the CPU was given a tensor on a device".into(),
        ));
    }
    Ok(())
}

pub(crate) fn unsupported(dtype: DType) -> Error {
    Error::Input(format!(
        "data type {} is not supported on the CPU; use f32 or f64",
        dtype.as_str()
    ))
}

/// The values of a contiguous CPU tensor; holds its read lock.
pub struct Slice<'a, T> {
    /// Candle's read guard, whose type candle does not name.
    storage: Box<dyn Deref<Target = Storage> + 'a>,
    range: Range<usize>,
    element: PhantomData<T>,
}

impl<T: Float> Deref for Slice<'_, T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &**self.storage {
            // `slice` checked device and type; the lock keeps both as they are.
            Storage::Cpu(values) => &values.as_slice::<T>().expect("type was checked")[self.range.clone()],
            _ => unreachable!("device was checked"),
        }
    }
}

/// The values of a tensor that is on the CPU, contiguous and of type `T`. Dereference it once, before a loop.
pub fn slice<T: Float>(tensor: &Tensor) -> Result<Slice<'_, T>> {
    no_device()?;
    let (storage, layout) = tensor.storage_and_layout();
    let (start, end) = layout
        .contiguous_offsets()
        .ok_or_else(|| Error::Input(format!("tensor of shape {:?} is not contiguous", tensor.dims())))?;
    match &*storage {
        Storage::Cpu(values) => {
            values.as_slice::<T>()?;
        }
        _ => return Err(Error::Input("kernel has no version for this device".into())),
    }
    Ok(Slice {
        storage: Box::new(storage),
        range: start..end,
        element: PhantomData,
    })
}

/// A CPU tensor made of `values` without a copy.
pub fn tensor<T: Float>(values: Vec<T>, shape: impl Into<Shape>) -> Result<Tensor> {
    no_device()?;
    Ok(Tensor::from_vec(values, shape.into(), &Device::Cpu)?)
}

struct Modify<T, F> {
    change: F,
    element: PhantomData<T>,
}

impl<T: Float, F: Fn(&mut [T])> InplaceOp1 for Modify<T, F> {
    fn name(&self) -> &'static str {
        "modify"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let (start, end) = layout
            .contiguous_offsets()
            .ok_or_else(|| candle_core::Error::Msg("tensor to change is not contiguous".into()))?;
        let values = T::values_mut(storage)
            .ok_or_else(|| candle_core::Error::Msg("tensor to change has another type".into()))?;
        (self.change)(&mut values[start..end]);
        Ok(())
    }
}

/// Changes the values of a contiguous CPU tensor in place. Every tensor that shares its storage changes too; a tensor
/// read inside `change` must not be one of them.
pub fn modify<T: Float>(tensor: &Tensor, change: impl Fn(&mut [T])) -> Result<()> {
    no_device()?;
    tensor.inplace_op1(&Modify {
        change,
        element: PhantomData,
    })?;
    Ok(())
}

/// Rows per piece of work for rows of `width` elements: about 8192 elements.
pub(crate) fn rows_per_piece(width: usize) -> usize {
    (8192 / width.max(1)).max(1)
}

/// Sums of `width` accumulators over pieces of `rows` rows: `add(rows, sums)` adds the given rows to the sums. Pieces
/// depend on `rows` alone, and their sums are added in order.
pub(crate) fn sum_over_rows<T: Float>(
    rows: usize,
    width: usize,
    add: impl Fn(Range<usize>, &mut [T]) + Sync,
) -> Vec<T> {
    // At most 32 pieces, so that adding them up stays cheap beside the work.
    let piece = rows.div_ceil(32).max(16);
    let count = rows.div_ceil(piece).max(1);
    let mut partial = vec![T::zero(); count * width];
    partial
        .par_chunks_mut(width.max(1))
        .enumerate()
        .for_each(|(index, sums)| {
            add(index * piece..((index + 1) * piece).min(rows), sums);
        });
    total(&partial, width)
}

/// Zeros where nothing was written yet.
///
/// Whoever fills a new tensor does so piece by piece, with the piece zeroed just before: the zeros are then still in
/// the cache when they are overwritten, where `vec![0.0; n]` would send them through memory.
fn zeroed<T: Float>(piece: &mut [MaybeUninit<T>]) -> &mut [T] {
    piece.fill(MaybeUninit::new(T::zero()));
    // SAFETY: every element was written just now.
    unsafe { written(piece) }
}

/// `len` values, cut into pieces of `piece` (the last may be shorter): `fill(number, piece)` changes each from zeros.
pub(crate) fn by_pieces<T: Float>(len: usize, piece: usize, fill: impl Fn(usize, &mut [T]) + Sync) -> Vec<T> {
    let mut out = Vec::with_capacity(len);
    out.spare_capacity_mut()[..len]
        .par_chunks_mut(piece.max(1))
        .enumerate()
        .for_each(|(number, piece)| fill(number, zeroed(piece)));
    // SAFETY: the pieces are all of the first `len` elements, and each was initialised by `zeroed`.
    unsafe { out.set_len(len) };
    out
}

/// # Safety
///
/// Every element must have been written.
unsafe fn written<T: Float>(values: &mut [MaybeUninit<T>]) -> &mut [T] {
    // SAFETY: the caller's promise; `MaybeUninit<T>` has the layout of `T`.
    unsafe { &mut *(values as *mut [MaybeUninit<T>] as *mut [T]) }
}

/// What `f` makes of the elements at one place of slices of one length, in pieces of `piece`; `finish(first, piece)` may
/// change a piece while it is still in the cache.
pub(crate) fn mapped<T: Float, const N: usize>(
    slices: [&[T]; N],
    piece: usize,
    f: impl Fn([T; N]) -> T + Sync,
    finish: impl Fn(usize, &mut [T]) + Sync,
) -> Vec<T> {
    let len = slices.iter().map(|slice| slice.len()).min().unwrap_or(0);
    let mut out = Vec::with_capacity(len);
    out.spare_capacity_mut()[..len]
        .par_chunks_mut(piece.max(1))
        .enumerate()
        .for_each(|(number, out)| {
            widest!({
                let first = number * piece;
                let slices = slices.map(|slice| &slice[first..first + out.len()]);
                for (i, out) in out.iter_mut().enumerate() {
                    out.write(f(slices.map(|slice| slice[i])));
                }
                // SAFETY: every element was written just now.
                finish(first, unsafe { written(out) });
            })
        });
    // SAFETY: the pieces are all of the first `len` elements, and each was written wholly.
    unsafe { out.set_len(len) };
    out
}

/// `len` values that `fill` writes, all of them.
pub(crate) fn filled(len: usize, fill: impl FnOnce(&mut [MaybeUninit<f32>])) -> Vec<f32> {
    let mut out = Vec::with_capacity(len);
    fill(&mut out.spare_capacity_mut()[..len]);
    // SAFETY: `fill` wrote all of them; the only one that calls this is the matrix product, which does by its contract.
    unsafe { out.set_len(len) };
    out
}

/// Two results of `rows` rows, `widths` wide, made together: `fill(first row, rows of one, rows of other)`.
pub(crate) fn two_by_rows<T: Float>(
    rows: usize,
    widths: [usize; 2],
    fill: impl Fn(usize, &mut [T], &mut [T]) + Sync,
) -> (Vec<T>, Vec<T>) {
    if widths.contains(&0) {
        // Nothing to cut into rows.
        return (vec![T::zero(); rows * widths[0]], vec![T::zero(); rows * widths[1]]);
    }
    let per_piece = rows_per_piece(widths[0].max(widths[1]));
    let (mut one, mut other) = (Vec::new(), Vec::new());
    one.reserve_exact(rows * widths[0]);
    other.reserve_exact(rows * widths[1]);
    one.spare_capacity_mut()[..rows * widths[0]]
        .par_chunks_mut((per_piece * widths[0]).max(1))
        .zip(other.spare_capacity_mut()[..rows * widths[1]].par_chunks_mut((per_piece * widths[1]).max(1)))
        .enumerate()
        .for_each(|(number, (one, other))| fill(number * per_piece, zeroed(one), zeroed(other)));
    // SAFETY: both have the same number of pieces, as no width is zero, and `zeroed` initialised each.
    unsafe {
        one.set_len(rows * widths[0]);
        other.set_len(rows * widths[1]);
    }
    (one, other)
}

/// A result of `rows` rows of `width`, and sums over rows that are found on the way: `fill(rows, their part of the
/// result, sums)` adds to `sums`, which are `sums` long. Pieces are those of [`sum_over_rows`].
pub(crate) fn rows_and_sums<T: Float>(
    rows: usize,
    width: usize,
    sums: usize,
    fill: impl Fn(Range<usize>, &mut [T], &mut [T]) + Sync,
) -> (Vec<T>, Vec<T>) {
    if width == 0 || sums == 0 {
        // Nothing to cut into rows.
        return (vec![T::zero(); rows * width], vec![T::zero(); sums]);
    }
    let piece = rows.div_ceil(32).max(16);
    let count = rows.div_ceil(piece).max(1);
    let block = rows_per_piece(width);
    let mut partial = vec![T::zero(); count * sums];
    let mut out = Vec::with_capacity(rows * width);
    out.spare_capacity_mut()[..rows * width]
        .par_chunks_mut((piece * width).max(1))
        .zip(partial.par_chunks_mut(sums.max(1)))
        .enumerate()
        .for_each(|(number, (out, sums))| {
            for (at, out) in out.chunks_mut((block * width).max(1)).enumerate() {
                let first = number * piece + at * block;
                let here = first..first + out.len() / width.max(1);
                fill(here, zeroed(out), sums);
            }
        });
    // SAFETY: there is a piece of `partial` for each piece of `out`, so `zeroed` initialised all of it.
    unsafe { out.set_len(rows * width) };
    (out, total(&partial, sums))
}

/// Partial sums of `width` each, added in order.
fn total<T: Float>(partial: &[T], width: usize) -> Vec<T> {
    let mut total = partial[..width].to_vec();
    for sums in partial[width..].chunks_exact(width.max(1)) {
        for (total, &sum) in total.iter_mut().zip(sums) {
            *total += sum;
        }
    }
    total
}

/// Independent partial sums of a reduction: enough for a vector of any processor.
pub(crate) const LANES: usize = 16;

/// Sum of `f` over the elements of slices of one length, in interleaved sums so that it can be vectorised.
#[inline(always)]
pub(crate) fn sum_of<T: Float, const N: usize>(slices: [&[T]; N], f: impl Fn([T; N]) -> T) -> T {
    // Arrays by value: the compiler keeps those in registers.
    let (mut even, mut odd) = ([T::zero(); LANES], [T::zero(); LANES]);
    let mut rest = slices;
    while rest[0].len() >= 2 * LANES {
        let block = rest.map(|slice| &slice[..2 * LANES]);
        rest = rest.map(|slice| &slice[2 * LANES..]);
        even = from_fn(|lane| even[lane] + f(block.map(|slice| slice[lane])));
        odd = from_fn(|lane| odd[lane] + f(block.map(|slice| slice[LANES + lane])));
    }
    let mut sums: [T; LANES] = from_fn(|lane| even[lane] + odd[lane]);
    for i in 0..rest[0].len() {
        sums[i % LANES] += f(rest.map(|slice| slice[i]));
    }
    sum_lanes(sums)
}

/// Sum of all lanes, in a fixed order.
#[inline(always)]
pub(crate) fn sum_lanes<T: Float>(lanes: [T; LANES]) -> T {
    let eight: [T; 8] = from_fn(|lane| lanes[lane] + lanes[lane + 8]);
    let four: [T; 4] = from_fn(|lane| eight[lane] + eight[lane + 4]);
    (four[0] + four[2]) + (four[1] + four[3])
}

/// Runs a block with the widest vectors that the processor has. What it computes is the same to the bit: the order of
/// sums is written out in the code, and no multiplication is contracted with an addition unless the code says so.
///
/// The block stands twice in the program, so that each copy is compiled for its processor.
macro_rules! widest {
    ($body:expr) => {{
        #[cfg(target_arch = "x86_64")]
        {
            if $crate::kernels::has_avx512() {
                let work = || $body;
                // SAFETY: the processor has what the function is compiled for.
                unsafe { $crate::kernels::with_avx512(work) }
            } else {
                $body
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            $body
        }
    }};
}
pub(crate) use widest;

/// Whether [`with_avx512`] may be called.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

/// Calls `work`, which is inlined and so compiled for AVX-512.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(crate) fn with_avx512<R>(work: impl FnOnce() -> R) -> R {
    work()
}

#[cfg(test)]
pub(crate) mod testing {
    //! Finite differences for hand-written backward passes.

    use candle_core::{Device, Tensor};

    use crate::error::Result;
    use crate::noise::Noise;

    /// A tensor of standard normal values in f64.
    pub fn normal(shape: &[usize], noise: &mut Noise) -> Tensor {
        let values: Vec<f64> = (0..shape.iter().product()).map(|_| noise.normal()).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
    }

    /// Values of a tensor in f64, row-major.
    pub fn values(tensor: &Tensor) -> Vec<f64> {
        tensor
            .flatten_all()
            .unwrap()
            .to_dtype(candle_core::DType::F64)
            .unwrap()
            .to_vec1()
            .unwrap()
    }

    /// Largest absolute difference of two tensors of one shape.
    pub fn max_difference(a: &Tensor, b: &Tensor) -> f64 {
        assert_eq!(a.dims(), b.dims());
        let difference = values(a)
            .iter()
            .zip(values(b))
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, |m: f64, d| if d.is_nan() { f64::NAN } else { m.max(d) });
        assert!(!difference.is_nan(), "not a number");
        difference
    }

    /// Checks `gradient` of `sum(output(x) * weight)` at `x` by central differences in f64, on up to 40 elements
    /// spread over `x`. The bound, 1e-6 of the largest gradient plus 1e-8, is a few hundred times the truncation error
    /// of a step of 1e-5 for functions whose third derivative is of order one.
    pub fn check_gradient(
        what: &str,
        x: &Tensor,
        weight: &Tensor,
        gradient: &Tensor,
        output: impl Fn(&Tensor) -> Result<Tensor>,
    ) {
        assert_eq!(x.dims(), gradient.dims(), "{what}: shape of the gradient");
        let weight = values(weight);
        let objective = |x: &[f64]| -> f64 {
            let x = Tensor::from_slice(x, gradient.dims(), &Device::Cpu).unwrap();
            let y = values(&output(&x).unwrap());
            assert_eq!(y.len(), weight.len(), "{what}: shape of the output");
            y.iter().zip(&weight).map(|(a, b)| a * b).sum()
        };
        let point = values(x);
        let gradient_values = values(gradient);
        let largest = gradient_values.iter().fold(0.0f64, |m, g| m.max(g.abs()));
        let step = 1e-5;
        let stride = (point.len() / 40).max(1);
        for index in (0..point.len()).step_by(stride) {
            let mut moved = point.clone();
            moved[index] = point[index] + step;
            let up = objective(&moved);
            moved[index] = point[index] - step;
            let down = objective(&moved);
            let expected = (up - down) / (2.0 * step);
            let found = gradient_values[index];
            assert!(
                (expected - found).abs() <= 1e-6 * largest.max(1.0) + 1e-8,
                "{what}: element {index}: finite difference {expected}, gradient {found}"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_results_of_any_size_and_start_at_zero() {
        for (rows, width) in [(0, 3), (1, 1), (17, 5), (100, 3), (1000, 7), (5, 20_000), (40, 0)] {
            let add_one = |values: &mut [f64]| values.iter_mut().for_each(|value| *value += 1.0);
            let ones = vec![1.0; rows * width];
            assert_eq!(by_pieces(rows * width, 13, |_, piece| add_one(piece)), ones);
            let (one, other) = two_by_rows(rows, [width, 2], |first, one, other| {
                add_one(one);
                let here = other.chunks_exact_mut(2).enumerate();
                here.for_each(|(row, other)| other[1] = (first + row) as f64);
            });
            assert_eq!(one, ones);
            assert_eq!(other.len(), 2 * rows);
            let numbered = |(row, pair): (usize, &[f64])| pair == [0.0, row as f64];
            assert!(width == 0 || other.chunks_exact(2).enumerate().all(numbered));
            let (out, sums) = rows_and_sums(rows, width, 2, |rows, out: &mut [f64], sums| {
                assert_eq!(out.len(), rows.len() * width);
                add_one(out);
                sums[0] += rows.len() as f64;
                sums[1] += rows.sum::<usize>() as f64;
            });
            assert_eq!(out, ones);
            if width > 0 {
                assert_eq!(sums, [rows as f64, (0..rows).sum::<usize>() as f64]);
            }
        }
        for count in [0, 1, 31, 32, 33, 100] {
            let values: Vec<f64> = (0..count).map(|i| i as f64).collect();
            let expected: f64 = values.iter().map(|x| x * x).sum();
            assert_eq!(sum_of([&values, &values], |[a, b]| a * b), expected);
        }
    }

    #[test]
    fn quick_exponential_is_close_and_keeps_nan() {
        let mut worst = 0.0f64;
        for step in -8_699..8_836 {
            let x = step as f32 * 0.01 + 0.003_7;
            if !(-87.0..88.37).contains(&x) {
                continue;
            }
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(x.exp_quick()) - exact).abs() / exact);
        }
        // Two units in the last place of f32.
        assert!(worst < 2.4e-7, "{worst}");
        assert!(f32::NAN.exp_quick().is_nan());
        assert!(f32::NEG_INFINITY.exp_quick() < 2e-38);
        assert!(f32::INFINITY.exp_quick() > 2e38);
        assert!((0.0f32.exp_quick() - 1.0).abs() == 0.0);
    }
}
