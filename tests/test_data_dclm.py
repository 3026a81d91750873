"""data_dclm.py: tokenizers, packing, shards under kills and damage, order, sources."""

import contextlib
import gzip
import importlib.metadata
import json
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tiktoken
import zstandard

import data_dclm
from data_dclm import BuildConfig, Corpus, load_tokenizer, permute

ROOT = Path(data_dclm.__file__).parent
EOS = 256  # of the tokenizer `bytes`


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(data_dclm, "BLOCK", 2000)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def texts_of(n: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices("abcdefgh \n", k=draw.randint(1, 200))) + "!" for _ in range(n)]


def lines_of(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"url": "u", "text": text}).encode() + b"\n" for text in texts)


def source(folder: Path, texts: list[str], name: str = "source.jsonl") -> str:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(lines_of(texts))
    return str(folder / name)


def build(out: Path, *sources: str, **knobs) -> Corpus:
    knobs = {"tokenizer": "bytes", "length": 32, "shard_tokens": 1500, "processes": 1} | knobs
    return data_dclm.build(BuildConfig(sources=sources, out_dir=str(out), **knobs))


def rows_of(corpus: Corpus) -> np.ndarray:
    return corpus.read(np.arange(corpus.rows))


def shards_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


# --------------------------------------------------------------------------------------------------------- tokenizers


def test_bytes_tokenizer():
    tokenizer = load_tokenizer("bytes")
    text = "a\n\né<|endoftext|>"
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint32 and ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert (tokenizer.vocab_size, tokenizer.eos) == (257, EOS)
    assert tokenizer.decode([*ids[:2], EOS]) == "a\n<|endoftext|>"
    assert tokenizer.decode([0xC3]) == "\ufffd" and tokenizer.decode_bytes([0xC3]) == b"\xc3"
    assert [b.count(b"\n") for b in tokenizer.token_bytes] == [int(i == 10) for i in range(257)]
    assert len(tokenizer.encode("")) == 0
    with pytest.raises(KeyError, match="257"):
        tokenizer.decode([257])


def test_half_a_surrogate_pair_is_replaced():
    assert load_tokenizer("bytes").encode("a\ud800b").tolist() == list("a\ufffdb".encode())


def encoding(pattern=r"[\s\S]", specials=None, name="mine", merges=()):
    ranks = {bytes([i]): i for i in range(256)} | {merge: 256 + i for i, merge in enumerate(merges)}
    specials = specials or {"<|endoftext|>": 300}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)


def test_the_identity_is_of_all_that_a_tokenizer_computes():
    variants = [
        encoding(),
        encoding(pattern=r"\s|\S"),
        encoding(specials={"<|endoftext|>": 301}),
        encoding(specials={"<|endoftext|>": 300, "<|x|>": 299}),
        encoding(merges=[b"ab"]),
        encoding(merges=[b"ba"]),
    ]
    hashes = {data_dclm.Tokenizer(variant, "<|endoftext|>").identity["sha256"] for variant in variants}
    assert len(hashes) == len(variants)
    assert data_dclm.Tokenizer(encoding(name="x"), "<|endoftext|>").identity["sha256"] in hashes  # the name is not
    identity = data_dclm.Tokenizer(encoding(), "<|endoftext|>").identity
    assert (identity["name"], identity["size"]) == ("mine", 301)


@pytest.mark.parametrize(
    "text", ["a" * 300, " " * 300, "\n" * 300, "ab cd\n" * 60, "ab  \n\n  cd, " * 30, "x\n" + "é" * 250]
)
def test_long_documents_are_cut_where_no_token_is(monkeypatch, text):
    pattern = data_dclm.LLAMA3_PATTERN
    merges = [b"ab", b" c", b" cd", b"\n\n", b"  ", b"aa", b"aaaa", b",  ", b" \n\n"]
    tokenizer = data_dclm.Tokenizer(encoding(pattern, merges=merges), "<|endoftext|>")
    whole = tokenizer.encode(text)
    monkeypatch.setattr(data_dclm, "PIECE", 50)
    monkeypatch.setattr(data_dclm, "PIECES", data_dclm.re.compile(data_dclm.PIECES.pattern.replace("100000", "50")))
    pieces = data_dclm.PIECES.findall(text)
    assert "".join(pieces) == text and max(map(len, pieces)) <= 50 and len(pieces) > 1
    assert tokenizer.decode(tokenizer.encode(text)) == text
    if len(set(text)) > 2:
        assert tokenizer.encode(text).tolist() == whole.tolist()


@pytest.mark.parametrize("text", ["a" * 1_000_000, " \t" * 500_000])
def test_a_million_characters_without_a_place_to_cut(text):  # tiktoken alone panics on the second
    tokenizer = data_dclm.Tokenizer(encoding(data_dclm.LLAMA3_PATTERN, merges=[b"aa"]), "<|endoftext|>")
    assert tokenizer.decode_bytes(tokenizer.encode(text)) == text.encode()


def test_unknown_tokenizers_are_refused(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="tokenizer='lama3': expected llama3 .*tokenizer.model, bytes.*cl100k"):
        load_tokenizer("lama3")
    ranks = tmp_path / "tokenizer.model"
    ranks.write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(ValueError, match="tokenizer.model: 2 ranks, expected Llama-3's"):
        load_tokenizer(str(ranks))
    ranks.write_bytes(b"\x0a\x0e\x00sentencepiece")
    with pytest.raises(ValueError, match="tokenizer.model: expected lines of base64 and rank"):
        load_tokenizer(str(ranks))
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    load_tokenizer.cache_clear()
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llama-models"):
        load_tokenizer("llama3")
    load_tokenizer.cache_clear()


