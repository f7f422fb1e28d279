//! The number of this process and the addresses of the others: from a file of hosts, or from the environment variables
//! of Slurm or torchrun, which are read only with `--launch`.

use std::io;
use std::path::Path;
use std::time::Duration;

use flow_kind::open_regular_file;
use flow_processes::Address;

use crate::arguments::{Launcher, ProcessArguments};
use flow_cli::failure::Failure;

/// The port of process 0 where neither the file of hosts nor `--port` names one.
pub const PORT: u16 = 24_500;

/// This process among those of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    pub process: usize,
    pub processes: usize,
    /// Process 0.
    pub leader: Address,
    /// Where this process listens, if that is set.
    pub port: Option<u16>,
    /// The host of each process, by the file of hosts.
    pub hosts: Vec<String>,
    pub timeout: Duration,
    /// The source of these values, for the screen.
    pub read_from: String,
}

/// A variable of the environment; one that is empty counts as absent.
pub type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The variables of this process.
pub fn environment(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.trim().is_empty())
}

/// Reads which process this is. None: it runs alone.
pub fn read(arguments: &ProcessArguments, variables: Variables) -> Result<Option<Launch>, Failure> {
    let launch = match (&arguments.hosts, arguments.launch) {
        (Some(file), _) => Some(from_hosts(file, arguments)?),
        (None, None) => None,
        (None, Some(Launcher::Slurm)) => Some(from_slurm(arguments, variables)?),
        (None, Some(Launcher::Torchrun)) => Some(from_torchrun(arguments, variables)?),
        (None, Some(Launcher::Auto)) => Some(
            if variables("TORCHELASTIC_RUN_ID").is_some() || variables("RANK").is_some() {
                from_torchrun(arguments, variables)?
            } else if variables("SLURM_PROCID").is_some() {
                from_slurm(arguments, variables)?
            } else {
                return Err(Failure::usage(
                    "--launch auto: neither torchrun (RANK) nor Slurm (SLURM_PROCID) started this process",
                    "start it with one of them, or name the machines with --hosts FILE --process I",
                ));
            },
        ),
    };
    if let Some(Launch { process, processes, .. }) = launch
        && process >= processes
    {
        return Err(Failure::usage(
            format!("there is no process {process} of {processes}: the first is 0"),
            "--process counts the lines of the file of hosts from 0",
        ));
    }
    Ok(launch)
}

/// A note where the environment suggests several processes but `--launch` was not given.
pub fn unheeded(variables: Variables) -> Option<String> {
    let of = |own: &str, all: &str| {
        let (own, all) = (variables(own)?, variables(all)?);
        (all.parse::<u64>().ok()? > 1).then_some((own, all))
    };
    let (launcher, (own, all)) = of("RANK", "WORLD_SIZE")
        .filter(|_| variables("MASTER_ADDR").is_some())
        .map(|found| ("torchrun", found))
        .or_else(|| Some(("slurm", of("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")?)))?;
    Some(format!(
        "{launcher} started this as process {own} of {all}, but it runs alone: `--launch {launcher}` joins them"
    ))
}

/// One line of the file: a host and, perhaps, a port.
fn host_and_port(line: &str) -> Option<(String, Option<u16>)> {
    let (host, port) = if let Some(rest) = line.strip_prefix('[') {
        let (host, port) = rest.split_once(']')?;
        (
            host,
            if port.is_empty() {
                None
            } else {
                Some(port.strip_prefix(':')?)
            },
        )
    } else {
        match line.split_once(':') {
            // More colons than one: an IPv6 address without a port.
            Some((_, port)) if port.contains(':') => (line, None),
            Some((host, port)) => (host, Some(port)),
            None => (line, None),
        }
    };
    let port = match port {
        None => None,
        Some(port) => Some(port.parse().ok().filter(|&port| port > 0)?),
    };
    (!host.is_empty() && !host.contains(char::is_whitespace)).then(|| (host.to_owned(), port))
}

fn from_hosts(file: &Path, arguments: &ProcessArguments) -> Result<Launch, Failure> {
    let text = open_regular_file(file).and_then(io::read_to_string);
    let text = text.map_err(|error| {
        Failure::usage(
            format!("--hosts: {} cannot be read: {error}", file.display()),
            "name a file with one line for each process: HOST or HOST:PORT",
        )
    })?;
    let mut hosts = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        hosts.push(host_and_port(line).ok_or_else(|| {
            Failure::usage(
                format!("{}, line {number}: `{line}` is not a HOST or HOST:PORT", file.display()),
                "write one line for each process, such as node1:24500, 10.0.0.2 or [fd00::2]:24500",
            )
        })?);
    }
    let Some((host, port)) = hosts.first().cloned() else {
        return Err(Failure::usage(
            format!("{} names no host", file.display()),
            "write one line for each process: HOST or HOST:PORT",
        ));
    };
    let process = arguments.process.unwrap_or(0) as usize;
    Ok(Launch {
        process,
        processes: hosts.len(),
        leader: Address {
            host,
            port: port.or(arguments.port).unwrap_or(PORT),
        },
        port: hosts.get(process).and_then(|(_, port)| *port),
        hosts: hosts.into_iter().map(|(host, _)| host).collect(),
        timeout: arguments.timeout(),
        read_from: file.display().to_string(),
    })
}

