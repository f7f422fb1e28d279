//! Git LFS: sends files to the hub's storage, whole or in parts.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};

use super::{Call, Changed, NewFile, Payload, Session, Stopped, strange};
use crate::client::Method;
use crate::download::TRIES;
use crate::error::HubError;

/// Files about which the storage is asked at once: addresses of uploads expire.
const ASKED_AT_ONCE: usize = 100;
/// The most parts of an upload.
const MOST_PARTS: u64 = 10_000;
const JSON: &str = "application/vnd.git-lfs+json";

#[derive(Deserialize)]
struct Batch {
    objects: Vec<Object>,
}

#[derive(Deserialize)]
struct Object {
    oid: String,
    /// None where the storage has it.
    actions: Option<Actions>,
    error: Option<ObjectError>,
}

#[derive(Deserialize)]
struct ObjectError {
    #[serde(default)]
    message: String,
}

#[derive(Deserialize)]
struct Actions {
    upload: Option<Action>,
    verify: Option<Action>,
}

#[derive(Deserialize)]
struct Action {
    href: String,
    #[serde(default)]
    header: BTreeMap<String, Value>,
}

impl Action {
    /// Its headers as HTTP has them.
    fn headers(&self) -> Vec<(String, String)> {
        let texts = self
            .header
            .iter()
            .filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())));
        texts.collect()
    }
}

impl Session<'_> {
    /// Sends the files that the storage does not have. Gives the bytes that were sent.
    pub(super) fn upload(&mut self, files: &[&Changed<'_>]) -> Result<u64, Stopped> {
        let mut sent = 0;
        for files in files.chunks(ASKED_AT_ONCE) {
            let mut actions = self.actions(files)?;
            for changed in files {
                // Two files may have the same bytes.
                let Some(mut of_file) = actions.remove(&changed.oid) else {
                    continue;
                };
                let mut tries = 0;
                loop {
                    match self.send_file(changed, &of_file) {
                        Ok(()) => break,
                        Err(Stopped::Cancelled) => return Err(Stopped::Cancelled),
                        Err(Stopped::Failed(error)) if tries + 1 >= TRIES / 2 => return Err(Stopped::Failed(error)),
                        Err(Stopped::Failed(_)) => tries += 1,
                    }
                    self.wait(&changed.file.path, tries)?;
                    // The addresses may have expired, or another push has brought the file.
                    match self.actions(&[changed])?.remove(&changed.oid) {
                        Some(again) => of_file = again,
                        None => break,
                    }
                }
                sent += changed.file.size;
            }
        }
        Ok(sent)
    }

    /// What is to be done for each file, by its SHA-256; nothing for those that the storage has.
    fn actions(&mut self, files: &[&Changed<'_>]) -> Result<BTreeMap<String, Actions>, Stopped> {
        let repository = self.push.repository;
        let address = format!("{}/{}.git/info/lfs/objects/batch", self.hub.endpoint, repository.path());
        let objects = files
            .iter()
            .map(|file| json!({ "oid": file.oid, "size": file.file.size }));
        let body = json!({
            "operation": "upload", "transfers": ["basic", "multipart"], "hash_algo": "sha256",
            "ref": { "name": repository.revision }, "objects": objects.collect::<Value>(),
        });
        let answer = self.post_lfs("asking the storage", &address, &body)?;
        let batch: Batch = serde_json::from_slice(&answer).map_err(|error| strange(&address, &error.to_string()))?;
        let mut actions = BTreeMap::new();
        for object in batch.objects {
            let Some(file) = files.iter().find(|file| file.oid == object.oid) else {
                return Err(strange(&address, "it names a file that it was not asked for").into());
            };
            if let Some(error) = object.error {
                return Err(Stopped::Failed(HubError::Unavailable {
                    message: format!("{}: the storage does not take it: {}", file.file.path, error.message),
                    help: "look at the limits of the repository and of the account".into(),
                }));
            }
            actions.extend(object.actions.map(|actions| (object.oid, actions)));
        }
        Ok(actions)
    }

    fn send_file(&mut self, changed: &Changed<'_>, actions: &Actions) -> Result<(), Stopped> {
        let Changed { file, oid, .. } = changed;
        if let Some(upload) = &actions.upload {
            match upload.header.get("chunk_size") {
                None => {
                    let part = Payload::Part {
                        file,
                        from: 0,
                        size: file.size,
                    };
                    self.put(&file.path, &upload.href, &upload.headers(), part)?;
                }
                Some(size) => self.send_parts(file, oid, upload, size)?,
            }
        }
        if let Some(verify) = &actions.verify {
            self.post_lfs(&file.path, &verify.href, &json!({ "oid": oid, "size": file.size }))?;
        }
        Ok(())
    }

    /// Sends a file in parts of `chunk_size` bytes; the last one is shorter. The action's headers with numbers are the addresses.
    fn send_parts(&mut self, file: &NewFile, oid: &str, upload: &Action, chunk_size: &Value) -> Result<(), Stopped> {
        let wrong = |what: &str| strange(&upload.href, &format!("{}: {what}", file.path));
        let chunk_size = chunk_size
            .as_str()
            .and_then(|text| text.parse().ok())
            .or(chunk_size.as_u64());
        let chunk_size = chunk_size
            .filter(|size| *size > 0)
            .ok_or_else(|| wrong("its parts have no size"))?;
        let mut addresses: Vec<(u64, &str)> = Vec::new();
        for (name, address) in &upload.header {
            if let (Ok(number), Some(address)) = (name.parse(), address.as_str()) {
                addresses.push((number, address));
            }
        }
        addresses.sort_unstable();
        let count = file.size.div_ceil(chunk_size);
        let numbers = addresses.iter().map(|(number, _)| *number);
        if count > MOST_PARTS || !numbers.eq(1..=count) {
            return Err(wrong(&format!("{count} parts, and {} addresses", addresses.len())).into());
        }
        let mut parts = Vec::new();
        for (number, address) in addresses {
            let from = (number - 1) * chunk_size;
            let size = chunk_size.min(file.size - from);
            let etag = self.put(&file.path, address, &[], Payload::Part { file, from, size })?;
            let etag = etag.ok_or_else(|| wrong("a part without an etag"))?;
            parts.push(json!({ "partNumber": number, "etag": etag }));
        }
        self.post_lfs(&file.path, &upload.href, &json!({ "oid": oid, "parts": parts }))?;
        Ok(())
    }

    /// Gives the etag of what was sent.
    fn put(
        &mut self,
        what: &str,
        address: &str,
        headers: &[(String, String)],
        part: Payload<'_>,
    ) -> Result<Option<String>, Stopped> {
        let call = Call {
            what,
            method: Method::Put,
            address,
            headers,
            accepted: &[],
            tries: TRIES,
        };
        Ok(self.call(call, part)?.etag)
    }

    fn post_lfs(&mut self, what: &str, address: &str, body: &Value) -> Result<Vec<u8>, Stopped> {
        let headers = ["accept", "content-type"].map(|name| (name.to_owned(), JSON.to_owned()));
        let call = Call {
            what,
            method: Method::Post,
            address,
            headers: &headers,
            accepted: &[],
            tries: TRIES,
        };
        let body = body.to_string();
        Ok(self.call(call, Payload::Bytes(body.as_bytes()))?.body)
    }
}