def test_a_tiktoken_encoding_by_name(monkeypatch):
    def offline(name):
        raise ConnectionError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(RuntimeError, match="tokenizer='gpt2' .*TIKTOKEN_CACHE_DIR.*no network"):
        load_tokenizer("gpt2")
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding(name=name))
    assert load_tokenizer("gpt2").identity["name"] == "gpt2" and load_tokenizer("gpt2").eos == 300
    load_tokenizer.cache_clear()


def llama3():
    try:
        return load_tokenizer("llama3")
    except FileNotFoundError:
        pytest.skip("llama-models is not installed")


def test_llama3():
    tokenizer = llama3()
    assert (tokenizer.vocab_size, tokenizer.eos) == (128_256, 128_001)
    breaks = [token.count(b"\n") for token in tokenizer.token_bytes]
    with_break = [token for token in tokenizer.token_bytes if b"\n" in token]
    assert len(breaks) == 128_256 and tokenizer.token_bytes[128_000:] == [b""] * 256
    assert len(with_break) == 2255 and all(token.endswith(b"\n") for token in with_break)
    assert sum(count > 1 for count in breaks) == 735
    assert tokenizer.encode("\n").tolist() == [198]
    assert tokenizer.encode("Hello world").tolist() == [9906, 1917]
    assert tokenizer.decode([128_009]) == "<|eot_id|>" and tokenizer.decode([128_255]).endswith("token_245|>")
    assert len(tokenizer.encode("<|eot_id|>")) > 1
    text = (ROOT / "train.py").read_text() * 10
    assert len(text) > 150_000 and tokenizer.encode(text).tolist() == tokenizer.encoding.encode_ordinary(text)
    path = next(
        f.locate() for f in importlib.metadata.files("llama-models") if f.parts[-2:] == ("llama3", "tokenizer.model")
    )
    assert load_tokenizer(str(path)).identity == tokenizer.identity


# ------------------------------------------------------------------------------------------------------------ packing

DOCUMENTS = ["aaaa", "bbb", "cc", "dddddd"]


def spelled(rows: np.ndarray) -> list[str]:
    return ["".join("." if token == EOS else chr(token) for token in row) for row in rows]


def test_packing_drops_the_rest(tmp_path):
    corpus = build(tmp_path / "out", source(tmp_path, DOCUMENTS), length=4)
    assert spelled(rows_of(corpus)) == ["aaaa.", "bbb.c", "ddddd"]
    assert (corpus.rows, corpus.length, corpus.complete) == (3, 4, True)
    assert {k: corpus.last[k] for k in ("documents", "tokens", "kept", "empty")} == dict(
        documents=4, tokens=19, kept=15, empty=0
    )


def test_packing_continues(tmp_path):
    corpus = build(tmp_path / "out", source(tmp_path, DOCUMENTS), length=4, packing="continue")
    assert spelled(rows_of(corpus)) == ["aaaa.", ".bbb.", ".cc.d", "ddddd"]
    assert (corpus.last["tokens"], corpus.last["kept"]) == (19, 16)
    rows = rows_of(corpus)
    assert "".join(spelled(rows[:, 1:])) == "aaaa.bbb.cc.dddddd."[1:17]  # each target once


@pytest.mark.parametrize("packing", ["drop", "continue"])
def test_packing_against_a_plain_loop(tmp_path, packing):
    texts, length = texts_of(200), 32
    corpus = build(tmp_path / "out", source(tmp_path, texts), packing=packing, shard_tokens=10**9)
    expected, row = [], []
    for text in texts:
        for token in [*text.encode(), EOS]:
            row.append(token)
            if len(row) == length + 1:
                expected.append(row)
                row = row[-1:] if packing == "continue" else []
                if packing == "drop":
                    break
    assert rows_of(corpus).tolist() == expected
    assert corpus.rows > 100


def test_max_tokens_ends_with_the_sequence_that_reaches_it(tmp_path):
    texts = source(tmp_path, texts_of(300))
    everything = rows_of(build(tmp_path / "all", texts, shard_tokens=10**9))
    some = build(tmp_path / "some", texts, max_tokens=1000, shard_tokens=10**9)
    assert some.rows == 32 and some.complete  # 32 x 32 >= 1000 > 31 x 32
    assert np.array_equal(rows_of(some), everything[:32])
    used, room, rows = 0, 33, 0  # tokens of whole documents, to the end of the one that fills sequence 32
    for text in texts_of(300):
        if rows < 32:
            used, room = used + len(text) + 1, room - len(text) - 1
            rows, room = (rows + 1, 33) if room <= 0 else (rows, room)
    assert (some.last["tokens"], some.last["kept"]) == (used, 32 * 33)
    assert build(tmp_path / "some", texts, max_tokens=1000, shard_tokens=10**9).digest == some.digest


def test_empty_documents_are_skipped_and_counted(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": ""}\n\n{"text": " \\n"}\n{"text": "abcd"}\n{"text": "efgh"}')
    corpus = build(tmp_path / "out", str(tmp_path / "a.jsonl"), length=4)
    assert spelled(rows_of(corpus)) == ["abcd.", "efgh."]
    assert (corpus.last["documents"], corpus.last["empty"]) == (2, 3)


def test_a_source_of_less_than_a_sequence(tmp_path):
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"out: no sequence of 32 \+ 1 in 4 tokens"):
            build(tmp_path / "out", source(tmp_path, ["abc"]))


