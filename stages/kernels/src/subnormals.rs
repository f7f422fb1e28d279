//! Subnormal numbers, those below 1.2e-38 in f32, count as zero on the threads that compute.
//!
//! Activations, gradients and above all the optimizer's second moments (squares of gradients) often fall below that
//! size. Intel's processors leave their fast path for each instruction with a subnormal operand or result, which costs
//! more than half of the training time there; no useful result depends on such numbers. So the threads that compute,
//! all of them made by [`threads`](crate::threads), have the two bits set by which a processor reads subnormal numbers
//! as zero and writes zero in their place: DAZ and FTZ of MXCSR on x86-64, FZ of FPCR on AArch64.
//!
//! The bits apply to scalar instructions and to vectors of any width; the x87 unit, to which they do not apply, is not
//! used. So results still have the same bits on every x86-64 processor, and for any number of threads, as long as *all*
//! threads that work on a result are set alike. Conversions between f32 and half precision are the exception by
//! definition: they keep subnormal halves, on every processor.
//!
//! A thread begins with the setting of the one that starts it. Nothing but arithmetic changes: moving, comparing bits, parsing
//! and printing numbers do not. Foreign code (a callback of the caller) runs with subnormal numbers: see [`kept`].
//!
//! On a GPU, kernels keep subnormal numbers, which costs nothing there.

use std::marker::PhantomData;

/// Whether this thread reads and writes zeros for subnormal numbers.
pub fn are_flushed() -> bool {
    control::FLUSH != 0 && control::get() & control::FLUSH == control::FLUSH
}

/// Runs `work` with zeros for subnormal numbers on this thread.
pub fn flushed<R>(work: impl FnOnce() -> R) -> R {
    let _restored = Restored::after(|control| control | control::FLUSH);
    work()
}

/// Runs `work` with subnormal numbers on this thread, as foreign code expects.
pub fn kept<R>(work: impl FnOnce() -> R) -> R {
    let _restored = Restored::after(|control| control & !control::FLUSH);
    work()
}

/// Sets this thread to zeros for subnormal numbers, to its end.
pub(crate) fn flush_for_good() {
    control::set(control::get() | control::FLUSH);
}

/// Restores the setting of the thread, also when `work` panics.
struct Restored {
    before: control::Control,
    /// It belongs to its thread.
    _thread: PhantomData<*const ()>,
}

impl Restored {
    fn after(change: impl FnOnce(control::Control) -> control::Control) -> Self {
        let before = control::get();
        control::set(change(before));
        Self {
            before,
            _thread: PhantomData,
        }
    }
}

impl Drop for Restored {
    fn drop(&mut self) {
        // Only these bits are restored: exception flags raised meanwhile stay.
        let now = control::get() & !control::FLUSH;
        control::set(now | (self.before & control::FLUSH));
    }
}

/// The control register of this thread's arithmetic.
#[cfg(target_arch = "x86_64")]
mod control {
    pub type Control = u32;

    /// FTZ, bit 15, and DAZ, bit 6, which every x86-64 processor has.
    pub const FLUSH: Control = 1 << 15 | 1 << 6;

    pub fn get() -> Control {
        let mut control: Control = 0;
        // SAFETY: the instruction stores MXCSR into these four bytes and does nothing else.
        unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut control, options(nostack, preserves_flags)) };
        control
    }

    pub fn set(control: Control) {
        // SAFETY: the value is the register's own with FTZ and DAZ changed, so no reserved bit is set, exceptions stay
        // masked and rounding stays as it is. Beyond that this leans on more than Rust promises: the compiler takes for
        // granted that arithmetic on subnormal numbers is that of IEEE 754, and what it computes itself (constants), or
        // moves across this instruction, keeps them. What is seen of it is a value below 1.2e-38 in place of zero; the
        // golden tests, and those of equal bits for any number of threads, run with these bits set and would show more.
        unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const control, options(nostack, preserves_flags)) };
    }
}

