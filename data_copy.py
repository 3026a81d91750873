"""Copy tasks: strings of tokens, in batches; strings and lists of numbers in text, as chats. Needs numpy alone.

    python data_copy.py --show=3 --text_task=lists  # --help lists the knobs
    python data_copy.py --write=data/copy.jsonl --examples=1000 --symbols="' a',' b'"

A sample of the token-level task, as the model sees it (the targets are the copy and the separator that ends it):

    tokens    <n> I: 0  1  1  <n> <n> O: 0  1  1
    target     .  .  .  .  .   .   .  0  1  1  <n>

Nothing but the tokens tells where the source ends. Any sample is a pure function of (seed, stream, step, index): there
is no generator whose state could be lost, and the same samples come on any number of processes and after any resume.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

N_SYMBOLS = 32  # "0", "1", and 30 more that only noise strings use
NEWLINE, INPUT, OUTPUT, STAR, PAD = range(N_SYMBOLS, N_SYMBOLS + 5)
VOCAB = [*map(str, range(N_SYMBOLS)), "<n>", "I:", "O:", "*", "<pad>"]
TOKEN_BYTES = [b"\n" if token == "<n>" else token.encode() for token in VOCAB]  # for rope2d.newline_table
SEPARATORS = {"<n>": NEWLINE, "*": STAR}  # the rule of 2D-RoPE knows the first alone

TASKS = ("imbalanced", "recursive-flip", "uniform", "repeat-structure")
IMBALANCE = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)  # P(first token), paper section 3.1
STREAMS = {"train": 0, "validation": 1, "evaluation": 2}  # evaluation never sees what training saw

IGNORE = -100  # the target of a position that has no loss


@dataclass
class CopyConfig:
    """Copy task"""

    copy_task: Literal["imbalanced", "recursive-flip", "uniform", "repeat-structure"] = (
        "imbalanced"  # strings to train on
    )
    max_length: int = 20  # lengths of strings are uniform in [1, max_length], in tokens
    noise: float = 0.1  # share of training strings drawn from 32 symbols, not 2
    repeat_p: float = 0.9  # repeat-structure: probability that a token of the repeated base is left as it is
    closing_weight: float = 1.0  # of the separator that ends a copy in the training loss; symbols have 1
    separator: Literal["<n>", "*"] = "<n>"  # what ends a line; "*" is a token that 2D-RoPE's rule does not know

    def __post_init__(self):
        if self.copy_task not in TASKS or self.separator not in SEPARATORS:
            raise ValueError(
                f"copy_task={self.copy_task!r}, separator={self.separator!r}: expected one of {', '.join(TASKS)}, and "
                f"one of {', '.join(SEPARATORS)}"
            )
        if self.max_length < 1:
            raise ValueError(f"max_length={self.max_length}: expected at least 1")
        if not self.closing_weight > 0:
            raise ValueError(f"closing_weight={self.closing_weight}: expected more than 0, or no copy would ever end")
        for name in ("noise", "repeat_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected a share between 0 and 1")


def random_bits(*keys: int | NDArray) -> NDArray[np.uint64]:
    """64 random bits for each combination of the keys, which broadcast: SplitMix64's finaliser, key by key."""
    bits = np.zeros(1, np.uint64)
    for key in keys:
        bits = bits ^ np.atleast_1d(key).astype(np.uint64)
        bits = bits + np.uint64(0x9E3779B97F4A7C15)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits = bits ^ (bits >> np.uint64(31))
    return bits


def random_unit(*keys: int | NDArray) -> NDArray[np.float64]:
    """Uniform in [0, 1), one for each combination of the keys."""
    return (random_bits(*keys) >> np.uint64(11)) * 2.0**-53


def random_int(low: int | NDArray, high: int | NDArray, *keys: int | NDArray) -> NDArray[np.int64]:
    """Uniform in [low, high], both included."""
    return low + (random_unit(*keys) * (high - low + 1)).astype(np.int64)


