"""Positions and rotations: RoPE, 2D-RoPE, NoPE, ALiBi, and layers that take them in turn. Needs torch alone.

2D-RoPE gives each token a row and a column. A line break is the last token of its own line:

    tokens   <n> I: 0  1  1  <n> <n> O: 0  1  1  <n>
    row       0  1  1  1  1   1   2  3  3  3  3   3      line breaks before the token
    col       0  0  1  2  3   4   0  0  1  2  3   4      offset in its line

A token of the copy stands in the same column as the token that it copies shifted by a constant, whatever the length:
copying is a look-up at a fixed (row, col) offset. A head of size D rotates half of its pairs by the row and half by
the column; pair i is the channels (i, i + D/2), as in Hugging Face's Qwen3 and Llama:

    channel     0 ..  D/4  | D/4 .. D/2 | D/2 .. 3D/4 | 3D/4 .. D
    rotated by     row     |    col     |     row     |    col

    positions, state = grid(tokens, breaks)                   # (7, B, T) index, row, col, ...
    cos, sin = Rotary("2d-rope", head_dim=64)(positions)      # once a forward, for all layers
    q, k = rotate_qk(q, k, cos, sin)                          # (B, T, H, D), (B, T, Hkv, D)
"""

import functools
import math
import re
import warnings
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:  # by name: Hugging Face has a package `kernels` too, which must count as absent here
    from kernels import AVAILABLE as KERNELS
    from kernels import affine_scan as kernel_scan
    from kernels import rotate_qk as kernel_rotate_qk
except ImportError:
    KERNELS = False

# The planes of `positions`: a token's index, and for each unit of text its row, how many of them came before, and its
# column, the offset in its own. A byte ends a unit; the token that holds it is the unit's last.
INDEX, ROW, COL, SENTENCE, SENTENCE_COL, WORD, LETTER = range(7)
UNITS = {"line": rb"\n", "sentence": rb"[.!?\n]", "word": rb"[^0-9A-Za-z_\x80-\xff]"}

# What each encoding rotates by; a function of `positions` will do as well as a plane. The pairs of a head are divided
# among these planes as evenly as can be, or as SHARES says.
PLANES = {
    "rope": (INDEX,),
    "2d-rope": (ROW, COL),
    "4d-rope": (ROW, COL, WORD, LETTER),  # mid-sentence, too, a string and its copy have columns in common
    "auto-2d-rope": (ROW, COL),  # of a grid that is learned: AutoGrid
    "bipe": (ROW,),  # He et al. 2024; model.py adds a learned embedding of the column
    "hirope": (INDEX, ROW),  # Zhang et al. 2024, without its window for short distances, which is not published
    "segatron": (INDEX, SENTENCE, ROW),  # Bai et al. 2021: running counts of tokens, sentences, paragraphs
    "nope": (),
    "alibi": (),
}
SHARES = {"4d-rope": (1, 2, 1, 4)}  # there are few lines and words, but strings of many letters
ALIASES = {"h-rope": "rope+2d-rope", "rnope": "rope+nope"}  # paper sections 5 and 3.4.2
THETA = {"2d-rope": 1_000.0, "4d-rope": 1_000.0, "auto-2d-rope": 1_000.0}  # paper, appendix D.1
ROPE_THETA = 10_000.0  # of all others
COL_EMBEDDINGS = 1024  # bipe's; columns beyond share the last


def layer_encodings(pos_encoding: str, n_layer: int) -> list[str]:
    """The encoding of each layer: names joined by `+` alternate. ValueError for an unknown name."""
    names = ALIASES.get(pos_encoding, pos_encoding).split("+")
    for name in names:
        if name not in PLANES:
            known = ", ".join([*PLANES, *ALIASES])
            raise ValueError(
                f"pos_encoding={pos_encoding!r}: no encoding {name!r}; known are {known}, or several joined by +"
            )
    return [names[i % len(names)] for i in range(n_layer)]


def knows_units(pos_encoding: str) -> bool:
    """Whether it needs a table of breaks: some layer rotates by more than the index, on a grid that is not learned."""
    names = ALIASES.get(pos_encoding, pos_encoding).split("+")
    return any(name != "auto-2d-rope" and set(PLANES[name]) - {INDEX} for name in names)


