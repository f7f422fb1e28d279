//! A streaming reader of `multipart/form-data` (RFC 7578): only a chunk of the body and the head of a part are in
//! memory.

use axum::body::Bytes;
use bytes::{Buf, BytesMut};
use futures::{Stream, StreamExt};

use super::body::BodyError;

/// Most bytes of the head of a part.
const MAX_HEAD: usize = 8 << 10;

/// Most parts of a body: a thousand phrases, and the other fields.
pub const MAX_PARTS: usize = 1_128;

/// Most characters of a boundary (RFC 2046).
const MAX_BOUNDARY: usize = 70;

/// Why a body is no form.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum MultipartError {
    #[error(transparent)]
    Body(#[from] BodyError),
    #[error("the form ends before its closing boundary")]
    Truncated,
    #[error("the form is malformed: {0}")]
    Malformed(&'static str),
    #[error("the form has more than {MAX_PARTS} parts")]
    TooManyParts,
}

/// The head of a part.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    pub name: String,
    /// As sent by the client: not to be used as a file name.
    pub file_name: Option<String>,
}

#[derive(Clone, Copy, PartialEq)]
enum Place {
    /// Within the content of a part, or before the first one.
    Content,
    /// Behind a delimiter.
    Delimiter,
    /// Behind the closing delimiter.
    End,
}

/// The parts of a form, one after the other.
pub struct Multipart<S> {
    body: S,
    /// Bytes that were read and not returned yet.
    buffer: BytesMut,
    /// Line break, two hyphens and the boundary.
    delimiter: Vec<u8>,
    place: Place,
    parts: usize,
}

/// The boundary that the header `Content-Type` names; None where it is not that of a form.
pub fn boundary(content_type: &str) -> Option<String> {
    let (kind, parameters) = content_type.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    let boundary = parameter(parameters, "boundary")?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "'()+_,-./:=? ".contains(c);
    let fits = (1..=MAX_BOUNDARY).contains(&boundary.len()) && boundary.chars().all(plain) && !boundary.ends_with(' ');
    fits.then_some(boundary)
}

impl<S: Stream<Item = Result<Bytes, BodyError>> + Unpin> Multipart<S> {
    pub fn new(body: S, boundary: &str) -> Self {
        Self {
            body,
            // So that a boundary at the very beginning is found as others are.
            buffer: BytesMut::from("\r\n"),
            delimiter: format!("\r\n--{boundary}").into_bytes(),
            place: Place::Content,
            parts: 0,
        }
    }

    /// The head of the next part; the unread rest of the previous one is skipped. None after the last part, when the
    /// body was read to its end.
    ///
    /// # Errors
    /// If this is no form, or the body cannot be read.
    pub async fn next_part(&mut self) -> Result<Option<Part>, MultipartError> {
        while self.chunk().await?.is_some() {}
        if self.place == Place::End {
            return Ok(None);
        }
        while self.buffer.len() < 2 {
            self.fill().await?;
        }
        if self.buffer.starts_with(b"--") {
            self.place = Place::End;
            self.buffer.clear();
            while let Some(epilogue) = self.body.next().await {
                epilogue?;
            }
            return Ok(None);
        }
        if self.parts == MAX_PARTS {
            return Err(MultipartError::TooManyParts);
        }
        self.parts += 1;
        let head = self.head().await?;
        self.place = Place::Content;
        part(&head)
    }

    /// The next piece of the part's content, never an empty one; None at its end.
    ///
    /// # Errors
    /// If the form ends within the part, or the body cannot be read.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, MultipartError> {
        if self.place != Place::Content {
            return Ok(None);
        }
        loop {
            match find(&self.buffer, &self.delimiter) {
                Some(0) => {
                    self.buffer.advance(self.delimiter.len());
                    self.place = Place::Delimiter;
                    return Ok(None);
                }
                Some(at) => return Ok(Some(self.buffer.split_to(at).freeze())),
                None => {}
            }
            // Keeps the last bytes, which may be the beginning of a delimiter.
            let sure = (self.buffer.len() + 1).saturating_sub(self.delimiter.len());
            if sure > 0 {
                return Ok(Some(self.buffer.split_to(sure).freeze()));
            }
            self.fill().await?;
        }
    }

    /// From behind a delimiter to the content: the lines of the head.
    async fn head(&mut self) -> Result<Bytes, MultipartError> {
        loop {
            // The line break after the delimiter is part of the search pattern, as a head may be empty.
            if let Some(at) = find(&self.buffer, b"\r\n\r\n") {
                if at > MAX_HEAD {
                    return Err(MultipartError::Malformed("the head of a part is too long"));
                }
                let mut head = self.buffer.split_to(at);
                self.buffer.advance(4);
                // Only white space may follow the boundary.
                let padding = head.iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
                head.advance(padding);
                if !head.is_empty() && !head.starts_with(b"\r\n") {
                    return Err(MultipartError::Malformed("a boundary goes on where it should end"));
                }
                return Ok(head.freeze());
            }
            if self.buffer.len() > MAX_HEAD {
                return Err(MultipartError::Malformed("the head of a part is too long"));
            }
            self.fill().await?;
        }
    }

    async fn fill(&mut self) -> Result<(), MultipartError> {
        match self.body.next().await {
            Some(data) => {
                self.buffer.extend_from_slice(&data?);
                Ok(())
            }
            None => Err(MultipartError::Truncated),
        }
    }
}

