//! The TDT loss over lattices of frames and label states that are on a device: nothing of them is copied to host memory but
//! the losses, and how many cells count.

#[cfg(test)]
mod device_tests;

use candle_core::{DType, Device, Tensor};

pub use super::joint::cuda::CellList;
use crate::device::launch::Argument::{Double, Float, Int, Read, Write, WriteIf};
use crate::device::launch::{Grid, THREADS, fresh_in, fresh_of, in_either, launch, numbers, read_in_either};
use crate::device::{to_device, to_host};
use crate::error::{Error, Result};
use crate::ops::sums::column_sums::ColumnSums;

/// Rows of a block of the gradient's kernel, as in `tdt.cu`.
const GRADIENT_ROWS: usize = 128;

/// What the lattices of a batch are of.
#[derive(Clone, Copy, Debug)]
pub struct Extents<'a> {
    /// Rows of frames and of states that each utterance has, valid or not.
    pub padded: (usize, usize),
    /// Valid frames of each utterance.
    pub frames: &'a [usize],
    /// Target tokens of each utterance.
    pub targets: &'a [Vec<u32>],
    /// Frames of each duration.
    pub durations: &'a [usize],
}

/// Log probabilities of all cells of a batch, utterance by utterance.
#[derive(Debug)]
pub struct Lattices {
    /// (cells, 3 + durations): normaliser, log probabilities of blank, of the label and of each duration.
    terms: Tensor,
    cells: CellList,
    tables: Tables,
}

/// What kernels go by, copied to the device once.
#[derive(Debug)]
struct Tables {
    /// Frames of each duration.
    advances: Tensor,
    /// First cell, frames, states and first target of each utterance.
    lattices: Tensor,
    /// The targets of all utterances, and a number more.
    targets: Tensor,
    durations: usize,
    utterances: usize,
    padded: (usize, usize),
}

/// The rules of the sums.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Subtracted from the log probability of every emission.
    pub sigma: f64,
    /// Factor of label posteriors in the gradient, and of the loss.
    pub label_factor: f64,
    /// A cell with less posterior does not count.
    pub negligible: f64,
    /// Durations do not count.
    pub rnnt: bool,
}

/// Sums over all alignments of each utterance.
#[derive(Debug)]
pub struct Aligned {
    /// Negative log likelihood of each utterance, times the label factor: 0 without frames, infinite where nothing fits.
    pub losses: Vec<f64>,
    /// How many cells count.
    pub active: usize,
    /// Whether each cell counts, and how many of each utterance do.
    active_cells: Tensor,
    counted: Tensor,
    /// (cells, 2 + durations): posteriors of blank, label and durations.
    arcs: Tensor,
    label_factor: f64,
}

/// Gradients of logits, and what is beside them.
pub struct LogitGradient<'a> {
    /// Of the result, f32 or bf16.
    pub dtype: DType,
    /// Factor of each utterance's loss, in 64 bits.
    pub factors: &'a Tensor,
    /// To which gradients of tokens are clipped, if positive.
    pub clamp: f64,
}

/// Sums over the gradients of logits, chunk by chunk: the gradient of the bias.
#[derive(Debug)]
pub struct BiasSums {
    /// (blocks, outputs)
    partial: Tensor,
    begun: bool,
}

impl BiasSums {
    /// For chunks of `cells` at most, of which the first has no fewer than any other.
    pub fn new(cells: usize, outputs: usize, device: &Device) -> Result<Self> {
        Ok(Self {
            partial: fresh_of(DType::F32, (cells.div_ceil(GRADIENT_ROWS), outputs), device)?,
            begun: false,
        })
    }

    /// The sums of all chunks, (outputs).
    pub fn sums(self) -> ColumnSums {
        ColumnSums::partial(self.partial)
    }
}

