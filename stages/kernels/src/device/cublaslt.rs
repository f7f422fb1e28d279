//! The functions of cuBLASLt's shared library that are used, with the names, numbers and layouts of `cublasLt.h`.
//!
//! cudarc has them too, but only in builds with CUDA, where candle has it link the library (`dynamic-linking`; its build script refuses
//! `dynamic-loading` beside that). Tests without CUDA run these descriptions of products on a stand-in.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{LazyLock, OnceLock};

use crate::error::{Error, Result};

/// `CUBLAS_STATUS_SUCCESS` and `CUBLAS_STATUS_NOT_SUPPORTED`.
pub(crate) const SUCCESS: c_int = 0;
pub(crate) const NOT_SUPPORTED: c_int = 15;

/// `CUDA_R_32F` and `CUDA_R_16BF` of `cudaDataType_t`.
pub(crate) const R_32F: c_int = 0;
pub(crate) const R_16BF: c_int = 14;
/// Of `cublasComputeType_t` sums in f32, and those of factors rounded to TF32.
pub(crate) const COMPUTE_32F: c_int = 68;
pub(crate) const COMPUTE_32F_FAST_TF32: c_int = 77;

/// Of `cublasLtMatmulDescAttributes_t`.
pub(crate) const TRANSA: c_int = 3;
pub(crate) const TRANSB: c_int = 4;
pub(crate) const EPILOGUE: c_int = 7;
pub(crate) const BIAS_POINTER: c_int = 8;
/// `CUBLASLT_EPILOGUE_BIAS`.
pub(crate) const EPILOGUE_BIAS: u32 = 4;
/// Of `cublasLtMatrixLayoutAttribute_t`.
pub(crate) const BATCH_COUNT: c_int = 5;
pub(crate) const STRIDED_BATCH_OFFSET: c_int = 6;
/// Of `cublasLtMatmulPreferenceAttributes_t`; the alignments of A, B, C and D come one after another.
pub(crate) const MAX_WORKSPACE_BYTES: c_int = 1;
pub(crate) const MIN_ALIGNMENT_A_BYTES: c_int = 5;

pub(crate) type Raw = *mut c_void;

/// `cublasLtMatmulAlgo_t`.
pub(crate) type Algorithm = [u64; 8];

/// `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Chosen {
    pub(crate) algorithm: Algorithm,
    pub(crate) workspace: usize,
    pub(crate) state: c_int,
    pub(crate) waves: f32,
    pub(crate) reserved: [c_int; 4],
}

pub(crate) type Create = unsafe extern "C" fn(*mut Raw) -> c_int;
pub(crate) type Destroy = unsafe extern "C" fn(Raw) -> c_int;
/// An attribute's number, address and size.
pub(crate) type Set = unsafe extern "C" fn(Raw, c_int, *const c_void, usize) -> c_int;
pub(crate) type CreateDescriptor = unsafe extern "C" fn(*mut Raw, c_int, c_int) -> c_int;
pub(crate) type CreateLayout = unsafe extern "C" fn(*mut Raw, c_int, u64, u64, i64) -> c_int;
/// Handle, descriptor, layouts of A, B, C and D, preference, how many are asked for, found, how many were found.
pub(crate) type Choose =
    unsafe extern "C" fn(Raw, Raw, Raw, Raw, Raw, Raw, Raw, c_int, *mut Chosen, *mut c_int) -> c_int;
pub(crate) type Matrix = *const c_void;
pub(crate) type Scalar = *const f32;
/// Handle, descriptor, alpha, A, B, beta, C and D with a layout behind each matrix, algorithm, workspace, its bytes, stream.
#[rustfmt::skip]
pub(crate) type Multiply = unsafe extern "C" fn(
    Raw, Raw, Scalar, Matrix, Raw, Matrix, Raw, Scalar, Matrix, Raw, Raw, Raw, *const Algorithm, Raw, usize, Raw,
) -> c_int;
pub(crate) type StatusName = unsafe extern "C" fn(c_int) -> *const c_char;

macro_rules! library {
    ($($field:ident: $type:ty, $name:literal;)*) => {
        /// The functions of one library, which stays loaded.
        pub struct Library {
            $(pub(crate) $field: $type,)*
        }

        impl Library {
            /// Those of a loaded library.
            ///
            /// # Safety
            /// Each function must be of its type.
            unsafe fn of(handle: Raw) -> std::result::Result<Library, String> {
                // SAFETY: the caller's promise.
                unsafe { Ok(Library { $($field: function::<$type>(handle, $name)?,)* }) }
            }
        }
    };
}

library! {
    create: Create, c"cublasLtCreate";
    create_descriptor: CreateDescriptor, c"cublasLtMatmulDescCreate";
    set_descriptor: Set, c"cublasLtMatmulDescSetAttribute";
    destroy_descriptor: Destroy, c"cublasLtMatmulDescDestroy";
    create_layout: CreateLayout, c"cublasLtMatrixLayoutCreate";
    set_layout: Set, c"cublasLtMatrixLayoutSetAttribute";
    destroy_layout: Destroy, c"cublasLtMatrixLayoutDestroy";
    create_preference: Create, c"cublasLtMatmulPreferenceCreate";
    set_preference: Set, c"cublasLtMatmulPreferenceSetAttribute";
    destroy_preference: Destroy, c"cublasLtMatmulPreferenceDestroy";
    choose: Choose, c"cublasLtMatmulAlgoGetHeuristic";
    multiply: Multiply, c"cublasLtMatmul";
    status_name: StatusName, c"cublasLtGetStatusName";
}

