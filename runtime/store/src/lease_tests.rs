use flow_storage::Location;
use flow_storage_testing::{Fault, FaultRule, TestServer};

use super::*;

const PATIENCE: Patience = Patience {
    beat: Duration::from_millis(200),
    fresh: Duration::from_secs(2),
    stale: Duration::from_secs(4),
    look: Duration::from_millis(50),
    wait: Duration::from_secs(20),
};

struct Place {
    server: TestServer,
    _root: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("bucket")).unwrap();
        Place {
            server: TestServer::start(root.path()).unwrap(),
            _root: root,
        }
    }

    fn take(&self, run: &str) -> Result<Lease, StoreError> {
        Lease::take(&self.server.storage(), &url(), run, PATIENCE)
    }

    fn lock(&self) -> PathBuf {
        self.server.root().join("bucket/state/lock")
    }
}

fn url() -> ObjectUrl {
    match Location::parse("s3://bucket/state").unwrap() {
        Location::Object(url) => url,
        Location::Local(path) => panic!("{}", path.display()),
    }
}

/// As if the process, or its machine, had been stopped for `time`.
fn sleep_for(lease: &Lease, time: Duration) {
    let mut renewed = lease.state.renewed.lock().unwrap();
    renewed.at = renewed.at.checked_sub(time).unwrap_or(renewed.at);
    renewed.since_start = renewed.since_start.map(|since| since.saturating_sub(time));
}

/// One that nobody has taken over meanwhile goes on; whoever asks waits until that is known.
#[test]
fn a_process_that_slept_goes_on_where_it_still_has_the_lease() {
    let place = Place::new();
    let lease = place.take("one").unwrap();
    // As far back as the clock goes.
    let up = Moment::now().since_start.unwrap();
    let no_renewal = lease.state.held();
    sleep_for(&lease, (10 * PATIENCE.wait).min(up));
    assert!(!lease.state.is_fresh());
    drop(no_renewal);
    lease.state.check().unwrap();
    assert!(lease.state.is_fresh());
}

#[test]
fn a_process_that_slept_while_another_one_took_the_lease_over_ends() {
    let place = Place::new();
    let lease = place.take("one").unwrap();
    // No renewal is under way before the other has it.
    let no_renewal = lease.state.held();
    sleep_for(&lease, PATIENCE.fresh);
    let other = LeaseRecord {
        released: true,
        ..LeaseRecord::new("two")
    };
    let (storage, lock) = (place.server.storage(), url().join(LOCK).unwrap());
    let (version, _) = storage.read_now(&lock, LONGEST).unwrap().unwrap();
    storage.put_if(&lock, &other.bytes().unwrap(), Some(&version)).unwrap();
    drop(no_renewal);
    let error = lease.state.check().unwrap_err();
    assert!(error.is_held() && error.to_string().contains("run two"), "{error}");
}

/// A lock that was deleted is written again by who has it, in whatever words storage says that it is gone.
#[test]
fn a_lock_that_is_deleted_is_written_again() {
    for refusal in [None, Some(404), Some(412)] {
        let place = Place::new();
        let lease = place.take("one").unwrap();
        let no_renewal = lease.state.held();
        if let Some(status) = refusal {
            place.server.fault(FaultRule {
                method: Some("PUT"),
                ..FaultRule::first(1, Fault::Status(status), "/state/lock")
            });
        }
        std::fs::remove_file(place.lock()).unwrap();
        sleep_for(&lease, PATIENCE.fresh);
        drop(no_renewal);
        lease.state.check().unwrap();
        assert!(place.lock().is_file(), "{refusal:?}");
        let error = place.take("two").err().unwrap();
        assert!(error.is_held(), "{error}");
    }
}

#[test]
fn a_run_is_followed_while_it_has_the_lock() {
    let place = Place::new();
    let follow = |run: &str| check_run(&place.server.storage(), &url(), run);
    assert!(matches!(follow("one"), Err(StoreError::NotHeld { .. })));
    let lease = place.take("one").unwrap();
    follow("one").unwrap();
    assert!(follow("two").unwrap_err().is_held());
    drop(lease);
    assert!(matches!(follow("one"), Err(StoreError::NotHeld { .. })));
}
