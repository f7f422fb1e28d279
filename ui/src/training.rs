//! Curves of several trainings in one chart, with live updates.

use std::convert::Infallible;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::extract::{Query, State};
use axum::response::sse::{Event as ServerSentEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use flow_evaluation::chart::{self, Points};
use flow_evaluation::page::percent;
use flow_inspect::frozen::Frozen;
use flow_storage::Storage;
use maud::{Markup, html};
use serde_json::Value;

use super::address::address;
use super::app::{App, Shared, answer};
use super::differences::{Settings, differences, on_one_line};
use super::follower::last_lines;
use super::layout::{Section, page};
use super::page_error::PageError;
use super::state_directory::store;
use super::summaries::{summary, titled};
use super::table_ref::{Pairs, TableRef};

/// Runs in which trainings are looked for, and trainings that are drawn at once.
const RUNS: usize = 50;
const DRAWN: usize = 4;
/// The longest line that is read of a training's figures.
const MAX_LINE: u64 = 1 << 20;
/// Points of a curve: of more, every second one is kept.
const POINTS: usize = 4000;
const PAUSE: Duration = Duration::from_secs(2);

/// The kind of stage that trains, and of the one that finds the rows that it learned worst.
const KIND: &str = "training.train";
const RANK: &str = "training.rank";

/// A training, whose figures are beside its checkpoints.
struct Training {
    run: String,
    stage: String,
    file: PathBuf,
    /// Of its stage, and parameters of its pipeline.
    settings: Settings,
    title: String,
    note: Option<String>,
    /// The list of its rows with the highest losses.
    hard_rows: Option<String>,
}

/// The trainings of a pipeline: stage, and file of figures.
fn of_pipeline(storage: &Storage, frozen: &Frozen) -> Vec<(String, PathBuf)> {
    let with_file = |stage: &str| {
        let name = format!("{stage}.checkpoints");
        let (_, folder) = frozen.settings.iter().find(|(known, _)| *known == name)?;
        let folder = flow_training::checkpoint::bucket::local_folder(storage, folder).ok()?;
        Some((stage.to_owned(), folder.join("metrics.jsonl")))
    };
    frozen.stages_of(KIND).filter_map(with_file).collect()
}

fn trainings(app: &App) -> Result<Vec<Training>, PageError> {
    let store = store(app)?;
    let mut runs = store.runs()?;
    runs.reverse();
    let mut found: Vec<Training> = Vec::new();
    for run in runs.into_iter().take(RUNS) {
        let frozen = Frozen::read(&store.run_folder(&run)?.join("spec.yaml"));
        for (stage, file) in of_pipeline(&app.settings.storage, &frozen) {
            let hard_rows = frozen.stages_of(RANK).next().map(|stage| hardest_first(&run, stage));
            // Runs that continued the same training share the file.
            if file.is_file() && !found.iter().any(|known| known.file == file) {
                found.push(Training {
                    title: titled(app, &run, &stage),
                    note: summary(app, &run, false).note.clone(),
                    settings: frozen.settings_of(&stage),
                    run: run.clone(),
                    stage,
                    file,
                    hard_rows,
                });
            }
        }
    }
    Ok(found)
}

/// The address of the rows that a stage ranked by their losses.
fn hardest_first(run: &str, stage: &str) -> String {
    let table = TableRef::Artifact {
        run: run.to_owned(),
        stage: stage.to_owned(),
        port: "rows".into(),
    };
    let order = [("sort", "mean_loss"), ("desc", "1")].map(|(name, value)| (name.to_owned(), value.to_owned()));
    table.link("/rows", &order)
}

fn link_to_hard_rows(training: &Training) -> Markup {
    html! { @if let Some(address) = &training.hard_rows { " " a href=(address) { "Rows with the highest losses" } } }
}

/// What is drawn: kind of line, figure, title, whether it is a share.
const CURVES: [(&str, &str, &str, bool); 7] = [
    ("train", "loss", "Training loss", false),
    ("evaluation", "loss", "Validation loss", false),
    ("evaluation", "wer", "Validation WER", true),
    ("evaluation", "cer", "Validation CER", true),
    ("train", "lr", "Learning rate", false),
    (
        "train",
        "audio_seconds_per_second",
        "Seconds of audio per second",
        false,
    ),
    ("train", "grad_norm", "Gradient norm", false),
];

/// The curves of a file of figures, in the order of [`CURVES`]. Lines that are damaged or cut are passed over.
fn curves(file: &Path) -> std::io::Result<[Points; CURVES.len()]> {
    let mut curves: [Points; CURVES.len()] = Default::default();
    // How many lines of a curve there are to each point that is kept, and how many came.
    let mut strides = [(1usize, 0usize); CURVES.len()];
    let mut reader = BufReader::new(flow_kind::open_regular_file(file)?);
    let mut line = Vec::new();
    loop {
        line.clear();
        if (&mut reader).take(MAX_LINE).read_until(b'\n', &mut line)? == 0 {
            return Ok(curves);
        }
        let Ok(figures) = serde_json::from_slice::<Value>(&line) else {
            continue;
        };
        let Some(step) = figures["step"].as_f64() else { continue };
        for (index, (kind, figure, ..)) in CURVES.iter().enumerate() {
            let Some(value) = (figures["kind"] == *kind).then(|| figures[*figure].as_f64()).flatten() else {
                continue;
            };
            let (stride, came) = &mut strides[index];
            *came += 1;
            let points = &mut curves[index];
            if (*came - 1) % *stride == 0 {
                points.push((step, value));
            }
            if points.len() > POINTS {
                let mut place = 0;
                points.retain(|_| {
                    place += 1;
                    place % 2 == 1
                });
                *stride *= 2;
            }
        }
    }
}

/// The progress of a training: its last step and validation error rate, from the end of its metrics.
fn latest(file: &Path) -> String {
    let lines = last_lines(file, None).map(|(_, lines)| lines).unwrap_or_default();
    let figures: Vec<Value> = lines
        .iter()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect();
    let last = |name: &str| figures.iter().rev().find_map(|line| line[name].as_f64());
    let wer = figures.iter().rev().filter(|line| line["kind"] == "evaluation");
    let wer = wer.into_iter().find_map(|line| line["wer"].as_f64());
    let step = last("step").map(|step| format!("step {step}"));
    let wer = wer.map(|wer| format!("validation WER {}", percent(wer)));
    step.into_iter().chain(wer).collect::<Vec<_>>().join(", ")
}

fn chosen<'t>(all: &'t [Training], pairs: &[(String, String)]) -> Vec<&'t Training> {
    let wanted = |training: &&Training| {
        pairs
            .iter()
            .any(|(name, value)| name == "of" && *value == key(training))
    };
    let chosen: Vec<&Training> = all.iter().filter(wanted).take(DRAWN).collect();
    if chosen.is_empty() {
        all.iter().take(1).collect()
    } else {
        chosen
    }
}

