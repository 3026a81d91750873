"""Many runs, one table: each is trained, then tested on longer and longer strings.

    python -m scripts.sweep config/sweep_encodings.py                 # hours of work go on where they stopped
    python -m scripts.sweep config/sweep_encodings.py --seeds=0,1,2
    python -m scripts.sweep config/figure4.py '--only=2d-rope*/12-layers,rope/*' --seeds=0    # some of its runs
    python -m scripts.sweep config/sweep_encodings.py --jobs=0        # only the report on what is there

Writes rows.json (eval.py's rows of all runs), table.md and a picture a task to out_dir. What has not been run yet, or
failed, stands in the table as not run.
"""

import fnmatch
import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from tqdm import tqdm

import configurator
import data_copy
import data_text
import plots
from eval import EvalConfig

ROOT = Path(__file__).resolve().parent.parent  # where train.py and eval.py are


@dataclass
class SweepConfig:
    """Sweep"""

    # Each: a name, then what train.py gets: "rope config/toy_copy.py --pos_encoding=rope". A name label/group, such as
    # rope/4-layers, stands in the line `label` of the table and the column `group`.
    runs: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)  # of the weights, the data's order and the drawn frequencies
    tasks: tuple[str, ...] = ("imbalanced", "recursive-flip")  # to test on; none: what each run is trained on
    lengths: tuple[int | str, ...] = (20, 40, 80, 160, 320, 640, 1280, 2560, 5120, 10240, 20480)  # tokens, rising
    samples: tuple[int, ...] = (50, 20, 20, 10, 10, 10, 4, 4, 2, 1, 1)  # strings for each task and length
    stop: Literal["failure", "zero"] = "failure"  # no longer strings after a wrong copy, or where none was right
    only: tuple[str, ...] = ("*",)  # names or globs of runs to do now; the report is on all that are there
    jobs: int = 2  # runs at a time, which share the cores; 0: no new ones
    out_dir: str = "out/sweep"  # the runs' directories, rows.json, table.md and the pictures

    def __post_init__(self):
        names = [run.split()[0] for run in self.runs if run.split()]
        if not names or len(set(names)) < len(self.runs):
            raise ValueError(f"runs={self.runs}: expected at least one, each beginning with a name of its own")
        for path in (self.out_dir, *names):
            if "," in path:
                raise ValueError(f"{path!r} in out_dir or runs: expected no comma, which separates runs in eval.py")
        if self.jobs < 0 or not self.seeds:
            raise ValueError(f"jobs={self.jobs}, seeds={self.seeds}: expected at least 0, and at least one seed")
        for glob in self.only:
            if not fnmatch.filter(names, glob):
                raise ValueError(f"only: {glob!r} matches none of the runs, which are {', '.join(names)}")
        EvalConfig(runs=("run",), lengths=self.lengths, samples=self.samples)  # checks them
        if unknown := set(self.tasks) - {*data_copy.TASKS, *data_text.TEXT_TASKS}:
            known = ", ".join(dict.fromkeys((*data_copy.TASKS, *data_text.TEXT_TASKS)))
            raise ValueError(f"tasks: {', '.join(sorted(unknown))}: expected some of {known}")
        ends = [plots.parse_length(length)[1] for length in self.lengths]
        if ends != sorted(ends):
            raise ValueError(f"lengths={self.lengths}: expected them to rise")


class Run(NamedTuple):
    """One of `runs`, with one seed."""

    name: str
    seed: int
    flags: list[str]  # what train.py gets
    folder: Path


def all_runs(config: SweepConfig) -> list[Run]:
    runs = []
    for line in config.runs:
        name, *flags = shlex.split(line)
        runs += [Run(name, seed, flags, Path(config.out_dir) / f"{name}-{seed}") for seed in config.seeds]
    return runs


def eval_flags(config: SweepConfig) -> list[str]:
    """What every run is tested on, as flags of eval.py."""
    values = {name: ",".join(map(str, getattr(config, name))) or "()" for name in ("tasks", "lengths", "samples")}
    return [*(f"--{name}={value}" for name, value in values.items()), f"--stop={config.stop}"]


def rows_of(run: Run, config: SweepConfig) -> list[dict]:
    """eval.py's rows of a run; none before it has been trained and tested with the flags that it would get now."""
    tested = run.folder / "tested.json"
    if not tested.exists() or json.loads(tested.read_text()) != run.flags + eval_flags(config):
        return []
    label, _, group = run.name.partition("/")
    rows = json.loads((run.folder / "accuracy.json").read_text())
    return [row | {"name": run.name, "label": label, "group": group} for row in rows]


