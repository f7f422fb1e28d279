//! Validates structs in Thrift's compact protocol (parquet's headers) before the parquet crate reads them.

use std::fmt;

/// Most levels of nested structs and lists, as in the parquet crate.
const DEPTH: u8 = 64;

/// Most booleans in the lists of a struct, all together. In a list that is passed over they take no bytes, so that a few
/// bytes could speak of two thousand million; headers of parquet have no such lists.
const BOOLEANS: u64 = 1 << 16;

/// What is wrong with a struct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// It continues beyond the given bytes.
    Cut,
    /// It is not valid.
    Nonsense(&'static str),
}

impl fmt::Display for Fault {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Cut => out.write_str("it is cut off"),
            Fault::Nonsense(what) => out.write_str(what),
        }
    }
}

/// The largest number that the integer field `wanted` of the struct at the start of `bytes` has, 0 where it has none.
/// All of the struct is passed over, as the parquet crate passes over what it does not know.
///
/// # Errors
/// When the struct does not end within `bytes`, or no reader should try to read it.
pub(super) fn number_in_struct(bytes: &[u8], wanted: i64) -> Result<i64, Fault> {
    let mut rest = Rest { bytes, booleans: 0 };
    let (mut id, mut largest) = (0, 0);
    while let Some((kind, step)) = rest.field()? {
        id = match step {
            0 => rest.signed()?,
            step => id.wrapping_add(i64::from(step)),
        };
        match kind {
            4..=6 => {
                let number = rest.signed()?;
                if id == wanted {
                    largest = largest.max(number);
                }
            }
            _ => rest.skip(kind, DEPTH)?,
        }
    }
    Ok(largest)
}

/// The remaining bytes.
struct Rest<'a> {
    bytes: &'a [u8],
    /// In the lists so far.
    booleans: u64,
}

impl Rest<'_> {
    fn byte(&mut self) -> Result<u8, Fault> {
        let (first, rest) = self.bytes.split_first().ok_or(Fault::Cut)?;
        self.bytes = rest;
        Ok(*first)
    }

    fn pass(&mut self, count: u64) -> Result<(), Fault> {
        let count = usize::try_from(count).map_err(|_| Fault::Cut)?;
        self.bytes = self.bytes.get(count..).ok_or(Fault::Cut)?;
        Ok(())
    }

    fn number(&mut self) -> Result<u64, Fault> {
        let mut number = 0;
        for shift in (0..70).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7F).wrapping_shl(shift);
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(Fault::Nonsense("a number in it has more than ten bytes"))
    }

    fn signed(&mut self) -> Result<i64, Fault> {
        let number = self.number()?;
        Ok((number >> 1) as i64 ^ -((number & 1) as i64))
    }

    /// Kind of the next field and how far its number is from the last (0: the number follows); none at the end.
    fn field(&mut self) -> Result<Option<(u8, u8)>, Fault> {
        let byte = self.byte()?;
        Ok((byte & 0xF != 0).then_some((byte & 0xF, byte >> 4)))
    }

    /// Passes over a value of a kind.
    fn skip(&mut self, kind: u8, depth: u8) -> Result<(), Fault> {
        if depth == 0 {
            return Err(Fault::Nonsense("it is nested too deep"));
        }
        match kind {
            // In the kind itself.
            1 | 2 => Ok(()),
            3 => self.pass(1),
            4..=6 => self.number().map(drop),
            7 => self.pass(8),
            8 => {
                let length = self.number()?;
                self.pass(length)
            }
            9 | 10 => {
                let head = self.byte()?;
                let count = match head >> 4 {
                    15 => self.number()?,
                    few => u64::from(few),
                };
                self.skip_all(&[head & 0xF], count, depth)
            }
            11 => match self.number()? {
                0 => Ok(()),
                count => {
                    let kinds = self.byte()?;
                    self.skip_all(&[kinds >> 4, kinds & 0xF], count, depth)
                }
            },
            12 => {
                while let Some((kind, step)) = self.field()? {
                    if step == 0 {
                        self.number()?;
                    }
                    self.skip(kind, depth - 1)?;
                }
                Ok(())
            }
            13 => self.pass(16),
            _ => Err(Fault::Nonsense("it has a field of a kind that there is not")),
        }
    }

    /// Passes over `count` times values of these kinds.
    fn skip_all(&mut self, kinds: &[u8], count: u64, depth: u8) -> Result<(), Fault> {
        if kinds.iter().all(|kind| matches!(kind, 1 | 2)) {
            self.booleans = self.booleans.saturating_add(count);
            return match self.booleans {
                0..=BOOLEANS => Ok(()),
                _ => Err(Fault::Nonsense("it has lists of too many booleans")),
            };
        }
        // Some writers give an empty list no kind.
        for _ in 0..count {
            for &kind in kinds {
                self.skip(kind, depth - 1)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_among_fields_of_every_kind() {
        // 1: i32 3; 2: i64 -5; 3: true; 4: text "ab"; 5: list of 2 i32; 6: map of one byte to false; 7: struct {1: i8};
        // 8: double; 24, its number given: i32 300; 25: a list without a kind; end.
        let mut bytes = vec![0x15, 6, 0x16, 9, 0x11, 0x18, 2, b'a', b'b', 0x19, 0x25, 2, 4];
        bytes.extend([0x1B, 1, 0x32, 7, 0x1C, 0x13, 9, 0, 0x17, 0, 0, 0, 0, 0, 0, 0, 0]);
        bytes.extend([0x05, 48, 0xD8, 0x04, 0x19, 0, 0, 0xFF]);
        for (field, expected) in [(1, 3), (2, 0), (24, 300), (7, 0), (26, 0)] {
            assert_eq!(number_in_struct(&bytes, field), Ok(expected), "field {field}");
        }
        let whole = bytes.len() - 1;
        for end in 0..whole {
            assert_eq!(number_in_struct(&bytes[..end], 1), Err(Fault::Cut), "{end} bytes");
        }
        // Of two the larger counts.
        assert_eq!(number_in_struct(&[0x15, 8, 0x05, 2, 2, 0], 1), Ok(4));
    }

    #[test]
    fn what_would_take_for_ever_or_all_memory_is_a_fault() {
        let many = [0xFF, 0xFF, 0xFF, 0xFF, 0x07];
        let begun = |head: &[u8]| [head, &many].concat();
        for nonsense in [
            // Lists of booleans of both kinds, a map of them, a list of lists of them.
            begun(&[0x19, 0xF1]),
            begun(&[0x19, 0xF2]),
            [&begun(&[0x1B])[..], &[0x22]].concat(),
            begun(&[0x19, 0x29, 0xF1]),
            // Many lists of not so many.
            [0x19, 0xF1, 0xFF, 0xFF, 0x03].repeat(2),
            vec![0x1E],
            [0xFF; 11].to_vec(),
            vec![0x16, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF],
            [vec![0x1C; 100], vec![0; 100]].concat(),
        ] {
            let found = number_in_struct(&nonsense, 1);
            assert!(matches!(found, Err(Fault::Nonsense(_))), "{nonsense:02x?}: {found:?}");
        }
        for cut in [begun(&[0x18]), begun(&[0x19, 0xF7]), begun(&[0x19, 0xFC])] {
            assert_eq!(number_in_struct(&cut, 1), Err(Fault::Cut), "{cut:02x?}");
        }
    }
}
