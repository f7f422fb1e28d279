//! Tables as text with a heading: CSV and TSV files, also those of a folder of recordings and of Common Voice.

use std::collections::{BTreeMap, HashSet};
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use flow_kind::{Partition, StageError, open_input_file};
use flow_storage::{FileVersion, Storage};

use crate::ManifestError;
use crate::column_names::{FILE_COLUMNS, ID_COLUMNS, LANGUAGE_COLUMNS, TEXT_COLUMNS, names_like, renamed};
use crate::decoded_text::{DecodedText, no_text};
use crate::extra::{self, EXTRA};
use crate::files::label;
use crate::folder_languages::FolderLanguages;
use crate::looks::{check_version, version_of};
use crate::manifest_row::{ManifestRow, Refusal, Wanted, line_values, refuse};
use crate::naming::{language, named, names_all};
use crate::places::Places;
use crate::table_text::{Layout, Record, line_ends};
use crate::times::{DURATION, ENDS, STARTS, Times, Unit, UnitSample, unread, unread_among};
use crate::tree;
use crate::unpacking::misnamed_or;
use crate::{Corpus, Part, Take};
use crate::{ReadSettings, file_stem};

/// Rows that make a partition.
const BLOCK: usize = 1_000;
/// Largest table, in bytes.
const LARGEST_TABLE: u64 = 4 << 30;
/// Most letters of a heading that an error shows.
const SHOWN: usize = 1_000;

/// Tables, cut into blocks.
pub struct TextTables {
    tables: Vec<Table>,
    blocks: Vec<(Partition, Block)>,
    lang: String,
    /// Of recordings whose rows name no language.
    folders: FolderLanguages,
    source: String,
}

struct Block {
    table: usize,
    /// Of the table's text, in bytes.
    range: Range<usize>,
    /// Number of the line that it begins with, from 1, which is the heading's.
    first_line: u64,
}

struct Table {
    path: PathBuf,
    /// How the file looked before it was read.
    look: FileVersion,
    text: DecodedText,
    layout: Layout,
    /// What a person should know of its quotes, and which of several tables it is.
    told: Option<String>,
    columns: Columns,
    /// Of the times.
    unit: Unit,
    places: Places,
    /// The folder `clips` beside it, which holds the recordings of Common Voice.
    clips: Option<PathBuf>,
    /// The shard id of recordings without a folder.
    stem: String,
}

/// The positions of fields in a record.
struct Columns {
    count: usize,
    file: usize,
    text: usize,
    lang: Option<usize>,
    lang_name: &'static str,
    /// Those that say where a row is in its recording, by their names.
    times: Vec<(&'static str, usize)>,
    id: Option<usize>,
    shard: Option<usize>,
    source: Option<usize>,
    /// Further columns by name.
    further: BTreeMap<String, usize>,
    /// Numbers may have a comma, as where semicolons are between fields.
    decimal_comma: bool,
}

impl TextTables {
    /// `folder` is the folder of recordings whose only table this is; none where tables are named themselves.
    ///
    /// # Errors
    /// When a table cannot be read or lacks a column, or there is no row.
    pub fn open(
        storage: &Storage,
        paths: Vec<PathBuf>,
        folder: Option<&Path>,
        settings: &ReadSettings,
    ) -> Result<Self, ManifestError> {
        let mut tables = TextTables {
            tables: Vec::new(),
            blocks: Vec::new(),
            lang: settings.lang.clone(),
            folders: FolderLanguages::default(),
            source: settings.source.clone(),
        };
        for (number, path) in paths.into_iter().enumerate() {
            let name = match folder {
                Some(_) => file_stem(&path),
                None => label(number, &path),
            };
            let (mut table, blocks) = Table::open(storage, path, folder, settings, &mut tables.folders)?;
            if let Some(split) = folder.and_then(|root| table.path.parent()?.strip_prefix(root).ok())
                && !split.as_os_str().is_empty()
            {
                let read = format!("of the folders of splits `{}` is read", split.display());
                table.told = Some(table.told.map_or(read.clone(), |told| format!("{read}; {told}")));
            }
            let (mut counted, mut line) = (0, 1);
            tables.blocks.extend(blocks.into_iter().enumerate().map(|(at, range)| {
                let name = Partition::from(format!("{name}/{at:06}"));
                line += line_ends(&table.text.text[counted..range.start]);
                counted = range.start;
                let block = Block {
                    table: number,
                    range,
                    first_line: line,
                };
                (name, block)
            }));
            tables.tables.push(table);
        }
        match tables.tables.first() {
            Some(first) if tables.blocks.is_empty() => Err(first.wrong("there are no rows in it".into())),
            _ => Ok(tables),
        }
    }
}

impl Corpus for TextTables {
    /// What was decided about the names of folders, where they count.
    fn told(&self) -> String {
        let unit = self.tables.iter().find_map(|table| table.unit.decision());
        let quotes = self.tables.iter().find_map(|table| table.told.clone());
        let all: Vec<String> = self.folders.decision().into_iter().chain(unit).chain(quotes).collect();
        all.join("; ")
    }

