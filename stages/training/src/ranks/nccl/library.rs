//! NCCL's functions, looked up in its shared library when they are first needed, so that a program starts where the
//! library is missing. cudarc's module would be linked against it: candle has cudarc link its libraries (`dynamic-linking`), and its
//! build script refuses `dynamic-loading` beside that.
//!
//! Names, numbers and layouts are those of `nccl.h`. In tests the functions are those of a stand-in
//! ([`super::with_host_library`]).

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use candle_core::DType;

use super::nccl_error;
use crate::error::TrainingError;
use crate::ranks::NcclUniqueId;

/// `ncclSuccess`.
const SUCCESS: c_int = 0;
/// `ncclRemoteError`: another rank has failed, or the network.
const REMOTE_ERROR: c_int = 6;
/// `ncclInProgress`: a call on a communicator that does not block is not finished.
const IN_PROGRESS: c_int = 7;
/// `ncclSum`.
const SUM: c_int = 0;
/// The oldest NCCL whose communicators are configured as here, 2.18.
const OLDEST: c_int = 21_800;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId(NcclUniqueId);

/// `ncclConfig_t` of NCCL 2.18. Later versions read as much of it as `size` says.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

type Raw = *mut c_void;

type GetUniqueId = unsafe extern "C" fn(*mut UniqueId) -> c_int;
type InitRank = unsafe extern "C" fn(*mut Raw, c_int, UniqueId, c_int, *mut Config) -> c_int;
type Abort = unsafe extern "C" fn(Raw) -> c_int;
type AsyncError = unsafe extern "C" fn(Raw, *mut c_int) -> c_int;
type Group = unsafe extern "C" fn() -> c_int;
/// Send, receive, count, type, operation, root, communicator, stream.
type Reduce = unsafe extern "C" fn(*const c_void, Raw, usize, c_int, c_int, c_int, Raw, Raw) -> c_int;
/// Send, receive, count, type, root, communicator, stream.
type Broadcast = unsafe extern "C" fn(*const c_void, Raw, usize, c_int, c_int, Raw, Raw) -> c_int;
/// Send, receive, count, type, communicator, stream.
type AllGather = unsafe extern "C" fn(*const c_void, Raw, usize, c_int, Raw, Raw) -> c_int;
type ErrorString = unsafe extern "C" fn(c_int) -> *const c_char;
type LastError = unsafe extern "C" fn(Raw) -> *const c_char;

/// The functions of one library, which stays loaded.
pub(in crate::ranks) struct Library {
    get_unique_id: GetUniqueId,
    init_rank: InitRank,
    abort: Abort,
    async_error: AsyncError,
    group_start: Group,
    group_end: Group,
    reduce: Reduce,
    broadcast: Broadcast,
    all_gather: AllGather,
    error_string: ErrorString,
    last_error: LastError,
}

