//! Runs jobs, one after the other.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::http::header::CONTENT_TYPE;
use bytes::Bytes;
use http_body_util::BodyExt;
use tokio::sync::Notify;
use tokio::time::sleep;

use super::super::app::{App, Phase};
use super::super::channels::{self, SubmitError};
use super::super::error::ApiError;
use super::super::responses;
use super::super::service::reached;
use super::folder::{End, JobRequest, Outcome};
use super::source::{FetchLimits, Unfetched};
use super::{Begun, Jobs, now, webhook};
use crate::engine::{EngineError, Finished};

/// Wait before a job is begun again for which there was no place or no memory, and before an end is written again.
const PAUSE: Duration = Duration::from_secs(1);

/// The longest wait between two tries to write an end.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Wait before a job is begun again whose recording could not be fetched.
const LATER: Duration = Duration::from_secs(30);

/// Tries for storage that does not answer: an hour and the time that they take.
const FETCH_TRIES: u32 = 120;

/// How often old jobs are looked for.
const SWEEP: Duration = Duration::from_secs(600);

/// What became of a job that was begun.
enum Ran {
    /// It has ended or been cancelled.
    Over,
    /// To be begun again, after a pause.
    Again,
    /// To be begun again after [`LATER`]; others are run meanwhile.
    Later,
    /// The service stops.
    Interrupted,
}

/// Runs jobs, has webhooks sent and removes old jobs until the service stops. The engine is there.
pub async fn run(app: App, jobs: Arc<Jobs>) {
    tokio::spawn(webhook::send_all(Arc::clone(&app), Arc::clone(&jobs)));
    let sweep = async {
        loop {
            jobs.sweep(&app.log).await;
            sleep(SWEEP).await;
        }
    };
    let work = async {
        let _working = jobs.working.lock().await;
        loop {
            let begun = tokio::select! {
                biased;
                () = reached(app.phase.clone(), Phase::Draining) => return,
                begun = jobs.next() => begun,
            };
            let request = Arc::clone(&begun.request);
            match job(&app, &jobs, begun).await {
                Ran::Over => {}
                Ran::Again => {
                    jobs.put_back(&request);
                    tokio::select! {
                        () = sleep(PAUSE) => {}
                        () = reached(app.phase.clone(), Phase::Draining) => return,
                    }
                }
                Ran::Later => {
                    jobs.put_back_for(&request, LATER);
                    let jobs = Arc::clone(&jobs);
                    tokio::spawn(async move {
                        sleep(LATER).await;
                        jobs.wake();
                    });
                }
                Ran::Interrupted => {
                    jobs.put_back(&request);
                    return;
                }
            }
        }
    };
    tokio::select! {
        () = work => {}
        () = sweep => {}
    }
}

async fn job(app: &App, jobs: &Jobs, begun: Begun) -> Ran {
    let Begun {
        request,
        attempts,
        cancelled,
    } = begun;
    if jobs.forget_if_gone(&request.id, &app.log).await {
        return Ran::Over;
    }
    let Ok(logged) = jobs.logged(&request, &app.log).await else {
        return Ran::Again;
    };
    if attempts >= jobs.settings.max_attempts {
        let message = format!(
            "the service ended {attempts} times without progress while it transcribed the recording from {:.1} s on",
            logged.place
        );
        let error = ApiError::new(
            axum::http::StatusCode::INTERNAL_SERVER_ERROR,
            "too_many_attempts",
            message,
        );
        return end(app, jobs, &request, Err(error)).await;
    }
    let fetched = tokio::select! {
        fetched = jobs.fetch(&request, fetch_limits(app), &app.log) => fetched,
        () = cancelled.notified() => return Ran::Over,
        () = reached(app.phase.clone(), Phase::Draining) => return Ran::Interrupted,
    };
    match fetched {
        Ok(()) => {}
        Err(Unfetched::Later) => return Ran::Later,
        Err(Unfetched::Refused(error)) => return end(app, jobs, &request, Err(error)).await,
    }
    // Before the engine has it: a recording that kills the process may do so at once.
    if let Err(error) = jobs.note_attempts(&request, attempts.saturating_add(1), logged).await {
        (app.log)(&format!("warning: the job {} cannot be begun: {error}", request.id));
        return Ran::Again;
    }
    let ran = transcribe(app, jobs, &request, &cancelled).await;
    if matches!(ran, Ran::Again | Ran::Interrupted) {
        // Only deaths of the process count; a stop waits for this. If it is not written, one more is counted.
        let _ = jobs.note_attempts(&request, attempts, logged).await;
    }
    ran
}

