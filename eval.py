"""Evaluation: exact match of copies against their length; the loss on text.

    python eval.py --runs=out/toy_copy/2d-rope,out/toy_copy/rope --lengths=20,320,5120 --samples=100,20,4
    python eval.py --runs=out/run --lengths=1-25,26-50,51-100 --free_running=True
    torchrun --nproc_per_node=2 eval.py ...                            # strings shared out; the same numbers
    python eval.py --runs=out/finetuned --tasks=imbalanced,lists --lengths=64,256     # copies in text, by template kind
    python eval.py --runs=out/pretrain/rope,out/pretrain/2d-rope --val_data=data/fineweb-edu   # losses.json, .png
    python eval.py --runs=out/finetuned --tasks=imbalanced --val_data=data/fineweb-edu     # both; losses before, after

Writes accuracy.json, a row for each run, task and length, and accuracy.png to out_dir, and prints a table.

A copy is right when every token of it and the separator that ends it are right. Under greedy decoding that is the same
as every target token being the argmax under teacher forcing: if all are, greedy decoding produces them one by one; if
not, the first that is not is where greedy decoding goes wrong too. So one parallel forward replaces n decoding steps;
free_running=True decodes for real.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
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
import data_text
import hf
import passages
import plots
from checkpoint import rank_and_world
from data_copy import IGNORE, SEPARATORS
from data_dclm import open_corpus
from data_text import TextCopyConfig
from model import Decoder
from sample import generate, tokenizer_of
from tokenizer import Tokenizer

STOP_BELOW = {"never": 0.0, "zero": 1e-9, "failure": 1.0}  # exact match after which no longer lengths are tried


@dataclass
class EvalConfig:
    """Evaluation"""

    runs: tuple[str, ...] = ()  # run directories or checkpoint files
    checkpoint: Literal["last", "best"] = "last"  # which of a run directory's
    tasks: tuple[str, ...] = ("imbalanced", "recursive-flip", "uniform")  # to copy; none: what each run is trained on
    kinds: tuple[str, ...] = data_text.KINDS  # in text: where in the prompt the string stands
    lead: str = ""  # in text: words to put before every prompt, as they are; a first string is then in mid-sentence
    lengths: tuple[int | str, ...] = (20, 320)  # tokens; in text symbols, points, lines; or intervals, 26-50
    samples: tuple[int, ...] = (20,)  # strings for each task and length; one number for all lengths, or one for each
    text_source: tuple[str, ...] = ()  # files and folders to cut passages from; none: those of training
    eval_seed: int = 0  # of the strings
    repeat_p: tuple[float, ...] = (0.9,)  # repeat-structure: shares of a base's repetitions to keep, each in turn
    # Leave out lengths after one with a wrong copy (failure), or without a right one (zero).
    stop: Literal["never", "failure", "zero"] = "never"
    free_running: bool = False  # decode token by token instead of one parallel forward
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the matrix products
    block_size: int | None = None  # longest sequence in tokens; None: the model's own bound
    chunk: int = 1024  # tokens that go through the model at a time; memory grows with it
    batch_tokens: int = 16384  # tokens that are evaluated together
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: the first of these that there is
    out_dir: str = "out/eval"  # accuracy.json and accuracy.png go here
    plot: bool = True  # draw accuracy.png
    val_data: str = ""  # shards to measure text models' loss on, instead of copying; with tasks given, beside it
    windows: int = 256  # sequences of val_data
    tokenizer: str | None = None  # where the runs' tokenizer is now; None: where it was in training

    def __post_init__(self):
        checkpoint.check_seeds(eval_seed=self.eval_seed)
        for name in ("chunk", "batch_tokens", "windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
        if not self.repeat_p or not all(0 <= p <= 1 for p in self.repeat_p):
            raise ValueError(f"repeat_p={self.repeat_p}: expected shares between 0 and 1")
        if not self.runs:
            raise ValueError("nothing to evaluate: give --runs=DIR[,DIR]")
        if not self.lengths:
            raise ValueError("nothing to evaluate: give --lengths=N[,N]")
        if len(self.samples) not in (1, n := len(self.lengths)):
            raise ValueError(f"samples={self.samples}: expected one number, or one for each of {n} lengths")
        if not all(1 <= n <= 10**6 for n in self.samples):
            raise ValueError(f"samples={self.samples}: expected 1 to 1,000,000 each")


class Verdict(NamedTuple):
    """One string. Positions count from 0; position n is the closing separator of a string of n tokens."""

    targets: int  # tokens to get right: n + 1
    errors: int  # of them wrong
    first_error: int | None  # position of the first
    margin: float  # smallest lead of the right token's logit over the best other one; negative where it is wrong
    weakest: int | None = None  # position of that lead; None where there are no logits
    lines: float | None = None  # of passages that were decoded: share of lines that are right
    similarity: float | None = None  # and 1 - edit distance / length


class Cell(NamedTuple):
    """What one row of the report is about."""

    task: str
    kind: str | None  # in text: where in the prompt the string stands; None for strings of tokens
    repeat_p: float  # of repeat-structure
    low: int  # lengths
    high: int
    samples: int


def teacher_forced(
    model: Decoder, sources: Sequence[np.ndarray], separator: int, chunk: int = 1024, task: str = ""
) -> list[Verdict]:
    """Verdicts on strings of any lengths, by one forward in chunks. ValueError beyond the model's block_size."""
    return judge(model, *data_copy.pack(sources, [len(source) for source in sources], separator, task), chunk)


