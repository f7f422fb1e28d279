//! The page on which a recording or the microphone is transcribed, and a transcript plays along: `GET /` of the service. Its
//! parts are public, as pages of other programs have them, too. It is part of the program, and requests nothing from other
//! servers.

use axum::Router;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;

/// Where a recording is chosen or spoken: markup in a `main`, before [`TRANSCRIPT`]. The page needs [`TRANSCRIBE_SCRIPT`], and
/// the paths of the service that are below `/v1/`.
pub const CAPTURE: &str = include_str!("capture.html");

/// The place of a transcript and its recording: markup in a `main`. Where an element of the page has the address of
/// a transcript in `data-transcript`, [`TRANSCRIPT_SCRIPT`] shows it, with the recording at `data-sound`; it is saved as `data-name`.
pub const TRANSCRIPT: &str = include_str!("transcript.html");

/// Paths of [`files`]: the style sheet, the icon, and the modules of script for each of the two parts.
pub const STYLE: &str = "/page.css";
pub const ICON: &str = "/page-icon.svg";
pub const TRANSCRIBE_SCRIPT: &str = "/page-transcribe.js";
pub const TRANSCRIPT_SCRIPT: &str = "/page-transcript.js";

const HTML: &str = concat!(
    include_str!("head.html"),
    include_str!("capture.html"),
    include_str!("transcript.html"),
    include_str!("foot.html"),
);

/// The files beside the page, by path: their media type and content.
const FILES: [(&str, &str, &str); 8] = [
    (STYLE, "text/css; charset=utf-8", include_str!("page.css")),
    (ICON, "image/svg+xml", include_str!("icon.svg")),
    (TRANSCRIBE_SCRIPT, JAVASCRIPT, include_str!("transcribe.js")),
    (TRANSCRIPT_SCRIPT, JAVASCRIPT, include_str!("transcript.js")),
    ("/page-jobs.js", JAVASCRIPT, include_str!("jobs.js")),
    ("/page-service.js", JAVASCRIPT, include_str!("service.js")),
    ("/page-microphone.js", JAVASCRIPT, include_str!("microphone.js")),
    ("/page-worklet.js", JAVASCRIPT, include_str!("worklet.js")),
];

const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

/// Content-Security-Policy of the page: only resources of this server; recordings of the user are played.
const POLICY: &str = "default-src 'none'; script-src 'self'; worker-src 'self'; style-src 'self'; img-src 'self'; \
                      media-src blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// `GET /` and [`files`]. They hold no secrets: the page asks for the API key itself.
pub fn routes() -> Router {
    served(files(), "/", "text/html; charset=utf-8", HTML)
}

/// The files of the page.
pub fn files() -> Router {
    FILES.into_iter().fold(Router::new(), |router, (path, kind, text)| {
        served(router, path, kind, text)
    })
}

