"""Benchmarks: ours beside its peers, in one process and in turn, so that what else the machine does hits all alike.

    python -m scripts.bench rotary --json=out/rotary.json     # to rotate q and k, forward and backward
    python -m scripts.bench rotary --shape=8,2048,16,8,128 --dtype=bfloat16 --variants=ours,copy
    python -m scripts.bench scan --rows=8 --tokens=2048       # Auto-2D's affine scan
    python -m scripts.bench loss --repeats=3                  # output layer and loss: time, memory, gradients
    python -m scripts.bench train_step --repeats=20           # forward, backward, AdamW: RoPE, 2D-RoPE, Hugging Face
    python -m scripts.bench generate --rows=1 --tokens=200 --layers=4 --width=128 --repeats=5  # greedy, over a KV cache
    python -m scripts.bench copy_eval --repeats=3             # verdicts on long copies, beside transformers' generate
    python -m scripts.bench tokenize --repeats=3              # documents to shards, beside tiktoken and datasets.map
    python -m scripts.bench rotary --help                     # all knobs

`x` is a variant's time over the first variant's in the same round, the median of all rounds. On a CPU `ours` and
`plain torch` of `rotary` are the same code: their difference is the noise.
A new benchmark is a function of BenchConfig and knobs of its own that returns rows, entered in BENCHMARKS.
"""

import functools
import importlib
import json
import math
import os
import platform
import random
import statistics
import subprocess
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

import configurator
import data_copy
import data_dclm
import hf
import rope2d
import sample
from checkpoint import pick_device
from eval import free_running, teacher_forced, verdict
from model import IGNORE, LOGITS_PER_CHUNK, ChunkedLoss, Decoder, ModelConfig
from tokenizer import load_tokenizer

UNKNOWN = data_copy.N_SYMBOLS - 1  # the one token that `copier` does not copy


@dataclass
class BenchConfig:
    """All benchmarks"""

    json: str = ""  # file to write the figures to
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: the first of these that there is
    repeats: int = 21  # rounds; in each, every variant runs once
    threads: int = torch.get_num_threads()  # of torch on the CPU
    variants: tuple[str, ...] = ()  # only these, by name; empty: all that run here


@dataclass
class RotaryConfig:
    """rotary"""

    shape: tuple[int, int, int, int, int] = (4, 1024, 8, 8, 64)  # B, T, H, Hkv, D
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of q and k


@dataclass
class ScanConfig:
    """scan"""

    rows: int = 8  # sequences side by side
    tokens: int = 2048  # in each


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

    length: int = 2560  # tokens in a string
    strings: int = 2  # one after the other; every second one has a token that the model cannot copy


@dataclass
class TokenizeConfig:
    """tokenize"""

    megabytes: int = 200  # of text, Python's standard library over and over, each document with a line of its own
    tokenizer: str = "llama3"  # llama3, bytes, a tiktoken encoding's name, or a path of Llama-3's tokenizer.model
    processes: int = os.cpu_count() or 1  # of ours and of datasets.map


