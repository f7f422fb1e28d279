//! Checks the token for the Hugging Face hub, and that the hub responds.

use std::time::Duration;

use flow_hub::{Hub, HubError};

use super::check::Check;

/// Timeout for the hub; short, as the command is interactive.
const TIMEOUT: Duration = Duration::from_secs(5);

const TOKEN: &str = "hub token";
const HUB: &str = "hub";

pub fn hub() -> Vec<Check> {
    of(Hub::from_environment())
}

fn of(hub: Result<Hub, HubError>) -> Vec<Check> {
    let mut hub = match hub {
        Ok(hub) => hub,
        Err(error) => {
            let help = "set HOME or HF_HOME to a folder; only models of the hub (hf://...) need it";
            return vec![Check::warn(HUB, error.to_string(), help)];
        }
    };
    let token = match &hub.token {
        Some(token) => Check::ok(TOKEN, format!("from {}", token.from)),
        None => Check::ok(
            TOKEN,
            "none; only private and gated models of the hub need one (HF_TOKEN)",
        ),
    };
    hub.timeout = TIMEOUT;
    vec![token, reachable(&hub)]
}

fn reachable(hub: &Hub) -> Check {
    if hub.offline {
        let cache = hub.cache.display();
        return Check::ok(
            HUB,
            format!("not asked: HF_HUB_OFFLINE is set, only the cache {cache} is looked at"),
        );
    }
    let (endpoint, login) = without_login(&hub.endpoint);
    let help = "only models of the hub (hf://...) need it: check the network, HTTPS_PROXY and HF_ENDPOINT";
    match hub.greet() {
        Ok(status) if status < 500 => Check::ok(HUB, format!("{endpoint} answers")),
        Ok(status) => Check::warn(
            HUB,
            format!("{endpoint} answers with a server error (status {status})"),
            help,
        ),
        Err(error) => {
            let mut found = error.to_string();
            if !login.is_empty() {
                found = found.replace(login, "");
            }
            Check::warn(HUB, found, help)
        }
    }
}

/// An address without the user's name and password, and these with the `@` after them.
fn without_login(address: &str) -> (String, &str) {
    let host = address.find("://").map_or(0, |at| at + 3);
    let end = address[host..].find('/').map_or(address.len(), |at| host + at);
    match address[host..end].rfind('@') {
        Some(at) => {
            let login = &address[host..=host + at];
            (address.replacen(login, "", 1), login)
        }
        None => (address.to_owned(), ""),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;

    use super::super::State;
    use super::*;

    fn checks(variables: &[(&str, &str)]) -> Vec<Check> {
        let variables: BTreeMap<&str, &str> = variables.iter().copied().collect();
        of(Hub::from_variables(|name| {
            variables.get(name).map(|value| value.to_string())
        }))
    }

    #[test]
    fn a_token_is_named_by_its_place_and_goes_nowhere() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let request: Vec<String> = lines
                .map_while(Result::ok)
                .take_while(|line| !line.is_empty())
                .collect();
            stream
                .write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                .unwrap();
            request.join("\n")
        });
        let secret = "hf_very_secret";
        let [token, hub] = &checks(&[("HF_HOME", "/none"), ("HF_TOKEN", secret), ("HF_ENDPOINT", &endpoint)])[..]
        else {
            panic!("two checks");
        };
        assert_eq!(*token, Check::ok(TOKEN, "from HF_TOKEN"));
        assert_eq!(*hub, Check::ok(HUB, format!("{endpoint} answers")));
        let request = server.join().unwrap();
        assert!(request.starts_with("HEAD / ") && !request.contains(secret), "{request}");
    }

    #[test]
    fn what_cannot_be_reached_is_warned_of_and_offline_is_not_asked() {
        // A port without a listener: it was bound here a moment ago.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let endpoint = format!("http://user:password@127.0.0.1:{port}");
        let [token, hub] = &checks(&[("HF_HOME", "/none"), ("HF_ENDPOINT", &endpoint)])[..] else {
            panic!("two checks");
        };
        assert_eq!((token.state, hub.state), (State::Ok, State::Warn));
        assert!(
            hub.found.contains("127.0.0.1") && !hub.found.contains("password"),
            "{}",
            hub.found
        );
        let offline = checks(&[
            ("HF_HOME", "/none"),
            ("HF_ENDPOINT", &endpoint),
            ("HF_HUB_OFFLINE", "1"),
        ]);
        assert_eq!(offline[1].state, State::Ok);
        assert!(offline[1].found.contains("HF_HUB_OFFLINE"), "{}", offline[1].found);
        // No folder for a cache.
        assert_eq!(checks(&[])[0].state, State::Warn);
    }

    #[test]
    fn logins_are_taken_out_of_addresses() {
        assert_eq!(
            without_login("https://a:b@c@host:1/path@x"),
            ("https://host:1/path@x".into(), "a:b@c@")
        );
        assert_eq!(without_login("https://host/x@y"), ("https://host/x@y".into(), ""));
    }
}
