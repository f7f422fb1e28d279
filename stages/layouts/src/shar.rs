//! Lhotse Shar: numbered shards of cuts, and tars with their recordings in the same order.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use flow_audio::tar;
use flow_corpus::manifest_row::{ManifestRow, Refusal, Wanted, refuse};
use flow_corpus::tree;
use flow_corpus::unpacking::misnamed_or;
use flow_corpus::{Corpus, LaidOut, Manifest, ManifestError, Part, ReadSettings, Take, take_line};
use flow_kind::{Partition, StageError, Storage};

use super::folder_entries::entries_of;
use super::lhotse::CutLine;
use super::line_file::{Block, LineFile};
use super::splits::{chosen, is_of_split, refuse_other};
use super::utterance::Common;

/// The number of a shard of a field, as it is written: `000000` of `cuts.000000.jsonl.gz`, empty of `cuts.jsonl.gz`.
fn number_of<'n>(name: &'n str, field: &str, endings: &[&str]) -> Option<&'n str> {
    let rest = name.strip_prefix(field)?;
    let number = endings.iter().find_map(|ending| rest.strip_suffix(ending))?;
    let digits = number.strip_prefix('.').unwrap_or(number);
    let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
    (is_number && (number.is_empty() || !digits.is_empty())).then_some(number)
}

fn number_of_cuts(name: &str) -> Option<&str> {
    number_of(name, "cuts", &[".jsonl.gz", ".jsonl"])
}

/// Whether a file of this name is a numbered shard of cuts.
pub fn is_shard(name: &str) -> bool {
    number_of_cuts(name).is_some_and(|number| !number.is_empty())
}

/// Folders of splits with shards that are looked for in a folder: the names of those that have some.
fn splits(storage: &Storage, root: &Path) -> Vec<String> {
    let entries = entries_of(storage, root);
    let called = entries.folders.iter().filter(|name| is_of_split(name));
    called
        .filter(|name| first_tar(storage, &root.join(name)).is_some())
        .cloned()
        .collect()
}

/// The first tar of recordings beside its cuts.
fn first_tar(storage: &Storage, folder: &Path) -> Option<PathBuf> {
    let mut tars = shards(storage, folder).into_iter().map(|(_, tar, _)| tar);
    tars.find(|tar| tree::is_file(storage, tar))
}

/// Shards of cuts, each with the tar of its recordings.
fn shards(storage: &Storage, folder: &Path) -> Vec<(PathBuf, PathBuf, String)> {
    let entries = entries_of(storage, folder);
    let names = &entries.names;
    let shard = |name: &String| {
        let number = number_of_cuts(name)?;
        let tar = format!("recording{number}.tar");
        Some((
            folder.join(name),
            folder.join(tar),
            number.trim_start_matches('.').to_string(),
        ))
    };
    names.iter().filter_map(shard).collect()
}

pub fn detect(storage: &Storage, root: &Path) -> Option<String> {
    let tar = first_tar(storage, root).or_else(|| {
        let split = splits(storage, root).into_iter().next()?;
        first_tar(storage, &root.join(split))
    })?;
    Some(format!(
        "{} beside cuts",
        tar.strip_prefix(root).unwrap_or(&tar).display()
    ))
}

struct Shard {
    cuts: LineFile,
    blocks: Vec<Block>,
    tar: PathBuf,
    /// Of a folder of splits it begins with the split.
    number: String,
}

struct Shar {
    shards: Vec<Shard>,
    /// Which splits are read.
    of_splits: Option<String>,
    common: Common,
}

