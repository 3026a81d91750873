"""Training: copy strings (task = 'copy'), pretrain on text ('pretrain'), or finetune on chats ('finetune').

    python train.py config/toy_copy.py                                 # one process: cuda, mps or cpu
    python train.py config/toy_copy.py --pos_encoding=rope --out_dir=out/rope
    torchrun --nproc_per_node=2 train.py config/toy_copy.py            # DDP; the same batches, the same losses
    torchrun --nproc_per_node=8 train.py config/pretrain.py config/730m.py --out_dir=out/730m
    python train.py config/finetune_copy.py --init_from=out/730m --out_dir=out/730m-copy

Config files, then --key=value, later ones winning; --help lists every knob. A run directory holds last.pt and best.pt,
config.py (pass it back in to run the same again), log.jsonl (a line a step), validation.jsonl, and run.json (command
line, versions). The same command again goes on where the run stopped. A run with schedule = 'wsd' also goes on to a
larger max_steps, from stable.pt, its last checkpoint before the learning rate fell. A file of chats may be mended in
between, as long as it has as many chats as before.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import checkpoint
import configurator
import data_copy
import hf
import tasks
from checkpoint import decay_start, on_all_ranks, rank_and_world
from data_copy import IGNORE, CopyConfig
from data_text import TextCopyConfig
from data_text import unused_knobs as unused_text_knobs
from model import Decoder, ModelConfig
from rope2d import layer_encodings


@dataclass
class TrainConfig:
    """Training"""

    task: Literal["copy", "pretrain", "finetune"] = "copy"  # what the batches hold
    init_from: str = ""  # weights to start from: a run directory or checkpoint of ours, or a Hugging Face folder
    tokenizer: str = "llama3"  # of text: llama3, bytes, a tiktoken encoding's name, a path (tokenizer.py)
    train_data: str = ""  # pretrain, and finetune with replay: folder of shards (data_dclm.py)
    val_data: str = ""  # pretrain: folder of shards of another corpus
    chats: str = ""  # finetune: JSONL of chats (data_text.py); empty: copy tasks, made as they are needed
    val_chats: str = ""  # finetune: the same for validation; empty: copy tasks, even where chats are given
    replay: float = 0.0  # finetune: share of a step's rows that are text of train_data, so that it is not forgotten
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
    grid_steps: int = 0  # auto-2d-rope: first steps, which find the grid; then it is frozen and all else learned anew
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
        checkpoint.check_seeds(seed=self.seed)
        for name in ("learning_rate", "warmup_steps", "weight_decay", "gate_lr_scale", "grid_steps", "grad_clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 0")
        if not 0 <= (self.min_lr or 0) <= self.learning_rate:
            raise ValueError(f"min_lr={self.min_lr}: expected 0 to learning_rate={self.learning_rate}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 0 and less than 1")
        if not self.out_dir or "," in self.out_dir:
            raise ValueError(f"out_dir={self.out_dir!r}: expected a folder without a comma, as in eval.py --runs=A,B")
        users = {"train_data": ("pretrain", "finetune"), "val_data": ("pretrain",)}
        for name in ("train_data", "val_data", "chats", "val_chats", "replay"):
            used_by = users.get(name, ("finetune",))
            if getattr(self, name) and self.task not in used_by:
                given = f"{name}={getattr(self, name)!r}: task={self.task!r} does not use it"
                raise ValueError(f"{given}, it is for {' and '.join(used_by)}")
        if not 0 <= self.replay < 1:
            raise ValueError(f"replay={self.replay}: expected a share of at least 0 and less than 1")
        if self.grid_steps and self.init_from:
            hint = "all weights but the embedding would be drawn anew; leave one of them out"
            raise ValueError(f"grid_steps={self.grid_steps} with init_from={self.init_from!r}: {hint}")
        if self.grid_steps >= self.max_steps:
            raise ValueError(f"grid_steps={self.grid_steps} of max_steps={self.max_steps}: nothing would learn to copy")


CONFIGS = ModelConfig, CopyConfig, TextCopyConfig, TrainConfig  # all knobs


def unused_knobs(
    model_config: ModelConfig, copy_config: CopyConfig, text_config: TextCopyConfig, config: TrainConfig
) -> dict[str, str]:
    """Knobs that do nothing in this run, and what they are for."""
    encodings, unused = set(layer_encodings(model_config.pos_encoding, model_config.n_layer)), {}

    def only(used: bool, what: str, *names: str) -> None:
        if not used:
            unused.update(dict.fromkeys(names, what))

    only(copy_config.copy_task == "repeat-structure", "copy_task=repeat-structure", "repeat_p")
    unused |= unused_text_knobs(text_config)
    only(config.task == "copy", "task=copy", *(field.name for field in fields(CopyConfig)))
    text_knobs = {field.name for field in fields(TextCopyConfig)}
    only(config.task == "finetune", "task=finetune", *text_knobs)
    only(not (config.chats and config.val_chats), "examples that are made", *(text_knobs - {"first_weight"}))
    only(config.task != "copy", "task=pretrain and task=finetune", "tokenizer")
    only(model_config.qk_norm, "qk_norm=True", "qk_norm_init")
    rotates = bool(encodings - {"nope", "alibi"})
    only(rotates, "encodings that rotate", "freqs", "freqs_learned", "rotary_fraction", "rope_theta")
    only("auto-2d-rope" in encodings, "auto-2d-rope", "auto_gate", "auto_bias", "gate_lr_scale")
    only(not config.init_from, "weights that are drawn", "init_std", "shared_embed_init", "zero_init_residual")
    return unused


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of step 0 .. max_steps-1. The schedule starts again after grid_steps."""
    peak, last = config.learning_rate, config.max_steps - 1
    low = peak / 10 if config.min_lr is None else config.min_lr
    if step < config.grid_steps:
        return peak * min(1.0, (step + 1) / max(1, config.warmup_steps))
    step, last = step - config.grid_steps, last - config.grid_steps
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "wsd":
        decay_steps = config.max_steps - decay_start(config.max_steps)
        return low + (peak - low) * min(1.0, (last - step) / decay_steps)
    done = (step - config.warmup_steps) / max(1, last - config.warmup_steps)
    return low + (peak - low) * 0.5 * (1 + math.cos(math.pi * done))


