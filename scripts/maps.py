"""Attention maps and grids of a trained model, as pictures.

    python -m scripts.maps --runs=out/toy_copy/2d-rope,out/toy_copy/rope --length=20
    python -m scripts.maps --runs=out/toy_copy/2d-rope --length=5120 --queries=5600,5640 --keys=480,520   # a window
    python -m scripts.maps --runs=out/toy_finetune/2d-rope-0 --length=20 --kind=mid-sentence     # a copy in text

Writes attention.png (paper, figures 3 and 8); of several layers layers.png, which of them copies; and, where the layer
has a grid, grid.png: the tokens at their row and column. Where the grid is learned, the gate A
stands below each token. Nothing of size T x T is made, but by layers.png, n x n for a string of n.
"""

import copy
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import checkpoint
import configurator
import data_copy
import plots
import rope2d
from data_copy import IGNORE, SEPARATORS, VOCAB
from data_text import TextCopyConfig, pad_chats, text_example
from eval import judge
from model import Decoder
from sample import tokenizer_of

MAX_PIXELS, MAX_TICKS, MAX_CELLS = 400, 48, 32  # of a map; of them labelled with tokens; rows and columns of a grid


@dataclass
class MapConfig:
    """Maps"""

    runs: tuple[str, ...] = ()  # run directories or checkpoint files
    checkpoint: Literal["last", "best"] = "last"  # which of a run directory's
    map_task: Literal["imbalanced", "recursive-flip", "uniform", "repeat-structure"] = "imbalanced"  # string to draw
    length: int = 20  # tokens in that string, symbols in text
    kind: Literal["own-line", "first", "mid-sentence"] = "own-line"  # in text: where in the prompt the string stands
    layer: int = 0  # layer to draw, from 0
    heads: tuple[int, ...] = ()  # query heads to draw, from 0; none named: all
    queries: tuple[int, int] | None = None  # first and last query position to draw; None: all
    keys: tuple[int, int] | None = None  # first and last key position to draw; None: all
    eval_seed: int = 0  # of the string
    block_size: int | None = None  # longest sequence in tokens; None: the model's own bound
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: the first of these that there is
    out_dir: str = "out/maps"  # the pictures go here, in a folder for each run

    def __post_init__(self):
        if not self.runs:
            raise ValueError("nothing to draw: give --runs=DIR[,DIR]")
        if self.length < 1:
            raise ValueError(f"length={self.length}: expected at least 1")
        checkpoint.check_seeds(eval_seed=self.eval_seed)
        for name in ("queries", "keys"):
            first, end = getattr(self, name) or (0, 0)
            if not 0 <= first <= end:
                raise ValueError(f"{name}={first},{end}: expected two positions in the prompt, from 0, rising")


class Sample(NamedTuple):
    """A prompt with its copy, and where attention has to look."""

    tokens: Tensor  # (1, T)
    targets: np.ndarray  # (1, T), IGNORE but in the copy
    labels: list[str]  # of the tokens
    source: Tensor  # (n,) positions of the string's tokens
    writing: Tensor  # (n,) positions of the tokens that are read when those are written


def sample_of(run: str, model: Decoder, trained: dict, config: MapConfig) -> Sample:
    """The first evaluation string of its length, in a prompt of the run's kind. ValueError if its copy is cut into
    other tokens than the string itself, and for a run that has not learned to copy."""
    n = config.length
    if "vocabulary" in trained["data"]:
        string = data_copy.evaluation_strings(config.map_task, n, n, 1, config.eval_seed)
        inputs, targets = data_copy.pack(string, [n], SEPARATORS[trained["separator"]])
        labels = [VOCAB[token] for token in inputs[0]]
    elif trained["task"] == "finetune":
        text, tokenizer = (
            TextCopyConfig(config.map_task, tuple(trained["symbols"]), config.kind),
            tokenizer_of(run, trained),
        )
        record = text_example(text, 0, config.eval_seed, "evaluation", n)
        inputs, targets = pad_chats([tokenizer.chat(record["messages"])])
        labels = [tokenizer.decode([token]).replace("\n", "\\n") for token in inputs[0]]
    else:
        raise ValueError(f"{run}: has not learned to copy; expected a run with task='copy' or task='finetune'")
    writing = np.flatnonzero(targets[0] != IGNORE)[:-1]  # the last one ends the copy
    wanted = targets[0, writing]
    starts = [i for i in range(writing[0]) if np.array_equal(inputs[0, i : i + len(wanted)], wanted)]
    if not starts:
        raise ValueError(
            f"{run}: the copy is cut into other tokens than the string: give another --length or --eval_seed"
        )
    at = torch.arange(len(wanted), device=model.breaks.device)
    tokens = torch.from_numpy(inputs).to(at.device)
    return Sample(tokens, targets, labels, starts[0] + at, int(writing[0]) + at)


