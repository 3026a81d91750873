"""Benchmarks: ours beside its peers, in one process and in turn, so that what else the machine does hits all alike.

    python bench.py rotary --json=out/bench.json              # to rotate q and k, forward and backward
    python bench.py rotary --shape=8,2048,16,8,128 --dtype=bfloat16 --variants=ours,copy_
    python bench.py scan --rows=8 --tokens=2048               # Auto-2D's affine scan
    python bench.py loss --repeats=3                          # output layer and loss: time, memory, gradients
    python bench.py train_step --repeats=20                   # forward, backward, AdamW: RoPE, 2D-RoPE, Hugging Face
    python bench.py generate --rows=1 --tokens=200 --layers=4 --width=128 --repeats=5  # greedy, over a KV cache
    python bench.py copy_eval --repeats=3                     # verdicts on long copies, beside transformers' generate
    python bench.py tokenize --repeats=3                      # documents to shards, beside tiktoken and datasets.map
    python bench.py loader                                    # a batch from 2,000 shards
    python bench.py rotary --help                             # all knobs

Prints a table, and adds its rows to a JSON file: {"machine": {...}, "rows": [{"name": "rotary", "variant": "ours",
"pass": "forward", "median_s": ..., "min_s": ..., "max_s": ..., "x": ..., "peak_bytes": ..., "facts": {...},
"settings": {...}}, ...]}. `x`: the time over the first variant's in the same round, its median. `facts`: tokens/s, the
largest differences to ours. A file holds figures of one machine only. On a CPU `ours` and `plain torch` of `rotary` are
the same code: their difference is the noise.

A new benchmark is a function of the common knobs and its own that returns rows, entered in BENCHMARKS.
"""

import functools
import importlib
import json
import multiprocessing
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import zstandard
from torch import Tensor

import configurator
import data_copy
import data_dclm
import qwen3
import rope2d
from eval import free_running, teacher_forced, verdict
from model import IGNORE, LOGITS_AT_ONCE, ChunkedLoss, Decoder, ModelConfig
from train import pick_device

Passes = dict[str, Callable[[], Any]]  # what is timed of a variant, by name
Makers = dict[str, Callable[[], Passes]]  # what makes each variant: may fail where a package or a compiler is missing


@dataclass
class BenchConfig:
    """All benchmarks"""

    json: str | None = None  # file that the rows are added to, in place of those of the same name and settings
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: the first of these that there is
    repeats: int = 21  # timed runs of each variant
    threads: int | None = None  # of torch on the CPU; None: torch's own choice
    variants: tuple[str, ...] = ()  # only these, by name; empty: all that run here


@dataclass
class RotaryConfig:
    """rotary"""

    shape: tuple[int, int, int, int, int] | None = None  # B, T, H, Hkv, D; None: 8,2048,16,8,128 on CUDA, 4,1024,8,8,64
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # auto: bfloat16 on CUDA, float32 elsewhere


@dataclass
class ScanConfig:
    """scan"""

    rows: int = 8  # sequences side by side
    tokens: int = 2048  # in each
    dtype: Literal["auto", "float64", "float32"] = "auto"  # auto: rope2d.AutoGrid's, float64 where the device has it


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
    strings: int = 2  # every second one has a token that the model cannot copy
    rows: int = 1  # strings side by side


@dataclass
class TokenizeConfig:
    """tokenize"""

    megabytes: int = 200  # of text, the standard library's over and over, each document with a line of its own
    tokenizer: str = "llama3"  # llama3, bytes, a tiktoken encoding's name, or a path of Llama-3's tokenizer.model
    processes: int | None = None  # None: one a core


@dataclass
class LoaderConfig:
    """loader"""

    shards: int = 2000
    rows: int = 256  # sequences in a batch
    tokens: int = 2048  # in each


def passes(function: Callable, inputs: list[Tensor], grads: list[Tensor]) -> Passes:
    """Forward, backward and both of function(*inputs), which returns a tensor or several with these gradients."""
    out = function(*inputs)
    return {
        "forward": torch.no_grad()(lambda: function(*inputs)),
        "backward": lambda: torch.autograd.grad(out, inputs, grads, retain_graph=True),
        "forward+backward": lambda: torch.autograd.grad(function(*inputs), inputs, grads),
    }


