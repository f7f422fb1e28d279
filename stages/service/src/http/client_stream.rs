//! A connection to a client: counted as long as it is open, with a timeout for writes.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// A connection whose writes fail with [`io::ErrorKind::TimedOut`] when none succeeds for `limit`. It holds its place, `P`,
/// also once it has become a WebSocket.
pub struct ClientStream<T, P> {
    inner: T,
    limit: Duration,
    /// When a write that waits fails.
    sleep: Pin<Box<Sleep>>,
    is_waiting: bool,
    _place: P,
}

impl<T, P> ClientStream<T, P> {
    pub fn new(inner: T, limit: Duration, place: P) -> Self {
        Self {
            inner,
            limit,
            sleep: Box::pin(sleep(limit)),
            is_waiting: false,
            _place: place,
        }
    }

    /// Checks the timeout while a write is pending.
    fn watched<R>(&mut self, polled: Poll<io::Result<R>>, context: &mut Context<'_>) -> Poll<io::Result<R>> {
        if polled.is_ready() {
            self.is_waiting = false;
            return polled;
        }
        if !self.is_waiting {
            self.is_waiting = true;
            self.sleep.as_mut().reset(Instant::now() + self.limit);
        }
        match self.sleep.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<T: AsyncRead + Unpin, P: Unpin> AsyncRead for ClientStream<T, P> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

impl<T: AsyncWrite + Unpin, P: Unpin> AsyncWrite for ClientStream<T, P> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.inner).poll_write(context, bytes);
        self.watched(polled, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.inner).poll_write_vectored(context, slices);
        self.watched(polled, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.inner).poll_flush(context);
        self.watched(polled, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.inner).poll_shutdown(context);
        self.watched(polled, context)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::sync::Semaphore;

    use super::*;

    #[test]
    fn a_reader_that_takes_nothing_ends_the_connection_and_a_slow_one_does_not() {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap();
        runtime.block_on(async {
            let permits = Arc::new(Semaphore::new(2));
            let permit = || Arc::clone(&permits).try_acquire_owned().unwrap();
            let (writer, mut reader) = duplex(4);
            let mut writer = ClientStream::new(writer, Duration::from_millis(50), permit());
            writer.write_all(b"1234").await.unwrap();
            let error = writer.write_all(b"5678").await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);

            let (writer, mut slow) = duplex(1);
            // Far longer than one step of the reader, far shorter than all of them.
            let mut writer = ClientStream::new(writer, Duration::from_secs(30), permit());
            let write = async {
                writer.write_all(b"abcdefgh").await.unwrap();
                drop(writer);
            };
            let read = async {
                let mut text = Vec::new();
                slow.read_to_end(&mut text).await.unwrap();
                text
            };
            let ((), text) = futures::future::join(write, read).await;
            assert_eq!(text, b"abcdefgh");
            assert_eq!(permits.available_permits(), 1, "of the connection that was closed");
            let mut first = [0; 4];
            reader.read_exact(&mut first).await.unwrap();
            assert_eq!(&first, b"1234");
        });
    }
}