def strings(task: str, width: int, keys: Sequence[int | NDArray], repeat_p: float = 0.9) -> NDArray[np.int64]:
    """Strings of 0 and 1 for each row of keys, (N, width): a shorter string is a prefix of its row. Paper, section 3.1.

    keys: what the strings are a function of; arrays among them are (N, 1).
    """
    at = np.arange(width)
    if task == "uniform":
        return random_int(0, 1, *keys, 0, at)
    if task == "imbalanced":  # the first symbol, 0, with probability p
        p = np.asarray(IMBALANCE)[random_int(0, len(IMBALANCE) - 1, *keys, 1)]
        return (random_unit(*keys, 0, at) >= p).astype(np.int64)
    if task == "recursive-flip":
        # s <- s + c + s puts round r's c at those places, counted from 1, that 2^r divides and 2^(r+1) does not.
        place = at + 1
        rounds = np.frexp(place & -place)[1] - 1  # log2, exactly
        return random_int(0, 1, *keys, 0, rounds)
    if task == "repeat-structure":
        base = random_int(4, 10, *keys, 1)
        flip = random_unit(*keys, 2, at) >= repeat_p
        return random_int(0, 1, *keys, 0, at % base) ^ flip
    raise ValueError(f"task={task!r}: expected one of {', '.join(TASKS)}")


def pack(sources: NDArray[np.int64], lengths: NDArray[np.int64], separator: int = NEWLINE) -> tuple[NDArray, NDArray]:
    """Inputs and targets (N, 2 max(lengths) + 5), right-padded, from sources (N, >= max(lengths)) and lengths (N,)."""
    n = lengths[:, None]
    at = np.arange(2 * int(lengths.max()) + 6)
    in_source = (at >= 2) & (at < n + 2)
    in_target = (at >= n + 5) & (at < 2 * n + 5)
    tokens = np.full(in_source.shape, PAD, np.int64)
    tokens[:, 0], tokens[:, 1] = separator, INPUT
    tokens[(at == n + 2) | (at == n + 3) | (at == 2 * n + 5)] = separator
    tokens[at == n + 4] = OUTPUT
    real = np.arange(sources.shape[1]) < n
    tokens[in_source] = tokens[in_target] = sources[real]
    targets = np.where((at >= n + 5) & (at <= 2 * n + 5), tokens, IGNORE)
    return tokens[:, :-1], targets[:, 1:]


def batch(config: CopyConfig, n: int, step: int, seed: int, stream: str = "train") -> tuple[NDArray, NDArray, NDArray]:
    """Samples 0 .. n-1 of a step, shortest first: inputs (n, T), targets (n, T), lengths (n,). int64, right-padded."""
    if stream not in STREAMS:
        raise ValueError(f"stream={stream!r}: expected one of {', '.join(STREAMS)}")
    sample = np.arange(n)[:, None]
    keys = (seed, STREAMS[stream], step, sample)
    lengths = random_int(1, config.max_length, *keys, 3)  # (n, 1)
    width = int(lengths.max())
    sources = strings(config.copy_task, width, keys, config.repeat_p)
    if config.noise:
        noisy = random_unit(*keys, 4) < config.noise
        sources = np.where(noisy, random_int(0, N_SYMBOLS - 1, *keys, 5, np.arange(width)), sources)
    order = np.argsort(lengths[:, 0], kind="stable")
    lengths = lengths[order, 0]
    inputs, targets = pack(sources[order], lengths, SEPARATORS[config.separator])
    return inputs, targets, lengths


def evaluation_strings(
    task: str, low: int, high: int, n: int, seed: int, repeat_p: float = 0.9
) -> list[NDArray[np.int64]]:
    """n strings with lengths uniform in [low, high], for tests: never noisy, never those of training."""
    if task not in TASKS or not 1 <= low <= high:
        raise ValueError(f"{task=}, {low=}, {high=}: expected one of {', '.join(TASKS)}, and 1 <= low <= high")
    keys = (seed, STREAMS["evaluation"], TASKS.index(task), low, high, np.arange(n)[:, None])
    lengths = random_int(low, high, *keys, 3)[:, 0]
    return [row[:length] for row, length in zip(strings(task, high, keys, repeat_p), lengths, strict=True)]


def text(tokens: Sequence[int]) -> str:
    """Tokens as a person reads them."""
    return " ".join(VOCAB[token] for token in tokens)


# Text level: a source, in an instruction; the answer is the source, or the Python list of its numbers, and no more.

