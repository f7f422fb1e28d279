//! The commands that unpack what is not read as it is.

use std::path::Path;

use flow_storage::is_url;

/// The command that unpacks a file beside itself, as a shell takes it; none where its name does not tell its format. An object has to be
/// downloaded first.
pub fn unpacking(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let lower = name.to_ascii_lowercase();
    let shown = match is_url(path) {
        true => name.to_owned(),
        false => path.to_str()?.to_owned(),
    };
    let file = quoted(&shown);
    let command = match lower.rsplit_once('.')?.1 {
        "gz" | "tgz" => format!("gunzip {file}"),
        "bz2" | "tbz2" => format!("bunzip2 {file}"),
        "xz" | "txz" => format!("unxz {file}"),
        "zst" | "tzst" => format!("unzstd --rm {file}"),
        "zip" => format!("unzip {file} -d {}", quoted(&shown[..shown.len() - ".zip".len()])),
        _ => return None,
    };
    Some(match is_url(path) {
        true => format!("download it, and run `{command}`"),
        false => format!("run `{command}`"),
    })
}

/// The command that puts the files in a compressed tar beside it.
pub fn extracting(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    match (
        is_url(path),
        path.parent().filter(|folder| !folder.as_os_str().is_empty()),
    ) {
        (true, _) => format!("download it, and run `tar -xzf {}`", quoted(&name)),
        (false, None) => format!("run `tar -xzf {}`", quoted(&name)),
        (false, Some(folder)) => {
            let [file, folder] = [path, folder].map(|path| quoted(&path.to_string_lossy()));
            format!("run `tar -xzf {file} -C {folder}`")
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
}
