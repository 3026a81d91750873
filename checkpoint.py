"""A run: its device and ranks, its checkpoints, which survive a kill, and its logs.

save(payload, "out/run/last.pt")               # a kill leaves the old file or the new one, whole
model, trained = load_run("out/run")           # the model in evaluation mode, and the config it was trained with
"""

import json
import os
import platform
import signal
import sys
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

import configurator
from model import Decoder, ModelConfig

T = TypeVar("T")


def check_seeds(**seeds: int) -> None:
    """ValueError for a seed that some generator would not take."""
    for name, seed in seeds.items():
        if not 0 <= seed < 2**63:
            raise ValueError(f"{name}={seed}: expected 0 to 2^63 - 1")


def pick_device(name: str) -> torch.device:
    """`auto` is cuda, mps or cpu, the first that is there. Of several GPUs it is torchrun's for this process, which
    becomes the current one. ValueError for a device that is not there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, is_there in there.items() if is_there)
    if not there[name]:
        raise ValueError(f"device={name!r}: not on this machine; it has {', '.join(k for k in there if there[k])}")
    if name != "cuda":
        return torch.device(name)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)  # where nccl and triton work
    return device


# Dense bfloat16 FLOP/s of GPUs, by what torch.cuda.get_device_name says; NVIDIA's data sheets.
PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}


def peak_flops(device: torch.device) -> float | None:
    """Of a GPU that is known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((peak for gpu, peak in PEAK_FLOPS.items() if gpu in name), None)


def to_device(device: torch.device, *arrays: NDArray) -> list[Tensor]:
    """Arrays as tensors on a device. To a GPU they go from pinned memory, so that the host need not wait."""
    tensors = [torch.from_numpy(array) for array in arrays]
    if device.type == "cuda":
        return [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
    return [tensor.to(device) for tensor in tensors]


def autocast(device: torch.device, dtype: str) -> torch.autocast:
    """Matrix products in `dtype`, bfloat16 or float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bfloat16")


def progress(total: int | None, unit: str, **how: Any) -> tqdm:
    """A progress bar on rank 0; in a file, where each update is a line, one every ten seconds."""
    seconds = 0.2 if sys.stderr.isatty() else 10
    hidden = rank_and_world()[0] != 0
    return tqdm(total=total, unit=unit, disable=hidden, dynamic_ncols=True, mininterval=seconds, **how)


# Ranks. Without torchrun there is one, and nothing is sent.


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(value: T) -> list[T]:
    """The value of each rank, in order; for small Python objects."""
    values = [value] * rank_and_world()[1]
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def on_all_ranks(make: Callable[[], T]) -> T:
    """make() on every rank. An error on any of them is raised on all, so that none is left waiting."""
    result, error = None, None
    try:
        result = make()
    except (ValueError, OSError, RuntimeError) as caught:
        error = caught
    messages = gather(None if error is None else str(error))
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise RuntimeError(f"rank {rank}: {message}")
    return result


def check_same_ranks(facts: Mapping[str, Any]) -> None:
    """RuntimeError, on all ranks, unless all have the same facts."""
    everywhere = gather(dict(facts))
    for rank, other in enumerate(everywhere):
        if lines := configurator.diff(other, everywhere[0]):
            raise RuntimeError(f"rank {rank} has another config or other data than rank 0: {'; '.join(lines)}")


def sum_over_ranks(device: torch.device, *values: float | Tensor) -> Tensor:
    """The sum of each value over the ranks: (N,), float64 where the device has it."""
    wide = torch.float32 if device.type == "mps" else torch.float64
    total = torch.stack([torch.as_tensor(value, dtype=wide, device=device) for value in values])
    if rank_and_world()[1] > 1:
        dist.all_reduce(total)
    return total


def sync(model: Decoder, optimizer: torch.optim.AdamW) -> None:
    """Gives all ranks the weights, buffers and optimizer state of rank 0, the only one that needs a checkpoint."""
    if rank_and_world()[1] == 1:
        return
    for tensor in model.state_dict().values():
        if isinstance(tensor, Tensor):
            dist.broadcast(tensor, 0)
    has_state = gather([len(optimizer.state[p]) > 0 for p in model.parameters()])[0]
    for p, present in zip(model.parameters(), has_state, strict=True):
        state = optimizer.state[p]
        if present and not state:
            state["step"] = torch.zeros((), device=p.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        for name in sorted(state):
            dist.broadcast(state[name], 0)


def from_rank_0(saved: dict | None) -> dict | None:
    """Rank 0's checkpoint on all ranks; the others get its facts alone, and weights that `sync` will overwrite."""
    facts = None
    if saved:
        small = {name: p for name, p in saved["model"].items() if name == "breaks" or not isinstance(p, Tensor)}
        facts = {**saved, "model": small, "optimizer": None}
    facts = gather(facts)[0]
    if rank_and_world()[0] == 0 or facts is None:
        return saved
    untrained = Decoder(model_config_of(facts), facts["model"]["breaks"])
    return facts | {"model": untrained.state_dict() | facts["model"]}


class StopSignal:
    """SIGTERM and SIGINT end the run after the step at hand, with a checkpoint."""

    def __init__(self):
        self.number = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.note)

    def note(self, number: int, frame: Any) -> None:
        if self.number and number == signal.SIGINT:  # the second Ctrl-C means now; schedulers repeat SIGTERM
            sys.exit(128 + number)
        self.number = number