def lead_of(logits: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """How far the right token's logit is above the best other one: (N,) of logits (N, vocab_size), right (N,)."""
    right = right[:, None]
    return (logits.gather(1, right) - logits.scatter(1, right, -math.inf).amax(1, keepdim=True))[:, 0]


def judge(model: Decoder, inputs: np.ndarray, targets: np.ndarray, chunk: int) -> list[Verdict]:
    """Verdicts on the targets (N, T), IGNORE where there is none, of right-padded inputs (N, T)."""
    device = model.breaks.device
    inputs, targets = torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device)
    wanted = targets != IGNORE
    model.check_length(inputs.shape[1])
    cache, leads = model.new_cache(), []
    with torch.inference_mode():
        for start in range(0, inputs.shape[1], chunk):
            part = slice(start, start + chunk)
            want = wanted[:, part]
            states = model.hidden(inputs[:, part], cache, keys_only=not want.any())
            if states is not None:
                logits = model.head(states[want]).float()  # (targets in the chunk, vocab_size)
                leads.append((want.nonzero()[:, 0].cpu(), lead_of(logits, targets[:, part][want]).cpu()))
    row, lead = torch.cat([r for r, _ in leads]), torch.cat([x for _, x in leads])
    return [verdict(~(own > 0), own) for own in (lead[row == i] for i in range(len(inputs)))]


def free_running(
    model: Decoder, sources: Sequence[np.ndarray], separator: int, chunk: int = 1024, task: str = ""
) -> list[Verdict]:
    """Verdicts by greedy decoding, n + 1 tokens for a string of n; margin is nan. ValueError as above."""
    samples = [data_copy.lay_out(source, separator, task) for source in sources]
    prompts, answers = [prompt.tolist() for prompt, _ in samples], [torch.from_numpy(answer) for _, answer in samples]
    longest = max(map(len, answers))
    model.check_length(max(map(len, prompts)) + longest - 1)
    written = torch.stack([t.cpu() for t in generate(model, prompts, longest, chunk=chunk)], dim=1)  # (B, longest)
    return [verdict(out[: len(answer)] != answer) for out, answer in zip(written, answers, strict=True)]


def judge_text(model: Decoder, tokenizer: Tokenizer, records: Sequence[dict], free: bool, chunk: int) -> list[Verdict]:
    """Verdicts on answers to data_text's examples. Targets are tokens; with `free`, which decodes for real, they are
    symbols or points, as data_text.score counts them, and one more for the end."""
    chats = [tokenizer.chat(record["messages"]) for record in records]
    if not free:
        return judge(model, *data_text.pad_chats(chats), chunk)
    prompts = [ids[: int(loss_mask.argmax())].tolist() for ids, loss_mask in chats]
    limits, end = [answer_limit(record) for record in records], int(chats[0][0][chats[0][1]][-1])
    written, ended = [], torch.zeros(len(records), dtype=torch.bool)
    for new in generate(model, prompts, max(limits), chunk=chunk):
        written.append(new.cpu())
        ended |= written[-1] == end
        if ended.all():
            break
    verdicts = []
    for record, limit, row in zip(records, limits, torch.stack(written, dim=1).tolist(), strict=True):
        row = row[:limit]
        ended = end in row
        verdicts.append(verdict_on(record, tokenizer.decode(row[: row.index(end)] if ended else row), ended))
    return verdicts


