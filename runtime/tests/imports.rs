//! Imports between the modules of the crate are acyclic.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The code of a file: without comments, and without its tests, which come last.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines = code.lines().map(|line| line.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n")
}

/// The names that follow `before` in a text.
fn names_after<'a>(text: &'a str, before: &'a str) -> impl Iterator<Item = &'a str> {
    let is_end = |c: char| !c.is_alphanumeric() && c != '_';
    text.split(before)
        .skip(1)
        .filter_map(move |rest| rest.split(is_end).next())
}

/// Adds what the files below `path` import to the modules of the crate's root that they belong to.
fn add(
    path: &Path,
    module: Option<&str>,
    exported: &BTreeMap<String, String>,
    imports: &mut BTreeMap<String, BTreeSet<String>>,
) {
    let name = path.file_stem().unwrap().to_str().unwrap();
    // Tests may import what they like; settings are read by the YAML reader of `spec`, so that the two are one module.
    let named = |name: &str| {
        if name == "registry" {
            "spec".to_string()
        } else {
            name.to_string()
        }
    };
    if name == "tests" || name == "lib" {
        return;
    }
    let module = module.map_or_else(|| named(name), str::to_string);
    if path.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            add(&entry.unwrap().path(), Some(&module), exported, imports);
        }
    } else if path.extension().is_some_and(|extension| extension == "rs") {
        let code = code(path);
        let found = names_after(&code, "crate::").map(|name| named(exported.get(name).map_or(name, String::as_str)));
        let own = imports.entry(module.clone()).or_default();
        own.extend(found.filter(|found| *found != module));
    }
}

#[test]
fn no_module_imports_one_that_imports_it() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    // What the crate's root exports, with its module.
    let mut exported = BTreeMap::new();
    for statement in code(&src.join("lib.rs")).split(';') {
        if let Some((module, names)) = statement
            .trim()
            .strip_prefix("pub use ")
            .and_then(|path| path.split_once("::"))
        {
            for name in names.trim_matches(['{', '}']).split(',') {
                exported.insert(name.trim().to_string(), module.to_string());
            }
        }
    }
    assert_eq!(exported.get("StageError").map(String::as_str), Some("error"));
    let mut imports = BTreeMap::new();
    for entry in fs::read_dir(&src).unwrap() {
        add(&entry.unwrap().path(), None, &exported, &mut imports);
    }
    assert!(
        imports["run"].contains("planner") && imports["planner"].contains("plan"),
        "{imports:?}"
    );
    // Removes modules that import none of the remaining ones, until no more can be removed.
    while let Some(last) = imports
        .iter()
        .find(|(_, of)| !of.iter().any(|of| imports.contains_key(of)))
    {
        let last = last.0.clone();
        imports.remove(&last);
    }
    assert!(imports.is_empty(), "modules that import each other: {imports:?}");
}

/// What plans is a function of what it is given.
#[test]
fn plans_read_no_file_and_no_clock_and_lock_nothing() {
    let plan = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/plan");
    let mut files = 0;
    for entry in fs::read_dir(plan).unwrap() {
        let path = entry.unwrap().path();
        let code = code(&path);
        files += 1;
        for name in [
            "std::fs",
            "File",
            "Mutex",
            "RwLock",
            "Cell",
            "Atomic",
            "Instant",
            "SystemTime",
            "Storage",
            "Store",
            "Artifact",
            "Context",
            "Body",
            "catch_panic",
            "planner",
        ] {
            let is_end = |c: Option<char>| c.is_none_or(|c| !c.is_alphanumeric() && c != '_');
            let named = code.match_indices(name).any(|(at, _)| {
                is_end(code[..at].chars().next_back()) && is_end(code[at + name.len()..].chars().next())
            });
            assert!(!named, "{} names {name}", path.display());
        }
    }
    assert!(files > 10, "{files} files");
}
