//! NumPy's `.npz`: a zip file with an array as `NAME.npy` for each name. The form of an array is that of NumPy's NEP 1: a
//! header in Python's notation, and then the values.
//!
//! Not read by candle, which knows no arrays in Fortran's order and allocates what a header claims.

use std::fs::File;
use std::path::Path;

use super::broken;
use super::zip::{Region, packed_members};
use crate::Result;

const MAGIC: &[u8] = b"\x93NUMPY";
/// The longest header that is read; NumPy writes some hundred bytes.
const LONGEST_HEADER: u64 = 65_536;

/// The arrays of these names and shapes (one or two sizes), row-major. They are of f32 or f64, in C's or Fortran's order.
///
/// # Errors
/// If the file is damaged, lacks an array, or one has another shape or type, or a value that is not finite.
pub fn read_npz(path: &Path, arrays: &[(&str, &[usize])]) -> Result<Vec<Vec<f64>>> {
    let file = File::open(path).map_err(|error| broken(path, error))?;
    let length = file.metadata().map_err(|error| broken(path, error))?.len();
    let region = Region {
        file: &file,
        start: 0,
        length,
    };
    let members = packed_members(&region).map_err(|what| broken(path, what))?;
    let read = |&(name, shape): &(&str, &[usize])| {
        let member = members
            .get(&format!("{name}.npy"))
            .ok_or_else(|| broken(path, format!("has no array `{name}`")))?;
        let most = LONGEST_HEADER + 8 * shape.iter().product::<usize>() as u64;
        let array = member.read(&region, most).and_then(|bytes| values(&bytes, shape));
        array.map_err(|what| broken(path, format!("array `{name}` {what}")))
    };
    arrays.iter().map(read).collect()
}