impl Tables {
    /// Also the number of cells.
    fn new(extents: &Extents, device: &Device) -> Result<(Self, usize)> {
        let Extents {
            padded,
            frames,
            targets,
            durations,
        } = *extents;
        let mut listed: Vec<usize> = durations.to_vec();
        // An RNN-T has no durations, and a kernel takes no vector of no numbers.
        let advances = durations.len().max(1);
        listed.resize(advances, 0);
        let (mut next, mut first_target) = (0usize, 0);
        for (&frames, target) in frames.iter().zip(targets) {
            if frames > padded.0 || target.len() >= padded.1 {
                return Err(Error::Input("an utterance is longer than its batch".into()));
            }
            let states = target.len() + 1;
            listed.extend([next, frames, states, first_target]);
            next += frames * states;
            first_target += target.len();
        }
        let rows = frames.len().checked_mul(padded.0.max(padded.1));
        let small = |size: usize| i32::try_from(size).is_ok();
        if frames.len() != targets.len() || !small(next) || !rows.is_some_and(small) {
            return Err(Error::Input(format!(
                "lattices of {} lengths and {} targets with {next} cells",
                frames.len(),
                targets.len()
            )));
        }
        let tokens = targets.iter().flatten().map(|&token| token as usize);
        // Vectors of no numbers are none that a kernel takes.
        let copied = numbers(listed.iter().copied().chain(tokens).chain([0]), device)?;
        let all = listed.len();
        let part = |first: usize, end: usize| copied.narrow(0, first, end - first);
        let tables = Self {
            advances: part(0, advances)?,
            lattices: part(advances, all)?,
            targets: part(all, copied.elem_count())?,
            durations: durations.len(),
            utterances: frames.len(),
            padded,
        };
        Ok((tables, next))
    }

    /// Lists cells: all, or those that count.
    fn list(&self, cells: usize, active: Option<(&Tensor, &Tensor)>) -> Result<CellList> {
        let list = fresh_of(DType::U32, 4 * cells.max(1), self.lattices.device())?;
        let (frames, states) = self.padded;
        let tables = [Read(&self.lattices), Read(&self.targets)];
        let rest = [Write(&list), Int(frames), Int(states)];
        match active {
            None => launch(
                "list_cells",
                Grid::of((frames * states).div_ceil(THREADS), self.utterances),
                &[&tables[..], &rest].concat(),
            )?,
            Some((active, counted)) => launch(
                "list_active_cells",
                Grid::rows(self.utterances),
                &[&tables[..], &[Read(active), Read(counted)], &rest].concat(),
            )?,
        }
        Ok(CellList::in_order(list, cells, self.utterances, [frames, states]))
    }
}

impl Lattices {
    /// Lists the cells of a batch; all that is copied for them goes in one copy.
    ///
    /// # Errors
    /// Where an utterance is longer than its batch, or there are more cells than the kernels count.
    pub fn new(extents: &Extents, device: &Device) -> Result<Self> {
        let (tables, cells) = Tables::new(extents, device)?;
        Ok(Self {
            // A device has no memory of no bytes.
            terms: fresh_of(DType::F64, (cells.max(1), 3 + tables.durations), device)?,
            cells: tables.list(cells, None)?,
            tables,
        })
    }

    /// Where they lie.
    pub fn device(&self) -> &Device {
        self.terms.device()
    }

    /// All cells, utterance by utterance, in rising order of frame and state.
    pub fn cells(&self) -> &CellList {
        &self.cells
    }

    /// Log probabilities as they were set.
    #[cfg(test)]
    pub(crate) fn terms(&self) -> &Tensor {
        &self.terms
    }

    /// How many of the outputs, each of which has a bias, are tokens; they are the first of so many columns.
    fn tokens(&self, columns: usize, bias: &Tensor) -> Result<usize> {
        let outputs = bias.elem_count();
        let tokens = outputs.checked_sub(self.tables.durations).filter(|tokens| *tokens > 0);
        tokens.filter(|_| outputs <= columns).ok_or_else(|| {
            Error::Input(format!(
                "{columns} columns of outputs with {} durations, and a bias of {outputs}",
                self.tables.durations,
            ))
        })
    }

    /// Log probabilities of the cells from `first` on, of their logits (cells, tokens + durations) without bias, in f32 or bf16.
    /// Columns behind these do not count.
    ///
    /// # Errors
    /// Where there are no such cells, or shapes do not fit.
    pub fn set_terms(&self, first: usize, logits: &Tensor, bias: &Tensor) -> Result<()> {
        let (rows, width) = logits.dims2()?;
        let tokens = self.tokens(width, bias)?;
        let cells = self.cells.part(first..first + rows)?;
        let terms = self.terms.narrow(0, first, rows)?;
        let tensors = [Read(logits), Read(bias), Read(cells.list()), Write(&terms)];
        let kernel = match logits.dtype() {
            DType::BF16 => "cell_terms_bf16",
            _ => "cell_terms",
        };
        launch(
            kernel,
            Grid::rows(rows),
            &[&tensors[..], &[tokens, self.tables.durations, width].map(Int)].concat(),
        )
    }

