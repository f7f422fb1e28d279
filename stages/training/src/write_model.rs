//! The kind `model.write`.

use std::path::{Path, PathBuf};

use arrow::array::{AsArray, StringArray};
use flow_evaluation::report::MODEL_COLUMNS;
use flow_kind::{
    Artifact, Body, Context, Export, ExportSet, InputPort, Inputs, Kind, OutputPort, Shape, StageError, UrlUse,
};
use flow_model::Weights;
use flow_model::checkpoint::{Format, OpenModel};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::file_set;

/// Writes a trained model as a `.nemo` archive.
///
/// # What it does
///
/// Takes the output `model` of `training.train` and writes `<name>.nemo` into the folder `out`, with
/// `<name>.flow.json`, which holds its digest. NeMo restores it, `init` of `training.train` accepts it, and `flow model
/// convert` converts it to other formats. The CTC head beside a transducer is left out unless `ctc` asks for it; a model
/// that has no other head keeps it.
///
/// # Example
///
/// ```yaml
/// write: {uses: model.write, from: train, with: {out: work/model, dtype: f16}}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WriteModelSettings {
    /// Folder that receives the archive; may be in object storage (`s3://bucket/folder`, see docs/storage.md).
    pub out: String,
    /// Its name before `.nemo`.
    #[serde(default = "default_name")]
    pub name: String,
    /// The number type of the weights. Half of the size, with three digits, is `f16`; NeMo and `init` read each.
    #[serde(default)]
    pub dtype: Weights,
    /// Keep the CTC head beside a transducer, where there is one: the model is then a hybrid one to NeMo.
    #[serde(default)]
    pub ctc: bool,
}

fn default_name() -> String {
    "model".into()
}

/// The kind `model.write`.
pub struct WriteModel;

impl Kind for WriteModel {
    const NAME: &'static str = "model.write";
    const VERSION: u32 = 3;
    const INPUTS: &'static [InputPort] =
        &[InputPort::whole("model", "the model of a training.train").columns(MODEL_COLUMNS)];
    const OUTPUTS: &'static [OutputPort] = &[];
    const URL_SETTINGS: &'static [(&'static str, UrlUse)] = &[("out", UrlUse::Write)];
    type Settings = WriteModelSettings;

    fn shape(settings: &WriteModelSettings, _: &Inputs) -> Result<Shape, StageError> {
        file_set::shape(&settings.out, &settings.name)
    }

    fn open(settings: &WriteModelSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Export(Box::new(Writer {
            settings: settings.clone(),
            context: context.clone(),
        })))
    }

    /// Without the folder, which does not affect the archive.
    fn identity(settings: &WriteModelSettings) -> serde_json::Value {
        serde_json::json!({ "name": settings.name, "dtype": settings.dtype, "ctc": settings.ctc })
    }
}

struct Writer {
    settings: WriteModelSettings,
    context: Context,
}

impl Export for Writer {
    fn folder(&self) -> PathBuf {
        PathBuf::from(&self.settings.out)
    }

    fn manifest(&self) -> String {
        format!("{}.flow.json", self.settings.name)
    }

    fn write(&mut self, set: &mut ExportSet) -> Result<(), StageError> {
        let model = self.context.required("model")?;
        let mut opened = OpenModel::open(&checkpoint(model)?).map_err(StageError::failed)?;
        if !self.settings.ctc {
            opened = opened.without_ctc().map_err(StageError::failed)?;
        }
        let path = set
            .file(&format!("{}.nemo", self.settings.name))
            .map_err(StageError::failed)?;
        opened
            .write(&path, Format::Nemo, Some(self.settings.dtype.into()), true)
            .map_err(StageError::failed)?;
        Ok(())
    }
}

