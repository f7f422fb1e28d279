//! Standard output for people: escapes control characters of the user's data, so that the terminal does not interpret
//! them.

use std::io::{self, Write};

use flow_base::escape::escape_lines;

/// Writes text with control characters escaped; line ends and tabs stay.
pub struct Visible<'a>(pub &'a mut dyn Write);

impl Write for Visible<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Each write is valid UTF-8, as all output is made with formatting macros.
        let text = String::from_utf8_lossy(bytes);
        self.0.write_all(escape_lines(&text).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_codes_do_not_come_through() {
        let mut out = Vec::new();
        let mut visible = Visible(&mut out);
        visible.write_all("a\u{1b}[31m\té\u{9b}\n".as_bytes()).unwrap();
        visible.flush().unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "a\\u{1b}[31m\té\\u{9b}\n");
    }
}
