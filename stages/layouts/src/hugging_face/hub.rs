//! Datasets of the hub: which files a reference means, by the list of files and README.md.
//!
//! The rules are those of the library `datasets`: the configurations in the YAML header of README.md; without them the names of
//! folders and files. Parquet files are read. A dataset without any is read from the branch `refs/convert/parquet`, into which the hub
//! converts public datasets.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use flow_corpus::files::{Format, expand_braces};
use flow_corpus::looks::version_of;
use flow_corpus::tree;
use flow_corpus::{Fetch, Layout, Manifest, ManifestError, ReadSettings};
use flow_hub::{DatasetFiles, DatasetReference, Hub, HubReference};
use flow_kind::glob::path_fits;
use flow_kind::read_regular_file;
use flow_storage::{Location, Storage};
use serde_yaml::Value;

use super::hub_errors::{of_hub, stopped};
use super::hub_tree::{may_be_layout, place_in_tree, settings_in_tree};
use super::listing::{Listed, config_and_split, missing_numbers};
use super::parquet_files::open_parquet_files;
use crate::splits::chosen;

/// The branch of converted files.
const CONVERTED: &str = "refs/convert/parquet";
/// The longest README.md whose header is read, in bytes.
const LONGEST_README: u64 = 8 << 20;
/// The longest pattern of README.md, in bytes.
const LONGEST_PATTERN: usize = 1_000;
/// Patterns times files that are compared.
const MOST_COMPARISONS: usize = 20_000_000;
/// Configurations that an error lists.
const MOST_SHOWN: usize = 20;
/// Of a configuration without a name.
const DEFAULT: &str = "default";

/// A configuration that README.md declares.
#[derive(Debug, PartialEq)]
struct Config {
    name: String,
    is_default: bool,
    /// The folder that its patterns are relative to; empty: the repository.
    folder: String,
    /// Splits, each with a pattern of paths; none: all files of the folder, with splits by their names.
    patterns: Option<Vec<(String, String)>>,
}

/// A file of a configuration.
#[derive(Clone, Debug, PartialEq)]
struct Found {
    path: String,
    split: String,
}

/// Opens a manifest, with a folder for temporary files. Lines about progress are passed on; false cancels it.
type Open = fn(&Storage, &ReadSettings, &Path, &mut dyn FnMut(&str) -> bool) -> Result<Manifest, ManifestError>;

/// How other layouts than Parquet are opened.
pub struct Others {
    pub open: Open,
    /// Whether one is at a place.
    pub is_recognised: fn(&Storage, &Path) -> Result<bool, ManifestError>,
}

/// Opens a dataset of the hub. Its files are downloaded into the hub's cache if they are not there, or read where they are
/// (`fetch`). `progress` receives lines about that, and cancels it by false.
///
/// # Errors
/// Where the hub does not deliver it, it has no Parquet files, or configuration or split are not there or not clear.
pub fn open_dataset(
    storage: &Storage,
    reference: &DatasetReference,
    settings: &ReadSettings,
    scratch: &Path,
    others: &Others,
    progress: &mut dyn FnMut(&str) -> bool,
) -> Result<Manifest, ManifestError> {
    let hub = Hub::from_environment().map_err(|error| of_hub(reference, error))?;
    open_from(storage, &hub, reference, settings, (scratch, others), progress)
}

