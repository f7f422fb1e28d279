//! A Conformer layer over frames that come in blocks.

use candle_core::Tensor;
use flow_kernels::Lengths;
use flow_kernels::attention::Context;
use flow_kernels::elementwise::residual;

use super::{ConformerLayer, HALF};
use crate::error::Result;
use crate::layers::Frames;
use crate::layers::attention::PositionTable;
use crate::layers::attention::stream::AttentionStream;
use crate::layers::held_rows::HeldRows;
use crate::parameters::{Mode, Parameters};

/// A layer, when evaluating, over one utterance whose frames come in blocks: what it gives is, to the bit, what
/// [`ConformerLayer::forward`] gives, where an element of a matrix product does not depend on the other rows.
///
/// An output row needs, of the attention's output, the rows that the depthwise convolution reaches, and each of these the
/// keys of its block of queries. So with limited context rows are held that grow with the context, not with the frames.
#[derive(Debug)]
pub struct LayerStream {
    time: usize,
    valid: usize,
    attention: AttentionStream,
    /// The residual before attention, and that after it: (rows, d).
    before: HeldRows,
    after: HeldRows,
    /// What the depthwise convolution is over: (rows, d).
    gated: HeldRows,
    /// Rows that were given.
    given: usize,
}

impl LayerStream {
    /// Rows that are held.
    pub fn held(&self) -> usize {
        let rows = [&self.before, &self.after, &self.gated].map(HeldRows::held);
        rows.into_iter().chain([self.attention.held()]).max().unwrap_or(0)
    }
}

impl ConformerLayer {
    /// Begins an utterance of `time` frames, of which `valid` are no padding.
    pub fn stream(
        &self,
        parameters: &Parameters,
        table: &PositionTable,
        context: Context,
        (time, valid): (usize, usize),
    ) -> Result<LayerStream> {
        let frames = Frames {
            batch: 1,
            time,
            lengths: Lengths::new([valid]),
            context,
        };
        Ok(LayerStream {
            time,
            valid,
            attention: self.self_attn.stream(parameters, table, frames)?,
            before: HeldRows::new(0),
            after: HeldRows::new(0),
            gated: HeldRows::new(0),
            given: 0,
        })
    }

    /// Takes the next frames, (rows, d).
    pub fn feed(&self, parameters: &Parameters, stream: &mut LayerStream, x: &Tensor) -> Result<()> {
        let (x, n) = self.before_attention(parameters, x)?;
        self.self_attn.feed(parameters, &mut stream.attention, &n)?;
        stream.before.push(x)
    }

    /// The output for the next frames, (rows, d); none if these need frames that are still to come, or there are none left.
    pub fn next(&self, parameters: &Parameters, stream: &mut LayerStream) -> Result<Option<Tensor>> {
        while let Some(y) = self.self_attn.next(parameters, &mut stream.attention)? {
            let rows = stream.after.end()..stream.after.end() + y.dim(0)?;
            let x = residual(&stream.before.get(&rows)?, &y, 1.0, None)?;
            stream.before.drop_before(rows.end)?;
            let n = self.norm_conv.forward(parameters, &x)?.0;
            let valid = stream.valid.saturating_sub(rows.start);
            stream.gated.push(self.conv.gate(parameters, &n, valid)?)?;
            stream.after.push(x)?;
            if let Some(y) = self.convolved(parameters, stream)? {
                return Ok(Some(y));
            }
        }
        Ok(None)
    }

    /// What follows the attention, for the frames that have all their neighbours.
    fn convolved(&self, parameters: &Parameters, stream: &mut LayerStream) -> Result<Option<Tensor>> {
        let reach = self.conv.reach();
        let there = stream.gated.end();
        let rows = stream.given..match there == stream.time {
            true => there,
            false => there.saturating_sub(reach),
        };
        if rows.is_empty() {
            return Ok(None);
        }
        let around = rows.start.saturating_sub(reach)..there.min(rows.end + reach);
        let gated = stream.gated.get(&around)?;
        let y = self
            .conv
            .convolve(parameters, &gated, rows.start - around.start..rows.end - around.start)?;
        let x = residual(&stream.after.get(&rows)?, &y, 1.0, None)?;
        stream.given = rows.end;
        stream.after.drop_before(rows.end)?;
        stream.gated.drop_before(rows.end.saturating_sub(reach))?;
        Ok(Some(self.after_convolution(parameters, &x)?))
    }

    /// The residual before attention, and this normalised.
    pub fn before_attention(&self, parameters: &Parameters, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let n = self.norm_feed_forward1.forward(parameters, x)?.0;
        let y = self.feed_forward1.forward(parameters, &n, &mut Mode::Evaluate)?.0;
        let x = residual(x, &y.to_dtype(x.dtype())?, HALF, None)?;
        let n = self.norm_self_att.forward(parameters, &x)?.0;
        Ok((x, n))
    }

    /// The layer's output, from the residual behind the convolution.
    pub fn after_convolution(&self, parameters: &Parameters, x: &Tensor) -> Result<Tensor> {
        let n = self.norm_feed_forward2.forward(parameters, x)?.0;
        let y = self.feed_forward2.forward(parameters, &n, &mut Mode::Evaluate)?.0;
        let x = residual(x, &y.to_dtype(x.dtype())?, HALF, None)?;
        let y = self.norm_out.forward(parameters, &x)?.0;
        let mut adapters = self.adapters.iter();
        adapters.try_fold(y, |y, adapter| Ok(adapter.forward(parameters, &y, None)?.0))
    }
}
