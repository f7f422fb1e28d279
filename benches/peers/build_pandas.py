"""Manifests of a metadata-only corpus in pandas, row by row where the original scripts go row by row.
build_pandas.py CORPUS OUT; prints the rows kept."""

import glob
import os
import re
import sys
import unicodedata

import pandas as pd
from rules import ALIASES, KNOWN, MAX_DURATION, MIN_DURATION, MIN_QUALITY, PUNCTUATION, SCRIPTS, TAGS, choose, order

corpus, out = sys.argv[1:3]
os.makedirs(out, exist_ok=True)
tags, punctuation, space = re.compile(TAGS), re.compile(PUNCTUATION), re.compile(r"\s+")
hidden = re.compile("[\u200b\u200c\u200d\u2060\ufeff\u00ad]")
letters = {name: re.compile("[" + "".join(f"{chr(a)}-{chr(b)}" for a, b in ranges) + "]") for name, (ranges, _) in SCRIPTS.items()}


def clean(text):
    return space.sub(" ", punctuation.sub("", tags.sub("", text))).strip()


def norm(text):
    return space.sub(" ", unicodedata.normalize("NFC", hidden.sub("", text)).lower()).strip()


def plain(tag):
    tag = re.split("[-_]", tag.strip(" \t\r\n").lower())[0]
    return ALIASES.get(tag, tag)


def correct(text, tag, path):
    tag, path = plain(tag), plain(path)
    counts = {name: len(pattern.findall(text)) for name, pattern in letters.items()}
    script = max(counts, key=counts.get)
    if counts[script] == 0:
        return tag if tag in KNOWN else path
    languages = SCRIPTS[script][1]
    lang = tag if tag in languages else path if path in languages else languages[0]
    if script == "Bengali" and lang != "mni":
        if "\u09f0" in text or "\u09f1" in text:
            return "as"
        if lang == "as" and "\u09b0" in text:
            return "bn"
    return lang


parts = []
for folder in sorted(glob.glob(f"{corpus}/shards/*/*")):
    language, shard = folder.split("/")[-2:]
    metadata = pd.read_parquet(f"{folder}/metadata.parquet")
    index = pd.read_parquet(f"{folder}/audio_index.parquet")
    rows = metadata.merge(index, on="segment_id")
    rows = rows[(rows.duration_s >= MIN_DURATION) & (rows.duration_s <= MAX_DURATION) & (rows.tx_quality_score >= MIN_QUALITY)]
    rows = rows[rows.transcription_native.notna()]
    rows = rows[rows.transcription_native.map(str.strip) != ""].copy()
    rows["clean"] = rows.transcription_native.map(clean)
    rows["norm"] = rows.clean.map(norm)
    rows = rows[rows.norm != ""].copy()
    tag = rows.segment_language.where(rows.segment_language.notna() & (rows.segment_language != ""), language)
    rows["lang"] = [correct(text, tag, language) for text, tag in zip(rows.clean, tag)]
    rows["shard_id"], rows["tar_path"] = shard, f"shards/{language}/{shard}/{shard}.tar"
    parts.append(rows.drop(columns=["transcription_native", "segment_language"]))
rows = pd.concat(parts, ignore_index=True)

best = rows.sort_values(["tx_quality_score", "segment_id", "shard_id", "tar_member_name"], ascending=[False, True, True, True])
best = best.drop_duplicates(["norm", "audio_hash"]).drop_duplicates("audio_hash")
rows = rows.loc[best.index.sort_values()]
groups = rows.groupby("norm").agg(size=("lang", "size"), home=("lang", "min")).reset_index()
groups["order"] = groups.norm.map(order)
groups = groups.sort_values(["order", "norm"])
validation = set()
for language, count in rows.lang.value_counts().items():
    at_home = groups[groups.home == language]
    validation.update(choose(zip(at_home.norm, at_home["size"]), count))
rows["text"] = "<|" + rows.lang + "|> " + rows.clean
rows["source"], rows["duration"] = "shards", rows.duration_s
manifest = rows[["segment_id", "shard_id", "text", "duration", "lang", "tar_member_name", "tar_path", "source"]]
in_validation = rows.norm.isin(validation)
manifest[~in_validation].to_parquet(f"{out}/train.parquet", compression="zstd")
manifest[in_validation].to_parquet(f"{out}/val.parquet", compression="zstd")
print(len(rows))
