"""Text to pretrain a toy on, from any machine that has Python.

python -m scripts.local_text --out_dir=data/text
python data_dclm.py --sources=data/text/train.jsonl.zst --tokenizer=bytes --out_dir=data/toy
"""

import importlib.metadata
import json
import pydoc_data.topics
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import configurator
from documents import need
from passages import stream_of


@dataclass
class LocalTextConfig:
    """Local text"""

    out_dir: str = "data/text"  # train.jsonl.zst and val.jsonl.zst go here


def write_local_text(folder: str | Path) -> None:
    """train.jsonl.zst and val.jsonl.zst with DCLM-baseline's fields, of texts that are where Python is: the standard
    library's sources without its tests, pydoc's topics, the descriptions of installed packages. A tenth of the
    documents, by a hash of their url, is for validation."""
    need("zstandard")
    import zstandard

    library = Path(sysconfig.get_path("stdlib"))
    tests = re.compile("/(test|tests|idle_test|site-packages|dist-packages)/")
    texts = {}
    for path in library.rglob("*.py"):
        url = f"stdlib/{path.relative_to(library).as_posix()}"
        if not tests.search(url):
            texts[url] = path.read_text("utf-8", "replace")
    for topic, text in pydoc_data.topics.topics.items():
        texts[f"pydoc/{topic}"] = text
    for package in importlib.metadata.distributions():
        texts[f"packages/{package.name}"] = package.metadata.get("Description") or ""
    unique = {text.strip(): url for url, text in sorted(texts.items(), reverse=True) if text.strip()}
    lines = {"train": [], "val": []}
    for text, url in reversed(unique.items()):
        document = {"text": text, "url": url}
        name = "val" if stream_of(url) == "evaluation" else "train"
        lines[name].append(json.dumps(document).encode() + b"\n")
    for name, documents in lines.items():
        with configurator.atomic(Path(folder) / f"{name}.jsonl.zst") as file:
            file.write(zstandard.compress(b"".join(documents)))


if __name__ == "__main__":
    configurator.run_cli(lambda: write_local_text(configurator.configure(LocalTextConfig, doc=__doc__).out_dir))
