//! Kernels as functions on a device.
//!
//! The program holds the compiled code of its kernel files (`build.rs`). What it does not hold (other files or macros, an architecture
//! or a driver that its code is not for, a build without nvcc) NVRTC compiles when it is first used, and the user's cache keeps:
//! `$XDG_CACHE_HOME/flow/kernels` or `~/.cache/flow/kernels`, by the hash of the code, the options and the architecture.

use std::collections::HashMap;
use std::ffi::CString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use candle_core::cuda_backend::cudarc::driver::sys::CUresult;
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaFunction, CudaModule, CudaStream, DriverError};
use candle_core::cuda_backend::cudarc::nvrtc::{Ptx, result as nvrtc, sys};

use super::signature::Kernel;
use super::sources::{File, sources};
use crate::error::{Error, Result};
use crate::subnormals::kept;

include!("compiler_options.rs");
include!(concat!(env!("OUT_DIR"), "/binaries.rs"));

/// Modules by device and file, and functions by device and name. They keep the device's context.
#[derive(Default)]
struct Loaded {
    modules: HashMap<(usize, usize), Arc<CudaModule>>,
    functions: HashMap<(usize, &'static str), CudaFunction>,
}

/// A kernel on the device of a stream.
pub(super) fn function(kernel: &Kernel, stream: &Arc<CudaStream>) -> Result<CudaFunction> {
    static LOADED: Mutex<Option<Loaded>> = Mutex::new(None);
    let device = stream.context().ordinal();
    // The maps are valid after a panic: each change is one insertion.
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let Loaded { modules, functions } = loaded.get_or_insert_default();
    if let Some(function) = functions.get(&(device, kernel.name)) {
        return Ok(function.clone());
    }
    let module = match modules.get(&(device, kernel.file)) {
        Some(module) => module.clone(),
        None => {
            let module = module(&sources()?.files[kernel.file], stream)?;
            modules.insert((device, kernel.file), module.clone());
            module
        }
    };
    let function = module
        .load_function(kernel.name)
        .map_err(|error| wrong(kernel.name, &error))?;
    functions.insert((device, kernel.name), function.clone());
    Ok(function)
}

fn wrong(what: &str, error: &dyn std::fmt::Display) -> Error {
    Error::Input(format!("CUDA kernels of {what}: {error}"))
}

/// Code on a device. None if it is for other architectures, or for a later driver.
fn loaded(file: &File, code: &[u8], context: &Arc<CudaContext>) -> Result<Option<Arc<CudaModule>>> {
    match context.load_module(Ptx::from_binary(code.to_vec())) {
        Ok(module) => Ok(Some(module)),
        Err(DriverError(
            CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU
            | CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION
            | CUresult::CUDA_ERROR_INVALID_PTX,
        )) => Ok(None),
        Err(error) => Err(wrong(file.name, &error)),
    }
}

fn module(file: &File, stream: &Arc<CudaStream>) -> Result<Arc<CudaModule>> {
    let context = stream.context();
    let (major, minor) = context.compute_capability().map_err(|error| wrong(file.name, &error))?;
    if major < 8 {
        let message = format!("the GPU has compute capability {major}.{minor}; kernels need 8.0 or newer");
        return Err(wrong(file.name, &message));
    }
    let binary = BINARIES
        .iter()
        .find(|(name, code)| file.own && *name == file.name && !code.is_empty());
    if let Some((_, code)) = binary
        && let Some(module) = loaded(file, code, context)?
    {
        return Ok(module);
    }
    let sources = sources()?;
    let options: Vec<String> = OPTIONS
        .iter()
        .map(|&option| option.to_owned())
        .chain([format!("--gpu-architecture=sm_{major}{minor}")])
        .chain(sources.defines.iter().map(|define| format!("--define-macro={define}")))
        .collect();
    let source = format!("{}\n{}", sources.prelude, file.source);
    let kept_at = cache_folder().map(|folder| {
        let hash = blake3::hash(format!("{}\0{source}", options.join("\0")).as_bytes());
        folder.join(format!("{}-{}.cubin", file.name, hash.to_hex()))
    });
    if let Some(code) = kept_at.as_deref().and_then(read)
        && let Some(module) = loaded(file, &code, context)?
    {
        return Ok(module);
    }
    // The compiler computes constants as the device does, with subnormal numbers.
    let code = kept(|| compile(file.name, &source, &options))?;
    if let Some(path) = kept_at {
        // Without a cache the next process compiles again.
        let _ = keep(&path, &code);
    }
    let module = loaded(file, &code, context)?;
    module.ok_or_else(|| wrong(file.name, &"NVRTC compiled for another architecture than the GPU's"))
}

fn compile(name: &str, source: &str, options: &[String]) -> Result<Vec<u8>> {
    let text = |text: &str| CString::new(text).map_err(|error| wrong(name, &error));
    let program = nvrtc::create_program(&text(source)?, Some(&text(&format!("{name}.cu"))?))
        .map_err(|error| wrong(name, &error))?;
    // SAFETY: `program` was just made, is used by this thread alone, and is destroyed once, behind its last use.
    unsafe {
        let code = match nvrtc::compile_program(program, options) {
            Ok(()) => code_of(program).map_err(|error| wrong(name, &error)),
            Err(error) => {
                let log = nvrtc::get_program_log(program).unwrap_or_default();
                let log: Vec<u8> = log.into_iter().map(|byte| byte as u8).collect();
                let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned();
                Err(wrong(name, &format!("{error}\n{log}")))
            }
        };
        let _ = nvrtc::destroy_program(program);
        code
    }
}

/// The device code of a program that was compiled for one architecture.
///
/// # Safety
/// The program was compiled and is not destroyed.
unsafe fn code_of(program: sys::nvrtcProgram) -> std::result::Result<Vec<u8>, nvrtc::NvrtcError> {
    let mut size = 0;
    // SAFETY: by the caller; `size` lives through the call.
    unsafe { sys::nvrtcGetCUBINSize(program, &raw mut size) }.result()?;
    let mut code = vec![0u8; size];
    // SAFETY: by the caller; the buffer has the size that was asked for.
    unsafe { sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()) }.result()?;
    Ok(code)
}

fn cache_folder() -> Option<PathBuf> {
    let of = |name: &str| {
        std::env::var_os(name)
            .filter(|folder| !folder.is_empty())
            .map(PathBuf::from)
    };
    let cache = of("XDG_CACHE_HOME").or_else(|| Some(of("HOME")?.join(".cache")))?;
    Some(cache.join("flow").join("kernels"))
}

/// Code of the cache: its hash, then itself. None if it is not there, or damaged.
fn read(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = std::fs::read(path).ok()?;
    let code = bytes.split_off(bytes.len().min(blake3::OUT_LEN));
    (blake3::hash(&code).as_bytes()[..] == bytes[..]).then_some(code)
}

fn keep(path: &Path, code: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(blake3::hash(code).as_bytes())?;
    file.write_all(code)?;
    file.persist(path)?;
    Ok(())
}