fn open_from(
    storage: &Storage,
    hub: &Hub,
    reference: &DatasetReference,
    settings: &ReadSettings,
    (scratch, others): (&Path, &Others),
    progress: &mut dyn FnMut(&str) -> bool,
) -> Result<Manifest, ManifestError> {
    let name = reference.to_string();
    let root = Path::new(&name);
    refuse_settings(root, reference, settings)?;
    let listed = listed(hub, reference, &reference.repository, progress)?;
    let has_data = listed.files.iter().any(|file| is_data(file));
    let is_parquet = matches!(settings.layout, Layout::Auto | Layout::HuggingFaceParquet)
        && matches!(settings.format, Format::Auto | Format::Parquet);
    let names_file = reference
        .config
        .as_ref()
        .is_some_and(|name| listed.files.contains(name));
    if !is_parquet || names_file {
        let place = place_in_tree(storage, hub, reference, &listed, progress)?;
        let place = place.ok_or_else(|| {
            let config = reference.config.as_deref().unwrap_or_default();
            ManifestError::manifest(root, format!("it has no file or folder `{config}`"))
        })?;
        let settings = settings_in_tree(reference, &place, &listed, settings, progress);
        return (others.open)(storage, &settings, scratch, progress);
    }
    if !has_data && settings.layout == Layout::Auto && !hub.offline && may_be_layout(&listed.files) {
        // Without its own list of files, converted ones may be in the cache.
        let place = place_in_tree(storage, hub, reference, &listed, progress).unwrap_or_else(|error| {
            progress(&error.to_string());
            None
        });
        if let Some(place) = place
            && (others.is_recognised)(storage, &place)?
        {
            let settings = settings_in_tree(reference, &place, &listed, settings, progress);
            return (others.open)(storage, &settings, scratch, progress);
        }
    }
    let (taken, configs) = if has_data || reference.repository.revision != "main" {
        let configs = configs(storage, hub, reference, &listed, progress)?;
        (listed, configs)
    } else {
        let converted = HubReference {
            revision: CONVERTED.into(),
            ..reference.repository.clone()
        };
        let found = endings(&listed.files);
        let converted = self::listed(hub, reference, &converted, progress).map_err(|error| {
            let why = format!("it has no Parquet files ({found}), nor converted ones: {error}");
            ManifestError::manifest(root, why)
        })?;
        (converted, Vec::new())
    };
    let (config, files) = files_of(&taken.files, &configs, reference.config.as_deref(), root)?;
    if files.is_empty() {
        return Err(ManifestError::manifest(
            root,
            format!("it has no Parquet files ({})", endings(&taken.files)),
        ));
    }
    let wanted = reference.split.as_deref().unwrap_or(&settings.split);
    let splits: Vec<&str> = files.iter().map(|file| file.split.as_str()).collect();
    let (places, of_splits) = chosen(&splits, wanted, root)?;
    let files: Vec<Found> = places.into_iter().map(|place| files[place].clone()).collect();
    let names: Vec<&str> = files.iter().map(|file| file.path.as_str()).collect();
    check_numbers(&names, root)?;
    let paths = match settings.fetch {
        Fetch::Files => fetched(hub, reference, &taken, &names, progress)?,
        Fetch::Ranges => remote(hub, reference, &taken, &names)?,
    };
    let mut told = format!(" at commit {}", taken.commit.get(..12).unwrap_or(&taken.commit));
    if !config.is_empty() {
        told.push_str(&format!(", configuration {config}"));
    }
    if let Some(of_splits) = of_splits {
        told.push_str(&format!("; {of_splits}"));
    }
    if names
        .iter()
        .any(|name| name.split('/').any(|part| part.starts_with("partial-")))
    {
        told.push_str("; it is only the beginning of the split (partial)");
    }
    let files = paths.into_iter().zip(files).map(|(path, file)| (path, file.split));
    open_parquet_files(storage, root, files.collect(), told, settings)
}

/// The configurations that the README.md of a dataset declares; none where it has none.
fn configs(
    storage: &Storage,
    hub: &Hub,
    reference: &DatasetReference,
    dataset: &DatasetFiles,
    progress: &mut dyn FnMut(&str) -> bool,
) -> Result<Vec<Config>, ManifestError> {
    if !dataset.files.iter().any(|file| file == "README.md") {
        return Ok(Vec::new());
    }
    let readme = fetched(hub, reference, dataset, &["README.md"], progress)?;
    let root = reference.to_string();
    let declared = readme.first().map(|path| declared(storage, path, Path::new(&root)));
    Ok(declared.transpose()?.unwrap_or_default())
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
    let mut configs = declared(storage, &readme, root)?;
    let names: Vec<(&str, bool)> = configs
        .iter()
        .map(|config| (config.name.as_str(), config.is_default))
        .collect();
    let Ok(place) = one_of(&names, None, root) else {
        return Ok(None);
    };
    let mut config = configs.swap_remove(place);
    let below = |file: &Listed| Some(file.path.strip_prefix(root).ok()?.to_str()?.to_owned());
    let files: Vec<String> = all.iter().filter_map(below).collect();
    if let Some(patterns) = &mut config.patterns {
        let has_files = |patterns: Vec<(String, String)>| {
            let one = Config {
                name: config.name.clone(),
                is_default: true,
                folder: config.folder.clone(),
                patterns: Some(patterns),
            };
            files_of(&files, &[one], None, root).is_ok()
        };
        let there: BTreeSet<String> = patterns
            .iter()
            .filter(|pattern| has_files(vec![(*pattern).clone()]))
            .map(|(split, _)| split.clone())
            .collect();
        patterns.retain(|(split, _)| there.contains(split));
        if patterns.is_empty() {
            return Ok(None);
        }
    }
    let (told, found) = files_of(&files, &[config], None, root)?;
    let listed = found.into_iter().map(|file| Listed {
        path: root.join(file.path),
        config: String::new(),
        split: file.split,
    });
    Ok(Some((listed.collect(), told)))
}

/// Refuses settings that contradict a dataset of the hub.
fn refuse_settings(root: &Path, reference: &DatasetReference, settings: &ReadSettings) -> Result<(), ManifestError> {
    let why = if !settings.tars.is_empty() {
        "`tars` belongs to manifests of JSON lines"
    } else if reference.split.is_some() && !settings.split.is_empty() {
        "both the reference and the setting `split` name a split"
    } else {
        return Ok(());
    };
    Err(ManifestError::manifest(root, why))
}

