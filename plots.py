"""Lengths to test, and what was found there, as tables and pictures. Needs matplotlib, where it draws."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path


def wilson(hits: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95% interval for a share of `hits` in n >= 1 trials."""
    share = hits / n
    centre = share + z * z / (2 * n)
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, (centre - spread) / (1 + z * z / n)), min(1.0, (centre + spread) / (1 + z * z / n))


def parse_length(length: int | str) -> tuple[int, int]:
    """20 -> (20, 20); "26-50" -> (26, 50). ValueError for anything else."""
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


def hits_of(row: dict) -> int:
    return round(row["exact_match"] * row["samples"])


def labels(rows: Sequence[dict]) -> dict[tuple[str, str], str]:
    """What to call the run of a row, by the row's run and pos_encoding: the encoding; the run, where two runs differ in
    more than encoding and seed."""
    runs = {(row["run"], row["pos_encoding"], row["seed"], row.get("panel")) for row in rows}
    count = Counter(run[1:] for run in runs)
    unclear = {encoding for (encoding, _, _), n in count.items() if n > 1}
    return {(run, encoding): run if encoding in unclear else encoding for run, encoding, _, _ in runs}


def table(rows: Sequence[dict]) -> str:
    """Exact match in percent and as strings right / strings tried: a line a run and task, a column a length."""
    columns = list(dict.fromkeys(map(interval, rows)))
    names = labels(rows)
    lines: dict[tuple, dict[str, str]] = {}  # run, its label, seed, task -> cells by their column
    for row in rows:
        task = row["task"]
        if row.get("kind"):
            task += f", {row['kind']}"
        if row.get("repeat_p") is not None:
            task += f", p {row['repeat_p']:g}"
        label = names[row["run"], row["pos_encoding"]]
        cells = lines.setdefault((row["run"], label, row["seed"], task), {})
        cells[interval(row)] = f"{100 * row['exact_match']:>7.0f}% ({hits_of(row)}/{row['samples']})"
    first = max(12, 2 + max(len(label) for _, label, _, _ in lines))
    second = max(21, 2 + max(len(task) for _, _, _, task in lines))
    head = f"{'':{first}}{'seed':>5}  {'exact match at length':{second}}"
    text = [head + "".join(f"{column:>16}" for column in columns)]
    for (_, label, seed, task), cells in lines.items():
        head = f"{label:{first}}{seed:>5}  {task:{second}}"
        text.append(head + "".join(f"{cells.get(column, ''):>16}" for column in columns))
    if any("lower bound" in row.get("mode", "") for row in rows):
        text.append("lower bounds, since other tokens may be as right: --free_running=True decodes for real")
    return "\n".join(text)


def loss_table(rows: Sequence[dict]) -> str:
    """Loss with its 95% interval, and bits a byte: a line a run."""
    names = labels([row for row in rows if row["step"]])
    first = max(12, 2 + max(map(len, names.values()), default=0))
    lines = [f"{'':{first}}{'seed':>5}{'step':>9}{'loss, nats a token':>22}{'bits a byte':>13}{'tokens':>12}"]
    for row in rows:
        loss = f"{row['loss']:.4f}"
        if row["loss_standard_error"]:
            loss += f" ± {1.96 * row['loss_standard_error']:.4f}"
        label = names.get((row["run"], row["pos_encoding"]), row["pos_encoding"])
        seed = "" if row["seed"] is None else row["seed"]  # of a Hugging Face folder
        head = f"{label:{first}}{seed:>5}{row['step']:>9,}"
        lines.append(f"{head}{loss:>22}{row['bits_per_byte']:>13.4f}{row['tokens']:>12,}")
    return "\n".join(lines)


def pyplot():
    """matplotlib.pyplot, drawing to files. ValueError where it is not installed."""
    try:
        import matplotlib.pyplot
    except ImportError as error:
        raise ValueError("pictures need matplotlib: pip install matplotlib, or give --plot=False to eval.py") from error
    matplotlib.use("Agg")
    return matplotlib.pyplot