    fn parts(&self) -> Vec<Part> {
        let part = |(number, (name, block)): (usize, &(Partition, Block))| {
            let table = &self.tables[block.table];
            Part {
                name: name.clone(),
                number,
                files: vec![table.path.clone()],
                looks: [self.folders.in_key(), table.unit.in_key()].concat(),
            }
        };
        self.blocks.iter().enumerate().map(part).collect()
    }

    fn each(&self, storage: &Storage, part: &Part, take: &mut Take<'_>) -> Result<(), StageError> {
        let (_, block) = &self.blocks[part.number];
        let table = &self.tables[block.table];
        check_version(storage, table.look, &table.path)?;
        let records = table.text.records(block.range.clone(), table.layout);
        for (line, record) in records.with_lines(block.first_line) {
            take(Some(line), table.row(&record, self), &|| line_values(record.line))?;
        }
        Ok(())
    }
}

impl Table {
    /// Gives the table, and its rows in blocks: where in its text they are.
    fn open(
        storage: &Storage,
        path: PathBuf,
        folder: Option<&Path>,
        settings: &ReadSettings,
        folders: &mut FolderLanguages,
    ) -> Result<(Table, Vec<Range<usize>>), ManifestError> {
        let look = version_of(storage, &path).map_err(|e| ManifestError::io(&path, e))?;
        let text = read_text(storage, &path)?;
        if text.text.trim_end().contains('\r') && !text.text.contains('\n') {
            return Err(ManifestError::manifest(
                path,
                "its lines end with carriage returns alone; save it with line feeds",
            ));
        }
        let (layout, of_quotes) = settings.quoting.layout(&text.text, separator(&path, &text.text));
        let mut walk = text.records(0..text.text.len(), layout);
        let heading = walk.next().map(|record| record.fields).unwrap_or_default();
        let told = of_quotes.into_iter().chain(several_of_one_name(&heading));
        let told = told.reduce(|first, second| format!("{first}; {second}"));
        let heading = new_heading(&heading, &settings.columns);
        let mut columns = heading
            .and_then(|(heading, kept)| Columns::of(&heading, &kept))
            .map_err(|why| ManifestError::manifest(&path, why))?;
        columns.decimal_comma = layout.separator == ';';
        let beside = path.parent().unwrap_or(Path::new(""));
        let clips = Some(beside.join("clips")).filter(|clips| tree::is_folder(storage, clips));
        let places = settings.places(beside);
        let mut sample = UnitSample::default();
        let sampled = settings.check_audio && columns.has_start_and_end();
        let (mut blocks, mut start, mut rows) = (Vec::new(), walk.at(), 0);
        loop {
            let record = walk.next();
            let is_row = |record: &&Record<'_>| record.broken.is_none() && record.fields.len() == columns.count;
            if let (false, Some(record)) = (names_all(&settings.lang), record.as_ref().filter(is_row))
                && columns
                    .lang
                    .and_then(|place| record.fields.get(place))
                    .is_none_or(|lang| lang.is_empty())
                && let Some(file) = record.fields.get(columns.file)
            {
                folders.add(file);
            }
            if let (true, Some(record)) = (sampled, record.as_ref().filter(is_row))
                && sample.is_due()
                && let (Ok(times), Some(file)) = (columns.times(record), record.fields.get(columns.file))
            {
                times.add_to(&mut sample, wanted(&places, clips.as_deref(), file).files);
            }
            let more = record.is_some();
            rows += usize::from(more);
            if rows == BLOCK || (!more && rows > 0) {
                blocks.push(start..walk.at());
                (start, rows) = (walk.at(), 0);
            }
            if !more {
                break;
            }
        }
        let table = Table {
            look,
            layout,
            told,
            columns,
            unit: sample.unit(storage),
            places,
            clips,
            stem: file_stem(folder.unwrap_or(&path)),
            text,
            path,
        };
        Ok((table, blocks))
    }

