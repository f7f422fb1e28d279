//! What a session tells of its steps and evaluations: lines of `metrics.jsonl`, and figures for the screen.

use std::time::Duration;

use flow_evaluation::validation::ValidationMetrics;
use flow_kernels::device::DeviceMemory;
use serde_json::{Value, json};

use super::Session;
use crate::device_figures::memory_figures;
use crate::error::TrainingError;
use crate::protect::risen;
use crate::ranks::OutOfMemory;
use crate::trainer::StepReport;
use crate::window::Window;

impl Session {
    /// Says for which micro-batch of the last step a device had no memory left, and how it was computed then.
    pub(super) fn out_of_memory(&mut self, event: &OutOfMemory) -> Result<(), TrainingError> {
        let OutOfMemory {
            segments,
            seconds,
            tokens,
            parts,
        } = event;
        self.note(json!({
            "kind": "out_of_memory", "segments": segments, "clips": segments.len(), "longest_seconds": seconds,
            "longest_tokens": tokens, "parts": parts,
        }))?;
        let then = match parts {
            1 => "its layers were computed again in the backward pass".to_owned(),
            parts => format!("it was computed in {parts} parts"),
        };
        (self.report)(json!({
            "notice": format!(
                "step {}: the device had no memory left for {} clips of up to {seconds:.1} s and {tokens} tokens; {then}. \
                 Lower `max_batch_seconds`, as this costs time",
                self.record.step,
                segments.len(),
            ),
            "step": self.record.step,
        }));
        Ok(())
    }

    /// Writes a line of metrics for the steps since the line before.
    pub(super) fn log(&mut self, report: &StepReport) -> Result<(), TrainingError> {
        let window = std::mem::replace(&mut self.window, Window::new());
        let seconds = window.since.elapsed().as_secs_f64();
        let mut line = json!({
            "kind": "train",
            "step": self.record.step,
            "micro_batches": self.record.micro_batches,
            "epoch": report.epoch,
            "loss": window.loss(),
            "lr": report.rate,
            "grad_norm": finite(report.gradient_norm),
            "audio_seconds": window.seconds,
            "padding": window.padding(),
            "tokens": window.tokens,
            "samples": self.record.samples,
            "encoder_frozen": report.encoder_frozen,
            "stage": self.stage.as_ref().map(|stage| &stage.name),
            "seconds": seconds,
            "waited_for_data": window.waited_for_data,
            "rank_waits": if window.waited.len() > 1 { json!(window.waited) } else { Value::Null },
            "memory_mib": resident_mib(),
            "flop_utilisation": self.device.utilisation(&self.settings, window.flops, seconds),
            "flop_utilisation_done": self.device.utilisation(&self.settings, window.flops_done(), seconds),
        });
        if let Value::Object(line) = &mut line {
            line.extend(memory_figures(self.device.memory(true)));
        }
        self.metrics.append(&line)
    }

    /// Shows figures of the steps since they were shown last.
    pub(super) fn show(&mut self, report: &StepReport) {
        let window = std::mem::replace(&mut self.shown, Window::new());
        let elapsed = window.since.elapsed().as_secs_f64().max(1e-9);
        let done = self.record.step - self.first_step;
        let left = self.settings.max_steps.saturating_sub(self.record.step);
        let eta = self.began.elapsed().as_secs_f64() / done.max(1) as f64 * left as f64;
        let memory = self.device.memory(false);
        let of_flops = |flops: f64| self.device.utilisation(&self.settings, flops, elapsed);
        let (utilisation, utilisation_done) = (of_flops(window.flops), of_flops(window.flops_done()));
        let on_device = memory.map_or(String::new(), |memory| {
            let DeviceMemory { used, peak, reserved } = memory;
            format!(
                ", {} MiB of the device ({} at most, {} reserved)",
                used >> 20,
                peak >> 20,
                reserved >> 20
            )
        });
        let of_peak = utilisation
            .zip(utilisation_done)
            .map_or(String::new(), |(share, done)| {
                let [share, done] = [share, done].map(|share| 100.0 * share);
                format!(", {share:.1} % of the device's arithmetic ({done:.1} % without cells that are left out)")
            });
        // The most important figures come first: a narrow screen cuts off the end.
        let line = format!(
            "step {} of {}, {}:{:02} left, {}epoch {}, loss {}, rate {:.2e}, gradient {}, encoder {}, {:.1} s of audio a step, {:.0} s/s, padding {:.0} %, waits for data {:.0} %{of_peak}, {} MiB{on_device}, {} micro-batches, {} tokens",
            self.record.step,
            self.settings.max_steps,
            eta as u64 / 60,
            eta as u64 % 60,
            (self.stage.as_ref()).map_or(String::new(), |stage| format!("stage {}, ", stage.name)),
            report.epoch,
            window.loss().map_or("none".to_owned(), |loss| format!("{loss:.2}")),
            report.rate,
            finite(report.gradient_norm).map_or("none".to_owned(), |norm| format!("{norm:.1}")),
            if report.encoder_frozen { "frozen" } else { "learns" },
            window.seconds / window.steps.max(1) as f64,
            window.seconds / elapsed,
            100.0 * window.padding(),
            100.0 * window.starved(),
            resident_mib(),
            self.record.micro_batches,
            self.record.tokens,
        );
        let mut figures = json!({
            "line": line,
            "step": self.record.step,
            "max_steps": self.settings.max_steps,
            "micro_batches": self.record.micro_batches,
            "stage": self.stage.as_ref().map(|stage| &stage.name),
            "epoch": report.epoch,
            "loss": window.loss().map(|loss| round(loss, 4)),
            "lr": report.rate,
            "grad_norm": finite(report.gradient_norm).map(|norm| round(norm, 3)),
            "encoder": if report.encoder_frozen { "frozen" } else { "learns" },
            "audio_s_per_step": round(window.seconds / window.steps.max(1) as f64, 1),
            "audio_s_per_s": round(window.seconds / elapsed, 1),
            "steps_per_s": round(window.steps as f64 / elapsed, 2),
            "padding": round(window.padding(), 3),
            "waits_for_data": round(window.starved(), 3),
            "tokens": self.record.tokens,
            "skipped_steps": self.record.skipped_steps,
            "memory_mib": resident_mib(),
            "flop_utilisation": utilisation.map(|share| round(share, 4)),
            "flop_utilisation_done": utilisation_done.map(|share| round(share, 4)),
            "eta_s": round(eta, 0),
        });
        if let Value::Object(figures) = &mut figures {
            figures.extend(memory_figures(memory));
        }
        (self.report)(figures);
    }

