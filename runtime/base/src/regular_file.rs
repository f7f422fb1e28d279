//! Opens files that users name, and only regular ones: opening a pipe blocks until another process writes to it, and a
//! device may have no end.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use flow_storage::{InputFile, Location, Storage};

/// Opens a file of this machine to be read.
///
/// # Errors
/// If it cannot be opened, or is not a regular file.
pub fn open_regular_file(path: &Path) -> io::Result<File> {
    let found = std::fs::metadata(path)?.file_type();
    if found.is_file() {
        return File::open(path);
    }
    let found = match found {
        found if found.is_dir() => "a folder",
        found if found.is_fifo() => "a pipe",
        found if found.is_socket() => "a socket",
        _ => "a device",
    };
    Err(io::Error::other(format!("it is {found}, not a regular file")))
}

/// Opens a file to be read, on this machine or, by its URL, in object storage.
///
/// # Errors
/// If it cannot be opened, or is not a regular file.
pub fn open_input_file(storage: &Storage, path: &Path) -> io::Result<InputFile> {
    match Location::of_path(path)? {
        Location::Local(path) => open_regular_file(&path).map(InputFile::Local),
        Location::Object(url) => InputFile::open_object(storage, &url),
    }
}

/// Opens a file that is read once, from its beginning to its end: one that [`open_input_file`] opens, or a pipe without a name that this process has
/// open already.
///
/// # Errors
/// If it cannot be opened, or is neither.
pub fn open_regular_file_or_open_pipe(storage: &Storage, path: &Path) -> io::Result<InputFile> {
    if is_open_pipe(path) {
        return File::open(path).map(InputFile::Local);
    }
    open_input_file(storage, path)
}

/// Whether a path is that of an unnamed pipe which this process has open already, such as `/dev/fd/63` of a shell's
/// `<(...)`: opening it does not block. Opening a named pipe does, also by the path of a descriptor.
pub fn is_open_pipe(path: &Path) -> bool {
    let descriptors = Path::new("/proc/self/fd");
    let descriptor = match path.parent() {
        _ if path == Path::new("/dev/stdin") => Some(OsStr::new("0")),
        Some(folder) if folder == Path::new("/dev/fd") || folder == descriptors => path.file_name(),
        _ => None,
    };
    let target = descriptor.and_then(|descriptor| std::fs::read_link(descriptors.join(descriptor)).ok());
    target.is_some_and(|target| target.as_os_str().as_bytes().starts_with(b"pipe:["))
}

/// All bytes of a file of this machine.
///
/// # Errors
/// If it cannot be read, or is not a regular file.
pub fn read_local_file(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular_file(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// All bytes of a file, on this machine or in object storage.
///
/// # Errors
/// If it cannot be read, or is not a regular file.
pub fn read_regular_file(storage: &Storage, path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_input_file(storage, path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_regular_file_is_refused_and_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::write(path("file"), "text").unwrap();
        std::os::unix::fs::symlink("file", path("link")).unwrap();
        for name in ["file", "link"] {
            assert_eq!(read_regular_file(&Storage::default(), &path(name)).unwrap(), b"text");
        }
        let made = std::process::Command::new("mkfifo").arg(path("pipe")).status().unwrap();
        assert!(made.success());
        let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
        for (path, said) in [
            (path("pipe"), "it is a pipe, not a regular file"),
            (path("socket"), "it is a socket, not a regular file"),
            (folder.path().to_path_buf(), "it is a folder, not a regular file"),
            ("/dev/null".into(), "it is a device, not a regular file"),
        ] {
            assert_eq!(open_regular_file(&path).unwrap_err().to_string(), said);
        }
        let named = open_regular_file_or_open_pipe(&Storage::default(), &path("pipe")).unwrap_err();
        assert_eq!(named.to_string(), "it is a pipe, not a regular file");
        let error = read_regular_file(&Storage::default(), &path("none")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_pipe_that_is_open_is_read() {
        use std::io::Write;
        use std::os::fd::AsRawFd;

        let (reader, mut writer) = io::pipe().unwrap();
        writer.write_all(b"text").unwrap();
        drop(writer);
        let path = format!("/dev/fd/{}", reader.as_raw_fd());
        let mut text = String::new();
        let mut file = open_regular_file_or_open_pipe(&Storage::default(), Path::new(&path)).unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "text");
        // Opening a named pipe again blocks until there is a writer, which may be gone.
        let folder = tempfile::tempdir().unwrap();
        let named = folder.path().join("pipe");
        assert!(
            std::process::Command::new("mkfifo")
                .arg(&named)
                .status()
                .unwrap()
                .success()
        );
        let held = File::options().read(true).write(true).open(&named).unwrap();
        let path = format!("/dev/fd/{}", held.as_raw_fd());
        let error = open_regular_file_or_open_pipe(&Storage::default(), Path::new(&path)).unwrap_err();
        assert_eq!(error.to_string(), "it is a pipe, not a regular file");
    }
}
