//! Splits of a corpus: train, validation, test, by the names that corpora give them.

use std::path::Path;

use flow_corpus::ManifestError;

/// Names of one split, by Hugging Face's list of keywords. The first is the usual one.
const KEYWORDS: [&[&str]; 3] = [
    &["train", "training"],
    &["validation", "valid", "dev", "val"],
    &["test", "testing", "eval", "evaluation"],
];

/// The setting that represents all splits.
pub const ALL: &str = "all";

/// The usual name of a split: `dev` is `validation`.
pub fn usual(name: &str) -> &str {
    let known = KEYWORDS
        .iter()
        .find(|names| names.iter().any(|other| other.eq_ignore_ascii_case(name)));
    known.map_or(name, |names| names[0])
}

/// The split that a longer name mentions: `train-clean-100` and `my.train.v2` of `train`; the name itself where it mentions none.
pub fn spoken_of(name: &str) -> &str {
    let mut parts = name.split(['-', '.', '_', ' ']);
    parts
        .find_map(|part| {
            KEYWORDS
                .iter()
                .find(|names| names.contains(&part))
                .map(|names| names[0])
        })
        .unwrap_or(name)
}

/// Whether a folder is called by a split (`train`, `dev-clean`, `test_other`).
pub fn is_of_split(name: &str) -> bool {
    let first = name.split(['-', '_', '.']).next().unwrap_or_default();
    KEYWORDS.iter().any(|names| names.contains(&first))
}

/// Which splits are read: those that `setting` names (by their own name, by another of the same split, or by the split that their names mention), else the only one, else
/// those for training. Gives their places, and what is told of it where there are several, or the only one is not for training.
///
/// # Errors
/// Where there is none of the name, or none is for training.
pub fn chosen<N: AsRef<str>>(
    names: &[N],
    setting: &str,
    root: &Path,
) -> Result<(Vec<usize>, Option<String>), ManifestError> {
    let all: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    let places = |is: &dyn Fn(&str) -> bool| -> Vec<usize> { (0..all.len()).filter(|place| is(all[*place])).collect() };
    let mut distinct = all.clone();
    distinct.sort_unstable();
    distinct.dedup();
    let found = match setting {
        ALL => places(&|_| true),
        "" if distinct.len() <= 1 => places(&|_| true),
        "" => {
            let exact = places(&|name| usual(name) == "train");
            if exact.is_empty() {
                places(&|name| spoken_of(name) == "train")
            } else {
                exact
            }
        }
        wanted => {
            let exact = places(&|name| name.eq_ignore_ascii_case(wanted));
            let other = || places(&|name| usual(name) == usual(wanted));
            // `dev` is `dev-clean` and `dev-other`.
            let longer = || places(&|name| spoken_of(name) == usual(wanted));
            let first = [exact]
                .into_iter()
                .chain(std::iter::once_with(other))
                .chain(std::iter::once_with(longer));
            first.into_iter().find(|places| !places.is_empty()).unwrap_or_default()
        }
    };
    if found.is_empty() {
        let what = match setting {
            "" => "it has no split called train".to_string(),
            wanted => format!("it has no split {wanted:?}, which `split` names"),
        };
        return Err(ManifestError::manifest(
            root,
            format!(
                "{what}; its splits are {} (`split: all` reads all)",
                distinct.join(", ")
            ),
        ));
    }
    let mut read: Vec<&str> = found.iter().map(|place| all[*place]).collect();
    read.sort_unstable();
    read.dedup();
    let told = match distinct.as_slice() {
        [one] if is_of_split(one) && spoken_of(one) != "train" => {
            Some(format!("its only split is `{one}`, which is read"))
        }
        [_] => None,
        several => Some(format!(
            "splits {}; reading `{}`",
            several.join(", "),
            read.join("`, `")
        )),
    };
    Ok((found, told))
}

/// Refuses a `setting` that names another split than the one, `own`, of a single file or folder at `root`. One without a name is for
/// training.
///
/// # Errors
/// Where it does.
pub fn refuse_other(own: &str, setting: &str, root: &Path) -> Result<(), ManifestError> {
    let own = if own.is_empty() { "train" } else { own };
    let wanted = usual(setting);
    if setting.is_empty()
        || setting == ALL
        || setting.eq_ignore_ascii_case(own)
        || wanted == usual(own)
        || wanted == spoken_of(own)
    {
        return Ok(());
    }
    Err(ManifestError::manifest(
        root,
        format!("`split` names {setting:?}, and this is of the split {own:?}; name the folder that has all splits"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_split_for_training_is_read_unless_another_is_named() {
        let chosen = |names: &[&str], setting: &str| match chosen(names, setting, Path::new("c")) {
            Ok((places, told)) => (places, told.unwrap_or_default()),
            Err(error) => (Vec::new(), error.to_string()),
        };
        let three = ["dev", "test", "train"];
        assert_eq!(
            chosen(&three, ""),
            (vec![2], "splits dev, test, train; reading `train`".into())
        );
        assert_eq!(chosen(&three, "validation").0, [0]);
        assert_eq!(chosen(&three, "all").0, [0, 1, 2]);
        assert_eq!(chosen(&["anything"], ""), (vec![0], String::new()));
        assert_eq!(chosen(&["train-clean"], ""), (vec![0], String::new()));
        assert!(chosen(&["test"], "").1.contains("only split is `test`"));
        assert_eq!(
            chosen(&["train-clean-100", "train-other-500", "test-clean"], "").0,
            [0, 1]
        );
        assert_eq!(chosen(&["train-clean-100", "test-clean"], "test-clean").0, [1]);
        let of_libri_speech = ["dev-clean", "dev-other", "test-clean", "train-clean-100"];
        assert_eq!(chosen(&of_libri_speech, "dev").0, [0, 1]);
        assert_eq!(chosen(&of_libri_speech, "dev-other").0, [1]);
        assert!(is_of_split("dev-clean") && is_of_split("train") && !is_of_split("training camp"));
        let fits = |own: &str, setting: &str| refuse_other(own, setting, Path::new("c")).is_ok();
        for (own, setting) in [
            ("", "train"),
            ("dev-clean", "valid"),
            ("dev-clean", "DEV-clean"),
            ("x", "all"),
            ("x", ""),
        ] {
            assert!(fits(own, setting), "{own} {setting}");
        }
        for (own, setting) in [("", "test"), ("dev-clean", "dev-other"), ("train", "valid")] {
            assert!(!fits(own, setting), "{own} {setting}");
        }
        assert!(
            chosen(&["a", "b"], "")
                .1
                .contains("no split called train; its splits are a, b")
        );
        assert!(chosen(&three, "9_hours").1.contains("no split \"9_hours\""));
    }
}
