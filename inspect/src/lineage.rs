//! The path of a segment, stage by stage.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use flow_base::escape::escape_line;
use flow_corpus::{ManifestLine, ReadSettings};
use flow_kind::{Partition, Reject};
use flow_plan::Plan;
use flow_spec::{nearest, yaml};
use flow_storage::Storage;
use flow_store::{Record, StageSnapshot};

use crate::past_run::PastRun;
use crate::progress::stage_of;
use crate::{ID_COLUMN, InspectError};

/// The path of the segment that the user names, stage by stage; at least one step.
///
/// # Errors
/// If no stage has it, with the nearest that one has; or where files of the run cannot be read.
pub fn steps(storage: &Storage, run: &PastRun, text: &str) -> Result<Vec<Step>, InspectError> {
    first_found(run, &searches(storage, text, &settings_of_readers(run)?)?, text)
}

/// The settings of the stages of the run that read manifests.
fn settings_of_readers(run: &PastRun) -> Result<Vec<ReadSettings>, InspectError> {
    let mut found = Vec::new();
    for with in run.settings_of("manifest.read")? {
        // Those of another version may be others.
        if let Ok(settings) = yaml::typed::<ReadSettings>(&with)
            && !settings.manifest.is_empty()
        {
            found.push(settings);
        }
    }
    Ok(found)
}

/// The path of the segment with this id, stage by stage; at least one step. The id comes from data and is not
/// interpreted as anything else.
///
/// # Errors
/// As of [`steps`].
pub fn steps_of_segment(run: &PastRun, id: &str) -> Result<Vec<Step>, InspectError> {
    let search = Search {
        partition: None,
        wanted: Wanted::Segment(id.to_string()),
    };
    first_found(run, &[search], id)
}

/// The result of the first search that finds anything.
fn first_found(run: &PastRun, searches: &[Search], text: &str) -> Result<Vec<Step>, InspectError> {
    let plan = run.plan()?;
    let stages = stages_of(run, &plan)?;
    let mut found = Vec::new();
    for search in searches {
        for (stage, records) in &stages {
            for record in records {
                if search
                    .partition
                    .as_ref()
                    .is_none_or(|partition| *partition == record.partition)
                {
                    found.extend(of_record(run, stage, record, search)?);
                }
            }
        }
        if !found.is_empty() {
            break;
        }
    }
    if found.is_empty() {
        return Err(not_found(run, &stages, searches, text)?);
    }
    Ok(found)
}

type StageRecords = (StageSnapshot, Vec<Arc<Record>>);

/// The snapshots of the stages that the run used, without the keys and decisions of global stages, which are internal.
fn stages_of(run: &PastRun, plan: &Plan) -> Result<Vec<StageRecords>, InspectError> {
    let snapshots = run.snapshots()?;
    let mut stages = Vec::new();
    for stage in &plan.stages {
        if stage.stage.ends_with(":keys") || stage.stage.ends_with(":decide") || !stage.used {
            continue;
        }
        if let Some(snapshot) = snapshots.of(&stage.stage) {
            stages.push((snapshot.clone(), run.records_of(snapshot)?));
        }
    }
    Ok(stages)
}

/// The error for a segment that no stage has, with the nearest that one has.
fn not_found(
    run: &PastRun,
    stages: &[StageRecords],
    searches: &[Search],
    text: &str,
) -> Result<InspectError, InspectError> {
    let ids = segment_ids(run, stages)?;
    let mut wanted = searches.iter().map(|search| search.wanted.last_name());
    let near = wanted.find_map(|wanted| nearest(&wanted, ids.iter().map(String::as_str)));
    let knows_partition = |partition: &Partition| {
        let mut records = stages.iter().flat_map(|(_, records)| records);
        records.any(|record| record.partition == *partition)
    };
    let partition = searches.iter().find_map(|search| search.partition.as_ref());
    let help = match near {
        Some(near) => format!("did you mean `{near}`?"),
        None if partition.is_none_or(knows_partition) => {
            "its id may be spelled differently, or no stored stage has it: a segment that only streamed stages saw leaves no trace"
                .into()
        }
        None => FORMS.into(),
    };
    Ok(InspectError::not_found(
        format!("run {} knows no segment `{text}`", run.id),
        help,
    ))
}

/// Ids of segments that stages have, up to as many as can be compared at once.
fn segment_ids(run: &PastRun, stages: &[StageRecords]) -> Result<BTreeSet<String>, InspectError> {
    const MOST: usize = 200_000;
    let mut ids = BTreeSet::new();
    for (stage, records) in stages {
        for record in records {
            for port in record.ports.keys() {
                if ids.len() >= MOST {
                    return Ok(ids);
                }
                let mut note = |row: &[Option<&str>]| {
                    ids.extend(row.iter().flatten().map(|id| (*id).to_string()));
                    false
                };
                let rows = run
                    .store
                    .find_rows(&stage.recipe, record, port, &[ID_COLUMN], &mut note);
                rows.map_err(InspectError::unreadable)?;
            }
        }
    }
    Ok(ids)
}

