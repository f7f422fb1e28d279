"""Manifests of a metadata-only corpus as DuckDB SQL. build_duckdb.py CORPUS OUT; prints the rows kept."""

import os
import sys

import duckdb
from rules import ALIASES, KNOWN, MAX_DURATION, MIN_DURATION, MIN_QUALITY, PUNCTUATION, SCRIPTS, SEED, TAGS, ZERO_WIDTH, choose

corpus, out = sys.argv[1:3]
os.makedirs(out, exist_ok=True)
db = duckdb.connect()

SPACE = r"[\s\x{0B}\x{1C}-\x{1F}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}]+"


def text(value):
    return "'" + value.replace("'", "''") + "'"


def one_of(column, values):
    return f"{column} IN ({', '.join(map(text, values))})"


def without(column, pattern):
    return f"regexp_replace({column}, {text(pattern)}, '', 'g')"


def spaces(column):
    return f"trim(regexp_replace({column}, {text(SPACE)}, ' ', 'g'))"


def plain(column):
    cut = f"regexp_extract(lower(trim({column})), '^([^-_]*)', 1)"
    aliases = "MAP {" + ", ".join(f"{text(a)}: {text(b)}" for a, b in ALIASES.items()) + "}"
    return f"coalesce({aliases}[{cut}], {cut})"


def source(name, columns):
    return f"""SELECT {columns}, regexp_extract(filename, 'shards/([^/]+)/', 1) AS path_lang,
               regexp_extract(filename, 'shards/[^/]+/([^/]+)/', 1) AS shard_id
        FROM read_parquet({text(f'{corpus}/shards/*/*/{name}.parquet')}, filename = true)"""


db.execute(f"""CREATE TEMP TABLE cleaned AS
    WITH metadata AS ({source('metadata', 'segment_id, transcription_native, duration_s, tx_quality_score AS quality, segment_language')}),
    members AS ({source('audio_index', 'segment_id, tar_member_name, audio_hash')}),
    joined AS (
        SELECT segment_id, shard_id, metadata.path_lang, duration_s, quality, tar_member_name, audio_hash,
               {spaces(without(without('transcription_native', TAGS), PUNCTUATION))} AS clean,
               coalesce(nullif(segment_language, ''), metadata.path_lang) AS tag
        FROM metadata JOIN members USING (shard_id, segment_id)
        WHERE duration_s BETWEEN {MIN_DURATION} AND {MAX_DURATION} AND quality >= {MIN_QUALITY} AND NOT isnan(quality)
          AND {spaces('transcription_native')} <> '')
    SELECT * FROM (SELECT *, {spaces(f"lower(nfc_normalize({without('clean', ZERO_WIDTH)}))")} AS norm FROM joined) WHERE norm <> ''""")


def letters(ranges):
    others = "[^" + "".join(f"\\x{{{a:X}}}-\\x{{{b:X}}}" for a, b in ranges) + "]+"
    return f"length({without('clean', others)})"


scripts = list(SCRIPTS)
fitting = " ".join(
    f"WHEN script = {number} THEN CASE WHEN {one_of('tag', languages)} THEN tag "
    f"WHEN {one_of('path', languages)} THEN path ELSE {text(languages[0])} END"
    for number, (_, languages) in enumerate(SCRIPTS.values(), 1)
)
bengali = f"script = {scripts.index('Bengali') + 1}"
db.execute(f"""CREATE TEMP TABLE corrected AS
    WITH counted AS (
        SELECT * REPLACE ({plain('tag')} AS tag), {plain('path_lang')} AS path,
               [{', '.join(letters(ranges) for ranges, _ in SCRIPTS.values())}] AS counts
        FROM cleaned),
    told AS (SELECT * EXCLUDE counts, CASE WHEN list_max(counts) > 0 THEN list_position(counts, list_max(counts)) END AS script FROM counted),
    chosen AS (SELECT *, CASE {fitting} WHEN {one_of('tag', KNOWN)} THEN tag ELSE path END AS by_script FROM told)
    SELECT segment_id, shard_id, path_lang, duration_s, quality, tar_member_name, audio_hash, clean, norm,
           CASE WHEN {bengali} AND by_script <> 'mni' AND regexp_matches(clean, '[\u09f0\u09f1]') THEN 'as'
                WHEN {bengali} AND by_script = 'as' AND contains(clean, '\u09b0') THEN 'bn' ELSE by_script END AS lang
    FROM chosen""")
db.execute("DROP TABLE cleaned")

for key in ("norm, audio_hash", "audio_hash"):
    db.execute(f"""DELETE FROM corrected WHERE rowid IN (
        SELECT place FROM (
            SELECT rowid AS place, row_number() OVER (PARTITION BY {key}
                       ORDER BY quality DESC, segment_id, shard_id, tar_member_name) AS rank
            FROM corrected
            WHERE ({key}) IN (SELECT ({key}) FROM corrected GROUP BY {key} HAVING count(*) > 1))
        WHERE rank > 1)""")

db.execute(f"""CREATE TEMP TABLE groups AS
    SELECT norm, count(*) AS size, min(lang) AS home, left(sha256('{SEED}' || chr(10) || norm), 16) AS place FROM corrected GROUP BY norm""")
db.execute("CREATE TEMP TABLE validation (norm VARCHAR)")
for language, rows in db.execute("SELECT lang, count(*) FROM corrected GROUP BY lang").fetchall():
    at_home = db.execute("SELECT norm, size FROM groups WHERE home = ? ORDER BY place, norm LIMIT 12000", [language]).fetchall()
    db.executemany("INSERT INTO validation VALUES (?)", [[words] for words in choose(at_home, rows)])

manifest = """SELECT segment_id, shard_id, '<|' || lang || '|> ' || clean AS text, duration_s AS duration, lang, tar_member_name,
       'shards/' || path_lang || '/' || shard_id || '/' || shard_id || '.tar' AS tar_path, 'shards' AS source FROM corrected"""
for name, side in (("train", "NOT IN"), ("val", "IN")):
    rows = f"{manifest} WHERE norm {side} (SELECT norm FROM validation)"
    db.execute(f"COPY ({rows}) TO {text(f'{out}/{name}.parquet')} (FORMAT parquet, COMPRESSION zstd)")
print(db.execute("SELECT count(*) FROM corrected").fetchone()[0])