impl Library {
    /// NVIDIA's library, loaded once in a process.
    ///
    /// # Errors
    /// Where it is not installed, or is older than 2.18.
    pub fn installed() -> Result<&'static Library, TrainingError> {
        static LOADED: OnceLock<Result<Library, String>> = OnceLock::new();
        let loaded = LOADED.get_or_init(|| {
            Library::open(c"libnccl.so.2").map_err(|error| {
                format!(
                    "{error}; install NVIDIA's package libnccl2, or use a program built with `--features cuda`, whose ranks \
                     exchange through host memory"
                )
            })
        });
        loaded.as_ref().map_err(|message| nccl_error(message))
    }

    /// Loads a library and looks its functions up.
    pub fn open(name: &CStr) -> Result<Library, String> {
        let shown = name.to_string_lossy();
        // SAFETY: the name ends with a zero. What runs as it is loaded is the library's own beginning: it is NCCL, found
        // by the system's loader, or the stand-in of the tests.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: it gives null, or a text that stays as it is until the loader's next call on this thread.
            let reason = unsafe {
                let reason = libc::dlerror();
                match reason.is_null() {
                    true => "the loader does not say why".into(),
                    false => CStr::from_ptr(reason).to_string_lossy().into_owned(),
                }
            };
            return Err(format!("{shown} cannot be loaded ({reason})"));
        }
        let symbol = |function: &CStr| {
            // SAFETY: the handle is that of a library that is loaded, and the name ends with a zero.
            let address = unsafe { libc::dlsym(handle, function.as_ptr()) };
            match address.is_null() {
                true => Err(format!("{shown} has no function {}", function.to_string_lossy())),
                false => Ok(address),
            }
        };
        type Version = unsafe extern "C" fn(*mut c_int) -> c_int;
        // SAFETY: ncclGetVersion is of this type.
        let version = unsafe { std::mem::transmute::<Raw, Version>(symbol(c"ncclGetVersion")?) };
        let mut number = 0;
        // SAFETY: it writes one number, to where there is room for it.
        if unsafe { version(&raw mut number) } != SUCCESS || number < OLDEST {
            return Err(format!(
                "{shown} is older than NCCL 2.18 (its version number is {number})"
            ));
        }
        // SAFETY: each function is of the type that nccl.h declares for its name.
        unsafe {
            Ok(Library {
                get_unique_id: std::mem::transmute::<Raw, GetUniqueId>(symbol(c"ncclGetUniqueId")?),
                init_rank: std::mem::transmute::<Raw, InitRank>(symbol(c"ncclCommInitRankConfig")?),
                abort: std::mem::transmute::<Raw, Abort>(symbol(c"ncclCommAbort")?),
                async_error: std::mem::transmute::<Raw, AsyncError>(symbol(c"ncclCommGetAsyncError")?),
                group_start: std::mem::transmute::<Raw, Group>(symbol(c"ncclGroupStart")?),
                group_end: std::mem::transmute::<Raw, Group>(symbol(c"ncclGroupEnd")?),
                reduce: std::mem::transmute::<Raw, Reduce>(symbol(c"ncclReduce")?),
                broadcast: std::mem::transmute::<Raw, Broadcast>(symbol(c"ncclBroadcast")?),
                all_gather: std::mem::transmute::<Raw, AllGather>(symbol(c"ncclAllGather")?),
                error_string: std::mem::transmute::<Raw, ErrorString>(symbol(c"ncclGetErrorString")?),
                last_error: std::mem::transmute::<Raw, LastError>(symbol(c"ncclGetLastError")?),
            })
        }
    }

    /// An id for a new communicator.
    pub fn unique_id(&self) -> Result<NcclUniqueId, Failure> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: it writes one id, to where there is room for it.
        match unsafe { (self.get_unique_id)(&raw mut id) } {
            SUCCESS => Ok(id.0),
            error => Err(self.failure(error, std::ptr::null_mut())),
        }
    }

    /// An error with NCCL's last message.
    fn failure(&self, error: c_int, communicator: Raw) -> Failure {
        // SAFETY: both give a text that ends with a zero and stays as it is until NCCL's next call on this thread; the
        // communicator may be null.
        let [name, detail] = unsafe { [(self.error_string)(error), (self.last_error)(communicator)] }.map(|text| {
            if text.is_null() {
                String::new()
            } else {
                // SAFETY: as above.
                unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
            }
        });
        Failure {
            remote: error == REMOTE_ERROR,
            message: match detail.is_empty() {
                true => name,
                false => format!("{name} ({detail})"),
            },
        }
    }
}

/// Why a call failed.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    /// What failed is another rank, or the network.
    pub remote: bool,
    pub message: String,
}

impl From<String> for Failure {
    fn from(message: String) -> Self {
        Failure { remote: false, message }
    }
}

/// The memory of a tensor, as an operation of NCCL takes it.
#[derive(Clone, Copy)]
pub(super) struct Memory {
    pub address: Raw,
    /// Numbers, not bytes.
    pub count: usize,
    pub dtype: DType,
}

/// Numbers of `ncclDataType_t`.
fn data_type(dtype: DType) -> Result<c_int, Failure> {
    match dtype {
        DType::I64 => Ok(4),
        DType::F16 => Ok(6),
        DType::F32 => Ok(7),
        DType::F64 => Ok(8),
        DType::BF16 => Ok(9),
        other => Err(format!("tensors of type {} are not exchanged", other.as_str()).into()),
    }
}

/// One rank of a communicator whose calls do not block. It is used by the thread that made it.
pub(super) struct Communicator {
    library: &'static Library,
    raw: Raw,
}

