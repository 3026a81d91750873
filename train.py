"""Training: copy strings (task = 'copy'), pretrain on text ('pretrain'), or finetune on copying in text ('finetune').

    python train.py config/toy_copy.py                                 # one process: cuda, mps or cpu
    python train.py config/toy_copy.py --pos_encoding=rope --out_dir=out/rope
    torchrun --nproc_per_node=2 train.py config/toy_copy.py            # DDP; the same batches, the same losses
    torchrun --nproc_per_node=8 train.py config/pretrain.py config/730m.py --out_dir=out/730m
    python train.py config/finetune_copy.py --init_from=out/730m --out_dir=out/730m-copy

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
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import checkpoint
import configurator
from batches import chat_data, copy_data, load_start, micro_batches, text_data
from data_copy import IGNORE, CopyConfig, TextCopyConfig
from data_dclm import TextConfig
from model import Decoder, ModelConfig


@dataclass
class TrainConfig:
    """Training"""

    task: Literal["copy", "pretrain", "finetune"] = "copy"  # what the batches hold
    init_from: str = ""  # finetune: a run directory or checkpoint file of ours, or a Hugging Face folder of a Qwen3
    chats: str = ""  # finetune: JSONL of chats (data_copy.py); empty: copy tasks, made as they are needed
    val_chats: str = ""  # the same for validation
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
    recompute: bool = False  # activation checkpointing: blocks are computed again in backward; less memory, more time
    wandb: str | None = None  # project on Weights & Biases that losses go to; None: none (pip install wandb)

    def __post_init__(self):
        for name in ("batch_size", "grad_accum", "max_steps", "eval_interval", "eval_steps", "checkpoint_interval"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")


CONFIGS = ModelConfig, CopyConfig, TextConfig, TextCopyConfig, TrainConfig  # all knobs

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
    "recompute",
    "wandb",
    "tokenizer",  # its identity may not, nor the data's, but both may have moved
    "train_data",
    "val_data",
}

# Dense bfloat16 FLOP/s of GPUs, by what torch.cuda.get_device_name says; NVIDIA's data sheets.
PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def pick_device(name: str) -> torch.device:
    """`auto` takes cuda, mps or cpu, the first that is there. Of several GPUs, torchrun's for this process, which is
    made the current one. ValueError for a device that is not there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, is_there in there.items() if is_there)
    if not there[name]:
        raise ValueError(f"device={name!r}: not on this machine; it has {', '.join(k for k in there if there[k])}")
    if name != "cuda":
        return torch.device(name)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)  # where nccl and triton work
    # cuDNN's attention plans anew for each shape, and with few key heads decodes wrongly on a B200 (pytorch#193893).
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def flops(model: Decoder, micro: list[tuple[Tensor, Tensor]]) -> float:
    """Of forward and backward: 6 a weight of a matrix product and token, 12 T a layer and channel of attention and
    token (PaLM's count, arXiv 2204.02311, appendix B), the embedding's look-up for free."""
    tokens = sum(t.numel() for t, _ in micro)
    pairs = sum(t.numel() * t.shape[1] for t, _ in micro)
    matrices = sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2) + model.head.weight.numel()
    return 6 * matrices * tokens + 12 * len(model.blocks) * model.config.n_head * model.config.head_size * pairs


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


class StopSignal:
    """SIGTERM and SIGINT end the run after the step at hand, with a checkpoint."""

    def __init__(self):
        self.number = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.note)

    def note(self, number: int, frame) -> None:
        if self.number and number == signal.SIGINT:  # the second Ctrl-C means now; schedulers repeat SIGTERM
            sys.exit(128 + number)
        self.number = number


def start_wandb(config: TrainConfig, resolved: dict):
    """The run on Weights & Biases, the same one when a run goes on: its name is kept in out_dir."""
    try:
        import wandb
    except ImportError as error:
        raise ValueError(f"wandb={config.wandb!r}: not installed, pip install wandb") from error
    note = Path(config.out_dir) / "wandb_id"
    note.parent.mkdir(parents=True, exist_ok=True)
    if not note.exists():
        note.write_text(os.urandom(6).hex())
    run_id = note.read_text()
    return wandb.init(project=config.wandb, id=run_id, name=config.out_dir, config=resolved, resume="allow")


