//! Patterns of paths: `*` and `?` match parts of a name, `**` any number of folders.

/// Whether a path fits a pattern. Both have `/` between names; `*` and `?` match no `/`.
pub fn path_fits(pattern: &str, path: &str) -> bool {
    let pattern: Vec<&str> = pattern.split('/').collect();
    let names: Vec<&str> = path.split('/').collect();
    names_fit(&pattern, &names)
}

fn names_fit(wanted: &[&str], names: &[&str]) -> bool {
    match (wanted.split_first(), names.split_first()) {
        (None, None) => true,
        (Some((first, rest)), _) if *first == "**" => {
            names_fit(rest, names) || names.split_first().is_some_and(|(_, names)| names_fit(wanted, names))
        }
        (Some((first, rest)), Some((name, names))) => {
            let (first, name): (Vec<char>, Vec<char>) = (first.chars().collect(), name.chars().collect());
            name_fits(&first, &name) && names_fit(rest, names)
        }
        _ => false,
    }
}

/// Whether a name fits a pattern of one: two pointers, going back to the last `*`.
fn name_fits(pattern: &[char], name: &[char]) -> bool {
    let (mut p, mut n) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p + 1, n));
                p += 1;
            }
            Some(&c) if c == '?' || c == name[n] => {
                p += 1;
                n += 1;
            }
            _ => match &mut star {
                Some((after, taken)) => {
                    *taken += 1;
                    (p, n) = (*after, *taken);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&c| c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_parts_of_a_name_and_two_for_folders() {
        for (pattern, path) in [
            ("*a*b*", "xxaxxb"),
            ("", ""),
            ("a?", "aé"),
            ("hi/*", "hi/hi_0001"),
            ("**", "a/b/c"),
            ("**/c", "a/b/c"),
            ("a/**/c", "a/c"),
        ] {
            assert!(path_fits(pattern, path), "{pattern} {path}");
        }
        for (pattern, path) in [
            ("*a*b", "xxaxxbx"),
            ("a?", "a"),
            ("", "a"),
            ("*", "a/b"),
            ("hi/*", "hi/x/y"),
            ("hi/*", "hi"),
        ] {
            assert!(!path_fits(pattern, path), "{pattern} {path}");
        }
    }
}
