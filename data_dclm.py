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
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

import configurator
import documents
from data_copy import permute, random_bits
from documents import Block
from tokenizer import Tokenizer, load_tokenizer

MAGIC, HEADER = b"nano2d-shard-2", 4096
OPEN_SHARDS = 512  # each takes a file descriptor, of which a process often has 1,024
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
    block_bytes: int = 2**20  # of text that a process gets at once; a shard ends with such a block
    processes: int = 0  # that tokenise; 0: one a core
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
        for name in ("max_tokens", "processes"):
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


def _header(facts: dict, rows: int, progress: Progress) -> bytes:
    """The first HEADER bytes of a shard with `rows` rows; _map reads them."""
    text = json.dumps({"rows": rows, "facts": facts, "progress": asdict(progress)}).encode()
    header = b"%s\t%08x\t%s" % (MAGIC, zlib.crc32(text), text)
    if len(header) > HEADER:
        raise RuntimeError(f"a header of {len(header)} bytes: raise HEADER={HEADER} in data_dclm.py: {text.decode()}")
    return header.ljust(HEADER, b"\0")


def _map(path: str) -> tuple[dict, mmap.mmap]:
    """A shard's header, and all its bytes."""
    with open(path, "rb", 0) as file:
        magic, _, rest = file.read(HEADER).rstrip(b"\0").partition(b"\t")
        crc, _, text = rest.partition(b"\t")
        if magic != MAGIC or crc != b"%08x" % zlib.crc32(text):
            raise RuntimeError(f"{path}: header damaged, or none of {MAGIC.decode()}: {AGAIN}")
        return json.loads(text), mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class Corpus:
    """A folder of shards: sequences, numbered from 0.

    rows: their number; length: the tokens that a model sees; tokenizer: its fingerprint; facts: all that decides what
    the shards hold; last: the progress at their end, a dict; digest: of all; complete: False if the build was stopped.

    FileNotFoundError if there are no shards, ValueError if they are of another tokenizer, RuntimeError for damage:
    names, sizes and two headers are checked at once (2,000 shards take 10 ms), all else when it is read.
    """

    def __init__(self, folder: str | Path, fingerprint: dict | None = None):
        self.folder = Path(folder)
        names = os.listdir(folder) if self.folder.is_dir() else ()
        shards = sorted(name for name in names if name.endswith(".bin"))
        if not shards:
            raise FileNotFoundError(f"no shards (000000.bin) in {folder}: build some, see python data_dclm.py --help")
        for i, name in enumerate(shards):
            if name != f"{i:06d}.bin":
                raise RuntimeError(f"{self.path(i)} is missing, the next is {name}: {AGAIN}")
        header, _ = _map(self.path(0))
        self.facts = header["facts"]
        self.length, self.tokenizer, self.dtype = (self.facts[name] for name in ("length", "tokenizer", "dtype"))
        if fingerprint not in (None, self.tokenizer):
            difference = "; ".join(configurator.diff(self.tokenizer, fingerprint))
            raise ValueError(
                f"{folder} was built with another tokenizer, {header['progress']['tokenizer_name']} ({difference}): "
                "give --tokenizer as it was in the build, or shards that are built with the one here"
            )
        self.row_bytes = (self.length + 1) * np.dtype(self.dtype).itemsize + 4
        counts = [self.count_rows(i) for i in range(len(shards))]
        self.starts = np.cumsum([0, *counts])
        self.rows = int(self.starts[-1])
        self.maps: dict[int, tuple[NDArray, NDArray]] = {}
        self.last = self.open(len(shards) - 1)
        if self.last["rows"] != self.rows:  # a shard lacks whole rows: find it
            for i in range(len(shards)):
                self.open(i)
        self.digest, self.complete = self.last["digest"], self.last["complete"]

    def path(self, i: int) -> str:
        return f"{self.folder}/{i:06d}.bin"

    def count_rows(self, i: int) -> int:
        """How many rows shard i has, by its size."""
        count, rest = divmod(os.path.getsize(self.path(i)) - HEADER, self.row_bytes)
        if count < 0 or rest:
            raise RuntimeError(f"{self.path(i)} is cut short or too long, by a part of a row: {AGAIN}")
        return count

    def open(self, i: int) -> dict:
        """Maps shard i, and returns the progress at its end."""
        header, data = _map(self.path(i))
        count = int(self.starts[i + 1] - self.starts[i])
        found = {"shard": header["progress"]["shard"], "rows": header["rows"], **header["facts"]}
        expected = {"shard": i, "rows": count, **self.facts}
        if found != expected:
            difference = "; ".join(configurator.diff(found, expected))
            raise RuntimeError(f"{self.path(i)} does not belong here ({difference}): {AGAIN}")
        while len(self.maps) >= OPEN_SHARDS:
            del self.maps[next(iter(self.maps))]  # the one that was opened first
        rows = np.frombuffer(data, self.dtype, count * (self.length + 1), HEADER).reshape(count, self.length + 1)
        self.maps[i] = rows, np.frombuffer(data, "<u4", count, HEADER + rows.nbytes)
        return header["progress"]

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
        for k, (i, row) in enumerate(zip(shards.tolist(), (rows - self.starts[shards]).tolist(), strict=True)):
            if i not in self.maps:
                self.open(i)
            tokens, checks = self.maps[i]
            if zlib.crc32(tokens[row]) != checks[row]:
                raise RuntimeError(f"{self.path(i)}, row {row}: damaged (crc32): {AGAIN}")
            out[k] = tokens[row]
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


def _digest(before: str, facts: dict, checks: NDArray) -> str:
    return hashlib.sha256(f"{before}{json.dumps(facts, sort_keys=True)}".encode() + checks.tobytes()).hexdigest()