fn listed(
    hub: &Hub,
    reference: &DatasetReference,
    repository: &HubReference,
    progress: &mut dyn FnMut(&str) -> bool,
) -> Result<DatasetFiles, ManifestError> {
    let listed = hub.dataset(repository, progress);
    let listed = listed.map_err(|error| of_hub(reference, error))?;
    listed.ok_or_else(|| stopped(reference))
}

fn fetched(
    hub: &Hub,
    reference: &DatasetReference,
    dataset: &DatasetFiles,
    files: &[&str],
    progress: &mut dyn FnMut(&str) -> bool,
) -> Result<Vec<PathBuf>, ManifestError> {
    let paths = hub.fetch_files(dataset, files, progress);
    let paths = paths.map_err(|error| of_hub(reference, error))?;
    paths.ok_or_else(|| stopped(reference))
}

/// The URLs of files, which stay where they are.
fn remote(
    hub: &Hub,
    reference: &DatasetReference,
    dataset: &DatasetFiles,
    files: &[&str],
) -> Result<Vec<PathBuf>, ManifestError> {
    let addresses = hub.addresses(dataset, files);
    let addresses = addresses.map_err(|error| of_hub(reference, error))?;
    let url = |address: String| match Location::parse(&address) {
        Ok(location) => Ok(location.to_path()),
        Err(error) => Err(ManifestError::manifest(
            Path::new(&reference.to_string()),
            error.to_string(),
        )),
    };
    addresses.into_iter().map(url).collect()
}

/// What a repository has in place of Parquet files, for a message.
fn endings(files: &[String]) -> String {
    let mut endings: Vec<&str> = files
        .iter()
        .filter_map(|file| Path::new(file).extension()?.to_str())
        .collect();
    endings.sort_unstable();
    endings.dedup();
    endings.truncate(8);
    match endings.is_empty() {
        true => "it is empty".into(),
        false => format!("its files end in {}", endings.join(", ")),
    }
}

/// The configurations in the header of a README.md; none without a header, or where it declares none.
fn declared(storage: &Storage, readme: &Path, root: &Path) -> Result<Vec<Config>, ManifestError> {
    let failed = |error| ManifestError::io(readme, error);
    if version_of(storage, readme).map_err(failed)?.size > LONGEST_README {
        return Err(ManifestError::manifest(
            root,
            format!("its README.md has more than {LONGEST_README} bytes"),
        ));
    }
    let bytes = read_regular_file(storage, readme).map_err(failed)?;
    let text = String::from_utf8_lossy(&bytes);
    let Some(header) = header(&text) else {
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

/// Checks that of files with numbers, `train-00000-of-00047.parquet`, all are there.
fn check_numbers(paths: &[&str], root: &Path) -> Result<(), ManifestError> {
    match missing_numbers(paths.iter().map(Path::new)) {
        Some(why) => Err(ManifestError::manifest(root, why)),
        None => Ok(()),
    }
}

/// Whether a path may be one of the data: no part begins with a dot or two underscores.
fn is_data(path: &str) -> bool {
    path.ends_with(".parquet")
        && !path
            .split('/')
            .any(|part| part.starts_with('.') || part.starts_with("__"))
}

/// The configuration that is read, for the log, and its Parquet files. Files are empty where the repository has none.
///
/// # Errors
/// Where the configuration is not there, there are several and none is named, or it declares files that are not there.
fn files_of(
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
    let names: Vec<(&str, bool)> = configs
        .iter()
        .map(|config| (config.name.as_str(), config.is_default))
        .collect();
    let config = &configs[one_of(&names, wanted, root)?];
    let told = told_of(&config.name, names.len());
    if data.is_empty() {
        return Ok((told, Vec::new()));
    }
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
    let mut count = 0usize;
    for (split, pattern) in config.patterns.iter().flatten() {
        let wrong = |why: &str| {
            ManifestError::manifest(root, format!("configuration `{}` in its README.md: {why}", config.name))
        };
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
            // A file that is declared and not read would be rows that are lost.
            if found.len() == before {
                return Err(wrong(&format!("the pattern `{pattern}` matches no Parquet file")));
            }
        }
    }
    found.sort_by(|a, b| (&a.path, &a.split).cmp(&(&b.path, &b.split)));
    found.dedup();
    if found.is_empty() {
        let why = format!("configuration `{}` in its README.md has no Parquet files", config.name);
        return Err(ManifestError::manifest(root, why));
    }
    Ok((told, found))
}

/// A configuration for the log, which says whether there are others; empty where there is nothing to say.
fn told_of(config: &str, count: usize) -> String {
    match (config, count) {
        ("", 0 | 1) => String::new(),
        (config, 0 | 1) => format!("`{config}`"),
        (config, count) => format!("`{}` of {count}", shown(config)),
    }
}

/// Configuration and split by the names of folders and of the file.
fn placed(path: &str) -> (String, String) {
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
        ManifestError::manifest(
            root,
            format!(
                "{what}; write hf://datasets/OWNER/NAME/CONFIG with one of {}{rest}",
                all.join(", ")
            ),
        )
    })
}

