//! The formats in which transcripts are written.

use std::path::Path;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::line_formats::{ctm, jsonl, tsv, txt};
use crate::lines::LineLimits;
use crate::parquet_format::parquet;
use crate::subtitles::{srt, vtt};
use crate::transcript::Transcript;
use crate::{Result, TranscriptionError};

/// A format of transcripts; its name is the extension of its files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Each segment on a line.
    Txt,
    /// Everything: segments and words with times and confidences, and what made them.
    Json,
    /// SubRip subtitles.
    Srt,
    /// WebVTT subtitles.
    Vtt,
    /// Start, end and text of each segment.
    Tsv,
    /// NIST's CTM, for scoring tools.
    Ctm,
    /// A line of a manifest as NeMo writes it.
    Jsonl,
    /// The same as a table of one row. The only format that is not text.
    Parquet,
}

impl Format {
    pub const ALL: [Self; 8] = [
        Self::Txt,
        Self::Json,
        Self::Srt,
        Self::Vtt,
        Self::Tsv,
        Self::Ctm,
        Self::Jsonl,
        Self::Parquet,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Txt => "txt",
            Self::Json => "json",
            Self::Srt => "srt",
            Self::Vtt => "vtt",
            Self::Tsv => "tsv",
            Self::Ctm => "ctm",
            Self::Jsonl => "jsonl",
            Self::Parquet => "parquet",
        }
    }

    /// The bytes of the file: text, but for Parquet. Only JSON, JSON lines and Parquet refuse times that are not numbers; the
    /// others write 0 for them. `limits` matter to subtitles alone; a limit of 0 is an error.
    pub fn write(self, transcript: &Transcript, limits: &LineLimits) -> Result<Vec<u8>> {
        limits.check()?;
        let text = match self {
            Self::Txt => txt(transcript),
            Self::Json => transcript.to_json()?,
            Self::Srt => srt(transcript, limits),
            Self::Vtt => vtt(transcript, limits),
            Self::Tsv => tsv(transcript),
            Self::Ctm => {
                let stem = Path::new(&transcript.metadata.source_file).file_stem();
                let stem = stem.unwrap_or_default().to_string_lossy();
                ctm(transcript, transcript.metadata.row_id().unwrap_or(&stem))
            }
            Self::Jsonl => jsonl(transcript)?,
            Self::Parquet => return parquet(transcript),
        };
        Ok(text.into_bytes())
    }
}

impl FromStr for Format {
    type Err = TranscriptionError;

    fn from_str(name: &str) -> Result<Self> {
        let known = Self::ALL.into_iter().find(|format| format.name() == name);
        known.ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            TranscriptionError::setting("format", format!("`{name}` is none of {names}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Metadata, Performance, Segment};

    #[test]
    fn every_format_has_a_name_and_writes() {
        let metadata = Metadata {
            source_file: "talks/monday.flac".to_owned(),
            ..Metadata::default()
        };
        let segment = Segment {
            end: 1.0,
            text: "hello".to_owned(),
            ..Segment::default()
        };
        let transcript = Transcript::from_segments(metadata, Performance::default(), vec![segment]);
        for format in Format::ALL {
            assert_eq!(format.name().parse::<Format>().unwrap(), format);
            let bytes = format.write(&transcript, &LineLimits::default()).unwrap();
            if format == Format::Parquet {
                assert!(bytes.starts_with(b"PAR1") && bytes.ends_with(b"PAR1"));
                continue;
            }
            let text = String::from_utf8(bytes).unwrap();
            assert!(
                text.contains("hello") && text.ends_with('\n'),
                "{}: {text}",
                format.name()
            );
        }
        let ctm = Format::Ctm.write(&transcript, &LineLimits::default()).unwrap();
        assert_eq!(ctm, b"monday 1 0.000 1.000 hello\n");
        assert_eq!(
            "docx".parse::<Format>().unwrap_err().to_string(),
            "setting `format`: `docx` is none of txt, json, srt, vtt, tsv, ctm, jsonl, parquet"
        );
        let none = LineLimits {
            max_line_width: None,
            max_line_count: Some(0),
        };
        assert!(Format::Srt.write(&transcript, &none).is_err());
    }
}
