"""Copy tasks in text, as chats: strings, lists of numbers and passages in an instruction; their scores and batches.

    python data_text.py --show=3 --text_task=lists  # --help lists the knobs
    python data_text.py --write=data/copy.jsonl --examples=1000 --symbols="' a',' b'"

The user's message holds a source in an instruction; the right answer is the source, or the Python list of its numbers,
and nothing else. Example i of a stream is a pure function of (seed, stream, i).
"""

import hashlib
import json
import os
import re
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_copy import IGNORE, STREAMS, STRINGS, MicroBatches, permute, random_bits, random_int, random_unit, strings
from passages import CONTENTS, LEAD_WORDS, LONGEST_LINE, lead_in, passage, read_texts

# documents: passages of any content; prose and so on: of one. A task's index here is part of its examples' keys: new
# ones come last. The last key: 0-2 of strings, 3 length, 4 template, 5-7 content or signal, 8-11 noise, 12-13 lead-in.
DOCUMENTS, CUT = ("documents", *CONTENTS), ("documents", "prose", "code")  # CUT: those that need text_source
TEXT_TASKS = ("imbalanced", "recursive-flip", "uniform", "repeat-structure", "lists", *DOCUMENTS)
KINDS = ("own-line", "first", "mid-sentence")  # where the source stands; its copy does not share the last one's column
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

DOCUMENT_TEMPLATES = (
    "Copy the following text exactly, with all its line breaks:\n{}",
    "Here is a passage. Write it out again, every line and every blank as it stands:\n{}",
    "Repeat what is below, character for character, and add nothing:\n{}",
    "{}\nThat was the text. Reply with an exact copy of it.",
    "{}\n\nReproduce everything above this line, unchanged.",
    "{}\n---\nGive back all that stands above the dashes.",
    'The file holds "{}" and nothing else: what does it hold?',
    "Everything between the two marks, <<{}>>, has to be copied as it is.",
    "Between these brackets, [{}], is a passage; answer with that passage alone.",
)
LETTERS = string.ascii_letters + string.digits  # of noise


@dataclass
class TextCopyConfig:
    """Text copy"""

    # strings of two symbols to copy (imbalanced, recursive-flip, uniform, repeat-structure), comma-separated numbers to
    # turn into a Python list (lists), passages to copy (documents; of one content: prose, code, json, csv, log, words)
    text_task: str = "imbalanced"
    symbols: tuple[str, str] = ("0", "1")  # what strings are made of; with blanks: --symbols="' a',' b'"
    template_kind: Literal["all", "own-line", "first", "mid-sentence"] = "all"  # where in the prompt the source stands
    text_min_length: int = 0  # symbols, points or lines; 0: 1 symbol or line, 50 points, 200 in the evaluation stream
    text_max_length: int = 0  # 0: 1,000 symbols, 150 points, 800 in the evaluation stream, 8 lines, 400 characters
    text_repeat_p: float = 0.9  # repeat-structure: probability that a symbol of the repeated base is left as it is
    text_noise: float = 0.0  # share of training strings that are drawn from 2 to 62 letters and digits instead
    text_lead: float = 0.0  # share of training prompts with a sentence of random words before them
    first_weight: float = 1.0  # of an answer's first token in the training loss; all others have 1
    text_unit: Literal["lines", "characters"] = "lines"  # that the length of a passage counts
    # prose and code to cut passages from: files and folders; these are what scripts/local_text.py writes
    text_source: tuple[str, ...] = ("data/text/train.jsonl.zst", "data/text/val.jsonl.zst")

    def __post_init__(self):
        # Outer blanks aside, so that a copy reads in one way only even where an answer has lost its own.
        bare, lines = [s.strip() for s in self.symbols], [line for s in self.symbols for line in s.splitlines()]
        if len(bare) != 2 or lines != [*self.symbols] or any(a.startswith(b) for a, b in (bare, bare[::-1])):
            expected = "two strings without line breaks, neither blank nor the start of the other, outer blanks aside"
            raise ValueError(f"symbols={self.symbols!r}: expected {expected}")
        for name, known in (("text_task", TEXT_TASKS), ("template_kind", ("all", *KINDS))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(known)}")
        for name, most in (("text_repeat_p", 1), ("text_noise", 1), ("text_lead", 1), ("first_weight", 1e6)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)}: expected 0 to {most:,.0f}")


