"""Manifests of a metadata-only corpus in polars, lazy and streaming. build_polars.py CORPUS OUT; prints the rows kept."""

import os
import sys

import polars as pl
from rules import (ALIASES, KNOWN, MAX_DURATION, MIN_DURATION, MIN_QUALITY, PUNCTUATION, SCRIPTS, TAGS, ZERO_WIDTH, choose, order)

corpus, out = sys.argv[1:3]
os.makedirs(out, exist_ok=True)


def scan(name, columns):
    rows = pl.scan_parquet(f"{corpus}/shards/*/*/{name}.parquet", include_file_paths="path").select(*columns, "path")
    parts = pl.col("path").str.extract_groups(r"shards/(?<path_lang>[^/]+)/(?<shard_id>[^/]+)/[^/]+$")
    return rows.with_columns(parts).unnest("path")


def spaces(text):
    return text.str.replace_all(r"\s+", " ").str.strip_chars()


text, quality = pl.col("transcription_native"), pl.col("tx_quality_score")
metadata = scan("metadata", ["segment_id", "transcription_native", "duration_s", "tx_quality_score", "segment_language"])
index = scan("audio_index", ["segment_id", "tar_member_name", "audio_hash"]).drop("path_lang")
norm = spaces(pl.col("clean").str.replace_all(ZERO_WIDTH, "").str.normalize("NFC").str.to_lowercase())
rows = (
    metadata.join(index, on=["shard_id", "segment_id"], how="inner", maintain_order="left_right")
    .filter((pl.col("duration_s") >= MIN_DURATION) & (pl.col("duration_s") <= MAX_DURATION) & (quality >= MIN_QUALITY)
            & quality.is_not_nan() & text.is_not_null() & (text.str.strip_chars() != ""))
    .with_columns(
        clean=spaces(text.str.replace_all(TAGS, "").str.replace_all(PUNCTUATION, "")),
        tag=pl.when(pl.col("segment_language").fill_null("") == "").then("path_lang").otherwise("segment_language"),
    )
    .drop("transcription_native", "segment_language")
    .with_columns(norm=norm)
    .filter(pl.col("norm") != "")
    .collect(engine="streaming")
)

letters = lambda ranges: "[" + "".join(f"\\x{{{a:X}}}-\\x{{{b:X}}}" for a, b in ranges) + "]"
plain = lambda name: pl.col(name).str.strip_chars(" \t\r\n").str.to_lowercase().str.extract(r"^([^-_]*)").replace(ALIASES)
counts = [pl.col("clean").str.count_matches(letters(ranges)) for ranges, _ in SCRIPTS.values()]
rows = rows.lazy().with_columns(tag=plain("tag"), path=plain("path_lang"), counts=pl.concat_list(counts))
rows = rows.with_columns(script=pl.when(pl.col("counts").list.max() > 0).then(pl.col("counts").list.arg_max()))
lang = pl.when(pl.col("tag").is_in(KNOWN)).then("tag").otherwise("path")
for number, (_, languages) in enumerate(SCRIPTS.values()):
    fitting = pl.when(pl.col("tag").is_in(languages)).then("tag").when(pl.col("path").is_in(languages)).then("path")
    lang = pl.when(pl.col("script") == number).then(fitting.otherwise(pl.lit(languages[0]))).otherwise(lang)
bengali = (pl.col("script") == list(SCRIPTS).index("Bengali")) & (pl.col("lang") != "mni")
rows = rows.with_columns(lang=lang).with_columns(
    lang=pl.when(bengali & pl.col("clean").str.contains("[\u09f0\u09f1]")).then(pl.lit("as"))
    .when(bengali & (pl.col("lang") == "as") & pl.col("clean").str.contains("\u09b0", literal=True)).then(pl.lit("bn"))
    .otherwise("lang")
).drop("tag", "path", "counts", "script").collect(engine="streaming")

for key in (["norm", "audio_hash"], ["audio_hash"]):
    rows = rows.with_row_index("row")
    worse = (
        rows.lazy().filter(pl.struct(key).is_duplicated())
        .sort(["tx_quality_score", "segment_id", "shard_id", "tar_member_name"], descending=[True, False, False, False])
        .filter(~pl.struct(key).is_first_distinct()).select("row").collect()
    )
    rows = rows.join(worse, on="row", how="anti", maintain_order="left").drop("row")

groups = rows.group_by("norm").agg(size=pl.len(), home=pl.col("lang").min())
groups = groups.with_columns(order=pl.Series([order(words) for words in groups["norm"]], dtype=pl.Binary))
validation = []
for language, count in rows.group_by("lang").len().iter_rows():
    at_home = groups.filter(pl.col("home") == language).bottom_k(12_000, by="order").sort("order", "norm")
    validation += choose(zip(at_home["norm"], at_home["size"]), count)
rows = rows.with_columns(validation=pl.col("norm").is_in(validation))

manifest = rows.lazy().select(
    "segment_id", "shard_id", text=pl.format("<|{}|> {}", "lang", "clean"), duration="duration_s", lang="lang",
    tar_member_name="tar_member_name", tar_path=pl.format("shards/{}/{}/{}.tar", "path_lang", "shard_id", "shard_id"),
    source=pl.lit("shards"), validation="validation",
)
manifest.filter(~pl.col("validation")).drop("validation").sink_parquet(f"{out}/train.parquet", compression="zstd")
manifest.filter("validation").drop("validation").sink_parquet(f"{out}/val.parquet", compression="zstd")
print(rows.height)