/// A function of a loaded library.
///
/// # Safety
/// It must be of the type `F`.
unsafe fn function<F: Copy>(handle: Raw, name: &CStr) -> std::result::Result<F, String> {
    // SAFETY: the handle is that of a library that is loaded, and the name ends with a zero.
    let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
    match address.is_null() {
        true => Err(format!("cuBLASLt has no function {}", name.to_string_lossy())),
        // SAFETY: the caller's promise; both are addresses.
        false => Ok(unsafe { std::mem::transmute_copy::<Raw, F>(&address) }),
    }
}

impl Library {
    /// NVIDIA's library: that which cuBLAS has loaded for itself, or else one that is installed.
    pub(crate) fn installed() -> std::result::Result<&'static Library, &'static str> {
        static LOADED: OnceLock<std::result::Result<Library, String>> = OnceLock::new();
        let loaded = LOADED.get_or_init(|| {
            let names = [c"libcublasLt.so.13", c"libcublasLt.so.12"];
            let loaded = names
                .iter()
                .find_map(|name| Library::open(name, libc::RTLD_NOLOAD).ok());
            loaded.map_or_else(|| Library::open(names[0], 0), Ok)
        });
        loaded.as_ref().map_err(String::as_str)
    }

    /// Loads a library and looks its functions up. `flags` are added to those of `dlopen`.
    ///
    /// # Errors
    /// Where it cannot be loaded or has not all of the functions.
    pub fn open(name: &CStr, flags: c_int) -> std::result::Result<Library, String> {
        let shown = name.to_string_lossy();
        // SAFETY: the name ends with a zero. What runs as it is loaded is the library's own beginning: it is cuBLASLt, found by
        // the system's loader, or the stand-in of the tests.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL | flags) };
        if handle.is_null() {
            // SAFETY: it gives the loader's words on this thread's last call, or null.
            let reason = unsafe { libc::dlerror() };
            let reason = match reason.is_null() {
                true => "no reason is given".into(),
                // SAFETY: a text that ends with a zero, and stays until the loader's next call on this thread.
                false => unsafe { CStr::from_ptr(reason) }.to_string_lossy(),
            };
            return Err(format!("{shown} cannot be loaded: {reason}"));
        }
        // SAFETY: they are of the types that cublasLt.h declares, where every enumeration is an int.
        unsafe { Library::of(handle) }
    }

    pub(crate) fn check(&self, what: &str, status: c_int) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        // SAFETY: it gives a text that ends with a zero and stays.
        let name = unsafe { CStr::from_ptr((self.status_name)(status)) };
        Err(Error::Input(format!(
            "cuBLASLt, {what}: {} (products are left to cuBLAS where the environment variable FLOW_CUBLASLT is off)",
            name.to_string_lossy()
        )))
    }
}

/// What the library has made for us: a descriptor, a layout or a preference.
pub(crate) struct Made {
    pub(crate) raw: Raw,
    set: Set,
    destroy: Destroy,
}

impl Made {
    /// `create` is given where the address goes.
    pub(crate) fn new(
        library: &Library,
        set: Set,
        destroy: Destroy,
        create: impl FnOnce(*mut Raw) -> c_int,
    ) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        library.check("a description", create(&raw mut raw))?;
        Ok(Self { raw, set, destroy })
    }

    /// Sets an attribute of the type `T`.
    pub(crate) fn set<T: Copy>(&self, library: &Library, attribute: c_int, value: T) -> Result<()> {
        let from = (&raw const value).cast();
        // SAFETY: this was made and is not destroyed; as many bytes are read as the value has.
        library.check("an attribute", unsafe {
            (self.set)(self.raw, attribute, from, size_of::<T>())
        })
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        // SAFETY: this was made, and nothing uses it any more. That it fails would change nothing.
        unsafe { (self.destroy)(self.raw) };
    }
}

static OFF: LazyLock<AtomicBool> =
    LazyLock::new(|| AtomicBool::new(std::env::var("FLOW_CUBLASLT").is_ok_and(|value| value == "off")));

/// From now on cuBLASLt computes products, where it is there, or cuBLAS computes all of them.
pub fn set_used(used: bool) {
    OFF.store(!used, Ordering::Relaxed);
}

/// Why cuBLASLt computes no products of this program.
///
/// # Errors
/// That is what it gives.
pub fn check() -> std::result::Result<(), &'static str> {
    match OFF.load(Ordering::Relaxed) {
        true => Err("it is off"),
        false => Library::installed().map(|_| ()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow_cuda_emulator::DeviceUnderTest;

    #[test]
    fn it_can_be_switched_off() {
        // For this process, where nothing else uses NVIDIA's.
        if DeviceUnderTest::get().is_emulated() {
            set_used(false);
            assert_eq!(check(), Err("it is off"));
            set_used(true);
        }
    }
}
