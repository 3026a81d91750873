"""Text-level copy tasks of data_copy.py: sources, prompts, signals, files, the scorer and the command line."""

import ast
import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import configurator
import data_copy
from data_copy import (
    IMBALANCE,
    KINDS,
    LIST_TEMPLATES,
    SIGNALS,
    STREAMS,
    STRING_TEMPLATES,
    TASKS,
    TEXT_TASKS,
    CopyConfig,
    TextCopyConfig,
    WriteConfig,
    main,
    numbers,
    read_jsonl,
    score,
    strings,
    text_example,
    text_examples,
    write_jsonl,
)

SYMBOLS = [("0", "1"), (" a", " b"), ("000", "111"), ("{x}", "é|")]
NAN = float("nan")


def config(task: str = "uniform", low: int = 0, high: int = 0, **knobs) -> TextCopyConfig:
    return TextCopyConfig(text_task=task, text_min_length=low, text_max_length=high, **knobs)


def prompt(record: dict) -> str:
    return record["messages"][0]["content"]


def answer(record: dict) -> str:
    return record["messages"][1]["content"]


def within(share: float, p: float, n: int) -> bool:
    """Whether a share of n draws is within five standard deviations of p."""
    return abs(share - p) <= 5 * (p * (1 - p) / n) ** 0.5


# Examples


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_an_example_is_a_function_of_its_arguments_in_any_order(task):
    places = [(index, seed, stream) for index in (0, 1, 7) for seed in (0, 3) for stream in STREAMS]
    there = [text_example(config(task), *place) for place in places]
    random.Random(0).shuffle(order := list(range(len(places))))
    again = {i: text_example(config(task), *places[i]) for i in order}
    assert all(again[i] == record for i, record in enumerate(there))
    assert len({record["id"] for record in there}) == len({record["source"] for record in there}) == len(places)
    assert list(text_examples(config(task), 8, 3, "validation"))[7] == text_example(config(task), 7, 3, "validation")
    numpy_index = text_example(config(task), np.int64(7), np.int64(3), "validation")
    assert json.dumps(numpy_index) == json.dumps(text_example(config(task), 7, 3, "validation"))


def test_examples_of_today_are_those_of_tomorrow():
    record = text_example(config("recursive-flip", 7, 7, symbols=(" a", " b"), template_kind="own-line"), 5, 2)
    asked = "I need an identical duplicate of the sequence underneath; answer with it alone.\n b a b b b a b"
    assert record == {
        "id": "recursive-flip-train-2-5-7",
        "messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": " b a b b b a b"}],
        "source": " b a b b b a b",  # b, a between two of it, b between two of that
        "metadata": {
            "task": "recursive-flip",
            "length": 7,
            "template": 4,
            "kind": "own-line",
            "symbols": [" a", " b"],
        },
    }


def test_a_given_length_gives_the_example_that_comes_where_it_is_drawn():
    for task in TEXT_TASKS:
        record = text_example(config(task), 4, 1, "evaluation")
        n = record["metadata"]["length"]
        assert text_example(config(task), 4, 1, "evaluation", length=n) == record
        assert text_example(config(task), 4, 1, "evaluation", length=3)["metadata"]["length"] == 3  # no bound for it
        longer = text_example(config(task), 4, 1, "evaluation", length=n + 1)
        assert longer["source"][:40] != record["source"][:40]  # samples of two lengths are independent


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("symbols", SYMBOLS)
def test_strings_are_those_of_the_token_level_in_other_symbols(task, symbols):
    for index in range(20):
        record = text_example(config(task, 1, 60, symbols=symbols, text_repeat_p=0.8), index, 9, "validation")
        n = record["metadata"]["length"]
        keys = (9, STREAMS["validation"], -1, TEXT_TASKS.index(task), np.array([[index]]), n)
        assert record["source"] == "".join(symbols[bit] for bit in strings(task, n, keys, 0.8)[0])
        assert answer(record) == record["source"] and record["metadata"]["symbols"] == list(symbols)


