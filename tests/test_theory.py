"""The paper's theory as checks: Theorem 4.1 built as weights of our own layer, Theorem 3.1 as an exact count."""

import math
from collections import Counter

import pytest
import torch

import data_copy
import rope2d
from model import Attention, ModelConfig, Place

HEAD = 128


def copy_by_attention(sources: torch.Tensor, norm: float, offset: tuple[int, int]) -> torch.Tensor:
    """Share of right tokens of each source (N, n), predicted by one attention layer with the weights of Theorem 4.1.

    A token's state is (1, value): +1 for the symbol 1, -1 for 0, 0 for all else. Queries and keys see the 1 alone, so
    they are equal for all tokens and attention is by position alone; q is turned by `offset` = (rows, columns).
    """
    config = ModelConfig(
        n_head=1, n_embd=2, head_dim=HEAD, vocab_size=len(data_copy.VOCAB), pos_encoding="2d-rope", freqs="uniform"
    )
    layer = Attention(config, 0, "2d-rope")
    rotary = rope2d.Rotary("2d-rope", HEAD, "uniform")
    turn = rotary.angles(torch.tensor([0, *offset]).view(3, 1, 1))[0, 0]  # (D/2,)
    with torch.no_grad():
        q, k, v = layer.qkv.weight.zero_().view(3, HEAD, 2)
        q[:, 0] = norm * torch.cat([turn.cos(), turn.sin()])
        k[: HEAD // 2, 0] = norm
        v[0, 1] = 1.0
        layer.out.weight.zero_()[0, 0] = 1.0
    n = sources.shape[1]
    lengths = torch.full((len(sources),), n)
    inputs, targets = map(torch.from_numpy, data_copy.pack(sources.numpy(), lengths.numpy()))
    value = torch.zeros(len(data_copy.VOCAB))
    value[0], value[1] = -1.0, 1.0
    positions, _ = rope2d.grid(inputs, rope2d.newline_table(data_copy.TOKEN_BYTES))
    states = torch.stack([torch.ones_like(value[inputs]), value[inputs]], dim=-1)  # (N, T, 2)
    with torch.no_grad():
        out = layer(states, Place(positions, {"2d-rope": rotary(positions)}, None, None, None))[..., 0]
    copied = slice(n + 4, 2 * n + 4)  # the positions that predict the copy; its closing line break has no value here
    return ((out[:, copied] > 0).long() == targets[:, copied]).float().mean(1)


@pytest.fixture(scope="module")
def long_strings():
    return torch.randint(0, 2, (2, 10_000), generator=torch.Generator().manual_seed(0))


def test_theorem_4_1_copies_strings_of_10_000_by_position_alone(long_strings):
    assert copy_by_attention(long_strings, norm=4.0, offset=(-2, 1)).tolist() == [1.0, 1.0]


def test_theorem_4_1_needs_the_norm(long_strings):
    short = long_strings[:, :16]
    assert copy_by_attention(short, norm=1.0, offset=(-2, 1)).tolist() == [1.0, 1.0]  # less is enough for less
    assert copy_by_attention(long_strings, norm=1.0, offset=(-2, 1)).max() < 1.0


@pytest.mark.parametrize("offset", [(-2, 0), (-2, 2)])
def test_theorem_4_1_needs_the_offset(long_strings, offset):
    assert copy_by_attention(long_strings[:, :1000], norm=4.0, offset=offset).max() < 0.75


def seen(source: str, i: int) -> Counter:
    """What one shift-invariant layer can know when it has to write source[i] (from 0): its own token, and how many
    tokens of each kind stand at each distance. Prompt: A1 A2 source B1 B2 B3 source[:i]."""
    tokens = ["A1", "A2", *source, "B1", "B2", "B3", *source[:i]]
    return Counter((tokens[-1], token, len(tokens) - 1 - at) for at, token in enumerate(tokens))


def evidence(cases: list[tuple[str, int]]) -> Counter:
    """What is seen where a 1 is to be written, minus what is seen where a 0 is."""
    total = Counter()
    for source, i in cases:
        for feature, count in seen(source, i).items():
            total[feature] += count if source[i] == "1" else -count
    return Counter({feature: count for feature, count in total.items() if count})


# A shift-invariant layer writes 1 iff the sum over tokens of weight(own token, token, distance) > 0; the weight is
# exp(score) x (value for 1 - value for 0) and has the sign of the token's value. A linear programme over all strings up
# to a length says whether any weights do; its dual is a handful of cases that contradict each other, checked here.


def test_theorem_3_1_no_weights_at_all_copy_strings_up_to_6():
    cases = [("111", 2), ("1011", 1), ("11010", 2), ("110001", 1)]
    assert [source[i] for source, i in cases] == ["1", "0", "0", "1"]
    assert not evidence(cases)  # the same things are seen on both sides: the four inequalities sum to 0 > 0


def test_theorem_3_1_no_opposite_values_copy_strings_up_to_5():
    rising = evidence([("011", 2), ("110", 2), ("10011", 1), ("11001", 1)])
    assert {token: math.copysign(1, count) for (_, token, _), count in rising.items()} == {"0": 1.0, "1": -1.0}
    falling = evidence([("0010", 3), ("1011", 3)])  # and with the value of 1 below 0, and of 0 above
    assert {token: math.copysign(1, count) for (_, token, _), count in falling.items()} == {"0": -1.0, "1": 1.0}
