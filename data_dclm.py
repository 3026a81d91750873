"""Shards of training sequences: built from texts, verified, and read in batches.

    python data_dclm.py --dataset=mlfoundations/dclm-baseline-1.0 --max_tokens=7_340_032_000 --out_dir=data/dclm
    python data_dclm.py --dataset=HuggingFaceFW/fineweb-edu --max_tokens=10_485_760 --out_dir=data/fineweb-edu
    python data_dclm.py '--sources=dumps/dclm,more/*.parquet' --out_dir=data/mine
    python data_dclm.py --verify=data/dclm
    python data_dclm.py --sources=data/text/train.jsonl.zst --tokenizer=bytes --out_dir=data/toy

The same command goes on where a build was stopped; what is lost is the shard at hand. A shard, 000000.bin and so on:

    4,096 bytes: name and version of the format, crc32 of the JSON that follows, zeros
    rows of length + 1 tokens, little-endian: the inputs are all but the last, the targets all but the first
    crc32 of each row
"""

import contextlib
import hashlib
import json
import os
import signal
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

import configurator
import documents
from data_copy import permute, random_bits
from documents import Block
from tokenizer import Tokenizer, load_tokenizer

MAGIC, HEADER = b"nano2d-shard-2", 4096
AGAIN = "put a sound copy there; or delete it and all later shards, and the command that built them makes them again"


