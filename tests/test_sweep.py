"""scripts/sweep.py: what is trained and tested, what is left alone the second time, what the report says of it."""

import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import configurator
import plots
import train
from eval import EvalConfig
from scripts import sweep
from scripts.sweep import SweepConfig

TINY = "--n_layer=1 --n_embd=16 --head_dim=8 --batch_size=4 --max_length=4 --device=cpu"


def make(runs=("a/x", "b/x"), flags="", **changes) -> SweepConfig:
    values = dict(seeds=(1,), lengths=("1-4", 8), samples=(3, 2), tasks=("uniform", "imbalanced"), stop="zero")
    lines = tuple(f"{name} {flags}" for name in runs)
    return SweepConfig(lines, **values | dict(jobs=1, out_dir="out") | changes)


def run(config: SweepConfig, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sweep.py", *(f"--{name}={value!r}" for name, value in vars(config).items())])
    sweep.main()


def row(name: str, seed: int, task: str, low: int, high: int, share: float) -> dict:
    label, _, group = name.partition("/")
    about = dict(name=name, label=label, group=group, seed=seed, task=task, min_length=low, length=high, margin=1.0)
    return about | dict(exact_match=share, samples=4, trained_to=4, kind=None)


@pytest.fixture
def calls(tmp_path, monkeypatch) -> list[list[str]]:
    """What would be started, in tmp_path: eval.py finds all right, and whatever has `--fails` fails."""
    made = []

    def start(command, stdout, stderr, env):
        python, script, *flags = command
        assert python == sys.executable and Path(script).is_absolute() and int(env["OMP_NUM_THREADS"]) >= 1
        made.append([Path(script).name, *flags])
        folder = Path(flags[-1].removeprefix("--out_dir="))
        if script.endswith("eval.py"):
            seed = int(folder.name[-1])
            rows = [row("", seed, "uniform", low, high, 1.0) for low, high in ((1, 4), (8, 8))]
            (folder / "accuracy.json").write_text(json.dumps(rows))
        return SimpleNamespace(returncode="--fails" in flags)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep.subprocess, "run", start)
    monkeypatch.setattr(plots, "plot", lambda rows, path: None)
    return made


def test_a_run_is_trained_and_tested_in_the_working_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    config = make(["a/x"], f"config/toy_copy.py {TINY} --max_steps=2")
    run(config, monkeypatch)
    out = tmp_path / "out"
    rows = json.loads((out / "rows.json").read_text())
    assert {(r["name"], r["label"], r["group"], r["seed"], r["step"]) for r in rows} == {("a/x", "a", "x", 1, 2)}
    first = [(r["task"], r["min_length"], r["samples"]) for r in rows if r["length"] == 4]
    assert first == [("uniform", 1, 3), ("imbalanced", 1, 3)]
    saved = (out / "a/x-1/config.py").read_text()
    assert "freqs_seed = 1\n" in saved and "\nseed = 1\n" in saved and "freqs = 'uniform'" in saved
    text = sweep.table(config, rows)
    assert (out / "table.md").read_text() == text and text in capsys.readouterr().out
    assert (out / "uniform.png").exists() and (out / "imbalanced.png").exists()


def test_what_is_started_and_not_again(calls, tmp_path, monkeypatch):
    config = make(flags="toy.py --noise=0", seeds=(1, 2))
    run(config, monkeypatch)
    tested = ["--tasks=uniform,imbalanced", "--lengths=1-4,8", "--samples=3,2", "--stop=zero"]
    expected = []
    for folder, seed in (("out/a/x-1", 1), ("out/b/x-1", 1), ("out/a/x-2", 2), ("out/b/x-2", 2)):
        out = f"--out_dir={folder}"
        expected.append(["train.py", "toy.py", "--noise=0", f"--seed={seed}", f"--freqs_seed={seed}", out])
        expected.append(["eval.py", *tested, f"--runs={folder}", "--plot=False", out])
    assert calls == expected
    assert sweep.eval_flags(make(stop="failure"))[-1] == "--stop=failure"
    for made in (make(tasks=()), make()):
        parsed = configurator.configure(EvalConfig, argv=["--runs=x", *sweep.eval_flags(made)])
        assert (parsed.tasks, parsed.lengths) == (made.tasks, made.lengths)
    names = [(r["name"], r["seed"]) for r in json.loads(Path("out/rows.json").read_text())[::2]]
    assert names == [("a/x", 1), ("a/x", 2), ("b/x", 1), ("b/x", 2)]

    calls.clear()
    run(config, monkeypatch)
    Path("out").rename("moved")
    run(make(flags="toy.py --noise=0", seeds=(1, 2), out_dir="moved"), monkeypatch)  # all of it is known there, too
    assert calls == []
    run(make(["a/x"], "toy.py --noise=0", samples=(5, 1), out_dir="moved"), monkeypatch)  # other tests
    run(make(["b/x"], "toy.py", out_dir="moved"), monkeypatch)  # other training: train.py says whether that can be
    assert [(call[0], call[-1]) for call in calls] == [
        (script, f"--out_dir=moved/{name}-1") for name in ("a/x", "b/x") for script in ("train.py", "eval.py")
    ]


