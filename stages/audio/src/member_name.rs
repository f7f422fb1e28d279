//! Names of tar members: which are the same, and which may not be written to disk.

use flow_kind::store::TOMBSTONE_SUFFIX;

/// The name without any leading `./`, which tar writers add or not as they like.
pub fn strip_dot_slash(name: &str) -> &str {
    let mut rest = name;
    while let Some(shorter) = rest.strip_prefix("./") {
        rest = shorter;
    }
    rest
}

/// Whether a member of this name could be written outside its shard's folder: empty, absolute, with a
/// backslash or NUL, or with a `..` component. A leading `./` does not count.
pub fn is_unsafe(name: &str) -> bool {
    let name = strip_dot_slash(name);
    name.is_empty() || name.starts_with('/') || name.contains(['\\', '\0']) || name.split('/').any(|part| part == "..")
}

/// The components of a safe name: no empty ones, no `.`. `None` where the name is unsafe, or where nothing
/// is left, or where it is one of the shard's own files (`metadata.parquet`, `audio_index.parquet`,
/// `<shard_id>.tar`), which a member must never replace.
pub fn safe_components<'a>(name: &'a str, shard_id: &str) -> Option<Vec<&'a str>> {
    if is_unsafe(name) {
        return None;
    }
    let parts: Vec<&str> = name
        .split('/')
        .filter(|part| !part.is_empty() && *part != ".")
        .collect();
    match parts[..] {
        [] => None,
        [only] if is_shard_file(only, shard_id) => None,
        _ => Some(parts),
    }
}

/// Whether `file_name` is one of the files that make a shard.
pub fn is_shard_file(file_name: &str, shard_id: &str) -> bool {
    // The note of a deleted tar counts like the tar.
    let file_name = file_name.strip_suffix(TOMBSTONE_SUFFIX).unwrap_or(file_name);
    file_name == "metadata.parquet"
        || file_name == "audio_index.parquet"
        || file_name.strip_suffix(".tar").is_some_and(|stem| stem == shard_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsafe_names_are_told_from_odd_ones() {
        for name in [
            "",
            "/etc/passwd",
            ".//etc/passwd",
            "./",
            "../x",
            "a/../../x",
            "a/..",
            "a\\b",
            "a\0b",
            "..",
        ] {
            assert!(is_unsafe(name), "{name:?}");
            assert_eq!(safe_components(name, "hi_0001"), None, "{name:?}");
        }
        for name in ["a", "./a", "..a", "a..", "a/b.flac", "a//b", ".../x"] {
            assert!(!is_unsafe(name), "{name:?}");
        }
        assert_eq!(strip_dot_slash("././a/./b"), "a/./b");
        assert_eq!(safe_components("./a//./b", "hi_0001"), Some(vec!["a", "b"]));
        assert_eq!(safe_components("././.", "hi_0001"), None);
    }

    #[test]
    fn a_member_may_not_replace_the_shard_itself() {
        for name in [
            "metadata.parquet",
            "./audio_index.parquet",
            "hi_0001.tar",
            "hi_0001.tar.flow-removed",
        ] {
            assert_eq!(safe_components(name, "hi_0001"), None, "{name}");
        }
        assert!(safe_components("hi_0002.tar", "hi_0001").is_some());
        assert!(safe_components("deep/metadata.parquet", "hi_0001").is_some());
    }
}