def train_and_test(run: Run, config: SweepConfig) -> bool:
    """Does a run, or goes on where an earlier call was stopped. Returns whether it worked."""
    if rows_of(run, config):
        return True
    out_dir = f"--out_dir={run.folder}"
    train = ["train.py", *run.flags, f"--seed={run.seed}", f"--freqs_seed={run.seed}", out_dir]
    test = ["eval.py", *eval_flags(config), f"--runs={run.folder}", "--plot=False", out_dir]
    threads = max(1, (os.cpu_count() or 1) // config.jobs)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    run.folder.mkdir(parents=True, exist_ok=True)
    with open(run.folder / "output.txt", "a") as log:
        for script, *flags in (train, test):
            command = [sys.executable, str(ROOT / script), *flags]
            if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode != 0:
                return False
    configurator.write_json(run.folder / "tested.json", run.flags + eval_flags(config))
    return True


def longest_perfect(rows: list[dict]) -> int:
    """The longest length that, with all shorter ones, a run copied without a wrong token in every task; 0 for none."""
    tasks = {row["task"] for row in rows}
    perfect = 0
    for length in sorted({row["length"] for row in rows}):
        here = [row for row in rows if row["length"] == length]
        if {row["task"] for row in here} != tasks or any(row["exact_match"] < 1 for row in here):
            break
        perfect = length
    return perfect


def cell_of(rows: list[dict], seeds: tuple[int, ...]) -> str:
    """What the table says of one run: exact match at the first length over all tasks and seeds, and the longest perfect
    length of each seed."""
    if not rows:
        return "not run"
    first = min(row["length"] for row in rows)
    at_first = [row for row in rows if row["length"] == first]
    share = sum(map(plots.hits_of, at_first)) / sum(row["samples"] for row in at_first)
    longest = []
    for seed in seeds:
        own = [row for row in rows if row["seed"] == seed]
        longest.append(f"{longest_perfect(own):,}" if own else "not run")
    return f"{100 * share:.0f}%: {' · '.join(longest)}"


def table(config: SweepConfig, rows: list[dict]) -> str:
    """Markdown: a line a label, a column a group."""
    head = f"longest perfect length, seeds {', '.join(map(str, config.seeds))}"
    if rows:
        head = f"exact match at {plots.interval(min(rows, key=lambda row: row['length']))}, then {head}"
    cells: dict[str, dict[str, str]] = {}  # of each label and group
    groups: dict[str, None] = {}  # in their order
    for run in all_runs(config):
        label, _, group = run.name.partition("/")
        groups[group] = None
        own = [row for row in rows if row["name"] == run.name]
        cells.setdefault(label, {})[group] = cell_of(own, config.seeds)
    lines = [head, "", f"| run | {' | '.join(groups)} |", "|---" * (1 + len(groups)) + "|"]
    lines += [f"| `{label}` | {' | '.join(own.get(group, '') for group in groups)} |" for label, own in cells.items()]
    return "\n".join(lines) + "\n"


def curves(config: SweepConfig, rows: list[dict]) -> list[dict]:
    """The rows that a task's picture shows, from all rows of that task. Each point is of all seeds of its run that are
    done: a curve ends where longer strings were left out for one of them."""
    seeds: dict[str, set[int]] = {}  # that are done, of each run
    for row in rows:
        seeds.setdefault(row["name"], set()).add(row["seed"])
    drawn = []
    for row in rows:
        here = [other for other in rows if all(other[key] == row[key] for key in ("name", "length", "kind"))]
        if {other["seed"] for other in here} != seeds[row["name"]]:
            continue
        panel = row["group"] or row["task"]
        done = sorted({len(seeds[other["name"]]) for other in rows if other["group"] == row["group"]})
        if done != [len(config.seeds)]:
            panel += f", {'-'.join(map(str, done))} of {len(config.seeds)} seeds"
        drawn.append(row | {"pos_encoding": row["label"], "panel": panel})
    return drawn


def report(config: SweepConfig) -> str:
    """Writes rows.json, table.md and the pictures of all runs that are done; returns the table."""
    out = Path(config.out_dir)
    rows = [row for run in all_runs(config) for row in rows_of(run, config)]
    text = table(config, rows)
    configurator.write_json(out / "rows.json", rows)
    (out / "table.md").write_text(text)
    for task in dict.fromkeys(row["task"] for row in rows):
        points = curves(config, [row for row in rows if row["task"] == task])
        if points:
            plots.plot(points, out / f"{task}.png")
    return text


def main() -> None:
    config = configurator.configure(SweepConfig, doc=__doc__)
    plots.pyplot()  # what is missing is noticed before the work
    failed = []
    if config.jobs:
        chosen = [run for run in all_runs(config) if any(fnmatch.fnmatch(run.name, glob) for glob in config.only)]
        chosen.sort(key=lambda run: config.seeds.index(run.seed))  # every run with the first seed, then with the next
        with ThreadPoolExecutor(config.jobs) as pool:
            results = pool.map(lambda run: train_and_test(run, config), chosen)
            for run, worked in zip(chosen, tqdm(results, total=len(chosen), unit="run"), strict=True):
                if not worked:
                    failed.append(f"{run.name}-{run.seed}")
                report(config)
    print(report(config), end="")
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}; see output.txt in their folders under {config.out_dir}")


if __name__ == "__main__":
    configurator.run_cli(main)
