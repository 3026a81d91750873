"""Training: copy strings (task = 'copy').

    python train.py config/toy_copy.py                                 # one process: cuda, mps or cpu
    python train.py config/toy_copy.py --pos_encoding=rope --out_dir=out/rope
    torchrun --nproc_per_node=2 train.py config/toy_copy.py            # DDP; the same batches, the same losses

Config files, then --key=value, later ones winning; --help lists every knob. A run directory holds last.pt and best.pt,
config.py (pass it back in to run the same again), log.jsonl (a line a step), validation.jsonl, and run.json (command
line, versions).
Running the same command again goes on where the run stopped.
"""

import json
import math
import os
import platform
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TextIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import configurator
import data_copy
import rope2d
from data_copy import CopyConfig
from model import Decoder, ModelConfig, from_checkpoint, read_checkpoint


@dataclass
class TrainConfig:
    """Training"""

    task: Literal["copy"] = "copy"  # what the batches hold
    out_dir: str = "out/run"  # the run's directory
    init: Literal["auto", "scratch", "resume"] = "auto"  # auto: go on if out_dir holds this run, else start
    seed: int = 0  # of the weights and of the data's order
    batch_size: int = 32  # samples a step, over all processes
    grad_accum: int = 1  # micro-batches that each process cuts its part into; same result, less memory
    max_steps: int = 600  # optimizer steps
    learning_rate: float = 2e-3  # peak
    min_lr: float | None = None  # where the schedule ends; None: a tenth of the peak
    schedule: Literal["cosine", "wsd"] = "cosine"  # wsd: flat, then linear over the last tenth of the steps
    warmup_steps: int = 100  # linear from 0
    weight_decay: float = 0.01  # on matrices alone
    gate_lr_scale: float = 3.0  # learning rate of auto-2d-rope's gates, in units of the others'
    grid_steps: int = 0  # auto-2d-rope: first steps, which find the grid; then it is fixed and all else learned anew
    beta1: float = 0.9  # AdamW
    beta2: float = 0.95  # AdamW
    grad_clip: float = 1.0  # largest norm of the gradient; 0: no clipping
    eval_interval: int = 200  # steps between validation losses; there is one at the end in any case
    eval_steps: int = 4  # batches a validation loss is the mean of
    checkpoint_interval: int = 200  # steps between writes of last.pt; there is one at the end in any case
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: the first of these that there is
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the matrix products; auto: bfloat16 on cuda
    compile: bool = False  # torch.compile; needs a C++ compiler on a CPU

    def __post_init__(self):
        for name in ("batch_size", "grad_accum", "max_steps", "eval_interval", "eval_steps", "checkpoint_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")


# Knobs that may change when a run goes on: they leave what is computed alone, up to rounding.
MAY_CHANGE = {
    "out_dir",
    "init",
    "grad_accum",
    "eval_interval",
    "eval_steps",
    "checkpoint_interval",
    "device",
    "compile",
}

Batch = tuple[list[tuple[Tensor, Tensor]], int]  # this rank's micro-batches (tokens, targets); targets on all ranks


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def pick_device(name: str) -> torch.device:
    """`auto` takes cuda, mps or cpu, the first that is there. ValueError for a device that is not."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, is_there in there.items() if is_there)
    if not there[name]:
        raise ValueError(f"device={name!r}: not on this machine; it has {', '.join(k for k in there if there[k])}")
    return torch.device(name)


def copy_batch(config: TrainConfig, copy_config: CopyConfig, step: int, stream: str, rank: int, world: int) -> Batch:
    """A step's batch, cut by length into grad_accum micro-batches a rank, so that little padding is computed."""
    inputs, targets, lengths = data_copy.batch(copy_config, config.batch_size, step, config.seed, stream)
    pieces = np.array_split(np.arange(config.batch_size), config.grad_accum * world)[rank::world]
    micro = []
    for piece in pieces:
        width = 2 * lengths[piece[-1]] + 5  # the last is the longest
        micro.append((torch.from_numpy(inputs[piece, :width]), torch.from_numpy(targets[piece, :width])))
    return micro, int((targets != data_copy.IGNORE).sum())


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of step 0 .. max_steps-1."""
    peak, last = config.learning_rate, config.max_steps - 1
    low = peak / 10 if config.min_lr is None else config.min_lr
    if step < config.grid_steps:
        return peak * min(1.0, (step + 1) / max(1, config.warmup_steps))
    step, last = step - config.grid_steps, last - config.grid_steps
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "wsd":
        decay_steps = max(1, config.max_steps // 10)
        return low + (peak - low) * min(1.0, (last - step) / decay_steps)
    done = (step - config.warmup_steps) / max(1, last - config.warmup_steps)
    return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * done))


def make_optimizer(model: Decoder, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with decay on matrices, none on norms, gates, and the scalars of frequencies and logits."""
    groups: dict[str, list] = {"matrices": [], "vectors": [], "gates": []}
    for name, p in model.named_parameters():
        kind = "gates" if ".grid." in name else "matrices" if name.endswith(".weight") and p.dim() == 2 else "vectors"
        groups[kind].append(p)
    settings = {
        "matrices": {"weight_decay": config.weight_decay, "lr_scale": 1.0},
        "vectors": {"weight_decay": 0.0, "lr_scale": 1.0},
        "gates": {"weight_decay": 0.0, "lr_scale": config.gate_lr_scale},
    }
    groups = [{"params": params} | settings[kind] for kind, params in groups.items() if params]
    fused = model.newlines.device.type in ("cuda", "cpu")
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=fused)