    /// The sums over the alignments of each utterance. Waits for the device, from which the losses come with the number of
    /// cells that count.
    ///
    /// # Errors
    /// If the device fails.
    pub fn align(&self, rules: &Rules) -> Result<Aligned> {
        let Tables {
            ref advances,
            ref lattices,
            durations,
            utterances,
            padded,
            ..
        } = self.tables;
        let (cells, device) = (self.cells.len().max(1), self.terms.device());
        if u32::try_from(cells * 2 * (1 + durations)).is_err() {
            return Err(Error::Input(format!("{cells} cells with {durations} durations")));
        }
        let of_cells = |dtype: DType, width: usize| fresh_of(dtype, (width, cells), device);
        // Numbers and powers of two: of arcs, blanks and labels; and of cells, to the end and from the begin.
        let arcs_of_cell = 2 * if rules.rnnt { 1 } else { durations };
        let arc_weights = [of_cells(DType::F64, arcs_of_cell)?, of_cells(DType::U32, arcs_of_cell)?];
        let sums = [of_cells(DType::F64, 2)?, of_cells(DType::U32, 2)?];
        let results = fresh_of(DType::F64, 2 * utterances.max(1), device)?;
        let sizes = [cells, durations, usize::from(rules.rnnt)].map(Int);
        let parts = (padded.0 * padded.1).div_ceil(THREADS);
        let by_cells = Grid::of(parts, utterances);
        launch(
            "tdt_arcs",
            by_cells,
            &[
                &[Read(&self.terms), Read(lattices)],
                &arc_weights.each_ref().map(Write)[..],
                &sizes[1..],
                &[Double(rules.sigma)],
            ]
            .concat(),
        )?;
        launch(
            "tdt_align",
            Grid::of(utterances, 2),
            &[
                &arc_weights.each_ref().map(Read)[..],
                &[Read(advances), Read(lattices)],
                &sums.each_ref().map(Write),
                &[Write(&results)],
                &sizes,
                &[Double(rules.label_factor)],
            ]
            .concat(),
        )?;
        let arcs = fresh_of(DType::F64, (cells, 2 + durations), device)?;
        let active_cells = fresh_of(DType::U8, cells, device)?;
        let counts = fresh_of(DType::F64, (utterances.max(1), parts.max(1)), device)?;
        launch(
            "tdt_posteriors",
            by_cells,
            &[
                &arc_weights.each_ref().map(Read)[..],
                &sums.each_ref().map(Read),
                &[Read(advances), Read(lattices)],
                &[&arcs, &counts, &active_cells].map(Write),
                &sizes,
                &[Double(rules.label_factor), Double(rules.negligible)],
            ]
            .concat(),
        )?;
        let counted = results.narrow(0, utterances, utterances)?;
        launch(
            "tdt_counts",
            Grid::rows(utterances),
            &[Read(&counts), Write(&counted), Int(parts)],
        )?;
        let mut losses = match utterances {
            0 => Vec::new(),
            _ => to_host::<f64>(&results)?,
        };
        let counts = losses.split_off(utterances);
        Ok(Aligned {
            losses,
            // Sums of ones, which are exact.
            active: counts.iter().sum::<f64>() as usize,
            active_cells,
            counted,
            arcs,
            label_factor: rules.label_factor,
        })
    }

    /// The cells that count, in order.
    ///
    /// # Errors
    /// If the device fails.
    pub fn active_cells(&self, aligned: &Aligned) -> Result<CellList> {
        let active = Some((&aligned.active_cells, &aligned.counted));
        self.tables.list(aligned.active, active)
    }

