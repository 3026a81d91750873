"""scripts/maps.py: attention against the layers' own output, grids against the rule and the forward; the pictures."""

from dataclasses import asdict
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import data_copy
import eval as evaluation
import rope2d
from data_copy import INPUT, NEWLINE, OUTPUT, VOCAB
from model import Decoder, ModelConfig
from scripts import maps
from scripts.maps import attention_weights, grid_of, plot_attention, plot_grid, plot_layers
from tokenizer import load_tokenizer

ENCODINGS = ["2d-rope", "auto-2d-rope", "rope", "nope", "alibi", "h-rope"]
EXAMPLE = [NEWLINE, INPUT, 0, 1, 1, NEWLINE, NEWLINE, OUTPUT, 0, 1, 1]  # rope2d.py's opening picture
ALL = torch.arange(45)  # positions of prompt()


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def untrained(encoding: str = "2d-rope", **changes) -> Decoder:
    torch.manual_seed(0)
    values = dict(n_layer=2, n_head=4, n_embd=32, head_dim=16, block_size=90, init_std=0.3, zero_init_residual=False)
    config = ModelConfig(pos_encoding=encoding, vocab_size=len(VOCAB), **values | changes)
    model = Decoder(config, rope2d.break_table(data_copy.TOKEN_BYTES)).eval()
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


def sample(n: int = 20) -> maps.Sample:
    source = data_copy.evaluation_strings("uniform", n, n, 1, 0)[0]
    inputs, targets = data_copy.pack([source], [n])
    at = torch.arange(n)
    return maps.Sample(torch.from_numpy(inputs), targets, [VOCAB[token] for token in inputs[0]], 2 + at, n + 4 + at)


def names(tokens: Tensor) -> list[str]:
    return [VOCAB[token] for token in tokens[0]]


# Attention weights


