//! The commands that unpack what is not read as it is.

use std::path::Path;

use flow_kind::open_input_file;
use flow_storage::{Storage, is_url};

use crate::ManifestError;

/// How compressed files begin, the format, and the endings of their names; the first of these is what a program wants.
const PACKED: [(&[u8], &str, &[&str]); 4] = [
    (&[0x1f, 0x8b], "gzip", &["gz", "tgz"]),
    (b"BZh", "bzip2", &["bz2", "tbz2"]),
    (&[0xfd, b'7', b'z', b'X'], "xz", &["xz", "txz"]),
    (&[0x28, 0xb5, 0x2f, 0xfd], "zstd", &["zst", "tzst"]),
];

/// Why a file is not what its name says: it is compressed, or it is not, and the command that gives it what its name says. None where
/// name and beginning agree, or it cannot be read.
pub fn misnamed(storage: &Storage, path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let ending = name
        .rsplit_once('.')
        .map_or("", |(_, ending)| ending)
        .to_ascii_lowercase();
    let mut head = [0; 4];
    let file = open_input_file(storage, path).ok()?;
    let read = file.read_at(&mut head, 0).ok()?;
    let begins = PACKED.iter().find(|(mark, ..)| head[..read].starts_with(mark));
    let shown = if is_url(path) { name } else { path.to_str()? };
    let (why, command) = match begins {
        Some((_, format, endings)) if !endings.contains(&ending.as_str()) => {
            let packed = format!("{shown}.{}", endings[0]);
            let unpack = unpack(&packed)?;
            let why = format!("it is compressed by {format}, which its name does not say");
            (why, format!("mv -n {} {} && {unpack}", quoted(shown), quoted(&packed)))
        }
        None if PACKED.iter().any(|(_, _, endings)| endings.contains(&ending.as_str())) => {
            let tar = if ending.starts_with('t') { ".tar" } else { "" };
            let plain = format!("{}{tar}", &shown[..shown.len() - ending.len() - 1]);
            let why = format!("its name ends in .{ending}, and it is not compressed");
            (why, format!("mv -n {} {}", quoted(shown), quoted(&plain)))
        }
        _ => return None,
    };
    Some(match is_url(path) {
        true => format!("{why}; download it, and run `{command}`"),
        false => format!("{why}; run `{command}`"),
    })
}

/// What is wrong with a file: that it is misnamed, or else `why`.
pub fn misnamed_or(storage: &Storage, path: &Path, why: ManifestError) -> ManifestError {
    match misnamed(storage, path) {
        Some(misnamed) => ManifestError::manifest(path, misnamed),
        None => why,
    }
}

/// The command that unpacks a file beside itself, as a shell takes it; none where its name does not tell its format. An object has to be
/// downloaded first.
pub fn unpacking(path: &Path) -> Option<String> {
    let shown = match is_url(path) {
        true => path.file_name()?.to_str()?,
        false => path.to_str()?,
    };
    let command = unpack(shown)?;
    Some(match is_url(path) {
        true => format!("download it, and run `{command}`"),
        false => format!("run `{command}`"),
    })
}

fn unpack(shown: &str) -> Option<String> {
    let file = quoted(shown);
    let (stem, ending) = shown.rsplit_once('.')?;
    Some(match ending.to_ascii_lowercase().as_str() {
        "gz" | "tgz" => format!("gunzip {file}"),
        "bz2" | "tbz2" => format!("bunzip2 {file}"),
        "xz" | "txz" => format!("unxz {file}"),
        "zst" | "tzst" => format!("unzstd --rm {file}"),
        "zip" => format!("unzip {file} -d {}", quoted(stem)),
        _ => return None,
    })
}

/// The command that puts the files in a compressed tar beside it.
pub fn extracting(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    match (
        is_url(path),
        path.parent().filter(|folder| !folder.as_os_str().is_empty()),
    ) {
        (true, _) => format!("download it, and run `tar -xf {}`", quoted(&name)),
        (false, None) => format!("run `tar -xf {}`", quoted(&name)),
        (false, Some(folder)) => {
            let [file, folder] = [path, folder].map(|path| quoted(&path.to_string_lossy()));
            format!("run `tar -xf {file} -C {folder}`")
        }
    }
}

/// A word of a shell, which no option begins with.
fn quoted(word: &str) -> String {
    let word = if word.starts_with('-') {
        format!("./{word}")
    } else {
        word.to_owned()
    };
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+,:@%=".contains(c);
    match word.chars().all(is_plain) {
        true => word,
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_work_as_they_are_printed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("it's a.tar"), "said").unwrap();
        for (pack, packed, unpacked) in [
            ("gzip", "it's a.tar.gz", "it's a.tar"),
            ("gzip -S .tgz", "it's a.tar.tgz", "it's a.tar.tar"),
            ("bzip2", "it's a.tar.bz2", "it's a.tar"),
        ] {
            let shell = |command: &str| {
                let ran = std::process::Command::new("sh")
                    .arg("-c")
                    .arg(command)
                    .current_dir(folder.path())
                    .status();
                assert!(ran.unwrap().success(), "{command}");
            };
            shell(&format!("{pack} \"it's a.tar\""));
            let said = unpacking(&at(packed)).unwrap();
            shell(said.strip_prefix("run `").unwrap().strip_suffix('`').unwrap());
            std::fs::rename(at(unpacked), at("x")).unwrap();
            std::fs::rename(at("x"), at("it's a.tar")).unwrap();
        }
        assert_eq!(
            unpacking(Path::new("s3://b/a b.zip")).unwrap(),
            "download it, and run `unzip 'a b.zip' -d 'a b'`"
        );
        assert_eq!(unpacking(Path::new("-a.gz")).unwrap(), "run `gunzip ./-a.gz`");
        assert_eq!(unpacking(Path::new("a.tar")), None);
    }

    #[test]
    fn names_that_lie_are_told_with_a_command_that_works() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let shell = |command: &str| {
            let mut shell = std::process::Command::new("sh");
            let ran = shell.arg("-c").arg(command).current_dir(folder.path()).status();
            assert!(ran.unwrap().success(), "{command}");
        };
        for (pack, name, said, then) in [
            ("gzip -c", "it's a.tar", "compressed by gzip", "it's a.tar"),
            ("gzip -c", "-a.CSV", "compressed by gzip", "-a.CSV"),
            ("bzip2 -c", "a.parquet", "compressed by bzip2", "a.parquet"),
            (
                "cat",
                "a b.jsonl.gz",
                "ends in .gz, and it is not compressed",
                "a b.jsonl",
            ),
            ("cat", "b.tgz", "ends in .tgz, and it is not compressed", "b.tar"),
        ] {
            std::fs::write(at("plain"), "said").unwrap();
            shell(&format!("{pack} plain > \"./{name}\""));
            let why = misnamed(&Storage::default(), &at(name)).unwrap();
            assert!(why.contains(said), "{why}");
            shell(why.split_once("run `").unwrap().1.strip_suffix('`').unwrap());
            assert_eq!(std::fs::read(at(then)).unwrap(), b"said", "{name}");
            assert_eq!(misnamed(&Storage::default(), &at(then)), None);
        }
        shell("gzip plain");
        for name in ["plain.gz", "none.gz", "."] {
            assert_eq!(misnamed(&Storage::default(), &at(name)), None, "{name}");
        }
    }
}
