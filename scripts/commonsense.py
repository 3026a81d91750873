"""Common-sense reasoning, by EleutherAI's lm-evaluation-harness: pip install lm_eval==0.4.13

    python commonsense.py --runs=out/350m/rope,out/350m/2d-rope    # the paper's eight tasks and their mean
    python commonsense.py --runs=out/350m --tasks=mine --include_path=my_tasks --limit=100

Writes commonsense.json, a row for each run and task, to out_dir, and prints a table. The paper says "average accuracy"
and no more. Here ARC-challenge and HellaSwag are judged by acc_norm, log-likelihoods divided by the answers' lengths,
the other tasks by acc, as in Mamba's table (arXiv 2312.00752); a row's "all" has both. Shots are those of lm_eval's
tasks, none for the eight. Where block_size has no room for a question, it loses its beginning.
"""

import difflib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

import configurator
import qwen3
from data_dclm import Tokenizer, load_tokenizer
from eval import load_run, tokenizer_of
from model import Decoder
from train import pick_device

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.tasks import TaskManager
except ImportError:
    TemplateLM = object  # common_sense() says what is missing

EIGHT = ("arc_easy", "arc_challenge", "hellaswag", "winogrande", "mmlu", "lambada_openai", "piqa", "boolq")
ACCURACIES = {"acc", "acc_norm", "exact_match"}  # metrics that a mean over tasks is made of


@dataclass
class CommonSenseConfig:
    """Common-sense reasoning"""

    runs: tuple[str, ...] = ()  # run directories, checkpoint files, or Hugging Face folders of Qwen3
    checkpoint: Literal["last", "best"] = "last"  # which of a run directory's
    tasks: tuple[str, ...] = EIGHT  # tasks, groups or tags of lm_eval or of include_path
    include_path: str | None = None  # folder with task YAMLs of your own
    num_fewshot: int | None = None  # solved examples before each question; None: as many as the task says
    limit: int | None = None  # questions of each task, the first ones; None: all
    batch_tokens: int = 16384  # tokens that go through the model together; a longer question goes alone
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: the first of these that there is
    tokenizer: str | None = None  # where the runs' tokenizer is now; None: where it was in training
    out_dir: str = "out/commonsense"  # commonsense.json goes here

    def __post_init__(self):
        for name, low in (("num_fewshot", 0), ("limit", 1), ("batch_tokens", 1)):
            if (value := getattr(self, name)) is not None and value < low:
                raise ValueError(f"{name}={value}: expected at least {low}")
        if not self.runs or not self.tasks:
            raise ValueError("nothing to evaluate: give --runs=DIR[,DIR], and at least one of tasks")


class OurLM(TemplateLM):
    """A Decoder as lm_eval's model. TemplateLM makes tokens of question and answer, as for Hugging Face's models."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, batch_tokens: int):
        super().__init__()
        self.model, self.tokenizer, self.batch_tokens = model, tokenizer, batch_tokens
        self.room = model.config.block_size

    eot_token_id = property(lambda self: self.tokenizer.eos)  # also what stands for an empty question

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        return self.tokenizer.encode(string).tolist()

    def batches(self, items: Iterable[tuple[Sequence[int], Any]], more: int = 0) -> tqdm:
        """Of (tokens, _), longest first, as many as batch_tokens has room for when padded and `more` tokens longer."""
        items, batches = sorted(items, key=lambda item: len(item[0])), []
        while items:
            n = max(1, self.batch_tokens // (len(items[-1][0]) + more))
            batches.append([items.pop() for _ in items[-n:]])
        return tqdm(batches, "batches", mininterval=1)

    @torch.inference_mode()
    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list, list]], **_) -> list[tuple[float, bool]]:
        """For each (_, question, answer): log-likelihood of the answer in nats, is it what greedy decoding writes?"""
        device, results = self.model.newlines.device, [(0.0, True)] * len(requests)
        same: dict[tuple, list[int]] = {}  # requests by what the model reads, which the answers A, B, C and D share
        for i, (_, question, answer) in enumerate(requests):
            if not 1 <= len(answer) <= self.room:
                raise ValueError(f"answer of {len(answer)} tokens: expected 1 to block_size={self.room}")
            text = (question or [self.eot_token_id]) + answer
            same.setdefault(tuple(text[-self.room - 1 : -1]), []).append(i)
        for batch in self.batches(same.items()):
            tokens = pad_sequence([torch.tensor(text) for text, _ in batch], batch_first=True)  # (B, T), padding behind
            for (text, ids), states in zip(batch, self.model.hidden(tokens.to(device)), strict=True):  # (T, C)
                for i in ids:
                    answer = torch.tensor(requests[i][2], device=device)  # (A,)
                    logits = self.model.head(states[len(text) - len(answer) : len(text)]).float()  # (A, vocab_size)
                    nats = logits.log_softmax(-1).gather(1, answer[:, None]).cpu().double().sum()
                    results[i] = nats.item(), bool((logits.argmax(-1) == answer).all())
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of whole texts, each token once, in windows of block_size: lm_eval's get_rolling_token_windows, disjoint."""
        room, windows, totals = self.room, [], [0.0] * len(requests)
        for i, request in enumerate(requests):
            text = [self.eot_token_id, *self.tok_encode(request.args[0])]
            windows += [(i, text[max(0, at - room) : at], text[at : at + room]) for at in range(1, len(text), room)]
        for (i, _, _), (nats, _) in zip(windows, self._loglikelihood_tokens(windows), strict=True):
            totals[i] += nats
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy unless do_sample; up to a string of `until`, an end of sequence, or max_gen_toks tokens."""
        results = []
        for setting, same in groupby([request.args for request in requests], key=lambda args: args[1]):  # by task
            knobs = {"temperature": 1.0, "top_k": None, "top_p": None} | normalize_gen_kwargs(setting)
            most, until = knobs.pop("max_gen_toks"), [stop for stop in knobs.pop("until") if stop]
            knobs["temperature"] *= knobs.pop("do_sample")  # 0 is greedy
            if unknown := knobs.keys() - {"temperature", "top_k", "top_p"}:
                raise ValueError(f"generation_kwargs: {', '.join(unknown)} is not known here")
            prompts = [self.tok_encode(text)[-max(1, self.room - most) :] or [self.eot_token_id] for text, _ in same]
            texts = [b""] * len(prompts)
            for seed, batch in enumerate(self.batches(zip(prompts, range(len(prompts)), strict=True), most)):
                going = {p for _, p in batch}
                for step in self.model.generate([prompt for prompt, _ in batch], most, **knobs, seed=seed):
                    for (_, p), token in zip(batch, step.tolist(), strict=True):
                        if p in going:
                            texts[p] += b"".join(self.tokenizer.token_bytes[token : token + 1])  # Qwen3 pads its ids
                            if token == self.eot_token_id or any(stop.encode() in texts[p] for stop in until):
                                going.remove(p)
                    if not going:
                        break
            results += [postprocess_generated_text(text.decode("utf-8", "replace"), until, None) for text in texts]
        return results


def load_model(run: str, config: CommonSenseConfig) -> tuple[OurLM, dict]:
    """A run's model, and what its rows say of it."""
    device, theirs = pick_device(config.device), (Path(run) / "config.json").is_file()
    model, trained = (qwen3.load(run, device).eval(), {}) if theirs else load_run(run, config.checkpoint, device)
    tokenizer = load_tokenizer(config.tokenizer or run) if theirs else tokenizer_of(run, trained, config.tokenizer)
    about = {"run": run, "pos_encoding": model.config.pos_encoding, "seed": trained.get("seed")}
    return OurLM(model, tokenizer, config.batch_tokens), about | {"step": trained.get("steps_done")}


