//! Access control of the pages: requests for this machine's own names, from a browser with the token.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, COOKIE, LOCATION, ORIGIN, REFERRER_POLICY, SET_COOKIE,
    X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use flow_kind::random_hex;
use flow_service::http::Callers;
use subtle::ConstantTimeEq;

use super::page_error::PageError;

/// Content-Security-Policy: pages only use files of this server, and play recordings of the user.
const POLICY: &str = "default-src 'none'; script-src 'self'; worker-src 'self'; style-src 'self'; img-src 'self'; \
    media-src 'self' blob:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'";

/// Who may see the pages.
pub struct Access {
    token: String,
    /// CSRF token, part of every form that changes something.
    form_token: String,
    /// Name of the cookie. Cookies are shared by all ports of a host, so each server has its own name.
    cookie: String,
    callers: Callers,
}

impl Access {
    /// # Errors
    /// If the machine gives no random numbers.
    pub fn new(address: SocketAddr) -> io::Result<Access> {
        Ok(Access {
            token: random_hex::<32>()?,
            form_token: random_hex::<32>()?,
            cookie: format!("flow_ui_{}", address.port()),
            callers: Callers::new(true, address, &[], &[]),
        })
    }

    /// The URL that opens the pages.
    pub fn url(&self, address: SocketAddr) -> String {
        format!("http://{address}/?token={}", self.token)
    }

    /// The CSRF token for forms.
    pub fn form_token(&self) -> &str {
        &self.form_token
    }

    /// # Errors
    /// 403 if it is not that of this server's forms.
    pub fn check_form(&self, given: &str) -> Result<(), PageError> {
        match is_same(given, &self.form_token) {
            true => Ok(()),
            false => Err(PageError::new(
                StatusCode::FORBIDDEN,
                "the form is not one of this server, or of an earlier start of it: load its page again",
            )),
        }
    }