@torch.no_grad()
def attention_weights(
    model: Decoder, tokens: Tensor, layer: int, heads: Sequence[int], queries: Tensor, keys: Tensor, chunk: int = 512
) -> Tensor:
    """Attention weights of a layer on one prompt (1, T), between positions: (heads, queries, keys) float32, causal,
    softmax over all keys. The model's own forward gives q and k, `chunk` tokens at a time, so that every encoding is as
    the model has it, and memory is linear in T."""
    weights = torch.zeros(len(heads), len(queries), len(keys), device=tokens.device)

    def look(of_layer: int, q: Tensor, k: Tensor) -> None:  # (1, H, chunk, D), (1, Hkv, keys so far, D)
        start, end = k.shape[2] - q.shape[2], k.shape[2]
        here = (start <= queries) & (queries < end)  # queries in this chunk
        if of_layer != layer or not here.any():
            return
        k = k[0].repeat_interleave(q.shape[1] // k.shape[1], dim=0)[list(heads)].float()  # (heads, keys so far, D)
        q = q[0, list(heads)][:, queries[here] - start].float()  # (heads, here, D)
        later = torch.arange(end, device=k.device) > queries[here][:, None]
        logits = (q @ k.mT / math.sqrt(model.config.head_size)).masked_fill(later, -math.inf)
        on_all = F.pad(logits.softmax(-1), (0, tokens.shape[1] - end))  # keys to come have no weight
        weights[:, here] = on_all[:, :, keys]

    cache = model.new_cache()
    for part in tokens[:, : int(queries.max()) + 1].split(chunk, dim=1):
        model.hidden(part, cache, keys_only=True, look=look)
    return weights.cpu()


def plot_attention(
    model: Decoder, sample: Sample, layer: int, heads: Sequence[int], queries: Tensor, keys: Tensor, run: str
):
    """Attention weights as images, a panel a head, all on one scale from 0 to the largest. Paper, figures 3 and 8. Of
    more than 400 queries one in so many is drawn, of more than 400 keys the largest weight of so many neighbours."""
    every, pool = (math.ceil(len(positions) / MAX_PIXELS) for positions in (queries, keys))
    queries = queries[::every]
    weights = attention_weights(model, sample.tokens, layer, heads, queries, keys)
    images = F.max_pool1d(weights, pool, ceil_mode=True).numpy()
    width, height = (max(1.8, 0.13 * len(p)) if len(p) <= MAX_TICKS else 5 for p in (keys, queries))
    across = min(len(heads), 3)
    down = math.ceil(len(heads) / across)
    size = max(4.5, across * (width + 0.7) + 1.2), down * (height + 0.9) + 0.6  # inches
    figure, panels = plots.pyplot().subplots(down, across, figsize=size, layout="constrained", squeeze=False)
    for panel, head, image in zip(panels.flat, heads, images, strict=False):
        drawn = panel.imshow(image, "gist_heat_r", vmin=0, vmax=images.max(), aspect="auto", interpolation="nearest")
        for axis, positions in ((panel.yaxis, queries), (panel.xaxis, keys[::pool])):
            if len(positions) <= MAX_TICKS:
                axis.set_ticks(range(len(positions)), [sample.labels[i] for i in positions], fontsize=6.5)
            else:
                axis.set_ticks(range(0, len(positions), 80), [f"{i:,}" for i in positions[::80]], fontsize=8)
        panel.tick_params(axis="x", rotation=90 if len(keys) <= MAX_TICKS else 0)
        panel.set_xlabel(f"key, {keys[0]:,} to {keys[-1]:,}" + f": largest of {pool} neighbours" * (pool > 1))
        panel.set_ylabel(f"query, {queries[0]:,} to {queries[-1]:,}" + f": one in {every}" * (every > 1))
        panel.set_title(f"layer {layer}, head {head}", fontsize=9)
    for panel in panels.flat[len(heads) :]:
        panel.remove()
    figure.colorbar(drawn, ax=panels, label="attention weight", aspect=30)
    encoding = model.blocks[layer].attention.encoding
    figure.suptitle(f"{run}\n{encoding}, prompt of {len(sample.labels):,} tokens", fontsize=9)
    return figure


def copying_weights(model: Decoder, sample: Sample) -> Tensor:
    """The attention weight that each head gives to the token to write next, mean over the copy: (n_layer, n_head)."""
    weights, heads = [], range(model.config.n_head)
    for layer in range(model.config.n_layer):
        where = sample.writing, sample.source
        to_source = attention_weights(model, sample.tokens, layer, heads, *where)  # (H, n, n)
        weights.append(to_source.diagonal(dim1=1, dim2=2).mean(-1))
    return torch.stack(weights)


def right_without(model: Decoder, layers: Collection[int], sample: Sample) -> float:
    """The share of right tokens in the copy where the attention of these layers adds nothing."""
    model = copy.deepcopy(model)
    for layer in layers:
        torch.nn.init.zeros_(model.blocks[layer].attention.out.weight)
    verdict = judge(model, sample.tokens.cpu().numpy(), sample.targets, 1024)[0]
    return 1 - verdict.errors / verdict.targets


def plot_layers(model: Decoder, sample: Sample, run: str):
    """Which layer copies: a row a layer, the weight of each head on the token to write next, and beside it how many of
    the copy's tokens are right where that layer attends to nothing, and where all others do."""
    weights, layers = copying_weights(model, sample).numpy(), set(range(model.config.n_layer))
    beside = []
    for layer in sorted(layers):
        shares = [right_without(model, silent, sample) for silent in ({layer}, layers - {layer})]
        beside.append(" / ".join(f"{share:.0%}" for share in shares))
    size = max(4.5, 0.6 * weights.shape[1] + 2.6), max(3.0, 0.32 * len(weights) + 1.4)
    figure, panel = plots.pyplot().subplots(figsize=size, layout="constrained")
    drawn = panel.imshow(weights, "gist_heat_r", vmin=0, vmax=1, aspect="auto")
    for (layer, head), weight in np.ndenumerate(weights):
        colour = "white" if weight > 0.5 else "black"
        panel.text(head, layer, f"{weight:.2f}", ha="center", va="center", fontsize=8, color=colour)
    panel.set(xlabel="head", ylabel="layer", xticks=range(weights.shape[1]), yticks=range(len(weights)))
    right = panel.secondary_yaxis("right")
    right.set_yticks(range(len(weights)), beside, fontsize=8)
    right.set_ylabel("right tokens without this layer's\nattention / without the others'", fontsize=8)
    figure.colorbar(drawn, ax=panel, label="weight on the token to write next")
    figure.suptitle(f"{run}\n{model.config.pos_encoding}, a string of {len(sample.source):,} tokens", fontsize=9)
    return figure


def grid_of(model: Decoder, tokens: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """The grid of a layer that has one, on one prompt (1, T): row and column of each token, (T,) float64, of 4d-rope
    word and letter; and where the grid is learned gate A of each, (T,) float32: 1 goes on in the row, 0 ends it
    (rope2d.AutoGrid)."""
    attention, gates = model.blocks[layer].attention, None
    row, col = rope2d.PLANES[attention.encoding][-2:]
    if attention.encoding != "auto-2d-rope":
        positions, _ = rope2d.grid(tokens, model.breaks, grid_reset=model.config.grid_reset)
    else:
        grid, seen = (model.auto or attention.auto).grid, []
        with grid.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output[0]))):
            model.prefill(tokens, model.new_cache())  # chunk by chunk
        positions = torch.cat([positions for _, positions in seen], dim=-1)  # (3, 1, T)
        A, _ = grid.gates(torch.cat([x for x, _ in seen], dim=1))
        gates = A[0].detach().cpu()
    return positions[row, 0].cpu().double(), positions[col, 0].cpu().double(), gates


