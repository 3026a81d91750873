"""data_copy.py: bits and strings as pure functions of their keys, each task against a loop, batches against a loop."""

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest

import data_copy
from data_copy import (
    IGNORE,
    IMBALANCE,
    INPUT,
    N_SYMBOLS,
    NEWLINE,
    OUTPUT,
    PAD,
    STAR,
    TASKS,
    CopyConfig,
    batch,
    evaluation_strings,
    pack,
    random_bits,
    random_int,
    random_unit,
    strings,
    text,
)


def keys(n: int, seed: int = 0) -> tuple:
    return seed, 0, 5, np.arange(n)[:, None]


def within(share: float, p: float, n: int) -> bool:
    """Whether a share of n draws is within five standard deviations of p."""
    return abs(share - p) <= 5 * (p * (1 - p) / n) ** 0.5


def sources(inputs: np.ndarray, lengths: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(row[2 : 2 + n].tolist()) for row, n in zip(inputs, lengths, strict=True)]


def test_bits_depend_on_their_own_keys_alone_and_on_their_order():
    many = random_bits(3, np.arange(500)[:, None], np.arange(20))
    assert many.shape == (500, 20) and many.dtype == np.uint64
    for i, j in ((0, 0), (1, 0), (499, 19)):
        assert random_bits(3, i, j) == many[i, j] == random_bits(3, i, np.arange(j, j + 3))[0]
    assert random_bits(1, 2) != random_bits(2, 1) and random_bits(1) != random_bits(1, 0)
    assert len({0, *(int(random_bits(*[0] * length)[0]) for length in range(1, 9))}) == 9  # zeros are no fixed point
    assert random_bits(-1) != random_bits(1) and random_bits(2**63 + 5) != random_bits(5)