def verdict_on(record: dict, answer: str, ended: bool = True) -> Verdict:
    """Of an answer in text: targets are its symbols or points, as data_text.score counts them, and its end."""
    score = data_text.score(record, answer)
    first = score.first_error if not score.correct else None if ended else score.total
    errors = score.total - score.right + (not ended or score.reason in ("form", "too long"))
    is_passage = (record.get("metadata") or {}).get("task") in data_text.DOCUMENTS
    extra = passages.passage_scores(record["messages"][-1]["content"], answer) if is_passage else (None, None)
    return Verdict(score.total + 1, errors, first, math.nan, None, *extra)


def answer_limit(record: dict) -> int:
    """Tokens that an answer may have: no tokenizer needs more than its bytes and the end for the right one."""
    return len(record["messages"][-1]["content"].encode()) + 1


def verdict(wrong: torch.Tensor, lead: torch.Tensor | None = None) -> Verdict:
    """Of one string: which of its targets are wrong, and by how much each leads, where that is known."""
    first = int(wrong.float().argmax()) if wrong.any() else None
    margin, weakest = (math.nan, None) if lead is None else (lead.min().item(), int(lead.argmin()))
    return Verdict(len(wrong), int(wrong.sum()), first, margin, weakest)


def examples_of(run: str, trained: dict, cell: Cell, config: EvalConfig) -> tuple[list, list[int]]:
    """The strings of a cell, or in text its chats, and how many tokens the model sees of each, at most."""
    if cell.kind is None:
        bounds = cell.low, cell.high, cell.samples, config.eval_seed, cell.repeat_p
        sources = data_copy.evaluation_strings(cell.task, *bounds)
        return sources, [sum(map(len, data_copy.lay_out(source, task=cell.task))) - 1 for source in sources]
    tokenizer = tokenizer_of(run, trained, config.tokenizer)
    text = TextCopyConfig(cell.task, tuple(trained["symbols"]), cell.kind, cell.low, cell.high, cell.repeat_p)
    text.text_unit, text.text_source = trained["text_unit"], config.text_source or tuple(trained["text_source"])
    chats = list(data_text.text_examples(text, cell.samples, config.eval_seed, "evaluation"))
    for chat in chats:
        chat["messages"][0]["content"] = config.lead + chat["messages"][0]["content"]
    if not config.free_running:
        return chats, [len(tokenizer.chat(chat["messages"])[0]) - 1 for chat in chats]
    longest = max(map(answer_limit, chats))  # those that are decoded together are so for as many steps
    return chats, [int(tokenizer.chat(chat["messages"])[1].argmax()) + longest - 1 for chat in chats]


