"""Many runs, one table: each is trained, then tested on longer and longer strings.

    python sweep.py config/sweep_encodings.py                 # hours of work go on where they stopped
    python sweep.py config/sweep_encodings.py --seeds=0,1,2
    python sweep.py config/figure4.py '--only=2d-rope*/12-layers,rope/*' --seeds=0    # some of its runs
    python sweep.py config/sweep_encodings.py --jobs=0        # only the report on what is there

Writes rows.json (eval.py's rows of all runs), table.md and a picture a task to out_dir. What has not been run yet, or
failed, stands in the table as such.
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
from typing import Literal

from tqdm import tqdm

import configurator
from report import interval, plot

HERE = Path(__file__).resolve().parent


@dataclass
class SweepConfig:
    """Sweep"""

    # Each: a name, then what train.py gets: "rope config/toy_copy.py --pos_encoding=rope". A name label/group, such as
    # rope/4-layers, stands in the line `label` of the table and the column `group`.
    runs: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)  # of the weights, the data's order and the drawn frequencies
    tasks: tuple[str, ...] = ("imbalanced", "recursive-flip")  # strings to test on
    lengths: tuple[int | str, ...] = (20, 40, 80, 160, 320, 640, 1280, 2560, 5120, 10240, 20480)  # tokens, rising
    samples: tuple[int, ...] = (50, 20, 20, 10, 10, 10, 4, 4, 2, 1, 1)  # strings for each task and length
    stop: Literal["failure", "zero"] = "failure"  # no longer strings behind a wrong copy, or where none was right
    only: tuple[str, ...] = ("*",)  # names or globs of runs to do now; the report is on all that are there
    jobs: int = 2  # runs at a time, which share the cores; 0: no new ones
    out_dir: str = "out/sweep"  # the runs' directories, rows.json, table.md and the pictures

    def __post_init__(self):
        names = [run.split()[0] for run in self.runs if run.split()]
        if not names or len(set(names)) < len(self.runs):
            raise ValueError(f"runs={self.runs}: expected at least one, each beginning with a name of its own")
        if self.jobs < 0 or not self.seeds:
            raise ValueError(f"jobs={self.jobs}, seeds={self.seeds}: expected at least 0, and at least one seed")
        if vain := [glob for glob in self.only if not fnmatch.filter(names, glob)]:
            raise ValueError(f"only={', '.join(vain)}: matches none of the runs, which are {', '.join(names)}")


def folder(run: str, seed: int, config: SweepConfig) -> Path:
    return HERE / config.out_dir / f"{run.split()[0]}-{seed}"


def asked(config: SweepConfig) -> list[str]:
    """What eval.py is asked; kept beside its rows, which count as long as the same would be."""
    flags = [f"--{key}={','.join(map(str, getattr(config, key)))}" for key in ("tasks", "lengths", "samples")]
    return [*flags, f"--stop={config.stop}"]


def found(run: str, seed: int, config: SweepConfig) -> list[dict] | None:
    """The rows of a run that has been trained and tested, None of any other."""
    out = folder(run, seed, config)
    tested = out / "tested.json"
    if not tested.exists() or json.loads(tested.read_text()) != asked(config):
        return None
    label, _, group = run.split()[0].partition("/")
    rows = json.loads((out / "accuracy.json").read_text())
    return [row | {"name": run.split()[0], "label": label, "group": group} for row in rows]


def do(run: str, seed: int, config: SweepConfig) -> bool:
    """Trains and tests one run with one seed, or goes on where an earlier call was stopped. Whether it worked."""
    out, (_, *flags) = folder(run, seed, config), shlex.split(run)
    if found(run, seed, config):
        return True
    out.mkdir(parents=True, exist_ok=True)
    train = ["train.py", *flags, f"--seed={seed}", f"--freqs_seed={seed}", f"--out_dir={out}"]
    test = ["eval.py", *asked(config), f"--runs={out}", "--plot=False", f"--out_dir={out}"]
    threads = max(1, (os.cpu_count() or 1) // config.jobs)
    how = {"cwd": HERE, "env": os.environ | {"OMP_NUM_THREADS": str(threads)}, "stderr": subprocess.STDOUT}
    with open(out / "output.txt", "a") as log:
        for command in (train, test):
            if subprocess.run([sys.executable, *command], stdout=log, **how).returncode:
                return False
    (out / "tested.json").write_text(json.dumps(asked(config)))
    return True


def longest_perfect(rows: list[dict], seed: int) -> int:
    """The longest length that, with all shorter ones, was copied without a wrong token in every task; 0 for none."""
    perfect = 0
    for length in sorted({row["length"] for row in rows}):
        here = [row for row in rows if row["seed"] == seed and row["length"] == length]
        if len(here) < len({row["task"] for row in rows}) or any(row["exact_match"] < 1 for row in here):
            break
        perfect = length
    return perfect


def table(config: SweepConfig, rows: list[dict]) -> str:
    """Markdown: a line a label, a column a group: exact match at the first length over all that was run, and the
    longest perfect length of each seed."""
    names = [run.split()[0].partition("/")[::2] for run in config.runs]
    groups, first = list(dict.fromkeys(group for _, group in names)), min((row["length"] for row in rows), default=0)
    about = next((f"exact match at {interval(row)}, then " for row in rows if row["length"] == first), "")
    seeds = ", ".join(map(str, config.seeds))
    lines = [f"{about}longest perfect length, seeds {seeds}", "", f"| run | {' | '.join(groups)} |"]
    lines.append("|---" * (1 + len(groups)) + "|")
    for label in dict.fromkeys(label for label, _ in names):
        cells = []
        for group in groups:
            own = [row for row in rows if (row["label"], row["group"]) == (label, group)]
            at_first, tested = [row for row in own if row["length"] == first], {row["seed"] for row in own}
            if not own:
                cells.append("not run" if (label, group) in names else "")
                continue
            share = sum(r["exact_match"] * r["samples"] for r in at_first) / sum(r["samples"] for r in at_first)
            longest = [f"{longest_perfect(own, seed):,}" if seed in tested else "not run" for seed in config.seeds]
            cells.append(f"{100 * share:.0f}%: {' · '.join(longest)}")
        lines.append(f"| `{label}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def curves(config: SweepConfig, rows: list[dict]) -> list[dict]:
    """What a picture shows of a task's rows: every point is of all seeds of its run. Lengths that were left out count
    as wrong behind one without a right copy; behind one with a wrong copy nothing is known, so there is no point."""
    lengths = {row["length"]: {key: row[key] for key in ("min_length", "length", "samples")} for row in rows}
    runs: dict[str, dict[int, list[dict]]] = {}  # name -> seed -> its rows, shortest first
    for row in sorted(rows, key=lambda row: row["length"]):
        runs.setdefault(row["name"], {}).setdefault(row["seed"], []).append(row)
    drawn = []
    for name, seeds in runs.items():
        label, _, group = name.partition("/")
        done = sorted({len(runs[other]) for other in runs if other.partition("/")[2] == group})
        part = "" if done == [len(config.seeds)] else f", {'-'.join(map(str, done))} of {len(config.seeds)} seeds"
        for own in seeds.values():
            if config.stop == "zero" and not own[-1]["exact_match"]:
                left_out = [length for high, length in lengths.items() if high > own[-1]["length"]]
                own += [own[-1] | length | {"margin": None, "left_out": True} for length in left_out]
        for length in lengths:
            here = [row for own in seeds.values() for row in own if row["length"] == length]
            if len(here) == len(seeds):
                drawn += [row | {"pos_encoding": label, "panel": (group or row["task"]) + part} for row in here]
    return drawn


def report(config: SweepConfig) -> str:
    """Writes rows.json, table.md and the pictures of all runs that have been tested; returns the table."""
    rows = [row for run in config.runs for seed in config.seeds for row in found(run, seed, config) or []]
    out = HERE / config.out_dir
    out.mkdir(parents=True, exist_ok=True)
    (out / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
    (out / "table.md").write_text(text := table(config, rows))
    for task in config.tasks:
        if drawn := curves(config, [row for row in rows if row["task"] == task]):
            plot(drawn, out / f"{task}.png")
    return text


def main() -> None:
    config = configurator.configure(SweepConfig, doc=__doc__)
    failed = []
    if config.jobs:
        runs = [run for run in config.runs if any(fnmatch.fnmatch(run.split()[0], glob) for glob in config.only)]
        work = [(run, seed) for seed in config.seeds for run in runs]
        with ThreadPoolExecutor(config.jobs) as pool:
            results = pool.map(lambda job: do(*job, config), work)
            for (run, seed), well in zip(work, tqdm(results, total=len(work), unit="run"), strict=True):
                failed += [] if well else [f"{run.split()[0]}-{seed}"]
                report(config)
    print(report(config), end="")
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}; see output.txt in their folders under {config.out_dir}")


if __name__ == "__main__":
    configurator.run_cli(main)
