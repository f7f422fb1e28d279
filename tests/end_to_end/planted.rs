//! Every planted fault of the bundled corpora is handled as `planted.json` specifies.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::binary::{ManifestRow, RejectRow, Workplace, corpus, read_manifest, read_rejects};

struct Result {
    kept: BTreeMap<(String, String), Vec<ManifestRow>>,
    validation: BTreeSet<(String, String)>,
    refused: BTreeMap<(String, Option<String>), Vec<RejectRow>>,
}

impl Result {
    fn of(place: &Workplace) -> Self {
        let mut kept: BTreeMap<_, Vec<_>> = BTreeMap::new();
        let mut validation = BTreeSet::new();
        for (file, is_validation) in [("train_manifest_v2.parquet", false), ("val_manifest_v2.parquet", true)] {
            for row in read_manifest(&place.out().join(file)) {
                let key = (row.shard_id.clone(), row.segment_id.clone());
                if is_validation {
                    validation.insert(key.clone());
                }
                kept.entry(key).or_default().push(row);
            }
        }
        let mut refused: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for reject in read_rejects(&place.out().join("rejects.parquet")) {
            let shard = reject.partition.split('/').nth(1).unwrap().to_string();
            refused
                .entry((shard, reject.segment_id.clone()))
                .or_default()
                .push(reject);
        }
        Result {
            kept,
            validation,
            refused,
        }
    }

    /// Why the treatment of one planted fault is wrong, if it is.
    fn complaint(&self, planted: &Value) -> Option<String> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
        let expect = &planted["expect"];
        let shard = text(&planted["shard_id"]);
        let segment = planted["segment_id"].as_str().map(str::to_string);
        let key = (shard.clone(), segment.clone());
        let row_key = (shard.clone(), segment.clone().unwrap_or_default());
        let refused = self.refused.get(&key).map(Vec::as_slice).unwrap_or_default();
        let kept = self.kept.get(&row_key).map(Vec::as_slice).unwrap_or_default();
        let check = |holds: bool, what: &str| (!holds).then(|| format!("{what}: kept {kept:?}, refused {refused:?}"));
        match expect["outcome"].as_str().unwrap() {
            "reject" => {
                let reason = text(&expect["reason"]);
                if let Some(other) = expect["kept_segment"].as_str() {
                    let other = (text(&expect["kept_shard"]), other.to_string());
                    if !self.kept.contains_key(&other) {
                        return Some(format!("{other:?} should have stayed"));
                    }
                }
                check(
                    refused.iter().any(|reject| reject.reason == reason),
                    &format!("expected {reason}"),
                )
            }
            "keep" | "keep_or_v1_reject" if kept.is_empty() => check(
                expect["outcome"] == "keep_or_v1_reject" && !refused.is_empty(),
                "expected to be kept",
            ),
            "keep" | "keep_or_v1_reject" => {
                let row = &kept[0];
                let fits = expect["lang"].as_str().is_none_or(|lang| lang == row.lang)
                    && expect["text"].as_str().is_none_or(|text| text == row.text)
                    && expect["duration"]
                        .as_f64()
                        .is_none_or(|duration| (duration - row.duration).abs() < 1e-9)
                    && row.text.starts_with(&format!("<|{}|> ", row.lang));
                if let Some(twin) = expect["same_side_as"].as_str() {
                    let twin = self.kept.keys().find(|key| key.1 == twin);
                    let same =
                        twin.is_some_and(|twin| self.validation.contains(twin) == self.validation.contains(&row_key));
                    if !same {
                        return Some("not on the side of its twin".to_string());
                    }
                }
                check(fits, "kept with other values")
            }
            "quarantine_shard" => {
                let whole = self.refused.get(&(shard, None)).map(Vec::as_slice).unwrap_or_default();
                let reason = text(&expect["reason"]);
                check(
                    whole.len() == 1 && whole[0].reason == reason,
                    &format!("shard expected {reason}"),
                )
            }
            "shard_ok" => {
                let whole = self.refused.get(&(shard, None)).map(Vec::as_slice).unwrap_or_default();
                check(
                    whole.iter().all(|reject| !reject.values.is_empty()),
                    "shard should be read",
                )
            }
            "segment_rows" => {
                let reason = text(&expect["dropped_reason"]);
                let fits = kept.len() as u64 + refused.len() as u64 == expect["joined"].as_u64().unwrap()
                    && kept.len() as u64 == expect["kept"].as_u64().unwrap()
                    && refused.iter().any(|reject| reject.reason == reason)
                    && expect["kept_member"]
                        .as_str()
                        .is_none_or(|member| kept[0].tar_member_name == member);
                check(fits, "rows of a repeated segment")
            }
            "ignore" => check(
                kept.is_empty() && (segment.is_none() || refused.is_empty()),
                "should be ignored",
            ),
            other => Some(format!("unknown outcome {other}")),
        }
    }
}

#[test]
fn every_planted_fault_is_treated_as_demanded() {
    for name in ["micro", "mini"] {
        let place = Workplace::new(name);
        place.build_manifests(&[]);
        let result = Result::of(&place);
        let planted: Value =
            serde_json::from_slice(&std::fs::read(corpus(name).join("planted.json")).unwrap()).unwrap();
        let planted = planted["planted"].as_array().unwrap();
        let complaints: Vec<String> = planted
            .iter()
            .filter_map(|fault| {
                let complaint = result.complaint(fault)?;
                Some(format!(
                    "{} {} {}: {complaint}",
                    fault["kind"], fault["shard_id"], fault["segment_id"]
                ))
            })
            .collect();
        assert!(
            complaints.is_empty(),
            "{} of {}:\n{}",
            complaints.len(),
            planted.len(),
            complaints.join("\n")
        );
    }
}
