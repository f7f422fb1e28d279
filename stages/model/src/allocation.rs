//! Counts the program's allocations.

use std::alloc::{GlobalAlloc, Layout};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::Relaxed};

/// An allocator that forwards to another one and counts bytes while a [`Count`] exists. To be declared as the program's
/// global allocator.
pub struct Counted<A>(pub A);

static COUNTING: AtomicBool = AtomicBool::new(false);
/// Whether anything was counted since the count began.
static COUNTED: AtomicBool = AtomicBool::new(false);
static HELD: AtomicI64 = AtomicI64::new(0);
static MOST: AtomicI64 = AtomicI64::new(0);

fn count(bytes: i64) {
    if COUNTING.load(Relaxed) {
        COUNTED.store(true, Relaxed);
        let held = HELD.fetch_add(bytes, Relaxed) + bytes;
        if bytes > 0 {
            MOST.fetch_max(held, Relaxed);
        }
    }
}

// SAFETY: every call is forwarded unchanged; counting uses atomics, which allocate nothing.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Counted<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promise, handed on.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's promise, handed on.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: the caller's promise, handed on.
        unsafe { self.0.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as i64 - layout.size() as i64);
        // SAFETY: the caller's promise, handed on.
        unsafe { self.0.realloc(pointer, layout, size) }
    }
}

/// A count of all threads' allocations since it began. There is one at a time.
#[derive(Debug)]
pub struct Count(());

impl Count {
    /// Begins to count from 0. None if another count exists, or if the program's allocator is not [`Counted`].
    pub fn begin() -> Option<Count> {
        if COUNTING.swap(true, Relaxed) {
            return None;
        }
        HELD.store(0, Relaxed);
        MOST.store(0, Relaxed);
        COUNTED.store(false, Relaxed);
        let count = Count(());
        drop(std::hint::black_box(vec![1u8; 4096]));
        COUNTED.load(Relaxed).then_some(count)
    }

    /// Bytes allocated and not freed since the count began. Below 0 where older memory was freed.
    pub fn held(&self) -> i64 {
        HELD.load(Relaxed)
    }

    /// The peak of [`Count`]'s bytes since the count began or this was last called.
    pub fn most(&self) -> i64 {
        MOST.swap(HELD.load(Relaxed), Relaxed)
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        COUNTING.store(false, Relaxed);
    }
}
