"""plots.py: tables of made rows, intervals against known values, and what stands in the pictures."""

import sys

import matplotlib.pyplot as plt
import pytest

import plots
from plots import parse_length, plot, plot_losses, table, wilson

MADE = [  # rows of a report
    dict(run=encoding, pos_encoding=encoding, seed=seed, task="uniform", trained_to=20, samples=n, exact_match=share)
    | dict(min_length=low, length=high)
    for encoding, seed, low, high, n, share in [
        ("2d-rope", 0, 20, 20, 4, 1.0),
        ("2d-rope", 0, 21, 50, 8, 0.75),
        ("rope", 7, 20, 20, 4, 0.5),
        ("rope", 7, 21, 50, 8, 0.0),
    ]
]


@pytest.fixture
def figures(monkeypatch) -> list[plt.Figure]:
    """The figures that are drawn, kept open until the test ends."""
    kept, close = [], plt.close
    monkeypatch.setattr(plt, "close", kept.append)
    yield kept
    close("all")


@pytest.mark.parametrize(
    "hits, n, low, high",
    [(0, 10, 0, 0.2775), (10, 10, 0.7225, 1), (5, 10, 0.2366, 0.7634), (1, 1, 0.2065, 1), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_interval_has_the_known_values(hits, n, low, high):
    assert wilson(hits, n) == pytest.approx((low, high), abs=1e-4)


def test_a_length_is_a_number_or_an_interval():
    given = {20: (20, 20), "20": (20, 20), "26-50": (26, 50), "7-7": (7, 7)}
    assert {text: parse_length(text) for text in given} == given
    for text in (0, -5, "0-4", "50-26", "long", "1-2-3", "", "2.5", "26-", "-26"):
        with pytest.raises(ValueError, match=f"lengths: {text!r} is neither a length"):
            parse_length(text)


def test_the_table_has_a_line_a_run_with_the_numbers():
    head, first, second = table([*MADE[:3], MADE[3] | {"min_length": 1000, "length": 2000}]).splitlines()
    assert head.split()[-3:] == ["20", "21-50", "1,000-2,000"]
    assert first.split() == ["2d-rope", "0", "uniform", "100%", "(4/4)", "75%", "(6/8)"]
    assert second.split() == ["rope", "7", "uniform", "50%", "(2/4)", "0%", "(0/8)"]
    assert first.endswith(" " * 16) and len(head) == len(first) == len(second)  # nothing at 1,000-2,000


def test_kinds_and_shares_of_repetition_have_lines_of_their_own():
    rows = [MADE[0] | {"kind": kind, "repeat_p": p} for kind in ("first", None) for p in (0.5, 1.0, None)]
    names = ["uniform, first, p 0.5", "uniform, first, p 1", "uniform, first", "uniform, p 0.5", "uniform, p 1"]
    for line, name in zip(table(rows).splitlines()[1:], [*names, "uniform"], strict=True):
        assert line.split() == ["2d-rope", "0", *name.split(), "100%", "(4/4)"]


def test_the_plot_has_a_panel_a_task_or_as_rows_say_and_a_line_an_encoding(figures, tmp_path):
    plot([*MADE, *(row | {"panel": "4 layers"} for row in MADE[2:])], tmp_path / "plot.png")
    (figure,) = figures
    assert [panel.get_title() for panel in figure.axes] == ["uniform", "4 layers"]
    assert figure.get_suptitle() == "trained on lengths to 20 (shaded)"
    shares = [[bars.lines[0].get_ydata().tolist() for bars in panel.containers] for panel in figure.axes]
    assert shares == [[[1, 0.75], [0.5, 0]], [[0.5, 0]]]
    colours = [[bars.lines[0].get_color() for bars in panel.containers] for panel in figure.axes]
    assert colours == [["C0", "C1"], ["C1"]]  # an encoding keeps its colour
    assert [text.get_text() for text in figure.axes[1].get_legend().get_texts()] == ["2d-rope", "rope"]
    for panel in figure.axes:
        assert panel.get_xscale() == "log" and [t.get_text() for t in panel.get_xticklabels()] == ["20", "50"]
        (shade,) = panel.patches
        assert (shade.get_x(), shade.get_width()) == (1, 19)
    assert plt.imread(tmp_path / "plot.png").std() > 0


def test_runs_that_differ_in_more_than_encoding_and_seed_are_told_apart(figures, tmp_path):
    rows = [*MADE, *(row | {"run": "out/geometric", "exact_match": 0.25} for row in MADE[:2])]
    assert [line.split()[:2] for line in table(rows).splitlines()[1:]] == [
        ["2d-rope", "0"],
        ["rope", "7"],
        ["out/geometric", "0"],
    ]
    rows = [row | {"run": row["run"].replace("2d-", "out/2d-")} for row in rows]
    plot(rows, tmp_path / "plot.png")
    (panel,) = figures[0].axes
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["out/2d-rope", "rope", "out/geometric"]
    assert [bars.lines[0].get_ydata().tolist() for bars in panel.containers] == [[1, 0.75], [0.5, 0], [0.25, 0.25]]
    losses = dict(step=9, loss=2.0, loss_standard_error=0.5, bits_per_byte=3.0, tokens=7000)
    rows = [row | losses for row in rows] + [MADE[0] | losses | {"run": "start", "seed": None, "step": 0}]
    shown = [line.split()[0] for line in plots.loss_table(rows).splitlines()[1:]]
    assert shown == ["out/2d-rope"] * 2 + ["rope"] * 2 + ["out/geometric"] * 2 + ["2d-rope"]


def test_lengths_of_training_that_differ_are_not_shaded(figures, tmp_path):
    plot([MADE[0], MADE[2] | {"trained_to": 30}], tmp_path / "plot.png")
    assert not figures[0].axes[0].patches and figures[0].get_suptitle() == ""


def test_a_point_pools_its_strings_and_has_the_smallest_margin(figures, tmp_path):
    made = [(4, 1.0, 3.0), (8, 0.25, -1.0), (2, 0.5, None)]  # samples, exact match, margin of three seeds: 7 of 14
    rows = [MADE[0] | dict(seed=i, samples=n, exact_match=e, margin=m) for i, (n, e, m) in enumerate(made)]
    plot([*rows, MADE[1]], tmp_path / "plot.png")
    match, margin = figures[0].axes
    (container,) = match.containers
    assert container.lines[0].get_ydata().tolist() == [0.5, 0.75]
    for bar, counts in zip(container.lines[2][0].get_segments(), [(7, 14), (6, 8)], strict=True):
        assert bar[:, 1] == pytest.approx(wilson(*counts))
    assert margin.get_lines()[0].get_ydata() == pytest.approx([-1, float("nan")], nan_ok=True)
    assert margin.get_ylabel() == "smallest margin, logits"


def test_several_shares_of_repetition_are_plotted_against_them(figures, tmp_path):
    rows = [row | {"repeat_p": p} for row in MADE for p in (0.5, 0.9, 1.0)] + [MADE[0] | {"repeat_p": None}]
    plot([row | {"kind": kind} for row in rows[:3] for kind in ("first", "own-line")], tmp_path / "kinds.png")
    assert [panel.get_title() for panel in figures.pop().axes] == ["length 20, first", "length 20, own-line"]
    plot(rows, tmp_path / "plot.png")
    assert [panel.get_title() for panel in figures[0].axes] == ["length 20", "length 21-50"]
    assert figures[0].get_suptitle() == "trained on lengths to 20"
    for panel in figures[0].axes:
        assert panel.containers[0].lines[0].get_xdata() == pytest.approx([0.5, 0.9, 1.0], abs=0.01)
        assert panel.get_xlabel().startswith("p, share") and not panel.patches


def test_losses_have_95_percent_intervals_and_the_last_value_in_the_legend(figures, tmp_path):
    row = dict(pos_encoding="rope", step=9, loss=2.0, loss_standard_error=0.5, bits_per_byte=3.0, tokens=7000)
    runs = ("a", "b/last.pt", "c", "d")
    rows = [row | dict(seed=seed, run=str(tmp_path / run)) for seed, run in enumerate(runs)]
    lines = plots.loss_table([rows[0], rows[1] | {"loss_standard_error": None}]).splitlines()[1:]
    assert lines[0].split() == ["rope", "0", "9", "2.0000", "±", "0.9800", "3.0000", "7,000"]
    assert lines[1].split() == ["rope", "1", "9", "2.0000", "3.0000", "7,000"]
    first, torn = '{"step": 1, "val_loss": 5}\n', '{"step": 9, "val_lo'
    for run, text in {"a": first + first.replace("1", "9").replace("5", "4"), "b": first + torn, "c": torn}.items():
        (tmp_path / run).mkdir()
        (tmp_path / run / "validation.jsonl").write_text(text)
    plot_losses(rows, tmp_path / "plot.png")  # c was stopped in its first validation, d before it
    (panel,) = figures[0].axes
    assert [line.get_xydata().tolist() for line in panel.get_lines()] == [[[1, 5], [9, 4]], [[1, 5]], [], []]
    labels = [text.get_text().removeprefix("rope, seed ") for text in panel.get_legend().get_texts()]
    assert labels == ["0: 4.000", "1: 5.000", "2: not validated yet", "3: not validated yet"]


def test_losses_of_finetuned_runs_go_from_before_to_after(figures, tmp_path):
    row = dict(pos_encoding="rope", seed=0)
    before = [row | dict(run=run, step=0, loss=loss, start="") for run, loss in (("a", 2.0), ("b", 3.0))]
    after = [
        row | dict(run=r, step=9, loss=x, start=s) for r, x, s in (("c", 1.5, "a"), ("d", 1.75, "a"), ("e", 4, "b"))
    ]
    gone = row | dict(run="f", step=9, loss=5.0, start="gone")
    plot_losses([before[0], *after[:2], before[1], after[2], gone], tmp_path / "plot.png")
    (panel,) = figures[0].axes
    lines = [line.get_xydata().tolist() for line in panel.get_lines()]
    assert lines == [[[0, 2], [9, 1.5]], [[0, 2], [9, 1.75]], [[0, 3], [9, 4]]]


def test_kinds_of_prompts_have_panels_of_their_own(figures, tmp_path):
    plot([row | {"kind": kind} for row in MADE for kind in ("first", "own-line")], tmp_path / "plot.png")
    titles = [panel.get_title() for panel in figures[0].axes]
    assert titles == ["uniform, first", "uniform, own-line"]


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        plots.pyplot()
