"""rope2d.py: the grid against a loop over tokens, angles against exact arithmetic, ALiBi against its formula."""

import math
import os
import random
import shutil
import subprocess
import sys
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rope2d
from rope2d import COL, INDEX, ROW, Rotary, alibi_slopes, frequencies, grid, layer_encodings, rotate, with_alibi

PI = Fraction(314159265358979323846264338327950288419716939937510, 10**50)
NEWLINES = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])  # token 1 serves as grid_reset
RESETS = pytest.mark.parametrize("reset", [None, 1, 6])  # 6: a token that both breaks lines and resets


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small tensors on a busy machine: several times as fast
    yield
    torch.set_num_threads(threads)


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


def test_grid_is_the_drawing_in_the_docstring():
    words = "<n> I: 0 1 1 <n> <n> O: 0 1 1 <n>".split()
    tokens = torch.tensor([["<n> I: O: 0 1".split().index(word) for word in words]])
    positions, state = grid(tokens, torch.tensor([1, 0, 0, 0, 0]))
    assert positions[INDEX, 0].tolist() == list(range(12))
    assert positions[ROW, 0].tolist() == [0, 1, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3]
    assert positions[COL, 0].tolist() == [0, 0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4]
    assert state[:, 0].tolist() == [12, 4, 0]
    assert positions.dtype == state.dtype == torch.int64


@RESETS
@pytest.mark.parametrize("seed", range(5))
def test_grid_and_state_match_a_loop_over_tokens(seed, reset):
    tokens = random_tokens(6, 1 + 17 * seed, seed)
    positions, state = grid(tokens, NEWLINES, grid_reset=reset)
    for b, row in enumerate(tokens.tolist()):
        assert places(positions, state, b) == plain_grid(row, reset)


@RESETS
@pytest.mark.parametrize("seed", range(5))
def test_state_carried_over_any_split_continues_the_grid(seed, reset):
    tokens = random_tokens(3, 40, seed)
    cuts = [0, *sorted(random.Random(seed).sample(range(1, 40), 6)), 40]
    state, pieces = None, []
    for start, end in zip(cuts[:-1], cuts[1:], strict=True):
        positions, state = grid(tokens[:, start:end], NEWLINES, state, grid_reset=reset)
        pieces.append(positions)
    for b, row in enumerate(tokens.tolist()):
        assert places(torch.cat(pieces, -1), state, b) == plain_grid(row, reset)


@RESETS
def test_left_padding_moves_no_real_token(reset):
    tokens, pad = random_tokens(4, 24, 1), torch.tensor([0, 1, 9, 23])  # the padding holds line breaks and resets too
    positions, state = grid(tokens[:, :-3], NEWLINES, pad=pad.clamp(max=20), grid_reset=reset)
    later, end = grid(tokens[:, -3:], NEWLINES, state, grid_reset=reset)
    for b, n in enumerate(pad.clamp(max=20).tolist()):
        assert places(torch.cat([positions[..., n:], later], -1), end, b) == plain_grid(tokens[b, n:].tolist(), reset)
        assert (positions[INDEX, b, :n] < 0).all() and (positions[COL, b, :n] < 0).all()


