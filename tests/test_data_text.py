"""data_text.py: sources, prompts, signals; files of chats and their batches; the scorer; the command line."""

import hashlib
import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from conftest import run_script

import data_text
import passages
from data_copy import IGNORE, STREAMS, permute, random_bits, strings
from data_text import (
    SIGNALS,
    TEXT_TASKS,
    TextCopyConfig,
    pad_chats,
    read_jsonl,
    score,
    text_example,
    text_examples,
)
from passages import CONTENTS
from tokenizer import load_tokenizer

SELF_CONTAINED = [task for task in TEXT_TASKS if task not in ("documents", "prose", "code")]  # need no source
SYMBOLS = [("0", "1"), (" a", " b"), ("000", "111"), ("{x}", "é|")]
ENCODE = load_tokenizer("bytes").chat


def config(task: str = "uniform", low: int = 0, high: int = 0, **knobs) -> TextCopyConfig:
    return TextCopyConfig(text_task=task, text_min_length=low, text_max_length=high, **knobs)


def prompt(record: dict) -> str:
    return record["messages"][0]["content"]


def answer(record: dict) -> str:
    return record["messages"][1]["content"]


def within(share: float, p: float, n: int) -> bool:
    """Whether a share of n draws is within five standard deviations of p."""
    return abs(share - p) <= 5 * (p * (1 - p) / n) ** 0.5


@pytest.mark.parametrize("task", SELF_CONTAINED)
def test_an_example_is_a_function_of_its_arguments_in_any_order(task):
    places = [(index, seed, stream) for index in (0, 1, 7) for seed in (0, 3) for stream in STREAMS]
    there = [text_example(config(task), *place) for place in places]
    assert [text_example(config(task), *place) for place in reversed(places)] == there[::-1]
    assert len({record["id"] for record in there}) == len({record["source"] for record in there}) == len(places)
    assert list(text_examples(config(task), 8, 3, "validation"))[7] == text_example(config(task), 7, 3, "validation")


def test_examples_of_today_are_those_of_tomorrow():
    record = text_example(config("recursive-flip", 7, 7, symbols=(" a", " b"), template_kind="own-line"), 5, 2)
    assert prompt(record) == data_text.STRING_TEMPLATES[4].format(
        " b a b b b a b"
    )  # b, a between two of it, b between two of it
    assert answer(record) == record["source"] == " b a b b b a b" and record["id"] == "recursive-flip-train-2-5-7"
    about = dict(task="recursive-flip", length=7, template=4, kind="own-line", symbols=[" a", " b"])
    assert record["metadata"] == about and [turn["role"] for turn in record["messages"]] == ["user", "assistant"]
    assert text_example(config("lists"), 3, 1)["source"].startswith("0.98, 0.99, 1.01, 1.03, 1.04")


def test_a_given_length_gives_the_example_that_comes_where_it_is_drawn():
    for task in SELF_CONTAINED:
        record = text_example(config(task), 4, 1, "evaluation")
        n = record["metadata"]["length"]
        assert text_example(config(task), 4, 1, "evaluation", length=n) == record
        assert text_example(config(task), 4, 1, "evaluation", length=3)["metadata"]["length"] == 3  # no bound for it


def test_documents_are_passages_of_all_contents_in_templates_of_all_kinds(tmp_path):
    for d in range(300):
        (tmp_path / f"{d}.{'py' if d % 2 else 'txt'}").write_text("\n".join(f"{d} line {i}" for i in range(12)))
    text_config = config("documents", 2, 6, text_source=(str(tmp_path),))
    examples = list(text_examples(text_config, 600, 1, "train"))
    assert examples[:50] == list(text_examples(text_config, 50, 1, "train"))
    contents = Counter(e["metadata"]["content"] for e in examples)
    assert set(contents) == set(CONTENTS) and all(within(n / 600, 1 / 6, 600) for n in contents.values())
    kinds = Counter(e["metadata"]["kind"] for e in examples)
    assert set(kinds) == set(data_text.KINDS) and all(within(n / 600, 1 / 3, 600) for n in kinds.values())
    for example in examples:
        assert answer(example) == example["source"] and prompt(example).count(example["source"]) >= 1
        assert example["source"].count("\n") + 1 == example["metadata"]["length"] in range(2, 7)
        assert score(example, answer(example)).correct
        assert passages.passage_scores(answer(example), answer(example)) == (1.0, 1.0)
    (code,) = text_examples(replace(text_config, text_task="code", template_kind="first"), 1, 0, "evaluation", 3)
    assert (code["metadata"]["content"], code["metadata"]["kind"]) == ("code", "first")
    assert passages.stream_of(f"line 1 of {code['source'].split()[0]}.py") == "evaluation"
    (text,) = text_examples(replace(text_config, text_task="prose", text_unit="characters"), 1, 0, "train", 25)
    assert len(text["source"]) == 25


