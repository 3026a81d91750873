"""Copy tasks: the strings, and batches of them. Needs numpy alone.

A sample of the token-level task, as the model sees it (the targets are the copy and the separator that ends it):

    tokens    <n> I: 0  1  1  <n> <n> O: 0  1  1
    target     .  .  .  .  .   .   .  0  1  1  <n>

Nothing but the tokens tells where the source ends. Any sample is a pure function of (seed, stream, step, index): there
is no generator whose state could be lost, and the same samples come on any number of processes and after any resume.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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
    separator: Literal["<n>", "*"] = "<n>"  # what ends a line; "*" is a token that 2D-RoPE's rule does not know

    def __post_init__(self):
        if self.copy_task not in TASKS or self.separator not in SEPARATORS:
            raise ValueError(
                f"copy_task={self.copy_task!r}, separator={self.separator!r}: expected one of {', '.join(TASKS)}, and "
                f"one of {', '.join(SEPARATORS)}"
            )
        if self.max_length < 1:
            raise ValueError(f"max_length={self.max_length}: expected at least 1")
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


def evaluation_strings(task: str, low: int, high: int, n: int, seed: int) -> list[NDArray[np.int64]]:
    """n strings with lengths uniform in [low, high], for tests: never noisy, never those of training."""
    if task not in TASKS or not 1 <= low <= high:
        raise ValueError(f"{task=}, {low=}, {high=}: expected one of {', '.join(TASKS)}, and 1 <= low <= high")
    keys = (seed, STREAMS["evaluation"], TASKS.index(task), low, high, np.arange(n)[:, None])
    lengths = random_int(low, high, *keys, 3)[:, 0]
    return [row[:length] for row, length in zip(strings(task, high, keys), lengths, strict=True)]


def text(tokens: Sequence[int]) -> str:
    """Tokens as a person reads them."""
    return " ".join(VOCAB[token] for token in tokens)