def verify(folder: str | Path) -> Corpus:
    """Reads every row, and checks that the shards follow each other. Errors as Corpus."""
    corpus, digest = Corpus(folder), ""
    for i in tqdm(range(len(corpus.starts) - 1), unit="shard"):
        progress = corpus.open(i)
        for row in range(corpus.starts[i], corpus.starts[i + 1]):
            corpus.read([row])
        digest = _digest(digest, corpus.facts, corpus.maps[i][1])
        if digest != progress["digest"]:
            raise RuntimeError(f"{corpus.path(i)} does not follow the shard before it (digest): {AGAIN}")
    return corpus


def tokenise(block: Block, tokenizer: str, text_field: str, dtype: str) -> tuple[NDArray, list[int]]:
    """Tokens of a block's documents, eos behind each, and how many each document has, 0 for one without any text.
    RuntimeError names a document that cannot be used."""
    encoder = load_tokenizer(tokenizer)
    tokens, sizes = [np.empty(0, dtype)], []
    for number, document in enumerate(block.documents, block.first + 1):
        try:
            text = documents.text_of(document, text_field)
        except ValueError as error:
            raise RuntimeError(f"{block.name} {number}: {error}") from error
        ids = np.append(encoder.encode(text), encoder.eos) if text.strip() else []
        tokens.append(ids)
        sizes.append(len(ids))
    return np.concatenate(tokens, dtype=dtype, casting="unsafe"), sizes


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which then ends its workers
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # kill -9 leaves none behind


def in_order(function: Callable, blocks: Iterable[Block], processes: int) -> Iterator[tuple[Block, tuple]]:
    """Each block with function(block), in order, few at a time."""
    if processes == 1:
        for block in blocks:
            yield block, function(block)
        return
    # A fork has the tokenizer already; elsewhere it is not safe. It comes before any reader has threads.
    how = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool, waiting = ProcessPoolExecutor(processes, how, _start_worker), []
    try:
        pool.submit(int)  # starts the workers
        for block in blocks:
            waiting.append((block, pool.submit(function, block)))
            if len(waiting) > 2 * processes:
                block, future = waiting.pop(0)
                yield block, future.result()
        for block, future in waiting:
            yield block, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


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
        checks = np.array(checks, "<u4")
        progress.digest = _digest(progress.digest, facts, checks)
        file.write(checks.tobytes())
        file.seek(0)
        file.write(_header(facts, len(checks), progress))
    return progress


def describe(config: BuildConfig, tokenizer: Tokenizer, files: dict[Path, str], corpus: Corpus | None) -> dict:
    """All that decides what the shards hold, and so what must be the same when a build goes on."""
    listing = json.dumps([[name, path.stat().st_size] for path, name in files.items()])
    revision = config.dataset_revision
    if config.dataset and not revision:
        revision = corpus.facts["dataset_revision"] if corpus else documents.newest_revision(config.dataset)
    return {
        "tokenizer": tokenizer.fingerprint,
        "dtype": "<u2" if tokenizer.vocab_size <= 2**16 else "<u4",
        "files": len(files),
        "names_and_sizes": hashlib.sha256(listing.encode()).hexdigest(),
        "dataset": config.dataset,
        "dataset_config": config.dataset_config,
        "dataset_split": config.dataset_split,
        "dataset_revision": revision,
        "text_field": config.text_field,
        "length": config.length,
        "packing": config.packing,
        "max_tokens": config.max_tokens,
        "shard_tokens": config.shard_tokens,
        "block_bytes": config.block_bytes,
    }


def build(config: BuildConfig) -> Corpus:
    """Makes out_dir's shards, or goes on where that was stopped.

    ValueError if out_dir holds another build, if another process builds there, or if the text fills no sequence.
    FileNotFoundError and RuntimeError for sources that are missing or damaged, and for packages not installed.
    """
    documents.need(*(["pyarrow"] if config.sources else ["datasets", "zstandard"]))
    tokenizer = load_tokenizer(config.tokenizer)
    files = documents.find_files(config.sources)
    out = Path(config.out_dir)
    with configurator.lock(out):
        corpus = Corpus(out) if any(out.glob("*.bin")) else None
        facts = describe(config, tokenizer, files, corpus)
        if corpus and corpus.facts != facts:
            ways = "give the values there to go on with it, choose another --out_dir, or move that folder away"
            lines = configurator.diff(corpus.facts, facts)
            if corpus.tokenizer != tokenizer.fingerprint:
                lines.append(f"tokenizer's name: {corpus.last['tokenizer_name']!r} there, {tokenizer.name!r} here")
            raise ValueError("\n  ".join([f"{out} holds another build: {ways}", *lines]))
        if corpus and corpus.complete:
            return corpus
        progress = Progress(**corpus.last) if corpus else Progress(tokenizer_name=tokenizer.name)
        if files:
            blocks = documents.read_files(files, config.text_field, config.block_bytes, progress.after)
        else:
            where = (config.dataset, config.dataset_config, config.dataset_split, facts["dataset_revision"])
            blocks = documents.read_dataset(*where, config.text_field, config.block_bytes, progress.after)
        work = partial(tokenise, tokenizer=config.tokenizer, text_field=config.text_field, dtype=facts["dtype"])
        results = in_order(work, blocks, config.processes or os.cpu_count())
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
    last = Progress(**corpus.last)
    print(
        f"{corpus.folder}: {corpus.rows:,} sequences of {corpus.length:,} tokens from {last.documents:,} documents "
        f"({last.empty:,} more were empty) of {last.tokens:,} tokens, {1 - last.kept / last.tokens:.1%} "
        f"of them dropped; digest {corpus.digest[:16]}"
    )


if __name__ == "__main__":
    configurator.run_cli(main)
