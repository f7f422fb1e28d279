//! Text files of lines, plain or compressed by gzip, that are read in blocks and at places.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use flate2::read::MultiGzDecoder;
use flow_kind::{StageError, open_input_file, unlinked_file};
use flow_storage::{FileVersion, InputFile, Storage};

use flow_corpus::ManifestError;
use flow_corpus::looks::{check_version, version_of};
use flow_corpus::manifest_row::{Refusal, refuse};

use super::json_list;

/// Lines of a block, and bytes that end one sooner.
const BLOCK_LINES: u64 = 8_192;
const BLOCK_BYTES: u64 = 64 << 20;
/// Longest line.
const LONGEST_LINE: u64 = 16 << 20;
/// Most bytes of an unpacked file.
const LARGEST: u64 = 256 << 30;
pub const GZIP: [u8; 2] = [0x1f, 0x8b];
const MARK: &[u8] = b"\xef\xbb\xbf";

/// A file of lines. One that is compressed was unpacked into a file without a name, so that its lines can be read in any order.
pub struct LineFile {
    pub path: PathBuf,
    look: FileVersion,
    file: InputFile,
    length: u64,
}

/// Whole lines of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// In bytes.
    pub start: u64,
    pub end: u64,
    /// Number of its first line, from 1.
    pub first_line: u64,
}

/// A line: its number from 1, where it begins, and its text; or what is wrong with it, and as much of it as can be shown.
pub struct Line<'l> {
    pub number: u64,
    pub offset: u64,
    pub text: Result<&'l str, (Refusal, String)>,
}

/// Reads on from a place of a file.
struct At<'f> {
    file: &'f InputFile,
    at: u64,
    end: u64,
}

