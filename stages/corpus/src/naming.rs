//! Names of a row from the path of its recording, where the manifest has none.

use std::path::{Component, Path};

use flow_text::language_tag::{UNDETERMINED, tag_of};

/// Names of a row, by the path of its recording as the manifest has it.
#[derive(Clone, Debug, PartialEq)]
pub struct Named {
    /// The path without its extension, and where in the recording the row begins: `spk1/a`, `spk1/a@2.5`.
    pub segment_id: String,
    /// The folder of the path; none where it has none.
    pub shard_id: Option<String>,
}

/// Roots, `.` and `..` are left out: `/data/../a/b.wav` is `data/a/b`.
pub fn named(file: &str, start: Option<f64>) -> Named {
    let parts = Path::new(file).components().filter_map(|part| match part {
        Component::Normal(name) => name.to_str(),
        _ => None,
    });
    let parts: Vec<&str> = parts.collect();
    let plain = parts.join("/");
    let (folder, name) = plain.rsplit_once('/').unwrap_or(("", &plain));
    let stem = name.rsplit_once('.').map_or(name, |(stem, _)| stem);
    let mut segment_id = match folder {
        "" => stem.to_string(),
        folder => format!("{folder}/{stem}"),
    };
    if let Some(start) = start {
        segment_id.push_str(&format!("@{start}"));
    }
    Named {
        segment_id,
        shard_id: (!folder.is_empty()).then(|| folder.to_string()),
    }
}

/// The language of a row: the one that the manifest says, else the one of the setting, else that of the folder, where folders
/// are named like languages, else the one in a tag that the text begins with; empty where nothing tells. A setting of
/// [`UNDETERMINED`] counts last, where nothing else tells.
pub fn language(said: Option<&str>, setting: &str, folder: Option<&str>, text: &str) -> String {
    let said = said.filter(|lang| !lang.is_empty()).map(str::to_string);
    let named = said
        .or_else(|| names_all(setting).then(|| setting.to_string()))
        .or_else(|| folder.map(str::to_lowercase))
        .or_else(|| tag_of(text).map(str::to_string));
    named.unwrap_or_else(|| setting.to_string())
}

/// Whether a setting names the language of all rows that name none.
pub fn names_all(setting: &str) -> bool {
    !setting.is_empty() && setting != UNDETERMINED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_give_names() {
        let name = |file: &str, start| {
            let named = named(file, start);
            (named.segment_id, named.shard_id.unwrap_or_default())
        };
        let expected = |id: &str, shard: &str| (id.to_string(), shard.to_string());
        assert_eq!(name("a.wav", None), expected("a", ""));
        assert_eq!(name("hi/x/a.b.flac", Some(2.5)), expected("hi/x/a.b@2.5", "hi/x"));
        assert_eq!(name("/data/./../s/a", None), expected("data/s/a", "data/s"));
        assert_eq!(name("../..", None), expected("", ""));
        assert_eq!(name(".hidden", None), expected("", ""));
    }

    #[test]
    fn languages_are_found_in_their_order() {
        assert_eq!(language(Some("de"), "en", Some("hi"), "<|ta|> x"), "de");
        assert_eq!(language(Some(""), "en", Some("hi"), "<|ta|> x"), "en");
        assert_eq!(language(None, "", Some("Hi"), "<|ta|> x"), "hi");
        assert_eq!(language(None, "", None, "<|ta|> x"), "ta");
        assert_eq!(language(None, "", None, "x"), "");
        // `und` applies where all others are missing.
        assert_eq!(language(Some("de"), "und", Some("hi"), "<|ta|> x"), "de");
        assert_eq!(language(None, "und", Some("hi"), "<|ta|> x"), "hi");
        assert_eq!(language(None, "und", None, "<|ta|> x"), "ta");
        assert_eq!(language(None, "und", None, "x"), "und");
    }
}
