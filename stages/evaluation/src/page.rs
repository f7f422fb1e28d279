//! The report page: one HTML file without scripts or other files.

use std::collections::{BTreeMap, BTreeSet};

use maud::{Markup, html};

use crate::chart::{Points, columns, count, lines, pairs};
use crate::document::document;
use crate::figures::SetFigures;
use crate::language_name::{language, language_name};
use crate::normalize::Normalizer;
use crate::set_section::{SINGLE, set_section};

/// The content of the page.
#[derive(Clone, Debug, Default)]
pub struct PageData {
    pub model: Option<ModelFigures>,
    pub sets: Vec<SetFigures>,
    /// The normalisation of the sets' normalised rates.
    pub normalizer: Normalizer,
    pub curves: Curves,
    /// Train rows by language: name, utterances, seconds.
    pub languages: Vec<(String, u64, f64)>,
    /// Train rows by duration: label and utterances.
    pub durations: Vec<(String, u64)>,
    /// The languages of the sampler's plan of an epoch.
    pub mixture: Option<Mixture>,
    /// Rejects: stage, reason, class, rows.
    pub rejects: Vec<(String, String, String, u64)>,
}

/// What an epoch emits of each language, beside what the manifest holds.
#[derive(Clone, Debug, Default)]
pub struct Mixture {
    pub epoch: i64,
    pub balance: String,
    pub temperature: f64,
    pub languages: Vec<MixtureShare>,
}

#[derive(Clone, Debug, Default)]
pub struct MixtureShare {
    pub language: String,
    pub rows: i64,
    pub seconds: f64,
    pub rows_in_batches: i64,
    pub seconds_in_batches: f64,
}

/// The checkpoint that was evaluated.
#[derive(Clone, Debug, Default)]
pub struct ModelFigures {
    pub path: String,
    pub step: i64,
    pub digest: String,
    /// Description of the checkpoint; empty where there is none.
    pub which: String,
    /// What training began from; none where that was nothing, or is not known.
    pub init: Option<String>,
}

/// The curves of `metrics.jsonl`, over steps.
#[derive(Clone, Debug, Default)]
pub struct Curves {
    pub loss: Points,
    pub validation_loss: Points,
    pub rate: Points,
    pub padding: Points,
    pub wer: Points,
    pub cer: Points,
    pub gradient_norm: Points,
    /// The evaluations during training, in order.
    pub evaluations: Vec<Evaluated>,
    /// Steps skipped because they had no finite loss and gradient.
    pub skipped: u64,
    /// Steps skipped because no utterance of them could be loaded.
    pub not_loaded: u64,
    /// How often a recording was left out of a step because it could not be loaded.
    pub left_out: u64,
    pub vocabulary: Option<VocabularyFigures>,
    /// Transcripts with more tokens than training takes.
    pub long_texts: u64,
    /// Whether these were learned up to the limit, and not left out.
    pub truncated: bool,
    /// When the last figures were written, in seconds since 1970.
    pub ended: Option<f64>,
}

/// Word error rates of one evaluation while training.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Evaluated {
    pub step: u64,
    /// The stage of the curriculum that ended with this step.
    pub stage: Option<String>,
    /// Whether the encoder was frozen in the steps before; none before the first step.
    pub frozen: Option<bool>,
    pub overall: f64,
    /// TDT loss; none in metrics of older versions, which did not compute it.
    pub loss: Option<f64>,
    pub languages: BTreeMap<String, f64>,
    /// Languages of which there was one utterance.
    pub single: BTreeSet<String>,
}

/// A change of the vocabulary at the beginning of training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VocabularyFigures {
    pub pieces: u64,
    pub old_pieces: u64,
    /// Pieces whose rows stayed.
    pub kept: u64,
    /// Pieces that began as a mean of old ones.
    pub mean: u64,
    /// Pieces that began at random.
    pub random: u64,
}

/// A share as a percentage with one digit; a dash where there is none.
pub fn percent(rate: f64) -> String {
    if rate.is_finite() {
        format!("{:.1} %", rate * 100.0)
    } else {
        "–".into()
    }
}

