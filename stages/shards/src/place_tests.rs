use std::fs;
use std::os::unix::fs::symlink;

use flow_storage::Storage;

use super::*;

fn source(folder: &Path, bytes: &[u8]) -> (InputFile, PathBuf) {
    let path = folder.join("source.tar");
    fs::write(&path, bytes).unwrap();
    (InputFile::open(&Storage::default(), &path).unwrap(), path)
}

#[test]
fn copies_replaces_and_leaves_what_is_the_same() {
    let temp = tempfile::tempdir().unwrap();
    let (file, path) = source(temp.path(), b"....hello....");
    let target = Target::open(&temp.path().join("out")).unwrap();
    let from = Content::Copy(Range {
        file: &file,
        path: &path,
        offset: 4,
        size: 5,
    });
    assert_eq!(
        target.place(&["hi", "hi_0001", "a.flac"], from).unwrap(),
        Placed::Written
    );
    let written = temp.path().join("out/hi/hi_0001/a.flac");
    assert_eq!(fs::read(&written).unwrap(), b"hello");
    assert_eq!(
        target.place(&["hi", "hi_0001", "a.flac"], from).unwrap(),
        Placed::Standing
    );
    fs::write(&written, b"hellO").unwrap();
    assert_eq!(
        target.place(&["hi", "hi_0001", "a.flac"], from).unwrap(),
        Placed::Written
    );
    assert_eq!(fs::read(&written).unwrap(), b"hello");
    // Bytes that came from elsewhere, and what is read back.
    let name = ["hi", "hi_0001", "a.flac"];
    assert_eq!(target.place(&name, Content::Bytes(b"hello")).unwrap(), Placed::Standing);
    assert_eq!(target.place(&name, Content::Bytes(b"hello")).unwrap(), Placed::Standing);
    assert_eq!(target.read(&name).unwrap().as_deref(), Some(&b"hello"[..]));
    assert_eq!(target.read(&["hi", "none", "a.flac"]).unwrap(), None);
    assert!(!temp.path().join("out/hi/none").exists());
    target.sync().unwrap();
    assert_eq!(fs::read_dir(temp.path().join("out/hi/hi_0001")).unwrap().count(), 1);
    let past = Content::Copy(Range {
        file: &file,
        path: &path,
        offset: 10,
        size: 500,
    });
    assert!(matches!(target.place(&["b"], past), Err(AudioError::PastEnd { .. })));
    assert!(!temp.path().join("out/b").exists());
    assert_eq!(
        fs::read_dir(temp.path().join("out")).unwrap().count(),
        1,
        "no file in the making is left"
    );
}

#[test]
fn links_lead_nowhere() {
    let temp = tempfile::tempdir().unwrap();
    let (file, path) = source(temp.path(), b"hello");
    let from = Content::Copy(Range {
        file: &file,
        path: &path,
        offset: 0,
        size: 5,
    });
    let outside = temp.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), b"secret").unwrap();
    let out = temp.path().join("out");
    fs::create_dir(&out).unwrap();
    symlink(&outside, out.join("folder")).unwrap();
    symlink(outside.join("secret"), out.join("file")).unwrap();
    fs::create_dir(out.join("taken")).unwrap();
    let target = Target::open(&out).unwrap();
    assert!(matches!(
        target.place(&["folder", "x"], from),
        Err(AudioError::UnsafePath { .. })
    ));
    assert_eq!(target.read(&["folder", "secret"]).unwrap(), None);
    assert_eq!(target.read(&["file"]).unwrap(), None);
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
    // The link is replaced, what it pointed at stays.
    assert_eq!(target.place(&["file"], from).unwrap(), Placed::Written);
    assert_eq!(fs::read(outside.join("secret")).unwrap(), b"secret");
    assert_eq!(fs::read(out.join("file")).unwrap(), b"hello");
    assert!(matches!(
        target.place(&["taken"], from),
        Err(AudioError::UnsafePath { .. })
    ));
    assert!(matches!(
        target.place(&["file", "below"], from),
        Err(AudioError::UnsafePath { .. })
    ));
    assert!(matches!(
        target.place(&[&"n".repeat(300)], from),
        Err(AudioError::UnsafePath { .. })
    ));
    assert!(matches!(target.place(&[], from), Err(AudioError::UnsafePath { .. })));
}
