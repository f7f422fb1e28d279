//! Datasets of the hub: which files a reference means, by the list of files and README.md.
//!
//! The rules are those of the library `datasets`: the configurations in the YAML header of README.md; without them the names of
//! folders and files. Parquet files are read. A dataset without any is read from the branch `refs/convert/parquet`, into which the hub
//! converts public datasets.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use flow_corpus::files::Format;
use flow_corpus::{Fetch, Layout, Manifest, ManifestError, ReadSettings};
use flow_hub::{DatasetFiles, DatasetReference, Hub, HubReference};
use flow_storage::{Location, Storage};

use super::hub_errors::{of_hub, stopped};
use super::hub_tree::{may_be_layout, place_in_tree, settings_in_tree};
use super::listing::missing_numbers;
use super::parquet_files::open_parquet_files;
use super::readme::{Config, Found, MOST_SHOWN, declared, files_of, is_data, one_of_configs};
use super::selected::{Kind, Selected, select};
use crate::splits::chosen;

/// The branch of converted files.
const CONVERTED: &str = "refs/convert/parquet";

/// Opens a manifest, with a folder for temporary files. Lines about progress are passed on; false cancels it.
type Open = fn(&Storage, &ReadSettings, &Path, &mut dyn FnMut(&str) -> bool) -> Result<Manifest, ManifestError>;

/// Opens what a README.md declares, of the data set at a place.
type OpenSelected = fn(&Storage, &Path, &Selected, &ReadSettings, &Path) -> Result<Manifest, ManifestError>;

/// How other layouts than Parquet are opened.
pub struct Others {
    pub open: Open,
    pub open_selected: OpenSelected,
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
    let is_below = |folder: &str| listed.files.iter().any(|file| Path::new(file).starts_with(folder));
    if settings.layout == Layout::Auto && !hub.offline {
        let configs = configs(storage, hub, reference, &listed, progress)?;
        let wanted = reference.config.as_deref();
        let split = reference.split.as_deref().unwrap_or(&settings.split);
        let selected = select(&listed.files, &configs, (wanted, split), true, root)?;
        if let Some(selected) = selected.filter(|selected| selected.kind != Kind::Parquet) {
            let whole = DatasetReference {
                config: None,
                ..reference.clone()
            };
            let place = place_in_tree(storage, hub, &whole, &listed, progress)?;
            let place = place.ok_or_else(|| ManifestError::manifest(root, "it has no files"))?;
            let settings = settings_in_tree(reference, &place, &listed, settings, progress);
            return (others.open_selected)(storage, &place, &selected, &settings, scratch);
        }
        if !configs.is_empty() && wanted.is_some_and(|wanted| !is_below(wanted)) {
            one_of_configs(&configs, wanted, root)?;
        }
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
            let mut why = format!("it has no Parquet files ({found}), nor converted ones: {error}");
            if let Some(config) = reference.config.as_ref().filter(|config| !is_below(config)) {
                let folders = folders(&listed.files);
                why = format!("it has no folder `{config}`; its folders are {folders}; and {why}");
            }
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

/// The first folders of a repository, for a message.
fn folders(files: &[String]) -> String {
    let folders: BTreeSet<&str> = files.iter().filter_map(|file| Some(file.split_once('/')?.0)).collect();
    let shown: Vec<&str> = folders.iter().take(MOST_SHOWN).copied().collect();
    match folders.len() - shown.len() {
        0 if shown.is_empty() => "none".into(),
        0 => shown.join(", "),
        rest => format!("{} and {rest} more", shown.join(", ")),
    }
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

/// Checks that of files with numbers, `train-00000-of-00047.parquet`, all are there.
fn check_numbers(paths: &[&str], root: &Path) -> Result<(), ManifestError> {
    match missing_numbers(paths.iter().map(Path::new)) {
        Some(why) => Err(ManifestError::manifest(root, why)),
        None => Ok(()),
    }
}

#[cfg(test)]
#[path = "hub_tree_tests.rs"]
mod tree_tests;

#[cfg(test)]
mod tests {
    use super::*;

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
        let listed = [
            ["README.md", "n.py"].map(str::to_owned).to_vec(),
            files.iter().map(|file| (*file).to_owned()).collect(),
        ];
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
                open_selected: |_, _, _, _, _| unreachable!(),
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
    fn files_with_numbers_are_all_there() {
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
}
