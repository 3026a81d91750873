"""Text: tokenizers, and shards of training sequences - built, verified, read.

    python data_dclm.py --dataset=mlfoundations/dclm-baseline-1.0 --max_tokens=7_340_032_000 --out_dir=data/dclm
    python data_dclm.py --dataset=HuggingFaceFW/fineweb-edu --max_tokens=10_485_760 --out_dir=data/fineweb-edu
    python data_dclm.py '--sources=dumps/dclm,more/*.parquet' --out_dir=data/mine
    python data_dclm.py --verify=data/dclm
    python data_dclm.py --local_text=data/text                       # texts of this machine, for tests and toys
    python data_dclm.py --sources=data/text/train.jsonl.zst --tokenizer=bytes --out_dir=data/toy

The same command goes on where a build was stopped; what is lost is the shard at hand. A shard, 000000.bin and so on:

    4,096 bytes: name and version of the format, crc32 of the JSON that follows, zeros
    rows of length + 1 tokens, little-endian: the inputs are all but the last, the targets all but the first
    crc32 of each row

and beside them, of a complete build, `starts`: little-endian int64, rows before each shard and in all.
"""

import binascii
import contextlib
import glob
import hashlib
import importlib.metadata
import io
import json
import mmap
import multiprocessing
import os
import re
import signal
import sys
import sysconfig
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import tiktoken
from numpy.typing import NDArray
from tqdm import tqdm

import configurator

MAGIC, HEADER = b"nano2d-shard-1", 4096
KINDS = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet", ".txt")
BLOCK = 2**20  # bytes of text that a worker gets at once
MAX_DOCUMENT = 2**26  # bytes: memory is bounded only if a document is
PIECE = 100_000  # characters: on a run of a million blanks tiktoken overflows its stack
OPEN_SHARDS = 512  # each takes a file descriptor, of which a process often has 1,024
AGAIN = "delete it and the later ones, and build again"

# Pieces end behind a line or a word, places that no token crosses; or else anywhere.
PIECES = re.compile(rf"[\s\S]{{1,{PIECE}}}(?:(?<=\n)(?=\S)|(?<=\S)(?= )|\Z)|[\s\S]{{1,{PIECE}}}")

# This and the names are from llama-models' llama3/tokenizer.py.
LLAMA3_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
LLAMA3_PATTERN += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_SPECIALS = "begin_of_text end_of_text reserved_special_token_0 reserved_special_token_1 finetune_right_pad_id"
LLAMA3_SPECIALS += " step_id start_header_id end_header_id eom_id eot_id python_tag image"
LLAMA3_SPECIALS = LLAMA3_SPECIALS.split() + [f"reserved_special_token_{i}" for i in range(2, 246)]


@dataclass
class TextConfig:
    """Text"""

    tokenizer: str = "llama3"  # llama3, bytes, a tiktoken encoding's name, or a path of Llama-3's tokenizer.model
    train_data: str = ""  # folder of shards
    val_data: str = ""  # folder of shards of another corpus


@dataclass
class BuildConfig:
    """Build shards from sources or a dataset, or verify them, or write local text"""

    sources: tuple[str, ...] = ()  # files, folders or globs of .jsonl, .jsonl.zst, .jsonl.gz, .parquet, .txt
    dataset: str = ""  # streamed by the library datasets: a name on the Hugging Face hub, or a folder
    dataset_config: str = ""  # its configuration; empty: its default
    dataset_split: str = "train"  # its split
    dataset_revision: str = ""  # its commit on the hub; empty: that of the shards in out_dir, or else the newest
    text_field: str = "text"  # where a document's text is; a .txt file is one document
    tokenizer: str = "llama3"  # llama3, bytes, a tiktoken encoding's name, or a path of Llama-3's tokenizer.model
    out_dir: str = ""  # folder of the shards
    length: int = 2048  # tokens that a model sees; a stored sequence has one more
    packing: Literal["drop", "continue"] = "drop"  # the rest of a document that a sequence has no room for
    max_tokens: int = 0  # stop with the sequence that reaches so many; 0: at the end of the source
    shard_tokens: int = 2**27  # a shard ends with the block of documents that reaches so many
    processes: int = 0  # that tokenise; 0: one a core
    verify: str = ""  # folder of shards to check, every row
    local_text: str = ""  # folder to write train.jsonl.zst and val.jsonl.zst to, from texts on this machine

    def __post_init__(self):
        tasks = ("sources", "dataset", "verify", "local_text")
        given = [name for name in tasks if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"{' and '.join(given) or 'nothing to do'}: expected one of --{', --'.join(tasks)}")
        if given[0] in tasks[:2] and not self.out_dir:
            raise ValueError("out_dir='': say where the shards shall go, as in --out_dir=data/dclm")
        for name, low in (("length", 1), ("max_tokens", 0), ("shard_tokens", 1), ("processes", 0)):
            if getattr(self, name) < low:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least {low}")