@pytest.mark.parametrize(
    "answer, lines, similarity",
    [
        ("ab\ncd\n", 1.0, 1.0),
        ("ab\ncx", 0.5, 4 / 5),
        ("ab", 0.5, 2 / 5),
        ("xab\ncd", 0.5, 5 / 6),
        ("ab\ncd\nef", 1.0, 5 / 8),
        ("", 0.0, 0.0),
    ],
)
def test_passages_are_scored_by_line_and_by_edits(answer, lines, similarity):
    record = {"messages": [{"role": "user", "content": "ab\ncd"}, {"role": "assistant", "content": "ab\ncd"}]}
    assert passages.passage_scores(record["messages"][-1]["content"], answer) == (lines, pytest.approx(similarity))


def test_edit_distance_is_the_textbook_table():
    chance = np.random.default_rng(0)
    for _ in range(50):
        a, b = ("".join(chance.choice([*"abé"], size)) for size in chance.integers(0, 9, 2))
        table = [[max(i, j) for j in range(len(b) + 1)] for i in range(len(a) + 1)]
        for i in range(1, len(a) + 1):
            for j in range(1, len(b) + 1):
                replaced = table[i - 1][j - 1] + (a[i - 1] != b[j - 1])
                table[i][j] = min(replaced, table[i - 1][j] + 1, table[i][j - 1] + 1)
        assert passages.edit_distance(a, b) == table[-1][-1]


@pytest.mark.parametrize("task", TEXT_TASKS[:4])
@pytest.mark.parametrize("symbols", SYMBOLS)
def test_strings_are_those_of_the_token_level_in_other_symbols(task, symbols):
    for index in range(20):
        record = text_example(config(task, 1, 60, symbols=symbols, text_repeat_p=0.8), index, 9, "validation")
        n = record["metadata"]["length"]
        keys = (9, STREAMS["validation"], -1, TEXT_TASKS.index(task), np.array([[index]]), n)
        assert record["source"] == "".join(symbols[bit] for bit in strings(task, n, keys, 0.8)[0])
        assert answer(record) == record["source"] and record["metadata"]["symbols"] == list(symbols)
        assert score(record, answer(record)) == (True, "", n, n, None)


def test_lengths_are_uniform_between_their_bounds_and_have_the_papers_defaults():
    n = 1000
    lengths = Counter(record["metadata"]["length"] for record in text_examples(config("uniform", 3, 12), n, 0))
    assert lengths.keys() == set(range(3, 13)) and all(within(count / n, 1 / 10, n) for count in lengths.values())
    bounds = {("uniform", stream): (1, 1000) for stream in STREAMS}
    bounds |= {("lists", "train"): (50, 150), ("lists", "validation"): (50, 150), ("lists", "evaluation"): (200, 800)}
    for (task, stream), (low, high) in bounds.items():
        assert data_text.length_bounds(config(task), stream) == (low, high)
        assert text_example(config(task), 0, 0, stream) == text_example(config(task, low, high), 0, 0, stream)


def test_noise_is_a_share_of_training_strings_over_alphabets_of_2_to_62():
    config = TextCopyConfig(text_noise=0.4, text_max_length=64)
    examples = list(text_examples(config, 2000, 5, "train"))
    noisy = [e for e in examples if e["metadata"]["symbols"] != ["0", "1"]]
    assert 0.36 < len(noisy) / len(examples) < 0.44
    sizes = {len(e["metadata"]["symbols"]) for e in noisy}
    assert sizes == set(range(2, 63))
    for e in noisy:
        symbols = e["metadata"]["symbols"]
        assert len(set(symbols)) == len(symbols) and set(e["source"]) <= set(symbols)
        assert score(e, e["source"]).correct and "".join(symbols).isalnum()
    plain = list(text_examples(replace(config, text_noise=0.0), 2000, 5, "train"))
    others = [(a, b) for a, b in zip(examples, plain, strict=True) if a["metadata"]["symbols"] == ["0", "1"]]
    assert all(a == b for a, b in others)  # noise takes the place of strings and moves no other
    evaluation = list(text_examples(config, 100, 5, "evaluation", 9))
    assert evaluation == list(text_examples(replace(config, text_noise=0.0), 100, 5, "evaluation", 9))


