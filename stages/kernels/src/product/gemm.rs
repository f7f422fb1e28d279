//! How a product is cut into tasks and blocks, as in GotoBLAS and BLIS: blocks of `KC` steps of depth, of which the MR side is
//! packed once for all tasks; tasks of so many panels of the MR side and so many elements of the NR side; and in each of
//! them the micro-kernel.

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::cell::RefCell;
use std::mem::MaybeUninit;

use super::cache::l2_bytes;
use super::each_task;
use super::gemv::{COLUMNS, gemv};
use super::matrix::Matrix;
use super::micro_kernel::{KC, MR_MAX, MicroKernel, NR_MAX, Piece, Processor, STRIP, Sums, transpose_8x8};
use super::packing::{PackedBlock, PackedMatrix, Panels, copy_row};
use crate::aligned::Aligned;

/// Most panels of the MR side that a task takes together, as far as they are in the [L2 cache](l2_bytes).
const MC_PANELS: usize = 8;

/// Most elements of the NR side that a task takes together.
const NC: usize = 96;

/// Tasks per thread, if there are as many panels. How a product is cut does not change its elements.
const TASKS: usize = 6;

/// Padding between packed panels of the NR side, in floats. Without it panels would begin a multiple of 4096 bytes
/// apart, in the same set of the L1 cache, which has 8 or 12 lines, while packing writes to as many panels in turn.
const PANEL_PADDING: usize = 16;

/// How many steps of depth ahead packing fetches rows of the NR side. They are on other pages, where the processor fetches
/// nothing by itself.
const ROWS_AHEAD: usize = 16;

/// Products with fewer multiplications run on the calling thread.
const PARALLEL: usize = 1 << 20;

thread_local! {
    static MR_BUFFER: RefCell<Aligned<f32>> = RefCell::default();
    static NR_BUFFER: RefCell<Aligned<f32>> = RefCell::default();
}

/// The result of a product while tasks write their parts of it.
#[derive(Clone, Copy)]
struct Output {
    to: *mut f32,
    columns: usize,
}

// SAFETY: tasks write to disjoint parts.
unsafe impl Send for Output {}
// SAFETY: as above.
unsafe impl Sync for Output {}

/// `out = a b`, with `out` row-major. `out` is written wholly if the sizes fit; otherwise this panics.
pub fn multiply(processor: Processor, a: Matrix, b: Matrix, out: &mut [MaybeUninit<f32>]) {
    assert_eq!(a.columns, b.rows, "columns of the one, rows of the other matrix");
    assert_eq!(out.len(), a.rows * b.columns, "size of the result");
    if a.columns == 0 {
        out.fill(MaybeUninit::new(0.0));
        return;
    }
    if out.is_empty() {
        return;
    }
    let output = Output {
        to: out.as_mut_ptr().cast(),
        columns: b.columns,
    };
    // Both sides as (element, depth).
    let (rows, columns) = (a, b.transposed());
    if rows.rows == 1 && columns.column_step == 1 {
        return one_row(rows, columns, output);
    }
    // Rows are the MR side where packing them, and transposing the panels, is less than packing the columns: for few
    // rows and a weight whose depth is contiguous, which is then read once and never copied.
    let by_columns = columns.rows * a.columns;
    let by_rows = rows.rows * a.columns + rows.rows * columns.rows * a.columns.div_ceil(KC);
    if columns.column_step == 1 && by_rows < by_columns {
        run(processor, MrSide::Matrix(rows), columns, &[0], true, output);
    } else {
        run(processor, MrSide::Matrix(columns), rows, &[0], false, output);
    }
}

/// The product of a single row with `columns`, (element, depth) with the depth contiguous.
fn one_row(row: Matrix, columns: Matrix, output: Output) {
    // SAFETY: the elements exist.
    let row: Vec<f32> = (0..row.columns).map(|k| unsafe { *row.at(0, k) }).collect();
    let threads = rayon::current_num_threads();
    let parallel = threads > 1 && columns.rows * columns.columns >= PARALLEL;
    let tasks = if parallel { threads * TASKS } else { 1 };
    let part = columns.rows.div_ceil(tasks).next_multiple_of(COLUMNS);
    each_task(columns.rows.div_ceil(part), parallel, |task| {
        let first = task * part;
        let count = part.min(columns.rows - first);
        // Borrowed as a whole; otherwise the closure would capture only the raw pointer, which is not `Sync`.
        let Output { to, .. } = { output };
        // SAFETY: every processor that this module is for has AVX2; the elements exist, and tasks write to disjoint
        // parts of the result.
        unsafe { gemv(&row, columns.at(first, 0), columns.row_step, count, to.add(first)) };
    });
}