def common_sense(config: CommonSenseConfig) -> list[dict]:
    """The report: a row for each run and task, and for a run's mean if all of its tasks have an accuracy."""
    if TemplateLM is object:
        raise ValueError("common-sense tasks need lm_eval: pip install lm_eval==0.4.13")
    if config.include_path and not Path(config.include_path).is_dir():
        raise FileNotFoundError(f"include_path={config.include_path!r}: no such folder")
    models, manager = [load_model(run, config) for run in config.runs], TaskManager(include_path=config.include_path)
    tasks, rows = {}, []
    for name in config.tasks:
        if name not in manager.all_tasks:
            near = ", ".join(difflib.get_close_matches(name, manager.all_tasks, 3, cutoff=0.0))
            raise ValueError(f"tasks: {name!r} is none of lm_eval's or include_path's, the nearest are {near}")
        try:
            loaded = manager.load(name)
        except Exception as error:  # the hub, the network and damaged files fail in a dozen ways
            hint = "lm_eval gets data from the Hugging Face hub once; offline, point HF_HOME at a cache that has it"
            raise RuntimeError(f"no data for task {name} ({type(error).__name__}: {error}): {hint}") from error
        group = loaded["groups"].get(name)
        tasks |= {name: group} if group and group.has_aggregation else loaded["tasks"]
    for lm, about in models:
        settings = dict(num_fewshot=config.num_fewshot, limit=config.limit, bootstrap_iters=0, log_samples=False)
        results = simple_evaluate(lm, tasks=[*tasks.values()], task_manager=manager, **settings)["results"]
        own = [about | score(task, results[task]) for task in tasks]
        if {row["metric"] for row in own} <= ACCURACIES:
            value, n = sum(row["value"] for row in own) / len(own), sum(row["samples"] for row in own)
            stderr = math.hypot(*(row["stderr"] for row in own)) / len(own)
            own.append(about | {"task": "mean", "metric": "acc", "value": value, "stderr": stderr, "samples": n})
        rows += own
    return rows


def score(task: str, found: dict[str, Any]) -> dict[str, Any]:
    """A row's part on a task, of lm_eval's results. The standard error is binomial, None for what is no accuracy."""
    values = {key: value for key, value in found.items() if "," in key and "_stderr," not in key}
    wanted = "acc_norm,none" if task in ("arc_challenge", "hellaswag") else "acc,none"
    key = wanted if wanted in values else next(iter(values))
    metric, value, n = key.split(",")[0], values[key], found["sample_len"]
    stderr = math.sqrt(max(0.0, value * (1 - value)) / max(1, n - 1)) if metric in ACCURACIES else None
    return {"task": task, "metric": metric, "value": value, "stderr": stderr, "samples": n, "all": values}


def main() -> None:
    config = configurator.configure(CommonSenseConfig, doc=__doc__)
    rows, out = common_sense(config), Path(config.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    (out / "commonsense.json").write_text(json.dumps(rows, indent=1) + "\n")
    lines = {"": [f"{task:>16}" for task in dict.fromkeys(row["task"] for row in rows)]}
    for row in rows:  # accuracies in percent, with 95% intervals
        value, stderr = row["value"], row["stderr"]
        cell = f"{value:.4g}" if stderr is None else f"{100 * value:.1f} ± {196 * stderr:.1f}"
        lines.setdefault(row["run"], []).append(f"{cell:>16}")
    for run, cells in lines.items():
        print(f"{run:{max(map(len, lines))}}", *cells)
    print(f"rows: {out / 'commonsense.json'}")


if __name__ == "__main__":
    configurator.run_cli(main)