# Checkpoints: a dict of model, optimizer, step, best, config (all knobs, flat) and data (fingerprints).


def save(payload: dict, path: str | Path) -> None:
    """Writes a checkpoint. RuntimeError where it cannot be written; the old file is kept then."""
    with configurator.atomic(path) as file:
        try:
            torch.save(payload, file)
        except RuntimeError as error:  # torch's own for a full disk names neither disk nor file
            raise OSError(str(error).splitlines()[0]) from error


def read(path: str | Path) -> dict:
    """The dict that train.py saved, its tensors mapped from the file. FileNotFoundError, or RuntimeError for a file
    that is damaged or not ours."""
    path = Path(path)
    if not path.is_file():
        hint = "expected a run's directory, which has last.pt, or a checkpoint"
        raise FileNotFoundError(f"{path}: no such checkpoint; {hint}")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not look at checksums
            if bad := archive.testzip():
                raise zipfile.BadZipFile(f"damaged record {bad}")
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except PermissionError:
        raise
    except Exception as error:  # a damaged file fails in a dozen ways
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        hint = "put a copy in its place, or move it away and train again"
        raise RuntimeError(f"{path}: damaged, or not a checkpoint ({reason}): {hint}") from error
    if not isinstance(saved, dict) or not {"model", "config", "step", "data"} <= saved.keys():
        raise RuntimeError(f"{path}: not a checkpoint of train.py: expected model, config, step and data in it")
    return saved


# Weights that start anew where one of these knobs changes, by a part of their names.
STARTS_ANEW = {
    "rotary.": {"pos_encoding", "freqs", "freqs_seed", "freqs_learned", "rotary_fraction", "rope_theta"},
    "col_embed.": {"pos_encoding"},
    "log_n_scale": {"logit_scale"},
}


def starts_anew(name: str, changed: Collection[str]) -> bool:
    return any(part in name and not knobs.isdisjoint(changed) for part, knobs in STARTS_ANEW.items())