# ------------------------------------------------------------------------------------------------------------- shards


@pytest.mark.parametrize("packing", ["drop", "continue"])
def test_any_number_of_processes_gives_the_same_bytes(tmp_path, packing):
    texts = source(tmp_path, texts_of(300))
    one = build(tmp_path / "1", texts, packing=packing)
    two = build(tmp_path / "2", texts, packing=packing, processes=2)
    assert len(shards_of(tmp_path / "1")) > 5
    assert shards_of(tmp_path / "1") == shards_of(tmp_path / "2")
    assert one.digest == two.digest
    assert data_dclm.verify(tmp_path / "2").rows == one.rows


SLOW = """
import sys, os, time
sys.path.insert(0, {root!r})
import data_dclm
if __name__ == "__main__":
    data_dclm.BLOCK = 2000
    slow = os.fsync
    os.fsync = lambda fd: (time.sleep(0.1), slow(fd))
    data_dclm.configurator.run_cli(data_dclm.main)
"""


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def gone(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    return True


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    "number, packing", [(signal.SIGKILL, "drop"), (signal.SIGTERM, "continue"), (signal.SIGINT, "drop")]
)
def test_a_stopped_build_goes_on(tmp_path, number, packing):
    texts = source(tmp_path, texts_of(600))
    script, out = tmp_path / "slow.py", tmp_path / "out"
    script.write_text(SLOW.format(root=str(ROOT)))
    knobs = ["--tokenizer=bytes", "--length=32", "--shard_tokens=1500", f"--packing={packing}", "--processes=2"]
    command = [sys.executable, str(script), f"--sources={texts}", f"--out_dir={out}", *knobs]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True)
    workers = []
    while not (out / "000004.bin").exists():
        workers = children(process.pid)
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    send = os.killpg if number == signal.SIGINT else os.kill  # Ctrl-C goes to the workers too
    send(process.pid, number)
    status = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGINT: 130}[number]
    assert process.wait(20) == status
    assert number == signal.SIGKILL or b"Traceback" not in process.stderr.read()
    assert len(workers) >= 2
    deadline = time.monotonic() + 10
    while not all(map(gone, workers)):
        assert time.monotonic() < deadline, "workers left behind"
        time.sleep(0.01)
    left = shards_of(out)
    if number != signal.SIGKILL:
        assert not [name for name in left if name.endswith(".tmp")]
    assert not Corpus(out).complete
    build(tmp_path / "whole", texts, packing=packing)
    whole = shards_of(tmp_path / "whole")
    assert {name: data for name, data in left.items() if name.endswith(".bin")}.items() < whole.items()
    build(out, texts, packing=packing)
    assert shards_of(out) == whole


def test_a_finished_build_is_left_alone(tmp_path):
    texts = source(tmp_path, texts_of(100))
    build(tmp_path / "out", texts)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    build(tmp_path / "out", texts)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("knobs", [{"length": 16}, {"packing": "continue"}, {"shard_tokens": 99}, {"max_tokens": 50}])
def test_a_folder_with_another_build_is_refused(tmp_path, knobs):
    texts = source(tmp_path, texts_of(50))
    build(tmp_path / "out", texts)
    (name, value), *_ = knobs.items()
    with pytest.raises(ValueError, match=f"holds another build.*\n  {name}: .* there, {value!r} here"):
        build(tmp_path / "out", texts, **knobs)


def test_another_source_or_tokenizer_is_another_build(tmp_path, monkeypatch):
    build(tmp_path / "out", source(tmp_path, texts_of(50)))
    with pytest.raises(ValueError, match="names_and_sizes: "):
        build(tmp_path / "out", source(tmp_path, texts_of(51)))
    other = data_dclm.Tokenizer(encoding(), "<|endoftext|>")
    monkeypatch.setattr(data_dclm, "load_tokenizer", lambda name: other)
    with pytest.raises(ValueError, match="tokenizer: {'name': 'bytes'.* there, {'name': 'mine'.* here"):
        build(tmp_path / "out", source(tmp_path, texts_of(50)))


def test_uint16_where_the_vocabulary_allows(tmp_path, monkeypatch):
    texts = source(tmp_path, DOCUMENTS)
    build(tmp_path / "small", texts, length=4)
    assert (tmp_path / "small" / "000000.bin").stat().st_size == 4096 + 3 * (5 * 2 + 4)
    for eos, width in ((65_535, 2), (65_536, 4)):
        large = data_dclm.Tokenizer(encoding(specials={"<|endoftext|>": eos}), "<|endoftext|>")
        monkeypatch.setattr(data_dclm, "load_tokenizer", lambda name, large=large: large)
        corpus = build(tmp_path / str(eos), texts, length=4)
        assert (tmp_path / str(eos) / "000000.bin").stat().st_size == 4096 + 3 * (5 * width + 4)
        assert corpus.read([0]).tolist() == [[97, 97, 97, 97, eos]]


