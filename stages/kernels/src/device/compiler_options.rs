/// Options of nvcc and of NVRTC. A product and a sum become one operation (`--fmad`), but for products by `times` of the prelude.
pub const OPTIONS: [&str; 2] = ["--std=c++17", "--fmad=true"];