/// The control register of this thread's arithmetic.
#[cfg(target_arch = "aarch64")]
mod control {
    pub type Control = u64;

    /// FZ: operands and results, of f32 and f64.
    pub const FLUSH: Control = 1 << 24;

    pub fn get() -> Control {
        let control: Control;
        // SAFETY: the instruction reads FPCR and does nothing else.
        unsafe { std::arch::asm!("mrs {}, fpcr", out(reg) control, options(nomem, nostack, preserves_flags)) };
        control
    }

    pub fn set(control: Control) {
        // SAFETY: the value is the register's own with FZ changed. As to what the compiler takes for granted, see above for
        // x86-64.
        unsafe { std::arch::asm!("msr fpcr, {}", in(reg) control, options(nostack, preserves_flags)) };
    }
}

/// Other processors stay as they are.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod control {
    pub type Control = u32;

    pub const FLUSH: Control = 0;

    pub fn get() -> Control {
        0
    }

    pub fn set(_: Control) {}
}

#[cfg(all(test, any(target_arch = "x86_64", target_arch = "aarch64")))]
mod tests {
    use std::hint::black_box;
    use std::panic::catch_unwind;

    use super::*;

    /// Whether a product that is subnormal, and one of a subnormal number, come out as zero. In f32 and f64, by scalar
    /// instructions and by vectors.
    #[inline(never)]
    fn zeros() -> [bool; 4] {
        let (least, half) = (black_box([f32::MIN_POSITIVE; 16]), black_box([0.5f32; 16]));
        let mut written = [1.0f32; 16];
        for ((written, least), half) in written.iter_mut().zip(&least).zip(&half) {
            *written = least * half;
        }
        let subnormal = black_box(f32::from_bits(1 << 22));
        let least = black_box(f64::MIN_POSITIVE);
        let subnormal_wide = black_box(f64::from_bits(1 << 51));
        [
            black_box(written).iter().all(|x| x.to_bits() == 0),
            (subnormal * black_box(1e30)).to_bits() == 0,
            (least * black_box(0.5)).to_bits() == 0,
            (subnormal_wide * black_box(1e30)).to_bits() == 0,
        ]
    }

    #[test]
    fn subnormal_numbers_are_zero_within_and_numbers_without() {
        assert_eq!(zeros(), [false; 4]);
        let before = control::get();
        flushed(|| {
            assert_eq!(zeros(), [true; 4]);
            assert!(are_flushed());
            kept(|| {
                assert_eq!(zeros(), [false; 4]);
                flushed(|| assert_eq!(zeros(), [true; 4]));
                assert_eq!(zeros(), [false; 4]);
            });
            assert_eq!(zeros(), [true; 4]);
        });
        assert_eq!(zeros(), [false; 4]);
        assert!(catch_unwind(|| flushed(|| panic!("a panic"))).is_err());
        assert_eq!(zeros(), [false; 4]);
        // Only exception flags differ.
        let flags = if cfg!(target_arch = "x86_64") { 0x3f } else { 0 };
        assert_eq!(control::get() & !flags, before & !flags);
    }

    #[test]
    fn a_thread_begins_with_the_setting_of_the_one_that_starts_it() {
        assert_eq!(flushed(|| std::thread::spawn(zeros).join().unwrap()), [true; 4]);
        assert_eq!(std::thread::spawn(zeros).join().unwrap(), [false; 4]);
    }

    /// Numbers that are read and printed do not pass through arithmetic.
    #[test]
    fn subnormal_numbers_are_read_and_printed_as_they_are() {
        flushed(|| {
            for bits in [1u64, 1 << 40, (1 << 52) - 1] {
                let text = format!("{:e}", f64::from_bits(bits));
                assert_eq!(text.parse::<f64>().unwrap().to_bits(), bits, "{text}");
            }
            assert_eq!("1e-45".parse::<f32>().unwrap().to_bits(), 1);
        });
    }
}
