"""The paper's theory as checks: Theorems 4.1 and 3.2 built as weights of our own decoder, 3.1 as an exact count."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import data_copy
import rope2d
from data_copy import INPUT, NEWLINE, OUTPUT, TOKEN_BYTES
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


# Theorem 3.2: two layers of RoPE copy by place, for a norm of all parameters of at most rho.
#
# The paper's text states alpha = rho / 10, L0 = rho^2 / (1000 log rho), the frequencies 0 and f = pi / (4 L0), a
# mixture of two marker vectors with h[-1] = v(A1) and h[0] = (v(A1) + v(A2)) / sqrt 2, and a lemma: h[i] h[j] <=
# 1 - 1 / (72 L0^2) for places -1 <= i < j <= n + 1, n < L0. The equations are missing. These steps are ours:
#
# 1. In layer 1 the first marker has the score S, the second, i tokens back, S + sin(f i), and all else 0. The mixture
#    points at the angle atan(exp(sin(f i))). From place to place it turns by f cos(f i) / (2 cosh(sin(f i))), which is
#    least at i = L0, 0.22 / L0. So h[i] h[j] is at most 1 - 0.0242 / L0^2, which is within the lemma's bound.
# 2. In our prompt, <n> I: source <n> <n> O: copy, the break is the first marker for the source and for the copy; I: and
#    O: are the second ones. Three breaks stand before the copy, so O: has log 3 more. The breaks after the source give
#    I: log 3 more, too, and see it one step nearer. The second of them, which sees three breaks, then stands at place
#    n + 1: what is written there ends the copy. The first one, which sees two, stands beyond that place.
# 3. O: asks for place 1, so its phase is one step ahead. Queries of layer 2 read the shares of <n> and O:, keys those
#    of <n> and I:. So I:, which the copy sees as well, does not move its places. The copy's own tokens are weak keys:
#    RMSNorm fixes the length of the mixture, and without O:'s share at most 0.8 of it is left.
# 4. RMSNorm makes h a unit vector if the embedding beside it is small: 1 / rho will do. The norm's weight makes h
#    alpha long, and q and k multiply it by alpha once more. The scale of a head of 4 is 1/2, and I: takes about a tenth
#    of the query or less: the scores of layer 2 are 0.45 alpha^4 times the cosine of the angle between two places.
# 5. m places off, the score is lower by a m^2 or more, a = 0.45 alpha^4 0.0242 / L0^2. Every string is right if all
#    other places together weigh less than the right one: 2 sum exp(-a m^2) < 1. With L0 = rho^2 / 1000, a is 1.09 and
#    the sum 0.7. There is no logarithm, since the loss grows with the square of the distance: only neighbours count.
# 6. At twice that length and the same norm, a = 0.27, and two wrong neighbours outvote the right token. If f is kept as
#    well, the sine turns back at place 2 L0. This is where our construction ends, not a bound for all others: with the
#    paper's alpha, the parameters take a third to a fifth of rho (rho from 100 to 1000).
#
# Scores of 0.45 alpha^4 have to be right to a fraction of 1, which takes float64 and a smaller epsilon in RMSNorm.
MARK = {token: 2 * len(TOKEN_BYTES) + i for i, token in enumerate((NEWLINE, INPUT, OUTPUT))}  # channels of the shares


@torch.no_grad()
def place_copier(norm: float, reach: int, speed: float = 1.0, markers: Sequence[int] = tuple(MARK)) -> Decoder:
    """Theorem 3.2's model for strings of up to `reach` tokens. For ablations: speed multiplies the frequency; markers
    are those whose shares layer 1 writes."""
    V, alpha, f, loud = len(TOKEN_BYTES), norm / 10, speed * math.pi / (4 * reach), 2 * math.log(norm)
    C = 2 * V + len(MARK)  # the first V channels: which token; V more: what to write; the shares of the markers
    sizes = dict(n_layer=2, n_head=1, head_dim=4, n_embd=C, mlp_dim=1, vocab_size=V, block_size=10_000)
    model = Decoder(ModelConfig(**sizes, norm_eps=1e-20, pos_encoding="rope"), rope2d.break_table(TOKEN_BYTES)).double()
    model.rotary["rope"].phase.copy_(rope2d.to_phase(torch.tensor([0.0, f], dtype=torch.float64)))
    for p in model.parameters():
        p.zero_()
    model.embed.weight.copy_(torch.eye(V, C) / norm)
    model.norm.weight[V : 2 * V] = 1.0
    model.head.weight.copy_(torch.eye(V, C).roll(V, 1))
    places, match = model.blocks  # of a head's channels, 0 and 2 do not rotate; 1 and 3 are the pair that f rotates

    places.attention_norm.weight[:V] = C**-0.5
    q, k, v = places.attention.qkv.weight.view(3, 4, C)
    q[0, :V] = 2.0  # the scale is 1/2, so that k holds the scores
    q[3, :V] = -2.0  # a quarter of a turn back makes the cosine a sine
    q[1, NEWLINE], q[3, NEWLINE] = -2 * math.sin(f), -2 * math.cos(f)  # and one step more
    q[2, NEWLINE], k[2, INPUT] = 2.0, math.log(3)
    k[0, NEWLINE], k[0, INPUT], k[0, OUTPUT] = loud, loud, loud + math.log(3)
    k[1, INPUT], k[1, OUTPUT], k[3, OUTPUT] = 1.0, math.cos(f), -math.sin(f)  # O: is a step ahead
    for i, token in enumerate(markers):
        v[i, token] = places.attention.out.weight[MARK[token], i] = 1.0

    match.attention_norm.weight[:V] = 1.0
    match.attention_norm.weight[2 * V :] = alpha * C**-0.5
    q, k, v = match.attention.qkv.weight.view(3, 4, C)
    q[0, MARK[NEWLINE]] = q[2, MARK[OUTPUT]] = k[0, MARK[NEWLINE]] = k[2, MARK[INPUT]] = alpha
    for i, token in enumerate((0, 1, NEWLINE)):
        v[i, token] = match.attention.out.weight[V + token, i] = 1.0
    return model.eval()


def random_strings(*lengths: int) -> list[np.ndarray]:
    return [data_copy.evaluation_strings("uniform", n, n, 1, 0)[0] for n in lengths]


def errors(model: Decoder, sources: Sequence[np.ndarray]) -> int:
    return sum(verdict.errors for verdict in teacher_forced(model, sources, NEWLINE))


NORMS = [(100, 10), (200, 40), (320, 102), (1000, 1000)]  # with norm^2 / 1000


@pytest.mark.parametrize("norm, reach", NORMS[:3])
def test_theorem_3_2_copies_strings_of_all_lengths_up_to_the_norm_squared(norm, reach):
    model = place_copier(norm, reach)
    assert torch.cat([p.flatten() for p in model.parameters()]).norm() <= norm
    assert errors(model, random_strings(*range(1, reach + 1))) == 0
    # A symbol that all others outvote is the hardest case for its place, and attention does not depend on symbols: if
    # these are right, so are all strings of 0 and 1 of that length.
    lone = np.eye(reach, dtype=np.int64)
    assert errors(model, [*lone, *(1 - lone)]) == 0


@pytest.mark.parametrize("norm, reach", NORMS)
def test_theorem_3_2_fails_at_twice_the_length_with_the_same_norm(norm, reach):
    assert errors(place_copier(norm, reach), random_strings(reach)) == 0
    assert errors(place_copier(norm, reach), random_strings(2 * reach)) > reach / 10
    assert errors(place_copier(norm, 2 * reach), random_strings(2 * reach)) > reach / 10


@pytest.mark.parametrize("ablation", [{"speed": 0.25}, {"speed": 4.0}, {"markers": (INPUT, OUTPUT)}])
def test_theorem_3_2_needs_the_frequency_and_the_mixture(ablation):
    assert errors(place_copier(200, 40, **ablation), random_strings(40)) > 4


def test_theorem_3_2_lemma():
    """Of layer 2, keys in the source are the h[i], and queries of the copy are h[1] to h[n + 1]."""
    n, seen = 40, {}
    tokens, _ = data_copy.pack(np.array(random_strings(n)), np.array([n]))
    place_copier(200, n).hidden(torch.from_numpy(tokens), look=lambda layer, q, k: seen.update({layer: (q, k)}))
    q, k = (F.normalize(x[0, 0, :, [0, 2]], dim=1) for x in seen[1])  # (T, 2) each
    h = torch.cat([k[: n + 2], k[n + 3 : n + 4]])  # (n + 3, 2), places -1 to n, and n + 1
    angle = (math.pi / (4 * n) * torch.arange(n + 2.0).double()).sin().exp().atan()  # from place 0
    assert h[0].tolist() == [1.0, 0.0]
    torch.testing.assert_close(h[1:], torch.stack([angle.cos(), angle.sin()], 1), atol=1e-6, rtol=0)
    torch.testing.assert_close(q[n + 4 :], h[2:], atol=1e-6, rtol=0)
    assert (h @ h.T).tril(-1).max() <= 1 - 1 / (72 * n**2)