def plot(rows: Sequence[dict], path: Path) -> None:
    """Exact match against length with Wilson intervals, and below it the smallest margin: how far a model is from
    failing. One panel a task and template kind (or what rows name as their `panel`), one line an encoding; seeds are
    pooled. Rows of several repeat_p: against that, one panel a kind and length; other rows are left out."""
    over_p = len({row.get("repeat_p") for row in rows} - {None}) > 1
    if over_p:
        rows = [row for row in rows if row.get("repeat_p") is not None]
    panels: dict[str, list[dict]] = {}  # title -> rows
    for row in rows:
        subject = f"length {interval(row)}" if over_p else row["task"]
        title = row.get("panel") or ", ".join(filter(None, (subject, row.get("kind"))))
        panels.setdefault(title, []).append(row)
    names = labels(rows)
    curves = list(dict.fromkeys(names[row["run"], row["pos_encoding"]] for row in rows))
    lengths = None if over_p else sorted({row["length"] for row in rows})
    trained = {row["trained_to"] for row in rows} - {None}
    trained_to = min(trained) if len(trained) == 1 else None
    margins = any(row.get("margin") is not None for row in rows)

    grid = {"nrows": 1 + margins, "ncols": len(panels), "sharex": True, "sharey": "row", "squeeze": False}
    figure, axes = pyplot().subplots(**grid, figsize=(1 + 3.6 * len(panels), 5.6 if margins else 3.4))
    lines = {}  # for the legend: a curve may be in some panels alone
    for column, (title, in_panel) in zip(axes.T, panels.items(), strict=True):
        for i, curve in enumerate(curves):
            own = [row for row in in_panel if names[row["run"], row["pos_encoding"]] == curve]
            shift = i - (len(curves) - 1) / 2  # so that intervals of several curves do not hide each other
            if own:
                lines[curve] = draw_curve(column, own, over_p, shift, f"C{i}")
        label_panels(column, title, lengths, trained_to)
    axes[0, 0].set_ylabel("exact match, 95% interval")
    if margins:
        axes[1, 0].set_ylabel("smallest margin, logits")
    handles = [lines[curve] for curve in curves]
    axes[0, -1].legend(handles, curves, frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))
    if trained_to:
        note = "" if over_p else " (shaded)"
        figure.suptitle(f"trained on lengths to {trained_to}{note}", fontsize=9, color="0.3")
    finish(figure, path)


def draw_curve(column: Sequence, rows: Sequence[dict], over_p: bool, shift: float, colour: str):
    """Draws one curve into a panel and the one below it, if any; returns the upper line, for the legend. All rows at
    one place count together."""
    x_name = "repeat_p" if over_p else "length"
    x, shares, below, above, margins = [], [], [], [], []
    for value in sorted({row[x_name] for row in rows}):
        here = [row for row in rows if row[x_name] == value]
        hits, n = sum(map(hits_of, here)), sum(row["samples"] for row in here)
        low, high = wilson(hits, n)
        x.append(value + 0.002 * shift if over_p else value * 1.04**shift)
        shares.append(hits / n)
        below.append(max(hits / n - low, 0))  # rounding may leave -1e-17
        above.append(max(high - hits / n, 0))
        margins.append(min((row["margin"] for row in here if row.get("margin") is not None), default=math.nan))
    style = {"marker": "o", "markersize": 4, "color": colour}
    for panel in column[1:]:
        panel.plot(x, margins, **style)
    return column[0].errorbar(x, shares, [below, above], capsize=3, elinewidth=0.8, **style)


def label_panels(column: Sequence, title: str, lengths: Sequence[int] | None, trained_to: int | None) -> None:
    """Labels a panel and the one below it, if any. lengths: the ticks; None where repeat_p is drawn along x."""
    top, bottom = column[0], column[-1]
    top.set(title=title, ylim=(-0.04, 1.04))
    if top is not bottom:
        bottom.axhline(0, color="0.5", linewidth=0.8)
    if lengths is None:
        bottom.set_xlabel("p, share of each repetition that is kept")
    else:
        bottom.set(xscale="log", xlabel="length of what is copied")
        rotation = 60 if len(lengths) > 6 else 0
        bottom.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=rotation, fontsize=8)
        bottom.set_xlim(lengths[0] / 2, lengths[-1] * 1.3)
    for panel in column:
        panel.minorticks_off()
        if lengths and trained_to:
            panel.axvspan(1, trained_to, color="0.5", alpha=0.12, linewidth=0)


def plot_losses(rows: Sequence[dict], path: Path) -> None:
    """The loss on text against the step: a line a run. Of finetuned runs, whose rows name their `start`, from the loss
    before finetuning to the one after; else the validation losses of training, validation.jsonl. A run that was stopped
    before its first validation stands in the legend alone."""
    figure, panel = pyplot().subplots(figsize=(5.6, 3.6))
    before = {row["run"]: row["loss"] for row in rows if row["step"] == 0}
    encodings = list(dict.fromkeys(row["pos_encoding"] for row in rows))
    names = labels([row for row in rows if row["step"] or not before])
    for i, row in enumerate(rows):
        if before and row.get("start") in before:
            points = [(0, before[row["start"]]), (row["step"], row["loss"])]
        elif before:
            continue
        else:
            points = validations(row["run"])
        last = f"{points[-1][1]:.3f}" if points else "not validated yet"
        label = f"{names[row['run'], row['pos_encoding']]}, seed {row['seed']}: {last}"
        style = {"color": f"C{encodings.index(row['pos_encoding']) if before else i}", "marker": "o", "markersize": 3}
        panel.plot(*zip(*points, strict=True) if points else ([], []), label=label, **style)
    panel.set(
        xlabel="optimizer step", ylabel="loss on text, nats a token" if before else "validation loss, nats a token"
    )
    panel.legend(frameon=False, fontsize=9)
    finish(figure, path)


def validations(run: str) -> list[tuple[int, float]]:
    """Steps and losses in a run's validation.jsonl."""
    file = (Path(run) if Path(run).is_dir() else Path(run).parent) / "validation.jsonl"
    text = file.read_text() if file.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]  # a kill may tear
    return [(line["step"], line["val_loss"]) for line in lines]


def finish(figure, path: Path) -> None:
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot().close(figure)