fn fetch_limits(app: &App) -> FetchLimits {
    FetchLimits {
        bytes: app.settings.max_upload,
        time: Duration::from_secs_f64(app.settings.upload_timeout),
        tries: FETCH_TRIES,
    }
}

async fn transcribe(app: &App, jobs: &Jobs, request: &JobRequest, cancelled: &Notify) -> Ran {
    let (Ok(engine), Ok(audio)) = (app.engine(), jobs.folder.audio(&request.id)) else {
        return Ran::Again;
    };
    let log = jobs.folder.log(&request.id);
    let submitted = channels::submit(
        engine,
        &request.asked,
        audio,
        request.file_name.clone(),
        Some(log.as_path()),
    )
    .await;
    let running = match submitted {
        Ok(running) => running,
        Err(SubmitError::Engine(error)) => return failed(app, jobs, request, error).await,
        Err(SubmitError::Request(error)) => return end(app, jobs, request, Err(error)).await,
    };
    jobs.set_progress(request, running.progress());
    let mut finish = pin!(running.finish());
    tokio::select! {
        finished = finish.as_mut() => match finished {
            Ok(finished) => end(app, jobs, request, Ok(finished)).await,
            Err(error) => failed(app, jobs, request, error).await,
        },
        () = cancelled.notified() => Ran::Over,
        () = jobs.watch(request, &app.log) => Ran::Over,
        () = reached(app.phase.clone(), Phase::Draining) => Ran::Interrupted,
    }
}

async fn failed(app: &App, jobs: &Jobs, request: &JobRequest, error: EngineError) -> Ran {
    match error {
        EngineError::Draining | EngineError::Cancelled => {
            let stops = *app.phase.borrow() > Phase::Running;
            if stops { Ran::Interrupted } else { Ran::Again }
        }
        EngineError::Busy { .. } | EngineError::NoMemory(_) => Ran::Again,
        error => end(app, jobs, request, Err(error.into())).await,
    }
}

/// Commits the end of a job. As long as it cannot be written, such as to a full disk, the result is kept and written again later.
async fn end(app: &App, jobs: &Jobs, request: &JobRequest, ended: Result<Finished, ApiError>) -> Ran {
    let audio_seconds = ended
        .as_ref()
        .ok()
        .map(|finished| finished.transcript.metadata.duration_s);
    let rendered = match ended {
        Ok(finished) => rendered(&finished, request).await,
        Err(error) => Err(error),
    };
    let (end, content_type, error, result) = match rendered {
        Ok((content_type, bytes)) => (End::Done, Some(content_type), None, bytes),
        Err(error) => (End::Failed, None, error.envelope().get("error").cloned(), Bytes::new()),
    };
    let outcome = Outcome {
        end,
        finished_at: now(),
        audio_seconds,
        content_type,
        error,
    };
    let mut pause = PAUSE;
    while let Err(error) = jobs.finish(request, outcome.clone(), result.clone()).await {
        if jobs.forget_if_gone(&request.id, &app.log).await {
            return Ran::Over;
        }
        if pause == PAUSE {
            (app.log)(&format!(
                "warning: the end of the job {} cannot be written, which is tried again: {error}",
                request.id
            ));
        }
        tokio::select! {
            () = sleep(pause) => pause = LONGEST_PAUSE.min(pause * 2),
            () = reached(app.phase.clone(), Phase::Draining) => return Ran::Interrupted,
        }
    }
    Ran::Over
}

/// Content type and bytes of the response that the request would have had.
async fn rendered(finished: &Finished, request: &JobRequest) -> Result<(String, Bytes), ApiError> {
    let response = responses::transcript(finished, &request.asked)?;
    let content_type = response
        .headers()
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok());
    let content_type = content_type.unwrap_or("application/octet-stream").to_owned();
    let failed = |error: axum::Error| {
        let status = axum::http::StatusCode::INTERNAL_SERVER_ERROR;
        ApiError::new(status, "internal_error", error.to_string())
    };
    let bytes = response.into_body().collect().await.map_err(failed)?.to_bytes();
    Ok((content_type, bytes))
}