    fn check(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> Result<Admission, PageError> {
        let refused = |why: &str| PageError::new(StatusCode::FORBIDDEN, why);
        if self.callers.check(uri, headers).is_err() {
            return Err(refused(
                "the request is not for this server, or comes from a page of another one",
            ));
        }
        let is_read = matches!(*method, Method::GET | Method::HEAD);
        if !is_read && headers.get(ORIGIN).is_none() {
            return Err(refused(
                "a request that changes something has to say which page it comes from",
            ));
        }
        let pairs = || uri.query().unwrap_or_default().split('&');
        let given = pairs().find_map(|pair| pair.strip_prefix("token="));
        if let (Some(given), true) = (given, is_read) {
            let rest: Vec<&str> = pairs().filter(|pair| !pair.starts_with("token=")).collect();
            return match is_same(given, &self.token) {
                true => Ok(Admission::Cookie(without_token(uri.path(), &rest.join("&")))),
                false => Err(refused(
                    "the token in the address is not that of this server: it has another one each time it starts",
                )),
            };
        }
        let cookies = headers.get_all(COOKIE).iter().filter_map(|value| value.to_str().ok());
        let mut cookies = cookies
            .flat_map(|value| value.split(';'))
            .filter_map(|pair| pair.trim().split_once('='));
        if cookies.any(|(name, value)| name == self.cookie && is_same(value, &self.token)) {
            return Ok(Admission::Page);
        }
        Err(refused(
            "open the address that `flow ui` printed: it holds the token that this page needs",
        ))
    }
}

#[derive(Debug, PartialEq)]
enum Admission {
    Page,
    /// The token was in the URL: it is stored in a cookie, and the redirect to this address, which does not have it, removes
    /// it from the browser's history.
    Cookie(String),
}

/// An address of this server; two slashes at its beginning would make it one of another.
fn without_token(path: &str, query: &str) -> String {
    let path = path.trim_start_matches(['/', '\\']);
    match query {
        "" => format!("/{path}"),
        query => format!("/{path}?{query}"),
    }
}

/// Compares in a time that depends on the length alone.
fn is_same(given: &str, known: &str) -> bool {
    given.as_bytes().ct_eq(known.as_bytes()).into()
}

/// Middleware: checks access, and sets the headers of all responses.
pub async fn guard(State(access): State<Arc<Access>>, request: Request, next: Next) -> Response {
    let admission = access.check(request.method(), request.uri(), request.headers());
    let mut response = match admission {
        Ok(Admission::Page) => next.run(request).await,
        Ok(Admission::Cookie(address)) => {
            let cookie = format!("{}={}; HttpOnly; SameSite=Strict; Path=/", access.cookie, access.token);
            (StatusCode::SEE_OTHER, [(LOCATION, address), (SET_COOKIE, cookie)]).into_response()
        }
        Err(error) => error.into_response(),
    };
    let headers = response.headers_mut();
    let policy = |name: HeaderName, value: &'static str| (name, HeaderValue::from_static(value));
    for (name, value) in [
        policy(CONTENT_SECURITY_POLICY, POLICY),
        policy(X_CONTENT_TYPE_OPTIONS, "nosniff"),
        policy(X_FRAME_OPTIONS, "DENY"),
        // With `no-referrer` a browser would not say which page a form is from.
        policy(REFERRER_POLICY, "same-origin"),
        policy(CACHE_CONTROL, "no-store"),
        policy(HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    ] {
        headers.entry(name).or_insert(value);
    }
    response
}

#[cfg(test)]
mod tests {
    use axum::http::header::HOST;

    use super::*;

    fn check(access: &Access, method: Method, path: &str, headers: &[(HeaderName, &str)]) -> Result<Admission, u16> {
        let headers = headers
            .iter()
            .map(|(name, value)| (name.clone(), HeaderValue::from_str(value).unwrap()));
        let checked = access.check(&method, &path.parse().unwrap(), &headers.collect());
        checked.map_err(|error| error.status.as_u16())
    }

    #[test]
    fn pages_need_the_token_in_the_address_and_then_in_the_cookie() {
        let access = Access::new("127.0.0.1:8001".parse().unwrap()).unwrap();
        let own = (HOST, "127.0.0.1:8001");
        let address = format!("/?token={}", access.token);
        assert_eq!(access.token.len(), 64);
        for (path, target) in [
            (address.clone(), "/"),
            (format!("/training{}", &address[1..]), "/training"),
            (format!("/rows?a=1&token={}&b=2", access.token), "/rows?a=1&b=2"),
            // Not to a page of another server.
            (format!("//evil.example{}", &address[1..]), "/evil.example"),
        ] {
            assert_eq!(
                check(&access, Method::GET, &path, std::slice::from_ref(&own)),
                Ok(Admission::Cookie(target.into())),
                "{path}"
            );
        }
        let cookie = format!("other=1; flow_ui_8001={}", access.token);
        let with = [own.clone(), (COOKIE, cookie.as_str())];
        assert_eq!(check(&access, Method::GET, "/runs/1", &with), Ok(Admission::Page));
        for (path, headers) in [
            ("/", vec![own.clone()]),
            ("/?token=", vec![own.clone()]),
            (&address[..address.len() - 1], vec![own.clone()]),
            (&format!("/runs/1{}0", &address[1..]), vec![own.clone()]),
            ("/", vec![own.clone(), (COOKIE, "flow_ui_8001=")]),
            ("/", vec![own.clone(), (COOKIE, &cookie.replace("8001", "8002"))]),
            // DNS rebinding, and a page of another origin.
            ("/", vec![(HOST, "evil.example:8001"), with[1].clone()]),
            ("/", vec![own.clone(), with[1].clone(), (ORIGIN, "http://evil.example")]),
            ("/", vec![with[1].clone()]),
        ] {
            assert_eq!(
                check(&access, Method::GET, path, &headers),
                Err(403),
                "{path} {headers:?}"
            );
        }
    }

    #[test]
    fn what_changes_something_comes_from_a_page_of_this_server() {
        let access = Access::new("127.0.0.1:8001".parse().unwrap()).unwrap();
        let cookie = format!("flow_ui_8001={}", access.token);
        let with = [(HOST, "localhost:8001"), (COOKIE, cookie.as_str())];
        let from = |origin| [with[0].clone(), with[1].clone(), (ORIGIN, origin)];
        assert_eq!(check(&access, Method::POST, "/corrections", &with), Err(403));
        assert_eq!(check(&access, Method::POST, "/corrections", &from("null")), Err(403));
        let own = from("http://localhost:8001");
        assert_eq!(check(&access, Method::POST, "/corrections", &own), Ok(Admission::Page));
        assert!(access.check_form(access.form_token()).is_ok());
        for wrong in ["", "0", &access.token] {
            assert!(access.check_form(wrong).is_err());
        }
    }
}