def test_rotate_multiplies_pairs_half_a_head_apart_as_complex_numbers():
    x, angles = normal(2, 5, 3, 16), 10 * normal(2, 5, 8, seed=1)
    y = rotate(x, angles.cos(), angles.sin())
    turned = torch.complex(x[..., :8].double(), x[..., 8:].double())
    turned = turned * torch.polar(torch.ones(2, 5, 1, 8).double(), angles.double()[:, :, None])
    torch.testing.assert_close(y.double(), torch.cat([turned.real, turned.imag], -1), atol=1e-6, rtol=0)
    half = x.bfloat16()
    exact = rotate(half.float(), angles.cos(), angles.sin())
    assert torch.equal(rotate(half, angles.cos(), angles.sin()), exact.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_torch_compile_sees_is_the_same_rotation_with_the_same_gradients(dtype):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 3, 8, generator=g).to(dtype)
    angles = torch.randn(2, 5, 4, generator=g)
    results = []
    for function in (rope2d.rotate, torch.compile(rope2d.rotate, backend="aot_eager", fullgraph=True)):
        inputs = [t.clone().requires_grad_() for t in (x, angles.cos(), angles.sin())]
        out = function(*inputs)
        out.backward(torch.ones_like(out) * torch.arange(8))
        results.append([out, *(t.grad for t in inputs)])
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype and torch.allclose(a, b, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_2d_rope_turns_half_the_pairs_by_row_and_half_by_col_and_rope_all_by_index():
    positions = torch.tensor([99, 3, 7])[:, None, None]  # (3, 1, 1)
    step = 1000.0 ** (-torch.arange(4).double() / 4)
    angles = Rotary("2d-rope", 16).angles(positions)[0, 0].double()
    torch.testing.assert_close(angles.cos(), torch.cat([3 * step, 7 * step]).cos(), atol=1e-6, rtol=0)
    torch.testing.assert_close(angles.sin(), torch.cat([3 * step, 7 * step]).sin(), atol=1e-6, rtol=0)
    rope = Rotary("rope", 16).angles(positions)[0, 0].double()
    torch.testing.assert_close(rope.sin(), (99 * 1e4 ** (-torch.arange(8).double() / 8)).sin(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("freqs", ["geometric", "uniform", "mixed"])
@pytest.mark.parametrize("encoding, plane", [("2d-rope", ROW), ("2d-rope", COL), ("rope", INDEX)])
def test_scores_do_not_change_when_all_positions_shift(encoding, plane, freqs):
    rotary = Rotary(encoding, 32, freqs)
    positions, _ = grid(random_tokens(2, 30, 2), NEWLINES)
    moved = positions.clone()
    moved[plane] += 12_345
    q, k = normal(2, 30, 4, 32), normal(2, 30, 4, 32, seed=1)

    def scores(where):
        return torch.einsum("bihd,bjhd->bhij", rotate(q, *rotary(where)), rotate(k, *rotary(where)))

    torch.testing.assert_close(scores(moved), scores(positions), atol=2e-5, rtol=0)
    one_moved = positions.clone()
    one_moved[plane, :, 0] += 1  # moving a single token does change them
    assert (scores(one_moved) - scores(positions)).abs().max() > 0.1


def test_2d_rope_on_one_row_is_rope_over_the_column_pairs():
    D, x = 32, normal(1, 50, 2, 32)
    positions, _ = grid(torch.zeros(1, 50, dtype=torch.int64), NEWLINES)
    y = rotate(x, *Rotary("2d-rope", D)(positions))
    columns = [*range(D // 4, D // 2), *range(3 * D // 4, D)]
    others = [c for c in range(D) if c not in columns]
    assert torch.equal(y[..., columns], rotate(x[..., columns], *Rotary("rope", D // 2, theta=1000.0)(positions)))
    assert torch.equal(y[..., others], x[..., others])


@pytest.mark.parametrize("freqs", ["geometric", "uniform", "mixed"])
@pytest.mark.parametrize("encoding", ["rope", "2d-rope"])
def test_angles_are_exact_at_any_position(encoding, freqs):
    n, planes = 64 // 2 // len(rope2d.ROTATES[encoding]), rope2d.ROTATES[encoding]
    steps = [frequencies(freqs, n, rope2d.THETA[encoding], 5 + i).tolist() for i in range(len(planes))]
    for where in (0, 1, -3, 257, 10**5, 10**6, 10**9 + 7):
        place = [where, where - 1, where + 2]  # index, row, col
        angles = Rotary(encoding, 64, freqs, seed=5).angles(torch.tensor(place)[:, None, None])[0, 0].tolist()
        exact = [Fraction(step) * place[plane] for plane, row in zip(planes, steps, strict=True) for step in row]
        for angle, wanted in zip(angles, exact, strict=True):
            turns = (Fraction(angle) - wanted) / (2 * PI)
            assert abs(float((turns - round(turns)) * 2 * PI)) < 1e-6, (where, angle)


def test_casting_a_module_to_bfloat16_leaves_angles_bit_identical():
    module = nn.ModuleDict({"rotary": Rotary("2d-rope", 64, "mixed"), "linear": nn.Linear(2, 2)})
    positions = torch.arange(3 * 40).view(3, 2, 20) * 9_973
    before = module["rotary"](positions)
    module.to(torch.bfloat16)
    assert module["linear"].weight.dtype == torch.bfloat16
    after = module["rotary"](positions)
    assert all(torch.equal(a, b) and b.dtype == torch.float32 for a, b in zip(before, after, strict=True))


def test_frequencies_have_the_values_of_their_kind():
    geometric, uniform, mixed = (frequencies(kind, 1000, 500.0, 3) for kind in ("geometric", "uniform", "mixed"))
    assert geometric.tolist() == pytest.approx([500.0 ** (-i / 1000) for i in range(1000)], rel=1e-14)
    assert 0 <= uniform.min() and uniform.max() < math.pi
    quarters = torch.histc(uniform, 4, 0, math.pi)
    assert (quarters - 250).abs().max() < 5 * math.sqrt(1000 * 0.25 * 0.75)
    kept = torch.isin(mixed, geometric)
    assert kept.sum() == 500 and mixed[~kept].min() >= 0 and torch.isin(mixed[~kept], uniform).all()
    assert mixed[kept].min() < 500 ** (-0.99) and mixed[kept].max() > 500 ** (-0.01)  # spread over the whole range


def test_frequencies_come_from_their_seed_alone():
    torch.manual_seed(1)
    first = frequencies("uniform", 8, 1e4, 3)
    torch.manual_seed(2)
    global_state = torch.random.get_rng_state()
    assert torch.equal(first, frequencies("uniform", 8, 1e4, 3))
    assert not torch.equal(first, frequencies("uniform", 8, 1e4, 4))
    assert torch.equal(global_state, torch.random.get_rng_state())
    here = torch.ones(3, 1, 1, dtype=torch.int64)
    rows, cols = Rotary("2d-rope", 32, "uniform").angles(here)[0, 0].chunk(2)
    assert not torch.isclose(rows[:, None], cols[None, :], atol=1e-5).any()


@pytest.mark.parametrize(
    "pattern, layers",
    [
        ("rope", ["rope"] * 5),
        ("h-rope", ["rope", "2d-rope", "rope", "2d-rope", "rope"]),
        ("rnope", ["rope", "nope", "rope", "nope", "rope"]),
        ("2d-rope+nope+alibi", ["2d-rope", "nope", "alibi", "2d-rope", "nope"]),
    ],
)
def test_layers_take_the_encodings_in_turn(pattern, layers):
    assert layer_encodings(pattern, 5) == layers


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: layer_encodings("rope+spiral", 2), "spiral"),
        (lambda: layer_encodings("", 2), "''"),
        (lambda: frequencies("harmonic", 4, 10.0, 0), "harmonic"),
        (lambda: Rotary("rope", 33), "33"),
        (lambda: Rotary("2d-rope", 34), "34"),
        (lambda: rope2d.check_head_dim("2d-rope", 0), "0"),
        (lambda: rope2d.check_head_dim("nope", -1), "-1"),
    ],
)
def test_wrong_values_are_refused_by_name(call, named):
    with pytest.raises(ValueError, match=named):
        call()


@pytest.mark.parametrize("H", [1, 2, 6, 8, 12])
def test_alibi_slopes_are_those_of_the_paper(H):
    power = 2 ** int(math.log2(H))
    slopes = [2 ** (-8 / power * (i + 1)) for i in range(power)]
    slopes += [2 ** (-8 / (2 * power) * (i + 1)) for i in range(2 * power)][0::2][: H - power]
    assert alibi_slopes(H).tolist() == pytest.approx(slopes, rel=2**-8)


@pytest.mark.parametrize("index", [range(99_985, 100_001), [0, 1, 255, 256, 65_535, 65_536, *range(99_991, 100_001)]])
@pytest.mark.parametrize("H, Hkv, D", [(8, 8, 16), (4, 1, 64), (6, 2, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_alibi_weights_match_the_plain_formula_at_position_100_000(dtype, H, Hkv, D, index):
    index, scale, T = torch.tensor([list(index)]), 1 / math.sqrt(D), 16
    q, k = normal(1, T, H, D).to(dtype), normal(1, T, Hkv, D, seed=1).to(dtype)
    v = torch.eye(T, D, dtype=dtype)[None, :, None].expand(1, T, Hkv, D)  # so that attention returns its weights
    heads_first = [t.transpose(1, 2) for t in with_alibi(q, k, v, index, scale)]
    power = 2 ** int(math.log2(H))
    slopes = [2 ** (-8 / power * (i + 1)) for i in range(power)] + [2 ** (-4 / power * (2 * i + 1)) for i in range(H)]
    distance = (index[0, :, None] - index[0, None, :]).double()
    bias = -torch.tensor(slopes[:H]).double()[:, None, None] * distance
    keys = k.double().repeat_interleave(H // Hkv, dim=2)
    logits = torch.einsum("bihd,bjhd->bhij", q.double(), keys) * scale + bias
    future = torch.ones(T, T).triu(1).bool()
    plain = logits.masked_fill(future, -math.inf).softmax(-1)
    for how in ({"is_causal": True}, {"attn_mask": ~future}):
        y = F.scaled_dot_product_attention(*heads_first, scale=scale, enable_gqa=H != Hkv, **how)
        assert (y[..., :T].double() - plain).abs().max() < 1e-2
        assert not y[..., D:].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_alibi_channels_are_the_same_numbers_in_every_dtype(dtype):
    q, index = normal(1, 6, 12, 48), torch.tensor([[0, 255, 257, 65_537, 100_003, 2**24 - 1]])
    exact, rounded = (with_alibi(x, x, x, index, 48**-0.5) for x in (q, q.to(dtype)))
    for a, b in zip(exact[:2], rounded[:2], strict=True):
        assert b.dtype == dtype and torch.equal(a[..., 48:], b[..., 48:].float())


def test_newline_table_counts_the_breaks_of_each_token():
    table = rope2d.newline_table([b"\n", b"a", b".\n\n", b"\r\n", b"\n \n\n", b"\\n", b""])
    assert table.tolist() == [1, 0, 2, 1, 3, 0, 0] and table.dtype == torch.int64


def test_the_file_works_alone_in_an_empty_folder(tmp_path):
    shutil.copy(rope2d.__file__, tmp_path)
    code = "import torch, rope2d; print(rope2d.grid(torch.tensor([[1, 0, 0]]), torch.tensor([0, 1]))[1].tolist())"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[[3], [1], [2]]"