@pytest.mark.parametrize("task", ["imbalanced", "lists", "csv"])
def test_a_share_of_training_prompts_has_a_sentence_before_it(task):
    plain = config(task, 3, 12)
    before, after = (list(text_examples(replace(plain, text_lead=p), 1000, 5, "train")) for p in (0.0, 0.4))
    leads = [prompt(b).removesuffix(prompt(a)) for a, b in zip(before, after, strict=True)]  # all else is as it was
    assert 0.36 < sum(map(bool, leads)) / len(leads) < 0.44
    words = Counter(len(lead.split()) for lead in leads if lead)
    assert words.keys() == set(range(1, data_text.LEAD_WORDS + 1))
    for lead, a, b in zip(leads, before, after, strict=True):
        assert a == b | {"messages": a["messages"]} and a["messages"][1:] == b["messages"][1:]
        if lead:  # a source that is first on its line stays so
            assert re.fullmatch(r"[A-Z][a-z]{3}( [a-z]{4})*\.[ \n]", lead)
            assert lead.endswith("\n") == (a["metadata"]["kind"] == "first")
    evaluation = list(text_examples(replace(plain, text_lead=1.0), 50, 5, "evaluation", 9))
    assert evaluation == list(text_examples(plain, 50, 5, "evaluation", 9))


