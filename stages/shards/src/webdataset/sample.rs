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
    /// `.txt`, and `.json`.
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

/// The samples in the order of their first members in the tar.
pub fn group<'a>(members: &[&'a Member]) -> Vec<Sample<'a>> {
    let mut samples: Vec<Sample<'a>> = Vec::new();
    let mut by_key: HashMap<&str, usize> = HashMap::new();
    for &member in members {
        let (key, extension) = split(&member.name);
        let recording = is_of_recording(extension);
        let (text, json) = (
            extension.eq_ignore_ascii_case("txt"),
            extension.eq_ignore_ascii_case("json"),
        );
        if !recording && !text && !json {
            continue;
        }
        let at = *by_key.entry(key).or_insert_with(|| {
            samples.push(Sample {
                key,
                recordings: Vec::new(),
                text: None,
                json: None,
            });
            samples.len() - 1
        });
        let sample = &mut samples[at];
        if recording {
            sample.recordings.push(member);
        } else if text {
            sample.text = Some(member);
        } else {
            sample.json = Some(member);
        }
    }
    samples
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
            recordings.retain(|member| !is_of_film(split(&member.name).1));
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
