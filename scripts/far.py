"""Copies of a million tokens by a one-layer model: every target judged, in seconds.

    python -m scripts.far --runs=out/toy_copy/2d-rope --lengths=20480,1024000

In one layer of 2D-RoPE a score depends on the two tokens and on the difference of their rows and columns. So for each
pair of tokens the sum over all keys of a row is a convolution over columns, which a Fourier transform computes in
n log n steps, in float64: the same attention as the model's, over all keys, not an approximation. The rest of the
model is its own modules. As a check, windows of targets are also judged by the model itself, with all their keys; the
table has the smallest margins of these targets both ways.

Writes far.json to out_dir, a row for each run, task and length.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import checkpoint
import configurator
import data_copy
import rope2d
from data_copy import IGNORE
from eval import judge, lead_of
from model import Decoder


@dataclass
class FarConfig:
    """Far copies"""

    runs: tuple[str, ...] = ()  # run directories or checkpoint files
    tasks: tuple[str, ...] = ("imbalanced", "recursive-flip", "uniform")  # strings to copy
    lengths: tuple[int, ...] = (20480, 1024000)  # tokens
    eval_seed: int = 0  # of the strings
    windows: int = 3  # windows of targets that the model itself judges, too, evenly spread
    window: int = 64  # targets in each
    out_dir: str = "out/far"  # far.json goes here

    def __post_init__(self):
        checkpoint.check_seeds(eval_seed=self.eval_seed)
        if not self.runs or not self.tasks or not self.lengths or min(self.lengths) < 1:
            raise ValueError("nothing to evaluate: give --runs=DIR[,DIR], and --lengths of at least 1")
        for task in self.tasks:
            if task not in data_copy.STRINGS:
                raise ValueError(f"tasks: {task!r} is not one of {', '.join(data_copy.STRINGS)}")
        if self.windows < 1 or self.window < 1:
            raise ValueError(f"windows={self.windows}, window={self.window}: expected at least 1 each")


def check_kind(run: str, model: Decoder, trained: dict) -> None:
    """ValueError for a model whose attention is no convolution."""
    c = model.config
    if c.n_layer > 1 or c.pos_encoding != "2d-rope" or c.logit_scale != "none" or c.kv_heads != c.n_head:
        kind = "one layer of 2d-rope, with logit_scale=none and as many key heads as query heads"
        raise ValueError(f"{run}: expected {kind}; eval.py judges every model")
    if trained["separator"] != "<n>" or c.grid_reset is not None:
        given = f"separator={trained['separator']!r}, grid_reset={c.grid_reset}"
        raise ValueError(f"{run}: {given}: expected <n>, which makes the rows, and None")


def scores_of(model: Decoder, q: Tensor, k: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """Scores (N, H, cols) of one token's q (H, D) for N others: k (N, H, D), `rows` (N,) rows and `cols` columns
    before it. The rotation by rows is the same for all columns, so it goes into the product of q and k."""
    rotary = model.rotary["2d-rope"]
    q, k = (torch.complex(*x.double().chunk(2, -1)) for x in (q, k))  # (..., H, D/2)
    turn = rotary.angles(torch.stack([rows, rows, 0 * rows])[:, None])[0].double()  # (N, D/2)
    pairs = q * k.conj() * torch.polar(torch.ones_like(turn), turn)[:, None] / math.sqrt(model.config.head_size)
    scores = []
    for part in cols.split(2**16):
        angles = rotary.angles(torch.stack([part, 0 * part, part])[:, None])[0].double().T  # (D/2, part)
        scores.append(pairs.real @ angles.cos() - pairs.imag @ angles.sin())
    return torch.cat(scores, dim=-1)


@torch.inference_mode()
def margins(model: Decoder, tokens: Tensor, wanted: Tensor) -> Tensor:
    """The lead of the right token's logit over the best other one, at each of the last targets (n,), of tokens (T,)
    whose last row is where they are written."""
    block, n = model.blocks[0], len(wanted)
    H, D = block.attention.H, block.attention.D
    _, row, col = rope2d.grid(tokens[None], model.breaks[0])[0][:, 0]
    last = int(col.max())
    kinds = tokens.unique()
    heads = block.attention.qkv(block.attention_norm(model.embed(kinds))).view(len(kinds), 3, H, D)
    q, k, v = (block.attention.q_norm(heads[:, 0]), block.attention.k_norm(heads[:, 1]), heads[:, 2].double())
    cols = torch.arange(-last, n)  # query's column - key's column
    size = 2 ** math.ceil(math.log2(len(cols) + last + 1))  # of a transform, so that nothing wraps around
    ours = tokens[row == row[-1]]  # (n,) the query at column i writes target i
    rows, groups = torch.stack([row, tokens]).unique(dim=1)  # of the keys: those of one token in one row are a group
    which = torch.searchsorted(kinds, groups.contiguous())
    spectra = []
    for r, token in zip(rows, groups, strict=True):
        keys = torch.zeros(last + 1, dtype=torch.float64)
        keys[col[(row == r) & (tokens == token)]] = 1.0
        spectra.append(torch.fft.rfft(keys, size))
    y, total = torch.zeros(n, H, D, dtype=torch.float64), torch.zeros(n, H, dtype=torch.float64)
    for i, query in enumerate(kinds):
        here = ours == query
        if not here.any():
            continue
        scores = scores_of(model, q[i], k[which], row[-1] - rows, cols)  # (groups, H, cols)
        scores[rows == row[-1], :, :last] = -math.inf  # a token sees none after it
        weights = torch.fft.rfft((scores - scores.max()).exp_(), size)
        for weight, keys, value in zip(weights, spectra, v[which], strict=True):
            sums = torch.fft.irfft(weight * keys, size)[:, last : last + n].T[here]  # (here, H)
            total[here] += sums
            y[here] += sums[..., None] * value
    leads = []
    for start in range(0, n, 2**14):
        part = slice(start, start + 2**14)
        x = model.embed(ours[part]) + block.attention.out((y[part] / total[part, :, None]).flatten(1).float())
        x = x + block.mlp(block.mlp_norm(x))
        leads.append(lead_of(model.head(model.norm(x)), wanted[part]))
    return torch.cat(leads)


def windows_of(n: int, config: FarConfig) -> np.ndarray:
    """Which of n targets the model itself judges: windows, the first at the start, the last at the end."""
    starts = np.linspace(0, max(0, n - config.window), config.windows).astype(int)
    return np.unique((starts[:, None] + np.arange(min(n, config.window))).ravel())


def evaluate(run: str, model: Decoder, trained: dict, task: str, length: int, config: FarConfig) -> dict:
    """One row of the report."""
    began = time.perf_counter()
    (source,) = data_copy.evaluation_strings(task, length, length, 1, config.eval_seed)
    inputs, targets = data_copy.pack([source], [length])
    wanted = targets[targets != IGNORE]
    lead = margins(model, torch.from_numpy(inputs[0]), torch.from_numpy(wanted))
    seconds = time.perf_counter() - began
    chosen = windows_of(len(wanted), config)
    some = np.full_like(targets, IGNORE)
    some[0, inputs.shape[1] - len(wanted) + chosen] = wanted[chosen]
    own = judge(model, inputs, some, chunk=512)[0]
    wrong, margin = int((~(lead[chosen] > 0)).sum()), lead[chosen].min().item()
    if own.errors != wrong or not abs(own.margin - margin) <= 0.1 or lead.isnan().any():
        found = f"{wrong} wrong of {len(chosen)} targets, margin {margin:.3f}"
        raise RuntimeError(f"{run}, {task}, {length}: {found}; the model itself: {own.errors}, {own.margin:.3f}")
    return {
        "task": task,
        "length": length,
        "wrong_tokens": int((~(lead > 0)).sum()),
        "margin": lead.min().item(),
        "weakest": int(lead.argmin()),
        "seconds": round(seconds, 1),
        "windows": len(chosen),  # targets
        "windows_margin": margin,
        "of_the_model": own.margin,
    }


def main() -> None:
    config = configurator.configure(FarConfig, doc=__doc__)
    longest, rows = data_copy.longest("imbalanced", max(config.lengths)), []
    runs = [(run, *checkpoint.load_run(run, block_size=longest)) for run in config.runs]
    for run, model, trained in runs:  # all are checked first
        check_kind(run, model, trained)
    columns = "seed task length wrong_tokens margin weakest seconds windows_margin of_the_model".split()
    widths = (5, 16, 12, 14, 9, 12, 9, 16, 14)
    print("".join(f"{name:>{width}}" for name, width in zip(columns, widths, strict=True)))
    for run, model, trained in runs:
        for task in config.tasks:
            for length in config.lengths:
                row = {"run": run, "seed": trained["seed"], "step": trained["steps_done"]}
                row |= evaluate(run, model, trained, task, length, config)
                rows.append(row)
                shown = [f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name]) for name in columns]
                print("".join(f"{cell:>{width}}" for cell, width in zip(shown, widths, strict=True)), flush=True)
    configurator.write_json(Path(config.out_dir) / "far.json", rows)


if __name__ == "__main__":
    configurator.run_cli(main)