def unused_knobs(config: TextCopyConfig) -> dict[str, str]:
    """Knobs that do nothing for this task, and what they are for."""
    task, passages = config.text_task, config.text_task in DOCUMENTS
    strings = not passages and task != "lists"
    used = {"symbols": strings, "text_noise": strings, "text_unit": passages, "text_source": task in CUT}
    used["text_repeat_p"] = task == "repeat-structure"
    return {name: f"other tasks than {task}" for name in used if not used[name]}


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


def noise_alphabet(keys: Sequence[int]) -> str:
    """2 to 62 different letters and digits, in random order."""
    size = int(random_int(2, len(LETTERS), *keys, 9)[0])
    return "".join(LETTERS[i] for i in permute(np.arange(size), len(LETTERS), random_bits(*keys, 11)))


def counts_of(task: str) -> str:
    """What the length of a task's sources counts."""
    return "points" if task == "lists" else "lines or characters" if task in DOCUMENTS else "symbols"


def length_bounds(config: TextCopyConfig, stream: str) -> tuple[int, int]:
    """Least and greatest length of a source, in symbols or points."""
    if config.text_task in DOCUMENTS:
        low, high = 1, 8 if config.text_unit == "lines" else 400
    elif config.text_task != "lists":
        low, high = 1, 1000
    elif stream == "evaluation":
        low, high = 200, 800
    else:
        low, high = 50, 150
    return config.text_min_length or low, config.text_max_length or high


def text_example(
    config: TextCopyConfig, index: int, seed: int, stream: str = "train", length: int | None = None
) -> dict[str, Any]:
    """Example `index` of a stream, in chat form: a pure function of the arguments.

    length: of the source, in symbols, points, lines or characters; None: drawn, uniform between the config's bounds. An
    example of a given length is the one that comes where that length is drawn.
    """
    lists, evaluation = config.text_task == "lists", stream == "evaluation"
    low, high = length_bounds(config, stream)
    if stream not in STREAMS or not 1 <= low <= high or (length is not None and length < 1):
        given = f"{stream=}, text_min_length={low}, text_max_length={high}, {length=}"
        raise ValueError(f"{given}: expected one of {', '.join(STREAMS)}, 1 <= min <= max, and a length of at least 1")
    keys = (seed, STREAMS[stream], -1, TEXT_TASKS.index(config.text_task), index)  # the token level has no step -1
    n = length or int(random_int(low, high, *keys, 3)[0])
    keys = (*keys, n)
    passages = config.text_task in DOCUMENTS
    templates = LIST_TEMPLATES if lists else DOCUMENT_TEMPLATES if passages else STRING_TEMPLATES
    kinds = ["own-line" if t.endswith("\n{}") else "first" if t.startswith("{}") else "mid-sentence" for t in templates]
    eligible = [i for i, kind in enumerate(kinds) if config.template_kind in ("all", kind)]
    which = eligible[int(random_int(0, len(eligible) - 1, *keys, 4)[0])]
    if lists:
        source, about = data_points(n, 10 if evaluation else 8, keys)
    elif passages:
        content = CONTENTS[int(random_int(0, len(CONTENTS) - 1, *keys, 5)[0])]
        content = content if config.text_task == "documents" else config.text_task
        number = int(random_bits(*keys, 6)[0])
        source = passage(content, n, config.text_unit, number, stream, config.text_source)
        about = {"content": content, "unit": config.text_unit}
    else:
        symbols, drawn = config.symbols, strings(config.text_task, n, keys, config.text_repeat_p)
        if stream != "evaluation" and random_unit(*keys, 8) < config.text_noise:
            symbols = noise_alphabet(keys)
            drawn = random_int(0, len(symbols) - 1, *keys, 10, np.arange(n))
        source, about = "".join(symbols[symbol] for symbol in drawn), {"symbols": list(symbols)}
    user, assistant = templates[which].format(source), f"[{source}]" if lists else source
    if stream != "evaluation" and random_unit(*keys, 12) < config.text_lead:  # what is first on a line stays so
        user = lead_in(int(random_bits(*keys, 13)[0])) + ("\n" if kinds[which] == "first" else " ") + user
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
        roles = [role for role, _ in turns]
        return f"roles {roles}: expected (system,) user, assistant, ..., none with a blank content"
    symbols = (record.get("metadata") or {}).get("symbols", ["0"])
    if task in STRINGS and not (isinstance(symbols, list) and symbols and all(s and type(s) is str for s in symbols)):
        return f"symbols {symbols!r}: expected a list of texts"
    if task in TEXT_TASKS and not isinstance(record.get("source"), str):
        return f"no source, which a record of task {task} has"
    wrong = task == "lists" and not numbers(record["messages"][-1]["content"])
    return "an answer that is no list of numbers, which task lists asks for" if wrong else ""


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of a file in chat form, one a line. RuntimeError says how many lines are damaged and names the
    first."""
    records, faults = [], []
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file: expected chats, one JSON object a line")
    with open(path, "rb") as file:  # bytes, so that a line ends at "\n" alone
        for number, line in enumerate(file, 1):
            try:
                records.append(json.loads(line))
                fault = record_fault(records[-1])
            except (ValueError, RecursionError) as error:
                fault = f"bad JSON: {error}"
            if fault:
                faults.append(f"line {number}: {fault}")
    if faults:
        raise RuntimeError(f"{path}: {len(faults)} of {number} lines cannot be used: mend or delete them; {faults[0]}")
    if not records:
        raise RuntimeError(f"{path} is empty: expected a record a line")
    return records


def numbers(answer: str) -> list[Decimal] | None:
    """The numbers of an answer that is one flat list, as JSON and Python both read it; None of any other answer."""
    try:
        values = json.loads(answer.strip(), parse_float=Decimal, parse_int=Decimal, parse_constant=str)
    except (ValueError, ArithmeticError, RecursionError):
        return None
    return values if isinstance(values, list) and all(isinstance(value, Decimal) for value in values) else None


Chat = tuple[NDArray[np.int64], NDArray[np.bool_]]  # token ids (N,), and which of them have a loss


def pad_chats(chats: Sequence[Chat]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens and targets (N, T) of N chats, right-padded; the target is IGNORE outside of the loss mask."""
    tokens = np.zeros((len(chats), max(len(ids) for ids, _ in chats)), np.int64)
    targets = np.full_like(tokens, IGNORE)
    for i, (ids, loss_mask) in enumerate(chats):
        tokens[i, : len(ids)] = ids
        targets[i, : len(ids)] = np.where(loss_mask, ids, IGNORE)
    return tokens[:, :-1], targets[:, 1:]


