"""Benchmarks: ours beside its peers, in one process and in turn, so that what else the machine does hits all alike.

    python -m scripts.bench rotary --shape=8,2048,16,8,128 --dtype=bfloat16    # q and k, forward and backward
    python -m scripts.bench loss --repeats=3                  # output layer and loss: time and memory
    python -m scripts.bench train_step --repeats=20           # forward, backward, AdamW: RoPE, 2D-RoPE, Hugging Face
    python -m scripts.bench generate --rows=1 --tokens=200 --layers=4 --width=128 --repeats=5  # greedy, over a KV cache
    python -m scripts.bench copy_eval --repeats=3             # verdicts on long copies, beside transformers' generate
    python -m scripts.bench rotary --help                     # all knobs

`x` is a variant's time over the first variant's in the same round, the median of all rounds. On a CPU `ours` and
`plain torch` of `rotary` are the same code: their difference is the noise. OMP_NUM_THREADS sets the threads.
A new benchmark is a function of BenchConfig and knobs of its own that returns rows, entered in BENCHMARKS.
"""

import functools
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad

import configurator
import data_copy
import hf
import rope2d
import sample
from checkpoint import pick_device
from eval import Verdict, free_running, teacher_forced, verdict
from model import IGNORE, LOGITS_PER_CHUNK, ChunkedLoss, Decoder, ModelConfig


@dataclass
class BenchConfig:
    """All benchmarks"""

    json: str = ""  # file to write the figures to
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: the first of these that there is
    repeats: int = 21  # rounds; in each, every variant runs once
    variants: tuple[str, ...] = ()  # only these, by name; empty: all that run here


@dataclass
class RotaryConfig:
    """rotary"""

    shape: tuple[int, int, int, int, int] = (4, 1024, 8, 8, 64)  # B, T, H, Hkv, D
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of q and k


@dataclass
class LossConfig:
    """loss"""

    tokens: int = 4096  # in the batch
    width: int = 256  # of their states
    vocab_size: int = 128_256  # Llama-3's


@dataclass
class DecoderConfig:
    """train_step and generate"""

    rows: int = 8  # sequences side by side
    tokens: int = 256  # in each; generate: new ones, after a prompt of 16
    layers: int = 6
    heads: int = 4
    width: int = 256  # the MLP's hidden width is three times that
    vocab_size: int = 4096


@dataclass
class CopyEvalConfig:
    """copy_eval"""

    length: int = 2560  # tokens in each of two strings, one after the other


def race(variants: dict[str, Callable], bench: BenchConfig, facts: Callable[..., dict] | None = None) -> list[dict]:
    """Times all variants in turn, in a new order each round; a row of figures for each.

    A variant is a function. Its first call is not timed: it makes and compiles what is needed. One that fails there is
    left out and the reason printed; the first variant raises. facts(result, first, median) adds figures: from what this
    first call and the first variant's returned, and the median time in seconds. ValueError for an unknown variant.
    """
    names = bench.variants or tuple(variants)
    if unknown := set(names) - set(variants):
        raise ValueError(f"variants: no {', '.join(sorted(unknown))} here; there are {', '.join(variants)}")
    results = {}
    for name in names:
        try:
            results[name] = variants[name]()
        except Exception as error:  # no package, no compiler, no memory: peers fail in many ways
            if name == names[0]:
                raise
            print(f"{name} left out: {repr(error)[:200]}")
    times: dict[str, list[float]] = {name: [] for name in results}
    order = random.Random(0)  # each variant leaves caches and allocator in a state of its own to the next
    for _ in range(bench.repeats):
        for name in order.sample(list(results), len(results)):
            times[name].append(seconds(variants[name], bench.device))
    rows = []
    for name, own in times.items():
        median = statistics.median(own)
        x = statistics.median(a / b for a, b in zip(own, times[names[0]], strict=True))
        row = {"variant": name, "median_s": median, "min_s": min(own), "max_s": max(own), "x": x}
        row["facts"] = facts(results[name], results[names[0]], median) if facts else {}
        if bench.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            variants[name]()
            row["facts"]["peak_MB"] = (torch.cuda.max_memory_allocated() - before) / 1e6
        rows.append(row)
    return rows


