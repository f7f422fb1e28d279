//! Named parameters, their gradients, and how modules declare them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use flow_kernels::device::moved;
use flow_kernels::elementwise::{add_in_place, scale_in_place};
use flow_kernels::product::low_precision::LowPrecisionRhs;
use flow_kernels::{Noise, is_gpu};

use crate::Precision;
use crate::error::{Error, Result};
use crate::lora::Targets;
use crate::shared_tensors::{Shared, SharedTensor, forget_unused, place_of};
use crate::stacks::Stacks;
use crate::tensor_files::TensorEntry;

/// Index of a parameter in its [`Parameters`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub struct ParameterId(usize);

impl ParameterId {
    /// Position in the list of parameters, which is the order in which the modules declared them.
    pub fn index(self) -> usize {
        self.0
    }
}

/// One tensor of the model.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// The key of NeMo's state dict, such as `encoder.layers.0.norm_out.weight`.
    pub name: String,
    pub tensor: Tensor,
    /// False for buffers such as `running_mean` and for parameters that are frozen: they are part of checkpoints, but have no
    /// gradient.
    pub trainable: bool,
}

/// All tensors of a model, in the order in which its modules declared them, with an index by name.
#[derive(Clone, Debug)]
pub struct Parameters {
    list: Vec<Parameter>,
    by_name: HashMap<String, ParameterId>,
    dtype: DType,
    device: Device,
    precision: Precision,
    /// Matrices that are kept in low precision alone.
    packed: HashMap<ParameterId, Arc<LowPrecisionRhs>>,
    stacks: Stacks,
    /// The places of tensors that other models have, too.
    shared: HashMap<ParameterId, Arc<SharedTensor>>,
}

impl Parameters {
    /// An empty list whose floating-point tensors will be of `dtype` on `device`.
    pub fn new(dtype: DType, device: Device) -> Self {
        Self {
            list: Vec::new(),
            by_name: HashMap::new(),
            dtype,
            device,
            precision: Precision::F32,
            packed: HashMap::new(),
            stacks: Stacks::default(),
            shared: HashMap::new(),
        }
    }

    /// Data type that is computed in: that of the floating-point tensors, but for matrices that are stored in a shorter
    /// one ([`ParameterBuilder::store_matrices_as`]).
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Data type in which the matrices of linear layers are stored.
    pub fn matrix_dtype(&self) -> DType {
        let short =
            |parameter: &&Parameter| parameter.tensor.dtype().is_float() && parameter.tensor.dtype() != self.dtype;
        self.list
            .iter()
            .find(short)
            .map_or(self.dtype, |parameter| parameter.tensor.dtype())
    }

    /// What the factors of products with matrices are rounded to ([`ParameterBuilder::compute_products_in`]).
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// A matrix that is kept in low precision alone. Its tensor has its shape, and no numbers.
    pub fn packed(&self, id: ParameterId) -> Option<&LowPrecisionRhs> {
        self.packed.get(&id).map(Arc::as_ref)
    }

    /// The matrices of several parameters below each other, without a copy, where [`ParameterBuilder::stack`] laid them so and
    /// none was replaced since.
    pub fn stacked(&self, ids: &[ParameterId]) -> Option<&Tensor> {
        self.stacks.whole(ids, |id| Some(self.get(id).id()))
    }

    /// An error where matrices are kept in low precision: what is asked for needs their numbers.
    pub fn check_f32(&self, what: &str) -> Result<()> {
        match self.precision {
            Precision::F32 => Ok(()),
            low => Err(Error::Input(format!(
                "a model of precision {} is for decoding alone; it is not {what}",
                low.name()
            ))),
        }
    }

    /// Where the tensors are.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Adds a tensor. A name that is there already gets the new tensor and keeps its place; modules declare names
    /// through [`ParameterBuilder`], which refuses a name given twice.
    pub fn add(&mut self, name: impl Into<String>, tensor: Tensor, trainable: bool) -> ParameterId {
        let name = name.into();
        if let Some(&id) = self.by_name.get(&name) {
            self.list[id.0] = Parameter {
                name,
                tensor,
                trainable,
            };
            return id;
        }
        let id = ParameterId(self.list.len());
        self.by_name.insert(name.clone(), id);
        self.list.push(Parameter {
            name,
            tensor,
            trainable,
        });
        id
    }

