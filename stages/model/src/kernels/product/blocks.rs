//! How a product is cut into tiles, and how its operands are packed.

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::cell::RefCell;
use std::mem::MaybeUninit;

use rayon::prelude::*;

use super::cache::second_cache;
use super::row::{TOGETHER, row_times};
use super::tile::{DEPTH, MOST_NARROW, MOST_WIDE, Processor, STRIP, Sums, Tile, transpose_8x8};

/// Most tiles of the wide side that a task takes together, as far as they lie in the [second cache](second_cache).
const PANELS: usize = 8;

/// Most elements of the narrow side that a task takes together.
const CHUNK: usize = 96;

/// Tasks per thread, if there are as many tiles. How a product is cut does not change its elements.
const TASKS: usize = 6;

/// Floats between packed tiles of the narrow side. Without them tiles would begin a multiple of 4096 bytes apart, in the same
/// set of the first cache, of which there are 8 or 12 lines: packing writes to as many tiles in turns.
const APART: usize = 16;

/// How many steps of depth ahead packing fetches rows of the narrow side. They lie on other pages, where the processor fetches
/// nothing by itself.
const ROWS_AHEAD: usize = 16;

/// Products with fewer multiplications run on the calling thread.
const PARALLEL: usize = 1 << 20;

/// A matrix within a slice: element (row, column) at `start + row * row_step + column * column_step`.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    values: &'a [f32],
    start: usize,
    pub rows: usize,
    pub columns: usize,
    row_step: usize,
    column_step: usize,
}

impl<'a> Matrix<'a> {
    /// None if an element lies outside of `values`.
    pub fn new(
        values: &'a [f32],
        start: usize,
        [rows, columns]: [usize; 2],
        [row_step, column_step]: [usize; 2],
    ) -> Option<Self> {
        if rows > 0 && columns > 0 {
            let last = start
                .checked_add((rows - 1).checked_mul(row_step)?)?
                .checked_add((columns - 1).checked_mul(column_step)?)?;
            values.get(last)?;
        }
        Some(Self {
            values,
            start,
            rows,
            columns,
            row_step,
            column_step,
        })
    }

    fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_step: self.column_step,
            column_step: self.row_step,
            ..self
        }
    }

    /// Pointer to an element; it need not exist.
    fn at(&self, row: usize, column: usize) -> *const f32 {
        let offset = self.start + row * self.row_step + column * self.column_step;
        self.values.as_ptr().wrapping_add(offset)
    }
}

/// The elements of one side of a product that belong to consecutive tiles, packed for one block of depth.
///
/// Tile `i` has the elements from `bounds[i]` to `bounds[i + 1]`, and `vectors(i)` vectors for them; what is left of
/// the last vector is zero.
struct Tiles {
    processor: Processor,
    count: usize,
    tiles: usize,
}

impl Tiles {
    /// Tiles of nearly one size.
    fn new(processor: Processor, count: usize) -> Self {
        let vectors = count.div_ceil(processor.lanes());
        Self {
            processor,
            count,
            tiles: vectors.div_ceil(processor.vectors()),
        }
    }

    /// First vector of a tile.
    fn first(&self, tile: usize) -> usize {
        self.count.div_ceil(self.processor.lanes()) * tile / self.tiles.max(1)
    }

    fn vectors(&self, tile: usize) -> usize {
        self.first(tile + 1) - self.first(tile)
    }

    /// Elements of a tile.
    fn elements(&self, tile: usize) -> std::ops::Range<usize> {
        let lanes = self.processor.lanes();
        self.first(tile) * lanes..(self.first(tile + 1) * lanes).min(self.count)
    }
}

/// Sixteen floats at the start of a cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "read and written through pointers to floats")] [f32; 16]);

/// Memory for packed operands, which grows and stays.
#[derive(Default)]
struct Buffer(Vec<Line>);

impl Buffer {
    /// Room for `count` floats, with values without meaning.
    fn floats(&mut self, count: usize) -> &mut [f32] {
        let lines = count.div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0.0; 16]));
        }
        // SAFETY: a `Line` is 16 floats without padding, and any floats are a `Line`.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast::<f32>(), count) }
    }
}

thread_local! {
    static WIDE: RefCell<Buffer> = RefCell::default();
    static NARROW: RefCell<Buffer> = RefCell::default();
}

/// The result of a product while tasks write their parts of it.
#[derive(Clone, Copy)]
struct Target {
    to: *mut f32,
    columns: usize,
}

