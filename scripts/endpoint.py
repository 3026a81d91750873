"""Copies by any model behind an OpenAI-compatible chat endpoint, or from a file of answers: our prompts, our scores.

    python -m scripts.endpoint --endpoint=http://localhost:8000/v1 --model=NAME --tasks=imbalanced,lists --lengths=64
    python -m scripts.endpoint --endpoint=... --model=... --tasks=repeat-structure --repeat_p=0.5,0.7,0.9  # Figure 2
    python -m scripts.endpoint --endpoint=... --model=... --records=data/copies.jsonl  # prompts from a file of chats
    python -m scripts.endpoint --records=data/copies.jsonl --answers=answers.jsonl  # answers from elsewhere, no network

Needs `pip install openai`; a key comes from the environment, OPENAI_API_KEY. Strings are those that eval.py asks of our
own models. Lines of --answers are {"id": ..., "answer": "..."}, or chats that end in the answer; a record without an id
goes by its line number.

Answers are kept in out_dir/answers.jsonl at once; the same command again asks only what is missing. A prompt that the
server refuses (too long, filtered) is kept there with the reason, too. A prompt that failed for a reason that may pass
(timeout, overload) is asked again. Neither counts as wrong: exact match is the share of right answers among answers.
"""

import hashlib
import json
import os
import re
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path

from tqdm import tqdm

import configurator
from data_text import KINDS, TextCopyConfig, read_jsonl, score, text_examples
from eval import Cell, row_of, verdict_on
from plots import parse_length, plot, pyplot, table

REFUSED, WRONG_ADDRESS = (400, 413, 422), (401, 403, 404)  # status: of one prompt alone, and of all
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)  # what reading odd JSON raises


