"""maps.py: attention against the plain formula; grids against the rule and the recurrence; the pictures."""

import math
from dataclasses import asdict
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import configurator
import data_copy
import maps
import model as decoder
import rope2d
from data_copy import INPUT, NEWLINE, OUTPUT, VOCAB
from eval import teacher_forced
from maps import attention_weights, draw_maps, grid_gates, grid_positions, grid_table, plot_attention, plot_grid
from model import Decoder, ModelConfig

ENCODINGS = ["2d-rope", "auto-2d-rope", "rope", "nope", "alibi", "h-rope"]
EXAMPLE = [NEWLINE, INPUT, 0, 1, 1, NEWLINE, NEWLINE, OUTPUT, 0, 1, 1]


def untrained(encoding: str = "2d-rope", **changes) -> Decoder:
    torch.manual_seed(0)
    values = dict(n_layer=2, n_head=4, n_embd=32, head_dim=16, block_size=90, init_std=0.3, zero_init_outputs=False)
    config = ModelConfig(pos_encoding=encoding, vocab_size=len(VOCAB), **values | changes)
    model = Decoder(config, rope2d.newline_table(data_copy.TOKEN_BYTES)).eval()
    for block in model.blocks:  # as training would leave them: heads of different scales, gates that differ by token
        if hasattr(block.attention, "log_n_scale"):
            torch.nn.init.uniform_(block.attention.log_n_scale, 0.5, 2)
    for module in model.modules():
        if isinstance(module, rope2d.AutoGrid):
            torch.nn.init.normal_(module.proj.weight, std=0.5)
    return model


def prompt(n: int = 20) -> Tensor:
    source = data_copy.evaluation_strings("uniform", n, n, 1, 0)[0]
    return torch.from_numpy(data_copy.pack(source[None], np.array([n]))[0])


def names(tokens: Tensor) -> list[str]:
    return [VOCAB[token] for token in tokens[0]]


@torch.no_grad()
def plain(model: Decoder, tokens: Tensor, layer: int) -> Tensor:
    """(H, T, T): softmax of q k / sqrt(D) under the causal mask, from the layer's input and weights."""
    attention, caught = model.blocks[layer].attention, []
    hook = attention.register_forward_pre_hook(lambda _, args: caught.append(args))
    model(tokens)
    hook.remove()
    (x, place, *_), T, D = caught[0], tokens.shape[1], attention.D
    q, k, _ = (x @ attention.qkv.weight.T)[0].split([attention.H * D, attention.Hkv * D, attention.Hkv * D], dim=-1)
    q, k = q.view(1, T, attention.H, D), k.view(1, T, attention.Hkv, D)
    q, k = attention.q_norm(q), attention.k_norm(k)
    turn = attention.auto(x, place) if attention.auto else place.turns.get(attention.encoding)
    if turn is not None:
        q, k = rope2d.rotate(q, *turn), rope2d.rotate(k, *turn)
    k = k.repeat_interleave(attention.H // attention.Hkv, dim=2)
    logits = torch.einsum("qhd,khd->hqk", q[0].double(), k[0].double()) / math.sqrt(D)
    at = torch.arange(T)
    if attention.log_n:
        logits *= (at + 1).log()[:, None] * attention.log_n_scale[:, None, None]
    if attention.encoding == "alibi":
        logits -= rope2d.alibi_slopes(attention.H)[:, None, None] * (at[:, None] - at)
    return logits.masked_fill(at > at[:, None], -math.inf).softmax(-1)


# Attention weights


@pytest.mark.parametrize("changes", [{}, dict(n_kv_head=2, qk_norm=True, logit_scale="log_n")], ids=["plain", "gqa"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_weights_are_the_plain_softmax_whatever_the_encoding_layer_and_chunk(encoding, changes):
    model, tokens = untrained(encoding, **changes), prompt()
    for layer in 0, 1:
        expected = plain(model, tokens, layer)
        for chunk in 1, 7, 45, 512:
            got = attention_weights(model, tokens, layer, range(4), slice(None), slice(None), chunk)
            assert got.dtype == torch.float32 and got.shape == (4, 45, 45)
            torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)
            assert (got.triu(1) == 0).all()


def test_heads_queries_and_keys_may_be_any_in_any_order():
    model, tokens = untrained("h-rope", n_kv_head=2), prompt()
    full = plain(model, tokens, 1).float()
    for queries, keys in [
        (slice(30, 45), slice(2, 22)),
        (torch.tensor([44, 3, 3, 20]), torch.tensor([9, 40, 0])),
        (torch.tensor([-1]), slice(None, None, 4)),
        (slice(5, 8), torch.tensor([44])),  # a key that none of the queries sees
    ]:
        got = attention_weights(model, tokens, 1, [3, 0], queries, keys, chunk=8)
        torch.testing.assert_close(got, full[[3, 0]][:, queries][:, :, keys], atol=1e-5, rtol=0)


@pytest.mark.parametrize("encoding", ["nope", "alibi"])
def test_without_content_weights_are_uniform_or_fall_by_the_slope(encoding):
    model = untrained(encoding)
    model.blocks[1].attention.qkv.weight.data.zero_()
    distance = torch.arange(20)[:, None] - torch.arange(20)
    slopes = torch.tensor([1 / 4, 1 / 16, 1 / 64, 1 / 256]) if encoding == "alibi" else torch.zeros(4)
    expected = torch.exp(-slopes[:, None, None] * distance).tril()
    got = attention_weights(model, prompt()[:, :20], 1, range(4), slice(None), slice(None), chunk=6)
    torch.testing.assert_close(got, expected / expected.sum(-1, keepdim=True), atol=1e-6, rtol=0)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        made = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, Tensor)]
        self.elements = max([self.elements, *(t.numel() for t in made)])
        return out


