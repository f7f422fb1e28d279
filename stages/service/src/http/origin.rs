//! Checks of `Host` and `Origin`. Any web page can make a browser send requests to a server on the same machine, and
//! with DNS rebinding it can read the responses.

use std::net::SocketAddr;

use axum::http::header::{HOST, ORIGIN};
use axum::http::{HeaderMap, StatusCode, Uri};

use super::error::ApiError;

/// Names of the machine itself.
const LOCAL: [&str; 3] = ["localhost", "127.0.0.1", "[::1]"];

/// The policy of a server without keys.
pub struct Callers {
    /// Accepted host names; None for any.
    hosts: Option<Vec<String>>,
    /// Accepted origins beside the server's own; None where requests need a key, which foreign pages do not know.
    origins: Option<Vec<String>>,
}

impl Callers {
    /// `is_open`: no key is needed. `address`: what the server listens on, which is one of its names. A server that does not
    /// listen on a loopback address (in a container, say, whose port is that of a machine with a browser) knows its names only
    /// where `allowed_hosts` has some.
    pub fn new(is_open: bool, address: SocketAddr, allowed_hosts: &[String], cors: &[String]) -> Self {
        let hosts = LOCAL
            .into_iter()
            .map(str::to_owned)
            .chain([without_port(&address.to_string()).to_owned()])
            .chain(allowed_hosts.iter().map(|host| host.to_ascii_lowercase()));
        let origins = cors.iter().map(|origin| origin.to_ascii_lowercase());
        let knows_names = address.ip().is_loopback() || !allowed_hosts.is_empty();
        Self {
            hosts: (is_open && knows_names).then(|| hosts.collect()),
            origins: is_open.then(|| origins.collect()),
        }
    }

    /// # Errors
    /// 400 if the request names its host more than once, as RFC 9112 (3.2) asks; 403 if it is for another host, or comes from a
    /// page of another origin.
    pub fn check(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), ApiError> {
        if headers.get_all(HOST).iter().nth(1).is_some() {
            return Err(ApiError::bad_request("invalid_host", "there is more than one `Host`"));
        }
        let host = match uri.authority() {
            Some(authority) => Some(authority.as_str()),
            None => headers.get(HOST).and_then(|value| value.to_str().ok()),
        };
        let host = host.map(str::to_ascii_lowercase);
        if let Some(hosts) = &self.hosts {
            let name = host.as_deref().map(without_port);
            if !name.is_some_and(|name| hosts.iter().any(|known| known == name)) {
                let message = "this server does not answer to that name in `Host`; `--allowed-host NAME` adds one";
                return Err(ApiError::new(StatusCode::FORBIDDEN, "host_not_allowed", message));
            }
        }
        if let (Some(origins), Some(origin)) = (&self.origins, headers.get(ORIGIN)) {
            let origin = origin.to_str().unwrap_or_default().to_ascii_lowercase();
            let own = origin
                .split_once("://")
                .is_some_and(|(_, authority)| host.as_deref() == Some(authority));
            if !own && !origins.iter().any(|known| known == "*" || *known == origin) {
                let message = "pages of that origin may not call this server; `--cors ORIGIN` allows one";
                return Err(ApiError::new(StatusCode::FORBIDDEN, "origin_not_allowed", message));
            }
        }
        Ok(())
    }
}