def test_the_header_says_what_the_shard_is(tmp_path):
    build(tmp_path / "out", source(tmp_path, texts_of(100)))
    head = (tmp_path / "out" / "000001.bin").read_bytes()[:4096].rstrip(b"\0").split(b"\t")
    assert head[0] == b"nano2d-shard-1" and len(head) == 5
    number, count = map(int, head[2].split())
    corpus, shard = map(json.loads, head[3:])
    assert corpus["tokenizer"] == load_tokenizer("bytes").identity
    assert corpus["dtype"] == "<u2" and corpus["files"] == 1
    assert number == shard["number"] == 1
    assert count * (33 * 2 + 4) + 4096 == (tmp_path / "out" / "000001.bin").stat().st_size
    assert str(tmp_path) not in head[3].decode()  # no paths of the machine


@pytest.fixture
def out(tmp_path) -> Path:
    build(tmp_path / "out", source(tmp_path, texts_of(300)))
    assert len(shards_of(tmp_path / "out")) > 3
    return tmp_path / "out"


def damage(path: Path, change) -> None:
    data = bytearray(path.read_bytes())
    path.write_bytes(bytes(change(data) or data))


def flip(at: int):
    def change(data: bytearray) -> None:
        data[at] ^= 1

    return change


@pytest.mark.parametrize("name, change", [
    ("000001.bin", lambda data: data[:-1]),
    ("000001.bin", lambda data: data[:5000]),
    ("000001.bin", lambda data: data[:100]),
    ("000001.bin", lambda data: data + b"x"),
])  # fmt: skip
def test_a_shard_that_was_cut_short_is_refused_at_once_or_by_the_second_read(out, name, change):
    corpus = Corpus(out)
    damage(out / name, change)
    message = r"out/000001.bin is cut short or too long, [\d,]+ bytes and not [\d,]+: .* build again"
    assert corpus.read([0]).size  # a complete build's first read is not held up
    with pytest.raises(RuntimeError, match=message):
        corpus.read([0])
    with pytest.raises(RuntimeError, match="000001.bin(: header damaged| is cut short or too long)"):
        Corpus(out).read([corpus.starts[1]])  # a read of that very shard
    (out / "starts").unlink()
    with pytest.raises(RuntimeError, match=message):
        Corpus(out)


def test_a_shard_cut_to_whole_rows_is_refused_when_it_is_opened(out):
    damage(out / "000001.bin", lambda data: data[: 4096 + 2 * (33 * 2 + 4)])
    (out / "starts").unlink()
    corpus = Corpus(out)
    with pytest.raises(
        RuntimeError, match=r"000001.bin does not belong here: number and count: '1 \d+' there, '1 2' here"
    ):
        corpus.read([corpus.starts[1]])


def test_an_empty_shard(out):
    (out / "000002.bin").write_bytes(b"")
    with pytest.raises(RuntimeError, match="cannot mmap an empty file|000002.bin: header damaged"):
        corpus = Corpus(out)
        corpus.read([corpus.starts[2]])
    (out / "starts").unlink()
    with pytest.raises(RuntimeError, match="000002.bin is cut short or too long, 0 bytes"):
        Corpus(out)


def test_starts_of_other_shards_are_not_taken(out):
    corpus = Corpus(out)
    rows = corpus.read(np.arange(corpus.rows))
    for wrong in (corpus.starts[:-1], np.append(corpus.starts, 10**6)):
        (out / "starts").write_bytes(wrong.astype("<i8").tobytes())
        assert (Corpus(out).read(np.arange(corpus.rows)) == rows).all()
    (out / "starts").write_bytes((corpus.starts + (corpus.starts > 0)).astype("<i8").tobytes())
    with pytest.raises(RuntimeError, match="does not belong here: number and count"):
        Corpus(out).read([0])


def test_a_missing_shard(out):
    (out / "000001.bin").unlink()
    with pytest.raises(RuntimeError, match="000001.bin is missing, the next is 000002.bin: delete it"):
        Corpus(out)


def test_every_flipped_byte_is_found(out):
    size = (out / "000001.bin").stat().st_size
    n_rows = (size - 4096) // (33 * 2 + 4)
    used = len((out / "000001.bin").read_bytes()[:4096].rstrip(b"\0"))
    whole = (out / "000001.bin").read_bytes()
    draw = random.Random(0)
    for at in [0, 20, used - 1, *draw.sample(range(4096, size), 30)]:
        damage(out / "000001.bin", flip(at))
        corpus = Corpus(out)
        row = (at - 4096) // 66 if at < 4096 + n_rows * 66 else (at - 4096 - n_rows * 66) // 4
        where = f"out/000001.bin, row {row}: damaged" if at >= 4096 else "out/000001.bin: header damaged"
        with pytest.raises(RuntimeError, match=where):
            corpus.read(corpus.starts[1] + np.arange(n_rows))
        with pytest.raises(RuntimeError, match=where):
            data_dclm.verify(out)
        (out / "000001.bin").write_bytes(whole)
    assert data_dclm.verify(out).rows == Corpus(out).rows


def test_a_shard_of_another_corpus(out, tmp_path):
    build(tmp_path / "other", source(tmp_path, texts_of(300, seed=1), "other.jsonl"))
    (out / "000001.bin").write_bytes((tmp_path / "other" / "000001.bin").read_bytes())
    with pytest.raises(RuntimeError, match="000001.bin does not belong here: names_and_sizes: "):
        data_dclm.verify(out)


def test_shards_of_another_order(out):
    shards = shards_of(out)
    (out / "000001.bin").write_bytes(shards["000002.bin"])
    (out / "starts").unlink()
    with pytest.raises(RuntimeError, match="000001.bin does not belong here: number and count: '2 "):
        data_dclm.verify(out)


