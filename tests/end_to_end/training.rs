//! A few steps of training through the whole pipeline.
