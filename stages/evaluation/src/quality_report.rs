//! The kind `audio.quality_report`: a page of the distributions of numeric columns, such as those of `audio.quality`.

use std::collections::BTreeMap;
use std::path::PathBuf;

use arrow::array::AsArray;
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float64Type, Schema};
use flow_kind::{
    Artifact, Body, Context, Export, ExportSet, InputPort, Inputs, Kind, OutputPort, Shape, StageError, UrlUse,
};
use maud::{Markup, html};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::chart::{Histogram, count, figure, histogram};
use crate::document::document;
use crate::error::EvaluationError;
use crate::page::STYLE;

/// Names of the page, of the same figures for programs, and of the list of both.
const PAGE: &str = "quality.html";
const FIGURES: &str = "quality.json";
const SET: &str = "quality.flow.json";
/// Bars of a histogram.
const BINS: usize = 48;
/// Shares of the values below and above what is drawn.
const TAILS: [f64; 2] = [0.005, 0.995];
/// The largest numbers that are drawn: ranges between them are finite.
const DRAWN: f64 = 1e300;
/// Columns at most: each needs 16 MiB.
const MOST_COLUMNS: usize = 32;
/// What is drawn where nothing else is asked for, and how a page calls it.
const KNOWN: [(&str, &str); 8] = [
    ("snr_db", "Signal-to-noise ratio in dB"),
    ("bandwidth_hz", "Bandwidth in Hz"),
    ("clipped_share", "Share of clipped samples"),
    ("silence_share", "Share of silence"),
    ("speech_share", "Share of speech"),
    ("characters_per_second", "Characters a second"),
    ("tokens_per_second", "Tokens a second"),
    ("alignment_score", "Alignment score"),
];

/// Draws the distributions of measures of rows.
///
/// # What it does
///
/// `quality.html` in `out` has a histogram of each column, its minimum, median, maximum, and 5th and 95th percentile. It is part of the report of the run, too.
/// With an input `kept`, the rows that rules left, each histogram shows both. `limits` are drawn as lines, with the number
/// of rows beyond them; they are not applied. Percentiles are exact to 0.1 %. The 0.5 % of the values at each end
/// are not drawn unless a limit is there, and are counted beside the histogram. `quality.json` has the same figures.
///
/// Rows are read twice and none is kept, so that memory does not depend on their number.
///
/// # Example
///
/// ```yaml
/// distributions:
///   uses: audio.quality_report
///   from: {rows: measured, kept: kept}
///   with: {out: work/quality, limits: {snr_db: {min: 10}, characters_per_second: {min: 3, max: 25}}}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct QualityReportSettings {
    /// Folder that receives the page; may be in object storage (`s3://bucket/folder`, see docs/storage.md).
    pub out: String,
    /// Columns to draw; empty: those of `audio.quality` and the `alignment_score` of `transcription.align` that `rows` has.
    #[serde(default)]
    pub columns: Vec<String>,
    /// Limits of the rules that are applied, by column.
    #[serde(default)]
    pub limits: BTreeMap<String, Limits>,
}

/// The values that a rule keeps, both ends inclusive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Limits {
    /// The lowest value.
    pub min: Option<f64>,
    /// The highest value.
    pub max: Option<f64>,
}

impl Limits {
    fn both(&self) -> impl Iterator<Item = f64> {
        [self.min, self.max].into_iter().flatten()
    }

    fn keeps(&self, value: f64) -> bool {
        self.min.is_none_or(|min| value >= min) && self.max.is_none_or(|max| value <= max)
    }
}

/// The kind `audio.quality_report`.
pub struct QualityReport;

