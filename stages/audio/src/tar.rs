//! Lists the members of a tar without reading their data.
//!
//! Rules follow POSIX ustar and pax interchange, GNU long names, and the behaviour of `tar -x` and Python's `tarfile`
//! where the formats are ambiguous. A tar is never trusted: sizes are compared with the length of the file before
//! anything is read, and extension headers have a size limit.

use std::collections::HashMap;
use std::io::{self, Read, Seek, SeekFrom};

const BLOCK: u64 = 512;
/// Longest long name or pax header that is read; real ones have some hundred bytes.
const EXTENSION_LIMIT: u64 = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemberKind {
    /// A regular file with contiguous data.
    Regular,
    /// Link, directory, device, FIFO, sparse file or something newer.
    Other,
}

/// One member, as its header tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Without leading `./`; a directory's without trailing `/`.
    pub name: String,
    pub kind: MemberKind,
    /// Where the data begin, in bytes from the beginning of the tar.
    pub offset: u64,
    /// Bytes of data.
    pub size: u64,
    /// The file ends before the data do.
    pub truncated: bool,
}

/// How the tar ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// With a zero block, or without one after a whole member.
    Whole,
    /// Truncated; the text says in what.
    Cut(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listing {
    /// All members in the order of the tar; a name may come several times.
    pub members: Vec<Member>,
    pub end: End,
}

impl Listing {
    /// One member per name, in the order of the tar. The later one of a name counts, as with `tar -x`.
    pub fn last_of_each_name(&self) -> Vec<&Member> {
        let mut last: HashMap<&str, usize> = HashMap::with_capacity(self.members.len());
        for (position, member) in self.members.iter().enumerate() {
            last.insert(&member.name, position);
        }
        let is_last = |&(position, member): &(usize, &Member)| last.get(member.name.as_str()) == Some(&position);
        self.members
            .iter()
            .enumerate()
            .filter(is_last)
            .map(|(_, member)| member)
            .collect()
    }
}

/// Lists the tar in `reader`, which has `length` bytes. Errors are I/O errors only; any content gives a listing.
pub fn list(reader: &mut (impl Read + Seek), length: u64) -> io::Result<Listing> {
    let mut walk = Walk {
        reader,
        length,
        at: 0,
        members: Vec::new(),
        global: PaxRecords::default(),
    };
    let end = match walk.all() {
        Ok(()) => End::Whole,
        Err(Stop::Cut(why)) => End::Cut(why),
        Err(Stop::Io(error)) => return Err(error),
    };
    Ok(Listing {
        members: walk.members,
        end,
    })
}

/// Why the walk ended early.
enum Stop {
    Cut(String),
    Io(io::Error),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Stop::Io(error)
    }
}

fn cut(why: impl Into<String>) -> Stop {
    Stop::Cut(why.into())
}

/// The pax records that matter here.
#[derive(Clone, Default)]
struct PaxRecords {
    path: Option<String>,
    size: Option<u64>,
    sparse: bool,
    sparse_name: Option<String>,
}

struct Walk<'a, R> {
    reader: &'a mut R,
    length: u64,
    at: u64,
    members: Vec<Member>,
    global: PaxRecords,
}

