//! The kernel files: those in the program, and over them those of a folder that `FLOW_KERNELS` names.
//!
//! `FLOW_KERNEL_DEFINES="TILE=64 STAGES=3"` defines macros for all of them. So a variant of a kernel is a file of a few kilobytes
//! that a program measures beside its own.

use std::path::Path;
use std::sync::OnceLock;

use crate::error::{Error, Result};

/// Code that is put before each kernel file.
const PRELUDE: &str = include_str!("prelude.cuh");

/// The kernel files in the program, by name.
const FILES: [(&str, &str); 16] = [
    ("adamw", include_str!("../ops/adamw/adamw.cu")),
    ("attention", include_str!("../ops/attention/attention.cu")),
    ("batch_norm", include_str!("../ops/batch_norm/batch_norm.cu")),
    ("ctc", include_str!("../ops/ctc/ctc.cu")),
    ("depthwise", include_str!("../ops/depthwise/depthwise.cu")),
    ("elementwise", include_str!("../ops/elementwise/elementwise.cu")),
    (
        "gated_convolution",
        include_str!("../ops/gated_convolution/gated_convolution.cu"),
    ),
    ("greedy", include_str!("../ops/greedy/greedy.cu")),
    ("joint", include_str!("../ops/joint/joint.cu")),
    ("layer_norm", include_str!("../ops/layer_norm/layer_norm.cu")),
    ("log_mel", include_str!("../ops/log_mel/log_mel.cu")),
    ("lstm", include_str!("../ops/lstm/lstm.cu")),
    (
        "relative_attention",
        include_str!("../ops/relative_attention/relative_attention.cu"),
    ),
    ("subsample", include_str!("../ops/subsample/subsample.cu")),
    ("sums", include_str!("../ops/sums/sums.cu")),
    ("tdt", include_str!("../ops/tdt/tdt.cu")),
];

/// A kernel file.
pub struct File {
    /// Without its ending.
    pub name: &'static str,
    /// Without the prelude.
    pub source: &'static str,
    /// Whether its code is the program's own: file, prelude and macros.
    pub own: bool,
}

/// The kernel files of a process, and what is put before each.
pub struct Sources {
    /// The code before each file.
    pub prelude: &'static str,
    /// All of them.
    pub files: Vec<File>,
    /// `NAME=VALUE` or `NAME`.
    pub defines: Vec<String>,
}

/// The kernel files of this process.
///
/// # Errors
/// If `FLOW_KERNELS` names no folder, or one with a file that is no kernel file; if `FLOW_KERNEL_DEFINES` defines no macros.
pub fn sources() -> Result<&'static Sources> {
    static SOURCES: OnceLock<std::result::Result<Sources, String>> = OnceLock::new();
    let sources = SOURCES.get_or_init(|| {
        let folder = std::env::var_os("FLOW_KERNELS").filter(|folder| !folder.is_empty());
        let defines = std::env::var("FLOW_KERNEL_DEFINES").unwrap_or_default();
        read(folder.as_deref().map(Path::new), &defines)
    });
    sources.as_ref().map_err(|message| Error::Input(message.clone()))
}

/// The program's files, over them those of a folder. What is read lives as long as the process.
pub(crate) fn read(folder: Option<&Path>, defines: &str) -> std::result::Result<Sources, String> {
    let defines: Vec<String> = defines.split_whitespace().map(str::to_owned).collect();
    for define in &defines {
        let name = define.split('=').next().unwrap_or_default();
        let is_name = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        if !is_name {
            return Err(format!("FLOW_KERNEL_DEFINES: `{define}` is not NAME=VALUE"));
        }
    }
    let mut sources = Sources {
        prelude: PRELUDE,
        files: FILES
            .map(|(name, source)| File {
                name,
                source,
                own: defines.is_empty(),
            })
            .into(),
        defines,
    };
    let Some(folder) = folder else { return Ok(sources) };
    let wrong = |error: &dyn std::fmt::Display| format!("FLOW_KERNELS: {}: {error}", folder.display());
    for entry in std::fs::read_dir(folder).map_err(|error| wrong(&error))? {
        let path = entry.map_err(|error| wrong(&error))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let text = || -> std::result::Result<&'static str, String> {
            Ok(std::fs::read_to_string(&path)
                .map_err(|error| format!("FLOW_KERNELS: {}: {error}", path.display()))?
                .leak())
        };
        if name == "prelude.cuh" {
            sources.prelude = text()?;
            sources.files.iter_mut().for_each(|file| file.own = false);
            continue;
        }
        let place = sources
            .files
            .iter_mut()
            .find(|file| name.strip_suffix(".cu") == Some(file.name));
        let file = place.ok_or_else(|| wrong(&format!("{name} is not a kernel file")))?;
        (file.source, file.own) = (text()?, false);
    }
    Ok(sources)
}
