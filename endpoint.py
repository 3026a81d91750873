"""Copies by any model behind an OpenAI-compatible chat endpoint, or from a file of answers: our prompts, our scores.

    python endpoint.py --endpoint=http://localhost:8000/v1 --model=NAME --tasks=imbalanced,lists --lengths=64,128-256
    python endpoint.py --endpoint=... --model=... --tasks=repeat-structure --repeat_p=0.5,0.7,0.9   # paper's figure 2
    python endpoint.py --endpoint=... --model=... --records=data/copies.jsonl   # prompts from a file in chat form
    python endpoint.py --records=data/copies.jsonl --answers=answers.jsonl      # answers from elsewhere, no network

Strings are those that eval.py asks of our own models. An API key comes from the environment, OPENAI_API_KEY. Answers
are kept in out_dir/answers.jsonl at once; the same command again asks only what is missing. Lines of --answers are
{"id": ..., "answer": "..."}, or chats that end in the answer; a record without an id goes by its line number.
"""

import hashlib
import json
import os
import random
import re
import threading
import time
from dataclasses import dataclass, fields
from http.client import HTTPException
from multiprocessing.pool import ThreadPool
from pathlib import Path
from urllib.request import HTTPHandler, HTTPSHandler, OpenerDirector, ProxyHandler, Request

from tqdm import tqdm

import configurator
from data_copy import KINDS, TEXT_TASKS, TextCopyConfig, read_jsonl, score, text_examples
from report import interval, parse_length, plot, table, wilson

URL = r"(?i)https?://(\[[\da-f:.]+\]|[^\s/:?#@\[\]]+)(:\d{1,5})?(/[^\s?#]*)?"
BACKOFF = 0.5  # seconds before the second attempt, twice as long before each further one
OPENER = OpenerDirector()  # follows no redirects, which would take the key to other hosts
for handler in (ProxyHandler, HTTPHandler, HTTPSHandler):
    OPENER.add_handler(handler())


@dataclass
class EndpointConfig:
    """Evaluation of a chat endpoint"""

    endpoint: str = ""  # base URL, such as http://localhost:8000/v1
    model: str = ""  # as the endpoint calls it; for answers: what the table calls them
    records: str = ""  # JSONL file in chat form to take prompts from, in place of the next seven knobs
    tasks: tuple[str, ...] = ("imbalanced", "recursive-flip", "uniform")  # strings to copy, or lists
    kinds: tuple[str, ...] = KINDS  # where in the prompt the string stands
    lengths: tuple[int | str, ...] = (64, 256)  # symbols in a string, points in a list; or intervals, 128-256
    samples: tuple[int, ...] = (20,)  # strings for each task, kind and length; one number for all lengths, or one each
    symbols: tuple[str, str] = ("0", "1")  # what strings are made of; with blanks: --symbols="' a',' b'"
    repeat_p: tuple[float, ...] = ()  # of repeat-structure, a row for each; none: data_copy.py's default
    eval_seed: int = 0  # of the strings
    answers: str = ""  # JSONL file of answers to score, in place of an endpoint
    concurrency: int = 8  # requests under way at a time
    retries: int = 5  # attempts at a request, in all; after them it has failed, and counts as wrong
    timeout: float = 300.0  # seconds for an attempt
    temperature: float | None = 0.0  # None: the server's
    max_tokens: int | None = None  # in an answer; None: twice the right one's bytes + 256. Reasoning models need more
    extra: str = "{}"  # JSON to merge into a request, as {"reasoning_effort": "low"}; null takes a name out
    out_dir: str = "out/endpoint"  # answers.jsonl, accuracy.json and accuracy.png go here
    plot: bool = True  # draw accuracy.png

    def __post_init__(self):
        try:
            extra = {*json.loads(self.extra).keys()}
        except (ValueError, AttributeError):
            extra = {"model"}
        own = [f.name for f in fields(self)[3:10] if self.records and getattr(self, f.name) != f.default]
        counted = self.lengths and len(self.samples) in (1, len(self.lengths)) and min(self.samples) > 0
        limits = {name: getattr(self, name) for name in ("concurrency", "retries", "timeout", "max_tokens")}
        for good, name, expected in (
            (bool(self.endpoint) != bool(self.answers), "endpoint", "--endpoint=http://host/v1, or --answers=FILE"),
            (self.answers or re.fullmatch(URL, self.endpoint), "endpoint", "a URL such as http://localhost:8000/v1"),
            (self.answers or self.model, "model", "--model=NAME, as the endpoint calls it"),
            (not own, "records", f"no {', '.join(own)} beside it, the prompts are the file's"),
            (self.tasks and {*self.tasks} <= {*TEXT_TASKS}, "tasks", f"some of {', '.join(TEXT_TASKS)}"),
            (self.kinds and {*self.kinds} <= {*KINDS}, "kinds", f"some of {', '.join(KINDS)}"),
            (not self.repeat_p or "repeat-structure" in self.tasks, "repeat_p", "--tasks=repeat-structure beside it"),
            (counted, "samples", f"one number >= 1, or one for each of lengths={self.lengths}"),
            (not {"messages", "model", "stream"} & extra, "extra", "a JSON object without messages, model, stream"),
            *((value is None or 0 < value < 1e6, name, "more than 0") for name, value in limits.items()),
        ):
            if not good:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected {expected}")


