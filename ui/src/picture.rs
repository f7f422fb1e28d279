//! Waveform (SVG) and spectrogram (PNG) of a sound, of a size independent of its length.

use std::io::{self, Write};

use flate2::Compression;
use flate2::Crc;
use flate2::write::ZlibEncoder;
use realfft::RealFftPlanner;

const WIDTH: usize = 800;
const WAVE_HEIGHT: f64 = 120.0;
/// Rows of the spectrogram, from 8 kHz down to 0.
const BANDS: usize = 160;
/// Samples of a window: 32 ms.
const WINDOW: usize = 512;
/// Decibels below the loudest point that are drawn as silence.
const RANGE: f32 = 70.0;

/// The least and the largest sample of each of at most 800 parts.
fn extremes(samples: &[f32]) -> Vec<(f32, f32)> {
    let part = samples.len().div_ceil(WIDTH).max(1);
    let of = |part: &[f32]| {
        let finite = part.iter().copied().filter(|sample| sample.is_finite());
        finite.fold((0.0f32, 0.0f32), |(least, most), sample| {
            (least.min(sample), most.max(sample))
        })
    };
    samples.chunks(part).map(of).collect()
}

/// The waveform as SVG, in a colour that is seen on light and on dark.
pub fn waveform(samples: &[f32]) -> String {
    let extremes = extremes(samples);
    let middle = WAVE_HEIGHT / 2.0;
    let y = |sample: f32| middle - f64::from(sample.clamp(-1.0, 1.0)) * (middle - 2.0);
    let mut path = String::new();
    for (x, (least, most)) in extremes.iter().enumerate() {
        path.push_str(&format!("M{x} {:.1}V{:.1}", y(*most) - 0.5, y(*least) + 0.5));
    }
    let width = extremes.len().max(1);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {WAVE_HEIGHT}\" preserveAspectRatio=\"none\"><path d=\"M0 {middle}H{width}\" stroke=\"#8a94a0\"/><path d=\"{path}\" stroke=\"#4a8fd0\" fill=\"none\"/></svg>"
    )
}

/// The spectrogram as PNG: the logarithm of the power, from the lowest frequency at the bottom.
///
/// # Errors
/// If memory cannot be written to, which does not happen.
pub fn spectrogram(samples: &[f32]) -> io::Result<Vec<u8>> {
    let (width, levels) = levels(samples);
    let loudest = levels.iter().copied().fold(f32::MIN, f32::max);
    let mut pixels = Vec::with_capacity((width + 1) * BANDS);
    for band in (0..BANDS).rev() {
        // Each line begins with its filter: none.
        pixels.push(0);
        pixels.extend((0..width).map(|column| {
            let below = loudest - levels[column * BANDS + band];
            (255.0 * (1.0 - below / RANGE)).clamp(0.0, 255.0) as u8
        }));
    }
    png(width, BANDS, &pixels)
}

/// Decibels of each band, column by column, and how many columns there are.
fn levels(samples: &[f32]) -> (usize, Vec<f32>) {
    let hop = samples.len().div_ceil(WIDTH).max(WINDOW / 4);
    let columns = samples.len().div_ceil(hop).max(1);
    let plan = RealFftPlanner::<f32>::new().plan_fft_forward(WINDOW);
    let (mut input, mut spectrum) = (plan.make_input_vec(), plan.make_output_vec());
    let hann = |place: usize| 0.5 - 0.5 * (std::f32::consts::TAU * place as f32 / WINDOW as f32).cos();
    let window: Vec<f32> = (0..WINDOW).map(hann).collect();
    let mut levels = Vec::with_capacity(columns * BANDS);
    for column in 0..columns {
        for (place, value) in input.iter_mut().enumerate() {
            let sample = samples
                .get(column * hop + place)
                .copied()
                .filter(|sample| sample.is_finite());
            *value = sample.unwrap_or(0.0) * window[place];
        }
        // Fails where a length is wrong, and these are the plan's own.
        let done = plan.process(&mut input, &mut spectrum).is_ok();
        for band in 0..BANDS {
            let bins = band * (WINDOW / 2) / BANDS..((band + 1) * (WINDOW / 2)).div_ceil(BANDS);
            let power = spectrum[bins].iter().map(|bin| bin.norm_sqr()).fold(0.0, f32::max);
            levels.push(if done { 10.0 * (power + 1e-10).log10() } else { 0.0 });
        }
    }
    (columns, levels)
}

