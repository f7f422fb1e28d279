//! Checks the driver of CUDA devices, and NCCL: libraries that may not be installed.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use flow_kernels::cublaslt;
use flow_kernels::device::DeviceChoice;

use super::check::Check;

const CUDA: &str = "CUDA driver";
const CUBLASLT: &str = "cuBLASLt";
const NCCL: &str = "NCCL";

/// A shared library. It stays loaded, since drivers start their own threads.
struct Library(*mut c_void);

impl Library {
    /// The first of these that can be loaded.
    fn open(names: &[&CStr]) -> Option<Library> {
        names.iter().find_map(|name| {
            // SAFETY: the name ends with a zero. What runs as it is loaded is the library's own beginning: it has the name
            // of a driver or of NCCL, and the system's loader found it where such libraries are.
            let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            (!handle.is_null()).then_some(Library(handle))
        })
    }

    /// The address of a function; none if the library does not have it.
    fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: the handle is that of a library that is loaded, and the name ends with a zero.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    }

    /// Calls the function of this name, if there is one: see [`number`].
    ///
    /// # Safety
    /// The function must be of the type `int f(int *)`.
    unsafe fn number(&self, name: &CStr) -> Option<Result<c_int, c_int>> {
        // SAFETY: the caller says that it is of this type.
        self.symbol(name).map(|function| unsafe { number(function) })
    }
}

/// Calls a function that writes a number: the number, or the error code that it gives.
///
/// # Safety
/// It must be the address of a function of the type `int f(int *)`.
unsafe fn number(function: *mut c_void) -> Result<c_int, c_int> {
    type Function = unsafe extern "C" fn(*mut c_int) -> c_int;
    // SAFETY: the caller says that it is of this type.
    let function = unsafe { std::mem::transmute::<*mut c_void, Function>(function) };
    let mut number = 0;
    // SAFETY: it writes one number, to where there is room for it.
    match unsafe { function(&raw mut number) } {
        0 => Ok(number),
        error => Err(error),
    }
}

/// The state of the driver.
#[derive(Clone, Debug, PartialEq)]
enum Driver {
    Missing,
    /// It is installed and cannot be used, with the reason.
    Broken(String),
    /// Its version, as 13000 for 13.0, and how many devices it has.
    There {
        version: c_int,
        devices: c_int,
    },
}

fn look() -> Driver {
    let Some(library) = Library::open(&[c"libcuda.so.1", c"libcuda.so"]) else {
        return Driver::Missing;
    };
    let Some(address) = library.symbol(c"cuInit") else {
        return Driver::Broken("it has no function cuInit".into());
    };
    type Init = unsafe extern "C" fn(c_uint) -> c_int;
    // SAFETY: cuInit of the driver's interface takes a number, and gives one.
    let init = unsafe { std::mem::transmute::<*mut c_void, Init>(address) };
    // SAFETY: 0 is the one number that it takes, and it may be called at any time and more than once.
    match unsafe { init(0) } {
        0 => {}
        // CUDA_ERROR_NO_DEVICE: it has none.
        100 => {}
        error => return Driver::Broken(format!("cuInit gives error {error}{}", error_name(&library, error))),
    }
    // SAFETY: both functions of the driver's interface take the address of one number.
    let [version, devices] = [c"cuDriverGetVersion", c"cuDeviceGetCount"].map(|name| unsafe { library.number(name) });
    match (version, devices) {
        (Some(Ok(version)), Some(devices)) => Driver::There {
            version,
            // Without a device the driver does not initialise, and the count is 0.
            devices: devices.unwrap_or(0),
        },
        _ => Driver::Broken("it does not say its version".into()),
    }
}

/// ` (CUDA_ERROR_...)`.
fn error_name(library: &Library, error: c_int) -> String {
    type Name = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;
    let Some(address) = library.symbol(c"cuGetErrorName") else {
        return String::new();
    };
    // SAFETY: cuGetErrorName of the driver's interface takes a number and the address of a pointer.
    let function = unsafe { std::mem::transmute::<*mut c_void, Name>(address) };
    let mut name: *const c_char = std::ptr::null();
    // SAFETY: it writes one pointer, to where there is room for it.
    if unsafe { function(error, &raw mut name) } != 0 || name.is_null() {
        return String::new();
    }
    // SAFETY: it points to a text of the driver's that ends with a zero and stays as it is.
    format!(" ({})", unsafe { CStr::from_ptr(name) }.to_string_lossy())
}

