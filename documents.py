"""Documents, in blocks: from local files or a dataset. data_dclm.py makes shards of them.

A reader can go on behind any block: `after` is what a block says of that, and {} at the start. Needs pyarrow for local
files, datasets and zstandard for datasets; `need` asks for them before any work.
"""

import contextlib
import glob
import importlib.util
import io
import json
import os
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

KINDS = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet", ".txt")
MAX_DOCUMENT = 2**26  # bytes: memory is bounded only if a document is


class Block(NamedTuple):
    name: str  # for messages: the file, and what a document is called there
    first: int  # documents before it
    documents: list[bytes | str]  # lines of JSON, or texts
    after: dict  # where a reader goes on behind it


def need(*packages: str) -> None:
    """RuntimeError for packages that are not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(f"{' and '.join(missing)} not installed: pip install {' '.join(missing)}")


@contextlib.contextmanager
def _naming(what: str | Path) -> Iterator[None]:
    """Says what it was that failed in other people's code: pyarrow, datasets, the network."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{what}: {type(error).__name__}: {error}") from error


def text_of(document: bytes | str | None, text_field: str) -> str:
    """A document's text. ValueError for one that is too long, no UTF-8, no JSON, or has no string in text_field."""
    if len(document or "") >= MAX_DOCUMENT:
        raise ValueError(f"{MAX_DOCUMENT:,} bytes or more: split it")
    if isinstance(document, bytes):
        line = document.decode()
        if not line.strip():
            return ""
        fields = json.loads(line)
        document = fields.get(text_field) if isinstance(fields, dict) else None
    if not isinstance(document, str):
        raise ValueError(f"no string in {text_field!r}; --text_field says where a document's text is")
    return document


def _take(documents: Iterator[bytes | str], block_bytes: int) -> list[bytes | str]:
    """The next documents, a block of them; [] at the end."""
    taken, size = [], 0
    for document in documents:
        taken.append(document)
        size += len(document or "")
        if size >= block_bytes:
            break
    return taken


def find_files(sources: Iterable[str]) -> dict[Path, str]:
    """Files, in order and each once, with their names below their source. FileNotFoundError for a source without any,
    RuntimeError for an empty file."""
    files = {}
    for source in sources:
        root = Path(source)
        if root.is_dir():
            found = root.rglob("*")
        else:
            found = map(Path, glob.glob(source, recursive=True) or [source])
        paths = sorted(path for path in found if path.is_file() and path.name.endswith(KINDS))
        if not paths:
            raise FileNotFoundError(f"{source}: expected a file, or a folder or glob of {', '.join(KINDS)}")
        for path in paths:
            if path.stat().st_size == 0:
                raise RuntimeError(f"{path} is empty: fetch it again, or leave it out")
            files[path] = str(path.relative_to(root)) if root.is_dir() else path.name
    return files


def _read_file(path: Path, text_field: str) -> Iterator[bytes | str]:
    """Lines of JSON, or texts."""
    import pyarrow.parquet

    if path.suffix == ".parquet":
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            for batch in file.iter_batches(256, columns=[text_field]):
                yield from batch.column(text_field).to_pylist()
        return
    with io.BufferedReader(pyarrow.input_stream(path), 2**20) as file:  # knows .gz, .zst, and what is cut short
        if path.suffix != ".txt":
            yield from iter(partial(file.readline, MAX_DOCUMENT), b"")
            return
        data = file.read(MAX_DOCUMENT)
        if len(data) == MAX_DOCUMENT:  # before it is decoded: the cut may be inside a character
            raise ValueError(f"{MAX_DOCUMENT:,} bytes or more: split it")
        yield data.decode()


def read_files(files: Iterable[Path], text_field: str, block_bytes: int, after: dict) -> Iterator[Block]:
    """Blocks of local files. RuntimeError for a damaged one."""
    for i, path in enumerate(files):
        if i < after.get("file", 0):
            continue
        unit = {".parquet": "row", ".txt": "document"}.get(path.suffix, "line")
        number = after["document"] if i == after.get("file") else 0
        with _naming(path):
            documents = islice(_read_file(path, text_field), number, None)
            while taken := _take(documents, block_bytes):
                yield Block(f"{path}, {unit}", number, taken, {"file": i, "document": number + len(taken)})
                number += len(taken)
            if not number:
                raise ValueError("no documents: fetch it again, or leave it out")


def newest_revision(dataset: str) -> str:
    """The newest commit of a dataset on the Hugging Face hub, "" for a local folder. RuntimeError without a hub."""
    if os.path.isdir(dataset):
        return ""
    with _naming(f"{dataset}: neither a folder nor found on the hub"):
        from huggingface_hub import dataset_info

        return dataset_info(dataset).sha


def read_dataset(
    dataset: str, config: str, split: str, revision: str, text_field: str, block_bytes: int, after: dict
) -> Iterator[Block]:
    """Blocks of a dataset that the library datasets streams. RuntimeError if it cannot be read."""
    with _naming(dataset):
        import datasets

        where = dict(name=config or None, split=split, revision=revision or None)
        stream = datasets.load_dataset(dataset, streaming=True, **where).select_columns([text_field])
        if after:
            stream.load_state_dict(after["state"])
        texts = (fields[text_field] for fields in stream)
        number = after.get("document", 0)
        while taken := _take(texts, block_bytes):
            after = {"document": number + len(taken), "state": stream.state_dict()}
            yield Block(f"{dataset}, document", number, taken, after)
            number += len(taken)