@pytest.mark.parametrize("changes", [{}, dict(n_kv_head=2, qk_norm=True, logit_scale="log_n")], ids=["plain", "gqa"])
@pytest.mark.parametrize("encoding", ENCODINGS)
@torch.no_grad()
def test_values_times_weights_are_the_layers_own_output(encoding, changes):
    """With fewer tokens than channels of a head no other weights would do."""
    model, tokens, seen = untrained(encoding, **changes), prompt(5), {}
    T, H, Hkv, D = 15, 4, model.config.kv_heads, 16
    for layer, block in enumerate(model.blocks):
        hooks = block.attention.qkv, block.attention.out
        with (
            hooks[0].register_forward_hook(lambda _, inputs, output: seen.update(qkv=output)),
            hooks[1].register_forward_pre_hook(lambda _, inputs: seen.update(y=inputs[0])),
        ):
            model(tokens)
        v = seen["qkv"].view(T, H + 2 * Hkv, D)[:, H + Hkv :].repeat_interleave(H // Hkv, dim=1)
        for chunk in 1, 7, 512:
            weights = attention_weights(model, tokens, layer, range(4), ALL[:T], ALL[:T], chunk)
            assert weights.dtype == torch.float32 and (weights.triu(1) == 0).all()
            y = torch.einsum("hqk,khd->qhd", weights, v)
            torch.testing.assert_close(y.flatten(1), seen["y"][0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "queries, keys", [(ALL[30:], ALL[2:22]), (ALL[[44, 3, 3, 20]], ALL[[9, 40]]), (ALL[5:8], ALL[44:])]
)
def test_heads_queries_and_keys_may_be_any_in_any_order(queries, keys):
    model, tokens = untrained("h-rope", n_kv_head=2), prompt()
    got = attention_weights(model, tokens, 1, [3, 0], queries, keys, chunk=8)
    expected = attention_weights(model, tokens, 1, range(4), ALL, ALL)[[3, 0]][:, queries][:, :, keys]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, kinds, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else [out]:
            self.elements = max(self.elements, made.numel() if isinstance(made, Tensor) else 0)
        return out


def test_long_prompts_take_memory_linear_in_their_length():
    model = untrained(block_size=5_000)
    with Largest() as largest:
        attention_weights(model, prompt(2000), 1, [0, 3], torch.arange(4005), ALL, chunk=64)
    assert largest.elements < 4 * 64 * 4005 * 2  # heads x chunk x keys


def test_the_copying_weight_is_what_each_head_gives_to_the_token_to_write_next():
    model, n = untrained(), 20
    expected = []
    for layer in range(2):
        weights = attention_weights(model, prompt(n), layer, range(4), ALL, ALL)
        expected.append([sum(head[n + 4 + i, 2 + i] for i in range(n)) / n for head in weights])
    torch.testing.assert_close(maps.copying_weights(model, sample(n)), torch.tensor(expected), atol=1e-5, rtol=0)


def test_a_layer_without_attention_is_judged_as_a_model_whose_output_is_zero():
    model, source = untrained(), data_copy.evaluation_strings("uniform", 8, 8, 1, 0)[0]
    before = evaluation.teacher_forced(model, [source], NEWLINE)[0]
    for layer in range(2):
        hook = lambda _, inputs, output: torch.zeros_like(output)  # noqa: E731
        with model.blocks[layer].attention.register_forward_hook(hook):
            expected = evaluation.teacher_forced(model, [source], NEWLINE)[0]
        right = 1 - expected.errors / expected.targets
        assert maps.right_without(model, [layer], sample(8)) == right and expected != before
    assert evaluation.teacher_forced(model, [source], NEWLINE)[0] == before  # left as it was


# Grids


def test_the_grid_of_2d_rope_is_the_rules():
    rows, cols, gates = grid_of(untrained("h-rope"), torch.tensor([EXAMPLE]), 1)
    assert rows.tolist() == [0, 1, 1, 1, 1, 1, 2, 3, 3, 3, 3] and rows.dtype == torch.float64
    assert cols.tolist() == [0, 0, 1, 2, 3, 4, 0, 0, 1, 2, 3] and gates is None
    rows, cols, _ = grid_of(untrained(grid_reset=OUTPUT), torch.tensor([EXAMPLE]), 0)
    assert rows.tolist()[-4:] == [3, 0, 0, 0] and cols.tolist()[-4:] == [0, 0, 1, 2]


@pytest.mark.parametrize("gate, layer", [("saturating", 0), ("saturating", 1), ("sigmoid", 0), ("sigmoid", 1)])
@torch.no_grad()
def test_a_learned_grid_and_its_gates_are_those_of_the_forward(gate, layer):
    model, tokens, seen = untrained("auto-2d-rope", auto_gate=gate, block_size=2000), prompt(600), []
    grid = (model.auto or model.blocks[layer].attention.auto).grid
    with grid.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output[0]))):
        model(tokens)  # all at once
    x, positions = seen[0]
    rows, cols, gates = grid_of(model, tokens, layer)
    torch.testing.assert_close(gates, grid.gates(x)[0][0], atol=1e-5, rtol=0)
    assert gates.std() > 0.02
    torch.testing.assert_close(torch.stack([rows, cols]), positions[[1, 2], 0], atol=1e-3, rtol=1e-4)


# Pictures


