//! The kind `sampling.write`.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use arrow::array::AsArray;
use arrow::datatypes::Schema;
use flow_kind::{
    Body, ColumnType, Context, Export, ExportSet, InputPort, Inputs, Kind, OutputPort, ROW, Shape, StageError, UrlUse,
};
use flow_storage::Location;
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::plan_batches::batches_schema;

/// Writes the batches of `sampling.plan` to a file.
///
/// # What it does
///
/// Takes the ports `batches` and `summary` of a `sampling.plan` and writes the parquet file `out` with the
/// columns `rank` (int32), `batch` (int32) and `rows` (list of int64), by rank and batch. The file's metadata has
/// `manifest_digest`, the digest of the manifest to which the row numbers refer. `<name of out>.flow.json` beside `out`
/// has its digest.
///
/// # Example
///
/// ```yaml
/// write: {uses: sampling.write, from: {batches: plan.batches, summary: plan.summary}, with: {out: work/plan/batches.parquet}}
/// ```
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WriteSettings {
    /// The file to write; may be in object storage (`s3://bucket/folder/file`, see docs/storage.md).
    pub out: PathBuf,
}

impl WriteSettings {
    /// Folder and name of the file.
    fn parts(&self) -> Result<(PathBuf, String), StageError> {
        if let Location::Object(url) =
            Location::of_path(&self.out).map_err(|error| StageError::setting("out", error))?
        {
            let folder = url.parent();
            let folder = folder.ok_or_else(|| StageError::setting("out", format!("`{url}` names no file")))?;
            return Ok((folder.to_string().into(), url.name().to_owned()));
        }
        let name = self.out.file_name().and_then(|name| name.to_str());
        let name = name.ok_or_else(|| StageError::setting("out", format!("`{}` names no file", self.out.display())))?;
        let folder = match self.out.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        Ok((folder, name.to_owned()))
    }
}

pub struct WritePlan;

impl Kind for WritePlan {
    const NAME: &'static str = "sampling.write";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[
        InputPort::whole("batches", "the port `batches` of a sampling.plan").columns(&[
            ("rank", ColumnType::Any),
            ("batch", ColumnType::Any),
            ("rows", ColumnType::Any),
        ]),
        InputPort::whole("summary", "the port `summary` of a sampling.plan")
            .columns(&[("manifest_digest", ColumnType::AnyText)]),
    ];
    const OUTPUTS: &'static [OutputPort] = &[];
    const URL_SETTINGS: &'static [(&'static str, UrlUse)] = &[("out", UrlUse::Write)];
    type Settings = WriteSettings;

    fn shape(settings: &WriteSettings, _: &Inputs) -> Result<Shape, StageError> {
        settings.parts()?;
        Ok(Shape::export())
    }

    fn open(settings: &WriteSettings, context: &Context) -> Result<Body, StageError> {
        let (folder, name) = settings.parts()?;
        Ok(Body::Export(Box::new(Writer {
            context: context.clone(),
            folder,
            name,
        })))
    }

    fn identity(settings: &WriteSettings) -> serde_json::Value {
        serde_json::json!({"file": settings.parts().map(|(_, name)| name).unwrap_or_default()})
    }
}

struct Writer {
    context: Context,
    folder: PathBuf,
    name: String,
}

impl Export for Writer {
    fn folder(&self) -> PathBuf {
        self.folder.clone()
    }

    fn manifest(&self) -> String {
        format!("{}.flow.json", self.name)
    }

    fn write(&mut self, set: &mut ExportSet) -> Result<(), StageError> {
        let (batches, summary) = (self.context.required("batches")?, self.context.required("summary")?);
        let mut digest = String::new();
        for item in summary.batches(Some(&["manifest_digest"])) {
            let (_, batch) = item?;
            let found = batch
                .column(0)
                .as_string_opt::<i32>()
                .and_then(|column| column.iter().flatten().next());
            digest = found.unwrap_or_default().to_owned();
        }
        let path = set.file(&self.name).map_err(StageError::failed)?;
        let failed =
            |error: &dyn std::fmt::Display| StageError::failed(format!("cannot write {}: {error}", path.display()));
        let schema = schema_without_row(&batches_schema());
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(ZstdLevel::default()))
            .set_created_by("flow".into())
            .set_key_value_metadata(Some(vec![KeyValue::new("manifest_digest".into(), digest)]))
            .build();
        let file = File::create(&path).map_err(|error| failed(&error))?;
        let mut writer =
            ArrowWriter::try_new(file, Arc::new(schema), Some(properties)).map_err(|error| failed(&error))?;
        for item in batches.batches(Some(&["rank", "batch", "rows"])) {
            writer.write(&item?.1).map_err(|error| failed(&error))?;
        }
        writer.close().map_err(|error| failed(&error))?;
        Ok(())
    }
}

fn schema_without_row(schema: &Schema) -> Schema {
    Schema::new(
        schema
            .fields()
            .iter()
            .filter(|field| field.name() != ROW)
            .cloned()
            .collect::<Vec<_>>(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_folder_of_a_url_is_one_in_the_bucket() {
        let parts = |out: &str| WriteSettings { out: out.into() }.parts().ok();
        let expected = |folder: &str, name: &str| Some((PathBuf::from(folder), name.to_string()));
        assert_eq!(
            parts("s3://bucket/plan/a.parquet"),
            expected("s3://bucket/plan", "a.parquet")
        );
        assert_eq!(parts("s3://bucket/a.parquet"), expected("s3://bucket", "a.parquet"));
        assert_eq!(parts("s3://bucket"), None);
        assert_eq!(parts("plan/a.parquet"), expected("plan", "a.parquet"));
        assert_eq!(parts("a.parquet"), expected(".", "a.parquet"));
    }
}