impl PackedMatrix {
    /// `out = a b`, row-major, as [`multiply`] computes it. Rows of the matrix `a` are the elements of the product's left-hand
    /// side, which has as many columns for each of `taps`; those of a tap lie so many floats behind the ones of the matrix.
    pub fn multiply(&self, a: Matrix, taps: &[usize], out: &mut [MaybeUninit<f32>]) {
        assert_eq!(
            a.columns * taps.len(),
            self.depth,
            "columns of the one, rows of the other matrix"
        );
        assert_eq!(out.len(), a.rows * self.columns, "size of the result");
        if self.depth == 0 {
            out.fill(MaybeUninit::new(0.0));
            return;
        }
        if out.is_empty() {
            return;
        }
        let last = taps.iter().max().copied().unwrap_or(0);
        assert!(
            a.has(a.rows - 1, a.columns - 1, last) && (a.column_step == 1 || taps == [0]),
            "all taps of all rows are in the storage, with the depth contiguous"
        );
        let output = Output {
            to: out.as_mut_ptr().cast(),
            columns: self.columns,
        };
        run(self.processor, MrSide::Packed(self), a, taps, false, output);
    }
}

/// The MR side, as (element, depth).
enum MrSide<'a> {
    Matrix(Matrix<'a>),
    Packed(&'a PackedMatrix),
}

/// The pieces of the steps of depth from `first` on, of elements that have `columns` steps at each tap.
fn pieces(taps: &[usize], columns: usize, first: usize, depth: usize) -> Vec<Piece> {
    let mut pieces = Vec::with_capacity(depth.div_ceil(columns) + 1);
    let mut step = first;
    while step < first + depth {
        let piece = Piece {
            offset: taps[step / columns] + step % columns,
            depth: (columns - step % columns).min(first + depth - step),
        };
        step += piece.depth;
        pieces.push(piece);
    }
    pieces
}

/// `nr_side` is (element, depth at one tap); `mr_is_rows` says that the elements of the MR side are rows of the result.
fn run(processor: Processor, mr_side: MrSide, nr_side: Matrix, taps: &[usize], mr_is_rows: bool, output: Output) {
    let whole_depth = nr_side.columns * taps.len();
    let count = match &mr_side {
        MrSide::Matrix(side) => side.rows,
        MrSide::Packed(side) => side.columns,
    };
    let panels = Panels::new(processor, count);
    let threads = rayon::current_num_threads();
    let parallel = threads > 1 && count * nr_side.rows * whole_depth >= PARALLEL;
    let (mut groups, mut chunk) = (
        panels.panels.div_ceil(mc_panels(processor)),
        NC.next_multiple_of(processor.nr()),
    );
    if parallel {
        let wanted = (threads * TASKS).div_ceil(groups);
        let least = STRIP * processor.nr();
        chunk = nr_side
            .rows
            .div_ceil(wanted)
            .next_multiple_of(processor.nr())
            .clamp(least, chunk);
        let chunks = nr_side.rows.div_ceil(chunk);
        groups = groups.max((threads * TASKS).div_ceil(chunks)).min(panels.panels);
    }
    let chunks = nr_side.rows.div_ceil(chunk);
    // Taken out of the thread-local: a task of another product may run on this thread meanwhile and then has its own.
    let mut buffer = MR_BUFFER.with_borrow_mut(std::mem::take);
    let width = count.next_multiple_of(processor.lanes());
    for first in (0..whole_depth).step_by(KC) {
        let depth = KC.min(whole_depth - first);
        let packed = match &mr_side {
            MrSide::Matrix(side) => {
                buffer.resize(width * depth);
                let to = buffer.as_mut_ptr();
                let packed = PackedBlock { to, depth };
                // SAFETY: the buffer has room for all panels.
                unsafe { packed.fill(*side, &panels, first, parallel) };
                packed
            }
            MrSide::Packed(side) => side.block(first, depth),
        };
        let straight = nr_side.column_step == 1;
        let one = [Piece {
            offset: if straight {
                first + taps.first().unwrap_or(&0)
            } else {
                0
            },
            depth,
        }];
        let several = match straight && taps.len() > 1 {
            true => pieces(taps, nr_side.columns, first, depth),
            false => Vec::new(),
        };
        let kernel = MacroKernel {
            processor,
            panels: &panels,
            packed,
            nr_side,
            pieces: if several.is_empty() { &one } else { &several },
            straight,
            first,
            mr_is_rows,
            output,
        };
        each_task(groups * chunks, parallel, |task| {
            let (group, number) = (task % groups, task / groups);
            let group = panels.panels * group / groups..panels.panels * (group + 1) / groups;
            // SAFETY: the MR side is packed, and groups and chunks are disjoint parts of the result.
            unsafe { kernel.run(group, number * chunk..nr_side.rows.min((number + 1) * chunk)) };
        });
    }
    MR_BUFFER.with_borrow_mut(|kept| *kept = buffer);
}

/// Panels of the MR side that a task takes together: as many as fill three quarters of the L2 cache.
fn mc_panels(processor: Processor) -> usize {
    let bytes = processor.mr_vectors() * processor.lanes() * KC * size_of::<f32>();
    (l2_bytes() / 4 * 3 / bytes).clamp(1, MC_PANELS)
}

/// Floats from one packed panel of the NR side, of so many elements, to the next one.
fn panel_stride(columns: usize, depth: usize) -> usize {
    columns * depth + PANEL_PADDING
}

/// The macro-kernel of one block of depth: what its tasks share.
struct MacroKernel<'a> {
    processor: Processor,
    panels: &'a Panels,
    packed: PackedBlock,
    nr_side: Matrix<'a>,
    /// Steps of depth of the block in each element of the NR side, as the micro-kernel reads them.
    pieces: &'a [Piece],
    /// Whether these are read where they lie; otherwise they are packed.
    straight: bool,
    /// First step of depth.
    first: usize,
    mr_is_rows: bool,
    output: Output,
}

