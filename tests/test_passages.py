"""passages.py: what is cut from where; that streams share no document; what is made."""

import csv
import io
import json
import re
from collections import Counter

import pytest
import zstandard

import passages
from passages import CONTENTS, passage, read_texts, stream_of

MADE = ("json", "csv", "log", "words")


@pytest.fixture
def sources(tmp_path) -> tuple[str, ...]:
    """60 documents of prose in JSONL, 40 modules in a folder; line i of document d is "d:i", every fifth is blank."""
    texts = {f"page/{d}": "\n".join("" if i % 5 == 4 else f"{d}:{i} é" for i in range(3 + d)) for d in range(60)}
    lines = [json.dumps({"text": text, "url": url}) for url, text in texts.items()]
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress("\n".join(lines).encode()))
    (tmp_path / "code" / "deep").mkdir(parents=True)
    for d in range(40):
        (tmp_path / "code" / "deep" / f"m{d}.py").write_text("\n".join(f"x{d} = {i}" for i in range(40)))
    return str(tmp_path / "a.jsonl.zst"), str(tmp_path / "code")


def test_passages_are_consecutive_lines_of_one_document_of_their_stream(sources):
    seen = {}
    for stream in ("train", "validation", "evaluation"):
        for seed in range(150):
            lines = passage("prose", 3, "lines", seed, stream, sources).split("\n")
            assert len(lines) == 3 and lines[0] and lines[2]
            places = [tuple(map(int, line.removesuffix(" é").split(":"))) for line in lines if line]
            assert len({d for d, _ in places}) == 1 and places[-1][1] - places[0][1] == 2
            seen.setdefault(stream, set()).add(places[0][0])
            assert stream_of(f"page/{places[0][0]}") == stream
    assert len(seen["train"]) > 30 and len(set.union(*seen.values())) == sum(map(len, seen.values()))


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("unit, n", [("lines", 1), ("lines", 9), ("characters", 1), ("characters", 57)])
def test_a_passage_has_its_length_and_is_a_function_of_its_arguments(sources, content, unit, n):
    texts = [passage(content, n, unit, seed, "train", sources) for seed in range(30)]
    again = [passage(content, n, unit, seed, "train", sources) for seed in reversed(range(30))]
    assert texts == again[::-1] and (n == 1 or len(set(texts)) > 25)
    for text in texts:
        assert (text.count("\n") + 1 if unit == "lines" else len(text)) == n
        assert text[0].strip() or unit == "lines"
        assert max(len(line.encode()) for line in text.split("\n")) <= passages.LONGEST_LINE


def test_made_passages_are_what_their_names_say():
    for seed in range(20):
        text = {content: passage(content, 30, "lines", seed, "train", ()) for content in MADE}
        assert {tuple(json.loads(line)) for line in text["json"].split("\n")} == {("id", "name", "ok", "score", "tags")}
        rows = list(csv.reader(io.StringIO(text["csv"])))
        assert {len(row) for row in rows} == {5} and [row[0] for row in rows] == [*map(str, range(30))]
        line = r"\d\d:\d\d:\d\d\.\d{3} (INFO|WARN) worker-[0-3] job=880[0-3] retries=[0-2] status=ok"
        assert all(re.fullmatch(line, row) for row in text["log"].split("\n"))
        words = text["words"].split()
        stretches = Counter(tuple(words[i : i + 4]) for i in range(len(words) - 3))
        assert len(words) == 240 and sum(n > 1 for n in stretches.values()) > 10


def test_any_file_is_a_source_and_a_plain_one_is_cut_into_sections(tmp_path):
    (tmp_path / "notes.txt").write_text("\n".join(f"note {i} " + "z" * 200 for i in range(5000)))
    (tmp_path / "server.out").write_text("\n".join(f"out {i}" for i in range(5000)))
    for name, first in (("notes.txt", "note"), ("server.out", "out")):
        texts = read_texts((str(tmp_path / name),), "lines")
        assert sum(len(lines) for documents in texts.values() for lines in documents) == 5000
        assert texts["evaluation", "prose"] and not any(texts[stream, "code"] for stream, _ in texts)
        line = passage("prose", 1, "lines", 0, "evaluation", (str(tmp_path / name),))
        assert line.startswith(first) and len(line) <= passages.LONGEST_LINE


def test_files_of_one_name_in_several_folders_are_all_kept(tmp_path):
    for name in ("a/x/__init__.py", "a/y/__init__.py", "b/x/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name)
    texts = read_texts((str(tmp_path / "a"), str(tmp_path / "b")), "characters")
    found = sorted(text for documents in texts.values() for text in documents)
    assert found == ["a/x/__init__.py", "a/y/__init__.py", "b/x/__init__.py"]


@pytest.mark.parametrize(
    "write, error, named",
    [
        (lambda f: None, FileNotFoundError, "text_source=.*expected a file, or a folder with .jsonl"),
        (lambda f: f.mkdir(), FileNotFoundError, "text_source"),
        (lambda f: (f.mkdir(), (f / "a.jsonl.gz").write_bytes(b"no gzip")), RuntimeError, "a.jsonl.gz: damaged"),
        (lambda f: f.write_text("one\ntwo"), ValueError, "no passage of 9 in . documents: give other --text_source"),
    ],
)
def test_sources_that_cannot_be_used_are_named(tmp_path, write, error, named):
    write(tmp_path / "source")
    with pytest.raises(error, match=named):
        passage("prose", 9, "lines", 0, "train", (str(tmp_path / "source"),))


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(RuntimeError, match="a.jsonl, line 2: "):
        passage("prose", 1, "lines", 0, "train", (str(tmp_path / "a.jsonl"),))
