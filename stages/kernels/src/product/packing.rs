//! Packing: operands of a product are copied to panels, in the order in which the micro-kernel reads them.

use super::each_task;
use super::matrix::Matrix;
use super::micro_kernel::{KC, MR_MAX, Processor, transpose_8x8};
use crate::aligned::Aligned;

/// The elements of one side of a product that belong to consecutive panels, packed for one block of depth.
///
/// Panel `i` has the elements of `elements(i)`, and `vectors(i)` vectors for them; what is left of the last vector is zero.
pub struct Panels {
    processor: Processor,
    /// Elements of the side.
    count: usize,
    pub panels: usize,
}

impl Panels {
    /// Panels of nearly one size.
    pub fn new(processor: Processor, count: usize) -> Self {
        let vectors = count.div_ceil(processor.lanes());
        Self {
            processor,
            count,
            panels: vectors.div_ceil(processor.mr_vectors()),
        }
    }

    /// First vector of a panel.
    fn first(&self, panel: usize) -> usize {
        self.count.div_ceil(self.processor.lanes()) * panel / self.panels.max(1)
    }

    pub fn vectors(&self, panel: usize) -> usize {
        self.first(panel + 1) - self.first(panel)
    }

    /// Elements of a panel.
    pub fn elements(&self, panel: usize) -> std::ops::Range<usize> {
        let lanes = self.processor.lanes();
        self.first(panel) * lanes..(self.first(panel + 1) * lanes).min(self.count)
    }
}

/// The right-hand side of products, packed once.
pub struct PackedMatrix {
    pub processor: Processor,
    buffer: Aligned<f32>,
    pub depth: usize,
    pub columns: usize,
}

impl PackedMatrix {
    pub fn new(processor: Processor, b: Matrix) -> Self {
        let side = b.transposed();
        let panels = Panels::new(processor, side.rows);
        let width = side.rows.next_multiple_of(processor.lanes());
        let mut buffer = Aligned::<f32>::zeroed(width * side.columns);
        let to = buffer.as_mut_ptr();
        for first in (0..side.columns).step_by(KC) {
            let depth = KC.min(side.columns - first);
            let block = PackedBlock {
                to: to.wrapping_add(first * width),
                depth,
            };
            // SAFETY: the block has room for all panels, behind the blocks before it.
            unsafe { block.fill(side, &panels, first, rayon::current_num_threads() > 1) };
        }
        Self {
            processor,
            buffer,
            depth: b.rows,
            columns: b.columns,
        }
    }

    /// Rows and columns of the matrix that was packed.
    pub fn shape(&self) -> [usize; 2] {
        [self.depth, self.columns]
    }

    /// The panels of the block of depth from `first`, of `depth` steps. Read-only.
    pub fn block(&self, first: usize, depth: usize) -> PackedBlock {
        let width = self.columns.next_multiple_of(self.processor.lanes());
        PackedBlock {
            to: self.buffer.as_ptr().wrapping_add(first * width).cast_mut(),
            depth,
        }
    }
}

/// One block of depth of the packed MR side: its panels behind one another.
#[derive(Clone, Copy)]
pub struct PackedBlock {
    pub to: *mut f32,
    pub depth: usize,
}

// SAFETY: written by tasks in disjoint parts, and read by tasks only when all is written.
unsafe impl Send for PackedBlock {}
// SAFETY: as above.
unsafe impl Sync for PackedBlock {}

impl PackedBlock {
    pub fn panel(self, panels: &Panels, panel: usize) -> *mut f32 {
        self.to
            .wrapping_add(panels.first(panel) * panels.processor.lanes() * self.depth)
    }

    /// Packs all panels for the block of depth from `first`.
    ///
    /// # Safety
    ///
    /// There must be room for `depth` times all vectors.
    pub unsafe fn fill(self, side: Matrix, panels: &Panels, first: usize, parallel: bool) {
        each_task(panels.panels, parallel, |panel| {
            let lanes = panels.vectors(panel) * panels.processor.lanes();
            let steps = first..first + self.depth;
            // SAFETY: each panel has its own part, `lanes * depth` floats long.
            unsafe { pack(side, panels.elements(panel), steps, lanes, self.panel(panels, panel)) };
        });
    }
}

/// Packs some elements of a side for some steps of depth: per step `width` floats, those without an element zero.
///
/// # Safety
///
/// `to` must have `width` floats per step, and the processor AVX2.
unsafe fn pack(
    side: Matrix,
    elements: std::ops::Range<usize>,
    steps: std::ops::Range<usize>,
    width: usize,
    to: *mut f32,
) {
    let (count, depth) = (elements.len(), steps.len());
    if side.row_step == 1 {
        for (step, k) in steps.enumerate() {
            // SAFETY: both ends have `count` floats here, and `to` has `width`.
            unsafe {
                let to = to.add(step * width);
                copy_row(side.at(elements.start, k), to, count);
                std::ptr::write_bytes(to.add(count), 0, width - count);
            }
        }
        return;
    }
    // SAFETY: of the matrix only elements are read, and of `to` only `width` floats per step are written.
    unsafe {
        let (squares, whole) = if side.column_step == 1 {
            (count / 8 * 8, depth / 8 * 8)
        } else {
            (0, 0)
        };
        for i in (0..squares).step_by(8) {
            for k in (0..whole).step_by(8) {
                let from = side.at(elements.start + i, steps.start + k);
                transpose_8x8(from, side.row_step, to.add(k * width + i), width, false);
            }
        }
        for i in 0..width {
            let done = if i < squares { whole } else { 0 };
            for k in done..depth {
                let value = if i < count {
                    *side.at(elements.start + i, steps.start + k)
                } else {
                    0.0
                };
                *to.add(k * width + i) = value;
            }
        }
    }
}

/// Copies `count` floats, few of them: a call of `memcpy` costs more.
#[inline(always)]
pub unsafe fn copy_row(from: *const f32, to: *mut f32, count: usize) {
    // SAFETY: the caller's promise that both have `count` floats.
    unsafe {
        // Of known length: whole tiles of both processors.
        if count == MR_MAX {
            to.cast::<[f32; MR_MAX]>()
                .write_unaligned(from.cast::<[f32; MR_MAX]>().read_unaligned());
        } else if count == 16 {
            to.cast::<[f32; 16]>()
                .write_unaligned(from.cast::<[f32; 16]>().read_unaligned());
        } else {
            std::ptr::copy_nonoverlapping(from, to, count);
        }
    }
}
