//! Sizes in memory.

/// `8GB`, `7.5 GiB`, `24000MB`, or a number of bytes.
pub fn bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "mb" => 1e6,
        "mib" | "m" => f64::from(1 << 20),
        "gb" => 1e9,
        "gib" | "g" => f64::from(1 << 30),
        _ => {
            return Err(format!(
                "`{unit}` is not a unit; write 8GB, 7.5GiB, 24000MB or a number of bytes"
            ));
        }
    };
    match number.parse::<f64>() {
        Ok(number) if number > 0.0 && number * factor < 1e18 => Ok((number * factor) as u64),
        _ => Err("write 8GB, 7.5GiB, 24000MB or a number of bytes".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn sizes_are_read() {
        for (text, expected) in [
            ("8GB", 8_000_000_000),
            ("0.5 GiB", 1 << 29),
            ("24000MB", 24_000_000_000),
            ("77", 77),
        ] {
            assert_eq!(bytes(text), Ok(expected), "{text}");
        }
        for wrong in [
            "",
            "GB",
            "8 PB",
            "-1GB",
            "1e9",
            "1.2.3GB",
            "99999999999999999999GB",
            "0",
        ] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
