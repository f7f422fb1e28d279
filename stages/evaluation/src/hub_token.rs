//! The hub, for stages with a setting for its token.

use flow_hub::{Hub, HubError, HubToken};
use flow_kind::Secret;

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
