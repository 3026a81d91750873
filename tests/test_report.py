"""report.py: tables and pictures of made rows, intervals against known values."""

import matplotlib.image
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from report import parse_length, plot, table, wilson


@pytest.mark.parametrize(
    "hits, n, low, high",
    [(0, 10, 0, 0.2775), (10, 10, 0.7225, 1), (5, 10, 0.2366, 0.7634), (1, 1, 0.2065, 1), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_interval_has_the_known_values(hits, n, low, high):
    assert wilson(hits, n) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize("text, bounds", [(20, (20, 20)), ("20", (20, 20)), ("26-50", (26, 50)), ("7-7", (7, 7))])
def test_a_length_is_a_number_or_an_interval(text, bounds):
    assert parse_length(text) == bounds


@pytest.mark.parametrize("text", [0, -5, "0-4", "50-26", "long", "1-2-3", "", "2.5", "26-", "-26"])
def test_a_length_that_is_neither_is_refused(text):
    with pytest.raises(ValueError, match=f"lengths: {text!r} is neither a length"):
        parse_length(text)


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


def test_the_table_has_a_line_a_run_with_the_numbers():
    head, first, second = table(MADE).splitlines()
    assert head.split()[-2:] == ["20", "21-50"]
    assert first.split() == ["2d-rope", "0", "uniform", "100%", "(4/4)", "75%", "(6/8)"]
    assert second.split() == ["rope", "7", "uniform", "50%", "(2/4)", "0%", "(0/8)"]


def test_kinds_and_shares_of_repetition_have_lines_of_their_own():
    rows = [MADE[0] | {"kind": kind, "repeat_p": p} for kind in ("first", None) for p in (0.5, 1.0, None)]
    names = ["uniform, first, p 0.5", "uniform, first, p 1", "uniform, first", "uniform, p 0.5", "uniform, p 1"]
    for line, name in zip(table(rows).splitlines()[1:], [*names, "uniform"], strict=True):
        assert line.split() == ["2d-rope", "0", *name.split(), "100%", "(4/4)"]


def test_the_plot_is_a_picture_with_a_line_an_encoding(tmp_path):
    plot(MADE, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = matplotlib.image.imread(tmp_path / "plot.png")[..., :3]
    assert pixels.shape[0] > 300 and pixels.shape[1] > 300
    counts = [int((np.abs(pixels - to_rgb(colour)).max(-1) < 0.01).sum()) for colour in ("C0", "C1", "C2")]
    assert counts[0] > 100 and counts[1] > 100 and counts[2] == 0


def test_the_plot_has_a_second_row_of_margins_where_they_are_known(tmp_path):
    heights = []
    for margins in ((None, None, None, None), (3.0, 2.0, None, -1.0)):
        rows = [row | {"margin": margin} for row, margin in zip(MADE, margins, strict=True)]
        plot(rows, tmp_path / "plot.png")
        heights.append(matplotlib.image.imread(tmp_path / "plot.png").shape[0])
    assert heights[1] > 1.5 * heights[0]


def test_several_shares_of_repetition_are_plotted_against_them(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    monkeypatch.setattr(plt.Figure, "savefig", lambda *_, **__: None)
    rows = [row | {"repeat_p": p, "trained_to": None} for row in MADE for p in (0.5, 0.9, 1.0)]
    plot(rows, tmp_path / "plot.png")
    assert [panel.get_title() for panel in figures[0].axes] == ["length 20", "length 21-50"]
    lines = [list(map(float, line.get_xdata())) for panel in figures[0].axes for line in panel.get_lines()[:1]]
    assert lines == [pytest.approx([0.5, 0.9, 1.0], abs=0.01)] * 2


def test_an_encoding_has_its_colour_and_its_name_in_the_legend_in_whatever_panels_it_is(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    monkeypatch.setattr(plt.Figure, "savefig", lambda *_, **__: None)
    rows = [row | {"panel": "first"} for row in MADE] + [row | {"panel": "second"} for row in MADE[2:]]
    plot(rows, tmp_path / "plot.png")
    colours = [[line.get_color() for line in panel.get_lines() if len(line.get_xdata())] for panel in figures[0].axes]
    assert [set(own) for own in colours] == [{"C0", "C1"}, {"C1"}]
    assert [text.get_text() for text in figures[0].axes[-1].get_legend().get_texts()] == ["2d-rope", "rope"]


def test_what_was_not_tried_has_no_interval(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    monkeypatch.setattr(plt.Figure, "savefig", lambda *_, **__: None)
    plot(MADE[:3] + [MADE[3] | {"left_out": True}], tmp_path / "plot.png")
    ends = [container.lines[2][0].get_segments() for container in figures[0].axes[0].containers]
    assert [[len(bar) > 0 for bar in bars] for bars in ends] == [[True, True], [True, False]]