    /// The tensor of a parameter. The id must come from these parameters (or a copy of them).
    pub fn get(&self, id: ParameterId) -> &Tensor {
        &self.list[id.0].tensor
    }

    /// The tensor of a matrix in the data type that is computed in; it may be stored in a shorter one.
    pub fn matrix(&self, id: ParameterId) -> Result<Tensor> {
        Ok(self.get(id).to_dtype(self.dtype)?)
    }

    /// The parameter itself.
    pub fn parameter(&self, id: ParameterId) -> &Parameter {
        &self.list[id.0]
    }

    /// Replaces a tensor by one of the same shape, in the same data type and on the same device.
    pub fn set(&mut self, id: ParameterId, tensor: Tensor) -> Result<()> {
        let old = &mut self.list[id.0];
        if old.tensor.dims() != tensor.dims() {
            return Err(Error::TensorShape {
                name: old.name.clone(),
                found: tensor.dims().to_vec(),
                expected: old.tensor.dims().to_vec(),
            });
        }
        self.stacks.forget(id);
        // Neither copies where nothing changes.
        old.tensor = tensor.to_dtype(old.tensor.dtype())?.to_device(&self.device)?;
        Ok(())
    }

    /// Overwrites a tensor in place with values of the same shape and type, from any device. All tensors that share its
    /// storage change too, and no second copy is needed.
    ///
    /// # Errors
    /// If the shape or type is another one, or the model is for decoding and other models may have the tensor.
    pub fn overwrite(&mut self, id: ParameterId, new: &Tensor) -> Result<()> {
        if self.shared.contains_key(&id) {
            let name = &self.parameter(id).name;
            return Err(Error::Input(format!(
                "`{name}` is shared with other models and is not overwritten"
            )));
        }
        let new = moved(new, &self.device)?;
        match self.get(id).dims() {
            // A single number has no rows to write to.
            [] => self.set(id, new.copy()?),
            _ => Ok(self.get(id).slice_set(&new, 0, 0)?),
        }
    }

    /// A copy whose tensors are its own, on a device.
    pub fn copied_to(&self, device: &Device) -> Result<Self> {
        let mut copy = self.clone();
        copy.device = device.clone();
        copy.stacks.clear();
        copy.shared.clear();
        for parameter in &mut copy.list {
            parameter.tensor = if parameter.tensor.device().same_device(device) {
                parameter.tensor.force_contiguous()?
            } else {
                moved(&parameter.tensor, device)?
            };
        }
        Ok(copy)
    }

    /// The id of a name.
    pub fn id(&self, name: &str) -> Option<ParameterId> {
        self.by_name.get(name).copied()
    }

    /// All parameters in order.
    pub fn iter(&self) -> impl Iterator<Item = (ParameterId, &Parameter)> {
        self.list
            .iter()
            .enumerate()
            .map(|(index, parameter)| (ParameterId(index), parameter))
    }

    /// Number of parameters, buffers included.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Sets whether a parameter has a gradient.
    pub fn set_trainable(&mut self, id: ParameterId, trainable: bool) {
        self.list[id.0].trainable = trainable;
    }

    /// Number of elements of all trainable parameters.
    pub fn count_trainable(&self) -> usize {
        self.list
            .iter()
            .filter(|p| p.trainable)
            .map(|p| p.tensor.elem_count())
            .sum()
    }
}

/// One optional gradient per parameter.
#[derive(Clone, Debug)]
pub struct Gradients {
    gradients: Vec<Option<Tensor>>,
    /// Shape per parameter, and its name for messages.
    expected: Vec<(String, Vec<usize>)>,
    frozen: Vec<bool>,
    stacks: Stacks,
}

impl Gradients {
    /// No gradients yet; buffers (parameters that are not trainable) are frozen.
    pub fn new(parameters: &Parameters) -> Self {
        Self {
            gradients: vec![None; parameters.len()],
            expected: parameters
                .iter()
                .map(|(_, p)| (p.name.clone(), p.tensor.dims().to_vec()))
                .collect(),
            frozen: parameters.iter().map(|(_, p)| !p.trainable).collect(),
            stacks: Stacks::default(),
        }
    }

