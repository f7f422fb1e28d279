//! A source that digests what it reads.

use std::fs;
use std::path::{Path, PathBuf};

use flow_kind::{
    Body, Context, InputPort, Inputs, Kind, Out, OutputPort, Partition, Shape, Source, SourcePartition, StageError,
};
use flow_storage::Storage;
use flow_store::DigestedFile;
use serde::{Deserialize, Serialize};

use super::{port, rows};

pub struct Once;

/// Reads files that hold one number, and digests them itself.
#[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OnceSettings {
    /// The folder.
    folder: PathBuf,
    /// Lets the runtime digest the files.
    #[serde(default)]
    leave: bool,
    /// What is written into each file before it is opened, with a time that is long past.
    #[serde(default)]
    before: Option<String>,
    /// And when half of it was read.
    #[serde(default)]
    between: Option<String>,
}

struct OnceBody(OnceSettings);

impl Kind for Once {
    const NAME: &'static str = "toy.once";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "numbers")];
    type Settings = OnceSettings;

    fn shape(_: &OnceSettings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape::source(vec![port("rows")]))
    }

    fn open(settings: &OnceSettings, _: &Context) -> Result<Body, StageError> {
        Ok(Body::Source(Box::new(OnceBody(settings.clone()))))
    }

    fn identity(_: &OnceSettings) -> serde_json::Value {
        serde_json::Value::Null
    }
}

/// Writes a file that looks as if it were a hundred seconds old.
pub fn write_aged(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    let then = std::time::SystemTime::now() - std::time::Duration::from_secs(100);
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_modified(then).unwrap();
}

impl Source for OnceBody {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        let mut files: Vec<PathBuf> = fs::read_dir(&self.0.folder)
            .map_err(StageError::failed)?
            .map(|entry| entry.unwrap().path())
            .collect();
        files.sort();
        let partition = |path: PathBuf| {
            SourcePartition::new(
                path.file_stem().unwrap().to_string_lossy().into_owned().into(),
                vec![path],
                "",
            )
        };
        Ok(files.into_iter().map(partition).collect())
    }

    fn digests(&self, _: &SourcePartition) -> bool {
        !self.0.leave
    }

    fn read(&mut self, partition: &Partition, out: &mut Out) -> Result<(), StageError> {
        let path = self.0.folder.join(format!("{partition}.txt"));
        if let Some(text) = &self.0.before {
            // Another text each time that it is read.
            let more = fs::read_to_string(&path).is_ok_and(|found| found.starts_with(text.as_str()));
            write_aged(&path, &format!("{text}{}", if more { "0" } else { "" }));
        }
        let mut file = DigestedFile::open(&Storage::default(), &path).map_err(StageError::failed)?;
        let length = file.length() as usize;
        let mut bytes = file.read(0, length / 2).map_err(StageError::failed)?;
        if let Some(text) = &self.0.between {
            fs::write(&path, text).map_err(StageError::failed)?;
        }
        bytes.extend(
            file.read(length as u64 / 2, length - length / 2)
                .map_err(StageError::failed)?,
        );
        let value = String::from_utf8_lossy(&bytes)
            .trim()
            .parse()
            .map_err(StageError::failed)?;
        out.send(0, rows(&[0], &[value]));
        if !self.0.leave {
            out.digested(file);
        }
        Ok(())
    }
}
