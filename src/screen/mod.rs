//! Progress of a run on standard error.

mod bars;

use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};

use chrono::{SecondsFormat, Utc};
use flow_base::event::{Event, Events};
use flow_inspect::figures;
use flow_inspect::sentence::Plain;
use flow_spec::Style;

use crate::arguments::Progress;
use bars::Bars;

/// How errors are drawn: with a picture on a terminal, with colours unless `NO_COLOR` is set.
pub fn style() -> Style {
    if !std::io::stderr().is_terminal() {
        Style::Plain
    } else if std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty()) {
        Style::Unicode
    } else {
        Style::Colour
    }
}

/// The screen of one run.
pub struct Screen {
    bars: Option<Bars>,
    results: Arc<Mutex<Results>>,
}

/// Output of a run for standard output.
#[derive(Default)]
pub struct Results {
    /// Tables that stages reported, in their order, as text.
    pub tables: Vec<String>,
}

impl Screen {
    /// Shows `events` from now on.
    pub fn show(progress: Progress, events: &Events) -> Screen {
        let results = Arc::new(Mutex::new(Results::default()));
        let shared = Arc::clone(&results);
        events.listen(move |event| {
            let mut results = shared.lock().unwrap_or_else(PoisonError::into_inner);
            if let Event::StageFigures { figures, .. } = event {
                results.tables.extend(figures::table(figures));
            }
        });
        let bars = match progress {
            Progress::Auto if std::io::stderr().is_terminal() => true,
            Progress::Bars => true,
            Progress::Auto | Progress::Plain => {
                let mut plain = Plain::default();
                events.listen(move |event| {
                    if let Some(line) = plain.line(event) {
                        // A failure to write to the screen must not end the run.
                        let _ = writeln!(std::io::stderr(), "{line}");
                    }
                });
                false
            }
            Progress::Json => {
                json_lines(std::io::stderr(), events);
                false
            }
            Progress::None => false,
        };
        let bars = bars.then(Bars::default);
        if let Some(bars) = &bars {
            let mut bars = bars.clone();
            events.listen(move |event| bars.event(event));
        }
        Screen { bars, results }
    }

    /// Clears the bars; returns the text for standard output.
    pub fn close(self) -> Results {
        if let Some(bars) = &self.bars {
            bars.clear();
        }
        std::mem::take(&mut *self.results.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Writes each event as one JSON object on one line, with the time as `at`.
pub fn json_lines(mut file: impl Write + Send + 'static, events: &Events) {
    let mut broken = false;
    events.listen(move |event| {
        if broken {
            return;
        }
        let Ok(mut value) = serde_json::to_value(event) else {
            return;
        };
        if let Some(object) = value.as_object_mut() {
            object.insert(
                "at".to_string(),
                Utc::now().to_rfc3339_opts(SecondsFormat::Millis, true).into(),
            );
        }
        let line = format!("{value}\n");
        if let Err(error) = file.write_all(line.as_bytes()).and_then(|()| file.flush()) {
            broken = true;
            let _ = writeln!(std::io::stderr(), "warning: events are no longer written: {error}");
        }
    });
}
