//! Settings of the service, and the file `serve.yaml` that may hold them.

use std::fmt::Display;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use flow_kind::url_scheme;
use flow_transcription::language_prior::parse_languages;
use serde::Deserialize;

use super::body::BodyLimits;
use super::jobs::JobSettings;
use super::origin::without_port;
use super::server::ServeError;
use super::setting_file;
use super::upload::RESERVED;
use crate::engine::EngineSettings;
use crate::live::LiveSettings;

/// Most bytes that an upload, or all of them, may have.
const MOST_BYTES: u64 = 1 << 50;

/// Why settings cannot be used.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SettingsError {
    /// In the file of settings.
    #[error("{file}: {place}{why}")]
    Read { file: String, place: String, why: String },
    /// A file that a setting of `http` names.
    #[error("setting `http.{setting}`: {file}: {why}")]
    File {
        setting: &'static str,
        file: String,
        why: String,
    },
    #[error("setting `{section}.{setting}`: {why}")]
    Value {
        /// `http`, `live` or `jobs`.
        section: &'static str,
        setting: &'static str,
        why: String,
    },
}

impl SettingsError {
    pub(super) fn file(setting: &'static str, file: &Path, why: &dyn Display) -> Self {
        Self::File {
            setting,
            file: file.display().to_string(),
            why: why.to_string(),
        }
    }

    /// Of a setting of `http`.
    fn value(setting: &'static str, why: impl Into<String>) -> Self {
        Self::Value {
            section: "http",
            setting,
            why: why.into(),
        }
    }
}

/// The most characters of the reason why a file cannot be read.
const LONGEST_REASON: usize = 300;

/// Address, access control and limits of the service. Times are seconds, sizes bytes.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HttpSettings {
    /// Address and port; port 0 for any that is free.
    pub listen: String,
    /// Address and port for clients of the Wyoming protocol, such as Home Assistant; none for none. They need no key.
    pub wyoming: Option<String>,
    /// The languages that such clients may choose; by default those of the models' language tags, or `en`.
    pub wyoming_languages: Vec<String>,
    /// A file with an API key on each line. Without it requests need none.
    pub keys: Option<PathBuf>,
    /// A file with the certificate and those between it and a root, in PEM. With `tls_key`.
    pub tls_cert: Option<PathBuf>,
    /// Its private key, in PEM.
    pub tls_key: Option<PathBuf>,
    /// Origins of web pages that may call the service, such as `https://app.example`; `*` for all.
    pub cors: Vec<String>,
    /// Names, without ports, that the service answers to beside `localhost` while it needs no keys. Where there are none, it
    /// answers to any, unless it listens on a loopback address.
    pub allowed_hosts: Vec<String>,
    /// Whether requests for unknown models get the first one.
    pub accept_any_model: bool,
    /// Whether to print a log line for each request.
    pub log_requests: bool,
    /// The largest request.
    pub max_upload: u64,
    /// Most bytes of all uploads that wait or are being transcribed. A value below one upload with its reservation
    /// (`max_upload` and 4 MiB) is raised to that.
    pub max_upload_space: u64,
    /// Parent of the private folder for uploads; by default the system's temporary folder.
    pub upload_folder: Option<PathBuf>,
    /// The longest time that a request may take to arrive.
    pub upload_timeout: f64,
    /// Minimum average rate of a request's body in bytes per second, after its first ten seconds; 0 for no limit.
    pub min_upload_rate: u64,
    /// The longest time between requests on a connection, and that of the head of a request.
    pub header_timeout: f64,
    /// Write timeout of a response.
    pub write_timeout: f64,
    /// Most concurrent connections; more wait.
    pub max_connections: usize,
    /// Connections at once of one address (with IPv6, of a network of 64 bits); more are closed. 0 for no bound.
    pub max_connections_per_address: usize,
    /// Addresses without a limit of connections, such as reverse proxies.
    pub trusted_proxies: Vec<IpAddr>,
    /// Longest time for accepted requests to finish when the service is stopped.
    pub drain_timeout: f64,
}

