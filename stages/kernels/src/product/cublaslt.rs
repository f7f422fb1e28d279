//! cuBLASLt: products of factors in f32 or bf16 whose sums are in f32 and whose results are in f32, or in bf16 as their factors;
//! also of stacks of matrices, which add to what is there, or a bias to each row. What computes a product of given shapes is chosen
//! once for each device.
//!
//! Its functions are looked up in its shared library when they are first needed. Where the library is missing, has nothing for a
//! product, or the environment variable `FLOW_CUBLASLT` is `off`, products are cuBLAS's. In tests the functions are those of a
//! stand-in (`flow-cuda-emulator`).

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, PoisonError};

use candle_core::{DType, Device, Tensor};

use crate::device::cublaslt::{
    Algorithm, BATCH_COUNT, BIAS_POINTER, COMPUTE_32F, COMPUTE_32F_FAST_TF32, Chosen, EPILOGUE, EPILOGUE_BIAS, Library,
    MAX_WORKSPACE_BYTES, MIN_ALIGNMENT_A_BYTES, Made, NOT_SUPPORTED, R_16BF, R_32F, Raw, STRIDED_BATCH_OFFSET, SUCCESS,
    TRANSA, TRANSB,
};

pub use crate::device::cublaslt::{check, set_used};
use crate::device::executor::executor;
use crate::device::placed::Placed;
use crate::device::{PerDevice, tf32 as tf32_on};
use crate::error::{Error, Result};
use crate::timings;

/// Plans that are kept for a device, at most.
const MOST_PLANS: usize = 4096;

/// How many of the library's choices can be asked for.
const MOST_CHOICES: usize = 8;

/// What a plan is made for. Everything that the library is told but addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    a: Placed,
    b: Placed,
    /// Of the factors.
    dtype: DType,
    /// Of the result.
    of_result: DType,
    tf32: bool,
    /// What the addresses of `b`, `a` and the result are multiples of.
    aligned: [u32; 3],
    /// The same of the bias, if there is one: the library looks at its address when it chooses.
    bias: Option<u32>,
    /// Which of the library's choices is taken, from 0 on.
    choice: usize,
}

/// What the library is told of a product. It needs no device.
struct Described {
    descriptor: Made,
    /// Those of A, B and the result.
    layouts: [Made; 3],
    preference: Made,
}

impl Described {
    /// None for factors or a result of a type that is not the library's.
    ///
    /// What is row-major to us is transposed to the library, whose matrices are column-major: it computes the transposed product,
    /// whose first factor, A, is our second one.
    fn new(library: &Library, shape: &Shape, bias: u64, workspace: usize) -> Result<Option<Self>> {
        let Shape { a, b, dtype, .. } = *shape;
        let kind = |dtype: DType| match dtype {
            DType::F32 => Some(R_32F),
            DType::BF16 => Some(R_16BF),
            _ => None,
        };
        let (Some(kind), Some(of_result)) = (kind(dtype), kind(shape.of_result)) else {
            return Ok(None);
        };
        let compute = if shape.tf32 { COMPUTE_32F_FAST_TF32 } else { COMPUTE_32F };
        let descriptor = Made::new(library, library.set_descriptor, library.destroy_descriptor, |to| {
            // SAFETY: there is room for an address. So in the others.
            unsafe { (library.create_descriptor)(to, compute, R_32F) }
        })?;
        descriptor.set(library, TRANSA, c_int::from(b.transposed))?;
        descriptor.set(library, TRANSB, c_int::from(a.transposed))?;
        if shape.bias.is_some() {
            descriptor.set(library, EPILOGUE, EPILOGUE_BIAS)?;
            // Its numbers are of the type of the result.
            descriptor.set(library, BIAS_POINTER, bias)?;
        }
        let result = Placed {
            rows: a.rows,
            columns: b.columns,
            transposed: false,
            leading: b.columns,
            count: a.count,
            step: a.rows * b.columns,
        };
        let layout = |of: Placed, kind: c_int| -> Result<Made> {
            let (rows, columns) = match of.transposed {
                true => (of.rows, of.columns),
                false => (of.columns, of.rows),
            };
            let made = Made::new(library, library.set_layout, library.destroy_layout, |to| {
                // SAFETY: as above.
                unsafe { (library.create_layout)(to, kind, rows as u64, columns as u64, of.leading as i64) }
            })?;
            if of.count > 1 {
                let count = c_int::try_from(of.count)
                    .map_err(|_| Error::Input(format!("a product of {} matrices", of.count)))?;
                made.set(library, BATCH_COUNT, count)?;
                made.set(library, STRIDED_BATCH_OFFSET, of.step as i64)?;
            }
            Ok(made)
        };
        let layouts = [layout(b, kind)?, layout(a, kind)?, layout(result, of_result)?];
        let preference = Made::new(library, library.set_preference, library.destroy_preference, |to| {
            // SAFETY: as above.
            unsafe { (library.create_preference)(to) }
        })?;
        preference.set(library, MAX_WORKSPACE_BYTES, workspace)?;
        // Of C, too, which is the result.
        let [of_a, of_b, of_result] = shape.aligned;
        for (attribute, aligned) in (MIN_ALIGNMENT_A_BYTES..).zip([of_a, of_b, of_result, of_result]) {
            preference.set(library, attribute, aligned)?;
        }
        Ok(Some(Self {
            descriptor,
            layouts,
            preference,
        }))
    }
}

