//! Names of members in a shard's tar.

/// Whether a member of this name must never be written to disk: empty, absolute, with a backslash or NUL,
/// or with a `..` component. A leading `./` (repeated) does not count.
pub fn unsafe_name(name: &str) -> bool {
    let bare = strip_dot_slash(name);
    bare.is_empty() || bare.starts_with('/') || bare.contains(['\\', '\0']) || bare.split('/').any(|part| part == "..")
}

/// `name` without leading `./`, however often repeated.
pub fn strip_dot_slash(name: &str) -> &str {
    let mut name = name;
    while let Some(rest) = name.strip_prefix("./") {
        name = rest;
    }
    name
}

/// Whether a member of this name, written beside the tar, would overwrite one of the shard's own files.
pub fn names_shard_file(name: &str, shard_id: &str) -> bool {
    let mut parts = name.split('/').filter(|part| !part.is_empty() && *part != ".");
    let (Some(file), None) = (parts.next(), parts.next()) else {
        return false;
    };
    file == "metadata.parquet" || file == "audio_index.parquet" || file.strip_suffix(".tar") == Some(shard_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_safe_names_from_unsafe_ones() {
        for name in ["a.flac", "./a.flac", "d/e/a.flac", "a..flac", "./.a", "..a/b"] {
            assert!(!unsafe_name(name), "{name:?}");
        }
        for name in [
            "",
            "./",
            "/a",
            ".//etc/passwd",
            "../a",
            "a/../b",
            "a/..",
            "..\\a",
            "a\0",
            "././../a",
        ] {
            assert!(unsafe_name(name), "{name:?}");
        }
        assert_eq!(strip_dot_slash("././a"), "a");
    }

    #[test]
    fn knows_the_shards_own_files() {
        for name in ["metadata.parquet", "./audio_index.parquet", ".//hi_0001.tar"] {
            assert!(names_shard_file(name, "hi_0001"), "{name:?}");
        }
        for name in ["hi_0002.tar", "a/metadata.parquet", "metadata.parquet.flac", ""] {
            assert!(!names_shard_file(name, "hi_0001"), "{name:?}");
        }
    }
}
