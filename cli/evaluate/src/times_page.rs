//! The page of `flow evaluate times`: how far times of words are off, in all and by recording.

use flow_evaluation::chart::{Histogram, histogram};
use flow_evaluation::document::document;
use flow_evaluation::page::STYLE;
use flow_evaluation::word_times::{Spread, TimeDifferences};
use flow_inspect::table::count;
use maud::{Markup, html};

/// The recordings with the largest differences that the page names.
const MOST_RECORDINGS: usize = 200;
/// Larger differences, in seconds, are counted and not drawn.
const DRAWN: f64 = 0.5;
/// Bars of a histogram.
const BINS: usize = 50;

/// The figures of a recording, or of all.
pub struct TimesRow {
    name: String,
    /// Words of the reference, and those that the hypothesis has, too.
    said: usize,
    both: usize,
    /// Of beginnings and ends; none where the hypothesis has no word of it.
    spreads: Option<[Spread; 2]>,
}

impl TimesRow {
    pub fn new(name: &str, differences: &TimeDifferences) -> Self {
        TimesRow {
            name: name.to_owned(),
            said: differences.words,
            both: differences.compared(),
            spreads: differences.spreads(),
        }
    }

    /// The 95th percentile of the differences of beginnings; above all others where there is none.
    fn most(&self) -> f64 {
        let beginnings = self.spreads.as_ref().map(|[beginnings, _]| beginnings.most);
        beginnings.unwrap_or(f64::INFINITY)
    }

    fn cells(&self) -> Markup {
        html! {
            td { (self.name) }
            td.n { (count(self.said as u64)) }
            td.n { (count(self.both as u64)) }
            @match &self.spreads {
                Some(spreads) => @for text in spreads.iter().flat_map(Spread::texts) { td.n { (text) } },
                None => @for _ in 0..6 { td.n { "-" } },
            }
        }
    }
}

/// What the page shows.
pub struct TimesPage<'a> {
    pub all: TimesRow,
    pub recordings: Vec<TimesRow>,
    /// Of beginnings and of ends, in seconds.
    pub differences: &'a [Vec<f64>; 2],
}

impl TimesPage<'_> {
    pub fn html(mut self) -> String {
        self.recordings.sort_by(|a, b| b.most().total_cmp(&a.most()));
        let left_out = self.recordings.len().saturating_sub(MOST_RECORDINGS);
        let title = "Times of words";
        let main = html! {
            h1 { (title) }
            p.quiet { "Seconds between the times of words and those of the reference, of words that both have. Signed medians above 0 are late." }
            section {
                div.charts {
                    @for (name, differences) in ["Beginnings", "Ends"].iter().zip(self.differences) {
                        (distribution(name, differences))
                    }
                }
            }
            section {
                h2 { "By recording" }
                table {
                    thead {
                        tr {
                            th rowspan="2" { "Recording" }
                            th.n rowspan="2" { "Words" }
                            th.n rowspan="2" { "In both" }
                            th.n colspan="3" { "Beginnings" }
                            th.n colspan="3" { "Ends" }
                        }
                        tr { @for _ in 0..2 { th.n { "Median" } th.n { "95 % within" } th.n { "Signed median" } } }
                    }
                    tbody {
                        tr.total { (self.all.cells()) }
                        @for row in self.recordings.iter().take(MOST_RECORDINGS) { tr { (row.cells()) } }
                    }
                }
                @if left_out > 0 { p.quiet { "The recordings with the largest differences; " (count(left_out as u64)) " others are not shown." } }
            }
        };
        document(title, STYLE, &main, None)
    }
}

fn distribution(name: &str, differences: &[f64]) -> Markup {
    let mut data = Histogram::new([-DRAWN, DRAWN], BINS, 1);
    differences.iter().for_each(|difference| data.add(0, *difference));
    histogram(&format!("{name}, seconds"), &[], &data, &[])
}
