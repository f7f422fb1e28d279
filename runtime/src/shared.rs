//! What is made once, and shared for as long as somebody holds it.

use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Values by what they are made of, for a `static`: the workers of a run share one that is costly to make. Nothing here holds
/// a value, so that it is dropped with its last user, and made anew for the next.
pub struct Shared<K, V>(Mutex<Vec<(K, Weak<V>)>>);

impl<K: PartialEq, V> Shared<K, V> {
    /// Without values.
    pub const fn new() -> Self {
        Shared(Mutex::new(Vec::new()))
    }

    /// The value of `key` that somebody holds, or else what `make` gives. Who asks meanwhile waits, also for another key.
    /// `make` may not ask again.
    ///
    /// # Errors
    /// Those of `make`, which are not kept.
    pub fn get<E>(&self, key: K, make: impl FnOnce() -> Result<V, E>) -> Result<Arc<V>, E> {
        // A `make` that panicked has left what stood before.
        let mut shared = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        shared.retain(|(_, value)| value.strong_count() > 0);
        let same = shared.iter().find(|(of, _)| *of == key);
        if let Some(value) = same.and_then(|(_, value)| value.upgrade()) {
            return Ok(value);
        }
        let value = Arc::new(make()?);
        shared.push((key, Arc::downgrade(&value)));
        Ok(value)
    }
}

impl<K: PartialEq, V> Default for Shared<K, V> {
    fn default() -> Self {
        Shared::new()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_value_is_made_once_for_each_key_while_somebody_holds_it() {
        static SHARED: Shared<String, u32> = Shared::new();
        let made = Cell::new(0);
        let get = |key: &str| {
            SHARED.get(key.to_owned(), || {
                made.set(made.get() + 1);
                key.parse::<u32>()
            })
        };
        let (first, other) = (get("1").unwrap(), get("2").unwrap());
        assert!(Arc::ptr_eq(&first, &get("1").unwrap()) && (*first, *other) == (1, 2));
        assert_eq!(made.get(), 2);
        // Of one that was let go nothing is left; the other stays.
        drop(first);
        let again = get("1").unwrap();
        assert!(Arc::ptr_eq(&other, &get("2").unwrap()) && *again == 1);
        assert_eq!(made.get(), 3);
        // An error is not kept.
        assert!(get("x").is_err() && get("x").is_err());
        assert_eq!(made.get(), 5);
        // Who panics leaves it to the next.
        let panicking = || SHARED.get("3".to_owned(), || -> Result<u32, ()> { panic!("on purpose") });
        assert!(std::panic::catch_unwind(panicking).is_err());
        assert_eq!(*get("3").unwrap(), 3);
        assert!(Arc::ptr_eq(&again, &get("1").unwrap()));
    }
}
