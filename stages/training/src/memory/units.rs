//! Sizes in messages.

/// A number of bytes as text: `8.2 GB`, `340 MB`.
pub fn gigabytes(bytes: u64) -> String {
    match bytes as f64 / 1e9 {
        large if large >= 0.9995 => format!("{large:.1} GB"),
        small => format!("{:.0} MB", small * 1e3),
    }
}
