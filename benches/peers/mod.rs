//! The programs in Python that benchmarks run beside `flow`.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::measured::python;

/// Threads that a process computes with.
pub const THREADS: &str = "2";

/// How often each program is measured: the number of the command line, or 1.
pub fn rounds() -> usize {
    std::env::args()
        .find_map(|argument| argument.parse().ok())
        .unwrap_or(1usize)
        .max(1)
}

/// A script of this folder.
pub fn peer(script: &str, root: &Path) -> Command {
    let mut command = Command::new(python());
    command.arg(root.join("benches/peers").join(script));
    for variable in ["OMP_NUM_THREADS", "MKL_NUM_THREADS"] {
        command.env(variable, THREADS);
    }
    command.env("CUDA_VISIBLE_DEVICES", "");
    command
}

/// Whether the folder `onnx` has the model in onnx-asr's format; if not, NeMo exports it, if installed.
pub fn exported(root: &Path, onnx: &Path, nemo: bool) -> bool {
    let export = || {
        let mut export = peer("transcribe_nemo.py", root);
        export
            .arg("--export")
            .arg(root.join("configs/models/small.nemo"))
            .arg(onnx);
        let status = export.stdout(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    };
    let is_there = onnx.join("vocab.txt").exists() || (nemo && export());
    if !is_there {
        println!("onnx_asr: the model could not be exported, for which NeMo and onnx are needed; left out");
    }
    is_there
}
