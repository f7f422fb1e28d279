//! `flow kinds`: the stage kinds and their settings, as text, pages and schemas.

use std::io::Write;
use std::path::Path;

use flow_inspect::table;
use flow_kind::registry::{AnyKind, Registry};
use flow_store::write_atomically;

use super::{kind_page, pipeline_schema};
use crate::arguments::KindsArguments;
use flow_cli::failure::{Exit, Failure};

pub fn kinds(arguments: &KindsArguments, registry: &Registry, out: &mut dyn Write) -> Result<Exit, Failure> {
    if let Some(folder) = &arguments.docs {
        for written in write_docs(registry, folder)? {
            writeln!(out, "{written}")?;
        }
        return Ok(Exit::Done);
    }
    let kind = match &arguments.kind {
        None => None,
        Some(name) => match registry.get(name) {
            Some(kind) => Some(kind),
            None => return Err(Failure::usage(format!("unknown kind `{name}`"), registry.suggest(name))),
        },
    };
    match kind {
        Some(kind) if arguments.schema => json(&kind.schema(), out)?,
        Some(kind) => write!(out, "{}", kind_page::page(kind.as_ref()))?,
        None if arguments.schema => json(&pipeline_schema::schema(registry), out)?,
        None => list(registry, out)?,
    }
    Ok(Exit::Done)
}

fn list(registry: &Registry, out: &mut dyn Write) -> Result<(), Failure> {
    let mut rows = vec![["kind", "version", "what it does"].map(String::from).to_vec()];
    rows.extend(registry.kinds().map(|kind| {
        vec![
            kind.name().to_string(),
            kind.version().to_string(),
            first_sentence(kind.as_ref()),
        ]
    }));
    for line in table::lines(&rows) {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

/// The first sentence of the kind's doc text, past a heading.
fn first_sentence(kind: &dyn AnyKind) -> String {
    let docs = kind.docs();
    let text: Vec<&str> = docs
        .lines()
        .map(str::trim)
        .skip_while(|line| line.is_empty() || line.starts_with('#'))
        .take_while(|line| !line.is_empty())
        .collect();
    let text = text.join(" ");
    match text.find(". ") {
        Some(end) => text[..end].to_string(),
        None => text.trim_end_matches('.').to_string(),
    }
}

fn json(value: &serde_json::Value, out: &mut dyn Write) -> Result<(), Failure> {
    serde_json::to_writer_pretty(&mut *out, value).map_err(std::io::Error::from)?;
    writeln!(out)?;
    Ok(())
}

/// Writes `kinds/NAME.md` for every kind and `schema/pipeline.schema.json`; gives the paths. Pages of removed kinds are
/// not deleted.
fn write_docs(registry: &Registry, folder: &Path) -> Result<Vec<String>, Failure> {
    let mut files = vec![("schema".to_string(), "pipeline.schema.json".to_string(), {
        let mut text = serde_json::to_string(&pipeline_schema::schema(registry)).map_err(std::io::Error::from)?;
        text.push('\n');
        text
    })];
    for kind in registry.kinds() {
        files.push((
            "kinds".to_string(),
            format!("{}.md", kind.name()),
            kind_page::page(kind.as_ref()),
        ));
    }
    let mut written = Vec::new();
    for (below, name, text) in files {
        let folder = folder.join(below);
        std::fs::create_dir_all(&folder)?;
        let path = folder.join(name);
        write_atomically(&path, text.as_bytes())?;
        written.push(path.display().to_string());
    }
    Ok(written)
}