def test_a_shard_of_another_run_of_the_same_build(out, tmp_path):  # same names and sizes, other texts
    texts = [text[::-1] for text in texts_of(300)]
    other = build(tmp_path / "other", source(tmp_path, texts))
    assert other.digest != Corpus(out).digest
    (out / "000001.bin").write_bytes((tmp_path / "other" / "000001.bin").read_bytes())
    with pytest.raises(RuntimeError, match=r"000001.bin does not follow the shard before it"):
        data_dclm.verify(out)


def test_no_shards(tmp_path):
    with pytest.raises(FileNotFoundError, match="no shards .*in .*nowhere: build some"):
        Corpus(tmp_path / "nowhere")
    (tmp_path / "000000.bin.tmp").write_bytes(b"half a shard")
    with pytest.raises(FileNotFoundError, match="no shards"):
        Corpus(tmp_path)


def test_another_tokenizers_shards_are_refused(out):
    identity = load_tokenizer("bytes").identity
    assert Corpus(out, identity).tokenizer == identity
    other = data_dclm.Tokenizer(encoding(), "<|endoftext|>").identity
    with pytest.raises(
        ValueError, match="another tokenizer: name: 'bytes' there, 'mine' here; size: 257 there, 301 here"
    ):
        Corpus(out, other)


def test_a_full_disk(tmp_path):
    texts = source(tmp_path, texts_of(300))
    code = f"""
import resource, sys
sys.path.insert(0, {str(ROOT)!r})
import data_dclm
data_dclm.BLOCK = 2000
resource.setrlimit(resource.RLIMIT_FSIZE, ({{}}, -1))
sys.argv[1:] = ["--sources={texts}", "--out_dir={tmp_path}/out", "--tokenizer=bytes", "--length=32",
    "--shard_tokens=1500", "--processes=1"]
data_dclm.configurator.run_cli(data_dclm.main)
"""
    whole = build(tmp_path / "whole", texts)
    sizes = sorted(len(data) for data in shards_of(tmp_path / "whole").values())
    first = len(shards_of(tmp_path / "whole")["000000.bin"])
    assert first < sizes[-1]
    done = subprocess.run([sys.executable, "-c", code.format(first)], capture_output=True, text=True)
    assert done.returncode == 2 and "is the disk full? What was there before is kept (File too large)" in done.stderr
    assert "Traceback" not in done.stderr
    assert (
        list(shards_of(tmp_path / "out").items())
        == list(shards_of(tmp_path / "whole").items())[: len(shards_of(tmp_path / "out"))]
    )
    assert 0 < len(shards_of(tmp_path / "out")) < len(sizes)
    assert build(tmp_path / "out", texts).digest == whole.digest


# ------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 100, 1000, 1025, 65_537])
def test_permute_is_a_permutation(n):
    for key in (0, 1, 2**63):
        assert np.array_equal(np.sort(permute(np.arange(n), n, key)), np.arange(n))


def test_permutations_are_well_mixed():
    n = 10_000
    a, b = (permute(np.arange(n), n, key) for key in (1, 2))
    for x, y in ((a[:-1], a[1:]), (a, np.arange(n)), (a, b), (a[:-1], b[1:]), (a[::2], a[1::2])):
        assert abs(np.corrcoef(x, y)[0, 1]) < 0.04  # 4 sigma
    assert np.count_nonzero(a == np.arange(n)) < 10  # Poisson, mean 1
    assert np.count_nonzero(np.abs(np.diff(a)) == 1) < 12  # mean 2
    counts = np.histogram2d(a[:-1], a[1:], bins=10)[0]
    assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 160  # chi-squared, 99 degrees of freedom


def test_every_small_permutation_comes_up():
    keys = np.repeat(np.arange(6000), 3)
    drawn = permute(np.tile(np.arange(3), 6000), 3, keys).reshape(-1, 3)
    counts = np.unique(drawn, axis=0, return_counts=True)[1]
    assert len(counts) == 6 and counts.min() > 850  # of 1,000 expected


def test_permute_huge():
    n = 10**12
    index = np.concatenate([np.arange(50_000), n - 1 - np.arange(50_000)])
    out = permute(index, n, 5)
    assert len(np.unique(out)) == 100_000 and out.min() >= 0 and out.max() < n
    assert abs(out.mean() / n - 0.5) < 0.01 and abs(np.corrcoef(out[:-1], out[1:])[0, 1]) < 0.02
    with pytest.raises(ValueError, match="expected 0 <= index < n=5"):
        permute([5], 5, 0)
    with pytest.raises(ValueError, match="index from -1 to 3"):
        permute([-1, 3], 5, 0)


def test_order_is_a_function_of_the_place(out):
    corpus = Corpus(out)
    n = corpus.rows
    epochs = corpus.order(np.arange(3 * n), seed=1).reshape(3, n)
    assert np.array_equal(np.sort(epochs, axis=1), np.tile(np.arange(n), (3, 1)))
    assert len({tuple(epoch) for epoch in epochs}) == 3  # each anew
    assert not np.array_equal(corpus.order(np.arange(n), seed=2), epochs[0])
    assert abs(np.corrcoef(epochs[0], epochs[1])[0, 1]) < 4 / np.sqrt(n)
    somewhere = np.array([2 * n + 5, 3, n - 1, n])  # in any grouping, on any number of ranks
    assert np.array_equal(corpus.order(somewhere, seed=1), epochs.ravel()[somewhere])


