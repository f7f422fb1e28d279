//! Corpora whose rows are lines of lists or of tables without quotes.

use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use flow_corpus::files::label;
use flow_corpus::manifest_row::{ManifestRow, Refusal, refuse};
use flow_corpus::tree;
use flow_corpus::{Corpus, ManifestError, Part, Take, take_line};
use flow_kind::{Partition, StageError, Storage};
use serde_json::Value;

use super::json_list;
use super::line_file::{Block, GZIP, LineFile};

/// Makes a row of a line, given the number of the file among those that are read.
type RowOfLine = dyn Fn(usize, &str) -> Result<ManifestRow, Refusal> + Send + Sync;

/// Files of lines, each of which is a row.
pub struct TableLines {
    files: Vec<(LineFile, Vec<Block>)>,
    /// Whether the first line of each file is a heading.
    has_heading: bool,
    told: String,
    row: Box<RowOfLine>,
}

impl TableLines {
    /// # Errors
    /// When a file cannot be read.
    pub fn open(
        storage: &Storage,
        paths: &[PathBuf],
        has_heading: bool,
        told: String,
        scratch: &Path,
        row: impl Fn(usize, &str) -> Result<ManifestRow, Refusal> + Send + Sync + 'static,
    ) -> Result<TableLines, ManifestError> {
        let open = |path: &PathBuf| {
            let file = LineFile::open(storage, path, scratch)?;
            let blocks = file.blocks(|_, _| {})?;
            Ok((file, blocks))
        };
        let files = paths.iter().map(open).collect::<Result<_, ManifestError>>()?;
        Ok(TableLines::of(files, has_heading, told, row))
    }

    /// Of files that are open, each with all its blocks.
    pub fn of(
        files: Vec<(LineFile, Vec<Block>)>,
        has_heading: bool,
        told: String,
        row: impl Fn(usize, &str) -> Result<ManifestRow, Refusal> + Send + Sync + 'static,
    ) -> TableLines {
        TableLines {
            files,
            has_heading,
            told,
            row: Box::new(row),
        }
    }

    fn places(&self) -> impl Iterator<Item = (usize, usize)> {
        let of_file =
            |(file, (_, blocks)): (usize, &(LineFile, Vec<Block>))| (0..blocks.len()).map(move |block| (file, block));
        self.files.iter().enumerate().flat_map(of_file)
    }
}

impl Corpus for TableLines {
    fn told(&self) -> String {
        self.told.clone()
    }

    fn parts(&self) -> Vec<Part> {
        let part = |(number, (file, block)): (usize, (usize, usize))| {
            let path = &self.files[file].0.path;
            Part {
                name: Partition::from(format!("{}/{block:06}", label(file, path))),
                number,
                files: vec![path.clone()],
                looks: String::new(),
            }
        };
        self.places().enumerate().map(part).collect()
    }

    fn each(&self, storage: &Storage, part: &Part, take: &mut Take<'_>) -> Result<(), StageError> {
        let Some((number, block)) = self.places().nth(part.number) else {
            return Ok(());
        };
        let (file, blocks) = &self.files[number];
        file.still(storage)?;
        file.lines(blocks[block], &mut |line| {
            if self.has_heading && line.offset == 0 {
                return Ok(());
            }
            take_line(take, line.number, line.text, |text| (self.row)(number, text))
        })
    }
}

/// Most bytes of a first line.
const LONGEST_FIRST_LINE: u64 = 1 << 20;

/// The beginning of a file, which may be compressed by gzip, read by `read` up to a number of bytes; none where it cannot be read. Of a
/// compressed file its beginning is unpacked.
fn beginning(
    storage: &Storage,
    path: &Path,
    read: impl FnOnce(&mut dyn BufRead, &mut Vec<u8>) -> io::Result<usize>,
) -> Option<Vec<u8>> {
    let mut file = BufReader::new(tree::open_head(storage, path)?);
    let is_packed = tree::or_note(path, file.fill_buf().map(|bytes| bytes.starts_with(&GZIP)));
    let text: Box<dyn Read> = if is_packed {
        Box::new(MultiGzDecoder::new(file))
    } else {
        Box::new(file)
    };
    let mut bytes = Vec::new();
    let read = read(&mut BufReader::new(text.take(LONGEST_FIRST_LINE)), &mut bytes);
    match is_packed {
        true => read.ok()?,
        false => tree::or_note(path, read.map(Some))?,
    };
    Some(bytes)
}

/// The first line of a file without a byte order mark and the end of the line; none where it is not UTF-8. See [`beginning`].
pub fn first_line(storage: &Storage, path: &Path) -> Option<String> {
    let line = beginning(storage, path, |text, line| text.read_until(b'\n', line))?;
    let line = String::from_utf8(line).ok()?;
    Some(
        line.trim_start_matches('\u{feff}')
            .trim_end_matches(['\n', '\r'])
            .to_string(),
    )
}

/// The JSON of the first line of a file, or of the first item of a list that begins with it. See [`beginning`].
pub fn first_value(storage: &Storage, path: &Path) -> Option<Value> {
    let line = first_line(storage, path)?;
    if !json_list::is_list(line.as_bytes()) {
        return serde_json::from_str(&line).ok();
    }
    let head = beginning(storage, path, |text, head| text.read_to_end(head))?;
    json_list::first_item(&head)
}

/// The fields of a line, which are at least `least`.
///
/// # Errors
/// Where there are fewer.
pub fn fields(line: &str, separator: char, least: usize) -> Result<Vec<&str>, Refusal> {
    let fields: Vec<&str> = line.split(separator).collect();
    match fields.len() {
        found if found < least => Err(refuse("bad_line", format!("{found} fields in place of {least}"))),
        _ => Ok(fields),
    }
}

/// The places of columns of a heading without quotes.
#[derive(Clone, Debug)]
pub struct Heading(Vec<String>);

impl Heading {
    pub fn of(line: &str, separator: char) -> Heading {
        Heading(line.split(separator).map(|name| name.trim().to_string()).collect())
    }

    /// The fields of a line under this heading.
    ///
    /// # Errors
    /// Where there are more or fewer.
    pub fn fields<'l>(&self, line: &'l str, separator: char) -> Result<Vec<&'l str>, Refusal> {
        let fields: Vec<&str> = line.split(separator).collect();
        match fields.len() == self.0.len() {
            true => Ok(fields),
            false => Err(refuse(
                "bad_line",
                format!("{} fields under a heading of {}", fields.len(), self.0.len()),
            )),
        }
    }

    pub fn has(&self, name: &str) -> bool {
        self.0.iter().any(|other| other == name)
    }

    /// The field of a column; empty where there is no such column.
    pub fn get<'l>(&self, fields: &[&'l str], name: &str) -> &'l str {
        let place = self.0.iter().position(|other| other == name);
        place
            .and_then(|place| fields.get(place))
            .copied()
            .unwrap_or_default()
            .trim()
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(String::as_str)
    }
}