/// How a product is computed.
struct Plan {
    descriptor: Made,
    /// Those of A, B and the result.
    layouts: [Made; 3],
    algorithm: Algorithm,
}

/// The library on one device.
struct Handle {
    library: &'static Library,
    raw: Raw,
    /// One is enough: products on a device come one after another.
    workspace: Tensor,
    plans: Mutex<Plans>,
}

/// Plans by what they are for; at most [`MOST_PLANS`].
#[derive(Default)]
struct Plans {
    by_shape: HashMap<Shape, Known>,
    /// How often one was asked for.
    asked: u64,
}

struct Known {
    /// None for what the library does not take.
    plan: Option<Plan>,
    /// When it was asked for last.
    last: u64,
}

impl Plans {
    /// That of a shape, which `make` makes if there is none; the one that was not asked for the longest then gives way where there are
    /// too many.
    fn get(&mut self, shape: &Shape, make: impl FnOnce() -> Result<Option<Plan>>) -> Result<&mut Option<Plan>> {
        self.asked += 1;
        let last = self.asked;
        if !self.by_shape.contains_key(shape) && self.by_shape.len() >= MOST_PLANS {
            let oldest = self.by_shape.iter().min_by_key(|(_, known)| known.last);
            if let Some(oldest) = oldest.map(|(&shape, _)| shape) {
                self.by_shape.remove(&oldest);
            }
        }
        let known = match self.by_shape.entry(*shape) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(Known { plan: make()?, last }),
        };
        known.last = last;
        Ok(&mut known.plan)
    }
}

