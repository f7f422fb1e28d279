//! Against the kernels for the CPU, in the emulator or on a device.

use candle_core::{DType, Device, Tensor};

use crate::counts::counted;
use crate::error::Result;
use crate::flow_cuda_emulator::DeviceUnderTest;
use crate::noise::Noise;
use crate::ops::joint;
use crate::ops::joint::Cell;
use crate::ops::joint::CellTerms;
use crate::ops::joint::cuda::CellList;
use crate::ops::tdt::{BiasSums, Extents, Lattices, LogitGradient, Rules, doubles};
use crate::testing::on_device::{BOUND, close, on_device, random, same};
use crate::testing::values;

/// Cells of utterances in order, as the host lists them.
fn listed(padded: (usize, usize), frames: &[usize], targets: &[Vec<u32>]) -> Vec<Cell> {
    let mut cells = Vec::new();
    for (b, (&frames, target)) in frames.iter().zip(targets).enumerate() {
        for (t, u) in (0..frames).flat_map(|t| (0..=target.len()).map(move |u| (t, u))) {
            cells.push(Cell {
                frame: b * padded.0 + t,
                state: b * padded.1 + u,
                label: target.get(u).map(|&token| token as usize),
                index: cells.len(),
            });
        }
    }
    cells
}

/// Lattices of several utterances, one without frames and one without tokens: their cells, of which there are more than a block
/// has threads, and the terms of these.
#[test]
fn cells_and_terms() {
    let mut noise = Noise::new(17);
    for (tokens, durations) in [(8, 1), (9, 3), (700, 5)] {
        let (padded, frames) = ((41, 9), [41, 3, 0, 17]);
        let targets = [vec![1, 6, 0, 2, 3, 4, 5, 1], vec![], vec![2, 2], vec![4, 6, 5]];
        let cells = listed(padded, &frames, &targets);
        let count = cells.len();
        let advances: Vec<usize> = (1..=durations).collect();
        let extents = Extents {
            padded,
            frames: &frames,
            targets: &targets,
            durations: &advances,
        };
        let numbers = |cell: &Cell| {
            let label = cell.label.map_or(u32::MAX, |label| label as u32);
            [cell.frame as u32, cell.state as u32, label, cell.index as u32]
        };
        let (found, copies) = counted(|| {
            DeviceUnderTest::get().run(|device| Lattices::new(&extents, device).unwrap().cells().to_vec().unwrap())
        });
        assert_eq!(found, cells.iter().flat_map(numbers).collect::<Vec<_>>());
        assert_eq!((copies.to_device.count, copies.to_host.count), (1, 1));
        let outputs = tokens + durations;
        let logits = (random(&[count, outputs], &mut noise) * 5.0).unwrap();
        let offset = random(&[outputs], &mut noise);
        let mut terms = vec![CellTerms::default(); count];
        let mut logs = vec![0.0; count * durations];
        joint::cell_terms(&logits, &offset, &cells, &mut terms, &mut logs).unwrap();
        let of_terms = |terms: &[CellTerms], logs: &[f64]| {
            let each = terms.iter().zip(logs.chunks_exact(durations));
            let rows =
                each.flat_map(|(t, logs)| [t.normaliser, t.blank, t.label].into_iter().chain(logs.iter().copied()));
            Tensor::from_iter(rows, &Device::Cpu)
                .unwrap()
                .reshape((count, 3 + durations))
                .unwrap()
        };
        let expected = of_terms(&terms, &logs);
        let found = on_device(|on| {
            let (logits, offset) = (on(&logits), on(&offset));
            let lattices = Lattices::new(&extents, logits.device()).unwrap();
            // In two chunks.
            let size = count.div_ceil(2);
            for first in [0, size] {
                let logits = logits.narrow(0, first, size.min(count - first)).unwrap();
                lattices.set_terms(first, &logits, &offset).unwrap();
            }
            assert!(lattices.set_terms(1, &logits, &offset).is_err());
            values(lattices.terms())
        });
        close("terms", BOUND, &values(&expected), &found);
    }
    let refused = |padded: (usize, usize), frames: &[usize], targets: &[Vec<u32>]| {
        let extents = Extents {
            padded,
            frames,
            targets,
            durations: &[1],
        };
        DeviceUnderTest::get().run(|device| Lattices::new(&extents, device).is_err())
    };
    assert!(refused((4, 2), &[5], &[vec![1]]) && refused((4, 2), &[4], &[vec![1, 1]]));
    assert!(refused((4, 2), &[4, 4], &[vec![1]]) && !refused((4, 2), &[4], &[vec![1]]));
}

