"""model.py: against a plain float64 decoder, and forward, cache, chunks, padding and generation against each other."""

import math
import os
import pickle
import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import checkpoint
import model
import rope2d
from model import IGNORE, Decoder, ModelConfig, sample

NEWLINES = torch.tensor([1, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0])  # token 0, with which generate() pads, breaks a line
VOCAB = len(NEWLINES)
FIXED = ["rope", "2d-rope", "nope", "alibi", "h-rope", "rnope", "2d-rope+nope"]
PATTERNS = [*FIXED, "auto-2d-rope", "rope+auto-2d-rope", "auto-2d-rope+alibi", "auto-2d-rope sigmoid"]
patterns = pytest.mark.parametrize("pattern", PATTERNS)
variants = pytest.mark.parametrize("n_kv_head, qk_norm", [(None, False), (1, False), (2, True), (None, True)])


def build(pattern: str = "2d-rope", seed: int = 0, **changes) -> Decoder:
    """A small decoder, drawn widely enough for its logits to depend on everything. pattern: encoding, auto_gate."""
    torch.manual_seed(seed)
    encoding, _, gate = pattern.partition(" ")
    values = dict(n_layer=3, n_head=4, n_embd=32, head_dim=16, mlp_dim=24, vocab_size=VOCAB, block_size=64)
    values |= dict(pos_encoding=encoding, auto_gate=gate or "saturating", init_std=0.25, zero_init_outputs=False)
    values |= changes
    decoder = Decoder(ModelConfig(**values), NEWLINES).eval().requires_grad_(False)
    for name, p in decoder.named_parameters():
        if "norm" in name:
            p.uniform_(0.5, 1.5)
        if "grid.proj.weight" in name:
            p.normal_(0.0, 0.3)  # gates that range from 0 to 1
    return decoder


def random_tokens(B: int, T: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCAB, (B, T), generator=torch.Generator().manual_seed(seed))


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