fn key(training: &Training) -> String {
    format!("{}/{}", training.run, training.stage)
}

fn charts(trainings: &[&Training]) -> Markup {
    let all: Vec<(&str, std::io::Result<_>)> = trainings
        .iter()
        .map(|training| (training.title.as_str(), curves(&training.file)))
        .collect();
    html! {
        @for (name, read) in &all { @if let Err(error) = read { p.failed dir="auto" { (name) ": " (error) } } }
        div.charts { @for (index, (_, _, title, is_share)) in CURVES.iter().enumerate() {
            @let series: Vec<(&str, Points)> = all.iter().filter_map(|(name, curves)| Some((*name, curves.as_ref().ok()?[index].clone()))).filter(|(_, points)| !points.is_empty()).collect();
            @if !series.is_empty() { (chart::lines(title, &series, if *is_share { percent } else { short })) }
        } }
    }
}

fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        small if small < 0.01 => format!("{value:.1e}"),
        small if small < 10.0 => format!("{value:.2}"),
        _ => format!("{value:.0}"),
    }
}

pub async fn list(State(app): State<Shared>, Query(pairs): Query<Pairs>) -> Response {
    answer(&app, move |app| {
        let all = trainings(app)?;
        let drawn = chosen(&all, &pairs);
        let keys: Vec<String> = drawn.iter().map(|training| key(training)).collect();
        let differ = differences(&all.iter().map(|training| training.settings.clone()).collect::<Vec<_>>());
        let live = address("/training/live", keys.iter().map(|key| ("of", key.as_str())));
        let main = html! {
            @if all.is_empty() { p { "No run of this state directory trained a model." } }
            @if let [only] = all.as_slice() { p { a href={ "/runs/" (only.run) } { (only.title) } " " span.quiet { (latest(&only.file)) } (link_to_hard_rows(only)) } }
            @if all.len() > 1 {
                form.filters action="/training" method="get" {
                    fieldset { legend { "Trainings, " (DRAWN) " at most" }
                        @for (training, differs) in all.iter().zip(&differ) { @let key = key(training);
                            label.check { input type="checkbox" name="of" value=(key) checked[keys.contains(&key)];
                                span { a href={ "/runs/" (training.run) } { (training.title) } " " (latest(&training.file)) (link_to_hard_rows(training)) @if let Some(note) = &training.note { br; span dir="auto" { (note) } } @if !differs.is_empty() { br; span.quiet dir="auto" { (on_one_line(differs)) } } }
                            } }
                    }
                    button { "Draw" }
                }
            }
            @if !all.is_empty() { div #live data-live=(live) { (charts(&drawn)) } }
        };
        Ok(page(app, Section::Training, "Training", &main))
    })
    .await
}

/// The charts, each time the figures changed.
pub async fn follow(State(app): State<Shared>, Query(pairs): Query<Pairs>) -> Response {
    let events = futures::stream::unfold((app, pairs, None::<Vec<u64>>), |(app, pairs, shown)| async move {
        tokio::time::sleep(PAUSE).await;
        let (worker, query) = (app.clone(), pairs.clone());
        let drawn = tokio::task::spawn_blocking(move || {
            let all = trainings(&worker).ok()?;
            let chosen = chosen(&all, &query);
            let sizes = chosen
                .iter()
                .map(|training| training.file.metadata().map_or(0, |file| file.len()));
            let sizes: Vec<u64> = sizes.collect();
            // Charts of a training that has ended are not drawn again.
            let has_grown = shown.is_some_and(|before| before != sizes);
            Some((sizes, has_grown.then(|| charts(&chosen).into_string())))
        });
        let (sizes, drawn) = drawn.await.ok()??;
        let event = match drawn {
            Some(drawn) => ServerSentEvent::default().event("part").data(drawn.replace('\r', " ")),
            None => ServerSentEvent::default().comment(""),
        };
        Some((Ok::<_, Infallible>(event), (app, pairs, Some(sizes))))
    });
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use flow_storage::Storage;

    #[test]
    fn a_training_is_the_stage_that_trains_and_no_other_with_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let spec = folder.path().join("spec.yaml");
        let text = "stages:\n  pieces: {uses: tokenizer.read, with: {checkpoints: /c}}\n  load: {uses: sampling.load, with: {checkpoints: /c}}\n  train: {uses: training.train, with: {checkpoints: /c}}\n  more/train: {uses: training.train, with: {checkpoints: /d}}\n";
        std::fs::write(&spec, text).unwrap();
        let found = of_pipeline(&Storage::default(), &Frozen::read(&spec));
        let expected = [("train", "/c/metrics.jsonl"), ("more/train", "/d/metrics.jsonl")];
        assert_eq!(
            found,
            expected.map(|(stage, file)| (stage.to_owned(), PathBuf::from(file)))
        );
    }

    #[test]
    fn curves_are_read_past_damage_and_thinned() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("metrics.jsonl");
        let mut text = String::from(
            "no JSON\n{\"kind\":\"train\"}\n{\"kind\":\"evaluation\",\"step\":5,\"wer\":0.25,\"loss\":null}\n",
        );
        for step in 0..3 * POINTS {
            text.push_str(&format!("{{\"kind\":\"train\",\"step\":{step},\"loss\":1.5}}\n"));
        }
        text.push_str("{\"kind\":\"train\",\"step\":9");
        std::fs::write(&file, text).unwrap();
        let curves = curves(&file).unwrap();
        assert_eq!(curves[2], [(5.0, 0.25)]);
        assert!(curves[1].is_empty());
        let steps: Vec<f64> = curves[0].iter().map(|(step, _)| *step).collect();
        assert!(steps.len() <= POINTS && steps.len() > POINTS / 2);
        assert!(
            steps.windows(2).all(|pair| pair[1] - pair[0] == 4.0),
            "{:?}",
            &steps[..8]
        );
    }

    #[test]
    fn the_latest_figures_are_told() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("metrics.jsonl");
        assert_eq!(latest(&file), "");
        std::fs::write(
            &file,
            "{\"kind\":\"evaluation\",\"step\":20,\"wer\":0.5}\n{\"kind\":\"evaluation\",\"step\":40,\"wer\":0.475}\n{\"kind\":\"train\",\"step\":41}\n{\"kind\":\"train\",\"step\":4",
        )
        .unwrap();
        assert_eq!(latest(&file), "step 41, validation WER 47.5 %");
    }
}
