//! How many kernels a training step launches, and how often it copies between host and device, part by part. The numbers
//! are those of docs/gpu.md; they may only fall.

use std::collections::BTreeMap;
use std::fmt::Write;

use candle_core::{DType, Device};
use flow_kernels::counts::{Counts, counted, so_far};
use flow_kernels::testing::DeviceUnderTest;

use super::{MicroBatch, TdtModel, TrainOptions};
use crate::layers::golden;
use crate::parameters::Gradients;
use crate::pass_parts::{PartObserver, PassPart};

/// The most launches, copies to the device and copies to the host of one run of each part, for two utterances of three
/// tokens each, a model of two layers of encoder and of LSTM, and dropout everywhere.
const MOST: [(PassPart, [usize; 3]); 8] = [
    (PassPart::Features, [0, 1, 0]),
    // Table of positions included, which is copied once.
    (PassPart::SubsamplingForward, [7, 5, 0]),
    (PassPart::LayerForward, [10, 0, 0]),
    // For each layer one for all steps, and one.
    (PassPart::PredictionForward, [4, 1, 0]),
    // With one chunk of cells: 2 and 2 for each chunk forward, 7 and 7 backward; 7 and 3 beside.
    (PassPart::JointAndLoss, [16, 12, 2]),
    (PassPart::PredictionBackward, [9, 2, 0]),
    (PassPart::LayerBackward, [11, 0, 0]),
    (PassPart::SubsamplingBackward, [19, 0, 0]),
];

#[test]
fn a_step_launches_no_more_than_it_did() {
    let mut config = golden::model().0;
    config.encoder.dropout = 0.1;
    config.encoder.dropout_pre_encoder = 0.1;
    config.encoder.dropout_att = 0.1;
    config.decoder.dropout = 0.2;
    config.joint.dropout = 0.2;
    assert_eq!((config.encoder.n_layers, config.decoder.pred_rnn_layers), (2, 2));
    let batch = MicroBatch {
        signals: vec![golden::wave("train", 0)[..8_000].to_vec(); 2],
        tokens: vec![vec![3, 5, 7]; 2],
    };
    let step = |device: &Device| {
        let mut model = TdtModel::new(config.clone(), None, 3, DType::F32, device).unwrap();
        let mut gradients = Gradients::new(&model.parameters);
        let mut parts: BTreeMap<PassPart, Vec<Counts>> = BTreeMap::new();
        let (loss, _) = counted(|| {
            let mut before = Counts::default();
            let mut observer = PartObserver::new(|part| {
                let now = so_far();
                parts.entry(part).or_default().push(now.since(&before));
                before = now;
            });
            let options = TrainOptions::default();
            let output = model.train_micro_batch_observed(&batch, &options, &mut gradients, &mut observer);
            output.unwrap().loss
        });
        assert!(loss.is_finite());
        parts
    };
    let parts = DeviceUnderTest::get().run(step);
    let (mut table, mut too_many) = (String::new(), false);
    for (part, most) in MOST {
        let runs = &parts[&part];
        assert_eq!(
            runs.len(),
            if matches!(part, PassPart::LayerForward | PassPart::LayerBackward) {
                2
            } else {
                1
            }
        );
        for run in runs {
            let found = [run.launches(), run.to_device.count, run.to_host.count];
            too_many |= found.iter().zip(most).any(|(found, most)| *found > most);
            let _ = writeln!(table, "{part}: {found:?}, at most {most:?}; {:?}", run.kernels);
        }
    }
    assert!(
        !too_many,
        "launches, copies to the device, copies to the host:\n{table}"
    );
    // Every kernel is seen here, or nothing is.
    assert!(parts[&PassPart::LayerBackward][0].launches() > 8, "{table}");
}
