"""A run's directory: checkpoints that survive a kill, logs that are cut back to where a run goes on.

save(payload, "out/run/last.pt")                      # a kill leaves the old file or the new one, whole
model = load_model(read("out/run/last.pt"))           # weights_only, checksums compared
"""

import json
import zipfile
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

import torch

import configurator
from model import Decoder, ModelConfig


def save(payload: dict, path: str | Path) -> None:
    """Writes a checkpoint. Raises as configurator.atomic."""
    with configurator.atomic(path) as file:
        try:
            torch.save(payload, file)
        except RuntimeError as error:  # torch's own for a full disk names neither disk nor file
            raise OSError(str(error).splitlines()[0]) from error


def read(path: str | Path) -> dict:
    """The dict that train.py saved, on the CPU. FileNotFoundError, or RuntimeError for a file that is damaged or not
    ours."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such checkpoint")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load looks neither at checksums nor for what it calls folders
            flagged = [record.filename for record in archive.infolist() if record.external_attr]
            if bad := archive.testzip() or flagged:
                raise zipfile.BadZipFile(f"damaged record {bad}")
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file fails in a dozen ways
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RuntimeError(f"{path}: damaged, or not a checkpoint ({reason})") from error
    if not isinstance(checkpoint, dict) or not {"model", "config"} <= checkpoint.keys():
        raise RuntimeError(f"{path}: not a checkpoint of train.py: no 'model' and 'config' in it")
    return checkpoint


def load_model(checkpoint: dict, device: str | torch.device = "cpu", **changes) -> Decoder:
    """The model in a checkpoint; `changes` replace values of its config. What is rotated by, and how fast, may be
    changed. ValueError for changes that other weights would be needed for."""
    names = {field.name for field in fields(ModelConfig)}
    values = {name: value for name, value in checkpoint["config"].items() if name in names}
    weights = checkpoint["model"]
    model = Decoder(ModelConfig(**values | changes), weights["newlines"])
    if changes:
        own = model.state_dict()
        weights = {name: p for name, p in weights.items() if "rotary." not in name}
        weights |= {name: p for name, p in own.items() if "rotary." in name}  # frequencies are the new config's
        shapes = [{name: tuple(p.shape) for name, p in side.items()} for side in (weights, own)]
        if lines := configurator.diff(*shapes):
            raise ValueError(f"{changes}: the checkpoint's weights do not fit: {'; '.join(lines[:3])}")
    model.load_state_dict(weights)
    return model.to(device)


def find_run(out: Path, init: str, config: Mapping[str, Any], data: Mapping[str, Any]) -> dict | None:
    """The checkpoint to go on from, or None to start. ValueError if `out` holds a run of another config or on other
    data. init: `auto`, `scratch` (there must be none) or `resume` (there must be one)."""
    path = out / "last.pt"
    if not path.exists():
        if init == "resume":
            raise FileNotFoundError(f"init='resume', but {path} does not exist")
        return None
    if init == "scratch":
        raise ValueError(f"init='scratch', but {path} exists: choose another out_dir, or move that run away")
    checkpoint = read(path)
    theirs = {name: checkpoint["config"].get(name, "absent") for name in config} | checkpoint.get("data", {})
    if lines := configurator.diff(theirs, {**config, **data}):
        differences = "\n  ".join(lines)
        raise ValueError(f"{out} holds another run: choose another out_dir, or move that one away\n  {differences}")
    return checkpoint


def open_log(path: Path, step: int) -> TextIO:
    """A log for appending, cut back to the steps before `step`: the others will be computed again."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < step]
    with configurator.atomic(path) as file:
        file.write("".join(kept).encode())
    return open(path, "a")


def last_validated(out: Path) -> int:
    """The step of the last validation that a run's directory knows of, -1 for none."""
    path = out / "validation.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=-1)
