//! What the emulator has to find, and the kernel files that it reads.

use candle_core::{DType, Device, Tensor};

use super::{emulator, values};
use crate::device::launch::{self, Argument, Grid};
use crate::device::signature::{self, Kernel, Parameter};
use crate::device::sources::{File, read, sources};

#[test]
fn every_kernel_file_is_read() {
    let kernels = signature::all().unwrap();
    let sources = sources().unwrap();
    let written = |file: &File| file.source.matches("KERNEL(").count();
    let written: usize = sources.files.iter().map(written).sum();
    assert_eq!(kernels.len(), written);
}

#[test]
fn kernel_files_of_a_folder_come_before_those_of_the_program() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    std::fs::write(
        place.join("sums.cu"),
        "\nKERNEL(only, (const float* x, float* y, int n)) {}\n",
    )
    .unwrap();
    let sources = read(Some(place), "TILE=64 FAST").unwrap();
    assert_eq!(sources.defines, ["TILE=64", "FAST"]);
    let kernels = signature::of(&sources).unwrap();
    assert!(kernels.contains_key("only") && kernels.contains_key("adamw_f32") && !kernels.contains_key("column_sum"));
    let own = |folder, defines| {
        read(folder, defines)
            .unwrap()
            .files
            .iter()
            .filter(|file| file.own)
            .count()
    };
    let all = read(None, "").unwrap().files.len();
    assert_eq!([own(None, ""), own(None, "A"), own(Some(place), "")], [all, 0, all - 1]);
    std::fs::write(place.join("prelude.cuh"), "").unwrap();
    assert_eq!(own(Some(place), ""), 0);
    let refused = |folder: &std::path::Path, defines| read(Some(folder), defines).err().unwrap();
    assert!(refused(place, "-o=x").contains("`-o=x` is not NAME=VALUE"));
    std::fs::write(place.join("sum.cu"), "").unwrap();
    assert!(refused(place, "").contains("sum.cu is not a kernel file"));
    assert!(refused(&place.join("none"), "").starts_with("FLOW_KERNELS: "));
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    use Argument::{Int, Long, Read, Write};
    let x = Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap();
    let double = x.to_dtype(DType::F64).unwrap();
    let launch =
        |arguments: &[Argument]| emulator::with(true, || launch::launch("add_in_place", Grid::elements(4), arguments));
    assert!(launch(&[Write(&x), Read(&x.copy().unwrap()), Long(4)]).is_ok());
    for wrong in [
        &[Write(&x), Read(&x)][..],
        &[Read(&x), Read(&x), Long(4)],
        &[Write(&x), Read(&double), Long(4)],
        &[Write(&x), Read(&x), Int(4)],
        &[Write(&x), Write(&x), Long(4)],
    ] {
        assert!(launch(wrong).is_err());
    }
    let unknown = launch::launch("nothing", Grid::rows(1), &[]).unwrap_err();
    assert!(unknown.to_string().contains("not on CUDA yet: nothing"), "{unknown}");
}

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
        emulator::launch(&kernel, [3, 1], &[Argument::Read(&x), Argument::Write(&out)]).map(|()| values(&out))
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
