//! Against the kernels for the CPU, in the emulator or on a device.

use candle_core::{DType, Device, Tensor};

use crate::error::Result;
use crate::noise::{DropMask, Noise};
use crate::ops::{elementwise, layer_norm};
use crate::product::{add_product_in, product_in};
use crate::testing::on_device::{on_device, random};
use crate::testing::values;

#[test]
fn factors_of_products_are_rounded_to_bf16() {
    let mut noise = Noise::new(22);
    let (x, y) = (random(&[30, 37], &mut noise), random(&[30, 37], &mut noise));
    let (weight, offset) = (random(&[37], &mut noise), random(&[37], &mut noise));
    let mask = DropMask::draw(0.3, &mut noise);
    let results = |dtype: DType| {
        on_device(|on| -> Result<Vec<Tensor>> {
            let (x, y, weight, offset) = (on(&x), on(&y), on(&weight), on(&offset));
            let (normal, statistics) = layer_norm::layer_norm_in(dtype, &x, &weight, &offset)?;
            let (_, of_sum, _) = layer_norm::add_and_norm(dtype, &x, &y, (0.5, mask), &weight, &offset)?;
            let d = |factor: f64, mask| {
                layer_norm::layer_norm_backward_dropped(dtype, &x, &statistics, &weight, &y, None, (factor, mask))
            };
            Ok(vec![
                normal,
                of_sum,
                d(0.5, mask)?.1,
                d(1.0, None)?.1,
                elementwise::silu_in(dtype, &x, mask)?,
                elementwise::silu_backward(dtype, &x, y.copy()?, mask)?,
            ])
        })
        .unwrap()
    };
    for (wide, narrow) in results(DType::F32).iter().zip(results(DType::BF16)) {
        assert_eq!((wide.dtype(), narrow.dtype()), (DType::F32, DType::BF16));
        // To the nearest, of two the even one: candle's rounding.
        let expected = wide.to_device(&Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
        assert_eq!(values(&expected), values(&narrow));
    }
}

#[test]
fn products_of_bf16_are_sums_in_f32() {
    let mut noise = Noise::new(23);
    let (a, b) = (random(&[9, 33], &mut noise), random(&[7, 33], &mut noise));
    let start = random(&[9, 7], &mut noise);
    let rounded = |x: &Tensor| x.to_dtype(DType::BF16).unwrap().to_dtype(DType::F32).unwrap();
    let expected = rounded(&a).matmul(&rounded(&b).t().unwrap()).unwrap();
    let (found, sum) = on_device(|on| {
        let (a, b, sum) = (on(&a), on(&b), on(&start).copy().unwrap());
        let found = product_in(DType::BF16, &a, &b.t().unwrap()).unwrap();
        // Of a factor that is transposed and one that is in bf16 already.
        let transposed = on(&a.t().unwrap().contiguous().unwrap()).to_dtype(DType::BF16).unwrap();
        add_product_in(DType::BF16, &sum, &transposed.t().unwrap(), &b.t().unwrap()).unwrap();
        (found, sum)
    });
    for (found, expected) in [(&found, &expected), (&sum, &(&expected + &start).unwrap())] {
        let close = values(found).into_iter().zip(values(expected));
        assert!(
            close
                .into_iter()
                .all(|(found, expected)| (found - expected).abs() < 1e-5)
        );
    }
}
