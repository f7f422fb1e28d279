//! Addresses of pages.

/// Text as part of an address: all but letters, digits and `-_.~` as `%XX`.
pub fn encoded(text: &str) -> String {
    let mut address = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => address.push(char::from(byte)),
            _ => address.push_str(&format!("%{byte:02X}")),
        }
    }
    address
}

/// An address with a query of these names and values.
pub fn address<'a>(path: &str, query: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let mut text = path.to_owned();
    for (number, (name, value)) in query.into_iter().enumerate() {
        text.push(if number == 0 { '?' } else { '&' });
        text.push_str(&format!("{}={}", encoded(name), encoded(value)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_into_an_address_stays_one_value() {
        let text = address("/rows", [("stage", "a/b&c=d"), ("q", "नमस्ते \"%+#")]);
        assert_eq!(
            text,
            "/rows?stage=a%2Fb%26c%3Dd&q=%E0%A4%A8%E0%A4%AE%E0%A4%B8%E0%A5%8D%E0%A4%A4%E0%A5%87%20%22%25%2B%23"
        );
    }
}