def test_imbalanced_strings_have_the_seven_probabilities():
    n = 700
    records = text_examples(config("imbalanced", symbols=(" a", " b")), n, 0, length=400)
    shares = np.array([record["source"].count(" a") / 400 for record in records])
    nearest = Counter(abs(shares[:, None] - np.array(IMBALANCE)).argmin(1).tolist())
    assert nearest.keys() == set(range(7)) and all(within(count / n, 1 / 7, n) for count in nearest.values())


def test_lengths_are_uniform_between_their_bounds_and_have_the_defaults_of_the_issue():
    n = 1000
    lengths = Counter(record["metadata"]["length"] for record in text_examples(config("uniform", 3, 12), n, 0))
    assert lengths.keys() == set(range(3, 13)) and all(within(count / n, 1 / 10, n) for count in lengths.values())
    bounds = {("uniform", stream): (1, 1000) for stream in STREAMS}
    bounds |= {("lists", "train"): (50, 150), ("lists", "validation"): (50, 150), ("lists", "evaluation"): (200, 800)}
    for (task, stream), (low, high) in bounds.items():
        drawn = [record["metadata"]["length"] for record in text_examples(config(task), 60, 0, stream)]
        room = (high - low) * 0.2  # 60 draws miss that much at an end once in 10^6
        assert low <= min(drawn) < low + room and high - room < max(drawn) <= high


@pytest.mark.parametrize("task", ["uniform", "lists"])
def test_streams_seeds_and_the_token_level_share_no_source(task):
    seen = Counter()
    for stream in STREAMS:
        for seed in (0, 1):
            seen.update(record["source"] for record in text_examples(config(task), 60, seed, stream, length=64))
    assert len(seen) == 360
    for step in (0, TEXT_TASKS.index(task)):  # the same keys but for the -1
        tokens = strings("uniform", 64, (0, STREAMS["train"], step, np.arange(60)[:, None]))
        seen.update("".join(map(str, row)) for row in tokens.tolist())
    assert set(seen.values()) == {1}


# Prompts


def test_there_are_enough_templates_of_each_kind_and_each_holds_its_source_once():
    assert len(STRING_TEMPLATES) == len(set(STRING_TEMPLATES)) == 21 and len(LIST_TEMPLATES) == 6
    for template in STRING_TEMPLATES + LIST_TEMPLATES:
        assert template.count("{") == template.count("}") == template.count("{}") == 1
        assert not re.search(r"\d", template)  # no digit that could belong to a source