    fn wrong(&self, why: String) -> ManifestError {
        ManifestError::manifest(&self.path, why)
    }

    fn row(&self, record: &Record<'_>, tables: &TextTables) -> Result<ManifestRow, Refusal> {
        let columns = &self.columns;
        if let Some((reason, why)) = record.broken {
            return Err(refuse(reason, why));
        }
        if record.fields.len() != columns.count {
            let (found, wanted) = (record.fields.len(), columns.count);
            return Err(refuse(
                "bad_line",
                format!("{found} fields under a heading of {wanted}"),
            ));
        }
        let field = |place: Option<usize>| {
            let field = place.and_then(|place| record.fields.get(place)).map(AsRef::as_ref);
            field.filter(|field: &&str| !field.is_empty())
        };
        let file = field(Some(columns.file)).ok_or_else(|| refuse("missing_field", "the recording's file"))?;
        let (start, duration) = columns.times(record)?.place(self.unit)?;
        let text = field(Some(columns.text)).unwrap_or_default();
        let names = named(file, start);
        let shard = field(columns.shard).map(str::to_string).or(names.shard_id);
        Ok(ManifestRow {
            segment_id: field(columns.id).map_or(names.segment_id, str::to_string),
            shard_id: shard.unwrap_or_else(|| self.stem.clone()),
            text: text.to_string(),
            duration,
            lang: language(
                field(columns.lang).map(str::trim),
                &tables.lang,
                tables.folders.language(file),
                text,
            ),
            lang_field: field(columns.lang).map_or("", |_| columns.lang_name),
            source: field(columns.source).unwrap_or(&tables.source).to_string(),
            start,
            wanted: wanted(&self.places, self.clips.as_deref(), file),
            extra: self.further(record),
            ..ManifestRow::default()
        })
    }

