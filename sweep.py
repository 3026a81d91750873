"""Many runs, one table: each is trained, then tested on longer and longer strings until one is wrong.

    python sweep.py config/sweep_encodings.py                 # hours of work go on where they stopped
    python sweep.py config/sweep_encodings.py --seeds=0,1,2

Writes rows.json (eval.py's rows of all runs) and table.md to out_dir. A run that failed stands in the table as such.
"""

import json
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

import configurator

HERE = Path(__file__).resolve().parent


@dataclass
class SweepConfig:
    """Sweep"""

    runs: tuple[str, ...] = ()  # each: a name, then what train.py gets: "rope config/toy_copy.py --pos_encoding=rope"
    seeds: tuple[int, ...] = (0,)  # of the weights, the data's order and the drawn frequencies
    tasks: tuple[str, ...] = ("imbalanced", "recursive-flip")  # strings to test on
    lengths: tuple[int, ...] = (20, 40, 80, 160, 320, 640, 1280, 2560, 5120, 10240, 20480)  # tokens, rising
    samples: tuple[int, ...] = (50, 20, 20, 10, 10, 10, 4, 4, 2, 1, 1)  # strings for each task and length
    jobs: int = 2  # runs at a time, one thread each
    out_dir: str = "out/sweep"  # the runs' directories, rows.json and table.md

    def __post_init__(self):
        names = [run.split()[0] for run in self.runs if run.split()]
        if not names or len(set(names)) < len(self.runs):
            raise ValueError(f"runs={self.runs}: expected at least one, each beginning with a name of its own")
        if self.jobs < 1 or not self.seeds:
            raise ValueError(f"jobs={self.jobs}, seeds={self.seeds}: expected at least one of each")


def do(run: str, seed: int, config: SweepConfig) -> list[dict] | None:
    """Trains and tests one run with one seed, or reads what an earlier call left. None if it failed."""
    name, *flags = shlex.split(run)
    out = HERE / config.out_dir / f"{name}-{seed}"
    command = [*flags, f"--seed={seed}", f"--freqs_seed={seed}", f"--out_dir={out}"]
    test = [f"--{key}={','.join(map(str, getattr(config, key)))}" for key in ("tasks", "lengths", "samples")]
    test += [f"--runs={out}", "--stop=failure", "--plot=False", f"--out_dir={out}"]
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "output.txt", "a") as log:
        for script, arguments in (("train.py", command), ("eval.py", test)):
            if script == "eval.py" and (out / "tested.json").exists():  # by the same command?
                if json.loads((out / "tested.json").read_text()) == test:
                    break
            done = subprocess.run(
                [sys.executable, script, *arguments],
                cwd=HERE,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            if done.returncode:
                return None
    (out / "tested.json").write_text(json.dumps(test))
    return [row | {"name": name} for row in json.loads((out / "accuracy.json").read_text())]


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
    """Markdown: a line a run; exact match at the first length, and the longest perfect length of each seed."""
    first = config.lengths[0]
    seeds = ", ".join(map(str, config.seeds))
    lines = [f"| run | exact match at {first} | longest perfect length, seeds {seeds} |", "|---|---|---|"]
    for name in [run.split()[0] for run in config.runs]:
        own = [row for row in rows if row["name"] == name]
        at_first = [row for row in own if row["length"] == first]
        if not at_first:
            lines.append(f"| {name} | not run | |")
            continue
        share = sum(r["exact_match"] * r["samples"] for r in at_first) / sum(r["samples"] for r in at_first)
        tested = {row["seed"] for row in own}
        longest = [f"{longest_perfect(own, seed):,}" if seed in tested else "not run" for seed in config.seeds]
        lines.append(f"| {name} | {100 * share:.0f}% | {' · '.join(longest)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    config = configurator.configure(SweepConfig, doc=__doc__)
    work = [(run, seed) for seed in config.seeds for run in config.runs]
    rows, failed = [], []
    out = HERE / config.out_dir
    with ThreadPoolExecutor(config.jobs) as pool:
        results = pool.map(lambda job: do(*job, config), work)
        for (run, seed), result in zip(work, tqdm(results, total=len(work), unit="run"), strict=True):
            rows += result or []
            failed += [] if result else [f"{run.split()[0]}-{seed}"]
            (out / "rows.json").write_text(json.dumps(rows, indent=1) + "\n")
            (out / "table.md").write_text(table(config, rows))
    print(table(config, rows), end="")
    if failed:
        raise RuntimeError(f"failed: {', '.join(failed)}; see output.txt in their folders under {out}")


if __name__ == "__main__":
    configurator.run_cli(main)
