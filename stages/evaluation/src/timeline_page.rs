//! The page of `flow evaluate diarization`: one HTML file with the timelines of recordings, without other files but the
//! recordings themselves. It works without scripts; its script plays a recording from the clicked position.

use maud::{Markup, html};

use crate::document::document;
use crate::timeline::{Lane, RecordingTimeline, lanes};

const TITLE: &str = "Who speaks when";
/// Recordings that have a timeline; the table has them all.
pub const TIMELINES: usize = 100;
/// Boxes of all timelines, and the fewest and most that a lane has.
const BOXES: usize = 60_000;
const LANE_BOXES: (usize, usize) = (150, 4000);
/// Pixels: of a second at most, of a timeline at most, of a row, and between lanes.
const SECOND: f64 = 14.0;
const WIDTH: f64 = 30_000.0;
const ROW: f64 = 18.0;
const GAP: f64 = 12.0;
/// Number of colours of speakers; they repeat for more.
const COLOURS: usize = 10;

/// What the page shows.
#[derive(Clone, Debug, Default)]
pub struct TimelinePage {
    /// Measures over all recordings: names and values.
    pub all: Vec<(String, String)>,
    /// The timelines of the first of these are drawn.
    pub recordings: Vec<RecordingTimeline>,
}

pub fn page(data: &TimelinePage) -> String {
    let drawn = &data.recordings[..data.recordings.len().min(TIMELINES)];
    let limit = (BOXES / (3 * drawn.len().max(1))).clamp(LANE_BOXES.0, LANE_BOXES.1);
    let plays = drawn.iter().any(|recording| recording.audio.is_some());
    let main = html! {
        h1 { (TITLE) }
        (table(data))
        p.quiet {
            "The reference is above the hypothesis. Speakers who are mapped to each other have the same colour. "
            "Errors are speech that was missed, false alarms, and speech of a wrong speaker. Times and words show where the pointer rests. "
            @if plays { "A click plays the recording from there." }
        }
        @for recording in drawn { (timeline(recording, limit)) }
        @if data.recordings.len() > drawn.len() {
            p.quiet { "The timelines of " (data.recordings.len() - drawn.len()) " more recordings are not drawn." }
        }
    };
    document(TITLE, STYLE, &main, plays.then_some(SCRIPT))
}

fn table(data: &TimelinePage) -> Markup {
    html! {
        div.wide {
            table {
                thead { tr { th { "Recording" } @for (name, _) in &data.all { th.n { (name) } } } }
                tbody {
                    @for recording in &data.recordings {
                        tr { td { (recording.name) } @for (_, value) in &recording.figures { td.n { (value) } } }
                    }
                    tr.total { td { "all" } @for (_, value) in &data.all { td.n { (value) } } }
                }
            }
        }
    }
}

/// Maps times to positions on a timeline.
struct Scale {
    from: f64,
    /// Pixels of a second.
    second: f64,
    width: f64,
}

impl Scale {
    fn of(lanes: &[Lane]) -> Self {
        let boxes = || lanes.iter().flat_map(|lane| &lane.boxes);
        let from = boxes().map(|b| b.start).fold(f64::INFINITY, f64::min);
        let to = boxes().map(|b| b.end).fold(f64::NEG_INFINITY, f64::max);
        // Nothing to draw: a second of nothing.
        let (from, span) = match from.is_finite() && to.is_finite() {
            true => (from.floor(), (to - from.floor()).max(1.0)),
            false => (0.0, 1.0),
        };
        let second = (WIDTH / span).min(SECOND);
        Self {
            from,
            second,
            width: (span * second).ceil() + 60.0,
        }
    }

    fn x(&self, time: f64) -> f64 {
        (time - self.from) * self.second
    }

    /// Times with a mark: round numbers, 90 pixels apart or more.
    fn ticks(&self) -> Vec<f64> {
        let steps = [
            1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0,
        ];
        let wide = |step: &f64| step * self.second >= 90.0;
        let step = steps.into_iter().find(wide).unwrap_or((90.0 / self.second).ceil());
        let first = (self.from / step).ceil() as u64;
        let last = (self.width / self.second / step) as u64;
        (first..=first + last)
            .map(|tick| tick as f64 * step)
            .filter(|tick| self.x(*tick) < self.width - 40.0)
            .collect()
    }
}

