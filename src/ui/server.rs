//! Connections: few at once, and with a time for the head of a request.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use futures::future::select;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, oneshot};
use tower::ServiceExt;

/// Of one person's browser there are some six.
const MAX_CONNECTIONS: usize = 64;
const HEAD_TIME: Duration = Duration::from_secs(30);
const MAX_HEAD: usize = 64 << 10;
/// After a connection could not be accepted (no file descriptor is left, say).
const PAUSE: Duration = Duration::from_millis(100);

/// Answers requests on `listener` until `stop` is told. Blocks.
///
/// # Errors
/// If the machine gives no threads, or cannot listen.
pub fn serve(listener: std::net::TcpListener, router: Router, stop: oneshot::Receiver<()>) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let listener = TcpListener::from_std(listener)?;
        let accepting = pin!(accept(listener, router));
        let _ = select(accepting, stop).await;
        Ok(())
    })
    // Dropping the runtime waits for what is being written, and for questions, which have a time limit.
}

async fn accept(listener: TcpListener, router: Router) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else {
            return;
        };
        match listener.accept().await {
            Ok((stream, _)) => {
                let router = router.clone();
                tokio::spawn(async move {
                    requests(stream, router).await;
                    drop(place);
                });
            }
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

async fn requests(stream: TcpStream, router: Router) {
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request: Request<Incoming>| router.clone().oneshot(request));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), service);
    // How a connection ends is the browser's affair.
    let _ = connection.await;
}
