"""The rooms of the house: which file imports which, and which work alone in an empty folder."""

import ast
import importlib
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
    "passages": "",
    "data_text": "data_copy passages configurator",  # the last as a script alone
    "tokenizer": "",
    "documents": "",
    "data_dclm": "configurator data_copy tokenizer documents",
    "checkpoint": "configurator model",
    "sample": "configurator rope2d model tokenizer checkpoint",
    "hf": "configurator rope2d model tokenizer checkpoint sample",
    "tasks": "rope2d model data_copy data_text tokenizer data_dclm",
    "train": "configurator rope2d model data_copy data_text hf checkpoint tasks",
    "eval": "configurator plots rope2d model data_copy passages data_text tokenizer data_dclm checkpoint sample hf",
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
    assert all(imports(path) <= {*ROOMS, "scripts"} for path in ROOT.glob("scripts/*.py"))


def use_alone(folder: Path, name: str) -> None:
    for ours in OURS:
        sys.modules.pop(ours, None)
    os.chdir(folder)
    sys.path[:] = [str(folder), *(path for path in sys.path if Path(path).resolve() not in (ROOT, ROOT / "tests"))]
    assert importlib.import_module(name).__file__ == str(folder / f"{name}.py")
    assert {f"{ours}.py" for ours in OURS & sys.modules.keys()} <= set(os.listdir(folder))


@pytest.mark.parametrize(
    "names",
    [
        "configurator",
        "kernels",
        "data_copy",
        "data_text data_copy passages",
        "rope2d",
        "rope2d kernels",
        "model rope2d",
    ],
)
def test_it_works_alone_in_an_empty_folder(tmp_path, names):
    for name in names.split():
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    assert in_child(use_alone, tmp_path, names.split()[0]) == 0
