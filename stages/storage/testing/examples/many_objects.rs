//! Serves a bucket of made-up objects by the protocol of S3, to measure what many of them cost: `many_objects COUNT [ADDRESS]`.
//!
//! Nothing is on disk. `s3://many/corpus/manifest.jsonl` has COUNT rows, whose recordings are
//! `s3://many/corpus/audio/<thousand>/<number>.flac`; `s3://many/flat/<number>.flac` are as many in one folder. The recordings can be
//! listed and looked at, and not be read.

use std::error::Error;
use std::fmt::Write as _;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::Arc;

use percent_encoding::percent_decode_str;

const MANIFEST: &str = "corpus/manifest.jsonl";
const PAGE: usize = 1_000;
const SIZE: usize = 123_456;

struct Bucket {
    count: usize,
    manifest: String,
}

impl Bucket {
    /// The key of an object by its number, in the order of keys.
    fn key(&self, number: usize) -> String {
        match number.checked_sub(self.count) {
            None => format!("corpus/audio/{:05}/{:03}.flac", number / PAGE, number % PAGE),
            Some(0) => MANIFEST.into(),
            Some(flat) => format!("flat/{:08}.flac", flat - 1),
        }
    }

    fn keys(&self) -> usize {
        2 * self.count + 1
    }

    /// The number of the first object whose key is not before this one.
    fn first(&self, key: &str) -> usize {
        let (mut low, mut high) = (0, self.keys());
        while low < high {
            let middle = low.midpoint(high);
            match *self.key(middle) < *key {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        low
    }

    fn size(&self, key: &str) -> Option<usize> {
        let is_there = self.first(key) < self.keys() && self.key(self.first(key)) == key;
        is_there.then_some(if key == MANIFEST { self.manifest.len() } else { SIZE })
    }

    /// A page of a listing.
    fn list(&self, prefix: &str, delimiter: bool, after: Option<&str>) -> String {
        let mut number = match after {
            Some(after) => self.first(&format!("{after}\u{0}")),
            None => self.first(prefix),
        };
        let (mut entries, mut found, mut last) = (String::new(), 0, String::new());
        while number < self.keys() && found < PAGE {
            let key = self.key(number);
            let Some(below) = key.strip_prefix(prefix) else { break };
            found += 1;
            match below.split_once('/').filter(|_| delimiter) {
                Some((folder, _)) => {
                    let folder = format!("{prefix}{folder}/");
                    let _ = write!(entries, "<CommonPrefixes><Prefix>{folder}</Prefix></CommonPrefixes>");
                    // `0` follows `/`, and no key has this letter.
                    last = format!("{}/\u{10ffff}", &folder[..folder.len() - 1]);
                    number = self.first(&last);
                }
                None => {
                    let _ = write!(
                        entries,
                        "<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>\
                         <ETag>&quot;{:032x}&quot;</ETag><Size>{}</Size></Contents>",
                        (number as u128 + 1) * 0x1234_5678_9abc_def0_1357_9bdf,
                        self.size(&key).unwrap_or_default(),
                    );
                    last = key;
                    number += 1;
                }
            }
        }
        let more = number < self.keys() && self.key(number).starts_with(prefix);
        let token = match more {
            true => format!("<NextContinuationToken>{last}</NextContinuationToken>"),
            false => String::new(),
        };
        format!(
            "<?xml version=\"1.0\"?><ListBucketResult><Name>many</Name><Prefix>{prefix}</Prefix><KeyCount>{found}</KeyCount>\
             <IsTruncated>{more}</IsTruncated>{token}{entries}</ListBucketResult>"
        )
    }

    /// Status, further headers and body.
    fn answer(&self, target: &str, range: Option<Range<usize>>) -> (u16, String, Vec<u8>) {
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let text = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
        let value = |name: &str| {
            let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
            pairs.find(|(key, _)| *key == name).map(|(_, value)| text(value))
        };
        let path = text(path);
        let key = path
            .trim_start_matches('/')
            .strip_prefix("many")
            .map(|key| key.trim_matches('/'));
        let Some(key) = key else {
            return (404, String::new(), Vec::new());
        };
        if query.contains("list-type=2") {
            let after = value("continuation-token").or_else(|| value("start-after"));
            let delimiter = value("delimiter").is_some();
            let listing = self.list(&value("prefix").unwrap_or_default(), delimiter, after.as_deref());
            return (200, String::new(), listing.into_bytes());
        }
        let Some(size) = self.size(key) else {
            return (404, String::new(), Vec::new());
        };
        let range_of = range.unwrap_or(0..size);
        let range_of = range_of.start.min(size)..range_of.end.min(size);
        let about = format!(
            "content-range: bytes {}-{}/{size}\r\netag: \"{:032x}\"\r\nlast-modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n",
            range_of.start,
            range_of.end.saturating_sub(1),
            (self.first(key) as u128 + 1) * 0x1234_5678_9abc_def0_1357_9bdf,
        );
        let body = match key {
            MANIFEST => self.manifest.as_bytes()[range_of].to_vec(),
            _ => vec![0; range_of.len()],
        };
        (206, about, body)
    }
}

fn serve(bucket: &Bucket, stream: TcpStream) -> io::Result<()> {
    let mut out = stream.try_clone()?;
    let mut lines = BufReader::new(stream).lines();
    while let Some(first) = lines.next().transpose()? {
        let mut range = None;
        for line in lines.by_ref() {
            let line = line?.to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some((from, last)) = line
                .strip_prefix("range: bytes=")
                .and_then(|range| range.split_once('-'))
            {
                let end = last.parse().map_or(usize::MAX, |last: usize| last + 1);
                range = Some(from.parse().map_err(io::Error::other)?..end);
            }
        }
        let mut words = first.split(' ');
        let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let (status, about, body) = bucket.answer(target, range.clone());
        let status = if status == 206 && range.is_none() { 200 } else { status };
        write!(
            out,
            "HTTP/1.1 {status} x\r\ncontent-length: {}\r\n{about}\r\n",
            body.len()
        )?;
        if method != "HEAD" {
            out.write_all(&body)?;
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let count: usize = arguments.next().ok_or("usage: many_objects COUNT [ADDRESS]")?.parse()?;
    let address: SocketAddr = match arguments.next() {
        Some(address) => address.parse()?,
        None => ([127, 0, 0, 1], 9000).into(),
    };
    let mut bucket = Bucket {
        count,
        manifest: String::new(),
    };
    for number in 0..count {
        let file = bucket.key(number);
        let file = file.strip_prefix("corpus/").unwrap_or(&file);
        writeln!(
            bucket.manifest,
            "{{\"audio_filepath\": \"{file}\", \"duration\": 3.5, \"text\": \"row {number}\", \"lang\": \"en\"}}"
        )?;
    }
    let bucket = Arc::new(bucket);
    let listener = TcpListener::bind(address)?;
    let mut out = io::stdout();
    writeln!(
        out,
        "export AWS_ENDPOINT_URL=http://{} AWS_ACCESS_KEY_ID=t AWS_SECRET_ACCESS_KEY=t AWS_REGION=us-east-1",
        listener.local_addr()?
    )?;
    out.flush()?;
    for stream in listener.incoming() {
        let (bucket, stream) = (Arc::clone(&bucket), stream?);
        // A client that goes away is none of our errors.
        std::thread::spawn(move || drop(serve(&bucket, stream)));
    }
    Ok(())
}