@pytest.mark.parametrize("task, symbols", [*(("uniform", s) for s in SYMBOLS), ("lists", ("0", "1"))])
def test_kinds_are_what_they_say(task, symbols):
    templates, seen = LIST_TEMPLATES if task == "lists" else STRING_TEMPLATES, {}
    for record in text_examples(config(task, 8, 20, symbols=symbols), 150, 0):
        about, text, source = record["metadata"], prompt(record), record["source"]
        assert text == templates[about["template"]].replace("{}", source) and text.count(source) == 1
        column = text.split(source)[0].rpartition("\n")[2]  # what is before the source in its line
        if about["kind"] == "own-line":
            assert text.split("\n")[1:] == [source] and column == ""
        elif about["kind"] == "first":
            assert text.startswith(source + " ") and column == "" and "\n" not in text
        else:
            assert len(column) >= 5 and "\n" not in text and not text.endswith(source)
        seen[about["template"]] = about["kind"]
    assert seen.keys() == set(range(len(templates)))
    assert Counter(seen.values()) == dict.fromkeys(KINDS, len(templates) // 3)


@pytest.mark.parametrize("task", ["imbalanced", "lists"])
def test_template_kind_selects_and_templates_are_drawn_evenly(task):
    n, total = 600, len(LIST_TEMPLATES if task == "lists" else STRING_TEMPLATES)
    counts = Counter(record["metadata"]["template"] for record in text_examples(config(task), n, 0, length=2))
    assert len(counts) == total and all(within(count / n, 1 / total, n) for count in counts.values())
    for kind in KINDS:
        records = list(text_examples(config(task, template_kind=kind), 60, 0, length=2))
        assert {record["metadata"]["kind"] for record in records} == {kind}
        assert len({record["metadata"]["template"] for record in records}) == total // 3


# Lists


X = 2 * np.pi * np.arange(4) / 4  # phases 0, 1/4, 1/2, 3/4


@pytest.mark.parametrize(
    "signal, r, expected",
    [
        ("harmonic motion", 0.9, [0, 1, 0, -1]),
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
    np.testing.assert_allclose(SIGNALS[signal][1](X, np.full(9, r)), expected, atol=1e-12)


def test_harmonics_have_2_to_4_frequencies_and_a_pendulum_its_third():
    x = 2 * np.pi * np.arange(64) / 64
    r = np.linspace(0.1, 0.9, 9)
    for first, n in ((0.0, 2), (0.4, 3), (0.99, 4)):
        r[0] = first
        spectrum = np.fft.rfft(SIGNALS["harmonics"][1](x, r)) / 32
        expected = [-1j * r[k] * np.exp(6j * r[-k]) if 1 <= k <= n else 0 for k in range(33)]
        np.testing.assert_allclose(spectrum, expected, atol=1e-12)
    spectrum = abs(np.fft.rfft(SIGNALS["pendulum"][1](x, r))) / 32
    np.testing.assert_allclose(spectrum[:5], [0, 1, 0, 0.02 + 0.1 * 0.99, 0], atol=1e-12)


def test_a_relaxation_oscillator_charges_slowly_to_one_peak_and_falls_back_fast():
    x = 2 * np.pi * np.arange(200) / 200
    for r in (0.0, 0.5, 0.99):
        cycle = SIGNALS["relaxation"][1](x, np.full(9, r))
        top = cycle.argmax()
        assert cycle[0] == 0 and 0.75 < top / 200 < 0.9 and cycle[-1] < 0.03
        assert (np.diff(cycle[: top + 1]) > 0).all() and (np.diff(cycle[top:]) < 0).all()


@pytest.mark.parametrize("stream, longest", [("train", 80), ("evaluation", 100)])
def test_lists_are_one_cycle_tiled_within_offset_and_amplitude(stream, longest):
    n, names, periods = 400, Counter(), []
    for record in text_examples(config("lists"), n, 0, stream, length=210):
        about, points = record["metadata"], record["source"].split(", ")
        assert answer(record) == f"[{record['source']}]" and len(points) == about["length"] == 210
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


def test_nine_signals_in_three_families():
    assert Counter(family for family, _ in SIGNALS.values()) == {"smooth": 3, "piecewise": 5, "pulses": 1}


def test_a_list_shorter_than_its_cycle_is_cut():
    record = text_example(config("lists"), 0, 0, length=1)
    assert re.fullmatch(r"\[-?\d\.\d\d\]", answer(record)) and record["metadata"]["length"] == 1


# Files


def test_a_file_gives_back_what_was_written(tmp_path):
    path = tmp_path / "new" / "copy.jsonl"
    records = [text_example(config(task, 5, 9, symbols=s), i, 0) for i, task in enumerate(TEXT_TASKS) for s in SYMBOLS]
    write_jsonl(path, iter(records))
    assert read_jsonl(path) == records and os.listdir(path.parent) == ["copy.jsonl"]
    lines = path.read_text().splitlines()
    assert [list(json.loads(line)) for line in lines] == [["id", "messages", "source", "metadata"]] * len(records)
    assert all(set(turn) == {"role", "content"} for record in records for turn in record["messages"])


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    path = tmp_path / "copy.jsonl"
    write_jsonl(path, text_examples(config(), 2, 0))
    before = path.read_bytes()

    def broken():
        yield text_example(config(), 0, 0)
        raise KeyError("in the middle")

    with pytest.raises(KeyError, match="in the middle"):
        write_jsonl(path, broken())
    assert path.read_bytes() == before
    write_jsonl(path, text_examples(config(), 3, 0))
    assert len(read_jsonl(path)) == 3


def chat(*turns: tuple, **more) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in turns], **more}


ASKED, TOLD = ("user", "Say it."), ("assistant", "it ")


@pytest.mark.parametrize(
    "record",
    [
        chat(ASKED, TOLD),
        chat(("system", "Be brief."), ASKED, TOLD),
        chat(ASKED, TOLD, ASKED, TOLD, id=3, metadata=None, source=None),
        chat(ASKED, TOLD, metadata={"task": "their own", "symbols": 5}),
    ],
)
def test_records_from_elsewhere_are_read_and_scored_as_exact_copies(tmp_path, record):
    path = tmp_path / "theirs.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(record).encode() + b"\r\n" + json.dumps(record).encode())
    assert read_jsonl(path) == [record, record]
    assert score(record, "it\n") == (True, "", 3, 3, None)
    assert score(record, "is") == (False, "value", 2, 3, 1)


GOOD = json.dumps(chat(ASKED, TOLD)).encode()


@pytest.mark.parametrize(
    "line, named",
    [
        (GOOD[:-1], "bad JSON"),
        (b"\xff" + GOOD, "bad JSON"),
        (b"", "bad JSON"),
        (b"[" * 10**5, "bad JSON"),
        (b"[]", "expected messages"),
        (b"null", "expected messages"),
        (b'{"id": 1}', "expected messages"),
        (b'{"messages": "hello"}', "expected messages"),
        (b'{"messages": null}', "expected messages"),
        (b'{"messages": []}', r"roles \[\]"),
        (b'{"messages": [{"role": "user"}]}', "expected messages"),
        (chat(("system", "Be brief.")), r"roles \['system'\]"),
        (chat(ASKED), r"roles \['user'\]"),
        (chat(TOLD, ASKED), r"roles \['assistant', 'user'\]"),
        (chat(ASKED, TOLD, ASKED), "roles"),
        (chat(ASKED, ("system", "Be brief."), TOLD), "roles"),
        (chat(("human", "Say it."), ("gpt", "it")), r"roles \['human', 'gpt'\]"),
        (chat(("user", 5), TOLD), "a text as its content"),
        (chat(ASKED, ("assistant", None)), "a text as its content"),
        (chat(ASKED, ("assistant", [{"type": "text", "text": "it"}])), "a text as its content"),
        (chat(ASKED, ("assistant", " \n")), "blank content"),
        (chat(ASKED, TOLD, metadata="none"), "metadata"),
        (chat(ASKED, TOLD, metadata={"task": "uniform"}), "no source"),
        (chat(ASKED, TOLD, metadata={"task": "lists"}, source=["1.00"]), "no source"),
        (chat(ASKED, TOLD, metadata={"task": "lists"}, source="1.00"), "no list of numbers"),
    ],
)
def test_damage_is_named_with_file_and_line(tmp_path, line, named):
    path = tmp_path / "damaged.jsonl"
    line = line if isinstance(line, bytes) else json.dumps(line).encode()
    path.write_bytes(GOOD + b"\n" + line + b"\n" + GOOD + b"\n")
    with pytest.raises(RuntimeError, match=rf"damaged\.jsonl, line 2: .*{named}"):
        read_jsonl(path)


def test_a_file_that_is_not_there_or_empty_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl"):
        read_jsonl(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(RuntimeError, match=r"empty\.jsonl: expected a record"):
        read_jsonl(tmp_path / "empty.jsonl")


# Scores


def record_of(task: str, source: str, symbols: tuple[str, str] = ("0", "1")) -> dict:
    told = ("assistant", f"[{source}]" if task == "lists" else source)
    return chat(ASKED, told, source=source, metadata={"task": task, "symbols": list(symbols)})


@pytest.mark.parametrize(
    "given, expected",  # correct, reason, right, total, first error; the source is 01101
    [
        ("01101", (True, "", 5, 5, None)),
        (" \n01101\n", (True, "", 5, 5, None)),
        ("01100", (False, "value", 4, 5, 4)),
        ("11101", (False, "value", 4, 5, 0)),
        ("0110", (False, "too short", 4, 5, 4)),
        ("011011", (False, "too long", 5, 5, 5)),
        ("1101", (False, "value", 1, 5, 0)),  # one left out at the front: 1101 on 01101
        ("", (False, "too short", 0, 5, 0)),
        ("0 1 1 0 1", (False, "value", 3, 5, 1)),
        ("011\n01", (False, "value", 3, 5, 3)),
        ("01101\n01101", (False, "too long", 5, 5, 5)),
        ("01101.", (False, "too long", 5, 5, 5)),
        ('"01101"', (False, "value", 1, 5, 0)),
        ("`01101`", (False, "value", 1, 5, 0)),
        ("```\n01101\n```", (False, "value", 0, 5, 0)),
        ("Here it is: 01101", (False, "value", 0, 5, 0)),
        ("01101 is the string.", (False, "too long", 5, 5, 5)),
        ("O1101", (False, "value", 4, 5, 0)),
        ("٠1101", (False, "value", 4, 5, 0)),
    ],
)
def test_strings_are_scored_strictly(given, expected):
    assert score(record_of("imbalanced", "01101"), given) == expected


@pytest.mark.parametrize(
    "symbols, source, given, expected",
    [
        ((" a", " b"), " a b b", " a b b", (True, "", 3, 3, None)),
        ((" a", " b"), " a b b", "a b b", (True, "", 3, 3, None)),
        ((" a", " b"), " a b b", "a b b\n", (True, "", 3, 3, None)),
        ((" a", " b"), " a b b", " a b", (False, "too short", 2, 3, 2)),
        ((" a", " b"), " a b b", " a a b", (False, "value", 2, 3, 1)),
        ((" a", " b"), " a b b", " a  b b", (False, "value", 2, 3, 1)),
        ((" a", " b"), " a b b", "abb", (False, "value", 1, 3, 1)),
        (("000", "111"), "000111", "000111", (True, "", 2, 2, None)),
        (("000", "111"), "000111", "000111000", (False, "too long", 2, 2, 2)),
        (("000", "111"), "000111", "00111", (False, "value", 0, 2, 0)),
        (("000", "111"), "000111", "00011", (False, "value", 1, 2, 1)),
        (("x", "x y"[1:]), "x y", "x y", (True, "", 2, 2, None)),
        (("a ", "b "), "a b ", "a b", (True, "", 2, 2, None)),
        (("(", "."), "(.(", "(((", (False, "value", 2, 3, 1)),  # symbols are no regular expressions
    ],
)
def test_places_are_counted_in_symbols(symbols, source, given, expected):
    assert score(record_of("uniform", source, symbols), given) == expected


@pytest.mark.parametrize(
    "given, expected",  # the source is 1.50, -0.25, 0.00
    [
        ("[1.50, -0.25, 0.00]", (True, "", 3, 3, None)),
        ("  [1.50, -0.25, 0.00]\n", (True, "", 3, 3, None)),
        ("[1.50,-0.25,0.00]", (True, "", 3, 3, None)),  # other spacing
        ("[\n  1.50,\n  -0.25,\n  0.00\n]", (True, "", 3, 3, None)),
        ("[1.5, -0.25, 0]", (True, "", 3, 3, None)),  # the same numbers
        ("[15e-1, -0.250, -0.0]", (True, "", 3, 3, None)),
        ("[1.51, -0.25, 0.00]", (False, "value", 2, 3, 0)),  # a wrong decimal
        ("[1.50, 0.25, 0.00]", (False, "value", 2, 3, 1)),
        ("[1.50, -0.25, 0.000000000000000000000001]", (False, "value", 2, 3, 2)),  # not "nearly equal"
        ("[1.5000000000000000000001, -0.25, 0.00]", (False, "value", 2, 3, 0)),  # the same float
        ("[1.50, -0.25]", (False, "too short", 2, 3, 2)),  # one number too few
        ("[1.50, -0.25, 0.00, 1.50]", (False, "too long", 3, 3, 3)),
        ("[]", (False, "too short", 0, 3, 0)),
        ("[1.50, -0.25, 0.00,]", (False, "form", 3, 3, 3)),  # a trailing comma
        ("[1.50, -0.25, 0.00", (False, "form", 3, 3, 3)),
        ("[1.50, -0.2", (False, "form", 1, 3, 1)),  # cut off
        ("1.50, -0.25, 0.00", (False, "form", 3, 3, 3)),
        ("(1.50, -0.25, 0.00)", (False, "form", 3, 3, 3)),
        ("[[1.50, -0.25, 0.00]]", (False, "form", 3, 3, 3)),
        ("[1.50, -0.25, 0.00] [1.50]", (False, "form", 3, 3, 3)),
        ("[1.50; -0.25; 0.00]", (False, "form", 3, 3, 3)),
        ("[1.50 -0.25 0.00]", (False, "form", 3, 3, 3)),
        ("['1.50', '-0.25', '0.00']", (False, "form", 3, 3, 3)),  # quotes around numbers
        ('["1.50", "-0.25", "0.00"]', (False, "form", 3, 3, 3)),
        ("'[1.50, -0.25, 0.00]'", (False, "form", 3, 3, 3)),
        ("Here you are: [1.50, -0.25, 0.00]", (False, "form", 3, 3, 3)),  # prose around it
        ("[1.50, -0.25, 0.00] as you asked.", (False, "form", 3, 3, 3)),
        ("data = [1.50, -0.25, 0.00]", (False, "form", 3, 3, 3)),
        ("```python\n[1.50, -0.25, 0.00]\n```", (False, "form", 3, 3, 3)),
        ("The 3 values: [1.50, -0.25, 0.00]", (False, "form", 0, 3, 0)),
        ("[+1.50, -.25, 0.]", (False, "form", 2, 3, 1)),  # Python's alone; found are 1.50, 25, 0
        ("[1.50, -0.25, 0.00]  # done", (False, "form", 3, 3, 3)),
        ("[1.50, -0.25, None]", (False, "form", 2, 3, 2)),
        ("[1.50, -0.25, false]", (False, "form", 2, 3, 2)),
        ("[1.50, -0.25, NaN]", (False, "form", 2, 3, 2)),
        ("[1.50, -0.25, 1e999999999999999999999]", (False, "form", 2, 3, 2)),
        ("[01.50, -0.25, 0.00]", (False, "form", 3, 3, 3)),
        ("[" * 10**5, (False, "form", 0, 3, 0)),
        ("", (False, "form", 0, 3, 0)),
    ],
)
def test_lists_are_scored_on_their_numbers_and_strictly(given, expected):
    assert score(record_of("lists", "1.50, -0.25, 0.00"), given) == expected


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_every_answer_of_ours_is_right_and_any_damage_to_it_is_not(task):
    for record in text_examples(config(task, 5, 30, symbols=(" a", " b")), 20, 0):
        n = record["metadata"]["length"]
        assert score(record, answer(record)) == (True, "", n, n, None)
        text = answer(record)
        for at in range(0, len(text), 3):
            damaged = text[:at] + ("7" if text[at] != "7" else "8") + text[at + 1 :]
            result = score(record, damaged)
            assert result.correct == (damaged.strip() == text.strip()) and result.correct == (
                result.first_error is None
            )
    assert score(record, answer(text_example(config(task, 31, 31), 0, 1))).correct is False


def test_numbers_reads_one_flat_list_alone():
    assert [str(value) for value in numbers(" [1.50, -2, 3e2]\n")] == ["1.50", "-2", "3E+2"]
    assert numbers("[]") == [] and numbers("5") is None and numbers('{"a": 1}') is None


# Config and command line


@pytest.mark.parametrize(
    "knobs, named",
    [
        ({"text_task": "reverse"}, "reverse"),
        ({"template_kind": "last"}, "last"),
        ({"symbols": ("0", "0")}, r"symbols=\('0', '0'\)"),
        ({"symbols": ("0", "01")}, "symbols"),
        ({"symbols": ("01", "0")}, "symbols"),
        ({"symbols": (" a", "a")}, "symbols"),  # " aa" and "aa" would be one answer
        ({"symbols": ("", "1")}, "symbols"),
        ({"symbols": ("0", " ")}, "symbols"),
        ({"symbols": ("0", "1\n")}, "symbols"),
        ({"symbols": ("0", "1\u2028x")}, "symbols"),
        ({"symbols": ("0",)}, "symbols"),
        ({"symbols": ("0", "1", "2")}, "symbols"),
        ({"text_repeat_p": 1.1}, "text_repeat_p=1.1"),
        ({"text_repeat_p": NAN}, "text_repeat_p=nan"),
    ],
)
def test_wrong_knobs_are_refused_by_name(knobs, named):
    with pytest.raises(ValueError, match=named):
        TextCopyConfig(**knobs)


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: text_example(config(), 0, 0, "test"), "stream='test'"),
        (lambda: text_example(config("uniform", -1), 0, 0), "text_min_length=-1"),
        (lambda: text_example(config("uniform", 9, 8), 0, 0), "text_min_length=9, text_max_length=8"),
        (lambda: text_example(config("lists", 0, 20), 0, 0), "text_min_length=50, text_max_length=20"),
        (lambda: text_example(config(), 0, 0, length=0), "length=0"),
        (lambda: main(WriteConfig(), config()), "--show=3"),
        (lambda: main(WriteConfig(write="x.jsonl", examples=0), config()), "examples=0"),
    ],
)
def test_wrong_arguments_are_refused_by_name(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_knobs_clash_with_no_other_config():
    mine = {field.name for field in dataclasses.fields(TextCopyConfig)}
    assert not mine & {field.name for field in dataclasses.fields(CopyConfig)}
    owners = {
        "train.py": "TrainConfig",
        "model.py": "ModelConfig",
        "data_dclm.py": "TextConfig",
        "eval.py": "EvalConfig",
    }
    for file, owner in owners.items():  # read, as importing takes seconds
        tree = ast.parse(Path(data_copy.__file__).with_name(file).read_text())
        body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner)
        theirs = {node.target.id for node in body if isinstance(node, ast.AnnAssign)}
        assert theirs and not mine & theirs, owner