    /// Tells how protected languages do.
    pub(super) fn tell_protected(&mut self, spent: Duration) -> Result<(), TrainingError> {
        let rates = &self.record.protected;
        let languages: serde_json::Map<String, Value> = rates
            .iter()
            .map(|(language, rate)| (language.clone(), json!({ "wer": rate.now, "wer_before": rate.before })))
            .collect();
        let texts: Vec<String> = rates
            .iter()
            .map(|(language, rate)| {
                let [before, now] = [rate.before, rate.now].map(|rate| 100.0 * rate);
                format!("{language} {now:.1} % ({before:.1} % before training)")
            })
            .collect();
        let limit = self.settings.protect.max_rise;
        let more = match risen(rates, limit) {
            Some(risen) => format!("; more than {:.1} points worse: {risen}", 100.0 * limit),
            None => String::new(),
        };
        let step = self.record.step;
        self.metrics.append(&json!({
            "kind": "protected", "step": step, "languages": languages, "seconds": spent.as_secs_f64(),
        }))?;
        if !texts.is_empty() {
            let notice = format!("step {step}: WER of protected languages: {}{more}", texts.join(", "));
            (self.report)(json!({ "notice": notice, "step": step }));
        }
        Ok(())
    }

    /// Tells what an evaluation found.
    pub(super) fn tell_evaluation(&mut self, found: &ValidationMetrics, spent: Duration) -> Result<(), TrainingError> {
        let ValidationMetrics { scores, loss, .. } = found;
        let languages: serde_json::Map<String, Value> = scores
            .languages
            .iter()
            .map(|(lang, score)| {
                let value = json!({ "wer": finite(score.words.rate()), "cer": finite(score.characters.rate()), "utterances": score.utterances });
                (lang.clone(), value)
            })
            .collect();
        let (wer, cer) = (
            finite(scores.overall.words.rate()),
            finite(scores.overall.characters.rate()),
        );
        let step = self.record.step;
        self.metrics.append(&json!({
            "kind": "evaluation", "step": step, "loss": loss, "wer": wer, "cer": cer, "utterances": scores.overall.utterances,
            "wrong_tags": scores.overall.wrong_tags, "languages": languages, "seconds": spent.as_secs_f64(),
            "stage_end": self.ended_stage(),
        }))?;
        let ended = self
            .ended_stage()
            .map_or(String::new(), |stage| format!(", end of stage {stage}"));
        let rates = match (wer, cer) {
            (Some(wer), Some(cer)) => format!(
                "validation WER {:.1} %, CER {:.1} %{}",
                100.0 * wer,
                100.0 * cer,
                loss.map_or(String::new(), |loss| format!(", loss {loss:.4}"))
            ),
            // It could be read when training began.
            _ => "nothing of the validation sample could be read".to_owned(),
        };
        (self.report)(json!({
                "notice": format!(
                    "{}{}: {rates}",
                    if step == 0 { "before training".to_owned() } else { format!("step {step}") },
                    ended,
                ),
                "step": step, "validation_loss": loss.map(|loss| round(loss, 4)), "validation_wer": wer.map(|r| round(r, 4)), "validation_cer": cer.map(|r| round(r, 4)) }));
        Ok(())
    }
}

pub(super) fn finite(value: f64) -> Option<f64> {
    value.is_finite().then_some(value)
}

fn round(value: f64, digits: i32) -> f64 {
    let factor = 10f64.powi(digits);
    (value * factor).round() / factor
}

/// Resident memory of this process in MiB; 0 where the system does not report it.
fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
        .unwrap_or(0)
        / 1024
}