    /// Adds `gradient` to that of this parameter, in place if there is one. Otherwise the tensor itself is kept and
    /// later changed in place, so its storage must not be shared with a tensor that is used afterwards.
    ///
    /// Dropped without effect for a frozen parameter.
    pub fn add(&mut self, id: ParameterId, gradient: Tensor) -> Result<()> {
        if self.frozen[id.0] {
            return Ok(());
        }
        let (name, shape) = &self.expected[id.0];
        if gradient.dims() != shape.as_slice() {
            return Err(Error::TensorShape {
                name: format!("gradient of {name}"),
                found: gradient.dims().to_vec(),
                expected: shape.clone(),
            });
        }
        match &self.gradients[id.0] {
            Some(sum) => add_in_place(sum, &gradient)?,
            None => self.gradients[id.0] = Some(gradient.contiguous()?),
        }
        Ok(())
    }

    /// Adds the gradients of several parameters of one shape, which are below each other in `gradient`.
    pub fn add_stacked(&mut self, ids: &[ParameterId], gradient: Tensor) -> Result<()> {
        let parts = gradient.chunk(ids.len(), 0)?;
        self.add_parts(ids, gradient, parts)
    }

    /// Adds gradients that are parts of one tensor and share its storage.
    pub fn add_parts(&mut self, ids: &[ParameterId], whole: Tensor, parts: Vec<Tensor>) -> Result<()> {
        let alone = ids
            .iter()
            .all(|id| self.gradients[id.0].is_none() && !self.frozen[id.0]);
        if alone {
            self.stacks.note(ids, whole, &parts);
        }
        for (&id, part) in ids.iter().zip(parts) {
            self.add(id, part)?;
        }
        Ok(())
    }

    /// The tensor that the gradients of several parameters are the parts of, where [`Gradients::add_stacked`] found none of them and
    /// none was taken or replaced since. What is added there is added to each.
    pub fn stacked(&self, ids: &[ParameterId]) -> Option<&Tensor> {
        self.stacks.whole(ids, |id| self.get(id).map(Tensor::id))
    }

    /// The gradient of a parameter, if any was added.
    pub fn get(&self, id: ParameterId) -> Option<&Tensor> {
        self.gradients[id.0].as_ref()
    }

    /// Multiplies every gradient by `factor`, in place.
    pub fn scale(&mut self, factor: f64) -> Result<()> {
        for gradient in self.gradients.iter().flatten() {
            scale_in_place(gradient, factor)?;
        }
        Ok(())
    }

    /// The present gradients, in the order of the parameters.
    pub fn iter(&self) -> impl Iterator<Item = (ParameterId, &Tensor)> {
        self.gradients
            .iter()
            .enumerate()
            .filter_map(|(index, gradient)| gradient.as_ref().map(|g| (ParameterId(index), g)))
    }

    /// Takes a gradient out, so that it can be reduced or applied while others still grow.
    pub fn take(&mut self, id: ParameterId) -> Option<Tensor> {
        self.stacks.forget(id);
        self.gradients[id.0].take()
    }

    /// Replaces a gradient (after a reduction over ranks, for example).
    pub fn put(&mut self, id: ParameterId, gradient: Tensor) -> Result<()> {
        self.stacks.forget(id);
        self.gradients[id.0] = None;
        self.add(id, gradient)
    }

    /// Forgets all gradients; what is frozen stays frozen.
    pub fn clear(&mut self) {
        self.stacks.clear();
        self.gradients.fill(None);
    }

    /// From now on gradients of this parameter are dropped.
    pub fn freeze(&mut self, id: ParameterId) {
        self.stacks.forget(id);
        self.frozen[id.0] = true;
        self.gradients[id.0] = None;
    }

    /// Whether a gradient of this parameter is kept; a layer may skip the work otherwise.
    pub fn wants(&self, id: ParameterId) -> bool {
        !self.frozen[id.0]
    }
}

/// New values of buffers (batch norm's running statistics) that a forward pass in training mode found. The caller
/// applies them once; a recomputed forward pass makes them again and they are then dropped.
#[derive(Debug, Default)]
pub struct BufferUpdates(Vec<(ParameterId, Tensor)>);

impl BufferUpdates {
    /// Notes the new value of a buffer.
    pub fn push(&mut self, id: ParameterId, tensor: Tensor) {
        self.0.push((id, tensor));
    }

    /// Sets all noted buffers.
    pub fn apply(self, parameters: &mut Parameters) -> Result<()> {
        for (id, tensor) in self.0 {
            parameters.set(id, tensor)?;
        }
        Ok(())
    }
}

