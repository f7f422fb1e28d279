//! One sample of a WebDataset tar: the members that share a name, and their content.

use std::collections::HashMap;
use std::path::Path;

use flow_storage::InputFile;

use super::WebDatasetSettings;
use crate::examine::judge;
use flow_audio::decode::read_open_range;
use flow_audio::error::AudioError;
use flow_audio::listing::{is_of_film, is_of_recording};
use flow_audio::member_name::is_unsafe;
use flow_audio::tar::{Member, MemberKind};
use flow_text::language_tag::usual_language;

/// Longest text or `.json` that is read, in bytes.
pub const LONGEST_TEXT: u64 = 1 << 20;

pub struct Sample<'a> {
    /// The members' common name.
    pub key: &'a str,
    recordings: Vec<&'a Member>,
    /// `.txt`, `.text` or `.transcript`, and `.json` or `.jsn`.
    pub text: Option<&'a Member>,
    pub json: Option<&'a Member>,
}

/// A complete sample.
pub(super) struct Row {
    pub text: String,
    pub lang: String,
    /// In seconds.
    pub duration: f64,
    /// Name of the recording's member.
    pub member: String,
    pub offset: u64,
    pub size: u64,
    pub audio_hash: String,
}

/// Why a sample is rejected: reason and detail.
pub type Refusal = (&'static str, String);

/// Extensions of texts and of JSON, as `datasets` decodes them.
const TEXTS: [&str; 3] = ["txt", "text", "transcript"];
const JSON: [&str; 2] = ["json", "jsn"];

fn is_one(known: &[&str], extension: &str) -> bool {
    known.iter().any(|name| extension.eq_ignore_ascii_case(name))
}

/// What a member is of a sample.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Recording,
    Text,
    Json,
}

impl Role {
    fn of(extension: &str) -> Option<Role> {
        match extension {
            _ if is_of_recording(extension) => Some(Role::Recording),
            _ if is_one(&TEXTS, extension) => Some(Role::Text),
            _ if is_one(&JSON, extension) => Some(Role::Json),
            _ => None,
        }
    }
}

/// The samples in the order of their first members in the tar. Members with one name up to its first dot are one. Names of recordings
/// may have dots themselves (`talk-12.5.flac`): they count up to their last dot where nothing else is a recording up to the first.
pub fn group<'a>(members: &[&'a Member]) -> Vec<Sample<'a>> {
    let mut samples = Samples::default();
    let mut dotted = Samples::default();
    for (place, &member) in members.iter().enumerate() {
        let (key, extension) = split(&member.name);
        if let Some(role) = Role::of(extension) {
            samples.add(key, role, place, member);
        } else if let Some((before, extension)) = extension.rsplit_once('.')
            && let Some(role) = Role::of(extension)
        {
            dotted.add(&member.name[..key.len() + 1 + before.len()], role, place, member);
        }
    }
    let has_recording = |key: &str| {
        let sample = samples.by_key.get(key).map(|at| &samples.all[*at].1);
        sample.is_some_and(|sample| !sample.recordings.is_empty())
    };
    dotted
        .all
        .retain(|(_, sample)| !sample.recordings.is_empty() && !has_recording(split(sample.key).0));
    let mut all = samples.all;
    all.extend(dotted.all);
    all.sort_by_key(|(place, _)| *place);
    all.into_iter().map(|(_, sample)| sample).collect()
}

#[derive(Default)]
struct Samples<'a> {
    /// Each with the place of its first member in the tar.
    all: Vec<(usize, Sample<'a>)>,
    by_key: HashMap<&'a str, usize>,
}

impl<'a> Samples<'a> {
    fn add(&mut self, key: &'a str, role: Role, place: usize, member: &'a Member) {
        let at = *self.by_key.entry(key).or_insert_with(|| {
            let sample = Sample {
                key,
                recordings: Vec::new(),
                text: None,
                json: None,
            };
            self.all.push((place, sample));
            self.all.len() - 1
        });
        let sample = &mut self.all[at].1;
        match role {
            Role::Recording => sample.recordings.push(member),
            Role::Text => sample.text = Some(member),
            Role::Json => sample.json = Some(member),
        }
    }
}

/// A name up to the first dot of its last part, and what follows the dot.
fn split(name: &str) -> (&str, &str) {
    let last = name.rfind('/').map_or(0, |slash| slash + 1);
    match name[last..].find('.') {
        Some(dot) => (&name[..last + dot], &name[last + dot + 1..]),
        None => (name, ""),
    }
}

