//! Accepts connections within limits, and shuts the service down.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use flow_storage::Storage;
use futures::future::{Either, select};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;

use super::addresses::AddressPlace;
use super::app::{App, Log, Phase};
use super::client_stream::ClientStream;
use super::service::{Service, reached};
use super::settings::{ServeSettings, SettingsError};
use super::{tls, wyoming};
use crate::engine::EngineError;
use crate::page;

/// Most bytes of the head of a request.
const MAX_HEAD: usize = 32 << 10;

/// Most bytes of a connection that are read ahead.
const READ_AHEAD: usize = 128 << 10;

/// Shortest time that responses and live sessions get when the service ends.
const CLOSE_TIME: Duration = Duration::from_secs(5);

/// Time for threads to end after that.
const SHUTDOWN_TIME: Duration = Duration::from_secs(1);

/// Longest time for the head of a request on a connection that is accepted when few places are left.
const BUSY_HEADER_TIME: Duration = Duration::from_secs(3);

/// Wait before connections are accepted again after an error, such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Threads that serve connections. Models compute on threads of their own.
const THREADS: usize = 2;

/// Why the service cannot run.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error("cannot listen on {listen}: {error}")]
    Listen { listen: String, error: io::Error },
    #[error("the folder for uploads cannot be made below {}: {error}", folder.display())]
    Uploads { folder: PathBuf, error: io::Error },
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("{0}")]
    Failed(String),
}

/// The places of an open connection: in the total and of its address.
type Place = (OwnedSemaphorePermit, AddressPlace);

/// The address of a client.
#[derive(Debug, Clone, Copy)]
pub struct Peer(pub SocketAddr);

/// A handle that ends a service.
#[derive(Clone)]
pub struct StopHandle(watch::Sender<Phase>);

impl StopHandle {
    /// Makes the service refuse new requests, finish the accepted ones, and end.
    pub fn stop(&self) {
        self.0.send_if_modified(|phase| {
            let is_running = *phase == Phase::Running;
            if is_running {
                *phase = Phase::Draining;
            }
            is_running
        });
    }
}

/// A service that is bound to its address and ready to run.
pub struct Server {
    service: Service,
    tls: Option<TlsAcceptor>,
    listener: TcpListener,
    address: SocketAddr,
    wyoming: Option<TcpListener>,
}

impl Server {
    /// Checks the settings, reads keys and certificates, makes the folder for uploads and listens. Connections wait until
    /// [`Server::serve`].
    ///
    /// # Errors
    /// If a setting is wrong, a file that it names cannot be used, or the address is not free.
    pub fn bind(storage: &Storage, settings: ServeSettings, version: &str, log: Log) -> Result<Self, ServeError> {
        let settings = settings.checked()?;
        let http = &settings.http;
        let tls = match (&http.tls_cert, &http.tls_key) {
            (Some(cert), Some(key)) => Some(tls::acceptor(cert, key)?),
            _ => None,
        };
        let (listener, address) = listening(&http.listen)?;
        let wyoming = http.wyoming.as_deref().map(listening).transpose()?;
        Ok(Self {
            wyoming: wyoming.map(|(listener, _)| listener),
            service: Service::new(storage, settings, address, version, log)?,
            tls,
            listener,
            address,
        })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The address as clients write it.
    pub fn url(&self) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://{}", self.address)
    }

    /// The address for clients of the Wyoming protocol, if there is one.
    pub fn wyoming_address(&self) -> Option<SocketAddr> {
        self.wyoming.as_ref()?.local_addr().ok()
    }

    /// Notes for the operator.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if !self.address.ip().is_loopback() {
            if self.service.app.keys.is_open() {
                warnings.push(format!(
                    "anybody who reaches {} can use the service: --keys FILE asks for keys",
                    self.url()
                ));
            }
            if self.tls.is_none() {
                warnings.push(
                    "recordings and keys travel unencrypted: use --tls-cert and --tls-key, or a proxy".to_owned(),
                );
            }
        }
        if let Some(address) = self.wyoming_address()
            && (!address.ip().is_loopback() || !self.service.app.keys.is_open())
        {
            warnings.push(format!(
                "anybody who reaches {address} can use the service by the Wyoming protocol, which has neither keys nor encryption"
            ));
        }
        warnings
    }

    pub fn stop_handle(&self) -> StopHandle {
        StopHandle(self.service.phase.clone())
    }

    /// Serves until it is stopped. Models are loaded on a separate thread; until the first one is loaded, requests are
    /// refused.
    ///
    /// # Errors
    /// If the first model cannot be loaded, or the service cannot begin to serve.
    pub fn serve(self) -> Result<(), ServeError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("http")
            .enable_all()
            .build()
            .map_err(cannot_serve)?;
        let outcome = runtime.block_on(self.serve_until_closed());
        // Does not wait for a model that is still being loaded.
        runtime.shutdown_timeout(SHUTDOWN_TIME);
        outcome
    }

    async fn serve_until_closed(self) -> Result<(), ServeError> {
        let listener = tokio::net::TcpListener::from_std(self.listener).map_err(cannot_serve)?;
        let app = Arc::clone(&self.service.app);
        let router = self.service.router(page::routes());
        let drained = self.service.start();

        if let Some(wyoming) = self.wyoming {
            let wyoming = tokio::net::TcpListener::from_std(wyoming).map_err(cannot_serve)?;
            tokio::spawn(accept_wyoming(Arc::clone(&app), wyoming));
        }
        accept(&app, &listener, self.tls.as_ref(), &router).await;

        let all = u32::try_from(app.settings.max_connections).unwrap_or(u32::MAX);
        let failure = app.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        let least = Instant::now() + CLOSE_TIME;
        let until = match &failure {
            Some(_) => least,
            // Sessions still decode their last windows, which are not in the engine's queue yet.
            None => drained.await.map_or(least, |until| until.max(least)),
        };
        // Then the remaining connections are closed.
        let _ = timeout_at(until, app.connections.acquire_many(all)).await;
        failure.map_or(Ok(()), Err)
    }
}

