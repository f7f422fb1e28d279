//! Writes tars (ustar, and GNU's long names). Without owners and times, so that the same members give the same bytes.

use std::io::{self, Write};

/// Bytes of a header, and of what everything in a tar is rounded up to.
pub const BLOCK: usize = 512;
/// The end of a tar.
pub const END: [u8; 2 * BLOCK] = [0; 2 * BLOCK];

/// Longest name in a header.
const MOST_NAME: usize = 100;
/// The member whose data are the name of the next one, and its type.
const LONG_NAME: (&str, &str) = ("././@LongLink", "L");
const REGULAR: &str = "0";

/// Appends a regular file.
///
/// # Errors
/// If the name is empty or has a NUL, the data have 8 GiB or more, or `to` cannot be written.
pub fn write_member(to: &mut impl Write, name: &str, data: &[u8]) -> io::Result<()> {
    let wrong = |why| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    if name.is_empty() || name.contains('\0') {
        return wrong("its name is empty or has a NUL");
    }
    // 11 octal digits.
    if data.len() >= 1 << 33 {
        return wrong("it has 8 GiB or more");
    }
    let mut short = name.as_bytes();
    if short.len() > MOST_NAME {
        let long = format!("{name}\0");
        write(to, (LONG_NAME.0.as_bytes(), LONG_NAME.1), long.as_bytes())?;
        short = &short[..MOST_NAME];
    }
    write(to, (short, REGULAR), data)
}

fn write(to: &mut impl Write, (name, kind): (&[u8], &str), data: &[u8]) -> io::Result<()> {
    let mut header = [0u8; BLOCK];
    let size = format!("{:011o}\0", data.len());
    let time = format!("{:011o}\0", 0);
    let fields: [(usize, &[u8]); 9] = [
        (0, name),
        (100, b"0000644\0"),
        (108, b"0000000\0"),
        (116, b"0000000\0"),
        (124, size.as_bytes()),
        (136, time.as_bytes()),
        // The sum is made with spaces in its own place.
        (148, b"        "),
        (156, kind.as_bytes()),
        (257, b"ustar\x0000"),
    ];
    for (at, text) in fields {
        header[at..at + text.len()].copy_from_slice(text);
    }
    let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
    header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    to.write_all(&header)?;
    to.write_all(data)?;
    to.write_all(&END[..data.len().next_multiple_of(BLOCK) - data.len()])
}

#[cfg(test)]
mod tests {
    use std::io::{Cursor, Read};

    use super::*;
    use crate::tar::{End, list};

    /// The reader of the crate `tar`, and our own, find names and data of any length.
    #[test]
    fn readers_find_what_is_written() {
        let long = format!("{}/ह{}", "f".repeat(97), "n".repeat(200));
        let members = [
            ("a/b.flac", vec![1u8; 512]),
            (&"x".repeat(100), vec![2; 513]),
            (&"y".repeat(101), Vec::new()),
            (&long, vec![3; 1]),
            ("a\nb.json", b"{}".to_vec()),
        ];
        let mut bytes = Vec::new();
        for (name, data) in &members {
            write_member(&mut bytes, name, data).unwrap();
        }
        bytes.extend_from_slice(&END);
        let mut archive = ::tar::Archive::new(bytes.as_slice());
        let found = archive.entries().unwrap().map(|entry| {
            let mut entry = entry.unwrap();
            let mut data = Vec::new();
            entry.read_to_end(&mut data).unwrap();
            (String::from_utf8(entry.path_bytes().to_vec()).unwrap(), data)
        });
        let expected = members.clone().map(|(name, data)| (name.to_owned(), data));
        assert_eq!(found.collect::<Vec<_>>(), expected);
        let listing = list(&mut Cursor::new(&bytes), bytes.len() as u64).unwrap();
        assert_eq!(listing.end, End::Whole);
        let found = listing.members.iter().map(|member| {
            let start = member.offset as usize;
            (member.name.clone(), bytes[start..start + member.size as usize].to_vec())
        });
        assert_eq!(found.collect::<Vec<_>>(), expected);
        for name in ["", "a\0b"] {
            assert!(write_member(&mut Vec::new(), name, b"").is_err());
        }
    }
}
