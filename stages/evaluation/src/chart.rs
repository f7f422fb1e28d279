//! Small charts as SVG: lines over steps, and bars. Drawn by hand, so that the page needs no script and the
//! bytes depend on the numbers alone.

use maud::{Markup, html};

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 220.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 12.0;
const TOP: f64 = 10.0;
const BOTTOM: f64 = 26.0;

/// Points of a line: x and y. Points that are not finite are left out.
pub type Points = Vec<(f64, f64)>;

/// A line chart from y = 0 up. `show` writes a y value.
pub fn lines(title: &str, series: &[(&str, Points)], show: fn(f64) -> String) -> Markup {
    let series: Vec<(&str, Points)> = series
        .iter()
        .map(|(name, points)| {
            (
                *name,
                thin(
                    points
                        .iter()
                        .copied()
                        .filter(|(x, y)| x.is_finite() && y.is_finite())
                        .collect(),
                ),
            )
        })
        .collect();
    let all = || series.iter().flat_map(|(_, points)| points);
    if all().next().is_none() {
        return html! { p.quiet { (title) ": no figures" } };
    }
    let x_end = all().map(|p| p.0).fold(0.0, f64::max).max(1.0);
    let y_ticks = ticks(all().map(|p| p.1).fold(0.0, f64::max));
    let y_end = y_ticks.last().copied().unwrap_or(1.0);
    let x_of = |x: f64| LEFT + x / x_end * (WIDTH - LEFT - RIGHT);
    let y_of = |y: f64| HEIGHT - BOTTOM - y.max(0.0) / y_end * (HEIGHT - TOP - BOTTOM);
    html! {
        figure {
            figcaption {
                (title)
                @if series.len() > 1 {
                    @for (index, (name, _)) in series.iter().enumerate() {
                        span class={ "key s" (index % 4) } { (name) }
                    }
                }
            }
            svg viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img" aria-label=(title) {
                @for tick in &y_ticks {
                    line.grid x1=(LEFT) x2=(WIDTH - RIGHT) y1=(short(y_of(*tick))) y2=(short(y_of(*tick))) {}
                    text x=(LEFT - 6.0) y=(short(y_of(*tick) + 4.0)) text-anchor="end" { (show(*tick)) }
                }
                @for tick in ticks(x_end).iter().filter(|tick| **tick <= x_end * 1.001) {
                    text x=(short(x_of(*tick))) y=(HEIGHT - 8.0) text-anchor="middle" { (count(*tick as u64)) }
                }
                @for (index, (_, points)) in series.iter().enumerate() {
                    @let path = points.iter().map(|(x, y)| format!("{},{}", short(x_of(*x)), short(y_of(*y)))).collect::<Vec<_>>().join(" ");
                    polyline class={ "line s" (index % 4) } points=(path) {}
                    @if points.len() < 40 {
                        @for (x, y) in points {
                            circle class={ "dot s" (index % 4) } cx=(short(x_of(*x))) cy=(short(y_of(*y))) r="2.5" {}
                        }
                    }
                }
            }
        }
    }
}

/// Vertical bars with a label under each (a histogram).
pub fn columns(title: &str, bars: &[(String, f64)]) -> Markup {
    let most = bars.iter().map(|bar| bar.1).fold(0.0, f64::max);
    if most <= 0.0 {
        return html! { p.quiet { (title) ": no figures" } };
    }
    let y_ticks = ticks(most);
    let y_end = y_ticks.last().copied().unwrap_or(1.0);
    let step = (WIDTH - LEFT - RIGHT) / bars.len() as f64;
    let y_of = |y: f64| HEIGHT - BOTTOM - y / y_end * (HEIGHT - TOP - BOTTOM);
    html! {
        figure {
            figcaption { (title) }
            svg viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img" aria-label=(title) {
                @for tick in &y_ticks {
                    line.grid x1=(LEFT) x2=(WIDTH - RIGHT) y1=(short(y_of(*tick))) y2=(short(y_of(*tick))) {}
                    text x=(LEFT - 6.0) y=(short(y_of(*tick) + 4.0)) text-anchor="end" { (count(*tick as u64)) }
                }
                @for (index, (label, value)) in bars.iter().enumerate() {
                    @let x = LEFT + step * index as f64;
                    rect.bar x=(short(x + step * 0.12)) width=(short(step * 0.76)) y=(short(y_of(*value))) height=(short(HEIGHT - BOTTOM - y_of(*value))) {
                        title { (label) ": " (count(*value as u64)) }
                    }
                    text x=(short(x + step / 2.0)) y=(HEIGHT - 8.0) text-anchor="middle" { (label) }
                }
            }
        }
    }
}

