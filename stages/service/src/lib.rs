//! Speech to text over HTTP: the engine that transcribes uploads ([`engine`]), OpenAI's API around it ([`http`]), live
//! transcription over WebSockets ([`live`]), and the page of the service ([`page`]).

pub mod engine;
pub mod http;
pub mod live;
mod logprobs;
pub mod options;
pub mod page;
