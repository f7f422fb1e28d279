//! Answers of S3, Google Cloud Storage and Azure to a listing, without the objects whose keys the client does not know how to
//! name: it would refuse the whole page.

use std::borrow::Cow;

use object_store::path::Path as Key;

/// Elements that hold one object or prefix each, and the element in them that is its key.
const ENTRIES: [(&str, &str); 4] = [
    ("Contents", "Key"),
    ("CommonPrefixes", "Prefix"),
    ("Blob", "Name"),
    ("BlobPrefix", "Name"),
];

/// The answer without entries of unreadable keys, which `left_out` is called with. What is not of this form stays as it is.
pub(crate) fn readable_keys(answer: &[u8], left_out: &mut dyn FnMut(&str)) -> Vec<u8> {
    let Ok(text) = std::str::from_utf8(answer) else {
        return answer.to_vec();
    };
    let mut readable = String::with_capacity(text.len());
    let mut rest = text;
    // The next entry: where it begins and how long it is, with its key.
    while let Some((begin, length, key)) = next_entry(rest) {
        let (before, entry) = rest[..begin + length].split_at(begin);
        readable.push_str(before);
        match can_name(&key) {
            true => readable.push_str(entry),
            false => left_out(&key),
        }
        rest = &rest[begin + length..];
    }
    readable.push_str(rest);
    readable.into_bytes()
}

/// Whether the client can name an object: of `/a` it would make `a`, another key.
fn can_name(key: &str) -> bool {
    !key.starts_with('/') && Key::parse(key).is_ok()
}

/// An entry without a key, which the client judges, has an empty one here.
fn next_entry(text: &str) -> Option<(usize, usize, Cow<'_, str>)> {
    for (begin, _) in text.match_indices('<') {
        let entry = &text[begin..];
        let begun = |name: &str| entry[1..].strip_prefix(name).is_some_and(|rest| rest.starts_with('>'));
        let Some((name, key)) = ENTRIES.into_iter().find(|(name, _)| begun(name)) else {
            continue;
        };
        // One that does not end: nothing that follows is an entry.
        let content = within(entry, name)?;
        let length = name.len() + "<>".len() + content.len() + name.len() + "</>".len();
        let key = content
            .find(&format!("<{key}>"))
            .and_then(|at| within(&content[at..], key));
        return Some((begin, length, unescaped(key.unwrap_or_default())));
    }
    None
}

/// What is in the element `name` with which the text begins.
fn within<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let content = text.strip_prefix('<')?.strip_prefix(name)?.strip_prefix('>')?;
    content.find(&format!("</{name}>")).map(|end| &content[..end])
}

/// What is not a reference to a letter stays as it is.
fn unescaped(text: &str) -> Cow<'_, str> {
    quick_xml::escape::unescape(text).unwrap_or(Cow::Borrowed(text))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use crate::{Location, Storage};

    use super::*;

    fn contents(keys: &[&str]) -> String {
        let entry = |key: &&str| {
            format!(
                "<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>\
                 <ETag>&quot;e&quot;</ETag><Size>3</Size></Contents>"
            )
        };
        keys.iter().map(entry).collect()
    }

    fn page(content: &str) -> String {
        format!(
            "<?xml version=\"1.0\"?><ListBucketResult><Name>b</Name><Prefix>t/</Prefix><KeyCount>9</KeyCount>\
             <IsTruncated>false</IsTruncated>{content}</ListBucketResult>"
        )
    }

    fn of(text: &str) -> (String, Vec<String>) {
        let mut left_out = Vec::new();
        let readable = readable_keys(text.as_bytes(), &mut |key| left_out.push(key.to_owned()));
        (String::from_utf8(readable).unwrap(), left_out)
    }

    #[test]
    fn entries_of_other_keys_stay_as_they_are() {
        let good = ["t/a.wav", "t/b &amp; c.wav", "t/d #2?.wav", "t/"];
        let odd = ["t/a//b.wav", "t/./c.wav", "t/&#46;./d", "t/e&#10;f", "/f"];
        let mixed: Vec<&str> = odd
            .iter()
            .zip(good.iter().chain([&"t/z"]))
            .flat_map(|(odd, good)| [*odd, *good])
            .collect();
        let (readable, left_out) = of(&page(&contents(&mixed)));
        assert_eq!(readable, page(&contents(&[&good[..], &["t/z"]].concat())));
        assert_eq!(left_out, ["t/a//b.wav", "t/./c.wav", "t/../d", "t/e\nf", "/f"]);
        let prefixes = |names: &[&str]| -> String {
            let element = |name: &&str| format!("<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>");
            names.iter().map(element).collect()
        };
        let (readable, left_out) = of(&page(&prefixes(&["t/a/", "t/a//", "t/b/"])));
        assert_eq!(
            (readable, left_out),
            (page(&prefixes(&["t/a/", "t/b/"])), vec!["t/a//".to_owned()])
        );
        for broken in [
            "",
            "<Contents><Key>a//b",
            "<<Contents><Key></Key>",
            "&;<Contents>\u{e9}",
        ] {
            assert_eq!(of(broken), (broken.to_owned(), Vec::new()));
        }
        let blobs = "<Blobs><Blob><Name>a//b</Name></Blob><BlobPrefix><Name>c//</Name></BlobPrefix></Blobs>";
        assert_eq!(of(blobs).0, "<Blobs></Blobs>");
    }

    /// Answers every request with one listing.
    fn server(answer: String) -> String {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let _ = stream.read(&mut [0; 65536]);
                let _ = write!(
                    stream,
                    "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{answer}",
                    answer.len()
                );
            }
        });
        format!("http://{address}")
    }

    #[test]
    fn one_odd_key_does_not_stop_a_listing() {
        let keys = ["t/a.wav", "t/a//b.wav", "t/b #2.wav", "t/c?x=1.wav", "t/who?.wav"];
        let variables = [
            ("AWS_ENDPOINT_URL", server(page(&contents(&keys)))),
            ("AWS_ACCESS_KEY_ID", "t".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "t".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
        ];
        let storage = Storage::with_environment(variables.map(|(name, value)| (name.to_owned(), value)));
        let Ok(Location::Object(below)) = Location::parse("s3://b/t") else {
            panic!("a URL of object storage");
        };
        let listed = storage.list(&below).unwrap();
        let listed: Vec<&str> = listed.iter().map(|entry| entry.url.key()).collect();
        assert_eq!(listed, ["t/a.wav", "t/b #2.wav", "t/who?.wav"]);
        assert_eq!(
            storage.left_out().into_iter().collect::<Vec<_>>(),
            ["t/a//b.wav", "t/c?x=1.wav"]
        );
    }
}