def plot_grid(rows: Tensor, cols: Tensor, gates: Tensor | None, labels: Sequence[str], title: str):
    """The tokens where a grid has them, with the gate A under each where it is learned: what grid_of returns, and the
    labels of the T tokens. Of long prompts the first 32 rows and columns, and the title says so."""
    shown = ((rows < MAX_CELLS) & (cols < MAX_CELLS)).nonzero()[:, 0].tolist()
    last_row, last_col = math.ceil(rows[shown].max()), math.ceil(cols[shown].max())
    cell = 0.12 + 0.09 * max(3, *(len(labels[i]) for i in shown))  # inches
    size = max(4.5, cell * (last_col + 1) + 0.8), 0.5 * (last_row + 1) + 1.1
    figure, panel = plots.pyplot().subplots(figsize=size, layout="constrained")
    box = dict(facecolor="white", edgecolor="none", pad=1)
    for i in shown:
        panel.text(cols[i], rows[i], labels[i], ha="center", va="center", fontsize=9, bbox=box)
        if gates is not None:
            gate = f"{gates[i]:.0f}" if gates[i] in (0, 1) else f"{gates[i]:.3f}"
            panel.text(cols[i], rows[i] + 0.22, gate, ha="center", va="top", fontsize=6, color="C3")
    panel.set(xlim=(-0.6, last_col + 0.6), ylim=(last_row + 0.6, -0.6), xlabel="column", ylabel="row")
    panel.set(xticks=range(last_col + 1), yticks=range(last_row + 1))
    panel.tick_params(labelsize=7)
    panel.grid(alpha=0.25)
    panel.spines[:].set_visible(False)
    part = "" if len(shown) == len(labels) else f", {len(shown)} of them shown: rows and columns below {MAX_CELLS}"
    note = "" if gates is None else "; small: the gate A"
    panel.set_title(f"{title}; prompt of {len(labels):,} tokens{part}{note}", fontsize=9)
    return figure


