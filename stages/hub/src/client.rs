//! HTTP requests to the hub, and messages for its errors.

use std::io::Read;
use std::time::Duration;

use flow_storage::{HubToken, origin};
use serde::Deserialize;
use ureq::http::{HeaderMap, Response};
use ureq::{Agent, Body, SendBody};

use crate::error::HubError;
use crate::hub::Hub;
use crate::reference::{HubReference, is_commit, is_inside, plain_name};

/// The most redirections that are followed.
const REDIRECTIONS: usize = 8;
/// The longest response that is read as a list of files, in bytes.
const LONGEST_LIST: u64 = 16 << 20;
/// The most files of a repository. Those of large models have hundreds, datasets some thousands.
pub(crate) const MOST_FILES: usize = 100_000;
/// The most files of a repository whose files are read where they are, and the most pages of their list.
const MOST_IN_TREE: usize = 2_000_000;
const MOST_PAGES: usize = 20_000;
/// Bytes a second of the slowest upload that is not given up.
const SLOWEST: u64 = 20_000;

pub(crate) struct HttpClient {
    agent: Agent,
    endpoint: String,
    token: Option<HubToken>,
    timeout: Duration,
}

/// A repository at a commit, with the paths of its files.
pub(crate) struct RemoteRevision {
    pub commit: String,
    pub files: Vec<String>,
}

/// A file of the hub, before it is downloaded.
pub(crate) struct RemoteFile {
    /// Name of the blob. For large files it is the SHA-256 of their bytes, for others the SHA-1 that git gives them.
    pub etag: String,
    /// In bytes.
    pub size: Option<u64>,
    /// The URL of the bytes.
    address: String,
}

impl RemoteFile {
    /// The digest that the bytes must have. None where the etag is of another form, as mirrors may have them.
    pub fn digest(&self) -> Option<EtagDigest> {
        let is_hex = self.etag.bytes().all(|byte| byte.is_ascii_hexdigit());
        match self.etag.len() {
            64 if is_hex => Some(EtagDigest::Sha256),
            40 if is_hex => Some(EtagDigest::GitBlob),
            _ => None,
        }
    }

    /// The server that the bytes come from.
    pub fn server(&self) -> &str {
        origin(&self.address)
    }
}

/// What the etag of a file is.
#[derive(Clone, Copy)]
pub(crate) enum EtagDigest {
    /// The SHA-256 of its bytes (git LFS).
    Sha256,
    /// The SHA-1 of a header and its bytes, by which git names it.
    GitBlob,
}

/// A file of a repository, as the hub's list has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeFile {
    /// Within the repository.
    pub path: String,
    /// In bytes.
    pub size: u64,
    /// With which the hub gives the file: the SHA-256 of a large one, the SHA-1 that git gives to others.
    pub etag: String,
}

/// What a request asks for, of those that change a repository and those that prepare it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Method {
    Get,
    Post,
    Put,
}

/// Why a request failed.
pub(crate) struct RequestError {
    pub message: String,
    pub help: String,
    /// A later request may succeed; the cache may be used meanwhile.
    pub transient: bool,
}

impl RequestError {
    /// One that a later request gets, too.
    fn new(message: impl Into<String>, help: impl Into<String>) -> RequestError {
        RequestError {
            message: message.into(),
            help: help.into(),
            transient: false,
        }
    }
}

impl From<RequestError> for HubError {
    fn from(error: RequestError) -> Self {
        HubError::unavailable(error.message, error.help)
    }
}

