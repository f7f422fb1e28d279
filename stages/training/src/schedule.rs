//! The learning rate of each optimizer step, as NeMo's schedulers give it, and the two-phase recipe.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// How a rate goes over the steps of one phase. The first step is number 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "shape", rename_all = "snake_case")]
pub enum Schedule {
    /// NeMo's `CosineAnnealing`: up to `base` over `warmup` steps, then down a half cosine to `minimum` at
    /// `end`, and `minimum` from there on. With `constant` steps, the cosine ends that much earlier and the
    /// warm-up begins at 0.
    Cosine {
        base: f64,
        minimum: f64,
        warmup: u64,
        constant: u64,
        end: u64,
    },
    /// NeMo's `NoamAnnealing`: `base * d_model^-0.5 * min(s^-0.5, s * warmup^-1.5)`, never under `minimum`
    /// once warm.
    Noam {
        base: f64,
        minimum: f64,
        warmup: u64,
        d_model: u64,
    },
    /// Up to `base` over `warmup` steps (as cosine), then `base`.
    Constant { base: f64, warmup: u64 },
}

impl Schedule {
    /// The rate that optimizer step `step` uses.
    pub fn rate(&self, step: u64) -> f64 {
        match *self {
            Schedule::Cosine {
                base,
                minimum,
                warmup,
                constant,
                end,
            } => {
                if constant > 0 && warmup > 0 && step <= warmup {
                    return base * step as f64 / warmup as f64;
                }
                if constant == 0 && warmup > 0 && step <= warmup {
                    return warm(base, step, warmup);
                }
                let span = end.saturating_sub(warmup).saturating_sub(constant);
                let into = step.saturating_sub(warmup);
                if into >= span {
                    return minimum;
                }
                let progress = into as f64 / span as f64;
                minimum + (base - minimum) * 0.5 * (1.0 + (PI * progress).cos())
            }
            Schedule::Noam {
                base,
                minimum,
                warmup,
                d_model,
            } => {
                let s = step.max(1) as f64;
                let scale = (d_model.max(1) as f64).powf(-0.5);
                let rising = if warmup > 0 {
                    s * (warmup as f64).powf(-1.5)
                } else {
                    f64::INFINITY
                };
                let rate = base * scale * s.powf(-0.5).min(rising);
                if step > warmup { rate.max(minimum) } else { rate }
            }
            Schedule::Constant { base, warmup } => {
                if warmup > 0 && step <= warmup {
                    warm(base, step, warmup)
                } else {
                    base
                }
            }
        }
    }
}

fn warm(base: f64, step: u64, warmup: u64) -> f64 {
    base * (step + 1) as f64 / (warmup + 1) as f64
}

/// Two phases: the encoder is frozen until `unfreeze_step`, then everything learns. Each phase has its own
/// peak rate and its own warm-up, counted from its own first step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recipe {
    pub unfreeze_step: u64,
    pub phase1: Schedule,
    pub phase2: Schedule,
}

impl Recipe {
    /// Whether step `step` leaves the encoder as it is.
    pub fn encoder_frozen(&self, step: u64) -> bool {
        step < self.unfreeze_step
    }

    /// The rate that optimizer step `step` uses.
    pub fn rate(&self, step: u64) -> f64 {
        if self.encoder_frozen(step) {
            self.phase1.rate(step)
        } else {
            self.phase2.rate(step - self.unfreeze_step)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn golden() -> Vec<Value> {
        let folder = std::env::var("FLOW_TEST_GOLDEN_MODEL")
            .unwrap_or_else(|_| concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/golden/model").into());
        let text = std::fs::read_to_string(format!("{folder}/lr_schedules.json")).expect("golden lr_schedules.json");
        serde_json::from_str(&text).expect("a list of schedules")
    }

    #[test]
    fn rates_are_nemos() {
        let mut checked = 0;
        for case in golden() {
            let arguments = &case["args"];
            let number = |name: &str| arguments[name].as_u64().unwrap_or(0);
            let base = case["base_lr"].as_f64().expect("base_lr");
            let minimum = arguments["min_lr"].as_f64().expect("min_lr");
            let end = number("max_steps");
            // NeMo's warmup_ratio is a share of all steps.
            let warmup = match arguments["warmup_ratio"].as_f64() {
                Some(ratio) => (ratio * end as f64) as u64,
                None => number("warmup_steps"),
            };
            let schedule = match case["scheduler"].as_str() {
                Some("CosineAnnealing") => Schedule::Cosine {
                    base,
                    minimum,
                    warmup,
                    constant: number("constant_steps"),
                    end,
                },
                Some("NoamAnnealing") => Schedule::Noam {
                    base,
                    minimum,
                    warmup,
                    d_model: number("d_model"),
                },
                _ => continue,
            };
            checked += 1;
            for (step, expected) in case["lr_used_at_step"].as_array().expect("rates").iter().enumerate() {
                let (rate, expected) = (schedule.rate(step as u64), expected.as_f64().expect("a rate"));
                // Both are the same formula in 64 bits; only the order of the factors may differ.
                assert!(
                    (rate - expected).abs() <= 1e-12 * expected.abs().max(1e-6),
                    "{case}: step {step}: {rate} is not {expected}"
                );
            }
        }
        assert!(checked > 0);
    }

    #[test]
    fn phases_warm_up_on_their_own() {
        let recipe = Recipe {
            unfreeze_step: 10,
            phase1: Schedule::Constant { base: 1.0, warmup: 3 },
            phase2: Schedule::Cosine {
                base: 0.5,
                minimum: 0.0,
                warmup: 4,
                constant: 0,
                end: 20,
            },
        };
        assert!(recipe.encoder_frozen(9) && !recipe.encoder_frozen(10));
        assert_eq!((recipe.rate(0), recipe.rate(3), recipe.rate(9)), (0.25, 1.0, 1.0));
        assert_eq!((recipe.rate(10), recipe.rate(14), recipe.rate(30)), (0.1, 0.5, 0.0));
    }

    #[test]
    fn odd_numbers_of_steps_do_no_harm() {
        for schedule in [
            Schedule::Cosine {
                base: 1.0,
                minimum: 0.1,
                warmup: 5,
                constant: 9,
                end: 3,
            },
            Schedule::Cosine {
                base: 1.0,
                minimum: 0.1,
                warmup: 0,
                constant: 0,
                end: 0,
            },
            Schedule::Noam {
                base: 1.0,
                minimum: 0.0,
                warmup: 0,
                d_model: 0,
            },
            Schedule::Constant { base: 1.0, warmup: 0 },
        ] {
            for step in [0, 1, 2, 3, 5, 100, u64::MAX] {
                assert!(schedule.rate(step).is_finite(), "{schedule:?} at {step}");
            }
        }
    }
}