impl Read for At<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.end.saturating_sub(self.at)).unwrap_or(usize::MAX);
        let length = buffer.len().min(left);
        let read = self.file.read_at(&mut buffer[..length], self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

impl LineFile {
    /// `scratch` is a folder for temporary files.
    ///
    /// # Errors
    /// When it cannot be read or unpacked.
    pub fn open(storage: &Storage, path: &Path, scratch: &Path) -> Result<LineFile, ManifestError> {
        let failed = |error| ManifestError::io(path, error);
        let look = version_of(storage, path).map_err(failed)?;
        let mut file = open_input_file(storage, path).map_err(failed)?;
        let mut head = [0; 2];
        if file.read_exact_at(&mut head, 0).is_ok() && head == GZIP {
            file = unpacked(file, path, scratch)?.into();
        }
        Ok(LineFile {
            path: path.to_path_buf(),
            look,
            length: file.length().map_err(failed)?,
            file,
        })
    }

    /// A list in JSON, whose items become lines; another file as [`LineFile::open`] does.
    ///
    /// # Errors
    /// When it cannot be read or unpacked, or the list is damaged.
    pub fn open_list(storage: &Storage, path: &Path, scratch: &Path) -> Result<LineFile, ManifestError> {
        let mut opened = LineFile::open(storage, path, scratch)?;
        let mut head = vec![0; 64];
        let read = opened.file.read_at(&mut head, 0);
        head.truncate(read.map_err(|error| ManifestError::io(path, error))?);
        if json_list::is_list(&head) {
            let items = BufReader::with_capacity(1 << 18, opened.at(0, opened.length));
            let lines = json_list::to_lines(items, path, scratch)?;
            opened.file = lines.into();
            opened.length = opened.file.length().map_err(|error| ManifestError::io(path, error))?;
        }
        Ok(opened)
    }

    /// # Errors
    /// When the file was changed since it was opened.
    pub fn still(&self, storage: &Storage) -> Result<(), StageError> {
        check_version(storage, self.look, &self.path)
    }

    /// All lines, in blocks. `each` is given every line that is UTF-8, with where it begins.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn blocks(&self, mut each: impl FnMut(u64, &str)) -> Result<Vec<Block>, ManifestError> {
        let (mut blocks, mut open) = (Vec::new(), None::<Block>);
        self.lines_in(0, self.length, 1, &mut |line, end| {
            let block = open.get_or_insert(Block {
                start: line.offset,
                end,
                first_line: line.number,
            });
            block.end = end;
            if line.number - block.first_line + 1 >= BLOCK_LINES || end - block.start >= BLOCK_BYTES {
                blocks.extend(open.take());
            }
            if let Ok(text) = line.text {
                each(line.offset, text);
            }
            Ok(())
        })
        .map_err(|error| ManifestError::io(&self.path, error))?;
        blocks.extend(open);
        Ok(blocks)
    }

    /// The lines of a block that are not blank.
    ///
    /// # Errors
    /// When it cannot be read, and those of `each`.
    pub fn lines(
        &self,
        block: Block,
        each: &mut dyn FnMut(Line<'_>) -> Result<(), StageError>,
    ) -> Result<(), StageError> {
        let mut failed = None;
        let read = self.lines_in(block.start, block.end, block.first_line, &mut |line, _| {
            if matches!(line.text, Ok(text) if text.trim().is_empty()) {
                return Ok(());
            }
            each(line).map_err(|error| {
                failed = Some(error);
                io::Error::other("stopped")
            })
        });
        read.map_err(|error| failed.unwrap_or_else(|| ManifestError::io(&self.path, error).into()))
    }

    /// The line that begins at a place, without a byte order mark at the beginning of the file.
    ///
    /// # Errors
    /// When it cannot be read. (The place was found while all lines were, so the line was no longer than one may be.)
    pub fn line_at(&self, offset: u64) -> Result<String, ManifestError> {
        let mut found = Vec::new();
        let mut reader = BufReader::with_capacity(1 << 10, self.at(offset, self.length)).take(LONGEST_LINE);
        let read = reader.read_until(b'\n', &mut found);
        read.map_err(|error| ManifestError::io(&self.path, error))?;
        let line = found.strip_prefix(MARK).filter(|_| offset == 0).unwrap_or(&found);
        Ok(String::from_utf8_lossy(line).trim_end_matches(['\n', '\r']).to_string())
    }

    /// The first lines that are UTF-8, at most so many.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn first_lines(&self, most: usize, mut each: impl FnMut(&str)) -> Result<(), ManifestError> {
        let mut count = 0;
        let read = self.lines_in(0, self.length, 1, &mut |line, _| {
            line.text.ok().into_iter().for_each(&mut each);
            count += 1;
            match count < most {
                true => Ok(()),
                false => Err(io::Error::other("enough")),
            }
        });
        match read {
            Err(error) if count < most => Err(ManifestError::io(&self.path, error)),
            _ => Ok(()),
        }
    }

    /// The first line that is not blank; none where there is none, or it is not UTF-8.
    pub fn first_line(&self) -> Option<String> {
        let mut found = None;
        let _ = self.lines_in(0, self.length.min(LONGEST_LINE), 1, &mut |line, _| match line.text {
            Ok(text) if text.trim().is_empty() => Ok(()),
            text => {
                found = text.ok().map(str::to_string);
                Err(io::Error::other("found"))
            }
        });
        found
    }

    fn at(&self, at: u64, end: u64) -> At<'_> {
        At {
            file: &self.file,
            at,
            end,
        }
    }

    fn lines_in(
        &self,
        start: u64,
        end: u64,
        first_line: u64,
        each: &mut dyn FnMut(Line<'_>, u64) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut reader = BufReader::with_capacity(1 << 18, self.at(start, end));
        let (mut at, mut number, mut line) = (start, first_line, Vec::new());
        loop {
            line.clear();
            let mut length = reader.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line)? as u64;
            if length == 0 {
                return Ok(());
            }
            let whole = line.last() == Some(&b'\n') || length < LONGEST_LINE;
            if !whole {
                length += reader.skip_until(b'\n')? as u64;
            }
            let bytes = match line.strip_prefix(MARK) {
                Some(rest) if at == 0 => rest,
                _ => &line,
            };
            let lossy = || String::from_utf8_lossy(&bytes[..bytes.len().min(1 << 16)]).into_owned();
            let text = match std::str::from_utf8(bytes) {
                _ if !whole => Err((refuse("line_too_long", format!("{length} bytes")), lossy())),
                Ok(text) => Ok(text.trim_end_matches(['\n', '\r'])),
                Err(error) => Err((refuse("not_utf8", error.to_string()), lossy())),
            };
            let offset = at;
            at += length;
            each(Line { number, offset, text }, at)?;
            number += 1;
        }
    }
}

/// Unpacks a file that is compressed by gzip.
fn unpacked(file: InputFile, path: &Path, scratch: &Path) -> Result<File, ManifestError> {
    let to = unlinked_file(scratch).map_err(|error| ManifestError::io(scratch, error))?;
    let mut from = MultiGzDecoder::new(BufReader::with_capacity(1 << 18, file)).take(LARGEST + 1);
    let mut writer = BufWriter::with_capacity(1 << 18, to);
    let mut buffer = vec![0; 1 << 18];
    let mut total = 0;
    loop {
        let read = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => {
                return Err(ManifestError::manifest(path, format!("it cannot be unpacked: {error}")));
            }
        };
        total += read as u64;
        let written = writer.write_all(&buffer[..read]);
        written.map_err(|error| ManifestError::io(scratch, error))?;
    }
    if total > LARGEST {
        return Err(ManifestError::manifest(
            path,
            format!("it has more than {} GiB unpacked", LARGEST >> 30),
        ));
    }
    let to = writer.into_inner().map_err(io::IntoInnerError::into_error);
    to.map_err(|error| ManifestError::io(scratch, error))
}

