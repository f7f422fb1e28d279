//! YODAS2: `text/00000000.json` with a list of videos, each `{"audio_id", "text": {UTTERANCE: TEXT}}`, and recordings of whole videos
//! in `audio/00000000.tar.gz`, once that is unpacked. The name of an utterance, `VIDEO-NUMBER-START-END`, has its times in 1/100 s.

use std::path::Path;

use flow_corpus::ReadSettings;
use flow_corpus::looks::{check_version, version_of};
use flow_corpus::manifest_row::{ManifestRow, Refusal, Wanted, line_values, refuse};
use flow_corpus::names::unsafe_name;
use flow_corpus::tree;
use flow_corpus::{Corpus, LaidOut, Manifest, ManifestError, Part, Take};
use flow_kind::{Partition, StageError, Storage, read_regular_file};
use flow_storage::FileVersion;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::utterance::{Common, Utterance, text_of};
use super::yodas::{Shard, language_of, shards, unpacked};

/// Most bytes of a list of videos.
const LARGEST: u64 = 256 << 20;

#[derive(Deserialize)]
struct Video {
    audio_id: String,
    text: Map<String, Value>,
}

pub fn detect(storage: &Storage, root: &Path) -> Option<String> {
    let Shard { text, .. } = shards(storage, root, "json").into_iter().next()?;
    tree::is_folder(storage, &root.join("audio"))
        .then(|| format!("text/{} beside audio", text.file_name().unwrap_or_default().display()))
}

struct Yodas2 {
    shards: Vec<(Shard, FileVersion)>,
    lang: Option<String>,
    common: Common,
}

pub fn open(storage: &Storage, root: &Path, settings: &ReadSettings, _: &Path) -> Result<Manifest, ManifestError> {
    let shards = shards(storage, root, "json");
    unpacked(storage, root, &shards)?;
    let looked = |shard: Shard| {
        let failed = |error| ManifestError::io(&shard.text, error);
        let look = version_of(storage, &shard.text).map_err(failed)?;
        if look.size > LARGEST {
            return Err(ManifestError::manifest(
                &shard.text,
                format!("it has more than {LARGEST} bytes"),
            ));
        }
        Ok((shard, look))
    };
    let corpus = Yodas2 {
        shards: shards.into_iter().map(looked).collect::<Result<_, _>>()?,
        lang: language_of(root),
        common: Common::of(settings),
    };
    LaidOut::of(corpus, root, settings)
}

/// Start and end in the name of an utterance, in seconds.
fn times(utterance: &str) -> Option<(f64, f64)> {
    let mut parts = utterance.rsplit('-');
    let mut time = || {
        let digits = parts
            .next()
            .filter(|part| part.bytes().all(|byte| byte.is_ascii_digit()))?;
        digits.parse::<u32>().ok()
    };
    let (end, start, _number) = (time()?, time()?, time()?);
    parts.next()?;
    (start < end).then(|| (f64::from(start) / 100.0, f64::from(end) / 100.0))
}

impl Yodas2 {
    fn row(&self, shard: &Shard, video: &str, id: &str, text: &Value) -> Result<ManifestRow, Refusal> {
        if unsafe_name(video) || unsafe_name(id) {
            return Err(refuse("unsafe_name", format!("{video:?}, {id:?}")));
        }
        let (start, end) = times(id).ok_or_else(|| {
            refuse(
                "duration_invalid",
                format!("{id:?} does not end in a start and a later end"),
            )
        })?;
        let (files, member, tar_path, tar_member_name) = shard.recording(video);
        Ok(Utterance {
            id: id.to_owned(),
            shard: shard.name(),
            text: text_of(text.as_str().unwrap_or_default(), "there is no text")?,
            folder_lang: self.lang.clone(),
            start,
            duration: Some(((end - start) * 100.0).round() / 100.0),
            wanted: Wanted { files, member },
            tar_path,
            tar_member_name,
            ..Utterance::default()
        }
        .row(&self.common))
    }
}

impl Corpus for Yodas2 {
    fn told(&self) -> String {
        "YODAS2; utterances are parts of whole videos".into()
    }

    fn parts(&self) -> Vec<Part> {
        let part = |(number, (shard, _)): (usize, &(Shard, FileVersion))| Part {
            name: Partition::from(format!("{number:06}/{}", shard.name())),
            number,
            files: vec![shard.text.clone()],
            looks: String::new(),
        };
        self.shards.iter().enumerate().map(part).collect()
    }

    fn each(&self, storage: &Storage, part: &Part, take: &mut Take<'_>) -> Result<(), StageError> {
        let Some((shard, look)) = self.shards.get(part.number) else {
            return Ok(());
        };
        check_version(storage, *look, &shard.text)?;
        let failed = |error| ManifestError::io(&shard.text, error);
        let bytes = read_regular_file(storage, &shard.text).map_err(failed)?;
        let videos: Vec<Value> = match serde_json::from_slice(&bytes) {
            Ok(videos) => videos,
            Err(error) => {
                let name = shard.text.display().to_string();
                let refusal = refuse("bad_json", format!("{name} is not a list of videos: {error}"));
                return take(None, Err(refusal), &|| line_values(&name));
            }
        };
        for (place, video) in (1..).zip(videos) {
            let video: Video = match serde_json::from_value(video) {
                Ok(video) => video,
                Err(error) => {
                    let refusal = refuse("bad_json", format!("video {place}: {error}"));
                    take(None, Err(refusal), &|| line_values(&format!("video {place}")))?;
                    continue;
                }
            };
            for (id, text) in &video.text {
                let row = self.row(shard, &video.audio_id, id, text);
                take(None, row, &|| {
                    serde_json::json!({ "audio_id": video.audio_id, id: text }).to_string()
                })?;
            }
        }
        Ok(())
    }
}
