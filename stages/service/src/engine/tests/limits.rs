//! What the engine refuses, cancels, and survives.

use futures::future::join;

use super::*;

#[test]
fn more_requests_than_there_are_places_are_refused_until_one_goes() {
    let settings = EngineSettings {
        max_queue: 2,
        ..settings()
    };
    let (engine, gate) = gated(settings);
    let bytes = wav(&two());
    let first = engine.submit(request(&bytes)).unwrap();
    let second_request = request(&bytes);
    let second_path = second_request.audio.to_path_buf();
    let second = engine.submit(second_request).unwrap();
    let refused = request(&bytes);
    let refused_path = refused.audio.to_path_buf();
    match engine.submit(refused) {
        Err(EngineError::Busy { retry_after }) => assert!((1..=60).contains(&retry_after)),
        other => panic!("{other:?}"),
    }
    assert!(!refused_path.exists() && second_path.exists());
    until("a batch", || gate.is_reached());
    assert_eq!(engine.queued(), 2);
    // A client that goes leaves its place and its file at once, though its windows may be in the model.
    drop(second);
    assert_eq!((engine.queued(), gate.failed.load(Ordering::SeqCst)), (1, 1));
    assert!(!second_path.exists());
    let third = engine.submit(request(&bytes)).unwrap();
    gate.open();
    let (first, third) = wait(join(first.finish(), third.finish()));
    assert_eq!(first.unwrap().transcript.text, third.unwrap().transcript.text);
    assert_eq!(engine.queued(), 0);
}

#[test]
fn a_job_that_is_cancelled_leaves_nothing_behind() {
    let settings = EngineSettings {
        batch_seconds: 1.0,
        ..settings()
    };
    let (engine, gate) = gated(settings);
    let job = engine.submit(request(&wav(&[two(), two()].concat()))).unwrap();
    until("a batch", || gate.is_reached());
    drop(job);
    let (send, receive) = mpsc::channel();
    let waiter = move |lease| send.send(lease).unwrap();
    engine.inner.shared.models.acquire(0, Box::new(waiter));
    let lease = receive.recv().unwrap().unwrap();
    assert_eq!(lease.model().batcher.waiting(), 0);
    drop(lease);
    gate.open();
    let finished = wait(engine.submit(request(&wav(&two()))).unwrap().finish()).unwrap();
    assert!(!finished.transcript.segments.is_empty());
}

#[test]
fn decoding_has_a_limit_of_time() {
    let settings = EngineSettings {
        // Each window goes alone.
        batch_seconds: 0.1,
        decode_timeout: 1e-9,
        ..settings()
    };
    let (engine, gate) = gated(settings);
    gate.open();
    let failed = wait(engine.submit(request(&wav(&two()))).unwrap().finish());
    assert_eq!(failed.unwrap_err(), EngineError::Timeout(1e-9));
    assert_eq!((engine.queued(), gate.failed.load(Ordering::SeqCst)), (0, 1));
}

/// Hours of silence in a small file take minutes of a thread, and have no window.
#[test]
fn silence_has_the_limit_of_decoding_too() {
    let settings = EngineSettings {
        decode_timeout: 1e-9,
        ..settings()
    };
    let (engine, gate) = gated(settings);
    gate.open();
    let failed = wait(engine.submit(request(&wav(&[0.0; 16_000 * 100]))).unwrap().finish());
    assert_eq!(failed.unwrap_err(), EngineError::Timeout(1e-9));
    assert_eq!(engine.queued(), 0);
}

/// A long recording that a thread for short ones began to prepare waits for another thread.
#[test]
fn what_is_prepared_anew_has_the_whole_limit() {
    let (engine, _) = gated(settings());
    let shared = Arc::clone(&engine.inner.shared);
    let work = Work::new(7, request(&wav(&[0.0; 16_000])), TextStyle::default(), shared);
    work.begin();
    let first = work.begun().unwrap();
    work.begin();
    assert!(work.begun().unwrap() > first);
}

#[test]
fn draining_ends_what_was_taken_and_takes_no_more() {
    let (engine, gate) = gated(settings());
    let bytes = wav(&two());
    let job = engine.submit(request(&bytes)).unwrap();
    let draining = async {
        until("a batch", || gate.is_reached());
        assert!(!engine.is_ready());
        assert_eq!(engine.submit(request(&bytes)).unwrap_err(), EngineError::Draining);
        gate.open();
        // Those that are live come to their end.
        engine
            .decode_window(None, (vec![0.0; 16_000], None), false, Arc::default())
            .await
            .unwrap();
    };
    wait(join(engine.drain(Duration::from_secs(120)), draining));
    assert_eq!(engine.queued(), 0);
    assert!(wait(job.finish()).is_ok());

    let (engine, gate) = gated(settings());
    let job = engine.submit(request(&bytes)).unwrap();
    until("a batch", || gate.is_reached());
    wait(engine.drain(Duration::from_millis(20)));
    assert_eq!(wait(job.finish()).unwrap_err(), EngineError::Cancelled);
    assert_eq!(engine.queued(), 0);
    gate.open();
}

#[test]
fn an_engine_that_goes_ends_its_jobs() {
    let (engine, gate) = gated(settings());
    let job = engine.submit(request(&wav(&two()))).unwrap();
    until("a batch", || gate.is_reached());
    drop(engine);
    assert_eq!(wait(job.finish()).unwrap_err(), EngineError::Cancelled);
    gate.open();
}

#[test]
fn metrics_that_panic_do_not_hurt() {
    struct Panics;
    impl Observer for Panics {
        fn batch(&self, _: usize, _: f64) {
            panic!("in a batch");
        }
        fn finished(&self, _: Result<&Finished, &EngineError>) {
            panic!("at the end");
        }
    }
    let engine = Engine::start_observed(settings(), Arc::new(Panics)).unwrap();
    for _ in 0..2 {
        let finished = wait(engine.submit(request(&wav(&two()))).unwrap().finish()).unwrap();
        assert!(!finished.transcript.segments.is_empty());
    }
}
