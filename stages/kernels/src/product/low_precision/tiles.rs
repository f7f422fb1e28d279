//! How a product of low precision is cut into tasks and tiles.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::super::each_task;

/// Most columns of a panel, for any kernel.
pub const PANEL: usize = 64;

/// Most rows of a tile, for any kernel.
pub const ROWS: usize = 6;

/// Tasks for each thread, if there are as many. How a product is cut does not change its elements.
const TASKS: usize = 6;

/// Products with fewer multiplications run on the calling thread.
const PARALLEL: usize = 1 << 20;

/// Bytes of rows that a task takes together: they stay in the second cache while panels pass.
const CHUNK: usize = 256 << 10;

/// The elements of a tile, row by row.
#[derive(Clone)]
#[repr(align(64))]
pub struct Tile(pub [[f32; PANEL]; ROWS]);

/// Sizes of a product and of the tiles that it is computed in.
#[derive(Clone, Copy, Debug)]
pub struct Tiling {
    pub rows: usize,
    pub columns: usize,
    /// Bytes of a row of the left-hand side.
    pub row_bytes: usize,
    /// Columns of a panel, of which the last one may have fewer.
    pub panel: usize,
    /// Rows of a tile.
    pub tile: usize,
}

/// The result of a product while tasks write their parts of it.
#[derive(Clone, Copy)]
struct Output(*mut f32);

// SAFETY: tasks write to disjoint parts.
unsafe impl Send for Output {}
// SAFETY: as above.
unsafe impl Sync for Output {}

/// Writes the whole of `out`, row-major. `compute(panel, rows, tile)` computes the rows of a tile in the columns of a panel; what
/// else it writes to `tile` is not looked at.
///
/// # Panics
/// If `out` is of another size.
pub fn by_tiles(
    tiling: Tiling,
    out: &mut [MaybeUninit<f32>],
    compute: impl Fn(usize, Range<usize>, &mut Tile) + Send + Sync,
) {
    let Tiling {
        rows,
        columns,
        row_bytes,
        panel: width,
        tile,
    } = tiling;
    assert_eq!(out.len(), rows * columns, "size of the result");
    if out.is_empty() {
        return;
    }
    let panels = columns.div_ceil(width);
    let threads = rayon::current_num_threads();
    let parallel = threads > 1 && rows * columns * row_bytes >= PARALLEL;
    let wanted = if parallel { threads * TASKS } else { 1 };
    let in_cache = (CHUNK / row_bytes.max(1)).max(4 * tile);
    let chunk = rows.div_ceil(wanted.div_ceil(panels)).clamp(tile, in_cache.max(tile));
    let chunk = chunk.next_multiple_of(tile);
    let output = Output(out.as_mut_ptr().cast());
    // The panels of one chunk of rows after the other: weights are read once for each chunk.
    each_task(panels * rows.div_ceil(chunk), parallel, |task| {
        // The whole of it, or only its pointer would go to other threads.
        let Output(to) = { output };
        let (panel, first) = (task % panels, task / panels * chunk);
        let place = panel * width..columns.min((panel + 1) * width);
        let mut sums = Tile([[0.0; PANEL]; ROWS]);
        let last = rows.min(first + chunk);
        for start in (first..last).step_by(tile) {
            let range = start..last.min(start + tile);
            compute(panel, range.clone(), &mut sums);
            for (row, sums) in range.zip(&sums.0) {
                let to = to.wrapping_add(row * columns + place.start);
                // SAFETY: the columns of the panel are in this row of the result, and tasks have parts of their own.
                unsafe { std::ptr::copy_nonoverlapping(sums.as_ptr(), to, place.len()) };
            }
        }
    });
}

/// From one row of so many numbers to the next, in numbers: whole lines, and one more, as rows that lie a multiple of 4096
/// bytes apart would share a set of the first cache.
pub fn row_stride<T>(depth: usize) -> usize {
    let line = 64 / size_of::<T>();
    depth.next_multiple_of(line) + line
}