// SAFETY: the library's functions may be called by any thread, several at a time also with one handle. What describes a product
// is used under the lock alone.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    /// The calling thread's CUDA context is that of the device.
    fn new(library: &'static Library, device: &Device) -> Result<Self> {
        let workspace = Tensor::zeros(executor().workspace(), DType::U8, device)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: there is room for the handle.
        library.check("a handle", unsafe { (library.create)(&raw mut raw) })?;
        Ok(Self {
            library,
            raw,
            workspace,
            plans: Mutex::default(),
        })
    }

    /// None where the library has nothing for it.
    fn plan(&self, shape: &Shape, bias: u64) -> Result<Option<Plan>> {
        let library = self.library;
        let Some(described) = Described::new(library, shape, bias, self.workspace.elem_count())? else {
            return Ok(None);
        };
        let Described {
            descriptor,
            layouts,
            preference,
        } = described;
        let none = Chosen {
            algorithm: [0; 8],
            workspace: 0,
            state: NOT_SUPPORTED,
            waves: 0.0,
            reserved: [0; 4],
        };
        let mut chosen = vec![none; shape.choice + 1];
        let mut found = 0;
        let [of_a, of_b, of_result] = layouts.each_ref().map(|layout| layout.raw);
        // SAFETY: all of them were made and are not destroyed, and there is room for as many answers as are asked for.
        let status = unsafe {
            (library.choose)(
                self.raw,
                descriptor.raw,
                of_a,
                of_b,
                of_result,
                of_result,
                preference.raw,
                chosen.len() as c_int,
                chosen.as_mut_ptr(),
                &raw mut found,
            )
        };
        if status != NOT_SUPPORTED {
            library.check("a choice", status)?;
        }
        let found = usize::try_from(found).unwrap_or(0).min(chosen.len());
        let Some(chosen) = chosen[..found].last().filter(|last| last.state == SUCCESS) else {
            return Ok(None);
        };
        Ok(Some(Plan {
            descriptor,
            layouts,
            algorithm: chosen.algorithm,
        }))
    }

    /// Whether the library took the product.
    fn multiply(&self, shape: &Shape, addresses: [u64; 3], bias: u64, beta: f32, stream: Raw) -> Result<bool> {
        let library = self.library;
        // Plans are inserted whole.
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let known = plans.get(shape, || self.plan(shape, bias))?;
        let Some(plan) = known else {
            return Ok(false);
        };
        if shape.bias.is_some() {
            plan.descriptor.set(library, BIAS_POINTER, bias)?;
        }
        let alpha = 1.0f32;
        let [a, b, result] = addresses;
        let [of_a, of_b, of_result] = plan.layouts.each_ref().map(|layout| layout.raw);
        // SAFETY: the matrices lie whole within tensors that the caller holds, on this device, as the layouts say. The stream is the
        // device's only one, so that nothing else uses the workspace, or memory that is given back, before the product is there.
        let status = unsafe {
            (library.multiply)(
                self.raw,
                plan.descriptor.raw,
                &raw const alpha,
                a as *const c_void,
                of_a,
                b as *const c_void,
                of_b,
                &raw const beta,
                result as *const c_void,
                of_result,
                result as Raw,
                of_result,
                &raw const plan.algorithm,
                executor().address(&self.workspace, self.workspace.device())? as Raw,
                self.workspace.elem_count(),
                stream,
            )
        };
        if status == NOT_SUPPORTED {
            // Nothing was started, and others take it from now on.
            *known = None;
            return Ok(false);
        }
        library.check("a matrix product", status)?;
        Ok(true)
    }
}

static CHOICE: AtomicUsize = AtomicUsize::new(0);

/// From now on products take this one of the library's choices, counted from 0, or the last where there are fewer; none: the first,
/// which it thinks the fastest. For benchmarks.
pub fn set_choice(choice: Option<usize>) {
    CHOICE.store(choice.unwrap_or(0).min(MOST_CHOICES - 1), Ordering::Relaxed);
}

/// Whether there is a library for tensors of this thread.
pub(super) fn is_there() -> bool {
    executor().cublaslt().is_some()
}

