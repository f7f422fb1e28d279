//! Values that are made once, and shared while in use.

use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A cache of values by key, for a `static`: the workers of a run share a value that is costly to make. It holds weak
/// references only, so a value is dropped with its last user and made again for the next.
pub struct Shared<K, V>(Mutex<Vec<(K, Weak<V>)>>);

impl<K: PartialEq, V> Shared<K, V> {
    /// Without values.
    pub const fn new() -> Self {
        Shared(Mutex::new(Vec::new()))
    }

    /// The value of `key` if it is in use, otherwise what `make` returns. Concurrent callers wait, also with another
    /// key. `make` must not call this again (deadlock).
    ///
    /// # Errors
    /// Those of `make`, which are not kept.
    pub fn get<E>(&self, key: K, make: impl FnOnce() -> Result<V, E>) -> Result<Arc<V>, E> {
        // A panic in `make` leaves the cache as it was.
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
        // The value that was dropped is gone; the other stays.
        drop(first);
        let again = get("1").unwrap();
        assert!(Arc::ptr_eq(&other, &get("2").unwrap()) && *again == 1);
        assert_eq!(made.get(), 3);
        // An error is not kept.
        assert!(get("x").is_err() && get("x").is_err());
        assert_eq!(made.get(), 5);
        // After a panic the next caller makes the value.
        let panicking = || SHARED.get("3".to_owned(), || -> Result<u32, ()> { panic!("on purpose") });
        assert!(std::panic::catch_unwind(panicking).is_err());
        assert_eq!(*get("3").unwrap(), 3);
        assert!(Arc::ptr_eq(&again, &get("1").unwrap()));
    }
}