def shuffled(records: Sequence[dict[str, Any]], index: int, seed: int) -> dict[str, Any]:
    """The record at `index` of an endless order: all, shuffled, then all, shuffled anew."""
    epoch, place = divmod(index, len(records))
    return records[permute(np.array([place]), len(records), random_bits(seed) + np.uint64(epoch))[0]]


def chat_batch(
    chat: Callable[[int], Chat], batch_size: int, step: int, rank: int = 0, world: int = 1, pieces: int = 1
) -> MicroBatches:
    """The micro-batches of one rank of `world`, as `copy_batch` gives them, of chat(i) for the step's indices i.

    A rank makes only its own chats, every `world`th one, and cuts them into `pieces` of like length.
    """
    own = range(step * batch_size + rank, (step + 1) * batch_size, world)
    chats = sorted((chat(i) for i in own), key=lambda pair: len(pair[0]))
    parts = np.array_split(np.arange(len(chats)), pieces)
    return [pad_chats([chats[i] for i in part]) for part in parts]


def read_chats(path: str | os.PathLike[str], encode: Callable[[list], Chat], longest: int) -> list[dict[str, Any]]:
    """`read_jsonl`, and RuntimeError for chats of more than `longest` input tokens.

    A token stands for at least one byte, so only chats of many bytes are tokenised: 200,000 take seconds.
    """
    records, found = read_jsonl(path), []
    for line, record in enumerate(records, 1):
        messages = record["messages"]
        n_bytes = sum(len(message["content"].encode("utf-8", "surrogatepass")) for message in messages)
        if n_bytes + 16 * len(messages) > longest:  # 16: the role
            tokens = len(encode(messages)[0]) - 1  # the last token is only a target
            if tokens > longest:
                found.append(f"line {line} has {tokens:,}")
    if found:
        what = f"{len(found)} of {len(records)} chats have more than block_size={longest} tokens, the first: {found[0]}"
        raise RuntimeError(f"{path}: {what}; shorten or delete them, or give a larger --block_size")
    return records


