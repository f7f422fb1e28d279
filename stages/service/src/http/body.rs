//! Request bodies: limits of size, time and rate; and draining of bodies that were not read.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::header::EXPECT;
use axum::middleware::Next;
use axum::response::Response;
use futures::{Stream, StreamExt, stream};
use hyper::body::{Frame, SizeHint};
use tokio::time::{Instant, timeout, timeout_at};

/// Grace period before the minimum rate applies.
const GRACE: Duration = Duration::from_secs(10);

/// How long the rest of a refused body is read, so that a client that sends the whole body before it reads sees the
/// response.
const REST: Duration = Duration::from_secs(1);

/// Limits of a body.
#[derive(Debug, Clone, Copy)]
pub struct BodyLimits {
    pub max_bytes: u64,
    /// For the whole body.
    pub max_time: Duration,
    /// Bytes a second, over the whole body; 0 for no bound.
    pub min_rate: u64,
}

/// Why a body cannot be read to its end.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum BodyError {
    #[error("the body of the request has more than {0} bytes, which is the limit")]
    TooLarge(u64),
    #[error("the body of the request came too slowly")]
    TooSlow,
    #[error("the body of the request broke off: {0}")]
    Broken(String),
}

/// The data of a body, up to the first error.
pub fn limited(body: Body, limits: BodyLimits) -> impl Stream<Item = Result<Bytes, BodyError>> + Unpin {
    // A `Content-Length` above the limit is refused at once.
    let announced = body.size_hint().lower();
    let begin = Instant::now();
    let source = body.into_data_stream();
    Box::pin(stream::unfold(Some((source, 0_u64)), move |state| async move {
        let (mut source, read) = state?;
        if announced > limits.max_bytes {
            return Some((Err(BodyError::TooLarge(limits.max_bytes)), None));
        }
        let next = timeout_at(begin + time_for(read, &limits), source.next());
        let chunk = match next.await {
            Err(_) => return Some((Err(BodyError::TooSlow), None)),
            Ok(None) => return None,
            Ok(Some(Err(error))) => return Some((Err(BodyError::Broken(error.to_string())), None)),
            Ok(Some(Ok(chunk))) => chunk,
        };
        let read = read + chunk.len() as u64;
        if read > limits.max_bytes {
            return Some((Err(BodyError::TooLarge(limits.max_bytes)), None));
        }
        Some((Ok(chunk), Some((source, read))))
    }))
}

/// The time, from the beginning of the body, up to which bytes have to follow the first `read` ones.
fn time_for(read: u64, limits: &BodyLimits) -> Duration {
    let by_rate = match limits.min_rate {
        0 => limits.max_time,
        rate => GRACE + Duration::from_secs_f64(read as f64 / rate as f64),
    };
    by_rate.min(limits.max_time)
}

/// A body that is put into the slot when it is dropped before its end, so that it can be drained.
struct Returned {
    body: Option<Body>,
    slot: Arc<Mutex<Option<Body>>>,
}

impl HttpBody for Returned {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Some(body) = &mut self.body else {
            return Poll::Ready(None);
        };
        let polled = Pin::new(body).poll_frame(context);
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            self.body = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or(SizeHint::with_exact(0), HttpBody::size_hint)
    }
}

impl Drop for Returned {
    fn drop(&mut self) {
        if let Some(body) = self.body.take().filter(|body| !body.is_end_stream()) {
            *self.slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(body);
        }
    }
}

/// Middleware: reads a part of a body that the handler left unread before the response is sent. Many clients read the
/// response only after sending everything, and would see a broken connection instead.
pub async fn read_rest(request: Request, next: Next) -> Response {
    // A client with `Expect: 100-continue` has not sent any of it.
    if request.body().is_end_stream() || request.headers().contains_key(EXPECT) {
        return next.run(request).await;
    }
    let slot = Arc::new(Mutex::new(None));
    let request = request.map(|body| {
        Body::new(Returned {
            body: Some(body),
            slot: Arc::clone(&slot),
        })
    });
    let response = next.run(request).await;
    let rest = slot.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(rest) = rest {
        let mut rest = rest.into_data_stream();
        // However it ends, the response follows.
        let _ = timeout(REST, async { while let Some(Ok(_)) = rest.next().await {} }).await;
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(max_bytes: u64, min_rate: u64) -> BodyLimits {
        BodyLimits {
            max_bytes,
            max_time: Duration::from_secs(600),
            min_rate,
        }
    }

    fn run<F: Future>(future: F) -> F::Output {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
        runtime.unwrap().block_on(future)
    }

    fn chunks(parts: &[&'static str]) -> Body {
        let parts: Vec<Result<Bytes, std::io::Error>> = parts.iter().map(|part| Ok(Bytes::from(*part))).collect();
        Body::from_stream(stream::iter(parts))
    }

    #[test]
    fn bodies_are_bounded_whether_their_length_is_announced_or_not() {
        run(async {
            let read: Vec<_> = limited(chunks(&["abc", "de"]), limits(5, 0)).collect().await;
            assert_eq!(read, [Ok(Bytes::from("abc")), Ok(Bytes::from("de"))]);
            let read: Vec<_> = limited(chunks(&["abc", "de", "f"]), limits(4, 0)).collect().await;
            assert_eq!(read, [Ok(Bytes::from("abc")), Err(BodyError::TooLarge(4))]);
            let read: Vec<_> = limited(Body::from("abcdef"), limits(5, 0)).collect().await;
            assert_eq!(read, [Err(BodyError::TooLarge(5))]);
        });
    }

    #[test]
    fn a_body_that_never_comes_ends_in_time() {
        run(async {
            let endless = Body::from_stream(stream::pending::<Result<Bytes, std::io::Error>>());
            let brief = BodyLimits {
                max_time: Duration::from_millis(20),
                ..limits(10, 0)
            };
            let read: Vec<_> = limited(endless, brief).collect().await;
            assert_eq!(read, [Err(BodyError::TooSlow)]);
        });
    }

    #[test]
    fn bytes_that_came_give_time_for_others() {
        assert_eq!(time_for(0, &limits(1, 100)), GRACE);
        assert_eq!(time_for(1_000, &limits(1, 100)), GRACE + Duration::from_secs(10));
        assert_eq!(time_for(1_000_000, &limits(1, 100)), Duration::from_secs(600));
        assert_eq!(time_for(5, &limits(1, 0)), Duration::from_secs(600));
    }

    #[test]
    fn only_what_was_not_read_comes_back() {
        run(async {
            let slot = Arc::new(Mutex::new(None));
            let returned = |body| {
                Body::new(Returned {
                    body: Some(body),
                    slot: Arc::clone(&slot),
                })
            };
            drop(returned(chunks(&["abc"])));
            assert!(slot.lock().unwrap().take().is_some());
            let read: Vec<_> = limited(returned(chunks(&["abc"])), limits(3, 0)).collect().await;
            assert_eq!(read.len(), 1);
            assert!(slot.lock().unwrap().take().is_none());
        });
    }
}
