//! The CTC loss on a device: nothing but the losses is copied to host memory.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};

use crate::device::launch::Argument::{Int, Read, Write, WriteIf};
use crate::device::launch::{Grid, fresh, fresh_of, launch, numbers};
use crate::device::to_host;
use crate::error::{Error, Result};
use crate::ops::tdt::doubles;

/// The most states whose sums a block keeps in shared memory, and labels whose posteriors it has there at a time; as in `ctc.cu`.
pub(super) const STATES_IN_BLOCK: usize = 2048;
pub(super) const LABELS_IN_BLOCK: usize = 1024;

/// Marks the first of equal labels.
const FIRST: usize = 1 << 31;

/// What kernels go by, copied to the device once.
struct Tables {
    /// Frames, labels, place of the first label and first cell of each utterance.
    utterances: Tensor,
    /// The labels of all utterances, and a number more.
    targets: Tensor,
    /// For each label the next equal one.
    links: Tensor,
    /// States at frames.
    cells: usize,
    /// The most states of an utterance.
    states: usize,
}

impl Tables {
    fn new(frames: impl Iterator<Item = usize>, targets: &[Vec<u32>], device: &Device) -> Result<Self> {
        let mut listed = Vec::with_capacity(4 * targets.len());
        let (mut labels, mut cells, mut most) = (0, 0usize, 1);
        for (frames, target) in frames.zip(targets) {
            let states = 2 * target.len() + 1;
            listed.extend([frames, target.len(), labels, cells]);
            labels += target.len();
            cells = cells.saturating_add(frames.saturating_mul(states));
            most = most.max(states);
        }
        if i32::try_from(cells).is_err() {
            return Err(Error::Input(format!(
                "CTC: {} utterances have {cells} states at frames, which are too many for the device",
                targets.len()
            )));
        }
        let tokens = targets.iter().flatten().map(|&token| token as usize);
        let links = targets
            .iter()
            .flat_map(|target| target.chunks(LABELS_IN_BLOCK).flat_map(links));
        // A kernel takes no vector of no numbers.
        let all = listed.iter().copied().chain(tokens).chain([0]).chain(links).chain([0]);
        let copied = numbers(all, device)?;
        let (first, count) = (listed.len(), labels + 1);
        Ok(Self {
            utterances: copied.narrow(0, 0, first)?,
            targets: copied.narrow(0, first, count)?,
            links: copied.narrow(0, first + count, count)?,
            cells,
            states: most,
        })
    }
}

/// For each label the place of the next equal one, or its own; with [`FIRST`] if none comes before it.
fn links(labels: &[u32]) -> Vec<usize> {
    let mut links: Vec<usize> = (0..labels.len()).collect();
    let mut last: HashMap<u32, usize> = HashMap::new();
    for (place, &label) in labels.iter().enumerate() {
        match last.insert(label, place) {
            Some(before) => links[before] += place - before,
            None => links[place] |= FIRST,
        }
    }
    links
}

pub fn loss_and_gradient(
    logits: &Tensor,
    time: usize,
    lengths: &[usize],
    targets: &[Vec<u32>],
    factors: &[f64],
) -> Result<(Vec<f64>, Tensor)> {
    let (rows, outputs) = logits.dims2()?;
    let batch = lengths.len();
    let (logits, device) = (logits.contiguous()?, logits.device());
    let frames = lengths.iter().map(|&length| length.min(time));
    let tables = Tables::new(frames, targets, device)?;
    let factors = doubles(factors.to_vec(), device)?;
    // A device has no memory of no bytes.
    let of_doubles = |count: usize| fresh_of(DType::F64, count.max(1), device);
    let normalisers = of_doubles(rows)?;
    launch(
        "ctc_normalisers",
        Grid::rows(rows),
        &[
            Read(&logits),
            Read(&tables.utterances),
            Write(&normalisers),
            Int(time),
            Int(outputs),
        ],
    )?;
    let sums = of_doubles(2 * tables.cells)?;
    let long_rows = match tables.states > STATES_IN_BLOCK {
        true => Some(of_doubles(4 * batch * tables.states)?),
        false => None,
    };
    let losses = of_doubles(batch)?;
    launch(
        "ctc_sums",
        Grid::of(batch, 2),
        &[
            Read(&logits),
            Read(&normalisers),
            Read(&tables.utterances),
            Read(&tables.targets),
            Write(&sums),
            WriteIf(long_rows.as_ref()),
            Write(&losses),
            Int(tables.cells),
            Int(time),
            Int(outputs),
            Int(tables.states),
        ],
    )?;
    let gradient = fresh((rows, outputs), &logits)?;
    launch(
        "ctc_gradient",
        Grid::rows(rows),
        &[
            Read(&logits),
            Read(&normalisers),
            Read(&sums),
            Read(&losses),
            Read(&tables.utterances),
            Read(&tables.targets),
            Read(&tables.links),
            Read(&factors),
            Write(&gradient),
            Int(tables.cells),
            Int(time),
            Int(outputs),
        ],
    )?;
    // The device has all its work before the host waits for it.
    Ok((to_host(&losses)?, gradient))
}