impl Default for HttpSettings {
    fn default() -> Self {
        Self {
            listen: "127.0.0.1:8000".to_owned(),
            wyoming: None,
            wyoming_languages: Vec::new(),
            keys: None,
            tls_cert: None,
            tls_key: None,
            cors: Vec::new(),
            allowed_hosts: Vec::new(),
            accept_any_model: false,
            log_requests: false,
            max_upload: 512 << 20,
            max_upload_space: 8 << 30,
            upload_folder: None,
            upload_timeout: 600.0,
            min_upload_rate: 4096,
            header_timeout: 30.0,
            write_timeout: 60.0,
            max_connections: 512,
            max_connections_per_address: 256,
            trusted_proxies: vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
            drain_timeout: 30.0,
        }
    }
}

impl HttpSettings {
    /// # Errors
    /// If a value is out of its range.
    pub fn check(&self) -> Result<(), SettingsError> {
        for (setting, seconds) in [
            ("upload_timeout", self.upload_timeout),
            ("header_timeout", self.header_timeout),
            ("write_timeout", self.write_timeout),
            ("drain_timeout", self.drain_timeout),
        ] {
            if !(seconds > 0.0 && seconds <= 1e6) {
                let why = format!("it is {seconds}; it must be above 0, and at most 1e6 seconds");
                return Err(SettingsError::value(setting, why));
            }
        }
        for (setting, bytes) in [
            ("max_upload", self.max_upload),
            ("max_upload_space", self.max_upload_space),
        ] {
            if !(1..=MOST_BYTES).contains(&bytes) {
                let why = format!("it is {bytes}; it must be from 1 to 2^50 bytes");
                return Err(SettingsError::value(setting, why));
            }
        }
        if !(1..=100_000).contains(&self.max_connections) {
            let why = format!("it is {}; it must be from 1 to 100000", self.max_connections);
            return Err(SettingsError::value("max_connections", why));
        }
        if self.tls_cert.is_some() != self.tls_key.is_some() {
            return Err(SettingsError::value("tls_cert", "it and `tls_key` need each other"));
        }
        parse_languages(&self.wyoming_languages.join(","))
            .map_err(|why| SettingsError::value("wyoming_languages", why))?;
        for origin in &self.cors {
            let authority = origin.split_once("://").map_or("", |(_, authority)| authority);
            let plain = authority.chars().all(|c| c.is_ascii_graphic() && !"/?#@*".contains(c));
            if origin != "*" && (authority.is_empty() || !plain) {
                let why = format!("`{origin}` is not an origin, such as https://app.example, nor `*`");
                return Err(SettingsError::value("cors", why));
            }
        }
        for host in &self.allowed_hosts {
            let plain = host.chars().all(|c| c.is_ascii_graphic() && !"/*".contains(c));
            // Ports are not compared: a name with a port would never match.
            if host.is_empty() || !plain || without_port(host) != host {
                let why = format!("`{host}` is not a name of a host without a port, such as speech.example");
                return Err(SettingsError::value("allowed_hosts", why));
            }
        }
        Ok(())
    }

    pub(super) fn body_limits(&self) -> BodyLimits {
        BodyLimits {
            max_bytes: self.max_upload,
            max_time: Duration::from_secs_f64(self.upload_timeout),
            min_rate: self.min_upload_rate,
        }
    }
}

/// What the file `serve.yaml` holds.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ServeSettings {
    /// Models, and what they do.
    pub engine: EngineSettings,
    pub http: HttpSettings,
    /// Sessions over WebSockets.
    pub live: LiveSettings,
    pub jobs: JobSettings,
}

impl ServeSettings {
    /// Copies settings that apply to several parts (model names, the longest window) to the engine and live sessions,
    /// and raises the limit of all uploads to that of one.
    pub(super) fn align(&mut self) {
        self.engine.accept_any_model |= self.http.accept_any_model;
        self.live.accept_any_model |= self.http.accept_any_model;
        self.live.min_pause = self.engine.min_pause;
        self.live.delay = self.engine.delay;
        let least = self.http.max_upload.saturating_add(RESERVED).min(MOST_BYTES);
        self.http.max_upload_space = self.http.max_upload_space.max(least);
        self.live.max_window = self.live.max_window.min(self.engine.max_window);
    }