/// The values of an array of this shape.
fn values(bytes: &[u8], shape: &[usize]) -> std::result::Result<Vec<f64>, String> {
    let damaged = "is not an array of NumPy, or is cut off";
    let rest = bytes.strip_prefix(MAGIC).ok_or(damaged)?;
    let (header, data) = match rest {
        [1, _, a, b, rest @ ..] => rest.split_at_checked(usize::from(u16::from_le_bytes([*a, *b]))),
        [2 | 3, _, a, b, c, d, rest @ ..] => rest.split_at_checked(u32::from_le_bytes([*a, *b, *c, *d]) as usize),
        _ => None,
    }
    .ok_or(damaged)?;
    let header = std::str::from_utf8(header).map_err(|_| damaged)?;
    let field = |name: &str| {
        let key = format!("'{name}':");
        let at = header.find(&key)?;
        Some(header[at + key.len()..].trim_start())
    };
    let (sizes, _) = field("shape")
        .and_then(|text| text.strip_prefix('(')?.split_once(')'))
        .ok_or(damaged)?;
    let sizes = sizes.split(',').map(str::trim).filter(|size| !size.is_empty());
    let found = sizes
        .map(str::parse::<usize>)
        .collect::<std::result::Result<Vec<_>, _>>();
    let found = found.map_err(|_| damaged)?;
    if found != shape {
        return Err(format!("has shape {found:?}, {shape:?} is needed"));
    }
    let (descr, _) = field("descr")
        .and_then(|text| text.strip_prefix('\'')?.split_once('\''))
        .ok_or(damaged)?;
    let values: Vec<f64> = match descr {
        "<f4" => {
            let (values, rest) = data.as_chunks();
            rest.is_empty().then(|| {
                values
                    .iter()
                    .map(|&value| f64::from(f32::from_le_bytes(value)))
                    .collect()
            })
        }
        "<f8" => {
            let (values, rest) = data.as_chunks();
            rest.is_empty()
                .then(|| values.iter().map(|&value| f64::from_le_bytes(value)).collect())
        }
        other => return Err(format!("is of the type {other}; <f4 or <f8 is needed")),
    }
    .ok_or(damaged)?;
    if values.len() != shape.iter().product::<usize>() {
        return Err(damaged.into());
    }
    if values.iter().any(|value| !value.is_finite()) {
        return Err("has values that are not finite".into());
    }
    let by_columns = field("fortran_order").ok_or(damaged)?.starts_with("True");
    match *shape {
        [rows, columns] if by_columns => Ok((0..rows * columns)
            .map(|at| values[at % columns * rows + at / columns])
            .collect()),
        _ => Ok(values),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn npy(header: &str, values: &[u8]) -> Vec<u8> {
        let mut bytes = b"\x93NUMPY\x01\0".to_vec();
        bytes.extend((header.len() as u16).to_le_bytes());
        bytes.extend(header.as_bytes());
        bytes.extend(values);
        bytes
    }

    /// A zip file with one member. Its checksum, which is not looked at, is zero.
    fn zip(name: &str, contents: &[u8], deflated: bool) -> Vec<u8> {
        let mut packed = contents.to_vec();
        if deflated {
            let mut packer = flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::default());
            packer.write_all(contents).unwrap();
            packed = packer.finish().unwrap();
        }
        // What both headers have: flags, method, time, date, checksum, lengths, those of the name and of what is extra.
        let mut fields = vec![0, 0, if deflated { 8 } else { 0 }, 0];
        fields.extend([0; 8]);
        fields.extend((packed.len() as u32).to_le_bytes());
        fields.extend((contents.len() as u32).to_le_bytes());
        fields.extend((name.len() as u16).to_le_bytes());
        fields.extend([0, 0]);
        let local = [b"PK\x03\x04\x14\0", &fields[..], name.as_bytes(), &packed].concat();
        let directory = [b"PK\x01\x02\x14\0\x14\0", &fields[..], &[0; 14], name.as_bytes()].concat();
        let mut end = b"PK\x05\x06\0\0\0\0\x01\0\x01\0".to_vec();
        end.extend((directory.len() as u32).to_le_bytes());
        end.extend((local.len() as u32).to_le_bytes());
        end.extend([0, 0]);
        [local, directory, end].concat()
    }

    fn read(file: &[u8], shape: &[usize]) -> std::result::Result<Vec<f64>, String> {
        let place = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(place.path(), file).unwrap();
        read_npz(place.path(), &[("x", shape)])
            .map(|mut arrays| arrays.remove(0))
            .map_err(|error| error.to_string())
    }

    const HEADER: &str = "{'descr': '<f8', 'fortran_order': False, 'shape': (2, 3), }\n";

    #[test]
    fn arrays_are_read_in_either_order_stored_or_compressed() {
        let rows: Vec<u8> = (0..6).flat_map(|value| f64::from(value).to_le_bytes()).collect();
        for deflated in [false, true] {
            let file = zip("x.npy", &npy(HEADER, &rows), deflated);
            assert_eq!(read(&file, &[2, 3]).unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
            // The same bytes, column by column.
            let header = HEADER.replace("False", "True");
            let file = zip("x.npy", &npy(&header, &rows), deflated);
            assert_eq!(read(&file, &[2, 3]).unwrap(), [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]);
        }
        let halves: Vec<u8> = [1.5f32, -2.0].into_iter().flat_map(f32::to_le_bytes).collect();
        let header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }";
        let file = zip("x.npy", &npy(header, &halves), false);
        assert_eq!(read(&file, &[2]).unwrap(), [1.5, -2.0]);
    }

    #[test]
    fn damaged_and_hostile_files_are_errors() {
        let rows: Vec<u8> = (0..6).flat_map(|value| f64::from(value).to_le_bytes()).collect();
        let whole = npy(HEADER, &rows);
        for deflated in [false, true] {
            let file = zip("x.npy", &whole, deflated);
            for end in 0..file.len() {
                assert!(read(&file[..end], &[2, 3]).is_err(), "{end}");
            }
            for at in 0..file.len() {
                // Any damage is an error, not a panic.
                let mut bad = file.clone();
                bad[at] ^= 0xff;
                let _ = read(&bad, &[2, 3]);
            }
        }
        let refused = |contents: &[u8], name: &str| read(&zip(name, contents, true), &[2, 3]).unwrap_err();
        assert!(refused(&whole, "y.npy").contains("has no array `x`"));
        assert!(refused(&whole[..whole.len() - 1], "x.npy").contains("cut off"));
        assert!(refused(&vec![0; 100_000], "x.npy").contains("at most"));
        assert!(refused(&npy(&HEADER.replace("2, 3", "99999999999, 3"), &rows), "x.npy").contains("shape"));
        assert!(refused(&npy(&HEADER.replace("<f8", "|O"), &rows), "x.npy").contains("|O"));
        let bad = npy(HEADER, &[rows[..40].to_vec(), f64::NAN.to_le_bytes().to_vec()].concat());
        assert!(refused(&bad, "x.npy").contains("not finite"));
    }
}
