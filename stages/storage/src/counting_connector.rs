//! Requests are counted where they leave, so that those that are sent again are counted, too.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};

use crate::counters::Counters;

/// Makes HTTP clients whose requests are counted.
#[derive(Debug)]
pub(crate) struct CountingConnector(pub Arc<Counters>);

impl HttpConnector for CountingConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(CountingService {
            client: ReqwestConnector::default().connect(options)?,
            counters: Arc::clone(&self.0),
        }))
    }
}

#[derive(Debug)]
struct CountingService {
    client: HttpClient,
    counters: Arc<Counters>,
}

type Answer<'a> = Pin<Box<dyn Future<Output = Result<HttpResponse, HttpError>> + Send + 'a>>;

impl HttpService for CountingService {
    fn call<'a, 'b>(&'a self, request: HttpRequest) -> Answer<'b>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(async move {
            let query = request.uri().query().unwrap_or_default();
            let bytes = request.body().content_length() as u64;
            self.counters.sent(request.method().as_str(), query, bytes);
            let answer = self.client.execute(request).await;
            let failed = match &answer {
                Ok(response) => response.status().is_server_error() || response.status().as_u16() == 429,
                Err(_) => true,
            };
            if failed {
                self.counters.failed();
            }
            answer
        })
    }
}
