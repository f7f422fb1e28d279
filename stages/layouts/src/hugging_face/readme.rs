//! The configurations that the header of README.md declares, and the files of each, by the rules of the library `datasets`.

use std::collections::BTreeSet;
use std::path::Path;

use flow_corpus::ManifestError;
use flow_corpus::files::expand_braces;
use flow_corpus::looks::version_of;
use flow_corpus::tree;
use flow_kind::glob::path_fits;
use flow_kind::read_regular_file;
use flow_storage::Storage;
use serde_yaml::Value;

use super::listing::{Listed, config_and_split};

/// The longest README.md whose header is read, in bytes.
const LONGEST_README: u64 = 8 << 20;
/// The longest pattern of README.md, in bytes.
const LONGEST_PATTERN: usize = 1_000;
/// Patterns times files that are compared.
const MOST_COMPARISONS: usize = 20_000_000;
/// Configurations that an error lists.
pub(super) const MOST_SHOWN: usize = 20;
/// Of a configuration without a name.
const DEFAULT: &str = "default";

/// A configuration that README.md declares.
#[derive(Debug, PartialEq)]
pub(super) struct Config {
    pub(super) name: String,
    pub(super) is_default: bool,
    /// The folder that its patterns are relative to; empty: the repository.
    pub(super) folder: String,
    /// Splits, each with a pattern of paths; none: all files of the folder, with splits by their names.
    pub(super) patterns: Option<Vec<(String, String)>>,
}

/// A file of a configuration.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Found {
    pub(super) path: String,
    pub(super) split: String,
}

/// The files that the README.md of a folder declares, of `all` that are in it, and the configuration for the log; none if there is no
/// README.md, or it declares several configurations and none as the default. A split that was not downloaded is none.
///
/// # Errors
/// Where README.md cannot be understood, or a file of a split is there and another one that is declared is not.
pub(super) fn declared_in_folder(
    storage: &Storage,
    root: &Path,
    all: &[Listed],
) -> Result<Option<(Vec<Listed>, String)>, ManifestError> {
    let readme = root.join("README.md");
    if !tree::is_file(storage, &readme) {
        return Ok(None);
    }
    let configs = declared(storage, &readme, root)?;
    let Ok(place) = one_of_configs(&configs, None, root) else {
        return Ok(None);
    };
    let config = &configs[place];
    let below = |file: &Listed| Some(file.path.strip_prefix(root).ok()?.to_str()?.to_owned());
    let files: Vec<String> = all.iter().filter_map(below).collect();
    let data: Vec<&String> = files.iter().filter(|file| is_data(file)).collect();
    let found = matched(config, &data, "Parquet file", false, root)?;
    if found.is_empty() {
        return Ok(None);
    }
    let listed = found.into_iter().map(|file| Listed {
        path: root.join(file.path),
        config: String::new(),
        split: file.split,
    });
    Ok(Some((listed.collect(), told_of(&config.name, 1))))
}

/// The configurations in the header of a README.md; none without a header, or where it declares none.
pub(super) fn declared(storage: &Storage, readme: &Path, root: &Path) -> Result<Vec<Config>, ManifestError> {
    let failed = |error| ManifestError::io(readme, error);
    if version_of(storage, readme).map_err(failed)?.size > LONGEST_README {
        return Err(ManifestError::manifest(
            root,
            format!("its README.md has more than {LONGEST_README} bytes"),
        ));
    }
    let bytes = read_regular_file(storage, readme).map_err(failed)?;
    let text = String::from_utf8_lossy(&bytes);
    // Other programs have headers of their own, which need not be YAML.
    let Some(header) = header(&text).filter(|header| header.contains("configs")) else {
        return Ok(Vec::new());
    };
    let invalid =
        |why: String| ManifestError::manifest(root, format!("the header of its README.md is not valid YAML: {why}"));
    flow_yaml_guard::check(&header).map_err(|error| invalid(error.to_string()))?;
    let header: Value = serde_yaml::from_str(&header).map_err(|error| invalid(error.to_string()))?;
    configs_of(&header).map_err(|why| ManifestError::manifest(root, format!("the header of its README.md: {why}")))
}

