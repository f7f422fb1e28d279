//! Where a process listens: at the addresses that the file of hosts has for it.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::Instant;

use super::joining::{AGAIN, Join, JoinError, JoinMessage, failed, is_loopback_host};

/// The listening sockets of a process, all at one port.
pub(super) struct Listeners {
    all: Vec<TcpListener>,
    port: u16,
}

impl Listeners {
    /// Listens at `port` (0: any that is free). A port that is taken is waited for until `until`: the process that was
    /// killed there may not be gone yet. Warns where it listens more widely than it was asked to, and where
    /// others than this machine can connect though there is no secret.
    pub fn open(join: &Join, port: u16, until: Instant, tell: &dyn Fn(JoinMessage)) -> Result<Listeners, JoinError> {
        let all = bind_once_free(join, port, until, tell).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => failed(
                format!("port {port}, at which process {} is to listen, is taken", join.process),
                "another run may be using it; give another port",
            ),
            _ => failed(format!("cannot listen at port {port}: {error}"), "give another port"),
        })?;
        let unusable = |error: io::Error| failed(format!("cannot listen at port {port}: {error}"), "");
        let mut addresses = Vec::new();
        for listener in &all {
            listener.set_nonblocking(true).map_err(unusable)?;
            addresses.push(listener.local_addr().map_err(unusable)?);
        }
        let Some(port) = addresses.first().map(SocketAddr::port) else {
            return Err(failed(
                format!("cannot listen: {} is not an address of this machine", join.leader),
                "",
            ));
        };
        let open = addresses
            .iter()
            .find(|address| !address.ip().to_canonical().is_loopback());
        if let Some(address) = open
            && join.secret.is_none()
        {
            tell(JoinMessage::Warning(format!(
                "process {} listens at {address} without a secret: whoever can connect to it and knows the pipeline can join \
                 the run; start all processes with the same --secret-file FILE",
                join.process
            )));
        }
        Ok(Listeners { all, port })
    }

    /// The port of all of them.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Accepts waiting connections, `most` in all. Returns whether there may be more.
    pub fn accept(&self, most: usize, mut take: impl FnMut(TcpStream, SocketAddr)) -> bool {
        let share = most.div_ceil(self.all.len().max(1));
        let mut more = false;
        for listener in &self.all {
            let accepted = (0..share).map_while(|_| listener.accept().ok());
            more |= accepted.map(|(stream, address)| take(stream, address)).count() == share;
        }
        more
    }
}

fn bind_once_free(join: &Join, port: u16, until: Instant, tell: &dyn Fn(JoinMessage)) -> io::Result<Vec<TcpListener>> {
    let mut is_first = true;
    loop {
        // Later tries have nothing new to tell.
        let tell: &dyn Fn(JoinMessage) = if is_first { tell } else { &|_| {} };
        let bound = bind(join, port, tell);
        let is_taken = matches!(&bound, Err(error) if error.kind() == io::ErrorKind::AddrInUse);
        if !is_taken || Instant::now() >= until {
            return bound;
        }
        tell(JoinMessage::Note(format!(
            "port {port}, at which process {} is to listen, is taken: waiting for it",
            join.process
        )));
        is_first = false;
        thread::sleep(AGAIN);
    }
}

fn bind(join: &Join, port: u16, tell: &dyn Fn(JoinMessage)) -> io::Result<Vec<TcpListener>> {
    let Join { process, leader, .. } = join;
    if let Some(host) = join.hosts.get(*process) {
        let why = match addresses(host) {
            Ok(addresses) if addresses.is_empty() => "is a loopback address on this machine".to_owned(),
            Ok(addresses) => {
                let bound = bind_those_here(&addresses, port)?;
                if !bound.is_empty() {
                    return Ok(bound);
                }
                "is not an address of this machine".to_owned()
            }
            Err(error) => format!("cannot be resolved: {error}"),
        };
        if !leader.is_local() {
            tell(JoinMessage::Warning(format!(
                "process {process} listens on all network interfaces: {host}, its host in the file of hosts, {why}"
            )));
        }
    }
    if leader.is_local() {
        return bind_those_here(&addresses(&leader.host)?, port);
    }
    let everywhere = TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|error| match error.kind() {
        io::ErrorKind::AddrInUse => Err(error),
        _ => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
    });
    Ok(vec![everywhere?])
}

