//! Hand-written gradients against candle's automatic differentiation. The layers are put together a second time from those of
//! candle-nn; from the same weights and inputs both have to find the same outputs, and the same gradients of the inputs and of each
//! parameter.

mod heads;
mod layers;

use std::collections::HashMap;

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::VarBuilder;
use flow_kernels::Noise;
use flow_kernels::testing::{max_difference, normal, values};

use flow_nn::parameters::{Gradients, ParameterBuilder, Parameters};

/// Both number types that the CPU computes training in. That of 64 bits tells a wrong formula from rounding; that of 32 bits has vector
/// code of its own.
const DTYPES: [DType; 2] = [DType::F64, DType::F32];

/// Largest difference, in units in the last place of the largest value times the square root of the terms of the longest sum: errors of
/// a sum's terms are independent, and a few layers are behind each other.
const UNITS: f64 = 4.0;

/// The tensors of a layer as variables of candle's, by name.
struct Variables {
    by_name: HashMap<String, Var>,
    dtype: DType,
}

impl Variables {
    fn of(parameters: &Parameters) -> Result<Self> {
        let variable = |name: &str, tensor: &Tensor| Ok((name.to_owned(), Var::from_tensor(tensor)?));
        let all = parameters.iter().map(|(_, p)| variable(&p.name, &p.tensor));
        Ok(Variables {
            by_name: all.collect::<Result<_>>()?,
            dtype: parameters.dtype(),
        })
    }

    fn find(&self, name: &str) -> Option<Tensor> {
        self.by_name.get(name).map(|variable| variable.as_tensor().clone())
    }

    fn get(&self, name: &str) -> Tensor {
        self.find(name).unwrap_or_else(|| panic!("no parameter {name}"))
    }

    /// A linear layer, or a pointwise convolution as one.
    fn linear(&self, name: &str) -> Result<candle_nn::Linear> {
        let weight = self.get(&format!("{name}.weight")).flatten_from(1)?;
        Ok(candle_nn::Linear::new(weight, self.find(&format!("{name}.bias"))))
    }

    /// For layers that candle-nn makes by the names of their tensors.
    fn builder(&self) -> VarBuilder<'static> {
        let tensors = self.by_name.iter();
        let tensors = tensors.map(|(name, variable)| (name.clone(), variable.as_tensor().clone()));
        VarBuilder::from_tensors(tensors.collect(), self.dtype, &Device::Cpu)
    }
}

/// The parameters of a layer that `make` declares, none of them at the special values (zeros and ones) that they begin with.
fn declared<L>(dtype: DType, make: impl FnOnce(&mut ParameterBuilder) -> crate::Result<L>) -> (L, Parameters) {
    let mut builder = ParameterBuilder::random(dtype, Device::Cpu, 5);
    let layer = make(&mut builder).unwrap();
    let (mut parameters, _) = builder.finish();
    let mut noise = Noise::new(77);
    let ids: Vec<_> = parameters
        .iter()
        .filter(|(_, p)| p.trainable)
        .map(|(id, _)| id)
        .collect();
    for id in ids {
        let more = (random(parameters.get(id).dims(), dtype, &mut noise) * 0.1).unwrap();
        let moved = (parameters.get(id) + more).unwrap();
        parameters.set(id, moved).unwrap();
    }
    (layer, parameters)
}

fn random(shape: &[usize], dtype: DType, noise: &mut Noise) -> Tensor {
    normal(shape, noise).to_dtype(dtype).unwrap()
}

/// What is computed in both ways.
struct Case<'a> {
    name: &'a str,
    parameters: &'a Parameters,
    inputs: &'a [&'a Tensor],
    /// The gradient of the output, and so its shape.
    dy: &'a Tensor,
    /// Terms of the longest sum.
    terms: usize,
}

impl Case<'_> {
    /// `own` gives the output and the gradients of the inputs (none of an input that has none), and adds those of the parameters;
    /// `theirs` makes the output from candle's variables.
    fn compare(
        &self,
        own: impl FnOnce(&mut Gradients) -> crate::Result<(Tensor, Vec<Option<Tensor>>)>,
        theirs: impl FnOnce(&Variables, &[Tensor]) -> Result<Tensor>,
    ) {
        let mut gradients = Gradients::new(self.parameters);
        let (own_y, own_inputs) = own(&mut gradients).unwrap();

        let variables = Variables::of(self.parameters).unwrap();
        let inputs: Vec<Var> = self.inputs.iter().map(|x| Var::from_tensor(x).unwrap()).collect();
        let inputs: Vec<Tensor> = inputs.iter().map(|x| x.as_tensor().clone()).collect();
        let their_y = theirs(&variables, &inputs).unwrap();
        let weighted = (&their_y * self.dy).and_then(|product| product.sum_all()).unwrap();
        let found = weighted.backward().unwrap();

        let rounding = match self.parameters.dtype() {
            DType::F64 => f64::EPSILON,
            _ => f64::from(f32::EPSILON),
        };
        let units = |largest: f64| largest * rounding * (self.terms as f64).sqrt();
        let largest = |tensors: &mut dyn Iterator<Item = &Tensor>| {
            let values = tensors.flat_map(values);
            values.fold(0.0, |largest: f64, value| largest.max(value.abs()))
        };
        let of_parameters = self.parameters.iter().filter(|(_, p)| p.trainable);
        let compared: Vec<(&str, Option<&Tensor>, &Tensor)> = own_inputs
            .iter()
            .zip(&inputs)
            .filter_map(|(own, x)| Some(("input", Some(own.as_ref()?), x)))
            .chain(of_parameters.map(|(id, p)| {
                (
                    p.name.as_str(),
                    gradients.get(id),
                    variables.by_name[&p.name].as_tensor(),
                )
            }))
            .collect();
        let gradient = |x: &Tensor, what: &str| {
            found
                .get(x)
                .unwrap_or_else(|| panic!("candle has no gradient of {what}"))
                .clone()
        };
        let theirs: Vec<Tensor> = compared.iter().map(|(what, _, x)| gradient(x, what)).collect();

        let mut worst = (0.0, "output");
        let mut check = |what, own: &Tensor, theirs: &Tensor, unit: f64| {
            assert_eq!(own.dims(), theirs.dims(), "{}: {what}", self.name);
            let units = max_difference(own, theirs) / unit;
            assert!(
                units < UNITS,
                "{} in {:?}: {what} is {units} units away",
                self.name,
                self.parameters.dtype()
            );
            worst = if units > worst.0 { (units, what) } else { worst };
        };
        check("output", &own_y, &their_y, units(largest(&mut [&their_y].into_iter())));
        let unit = units(largest(&mut theirs.iter()));
        for ((what, own, _), theirs) in compared.iter().zip(&theirs) {
            let own = own.unwrap_or_else(|| panic!("{}: {what} has no gradient", self.name));
            check(what, own, theirs, unit);
        }
        println!(
            "{} in {:?}: at most {:.2} units ({})",
            self.name,
            self.parameters.dtype(),
            worst.0,
            worst.1
        );
    }
}
