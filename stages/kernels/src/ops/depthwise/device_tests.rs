//! Against the kernels for the CPU, in the emulator or on a device.

use crate::lengths::Lengths;
use crate::noise::Noise;
use crate::ops::depthwise;
use crate::ops::elementwise::glu;
use crate::testing::on_device::{BOUND, random, same};

#[test]
fn gates_and_convolutions() {
    let mut noise = Noise::new(3);
    for (time, d, taps) in [(1, 1, 5), (7, 3, 3), (4, 37, 9), (300, 6, 9)] {
        let h = random(&[2, time, 2 * d], &mut noise);
        let dy = random(&[2, time, d], &mut noise);
        let lengths = Lengths::new([time, time / 2]);
        same("glu", BOUND, |on| Ok(vec![glu::glu(&on(&h), &lengths)?]));
        same("glu, backward", BOUND, |on| {
            Ok(vec![glu::glu_backward(&on(&h), &on(&dy), &lengths)?])
        });
        let x = random(&[2, time, d], &mut noise);
        let (kernel, offset) = (random(&[d, 1, taps], &mut noise), random(&[d], &mut noise));
        for offset in [None, Some(&offset)] {
            same("depthwise", BOUND, |on| {
                Ok(vec![depthwise::depthwise(
                    &on(&x),
                    &on(&kernel),
                    offset.map(on).as_ref(),
                )?])
            });
        }
        same("depthwise, backward", BOUND, |on| {
            Ok(vec![
                depthwise::depthwise_backward(&on(&dy), &on(&kernel))?,
                depthwise::depthwise_backward_weight(&on(&x), &on(&dy), taps)?,
            ])
        });
    }
}
