//! Datasets as `manifest.write` writes them, read again.

mod buckets;
mod data;
mod hugging_face;
mod lhotse;
mod others;