#[cfg(test)]
#[path = "hub_tree_tests.rs"]
mod tree_tests;

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
    }

    /// A cache as the hub's programs leave it, with the test's data set under two revisions: `main` without Parquet files, and the
    /// converted files.
    fn offline_hub(folder: &Path, files: &[&str]) -> Hub {
        const COMMITS: [&str; 2] = [
            "0123456789abcdef0123456789abcdef01234567",
            "abcdef0123456789abcdef0123456789abcdef01",
        ];
        let repository = folder.join("datasets--o--n");
        let write = |path: PathBuf, bytes: &[u8]| {
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        };
        let listed = [names(&["README.md", "n.py"]), names(files)];
        for ((revision, commit), listed) in ["main", CONVERTED].into_iter().zip(COMMITS).zip(listed) {
            write(repository.join("refs").join(revision), commit.as_bytes());
            let listing = serde_json::to_vec(&listed).unwrap();
            write(repository.join(".flow").join(format!("{commit}.json")), &listing);
        }
        let snapshot = |commit: &str| repository.join("snapshots").join(commit);
        write(snapshot(COMMITS[0]).join("README.md"), b"# N\n");
        let data =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/layouts/hub/data/train-00000-of-00001.parquet");
        write(
            snapshot(COMMITS[1]).join("hi/train/0000.parquet"),
            &std::fs::read(data).unwrap(),
        );
        Hub {
            endpoint: "http://127.0.0.1:9".into(),
            cache: folder.to_path_buf(),
            token: None,
            offline: true,
            timeout: std::time::Duration::from_secs(1),
        }
    }

    #[test]
    fn converted_files_are_read_where_a_dataset_has_no_parquet() {
        let folder = tempfile::tempdir().unwrap();
        let hub = offline_hub(
            folder.path(),
            &["hi/train/0000.parquet", "hi/test/0000.parquet", "bn/train/0000.parquet"],
        );
        let open = |text: &str, settings: &ReadSettings| {
            let reference = DatasetReference::parse(text).unwrap().unwrap();
            let others = Others {
                open: |_, _, _, _| unreachable!(),
                is_recognised: |_, _| unreachable!(),
            };
            let opened = open_from(
                &Storage::default(),
                &hub,
                &reference,
                settings,
                (folder.path(), &others),
                &mut |_| true,
            );
            opened.map_err(|error| error.to_string())
        };
        let plain = ReadSettings::default();
        let manifest = open("hf://datasets/o/n/hi", &plain).unwrap();
        let decision = manifest.decision().unwrap();
        for part in ["commit abcdef012345", "configuration `hi` of 2", "reading `train`"] {
            assert!(decision.contains(part), "{decision}");
        }
        assert_eq!(manifest.names().len(), 1);
        // A file that is listed and not in the cache is never left out.
        let error = open("hf://datasets/o/n/hi:all", &plain).err().unwrap();
        assert!(
            error.contains("hi/test/0000.parquet") && error.contains("HF_HUB_OFFLINE"),
            "{error}"
        );
        let error = open("hf://datasets/o/n", &plain).err().unwrap();
        assert!(error.contains("bn, hi"), "{error}");
        let many: Vec<String> = (0..30).map(|n| format!("c{n:02}/train/0000.parquet")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let error = read(&many, "a: 1", None).unwrap_err();
        assert!(
            error.contains("c18, c19 and 10 more") && !error.contains("c20"),
            "{error}"
        );
        let error = open("hf://datasets/o/n/hi:dev", &plain).err().unwrap();
        assert!(
            error.contains("no split \"dev\"") && error.contains("test, train"),
            "{error}"
        );
        let twice = ReadSettings {
            split: "test".into(),
            ..plain
        };
        assert!(open("hf://datasets/o/n/hi:train", &twice).is_err());
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
        let numbers = |paths: &[&str]| check_numbers(paths, Path::new("d")).map_err(|error| error.to_string());
        numbers(&[
            "data-part-of-10000.parquet",
            "a/train-00000-of-00002.parquet",
            "a/train-00001-of-00002-3859b9935622e1d8.parquet",
            "x.parquet",
        ])
        .unwrap();
        let error = numbers(&["a/train-00000-of-00003.parquet", "b/train-00001-of-00003.parquet"]).unwrap_err();
        assert!(error.contains("1 of 3 files `a/train-NNNNN-of-00003`"), "{error}");
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