impl MacroKernel<'_> {
    /// All panels of a group of the MR side and a chunk of the NR side.
    ///
    /// # Safety
    ///
    /// The MR side must be packed, and no other task may write to the same part of the result.
    unsafe fn run(&self, group: std::ops::Range<usize>, chunk: std::ops::Range<usize>) {
        let columns = self.processor.nr();
        let depth = self.packed.depth;
        let straight = self.straight;
        let mut buffer = NR_BUFFER.with_borrow_mut(std::mem::take);
        let packed = if straight {
            std::ptr::null()
        } else {
            buffer.resize(chunk.len().div_ceil(columns) * panel_stride(columns, depth));
            let to = buffer.as_mut_ptr();
            // SAFETY: the buffer has room for all.
            unsafe { self.pack_nr_side(chunk.clone(), to) };
            to.cast_const()
        };
        // Not filled with zeros, which would take as long as a small product.
        let mut sums = MaybeUninit::<Sums>::uninit();
        let sums = sums.as_mut_ptr().cast::<f32>();
        for strip in chunk.clone().step_by(STRIP * columns) {
            let strip = strip..chunk.end.min(strip + STRIP * columns);
            for panel in group.clone() {
                // Panels of nearly one size where that costs nothing: nine rows are five and four.
                let panels_of_strip = strip.len().div_ceil(columns);
                let elements = self.panels.elements(panel);
                let vectors = self.panels.vectors(panel);
                // Whole vectors of sums go straight to the result.
                let Output { to, columns: width } = self.output;
                let written = straight && !self.mr_is_rows && elements.len() == vectors * self.processor.lanes();
                for number in 0..panels_of_strip {
                    let (start, end) = if straight {
                        let bound = |number| strip.start + strip.len() * number / panels_of_strip;
                        (bound(number), bound(number + 1))
                    } else {
                        let start = strip.start + number * columns;
                        (start, start + columns)
                    };
                    let nr_side = std::array::from_fn(|j| {
                        if straight {
                            self.nr_side.at(start + j, 0)
                        } else {
                            packed.wrapping_add((start - chunk.start) / columns * panel_stride(columns, depth) + j)
                        }
                    });
                    let (sums, sums_step) = if written {
                        (to.wrapping_add(start * width + elements.start), width)
                    } else {
                        (sums.wrapping_add((start - strip.start) * MR_MAX), MR_MAX)
                    };
                    let kernel = MicroKernel {
                        pieces: self.pieces,
                        vectors,
                        mr_side: self.packed.panel(self.panels, panel),
                        count: end - start,
                        nr_side,
                        packed: !straight,
                        ahead: (straight && panel == group.start).then_some(STRIP * columns * self.nr_side.row_step),
                        sums,
                        sums_step,
                        add: written && self.first > 0,
                    };
                    // SAFETY: packed operands have the sizes that a panel needs, an unpacked NR side has the
                    // floats of all pieces at each pointer before `end`, and a strip has the rows of `STRIP` panels; or the
                    // sums are elements of the result, whose rows from `start` to `end` and columns `elements` no
                    // other task writes to.
                    unsafe { kernel.run(self.processor) };
                }
                if !written {
                    // SAFETY: the caller's promise; the tiles of the strip have written these sums.
                    unsafe { self.write(sums, elements, strip.clone()) };
                }
            }
        }
        NR_BUFFER.with_borrow_mut(|kept| *kept = buffer);
    }

    /// Packs a chunk of the NR side: panel after panel, per step of depth the elements of a panel.
    ///
    /// # Safety
    ///
    /// `to` must have room for the chunk, rounded up to whole panels that are [`panel_stride`] apart.
    unsafe fn pack_nr_side(&self, chunk: std::ops::Range<usize>, to: *mut f32) {
        let columns = self.processor.nr();
        let depth = self.packed.depth;
        for k in 0..depth {
            if self.nr_side.row_step == 1 {
                for start in chunk.clone().step_by(16) {
                    let ahead = self.nr_side.at(start, self.first + k + ROWS_AHEAD);
                    // SAFETY: any address may be named.
                    unsafe { _mm_prefetch::<_MM_HINT_T1>(ahead.cast()) };
                }
            }
            for (panel, start) in chunk.clone().step_by(columns).enumerate() {
                let count = columns.min(chunk.end - start);
                let to = to.wrapping_add(panel * panel_stride(columns, depth) + k * columns);
                // SAFETY: the elements exist, and the panel has `columns` floats for this step.
                unsafe {
                    if count == NR_MAX && self.nr_side.row_step == 1 {
                        let from = self.nr_side.at(start, self.first + k).cast::<[f32; NR_MAX]>();
                        to.cast::<[f32; NR_MAX]>().write_unaligned(from.read_unaligned());
                        continue;
                    }
                    for j in 0..columns {
                        *to.add(j) = if j < count {
                            *self.nr_side.at(start + j, self.first + k)
                        } else {
                            0.0
                        };
                    }
                }
            }
        }
    }

    /// Writes the sums of a strip, or adds them to those of the blocks before.
    ///
    /// # Safety
    ///
    /// No other task may write to the same part of the result, and the sums of these elements must be there, [`MR_MAX`]
    /// floats for each one of the NR side.
    #[inline]
    unsafe fn write(&self, sums: *const f32, mr_side: std::ops::Range<usize>, nr_side: std::ops::Range<usize>) {
        let add = self.first > 0;
        let Output { to, columns } = self.output;
        // SAFETY: the panel is in the result.
        unsafe {
            if !self.mr_is_rows {
                for (row, j) in nr_side.enumerate() {
                    let (sums, to) = (sums.add(row * MR_MAX), to.add(j * columns + mr_side.start));
                    if add {
                        let sums = std::slice::from_raw_parts(sums, mr_side.len());
                        let to = std::slice::from_raw_parts_mut(to, mr_side.len());
                        to.iter_mut().zip(sums).for_each(|(to, sum)| *to += sum);
                    } else {
                        copy_row(sums, to, mr_side.len());
                    }
                }
                return;
            }
            let (rows, eights) = (mr_side.len() / 8 * 8, nr_side.len() / 8 * 8);
            for i in (0..rows).step_by(8) {
                for j in (0..eights).step_by(8) {
                    let to = to.add((mr_side.start + i) * columns + nr_side.start + j);
                    transpose_8x8(sums.add(j * MR_MAX + i), MR_MAX, to, columns, add);
                }
            }
            for i in 0..mr_side.len() {
                let done = if i < rows { eights } else { 0 };
                for row in done..nr_side.len() {
                    let to = to.add((mr_side.start + i) * columns + nr_side.start + row);
                    let sum = *sums.add(row * MR_MAX + i);
                    *to = if add { *to + sum } else { sum };
                }
            }
        }
    }
}