/// Reads the lines of a head.
fn part(head: &[u8]) -> Result<Option<Part>, MultipartError> {
    let head = String::from_utf8_lossy(head);
    for line in head.split("\r\n") {
        let Some((header, value)) = line.split_once(':') else {
            continue;
        };
        if !header.trim().eq_ignore_ascii_case("content-disposition") {
            continue;
        }
        let (kind, parameters) = value.split_once(';').unwrap_or((value, ""));
        if !kind.trim().eq_ignore_ascii_case("form-data") {
            return Err(MultipartError::Malformed("a part is not form-data"));
        }
        let Some(name) = parameter(parameters, "name") else {
            return Err(MultipartError::Malformed("a part has no name"));
        };
        let extended = parameter(parameters, "filename*").and_then(|value| decoded(&value));
        return Ok(Some(Part {
            name,
            file_name: extended.or_else(|| parameter(parameters, "filename")),
        }));
    }
    Err(MultipartError::Malformed("a part has no Content-Disposition"))
}

/// The value of a parameter in `; name=value; name="value"`; the first one counts.
fn parameter(parameters: &str, wanted: &str) -> Option<String> {
    let mut rest = parameters;
    loop {
        rest = rest.trim_start_matches([';', ' ', '\t']);
        let (name, after) = rest.split_once('=')?;
        let mut value = String::new();
        let after = after.trim_start_matches([' ', '\t']);
        if let Some(quoted) = after.strip_prefix('"') {
            let mut end = quoted.len();
            let mut characters = quoted.char_indices().peekable();
            while let Some((at, c)) = characters.next() {
                match c {
                    '"' => {
                        end = at + 1;
                        break;
                    }
                    // Other backslashes are literal, such as in Windows paths.
                    '\\' if characters.peek().is_some_and(|(_, next)| matches!(next, '"' | '\\')) => {
                        value.extend(characters.next().map(|(_, next)| next));
                    }
                    c => value.push(c),
                }
            }
            rest = &quoted[end..];
        } else {
            let end = after.find(';').unwrap_or(after.len());
            value.push_str(after[..end].trim());
            rest = &after[end..];
        }
        if name.trim().eq_ignore_ascii_case(wanted) {
            return Some(value);
        }
    }
}

/// The text of an extended value (RFC 8187), `UTF-8''na%C3%AFve.wav`; None where it is not of that form.
fn decoded(value: &str) -> Option<String> {
    let (charset, rest) = value.split_once('\'')?;
    let (_, text) = rest.split_once('\'')?;
    if !charset.eq_ignore_ascii_case("utf-8") {
        return None;
    }
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, after)) = rest.split_first() {
        if byte == b'%' {
            let digit = |at: usize| char::from(*after.get(at)?).to_digit(16);
            bytes.push((digit(0)? * 16 + digit(1)?) as u8);
            rest = &after[2..];
        } else {
            bytes.push(byte);
            rest = after;
        }
    }
    String::from_utf8(bytes).ok()
}