def test_what_failed_or_was_not_run_is_said(calls, monkeypatch, capsys):
    with pytest.raises(RuntimeError, match="failed: bad/y-1; see output.txt in their folders under out"):
        run(SweepConfig(("bad/y --fails", "a/x"), (1,), lengths=(4,), samples=(1,), jobs=1), monkeypatch)
    assert [call[0] for call in calls] == ["train.py", "train.py", "eval.py"]
    assert capsys.readouterr().out.splitlines()[-2:] == ["| `bad` | not run |  |", "| `a` |  | 100%: 8 |"]
    calls.clear()
    run(make(["bad/y", "a/x", "b/x"], seeds=(1, 2), only=("b/*",)), monkeypatch)
    assert [call[-1] for call in calls] == [f"--out_dir=out/b/x-{seed}" for seed in (1, 2) for _ in range(2)]
    calls.clear()
    run(make(["bad/y", "b/x"], seeds=(2, 3), jobs=0), monkeypatch)  # reports, runs nothing
    assert capsys.readouterr().out.endswith("| `bad` | not run |  |\n| `b` |  | 100%: 8 · not run |\n") and not calls


def made_rows(shares: dict) -> list[dict]:
    """Rows of intervals up to 25, 50 and 100, of (name, seed, task) -> exact match at each."""
    bounds = [(1, 25), (26, 50), (51, 100)]
    return [
        row(*key, *bound, share) for key, values in shares.items() for bound, share in zip(bounds, values, strict=False)
    ]


def test_the_table_counts_a_length_only_if_every_task_and_shorter_one_is_perfect():
    shares = {
        ("a/1", 0, "uniform"): [1, 1, 1],
        ("a/1", 0, "imbalanced"): [1, 1],
        ("a/1", 1, "uniform"): [1, 0.75, 1],
        ("a/1", 1, "imbalanced"): [0.5, 1, 1],
        ("a/2", 1, "uniform"): [0],
        ("a/2", 1, "imbalanced"): [1],
    }
    assert sweep.table(make(("a/1", "a/2", "b/2"), seeds=(0, 1)), made_rows(shares)).splitlines() == [
        "exact match at 1-25, then longest perfect length, seeds 0, 1",
        "",
        "| run | 1 | 2 |",
        "|---|---|---|",
        "| `a` | 88%: 50 · 0 | 50%: not run · 0 |",
        "| `b` |  | not run |",
    ]


def test_every_point_of_a_picture_is_of_all_seeds():
    shares = {("a/1", 0): [1, 0], ("a/1", 1): [1, 1, 1], ("a/2", 0): [0.5, 0], ("b/2", 1): [1, 0.5, 0]}
    rows = made_rows({(*key, "uniform"): values for key, values in shares.items()})
    found = {}
    for r in sweep.curves(make(("a/1", "a/2", "b/2"), seeds=(0, 1)), rows):
        found.setdefault((r["panel"], r["pos_encoding"], plots.interval(r)), set()).add(r["exact_match"])
    second = "2, 1 of 2 seeds"
    wanted = {("1", "a", "1-25"): {1}, ("1", "a", "26-50"): {0, 1}}
    wanted |= {(second, "a", "1-25"): {0.5}, (second, "a", "26-50"): {0}}
    wanted |= {(second, "b", "1-25"): {1}, (second, "b", "26-50"): {0.5}, (second, "b", "51-100"): {0}}
    assert found == wanted


@pytest.mark.parametrize(
    "changes, match",
    [
        (dict(runs=()), "expected at least one"),
        (dict(runs=("a x", "a y")), "a name of its own"),
        (dict(runs=("",)), "expected at least one"),
        (dict(jobs=-1), "jobs=-1"),
        (dict(seeds=()), r"seeds=\(\)"),
        (dict(only=("a*", "c")), "only: 'c' matches none of the runs, which are a/x, b/x"),
        (dict(out_dir="out/a,b"), "'out/a,b' in out_dir or runs: expected no comma"),
        (dict(runs=("a,b x",)), "'a,b' in out_dir or runs: expected no comma"),
        (dict(tasks=("imbalancd",)), "tasks: imbalancd: expected some of imbalanced"),
        (dict(lengths=("abc", 20), samples=(1,)), "lengths: 'abc' is neither"),
        (dict(lengths=("21-40", 20), samples=(1,)), "lengths=.*: expected them to rise"),
        (dict(lengths=(20,), samples=(3, 2)), r"samples=\(3, 2\): expected one number, or one for each of 1 lengths"),
    ],
)
def test_wrong_values_are_refused_before_the_work(changes, match):
    with pytest.raises(ValueError, match=match):
        SweepConfig(**dict(runs=("a/x", "b/x")) | changes)


@pytest.mark.parametrize("name", ["figure4", "sweep_auto", "sweep_encodings", "sweep_places"])
def test_every_run_of_a_config_is_one_that_train_understands(name):
    config = configurator.configure(SweepConfig, argv=[f"config/{name}.py"])
    made = [configurator.configure(*train.CONFIGS, argv=shlex.split(run)[1:]) for run in config.runs]
    assert len({str(configs) for configs in made}) == len(config.runs)  # no two are the same
    assert len(config.samples) == len(config.lengths) and {configs[-1].task for configs in made} == {"copy"}