def check_lengths(config: TextCopyConfig, encode: Callable[[list], Chat], longest: int) -> None:
    """ValueError where examples of the greatest length have more than `longest` tokens: all for bytes, 200 else."""
    high, tokens = length_bounds(config, "train")[1], 0
    for example in text_examples(replace(config, text_lead=0), 200, 0, "train", high):  # every template comes
        messages, most = example["messages"], example["source"]
        if config.text_task == "lists":  # no number has more characters
            most = ", ".join(["-3.50"] * high)
        elif config.text_task in DOCUMENTS:  # no line has more bytes
            lines = "\n".join(["x " * (LONGEST_LINE // 2)] * high)
            most = lines if config.text_unit == "lines" else "\U0001f600" * high
        messages = [message | {"content": message["content"].replace(example["source"], most)} for message in messages]
        tokens = max(tokens, len(encode(messages)[0]) - 1)
    tokens += (5 * LEAD_WORDS + 1) * (config.text_lead > 0)  # characters of the longest lead-in
    if tokens > longest:
        hint = f"give a smaller --text_max_length, or --block_size={tokens}"
        raise ValueError(f"copies of length {high} take {tokens} tokens, block_size={longest}: {hint}")


def chat_source(
    config: TextCopyConfig, files: dict[str, str], seed: int, encode: Callable[[list], Chat], longest: int
) -> tuple[Callable[[str, int], Chat], dict[str, Any], dict[str, str]]:
    """Chats to train on: chat(stream, index); what must stay when a run goes on, the number of chats in each stream's
    file and a digest of what passages are cut from; and a digest of each file, which may be mended.

    files: a JSONL of chats by stream, or "" for examples that are made as they are needed. What is too long is
    looked for here, not at its step. Errors as read_chats and check_lengths.
    """
    records = {stream: read_chats(file, encode, longest) for stream, file in files.items() if file}
    if len(records) < len(files):
        check_lengths(config, encode, longest)

    def chat(stream: str, index: int) -> Chat:
        if stream in records:
            record = shuffled(records[stream], index, seed if stream == "train" else 0)
        else:
            record = text_example(config, index, seed, stream)
        return encode(record["messages"])

    digests = {f"{stream} file": hashlib.sha256(Path(files[stream]).read_bytes()).hexdigest() for stream in records}
    facts: dict[str, Any] = {f"{stream} chats": len(some) for stream, some in records.items()}
    if config.text_task in CUT and len(records) < len(files):
        texts = json.dumps(list(read_texts(config.text_source, config.text_unit).values()))
        facts["passages"] = hashlib.sha256(texts.encode()).hexdigest()
    return chat, facts, digests


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
        symbols = about.get("symbols", ()) if about.get("task") in STRINGS else ()
        pieces = re.compile("|".join([*map(re.escape, symbols), "."]), re.DOTALL)
        before, _, after = truth.partition(truth.strip())
        wanted = pieces.findall(truth)
        found = got = pieces.findall(before + answer.strip() + after)
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

    def __post_init__(self):
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed}: expected 0 to 2^63 - 1")


def main() -> None:
    given: dict[str, str] = {}
    config, text_config = configurator.configure(WriteConfig, TextCopyConfig, doc=__doc__, given=given)
    unused = unused_knobs(text_config) | {"first_weight": "training, not the examples themselves"}
    configurator.check_used(given, unused, text_config)
    if config.show < 1 and not config.write or config.write and config.examples < 1:
        raise ValueError("nothing to do: give --show=3, or --write=data/copy.jsonl --examples=1000")
    for record in text_examples(text_config, config.show, config.seed, config.stream):
        user, assistant = (message["content"] for message in record["messages"])
        print(f"--- {record['id']} {json.dumps(record['metadata'])}\n{user}\n--- answer\n{assistant}")
    if config.write:
        records = text_examples(text_config, config.examples, config.seed, config.stream)
        lines = "".join(json.dumps(record) + "\n" for record in records)  # first of all: a source may be missing
        with configurator.atomic(config.write) as file:
            file.write(lines.encode())
        print(f"{config.write}: {config.examples:,} examples")


if __name__ == "__main__":
    import configurator

    configurator.run_cli(main)
