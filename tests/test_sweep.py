"""sweep.py: what is trained and tested, what is left alone the second time, what the report says of it."""

import json
import shlex
import subprocess
import sys

import matplotlib.image
import pytest

import configurator
import sweep
import train
from sweep import SweepConfig

TINY = "--n_layer=1 --n_embd=16 --head_dim=8 --batch_size=4 --max_length=4 --device=cpu --freqs=uniform"


def make(tmp_path, runs=("a/x", "b/x"), **changes) -> SweepConfig:
    flags = {"a": "--max_steps=2", "b": "--max_steps=3 --pos_encoding=rope", "bad": "--max_steps=0"}
    values = dict(seeds=(1,), lengths=("1-4", 8), samples=(3, 2), tasks=("uniform", "imbalanced"), stop="zero")
    lines = tuple(f"{name} {TINY} {flags[name.partition('/')[0]]}" for name in runs)
    return SweepConfig(lines, **values | dict(out_dir=str(tmp_path / "out")) | changes)


def run(config: SweepConfig, monkeypatch) -> None:
    argv = [f"--{name}={value!r}" for name, value in vars(config).items()]
    monkeypatch.setattr(sys, "argv", ["sweep.py", *argv])
    sweep.main()


def test_only_some_runs_and_a_report_on_all(tmp_path, monkeypatch, capsys):
    run(make(tmp_path, only=("b/*",)), monkeypatch)
    assert [path.name for path in (tmp_path / "out").glob("*/*-1")] == ["x-1"]
    assert "| `a` | not run |" in capsys.readouterr().out
    assert json.loads((tmp_path / "out/rows.json").read_text())[0]["name"] == "b/x"
    with pytest.raises(ValueError, match=r"only=c, \*/y: matches none of the runs, which are a/x, b/x"):
        make(tmp_path, only=("a/*", "c", "*/y"))


def test_runs_are_trained_tested_and_not_again(tmp_path, monkeypatch, capsys):
    config, out = make(tmp_path), tmp_path / "out"
    run(config, monkeypatch)
    rows = json.loads((out / "rows.json").read_text())
    done = {(r["name"], r["label"], r["group"], r["seed"], r["step"], r["pos_encoding"]) for r in rows}
    assert done == {("a/x", "a", "x", 1, 2, "2d-rope"), ("b/x", "b", "x", 1, 3, "rope")}
    assert "freqs_seed = 1" in (out / "b/x-1/config.py").read_text()
    text = sweep.table(config, rows)
    assert (out / "table.md").read_text() == text and text in capsys.readouterr().out
    for task in config.tasks:
        assert matplotlib.image.imread(out / f"{task}.png").std() > 0

    real, calls = subprocess.run, []
    monkeypatch.setattr(
        sweep.subprocess, "run", lambda command, **how: (calls.append(command), real(command, **how))[1]
    )
    run(config, monkeypatch)
    assert calls == [] and json.loads((out / "rows.json").read_text()) == rows
    out.rename(out := tmp_path / "moved")
    run(make(tmp_path, out_dir=str(out)), monkeypatch)  # all of it is known there, too
    assert calls == [] and json.loads((out / "rows.json").read_text()) == rows
    out.rename(out := tmp_path / "out")
    before = (out / "a/x-1/last.pt").read_bytes()
    run(make(tmp_path, runs=("a/x",), samples=(5, 1)), monkeypatch)  # another test of what is there
    assert [command[1] for command in calls] == ["train.py", "eval.py"]
    assert (out / "a/x-1/last.pt").read_bytes() == before
    assert json.loads((out / "rows.json").read_text())[0]["samples"] == 5


def test_what_failed_or_was_not_run_is_said(tmp_path, monkeypatch, capsys):
    config = make(tmp_path, runs=("a/x", "bad/y"), seeds=(0,))
    with pytest.raises(RuntimeError, match="failed: bad/y-0; see output.txt"):
        run(config, monkeypatch)
    assert "max_steps=0: expected at least 1" in (tmp_path / "out/bad/y-0/output.txt").read_text()
    assert "| `bad` |  | not run |" in capsys.readouterr().out
    run(make(tmp_path, runs=("a/x", "bad/y"), seeds=(0, 1), jobs=0), monkeypatch)  # reports, runs nothing
    assert " · not run |  |" in capsys.readouterr().out and not (tmp_path / "out/a/x-1").exists()


