"""data_copy.py: bits and strings as pure functions of their keys, each task against a loop, batches against a loop."""

from collections import Counter

import numpy as np
import pytest

import data_copy
from data_copy import (
    IGNORE,
    INPUT,
    NEWLINE,
    OUTPUT,
    PLACES,
    STREAMS,
    STRINGS,
    TASKS,
    VOCAB,
    CopyConfig,
    copy_batch,
    evaluation_strings,
    permute,
    random_int,
    random_unit,
    strings,
)


def keys(n: int, seed: int = 0) -> tuple:
    return seed, 0, 5, np.arange(n)[:, None]


def within(share: float, p: float, n: int) -> bool:
    """Whether a share of n draws is within five standard deviations of p."""
    return abs(share - p) <= 5 * (p * (1 - p) / n) ** 0.5


@pytest.mark.parametrize("axis", range(3))
def test_bits_are_balanced_unique_and_uncorrelated_along_every_key(axis):
    n, along = 20_000, [7, 0, 1]
    along[axis] = np.arange(n)
    bits = data_copy.random_bits(*along)
    assert len(set(bits.tolist())) == n
    planes = (bits[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    for one in (planes.mean(0), (planes[1:] ^ planes[:-1]).mean(0)):
        assert (abs(one - 0.5) < 5 * 0.5 / n**0.5).all()
    unit = data_copy.random_unit(*along)
    assert 0 <= unit.min() and unit.max() < 1 and abs(unit.mean() - 0.5) < 5 / (12 * n) ** 0.5
    drawn = Counter(random_int(4, 10, *along).tolist())
    assert drawn.keys() == set(range(4, 11)) and all(within(count / n, 1 / 7, n) for count in drawn.values())


@pytest.mark.parametrize("n", [1, 2, 3, 10, 99, 1000, 1024])
def test_a_permutation_takes_each_index_to_another_place(n):
    whole = permute(np.arange(n), n, 3)
    assert sorted(whole.tolist()) == list(range(n)) and whole.dtype == np.int64
    index, keys = np.arange(20) % n, np.arange(20) % 2 + 3  # a key for each index
    alone = [permute(index[i : i + 1], n, int(keys[i]))[0] for i in range(20)]
    assert permute(index, n, keys).tolist() == alone and alone[0] == whole[0]
    if n > 90:
        assert (whole == permute(np.arange(n), n, 4)).mean() < 0.1 and (np.diff(whole) == 1).mean() < 0.1


def test_permutations_of_today_are_those_of_tomorrow_and_uniform():
    assert permute(np.arange(10), 10, 3).tolist() == [1, 2, 7, 0, 6, 8, 9, 5, 4, 3]
    assert permute(np.arange(3), 10**9, 4).tolist() == [747110819, 616467339, 320500019]
    at = Counter(permute(np.full(7000, 2), 7, np.arange(7000)).tolist())
    assert len(at) == 7 and all(within(count / 7000, 1 / 7, 7000) for count in at.values())
    with pytest.raises(ValueError, match="index from 3 to 10: expected 0 <= index < n=10"):
        permute(np.array([3, 10]), 10, 0)


def test_strings_of_today_are_those_of_tomorrow():
    today = {
        "uniform": "1101000001001011010100011100111110110000",
        "imbalanced": "0101000001001000000000010000001000110000",
        "recursive-flip": "1110111111101110111011111110111011101111",
        "repeat-structure": "1101001011010100111100001101000111010010",
    }
    assert {task: "".join(map(str, strings(task, 40, (7, 0, 5, np.array([[1]])))[0])) for task in STRINGS} == today
    today = {
        "select": "#2 <n> 0 0 1 0 0 <n> 0 1 0 1 1 <n> 1 0 1 0 0 <n> 1 0 0 0 1",
        "middle": "0 > 0 0 0 0 0",
        "multiline": "0 <n> 1 <n> 1",
        "twice": "1 0 1 0 0",
    }
    assert {task: data_copy.text(evaluation_strings(task, 5, 5, 4, 0)[3]) for task in PLACES} == today


def test_imbalanced_strings_have_the_seven_probabilities_in_equal_shares():
    n = 2000
    zeros = (strings("imbalanced", n, keys(1400)) == 0).mean(1)
    nearest = abs(zeros[:, None] - np.array(data_copy.IMBALANCE)).argmin(1)
    assert data_copy.IMBALANCE == (0.05, 0.15, 0.3, 0.5, 0.7, 0.85, 0.95)
    for which, p in enumerate(data_copy.IMBALANCE):
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
    assert within(drawn[:, :4].mean(), 0.5, 2800)
    for p in (0.9, 0.6, 0.0):
        flipped = strings("repeat-structure", 100, keys(700), repeat_p=p) != drawn
        assert within(flipped.mean(), 1 - p, flipped.size)
        of_ones = flipped[:, :4][drawn[:, :4] == 1]  # a flip does not depend on the token that it flips
        assert within(of_ones.mean(), 1 - p, of_ones.size)
        assert within((flipped[:, 1:] & flipped[:, :-1]).mean(), (1 - p) ** 2, flipped.size)


def test_pack_lays_out_a_small_batch_exactly():
    inputs, targets = data_copy.pack(np.array([[1, 9, 9, 9], [0, 1, 1, 9]]), np.array([1, 3]))
    n, i, o, p, x = data_copy.NEWLINE, INPUT, OUTPUT, data_copy.PAD, IGNORE
    assert inputs.tolist() == [[n, i, 1, n, n, o, 1, n, p, p, p], [n, i, 0, 1, 1, n, n, o, 0, 1, 1]]
    assert targets.tolist() == [[x, x, x, x, x, 1, n, x, x, x, x], [x, x, x, x, x, x, x, 0, 1, 1, n]]
    assert data_copy.text(inputs[1]) == "<n> I: 0 1 1 <n> <n> O: 0 1 1"


def plain_places(task: str, symbols: list[int], n: int, draws: list[float]) -> tuple[list[int], list[int]]:
    """The source and the answer of one sample, token by token."""
    string, source = symbols[:n], []
    if task in STRINGS:
        return string, string
    if task == "twice":
        return string, [*string, NEWLINE, *string]
    if task == "middle":
        before = int(draws[0] * (n + 1))
        answer = symbols[before : before + n]
        return [*symbols[:before], VOCAB.index(">"), *answer], answer
    lines = int(draws[0] * 3) + 2
    if task == "select":
        named, parts = int(draws[1] * lines), [symbols[i * n : (i + 1) * n] for i in range(lines)]
        for part in parts:
            source += [NEWLINE, *part]
        return [VOCAB.index(f"#{named + 1}"), *source], parts[named]
    while 2 * lines - 1 > n:
        lines -= 1
    size = n - (lines - 1)
    breaks = sorted(range(1, size), key=lambda i: draws[i])[: lines - 1]  # those with the smallest draws
    for i in range(size):
        source += [NEWLINE] * (i in breaks) + [symbols[i]]
    return source, [*source, NEWLINE]


def plain_sample(task: str, place: tuple, low: int, high: int, repeat_p: float, noise: float = 0.0) -> tuple:
    """Length, source and answer of the sample at this place (seed, stream, ..., index)."""
    n = int(random_int(low, high, *place, 3)[0, 0])
    symbols = strings(task if task in STRINGS else "imbalanced", 4 * n, place, repeat_p)[0]
    if random_unit(*place, 4)[0, 0] < noise:
        symbols = random_int(0, data_copy.N_SYMBOLS - 1, *place, 5, np.arange(4 * n))[0]
    draws = random_unit(*place, 6, np.arange(4 * n))[0]
    return n, *plain_places(task, symbols.tolist(), n, draws.tolist())


@pytest.mark.parametrize("rank_world_pieces", [(1, 1), (1, 4), (2, 3), (3, 1), (11, 1)])
@pytest.mark.parametrize("task, separator", [*((task, "<n>") for task in TASKS), ("uniform", "*"), ("multiline", "*")])
def test_a_batch_is_its_samples_sorted_by_length_however_it_is_cut(task, separator, rank_world_pieces):
    config = CopyConfig(task, 30, noise=0.3, repeat_p=0.8, separator=separator)
    places = [(4, STREAMS["validation"], 9, np.array([[i]])) for i in range(11)]
    wanted = [plain_sample(task, place, 1, 30, 0.8, noise=0.3) for place in places]
    wanted = sorted(wanted, key=lambda sample: sample[0])  # a stable order: equal lengths stay as they come
    end = data_copy.SEPARATORS[separator]
    world, pieces = rank_world_pieces
    ranks = [copy_batch(config, 11, 9, 4, "validation", rank, world, pieces) for rank in range(world)]
    assert [len(own) for own in ranks] == [pieces] * world
    parts = [ranks[i % world][i // world] for i in range(world * pieces)]  # shortest first
    sizes = [len(tokens) for tokens, _ in parts]
    assert sum(sizes) == 11 and max(sizes) - min(sizes) <= 1
    for tokens, targets in parts:
        here, wanted = wanted[: len(tokens)], wanted[len(tokens) :]
        T = max(len(source) + 6 + len(answer) for _, source, answer in here) - 1  # no column of padding alone
        assert tokens.shape == targets.shape == (len(here), T) and tokens.dtype == targets.dtype == np.int64
        for (_, source, answer), row, target in zip(here, tokens.tolist(), targets.tolist(), strict=True):
            source, answer = ([end if token == NEWLINE else token for token in part] for part in (source, answer))
            sample = [end, INPUT, *source, end, end, OUTPUT, *answer, end]
            assert row == [*sample, *[data_copy.PAD] * T][:T]
            assert target == [*[IGNORE] * (len(source) + 4), *answer, end, *[IGNORE] * T][:T]


def read(task: str, prompt: str) -> str:
    """The answer to a prompt, as a person finds it, who knows nothing but the prompt."""
    body, rest = prompt.removeprefix("<n> I: ").split(" <n> <n> ")  # there is one blank line
    assert rest == "O:"
    which, *lines = body.split(" <n> ")
    answers = {
        "select": lambda: lines[int(which.removeprefix("#")) - 1],
        "middle": lambda: body.split("> ")[1],
        "multiline": lambda: body + " <n>",
        "twice": lambda: f"{body} <n> {body}",
    }
    return answers[task]() + " <n>"


@pytest.mark.parametrize("task", PLACES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 6, 7, 20])
def test_what_to_copy_is_told_by_the_prompt_and_no_sample_is_longer_than_the_longest(task, n):
    sizes, drawn = [], evaluation_strings(task, n, n, 200, 1)
    for source in drawn:
        prompt, answer = data_copy.lay_out(source, task=task)
        assert data_copy.text(answer) == read(task, data_copy.text(prompt))
        assert len(answer) == {"twice": 2 * n + 2, "multiline": n + 2}.get(task, n + 1)
        sizes.append(len(prompt) + len(answer) - 1)
    assert max(sizes) == data_copy.longest(task, n)
    assert data_copy.pack(drawn, [len(row) for row in drawn], task=task)[0].shape == (200, max(sizes))


def test_a_copy_may_stand_anywhere():
    n, N = 7, 3000
    texts = {task: [data_copy.text(row) for row in evaluation_strings(task, n, n, N, 0)] for task in PLACES}
    named = Counter((text.count("<n>"), int(text[1])) for text in texts["select"])
    assert named.keys() == {(lines, k) for lines in (2, 3, 4) for k in range(1, lines + 1)}
    assert all(within(count / N, 1 / 3 / lines, N) for (lines, _), count in named.items())
    before = Counter(text.split().index(">") for text in texts["middle"])
    assert before.keys() == set(range(n + 1)) and all(within(count / N, 1 / (n + 1), N) for count in before.values())
    shapes = Counter(tuple(len(line.split()) for line in text.split("<n>")) for text in texts["multiline"])
    ways = {2: 5, 3: 6, 4: 1}  # to cut 6, 5 and 4 symbols into as many lines
    assert Counter(map(len, shapes)) == ways and {sum(shape) + len(shape) - 1 for shape in shapes} == {n}
    assert all(within(count / N, 1 / 3 / ways[len(shape)], N) for shape, count in shapes.items())
    for rows in texts.values():
        ones = [text.split().count("1") / sum(word in "01" for word in text.split()) for text in rows]
        assert abs(np.mean(ones) - 0.5) < 0.05 and np.mean([share in (0, 1) for share in ones]) > 0.05  # imbalanced


@pytest.mark.parametrize("task", TASKS)
def test_evaluation_strings_fill_their_interval_without_noise(task):
    assert sorted(STREAMS.values()) == [0, 1, 2]  # so that no stream has another's samples
    places = [(0, STREAMS["evaluation"], TASKS.index(task), 26, 50, np.array([[i]])) for i in range(300)]  # each alone
    lengths, wanted, _ = zip(*(plain_sample(task, place, 26, 50, 0.7) for place in places), strict=True)
    assert [row.tolist() for row in evaluation_strings(task, 26, 50, 300, 0, 0.7)] == list(wanted)
    assert set(lengths) == set(range(26, 51)) and {token for row in wanted for token in row if token < 32} == {0, 1}
    other = evaluation_strings(task, 26, 50, 10, 1, 0.7)
    assert any(row.tolist() != first for row, first in zip(other, wanted, strict=False))


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: CopyConfig(max_length=0), "max_length=0"),
        (lambda: CopyConfig(noise=-0.1), "noise=-0.1"),
        (lambda: CopyConfig(closing_weight=0.0), "closing_weight=0.0"),
        (lambda: CopyConfig(closing_weight=float("inf")), "closing_weight=inf"),
        (lambda: CopyConfig(repeat_p=1.5), "repeat_p=1.5"),
        (lambda: CopyConfig(copy_task="reverse"), "copy_task='reverse'"),
        (lambda: CopyConfig(separator="#"), "separator='#'"),
        (lambda: copy_batch(CopyConfig(), 2, 0, 0, stream="test"), "stream='test'"),
        (lambda: evaluation_strings("uniform", 9, 5, 2, 0), "low=9, high=5"),
    ],
)
def test_wrong_values_are_refused_by_name(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_a_task_may_have_another_answer_than_its_source(monkeypatch):
    monkeypatch.setitem(data_copy.ANSWERS, "uniform", lambda source: 1 - source)
    sources = np.array([[0, 1, 1], [1, 0, 0]])
    tokens, targets = data_copy.pack(sources, np.array([3, 2]), NEWLINE, "uniform")
    assert tokens[0].tolist() == [NEWLINE, INPUT, 0, 1, 1, NEWLINE, NEWLINE, OUTPUT, 1, 0, 0]
    assert targets[0][targets[0] != IGNORE].tolist() == [1, 0, 0, NEWLINE]
    assert targets[1][targets[1] != IGNORE].tolist() == [0, 1, NEWLINE]
    config = CopyConfig("uniform", max_length=5, noise=0.0)
    ((tokens, targets),) = copy_batch(config, 6, 0, 0)
    for row, wanted in zip(tokens, targets, strict=True):
        n = int((wanted != IGNORE).sum()) - 1
        assert (row[2 : 2 + n] == 1 - wanted[wanted != IGNORE][:-1]).all()
