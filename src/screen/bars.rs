//! One bar per stage in work, on a terminal.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use flow_base::escape::escape_line;
use flow_base::event::Event;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use flow_inspect::figures;
use flow_inspect::sentence::sentence;
use flow_inspect::table::count;

#[derive(Clone, Default)]
pub struct Bars {
    screen: MultiProgress,
    stages: Arc<Mutex<BTreeMap<String, Bar>>>,
}

struct Bar {
    bar: ProgressBar,
    rows: u64,
    rejects: u64,
}

impl Bars {
    pub fn event(&mut self, event: &Event) {
        let mut stages = self.stages.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::StageStarted { stage, run, .. } if *run > 0 => {
                let bar = self.screen.add(ProgressBar::new(*run));
                bar.set_style(style());
                bar.set_prefix(escape_line(stage).into_owned());
                bar.enable_steady_tick(Duration::from_millis(200));
                // A stage begins again after a failure, where the run goes on.
                let (rows, rejects) = stages.remove(stage).map_or((0, 0), |begun| {
                    begun.bar.finish_and_clear();
                    self.screen.remove(&begun.bar);
                    (begun.rows, begun.rejects)
                });
                stages.insert(stage.clone(), Bar { bar, rows, rejects });
            }
            Event::Committed {
                stage,
                rows_out,
                rejects,
                done,
                total,
                ..
            } => {
                if let Some(bar) = stages.get_mut(stage) {
                    bar.rows += rows_out;
                    bar.rejects += rejects;
                    bar.bar.set_length(*total);
                    bar.bar.set_position(*done);
                    let rejects = if bar.rejects == 0 {
                        String::new()
                    } else {
                        format!(", {} rejects", count(bar.rejects))
                    };
                    bar.bar.set_message(format!("{} rows{rejects}", count(bar.rows)));
                }
            }
            Event::StageFigures { figures, .. } if figures::is_notice(figures) => self.say(event),
            Event::StageFigures { stage, figures } => {
                if let Some(bar) = stages.get(stage) {
                    // Its partitions are not committed one by one.
                    if let Some((step, steps)) = figures::steps(figures) {
                        bar.bar.set_length(steps);
                        bar.bar.set_position(step);
                    }
                    bar.bar
                        .set_message(escape_line(&figures::on_one_line(figures)).into_owned());
                }
            }
            Event::StageFinished { stage, .. } => {
                // The parts of a global stage are named `stage:part`, and it ends as one.
                let part = format!("{stage}:");
                stages.retain(|name, bar| {
                    let ended = name == stage || name.starts_with(&part);
                    if ended {
                        bar.bar.finish_and_clear();
                        self.screen.remove(&bar.bar);
                    }
                    !ended
                });
                self.say(event);
            }
            // The command prints it at the end, with help.
            Event::RunFailed { .. } => {}
            Event::RunFinished { .. } => {
                drop(stages);
                self.clear();
                self.say(event);
            }
            event => self.say(event),
        }
    }

    /// Clears all bars.
    pub fn clear(&self) {
        let mut stages = self.stages.lock().unwrap_or_else(PoisonError::into_inner);
        for (_, bar) in std::mem::take(&mut *stages) {
            bar.bar.finish_and_clear();
        }
        // Errors of a closed terminal are ignored.
        let _ = self.screen.clear();
    }

    /// A line above the bars.
    fn say(&self, event: &Event) {
        let line = sentence(event);
        if self.screen.is_hidden() || self.screen.println(&line).is_err() {
            use std::io::Write;
            // With `--progress bars` where there is no terminal the lines remain.
            let _ = writeln!(std::io::stderr(), "{line}");
        }
    }
}

fn style() -> ProgressStyle {
    // The template is a constant that a test reads, so the fallback is never seen.
    ProgressStyle::with_template(TEMPLATE)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
}

const TEMPLATE: &str = "{prefix:24!} [{bar:24}] {human_pos}/{human_len} {elapsed} {wide_msg}";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_of_training_moves_with_its_steps() {
        let mut bars = Bars::default();
        // Ten steps were done before.
        bars.event(&Event::StageStarted {
            stage: "train".into(),
            kind: "training.train".into(),
            run: 30,
            reused: 10,
        });
        let mut at = |figures: serde_json::Value| {
            bars.event(&Event::StageFigures {
                stage: "train".into(),
                figures,
            });
            let stages = bars.stages.lock().unwrap();
            let bar = &stages["train"].bar;
            (bar.position(), bar.length())
        };
        let line = "step 22 of 40, 0:12 left";
        assert_eq!(
            at(serde_json::json!({"line": line, "step": 22, "max_steps": 40})),
            (22, Some(40))
        );
        // Figures without steps leave it where it is.
        assert_eq!(at(serde_json::json!({"line": "needs memory"})), (22, Some(40)));
        assert_eq!(
            at(serde_json::json!({"line": line, "step": 40, "max_steps": 40})),
            (40, Some(40))
        );
    }

    #[test]
    fn the_template_is_right() {
        assert!(ProgressStyle::with_template(TEMPLATE).is_ok());
    }
}
