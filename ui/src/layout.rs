//! The common parts of all pages: head, navigation, and small components.

use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use flow_service::page::{ICON, STYLE};
use maud::{DOCTYPE, Markup, html};

use super::App;

/// The navigation at the top of every page.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Section {
    Runs,
    Rows,
    Evaluation,
    Training,
    Transcripts,
}

const SECTIONS: [(Section, &str, &str); 5] = [
    (Section::Runs, "/", "Runs"),
    (Section::Rows, "/tables", "Rows"),
    (Section::Evaluation, "/evaluation", "Evaluation"),
    (Section::Training, "/training", "Training"),
    (Section::Transcripts, "/transcripts", "Transcripts"),
];

/// A page. `main` holds no text of data as markup: maud escapes it.
pub fn page(app: &App, section: Section, title: &str, main: &Markup) -> Response {
    let state = app.settings.state.display().to_string();
    let body = html! {
        a.skip href="#main" { "Skip to the content" }
        header {
            nav aria-label="Pages" {
                strong { "flow" }
                @for (one, path, name) in SECTIONS {
                    a href=(path) aria-current=[(one == section).then_some("page")] { (name) }
                }
            }
            span.quiet title="The state directory" dir="auto" { (state) }
        }
        main #main { h1 dir="auto" { (title) } (main) }
        footer.quiet { kbd { "/" } " search · " kbd { "j" } kbd { "k" } " rows · " kbd { "Enter" } " open · " kbd { "Space" } " play" }
    };
    document(StatusCode::OK, title, &body)
}

/// An error page.
pub fn error_page(status: StatusCode, message: &str) -> Response {
    let title = status.canonical_reason().unwrap_or("Error");
    let body = html! { main #main { h1 { (title) } p.failed role="alert" dir="auto" { (message) } p { a href="/" { "Back to the runs" } } } };
    document(status, title, &body)
}

fn document(status: StatusCode, title: &str, body: &Markup) -> Response {
    let markup = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) " · flow" }
                link rel="stylesheet" href=(STYLE);
                link rel="stylesheet" href="/assets/ui.css";
                link rel="icon" href=(ICON) type="image/svg+xml";
                script src="/assets/ui.js" defer {}
            }
            body { (body) }
        }
    };
    (
        status,
        [(CONTENT_TYPE, "text/html; charset=utf-8")],
        markup.into_string(),
    )
        .into_response()
}

/// Text as part of an address: all but letters, digits and `-_.~` as `%XX`.
pub fn encoded(text: &str) -> String {
    let mut address = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => address.push(char::from(byte)),
            _ => address.push_str(&format!("%{byte:02X}")),
        }
    }
    address
}

/// An address with a query of these names and values.
pub fn address<'a>(path: &str, query: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let mut text = path.to_owned();
    for (number, (name, value)) in query.into_iter().enumerate() {
        text.push(if number == 0 { '?' } else { '&' });
        text.push_str(&format!("{}={}", encoded(name), encoded(value)));
    }
    text
}

/// Words of data, which may run in either direction; `lang` is given where it has the form of a language tag.
pub fn said(text: &str, lang: Option<&str>) -> Markup {
    let lang = lang.filter(|lang| is_language(lang));
    html! { span.said dir="auto" lang=[lang] { (text) } }
}

fn is_language(tag: &str) -> bool {
    let is_part = |part: &str| (1..=8).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_alphanumeric());
    tag.len() <= 35 && tag.split('-').all(is_part) && tag.split('-').next().is_some_and(|first| first.len() >= 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_into_an_address_stays_one_value() {
        let text = address("/rows", [("stage", "a/b&c=d"), ("q", "नमस्ते \"%+#")]);
        assert_eq!(
            text,
            "/rows?stage=a%2Fb%26c%3Dd&q=%E0%A4%A8%E0%A4%AE%E0%A4%B8%E0%A5%8D%E0%A4%A4%E0%A5%87%20%22%25%2B%23"
        );
    }

    #[test]
    fn only_language_tags_are_languages_of_a_text() {
        let drawn = |lang| said("<b> سلام", Some(lang)).into_string();
        assert_eq!(
            drawn("ur-Arab"),
            "<span class=\"said\" dir=\"auto\" lang=\"ur-Arab\">&lt;b&gt; سلام</span>"
        );
        for wrong in ["", "u", "ur_Arab", "\" onclick=\"", "अब"] {
            assert!(!drawn(wrong).contains("lang"), "{wrong}");
        }
    }
}
