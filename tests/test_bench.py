"""scripts/bench.py: the order it times in, its ratios and its file; that peers compute what we compute; refusals."""

import json
import sys

import numpy as np
import pytest
import torch

from data_copy import N_SYMBOLS, NEWLINE, STAR
from scripts import bench
from scripts.bench import BenchConfig, DecoderConfig

pytest.importorskip("transformers")
ROTARY = ["rotary", "--shape=1,3,2,1,8", "--repeats=3", "--device=cpu", "--variants=ours,plain torch"]
SMALL = dict(layers=2, heads=2, width=32, vocab_size=64)
ONCE = BenchConfig(device="cpu", repeats=1)


def variants_of(monkeypatch, benchmark, knobs) -> dict:
    """What a benchmark would time."""
    made = {}
    monkeypatch.setattr(bench, "race", lambda variants, *_: made.update(variants) or [])
    benchmark(ONCE, knobs)
    return made


def test_the_file_and_the_table_have_the_machine_the_settings_and_a_row_for_each_variant(monkeypatch, tmp_path, capsys):
    file = tmp_path / "new" / "bench.json"
    monkeypatch.setattr(sys, "argv", ["bench.py", *ROTARY, f"--json={file}"])
    bench.main()
    found, printed = json.loads(file.read_text()), capsys.readouterr().out.splitlines()
    settings = {"json": str(file), "device": "cpu", "repeats": 3, "variants": ["ours", "plain torch"]}
    settings |= {"shape": [1, 3, 2, 1, 8], "dtype": "float32"}
    rows = found.pop("rows")
    assert found == {"benchmark": "rotary", "machine": bench.machine(), "settings": settings}
    assert f"cpu {bench.machine()['cpu']}, " in printed[0] and "repeats 3, " in printed[0]
    for row, line, name in zip(rows, printed[2:4], settings["variants"], strict=True):
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"] < 10
        times = [f"{1e3 * row[key]:.3f}" for key in ("median_s", "min_s", "max_s")]
        assert line == f"{name:24}{times[0]:>10}{times[1]:>10}{times[2]:>10}{row['x']:>7.2f}"


@pytest.mark.parametrize(
    "argv, named",
    [
        (["rotari"], "'rotari': expected rotary or loss or train_step or generate or copy_eval"),
        ([], "'': expected rotary or loss or "),
        (["rotary", "--shape=1,3,2,1,7"], "even D"),
        (["rotary", "--shape=0,3,2,1,8"], "at least 1"),
        ([*ROTARY, "--repeats=0"], "repeats=0: expected at least 1"),
        ([*ROTARY, "--variants=ours,theirs"], "no theirs here; there are ours, plain torch"),
        (["train_step", "--rows=-1"], "rows=-1: expected at least 1"),
    ],
)
def test_wrong_values_are_refused_by_name(monkeypatch, argv, named):
    monkeypatch.setattr(sys, "argv", ["bench.py", *argv])
    with pytest.raises(ValueError, match=named):
        bench.main()


def test_variants_take_turns_in_changing_order_and_ratios_are_of_the_same_round(monkeypatch):
    order, clock = [], {"a": iter([5.0, 1.0, 2.0, 2.0, 2.0]), "b": iter([9.0, 8.0, 7.0, 8.0, 5.0])}

    def seconds(what, device):
        order.append(what())
        return next(clock[order[-1]])

    monkeypatch.setattr(bench, "seconds", seconds)
    variants, five = {"a": lambda: "a", "b": lambda: "b"}, BenchConfig(device="cpu", repeats=5)
    rows = bench.race(variants, five, lambda own, first, median: {"names": own + first, "s": median})
    assert {"".join(order[i : i + 2]) for i in range(0, 10, 2)} == {"ab", "ba"}
    assert rows == [
        {"variant": "a", "median_s": 2, "min_s": 1, "max_s": 5, "x": 1, "facts": {"names": "aa", "s": 2}},
        {"variant": "b", "median_s": 8, "min_s": 5, "max_s": 9, "x": 3.5, "facts": {"names": "ba", "s": 8}},
    ]  # x: the median of 9/5, 8/1, 7/2, 8/2 and 5/2, not 8/2


def test_a_peer_that_does_not_run_is_left_out_with_the_reason_and_the_first_is_not(capsys):
    def fails():
        raise ImportError("no module named peer")

    assert [row["variant"] for row in bench.race({"ours": list, "peer": fails}, ONCE)] == ["ours"]
    assert capsys.readouterr().out == "peer left out: ImportError('no module named peer')\n"
    with pytest.raises(ImportError):
        bench.race({"peer": fails, "ours": list}, ONCE)