// SAFETY: tasks write to disjoint parts.
unsafe impl Send for Target {}
// SAFETY: as above.
unsafe impl Sync for Target {}

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
    let target = Target {
        to: out.as_mut_ptr().cast(),
        columns: b.columns,
    };
    // Both sides as (element, depth).
    let (rows, columns) = (a, b.transposed());
    if rows.rows == 1 && columns.column_step == 1 {
        return one_row(rows, columns, target);
    }
    // Rows are the wide side where packing them, and transposing the tiles, is less than packing the columns: for few
    // rows and a weight whose depth is contiguous, which is then read once and never copied.
    let by_columns = columns.rows * a.columns;
    let by_rows = rows.rows * a.columns + rows.rows * columns.rows * a.columns.div_ceil(DEPTH);
    if columns.column_step == 1 && by_rows < by_columns {
        run(processor, Wide::Matrix(rows), columns, true, target);
    } else {
        run(processor, Wide::Matrix(columns), rows, false, target);
    }
}

/// The product of a single row with `columns`, (element, depth) with the depth contiguous.
fn one_row(row: Matrix, columns: Matrix, target: Target) {
    // SAFETY: the elements exist.
    let row: Vec<f32> = (0..row.columns).map(|k| unsafe { *row.at(0, k) }).collect();
    let threads = rayon::current_num_threads();
    let parallel = threads > 1 && columns.rows * columns.columns >= PARALLEL;
    let tasks = if parallel { threads * TASKS } else { 1 };
    let part = columns.rows.div_ceil(tasks).next_multiple_of(TOGETHER);
    each(columns.rows.div_ceil(part), parallel, |task| {
        let first = task * part;
        let count = part.min(columns.rows - first);
        // The whole of it, or only its pointer would go to other threads.
        let Target { to, .. } = { target };
        // SAFETY: every processor that this module is for has AVX2; the elements exist, and tasks write to disjoint
        // parts of the result.
        unsafe { row_times(&row, columns.at(first, 0), columns.row_step, count, to.add(first)) };
    });
}

/// The right side of products, packed once.
pub struct PackedColumns {
    processor: Processor,
    buffer: Buffer,
    depth: usize,
    columns: usize,
}

