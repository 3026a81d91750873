"""data_dclm.py and documents.py: packing, shards under kills and damage, order and batches, sources."""

import gzip
import importlib.util
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import test_tokenizer
import zstandard

import configurator
import data_dclm
from data_dclm import BuildConfig, Corpus, text_batch
from scripts.local_text import write_local_text
from tokenizer import Tokenizer, load_tokenizer

folder = test_tokenizer.folder  # a fixture
ROOT = Path(data_dclm.__file__).parent
EOS = 256  # of the tokenizer `bytes`
SMALL = {"tokenizer": "bytes", "length": 32, "shard_tokens": 1500, "block_bytes": 2000, "threads": 1}
ONE_SHARD = 10**9
NOISE = [random.Random(i).randbytes(2000).decode("latin-1") for i in range(300)]  # which hardly shrinks
OTHER = Tokenizer(test_tokenizer.encoding(), "<|endoftext|>")


def texts_of(n: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices("abcdefgh \n", k=draw.randint(1, 200))) + "!" for _ in range(n)]


def lines_of(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"url": "u", "text": text}).encode() + b"\n" for text in texts)


def source(folder: Path, texts: list[str]) -> str:
    """A folder with 200 texts a file."""
    folder.mkdir(exist_ok=True)
    for i in range(0, len(texts), 200):
        (folder / f"{i:03d}.jsonl").write_bytes(lines_of(texts[i : i + 200]))
    return str(folder)


def build(out: Path, *sources: str, **knobs) -> Corpus:
    return data_dclm.build(BuildConfig(**{"sources": sources, "out_dir": str(out)} | SMALL | knobs))


def rows_of(corpus: Corpus) -> np.ndarray:
    return corpus.read(np.arange(corpus.rows))


def spelled(corpus: Corpus) -> list[str]:
    return ["".join("." if token == EOS else chr(token) for token in row) for row in rows_of(corpus)]


def shards_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"}


@pytest.fixture
def texts(tmp_path) -> str:
    return source(tmp_path / "in", texts_of(300))


@pytest.fixture
def out(tmp_path, texts) -> Path:
    build(tmp_path / "out", texts)
    return tmp_path / "out"


@pytest.mark.parametrize("packing", ["drop", "continue"])
def test_packing_against_a_plain_loop(tmp_path, texts, packing):
    expected, row = [], []
    for text in texts_of(300):
        for token in [*text.encode(), EOS]:
            row.append(token)
            if len(row) == 33:
                expected.append(row)
                row = row[-1:] if packing == "continue" else []
                if packing == "drop":
                    break
    corpus = build(tmp_path / "out", texts, packing=packing, shard_tokens=ONE_SHARD)
    assert rows_of(corpus).tolist() == expected and corpus.complete and corpus.rows == len(expected)
    last, tokens = corpus.last, sum(len(text) + 1 for text in texts_of(300))
    assert (last.documents, last.empty, last.tokens) == (300, 0, tokens)
    assert last.kept == len(expected) * (33 if packing == "drop" else 32)
    some = build(tmp_path / "some", texts, packing=packing, shard_tokens=ONE_SHARD, max_tokens=1000)
    assert rows_of(some).tolist() == expected[:32] and some.complete  # 32 x 32 >= 1000 > 31 x 32
    assert packing == "drop" or some.last.tokens == some.last.kept == 32 * 32