fn timeline(recording: &RecordingTimeline, limit: usize) -> Markup {
    let lanes = lanes(recording, limit);
    let scale = Scale::of(&lanes);
    let mut top = 26.0;
    let tops: Vec<f64> = lanes
        .iter()
        .map(|lane| {
            let here = top;
            top += ROW * lane.rows.len().max(1) as f64 + GAP;
            here
        })
        .collect();
    let width = format!("{:.0}", scale.width);
    let height = format!("{top:.0}");
    html! {
        section {
            h2 { (recording.name) }
            p.figures { @for (name, value) in &recording.figures { span { (name) " " b { (value) } } } }
            @if let Some(audio) = &recording.audio { audio controls preload="none" src=(audio) {} }
            div.timeline {
                svg.labels width="290" height=(height) aria-hidden="true" {
                    @for ((lane, top), (title, palette)) in lanes.iter().zip(&tops).zip(LANES) {
                        text.lane x="0" y=(at(top + 13.0)) { (title) }
                        @for (row, place) in lane.rows.iter().zip(0..) {
                            @let y = top + ROW * f64::from(place);
                            rect class=(class(palette, row.colour)) x="82" y=(at(y + 4.0)) width="9" height="9" {}
                            text x="96" y=(at(y + 13.0)) { (short(&row.label)) title { (row.label) } }
                        }
                    }
                }
                div.scroll {
                    svg width=(width) height=(height) role="img" data-from=(scale.from) data-second=(scale.second) {
                        @for tick in scale.ticks() {
                            line.tick x1=(at(scale.x(tick))) x2=(at(scale.x(tick))) y1="18" y2=(height) {}
                            text x=(at(scale.x(tick) + 3.0)) y="12" { (clock(tick, 0)) }
                        }
                        @for ((lane, top), (_, palette)) in lanes.iter().zip(&tops).zip(LANES) {
                            @for b in &lane.boxes {
                                rect class=(class(palette, b.colour)) x=(at(scale.x(b.start))) y=(at(top + ROW * b.row as f64 + 1.0))
                                    width=(at(((b.end - b.start) * scale.second).max(1.0))) height=(at(ROW - 3.0)) {
                                    title {
                                        (b.who) ", " (clock(b.start, 2)) "–" (clock(b.end, 2))
                                        @if b.count > 1 { " (" (b.count) " together)" }
                                        @if !b.text.is_empty() { ": " (b.text) @if b.count > 1 { " …" } }
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Titles of the lanes, and the first letters of the classes of their boxes: speakers, errors.
const LANES: [(&str, &str); 3] = [("Reference", "c"), ("Hypothesis", "c"), ("Errors", "e")];

fn class(palette: &str, colour: usize) -> String {
    format!("{palette}{}", colour % COLOURS)
}

/// A tenth of a pixel is enough.
fn at(pixels: f64) -> String {
    let text = format!("{pixels:.1}");
    text.strip_suffix(".0").map(str::to_owned).unwrap_or(text)
}

/// Hours, where there are any, minutes and seconds.
fn clock(seconds: f64, digits: usize) -> String {
    let unit = 10u64.pow(digits as u32);
    let all = (seconds * unit as f64).round() as u64;
    let (whole, rest) = (all / unit, all % unit);
    let (hours, minutes, seconds) = (whole / 3600, whole / 60 % 60, whole % 60);
    let mut text = match hours {
        0 => format!("{minutes}:{seconds:02}"),
        _ => format!("{hours}:{minutes:02}:{seconds:02}"),
    };
    if digits > 0 {
        text += &format!(".{rest:0digits$}");
    }
    text
}

/// A label, truncated to the space beside a timeline.
fn short(label: &str) -> String {
    match label.char_indices().nth(26) {
        Some((end, _)) if label.chars().count() > 27 => format!("{}…", &label[..end]),
        _ => label.to_owned(),
    }
}

const STYLE: &str = "
:root { color-scheme: light dark; --ink: #1d232b; --quiet: #66707c; --line: #e0e4ea; --back: #f6f7f9; --card: #fff; --missed: #7b8794; --false: #d0a215; --confused: #c8342b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ee; --quiet: #9aa4b0; --line: #323a45; --back: #14181d; --card: #1c2229; --missed: #8b97a5; --false: #d8b13a; --confused: #e2574e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif; }
main { max-width: 1280px; margin: 0 auto; padding: 36px 24px 80px; }
h1 { font-size: 27px; margin: 0 0 12px; font-weight: 650; } h2 { font-size: 18px; margin: 0 0 4px; font-weight: 620; overflow-wrap: anywhere; }
.quiet { color: var(--quiet); font-size: 13.5px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 14px; } th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line); } th { color: var(--quiet); font-weight: 560; font-size: 12.5px; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; } .total td { font-weight: 620; border-bottom: 0; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 18px 20px; margin: 16px 0; }
.figures { margin: 0 0 8px; color: var(--quiet); font-size: 13.5px; } .figures span { margin-right: 16px; } .figures b { color: var(--ink); font-weight: 600; font-variant-numeric: tabular-nums; }
audio { display: block; height: 32px; margin: 0 0 8px; }
.timeline { display: flex; } .labels { flex: none; } .scroll { overflow-x: auto; flex: 1; min-width: 0; } svg { display: block; }
svg text { font-size: 12px; fill: var(--ink); } .scroll svg text, svg text.lane { fill: var(--quiet); } .tick { stroke: var(--line); }
audio ~ .timeline .scroll svg { cursor: pointer; } rect:hover { stroke: var(--ink); }
.c0 { fill: #3b78c4; } .c1 { fill: #d9772b; } .c2 { fill: #3f9a63; } .c3 { fill: #9161c2; } .c4 { fill: #c2527f; } .c5 { fill: #2a9aa3; } .c6 { fill: #a8862a; } .c7 { fill: #6b7fd6; } .c8 { fill: #8a6a55; } .c9 { fill: #5f9c3a; }
.e0 { fill: var(--missed); } .e1 { fill: var(--false); } .e2 { fill: var(--confused); }
";

const SCRIPT: &str = "
document.querySelectorAll('section').forEach(section => {
  const audio = section.querySelector('audio'), drawing = section.querySelector('.scroll svg');
  if (audio) drawing.addEventListener('click', event => {
    const x = event.clientX - drawing.getBoundingClientRect().left;
    audio.currentTime = Number(drawing.dataset.from) + x / Number(drawing.dataset.second);
    audio.play();
  });
});
";

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use flow_speakers::error_stretches::ErrorStretch;

    use super::*;
    use crate::utterance::tests::utterance;

    fn data() -> TimelinePage {
        TimelinePage {
            all: vec![("DER".to_owned(), "12.5 %".to_owned())],
            recordings: vec![RecordingTimeline {
                name: "<talk>".to_owned(),
                figures: vec![("DER".to_owned(), "12.5 %".to_owned())],
                reference: vec![utterance(61.0, 62.5, "<b>Ann", "well & \"good\"")],
                hypothesis: vec![utterance(61.0, 62.25, "S0", "well")],
                mapping: BTreeMap::from([("S0".to_owned(), "<b>Ann".to_owned())]),
                errors: vec![ErrorStretch {
                    start: 62.25,
                    end: 62.5,
                    missed: 1,
                    false_alarm: 0,
                    confusion: 0,
                    reference: vec!["<b>Ann".to_owned()],
                    hypothesis: Vec::new(),
                }],
                audio: None,
            }],
        }
    }

    #[test]
    fn a_page_has_lanes_times_and_words_and_escapes_names() {
        let page = page(&data());
        assert!(page.contains("&lt;b&gt;Ann, 1:01.00–1:02.50: well &amp; ") && !page.contains("<b>Ann"));
        assert!(page.contains("S0 = &lt;b&gt;Ann") && page.contains("S0, 1:01.00–1:02.25: well"));
        assert!(page.contains("missed, 1:02.25–1:02.50: &lt;b&gt;Ann not heard"));
        // Half a second is 7 pixels; the timeline begins at the whole second before the first box.
        assert!(
            page.contains("<rect class=\"c0\" x=\"0\" y=\"27\" width=\"21\""),
            "{page}"
        );
        assert!(!page.contains("<script") && !page.contains("<audio") && !page.contains("http"));
        assert!(page.contains("prefers-color-scheme: dark"));
    }

    #[test]
    fn a_recording_that_is_there_is_played() {
        let mut data = data();
        data.recordings[0].audio = Some("../in/a%20b.flac".to_owned());
        let page = page(&data);
        assert!(page.contains("src=\"../in/a%20b.flac\"") && page.contains("<script>"));
        assert!(page.contains("data-from=\"61\" data-second=\"14\""), "{page}");
    }

    #[test]
    fn long_and_many_recordings_make_no_endless_page() {
        let mut data = data();
        let reference = (0..30_000).map(|turn| {
            let start = f64::from(turn) * 1.2;
            utterance(
                start,
                start + 1.0,
                &format!("s{}", turn % 3),
                "some words that were said",
            )
        });
        data.recordings[0].reference = reference.collect();
        let long = page(&data);
        assert!(
            long.matches("<rect").count() < 3 * LANE_BOXES.1 && long.len() < 2_000_000,
            "{}",
            long.len()
        );
        let scale = Scale::of(&lanes(&data.recordings[0], 100));
        assert!(scale.width <= WIDTH + 61.0 && scale.ticks().len() < 400);
        let mut one = data.recordings[0].clone();
        one.reference.truncate(1000);
        data.recordings = vec![one; 130];
        let many = page(&data);
        assert!(many.contains("30 more recordings") && many.matches("<section").count() == TIMELINES);
        assert!(
            many.matches("<rect").count() < 2 * BOXES,
            "{}",
            many.matches("<rect").count()
        );
    }

    #[test]
    fn nothing_is_a_page_too() {
        assert!(page(&TimelinePage::default()).contains("</html>"));
        let empty = TimelinePage {
            recordings: vec![RecordingTimeline::default()],
            ..TimelinePage::default()
        };
        assert!(page(&empty).contains("0:00"));
    }

    #[test]
    fn times_are_those_of_a_clock() {
        assert_eq!(
            [clock(0.0, 0), clock(59.996, 2), clock(3661.5, 2)],
            ["0:00", "1:00.00", "1:01:01.50"]
        );
        assert_eq!(
            [short(&"1".repeat(27)), short(&"1".repeat(28))],
            ["1".repeat(27), "1".repeat(26) + "…"]
        );
    }
}