def load_model(saved: dict, device: str | torch.device = "cpu", **changes: Any) -> Decoder:
    """The model in a checkpoint; `changes` replace values of its config. The encoding, its frequencies and the scale of
    the logits may change; what these need starts anew. ValueError for changes that need weights of other shapes."""
    weights = saved["model"]
    config, known = model_config_of(saved, **changes), weights["breaks"].shape[-1]
    if config.vocab_size != known:
        raise ValueError(f"vocab_size={config.vocab_size}: the checkpoint has {known} tokens; leave it out")
    model = Decoder(config, weights["breaks"])
    changed = {name for name, value in changes.items() if saved["config"].get(name, "absent") != value}
    for name in sorted(changed & {"tie_weights", "n_head", "n_kv_head", "head_dim"}):  # shapes alone do not show these
        theirs = f"the checkpoint's weights have {name}={saved['config'][name]}"
        raise ValueError(f"{name}={changes[name]}: {theirs}; leave it out, or train from scratch")
    weights = {name: p for name, p in weights.items() if not starts_anew(name, changed)}
    weights |= {name: p for name, p in model.state_dict().items() if starts_anew(name, changed)}
    if changes:
        theirs, ours = ({n: getattr(p, "shape", ()) for n, p in side.items()} for side in (weights, model.state_dict()))
        if lines := configurator.diff(theirs, ours):
            raise ValueError(f"{changes}: the checkpoint's weights do not fit: {'; '.join(lines[:3])}")
    model.load_state_dict(weights)
    return model.to(device)


def model_config_of(saved: dict, **changes: Any) -> ModelConfig:
    names = {field.name for field in fields(ModelConfig)}
    return ModelConfig(**{name: value for name, value in saved["config"].items() if name in names} | changes)


def load_run(
    path: str, which: str = "last", device: str | torch.device = "cpu", **changes: Any
) -> tuple[Decoder, dict]:
    """The model of a run directory or checkpoint file, in evaluation mode, and the config it was trained with;
    `steps_done` and `data`, its fingerprints (`vocabulary` of runs on strings of tokens, `tokenizer` of runs on text),
    are added to that. changes: as load_model's; those that are None change nothing."""
    file = Path(path) / f"{which}.pt" if Path(path).is_dir() else Path(path)
    saved = read(file)
    if torch.device(device).type == "cuda":
        # cuDNN's attention plans anew for each shape, and decodes wrongly with few key heads (pytorch#193893).
        torch.backends.cuda.enable_cudnn_sdp(False)
    trained = saved["config"] | {"steps_done": saved["step"], "data": saved["data"]}
    changes = {name: value for name, value in changes.items() if value is not None}
    return load_model(saved, device, **changes).eval(), trained


# Where a run starts.