def race(work: str, variants: dict[str, Callable[[], Any]], bench: BenchConfig) -> tuple[list[dict], dict[str, Any]]:
    """Times all variants in turn, in a new order each round. Returns a row for each, and what their first calls return.

    A variant is a function; its first call, which is not timed, makes and compiles what it needs. One that fails there
    is left out and the reason printed; the first one raises. ValueError for an unknown name in bench.variants.
    """
    names = bench.variants or tuple(variants)
    for name in names:
        if name not in variants:
            raise ValueError(f"variants: no {name!r} in this benchmark; there are {', '.join(variants)}")
    results = {}
    for name in names:
        try:
            results[name] = variants[name]()
        except Exception as error:  # no package, no compiler, no memory: peers fail in many ways
            if name == names[0]:
                raise
            print(f"{name} left out: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
    times: dict[str, list[float]] = {name: [] for name in results}
    order = random.Random(0)  # each variant leaves caches and allocator in a state of its own to the next
    for _ in range(bench.repeats):
        for name in order.sample(list(results), len(results)):
            times[name].append(seconds(variants[name], bench.device))
    rows = []
    for name, own in times.items():
        x = statistics.median(a / b for a, b in zip(own, times[names[0]], strict=True))
        row = {"work": work, "variant": name, "median_s": statistics.median(own), "min_s": min(own), "max_s": max(own)}
        rows.append(row | {"x": x, "facts": {}})
        if bench.device == "cuda":
            rows[-1]["facts"]["peak_MB"] = peak_megabytes(variants[name], bench.device)
    return rows, results


def seconds(run: Callable[[], Any], device: str) -> float:
    """Of one run; on CUDA the GPU's."""
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.zeros(2**30, dtype=torch.int8, device=device)  # empties the L2 cache; meanwhile the launches are queued
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    began = time.perf_counter()
    run()
    if device == "mps":
        torch.mps.synchronize()
    return time.perf_counter() - began


def peak_megabytes(run: Callable[[], Any], device: str) -> float:
    """What a run takes on top of what is allocated. On a CPU, where Linux tells, it is right for tensors above 32 MiB:
    of smaller ones malloc keeps some for the next run."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    Path("/proc/self/clear_refs").write_text("5")  # from now on VmHWM is the peak
    before = Path("/proc/self/status").read_text().split("VmRSS:")[1]
    run()
    peak = Path("/proc/self/status").read_text().split("VmHWM:")[1]
    return (int(peak.split()[0]) - int(before.split()[0])) * 1024 / 1e6


def gradients(function: Callable, inputs: list[Tensor], grads: list[Tensor] | None) -> tuple[Tensor, ...]:
    """Forward and backward. grads: of what the function returns; None: it returns a loss."""
    return torch.autograd.grad(function(*inputs), inputs, grads)


def rotary(bench: BenchConfig, knobs: RotaryConfig) -> list[dict]:
    B, T, H, Hkv, D = knobs.shape
    if min(knobs.shape) < 1 or D % 2:
        raise ValueError(f"shape={knobs.shape}: expected B, T, H, Hkv, D of at least 1, and an even D")
    dtype = getattr(torch, knobs.dtype)
    angles = torch.randn(B, T, D // 2, device=bench.device)
    cos, sin = angles.cos(), angles.sin()
    inputs = [torch.randn(B, T, n, D, device=bench.device, dtype=dtype, requires_grad=True) for n in (H, Hkv)]
    grads = [torch.randn_like(x) for x in inputs]
    tables = [torch.cat([table, table], dim=-1).to(dtype) for table in (cos, sin)]  # peers': of whole heads, in dtype

    def plain(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rope2d.rotate(q, cos, sin), rope2d.rotate(k, cos, sin)

    def peer(module: str, name: str, q: Tensor, k: Tensor) -> list[Tensor]:
        function = getattr(importlib.import_module(module), name)
        return [y.transpose(1, 2) for y in function(q.transpose(1, 2), k.transpose(1, 2), *tables)]  # (B, H, T, D)

    functions = {
        "ours": lambda q, k: rope2d.rotate_qk(q, k, cos, sin),
        "plain torch": plain,
        "torch.compile": torch.compile(plain, fullgraph=True),
        "hugging face": functools.partial(peer, "transformers.models.qwen3.modeling_qwen3", "apply_rotary_pos_emb"),
        "copy": lambda q, k: (q * 1, k * 1),  # reads and writes as many bytes: the bound
    }
    if bench.device == "cuda":
        functions["liger"] = functools.partial(peer, "liger_kernel.transformers.rope", "liger_rotary_pos_emb")
    variants = {name: functools.partial(gradients, f, inputs, grads) for name, f in functions.items()}
    return race("forward+backward", variants, bench)[0]


def scan(bench: BenchConfig, knobs: ScanConfig) -> list[dict]:
    B, T = knobs.rows, knobs.tokens
    dtype = torch.float32 if bench.device == "mps" else torch.float64  # as rope2d.AutoGrid has it
    a, b, grad = torch.rand(3, B, T + 1, device=bench.device, dtype=dtype)
    inputs = [x.requires_grad_() for x in (a[:, 1:], b[:, 1:], b[:, 0])]

    def loop(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
        h = [start]
        for a_t, b_t in zip(a.unbind(-1), b.unbind(-1), strict=True):
            h.append(a_t * h[-1] + b_t)
        return torch.stack(h, dim=-1)

    functions = {"ours": rope2d.scan, "plain torch": rope2d.AffineScan.apply, "loop": loop}
    variants = {name: functools.partial(gradients, f, inputs, [grad]) for name, f in functions.items()}
    return race("forward+backward", variants, bench)[0]


def loss(bench: BenchConfig, knobs: LossConfig) -> list[dict]:
    x = torch.randn(knobs.tokens, knobs.width, device=bench.device, requires_grad=True)
    weight = (0.02 * torch.randn(knobs.vocab_size, knobs.width, device=bench.device)).requires_grad_()
    targets = torch.randint(knobs.vocab_size, (knobs.tokens,), device=bench.device)
    chunk = max(1, LOGITS_PER_CHUNK[bench.device] // knobs.vocab_size)  # as Decoder.forward has it
    functions = {
        "ours": lambda x, weight: ChunkedLoss.apply(x, weight, targets, chunk),
        "plain torch": lambda x, weight: F.cross_entropy(x @ weight.T, targets, reduction="sum"),
    }
    variants = {name: functools.partial(gradients, f, [x, weight], None) for name, f in functions.items()}
    rows, found = race("forward+backward", variants, bench)
    for row in rows:
        pairs = zip(found[row["variant"]], found[rows[0]["variant"]], strict=True)
        row["facts"]["gradients"] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        if bench.device == "cpu" and sys.platform == "linux":
            row["facts"]["peak_MB"] = peak_megabytes(variants[row["variant"]], bench.device)
    return rows


def decoder(knobs: DecoderConfig, block_size: int, encoding: str, device: str) -> Decoder:
    """The same weights for every encoding. Every 32nd token breaks a line."""
    sizes = {"n_layer": knobs.layers, "n_head": knobs.heads, "n_embd": knobs.width, "vocab_size": knobs.vocab_size}
    kind = {"pos_encoding": encoding, "tie_weights": True, "qk_norm": True, "zero_init_residual": False}
    torch.manual_seed(0)
    config = ModelConfig(mlp_dim=3 * knobs.width, block_size=block_size, **sizes, **kind)
    return Decoder(config, torch.arange(knobs.vocab_size) % 32 == 0).to(device)


@functools.cache
def to_hugging_face(model: Decoder) -> nn.Module:
    """The same model in transformers, as fast as it goes there: fused attention, no mask but the causal one."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        hf.save(model, None, folder)
        peer = transformers.Qwen3ForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    return peer.to(model.newlines.device)


def generate_there(model: Decoder, prompts: Tensor, n: int) -> Tensor:
    """n tokens (B, n) that transformers' greedy decoding puts after prompts (B, T)."""
    how = {"attention_mask": torch.ones_like(prompts), "do_sample": False, "pad_token_id": 0}
    return to_hugging_face(model).generate(prompts, max_new_tokens=n, **how)[:, prompts.shape[1] :]


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

    names = ("rope", "2d-rope", "hugging face", "rope compiled", "hugging face compiled")
    rows, losses = race("step", {name: training(name).__next__ for name in names}, bench)
    for row in rows:
        difference = torch.stack(losses[row["variant"]]) - torch.stack(losses[rows[0]["variant"]])
        row["facts"] = {"tokens_per_s": B * T / row["median_s"], "losses": float(difference.abs().max())}
    return rows


def generate(bench: BenchConfig, knobs: DecoderConfig) -> list[dict]:
    n = knobs.tokens
    model = decoder(knobs, 16 + n, "rope", bench.device)
    prompts = torch.randint(knobs.vocab_size, (knobs.rows, 16), device=bench.device)

    variants = {
        "ours": lambda: torch.stack(list(sample.generate(model, prompts.tolist(), n)), dim=1),  # (B, n)
        "hugging face": lambda: generate_there(model, prompts, n),
    }
    rows, tokens = race("greedy", variants, bench)
    for row in rows:
        row["facts"]["tokens_per_s"] = knobs.rows * n / row["median_s"]
        row["facts"]["same_tokens"] = torch.equal(tokens[row["variant"]], tokens[rows[0]["variant"]])
    return rows


@torch.no_grad()
def copier(length: int, device: str) -> Decoder:
    """A model made by hand, in toy_copy's shape with RoPE, that copies strings of this length but for one token.

    Its first head has the same q for all tokens, and the same k. As q is k rotated back by d, it attends at distance d:
    length + 2, which is how far each token is from the one whose copy comes next.
    """
    V, C, D = len(data_copy.VOCAB), 128, 128
    sizes = {"vocab_size": V, "n_embd": C, "head_dim": D, "block_size": 2 * length + 5}
    model = Decoder(ModelConfig(pos_encoding="rope", tie_weights=True, qk_norm=True, **sizes), torch.zeros(V))
    model.embed.weight.zero_()
    model.embed.weight[:, :V] = torch.eye(V)  # a channel for each token
    model.embed.weight[:, V] = 1  # and one for all
    attention = model.blocks[0].attention
    angles = model.rotary["rope"].angles(torch.full((3, 1, 1), length + 2))[0, 0]  # (D/2,)
    q, k, v = attention.qkv.weight.zero_().view(3, -1, D, C)[:, 0]  # of the first head, (D, C) each
    q[:, V] = torch.cat([angles.cos(), -angles.sin()])
    k[: D // 2, V] = 1
    v[:V, :V] = torch.eye(V)
    v[UNKNOWN] = 0
    attention.out.weight[:V, :V] = torch.eye(V)
    attention.q_norm.weight.fill_(8)  # then the peak is 21.6 nats above its neighbours
    attention.k_norm.weight.fill_(8)
    return model.to(device)


def copy_eval(bench: BenchConfig, knobs: CopyEvalConfig) -> list[dict]:
    n, newline = knobs.length, data_copy.NEWLINE
    model = copier(n, bench.device)
    sources = data_copy.evaluation_strings("imbalanced", n, n, knobs.strings, seed=0)
    places = np.random.default_rng(0)
    for source in sources[1::2]:
        source[places.integers(n)] = UNKNOWN

    def hugging_face(model: Decoder, group: list[np.ndarray], newline: int) -> list:
        tokens, _ = data_copy.pack(np.stack(group), np.array([n]))
        written = generate_there(model, torch.from_numpy(tokens[:, : n + 5]).to(bench.device), n + 1)[0].cpu()
        return [verdict(written != torch.tensor([*group[0], newline]))]

    def first_errors(judge: Callable) -> list[int | None]:
        return [judge(model, [source], newline)[0].first_error for source in sources]

    judges = {"teacher-forced": teacher_forced, "free-running": free_running, "hugging face": hugging_face}
    variants = {name: functools.partial(first_errors, judge) for name, judge in judges.items()}
    rows, errors = race("verdicts", variants, bench)
    for row in rows:
        row["facts"]["tokens_per_s"] = knobs.strings * (n + 1) / row["median_s"]
        row["facts"]["right"] = errors[row["variant"]].count(None)
        row["facts"]["same_verdicts"] = errors[row["variant"]] == errors[rows[0]["variant"]]
    return rows


def encode_batch(batch: dict[str, list], tokenizer: str) -> dict[str, list]:
    """For datasets.map, whose processes import it."""
    encoding = load_tokenizer(tokenizer).encoding
    ids = [encoding.encode_ordinary(text) for text in batch["text"]]
    return {"ids": ids, "n": [len(own) for own in ids]}


def tokenize(bench: BenchConfig, knobs: TokenizeConfig) -> list[dict]:
    """Each variant returns the number of tokens, ends of documents not counted."""
    encoding = load_tokenizer(knobs.tokenizer).encoding
    modules = [path.read_text("utf-8") for path in sorted(Path(os.__file__).parent.glob("*.py"))]
    rounds = math.ceil(1e6 * knobs.megabytes / sum(map(len, modules)))
    texts = [f"{i}\n{module}" for i in range(rounds) for module in modules]

    def ours() -> int:  # as a user runs it, the start of Python and its workers included
        with tempfile.TemporaryDirectory() as out:
            how = [f"--tokenizer={knobs.tokenizer}", f"--processes={knobs.processes}", "--packing=continue"]
            command = [sys.executable, data_dclm.__file__, f"--sources={source}", f"--out_dir={out}", *how]
            subprocess.run(command, check=True, capture_output=True)
            return data_dclm.Corpus(out).last["tokens"] - len(texts)

    def tiktoken() -> int:
        return sum(len(encoding.encode_ordinary(text)) for text in texts)

    def datasets_map() -> int:
        import datasets

        datasets.disable_progress_bars()
        encode = functools.partial(encode_batch, tokenizer=knobs.tokenizer)
        with tempfile.TemporaryDirectory() as cache:
            data = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=cache)
            return sum(data.map(encode, batched=True, num_proc=knobs.processes, remove_columns="text")["n"])

    variants = {"ours": ours, "tiktoken, one thread": tiktoken, "datasets.map": datasets_map}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "documents.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        rows, tokens = race("all", variants, bench)
    for row in rows:
        row["facts"]["tokens"] = tokens[row["variant"]]
        row["facts"]["tokens_per_s"] = tokens[row["variant"]] / row["median_s"]
    return rows


BENCHMARKS = {
    "rotary": (rotary, RotaryConfig),
    "scan": (scan, ScanConfig),
    "loss": (loss, LossConfig),
    "train_step": (train_step, DecoderConfig),
    "generate": (generate, DecoderConfig),
    "copy_eval": (copy_eval, CopyEvalConfig),
    "tokenize": (tokenize, TokenizeConfig),
}


def machine() -> dict[str, Any]:
    """What figures depend on, the code aside."""
    cpu, cpuinfo = platform.processor() or platform.machine(), Path("/proc/cpuinfo")
    if cpuinfo.exists() and "model name" in cpuinfo.read_text():
        cpu = cpuinfo.read_text().split("model name")[1].split("\n")[0].strip("\t: ")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": cpu, "cores": os.cpu_count(), "gpu": gpu, "system": platform.system(), "torch": torch.__version__}


def table(rows: list[dict]) -> str:
    lines = [f"{'work':18}{'variant':24}{'median ms':>10}{'min':>10}{'max':>10}{'x':>7}"]
    for row in rows:
        times = "".join(f"{1e3 * row[name]:>10.3f}" for name in ("median_s", "min_s", "max_s"))
        facts = "".join(f"  {name} {value:.4g}" for name, value in row["facts"].items())
        lines.append(f"{row['work']:18}{row['variant']:24}{times}{row['x']:>7.2f}{facts}")
    return "\n".join(lines)


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
    torch.set_num_threads(bench.threads)
    torch.manual_seed(0)
    rows = run(bench, knobs)
    facts = {"benchmark": name, **machine(), **vars(bench), **vars(knobs)}
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    print(table(rows))
    if bench.json:
        configurator.write_json(bench.json, {**facts, "rows": rows})
        print(f"rows: {bench.json}")


if __name__ == "__main__":
    from scripts import bench  # other processes find its functions by this name

    configurator.run_cli(bench.main)