/// Train or evaluate; in training with the source of randomness for dropout.
#[derive(Debug)]
pub enum Mode<'a> {
    Evaluate,
    Train(&'a mut Noise),
}

impl Mode<'_> {
    /// Whether this is training.
    pub fn is_training(&self) -> bool {
        matches!(self, Mode::Train(_))
    }

    /// The same mode for a module below, borrowed for its call.
    pub fn reborrow(&mut self) -> Mode<'_> {
        match self {
            Mode::Evaluate => Mode::Evaluate,
            Mode::Train(noise) => Mode::Train(noise),
        }
    }
}

/// How a parameter is filled when it is not loaded.
pub enum Initialise {
    /// Uniform in `[-bound, bound)`. Torch's default for linear and convolution layers (Kaiming-uniform with
    /// a = sqrt 5) is a bound of `1 / sqrt(fan_in)`, for weights and biases alike.
    Uniform(f64),
    /// Normal with mean 0 and this standard deviation.
    Normal(f64),
    Constant(f64),
    /// Values made by the caller, row-major, from a generator that belongs to this parameter.
    With(MakeValues),
}

/// Makes the values of a parameter, row-major.
pub type MakeValues = Box<dyn FnOnce(&mut Noise) -> Vec<f64>>;

enum Origin {
    Random(Noise),
    Loaded(BTreeMap<String, TensorEntry>),
}

/// Collects the parameters of a model while its modules are constructed: from a seed, or from loaded tensors.
///
/// The value of a parameter made from a seed depends on the seed and its own name only, not on the order of
/// construction.
pub struct ParameterBuilder {
    parameters: Parameters,
    /// Data type in which matrices are stored.
    matrices: DType,
    origin: Origin,
    lora: Option<Targets>,
    /// Whether tensors are shared with other models for decoding.
    shares: bool,
    /// Makes the first values of what is not loaded although the rest is.
    added: Noise,
}

impl ParameterBuilder {
    /// Parameters will be initialised from `seed`.
    pub fn random(dtype: DType, device: Device, seed: u64) -> Self {
        Self {
            parameters: Parameters::new(dtype, device),
            matrices: dtype,
            origin: Origin::Random(Noise::new(seed)),
            lora: None,
            shares: false,
            added: Noise::new(seed),
        }
    }

    /// Takes parameters from `tensors` by name, converts them to `dtype` and moves them to `device`.
    pub fn from_tensors(dtype: DType, device: Device, tensors: impl IntoIterator<Item = (String, Tensor)>) -> Self {
        let entry = |(name, tensor)| TensorEntry::in_memory(name, tensor);
        Self::from_entries(dtype, device, tensors.into_iter().map(entry))
    }

    /// The same with tensors that are read on demand, so that there are never two copies of the model in memory.
    pub fn from_entries(dtype: DType, device: Device, entries: impl IntoIterator<Item = TensorEntry>) -> Self {
        Self {
            parameters: Parameters::new(dtype, device),
            matrices: dtype,
            origin: Origin::Loaded(entries.into_iter().map(|entry| (entry.name.clone(), entry)).collect()),
            lora: None,
            shares: false,
            added: Noise::new(0),
        }
    }

    /// Stores the matrices of linear layers, which are nearly all of a model, in a shorter data type than is computed
    /// in: half the memory with bf16 or f16. Each is widened where it is used.
    pub fn store_matrices_as(mut self, dtype: DType) -> Self {
        self.matrices = dtype;
        self
    }

    /// Shares tensors that are read from the same places of the same files with other models that do so, on the CPU. Such models
    /// are for decoding.
    pub fn share_tensors(mut self) -> Self {
        self.shares = self.parameters.device.is_cpu();
        forget_unused();
        self
    }

    /// Gives linear layers that are targets the thin matrices of LoRA: loaded ones, else new ones from `seed`.
    pub fn with_lora(mut self, targets: Targets, seed: u64) -> Self {
        self.lora = Some(targets);
        self.added = Noise::new(seed);
        self
    }

    /// What LoRA is for, if anything.
    pub fn lora_targets(&mut self) -> Option<&mut Targets> {
        self.lora.as_mut()
    }

    /// Data type of the parameters.
    pub fn dtype(&self) -> DType {
        self.parameters.dtype
    }

    /// Data type in which matrices are stored.
    pub fn matrix_dtype(&self) -> DType {
        self.matrices
    }