@pytest.mark.parametrize("task, symbols", [*(("imbalanced", s) for s in SYMBOLS), ("lists", ("0", "1"))])
def test_kinds_are_what_they_say_and_templates_are_drawn_evenly(task, symbols):
    templates, seen, n = data_text.LIST_TEMPLATES if task == "lists" else data_text.STRING_TEMPLATES, Counter(), 400
    assert len(set(templates)) == (6 if task == "lists" else 21)
    for record in text_examples(config(task, symbols=symbols), n, 0, length=9):
        about, text, source = record["metadata"], prompt(record), record["source"]
        assert text == templates[about["template"]].replace("{}", source)
        column = text.split(source)[0].rpartition("\n")[2]  # what is before the source in its line
        if about["kind"] == "own-line":
            assert text.split("\n")[1:] == [source] and column == ""
        elif about["kind"] == "first":
            assert text.startswith(source + " ") and column == "" and "\n" not in text
        else:
            assert len(column) >= 5 and "\n" not in text and not text.endswith(source)
        seen[about["kind"], about["template"]] += 1
    assert len(seen) == len(templates) and all(within(k / n, 1 / len(templates), n) for k in seen.values())
    assert Counter(kind for kind, _ in seen) == dict.fromkeys(data_text.KINDS, len(templates) // 3)
    for kind in data_text.KINDS:
        records = text_examples(config(task, template_kind=kind), 60, 0, length=2)
        drawn = {(record["metadata"]["kind"], record["metadata"]["template"]) for record in records}
        assert drawn == {key for key in seen if key[0] == kind}


@pytest.mark.parametrize(
    "signal, r, expected",
    [
        ("pendulum", 0.8, [0, 0.9, 0, -0.9]),  # sin x + 0.1 sin 3x
        ("triangle", 0.0, [1, 0, -1, 0]),
        ("sawtooth", 0.0, [-1, -0.5, 0, 0.5]),
        ("rectified AC", 0.4, [0, 1, 0, 1]),
        ("rectified AC", 0.6, [0, 1, 0, 0]),
        ("clipped", 0.4, [0, 0.5, 0, -0.5]),
        ("Gaussian pulses", 0.6, [np.exp(-2 * np.pi**2), np.exp(-0.5 * np.pi**2), 1, np.exp(-0.5 * np.pi**2)]),
    ],
)
def test_signals_at_four_phases(signal, r, expected):
    phases = 2 * np.pi * np.arange(4) / 4
    np.testing.assert_allclose(SIGNALS[signal][1](phases, np.full(9, r)), expected, atol=1e-12)


def test_signals_have_their_frequencies_and_families():
    x, r = 2 * np.pi * np.arange(64) / 64, np.linspace(0.1, 0.9, 9)
    for first, n in ((0.0, 2), (0.4, 3), (0.99, 4)):
        r[0] = first
        spectrum = np.fft.rfft(SIGNALS["harmonics"][1](x, r)) / 32
        expected = [-1j * r[k] * np.exp(6j * r[-k]) if 1 <= k <= n else 0 for k in range(33)]
        np.testing.assert_allclose(spectrum, expected, atol=1e-12)
    x = 2 * np.pi * np.arange(200) / 200
    for share in (0.0, 0.5, 0.99):  # a relaxation oscillator charges slowly to one peak and falls back fast
        cycle = SIGNALS["relaxation"][1](x, np.full(9, share))
        top = cycle.argmax()
        assert cycle[0] == 0 and 0.75 < top / 200 < 0.9 and cycle[-1] < 0.03
        assert (np.diff(cycle[: top + 1]) > 0).all() and (np.diff(cycle[top:]) < 0).all()
    assert Counter(family for family, _ in SIGNALS.values()) == {"smooth": 3, "piecewise": 5, "pulses": 1}


@pytest.mark.parametrize("stream, longest", [("train", 80), ("evaluation", 100)])
def test_lists_are_one_cycle_tiled_within_offset_and_amplitude(stream, longest):
    n, names, periods = 400, Counter(), []
    for record in text_examples(config("lists"), n, 0, stream, length=210):
        about, points = record["metadata"], record["source"].split(", ")
        assert answer(record) == f"[{record['source']}]" and len(points) == about["length"] == 210
        assert score(record, answer(record)) == (True, "", 210, 210, None)
        assert all(re.fullmatch(r"-?\d\.\d\d", point) for point in points) and "-0.00" not in points
        assert points[about["period"] :] == points[: -about["period"]]
        hundredths = np.array([int(point.replace(".", "")) for point in points])
        amplitude, offset = round(100 * about["amplitude"]), round(100 * about["offset"])
        assert abs(hundredths - offset).max() == amplitude  # it is reached, and never passed
        assert 50 <= amplitude <= 300 and -50 <= offset <= 50 and 20 <= about["period"] <= longest
        assert about["family"] == SIGNALS[about["signal"]][0]
        if about["signal"] == "harmonic motion":  # of one frequency, at any phase
            spectrum = abs(np.fft.rfft(hundredths[: about["period"]])) / about["period"]
            assert abs(spectrum[1] - amplitude / 2) < 0.02 * amplitude and spectrum[2:].max() < 0.5
        names[about["signal"]] += 1
        periods.append(about["period"])
    assert names.keys() == SIGNALS.keys() and all(within(count / n, 1 / 9, n) for count in names.values())
    assert min(periods) == 20 and max(periods) == longest and len(set(periods)) > 0.9 * (longest - 19)


# Files


def chat(*turns: tuple, **more) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in turns], **more}


ASKED, TOLD = ("user", "Say it."), ("assistant", "it ")
GOOD = json.dumps(chat(ASKED, TOLD)).encode()


def written(path, *lines) -> str:
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return str(path)


def test_records_from_elsewhere_are_read_and_scored_as_exact_copies(tmp_path):
    theirs = [chat(ASKED, TOLD), chat(("system", "Be brief."), ASKED, TOLD)]
    theirs += [chat(ASKED, TOLD, ASKED, TOLD, id=3, metadata=None, source=None)]
    theirs += [chat(ASKED, TOLD, metadata={"task": "their own", "symbols": 5})]
    path = tmp_path / "theirs.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(json.dumps(record).encode() for record in theirs))
    assert read_jsonl(path) == theirs
    with pytest.raises(RuntimeError, match=r"empty\.jsonl is empty: expected a record"):
        read_jsonl(written(tmp_path / "empty.jsonl"))
    for record in theirs:
        assert score(record, "it\n") == (True, "", 3, 3, None)
        assert score(record, "is") == (False, "value", 2, 3, 1)


