//! Against the kernels for the CPU, in the emulator or on a device.

use candle_core::{DType, Device, Tensor};

use crate::error::Result;
use crate::noise::{DropMask, Noise};
use crate::ops::elementwise;
use crate::ops::sums::bias;
use crate::testing::on_device::{BOUND, Place, exact, narrow, random, same};

#[test]
fn elements() {
    let mut noise = Noise::new(2);
    for (rows, width) in [(1, 1), (7, 13), (50, 33)] {
        let (x, y) = (random(&[rows, width], &mut noise), random(&[rows, width], &mut noise));
        let offset = random(&[width], &mut noise);
        let long = random(&[9001], &mut noise);
        let [narrow, narrow_long] = [&x, &long].map(|x| x.to_dtype(DType::BF16).unwrap());
        let in_place = |on: Place, change: &dyn Fn(&Tensor) -> Result<()>| {
            let sum = on(&x).copy()?;
            change(&sum)?;
            Ok(vec![sum])
        };
        same("sum", 0.0, |on| {
            in_place(on, &|sum| elementwise::add_in_place(sum, &on(&y)))
        });
        same("product", 0.0, |on| {
            in_place(on, &|x| elementwise::scale_in_place(x, 0.3))
        });
        same("blend", 0.0, |on| {
            in_place(on, &|sum| elementwise::blend_in_place(sum, &on(&y), 0.3))
        });
        // Tensors of both types, one of several blocks; one begins where four numbers are not read at once.
        same("blend of many", 0.0, |on| {
            let sums = [&x, &y, &long, &long, &long].map(|sum| on(sum).copy());
            let sums = sums.into_iter().collect::<candle_core::Result<Vec<_>>>()?;
            let short = on(&long).narrow(0, 1, long.elem_count() - 2)?;
            let others = [on(&y), on(&narrow), on(&long), on(&narrow_long), short];
            let mut pairs: Vec<_> = sums.iter().zip(&others).collect();
            let within = sums[4].narrow(0, 1, long.elem_count() - 2)?;
            pairs[4].0 = &within;
            elementwise::blend_all_in_place(&pairs, 0.3)?;
            Ok(sums)
        });
        same("bias", 0.0, |on| in_place(on, &|y| bias::add_bias(y, &on(&offset))));
        same("column sum", BOUND, |on| Ok(vec![bias::column_sum(&on(&x))?]));
        for mask in [None, DropMask::draw(0.3, &mut noise), DropMask::draw(1.0, &mut noise)] {
            // The same elements are dropped, to the last one.
            same("residual", 0.0, |on| {
                Ok(vec![elementwise::residual(&on(&x), &on(&y), 0.5, mask)?])
            });
            same("drop", 0.0, |on| {
                Ok(vec![elementwise::drop_scaled(&on(&x), 0.5, mask)?])
            });
            same("silu", BOUND, |on| Ok(vec![elementwise::silu(&on(&x), mask)?]));
            same("silu, backward", BOUND, |on| {
                Ok(vec![elementwise::silu_backward(
                    DType::F32,
                    &on(&x),
                    on(&y).copy()?,
                    mask,
                )?])
            });
        }
    }
    // Sums over many rows, a view in the middle of a storage, and another order of dimensions.
    let x = random(&[900, 70], &mut noise);
    same("column sum of a part", BOUND, |on| {
        Ok(vec![bias::column_sum(&on(&x).narrow(0, 100, 700)?)?])
    });
    same("silu of a view", BOUND, |on| {
        Ok(vec![elementwise::silu(&on(&x).t()?, None)?])
    });
    // Quick exponentials saturate on the CPU and reach zero and infinity here: the results are the same.
    let extreme = Tensor::new(&[-1e30f32, -200.0, -90.0, 90.0, 200.0, 1e30], &Device::Cpu).unwrap();
    same("silu of large values", BOUND, |on| {
        Ok(vec![elementwise::silu(&on(&extreme), None)?])
    });
}

/// Of tensors in bf16, whole fours or not, from an odd place on or not: as of the same numbers in f32.
#[test]
fn silu_of_bf16() {
    let mut noise = Noise::new(3);
    for (rows, width) in [(1, 1), (7, 13), (50, 36)] {
        let [h, dy] = [(); 2].map(|()| exact(&[rows, width], &mut noise));
        for mask in [None, DropMask::draw(0.3, &mut noise)] {
            same("silu", BOUND, |on| {
                Ok(vec![elementwise::silu_in(DType::F32, &narrow(&on(&h)), mask)?])
            });
            same("silu, backward", BOUND, |on| {
                let (h, dy) = (narrow(&on(&h)), narrow(&on(&dy).copy()?));
                Ok(vec![elementwise::silu_backward(DType::F32, &h, dy, mask)?])
            });
        }
        same("silu of a part", BOUND, |on| {
            let part = narrow(&on(&h)).flatten_all()?.narrow(0, rows * width / 2, 1)?;
            Ok(vec![elementwise::silu_in(DType::F32, &part, None)?])
        });
    }
}