/// The lines between the first two lines of three dashes.
fn header(text: &str) -> Option<String> {
    let mut lines = text.trim_start_matches('\u{feff}').lines();
    let is_mark = |line: &str| line.trim_end() == "---";
    lines.next().filter(|first| is_mark(first))?;
    let mut header = String::new();
    for line in lines {
        if is_mark(line) {
            return Some(header);
        }
        header.push_str(line);
        header.push('\n');
    }
    None
}

/// # Errors
/// Says what is not understood: a file that is declared and not read would be rows that are lost.
fn configs_of(header: &Value) -> Result<Vec<Config>, String> {
    let declared = match header.get("configs") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Sequence(configs)) => configs.iter().collect(),
        Some(config) => vec![config],
    };
    let read = |config: &Value| -> Result<Config, String> {
        if !config.is_mapping() {
            return Err("`configs` has an entry that is not a map".into());
        }
        let text = |key: &str| config.get(key).map(|value| text(value, key)).transpose();
        let name = text("config_name")?.unwrap_or_else(|| DEFAULT.into());
        let folder = text("data_dir")?.unwrap_or_default();
        let folder = folder.trim_start_matches("./").trim_end_matches('/');
        let patterns = config.get("data_files").map(patterns_of).transpose();
        Ok(Config {
            is_default: config.get("default").and_then(Value::as_bool).unwrap_or(false),
            folder: if folder == "." {
                String::new()
            } else {
                folder.to_owned()
            },
            patterns: patterns.map_err(|why| format!("configuration `{name}`: {why}"))?,
            name,
        })
    };
    let configs = declared
        .into_iter()
        .map(read)
        .collect::<Result<Vec<Config>, String>>()?;
    let mut names = BTreeSet::new();
    match configs.iter().find(|config| !names.insert(config.name.as_str())) {
        Some(twice) => Err(format!("configuration `{}` is declared twice", twice.name)),
        None => Ok(configs),
    }
}

/// A text, or a number as it is written.
fn text(value: &Value, key: &str) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Number(number) => Ok(number.to_string()),
        _ => Err(format!("`{key}` is not text")),
    }
}

/// Splits and patterns of `data_files`: a pattern or a list of patterns of the split `train`, a list of maps with `split` and `path`, or
/// a map of splits.
fn patterns_of(files: &Value) -> Result<Vec<(String, String)>, String> {
    let of_split = |split: String, value: &Value| -> Result<Vec<(String, String)>, String> {
        let paths = match value {
            Value::Sequence(paths) => paths.iter().collect(),
            path => vec![path],
        };
        let pair = |path: &Value| Ok((split.clone(), text(path, "data_files")?));
        paths.into_iter().map(pair).collect()
    };
    let of_entry = |entry: &Value| match entry {
        Value::Mapping(_) => {
            let split = entry.get("split").map(|split| text(split, "split")).transpose()?;
            let path = entry.get("path").ok_or("`data_files` has an entry without `path`")?;
            of_split(split.unwrap_or_else(|| "train".into()), path)
        }
        other => of_split("train".into(), other),
    };
    let all: Result<Vec<Vec<_>>, String> = match files {
        Value::Mapping(splits) => splits
            .iter()
            .map(|(split, value)| of_split(text(split, "data_files")?, value))
            .collect(),
        Value::Sequence(entries) => entries.iter().map(of_entry).collect(),
        other => return of_split("train".into(), other),
    };
    Ok(all?.concat())
}

/// Whether a path may be one of the data, and is of a Parquet file.
pub(super) fn is_data(path: &str) -> bool {
    path.ends_with(".parquet") && is_shown(path) && !path.ends_with("/metadata.parquet") && path != "metadata.parquet"
}

/// Whether no part of a path begins with a dot or two underscores.
pub(super) fn is_shown(path: &str) -> bool {
    !path
        .split('/')
        .any(|part| part.starts_with('.') || part.starts_with("__"))
}

