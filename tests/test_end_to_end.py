"""The scripts as a user runs them: train, stop, go on, evaluate to 100 %; mistakes end in one line and status 2."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ENV = {k: v for k, v in os.environ.items() if k != "NANO2D_TRACEBACK"} | {"OMP_NUM_THREADS": "1"}
TOY = ["config/toy_copy.py", "--n_embd=64", "--head_dim=64", "--max_length=6", "--device=cpu", "--max_steps=400"]
TOY += ["--learning_rate=4e-3", "--warmup_steps=20", "--checkpoint_interval=1000", "--eval_interval=1000"]


def start(folder: Path, script: str, *args: str) -> subprocess.Popen:
    """`python script args`, run in `folder`, so that outputs go there; configs are found beside the script."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.Popen([sys.executable, str(ROOT / script), *args], cwd=folder, env=ENV, **pipes)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return process.returncode, out, err


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, tuple, tuple]:
    """A folder with run/, stopped by SIGTERM somewhere and started again; what both commands gave."""
    folder = tmp_path_factory.mktemp("user")
    first = start(folder, "train.py", *TOY, "--out_dir=run")
    log = folder / "run" / "log.jsonl"
    while first.poll() is None and not (log.exists() and log.read_text().count("\n") > 20):
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    return folder, finish(first), finish(start(folder, "train.py", *TOY, "--out_dir=run"))


def test_a_stopped_training_says_so_and_the_same_command_goes_on(trained):
    folder, (status, out, err), again = trained
    assert status == 143 and "steps 0 to 400" in out and "signal 15: stopped after step" in err, err
    done = int(err.split("stopped after step ")[1].split(";")[0])
    assert again[0] == 0 and f"steps {done} to 400" in again[1], again[2]
    assert steps(folder / "run") == list(range(400))
    assert sorted(p.name for p in (folder / "run").iterdir()) == sorted(
        ["best.pt", "config.py", "last.pt", "log.jsonl", "run.json", "validation.jsonl"]
    )


def test_2d_rope_copies_strings_five_times_as_long_as_it_was_trained_on(trained):
    ladder = ["--runs=run", "--lengths=1-6,12,30", "--samples=20", "--device=cpu"]
    forced = start(trained[0], "eval.py", *ladder, "--out_dir=forced")
    free = start(trained[0], "eval.py", *ladder, "--out_dir=free", "--free_running=True", "--plot=False")
    rows = {}
    for mode, process in (("forced", forced), ("free", free)):
        status, out, err = finish(process)
        assert status == 0 and "100% (20/20)" in out, err
        rows[mode] = json.loads((trained[0] / mode / "accuracy.json").read_text())
        wanted = [(task, n, 1.0, 0.0) for task in ("imbalanced", "recursive-flip", "uniform") for n in (6, 12, 30)]
        assert [(r["task"], r["length"], r["exact_match"], r["token_error"]) for r in rows[mode]] == wanted
    assert [r["first_errors"] for r in rows["forced"]] == [r["first_errors"] for r in rows["free"]]
    assert (trained[0] / "forced" / "accuracy.png").stat().st_size > 10_000


MISTAKES = {
    "unknown knob": ("train.py", ["--learning_rat=1e-3"], "--learning_rat:", "learning_rate"),
    "wrong type": ("train.py", ["--n_layer=two"], "n_layer = 'two'", "expected int"),
    "unknown encoding": ("train.py", ["--pos_encoding=rope3"], "no encoding 'rope3'", "2d-rope"),
    "head size that does not divide": ("train.py", ["--head_dim=30"], "head_dim=30", "multiple of 4"),
    "width that does not divide": ("train.py", ["--n_embd=129"], "n_embd=129", "set head_dim"),
    "no such config file": ("train.py", ["config/toy_cpy.py"], "config/toy_cpy.py", "toy_copy.py"),
    "no such run": ("eval.py", ["--runs=nowhere"], "nowhere", "no such checkpoint"),
    "nothing to evaluate": ("eval.py", [], "nothing to evaluate", "--runs=DIR"),
}


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory) -> dict[str, tuple[Path, int, str, str]]:
    """All of them, two at a time: most of a start is importing torch."""
    results, waiting = {}, list(MISTAKES)
    while waiting:
        pair = [(name, tmp_path_factory.mktemp("mistake")) for name in waiting[:2]]
        running = [start(folder, MISTAKES[name][0], *MISTAKES[name][1], "--out_dir=out") for name, folder in pair]
        results |= {name: (folder, *finish(p)) for (name, folder), p in zip(pair, running, strict=True)}
        waiting = waiting[2:]
    return results


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_in_one_line_on_stderr_and_leaves_nothing_behind(mistakes, name):
    folder, status, out, err = mistakes[name]
    assert status == 2 and out == "", err
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err
    for words in MISTAKES[name][2:]:
        assert words in err
    assert list(folder.iterdir()) == []
