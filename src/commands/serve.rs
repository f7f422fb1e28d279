//! `flow serve`: speech to text over HTTP, until a signal stops it.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use flow_model::checkpoint::{OpenModel, base_and_adapter};
use flow_runtime::run::is_ignored;
use flow_service::engine::{EngineError, ModelSettings};
use flow_service::http::{ServeError, ServeSettings, Server, SettingsError, StopHandle};
use flow_storage::Storage;
use flow_training::init::not_there;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_shutdown};
use signal_hook::iterator::Signals;

use super::recordings::carried;
use crate::arguments::{ServeArguments, VERSION};
use flow_cli::failure::{Exit, Failure};
use flow_cli::fetch::{local_model, tell};

/// The default model, relative to the bundled files, and its name.
const BUNDLED: &str = "configs/models/small.nemo";
const BUNDLED_NAME: &str = "small";

pub fn serve(storage: &Storage, arguments: &ServeArguments, out: &mut dyn Write) -> Result<Exit, Failure> {
    let mut settings = settings(arguments).map_err(wrong_setting)?;
    if settings.engine.models.is_empty() {
        tell("no --model is given: the bundled small model, which is made for trying things out, is used");
        settings.engine.models.push(bundled()?);
    }
    // Before models are fetched, which may take long.
    let checked = settings.engine.check();
    checked.map_err(|error| serve_failure(error.into()))?;
    if let Some(warning) = settings.engine.precision.warning() {
        tell(&format!("warning: {warning}"));
    }
    settings.http.check().map_err(wrong_setting)?;
    fetch_models(storage, &mut settings.engine.models)?;
    let server = Server::bind(storage, settings, VERSION, Arc::new(tell)).map_err(serve_failure)?;
    for warning in server.warnings() {
        tell(&format!("warning: {warning}"));
    }
    stop_on_signals(server.stop_handle())?;
    writeln!(out, "listening on {}", server.url())?;
    if let Some(address) = server.wyoming_address() {
        writeln!(out, "listening on tcp://{address} (Wyoming protocol)")?;
    }
    out.flush()?;
    server.serve().map_err(serve_failure)?;
    Ok(Exit::Done)
}

/// The settings of the file, overridden by those of the command line.
fn settings(arguments: &ServeArguments) -> Result<ServeSettings, SettingsError> {
    let mut settings = match &arguments.config {
        Some(file) => ServeSettings::read(file)?,
        None => ServeSettings::default(),
    };
    let engine = &mut settings.engine;
    if !arguments.model.is_empty() {
        engine.models = arguments.model.iter().map(|model| named_model(model)).collect();
    }
    engine.diarization |= arguments.diarize;
    if arguments.known_speakers.is_some() {
        engine.known_speakers.clone_from(&arguments.known_speakers);
    }
    engine.device = arguments.device.unwrap_or(engine.device);
    engine.precision = arguments.precision.map_or(engine.precision, Into::into);
    engine.max_duration = arguments.max_duration.unwrap_or(engine.max_duration);
    engine.max_queue = arguments.max_queue.unwrap_or(engine.max_queue);
    let http = &mut settings.http;
    if let Some(listen) = &arguments.listen {
        http.listen.clone_from(listen);
    }
    if arguments.wyoming.is_some() {
        http.wyoming.clone_from(&arguments.wyoming);
    }
    for (given, setting) in [
        (&arguments.keys, &mut http.keys),
        (&arguments.tls_cert, &mut http.tls_cert),
        (&arguments.tls_key, &mut http.tls_key),
    ] {
        if given.is_some() {
            setting.clone_from(given);
        }
    }
    for (given, setting) in [
        (&arguments.cors, &mut http.cors),
        (&arguments.allowed_host, &mut http.allowed_hosts),
    ] {
        if !given.is_empty() {
            setting.clone_from(given);
        }
    }
    if arguments.jobs.is_some() {
        settings.jobs.folder.clone_from(&arguments.jobs);
    }
    http.accept_any_model |= arguments.accept_any_model;
    http.log_requests |= arguments.log_requests;
    http.max_upload = arguments
        .max_upload
        .map_or(http.max_upload, |mebibytes| mebibytes << 20);
    http.drain_timeout = arguments.drain_timeout.unwrap_or(http.drain_timeout);
    Ok(settings)
}

/// Fetches those of the hub and in object storage; also models that are loaded later have to be there, so that errors are
/// reported at the start and not to a client.
pub(super) fn fetch_models(storage: &Storage, models: &mut [ModelSettings]) -> Result<(), Failure> {
    for model in models {
        if let Some(reference) = model.path.to_str() {
            model.path = local_model(storage, reference, true)?;
        }
        if !OpenModel::exists(&model.path) {
            let missing = not_there(&model.path.to_string_lossy());
            return Err(Failure::unreadable(format!("the model `{}`: {missing}", model.name)));
        }
    }
    Ok(())
}

/// Reads `NAME=MODEL` or `MODEL`. Without a name it is that of the hub, OWNER/NAME, or that of the file or folder.
pub(super) fn named_model(given: &str) -> ModelSettings {
    let named = given.split_once('=').filter(|(name, model)| {
        // A path may contain `=`, too.
        !name.is_empty() && !name.contains(['/', '\\', ':']) && !model.is_empty() && !Path::new(given).exists()
    });
    let (name, model) = named.map_or_else(|| (model_name(given), given), |(name, model)| (name.to_owned(), model));
    ModelSettings {
        name,
        path: PathBuf::from(model),
        language_prior: None,
    }
}

