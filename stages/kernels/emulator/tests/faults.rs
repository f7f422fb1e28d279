//! What the emulator has to find.

use candle_core::{DType, Device, Tensor};
use flow_cuda_emulator::emulator::Emulator;
use flow_kernels::device::executor::Executor;
use flow_kernels::device::launch::Argument;
use flow_kernels::device::signature::{Kernel, Parameter};
use flow_kernels::testing::values;

/// The harness itself sees what it is there to see.
#[test]
fn faults_of_kernels_are_found() {
    let run = |name: &'static str, cooperative: bool| {
        let (x, out) = (
            Tensor::ones(600, DType::F32, &Device::Cpu).unwrap(),
            Tensor::zeros(600, DType::F32, &Device::Cpu).unwrap(),
        );
        let pointer = |written| Parameter::Pointer {
            dtype: DType::F32,
            written,
        };
        let kernel = Kernel {
            name,
            file: 0,
            parameters: vec![pointer(false), pointer(true)],
            cooperative,
        };
        // A kernel of `faults.cu`, on three blocks.
        Emulator
            .launch(&kernel, [3, 1], &[Argument::Read(&x), Argument::Write(&out)])
            .map(|()| values(&out))
    };
    let fault = |name: &'static str| run(name, false);
    let message = |name: &'static str| fault(name).unwrap_err().to_string();
    assert!(
        message("no_barrier").contains("order of threads"),
        "{}",
        message("no_barrier")
    );
    assert!(message("shared_place").contains("order of threads"));
    assert!(message("early_end").contains("while others wait"));
    assert!(message("two_barriers").contains("different barriers"));
    assert!(fault("unwritten_shared").unwrap().iter().all(|value| value.is_nan()));
    assert!(message("grid_barrier_sound").contains("without such barriers"));
    let waiting = run("grid_barrier_sound", true).unwrap();
    assert!(
        (0..600usize).all(|at| waiting[at] == if at < 256 { 2.0 } else { 1.0 }),
        "{waiting:?}"
    );
    assert!(
        run("no_grid_barrier", true)
            .unwrap_err()
            .to_string()
            .contains("order of threads")
    );
    let early = run("early_block", true).unwrap_err().to_string();
    assert!(early.contains("some blocks end"), "{early}");
    assert!(fault("sound").unwrap().iter().all(|value| *value == 256.0));
}
