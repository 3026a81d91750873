"""Evaluation: exact match of copies against their length; the loss on text; text that a model writes.

    python eval.py --runs=out/toy_copy/2d-rope,out/toy_copy/rope --lengths=20,320,5120 --samples=100,20,4
    python eval.py --runs=out/run --lengths=1-25,26-50,51-100 --free_running=True
    torchrun --nproc_per_node=2 eval.py ...                            # strings shared out; the same numbers
    python eval.py --runs=out/finetuned --tasks=imbalanced,lists --lengths=64,256     # copies in text, by template kind
    python eval.py --runs=out/pretrain/rope,out/pretrain/2d-rope --val_data=data/fineweb-edu   # losses.json, .png
    python eval.py --runs=out/pretrain --prompt="import os" --temperature=0.8 --top_p=0.95
    cat story.txt | python eval.py --runs=out/pretrain --prompt=-      # from standard input

Writes accuracy.json, a row for each run, task and length, and accuracy.png to out_dir, and prints a table.

A copy is right when every token of it and the separator that ends it are right. Under greedy decoding that is the same
as every target token being the argmax under teacher forcing: if all are, greedy decoding produces them one by one; if
not, the first that is not is where greedy decoding goes wrong too. So one parallel forward replaces n decoding steps;
free_running=True decodes for real.
"""

import codecs
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

import checkpoint
import configurator
import data_copy
import rope2d
from data_copy import IGNORE, SEPARATORS, TextCopyConfig
from data_dclm import Corpus, Tokenizer, load_tokenizer, pad_chats
from model import Decoder
from report import loss_table, parse_length, plot, plot_losses, table, wilson
from train import pick_device, rank_and_world


@dataclass
class EvalConfig:
    """Evaluation"""

    runs: tuple[str, ...] = ()  # run directories or checkpoint files
    checkpoint: Literal["last", "best"] = "last"  # which of a run directory's
    tasks: tuple[str, ...] = ("imbalanced", "recursive-flip", "uniform")  # strings to copy
    kinds: tuple[str, ...] = data_copy.KINDS  # in text: where in the prompt the string stands
    lengths: tuple[int | str, ...] = (20, 320)  # tokens in a string, symbols or points in text; or intervals, 26-50
    samples: tuple[int, ...] = (20,)  # strings for each task and length; one number for all lengths, or one for each
    eval_seed: int = 0  # of the strings
    repeat_p: tuple[float, ...] = (0.9,)  # repeat-structure: shares of a base's repetitions to keep, each in turn
    # Leave out lengths behind one with a wrong copy (failure), or without a right one (zero).
    stop: Literal["never", "failure", "zero"] = "never"
    # Of rotations: exact, as in training, or position x frequency in these types, as other code has it.
    angles: Literal["exact", "float32", "bfloat16"] = "exact"
    free_running: bool = False  # decode token by token instead of one parallel forward
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the matrix products
    chunk: int = 1024  # tokens that go through the model at a time; memory grows with it
    batch_tokens: int = 16384  # tokens of strings that are evaluated together
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: the first of these that there is
    out_dir: str = "out/eval"  # accuracy.json and accuracy.png go here
    plot: bool = True  # draw accuracy.png
    val_data: str = ""  # shards to measure text models' loss on, instead of copying
    windows: int = 256  # sequences of val_data
    prompt: str | None = None  # text for the first run's model to go on with, instead of the above; -: standard input
    tokenizer: str | None = None  # where the prompt's tokenizer is now; None: where it was in training
    max_new_tokens: int = 256  # tokens to write
    temperature: float = 0.0  # 0: always the likeliest token
    top_k: int | None = None  # choose among that many likeliest tokens; None: among all
    top_p: float | None = None  # choose among the fewest likeliest tokens that hold this probability; None: among all
    sample_seed: int = 0  # of the choices

    def __post_init__(self):
        for name in ("chunk", "batch_tokens", "windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
        if not self.repeat_p or not all(0 <= p <= 1 for p in self.repeat_p):
            raise ValueError(f"repeat_p={self.repeat_p}: expected shares between 0 and 1")
        if self.angles != "exact" and self.free_running:
            raise ValueError(f"angles={self.angles!r}: decoding has exact angles; leave free_running=False")


class Verdict(NamedTuple):
    """One string. Positions count from 0; position n is the closing separator of a string of n tokens."""

    targets: int  # tokens to get right: n + 1
    errors: int  # of them wrong
    first_error: int | None  # position of the first
    margin: float  # smallest lead of the right token's logit over the best other one; negative where it is wrong
    weakest: int | None = None  # position of that lead; None where there are no logits


def teacher_forced(model: Decoder, sources: Sequence[np.ndarray], separator: int, chunk: int = 1024) -> list[Verdict]:
    """Verdicts on strings of any lengths, by one forward in chunks. ValueError beyond the model's block_size."""
    lengths = np.array([len(s) for s in sources])
    padded = np.zeros((len(sources), lengths.max()), np.int64)
    for row, source in zip(padded, sources, strict=True):
        row[: len(source)] = source
    return judge(model, *data_copy.pack(padded, lengths, separator), chunk)


def judge(model: Decoder, inputs: np.ndarray, targets: np.ndarray, chunk: int) -> list[Verdict]:
    """Verdicts on the targets (N, T), IGNORE where there is none, of right-padded inputs (N, T)."""
    device = model.newlines.device
    inputs, targets = torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device)
    wanted = targets != IGNORE
    check_length(model, inputs.shape[1])
    cache, leads = model.new_cache(), []
    with torch.inference_mode():
        for start in range(0, inputs.shape[1], chunk):
            part = slice(start, start + chunk)
            want = wanted[:, part]
            states = model.hidden(inputs[:, part], cache, keys_only=not want.any())
            if states is not None:
                logits = model.head(states[want]).float()  # (targets in the chunk, vocab_size)
                right = targets[:, part][want][:, None]
                lead = logits.gather(1, right) - logits.scatter(1, right, -math.inf).amax(1, keepdim=True)
                leads.append((want.nonzero()[:, 0].cpu(), lead[:, 0].cpu()))
    row, lead = torch.cat([r for r, _ in leads]), torch.cat([x for _, x in leads])
    return [verdict(~(own > 0), own) for own in (lead[row == i] for i in range(len(inputs)))]


