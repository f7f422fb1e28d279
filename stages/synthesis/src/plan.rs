//! Plans the shards: hours are divided among languages, and hours of a language among shards.

use std::collections::BTreeMap;
use std::path::Path;

use flow_kind::StageError;

use super::known::PlannedShard;
use super::sentences::Side;
use super::settings::SynthesizeSettings;

/// Nominal duration of a clip in seconds, from which the length of a shard follows.
pub const CLIP_SECONDS: f64 = 3.0;
/// Most shards of a language.
const MOST_SHARDS: f64 = 100_000.0;

/// All shards, by name.
pub fn shards(settings: &SynthesizeSettings) -> Result<BTreeMap<String, PlannedShard>, StageError> {
    let mut planned = BTreeMap::new();
    for (lang, hours) in hours_by_language(settings)? {
        let held_out = settings.held_out.hours / 100.0;
        for (side, share) in [(Side::Train, 1.0 - held_out), (Side::Val, held_out)] {
            let seconds = hours * share * 3_600.0;
            let whole = f64::from(settings.clips_per_shard) * CLIP_SECONDS;
            // A millisecond that rounding left over is not a shard.
            let count = ((seconds - 1e-3) / whole).ceil().max(0.0);
            if count > MOST_SHARDS {
                let message = format!("{hours} hours of `{lang}` make more than {MOST_SHARDS} shards");
                return Err(StageError::setting("hours", message).with_help("raise `clips_per_shard`"));
            }
            for number in 0..count as u32 {
                let shard = PlannedShard {
                    lang: lang.clone(),
                    shard_id: format!("{lang}_{}_{number:04}", side.name()),
                    side,
                    seconds: (seconds - f64::from(number) * whole).min(whole),
                };
                planned.insert(shard.name(), shard);
            }
        }
    }
    Ok(planned)
}

/// An entry of `languages`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Asked {
    Share(f64),
    Hours(f64),
}

fn hours_by_language(settings: &SynthesizeSettings) -> Result<BTreeMap<String, f64>, StageError> {
    let asked = if settings.languages.is_empty() {
        let names = languages_in(&settings.texts)?;
        names.into_iter().map(|name| (name, Asked::Share(1.0))).collect()
    } else {
        asked(&settings.languages)?
    };
    let share = |asked: &Asked| match asked {
        Asked::Share(share) => *share,
        Asked::Hours(_) => 0.0,
    };
    let shares: f64 = asked.values().map(share).sum();
    let hours = |asked: Asked| match asked {
        Asked::Share(share) => settings.hours * share / shares,
        Asked::Hours(hours) => hours,
    };
    Ok(asked.into_iter().map(|(name, asked)| (name, hours(asked))).collect())
}

/// Names and what they ask for, from `hi`, `hi=2` and `hi=1.5h`.
fn asked(entries: &[String]) -> Result<BTreeMap<String, Asked>, StageError> {
    let mut found = BTreeMap::new();
    for (number, entry) in entries.iter().enumerate() {
        let wrong = |why: &str| {
            StageError::setting(format!("languages[{number}]"), format!("{entry:?} {why}"))
                .with_help("write `hi`, `hi=2` (twice the share of the others) or `hi=1.5h` (hours)")
        };
        let (name, amount) = match entry.split_once('=') {
            Some((name, amount)) => (name.trim(), Some(amount.trim())),
            None => (entry.trim(), None),
        };
        if !is_name(name) {
            return Err(wrong("does not begin with the name of a language"));
        }
        let asked = match amount.map(|amount| (amount.strip_suffix('h').unwrap_or(amount), amount.ends_with('h'))) {
            None => Asked::Share(1.0),
            Some((amount, in_hours)) => match amount.parse::<f64>() {
                Ok(amount) if amount > 0.0 && amount <= 1e6 && in_hours => Asked::Hours(amount),
                Ok(amount) if amount > 0.0 && amount <= 1e6 => Asked::Share(amount),
                _ => return Err(wrong("has no amount above 0 after `=`")),
            },
        };
        if found.insert(name.to_owned(), asked).is_some() {
            return Err(wrong("names a language for the second time"));
        }
    }
    Ok(found)
}

/// Whether a name is valid as a file name and a folder name.
fn is_name(name: &str) -> bool {
    let first = name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    first
        && name.len() <= 32
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
}

