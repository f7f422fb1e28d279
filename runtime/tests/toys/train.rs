//! A log.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use arrow::array::RecordBatch;
use flow_kind::{
    Body, Context, InputPort, Inputs, Kind, Log, LogPosition, Operator, Out, OutputPort, Partition, Progress, Shape,
    StageError,
};
use serde::{Deserialize, Serialize};

use super::{each, port, rows};

pub struct Train;

/// Adds up what each step gives, in a file that says which step comes next.
#[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TrainSettings {
    /// The file.
    log: PathBuf,
    /// After which step it is done.
    steps: u64,
    /// Refuses to run if its log was made with another.
    #[serde(default)]
    rate: i64,
    /// Fails at this step.
    #[serde(default)]
    fail_at: Option<u64>,
    /// Milliseconds that a step takes.
    #[serde(default)]
    slow: u64,
    /// Whether each process takes the steps, of which process 0 keeps the log.
    #[serde(default)]
    spread: bool,
    /// After which step it finds that it is done, although more come.
    #[serde(default)]
    enough: Option<u64>,
}

/// Works on a thread of its own, as training does.
struct TrainBody {
    settings: TrainSettings,
    context: Context,
    in_hand: BTreeMap<Partition, i64>,
    finished: Vec<Partition>,
    to: Option<SyncSender<(u64, i64)>>,
    from: Option<Receiver<Result<(u64, i64), String>>>,
    thread: Option<std::thread::JoinHandle<()>>,
    done: (u64, i64),
}

impl Kind for Train {
    const NAME: &'static str = "toy.train";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[
        InputPort::streamed("steps", "numbers"),
        InputPort::whole("late", "numbers").optional(),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("result", "numbers")];
    type Settings = TrainSettings;

    fn shape(_: &TrainSettings, _: &Inputs) -> Result<Shape, StageError> {
        Ok(Shape::log(vec![port("result")]))
    }

    fn open(settings: &TrainSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Log(Box::new(TrainBody {
            settings: settings.clone(),
            context: context.clone(),
            in_hand: BTreeMap::new(),
            finished: Vec::new(),
            to: None,
            from: None,
            thread: None,
            done: (0, 0),
        })))
    }

    fn identity(_: &TrainSettings) -> serde_json::Value {
        serde_json::Value::Null
    }

    fn spreads(settings: &TrainSettings, _: usize) -> Result<bool, StageError> {
        Ok(settings.spread)
    }
}

impl TrainBody {
    fn keeps_log(&self) -> bool {
        self.context.share.is_none_or(|share| share.process == 0)
    }

    /// Step that comes next, sum so far, rate.
    fn read_log(&self) -> (u64, i64, Option<i64>) {
        let Ok(text) = fs::read_to_string(&self.settings.log) else {
            return (0, 0, None);
        };
        let mut words = text.split_whitespace();
        let next = words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
        let sum = words.next().and_then(|word| word.parse().ok()).unwrap_or(0);
        (next, sum, words.next().and_then(|word| word.parse().ok()))
    }

    fn write_log(&self) -> Result<(), StageError> {
        if !self.keeps_log() {
            return Ok(());
        }
        fs::write(
            &self.settings.log,
            format!("{} {} {}", self.done.0, self.done.1, self.settings.rate),
        )
        .map_err(StageError::failed)
    }
}

impl Operator for TrainBody {
    fn batch(&mut self, _: &str, partition: &Partition, batch: RecordBatch, _: &mut Out) -> Result<(), StageError> {
        *self.in_hand.entry(partition.clone()).or_default() +=
            each(&batch).into_iter().map(|(_, value)| value).sum::<i64>();
        Ok(())
    }

    fn partition_complete(&mut self, partition: &Partition, _: &mut Out) -> Result<Progress, StageError> {
        let step: u64 = partition.as_str()[5..].parse().map_err(StageError::failed)?;
        if self.to.is_none() {
            let (to, work) = sync_channel::<(u64, i64)>(100);
            let (results, from) = sync_channel(100);
            let (next, mut sum, _) = self.read_log();
            if self.keeps_log() && next != step {
                return Err(StageError::failed(format!("step {next} comes next, not {step}")));
            }
            self.done = (next, sum);
            let (waker, settings) = (self.context.waker.clone(), self.settings.clone());
            self.thread = Some(std::thread::spawn(move || {
                for (step, value) in work {
                    std::thread::sleep(std::time::Duration::from_millis(settings.slow));
                    sum += value;
                    let result = if settings.fail_at == Some(step) {
                        Err(format!("step {step} exploded"))
                    } else {
                        Ok((step, sum))
                    };
                    if results.send(result).is_err() {
                        return;
                    }
                    waker.wake();
                }
            }));
            (self.to, self.from) = (Some(to), Some(from));
        }
        let value = self.in_hand.remove(partition).unwrap_or_default();
        self.to
            .as_ref()
            .unwrap()
            .send((step, value))
            .map_err(StageError::failed)?;
        Ok(Progress::NotYet)
    }

    fn poll(&mut self, _: &mut Out) -> Result<Vec<Partition>, StageError> {
        let mut done = std::mem::take(&mut self.finished);
        while !self.ended_early()
            && let Some(Ok(result)) = self.from.as_ref().map(Receiver::try_recv)
        {
            let (step, sum) = result.map_err(StageError::failed)?;
            self.done = (step + 1, sum);
            done.push(Partition::new(format!("step-{step:08}")));
        }
        Ok(done)
    }

    fn complete(&mut self) -> Result<(), StageError> {
        self.write_log()
    }
}

impl Log for TrainBody {
    fn position(&mut self) -> Result<LogPosition, StageError> {
        let (next, _, rate) = self.read_log();
        if rate.is_some_and(|rate| rate != self.settings.rate) {
            return Err(StageError::refused("the rate changed", "start anew"));
        }
        if next >= self.settings.enough.unwrap_or(self.settings.steps) {
            return Ok(LogPosition::Finished {
                detail: format!("{next} steps are done"),
            });
        }
        Ok(LogPosition::At {
            step: next,
            detail: format!("goes on at step {next}"),
        })
    }

    fn result(&mut self) -> Result<RecordBatch, StageError> {
        let (next, sum, _) = self.read_log();
        Ok(rows(&[0, 1], &[next as i64, sum]))
    }

    fn checkpoint(&mut self, _stop: bool) -> Result<(), StageError> {
        let mut out = Out::new(Partition::new(""));
        self.finished = self.poll(&mut out)?;
        self.write_log()
    }

    fn ended_early(&self) -> bool {
        self.settings.enough.is_some_and(|enough| self.done.0 >= enough)
    }
}

impl Drop for TrainBody {
    fn drop(&mut self) {
        self.to = None;
        self.from = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
