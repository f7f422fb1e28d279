//! The HTTP server: a limit of connections, and timeouts for request heads.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use flow_service::http::{ServeError, Service};
use futures::future::{Either, pending, select};
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

/// Serves requests on `listener`, with the model of `service`, until `stop` is notified. Blocks.
///
/// # Errors
/// If the machine gives no threads, or cannot listen, or the model cannot be loaded.
pub fn serve(
    listener: std::net::TcpListener,
    router: Router,
    service: Option<Service>,
    stop: oneshot::Receiver<()>,
) -> Result<(), ServeError> {
    let cannot_serve = |error: io::Error| ServeError::Failed(format!("cannot serve: {error}"));
    listener.set_nonblocking(true).map_err(cannot_serve)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(cannot_serve)?;
    let served = runtime.block_on(async {
        let listener = TcpListener::from_std(listener).map_err(cannot_serve)?;
        let accepting = pin!(accept(listener, router));
        let ended = pin!(select(accepting, stop));
        let running = pin!(async {
            match service {
                Some(service) => service.run().await,
                None => pending().await,
            }
        });
        match select(ended, running).await {
            Either::Left(_) => Ok(()),
            Either::Right((failed, _)) => failed,
        }
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
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
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