/// A PNG of pixels of one byte each, whose lines have their filter before them; the colours run from dark blue to yellow.
fn png(width: usize, height: usize, pixels: &[u8]) -> io::Result<Vec<u8>> {
    let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
    let size = |number: usize| u32::try_from(number).unwrap_or(u32::MAX).to_be_bytes();
    let mut head = [size(width), size(height)].concat();
    // Eight bits, a palette, and the only compression, filter and order there are.
    head.extend_from_slice(&[8, 3, 0, 0, 0]);
    chunk(&mut file, b"IHDR", &head);
    let palette: Vec<u8> = (0..=255u8).flat_map(colour).collect();
    chunk(&mut file, b"PLTE", &palette);
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(pixels)?;
    chunk(&mut file, b"IDAT", &encoder.finish()?);
    chunk(&mut file, b"IEND", &[]);
    Ok(file)
}

fn chunk(file: &mut Vec<u8>, name: &[u8; 4], data: &[u8]) {
    file.extend_from_slice(&u32::try_from(data.len()).unwrap_or(u32::MAX).to_be_bytes());
    file.extend_from_slice(name);
    file.extend_from_slice(data);
    let mut crc = Crc::new();
    crc.update(name);
    crc.update(data);
    file.extend_from_slice(&crc.sum().to_be_bytes());
}

/// Increasing luminance, readable without colour vision.
fn colour(level: u8) -> [u8; 3] {
    const STEPS: [[f32; 3]; 5] = [
        [8.0, 10.0, 34.0],
        [70.0, 24.0, 110.0],
        [172.0, 44.0, 96.0],
        [240.0, 122.0, 42.0],
        [252.0, 246.0, 164.0],
    ];
    let at = f32::from(level) / 255.0 * (STEPS.len() - 1) as f32;
    let below = (at as usize).min(STEPS.len() - 2);
    let part = at - below as f32;
    std::array::from_fn(|channel| (STEPS[below][channel] * (1.0 - part) + STEPS[below + 1][channel] * part) as u8)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn tone(hertz: f32, seconds: f32) -> Vec<f32> {
        let samples = (seconds * 16_000.0) as usize;
        (0..samples)
            .map(|place| 0.5 * (std::f32::consts::TAU * hertz * place as f32 / 16_000.0).sin())
            .collect()
    }

    #[test]
    fn a_tone_is_a_bright_line_at_its_height() {
        for seconds in [0.01, 1.0, 61.0] {
            let (columns, levels) = levels(&tone(2000.0, seconds));
            assert!(columns <= WIDTH);
            let column = &levels[columns / 2 * BANDS..][..BANDS];
            let loudest = (0..BANDS).max_by(|a, b| column[*a].total_cmp(&column[*b])).unwrap();
            assert!((39..=41).contains(&loudest), "{seconds}: {loudest}");
        }
    }

    #[test]
    fn pictures_are_whole_whatever_the_samples_are() {
        for samples in [vec![], vec![f32::NAN; 5], vec![f32::INFINITY, -3.0], tone(440.0, 0.5)] {
            let picture = spectrogram(&samples).unwrap();
            let begin = picture.windows(4).position(|name| name == b"IDAT").unwrap();
            let width = u32::from_be_bytes(picture[16..20].try_into().unwrap()) as usize;
            let mut pixels = Vec::new();
            flate2::read::ZlibDecoder::new(&picture[begin + 4..])
                .read_to_end(&mut pixels)
                .unwrap();
            assert_eq!(pixels.len(), (width + 1) * BANDS);
            assert!(picture.ends_with(b"IEND\xaeB`\x82"));
            let drawn = waveform(&samples);
            assert!(
                drawn.ends_with("</svg>") && !drawn.contains("NaN") && !drawn.contains("inf"),
                "{drawn}"
            );
        }
        assert!(waveform(&tone(440.0, 900.0)).len() < 40_000);
    }
}