/// `out = beta out + a b`, with `bias` added to each row: whether cuBLASLt computes it. `out` is contiguous, and fits; it is in f32,
/// or where there is no bias in the type of the factors.
pub(super) fn multiply(out: &Tensor, a: &Tensor, b: &Tensor, bias: Option<&Tensor>, beta: f32) -> Result<bool> {
    static HANDLES: LazyLock<PerDevice<Handle>> = LazyLock::new(PerDevice::default);
    let dtype = a.dtype();
    let (Some(library), Some(of_a), Some(of_b)) = (executor().cublaslt(), Placed::of(a), Placed::of(b)) else {
        return Ok(false);
    };
    if dtype != b.dtype() || of_a.count != of_b.count || out.elem_count() == 0 || of_a.columns == 0 {
        return Ok(false);
    }
    if bias.is_some_and(|bias| bias.dtype() != out.dtype() || !bias.is_contiguous()) {
        return Ok(false);
    }
    let on = |tensor: &Tensor| executor().address(tensor, out.device());
    let addresses = [on(b)?, on(a)?, on(out)?];
    let of_bias = bias.map(on).transpose()?;
    let most = executor().most_aligned();
    let aligned = |address: u64| (1 << address.trailing_zeros().min(63)).min(most) as u32;
    let shape = Shape {
        a: of_a,
        b: of_b,
        dtype,
        of_result: out.dtype(),
        tf32: dtype == DType::F32 && tf32_on(out.device()),
        aligned: addresses.map(aligned),
        bias: of_bias.map(aligned),
        choice: CHOICE.load(Ordering::Relaxed),
    };
    let stream = executor().stream(out.device())?;
    let handle = HANDLES.get(out.device(), || Handle::new(library, out.device()))?;
    let described = || timings::product(out, a, b);
    timings::around(out.device(), described, || {
        handle.multiply(&shape, addresses, of_bias.unwrap_or(0), beta, stream)
    })
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;
    use crate::counts::counted;
    use crate::device::{is_out_of_memory, set_tf32};
    use crate::flow_cuda_emulator::cublaslt::{Counted, Fault, count, set_fault};
    use crate::flow_cuda_emulator::{DeviceUnderTest, cublaslt as stand_in, emulator};
    use crate::is_gpu;
    use crate::noise::Noise;
    use crate::product::{
        StackedProducts, add_product_in, product, product_in, product_rounded_in, product_with_bias_in,
    };
    use crate::testing::{normal, values};

    /// With the stand-in, or on a device with the library there. One at a time: plans are those of the process.
    fn with_library<R>(work: impl FnOnce(&Device) -> R) -> R {
        static LOCK: Mutex<()> = Mutex::new(());
        let _guard = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let device = DeviceUnderTest::get();
        match device.is_emulated() {
            true => stand_in::with(|| device.run(work)),
            false => device.run(work),
        }
    }

    /// A matrix or a stack of them on a device, whose rows, or columns, are `gap` further apart than they need be, with NaN
    /// between them; and its values.
    fn matrix(
        shape: &[usize],
        transposed: bool,
        gap: usize,
        dtype: DType,
        device: &Device,
        noise: &mut Noise,
    ) -> Tensor {
        let (rank, mut wide) = (shape.len(), shape.to_vec());
        if transposed {
            wide.swap(rank - 1, rank - 2);
        }
        let inner = normal(&wide, noise).to_dtype(dtype).unwrap();
        let width = wide[rank - 1];
        wide[rank - 1] = gap;
        let made = match gap {
            0 => inner,
            _ => {
                let between = Tensor::new(f32::NAN, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                // Along an axis behind the first one it is a view of what is transposed.
                let both = Tensor::cat(&[&inner, &between.broadcast_as(wide).unwrap()], rank - 1).unwrap();
                both.contiguous().unwrap()
            }
        };
        let made = made.to_device(device).unwrap().narrow(rank - 1, 0, width).unwrap();
        if transposed {
            made.transpose(rank - 1, rank - 2).unwrap()
        } else {
            made
        }
    }

    /// `beta sum + a b + bias` in 64 bits.
    fn expected(a: &Tensor, b: &Tensor, sum: Option<&Tensor>, bias: Option<&Tensor>) -> Vec<f64> {
        let wide = |x: &Tensor| {
            x.to_device(&Device::Cpu)
                .unwrap()
                .to_dtype(DType::F64)
                .unwrap()
                .contiguous()
                .unwrap()
        };
        let mut out = wide(a).matmul(&wide(b)).unwrap();
        for added in [sum, bias].into_iter().flatten() {
            out = out.broadcast_add(&wide(added)).unwrap();
        }
        values(&out)
    }

    fn check_near(what: &str, bound: f64, found: &Tensor, expected: &[f64]) {
        assert_eq!(found.dtype(), DType::F32, "{what}");
        check_values(what, bound, found, expected);
    }

    fn check_values(what: &str, bound: f64, found: &Tensor, expected: &[f64]) {
        let found = values(&found.to_device(&Device::Cpu).unwrap());
        assert_eq!(found.len(), expected.len(), "{what}");
        let largest = expected.iter().fold(1.0f64, |largest, value| largest.max(value.abs()));
        for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
            assert!(
                (found - expected).abs() <= bound * largest,
                "{what}: {at}: {found}, not {expected}"
            );
        }
    }

    /// Products of the stand-in, where it is what computes them.
    fn by_stand_in() -> Option<u64> {
        DeviceUnderTest::get().is_emulated().then(|| count(Counted::Products))
    }

    #[test]
    fn products_are_sums_of_all_layouts() {
        let mut noise = Noise::new(61);
        with_library(|device| {
            for dtype in [DType::F32, DType::BF16] {
                for ([m, k, n], transposed, gap) in [
                    ([3, 5, 7], [false, false], 0),
                    ([4, 17, 2], [true, false], 3),
                    ([2, 64, 9], [false, true], 8),
                    ([33, 8, 16], [true, true], 1),
                    ([1, 6, 5], [false, true], 2),
                    ([5, 1, 1], [true, false], 4),
                    ([1, 1, 4], [false, false], 5),
                ] {
                    let what = format!("{dtype:?}, {m} x {k} x {n}, transposed {transposed:?}, {gap} between rows");
                    let mut made =
                        |shape: &[usize], at: usize| matrix(shape, transposed[at], gap, dtype, device, &mut noise);
                    let (a, b) = (made(&[m, k], 0), made(&[k, n], 1));
                    let (stacked_a, stacked_b) = (made(&[3, 2, m, k], 0), made(&[3, 2, k, n], 1));
                    let mut single = |shape: &[usize]| matrix(shape, false, 0, DType::F32, device, &mut noise);
                    let (sum, bias) = (single(&[m, n]), single(&[1, n]).flatten_all().unwrap());
                    let before = by_stand_in();
                    // In f32 by that for products in one type, which also is for stacks.
                    let (found, stack) = match dtype {
                        DType::F32 => (product(&a, &b).unwrap(), product(&stacked_a, &stacked_b).unwrap()),
                        _ => (
                            product_in(dtype, &a, &b).unwrap(),
                            product_in(dtype, &stacked_a, &stacked_b).unwrap(),
                        ),
                    };
                    check_near(&what, 1e-6, &found, &expected(&a, &b, None, None));
                    check_near(&what, 1e-6, &stack, &expected(&stacked_a, &stacked_b, None, None));
                    let (found, counts) = counted(|| product_with_bias_in(dtype, &a, &b, &bias).unwrap());
                    check_near(&what, 1e-6, &found, &expected(&a, &b, None, Some(&bias)));
                    // No kernel added it.
                    assert_eq!((counts.products, counts.launches()), (1, 0), "{what}");
                    let all = expected(&a, &b, Some(&sum), None);
                    add_product_in(dtype, &sum, &a, &b).unwrap();
                    check_near(&what, 1e-6, &sum, &all);
                    // Rounded to the factors' type.
                    let rounded = product_rounded_in(dtype, &a, &b).unwrap();
                    assert_eq!(rounded.dtype(), dtype);
                    let bound = if dtype == DType::F32 { 1e-6 } else { 1.0 / 256.0 };
                    check_values(&what, bound, &rounded, &expected(&a, &b, None, None));
                    // To rows that begin where they begin.
                    let mut rows = StackedProducts::new(2 * m, n, &sum).unwrap();
                    rows.push(dtype, &a, &b).unwrap();
                    rows.push(dtype, &a, &b).unwrap();
                    check_near(
                        &what,
                        1e-6,
                        &rows.rows().unwrap(),
                        &expected(&a, &b, None, None).repeat(2),
                    );
                    assert_eq!(by_stand_in(), before.map(|before| before + 7), "{what}");
                }
            }
        });
    }

    #[test]
    fn a_way_is_chosen_once_for_a_shape_and_few_are_kept() {
        if !DeviceUnderTest::get().is_emulated() {
            return;
        }
        let mut noise = Noise::new(62);
        with_library(|device| {
            let mut all = |shape: &[usize]| matrix(shape, false, 0, DType::F32, device, &mut noise);
            let (a, b, sum) = (all(&[96, 1103]), all(&[1103, 8]), all(&[16, 8]));
            let choices = |work: &dyn Fn()| {
                let before = count(Counted::Choices);
                work();
                count(Counted::Choices) - before
            };
            let rows = |first: usize| a.narrow(0, first, 16).unwrap();
            let sum_of = |first: usize| add_product_in(DType::F32, &sum, &rows(first), &b).unwrap();
            assert!(choices(&|| sum_of(0)) <= 1);
            // The address is a multiple of as much.
            assert_eq!(choices(&|| sum_of(64)), 0);
            // A row of odd length further that is not so.
            assert_eq!(choices(&|| sum_of(1)), 1);
            assert_eq!(choices(&|| sum_of(1)), 0);
            let few = |k: usize| (a.narrow(1, 0, k).unwrap(), b.narrow(0, 0, k).unwrap());
            let made = choices(&|| {
                for k in 1..=1103 {
                    let (a, b) = few(k);
                    for rows in 1..=4 {
                        product(&a.narrow(0, 0, rows).unwrap(), &b).unwrap();
                    }
                }
            });
            assert!(made > MOST_PLANS as u64, "{made}");
            let alive = count(Counted::Alive);
            assert!(alive <= 4 * MOST_PLANS as u64, "{alive}");
            // The oldest have gone, one by one.
            let (a, b) = few(900);
            assert_eq!(choices(&|| drop(product(&a.narrow(0, 0, 4).unwrap(), &b).unwrap())), 0);
            assert_eq!(choices(&|| sum_of(1)), 1);
        });
    }

    #[test]
    fn factors_are_rounded_to_tf32_where_that_is_allowed() {
        with_library(|device| {
            let factor = 1.0f32 + 1.0 / 4096.0;
            let a = Tensor::full(factor, (16, 32), device).unwrap();
            let b = Tensor::full(0.5f32, (32, 16), device).unwrap();
            let sum = || {
                let sums = values(&product(&a, &b).unwrap());
                assert!(sums.iter().all(|sum| *sum == sums[0]));
                sums[0]
            };
            let exact = 16.0 * f64::from(factor);
            assert_eq!((tf32_on(device), sum()), (false, exact));
            set_tf32(device, true);
            let rounded = sum();
            set_tf32(device, false);
            // Which products a GPU computes so is for its library to say.
            assert!(rounded == 16.0 || rounded == exact && is_gpu(device), "{rounded}");
            assert_eq!(sum(), exact);
        });
    }

    #[test]
    fn what_the_library_does_not_take_is_computed_without_it_and_failures_are_told() {
        if !DeviceUnderTest::get().is_emulated() {
            return;
        }
        let mut noise = Noise::new(63);
        with_library(|device| {
            let mut all = |shape: &[usize]| matrix(shape, false, 0, DType::F32, device, &mut noise);
            let (a, b, bias) = (all(&[6, 1201]), all(&[1201, 8]), all(&[8]));
            let faulty = |fault: Fault, status: c_int, dtype: DType| {
                set_fault(fault, status);
                let found = product_with_bias_in(dtype, &a, &b, &bias);
                set_fault(Fault::Nothing, SUCCESS);
                found
            };
            let (found, counts) = counted(|| faulty(Fault::Choice, NOT_SUPPORTED, DType::BF16).unwrap());
            assert_eq!((counts.products, counts.kernels.get("add_bias")), (1, Some(&1)));
            let short = |x: &Tensor| x.to_dtype(DType::BF16).unwrap();
            check_near(
                "bf16",
                1e-5,
                &found,
                &expected(&short(&a), &short(&b), None, Some(&bias)),
            );
            // It is not asked again.
            let asked = || (count(Counted::Choices), count(Counted::Products));
            let before = asked();
            product_with_bias_in(DType::BF16, &a, &b, &bias).unwrap();
            assert_eq!(asked(), before);
            // Nor where it finds out only as it multiplies.
            set_fault(Fault::Product, NOT_SUPPORTED);
            let found = product_in(DType::BF16, &a, &b);
            set_fault(Fault::Nothing, SUCCESS);
            check_near(
                "bf16",
                1e-5,
                &found.unwrap(),
                &expected(&short(&a), &short(&b), None, None),
            );
            let before = asked();
            product_in(DType::BF16, &a, &b).unwrap();
            assert_eq!(asked(), before);
            let error = faulty(Fault::Choice, 7, DType::F32).unwrap_err().to_string();
            assert!(
                error.contains("cuBLASLt, a choice: CUBLAS_STATUS_INVALID_VALUE") && error.contains("FLOW_CUBLASLT"),
                "{error}"
            );
            // What failed was not kept.
            product_with_bias_in(DType::F32, &a, &b, &bias).unwrap();
            let error = faulty(Fault::Product, 3, DType::F32).unwrap_err();
            assert!(
                is_out_of_memory(&error) && error.to_string().contains("a matrix product"),
                "{error}"
            );
            product_with_bias_in(DType::F32, &a, &b, &bias).unwrap();
            // Shapes that do not fit are refused as without it.
            assert!(product(&a, &a).is_err() && add_product_in(DType::F32, &a, &a, &b).is_err());
        });
    }

    /// NVIDIA's own library is asked where it is installed, which needs no GPU. Attributes have the sizes that it knows.
    #[test]
    fn the_library_takes_what_it_is_told() {
        let stand_in = match DeviceUnderTest::get().is_emulated() {
            true => emulator::with(true, || stand_in::with(|| executor().cublaslt())),
            false => None,
        };
        for library in [stand_in, Library::installed().ok()].into_iter().flatten() {
            for (dtype, result, count, bias) in [
                (DType::F32, DType::F32, 1, Some(16)),
                (DType::BF16, DType::F32, 12, None),
                (DType::BF16, DType::F32, 1, Some(256)),
                (DType::BF16, DType::BF16, 1, None),
            ] {
                let placed = |rows: usize, columns: usize, transposed: bool| Placed {
                    rows,
                    columns,
                    transposed,
                    leading: 8256,
                    count,
                    step: 8256 * 640,
                };
                let mut shape = Shape {
                    a: placed(640, 1125, true),
                    b: placed(1125, 8198, false),
                    dtype,
                    of_result: result,
                    tf32: dtype == DType::F32,
                    aligned: [16, 2, 256],
                    bias,
                    choice: 0,
                };
                let described = Described::new(library, &shape, 256, 1 << 25).unwrap().unwrap();
                assert!(described.layouts.iter().all(|layout| !layout.raw.is_null()));
                let wrong = described.preference.set(library, MAX_WORKSPACE_BYTES, 1u32);
                let wrong = wrong.unwrap_err().to_string();
                assert!(wrong.contains("an attribute: CUBLAS_STATUS_INVALID_VALUE"), "{wrong}");
                shape.dtype = DType::F16;
                assert!(Described::new(library, &shape, 256, 1 << 25).unwrap().is_none());
            }
        }
    }

    #[test]
    fn a_library_that_is_not_there_is_told() {
        let error = |name: &CStr| Library::open(name, 0).err().unwrap();
        let missing = error(c"libno-such-library.so.1");
        assert!(
            missing.starts_with("libno-such-library.so.1 cannot be loaded: ") && missing.contains("No such file"),
            "{missing}"
        );
        assert_eq!(error(c"libm.so.6"), "cuBLASLt has no function cublasLtCreate");
    }
}