def test_read_shapes_and_bounds(out):
    corpus = Corpus(out)
    rows = corpus.read(np.array([corpus.rows - 1, 0, 0]))
    assert rows.shape == (3, 33) and rows.dtype == np.int64
    assert np.array_equal(rows[1], rows[2]) and np.array_equal(rows[0], rows_of(corpus)[-1])
    assert corpus.read(np.arange(0)).shape == (0, 33)
    for bad in (-1, corpus.rows):
        with pytest.raises(ValueError, match=f"has {corpus.rows}, from 0"):
            corpus.read([bad])


def test_few_shards_are_open_at_a_time(out, monkeypatch):
    expected = rows_of(Corpus(out))
    monkeypatch.setattr(data_dclm, "OPEN_SHARDS", 2)
    corpus = Corpus(out)
    rows = permute(np.arange(corpus.rows), corpus.rows, 0)
    descriptors = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    assert np.array_equal(corpus.read(rows), expected[rows])
    assert len(corpus.maps) == 2
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 2


def test_digest(tmp_path):
    texts = texts_of(100)
    a = build(tmp_path / "a", source(tmp_path, texts))
    texts[90] = "x" + texts[90][1:]
    b = build(tmp_path / "b", source(tmp_path, texts))
    assert a.rows == b.rows and a.digest != b.digest
    assert Corpus(tmp_path / "a").digest == a.digest


# ------------------------------------------------------------------------------------------------------------- sources