@pytest.mark.parametrize(
    "line, named",
    [
        (GOOD[:-1], "bad JSON"),
        (b"\xff" + GOOD, "bad JSON"),
        (b"[" * 10**5, "bad JSON"),
        (b'{"messages": []}', r"roles \[\]"),
        (b'{"messages": [{"role": "user"}]}', "expected messages"),
        (chat(ASKED), r"roles \['user'\]"),
        (chat(TOLD, ASKED), r"roles \['assistant', 'user'\]"),
        (chat(ASKED, ("assistant", [{"type": "text", "text": "it"}])), "a text as its content"),
        (chat(ASKED, ("assistant", " \n")), "blank content"),
        (chat(ASKED, TOLD, metadata={"task": "uniform"}), "no source"),
        (chat(ASKED, TOLD, source="0", metadata={"task": "uniform", "symbols": None}), "symbols None: expected a list"),
        (chat(ASKED, TOLD, source="0", metadata={"task": "uniform", "symbols": [""]}), "symbols .*: expected a list"),
        (chat(ASKED, TOLD, metadata={"task": "lists"}, source="1.00"), "no list of numbers"),
    ],
)
def test_all_faulty_lines_are_counted_and_the_first_is_named(tmp_path, line, named):
    path = written(tmp_path / "damaged.jsonl", GOOD, line, GOOD, b"{}", b"5")
    with pytest.raises(RuntimeError, match=rf"damaged\.jsonl: 3 of 5 lines cannot be used.*; line 2: .*{named}"):
        read_jsonl(path)


def test_chats_that_are_too_long_are_counted_and_only_they_are_tokenised(tmp_path):
    answers = "it", "itself!", "it" + 50 * "\n" + "is", "\ud800" * 20  # half a surrogate pair has the bytes of U+FFFD
    told = [chat(ASKED, ("assistant", answer)) for answer in answers]
    sizes = [len(ENCODE(record["messages"])[0]) - 1 for record in told]  # input tokens
    assert sizes == [11, 16, 63, 69]
    path, asked = written(tmp_path / "chats.jsonl", *told), []

    def encode(messages):
        asked.append(messages)
        return ENCODE(messages)

    assert data_text.read_chats(path, encode, 69) == told
    assert told[2]["messages"] in asked and told[0]["messages"] not in asked
    for longest, n, first in ((68, 1, "line 4 has 69"), (15, 3, "line 2 has 16"), (10, 4, "line 1 has 11")):
        what = f"chats.jsonl: {n} of 4 chats have more than block_size={longest} tokens, the first: {first}"
        with pytest.raises(RuntimeError, match=what + "; shorten or delete them, or give a larger --block_size"):
            data_text.read_chats(path, encode, longest)


@pytest.mark.parametrize("lead", [0.0, 0.5])
@pytest.mark.parametrize("task", SELF_CONTAINED)
def test_a_length_for_which_no_example_is_too_long_is_named(task, lead):
    text_config = config(task, 1, 40, text_lead=lead)
    with pytest.raises(ValueError, match="copies of length 40 take [0-9]+ tokens, block_size=50") as error:
        data_text.check_lengths(text_config, ENCODE, 50)
    enough = int(re.search(r"--block_size=(\d+)", str(error.value))[1])
    data_text.check_lengths(text_config, ENCODE, enough)
    with pytest.raises(ValueError, match=f"block_size={enough - 1}: give a smaller --text_max_length"):
        data_text.check_lengths(text_config, ENCODE, enough - 1)
    records = text_examples(text_config, 700, 3, "train", 40)
    assert max(len(ENCODE(record["messages"])[0]) - 1 for record in records) <= enough


def test_chats_are_padded_and_targets_are_the_next_tokens_inside_the_loss_mask():
    chats = [(np.array([5, 6, 7, 8]), np.array([0, 0, 1, 1], bool)), (np.array([1, 2]), np.array([0, 1], bool))]
    tokens, targets = pad_chats(chats)
    assert tokens.tolist() == [[5, 6, 7], [1, 2, 0]] and tokens.dtype == targets.dtype == np.int64
    assert targets.tolist() == [[IGNORE, 7, 8], [2, IGNORE, IGNORE]]