def train(
    model_config: ModelConfig,
    copy_config: CopyConfig,
    text_config: TextConfig,
    text_copy_config: TextCopyConfig,
    config: TrainConfig,
    changes: Collection[str] = (),
) -> None:
    """Trains to max_steps and leaves out_dir complete. RuntimeError for a loss that is not finite; SystemExit(128 + n)
    after signal n, with a checkpoint. Finetuning takes its model from config.init_from, and from model_config only the
    fields named in `changes`."""
    rank, world = rank_and_world()
    device = pick_device(config.device)
    if device.type == "cuda" and config.task == "pretrain":
        torch.backends.cuda.enable_cudnn_sdp(True)  # all batches have one shape
    if config.batch_size < config.grad_accum * world:
        raise ValueError(
            f"batch_size={config.batch_size}: less than grad_accum={config.grad_accum} x {world} processes"
        )
    start, was = None, ""
    if config.task == "finetune":
        start, identity, was = load_start(config, {name: getattr(model_config, name) for name in changes})
        model_config = start.config
        data = chat_data(config, text_config, text_copy_config, start, identity)
    elif config.task == "copy":
        data = copy_data(config, copy_config, model_config.block_size)
    else:
        data = text_data(config, text_config, model_config.block_size)
    if world > 1:
        identities = [None] * world
        dist.all_gather_object(identities, data.identity)
        for other in range(world):
            if lines := configurator.diff(identities[other], data.identity):
                raise RuntimeError(f"rank {other} sees other data than rank {rank}: {'; '.join(lines)}")
    vocab_size = model_config.vocab_size = model_config.vocab_size or len(data.newlines)
    if vocab_size != len(data.newlines):
        raise ValueError(f"vocab_size={vocab_size}: the data has {len(data.newlines)} tokens; leave it None")
    out = Path(config.out_dir)
    all_configs = model_config, copy_config, text_config, text_copy_config, config
    resolved = {name: value for part in all_configs for name, value in asdict(part).items()}
    fixed = {name: value for name, value in resolved.items() if name not in MAY_CHANGE}
    before = checkpoint.find_run(out, config.init, fixed, data.identity)
    torch.manual_seed(config.seed)
    model = checkpoint.load_model(before) if before else start or Decoder(model_config, data.newlines)
    model.to(device)
    model.recompute = config.recompute
    optimizer = make_optimizer(model, config)
    step, best, resumed = 0, math.inf, before is not None
    if before:
        optimizer.load_state_dict(before["optimizer"])
        step, best, before = before["step"], before["best"], None
    if step >= config.max_steps and checkpoint.last_validated(out) >= config.max_steps:
        if rank == 0:
            print(f"{config.out_dir}: all {step} steps are done already")
        return

    wrapped = model
    if world > 1:
        wrapped = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            broadcast_buffers=False,  # they are the same everywhere
            gradient_as_bucket_view=True,
            find_unused_parameters=any(".grid." in name for name, _ in model.named_parameters()),  # once it has settled
        )
    if config.compile:
        wrapped = torch.compile(wrapped)
    bfloat16 = config.dtype == "bfloat16" or config.dtype == "auto" and device.type == "cuda"
    precision = torch.autocast(device.type, torch.bfloat16) if bfloat16 else nullcontext()
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak_flops = next((peak for name, peak in PEAK_FLOPS.items() if name in gpu), None)

    def save(name: str) -> None:
        if rank == 0:
            payload = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "config": resolved,
                "step": step,
                "best": best,
                "data": data.identity,
            }
            checkpoint.save(payload, out / name)

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
            batch = data.batch(i, "validation")
            count += int((batch[1] != IGNORE).sum())
            for tokens, targets in micro_batches(*batch, config.grad_accum, rank, world):
                with precision:
                    loss += model(tokens.to(device), targets.to(device)).item()
        return add_up(loss)[0] / count

    if rank == 0:
        wandb = start_wandb(config, resolved) if config.wandb else None
        out.mkdir(parents=True, exist_ok=True)
        configurator.save(out / "config.py", *all_configs)
        about = {
            "command": sys.argv,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "device": str(device),
            "processes": world,
            "threads": torch.get_num_threads(),
            "parameters": sum(p.numel() for p in model.parameters()),
            "data": data.identity,
        }
        (out / "run.json").write_text(json.dumps(about, indent=1) + "\n")
        log = checkpoint.open_log(out / "log.jsonl", step)
        validation_log = checkpoint.open_log(out / "validation.jsonl", step)
        encoding = model_config.pos_encoding
        if was not in ("", encoding):
            encoding += f", from weights of {was}"
        print(
            f"{config.out_dir}: {encoding}, {about['parameters']:,} parameters, {device}, steps {step} to "
            f"{config.max_steps}"
        )
    weight = data.weight if data.weight is None else data.weight.to(device)
    if not resumed:
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
                if wandb:
                    wandb.log({"val_loss": val_loss}, step=step)
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
        batch = data.batch(step, "train")
        n_targets = int((batch[1] != IGNORE).sum())
        micro = micro_batches(*batch, config.grad_accum, rank, world)
        step_loss = torch.zeros((), device=device)
        for i, (tokens, targets) in enumerate(micro):
            last = i == len(micro) - 1
            with nullcontext() if last or world == 1 else wrapped.no_sync():
                with precision:
                    loss = wrapped(tokens.to(device), targets.to(device), weight) / n_targets
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
            if peak_flops:
                line["mfu"] = round(flops(model, micro) / seconds / peak_flops, 4)
            print(json.dumps(line), file=log, flush=True)
            if wandb:
                wandb.log(line, step=step - 1)
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
    given: set[str] = set()
    configs = configurator.configure(*CONFIGS, doc=__doc__, given=given)
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("nccl" if pick_device(configs[-1].device).type == "cuda" else "gloo")
    try:
        train(*configs, changes=given & {field.name for field in fields(ModelConfig)})
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    configurator.run_cli(main)