fn vocabulary_section(figures: &VocabularyFigures) -> Markup {
    html! {
        p {
            "The vocabulary was changed from " (count(figures.old_pieces)) " to " (count(figures.pieces)) " pieces: "
            (count(figures.kept)) " kept their rows, " (count(figures.mean)) " began as a mean of old ones, "
            (count(figures.random)) " at random. Each piece is in " code { "vocabulary.tsv" } " beside the checkpoints."
        }
    }
}

pub fn page(data: &PageData) -> String {
    let title = title(data);
    let main = html! {
        h1 { (title) }
        (about(data))
        @if let Some(vocabulary) = &data.curves.vocabulary { (vocabulary_section(vocabulary)) }
        (tiles(data))
        (curves(&data.curves))
        (course(&data.curves.evaluations))
        @for set in &data.sets { (set_section(set, &data.normalizer)) }
        (corpus(data))
        @if let Some(mixture) = &data.mixture { (mixture_section(mixture)) }
        (rejects(data))
    };
    document(&title, STYLE, &main, None)
}

fn title(data: &PageData) -> String {
    let init = data.model.as_ref().and_then(|model| model.init.as_deref());
    match init {
        _ if data.curves.loss.is_empty() => "Evaluation report".into(),
        // Of a path or an address the last part.
        Some(init) => {
            let name = init.trim_end_matches('/').rsplit('/').next().unwrap_or(init);
            format!("Fine-tuning of {name}")
        }
        None => "Training report".into(),
    }
}

/// What the figures are of: model, data and date.
fn about(data: &PageData) -> Markup {
    let date = data
        .curves
        .ended
        .and_then(|at| chrono::DateTime::from_timestamp(at as i64, 0));
    let seconds: f64 = data.languages.iter().map(|language| language.2).sum();
    let utterances: u64 = data.languages.iter().map(|language| language.1).sum();
    html! {
        table.about {
            @if let Some(model) = &data.model {
                tr { th { "Model" } td {
                    code { (model.path) } ", step " (count(model.step.max(0) as u64)) ", digest " code { (model.digest.chars().take(16).collect::<String>()) }
                    @if !model.which.is_empty() { ": the " (model.which) }
                    @if let Some(init) = &model.init { "; began from " code { (init) } }
                } }
            }
            @if utterances > 0 {
                tr { th { "Learned from" } td { (count(utterances)) " utterances, " (length(seconds)) " of speech in " (languages(data.languages.iter().map(|language| &*language.0))) } }
            }
            @for set in &data.sets {
                @let all = &set.scores.overall;
                tr { th { "Scored on" } td { (set.name) ": " (count(all.utterances)) " utterances, " (length(all.seconds)) " of speech in " (languages(set.scores.languages.keys().map(String::as_str))) } }
            }
            @if let Some(date) = date { tr { th { "Trained until" } td { (date.format("%-d %B %Y, %H:%M UTC").to_string()) } } }
        }
    }
}

fn length(seconds: f64) -> String {
    match seconds < 3600.0 {
        true => format!("{:.1} min", seconds / 60.0),
        false => format!("{:.2} h", seconds / 3600.0),
    }
}

/// The names of some languages, and how many there are.
fn languages<'l>(codes: impl Iterator<Item = &'l str>) -> String {
    const NAMED: usize = 3;
    let names: Vec<String> = codes.map(language_name).collect();
    match names.len() {
        many if many > NAMED => format!("{many} languages"),
        _ => names.join(", "),
    }
}

/// The word error rates before training and of the model, where both were measured on the same rows.
fn before_and_after(data: &PageData) -> Option<(f64, f64)> {
    let evaluations = &data.curves.evaluations;
    let before = evaluations.first().filter(|first| first.step == 0)?;
    let step = data.model.as_ref().map(|model| model.step.max(0) as u64);
    let of_model = evaluations.iter().rev().find(|one| Some(one.step) == step);
    let after = of_model.or(evaluations.last()).filter(|after| after.step > 0)?;
    Some((before.overall, after.overall))
}

