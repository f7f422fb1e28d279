//! Patterns of paths: `*` and `?` match parts of a name, `**` any number of folders.

/// Whether a path fits a pattern. Both have `/` between names; `*` and `?` match no `/`.
pub fn path_fits(pattern: &str, path: &str) -> bool {
    let pattern: Vec<&str> = pattern.split('/').collect();
    let names: Vec<&str> = path.split('/').collect();
    names_fit(&pattern, &names)
}

/// Goes through the pattern once, from its end, whatever it is: a pattern may be somebody else's.
fn names_fit(wanted: &[&str], names: &[&str]) -> bool {
    // Whether the names from a place on fit the part of the pattern that was seen.
    let mut fits = vec![false; names.len() + 1];
    fits[names.len()] = true;
    for part in wanted.iter().rev() {
        if *part == "**" {
            let mut any = false;
            for fit in fits.iter_mut().rev() {
                any |= *fit;
                *fit = any;
            }
            continue;
        }
        let part: Vec<char> = part.chars().collect();
        for (place, name) in names.iter().enumerate() {
            let name: Vec<char> = name.chars().collect();
            fits[place] = fits[place + 1] && name_fits(&part, &name);
        }
        fits[names.len()] = false;
    }
    fits[0]
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
    fn patterns_of_many_folders_take_no_time() {
        let pattern = "**/".repeat(300) + "z";
        assert!(!path_fits(&pattern, &"a/".repeat(400)));
        assert!(path_fits(&pattern, &("a/".repeat(400) + "z")));
    }

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
            ("a/**/**/c", "a/b/b/c"),
            ("**/b/**", "a/b"),
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