def decay_start(max_steps: int) -> int:
    """The first step whose learning rate the schedule `wsd` lowers: the last tenth of the steps decay."""
    return max_steps - max(1, max_steps // 10)


def check_same_tokens(init_from: str, theirs: dict, ours: dict) -> None:
    """ValueError where the model of init_from was trained with another vocabulary or tokenizer."""
    hints = {"tokenizer": "give --tokenizer, which says where its own is", "vocabulary": "start from a run that copies"}
    for kind, hint in hints.items():
        if kind in ours and theirs.get(kind) != ours[kind]:
            known = theirs.get(kind, "none")
            raise ValueError(f"{init_from} was trained with another {kind}: {known}, not {ours[kind]}; {hint}")


def find_run(out: Path, init: str, schedule: str, max_steps: int) -> dict | None:
    """The checkpoint that a run in `out` goes on from, or None. init: `auto`, `scratch` (there must be none), `resume`
    (there must be one). A `wsd` run that was asked for other max_steps goes on from before its decay."""
    path = out / "last.pt"
    if path.exists() and init == "scratch":
        raise ValueError(f"init='scratch', but {path} exists: choose another --out_dir, or move that run away")
    if not path.exists() and init == "resume":
        raise FileNotFoundError(f"init='resume', but {path} does not exist: leave --init out to start this run")
    if not path.exists():
        return None
    saved = read(path)
    before = saved["config"]
    if before["schedule"] == schedule == "wsd" and before["max_steps"] != max_steps:
        return before_decay(out, saved, max_steps)
    return saved


# Knobs that may change when a run goes on: they do not change what is computed, up to rounding.
MAY_CHANGE = {"out_dir", "init", "grad_accum", "eval_interval", "eval_steps", "checkpoint_interval", "device"}
MAY_CHANGE |= {"compile", "recompute", "wandb", "block_size"}
MAY_CHANGE |= {"tokenizer", "train_data", "val_data", "chats", "val_chats", "text_source"}  # data has fingerprints


def check_same_run(out: Path, saved: dict, config: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """ValueError unless a checkpoint was trained with this config and on data with these fingerprints."""
    fixed = {name: value for name, value in config.items() if name not in MAY_CHANGE}
    if config["schedule"] == "wsd":
        del fixed["max_steps"]  # see before_decay
    theirs = {name: saved["config"].get(name, "absent") for name in fixed}
    if lines := configurator.diff({**theirs, **saved["data"]}, {**fixed, **data}):
        hint = f"give its values, choose another --out_dir, or move that run away (mv {out} {out}-old)"
        raise ValueError("\n  ".join([f"{out} holds another run: {hint}", *lines]))


def before_decay(out: Path, saved: dict, max_steps: int) -> dict:
    """The checkpoint from which a `wsd` run goes on to another max_steps: the newest that no decay has touched, so that
    the result is that of a run that had max_steps from the start. ValueError where there is none."""
    start = min(decay_start(saved["config"]["max_steps"]), decay_start(max_steps))
    stable = out / "stable.pt"
    if saved["step"] > start and stable.exists():
        saved = read(stable)
    if saved["step"] > start:
        why = f"{out} has no checkpoint from before step {saved['step']}, and the decay starts at step {start}"
        raise ValueError(f"{why}: choose another --out_dir, or another max_steps than {max_steps}")
    return saved


def write_facts(path: Path, model: Decoder, data: Mapping[str, Any]) -> None:
    """run.json: what made the run, beside its config."""
    facts = {
        "command": sys.argv,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": str(model.breaks.device),
        "processes": rank_and_world()[1],
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "data": dict(data),
    }
    configurator.write_json(path, facts)


def read_log(path: Path) -> list[tuple[int, str]]:
    """Step and text of each whole line of a log; none where there is no file. RuntimeError names a damaged line."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(keepends=True) if path.exists() else (), 1):
        if not line.endswith("\n"):  # torn by a kill
            break
        try:
            found.append((json.loads(line)["step"], line))
        except (ValueError, KeyError, TypeError) as error:
            hint = "delete that line, and give the same command again"
            raise RuntimeError(f"{path}, line {number}: damaged ({error}): {hint}") from error
    return found


def open_log(path: Path, step: int) -> TextIO:
    """A log for appending, cut back to the steps before `step`: the others will be computed again."""
    kept = [line for at, line in read_log(path) if at < step]
    with configurator.atomic(path) as file:
        file.write("".join(kept).encode())
    return open(path, "a")


class Logs:
    """log.jsonl and validation.jsonl of a run, and its lines on Weights & Biases where a project is given. Only rank 0
    writes."""

    def __init__(self, out: Path, step: int, wandb_project: str | None, resolved: dict):
        self.files, self.wandb = {}, None
        if rank_and_world()[0] != 0:
            return
        if wandb_project:
            try:
                import wandb
            except ImportError as error:
                raise ValueError(f"wandb={wandb_project!r}: not installed, pip install wandb") from error
            note = out / "wandb_id"  # so that a run that goes on is the same one there
            if not note.exists():
                note.write_text(os.urandom(6).hex())
            run_id = note.read_text()
            self.wandb = wandb.init(project=wandb_project, id=run_id, name=str(out), config=resolved, resume="allow")
        self.files = {name: open_log(out / f"{name}.jsonl", step) for name in ("log", "validation")}

    def write(self, name: str, line: dict[str, Any]) -> None:
        if name in self.files:
            print(json.dumps(line), file=self.files[name], flush=True)
        if self.wandb:
            self.wandb.log(line, step=line["step"])


def last_validated(out: Path) -> int:
    """The step of the last validation in a run's directory, -1 for none."""
    return max((step for step, _ in read_log(out / "validation.jsonl")), default=-1)
