"""Copy tasks as strings of tokens, and their batches. Needs numpy alone.

A sample, as the model sees it (the targets are the copy and the separator that ends it):

    tokens    <n> I: 0  1  1  <n> <n> O: 0  1  1
    target     .  .  .  .  .   .   .  0  1  1  <n>

Nothing but the tokens tells where the source ends. Four tasks copy at other places. There, too, the answer is a
function of the source, which is all that stands between I: and the blank line:

    task         source, for a string of n = 3          answer
    select       #2 <n> 0 0 1 <n> 1 1 0 <n> 0 1 1       1 1 0 <n>               2 to 4 strings; #k names the k-th
    middle       0 0 > 1 1 0                            1 1 0 <n>               up to n symbols, a mark, the string
    multiline    1 <n> 0                                1 <n> 0 <n> <n>         2 to 4 lines; n counts their breaks
    twice        1 1 0                                  1 1 0 <n> 1 1 0 <n>

Any sample is a pure function of (seed, stream, step, index): no generator has a state to lose, and the same samples
come on any number of processes and after any resume.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

N_SYMBOLS = 32  # "0", "1", and 30 more that only noise strings use
NEWLINE, INPUT, OUTPUT, STAR, PAD, MARK, FIRST = range(N_SYMBOLS, N_SYMBOLS + 7)
VOCAB = [*map(str, range(N_SYMBOLS)), "<n>", "I:", "O:", "*", "<pad>", ">", "#1", "#2", "#3", "#4"]
TOKEN_BYTES = [b"\n" if token == "<n>" else token.encode() for token in VOCAB]  # for rope2d.break_table
SEPARATORS = {"<n>": NEWLINE, "*": STAR}  # the rule of 2D-RoPE knows the first alone

IMBALANCE = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)  # P(first token), paper section 3.1
STREAMS = {"train": 0, "validation": 1, "evaluation": 2}  # evaluation never sees what training saw

IGNORE = -100  # the target of a position that has no loss
MicroBatches = list[tuple[NDArray[np.int64], NDArray[np.int64]]]  # tokens and targets (n, T) each, of one rank


@dataclass
class CopyConfig:
    """Copy task"""

    # Strings to train on: imbalanced, recursive-flip, uniform, repeat-structure; or imbalanced ones to copy at other
    # places: select, middle, multiline, twice.
    copy_task: str = "imbalanced"
    max_length: int = 20  # lengths of strings are uniform in [1, max_length], in tokens; multiline: breaks included
    noise: float = 0.1  # share of training strings drawn from 32 symbols, not 2
    repeat_p: float = 0.9  # repeat-structure: probability that a token of the repeated base is left as it is
    closing_weight: float = 1.0  # of separators in the training loss, which end a copy or its lines; symbols have 1
    separator: Literal["<n>", "*"] = "<n>"  # token that ends a line; "*" is none that 2D-RoPE's rule knows

    def __post_init__(self):
        if self.copy_task not in TASKS:
            raise ValueError(f"copy_task={self.copy_task!r}: expected one of {', '.join(TASKS)}")
        if self.separator not in SEPARATORS:
            raise ValueError(f"separator={self.separator!r}: expected one of {', '.join(SEPARATORS)}")
        if self.max_length < 1:
            raise ValueError(f"max_length={self.max_length}: expected at least 1")
        if not 0 < self.closing_weight < math.inf:
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


def permute(index: NDArray[np.int64], n: int, key: int | NDArray) -> NDArray[np.int64]:
    """Where a random permutation of range(n) takes each index (N,); one permutation a key, which is one or (N,).

    Computed, not stored: a Feistel network on two digits of a base above sqrt(n); what it takes out of range(n) goes
    through it again (Black and Rogaway, 2002). ValueError for an index outside.
    """
    index, base = np.atleast_1d(index).astype(np.int64), np.uint64(np.sqrt(n)) + np.uint64(1)
    if index.size and not 0 <= index.min() <= index.max() < n:
        raise ValueError(f"index from {index.min()} to {index.max()}: expected 0 <= index < n={n}")
    out, key = index.astype(np.uint64), np.broadcast_to(random_bits(key), index.shape)
    todo = np.arange(index.size)
    while todo.size:
        high, low = np.divmod(out[todo], base)
        for i in range(8):
            high, low = low, (high + random_bits(low + random_bits(key[todo] + np.uint64(i)))) % base
        out[todo] = high * base + low
        todo = todo[out[todo] >= n]
    return out.astype(np.int64)


# Strings of 0 and 1, paper section 3.1: (N, T) for keys that broadcast to (N, 1), and places (T,). A shorter string is
# a prefix of its row.


def uniform(keys: Sequence[int | NDArray], at: NDArray, repeat_p: float) -> NDArray[np.int64]:
    return random_int(0, 1, *keys, 0, at)


def imbalanced(keys: Sequence[int | NDArray], at: NDArray, repeat_p: float) -> NDArray[np.int64]:
    """The first symbol, 0, with a probability of the string's own."""
    p = np.asarray(IMBALANCE)[random_int(0, len(IMBALANCE) - 1, *keys, 1)]
    return (random_unit(*keys, 0, at) >= p).astype(np.int64)


