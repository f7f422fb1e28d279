//! Times of launches, beside what the card reaches at best.

use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use flow_kernels::cublaslt;
use flow_kernels::device::{Moment, name};
use flow_kernels::elementwise::add_in_place;
use flow_kernels::product::product_in;
use flow_kernels::timings::{Timing, timed};

use super::{Outcome, Training, clips, full_training, shape};
use crate::full_size;

/// Steps that are timed.
const STEPS: usize = 3;
/// Rows of a table.
const ROWS: usize = 48;
/// How many of cuBLASLt's choices are tried.
const CHOICES: usize = 8;

/// What a card reaches: bytes a second of a copy, floating-point operations a second in bf16.
pub struct Ceilings {
    copy: f64,
    product: f64,
}

/// Measures [`Ceilings`], and prints them with the cost of a launch.
pub fn ceilings(device: &Device) -> Outcome<Ceilings> {
    let is_cpu = device.is_cpu();
    let best = |work: &dyn Fn() -> Outcome<()>| -> Outcome<f64> {
        let mut best = f64::INFINITY;
        for _ in 0..5 {
            let begun = Moment::of(device)?;
            work()?;
            best = best.min(Moment::of(device)?.since(&begun)?);
        }
        Ok(best)
    };
    let bytes = if is_cpu { 1 << 24 } else { 1 << 31 };
    let large = Tensor::zeros(bytes / 4, DType::F32, device)?;
    let copy = 2.0 * bytes as f64 / best(&|| large.copy().map(|_| ()).map_err(Into::into))?;
    let cached = Tensor::zeros(4 << 20, DType::F32, device)?;
    let repeats = 16;
    let from_cache = 2.0 * f64::from(repeats * (16 << 20))
        / best(&|| {
            for _ in 0..repeats {
                cached.copy()?;
            }
            Ok(())
        })?;
    let (side, dtype) = if is_cpu { (256, DType::F32) } else { (8192, DType::BF16) };
    let square = Tensor::zeros((side, side), dtype, device)?;
    let product = 2.0 * (side as f64).powi(3)
        / best(&|| product_in(DType::F32, &square, &square).map(|_| ()).map_err(Into::into))?;
    let one = [0; 2].map(|_| Tensor::zeros(1, DType::F32, device));
    let [one, other] = one;
    let (one, other) = (one?, other?);
    let launches = 1000;
    let launch = best(&|| {
        for _ in 0..launches {
            add_in_place(&one, &other)?;
        }
        Ok(())
    })? / f64::from(launches);
    println!("| {} | |\n| --- | --- |", name(device).unwrap_or("CPU".into()));
    println!(
        "| copy of {:.1} GB, read and written | {:.0} GB/s |",
        bytes as f64 / 1e9,
        copy / 1e9
    );
    println!("| copy of 16 MiB, read and written | {:.0} GB/s |", from_cache / 1e9);
    println!(
        "| product of {side} x {side} in {} | {:.0} TFLOP/s |",
        dtype.as_str(),
        product / 1e12
    );
    println!("| a launch behind another | {:.2} us |\n", launch * 1e6);
    Ok(Ceilings { copy, product })
}

/// The launches of some steps, after as many others.
fn steps(training: &mut Training, device: &Device, text: &str) -> Outcome<(Vec<Timing>, f64)> {
    let (sizes, before) = text.split_once('@').unwrap_or((text, "3"));
    let batch = clips(shape(sizes)?, full_size()?.vocab_size, 2);
    for _ in 0..before.parse::<usize>()? {
        training.step(&batch, |_| {})?;
    }
    let begun = Moment::of(device)?;
    let (outcome, timings) = timed(|| (0..STEPS).try_for_each(|_| training.step(&batch, |_| {}).map(|_| ())))?;
    outcome?;
    Ok((timings, Moment::of(device)?.since(&begun)? / STEPS as f64))
}

pub fn kernels(device: &Device, shapes: &[&str]) -> Outcome<()> {
    let ceilings = ceilings(device)?;
    let mut training = full_training(device)?;
    for text in shapes {
        let (timings, step) = steps(&mut training, device, text)?;
        println!(
            "| {text} | launches | ms | us each | GB/s | of a copy | TFLOP/s | of a product |\n| --- | --- | --- | --- | --- | --- | --- | --- |"
        );
        let all: f64 = timings.iter().map(|timing| timing.seconds).sum::<f64>() / STEPS as f64;
        println!("| step, with events | | {:.2} | | | | | |", step * 1e3);
        println!(
            "| all launches | {} | {:.2} | | | | | |",
            timings.iter().map(|timing| timing.launches).sum::<usize>() / STEPS,
            all * 1e3
        );
        for timing in timings.iter().take(ROWS) {
            let (rate, flops) = (
                timing.bytes as f64 / timing.seconds,
                timing.flops as f64 / timing.seconds,
            );
            let products = match timing.flops {
                0 => "| |".into(),
                _ => format!("{:.0} | {:.0} % |", flops / 1e12, 100.0 * flops / ceilings.product),
            };
            println!(
                "| {} | {:.1} | {:.3} | {:.1} | {:.0} | {:.0} % | {products}",
                timing.name,
                timing.launches as f64 / STEPS as f64,
                timing.seconds * 1e3 / STEPS as f64,
                timing.seconds * 1e6 / timing.launches as f64,
                rate / 1e9,
                100.0 * rate / ceilings.copy,
            );
        }
        println!();
    }
    Ok(())
}

pub fn products(device: &Device, shapes: &[&str]) -> Outcome<()> {
    cublaslt::check()?;
    let mut training = full_training(device)?;
    for text in shapes {
        // Microseconds of each product by choice.
        let mut found: BTreeMap<String, (usize, [f64; CHOICES])> = BTreeMap::new();
        for choice in 0..CHOICES {
            cublaslt::set_choice(Some(choice));
            let (timings, _) = steps(&mut training, device, text)?;
            for timing in timings.into_iter().filter(|timing| timing.flops > 0) {
                let (launches, times) = found
                    .entry(timing.name)
                    .or_insert((timing.launches / STEPS, [f64::NAN; CHOICES]));
                times[choice] = timing.seconds * 1e6 / (*launches * STEPS).max(1) as f64;
            }
        }
        cublaslt::set_choice(None);
        println!(
            "| product, {text} | launches | us | best us | choice | ms lost |\n| --- | --- | --- | --- | --- | --- |"
        );
        let mut rows: Vec<_> = found
            .into_iter()
            .filter_map(|(name, (launches, times))| {
                let best = (0..CHOICES)
                    .filter(|&at| times[at].is_finite())
                    .min_by(|&a, &b| times[a].total_cmp(&times[b]))?;
                Some((
                    launches as f64 * (times[0] - times[best]) / 1e3,
                    name,
                    launches,
                    times,
                    best,
                ))
            })
            .collect();
        rows.sort_by(|a, b| b.0.total_cmp(&a.0));
        let lost: f64 = rows.iter().map(|row| row.0).filter(|lost| lost.is_finite()).sum();
        println!("| all | | | | | {lost:.2} |");
        for (lost, name, launches, times, best) in rows.into_iter().take(ROWS) {
            println!(
                "| {name} | {launches} | {:.1} | {:.1} | {best} | {lost:.3} |",
                times[0], times[best]
            );
        }
        println!();
    }
    Ok(())
}