/// Counts of values in ranges of equal width, of one or several series.
#[derive(Clone, Debug)]
pub struct Histogram {
    /// Where the first range begins, and how wide each is.
    pub from: f64,
    pub width: f64,
    /// By series and range.
    pub counts: Vec<Vec<u64>>,
    /// By series: values below the first range, and above the last.
    pub outside: Vec<[u64; 2]>,
}

impl Histogram {
    /// `bins` ranges from one finite value to another.
    pub fn new([from, to]: [f64; 2], bins: usize, series: usize) -> Histogram {
        // Halves, whose difference is finite.
        let width = ((to / 2.0 - from / 2.0) / bins as f64) * 2.0;
        let is_wide = width > from.abs().max(to.abs()) * 1e-12;
        let (from, width) = match is_wide {
            true => (from, width),
            // A column of one value has a bar in the middle.
            false => {
                let width = (from.abs() * 1e-3).max(1e-3);
                (from - width * (bins as f64 / 2.0 - 0.25), width)
            }
        };
        Histogram {
            from,
            width,
            counts: vec![vec![0; bins]; series],
            outside: vec![[0; 2]; series],
        }
    }

    /// Takes a finite value.
    pub fn add(&mut self, series: usize, value: f64) {
        let bins = self.counts[series].len();
        let at = (value / self.width - self.from / self.width).floor();
        // The end belongs to the last range.
        let is_end = at == bins as f64 && value <= self.from + self.width * bins as f64 * (1.0 + 1e-12);
        if at < 0.0 {
            self.outside[series][0] += 1;
        } else if at < bins as f64 || is_end {
            self.counts[series][(at as usize).min(bins - 1)] += 1;
        } else {
            self.outside[series][1] += 1;
        }
    }
}

/// A histogram whose series are drawn over each other, the first one at the back, with vertical lines at `limits`.
pub fn histogram(title: &str, names: &[&str], data: &Histogram, limits: &[f64]) -> Markup {
    let most = data.counts.iter().flatten().copied().max().unwrap_or(0);
    if most == 0 {
        return html! { figure { figcaption { (title) } p.quiet { "No values." } } };
    }
    let y_ticks = ticks(most as f64);
    let y_end = y_ticks.last().copied().unwrap_or(1.0);
    let y_of = |y: f64| HEIGHT - BOTTOM - y / y_end * (HEIGHT - TOP - BOTTOM);
    let bins = data.counts[0].len();
    let step = (WIDTH - LEFT - RIGHT) / bins as f64;
    let end = data.from + data.width * bins as f64;
    let x_of = |x: f64| LEFT + (x / data.width - data.from / data.width) * step;
    let drawn = limits.iter().filter(|limit| (data.from..=end).contains(*limit));
    let [below, above] = data.outside[0];
    html! {
        figure {
            figcaption {
                (title)
                @if data.counts.len() > 1 {
                    @for (index, name) in names.iter().enumerate() { span class={ "key b" (index) } { (name) } }
                }
            }
            svg viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } role="img" aria-label=(title) {
                @for tick in &y_ticks {
                    line.grid x1=(LEFT) x2=(WIDTH - RIGHT) y1=(short(y_of(*tick))) y2=(short(y_of(*tick))) {}
                    text x=(LEFT - 6.0) y=(short(y_of(*tick) + 4.0)) text-anchor="end" { (counted(*tick)) }
                }
                @for (series, counts) in data.counts.iter().enumerate() {
                    @let class = if data.counts.len() > 1 { format!("b{}", series % 2) } else { "bar".into() };
                    @for (at, rows) in counts.iter().enumerate().filter(|(_, rows)| **rows > 0) {
                        @let from = data.from + data.width * at as f64;
                        rect class=(class) x=(short(LEFT + step * at as f64)) width=(short(step - 1.0)) y=(short(y_of(*rows as f64))) height=(short(HEIGHT - BOTTOM - y_of(*rows as f64))) {
                            title { (figure(from)) " to " (figure(from + data.width)) ": " (count(*rows)) @if data.counts.len() > 1 { " (" (names[series]) ")" } }
                        }
                    }
                }
                @for tick in ticks_between(data.from, end) {
                    // One at the edge is not cut.
                    @let at_end = x_of(tick) > WIDTH - 24.0;
                    text x=(short(if at_end { WIDTH - 2.0 } else { x_of(tick) })) y=(HEIGHT - 8.0) text-anchor=(if at_end { "end" } else { "middle" }) { (figure(tick)) }
                }
                @for limit in drawn {
                    @let is_right = x_of(*limit) > WIDTH * 0.7;
                    line.limit x1=(short(x_of(*limit))) x2=(short(x_of(*limit))) y1=(TOP) y2=(HEIGHT - BOTTOM) {}
                    text.limit x=(short(x_of(*limit) + if is_right { -5.0 } else { 5.0 })) y=(TOP + 9.0) text-anchor=(if is_right { "end" } else { "start" }) { "limit " (figure(*limit)) }
                }
            }
            @if below + above > 0 { p.quiet { "Not drawn: " (count(below)) " below, " (count(above)) " above." } }
        }
    }
}