/// Every `<name>.yaml` of a folder.
fn languages_in(folder: &Path) -> Result<Vec<String>, StageError> {
    let failed = |error: std::io::Error| {
        StageError::setting("texts", format!("cannot read {}: {error}", folder.display()))
            .with_help("`texts` is the folder of the languages' files, `<lang>.yaml`")
    };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let name = name.to_str().and_then(|name| name.strip_suffix(".yaml"));
        names.extend(name.filter(|name| is_name(name)).map(str::to_owned));
    }
    if names.is_empty() {
        let message = format!("{} holds no file of a language, `<lang>.yaml`", folder.display());
        return Err(StageError::setting("texts", message));
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(with: serde_json::Value) -> SynthesizeSettings {
        let mut all = serde_json::json!({"out": "o", "hours": 1.0});
        all.as_object_mut().unwrap().extend(with.as_object().unwrap().clone());
        serde_json::from_value(all).unwrap()
    }

    fn planned(with: serde_json::Value) -> Vec<(String, f64)> {
        let shards = shards(&settings(with)).unwrap();
        shards
            .into_values()
            .map(|shard| (shard.name(), (shard.seconds * 1e3).round() / 1e3))
            .collect()
    }

    #[test]
    fn hours_are_shared_out_among_languages_sides_and_shards() {
        let shards = planned(serde_json::json!({
            "languages": ["hi=3", "en", "ta=0.1h"], "clips_per_shard": 400, "held_out": {"hours": 10.0}
        }));
        let named = |name: &str, seconds| (name.to_owned(), seconds);
        // 2,700 s of hi, 900 s of en, 360 s of ta; a whole shard is 1,200 s.
        assert_eq!(
            shards,
            [
                named("en/en_train_0000", 810.0),
                named("en/en_val_0000", 90.0),
                named("hi/hi_train_0000", 1200.0),
                named("hi/hi_train_0001", 1200.0),
                named("hi/hi_train_0002", 30.0),
                named("hi/hi_val_0000", 270.0),
                named("ta/ta_train_0000", 324.0),
                named("ta/ta_val_0000", 36.0),
            ]
        );
        let more = planned(serde_json::json!({"languages": ["hi"], "hours": 2.0, "held_out": {"hours": 0.0}}));
        let less = planned(serde_json::json!({"languages": ["hi"], "hours": 1.0, "held_out": {"hours": 0.0}}));
        assert_eq!((more.len(), &more[..less.len()]), (6, &less[..]));
        assert_eq!(planned(serde_json::json!({"languages": ["hi"], "hours": 0.0})), []);
    }

    #[test]
    fn wrong_languages_are_named_with_their_place() {
        for (languages, expected) in [
            (vec!["hi", "../x"], "languages[1]"),
            (vec![""], "languages[0]"),
            (vec!["hi=0"], "languages[0]"),
            (vec!["hi=nan"], "languages[0]"),
            (vec!["hi=-1h"], "languages[0]"),
            (vec!["hi", "hi=2"], "languages[1]"),
        ] {
            match shards(&settings(serde_json::json!({"languages": languages}))) {
                Err(StageError::Setting { path, help, .. }) => assert!(path == expected && help.is_some(), "{path}"),
                other => panic!("{languages:?} gave {other:?}"),
            }
        }
        let temp = tempfile::tempdir().unwrap();
        for texts in [temp.path().to_owned(), temp.path().join("none")] {
            let error = shards(&settings(serde_json::json!({"texts": texts}))).unwrap_err();
            assert!(matches!(error, StageError::Setting { path, .. } if path == "texts"));
        }
        assert!(
            shards(&settings(
                serde_json::json!({"languages": ["hi"], "hours": 1e6, "clips_per_shard": 1})
            ))
            .is_err()
        );
    }

    #[test]
    fn settings_out_of_range_are_named() {
        for (with, expected) in [
            (serde_json::json!({"hours": -1.0}), "hours"),
            (serde_json::json!({"speed": [200, 100]}), "speed"),
            (serde_json::json!({"pitch": [0, 100]}), "pitch"),
            (serde_json::json!({"gain": [-3.0, 3.0]}), "gain"),
            (serde_json::json!({"clips_per_shard": 0}), "clips_per_shard"),
            (serde_json::json!({"min_duration": 30.0}), "min_duration"),
            (serde_json::json!({"noise": {"share": 1.5}}), "noise.share"),
            (serde_json::json!({"room": {"decay": [0.0, 1.0]}}), "room.decay"),
            (serde_json::json!({"variants": ["-w/tmp/x"]}), "variants[0]"),
            (
                serde_json::json!({"variants": ["f1"], "held_out": {"voices": ["f1"]}}),
                "variants",
            ),
            (
                serde_json::json!({"held_out": {"voices": ["f9"]}}),
                "held_out.voices[0]",
            ),
            (
                serde_json::json!({"held_out": {"sentences": 100.0}}),
                "held_out.sentences",
            ),
            (serde_json::json!({"out": ""}), "out"),
        ] {
            match settings(with.clone()).check() {
                Err(StageError::Setting { path, .. }) => assert_eq!(path, expected, "{with}"),
                other => panic!("{with} gave {other:?}"),
            }
        }
        settings(serde_json::json!({})).check().unwrap();
        let mut wrong = settings(serde_json::json!({}));
        wrong.hours = f64::NAN;
        assert!(wrong.check().is_err());
    }
}