    /// The gradient of the logits of some of the cells, whose rows are theirs. It has as many columns: those behind the outputs'
    /// are 0. `sums` gets what it adds to the bias's. Logits of the gradient's type are gone afterwards: it lies where they lay.
    ///
    /// # Errors
    /// Where shapes do not fit.
    pub fn logit_gradient(
        &self,
        aligned: &Aligned,
        (logits, bias): (Tensor, &Tensor),
        cells: &CellList,
        options: &LogitGradient,
        sums: Option<&mut BiasSums>,
    ) -> Result<Tensor> {
        let (rows, width) = logits.dims2()?;
        let tokens = self.tokens(width, bias)?;
        let LogitGradient { dtype, factors, clamp } = *options;
        let blocks = rows.div_ceil(GRADIENT_ROWS);
        let fits = |sums: &BiasSums| matches!(sums.partial.dims(), [most, outputs] if *outputs == bias.elem_count() && (*most == blocks || sums.begun && *most > blocks));
        let wrong = sums.as_deref().is_some_and(|sums| !fits(sums));
        if rows != cells.len() || factors.elem_count() != self.tables.utterances || wrong {
            return Err(Error::Input(format!(
                "gradients of logits {rows} x {width}, for {} cells",
                cells.len()
            )));
        }
        let out = match dtype == logits.dtype() && logits.is_contiguous() {
            true => logits.clone(),
            false => fresh_in(dtype, (rows, width), logits.device())?,
        };
        let partial = sums.as_ref().map(|sums| sums.partial.clone());
        let begun = sums.is_some_and(|sums| std::mem::replace(&mut sums.begun, true));
        let read = [bias, cells.list(), &self.terms, &aligned.arcs, factors].map(Read);
        let sizes = [
            rows,
            tokens,
            self.tables.durations,
            width,
            self.tables.padded.0,
            usize::from(begun),
        ]
        .map(Int);
        launch(
            "tdt_logit_gradient",
            Grid::of(width.div_ceil(THREADS), blocks),
            &[
                &read_in_either(&logits)[..],
                &read,
                &in_either(&out),
                &[WriteIf(partial.as_ref())],
                &sizes,
                &[Double(aligned.label_factor), Float(clamp)],
            ]
            .concat(),
        )?;
        Ok(out)
    }
}

/// Numbers in 64 bits on a device.
pub fn doubles(values: Vec<f64>, device: &Device) -> Result<Tensor> {
    let len = values.len();
    to_device(&Tensor::from_vec(values, len, &Device::Cpu)?, device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Noise;
    use crate::flow_cuda_emulator::DeviceUnderTest;
    use crate::testing::{normal, values};

    /// The logarithm of the sum over all alignments, cell by cell from the end.
    fn log_sum(terms: &[f64], frames: usize, states: usize, durations: &[usize]) -> f64 {
        let mut ending = vec![f64::NEG_INFINITY; frames * states];
        for cell in (0..frames * states).rev() {
            let (t, u) = (cell / states, cell % states);
            let own = &terms[cell * (3 + durations.len())..];
            let mut logs = Vec::new();
            for (d, advance) in durations.iter().enumerate() {
                let next = cell + advance * states;
                if *advance > 0 && t + advance < frames {
                    logs.push(own[1] + own[3 + d] + ending[next]);
                } else if *advance > 0 && t + advance == frames && u + 1 == states {
                    logs.push(own[1] + own[3 + d]);
                }
                if t + advance < frames && u + 1 < states {
                    logs.push(own[2] + own[3 + d] + ending[next + 1]);
                }
            }
            let top = logs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            if top > f64::NEG_INFINITY {
                ending[cell] = top + logs.iter().map(|log| (log - top).exp()).sum::<f64>().ln();
            }
        }
        ending[0]
    }

    /// Diagonals have more cells than a block has threads. An alignment has all labels, and as many frames as there are.
    #[test]
    fn long_diagonals() {
        let (frames, states, durations) = (300, 270, [0, 1, 2, 4]);
        let targets = vec![vec![1; states - 1]];
        let terms = (normal(&[frames * states, 3 + durations.len()], &mut Noise::new(3)) - 2.0).unwrap();
        let (losses, arcs) = DeviceUnderTest::get().run(|device| {
            let extents = Extents {
                padded: (frames, states),
                frames: &[frames],
                targets: &targets,
                durations: &durations,
            };
            let mut lattices = Lattices::new(&extents, device).unwrap();
            lattices.terms = terms.to_device(device).unwrap();
            let rules = Rules {
                sigma: 0.0,
                label_factor: 1.0,
                negligible: 1e-20,
                rnnt: false,
            };
            let aligned = lattices.align(&rules).unwrap();
            (aligned.losses, values(&aligned.arcs))
        });
        let expected = -log_sum(&values(&terms), frames, states, &durations);
        assert!(
            (losses[0] - expected).abs() < 1e-9 * expected.abs(),
            "{losses:?} {expected}"
        );
        let width = 2 + durations.len();
        let sum = |column: usize| arcs.iter().skip(column).step_by(width).sum::<f64>();
        assert!((sum(1) - (states - 1) as f64).abs() < 1e-8, "{}", sum(1));
        let passed: f64 = durations
            .iter()
            .enumerate()
            .map(|(d, of)| *of as f64 * sum(2 + d))
            .sum();
        assert!((passed - frames as f64).abs() < 1e-8, "{passed}");
    }
}
