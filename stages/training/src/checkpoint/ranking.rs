//! Which checkpoints are the best, by a figure of the validation sample.

use std::fmt;

use schemars::JsonSchema;
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::record::CheckpointRecord;

/// A figure of the validation sample. Lower is better.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Monitor {
    /// Word error rate.
    #[default]
    ValWer,
    /// Character error rate.
    ValCer,
    /// Loss.
    ValLoss,
}

impl Monitor {
    pub fn is_default(&self) -> bool {
        *self == Monitor::default()
    }
}

impl fmt::Display for Monitor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Monitor::ValWer => "word error rate",
            Monitor::ValCer => "character error rate",
            Monitor::ValLoss => "loss",
        })
    }
}

/// The figures of one evaluation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Figures {
    pub wer: Option<f64>,
    pub cer: Option<f64>,
    pub loss: Option<f64>,
}

impl Figures {
    pub fn of(&self, monitor: Monitor) -> Option<f64> {
        match monitor {
            Monitor::ValWer => self.wer,
            Monitor::ValCer => self.cer,
            Monitor::ValLoss => self.loss,
        }
    }
}

impl CheckpointRecord {
    /// The figure of this very model; none where it was not evaluated, or the figure is not recorded.
    pub fn figure(&self, monitor: Monitor) -> Option<f64> {
        let figures = Figures {
            wer: self.validation_wer,
            cer: self.validation_cer,
            loss: self.validation_loss,
        };
        figures.of(monitor)
    }
}

/// How many of the best checkpoints are kept, and by which figure they are ranked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ranking {
    pub monitor: Monitor,
    pub keep: usize,
}

impl Ranking {
    /// Steps of the best checkpoints, the best first; of equal ones the older is better. Those without a figure are never among
    /// them.
    pub fn best(self, figures: impl IntoIterator<Item = (u64, Option<f64>)>) -> Vec<u64> {
        let known = figures.into_iter().filter_map(|(step, figure)| Some((figure?, step)));
        let mut known: Vec<(f64, u64)> = known.collect();
        known.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        known.into_iter().take(self.keep).map(|(_, step)| step).collect()
    }
}

/// The setting `keep_best`: `true` for one, `false` for none, or a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeepBest(pub usize);

impl Serialize for KeepBest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            0 | 1 => serializer.serialize_bool(self.0 == 1),
            count => serializer.serialize_u64(count as u64),
        }
    }
}

impl<'de> Deserialize<'de> for KeepBest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Count;
        impl Visitor<'_> for Count {
            type Value = KeepBest;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("true, false or a number of checkpoints")
            }

            fn visit_bool<E: de::Error>(self, one: bool) -> Result<KeepBest, E> {
                Ok(KeepBest(usize::from(one)))
            }

            fn visit_u64<E: de::Error>(self, count: u64) -> Result<KeepBest, E> {
                usize::try_from(count).map(KeepBest).map_err(E::custom)
            }

            fn visit_i64<E: de::Error>(self, count: i64) -> Result<KeepBest, E> {
                usize::try_from(count).map(KeepBest).map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Count)
    }
}

impl JsonSchema for KeepBest {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "KeepBest".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "description": "How many of the best checkpoints are kept: `true` (one), `false` (none) or a number.",
            "type": ["boolean", "integer"],
            "minimum": 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_are_the_lowest_and_of_equal_ones_the_oldest() {
        let figures = [
            (10, Some(0.4)),
            (20, None),
            (30, Some(0.2)),
            (40, Some(0.3)),
            (50, Some(0.2)),
        ];
        let best = |keep| {
            let monitor = Monitor::ValWer;
            Ranking { monitor, keep }.best(figures)
        };
        assert_eq!(best(3), [30, 50, 40]);
        assert_eq!((best(0), best(9)), (vec![], vec![30, 50, 40, 10]));
    }

    #[test]
    fn keep_best_is_a_switch_or_a_number() {
        for (text, count) in [("true", 1), ("false", 0), ("5", 5), ("1", 1)] {
            let read: KeepBest = serde_json::from_str(text).unwrap();
            assert_eq!(read, KeepBest(count));
            assert_eq!(
                serde_json::from_value::<KeepBest>(serde_json::json!(read)).unwrap(),
                read
            );
        }
        assert_eq!(serde_json::to_string(&KeepBest(1)).unwrap(), "true");
        assert!(serde_json::from_str::<KeepBest>("-1").is_err() && serde_json::from_str::<KeepBest>("1.5").is_err());
    }
}
