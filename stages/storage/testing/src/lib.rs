//! A server of object storage for tests: S3's protocol over a folder, on a free port of this machine, with faults on demand.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use hyper::body::{Frame, Incoming};
use hyper::header::{CONTENT_LENGTH, CONTENT_RANGE};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};
use s3s::Body;
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;

use flow_storage::Storage;

/// The key that the server knows.
pub const ACCESS_KEY_ID: &str = "test-key";
/// Its secret.
pub const SECRET_ACCESS_KEY: &str = "test-secret-hush";

/// A port for a listener that is bound later, another one at each call. It is below the range from which systems choose ports
/// themselves, so that neither a connection nor a server of another test takes it meanwhile.
///
/// # Panics
/// If all ports are in use.
#[must_use]
pub fn free_port() -> u16 {
    const FIRST: u16 = 10_000;
    const PORTS: u16 = 20_000;
    static CALLS: AtomicU16 = AtomicU16::new(0);
    // Processes that are started one after another begin far from each other.
    let first = (u64::from(std::process::id()) * 97 % u64::from(PORTS)) as u16;
    (0..PORTS)
        .map(|_| FIRST + (first + CALLS.fetch_add(1, Ordering::Relaxed) % PORTS) % PORTS)
        .find(|port| std::net::TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .expect("a free port")
}

/// What happens to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The connection is cut without an answer.
    Drop,
    /// This status, with the body that S3 gives with it.
    Status(u16),
    /// Half of the answer's body comes, then the connection is cut.
    Truncate,
    /// What is asked for is done later by so much.
    Delay(Duration),
    /// It is done at once, and the answer comes later by so much.
    Late(Duration),
    /// The answer comes later by `latency`, and no faster than this many bytes a second.
    Slow { latency: Duration, bytes_per_second: u64 },
    /// What is asked for is done, and the connection is cut without an answer.
    LoseAnswer,
    /// An object is written also where there is one (`If-None-Match` is ignored).
    Overwrite,
}

/// Which requests have a fault.
#[derive(Clone, Debug)]
pub struct FaultRule {
    pub fault: Fault,
    /// What the path with the query of a request must have in it (`/bucket/key?...`); empty for every request.
    pub path: String,
    /// The method, or none for all.
    pub method: Option<&'static str>,
    /// So many requests that fit go well first,
    pub after: u64,
    /// and of those that follow, so many have the fault.
    pub times: u64,
}

impl FaultRule {
    /// Every request whose path has `path` in it.
    pub fn always(fault: Fault, path: &str) -> FaultRule {
        FaultRule {
            fault,
            path: path.into(),
            method: None,
            after: 0,
            times: u64::MAX,
        }
    }

    /// The first `times` requests whose path has `path` in it.
    pub fn first(times: u64, fault: Fault, path: &str) -> FaultRule {
        FaultRule {
            times,
            ..FaultRule::always(fault, path)
        }
    }
}

#[derive(Default)]
struct Rules {
    /// Each with the number of requests that fitted.
    rules: Vec<(FaultRule, u64)>,
    /// Of each path: how often each method was asked for.
    requests: BTreeMap<String, u64>,
}

impl Rules {
    fn of_request(&mut self, method: &Method, path: &str) -> Option<Fault> {
        *self.requests.entry(format!("{method} {path}")).or_default() += 1;
        for (rule, fitted) in &mut self.rules {
            if path.contains(&rule.path) && rule.method.is_none_or(|wanted| wanted == method.as_str()) {
                *fitted += 1;
                if *fitted > rule.after && *fitted - rule.after <= rule.times {
                    return Some(rule.fault);
                }
            }
        }
        None
    }
}

/// ETags for listings, which the library leaves out.
struct ListedEtags {
    /// Whether listings have them.
    on: AtomicBool,
    /// Answers without a signature.
    service: S3Service,
}

/// A running server. It ends when it is dropped.
pub struct TestServer {
    address: SocketAddr,
    root: PathBuf,
    rules: Arc<Mutex<Rules>>,
    etags: Arc<ListedEtags>,
    /// For copies of objects.
    cache: tempfile::TempDir,
    /// Ends the server with it.
    _runtime: Runtime,
}

impl TestServer {
    /// Serves the folders in `root` as buckets, on a free port.
    ///
    /// # Errors
    /// When the folder cannot be used, or no port is free.
    pub fn start(root: &Path) -> io::Result<TestServer> {
        TestServer::start_at(root, SocketAddr::from(([127, 0, 0, 1], 0)))
    }