pub fn open(
    storage: &Storage,
    root: &Path,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let open = |(cuts, tar, number): (PathBuf, PathBuf, String)| {
        if !tree::is_file(storage, &tar) {
            return Err(ManifestError::manifest(
                &tar,
                "it does not exist, but its cuts are: each shard of cuts needs one of recordings",
            ));
        }
        let cuts = LineFile::open(storage, &cuts, scratch)?;
        Ok(Shard {
            blocks: cuts.blocks(|_, _| {})?,
            cuts,
            tar,
            number,
        })
    };
    let mut found = shards(storage, root);
    let splits = if found.is_empty() {
        splits(storage, root)
    } else {
        Vec::new()
    };
    let mut of_splits = None;
    if splits.is_empty() {
        let own = root
            .file_name()
            .and_then(|name| name.to_str())
            .filter(|name| is_of_split(name));
        refuse_other(own.unwrap_or_default(), &settings.split, root)?;
    } else {
        let (places, told) = chosen(&splits, &settings.split, root)?;
        for split in places.into_iter().map(|place| &splits[place]) {
            let of_split = shards(storage, &root.join(split)).into_iter();
            found.extend(of_split.map(|(cuts, tar, number)| (cuts, tar, format!("{split}/{number}"))));
        }
        of_splits = told;
    }
    let shar = Shar {
        shards: found.into_iter().map(open).collect::<Result<_, _>>()?,
        of_splits,
        common: Common::of(settings),
    };
    LaidOut::of(shar, root, settings)
}

/// Names of the members with data by the cut that they are of; what is no data has none.
fn members(storage: &Storage, path: &Path) -> Result<HashMap<String, String>, ManifestError> {
    let failed = |error| ManifestError::io(path, error);
    let listing = tree::list_tar(storage, path).map_err(failed)?;
    if let (tar::End::Cut(why), true) = (&listing.end, listing.members.is_empty()) {
        return Err(misnamed_or(storage, path, ManifestError::manifest(path, why.clone())));
    }
    let mut found = HashMap::new();
    for member in &listing.members {
        // A cut's id may have dots and folders.
        if let Some((id, ending)) = member.name.rsplit_once('.')
            && !["json", "nometa"].contains(&ending)
        {
            found.insert(id.to_string(), member.name.clone());
        }
    }
    Ok(found)
}

impl Shar {
    fn places(&self) -> impl Iterator<Item = (&Shard, usize)> {
        self.shards
            .iter()
            .flat_map(|shard| (0..shard.blocks.len()).map(move |block| (shard, block)))
    }

    fn row(&self, line: &str, shard: &Shard, members: &HashMap<String, String>) -> Result<ManifestRow, Refusal> {
        let cut = CutLine::of(line)?;
        let member = members.get(cut.id()).filter(|member| !member.ends_with(".nodata"));
        let member = member.ok_or_else(|| {
            refuse(
                "missing_audio",
                format!("{} has no recording of the cut {:?}", shard.tar.display(), cut.id()),
            )
        })?;
        let tar = shard
            .tar
            .to_str()
            .ok_or_else(|| refuse("unsafe_name", "the path is not UTF-8"))?;
        let wanted = Wanted {
            files: Vec::new(),
            member: Some((shard.tar.clone(), member.clone())),
        };
        let name = if shard.number.is_empty() { "shar" } else { &shard.number };
        cut.row(
            name.to_string(),
            wanted,
            Some((tar.to_string(), member.clone())),
            &self.common,
        )
    }
}

impl Corpus for Shar {
    fn told(&self) -> String {
        let of_splits = self.of_splits.as_ref().map(|told| format!("; {told}"));
        format!(
            "Lhotse Shar of {} shards{}",
            self.shards.len(),
            of_splits.unwrap_or_default()
        )
    }

    fn parts(&self) -> Vec<Part> {
        let part = |(number, (shard, block)): (usize, (&Shard, usize))| Part {
            name: Partition::from(format!("cuts.{}/{block:06}", shard.number)),
            number,
            files: vec![shard.cuts.path.clone()],
            looks: String::new(),
        };
        self.places().enumerate().map(part).collect()
    }

    fn each(&self, storage: &Storage, part: &Part, take: &mut Take<'_>) -> Result<(), StageError> {
        let Some((shard, block)) = self.places().nth(part.number) else {
            return Ok(());
        };
        shard.cuts.still(storage)?;
        let members = members(storage, &shard.tar)?;
        shard.cuts.lines(shard.blocks[block], &mut |line| {
            take_line(take, line.number, line.text, |text| self.row(text, shard, &members))
        })
    }
}
