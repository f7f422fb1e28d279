//! Process 0: waits for all others and sends each of them the addresses.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::Write;
use std::time::{Duration, Instant};

use flow_base::random_bytes::random_bytes;

use super::arrivals::{Refusals, answer, arrivals, is_closed, miscounted};
use super::frame;
use super::greeting::Hello;
use super::handshake::Handshake;
use super::joining::{Join, JoinError, JoinMessage, Joined, failed};
use super::listeners::Listeners;
use super::peer::Peer;
use super::pending::Arrival;
use super::settings::{differences, in_short};

/// A process with other settings is refused; for this time another one of its number with the right settings may
/// connect.
const SECOND_TRY: Duration = Duration::from_secs(10);

pub(super) fn lead(join: &Join, until: Instant, tell: &dyn Fn(JoinMessage)) -> Result<Joined, JoinError> {
    let count = join.processes;
    let listeners = Listeners::open(join, join.leader.port, until, tell)?;
    tell(JoinMessage::Note(format!(
        "process 0 of {count} waits at port {} for the others, at most {} s",
        join.leader.port,
        join.timeout.as_secs_f64().round()
    )));
    let handshake = Handshake::new(0, join.secret.as_ref(), join.digest.as_bytes());
    let mut come: Vec<Option<Arrival>> = (0..count).map(|_| None).collect();
    let refusals = Refusals::new(tell);
    let settings = in_short(&join.settings);
    // By number: processes of this run that were started with other settings.
    let mut misfits: BTreeMap<usize, String> = BTreeMap::new();
    let deadline = Cell::new(until);
    if count > 1 {
        arrivals(
            &listeners,
            &handshake,
            &deadline,
            |why| refusals.add(why),
            |arrival| {
                let hello = &arrival.hello;
                let process = hello.process as usize;
                let same = hello.run == handshake.run;
                let mut misfit = same && hello.processes as usize != count;
                let wrong = miscounted(hello, count).or_else(|| {
                    if !same {
                        let differ = "its pipeline, settings or program differ from those of process 0".to_owned();
                        let how = differences(&settings, &arrival.settings);
                        misfit = how.is_some();
                        Some(match how {
                            Some(how) => format!("{differ}: {how}"),
                            None => differ,
                        })
                    } else if process == 0 || process >= count {
                        Some(format!("there is no place for a process {process} of {count}"))
                    } else if come[process].as_ref().is_some_and(|other| !is_closed(&other.stream)) {
                        Some(format!("another process {process} is there already"))
                    } else {
                        None
                    }
                });
                if let Some(why) = wrong {
                    // Errors are ignored: the process is refused anyway.
                    let _ = answer(&arrival.stream, Some(&why));
                    let why = format!("{}: {why}", hello.name());
                    if misfit && (1..count).contains(&process) && come[process].is_none() {
                        misfits.insert(process, why.clone());
                        deadline.set(until.min(Instant::now() + SECOND_TRY));
                    }
                    refusals.add(why);
                    return None;
                }
                if answer(&arrival.stream, None).is_ok() {
                    tell(JoinMessage::Note(format!(
                        "process {process} of {count} is there: {}, pid {}",
                        hello.host, hello.pid
                    )));
                    come[process] = Some(arrival);
                    misfits.remove(&process);
                    if misfits.is_empty() {
                        deadline.set(until);
                    }
                }
                come.iter().skip(1).all(Option::is_some).then_some(())
            },
        );
    }
    let missing: Vec<String> = (1..count)
        .filter(|&process| come[process].is_none())
        .map(|p| p.to_string())
        .collect();
    if !missing.is_empty() {
        let misfit = misfits.into_values().next();
        let mut message = format!(
            "process {} did not come to port {} within {} s",
            missing.join(", "),
            join.leader.port,
            join.timeout.as_secs_f64()
        );
        let (refused, last) = refusals.last();
        if refused > 0 {
            message.push_str(&format!("; {refused} refused, the last: {last}"));
        }
        if let Some(misfit) = &misfit {
            message.clone_from(misfit);
        }
        for other in come.iter().flatten() {
            // They wait for the table; the closed connection also informs them.
            let _ = (&other.stream).write_all(&[1]);
            let mut why = Vec::new();
            frame::reason(&mut why, &message);
            let _ = (&other.stream).write_all(&why);
        }
        if misfit.is_some() {
            return Err(JoinError::Refused { message });
        }
        return Err(failed(
            message,
            "start them all within that time, with the same pipeline and settings",
        ));
    }
    let token = random_bytes::<32>().map_err(|error| failed(format!("no random numbers for this run: {error}"), ""))?;
    let own = Hello::new(count, 0, join.leader.port);
    let mut table = vec![0u8];
    table.extend(token);
    let mut peers = Vec::with_capacity(count);
    for (process, arrival) in come.iter().enumerate() {
        let hello = arrival.as_ref().map_or(&own, |arrival| &arrival.hello);
        // Empty for the machine of process 0, for which each process uses the address that it was given.
        let ip = arrival
            .as_ref()
            .map(|arrival| arrival.ip)
            .filter(|ip| !ip.to_canonical().is_loopback());
        frame::text(
            &mut table,
            &ip.map_or(String::new(), |ip| ip.to_canonical().to_string()),
        );
        table.extend(hello.port.to_le_bytes());
        table.extend(hello.pid.to_le_bytes());
        frame::text(&mut table, &hello.host);
        peers.push(Peer {
            process,
            host: hello.host.clone(),
            pid: hello.pid,
        });
    }
    let mut streams = Vec::with_capacity(count);
    for (peer, arrival) in peers.iter().zip(come) {
        if let Some(Arrival { mut stream, .. }) = arrival {
            stream
                .write_all(&table)
                .map_err(|error| failed(format!("{peer} went before all had come: {error}"), "start all again"))?;
            streams.push(Some(stream));
        } else {
            streams.push(None);
        }
    }
    Ok((peers, streams))
}
