"""The rooms of the house: which file imports which, and which work alone in an empty folder."""

import ast
import os
import shutil
import sys
from pathlib import Path

import pytest
from conftest import ROOT, in_child

ROOMS = {  # each file, and what it imports of ours: only what stands above it
    "configurator": "",
    "kernels": "",
    "plots": "",
    "rope2d": "kernels",
    "modeling_nano2d": "rope2d",
    "model": "rope2d",
    "data_copy": "",
    "data_text": "data_copy configurator",  # the second as a script alone
    "tokenizer": "",
    "documents": "configurator",
    "data_dclm": "configurator data_copy tokenizer documents",
    "hf": "configurator rope2d model tokenizer",
    "checkpoint": "configurator model hf",
    "sample": "configurator rope2d model tokenizer checkpoint",
    "train": "configurator rope2d model data_copy data_text tokenizer data_dclm hf checkpoint",
    "eval": "configurator plots rope2d model data_copy data_text tokenizer data_dclm hf checkpoint sample",
}
OURS = {*ROOMS, "scripts", "tests", "conftest"}


def imports(path: Path) -> set[str]:
    """Modules of ours that a file imports, at the top or within a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return {name.split(".")[0] for name in found} & OURS


def test_each_file_imports_what_its_room_allows_and_only_rooms_above():
    assert {path.stem for path in ROOT.glob("*.py")} == ROOMS.keys()
    rooms = list(ROOMS)
    for i, (name, allowed) in enumerate(ROOMS.items()):
        assert set(allowed.split()) <= set(rooms[:i]), name
        assert imports(ROOT / f"{name}.py") <= set(allowed.split()), name
    for path in ROOT.glob("scripts/*.py"):
        assert imports(path) <= {*ROOMS, "scripts"}, path


ALONE = {
    "configurator.py": "assert callable(configurator.configure)",
    "kernels.py": "assert kernels.rotate_qk and kernels.affine_scan",
    "data_copy.py": "assert len(data_copy.copy_batch(data_copy.CopyConfig(), 4, 0, 0, pieces=2)) == 2",
    "data_text.py data_copy.py": "data_text.text_example(data_text.TextCopyConfig(), 0, 0)",
    "rope2d.py": "assert rope2d.Rotary('2d-rope', 8)(torch.zeros(3, 1, 5))[0].shape == (1, 5, 4)",
    "model.py rope2d.py": "config = model.ModelConfig(vocab_size=5, n_embd=8)\n"
    "assert model.Decoder(config, torch.zeros(5))(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 5)",
}


def use_alone(folder: Path, code: str) -> None:
    for name in OURS:
        sys.modules.pop(name, None)
    os.chdir(folder)
    sys.path[:] = [str(folder), *(path for path in sys.path if Path(path).resolve() not in (ROOT, ROOT / "tests"))]
    exec(code)
    assert {f"{name}.py" for name in OURS & sys.modules.keys()} <= set(os.listdir(folder))


@pytest.mark.parametrize("files", ALONE)
def test_it_works_alone_in_an_empty_folder(tmp_path, files):
    for file in files.split():
        shutil.copy(ROOT / file, tmp_path)
    name = files.split(".")[0]
    assert in_child(use_alone, tmp_path, f"import torch, {name}\n{ALONE[files]}") == 0
