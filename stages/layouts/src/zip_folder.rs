//! An AudioFolder in a `.zip`: its table and its recordings, which are read where they are in the archive.

use std::collections::{BTreeSet, HashMap};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use flate2::read::DeflateDecoder;
use flow_audio::embedded::path_of_bytes;
use flow_corpus::files::{Format, format_of_name, label};
use flow_corpus::lines::LineManifest;
use flow_corpus::listing::is_audio_name;
use flow_corpus::looks::{Chain, check_version, version_of};
use flow_corpus::manifest_row::{ManifestRow, Refusal, Wanted, refuse};
use flow_corpus::names::unsafe_name;
use flow_corpus::text_tables::TextTables;
use flow_corpus::tree;
use flow_corpus::unpacking::unpacking;
use flow_corpus::{Corpus, LaidOut, Manifest, ManifestError, Part, ReadSettings, Take, file_stem};
use flow_kind::{Partition, StageError, open_input_file};
use flow_storage::{FileVersion, InputFile, Storage};

use super::folder_entries::entries_of;
use super::splits::{chosen, is_of_split, refuse_other, spoken_of};
use super::zip::{Member, Method, members};

/// Tables that are read, in this order. The last one is read of folders alone.
const TABLES: [&str; 4] = ["metadata.csv", "metadata.tsv", "metadata.jsonl", "metadata.parquet"];
/// Tables that a message names.
const SHOWN: usize = 5;
/// Most bytes of a table.
const LARGEST_TABLE: u64 = 4 << 30;

/// The members of an archive by name.
type Members = HashMap<String, Member>;

/// An archive whose table was unpacked.
struct Archive {
    path: PathBuf,
    look: FileVersion,
    members: Members,
    /// What is before the names of the table: the folder that it is in.
    folder: String,
    unpacked: Unpacked,
    rows: Box<dyn Corpus>,
    /// Which of several tables are read, for the log.
    told: Option<String>,
}

/// A table that was unpacked into a folder of its own, which goes with it.
struct Unpacked {
    above: PathBuf,
    folder: PathBuf,
}

impl Drop for Unpacked {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.above);
    }
}

struct Archives {
    archives: Vec<Archive>,
    told: String,
}

/// The archives of a folder that has no other files, or the one that is named.
fn archives(storage: &Storage, root: &Path) -> Vec<PathBuf> {
    let is_zip = |path: &Path| {
        path.extension()
            .is_some_and(|extension| extension.eq_ignore_ascii_case("zip"))
    };
    if !tree::is_folder(storage, root) {
        return Some(root.to_path_buf())
            .filter(|root| is_zip(root))
            .into_iter()
            .collect();
    }
    let entries = entries_of(storage, root);
    let files = entries.names.difference(&entries.folders).map(|name| root.join(name));
    files.filter(|path| is_zip(path)).collect()
}

fn members_of(storage: &Storage, path: &Path) -> Result<(InputFile, Members), ManifestError> {
    let failed = |error| ManifestError::io(path, error);
    let file = open_input_file(storage, path).map_err(failed)?.in_blocks();
    let found = members(&file).map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => ManifestError::manifest(path, error.to_string()),
        _ => failed(error),
    })?;
    let named = found
        .into_iter()
        .map(|member| (member.name.trim_start_matches("./").to_owned(), member));
    Ok((file, named.collect()))
}

/// The tables in an archive, by the order in which they count, the outermost first.
fn tables(members: &Members) -> Vec<&str> {
    let rank = |name: &str| {
        let base = name.rsplit('/').next().unwrap_or(name);
        let place = TABLES.iter().position(|table| *table == base)?;
        (!name.starts_with("__MACOSX/")).then(|| (name.matches('/').count(), place))
    };
    let mut found: Vec<(_, &str)> = members
        .keys()
        .filter_map(|name| Some((rank(name)?, name.as_str())))
        .collect();
    found.sort_unstable();
    found.into_iter().map(|(_, name)| name).collect()
}