def labels_of(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def test_an_attention_map_has_a_labelled_panel_a_head_and_one_stated_scale():
    model, tokens = untrained("auto-2d-rope"), prompt()
    figure = plot_attention(model, sample(), 1, [2, 0], ALL[24:], ALL[:26], "out/x")
    weights = attention_weights(model, tokens, 1, [2, 0], ALL[24:], ALL[:26])
    *panels, bar = figure.axes
    assert [panel.get_title() for panel in panels] == ["layer 1, head 2", "layer 1, head 0"]
    assert figure.get_suptitle() == "out/x\nauto-2d-rope, prompt of 45 tokens"
    assert bar.get_ylabel() == "attention weight" and bar.get_ylim() == pytest.approx((0, weights.max().item()))
    for panel, expected in zip(panels, weights, strict=True):
        np.testing.assert_array_equal(panel.images[0].get_array(), expected)
        assert panel.images[0].get_clim() == pytest.approx((0, weights.max().item()))
        assert (labels_of(panel.yaxis), labels_of(panel.xaxis)) == (names(tokens)[24:45], names(tokens)[:26])
        assert (panel.get_ylabel(), panel.get_xlabel()) == ("query, 24 to 44", "key, 0 to 25")


def test_a_map_of_a_long_prompt_is_thinned_and_says_so():
    model, tokens, at = untrained(block_size=2000), prompt(600), torch.arange(1205)
    panel = plot_attention(model, sample(600), 0, [1], at, at, "").axes[0]
    assert panel.get_xlabel() == "key, 0 to 1,204: largest of 4 neighbours"
    assert panel.get_ylabel() == "query, 0 to 1,204: one in 4"
    weights = attention_weights(model, tokens, 0, [1], at[::4], at)[0]
    pooled = torch.stack([part.amax(-1) for part in weights.split(4, dim=-1)], dim=-1)
    np.testing.assert_array_equal(panel.images[0].get_array(), pooled)
    assert labels_of(panel.xaxis) == labels_of(panel.yaxis) == ["0", "320", "640", "960"]


def test_beside_each_layer_stands_what_is_right_without_it_and_without_the_others(monkeypatch):
    right = {frozenset({0}): 0.9, frozenset({1}): 0.7}
    monkeypatch.setattr(maps, "right_without", lambda model, layers, _: right[frozenset(layers)])
    model = untrained()
    figure = plot_layers(model, sample(), "out/x")
    panel, (right,) = figure.axes[0], figure.axes[0].child_axes
    assert labels_of(right.yaxis) == ["90% / 70%", "70% / 90%"]
    written = {(text.get_position()): text.get_text() for text in panel.texts}
    weights = maps.copying_weights(model, sample())
    assert written == {(head, layer): f"{weights[layer, head]:.2f}" for layer in range(2) for head in range(4)}
    assert figure.get_suptitle() == "out/x\n2d-rope, a string of 20 tokens"


def test_a_grid_picture_has_each_token_at_its_place_and_its_gate_below():
    model, tokens = untrained("auto-2d-rope"), prompt()
    model.auto.grid.freeze()
    rows, cols, learned = grid_of(model, tokens, 0)
    for gates in learned, None:
        figure = plot_grid(rows, cols, gates, names(tokens), "a title")
        (panel,) = figure.axes
        texts = [text for text in panel.texts if text.get_fontsize() == 9]
        assert [text.get_text() for text in texts] == names(tokens)
        assert [text.get_position() for text in texts] == list(zip(cols.tolist(), rows.tolist(), strict=True))
        below = [text.get_text() for text in panel.texts if text.get_fontsize() != 9]
        assert below == ([] if gates is None else [f"{gate:.0f}" for gate in gates])
        assert panel.get_title() == "a title; prompt of 45 tokens" + ("; small: the gate A" if below else "")
        assert panel.yaxis_inverted()


def test_a_grid_picture_of_a_long_prompt_shows_its_first_columns_and_says_so():
    tokens = prompt(600)
    panel = plot_grid(*grid_of(untrained(block_size=2000), tokens, 0), names(tokens), "").axes[0]
    assert "1,205 tokens, 66 of them shown: rows and columns below 32" in panel.get_title()  # 1 + 32 + 1 + 32
    assert len(panel.texts) == 66 and max(text.get_position()[0] for text in panel.texts) == 31


# The command


def saved(model: Decoder, folder: Path, separator: str = "<n>", **data) -> str:
    folder.mkdir(parents=True)
    config = asdict(model.config) | dict(separator=separator, task="pretrain" if data else "copy")
    saved = dict(model=model.state_dict(), config=config, step=0, data=data or {"vocabulary": VOCAB})
    torch.save(saved, folder / "last.pt")
    return str(folder)


def command(monkeypatch, *runs: str, **flags) -> None:
    given = {"runs": ",".join(runs), "device": "cpu"} | flags
    monkeypatch.setattr("sys.argv", ["maps.py", *(f"--{name}={value}" for name, value in given.items())])
    maps.main()


def test_each_run_gets_its_pictures_of_the_string_heads_and_windows_that_were_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = [
        saved(untrained("2d-rope"), Path("a/run")),
        saved(untrained("auto-2d-rope"), Path("b/run"), "*"),
        saved(untrained("h-rope", n_layer=1), Path("c")),
    ]
    figures = []
    monkeypatch.setattr(plt, "close", figures.append)
    flags = dict(length=9, layer=0, map_task="recursive-flip", heads="3,1", queries="13,22", keys="0,12")
    command(monkeypatch, *runs, **flags)
    out = capsys.readouterr().out
    written = sorted(str(path.relative_to("out/maps")) for path in Path("out/maps").rglob("*.png"))
    own = [f"{run}/{name}.png" for run in ("a-run", "b-run") for name in ("attention", "grid", "layers")]
    assert written == [*own, "c/attention.png"] and f"no grid: layer 0 of {runs[2]} is rope" in out
    source = names(torch.from_numpy(data_copy.evaluation_strings("recursive-flip", 9, 9, 1, 0)[0])[None])
    attention, layers, grid, attention_star, _, grid_star, attention_rope = figures
    for run, figure, end in zip(runs, (attention, attention_star, attention_rope), ("<n>", "*", "<n>"), strict=True):
        assert figure.get_suptitle().startswith(f"{run}\n")
        panel, other, _ = figure.axes
        assert (panel.get_title(), other.get_title()) == ("layer 0, head 3", "layer 0, head 1")
        assert labels_of(panel.yaxis) == ["O:", *source]
        assert labels_of(panel.xaxis) == [end, "I:", *source, end, end]
    assert grid.axes[0].get_title().startswith("a/run\nlayer 0, 2d-rope; prompt of 23 tokens")
    assert grid_star.axes[0].get_title().startswith("b/run\nlayer 0, auto-2d-rope; prompt of 23 tokens")
    assert layers.get_suptitle().endswith("a string of 9 tokens")
    assert [len(figure.axes[0].texts) for figure in (grid, grid_star)] == [23, 2 * 23]  # the gates, too


@pytest.mark.parametrize("kind, start", [("own-line", "\n"), ("first", ""), ("mid-sentence", " ")])
def test_in_text_the_string_and_its_copy_are_found_in_a_prompt_of_the_kind(tmp_path, monkeypatch, kind, start):
    monkeypatch.chdir(tmp_path)
    bytes_ = load_tokenizer("bytes")
    values = dict(n_layer=2, n_embd=32, n_head=2, head_dim=16, block_size=400, vocab_size=bytes_.vocab_size)
    model = Decoder(ModelConfig(pos_encoding="2d-rope+4d-rope", **values), rope2d.break_table(bytes_.token_bytes))
    trained = {
        "task": "finetune",
        "tokenizer": "bytes",
        "symbols": ["a", "b"],
        "data": {"tokenizer": bytes_.fingerprint},
    }
    config = maps.MapConfig(runs=("x",), length=12, kind=kind)
    drawn = maps.sample_of("x", model, trained, config)
    text = "".join(drawn.labels).replace("\\n", "\n")
    read = drawn.tokens[0, drawn.source].tolist()
    assert set(read) == set(b"ab") and bytes_.decode(read) in text and len(read) == 12
    assert drawn.targets[0, drawn.writing].tolist() == read and drawn.targets[0, drawn.writing[-1] + 1] == bytes_.eos
    before = text[: int(drawn.source[0])]
    assert before.endswith(start) and bool(before) == (kind != "first")
    for layer, col in ((0, rope2d.COL), (1, rope2d.LETTER)):  # the grid of lines, that of words
        rows, cols, gates = grid_of(model, drawn.tokens, layer)
        assert cols.tolist() == rope2d.grid(drawn.tokens, model.breaks)[0][col, 0].tolist() and gates is None


@pytest.mark.parametrize(
    "flags, match",
    [
        (dict(runs="()"), "nothing to draw: give --runs=DIR"),
        (dict(length=0), "length=0"),
        (dict(layer=2), "layer=2: expected 0 to 1"),
        (dict(heads="0,4"), r"heads=\(0, 4\): expected 0 to 3"),
        (dict(queries="40,45"), r"queries=\(40, 45\): the prompt has positions 0 to 44"),
        (dict(keys="9,8"), "keys=9,8: expected two positions in the prompt, from 0, rising"),
        (dict(length=43), "sequence of 91 tokens is longer"),
        (dict(runs="text"), "text: has not learned to copy; expected a run with task='copy' or task='finetune'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, monkeypatch, flags, match):
    monkeypatch.chdir(tmp_path)
    saved(untrained(), Path("text"), tokenizer={"size": 37})
    with pytest.raises(ValueError, match=match):
        command(monkeypatch, saved(untrained(), Path("run")), **flags)
    assert not Path("out").exists()
