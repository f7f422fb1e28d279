//! An open model on disk: its metadata, and its tensors, which are read one by one.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use candle_core::DType;

use super::adapter::{
    ADAPTER_CONFIG, ADAPTER_PICKLE, ADAPTER_WEIGHTS, Adapter, base_and_adapter, is_adapter, weights_of,
};
use super::folder::{CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE, fill_model_folder, open_model_folder};
use super::huggingface::{self, fill_huggingface, open_huggingface};
use super::lightning::open_lightning;
use super::nemo::{open_nemo, write_nemo};
use super::{StoredModel, TensorEntry, broken};
use crate::Result;
use crate::config::ModelConfig;
use crate::heads::ctc::AUXILIARY;
use flow_nn::tensor_files::files::{write_folder, write_renamed};

/// The calibration of confidences in a model's folder, which belongs to its weights.
pub const CALIBRATION_FILE: &str = "confidence_calibration.json";

/// A storage format of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// NeMo's archive.
    Nemo,
    /// A folder of Hugging Face's transformers.
    HuggingFace,
    /// flow's model folder.
    Folder,
    /// Lightning's checkpoint; read only.
    Lightning,
}

impl Format {
    pub fn name(self) -> &'static str {
        match self {
            Format::Nemo => ".nemo archive",
            Format::HuggingFace => "Hugging Face folder",
            Format::Folder => "model folder",
            Format::Lightning => "Lightning checkpoint",
        }
    }

    /// The files of configuration, weights and tokenizer within the folder.
    pub fn parts(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Format::Nemo => ("model_config.yaml", "model_weights.ckpt", "tokenizer.model"),
            Format::HuggingFace => (huggingface::CONFIG, WEIGHTS_FILE, "tokenizer.json"),
            Format::Folder => (CONFIG_FILE, WEIGHTS_FILE, TOKENIZER_FILE),
            Format::Lightning => ("hyper_parameters", "state_dict", "-"),
        }
    }
}

/// Whether a file of a folder may be one of a model's.
fn is_model_file(name: &str) -> bool {
    [CONFIG_FILE, TOKENIZER_FILE, WEIGHTS_FILE].contains(&name) || huggingface::FILES.contains(&name)
}

/// Whether a file goes when a model folder is replaced.
fn is_of_model(name: &str) -> bool {
    is_model_file(name) || name == CALIBRATION_FILE
}

/// As [`is_model_file`]; weights in several files have other names, and an adapter may be beside them.
fn is_part_of_folder(name: &str) -> bool {
    is_model_file(name)
        || [ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_PICKLE].contains(&name)
        || (name.starts_with("model") && name.contains(".safetensors"))
}

/// The archive of a folder that holds one.
fn only_archive(folder: &Path) -> Result<PathBuf> {
    let mut archives = Vec::new();
    for entry in folder.read_dir().map_err(|error| broken(folder, error))? {
        let path = entry.map_err(|error| broken(folder, error))?.path();
        // Names that begin with a dot are those of other programs, such as `._model.nemo`.
        let hidden = path
            .file_name()
            .is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if !hidden && path.extension().is_some_and(|ending| ending == "nemo") && path.is_file() {
            archives.push(path);
        }
    }
    archives.sort();
    let why = match archives.as_slice() {
        [one] => return Ok(one.clone()),
        [] => format!(
            "is not a model folder: it has neither {CONFIG_FILE} nor {}, and no .nemo archive",
            huggingface::CONFIG
        ),
        several => {
            let names = several.iter().take(MOST_NAMES).filter_map(|path| path.file_name());
            let mut names: Vec<String> = names.map(|name| name.to_string_lossy().into_owned()).collect();
            if several.len() > MOST_NAMES {
                names.push("...".into());
            }
            format!("holds {} .nemo archives; name one: {}", several.len(), names.join(", "))
        }
    };
    Err(broken(folder, why))
}

/// Archives that an error names.
const MOST_NAMES: usize = 10;

/// A model on disk whose tensors are read on demand.
#[derive(Clone, Debug)]
pub struct OpenModel {
    pub path: PathBuf,
    pub format: Format,
    /// NeMo's `model_config.yaml`, or an equivalent made from the format's own configuration.
    pub config_yaml: String,
    /// The SentencePiece model, where there is one.
    pub tokenizer: Option<Vec<u8>>,
    /// Why there is no tokenizer.
    pub no_tokenizer: Option<String>,
    pub tensors: Vec<TensorEntry>,
    /// Notes for the user: values that the format does not have, and the defaults used for them.
    pub notes: Vec<String>,
}

impl OpenModel {
    /// Opens a `.nemo` archive, a Lightning checkpoint, a model folder or a folder of Hugging Face's transformers. The
    /// format is detected from the contents, not from the name. For any other folder with exactly one archive
    /// (`*.nemo`), that archive is opened.
    ///
    /// An adapter beside the weights of a model folder is added to them, as is that of a path `MODEL+ADAPTER`, where `ADAPTER` is a
    /// folder with the files of PEFT ([`OpenModel::with_adapter`]).
    ///
    /// # Errors
    /// Where there is none of these, or several archives, or what there is cannot be read or is damaged.
    pub fn open(path: &Path) -> Result<Self> {
        match Self::open_apart(path)? {
            (model, None) => Ok(model),
            (model, Some(adapter)) => model.with_adapter(&adapter),
        }
    }

    /// As [`OpenModel::open`], with the adapter not added.
    pub fn open_apart(path: &Path) -> Result<(Self, Option<Adapter>)> {
        if let Some((base, adapter)) = base_and_adapter(path) {
            return Ok((Self::open(&base)?, Some(Adapter::open(&adapter)?)));
        }
        let model = Self::open_alone(path)?;
        let adapter = match model.format == Format::Folder && is_adapter(path) {
            true => Some(Adapter::open(path)?),
            false => None,
        };
        Ok((model, adapter))
    }

