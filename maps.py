"""Attention maps and grids of a trained model, as pictures.

    python maps.py --runs=out/toy_copy/2d-rope,out/toy_copy/rope --length=20
    python maps.py --runs=out/toy_copy/2d-rope --length=5120 --queries=5600,5640 --keys=480,520      # a window of it

Writes attention.png (paper, figures 3 and 8); of several layers layers.png, which of them copies; and, where the layer
has a grid, grid.png: the tokens at their row and column. A learned grid is printed as well, as the gate A of each
token. Nothing of size T x T is made, but by layers.png, n x n for a string of n.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import configurator
import data_copy
import model as decoder
import rope2d
from data_copy import SEPARATORS, VOCAB
from eval import Verdict, check_length, load_run, teacher_forced
from model import Attention, Decoder
from train import pick_device


@dataclass
class MapConfig:
    """Maps"""

    runs: tuple[str, ...] = ()  # run directories or checkpoint files
    checkpoint: Literal["last", "best"] = "last"  # which of a run directory's
    map_task: Literal["imbalanced", "recursive-flip", "uniform", "repeat-structure"] = "imbalanced"  # string to draw
    length: int = 20  # tokens in that string; the prompt has 2 x length + 5
    layer: int = 0  # layer to draw, from 0
    heads: tuple[int, ...] = ()  # query heads to draw, from 0; none named: all
    queries: tuple[int, int] | None = None  # first and last query position to draw; None: all
    keys: tuple[int, int] | None = None  # first and last key position to draw; None: all
    eval_seed: int = 0  # of the string
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: the first of these that there is
    out_dir: str = "out/maps"  # the pictures go here, in a folder for each run

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"length={self.length}: expected at least 1")


Window = slice | Tensor  # of positions
ALL = slice(None)
MAX_PIXELS, MAX_TICKS, MAX_CELLS = 400, 48, 32  # of a map; of them labelled with tokens; rows and columns of a grid


def attention_of(model: Decoder, layer: int) -> Attention:
    if not 0 <= layer < len(model.blocks):
        raise ValueError(f"layer={layer}: expected 0 to {len(model.blocks) - 1}")
    return model.blocks[layer].attention


def choose(window: Window, tokens: int, device: torch.device | None = None) -> Tensor:
    """The positions, int64, that a window takes of a prompt. ValueError if there are none, or some lie outside."""
    try:
        chosen = torch.arange(tokens, device=device)[window]
    except IndexError as error:
        raise ValueError(f"positions outside the prompt of {tokens} tokens: {error}") from error
    if not len(chosen):
        raise ValueError(f"no positions: {window} takes none of the prompt's {tokens} tokens")
    return chosen


@torch.no_grad()
def attention_weights(
    model: Decoder, tokens: Tensor, layer: int, heads: Sequence[int], queries: Window, keys: Window, chunk: int = 512
) -> Tensor:
    """Attention weights of a layer on one prompt (1, T): (heads, queries, keys) float32, causal, softmax over all keys.

    The model's own forward gives q and k, `chunk` tokens at a time: every encoding as the model has it, and memory
    linear in T. ValueError for a layer, heads or positions that are not there, and beyond block_size.
    """
    attention, at = attention_of(model, layer), choose(ALL, tokens.shape[1], tokens.device)
    queries, keys = (choose(window, len(at), tokens.device) for window in (queries, keys))
    check_length(model, len(at))
    if len(tokens) != 1 or not heads or not all(0 <= head < attention.H for head in heads):
        raise ValueError(f"{len(tokens)} prompts, {heads=}: expected one prompt, and heads from 0 to {attention.H - 1}")
    weights = torch.zeros(len(heads), len(queries), len(keys), device=tokens.device)
    calls, cache, attend = [], model.new_cache(), decoder.attend

    def watched(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        calls.append((q, k, scale))
        return attend(q, k, v, mask, scale)

    decoder.attend = watched
    try:
        for start in range(0, int(queries.max()) + 1, chunk):
            rows = ((queries >= start) & (queries < start + chunk)).nonzero()[:, 0]
            calls.clear()
            model.hidden(tokens[:, start : start + chunk], cache, keys_only=not len(rows))
            if len(rows):
                q, k, scale = calls[layer]  # (1, H, chunk, D), (1, Hkv, keys so far, D)
                q = q[0, list(heads)][:, queries[rows] - start].float()  # (heads, rows, D)
                k = k[0, [head * attention.Hkv // attention.H for head in heads]].float()  # (heads, keys so far, D)
                logits = (q @ k.mT * scale).masked_fill(at[: k.shape[1]] > queries[rows, None], -torch.inf)
                seen = (keys < k.shape[1]).nonzero()[:, 0]
                weights[:, rows[:, None], seen] = logits.softmax(-1)[..., keys[seen]]
    finally:
        decoder.attend = attend
    return weights


def plot_attention(
    model: Decoder,
    tokens: Tensor,
    labels: Sequence[str],
    layer: int,
    heads: Sequence[int],
    path: Path,
    queries: Window = ALL,
    keys: Window = ALL,
    run: str = "",
) -> None:
    """Attention weights as images, a panel a head, all on one scale from 0 to the largest. Paper, figures 3 and 8.

    labels: of the T tokens; run: for the title. Of more than 400 queries one in so many is drawn, of more than 400 keys
    the largest weight among so many neighbours, and the axes say so. ValueError as attention_weights.
    """
    queries, keys = (choose(window, len(labels)) for window in (queries, keys))
    every, pool = (-(-len(window) // MAX_PIXELS) for window in (queries, keys))
    queries = queries[::every]
    weights = attention_weights(model, tokens, layer, heads, queries, keys).cpu()
    images = F.max_pool1d(weights, pool, ceil_mode=True).numpy()
    width, height = (max(1.8, 0.13 * len(window)) if len(window) <= MAX_TICKS else 5 for window in (keys, queries))
    across = min(len(heads), 3)
    down = -(-len(heads) // across)
    plt = pyplot()
    size = max(4.5, across * (width + 0.7) + 1.2), down * (height + 0.9) + 0.6  # inches
    figure, panels = plt.subplots(down, across, figsize=size, layout="constrained", squeeze=False)
    for panel, head, image in zip(panels.flat, heads, images, strict=False):
        drawn = panel.imshow(image, "gist_heat_r", vmin=0, vmax=images.max(), aspect="auto", interpolation="nearest")
        for axis, window in ((panel.yaxis, queries), (panel.xaxis, keys[::pool])):
            if len(window) <= MAX_TICKS:
                axis.set_ticks(range(len(window)), [labels[i] for i in window], fontsize=6.5)
            else:
                axis.set_ticks(range(0, len(window), 80), [f"{i:,}" for i in window[::80]], fontsize=8)
        panel.tick_params(axis="x", rotation=90 if len(keys) <= MAX_TICKS else 0)
        panel.set_xlabel(f"key, {keys[0]:,} to {keys[-1]:,}" + f": largest of {pool} neighbours" * (pool > 1))
        panel.set_ylabel(f"query, {queries[0]:,} to {queries[-1]:,}" + f": one in {every}" * (every > 1))
        panel.set_title(f"layer {layer}, head {head}", fontsize=9)
    for panel in panels.flat[len(heads) :]:
        panel.remove()
    figure.colorbar(drawn, ax=panels, label="attention weight", aspect=30)
    figure.suptitle(f"{run}\n{attention_of(model, layer).encoding}, prompt of {len(labels):,} tokens", fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


@torch.no_grad()
def copying_weights(model: Decoder, tokens: Tensor) -> Tensor:
    """The attention weight that each head gives to the token to write next, mean over the copy in one prompt (1, T) of
    data_copy.pack: (n_layer, n_head) float32."""
    n = (tokens.shape[1] - 5) // 2
    at, heads = torch.arange(n, device=tokens.device), range(model.config.n_head)
    weights = [
        attention_weights(model, tokens, layer, heads, at + n + 4, at + 2).diagonal(dim1=1, dim2=2).mean(-1)
        for layer in range(model.config.n_layer)
    ]
    return torch.stack(weights).cpu()


def without_attention(model: Decoder, layers: Iterable[int], source: np.ndarray, separator: int) -> Verdict:
    """The verdict on a string where these layers attend to nothing: their attention adds 0."""
    outputs = [attention_of(model, layer).out for layer in layers]
    hooks = [out.register_forward_hook(lambda _, got, gave: torch.zeros_like(gave)) for out in outputs]
    try:
        return teacher_forced(model, [source], separator)[0]
    finally:
        for hook in hooks:
            hook.remove()


def plot_layers(model: Decoder, tokens: Tensor, source: np.ndarray, separator: int, path: Path, run: str = "") -> None:
    """Which layer copies: a row a layer, the weight of each head on the token to write next, and beside it how many of
    the copy's tokens are right where that layer attends to nothing, and where all others do."""
    weights, n, everyone = copying_weights(model, tokens), len(source), {*range(model.config.n_layer)}
    beside = []
    for layer in sorted(everyone):
        verdicts = [without_attention(model, layers, source, separator) for layers in ({layer}, everyone - {layer})]
        beside.append(" / ".join(f"{(v.targets - v.errors) / v.targets:.0%}" for v in verdicts))
    plt = pyplot()
    size = max(4.5, 0.6 * weights.shape[1] + 2.6), max(3.0, 0.32 * len(weights) + 1.4)
    figure, panel = plt.subplots(figsize=size, layout="constrained")
    drawn = panel.imshow(weights.numpy(), "gist_heat_r", vmin=0, vmax=1, aspect="auto")
    for (layer, head), weight in np.ndenumerate(weights.numpy()):
        colour = "white" if weight > 0.5 else "black"
        panel.text(head, layer, f"{weight:.2f}", ha="center", va="center", fontsize=8, color=colour)
    panel.set_xticks(range(weights.shape[1]))
    panel.set_yticks(range(len(weights)))
    panel.set(xlabel="head", ylabel="layer")
    right = panel.secondary_yaxis("right")
    right.set_yticks(range(len(weights)), beside, fontsize=8)
    right.set_ylabel("right tokens without this layer's\nattention / without the others'", fontsize=8)
    figure.colorbar(drawn, ax=panel, label="weight on the token to write next")
    figure.suptitle(f"{run}\n{model.config.pos_encoding}, a string of {n:,} tokens", fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def grid_positions(model: Decoder, tokens: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Row and column of each token of one prompt (1, T) in a layer's grid: (T,) float64 each, rope2d.grid's or the one
    that rope2d.AutoGrid learned. ValueError for a layer without a grid."""
    encoding = attention_of(model, layer).encoding
    if encoding == "2d-rope":
        positions, _ = rope2d.grid(tokens, model.newlines, grid_reset=model.config.grid_reset)
    elif encoding == "auto-2d-rope":
        positions = torch.cat([positions for _, positions in learned_grid(model, tokens, layer)], dim=-1)
    else:
        raise ValueError(f"layer {layer} is {encoding}: it has no grid; layers of 2d-rope and auto-2d-rope do")
    return positions[rope2d.ROW, 0].cpu().double(), positions[rope2d.COL, 0].cpu().double()


@torch.no_grad()
def grid_gates(model: Decoder, tokens: Tensor, layer: int) -> Tensor:
    """Gate A of each token of one prompt (1, T): (T,) float32; 1 goes on in the row, 0 ends it (rope2d.AutoGrid).
    ValueError for a layer that does not learn its grid."""
    return torch.cat([gates for gates, _ in learned_grid(model, tokens, layer)]).cpu()


def learned_grid(model: Decoder, tokens: Tensor, layer: int) -> list[tuple[Tensor, Tensor]]:
    """Gates A (chunk,) and positions (3, 1, chunk) of a layer's AutoGrid, for each chunk of the prompt."""
    attention, calls = attention_of(model, layer), []
    if attention.encoding != "auto-2d-rope":
        raise ValueError(f"layer {layer} is {attention.encoding}: it learns no grid; layers of auto-2d-rope do")
    grid = (model.auto or attention.auto).grid
    hook = grid.register_forward_hook(lambda _, got, gave: calls.append((grid.gates(got[0])[0][0], gave[0])))
    try:
        model.prefill(tokens, model.new_cache())
    finally:
        hook.remove()
    return calls


def plot_grid(model: Decoder, tokens: Tensor, labels: Sequence[str], layer: int, path: Path, run: str = "") -> None:
    """The tokens where a layer's grid has them, with the gate A under each where it is learned.

    labels: of the T tokens; run: for the title. Of long prompts the first 32 rows and columns, and the title says so.
    ValueError as grid_positions.
    """
    rows, cols = grid_positions(model, tokens, layer)
    encoding = attention_of(model, layer).encoding
    gates = grid_gates(model, tokens, layer).tolist() if encoding == "auto-2d-rope" else [None] * len(labels)
    shown = ((rows < MAX_CELLS) & (cols < MAX_CELLS)).nonzero()[:, 0].tolist()
    last_row, last_col = (places[shown].max().ceil().int().item() for places in (rows, cols))
    cell = 0.12 + 0.09 * max(3, *(len(labels[i]) for i in shown))  # inches
    plt = pyplot()
    size = max(4.5, cell * (last_col + 1) + 0.8), 0.5 * (last_row + 1) + 1.1
    figure, panel = plt.subplots(figsize=size, layout="constrained")
    for i in shown:
        box = dict(facecolor="white", edgecolor="none", pad=1)
        panel.text(cols[i], rows[i], labels[i], ha="center", va="center", fontsize=9, bbox=box)
        if gates[i] is not None:
            gate = f"{gates[i]:.0f}" if gates[i] in (0, 1) else f"{gates[i]:.3f}"
            panel.text(cols[i], rows[i] + 0.22, gate, ha="center", va="top", fontsize=6, color="C3")
    panel.set(xlim=(-0.6, last_col + 0.6), ylim=(last_row + 0.6, -0.6), xlabel="column", ylabel="row")
    panel.set_xticks(range(last_col + 1))
    panel.set_yticks(range(last_row + 1))
    panel.tick_params(labelsize=7)
    panel.grid(alpha=0.25)
    panel.spines[:].set_visible(False)
    part = "" if len(shown) == len(labels) else f", {len(shown)} of them shown: rows and columns below {MAX_CELLS}"
    note = "" if gates[0] is None else "; small: the gate A"
    panel.set_title(f"{run}\nlayer {layer}, {encoding}; prompt of {len(labels):,} tokens{part}{note}", fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def grid_table(model: Decoder, tokens: Tensor, labels: Sequence[str], layer: int) -> str:
    """A line for each vocabulary token in one prompt (1, T): how often it occurs, its gate A, smallest and largest.
    ValueError as grid_gates."""
    gates, ids = grid_gates(model, tokens, layer), tokens[0].cpu()
    lines = [f"{'token':>8}{'occurs':>8}  gate A in layer {layer}, smallest..largest"]
    for token in ids.unique():
        own = gates[ids == token]
        label = labels[(ids == token).nonzero()[0, 0]]
        lines.append(f"{label:>8}{len(own):>8,}  {own.min():.6f}..{own.max():.6f}")
    return "\n".join(lines)


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw_maps(config: MapConfig) -> None:
    """Draws attention.png, and grid.png where the layer has a grid, of each run on the first string of map_task of
    `length` tokens; ValueError and FileNotFoundError for what is not there."""
    if not config.runs:
        raise ValueError("nothing to draw: give --runs=DIR[,DIR]")
    device, n = pick_device(config.device), config.length
    source = data_copy.evaluation_strings(config.map_task, n, n, 1, config.eval_seed)[0]
    bounds = config.queries, config.keys
    queries, keys = (ALL if b is None else torch.tensor(range(b[0], b[1] + 1)).long() for b in bounds)
    for run in config.runs:
        model, trained = load_run(run, config.checkpoint, device)
        tokens, _ = data_copy.pack(source[None], np.array([n]), SEPARATORS[trained["separator"]])
        tokens, labels = torch.from_numpy(tokens).to(device), [VOCAB[token] for token in tokens[0]]
        folder = Path(config.out_dir, run.strip("/").replace("/", "-"))
        folder.mkdir(parents=True, exist_ok=True)
        heads, layer = config.heads or range(model.config.n_head), config.layer
        plot_attention(model, tokens, labels, layer, heads, folder / "attention.png", queries, keys, run)
        print(f"attention: {folder / 'attention.png'}")
        if model.config.n_layer > 1:
            plot_layers(model, tokens, source, SEPARATORS[trained["separator"]], folder / "layers.png", run)
            print(f"layers: {folder / 'layers.png'}")
        encoding = attention_of(model, layer).encoding
        if encoding not in ("2d-rope", "auto-2d-rope"):
            print(f"no grid: layer {layer} of {run} is {encoding}")
            continue
        plot_grid(model, tokens, labels, layer, folder / "grid.png", run)
        print(f"grid: {folder / 'grid.png'}")
        if encoding == "auto-2d-rope":
            print(grid_table(model, tokens, labels, layer))


if __name__ == "__main__":
    configurator.run_cli(lambda: draw_maps(configurator.configure(MapConfig, doc=__doc__)))