impl QualityReportSettings {
    /// The columns that are drawn.
    fn drawn(&self, schema: &Schema) -> Result<Vec<String>, StageError> {
        let is_number = |name: &str| {
            let field = schema.field_with_name(name).ok()?;
            Some(field.data_type().is_numeric())
        };
        if let Some(name) = self.columns.iter().find(|name| is_number(name) != Some(true)) {
            return Err(StageError::setting(
                "columns",
                format!("`rows` has no column of numbers `{name}`"),
            ));
        }
        let known = || KNOWN.iter().map(|(name, _)| (*name).to_owned());
        let drawn: Vec<String> = match self.columns.is_empty() {
            true => known().filter(|name| is_number(name) == Some(true)).collect(),
            false => self.columns.clone(),
        };
        if drawn.is_empty() || drawn.len() > MOST_COLUMNS {
            let names: Vec<String> = known().collect();
            let why = format!(
                "name 1 to {MOST_COLUMNS} columns of numbers; without names they are {}",
                names.join(", ")
            );
            return Err(StageError::setting("columns", why));
        }
        if let Some(name) = self.limits.keys().find(|name| !drawn.contains(name)) {
            return Err(StageError::setting(
                "limits",
                format!("`{name}` is not among the columns that are drawn"),
            ));
        }
        if let Some((name, _)) = self
            .limits
            .iter()
            .find(|(_, limits)| !limits.both().all(f64::is_finite))
        {
            return Err(StageError::setting(
                "limits",
                format!("the limits of `{name}` are not finite"),
            ));
        }
        Ok(drawn)
    }
}

impl Kind for QualityReport {
    const NAME: &'static str = "audio.quality_report";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[
        InputPort::whole("rows", "the rows that are measured, before rules"),
        InputPort::whole("kept", "the rows that rules left, with the same columns").optional(),
    ];
    const OUTPUTS: &'static [OutputPort] = &[];
    const URL_SETTINGS: &'static [(&'static str, UrlUse)] = &[("out", UrlUse::Write)];
    type Settings = QualityReportSettings;

    fn shape(settings: &QualityReportSettings, inputs: &Inputs) -> Result<Shape, StageError> {
        if settings.out.trim().is_empty() {
            return Err(StageError::setting("out", "name a folder for the page"));
        }
        let drawn = settings.drawn(&inputs.required("rows")?.schema)?;
        for kept in inputs.of("kept") {
            let lacks = |name: &&String| {
                let field = kept.schema.field_with_name(name);
                !field.is_ok_and(|field| field.data_type().is_numeric())
            };
            if let Some(name) = drawn.iter().find(lacks) {
                let why = format!("`{}` has no column of numbers `{name}`", kept.name);
                return Err(StageError::input(kept.name.clone(), why));
            }
        }
        Ok(Shape::export())
    }

    fn open(settings: &QualityReportSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Export(Box::new(QualityPage {
            settings: settings.clone(),
            context: context.clone(),
        })))
    }

    fn identity(settings: &QualityReportSettings) -> Value {
        json!({ "columns": settings.columns, "limits": settings.limits })
    }
}

struct QualityPage {
    settings: QualityReportSettings,
    context: Context,
}

impl Export for QualityPage {
    fn folder(&self) -> PathBuf {
        PathBuf::from(&self.settings.out)
    }

    fn manifest(&self) -> String {
        SET.into()
    }

    fn write(&mut self, set: &mut ExportSet) -> Result<(), StageError> {
        let (rows, kept) = (self.context.required("rows")?, self.context.input("kept"));
        let columns = self.settings.drawn(rows.schema())?;
        let mut sketches: Vec<Sketch> = columns.iter().map(|_| Sketch::new()).collect();
        each_value(rows, &columns, |column, value| sketches[column].add(value))?;
        let limits = |name: &String| self.settings.limits.get(name).copied().unwrap_or_default();
        let mut found: Vec<Distribution> = columns
            .iter()
            .zip(sketches)
            .map(|(name, sketch)| Distribution::of(name, &sketch, limits(name), kept.is_some()))
            .collect();
        each_value(rows, &columns, |column, value| found[column].add(0, value))?;
        if let Some(kept) = kept {
            each_value(kept, &columns, |column, value| found[column].add(1, value))?;
        }
        let totals = (rows.rows(), kept.map(Artifact::rows));
        let page = document("Quality of rows", STYLE, &page(&found, totals), None);
        let figures = serde_json::to_vec_pretty(&json!({
            "rows": totals.0,
            "kept": totals.1,
            "columns": found.iter().map(Distribution::as_json).collect::<Vec<_>>(),
        }));
        for (name, bytes) in [
            (PAGE, page.into_bytes()),
            (FIGURES, figures.map_err(StageError::failed)?),
        ] {
            let path = set.file(name).map_err(StageError::failed)?;
            std::fs::write(&path, bytes).map_err(EvaluationError::file(&path))?;
        }
        Ok(())
    }
}

