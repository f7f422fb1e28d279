//! Settings of jobs: the section `jobs` of `serve.yaml`.

use std::path::PathBuf;

use axum::http::Uri;
use flow_storage::{Location, ObjectUrl, Scheme};
use serde::Deserialize;

/// Most bytes that all jobs may have.
const MOST_BYTES: u64 = 1 << 50;

/// Jobs, which are kept in a folder over restarts. Without a folder there are none.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct JobSettings {
    /// The folder, of one service at a time.
    pub folder: Option<PathBuf>,
    /// Most jobs that wait or run; more are refused.
    pub max_queued: usize,
    /// Most jobs that have ended and are kept; the oldest ones are removed.
    pub max_kept: usize,
    /// Most bytes of all recordings and results.
    pub max_bytes: u64,
    /// Days after which a job that has ended is removed with its result.
    pub keep_days: f64,
    /// How often a job is begun that a kill or crash of the service interrupted each time; then it has failed.
    pub max_attempts: u32,
    /// Object storage whose recordings jobs may name by URL, such as `s3://calls/2026`: prefixes, with the credentials of the service.
    pub sources: Vec<String>,
    /// A file with the secret that webhooks are signed with. Without it requests cannot have a webhook.
    pub webhook_secret: Option<PathBuf>,
    /// Where webhooks may go, such as `https://hooks.example` or `http://127.0.0.1:9000`.
    pub webhook_origins: Vec<String>,
}

impl Default for JobSettings {
    fn default() -> Self {
        Self {
            folder: None,
            max_queued: 1000,
            max_kept: 10_000,
            max_bytes: 16 << 30,
            keep_days: 7.0,
            max_attempts: 20,
            sources: Vec::new(),
            webhook_secret: None,
            webhook_origins: Vec::new(),
        }
    }
}

impl JobSettings {
    /// # Errors
    /// The setting that is out of range, and why.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        for (setting, count) in [("max_queued", self.max_queued), ("max_kept", self.max_kept)] {
            if !(1..=1_000_000).contains(&count) {
                return Err((setting, format!("it is {count}; it must be from 1 to 1000000")));
            }
        }
        if !(1..=MOST_BYTES).contains(&self.max_bytes) {
            let why = format!("it is {}; it must be from 1 to 2^50 bytes", self.max_bytes);
            return Err(("max_bytes", why));
        }
        if !(self.keep_days > 0.0 && self.keep_days <= 36_500.0) {
            let why = format!("it is {}; it must be above 0, and at most 36500 days", self.keep_days);
            return Err(("keep_days", why));
        }
        if self.max_attempts == 0 {
            return Err(("max_attempts", "it is 0; it must be 1 or more".to_owned()));
        }
        if !self.sources.is_empty() && self.folder.is_none() {
            return Err(("sources", "it needs `folder`".to_owned()));
        }
        for given in &self.sources {
            object(given).map_err(|why| ("sources", why))?;
        }
        for given in &self.webhook_origins {
            if origin(given).as_deref() != Some(given.to_ascii_lowercase().as_str()) {
                let why = format!("`{given}` is not an origin, such as https://hooks.example");
                return Err(("webhook_origins", why));
            }
        }
        if self.webhook_secret.is_some() == self.webhook_origins.is_empty() {
            let why = "it and `webhook_origins` need each other".to_owned();
            return Err(("webhook_secret", why));
        }
        Ok(())
    }

    /// Whether a webhook may go to this URL.
    pub fn allows_webhook(&self, url: &str) -> bool {
        let origin = origin(url);
        let known = |known: &String| origin.as_deref() == Some(known.to_ascii_lowercase().as_str());
        self.webhook_origins.iter().any(known)
    }
}

/// The object, or the prefix of objects, of a URL.
pub fn object(url: &str) -> Result<ObjectUrl, String> {
    match Location::parse(url).map_err(|error| error.to_string())? {
        // A web server may send the service elsewhere.
        Location::Object(found) if matches!(found.scheme(), Scheme::S3 | Scheme::Gs | Scheme::Az) => Ok(found),
        _ => Err(format!("`{url}` is not in object storage, such as s3://bucket/folder")),
    }
}

/// Scheme, host and port of an `http://` or `https://` URL, in lower case; the port is left out where it is not in the URL.
/// None for other URLs, and for one with a user name.
fn origin(url: &str) -> Option<String> {
    let uri: Uri = url.parse().ok()?;
    let (scheme, authority) = (uri.scheme_str()?, uri.authority()?.as_str());
    let is_web = matches!(scheme, "http" | "https");
    (is_web && !authority.contains('@')).then(|| format!("{scheme}://{authority}").to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_out_of_range_are_named() {
        JobSettings::default().check().unwrap();
        let good = "webhook_secret: secret\nwebhook_origins: ['https://Hooks.example', 'http://127.0.0.1:9000']";
        serde_yaml::from_str::<JobSettings>(good).unwrap().check().unwrap();
        for (setting, text) in [
            ("max_queued", "max_queued: 0"),
            ("max_kept", "max_kept: 0"),
            ("max_bytes", "max_bytes: 0"),
            ("keep_days", "keep_days: .nan"),
            ("keep_days", "keep_days: 0"),
            ("max_attempts", "max_attempts: 0"),
            ("sources", "sources: ['s3://calls']"),
            ("sources", "folder: jobs\nsources: ['/data/calls']"),
            ("sources", "folder: jobs\nsources: ['https://example.com/calls']"),
            ("sources", "folder: jobs\nsources: ['s3://']"),
            ("webhook_secret", "webhook_secret: secret"),
            ("webhook_secret", "webhook_origins: ['https://hooks.example']"),
            ("webhook_origins", "webhook_origins: ['hooks.example']"),
            ("webhook_origins", "webhook_origins: ['ftp://hooks.example']"),
            ("webhook_origins", "webhook_origins: ['https://hooks.example/path']"),
            ("webhook_origins", "webhook_origins: ['https://a@hooks.example']"),
            ("webhook_origins", "webhook_origins: ['*']"),
        ] {
            let read: JobSettings = serde_yaml::from_str(text).unwrap();
            assert_eq!(read.check().unwrap_err().0, setting, "{text}");
        }
        assert!(serde_yaml::from_str::<JobSettings>("max_queue: 3").is_err());
    }

    #[test]
    fn webhooks_go_to_the_listed_origins_alone() {
        let settings = JobSettings {
            webhook_origins: vec!["https://Hooks.example".to_owned(), "http://127.0.0.1:9000".to_owned()],
            ..JobSettings::default()
        };
        for allowed in [
            "https://hooks.example/a?b=c",
            "HTTPS://HOOKS.example",
            "http://127.0.0.1:9000/",
        ] {
            assert!(settings.allows_webhook(allowed), "{allowed}");
        }
        for refused in [
            "http://hooks.example/",
            "https://hooks.example:8443/",
            "https://hooks.example.evil/",
            "https://hooks.example@evil/",
            "https://user:secret@hooks.example/",
            "https://evil/?https://hooks.example",
            "http://127.0.0.1/",
            "http://127.0.0.1:90001/",
            "//hooks.example/",
            "hooks.example",
            "",
            "https://",
            "file:///etc/passwd",
        ] {
            assert!(!settings.allows_webhook(refused), "{refused}");
        }
        assert!(!JobSettings::default().allows_webhook("https://hooks.example/"));
    }
}