TEXT_TASKS = (*TASKS, "lists")
KINDS = (
    "own-line",
    "first",
    "mid-sentence",
)  # where the source stands; the last at a column that its copy does not share
STRING_TEMPLATES = (
    "Copy the following string exactly:\n{}",
    "Please reproduce the line below without changing anything.\n{}",
    "Your only task is to write out this text once more, character for character:\n{}",
    "Echo what stands on the next line, and add nothing of your own.\n{}",
    "I need an identical duplicate of the sequence underneath; answer with it alone.\n{}",
    "A string follows this line break. Type it again, with no comments and no quotes.\n{}",
    "Return this input unchanged, on a single line:\n{}",
    "{} is the string to copy. Write it down again, and nothing else.",
    "{} - repeat what stands before the dash, symbol for symbol.",
    "{} <- Give back the text left of the arrow, exactly as it is.",
    "{} That was a sequence; reply with the very same sequence.",
    "{} (copy everything in front of this bracket, with no further words)",
    "{} | Print whatever comes ahead of the bar a second time, faithfully.",
    "{} is what I typed. Send exactly that back to me.",
    "Write the string {} again and stop where it stops.",
    "Could you repeat {} for me, letter by letter, without any explanation?",
    'The value "{}" has to be copied as it is; answer with the value only.',
    "If I say {}, then you say the same, without a single change.",
    "Take the sequence {} and return it in full, leaving nothing out.",
    "When a program prints {} on the screen, what can be read there? Give the bare output.",
    "My note reads `{}` so far: reproduce what it holds, no more and no less.",
)
LIST_TEMPLATES = (
    "Turn these comma-separated measurements into a Python list, keeping every value as it is:\n{}",
    "Below are the data points of an experiment. Write them as one Python list and add nothing.\n{}",
    "{} are the readings of a sensor. Give me a Python list of them, in the same order, with all decimals.",
    "{} <- I want to plot these samples, so write them as a Python list, and only the list.",
    "The data points {} come from an oscillation; answer with a Python list that holds exactly these numbers.",
    "For my plotting script, convert the values {} to a Python list, without rounding or dropping any.",
)


@dataclass
class TextCopyConfig:
    """Text copy"""

    # strings of two symbols to copy, or comma-separated numbers to turn into a Python list
    text_task: Literal["imbalanced", "recursive-flip", "uniform", "repeat-structure", "lists"] = "imbalanced"
    symbols: tuple[str, str] = ("0", "1")  # what strings are made of; with blanks: --symbols="' a',' b'"
    template_kind: Literal["all", "own-line", "first", "mid-sentence"] = "all"  # where in the prompt the source stands
    text_min_length: int = 0  # symbols, or points; 0: 1 symbol, 50 points, 200 points in the evaluation stream
    text_max_length: int = 0  # 0: 1,000 symbols, 150 points, 800 points in the evaluation stream
    text_repeat_p: float = 0.9  # repeat-structure: probability that a symbol of the repeated base is left as it is

    def __post_init__(self):
        # Outer blanks aside, so that a copy reads in one way only even where an answer has lost its own.
        bare, lines = [s.strip() for s in self.symbols], [line for s in self.symbols for line in s.splitlines()]
        if len(bare) != 2 or lines != [*self.symbols] or any(a.startswith(b) for a, b in (bare, bare[::-1])):
            expected = "two strings without line breaks, neither blank nor the start of the other, outer blanks aside"
            raise ValueError(f"symbols={self.symbols!r}: expected {expected}")
        if self.text_task not in TEXT_TASKS or self.template_kind not in ("all", *KINDS):
            raise ValueError(f"{self}: expected a text_task of {TEXT_TASKS}, a template_kind of {('all', *KINDS)}")
        if not 0 <= self.text_repeat_p <= 1:
            raise ValueError(f"text_repeat_p={self.text_repeat_p}: expected a share between 0 and 1")


SIGNALS = {  # family, and one cycle as a function of phases x in [0, 2 pi) and 9 random numbers r in [0, 1)
    "harmonic motion": ("smooth", lambda x, r: np.sin(x)),
    "harmonics": ("smooth", lambda x, r: sum(r[k] * np.sin(k * x + 6 * r[-k]) for k in range(1, 3 + int(3 * r[0])))),
    "pendulum": ("smooth", lambda x, r: np.sin(x) + (0.02 + 0.1 * r[0]) * np.sin(3 * x)),
    "triangle": ("piecewise", lambda x, r: 2 * abs(x / np.pi - 1) - 1),
    "sawtooth": ("piecewise", lambda x, r: x / np.pi - 1),
    "rectified AC": ("piecewise", lambda x, r: abs(np.sin(x)) if r[0] < 0.5 else np.sin(x).clip(0)),  # full, half
    "clipped": ("piecewise", lambda x, r: np.sin(x).clip(-0.3 - 0.5 * r[0], 0.3 + 0.5 * r[0])),
    "relaxation": ("piecewise", lambda x, r: np.minimum(1 - np.exp(-(0.3 + 0.6 * r[0]) * x), np.exp(3 * (5 - x)))),
    "Gaussian pulses": ("pulses", lambda x, r: np.exp(-(((x - np.pi) / (0.2 + 0.5 * r[0])) ** 2) / 2)),
}