/// The folder of the checkpoint that is the output of training.
fn checkpoint(model: &Artifact) -> Result<PathBuf, StageError> {
    let mut path = None;
    for item in model.batches(Some(&["path"])) {
        let (_, batch) = item?;
        let paths: Option<&StringArray> = batch.column(0).as_string_opt();
        path = paths
            .and_then(|paths| paths.iter().flatten().last())
            .map(PathBuf::from)
            .or(path);
    }
    path.filter(|path| path != Path::new(""))
        .ok_or_else(|| StageError::failed("training gave no model"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow::array::{ArrayRef, Int64Array, RecordBatch, UInt32Array};
    use candle_core::{DType, Device};
    use flow_model::heads::ctc::AUXILIARY as HEAD;
    use flow_model::model::TdtModel;
    use flow_model::tokenizer::Tokenizer;
    use flow_runtime::harness::Harness;

    use super::*;
    use crate::model_settings::ModelSettings;
    use crate::train::model_schema;

    fn trained(path: &Path) -> RecordBatch {
        let columns: Vec<ArrayRef> = vec![
            Arc::new(UInt32Array::from(vec![0])),
            Arc::new(StringArray::from(vec![path.display().to_string()])),
            Arc::new(Int64Array::from(vec![7])),
            Arc::new(StringArray::from(vec!["digest"])),
            Arc::new(StringArray::from(vec!["last checkpoint"])),
        ];
        RecordBatch::try_new(model_schema(), columns).unwrap()
    }

    fn write(settings: &WriteModelSettings, checkpoint: &Path) -> Result<PathBuf, StageError> {
        Harness::<WriteModel>::new(settings.clone())
            .input("train", model_schema())
            .feed("train", "model", trained(checkpoint))
            .run()?;
        Ok(Path::new(&settings.out).join(format!("{}.nemo", settings.name)))
    }

    #[test]
    fn the_archive_is_the_model_without_its_ctc_head() {
        let temp = tempfile::tempdir().unwrap();
        let pieces = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/tokenizers/mini.model");
        let tokenizer = Tokenizer::load(Path::new(pieces)).unwrap();
        let sizes = ModelSettings {
            mels: 16,
            d_model: 16,
            layers: 1,
            heads: 2,
            conv_channels: 4,
            pred_hidden: 8,
            joint_hidden: 8,
            ctc_weight: 0.3,
            ..ModelSettings::default()
        };
        let config = sizes.config(&tokenizer.pieces()).unwrap();
        let model = TdtModel::new(config, Some(tokenizer), 7, DType::F32, &Device::Cpu).unwrap();
        let checkpoint = temp.path().join("checkpoint");
        model.save(&checkpoint).unwrap();
        let settings = WriteModelSettings {
            out: temp.path().join("out").display().to_string(),
            name: "small".into(),
            dtype: Weights::F16,
            ctc: false,
        };
        let archive = write(&settings, &checkpoint).unwrap();
        let read = TdtModel::load(&archive, DType::F32, &Device::Cpu).unwrap();
        assert_eq!(read.config.ctc, None);
        let mut expected = 0;
        for (_, parameter) in model.parameters.iter().filter(|(_, p)| !p.name.starts_with(HEAD)) {
            let (_, found) = read.parameters.iter().find(|(_, p)| p.name == parameter.name).unwrap();
            // What the archive holds is the model rounded to half precision, and nothing else; statistics and the
            // front end are as they were.
            let mut wanted = parameter.tensor.to_dtype(DType::F32).unwrap();
            if parameter.trainable {
                wanted = wanted.to_dtype(DType::F16).unwrap().to_dtype(DType::F32).unwrap();
            }
            let difference = (wanted - found.tensor.to_dtype(DType::F32).unwrap()).unwrap();
            let sum = difference.abs().unwrap().sum_all().unwrap();
            assert_eq!(sum.to_scalar::<f32>().unwrap(), 0.0, "{}", parameter.name);
            expected += 1;
        }
        assert_eq!(read.parameters.iter().count(), expected);

        // The same model gives the same bytes; with its head it is another one.
        let bytes = std::fs::read(&archive).unwrap();
        assert!(std::fs::read(write(&settings, &checkpoint).unwrap()).unwrap() == bytes);
        let hybrid = WriteModelSettings {
            name: "hybrid".into(),
            ctc: true,
            ..settings.clone()
        };
        let hybrid = TdtModel::load(&write(&hybrid, &checkpoint).unwrap(), DType::F32, &Device::Cpu).unwrap();
        assert_eq!(hybrid.config.ctc.unwrap().weight, 0.3);

        // A checkpoint that is gone is an error that names it.
        let error = write(&settings, &temp.path().join("gone")).unwrap_err();
        assert!(error.to_string().contains("gone"), "{error}");
    }

    #[test]
    fn wrong_settings_and_inputs_are_refused() {
        let settings = |out: &str, name: &str| WriteModelSettings {
            out: out.into(),
            name: name.into(),
            dtype: Weights::F32,
            ctc: false,
        };
        for (out, name) in [("", "model"), ("out", "../model"), ("out", ".model"), ("out", "")] {
            let harness = Harness::<WriteModel>::new(settings(out, name)).input("train", model_schema());
            assert!(harness.shape().is_err(), "{out:?} {name:?}");
        }
        let other = Harness::<WriteModel>::new(settings("out", "model"))
            .input("rows", Arc::new(arrow::datatypes::Schema::empty()));
        assert!(other.shape().unwrap_err().to_string().contains("training.train"));
    }
}
