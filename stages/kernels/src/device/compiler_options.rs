/// Options of nvcc and of NVRTC. No contraction to fused operations: results are those that the emulator computes.
pub const OPTIONS: [&str; 2] = ["--std=c++17", "--fmad=false"];