/// Gives each value of each column; none where it is null or not finite.
fn each_value(rows: &Artifact, columns: &[String], mut take: impl FnMut(usize, Option<f64>)) -> Result<(), StageError> {
    let wanted: Vec<&str> = columns.iter().map(String::as_str).collect();
    for item in rows.batches(Some(&wanted)) {
        let (_, batch) = item?;
        for (at, name) in columns.iter().enumerate() {
            let column = batch.column_by_name(name);
            let column = column.ok_or_else(|| StageError::failed(format!("column `{name}` is missing")))?;
            let column = cast(column, &DataType::Float64)?;
            for value in column.as_primitive::<Float64Type>() {
                take(at, value.filter(|value| value.is_finite()));
            }
        }
    }
    Ok(())
}

/// Bits of a number that a [`Sketch`] tells apart: its sign, its exponent, and 9 of its mantissa, so that two numbers of
/// a cell differ by at most 0.2 %.
const SKETCH_BITS: u32 = 21;

/// How many values there are in each of a fixed number of cells, which get finer towards 0.
struct Sketch {
    cells: Vec<u64>,
    values: u64,
    missing: u64,
    ends: Option<[f64; 2]>,
}

impl Sketch {
    fn new() -> Sketch {
        Sketch {
            cells: vec![0; 1 << SKETCH_BITS],
            values: 0,
            missing: 0,
            ends: None,
        }
    }

    fn add(&mut self, value: Option<f64>) {
        let Some(value) = value else {
            self.missing += 1;
            return;
        };
        self.cells[cell_of(value)] += 1;
        self.values += 1;
        let [low, high] = self.ends.unwrap_or([value, value]);
        self.ends = Some([low.min(value), high.max(value)]);
    }

    /// The value below which this share of the values is.
    fn quantile(&self, share: f64) -> Option<f64> {
        let [low, high] = self.ends?;
        let rank = (share * (self.values - 1) as f64).round() as u64;
        let mut before = 0;
        for (cell, values) in self.cells.iter().enumerate() {
            before += values;
            if before > rank {
                return Some(middle_of(cell).clamp(low, high));
            }
        }
        Some(high)
    }
}

/// Cells are in the order of numbers.
fn cell_of(value: f64) -> usize {
    // Both zeros are one.
    let bits = (value + 0.0).to_bits();
    let ordered = if bits >> 63 == 1 { !bits } else { bits | 1 << 63 };
    (ordered >> (64 - SKETCH_BITS)) as usize
}

fn middle_of(cell: usize) -> f64 {
    let ordered = ((cell as u64) << (64 - SKETCH_BITS)) | 1 << (63 - SKETCH_BITS);
    if cell == cell_of(0.0) {
        return 0.0;
    }
    let bits = if ordered >> 63 == 1 {
        ordered & !(1 << 63)
    } else {
        !ordered
    };
    f64::from_bits(bits)
}

/// What is told of a column.
struct Distribution {
    name: String,
    limits: Limits,
    missing: u64,
    values: u64,
    /// Minimum, 5th percentile, median, 95th percentile, maximum.
    at: Option<[f64; 5]>,
    histogram: Histogram,
    /// Values of all rows that no rule with these limits keeps.
    beyond: u64,
}