/// The addresses of a host at which others reach it: a machine may resolve its own name to a loopback address, where
/// only itself would reach it.
fn addresses(host: &str) -> io::Result<Vec<IpAddr>> {
    let mut addresses: Vec<IpAddr> = Vec::new();
    for address in (host, 0).to_socket_addrs()? {
        let ip = address.ip();
        if !addresses.contains(&ip) && (is_loopback_host(host) || !ip.to_canonical().is_loopback()) {
            addresses.push(ip);
        }
    }
    Ok(addresses)
}

/// Binds one port of those addresses that this machine has.
fn bind_those_here(addresses: &[IpAddr], port: u16) -> io::Result<Vec<TcpListener>> {
    let mut bound: Vec<TcpListener> = Vec::new();
    for &ip in addresses {
        // Any port that is free at the first address is that of all.
        let wanted = bound.first().map_or(Ok(port), |first| Ok(first.local_addr()?.port()));
        match wanted.and_then(|port| TcpListener::bind((ip, port))) {
            Ok(listener) => bound.push(listener),
            Err(error) => match error.kind() {
                io::ErrorKind::AddrInUse if port == 0 && !bound.is_empty() => {}
                io::ErrorKind::AddrInUse | io::ErrorKind::PermissionDenied => return Err(error),
                // An address of another machine, or of a protocol that this one does not have.
                _ => {}
            },
        }
    }
    Ok(bound)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::time::Duration;

    use super::super::{Address, SharedSecret};
    use super::*;
    use flow_base::digest::Digest;

    /// The addresses at which process 0 of 2 listens, and the warnings.
    fn opened(leader: &str, hosts: &[&str], secret: Option<SharedSecret>) -> (Vec<IpAddr>, String) {
        let join = Join {
            process: 0,
            processes: 2,
            leader: Address {
                host: leader.into(),
                port: 0,
            },
            port: None,
            hosts: hosts.iter().map(|&host| host.to_owned()).collect(),
            secret,
            digest: Digest::of(b"this run"),
            settings: Vec::new(),
            timeout: Duration::from_secs(20),
        };
        let warnings = RefCell::new(String::new());
        let listeners = Listeners::open(&join, 0, Instant::now(), &|message| match message {
            JoinMessage::Warning(text) => *warnings.borrow_mut() += &text,
            JoinMessage::Note(text) => panic!("{text}"),
        })
        .unwrap();
        let ports = listeners.all.iter().map(|listener| listener.local_addr().unwrap());
        let ips = ports.map(|address| {
            assert_eq!(address.port(), listeners.port());
            address.ip()
        });
        (ips.collect(), warnings.into_inner())
    }

    #[test]
    fn only_the_address_of_the_file_of_hosts_is_listened_at() {
        let loopback = vec![IpAddr::from(Ipv4Addr::LOCALHOST)];
        for hosts in [&["127.0.0.1", "node2"][..], &["127.0.0.1"]] {
            assert_eq!(opened("node1", hosts, None), (loopback.clone(), String::new()));
        }
        // Known by a launcher alone.
        assert_eq!(opened("127.0.0.1", &[], None), (loopback, String::new()));
        let (ips, warned) = opened("localhost", &["localhost", "localhost"], None);
        assert!(
            ips.iter().all(IpAddr::is_loopback) && warned.is_empty(),
            "{ips:?} {warned}"
        );
    }

    #[test]
    fn what_is_listened_at_beyond_that_is_said() {
        // An address for documentation, which no machine has.
        let (ips, warned) = opened("192.0.2.1", &["192.0.2.1", "192.0.2.2"], None);
        assert!(ips[0].is_unspecified() && ips.len() == 1, "{ips:?}");
        assert!(
            warned.contains("192.0.2.1, its host in the file of hosts, is not an address of this machine"),
            "{warned}"
        );
        assert!(
            warned.contains("without a secret") && warned.contains("--secret-file"),
            "{warned}"
        );
        let (_, warned) = opened("192.0.2.1", &[], Some(SharedSecret::new(b"0123456789abcdef")));
        assert_eq!(warned, "");
        // Loopback stays loopback.
        let (ips, warned) = opened("localhost", &["192.0.2.1", "localhost"], None);
        assert!(
            ips.iter().all(IpAddr::is_loopback) && warned.is_empty(),
            "{ips:?} {warned}"
        );
    }
}