fn tiles(data: &PageData) -> Markup {
    html! {
        div.tiles {
            @if let Some((before, after)) = before_and_after(data) {
                div.tile.first { b { (format!("{:.1} → ", 100.0 * before)) (percent(after)) } span { "word error rate before and after training, of the rows that it is checked on" } }
            }
            @for set in &data.sets {
                @let all = &set.scores.overall;
                div.tile { b { (percent(all.words.rate())) } span { "word error rate, " (set.name) } }
                div.tile { b { (percent(all.characters.rate())) } span { "character error rate, " (set.name) } }
            }
            @if let Some((_, loss)) = data.curves.loss.last() {
                div.tile { b { (format!("{loss:.2}")) } span { "loss at the end" } }
            }
            @if !data.curves.padding.is_empty() {
                @let mean = data.curves.padding.iter().map(|p| p.1).sum::<f64>() / data.curves.padding.len() as f64;
                div.tile { b { (percent(mean)) } span { "of what is computed is padding" } }
            }
            @if !data.languages.is_empty() {
                @let seconds: f64 = data.languages.iter().map(|l| l.2).sum();
                div.tile { b { (length(seconds)) } span { "of speech to train on" } }
            }
            @let rejected = count(data.rejects.iter().map(|r| r.3).sum());
            div.tile { b { a href="#rejected-on-the-way" { (rejected) } } span { "rows rejected on the way" } }
            @if data.curves.skipped > 0 {
                div.tile { b { (count(data.curves.skipped)) } span { "steps skipped, not finite" } }
            }
            @if data.curves.not_loaded > 0 {
                div.tile { b { (count(data.curves.not_loaded)) } span { "steps skipped, nothing could be loaded" } }
            }
            @if data.curves.left_out > 0 {
                div.tile { b { (count(data.curves.left_out)) } span { "recordings left out while training: not loadable" } }
            }
            @if data.curves.long_texts > 0 {
                div.tile { b { (count(data.curves.long_texts)) } span {
                    @if data.curves.truncated { "transcripts learned only in part: too many tokens" } @else { "transcripts left out: too many tokens" }
                } }
            }
        }
    }
}

/// At most this many evaluations are columns of a table.
const COLUMNS: usize = 7;

/// The first, the last, the ends of stages, and some between, evenly.
pub fn chosen(evaluations: &[Evaluated]) -> Vec<&Evaluated> {
    let last = evaluations.len().saturating_sub(1);
    let count = evaluations.len().min(COLUMNS);
    let mut places: BTreeSet<usize> = (0..count).map(|n| n * last / (count - 1).max(1)).collect();
    let ends = evaluations.iter().enumerate().filter(|(_, e)| e.stage.is_some());
    places.extend(ends.map(|(place, _)| place).take(COLUMNS));
    places.into_iter().filter_map(|place| evaluations.get(place)).collect()
}

/// `before`, or the step, and the stage that it ended.
pub fn when(evaluated: &Evaluated) -> String {
    let step = if evaluated.step == 0 {
        "before".into()
    } else {
        format!("step {}", count(evaluated.step))
    };
    match &evaluated.stage {
        Some(stage) => format!("{step}, end of {stage}"),
        None => step,
    }
}

/// Error rates by language from before the first step to the last.
fn course(evaluations: &[Evaluated]) -> Markup {
    if evaluations.is_empty() {
        return html! {};
    }
    let columns = chosen(evaluations);
    let languages: BTreeSet<&String> = columns.iter().flat_map(|e| e.languages.keys()).collect();
    let rate = |rate: Option<&f64>| rate.map_or("–".to_owned(), |rate| percent(*rate));
    html! {
        section {
            h2 { "Word error rate while training" }
            table {
                thead { tr { th { "Language" } @for e in &columns { th.n { (when(e)) } } } }
                tbody {
                    @for lang in languages {
                        tr.few[columns.iter().any(|e| e.single.contains(lang))] { td { (language(lang)) } @for e in &columns { td.n { (rate(e.languages.get(lang))) } } }
                    }
                    tr.total { td { "all" } @for e in &columns { td.n { (percent(e.overall)) } } }
                    @if columns.iter().any(|e| e.loss.is_some()) {
                        tr { td.quiet { "loss" } @for e in &columns { td.n.quiet { (e.loss.map_or(String::new(), |loss| format!("{loss:.4}"))) } } }
                    }
                    tr { td.quiet { "encoder" } @for e in &columns { td.n.quiet { (match e.frozen { None => "", Some(true) => "frozen", Some(false) => "learned" }) } } }
                }
            }
            p.quiet {
                "Of the validation sample that training is evaluated on."
                @if columns.iter().any(|e| !e.single.is_empty()) { " " (SINGLE) }
            }
        }
    }
}