def recursive_flip(keys: Sequence[int | NDArray], at: NDArray, repeat_p: float) -> NDArray[np.int64]:
    """s <- s + c + s puts round r's c at those places, counted from 1, that 2^r divides and 2^(r+1) does not."""
    place = at + 1
    rounds = np.frexp(place & -place)[1] - 1  # log2, exactly
    return random_int(0, 1, *keys, 0, rounds)


def repeat_structure(keys: Sequence[int | NDArray], at: NDArray, repeat_p: float) -> NDArray[np.int64]:
    """A base of 4 to 10 symbols again and again, each symbol kept with probability repeat_p."""
    base = random_int(4, 10, *keys, 1)
    flip = random_unit(*keys, 2, at) >= repeat_p
    return random_int(0, 1, *keys, 0, at % base) ^ flip


# A new task is a line here, and one in ANSWERS if the answer is not the source but a function of it.
STRINGS = {
    "imbalanced": imbalanced,
    "recursive-flip": recursive_flip,
    "uniform": uniform,
    "repeat-structure": repeat_structure,
}


# Sources of copies at other places, from symbols (4 n,), the length n, and draws (4 n,) uniform in [0, 1).


def select(symbols: NDArray, n: int, draws: NDArray) -> NDArray[np.int64]:
    lines = 2 + int(3 * draws[0])
    rows = np.insert(symbols[: lines * n].reshape(lines, n), 0, NEWLINE, axis=1)
    return np.append(FIRST + int(lines * draws[1]), rows)  # flattens the rows


def middle(symbols: NDArray, n: int, draws: NDArray) -> NDArray[np.int64]:
    before = int((n + 1) * draws[0])
    return np.insert(symbols[: before + n], before, MARK)


