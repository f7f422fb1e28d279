//! Whether recordings have changed that datasets hold.

use std::collections::HashSet;
use std::path::PathBuf;

use flow_audio::embedded::file_of;
use flow_corpus::looks::{Chain, looks_of};
use flow_corpus::manifest_row::Wanted;
use flow_corpus::partitions::with_rows;
use flow_kind::{Artifact, Digest, StageError, Storage};

use crate::recordings::RecordingPlaces;
use crate::rows::columns_of_places;

/// Digest of the sizes, times and inodes (or ETags) of all files that have recordings of the rows, in the order of the rows. Each file
/// is looked at once, however many rows it has; the path itself is in the rows.
pub(crate) fn versions_of_recordings(
    storage: &Storage,
    shards: &str,
    splits: &[(&'static str, &Artifact)],
) -> Result<Digest, StageError> {
    let mut chain = Chain::default();
    let mut seen: HashSet<Digest> = HashSet::new();
    let mut last = PathBuf::new();
    for (_, artifact) in splits {
        let wanted = columns_of_places(artifact.schema());
        for partition in with_rows(artifact) {
            for batch in artifact.read(partition, Some(&wanted))? {
                let batch = batch?;
                let places = RecordingPlaces::of(&batch, shards)?;
                let mut new: Vec<Wanted> = Vec::new();
                for row in 0..batch.num_rows() {
                    // A row that does not say where its recording is ends the run when it is written.
                    let Ok(place) = places.of_row(row) else { continue };
                    let file = file_of(&place.path);
                    // Rows of one file mostly follow each other.
                    if last != file {
                        if seen.insert(Digest::of(file.as_os_str().as_encoded_bytes())) {
                            new.push(Wanted::file(file));
                        }
                        last = file.to_path_buf();
                    }
                }
                looks_of(storage, &new)?.iter().for_each(|look| chain.add(look));
            }
        }
    }
    Ok(Digest::of(chain.to_hex().as_bytes()))
}
