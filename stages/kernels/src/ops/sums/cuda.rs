//! Sums over rows, in two steps and a fixed order; and the bias of linear and convolution layers.

use candle_core::{DType, Device, Tensor};

use crate::device::launch::Argument::{Int, Long, Longs, Read, ReadAll, ReadIf, Write, WriteIf};
use crate::device::launch::{Grid, THREADS, fresh_of, launch, numbers};
use crate::device::to_host;
use crate::error::{Error, Result};
use crate::ops::sums::column_sums::ColumnSums;

/// Elements that one block squares and adds: so many that what the host waits for is short, 77 KB for 627 million of them.
const CHUNK: usize = 64 * 1024;

/// Sums of the rows of each chunk: what a kernel of the kind `partial_sums` writes.
pub(crate) struct Partial {
    /// (chunks, width)
    pub sums: Tensor,
    /// Rows of a chunk.
    pub chunk: usize,
    pub chunks: usize,
    width: usize,
}

impl Partial {
    /// For sums of `width` over `rows` rows, in f32 or f64.
    pub fn new(dtype: DType, rows: usize, width: usize, device: &Device) -> Result<Self> {
        let (chunk, chunks) = Self::chunks_of(rows);
        Ok(Self {
            sums: fresh_of(dtype, (chunks, width), device)?,
            chunk,
            chunks,
            width,
        })
    }

    /// Rows of a chunk, and how many chunks there are of this many rows.
    pub fn chunks_of(rows: usize) -> (usize, usize) {
        let chunk = rows.div_ceil(1024).max(256);
        (chunk, rows.div_ceil(chunk).max(1))
    }

    /// The blocks of the kernel that writes it.
    pub fn grid(&self) -> Grid {
        Grid::of(self.width.div_ceil(32), self.chunks)
    }

    /// The sums over all rows, in f32. They are (width / channels, channels) and come out as (channels, width / channels).
    pub fn total(&self, channels: usize) -> Result<Tensor> {
        let out = fresh_of(DType::F32, self.width, self.sums.device())?;
        let tensors = [Read(&self.sums), Write(&out)];
        let sizes = [self.chunks, self.width, channels.max(1)].map(Int);
        launch("total", Grid::elements(self.width), &[&tensors[..], &sizes].concat())?;
        Ok(out)
    }
}

/// What the blocks of a kernel found of sums over rows.
#[derive(Clone, Debug)]
pub(crate) struct PartialSums {
    /// (blocks, columns)
    pub sums: Tensor,
    /// If not 0, there are taps + 1 sums for each channel: those of all but the last are (taps, channels) and come out as
    /// (channels, taps).
    pub taps: usize,
}

/// Tensors of partial sums that one launch adds up.
pub(crate) const TOGETHER: usize = 10;

/// The sums of the columns of some tensors (chunks, columns), at most [`TOGETHER`], behind each other: those of the first `count`
/// tensors, which are added to `sum` where that is given, and those of the others.
pub(crate) fn totals(partial: &[PartialSums], count: usize, sum: Option<&Tensor>) -> Result<(Tensor, Option<Tensor>)> {
    let sizes = partial
        .iter()
        .map(|partial| partial.sums.dims2())
        .collect::<candle_core::Result<Vec<_>>>()?;
    let (Some(PartialSums { sums: like, .. }), true) =
        (partial.first(), partial.len() <= TOGETHER && count <= partial.len())
    else {
        return Err(Error::Input(format!("{} tensors of partial sums", partial.len())));
    };
    let width = |sizes: &[(usize, usize)]| sizes.iter().map(|&(_, width)| width).sum::<usize>();
    let columns = width(&sizes[..count]);
    let out = match sum {
        Some(sum) if sum.dims() == [columns] => sum.clone(),
        Some(sum) => {
            return Err(Error::Input(format!(
                "{columns} sums for a tensor of shape {:?}",
                sum.dims()
            )));
        }
        None => fresh_of(DType::F32, columns, like.device())?,
    };
    let rest = match width(&sizes[count..]) {
        0 => None,
        columns => Some(fresh_of(DType::F32, columns, like.device())?),
    };
    let blocks = sizes.iter().map(|&(_, width)| width.div_ceil(32)).sum();
    let tensors = (0..TOGETHER).map(|at| ReadIf(partial.get(at).map(|partial| &partial.sums)));
    let results = [
        Write(&out),
        WriteIf(rest.as_ref()),
        Int(columns),
        Int(usize::from(sum.is_some())),
    ];
    let sizes = (0..TOGETHER).flat_map(|at| {
        let (chunks, width) = sizes.get(at).copied().unwrap_or((0, 0));
        let taps = partial.get(at).map_or(0, |partial| partial.taps);
        [Int(chunks), Int(width), Int(taps)]
    });
    let arguments: Vec<_> = tensors.chain(results).chain(sizes).collect();
    launch("totals", Grid::rows(blocks), &arguments)?;
    Ok((out, rest))
}