    /// As [`TestServer::start`], at this address.
    ///
    /// # Errors
    /// When the folder cannot be used, or the address is taken.
    pub fn start_at(root: &Path, address: SocketAddr) -> io::Result<TestServer> {
        let files = s3s_fs::FileSystem::new(root).map_err(|error| io::Error::other(format!("{error:?}")))?;
        let mut builder = S3ServiceBuilder::new(files);
        builder.set_auth(SimpleAuth::from_single(ACCESS_KEY_ID, SECRET_ACCESS_KEY));
        let service = builder.build();
        let files = s3s_fs::FileSystem::new(root).map_err(|error| io::Error::other(format!("{error:?}")))?;
        let etags = Arc::new(ListedEtags {
            on: AtomicBool::new(false),
            service: S3ServiceBuilder::new(files).build(),
        });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("s3-server")
            .enable_all()
            .build()?;
        let listener = runtime.block_on(TcpListener::bind(address))?;
        let address = listener.local_addr()?;
        let rules: Arc<Mutex<Rules>> = Arc::default();
        runtime.spawn(serve(
            listener,
            service,
            Arc::clone(&rules),
            Arc::clone(&etags),
            root.into(),
        ));
        Ok(TestServer {
            address,
            root: root.to_path_buf(),
            rules,
            etags,
            cache: tempfile::tempdir()?,
            _runtime: runtime,
        })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The folder whose folders are buckets.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder in which processes that use the server keep copies of objects.
    pub fn cache(&self) -> &Path {
        self.cache.path()
    }

    /// The variables of the environment of a process that is to use the server.
    pub fn environment(&self) -> Vec<(String, String)> {
        let pairs = [
            ("AWS_ENDPOINT_URL", format!("http://{}", self.address)),
            ("AWS_ACCESS_KEY_ID", ACCESS_KEY_ID.into()),
            ("AWS_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY.into()),
            ("AWS_REGION", "us-east-1".into()),
            ("FLOW_STORAGE_RETRY_SECONDS", "20".into()),
            ("FLOW_STORAGE_TIMEOUT_SECONDS", "10".into()),
            ("FLOW_STORAGE_RETRIES", "6".into()),
            ("FLOW_STORAGE_CACHE", self.cache.path().display().to_string()),
        ];
        pairs
            .into_iter()
            .map(|(name, value)| (name.to_string(), value))
            .collect()
    }

    /// A client of its own that uses the server.
    pub fn storage(&self) -> Storage {
        Storage::with_environment(self.environment())
    }

    /// From now on listings have the ETags of objects, as those of S3. Each is computed from the object's bytes.
    pub fn list_etags(&self) {
        self.etags.on.store(true, Ordering::Relaxed);
    }

    /// Adds a fault; the first rule that fits a request counts.
    pub fn fault(&self, rule: FaultRule) {
        self.lock().rules.push((rule, 0));
    }

    /// Takes all faults away, and forgets what was asked for.
    pub fn clear(&self) {
        *self.lock() = Rules::default();
    }

    /// How often requests came whose method and path (`GET /bucket/key?...`) have `what` in them.
    pub fn requests(&self, what: &str) -> u64 {
        let rules = self.lock();
        rules
            .requests
            .iter()
            .filter(|(name, _)| name.contains(what))
            .map(|(_, times)| times)
            .sum()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Rules> {
        self.rules.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn serve(
    listener: TcpListener,
    service: S3Service,
    rules: Arc<Mutex<Rules>>,
    etags: Arc<ListedEtags>,
    root: Arc<Path>,
) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            continue;
        };
        let (service, rules, root) = (service.clone(), Arc::clone(&rules), Arc::clone(&root));
        let etags = Arc::clone(&etags);
        tokio::spawn(async move {
            let answer = service_fn(|request| {
                let (rules, etags, root) = (Arc::clone(&rules), Arc::clone(&etags), Arc::clone(&root));
                answer(request, service.clone(), rules, etags, root)
            });
            // A connection that was cut on purpose is an error here.
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), answer)
                .await;
        });
    }
}

