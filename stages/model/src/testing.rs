//! For tests of this crate: NeMo's golden data, and training without random numbers.

use crate::model::TrainOptions;

/// Training in which nothing is drawn: no SpecAugment, dither or dropout.
pub fn quiet() -> TrainOptions {
    TrainOptions {
        spec_augment: false,
        dither: false,
        dropout: false,
        ..TrainOptions::default()
    }
}

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
