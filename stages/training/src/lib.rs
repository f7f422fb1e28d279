//! Training: optimizer steps over a model, schedules, checkpoints, and the stage that runs them.

pub mod average;
pub mod checkpoint;
mod device_figures;
pub mod error;
mod feed;
mod file_set;
pub mod init;
pub mod language_tags;
pub mod limit_texts;
pub mod loaded_rows;
pub mod long_texts;
pub mod memory;
pub mod metrics;
pub mod model_from;
pub mod model_settings;
pub mod optimizer;
pub mod ranks;
pub mod read_tokenizer;
pub mod resolved_settings;
pub mod roofline;
pub mod schedule;
pub mod session;
pub mod settings;
pub mod start;
pub mod tensorboard;
pub mod text_faults;
pub mod train;
pub mod train_tokenizer;
pub mod trainer;
mod training_thread;
mod transcripts;
pub mod unknown_letters;
mod window;
pub mod write_model;
pub mod write_tokenizer;

pub use error::TrainingError;
