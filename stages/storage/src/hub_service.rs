//! Requests to the Hugging Face hub, which gives most bytes by redirecting to the servers of its storage.
//!
//! - The token is sent to the hub alone.
//! - The ETag of a file is the hub's (`x-linked-etag`). That of its storage is another one, so a request is not bound to an ETag by
//!   `If-Match`, but compared here.
//! - Signed addresses of the storage allow GET only, so a HEAD request ends at the hub, which gives the size (`x-linked-size`).

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;

use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody, HttpResponse, HttpService,
};
use reqwest::header::HeaderValue;

use crate::counters::Counters;
use crate::counting_connector::counted;
use crate::hub_access::{HubAccess, origin};
use crate::location::Scheme;
use crate::open_bucket::Limits;

/// The most redirections that are followed.
const REDIRECTIONS: usize = 8;

/// Makes HTTP clients for files of the hub.
pub(crate) struct HubConnector {
    pub hub: HubAccess,
    pub scheme: Scheme,
    pub limits: Limits,
    pub counters: Arc<Counters>,
}

impl fmt::Debug for HubConnector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HubConnector({})", self.hub.endpoint)
    }
}

impl HttpConnector for HubConnector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .timeout(self.limits.request)
            .https_only(self.scheme == Scheme::Https)
            .user_agent(concat!("flow/", env!("CARGO_PKG_VERSION")))
            .no_gzip()
            .no_brotli()
            .no_zstd()
            .no_deflate()
            .build();
        let client = client.map_err(|error| object_store::Error::Generic {
            store: "HTTP",
            source: Box::new(error),
        })?;
        Ok(HttpClient::new(HubService {
            client: counted(HttpClient::new(client), &self.counters),
            hub: self.hub.clone(),
        }))
    }
}

struct HubService {
    client: HttpClient,
    hub: HubAccess,
}

impl fmt::Debug for HubService {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HubService({})", self.hub.endpoint)
    }
}

impl HttpService for HubService {
    fn call<'a, 'b>(
        &'a self,
        request: HttpRequest,
    ) -> Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(self.follow(request))
    }
}

impl HubService {
    /// The answer to a GET or HEAD request, after redirections.
    async fn follow(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (mut head, _) = request.into_parts();
        let expected = head.headers.remove("if-match");
        let expected = expected.as_ref().and_then(|etag| etag.to_str().ok()).map(plain_etag);
        let mut etag: Option<String> = None;
        for _ in 0..REDIRECTIONS {
            let address = head.uri.to_string();
            let mut hop = head.clone();
            if let Some(token) = self.hub.token.as_ref().filter(|_| self.is_of_hub(&address)) {
                let bearer = format!("Bearer {}", token.secret).parse();
                let bearer = bearer.map_err(|_| failed(format!("the token from {} is not text", token.from)))?;
                hop.headers.insert("authorization", bearer);
                if let Some(bearer) = hop.headers.get_mut("authorization") {
                    bearer.set_sensitive(true);
                }
            }
            let hop = HttpRequest::from_parts(hop, HttpRequestBody::empty());
            let (mut answer, body) = self.client.execute(hop).await?.into_parts();
            let text = |name: &str| Some(answer.headers.get(name)?.to_str().ok()?.to_owned());
            if !answer.status.is_success() && !answer.status.is_redirection() {
                let message = text("x-error-message").unwrap_or_default();
                let body = text("x-error-code").map_or(body, |code| in_words_of_clouds(&code, &message).into());
                return Ok(HttpResponse::from_parts(answer, body));
            }
            let said = || text("x-linked-etag").or_else(|| text("etag"));
            etag = etag.or_else(|| said().as_deref().map(plain_etag));
            if expected.is_some() && etag.is_some() && expected != etag {
                return with(412, &[]);
            }
            if answer.status.is_redirection() {
                let to = redirected(&address, text("location"))?;
                if let (Some(etag), Some(size)) = (&etag, text("x-linked-size"))
                    && head.method.as_str() == "HEAD"
                    && !self.is_of_hub(&to)
                {
                    return with(200, &[("etag", etag), ("content-length", &size)]);
                }
                head.uri = to.parse().map_err(|_| failed(format!("it leads to {to:?}")))?;
                continue;
            }
            if let Some(etag) = etag {
                // The storage has other times.
                answer.headers.remove("last-modified");
                answer.headers.insert("etag", header(&etag)?);
            }
            return Ok(HttpResponse::from_parts(answer, body));
        }
        Err(failed(format!("more than {REDIRECTIONS} redirections")))
    }

    fn is_of_hub(&self, address: &str) -> bool {
        origin(address) == origin(&self.hub.endpoint)
    }
}

/// Where an answer leads.
fn redirected(from: &str, location: Option<String>) -> Result<String, HttpError> {
    let to = location.unwrap_or_default();
    if to.starts_with("http://") || to.starts_with("https://") {
        return Ok(to);
    }
    if to.starts_with('/') && !to.starts_with("//") {
        return Ok(format!("{}{to}", origin(from)));
    }
    Err(failed("it leads to what is not an address".into()))
}

fn plain_etag(etag: &str) -> String {
    etag.trim_start_matches("W/").trim_matches('"').to_owned()
}

/// An answer without a body.
fn with(status: u16, headers: &[(&'static str, &str)]) -> Result<HttpResponse, HttpError> {
    let mut answer = HttpResponse::new(Vec::new().into());
    *answer.status_mut() = status.try_into().map_err(|_| failed("no status".into()))?;
    for (name, value) in headers {
        answer.headers_mut().insert(*name, header(value)?);
    }
    Ok(answer)
}

fn header(text: &str) -> Result<HeaderValue, HttpError> {
    let value = HeaderValue::from_str(text);
    value.map_err(|_| failed("it has a header that is not text".into()))
}

/// The code and the words of the hub as a body in the form in which S3 gives its own: messages are made of these.
fn in_words_of_clouds(code: &str, message: &str) -> String {
    match message {
        "" => format!("<Code>{code}</Code>"),
        message => format!("<Code>{code}</Code><Message>{message}</Message>"),
    }
}

fn failed(why: String) -> HttpError {
    HttpError::new(HttpErrorKind::Unknown, io::Error::other(why))
}

#[cfg(test)]
#[path = "hub_service_tests.rs"]
mod tests;