/// The configuration that is read, for the log, and its Parquet files. Files are empty where the repository has none.
///
/// # Errors
/// Where the configuration is not there, there are several and none is named, or it declares files that are not there.
pub(super) fn files_of(
    files: &[String],
    configs: &[Config],
    wanted: Option<&str>,
    root: &Path,
) -> Result<(String, Vec<Found>), ManifestError> {
    let data: Vec<&String> = files.iter().filter(|file| is_data(file)).collect();
    if configs.is_empty() {
        let placed: Vec<(String, Found)> = data
            .into_iter()
            .map(|path| {
                let (config, split) = placed(path);
                (
                    config,
                    Found {
                        path: path.clone(),
                        split,
                    },
                )
            })
            .collect();
        if placed.is_empty() {
            return Ok((String::new(), Vec::new()));
        }
        let mut names: Vec<&str> = placed.iter().map(|(config, _)| config.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        let shown: Vec<(&str, bool)> = names.iter().map(|name| (shown(name), false)).collect();
        let config = names[one_of(&shown, wanted, root)?].to_owned();
        let told = told_of(&config, names.len());
        let files = placed.into_iter().filter(|(of, _)| *of == config).map(|(_, file)| file);
        return Ok((told, files.collect()));
    }
    let config = &configs[one_of_configs(configs, wanted, root)?];
    let told = told_of(&config.name, configs.len());
    if data.is_empty() {
        return Ok((told, Vec::new()));
    }
    let found = matched(config, &data, "Parquet file", true, root)?;
    if found.is_empty() {
        let why = format!("configuration `{}` in its README.md has no Parquet files", config.name);
        return Err(ManifestError::manifest(root, why));
    }
    Ok((told, found))
}

/// The place of the configuration that is read of those that are declared.
///
/// # Errors
/// Where it is not there, or there are several and none is named.
pub(super) fn one_of_configs(configs: &[Config], wanted: Option<&str>, root: &Path) -> Result<usize, ManifestError> {
    let names = configs.iter().map(|config| (config.name.as_str(), config.is_default));
    one_of(&names.collect::<Vec<_>>(), wanted, root)
}

/// The files of `data` that a configuration declares, sorted. Unless the data `is_whole`, a split without any file was not downloaded.
///
/// # Errors
/// Where a pattern matches no file, which messages call `what`.
pub(super) fn matched(
    config: &Config,
    data: &[&String],
    what: &str,
    is_whole: bool,
    root: &Path,
) -> Result<Vec<Found>, ManifestError> {
    let folder = match config.folder.is_empty() {
        true => String::new(),
        false => format!("{}/", config.folder),
    };
    let mut found: Vec<Found> = Vec::new();
    if config.patterns.is_none() {
        let below = data.iter().filter(|path| path.starts_with(&folder));
        found.extend(below.map(|path| Found {
            path: (*path).clone(),
            split: placed(&path[folder.len()..]).1,
        }));
    }
    let wrong =
        |why: &str| ManifestError::manifest(root, format!("configuration `{}` in its README.md: {why}", config.name));
    let (mut count, mut missed) = (0usize, Vec::new());
    for (split, pattern) in config.patterns.iter().flatten() {
        if pattern.len() > LONGEST_PATTERN {
            return Err(wrong("a pattern of `data_files` is too long"));
        }
        let patterns = expand_braces(pattern, pattern.clone()).map_err(|why| wrong(&why))?;
        count = count.saturating_add(patterns.len());
        if count.saturating_mul(data.len()) > MOST_COMPARISONS {
            return Err(wrong("`data_files` has too many patterns"));
        }
        for pattern in patterns {
            let pattern = format!("{folder}{}", pattern.trim_start_matches("./").trim_end_matches('/'));
            let below = format!("{pattern}/");
            let before = found.len();
            let fitting = data
                .iter()
                .filter(|path| path_fits(&pattern, path) || path.starts_with(&below));
            found.extend(fitting.map(|path| Found {
                path: (*path).clone(),
                split: split.clone(),
            }));
            if found.len() == before {
                missed.push((split, pattern));
            }
        }
    }
    // A file that is declared and not read would be rows that are lost.
    let is_lost = |split: &str| is_whole || found.iter().any(|file| file.split == split);
    if let Some((_, pattern)) = missed.iter().find(|(split, _)| is_lost(split)) {
        return Err(wrong(&format!("the pattern `{pattern}` matches no {what}")));
    }
    found.sort_by(|a, b| (&a.path, &a.split).cmp(&(&b.path, &b.split)));
    found.dedup();
    Ok(found)
}

/// A configuration for the log, which says whether there are others; empty where there is nothing to say.
pub(super) fn told_of(config: &str, count: usize) -> String {
    match (config, count) {
        ("", 0 | 1) => String::new(),
        (config, 0 | 1) => format!("`{config}`"),
        (config, count) => format!("`{}` of {count}", shown(config)),
    }
}

/// Configuration and split by the names of folders and of the file.
pub(super) fn placed(path: &str) -> (String, String) {
    let mut parts: Vec<String> = path.split('/').map(str::to_owned).collect();
    let name = parts.pop().unwrap_or_default();
    config_and_split(&parts, &name)
}

fn shown(config: &str) -> &str {
    if config.is_empty() { DEFAULT } else { config }
}

/// The place of the configuration that is read: the one that is named, else the only one, else the one that is marked as the default or
/// called so.
fn one_of(names: &[(&str, bool)], wanted: Option<&str>, root: &Path) -> Result<usize, ManifestError> {
    let place = |is: &dyn Fn(&(&str, bool)) -> bool| names.iter().position(is);
    let found = match wanted {
        Some(wanted) => place(&|(name, _)| *name == wanted),
        None if names.len() == 1 => Some(0),
        None => place(&|(_, is_default)| *is_default).or_else(|| place(&|(name, _)| *name == DEFAULT)),
    };
    found.ok_or_else(|| {
        let all: Vec<&str> = names.iter().take(MOST_SHOWN).map(|(name, _)| *name).collect();
        let rest = names.len() - all.len();
        let rest = if rest > 0 {
            format!(" and {rest} more")
        } else {
            String::new()
        };
        let what = match wanted {
            Some(wanted) => format!("it has no configuration `{wanted}`"),
            None => "it has several configurations".into(),
        };
        let place = match root.starts_with("hf:") {
            true => "hf://datasets/OWNER/NAME".into(),
            false => root.display().to_string().trim_end_matches('/').to_owned(),
        };
        let why = format!("{what}; write {place}/CONFIG with one of {}{rest}", all.join(", "));
        ManifestError::manifest(root, why)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(files: &[&str]) -> Vec<String> {
        files.iter().map(|file| (*file).to_owned()).collect()
    }

    fn configs(header: &str) -> Vec<Config> {
        configs_of(&serde_yaml::from_str(header).unwrap()).unwrap()
    }

    /// `path:split` of the files that are read, after the configuration, or the error.
    fn read(files: &[&str], header: &str, wanted: Option<&str>) -> Result<(String, Vec<String>), String> {
        let (config, found) =
            files_of(&names(files), &configs(header), wanted, Path::new("d")).map_err(|error| error.to_string())?;
        let shown = found.into_iter().map(|file| format!("{}:{}", file.path, file.split));
        Ok((config, shown.collect()))
    }

    #[test]
    fn files_are_those_of_the_configuration_in_the_header() {
        let files = [
            "README.md",
            "hindi/train-00000-of-00001.parquet",
            "hindi/valid-00000-of-00001.parquet",
            "odia/a.parquet",
            "odia/b.parquet",
            ".hidden/x.parquet",
            "__old/y.parquet",
        ];
        let header = "
configs:
- config_name: hindi
  data_files:
  - split: train
    path: hindi/train-*
  - {split: valid, path: [hindi/valid-*]}
- config_name: odia
  default: true
  data_dir: ./odia
  data_files: '*.parquet'
- config_name: whole
  data_dir: hindi
";
        let of = |wanted| read(&files, header, wanted).unwrap();
        assert_eq!(
            of(Some("hindi")),
            (
                "`hindi` of 3".into(),
                vec![
                    "hindi/train-00000-of-00001.parquet:train".into(),
                    "hindi/valid-00000-of-00001.parquet:valid".into()
                ]
            )
        );
        assert_eq!(
            of(None),
            (
                "`odia` of 3".into(),
                vec!["odia/a.parquet:train".into(), "odia/b.parquet:train".into()]
            )
        );
        assert_eq!(of(Some("whole")).1.len(), 2);
        assert_eq!(of(Some("whole")).1[1], "hindi/valid-00000-of-00001.parquet:valid");
        let error = read(&files, header, Some("urdu")).unwrap_err();
        assert!(
            error.contains("no configuration `urdu`") && error.contains("hindi, odia, whole"),
            "{error}"
        );
    }

    #[test]
    fn without_a_header_names_of_folders_tell_the_configuration() {
        let single = ["data/train-00000-of-00002.parquet", "data/test-00000-of-00001.parquet"];
        let (config, found) = read(&single, "a: 1", None).unwrap();
        assert_eq!((config.as_str(), found.len()), ("", 2));
        assert_eq!(read(&single, "a: 1", Some("default")).unwrap().1.len(), 2);
        let several = ["hi_in/partial-train/0000.parquet", "bn_in/test/0000.parquet"];
        let error = read(&several, "a: 1", None).unwrap_err();
        assert!(
            error.contains("several configurations") && error.contains("bn_in, hi_in"),
            "{error}"
        );
        assert_eq!(
            read(&several, "a: 1", Some("hi_in")).unwrap(),
            (
                "`hi_in` of 2".into(),
                vec!["hi_in/partial-train/0000.parquet:train".into()]
            )
        );
        assert_eq!(read(&["a.csv"], "a: 1", None).unwrap().1, Vec::<String>::new());
        let many: Vec<String> = (0..30).map(|n| format!("c{n:02}/train/0000.parquet")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let error = read(&many, "a: 1", None).unwrap_err();
        assert!(
            error.contains("c18, c19 and 10 more") && !error.contains("c20"),
            "{error}"
        );
    }

    #[test]
    fn files_that_are_declared_or_numbered_and_not_there_are_errors() {
        let files = ["data/train.parquet", "data/val.parquet", "data/more.jsonl"];
        let of = |patterns: &str| {
            read(
                &files,
                &format!("configs: {{config_name: x, data_files: {patterns}}}"),
                None,
            )
        };
        assert_eq!(of("'data/{train,val}.parquet'").unwrap().1.len(), 2);
        for (patterns, none) in [
            ("[data/train.parquet, data/more.jsonl]", "data/more.jsonl"),
            (
                "[{split: train, path: data/train*}, {split: test, path: data/test*}]",
                "data/test*",
            ),
            ("'data/{train,test}.parquet'", "data/test.parquet"),
            ("../../../etc/*", "../../../etc/*"),
            ("other/", "other"),
        ] {
            let error = of(patterns).unwrap_err();
            assert!(
                error.contains(&format!("configuration `x` in its README.md: the pattern `{none}`")),
                "{error}"
            );
        }
    }

    #[test]
    fn headers_are_between_two_lines_of_dashes() {
        assert_eq!(header("---\na: 1\n---\nb").as_deref(), Some("a: 1\n"));
        assert_eq!(header("\u{feff}---\r\na: 1\r\n---\r\n").as_deref(), Some("a: 1\n"));
        for none in ["", "# Title\n---\n", "---\na: 1\n"] {
            assert_eq!(header(none), None, "{none:?}");
        }
        let patterns = |header: &str| configs(header).remove(0).patterns;
        let files = "configs: {config_name: x, data_files: {train: a/*, test: [b/*, c/*]}}";
        assert_eq!(patterns(files).unwrap().len(), 3);
        assert_eq!(patterns("configs: {data_dir: x}"), None);
        let numbers = configs("configs: [{config_name: 2024, data_files: [{split: 1, path: a}]}]").remove(0);
        assert_eq!(
            (numbers.name.as_str(), numbers.patterns),
            ("2024", Some(vec![("1".into(), "a".into())]))
        );
        // What is not understood is never left out.
        for odd in [
            "configs: 3",
            "configs: [1, [2]]",
            "configs: {data_files: {train: {a: b}}}",
            "configs: {data_files: [{split: x}]}",
            "configs: {data_files: [a, [[b]]]}",
            "configs: {data_files: null}",
            "configs: {data_dir: [x]}",
            "configs: [{config_name: x}, {config_name: x}]",
        ] {
            assert!(configs_of(&serde_yaml::from_str(odd).unwrap()).is_err(), "{odd}");
        }
    }
}
