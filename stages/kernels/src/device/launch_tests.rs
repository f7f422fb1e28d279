//! Kernel files that are read, and arguments that are checked.

use candle_core::{DType, Device, Tensor};

use super::launch::{self, Argument, Grid};
use super::signature;
use super::sources::{File, read, sources};
use crate::flow_cuda_emulator::emulator;

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
