"""Lengths to test, and what was found there, as tables and pictures. Needs numpy, and matplotlib where it draws."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def wilson(hits: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95% interval for a share of `hits` in n >= 1 trials."""
    share = hits / n
    centre = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, (centre - spread) / (1 + z * z / n)), min(1.0, (centre + spread) / (1 + z * z / n))


def parse_length(length: int | str) -> tuple[int, int]:
    """20 -> (20, 20); "26-50" -> (26, 50)."""
    low, dash, high = str(length).partition("-")
    try:
        bounds = int(low), int(high if dash else low)
    except ValueError:
        bounds = 0, 0
    if not 1 <= bounds[0] <= bounds[1]:
        raise ValueError(f"lengths: {length!r} is neither a length (20) nor an interval (26-50)")
    return bounds


def interval(row: dict) -> str:
    low, high = row["min_length"], row["length"]
    return f"{high:,}" if low == high else f"{low:,}-{high:,}"


def table(rows: Sequence[dict]) -> str:
    """Exact match in percent and as strings right / strings tried: a line a run and task."""
    columns = list(dict.fromkeys(map(interval, rows)))
    by_line: dict[tuple, dict] = {}
    for row in rows:
        task = ", ".join([row["task"], *filter(None, [row.get("kind")])])
        task += f", p {row['repeat_p']:g}" if row.get("repeat_p") is not None else ""
        by_line.setdefault((row["run"], row["pos_encoding"], row["seed"], task), {})[interval(row)] = row
    first, width = (max(map(len, names)) for names in zip(*[(line[1], line[3]) for line in by_line], strict=True))
    first, width = max(12, first + 2), max(21, width + 2)
    lines = [
        " " * first + f"{'seed':>5}  {'exact match at length':{width}}" + "".join(f"{name:>16}" for name in columns)
    ]
    for (_, encoding, seed, task), cells in by_line.items():
        line = f"{encoding:{first}}{seed:>5}  {task:{width}}"
        for column in columns:
            row = cells.get(column)
            cell = f"({round(row['exact_match'] * row['samples'])}/{row['samples']})" if row else ""
            line += f"{100 * row['exact_match']:>7.0f}% {cell}".rjust(16) if row else " " * 16
        lines.append(line)
    return "\n".join(lines)


def plot(rows: Sequence[dict], path: Path) -> None:
    """Exact match against length with Wilson intervals, and below it the smallest margin: how far a model is from
    failing. One panel a task (or what rows name as their `panel`), one line an encoding; seeds and template kinds are
    pooled. Rows of several repeat_p: against that, one panel a length. Rows with `left_out` have no interval."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    over_p = len({row.get("repeat_p") for row in rows} - {None}) > 1
    rows = [row for row in rows if not over_p or row.get("repeat_p") is not None]
    x_of, panel_of = "length", lambda row: row.get("panel", row["task"])
    if over_p:
        x_of, panel_of = "repeat_p", lambda row: f"length {interval(row)}"
    names = list(dict.fromkeys(map(panel_of, rows)))
    encodings = list(dict.fromkeys(r["pos_encoding"] for r in rows))
    ticks = sorted({r[x_of] for r in rows})
    trained = {r["trained_to"] for r in rows} - {None}
    margins = any(r.get("margin") is not None for r in rows)
    size = (1 + 3.6 * len(names), 5.6 if margins else 3.4)
    figure, panels = plt.subplots(1 + margins, len(names), figsize=size, sharex=True, sharey="row", squeeze=False)
    for column, name in zip(panels.T, names, strict=True):
        for i, encoding in enumerate(encodings):
            own = [r for r in rows if panel_of(r) == name and r["pos_encoding"] == encoding]
            at = {x: some for x in ticks if (some := [r for r in own if r[x_of] == x])}
            if not at:
                continue
            counts = [
                (sum(round(r["exact_match"] * r["samples"]) for r in s), sum(r["samples"] for r in s))
                for s in at.values()
            ]
            y = [hits / n for hits, n in counts]
            below, above = zip(*(wilson(*count) for count in counts), strict=True)
            bars = np.maximum(0, [np.subtract(y, below), np.subtract(above, y)])  # rounding may leave -1e-17
            bars[:, [all(r.get("left_out") for r in s) for s in at.values()]] = math.nan  # nothing was tried
            shift = i - (len(encodings) - 1) / 2  # so that bars of several encodings do not hide each other
            x = np.add([*at], 0.002 * shift) if over_p else np.multiply([*at], 1.04**shift)
            style = {"marker": "o", "markersize": 4, "label": encoding, "color": f"C{i}"}
            column[0].errorbar(x, y, bars, capsize=3, elinewidth=0.8, **style)
            if margins:
                least = [
                    min((m for r in s if (m := r.get("margin")) is not None), default=math.nan) for s in at.values()
                ]
                column[1].plot(x, least, **style)
        column[0].set(title=name, ylim=(-0.04, 1.04))
        if over_p:
            column[-1].set(xlabel="p, share of each repetition that is kept")
        else:
            column[-1].set(xscale="log", xlabel="length of the string")
            turned = {"rotation": 60 if len(ticks) > 6 else 0, "fontsize": 8}
            column[-1].set_xticks(ticks, [f"{x:,}" for x in ticks], **turned)
            column[-1].set_xlim(left=ticks[0] / 2)
        for panel in column:
            panel.minorticks_off()
            panel.spines[["top", "right"]].set_visible(False)
            if len(trained) == 1 and not over_p:
                panel.axvspan(1, *trained, color="0.5", alpha=0.12, linewidth=0)
        if margins:
            column[1].axhline(0, color="0.5", linewidth=0.8)
    panels[0, 0].set_ylabel("exact match, 95% interval")
    if margins:
        panels[1, 0].set_ylabel("smallest margin, logits")
    lines = {line.get_label(): line for panel in panels[0] for line in panel.containers}  # of all panels
    places = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
    panels[0, -1].legend([lines[e] for e in encodings], encodings, frameon=False, fontsize=9, **places)
    if len(trained) == 1:
        shaded = "" if over_p else " (shaded)"
        figure.suptitle(f"trained on strings of 1 to {min(trained)}{shaded}", fontsize=9, color="0.3")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def loss_table(rows: Sequence[dict]) -> str:
    lines = [f"{'':12}{'seed':>5}{'step':>9}{'loss, nats a token':>22}{'bits a byte':>13}{'tokens':>12}"]
    for r in rows:
        loss = f"{r['loss']:.4f}" + (f" ± {1.96 * r['loss_standard_error']:.4f}" if r["loss_standard_error"] else "")
        head = f"{r['pos_encoding']:12}{r['seed']:>5}{r['step']:>9,}"
        lines.append(f"{head}{loss:>22}{r['bits_per_byte']:>13.4f}{r['tokens']:>12,}")
    return "\n".join(lines)


def plot_losses(rows: Sequence[dict], path: Path) -> None:
    """The validation losses of training, validation.jsonl, against the step: a line a run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(5.6, 3.6))
    for row in rows:
        folder = Path(row["run"]) if Path(row["run"]).is_dir() else Path(row["run"]).parent
        lines = [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]
        steps, losses = [line["step"] for line in lines], [line["val_loss"] for line in lines]
        label = f"{row['pos_encoding']}, seed {row['seed']}: {losses[-1]:.3f}"
        panel.plot(steps, losses, marker="o", markersize=3, label=label)
    panel.set(xlabel="optimizer step", ylabel="validation loss, nats a token")
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