fn served(router: Router, path: &str, kind: &'static str, text: &'static str) -> Router {
    let file = move || async move {
        let headers = [
            (header::CONTENT_TYPE, kind),
            (header::CONTENT_SECURITY_POLICY, POLICY),
            (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
            (header::REFERRER_POLICY, "no-referrer"),
            (header::CACHE_CONTROL, "no-cache"),
        ];
        (headers, text).into_response()
    };
    router.route(path, get(file))
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use axum::body::Body;
    use axum::http::{Request, StatusCode};
    use http_body_util::BodyExt;
    use tower::ServiceExt;

    use super::*;

    /// The page and all files beside it, by their paths.
    fn all_files() -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
        FILES.into_iter().chain([("/", "text/html; charset=utf-8", HTML)])
    }

    fn text_of(path: &str) -> &'static str {
        let found = FILES.iter().find(|(known, ..)| *known == path);
        found.map(|(.., text)| *text).unwrap()
    }

    fn scripts() -> Vec<&'static str> {
        let scripts = FILES.iter().filter(|(path, ..)| path.ends_with(".js"));
        scripts.map(|(.., text)| *text).collect()
    }

    /// All texts between two marks.
    fn between<'a>(text: &'a str, before: &str, after: char) -> BTreeSet<&'a str> {
        let parts = text.split(before).skip(1);
        parts.filter_map(|part| part.split(after).next()).collect()
    }

    #[test]
    fn nothing_is_asked_of_other_servers() {
        for (name, _, text) in all_files() {
            // `https://` is in a message and `wss:` is made of the page's own place; the other one names a vocabulary.
            let text = text.replace("pages of https:// or localhost", "");
            let text = text.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
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
            assert!(FILES.iter().any(|(path, ..)| path == place), "{place}");
        }
        for script in scripts() {
            for place in between(script, " from \"", '"').union(&between(script, "addModule(\"", '"')) {
                assert!(FILES.iter().any(|(path, ..)| path == place), "{place}");
            }
        }
    }

    #[test]
    fn nothing_in_the_page_needs_a_weaker_policy() {
        for script in HTML.split("<script").skip(1) {
            assert!(script.starts_with(" type=\"module\" src=\"/page"), "{script}");
            assert!(script.contains("\"></script>"), "{script}");
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
        let css = text_of(STYLE);
        let looked_for: BTreeSet<&str> = scripts()
            .iter()
            .flat_map(|script| between(script, "byId(\"", '"'))
            .collect();
        // That part is on pages without the other.
        let of_transcript = between(TRANSCRIPT, " id=\"", '"');
        let found = between(text_of(TRANSCRIPT_SCRIPT), "byId(\"", '"');
        assert_eq!(found.difference(&of_transcript).collect::<Vec<_>>(), [&""; 0]);
        assert_eq!(looked_for.difference(&ids).collect::<Vec<_>>(), [&""; 0]);
        // Others are named for labels and styles.
        for id in ids.difference(&looked_for) {
            let label = [format!("aria-labelledby=\"{id}\""), format!("for=\"{id}\"")];
            assert!(
                label.iter().any(|label| HTML.contains(label)) || css.contains(&format!("#{id}")),
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
        let css = text_of(STYLE);
        for class in [
            "segment", "head", "speaker", "word", "unsure", "now", "other", "partial", "over", "note",
        ] {
            let quoted = format!("\"{class}\"");
            assert!(scripts().iter().any(|script| script.contains(&quoted)), "{class}");
            assert!(css.contains(&format!(".{class}")), "{class}");
        }
        let colours = between(text_of(TRANSCRIPT_SCRIPT), "const SPEAKER_COLOURS = ", ';');
        let count: usize = colours.first().unwrap().parse().unwrap();
        for colour in 0..count {
            assert_eq!(
                css.matches(&format!("--speaker-{colour}: ")).count(),
                2,
                "light and dark"
            );
            let class = format!(".speaker-{colour} {{ --speaker: var(--speaker-{colour}); }}");
            assert!(css.contains(&class), "{class}");
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
        let themes: Vec<BTreeMap<&str, &str>> = text_of(STYLE)
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
                ("--quiet", "--background", 4.5),
                ("--quiet", "--surface", 4.5),
                ("--on-accent", "--accent", 4.5),
                ("--failed", "--background", 4.5),
                // Borders and rings.
                ("--edge", "--surface", 3.0),
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
            for (path, kind, text) in all_files() {
                let request = Request::get(path).body(Body::empty()).unwrap();
                let response = routes().oneshot(request).await.unwrap();
                assert_eq!(response.status(), StatusCode::OK, "{path}");
                let headers = response.headers().clone();
                assert_eq!(headers["content-type"], kind, "{path}");
                assert_eq!(headers["content-security-policy"], POLICY);
                let body = response.into_body().collect().await.unwrap().to_bytes();
                assert_eq!(body, text.as_bytes(), "{path}");
            }
        });
    }
}