def test_all_formats_give_the_same(tmp_path):
    texts = texts_of(120)
    texts[5] = "one document, é \u2028 of\r\nodd line breaks \x0b and <|endoftext|>"
    data = lines_of(texts)
    half = data.rfind(b"\n", 0, len(data) // 2) + 1
    for name in ("jsonl", "jsonl.gz", "jsonl.zst", "parquet"):
        (tmp_path / name / "deep").mkdir(parents=True)
    (tmp_path / "jsonl" / "a.jsonl").write_bytes(data[:half])
    (tmp_path / "jsonl" / "deep" / "b.jsonl").write_bytes(data[half:-1])  # no line break at the end
    (tmp_path / "jsonl" / "README.md").write_text("no document")
    (tmp_path / "jsonl.gz" / "a.jsonl.gz").write_bytes(
        gzip.compress(data[: half + 7]) + gzip.compress(data[half + 7 :])
    )
    frames = zstandard.compress(data[: half + 7]) + zstandard.compress(data[half + 7 :])
    (tmp_path / "jsonl.zst" / "a.jsonl.zst").write_bytes(frames)
    table = pyarrow.table({"url": [""] * len(texts), "text": texts})
    pyarrow.parquet.write_table(table, tmp_path / "parquet" / "deep" / "a.parquet", row_group_size=50)
    expected = rows_of(build(tmp_path / "out", source(tmp_path, texts), shard_tokens=10**9))
    for name in ("jsonl", "jsonl.gz", "jsonl.zst", "parquet"):
        rows = rows_of(build(tmp_path / f"out-{name}", str(tmp_path / name), shard_tokens=10**9))
        assert np.array_equal(rows, expected), name


def test_text_files_globs_and_order(tmp_path):
    for name, text in zip(("b.txt", "a.txt", "c.txt"), ("bbbb", "aaaa", "cccc"), strict=True):
        (tmp_path / name).write_text(text)
    both = build(tmp_path / "1", f"{tmp_path}/[ab].txt", length=4)
    assert spelled(rows_of(both)) == ["aaaa.", "bbbb."]
    given = build(tmp_path / "2", f"{tmp_path}/c.txt", f"{tmp_path}/a.txt", f"{tmp_path}/[ac].txt", length=4)
    assert spelled(rows_of(given)) == ["cccc.", "aaaa."]


def test_files_may_move_with_their_folder(tmp_path):
    source(tmp_path / "here", texts_of(60))
    build(tmp_path / "out", str(tmp_path / "here"))
    (tmp_path / "here").rename(tmp_path / "there")
    assert build(tmp_path / "out", str(tmp_path / "there")).complete


@pytest.mark.parametrize("line, message", [
    (b'{"text": "a"', "Expecting"),
    (b"\xff", "invalid start byte"),
    (b'{"text": "\xe9"}', "invalid continuation byte"),
    (b'{"body": "a"}', "no string in 'text'; --text_field"),
    (b'{"text": null}', "no string in 'text'"),
    (b'{"text": 5}', "no string in 'text'"),
    (b'"text"', "no string in 'text'"),
    (b"[]", "no string in 'text'"),
])  # fmt: skip
def test_a_bad_line_is_named(tmp_path, line, message):
    lines = lines_of(texts_of(100)).splitlines(keepends=True)
    lines[76:77] = [line + b"\n"]
    (tmp_path / "bad.jsonl").write_bytes(b"".join(lines))
    with pytest.raises(RuntimeError, match=rf"bad.jsonl, line 77: .*{message}"):
        build(tmp_path / "out", str(tmp_path / "bad.jsonl"))
    written = shards_of(tmp_path / "out")
    assert "000000.bin" in written and not [name for name in written if name.endswith(".tmp")]


def test_a_bad_line_is_named_from_a_worker_too(tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(lines_of(texts_of(50)) + b"{\n" + lines_of(texts_of(50)))
    with pytest.raises(RuntimeError, match="bad.jsonl, line 51: "):
        build(tmp_path / "out", str(tmp_path / "bad.jsonl"), processes=2)


def test_bad_files_are_named(tmp_path):
    data = lines_of(texts_of(300))

    def refused(name: str, content: bytes, error: type, message: str, **knobs) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(error, match=message):
            build(tmp_path / f"out-{name}", str(tmp_path / name), **knobs)
        (tmp_path / name).unlink()

    refused("empty.jsonl", b"", RuntimeError, "empty.jsonl is empty")
    refused("a.jsonl.zst", zstandard.compress(b""), RuntimeError, "a.jsonl.zst: .*no documents")
    refused("a.jsonl.zst", zstandard.compress(data)[:-9], RuntimeError, "a.jsonl.zst: .*Truncated")
    refused("a.jsonl.gz", gzip.compress(data)[:-9], RuntimeError, "a.jsonl.gz: .*Truncated")
    refused("a.jsonl.zst", b"no zstandard", RuntimeError, "a.jsonl.zst: ")
    refused("a.parquet", b"no parquet", RuntimeError, "a.parquet: ")
    refused("a.txt", b"\xff\xff", RuntimeError, "a.txt: UnicodeDecodeError")
    refused("a.csv", b"a,b", FileNotFoundError, "a.csv: expected a file, or a folder or glob of .jsonl, .jsonl.zst")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "b.parquet")
    with pytest.raises(RuntimeError, match="b.parquet: .*text"):
        build(tmp_path / "out", str(tmp_path / "b.parquet"))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["abcdef" * 30, None]}), tmp_path / "c.parquet")
    with pytest.raises(RuntimeError, match="c.parquet, row 2: no string in 'text'"):
        build(tmp_path / "out", str(tmp_path / "c.parquet"))
    with pytest.raises(FileNotFoundError, match="nowhere: expected a file"):
        build(tmp_path / "out", str(tmp_path / "nowhere"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileNotFoundError, match="folder: expected"):
        build(tmp_path / "out", str(tmp_path / "folder"))


def test_documents_that_are_too_long_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(data_dclm, "MAX_DOCUMENT", 1000)
    texts = source(tmp_path, ["a" * 100, "b" * 2000])
    with pytest.raises(RuntimeError, match="source.jsonl, line 2: more than 1,000 bytes"):
        build(tmp_path / "out", texts)
    (tmp_path / "a.txt").write_text("a" * 1001)
    with pytest.raises(RuntimeError, match="a.txt, document 1: more than 1,000 bytes"):
        build(tmp_path / "out", str(tmp_path / "a.txt"))


def test_memory_does_not_grow_with_the_source(tmp_path):
    line = lines_of(["x" * 5000])
    with open(tmp_path / "big.jsonl", "wb") as file:
        for _ in range(4000):
            file.write(line)  # 20 MB
    tracemalloc.start()
    blocks = data_dclm.read_files(data_dclm.find_files([str(tmp_path / "big.jsonl")]), "text", {})
    seen = sum(len(block.documents) for block in blocks)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seen == 4000 and peak < 2_000_000


def itself(block):
    return block


def test_few_blocks_are_in_flight():
    taken = []
    results = data_dclm.in_order(itself, (taken.append(i) or i for i in range(100)), processes=2)
    for i, (block, result) in enumerate(results):
        assert block == result == i and len(taken) <= i + 1 + 2 * 2
    assert i == 99


def die(block):
    os._exit(1)


def test_a_worker_that_dies_ends_the_build():
    with pytest.raises(RuntimeError, match="terminated abruptly"):
        list(data_dclm.in_order(die, range(100), processes=2))


@pytest.fixture
def dataset(tmp_path) -> tuple[str, list[str]]:
    texts = texts_of(400)
    (tmp_path / "hub").mkdir()
    for name, part in (("train-0", texts[:150]), ("train-1", texts[150:]), ("validation", ["v" * 40] * 5)):
        lines = [json.dumps({"text": text, "metadata": {"a": "b"}, "url": "u"}) + "\n" for text in part]
        (tmp_path / "hub" / f"{name}.jsonl.zst").write_bytes(zstandard.compress("".join(lines).encode()))
    return str(tmp_path / "hub"), texts


def test_a_streamed_dataset_stops_and_goes_on(tmp_path, dataset, monkeypatch):
    folder, texts = dataset
    knobs = dict(dataset=folder, tokenizer="bytes", length=32, shard_tokens=400, processes=1)
    whole = data_dclm.build(BuildConfig(out_dir=str(tmp_path / "whole"), **knobs))
    plain = build(tmp_path / "plain", source(tmp_path, texts))
    assert np.array_equal(rows_of(whole)[:20], rows_of(plain)[:20])
    assert whole.last["documents"] == 400 and whole.facts["dataset"] == folder

    tokenise, calls = data_dclm.tokenise, []

    def stops(*args, **kwargs):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return tokenise(*args, **kwargs)

    for _ in range(3):  # in both files
        calls.clear()
        monkeypatch.setattr(data_dclm, "tokenise", stops)
        with pytest.raises(KeyboardInterrupt):
            data_dclm.build(BuildConfig(out_dir=str(tmp_path / "out"), **knobs))
        assert not Corpus(tmp_path / "out").complete
    monkeypatch.setattr(data_dclm, "tokenise", tokenise)
    corpus = data_dclm.build(BuildConfig(out_dir=str(tmp_path / "out"), **knobs))
    assert np.array_equal(rows_of(corpus), rows_of(whole)) and corpus.digest == whole.digest
    assert {**corpus.last, "after": 0} == {
        **whole.last,
        "after": 0,
    }  # datasets' own state is not the same after a start

    with pytest.raises(ValueError, match="dataset_split: 'train' there, 'validation' here"):
        data_dclm.build(BuildConfig(out_dir=str(tmp_path / "out"), dataset_split="validation", **knobs))
    other = data_dclm.build(BuildConfig(out_dir=str(tmp_path / "val"), dataset_split="validation", **knobs))
    assert spelled(rows_of(other)) == ["v" * 33] * 5
    with pytest.raises(RuntimeError, match="hub: .*body"):
        data_dclm.build(BuildConfig(out_dir=str(tmp_path / "no"), text_field="body", **knobs))


def test_a_hub_datasets_commit_is_pinned(tmp_path, dataset, monkeypatch):
    import datasets
    import huggingface_hub

    folder, _ = dataset
    newest, asked, load = ["c0ffee"], [], datasets.load_dataset

    def load_dataset(path, revision, **kwargs):
        asked.append((path, revision))
        return load(folder, **kwargs)

    info = type("Info", (), {"sha": property(lambda self: newest[0])})
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda name: info())
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    knobs = dict(dataset="org/name", tokenizer="bytes", length=32, processes=1, out_dir=str(tmp_path / "out"))
    assert data_dclm.build(BuildConfig(**knobs)).facts["dataset_revision"] == "c0ffee"
    newest[0] = "later"
    assert data_dclm.build(BuildConfig(**knobs)).facts["dataset_revision"] == "c0ffee"  # not the newest any more
    assert set(asked) == {("org/name", "c0ffee")}
    with pytest.raises(ValueError, match="dataset_revision: 'c0ffee' there, 'dead' here"):
        data_dclm.build(BuildConfig(**knobs, dataset_revision="dead"))