async fn answer(
    request: Request<Incoming>,
    service: S3Service,
    rules: Arc<Mutex<Rules>>,
    etags: Arc<ListedEtags>,
    root: Arc<Path>,
) -> Result<Response<Body>, io::Error> {
    let path = request
        .uri()
        .path_and_query()
        .map_or("/", |path| path.as_str())
        .to_string();
    let fault = rules
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .of_request(request.method(), &path);
    let is_head = request.method() == Method::HEAD;
    match fault {
        Some(Fault::Drop) => return Err(io::Error::other("cut on purpose")),
        Some(Fault::Status(status)) => return Ok(refusal(status, is_head)),
        Some(Fault::Delay(time) | Fault::Slow { latency: time, .. }) => tokio::time::sleep(time).await,
        Some(Fault::Overwrite) if request.method() == Method::PUT => {
            // Headers are signed: the object goes, not the header.
            let _ = std::fs::remove_file(root.join(request.uri().path().trim_matches('/')));
        }
        Some(Fault::Truncate | Fault::LoseAnswer | Fault::Overwrite | Fault::Late(_)) | None => {}
    }
    let is_read = is_head || request.method() == Method::GET;
    if is_read && request.uri().query().is_none() && is_folder(&root, request.uri().path()) {
        // There are no folders in object storage.
        return Ok(refusal(404, is_head));
    }
    let file = root.join(request.uri().path().trim_matches('/'));
    let is_object = is_read && !is_head && request.uri().query().is_none() && file.is_file();
    let is_listing = etags.on.load(Ordering::Relaxed) && path.contains("list-type=2");
    let bucket = request.uri().path().trim_matches('/').to_owned();
    let opened = is_object.then(|| File::open(&file).ok()).flatten();
    let answer = service.call(request.map(Body::from)).await;
    let mut answer = answer.map_err(|error| io::Error::other(format!("{error:?}")))?;
    if let Some(opened) = opened {
        answer = read_in_large_pieces(answer, opened, &file);
    }
    if is_listing && answer.status() == StatusCode::OK {
        answer = with_etags(answer, &bucket, &etags.service).await?;
    }
    if fault == Some(Fault::LoseAnswer) {
        return Err(io::Error::other("cut on purpose"));
    }
    match fault {
        Some(Fault::Truncate) if !is_head => truncated(answer).await,
        Some(Fault::Late(time)) => {
            tokio::time::sleep(time).await;
            Ok(answer)
        }
        Some(Fault::Slow { bytes_per_second, .. }) if !is_head => Ok(slow(answer, bytes_per_second)),
        _ => Ok(answer),
    }
}

/// The answer with the object's bytes from `opened`, the file at `path`, if that was not replaced meanwhile. The server reads 4 KiB at
/// a time, each on another thread, which takes tens of times longer than sending them.
fn read_in_large_pieces(answer: Response<Body>, opened: File, path: &Path) -> Response<Body> {
    let version = |file: std::fs::Metadata| (file.ino(), file.len(), file.mtime(), file.mtime_nsec());
    let versions = (opened.metadata().map(version), path.metadata().map(version));
    let number = |name| {
        let value: &str = answer.headers().get(name)?.to_str().ok()?;
        // `bytes 5-9/20`
        let digits = value.trim_start_matches("bytes ").split('-').next()?;
        digits.parse::<u64>().ok()
    };
    let first = match answer.status() {
        StatusCode::OK => Some(0),
        StatusCode::PARTIAL_CONTENT => number(CONTENT_RANGE),
        _ => None,
    };
    match (versions, first, number(CONTENT_LENGTH)) {
        ((Ok(opened_version), Ok(version)), Some(first), Some(length)) if opened_version == version => {
            let body = FileBody {
                file: opened,
                rest: first..first.saturating_add(length),
            };
            answer.map(|_| Body::http_body(body))
        }
        _ => answer,
    }
}

