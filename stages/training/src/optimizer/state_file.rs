//! The state of an optimizer as a safetensors file.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use candle_core::{Device, Tensor};
use flow_kernels::adamw::eight_bit::BLOCK;
use flow_kernels::adamw::{Moment, Numbers};
use safetensors::tensor::{Dtype, Metadata, SafeTensors, TensorInfo, View};
use serde::Deserialize;

use super::adamw::{AdamW, AdamWConfig, Moments};
use crate::error::TrainingError;

/// Name of the metadata entry of a state file.
const STATE: &str = "state";

#[derive(Deserialize)]
struct StateMetadata {
    optimizer: String,
    /// Updates that each parameter has had.
    steps: BTreeMap<String, u64>,
}

/// Tensors and metadata of a safetensors file.
pub(super) type Stored<'a> = (Vec<(String, NumbersView<'a>)>, HashMap<String, String>);

impl AdamW {
    /// The state as safetensors: `first.<name>`, `second.<name>`, and the update counts as metadata; where these are
    /// codes of eight bits, `first_scale.<name>` and `second_scale.<name>` too; `master.<name>` are master weights.
    pub(super) fn stored<'a>(&'a self, keep: impl Fn(&str) -> bool) -> Result<Stored<'a>, TrainingError> {
        let mut tensors: Vec<(String, NumbersView<'_>)> = Vec::with_capacity(self.moments.len() * 2);
        let mut steps = BTreeMap::new();
        for (name, moments) in self.moments.iter().filter(|(name, _)| keep(name)) {
            for (part, numbers) in [("first", &moments.first), ("second", &moments.second)] {
                let numbers = numbers.on_host()?;
                let scales = numbers.scales();
                tensors.push((format!("{part}.{name}"), NumbersView(numbers, moments.shape.clone())));
                if let Some(scales) = scales {
                    let shape = vec![scales.bytes().len() / size_of::<f32>()];
                    tensors.push((format!("{part}_scale.{name}"), NumbersView(Cow::Owned(scales), shape)));
                }
            }
            if let Some(master) = moments.master_on_host()? {
                let view = NumbersView(Cow::Owned(master), moments.shape.clone());
                tensors.push((format!("master.{name}"), view));
            }
            steps.insert(name.as_str(), moments.steps);
        }
        let state = serde_json::json!({ "optimizer": "adamw", "steps": steps }).to_string();
        // One metadata entry only: the format keeps them in a hash map, whose order is not fixed.
        Ok((tensors, HashMap::from([(STATE.to_owned(), state)])))
    }

    /// Writes the state to a file: the bytes that `safetensors::serialize` gives, which are not made in memory first.
    /// (The library's own way to write a file makes one that nobody but its owner may read, whatever the umask.)
    pub fn save(&self, path: &Path) -> Result<(), TrainingError> {
        let (mut tensors, metadata) = self.stored(|_| true)?;
        tensors.sort_by(|(a, left), (b, right)| right.dtype().cmp(&left.dtype()).then_with(|| a.cmp(b)));
        let mut end = 0;
        let infos = tensors.iter().map(|(name, view)| {
            let begin = end;
            end += view.data_len();
            let info = TensorInfo {
                dtype: view.dtype(),
                shape: view.shape().to_vec(),
                data_offsets: (begin, end),
            };
            (name.clone(), info)
        });
        let infos = infos.collect();
        let wrong = |error: &dyn std::fmt::Display| {
            TrainingError::data(format!(
                "{}: optimizer state cannot be written: {error}",
                path.display()
            ))
        };
        let metadata = Metadata::new(Some(metadata), infos).map_err(|error| wrong(&error))?;
        let mut header = serde_json::to_vec(&metadata).map_err(|error| wrong(&error))?;
        header.resize(header.len().next_multiple_of(size_of::<u64>()), b' ');
        let write = || -> std::io::Result<()> {
            let mut out = BufWriter::with_capacity(1 << 20, File::create(path)?);
            out.write_all(&(header.len() as u64).to_le_bytes())?;
            out.write_all(&header)?;
            for (_, view) in &tensors {
                out.write_all(&view.data())?;
            }
            out.flush()
        };
        write().map_err(TrainingError::file(path))
    }

    /// The bytes that [`AdamW::save`] would write if there were the moments of this parameter alone.
    pub fn bytes_of(&self, name: &str) -> Result<Vec<u8>, TrainingError> {
        let (tensors, metadata) = self.stored(|other| other == name)?;
        safetensors::serialize(tensors, Some(metadata))
            .map_err(|e| TrainingError::data(format!("optimizer state of {name} cannot be written: {e}")))
    }

    /// Reads what [`AdamW::save`] wrote. The coefficients are not part of it; moments stay in as many bits as they
    /// have.
    pub fn load(path: &Path, config: AdamWConfig) -> Result<Self, TrainingError> {
        let bytes = std::fs::read(path).map_err(TrainingError::file(path))?;
        Self::from_bytes(&bytes, config, &path.display())
    }

    /// Reads the bytes of such a file; errors name `source`.
    pub fn from_bytes(
        bytes: &[u8],
        config: AdamWConfig,
        source: &dyn std::fmt::Display,
    ) -> Result<Self, TrainingError> {
        let bad = |message: String| TrainingError::data(format!("{source}: {message}"));
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|e| bad(e.to_string()))?;
        let tensors = SafeTensors::deserialize(bytes).map_err(|e| bad(e.to_string()))?;
        let metadata = header
            .metadata()
            .as_ref()
            .ok_or_else(|| bad("it has no metadata".into()))?;
        let state: StateMetadata = metadata
            .get(STATE)
            .and_then(|text| serde_json::from_str(text).ok())
            .ok_or_else(|| bad("its update counts cannot be read".into()))?;
        if state.optimizer != "adamw" {
            return Err(bad(format!(
                "it holds the state of optimizer {}, not of adamw",
                state.optimizer
            )));
        }
        let mut moments = BTreeMap::new();
        for (name, steps) in state.steps {
            let read = |part: &str| -> Result<(Moment, Vec<usize>), TrainingError> {
                let view = tensors
                    .tensor(&format!("{part}.{name}"))
                    .map_err(|e| bad(format!("{part}.{name}: {e}")))?;
                let numbers = match view.dtype() {
                    Dtype::F32 => Numbers::F32(
                        view.data()
                            .as_chunks::<4>()
                            .0
                            .iter()
                            .map(|b| f32::from_le_bytes(*b))
                            .collect(),
                    ),
                    Dtype::F64 => Numbers::F64(
                        view.data()
                            .as_chunks::<8>()
                            .0
                            .iter()
                            .map(|b| f64::from_le_bytes(*b))
                            .collect(),
                    ),
                    Dtype::U8 => {
                        let scales = tensors
                            .tensor(&format!("{part}_scale.{name}"))
                            .map_err(|e| bad(format!("{part}_scale.{name}: {e}")))?;
                        let codes = view.data().to_vec();
                        let (scales, rest) = scales.data().as_chunks::<4>();
                        if !rest.is_empty() || scales.len() != codes.len().div_ceil(BLOCK) {
                            return Err(bad(format!("{part}_scale.{name} does not fit {part}.{name}")));
                        }
                        let scales = scales.iter().map(|b| f32::from_le_bytes(*b)).collect();
                        Numbers::Coded { codes, scales }
                    }
                    other => return Err(bad(format!("{part}.{name} has type {other:?}"))),
                };
                Ok((Moment::Host(numbers), view.shape().to_vec()))
            };
            let (first, shape) = read("first")?;
            let (second, second_shape) = read("second")?;
            if shape != second_shape {
                return Err(bad(format!("first.{name} and second.{name} differ in shape")));
            }
            let master = match tensors.tensor(&format!("master.{name}")) {
                Err(_) => None,
                Ok(view) if view.dtype() == Dtype::F32 && view.shape() == shape => {
                    let (values, _) = view.data().as_chunks::<4>();
                    let values = values.iter().map(|b| f32::from_le_bytes(*b)).collect();
                    Some(Tensor::from_vec(values, shape.as_slice(), &Device::Cpu)?)
                }
                Ok(_) => return Err(bad(format!("master.{name} does not fit first.{name}"))),
            };
            moments.insert(
                name,
                Moments {
                    steps,
                    shape,
                    first,
                    second,
                    master,
                },
            );
        }
        let mut optimizer = AdamW::new(config);
        optimizer.moments = moments;
        Ok(optimizer)
    }
}

pub(super) struct NumbersView<'a>(Cow<'a, Numbers>, Vec<usize>);

impl View for NumbersView<'_> {
    fn dtype(&self) -> Dtype {
        match *self.0 {
            Numbers::F32(_) => Dtype::F32,
            Numbers::F64(_) => Dtype::F64,
            Numbers::Coded { .. } => Dtype::U8,
        }
    }

    fn shape(&self) -> &[usize] {
        &self.1
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.0.bytes())
    }

    fn data_len(&self) -> usize {
        self.0.bytes().len()
    }
}