/// Round numbers between two, three to seven of them.
fn ticks_between(from: f64, to: f64) -> Vec<f64> {
    let rough = to / 5.0 - from / 5.0;
    if !(rough.is_finite() && rough > 0.0) {
        return Vec::new();
    }
    let power = 10f64.powf(rough.log10().floor());
    let steps = [1.0, 2.0, 2.5, 5.0, 10.0].map(|factor| factor * power);
    let step = steps.into_iter().find(|step| *step >= rough).unwrap_or(rough);
    let first = (from / step).ceil();
    (0..8)
        .map(|at| (first + f64::from(at)) * step)
        .filter(|tick| *tick <= to)
        .collect()
}

/// A count as an axis has it.
fn counted(value: f64) -> String {
    if value < 1e15 && (value.fract() == 0.0 || value >= 10.0) {
        count(value as u64)
    } else {
        figure(value)
    }
}

/// A number with some three digits.
pub fn figure(value: f64) -> String {
    let trimmed = |number: String| number.trim_end_matches('0').trim_end_matches('.').to_owned();
    match value.abs() {
        0.0 => "0".into(),
        small if small < 0.001 => format!("{value:.1e}"),
        small if small < 1.0 => trimmed(format!("{value:.3}")),
        small if small < 100.0 => trimmed(format!("{value:.2}")),
        large if large < 1e15 => {
            let sign = if value < 0.0 { "-" } else { "" };
            format!("{sign}{}", count(value.abs().round() as u64))
        }
        _ => format!("{value:.1e}"),
    }
}