@dataclass
class BuildConfig:
    """Build shards from sources or a dataset, or verify them"""

    sources: tuple[str, ...] = ()  # files, folders or globs of .jsonl, .jsonl.zst, .jsonl.gz, .parquet, .txt
    dataset: str = ""  # streamed by the library datasets: a name on the Hugging Face hub, or a folder
    dataset_config: str = ""  # its configuration; empty: its default
    dataset_split: str = "train"  # its split
    dataset_revision: str = ""  # its commit on the hub; empty: that of the shards in out_dir, or else the newest
    text_field: str = "text"  # where a document's text is; a .txt file is one document
    tokenizer: str = "llama3"  # llama3, bytes, a tiktoken encoding, a Hugging Face folder, or Llama-3's tokenizer.model
    out_dir: str = ""  # folder of the shards
    length: int = 2048  # tokens that a model sees; a stored sequence has one more
    packing: Literal["drop", "continue"] = "drop"  # the rest of a document that a sequence has no room for
    max_tokens: int = 0  # stop with the sequence that reaches so many; 0: at the end of the source
    shard_tokens: int = 2**27  # a shard ends with the block of documents that reaches so many
    block_bytes: int = 2**20  # of text that a thread gets at once; a shard ends with such a block
    threads: int = 0  # that tokenise; 0: one a core
    verify: str = ""  # folder of shards to check, every row

    def __post_init__(self):
        tasks = ("sources", "dataset", "verify")
        given = [name for name in tasks if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"{' and '.join(given) or 'nothing to do'}: expected one of --{', --'.join(tasks)}")
        if (self.sources or self.dataset) and not self.out_dir:
            raise ValueError("out_dir='': say where the shards shall go, as in --out_dir=data/dclm")
        for name in ("length", "shard_tokens", "block_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
        for name in ("max_tokens", "threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 0")


@dataclass
class Progress:
    """How far a build is at the end of a shard; a part of the shard's header."""

    shard: int = -1  # its number
    complete: bool = False  # it is the last one
    rows: int = 0  # in this shard and all before it
    documents: int = 0  # with text
    empty: int = 0  # documents without
    tokens: int = 0  # of the documents, their ends included
    kept: int = 0  # of these, in rows
    digest: str = ""  # of all shards so far
    after: dict = field(default_factory=dict)  # where the reader of the source goes on
    tokenizer_name: str = ""  # for messages; what it computes is in the facts


def _write_header(file: BinaryIO, facts: dict, rows: int, progress: Progress) -> None:
    """The first HEADER bytes of a shard with `rows` rows."""
    text = json.dumps({"rows": rows, "facts": facts, "progress": asdict(progress)}).encode()
    header = b"%s\t%08x\t%s" % (MAGIC, zlib.crc32(text), text)
    if len(header) > HEADER:
        raise RuntimeError(f"a header of {len(header)} bytes: raise HEADER={HEADER} in data_dclm.py: {text.decode()}")
    file.seek(0)
    file.write(header.ljust(HEADER, b"\0"))


def _read_header(path: str) -> dict:
    with open(path, "rb") as file:
        magic, _, rest = file.read(HEADER).rstrip(b"\0").partition(b"\t")
    crc, _, text = rest.partition(b"\t")
    if magic != MAGIC or crc != b"%08x" % zlib.crc32(text):
        raise RuntimeError(f"{path}: header damaged, or none of {MAGIC.decode()}: {AGAIN}")
    return json.loads(text)


class Corpus:
    """A folder of shards: sequences, numbered from 0.

    rows: their number; length: the tokens that a model sees; tokenizer: its fingerprint; facts: all that decides what
    the shards hold; last: the Progress at their end; digest: of all; complete: False if the build was stopped.

    FileNotFoundError if there are no shards, ValueError if they are of another tokenizer, RuntimeError for damage:
    names, sizes and headers are checked at once (2,000 shards take 0.2 s), rows when they are read.
    """

    def __init__(self, folder: str | Path, fingerprint: dict | None = None):
        self.folder = Path(folder)
        names = sorted(path.name for path in self.folder.glob("*.bin"))
        if not names:
            raise FileNotFoundError(f"no shards (000000.bin) in {folder}: build some, see python data_dclm.py --help")
        for i, name in enumerate(names):
            if name != f"{i:06d}.bin":
                raise RuntimeError(f"{self.path(i)} is missing, the next is {name}: {AGAIN}")
        headers = [_read_header(self.path(i)) for i in range(len(names))]
        self.facts, self.progress = headers[0]["facts"], [Progress(**header["progress"]) for header in headers]
        self.length, self.tokenizer, self.dtype = (self.facts[name] for name in ("length", "tokenizer", "dtype"))
        self.last = self.progress[-1]
        self.digest, self.complete = self.last.digest, self.last.complete
        if fingerprint not in (None, self.tokenizer):
            difference = "; ".join(configurator.diff(self.tokenizer, fingerprint))
            raise ValueError(
                f"{folder} was built with another tokenizer, {self.last.tokenizer_name} ({difference}): "
                "give --tokenizer as it was in the build, or shards that are built with the one here"
            )
        self.row_bytes = (self.length + 1) * np.dtype(self.dtype).itemsize
        for i, header in enumerate(headers):
            found = {"shard": self.progress[i].shard, "bytes": os.path.getsize(self.path(i)), **header["facts"]}
            expected = {"shard": i, "bytes": HEADER + header["rows"] * (self.row_bytes + 4), **self.facts}
            if lines := configurator.diff(found, expected):
                raise RuntimeError(f"{self.path(i)} is damaged or of another build ({'; '.join(lines)}): {AGAIN}")
        self.starts = np.cumsum([0, *(header["rows"] for header in headers)])
        self.rows = int(self.starts[-1])

    def path(self, i: int) -> str:
        return f"{self.folder}/{i:06d}.bin"

    def checks(self, i: int) -> bytes:
        """What stands after the rows of shard i: the crc32 of each."""
        with open(self.path(i), "rb") as file:
            file.seek(HEADER + (self.starts[i + 1] - self.starts[i]) * self.row_bytes)
            return file.read()

    def order(self, index: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """The sequence at each place (N,), from 0, of an endless order: all, shuffled, then all, shuffled anew."""
        epoch, place = np.divmod(np.asarray(index, np.int64), self.rows)
        return permute(place, self.rows, random_bits(seed) + epoch.astype(np.uint64))

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sequences (N, length + 1): inputs [:, :-1], targets [:, 1:]. RuntimeError for one that is damaged."""
        rows = np.asarray(rows, np.int64)
        if rows.size and not 0 <= rows.min() <= rows.max() < self.rows:
            raise ValueError(f"rows from {rows.min()} to {rows.max()}: {self.folder} has {self.rows}, from 0")
        out = np.empty((len(rows), self.length + 1), np.int64)
        shards = np.searchsorted(self.starts, rows, "right") - 1
        for k, (i, row) in enumerate(zip(shards, rows - self.starts[shards], strict=True)):
            with open(self.path(i), "rb", 0) as file:
                file.seek(HEADER + row * self.row_bytes)
                data = file.read(self.row_bytes)
                file.seek(HEADER + (self.starts[i + 1] - self.starts[i]) * self.row_bytes + row * 4)
                if zlib.crc32(data) != int.from_bytes(file.read(4), "little"):
                    raise RuntimeError(f"{self.path(i)}, row {row}: damaged (crc32): {AGAIN}")
            out[k] = np.frombuffer(data, self.dtype)
        return out


def open_corpus(folder: str, fingerprint: dict, block_size: int, rows: int = 1) -> Corpus:
    """A complete corpus of this tokenizer, with sequences of up to block_size tokens, and at least `rows` of them.
    ValueError says what does not fit."""
    corpus = Corpus(folder, fingerprint)
    if not corpus.complete:
        raise ValueError(f"{folder}: its build was stopped; the same data_dclm.py command goes on with it")
    if corpus.length > block_size:
        raise ValueError(f"{folder} has sequences of {corpus.length} tokens: give --block_size={corpus.length}")
    if corpus.rows < rows:
        hint = "lower eval_steps or batch_size, or build more shards"
        raise ValueError(f"{folder} has {corpus.rows} sequences, {rows} are needed: {hint}")
    return corpus


def text_batch(
    corpus: Corpus, batch_size: int, step: int, seed: int, rank: int = 0, world: int = 1, pieces: int = 1
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """One rank's `pieces` micro-batches of a step: tokens and targets (n, length) each. It reads no other rank's rows.

    The batch is at places step * batch_size and on of the order by `seed`. It is cut into pieces * world parts, and
    the ranks take them in turn.
    """
    places = np.arange(step * batch_size, (step + 1) * batch_size)
    parts = np.array_split(corpus.order(places, seed), pieces * world)[rank::world]
    rows = corpus.read(np.concatenate(parts))
    cuts = np.cumsum([len(part) for part in parts])[:-1]
    return [(part[:, :-1], part[:, 1:]) for part in np.split(rows, cuts)]


def _digest(before: str, facts: dict, checks: bytes) -> str:
    return hashlib.sha256(f"{before}{json.dumps(facts, sort_keys=True)}".encode() + checks).hexdigest()


def verify(folder: str | Path) -> Corpus:
    """Reads every row, and checks that the shards follow each other. Errors as Corpus."""
    corpus, digest = Corpus(folder), ""
    for i in tqdm(range(len(corpus.progress)), unit="shard"):
        for row in range(corpus.starts[i], corpus.starts[i + 1]):
            corpus.read([row])
        digest = _digest(digest, corpus.facts, corpus.checks(i))
        if digest != corpus.progress[i].digest:
            raise RuntimeError(f"{corpus.path(i)} does not follow the shard before it (digest): {AGAIN}")
    return corpus


def tokenise(block: Block, tokenizer: Tokenizer, dtype: str) -> tuple[NDArray, list[int]]:
    """Tokens of a block's documents, eos after each, and how many each document has, 0 for one without any text."""
    tokens, sizes = [np.empty(0, dtype)], []
    for text in block.texts:
        ids = np.append(tokenizer.encode(text), tokenizer.eos) if text.strip() else []
        tokens.append(ids)
        sizes.append(len(ids))
    return np.concatenate(tokens, dtype=dtype, casting="unsafe"), sizes


def in_order(function: Callable, blocks: Iterable[Block], threads: int) -> Iterator[tuple[Block, tuple]]:
    """Each block with function(block), in order, few at a time. Threads serve, since tiktoken frees Python's lock."""
    waiting = []
    with ThreadPoolExecutor(threads) as pool:
        for block in blocks:
            waiting.append((block, pool.submit(function, block)))
            if len(waiting) > 2 * threads:
                block, future = waiting.pop(0)
                yield block, future.result()
        for block, future in waiting:
            yield block, future.result()


def pack(tokens: NDArray, ends: NDArray, length: int, packing: str, max_rows: int) -> tuple[list[NDArray], int]:
    """At most max_rows sequences (length + 1,) of tokens (T,) from documents that end at `ends`; where the rest begins.

    drop      | a a a a . b b | b b .     | c c . d d d d | d     each starts with a document, as in the paper
    continue  | a a a a . b b |                                   each starts with the last token of the one before:
                          | b b b . c c . |                       every token is predicted once
    """
    rows, at = [], 0
    while at + length < len(tokens) and len(rows) < max_rows:
        rows.append(tokens[at : at + length + 1])
        at = at + length if packing == "continue" else int(ends[np.searchsorted(ends, at + length + 1)])
    return rows, at


def write_shard(
    folder: Path, facts: dict, before: Progress, results: Iterator[tuple[Block, tuple]], bar: tqdm
) -> Progress:
    """Writes the shard that follows `before`, of tokenised blocks, and returns the Progress at its end."""
    length, packing = facts["length"], facts["packing"]
    max_rows = -(-facts["max_tokens"] // length) or 2**63
    progress = replace(before, shard=before.shard + 1, complete=True)
    rest, ends = np.empty(0, facts["dtype"]), np.empty(0, np.int64)  # tokens in no row yet; ends of their documents
    checks = []  # of this shard's rows
    with configurator.atomic(folder / f"{progress.shard:06d}.bin") as file:
        file.seek(HEADER)
        for block, (tokens, sizes) in results:
            ends = np.append(ends, len(rest) + np.cumsum(sizes, dtype=np.int64))
            rest = np.append(rest, tokens)
            rows, at = pack(rest, ends, length, packing, max_rows - progress.rows)
            for row in rows:
                file.write(row.data)
                checks.append(zlib.crc32(row))
            rest, ends = rest[at:], ends[ends > at] - at
            progress.rows += len(rows)
            progress.documents += len(sizes) - sizes.count(0)
            progress.empty += sizes.count(0)
            progress.tokens += len(tokens)
            progress.after = block.after
            bar.update(len(tokens))
            bar.set_postfix(documents=progress.documents, refresh=False)
            if progress.rows == max_rows:
                progress.tokens -= len(rest)  # not dropped: nobody asked for more
                break
            if len(checks) * length >= facts["shard_tokens"]:
                progress.complete = False
                break
        if not progress.rows:
            found = f"no sequence of {length} + 1 tokens in the {progress.tokens} of the source"
            raise ValueError(f"{folder}: {found}: give more text, or a smaller --length")
        progress.kept += len(checks) * (length + 1 if packing == "drop" else length)
        tail = np.array(checks, "<u4").tobytes()
        file.write(tail)
        progress.digest = _digest(progress.digest, facts, tail)
        _write_header(file, facts, len(checks), progress)
    return progress


def describe(config: BuildConfig, tokenizer: Tokenizer, files: dict[Path, str], corpus: Corpus | None) -> dict:
    """All that decides what the shards hold, and so what must be the same when a build goes on."""
    listing = json.dumps([[name, path.stat().st_size] for path, name in files.items()])
    revision = config.dataset_revision
    if config.dataset and not revision:
        revision = corpus.facts["dataset_revision"] if corpus else documents.newest_revision(config.dataset)
    as_given = ("dataset", "dataset_config", "dataset_split", "text_field", "length", "packing")
    as_given += ("max_tokens", "shard_tokens", "block_bytes")
    return {
        "tokenizer": tokenizer.fingerprint,
        "dtype": "<u2" if tokenizer.vocab_size <= 2**16 else "<u4",
        "files": len(files),
        "names_and_sizes": hashlib.sha256(listing.encode()).hexdigest(),
        "dataset_revision": revision,
        **{name: getattr(config, name) for name in as_given},
    }


def build(config: BuildConfig) -> Corpus:
    """Makes out_dir's shards, or goes on where that was stopped.

    ValueError if out_dir holds another build, if another process builds there, or if the text fills no sequence.
    FileNotFoundError and RuntimeError for sources that are missing or damaged, and for packages not installed.
    """
    documents.need("datasets", "zstandard")
    tokenizer = load_tokenizer(config.tokenizer)
    files = documents.find_files(config.sources)
    out = Path(config.out_dir)
    with configurator.lock(out):
        corpus = Corpus(out, tokenizer.fingerprint) if any(out.glob("*.bin")) else None
        facts = describe(config, tokenizer, files, corpus)
        if corpus and corpus.facts != facts:
            ways = "give the values there to go on with it, choose another --out_dir, or move that folder away"
            lines = configurator.diff(corpus.facts, facts)
            raise ValueError("\n  ".join([f"{out} holds another build: {ways}", *lines]))
        if corpus and corpus.complete:
            return corpus
        progress = corpus.last if corpus else Progress(tokenizer_name=tokenizer.name)
        how = (config.text_field, config.block_bytes, progress.after)
        if files:
            blocks = documents.read_files(files, *how)
        else:
            where = {"path": config.dataset, "name": config.dataset_config or None, "split": config.dataset_split}
            where["revision"] = facts["dataset_revision"] or None
            blocks = documents.read_dataset(config.dataset, where, *how)
        work = partial(tokenise, tokenizer=tokenizer, dtype=facts["dtype"])
        results = in_order(work, blocks, config.threads or os.cpu_count())
        every = 0.2 if sys.stderr.isatty() else 10  # seconds
        total = config.max_tokens or None
        bar = tqdm(total=total, initial=progress.tokens, unit="tok", unit_scale=True, mininterval=every)
        with bar, contextlib.closing(results):
            while not progress.complete:
                progress = write_shard(out, facts, progress, results, bar)
        return Corpus(out)


def main() -> None:
    def stop(number: int, frame) -> None:
        raise SystemExit(128 + number)

    config = configurator.configure(BuildConfig, doc=__doc__)
    signal.signal(signal.SIGTERM, stop)
    corpus = verify(config.verify) if config.verify else build(config)
    last = corpus.last
    print(
        f"{corpus.folder}: {corpus.rows:,} sequences of {corpus.length:,} tokens from {last.documents:,} documents "
        f"({last.empty:,} more were empty) of {last.tokens:,} tokens, {1 - last.kept / last.tokens:.1%} "
        f"of them dropped; digest {corpus.digest[:16]}"
        f"{'' if corpus.complete else '; not complete yet: the command that writes it goes on'}"
    )


if __name__ == "__main__":
    configurator.run_cli(main)
