//! Datasets as `manifest.write` writes them, read again.

mod data;
mod hugging_face;
mod lhotse;
mod others;