def check(run: str, model: Decoder, sample: Sample, config: MapConfig) -> None:
    """ValueError for what a run does not have."""
    last = len(sample.labels) - 1
    model.check_length(last + 1)
    for name in ("queries", "keys"):
        if (getattr(config, name) or (0, 0))[1] > last:
            raise ValueError(f"{name}={getattr(config, name)}: the prompt has positions 0 to {last}")
    if not 0 <= config.layer < model.config.n_layer:
        raise ValueError(f"layer={config.layer}: expected 0 to {model.config.n_layer - 1} in {run}")
    if not all(0 <= head < model.config.n_head for head in config.heads):
        raise ValueError(f"heads={config.heads}: expected 0 to {model.config.n_head - 1} in {run}")


def save(figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plots.pyplot().close(figure)
    print(f"{path.stem}: {path}")


def draw(run: str, model: Decoder, trained: dict, config: MapConfig) -> None:
    """The pictures of one run, on the first string of map_task of `length` tokens."""
    layer, folder = config.layer, Path(config.out_dir, run.strip("/").replace("/", "-"))
    sample = sample_of(run, model, trained, config)
    check(run, model, sample, config)
    at = torch.arange(len(sample.labels), device=model.breaks.device)
    queries = at if config.queries is None else at[config.queries[0] : config.queries[1] + 1]
    keys = at if config.keys is None else at[config.keys[0] : config.keys[1] + 1]
    heads = config.heads or range(model.config.n_head)
    save(plot_attention(model, sample, layer, heads, queries, keys, run), folder / "attention.png")
    if model.config.n_layer > 1:
        save(plot_layers(model, sample, run), folder / "layers.png")
    encoding = model.blocks[layer].attention.encoding
    if encoding not in ("2d-rope", "4d-rope", "auto-2d-rope"):
        print(f"no grid: layer {layer} of {run} is {encoding}")
        return
    rows, cols, gates = grid_of(model, sample.tokens, layer)
    save(plot_grid(rows, cols, gates, sample.labels, f"{run}\nlayer {layer}, {encoding}"), folder / "grid.png")


def main() -> None:
    config = configurator.configure(MapConfig, doc=__doc__)
    plots.pyplot()  # what is missing is noticed before the work
    device = checkpoint.pick_device(config.device)
    for run in config.runs:
        model, trained = checkpoint.load_run(run, config.checkpoint, device, block_size=config.block_size)
        draw(run, model, trained, config)


if __name__ == "__main__":
    configurator.run_cli(main)
