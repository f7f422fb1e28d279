//! Where the members of a tar are. The tar library reads names and headers of any length into memory, so the walk is done here,
//! and only the fields of a header are the library's.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use tar::{EntryType, Header, PaxExtensions};

use super::zip::Member;

const BLOCK: u64 = 512;
/// The longest name of a member: that of a path on Linux.
const LONGEST_NAME: u64 = 4096;
/// The longest extended header (pax) of a member, which holds hundreds of bytes in practice.
const LONGEST_HEADER: u64 = 64 << 10;
/// The most entries. NeMo's archives have about ten.
const MOST_ENTRIES: usize = 10_000;

/// The regular files of a tar by name. `./` in front of a name is dropped; the last one of a name counts.
pub fn tar_members(file: &File) -> io::Result<BTreeMap<String, Member>> {
    let length = file.metadata()?.len();
    let mut listed = BTreeMap::new();
    let mut at = 0;
    // What the headers before that of a member say of it.
    let mut name: Option<Vec<u8>> = None;
    let mut size: Option<u64> = None;
    for _ in 0..MOST_ENTRIES {
        // A tar whose end mark is missing is read to its end.
        if at >= length {
            return Ok(listed);
        }
        let mut header = Header::new_old();
        file.read_exact_at(header.as_mut_bytes(), at)?;
        if header.as_bytes().iter().all(|&byte| byte == 0) {
            return Ok(listed);
        }
        check_sum(&header)?;
        let kind = header.entry_type();
        let describes_next = kind.is_gnu_longname()
            || kind.is_gnu_longlink()
            || kind.is_pax_local_extensions()
            || kind.is_pax_global_extensions();
        let claimed = header.entry_size()?;
        let member = Member {
            offset: at + BLOCK,
            length: match size {
                Some(size) if !describes_next => size,
                _ => claimed,
            },
        };
        let end = member.length.checked_next_multiple_of(BLOCK);
        let end = end.and_then(|padded| member.offset.checked_add(padded));
        at = end.ok_or_else(|| io::Error::other("a member has no possible size"))?;
        match kind {
            EntryType::GNULongName => {
                let mut long = read_header(file, member, LONGEST_NAME)?;
                long.truncate(long.iter().position(|&byte| byte == 0).unwrap_or(long.len()));
                name = Some(long);
            }
            EntryType::XHeader => {
                for field in PaxExtensions::new(&read_header(file, member, LONGEST_HEADER)?) {
                    let field = field?;
                    match field.key_bytes() {
                        // A GNU name counts more.
                        b"path" if name.is_none() => {
                            let long = field.value_bytes();
                            check_length("name", long.len() as u64, LONGEST_NAME)?;
                            name = Some(long.to_vec());
                        }
                        b"size" => size = field.value().ok().and_then(|value| value.parse().ok()),
                        _ => {}
                    }
                }
            }
            // Its header goes on in further blocks.
            EntryType::GNUSparse => {
                return Err(io::Error::other("a member is a sparse file, which NeMo does not write"));
            }
            _ if describes_next => {}
            _ => {
                let own = name.take().unwrap_or_else(|| header.path_bytes().into_owned());
                size = None;
                if kind.is_file() {
                    let own = String::from_utf8_lossy(&own);
                    listed.insert(own.trim_start_matches("./").to_owned(), member);
                }
            }
        }
    }
    Err(io::Error::other(format!("it has more than {MOST_ENTRIES} members")))
}

/// The contents of what belongs to the next member.
fn read_header(file: &File, member: Member, most: u64) -> io::Result<Vec<u8>> {
    check_length("name or header", member.length, most)?;
    let mut bytes = vec![0; member.length as usize];
    file.read_exact_at(&mut bytes, member.offset)?;
    Ok(bytes)
}

fn check_length(what: &str, length: u64, most: u64) -> io::Result<()> {
    if length <= most {
        return Ok(());
    }
    let what = format!("a member has a {what} of {length} bytes, more than {most}");
    Err(io::Error::other(what))
}