/// A listing with the ETags of its objects.
async fn with_etags(answer: Response<Body>, bucket: &str, service: &S3Service) -> Result<Response<Body>, io::Error> {
    let (mut head, mut body) = answer.into_parts();
    let mut bytes = Vec::new();
    while let Some(piece) = body.next().await {
        bytes.extend_from_slice(&piece.map_err(io::Error::other)?);
    }
    let text = String::from_utf8(bytes).map_err(io::Error::other)?;
    let mut with = String::with_capacity(text.len() * 2);
    let mut entries = text.split("</Contents>").peekable();
    while let Some(entry) = entries.next() {
        with.push_str(entry);
        if entries.peek().is_none() {
            break;
        }
        let key = entry.rsplit_once("<Key>").and_then(|(_, key)| key.split_once("</Key>"));
        let key = key.map_or("", |(key, _)| key).replace("&lt;", "<").replace("&gt;", ">");
        let key = key.replace("&quot;", "\"").replace("&apos;", "'").replace("&amp;", "&");
        let parts: Vec<String> = key
            .split('/')
            .map(|part| utf8_percent_encode(part, NON_ALPHANUMERIC).to_string())
            .collect();
        let request = Request::head(format!("http://localhost/{bucket}/{}", parts.join("/")));
        let request = request.body(Body::empty()).map_err(io::Error::other)?;
        let found = service.call(request).await;
        let found = found.map_err(|error| io::Error::other(format!("{error:?}")))?;
        if let Some(etag) = found.headers().get("etag").and_then(|etag| etag.to_str().ok()) {
            with.push_str(&format!("<ETag>{}</ETag>", etag.replace('"', "&quot;")));
        }
        with.push_str("</Contents>");
    }
    head.headers.insert(CONTENT_LENGTH, with.len().into());
    Ok(Response::from_parts(head, Body::from(with)))
}

/// Gives a range of a file.
struct FileBody {
    file: File,
    rest: Range<u64>,
}

impl hyper::body::Body for FileBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        const PIECE: u64 = 1 << 18;
        let length = (self.rest.end - self.rest.start).min(PIECE);
        if length == 0 {
            return Poll::Ready(None);
        }
        let mut piece = vec![0; length as usize];
        let read = self.file.read_exact_at(&mut piece, self.rest.start);
        self.rest.start += length;
        Poll::Ready(Some(read.map(|()| Frame::data(piece.into()))))
    }
}

/// The answer with a body that comes no faster than this many bytes a second.
fn slow(answer: Response<Body>, bytes_per_second: u64) -> Response<Body> {
    let (head, body) = answer.into_parts();
    let (begun, mut sent) = (tokio::time::Instant::now(), 0u64);
    let paced = body.then(move |piece| {
        sent += piece.as_ref().map_or(0, |piece| piece.len() as u64);
        let due = begun + Duration::from_secs_f64(sent as f64 / bytes_per_second as f64);
        async move {
            tokio::time::sleep_until(due).await;
            piece.map(Frame::data).map_err(io::Error::other)
        }
    });
    Response::from_parts(head, Body::http_body_unsync(PacedBody(Box::pin(paced))))
}

/// Gives its pieces when they are due.
struct PacedBody(Pin<Box<dyn futures::Stream<Item = io::Result<Frame<Bytes>>> + Send>>);

impl hyper::body::Body for PacedBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.0.as_mut().poll_next(context)
    }
}

/// Whether the path of a request is that of a folder in a bucket.
fn is_folder(root: &Path, path: &str) -> bool {
    let path = percent_decode_str(path).decode_utf8_lossy();
    let name = path.trim_matches('/');
    name.contains('/') && root.join(name).is_dir()
}

fn refusal(status: u16, is_head: bool) -> Response<Body> {
    let code = match status {
        403 => "AccessDenied",
        404 => "NoSuchKey",
        429 | 503 => "SlowDown",
        _ => "InternalError",
    };
    let body = if is_head {
        Body::empty()
    } else {
        Body::from(format!(
            "<Error><Code>{code}</Code><Message>On purpose.</Message></Error>"
        ))
    };
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response
}

/// The answer with half of its body, and the length of the whole.
async fn truncated(answer: Response<Body>) -> Result<Response<Body>, io::Error> {
    let (mut head, mut body) = answer.into_parts();
    let mut bytes = Vec::new();
    while let Some(piece) = body.next().await {
        bytes.extend_from_slice(&piece.map_err(io::Error::other)?);
    }
    head.headers.insert(CONTENT_LENGTH, bytes.len().into());
    bytes.truncate(bytes.len() / 2);
    let body = CutBody(Some(bytes.into()));
    Ok(Response::from_parts(head, Body::http_body(body)))
}

/// Gives its bytes, and fails then.
struct CutBody(Option<Bytes>);

impl hyper::body::Body for CutBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        Poll::Ready(Some(match self.0.take() {
            Some(bytes) => Ok(Frame::data(bytes)),
            None => Err(io::Error::other("cut on purpose")),
        }))
    }
}
