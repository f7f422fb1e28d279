"""Golden data of the normalisers of texts: pairs of a text and what the originals make of it.

    python3 make.py PAIRS WHISPER LEADERBOARD WHEEL

PAIRS: a JSON file with lists `english` and `indic` of texts (`input`, and `lang`), to which random ones are added, and `basic`, each
with what the Leaderboard's `BasicMultilingualTextNormalizer(remove_diacritics=False)` makes of it (`leaderboard_multilingual`).
WHISPER: a checkout of github.com/openai/whisper (made with c0d2f62). LEADERBOARD: of
github.com/huggingface/open_asr_leaderboard (d1e99b2). WHEEL: the unpacked wheel of whisper_normalizer 0.1.15.
Needs the packages indic-nlp-library (0.92), more-itertools and regex; Python 3.11 (Unicode 14).
"""

import importlib
import json
import random
import re
import string
import sys
import types
from pathlib import Path

from indicnlp.normalize.indic_normalize import IndicNormalizerFactory

HERE = Path(__file__).parent


def package(name, folder):
    """Imports the modules of a folder without the __init__ of its package."""
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    sys.modules[name] = module
    return lambda part: importlib.import_module(f"{name}.{part}")


pairs, whisper, leaderboard, wheel = sys.argv[1:]
pairs = json.loads(Path(pairs).read_text())
openai = package("openai_normalizers", Path(whisper) / "whisper/normalizers")("english").EnglishTextNormalizer()
board = package("board_normalizers", Path(leaderboard) / "normalizer")("normalizer").EnglishTextNormalizer()
sys.path.insert(0, wheel)
wheels = importlib.import_module("whisper_normalizer.english").EnglishTextNormalizer()

WORDS = """o oh zero one two three four five six seven eight nine ten eleven twelve thirteen nineteen ones sixes nines zeroth
first second third fourth fifth eighth ninth twelfth twentieth twenty thirty forty ninety twenties nineties hundred thousand
million billion trillion decillion hundreds thousandth millions minus negative plus positive pound euros dollar dollars cent
cents per percent and and and double triple point point half a b c i 5 g 1 7 12 100 2.5 3.0 0.07 007 $5 £3.50 $0.05 ¢7 10% 50%
1st 2nd 3s 1s 1990s 1,000 1,234,567 10:30 192.168.0.1 the dog's it's who's won't can't they're i'd we'll he'd been Mr. Mrs Dr st
y'all ma'am gonna uh um hmm ah huh mm okay ok colour centre archaeology flyer travelogue cancellation Stephen Katherine jon wi-fi
wi fi e-mail x ray t-shirt a.m. p.m. all right et cetera u.s.a. b b c naïve Æsop groß (aside) [noise] <unk> ' . , % $ ½ ² १२ ٣.٥
per cent pence and a half""".split()
SPACES = [" "] * 30 + ["  ", "\n", "\t", "-", ", ", ". ", "'", ""]


def english(random):
    return "".join(random.choice(WORDS) + random.choice(SPACES) for _ in range(random.randint(1, 12)))


SEEDS = {
    "hi": (0x900, "डॉक्टर"), "mr": (0x900, "ऱ्या"), "sa": (0x900, "नमः"), "ne": (0x900, "नेपाली"), "bn": (0x980, "বাড়ি"),
    "as": (0x980, "অসমীয়া"), "pa": (0xA00, "ਸ਼ੇਰ"), "gu": (0xA80, "નમસ્તે"), "or": (0xB00, "ଓଡ଼ିଆ"), "ta": (0xB80, "தமிழ்"),
    "te": (0xC00, "తెలుగు"), "kn": (0xC80, "ಕನ್ನಡ"), "ml": (0xD00, "ന്‍റെ"), "ur": (0x600, "سلام"),
}
OTHERS = list(" ,:|!'\"-–—“”‘’´…।॥۔") + ["''", "\u200c", "\u200d", "\u200b", "\u00a0", "\ufeff", "\u00ad", "Ok", "12", " ", " "]


def indic(random, lang):
    block, seed = SEEDS[lang]
    parts = []
    for _ in range(random.randint(3, 25)):
        which = random.random()
        if which < 0.6:
            parts.append(chr(block + random.randrange(0x80)))
        elif which < 0.9:
            parts.append(random.choice(OTHERS))
        else:
            parts.append(seed)
    return "".join(parts)


# Pairs of code points that are composed, which random texts seldom have.
COMPOSED = {
    "pa": "0a050a3e 0a720a3f 0a720a40 0a730a41 0a730a42 0a720a47 0a050a48 0a730a4b 0a050a4c",
    "or": "0b050b3e 0b0f0b57 0b130b57 0b470b56 0b470b3e 0b470b57",
    "bn": "09c709be 09c709d7", "as": "09c709be 09c709d7", "ta": "0b920bd7 0bc60bbe 0bc70bbe 0bc60bd7", "te": "0c460c56",
    "kn": "0cbf0cd5 0cc60cd5 0cc60cd6 0cc60cc2 0cc60cc20cd5", "ml": "0d460d3e 0d470d3e 0d460d57 0d230d4d200d 0d150d4d200d",
}

factory = IndicNormalizerFactory()


def unified(text, lang):
    return text if lang == "ur" else factory.get_normalizer(lang).normalize(text)


def compared(text, lang):
    """As vistaar/evaluation.py."""
    text = text.translate(str.maketrans("", "", string.punctuation + "।۔'-॥"))
    return re.sub(" +", " ", unified(text, lang))


def write(name, rows):
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (HERE / name).write_text("".join(lines))


def works(normalizer, text):
    try:
        return normalizer(text)
    except (AssertionError, ValueError, IndexError):
        return None


seeded = random.Random(5)
texts = [pair["input"] for pair in pairs["english"]] + [english(seeded) for _ in range(1200)]
rows = [(text, works(openai, text), works(board, text)) for text in dict.fromkeys(texts)]
print("failed:", [row for row in rows if None in row])
rows = [row for row in rows if None not in row]
write("english.jsonl", rows)
differ = [(text, wheels(text)) for text in texts if works(wheels, text) not in (None, works(openai, text))]
write("wheel.jsonl", dict.fromkeys(differ))
rows = []
for pair in pairs["indic"]:
    rows.append((pair["lang"], pair["input"]))
for lang in SEEDS:
    rows += [(lang, indic(seeded, lang)) for _ in range(20)]
for lang, codes in COMPOSED.items():
    for code in codes.split():
        text = "".join(chr(int(code[at : at + 4], 16)) for at in range(0, len(code), 4))
        rows.append((lang, f"x {text}:{text} {text}।"))
write("indic.jsonl", [(lang, text, unified(text, lang), compared(text, lang)) for lang, text in dict.fromkeys(rows)])
outputs = [(pair["lang"], pair["input"], pair["output"]) for pair in pairs["indic"]]
kept = [row for row in outputs if isinstance(row[2], str) and not re.search(r"\d", row[1])]
print("left out of the wheel's Indic pairs:", [row for row in outputs if row not in kept])
write("wheel_indic.jsonl", kept)
write("multilingual.jsonl", [(pair["input"], pair["leaderboard_multilingual"]) for pair in pairs["basic"]])
