//! Recordings for the tests, and where they find golden figures.

use std::path::PathBuf;

/// The reference's figures of a bundled corpus, or of one in the folder that `FLOW_TEST_GOLDEN` names.
pub fn parity_golden(name: &str) -> PathBuf {
    let bundled = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/golden/data");
    std::env::var_os("FLOW_TEST_GOLDEN")
        .map_or_else(|| PathBuf::from(bundled), PathBuf::from)
        .join(name)
}

/// A WAV of 16-bit PCM.
pub fn wav(rate: u32, channels: u16, samples: &[i16]) -> Vec<u8> {
    let data: Vec<u8> = samples.iter().flat_map(|sample| sample.to_le_bytes()).collect();
    raw_wav(rate, channels, 1, 16, &data)
}

/// A WAV with any format tag.
pub fn raw_wav(rate: u32, channels: u16, format: u16, bits: u16, data: &[u8]) -> Vec<u8> {
    let block = channels * bits.div_ceil(8);
    let mut bytes = Vec::new();
    bytes.extend(b"RIFF");
    bytes.extend((36 + data.len() as u32).to_le_bytes());
    bytes.extend(b"WAVEfmt ");
    bytes.extend(16u32.to_le_bytes());
    bytes.extend(format.to_le_bytes());
    bytes.extend(channels.to_le_bytes());
    bytes.extend(rate.to_le_bytes());
    bytes.extend((rate * u32::from(block)).to_le_bytes());
    bytes.extend(block.to_le_bytes());
    bytes.extend(bits.to_le_bytes());
    bytes.extend(b"data");
    bytes.extend((data.len() as u32).to_le_bytes());
    bytes.extend(data);
    bytes
}
