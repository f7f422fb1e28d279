//! What the files of a set are made from, beside rows.

use arrow::datatypes::Schema;
use flow_kind::{Digest, Kind, StageError};

use crate::extracted::Extracted;
use crate::parquet_file::encoder_digest;
use crate::write_settings::WriteSettings;

/// What files are made from, beside rows.
pub(crate) struct Recipe<'s> {
    pub settings: &'s WriteSettings,
    /// What a piece of any file follows from: the settings, the folder (which paths are relative to), and this program.
    digest: Digest,
}

impl<'s> Recipe<'s> {
    /// That of the kind `K`.
    ///
    /// # Errors
    /// When the bytes that the Parquet encoder writes cannot be made for a digest.
    pub fn of<K: Kind<Settings = WriteSettings>>(settings: &'s WriteSettings) -> Result<Recipe<'s>, StageError> {
        let linked = Extracted::new(&settings.audio, &settings.out).is_linked();
        let here = std::env::current_dir().unwrap_or_default();
        let said = serde_json::json!([
            K::NAME,
            K::VERSION,
            env!("CARGO_PKG_VERSION"),
            encoder_digest()?,
            K::identity(settings),
            settings.audio.as_os_str().as_encoded_bytes(),
            settings.out.as_os_str().as_encoded_bytes(),
            linked,
            here.as_os_str().as_encoded_bytes(),
        ]);
        let digest = Digest::of(said.to_string().as_bytes());
        Ok(Recipe { settings, digest })
    }

    /// That of a file with these columns, made from rows with those columns.
    pub fn of_file(&self, written: &Schema, rows: &Schema) -> Digest {
        let columns = [written, rows].map(|schema| format!("{schema:?}"));
        let parts = [
            self.digest.as_bytes().as_slice(),
            columns[0].as_bytes(),
            columns[1].as_bytes(),
        ];
        Digest::of_parts(parts)
    }
}
