"""The rules of manifests that the peers share: patterns, scripts, the split."""

import hashlib

MIN_DURATION, MAX_DURATION, MIN_QUALITY = 1.0, 20.0, 0.5
VAL_PER_LANGUAGE, VAL_PERCENT, SEED = 200, 10, 1

TAGS = r"\[.*?\]|<.*?>"
PUNCTUATION = r"""[।॥.,!?;:"'\-—()…%/+=$*@#&_^>|\\<>`~。]+"""
ZERO_WIDTH = r"[\x{200B}\x{200C}\x{200D}\x{2060}\x{FEFF}\x{AD}]"

# Script -> (ranges of letters and marks, languages, the default first).
SCRIPTS = {
    "Devanagari": ([(0x900, 0x963), (0x971, 0x97F), (0xA8E0, 0xA8FF)], ["hi", "mr", "ne", "sa", "kok", "mai", "doi", "bho", "brx", "sd", "ks"]),
    "Bengali": ([(0x980, 0x9E3), (0x9F0, 0x9F1), (0x9FC, 0x9FC), (0x9FE, 0x9FE)], ["bn", "as", "mni"]),
    "Gurmukhi": ([(0xA00, 0xA65), (0xA70, 0xA75)], ["pa"]),
    "Gujarati": ([(0xA80, 0xAE3), (0xAF9, 0xAFF)], ["gu"]),
    "Oriya": ([(0xB00, 0xB63), (0xB70, 0xB71)], ["or"]),
    "Tamil": ([(0xB80, 0xBE5)], ["ta"]),
    "Telugu": ([(0xC00, 0xC63)], ["te"]),
    "Kannada": ([(0xC80, 0xCE3), (0xCF1, 0xCF3)], ["kn"]),
    "Malayalam": ([(0xD00, 0xD57), (0xD5F, 0xD63), (0xD7A, 0xD7F)], ["ml"]),
    "Arabic": ([(0x620, 0x65F), (0x66E, 0x6D3), (0x6D5, 0x6DC), (0x6DF, 0x6E8), (0x6EA, 0x6EF), (0x6FA, 0x6FF), (0x750, 0x77F), (0x8A0, 0x8FF)],
               ["ur", "ks", "sd"]),
    "MeeteiMayek": ([(0xABC0, 0xABEA), (0xABEC, 0xABED)], ["mni"]),
    "OlChiki": ([(0x1C5A, 0x1C7D)], ["sat"]),
    "Latin": ([(0x41, 0x5A), (0x61, 0x7A), (0xC0, 0xD6), (0xD8, 0xF6), (0xF8, 0x24F), (0x1E00, 0x1EFF)], ["en"]),
}
KNOWN = sorted({language for _, languages in SCRIPTS.values() for language in languages})
ALIASES = {"eng": "en", "hin": "hi", "tam": "ta", "ben": "bn", "tel": "te", "mar": "mr", "asm": "as", "ori": "or", "kan": "kn",
           "guj": "gu", "mal": "ml", "pan": "pa", "urd": "ur", "nep": "ne", "san": "sa"}


def order(group):
    """Place of a group of words in the order in which groups go to validation."""
    return hashlib.sha256(f"{SEED}\n{group}".encode()).digest()[:8]


def choose(groups, rows):
    """Groups (words, size) in their order -> those that go to validation, for a language of so many rows."""
    target, taken, chosen = min(VAL_PER_LANGUAGE, rows * VAL_PERCENT // 100), 0, []
    for words, size in groups:
        if taken >= target:
            break
        if size <= target - taken:
            chosen.append(words)
            taken += size
    return chosen