def data_points(n: int, longest: int, keys: Sequence[int]) -> tuple[str, dict[str, Any]]:
    """n comma-separated values with two decimals, one cycle of a signal tiled, and what it is. Paper, appendix A.

    A point is a tenth of a unit of time: a period of 2 to `longest` units is a cycle of 20 to 10 `longest` points. All
    is counted in hundredths, so that rounding takes no value past offset +- amplitude and makes no "-0.00".
    """
    low, high = np.array([0, 20, 50, -50]), np.array([len(SIGNALS) - 1, 10 * longest, 300, 50])
    which, period, amplitude, offset = random_int(low, high, *keys, 5, np.arange(4)).tolist()
    name, (family, cycle) = list(SIGNALS.items())[which]
    r, phase = random_unit(*keys, 6, np.arange(9)), random_unit(*keys, 7)
    shape = cycle(2 * np.pi * ((np.arange(period) / period + phase) % 1), r)
    values = np.rint(offset + amplitude * shape / abs(shape).max())
    about = {"signal": name, "family": family, "period": period, "amplitude": amplitude / 100, "offset": offset / 100}
    return ", ".join(f"{value / 100:.2f}" for value in np.resize(values, n).astype(int).tolist()), about


def text_example(
    config: TextCopyConfig, index: int, seed: int, stream: str = "train", length: int | None = None
) -> dict[str, Any]:
    """Example `index` of a stream, in chat form: a pure function of the arguments.

    length: of the source, in symbols or points; None: drawn, uniform between the config's bounds. An example of a given
    length is the one that comes where that length is drawn.
    """
    lists, evaluation = config.text_task == "lists", stream == "evaluation"
    low, high = (1, 1000) if not lists else (200, 800) if evaluation else (50, 150)
    low, high = config.text_min_length or low, config.text_max_length or high
    if stream not in STREAMS or not 1 <= low <= high or (length is not None and length < 1):
        given = f"{stream=}, text_min_length={low}, text_max_length={high}, {length=}"
        raise ValueError(f"{given}: expected one of {', '.join(STREAMS)}, 1 <= min <= max, and a length of at least 1")
    keys = (seed, STREAMS[stream], -1, TEXT_TASKS.index(config.text_task), index)  # the token level has no step -1
    n = length or int(random_int(low, high, *keys, 3)[0])
    keys = (*keys, n)
    templates = LIST_TEMPLATES if lists else STRING_TEMPLATES
    kinds = ["own-line" if t.endswith("\n{}") else "first" if t.startswith("{}") else "mid-sentence" for t in templates]
    eligible = [i for i, kind in enumerate(kinds) if config.template_kind in ("all", kind)]
    which = eligible[int(random_int(0, len(eligible) - 1, *keys, 4)[0])]
    if lists:
        source, about = data_points(n, 10 if evaluation else 8, keys)
    else:
        drawn = strings(config.text_task, n, keys, config.text_repeat_p)
        source, about = "".join(config.symbols[symbol] for symbol in drawn), {"symbols": list(config.symbols)}
    user, assistant = templates[which].format(source), f"[{source}]" if lists else source
    return {
        "id": f"{config.text_task}-{stream}-{seed}-{index}-{n}",
        "messages": [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}],
        "source": source,
        "metadata": {"task": config.text_task, "length": n, "template": which, "kind": kinds[which], **about},
    }


def text_examples(
    config: TextCopyConfig, n: int, seed: int, stream: str = "train", length: int | None = None
) -> Iterator[dict[str, Any]]:
    """Examples 0 .. n-1 of a stream."""
    return (text_example(config, index, seed, stream, length) for index in range(n))