def test_empty_documents_are_skipped_and_counted(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": ""}\n\n{"text": " \\n"}\n{"text": "abcd"}\n{"text": "efgh"}')
    corpus = build(tmp_path / "out", str(tmp_path / "a.jsonl"), length=4)
    assert spelled(corpus) == ["abcd.", "efgh."] and (corpus.last.documents, corpus.last.empty) == (2, 2)


def test_text_that_fills_no_sequence_leaves_nothing_in_the_way(tmp_path):
    with pytest.raises(ValueError, match=r"out: no sequence of 32 \+ 1 tokens in the 4 of the source: give more text"):
        build(tmp_path / "out", source(tmp_path / "in", ["abc"]))
    assert build(tmp_path / "out", source(tmp_path / "in", ["abc" * 20])).rows == 1


SLOW = """
import os, signal, time
import data_dclm
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where the tests run
os.fsync = lambda fd: time.sleep(0.1)
data_dclm.configurator.run_cli(data_dclm.main)
"""


@pytest.mark.parametrize("number, status", [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_build_goes_on_and_two_threads_build_what_one_does(tmp_path, texts, number, status):
    out, whole = tmp_path / "out", tmp_path / "whole"
    build(whole, texts, packing="continue")
    knobs = SMALL | {"sources": texts, "out_dir": out, "packing": "continue", "threads": 2}
    command = [sys.executable, "-c", SLOW, *(f"--{name}={value}" for name, value in knobs.items())]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT)
    while not (out / "000004.bin").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    with pytest.raises(ValueError, match="out is in use by process"):
        build(out, texts, packing="continue")
    process.send_signal(number)
    assert process.wait(20) == status
    assert number == signal.SIGKILL or b"Traceback" not in process.stderr.read()
    left = {name: data for name, data in shards_of(out).items() if number != signal.SIGKILL or name.endswith(".bin")}
    assert left.items() < shards_of(whole).items()
    build(out, texts, packing="continue", threads=2)
    assert shards_of(out) == shards_of(whole)


@pytest.mark.parametrize("name, value", [
    ("length", 16), ("packing", "continue"), ("text_field", "url"), ("max_tokens", 50), ("shard_tokens", 99),
    ("block_bytes", 99), ("names_and_sizes", ""), ("tokenizer", "gpt2"),
])  # fmt: skip
def test_a_folder_with_another_build_is_refused(tmp_path, out, texts, monkeypatch, name, value):
    before, knobs = shards_of(out), {name: value}
    message = f"holds another build: .* move that folder.*\n  {name}: .* {value!r} here$"
    if name == "names_and_sizes":
        texts, knobs = source(tmp_path / "more", texts_of(301)), {}
        message = "holds another build: .*\n  names_and_sizes: "
    elif name == "tokenizer":
        monkeypatch.setattr(data_dclm, "load_tokenizer", lambda name: OTHER)
        message = r"out was built with another tokenizer, bytes \(size: 257 there, 301.*: give "
    with pytest.raises(ValueError, match=message):
        build(out, texts, **knobs)
    assert shards_of(out) == before


def test_a_renamed_tokenizer_folder_still_serves_its_shards(tmp_path, texts, folder):
    whole = build(tmp_path / "out", texts, tokenizer=str(folder))
    shards, there = shards_of(tmp_path / "out"), str(folder.rename(tmp_path / "renamed"))
    assert Corpus(tmp_path / "out", load_tokenizer(there).fingerprint).rows == whole.rows
    assert build(tmp_path / "out", texts, tokenizer=there).rows == whole.rows  # a finished build
    for name in [*shards][2:]:
        (tmp_path / "out" / name).unlink()
    build(tmp_path / "out", texts, tokenizer=there)  # an unfinished one
    assert shards_of(tmp_path / "out") == shards and len(shards) > 3
    assert build(tmp_path / "new", texts, tokenizer=there).digest == whole.digest
    assert [Corpus(tmp_path / name).last.tokenizer_name for name in ("out", "new")] == ["qwen", "renamed"]


def test_uint16_where_the_vocabulary_allows(tmp_path, monkeypatch):
    for eos, width in ((65_535, 2), (65_536, 4)):
        large = Tokenizer(test_tokenizer.encoding(specials={"<|endoftext|>": eos}), "<|endoftext|>")
        monkeypatch.setattr(data_dclm, "load_tokenizer", lambda name, large=large: large)
        corpus = build(tmp_path / str(eos), source(tmp_path / "in", ["aaaa"]), length=4)
        assert (tmp_path / str(eos) / "000000.bin").stat().st_size == 4096 + 5 * width + 4
        assert corpus.read([0]).tolist() == [[97, 97, 97, 97, eos]]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def swap(shard: Path, texts: list[str], **knobs) -> None:
    other = shard.parent.parent / "other"
    build(other, source(other.parent / "more", texts), **knobs)
    shutil.copy(other / shard.name, shard)


@pytest.mark.parametrize("change, message", [
    (lambda one: one.unlink(), "000001.bin is missing, the next is 000002.bin"),
    (lambda one: shutil.copy(one.with_name("000002.bin"), one), r"000001.bin is damaged .* another build \(shard: 2 "),
    (lambda one: swap(one, texts_of(300), max_tokens=10**6), r"000001.bin is damaged or of .* \(max_tokens: 1000000 "),
    (lambda one: swap(one, [text[::-1] for text in texts_of(300)]), "000001.bin does not follow the shard before it"),
    (lambda one: one.write_bytes(one.read_bytes()[: 4096 + 2 * 70]), r"000001.bin is damaged .* \(bytes: 4236 there"),
    (lambda one: one.write_bytes(one.read_bytes() + b"x"), r"000001.bin is damaged .* \(bytes: "),
    (lambda one: flip(one, 5000), "000001.bin, row 13: damaged"),
    (lambda one: flip(one, -4), r"000001.bin, row 5\d: damaged"),  # its crc32
    (lambda one: flip(one, 400), "000001.bin: header damaged"),
    (lambda one: flip(one.with_name("000000.bin"), 0), "000000.bin: header damaged"),
    (lambda one: one.with_name("000000.bin").write_bytes(b""), "000000.bin: header damaged"),
])  # fmt: skip
def test_damage_is_named_and_what_its_message_says_to_do_mends_it(out, texts, change, message):
    sound = shards_of(out)
    change(out / "000001.bin")
    with pytest.raises(RuntimeError, match=f"out/{message}.*: {data_dclm.AGAIN}$") as caught:
        data_dclm.verify(out)
    for path in out.glob("*.bin"):
        if path.name >= str(caught.value).split("out/")[1][:10]:
            path.unlink()
    build(out, texts)
    assert shards_of(out) == sound


def test_no_shards_and_another_tokenizers(tmp_path, out):
    with pytest.raises(FileNotFoundError, match=r"no shards \(000000.bin\) in .*nowhere: build some"):
        Corpus(tmp_path / "nowhere")
    assert Corpus(out, load_tokenizer("bytes").fingerprint).tokenizer == load_tokenizer("bytes").fingerprint


def test_order_is_a_function_of_the_place(out):
    corpus = Corpus(out)
    n = corpus.rows
    epochs = corpus.order(np.arange(3 * n), seed=1).reshape(3, n)
    assert np.array_equal(np.sort(epochs, axis=1), np.tile(np.arange(n), (3, 1)))
    as_it_was = [[120, 61, 246, 86], [123, 145, 53, 197], [250, 244, 12, 91]]  # or no run could go on
    assert (n, epochs[:, :4].tolist()) == (259, as_it_was)
    somewhere = np.array([2 * n + 5, 3, n - 1, n])  # in any grouping
    assert np.array_equal(corpus.order(somewhere, seed=1), epochs.ravel()[somewhere])


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("pieces", [1, 2])
def test_ranks_and_pieces_share_the_rows_of_one_batch(out, world, pieces, monkeypatch):
    corpus = Corpus(out)
    whole = corpus.read(corpus.order(np.arange(36, 48), seed=5))  # step 3 of 12 rows
    read, asked = Corpus.read, []
    monkeypatch.setattr(Corpus, "read", lambda self, rows: asked.append(len(rows)) or read(self, rows))
    parts = {}
    for rank in range(world):
        batch = text_batch(corpus, 12, 3, 5, rank, world, pieces)
        assert len(batch) == pieces and sum(asked) == 12 // world
        asked.clear()
        for piece, (tokens, targets) in enumerate(batch):
            assert tokens.shape == (12 // (world * pieces), 32) and tokens.dtype == np.int64
            parts[piece * world + rank] = np.hstack([tokens, targets[:, -1:]])
            assert np.array_equal(tokens[:, 1:], targets[:, :-1])
    assert np.array_equal(np.concatenate([parts[i] for i in sorted(parts)]), whole)


def test_rows_are_read_in_any_order(out):
    corpus, expected = Corpus(out), rows_of(Corpus(out))
    rows = np.append(corpus.order(np.arange(corpus.rows), 0), [0, 0, corpus.rows - 1])
    assert np.array_equal(corpus.read(rows), expected[rows])
    assert corpus.read(np.arange(0)).shape == (0, 33) and corpus.read([0]).dtype == np.int64
    for bad in (-1, corpus.rows):
        with pytest.raises(ValueError, match=f"rows from {bad} to {bad}: .*out has {corpus.rows}, from 0"):
            corpus.read([bad])


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_all_formats_give_the_same(tmp_path, kind):
    texts = texts_of(120)
    texts[5] = "one document, é \u2028 of\r\nodd line breaks \x0b and <|endoftext|>"
    expected = rows_of(build(tmp_path / "out", source(tmp_path / "in", texts), shard_tokens=ONE_SHARD))
    parts = [lines_of(texts[:60]), lines_of(texts[60:])[:-1]]  # no line break at the end
    (tmp_path / kind / "deep").mkdir(parents=True)
    (tmp_path / kind / "README.md").write_text("no document")
    paths = [tmp_path / kind / f"a.{kind}", tmp_path / kind / "deep" / f"b.{kind}"]
    for path, data, some in zip(paths, parts, (texts[:60], texts[60:]), strict=True):
        if kind == "parquet":
            pyarrow.parquet.write_table(pyarrow.table({"url": [""] * 60, "text": some}), path, row_group_size=25)
        else:
            compress = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstandard.compress}[kind]
            path.write_bytes(compress(data[:999]) + compress(data[999:]))  # two frames
    assert np.array_equal(rows_of(build(tmp_path / "2", str(tmp_path / kind), shard_tokens=ONE_SHARD)), expected)


def test_text_files_globs_order_and_files_that_move_with_their_folder(tmp_path):
    (tmp_path / "in").mkdir()
    for name, text in zip(("b.txt", "a.txt", "c.txt"), ("bbbb", "aaaa", "cccc"), strict=True):
        (tmp_path / "in" / name).write_text(text)
    assert spelled(build(tmp_path / "1", f"{tmp_path}/in/[ab].txt", length=4, text_field="body")) == ["aaaa.", "bbbb."]
    given = (f"{tmp_path}/in/c.txt", f"{tmp_path}/in/a.txt", f"{tmp_path}/in/[ac].txt")
    assert spelled(build(tmp_path / "2", *given, length=4)) == ["cccc.", "aaaa."]
    build(tmp_path / "3", str(tmp_path / "in"), length=4)
    (tmp_path / "in").rename(tmp_path / "moved")
    assert build(tmp_path / "3", str(tmp_path / "moved"), length=4).complete


def with_line_77(line: bytes) -> bytes:
    return lines_of(texts_of(76)) + line + b"\n" + lines_of(texts_of(30))


@pytest.mark.parametrize("name, content, error, message", [
    ("a.jsonl", with_line_77(b'{"text": "a"'), RuntimeError, ": damaged, empty or of another form: .*in row 76"),
    ("a.jsonl", with_line_77(b'{"text": "\xe9"}'), RuntimeError, ": damaged, .*'utf-8'"),
    ("a.jsonl", with_line_77(b'{"body": "a"}'), RuntimeError, ": .*document 77 has no string in 'text'; --text_field"),
    ("a.jsonl", with_line_77(b'"text"'), RuntimeError, ": damaged, .*object to string"),
    ("a.jsonl", b"", RuntimeError, " is empty: fetch it again"),
    ("a.jsonl.zst", zstandard.compress(b""), RuntimeError, ": damaged, empty"),
    ("a.jsonl.zst", zstandard.compress(lines_of(NOISE))[:-9], RuntimeError, ": damaged, .*JSON parse error"),
    ("a.jsonl.gz", gzip.compress(lines_of(NOISE))[:-9], RuntimeError, ": damaged, .*ended before"),
    ("a.parquet", pyarrow.table({"body": ["a"]}), RuntimeError, ": damaged, .*'text'.* not in"),
    ("a.parquet", pyarrow.table({"text": ["abcdef" * 30, None]}), RuntimeError, ": .*document 2 has no string"),
    ("a.txt", b"\xff\xff", RuntimeError, ": damaged, .*UnicodeDecodeError"),
    ("a.csv", b"a,b", FileNotFoundError, ": expected a file, or a folder or glob of .jsonl, .jsonl.zst"),
    ("nowhere", None, FileNotFoundError, ": expected a file"),
])  # fmt: skip
def test_bad_sources_are_named(tmp_path, name, content, error, message):
    if isinstance(content, pyarrow.Table):
        pyarrow.parquet.write_table(content, tmp_path / name)
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(error, match=f"/{name}{message}"):
        build(tmp_path / "out", str(tmp_path / name), threads=2)
    assert not list(tmp_path.glob("out/*.tmp"))


def test_few_blocks_are_in_flight_in_order():
    taken = []
    results = data_dclm.in_order(abs, (taken.append(i) or i for i in range(100)), threads=2)
    for i, (block, result) in enumerate(results):
        assert block == result == i and len(taken) <= i + 1 + 2 * 2
    assert i == 99


@pytest.fixture
def dataset(tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    texts = texts_of(400)
    (tmp_path / "hub").mkdir()
    for name, part in (("train-0", texts[:150]), ("train-1", texts[150:]), ("validation", ["v" * 40] * 5)):
        (tmp_path / "hub" / f"{name}.jsonl.zst").write_bytes(zstandard.compress(lines_of(part)))
    return str(tmp_path / "hub")


@pytest.mark.parametrize("streamed", [False, True])
def test_files_and_a_streamed_dataset_go_on_where_they_were_stopped(tmp_path, dataset, streamed):
    files = source(tmp_path / "in", texts_of(400))
    how = {"dataset": dataset} if streamed else {"sources": (files,)}
    plain = build(tmp_path / "plain", files, shard_tokens=400, block_bytes=3000)
    whole = build(tmp_path / "out", shard_tokens=400, **how)
    rows = rows_of(whole)
    assert np.array_equal(rows[:20], rows_of(plain)[:20]) and whole.last.documents == 400
    for first in (12, 3):  # in the second file, in the first
        for path in (tmp_path / "out").glob("*.bin"):
            if int(path.stem) >= first:
                path.unlink()
        assert Corpus(tmp_path / "out").rows < whole.rows and not Corpus(tmp_path / "out").complete
        again = build(tmp_path / "out", shard_tokens=400, **how)
        assert np.array_equal(rows_of(again), rows) and again.digest == whole.digest and again.complete


def test_a_datasets_split_is_a_part_of_the_build(tmp_path, dataset):
    build(tmp_path / "out", dataset=dataset)
    with pytest.raises(ValueError, match="dataset_split: 'train' there, 'validation' here"):
        build(tmp_path / "out", dataset=dataset, dataset_split="validation")
    assert spelled(build(tmp_path / "val", dataset=dataset, dataset_split="validation")) == ["v" * 33] * 5


def test_a_hub_datasets_commit_is_pinned(tmp_path, dataset, monkeypatch):
    import datasets

    out, asked, load = tmp_path / "out", [], datasets.load_dataset

    def load_dataset(path, revision, **where):
        asked.append((path, revision))
        return load(dataset, **where)

    with pytest.raises(RuntimeError, match="^org/name: neither a folder nor found on the hub: "):
        build(out, dataset="org/name")
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for newest in ("c0ffee", "later"):
        monkeypatch.setattr("huggingface_hub.dataset_info", lambda name, sha=newest: SimpleNamespace(sha=sha))
        assert build(out, dataset="org/name").facts["dataset_revision"] == "c0ffee"  # not the newest any more
        max(out.glob("*.bin")).unlink()
    assert asked == [("org/name", "c0ffee")] * 2
    with pytest.raises(ValueError, match="dataset_revision: 'c0ffee' there, 'dead' here"):
        build(out, dataset="org/name", dataset_revision="dead")


def test_local_text(tmp_path):
    write_local_text(tmp_path)
    train, val = (zstandard.decompress((tmp_path / f"{part}.jsonl.zst").read_bytes()) for part in ("train", "val"))
    train, val = ([json.loads(line) for line in part.splitlines()] for part in (train, val))
    urls = {document["url"] for document in train + val}
    assert len(urls) == len({document["text"] for document in train + val}) == len(train + val)
    assert "stdlib/argparse.py" in urls and {url.split("/")[0] for url in urls} == {"stdlib", "pydoc", "packages"}
    assert not [url for url in urls if "/test/" in url or "site-packages" in url]
    assert 0.05 < len(val) / len(train) < 0.2


@pytest.mark.parametrize("arguments, missing, message", [
    ("", "", "nothing to do: expected one of --sources, --dataset, --verify"),
    ("--sources=a --dataset=b", "", "sources and dataset: expected one of"),
    ("--sources=a.jsonl", "", "out_dir=''"),
    ("--sources=a --out_dir=o --length=0", "", "length=0: expected at least 1"),
    ("--sources=a --out_dir=o --threads=-1", "", "threads=-1: expected at least 0"),
    ("--sources=a --out_dir=o", "datasets", "datasets not installed: pip install datasets"),
    ("--dataset=a --out_dir=o", "zstandard", "zstandard not installed: pip install zstandard"),
])  # fmt: skip
def test_errors_as_a_user_sees_them(tmp_path, monkeypatch, capsys, arguments, missing, message):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["data_dclm.py", *arguments.split()])
    with pytest.raises(SystemExit) as stopped:
        configurator.run_cli(data_dclm.main)
    assert stopped.value.code == 2 and f"error: {message}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_command_line_verifies(out, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["data_dclm.py", f"--verify={out}"])
    data_dclm.main()
    corpus, shown = Corpus(out), capsys.readouterr().out
    assert f"out: {corpus.rows} sequences of 32 tokens from 300 documents (0 more were empty) of " in shown
    assert f" {1 - corpus.rows * 33 / corpus.last.tokens:.1%} of them dropped; digest {corpus.digest[:16]}" in shown


def test_it_imports_fast_and_offline():
    code = "import data_dclm, sys; print({'torch', 'datasets', 'pyarrow', 'requests', 'tiktoken'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "set()", done.stderr