    /// The settings as they are used.
    ///
    /// # Errors
    /// If a value is out of its range.
    pub(super) fn checked(mut self) -> Result<Self, ServeError> {
        self.engine.check()?;
        self.align();
        self.check()?;
        Ok(self)
    }

    /// # Errors
    /// If a value of `http`, `live` or `jobs` is out of its range; the engine checks its own.
    pub fn check(&self) -> Result<(), SettingsError> {
        self.http.check()?;
        for (section, checked) in [("live", self.live.check()), ("jobs", self.jobs.check())] {
            checked.map_err(|(setting, why)| SettingsError::Value { section, setting, why })?;
        }
        Ok(())
    }

    /// Reads a file of settings. Files that it names are found relative to it.
    ///
    /// # Errors
    /// If it cannot be read, is not YAML, has a key that is not known or a wrong value: file and key are named.
    pub fn read(file: &Path) -> Result<Self, SettingsError> {
        let wrong = |place: String, why: String| SettingsError::Read {
            file: file.display().to_string(),
            place,
            why,
        };
        let text = setting_file::read_text(file).map_err(|error| wrong(String::new(), error.to_string()))?;
        flow_yaml_guard::check(&text).map_err(|error| wrong(String::new(), error.to_string()))?;
        let read = serde_path_to_error::deserialize(serde_yaml::Deserializer::from_str(&text));
        let read: Option<Self> = read.map_err(|error| {
            let path = error.path().to_string();
            let place = if path == "." {
                String::new()
            } else {
                format!("`{path}`: ")
            };
            // It quotes a value of another type, which may be the whole file.
            wrong(place, error.inner().to_string().chars().take(LONGEST_REASON).collect())
        })?;
        // A file that is empty, or holds comments alone, is one without settings.
        let mut settings = read.unwrap_or_default();
        let folder = file.parent().unwrap_or(Path::new(""));
        let paths = [
            ("http.keys", &mut settings.http.keys),
            ("http.tls_cert", &mut settings.http.tls_cert),
            ("http.tls_key", &mut settings.http.tls_key),
            ("http.upload_folder", &mut settings.http.upload_folder),
            ("engine.known_speakers", &mut settings.engine.known_speakers),
            ("jobs.folder", &mut settings.jobs.folder),
            ("jobs.webhook_secret", &mut settings.jobs.webhook_secret),
        ];
        for (name, path) in paths {
            let Some(path) = path else { continue };
            if path.to_string_lossy().contains("://") {
                let why = "a path of this machine is needed, not a URL".to_owned();
                return Err(wrong(format!("`{name}`: "), why));
            }
            *path = folder.join(&*path);
        }
        for table in &mut settings.engine.text_tables {
            *table = folder.join(&*table);
        }
        for model in &mut settings.engine.models {
            // References to the hub and URLs are not relative to a folder.
            if !model.path.starts_with("hf:") && url_scheme(&model.path.to_string_lossy()).is_none() {
                model.path = folder.join(&model.path);
            }
        }
        Ok(settings)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn read(text: &str) -> Result<ServeSettings, String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("serve.yaml");
        fs::write(&file, text).unwrap();
        let read = ServeSettings::read(&file).map_err(|error| error.to_string());
        read.map(|mut settings| {
            for path in [&mut settings.http.keys, &mut settings.http.tls_cert]
                .into_iter()
                .flatten()
            {
                *path = path.strip_prefix(folder.path()).unwrap_or(path).to_owned();
            }
            for model in &mut settings.engine.models {
                model.path = model.path.strip_prefix(folder.path()).unwrap_or(&model.path).to_owned();
            }
            settings
        })
    }

