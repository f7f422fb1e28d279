//! A source of files with one number per line.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use flow_kind::{
    Body, Conservation, Context, InputPort, Inputs, Kind, Out, OutputPort, Partition, RejectClass, Shape, Source,
    SourcePartition, StageError,
};
use serde::{Deserialize, Serialize};

use super::{note, port, rows};

pub struct Count;

/// Reads a folder of text files, one partition per file, one number per line.
#[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CountSettings {
    /// The folder.
    folder: PathBuf,
    /// Where to note work.
    #[serde(default)]
    noted: PathBuf,
    /// Milliseconds to spend on a partition, unless the run is ending.
    #[serde(default)]
    slow: u64,
}

struct CountBody {
    settings: CountSettings,
    stage: String,
    gives_up: Box<dyn Fn() -> bool>,
}

impl Kind for Count {
    const NAME: &'static str = "toy.count";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "numbers")];
    type Settings = CountSettings;

    fn shape(_: &CountSettings, _: &Inputs) -> Result<Shape, StageError> {
        let mut shape = Shape::source(vec![port("rows")]);
        shape.conservation = Conservation::Rows;
        Ok(shape)
    }

    fn open(settings: &CountSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Source(Box::new(CountBody {
            settings: settings.clone(),
            stage: context.stage.clone(),
            gives_up: Box::new(context.gives_up()),
        })))
    }

    fn identity(_: &CountSettings) -> serde_json::Value {
        serde_json::Value::Null
    }
}

impl Source for CountBody {
    fn partitions(&mut self) -> Result<Vec<SourcePartition>, StageError> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.settings.folder).map_err(StageError::failed)? {
            let path = entry.map_err(StageError::failed)?.path();
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            found.push(SourcePartition::new(name.into(), vec![path], ""));
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    fn read(&mut self, partition: &Partition, out: &mut Out) -> Result<(), StageError> {
        note(&self.settings.noted, &self.stage, partition);
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(self.settings.slow) {
            if (self.gives_up)() {
                return Err(StageError::failed("stopped"));
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let path = self.settings.folder.join(format!("{partition}.txt"));
        let text = fs::read_to_string(&path).map_err(StageError::failed)?;
        if text.starts_with("broken") {
            out.reject_partition("unreadable", RejectClass::Fault, "it says so itself");
            return Ok(());
        }
        let (mut numbers, mut values) = (Vec::new(), Vec::new());
        for (row, line) in text.lines().enumerate() {
            out.read(1);
            match line.parse() {
                Ok(value) => {
                    numbers.push(row as u32);
                    values.push(value);
                }
                Err(_) => {
                    let batch = rows(&[row as u32], &[0]);
                    out.reject_rows(&batch, &[0], "not_a_number", RejectClass::Fault, line)?;
                }
            }
        }
        // Backwards and in pieces: the runtime puts rows into order.
        for (numbers, values) in numbers.chunks(3).zip(values.chunks(3)).rev() {
            out.send(0, rows(numbers, values));
        }
        Ok(())
    }
}