def test_long_prompts_take_memory_linear_in_their_length():
    model, largest = untrained(block_size=10_000), {}
    for n in 500, 2000:
        with Largest() as mode:
            got = attention_weights(model, prompt(n), 1, [0, 3], slice(-40, None), slice(0, n), chunk=64)
        assert got.shape == (2, 40, n)
        largest[n] = mode.elements
    assert largest[2000] <= 4.2 * largest[500] and largest[2000] < 4005**2 / 20


def test_the_model_attends_as_before_also_after_an_error(monkeypatch):
    model, tokens, attend = untrained(), prompt(), decoder.attend
    before = model(tokens)
    attention_weights(model, tokens, 0, [0], slice(None), slice(None))
    assert decoder.attend is attend and model(tokens).equal(before)
    monkeypatch.setattr(model.blocks[1], "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        attention_weights(model, tokens, 0, [0], slice(None), slice(None))
    assert decoder.attend is attend


def test_the_copying_weight_is_what_each_head_gives_to_the_token_to_write_next():
    model, n = untrained(), 20
    expected = [[plain(model, prompt(n), layer)[h, n + 4 : 2 * n + 4, 2 : n + 2].diag().mean() for h in range(4)]
                for layer in range(2)]  # fmt: skip
    assert torch.allclose(maps.copying_weights(model, prompt(n)), torch.tensor(expected).float(), atol=1e-5)


def test_a_layer_without_attention_is_judged_as_a_model_whose_output_is_zero():
    model, n = untrained(), 8
    source = data_copy.evaluation_strings("uniform", n, n, 1, 0)[0]
    for layer in range(2):
        other = untrained()
        torch.nn.init.zeros_(other.blocks[layer].attention.out.weight)
        expected = teacher_forced(other, [source], NEWLINE)[0]
        got = maps.without_attention(model, [layer], source, NEWLINE)
        assert got.first_error == expected.first_error and got.margin == pytest.approx(expected.margin, abs=1e-5)
    assert teacher_forced(model, [source], NEWLINE) == teacher_forced(untrained(), [source], NEWLINE)  # left as it was


@pytest.mark.parametrize(
    "changes, match",
    [
        (dict(layer=2), "layer=2: expected 0 to 1"),
        (dict(layer=-1), "layer=-1: expected 0 to 1"),
        (dict(heads=[0, 4]), r"heads=\[0, 4\]: expected one prompt, and heads from 0 to 3"),
        (dict(heads=[]), r"heads=\[\]: expected one prompt"),
        (dict(tokens=prompt().repeat(2, 1)), "2 prompts"),
        (dict(tokens=prompt(43)), "sequence of 91 tokens is longer than the model's block_size=90"),
        (dict(queries=torch.tensor([45])), "positions outside the prompt of 45 tokens: index 45"),
        (dict(keys=slice(50, 60)), r"no positions: slice\(50, 60, None\) takes none of the prompt's 45 tokens"),
    ],
)
def test_what_is_not_there_is_refused(changes, match):
    values = dict(tokens=prompt(), layer=0, heads=[0], queries=slice(None), keys=slice(None)) | changes
    with pytest.raises(ValueError, match=match):
        attention_weights(untrained(), **values)


# Grids


def test_the_grid_of_2d_rope_is_the_rules():
    rows, cols = grid_positions(untrained("h-rope"), torch.tensor([EXAMPLE]), 1)  # rope2d.py's opening picture
    assert rows.tolist() == [0, 1, 1, 1, 1, 1, 2, 3, 3, 3, 3] and rows.dtype == torch.float64
    assert cols.tolist() == [0, 0, 1, 2, 3, 4, 0, 0, 1, 2, 3] and cols.dtype == torch.float64
    rows, cols = grid_positions(untrained(grid_reset=OUTPUT), torch.tensor([EXAMPLE]), 0)
    assert rows.tolist()[-4:] == [3, 0, 0, 0] and cols.tolist()[-4:] == [0, 0, 1, 2]


@pytest.mark.parametrize("gate", ["saturating", "sigmoid"])
@pytest.mark.parametrize("n, layer", [(20, 0), (20, 1), (600, 0)])  # 600: three of prefill's chunks
def test_a_learned_grid_follows_its_gates_by_the_recurrence(gate, n, layer):
    model, tokens = untrained("auto-2d-rope", auto_gate=gate, block_size=2000), prompt(n)
    grid, states = (model.auto or model.blocks[layer].attention.auto).grid, []
    hook = grid.register_forward_pre_hook(lambda _, args: states.append(args[0]))
    with torch.no_grad():
        model(tokens)
        hook.remove()
        z = (states[0][0] @ grid.proj.weight.T + grid.proj.bias).sigmoid()  # (T, 1 or 2)
    A = (1.6 * z[:, 0] - 0.3).clamp(0, 1) if gate == "saturating" else z[:, 0]
    B = z[:, 1] if gate == "sigmoid" else torch.ones(len(A))
    gates = grid_gates(model, tokens, layer)
    torch.testing.assert_close(gates, A, atol=1e-5, rtol=0)
    assert gates.std() > 0.05
    row, col, places = 0.0, 0.0, []
    for a, b in zip(A.tolist(), B.tolist(), strict=True):
        places.append((row, col))
        row, col = row + 1 - a, a * col + b
    got = torch.stack(grid_positions(model, tokens, layer), dim=1)
    torch.testing.assert_close(got, torch.tensor(places, dtype=torch.float64), atol=1e-3, rtol=1e-4)


def test_layers_without_a_grid_and_learned_gates_of_a_rule_are_refused():
    for layer, encoding in enumerate(["rope", "nope", "alibi"]):
        model = untrained("rope+nope+alibi+2d-rope", n_layer=4)
        with pytest.raises(ValueError, match=f"layer {layer} is {encoding}: it has no grid; layers of 2d-rope and"):
            grid_positions(model, prompt(), layer)
        with pytest.raises(ValueError, match=f"layer {layer} is {encoding}: it has no grid"):
            plot_grid(model, prompt(), names(prompt()), layer, Path("unwritten.png"))
    with pytest.raises(ValueError, match="layer 3 is 2d-rope: it learns no grid; layers of auto-2d-rope do"):
        grid_table(model, prompt(), names(prompt()), 3)
    with pytest.raises(ValueError, match="layer=4: expected 0 to 3"):
        grid_positions(model, prompt(), 4)


def test_the_table_has_the_range_of_gates_of_each_token():
    model, tokens = untrained("auto-2d-rope", auto_gate="sigmoid"), torch.tensor([EXAMPLE])
    for layer in 0, 1:
        gates = grid_gates(model, tokens, layer)
        head, *lines = grid_table(model, tokens, names(tokens), layer).splitlines()
        assert f"layer {layer}" in head
        assert [line.split()[:2] for line in lines] == [["0", "2"], ["1", "4"], ["<n>", "3"], ["I:", "1"], ["O:", "1"]]
        for line, where in zip(lines, [[2, 8], [3, 4, 9, 10], [0, 5, 6], [1], [7]], strict=True):
            assert line.split()[2] == f"{gates[where].min():.6f}..{gates[where].max():.6f}"
    assert len({*lines[1].split()[2].split("..")}) == 2  # in layer 1 a token's gate depends on what is before it


# Pictures


@pytest.fixture
def figures(monkeypatch) -> list[plt.Figure]:
    """The figures that are drawn, kept open until the test ends."""
    kept, close = [], plt.close
    monkeypatch.setattr(plt, "close", kept.append)
    yield kept
    close("all")


def overlaps(figure: plt.Figure, texts: list[plt.Text]) -> list[tuple[str, str]]:
    boxes = [(text.get_text(), text.get_window_extent(figure.canvas.get_renderer())) for text in texts]
    return [(a, b) for i, (a, x) in enumerate(boxes) for b, y in boxes[:i] if x.overlaps(y)]


def inside(figure: plt.Figure, text: plt.Text) -> bool:
    box = text.get_window_extent(figure.canvas.get_renderer())
    return box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1


def test_an_attention_map_has_a_labelled_panel_a_head_and_one_stated_scale(figures, tmp_path):
    model, tokens = untrained("auto-2d-rope"), prompt()
    plot_attention(model, tokens, names(tokens), 1, [2, 0], tmp_path / "a.png", slice(24, 45), slice(0, 26), "out/x")
    figure, weights = figures[0], attention_weights(model, tokens, 1, [2, 0], slice(24, 45), slice(0, 26))
    *panels, bar = figure.axes
    assert [panel.get_title() for panel in panels] == ["layer 1, head 2", "layer 1, head 0"]
    assert figure.get_suptitle() == "out/x\nauto-2d-rope, prompt of 45 tokens" and inside(figure, figure._suptitle)
    assert bar.get_ylabel() == "attention weight" and bar.get_ylim() == pytest.approx((0, weights.max().item()))
    for panel, expected in zip(panels, weights, strict=True):
        np.testing.assert_array_equal(panel.images[0].get_array(), expected)
        assert panel.images[0].get_clim() == pytest.approx((0, weights.max().item()))
        assert [t.get_text() for t in panel.get_yticklabels()] == names(tokens)[24:45]
        assert [t.get_text() for t in panel.get_xticklabels()] == names(tokens)[:26]
        assert (panel.get_ylabel(), panel.get_xlabel()) == ("query, 24 to 44", "key, 0 to 25")
        assert not overlaps(figure, panel.get_yticklabels()) and not overlaps(figure, panel.get_xticklabels())
    assert plt.imread(tmp_path / "a.png").std() > 0


def test_a_map_of_a_long_prompt_is_thinned_and_says_so(figures, tmp_path):
    model, tokens = untrained(block_size=2000), prompt(600)
    plot_attention(model, tokens, names(tokens), 0, [1], tmp_path / "a.png")
    panel = figures[0].axes[0]
    assert panel.get_xlabel() == "key, 0 to 1,204: largest of 4 neighbours"
    assert panel.get_ylabel() == "query, 0 to 1,204: one in 4"
    weights = attention_weights(model, tokens, 0, [1], slice(None, None, 4), slice(None))[0]
    pooled = torch.stack([part.amax(-1) for part in weights.split(4, dim=-1)], dim=-1)
    np.testing.assert_array_equal(panel.images[0].get_array(), pooled)
    assert [t.get_text() for t in panel.get_xticklabels()] == ["0", "320", "640", "960"]


@pytest.mark.parametrize("encoding", ["2d-rope", "auto-2d-rope"])
def test_a_grid_picture_has_each_token_at_its_place_and_nothing_overlaps(figures, tmp_path, encoding):
    model, tokens = untrained(encoding), prompt()
    if encoding == "auto-2d-rope":
        model.auto.grid.settled.fill_(True)
    rows, cols = grid_positions(model, tokens, 0)
    plot_grid(model, tokens, names(tokens), 0, tmp_path / "g.png", "out/x")
    figure, panel = figures[0], figures[0].axes[0]
    texts = [t for t in panel.texts if t.get_fontsize() == 9]
    assert [t.get_text() for t in texts] == names(tokens)
    assert [t.get_position() for t in texts] == list(zip(cols.tolist(), rows.tolist(), strict=True))
    below = [t.get_text() for t in panel.texts if t.get_fontsize() != 9]
    assert below == ([f"{a:.0f}" for a in grid_gates(model, tokens, 0)] if encoding == "auto-2d-rope" else [])
    note = "; small: the gate A" if below else ""
    assert panel.get_title() == f"out/x\nlayer 0, {encoding}; prompt of 45 tokens{note}"
    assert not overlaps(figure, panel.texts) and all(inside(figure, t) for t in [*panel.texts, panel.title])
    assert panel.yaxis_inverted() and plt.imread(tmp_path / "g.png").std() > 0


def test_gates_that_are_almost_0_or_1_are_told_from_those_that_are(figures, tmp_path, monkeypatch):
    monkeypatch.setattr(maps, "grid_gates", lambda *_: torch.tensor([0, 1, 1 - 1e-6, 1e-6, 0.25] + [1.0] * 6))
    tokens = torch.tensor([EXAMPLE])
    plot_grid(untrained("auto-2d-rope"), tokens, names(tokens), 0, tmp_path / "g.png")
    below = [t.get_text() for t in figures[0].axes[0].texts if t.get_fontsize() != 9]
    assert below[:5] == ["0", "1", "1.000", "0.000", "0.250"]


def test_a_grid_picture_of_a_long_prompt_shows_its_first_columns_and_says_so(figures, tmp_path):
    model, tokens = untrained(block_size=2000), prompt(600)
    plot_grid(model, tokens, names(tokens), 0, tmp_path / "g.png")
    panel = figures[0].axes[0]
    assert "1,205 tokens, 66 of them shown: rows and columns below 32" in panel.get_title()  # 1 + 32 + 1 + 32
    assert len(panel.texts) == 66 and max(t.get_position()[0] for t in panel.texts) == 31


# The command


def saved(model: Decoder, folder: Path, separator: str = "<n>") -> str:
    folder.mkdir(parents=True)
    config = asdict(model.config) | dict(separator=separator)
    torch.save(dict(model=model.state_dict(), config=config, step=0), folder / "last.pt")
    return str(folder)


def test_each_run_gets_its_pictures_of_the_string_heads_and_windows_that_were_asked_for(figures, tmp_path, capsys):
    runs = [
        saved(untrained("2d-rope"), tmp_path / "a" / "run"),
        saved(untrained("auto-2d-rope"), tmp_path / "b" / "run", "*"),
        saved(untrained("h-rope"), tmp_path / "c"),
    ]
    argv = [f"--runs={','.join(runs)}", "--length=9", "--layer=0", "--map_task=recursive-flip"]
    argv += ["--heads=3,1", "--queries=13,22", "--keys=0,12", f"--out_dir={tmp_path}", "--device=cpu"]
    draw_maps(configurator.configure(maps.MapConfig, argv=argv))
    out = capsys.readouterr().out
    source = names(torch.from_numpy(data_copy.evaluation_strings("recursive-flip", 9, 9, 1, 0)[0])[None])
    attention, layers, grid, attention_star, _, grid_star, attention_rope, _ = figures
    for run, figure, end in zip(runs, (attention, attention_star, attention_rope), ("<n>", "*", "<n>"), strict=True):
        folder = tmp_path / run.strip("/").replace("/", "-")
        assert figure.get_suptitle().startswith(f"{run}\n") and (folder / "attention.png").is_file()
        panels = figure.axes[:-1]
        assert [panel.get_title() for panel in panels] == ["layer 0, head 3", "layer 0, head 1"]
        assert [t.get_text() for t in panels[0].get_yticklabels()] == ["O:", *source]
        assert [t.get_text() for t in panels[0].get_xticklabels()] == [end, "I:", *source, end, end]
        assert (folder / "grid.png").is_file() == (run != runs[2])
    assert [f.axes[0].get_title().split("\n")[0] for f in (grid, grid_star)] == runs[:2]
    assert len(layers.axes[0].texts) == 2 * 4 and "a string of 9 tokens" in layers.get_suptitle()
    assert f"no grid: layer 0 of {runs[2]} is rope" in out
    assert out.count("gate A in layer 0") == 1 and any(line.split()[:2] == ["*", "3"] for line in out.splitlines())


@pytest.mark.parametrize(
    "changes, match",
    [
        (dict(runs=()), "nothing to draw: give --runs=DIR"),
        (dict(layer=2), "layer=2: expected 0 to 1"),
        (dict(heads=(4,)), r"heads=\(4,\)"),
        (dict(queries=(40, 45)), "positions outside the prompt of 45 tokens"),
        (dict(keys=(9, 8)), "no positions"),
        (dict(length=43), "sequence of 91 tokens is longer"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, changes, match):
    values = dict(runs=(saved(untrained(), tmp_path / "run"),), out_dir=str(tmp_path), device="cpu") | changes
    with pytest.raises(ValueError, match=match):
        draw_maps(maps.MapConfig(**values))
