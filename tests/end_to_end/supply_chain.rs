//! The crates that the program is made of have licences and versions that `deny.toml` accepts. `package/supply_chain` asks
//! cargo-deny, which looks at more; this needs nothing but cargo.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

/// Quoted texts after `key` up to the end of the list that begins there, without comments.
fn listed(document: &str, key: &str) -> Vec<String> {
    let (_, list) = document.split_once(key).unwrap_or_else(|| panic!("no `{key}`"));
    let lines = list.lines().skip(1).take_while(|line| *line != "]");
    let lines = lines.map(str::trim).filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            line.split('"')
                .nth(1)
                .unwrap_or_else(|| panic!("no text in {line}"))
                .to_owned()
        })
        .collect()
}

/// Whether an SPDX expression can be met by licences that are allowed. `/` is an old way to write `OR`.
struct Expression<'a> {
    words: Vec<&'a str>,
    at: usize,
    allowed: &'a BTreeSet<String>,
    used: &'a mut BTreeSet<String>,
}

impl Expression<'_> {
    fn next_is(&mut self, word: &str) -> bool {
        let is = self.words.get(self.at) == Some(&word);
        self.at += usize::from(is);
        is
    }

    fn any(&mut self) -> bool {
        let mut met = self.all();
        while self.next_is("OR") || self.next_is("/") {
            met |= self.all();
        }
        met
    }

    fn all(&mut self) -> bool {
        let mut met = self.one();
        while self.next_is("AND") {
            met &= self.one();
        }
        met
    }

    fn one(&mut self) -> bool {
        if self.next_is("(") {
            let met = self.any();
            assert!(self.next_is(")"), "{:?}", self.words);
            return met;
        }
        let mut licence = self.words[self.at].to_owned();
        self.at += 1;
        if self.next_is("WITH") {
            licence = format!("{licence} WITH {}", self.words[self.at]);
            self.at += 1;
        }
        let met = self.allowed.contains(&licence);
        if met {
            self.used.insert(licence);
        }
        met
    }
}

fn is_met(expression: &str, allowed: &BTreeSet<String>, used: &mut BTreeSet<String>) -> bool {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " / ");
    let mut expression = Expression {
        words: spaced.split_whitespace().collect(),
        at: 0,
        allowed,
        used,
    };
    let met = expression.any();
    assert_eq!(expression.at, expression.words.len(), "not read: {spaced}");
    met
}

#[test]
fn expressions_of_licences_are_read_as_spdx_says() {
    let allowed = BTreeSet::from(["MIT".to_owned(), "Zlib".to_owned()]);
    let met = |expression| is_met(expression, &allowed, &mut BTreeSet::new());
    for good in [
        "MIT",
        "GPL-3.0 OR MIT",
        "GPL-3.0/MIT",
        "(GPL-3.0 OR MIT) AND Zlib",
        "MIT AND Zlib OR GPL-3.0",
    ] {
        assert!(met(good), "{good}");
    }
    for bad in [
        "GPL-3.0",
        "MIT AND GPL-3.0",
        "GPL-3.0 OR (MIT AND ISC)",
        "MIT WITH Some-exception",
    ] {
        assert!(!met(bad), "{bad}");
    }
}

#[test]
fn crates_have_licences_and_versions_that_are_accepted() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let rules = fs::read_to_string(root.join("deny.toml")).unwrap();
    let allowed: BTreeSet<String> = listed(&rules, "\nallow = [").into_iter().collect();
    let skipped: BTreeSet<String> = listed(&rules, "\nskip = [").into_iter().collect();

    // Without other platforms: their crates need not be here.
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let mut metadata = Command::new(cargo);
    metadata.args(["metadata", "--offline", "--locked", "--format-version", "1"]);
    metadata.args(["--filter-platform", "x86_64-unknown-linux-gnu"]);
    let output = metadata.current_dir(root).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();

    let (mut refused, mut used) = (Vec::new(), BTreeSet::new());
    let mut versions: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for package in metadata["packages"].as_array().unwrap() {
        let (name, version) = (package["name"].as_str().unwrap(), package["version"].as_str().unwrap());
        versions.entry(name).or_default().push(version);
        let licence = package["license"].as_str().unwrap_or("a file");
        if licence == "a file" || !is_met(licence, &allowed, &mut used) {
            refused.push(format!("{name} {version}: {licence}"));
        }
    }
    assert!(versions.len() > 100, "{versions:?}");
    assert_eq!(refused, Vec::<String>::new(), "licences");
    let unused: Vec<_> = allowed.difference(&used).collect();
    assert!(unused.is_empty(), "licences of nothing: {unused:?}");

    let mut older = BTreeSet::new();
    for (name, mut versions) in versions {
        let numbers = |version: &&str| -> Vec<u64> {
            let plain = version.split(['-', '+']).next().unwrap_or_default();
            plain.split('.').map(|number| number.parse().unwrap()).collect()
        };
        versions.sort_by_key(numbers);
        versions.pop();
        older.extend(versions.iter().map(|version| format!("{name}@{version}")));
    }
    assert_eq!(
        older, skipped,
        "crates of several versions, but for the newest of each: left those that there are"
    );
}
