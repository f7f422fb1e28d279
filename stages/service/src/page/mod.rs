//! The web page of the service, which transcribes a file or the microphone. It is part of the program, and requests
//! nothing from other servers.

use axum::Router;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;

const HTML: &str = include_str!("page.html");
const CSS: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");
const LIVE_SCRIPT: &str = include_str!("page-live.js");
const WORKLET: &str = include_str!("page-worklet.js");

/// Content-Security-Policy of the page: only resources of this server; recordings of the user are played.
const POLICY: &str = "default-src 'none'; script-src 'self'; worker-src 'self'; style-src 'self'; img-src data:; \
                      media-src blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// `GET /` and the files of the page. They hold no secrets: the page asks for the API key itself.
pub fn routes() -> Router {
    let file = |kind: &'static str, text: &'static str| {
        get(move || async move {
            let headers = [
                (header::CONTENT_TYPE, kind),
                (header::CONTENT_SECURITY_POLICY, POLICY),
                (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
                (header::REFERRER_POLICY, "no-referrer"),
                (header::CACHE_CONTROL, "no-cache"),
            ];
            (headers, text).into_response()
        })
    };
    Router::new()
        .route("/", file("text/html; charset=utf-8", HTML))
        .route("/page.css", file("text/css; charset=utf-8", CSS))
        .route("/page.js", file("text/javascript; charset=utf-8", SCRIPT))
        .route("/page-live.js", file("text/javascript; charset=utf-8", LIVE_SCRIPT))
        .route("/page-worklet.js", file("text/javascript; charset=utf-8", WORKLET))
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use axum::body::Body;
    use axum::http::{Request, StatusCode};
    use http_body_util::BodyExt;
    use tower::ServiceExt;

    use super::*;

    const FILES: [(&str, &str); 5] = [
        ("html", HTML),
        ("css", CSS),
        ("js", SCRIPT),
        ("live", LIVE_SCRIPT),
        ("worklet", WORKLET),
    ];

    /// All texts between two marks.
    fn between<'a>(text: &'a str, before: &str, after: char) -> BTreeSet<&'a str> {
        let parts = text.split(before).skip(1);
        parts.filter_map(|part| part.split(after).next()).collect()
    }

    #[test]
    fn nothing_is_asked_of_other_servers() {
        for (name, text) in FILES {
            // `https://` stands in a message and `wss:` is made of the page's own place.
            let text = text.replace("pages of https:// or localhost", "");
            for foreign in [
                "http://",
                "https://",
                "url(",
                "@import",
                "import(",
                "innerHTML",
                "eval(",
                "insertAdjacentHTML",
            ] {
                assert!(!text.contains(foreign), "{name}: {foreign}");
            }
        }
        for place in between(HTML, "src=\"", '"').union(&between(HTML, "href=\"", '"')) {
            assert!(place.starts_with("/page") || *place == "data:,", "{place}");
        }
    }

    #[test]
    fn nothing_in_the_page_needs_a_weaker_policy() {
        for script in HTML.split("<script").skip(1) {
            assert!(script.starts_with(" src=\"/page"), "{script}");
            assert!(script.contains("\" defer></script>"), "{script}");
        }
        assert!(!HTML.contains("<style") && !HTML.contains("style=") && !HTML.contains("javascript:"));
        for tag in HTML.split('<') {
            let tag = tag.split('>').next().unwrap_or_default();
            assert!(!tag.contains(" on"), "{tag}");
        }
        assert!(!POLICY.contains("unsafe"));
    }

    #[test]
    fn the_script_finds_what_it_looks_for_and_all_that_is_named_is_used() {
        let ids = between(HTML, " id=\"", '"');
        let mut looked_for = between(SCRIPT, "byId(\"", '"');
        looked_for.extend(between(LIVE_SCRIPT, "byId(\"", '"'));
        assert_eq!(looked_for.difference(&ids).collect::<Vec<_>>(), [&""; 0]);
        // Others are named for labels and styles.
        for id in ids.difference(&looked_for) {
            let label = [format!("aria-labelledby=\"{id}\""), format!("for=\"{id}\"")];
            assert!(
                label.iter().any(|label| HTML.contains(label)) || CSS.contains(&format!("#{id}")),
                "{id}"
            );
        }
        for labelled in between(HTML, " for=\"", '"') {
            assert!(ids.contains(labelled), "{labelled}");
        }
        // Each id once.
        assert_eq!(ids.len(), HTML.matches(" id=\"").count());
    }

    #[test]
    fn the_script_uses_styles_that_there_are() {
        for class in ["segment", "head", "speaker", "word", "unsure", "now", "partial", "over"] {
            let quoted = format!("\"{class}\"");
            assert!(SCRIPT.contains(&quoted) || LIVE_SCRIPT.contains(&quoted), "{class}");
            assert!(CSS.contains(&format!(".{class}")), "{class}");
        }
        let colours = between(SCRIPT, "const SPEAKER_COLOURS = ", ';');
        let count: usize = colours.first().unwrap().parse().unwrap();
        for colour in 0..count {
            assert_eq!(
                CSS.matches(&format!("--speaker-{colour}: ")).count(),
                2,
                "light and dark"
            );
            assert!(CSS.contains(&format!(".speaker-{colour} .speaker ")));
        }
    }

    /// Relative luminance of `#rrggbb` by WCAG 2.
    fn luminance(colour: &str) -> f64 {
        let digits = colour.strip_prefix('#').unwrap();
        let channel = |at: usize| {
            let value = f64::from(u8::from_str_radix(&digits[at..at + 2], 16).unwrap()) / 255.0;
            if value <= 0.04045 {
                value / 12.92
            } else {
                ((value + 0.055) / 1.055).powf(2.4)
            }
        };
        0.2126 * channel(0) + 0.7152 * channel(2) + 0.0722 * channel(4)
    }

    #[test]
    fn contrasts_are_those_of_wcag() {
        let themes: Vec<BTreeMap<&str, &str>> = CSS
            .split(":root {")
            .skip(1)
            .map(|block| {
                let lines = block.split('}').next().unwrap().lines();
                let pairs = lines.filter_map(|line| line.trim().strip_suffix(';')?.split_once(": "));
                pairs.filter(|(name, _)| name.starts_with("--")).collect()
            })
            .collect();
        assert_eq!(themes.len(), 2);
        for theme in &themes {
            let contrast = |a: &str, b: &str| {
                let (a, b) = (luminance(theme[a]), luminance(theme[b]));
                (a.max(b) + 0.05) / (a.min(b) + 0.05)
            };
            let mut pairs = vec![
                ("--text", "--background", 7.0),
                ("--text", "--surface", 7.0),
                ("--on-lit", "--lit", 7.0),
                ("--muted", "--background", 4.5),
                ("--muted", "--surface", 4.5),
                ("--on-accent", "--accent", 4.5),
                ("--error", "--background", 4.5),
                // Borders and rings.
                ("--line", "--surface", 3.0),
                ("--accent", "--background", 3.0),
            ];
            let speakers = theme.keys().filter(|name| name.starts_with("--speaker-"));
            pairs.extend(speakers.map(|name| (*name, "--background", 4.5)));
            for (a, b, least) in pairs {
                assert!(contrast(a, b) >= least, "{a} on {b}: {}", contrast(a, b));
            }
        }
    }

    #[test]
    fn the_files_are_served_with_their_types_and_the_policy() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            for (path, kind, text) in [
                ("/", "text/html", HTML),
                ("/page.css", "text/css", CSS),
                ("/page.js", "text/javascript", SCRIPT),
                ("/page-live.js", "text/javascript", LIVE_SCRIPT),
                ("/page-worklet.js", "text/javascript", WORKLET),
            ] {
                let request = Request::get(path).body(Body::empty()).unwrap();
                let response = routes().oneshot(request).await.unwrap();
                assert_eq!(response.status(), StatusCode::OK, "{path}");
                let headers = response.headers().clone();
                assert!(headers["content-type"].to_str().unwrap().starts_with(kind), "{path}");
                assert_eq!(headers["content-security-policy"], POLICY);
                let body = response.into_body().collect().await.unwrap().to_bytes();
                assert_eq!(body, text.as_bytes(), "{path}");
            }
        });
    }
}
