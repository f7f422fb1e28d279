//! SentencePiece's `.model` file: a protocol buffer, of which we read the fields that decide encoding and decoding.

/// What a piece is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PieceKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Piece {
    pub text: String,
    pub score: f32,
    pub kind: PieceKind,
}

/// How a text is cut into pieces. Numbers are those of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    Unigram = 1,
    Bpe = 2,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ModelFile {
    pub algorithm: Algorithm,
    pub pieces: Vec<Piece>,
    pub byte_fallback: bool,
    pub spaces_as_suffix: bool,
    pub unknown_surface: String,
    /// The compiled character map; empty for none.
    pub character_map: Vec<u8>,
    pub add_dummy_prefix: bool,
    pub remove_extra_spaces: bool,
    pub escape_spaces: bool,
}

/// The format's defaults.
impl Default for ModelFile {
    fn default() -> Self {
        ModelFile {
            algorithm: Algorithm::Unigram,
            pieces: Vec::new(),
            byte_fallback: false,
            spaces_as_suffix: false,
            unknown_surface: " \u{2047} ".into(),
            character_map: Vec::new(),
            add_dummy_prefix: true,
            remove_extra_spaces: true,
            escape_spaces: true,
        }
    }
}

enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    /// 32 bits, little-endian.
    Fixed(u32),
}

/// The fields of a message, in order. Errors if it is cut off.
struct Fields<'a>(&'a [u8]);

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Value<'a>), String>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_none() {
            self.0 = &[];
        }
        Some(field.ok_or_else(|| "is not a SentencePiece model, or is cut off".to_string()))
    }
}

impl<'a> Fields<'a> {
    fn field(&mut self) -> Option<(u64, Value<'a>)> {
        let tag = self.variable()?;
        let value = match tag & 7 {
            0 => Value::Number(self.variable()?),
            1 => {
                self.take(8)?;
                Value::Number(0)
            }
            2 => {
                let length = usize::try_from(self.variable()?).ok()?;
                Value::Bytes(self.take(length)?)
            }
            5 => {
                let bytes = self.take(4)?;
                Value::Fixed(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
            }
            _ => return None,
        };
        Some((tag >> 3, value))
    }

    fn variable(&mut self) -> Option<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.take(1)?[0];
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }

    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }
}

/// Field numbers and defaults are those of `sentencepiece_model.proto`.
pub(super) fn read_model_file(bytes: &[u8]) -> Result<ModelFile, String> {
    let mut file = ModelFile::default();
    for field in Fields(bytes) {
        match field? {
            (1, Value::Bytes(piece)) => {
                let piece = read_piece(piece).map_err(|what| format!("piece {} {what}", file.pieces.len()))?;
                file.pieces.push(piece);
            }
            (2, Value::Bytes(trainer)) => {
                for field in Fields(trainer) {
                    match field? {
                        (3, Value::Number(1)) => file.algorithm = Algorithm::Unigram,
                        (3, Value::Number(2)) => file.algorithm = Algorithm::Bpe,
                        (3, Value::Number(other)) => {
                            return Err(format!(
                                "is of SentencePiece's kind {other}; BPE and unigram models are supported"
                            ));
                        }
                        (24, Value::Number(value)) => file.spaces_as_suffix = value != 0,
                        (35, Value::Number(value)) => file.byte_fallback = value != 0,
                        (44, Value::Bytes(value)) => file.unknown_surface = String::from_utf8_lossy(value).into_owned(),
                        _ => {}
                    }
                }
            }
            (3, Value::Bytes(normaliser)) => {
                for field in Fields(normaliser) {
                    match field? {
                        (2, Value::Bytes(value)) => file.character_map = value.to_vec(),
                        (3, Value::Number(value)) => file.add_dummy_prefix = value != 0,
                        (4, Value::Number(value)) => file.remove_extra_spaces = value != 0,
                        (5, Value::Number(value)) => file.escape_spaces = value != 0,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    if file.pieces.is_empty() {
        return Err("has no pieces".into());
    }
    Ok(file)
}

fn read_piece(bytes: &[u8]) -> Result<Piece, String> {
    let mut piece = Piece {
        text: String::new(),
        score: 0.0,
        kind: PieceKind::Normal,
    };
    for field in Fields(bytes) {
        match field? {
            (1, Value::Bytes(text)) => {
                piece.text = std::str::from_utf8(text).map_err(|_| "is not UTF-8")?.to_string();
            }
            (2, Value::Fixed(bits)) => piece.score = f32::from_bits(bits),
            (3, Value::Number(kind)) => {
                piece.kind = match kind {
                    1 => PieceKind::Normal,
                    2 => PieceKind::Unknown,
                    3 => PieceKind::Control,
                    4 => PieceKind::UserDefined,
                    5 => PieceKind::Unused,
                    6 => PieceKind::Byte,
                    other => return Err(format!("is of the unknown kind {other}")),
                }
            }
            _ => {}
        }
    }
    Ok(piece)
}
