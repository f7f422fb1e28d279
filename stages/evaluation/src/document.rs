//! The frame of all report pages: one self-contained HTML file.

use maud::{DOCTYPE, Markup, PreEscaped, html};

/// A complete page. `style` and `script` are inserted unescaped: they must come from the program, not from its input.
pub fn document(title: &str, style: &str, main: &Markup, script: Option<&str>) -> String {
    let markup = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (PreEscaped(style)) }
            }
            body {
                main { (main) }
                @if let Some(script) = script { script { (PreEscaped(script)) } }
            }
        }
    };
    markup.into_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_what_it_is_given_and_nothing_else() {
        let of = |script: Option<&str>| document("<a> & b", "p > b { margin: 0; }", &html! { h1 { "x < y" } }, script);
        let head = "<!DOCTYPE html><html lang=\"en\"><head><meta charset=\"utf-8\">\
            <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"><title>&lt;a&gt; &amp; b</title>\
            <style>p > b { margin: 0; }</style></head><body><main><h1>x &lt; y</h1></main>";
        assert_eq!(of(None), format!("{head}</body></html>"));
        let script = "if (1 < 2 && true) alert('x');";
        assert_eq!(
            of(Some(script)),
            format!("{head}<script>{script}</script></body></html>")
        );
    }
}