/// The name in `name:port`, `[address]:port`, or either without a port.
pub fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|digit| digit.is_ascii_digit()) && !name.ends_with(':') => name,
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    const LOOPBACK: &str = "127.0.0.1:8000";
    const ALL: &str = "0.0.0.0:8000";

    fn callers(is_open: bool, address: &str, allowed_hosts: &[&str], cors: &[&str]) -> Callers {
        let owned = |names: &[&str]| -> Vec<String> { names.iter().map(|&name| name.to_owned()).collect() };
        Callers::new(is_open, address.parse().unwrap(), &owned(allowed_hosts), &owned(cors))
    }

    fn check(callers: &Callers, host: &'static str, origin: Option<&'static str>) -> Result<(), &'static str> {
        let mut headers = HeaderMap::new();
        headers.insert(HOST, HeaderValue::from_static(host));
        if let Some(origin) = origin {
            headers.insert(ORIGIN, HeaderValue::from_static(origin));
        }
        callers
            .check(&Uri::from_static("/v1/models"), &headers)
            .map_err(|error| error.code)
    }

    #[test]
    fn a_local_server_without_keys_answers_to_its_own_names_alone() {
        let local = callers(true, LOOPBACK, &["Speech.example"], &[]);
        for host in [
            "localhost:8000",
            "LOCALHOST",
            "127.0.0.1:1",
            "[::1]:8000",
            "[::1]",
            "speech.example:80",
        ] {
            assert_eq!(check(&local, host, None), Ok(()), "{host}");
        }
        for host in [
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example:8000",
            "localhost:80@evil",
            "",
        ] {
            assert_eq!(check(&local, host, None), Err("host_not_allowed"), "{host}");
        }
        // The same names where it listens on all addresses, with `allowed_hosts`.
        let named = callers(true, ALL, &["speech.example"], &[]);
        for (host, expected) in [
            ("speech.example:8000", Ok(())),
            ("localhost:8000", Ok(())),
            ("evil.example:8000", Err("host_not_allowed")),
        ] {
            assert_eq!(check(&named, host, None), expected, "{host}");
        }
        let missing = local.check(&Uri::from_static("/"), &HeaderMap::new());
        assert_eq!(missing.unwrap_err().code, "host_not_allowed");
        // The authority of an absolute URI counts, not `Host`.
        let mut headers = HeaderMap::new();
        headers.insert(HOST, HeaderValue::from_static("localhost"));
        let absolute = Uri::from_static("http://evil.example/v1/models");
        assert_eq!(local.check(&absolute, &headers).unwrap_err().code, "host_not_allowed");
    }

    #[test]
    fn a_server_answers_to_the_address_that_it_listens_on() {
        let second = callers(true, "127.0.0.2:8000", &[], &[]);
        let of_network = callers(true, "192.0.2.7:8000", &["speech.example"], &[]);
        let of_ipv6 = callers(true, "[2001:db8::1]:8000", &["speech.example"], &[]);
        for (callers, own, other) in [
            (&second, "127.0.0.2:8000", "127.0.0.3:8000"),
            (&of_network, "192.0.2.7:8000", "192.0.2.8:8000"),
            (&of_ipv6, "[2001:db8::1]:8000", "[2001:db8::2]:8000"),
        ] {
            assert_eq!(check(callers, own, None), Ok(()));
            assert_eq!(check(callers, "localhost:8000", None), Ok(()));
            assert_eq!(check(callers, other, None), Err("host_not_allowed"));
        }
    }

    #[test]
    fn a_request_names_its_host_once() {
        let host = HeaderValue::from_static("localhost");
        for is_open in [true, false] {
            let callers = callers(is_open, LOOPBACK, &[], &[]);
            let mut headers = HeaderMap::new();
            headers.append(HOST, host.clone());
            assert_eq!(callers.check(&Uri::from_static("/"), &headers), Ok(()));
            headers.append(HOST, host.clone());
            let refused = callers.check(&Uri::from_static("/"), &headers).unwrap_err();
            assert_eq!(
                (refused.status, refused.code),
                (StatusCode::BAD_REQUEST, "invalid_host")
            );
        }
    }

    #[test]
    fn foreign_pages_are_refused_unless_they_are_listed() {
        let listed = callers(true, ALL, &[], &["https://page.example"]);
        assert_eq!(check(&listed, "any.example:8000", None), Ok(()));
        assert_eq!(
            check(&listed, "any.example:8000", Some("http://any.example:8000")),
            Ok(())
        );
        assert_eq!(check(&listed, "any.example", Some("https://page.example")), Ok(()));
        for origin in ["http://evil.example", "null", "http://any.example:8001"] {
            assert_eq!(
                check(&listed, "any.example:8000", Some(origin)),
                Err("origin_not_allowed"),
                "{origin}"
            );
        }
        let all = callers(true, ALL, &[], &["*"]);
        assert_eq!(check(&all, "any.example", Some("null")), Ok(()));
        let with_keys = callers(false, LOOPBACK, &[], &[]);
        assert_eq!(check(&with_keys, "evil.example", Some("http://evil.example")), Ok(()));
    }
}