def groups(config: EndpointConfig) -> list[tuple[dict, list[dict]]]:
    """What each row is about, and its records. A file's go by task and kind in their metadata, or else its name."""
    made, found, bounds = [], {}, [parse_length(length) for length in config.lengths]
    for task in () if config.records else config.tasks:
        for p in (task == "repeat-structure" and config.repeat_p) or (TextCopyConfig.text_repeat_p,):
            for kind in config.kinds:
                for (low, high), n in zip(bounds, config.samples * len(bounds), strict=False):
                    text = TextCopyConfig(task, config.symbols, kind, low, high, p)
                    about = {"task": task, "kind": kind, "repeat_p": p if task == "repeat-structure" else None}
                    records = list(text_examples(text, n, config.eval_seed, "evaluation"))
                    made.append((about | {"length": high, "min_length": low}, records))
    for number, record in enumerate(read_jsonl(config.records) if config.records else (), 1):
        about = record.get("metadata") or {}
        row = str(about.get("task") or Path(config.records).stem), about.get("kind") and str(about["kind"])
        length = about["length"] if type(about.get("length")) is int else len(record["messages"][-1]["content"])
        found.setdefault(row, []).append((length, record | {"id": str(record.get("id", number))}))
    for (task, kind), some in found.items():
        lengths, records = zip(*some, strict=True)
        made.append(({"task": task, "kind": kind, "length": max(lengths), "min_length": min(lengths)}, [*records]))
    return made


def request_of(config: EndpointConfig, record: dict) -> tuple[str, str, dict]:
    """What the answer is found under, the URL, and the body: all messages of the record but the last, the answer."""
    url = config.endpoint.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
    *asked, truth = record["messages"]
    limit = config.max_tokens or 2 * len(truth["content"].encode()) + 256
    body = {"model": config.model, "messages": asked, "temperature": config.temperature, "max_tokens": limit}
    body = {name: value for name, value in (body | json.loads(config.extra)).items() if value is not None}
    whole = json.dumps([record["id"], url, body], sort_keys=True)
    return record["id"] if config.answers else hashlib.sha256(whole.encode()).hexdigest(), url, body


def ask(config: EndpointConfig, record: dict, stop: threading.Event) -> tuple[dict | None, str]:
    """The answer to a record; or None, and why. RuntimeError where the server says that to ask again is in vain."""
    key, why, wait = "".join(os.environ.get("OPENAI_API_KEY", "").split()), "", 0.0
    headers = {"Content-Type": "application/json", "User-Agent": "endpoint.py"}  # some hosts refuse urllib's own
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    _, url, body = request_of(config, record)
    for attempt in range(config.retries):
        if stop.wait(wait + BACKOFF * 2 ** (min(attempt, 7) - 1) * random.uniform(0.5, 1) if attempt else 0):
            break
        began, raw, status, wait = time.monotonic(), b"", 200, 0.0
        try:
            with OPENER.open(Request(url, json.dumps(body).encode(), headers), timeout=config.timeout) as response:
                status, after = response.status, response.headers.get("Retry-After", "")
                wait = float(after) if re.fullmatch(r"\d{1,6}(\.\d+)?", after) else 0.0
                while piece := response.read1(2**16):  # the socket's own timeout is for one piece
                    raw += piece
                    if time.monotonic() - began > config.timeout:
                        raise TimeoutError("timed out")
            if status == 200:
                reply = json.loads(raw)
                choice = reply["choices"][0]
                answer = {"answer": "" + (choice["message"]["content"] or "")}  # null: all tokens went into reasoning
                answer |= {"finish_reason": choice.get("finish_reason"), "usage": reply.get("usage")}
                return answer | {"seconds": round(time.monotonic() - began, 3)}, ""
            why = f"status {status}:"
        except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            why = f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {error}"
        why += " " + " ".join(raw.decode(errors="replace").replace(key or "[key]", "[key]").split())[:500]
        if status not in (200, 408, 409, 429) and status < 500:
            stop.set()
            raise RuntimeError(f"{url}: {why}; are endpoint, model and OPENAI_API_KEY right?")
    return None, why


