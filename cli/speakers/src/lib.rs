//! `flow speakers`: a store of voices over recordings.

mod add;
mod apply;
mod arguments;
mod correct;
mod files;
mod history;
mod look;
#[cfg(test)]
mod tests;
mod voice;

use std::io::Write;

use flow_cli::failure::{Exit, Failure};

pub use arguments::{
    AddArguments, AppliedFormat, ApplyArguments, ExportArguments, HistoryArguments, ListArguments, ReviewArguments,
    ShowArguments, VoicesArguments, VoicesCommand,
};

impl VoicesArguments {
    /// Whether the output is for programs.
    pub fn is_json(&self) -> bool {
        match &self.command {
            VoicesCommand::List(arguments) => arguments.json,
            VoicesCommand::Show(arguments) => arguments.json,
            VoicesCommand::Review(arguments) => arguments.json,
            _ => false,
        }
    }
}

/// Runs a command.
///
/// # Errors
/// If an option is wrong, there is no such voice or speaker, the store is damaged, or a file cannot be read or written.
pub fn voices(arguments: &VoicesArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let store = &arguments.store;
    match &arguments.command {
        VoicesCommand::Add(arguments) => return add::add(store, arguments, out),
        VoicesCommand::Apply(arguments) => return apply::apply(store, arguments, out),
        VoicesCommand::List(arguments) => look::list(store, arguments.json, out),
        VoicesCommand::Show(arguments) => look::show(store, arguments, out),
        VoicesCommand::Review(arguments) => look::review(store, arguments, out),
        VoicesCommand::Name { voice, name } => correct::name(store, voice, name, out),
        VoicesCommand::Merge { voice, other } => correct::merge(store, voice, other, out),
        VoicesCommand::Move { speaker, voice } => correct::shift(store, speaker, voice, out),
        VoicesCommand::Forget { voice } => correct::forget(store, voice, out),
        VoicesCommand::History(arguments) => history::history(store, arguments.limit, out),
        VoicesCommand::Undo { change } => history::undo(store, *change, out),
        VoicesCommand::Export(arguments) => apply::export(store, arguments, out),
    }?;
    Ok(Exit::Done)
}