def make_optimizer(model: Decoder, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with decay on matrices, none on norms, gates, and the scalars of frequencies and logits."""
    matrices, vectors, gates = [], [], []
    for name, p in model.named_parameters():
        if ".grid." in name:
            gates.append(p)
        elif name.endswith(".weight") and p.dim() == 2:
            matrices.append(p)
        else:
            vectors.append(p)
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay, "lr_scale": 1.0},
        {"params": vectors, "weight_decay": 0.0, "lr_scale": 1.0},
        {"params": gates, "weight_decay": 0.0, "lr_scale": config.gate_lr_scale},
    ]
    groups = [group for group in groups if group["params"]]
    fused = model.breaks.device.type in ("cuda", "cpu")
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=fused)


class Run:
    """The state of a run: model, optimizer, step, and the best validation loss so far."""

    def __init__(
        self, config: TrainConfig, task: tasks.Task, model: Decoder, resolved: dict[str, Any], saved: dict | None
    ):
        self.config, self.task, self.resolved, self.out = config, task, resolved, Path(config.out_dir)
        self.rank, self.world = rank_and_world()
        self.batch = lambda step, stream: task.batch(step, stream, self.rank, self.world, config.grad_accum)
        self.device = checkpoint.pick_device(config.device)
        if self.device.type == "cuda":  # cuDNN's attention plans anew for each shape; in pretraining there is one
            torch.backends.cuda.enable_cudnn_sdp(config.task == "pretrain")
        bfloat16 = config.dtype == "bfloat16" or config.dtype == "auto" and self.device.type == "cuda"
        self.autocast = checkpoint.autocast(self.device, "bfloat16" if bfloat16 else "float32")
        self.to_device = partial(checkpoint.to_device, self.device)
        self.model = model.to(self.device)
        self.model.recompute = config.recompute
        self.optimizer = make_optimizer(model, config)
        self.peak_flops = checkpoint.peak_flops(self.device)
        self.step, self.best = 0, math.inf
        if saved:
            self.step, self.best = saved["step"], saved["best"]
            if saved["optimizer"]:  # rank 0's alone
                self.optimizer.load_state_dict(saved["optimizer"])
        checkpoint.sync(model, self.optimizer)
        self.wrap()

    def wrap(self) -> None:
        """DDP and torch.compile around the model; again where the parameters that are trained have changed."""
        self.wrapped = self.model
        if self.world > 1:
            ids = [self.device.index] if self.device.type == "cuda" else None
            how = {"forward_sync_buffers": False, "gradient_as_bucket_view": True}
            self.wrapped = DistributedDataParallel(self.model, device_ids=ids, **how)
        if self.config.compile:
            self.wrapped = torch.compile(self.wrapped)

    def save(self, name: str) -> None:
        if self.rank == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            facts = {"config": self.resolved, "step": self.step, "best": self.best, "data": self.task.fingerprint}
            checkpoint.save(state | facts, self.out / name)

    @torch.no_grad()
    def validate(self) -> float:
        """Nats a target token, over batches that are the same at every evaluation and never in training; the model with
        the smallest is kept in best.pt."""
        loss, count = 0.0, 0
        for i in range(self.config.eval_steps):
            for tokens, targets in self.batch(i, "validation"):
                count += int((targets != IGNORE).sum())
                with self.autocast:
                    loss += self.model(*self.to_device(tokens, targets)).item()
        loss, count = checkpoint.sum_over_ranks(self.device, loss, count).tolist()
        if loss / count < self.best:
            self.best = loss / count
            self.save("best.pt")
        return loss / count

    def freeze_grid(self) -> None:
        """The grid is found: all but the embedding and the gates starts again."""
        torch.manual_seed(self.config.seed)  # every rank draws the same, and so does a run that goes on from here
        self.model.freeze_grid()
        self.optimizer.state.clear()
        self.best = math.inf  # what was best so far is thrown away
        self.wrap()

    def train_step(
        self, batch: data_copy.MicroBatches, upcoming: Future, stop: checkpoint.StopSignal
    ) -> tuple[dict[str, Any], bool, bool]:
        """One optimizer step. Returns the log's line, whether any rank has got a signal, and whether any has failed to
        make its next batch: `upcoming` is in the making, and is looked at here so that all ranks learn of a failure in
        the sum that they make anyway. RuntimeError for a loss that is not finite."""
        began, config, model = time.perf_counter(), self.config, self.model
        lr = learning_rate(config, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        n_targets = sum(int((targets != IGNORE).sum()) for _, targets in batch)
        n_targets = checkpoint.sum_over_ranks(self.device, n_targets).float()
        loss = torch.zeros((), device=self.device)
        for i, (tokens, targets) in enumerate(batch):
            last = i == len(batch) - 1
            with nullcontext() if last or self.world == 1 else self.wrapped.no_sync():
                weights = [self.task.weights(targets)] if self.task.weights else []
                with self.autocast:
                    piece = self.wrapped(*self.to_device(tokens, targets, *weights)) / n_targets[0]
                (piece * self.world).backward()  # DDP averages over ranks; the sum over targets is what is wanted
            loss += piece.detach()
        if self.step < config.grid_steps:  # what the gates look at stays as it is, or they would not fit what follows
            for name, p in model.named_parameters():
                if "embed" in name or "norm" in name:
                    p.grad = None
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        failed = upcoming.exception() is not None
        n_tokens = sum(tokens.size for tokens, _ in batch)
        pairs = sum(tokens.size * tokens.shape[1] for tokens, _ in batch)  # of queries and keys, for the FLOPs
        total = checkpoint.sum_over_ranks(self.device, loss, bool(stop.number), failed, n_tokens, pairs)
        loss, stopped, failed, n_tokens, pairs, norm = torch.cat([total, norm.to(total)[None]]).tolist()  # one sync
        if not math.isfinite(loss) or not math.isfinite(norm):
            hint = f"give --init_from={self.out}/last.pt, a lower --learning_rate and another --out_dir"
            raise RuntimeError(f"step {self.step}: loss {loss}, gradient norm {norm}; to go on from there, {hint}")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        seconds = time.perf_counter() - began
        line = {"step": self.step - 1, "loss": loss, "lr": lr, "grad_norm": norm, "ms": round(seconds * 1e3, 3)}
        line["tokens_per_s"] = round(n_tokens / seconds)
        if self.peak_flops:
            line["mfu"] = round(model.flops(n_tokens, pairs) / seconds / self.peak_flops / self.world, 4)
        return line, bool(stopped), bool(failed)


def start_run(
    model_config: ModelConfig,
    copy_config: CopyConfig,
    text_config: TextCopyConfig,
    config: TrainConfig,
    given: Mapping[str, str],
) -> Run:
    """A new run, or one that goes on. Where weights come from elsewhere, so does model_config, but for the knobs in
    `given`. ValueError if out_dir holds another run, RuntimeError if the ranks differ."""
    changes = {f.name: getattr(model_config, f.name) for f in fields(ModelConfig) if f.name in given}
    out, leader = Path(config.out_dir), rank_and_world()[0] == 0
    find = partial(checkpoint.find_run, out, config.init, config.schedule, config.max_steps)
    saved = checkpoint.from_rank_0(on_all_ranks(lambda: find() if leader else None))
    model = None
    torch.manual_seed(config.seed)  # of all weights that are drawn, also of those that init_from lacks
    if config.init_from and saved:
        model_config = checkpoint.model_config_of(saved, **changes)
    elif config.init_from:
        model, known = on_all_ranks(lambda: hf.load_start(config.init_from, changes))
        model_config = model.config
    if config.grid_steps and not model_config.learns_one_grid:
        raise ValueError(f"grid_steps={config.grid_steps} needs layers of auto-2d-rope, with saturating gates")
    if config.grid_steps and model_config.tie_weights:
        hint = "the embedding does not learn in these steps, and it would be the output layer too"
        raise ValueError(f"grid_steps={config.grid_steps} with tie_weights=True: {hint}")
    task = on_all_ranks(lambda: tasks.make_task(model_config, copy_config, text_config, config))
    if model:
        checkpoint.check_same_tokens(config.init_from, known, task.fingerprint)
    model_config.vocab_size = model_config.vocab_size or task.breaks.shape[1]
    if model_config.vocab_size != task.breaks.shape[1]:
        hint = "leave it None, or give as many or more"
        raise ValueError(f"vocab_size={model_config.vocab_size}: the data has {task.breaks.shape[1]} tokens; {hint}")
    all_configs = model_config, copy_config, text_config, config
    configurator.check_used(given, unused_knobs(*all_configs), *all_configs)
    resolved = {name: value for part in all_configs for name, value in asdict(part).items()}
    checkpoint.check_same_ranks(resolved | task.fingerprint | task.contents)
    if saved:
        checkpoint.check_same_run(out, saved, resolved, task.fingerprint)
    if saved:
        model = checkpoint.load_model(saved, block_size=model_config.block_size)
    elif model is None:
        model = Decoder(model_config, task.breaks)
    run = Run(config, task, model, resolved, saved)
    if run.rank == 0:
        about = f"{model_config.pos_encoding}, {sum(p.numel() for p in model.parameters()):,} parameters, {run.device}"
        print(f"{config.out_dir}: {about}, steps {run.step} to {config.max_steps}")
    return run


def train(
    model_config: ModelConfig,
    copy_config: CopyConfig,
    text_config: TextCopyConfig,
    config: TrainConfig,
    given: Mapping[str, str] | None = None,
) -> None:
    """Trains to max_steps and leaves out_dir complete; `given` names the knobs that were set, see start_run.

    RuntimeError for a loss that is not finite; SystemExit(128 + n) after signal n. Either leaves a checkpoint of the
    last good step.
    """
    out, (rank, world) = Path(config.out_dir), rank_and_world()
    if config.batch_size < config.grad_accum * world:
        needed = f"grad_accum={config.grad_accum} x {world} processes"
        raise ValueError(f"batch_size={config.batch_size}: expected at least {needed}")
    with on_all_ranks(lambda: configurator.lock(out) if rank == 0 else nullcontext()):
        run = start_run(model_config, copy_config, text_config, config, given or {})
        validated = checkpoint.gather(checkpoint.last_validated(out))[0]
        if run.step >= config.max_steps and validated >= config.max_steps:
            if rank == 0:
                print(f"{config.out_dir}: all {run.step} steps are done already")
            return
        logs = on_all_ranks(lambda: checkpoint.Logs(out, run.step, config.wandb, run.resolved))
        if rank == 0:
            configurator.save(out / "config.py", run.model.config, copy_config, text_config, config)
            checkpoint.write_facts(out / "run.json", run.model, run.task.fingerprint | run.task.contents)
        if run.step == 0:
            run.save("last.pt")  # from here on out_dir belongs to this config
        run_steps(run, logs)


def run_steps(run: Run, logs: checkpoint.Logs) -> None:
    """The training loop, from run.step to max_steps."""
    config, saved_at, stop = run.config, run.step, checkpoint.StopSignal()
    bar = checkpoint.progress(config.max_steps, "step", initial=run.step)
    loader = ThreadPoolExecutor(1)  # makes the next batch while a step is computed
    batch = on_all_ranks(lambda: run.batch(run.step, "train"))
    try:
        while True:
            finished = run.step == config.max_steps
            if run.step and (finished or run.step % config.eval_interval == 0):  # here, so that no kill skips it
                val_loss = run.validate()
                logs.write("validation", {"step": run.step, "val_loss": val_loss})
                bar.set_description(f"val loss {val_loss:.4f}")
            if finished:
                break
            if run.step and run.step == config.grid_steps:
                run.freeze_grid()
            upcoming = loader.submit(run.batch, run.step + 1, "train")
            line, stopped, failed = run.train_step(batch, upcoming, stop)
            logs.write("log", line)
            bar.update()
            bar.set_postfix(loss=f"{line['loss']:.4f}", refresh=False)
            if config.schedule == "wsd" and run.step == decay_start(config.max_steps):
                run.save("stable.pt")
            if stopped or failed or run.step == config.max_steps or run.step % config.checkpoint_interval == 0:
                run.save("last.pt")
                saved_at = run.step
            if stopped:
                number = stop.number or signal.SIGTERM
                if run.rank == 0:
                    where = f"stopped after step {run.step}; the same command goes on"
                    print(f"\nsignal {number}: {where}", file=sys.stderr)
                sys.exit(128 + number)
            if run.step < config.max_steps:
                batch = upcoming.result()  # raises what its making raised
                if failed:
                    raise RuntimeError(f"another rank has no batch for step {run.step}; it says why")
    except Exception:
        if run.step > saved_at:  # parameters and optimizer are those of the last whole step
            run.save("last.pt")
        raise
    finally:
        bar.close()
        loader.shutdown(wait=False, cancel_futures=True)


def main() -> None:
    given: dict[str, str] = {}
    configs = configurator.configure(*CONFIGS, doc=__doc__, given=given)
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("nccl" if checkpoint.pick_device(configs[-1].device).type == "cuda" else "gloo")
    try:
        train(*configs, given=given)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    configurator.run_cli(main)
