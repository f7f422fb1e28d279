//! The files of a shard: the tar with its recordings, and the two tables beside it.

use std::sync::Arc;

use arrow::array::{
    ArrayRef, Float64Array, Int64Array, ListBuilder, RecordBatch, StringArray, StringBuilder, new_null_array,
};
use arrow::datatypes::{DataType, Field, Schema, TimeUnit};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;

use super::clip::Clip;
use flow_audio::AudioError;
use flow_audio::tar_write::{self, BLOCK};

/// A tar of recordings, and where in it each one is, in bytes.
pub fn tar<'a>(members: impl Iterator<Item = (&'a str, &'a [u8])>) -> Result<(Vec<u8>, Vec<u64>), AudioError> {
    let mut bytes = Vec::new();
    let mut offsets = Vec::new();
    for (name, data) in members {
        let written = tar_write::write_member(&mut bytes, name, data);
        written.map_err(|why| AudioError::Shard(format!("`{name}` does not fit into a tar: {why}")))?;
        offsets.push((bytes.len() - data.len().next_multiple_of(BLOCK)) as u64);
    }
    bytes.extend_from_slice(&tar_write::END);
    Ok((bytes, offsets))
}

/// `metadata.parquet`, with the columns that corpora of recorded speech have.
pub fn metadata(clips: &[Clip], lang: &str) -> Result<Vec<u8>, AudioError> {
    let texts =
        |of: &dyn Fn(&Clip) -> String| -> ArrayRef { Arc::new(StringArray::from_iter_values(clips.iter().map(of))) };
    let numbers =
        |of: &dyn Fn(&Clip) -> f64| -> ArrayRef { Arc::new(Float64Array::from_iter_values(clips.iter().map(of))) };
    let mut flags = ListBuilder::new(StringBuilder::new());
    for _ in clips {
        flags.values().append_value("synthetic");
        flags.append(true);
    }
    let ingested = DataType::Timestamp(TimeUnit::Microsecond, None);
    table(vec![
        ("segment_id", texts(&|clip| clip.segment_id.clone())),
        ("recording_id", texts(&|clip| clip.segment_id.clone())),
        ("speaker_id", texts(&|clip| clip.voice.clone())),
        ("start_s", numbers(&|_| 0.0)),
        ("duration_s", numbers(&Clip::duration)),
        ("transcription_native", texts(&|clip| clip.text.clone())),
        ("transcription_roman", new_null_array(&DataType::Utf8, clips.len())),
        ("tx_quality_score", numbers(&|_| 1.0)),
        ("segment_language", texts(&|_| lang.to_owned())),
        ("flags", Arc::new(flags.finish())),
        // A constant: the current time would change the bytes each time.
        ("ingest_ts", new_null_array(&ingested, clips.len())),
    ])
}

/// `audio_index.parquet`.
pub fn audio_index(clips: &[Clip]) -> Result<Vec<u8>, AudioError> {
    // Recordings are of megabytes at most.
    let sizes = clips.iter().map(|clip| clip.flac.len() as i64);
    table(vec![
        (
            "segment_id",
            Arc::new(StringArray::from_iter_values(clips.iter().map(|clip| &clip.segment_id))),
        ),
        (
            "tar_member_name",
            Arc::new(StringArray::from_iter_values(clips.iter().map(Clip::member))),
        ),
        ("byte_size", Arc::new(Int64Array::from_iter_values(sizes))),
    ])
}

fn table(columns: Vec<(&str, ArrayRef)>) -> Result<Vec<u8>, AudioError> {
    let failed = |error: &dyn std::fmt::Display| AudioError::Shard(format!("cannot write its tables: {error}"));
    let fields: Vec<Field> = columns
        .iter()
        .map(|(name, column)| Field::new(*name, column.data_type().clone(), true))
        .collect();
    let schema = Arc::new(Schema::new(fields));
    let columns = columns.into_iter().map(|(_, column)| column).collect();
    let batch = RecordBatch::try_new(Arc::clone(&schema), columns).map_err(|error| failed(&error))?;
    let level = ZstdLevel::try_new(3).map_err(|error| failed(&error))?;
    let properties = WriterProperties::builder().set_compression(Compression::ZSTD(level));
    let mut writer =
        ArrowWriter::try_new(Vec::new(), schema, Some(properties.build())).map_err(|error| failed(&error))?;
    writer.write(&batch).map_err(|error| failed(&error))?;
    writer.into_inner().map_err(|error| failed(&error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tars_are_read_back_by_us_and_by_others() {
        let members: Vec<(String, Vec<u8>)> = (0..3).map(|n| (format!("m{n}.flac"), vec![n as u8; n * 511])).collect();
        let (bytes, offsets) = tar(members.iter().map(|(name, data)| (name.as_str(), data.as_slice()))).unwrap();
        assert_eq!(bytes.len() % BLOCK, 0);
        let listing = flow_audio::tar::list(&mut std::io::Cursor::new(&bytes), bytes.len() as u64).unwrap();
        for ((member, (name, data)), offset) in listing.members.iter().zip(&members).zip(&offsets) {
            assert_eq!(
                (&member.name, member.offset, member.size),
                (name, *offset, data.len() as u64)
            );
            assert_eq!(&bytes[*offset as usize..][..data.len()], data);
        }
        assert_eq!(listing.members.len(), 3);
        let mut others = ::tar::Archive::new(bytes.as_slice());
        for (entry, (name, data)) in others.entries().unwrap().zip(&members) {
            let mut entry = entry.unwrap();
            let mut found = Vec::new();
            std::io::Read::read_to_end(&mut entry, &mut found).unwrap();
            assert_eq!((entry.path_bytes().as_ref(), &found), (name.as_bytes(), data));
        }
        assert!(tar([("n\0", &b""[..])].into_iter()).is_err());
    }
}