    /// Whether parameters are loaded and, if so, whether `name` is among the tensors not used yet. For modules whose
    /// names depend on settings that are not part of the configuration.
    pub fn loaded_has(&self, name: &str) -> Option<bool> {
        match &self.origin {
            Origin::Random(_) => None,
            Origin::Loaded(tensors) => Some(tensors.contains_key(name)),
        }
    }

    /// Keeps matrices (those of [`ParameterBuilder::matrix`], and what [`ParameterBuilder::pack`] names) in low precision alone,
    /// for products in it. Such a model is for decoding, on the CPU in f32.
    pub fn compute_products_in(mut self, precision: Precision) -> Self {
        self.parameters.precision = precision;
        self
    }

    /// The same for what is declared from now on; gives what was said before.
    pub fn set_precision(&mut self, precision: Precision) -> Precision {
        std::mem::replace(&mut self.parameters.precision, precision)
    }

    /// Declares a trainable parameter.
    pub fn parameter(&mut self, name: &str, shape: &[usize], initialise: Initialise) -> Result<ParameterId> {
        self.declare(name, shape, initialise, self.parameters.dtype, true)
    }

    /// Declares a trainable parameter that is newly made where it is not among the loaded tensors.
    pub fn added(&mut self, name: &str, shape: &[usize], initialise: Initialise) -> Result<ParameterId> {
        if self.loaded_has(name) != Some(false) {
            return self.parameter(name, shape, initialise);
        }
        let (dtype, device) = (self.parameters.dtype, self.parameters.device.clone());
        let tensor = initial(initialise, shape, &mut self.added.derive(name))?;
        self.insert(name, tensor.to_dtype(dtype)?.to_device(&device)?, true)
    }

    /// Declares a trainable matrix, to be used through [`Parameters::matrix`].
    pub fn matrix(&mut self, name: &str, shape: &[usize], initialise: Initialise) -> Result<ParameterId> {
        let id = self.declare(name, shape, initialise, self.matrices, true)?;
        self.pack(id)?;
        Ok(id)
    }

    /// Keeps a weight (outputs, inputs, 1, ...) that was declared in low precision alone, if that was asked for: products are those
    /// of [`Parameters::packed`].
    pub fn pack(&mut self, id: ParameterId) -> Result<()> {
        let Some(low) = self.parameters.precision.low() else {
            return Ok(());
        };
        let place = self.parameters.shared.get(&id).cloned();
        let mut shared = place.as_ref().map(|place| place.lock());
        let shared = shared.as_mut().and_then(|shared| shared.as_mut());
        let there = shared.as_ref().and_then(|shared| shared.packed.clone());
        let packed = match there {
            Some(packed) => packed,
            None => Arc::new(LowPrecisionRhs::from_weight(low, &self.get(id).flatten_from(1)?)?),
        };
        let shape = self.get(id).dims().to_vec();
        let nothing = Tensor::new(f32::NAN, &Device::Cpu)?.broadcast_as(shape)?;
        if let Some(shared) = shared {
            shared.tensor = nothing.clone();
            shared.packed = Some(Arc::clone(&packed));
        }
        self.parameters.list[id.0].tensor = nothing;
        self.parameters.packed.insert(id, packed);
        Ok(())
    }

    /// Lays matrices of one shape that were declared below each other in one tensor, if they are on a device: see
    /// [`Parameters::stacked`]. What is written into one of them afterwards is written there.
    pub fn stack(&mut self, ids: &[ParameterId]) -> Result<()> {
        if !is_gpu(&self.parameters.device) {
            return Ok(());
        }
        let tensors: Vec<&Tensor> = ids.iter().map(|&id| self.get(id)).collect();
        let whole = Tensor::cat(&tensors, 0)?;
        let parts = self.parameters.stacks.cut(ids, whole)?;
        for (id, part) in ids.iter().zip(parts) {
            self.parameters.list[id.0].tensor = part;
        }
        Ok(())
    }

    /// Declares a buffer of the model's data type.
    pub fn buffer(&mut self, name: &str, shape: &[usize], initialise: Initialise) -> Result<ParameterId> {
        self.declare(name, shape, initialise, self.parameters.dtype, false)
    }