/// What is before the name of a table: its folder with a slash, or nothing.
fn folder_of(name: &str) -> &str {
    &name[..name.rfind('/').map_or(0, |slash| slash + 1)]
}

/// The tables that are read: where each is in a folder that is called by a split, those of the split that is read, unless the archive is
/// of one split by its own name.
fn chosen_tables(
    path: &Path,
    all: &[&str],
    settings: &ReadSettings,
) -> Result<(Vec<String>, Option<String>), ManifestError> {
    let stem = file_stem(path);
    let folders = all.iter().map(|name| folder_of(name));
    let splits: Vec<&str> = folders
        .filter_map(|folder| folder.split('/').find(|part| is_of_split(part)))
        .collect();
    if is_of_split(spoken_of(&stem)) || splits.len() < all.len() {
        refuse_other(spoken_of(&stem), &settings.split, path)?;
        return Ok((all.iter().map(|name| (*name).to_owned()).collect(), None));
    }
    let (places, told) = chosen(&splits, &settings.split, path)?;
    Ok((places.into_iter().map(|place| all[place].to_owned()).collect(), told))
}

pub fn detect(storage: &Storage, root: &Path) -> Option<String> {
    let first = archives(storage, root).into_iter().next()?;
    // One that is damaged is told of where it is opened.
    match members_of(storage, &first) {
        Ok((_, members)) => tables(&members)
            .first()
            .map(|table| format!("{table} in {}", shown(&first))),
        Err(ManifestError::Io { source, .. }) => tree::or_note(&first, Err(source)),
        Err(_) => None,
    }
}