fn model_name(model: &str) -> String {
    let path = Path::new(model);
    if let Some((base, adapter)) = base_and_adapter(path) {
        let [base, adapter] = [base, adapter].map(|path| model_name(&path.to_string_lossy()));
        return format!("{base}+{adapter}");
    }
    if let Some(reference) = model.strip_prefix("hf://") {
        let parts: Vec<&str> = reference.split('/').take(2).collect();
        return parts.join("/").split('@').next().unwrap_or_default().to_owned();
    }
    let name = if path.extension().is_some_and(|extension| extension == "nemo") {
        path.file_stem()
    } else {
        path.file_name()
    };
    name.map_or_else(|| model.to_owned(), |name| name.to_string_lossy().into_owned())
}

/// The small model that the program carries.
fn bundled() -> Result<ModelSettings, Failure> {
    let pipeline = carried("transcribe")?;
    let folder = pipeline.parent().and_then(Path::parent).unwrap_or(&pipeline);
    Ok(ModelSettings {
        name: BUNDLED_NAME.to_owned(),
        path: folder.join(BUNDLED),
        language_prior: None,
    })
}

/// The first signal stops the service gently; a second SIGINT or SIGTERM ends it at once.
fn stop_on_signals(stop: StopHandle) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::unreadable(format!("cannot handle signals: {error}"));
    let armed = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first signal finds the flag unset, and arms it.
        register_conditional_shutdown(signal, 128 + signal, Arc::clone(&armed)).map_err(failed)?;
        register(signal, Arc::clone(&armed)).map_err(failed)?;
    }
    // Under nohup it stays ignored.
    let hang_up = (!is_ignored(SIGHUP)).then_some(SIGHUP);
    let mut signals = Signals::new([SIGINT, SIGTERM].into_iter().chain(hang_up)).map_err(failed)?;
    let wait = move || {
        for _ in signals.forever() {
            tell("stopping: what was taken is finished, other requests are refused");
            stop.stop();
        }
    };
    let thread = std::thread::Builder::new().name("signals".to_owned()).spawn(wait);
    thread.map(|_| ()).map_err(failed)
}

fn wrong_setting(error: SettingsError) -> Failure {
    serve_failure(error.into())
}

pub(super) fn serve_failure(error: ServeError) -> Failure {
    let message = error.to_string();
    match error {
        ServeError::Settings(_) | ServeError::Engine(EngineError::Setting { .. }) => {
            Failure::usage(message, "`flow serve --help` and docs/service.md list the settings")
        }
        ServeError::Listen { .. } => {
            Failure::usage(message, "name another address with --listen, such as 127.0.0.1:8001")
        }
        ServeError::Uploads { .. } => Failure::usage(message, "name another folder in serve.yaml: http.upload_folder"),
        ServeError::Engine(_) | ServeError::Failed(_) => Failure::unreadable(message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(model: &str) -> (String, String) {
        let model = named_model(model);
        (model.name, model.path.to_string_lossy().into_owned())
    }

    #[test]
    fn models_have_the_name_that_is_given_or_their_own() {
        for (argument, name, path) in [
            ("models/small.nemo", "small", "models/small.nemo"),
            ("work/model/", "model", "work/model/"),
            ("english=models/en.nemo", "english", "models/en.nemo"),
            (
                "hf://nvidia/parakeet@main/a.nemo",
                "nvidia/parakeet",
                "hf://nvidia/parakeet@main/a.nemo",
            ),
            ("big=hf://nvidia/parakeet", "big", "hf://nvidia/parakeet"),
            ("models/lr=3.nemo", "lr=3", "models/lr=3.nemo"),
            ("=a.nemo", "=a", "=a.nemo"),
            (
                "a.nemo+tests/data/golden/adapters/lora_qkvo",
                "a+lora_qkvo",
                "a.nemo+tests/data/golden/adapters/lora_qkvo",
            ),
        ] {
            assert_eq!(given(argument), (name.to_owned(), path.to_owned()), "{argument}");
        }
    }

    #[test]
    fn the_command_line_counts_more_than_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("serve.yaml");
        let text = "engine: {max_queue: 7, max_duration: 60, models: [{name: a, path: a.nemo}]}\n\
                    http: {listen: '127.0.0.1:1', log_requests: true, cors: ['https://a.example']}\n";
        std::fs::write(&file, text).unwrap();
        let arguments = ServeArguments {
            config: Some(file),
            max_queue: Some(3),
            max_upload: Some(2),
            listen: Some("127.0.0.1:0".to_owned()),
            model: vec!["b.nemo".to_owned()],
            diarize: true,
            ..ServeArguments::default()
        };
        let settings = settings(&arguments).unwrap();
        assert_eq!((settings.engine.max_queue, settings.engine.max_duration), (3, 60.0));
        assert_eq!(settings.engine.models[0].name, "b");
        assert!(settings.engine.diarization && settings.http.log_requests);
        assert_eq!(settings.http.listen, "127.0.0.1:0");
        assert_eq!(settings.http.max_upload, 2 << 20);
        assert_eq!(settings.http.cors, ["https://a.example"]);
        assert_eq!(settings.http.keys, None);
    }

    #[test]
    fn wrong_numbers_are_told_before_a_model_is_looked_for() {
        let mut arguments = ServeArguments {
            model: vec!["hf://no-repository".to_owned()],
            max_queue: Some(0),
            ..ServeArguments::default()
        };
        let mut out = Vec::new();
        let error = serve(&Storage::default(), &arguments, &mut out).unwrap_err();
        assert_eq!(error.exit(), Exit::Usage);
        assert!(error.to_string().contains("`engine.max_queue`"), "{error}");
        arguments.max_queue = None;
        arguments.drain_timeout = Some(0.0);
        let error = serve(&Storage::default(), &arguments, &mut out).unwrap_err();
        assert_eq!(error.exit(), Exit::Usage);
        assert!(error.to_string().contains("`http.drain_timeout`"), "{error}");
        assert!(out.is_empty());
    }
}