/// The sum of a header's bytes, those of the sum itself taken as blanks.
fn check_sum(header: &Header) -> io::Result<()> {
    let bytes = header.as_bytes();
    let others = bytes[..148].iter().chain(&bytes[156..]);
    let sum = others.map(|&byte| u32::from(byte)).sum::<u32>() + 8 * u32::from(b' ');
    // One that is not a number holds any bytes.
    match header.cksum().is_ok_and(|said| said == sum) {
        true => Ok(()),
        false => Err(io::Error::other("the checksum of a header is wrong")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An entry as it is, with its contents padded.
    fn entry(kind: EntryType, name: &str, size: u64, contents: &[u8]) -> Vec<u8> {
        let mut header = Header::new_gnu();
        header.set_path(name).unwrap();
        header.set_entry_type(kind);
        header.set_size(size);
        header.set_cksum();
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend(contents);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        bytes
    }

    fn list(entries: &[Vec<u8>]) -> Result<Vec<(String, u64, u64)>, String> {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&entries.concat(), 0).unwrap();
        let listed = tar_members(&file).map_err(|error| error.to_string())?;
        let place = |(name, member): (String, Member)| (name, member.offset, member.length);
        Ok(listed.into_iter().map(place).collect())
    }

    #[test]
    fn names_and_sizes_are_those_of_the_headers_before() {
        let long = "n".repeat(300);
        let pax = |key: &str, value: &str| {
            let rest = format!(" {key}={value}\n");
            let length = (1..4)
                .map(|digits| digits + rest.len())
                .find(|length| length.to_string().len() + rest.len() == *length);
            format!("{}{rest}", length.unwrap()).into_bytes()
        };
        let path = pax("path", &format!("./{long}x"));
        let size = pax("size", "3");
        let entries = [
            entry(EntryType::Directory, "d/", 0, b""),
            entry(EntryType::Regular, "./a", 2, b"aa"),
            entry(
                EntryType::GNULongName,
                "././@LongLink",
                301,
                format!("{long}\0").as_bytes(),
            ),
            entry(EntryType::Regular, "b", 1, b"b"),
            entry(EntryType::XHeader, "h", path.len() as u64, &path),
            entry(EntryType::Regular, "c", 1, b"c"),
            // A file of more than 8 GiB has its size there.
            entry(EntryType::XHeader, "h", size.len() as u64, &size),
            entry(EntryType::Regular, "d", 0, b"ddd"),
            entry(EntryType::Regular, "e", 1, b"e"),
            vec![0; 1024],
            entry(EntryType::Regular, "behind the end", 0, b""),
        ];
        let listed = list(&entries).unwrap();
        let begins: Vec<u64> = entries
            .iter()
            .scan(0, |at, bytes| {
                let begin = *at + 512;
                *at += bytes.len() as u64;
                Some(begin)
            })
            .collect();
        let expected = [
            ("a".into(), begins[1], 2),
            ("d".into(), begins[7], 3),
            ("e".into(), begins[8], 1),
            (long.clone(), begins[3], 1),
            (format!("{long}x"), begins[5], 1),
        ];
        assert_eq!(listed, expected);
    }

    #[test]
    fn headers_beyond_reason_are_refused_before_they_are_read() {
        let file = |name: &str| entry(EntryType::Regular, name, 0, b"");
        let path = format!("5011 path={}\n", "n".repeat(5000)).into_bytes();
        let mut damaged = file("a");
        damaged[0] ^= 1;
        for (entries, expected) in [
            (
                vec![entry(EntryType::GNULongName, "l", 5 << 30, b"")],
                "name or header of 5368709120 bytes",
            ),
            (
                vec![entry(EntryType::XHeader, "l", 5 << 30, b"")],
                "name or header of 5368709120 bytes",
            ),
            (
                vec![entry(EntryType::XHeader, "l", path.len() as u64, &path)],
                "has a name of 5000 bytes",
            ),
            (
                vec![entry(EntryType::GNULongName, "l", 600, b"cut")],
                "fill whole buffer",
            ),
            (vec![entry(EntryType::Regular, "a", u64::MAX, b"")], "no possible size"),
            (vec![entry(EntryType::GNUSparse, "a", 0, b"")], "sparse"),
            (
                vec![entry(EntryType::XHeader, "h", 9, b"no header")],
                "malformed pax extension",
            ),
            (vec![file("a"); 10_001], "more than 10000 members"),
            (vec![damaged], "checksum"),
            (vec![b"no tar at all\n".repeat(100)], "checksum"),
            (vec![vec![b'x'; 100]], "fill whole buffer"),
        ] {
            let error = list(&entries).unwrap_err();
            assert!(error.contains(expected), "{expected}: {error}");
        }
        // Those that describe all members and links are skipped, of any size.
        let skipped = [
            entry(EntryType::XGlobalHeader, "g", 100_000, &[b'x'; 100_000]),
            entry(EntryType::GNULongLink, "k", 100_000, &[b'x'; 100_000]),
            file("a"),
        ];
        assert_eq!(list(&skipped).unwrap().len(), 1);
    }
}
