//! `flow ui`: the state directory in a browser, until a signal ends it.

use std::io::{self, ErrorKind, Write};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use flow_runtime::run::is_ignored;
use flow_service::http::{ServeSettings, Service};
use flow_storage::{Storage, is_url};
use flow_store::Store;
use flow_ui::{Settings, server, site};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tokio::sync::oneshot;

use super::serve::{fetch_models, named_model, serve_failure};
use crate::arguments::{UiArguments, VERSION};
use flow_cli::failure::{Exit, Failure};
use flow_cli::fetch::tell;

const USUAL_PORT: u16 = 8001;

pub fn ui(storage: &Storage, arguments: &UiArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    if let Some(folder) = arguments.recordings.iter().find(|folder| !folder.is_dir()) {
        return Err(Failure::usage(
            format!("--recordings {}: there is no such folder", folder.display()),
            "name the folder that `flow transcribe` was given",
        ));
    }
    for file in arguments.files.iter().chain(&arguments.transcripts) {
        if !file.exists() {
            return Err(Failure::usage(
                format!("{} does not exist", file.display()),
                "name Parquet files or files of JSON lines; transcripts go behind --transcripts",
            ));
        }
    }
    let state = &arguments.state.state;
    if (is_url(state) || state.exists()) && !Store::is_there(storage, state)? {
        return Err(Failure::usage(
            format!("{} is not a state directory of flow", state.display()),
            "name it with --state",
        ));
    }
    let listener = listen(arguments.listen)?;
    let address = listener.local_addr()?;
    let corrections = arguments.allow_edit.then(|| {
        let file = arguments.corrections.clone();
        file.unwrap_or_else(|| "corrections.parquet".into())
    });
    let settings = Settings {
        storage: storage.clone(),
        state: state.clone(),
        files: arguments.files.clone(),
        shards: arguments.shards.clone(),
        transcripts: arguments.transcripts.clone(),
        recordings: arguments.recordings.clone(),
        corrections,
    };
    let service = service(storage, arguments, address)?;
    let (router, url) = site(settings, address, service.as_ref())?;
    let stop = stop_on_signals()?;
    writeln!(out, "open {url}")?;
    out.flush()?;
    server::serve(listener, router, service, stop).map_err(serve_failure)?;
    Ok(Exit::Done)
}

/// What transcribes on the page of transcripts, where a model is given.
fn service(storage: &Storage, arguments: &UiArguments, address: SocketAddr) -> Result<Option<Service>, Failure> {
    if arguments.model.is_empty() {
        return Ok(None);
    }
    let mut settings = ServeSettings::default();
    settings.engine.models = arguments.model.iter().map(|model| named_model(model)).collect();
    settings.engine.diarization = arguments.diarize;
    let checked = settings.engine.check();
    checked.map_err(|error| serve_failure(error.into()))?;
    fetch_models(storage, &mut settings.engine.models)?;
    let service = Service::new(storage, settings, address, VERSION, Arc::new(tell));
    service.map(Some).map_err(serve_failure)
}

fn listen(wanted: Option<SocketAddr>) -> Result<TcpListener, Failure> {
    let address = wanted.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], USUAL_PORT)));
    if !address.ip().is_loopback() {
        return Err(Failure::usage(
            format!("--listen {address}: `flow ui` is for this machine alone"),
            "listen on 127.0.0.1, and reach it from another machine by `ssh -L 8001:127.0.0.1:8001 HOST`",
        ));
    }
    let listened = match TcpListener::bind(address) {
        Err(error) if error.kind() == ErrorKind::AddrInUse && wanted.is_none() => {
            TcpListener::bind(SocketAddr::new(address.ip(), 0))
        }
        listened => listened,
    };
    listened.map_err(|error| {
        Failure::usage(
            format!("cannot listen on {address}: {error}"),
            "name another address with --listen, such as 127.0.0.1:0",
        )
    })
}

/// Notified by the signal handler.
fn stop_on_signals() -> Result<oneshot::Receiver<()>, Failure> {
    let failed = |error: io::Error| Failure::unreadable(format!("cannot handle signals: {error}"));
    let (sender, receiver) = oneshot::channel();
    // Under nohup it stays ignored.
    let hang_up = (!is_ignored(SIGHUP)).then_some(SIGHUP);
    let mut signals = Signals::new([SIGINT, SIGTERM].into_iter().chain(hang_up)).map_err(failed)?;
    let wait = move || {
        if signals.forever().next().is_some() {
            // The receiver lives as long as the server.
            let _ = sender.send(());
        }
    };
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn(wait)
        .map_err(failed)?;
    Ok(receiver)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_machine_is_listened_on_and_a_port_that_is_taken_is_told() {
        for wrong in ["0.0.0.0:0", "192.0.2.1:8001", "[::]:0"] {
            assert_eq!(listen(Some(wrong.parse().unwrap())).unwrap_err().exit(), Exit::Usage);
        }
        let first = listen(Some("127.0.0.1:0".parse().unwrap())).unwrap();
        let taken = listen(Some(first.local_addr().unwrap())).unwrap_err();
        assert!(taken.to_string().contains("cannot listen"), "{taken}");
    }
}