impl<'a> Sample<'a> {
    pub fn names(&self) -> Vec<&str> {
        let members = self.recordings.iter().copied().chain(self.text).chain(self.json);
        members.map(|member| member.name.as_str()).collect()
    }

    /// Reads and decodes the sample. An error is one of the disk.
    pub(super) fn judge(
        &self,
        tar: &InputFile,
        tar_path: &Path,
        settings: &WebDatasetSettings,
    ) -> Result<Result<Row, Refusal>, AudioError> {
        let read = |member: &Member| read_open_range(tar, tar_path, member.offset, member.size);
        let recording = match self.recording() {
            Ok(recording) => recording,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let (text, lang) = match self.words(read, settings)? {
            Ok(words) => words,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let (status, detail, verdict) = judge(recording.size, &settings.formats, || read(recording))?;
        Ok(match verdict {
            None => Err((status, detail)),
            Some((_, verdict)) => Ok(Row {
                text,
                lang,
                duration: verdict.frames as f64 / f64::from(verdict.info.sample_rate),
                member: recording.name.clone(),
                offset: recording.offset,
                size: recording.size,
                audio_hash: verdict.audio_hash,
            }),
        })
    }

    /// The member that is the recording.
    ///
    /// # Errors
    /// Where there is none, or several, or a member is incomplete or no file.
    pub fn recording(&self) -> Result<&'a Member, Refusal> {
        if let Some(name) = self.names().into_iter().find(|name| is_unsafe(name)) {
            return Err(("unsafe_name", format!("{name:?}")));
        }
        // A film beside its sound is none.
        let mut recordings = self.recordings.clone();
        if recordings.len() > 1 {
            recordings.retain(|member| !is_of_film(member.name.rsplit('.').next().unwrap_or_default()));
        }
        let recording = match recordings[..] {
            [only] => only,
            [] if self.recordings.is_empty() => {
                return Err(("missing_audio", "a text without a recording".into()));
            }
            _ => return Err(("several_recordings", self.names().join(", "))),
        };
        for member in [Some(recording), self.text, self.json].into_iter().flatten() {
            let what = match member.kind {
                MemberKind::Other => "not_regular_file",
                MemberKind::Regular if member.truncated => "tar_truncated",
                MemberKind::Regular => continue,
            };
            return Err((what, member.name.clone()));
        }
        Ok(recording)
    }

    /// Text and language.
    fn words(
        &self,
        read: impl Fn(&Member) -> Result<Vec<u8>, AudioError>,
        settings: &WebDatasetSettings,
    ) -> Result<Result<(String, String), Refusal>, AudioError> {
        let fields = match self.json {
            None => serde_json::Map::new(),
            Some(member) if member.size > LONGEST_TEXT => {
                return Ok(Err(("bad_json", format!("{} bytes", member.size))));
            }
            Some(member) => match serde_json::from_slice(&read(member)?) {
                Ok(fields) => fields,
                Err(error) => return Ok(Err(("bad_json", error.to_string()))),
            },
        };
        let field = |name: &str| match fields.get(name) {
            None | Some(serde_json::Value::Null) => Ok(None),
            Some(serde_json::Value::String(text)) => Ok(Some(text.trim().to_owned())),
            Some(_) => Err(("bad_json", format!("the field `{name}` is not text"))),
        };
        let text = match self.text {
            Some(member) if member.size > LONGEST_TEXT => {
                return Ok(Err(("bad_text", format!("{} bytes", member.size))));
            }
            Some(member) => match String::from_utf8(read(member)?) {
                Ok(text) => Ok(Some(text.trim().to_owned())),
                Err(_) => return Ok(Err(("bad_text", "it is not UTF-8".into()))),
            },
            None => field(&settings.text_field),
        };
        let lang = field(&settings.lang_field);
        Ok(match (text, lang) {
            (Err(refusal), _) | (_, Err(refusal)) => Err(refusal),
            (Ok(None), _) => {
                let detail = format!("no .txt, and no field `{}` in a .json", settings.text_field);
                Err(("missing_text", detail))
            }
            (Ok(Some(text)), _) if text.is_empty() => Err(("empty_text", String::new())),
            (Ok(Some(text)), Ok(lang)) => match lang.filter(|lang| !lang.is_empty()) {
                Some(lang) => Ok((text, usual_language(&lang))),
                None if !settings.lang.is_empty() => Ok((text, usual_language(&settings.lang))),
                None => {
                    let detail = format!("no field `{}` in a .json, and no setting `lang`", settings.lang_field);
                    Err(("missing_lang", detail))
                }
            },
        })
    }
}