def free_running(model: Decoder, sources: Sequence[np.ndarray], separator: int) -> list[Verdict]:
    """Verdicts by greedy decoding, n + 1 tokens for a string of n; margin is nan. ValueError as above."""
    prompts, answers = [], []
    for source in sources:
        tokens, _ = data_copy.pack(source[None], np.array([len(source)]), separator)
        prompts.append(tokens[0, : len(source) + 5].tolist())
        answers.append(torch.tensor([*source.tolist(), separator]))
    longest = max(map(len, answers))
    check_length(model, 2 * longest + 3)
    written = torch.stack([t.cpu() for t in model.generate(prompts, longest)], dim=1)  # (B, longest)
    return [verdict(out[: len(answer)] != answer) for out, answer in zip(written, answers, strict=True)]


def judge_text(model: Decoder, tokenizer: Tokenizer, records: Sequence[dict], free: bool, chunk: int) -> list[Verdict]:
    """Verdicts on answers to data_copy's text examples: targets are tokens, or with `free`, decoding for real,
    symbols or points as data_copy.score counts them, and one more for the end."""
    chats = [tokenizer.chat(record["messages"]) for record in records]
    if not free:
        return judge(model, *pad_chats(chats), chunk)
    prompts = [ids[: int(said.argmax())].tolist() for ids, said in chats]
    longest = max(int(said.sum()) for _, said in chats)
    check_length(model, max(map(len, prompts)) + longest)
    written = torch.stack([token.cpu() for token in model.generate(prompts, longest)], dim=1)  # (N, longest)
    verdicts = []
    for record, (ids, said), row in zip(records, chats, written.tolist(), strict=True):
        end = int(ids[said][-1])
        ended = end in row
        score = data_copy.score(record, tokenizer.decode(row[: row.index(end)] if ended else row))
        first = score.first_error if not score.correct else None if ended else score.total
        errors = score.total - score.right + (not ended or score.reason in ("form", "too long"))
        verdicts.append(Verdict(score.total + 1, errors, first, math.nan))
    return verdicts


