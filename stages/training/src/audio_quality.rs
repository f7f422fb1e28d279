//! The kind `audio.quality`: measures of recordings and texts, to select rows by.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, Float64Array, RecordBatch, StringArray};
use arrow::compute::{cast, filter_record_batch};
use arrow::datatypes::{DataType, Field, Float64Type, Int64Type, Schema, SchemaRef};
use flow_audio::part::decode_row;
use flow_kind::{
    Body, ColumnType, Context, InputPort, Inputs, Kind, Operator, Out, OutputPort, Partition, Port, Progress,
    RejectClass, Shape, StageError,
};
use flow_text::language_tag::split_tag;
use rayon::prelude::*;
use realfft::RealFftPlanner;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::train_tokenizer::{TOKENIZER_COLUMNS, TokenizerInput};

/// Samples a second of decoded recordings.
const RATE: usize = 16_000;
/// Samples of a frame, and from one to the next: 25 and 10 ms.
const FRAME: usize = 400;
const HOP: usize = 160;
/// Length of the Fourier transform.
const FFT: usize = 512;
/// Power below which a frame is silence: -60 dB of full scale.
const SILENCE: f64 = 1e-6;
/// By which factor the power of speech is above that of noise: 6 dB.
const ABOVE_NOISE: f64 = 4.0;
/// Share of the frames, the quietest, whose mean power is that of the noise.
const QUIET: f64 = 0.1;
/// The spectrum ends where its mean is this much below its peak, in powers: 50 dB.
const BELOW_PEAK: f64 = 1e-5;
/// A sample from here on is at full scale.
const FULL_SCALE: f32 = 0.999;
/// The largest ratio that is reported, in dB.
const CLEAN: f64 = 100.0;

/// Measures recordings and texts.
///
/// # What it does
///
/// Adds columns to `rows`, which stay as they are otherwise; rules on them are SQL. `rows` have `audio_path`, `text` and `duration`, and
/// perhaps `start, "offset", size`, as `manifest.read` and `audio.extract` give them. All measures are of the decoded recording, 16 kHz mono, in
/// frames of 25 ms every 10 ms:
///
/// - `snr_db`: 10 log10 of (mean power of frames with speech - noise) / noise, at most 100; noise is the mean power of the quietest
///   tenth of the frames. Null without speech.
/// - `bandwidth_hz`: the highest frequency at which the mean power spectrum is within 50 dB of its peak. A recording that came
///   through a telephone has 4,000 or less. Null without sound.
/// - `clipped_share`: share of the samples at full scale.
/// - `silence_share`: share of the frames below -60 dB of full scale.
/// - `speech_share`: share of the frames that are louder than silence and more than 6 dB above the noise.
/// - `characters_per_second`: characters of the text, without its language tag, by `duration`.
/// - `tokens_per_second`, with an input `tokenizer`.
///
/// A recording that cannot be decoded is the reject `decode_error`.
///
/// # Example
///
/// ```yaml
/// measured:
///   uses: audio.quality
///   from: {rows: rows}
/// kept:
///   uses: sql
///   from: measured
///   with:
///     rejects:
///       - {reason: noisy, when: "coalesce(snr_db, -100.0) < 10"}
///       - {reason: narrow, when: "coalesce(bandwidth_hz, 0.0) < 3500"}
///     query: SELECT * FROM measured
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct QualitySettings {
    /// Seconds of the longest row; longer ones are the reject `decode_error`.
    pub max_duration: f64,
}

impl Default for QualitySettings {
    fn default() -> Self {
        QualitySettings { max_duration: 300.0 }
    }
}

/// The kind `audio.quality`.
pub struct AudioQuality;

/// The measures of a recording.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measures {
    pub snr_db: Option<f64>,
    pub bandwidth_hz: Option<f64>,
    pub clipped_share: f64,
    pub silence_share: f64,
    pub speech_share: f64,
}

