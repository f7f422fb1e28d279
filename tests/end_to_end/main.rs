//! End-to-end tests: they run the built `flow` program on the bundled corpora, as a user would.

mod as_it_stands;
mod audio;
mod away;
mod binary;
mod commands;
mod crash;
mod curriculum;
mod edits;
mod evaluation;
mod from_manifests;
mod inputs;
mod long_texts;
mod machines;
mod manifests;
mod mistakes;
mod models;
mod planted;
mod presets;
mod rejects;
mod reuse;
mod sampling;
mod synthesize;
mod tokenizer;
mod training;
mod transcription;
mod unreadable;
