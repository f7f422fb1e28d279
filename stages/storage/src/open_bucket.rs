//! Makes the client of a bucket from the environment.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use object_store::ObjectStore;

use crate::aws_profile;
#[cfg(feature = "object-store")]
use crate::bucket_client;
use crate::counters::Counters;
#[cfg(feature = "object-store")]
use crate::error::of_client;
use crate::error::{StorageError, StorageFault};
#[cfg(feature = "object-store")]
use crate::hub_access::HubAccess;
use crate::location::{ObjectUrl, Scheme};

/// Time and retries of requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Of one request with its answer.
    pub request: Duration,
    /// After a request first failed, it is sent again for so long.
    pub retry: Duration,
    /// Most times that a request is sent again.
    pub retries: usize,
}

impl Limits {
    /// # Errors
    /// When a variable holds no whole number of seconds.
    pub fn of(environment: &BTreeMap<String, String>) -> Result<Limits, StorageError> {
        let number = |name: &str, default: u64| match environment.get(name) {
            None => Ok(default),
            Some(text) => text
                .trim()
                .parse()
                .ok()
                .filter(|number| (1..=86_400).contains(number))
                .ok_or_else(|| {
                    let message = format!("the environment variable {name} must be a whole number from 1 to 86400");
                    StorageError::new(StorageFault::Other, message)
                }),
        };
        Ok(Limits {
            request: Duration::from_secs(number("FLOW_STORAGE_TIMEOUT_SECONDS", 60)?),
            retry: Duration::from_secs(number("FLOW_STORAGE_RETRY_SECONDS", 120)?),
            retries: number("FLOW_STORAGE_RETRIES", 10)? as usize,
        })
    }

    /// After which a request with all its retries is given up.
    pub fn whole(&self) -> Duration {
        self.retry + 2 * self.request
    }
}

/// Values of the environment that must not be in a message.
pub(crate) fn secrets(environment: &BTreeMap<String, String>) -> Vec<String> {
    let is_secret = |name: &str| {
        let of_cloud = ["AWS_", "GOOGLE_", "AZURE_"]
            .iter()
            .any(|prefix| name.starts_with(prefix));
        of_cloud && ["KEY", "SECRET", "TOKEN", "SAS"].iter().any(|word| name.contains(word)) && !name.ends_with("_FILE")
    };
    let long = environment
        .iter()
        .filter(|(name, value)| is_secret(name) && value.len() >= 4);
    long.map(|(_, value)| value.clone()).collect()
}

/// The client of the bucket of `url`.
#[cfg(feature = "object-store")]
pub(crate) fn open(
    url: &ObjectUrl,
    environment: &BTreeMap<String, String>,
    limits: &Limits,
    counters: &Arc<Counters>,
    secrets: &mut Vec<String>,
) -> Result<Arc<dyn ObjectStore>, StorageError> {
    let bucket_url = url.with_key("").to_string();
    let s3 = (url.scheme() == Scheme::S3).then(|| with_profile(environment));
    if let Some(environment) = &s3 {
        *secrets = self::secrets(environment);
        check_s3_credentials(&bucket_url, environment)?;
    }
    let hub = HubAccess::from_variables(|name| {
        let value = environment.get(name).filter(|value| !value.trim().is_empty());
        value.cloned()
    });
    let hub = Some(hub).filter(|hub| hub.serves(url));
    if hub.as_ref().is_some_and(|hub| hub.offline) {
        let said = "HF_HUB_OFFLINE is set";
        return Err(StorageError::of(StorageFault::Unavailable, &url.to_string(), said));
    }
    secrets.extend(hub.iter().filter_map(|hub| Some(hub.token.as_ref()?.secret.clone())));
    let environment = s3.as_ref().unwrap_or(environment);
    bucket_client::build(url, environment, limits, counters, hub)
        .map_err(|error| of_client(&bucket_url, &error, secrets))
}

/// A program without clients refuses every URL.
#[cfg(not(feature = "object-store"))]
pub(crate) fn open(
    url: &ObjectUrl,
    _: &BTreeMap<String, String>,
    _: &Limits,
    _: &Arc<Counters>,
    _: &mut Vec<String>,
) -> Result<Arc<dyn ObjectStore>, StorageError> {
    let said = "this program was built without the feature `object-store`";
    Err(StorageError::of(StorageFault::Unsupported, &url.to_string(), said))
}

pub(crate) const S3_ENDPOINTS: [&str; 3] = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];
pub(crate) const AZURE_ENDPOINTS: [&str; 2] = ["AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"];
const AZURE_ACCOUNTS: [&str; 2] = ["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_ACCOUNT_NAME"];

pub(crate) fn first_of<'e>(environment: &'e BTreeMap<String, String>, names: &[&str]) -> Option<&'e str> {
    names.iter().find_map(|name| environment.get(*name)).map(String::as_str)
}

/// Which service has the bucket of `url`, as far as the URL does not say so: buckets of two servers, and containers of two
/// accounts, may have one name. Empty for S3 and Google Cloud Storage themselves.
pub(crate) fn service_of(url: &ObjectUrl, environment: &BTreeMap<String, String>) -> String {
    let endpoint = match url.scheme() {
        Scheme::S3 => first_of(&with_profile(environment), &S3_ENDPOINTS).map(str::to_owned),
        Scheme::Gs => environment.get("GOOGLE_BASE_URL").cloned(),
        Scheme::Az => {
            let [endpoint, account] = [&AZURE_ENDPOINTS[..], &AZURE_ACCOUNTS]
                .map(|names| first_of(environment, names).unwrap_or_default().to_owned());
            Some(format!("{endpoint}/{account}"))
        }
        Scheme::Https | Scheme::Http => None,
    };
    endpoint.unwrap_or_default().trim_end_matches('/').to_owned()
}

/// The environment, and what the profile of the AWS command line sets beside it. Keys are taken from one of the two.
fn with_profile(environment: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let mut all = environment.clone();
    let has_keys = environment.contains_key("AWS_ACCESS_KEY_ID");
    for (name, value) in aws_profile::settings(environment) {
        let is_region = name == "AWS_REGION" && environment.contains_key("AWS_DEFAULT_REGION");
        let is_endpoint = name == "AWS_ENDPOINT_URL" && environment.contains_key("AWS_ENDPOINT");
        let is_key = !matches!(name.as_str(), "AWS_REGION" | "AWS_ENDPOINT_URL");
        if !(is_region || is_endpoint || is_key && has_keys) {
            all.entry(name).or_insert(value);
        }
    }
    all
}

/// Says at once that there are no credentials, where the client would wait for the metadata service of a cloud's machine.
fn check_s3_credentials(bucket_url: &str, environment: &BTreeMap<String, String>) -> Result<(), StorageError> {
    let given = [
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_METADATA_ENDPOINT",
    ];
    let is_true = |name: &str| {
        environment
            .get(name)
            .is_some_and(|value| value.eq_ignore_ascii_case("true"))
    };
    if given.iter().any(|name| environment.contains_key(*name)) || is_true("AWS_SKIP_SIGNATURE") {
        return Ok(());
    }
    let service = SocketAddr::from(([169, 254, 169, 254], 80));
    if !is_true("AWS_EC2_METADATA_DISABLED") && TcpStream::connect_timeout(&service, Duration::from_secs(1)).is_ok() {
        return Ok(());
    }
    let said = "neither in the environment nor in ~/.aws, and this machine is not in AWS; AWS_SKIP_SIGNATURE=true reads public buckets";
    Err(StorageError::of(StorageFault::Credentials, bucket_url, said))
}
