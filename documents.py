"""Documents, in blocks: local files, or a dataset of the Hugging Face hub. data_dclm.py makes shards of them.

The library datasets reads both, with zstandard for .zst; `need` asks for them before any work. A reader can go on
after any block: `after` is what a block says of that, and {} at the start.
"""

import glob
import importlib.util
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

KINDS = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".parquet", ".txt")


class Block(NamedTuple):
    texts: list[str]  # one a document
    after: dict  # where a reader goes on


def need(*packages: str) -> None:
    """RuntimeError for packages that are not installed."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(f"{' and '.join(missing)} not installed: pip install {' '.join(missing)}")


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


def newest_revision(dataset: str) -> str:
    """The newest commit of a dataset on the Hugging Face hub, "" for a local folder. RuntimeError without a hub."""
    if os.path.isdir(dataset):
        return ""
    try:
        from huggingface_hub import dataset_info

        return dataset_info(dataset).sha
    except Exception as error:  # of the library or the network
        raise RuntimeError(f"{dataset}: neither a folder nor found on the hub: {error!r}") from error


def read_dataset(title: str, where: dict[str, Any], text_field: str, block_bytes: int, after: dict) -> Iterator[Block]:
    """Blocks of what datasets.load_dataset(**where) reads. RuntimeError, with `title`, if it cannot be used."""
    number, texts, size = after.get("document", 0), [], 0
    try:
        import datasets

        stream = datasets.load_dataset(**where, streaming=True).select_columns([text_field])
        if after:
            stream.load_state_dict(after["state"])
        for fields in stream:
            number += 1
            text = fields[text_field]
            if not isinstance(text, str):
                hint = "--text_field says where a document's text is"
                raise ValueError(f"document {number} has no string in {text_field!r}; {hint}")
            texts.append(text)
            size += len(text)
            if size >= block_bytes:
                yield Block(texts, {"document": number, "state": stream.state_dict()})
                texts, size = [], 0
        if texts:
            yield Block(texts, {"document": number, "state": stream.state_dict()})
    except Exception as error:  # of many kinds: a damaged file, a dataset of another form, the network
        raise RuntimeError(f"{title}: damaged, empty or of another form: {error!r}") from error


def read_files(files: Iterable[Path], text_field: str, block_bytes: int, after: dict) -> Iterator[Block]:
    """Blocks of local files. RuntimeError as read_dataset."""
    for i, path in enumerate(files):
        if i < after.get("file", 0):
            continue
        within = after if i == after.get("file") else {}
        where = {"path": "json", "split": "train", "data_files": glob.escape(str(path))}
        field = text_field
        if path.suffix == ".parquet":
            where["path"] = "parquet"
        elif path.suffix == ".txt":
            where |= {"path": "text", "sample_by": "document"}
            field = "text"
        for block in read_dataset(str(path), where, field, block_bytes, within):
            yield block._replace(after={"file": i, **block.after})
