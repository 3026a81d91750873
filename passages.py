"""Passages to copy: lines of real documents, and made ones of the kinds that people lose lines of.

    prose, code     cut from documents (`read_texts`): any JSONL, text or source files
    json, csv, log  made: records with many fields alike
    words           made: random words, stretches of which come again, so that a copy can slip from one to the other

A passage is a pure function of its arguments. Training, validation and evaluation cut from different documents. Scores
of copies are below.
"""

import hashlib
import io
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from random import Random

import numpy as np

CONTENTS = ("prose", "code", "json", "csv", "log", "words")
JSONL = (".jsonl", ".jsonl.gz", ".jsonl.zst")
SOURCE_CODE = (".c", ".cpp", ".cs", ".go", ".h", ".java", ".js", ".py", ".rs", ".sh", ".ts")
LONGEST_LINE = 100  # bytes; a document's longer lines are cut
LEAD_WORDS = 12  # of four letters
SECTION = 250  # lines; a plain file is cut into sections, each of which is a document


def stream_of(name: str) -> str:
    """What a document of this name is for, by its hash: a tenth for evaluation, a tenth for validation."""
    first = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[0]
    return "evaluation" if first < 26 else "validation" if first < 52 else "train"


def read_source(path: Path, name: str) -> list[tuple[str, str]]:
    """Name and text of each document in a file: a line of JSONL (fields text, and url if it has one), or a section of
    any other file. name: of the file. RuntimeError for a damaged line."""
    found = []
    if not path.name.endswith(JSONL):
        lines = path.read_text("utf-8", "replace").splitlines()
        for start in range(0, len(lines), SECTION):
            found.append((f"line {start + 1} of {name}", "\n".join(lines[start : start + SECTION])))
        return found
    import pyarrow  # knows .gz and .zst

    try:
        with io.BufferedReader(pyarrow.input_stream(path)) as file:
            lines = file.readlines()
    except OSError as error:
        raise RuntimeError(f"{path}: damaged ({error}): get it again") from error
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            found.append((str(record.get("url") or f"{number} of {name}"), str(record["text"])))
        except (ValueError, LookupError, AttributeError, RecursionError) as error:
            raise RuntimeError(f"{path}, line {number}: expected a JSON object with text ({error!r})") from error
    return found


@lru_cache(2)
def read_texts(sources: tuple[str, ...], unit: str) -> dict[tuple[str, str], list]:
    """Documents by (stream, content), prose or code: each a list of lines, or with unit "characters" a text.

    sources: files and folders; of a folder JSONL, .txt and source code. FileNotFoundError for a source that is missing
    or holds nothing of that, RuntimeError for a damaged file.
    """
    texts: list[tuple[str, str]] = []
    for source in map(Path, sources):
        known = (*JSONL, ".txt", *SOURCE_CODE)
        files = [p for p in sorted(source.rglob("*")) if p.name.endswith(known)] if source.is_dir() else [source]
        if not files or not all(file.is_file() for file in files):
            expected = f"expected a file, or a folder with {', '.join(known)}; `make toy-data` writes the default"
            raise FileNotFoundError(f"text_source={source}: {expected}")
        for file in files:
            texts += read_source(file, str(file.relative_to(source)) if source.is_dir() else file.name)
    found = {(stream, content): [] for stream in ("train", "validation", "evaluation") for content in ("prose", "code")}
    for name, text in sorted(texts):
        lines = [line.encode()[:LONGEST_LINE].decode("utf-8", "ignore").rstrip() for line in text.splitlines()]
        content = "code" if name.endswith(SOURCE_CODE) else "prose"
        found[stream_of(name), content].append(lines if unit == "lines" else "\n".join(lines))
    return found


def cut(random: Random, texts: Sequence[Sequence[str]], n: int) -> Sequence[str]:
    """n consecutive lines of one of the lists, or characters of one of the texts, the first and the last not blank."""
    long_enough = [text for text in texts if len(text) >= n]
    for _ in range(1000 if long_enough else 0):
        text = pick(random, long_enough)
        start = int(random.random() * (len(text) - n + 1))
        if text[start].strip() and text[start + n - 1].strip():
            return text[start : start + n]
    raise ValueError(f"no passage of {n} in {len(texts)} documents: give other --text_source, or shorter passages")