def save_atomically(payload: dict, path: Path) -> None:
    """Writes a checkpoint so that a kill at any moment leaves either the old file or the new one, whole."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(payload, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def find_run(config: TrainConfig, resolved: dict) -> dict | None:
    """The checkpoint to go on from, or None to start. ValueError if out_dir holds another run."""
    path = Path(config.out_dir) / "last.pt"
    if not path.exists():
        if config.init == "resume":
            raise FileNotFoundError(f"init='resume', but {path} does not exist")
        return None
    if config.init == "scratch":
        raise ValueError(f"init='scratch', but {path} exists: choose another out_dir, or move that run away")
    checkpoint = read_checkpoint(path)
    ours = {k: v for k, v in resolved.items() if k not in MAY_CHANGE}
    theirs = {k: v for k, v in checkpoint["config"].items() if k not in MAY_CHANGE}
    if ours != theirs:
        lines = "\n  ".join(configurator.diff(theirs, ours))
        raise ValueError(
            f"{config.out_dir} holds another run: choose another out_dir, or move that one away\n  {lines}"
        )
    return checkpoint


def open_log(path: Path, step: int) -> TextIO:
    """A log for appending, cut back to the steps before `step`: the others will be computed again."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < step]
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(kept))
    os.replace(temporary, path)  # a kill leaves the old log or the new one
    return open(path, "a")


def last_validated(out: Path) -> int:
    """The step of the last validation that a run's directory knows of, -1 for none."""
    path = out / "validation.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=-1)


class StopSignal:
    """SIGTERM and SIGINT end the run after the step at hand, with a checkpoint."""

    def __init__(self):
        self.number = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.note)

    def note(self, number: int, frame) -> None:
        if self.number:  # the second one means now
            sys.exit(128 + number)
        self.number = number


