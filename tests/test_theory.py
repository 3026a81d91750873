"""The paper's theory as checks: Theorem 4.1 built as weights of our own decoder, Theorem 3.1 as an exact count."""

import math
from collections import Counter

import pytest
import torch

import data_copy
import rope2d
from data_copy import NEWLINE, TOKEN_BYTES
from eval import teacher_forced
from model import Decoder, ModelConfig

SAME = {token: token for token in range(len(TOKEN_BYTES))}


@torch.no_grad()
def copier(
    norm: float,
    encoding: str = "2d-rope",
    separator: int = NEWLINE,
    offset: tuple[int, int, int] = (-5, -2, 1),
    line_offset: tuple[int, int, int] | None = None,
    token_bytes: list[bytes] = TOKEN_BYTES,
    writes: dict[int, int] = SAME,
) -> Decoder:
    """A model that copies by position alone, as in the paper's Theorem 4.1: from each token it looks at the one place
    that is `offset` = (index, rows, columns) away, and writes what stands there.

    norm: of queries and keys, which are the same for all tokens; the larger, the longer the strings that are right.
    separator: what ends a line of auto-2d-rope. line_offset: the offset from a line break, if it is another one.
    writes: what is written for each token. Rope's offset, -5, is right for strings of 3 alone.
    """
    V, n_layer = len(token_bytes), len(set(rope2d.layer_encodings(encoding, 2)))  # the last layer copies
    sizes = dict(n_layer=n_layer, n_head=1, head_dim=128, n_embd=2 * V, mlp_dim=1, vocab_size=V, block_size=21_000)
    model = Decoder(ModelConfig(**sizes, pos_encoding=encoding, freqs="uniform"), rope2d.break_table(token_bytes))
    rotary = rope2d.Rotary("rope" if encoding == "rope" else "2d-rope", 128, "uniform")  # as in the model
    angles = rotary.angles(torch.tensor([offset, line_offset or offset]).T[:, None])[0]  # (2, D/2)
    model.embed.weight.copy_(torch.eye(V, 2 * V))  # the first V channels: which token; the others: what to write
    model.head.weight.copy_(torch.eye(V, 2 * V).roll(V, 1))
    block = model.blocks[-1]
    block.attention_norm.weight.fill_((2 * V) ** -0.5)
    q, k, v = block.attention.qkv.weight.zero_().view(3, 128, 2 * V)
    is_break = (model.breaks[0] > 0).long()
    q[:, :V] = norm * torch.cat([angles.cos(), angles.sin()], dim=1)[is_break].T
    k[:64, :V] = norm
    for i, (token, written) in enumerate(writes.items()):
        v[i, token] = block.attention.out.weight[V + written, i] = 1.0
    if model.auto:
        model.auto.grid.proj.weight.zero_()[0, separator] = -10.0
        model.auto.grid.proj.bias.fill_(5.0)
    return model.eval()


def right(norm: float, n: int, **how) -> float:
    """Share of right tokens in the copy of a random string of n."""
    (verdict,) = teacher_forced(copier(norm, **how), data_copy.evaluation_strings("uniform", n, n, 1, 0), NEWLINE)
    return 1 - verdict.errors / verdict.targets


def test_theorem_4_1_copies_a_string_of_10_000_by_position_alone():
    assert right(4.0, 10_000) == 1.0


def test_theorem_4_1_needs_the_norm():
    assert right(1.0, 16) == 1.0 > right(1.0, 1000)  # less is enough for less


@pytest.mark.parametrize("offset", [(0, -2, 0), (0, -2, 2)])
def test_theorem_4_1_needs_the_offset(offset):
    assert right(4.0, 1000, offset=offset) < 0.75


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
