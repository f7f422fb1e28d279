//! For tests of this crate: NeMo's golden data.

pub mod golden {
    use candle_core::Tensor;
    pub use flow_nn::testing::golden::*;

    use crate::config::ModelConfig;

    /// The configuration in the golden archive, and its weights.
    pub fn model() -> (ModelConfig, Vec<(String, Tensor)>) {
        let text = String::from_utf8(member("model_config.yaml")).unwrap();
        (ModelConfig::from_nemo_yaml(&text).unwrap(), weights())
    }
}
