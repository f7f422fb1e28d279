//! The service as its clients see it: over a loopback port, with the bundled small model.

mod callers;
mod hostile;
mod jobs;
mod load;
mod service;
mod transcripts;
mod wyoming;
