//! The clients of the services: S3, Google Cloud Storage, Azure's blobs, and servers that speak plain HTTP.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::{BackoffConfig, ClientConfigKey, ClientOptions, ObjectStore, RetryConfig};

use crate::counters::Counters;
use crate::counting_connector::CountingConnector;
use crate::hub_access::HubAccess;
use crate::hub_service::HubConnector;
use crate::location::{ObjectUrl, Scheme, is_loopback};
use crate::open_bucket::{AZURE_ENDPOINTS, Limits, S3_ENDPOINTS, first_of};

/// A client for the bucket of `url`, with what the environment sets of it. `hub` is how its server is reached, where that is the
/// Hugging Face hub.
pub(crate) fn build(
    url: &ObjectUrl,
    environment: &BTreeMap<String, String>,
    limits: &Limits,
    counters: &Arc<Counters>,
    hub: Option<HubAccess>,
) -> object_store::Result<Arc<dyn ObjectStore>> {
    let connector = CountingConnector(Arc::clone(counters));
    // The builders have the same methods, and no trait for them.
    macro_rules! cloud {
        ($builder:expr, $key:ident, $prefix:literal, $endpoints:expr, $with_name:ident) => {{
            let allow_http = first_of(environment, $endpoints).is_some_and(is_loopback_http);
            let timeout = format!("{} seconds", limits.request.as_secs());
            let builder = $builder
                .with_config($key::Client(ClientConfigKey::Timeout), timeout)
                .with_config($key::Client(ClientConfigKey::AllowHttp), allow_http.to_string())
                .with_retry(retry_config(limits))
                .with_http_connector(connector);
            let builder = keys::<$key>(environment, $prefix)
                .into_iter()
                .fold(builder, |builder, (key, value)| builder.with_config(key, value));
            let store = builder.$with_name(url.bucket()).build();
            store.map(|store| Arc::new(store) as Arc<dyn ObjectStore>)
        }};
    }
    match url.scheme() {
        Scheme::S3 => {
            let builder = AmazonS3Builder::new();
            cloud!(builder, AmazonS3ConfigKey, "AWS_", &S3_ENDPOINTS, with_bucket_name)
        }
        Scheme::Gs => {
            let mut builder = GoogleCloudStorageBuilder::new();
            if let Some(path) = environment.get("SERVICE_ACCOUNT") {
                builder = builder.with_service_account_path(path);
            }
            cloud!(
                builder,
                GoogleConfigKey,
                "GOOGLE_",
                &["GOOGLE_BASE_URL"],
                with_bucket_name
            )
        }
        Scheme::Az => {
            let builder = MicrosoftAzureBuilder::new();
            cloud!(builder, AzureConfigKey, "AZURE_", &AZURE_ENDPOINTS, with_container_name)
        }
        Scheme::Https | Scheme::Http => {
            let options = ClientOptions::new()
                .with_timeout(limits.request)
                .with_allow_http(url.scheme() == Scheme::Http);
            let builder = HttpBuilder::new()
                .with_url(url.with_key("").to_string())
                .with_client_options(options)
                .with_retry(retry_config(limits));
            let builder = match hub {
                None => builder.with_http_connector(connector),
                Some(hub) => builder.with_http_connector(HubConnector {
                    hub,
                    scheme: url.scheme(),
                    limits: *limits,
                    counters: Arc::clone(counters),
                }),
            };
            builder.build().map(|store| Arc::new(store) as Arc<dyn ObjectStore>)
        }
    }
}

fn retry_config(limits: &Limits) -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(15),
            base: 2.0,
        },
        max_retries: limits.retries,
        retry_timeout: limits.retry,
    }
}

/// What the environment sets of a cloud's client, by its usual names.
fn keys<K: FromStr>(environment: &BTreeMap<String, String>, prefix: &str) -> Vec<(K, String)> {
    let of_cloud = environment.iter().filter(|(name, _)| name.starts_with(prefix));
    let parsed = of_cloud.filter_map(|(name, value)| Some((name.to_ascii_lowercase().parse().ok()?, value.clone())));
    parsed.collect()
}

fn is_loopback_http(endpoint: &str) -> bool {
    let host = endpoint
        .strip_prefix("http://")
        .map(|rest| rest.split('/').next().unwrap_or(rest));
    host.is_some_and(is_loopback)
}