def multiline(symbols: NDArray, n: int, draws: NDArray) -> NDArray[np.int64]:
    lines = min(2 + int(3 * draws[0]), (n + 1) // 2)  # no line is empty: a blank line ends the source
    size = n + 1 - lines  # symbols
    breaks = 1 + draws[1:size].argsort()[: lines - 1]
    return np.insert(symbols[:size], breaks, NEWLINE)


def twice(symbols: NDArray, n: int, draws: NDArray) -> NDArray[np.int64]:
    return symbols[:n]


def named_line(source: NDArray) -> NDArray[np.int64]:
    lines = np.split(source, np.flatnonzero(source == NEWLINE))  # each begins with its break
    return lines[source[0] - FIRST + 1][1:]


PLACES = {"select": select, "middle": middle, "multiline": multiline, "twice": twice}
ANSWERS: dict[str, Callable[[NDArray], NDArray]] = {
    "select": named_line,
    "middle": lambda source: source[(source == MARK).argmax() + 1 :],
    "multiline": lambda source: np.append(source, NEWLINE),
    "twice": lambda source: np.concatenate([source, [NEWLINE], source]),
}
TASKS = (*STRINGS, *PLACES)


def longest(task: str, n: int) -> int:
    """Tokens that the model sees of a sample of length n, at most."""
    of_places = {"select": 5 * n + 10, "middle": 3 * n + 6, "multiline": 2 * n + 6, "twice": 3 * n + 6}
    return of_places.get(task, 2 * n + 5)


def strings(task: str, width: int, keys: Sequence[int | NDArray], repeat_p: float = 0.9) -> NDArray[np.int64]:
    """A string for each row of keys, (N, width); keys: what the strings are a function of, arrays among them (N, 1)."""
    if task not in STRINGS:
        raise ValueError(f"task={task!r}: expected one of {', '.join(STRINGS)}")
    return STRINGS[task](keys, np.arange(width), repeat_p)


def draw_sources(
    task: str, lengths: NDArray[np.int64], keys: Sequence[int | NDArray], repeat_p: float, noise: float
) -> list[NDArray[np.int64]]:
    """A source for each of lengths (N,) and each row of keys; a share `noise` of them has 32 symbols."""
    width = int(lengths.max()) * (4 if task in PLACES else 1)
    symbols = strings("imbalanced" if task in PLACES else task, width, keys, repeat_p)
    if noise:
        noisy = random_unit(*keys, 4) < noise
        symbols = np.where(noisy, random_int(0, N_SYMBOLS - 1, *keys, 5, np.arange(width)), symbols)
    if task not in PLACES:
        return [row[:n] for row, n in zip(symbols, lengths, strict=True)]
    draws = random_unit(*keys, 6, np.arange(width))
    return [PLACES[task](*sample) for sample in zip(symbols, lengths, draws, strict=True)]


def lay_out(source: NDArray, separator: int = NEWLINE, task: str = "") -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The prompt and the answer of one sample."""
    answer = ANSWERS[task](source) if task in ANSWERS else source
    prompt = np.concatenate([[NEWLINE, INPUT], source, [NEWLINE, NEWLINE, OUTPUT]])
    answer = np.append(answer, NEWLINE)
    return np.where(prompt == NEWLINE, separator, prompt), np.where(answer == NEWLINE, separator, answer)


def pack(
    sources: Sequence[NDArray], lengths: Sequence[int], separator: int = NEWLINE, task: str = ""
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Inputs and targets (N, T), right-padded, from the first lengths (N,) tokens of N sources."""
    samples = [lay_out(source[:n], separator, task) for source, n in zip(sources, lengths, strict=True)]
    T = max(len(prompt) + len(answer) for prompt, answer in samples)
    tokens, targets = np.full((len(samples), T), PAD), np.full((len(samples), T), IGNORE)
    for row, target, (prompt, answer) in zip(tokens, targets, samples, strict=True):
        start, end = len(prompt), len(prompt) + len(answer)
        row[:start], row[start:end] = prompt, answer
        target[start:end] = answer
    return tokens[:, :-1], targets[:, 1:]


def copy_batch(
    config: CopyConfig,
    batch_size: int,
    step: int,
    seed: int,
    stream: str = "train",
    rank: int = 0,
    world: int = 1,
    pieces: int = 1,
) -> MicroBatches:
    """The micro-batches of one rank of `world`: `pieces` pairs of tokens and targets, (n, T) each, right-padded.

    All samples of a step are sorted by length and cut into world x pieces parts, so that little padding is computed.
    """
    if stream not in STREAMS:
        raise ValueError(f"stream={stream!r}: expected one of {', '.join(STREAMS)}")
    all_lengths = random_int(1, config.max_length, seed, STREAMS[stream], step, np.arange(batch_size), 3)
    micro_batches = []
    for part in np.array_split(np.argsort(all_lengths, kind="stable"), world * pieces)[rank::world]:
        keys, lengths = (seed, STREAMS[stream], step, part[:, None]), all_lengths[part]
        drawn = draw_sources(config.copy_task, lengths, keys, config.repeat_p, config.noise)
        micro_batches.append(pack(drawn, [len(row) for row in drawn], SEPARATORS[config.separator], config.copy_task))
    return micro_batches


def evaluation_strings(
    task: str, low: int, high: int, n: int, seed: int, repeat_p: float = 0.9
) -> list[NDArray[np.int64]]:
    """n sources with lengths uniform in [low, high], for tests: never noisy, never those of training."""
    if task not in TASKS or not 1 <= low <= high:
        raise ValueError(f"{task=}, {low=}, {high=}: expected one of {', '.join(TASKS)}, and 1 <= low <= high")
    keys = (seed, STREAMS["evaluation"], TASKS.index(task), low, high, np.arange(n)[:, None])
    lengths = random_int(low, high, *keys, 3)[:, 0]
    return draw_sources(task, lengths, keys, repeat_p, noise=0.0)


def text(tokens: Sequence[int]) -> str:
    """Token ids as a person reads them."""
    return " ".join(VOCAB[token] for token in tokens)
