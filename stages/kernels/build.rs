//! Compiles the kernel files with nvcc for the cards that are common, so that no process has to wait for NVRTC.
//!
//! Only with the feature `cuda`. `FLOW_KERNEL_ARCHITECTURES` names other compute capabilities than 80, 89 and 90; the code of the
//! largest one is added as PTX, which drivers compile for later cards. nvcc is what `NVCC` names, or the one in the path, in
//! `$CUDA_HOME/bin` or in `/usr/local/cuda/bin`. Without it there is no compiled code, and NVRTC compiles at run time
//! (`src/device/compiled.rs`).

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

include!("src/device/compiler_options.rs");

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    for variable in ["FLOW_KERNEL_ARCHITECTURES", "NVCC", "PATH", "CUDA_HOME"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let folder = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let files = kernel_files();
    let mut table = String::from("static BINARIES: &[(&str, &[u8])] = &[\n");
    if compile(&files, &folder) {
        for (name, _) in &files {
            table.push_str(&format!(
                "    ({name:?}, include_bytes!({:?})),\n",
                folder.join(name).with_extension("fatbin")
            ));
        }
    }
    table.push_str("];\n");
    std::fs::write(folder.join("binaries.rs"), table).expect("OUT_DIR can be written");
}

/// The kernel files by name, with the prelude before each.
fn kernel_files() -> Vec<(String, String)> {
    let (device, ops) = (Path::new("src/device"), Path::new("src/ops"));
    let watch = |path: &Path| println!("cargo::rerun-if-changed={}", path.display());
    // The list of kernel files, and their options.
    watch(&device.join("sources.rs"));
    watch(&device.join("compiler_options.rs"));
    let text = |path: &Path| {
        watch(path);
        std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let prelude = text(&device.join("prelude.cuh"));
    let files_of = |folder: &Path| {
        let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
        entries.map(|entry| entry.expect("a folder can be read").path())
    };
    let paths = files_of(ops)
        .filter(|path| path.is_dir())
        .flat_map(|folder| files_of(&folder));
    let mut files: Vec<(String, String)> = paths
        .filter(|path| path.extension().is_some_and(|extension| extension == "cu"))
        .map(|path| {
            (
                path.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
                path,
            )
        })
        .map(|(name, path)| (name, format!("{prelude}\n{}", text(&path))))
        .collect();
    files.sort();
    files
}

/// The first of the places for nvcc where a program is.
fn nvcc() -> Option<PathBuf> {
    let of = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let places = match of("NVCC") {
        Some(named) => vec![PathBuf::from(named)],
        None => [PathBuf::from("nvcc")]
            .into_iter()
            .chain(of("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc")))
            .chain([PathBuf::from("/usr/local/cuda/bin/nvcc")])
            .collect(),
    };
    places
        .into_iter()
        .find(|place| Command::new(place).arg("--version").output().is_ok())
}

/// Compiles the files into the folder, some at a time; false if there is no nvcc.
fn compile(files: &[(String, String)], folder: &Path) -> bool {
    let Some(nvcc) = nvcc() else {
        println!(
            "cargo::warning=there is no nvcc in the path, in $CUDA_HOME/bin or in /usr/local/cuda/bin: kernels are compiled by NVRTC at run time"
        );
        return false;
    };
    let named = std::env::var("FLOW_KERNEL_ARCHITECTURES").unwrap_or_else(|_| "80,89,90".into());
    let architectures: Vec<u32> = named
        .split(',')
        .map(|text| {
            text.trim()
                .parse()
                .unwrap_or_else(|_| panic!("FLOW_KERNEL_ARCHITECTURES={named}: not like 80,90"))
        })
        .collect();
    let mut targets: Vec<String> = architectures
        .iter()
        .map(|number| format!("--generate-code=arch=compute_{number},code=sm_{number}"))
        .collect();
    if let Some(last) = architectures.iter().max() {
        targets.push(format!("--generate-code=arch=compute_{last},code=compute_{last}"));
    }
    let next = AtomicUsize::new(0);
    let jobs = std::env::var("NUM_JOBS")
        .ok()
        .and_then(|jobs| jobs.parse().ok())
        .unwrap_or(1);
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while let Some((name, text)) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let source = folder.join(name).with_extension("cu");
                    std::fs::write(&source, text).expect("OUT_DIR can be written");
                    let output = Command::new(&nvcc)
                        .arg("--fatbin")
                        .args(OPTIONS)
                        .args(&targets)
                        .arg("-o")
                        .arg(source.with_extension("fatbin"))
                        .arg(&source)
                        .output()
                        .unwrap_or_else(|error| panic!("{}: {error}", nvcc.display()));
                    assert!(
                        output.status.success(),
                        "{name}.cu: {}",
                        String::from_utf8_lossy(&output.stderr)
                    );
                }
            });
        }
    });
    true
}
