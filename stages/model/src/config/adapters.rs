//! NeMo's adapters in its `model_config.yaml`: a section for each in `adapters`, in the order in which they were added.

use super::read::MAX_WIDTH;
use super::section::{Section, wrong};
use crate::{Error, Result};
use flow_nn::config::{Activation, AdapterConfig, NormPosition};

/// The section beside the adapters that is none.
const GLOBAL: &str = "global_cfg";
const LINEAR: &str = "nemo.collections.common.parts.adapter_modules.LinearAdapter";
const RESIDUAL: &str = "nemo.core.classes.mixins.adapter_mixin_strategies.ResidualAddAdapterStrategy";

/// The adapters of an encoder of this width.
pub(super) fn read(root: &Section, width: usize) -> Result<Vec<AdapterConfig>> {
    let all = root.section("adapters")?;
    let modules = all.section(GLOBAL)?.section("adapter_meta_cfg")?.section("modules")?;
    let mut adapters = Vec::new();
    for key in all.map.into_iter().flat_map(|map| map.keys()) {
        let name = key.as_str().filter(|name| !name.is_empty() && !name.contains('.'));
        let Some(name) = name else {
            return Err(wrong(&all.path, "names of adapters without a dot", key));
        };
        if name == GLOBAL {
            continue;
        }
        modules.only(name, &["encoder".into(), "".into()])?;
        let section = all.section(name)?;
        section.only("_target_", &[LINEAR.into()])?;
        section.only(
            "activation",
            &["swish".into(), "silu".into(), "relu".into(), "identity".into()],
        )?;
        section.only("norm_position", &["pre".into(), "post".into()])?;
        let strategy = section.section("adapter_strategy")?;
        strategy.only("_target_", &[RESIDUAL.into()])?;
        let input = section.size("in_features", 1..=MAX_WIDTH)?;
        if input != width {
            return Err(Error::Config(format!(
                "`{}` is {input}, but `encoder.d_model` is {width}",
                section.key("in_features")
            )));
        }
        adapters.push(AdapterConfig {
            name: name.to_owned(),
            dim: section.size("dim", 1..=MAX_WIDTH)?,
            activation: match section.text("activation")?.as_deref() {
                Some("relu") => Activation::Relu,
                Some("identity") => Activation::Identity,
                _ => Activation::Silu,
            },
            norm_position: match section.text("norm_position")?.as_deref() {
                Some("post") => NormPosition::Post,
                _ => NormPosition::Pre,
            },
            dropout: section.probability("dropout", 0.0)?,
            enabled: section.flag("enabled", true)?,
            regularised: strategy.number("stochastic_depth", 0.0)? != 0.0 || strategy.number("l2_lambda", 0.0)? != 0.0,
        });
    }
    Ok(adapters)
}