impl<R: Read + Seek> Walk<'_, R> {
    fn all(&mut self) -> Result<(), Stop> {
        if self.length == 0 {
            return Err(cut("the file is empty"));
        }
        let mut first = [0; 4];
        let length = self.reader.by_ref().take(4).read(&mut first)?;
        self.reader.rewind()?;
        let packed = [
            (&[0x1f, 0x8b][..], "gzip", "gz", "gunzip"),
            (b"BZh", "bzip2", "bz2", "bunzip2"),
            (&[0xfd, b'7', b'z', b'X'], "xz", "xz", "unxz"),
            (&[0x28, 0xb5, 0x2f, 0xfd], "zstd", "zst", "unzstd"),
        ];
        if let Some((_, format, ending, program)) = packed.iter().find(|(mark, ..)| first[..length].starts_with(mark)) {
            let why = format!(
                "it is not a tar but compressed by {format}; give its name the ending .{ending} and unpack it with {program}, as recordings \
                 are read in place"
            );
            return Err(cut(why));
        }
        loop {
            if self.at == self.length {
                return Ok(());
            }
            let Some(header) = self.header()? else { return Ok(()) };
            self.member(header)?;
        }
    }

    /// The next header block; none at a zero block.
    fn header(&mut self) -> Result<Option<Header>, Stop> {
        let at = self.at;
        if at > self.length {
            return Err(cut(format!(
                "the file ends at byte {} within the padding of a member",
                self.length
            )));
        }
        if self.length - at < BLOCK {
            return Err(cut(format!("the file ends within the header at byte {at}")));
        }
        let mut block = [0u8; BLOCK as usize];
        self.reader.seek(SeekFrom::Start(at))?;
        self.reader.read_exact(&mut block)?;
        self.at = at + BLOCK;
        if block.iter().all(|&byte| byte == 0) {
            return Ok(None);
        }
        match Header::parse(&block) {
            Some(header) => Ok(Some(header)),
            None if at == 0 => Err(cut("it does not begin with a tar header")),
            None => Err(cut(format!("the header at byte {at} is damaged"))),
        }
    }

    /// The header to which an extension header applies.
    fn header_after_extension(&mut self) -> Result<Header, Stop> {
        let at = self.at;
        if at >= self.length {
            return Err(cut(format!(
                "the file ends after the extension header before byte {at}"
            )));
        }
        self.header()?
            .ok_or_else(|| cut(format!("an extension header before byte {at} has no member")))
    }

    /// Reads extension headers until the member's own header, then notes the member.
    fn member(&mut self, first: Header) -> Result<(), Stop> {
        let mut header = first;
        let mut long_name: Option<String> = None;
        let mut pax = self.global.clone();
        loop {
            match header.kind {
                b'L' => {
                    let data = self.extension(header.size)?;
                    // GNU writes the name with a NUL at its end.
                    let end = data.iter().position(|&byte| byte == 0).unwrap_or(data.len());
                    long_name = Some(text(&data[..end]));
                }
                b'K' => {
                    self.extension(header.size)?;
                }
                b'x' | b'X' => {
                    let data = self.extension(header.size)?;
                    pax.read(&data)
                        .map_err(|why| cut(format!("pax header before byte {}: {why}", self.at)))?;
                }
                b'g' => {
                    let data = self.extension(header.size)?;
                    let why = |why| cut(format!("global pax header before byte {}: {why}", self.at));
                    self.global.read(&data).map_err(why)?;
                    if self.at == self.length {
                        return Ok(());
                    }
                    // A global header may also be the last entry.
                    let Some(next) = self.header()? else {
                        self.at = self.length;
                        return Ok(());
                    };
                    pax = self.global.clone();
                    header = next;
                    continue;
                }
                _ => break,
            }
            header = self.header_after_extension()?;
        }
        self.note(header, long_name, pax)
    }

    fn note(&mut self, header: Header, long_name: Option<String>, pax: PaxRecords) -> Result<(), Stop> {
        let mut name = pax.sparse_name.or(pax.path).or(long_name).unwrap_or(header.name);
        // Before ustar, a directory was a file whose name ends in a slash.
        let directory = header.kind == b'5' || (header.kind == 0 && name.ends_with('/'));
        if directory {
            name.truncate(name.trim_end_matches('/').len());
        }
        if header.kind == b'S' {
            self.skip_sparse_maps(header.sparse_goes_on)?;
        }
        let kind = match header.kind {
            b'0' | 0 | b'7' if !directory && !pax.sparse => MemberKind::Regular,
            _ => MemberKind::Other,
        };
        let stated = pax.size.unwrap_or(header.size);
        // Links, directories, devices and FIFOs have no data, whatever their size field says.
        let size = if directory || matches!(header.kind, b'1'..=b'6') {
            0
        } else {
            stated
        };
        let offset = self.at;
        let end = offset.checked_add(size).filter(|&end| end <= self.length);
        let name = crate::member_name::strip_dot_slash(&name).to_owned();
        self.members.push(Member {
            name,
            kind,
            offset,
            size,
            truncated: end.is_none(),
        });
        let Some(end) = end else {
            return Err(cut(format!(
                "the file ends within the member whose data begin at byte {offset}"
            )));
        };
        self.at = end.next_multiple_of(BLOCK);
        Ok(())
    }

    /// Old GNU sparse files have further blocks of extents between header and data.
    fn skip_sparse_maps(&mut self, mut goes_on: bool) -> Result<(), Stop> {
        while goes_on {
            if self.length.saturating_sub(self.at) < BLOCK {
                return Err(cut("the file ends within the map of a sparse member"));
            }
            let mut block = [0u8; BLOCK as usize];
            self.reader.seek(SeekFrom::Start(self.at))?;
            self.reader.read_exact(&mut block)?;
            self.at += BLOCK;
            goes_on = block[504] != 0;
        }
        Ok(())
    }

    /// The data of an extension header.
    fn extension(&mut self, size: u64) -> Result<Vec<u8>, Stop> {
        let at = self.at;
        if size > EXTENSION_LIMIT {
            return Err(cut(format!(
                "the extension header before byte {at} claims {size} bytes"
            )));
        }
        if self.length.saturating_sub(at) < size {
            return Err(cut(format!(
                "the file ends within the extension header before byte {at}"
            )));
        }
        let mut data = vec![0u8; size as usize];
        self.reader.seek(SeekFrom::Start(at))?;
        self.reader.read_exact(&mut data)?;
        self.at = (at + size).next_multiple_of(BLOCK);
        Ok(data)
    }
}

