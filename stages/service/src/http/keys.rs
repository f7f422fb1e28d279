//! API keys: reading them, and checking requests.

use std::path::Path;

use axum::http::HeaderMap;
use axum::http::header::{AUTHORIZATION, UPGRADE};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use super::error::ApiError;
use super::setting_file;
use super::settings::SettingsError;
use crate::live::socket::api_key_of_subprotocols;

/// The valid keys. Empty: no key is needed.
#[derive(Default)]
pub struct Keys(Vec<Vec<u8>>);

impl Keys {
    /// Reads a file with a key on each line; empty lines and those that begin with `#` are skipped.
    ///
    /// # Errors
    /// If it cannot be read, or has no key, or one that is invalid in a header.
    pub fn read(file: &Path) -> Result<Self, SettingsError> {
        let text = setting_file::read_text(file).map_err(|error| SettingsError::file("keys", file, &error))?;
        let mut keys = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let key = line.trim();
            if key.is_empty() || key.starts_with('#') {
                continue;
            }
            // The key itself stays out of the message.
            if !key.chars().all(|c| c.is_ascii_graphic()) {
                let why = format!("the key on line {number} has a character that is not visible ASCII");
                return Err(SettingsError::file("keys", file, &why));
            }
            keys.push(key.as_bytes().to_vec());
        }
        if keys.is_empty() {
            return Err(SettingsError::file("keys", file, &"it holds no key"));
        }
        Ok(Self(keys))
    }

    /// Whether requests need no key.
    pub fn is_open(&self) -> bool {
        self.0.is_empty()
    }

    /// # Errors
    /// 401 if a key is needed and the request has none of them.
    pub fn check(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        if self.is_open() {
            return Ok(());
        }
        let refused = |code, message: &str| ApiError::new(axum::http::StatusCode::UNAUTHORIZED, code, message);
        let Some(given) = bearer(headers).or_else(|| protocol(headers)) else {
            let message = "there is no API key in the request: send it as `Authorization: Bearer KEY`";
            return Err(refused("missing_api_key", message));
        };
        // All keys are compared, each in constant time for its length.
        let known = self
            .0
            .iter()
            .fold(Choice::from(0), |known, key| known | key.as_slice().ct_eq(given));
        if bool::from(known) {
            Ok(())
        } else {
            Err(refused("invalid_api_key", "the API key is not known here"))
        }
    }

    /// A digest of the key of a request, by which what a client left here is known to be its own; None where no key is needed.
    /// Of requests that [`Keys::check`] let pass.
    pub fn owner(&self, headers: &HeaderMap) -> Option<String> {
        if self.is_open() {
            return None;
        }
        let key = bearer(headers).or_else(|| protocol(headers)).unwrap_or_default();
        let mut digest = Sha256::new_with_prefix(b"owner of jobs of flow serve\0");
        digest.update(key);
        let digest = digest.finalize();
        Some(digest[..16].iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(AUTHORIZATION)?.as_bytes();
    let (scheme, key) = value.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| key.trim_ascii())
}

/// A browser can set no header of a WebSocket: its key is among the sub-protocols.
fn protocol(headers: &HeaderMap) -> Option<&[u8]> {
    headers.get(UPGRADE)?;
    api_key_of_subprotocols(headers).map(str::as_bytes)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;
    use axum::http::header::SEC_WEBSOCKET_PROTOCOL;

    use std::fs;

    use super::*;

    fn keys(text: &str) -> Result<Keys, SettingsError> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys.txt");
        fs::write(&file, text).unwrap();
        Keys::read(&file)
    }

    #[test]
    fn keys_are_read_one_a_line() {
        let keys = keys("# of the team\n\n  first-key \nsecond\n").ok().unwrap();
        assert_eq!(keys.0, [b"first-key".to_vec(), b"second".to_vec()]);
    }

    #[test]
    fn files_without_good_keys_are_refused_and_no_key_is_told() {
        // Keys are never shown, not even by a failing test.
        let told = |text: &str| keys(text).err().unwrap().to_string();
        assert!(told("# none\n").contains("holds no key"));
        let error = told("good\nse cret\n");
        assert!(error.contains("line 2") && !error.contains("cret"), "{error}");
        let absent = Keys::read(Path::new("/nowhere/keys.txt")).err().unwrap().to_string();
        assert!(absent.contains("/nowhere/keys.txt"), "{absent}");
    }

    #[test]
    fn requests_need_one_of_the_keys() {
        let keys = keys("first\nsecond\n").ok().unwrap();
        let with = |name, value: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, HeaderValue::from_static(value));
            keys.check(&headers).map_err(|error| error.code)
        };
        assert_eq!(keys.check(&HeaderMap::new()).unwrap_err().code, "missing_api_key");
        assert_eq!(with(AUTHORIZATION, "Bearer second"), Ok(()));
        assert_eq!(with(AUTHORIZATION, "bearer first"), Ok(()));
        for wrong in ["Bearer secon", "Bearer secondd", "Bearer ", "Bearer first,second"] {
            assert_eq!(with(AUTHORIZATION, wrong), Err("invalid_api_key"), "{wrong}");
        }
        assert_eq!(with(AUTHORIZATION, "Basic second"), Err("missing_api_key"));
        assert_eq!(with(AUTHORIZATION, "first"), Err("missing_api_key"));
        // Only for WebSockets.
        let protocols = "realtime, openai-insecure-api-key.second";
        assert_eq!(with(SEC_WEBSOCKET_PROTOCOL, protocols), Err("missing_api_key"));
        let mut headers = HeaderMap::new();
        headers.insert(UPGRADE, HeaderValue::from_static("websocket"));
        headers.insert(SEC_WEBSOCKET_PROTOCOL, HeaderValue::from_static(protocols));
        assert_eq!(keys.check(&headers), Ok(()));
        assert_eq!(Keys::default().check(&HeaderMap::new()), Ok(()));
    }
}