fn curves(curves: &Curves) -> Markup {
    if curves.loss.is_empty() && curves.wer.is_empty() {
        return html! {};
    }
    let mut losses = vec![("loss", curves.loss.clone())];
    if !curves.validation_loss.is_empty() {
        losses.push(("validation", curves.validation_loss.clone()));
    }
    html! {
        section {
            h2 { "Training" }
            div.charts {
                (lines("Loss by optimizer step", &losses, |y| format!("{y:.4}").trim_end_matches('0').trim_end_matches('.').into()))
                @if !curves.wer.is_empty() {
                    (lines("Validation error rates", &[("WER", curves.wer.clone()), ("CER", curves.cer.clone())], |y| format!("{:.0} %", y * 100.0)))
                }
                (lines("Learning rate", &[("rate", curves.rate.clone())], |y| if y == 0.0 { "0".into() } else { format!("{y:.1e}") }))
                (lines("Gradient norm before clipping", &[("norm", curves.gradient_norm.clone())], |y| format!("{y:.2}").trim_end_matches('0').trim_end_matches('.').into()))
                (lines("Padding, share of what is computed", &[("padding", curves.padding.clone())], |y| format!("{:.1} %", y * 100.0)))
            }
        }
    }
}

fn corpus(data: &PageData) -> Markup {
    if data.languages.is_empty() {
        return html! {};
    }
    let (utterances, seconds) = data
        .languages
        .iter()
        .fold((0, 0.0), |sum, l| (sum.0 + l.1, sum.1 + l.2));
    html! {
        section {
            h2 { "Training data" }
            table {
                thead { tr { th { "Language" } th.n { "Utterances" } th.n { "Minutes" } th.n { "Share of time" } } }
                tbody {
                    @for (lang, n, s) in &data.languages {
                        tr { td { (language(lang)) } td.n { (count(*n)) } td.n { (format!("{:.1}", s / 60.0)) } td.n { span.meter style={ "width:" ((s / seconds.max(1e-9) * 60.0).round()) "px" } {} (percent(s / seconds.max(1e-9))) } }
                    }
                    tr.total { td { "all" } td.n { (count(utterances)) } td.n { (format!("{:.1}", seconds / 60.0)) } td.n {} }
                }
            }
            div.charts.wide { (columns("Utterances by duration, seconds", &data.durations.iter().map(|(label, n)| (label.clone(), *n as f64)).collect::<Vec<_>>())) }
        }
    }
}

/// Most languages in the chart of the mixture; the table of the training data has them all.
const DRAWN: usize = 40;