impl Measures {
    /// Of 16 kHz mono samples. What is shorter than a frame is one frame.
    pub fn of(signal: &[f32]) -> Measures {
        if signal.is_empty() {
            return Measures::default();
        }
        let clipped = signal.iter().filter(|sample| sample.abs() >= FULL_SCALE).count();
        let starts = (0..=signal.len().saturating_sub(FRAME)).step_by(HOP);
        let frame = |start: usize| &signal[start..signal.len().min(start + FRAME)];
        let power = |start: usize| {
            let frame = frame(start);
            let sum: f64 = frame.iter().map(|sample| f64::from(*sample).powi(2)).sum();
            sum / frame.len() as f64
        };
        let powers: Vec<f64> = starts.clone().map(power).collect();
        let count = powers.len() as f64;
        let mut sorted = powers.clone();
        sorted.sort_by(f64::total_cmp);
        let quiet = ((count * QUIET).ceil() as usize).clamp(1, sorted.len());
        let noise = sorted[..quiet].iter().sum::<f64>() / quiet as f64;
        let speech = |power: &f64| *power > SILENCE && *power > ABOVE_NOISE * noise;
        let loud: Vec<f64> = powers.iter().copied().filter(|power| speech(power)).collect();
        let snr_db = (!loud.is_empty()).then(|| {
            let mean = loud.iter().sum::<f64>() / loud.len() as f64;
            (10.0 * ((mean - noise) / noise.max(f64::MIN_POSITIVE)).log10()).min(CLEAN)
        });
        Measures {
            snr_db,
            bandwidth_hz: bandwidth(starts.map(frame)),
            clipped_share: clipped as f64 / signal.len() as f64,
            silence_share: powers.iter().filter(|power| **power < SILENCE).count() as f64 / count,
            speech_share: loud.len() as f64 / count,
        }
    }
}

/// The highest frequency of the mean power spectrum within 50 dB of its peak, in Hz.
fn bandwidth<'s>(frames: impl Iterator<Item = &'s [f32]>) -> Option<f64> {
    let transform = RealFftPlanner::<f32>::new().plan_fft_forward(FFT);
    let window: Vec<f32> = (0..FRAME)
        .map(|at| 0.5 - 0.5 * (std::f32::consts::TAU * at as f32 / FRAME as f32).cos())
        .collect();
    let mut spectrum = transform.make_output_vec();
    let mut sums = vec![0.0f64; spectrum.len()];
    for frame in frames {
        let mut input = vec![0.0f32; FFT];
        for ((input, sample), window) in input.iter_mut().zip(frame).zip(&window) {
            *input = sample * window;
        }
        // The lengths are those of the plan.
        transform.process(&mut input, &mut spectrum).ok()?;
        for (sum, value) in sums.iter_mut().zip(&spectrum) {
            *sum += f64::from(value.norm_sqr());
        }
    }
    let peak = sums.iter().copied().fold(0.0, f64::max);
    let highest = sums.iter().rposition(|sum| *sum >= peak * BELOW_PEAK)?;
    (peak > 0.0 && peak.is_finite()).then(|| highest as f64 * RATE as f64 / FFT as f64)
}

/// Columns that are added, in their order; the last one only with a tokenizer.
const ADDED: [&str; 7] = [
    "snr_db",
    "bandwidth_hz",
    "clipped_share",
    "silence_share",
    "speech_share",
    "characters_per_second",
    "tokens_per_second",
];

fn added(with_tokens: bool) -> &'static [&'static str] {
    &ADDED[..ADDED.len() - usize::from(!with_tokens)]
}

fn with_columns(schema: &Schema, with_tokens: bool) -> SchemaRef {
    let mut fields = schema.fields().to_vec();
    fields.extend(
        added(with_tokens)
            .iter()
            .map(|name| Arc::new(Field::new(*name, DataType::Float64, true))),
    );
    Arc::new(Schema::new_with_metadata(fields, schema.metadata().clone()))
}

