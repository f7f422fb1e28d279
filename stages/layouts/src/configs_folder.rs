//! A data set with a configuration of each layout, for tests.

use std::fs;
use std::path::Path;

/// Declares a configuration of each layout. `datasets` 5.2 gives the same texts and splits of such folders (without what is damaged on
/// purpose) if each configuration is the only one: it takes the format of the first one for all, which flow does not.
pub const CONFIGS: &str = "---
configs:
- config_name: lines
  default: true
  data_files:
  - {split: train, path: [lists/a.jsonl, 'lists/more-*.jsonl']}
  - {split: held_out, path: lists/test.jsonl}
- config_name: tars
  data_files: tars/train-*.tar
- config_name: folder
  data_dir: af
- config_name: tables
  data_dir: af
  data_files:
  - {split: train, path: ['train/**']}
  - {split: test, path: 'te*/*'}
- config_name: archives
  data_files:
  - {split: train, path: '*/train.zip'}
- config_name: texts
  data_files: 'notes/*.txt'
---
";

pub fn lay_out_configs(folder: &Path) {
    let line =
        |file: &str, text: &str| format!("{{\"audio_filepath\": \"../wav/{file}.flac\", \"text\": \"{text}\"}}\n");
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    };
    for (name, text) in [
        ("README.md", CONFIGS),
        ("lists/a.jsonl", &line("a", "one")),
        ("lists/more-0.jsonl", &line("b", "two")),
        ("lists/test.jsonl", &line("c", "three")),
        ("lists/unused.jsonl", &line("c", "not this")),
        ("af/train/hi/metadata.csv", "file_name,text\nx.flac,four\n"),
        ("af/test/metadata.csv", "file_name,text\ny.flac,five\n"),
        ("notes/a.txt", "no recording\n"),
    ] {
        write(name, text.as_bytes());
    }
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/layouts");
    for (from, to) in [
        ("wav/a.flac", "wav/a.flac"),
        ("wav/b.flac", "wav/b.flac"),
        ("wav/c.flac", "wav/c.flac"),
        ("wav/a.flac", "af/train/hi/x.flac"),
        ("wav/b.flac", "af/test/y.flac"),
        ("webdataset/train-000000.tar", "tars/train-000000.tar"),
        ("webdataset/test-000000.tar", "tars/test-000000.tar"),
        ("zip/train.zip", "zips/train.zip"),
        ("zip/test.zip", "zips/test.zip"),
    ] {
        write(to, &fs::read(data.join(from)).unwrap());
    }
}