    /// The fields of further columns as a JSON object of texts, without empty ones.
    fn further(&self, record: &Record<'_>) -> Option<String> {
        let member = |(name, place): (&String, &usize)| {
            let field = record.fields.get(*place).filter(|field| !field.is_empty())?;
            Some((name.clone(), serde_json::Value::from(field.as_ref()).to_string()))
        };
        let written: BTreeMap<String, String> = self.columns.further.iter().filter_map(member).collect();
        let members = written
            .iter()
            .map(|(name, value)| (name.clone(), value.as_str()))
            .collect::<BTreeMap<String, &str>>();
        (!members.is_empty()).then(|| extra::object(&members))
    }
}

/// Where a recording may be that a table names.
fn wanted(places: &Places, clips: Option<&Path>, file: &str) -> Wanted {
    let mut wanted = places.of_path(file);
    if let Some(clips) = clips
        && Path::new(file).is_relative()
        && !Path::new(file).starts_with("clips")
    {
        let clip = tree::join(clips, file);
        // The oldest tables of Common Voice have no endings.
        if clip.extension().is_none() {
            let mut named = clip.clone().into_os_string();
            named.push(".mp3");
            wanted.files.push(named.into());
        }
        wanted.files.insert(0, clip);
    }
    wanted
}

/// A heading with the names that the setting `columns` gives, and the places of columns that it puts into `extra`. Other columns
/// of a field that it names do not count.
pub fn new_heading<T: AsRef<str>>(heading: &[T], columns: &[String]) -> Result<(Vec<String>, Vec<usize>), String> {
    let pairs = renamed(columns)?;
    let mut names: Vec<String> = heading.iter().map(|name| name.as_ref().trim().to_string()).collect();
    let mut places = Vec::new();
    for (theirs, ours) in &pairs {
        let place = names.iter().position(|name| name.eq_ignore_ascii_case(theirs));
        let place = place.ok_or_else(|| {
            let shown: String = names.join(", ").chars().take(SHOWN).collect();
            format!("it has no column {theirs:?}, which `columns` names; its columns are: {shown}")
        })?;
        places.push((place, *ours));
    }
    let (kept, places): (Vec<_>, Vec<_>) = places.into_iter().partition(|(_, ours)| *ours == EXTRA);
    for (place, name) in names.iter_mut().enumerate() {
        let is_field = |ours: &str| {
            names_like(ours).is_some_and(|names| names.iter().any(|other| other.eq_ignore_ascii_case(name)))
        };
        match places.iter().find(|(renamed, _)| *renamed == place) {
            Some((_, ours)) => *name = ours.to_string(),
            None if places.iter().any(|(_, ours)| is_field(ours)) => name.clear(),
            None => {}
        }
    }
    Ok((names, kept.into_iter().map(|(place, _)| place).collect()))
}

/// What is told of a heading with several columns of one name, of which the first one is read.
fn several_of_one_name<T: AsRef<str>>(heading: &[T]) -> Option<String> {
    let mut seen = HashSet::new();
    let mut names = heading.iter().map(|name| name.as_ref().trim());
    let again = names.find(|name| !name.is_empty() && !seen.insert(name.to_ascii_lowercase()));
    again.map(|name| format!("several columns are called `{name}`; the first is read"))
}

impl Columns {
    /// Columns at the places `kept` are further ones, whatever they are called. The error says which columns there are.
    fn of<T: AsRef<str>>(heading: &[T], kept: &[usize]) -> Result<Columns, String> {
        let names: Vec<&str> = heading.iter().map(|name| name.as_ref().trim()).collect();
        let find = |wanted: &[&str]| {
            let is = |wanted: &&str| {
                let mut named = names.iter().enumerate();
                let found = named.find(|(place, name)| name.eq_ignore_ascii_case(wanted) && !kept.contains(place));
                found.map(|(place, _)| place)
            };
            wanted.iter().find_map(is)
        };
        let needed = |wanted: &[&str], what: &str| {
            find(wanted).ok_or_else(|| {
                let shown: String = names.join(", ").chars().take(SHOWN).collect();
                let is_quoted = |name: &&str| name.len() > 1 && name.starts_with('"') && name.ends_with('"');
                let quotes = match names.iter().any(is_quoted) {
                    true => "; `quoting: csv` reads names and fields in quotes",
                    false => "",
                };
                format!(
                    "its first line names no column for {what} (one of {}; `columns` maps other names); its \
                     columns are: {shown}{quotes}",
                    wanted.join(", ")
                )
            })
        };
        let mut columns = Columns {
            count: names.len(),
            file: needed(&FILE_COLUMNS, "the recording's file")?,
            text: needed(&TEXT_COLUMNS, "the text")?,
            lang: find(&LANGUAGE_COLUMNS),
            lang_name: LANGUAGE_COLUMNS
                .into_iter()
                .find(|name| find(&[*name]).is_some())
                .unwrap_or_default(),
            times: STARTS
                .iter()
                .chain(&ENDS)
                .chain(&[DURATION])
                .filter_map(|name| Some((*name, find(&[*name])?)))
                .collect(),
            id: find(&ID_COLUMNS),
            shard: find(&["shard_id"]),
            source: find(&["source"]),
            further: BTreeMap::new(),
            decimal_comma: false,
        };
        let used = [Some(columns.file), Some(columns.text)].into_iter().chain([
            columns.lang,
            columns.id,
            columns.shard,
            columns.source,
        ]);
        let times = columns.times.iter().map(|(_, place)| *place);
        let used: Vec<usize> = used.flatten().chain(times).collect();
        let others = names.iter().enumerate();
        let others = others.filter(|(place, _)| !used.contains(place) && !kept.contains(place));
        let first = |of: &[&str]| columns.times.iter().find(|(name, _)| of.contains(name));
        let is_placed = first(&STARTS).is_some() && (first(&ENDS).is_some() || first(&[DURATION]).is_some());
        if let (false, Some(name)) = (is_placed, unread_among(others.map(|(_, name)| *name))) {
            return Err(format!(
                "its column {}; `columns` gives it such a name ([{name}=start]), or keeps it beside the rows ([{name}=extra])",
                unread(name)
            ));
        }
        for (place, name) in names.iter().enumerate() {
            if !used.contains(&place) && !name.is_empty() && !extra::has_column(name) {
                // The first of several columns of one name counts, as above.
                columns.further.entry(name.to_string()).or_insert(place);
            }
        }
        let first = |of: &[&str]| columns.times.iter().find(|(name, _)| of.contains(name));
        if let (Some((end, _)), None) = (first(&ENDS), first(&STARTS)) {
            return Err(format!(
                "its column `{end}` says where rows end, but none where they begin (one of {}; `columns` names one that is \
                 called otherwise)",
                STARTS.join(", ")
            ));
        }
        Ok(columns)
    }