fn shown(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

pub fn open(
    storage: &Storage,
    root: &Path,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let all = archives(storage, root);
    let (paths, told) = match tree::is_folder(storage, root) && all.len() > 1 {
        true => {
            let stems: Vec<String> = all.iter().map(|path| spoken_of(&file_stem(path)).to_owned()).collect();
            let (places, told) = chosen(&stems, &settings.split, root)?;
            let paths: Vec<PathBuf> = places.into_iter().map(|place| all[place].clone()).collect();
            (paths, told)
        }
        false => {
            // Its tables may be of splits.
            (all, None)
        }
    };
    let told = told.map_or_else(String::new, |told| format!("; {told}"));
    open_archives(storage, root, &paths, told, settings, scratch)
}

/// Archives, each with its table; `told` is for the log.
///
/// # Errors
/// When one cannot be read in place.
pub fn open_archives(
    storage: &Storage,
    root: &Path,
    paths: &[PathBuf],
    told: String,
    settings: &ReadSettings,
    scratch: &Path,
) -> Result<Manifest, ManifestError> {
    let archives = paths.iter().map(|path| Archive::open(storage, path, settings, scratch));
    let archives = archives.collect::<Result<Vec<Archive>, ManifestError>>()?;
    let of_rows = archives
        .iter()
        .flat_map(|archive| archive.told.clone().into_iter().chain([archive.rows.told()]))
        .find(|told| !told.is_empty());
    let of_rows = of_rows.map_or_else(String::new, |told| format!("; {told}"));
    let of_archives = match paths {
        [one] => shown(one),
        several => format!("{} archives (.zip)", several.len()),
    };
    let told = format!("AudioFolder in {of_archives}{told}{of_rows}");
    LaidOut::of(Archives { archives, told }, root, settings)
}

impl Archive {
    /// Of several tables those are read whose folders are called by a split that is read, or all.
    fn open(storage: &Storage, path: &Path, settings: &ReadSettings, scratch: &Path) -> Result<Archive, ManifestError> {
        let wrong = |why: String| ManifestError::manifest(path, why);
        let unpack = || unpacking(path).unwrap_or_default();
        let look = version_of(storage, path).map_err(|error| ManifestError::io(path, error))?;
        let (file, members) = members_of(storage, path)?;
        let all = tables(&members);
        if all.is_empty() {
            let why = format!("there is no metadata.csv or metadata.jsonl in it; {}", unpack());
            return Err(wrong(why));
        }
        let (names, told) = chosen_tables(path, &all, settings)?;
        let formats: BTreeSet<&str> = names.iter().filter_map(|name| name.rsplit('.').next()).collect();
        let is_above = |one: &str, other: &str| one != other && other.starts_with(folder_of(one));
        let is_nested = names.iter().any(|one| names.iter().any(|other| is_above(one, other)));
        if formats.len() > 1 || is_nested {
            let what = if is_nested {
                "one above another"
            } else {
                "of several formats"
            };
            let shown: Vec<&str> = names.iter().take(SHOWN).map(String::as_str).collect();
            let more = if names.len() > SHOWN { ", ..." } else { "" };
            let why = format!(
                "there are several tables in it, {what} ({}{more}); {}, and name a folder",
                shown.join(", "),
                unpack()
            );
            return Err(wrong(why));
        }
        if let Some(name) = names
            .iter()
            .find(|name| name.ends_with(".parquet") || unsafe_name(name))
        {
            return Err(wrong(format!(
                "{name} is not read in an archive; {}, and name the folder",
                unpack()
            )));
        }
        let recordings = || members.values().filter(|member| is_audio_name(&member.name));
        let packed = recordings().filter(|member| member.method != Method::Stored).count();
        if packed > 0 {
            let why = format!(
                "{packed} of {} recordings in it are compressed or encrypted, so they have no place in it; {}, and name the folder",
                recordings().count(),
                unpack()
            );
            return Err(wrong(why));
        }
        let unpacked = Unpacked::of(scratch, path).map_err(|error| ManifestError::io(scratch, error))?;
        // Of one table its folder is that of the archive.
        let folder = match names.as_slice() {
            [one] => folder_of(one).to_owned(),
            _ => String::new(),
        };
        let mut written = Vec::new();
        for name in &names {
            let table = unpacked_member(&file, &members[name]).map_err(|error| wrong(format!("{name}: {error}")))?;
            let to = unpacked.folder.join(&name[folder.len()..]);
            let write = |to: &Path| {
                std::fs::create_dir_all(to.parent().unwrap_or(&unpacked.folder))?;
                std::fs::write(to, &table)
            };
            write(&to).map_err(|error| ManifestError::io(&to, error))?;
            written.push(to);
        }
        let shown = names.join(", ");
        let root = Some(unpacked.folder.as_path()).filter(|_| names.len() == 1);
        let rows: Result<Box<dyn Corpus>, ManifestError> = match format_of_name(&written[0]) {
            Some(Format::Nemo) => {
                LineManifest::open(storage, written, Vec::new(), settings).map(|rows| Box::new(rows) as _)
            }
            _ => TextTables::open(storage, written, root, settings).map(|rows| Box::new(rows) as _),
        };
        let rows = rows.map_err(|error| match error {
            ManifestError::Manifest { why, .. } => wrong(format!("{shown}: {why}")),
            other => other,
        })?;
        Ok(Archive {
            path: path.to_path_buf(),
            look,
            folder,
            members,
            unpacked,
            rows,
            told,
        })
    }

    /// The row with the place of its recording in the archive.
    fn placed(&self, file: &InputFile, mut row: ManifestRow) -> Result<ManifestRow, Refusal> {
        // The table was opened in the folder that it was unpacked into.
        let below = row
            .wanted
            .files
            .iter()
            .find_map(|file| file.strip_prefix(&self.unpacked.folder).ok());
        let name = below.and_then(Path::to_str).filter(|name| !unsafe_name(name));
        let Some(name) = name else {
            return Err(refuse(
                "unsafe_name",
                "the recording is not named below the folder of the table",
            ));
        };
        let member = format!("{}{name}", self.folder);
        let Some(found) = self.members.get(&member) else {
            let why = format!("missing: {member:?} in {}", self.path.display());
            return Err(refuse("missing_audio", why));
        };
        if found.method != Method::Stored {
            let why = format!(
                "{member:?} is compressed; {}",
                unpacking(&self.path).unwrap_or_default()
            );
            return Err(refuse("unsupported_source", why));
        }
        let path = self
            .path
            .to_str()
            .ok_or_else(|| refuse("unsafe_name", "the path is not UTF-8"))?;
        let offset = found
            .data(file)
            .map_err(|error| refuse("decode_error", format!("{member:?}: {error}")))?;
        row.wanted = Wanted::file(path_of_bytes(path, offset, found.size));
        Ok(row)
    }
}

impl Unpacked {
    /// A folder with the name of the archive, which rows without a folder are called by.
    fn of(scratch: &Path, archive: &Path) -> io::Result<Unpacked> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        std::fs::create_dir_all(scratch)?;
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let above = scratch.join(format!("zip-{}-{number}", std::process::id()));
            match std::fs::create_dir(&above) {
                Ok(()) => {
                    let folder = above.join(file_stem(archive));
                    let unpacked = Unpacked { above, folder };
                    std::fs::create_dir(&unpacked.folder)?;
                    return Ok(unpacked);
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// The bytes of a member, whose sum is checked.
fn unpacked_member(file: &InputFile, member: &Member) -> io::Result<Vec<u8>> {
    let invalid = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
    if member.size > LARGEST_TABLE || member.packed_size > LARGEST_TABLE {
        return Err(invalid("it is too large"));
    }
    let mut packed = vec![0; usize::try_from(member.packed_size).unwrap_or(0)];
    file.read_exact_at(&mut packed, member.data(file)?)?;
    let bytes = match member.method {
        Method::Stored => packed,
        Method::Deflated => {
            let mut bytes = Vec::new();
            DeflateDecoder::new(&packed[..])
                .take(member.size.saturating_add(1))
                .read_to_end(&mut bytes)?;
            bytes
        }
        Method::Other => return Err(invalid("it is encrypted, or compressed by another method than deflate")),
    };
    let mut sum = flate2::Crc::new();
    sum.update(&bytes);
    match bytes.len() as u64 == member.size && sum.sum() == member.sum {
        true => Ok(bytes),
        false => Err(invalid("it is damaged: its checksum is another")),
    }
}

impl Archives {
    fn places(&self) -> impl Iterator<Item = (usize, Part)> {
        let archives = self.archives.iter().enumerate();
        archives.flat_map(|(number, archive)| archive.rows.parts().into_iter().map(move |part| (number, part)))
    }
}

impl Corpus for Archives {
    fn told(&self) -> String {
        self.told.clone()
    }

    /// Archives are not read for their digests: their looks serve instead.
    fn has_files(&self, _: &Part) -> bool {
        false
    }

    fn parts(&self) -> Vec<Part> {
        let part = |(number, (archive, part)): (usize, (usize, Part))| {
            let Archive { path, look, .. } = &self.archives[archive];
            let mut chain = Chain::default();
            chain.add(&Some((0, *look)));
            Part {
                name: Partition::from(format!("{}/{}", label(archive, path), part.name)),
                number,
                files: Vec::new(),
                looks: chain.to_hex() + &part.looks,
            }
        };
        self.places().enumerate().map(part).collect()
    }

    fn each(&self, storage: &Storage, part: &Part, take: &mut Take<'_>) -> Result<(), StageError> {
        let Some((number, inner)) = self.places().nth(part.number) else {
            return Ok(());
        };
        let archive = &self.archives[number];
        check_version(storage, archive.look, &archive.path)?;
        let failed = |error| ManifestError::io(&archive.path, error);
        let file = open_input_file(storage, &archive.path).map_err(failed)?.in_blocks();
        archive.rows.each(storage, &inner, &mut |_, row, values| {
            take(None, row.and_then(|row| archive.placed(&file, row)), values)
        })
    }
}