#[derive(Deserialize)]
struct Listing {
    sha: Option<String>,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

/// A file or folder in the list of a repository.
#[derive(Deserialize)]
struct TreeItem {
    r#type: String,
    path: String,
    #[serde(default)]
    size: u64,
    #[serde(default)]
    oid: String,
    lfs: Option<LargeFile>,
}

/// What a pointer of git LFS leads to.
#[derive(Deserialize)]
struct LargeFile {
    oid: String,
    size: u64,
}

impl HttpClient {
    pub fn new(hub: &Hub) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_resolve(Some(hub.timeout))
            .timeout_connect(Some(hub.timeout))
            .timeout_recv_response(Some(hub.timeout))
            // A download is cut off after so long and resumed, so that a stalled connection is noticed.
            .timeout_recv_body(Some(hub.timeout))
            .user_agent(concat!("flow/", env!("CARGO_PKG_VERSION")))
            .build();
        HttpClient {
            agent: config.into(),
            endpoint: hub.endpoint.clone(),
            token: hub.token.clone(),
            timeout: hub.timeout,
        }
    }

    /// Whether the hub answers at all: the status of its first page. The token is not sent.
    pub fn greet(&self) -> Result<u16, RequestError> {
        let response = self.agent.head(&self.endpoint).call();
        let response = response.map_err(|error| self.transport_error(&self.endpoint, &error))?;
        Ok(response.status().as_u16())
    }

    /// Resolves a revision to its commit and its files.
    pub fn list(&self, reference: &HubReference) -> Result<RemoteRevision, RequestError> {
        let address = format!(
            "{}/api/{}/{}/revision/{}",
            self.endpoint,
            reference.kind.plural(),
            reference.repository(),
            reference.revision.replace('/', "%2F")
        );
        let mut response = self.get(&address, reference, None)?;
        let strange = |what: String| {
            RequestError::new(
                format!("{address} does not answer as the hub does: {what}"),
                "check HF_ENDPOINT, and whether there is a proxy",
            )
        };
        let body = response.body_mut().with_config().limit(LONGEST_LIST).read_to_vec();
        let body = body.map_err(|error| match error {
            ureq::Error::BodyExceedsLimit(_) => {
                strange(format!("its list of files has more than {LONGEST_LIST} bytes"))
            }
            error => self.transport_error(&address, &error),
        })?;
        let listing: Listing = serde_json::from_slice(&body).map_err(|error| strange(error.to_string()))?;
        let commit = listing.sha.filter(|sha| is_commit(sha));
        let commit = commit.ok_or_else(|| strange("it names no commit".into()))?;
        let count = listing.siblings.len();
        if count > MOST_FILES {
            return Err(strange(format!("it lists {count} files, more than {MOST_FILES}")));
        }
        let files = listing.siblings.into_iter().map(|sibling| sibling.rfilename);
        // A path that leads out of the repository is never requested.
        let mut files: Vec<String> = files.filter(|file| is_inside(file)).collect();
        files.sort();
        files.dedup();
        Ok(RemoteRevision { commit, files })
    }

