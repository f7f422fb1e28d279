//! Malicious and damaged files.

use proptest::prelude::*;

use super::*;

/// References that double at each step, in texts and in lists, and chains of them.
#[test]
fn references_that_grow_without_end_are_refused_where_they_stand() {
    let pipeline = |params: String, label: &str| {
        format!("flow: 1\nparams:\n{params}stages:\n  c: {{uses: toy.count, with: {{rows: 1, label: \"{label}\"}}}}\n")
    };
    let doubled = |first: &str, next: &dyn Fn(&str) -> String, steps: usize| {
        let mut params = format!("  p0: {first}\n");
        for step in 1..=steps {
            params.push_str(&format!("  p{step}: {}\n", next(&format!("${{p{}}}", step - 1))));
        }
        params
    };
    let texts = |steps| doubled("\"0123456789abcdef\"", &|before| format!("\"{before}{before}\""), steps);
    let lists = |steps| doubled("[x]", &|before| format!("[\"{before}\", \"{before}\"]"), steps);
    let maps = |steps| {
        doubled(
            "{a: x}",
            &|before| format!("{{a: \"{before}\", b: \"{before}\"}}"),
            steps,
        )
    };
    for grown in [
        texts(24),
        lists(40),
        maps(24),
        doubled("[x]", &|before| format!("[[[\"{before}\"]]]"), 100),
    ] {
        let said = mistakes(&pipeline(grown, "x"));
        assert!(
            said.contains("more than 1 MiB, or more than 128 levels") && said.contains("p.yaml:"),
            "{said}"
        );
    }
    // As much as is allowed, many times.
    let many: String = (0..80).map(|n| format!("  m{n}: \"${{p16}}\"\n")).collect();
    let said = mistakes(&pipeline(texts(16) + &many, "x"));
    assert!(said.contains("more than 64 MiB into this pipeline"), "{said}");
    let label = "${p16}".repeat(2);
    let said = mistakes(&pipeline(texts(16), &label));
    assert!(said.contains("more than 1 MiB"), "{said}");
    // Each refers to the one below it, so that none is known before the last.
    let chain = doubled("1", &|before| format!("\"{before}\""), 300);
    let upwards: String = chain.lines().rev().map(|line| format!("{line}\n")).collect();
    let said = mistakes(&pipeline(upwards, "x"));
    assert!(said.contains("more than 200 references"), "{said}");
    // What people write is far from that.
    let files = Files::new(&[(
        "p.yaml",
        &pipeline(
            doubled("1", &|before| format!("\"{before}\""), 150) + "  t: \"${p150}${p150}\"\n",
            "${t}",
        ),
    )]);
    let checked = files.check(&[]).unwrap_or_else(|found| panic!("{}", files.said(found)));
    assert_eq!(checked.stages.len(), 1);
}

/// In a pipeline, an overlay, and on the command line.
#[test]
fn documents_without_a_bottom_are_refused_by_place() {
    let deep = "[".repeat(200_000);
    let said = mistakes(&format!("flow: 1\nstages: {deep}"));
    assert!(said.contains("more than 128 deep") && said.contains(":2:"), "{said}");
    let files = Files::new(&[
        (
            "p.yaml",
            "flow: 1\nparams: {a: 1}\nstages:\n  c: {uses: toy.count, with: {rows: \"${a}\"}}\n",
        ),
        ("over.yaml", &format!("params:\n  a: {deep}\n")),
    ]);
    let said = files.said(files.load(&["over.yaml"], &[]).err().unwrap());
    assert!(
        said.contains("more than 128 deep") && said.contains("over.yaml"),
        "{said}"
    );
    let said = files.said(files.check(&[&format!("a={deep}")]).err().unwrap());
    assert!(
        said.contains("a=") || said.contains("`a`"),
        "{}",
        &said[..said.len().min(400)]
    );
    assert!(
        said.len() < 2_000,
        "the value is not shown in full: {} bytes",
        said.len()
    );
}

proptest! {
    /// Any mutation of a pipeline's text gives a pipeline or a list of mistakes, each with a place in the text.
    #[test]
    fn damaged_pipelines_never_panic(cuts in prop::collection::vec((0usize..900, 0usize..40, "[ -~\n]{0,4}"), 1..4)) {
        let files = Files::new(&[("p.yaml", OUTER), ("inner.yaml", INNER)]);
        let mut text = std::fs::read_to_string(files.path("p.yaml")).unwrap();
        for (at, length, new) in cuts {
            let at = (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap();
            let end = (at + length).min(text.len());
            if text.is_char_boundary(end) {
                text.replace_range(at..end, &new);
            }
        }
        std::fs::write(files.path("p.yaml"), &text).unwrap();
        match files.check(&["train.steps=1"]) {
            Ok(checked) => prop_assert!(!checked.stages.is_empty()),
            Err(Diagnostics(found)) => {
                prop_assert!(!found.is_empty());
                for diagnostic in found {
                    diagnostic.render(Style::Unicode);
                    if let Some(place) = diagnostic.place {
                        prop_assert!(place.source.text.get(place.offset..place.offset + place.length).is_some());
                    }
                }
            }
        }
    }
}