    /// Whether there are a column `start` and a column `end`, or others of their names.
    fn has_start_and_end(&self) -> bool {
        let has = |of: &[&str]| self.times.iter().any(|(name, _)| of.contains(name));
        has(&STARTS[1..]) && has(&ENDS)
    }

    fn number(&self, text: &str) -> Option<f64> {
        match text.split_once(',') {
            Some((whole, part)) if self.decimal_comma => format!("{whole}.{part}").parse().ok(),
            _ => text.parse().ok(),
        }
    }

    /// What a row says of its place; of empty fields nothing.
    fn times(&self, record: &Record<'_>) -> Result<Times, Refusal> {
        Times::of(|name| {
            let place = self.times.iter().find(|(other, _)| *other == name);
            let field = place.and_then(|(_, place)| record.fields.get(*place));
            match field.filter(|text| !text.is_empty()) {
                None => Ok(None),
                Some(text) => match self.number(text.trim()) {
                    Some(seconds) => Ok(Some(seconds)),
                    None => Err(refuse("bad_type", format!("{name} {text:?} is not a number"))),
                },
            }
        })
    }
}

/// What separates the fields of a table: tabs, but in CSV commas, or where its heading has none, what spreadsheets of other
/// countries and other programs write.
fn separator(path: &Path, text: &str) -> char {
    let is_csv = path
        .extension()
        .is_some_and(|extension| extension.eq_ignore_ascii_case("csv"));
    let heading = text.trim_start().lines().next().unwrap_or_default();
    match is_csv {
        true => [',', ';', '\t', '|']
            .into_iter()
            .find(|found| heading.contains(*found))
            .unwrap_or(','),
        false => '\t',
    }
}

/// Bytes that are not UTF-8 are replaced, and the line is rejected.
fn read_text(storage: &Storage, path: &Path) -> Result<DecodedText, ManifestError> {
    let mut bytes = Vec::new();
    let read = open_input_file(storage, path).and_then(|file| file.take(LARGEST_TABLE + 1).read_to_end(&mut bytes));
    read.map_err(|e| ManifestError::io(path, e))?;
    if bytes.len() as u64 > LARGEST_TABLE {
        return Err(ManifestError::manifest(
            path,
            "it has more than 4 GiB; write it as JSON lines instead",
        ));
    }
    if let Some(why) = no_text(&bytes) {
        return Err(misnamed_or(storage, path, ManifestError::manifest(path, why)));
    }
    Ok(DecodedText::of(bytes))
}