class Tokenizer:
    """A tiktoken encoding, and what a corpus and a model need to know of it: vocab_size; eos, the id that ends a
    document; token_bytes, one per id, b"" for special and unused ids; identity: name, size, and sha256 of all that
    decides what it computes."""

    def __init__(self, encoding: tiktoken.Encoding, eos: str):
        self.encoding, self.name, self.vocab_size = encoding, encoding.name, encoding.n_vocab
        self.eos, self.im_end = encoding._special_tokens[eos], encoding._special_tokens.get("<|im_end|>")
        self.token_bytes = [b""] * self.vocab_size
        for token, rank in encoding._mergeable_ranks.items():
            self.token_bytes[rank] = token
        computes = [encoding._pat_str, encoding._special_tokens, [token.hex() for token in self.token_bytes]]
        sha256 = hashlib.sha256(json.dumps(computes, sort_keys=True).encode()).hexdigest()
        self.identity = {"name": self.name, "size": self.vocab_size, "sha256": sha256}

    def encode(self, text: str) -> NDArray[np.uint32]:
        """Token ids (N,). A special token's spelling is ordinary text; half a surrogate pair becomes U+FFFD."""
        pieces = PIECES.findall(text) if len(text) > PIECE else [text]
        try:
            return np.concatenate([self.encoding.encode_to_numpy(p, disallowed_special=()) for p in pieces])
        except UnicodeEncodeError:
            return self.encode(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Token ids (N,) of a chat, and which of them the assistant says, the end of its turn included. Turns are
        paragraphs, the assistant's end with eos; ChatML where the vocabulary has it (Qwen3)."""
        ids, said = [np.empty(0, np.int64)], []
        for message in messages:
            role, text = message["role"], message["content"]
            own = role == "assistant"
            if self.im_end is None:
                before, turn = [], [*self.encode(text), self.eos] if own else self.encode(f"{text}\n\n")
            else:
                before = [self.encoding.encode_single_token("<|im_start|>"), *self.encode(f"{role}\n")]
                turn = [*self.encode(text), self.im_end]
            after = [] if self.im_end is None else self.encode("\n")
            ids += [before, turn, after]
            said += [False] * len(before) + [own] * len(turn) + [False] * len(after)
        return np.concatenate(ids).astype(np.int64), np.array(said, bool)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of tokens, special ones as they are spelled. KeyError for an id that is none."""
        return self.encoding.decode_bytes([int(i) for i in ids])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens, U+FFFD where their bytes are no UTF-8."""
        return self.decode_bytes(ids).decode("utf-8", "replace")


def pad_chats(chats: Sequence[tuple[NDArray, NDArray]], ignore: int = -100) -> tuple[NDArray, NDArray]:
    """Tokens and targets (N, T) int64 of N chats as Tokenizer.chat gives them, right-padded; `ignore` is the target of
    what the assistant does not say."""
    tokens = np.zeros((len(chats), max(len(ids) for ids, _ in chats)), np.int64)
    targets = np.full_like(tokens, ignore)
    for i, (ids, said) in enumerate(chats):
        tokens[i, : len(ids)] = ids
        targets[i, : len(ids)] = np.where(said, ids, ignore)
    return tokens[:, :-1], targets[:, 1:]


@lru_cache
def load_tokenizer(name: str) -> Tokenizer:
    """`llama3` (of the installed llama-models), `bytes`, a tiktoken encoding, or a path of Llama-3's tokenizer.model.
    ValueError, FileNotFoundError, or RuntimeError if tiktoken cannot fetch its file."""
    if name == "bytes":
        ranks, specials = {bytes([i]): i for i in range(256)}, {"<|endoftext|>": 256}
        encoding = tiktoken.Encoding(name, pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens=specials)
        return Tokenizer(encoding, "<|endoftext|>")
    if name in tiktoken.list_encoding_names():
        with _naming(f"tokenizer={name!r} (tiktoken fetches it once; TIKTOKEN_CACHE_DIR may hold a copy)"):
            return Tokenizer(tiktoken.get_encoding(name), "<|endoftext|>")
    path = Path(name)
    if path.is_dir():
        return _from_tokenizer_json(path / "tokenizer.json")
    if name == "llama3":
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            files = importlib.metadata.files("llama-models") or ()
            path = next((Path(f.locate()) for f in files if f.parts[-2:] == ("llama3", "tokenizer.model")), path)
    if not path.is_file():
        hint = f"Llama-3's tokenizer.model, bytes, or one of {', '.join(tiktoken.list_encoding_names())}"
        brings = "`pip install --no-deps llama-models` brings its file"
        raise FileNotFoundError(f"tokenizer={name!r}: expected llama3 ({brings}), a path of {hint}")
    try:
        lines = [line.split() for line in path.read_bytes().splitlines()]
        ranks = {binascii.a2b_base64(token): int(rank) for token, rank in lines}
    except ValueError as error:
        raise ValueError(f"{path}: expected lines of base64 and rank, as in Llama-3's tokenizer.model") from error
    if sorted(ranks.values()) != list(range(128_000)):
        raise ValueError(f"{path}: {len(ranks):,} ranks, expected Llama-3's, which are 0 to 127,999")
    specials = {f"<|{special}|>": 128_000 + i for i, special in enumerate(LLAMA3_SPECIALS)}
    encoding = tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=specials)
    return Tokenizer(encoding, "<|end_of_text|>")


