"""rope2d.py: grids against loops over tokens, angles against exact arithmetic, ALiBi against its formula."""

import math
import random
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

import rope2d
from rope2d import COL, INDEX, ROW, AffineScan, AutoGrid, Rotary, frequencies, grid, layer_encodings, rotate, with_alibi

PI = Fraction(314159265358979323846264338327950288419716939937510, 10**50)
NEWLINES = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])  # token 1 serves as grid_reset
RESETS = pytest.mark.parametrize("reset", [None, 1, 6])  # 6: a token that both breaks lines and resets


def plain_grid(tokens: list[int], reset: int | None) -> list[tuple[int, int, int]]:
    """(index, row, col) of each token and of the one after the last, by walking along."""
    places, row, col = [], 0, 0
    for index, token in enumerate(tokens):
        places.append((index, row, col))
        breaks = int(NEWLINES[token])
        row, col = (row + breaks, 0) if breaks else (row, col + 1)
        if token == reset:
            row, col = 0, 0
    return [*places, (len(tokens), row, col)]


def random_tokens(B: int, T: int, seed: int) -> torch.Tensor:
    return torch.randint(0, len(NEWLINES), (B, T), generator=torch.Generator().manual_seed(seed))


def places(positions: torch.Tensor, state: torch.Tensor, b: int) -> list[tuple[int, int, int]]:
    return [tuple(place) for place in torch.cat([positions, state[..., None]], -1)[:, b].T.tolist()]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# The grid


@RESETS
@pytest.mark.parametrize("n_cuts", [0, 1, 6])
@pytest.mark.parametrize("seed", range(3))
def test_grid_is_a_loop_over_tokens_whatever_the_chunks(seed, n_cuts, reset):
    tokens = random_tokens(6, 60, seed)
    cuts = [0, *sorted(random.Random(seed).sample(range(1, 60), n_cuts)), 60]
    state, pieces = None, []
    for start, end in zip(cuts[:-1], cuts[1:], strict=True):
        positions, state = grid(tokens[:, start:end], NEWLINES, state, grid_reset=reset)
        pieces.append(positions)
    assert positions.dtype == state.dtype == torch.int64
    for b, row in enumerate(tokens.tolist()):
        assert places(torch.cat(pieces, -1), state, b) == plain_grid(row, reset)


@RESETS
def test_left_padding_moves_no_real_token(reset):
    tokens, pad = random_tokens(4, 24, 1), torch.tensor([0, 1, 9, 20])  # the padding holds line breaks and resets too
    positions, state = grid(tokens[:, :-3], NEWLINES, pad=pad, grid_reset=reset)
    later, end = grid(tokens[:, -3:], NEWLINES, state, grid_reset=reset)
    for b, n in enumerate(pad.tolist()):
        assert places(torch.cat([positions[..., n:], later], -1), end, b) == plain_grid(tokens[b, n:].tolist(), reset)
        assert (positions[INDEX, b, :n] < 0).all() and (positions[COL, b, :n] < 0).all()


def test_break_table_counts_the_ends_of_lines_sentences_and_words_in_each_token():
    pieces = [b"\n", b"a_1", b".\n\n", b"\r\n", b" is", b"e.g.", "\u00e9".encode(), b""]
    table = rope2d.break_table(pieces)
    expected = [[1, 0, 2, 1, 0, 0, 0, 0], [1, 0, 3, 1, 0, 2, 0, 0], [1, 0, 3, 2, 1, 2, 0, 0]]
    assert table.tolist() == expected and table.dtype == torch.int64
    assert rope2d.break_table(pieces, 10).tolist() == [[*row, 0, 0] for row in expected]  # padded with unused ids


# Rotation and its angles


