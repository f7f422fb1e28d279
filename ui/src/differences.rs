//! How runs that are shown side by side differ: settings of a stage, and parameters.

/// Names and values.
pub type Settings = Vec<(String, String)>;

/// Of each, what not all of those that have it have alike.
pub fn differences(of: &[Settings]) -> Vec<Settings> {
    let value = |settings: &Settings, name: &str| {
        let found = settings.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.clone())
    };
    let differs = |(name, own): &&(String, String)| {
        let mut others = of.iter().filter_map(|settings| value(settings, name));
        others.any(|other| other != *own)
    };
    of.iter()
        .map(|settings| settings.iter().filter(differs).cloned().collect())
        .collect()
}

/// The settings on one line: `max_steps 60, schedule cosine`.
pub fn on_one_line(settings: &Settings) -> String {
    // Limited to keep the line readable.
    const SHOWN: usize = 8;
    const LONGEST: usize = 48;
    let shown = settings.iter().take(SHOWN).map(|(name, value)| {
        let value = if value.is_empty() { "(empty)" } else { value };
        match value.char_indices().nth(LONGEST) {
            // The ends of paths say most.
            Some(_) => {
                let skipped = value.chars().count() - LONGEST;
                format!("{name} …{}", value.chars().skip(skipped).collect::<String>())
            }
            None => format!("{name} {value}"),
        }
    });
    let mut shown: Vec<String> = shown.collect();
    if settings.len() > SHOWN {
        shown.push(format!("{} more", settings.len() - SHOWN));
    }
    shown.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_the_same_for_all_is_left_out() {
        let settings = |pairs: &[(&str, &str)]| -> Settings {
            let pairs = pairs
                .iter()
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
            pairs.collect()
        };
        let long = "x".repeat(60);
        let of = [
            settings(&[("steps", "60"), ("init", ""), ("seed", "1"), ("out", "a")]),
            settings(&[("steps", "90"), ("init", &long), ("seed", "1")]),
            settings(&[("steps", "90"), ("init", ""), ("seed", "1")]),
        ];
        let lines: Vec<String> = differences(&of).iter().map(on_one_line).collect();
        let cut = format!("steps 90, init …{}", "x".repeat(48));
        assert_eq!(lines, ["steps 60, init (empty)", &cut, "steps 90, init (empty)"]);
        assert_eq!(differences(&of[..1]), [Settings::new()]);
        let many: Settings = (0..10).map(|n| (n.to_string(), "y".into())).collect();
        assert!(on_one_line(&many).ends_with("7 y, 2 more"));
    }
}