def rotary(bench: BenchConfig, knobs: RotaryConfig, device: torch.device) -> list[dict]:
    cuda = device.type == "cuda"
    shape = knobs.shape or ((8, 2048, 16, 8, 128) if cuda else (4, 1024, 8, 8, 64))
    if min(shape) < 1 or shape[4] % 2:
        raise ValueError(f"shape={shape}: expected B, T, H, Hkv, D of at least 1, and an even D")
    dtype = ("bfloat16" if cuda else "float32") if knobs.dtype == "auto" else knobs.dtype
    (B, T, H, Hkv, D), like = shape, {"device": device, "dtype": getattr(torch, dtype)}
    angles = 6.28 * torch.rand(B, T, D // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    q, k, _ = torch.randn(B, T, H + 2 * Hkv, D, **like).split([H, Hkv, Hkv], dim=2)  # as model.py makes them
    inputs = [x.detach().requires_grad_() for x in (q, k)]
    grads = [torch.randn(x.shape, **like) for x in inputs]
    # Peers: q and k apart, (B, H, T, D) as views of what a projection returns, tables for whole heads in their dtype.
    peer_inputs = [torch.randn_like(g).transpose(1, 2).requires_grad_() for g in grads]
    peer_grads = [g.transpose(1, 2) for g in grads]
    tables = [torch.cat([x, x], dim=-1).to(like["dtype"]) for x in (cos, sin)]

    def plain(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rope2d.rotate(q, cos, sin), rope2d.rotate(k, cos, sin)

    def peer(module: str, name: str) -> Passes:
        function = getattr(importlib.import_module(module), name)
        return passes(lambda q, k: function(q, k, *tables), peer_inputs, peer_grads)

    def copy() -> Passes:
        one, two = (torch.zeros(B * T * (H + Hkv) * D, **like) for _ in range(2))
        once = functools.partial(one.copy_, two)
        return {"forward": once, "backward": once, "forward+backward": lambda: (once(), once())}

    makers = {
        "ours": lambda: passes(lambda q, k: rope2d.rotate_qk(q, k, cos, sin), inputs, grads),
        "plain torch": lambda: passes(plain, inputs, grads),
        "torch.compile": lambda: passes(torch.compile(plain, fullgraph=True), inputs, grads),
        "hugging face": lambda: peer("transformers.models.qwen3.modeling_qwen3", "apply_rotary_pos_emb"),
    }
    if cuda:
        makers |= {"liger": lambda: peer("liger_kernel.transformers.rope", "liger_rotary_pos_emb"), "copy_": copy}
    return race("rotary", makers, bench, device, {"shape": list(shape), "dtype": dtype})


def scan(bench: BenchConfig, knobs: ScanConfig, device: torch.device) -> list[dict]:
    dtype = ("float32" if device.type == "mps" else "float64") if knobs.dtype == "auto" else knobs.dtype
    like = {"device": device, "dtype": getattr(torch, dtype)}
    a, b, start = (torch.rand(knobs.rows, n, **like) for n in (knobs.tokens, knobs.tokens, 1))
    inputs = [x.requires_grad_() for x in (a, b, start[:, 0])]
    grads = [torch.randn(knobs.rows, knobs.tokens + 1, **like)]

    def loop(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
        h = [start]
        for a_t, b_t in zip(a.unbind(-1), b.unbind(-1), strict=True):
            h.append(a_t * h[-1] + b_t)
        return torch.stack(h, dim=-1)

    makers = {"doubling": lambda: passes(rope2d.AffineScan.apply, inputs, grads)}
    if device.type == "cuda":
        makers["kernel"] = lambda: passes(importlib.import_module("kernels").affine_scan, inputs, grads)
    makers["loop"] = lambda: passes(loop, inputs, grads)
    return race("scan", makers, bench, device, asdict(knobs) | {"dtype": dtype})


def losses(knobs: LossConfig, device: torch.device) -> Makers:
    """Each variant's pass returns its gradients, of states and weight."""
    x = torch.randn(knobs.tokens, knobs.width, device=device, requires_grad=True)
    weight = (0.02 * torch.randn(knobs.vocab_size, knobs.width, device=device)).requires_grad_()
    targets = torch.randint(knobs.vocab_size, (knobs.tokens,), device=device)
    chunk = max(1, LOGITS_AT_ONCE[device.type] // knobs.vocab_size)  # as Decoder.forward has it

    def gradients(loss: Callable[[], Tensor]) -> Passes:
        return {"forward+backward": lambda: torch.autograd.grad(loss(), (x, weight))}

    return {
        "ours": lambda: gradients(lambda: ChunkedLoss.apply(x, weight, targets, chunk)),
        "plain torch": lambda: gradients(lambda: F.cross_entropy(x @ weight.T, targets, reduction="sum")),
    }


def loss(bench: BenchConfig, knobs: LossConfig, device: torch.device) -> list[dict]:
    makers = losses(knobs, device)
    rows = race("loss", makers, bench, device, asdict(knobs) | {"dtype": "float32"})
    found = [makers[row["variant"]]()["forward+backward"]() for row in rows]
    for row, mine in zip(rows, found, strict=True):
        apart = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, found[0], strict=True)]
        row["facts"] = {"gradients": max(apart)}
        if device.type == "cpu" and Path("/proc").exists():  # on CUDA race() has measured it
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                row["peak_bytes"] = process.submit(cpu_peak, losses, row["variant"], knobs).result()
    return rows


def cpu_peak(make: Callable[..., Makers], variant: str, knobs: Any) -> int:
    """Bytes that a variant's first pass takes on top of its inputs. For a process of its own: an allocator keeps what
    was freed. Not by getrusage, whose peak starts at what the parent process held."""
    (run,), status = make(knobs, torch.device("cpu"))[variant]().values(), Path("/proc/self/status")
    before, _, after = status.read_text(), run(), status.read_text()
    first, last = (int(text.split("VmHWM:")[1].split()[0]) for text in (before, after))  # KiB
    return 1024 * (last - first)


def decoder(knobs: DecoderConfig, block_size: int, encoding: str, device: torch.device) -> Decoder:
    """The same weights for every encoding. Every 32nd token breaks a line."""
    config = dict(n_layer=knobs.layers, n_head=knobs.heads, n_embd=knobs.width, mlp_dim=3 * knobs.width, qk_norm=True)
    config |= dict(vocab_size=knobs.vocab_size, block_size=block_size, tie_weights=True, zero_init_outputs=False)
    torch.manual_seed(0)
    return Decoder(ModelConfig(**config, pos_encoding=encoding), torch.arange(knobs.vocab_size) % 32 == 0).to(device)


def hugging_face(model: Decoder) -> torch.nn.Module:
    """The same model in transformers, as fast as it goes there: fused attention, no mask but the causal one."""
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        qwen3.save(model, folder)
        peer = transformers.Qwen3ForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    return peer.to(model.newlines.device)


def train_step(bench: BenchConfig, knobs: DecoderConfig, device: torch.device) -> list[dict]:
    B, T, curves, logits = knobs.rows, knobs.tokens, {}, {}

    def batch(step: int) -> Tensor:
        drawn = torch.rand(B, T, generator=torch.Generator().manual_seed(step))
        return (knobs.vocab_size * drawn**3).long().to(device)  # (B, T), low ids often: there is something to learn

    def trainer(name: str, model: torch.nn.Module, loss: Callable, predict: Callable) -> Passes:
        curve = curves[name] = []
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3, fused=device.type != "mps")
        logits[name] = torch.no_grad()(predict)(batch(0))

        def step() -> None:
            value = loss(batch(len(curve)))
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(value.detach())

        return {"step": step}

    def ours(encoding: str, name: str, compiler: Callable = lambda model: model) -> Passes:
        model, n = decoder(knobs, T, encoding, device), B * (T - 1)
        run = compiler(model)
        return trainer(name, model, lambda x: run(x, F.pad(x[:, 1:], (0, 1), value=IGNORE)) / n, model)

    def peer(name: str, compiler: Callable = lambda model: model) -> Passes:
        model = hugging_face(decoder(knobs, T, "rope", device))
        run = functools.partial(compiler(model), use_cache=False)
        return trainer(name, model, lambda x: run(x, labels=x).loss, lambda x: model(x, use_cache=False).logits)

    makers = {
        "rope": lambda: ours("rope", "rope"),
        "2d-rope": lambda: ours("2d-rope", "2d-rope"),
        "hugging face": lambda: peer("hugging face"),
        "rope compiled": lambda: ours("rope", "rope compiled", torch.compile),
        "hugging face compiled": lambda: peer("hugging face compiled", torch.compile),
    }
    rows = race("train_step", makers, bench, device, asdict(knobs) | {"dtype": "float32"})
    for row in rows:
        row["facts"] = {"tokens_per_s": B * T / row["median_s"]}
        if "hugging face" in (name := row["variant"]) and "rope" in curves:
            pairs = {"logits": logits, "losses": {name: torch.stack(curve) for name, curve in curves.items()}}
            row["facts"] |= {what: float((x[name] - x["rope"]).abs().max()) for what, x in pairs.items()}
    return rows


def generate(bench: BenchConfig, knobs: DecoderConfig, device: torch.device) -> list[dict]:
    model, n, made = decoder(knobs, 16 + knobs.tokens, "rope", device), knobs.tokens, {}
    prompts = torch.randint(knobs.vocab_size, (knobs.rows, 16), device=device)

    def ours() -> Passes:
        return {"greedy": lambda: made.update(ours=torch.stack([*model.generate(prompts.tolist(), n)], dim=1).tolist())}

    def peer() -> Passes:
        how = {"attention_mask": torch.ones_like(prompts), "max_new_tokens": n, "do_sample": False, "pad_token_id": 0}
        run = functools.partial(hugging_face(model).generate, prompts, **how)
        return {"greedy": lambda: made.update({"hugging face": run()[:, 16:].tolist()})}

    rows = race("generate", {"ours": ours, "hugging face": peer}, bench, device, asdict(knobs))
    for row in rows:
        same = made[row["variant"]] == made[rows[0]["variant"]]
        row["facts"] = {"tokens_per_s": knobs.rows * n / row["median_s"], "same_tokens": same}
    return rows


UNKNOWN = data_copy.N_SYMBOLS - 1  # the one token that `copier` does not copy


def copier(length: int, device: torch.device) -> Decoder:
    """A model made by hand, in toy_copy's shape with RoPE, that copies strings of this length but for one token.

    A head whose q is the same for all tokens, whose k is too, and whose q is k turned by -d attends at distance d.
    From each token to the one whose copy comes next it is length + 2.
    """
    V, C, D = len(data_copy.VOCAB), 128, 128
    config = dict(vocab_size=V, n_embd=C, head_dim=D, block_size=2 * length + 5, tie_weights=True, qk_norm=True)
    model = Decoder(ModelConfig(**config, pos_encoding="rope"), torch.zeros(V)).requires_grad_(False)
    attention, one = model.blocks[0].attention, torch.eye(V)
    model.embed.weight.zero_()[:, :V], model.embed.weight[:, V] = one, 1  # a channel for each token, and one for all
    q, k, v = attention.qkv.weight.zero_().view(3, -1, D, C)[:, 0]  # of the first head
    angles = model.rotary["rope"].angles(torch.full((3, 1, 1), length + 2))[0, 0]  # (D/2,)
    q[:, V], k[: D // 2, V] = torch.cat([angles.cos(), -angles.sin()]), 1
    v[:V, :V], attention.out.weight[:V, :V] = one, one
    v[UNKNOWN] = 0
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.fill_(8)  # then the peak is 21.6 nats above its neighbours
    return model.to(device)


def copy_eval(bench: BenchConfig, knobs: CopyEvalConfig, device: torch.device) -> list[dict]:
    n, separator, model, found = knobs.length, data_copy.NEWLINE, copier(knobs.length, device), {}
    sources, places = data_copy.evaluation_strings("imbalanced", n, n, knobs.strings, 0), np.random.default_rng(0)
    for source in sources[1::2]:
        source[places.integers(n)] = UNKNOWN

    def judged(name: str, judge: Callable) -> Passes:
        def run() -> None:
            groups = [sources[i : i + knobs.rows] for i in range(0, len(sources), knobs.rows)]
            found[name] = [v.first_error for group in groups for v in judge(group)]

        return {"verdicts": run}

    def peer() -> Passes:
        generate, how = hugging_face(model).generate, {"max_new_tokens": n + 1, "do_sample": False, "pad_token_id": 0}

        def judge(group: list[np.ndarray]) -> list:
            inputs, targets = map(torch.from_numpy, data_copy.pack(np.stack(group), np.full(len(group), n)))
            prompts = inputs[:, : n + 5].to(device)
            new = generate(prompts, attention_mask=torch.ones_like(prompts), **how)[:, n + 5 :].cpu()
            return [verdict(wrong) for wrong in new != targets[:, n + 4 :]]

        return judged("hugging face", judge)

    makers = {
        "teacher-forced": lambda: judged("teacher-forced", lambda group: teacher_forced(model, group, separator)),
        "free-running": lambda: judged("free-running", lambda group: free_running(model, group, separator)),
        "hugging face": peer,
    }
    rows = race("copy_eval", makers, bench, device, asdict(knobs))
    for row in rows:
        mine, first = found[row["variant"]], found[rows[0]["variant"]]
        row["facts"] = {"tokens_per_s": knobs.strings * (n + 1) / row["median_s"], "right": mine.count(None)}
        row["facts"] |= {"same_verdicts": mine == first}
    return rows


def tokenize(bench: BenchConfig, knobs: TokenizeConfig, device: torch.device) -> list[dict]:
    processes = knobs.processes or os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as name:
        folder, size, n_tokens = Path(name), 0, {}
        data_dclm.write_local_text(folder)
        lines = zstandard.decompress((folder / "train.jsonl.zst").read_bytes()).splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        documents = []
        while size < knobs.megabytes * 1e6:
            documents.append(f"{len(documents)}\n{texts[len(documents) % len(texts)]}")
            size += len(documents[-1].encode())
        source = folder / "documents.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
        encoding = data_dclm.load_tokenizer(knobs.tokenizer).encoding

        def ours() -> None:  # as a user runs it, the start of Python and its workers included
            with tempfile.TemporaryDirectory(dir=folder) as out:
                how = ["--packing=continue", f"--tokenizer={knobs.tokenizer}", f"--processes={processes}"]
                command = [sys.executable, data_dclm.__file__, f"--sources={source}", f"--out_dir={out}", *how]
                subprocess.run(command, check=True, capture_output=True)
                n_tokens["ours"] = data_dclm.Corpus(out).last["tokens"] - len(documents)  # without ends of sequence

        def alone() -> None:
            n_tokens["tiktoken, one thread"] = sum(len(encoding.encode_ordinary(text)) for text in documents)

        def peer() -> Passes:
            datasets = importlib.import_module("datasets")
            datasets.disable_progress_bars()

            def run() -> None:
                with tempfile.TemporaryDirectory(dir=folder) as cache:
                    data = datasets.load_dataset("json", data_files=str(source), split="train", cache_dir=cache)
                    how = dict(batched=True, num_proc=processes, remove_columns="text")
                    work = functools.partial(encode_batch, tokenizer=knobs.tokenizer)
                    n_tokens["datasets.map"] = sum(data.map(work, **how)["n"])

            return {"all": run}

        makers = {"ours": lambda: {"all": ours}, "tiktoken, one thread": lambda: {"all": alone}, "datasets.map": peer}
        rows = race("tokenize", makers, bench, device, asdict(knobs) | {"processes": processes})
    for row in rows:
        n = n_tokens[row["variant"]]
        row["facts"] = {"tokens": n, "tokens_per_s": n / row["median_s"]}
        if row["variant"] == "tiktoken, one thread":
            row["facts"]["of_cores"] = row["x"] / processes  # ours, as a share of so many times this
    return rows


def encode_batch(batch: dict, tokenizer: str) -> dict:
    ids = [data_dclm.load_tokenizer(tokenizer).encoding.encode_ordinary(text) for text in batch["text"]]
    return {"ids": ids, "n": [len(i) for i in ids]}


def loader(bench: BenchConfig, knobs: LoaderConfig, device: torch.device) -> list[dict]:
    """A batch from a corpus of many shards, the first one of a process and later ones; beside it, rows cut out of one
    memory-mapped file at random places, as nanoGPT does it."""
    with tempfile.TemporaryDirectory() as name:
        folder, chance = Path(name), random.Random(0)
        with open(folder / "long.txt", "w") as file:
            for _ in range(knobs.shards):
                file.write("".join(chance.choices("ab c\n", k=4 * (knobs.tokens + 1))))
        how = dict(
            tokenizer="bytes", length=knobs.tokens, packing="continue", processes=1, out_dir=str(folder / "shards")
        )
        text, size = (folder / "long.txt").read_text(), 4 * (knobs.tokens + 1)
        with open(folder / "documents.jsonl", "w") as file:
            for start in range(0, len(text), size):
                file.write(json.dumps({"text": text[start : start + size]}) + "\n")
        block, data_dclm.BLOCK = data_dclm.BLOCK, 2  # a block, and so a shard, ends with each document
        try:
            corpus = data_dclm.build(data_dclm.BuildConfig((f"{folder}/documents.jsonl",), shard_tokens=1, **how))
        finally:
            data_dclm.BLOCK = block
        flat, step = np.memmap(folder / "long.txt", np.uint16, "r"), iter(range(2**62))

        def cut() -> None:
            at = np.random.default_rng(next(step)).integers(len(flat) - knobs.tokens - 1, size=knobs.rows)
            torch.stack([torch.from_numpy(flat[i : i + knobs.tokens + 1].astype(np.int64)) for i in at])

        settings = asdict(knobs) | {"shards": len(corpus.starts) - 1}
        makers = {"ours": lambda: {"later batch": lambda: first_batch(corpus, knobs.rows, next(step))}}
        rows = race("loader", makers | {"one file": lambda: {"later batch": cut}}, bench, device, settings)
        cold = []
        for _ in range(min(bench.repeats, 5)):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                cold.append(process.submit(cold_batch, corpus.folder, knobs.rows).result())
    times = {"median_s": statistics.median(cold), "min_s": min(cold), "max_s": max(cold)}
    return [rows[0] | times | {"pass": "first batch", "x": times["median_s"] / rows[0]["median_s"]}, *rows]


def first_batch(corpus: data_dclm.Corpus, n: int, step: int) -> Tensor:
    return torch.from_numpy(corpus.read(corpus.order(np.arange(step * n, (step + 1) * n), 0)))


def cold_batch(folder: Path, n: int) -> float:
    """Seconds to open a corpus and read a batch in a process that has done neither."""
    began = time.perf_counter()
    first_batch(data_dclm.Corpus(folder), n, 0)
    return time.perf_counter() - began


def race(name: str, makers: Makers, bench: BenchConfig, device: torch.device, settings: dict) -> list[dict]:
    """Rows of the variants, timed in turn, in a new order each round. ValueError for an unknown one.

    One that cannot be made or run here is left out and the reason printed; the first, which is ours, raises.
    """
    if unknown := set(bench.variants) - makers.keys():
        raise ValueError(f"variants: no {', '.join(sorted(unknown))} on {device.type}; there are {', '.join(makers)}")
    runners: dict[str, Passes] = {}
    for variant in bench.variants or makers:
        try:
            runners[variant] = makers[variant]()
            for run in runners[variant].values():
                run()  # compiles, loads and warms what there is
        except Exception as error:  # no package, no compiler, no memory: peers fail in many ways
            if variant == next(iter(makers)):
                raise
            runners.pop(variant, None)
            print(f"{variant} left out: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
    if not runners:
        raise RuntimeError(f"{name}: none of the variants runs here, nothing was timed")
    settings = settings | {"device": device.type, "threads": torch.get_num_threads(), "repeats": bench.repeats}
    rows, shuffle = [], random.Random(0)  # each variant leaves caches and allocator in a state of its own to the next
    for what in next(iter(runners.values())):
        times: dict[str, list[float]] = {variant: [] for variant in runners}
        for _ in range(bench.repeats):
            for variant in shuffle.sample(list(runners), len(runners)):
                times[variant].append(seconds(runners[variant][what], device))
        for variant, t in times.items():
            row = {"name": name, "variant": variant, "pass": what, "median_s": statistics.median(t)}
            x = statistics.median(a / b for a, b in zip(t, next(iter(times.values())), strict=True))
            row |= {"min_s": min(t), "max_s": max(t), "x": x}
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                runners[variant][what]()
                row["peak_bytes"] = torch.cuda.max_memory_allocated() - before  # on top of what was there
            rows.append(row | {"settings": settings})
    return rows


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """Of one run. On CUDA the GPU's, with a cold L2 cache, busy beforehand so that the launches are queued by then."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush = torch.empty(2**28, dtype=torch.int8, device=device)
        for _ in range(4):
            flush.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    began = time.perf_counter()
    run()
    if device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter() - began


def machine() -> dict[str, Any]:
    """What figures depend on, the code aside."""
    cpuinfo, cpu = Path("/proc/cpuinfo"), platform.processor() or platform.machine()
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else ():
        cpu = line.split(":", 1)[1].strip() if line.startswith("model name") else cpu
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": cpu, "cores": os.cpu_count(), "gpu": gpu, "system": platform.system(), "torch": torch.__version__}


def read(path: Path) -> dict:
    """The figures in `path`, none if there is no file. ValueError if another machine's, RuntimeError if damaged."""
    here = machine()
    if not path.exists():
        return {"machine": here, "rows": []}
    try:
        found = json.loads(path.read_text())
        there, _ = found["machine"], [row["variant"] for row in found["rows"]]
    except (ValueError, KeyError, TypeError) as error:
        raise RuntimeError(f"{path}: damaged, or not a file of bench.py ({type(error).__name__}: {error})") from error
    if there != here:
        differ = "; ".join(configurator.diff(there, here))
        raise ValueError(f"{path} has figures of another machine ({differ}), which do not compare: name another file")
    return found


def add(path: Path, rows: list[dict]) -> None:
    """Adds rows to the file, in place of those of the same name, variant, pass and settings. Raises as `read`."""
    found, names = read(path), ("name", "variant", "pass", "settings")
    new = [[row[n] for n in names] for row in rows]
    found["rows"] = [row for row in found["rows"] if [row[n] for n in names] not in new] + rows
    with configurator.atomic(path) as file:
        file.write(json.dumps(found, indent=1).encode() + b"\n")


def table(rows: list[dict]) -> str:
    """A line a row."""
    lines = [f"{'pass':18}{'variant':24}{'median ms':>11}{'min':>10}{'max':>10}{'x':>7}{'peak MB':>9}"]
    for row in rows:
        median, low, high = (1e3 * row[name] for name in ("median_s", "min_s", "max_s"))
        peak = f"{row['peak_bytes'] / 1e6:>9.1f}" if "peak_bytes" in row else ""
        facts = "".join(f"  {name} {value:.4g}" for name, value in row.get("facts", {}).items())
        times = f"{median:>11.3f}{low:>10.3f}{high:>10.3f}{row['x']:>7.2f}"
        lines.append(f"{row['pass']:18}{row['variant']:24}{times}{peak}{facts}")
    return "\n".join(lines)


BENCHMARKS = {"rotary": (rotary, RotaryConfig), "scan": (scan, ScanConfig), "loss": (loss, LossConfig)}
BENCHMARKS |= {"train_step": (train_step, DecoderConfig), "generate": (generate, DecoderConfig)}
BENCHMARKS |= {"copy_eval": (copy_eval, CopyEvalConfig)}
BENCHMARKS |= {"tokenize": (tokenize, TokenizeConfig), "loader": (loader, LoaderConfig)}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in ("--help", "-h"):
        return print(__doc__)
    if name not in BENCHMARKS:
        raise ValueError(f"benchmark {name!r}: expected {' or '.join(BENCHMARKS)} first, then its knobs or --help")
    run, knobs_class = BENCHMARKS[name]
    bench, knobs = configurator.configure(BenchConfig, knobs_class, argv=sys.argv[2:], doc=__doc__)
    for key, value in (asdict(bench) | asdict(knobs)).items():
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{key}={value}: expected at least 1")
    if bench.json:
        read(Path(bench.json))  # refuses before anything is timed
    if bench.threads:
        torch.set_num_threads(bench.threads)
    torch.manual_seed(0)
    rows = run(bench, knobs, pick_device(bench.device))
    print(", ".join(f"{key} {value}" for key, value in (machine() | rows[0]["settings"]).items()))
    print(table(rows))
    if bench.json:
        add(Path(bench.json), rows)
        print(f"rows: {bench.json}")


if __name__ == "__main__":
    configurator.run_cli(main)
