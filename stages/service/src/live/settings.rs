//! Settings of live transcription: of the service, and of a session.

use flow_speakers::diarizer::OnlineSettings;
use serde::{Deserialize, Serialize};

use crate::engine::EngineSettings;

/// Limits of live transcription, and how often windows are decoded.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LiveSettings {
    /// Sessions at once, from 1 to 10000.
    pub max_sessions: usize,
    /// The longest session, in seconds.
    pub max_session: f64,
    /// A session in which nothing comes from the client for this many seconds is ended.
    pub idle_timeout: f64,
    /// The largest message, in bytes, from 1024 to 64 MiB.
    pub max_message: usize,
    /// Most seconds of audio of a session that wait to be decoded. While there are as many, no more is read from the client.
    pub max_buffer: f64,
    /// A window that grows is decoded again after this many seconds of new audio, from 0.1 to 60, unless the decoder is still busy
    /// with it.
    pub decode_interval: f64,
    /// The longest window, in seconds, from 1 to 60; no longer than that of the engine.
    pub max_window: f64,
    /// With a cache-aware model, the delay of words that is accepted, in seconds, from 0.01 to 60, where a client does not say: the
    /// model looks as far ahead as it allows. None: the model's own.
    pub latency: Option<f64>,
    /// A pause as long as this ends a window, in seconds, as the engine says it of recordings.
    #[serde(skip)]
    pub min_pause: f64,
    /// Seconds that are subtracted from the times of words, as the engine says it of recordings.
    #[serde(skip)]
    pub delay: f64,
    /// How long after they were spoken it is decided who spoke words, in seconds, from 0 to 9.
    pub speaker_delay: f64,
    /// Who speaks is looked at again after this many seconds, from 0.1 to 5.
    pub speaker_step: f64,
    /// Most speakers of a session, from 1 to 1000; other voices have the nearest of them.
    pub max_speakers: usize,
    /// Whether names of models that are not known represent the default one, as the service says it of all requests.
    #[serde(skip)]
    pub accept_any_model: bool,
}

impl Default for LiveSettings {
    fn default() -> Self {
        let speakers = OnlineSettings::default();
        LiveSettings {
            max_sessions: 16,
            max_session: 3600.0,
            idle_timeout: 60.0,
            max_message: 4 << 20,
            max_buffer: 60.0,
            decode_interval: 0.5,
            max_window: 20.0,
            latency: None,
            min_pause: EngineSettings::default().min_pause,
            delay: 0.0,
            speaker_delay: speakers.delay,
            speaker_step: speakers.step,
            max_speakers: speakers.max_speakers,
            accept_any_model: false,
        }
    }
}

impl LiveSettings {
    /// # Errors
    /// The name of a setting that is out of its range, and why.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        let counts = [
            ("max_sessions", self.max_sessions, 1, 10_000),
            ("max_message", self.max_message, 1024, 64 << 20),
            ("max_speakers", self.max_speakers, 1, 1_000),
        ];
        for (name, value, least, most) in counts {
            if !(least..=most).contains(&value) {
                return Err((name, format!("it is {value}; it must be from {least} to {most}")));
            }
        }
        let seconds = [
            ("max_session", self.max_session, 1.0, 86_400.0),
            ("idle_timeout", self.idle_timeout, 0.1, 86_400.0),
            ("max_buffer", self.max_buffer, 1.0, 3600.0),
            ("decode_interval", self.decode_interval, 0.1, 60.0),
            ("max_window", self.max_window, 1.0, 60.0),
            ("speaker_delay", self.speaker_delay, 0.0, 9.0),
            ("speaker_step", self.speaker_step, 0.1, 5.0),
        ];
        let latency = self.latency.map(|latency| ("latency", latency, 0.01, 60.0));
        for (name, value, least, most) in seconds.into_iter().chain(latency) {
            if !(least..=most).contains(&value) {
                return Err((
                    name,
                    format!("it is {value}; it must be from {least} to {most} seconds"),
                ));
            }
        }
        Ok(())
    }

    /// How speakers of a session are distinguished.
    pub fn speakers(&self) -> OnlineSettings {
        OnlineSettings {
            step: self.speaker_step,
            delay: self.speaker_delay,
            max_speakers: self.max_speakers,
            ..OnlineSettings::default()
        }
    }
}

/// Where turns begin and end, by voice activity. Names and defaults are OpenAI's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServerVad {
    /// A frame is speech if it is at least this likely to be, from 0 to 1.
    pub threshold: f64,
    /// What of the silence before speech belongs to a turn, in milliseconds.
    pub prefix_padding_ms: f64,
    /// So much silence ends a turn, in milliseconds.
    pub silence_duration_ms: f64,
}

impl Default for ServerVad {
    fn default() -> Self {
        ServerVad {
            threshold: 0.5,
            prefix_padding_ms: 300.0,
            silence_duration_ms: 500.0,
        }
    }
}

impl ServerVad {
    /// Silence begins below this probability, as in silero's own rule.
    pub fn threshold_of_silence(&self) -> f64 {
        (self.threshold - 0.15).max(0.01)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_out_of_range_are_refused_by_name() {
        assert_eq!(LiveSettings::default().check(), Ok(()));
        let refused = |change: fn(&mut LiveSettings)| {
            let mut settings = LiveSettings::default();
            change(&mut settings);
            settings.check().unwrap_err().0
        };
        assert_eq!(refused(|settings| settings.max_sessions = 0), "max_sessions");
        assert_eq!(refused(|settings| settings.max_message = usize::MAX), "max_message");
        assert_eq!(refused(|settings| settings.idle_timeout = f64::NAN), "idle_timeout");
        assert_eq!(refused(|settings| settings.decode_interval = 0.0), "decode_interval");
        assert_eq!(refused(|settings| settings.max_window = f64::INFINITY), "max_window");
        assert_eq!(refused(|settings| settings.speaker_delay = 9.5), "speaker_delay");
        assert_eq!(refused(|settings| settings.speaker_step = 0.0), "speaker_step");
        assert_eq!(refused(|settings| settings.max_speakers = 0), "max_speakers");
    }

    #[test]
    fn keys_that_are_not_known_are_refused() {
        let read: LiveSettings = serde_yaml::from_str("max_sessions: 2").unwrap();
        assert_eq!(read.max_sessions, 2);
        assert!(serde_yaml::from_str::<LiveSettings>("max_session_count: 2").is_err());
    }
}