def verdict(wrong: torch.Tensor, lead: torch.Tensor | None = None) -> Verdict:
    """Of one string: which of its targets are wrong, and by how much each leads, where that is known."""
    first = int(wrong.float().argmax()) if wrong.any() else None
    margin, weakest = (math.nan, None) if lead is None else (lead.min().item(), int(lead.argmin()))
    return Verdict(len(wrong), int(wrong.sum()), first, margin, weakest)


def check_length(model: Decoder, tokens: int) -> None:
    if tokens > model.config.block_size:
        raise ValueError(f"sequence of {tokens} tokens is longer than the model's block_size={model.config.block_size}")


def evaluate(
    model: Decoder,
    trained: dict,
    task: str,
    kind: str | None,
    bounds: tuple[int, int],
    samples: int,
    config: EvalConfig,
    bar: tqdm | None = None,
    repeat_p: float = 0.9,
) -> dict:
    """One row of the report: strings of a task, lengths within bounds. With torchrun, shared out and gathered.
    kind: None for token-level tasks, in text where in the prompt the string stands; repeat_p: of repeat-structure."""
    rank, world = rank_and_world()
    began = time.perf_counter()
    if kind is None:
        examples = data_copy.evaluation_strings(task, *bounds, samples, config.eval_seed, repeat_p)
        sizes, separator, exact = [len(source) for source in examples], SEPARATORS[trained["separator"]], True
    else:
        tokenizer = tokenizer_of("run", trained, config.tokenizer)
        text_config = TextCopyConfig(task, tuple(trained["symbols"]), kind, *bounds, repeat_p)
        examples = list(data_copy.text_examples(text_config, samples, config.eval_seed, "evaluation"))
        sizes = [example["metadata"]["length"] for example in examples]
        exact = tokenizer.name == "bytes" and task != "lists"  # or else other tokens may be as right
    own = sorted(range(rank, samples, world), key=lambda i: sizes[i])
    together = max(1, config.batch_tokens // (2 * bounds[1] + 6))
    verdicts: dict[int, Verdict] = {}
    for start in range(0, len(own), together):
        ids = own[start : start + together]
        group = [examples[i] for i in ids]
        if kind is not None:
            run = judge_text(model, tokenizer, group, config.free_running, config.chunk)
        elif config.free_running:
            run = free_running(model, group, separator)
        else:
            run = teacher_forced(model, group, separator, config.chunk)
        verdicts.update(zip(ids, run, strict=True))
        if bar:
            bar.update(len(ids))
    if world > 1:
        parts = [None] * world
        dist.all_gather_object(parts, verdicts)
        verdicts = {i: v for part in parts for i, v in part.items()}
    results = [verdicts[i] for i in range(samples)]
    hits = sum(v.errors == 0 for v in results)
    low, high = wilson(hits, samples)
    mode = "free-running" if config.free_running else "teacher-forced" if exact else "teacher-forced, a lower bound"
    return {
        "task": task,
        "kind": kind,
        "repeat_p": repeat_p if task == "repeat-structure" else None,
        "mode": mode,
        "length": bounds[1],
        "min_length": bounds[0],
        "samples": samples,
        "exact_match": hits / samples,
        "exact_match_low": low,
        "exact_match_high": high,
        "token_error": sum(v.errors for v in results) / sum(v.targets for v in results),
        "only_closing_wrong": sum(v.first_error == v.targets - 1 for v in results) / samples,
        "first_errors": [v.first_error for v in results],
        "margin": None if config.free_running else min(v.margin for v in results),
        "margins": None if config.free_running else [[v.margin, v.weakest] for v in results],  # and where
        "seconds": round(time.perf_counter() - began, 3),
    }


def load_run(path: str, which: str, device: torch.device) -> tuple[Decoder, dict]:
    """The model of a run directory or checkpoint file, in evaluation mode, and the config it was trained with, with
    `steps_done` and the identity of its `data` added."""
    file = Path(path) / f"{which}.pt" if Path(path).is_dir() else Path(path)
    saved = checkpoint.read(file)  # the optimizer's part need not fit the device
    about = saved["config"] | {"steps_done": saved["step"], "data": saved.get("data", {})}
    return checkpoint.load_model(saved, device).eval(), about


def round_angles(model: Decoder, dtype: torch.dtype) -> None:
    """Lets a model rotate by position x frequency in `dtype`: what rope2d.Rotary's exact angles are for."""
    for rotary in (module for module in model.modules() if isinstance(module, rope2d.Rotary)):

        def angles(positions: torch.Tensor, rotary: rope2d.Rotary = rotary) -> torch.Tensor:
            freqs = (rotary.turns.to(rope2d.wide_dtype(rotary.turns)) * rope2d.RADIANS).to(dtype)  # (planes, n)
            places = positions[rotary.planes].movedim(0, -1)[..., None].to(dtype)  # (B, T, planes, 1)
            return (places * freqs).float().flatten(-2)

        rotary.angles = angles


def precision(config: EvalConfig, device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bfloat16")


def longest_trained(trained: dict) -> int:
    """Tokens, symbols or points of the longest string in training."""
    if trained["task"] != "finetune":
        return trained["max_length"]
    return trained["text_max_length"] or {"lists": 150}.get(trained["text_task"], 1000)


def copy_ladder(config: EvalConfig) -> list[dict]:
    """The report: a row for each run, task and length."""
    if not config.runs or not config.tasks or not config.lengths:
        raise ValueError("nothing to evaluate: give --runs=DIR[,DIR], and at least one of tasks and lengths")
    lengths = [parse_length(length) for length in config.lengths]
    samples = config.samples * len(lengths) if len(config.samples) == 1 else config.samples
    if len(samples) != len(lengths) or min(samples) < 1:
        raise ValueError(
            f"samples={config.samples}: expected one number >= 1, or one for each of {len(lengths)} lengths"
        )
    device = pick_device(config.device)
    loaded = [(run, *load_run(run, config.checkpoint, device)) for run in config.runs]
    if config.angles != "exact":
        for _, model, _ in loaded:
            round_angles(model, getattr(torch, config.angles))
    work = []
    for run, model, trained in loaded:
        in_text = "tokenizer" in trained["data"]
        known = data_copy.TEXT_TASKS if in_text else data_copy.TASKS
        for task in config.tasks:
            if task not in known:
                raise ValueError(f"tasks: {task!r} is not one of {', '.join(known)}")
        if not in_text:
            check_length(model, 2 * max(high for _, high in lengths) + 5)
        elif trained["task"] != "finetune":
            raise ValueError(f"{run}: not finetuned on copying; --val_data or --prompt show what it knows")
        elif not config.kinds or {*config.kinds} - {*data_copy.KINDS}:
            raise ValueError(f"kinds={config.kinds}: expected some of {', '.join(data_copy.KINDS)}")
        kinds = config.kinds if in_text else (None,)
        for task in config.tasks:
            ps = config.repeat_p if task == "repeat-structure" else config.repeat_p[:1]
            work += [(run, model, trained, task, kind, p) for kind in kinds for p in ps]
    leader = rank_and_world()[0] == 0
    bar = tqdm(
        total=len(work) * sum(samples),
        unit="string",
        disable=not leader,
        dynamic_ncols=True,
        mininterval=0.2 if sys.stderr.isatty() else 10,
    )
    rows = []
    for run, model, trained, task, kind, p in work:
        for bounds, n in zip(lengths, samples, strict=True):
            bar.set_description(f"{trained['pos_encoding']} {task} {bounds[1]}")
            about = {
                "run": run,
                "pos_encoding": trained["pos_encoding"],
                "seed": trained["seed"],
                "trained_to": longest_trained(trained),
                "step": trained["steps_done"],
                "dtype": config.dtype,
            }
            with precision(config, device):
                rows.append(about | evaluate(model, trained, task, kind, bounds, n, config, bar, p))
            if rows[-1]["exact_match"] < {"never": 0, "failure": 1, "zero": 1e-9}[config.stop]:
                break
    bar.close()
    return rows


def text_losses(config: EvalConfig) -> list[dict]:
    """The report: for each run, the loss on the first windows of val_data's own fixed order, sharded over ranks."""
    rank, world = rank_and_world()
    device = pick_device(config.device)
    rows = []
    for run in config.runs:
        model, trained = load_run(run, config.checkpoint, device)
        tokenizer = tokenizer_of(run, trained, config.tokenizer)
        corpus = Corpus(config.val_data, tokenizer.identity)
        check_length(model, corpus.length)
        sizes = torch.tensor([len(piece) for piece in tokenizer.token_bytes], device=device)
        windows = corpus.order(np.arange(min(config.windows, corpus.rows)), 0)
        losses, n_bytes = torch.zeros(len(windows), dtype=torch.float64), 0
        for i in tqdm(range(rank, len(windows), world), desc=run, unit="window", mininterval=1, disable=rank != 0):
            window = torch.from_numpy(corpus.read(windows[i : i + 1])).to(device)
            with torch.inference_mode(), precision(config, device):
                losses[i] = model(window[:, :-1], window[:, 1:]).item() / corpus.length
            n_bytes += int(sizes[window[:, 1:]].sum())
        total = torch.cat([losses, torch.tensor([n_bytes], dtype=torch.float64)])
        if world > 1:
            dist.all_reduce(total)
        losses, n_bytes = total[:-1], total[-1].item()
        rows.append(
            {
                "run": run,
                "pos_encoding": trained["pos_encoding"],
                "seed": trained["seed"],
                "step": trained["steps_done"],
                "windows": len(windows),
                "tokens": len(windows) * corpus.length,
                "loss": losses.mean().item(),  # nats a token
                "loss_standard_error": (losses.std() / math.sqrt(len(windows))).item() if len(windows) > 1 else None,
                "bits_per_byte": losses.sum().item() * corpus.length / math.log(2) / n_bytes,
            }
        )
    return rows


def tokenizer_of(run: str, trained: dict, name: str | None) -> Tokenizer:
    """The tokenizer that a run's model was trained with. ValueError if it had none, or `name` is another."""
    if "tokenizer" not in trained["data"]:
        raise ValueError(f"{run}: not trained on text, it has no tokenizer")
    tokenizer = load_tokenizer(name or trained["tokenizer"])
    if lines := configurator.diff(trained["data"]["tokenizer"], tokenizer.identity):
        raise ValueError(f"tokenizer={tokenizer.name!r}: {run} has another: {'; '.join(lines)}")
    return tokenizer


def write_text(config: EvalConfig) -> None:
    """Prints the prompt and what the first run's model writes after it, until its end-of-sequence token."""
    if not config.runs:
        raise ValueError("nothing to write with: give --runs=DIR")
    device = pick_device(config.device)
    model, trained = load_run(config.runs[0], config.checkpoint, device)
    tokenizer = tokenizer_of(config.runs[0], trained, config.tokenizer)
    prompt = sys.stdin.read() if config.prompt == "-" else config.prompt
    tokens = tokenizer.encode(prompt).tolist() or [tokenizer.eos]  # after an end of sequence, a text begins
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may need several tokens
    print(prompt, end="", flush=True)
    new = model.generate(
        [tokens], config.max_new_tokens, config.temperature, config.top_k, config.top_p, config.sample_seed
    )
    with precision(config, device):
        for token in new:
            if token.item() == tokenizer.eos:
                break
            print(decoder.decode(tokenizer.decode_bytes([token.item()])), end="", flush=True)
    print(decoder.decode(b"", final=True))


def main() -> None:
    config = configurator.configure(EvalConfig, doc=__doc__)
    if config.prompt is not None:
        write_text(config)
        return
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("gloo")
    try:
        rows = text_losses(config) if config.val_data else copy_ladder(config)
        if rank_and_world()[0] == 0:
            name = "losses" if config.val_data else "accuracy"
            out = Path(config.out_dir)
            with configurator.atomic(out / f"{name}.json") as file:
                file.write(json.dumps(rows, indent=1).encode() + b"\n")
            print(loss_table(rows) if config.val_data else table(rows))
            print(f"rows: {out / name}.json")
            if config.plot:
                (plot_losses if config.val_data else plot)(rows, out / f"{name}.png")
                print(f"plot: {out / name}.png")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    configurator.run_cli(main)