@dataclass
class EndpointConfig:
    """Evaluation of a chat endpoint"""

    endpoint: str = ""  # base URL, such as http://localhost:8000/v1
    model: str = ""  # as the endpoint calls it; for answers: what the table calls them
    records: str = ""  # JSONL file in chat form to take prompts from, in place of the next eight knobs
    tasks: tuple[str, ...] = ("imbalanced", "recursive-flip", "uniform")  # strings to copy, or lists
    kinds: tuple[str, ...] = KINDS  # where in the prompt the string stands
    lengths: tuple[int | str, ...] = (64, 256)  # symbols, points, or lines of a passage; or intervals, 128-256
    samples: tuple[int, ...] = (20,)  # strings for each task, kind and length; one number for all lengths, or one each
    symbols: tuple[str, str] = ("0", "1")  # what strings are made of; with blanks: --symbols="' a',' b'"
    text_source: tuple[str, ...] = TextCopyConfig.text_source  # what passages of prose and code are cut from
    repeat_p: tuple[float, ...] = (0.9,)  # repeat-structure: shares of a base's repetitions to keep, a row for each
    eval_seed: int = 0  # of the strings
    answers: str = ""  # JSONL file of answers to score, in place of an endpoint
    concurrency: int = 8  # requests under way at a time
    retries: int = 5  # attempts at a request, in all
    timeout: float = 300.0  # seconds that a server may be silent
    temperature: float | None = 0.0  # None: the server's
    max_tokens: int | None = None  # in an answer; None: twice the right one's bytes + 256. Reasoning models need more
    extra: str = "{}"  # JSON to merge into a request, as {"reasoning_effort": "low"}; null takes a name out
    out_dir: str = "out/endpoint"  # answers.jsonl, accuracy.json and accuracy.png go here
    plot: bool = True  # draw accuracy.png

    def __post_init__(self):
        self.endpoint = self.endpoint.rstrip("/").removesuffix("/chat/completions")
        if bool(self.endpoint) == bool(self.answers):
            raise ValueError(f"endpoint={self.endpoint!r}: expected either --endpoint=http://host/v1 or --answers=FILE")
        if self.endpoint and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint={self.endpoint!r}: expected a URL such as http://localhost:8000/v1")
        if self.endpoint and not self.model:
            raise ValueError("model='': expected --model=NAME, as the endpoint calls it")
        for name in ("tasks", "kinds", "lengths", "samples", "symbols", "text_source", "repeat_p", "eval_seed"):
            if self.records and getattr(self, name) != getattr(EndpointConfig, name):
                raise ValueError(f"records={self.records!r}: leave out --{name}, the file's prompts stay as they are")
        for name in ("tasks", "kinds", "lengths", "repeat_p"):
            if not getattr(self, name):
                raise ValueError(f"{name}=(): expected at least one")
        if len(self.samples) not in (1, len(self.lengths)):
            raise ValueError(f"samples={self.samples}: expected one number, or one for each of lengths={self.lengths}")
        longest = max(parse_length(length)[1] for length in self.lengths)
        if not all(1 <= n <= 10**6 for n in (longest, *self.samples)):
            raise ValueError(f"lengths={self.lengths}, samples={self.samples}: expected 1 to 1,000,000 each")
        if self.repeat_p != (0.9,) and "repeat-structure" not in self.tasks:
            raise ValueError(f"repeat_p={self.repeat_p}: expected --tasks=repeat-structure beside it")
        if not 0 <= self.eval_seed < 2**63:
            raise ValueError(f"eval_seed={self.eval_seed}: expected 0 to 2^63 - 1")
        for name in ("concurrency", "retries", "timeout", "max_tokens"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 10**6:
                raise ValueError(f"{name}={value}: expected more than 0 and less than 1,000,000")
        try:
            names = set(json.loads(self.extra).keys())
        except (ValueError, AttributeError) as error:
            raise ValueError(f"extra={self.extra!r}: expected a JSON object ({error})") from error
        if names & {"messages", "model", "stream"}:
            raise ValueError(f"extra={self.extra!r}: expected no messages, model or stream in it")


def generated(config: EndpointConfig) -> list[tuple[Cell, list[dict]]]:
    """What each row is about and its records: the strings that eval.py has."""
    groups = []
    samples = config.samples if len(config.samples) > 1 else config.samples * len(config.lengths)
    for task in config.tasks:
        for p in config.repeat_p if task == "repeat-structure" else config.repeat_p[:1]:
            for kind in config.kinds:
                for length, n in zip(config.lengths, samples, strict=True):
                    cell = Cell(task, kind, p, *parse_length(length), n)
                    text = TextCopyConfig(task, config.symbols, kind, cell.low, cell.high, p)
                    text.text_source = config.text_source
                    groups.append((cell, list(text_examples(text, n, config.eval_seed, "evaluation"))))
    return groups


def from_file(path: str) -> list[tuple[Cell, list[dict]]]:
    """The same of a file of chats, which makes one row."""
    records = read_jsonl(path)
    for number, record in enumerate(records, 1):
        record["id"] = str(record.get("id", number))
    lengths = [score(record, "").total for record in records]  # in symbols, points or characters
    return [(Cell(Path(path).stem, None, 0.9, min(lengths), max(lengths), len(records)), records)]


def request_of(config: EndpointConfig, record: dict) -> dict:
    """The body of a request: all messages of the record but the last, which is the right answer, and the knobs."""
    *asked, truth = record["messages"]
    limit = config.max_tokens or 2 * len(truth["content"].encode()) + 256
    body = {"model": config.model, "messages": asked, "temperature": config.temperature, "max_tokens": limit}
    body |= json.loads(config.extra)
    return {name: value for name, value in body.items() if value is not None}


def key_of(config: EndpointConfig, record: dict) -> str:
    """What an answer is found by: in a file from elsewhere the id, in answers.jsonl a hash of the whole request."""
    if config.answers:
        return record["id"]
    request = json.dumps([record["id"], config.endpoint, request_of(config, record)], sort_keys=True)
    return hashlib.sha256(request.encode()).hexdigest()


def read_reply(text: str) -> dict:
    """The outcome of a reply of status 200, as `ask` has it."""
    no_answer = {"failed": f"no answer in the reply: {text}"}
    try:
        reply = json.loads(text)
        choice = reply["choices"][0]
        finish_reason = choice.get("finish_reason")
        answer = choice["message"].get("content") or ""  # none where all tokens went into reasoning
        if isinstance(answer, list):  # of parts; those of other types are reasoning
            answer = "".join(part["text"] for part in answer if part["type"] == "text")
    except MALFORMED:
        return no_answer
    if finish_reason == "content_filter":
        return {"refused": finish_reason}
    if not isinstance(answer, str) or finish_reason in ("error", "abort"):
        return no_answer
    return {"answer": answer, "finish_reason": finish_reason, "usage": reply.get("usage")}


def connect(config: EndpointConfig):
    """An openai client, which repeats requests by itself."""
    try:
        import openai
    except ImportError as error:
        raise RuntimeError("--endpoint needs the openai client: pip install openai") from error
    key = os.environ.get("OPENAI_API_KEY", "").strip() or "no-key"
    if not re.fullmatch("[!-~]+", key):
        raise ValueError("OPENAI_API_KEY: expected ASCII characters without blanks; export it again")
    limits = {"max_retries": config.retries - 1, "timeout": config.timeout}
    return openai.OpenAI(api_key=key, base_url=config.endpoint, **limits)


def ask(client, config: EndpointConfig, record: dict) -> dict:
    """The outcome of a prompt: {"answer": text, ...}, {"refused": reason}, for good, or {"failed": reason}, for now.
    RuntimeError where the server would say the same to every prompt."""
    import openai

    def short(reason: str) -> str:
        return " ".join(reason.replace(client.api_key, "[key]").split())[:500]  # servers may quote the key

    body = request_of(config, record)
    create = client.chat.completions.with_raw_response.create
    try:
        reply = create(model=config.model, messages=body["messages"], extra_body=body)
        outcome = read_reply(reply.text) | {"seconds": round(reply.elapsed.total_seconds(), 3)}
    except openai.APIConnectionError as error:  # timeouts, too
        outcome = {"failed": f"{error} {error.__cause__}"}
    except openai.APIStatusError as error:
        reason = f"status {error.status_code}: {error.response.text}"
        if error.status_code in WRONG_ADDRESS:
            hint = "check --endpoint, --model and OPENAI_API_KEY"
            raise RuntimeError(f"{config.endpoint}: {short(reason)}; {hint}") from error
        outcome = {"refused" if error.status_code in REFUSED else "failed": reason}
    for name in outcome.keys() & {"refused", "failed"}:
        outcome[name] = short(outcome[name])
    return outcome


def read_answers(path: Path, name: str) -> dict[str, dict]:
    """A file's answers by their `name`, key or id. RuntimeError says which line is damaged."""
    answers: dict[str, dict] = {}
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file: expected answers, one JSON object a line")
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            given = json.loads(line)
            if "messages" in given:
                last = given["messages"][-1]
                given["answer"] = last["content"] if last["role"] == "assistant" else None
            key = str(given[name])
            if key in answers:
                raise ValueError(f"{name} {key!r} is there twice")
            if not isinstance(given.get("answer", given.get("refused")), str):
                raise ValueError("no answer")
        except MALFORMED as error:
            expected = f"expected {name} and answer, one line each; mend or delete the line"
            raise RuntimeError(f"{path}, line {number}: {expected} ({error!r})") from error
        answers[key] = given
    return answers


def ask_all(config: EndpointConfig, prompts: dict[str, dict], path: Path) -> dict[str, dict]:
    """Outcomes by key: those kept at `path`, and the others from the endpoint, each kept as soon as it is there."""
    client = connect(config)
    path.touch()
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)  # cuts off a last line that a kill tore
    kept = read_answers(path, "key")
    outcomes = {key: kept[key] for key in prompts if key in kept}
    missing = [key for key in prompts if key not in kept]
    bar = tqdm(total=len(prompts), initial=len(outcomes), unit="prompt", dynamic_ncols=True, mininterval=1)
    with open(path, "a") as file, bar, ThreadPool(config.concurrency) as pool:  # of daemons: no exit waits for them
        for key, outcome in pool.imap_unordered(lambda key: (key, ask(client, config, prompts[key])), missing):
            outcomes[key] = {"id": prompts[key]["id"], "key": key, **outcome}
            if "failed" in outcome:
                bar.set_postfix_str(f"failed: {outcome['failed'][:200]}")
            else:
                print(json.dumps(outcomes[key]), file=file, flush=True)
            bar.update()
    return outcomes