def train(model_config: ModelConfig, copy_config: CopyConfig, config: TrainConfig) -> None:
    """Trains to max_steps and leaves out_dir complete. RuntimeError for a loss that is not finite; SystemExit(128 + n)
    after signal n, with a checkpoint."""
    rank, world = rank_and_world()
    device = pick_device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if config.batch_size < config.grad_accum * world:
        raise ValueError(
            f"batch_size={config.batch_size}: less than grad_accum={config.grad_accum} x {world} processes"
        )
    longest = 2 * copy_config.max_length + 5
    if longest > model_config.block_size:
        raise ValueError(
            f"max_length={copy_config.max_length} makes sequences of {longest} tokens: block_size="
            f"{model_config.block_size} is too short"
        )

    table = rope2d.newline_table(data_copy.TOKEN_BYTES)
    model_config.vocab_size = model_config.vocab_size or len(table)
    resolved = asdict(model_config) | asdict(copy_config) | asdict(config)
    checkpoint = find_run(config, resolved)
    torch.manual_seed(config.seed)
    model = (from_checkpoint(checkpoint, device) if checkpoint else Decoder(model_config, table)).to(device)
    optimizer = make_optimizer(model, config)
    step, best = 0, math.inf
    if checkpoint:
        optimizer.load_state_dict(checkpoint["optimizer"])
        step, best = checkpoint["step"], checkpoint["best"]
    if step >= config.max_steps and last_validated(Path(config.out_dir)) >= config.max_steps:
        if rank == 0:
            print(f"{config.out_dir}: all {step} steps are done already")
        return

    wrapped = model
    if world > 1:
        wrapped = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            find_unused_parameters=config.grid_steps > 0,  # the gates, once their grid has settled
        )
    if config.compile:
        wrapped = torch.compile(wrapped)
    bfloat16 = config.dtype == "bfloat16" or config.dtype == "auto" and device.type == "cuda"
    precision = torch.autocast(device.type, torch.bfloat16) if bfloat16 else nullcontext()

    def save(name: str) -> None:
        if rank == 0:
            payload = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "config": resolved,
                "step": step,
                "best": best,
                "vocabulary": data_copy.VOCAB,
            }
            save_atomically(payload, Path(config.out_dir) / name)

    def add_up(*values: float) -> list[float]:
        """Sums over the ranks."""
        total = torch.tensor(values, dtype=torch.float64, device="cpu" if device.type == "mps" else device)
        if world > 1:
            dist.all_reduce(total)
        return total.tolist()

    @torch.no_grad()
    def validation_loss() -> float:
        """Nats a target token, over batches that are the same at every evaluation and never in training."""
        loss, count = 0.0, 0
        for i in range(config.eval_steps):
            micro, n_targets = copy_batch(config, copy_config, i, "validation", rank, world)
            for tokens, targets in micro:
                with precision:
                    loss += model(tokens.to(device), targets.to(device)).item()
            count += n_targets
        return add_up(loss)[0] / count

    if rank == 0:
        out = Path(config.out_dir)
        out.mkdir(parents=True, exist_ok=True)
        configurator.save(out / "config.py", model_config, copy_config, config)
        about = {
            "command": sys.argv,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "device": str(device),
            "processes": world,
            "threads": torch.get_num_threads(),
            "parameters": sum(p.numel() for p in model.parameters()),
        }
        (out / "run.json").write_text(json.dumps(about, indent=1) + "\n")
        log = open_log(out / "log.jsonl", step)
        validation_log = open_log(out / "validation.jsonl", step)
        print(
            f"{config.out_dir}: {model_config.pos_encoding}, {about['parameters']:,} parameters, {device}, steps "
            f"{step} to {config.max_steps}"
        )
    if not checkpoint:
        save("last.pt")  # step 0: from here on out_dir belongs to this config
    stop = StopSignal()
    bar = tqdm(
        total=config.max_steps,
        initial=step,
        unit="step",
        disable=rank != 0,
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 10,
    )
    while True:
        finished = step == config.max_steps
        if step and (finished or step % config.eval_interval == 0):  # here, so that it is not lost in a kill after save
            val_loss = validation_loss()
            bar.set_description(f"val loss {val_loss:.4f}")
            if val_loss < best:
                best = val_loss
                save("best.pt")
            if rank == 0:  # last: it says that best.pt is settled
                print(json.dumps({"step": step, "val_loss": val_loss}), file=validation_log, flush=True)
        if finished:
            break
        began = time.perf_counter()
        lr = learning_rate(config, step)
        for group in optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        if step and step == config.grid_steps:
            torch.manual_seed(config.seed)  # every rank draws the same, and so does a run that goes on from here
            model.settle_grid()
            optimizer.state.clear()
            best = math.inf  # what was best so far is thrown away
        micro, n_targets = copy_batch(config, copy_config, step, "train", rank, world)
        step_loss = torch.zeros((), device=device)
        for i, (tokens, targets) in enumerate(micro):
            last = i == len(micro) - 1
            with nullcontext() if last or world == 1 else wrapped.no_sync(), precision:
                loss = wrapped(tokens.to(device), targets.to(device)) / n_targets
                (loss * world).backward()  # DDP averages over ranks; the sum over targets is what is wanted
            step_loss += loss.detach()
        loss, stopped = add_up(step_loss.item(), float(bool(stop.number)))
        if step < config.grid_steps:  # what the gates look at stays as it is, or they would not fit what comes after
            for name, p in model.named_parameters():
                if "embed" in name or "norm" in name:
                    p.grad = None
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf).item()
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise RuntimeError(
                f"step {step}: loss {loss}, gradient norm {norm}; the last good checkpoint is {config.out_dir}/last.pt"
            )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        seconds = time.perf_counter() - began
        if rank == 0:
            tokens_s = sum(tokens.numel() for tokens, _ in micro) * world / seconds
            line = {
                "step": step - 1,
                "loss": loss,
                "lr": lr,
                "grad_norm": norm,
                "ms": round(seconds * 1e3, 3),
                "tokens_per_s": round(tokens_s),
            }
            print(json.dumps(line), file=log, flush=True)
        bar.update()
        bar.set_postfix(loss=f"{loss:.4f}", refresh=False)

        if step == config.max_steps or stopped or step % config.checkpoint_interval == 0:
            save("last.pt")
        if stopped:
            bar.close()
            number = stop.number or signal.SIGTERM
            if rank == 0:
                print(f"\nsignal {number}: stopped after step {step}; the same command goes on", file=sys.stderr)
            sys.exit(128 + number)
    bar.close()


def main() -> None:
    model_config, copy_config, config = configurator.configure(ModelConfig, CopyConfig, TrainConfig, doc=__doc__)
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("nccl" if pick_device(config.device).type == "cuda" else "gloo")
    try:
        train(model_config, copy_config, config)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    configurator.run_cli(main)
