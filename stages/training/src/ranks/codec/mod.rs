//! Encoding of the messages between processes that train together.
//!
//! Numbers are little-endian, which is the byte order of every process of a run (a machine of another one is refused
//! when it joins). A reader checks every length against the bytes that are there.

mod format;
mod message;
mod reader;
#[cfg(test)]
mod tests;
mod value;

pub(super) use format::malformed_message;
pub(super) use message::Message;
pub(super) use reader::MessageReader;
pub(super) use value::Value;