/// The driver, and whether `wanted` can be computed on.
pub fn driver(wanted: DeviceChoice) -> Check {
    driver_check(&look(), wanted, cfg!(feature = "cuda"))
}

fn driver_check(driver: &Driver, wanted: DeviceChoice, built: bool) -> Check {
    let needed = match wanted {
        DeviceChoice::Cpu => 0,
        DeviceChoice::Cuda(number) => i64::try_from(number.unwrap_or(0)).unwrap_or(i64::MAX).saturating_add(1),
    };
    let (found, devices) = match driver {
        Driver::Missing => ("not there (libcuda.so.1 cannot be loaded)".to_string(), 0),
        Driver::Broken(why) => (format!("it is there and cannot be used: {why}"), 0),
        Driver::There { version, devices } => {
            let devices_found = match devices {
                1 => "1 device".to_string(),
                devices => format!("{devices} devices"),
            };
            let (major, minor) = (version / 1000, version % 1000 / 10);
            (
                format!("for CUDA {major}.{minor}, {devices_found}"),
                i64::from(*devices),
            )
        }
    };
    let rebuild =
        "this program was built without CUDA: build it with `cargo build --release --features cuda` (docs/gpu.md)";
    let install = "install NVIDIA's driver, or give the container its devices (docs/gpu.md)";
    match (built, driver) {
        (false, _) if needed > 0 => Check::fail(CUDA, found, rebuild),
        (true, _) if needed > devices => Check::fail(CUDA, format!("{found}; {wanted} is asked for"), install),
        (true, Driver::Missing | Driver::Broken(_)) => Check::warn(CUDA, found, install),
        (false, Driver::There { .. }) if devices > 0 => Check::warn(CUDA, found, rebuild),
        (false, _) => Check::ok(CUDA, format!("{found}; this program was built without CUDA")),
        (true, Driver::There { .. }) => Check::ok(CUDA, found),
    }
}

/// The library of matrix products; nothing in a program that was built without CUDA.
pub fn cublaslt() -> Option<Check> {
    cfg!(feature = "cuda").then(|| cublaslt_check(cublaslt::check()))
}

fn cublaslt_check(found: Result<(), &str>) -> Check {
    match found {
        Ok(()) => Check::ok(CUBLASLT, "it is there"),
        Err(why) => Check::warn(
            CUBLASLT,
            why,
            "cuBLAS computes products then, and kernels add biases, which takes longer: install libcublas of the CUDA toolkit, and leave \
             FLOW_CUBLASLT unset (docs/gpu.md)",
        ),
    }
}

pub fn nccl() -> Check {
    let library = Library::open(&[c"libnccl.so.2"]);
    // SAFETY: ncclGetVersion takes the address of one number.
    let version = library.map(|library| unsafe { library.number(c"ncclGetVersion") });
    nccl_check(
        version.map(|version| version.and_then(Result::ok)),
        cfg!(feature = "nccl"),
    )
}

