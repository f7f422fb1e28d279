//! Requests are counted where they leave, so that those that are sent again are counted, too. Answers of listings are freed of
//! keys that the client would refuse with all others of their page.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};

use crate::counters::{Counters, is_listing};
use crate::listing_answer::readable_keys;

/// Makes HTTP clients whose requests are counted.
#[derive(Debug)]
pub(crate) struct CountingConnector(pub Arc<Counters>);

impl HttpConnector for CountingConnector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(counted(ReqwestConnector::default().connect(options)?, &self.0))
    }
}

/// A client whose requests are counted.
pub(crate) fn counted(client: HttpClient, counters: &Arc<Counters>) -> HttpClient {
    HttpClient::new(CountingService {
        client,
        counters: Arc::clone(counters),
    })
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
            let lists = request.method().as_str() == "GET" && is_listing(query);
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
            match answer {
                Ok(response) if lists && response.status().is_success() => {
                    let (head, body) = response.into_parts();
                    let readable = readable_keys(&body.bytes().await?, &mut |key| self.counters.left_out(key));
                    Ok(HttpResponse::from_parts(head, readable.into()))
                }
                answer => answer,
            }
        })
    }
}