fn cannot_serve(error: io::Error) -> ServeError {
    ServeError::Failed(format!("cannot serve: {error}"))
}

/// Listens on an address, without blocking.
fn listening(listen: &str) -> Result<(TcpListener, SocketAddr), ServeError> {
    let failed = |error| ServeError::Listen {
        listen: listen.to_owned(),
        error,
    };
    let listener = TcpListener::bind(listen).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

/// Accepts connections until the service closes; also while it drains, to answer with an error.
async fn accept(app: &App, listener: &tokio::net::TcpListener, tls: Option<&TlsAcceptor>, router: &Router) {
    while let Some((stream, peer)) = accepted(app, listener).await {
        // Computed now, from the places left; when the task runs, later connections have taken theirs.
        let header_time = header_time(app);
        let (app, tls, router) = (Arc::clone(app), tls.cloned(), router.clone());
        tokio::spawn(async move { connection(&app, stream, peer, header_time, tls, router).await });
    }
}

/// As [`accept`], for clients of the Wyoming protocol.
async fn accept_wyoming(app: App, listener: tokio::net::TcpListener) {
    while let Some((stream, _)) = accepted(&app, &listener).await {
        let header_time = header_time(&app);
        let app = Arc::clone(&app);
        tokio::spawn(async move { wyoming::connection(&app, stream, header_time).await });
    }
}

/// The next connection that has a place, and its address. None: the service closes.
async fn accepted(
    app: &App,
    listener: &tokio::net::TcpListener,
) -> Option<(ClientStream<TcpStream, Place>, SocketAddr)> {
    let mut closing = pin!(reached(app.phase.clone(), Phase::Closing));
    loop {
        let next = pin!(async {
            let (stream, peer) = listener.accept().await?;
            // Before waiting for a permit, so that clients with too many connections take none.
            let Some(address) = app.addresses.place(peer.ip()) else {
                return Ok(None);
            };
            let permit = Arc::clone(&app.connections).acquire_owned().await;
            // The semaphore is never closed.
            let permit = permit.map_err(io::Error::other)?;
            Ok::<_, io::Error>(Some((stream, peer, (permit, address))))
        });
        let (stream, peer, place) = match select(next, closing.as_mut()).await {
            Either::Right(_) => return None,
            Either::Left((Err(_), _)) => {
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
            Either::Left((Ok(None), _)) => {
                app.metrics.refused_connections.inc();
                continue;
            }
            Either::Left((Ok(Some(accepted)), _)) => accepted,
        };
        // TCP_NODELAY: events are small and should be sent at once. A failure does no harm.
        let _ = stream.set_nodelay(true);
        // The place is held as long as the connection, which may outlive its requests as a WebSocket.
        let limit = Duration::from_secs_f64(app.settings.write_timeout);
        return Some((ClientStream::new(stream, limit, place), peer));
    }
}

async fn connection(
    app: &App,
    stream: ClientStream<TcpStream, Place>,
    peer: SocketAddr,
    header_time: Duration,
    tls: Option<TlsAcceptor>,
    router: Router,
) {
    let Some(tls) = tls else {
        return requests(app, stream, peer, header_time, router).await;
    };
    let handshake = timeout(header_time, tls.accept(stream));
    if let Ok(Ok(stream)) = handshake.await {
        requests(app, stream, peer, header_time, router).await;
    }
}

/// The time for a handshake, for the head of a request, and between requests on a connection: short where less than a quarter
/// of the places is left, so that connections on which nothing comes do not keep others out for long.
fn header_time(app: &App) -> Duration {
    let limit = Duration::from_secs_f64(app.settings.header_timeout);
    let is_busy = app.connections.available_permits() * 4 < app.settings.max_connections;
    if is_busy { limit.min(BUSY_HEADER_TIME) } else { limit }
}

/// Serves the requests of a connection, one after the other.
async fn requests<T>(app: &App, stream: T, peer: SocketAddr, header_time: Duration, router: Router)
where
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(Peer(peer));
        router.clone().oneshot(request)
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(header_time)
        .max_header_size(MAX_HEAD)
        .max_buf_size(READ_AHEAD)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let connection = pin!(connection);
    let closing = pin!(reached(app.phase.clone(), Phase::Closing));
    // Errors are ignored: a client may disconnect at any time.
    if let Either::Right(((), mut connection)) = select(connection, closing).await {
        connection.as_mut().graceful_shutdown();
        let _ = connection.await;
    }
}