def pick(random: Random, choices: Sequence):
    return choices[int(random.random() * len(choices))]  # random() alone stays the same in all versions of Python


NAMES = "ada bela chen dora emil fred gina hugo iris jana kurt lena mina nils olga paul rosa sven tina vera".split()
WORDS = """able acid aged also area army away baby back ball band bank base bath bear beat been bell belt best bill bird
blow blue boat body bomb bond bone book born boss both bowl bulk burn bush busy call calm came camp card care case cash
cast cell chat chip city club coal coat code cold come cook cool cope copy core cost crew crop dark data date dawn days
dead deal dean dear debt deep deny desk dial diet disc disk does done door dose down draw drew drop drug dual duke dust
duty each earn ease east easy edge else even ever evil exit face fact fail fair fall farm fast fate fear feed feel feet
""".split()


def lead_in(seed: int) -> str:
    """A sentence of 1 to LEAD_WORDS random words, to stand before an instruction."""
    random = Random(seed)
    return " ".join(pick(random, WORDS) for _ in range(1 + int(random.random() * LEAD_WORDS))).capitalize() + "."


def json_line(random: Random, row: int) -> str:
    fields = {"id": int(random.random() * 10**5), "name": pick(random, NAMES), "ok": random.random() < 0.5}
    return json.dumps(fields | {"score": round(random.random() * 100, 2), "tags": [pick(random, WORDS), str(row)]})


def csv_line(random: Random, row: int) -> str:
    day = f"2026-{1 + int(random.random() * 12):02d}-{1 + int(random.random() * 28):02d}"
    return f"{row},{pick(random, NAMES)},{pick(random, WORDS)},{random.random() * 1000:.2f},{day}"


def log_line(random: Random, row: int) -> str:
    level, job = pick(random, ("INFO", "INFO", "INFO", "WARN")), 8800 + int(random.random() * 4)
    at = f"09:{row // 60 % 60:02d}:{row % 60:02d}.{int(random.random() * 1000):03d}"
    return f"{at} {level} worker-{int(random.random() * 4)} job={job} retries={int(random.random() * 3)} status=ok"


def word_lines(random: Random, n: int) -> list[str]:
    """Lines of eight words; every third stretch of four to eight words is one that came before."""
    words: list[str] = []
    while len(words) < 8 * n:
        size = 4 + int(random.random() * 5)
        if len(words) > size and random.random() < 1 / 3:
            start = int(random.random() * (len(words) - size))
            words += words[start : start + size]
        else:
            words += [pick(random, WORDS) for _ in range(size)]
    return [" ".join(words[8 * i : 8 * i + 8]) for i in range(n)]


MADE = {"json": json_line, "csv": csv_line, "log": log_line}


def passage(content: str, n: int, unit: str, seed: int, stream: str, sources: tuple[str, ...]) -> str:
    """n lines, or characters, of this content. Errors as read_texts; ValueError where no document has so many."""
    random = Random(seed)
    if content in ("prose", "code"):
        return ("\n" if unit == "lines" else "").join(cut(random, read_texts(sources, unit)[stream, content], n))
    count = n if unit == "lines" else 2 + n // 10
    lines = word_lines(random, count) if content == "words" else [MADE[content](random, row) for row in range(count)]
    return "\n".join(lines) if unit == "lines" else "".join(cut(random, ["\n".join(lines)], n))


def edit_distance(a: str, b: str) -> int:
    """Levenshtein's: the fewest characters to put in, take out or replace that make b of a."""
    at, letters = np.arange(len(b) + 1), np.array([ord(c) for c in b], np.int64)
    row = at  # from the first i characters of a to each beginning of b
    for i, letter in enumerate(map(ord, a), 1):
        row = np.append(i, np.minimum(row[:-1] + (letters != letter), row[1:] + 1))
        row = np.minimum.accumulate(row - at) + at  # characters of b that are put in
    return int(row[-1])


def passage_scores(truth: str, answer: str) -> tuple[float, float]:
    """The share of a passage's lines that are right at their place in the answer, and how similar both are,
    1 - edit distance / length of the longer one. Outer white space is free."""
    truth, answer = truth.strip(), answer.strip()
    lines, found = truth.split("\n"), answer.split("\n")
    right = sum(a == b for a, b in zip(lines, found, strict=False))
    return right / len(lines), 1 - edit_distance(truth, answer) / max(len(truth), len(answer))
