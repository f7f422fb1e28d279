//! Files that settings name, read once and shared.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// What was read from a file that a setting names, and the name. A field of the settings of a kind.
///
/// The settings of a stage are evaluated several times: when the pipeline is checked, when keys are made, and on each
/// worker. If the file were read each time, a key could hold the digest of other bytes than those that are used. So
/// every file that decides a stage's output is read through this type, and the bytes used are those whose digest is in
/// the key.
///
/// Clones share what was read. Under another name (a clone whose setting was changed) the file is read again.
pub struct ReadOnce<T>(Arc<Mutex<Option<Read<T>>>>);

/// A file name, and what was read from that file.
type Read<T> = (String, Arc<T>);

impl<T> ReadOnce<T> {
    /// What `read` returned for `name` the first time. Concurrent callers wait. An error is not kept.
    ///
    /// # Errors
    /// Those of `read`.
    pub fn get<E>(&self, name: &str, read: impl FnOnce() -> Result<T, E>) -> Result<Arc<T>, E> {
        // A panic in `read` leaves the previous value.
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &*held {
            Some((of, value)) if of == name => Ok(Arc::clone(value)),
            _ => {
                let value = Arc::new(read()?);
                *held = Some((name.to_string(), Arc::clone(&value)));
                Ok(value)
            }
        }
    }

    /// What was read for `name`, if it was.
    pub fn held(&self, name: &str) -> Option<Arc<T>> {
        let held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of_name = held.as_ref().filter(|(of, _)| of == name);
        of_name.map(|(_, value)| Arc::clone(value))
    }

    /// Drops what was read: existing holders keep it, later callers read the file again. For large values whose digest
    /// the caller compares with that of the plan.
    pub fn forget(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

impl<T> Clone for ReadOnce<T> {
    fn clone(&self) -> Self {
        ReadOnce(Arc::clone(&self.0))
    }
}

impl<T> Default for ReadOnce<T> {
    fn default() -> Self {
        ReadOnce(Arc::default())
    }
}

impl<T> fmt::Debug for ReadOnce<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReadOnce")
    }
}

/// Settings are the same whether their files were read already or not.
impl<T> PartialEq for ReadOnce<T> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_once_and_an_error_is_not_kept() {
        let once = ReadOnce::<u32>::default();
        assert_eq!(once.get("a", || Err("not there")), Err("not there"));
        assert_eq!(once.get("a", || Ok::<_, ()>(1)).map(|value| *value), Ok(1));
        let clone = once.clone();
        assert_eq!(clone.get("a", || Err("read again")).map(|value| *value), Ok(1));
        assert_eq!(clone.get("b", || Ok::<_, ()>(2)).map(|value| *value), Ok(2));
        assert_eq!((once.held("b").as_deref(), once.held("a")), (Some(&2), None));
        clone.forget();
        assert_eq!(once.held("b"), None);
    }
}
