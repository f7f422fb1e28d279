//! Counts connections by address, so that one client cannot take the places of all others.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The connections that are open, by the address of the client.
#[derive(Debug, Default)]
pub struct Addresses {
    /// Most for each address; 0 for no bound.
    most: usize,
    /// Addresses without a limit.
    trusted: Vec<IpAddr>,
    open: Mutex<HashMap<IpAddr, usize>>,
}

/// The place of a connection, given back when this is dropped.
#[derive(Debug)]
pub struct AddressPlace {
    addresses: Arc<Addresses>,
    /// None: it is not counted.
    client: Option<IpAddr>,
}

impl Addresses {
    pub fn new(most: usize, trusted: &[IpAddr]) -> Self {
        Self {
            most,
            trusted: trusted.iter().map(IpAddr::to_canonical).collect(),
            open: Mutex::default(),
        }
    }

    /// A place for one more connection of this address. None: it has reached its limit.
    pub fn place(self: &Arc<Self>, address: IpAddr) -> Option<AddressPlace> {
        let address = address.to_canonical();
        let is_counted = self.most > 0 && !self.trusted.contains(&address);
        let client = is_counted.then(|| client_of(address));
        if let Some(client) = client {
            let mut open = self.open();
            let count = open.entry(client).or_default();
            if *count >= self.most {
                return None;
            }
            *count += 1;
        }
        Some(AddressPlace {
            addresses: Arc::clone(self),
            client,
        })
    }

    fn open(&self) -> MutexGuard<'_, HashMap<IpAddr, usize>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for AddressPlace {
    fn drop(&mut self) {
        let Some(client) = self.client else { return };
        let mut open = self.addresses.open();
        if let Some(count) = open.get_mut(&client) {
            *count -= 1;
            if *count == 0 {
                open.remove(&client);
            }
        }
    }
}

/// The key of a client: an IPv4 address, or an IPv6 /64 network, whose addresses may all be of one machine.
fn client_of(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn places_are_counted_for_each_client_and_given_back() {
        let addresses = Arc::new(Addresses::new(2, &[address("10.0.0.1")]));
        let place = |text: &str| addresses.place(address(text));
        let first = place("192.0.2.1").unwrap();
        // An IPv4-mapped IPv6 address, as a dual-stack socket shows it.
        let second = place("::ffff:192.0.2.1").unwrap();
        assert!(place("192.0.2.1").is_none());
        assert!(place("192.0.2.2").is_some(), "another client");
        drop(first);
        let third = place("192.0.2.1").unwrap();
        assert!(place("192.0.2.1").is_none());
        let of_network = [place("2001:db8::1").unwrap(), place("2001:db8::2:3").unwrap()];
        assert!(place("2001:db8::ffff:0:0:1").is_none(), "the same network");
        assert!(place("2001:db8:0:1::1").is_some());
        let of_proxy: Vec<_> = (0..5).map(|_| place("10.0.0.1").unwrap()).collect();
        drop((second, third, of_network, of_proxy));
        assert!(addresses.open().is_empty(), "nothing is kept of clients that went");
    }

    #[test]
    fn without_a_bound_nothing_is_counted() {
        let addresses = Arc::new(Addresses::new(0, &[]));
        let places: Vec<_> = (0..1000)
            .map(|_| addresses.place(address("192.0.2.1")).unwrap())
            .collect();
        assert!(addresses.open().is_empty());
        drop(places);
    }
}