const FORMS: &str = "name it as SEGMENT, LANG/SHARD/SEGMENT, by the path of its recording, as TAR::MEMBER, or as the line of a \
                     manifest, FILE:LINE";

/// What is searched for, and in which partition.
#[derive(Debug, PartialEq)]
struct Search {
    /// None: in all partitions.
    partition: Option<Partition>,
    wanted: Wanted,
}

#[derive(Debug, PartialEq)]
enum Wanted {
    Segment(String),
    /// The path of a recording, or the end of one.
    Recording(String),
    Member {
        tar: String,
        member: String,
    },
    Line(ManifestLine),
}

/// By what a row is found: its columns of these names, where it has them.
#[derive(Clone, Copy, Debug, Default)]
struct RowNames<'r> {
    segment_id: Option<&'r str>,
    audio_path: Option<&'r str>,
    tar_path: Option<&'r str>,
    tar_member_name: Option<&'r str>,
}

impl<'r> RowNames<'r> {
    const COLUMNS: [&'static str; 4] = [ID_COLUMN, "audio_path", "tar_path", "tar_member_name"];

    /// Of the texts in [`RowNames::COLUMNS`].
    fn of(texts: &[Option<&'r str>]) -> Self {
        let text = |at: usize| texts.get(at).copied().flatten();
        RowNames {
            segment_id: text(0),
            audio_path: text(1),
            tar_path: text(2),
            tar_member_name: text(3),
        }
    }
}

/// The ways to take what the user gave, the likeliest first. A segment's id may have slashes itself.
fn searches(storage: &Storage, text: &str, readers: &[ReadSettings]) -> Result<Vec<Search>, InspectError> {
    let nothing = || InspectError::not_found(format!("`{text}` names no segment"), FORMS);
    if text.is_empty() {
        return Err(nothing());
    }
    let everywhere = |wanted| Search {
        partition: None,
        wanted,
    };
    if let Some((file, number)) = text.rsplit_once(':')
        && let Ok(number) = number.parse::<u64>()
        && Path::new(file).is_file()
    {
        // As the run read it; or else as a stage without further settings would.
        let plain = ReadSettings {
            manifest: file.to_string(),
            ..ReadSettings::default()
        };
        // Other files of a stage may be gone by now.
        let mut failed = None;
        for settings in readers.iter().chain([&plain]) {
            match flow_layouts::line_of(storage, settings, Path::new(file), number) {
                Ok(Some(line)) => return Ok(vec![everywhere(Wanted::Line(line))]),
                Ok(None) => {}
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        return Err(match failed {
            Some(error) => InspectError::not_found(format!("`{text}` names no segment: {error}"), FORMS),
            None => nothing(),
        });
    }
    let mut searches = Vec::new();
    if let Some((tar, member)) = text.split_once("::")
        && !tar.is_empty()
        && !member.is_empty()
    {
        searches.push(everywhere(Wanted::Member {
            tar: tar.into(),
            member: member.into(),
        }));
    }
    let parts: Vec<&str> = text.splitn(3, '/').collect();
    let is_path = text.starts_with('/') || text.starts_with("./") || text.starts_with("../");
    if !is_path && text.split('/').any(str::is_empty) {
        return Err(nothing());
    }
    if let ([lang, shard, segment], false) = (parts.as_slice(), is_path) {
        searches.push(Search {
            partition: Some(Partition::new(format!("{lang}/{shard}"))),
            wanted: Wanted::Segment((*segment).to_string()),
        });
    }
    searches.push(everywhere(Wanted::Segment(text.into())));
    searches.push(everywhere(Wanted::Recording(text.trim_start_matches("./").into())));
    Ok(searches)
}

impl Wanted {
    fn is(&self, row: &RowNames<'_>) -> bool {
        match self {
            Wanted::Segment(segment) => row.segment_id == Some(segment.as_str()),
            Wanted::Recording(path) => {
                let names = [row.audio_path, row.tar_member_name];
                names.into_iter().flatten().any(|name| is_same_path(name, path))
            }
            Wanted::Member { tar, member } => {
                row.tar_path.or(row.audio_path).is_some_and(|of| is_same_path(of, tar))
                    && row.tar_member_name.is_some_and(|of| is_same_path(of, member))
            }
            // Lines of JSON may have one id for recordings of several folders.
            Wanted::Line(line) => {
                row.segment_id.is_some()
                    && row.segment_id == line.segment_id.as_deref()
                    && match (row.audio_path, row.tar_path) {
                        (Some(path), None | Some("")) if !path.is_empty() && !line.recordings.is_empty() => {
                            line.recordings.iter().any(|recording| is_same_path(path, recording))
                        }
                        _ => true,
                    }
            }
        }
    }

    /// Whether a reject is of the wanted segment, by its values.
    fn is_reject(&self, reject: &Reject) -> bool {
        let Ok(values) = serde_json::from_str::<serde_json::Value>(&reject.values) else {
            return self.is(&RowNames {
                segment_id: reject.id.as_deref(),
                ..RowNames::default()
            });
        };
        let value = |name: &str| values.get(name).and_then(serde_json::Value::as_str);
        let names = RowNames {
            segment_id: reject.id.as_deref(),
            audio_path: value("audio_path"),
            tar_path: value("tar_path"),
            tar_member_name: value("tar_member_name"),
        };
        match (self, value("line")) {
            (Wanted::Line(wanted), Some(_)) => wanted.values == reject.values,
            (Wanted::Recording(path), Some(line)) => self.is(&names) || names_file(line, path),
            _ => self.is(&names),
        }
    }

    /// The part of the argument that is nearest to a segment's id.
    fn last_name(&self) -> String {
        let stem = |path: &str| {
            let stem = Path::new(path).file_stem().unwrap_or_default();
            stem.to_string_lossy().into_owned()
        };
        match self {
            Wanted::Segment(segment) => segment.clone(),
            Wanted::Recording(path) => stem(path),
            Wanted::Member { member, .. } => stem(member),
            Wanted::Line(line) => line.segment_id.clone().unwrap_or_default(),
        }
    }
}

/// Whether a line of a manifest that could not be read names a file: its path, or the end of it, as a value of its own.
fn names_file(line: &str, path: &str) -> bool {
    const ENDS: &[char] = &['"', '\'', ',', ';', '\t', '\r', '\n'];
    // A name without folder and ending is treated as an ordinary word.
    path.contains(['/', '.'])
        && line.match_indices(path).any(|(at, _)| {
            let before = line[..at].chars().next_back();
            let after = line[at + path.len()..].chars().next();
            before.is_none_or(|letter| letter == '/' || ENDS.contains(&letter))
                && after.is_none_or(|letter| ENDS.contains(&letter))
        })
}

/// Whether one path is the other, or ends with it.
fn is_same_path(one: &str, other: &str) -> bool {
    let (one, other) = (one.trim_start_matches("./"), other.trim_start_matches("./"));
    let ends_with = |long: &str, short: &str| {
        !short.is_empty()
            && long
                .strip_suffix(short)
                .is_some_and(|rest| rest.is_empty() || rest.ends_with('/'))
    };
    ends_with(one, other) || ends_with(other, one)
}

/// A segment at one stage.
pub struct Step {
    stage: String,
    partition: Partition,
    row: Option<u32>,
    /// The port it left by, or why it was refused.
    fate: String,
    pub values: Vec<(String, String)>,
}

impl Step {
    /// The step without its values, on one line.
    pub fn text(&self) -> String {
        let row = self.row.map_or(String::new(), |row| format!(", row {row}"));
        format!(
            "{}: {}{row}: {}",
            self.stage,
            escape_line(self.partition.as_str()),
            self.fate
        )
    }
}

/// The segment in a stage's record: rows on its stored ports, and rejects.
fn of_record(
    run: &PastRun,
    stage: &StageSnapshot,
    record: &Arc<Record>,
    search: &Search,
) -> Result<Vec<Step>, InspectError> {
    let name = stage_of(&stage.stage).to_string();
    let mut steps = Vec::new();
    let step = |row, fate, values| Step {
        stage: name.clone(),
        partition: record.partition.clone(),
        row,
        fate,
        values,
    };
    for port in record.ports.keys() {
        let mut is_wanted = |row: &[Option<&str>]| search.wanted.is(&RowNames::of(row));
        let rows = run
            .store
            .find_rows(&stage.recipe, record, port, &RowNames::COLUMNS, &mut is_wanted);
        for row in rows.map_err(InspectError::unreadable)? {
            steps.push(step(row.row, format!("goes on ({port})"), values_of(&row.values)));
        }
    }
    if record.rejects.rows > 0 {
        let set = run
            .store
            .reject_set(&[(name.clone(), stage.recipe, vec![Arc::clone(record)])]);
        for reject in set.iter() {
            let (_, _, reject) = reject.map_err(InspectError::unreadable)?;
            let whole = reject.row.is_none();
            if search.wanted.is_reject(&reject) || (whole && search.partition.is_some()) {
                let fate = refused(&reject);
                steps.push(step(reject.row, fate, values_of(&reject.values)));
            }
        }
    }
    Ok(steps)
}

fn refused(reject: &Reject) -> String {
    let what = if reject.row.is_none() {
        "its whole partition is refused"
    } else {
        "refused"
    };
    let detail = if reject.detail.is_empty() {
        String::new()
    } else {
        format!(": {}", escape_line(&reject.detail))
    };
    format!("{what}, {} ({}){detail}", reject.reason, reject.class.as_str())
}

/// The values of a row, given as a JSON object.
fn values_of(values: &str) -> Vec<(String, String)> {
    match serde_json::from_str(values) {
        Ok(serde_json::Value::Object(values)) => values
            .into_iter()
            .map(|(name, value)| (name, value.as_str().map_or_else(|| value.to_string(), str::to_string)))
            .collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_name_files_as_values_of_their_own() {
        for (line, path, is) in [
            (r#"{"audio_filepath": "rec/a.wav", "text": "de"}"#, "rec/a.wav", true),
            (r#"{"audio_filepath": "/data/rec/a.wav"}"#, "a.wav", true),
            (r#"{"audio_filepath": "rec/aa.wav"}"#, "a.wav", false),
            (r#"{"audio_filepath": "rec/a.wav.bak"}"#, "a.wav", false),
            ("id\ta.wav\ttext", "a.wav", true),
            // A mistyped id is not a file.
            (r#"{"audio_filepath": "de", "lang": "de"}"#, "de", false),
        ] {
            assert_eq!(names_file(line, path), is, "{path} in {line}");
        }
    }

    #[test]
    fn a_segment_is_named_in_many_ways() {
        let first = |text: &str| searches(&Storage::default(), text, &[]).unwrap().remove(0);
        let segment = |text: &str| Wanted::Segment(text.into());
        let with = first("hi/hi_0001/rec/7");
        assert_eq!(
            (with.partition, with.wanted),
            (Some(Partition::new("hi/hi_0001")), segment("rec/7"))
        );
        // The id of a recording in a folder of languages has slashes.
        for text in ["rec_7", "en/c"] {
            let without = first(text);
            assert_eq!((without.partition, without.wanted), (None, segment(text)));
        }
        let member = first("s/hi_1.tar::./a.flac").wanted;
        let row = RowNames {
            segment_id: Some("a"),
            tar_path: Some("/data/s/hi_1.tar"),
            tar_member_name: Some("a.flac"),
            ..RowNames::default()
        };
        assert!(member.is(&row), "{member:?}");
        assert!(!first("other.tar::a.flac").wanted.is(&row));
        let path = searches(&Storage::default(), "/data/hi/x.flac", &[])
            .unwrap()
            .pop()
            .unwrap()
            .wanted;
        for (recording, is) in [
            ("hi/x.flac", true),
            ("/data/hi/x.flac", true),
            ("/data/hi/xx.flac", false),
            ("", false),
        ] {
            let row = RowNames {
                audio_path: Some(recording),
                ..RowNames::default()
            };
            assert_eq!(path.is(&row), is, "{recording}");
        }
        for wrong in ["", "hi//x", "hi/hi_0001/"] {
            assert!(searches(&Storage::default(), wrong, &[]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_line_of_a_manifest_finds_its_row_and_its_reject() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.jsonl");
        let line = r#"{"audio_filepath": "a.wav", "duration": 1, "text": "x"}"#;
        std::fs::write(&path, format!("{line}\nbroken\n")).unwrap();
        let search = |number: u32| searches(&Storage::default(), &format!("{}:{number}", path.display()), &[]);
        let row = RowNames {
            segment_id: Some("a"),
            ..RowNames::default()
        };
        assert!(search(1).unwrap()[0].wanted.is(&row));
        for (recording, is) in [("/data/a.wav", true), ("/data/b.wav", false)] {
            let row = RowNames {
                audio_path: Some(recording),
                ..row
            };
            assert_eq!(search(1).unwrap()[0].wanted.is(&row), is, "{recording}");
        }
        let reject = Reject {
            row: Some(1),
            id: None,
            reason: "bad_json".into(),
            class: flow_kind::RejectClass::Fault,
            detail: String::new(),
            values: r#"{"line":"broken"}"#.into(),
        };
        assert!(search(2).unwrap()[0].wanted.is_reject(&reject));
        assert!(!search(1).unwrap()[0].wanted.is_reject(&reject));
        // Another line of the same id.
        let other = Reject {
            id: Some("a".into()),
            ..reject
        };
        assert!(!search(1).unwrap()[0].wanted.is_reject(&other));
        assert!(search(3).is_err());
    }
}