def record_fault(record: Any) -> str:
    """Why a record cannot be trained on and scored; "" if it can. One from elsewhere needs its messages alone."""
    try:
        turns = [(message["role"], bool(message["content"].strip())) for message in record["messages"]]
        task = (record.get("metadata") or {}).get("task")
    except (TypeError, KeyError, AttributeError):
        return "expected messages, each with a role and a text as its content, and metadata that are an object"
    talk = turns[1:] if turns[:1] == [("system", True)] else turns
    if not talk or talk != [("user", True), ("assistant", True)] * (len(talk) // 2):
        return (
            f"roles {[role for role, _ in turns]}: expected (system,) user, assistant, ..., none with a blank content"
        )
    if task in TEXT_TASKS and not isinstance(record.get("source"), str):
        return f"no source, which a record of task {task} has"
    wrong = task == "lists" and not numbers(record["messages"][-1]["content"])
    return "an answer that is no list of numbers, which task lists asks for" if wrong else ""


def write_jsonl(path: str | os.PathLike[str], records: Iterable[dict[str, Any]]) -> None:
    """Write records, a JSON object a line. A kill leaves the old file or the new one."""
    temporary = f"{os.fspath(path)}.{os.getpid()}.tmp"
    os.makedirs(os.path.dirname(temporary) or ".", exist_ok=True)
    with open(temporary, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a file, write_jsonl's or any other in chat form. RuntimeError names the line that is damaged."""
    records = []
    with open(path, "rb") as file:  # bytes, so that a line ends at "\n" alone
        for number, line in enumerate(file, 1):
            try:
                records.append(json.loads(line))
                fault = record_fault(records[-1])
            except (ValueError, RecursionError) as error:
                fault = f"bad JSON: {error}"
            if fault:
                raise RuntimeError(f"{path}, line {number}: {fault}")
    if not records:
        raise RuntimeError(f"{path}: expected a record a line, found none")
    return records


def numbers(answer: str) -> list[Decimal] | None:
    """The numbers of an answer that is one flat list, as JSON and Python both read it; None of any other answer."""
    try:
        values = json.loads(answer.strip(), parse_float=Decimal, parse_int=Decimal, parse_constant=str)
    except (ValueError, ArithmeticError, RecursionError):
        return None
    return values if isinstance(values, list) and all(isinstance(value, Decimal) for value in values) else None


class Score(NamedTuple):
    correct: bool
    reason: str  # "", or what is wrong: form, value, too short, too long
    right: int  # symbols or points that are the source's at the same place
    total: int  # of the source
    first_error: int | None  # place of the first that is not; total if more follows, or if the form alone is wrong


def score(record: dict[str, Any], answer: str) -> Score:
    """How right an answer is to a record of text_example or read_jsonl.

    A string is right if it is the assistant's message, character by character. Only white space around the whole
    answer is free, as chat formats add and drop it; spacing within, quotes, fences, prose, a second line are wrong.
    Places are symbols, or characters in records from elsewhere.

    A list is right if the whole answer is one list of as many numbers, each equal as a decimal: 1.5 is 1.50, 1.51 is
    not. White space between numbers is free. Wrong are prose or fences around the list, numbers in quotes, round
    brackets, +1.5 and .5, and a trailing comma, which announces another number. Where the form is wrong, the numbers
    that can be found are compared nevertheless, for `right` and `first_error`.
    """
    truth, about = record["messages"][-1]["content"], record.get("metadata") or {}
    if about.get("task") == "lists":
        wanted, got = numbers(truth), numbers(answer)
        found = got if got is not None else [Decimal(value) for value in re.findall(r"-?[0-9]+(?:\.[0-9]+)?", answer)]
    else:
        symbols = about.get("symbols", ()) if about.get("task") in TASKS else ()
        pieces = re.compile("|".join([*map(re.escape, symbols), "."]), re.DOTALL)
        before, _, behind = truth.partition(truth.strip())
        wanted = pieces.findall(truth)
        found = got = pieces.findall(before + answer.strip() + behind)
    same = [a == b for a, b in zip(wanted, found, strict=False)]
    lengths = "too short" if len(found) < len(wanted) else "too long" if len(found) > len(wanted) else ""
    reason = "form" if got is None else "value" if False in same else lengths
    first_error = [*same, False].index(False) if reason else None
    return Score(not reason, reason, sum(same), len(wanted), first_error)


@dataclass
class WriteConfig:
    """Show or write text examples"""

    show: int = 0  # examples to print
    write: str = ""  # JSONL file to write
    examples: int = 1000  # in the file
    seed: int = 0  # of the examples
    stream: Literal["train", "validation", "evaluation"] = "train"  # the three share no example


def main(config: WriteConfig, text_config: TextCopyConfig) -> None:
    if config.show < 1 and not (config.write and config.examples > 0):
        raise ValueError(f"{config}: nothing to do, expected --show=3, or --write=data/copy.jsonl --examples=1000")
    for record in text_examples(text_config, config.show, config.seed, config.stream):
        user, assistant = (message["content"] for message in record["messages"])
        print(f"--- {record['id']} {json.dumps(record['metadata'])}\n{user}\n--- answer\n{assistant}")
    if config.write:
        write_jsonl(config.write, text_examples(text_config, config.examples, config.seed, config.stream))
        print(f"{config.write}: {config.examples:,} examples")


if __name__ == "__main__":
    import configurator

    configurator.run_cli(lambda: main(*configurator.configure(WriteConfig, TextCopyConfig, doc=__doc__)))