GRADIENTS = {
    bench.rotary: (bench.RotaryConfig((2, 3, 4, 2, 8)), ["plain torch", "hugging face"]),  # compiling takes too long
    bench.loss: (bench.LossConfig(7, 3, 50), ["plain torch"]),
}


@pytest.mark.parametrize("benchmark", GRADIENTS)
def test_all_variants_compute_the_same_gradients(monkeypatch, benchmark):
    knobs, names = GRADIENTS[benchmark]
    variants = variants_of(monkeypatch, benchmark, knobs)
    for name in names:
        for ours, theirs in zip(variants["ours"](), variants[name](), strict=True):
            theirs = theirs.transpose(1, 2) if name == "hugging face" else theirs
            torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)
            assert ours.abs().max() > 0.01


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_peak_is_of_one_run_and_chunks_lower_it(monkeypatch):
    for n in (50_000_000, 25_000_000):
        assert bench.linux_peak(lambda n=n: torch.ones(n).sum()) == pytest.approx(4e-6 * n, rel=0.1)
    monkeypatch.setitem(bench.LOGITS_PER_CHUNK, "cpu", 32 * 60_000)
    ours, plain = bench.loss(ONCE, bench.LossConfig(256, 8, 60_000))  # a matrix of all logits is 61 MB
    assert plain["facts"]["peak_MB"] > 2.5 * 61 > 1.3 * 61 > ours["facts"]["peak_MB"] > 0


def test_train_step_trains_and_follows_transformers_step_by_step(monkeypatch):
    compiled, knobs = [], DecoderConfig(rows=4, tokens=32, **SMALL)
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(type(model).__name__) or model)  # at once
    rows = bench.train_step(BenchConfig(device="cpu", repeats=20), knobs)
    assert compiled == ["Decoder", "Qwen3ForCausalLM"]
    assert rows[0]["facts"]["tokens_per_s"] == pytest.approx(4 * 32 / rows[0]["median_s"])
    apart = {row["variant"]: row["facts"]["losses_apart"] for row in rows}
    made = variants_of(monkeypatch, bench.train_step, knobs)
    assert list(made) == list(apart)
    rope, two_d = (torch.stack([made[name]() for _ in range(21)][-1]) for name in ("rope", "2d-rope"))
    assert rope[-5:].mean() < 0.95 * rope[:5].mean() and (two_d - rope).abs().max() > 1e-3
    assert apart.pop("2d-rope") == pytest.approx(float((two_d - rope).abs().max()))
    assert 0 < max(apart.values()) < 1e-4


def test_generate_gives_the_tokens_of_transformers(monkeypatch):
    knobs = DecoderConfig(rows=3, tokens=12, **SMALL)
    ours, theirs = bench.generate(ONCE, knobs)
    assert (ours["variant"], theirs["variant"]) == ("ours", "hugging face") and theirs["facts"]["same_tokens"]
    assert theirs["facts"]["tokens_per_s"] == pytest.approx(12 * 3 / theirs["median_s"])
    monkeypatch.setattr(bench.sample, "generate", lambda *_: [torch.zeros(3, dtype=torch.int64)] * 12)
    assert not bench.generate(ONCE, knobs)[1]["facts"]["same_tokens"]


@pytest.mark.parametrize("n", [1, 3, 300])
def test_the_copier_copies_strings_of_its_length_but_for_one_token(n):
    strings = np.tile(np.arange(n) % N_SYMBOLS, (4, 1))
    strings[[1, 2, 3], [0, n // 2, n - 1]] = STAR
    verdicts = bench.teacher_forced(bench.copier(n, "cpu"), list(strings), NEWLINE)
    assert [v.first_error for v in verdicts] == [None, 0, n // 2, n - 1]
    assert verdicts[0].margin > 5 and all(v.errors == 1 and v.margin < -5 for v in verdicts[1:])


@pytest.mark.parametrize("shift", [0, 1])
def test_copy_eval_compares_first_errors(monkeypatch, shift):
    judge, found = bench.teacher_forced, []

    def shifted(*how):
        (one,) = judge(*how)
        found.append(one.first_error)
        return [one._replace(first_error=one.first_error and one.first_error + shift)]

    monkeypatch.setattr(bench, "teacher_forced", shifted)
    rows = bench.copy_eval(ONCE, bench.CopyEvalConfig(length=40))
    assert found[:2] == [None, 20] and [row["variant"] for row in rows][1:] == ["free-running", "hugging face"]
    assert [row["facts"]["same_verdicts"] for row in rows] == [True, not shift, not shift]
    assert rows[0]["facts"]["tokens_per_s"] == pytest.approx(2 * 41 / rows[0]["median_s"])