def test_a_hub_that_cannot_be_reached(tmp_path):
    with pytest.raises(RuntimeError, match="^org/name: "):
        data_dclm.build(BuildConfig(dataset="org/name", tokenizer="bytes", out_dir=str(tmp_path / "out")))


def test_local_text(tmp_path):
    data_dclm.write_local_text(tmp_path)
    files = {name: (tmp_path / f"{name}.jsonl.zst").read_bytes() for name in ("train", "val")}
    documents = {
        name: [json.loads(line) for line in zstandard.decompress(data).splitlines()] for name, data in files.items()
    }
    urls = {name: {document["url"] for document in part} for name, part in documents.items()}
    everywhere = urls["train"] | urls["val"]
    assert "stdlib/argparse.py" in everywhere
    assert {url.split("/")[0] for url in everywhere} == {"stdlib", "pydoc", "packages"}
    assert not urls["train"] & urls["val"] and 0.05 < len(urls["val"]) / len(urls["train"]) < 0.2
    texts = {name: {document["text"].strip() for document in part} for name, part in documents.items()}
    assert not texts["train"] & texts["val"]
    assert not [url for url in everywhere if "/test/" in url or "site-packages" in url]
    fields = "bff_contained_ngram_count_before_dedupe language_id_whole_page_fasttext metadata previous_word_count text"
    fields += " url warcinfo fasttext_openhermes_reddit_eli5_vs_rw_v2_bigram_200k_train_prob"
    assert list(documents["train"][0]) == fields.split()
    corpus = build(tmp_path / "out", str(tmp_path / "val.jsonl.zst"), length=256, max_tokens=10_000)
    assert corpus.rows == 40


# --------------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize("arguments, message", [
    ([], "error: nothing to do: expected one of --sources, --dataset, --verify, --local_text"),
    (["--sources=a", "--dataset=b"], "error: sources and dataset: expected one of"),
    (["--sources=a.jsonl"], "error: out_dir=''"),
    (["--sources=no.jsonl", "--out_dir=o", "--tokenizer=bytes"], "error: no.jsonl: expected a file"),
    (["--sources=a", "--out_dir=o", "--length=0"], "error: length=0: expected at least 1"),
    (["--verify=no"], "error: no shards (000000.bin) in no"),
])  # fmt: skip
def test_errors_as_a_user_sees_them(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["data_dclm.py", *arguments])
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        data_dclm.configurator.run_cli(data_dclm.main)
    signal.signal(signal.SIGTERM, before)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_the_command_line(tmp_path):
    texts = source(tmp_path, texts_of(40))

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(ROOT / "data_dclm.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    knobs = [f"--sources={texts}", "--out_dir=out", "--tokenizer=bytes", "--length=32", "--processes=1"]
    done = run(*knobs)
    assert done.returncode == 0, done.stderr
    assert "out: " in done.stdout and "of them dropped" in done.stdout and "tok/s" in done.stderr
    damage(tmp_path / "out" / "000000.bin", flip(5000))
    done = run("--verify=out")
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: out/000000.bin, row 13: damaged (crc32): delete it" in done.stderr and "Traceback" not in done.stderr


def test_it_imports_alone_offline_and_fast(tmp_path):
    for name in ("data_dclm.py", "configurator.py"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    code = "import data_dclm, sys; print([m for m in ('torch', 'datasets', 'pyarrow', 'requests') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "[]", done.stderr