fn mixture_section(mixture: &Mixture) -> Markup {
    let sum = |of: fn(&MixtureShare) -> f64| mixture.languages.iter().map(of).sum::<f64>();
    let (held, emitted) = (sum(|l| l.seconds), sum(|l| l.seconds_in_batches));
    let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
    let mut languages: Vec<&MixtureShare> = mixture.languages.iter().collect();
    languages.sort_by(|a, b| {
        b.seconds
            .total_cmp(&a.seconds)
            .then_with(|| a.language.cmp(&b.language))
    });
    let bars: Vec<(String, [f64; 2])> = languages
        .iter()
        .take(DRAWN)
        .map(|l| {
            (
                l.language.clone(),
                [share(l.seconds, held), share(l.seconds_in_batches, emitted)],
            )
        })
        .collect();
    let times = |l: &&MixtureShare| share(l.rows_in_batches as f64, l.rows as f64);
    let most = languages.iter().max_by(|a, b| times(a).total_cmp(&times(b)));
    html! {
        section {
            h2 { "Languages in an epoch" }
            p.quiet {
                @if mixture.balance == "quota" {
                    "Balance by quota: each language gets a share of the epoch's time proportional to its seconds to the power of " (mixture.temperature) ". "
                    @if let Some(most) = most { "The rows of " (language_name(&most.language)) " come most often, " (format!("{:.1}", times(most))) " times on average. " }
                } @else {
                    "Balance by order: every row comes once, and the temperature of " (mixture.temperature) " decides only which clips share a batch. What the manifest holds little of stays rare. "
                }
                "Epoch " (mixture.epoch) ": " (format!("{:.2} h", emitted / 3600.0)) " of " (format!("{:.2} h", held / 3600.0)) " in the manifest."
            }
            div.charts.wide { (pairs("Share of time", ["in the manifest", "in the epoch"], &bars, percent)) }
            @if languages.len() > DRAWN { p.quiet { "The " (DRAWN) " languages with most speech; " (count((languages.len() - DRAWN) as u64)) " more are not drawn." } }
        }
    }
}

fn rejects(data: &PageData) -> Markup {
    html! {
        section id="rejected-on-the-way" {
            h2 { "Rejected rows" }
            @if data.rejects.is_empty() { p.quiet { "None." } } @else {
                table {
                    thead { tr { th { "Stage" } th { "Reason" } th { "Class" } th.n { "Rows" } } }
                    tbody { @for (stage, reason, class, rows) in &data.rejects {
                        tr { td { (stage) } td { (reason) } td { (class) } td.n { (count(*rows)) } }
                    } }
                }
            }
        }
    }
}

