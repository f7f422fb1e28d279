//! How the Hugging Face hub is reached, by the environment variables of `huggingface_hub`.

use std::path::{Path, PathBuf};

use crate::location::ObjectUrl;

/// The address of the hub, the token for it, and whether it may be asked at all.
#[derive(Clone)]
pub struct HubAccess {
    /// Such as `https://huggingface.co`, without a slash at the end.
    pub endpoint: String,
    pub token: Option<HubToken>,
    /// Nothing is asked of the hub.
    pub offline: bool,
    /// The folder of the hub's programs; none where no variable gives it.
    pub home: Option<PathBuf>,
}

/// A token for the hub.
#[derive(Clone)]
pub struct HubToken {
    pub secret: String,
    /// The variable or file that it was read from, for messages.
    pub from: String,
}

impl HubAccess {
    /// By `HF_ENDPOINT`, `HF_TOKEN` or the token file, `HF_HOME` and `HF_HUB_OFFLINE`, which `variable` looks up. It gives none for
    /// one that is empty.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> HubAccess {
        let user_cache = || {
            let folder = variable("XDG_CACHE_HOME").map(PathBuf::from);
            folder.or_else(|| variable("HOME").map(|home| Path::new(&home).join(".cache")))
        };
        let home = variable("HF_HOME").map(PathBuf::from);
        let home = home.or_else(|| user_cache().map(|cache| cache.join("huggingface")));
        let token_file = variable("HF_TOKEN_PATH").map(PathBuf::from);
        let token_file = token_file.or_else(|| home.as_ref().map(|home| home.join("token")));
        let named = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"]
            .into_iter()
            .find_map(|name| Some((variable(name)?, name.to_owned())));
        let kept = || {
            let file = token_file?;
            Some((std::fs::read_to_string(&file).ok()?, file.display().to_string()))
        };
        let token = named.or_else(kept).map(|(secret, from)| HubToken {
            secret: secret.trim().to_owned(),
            from,
        });
        let yes = |value: String| matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on");
        HubAccess {
            endpoint: variable("HF_ENDPOINT")
                .map(|endpoint| endpoint.trim_end_matches('/').to_owned())
                .unwrap_or_else(|| "https://huggingface.co".into()),
            token: token.filter(|token| !token.secret.is_empty()),
            offline: variable("HF_HUB_OFFLINE").is_some_and(yes),
            home,
        }
    }

    /// Whether a URL is of the hub's server.
    pub(crate) fn serves(&self, url: &ObjectUrl) -> bool {
        url.with_key("").to_string() == origin(&self.endpoint)
    }
}

/// `https://host:port` of an address.
pub fn origin(address: &str) -> &str {
    let host = address.find("://").map_or(0, |at| at + 3);
    let end = address[host..]
        .find(['/', '?', '#'])
        .map_or(address.len(), |at| host + at);
    &address[..end]
}
