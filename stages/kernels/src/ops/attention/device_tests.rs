//! Against the kernels for the CPU, in the emulator or on a device.

use crate::lengths::Lengths;
use crate::noise::{DropMask, Noise};
use crate::ops::attention::{self, Context, Scores};
use crate::testing::on_device::{BOUND, random, same};

#[test]
fn attention_parts() {
    let mut noise = Noise::new(5);
    for (rows, heads, k) in [(1, 1, 1), (13, 4, 5), (400, 2, 17)] {
        let x = random(&[rows, heads * k], &mut noise);
        let offset = random(&[heads, k], &mut noise);
        let split = attention::split_heads(&x, heads, None).unwrap();
        for offset in [None, Some(&offset)] {
            same("heads, split", 0.0, |on| {
                Ok(vec![attention::split_heads(&on(&x), heads, offset.map(on).as_ref())?])
            });
        }
        for other in [None, Some(&split)] {
            same("heads, merged", 0.0, |on| {
                Ok(vec![attention::merge_heads(&on(&split), other.map(on).as_ref())?])
            });
        }
        let others = [(); 3].map(|()| random(&[heads, rows, k], &mut noise));
        same("heads, summed", BOUND, |on| {
            let (first, second) = attention::head_sums(&on(&split), &on(&others[0]))?;
            Ok(vec![first, second])
        });
        let [key, value] = [(); 2].map(|()| random(&[rows, heads * k], &mut noise));
        let other_offset = random(&[heads, k], &mut noise);
        same("projections, split", 0.0, |on| {
            let biases = (&on(&offset), &on(&other_offset));
            Ok(attention::split_projections([&on(&x), &on(&key), &on(&value)], heads, biases)?.into())
        });
        same("projections, merged", 0.0, |on| {
            let [a, b, c] = others.each_ref().map(on);
            Ok(attention::merge_projections([&on(&split), &a, &b, &c])?.into())
        });
    }
    let (sum, part) = (random(&[2, 3 * 9, 4], &mut noise), random(&[2, 3 * 5, 4], &mut noise));
    same("rows added", 0.0, |on| {
        let sum = on(&sum).copy()?;
        attention::add_rows_in_place(&sum, &on(&part), 3, 2)?;
        Ok(vec![sum])
    });
    // All frames; a band of all widths; and a block of queries with the keys that they see.
    let cases = [
        (1, Context::All, 0..1, 0..1),
        (5, Context::All, 0..5, 0..5),
        (300, Context::All, 0..300, 0..300),
        (9, Context::Band(0), 0..9, 0..9),
        (9, Context::Band(2), 0..9, 0..9),
        (9, Context::Band(usize::MAX), 0..9, 0..9),
        (20, Context::Band(3), 8..12, 5..15),
        (20, Context::Band(3), 16..20, 13..20),
        (9, Context::From(0), 0..9, 0..9),
        (20, Context::From(3), 8..12, 5..20),
        (9, Context::From(usize::MAX), 0..9, 0..9),
        (9, Context::Chunks { size: 1, left: 3 }, 0..9, 0..9),
        (20, Context::Chunks { size: 3, left: 2 }, 0..20, 0..20),
        (20, Context::Chunks { size: 3, left: 2 }, 9..15, 3..15),
        (
            20,
            Context::Chunks {
                size: usize::MAX,
                left: 1,
            },
            0..20,
            0..20,
        ),
    ];
    for (time, context, queries, keys) in cases {
        let (heads, batch) = (2, 3);
        let reach = context.reach(time);
        let lengths = Lengths::new([time, time / 2, time.min(1)]);
        let scores = Scores {
            lengths: &lengths,
            scale: 0.3,
            context,
            queries: queries.clone(),
            keys: keys.clone(),
            reach,
        };
        let square = [heads, batch, queries.len(), keys.len()];
        let content = random(&square, &mut noise);
        let position = random(&[heads, batch, queries.len(), 2 * reach + 1], &mut noise);
        let dp = random(&square, &mut noise);
        same("attention weights", BOUND, |on| {
            Ok(vec![attention::weights(&on(&content), &on(&position), &scores)?])
        });
        let p = attention::weights(&content, &position, &scores).unwrap();
        same("attention weights, backward", BOUND, |on| {
            let (content, position) = attention::weights_backward(&on(&p), &on(&dp), &scores)?;
            Ok(vec![content, position])
        });
        let mask = DropMask::draw(0.3, &mut noise);
        same("attention weights, dropped", BOUND, |on| {
            let (weights, dropped) = attention::weights_dropped(&on(&content), &on(&position), &scores, mask)?;
            let ((content, position), again) = attention::weights_dropped_backward(&on(&p), &on(&dp), &scores, mask)?;
            Ok(vec![weights, dropped, content, position, again])
        });
    }
}
