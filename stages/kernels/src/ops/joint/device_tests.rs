//! Against the kernels for the CPU, in the emulator or on a device.

use candle_core::{DType, Tensor};

use crate::error::Result;
use crate::noise::{DropMask, Noise};
use crate::ops::joint;
use crate::ops::joint::Cell;
use crate::ops::joint::cuda::CellList;
use crate::testing::on_device::{BOUND, on_device, random, same};
use crate::testing::values;

#[test]
fn joint_hidden_values() {
    let mut noise = Noise::new(7);
    for (count, width, tokens) in [(1, 1, 1), (30, 19, 5), (40, 33, 700)] {
        let (f, g) = (random(&[7, width], &mut noise), random(&[4, width], &mut noise));
        let pick = |noise: &mut Noise, below: usize| (noise.bits() % below as u64) as usize;
        let mut places: Vec<(usize, usize)> = (0..count).map(|_| (pick(&mut noise, 7), pick(&mut noise, 4))).collect();
        places.sort_unstable();
        let cells: Vec<Cell> = places
            .into_iter()
            .enumerate()
            .map(|(index, (frame, state))| Cell {
                frame,
                state,
                label: (index % 3 > 0 && tokens > 1).then(|| pick(&mut noise, tokens - 1)),
                index,
            })
            .collect();
        for mask in [None, DropMask::draw(0.2, &mut noise)] {
            same("hidden", 0.0, |on| {
                Ok(vec![joint::hidden(&on(&f), &on(&g), &cells, mask)?])
            });
            let hidden = joint::hidden(&f, &g, &cells, mask).unwrap();
            let d = random(hidden.dims(), &mut noise);
            same("hidden, backward", BOUND, |on| {
                let (d_f, d_g) = (on(&f).copy()?, on(&g).copy()?);
                joint::add_hidden_gradient(&on(&d), &on(&hidden), &cells, 1.25, &d_f, &d_g)?;
                Ok(vec![d_f, d_g])
            });
            // Of one list in parts; with biases, and from and to bf16, whose values say where the ReLU passes.
            let [of_f, of_g] = [(); 2].map(|()| random(&[width], &mut noise));
            let (shifted_f, shifted_g) = (f.broadcast_add(&of_f).unwrap(), g.broadcast_add(&of_g).unwrap());
            let shifted = joint::hidden(&shifted_f, &shifted_g, &cells, mask).unwrap();
            let (d_f, d_g) = (f.copy().unwrap(), g.copy().unwrap());
            joint::add_hidden_gradient(&d, &shifted, &cells, 1.25, &d_f, &d_g).unwrap();
            for dtype in [DType::F32, DType::BF16] {
                let found = on_device(|on| -> Result<_> {
                    let (d, d_f, d_g) = (on(&d), on(&f).copy()?, on(&g).copy()?);
                    let list = CellList::copied(&cells, d.device())?;
                    let (of_f, of_g) = (on(&of_f), on(&of_g));
                    let biases = [Some(&of_f), Some(&of_g)];
                    let hidden = list.hidden(dtype, (&on(&f), &on(&g)), biases, mask)?;
                    for first in (0..count).step_by(11) {
                        let size = 11.min(count - first);
                        let rows = |x: &Tensor| x.narrow(0, first, size)?.contiguous();
                        let part = list.part(first..first + size)?;
                        part.add_hidden_gradient(&rows(&d)?, &rows(&hidden)?, 1.25, (&d_f, &d_g))?;
                    }
                    assert!(
                        list.part(0..count + 1).is_err()
                            && list.hidden(dtype, (&d.narrow(0, 0, 0)?, &d), biases, None).is_err()
                    );
                    Ok([hidden, d_f, d_g])
                });
                let expected = [shifted.to_dtype(dtype).unwrap(), d_f.clone(), d_g.clone()];
                for (found, expected) in found.unwrap().iter().zip(expected) {
                    assert_eq!(found.dtype(), expected.dtype());
                    assert_eq!(values(found), values(&expected));
                }
            }
        }
    }
}