/// Where the lines of a file are, by an id that they have: 16 bytes for each.
#[derive(Default)]
pub struct IdIndex {
    /// The hash of the id, and where the line begins; sorted.
    entries: Vec<(u64, u64)>,
}

/// The lines that are added to an index.
#[derive(Default)]
pub struct Indexing(Vec<(u64, u64)>);

impl Indexing {
    pub fn add(&mut self, id: &str, offset: u64) {
        self.0.push((hash(id), offset));
    }

    pub fn finish(mut self) -> IdIndex {
        self.0.sort_unstable();
        self.0.shrink_to_fit();
        IdIndex { entries: self.0 }
    }
}

impl IdIndex {
    /// What `of` makes of the first line of an id; it gives none for a line of another.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn find<T>(
        &self,
        file: &LineFile,
        id: &str,
        of: impl Fn(&str) -> Option<T>,
    ) -> Result<Option<T>, ManifestError> {
        let wanted = hash(id);
        let first = self.entries.partition_point(|(hash, _)| *hash < wanted);
        for (_, offset) in self.entries[first..].iter().take_while(|(hash, _)| *hash == wanted) {
            if let Some(found) = of(&file.line_at(*offset)?) {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }
}

fn hash(id: &str) -> u64 {
    let bytes = blake3::hash(id.as_bytes());
    u64::from_le_bytes(bytes.as_bytes()[..8].try_into().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_by_id_in_plain_and_compressed_files() {
        let folder = tempfile::tempdir().unwrap();
        let text = "\u{feff}a one\n\nb two\r\na three\nc";
        let plain = folder.path().join("x");
        std::fs::write(&plain, text).unwrap();
        let packed = folder.path().join("x.gz");
        let mut writer = flate2::write::GzEncoder::new(File::create(&packed).unwrap(), flate2::Compression::fast());
        writer.write_all(text.as_bytes()).unwrap();
        writer.finish().unwrap();
        for path in [&plain, &packed] {
            let file = LineFile::open(&Storage::default(), path, &folder.path().join("scratch")).unwrap();
            let mut index = Indexing::default();
            let blocks = file
                .blocks(|offset, line| index.add(line.split(' ').next().unwrap(), offset))
                .unwrap();
            let index = index.finish();
            let mut lines = Vec::new();
            for block in blocks {
                let add = &mut |line: Line<'_>| {
                    lines.push((line.number, line.text.unwrap().to_string()));
                    Ok(())
                };
                file.lines(block, add).unwrap();
            }
            let expected = [(1, "a one"), (3, "b two"), (4, "a three"), (5, "c")];
            assert_eq!(lines, expected.map(|(number, text)| (number, text.to_string())));
            let find = |id: &str| {
                index
                    .find(&file, id, |line| line.starts_with(id).then(|| line.to_string()))
                    .unwrap()
            };
            assert_eq!(find("a"), Some("a one".into()), "the first");
            assert_eq!(find("b"), Some("b two".into()));
            assert_eq!(find("z"), None);
            assert_eq!(file.first_line().as_deref(), Some("a one"));
        }
        let bytes = std::fs::read(&packed).unwrap();
        std::fs::write(&packed, &bytes[..bytes.len() - 9]).unwrap();
        let error = LineFile::open(&Storage::default(), &packed, folder.path())
            .err()
            .unwrap()
            .to_string();
        assert!(error.contains("cannot be unpacked"), "{error}");
    }

    #[test]
    fn a_file_is_cut_into_blocks_of_whole_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        let text: String = (0..20_000).map(|n| format!("{n}\n")).collect();
        std::fs::write(&path, text).unwrap();
        let file = LineFile::open(&Storage::default(), &path, folder.path()).unwrap();
        let blocks = file.blocks(|_, _| {}).unwrap();
        let mut lines = Vec::new();
        for block in &blocks {
            let add = &mut |line: Line<'_>| {
                assert_eq!(line.text.unwrap(), (line.number - 1).to_string());
                lines.push(line.number);
                Ok(())
            };
            file.lines(*block, add).unwrap();
        }
        assert_eq!((blocks.len(), lines.len()), (3, 20_000));
        assert_eq!(lines, (1..=20_000).collect::<Vec<u64>>());
    }
}