def read_answers(path: str | Path, name: str, known: dict | None = None) -> dict[str, dict]:
    """A file's answers by their `name`. RuntimeError names a line that is damaged, a second one, or none of `known`."""
    answers: dict[str, dict] = {}
    for number, line in enumerate(Path(path).read_bytes().splitlines(), 1):
        try:
            given = json.loads(line)
            last = {"role": "assistant", "content": given["answer"]} if "answer" in given else given["messages"][-1]
            key, answer = str(given[name]), {"assistant": "" + last["content"]}[last["role"]]
            if known is not None and (key in answers or key not in known):
                raise ValueError(f"{name} {key!r} is {'there twice' if key in answers else 'that of no prompt'}")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            wanted = f"expected {name} and answer, one line each; mend or delete it"
            raise RuntimeError(f"{path}, line {number}: {wanted} ({error!r})") from error
        answers[key] = given | {"answer": answer}
    return answers


def ask_all(config: EndpointConfig, wanted: dict[str, dict]) -> dict[str, dict]:
    """Answers by key: those kept from earlier, and the others from the endpoint, each kept as soon as it is there."""
    path, stop, failed = Path(config.out_dir) / "answers.jsonl", threading.Event(), 0
    path.touch()
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)  # cuts off a last line that a kill tore
    answers = {key: answer for key, answer in read_answers(path, "key").items() if key in wanted}
    missing = [key for key in wanted if key not in answers]
    bar = tqdm(total=len(wanted), initial=len(answers), unit="answer", dynamic_ncols=True, mininterval=1)
    with open(path, "a") as file, bar, ThreadPool(config.concurrency) as pool:  # of daemons: no exit waits for them
        for key, (answer, why) in pool.imap_unordered(lambda key: (key, ask(config, wanted[key], stop)), missing):
            if answer:
                answers[key] = {"id": wanted[key]["id"], "key": key} | answer
                print(json.dumps(answers[key]), file=file, flush=True)
            else:
                failed += 1
                bar.set_postfix_str(f"{failed} failed, the last by {why[:200]}")
            bar.update()
    return answers


def row_of(config: EndpointConfig, about: dict, records: list[tuple[str, dict]], answers: dict[str, dict]) -> dict:
    """A row of the report, as eval.evaluate's. No answer scores as an empty one, which is right nowhere."""
    got = [answers.get(key) for key, _ in records]
    scores = [score(record, a["answer"] if a else "") for (_, record), a in zip(records, got, strict=True)]
    hits, n, name = sum(s.correct for s in scores), len(scores), config.model or Path(config.answers).stem
    low, high = wilson(hits, n)
    errors = sum(s.total - s.right + (s.reason in ("form", "too long")) for s in scores)
    row = {"run": name, "pos_encoding": name, "seed": config.eval_seed, "trained_to": None}
    row |= {"step": None, **about, "mode": "answers" if config.answers else "endpoint", "samples": n}
    row |= {"exact_match": hits / n, "exact_match_low": low, "exact_match_high": high, "margin": None}
    row |= {"token_error": errors / sum(s.total + 1 for s in scores), "first_errors": [s.first_error for s in scores]}
    row |= {"only_closing_wrong": sum(s.first_error == s.total for s in scores) / n}
    row |= {"seconds": 0 if config.answers else round(sum(a["seconds"] for a in got if a), 3)}  # of all its requests
    return row | {"failed": got.count(None), "cut": sum(a.get("finish_reason") == "length" for a in got if a)}


def main(config: EndpointConfig) -> None:
    work = [(about, [(request_of(config, r)[0], r) for r in records]) for about, records in groups(config)]
    wanted: dict[str, dict] = {}
    for key, record in (pair for _, records in work for pair in records):
        if wanted.setdefault(key, record)["messages"][:-1] != record["messages"][:-1]:
            raise ValueError(f"id {key!r} is that of two prompts: give --records with other ids, or one of --kinds")
    (out := Path(config.out_dir)).mkdir(parents=True, exist_ok=True)
    answers = read_answers(config.answers, "id", wanted) if config.answers else ask_all(config, wanted)
    rows = [row_of(config, about, records, answers) for about, records in work]
    with configurator.atomic(out / "accuracy.json") as file:
        file.write(json.dumps(rows, indent=1).encode() + b"\n")
    print(table(rows))
    for r in (r for r in rows if r["failed"] or r["cut"]):
        what = f"{r['failed']} of {r['samples']} failed, counted as wrong; {r['cut']} cut at the token limit"
        print(f"{r['task']}, {r['kind'] or 'all'}, {interval(r)}: {what}")
    if config.plot:
        plot(rows, out / "accuracy.png")
    print(f"rows: {out / 'accuracy.json'}{', plot: accuracy.png' if config.plot else ''}")


if __name__ == "__main__":
    configurator.run_cli(lambda: main(configurator.configure(EndpointConfig, doc=__doc__)))
