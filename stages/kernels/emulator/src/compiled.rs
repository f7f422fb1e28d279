//! C++ code that a test compiles.

use std::ffi::{CStr, CString, c_void};
use std::process::Command;

/// In unit tests of `flow-kernels` a product and a sum become one operation, as in code for devices, where the processor has it: results
/// that are to have the CPU's bits show whether they still have. Other tests hold whole models within bounds of sums that are rounded
/// as on the CPU.
fn contraction() -> &'static [&'static str] {
    #[cfg(all(test, target_arch = "x86_64"))]
    if std::is_x86_feature_detected!("fma") {
        return &["-ffp-contract=fast", "-mfma"];
    }
    &["-ffp-contract=off"]
}

/// A compiled library; stays loaded as long as the process.
pub(super) struct Compiled {
    handle: *mut c_void,
    /// By which the loader knows it.
    name: CString,
}

// SAFETY: the handle is only looked up in, which `dlsym` allows from any thread.
unsafe impl Send for Compiled {}
// SAFETY: as above.
unsafe impl Sync for Compiled {}

impl Compiled {
    /// Compiles C++ code by the system's compiler and loads it.
    pub(super) fn new(name: &str, text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (source, library) = (
            folder.path().join(format!("{name}.cpp")),
            folder.path().join(format!("{name}.so")),
        );
        std::fs::write(&source, text).unwrap();
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
        let output = Command::new(&compiler)
            .args(["-std=c++17", "-O2", "-shared", "-fPIC", "-pthread"])
            .args(contraction())
            // The fortified longjmp refuses jumps between fibers.
            .args(["-U_FORTIFY_SOURCE", "-Wall", "-Werror", "-Wno-unused-function"])
            .arg("-o")
            .args([&library, &source])
            .output()
            .unwrap_or_else(|error| panic!("the code for CUDA is tested with a C++ compiler: {compiler}: {error}"));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let name = CString::new(library.to_str().unwrap()).unwrap();
        // SAFETY: the library's initialisers are those of its own variables.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(
            !handle.is_null(),
            "{name} of C++ code cannot be loaded",
            name = name.to_string_lossy()
        );
        Self { handle, name }
    }

    /// The loader gives this library for the name, though its file is deleted.
    pub(super) fn name(&self) -> &CStr {
        &self.name
    }

    /// The address of a function, which is there.
    pub(super) fn function(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the handle is of a loaded library.
        let found = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        assert!(!found.is_null(), "{} is not in the library", name.to_string_lossy());
        found
    }
}