def row(name: str, seed: int, task: str, low: int, high: int, share: float) -> dict:
    label, _, group = name.partition("/")
    about = dict(name=name, label=label, group=group, seed=seed, task=task, min_length=low, length=high)
    return about | dict(exact_match=share, samples=4)


def test_the_table_counts_a_length_only_if_every_task_and_shorter_one_is_perfect(tmp_path):
    config = make(tmp_path, runs=("a/1", "a/2", "b/2"), seeds=(0, 1))
    shares = {("a/1", 0): ([1, 1, 1], [1, 1, 0.5]), ("a/1", 1): ([1, 0.75, 1], [0.5, 1, 1]), ("a/2", 1): ([0], [1])}
    bounds = [(1, 25), (26, 50), (51, 100)]
    rows = [
        row(name, seed, task, *bound, share)
        for (name, seed), per_task in shares.items()
        for task, values in zip(("uniform", "imbalanced"), per_task, strict=True)
        for bound, share in zip(bounds, values, strict=False)
    ]
    assert [sweep.longest_perfect([r for r in rows if r["name"] == "a/1"], seed) for seed in (0, 1)] == [50, 0]
    assert sweep.table(config, rows).splitlines() == [
        "exact match at 1-25, then longest perfect length, seeds 0, 1",
        "",
        "| run | 1 | 2 |",
        "|---|---|---|",
        "| `a` | 88%: 50 · 0 | 50%: not run · 0 |",
        "| `b` |  | not run |",
    ]


@pytest.mark.parametrize("stop", ["zero", "failure"])
def test_every_point_of_a_picture_is_of_all_seeds(tmp_path, stop):
    config = make(tmp_path, runs=("a/1", "a/2", "b/2"), seeds=(0, 1), stop=stop)
    shares = {("a/1", 0): [1, 0], ("a/1", 1): [1, 1, 1], ("a/2", 0): [0.5, 0], ("b/2", 1): [1, 0.5, 0]}
    bounds = [(1, 25), (26, 50), (51, 100)]
    rows = [
        row(name, seed, "uniform", *bound, share) | {"margin": 1.0}
        for (name, seed), values in shares.items()
        for bound, share in zip(bounds, values, strict=False)
    ]
    found = {}
    for r in sweep.curves(config, rows):
        found.setdefault((r["panel"], r["pos_encoding"], r["length"]), []).append((r["exact_match"], r["margin"]))
    wanted = {("1", "a", 25): [(1, 1.0), (1, 1.0)], ("1", "a", 50): [(0, 1.0), (1, 1.0)]}
    second = "2, 1 of 2 seeds"
    wanted |= {(second, "a", 25): [(0.5, 1.0)], (second, "a", 50): [(0, 1.0)]}
    wanted |= {(second, "b", length): [(share, 1.0)] for length, share in ((25, 1), (50, 0.5), (100, 0))}
    if stop == "zero":
        wanted |= {("1", "a", 100): [(0, None), (1, 1.0)], (second, "a", 100): [(0, None)]}
    assert found == wanted


@pytest.mark.parametrize(
    "changes, match",
    [
        (dict(runs=()), "expected at least one"),
        (dict(runs=("a x", "a y")), "a name of its own"),
        (dict(runs=("",)), "expected at least one"),
        (dict(runs=("a x",), jobs=-1), "jobs=-1"),
        (dict(runs=("a x",), seeds=()), r"seeds=\(\)"),
    ],
)
def test_wrong_values_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        SweepConfig(**changes)


@pytest.mark.parametrize("name", ["figure4", "sweep_auto", "sweep_encodings"])
def test_every_run_of_a_config_is_one_that_train_understands(name):
    config = configurator.configure(SweepConfig, argv=[f"config/{name}.py"])
    made = [configurator.configure(*train.CONFIGS, argv=shlex.split(run)[1:]) for run in config.runs]
    assert len({str(configs) for configs in made}) == len(config.runs)  # no two are the same
    assert len(config.samples) == len(config.lengths) and {configs[-1].task for configs in made} == {"copy"}