@pytest.mark.parametrize("batch", [1, 2])  # of cos and sin
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotate_and_its_gradients_are_complex_products_eager_and_compiled(dtype, batch):
    x, angles = normal(2, 5, 3, 8).to(dtype), 10 * normal(batch, 5, 4, seed=1)
    results = []
    for function in (rotate, torch.compile(rotate, backend="aot_eager", fullgraph=True)):
        inputs = [t.clone().requires_grad_() for t in (x, angles.cos(), angles.sin())]
        y = function(*inputs)
        y.backward(torch.ones_like(y) * torch.arange(8))
        results.append([y.detach(), *(t.grad for t in inputs)])
    wide = [t.double().requires_grad_() for t in (x, angles.cos(), angles.sin())]
    turned = torch.complex(*wide[0].chunk(2, -1)) * torch.complex(*wide[1:])[:, :, None]
    exact = torch.cat([turned.real, turned.imag], -1)
    exact.backward(torch.ones_like(exact) * torch.arange(8))
    for got in results:
        for ours, wanted in zip(got, [exact.detach(), *(t.grad for t in wide)], strict=True):
            tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(ours.double(), wanted, rtol=tolerance, atol=tolerance)
        assert got[0].dtype == got[1].dtype == dtype
    if dtype == torch.bfloat16:  # rounded once, from float32
        assert torch.equal(results[0][0], rotate(x.float(), angles.cos(), angles.sin()).bfloat16())


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("freqs", ["geometric", "uniform", "mixed"])
@pytest.mark.parametrize("encoding", ["rope", "2d-rope"])
def test_angles_are_exact_at_any_position(encoding, freqs, learned):
    planes = rope2d.PLANES[encoding]
    rotary = Rotary(encoding, 64, freqs, seed=5, learned=learned)
    n = 32 // len(planes)
    steps = torch.cat([frequencies(freqs, n, rope2d.THETA.get(encoding, 10_000.0), 5 + i) for i in range(len(planes))])
    if learned:
        rotary.log_scale.data = normal(*steps.shape) / 2
        steps = steps * rotary.log_scale.detach().exp()
    assert rotary.phase.dtype == rotary.scaled_phase().dtype == torch.int64
    assert torch.equal(rotary.scaled_phase(), rotary.phase) != learned
    for where in (0, 1, -3, 257, 10**5, 10**6, 10**6 if learned else 10**9 + 7):  # a factor is no better than float64
        place = [where, where - 1, where + 2]  # index, row, col
        angles = rotary.angles(torch.tensor(place)[:, None, None])[0, 0].tolist()
        exact = [Fraction(step) * place[planes[pair // n]] for pair, step in enumerate(steps.tolist())]
        for angle, wanted in zip(angles, exact, strict=True):
            turns = (Fraction(angle) - wanted) / (2 * PI)
            assert abs(float((turns - round(turns)) * 2 * PI)) < 1e-6, (where, angle)


@pytest.mark.parametrize("learned", [False, True])
def test_real_positions_turn_by_their_float64_angle_and_pass_its_gradients(learned):
    rotary = Rotary("auto-2d-rope", 16, "uniform", seed=3, learned=learned)
    scale = torch.zeros(8, dtype=torch.float64, requires_grad=True)
    freqs = torch.cat([frequencies("uniform", 4, 1.0, seed) for seed in (3, 4)])
    positions = (torch.rand(3, 2, 5, dtype=torch.float64, generator=torch.manual_seed(0)) * 1e4).requires_grad_()
    weight = normal(2, 5, 8)
    if learned:
        rotary.log_scale.data.uniform_(-0.5, 0.5)
        scale.data = rotary.log_scale.detach().double()
    places = positions[1:].movedim(0, -1).repeat_interleave(4, -1)
    exact = places * (freqs * scale.detach().float().exp())
    ours = rotary.angles(positions)
    torch.testing.assert_close(ours.cos().double(), exact.cos(), atol=3e-6, rtol=0)
    exact = places * (freqs * scale.exp())
    gradients = torch.autograd.grad((ours * weight).sum(), [positions, *rotary.parameters()])
    wanted = torch.autograd.grad((exact * weight).sum(), [positions, scale])
    for mine, theirs in zip(gradients, wanted, strict=False):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-5 * theirs.abs().max())


def test_frequencies_have_the_values_of_their_kind():
    geometric, uniform, mixed = (frequencies(kind, 1000, 500.0, 3) for kind in ("geometric", "uniform", "mixed"))
    assert geometric.tolist() == pytest.approx([500.0 ** (-i / 1000) for i in range(1000)], rel=1e-14)
    assert 0 <= uniform.min() and uniform.max() < math.pi
    quarters = torch.histc(uniform, 4, 0, math.pi)
    assert (quarters - 250).abs().max() < 5 * math.sqrt(1000 * 0.25 * 0.75)
    assert torch.equal(mixed, torch.cat([geometric[0::2], uniform[1::2]]))


@pytest.mark.parametrize("kind", ["uniform", "mixed"])
def test_few_frequencies_are_drawn_again_until_no_distance_looks_like_0(kind):
    def alias(freqs: list[float]) -> float:
        fast = [f for f in freqs if f >= 0.1]
        return max(sum(math.cos(f * d) for f in fast) / len(fast) for d in range(2, 2049))

    assert rope2d.alias(torch.tensor([math.pi, 0.01])) == pytest.approx(1)
    generator = torch.Generator().manual_seed(3)
    first, *others = math.pi * torch.rand(256, 8, dtype=torch.float64, generator=generator)
    few, many = (frequencies(kind, n, 1000.0, 3) for n in (8, 64))
    slow = frequencies("geometric", 8, 1000.0, 3)
    draws = [draw if kind == "uniform" else torch.cat([slow[0::2], draw[1::2]]) for draw in (first, *others)]
    found = [rope2d.alias(draw) for draw in draws]
    assert rope2d.alias(few) == pytest.approx(alias(few.tolist()))
    assert rope2d.alias(few) < found[0] - 0.05
    good = next((i for i, value in enumerate(found) if value < 0.6), None)
    assert torch.equal(few, draws[found.index(min(found)) if good is None else good])
    drawn = math.pi * torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert torch.equal(many[-32:], drawn[-32:] if kind == "uniform" else drawn[1::2])  # as drawn first


@pytest.mark.parametrize("freqs", ["geometric", "uniform"])
@pytest.mark.parametrize("fraction, turning", [(1.0, 4), (0.5, 2), (0.3, 2), (0.25, 1)])
def test_rotary_fraction_keeps_the_highest_frequencies(fraction, turning, freqs):
    angles = Rotary("2d-rope", 16, freqs, seed=7, fraction=fraction).angles(torch.ones(3, 1, 1, dtype=torch.int64))
    for ours, seed in zip(angles.view(2, 4), (7, 8), strict=True):
        drawn = frequencies(freqs, 4, 1000.0, seed)
        slowest = drawn.sort(descending=True).values[turning - 1]
        torch.testing.assert_close(ours.double(), drawn * (drawn >= slowest), atol=1e-6, rtol=1e-6)


def test_layers_take_the_encodings_in_turn():
    assert layer_encodings("h-rope", 3) == ["rope", "2d-rope", "rope"]
    assert layer_encodings("rnope", 2) == ["rope", "nope"]
    assert layer_encodings("2d-rope+nope+alibi", 5) == ["2d-rope", "nope", "alibi", "2d-rope", "nope"]


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: layer_encodings("rope+spiral", 2), "spiral.*known are rope, .*rnope, or several"),
        (lambda: frequencies("harmonic", 4, 10.0, 0), "freqs='harmonic'"),
        (lambda: Rotary("rope", 33), "head_dim=33: rope needs an even number"),
        (lambda: Rotary("2d-rope", 2), "head_dim=2: 2d-rope needs an even number, at least 4"),
        (lambda: Rotary("rope", 32, fraction=0), "rotary_fraction=0"),
        (lambda: Rotary("rope", 32, fraction=1.5), "rotary_fraction=1.5"),
        (lambda: rope2d.check_head_dim("2d-rope", 0), "head_dim=0"),
    ],
)
def test_wrong_values_are_refused_by_name(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def paper_slopes(H: int) -> list[float]:
    power = 2 ** int(math.log2(H))
    slopes = [2 ** (-8 / power * (i + 1)) for i in range(power)]
    return slopes + [2 ** (-8 / (2 * power) * (i + 1)) for i in range(2 * power)][0::2][: H - power]


@pytest.mark.parametrize("index", [range(99_985, 100_001), [0, 1, 255, 256, 65_535, 65_536, *range(99_991, 100_001)]])
@pytest.mark.parametrize("H, Hkv, D", [(8, 8, 16), (4, 1, 64), (6, 2, 32), (1, 1, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_alibi_weights_match_the_plain_formula_at_position_100_000(dtype, H, Hkv, D, index):
    index, scale, T = torch.tensor([list(index)]), 1 / math.sqrt(D), 16
    q, k = normal(1, T, H, D).to(dtype), normal(1, T, Hkv, D, seed=1).to(dtype)
    v = torch.eye(T, D, dtype=dtype)[None, :, None].expand(1, T, Hkv, D)  # so that attention returns its weights
    heads_first = [t.transpose(1, 2) for t in with_alibi(q, k, v, index, scale)]
    distance = (index[0, :, None] - index[0, None, :]).double()
    bias = -torch.tensor(paper_slopes(H)).double()[:, None, None] * distance
    keys = k.double().repeat_interleave(H // Hkv, dim=2)
    logits = torch.einsum("bihd,bjhd->bhij", q.double(), keys) * scale + bias
    future = torch.ones(T, T).triu(1).bool()
    plain = logits.masked_fill(future, -math.inf).softmax(-1)
    y = F.scaled_dot_product_attention(*heads_first, scale=scale, enable_gqa=H != Hkv, is_causal=True)
    assert (y[..., :T].double() - plain).abs().max() < 1e-2
    assert not y[..., D:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_alibi_channels_are_the_same_numbers_in_every_dtype(dtype):
    q, index = normal(1, 6, 12, 48), torch.tensor([[0, 255, 257, 65_537, 100_003, 2**24 - 1]])
    exact, rounded = (with_alibi(x, x, x, index, 48**-0.5) for x in (q, q.to(dtype)))
    assert torch.equal(rope2d.alibi_slopes(12), rope2d.alibi_slopes(12).to(torch.bfloat16).float())
    for a, b in zip(exact[:2], rounded[:2], strict=True):
        assert b.dtype == dtype and torch.equal(a[..., 48:], b[..., 48:].float())


# Auto-2D's learned grid


def plain_scan(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    h = [start]
    for t in range(a.shape[-1]):
        h.append(a[..., t] * h[-1] + b[..., t])
    return torch.stack(h, dim=-1)


@pytest.mark.parametrize("T", [1, 2, 7, 1000])
@pytest.mark.parametrize("low", [0.0, 0.99, 1.0])  # 1.0: columns that count to T
def test_the_scan_is_the_loop_forwards_and_backwards(T, low):
    torch.manual_seed(T)
    a = (low + (1 - low) * torch.rand(2, T, dtype=torch.float64)).requires_grad_()
    b = torch.rand(2, T, dtype=torch.float64, requires_grad=True)
    start = torch.rand(2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, T + 1, dtype=torch.float64)
    results = []
    for scan in (AffineScan.apply, plain_scan):
        h = scan(a, b, start)
        results.append([h, *torch.autograd.grad((h * weight).sum(), (a, b, start))])
    for ours, loop in zip(*results, strict=True):
        scale = loop.abs().max()
        torch.testing.assert_close(ours / scale, loop / scale, atol=1e-12, rtol=0)


def test_frozen_gates_give_the_rule_of_line_breaks_shifted_by_the_first_column():
    tokens = torch.randint(0, 4, (3, 50), generator=torch.Generator().manual_seed(0))  # token 0 breaks lines
    gate = AutoGrid(4)
    with torch.no_grad():
        gate.proj.weight.copy_(torch.tensor([[-1.6, 0, 0, 0]]))  # A is 0.2 or 0.8
        gate.proj.bias.fill_(0.8)
    states, (ruled, _) = F.one_hot(tokens, 4).float(), grid(tokens, torch.tensor([1, 0, 0, 0]))
    assert not torch.equal(gate(states, ruled)[0][ROW], ruled[ROW].double())
    gate.freeze()
    learned, end = gate(states, ruled)
    after_break = (ruled[ROW] > 0).double()  # B = 1: a new line begins in column 1, the first in 0
    assert torch.equal(learned, torch.stack([ruled[INDEX], ruled[ROW], ruled[COL] + after_break]).double())
    assert end.shape == (2, 3) and not learned.requires_grad


@pytest.mark.parametrize("gate", ["sigmoid", "saturating"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_learned_grid_is_the_recurrence_in_float64_of_gates_in_float32(gate, dtype):
    torch.manual_seed(0)
    auto, x = AutoGrid(8, gate, bias=2.0), torch.randn(2, 3000, 8)
    auto.proj.weight.data.normal_(0, 0.3)
    auto, x = auto.to(dtype), x.to(dtype)
    weight, bias = auto.proj.weight.float(), auto.proj.bias.float()
    wanted = (x.float() @ weight.T + bias).sigmoid()
    if gate == "saturating":
        wanted = (1.6 * wanted - 0.3).clamp(0, 1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        A, B = auto.gates(x)
        positions, end = auto(x, torch.zeros(3, 2, 3000, dtype=torch.int64))
        state, halves = None, []
        for part in x.split([1, 1999, 1000], dim=1):
            half, state = auto(part, torch.zeros(3, 2, part.shape[1], dtype=torch.int64), state)
            halves.append(half)
    torch.testing.assert_close(A, wanted[..., 0], atol=1e-6, rtol=0)
    torch.testing.assert_close(B, wanted[..., 1] if gate == "sigmoid" else torch.ones_like(A), atol=1e-6, rtol=0)
    A, B, zero = A.double(), B.double(), torch.zeros(2, dtype=torch.float64)
    row = F.pad((1 - A).cumsum(1), (1, 0))
    col = plain_scan(A, B, zero)
    for got, last in ((positions, end), (torch.cat(halves, -1), state)):
        torch.testing.assert_close(got[1:], torch.stack([row, col])[..., :-1], atol=1e-9, rtol=0)
        torch.testing.assert_close(last, torch.stack([row, col])[..., -1], atol=1e-9, rtol=0)
