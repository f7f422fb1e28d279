//! `flow push`: a dataset or a model to the Hugging Face hub.

mod model_card;

use std::io::Write;

use flow_base::escape::escape_line;
use flow_hub::{Hub, HubError, HubReference, NewFile, Push, RepositoryKind, files_below};
use flow_inspect::table::{lines, plural};
use flow_storage::Storage;
use flow_store::files_of_set;

use crate::arguments::PushArguments;
use flow_cli::failure::{Exit, Failure};
use flow_cli::fetch::tell;

/// What the hub and `datasets` read about a repository.
const CARD: &str = "README.md";

/// What describes the set of a folder that `manifest.write` wrote.
const SET: &str = "flow.json";
/// Files that are named at most where they are left out.
const NAMED: usize = 20;

pub fn push(storage: &Storage, arguments: &PushArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let to = match &arguments.revision {
        Some(branch) => format!("{}@{branch}", arguments.to),
        None => arguments.to.clone(),
    };
    let repository = HubReference::target(&to).map_err(failure)?;
    let mut files = files_below(&arguments.folder).map_err(failure)?;
    let mut left_out = Vec::new();
    if let Some(set) = files_of_set(&arguments.folder, SET).map_err(Failure::unreadable)? {
        let is_of_set = |file: &NewFile| file.path == CARD || set.contains(&file.path);
        (files, left_out) = files.into_iter().partition(is_of_set);
    }
    tell_left_out(&left_out, out)?;
    if files.is_empty() {
        return Err(Failure::usage(
            format!("{} has no files to push", arguments.folder.display()),
            "name the folder that `manifest.write` with `format: huggingface` or `model.write` wrote",
        ));
    }
    if repository.kind == RepositoryKind::Model && !files.iter().any(|file| file.path == CARD) {
        let card = model_card::of_folder(storage, &arguments.folder, &arguments.state.state, &repository)?;
        if arguments.dry_run {
            writeln!(out, "{CARD}, unless the repository has one:\n\n{}", card.trim_end())?;
            writeln!(out)?;
        }
        files.push(NewFile::unless_there(CARD, card.into_bytes()));
    }
    if arguments.dry_run {
        let row = |file: &NewFile| vec![escape_line(&file.path).into_owned(), file.size.to_string()];
        for line in lines(&files.iter().map(row).collect::<Vec<_>>()) {
            writeln!(out, "{line}")?;
        }
        let bytes: u64 = files.iter().map(|file| file.size).sum();
        let count = plural(files.len() as u64, "file");
        writeln!(
            out,
            "{count} of {bytes} bytes would be pushed to {repository}; those that the hub has are not sent"
        )?;
        return Ok(Exit::Done);
    }
    let push = Push {
        repository: &repository,
        files: &files,
        private: arguments.private,
        message: &arguments.message,
    };
    let mut progress = |line: &str| {
        tell(line);
        true
    };
    let hub = Hub::from_environment().map_err(failure)?;
    let Some(pushed) = hub.push(&push, &mut progress).map_err(failure)? else {
        return Err(Failure::Bug("a push that nobody cancelled was cancelled".into()));
    };
    let page = escape_line(&pushed.page);
    match pushed.files + pushed.deleted.len() {
        0 => writeln!(out, "{page} has all {} already", plural(files.len() as u64, "file"))?,
        _ => writeln!(
            out,
            "{page}: {} pushed, {} bytes sent, {} unchanged, {} deleted",
            plural(pushed.files as u64, "file"),
            pushed.sent,
            pushed.unchanged,
            pushed.deleted.len()
        )?,
    }
    Ok(Exit::Done)
}

/// Names files that are beside those of a set.
fn tell_left_out(files: &[NewFile], out: &mut dyn Write) -> Result<(), Failure> {
    for file in files.iter().take(NAMED) {
        let name = escape_line(&file.path);
        writeln!(out, "left out, as {SET} does not name it: {name}")?;
    }
    match files.len().checked_sub(NAMED) {
        None | Some(0) => {}
        Some(more) => writeln!(out, "left out, too: {}", plural(more as u64, "other file"))?,
    }
    Ok(())
}

fn failure(error: HubError) -> Failure {
    match error {
        HubError::Reference { message } => Failure::Usage { message, help: None },
        HubError::Unavailable { message, help } => Failure::Unreadable {
            message,
            help: Some(help).filter(|help| !help.is_empty()),
        },
        error @ HubError::File { .. } => Failure::unreadable(error),
    }
}