def seconds(run: Callable[[], Any], device: str | torch.device) -> float:
    """Of one run; on CUDA the GPU's."""
    if torch.device(device).type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.zeros(2**30, dtype=torch.int8, device=device)  # empties the L2 cache; meanwhile the launches are queued
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    began = time.perf_counter()
    run()
    if torch.device(device).type == "mps":
        torch.mps.synchronize()
    return time.perf_counter() - began


def linux_peak(run: Callable[[], Any]) -> float:
    """Megabytes that a run takes on a CPU, for tensors above 32 MiB: of smaller ones malloc keeps some for later."""
    Path("/proc/self/clear_refs").write_text("5")  # from now on VmHWM, the peak, starts at what is used now
    before = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]  # KiB
    run()
    peak = Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]
    return (int(peak) - int(before)) * 1024 / 1e6


def rotary(bench: BenchConfig, knobs: RotaryConfig) -> list[dict]:
    B, T, H, Hkv, D = knobs.shape
    if min(knobs.shape) < 1 or D % 2:
        raise ValueError(f"shape={knobs.shape}: expected B, T, H, Hkv, D of at least 1, and an even D")
    like = {"device": bench.device, "dtype": getattr(torch, knobs.dtype)}
    angles = torch.randn(B, T, D // 2, device=bench.device)
    cos, sin = angles.cos(), angles.sin()
    q, k, _ = torch.randn(B, T, H + 2 * Hkv, D, **like).split([H, Hkv, Hkv], dim=2)  # views, as model.py has them
    own = [q.requires_grad_(), k.requires_grad_()]
    grads = [torch.randn(B, T, H, D, **like), torch.randn(B, T, Hkv, D, **like)]
    # Theirs: q and k apart, (B, H, T, D) as views of what a projection returns; tables for whole heads, in their dtype.
    theirs = [x.detach().clone().transpose(1, 2).requires_grad_() for x in own]
    their_grads = [x.transpose(1, 2) for x in grads]
    tables = [torch.cat([table, table], dim=-1).to(q.dtype) for table in (cos, sin)]

    def plain(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rope2d.rotate(q, cos, sin), rope2d.rotate(k, cos, sin)

    def hugging_face() -> tuple[Tensor, ...]:
        from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

        return grad(apply_rotary_pos_emb(*theirs, *tables), theirs, their_grads)

    compiled = torch.compile(plain, fullgraph=True)
    variants = {
        "ours": lambda: grad(rope2d.rotate_qk(q, k, cos, sin), own, grads),
        "plain torch": lambda: grad(plain(q, k), own, grads),
        "torch.compile": lambda: grad(compiled(q, k), own, grads),
        "hugging face": hugging_face,
        "copy": lambda: grad([x * 1 for x in own], own, grads),  # as many bytes are read and written: the bound
    }
    return race(variants, bench)


def loss(bench: BenchConfig, knobs: LossConfig) -> list[dict]:
    x = torch.randn(knobs.tokens, knobs.width, device=bench.device, requires_grad=True)
    weight = (0.02 * torch.randn(knobs.vocab_size, knobs.width, device=bench.device)).requires_grad_()
    targets = torch.randint(knobs.vocab_size, (knobs.tokens,), device=bench.device)
    chunk = max(1, LOGITS_PER_CHUNK[bench.device] // knobs.vocab_size)  # as Decoder.forward has it
    variants = {
        "ours": lambda: grad(ChunkedLoss.apply(x, weight, targets, None, chunk), [x, weight]),
        "plain torch": lambda: grad(F.cross_entropy(x @ weight.T, targets, reduction="sum"), [x, weight]),
    }
    rows = race(variants, bench)
    if bench.device == "cpu" and sys.platform == "linux":
        for row in rows:
            row["facts"]["peak_MB"] = linux_peak(variants[row["variant"]])
    return rows


def decoder(knobs: DecoderConfig, block_size: int, encoding: str, device: str) -> Decoder:
    """The same weights for every encoding, large, or greedy decoding would repeat a token. Every 32nd breaks a line."""
    sizes = {"n_layer": knobs.layers, "n_head": knobs.heads, "n_embd": knobs.width, "vocab_size": knobs.vocab_size}
    kind = {"tie_weights": True, "qk_norm": True, "zero_init_residual": False, "init_std": 0.2}
    torch.manual_seed(0)
    config = ModelConfig(pos_encoding=encoding, mlp_dim=3 * knobs.width, block_size=block_size, **sizes, **kind)
    token_bytes = [b"a" if i % 32 else b"\n" for i in range(knobs.vocab_size)]
    return Decoder(config, rope2d.break_table(token_bytes)).to(device)


@functools.cache
def to_hugging_face(model: Decoder) -> nn.Module:
    """The same model in transformers, as fast as it goes there: fused attention, no mask but the causal one."""
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        hf.save(model, None, folder)
        peer = transformers.Qwen3ForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    return peer.to(model.breaks.device)


def train_step(bench: BenchConfig, knobs: DecoderConfig) -> list[dict]:
    B, T = knobs.rows, knobs.tokens

    def training(name: str) -> Iterator[list[Tensor]]:
        """Makes the model, then trains a step each time it is asked; yields the list of losses, which grows."""
        model = decoder(knobs, T, "2d-rope" if name == "2d-rope" else "rope", bench.device)
        peer = name.startswith("hugging face")
        model = (to_hugging_face(model) if peer else model).train()
        run = torch.compile(model) if name.endswith("compiled") else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=bench.device != "mps")
        losses: list[Tensor] = []
        while True:
            drawn = torch.rand(B, T, generator=torch.Generator().manual_seed(len(losses)))
            tokens = (knobs.vocab_size * drawn**3).long().to(bench.device)  # low ids often: there is something to learn
            if peer:
                loss = run(tokens, labels=tokens, use_cache=False).loss
            else:
                loss = run(tokens, F.pad(tokens[:, 1:], (0, 1), value=IGNORE)) / (B * (T - 1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            yield losses

    def facts(own: list[Tensor], first: list[Tensor], median: float) -> dict:
        apart = max(float((a - b).abs()) for a, b in zip(own, first, strict=False))  # one may have had a step more
        return {"tokens_per_s": B * T / median, "losses_apart": apart}

    names = ("rope", "2d-rope", "hugging face", "rope compiled", "hugging face compiled")
    return race({name: training(name).__next__ for name in names}, bench, facts)


def generate(bench: BenchConfig, knobs: DecoderConfig) -> list[dict]:
    n = knobs.tokens
    model = decoder(knobs, 16 + n, "rope", bench.device)
    prompts = torch.randint(knobs.vocab_size, (knobs.rows, 16), device=bench.device)

    def facts(own: Tensor, first: Tensor, median: float) -> dict:
        return {"tokens_per_s": knobs.rows * n / median, "same_tokens": torch.equal(own, first)}

    variants = {
        "ours": lambda: torch.stack(list(sample.generate(model, prompts.tolist(), n)), dim=1),  # (B, n)
        "hugging face": lambda: to_hugging_face(model).generate(prompts, max_new_tokens=n, do_sample=False)[:, 16:],
    }
    return race(variants, bench, facts)


@torch.no_grad()
def copier(length: int, device: str) -> Decoder:
    """A model made by hand, in toy_copy's shape with RoPE, that copies strings of this length, but not `*` in them.

    All tokens have the same k, and the same q, which is k rotated back by d, so that each attends at distance d:
    length + 2, which is how far it is from the token whose copy comes next.
    """
    V, C, D = len(data_copy.VOCAB), 128, 128
    sizes = {"vocab_size": V, "n_embd": C, "head_dim": D, "block_size": 2 * length + 5}
    config = ModelConfig(pos_encoding="rope", tie_weights=True, qk_norm=True, **sizes)
    model = Decoder(config, rope2d.break_table(data_copy.TOKEN_BYTES))
    model.embed.weight.copy_(torch.eye(V, C))  # a channel for each token
    model.embed.weight[:, V] = 1  # and one for all
    attention = model.blocks[0].attention
    angles = model.rotary["rope"].angles(torch.full((3, 1, 1), length + 2))[0, 0]  # (D/2,)
    q, k, v = attention.qkv.weight.zero_().view(3, -1, D, C)[:, 0]  # of the first head, (D, C) each
    q[:, V] = torch.cat([angles.cos(), -angles.sin()])
    k[: D // 2, V] = 1
    v[:V, :V] = torch.eye(V)
    v[data_copy.STAR] = 0
    attention.out.weight[:V, :V] = torch.eye(V)
    attention.q_norm.weight.fill_(8)  # then the peak is 21.6 nats above its neighbours
    attention.k_norm.weight.fill_(8)
    return model.to(device)


def copy_eval(bench: BenchConfig, knobs: CopyEvalConfig) -> list[dict]:
    n, newline = knobs.length, data_copy.NEWLINE
    model = copier(n, bench.device)
    sources = data_copy.evaluation_strings("imbalanced", n, n, 2, seed=0)
    sources[1][n // 2] = data_copy.STAR

    def hugging_face(model: Decoder, group: list[np.ndarray], newline: int) -> list[Verdict]:
        tokens, targets = map(torch.from_numpy, data_copy.pack(np.stack(group), np.array([n])))
        prompt = tokens[:, : n + 5].to(bench.device)
        written = to_hugging_face(model).generate(prompt, max_new_tokens=n + 1, do_sample=False)[0, n + 5 :].cpu()
        return [verdict(written != targets[0, n + 4 :])]

    def first_errors(judge: Callable[..., list[Verdict]]) -> list[int | None]:
        return [judge(model, [source], newline)[0].first_error for source in sources]

    def facts(own: list[int | None], first: list[int | None], median: float) -> dict:
        return {"tokens_per_s": len(sources) * (n + 1) / median, "same_verdicts": own == first}

    judges = {"teacher-forced": teacher_forced, "free-running": free_running, "hugging face": hugging_face}
    return race({name: functools.partial(first_errors, judge) for name, judge in judges.items()}, bench, facts)


BENCHMARKS = {
    "rotary": (rotary, RotaryConfig),
    "loss": (loss, LossConfig),
    "train_step": (train_step, DecoderConfig),
    "generate": (generate, DecoderConfig),
    "copy_eval": (copy_eval, CopyEvalConfig),
}


def machine() -> dict[str, Any]:
    """What figures depend on, the code aside."""
    cpu = platform.processor() or platform.machine()
    if sys.platform == "linux":
        cpu = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition("\n")[0].strip("\t: ") or cpu
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": cpu, "gpu": gpu, "threads": torch.get_num_threads(), "torch": torch.__version__}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("--help", "-h"):
        return print(__doc__)
    if name not in BENCHMARKS:
        raise ValueError(f"benchmark {name!r}: expected {' or '.join(BENCHMARKS)} first, then its knobs or --help")
    run, knobs_class = BENCHMARKS[name]
    bench, knobs = configurator.configure(BenchConfig, knobs_class, argv=sys.argv[2:], doc=__doc__)
    for key, value in (*vars(bench).items(), *vars(knobs).items()):
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{key}={value}: expected at least 1")
    bench.device = pick_device(bench.device).type
    torch.manual_seed(0)
    rows = run(bench, knobs)
    about = {"benchmark": name, "machine": machine(), "settings": {**vars(bench), **vars(knobs)}}
    print(", ".join(f"{key} {value}" for key, value in {**about["machine"], **about["settings"]}.items()))
    print(f"{'variant':24}{'median ms':>10}{'min':>10}{'max':>10}{'x':>7}")
    for row in rows:
        times = "".join(f"{1e3 * row[key]:>10.3f}" for key in ("median_s", "min_s", "max_s"))
        facts = "".join(f"  {key} {value:.4g}" for key, value in row["facts"].items())
        print(f"{row['variant']:24}{times}{row['x']:>7.2f}{facts}")
    if bench.json:
        configurator.write_json(bench.json, {**about, "rows": rows})
        print(f"rows: {bench.json}")


if __name__ == "__main__":
    configurator.run_cli(main)
