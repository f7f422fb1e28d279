//! The table that an address names, and what is known of it once it is open.

use std::path::PathBuf;

use super::address::address;
use super::browse::RowSet;
use super::page_error::PageError;

/// Rows as a page names them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TableRef {
    /// The rows of a stage's port in a run.
    Artifact { run: String, stage: String, port: String },
    /// The rejects of a run.
    Rejects { run: String },
    /// A file of an export of a run.
    Export { run: String, export: usize, file: String },
    /// A file of the command line.
    File(usize),
}

/// Names and values of a page's query.
pub type Pairs = Vec<(String, String)>;

/// The first value of a name.
pub fn value_of<'p>(pairs: &'p [(String, String)], name: &str) -> Option<&'p str> {
    let found = pairs.iter().find(|(known, _)| known == name);
    found.map(|(_, value)| value.as_str())
}

impl TableRef {
    /// # Errors
    /// If the query names no table.
    pub fn parse(pairs: &[(String, String)]) -> Result<TableRef, PageError> {
        let given = |name: &str| {
            let value = value_of(pairs, name).map(str::to_owned);
            value.ok_or_else(|| PageError::bad_request(format!("the address lacks `{name}`")))
        };
        let number = |name: &str| {
            let number = given(name)?.parse();
            number.map_err(|_| PageError::bad_request(format!("`{name}` in the address is not a number")))
        };
        match given("of")?.as_str() {
            "artifact" => Ok(TableRef::Artifact {
                run: given("run")?,
                stage: given("stage")?,
                port: given("port")?,
            }),
            "rejects" => Ok(TableRef::Rejects { run: given("run")? }),
            "export" => Ok(TableRef::Export {
                run: given("run")?,
                export: number("export")?,
                file: given("file")?,
            }),
            "file" => Ok(TableRef::File(number("file")?)),
            other => Err(PageError::bad_request(format!("there are not rows of `{other}`"))),
        }
    }

    /// As [`TableRef::parse`] reads it.
    pub fn query(&self) -> Vec<(&'static str, String)> {
        match self {
            TableRef::Artifact { run, stage, port } => vec![
                ("of", "artifact".into()),
                ("run", run.clone()),
                ("stage", stage.clone()),
                ("port", port.clone()),
            ],
            TableRef::Rejects { run } => vec![("of", "rejects".into()), ("run", run.clone())],
            TableRef::Export { run, export, file } => vec![
                ("of", "export".into()),
                ("run", run.clone()),
                ("export", export.to_string()),
                ("file", file.clone()),
            ],
            TableRef::File(file) => vec![("of", "file".into()), ("file", file.to_string())],
        }
    }

    /// The address of its rows.
    pub fn address(&self) -> String {
        self.link("/rows", &[])
    }

    /// The address of a page about it, with more in its query.
    pub fn link(&self, path: &str, more: &[(String, String)]) -> String {
        let own = self.query();
        let own = own.iter().map(|(name, value)| (*name, value.as_str()));
        address(
            path,
            own.chain(more.iter().map(|(name, value)| (name.as_str(), value.as_str()))),
        )
    }

    pub fn title(&self) -> String {
        match self {
            TableRef::Artifact { stage, port, .. } if port == "rows" => stage.clone(),
            TableRef::Artifact { stage, port, .. } => format!("{stage}.{port}"),
            TableRef::Rejects { .. } => "Rejects".into(),
            TableRef::Export { file, .. } => file.clone(),
            TableRef::File(file) => format!("File {file}"),
        }
    }

    pub fn run(&self) -> Option<&str> {
        match self {
            TableRef::Artifact { run, .. } | TableRef::Rejects { run } | TableRef::Export { run, .. } => Some(run),
            TableRef::File(_) => None,
        }
    }

    /// The stage that kept it, or its title.
    pub fn stage(&self) -> String {
        match self {
            TableRef::Artifact { stage, .. } => stage.clone(),
            _ => self.title(),
        }
    }

    /// Whether it can be one, by the ending of its name.
    pub fn may_have_rows(&self) -> bool {
        match self {
            TableRef::Export { file, .. } => {
                [".parquet", ".jsonl", ".json"]
                    .iter()
                    .any(|ending| file.ends_with(ending))
                    && !["flow.json", "statistics.json"].contains(&file.as_str())
            }
            _ => true,
        }
    }
}

/// Rows that were opened.
#[derive(Clone)]
pub struct Table {
    pub rows: RowSet,
    pub title: String,
    /// The folder of shards.
    pub shards: Option<PathBuf>,
    /// The folder of the file that the rows are of.
    pub beside: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_read_from_its_own_address_and_from_no_other() {
        let (run, stage) = ("r-1".to_owned(), "a/b".to_owned());
        for table in [
            TableRef::Artifact {
                run: run.clone(),
                stage,
                port: "rows".into(),
            },
            TableRef::Rejects { run: run.clone() },
            TableRef::Export {
                run,
                export: 2,
                file: "x/ü & y.parquet".into(),
            },
            TableRef::File(7),
        ] {
            let pairs: Pairs = table
                .query()
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value))
                .collect();
            assert_eq!(TableRef::parse(&pairs).unwrap(), table);
            for cut in 0..pairs.len() {
                assert!(TableRef::parse(&pairs[..cut]).is_err(), "{pairs:?}");
            }
        }
        let pairs = [
            ("of".to_owned(), "file".to_owned()),
            ("file".to_owned(), "../etc/passwd".to_owned()),
        ];
        assert!(TableRef::parse(&pairs).is_err());
    }
}