/// Sum of squares of all elements of some tensors, in 64 bits.
pub fn squares(tensors: &[Tensor]) -> Result<f64> {
    let Some(first) = tensors.first() else {
        return Ok(0.0);
    };
    let tensors = tensors
        .iter()
        .map(Tensor::contiguous)
        .collect::<candle_core::Result<Vec<_>>>()?;
    let (mut plan, mut blocks) = (Vec::with_capacity(2 * tensors.len()), 0);
    for tensor in &tensors {
        plan.extend([blocks as u64, tensor.elem_count() as u64]);
        blocks += tensor.elem_count().div_ceil(CHUNK);
    }
    if blocks == 0 {
        return Ok(0.0);
    }
    let partial = fresh_of(DType::F64, blocks, first.device())?;
    let tables = [ReadAll(&tensors), Longs(&plan), Write(&partial)];
    let sizes = [tensors.len(), CHUNK].map(Int);
    launch("sum_of_squares", Grid::rows(blocks), &[&tables[..], &sizes].concat())?;
    Ok(to_host::<f64>(&partial)?.iter().sum())
}

/// `sum[rows[i]] += x[i]` for every row `i` of `x` that has one, row by row in order.
pub fn add_to_rows(sum: &Tensor, x: &Tensor, rows: &[Option<usize>]) -> Result<()> {
    let most = sum.dim(0)?;
    // What is none is past the last one.
    let places: Vec<usize> = rows.iter().map(|row| row.unwrap_or(most)).collect();
    ListedRows::copied(&places, sum.device())?.add_to(sum, x, most)
}

/// Places of rows on a device.
#[derive(Debug)]
pub struct ListedRows {
    rows: Tensor,
    /// Their numbers, sorted by place and then by number.
    order: Tensor,
}

impl ListedRows {
    /// All goes in one copy.
    ///
    /// # Errors
    /// If the device fails.
    pub fn copied(rows: &[usize], device: &Device) -> Result<Self> {
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_by_key(|&number| rows[number]);
        let count = rows.len();
        // A device has no memory of no bytes.
        let both = numbers(rows.iter().copied().chain(order).chain([0]), device)?;
        Ok(Self {
            rows: both.narrow(0, 0, count)?,
            order: both.narrow(0, count, count)?,
        })
    }

    /// In u32.
    pub fn rows(&self) -> &Tensor {
        &self.rows
    }

    /// `sum[rows[i]] += x[i]` for every row `i` of `x` whose place is below `most`, row by row in order.
    ///
    /// # Errors
    /// Where shapes do not fit.
    pub fn add_to(&self, sum: &Tensor, x: &Tensor, most: usize) -> Result<()> {
        let ((places, width), count) = (sum.dims2()?, self.rows.elem_count());
        if most > places || x.dims() != [count, width] {
            return Err(Error::Input(format!(
                "rows of shape {:?}, of which {count} have a place below {most}, for sums of shape {:?}",
                x.dims(),
                sum.dims()
            )));
        }
        launch(
            "add_listed_rows",
            Grid::of(count, width.div_ceil(THREADS)),
            &[
                Read(x),
                Read(&self.rows),
                Read(&self.order),
                Write(sum),
                Int(count),
                Int(most),
                Int(width),
            ],
        )
    }
}

pub fn add_bias(y: &Tensor, bias: &Tensor) -> Result<()> {
    let (n, width) = (y.elem_count(), bias.elem_count());
    let arguments = [Write(y), Read(bias), Long(n as u64), Int(width)];
    launch("add_bias", Grid::elements(n), &arguments)
}

pub fn column_sum(dy: &Tensor) -> Result<Tensor> {
    column_sums(dy)?.total()
}

pub fn column_sums(dy: &Tensor) -> Result<ColumnSums> {
    let dy = dy.contiguous()?;
    let width = dy.dims().last().copied().unwrap_or(1);
    let dy = dy.reshape((dy.elem_count() / width.max(1), width))?;
    let (rows, partial) = (dy.dim(0)?, Partial::new(DType::F32, dy.dim(0)?, width, dy.device())?);
    let sizes = [rows, width, partial.chunk].map(Int);
    let arguments = [&[Read(&dy), Write(&partial.sums)][..], &sizes].concat();
    launch("column_sum", partial.grid(), &arguments)?;
    Ok(ColumnSums::partial(partial.sums))
}