/// The first position of the pattern, which begins with a carriage return.
fn find(bytes: &[u8], pattern: &[u8]) -> Option<usize> {
    let mut from = 0;
    while let Some(at) = bytes[from..].iter().position(|&byte| byte == b'\r') {
        let at = from + at;
        if bytes[at..].starts_with(pattern) {
            return Some(at);
        }
        from = at + 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use futures::stream;
    use proptest::prelude::*;

    use super::*;

    type Read = Result<Vec<(String, Option<String>, Vec<u8>)>, MultipartError>;

    /// Reads a whole form that comes in pieces of `size` bytes.
    fn read(body: &[u8], boundary: &str, size: usize) -> Read {
        let pieces: Vec<Result<Bytes, BodyError>> = body
            .chunks(size)
            .map(|piece| Ok(Bytes::copy_from_slice(piece)))
            .collect();
        let mut form = Multipart::new(stream::iter(pieces), boundary);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut parts = Vec::new();
            while let Some(part) = form.next_part().await? {
                let mut content = Vec::new();
                while let Some(chunk) = form.chunk().await? {
                    assert!(!chunk.is_empty());
                    content.extend_from_slice(&chunk);
                }
                parts.push((part.name, part.file_name, content));
            }
            Ok(parts)
        })
    }

    fn form(parts: &[(&str, &[u8])]) -> Vec<u8> {
        let mut body = Vec::new();
        for (name, content) in parts {
            body.extend_from_slice(
                format!("--XX\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n").as_bytes(),
            );
            body.extend_from_slice(content);
            body.extend_from_slice(b"\r\n");
        }
        body.extend_from_slice(b"--XX--\r\n");
        body
    }

    #[test]
    fn parts_are_read_whatever_pieces_they_come_in() {
        let body = b"before\r\n--XX  \r\nContent-Type: audio/wav\r\ncontent-disposition: form-data; \
            name=file; filename=\"a \\\"b\\\".wav\"\r\n\r\n\r\n--X\r\r\n--XY\r\n--XX\r\n\
            Content-Disposition: form-data; name=\"model\"\r\n\r\n\r\n--XX--behind";
        for size in 1..=body.len() {
            let parts = read(body, "XX", size).unwrap();
            assert_eq!(parts.len(), 2, "pieces of {size}");
            let name = Some("a \"b\".wav".to_owned());
            assert_eq!(parts[0], ("file".to_owned(), name, b"\r\n--X\r\r\n--XY".to_vec()));
            assert_eq!(parts[1], ("model".to_owned(), None, Vec::new()));
        }
    }

    #[test]
    fn what_is_no_form_is_told() {
        let malformed = |body: &str| match read(body.as_bytes(), "XX", 7) {
            Err(MultipartError::Malformed(why)) => why,
            other => panic!("{body}: {other:?}"),
        };
        assert!(malformed("--XX\r\n\r\ntext\r\n--XX--").contains("Content-Disposition"));
        assert!(malformed("--XX\r\nContent-Disposition: form-data\r\n\r\n\r\n--XX--").contains("no name"));
        assert!(malformed("--XX\r\nContent-Disposition: attachment; name=a\r\n\r\n\r\n--XX--").contains("form-data"));
        assert!(malformed("--XXY\r\nContent-Disposition: form-data; name=a\r\n\r\n\r\n--XX--").contains("goes on"));
        let long = format!("--XX\r\nContent-Disposition: form-data; name={}", "a".repeat(MAX_HEAD));
        assert!(malformed(&long).contains("too long"));
        for truncated in [
            "",
            "--X",
            "--XX",
            "--XX\r\nContent-Disposition: form-data; name=a\r\n\r\ntext\r\n--X",
        ] {
            assert_eq!(
                read(truncated.as_bytes(), "XX", 7),
                Err(MultipartError::Truncated),
                "{truncated}"
            );
        }
        let many = form(&vec![("a", b"b".as_slice()); MAX_PARTS + 1]);
        assert_eq!(read(&many, "XX", 4096), Err(MultipartError::TooManyParts));
        assert_eq!(read(b"--XX--", "XX", 7), Ok(Vec::new()));
    }

    #[test]
    fn boundaries_and_names_are_read_as_clients_write_them() {
        let of = |text: &str| boundary(text);
        assert_eq!(of("multipart/form-data; boundary=abc").as_deref(), Some("abc"));
        assert_eq!(
            of("Multipart/Form-Data; charset=utf-8; Boundary=\"a b\"").as_deref(),
            Some("a b")
        );
        for refused in [
            "multipart/form-data",
            "multipart/form-data; boundary=",
            "multipart/mixed; boundary=abc",
            "application/json",
            "multipart/form-data; boundary=\"a\r\nb\"",
            "multipart/form-data; boundary=\"ab \"",
        ] {
            assert_eq!(of(refused), None, "{refused}");
        }
        assert_eq!(of(&format!("multipart/form-data; boundary={}", "a".repeat(71))), None);
        assert_eq!(
            parameter("; name=\"C:\\dir\\a.wav\"", "name").as_deref(),
            Some("C:\\dir\\a.wav")
        );
        assert_eq!(
            parameter("; filename=\"; name=x\"; name=y", "name").as_deref(),
            Some("y")
        );
        assert_eq!(parameter("; name=\"open", "name").as_deref(), Some("open"));
        assert_eq!(parameter("; name", "name"), None);
        assert_eq!(decoded("UTF-8''na%C3%AFve%20.wav").as_deref(), Some("naïve .wav"));
        for refused in ["latin1''a", "UTF-8''%f", "UTF-8''%ff", "UTF-8''%+1", "a"] {
            assert_eq!(decoded(refused), None, "{refused}");
        }
    }

    proptest! {
        #[test]
        fn contents_come_through_unchanged(
            contents in prop::collection::vec(prop::collection::vec(prop::sample::select(b"\r\n-Xa".to_vec()), 0..40), 0..4),
            size in 1_usize..30,
        ) {
            // A content that holds the delimiter is not one that a client would send.
            prop_assume!(contents.iter().all(|content| find(&[&b"\r\n"[..], &content[..]].concat(), b"\r\n--XX").is_none()));
            let parts: Vec<(&str, &[u8])> = contents.iter().map(|content| ("a", &content[..])).collect();
            let read = read(&form(&parts), "XX", size).unwrap();
            let read: Vec<&Vec<u8>> = read.iter().map(|(_, _, content)| content).collect();
            prop_assert_eq!(read, contents.iter().collect::<Vec<_>>());
        }

        #[test]
        fn nothing_makes_it_panic(body in prop::collection::vec(prop::sample::select(b"\r\n-X:;=\"\\a ".to_vec()), 0..200), size in 1_usize..50) {
            let _ = read(&body, "XX", size);
            let _ = boundary(&String::from_utf8_lossy(&body));
            let _ = part(&body);
        }
    }
}
