//! Credentials in the files of the AWS command line: `~/.aws/credentials` and `~/.aws/config`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Longest file that is read.
const LONGEST: u64 = 1 << 20;

/// Settings of the profile that the environment names (or `default`), under the names that they have in the environment. What the
/// environment itself says is not among them. Empty where there are no such files.
pub(crate) fn settings(environment: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let profile = environment.get("AWS_PROFILE").map_or("default", String::as_str);
    let home = environment.get("HOME").map(PathBuf::from).unwrap_or_default();
    let file = |variable: &str, name: &str| match environment.get(variable) {
        Some(path) => PathBuf::from(path),
        None => home.join(".aws").join(name),
    };
    let in_config = match profile {
        "default" => "default".to_string(),
        name => format!("profile {name}"),
    };
    let mut found = section(&file("AWS_CONFIG_FILE", "config"), &in_config);
    found.extend(section(&file("AWS_SHARED_CREDENTIALS_FILE", "credentials"), profile));
    let names = [
        ("aws_access_key_id", "AWS_ACCESS_KEY_ID"),
        ("aws_secret_access_key", "AWS_SECRET_ACCESS_KEY"),
        ("aws_session_token", "AWS_SESSION_TOKEN"),
        ("region", "AWS_REGION"),
        ("endpoint_url", "AWS_ENDPOINT_URL"),
    ];
    let mut settings = BTreeMap::new();
    for (name, variable) in names {
        if let Some(value) = found.remove(name) {
            settings.insert(variable.to_string(), value);
        }
    }
    settings
}

/// The settings in a section of a file; none where the file or the section is not there.
fn section(path: &Path, wanted: &str) -> BTreeMap<String, String> {
    let is_small = std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.len() <= LONGEST);
    let text = is_small
        .then(|| std::fs::read_to_string(path).ok())
        .flatten()
        .unwrap_or_default();
    let mut settings = BTreeMap::new();
    let mut within = false;
    for line in text.lines() {
        if let Some(name) = line.trim().strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            within = name.trim() == wanted;
        } else if within
            && !line.starts_with([' ', '\t', '#', ';'])
            && let Some((name, value)) = line.split_once('=')
        {
            settings.insert(name.trim().to_ascii_lowercase(), value.trim().to_string());
        }
    }
    settings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_profile_of_the_environment_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let home = folder.path().join(".aws");
        std::fs::create_dir(&home).unwrap();
        let credentials = "[default]\naws_access_key_id = first\n\n[other]\n# note\naws_access_key_id=key\naws_secret_access_key = a=b\n";
        std::fs::write(home.join("credentials"), credentials).unwrap();
        let config =
            "[default]\nregion = eu-west-1\n[profile other]\nregion = ap-south-1\ns3 =\n  max_queue_size = 10\n";
        std::fs::write(home.join("config"), config).unwrap();
        let mut environment = BTreeMap::from([("HOME".to_string(), folder.path().display().to_string())]);
        let settings = |environment: &BTreeMap<String, String>| -> Vec<String> {
            let found = super::settings(environment).into_iter();
            found.map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>()
        };
        assert_eq!(
            settings(&environment),
            ["AWS_ACCESS_KEY_ID=first", "AWS_REGION=eu-west-1"]
        );
        environment.insert("AWS_PROFILE".into(), "other".into());
        let other = [
            "AWS_ACCESS_KEY_ID=key",
            "AWS_REGION=ap-south-1",
            "AWS_SECRET_ACCESS_KEY=a=b",
        ];
        assert_eq!(settings(&environment), other);
        environment.insert("AWS_PROFILE".into(), "none".into());
        assert!(settings(&environment).is_empty());
    }
}
