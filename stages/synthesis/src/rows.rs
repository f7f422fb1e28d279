//! The rows that `audio.synthesize` gives.

use std::sync::Arc;

use arrow::array::{ArrayRef, Float64Array, Int32Array, Int64Array, RecordBatch, StringArray, UInt32Array};
use arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use flow_kind::{ROW, StageError};

use super::clip::Clip;
use super::known::PlannedShard;
use flow_audio::flac;
use flow_shards::webdataset;

/// Schema of the port `files`.
pub fn files_schema() -> SchemaRef {
    Arc::new(Schema::new(vec![
        Field::new(ROW, DataType::UInt32, false),
        Field::new("path", DataType::Utf8, false),
        Field::new("bytes", DataType::Int64, false),
    ]))
}

/// Schema of the ports `train` and `val`: that of other speech in tars, and how it was made.
pub fn clips_schema() -> SchemaRef {
    let mut fields: Vec<Arc<Field>> = webdataset::rows_schema().fields().iter().cloned().collect();
    let made = [
        ("voice", DataType::Utf8, false),
        ("speed", DataType::Int32, false),
        ("pitch", DataType::Int32, false),
        ("noise_ratio", DataType::Float64, true),
        ("room_decay", DataType::Float64, true),
    ];
    fields.extend(made.map(|(name, data_type, nullable)| Arc::new(Field::new(name, data_type, nullable))));
    Arc::new(Schema::new(fields))
}

/// Names of a shard's files, and their sizes.
pub fn files(shard: &str, files: &[(&str, u64)]) -> Result<RecordBatch, StageError> {
    let rows = 0..files.len() as u32;
    let paths = files.iter().map(|(name, _)| format!("{shard}/{name}"));
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from_iter_values(rows)),
        Arc::new(StringArray::from_iter_values(paths)),
        // Sizes of files are below 2^63.
        Arc::new(Int64Array::from_iter_values(
            files.iter().map(|(_, bytes)| *bytes as i64),
        )),
    ];
    Ok(RecordBatch::try_new(files_schema(), columns)?)
}

/// Clips of a shard, which begin at these places of its tar. `_row` is the number with which each was drawn.
pub fn clips(shard: &PlannedShard, clips: &[Clip], offsets: &[u64]) -> Result<RecordBatch, StageError> {
    let mut hashes = Vec::with_capacity(clips.len());
    for clip in clips {
        // Decodes what was just encoded, so that only readable recordings are written.
        let verdict = flac::probe(&clip.flac)
            .map_err(|fault| StageError::failed(format!("{} was encoded wrongly: {fault}", clip.segment_id)))?;
        hashes.push(verdict.audio_hash);
    }
    let texts =
        |of: &dyn Fn(&Clip) -> String| -> ArrayRef { Arc::new(StringArray::from_iter_values(clips.iter().map(of))) };
    // Settings bound both far below 2^31.
    let numbers = |of: &dyn Fn(&Clip) -> u32| -> ArrayRef {
        Arc::new(Int32Array::from_iter_values(clips.iter().map(|clip| of(clip) as i32)))
    };
    let tar_path = format!("{}/{}.tar", shard.name(), shard.shard_id);
    let columns: Vec<ArrayRef> = vec![
        Arc::new(UInt32Array::from_iter_values(clips.iter().map(|clip| clip.number))),
        texts(&|clip| clip.segment_id.clone()),
        texts(&|_| shard.shard_id.clone()),
        texts(&|clip| clip.text.clone()),
        Arc::new(Float64Array::from_iter_values(clips.iter().map(Clip::duration))),
        texts(&|_| shard.lang.clone()),
        texts(&Clip::member),
        texts(&|_| tar_path.clone()),
        texts(&|_| "synthesized".to_owned()),
        Arc::new(Int64Array::from_iter_values(
            clips.iter().zip(offsets).map(|(_, offset)| *offset as i64),
        )),
        Arc::new(Int64Array::from_iter_values(
            clips.iter().map(|clip| clip.flac.len() as i64),
        )),
        Arc::new(StringArray::from_iter_values(hashes)),
        texts(&|clip| clip.voice.clone()),
        numbers(&|clip| clip.drawn.speed),
        numbers(&|clip| clip.drawn.pitch),
        Arc::new(
            clips
                .iter()
                .map(|clip| clip.drawn.scene.noise.as_ref().map(|noise| noise.ratio))
                .collect::<Float64Array>(),
        ),
        Arc::new(
            clips
                .iter()
                .map(|clip| clip.drawn.scene.room.as_ref().map(|room| room.decay))
                .collect::<Float64Array>(),
        ),
    ];
    Ok(RecordBatch::try_new(clips_schema(), columns)?)
}