fn from_slurm(arguments: &ProcessArguments, variables: Variables) -> Result<Launch, Failure> {
    let any = |names: &[&'static str]| names.iter().find_map(|name| Some((*name, variables(name)?)));
    let process = number(any(&["SLURM_PROCID"]), "SLURM_PROCID", "Slurm")?;
    let tasks = ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"];
    let processes = number(any(&tasks), "SLURM_STEP_NUM_TASKS", "Slurm")?;
    let nodes = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
    let Some((name, list)) = any(&nodes) else {
        return Err(absent("SLURM_STEP_NODELIST", "Slurm"));
    };
    let host = first_node(&list).ok_or_else(|| {
        Failure::usage(
            format!("{name}: `{list}` is not a list of nodes"),
            "name the machines with --hosts FILE --process I instead",
        )
    })?;
    // A different port for each job step, so that two on the same nodes do not collide.
    let of = |name: &str| variables(name).and_then(|id| id.parse::<u64>().ok()).unwrap_or(0);
    let step = of("SLURM_JOB_ID").wrapping_mul(31).wrapping_add(of("SLURM_STEP_ID"));
    Ok(Launch {
        process,
        processes,
        leader: Address {
            host,
            port: arguments.port.unwrap_or(20_000 + (step % 10_000) as u16),
        },
        port: None,
        hosts: Vec::new(),
        timeout: arguments.timeout(),
        read_from: "Slurm's variables".into(),
    })
}

fn from_torchrun(arguments: &ProcessArguments, variables: Variables) -> Result<Launch, Failure> {
    let of = |name: &'static str| variables(name).map(|value| (name, value));
    let process = number(of("RANK"), "RANK", "torchrun")?;
    let processes = number(of("WORLD_SIZE"), "WORLD_SIZE", "torchrun")?;
    let host = variables("MASTER_ADDR").ok_or_else(|| absent("MASTER_ADDR", "torchrun"))?;
    let port = match arguments.port {
        Some(port) => port,
        None => {
            let master = number(of("MASTER_PORT"), "MASTER_PORT", "torchrun")?;
            // torchrun itself listens at MASTER_PORT.
            u16::try_from(master + 1).map_err(|_| {
                Failure::usage(
                    format!("MASTER_PORT: there is no port after {master}"),
                    "give another one with --port",
                )
            })?
        }
    };
    Ok(Launch {
        process,
        processes,
        leader: Address { host, port },
        port: None,
        hosts: Vec::new(),
        timeout: arguments.timeout(),
        read_from: "torchrun's variables".into(),
    })
}

fn absent(name: &str, launcher: &str) -> Failure {
    Failure::usage(
        format!("{name} is not set: {launcher} did not start this process"),
        "leave --launch out to run alone, or name the machines with --hosts FILE --process I",
    )
}

fn number(found: Option<(&str, String)>, name: &str, launcher: &str) -> Result<usize, Failure> {
    let (name, value) = found.ok_or_else(|| absent(name, launcher))?;
    let parsed = value.trim().parse::<u32>();
    parsed.map(|number| number as usize).map_err(|_| {
        Failure::usage(
            format!("{name}: `{value}` is not a number"),
            "leave --launch out to run alone, or name the machines with --hosts FILE --process I",
        )
    })
}

/// The first of a list of nodes such as `gpu[07-12,20],login1`, where task 0 is.
fn first_node(list: &str) -> Option<String> {
    let mut name = String::new();
    let mut rest = list.trim();
    loop {
        let end = rest.find(['[', ',']).unwrap_or(rest.len());
        name.push_str(&rest[..end]);
        match rest[end..].strip_prefix('[') {
            None => break,
            Some(ranges) => {
                let (inside, after) = ranges.split_once(']')?;
                name.push_str(inside.split([',', '-']).next()?);
                rest = after;
            }
        }
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | ':');
    (!name.is_empty() && name.chars().all(plain)).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(hosts: Option<&Path>, process: Option<u32>, launch: Option<Launcher>) -> ProcessArguments {
        ProcessArguments {
            hosts: hosts.map(Path::to_path_buf),
            process,
            launch,
            port: None,
            secret_file: None,
            join_timeout: 60.0,
        }
    }

    fn launched(launch: Launcher, variables: &[(&str, &str)]) -> Result<Launch, String> {
        let variables = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let read = read(&arguments(None, None, Some(launch)), &variables);
        read.map(Option::unwrap).map_err(|failure| failure.to_string())
    }

    fn told(launch: &Launch) -> (usize, usize, String) {
        (launch.process, launch.processes, launch.leader.to_string())
    }

    #[test]
    fn files_of_hosts_are_read_and_mistakes_are_named_by_line() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("hosts.txt");
        let read = |text: &str, process| {
            std::fs::write(&file, text).unwrap();
            read(&arguments(Some(&file), Some(process), None), &|_| None)
                .map(Option::unwrap)
                .map_err(|failure| failure.to_string())
        };
        let text = "# two machines\nnode1:7000  # the first\n\nnode2\n[fd00::3]:7002\nfd00::4\n";
        let launch = read(text, 2).unwrap();
        assert_eq!(told(&launch), (2, 4, "node1:7000".into()));
        assert_eq!(launch.port, Some(7002));
        assert_eq!(launch.hosts, ["node1", "node2", "fd00::3", "fd00::4"]);
        assert_eq!(told(&read("a\nb\n", 1).unwrap()), (1, 2, format!("a:{PORT}")));
        for (text, process, said) in [
            ("", 0, "names no host"),
            ("a\nb:x\n", 0, "line 2: `b:x`"),
            ("a:0\n", 0, "line 1"),
            ("a b\n", 0, "line 1"),
            ("[::1\n", 0, "line 1"),
            ("a\nb\n", 2, "no process 2 of 2"),
        ] {
            let message = read(text, process).unwrap_err();
            assert!(message.contains(said), "{text}: {message}");
        }
    }

    #[test]
    fn what_slurm_and_torchrun_say_is_read_where_it_is_asked_for() {
        let slurm = [
            ("SLURM_PROCID", "3"),
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_NTASKS", "9"),
            ("SLURM_STEP_NODELIST", "gpu[07-08],cpu1"),
            ("SLURM_JOB_ID", "77"),
        ];
        let torchrun = [
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "10.0.0.1"),
            ("MASTER_PORT", "29500"),
        ];
        assert_eq!(
            told(&launched(Launcher::Slurm, &slurm).unwrap()),
            (3, 4, "gpu07:22387".into())
        );
        assert_eq!(
            told(&launched(Launcher::Torchrun, &torchrun).unwrap()),
            (1, 2, "10.0.0.1:29501".into())
        );
        // Inside a Slurm job torchrun is the direct launcher.
        let both = [&slurm[..], &torchrun[..]].concat();
        assert_eq!(launched(Launcher::Auto, &both).unwrap().processes, 2);
        assert_eq!(launched(Launcher::Auto, &slurm).unwrap().processes, 4);
        for (launch, variables, said) in [
            (Launcher::Auto, &[][..], "neither torchrun (RANK) nor Slurm"),
            (Launcher::Slurm, &slurm[1..], "SLURM_PROCID is not set"),
            (Launcher::Torchrun, &torchrun[..2], "MASTER_ADDR is not set"),
            (Launcher::Torchrun, &[("RANK", "-1")], "RANK: `-1` is not a number"),
            (
                Launcher::Slurm,
                &[slurm[0], slurm[1], ("SLURM_JOB_NODELIST", "a[1-")],
                "is not a list of nodes",
            ),
        ] {
            let message = launched(launch, variables).unwrap_err();
            assert!(message.contains(said), "{message}");
        }
        // Not without `--launch`, and with a note.
        let of = |name: &str| {
            both.iter()
                .find(|(known, _)| *known == name)
                .map(|(_, value)| (*value).to_owned())
        };
        assert_eq!(read(&arguments(None, None, None), &of).unwrap(), None);
        assert!(
            unheeded(&of)
                .unwrap()
                .contains("torchrun started this as process 1 of 2")
        );
        assert_eq!(unheeded(&|_| None), None);
    }

    #[test]
    fn the_first_node_of_a_list() {
        for (list, first) in [
            ("node1", Some("node1")),
            ("node1,node2", Some("node1")),
            ("gpu[007-12,20],a", Some("gpu007")),
            ("r[1-2]n[3,5-6].site", Some("r1n3.site")),
            ("", None),
            ("[", None),
            ("a;b", None),
        ] {
            assert_eq!(first_node(list).as_deref(), first, "{list}");
        }
    }
}
