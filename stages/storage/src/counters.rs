//! What was asked of object storage: counted where requests leave, so that retries are counted, too.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};

/// Requests and bytes since the process began. A request that was sent again counts again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StorageCounts {
    /// Pages of listings.
    pub list: u64,
    pub head: u64,
    pub get: u64,
    /// Whole objects, parts, and the beginnings and ends of uploads in parts.
    pub put: u64,
    pub delete: u64,
    /// Requests that were answered by 429 or 5xx, or not at all: they are sent again, while there is time.
    pub failed: u64,
    /// Bytes of objects that came.
    pub bytes_read: u64,
    /// Bytes that were sent.
    pub bytes_written: u64,
}

impl StorageCounts {
    /// All requests.
    pub fn requests(&self) -> u64 {
        self.list + self.head + self.get + self.put + self.delete
    }
}

impl fmt::Display for StorageCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} requests (list {}, head {}, get {}, put {}, delete {}), of which {} failed and were sent again or given up; {} bytes read, {} written",
            self.requests(),
            self.list,
            self.head,
            self.get,
            self.put,
            self.delete,
            self.failed,
            self.bytes_read,
            self.bytes_written
        )
    }
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    list: AtomicU64,
    head: AtomicU64,
    get: AtomicU64,
    put: AtomicU64,
    delete: AtomicU64,
    failed: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
}

impl Counters {
    pub fn counts(&self) -> StorageCounts {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        StorageCounts {
            list: of(&self.list),
            head: of(&self.head),
            get: of(&self.get),
            put: of(&self.put),
            delete: of(&self.delete),
            failed: of(&self.failed),
            bytes_read: of(&self.bytes_read),
            bytes_written: of(&self.bytes_written),
        }
    }

    pub fn read(&self, bytes: usize) {
        self.bytes_read.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn sent(&self, request: &HttpRequest) {
        let query = request.uri().query().unwrap_or_default();
        let lists = ["list-type=", "comp=list", "prefix="]
            .iter()
            .any(|word| query.contains(word));
        let counter = match request.method().as_str() {
            "GET" if lists => &self.list,
            "PROPFIND" => &self.list,
            "GET" => &self.get,
            "HEAD" => &self.head,
            "DELETE" => &self.delete,
            _ => &self.put,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        let bytes = request.body().content_length() as u64;
        self.bytes_written.fetch_add(bytes, Ordering::Relaxed);
    }
}

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
            self.counters.sent(&request);
            let answer = self.client.execute(request).await;
            let failed = match &answer {
                Ok(response) => response.status().is_server_error() || response.status().as_u16() == 429,
                Err(_) => true,
            };
            if failed {
                self.counters.failed.fetch_add(1, Ordering::Relaxed);
            }
            answer
        })
    }
}