def report_on(config: EndpointConfig, cell: Cell, records: list[dict], outcomes: list[dict]) -> dict:
    """A row of the report, as eval.py's, from the answers among the outcomes, of which there is one at least."""
    verdicts = [verdict_on(r, o["answer"]) for r, o in zip(records, outcomes, strict=True) if "answer" in o]
    name = config.model or Path(config.answers).stem
    return {
        "run": name,
        "pos_encoding": name,
        "seed": config.eval_seed,
        "trained_to": None,
        "step": None,
        **row_of(cell, "answers" if config.answers else "endpoint", verdicts),
        "seconds": round(sum(o.get("seconds", 0) for o in outcomes), 3),  # of all requests
        "refused": sum("refused" in o for o in outcomes),
        "failed": sum("failed" in o for o in outcomes),
        "cut": sum(o.get("finish_reason") == "length" for o in outcomes),
    }


def main(config: EndpointConfig) -> None:
    if config.plot:
        pyplot()  # a missing matplotlib is noticed before anything is paid for
    groups = from_file(config.records) if config.records else generated(config)
    prompts: dict[str, dict] = {}
    for record in (record for _, records in groups for record in records):
        first = prompts.setdefault(key_of(config, record), record)
        if first["messages"][:-1] != record["messages"][:-1]:
            raise ValueError(f"id {record['id']!r} has two prompts: give other ids, or one of --kinds and --repeat_p")
    out = Path(config.out_dir)
    path = Path(config.answers or out / "answers.jsonl")
    with configurator.lock(out):
        answers = read_answers(path, "id") if config.answers else ask_all(config, prompts, path)
    outcomes = {key: answers.get(key, {"failed": f"no answer in {path}"}) for key in prompts}
    rows, notes = [], []
    for cell, records in groups:
        own = [outcomes[key_of(config, record)] for record in records]
        if any("answer" in outcome for outcome in own):
            rows.append(report_on(config, cell, records, own))
        else:
            notes.append(f"{cell.task}, {cell.kind}, length {cell.high}: no answer, no row")
    cut = sum(row["cut"] for row in rows)
    if cut:
        notes.append(f"answers cut at the limit of tokens: {cut}; --max_tokens raises it")
    again = f"add their answers to {path}" if config.answers else "the same command asks them again"
    for what, advice in (("refused", f"to ask them again, delete their lines in {path}"), ("failed", again)):
        reasons = [outcome[what] for outcome in outcomes.values() if what in outcome]
        if reasons:
            notes.append(f"{len(reasons)} of {len(prompts)} {what}, not counted as wrong: {reasons[0]}; {advice}")
    if not rows:
        raise RuntimeError("\n".join(["no prompt was answered", *notes]))
    configurator.write_json(out / "accuracy.json", rows)
    print("\n".join([table(rows), *notes]))
    if config.plot:
        plot(rows, out / "accuracy.png")
    print(f"rows: {out / 'accuracy.json'}{', plot: accuracy.png' if config.plot else ''}")


if __name__ == "__main__":
    configurator.run_cli(lambda: main(configurator.configure(EndpointConfig, doc=__doc__)))