def plain_decoder(m: Decoder, tokens: list[int]) -> torch.Tensor:
    """Logits (T, vocab_size), one head, query and pair at a time where it matters, in float64."""
    c, T = m.config, len(tokens)
    w = {name: p.double() for name, p in m.state_dict().items() if p.is_floating_point()}
    H, Hkv, D = c.n_head, c.kv_heads, c.head_size
    place, row, col = [], 0, 0
    for index, token in enumerate(tokens):
        place.append((index, row, col))
        row, col = (row + int(NEWLINES[token]), 0) if NEWLINES[token] else (row, col + 1)
    rope = [[t * 10_000 ** (-2 * i / D) for i in range(D // 2)] for t, _, _ in place]
    grid = [[p * 1_000 ** (-4 * i / D) for p in (r, c) for i in range(D // 4)] for _, r, c in place]
    angles = {"rope": torch.tensor(rope).double(), "2d-rope": torch.tensor(grid, dtype=torch.float64)}

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * weight

    x = w["embed.weight"][tokens]
    for layer in range(c.n_layer):
        encoding = rope2d.ALIASES.get(c.pos_encoding, c.pos_encoding).split("+")
        encoding, at = encoding[layer % len(encoding)], f"blocks.{layer}."
        heads = (norm(x, w[at + "attention_norm.weight"]) @ w[at + "attention.qkv.weight"].T).view(T, H + 2 * Hkv, D)
        q, k, v = heads[:, :H], heads[:, H : H + Hkv], heads[:, H + Hkv :]
        if c.qk_norm:
            q, k = norm(q, w[at + "attention.q_norm.weight"]), norm(k, w[at + "attention.k_norm.weight"])
        if encoding in angles:
            turn = torch.polar(torch.ones(T, D // 2).double(), angles[encoding])[:, None]
            q, k = (torch.complex(t[..., : D // 2], t[..., D // 2 :]) * turn for t in (q, k))
            q, k = (torch.cat([t.real, t.imag], -1) for t in (q, k))
        y = torch.zeros(T, H, D).double()
        for h in range(H):
            kv = h // (H // Hkv)
            slope = 2 ** (-8 * (h + 1) / H) if encoding == "alibi" else 0
            for i in range(T):
                scores = torch.stack([q[i, h] @ k[j, kv] / math.sqrt(D) - slope * (i - j) for j in range(i + 1)])
                y[i, h] = scores.softmax(0) @ v[: i + 1, kv]
        x = x + y.flatten(1) @ w[at + "attention.out.weight"].T
        gate, up = (norm(x, w[at + "mlp_norm.weight"]) @ w[at + "mlp.gate_up.weight"].T).chunk(2, -1)
        x = x + (gate / (1 + (-gate).exp()) * up) @ w[at + "mlp.out.weight"].T
    return norm(x, w["norm.weight"]) @ w["head.weight"].T


@pytest.mark.parametrize("pattern", FIXED)
@variants
def test_logits_match_a_plain_float64_decoder(pattern, n_kv_head, qk_norm):
    m = build(pattern, n_kv_head=n_kv_head, qk_norm=qk_norm, tie_weights=qk_norm)
    tokens = random_tokens(1, 12)
    expected = plain_decoder(m, tokens[0].tolist())
    close(m(tokens)[0].double(), expected, 1e-4)
    close(m.double()(tokens)[0], expected, 1e-10 if pattern in ("nope", "alibi") else 1e-5)  # rotate() is float32


@patterns
@variants
def test_cached_chunks_of_any_size_agree_with_the_full_forward(pattern, n_kv_head, qk_norm):
    m, tokens = build(pattern, n_kv_head=n_kv_head, qk_norm=qk_norm), random_tokens(2, 23)
    full = m(tokens)
    for chunk in (1, 3, 10, 23):
        cache = m.new_cache()
        pieces = [m.head(m.hidden(part, cache)) for part in tokens.split(chunk, dim=1)]
        close(torch.cat(pieces, 1), full)
        assert cache.length == 23 and cache.state[rope2d.INDEX].tolist() == [23, 23]


@patterns
def test_left_padding_gives_the_logits_of_the_unpadded_sequences(pattern):
    m, tokens, pad = build(pattern, n_kv_head=2), random_tokens(3, 20), torch.tensor([0, 9, 4])
    cache = m.new_cache()
    pieces = [m.head(m.hidden(tokens[:, :10], cache, pad))]
    pieces += [m.head(m.hidden(part, cache)) for part in tokens[:, 10:].split([1, 5, 4], dim=1)]
    for padded in (torch.cat(pieces, 1), m.head(m.hidden(tokens, pad=pad))):
        assert padded.isfinite().all()
        for b, n in enumerate(pad.tolist()):
            close(padded[b, n:], m(tokens[b : b + 1, n:])[0])


@pytest.mark.parametrize("pattern", ["2d-rope", "auto-2d-rope", "auto-2d-rope sigmoid"])
@pytest.mark.parametrize("chunk", [2, 7, 512])
def test_padding_longer_than_a_prefill_chunk_takes_no_place_either(chunk, pattern):
    m, tokens, pad = build(pattern), random_tokens(2, 16), torch.tensor([0, 9])
    tokens[1, :9] = 0  # as generate() pads
    cache, alone = m.new_cache(), m.new_cache()
    with torch.inference_mode():
        m.prefill(tokens[:, :15], cache, pad, chunk)
        m.prefill(tokens[1:, 9:15], alone)
        same_state = torch.equal(cache.state[:, 1], alone.state[:, 0])
        close(m.head(m.hidden(tokens[:, 15:], cache))[1], m(tokens[1:, 9:])[0, -1:])
        assert same_state


@patterns
def test_keys_only_prefill_leaves_the_cache_that_a_normal_one_does(pattern):
    m, tokens = build(pattern), random_tokens(2, 13)
    normal, quick = m.new_cache(), m.new_cache()
    m.hidden(tokens, normal)
    assert m.hidden(tokens, quick, keys_only=True) is None
    assert quick.length == normal.length and torch.equal(quick.state, normal.state)
    for mine, theirs in zip(quick.keys + quick.values, normal.keys + normal.values, strict=True):
        assert torch.equal(mine[:, :, :13], theirs[:, :, :13])


@pytest.mark.parametrize("Hkv", [4, 2, 1])
@pytest.mark.parametrize(("chunk", "past"), [(7, 13), (2, 1), (5, 0), (1, 20)])
def test_attention_of_a_chunk_to_what_came_before_is_the_float64_formula(Hkv, chunk, past):
    g = torch.Generator().manual_seed(0)
    q = 3 * torch.randn(2, 4, chunk, 8, generator=g)
    k, v = torch.randn(2, 2, Hkv, past + chunk, 8, generator=g)
    wide_k, wide_v = (t.double().repeat_interleave(4 // Hkv, dim=1) for t in (k, v))
    scores = q.double() @ wide_k.mT * 0.5
    hidden = torch.arange(past + chunk) > torch.arange(past, past + chunk)[:, None]
    expected = scores.masked_fill(hidden, -math.inf).softmax(-1) @ wide_v
    with torch.no_grad():
        mask = model.attention_mask(chunk, past + chunk, None, q.device)
        assert mask is None
        assert (model.attend(q, k, v, mask, 0.5) - expected).abs().max() < 1e-6
    mask = model.attention_mask(chunk, past + chunk, None, q.device)  # with gradients, the mask
    assert (mask is None) == (chunk in (1, past + chunk))
    assert (model.attend(q, k, v, mask, 0.5) - expected).abs().max() < 1e-6


def test_a_later_token_changes_no_earlier_logit():
    for pattern in PATTERNS:
        m, tokens = build(pattern), random_tokens(1, 20)
        before = m(tokens)
        for at in (7, 19):
            changed = tokens.clone()
            changed[0, at] = 3 if tokens[0, at] != 3 else 5
            after = m(changed)
            close(after[:, :at], before[:, :at], 1e-5)
            assert (after[:, at] - before[:, at]).abs().max() > 0.01


@patterns
def test_greedy_generation_is_the_argmax_of_full_forwards(pattern):
    m, prompts = build(pattern, n_kv_head=2), [[7, 1, 2], [4], [1, 2, 7, 7, 5, 6, 8, 1, 0]]
    steps = torch.stack(list(m.generate(prompts, 12)), dim=1)
    assert steps.shape == (3, 12) and steps.dtype == torch.int64
    for prompt, new in zip(prompts, steps.tolist(), strict=True):
        sequence = list(prompt)
        for _ in range(12):
            sequence.append(int(m(torch.tensor([sequence]))[0, -1].argmax()))
        assert new == sequence[len(prompt) :]


SETTINGS = {
    "plain": {},
    "one key head": dict(n_kv_head=1, logit_scale="log_n"),
    "qk_norm": dict(n_kv_head=2, qk_norm=True, tie_weights=True, grid_reset=4),
    "learned": dict(qk_norm=True, freqs="uniform", freqs_learned=True, rotary_fraction=0.5, logit_scale="log_n"),
}


@pytest.mark.parametrize("pattern", [*FIXED, "alibi+rope"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_step_gives_the_states_of_the_full_forward(pattern, settings):
    m, tokens, pad = build(pattern, **settings), random_tokens(3, 30), torch.tensor([0, 9, 4])
    for name, p in m.named_parameters():
        if name.endswith(("log_n_scale", "log_scale")):
            p.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(1))
    for prompt, padding, atol in ((12, pad, 1e-4), (0, None, 1e-4), (12, pad, 1e-6)):
        m = m.double() if atol < 1e-4 else m
        cache, other = m.new_cache(30), m.new_cache()
        expected = m.hidden(tokens, other, padding)
        m.prefill(tokens[:, :prompt], cache, padding)
        with torch.inference_mode():
            step = model.Step(m, cache, 3)
            states = torch.stack([step(token) for token in tokens[:, prompt:].unbind(1)], 1)
        close(states, expected[:, prompt:], atol)
        assert cache.length == 30 and torch.equal(cache.state, other.state)
        for mine, theirs in zip(cache.keys + cache.values, other.keys + other.values, strict=True):
            close(mine[0, :, :30], theirs[0, :, :30], atol)


@pytest.mark.parametrize("pattern", [*FIXED, "auto-2d-rope", "auto-2d-rope sigmoid"])
@pytest.mark.parametrize("autocast", [False, True])
def test_generation_takes_steps_wherever_they_fit(pattern, autocast, monkeypatch):
    m, prompts, lengths, hidden = build(pattern, n_kv_head=2), [[7, 1, 2], [4]], [], Decoder.hidden
    monkeypatch.setattr(Decoder, "hidden", lambda *a, **k: [lengths.append(a[1].shape[1]), hidden(*a, **k)][1])
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert len(list(m.generate(prompts, 5))) == 5
    assert lengths == ([2, 1, 1, 1, 1, 1] if autocast or "auto" in pattern else [2])


@pytest.mark.parametrize("pattern", FIXED)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_bfloat16_steps_are_as_close_to_float32_as_the_full_forward(pattern, qk_norm):
    m, tokens = build(pattern, n_kv_head=2, init_std=0.1, qk_norm=qk_norm), random_tokens(2, 30)
    exact, cache = m.hidden(tokens), m.new_cache()
    whole = m.bfloat16().hidden(tokens)
    with torch.inference_mode():
        step = model.Step(m, cache, 2)
        states = torch.stack([step(token) for token in tokens.unbind(1)], 1)
    assert states.dtype == torch.bfloat16 and cache.keys[0].dtype == torch.bfloat16
    errors = [(x.float() - exact).square().mean().sqrt() for x in (states, whole)]
    assert errors[0] < 1.3 * errors[1] < 0.04 * exact.std(), errors


def test_generation_makes_room_once_and_never_copies_its_cache(monkeypatch):
    m, caches, places, new_cache = build("2d-rope"), [], set(), Decoder.new_cache
    monkeypatch.setattr(Decoder, "new_cache", lambda *a: [caches.append(new_cache(*a)), caches[-1]][1])
    for _ in m.generate([[7, 1, 2]], 40):
        places.add((*(t.data_ptr() for t in caches[0].keys + caches[0].values), caches[0].keys[0].shape[2]))
    assert len(places) == 1 and places.pop()[-1] == 42  # the last token needs no place


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(24,), (5, 24)])
def test_prepared_norms_follow_the_formula(dtype, shape):
    g = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 5, 24, generator=g), torch.rand(shape, generator=g)
    x[0] *= 1e-3  # as small as eps
    x[1], x[2, 0] = 1e4 * x[1], 0
    x, weight = x.to(dtype), weight.to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    result = model.prepared_norm(weight, 1e-6)(x)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, rtol=8 * torch.finfo(dtype).eps, atol=0)


def test_generation_is_a_function_of_its_seed_and_of_top_k():
    m, prompts = build(), [[1, 2, 3], [4]]

    def run(**how):
        return torch.stack(list(m.generate(prompts, 15, **how))).tolist()

    assert run(temperature=2.0, seed=1) == run(temperature=2.0, seed=1) != run(temperature=2.0, seed=2)
    assert run(temperature=2.0, top_k=1, seed=1) == run()


@pytest.mark.parametrize(
    "temperature, top_k, top_p, kept",
    [
        (1.0, None, None, 5),
        (2.5, None, None, 5),
        (0.5, 3, None, 3),
        (1.0, None, 0.65, 2),  # 0.4 + 0.3 reaches 0.65
        (1.0, None, 0.71, 3),
        (1.0, None, 1e-9, 1),
        (1.0, 4, 0.75, 3),  # top_p of what top_k leaves: 0.4 + 0.3 of 0.95 is below 0.75
    ],
)
def test_samples_follow_the_truncated_distribution(temperature, top_k, top_p, kept):
    n, p = 20_000, torch.tensor([0.15, 0.4, 0.05, 0.3, 0.1], dtype=torch.float64)
    drawn = sample(p.log().float().expand(n, -1), temperature, top_k, top_p, torch.Generator().manual_seed(3))
    expected = p ** (1 / temperature)
    expected[p.argsort(descending=True)[kept:]] = 0
    expected /= expected.sum()
    share = torch.bincount(drawn, minlength=5) / n
    assert ((share - expected).abs() <= 5 * (expected * (1 - expected) / n).sqrt() + 1e-9).all(), share


@pytest.mark.parametrize("how", [dict(top_p=0.0), dict(top_k=0), dict(temperature=-1.0), dict(top_p=1.5)])
def test_sampling_values_that_mean_nothing_are_refused(how):
    (value,) = how.values()
    with pytest.raises(ValueError, match=str(value)):
        list(build().generate([[1]], 2, **{"temperature": 1.0} | how))


def test_loss_is_the_summed_float64_cross_entropy_of_the_targets():
    m, tokens, targets = build(), random_tokens(2, 9), random_tokens(2, 9, seed=1)
    targets[0, :4] = targets[1, 7] = IGNORE
    log_p = m(tokens).double() - m(tokens).double().exp().sum(-1, keepdim=True).log()
    by_hand = -sum(
        float(log_p[b, t, targets[b, t]]) for b in range(2) for t in range(9) if int(targets[b, t]) != IGNORE
    )
    assert float(m(tokens, targets)) == pytest.approx(by_hand, rel=1e-6)
    assert float(m(tokens, torch.full((2, 9), IGNORE))) == 0


@pytest.mark.parametrize("zero", [True, False])
def test_initial_weights_have_their_std_and_outputs_start_at_zero(zero):
    torch.manual_seed(0)
    how = dict(init_std=0.03, zero_init_outputs=zero, qk_norm=True, qk_norm_init=0.25)
    m = Decoder(ModelConfig(n_layer=2, n_embd=128, vocab_size=VOCAB, **how), NEWLINES)
    for name, p in m.requires_grad_(False).named_parameters():
        if "norm" in name:
            assert (p == (0.25 if ".q_norm." in name or ".k_norm." in name else 1)).all()
        elif zero and name.endswith(".out.weight"):
            assert not p.any()
        else:
            assert float(p.std()) == pytest.approx(0.03, abs=5 * 0.03 / math.sqrt(2 * p.numel())), name
            assert abs(float(p.mean())) < 5 * 0.03 / math.sqrt(p.numel()), name
    tokens = random_tokens(1, 5)
    identity = torch.equal(m(tokens), m.head(m.norm(m.embed(tokens))))
    assert identity == zero


@pytest.mark.parametrize("tie, qk_norm, n_kv_head, head_dim", [(False, False, None, None), (True, True, 2, 20)])
def test_parameter_count_follows_the_formula(tie, qk_norm, n_kv_head, head_dim):
    sizes = dict(n_layer=3, n_head=4, n_kv_head=n_kv_head, n_embd=48, head_dim=head_dim, mlp_dim=100)
    m = Decoder(ModelConfig(**sizes, vocab_size=VOCAB, tie_weights=tie, qk_norm=qk_norm), NEWLINES)
    D, Hkv = head_dim or 12, n_kv_head or 4
    block = 48 * (4 + 2 * Hkv) * D + 4 * D * 48 + 3 * 48 * 100 + 2 * 48 + 2 * D * qk_norm
    assert sum(p.numel() for p in m.parameters()) == 3 * block + 48 + VOCAB * 48 * (1 if tie else 2)


@pytest.mark.parametrize(
    "call, numbers",
    [
        (lambda: build(n_head=4, n_kv_head=3), ("n_head=4", "n_kv_head=3")),
        (lambda: build(n_head=5, n_embd=32, head_dim=None), ("n_embd=32", "n_head=5")),
        (lambda: build(n_head=0), ("n_head=0",)),
        (lambda: build(n_layer=-2), ("n_layer=-2",)),
        (lambda: build("2d-rope", head_dim=18), ("18",)),
        (lambda: build("spiral"), ("spiral",)),
        (lambda: build(freqs="harmonic"), ("harmonic",)),
        (lambda: build(qk_norm_init=0.0), ("qk_norm_init=0.0",)),
        (lambda: build(vocab_size=VOCAB + 1), (str(VOCAB), str(VOCAB + 1))),
        (lambda: build()(random_tokens(1, 65)), ("65", "64")),
        (lambda: build()(random_tokens(1, 0)), ("no tokens",)),
        (lambda: list(build().generate([[1] * 60, [1]], 6)), ("60", "6", "64")),
        (lambda: list(build().generate([[1], []], 5)), ("empty prompt",)),
        (lambda: list(build().generate([], 5)), ("empty prompt",)),
    ],
)
def test_wrong_values_are_refused_with_their_numbers(call, numbers):
    with pytest.raises(ValueError) as error:
        call()
    assert all(number in str(error.value) for number in numbers), error.value


def test_cache_counts_towards_block_size_and_padding_belongs_to_its_first_chunk():
    m = build()
    cache = m.new_cache()
    m.hidden(random_tokens(1, 60), cache)
    with pytest.raises(ValueError, match="65.*block_size=64"):
        m.hidden(random_tokens(1, 5), cache)
    with pytest.raises(ValueError, match="first chunk"):
        m.hidden(random_tokens(1, 2), cache, torch.tensor([1]))
    assert m.hidden(random_tokens(1, 4), cache).shape == (1, 4, 32)


@patterns
def test_bfloat16_model_runs_close_to_float32(pattern):
    m, tokens = build(pattern, init_std=0.1), random_tokens(2, 30)
    exact, rounded = m(tokens), m.bfloat16()(tokens)
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).square().mean().sqrt() < 0.03 * exact.std()


def test_qk_norm_under_autocast_is_close_to_float32_and_takes_no_slow_path(recwarn):
    m, tokens = build("h-rope", qk_norm=True, init_std=0.1), random_tokens(2, 30)
    exact = m(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = m(tokens)
    assert (rounded.float() - exact).square().mean().sqrt() < 0.03 * exact.std()
    assert not [str(warning.message) for warning in recwarn if "fused" in str(warning.message)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint such as train.py writes, and what is in it."""
    m = build("h-rope", n_kv_head=2, qk_norm=True, freqs="uniform", freqs_seed=9)
    contents = {"model": m.state_dict(), "config": vars(m.config) | {"learning_rate": 1e-3}, "step": 7}
    path = tmp_path_factory.mktemp("run") / "last.pt"
    torch.save(contents, path)
    return path, contents, m


def test_checkpoint_round_trip_is_bit_identical(saved):
    path, contents, m = saved
    saved_run = checkpoint.read(path)
    again = checkpoint.load_model(saved_run)
    assert saved_run["step"] == 7 and again.config == m.config
    assert again.state_dict().keys() == contents["model"].keys()
    assert all(torch.equal(p, contents["model"][name]) for name, p in again.state_dict().items())
    tokens = random_tokens(2, 20)
    assert torch.equal(again(tokens), m(tokens))
    longer = checkpoint.load_model(saved_run, block_size=128)
    assert torch.equal(longer(tokens), m(tokens)) and longer(random_tokens(1, 100)).shape == (1, 100, VOCAB)


def test_missing_checkpoint_is_file_not_found(tmp_path):
    for path in (tmp_path / "none.pt", tmp_path):
        with pytest.raises(FileNotFoundError, match=str(path)):
            checkpoint.read(path)


def test_truncated_checkpoint_is_damaged(saved, tmp_path):
    whole, path = saved[0].read_bytes(), tmp_path / "short.pt"
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1000, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(RuntimeError, match=str(path)):
            checkpoint.read(path)


def test_a_flipped_byte_is_noticed_or_harmless(saved, tmp_path):
    (original, contents, _), path = saved, tmp_path / "flipped.pt"
    whole, outcome = original.read_bytes(), Counter()
    for at in torch.randint(0, len(whole), (300,), generator=torch.Generator().manual_seed(0)).tolist():
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            read = checkpoint.read(path)
        except RuntimeError as error:
            outcome["noticed" if str(path) in str(error) else "noticed, without the path"] += 1
        except Exception as error:
            outcome[type(error).__name__] += 1
        else:
            same = read["config"] == contents["config"] and read["step"] == 7
            same = same and read["model"].keys() == contents["model"].keys()
            same = same and all(torch.equal(read["model"][name], p) for name, p in contents["model"].items())
            outcome["harmless" if same else "other weights, silently"] += 1
    assert outcome.keys() <= {"noticed", "harmless"} and outcome["noticed"], outcome


@pytest.mark.parametrize("kind", ["text", "png", "pickle", "numpy", "tensor", "no config"])
def test_a_file_of_another_kind_is_refused_by_path(kind, tmp_path):
    path = tmp_path / "foreign.pt"
    with path.open("wb") as file:
        if kind == "text":
            file.write(b"step,loss\n1,2.0\n")
        elif kind == "png":
            file.write(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
        elif kind == "pickle":
            pickle.dump({"model": Counter(), "config": {}}, file, protocol=2)
        elif kind == "numpy":
            np.savez(file, a=np.ones(3))
        else:
            torch.save(torch.ones(2) if kind == "tensor" else {"model": {}}, file)
    with pytest.raises(RuntimeError, match=str(path)):
        checkpoint.read(path)


def test_the_file_needs_rope2d_alone_beside_it(tmp_path):
    for module in (model, rope2d):
        shutil.copy(module.__file__, tmp_path)
    code = "import torch, model; c = model.ModelConfig(vocab_size=3, n_embd=16)\n"
    code += "print(model.Decoder(c, torch.zeros(3))(torch.tensor([[0, 2]])).shape)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.stdout.strip() == "torch.Size([1, 2, 3])", run.stderr


# The loss of a large vocabulary, and blocks computed again


def loss_and_gradients(x, weight, targets, chunk=None):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    if chunk is None:
        loss = F.cross_entropy((x @ weight.T).float(), targets, ignore_index=IGNORE, reduction="sum")
    else:
        loss = model.ChunkedLoss.apply(x, weight, targets, chunk)
    (0.37 * loss).backward()
    return loss.detach(), x.grad, weight.grad


@pytest.mark.parametrize("chunk", [1, 7, 16, 100])
@pytest.mark.parametrize(
    "ignored", [[], [0, 5, 6, 7, 8, 9, 10, 11, 12, 13, 39], range(40)], ids=["none", "some", "all"]
)
def test_the_chunked_loss_and_its_gradients_are_those_of_the_whole(chunk, ignored):
    g = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(n, 12, generator=g, dtype=torch.float64) for n in (40, 31))
    targets = torch.randint(31, (40,), generator=g)
    targets[list(ignored)] = IGNORE
    for ours, plain in zip(
        loss_and_gradients(x.float(), weight.float(), targets, chunk),
        loss_and_gradients(x, weight, targets),
        strict=True,
    ):
        torch.testing.assert_close(ours.double(), plain.double(), rtol=1e-5, atol=1e-5)


def test_the_chunked_loss_sums_weight_gradients_in_float32_under_autocast():
    g = torch.Generator().manual_seed(3)
    x, weight = torch.randn(4096, 16, generator=g), torch.randn(50, 16, generator=g)
    targets = torch.randint(50, (4096,), generator=g)
    exact = loss_and_gradients(x.double(), weight.double(), targets)
    with torch.autocast("cpu", torch.bfloat16):
        loss, dx, dw = loss_and_gradients(x, weight, targets, 64)
    assert loss.dtype == dx.dtype == dw.dtype == torch.float32
    assert (loss / exact[0] - 1).abs() < 1e-3
    for ours, theirs in ((dx, exact[1]), (dw, exact[2])):
        assert (ours - theirs).norm() < 0.01 * theirs.norm()  # a sum of 64 chunks in bfloat16 is off by more


class Products(TorchDispatchMode):
    """Notes the matrix products that are done."""

    def __init__(self):
        super().__init__()
        self.done = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.done += [function.name()] if "mm" in function.name() else []
        return function(*args, **kwargs or {})


def test_without_gradients_the_chunked_loss_makes_none(monkeypatch):
    m, tokens = build("2d-rope").requires_grad_(), random_tokens(3, 20)
    monkeypatch.setitem(model.LOGITS_AT_ONCE, "cpu", 7 * m.config.vocab_size)
    with torch.no_grad(), Products() as logits:
        m(tokens)
    with torch.no_grad(), Products() as loss:
        m(tokens, tokens)
    assert len(loss.done) == len(logits.done) + 8  # nine chunks of up to 7 tokens in place of one product


def test_a_model_takes_the_chunked_loss_where_logits_are_many(monkeypatch):
    m, tokens = build("2d-rope").requires_grad_(), random_tokens(3, 20)
    targets = random_tokens(3, 20)
    targets[0, :9] = IGNORE
    losses = []
    for at_once in (2**25, 5 * VOCAB):
        monkeypatch.setitem(model.LOGITS_AT_ONCE, "cpu", at_once)
        m.zero_grad()
        loss = m(tokens, targets)
        loss.backward()
        losses.append((loss.detach(), [p.grad.clone() for p in m.parameters()], loss.grad_fn.name()))
    assert "Chunked" in losses[1][2] and "Chunked" not in losses[0][2]
    torch.testing.assert_close(losses[0][:2], losses[1][:2], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("encoding", ["2d-rope", "auto-2d-rope", "alibi"])
def test_recomputing_blocks_changes_nothing(encoding):
    m, tokens, gradients, calls = build(encoding).requires_grad_(), random_tokens(2, 20), [], []
    for block in m.blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    for recompute in (False, True):
        m.recompute = recompute
        m.zero_grad()
        m(tokens, tokens).backward()
        gradients.append([p.grad.clone() for p in m.parameters()])
    assert len(calls) == 3 * len(m.blocks)  # forward; forward and again
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    with torch.no_grad():
        m(tokens)
    assert len(calls) == 4 * len(m.blocks)
