//! For tests on machines without a GPU: an emulator of kernels, and stand-ins for cuBLASLt and NCCL. The program does not contain
//! it. It needs the system's C++ compiler, and panics where something is not as it should be.
//!
//! Unit tests of `flow-kernels` compile these files as a module of their own: of a dependency they would get the executor of another
//! copy of the crate. So paths begin with `flow_kernels`, `self` or `super`.

mod compiled;
pub mod cublaslt;
mod device_under_test;
pub mod emulator;
pub mod nccl;

pub use self::device_under_test::DeviceUnderTest;
