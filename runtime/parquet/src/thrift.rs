//! Validates structs in Thrift's compact protocol (parquet's headers) before the parquet crate reads them.

use std::fmt;

/// Most levels of nested structs and lists, as in the parquet crate.
const DEPTH: u8 = 64;

/// Most booleans in the lists of a struct, all together. In a list that is passed over they take no bytes, so that a few
/// bytes could declare 2^31 elements; headers of parquet have no such lists.
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

/// A type, as parquet's format definition (`parquet.thrift`) gives it to a field.
#[derive(Clone, Copy)]
enum Type {
    Bool,
    I8,
    /// Also `i16` and enumerations.
    I32,
    I64,
    Double,
    /// A text, or bytes.
    Binary,
    List(&'static Type),
    Struct(&'static Struct),
}

/// A struct or union: its fields with their numbers.
struct Struct(&'static [(i16, Type)]);

use Type::{Binary, Bool, Double, I8, I32, I64, List};

static EMPTY: Struct = Struct(&[]);
static STATISTICS: Struct = Struct(&[
    (1, Binary),
    (2, Binary),
    (3, I64),
    (4, I64),
    (5, Binary),
    (6, Binary),
    (7, Bool),
    (8, Bool),
]);
static PAGE_HEADER: Struct = Struct(&[
    (1, I32),
    (UNCOMPRESSED_SIZE, I32),
    (3, I32),
    (4, I32),
    (5, Type::Struct(&DATA_PAGE_HEADER)),
    (6, Type::Struct(&EMPTY)),
    (7, Type::Struct(&Struct(&[(1, I32), (2, I32), (3, Bool)]))),
    (8, Type::Struct(&DATA_PAGE_HEADER_V2)),
]);
static DATA_PAGE_HEADER: Struct = Struct(&[(1, I32), (2, I32), (3, I32), (4, I32), (5, Type::Struct(&STATISTICS))]);
static DATA_PAGE_HEADER_V2: Struct = Struct(&[
    (1, I32),
    (2, I32),
    (3, I32),
    (4, I32),
    (5, I32),
    (6, I32),
    (7, Bool),
    (8, Type::Struct(&STATISTICS)),
]);
static FILE_METADATA: Struct = Struct(&[
    (1, I32),
    (2, List(&Type::Struct(&SCHEMA_ELEMENT))),
    (3, I64),
    (4, List(&Type::Struct(&ROW_GROUP))),
    (5, List(&Type::Struct(&KEY_VALUE))),
    (6, Binary),
    (7, List(&Type::Struct(&Struct(&[(1, Type::Struct(&EMPTY))])))),
    (8, Type::Struct(&ENCRYPTION)),
    (9, Binary),
]);
static KEY_VALUE: Struct = Struct(&[(1, Binary), (2, Binary)]);
static ENCRYPTION: Struct = Struct(&[(1, Type::Struct(&CIPHER)), (2, Type::Struct(&CIPHER))]);
static CIPHER: Struct = Struct(&[(1, Binary), (2, Binary), (3, Bool)]);
static SCHEMA_ELEMENT: Struct = Struct(&[
    (1, I32),
    (TYPE_LENGTH, I32),
    (3, I32),
    (4, Binary),
    (NUM_CHILDREN, I32),
    (6, I32),
    (7, I32),
    (8, I32),
    (9, I32),
    (10, Type::Struct(&LOGICAL_TYPE)),
]);
static LOGICAL_TYPE: Struct = Struct(&[
    (1, Type::Struct(&EMPTY)),
    (2, Type::Struct(&EMPTY)),
    (3, Type::Struct(&EMPTY)),
    (4, Type::Struct(&EMPTY)),
    (5, Type::Struct(&Struct(&[(1, I32), (2, I32)]))),
    (6, Type::Struct(&EMPTY)),
    (7, Type::Struct(&TIME)),
    (8, Type::Struct(&TIME)),
    (10, Type::Struct(&Struct(&[(1, I8), (2, Bool)]))),
    (11, Type::Struct(&EMPTY)),
    (12, Type::Struct(&EMPTY)),
    (13, Type::Struct(&EMPTY)),
    (14, Type::Struct(&EMPTY)),
    (15, Type::Struct(&EMPTY)),
    (16, Type::Struct(&Struct(&[(1, I8)]))),
    (17, Type::Struct(&Struct(&[(1, Binary)]))),
    (18, Type::Struct(&Struct(&[(1, Binary), (2, I32)]))),
]);
static TIME: Struct = Struct(&[(1, Bool), (2, Type::Struct(&TIME_UNIT))]);
static TIME_UNIT: Struct = Struct(&[
    (1, Type::Struct(&EMPTY)),
    (2, Type::Struct(&EMPTY)),
    (3, Type::Struct(&EMPTY)),
]);
static ROW_GROUP: Struct = Struct(&[
    (1, List(&Type::Struct(&COLUMN_CHUNK))),
    (2, I64),
    (3, I64),
    (4, List(&Type::Struct(&Struct(&[(1, I32), (2, Bool), (3, Bool)])))),
    (5, I64),
    (6, I64),
    (7, I32),
]);
static COLUMN_CHUNK: Struct = Struct(&[
    (1, Binary),
    (2, I64),
    (3, Type::Struct(&COLUMN_METADATA)),
    (4, I64),
    (5, I32),
    (6, I64),
    (7, I32),
    (8, Type::Struct(&COLUMN_CRYPTO)),
    (9, Binary),
]);
static COLUMN_CRYPTO: Struct = Struct(&[
    (1, Type::Struct(&EMPTY)),
    (2, Type::Struct(&Struct(&[(1, List(&Binary)), (2, Binary)]))),
]);
static COLUMN_METADATA: Struct = Struct(&[
    (1, I32),
    (2, List(&I32)),
    (3, List(&Binary)),
    (4, I32),
    (5, I64),
    (6, I64),
    (7, I64),
    (8, List(&Type::Struct(&KEY_VALUE))),
    (9, I64),
    (10, I64),
    (11, I64),
    (12, Type::Struct(&STATISTICS)),
    (13, List(&Type::Struct(&Struct(&[(1, I32), (2, I32), (3, I32)])))),
    (14, I64),
    (15, I32),
    (16, Type::Struct(&Struct(&[(1, I64), (2, List(&I64)), (3, List(&I64))]))),
    (17, Type::Struct(&GEOSPATIAL)),
]);
static GEOSPATIAL: Struct = Struct(&[(1, Type::Struct(&BOX)), (2, List(&I32))]);
static BOX: Struct = Struct(&[
    (1, Double),
    (2, Double),
    (3, Double),
    (4, Double),
    (5, Double),
    (6, Double),
    (7, Double),
    (8, Double),
]);

/// The field of a page's header that says how many bytes the page has when it is decompressed.
const UNCOMPRESSED_SIZE: i16 = 2;

/// The fields of a schema's element that say how many bytes a value of a fixed length has, and how many of the next elements
/// belong to it.
const TYPE_LENGTH: i16 = 2;
const NUM_CHILDREN: i16 = 5;

/// Most bytes of a value of a fixed length: a batch of rows has thousands of them.
const LONGEST_VALUE: i64 = 1 << 16;

/// How many bytes the page with this header has when it is decompressed.
///
/// # Errors
/// When the header does not end within `bytes`, or no reader should try to read it.
pub(super) fn page_bytes(header: &[u8]) -> Result<i64, Fault> {
    let mut largest = 0;
    Rest::of(header).read_struct(&PAGE_HEADER, &mut |of, field, number| {
        if std::ptr::eq(of, &raw const PAGE_HEADER) && field == UNCOMPRESSED_SIZE {
            largest = largest.max(number);
        }
        Ok(())
    })?;
    Ok(largest)
}

/// Whether the parquet crate can read a file's metadata: all that it reads has the type that it takes it for, no list says that
/// it has more elements than there are, and the schema is not nested so deep that the crate's recursion would end the program.
///
/// # Errors
/// When they do not end within `bytes`, or no reader should try to read them.
pub(super) fn check_metadata(bytes: &[u8]) -> Result<(), Fault> {
    // How many children each element of the schema has.
    let mut children: Vec<i64> = Vec::new();
    Rest::of(bytes).read_struct(&FILE_METADATA, &mut |of, field, number| {
        if std::ptr::eq(of, &raw const SCHEMA_ELEMENT) {
            match (field, children.last_mut()) {
                (BEGIN, _) => children.push(0),
                (NUM_CHILDREN, Some(last)) => *last = number,
                (TYPE_LENGTH, _) if number > LONGEST_VALUE => {
                    return Err(Fault::Nonsense(
                        "its schema has values of a fixed length of more than 64 KiB",
                    ));
                }
                _ => {}
            }
        }
        Ok(())
    })?;
    let mut open: Vec<i64> = Vec::new();
    for &count in &children {
        while open.last() == Some(&0) {
            open.pop();
        }
        if let Some(left) = open.last_mut() {
            *left -= 1;
        }
        if count < 0 || count as usize > children.len() {
            return Err(Fault::Nonsense(
                "its schema has a group with more fields than there are",
            ));
        }
        if count > 0 {
            open.push(count);
        }
        if open.len() > usize::from(DEPTH) {
            return Err(Fault::Nonsense("its schema is nested too deep"));
        }
    }
    Ok(())
}

/// In place of a field's number: a struct begins.
const BEGIN: i16 = 0;

/// Is told of each struct that begins and each integer: the struct, the field and the number.
type OnNumber<'a> = &'a mut dyn FnMut(&'static Struct, i16, i64) -> Result<(), Fault>;

/// The remaining bytes.
struct Rest<'a> {
    bytes: &'a [u8],
    /// In the lists so far.
    booleans: u64,
}

impl Rest<'_> {
    fn of(bytes: &[u8]) -> Rest<'_> {
        Rest { bytes, booleans: 0 }
    }

    /// Passes over a struct, whose known fields must have their types.
    fn read_struct(&mut self, of: &'static Struct, on_number: OnNumber<'_>) -> Result<(), Fault> {
        on_number(of, BEGIN, 0)?;
        let mut id = 0;
        while let Some((kind, step)) = self.field()? {
            id = match step {
                0 => self.signed()?,
                step => id + i64::from(step),
            };
            // The parquet crate would take the number modulo 2^16.
            let field = i16::try_from(id).map_err(|_| Fault::Nonsense("it has a field whose number is too large"))?;
            match of.0.iter().find(|(number, _)| *number == field) {
                Some((_, known)) => self.read(kind, known, of, field, on_number)?,
                None => self.skip(kind, DEPTH)?,
            }
        }
        Ok(())
    }

    /// Passes over the value of a field that is known.
    fn read(
        &mut self,
        kind: u8,
        known: &'static Type,
        of: &'static Struct,
        field: i16,
        on_number: OnNumber<'_>,
    ) -> Result<(), Fault> {
        match (known, kind) {
            (Bool, 1 | 2) => Ok(()),
            (I8, 3) => self.pass(1),
            (I32, 4..=6) => {
                let number = self.signed()?;
                // The parquet crate would take it modulo 2^32.
                i32::try_from(number).map_err(|_| Fault::Nonsense("a number in it has more than 32 bits"))?;
                on_number(of, field, number)
            }
            (I64, 4..=6) => {
                let number = self.signed()?;
                on_number(of, field, number)
            }
            (Double, 7) => self.pass(8),
            (Binary, 8) => {
                let length = self.number()?;
                self.pass(length)
            }
            (List(element), 9 | 10) => {
                let (kind, count) = self.list()?;
                // Each takes a byte at least, and memory is allocated for as many.
                if count > self.bytes.len() as u64 {
                    return Err(Fault::Cut);
                }
                for _ in 0..count {
                    self.read(kind, element, of, field, on_number)?;
                }
                Ok(())
            }
            (Type::Struct(inner), 12) => self.read_struct(inner, on_number),
            _ => Err(Fault::Nonsense(
                "it has a field of another type than parquet's format gives it",
            )),
        }
    }

    /// The head of a list: the kind of its elements, and how many they are.
    fn list(&mut self) -> Result<(u8, u64), Fault> {
        let head = self.byte()?;
        let count = match head >> 4 {
            15 => self.number()?,
            few => u64::from(few),
        };
        Ok((head & 0xF, count))
    }

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
                let (kind, count) = self.list()?;
                self.skip_all(&[kind], count, depth)
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
            _ => Err(Fault::Nonsense("it has a field of unknown type")),
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
        static KINDS: Struct = Struct(&[
            (1, I32),
            (2, I64),
            (3, Bool),
            (4, Binary),
            (5, List(&I32)),
            (7, Type::Struct(&Struct(&[(1, I8)]))),
            (8, Double),
            (24, I32),
            (25, List(&Binary)),
        ]);
        for of in [&KINDS, &EMPTY] {
            let mut found = Vec::new();
            let mut note = |of: &'static Struct, field, number| {
                if std::ptr::eq(of, &raw const KINDS) && field != BEGIN {
                    found.push((field, number));
                }
                Ok(())
            };
            assert_eq!(Rest::of(&bytes).read_struct(of, &mut note), Ok(()));
            let whole = bytes.len() - 1;
            for end in 0..whole {
                let cut = Rest::of(&bytes[..end]).read_struct(of, &mut |_, _, _| Ok(()));
                assert_eq!(cut, Err(Fault::Cut), "{end} bytes");
            }
            match of.0.is_empty() {
                true => assert_eq!(found, []),
                false => assert_eq!(found, [(1, 3), (2, -5), (5, 1), (5, 2), (24, 300)]),
            }
        }
        // Of two the larger counts.
        assert_eq!(page_bytes(&[0x25, 8, 0x05, 4, 2, 0]), Ok(4));
    }

    #[test]
    fn what_would_take_for_ever_or_all_memory_is_a_fault() {
        let many = [0xFF, 0xFF, 0xFF, 0xFF, 0x07];
        let begun = |head: &[u8]| [head, &many].concat();
        let passed = |bytes: &[u8]| Rest::of(bytes).read_struct(&EMPTY, &mut |_, _, _| Ok(()));
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
            let found = passed(&nonsense);
            assert!(matches!(found, Err(Fault::Nonsense(_))), "{nonsense:02x?}: {found:?}");
        }
        for cut in [begun(&[0x18]), begun(&[0x19, 0xF7]), begun(&[0x19, 0xFC])] {
            assert_eq!(passed(&cut), Err(Fault::Cut), "{cut:02x?}");
        }
    }

    /// The metadata of a file without rows, with these bytes as its schema's list, and those before and behind.
    fn metadata(schema: &[u8]) -> Vec<u8> {
        [&[0x15, 2, 0x19][..], schema, &[0x16, 0, 0x19, 0x0C, 0]].concat()
    }

    #[test]
    fn metadata_that_the_parquet_crate_would_take_for_more_than_they_are_are_a_fault() {
        // An element of a schema with that many fields: its name, the number, the end.
        let element = |fields: u8| vec![0x48, 1, b'x', 0x15, 2 * fields, 0];
        let list = |elements: &[Vec<u8>]| [&[0xFC, elements.len() as u8][..], &elements.concat()].concat();
        let nested = |depth: usize| {
            let mut elements = vec![element(1); depth];
            elements.push(element(0));
            metadata(&list(&elements))
        };
        for good in [
            metadata(&list(&[element(2), element(0), element(0)])),
            nested(3),
            nested(64),
        ] {
            assert_eq!(check_metadata(&good), Ok(()), "{good:02x?}");
        }
        let long_value = |bytes: &[u8]| [&[0x15, 14, 0x15], bytes, &[0x28, 1, b'x', 0]].concat();
        assert_eq!(
            check_metadata(&metadata(&list(&[long_value(&[0x80, 0x80, 8])]))),
            Ok(())
        );
        for (bad, said) in [
            (nested(65), "nested too deep"),
            (
                metadata(&list(&[element(60), element(0)])),
                "more fields than there are",
            ),
            (metadata(&list(&[long_value(&[0x82, 0x80, 8])])), "more than 64 KiB"),
            // The version is said to be a byte, which is not a number of seven bits each; and the schema a text.
            (vec![0x13, 0x80, 0x19, 0xFC, 0], "another type"),
            (vec![0x15, 2, 0x18, 0, 0], "another type"),
            // Names in the place of elements.
            (metadata(&[0x18, 0]), "another type"),
            // 2^16 + 2 for the number of a field, 2^32 + 1 for a version.
            (vec![0x09, 0x84, 0x80, 8, 0x0C, 0], "number is too large"),
            (vec![0x15, 0x82, 0x80, 0x80, 0x80, 0x20, 0], "more than 32 bits"),
        ] {
            let fault = check_metadata(&bad).unwrap_err().to_string();
            assert!(fault.contains(said), "{bad:02x?}: {fault}");
        }
        let endless = metadata(&[0xFC, 0xFF, 0xFF, 0xFF, 0xFF, 0x07]);
        assert_eq!(check_metadata(&endless), Err(Fault::Cut));
    }
}