impl Kind for AudioQuality {
    const NAME: &'static str = "audio.quality";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[
        InputPort::streamed("rows", "rows with where their recordings are").columns(&[
            ("audio_path", ColumnType::AnyText),
            ("text", ColumnType::AnyText),
            ("duration", ColumnType::Number),
        ]),
        InputPort::whole("tokenizer", "counts tokens: of a tokenizer.read or a tokenizer.train")
            .optional()
            .columns(TOKENIZER_COLUMNS),
    ];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "the rows with the measures beside them")];
    type Settings = QualitySettings;

    fn shape(settings: &QualitySettings, inputs: &Inputs) -> Result<Shape, StageError> {
        if !(settings.max_duration.is_finite() && settings.max_duration > 0.0) {
            return Err(StageError::setting("max_duration", "it must be a number above 0"));
        }
        let rows = inputs.required("rows")?;
        if let Some(name) = ADDED.iter().find(|name| rows.schema.field_with_name(name).is_ok()) {
            return Err(StageError::input(
                rows.name.clone(),
                format!("`{}` has a column `{name}` already", rows.name),
            )
            .with_help("leave it out or give it another name in SQL"));
        }
        Ok(Shape::local(vec![Port::new(
            "rows",
            with_columns(&rows.schema, inputs.has("tokenizer")),
        )]))
    }

    fn open(settings: &QualitySettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Local(Box::new(Measurer {
            settings: settings.clone(),
            with_tokens: context.input("tokenizer").is_some(),
            context: context.clone(),
            tokenizer: TokenizerInput::default(),
        })))
    }
}

struct Measurer {
    settings: QualitySettings,
    with_tokens: bool,
    context: Context,
    tokenizer: TokenizerInput,
}

impl Operator for Measurer {
    fn batch(&mut self, input: &str, _: &Partition, batch: RecordBatch, out: &mut Out) -> Result<(), StageError> {
        if input == "rows" {
            self.measure(&batch, out)?;
        }
        Ok(())
    }

    fn partition_complete(&mut self, _: &Partition, _: &mut Out) -> Result<Progress, StageError> {
        Ok(Progress::Done)
    }
}