    /// All files of a repository at a commit, in pages. Those whose path leads outside are left out.
    pub fn tree(&self, reference: &HubReference, commit: &str) -> Result<Vec<TreeFile>, RequestError> {
        let repository = reference.repository();
        let kind = reference.kind.plural();
        let mut address = format!("{}/api/{kind}/{repository}/tree/{commit}?recursive=true", self.endpoint);
        let mut files = Vec::new();
        for _ in 0..MOST_PAGES {
            let strange = |what: String| {
                RequestError::new(
                    format!("{address} does not answer as the hub does: {what}"),
                    "check HF_ENDPOINT, and whether there is a proxy",
                )
            };
            let mut response = self.get(&address, reference, None)?;
            let next = text(response.headers(), "link").and_then(next_page);
            let body = response.body_mut().with_config().limit(LONGEST_LIST).read_to_vec();
            let body = body.map_err(|error| match error {
                ureq::Error::BodyExceedsLimit(_) => strange(format!("a page has more than {LONGEST_LIST} bytes")),
                error => self.transport_error(&address, &error),
            })?;
            let items: Vec<TreeItem> = serde_json::from_slice(&body).map_err(|error| strange(error.to_string()))?;
            for item in items {
                if item.r#type != "file" || !is_inside(&item.path) {
                    continue;
                }
                let (etag, size) = match item.lfs {
                    Some(lfs) => (lfs.oid, lfs.size),
                    None => (item.oid, item.size),
                };
                if !plain_name(&etag) {
                    return Err(strange(format!("{} has no digest", item.path)));
                }
                let path = item.path;
                files.push(TreeFile { path, size, etag });
            }
            if files.len() > MOST_IN_TREE {
                return Err(strange(format!("it lists more than {MOST_IN_TREE} files")));
            }
            let Some(next) = next else { return Ok(files) };
            if origin(&next) != origin(&self.endpoint) {
                return Err(strange(format!("its next page is at {}", origin(&next))));
            }
            address = next;
        }
        Err(RequestError::new(
            format!("{repository} has a list of more than {MOST_PAGES} pages"),
            "check HF_ENDPOINT, and whether there is a proxy",
        ))
    }

    /// Size, checksum and URL of a file, by a HEAD request.
    pub fn describe(&self, reference: &HubReference, commit: &str, file: &str) -> Result<RemoteFile, RequestError> {
        let mut address = address_of(&self.endpoint, reference, commit, file);
        let mut found: Option<(String, Option<u64>)> = None;
        for _ in 0..REDIRECTIONS {
            let response = self.send(&address, reference, Some(file), true, None)?;
            let headers = response.headers();
            let etag = text(headers, "x-linked-etag").or_else(|| text(headers, "etag"));
            let etag = etag.map(|etag| etag.trim_start_matches("W/").trim_matches('"').to_owned());
            if found.is_none()
                && let Some(etag) = etag.filter(|etag| plain_name(etag))
            {
                let size = text(headers, "x-linked-size").or_else(|| {
                    let length = text(headers, "content-length");
                    length.filter(|_| !response.status().is_redirection())
                });
                found = Some((etag, size.and_then(|size| size.parse().ok())));
            }
            if !response.status().is_redirection() {
                let Some((etag, size)) = found else { break };
                return Ok(RemoteFile { etag, size, address });
            }
            let to = self.redirected(&address, &response)?;
            if let Some((etag, size)) = &found
                && origin(&to) != origin(&self.endpoint)
            {
                // The storage of the bytes, whose signed URLs allow GET only.
                return Ok(RemoteFile {
                    etag: etag.clone(),
                    size: *size,
                    address: to,
                });
            }
            address = to;
        }
        Err(RequestError::new(
            format!("{address} does not answer as the hub does: no etag, or too many redirections"),
            "check HF_ENDPOINT, and whether there is a proxy",
        ))
    }

    /// Requests the bytes of a file from offset `from` on. The status says whether the response begins there (206) or
    /// at the first byte (200).
    pub fn open(
        &self,
        reference: &HubReference,
        file: &str,
        remote_file: &RemoteFile,
        from: u64,
    ) -> Result<Response<Body>, RequestError> {
        let range = (from > 0).then(|| format!("bytes={from}-"));
        let mut address = remote_file.address.clone();
        for _ in 0..REDIRECTIONS {
            let response = self.send(&address, reference, Some(file), false, range.as_deref())?;
            if !response.status().is_redirection() {
                return Ok(response);
            }
            address = self.redirected(&address, &response)?;
        }
        Err(RequestError::new(
            format!("{address}: too many redirections"),
            "try again later",
        ))
    }

    fn get(&self, address: &str, reference: &HubReference, file: Option<&str>) -> Result<Response<Body>, RequestError> {
        let mut address = address.to_owned();
        for _ in 0..REDIRECTIONS {
            let response = self.send(&address, reference, file, false, None)?;
            if !response.status().is_redirection() {
                return Ok(response);
            }
            address = self.redirected(&address, &response)?;
        }
        Err(RequestError::new(
            format!("{address}: too many redirections"),
            "check HF_ENDPOINT",
        ))
    }

    fn redirected(&self, address: &str, response: &Response<Body>) -> Result<String, RequestError> {
        let to = text(response.headers(), "location").unwrap_or_default();
        if to.starts_with("http://") || to.starts_with("https://") {
            return Ok(to.to_owned());
        }
        if to.starts_with('/') {
            return Ok(format!("{}{to}", origin(address)));
        }
        Err(RequestError::new(
            format!("{address} leads to `{to}`, which is not an address"),
            "check HF_ENDPOINT",
        ))
    }

    /// One request. The token is sent to the hub alone, not to hosts that it redirects to.
    fn send(
        &self,
        address: &str,
        reference: &HubReference,
        file: Option<&str>,
        head: bool,
        range: Option<&str>,
    ) -> Result<Response<Body>, RequestError> {
        let mut request = if head {
            self.agent.head(address)
        } else {
            self.agent.get(address)
        };
        request = request.header("accept-encoding", "identity");
        let ours = origin(address) == origin(&self.endpoint);
        if let Some(token) = self.token.as_ref().filter(|_| ours) {
            request = request.header("authorization", format!("Bearer {}", token.secret));
        }
        if let Some(range) = range {
            request = request.header("range", range);
        }
        let response = request.call().map_err(|error| self.transport_error(address, &error))?;
        let status = response.status();
        if status.is_success() || status.is_redirection() || status.as_u16() == 416 {
            return Ok(response);
        }
        Err(self.status_error(status.as_u16(), response.headers(), reference, file))
    }

    /// One request with a body of a known size. Gives the response whatever its status. The token is sent to the hub alone.
    /// `wait` is the longest time until the response begins; the body has as much, and more for each byte.
    pub fn submit(
        &self,
        (method, address): (Method, &str),
        headers: &[(String, String)],
        body: &mut dyn Read,
        size: u64,
        wait: Duration,
    ) -> Result<Response<Body>, RequestError> {
        let token = self
            .token
            .as_ref()
            .filter(|_| origin(address) == origin(&self.endpoint));
        let token = token.map(|token| ("authorization".to_owned(), format!("Bearer {}", token.secret)));
        let headers = headers.iter().chain(&token);
        let response = if method == Method::Get {
            let get = self.agent.get(address);
            headers.fold(get, |get, (name, value)| get.header(name, value)).call()
        } else {
            let request = match method {
                Method::Put => self.agent.put(address),
                _ => self.agent.post(address),
            };
            let request = headers.fold(request, |request, (name, value)| request.header(name, value));
            request
                .header("content-length", size)
                .config()
                .timeout_send_body(Some(wait + Duration::from_secs(size / SLOWEST)))
                .timeout_recv_response(Some(wait))
                .build()
                .send(SendBody::from_reader(body))
        };
        response.map_err(|error| self.transport_error(address, &error))
    }

    fn transport_error(&self, address: &str, error: &ureq::Error) -> RequestError {
        let host = origin(address);
        let (what, help) = match error {
            ureq::Error::Timeout(_) => (
                format!("{host} does not answer within {} s", self.timeout.as_secs()),
                "try again; behind a firewall set HTTPS_PROXY, or HF_ENDPOINT to a mirror",
            ),
            ureq::Error::HostNotFound => (
                format!("{host} is not known: there is no such name, or no network"),
                "check the network and HF_ENDPOINT; a machine without network needs HF_HUB_OFFLINE=1 and a filled cache",
            ),
            ureq::Error::Io(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => (
                format!("{host} refuses the connection"),
                "check HF_ENDPOINT and the proxy settings; a machine without network needs HF_HUB_OFFLINE=1 and a filled cache",
            ),
            ureq::Error::Io(error) if error.kind() == std::io::ErrorKind::TimedOut => (
                format!("{host} does not answer within {} s", self.timeout.as_secs()),
                "try again; behind a firewall set HTTPS_PROXY, or HF_ENDPOINT to a mirror",
            ),
            other => (
                format!("{host} cannot be reached: {other}"),
                "check the network and the proxy settings, and try again",
            ),
        };
        RequestError {
            message: what,
            help: help.into(),
            transient: true,
        }
    }

    /// The message for an error status: by the hub's error code, and without one by the status and whether there is a
    /// token.
    fn status_error(
        &self,
        status: u16,
        headers: &HeaderMap,
        reference: &HubReference,
        file: Option<&str>,
    ) -> RequestError {
        let repository = reference.repository();
        let page = format!("{}/{}", self.endpoint, reference.path());
        let code = text(headers, "x-error-code").unwrap_or_default();
        let token = self.token.as_ref().map(|token| token.from.as_str());
        let login = match token {
            Some(from) => format!("make a token at https://huggingface.co/settings/tokens and give it by {from}"),
            None => "make a token at https://huggingface.co/settings/tokens and set HF_TOKEN to it".to_owned(),
        };
        let (message, help) = match (status, code, token) {
            (401 | 403, "GatedRepo", None) => (
                format!("{repository} is gated: it needs a login and accepted terms, and there is no token"),
                format!("open {page}, accept the conditions, then {login}"),
            ),
            (401 | 403, "GatedRepo", Some(from)) => (
                format!(
                    "{repository} is given only to those who have accepted its conditions; the account of the token from {from} has not, or is not let in yet"
                ),
                format!("open {page} with that account and accept the conditions, or use the token of another account"),
            ),
            (401 | 404, "RepoNotFound", None) => (
                format!("there is no {repository} on {}, or it is private", self.endpoint),
                format!("check the name; if it is private, {login}"),
            ),
            (401 | 404, "RepoNotFound", Some(from)) => (
                format!(
                    "there is no {repository} on {}, or it is private and the account of the token from {from} may not see it",
                    self.endpoint
                ),
                "check the name, and whose token that is".into(),
            ),
            (401, _, Some(from)) => (
                format!("{} does not accept the token from {from}", self.endpoint),
                format!("it may have been revoked or cut: {login}, or remove it if {repository} is public"),
            ),
            (401, _, None) => (
                format!("{repository} is not given without a login, or does not exist"),
                format!("check the name; if it is private, {login}"),
            ),
            (403, _, _) => (
                format!("{} forbids access to {repository}", self.endpoint),
                "the token may lack the right to read this repository: look at its permissions".into(),
            ),
            (404, "RevisionNotFound", _) => (
                format!("{repository} has no revision {}", reference.revision),
                format!(
                    "look for branches and tags at {page}/tree/main, or leave `@{}` out",
                    reference.revision
                ),
            ),
            (404, _, _) if file.is_some() => (
                format!(
                    "there is no file {} in {repository} at {}",
                    file.unwrap_or_default(),
                    reference.revision
                ),
                format!("look for its name at {page}/tree/{}", reference.revision),
            ),
            (404, _, _) => (
                format!("there is no {repository} on {}", self.endpoint),
                "check the name".into(),
            ),
            (429, _, _) => (
                format!("{} limits the rate of requests (status 429)", self.endpoint),
                "wait some minutes and run again; what is downloaded stays".into(),
            ),
            (500.., _, _) => (
                format!("{} answers with a server error (status {status})", self.endpoint),
                "run again later; what is downloaded stays".into(),
            ),
            _ => (
                format!("{} answers with status {status} for {reference}", self.endpoint),
                text(headers, "x-error-message")
                    .unwrap_or("check HF_ENDPOINT")
                    .to_owned(),
            ),
        };
        RequestError {
            message,
            help,
            transient: status == 429 || status >= 500,
        }
    }
}

pub(crate) fn text<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name)?.to_str().ok()
}

/// The address of a file at a commit.
pub(crate) fn address_of(endpoint: &str, reference: &HubReference, commit: &str, file: &str) -> String {
    format!("{endpoint}/{}/resolve/{commit}/{}", reference.path(), encoded(file))
}

/// The address of the next page in a header `link`: `<https://...>; rel="next"`.
fn next_page(links: &str) -> Option<String> {
    links.split(',').find_map(|link| {
        let (address, rest) = link.trim().strip_prefix('<')?.split_once('>')?;
        rest.contains("rel=\"next\"").then(|| address.to_owned())
    })
}

/// A path, percent-encoded.
fn encoded(file: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~' | b'/');
    let mut out = String::with_capacity(file.len());
    for byte in file.bytes() {
        if plain(byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}