/// Style sheet of all report pages.
pub const STYLE: &str = "
:root { color-scheme: light; --ink: #1d232b; --quiet: #66707c; --line: #e3e7ec; --accent: #2563a8; --second: #c2571a; --back: #f6f7f9; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.55 system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 80px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 4px; font-weight: 650; }
h2 { font-size: 19px; margin: 0 0 14px; font-weight: 620; }
h3 { font-size: 15px; margin: 22px 0 8px; font-weight: 620; }
.quiet { color: var(--quiet); font-size: 13.5px; margin: 8px 0 0; }
code { font: 12.5px ui-monospace, 'SF Mono', Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(165px, 1fr)); gap: 12px; margin: 24px 0; }
.tile { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px; }
.tile b { display: block; font-size: 24px; font-weight: 640; font-variant-numeric: tabular-nums; }
.tile span { color: var(--quiet); font-size: 13px; }
section { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: 22px 24px; margin: 16px 0; overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--quiet); font-weight: 560; font-size: 12.5px; padding: 4px 12px 6px 0; border-bottom: 1px solid var(--line); }
td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.total td { font-weight: 620; }
.meter { display: inline-block; height: 8px; background: #bcd3ec; border-radius: 2px; margin-right: 8px; }
.heard { color: var(--second); }
.marks del { color: #9a1b1b; text-decoration: line-through; } .marks ins { color: #1a6b34; text-decoration: underline; } .marks .sub { text-decoration: underline wavy; text-decoration-color: #7a4fb5; text-underline-offset: 3px; }
.worst td:first-child { min-width: 130px; }
.worst audio { display: block; height: 30px; width: 260px; margin-top: 6px; }
.right { background: #eef4fb; }
.few td { color: var(--quiet); } .about { width: auto; font-size: 14px; margin: 4px 0 18px; } .about th, .about td { border: 0; padding: 2px 14px 2px 0; text-align: start; vertical-align: top; } .tile.first b { white-space: nowrap; } .tile.first { grid-column: span 2; }
.chip { display: inline-block; border: 1px solid var(--line); border-radius: 12px; padding: 1px 10px; margin: 0 6px 6px 0; font-size: 13px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 20px; margin-top: 8px; }
figure { margin: 0; } figcaption { font-size: 13.5px; font-weight: 560; margin-bottom: 4px; }
.key { margin-left: 12px; font-weight: 400; color: var(--quiet); } .key::before { content: ''; display: inline-block; width: 12px; height: 3px; margin-right: 5px; vertical-align: middle; background: var(--accent); } .key.s1::before { background: var(--second); }
svg { width: 100%; height: auto; display: block; } svg text { font-size: 11px; fill: var(--quiet); }
.grid { stroke: var(--line); stroke-width: 1; } .line { fill: none; stroke: var(--accent); stroke-width: 1.6; stroke-linejoin: round; } .line.s1 { stroke: var(--second); } .dot { fill: var(--accent); } .dot.s1 { fill: var(--second); } .bar { fill: #7ea9d6; }
.charts.wide { grid-template-columns: minmax(0, 760px); } .b0 { fill: #b8c2cd; } .b1 { fill: var(--accent); } .key.b0::before { background: #b8c2cd; height: 8px; } .key.b1::before { height: 8px; } .limit { stroke: #b3261e; stroke-width: 1.4; stroke-dasharray: 5 3; } svg text.limit { stroke: none; fill: #b3261e; } svg text.name { font-size: 12.5px; fill: var(--ink); }
@media (max-width: 520px) { .charts { grid-template-columns: 1fr; } main { padding: 20px 12px; } }
";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::figures::Worst;
    use crate::wer::score;

    #[test]
    fn a_page_holds_its_figures_and_escapes_what_people_said() {
        let mut set = SetFigures {
            name: "validation".into(),
            ..Default::default()
        };
        let utterance = score("<|hi|> ek <b>do</b>", "<|ur|> ek");
        set.scores.add("hi", &utterance, 90.0);
        set.worst.push(Worst {
            segment_id: "rec_1".into(),
            lang: "hi".into(),
            words: utterance.words,
            reference: "ek <b>do</b>".into(),
            hypothesis: String::new(),
            clip: Some(b"fLaC".to_vec()),
        });
        let data = PageData {
            sets: vec![set],
            curves: Curves {
                loss: vec![(1.0, 2.0), (2.0, 1.5)],
                ..Default::default()
            },
            rejects: vec![("clean".into(), "quality_too_low".into(), "rule".into(), 1234)],
            ..Default::default()
        };
        let page = page(&data);
        assert!(page.contains("50.0 %") && page.contains("quality_too_low") && page.contains("1,234"));
        assert!(page.contains("ek &lt;b&gt;do") && !page.contains("<b>do"));
        assert!(page.contains("data:audio/flac;base64,ZkxhQw=="));
        assert!(page.contains("heard as") && page.contains(">ur<"));
        // The number of rejected rows links to their table.
        assert!(page.contains("<a href=\"#rejected-on-the-way\">1,234</a>"), "{page}");
        assert_eq!(page.matches("id=\"rejected-on-the-way\"").count(), 1);
        assert!(!page.contains("<script") && !page.contains("http"));
    }

    #[test]
    fn the_mixture_shows_what_is_held_and_what_is_emitted() {
        let language = |language: &str, seconds: f64, seconds_in_batches: f64, rows_in_batches: i64| MixtureShare {
            language: language.into(),
            rows: 10,
            seconds,
            rows_in_batches,
            seconds_in_batches,
        };
        let mut mixture = Mixture {
            epoch: 3,
            balance: "quota".into(),
            temperature: 0.3,
            languages: vec![language("as", 10.0, 40.0, 40), language("en", 90.0, 60.0, 7)],
        };
        let drawn = mixture_section(&mixture).into_string();
        for figure in [
            "10.0 %",
            "40.0 %",
            "90.0 %",
            "60.0 %",
            "rows of Assamese",
            "4.0 times",
            "Epoch 3",
        ] {
            assert!(drawn.contains(figure), "{figure}: {drawn}");
        }
        // Languages with the most speech come first.
        assert!(drawn.find(">en<") < drawn.find(">as<"));
        mixture.balance = "order".into();
        assert!(mixture_section(&mixture).into_string().contains("every row comes once"));
        mixture.languages.clear();
        assert!(mixture_section(&mixture).into_string().contains("no figures"));
    }

    #[test]
    fn an_empty_page_is_a_page() {
        assert!(page(&PageData::default()).contains("</html>"));
    }
}
