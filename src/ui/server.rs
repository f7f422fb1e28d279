//! The HTTP server: a limit of connections, and timeouts for request heads.

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

/// One browser uses about six.
const MAX_CONNECTIONS: usize = 64;
const HEAD_TIME: Duration = Duration::from_secs(30);
/// Timeout for idle connections where few places are left.
const SHORT_HEAD_TIME: Duration = Duration::from_secs(2);
const MAX_HEAD: usize = 64 << 10;
/// Grace period for running requests at shutdown.
const END_TIME: Duration = Duration::from_secs(3);
/// After a connection could not be accepted (no file descriptor is left, say).
const PAUSE: Duration = Duration::from_millis(100);

/// Serves requests on `listener` until `stop` is notified. Blocks.
///
/// # Errors
/// If the machine gives no threads, or cannot listen.
pub fn serve(listener: std::net::TcpListener, router: Router, stop: oneshot::Receiver<()>) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let served = runtime.block_on(async {
        let listener = TcpListener::from_std(listener)?;
        let accepting = pin!(accept(listener, router));
        let _ = select(accepting, stop).await;
        Ok(())
    });
    // Responses being written get the grace period; abandoned queries are not waited for.
    runtime.shutdown_timeout(END_TIME);
    served
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
                let head_time = head_time(places.available_permits());
                tokio::spawn(async move {
                    requests(stream, head_time, router).await;
                    drop(place);
                });
            }
            Err(_) => tokio::time::sleep(PAUSE).await,
        }
    }
}

/// For the head of a request, by the places for connections that are left.
fn head_time(places: usize) -> Duration {
    if places < MAX_CONNECTIONS / 2 {
        SHORT_HEAD_TIME
    } else {
        HEAD_TIME
    }
}

async fn requests(stream: TcpStream, head_time: Duration, router: Router) {
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request: Request<Incoming>| router.clone().oneshot(request));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head_time)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), service);
    // Errors of connections are ignored.
    let _ = connection.await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_that_take_the_last_places_have_little_time() {
        assert_eq!(head_time(MAX_CONNECTIONS - 1), HEAD_TIME);
        assert_eq!(head_time(0), SHORT_HEAD_TIME);
    }
}