/// `version`: `None` where the library is missing, `Some(None)` where it has no version function.
fn nccl_check(version: Option<Option<c_int>>, built: bool) -> Check {
    let found = match version {
        None => "not there (libnccl.so.2 cannot be loaded)".to_string(),
        Some(None) => "it is there and does not say its version".to_string(),
        // From 2.9 on 21703 represents 2.17.3, before it 2708 for 2.7.8.
        Some(Some(version)) if version >= 10_000 => {
            format!("version {}.{}.{}", version / 10_000, version / 100 % 100, version % 100)
        }
        Some(Some(version)) => format!("version {}.{}.{}", version / 1000, version / 100 % 10, version % 100),
    };
    match (built, version) {
        (true, None | Some(None)) => Check::warn(
            NCCL,
            found,
            "ranks on several GPUs need it: install NVIDIA's package libnccl2 (docs/machines.md)",
        ),
        // Numbers of before 2.9 are smaller.
        (true, Some(Some(version))) if version < 21_800 => Check::warn(
            NCCL,
            found,
            "ranks on several GPUs need 2.18 or newer (docs/machines.md)",
        ),
        (true, Some(Some(_))) => Check::ok(NCCL, found),
        (false, _) => Check::ok(NCCL, format!("{found}; this program was built without NCCL")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    /// None of these may crash, on any machine.
    #[test]
    fn libraries_are_looked_for() {
        assert!(Library::open(&[c"libno-such-library.so.77"]).is_none());
        assert_eq!(driver(DeviceChoice::Cpu).name, CUDA);
        assert_eq!(nccl().name, NCCL);
        // A library that every program has.
        #[cfg(target_os = "linux")]
        if let Some(library) = Library::open(&[c"libno-such-library.so.77", c"libc.so.6"]) {
            assert!(library.symbol(c"getpid").is_some() && library.symbol(c"cuInit").is_none());
            // SAFETY: there is no such function to be called.
            assert_eq!(unsafe { library.number(c"cuDriverGetVersion") }, None);
            assert_eq!(error_name(&library, 1), "");
        }
    }

    #[test]
    fn functions_that_write_a_number_are_called() {
        unsafe extern "C" fn version(number: *mut c_int) -> c_int {
            // SAFETY: it is called with the address of a number.
            unsafe { *number = 13_000 };
            0
        }
        unsafe extern "C" fn failing(_: *mut c_int) -> c_int {
            999
        }
        type Function = unsafe extern "C" fn(*mut c_int) -> c_int;
        let call = |function: Function| {
            // SAFETY: both are functions of that type.
            unsafe { number(function as *mut c_void) }
        };
        assert_eq!((call(version), call(failing)), (Ok(13_000), Err(999)));
    }

    #[test]
    fn what_is_asked_for_must_be_there() {
        let cuda = DeviceChoice::Cuda(None);
        let there = |devices| Driver::There {
            version: 13_010,
            devices,
        };
        let state = |driver: &Driver, wanted, built| driver_check(driver, wanted, built).state;
        assert_eq!(
            driver_check(&there(2), cuda, true),
            Check::ok(CUDA, "for CUDA 13.1, 2 devices")
        );
        assert_eq!(state(&there(1), DeviceChoice::Cuda(Some(1)), true), State::Fail);
        assert_eq!(state(&there(0), cuda, true), State::Fail);
        assert_eq!(state(&there(1), cuda, false), State::Fail);
        assert_eq!(state(&there(1), DeviceChoice::Cpu, false), State::Warn);
        assert_eq!(state(&Driver::Missing, DeviceChoice::Cpu, false), State::Ok);
        assert_eq!(state(&Driver::Missing, DeviceChoice::Cpu, true), State::Warn);
        assert_eq!(state(&Driver::Missing, cuda, true), State::Fail);
        assert_eq!(state(&Driver::Broken("x".into()), cuda, true), State::Fail);
    }

    #[test]
    fn products_without_cublaslt_are_told() {
        assert_eq!(cublaslt_check(Ok(())).state, State::Ok);
        let check = cublaslt_check(Err("it is off"));
        assert_eq!((check.state, check.found.as_str()), (State::Warn, "it is off"));
        assert_eq!(cublaslt().is_some(), cfg!(feature = "cuda"));
    }

    #[test]
    fn versions_of_nccl_are_read() {
        assert_eq!(nccl_check(Some(Some(22_809)), true), Check::ok(NCCL, "version 2.28.9"));
        assert_eq!(nccl_check(Some(Some(2_708)), true).found, "version 2.7.8");
        assert_eq!(nccl_check(Some(Some(2_708)), true).state, State::Warn);
        assert_eq!(nccl_check(Some(Some(21_703)), true).state, State::Warn);
        assert_eq!(nccl_check(Some(Some(21_800)), true).state, State::Ok);
        assert_eq!(nccl_check(None, true).state, State::Warn);
        assert_eq!(nccl_check(None, false).state, State::Ok);
    }
}