impl Distribution {
    fn of(name: &str, sketch: &Sketch, limits: Limits, with_kept: bool) -> Distribution {
        let quantile = |share| sketch.quantile(share);
        let at = sketch
            .ends
            .and_then(|[low, high]| Some([low, quantile(0.05)?, quantile(0.5)?, quantile(0.95)?, high]));
        let [low, high] = sketch.ends.unwrap_or_default();
        let drawn = TAILS.map(|share| quantile(share).unwrap_or(0.0).clamp(-DRAWN, DRAWN));
        // A limit among the values is drawn, if the others stay visible.
        let width = drawn[1] - drawn[0];
        let near = limits
            .both()
            .filter(|limit| (low..=high).contains(limit) && *limit >= drawn[0] - width && *limit <= drawn[1] + width);
        let drawn = near.fold(drawn, |[from, to], limit| [from.min(limit), to.max(limit)]);
        Distribution {
            name: name.to_owned(),
            limits,
            missing: sketch.missing,
            values: sketch.values,
            at,
            histogram: Histogram::new(drawn, BINS, 1 + usize::from(with_kept)),
            beyond: 0,
        }
    }

    fn add(&mut self, series: usize, value: Option<f64>) {
        let Some(value) = value else { return };
        self.histogram.add(series, value);
        if series == 0 && !self.limits.keeps(value) {
            self.beyond += 1;
        }
    }

    fn title(&self) -> &str {
        let known = KNOWN.iter().find(|(name, _)| *name == self.name);
        known.map_or(&self.name, |(_, title)| title)
    }

    fn as_json(&self) -> Value {
        let [min, p5, median, p95, max] = match self.at {
            Some(at) => at.map(|value| json!(value)),
            None => Default::default(),
        };
        let Histogram {
            from,
            width,
            counts,
            outside,
        } = &self.histogram;
        json!({
            "column": self.name, "values": self.values, "missing": self.missing,
            "min": min, "p5": p5, "median": median, "p95": p95, "max": max,
            "limits": self.limits, "beyond_limits": self.beyond,
            "histogram": {
                "from": from, "width": width, "rows": counts[0], "kept": counts.get(1),
                "below": outside[0][0], "above": outside[0][1],
            },
        })
    }
}

fn page(found: &[Distribution], (rows, kept): (u64, Option<u64>)) -> Markup {
    html! { section {
        h2 { "Quality of rows" }
        p.quiet { (count(rows)) " rows" @if let Some(kept) = kept { ", of which " (count(kept)) " were kept" } "." }
        div.charts { @for one in found {
            @let lines: Vec<f64> = one.limits.both().collect();
            (histogram(one.title(), &["all rows", "kept"], &one.histogram, &lines))
        } }
        table {
            thead { tr {
                th { "Column" } th.n { "Minimum" } th.n { "5 %" } th.n { "Median" } th.n { "95 %" } th.n { "Maximum" }
                th.n { "Limits" } th.n { "Rows beyond" } th.n { "Without value" }
            } }
            tbody { @for one in found { tr {
                td { code { (one.name) } }
                @match one.at {
                    Some(at) => { @for value in at { td.n { (figure(value)) } } }
                    None => { @for _ in 0..5 { td.n { "–" } } }
                }
                td.n { (limits(&one.limits)) }
                td.n { @if one.limits == Limits::default() { "–" } @else { (count(one.beyond)) } }
                td.n { (count(one.missing)) }
            } } }
        }
    } }
}

fn limits(limits: &Limits) -> String {
    match (limits.min, limits.max) {
        (None, None) => "–".into(),
        (Some(min), None) => format!("≥ {}", figure(min)),
        (None, Some(max)) => format!("≤ {}", figure(max)),
        (Some(min), Some(max)) => format!("{} to {}", figure(min), figure(max)),
    }
}

#[cfg(test)]
#[path = "quality_report_tests.rs"]
mod tests;