def break_table(token_bytes: Sequence[bytes], vocab_size: int | None = None) -> Tensor:
    """Ends of lines, sentences and words in each token: (3, vocab_size) int64, from the bytes that a token stands for.

    BPE vocabularies glue line breaks to other characters, so a rule on one token id misses most of them. vocab_size:
    of a vocabulary that is padded with unused ids.
    """
    counts = [[len(re.findall(pattern, piece)) for piece in token_bytes] for pattern in UNITS.values()]
    return F.pad(torch.tensor(counts, dtype=torch.int64), (0, max(0, (vocab_size or 0) - len(token_bytes))))


def grid(
    tokens: Tensor,
    breaks: Tensor,
    state: Tensor | None = None,
    pad: Tensor | None = None,
    grid_reset: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Where each token stands, and where the next one will.

    tokens (B, T) int64; breaks (units, vocab_size) int64, see `break_table`, or (vocab_size,) of lines alone; state
    (1 + 2 units, B), what an earlier call returned, to go on from there; pad (B,) tokens of left padding, which take no
    place: the first real token is at (0, 0); grid_reset, a token id after which rows and columns restart. Returns
    positions (1 + 2 units, B, T) int64 - index, then row and col of each unit, negative on padding - and the state
    after the last token. A token with k >= 1 line breaks keeps its own place and puts the next token at (row + k, 0).
    """
    breaks, (B, T) = torch.atleast_2d(breaks), tokens.shape
    index, *starts = tokens.new_zeros(1 + 2 * len(breaks), B) if state is None else state
    row0, col0 = torch.stack(starts[0::2]), torch.stack(starts[1::2])  # (units, B)
    pad = torch.zeros_like(index) if pad is None else pad
    at = torch.arange(T + 1, device=tokens.device)  # T + 1: the last column is the place of the next token
    broke = breaks[:, tokens].masked_fill(at[:T] < pad[:, None], 0)
    broke = F.pad(broke, (1, 0))  # (units, B, T + 1) breaks in the token before
    row = row0[..., None] + broke.cumsum(-1)
    is_start = broke > 0
    if grid_reset is not None:
        fresh = F.pad((tokens == grid_reset) & (at[:T] >= pad[:, None]), (1, 0))
        row = row - torch.where(fresh, row, 0).cummax(-1).values  # less the row of the latest reset
        is_start = is_start | fresh
    # Where each token's unit began; the one that the state is in began col0 tokens before these.
    start = torch.where(is_start, at, (pad - col0)[..., None]).cummax(-1).values
    index = (index - pad)[:, None] + at
    positions = torch.cat([index[None], torch.stack([row, at - start], 1).flatten(0, 1)])  # (1 + 2 units, B, T + 1)
    return positions[..., :T], positions[..., T]


@functools.lru_cache
def frequencies(kind: str, n: int, theta: float, seed: int) -> Tensor:
    """n frequencies in radians per step, (n,) float64.

    `geometric`: theta^(-i/n), RoPE's. `uniform`: each from Unif[0, pi), which for integer positions is the
    Unif[0, 2 pi) of the paper's Theorem 4.1 (rotations by f and by 2 pi - f mirror each other). `mixed`: half of each.
    What is drawn is drawn again until no distance looks like 0 (`alias` below 0.6), which 32 frequencies rarely need;
    with few, it is the best of 256 draws. ValueError for another kind. Not to be written to: it is kept.
    """
    geometric = theta ** (-torch.arange(n, dtype=torch.float64) / n)
    if kind == "geometric":
        return geometric
    if kind not in ("uniform", "mixed"):
        raise ValueError(f"freqs={kind!r}: expected 'geometric', 'uniform' or 'mixed'")
    generator, best = torch.Generator().manual_seed(seed), math.inf
    for _ in range(256):
        drawn = math.pi * torch.rand(n, dtype=torch.float64, generator=generator)
        drawn = drawn if kind == "uniform" else torch.cat([geometric[0::2], drawn[1::2]])
        if (found := alias(drawn)) < best:
            chosen, best = drawn, found
        if best < 0.6:
            break
    return chosen


def alias(freqs: Tensor) -> float:
    """How much the distance that looks most like 0 does so: the largest mean of cos(f d) over frequencies f, for d of 2
    to 2,048. Slow ones, which no short string teaches to use, are left out. At 1, d and 0 cannot be told apart."""
    fast = freqs[freqs >= 0.1]
    return torch.cos(torch.arange(2.0, 2049.0, dtype=torch.float64)[:, None] * fast).mean(1).amax().item()


def check_head_dim(encoding: str, head_dim: int) -> None:
    """ValueError unless head_dim is even, with at least one pair for each share of the encoding's planes."""
    least = 2 * sum(SHARES.get(encoding, (1,) * len(PLANES[encoding])))
    if head_dim < max(1, least) or head_dim % 2 and least:
        raise ValueError(f"head_dim={head_dim}: {encoding} needs an even number, at least {max(1, least)}")


RADIANS_PER_UNIT = math.pi / 2**63  # a phase is an int64, in units of 2^-64 of a full turn


def to_phase(radians: Tensor) -> Tensor:
    """Angles, float64, as int64 phases, modulo one full turn."""
    turns = radians / math.tau
    return (((turns + 0.5) % 1 - 0.5) * 2.0**64).long()


def wide_dtype(x: Tensor) -> torch.dtype:
    """float64, or float32 on mps, which has nothing wider."""
    return torch.float32 if x.device.type == "mps" else torch.float64


class Rotary(nn.Module):
    """Cosines and sines of an encoding's rotation angles, from positions.

    A frequency is kept as an int64 phase: the fraction of a full turn per step, in units of 2^-64. An integer position
    times that phase overflows modulo 2^64, which is the reduction modulo one turn, exact at any position and on any
    device. A float32 product is off by 0.01 rad at position 10^5, and not every device has float64. As an integer
    buffer the phase also survives `.to(bfloat16)`.
    """

    def __init__(
        self,
        encoding: str,
        head_dim: int,
        freqs: str = "geometric",
        theta: float | None = None,
        seed: int = 0,
        fraction: float = 1.0,
        learned: bool = False,
    ):
        """encoding: a name in PLANES that rotates. freqs, theta, seed: see `frequencies`; theta None: the encoding's
        own. fraction: share of the pairs that rotate; those of the lowest frequencies do not. learned: each frequency
        is multiplied by exp(s), s learned from 0 (LeRoPE, arXiv 2607.10134)."""
        super().__init__()
        check_head_dim(encoding, head_dim)
        if not 0 < fraction <= 1:
            raise ValueError(f"rotary_fraction={fraction}: expected a share above 0, up to 1")
        self.planes, pairs = PLANES[encoding], head_dim // 2
        shares = SHARES.get(encoding, (1,) * len(self.planes))
        ends = [-(-pairs * sum(shares[:i]) // sum(shares)) for i in range(len(shares) + 1)]  # rounded up
        self.pairs = [b - a for a, b in pairwise(ends)]  # of each plane
        theta = THETA.get(encoding, ROPE_THETA) if theta is None else theta
        drawn = [frequencies(freqs, n, theta, seed + i).clone() for i, n in enumerate(self.pairs)]
        for part in drawn:
            part[part.argsort()[: len(part) - math.ceil(fraction * len(part))]] = 0.0
        self.register_buffer("phase", to_phase(torch.cat(drawn)))  # (pairs,)
        self.log_scale = nn.Parameter(torch.zeros(pairs)) if learned else None

    def places(self, positions: Tensor) -> Tensor:
        """What each pair rotates by at positions (planes, ...): (..., pairs)."""
        planes = [plane(positions) if callable(plane) else positions[plane] for plane in self.planes]
        return torch.cat([p[..., None].expand(*p.shape, n) for p, n in zip(planes, self.pairs, strict=True)], dim=-1)

    def scaled_phase(self) -> Tensor:
        """Phase per step of each pair, learned factors included: (pairs,) int64."""
        if self.log_scale is None:
            return self.phase
        radians = self.phase.to(wide_dtype(self.phase)) * RADIANS_PER_UNIT
        return to_phase(radians * self.log_scale.detach().exp())

    def angles(self, positions: Tensor) -> Tensor:
        """positions (planes, B, T), int64 or real -> rotation angles (B, T, D/2) in radians, float32, within 4e-7 of
        exact modulo 2 pi.

        A real position is split: its nearest integer goes the exact way, and the rest, at most 1/2, carries the
        gradient.
        """
        position = self.places(positions)  # (B, T, D/2)
        whole = position.detach().round().long() if position.is_floating_point() else position
        freqs = self.phase.float() * RADIANS_PER_UNIT  # (D/2,)
        angles = (whole * self.scaled_phase()).float() * RADIANS_PER_UNIT  # (B, T, D/2), wraps at a full turn
        if self.log_scale is not None:  # adds 0, and the gradient of the line above
            freqs = freqs * self.log_scale.exp()
            angles = angles + whole.float() * (freqs - freqs.detach())
        if position.is_floating_point():
            angles = angles + (position - whole).float() * freqs
        return angles

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions (planes, B, T) -> cos, sin (B, T, D/2) float32."""
        angles = self.angles(positions)
        return angles.cos(), angles.sin()


class AffineScan(torch.autograd.Function):
    """h[0] = start, h[t + 1] = a[t] h[t] + b[t]: (..., T + 1) from a, b (..., T) and start (...,).

    The maps compose, (a2, b2) after (a1, b1) = (a1 a2, a2 b1 + b2), so log2 T doublings do it. The gradient of the sum
    over later steps obeys the same recurrence backwards in time.
    """

    @staticmethod
    def scan(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
        a, h = a.movedim(-1, 0), torch.cat([start[None], b.movedim(-1, 0)])  # time first: (T, ...), (T + 1, ...)
        h[1:2].addcmul_(a[:1], h[:1])
        reach = 1
        while reach < len(a):
            h[1 + reach :].add_(a[reach:] * h[1:-reach])
            a = torch.cat([a[:reach], a[reach:] * a[:-reach]])
            reach *= 2
        return h.movedim(0, -1)

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, start: Tensor) -> Tensor:
        h = AffineScan.scan(a, b, start)
        ctx.save_for_backward(a, h)
        return h

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, h = ctx.saved_tensors
        total = AffineScan.scan(a.flip(-1), grad[..., :-1].flip(-1), grad[..., -1]).flip(-1)  # (..., T + 1)
        return total[..., 1:] * h[..., :-1], total[..., 1:], total[..., 0]


def scan(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """AffineScan; on a GPU by kernels.py, if it is there."""
    return kernel_scan(a, b, start) if a.is_cuda and KERNELS else AffineScan.apply(a, b, start)


class AutoGrid(nn.Module):
    """Auto-2D-RoPE's grid, learned from the text. Paper, appendix F.

    Two gates of each token's state, A and B in [0, 1], place the token after it:

        col[t + 1] = A[t] col[t] + B[t]        row[t + 1] = row[t] + (1 - A[t])        from (0, 0)

    A = B = 1 moves one column on; A = 0 starts a new row. `sigmoid` gates are the paper's. They never reach 0 or 1, so
    positions drift with length. `saturating` gates learn A alone, as a sigmoid stretched by 0.3 beyond 0 and 1 and
    clamped, and keep B at 1: a learned B lets tokens that occur once a line share a place with their neighbour.
    """

    STRETCH = 0.3

    def __init__(self, n_embd: int, gate: str = "saturating", bias: float = 0.7):
        super().__init__()
        self.gate = gate
        self.frozen = False
        self.proj = nn.Linear(n_embd, 2 if gate == "sigmoid" else 1)
        nn.init.normal_(self.proj.weight, std=0.02)
        nn.init.constant_(self.proj.bias, bias)

    def freeze(self) -> None:
        """From now on the gates are rounded and not trained."""
        self.frozen = True
        self.requires_grad_(False)

    def get_extra_state(self) -> bool:  # torch saves it in the state dict, and gives it back to the method below
        return self.frozen

    def set_extra_state(self, frozen: bool) -> None:
        if frozen:
            self.freeze()

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A, B (B, T) float32 of x (B, T, C)."""
        with torch.autocast(x.device.type, enabled=False):
            gates = F.linear(x.float(), self.proj.weight.float(), self.proj.bias.float()).sigmoid()
        if self.gate == "saturating":
            gates = ((1 + 2 * self.STRETCH) * gates - self.STRETCH).clamp(0, 1)
        if self.frozen:
            gates = gates.round().detach()
        A = gates[..., 0]
        return A, gates[..., 1] if self.gate == "sigmoid" else torch.ones_like(A)

    def forward(
        self, x: Tensor, positions: Tensor, state: Tensor | None = None, pad: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x (B, T, C) -> positions (3, B, T) with learned, real rows and columns; the state after the last token
        (2, B). state: what an earlier call returned; pad (B,): left padding among these tokens."""
        wide = wide_dtype(x)
        A, B = (gate.to(wide) for gate in self.gates(x))
        if pad is not None:  # padding does not move
            is_pad = torch.arange(x.shape[1], device=x.device) < pad[:, None]
            A, B = A.masked_fill(is_pad, 1), B.masked_fill(is_pad, 0)
        row0, col0 = A.new_zeros(2, len(x)) if state is None else state
        row = row0[:, None] + F.pad((1 - A).cumsum(1), (1, 0))  # (B, T + 1)
        col = scan(A, B, col0)
        return torch.stack([positions[INDEX].to(wide), row[:, :-1], col[:, :-1]]), torch.stack([row[:, -1], col[:, -1]])


def apply_rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """One product over whole heads, then a fused multiply-add into each half: of the plain ways that were measured, the
    one with the fewest passes over memory (scripts/bench.py rotary)."""
    half, wide = x.shape[-1] // 2, torch.promote_types(x.dtype, torch.float32)
    cos, sin, z = cos.to(wide)[:, :, None], sin.to(wide)[:, :, None], x.to(wide)  # cos, sin (B, T, 1, D/2)
    y = z * torch.cat([cos, cos], dim=-1)
    y[..., :half].addcmul_(z[..., half:], sin, value=-1)
    y[..., half:].addcmul_(z[..., :half], sin)
    return y.to(x.dtype)


class Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation back, at the same cost; autograd's own would take twice that."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        learned = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        ctx.save_for_backward(x if learned else None, cos, sin)
        return apply_rotation(x, cos, sin)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, cos, sin = ctx.saved_tensors
        dx = apply_rotation(grad, cos, -sin)
        if x is None:
            return dx, None, None
        (a, b), (da, db) = x.to(cos.dtype).chunk(2, -1), grad.to(cos.dtype).chunk(2, -1)  # (B, T, H, D/2) each
        dcos, dsin = (da * a + db * b).sum(2), (db * a - da * b).sum(2)
        return dx, dcos.sum_to_size(cos.shape), dsin.sum_to_size(sin.shape)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + D/2) of x (B, T, H, D) by the angles of cos, sin (B or 1, T, D/2), in float32 (float64
    if x is), returned in x's dtype. Differentiable in all three, on any device: the reference for kernels.py."""
    if not torch.compiler.is_compiling():
        return Rotate.apply(x, cos, sin)
    wide = torch.promote_types(x.dtype, torch.float32)  # torch.compile fuses this with its neighbours
    a, b, cos, sin = *x.to(wide).chunk(2, dim=-1), cos.to(wide)[:, :, None], sin.to(wide)[:, :, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


def rotate_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotate` of q (B, T, H, D) and of k (B, T, Hkv, D); on a GPU by kernels.py in one launch, if it is there."""
    if q.is_cuda and KERNELS:
        return kernel_rotate_qk(q, k, cos, sin)
    if q.is_cuda and not torch.compiler.is_compiling():  # torch.compile fuses the plain path
        warnings.warn("no kernels.py or no triton: rotation on the GPU takes the slower plain path", stacklevel=2)
    return rotate(q, cos, sin), rotate(k, cos, sin)


def alibi_slopes(n_head: int) -> Tensor:
    """(H,) float32, as in Press et al. 2021, rounded to bfloat16 so that every dtype computes the same bias."""
    power = 2 ** math.floor(math.log2(n_head))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(n_head - power)]
    return torch.tensor(slopes).bfloat16().float()


ALIBI_CHANNELS = 8  # 3 are used; fused attention wants head sizes that are multiples of 8


def with_alibi(q: Tensor, k: Tensor, v: Tensor, index: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """ALiBi as extra channels of q (B, T, H, D), k and v (B, T, Hkv, D), for any fused attention: (..., D + 8) each.

    The bias -slope (i - j) is slope j + a constant of the row, which softmax ignores, so q carries the slope and k its
    own position. index (B, T) is that position; in bfloat16 it is exact only below 257, so it travels as three digits
    in base 256, scaled to stay within float16. `scale` is what attention multiplies q k by. v gets zeros; drop them.
    """
    digits = torch.stack([index & 255, (index >> 8 & 255) << 4, (index >> 16) << 8], dim=-1)  # (B, T, 3)
    slope = (alibi_slopes(q.shape[2]).to(q.device) / scale).bfloat16().float()  # (H,)
    weights = slope[:, None] * torch.tensor([1.0, 16.0, 256.0], device=q.device)  # (H, 3)
    extra_k = F.pad(digits.to(k.dtype), (0, ALIBI_CHANNELS - 3))[:, :, None].expand(*k.shape[:3], -1)
    extra_q = F.pad(weights.to(q.dtype), (0, ALIBI_CHANNELS - 3)).expand(*q.shape[:3], -1)
    return torch.cat([q, extra_q], -1), torch.cat([k, extra_k], -1), F.pad(v, (0, ALIBI_CHANNELS))