def _from_tokenizer_json(path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, byte-level BPE as Qwen3 has it, but without Unicode normalisation."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; it is what a folder's tokenizer is read from")
    with _naming(path):
        facts = json.loads(path.read_bytes())
        plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that GPT-2 writes as they are
        letters = {chr(byte): byte for byte in plain}
        letters |= {chr(256 + i): byte for i, byte in enumerate(b for b in range(256) if b not in plain)}
        specials = {token["content"]: token["id"] for token in facts["added_tokens"]}
        vocab = {t: i for t, i in facts["model"]["vocab"].items() if t not in specials}
        ranks = {bytes(letters[letter] for letter in token): i for token, i in vocab.items()}
        merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in facts["model"]["merges"]]
        merged = [vocab["".join(pair)] for pair in merges]
        if merged != sorted(merged):
            raise ValueError("merges are not in the order of their ids, which tiktoken merges by")
        splits = facts["pre_tokenizer"].get("pretokenizers", [facts["pre_tokenizer"]])
        pattern = next(split["pattern"]["Regex"] for split in splits if split["type"] == "Split")
        encoding = tiktoken.Encoding(path.parent.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
        return Tokenizer(encoding, "<|endoftext|>")


@contextlib.contextmanager
def _naming(what: str | Path) -> Iterator[None]:
    """Says what it was that failed in other people's code: tiktoken, pyarrow, datasets, the network."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{what}: {type(error).__name__}: {error}") from error


def _mix(x: int | NDArray) -> NDArray[np.uint64]:
    """64 random bits for each integer: a step of SplitMix64."""
    x = np.atleast_1d(x).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: NDArray[np.int64], n: int, key: int | NDArray) -> NDArray[np.int64]:
    """Where a random permutation of range(n) takes each index (N,); one permutation a key, which is one or (N,).

    Computed, not stored: a Feistel network on two digits of a base above sqrt(n); what it takes out of range(n) goes
    through it again (Black and Rogaway, 2002). ValueError for an index outside.
    """
    index, base = np.atleast_1d(index).astype(np.int64), np.uint64(np.sqrt(n)) + np.uint64(1)
    if index.size and not 0 <= index.min() <= index.max() < n:
        raise ValueError(f"index from {index.min()} to {index.max()}: expected 0 <= index < n={n}")
    out, key = index.astype(np.uint64), np.broadcast_to(_mix(key), index.shape)
    todo = np.arange(index.size)
    while todo.size:
        high, low = np.divmod(out[todo], base)
        for i in range(8):
            high, low = low, (high + _mix(low + _mix(key[todo] + np.uint64(i)))) % base
        out[todo] = high * base + low
        todo = todo[out[todo] >= n]
    return out.astype(np.int64)


def _map(path: str) -> tuple[list[bytes], mmap.mmap]:
    """A shard's header - number and count, the corpus' facts, the shard's - and all its bytes."""
    with open(path, "rb", 0) as file:
        magic, crc, text = (file.read(HEADER).split(b"\0", 1)[0].split(b"\t", 2) + [b"", b""])[:3]
        if magic != MAGIC or crc != b"%08x" % zlib.crc32(text):
            raise RuntimeError(f"{path}: header damaged, or none of {MAGIC.decode()}: {AGAIN}")
        return text.split(b"\t"), mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class Corpus:
    """A folder of shards: sequences, numbered from 0.

    rows, their number; length, the tokens that a model sees; tokenizer, its identity; digest, of all shards; complete,
    False if the build was stopped. FileNotFoundError if there are no shards, ValueError if they are of another
    tokenizer, RuntimeError for damage: names and two headers are checked at once, the sizes of all shards before the
    second read (10 ms for 2,000, which would hold up the first), all else when it is read.
    """

    def __init__(self, folder: str | Path, tokenizer_identity: dict | None = None):
        self.folder = Path(folder)
        names = os.listdir(folder) if self.folder.is_dir() else ()
        shards = sorted(name for name in names if name.endswith(".bin"))
        if not shards:
            raise FileNotFoundError(f"no shards (000000.bin) in {folder}: build some, see python data_dclm.py --help")
        for i, name in enumerate(shards):
            if name != f"{i:06d}.bin":
                raise RuntimeError(f"{folder}/{i:06d}.bin is missing, the next is {name}: {AGAIN}")
        self._facts = _map(f"{folder}/{shards[0]}")[0][1]
        self.facts = json.loads(self._facts)
        self.length, self.tokenizer, self.dtype = (self.facts[k] for k in ("length", "tokenizer", "dtype"))
        if tokenizer_identity not in (None, self.tokenizer):
            difference = "; ".join(configurator.diff(self.tokenizer, tokenizer_identity))
            raise ValueError(f"{folder} was built with another tokenizer: {difference}")
        self.row_bytes = (self.length + 1) * np.dtype(self.dtype).itemsize + 4
        self.starts = np.fromfile(self.folder / "starts", "<i8") if "starts" in names else np.empty(0)
        if len(self.starts) != len(shards) + 1:  # none, or of other shards
            sizes = [os.path.getsize(f"{folder}/{name}") for name in shards]
            self.starts = np.cumsum([0] + [(size - HEADER) // self.row_bytes for size in sizes])
            self.check_sizes(sizes)
        self.rows = int(self.starts[-1])
        self.maps: dict[int, tuple[NDArray, NDArray]] = {}
        self.reads = 0
        self.last = json.loads(self.open(len(shards) - 1))
        self.digest, self.complete = self.last["digest"], self.last["complete"]
        if not self.rows:
            raise RuntimeError(f"{folder}: no sequence of {self.length} + 1 in {self.last['tokens']} tokens")

    def check_sizes(self, sizes: Sequence[int], first: int = 0) -> None:
        """Bytes of shards first, first + 1 and so on."""
        for i, size in enumerate(sizes, first):
            wanted = HEADER + int(self.starts[i + 1] - self.starts[i]) * self.row_bytes
            if size != wanted:
                path = f"{self.folder}/{i:06d}.bin"
                raise RuntimeError(f"{path} is cut short or too long, {size:,} bytes and not {wanted:,}: {AGAIN}")

    def open(self, i: int) -> bytes:
        """Maps shard i, and returns what its header says of it: JSON."""
        path, count = f"{self.folder}/{i:06d}.bin", int(self.starts[i + 1] - self.starts[i])
        (numbers, facts, shard), data = _map(path)
        if (numbers, facts) != (b"%d %d" % (i, count), self._facts):
            found = json.loads(facts) | {"number and count": numbers.decode()}
            difference = configurator.diff(found, self.facts | {"number and count": f"{i} {count}"})
            raise RuntimeError(f"{path} does not belong here: {'; '.join(difference)}: {AGAIN}")
        self.check_sizes([len(data)], i)
        while len(self.maps) >= OPEN_SHARDS:
            del self.maps[next(iter(self.maps))]
        rows = np.frombuffer(data, self.dtype, count * (self.length + 1), HEADER).reshape(count, self.length + 1)
        self.maps[i] = rows, np.frombuffer(data, "<u4", count, HEADER + rows.nbytes)
        return shard

    def order(self, index: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
        """The sequence at each place (N,), from 0, of an endless order: all, shuffled, then all, shuffled anew."""
        epoch, place = np.divmod(np.asarray(index, np.int64), self.rows)
        return permute(place, self.rows, _mix(seed) + epoch.astype(np.uint64))

    def read(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sequences (N, length + 1): inputs [:, :-1], targets [:, 1:]. RuntimeError for one that is damaged."""
        rows = np.asarray(rows, np.int64)
        if rows.size and not 0 <= rows.min() <= rows.max() < self.rows:
            raise ValueError(f"rows from {rows.min()} to {rows.max()}: {self.folder} has {self.rows}, from 0")
        self.reads += 1
        if self.reads == 2:
            self.check_sizes([os.path.getsize(f"{self.folder}/{i:06d}.bin") for i in range(len(self.starts) - 1)])
        out = np.empty((len(rows), self.length + 1), np.int64)
        shards = np.searchsorted(self.starts, rows, "right") - 1
        for k, (i, row) in enumerate(zip(shards.tolist(), (rows - self.starts[shards]).tolist(), strict=True)):
            if i not in self.maps:
                self.open(i)
            tokens, checks = self.maps[i]
            if zlib.crc32(tokens[row]) != checks[row]:
                raise RuntimeError(f"{self.folder}/{i:06d}.bin, row {row}: damaged (crc32): {AGAIN}")
            out[k] = tokens[row]
        return out


def _digest(before: str, facts: dict, checks: NDArray) -> str:
    return hashlib.sha256(f"{before}{json.dumps(facts)}".encode() + checks.tobytes()).hexdigest()


def verify(folder: str | Path) -> Corpus:
    """Reads every row, and checks that the shards follow each other. Errors as Corpus."""
    corpus, digest = Corpus(folder), ""
    for i in tqdm(range(len(corpus.starts) - 1), unit="shard"):
        shard = json.loads(corpus.open(i))
        for row in range(corpus.starts[i], corpus.starts[i + 1]):
            corpus.read([row])
        digest = _digest(digest, corpus.facts, corpus.maps[i][1])
        if digest != shard["digest"]:
            raise RuntimeError(f"{folder}/{i:06d}.bin does not follow the shard before it (digest): {AGAIN}")
    return corpus


class Block(NamedTuple):
    name: str  # for messages: the file, and what a document is called there
    first: int  # number of the first one
    documents: list[bytes | str]  # lines of JSON, or texts
    after: dict  # where a reader goes on behind this block


def find_files(sources: Iterable[str]) -> list[tuple[Path, str]]:
    """Files, in order and each once, with their names below their source. FileNotFoundError for a source without any,
    RuntimeError for an empty file."""
    files = {}
    for source in sources:
        root = Path(source)
        paths = root.rglob("*") if root.is_dir() else map(Path, glob.glob(source, recursive=True) or [root])
        paths = sorted(path for path in paths if path.is_file() and path.name.endswith(KINDS))
        if not paths:
            raise FileNotFoundError(f"{source}: expected a file, or a folder or glob of {', '.join(KINDS)}")
        if empty := [path for path in paths if not path.stat().st_size]:
            raise RuntimeError(f"{empty[0]} is empty: fetch it again, or leave it out")
        files |= {path: str(path.relative_to(root)) if root.is_dir() else path.name for path in paths}
    return list(files.items())


def _documents(path: Path, text_field: str) -> Iterator[bytes | str]:
    """Lines of JSON, or texts."""
    import pyarrow.parquet

    if path.suffix == ".parquet":
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            for batch in file.iter_batches(256, columns=[text_field]):
                yield from batch.column(text_field).to_pylist()
        return
    with io.BufferedReader(pyarrow.input_stream(path), BLOCK) as file:  # knows .gz, .zst, and what is cut short
        if path.suffix == ".txt":
            yield file.read(MAX_DOCUMENT).decode()
        else:
            yield from iter(partial(file.readline, MAX_DOCUMENT), b"")


def _take(documents: Iterator[bytes | str]) -> list[bytes | str]:
    """The next documents, a block of them; [] at the end."""
    taken, size = [], 0
    while size < BLOCK and (more := list(islice(documents, 1))):
        taken += more
        size += len(more[0] or "")
    return taken


def read_files(files: list[tuple[Path, str]], text_field: str, after: dict) -> Iterator[Block]:
    """Blocks of local files. RuntimeError for a damaged one."""
    for i, (path, _) in list(enumerate(files))[after.get("file", 0) :]:
        unit = {".parquet": "row", ".txt": "document"}.get(path.suffix, "line")
        number = after["document"] if i == after.get("file") else 0
        with _naming(path):
            documents = islice(_documents(path, text_field), number, None)
            while block := _take(documents):
                yield Block(f"{path}, {unit}", number, block, {"file": i, "document": number + len(block)})
                number += len(block)
            if not number:
                raise ValueError("no documents: fetch it again, or leave it out")


def read_dataset(config: BuildConfig, revision: str, after: dict) -> Iterator[Block]:
    """Blocks of a dataset that `datasets` streams. RuntimeError if it cannot be read."""
    with _naming(config.dataset):
        import datasets

        where = dict(name=config.dataset_config or None, split=config.dataset_split, revision=revision or None)
        stream = datasets.load_dataset(config.dataset, streaming=True, **where).select_columns([config.text_field])
        if after:
            stream.load_state_dict(after["state"])
        texts, number = (document[config.text_field] for document in stream), after.get("document", 0)
        while block := _take(texts):
            after = {"document": number + len(block), "state": stream.state_dict()}
            yield Block(f"{config.dataset}, document", number, block, after)
            number += len(block)


def tokenise(block: Block, tokenizer: str, text_field: str, dtype: str) -> tuple[NDArray, list[int]]:
    """Tokens of a block's documents, eos behind each, and how many each document has, 0 for one without any text.
    RuntimeError names a document that is no UTF-8, no JSON, too long, or has no string in text_field."""
    encoder = load_tokenizer(tokenizer)
    tokens, sizes = [np.empty(0, dtype)], []
    for number, text in enumerate(block.documents, block.first + 1):
        try:
            if len(text or "") >= MAX_DOCUMENT:
                raise ValueError(f"more than {MAX_DOCUMENT:,} bytes: split it")
            if isinstance(text, bytes):
                fields = json.loads(text.decode()) if text.strip() else {text_field: ""}
                text = fields.get(text_field) if isinstance(fields, dict) else None
            if not isinstance(text, str):
                raise ValueError(f"no string in {text_field!r}; --text_field says where a document's text is")
        except ValueError as error:
            raise RuntimeError(f"{block.name} {number}: {error}") from error
        ids = encoder.encode(text) if text.strip() else []
        tokens += [ids, [encoder.eos][: len(ids)]]
        sizes.append(len(ids) + (len(ids) > 0))
    return np.concatenate(tokens, dtype=dtype, casting="unsafe"), sizes


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which then ends its workers
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()  # kill -9 leaves none behind


def in_order(function: Callable, blocks: Iterable[Block], processes: int) -> Iterator[tuple[Block, tuple]]:
    """Each block with function(block), in order, few at a time."""
    if processes == 1:
        yield from ((block, function(block)) for block in blocks)
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
        yield from ((block, future.result()) for block, future in waiting)
    finally:
        pool.shutdown(cancel_futures=True)


def pack(tokens: NDArray, ends: NDArray, length: int, packing: str, most: int) -> tuple[list[NDArray], int]:
    """At most `most` sequences (length + 1,) of tokens (T,) from documents that end at `ends`; where the rest begins.

    drop      | a a a a . b b | b b .     | c c . d d d d | d     each starts with a document, as in the paper
    continue  | a a a a . b b |                                   each starts with the last token of the one before:
                          | b b b . c c . |                       every token is predicted once
    """
    rows, at = [], 0
    while at + length < len(tokens) and len(rows) < most:
        rows.append(tokens[at : at + length + 1])
        at = at + length if packing == "continue" else int(ends[np.searchsorted(ends, at + length + 1)])
    return rows, at


def build(config: BuildConfig) -> Corpus:
    """Makes out_dir's shards, or goes on where that was stopped. ValueError if out_dir holds another build."""
    tokenizer, out = load_tokenizer(config.tokenizer), Path(config.out_dir)
    corpus = Corpus(out) if (out / "000000.bin").exists() else None
    facts = {k: getattr(config, k) for k in ("length", "packing", "text_field", "max_tokens", "shard_tokens")}
    facts |= {"tokenizer": tokenizer.identity, "dtype": "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"}
    if files := find_files(config.sources):
        names = json.dumps([[name, path.stat().st_size] for path, name in files])
        facts |= {"files": len(files), "names_and_sizes": hashlib.sha256(names.encode()).hexdigest()}
        read = partial(read_files, files, config.text_field)
    else:
        revision = config.dataset_revision or corpus and corpus.facts.get("dataset_revision")
        if not revision and not os.path.isdir(config.dataset):
            with _naming(config.dataset):
                from huggingface_hub import dataset_info

                revision = dataset_info(config.dataset).sha
        facts |= {k: getattr(config, k) for k in ("dataset", "dataset_config", "dataset_split")}
        facts["dataset_revision"] = revision
        read = partial(read_dataset, config, revision)
    facts = dict(sorted(facts.items()))  # their JSON is compared
    if corpus and (difference := configurator.diff(corpus.facts, facts)):
        lines = "\n  ".join(["choose another out_dir, or move that one away", *difference])
        raise ValueError(f"{out} holds another build: {lines}")

    said = {"number": -1, "complete": False, "digest": "", "after": {}}
    said = corpus.last if corpus else said | dict.fromkeys(("rows", "documents", "empty", "tokens", "kept"), 0)
    work = partial(tokenise, tokenizer=config.tokenizer, text_field=config.text_field, dtype=facts["dtype"])
    results = in_order(work, read(said["after"]), config.processes or os.cpu_count())
    most = -(-config.max_tokens // config.length) or 2**63
    bar = tqdm(
        total=config.max_tokens or None,
        initial=said["tokens"],
        unit="tok",
        unit_scale=True,
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 10,
    )
    with bar, contextlib.closing(results):
        while not said["complete"]:
            rest, ends, checks = np.empty(0, facts["dtype"]), np.empty(0, np.int64), []
            said |= {"number": said["number"] + 1, "complete": True}
            with configurator.atomic(out / f"{said['number']:06d}.bin") as file:
                file.seek(HEADER)
                for block, (tokens, sizes) in results:
                    ends = np.append(ends, len(rest) + np.cumsum(sizes, dtype=np.int64))
                    rest = np.append(rest, tokens)
                    rows, at = pack(rest, ends, config.length, config.packing, most - said["rows"])
                    for row in rows:
                        file.write(row.data)
                        checks.append(zlib.crc32(row))
                    rest, ends = rest[at:], ends[ends > at] - at
                    said["rows"] += len(rows)
                    said["documents"] += len(sizes) - sizes.count(0)
                    said["empty"] += sizes.count(0)
                    said["tokens"] += len(tokens)
                    said["after"] = block.after
                    bar.update(len(tokens))
                    bar.set_postfix(documents=said["documents"], refresh=False)
                    if said["rows"] == most:
                        said["tokens"] -= len(rest)  # not dropped: nobody asked for more
                        break
                    if len(checks) * config.length >= config.shard_tokens:
                        said["complete"] = False
                        break
                said["kept"] += len(checks) * (config.length + (config.packing == "drop"))
                checks = np.array(checks, "<u4")
                said["digest"] = _digest(said["digest"], facts, checks)
                file.write(checks.tobytes())
                text = "\t".join([f"{said['number']} {len(checks)}", json.dumps(facts), json.dumps(said)]).encode()
                if len(MAGIC) + 10 + len(text) > HEADER:
                    raise RuntimeError(f"no room in a header of {HEADER} bytes: {text.decode()}")
                file.seek(0)
                file.write((b"%s\t%08x\t%s" % (MAGIC, zlib.crc32(text), text)).ljust(HEADER, b"\0"))
    if corpus is None or not corpus.complete:
        corpus = Corpus(out)
        with configurator.atomic(out / "starts") as file:
            file.write(corpus.starts.astype("<i8").tobytes())
    return corpus


def write_local_text(folder: str | Path) -> None:
    """train.jsonl.zst and val.jsonl.zst with DCLM-baseline's fields, of texts that are where Python is: the standard
    library's sources without its tests, pydoc's topics, the descriptions of installed packages. A tenth of the
    documents, by a hash of their url, is for validation."""
    import pydoc_data.topics

    import zstandard

    library = Path(sysconfig.get_path("stdlib"))
    texts = {f"stdlib/{path.relative_to(library).as_posix()}": path for path in library.rglob("*.py")}
    no = re.compile("/(test|tests|idle_test|site-packages|dist-packages)/")
    texts = {url: path.read_text("utf-8", "replace") for url, path in texts.items() if not no.search(url)}
    texts |= {f"pydoc/{topic}": text for topic, text in pydoc_data.topics.topics.items()}
    texts |= {f"packages/{p.name}": p.metadata.get("Description") or "" for p in importlib.metadata.distributions()}
    unique = {text.strip(): url for url, text in sorted(texts.items(), reverse=True) if text.strip()}
    lines = {"train": [], "val": []}
    for text, url in reversed(unique.items()):
        document = {
            "bff_contained_ngram_count_before_dedupe": 0,
            "language_id_whole_page_fasttext": {"en": 1.0},
            "metadata": {"Content-Length": str(len(text.encode())), "Content-Type": "text/plain"},
            "previous_word_count": len(text.split()),
            "text": text,
            "url": url,
            "warcinfo": "",
            "fasttext_openhermes_reddit_eli5_vs_rw_v2_bigram_200k_train_prob": 0.0,
        }
        name = "val" if hashlib.sha256(url.encode()).digest()[0] < 26 else "train"
        lines[name].append(json.dumps(document).encode() + b"\n")
    for name, documents in lines.items():
        with configurator.atomic(Path(folder) / f"{name}.jsonl.zst") as file:
            file.write(zstandard.compress(b"".join(documents)))


def main() -> None:
    def stop(number: int, frame) -> None:
        raise SystemExit(128 + number)

    config = configurator.configure(BuildConfig, doc=__doc__)
    signal.signal(signal.SIGTERM, stop)
    if config.local_text:
        return write_local_text(config.local_text)
    corpus = verify(config.verify) if config.verify else build(config)
    said = corpus.last
    print(
        f"{corpus.folder}: {corpus.rows:,} sequences of {corpus.length:,} tokens from {said['documents']:,} documents "
        f"({said['empty']:,} more were empty) of {said['tokens']:,} tokens, {1 - said['kept'] / said['tokens']:.1%} "
        f"of them dropped; digest {corpus.digest[:16]}"
    )


if __name__ == "__main__":
    configurator.run_cli(main)