impl Measurer {
    fn measure(&mut self, batch: &RecordBatch, out: &mut Out) -> Result<(), StageError> {
        let as_type = |name: &str, data_type: &DataType| -> Result<Option<ArrayRef>, StageError> {
            batch
                .column_by_name(name)
                .map(|column| Ok(cast(column, data_type)?))
                .transpose()
        };
        let needed = |column: Option<ArrayRef>| column.ok_or_else(|| StageError::failed("a column is missing"));
        let paths = needed(as_type("audio_path", &DataType::Utf8)?)?;
        let texts = needed(as_type("text", &DataType::Utf8)?)?;
        let durations = needed(as_type("duration", &DataType::Float64)?)?;
        let (paths, texts): (&StringArray, &StringArray) = (paths.as_string(), texts.as_string());
        let durations: &Float64Array = durations.as_primitive::<Float64Type>();
        let starts = as_type("start", &DataType::Float64)?;
        let (offsets, sizes) = (as_type("offset", &DataType::Int64)?, as_type("size", &DataType::Int64)?);
        let number = |column: &Option<ArrayRef>, row: usize| {
            let column = column.as_ref()?.as_primitive::<Int64Type>();
            column.is_valid(row).then(|| column.value(row).unsigned_abs())
        };
        let start = |row: usize| {
            let column = starts.as_ref().map(|column| column.as_primitive::<Float64Type>());
            column
                .filter(|column| column.is_valid(row))
                .map_or(0.0, |column| column.value(row))
        };
        let most = self.settings.max_duration;
        let measured: Vec<Result<Measures, String>> = (0..batch.num_rows())
            .into_par_iter()
            .map(|row| {
                if paths.is_null(row) || durations.is_null(row) {
                    return Err("the row does not say where its recording is, or how long".into());
                }
                let range = number(&offsets, row).zip(number(&sizes, row));
                let signal = decode_row(
                    &self.context.storage,
                    Path::new(paths.value(row)),
                    range,
                    start(row),
                    durations.value(row),
                    most,
                );
                signal
                    .map(|signal| Measures::of(&signal))
                    .map_err(|error| error.to_string())
            })
            .collect();
        let mut stays = vec![true; batch.num_rows()];
        for (row, measures) in measured.iter().enumerate() {
            if let Err(why) = measures {
                stays[row] = false;
                out.reject_rows(batch, &[row], "decode_error", RejectClass::Fault, why)?;
            }
        }
        let of = |measure: &dyn Fn(&Measures) -> Option<f64>| -> ArrayRef {
            let values = measured.iter().map(|found| found.as_ref().ok().and_then(measure));
            Arc::new(values.collect::<Float64Array>())
        };
        let words = |row: usize| split_tag(if texts.is_null(row) { "" } else { texts.value(row) }).1;
        let by_second = |count: usize, row: usize| {
            let seconds = durations.value(row);
            (durations.is_valid(row) && seconds > 0.0).then(|| count as f64 / seconds)
        };
        let rows = 0..batch.num_rows();
        let characters: Float64Array = rows
            .clone()
            .map(|row| by_second(words(row).trim().chars().count(), row))
            .collect();
        let mut columns = batch.columns().to_vec();
        columns.extend([
            of(&|found| found.snr_db),
            of(&|found| found.bandwidth_hz),
            of(&|found| Some(found.clipped_share)),
            of(&|found| Some(found.silence_share)),
            of(&|found| Some(found.speech_share)),
            Arc::new(characters),
        ]);
        if self.with_tokens {
            let tokenizer = self.tokenizer.get(&self.context)?;
            let tokens: Float64Array = rows
                .map(|row| by_second(tokenizer.encode(words(row)).len(), row))
                .collect();
            columns.push(Arc::new(tokens));
        }
        let all = RecordBatch::try_new(with_columns(&batch.schema(), self.with_tokens), columns)?;
        out.send(0, filter_record_batch(&all, &stays.into())?);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tone of this frequency and amplitude, `seconds` long.
    fn tone(frequency: f32, amplitude: f32, seconds: f32) -> Vec<f32> {
        let samples = (seconds * RATE as f32) as usize;
        let sample = |at: usize| amplitude * (std::f32::consts::TAU * frequency * at as f32 / RATE as f32).sin();
        (0..samples).map(sample).collect()
    }

    #[test]
    fn measures_are_those_of_signals_that_are_made() {
        // Half a second of a tone beside noise of 1 % of its amplitude: 40 dB.
        let noise = tone(500.0, 0.005, 0.5);
        let speech: Vec<f32> = tone(3000.0, 0.5, 0.5);
        let found = Measures::of(&[noise, speech].concat());
        assert!((found.snr_db.unwrap() - 40.0).abs() < 0.5, "{found:?}");
        assert!((found.speech_share - 0.5).abs() < 0.03, "{found:?}");
        assert_eq!((found.clipped_share, found.silence_share), (0.0, 0.0));

        // The window spreads a tone by some bins.
        let bandwidth = Measures::of(&tone(3000.0, 0.5, 1.0)).bandwidth_hz.unwrap();
        assert!((3000.0..3300.0).contains(&bandwidth), "{bandwidth}");

        // Half of it nothing at all; and a tone that is cut at full scale.
        let with_silence = [vec![0.0; RATE / 2], tone(200.0, 0.3, 0.5)].concat();
        let found = Measures::of(&with_silence);
        assert_eq!(found.snr_db, Some(CLEAN));
        assert!((found.silence_share - 0.5).abs() < 0.03, "{found:?}");
        let clipped: Vec<f32> = tone(200.0, 2.0, 0.5)
            .into_iter()
            .map(|sample| sample.clamp(-1.0, 1.0))
            .collect();
        // |sin| >= 0.5 for two thirds of the time.
        assert!((Measures::of(&clipped).clipped_share - 2.0 / 3.0).abs() < 0.02);
    }

    #[test]
    fn signals_without_anything_have_no_ratio() {
        for signal in [vec![], vec![0.0], vec![0.0; 100], vec![0.0; RATE]] {
            let found = Measures::of(&signal);
            assert_eq!(
                (found.snr_db, found.bandwidth_hz, found.speech_share),
                (None, None, 0.0)
            );
        }
        let found = Measures::of(&[f32::NAN; 800]);
        assert_eq!((found.snr_db, found.bandwidth_hz), (None, None));
    }
}
