//! Models of the hub, for stages.

use std::path::{Path, PathBuf};

use flow_hub::{Hub, HubError, HubReference, HubToken};
use flow_kind::{Context, Secret, StageError};
use flow_model::checkpoint::OpenModel;

/// The hub of the environment, with `token` where one is given, else with that of the environment.
///
/// # Errors
/// Where no environment variable gives the folder of the hub's cache.
pub fn hub_with_token(token: Option<&Secret>) -> Result<Hub, HubError> {
    let mut hub = Hub::from_environment()?;
    if let Some(token) = token {
        hub.token = Some(HubToken {
            secret: token.reveal().trim().to_owned(),
            from: format!("the parameter `{}`", token.name()),
        });
    }
    Ok(hub)
}

/// Whether the model is one of the hub.
pub fn is_of_hub(model: &Path) -> bool {
    model.to_str().and_then(HubReference::parse).is_some()
}

/// The local path of the model that a stage's `setting` names: a path, the URL of an object storage, or a model of the hub, which
/// is downloaded into the hub's cache. The screen shows the download, which ends where the run does.
///
/// # Errors
/// If the hub or the storage does not give the model, and if the run ends.
pub fn local_model(
    context: &Context,
    setting: &str,
    model: &Path,
    token: Option<&Secret>,
) -> Result<PathBuf, StageError> {
    let failed = |error| hub_error(setting, error);
    let reference = model.to_str().and_then(HubReference::parse).transpose();
    let Some(reference) = reference.map_err(failed)? else {
        return context.local_copy(setting, model, &OpenModel::is_part);
    };
    let fetched = hub_with_token(token).map_err(failed)?.fetch(&reference, &mut |line| {
        context.report(serde_json::json!({ "line": line }));
        !context.cancel.is_set()
    });
    fetched.map_err(failed)?.ok_or_else(|| StageError::failed("stopped"))
}

/// The error of a stage about a reference that is the value of `setting`.
pub(crate) fn hub_error(setting: &str, error: HubError) -> StageError {
    match error {
        HubError::Reference { message } => StageError::setting(setting, message),
        HubError::Unavailable { message, help } => StageError::failed(message).with_help(help),
        error @ HubError::File { .. } => StageError::failed(error),
    }
}