/// Terms and gradients of logits in bf16 are those of the same numbers in f32. Rows of several turns of a block, ones that do not
/// begin at multiples of 16 bytes, and outputs that are ruled out; with columns behind the outputs that do not count.
#[test]
fn logits_in_bf16_are_read_as_they_are() {
    let mut noise = Noise::new(19);
    for (tokens, durations, behind) in [(8193, 5, 58), (16401, 2, 5), (2061, 1, 3), (7, 1, 8)] {
        let (padded, frames, targets) = ((3, 3), [3, 2], [vec![1, 6], vec![5]]);
        let advances: Vec<usize> = (1..=durations).collect();
        let extents = Extents {
            padded,
            frames: &frames,
            targets: &targets,
            durations: &advances,
        };
        let (rows, outputs) = (3 * 3 + 2 * 2, tokens + durations);
        let logits = (random(&[rows, outputs], &mut noise) * 5.0).unwrap();
        let mut numbers: Vec<f32> = values(&logits).iter().map(|&value| value as f32).collect();
        // Whole groups of columns of a row, and all those that some threads have.
        numbers[16.min(tokens - 2)..tokens.min(4000) - 1].fill(f32::NEG_INFINITY);
        let logits = Tensor::from_vec(numbers, (rows, outputs), &Device::Cpu).unwrap();
        let nothing = Tensor::full(f32::NAN, (rows, behind), &Device::Cpu).unwrap();
        let logits = Tensor::cat(&[&logits, &nothing], 1).unwrap().contiguous().unwrap();
        let logits = logits.to_dtype(DType::BF16).unwrap();
        let offset = random(&[outputs], &mut noise);
        let run = |dtype: DType| {
            on_device(|on| {
                let (logits, offset) = (on(&logits.to_dtype(dtype).unwrap()), on(&offset));
                let lattices = Lattices::new(&extents, logits.device()).unwrap();
                lattices.set_terms(0, &logits, &offset).unwrap();
                let terms = values(lattices.terms());
                // Of the same terms.
                lattices
                    .set_terms(0, &on(&logits.to_dtype(DType::F32).unwrap()), &offset)
                    .unwrap();
                let aligned = lattices
                    .align(&Rules {
                        sigma: 0.0,
                        label_factor: 1.0,
                        negligible: 0.0,
                        rnnt: false,
                    })
                    .unwrap();
                let options = LogitGradient {
                    dtype: DType::BF16,
                    factors: &doubles(vec![1.0, 0.5], logits.device()).unwrap(),
                    clamp: 0.0,
                };
                let mut sums = BiasSums::new(rows, outputs, logits.device()).unwrap();
                let (all, place) = (lattices.cells(), (logits, &offset));
                let gradient = lattices.logit_gradient(&aligned, place, all, &options, Some(&mut sums));
                (terms, values(&gradient.unwrap()), values(&sums.sums().total().unwrap()))
            })
        };
        let (expected, found) = (run(DType::F32), run(DType::BF16));
        close(&format!("terms of {tokens} tokens"), 1e-6, &expected.0, &found.0);
        assert!(found.1.iter().any(|value| *value != 0.0));
        assert_eq!((found.1, found.2), (expected.1, expected.2), "{tokens} tokens");
    }
}

/// A chunk of cells of more frames than a block has threads, of two utterances, with some left out.
#[test]
fn gradients_of_many_frames_are_summed_in_order() {
    let mut noise = Noise::new(27);
    let (frames, states, width) = (300, 3, 5);
    let all = (0..2 * frames).flat_map(|frame| (0..states).map(move |state| (frame, frame / frames * states + state)));
    let kept = all
        .enumerate()
        .filter(|(index, _)| index % 7 != 3 && !(200..300).contains(index));
    let cells: Vec<Cell> = kept
        .map(|(index, (frame, state))| Cell {
            frame,
            state,
            label: None,
            index,
        })
        .collect();
    let (d, hidden) = (
        random(&[cells.len(), width], &mut noise),
        random(&[cells.len(), width], &mut noise),
    );
    let sums = |rows: usize| Tensor::zeros((rows, width), DType::F32, &Device::Cpu).unwrap();
    // To the bit: each sum is taken in the order of the cells.
    same("hidden, backward over many frames", 0.0, |on| {
        let (d_f, d_g) = (on(&sums(2 * frames)).copy()?, on(&sums(2 * states)).copy()?);
        joint::add_hidden_gradient(&on(&d), &on(&hidden), &cells, 1.0, &d_f, &d_g)?;
        Ok(vec![d_f, d_g])
    });
    // A list that knows its utterances gives the same.
    let listed = |cells: &[Cell], rows: usize, d: &Tensor, hidden: &Tensor| {
        on_device(|on| -> Result<_> {
            let d = on(d);
            let list = crate::device::launch::numbers(
                cells.iter().flat_map(|cell| [cell.frame, cell.state, 0, cell.index]),
                d.device(),
            )?;
            let list = CellList::in_order(list, cells.len(), 2, [rows, states]);
            let (d_f, d_g) = (on(&sums(2 * rows)).copy()?, on(&sums(2 * states)).copy()?);
            list.add_hidden_gradient(&d, &on(hidden), 1.0, (&d_f, &d_g))?;
            Ok([values(&d_f), values(&d_g)])
        })
        .unwrap()
    };
    let (d_f, d_g) = (sums(2 * frames), sums(2 * states));
    joint::add_hidden_gradient(&d, &hidden, &cells, 1.0, &d_f, &d_g).unwrap();
    assert_eq!(listed(&cells, frames, &d, &hidden), [values(&d_f), values(&d_g)]);
    // A state looks at the frames of its own utterance and no others, so that a batch of twice the utterances is twice the work:
    // a cell that joins it with a frame of the other one, as no lattice has, is not found.
    let own = Cell {
        frame: 1,
        state: 2,
        label: None,
        index: 0,
    };
    let strange = Cell { frame: 5, ..own };
    let ones = Tensor::ones((2, width), DType::F32, &Device::Cpu).unwrap();
    let [d_f, d_g] = listed(&[own, strange], 4, &ones, &ones);
    assert_eq!(d_f[5 * width], 1.0);
    assert_eq!(d_g[2 * width], 1.0);
    let mut turned = cells.clone();
    turned.reverse();
    let refused = on_device(|on| joint::add_hidden_gradient(&on(&d), &on(&hidden), &turned, 1.0, &d, &d));
    assert!(refused.unwrap_err().to_string().contains("out of order"));
}
