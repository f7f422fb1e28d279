//! Folders as other systems leave them.

use super::forms::{lay_out, with_lang};
use super::*;

#[test]
fn transcripts_and_recordings_may_have_names_in_capitals() {
    let folder = tempfile::tempdir().unwrap();
    lay_out(
        folder.path(),
        &[
            ("A.WAV.wav", ""),
            ("A.WAV.TXT", "one"),
            ("b.wav", ""),
            ("b.Lab", "two"),
            ("c.wav", ""),
            ("c.txt", "small letters count"),
            ("c.TXT", "capitals"),
        ],
    );
    fs::write(folder.path().join("D.FLAC"), recording()).unwrap();
    fs::write(folder.path().join("D.TXT"), "four").unwrap();
    let output = run(with_lang(folder.path(), "en"));
    assert_eq!(column(&output, "text"), ["one", "four", "two", "small letters count"]);
    assert_eq!(reasons(&output), Vec::<&str>::new());
}

#[test]
fn what_programs_put_beside_recordings_is_passed_over() {
    let folder = tempfile::tempdir().unwrap();
    lay_out(
        folder.path(),
        &[
            ("a.wav", ""),
            ("a.txt", "one"),
            ("._a.wav", ""),
            ("._a.txt", "not one"),
            ("__MACOSX/._a.wav", ""),
            ("__MACOSX/b.wav", ""),
            (".ipynb_checkpoints/a-checkpoint.wav", ""),
            (".ipynb_checkpoints/a-checkpoint.txt", "one"),
            ("lost+found/c.wav", ""),
        ],
    );
    let output = run(with_lang(folder.path(), "en"));
    assert_eq!(column(&output, "segment_id"), ["a"]);
    assert_eq!(reasons(&output), Vec::<&str>::new());
}

#[test]
fn recordings_have_the_extensions_of_containers_too() {
    let folder = tempfile::tempdir().unwrap();
    let extensions = ["webm", "wave", "mka", "aiff", "caf", "mov"];
    for extension in extensions {
        fs::write(folder.path().join(format!("{extension}.{extension}")), recording()).unwrap();
        fs::write(folder.path().join(format!("{extension}.txt")), extension).unwrap();
    }
    let mut expected = extensions.to_vec();
    expected.sort_unstable();
    assert_eq!(column(&run(with_lang(folder.path(), "en")), "text"), expected);
}