def evaluate(run: str, model: Decoder, trained: dict, cell: Cell, config: EvalConfig, bar: tqdm | None = None) -> dict:
    """One row of the report. With torchrun, the strings are shared out and the verdicts gathered."""
    rank, world = rank_and_world()
    began = time.perf_counter()
    examples, sizes = examples_of(run, trained, cell, config)
    if cell.kind is not None:
        tokenizer = tokenizer_of(run, trained, config.tokenizer)
    if config.free_running:
        mode = "free-running"
    elif cell.kind is not None and (tokenizer.name != "bytes" or cell.task == "lists"):
        mode = "teacher-forced, a lower bound"  # other tokens may be as right
    else:
        mode = "teacher-forced"

    own = sorted(range(rank, cell.samples, world), key=lambda i: sizes[i])
    together = max(1, config.batch_tokens // max(sizes))
    verdicts: dict[int, Verdict] = {}
    for start in range(0, len(own), together):
        ids = own[start : start + together]
        group = [examples[i] for i in ids]
        if cell.kind is not None:
            judged = judge_text(model, tokenizer, group, config.free_running, config.chunk)
        elif config.free_running:
            judged = free_running(model, group, SEPARATORS[trained["separator"]], config.chunk, cell.task)
        else:
            judged = teacher_forced(model, group, SEPARATORS[trained["separator"]], config.chunk, cell.task)
        verdicts.update(zip(ids, judged, strict=True))
        if bar:
            bar.update(len(ids) * world)
    for part in checkpoint.gather(verdicts):
        verdicts.update(part)
    results = [verdicts[i] for i in range(cell.samples)]
    return row_of(cell, mode, results) | {"seconds": round(time.perf_counter() - began, 3)}


def row_of(cell: Cell, mode: str, results: Sequence[Verdict]) -> dict:
    """A row of the report, from the verdicts on its strings."""
    hits, n = sum(v.errors == 0 for v in results), len(results)
    low, high = plots.wilson(hits, n)
    decoded = math.isnan(results[0].margin)  # without logits
    scored = [v for v in results if v.similarity is not None]  # passages
    return {
        "task": cell.task,
        "kind": cell.kind,
        "repeat_p": cell.repeat_p if cell.task == "repeat-structure" else None,
        "mode": mode,
        "length": cell.high,
        "min_length": cell.low,
        "samples": n,
        "exact_match": hits / n,
        "exact_match_low": low,
        "exact_match_high": high,
        "token_error": sum(v.errors for v in results) / sum(v.targets for v in results),
        "only_closing_wrong": sum(v.first_error == v.targets - 1 for v in results) / n,
        "first_errors": [v.first_error for v in results],
        "lines_right": sum(v.lines for v in scored) / n if scored else None,
        "similarity": sum(v.similarity for v in scored) / n if scored else None,
        "margin": None if decoded else min(v.margin for v in results),
        "margins": None if decoded else [[v.margin, v.weakest] for v in results],  # of each string, and where
    }


def longest_trained(trained: dict, task: str) -> int | None:
    """Tokens, or symbols, points, lines or characters of the longest string in training; None where that was of another
    kind than `task`, or from a file."""
    if trained["task"] != "finetune":
        return trained["max_length"]
    counted = [data_text.counts_of(name) for name in (task, trained["text_task"])]
    if counted[0] != counted[1] or trained["chats"]:
        return None
    names = ("text_task", "text_max_length", "text_unit")
    text = TextCopyConfig(**{name: trained[name] for name in names})
    return data_text.length_bounds(text, "train")[1]


def cells_of(run: str, model: Decoder, trained: dict, config: EvalConfig) -> list[list[Cell]]:
    """What to ask of a run: a list of cells, shortest first as they were given, for each task, kind and repeat_p.
    ValueError for what it cannot be asked."""
    lengths = [plots.parse_length(length) for length in config.lengths]
    samples = config.samples * len(lengths) if len(config.samples) == 1 else config.samples
    in_text = "tokenizer" in trained["data"]
    if in_text and trained["task"] != "finetune":
        raise ValueError(f"{run}: not finetuned on copying; --val_data, or sample.py, shows what it knows")
    for name in ("lead", "tokenizer") if not in_text else ():
        if (value := getattr(config, name)) != getattr(EvalConfig, name):
            raise ValueError(f"{name}={value!r}: {run} was trained on strings of tokens, not on text")
    known = data_text.TEXT_TASKS if in_text else data_copy.TASKS
    tasks = config.tasks or (trained["text_task" if in_text else "copy_task"],)
    for task in tasks:
        if task not in known:
            raise ValueError(f"tasks: {task!r} is not one of {', '.join(known)}")
    if in_text and (not config.kinds or set(config.kinds) - set(data_text.KINDS)):
        raise ValueError(f"kinds={config.kinds}: expected some of {', '.join(data_text.KINDS)}")
    lines = []
    for kind in config.kinds if in_text else (None,):
        for task in tasks:
            for p in config.repeat_p if task == "repeat-structure" else config.repeat_p[:1]:
                lines.append([Cell(task, kind, p, *b, n) for b, n in zip(lengths, samples, strict=True)])
    for line in lines:
        for cell in line:
            model.check_length(max(examples_of(run, trained, cell, config)[1]))
    return lines


def load_runs(config: EvalConfig, device: torch.device) -> list[tuple[str, Decoder, dict]]:
    given = config.checkpoint, device
    return [(run, *checkpoint.load_run(run, *given, block_size=config.block_size)) for run in config.runs]


def about(run: str, trained: dict) -> dict:
    """What each row says of its run."""
    return {"run": run, "pos_encoding": trained["pos_encoding"], "seed": trained["seed"], "step": trained["steps_done"]}


def copy_accuracy(config: EvalConfig) -> list[dict]:
    """The report on copying: a row for each run, task and length."""
    device = checkpoint.pick_device(config.device)
    runs = load_runs(config, device)
    lines = {run: cells_of(run, model, trained, config) for run, model, trained in runs}  # all are checked first
    total = sum(cell.samples for cells in lines.values() for line in cells for cell in line)
    rows, bar = [], checkpoint.progress(total, "string")
    for run, model, trained in runs:
        for line in lines[run]:
            for cell in line:
                bar.set_description(f"{trained['pos_encoding']} {cell.task} {cell.high}")
                with checkpoint.autocast(device, config.dtype):
                    row = evaluate(run, model, trained, cell, config, bar)
                facts = {"trained_to": longest_trained(trained, cell.task), "dtype": config.dtype}
                rows.append(about(run, trained) | facts | row)
                if row["exact_match"] < STOP_BELOW[config.stop]:
                    break
    bar.close()
    return rows


def text_losses(config: EvalConfig, with_starts: bool = False) -> list[dict]:
    """The report on text: for each run, the loss on the first windows of val_data's own fixed order. with_starts: for
    the weights that a run was finetuned from, too, as its step 0."""
    rank, world = rank_and_world()
    device, work, rows = checkpoint.pick_device(config.device), [], []
    for run, model, trained in load_runs(config, device):  # all are checked first
        tokenizer = tokenizer_of(run, trained, config.tokenizer)
        corpus = open_corpus(config.val_data, tokenizer.fingerprint, model.config.block_size)
        start = trained["init_from"] if with_starts else ""
        if start and not Path(start).exists():
            print(f"{run} started from {start}, which is gone: no loss before finetuning")
        elif start and start not in [other for other, *_ in work]:
            before = hf.load_start(start, {"block_size": model.config.block_size})[0].to(device).eval()
            file = Path(start) / "last.pt" if Path(start).is_dir() else Path(start)  # a Hugging Face folder has none
            seed = checkpoint.read(file)["config"]["seed"] if file.exists() else None
            was = {"steps_done": 0, "pos_encoding": before.config.pos_encoding, "seed": seed, "init_from": ""}
            work.append((start, before, was, tokenizer, corpus))
        work.append((run, model, trained, tokenizer, corpus))
    for run, model, trained, tokenizer, corpus in work:
        sizes = torch.tensor([len(piece) for piece in tokenizer.token_bytes], device=device)
        windows = corpus.order(np.arange(min(config.windows, corpus.rows)), 0)
        losses, n_bytes = torch.zeros(len(windows), dtype=torch.float64), 0
        bar = checkpoint.progress(len(windows), "window", desc=run)
        for i in range(rank, len(windows), world):
            window = torch.from_numpy(corpus.read(windows[i : i + 1])).to(device)
            with torch.inference_mode(), checkpoint.autocast(device, config.dtype):
                losses[i] = model(window[:, :-1], window[:, 1:]).item() / corpus.length
            n_bytes += int(sizes[window[:, 1:]].sum())
            bar.update(world)
        bar.close()
        parts = checkpoint.gather((losses, n_bytes))
        losses, n_bytes = sum(part for part, _ in parts), sum(n for _, n in parts)
        error = (losses.std() / math.sqrt(len(windows))).item() if len(windows) > 1 else None
        facts = {
            "windows": len(windows),
            "tokens": len(windows) * corpus.length,
            "loss": losses.mean().item(),  # nats a token
            "loss_standard_error": error,
            "bits_per_byte": losses.sum().item() * corpus.length / math.log(2) / n_bytes,
        }
        rows.append(about(run, trained) | facts)
        if with_starts:
            rows[-1]["start"] = trained["init_from"]
    return rows


def unused_knobs(config: EvalConfig, copies: bool) -> dict[str, str]:
    """Knobs that do nothing in this evaluation, which is of copies or not, and what they are for."""
    if not copies:
        names = "tasks kinds lead lengths samples eval_seed repeat_p stop free_running chunk batch_tokens".split()
        return dict.fromkeys(names, "copies, not for the loss on val_data")
    unused = {} if config.val_data else {"windows": "val_data"}
    if config.tasks and not set(config.tasks) & set(data_text.DOCUMENTS):
        unused["text_source"] = "passages (tasks=documents, prose, ...)"
    if config.tasks and "repeat-structure" not in config.tasks:
        unused["repeat_p"] = "tasks=repeat-structure"
    return unused


def report(config: EvalConfig, name: str, rows: list[dict], table: Callable, plot: Callable) -> None:
    """Writes and prints the rows, on rank 0."""
    if rank_and_world()[0] == 0:
        path = Path(config.out_dir) / f"{name}.json"
        configurator.write_json(path, rows)
        print(f"{table(rows)}\nrows: {path}")
        if config.plot:
            plot(rows, path.with_suffix(".png"))
            print(f"plot: {path.with_suffix('.png')}")


def main() -> None:
    given: dict[str, str] = {}
    config = configurator.configure(EvalConfig, doc=__doc__, given=given)
    copies = not config.val_data or "tasks" in given
    configurator.check_used(given, unused_knobs(config, copies), config)
    if config.plot:
        plots.pyplot()  # what is missing is noticed before the work
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("gloo")
    try:
        if copies:
            report(config, "accuracy", copy_accuracy(config), plots.table, plots.plot)
        if config.val_data:
            report(config, "losses", text_losses(config, with_starts=copies), plots.loss_table, plots.plot_losses)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    configurator.run_cli(main)