    /// Declares a buffer whose values are known: taken from the loaded tensors where it is among them, otherwise made
    /// of `values`.
    pub fn fixed(&mut self, name: &str, shape: &[usize], values: Vec<f64>) -> Result<ParameterId> {
        if self.loaded_has(name) == Some(false) {
            let tensor = Tensor::from_vec(values, shape, &Device::Cpu)?
                .to_dtype(self.parameters.dtype)?
                .to_device(&self.parameters.device)?;
            return self.insert(name, tensor, false);
        }
        self.buffer(name, shape, Initialise::With(Box::new(move |_| values)))
    }

    /// The tensor of a parameter declared before.
    pub fn get(&self, id: ParameterId) -> &Tensor {
        self.parameters.get(id)
    }

    /// Declares an int64 scalar that counts (batch norm's `num_batches_tracked`); 0 when newly made or not loaded
    /// (older archives have none).
    pub fn counter(&mut self, name: &str) -> Result<ParameterId> {
        let device = self.parameters.device.clone();
        let tensor = match &mut self.origin {
            Origin::Random(_) => None,
            Origin::Loaded(tensors) => tensors.remove(name).map(|entry| entry.load()).transpose()?,
        };
        let tensor = match tensor {
            Some(tensor) if tensor.elem_count() == 1 => tensor.reshape(())?.to_dtype(DType::I64)?.to_device(&device)?,
            Some(tensor) => {
                return Err(Error::TensorShape {
                    name: name.to_string(),
                    found: tensor.dims().to_vec(),
                    expected: vec![],
                });
            }
            None => Tensor::new(0i64, &device)?,
        };
        self.insert(name, tensor, false)
    }

    fn declare(
        &mut self,
        name: &str,
        shape: &[usize],
        initialise: Initialise,
        dtype: DType,
        trainable: bool,
    ) -> Result<ParameterId> {
        let device = self.parameters.device.clone();
        let mut place = None;
        let tensor = match &mut self.origin {
            Origin::Loaded(tensors) => {
                let entry = tensors.remove(name).ok_or_else(|| Error::MissingTensor {
                    name: name.to_string(),
                    shape: shape.to_vec(),
                })?;
                if entry.shape() != shape {
                    return Err(Error::TensorShape {
                        name: name.to_string(),
                        found: entry.shape().to_vec(),
                        expected: shape.to_vec(),
                    });
                }
                let load =
                    || -> Result<Tensor> { Ok(entry.load()?.to_dtype(dtype)?.to_device(&device)?.contiguous()?) };
                match entry.source().filter(|_| self.shares) {
                    None => load()?,
                    Some(source) => {
                        let place = place.insert(place_of(source, dtype, self.parameters.precision));
                        let mut shared = place.lock();
                        match &*shared {
                            Some(shared) => shared.tensor.clone(),
                            None => {
                                let tensor = load()?;
                                *shared = Some(Shared {
                                    tensor: tensor.clone(),
                                    packed: None,
                                });
                                tensor
                            }
                        }
                    }
                }
            }
            Origin::Random(noise) => initial(initialise, shape, &mut noise.derive(name))?
                .to_dtype(dtype)?
                .to_device(&device)?,
        };
        let id = self.insert(name, tensor, trainable)?;
        if let Some(place) = place {
            self.parameters.shared.insert(id, place);
        }
        Ok(id)
    }

    fn insert(&mut self, name: &str, tensor: Tensor, trainable: bool) -> Result<ParameterId> {
        if self.parameters.id(name).is_some() {
            return Err(Error::DuplicateParameter(name.to_string()));
        }
        Ok(self.parameters.add(name, tensor, trainable))
    }

    /// The parameters, and the names of loaded tensors that nothing asked for, in order.
    pub fn finish(self) -> (Parameters, Vec<String>) {
        let unused = match self.origin {
            Origin::Random(_) => Vec::new(),
            Origin::Loaded(tensors) => tensors.into_keys().collect(),
        };
        (self.parameters, unused)
    }
}

/// First values of a parameter, on the CPU.
fn initial(initialise: Initialise, shape: &[usize], noise: &mut Noise) -> Result<Tensor> {
    let count = shape.iter().product();
    let values = match initialise {
        Initialise::Uniform(bound) => (0..count).map(|_| (2.0 * noise.uniform() - 1.0) * bound).collect(),
        Initialise::Normal(deviation) => (0..count).map(|_| noise.normal() * deviation).collect(),
        Initialise::Constant(value) => vec![value; count],
        Initialise::With(make) => make(noise),
    };
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}