    /// Whether there is anything at the path of a model, which may be `MODEL+ADAPTER`.
    pub fn exists(path: &Path) -> bool {
        match base_and_adapter(path) {
            Some((base, _)) => Self::exists(&base),
            None => path.exists(),
        }
    }

    /// The name of the model at a path, without its folder; of `MODEL+ADAPTER` the names of both.
    pub fn name(path: &Path) -> String {
        match base_and_adapter(path) {
            Some((base, adapter)) => format!("{}+{}", Self::name(&base), Self::name(&adapter)),
            None => path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        }
    }

    fn open_alone(path: &Path) -> Result<Self> {
        let metadata = std::fs::metadata(path).map_err(|error| broken(path, error))?;
        if metadata.is_dir() {
            if path.join(CONFIG_FILE).exists() {
                return open_model_folder(path);
            }
            if path.join(huggingface::CONFIG).exists() {
                return open_huggingface(path);
            }
            if is_adapter(path) {
                let base = Adapter::open(path)?.base;
                let base = base.map_or(String::new(), |base| format!(" (its file names {base})"));
                let what = format!(
                    "is an adapter without a model: write `MODEL+{}`, with the model{base}",
                    path.display()
                );
                return Err(broken(path, what));
            }
            return open_nemo(&only_archive(path)?);
        }
        if !metadata.is_file() {
            return Err(broken(path, "is not a regular file"));
        }
        let mut magic = Vec::new();
        File::open(path)
            .and_then(|file| file.take(9).read_to_end(&mut magic))
            .map_err(|error| broken(path, error))?;
        if magic.starts_with(b"PK\x03\x04") {
            return open_lightning(path);
        }
        // A safetensors file begins with the length of its header, which is a JSON object.
        if magic.get(8) == Some(&b'{') && magic[4..8] == [0; 4] {
            return Err(broken(
                path,
                "holds tensors alone; give the folder that it is in, with its configuration",
            ));
        }
        open_nemo(path)
    }

    /// Whether a file of a folder may be one of a model's, by its name: a configuration, a tokenizer, weights, which may be in several
    /// files, or an archive.
    pub fn is_part(name: &str) -> bool {
        is_part_of_folder(name) || (name.ends_with(".nemo") && !name.starts_with('.'))
    }

    /// The files of the model at a path, sorted: the archive itself, or a folder's model files without the other files
    /// of a checkpoint.
    pub fn files(path: &Path) -> Result<Vec<PathBuf>> {
        if let Some((base, adapter)) = base_and_adapter(path) {
            let mut files = Self::files(&base)?;
            files.extend([adapter.join(ADAPTER_CONFIG), weights_of(&adapter)]);
            return Ok(files);
        }
        let failed = |error| broken(path, error);
        if !path.metadata().map_err(failed)?.is_dir() {
            return Ok(vec![path.to_path_buf()]);
        }
        if ![CONFIG_FILE, huggingface::CONFIG]
            .iter()
            .any(|name| path.join(name).exists())
        {
            return Ok(vec![only_archive(path)?]);
        }
        let mut files = Vec::new();
        for entry in path.read_dir().map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if is_part_of_folder(&name) {
                files.push(entry.path());
            }
        }
        files.sort();
        Ok(files)
    }

    /// Reads all tensors.
    pub fn load(&self) -> Result<StoredModel> {
        let tensors = self
            .tensors
            .iter()
            .map(|entry| Ok((entry.name.clone(), entry.load()?)))
            .collect::<Result<_>>()?;
        Ok(StoredModel {
            config_yaml: self.config_yaml.clone(),
            tokenizer: self.tokenizer.clone(),
            tensors,
        })
    }

    /// Removes the CTC head beside a transducer. A model without one is unchanged.
    pub fn without_ctc(mut self) -> Result<Self> {
        let mut config = ModelConfig::from_nemo_yaml(&self.config_yaml).map_err(|error| broken(&self.path, error))?;
        if config.transducer.is_some() && config.ctc.take().is_some() {
            self.config_yaml = config.to_nemo_yaml()?;
            self.tensors.retain(|entry| !entry.name.starts_with(AUXILIARY));
        }
        Ok(self)
    }

    /// Writes the model in a format, its weights as `dtype` (or as they are stored), one tensor in memory at a time. An
    /// existing `target` is an error unless `replace`; then it is replaced once the new model is complete. A folder is
    /// replaced only if it contains nothing but files of a model.
    ///
    /// Returns notes for the user: what the format cannot represent.
    pub fn write(&self, target: &Path, format: Format, dtype: Option<DType>, replace: bool) -> Result<Vec<String>> {
        if !replace && target.symlink_metadata().is_ok() {
            return Err(broken(target, "is there already"));
        }
        match format {
            Format::Nemo => {
                if target.is_dir() {
                    return Err(broken(target, "is a folder, where a .nemo archive is to be written"));
                }
                write_renamed(target, |file| write_nemo(file, target, self, dtype))?;
                Ok(Vec::new())
            }
            Format::Folder => {
                write_folder(target, replace, is_of_model, |folder| {
                    fill_model_folder(folder, self, dtype)
                })?;
                Ok(Vec::new())
            }
            Format::HuggingFace => {
                let mut notes = Vec::new();
                write_folder(target, replace, is_of_model, |folder| {
                    notes = fill_huggingface(folder, self, dtype)?;
                    Ok(())
                })?;
                Ok(notes)
            }
            Format::Lightning => Err(broken(target, "Lightning checkpoints are read, not written")),
        }
    }
}
