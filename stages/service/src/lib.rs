//! Speech to text over HTTP: the engine that transcribes uploads ([`engine`]), OpenAI's API around it ([`http`]), and live
//! transcription over WebSockets ([`live`]).

pub mod engine;
pub mod http;
pub mod live;