/// Pairs of horizontal bars, one above the other, with a label before and `show` of each value behind. `names` are those of
/// the first and the second bar of every pair.
pub fn pairs(title: &str, names: [&str; 2], rows: &[(String, [f64; 2])], show: fn(f64) -> String) -> Markup {
    const ROW: f64 = 37.0;
    const BAR: f64 = 12.5;
    let finite = |value: f64| if value.is_finite() { value.max(0.0) } else { 0.0 };
    let most = rows.iter().flat_map(|row| row.1).map(finite).fold(0.0, f64::max);
    if most <= 0.0 {
        return html! { p.quiet { (title) ": no figures" } };
    }
    let height = ROW * rows.len() as f64 + 8.0;
    // Space for the value after the longest bar.
    let width_of = |value: f64| finite(value) / most * (WIDTH - LEFT - 64.0);
    html! {
        figure {
            figcaption {
                (title)
                @for (index, name) in names.iter().enumerate() { span class={ "key b" (index) } { (name) } }
            }
            svg viewBox={ "0 0 " (WIDTH) " " (short(height)) } role="img" aria-label=(title) {
                @for (index, (label, values)) in rows.iter().enumerate() {
                    @let y = 6.0 + ROW * index as f64;
                    text.name x=(LEFT - 8.0) y=(short(y + BAR + 5.0)) text-anchor="end" { (label) }
                    @for (bar, value) in values.iter().enumerate() {
                        @let top = y + (BAR + 1.0) * bar as f64;
                        rect class={ "b" (bar) } x=(LEFT) width=(short(width_of(*value))) y=(short(top)) height=(BAR) {
                            title { (label) ", " (names[bar]) ": " (show(*value)) }
                        }
                        text x=(short(LEFT + width_of(*value) + 6.0)) y=(short(top + 10.2)) { (show(*value)) }
                    }
                }
            }
        }
    }
}

/// Downsamples to at most some 600 points, each the mean of its neighbours: more are not visible and make the page
/// slow.
fn thin(points: Points) -> Points {
    let size = points.len().div_ceil(600).max(1);
    points
        .chunks(size)
        .map(|chunk| {
            let n = chunk.len() as f64;
            (
                chunk.iter().map(|p| p.0).sum::<f64>() / n,
                chunk.iter().map(|p| p.1).sum::<f64>() / n,
            )
        })
        .collect()
}

/// Round numbers from 0 to at least `most`, four to six of them.
fn ticks(most: f64) -> Vec<f64> {
    if !(most.is_finite() && most > 0.0) {
        return vec![0.0, 1.0];
    }
    let rough = most / 4.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 2.5, 5.0, 10.0]
        .into_iter()
        .map(|m| m * power)
        .find(|step| *step >= rough * 0.999)
        .unwrap_or(10.0 * power);
    (0..=(most / step).ceil() as usize).map(|n| n as f64 * step).collect()
}

fn short(value: f64) -> String {
    format!("{value:.1}")
}

/// 12,345
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_reach_the_top() {
        assert_eq!(ticks(0.83), [0.0, 0.25, 0.5, 0.75, 1.0]);
        assert_eq!(ticks(2000.0), [0.0, 500.0, 1000.0, 1500.0, 2000.0]);
        for most in [1e-9, 0.3, 7.0, 99.0, 1234.5, 1e12] {
            let ticks = ticks(most);
            assert!(
                ticks.len() <= 7 && *ticks.last().unwrap() >= most * 0.999,
                "{most}: {ticks:?}"
            );
        }
        assert_eq!(ticks(f64::NAN), [0.0, 1.0]);
    }

    #[test]
    fn counts_have_commas() {
        assert_eq!(
            (count(0), count(999), count(1000), count(1234567)),
            ("0".into(), "999".into(), "1,000".into(), "1,234,567".into())
        );
    }

    #[test]
    fn charts_survive_odd_numbers() {
        for points in [
            vec![],
            vec![(0.0, f64::NAN)],
            vec![(0.0, 0.0)],
            (0..5000).map(|i| (f64::from(i), f64::INFINITY)).collect(),
            vec![(1.0, 2.0), (3.0, 1e30)],
        ] {
            let drawn = lines("loss", &[("a", points)], |y| format!("{y}")).into_string();
            assert!(!drawn.contains("NaN") && !drawn.contains("inf\""), "{drawn}");
        }
        assert!(columns("n", &[]).into_string().contains("no figures"));
        let show = |value: f64| format!("{value}");
        assert!(pairs("n", ["a", "b"], &[], show).into_string().contains("no figures"));
        let odd = [
            ("x".to_string(), [f64::NAN, f64::INFINITY]),
            ("<y>".to_string(), [1.0, -1.0]),
        ];
        let drawn = pairs("n", ["a", "b"], &odd, show).into_string();
        assert!(!drawn.contains("width=\"NaN") && !drawn.contains("width=\"inf") && !drawn.contains("width=\"-"));
        assert!(drawn.contains("&lt;y&gt;"));
    }
}
