//! Against the kernels for the CPU, in the emulator or on a device.

use crate::lengths::Lengths;
use crate::noise::Noise;
use crate::ops::subsample;
use crate::ops::subsample::halved;
use crate::testing::on_device::{BOUND, random, same};

#[test]
fn subsampling() {
    let mut noise = Noise::new(4);
    for (time, bands, channels) in [(1, 1, 1), (5, 4, 3), (8, 7, 40), (130, 5, 2), (9, 70, 33)] {
        let x = random(&[2, bands, time], &mut noise);
        let (kernel, offset) = (
            random(&[channels, 1, 3, 3], &mut noise),
            random(&[channels], &mut noise),
        );
        let halve = |lengths: &[usize]| Lengths::new(lengths.iter().map(|&n| halved(n)).collect::<Vec<_>>());
        let input_lengths = Lengths::new([time, time / 3]);
        let lengths = halve(&input_lengths);
        same("first convolution", BOUND, |on| {
            let (x, kernel, offset) = (on(&x), on(&kernel), on(&offset));
            Ok(vec![subsample::first(&x, &kernel, &offset, &input_lengths, &lengths)?])
        });
        let y = subsample::first(&x, &kernel, &offset, &input_lengths, &lengths).unwrap();
        let dz = random(y.dims(), &mut noise);
        same("relu, backward", 0.0, |on| {
            Ok(vec![subsample::relu_backward(&on(&y), &on(&dz))?])
        });
        same("first convolution, backward", BOUND, |on| {
            Ok(vec![
                subsample::first_backward(&on(&x), &on(&dz), &input_lengths)?.total()?,
            ])
        });
        let lengths = halve(&lengths);
        same("strided convolution", BOUND, |on| {
            let (y, kernel, offset) = (on(&y), on(&kernel), on(&offset));
            Ok(vec![subsample::depthwise(&y, &kernel, &offset, &lengths)?])
        });
        let z = subsample::depthwise(&y, &kernel, &offset, &lengths).unwrap();
        let dz = random(z.dims(), &mut noise);
        same("strided convolution, backward", BOUND, |on| {
            let (y, kernel, dz) = (on(&y), on(&kernel), on(&dz));
            let sums = subsample::depthwise_backward_weight(&y, &dz)?;
            Ok(vec![subsample::depthwise_backward(&y, &kernel, &dz)?, sums.total()?])
        });
        same("bias and relu", BOUND, |on| {
            let z = on(&z).copy()?;
            subsample::bias_relu(&z, &on(&offset), &lengths)?;
            Ok(vec![z])
        });
    }
}
