//! The common parts of all pages: head, navigation, and small components.

use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use flow_service::page::{ICON, STYLE};
use maud::{DOCTYPE, Markup, html};

use super::app::App;
use super::page_error::PageError;

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

/// The error page.
impl IntoResponse for PageError {
    fn into_response(self) -> Response {
        let title = self.status.canonical_reason().unwrap_or("Error");
        let body = html! { main #main { h1 { (title) } p.failed role="alert" dir="auto" { (self.message) } p { a href="/" { "Back to the runs" } } } };
        document(self.status, title, &body)
    }
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