impl PackedColumns {
    pub fn new(processor: Processor, b: Matrix) -> Self {
        let side = b.transposed();
        let tiles = Tiles::new(processor, side.rows);
        let mut buffer = Buffer::default();
        let width = side.rows.next_multiple_of(processor.lanes());
        let to = buffer.floats(width * side.columns).as_mut_ptr();
        for first in (0..side.columns).step_by(DEPTH) {
            let depth = DEPTH.min(side.columns - first);
            let block = Packed {
                to: to.wrapping_add(first * width),
                depth,
            };
            // SAFETY: the block has room for all tiles, behind the blocks before it.
            unsafe { block.fill(side, &tiles, first, rayon::current_num_threads() > 1) };
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

    /// `out = a b`, row-major, as [`multiply`] computes it.
    pub fn multiply(&self, a: Matrix, out: &mut [MaybeUninit<f32>]) {
        assert_eq!(a.columns, self.depth, "columns of the one, rows of the other matrix");
        assert_eq!(out.len(), a.rows * self.columns, "size of the result");
        if self.depth == 0 {
            out.fill(MaybeUninit::new(0.0));
        } else if !out.is_empty() {
            let target = Target {
                to: out.as_mut_ptr().cast(),
                columns: self.columns,
            };
            run(self.processor, Wide::Packed(self), a, false, target);
        }
    }
}

/// The wide side, as (element, depth).
enum Wide<'a> {
    Matrix(Matrix<'a>),
    Packed(&'a PackedColumns),
}

/// `narrow` is (element, depth); `across` says that the elements of the wide side are rows of the result.
fn run(processor: Processor, wide: Wide, narrow: Matrix, across: bool, target: Target) {
    let count = match &wide {
        Wide::Matrix(side) => side.rows,
        Wide::Packed(side) => side.columns,
    };
    let tiles = Tiles::new(processor, count);
    let threads = rayon::current_num_threads();
    let parallel = threads > 1 && count * narrow.rows * narrow.columns >= PARALLEL;
    let (mut groups, mut chunk) = (
        tiles.tiles.div_ceil(panels(processor)),
        CHUNK.next_multiple_of(processor.narrow()),
    );
    if parallel {
        let wanted = (threads * TASKS).div_ceil(groups);
        let least = STRIP * processor.narrow();
        chunk = narrow
            .rows
            .div_ceil(wanted)
            .next_multiple_of(processor.narrow())
            .clamp(least, chunk);
        let chunks = narrow.rows.div_ceil(chunk);
        groups = groups.max((threads * TASKS).div_ceil(chunks)).min(tiles.tiles);
    }
    let chunks = narrow.rows.div_ceil(chunk);
    // Taken out, so that a task of another product that runs on this thread meanwhile has its own.
    let mut buffer = WIDE.with_borrow_mut(std::mem::take);
    let width = count.next_multiple_of(processor.lanes());
    for first in (0..narrow.columns).step_by(DEPTH) {
        let depth = DEPTH.min(narrow.columns - first);
        let packed = match &wide {
            Wide::Matrix(side) => {
                let to = buffer.floats(width * depth).as_mut_ptr();
                let packed = Packed { to, depth };
                // SAFETY: the buffer has room for all tiles.
                unsafe { packed.fill(*side, &tiles, first, parallel) };
                packed
            }
            Wide::Packed(side) => Packed {
                // Only read from here on.
                to: side
                    .buffer
                    .0
                    .as_ptr()
                    .cast::<f32>()
                    .wrapping_add(first * width)
                    .cast_mut(),
                depth,
            },
        };
        let part = Part {
            processor,
            tiles: &tiles,
            packed,
            narrow,
            first,
            across,
            target,
        };
        each(groups * chunks, parallel, |task| {
            let (group, number) = (task % groups, task / groups);
            let group = tiles.tiles * group / groups..tiles.tiles * (group + 1) / groups;
            // SAFETY: the wide side is packed, and groups and chunks are disjoint parts of the result.
            unsafe { part.run(group, number * chunk..narrow.rows.min((number + 1) * chunk)) };
        });
    }
    WIDE.with_borrow_mut(|kept| *kept = buffer);
}

/// Tiles of the wide side that a task takes together: as many as fill three quarters of the second cache.
fn panels(processor: Processor) -> usize {
    let bytes = processor.vectors() * processor.lanes() * DEPTH * size_of::<f32>();
    (second_cache() / 4 * 3 / bytes).clamp(1, PANELS)
}

fn each(count: usize, parallel: bool, work: impl Fn(usize) + Send + Sync) {
    if parallel {
        (0..count).into_par_iter().for_each(work);
    } else {
        (0..count).for_each(work);
    }
}

/// The packed wide side.
#[derive(Clone, Copy)]
struct Packed {
    to: *mut f32,
    depth: usize,
}

// SAFETY: written by tasks in disjoint parts, and read by tasks only when all is written.
unsafe impl Send for Packed {}
// SAFETY: as above.
unsafe impl Sync for Packed {}

impl Packed {
    fn tile(self, tiles: &Tiles, tile: usize) -> *mut f32 {
        self.to
            .wrapping_add(tiles.first(tile) * tiles.processor.lanes() * self.depth)
    }

    /// Packs all tiles for the block of depth from `first`.
    ///
    /// # Safety
    ///
    /// There must be room for `depth` times all vectors.
    unsafe fn fill(self, side: Matrix, tiles: &Tiles, first: usize, parallel: bool) {
        each(tiles.tiles, parallel, |tile| {
            let lanes = tiles.vectors(tile) * tiles.processor.lanes();
            let steps = first..first + self.depth;
            // SAFETY: each tile has its own part, `lanes * depth` floats long.
            unsafe { pack(side, tiles.elements(tile), steps, lanes, self.tile(tiles, tile)) };
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
unsafe fn copy_row(from: *const f32, to: *mut f32, count: usize) {
    // SAFETY: the caller's promise that both have `count` floats.
    unsafe {
        if count == MOST_WIDE {
            // Of known length.
            to.cast::<[f32; MOST_WIDE]>()
                .write_unaligned(from.cast::<[f32; MOST_WIDE]>().read_unaligned());
        } else {
            std::ptr::copy_nonoverlapping(from, to, count);
        }
    }
}

/// Floats from one packed tile of the narrow side, of so many elements, to the next one.
fn apart(columns: usize, depth: usize) -> usize {
    columns * depth + APART
}

/// What tasks of one block of depth share.
struct Part<'a> {
    processor: Processor,
    tiles: &'a Tiles,
    packed: Packed,
    narrow: Matrix<'a>,
    /// First step of depth.
    first: usize,
    across: bool,
    target: Target,
}

impl Part<'_> {
    /// All tiles of a group of the wide side and a chunk of the narrow side.
    ///
    /// # Safety
    ///
    /// The wide side must be packed, and no other task may write to the same part of the result.
    unsafe fn run(&self, group: std::ops::Range<usize>, chunk: std::ops::Range<usize>) {
        let columns = self.processor.narrow();
        let depth = self.packed.depth;
        let straight = self.narrow.column_step == 1;
        let mut buffer = NARROW.with_borrow_mut(std::mem::take);
        let packed = if straight {
            std::ptr::null()
        } else {
            let to = buffer
                .floats(chunk.len().div_ceil(columns) * apart(columns, depth))
                .as_mut_ptr();
            // SAFETY: the buffer has room for all.
            unsafe { self.pack_narrow(chunk.clone(), to) };
            to.cast_const()
        };
        let mut sums = Sums([[0.0; MOST_WIDE]; STRIP * MOST_NARROW]);
        for strip in chunk.clone().step_by(STRIP * columns) {
            let strip = strip..chunk.end.min(strip + STRIP * columns);
            for tile in group.clone() {
                // Tiles of nearly one size where that costs nothing: nine rows are five and four.
                let tiles_of_strip = strip.len().div_ceil(columns);
                for number in 0..tiles_of_strip {
                    let (start, end) = if straight {
                        let bound = |number| strip.start + strip.len() * number / tiles_of_strip;
                        (bound(number), bound(number + 1))
                    } else {
                        let start = strip.start + number * columns;
                        (start, start + columns)
                    };
                    let narrow = std::array::from_fn(|j| {
                        if straight {
                            self.narrow.at(start + j, self.first)
                        } else {
                            packed.wrapping_add((start - chunk.start) / columns * apart(columns, depth) + j)
                        }
                    });
                    let product = Tile {
                        depth,
                        vectors: self.tiles.vectors(tile),
                        wide: self.packed.tile(self.tiles, tile),
                        count: end - start,
                        narrow,
                        packed: !straight,
                        ahead: (straight && tile == group.start).then_some(STRIP * columns * self.narrow.row_step),
                        sums: &mut sums.0[start - strip.start],
                    };
                    // SAFETY: packed operands have the sizes that a tile needs, an unpacked narrow side has `depth`
                    // contiguous floats at each pointer before `end`, and a strip has the rows of `STRIP` tiles.
                    unsafe { product.run(self.processor) };
                }
                // SAFETY: the caller's promise.
                unsafe { self.write(&sums, self.tiles.elements(tile), strip.clone()) };
            }
        }
        NARROW.with_borrow_mut(|kept| *kept = buffer);
    }

    /// Packs a chunk of the narrow side: tile after tile, per step of depth the elements of a tile.
    ///
    /// # Safety
    ///
    /// `to` must have room for the chunk, rounded up to whole tiles that are [`apart`].
    unsafe fn pack_narrow(&self, chunk: std::ops::Range<usize>, to: *mut f32) {
        let columns = self.processor.narrow();
        let depth = self.packed.depth;
        for k in 0..depth {
            if self.narrow.row_step == 1 {
                for start in chunk.clone().step_by(16) {
                    let ahead = self.narrow.at(start, self.first + k + ROWS_AHEAD);
                    // SAFETY: any address may be named.
                    unsafe { _mm_prefetch::<_MM_HINT_T1>(ahead.cast()) };
                }
            }
            for (tile, start) in chunk.clone().step_by(columns).enumerate() {
                let count = columns.min(chunk.end - start);
                let to = to.wrapping_add(tile * apart(columns, depth) + k * columns);
                // SAFETY: the elements exist, and the tile has `columns` floats for this step.
                unsafe {
                    if count == MOST_NARROW && self.narrow.row_step == 1 {
                        let from = self.narrow.at(start, self.first + k).cast::<[f32; MOST_NARROW]>();
                        to.cast::<[f32; MOST_NARROW]>().write_unaligned(from.read_unaligned());
                        continue;
                    }
                    for j in 0..columns {
                        *to.add(j) = if j < count {
                            *self.narrow.at(start + j, self.first + k)
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
    /// No other task may write to the same part of the result.
    #[inline]
    unsafe fn write(&self, sums: &Sums, wide: std::ops::Range<usize>, narrow: std::ops::Range<usize>) {
        let add = self.first > 0;
        let Target { to, columns } = self.target;
        // SAFETY: the tile lies in the result.
        unsafe {
            if !self.across {
                for (sums, j) in sums.0.iter().zip(narrow) {
                    let to = to.add(j * columns + wide.start);
                    if add {
                        let to = std::slice::from_raw_parts_mut(to, wide.len());
                        to.iter_mut().zip(sums).for_each(|(to, sum)| *to += sum);
                    } else {
                        copy_row(sums.as_ptr(), to, wide.len());
                    }
                }
                return;
            }
            let (rows, eights) = (wide.len() / 8 * 8, narrow.len() / 8 * 8);
            for i in (0..rows).step_by(8) {
                for j in (0..eights).step_by(8) {
                    let to = to.add((wide.start + i) * columns + narrow.start + j);
                    transpose_8x8(sums.0[j].as_ptr().add(i), MOST_WIDE, to, columns, add);
                }
            }
            for i in 0..wide.len() {
                let done = if i < rows { eights } else { 0 };
                for (sums, j) in sums.0.iter().zip(narrow.clone()).skip(done) {
                    let to = to.add((wide.start + i) * columns + j);
                    *to = if add { *to + sums[i] } else { sums[i] };
                }
            }
        }
    }
}