impl Communicator {
    /// Begins to join; [`Communicator::progress`] says when all ranks have.
    pub fn join(library: &'static Library, rank: usize, size: usize, id: NcclUniqueId) -> Result<Self, Failure> {
        const UNDEFINED: c_int = c_int::MIN;
        let mut config = Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: OLDEST.unsigned_abs(),
            // A call that waits for a rank that has ended must be possible to give up.
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointers are to a place for the communicator and to a configuration of the version that it names,
        // which NCCL copies.
        let result = unsafe {
            let (size, rank) = (size as c_int, rank as c_int);
            (library.init_rank)(&raw mut raw, size, UniqueId(id), rank, &raw mut config)
        };
        match result {
            SUCCESS | IN_PROGRESS => Ok(Communicator { library, raw }),
            error => Err(library.failure(error, std::ptr::null_mut())),
        }
    }

    /// Whether the call that was made last is finished: the communicator has come together, or the operations of a group
    /// are given to the device.
    ///
    /// # Errors
    /// Where the communicator has failed, which also ends operations that were given to the device.
    pub fn progress(&self) -> Result<bool, Failure> {
        let mut state = SUCCESS;
        // SAFETY: the communicator is one that was made and not destroyed; one number is written.
        let asked = unsafe { (self.library.async_error)(self.raw, &raw mut state) };
        match (asked, state) {
            (SUCCESS, SUCCESS) => Ok(true),
            (SUCCESS, IN_PROGRESS) => Ok(false),
            (SUCCESS, error) | (error, _) => Err(self.library.failure(error, self.raw)),
        }
    }

    /// Starts the operations that `start` names as one group.
    pub fn group(&self, start: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
        // SAFETY: a group is ended on the thread that started it, here.
        let begun = unsafe { (self.library.group_start)() };
        self.check(begun)?;
        let started = start();
        // Also where an operation could not be started: a group that is started must be ended.
        // SAFETY: as above.
        let ended = unsafe { (self.library.group_end)() };
        started.and(self.check(ended))
    }

    /// Sums `memory` over the ranks, in place, to that of `root`.
    ///
    /// # Safety
    /// The memory must stay, and must be used by nothing else, until the operation is finished. So in all operations.
    pub unsafe fn reduce(&self, memory: Memory, root: usize, stream: Raw) -> Result<(), Failure> {
        let Memory { address, count, dtype } = memory;
        // SAFETY: the caller says so; the communicator is alive.
        self.check(unsafe {
            (self.library.reduce)(
                address,
                address,
                count,
                data_type(dtype)?,
                SUM,
                root as c_int,
                self.raw,
                stream,
            )
        })
    }

    /// Overwrites `memory` with that of `root`.
    ///
    /// # Safety
    /// As [`Communicator::reduce`].
    pub unsafe fn broadcast(&self, memory: Memory, root: usize, stream: Raw) -> Result<(), Failure> {
        let Memory { address, count, dtype } = memory;
        // SAFETY: the caller says so; the communicator is alive.
        self.check(unsafe {
            (self.library.broadcast)(
                address,
                address,
                count,
                data_type(dtype)?,
                root as c_int,
                self.raw,
                stream,
            )
        })
    }

    /// Writes the memory `from` of all ranks, in their order, to `to`, which has room for them.
    ///
    /// # Safety
    /// As [`Communicator::reduce`].
    pub unsafe fn all_gather(&self, from: Memory, to: Memory, stream: Raw) -> Result<(), Failure> {
        let Memory { address, count, dtype } = from;
        // SAFETY: the caller says so; the communicator is alive.
        self.check(unsafe {
            (self.library.all_gather)(address, to.address, count, data_type(dtype)?, self.raw, stream)
        })
    }

    fn check(&self, result: c_int) -> Result<(), Failure> {
        match result {
            SUCCESS | IN_PROGRESS => Ok(()),
            error => Err(self.library.failure(error, self.raw)),
        }
    }
}

/// Gives up what is not finished, so that no device waits for a rank that has ended. Unlike `ncclCommDestroy` this does
/// not wait for other ranks either.
impl Drop for Communicator {
    fn drop(&mut self) {
        // SAFETY: the communicator is alive, and nothing uses it any more.
        unsafe { (self.library.abort)(self.raw) };
    }
}
