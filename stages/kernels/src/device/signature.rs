//! The parameters of every kernel, read from the kernel files.

use std::collections::HashMap;
use std::sync::OnceLock;

use candle_core::DType;

use super::sources::{Sources, sources};
use crate::error::{Error, Result};

/// A kernel and its file.
pub struct Kernel {
    pub name: &'static str,
    /// Index of its file.
    pub file: usize,
    pub parameters: Vec<Parameter>,
    /// Whether its blocks wait for each other, so that all of them have to run at once.
    pub cooperative: bool,
}

/// The parameters of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Parameter {
    Pointer {
        dtype: DType,
        written: bool,
    },
    /// A table of pointers.
    Pointers {
        dtype: DType,
        written: bool,
    },
    /// A table of 64-bit numbers.
    Longs,
    Int,
    Long,
    Float,
    Double,
}

/// The kernel of this name.
pub fn kernel(name: &str) -> Result<&'static Kernel> {
    all()?
        .get(name)
        .ok_or_else(|| Error::Input(format!("not on CUDA yet: {name}")))
}

/// All kernels by name.
pub fn all() -> Result<&'static HashMap<&'static str, Kernel>> {
    static KERNELS: OnceLock<std::result::Result<HashMap<&'static str, Kernel>, String>> = OnceLock::new();
    let sources = sources()?;
    let kernels = KERNELS.get_or_init(|| of(sources));
    kernels.as_ref().map_err(|message| Error::Input(message.clone()))
}

/// The kernels of these files by name.
pub(crate) fn of(sources: &Sources) -> std::result::Result<HashMap<&'static str, Kernel>, String> {
    let mut kernels = HashMap::new();
    for (number, file) in sources.files.iter().enumerate() {
        for (_, text) in file
            .source
            .match_indices("\nKERNEL(")
            .map(|(at, open)| file.source.split_at(at + open.len()))
        {
            let kernel = read(text, number).ok_or_else(|| format!("{}.cu: a kernel cannot be read", file.name))?;
            if kernels.insert(kernel.name, kernel).is_some() {
                return Err(format!("{}.cu: a kernel is defined twice", file.name));
            }
        }
    }
    Ok(kernels)
}

/// `name, (type name, ...)) {`
fn read(text: &'static str, file: usize) -> Option<Kernel> {
    let (name, rest) = text.split_once(", (")?;
    let (parameters, body) = rest.split_once("))")?;
    let body = body.split("\nKERNEL(").next()?;
    Some(Kernel {
        name,
        file,
        parameters: parameters.split(',').map(parameter).collect::<Option<_>>()?,
        cooperative: body.contains("GRID_BARRIER("),
    })
}

fn parameter(text: &str) -> Option<Parameter> {
    let text = text.trim();
    let (kind, _) = text.rsplit_once(' ')?;
    match kind {
        "int" => return Some(Parameter::Int),
        "u64" => return Some(Parameter::Long),
        "float" => return Some(Parameter::Float),
        "double" => return Some(Parameter::Double),
        "const u64*" => return Some(Parameter::Longs),
        _ => {}
    }
    let (element, table) = match kind.strip_suffix("* const*") {
        Some(element) => (element, true),
        None => (kind.strip_suffix('*')?, false),
    };
    let (element, written) = match element.strip_prefix("const ") {
        Some(element) => (element, false),
        None => (element, true),
    };
    let dtype = match element {
        "float" => DType::F32,
        "double" => DType::F64,
        "u8" => DType::U8,
        "u32" => DType::U32,
        "bf16" => DType::BF16,
        _ => return None,
    };
    Some(if table {
        Parameter::Pointers { dtype, written }
    } else {
        Parameter::Pointer { dtype, written }
    })
}