/// The fields of a header block that are used.
struct Header {
    name: String,
    size: u64,
    kind: u8,
    sparse_goes_on: bool,
}

impl Header {
    /// None if the checksum is wrong or a number is none.
    fn parse(block: &[u8; BLOCK as usize]) -> Option<Header> {
        let stated = number(&block[148..156])?;
        // The checksum field itself counts as spaces. Some old writers summed signed bytes.
        let others = || block[..148].iter().chain(&block[156..]);
        let unsigned: u64 = 256 + others().map(|&byte| u64::from(byte)).sum::<u64>();
        let signed: i64 = 256 + others().map(|&byte| i64::from(byte as i8)).sum::<i64>();
        if stated != unsigned && i64::try_from(stated).ok() != Some(signed) {
            return None;
        }
        let size = number(&block[124..136])?;
        let mut name = text(up_to_nul(&block[..100]));
        // GNU's own format keeps times where ustar has the prefix.
        if &block[257..263] == b"ustar\0" && block[345] != 0 {
            name = format!("{}/{name}", text(up_to_nul(&block[345..500])));
        }
        Some(Header {
            name,
            size,
            kind: block[156],
            sparse_goes_on: block[482] != 0,
        })
    }
}

impl PaxRecords {
    /// Reads records of the form `LENGTH KEY=VALUE\n`; later ones win, an empty value takes one back.
    fn read(&mut self, data: &[u8]) -> Result<(), &'static str> {
        let mut rest = data;
        // Some writers pad with NULs.
        while rest.first().is_some_and(|&byte| byte != 0) {
            let space = rest
                .iter()
                .take(21)
                .position(|&byte| byte == b' ')
                .ok_or("a record has no length")?;
            let length: usize = std::str::from_utf8(&rest[..space])
                .ok()
                .and_then(|digits| digits.parse().ok())
                .ok_or("the length of a record is not a number")?;
            if length <= space + 1 || length > rest.len() || rest[length - 1] != b'\n' {
                return Err("a record does not end where it says");
            }
            let record = &rest[space + 1..length - 1];
            let equals = record
                .iter()
                .position(|&byte| byte == b'=')
                .ok_or("a record has no `=`")?;
            self.set(&record[..equals], &record[equals + 1..])?;
            rest = &rest[length..];
        }
        Ok(())
    }

    fn set(&mut self, key: &[u8], value: &[u8]) -> Result<(), &'static str> {
        let given = !value.is_empty();
        match key {
            b"path" => self.path = given.then(|| text(value)),
            b"size" => {
                let parse = |value| std::str::from_utf8(value).ok().and_then(|digits| digits.parse().ok());
                self.size = if given {
                    Some(parse(value).ok_or("size is not a number")?)
                } else {
                    None
                };
            }
            b"GNU.sparse.name" => {
                self.sparse = true;
                self.sparse_name = given.then(|| text(value));
            }
            _ if key.starts_with(b"GNU.sparse.") => self.sparse = true,
            _ => {}
        }
        Ok(())
    }
}

fn up_to_nul(field: &[u8]) -> &[u8] {
    field.split(|&byte| byte == 0).next().unwrap_or_default()
}

/// Lossy: names that are not UTF-8 cannot occur in a manifest; they only need to be listed.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A number field: octal text, or base 256 with the highest bit set. None if it is neither, or negative, or
/// too large for a file.
fn number(field: &[u8]) -> Option<u64> {
    let (&first, rest) = field.split_first()?;
    if first & 0x80 != 0 {
        if first != 0x80 {
            return None;
        }
        let mut value: u64 = 0;
        for &byte in rest {
            value = value.checked_mul(256)?.checked_add(u64::from(byte))?;
        }
        return Some(value).filter(|&value| value <= i64::MAX as u64);
    }
    let digits = up_to_nul(field).trim_ascii();
    let mut value: u64 = 0;
    for &byte in digits {
        let digit = byte.checked_sub(b'0').filter(|&digit| digit < 8)?;
        value = value.checked_mul(8)?.checked_add(u64::from(digit))?;
    }
    Some(value).filter(|&value| value <= i64::MAX as u64)
}

#[cfg(test)]
#[path = "tar_tests.rs"]
mod tests;
