//! Sums and rates over a window of training steps.

use std::time::Instant;

use crate::trainer::StepReport;

/// Sums over some steps.
pub struct Window {
    pub since: Instant,
    pub steps: u64,
    good_steps: u64,
    loss: f64,
    pub seconds: f64,
    padded_seconds: f64,
    pub tokens: u64,
    /// Operations of the model's products, where the card is known.
    pub flops: f64,
    /// Those of them that the backward pass left out.
    pub flops_left_out: f64,
    /// Seconds without data to work on.
    pub waited_for_data: f64,
    /// Seconds that each rank waited for the others.
    pub waited: Vec<f64>,
}

impl Window {
    pub fn new() -> Self {
        Window {
            since: Instant::now(),
            steps: 0,
            good_steps: 0,
            loss: 0.0,
            seconds: 0.0,
            padded_seconds: 0.0,
            tokens: 0,
            flops: 0.0,
            flops_left_out: 0.0,
            waited_for_data: 0.0,
            waited: Vec::new(),
        }
    }

    pub fn add(&mut self, step: &StepReport) {
        self.steps += 1;
        if step.skipped.is_none() {
            self.good_steps += 1;
            self.loss += step.loss;
        }
        self.seconds += step.seconds();
        self.padded_seconds += step.padded_seconds;
        self.tokens += step.tokens;
        self.flops_left_out += step.flops_left_out;
        self.waited.resize(step.waited.len(), 0.0);
        for (sum, waited) in self.waited.iter_mut().zip(&step.waited) {
            *sum += waited;
        }
    }

    /// Operations of the model's products that were done.
    pub fn flops_done(&self) -> f64 {
        (self.flops - self.flops_left_out).max(0.0)
    }

    /// Share of the time without data to work on.
    pub fn starved(&self) -> f64 {
        self.waited_for_data / self.since.elapsed().as_secs_f64().max(self.waited_for_data).max(1e-9)
    }

    pub fn loss(&self) -> Option<f64> {
        (self.good_steps > 0).then(|| self.loss / self.good_steps as f64)
    }

    /// Share of what is computed that is padding.
    pub fn padding(&self) -> f64 {
        if self.padded_seconds > 0.0 {
            1.0 - self.seconds / self.padded_seconds
        } else {
            0.0
        }
    }
}
