//! Writing of protocol buffers, which SentencePiece's files are.

/// A protocol buffer's message, field by field.
#[derive(Default)]
pub(crate) struct Message(Vec<u8>);

impl Message {
    fn variable(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    pub fn number(&mut self, field: u32, value: i64) {
        self.variable(u64::from(field) << 3);
        // Negative numbers have ten bytes, in 32 bits too.
        self.variable(value as u64);
    }

    pub fn float(&mut self, field: u32, value: f32) {
        self.variable(u64::from(field) << 3 | 5);
        self.0.extend(value.to_le_bytes());
    }

    pub fn bytes(&mut self, field: u32, value: &[u8]) {
        self.variable(u64::from(field) << 3 | 2);
        self.variable(value.len() as u64);
        self.0.extend(value);
    }

    pub fn as_slice(&self) -> &[u8] {
        &self.0
    }

    pub fn into_bytes(self) -> Vec<u8> {
        self.0
    }
}