@pytest.mark.parametrize("world, pieces", [(1, 1), (1, 4), (2, 2), (3, 1), (3, 3)])
def test_every_rank_makes_its_own_chats_alone_and_together_they_are_the_batch(world, pieces):
    made, seen = [], []

    def fake(i: int):
        made.append(i)
        n = 2 + i * 7 % 5
        return np.array([i, *range(1, n)]), np.arange(n) > 0

    for rank in range(world):
        made.clear()
        batch = data_text.chat_batch(fake, 10, 3, rank, world, pieces)
        assert made == list(range(30 + rank, 40, world)) and len(batch) == pieces
        sizes, widths = [len(tokens) for tokens, _ in batch], [tokens.shape[1] for tokens, _ in batch]
        assert max(sizes) - min(sizes) <= 1 and widths == sorted(widths)  # chats of like length together
        for tokens, targets in batch:
            ids = tokens[:, 0].tolist()
            wanted = pad_chats([fake(i) for i in ids])
            assert np.array_equal(tokens, wanted[0]) and np.array_equal(targets, wanted[1])
            seen += ids
    assert sorted(seen) == list(range(30, 40))


def test_chats_come_from_their_streams_file(tmp_path):
    files = {"train": written(tmp_path / "a.jsonl", *(chat(ASKED, ("assistant", f"c{i}")) for i in range(5)))}
    files["validation"] = written(tmp_path / "b.jsonl", *(chat(ASKED, ("assistant", f"v{i}")) for i in range(9)))
    for seed in (0, 1):
        source, counts, digests = data_text.chat_source(config(), files, seed, ENCODE, 20)
        ids = {stream: [source(stream, i)[0] for i in range(10)] for stream in files}
        drawn = {stream: [bytes(some[-3:-1].tolist()).decode() for some in ids[stream]] for stream in files}
        order = [permute(np.array([i % 5]), 5, random_bits(seed) + np.uint64(i // 5))[0] for i in range(10)]
        assert drawn["train"] == [f"c{i}" for i in order]
        fixed = permute(np.arange(9), 9, random_bits(0))  # whatever the seed
        assert drawn["validation"][:9] == [f"v{i}" for i in fixed]
    assert counts == {"train chats": 5, "validation chats": 9}
    assert digests["train file"] == hashlib.sha256((tmp_path / "a.jsonl").read_bytes()).hexdigest()
    with pytest.raises(RuntimeError, match="a.jsonl: 5 of 5 chats have more"):
        data_text.chat_source(config(), files, 0, ENCODE, 10)


@pytest.mark.parametrize("stream, other", [("train", "validation"), ("validation", "train")])
def test_chats_without_a_file_are_made(tmp_path, stream, other):
    short, files = config("imbalanced", 1, 9), {stream: "", other: written(tmp_path / "a.jsonl", GOOD)}
    with pytest.raises(ValueError, match="copies of length 9"):
        data_text.chat_source(short, files, 0, ENCODE, 20)
    source, counts, digests = data_text.chat_source(short, files, 4, ENCODE, 200)
    assert counts == {f"{other} chats": 1} and digests.keys() == {f"{other} file"}
    wanted = ENCODE(text_example(short, 6, 4, stream)["messages"])
    assert all(map(np.array_equal, source(stream, 6), wanted))


def record_of(task: str, source: str, symbols: tuple[str, str] = ("0", "1")) -> dict:
    told = ("assistant", f"[{source}]" if task == "lists" else source)
    return chat(ASKED, told, source=source, metadata={"task": task, "symbols": list(symbols)})


A_B, TRIPLES = (" a", " b"), ("000", "111")


@pytest.mark.parametrize(
    "symbols, source, given, expected",  # correct, reason, right, total, first error
    [
        (("0", "1"), "01101", "01101", (True, "", 5, 5, None)),
        (("0", "1"), "01101", " \n01101\n", (True, "", 5, 5, None)),
        (("0", "1"), "01101", "0110", (False, "too short", 4, 5, 4)),
        (("0", "1"), "01101", "1101", (False, "value", 1, 5, 0)),  # one left out at the front: 1101 on 01101
        (("0", "1"), "01101", "٠1101", (False, "value", 4, 5, 0)),
        (A_B, " a b b", "a b b\n", (True, "", 3, 3, None)),
        (A_B, " a b b", " a  b b", (False, "value", 2, 3, 1)),
        (TRIPLES, "000111", "000111000", (False, "too long", 2, 2, 2)),
        (TRIPLES, "000111", "00111", (False, "value", 0, 2, 0)),
        (("a ", "b "), "a b ", "a b", (True, "", 2, 2, None)),
        (("(", "."), "(.(", "(((", (False, "value", 2, 3, 1)),  # symbols are no regular expressions
    ],
)
def test_strings_are_scored_strictly_in_symbols(symbols, source, given, expected):
    assert score(record_of("uniform", source, symbols), given) == expected


@pytest.mark.parametrize(
    "given, expected",  # the source is 1.50, -0.25, 0.00
    [
        ("[\n  1.50,-0.25,\n  0.00\n]\n", (True, "", 3, 3, None)),  # other spacing
        ("[15e-1, -0.250, -0.0]", (True, "", 3, 3, None)),  # the same numbers
        ("[1.51, -0.25, 0.00]", (False, "value", 2, 3, 0)),  # a wrong decimal
        ("[1.50, -0.25, 0.000000000000000000000001]", (False, "value", 2, 3, 2)),  # not "nearly equal"
        ("[1.5000000000000000000001, -0.25, 0.00]", (False, "value", 2, 3, 0)),  # the same float
        ("[1.50, -0.25]", (False, "too short", 2, 3, 2)),
        ("[1.50, -0.25, 0.00, 1.50]", (False, "too long", 3, 3, 3)),
        ("[1.50, -0.25, 0.00,]", (False, "form", 3, 3, 3)),  # a trailing comma
        ("[1.50, -0.2", (False, "form", 1, 3, 1)),  # cut off
        ('["1.50", "-0.25", "0.00"]', (False, "form", 3, 3, 3)),  # quotes around numbers
        ("The 3 values: [1.50, -0.25, 0.00]", (False, "form", 0, 3, 0)),
        ("[+1.50, -.25, 0.]", (False, "form", 2, 3, 1)),  # Python's alone; found are 1.50, 25, 0
        ("[1.50, -0.25, NaN]", (False, "form", 2, 3, 2)),
        ("[1.50, -0.25, 1e999999999999999999999]", (False, "form", 2, 3, 2)),
        ("[" * 10**5, (False, "form", 0, 3, 0)),
    ],
)
def test_lists_are_scored_on_their_numbers_and_strictly(given, expected):
    assert score(record_of("lists", "1.50, -0.25, 0.00"), given) == expected


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: config(template_kind="last"), "last"),
        (lambda: config(symbols=("01", "0")), "symbols"),
        (lambda: config(symbols=(" a", "a")), "symbols"),  # " aa" and "aa" would be one answer
        (lambda: config(symbols=("0", " ")), "symbols"),
        (lambda: config(symbols=("0", "1\u2028x")), "symbols"),
        (lambda: config(text_repeat_p=float("nan")), "text_repeat_p=nan"),
        (lambda: text_example(config(), 0, 0, "test"), "stream='test'"),
        (lambda: text_example(config("uniform", -1), 0, 0), "text_min_length=-1"),
        (lambda: text_example(config("lists", 0, 20), 0, 0), "text_min_length=50, text_max_length=20"),
        (lambda: text_example(config(), 0, 0, length=0), "length=0"),
    ],
)
def test_wrong_values_are_refused_by_name(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_the_command_line_writes_and_shows(tmp_path):
    knobs = ["--text_task=uniform", "--symbols=' a',' b'", "--text_max_length=4", "--seed=3", "--stream=validation"]
    done = run_script("data_text.py", "--write=data/copy.jsonl", "--examples=50", "--show=1", *knobs, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    expected = list(text_examples(config("uniform", 0, 4, symbols=(" a", " b")), 50, 3, "validation"))
    assert read_jsonl(tmp_path / "data" / "copy.jsonl") == expected
    first = f"{prompt(expected[0])}\n--- answer\n{answer(expected[0])}\n"
    head = f"--- {expected[0]['id']} {json.dumps(expected[0]['metadata'])}\n"
    assert done.stdout == f"{head}{first}data/copy.jsonl: 50 examples\n"
    for flags, error in (
        (["--examples=0"], "nothing to do: give --show=3"),
        (["--examples=-2", "--show=1"], "nothing to do: give --show=3"),
        (["--text_task=prose", "--text_source=nope"], "text_source=nope: expected a file, or a folder"),
        (["--text_task=lists", "--text_noise=0.1"], "--text_noise=0.1 would do nothing here, it is for other tasks"),
        (["--first_weight=8"], "--first_weight=8.0 would do nothing here, it is for training"),
    ):
        refused = run_script("data_text.py", "--write=x.jsonl", *flags, cwd=tmp_path)
        assert refused.returncode == 2 and refused.stderr.startswith(f"error: {error}"), refused.stderr
        assert not (tmp_path / "x.jsonl").exists()