@pytest.mark.parametrize("given", ["' a',' b'", '(" a", " b")', '[" a", " b"]'])
def test_symbols_with_blanks_come_through_the_command_line(given):
    assert configurator.configure(TextCopyConfig, argv=[f"--symbols={given}"]).symbols == (" a", " b")
    assert configurator.configure(TextCopyConfig, argv=["--symbols=000,111"]).symbols == ("000", "111")


def run(folder, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, data_copy.__file__, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_the_command_line_writes_and_shows(tmp_path):
    knobs = ["--text_task=uniform", "--symbols=' a',' b'", "--text_max_length=4", "--seed=3", "--stream=validation"]
    done = run(tmp_path, "--write=data/copy.jsonl", "--examples=50", "--show=1", *knobs)
    assert done.returncode == 0, done.stderr
    expected = list(text_examples(config("uniform", 0, 4, symbols=(" a", " b")), 50, 3, "validation"))
    assert read_jsonl(tmp_path / "data" / "copy.jsonl") == expected
    lines = done.stdout.splitlines()
    name, about = lines[0].removeprefix("--- ").split(" ", 1)
    assert name == expected[0]["id"] and json.loads(about) == expected[0]["metadata"]
    assert "\n".join(lines[1:]) == f"{prompt(expected[0])}\n--- answer\n{answer(expected[0])}\n" + (
        "data/copy.jsonl: 50 examples"
    )


def test_the_command_line_explains_itself(tmp_path):
    help_text = run(tmp_path, "--help")
    names = [field.name for cls in (WriteConfig, TextCopyConfig) for field in dataclasses.fields(cls)]
    shown = dict(re.findall(r"^  --(\w+)=\S+ +(\S.*)$", help_text.stdout, re.MULTILINE))
    assert help_text.returncode == 0 and list(shown) == names
    nothing = run(tmp_path)
    assert nothing.returncode == 2 and nothing.stderr.startswith("error: ") and "--show=3" in nothing.stderr
    wrong = run(tmp_path, "--show=1", "--symbols= a, b b", "--text_task=list")
    assert wrong.returncode == 2 and "list" in wrong.stderr and "Traceback" not in wrong.stderr


def test_the_text_level_works_alone_in_an_empty_folder(tmp_path):
    shutil.copy(data_copy.__file__, tmp_path)
    code = "import data_copy as d; r = d.text_example(d.TextCopyConfig(), 0, 0); print(d.score(r, r['source']).correct)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["True"], done.stderr
