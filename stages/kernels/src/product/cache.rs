//! The size of the L2 cache, from CPUID.

use std::arch::x86_64::{__cpuid_count, CpuidResult};
use std::sync::OnceLock;

/// Assumed where the processor does not report it: servers since 2017 have at least this.
const DEFAULT: usize = 512 << 10;

/// Bytes of the L2 cache for one thread of the processor; where two share a core, each has half.
pub fn l2_bytes() -> usize {
    static FOUND: OnceLock<usize> = OnceLock::new();
    *FOUND.get_or_init(|| found().unwrap_or(DEFAULT))
}

fn found() -> Option<usize> {
    // Intel describes its caches in leaf 4, AMD in another leaf of the same format.
    let amd = 0x8000_001d;
    if told(0x8000_0000, 0).eax >= amd && caches(amd).next().is_some() {
        caches(amd).find_map(l2_share)
    } else if told(0, 0).eax >= 4 {
        caches(4).find_map(l2_share)
    } else {
        None
    }
}

#[allow(unused_unsafe, reason = "older versions of the library want it")]
fn told(leaf: u32, number: u32) -> CpuidResult {
    // SAFETY: every x86-64 processor has the instruction, which only reads.
    unsafe { __cpuid_count(leaf, number) }
}

/// The registers of a leaf for each cache.
fn caches(leaf: u32) -> impl Iterator<Item = CpuidResult> {
    // The list ends with a cache of no type; sixteen are more than any processor has.
    (0..16)
        .map(move |number| told(leaf, number))
        .take_while(|cache| cache.eax & 0x1f != 0)
}

/// A thread's share of a cache, if it is an L2 cache that data is kept in.
fn l2_share(cache: CpuidResult) -> Option<usize> {
    let CpuidResult { eax, ebx, ecx, .. } = cache;
    let (kind, level) = (eax & 0x1f, eax >> 5 & 7);
    if level != 2 || kind == 2 {
        return None;
    }
    let threads = (eax >> 14 & 0xfff) as usize + 1;
    let (ways, partitions, line) = (ebx >> 22, ebx >> 12 & 0x3ff, ebx & 0xfff);
    let bytes = [ways, partitions, line, ecx]
        .iter()
        .map(|one| *one as usize + 1)
        .product::<usize>();
    Some(bytes / threads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_has_its_share_of_the_second_cache() {
        // Ice Lake: 1.25 MiB of 20 ways, two threads; its first cache, and the instructions' one, are not meant.
        let cache = |kind: u32, level: u32, threads: u32, ways: u32, sets: u32| CpuidResult {
            eax: kind | level << 5 | (threads - 1) << 14,
            ebx: (ways - 1) << 22 | 63,
            ecx: sets - 1,
            edx: 0,
        };
        assert_eq!(l2_share(cache(3, 2, 2, 20, 1024)), Some(640 << 10));
        assert_eq!(l2_share(cache(3, 2, 1, 8, 1024)), Some(512 << 10));
        assert_eq!(l2_share(cache(1, 1, 2, 12, 64)), None);
        assert_eq!(l2_share(cache(2, 2, 2, 8, 64)), None);
        assert_eq!(l2_share(cache(3, 3, 16, 16, 32768)), None);
        assert!((64 << 10..1 << 30).contains(&l2_bytes()), "{}", l2_bytes());
    }
}