@pytest.mark.parametrize("axis", range(3))
def test_bits_are_balanced_unique_and_uncorrelated_along_every_key(axis):
    n, along = 20_000, [7, 0, 1]
    along[axis] = np.arange(n)
    bits = random_bits(*along)
    assert len(set(bits.tolist())) == n
    planes = (bits[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    for one in (planes.mean(0), (planes[1:] ^ planes[:-1]).mean(0)):
        assert (abs(one - 0.5) < 5 * 0.5 / n**0.5).all()
    unit = random_unit(*along)
    assert 0 <= unit.min() and unit.max() < 1 and abs(unit.mean() - 0.5) < 5 / (12 * n) ** 0.5
    drawn = Counter(random_int(4, 10, *along).tolist())
    assert drawn.keys() == set(range(4, 11)) and all(within(count / n, 1 / 7, n) for count in drawn.values())


@pytest.mark.parametrize("task", TASKS)
def test_a_shorter_string_is_a_prefix_and_its_batch_does_not_matter(task):
    wide = strings(task, 60, keys(40))
    assert wide.shape == (40, 60) and set(np.unique(wide)) == {0, 1}
    assert np.array_equal(strings(task, 23, keys(7)), wide[:7, :23])
    assert not np.array_equal(strings(task, 60, keys(40, seed=1)), wide)


def test_uniform_strings_have_fair_and_independent_tokens():
    drawn = strings("uniform", 500, keys(200))
    assert within(drawn.mean(), 0.5, drawn.size)
    for lag in (1, 2, 4):
        assert within((drawn[:, lag:] == drawn[:, :-lag]).mean(), 0.5, drawn[:, lag:].size)
        assert within((drawn[lag:] == drawn[:-lag]).mean(), 0.5, drawn[lag:].size)


def test_imbalanced_strings_have_the_seven_probabilities_in_equal_shares():
    n = 2000
    zeros = (strings("imbalanced", n, keys(1400)) == 0).mean(1)
    nearest = abs(zeros[:, None] - np.array(IMBALANCE)).argmin(1)
    assert IMBALANCE == (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)
    for which, p in enumerate(IMBALANCE):
        mine = zeros[nearest == which]
        assert within(len(mine) / 1400, 1 / 7, 1400) and within(mine.mean(), p, n * len(mine))
        assert all(within(share, p, n) for share in mine)


def test_recursive_flip_is_the_literal_recursion():
    drawn = strings("recursive-flip", 150, keys(300))
    fresh = drawn[:, [0, 1, 3, 7, 15, 31, 63, 127]]  # the first place of each round's token
    for row, tokens in zip(drawn.tolist(), fresh.tolist(), strict=True):
        s = []
        for c in tokens:
            s = s + [c] + s
        assert row == s[:150]
    assert all(within(share, 0.5, 300) for share in fresh.mean(0))
    assert len(set(map(tuple, fresh.tolist()))) > 150  # of 256


def test_repeat_structure_repeats_a_base_of_4_to_10_tokens():
    drawn = strings("repeat-structure", 100, keys(700), repeat_p=1.0)
    periods = [next(k for k in range(1, 101) if (row[k:] == row[:-k]).all()) for row in drawn]
    assert max(periods) == 10 and set(range(4, 11)) <= set(periods)  # a base may itself be periodic
    base = random_int(4, 10, *keys(700), 1)[:, 0]
    assert all(size % period == 0 for size, period in zip(base, periods, strict=True))
    assert within(drawn[:, :4].mean(), 0.5, 2800)
    for p in (0.9, 0.6):
        flipped = strings("repeat-structure", 100, keys(700), repeat_p=p) != drawn
        assert within(flipped.mean(), 1 - p, flipped.size)
        of_ones = flipped[:, :4][drawn[:, :4] == 1]  # a flip does not depend on the token that it flips
        assert within(of_ones.mean(), 1 - p, of_ones.size)
        assert within((flipped[:, 1:] & flipped[:, :-1]).mean(), (1 - p) ** 2, flipped.size)
    assert np.array_equal(strings("repeat-structure", 100, keys(700), repeat_p=0.0), 1 - drawn)


def test_pack_lays_out_a_small_batch_exactly():
    inputs, targets = pack(np.array([[1, 9, 9], [0, 1, 1]]), np.array([1, 3]))
    n, i, o, p, x = NEWLINE, INPUT, OUTPUT, PAD, IGNORE
    assert inputs.tolist() == [[n, i, 1, n, n, o, 1, n, p, p, p], [n, i, 0, 1, 1, n, n, o, 0, 1, 1]]
    assert targets.tolist() == [[x, x, x, x, x, 1, n, x, x, x, x], [x, x, x, x, x, x, x, 0, 1, 1, n]]
    assert text(inputs[1]) == "<n> I: 0 1 1 <n> <n> O: 0 1 1"


@pytest.mark.parametrize("separator", [NEWLINE, STAR])
def test_pack_matches_a_loop_over_samples(separator):
    lengths = random_int(1, 30, 4, np.arange(50))
    rows = random_int(0, N_SYMBOLS - 1, 5, np.arange(50)[:, None], np.arange(33))  # wider than the longest
    inputs, targets = pack(rows, lengths, separator)
    T = 2 * max(lengths) + 5
    assert inputs.shape == targets.shape == (50, T) and inputs.dtype == targets.dtype == np.int64
    for row, n, given, wanted in zip(rows.tolist(), lengths.tolist(), inputs.tolist(), targets.tolist(), strict=True):
        copy = [*row[:n], separator]
        whole = [separator, INPUT, *row[:n], separator, separator, OUTPUT, *copy] + [PAD] * T
        assert given == whole[:T]
        assert wanted == [whole[t + 1] if n + 4 <= t < 2 * n + 5 else IGNORE for t in range(T)]
        assert [token for token in wanted if token != IGNORE] == copy


def test_separator_replaces_every_line_break_and_nothing_else():
    lines, stars = (batch(CopyConfig(separator=s), 32, 3, 0) for s in ("<n>", "*"))
    for with_lines, with_stars in zip(lines, stars, strict=True):
        assert np.array_equal(np.where(with_lines == NEWLINE, STAR, with_lines), with_stars)
    assert (lines[0] == NEWLINE).sum() >= 3 * 32 and not (stars[0] == NEWLINE).any()


@pytest.mark.parametrize("task", TASKS)
def test_batch_size_does_not_change_a_sample(task):
    config = CopyConfig(copy_task=task, max_length=40, noise=0.3)

    def samples(n: int) -> Counter:
        inputs, _, lengths = batch(config, n, 11, 2)
        assert (np.diff(lengths) >= 0).all() and inputs.shape == (n, 2 * lengths[-1] + 5)
        return Counter(sources(inputs, lengths))

    assert samples(8) <= samples(9) <= samples(64) == samples(64)
    assert samples(64).total() == 64


def test_steps_seeds_and_streams_share_no_strings():
    config = CopyConfig(copy_task="uniform", max_length=64, noise=0.2)
    seen = Counter()
    for step, seed, stream in [(0, 0, "train"), (1, 0, "train"), (0, 1, "train"), (1, 1, "validation")]:
        inputs, _, lengths = batch(config, 128, step, seed, stream)
        seen.update({source for source in sources(inputs, lengths) if len(source) > 40})
    for step in (0, 1):
        inputs, _, lengths = batch(config, 128, step, 0, "validation")
        seen.update({source for source in sources(inputs, lengths) if len(source) > 40})
    seen.update({tuple(row.tolist()) for row in evaluation_strings("uniform", 41, 64, 128, 0)})
    seen.update({tuple(row.tolist()) for row in evaluation_strings("uniform", 41, 64, 128, 1)})
    assert len(seen) > 400 and set(seen.values()) == {1}


def test_lengths_are_uniform_up_to_the_maximum_and_noise_has_its_share():
    n, config = 20_000, CopyConfig(copy_task="uniform", max_length=20, noise=0.1)
    inputs, _, lengths = batch(config, n, 0, 0)
    counts = Counter(lengths.tolist())
    assert counts.keys() == set(range(1, 21)) and all(within(c / n, 1 / 20, n) for c in counts.values())
    long = [source for source, length in zip(sources(inputs, lengths), lengths, strict=True) if length >= 10]
    noisy = [source for source in long if max(source) > 1]  # ten tokens of 32 stay below 2 once in 10^12
    assert within(len(noisy) / len(long), 0.1, len(long))
    symbols = Counter(token for source in noisy for token in source)
    total = symbols.total()
    assert symbols.keys() == set(range(N_SYMBOLS)) and all(within(c / total, 1 / 32, total) for c in symbols.values())
    quiet, _, lengths = batch(CopyConfig(noise=0.0), 500, 0, 0)
    assert max(map(max, sources(quiet, lengths))) == 1


@pytest.mark.parametrize("task", TASKS)
def test_evaluation_strings_fill_their_interval_without_noise(task):
    drawn = evaluation_strings(task, 26, 50, 1000, 0)
    assert {len(row) for row in drawn} == set(range(26, 51))
    assert set(np.unique(np.concatenate(drawn))) == {0, 1}
    again = evaluation_strings(task, 26, 50, 10, 0)
    assert all(np.array_equal(a, b) for a, b in zip(drawn, again, strict=False))
    other = evaluation_strings(task, 26, 50, 10, 1)
    assert any(not np.array_equal(a, b) for a, b in zip(drawn, other, strict=False))
    assert [len(row) for row in evaluation_strings(task, 7, 7, 3, 0)] == [7, 7, 7]


def test_a_batch_is_made_in_a_few_milliseconds():
    config, spent = CopyConfig(max_length=100), []
    for step in range(21):
        start = time.process_time()  # what this process spent: other work on the machine does not count
        batch(config, 64, step, 0)
        spent.append(time.process_time() - start)
    assert statistics.median(spent) < 0.010, spent


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: CopyConfig(max_length=0), "max_length=0"),
        (lambda: CopyConfig(noise=-0.1), "noise=-0.1"),
        (lambda: CopyConfig(noise=float("nan")), "noise=nan"),
        (lambda: CopyConfig(closing_weight=0.0), "closing_weight=0.0"),
        (lambda: CopyConfig(repeat_p=1.5), "repeat_p=1.5"),
        (lambda: strings("reverse", 4, keys(2)), "reverse"),
        (lambda: batch(CopyConfig(copy_task="reverse"), 2, 0, 0), "reverse"),
        (lambda: batch(CopyConfig(separator="#"), 2, 0, 0), "#"),
        (lambda: batch(CopyConfig(), 2, 0, 0, stream="test"), "test"),
        (lambda: evaluation_strings("reverse", 1, 5, 2, 0), "reverse"),
        (lambda: evaluation_strings("uniform", 9, 5, 2, 0), "9"),
        (lambda: evaluation_strings("uniform", 0, 5, 2, 0), "0"),
    ],
)
def test_wrong_values_are_refused_by_name(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_the_file_works_alone_in_an_empty_folder(tmp_path):
    shutil.copy(data_copy.__file__, tmp_path)
    code = "import sys, data_copy as d; print(len(d.batch(d.CopyConfig(), 4, 0, 0)[0]), 'torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.stdout.split() == ["4", "False"], run.stderr
