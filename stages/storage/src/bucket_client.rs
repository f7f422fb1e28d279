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
use crate::location::{ObjectUrl, Scheme, is_loopback};
use crate::open_bucket::{AZURE_ENDPOINTS, Limits, S3_ENDPOINTS, first_of};

/// A client for the bucket of `url`, with what the environment sets of it.
pub(crate) fn build(
    url: &ObjectUrl,
    environment: &BTreeMap<String, String>,
    limits: &Limits,
    counters: &Arc<Counters>,
) -> object_store::Result<Arc<dyn ObjectStore>> {
    let connector = CountingConnector(Arc::clone(counters));
    match url.scheme() {
        Scheme::S3 => {
            let allow_http = first_of(environment, &S3_ENDPOINTS).is_some_and(is_loopback_http);
            let mut builder = AmazonS3Builder::new()
                .with_config(
                    AmazonS3ConfigKey::Client(ClientConfigKey::Timeout),
                    request_text(limits),
                )
                .with_config(
                    AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp),
                    allow_http.to_string(),
                );
            for (key, value) in keys::<AmazonS3ConfigKey>(environment, "AWS_") {
                builder = builder.with_config(key, value);
            }
            builder
                .with_bucket_name(url.bucket())
                .with_retry(retry_config(limits))
                .with_http_connector(connector)
                .build()
                .map(|store| Arc::new(store) as Arc<dyn ObjectStore>)
        }
        Scheme::Gs => {
            let allow_http = environment
                .get("GOOGLE_BASE_URL")
                .is_some_and(|endpoint| is_loopback_http(endpoint));
            let mut builder = GoogleCloudStorageBuilder::new()
                .with_config(GoogleConfigKey::Client(ClientConfigKey::Timeout), request_text(limits))
                .with_config(
                    GoogleConfigKey::Client(ClientConfigKey::AllowHttp),
                    allow_http.to_string(),
                );
            if let Some(path) = environment.get("SERVICE_ACCOUNT") {
                builder = builder.with_service_account_path(path);
            }
            for (key, value) in keys::<GoogleConfigKey>(environment, "GOOGLE_") {
                builder = builder.with_config(key, value);
            }
            builder
                .with_bucket_name(url.bucket())
                .with_retry(retry_config(limits))
                .with_http_connector(connector)
                .build()
                .map(|store| Arc::new(store) as Arc<dyn ObjectStore>)
        }
        Scheme::Az => {
            let allow_http = first_of(environment, &AZURE_ENDPOINTS).is_some_and(is_loopback_http);
            let mut builder = MicrosoftAzureBuilder::new()
                .with_config(AzureConfigKey::Client(ClientConfigKey::Timeout), request_text(limits))
                .with_config(
                    AzureConfigKey::Client(ClientConfigKey::AllowHttp),
                    allow_http.to_string(),
                );
            for (key, value) in keys::<AzureConfigKey>(environment, "AZURE_") {
                builder = builder.with_config(key, value);
            }
            builder
                .with_container_name(url.bucket())
                .with_retry(retry_config(limits))
                .with_http_connector(connector)
                .build()
                .map(|store| Arc::new(store) as Arc<dyn ObjectStore>)
        }
        Scheme::Https | Scheme::Http => {
            let options = ClientOptions::new()
                .with_timeout(limits.request)
                .with_allow_http(url.scheme() == Scheme::Http);
            HttpBuilder::new()
                .with_url(url.with_key("").to_string())
                .with_client_options(options)
                .with_retry(retry_config(limits))
                .with_http_connector(connector)
                .build()
                .map(|store| Arc::new(store) as Arc<dyn ObjectStore>)
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

fn request_text(limits: &Limits) -> String {
    format!("{} seconds", limits.request.as_secs())
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