    #[test]
    fn a_file_gives_what_it_names_and_leaves_the_rest() {
        assert_eq!(read(""), Ok(ServeSettings::default()));
        assert_eq!(read("# nothing yet\n"), Ok(ServeSettings::default()));
        let settings = read(
            "engine:\n  models: [{name: a, path: models/a.nemo}, {name: b, path: hf://a/b}, {name: c, path: s3://b/c.nemo}]\n  diarization: true\n\
             http:\n  keys: keys.txt\n  tls_cert: /etc/cert.pem\n  max_upload: 1000\n",
        )
        .unwrap();
        assert!(settings.engine.diarization);
        assert_eq!(settings.engine.models[0].path, Path::new("models/a.nemo"));
        assert_eq!(settings.engine.models[1].path, Path::new("hf://a/b"));
        assert_eq!(settings.engine.models[2].path.to_str(), Some("s3://b/c.nemo"));
        assert_eq!(settings.http.keys.as_deref(), Some(Path::new("keys.txt")));
        assert_eq!(settings.http.tls_cert.as_deref(), Some(Path::new("/etc/cert.pem")));
        assert_eq!(settings.http.max_upload, 1000);
        assert_eq!(settings.http.listen, HttpSettings::default().listen);
    }

    #[test]
    fn mistakes_are_told_with_file_and_key() {
        for (text, place) in [
            ("http:\n  max_uplod: 3\n", "max_uplod"),
            ("http:\n  max_upload: many\n", "`http.max_upload`"),
            ("http:\n  upload_folder: s3://bucket/uploads\n", "`http.upload_folder`"),
            ("http:\n  max_upload: -1\n", "`http.max_upload`"),
            ("http:\n  trusted_proxies: [proxy]\n", "`http.trusted_proxies[0]`"),
            ("engine:\n  models: [{name: a}]\n", "engine.models"),
            ("htpp: {}\n", "htpp"),
            ("[", "serve.yaml"),
            ("- a\n", "serve.yaml"),
            (&"[".repeat(100_000), "128 deep"),
            (&"no settings ".repeat(1000), "serve.yaml"),
            (
                &format!("http:\n  max_upload: {}\n", "many ".repeat(1000)),
                "`http.max_upload`",
            ),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(place) && error.contains("serve.yaml"), "{text}: {error}");
            assert!(error.len() < 1000, "{error}");
        }
        let absent = ServeSettings::read(Path::new("/nowhere/serve.yaml")).unwrap_err();
        assert!(absent.to_string().starts_with("/nowhere/serve.yaml: "), "{absent}");
    }

    #[test]
    fn values_out_of_range_are_named() {
        for (setting, text) in [
            ("upload_timeout", "upload_timeout: .nan"),
            ("header_timeout", "header_timeout: 0"),
            ("write_timeout", "write_timeout: -1"),
            ("drain_timeout", "drain_timeout: .inf"),
            ("max_upload", "max_upload: 0"),
            ("max_connections", "max_connections: 0"),
            ("tls_cert", "tls_key: key.pem"),
            ("cors", "cors: [app.example]"),
            ("cors", "cors: ['https://app.example/']"),
            ("allowed_hosts", "allowed_hosts: ['*']"),
            ("allowed_hosts", "allowed_hosts: ['speech.example:8000']"),
            ("allowed_hosts", "allowed_hosts: ['[::2]:8000']"),
        ] {
            let settings = read(&format!("http: {{{text}}}")).unwrap();
            let error = settings.http.check().unwrap_err();
            assert!(
                error.to_string().starts_with(&format!("setting `http.{setting}`: ")),
                "{text}: {error}"
            );
        }
        HttpSettings::default().check().unwrap();
        let settings = read("http: {allowed_hosts: [Speech.example, '[::2]']}").unwrap();
        settings.http.check().unwrap();
    }

    #[test]
    fn the_largest_upload_has_room() {
        let aligned = |text: &str| {
            let mut settings = read(text).unwrap();
            settings.align();
            settings
        };
        for (text, space) in [
            ("", 8 << 30),
            ("http: {max_upload: 1000, max_upload_space: 1000}", 1000 + RESERVED),
            ("http: {max_upload: 17179869184}", (16 << 30) + RESERVED),
            ("http: {max_upload: 1000, max_upload_space: 1073741824}", 1 << 30),
            ("http: {max_upload: 1125899906842624}", MOST_BYTES),
        ] {
            let settings = aligned(text);
            assert_eq!(settings.http.max_upload_space, space, "{text}");
            settings.check().unwrap();
        }
        let error = aligned("http: {max_upload: 1125899906842625}").check().unwrap_err();
        assert!(error.to_string().starts_with("setting `http.max_upload`: "), "{error}");
    }
}
