"""model.py: against a plain float64 decoder, and forward, cache, chunks and padding against each other."""

import math

import pytest
import torch
import torch.nn.functional as F

import checkpoint
import model
import rope2d
from model import IGNORE, Cache, Decoder, ModelConfig
from rope2d import AutoGrid

NEWLINES = torch.tensor([1, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0])  # token 0, with which generate() pads, breaks a line
VOCAB = len(NEWLINES)
BREAKS = torch.stack([NEWLINES, NEWLINES.roll(1), NEWLINES + NEWLINES.roll(2)])  # lines, sentences, words
FIXED = ["rope", "2d-rope", "nope", "alibi", "h-rope", "rnope", "2d-rope+nope", "4d-rope", "bipe", "hirope", "segatron"]
PATTERNS = [*FIXED, "auto-2d-rope", "rope+auto-2d-rope", "auto-2d-rope+alibi", "auto-2d-rope sigmoid"]
patterns = pytest.mark.parametrize("pattern", PATTERNS)
variants = pytest.mark.parametrize("n_kv_head, qk_norm", [(None, False), (1, False), (2, True), (None, True)])


def build(pattern: str = "2d-rope", seed: int = 0, **changes) -> Decoder:
    """A small decoder, drawn widely enough for its logits to depend on everything. pattern: encoding, auto_gate."""
    torch.manual_seed(seed)
    encoding, _, gate = pattern.partition(" ")
    values = dict(n_layer=3, n_head=4, n_embd=32, head_dim=16, mlp_dim=24, vocab_size=VOCAB, block_size=64)
    values |= dict(pos_encoding=encoding, auto_gate=gate or "saturating", init_std=0.25, zero_init_residual=False)
    decoder = Decoder(ModelConfig(**values | changes), BREAKS).eval().requires_grad_(False)
    for name, p in decoder.named_parameters():
        if "norm" in name or name.endswith(("log_n_scale", "log_scale")):
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
    angles = {name: [] for name in rope2d.PLANES if name not in ("auto-2d-rope", "nope", "alibi")}
    line = col = sentence = word = letter = 0
    cols = []
    for index, token in enumerate(tokens):
        n = D // 2  # pairs of a head
        turn = {
            "rope": [index * 1e4 ** (-i / n) for i in range(n)],
            "2d-rope": [p * 1e3 ** (-2 * i / n) for p in (line, col) for i in range(n // 2)],
            "4d-rope": [
                p * 1e3 ** (-i / part) for p, part in ((line, 1), (col, 2), (word, 1), (letter, 4)) for i in range(part)
            ],
            "bipe": [line * 1e4 ** (-i / n) for i in range(n)],
            "hirope": [p * 1e4 ** (-2 * i / n) for p in (index, line) for i in range(n // 2)],
            "segatron": [
                p * 1e4 ** (-i / part) for p, part in ((index, 3), (sentence, 3), (line, 2)) for i in range(part)
            ],
        }
        for name, found in turn.items():
            angles[name].append(found)
        cols.append(col)
        new_line, new_sentence, new_word = BREAKS[:, token].tolist()
        line, col = line + new_line, 0 if new_line else col + 1
        word, letter = word + new_word, 0 if new_word else letter + 1
        sentence += new_sentence
    angles = {name: torch.tensor(found, dtype=torch.float64) for name, found in angles.items()}

    def norm(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * weight

    x = w["embed.weight"][tokens]
    if "bipe" in c.pos_encoding:
        x = x + w["col_embed.weight"][[min(at, 1023) for at in cols]]
    for layer in range(c.n_layer):
        encoding = rope2d.ALIASES.get(c.pos_encoding, c.pos_encoding).split("+")
        encoding, at = encoding[layer % len(encoding)], f"blocks.{layer}."
        heads = (norm(x, w[at + "attention_norm.weight"]) @ w[at + "attention.qkv.weight"].T).view(T, H + 2 * Hkv, D)
        q, k, v = heads[:, :H], heads[:, H : H + Hkv], heads[:, H + Hkv :]
        if c.qk_norm:
            q, k = norm(q, w[at + "attention.q_norm.weight"]), norm(k, w[at + "attention.k_norm.weight"])
        if c.logit_scale == "log_n":
            q = q * (torch.arange(T) + 1).log().double()[:, None, None] * w[at + "attention.log_n_scale"][:, None]
        if encoding in angles:
            rotation = torch.polar(torch.ones(T, D // 2).double(), angles[encoding])[:, None]
            q, k = (torch.complex(t[..., : D // 2], t[..., D // 2 :]) * rotation for t in (q, k))
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
    how = dict(n_kv_head=n_kv_head, qk_norm=qk_norm, tie_weights=qk_norm)
    m = build(pattern, **how, logit_scale="log_n" if n_kv_head else "none")
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
@pytest.mark.parametrize("chunk", [2, 7, 512])
def test_left_padding_takes_no_place_and_may_be_longer_than_a_prefill_chunk(pattern, chunk):
    m, tokens, pad = build(pattern, n_kv_head=2), random_tokens(3, 20), torch.tensor([0, 9, 4])
    tokens[1, :9] = 0  # as generate() pads, with line breaks
    cache = m.new_cache()
    with torch.inference_mode():
        m.prefill(tokens[:, :13], cache, pad, chunk)
        later = [m.head(m.hidden(part, cache)) for part in tokens[:, 13:].split([1, 4, 2], dim=1)]
    whole = m.head(m.hidden(tokens, pad=pad))
    assert whole.isfinite().all()
    for b, n in enumerate(pad.tolist()):
        alone = m(tokens[b : b + 1, n:])[0]
        close(whole[b, n:], alone)
        close(torch.cat(later, 1)[b], alone[-7:])
        place = rope2d.grid(tokens[b : b + 1, n:], BREAKS)[1]
        assert torch.equal(cache.state[:, b : b + 1], place)


def test_a_query_sees_what_came_before_it_but_no_padding_beside_itself():
    mask = model.attention_mask(2, 5, torch.tensor([1, 4]), torch.device("cpu"))
    assert mask[0].tolist() == [[[False, True, True, True, False], [False, True, True, True, True]]]
    assert mask[1].tolist() == [[[False, False, False, True, False], [False, False, False, False, True]]]


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
    for grads in (False, True):
        with torch.set_grad_enabled(grads):
            mask = model.attention_mask(chunk, past + chunk, None, q.device)
            assert (mask is None) == (not grads or chunk in (1, past + chunk))
            assert (model.attend(q, k, v, mask, 0.5) - expected).abs().max() < 1e-6


@patterns
def test_look_is_shown_the_queries_and_keys_that_each_layer_attends_with(pattern, monkeypatch):
    m, tokens = build(pattern, n_kv_head=2), random_tokens(2, 20)
    attend, used, seen = model.attend, [], []
    monkeypatch.setattr(model, "attend", lambda q, k, *rest: used.append((q, k)) or attend(q, k, *rest))
    plain = m.hidden(tokens)
    for cache, parts in ((None, [tokens]), (m.new_cache(), tokens.split([12, 8], dim=1))):
        used.clear()
        states = [m.hidden(part, cache, look=lambda *shown: seen.append(shown)) for part in parts]
        close(torch.cat(states, 1), plain)
        for i, (layer, q, k) in enumerate(seen[-len(used) :]):
            assert layer == i % 3 and torch.equal(q, used[i][0]) and torch.equal(k, used[i][1])
    D = {layer: 24 if block.attention.encoding == "alibi" else 16 for layer, block in enumerate(m.blocks)}
    wanted = [(T, Tk, D[layer]) for T, Tk in ((20, 20), (12, 12), (8, 20)) for layer in range(3)]
    assert [(q.shape[2], k.shape[2], q.shape[3]) for _, q, k in seen] == wanted
    assert {(q.shape[:2], k.shape[:2]) for _, q, k in seen} == {((2, 4), (2, 2))}


def test_the_cache_doubles_its_room_up_to_the_limit_and_keeps_what_it_holds():
    cache, rooms, k = Cache(1, limit=20), [], torch.arange(20.0).view(1, 1, 20, 1)
    for T in (3, 1, 1, 1, 1, 8, 1, 4):  # 20 in all
        new = k[:, :, cache.length : cache.length + T]
        keys, values = cache.extend(0, new, -new)
        cache.length += T
        assert torch.equal(keys, k[:, :, : cache.length]) and torch.equal(values, -keys)
        rooms.append(cache.keys[0].shape[2])
    assert rooms == [3, 6, 6, 6, 12, 20, 20, 20]
    cache = Cache(1, limit=20, room=7)
    assert [cache.extend(0, k[:, :, :2], k[:, :, :2]) and t[0].shape[2] for t in (cache.keys, cache.values)] == [7, 7]


def test_cache_counts_towards_block_size_and_padding_belongs_to_its_first_chunk():
    m = build()
    cache = m.new_cache()
    m.hidden(random_tokens(1, 60), cache)
    with pytest.raises(ValueError, match="65.*block_size=64"):
        m.hidden(random_tokens(1, 5), cache)
    with pytest.raises(ValueError, match="first chunk"):
        m.hidden(random_tokens(1, 2), cache, torch.tensor([1]))
    assert m.hidden(random_tokens(1, 4), cache).shape == (1, 4, 32)


def test_qk_norm_under_autocast_is_close_to_float32_and_takes_no_slow_path(recwarn):
    m, tokens = build("h-rope", qk_norm=True, init_std=0.1), random_tokens(2, 30)
    exact = m(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = m(tokens)
    assert (rounded.float() - exact).square().mean().sqrt() < 0.03 * exact.std()
    assert not [str(warning.message) for warning in recwarn if "fused" in str(warning.message)]


# Config and initial weights


@pytest.mark.parametrize("zero", [True, False])
def test_initial_weights_have_their_std_and_outputs_start_at_zero(zero):
    torch.manual_seed(0)
    how = dict(init_std=0.03, zero_init_residual=zero, qk_norm=True, qk_norm_init=0.25)
    m = Decoder(ModelConfig(n_layer=2, n_embd=128, vocab_size=VOCAB, **how), BREAKS)
    for name, p in m.requires_grad_(False).named_parameters():
        if "norm" in name:
            assert (p == (0.25 if ".q_norm." in name or ".k_norm." in name else 1)).all()
        elif zero and name.endswith(".out.weight"):
            assert not p.any()
        else:
            assert float(p.std()) == pytest.approx(0.03, abs=5 * 0.03 / math.sqrt(2 * p.numel())), name
            assert abs(float(p.mean())) < 5 * 0.03 / math.sqrt(p.numel()), name
    tokens = random_tokens(1, 5)
    assert torch.equal(m(tokens), m.head(m.norm(m.embed(tokens)))) == zero  # depth starts at the identity


@pytest.mark.parametrize("shared", [0.0, 3.0])
def test_embeddings_start_with_one_vector_in_common(shared):
    torch.manual_seed(0)
    m = Decoder(ModelConfig(n_embd=256, vocab_size=400, shared_embed_init=shared), torch.zeros(3, 400))
    common = m.embed.weight.detach().mean(0)
    assert common.std().item() == pytest.approx(0.02 * (shared or 0.05), rel=0.2)
    assert (m.embed.weight.detach() - common).std().item() == pytest.approx(0.02, rel=0.02)


def test_frequencies_gates_and_sizes_are_as_the_config_says():
    rotary = rope2d.Rotary("2d-rope", 16, "mixed", 77.0, 3, 0.5, learned=True)
    how = dict(freqs="mixed", rope_theta=77.0, freqs_seed=3, rotary_fraction=0.5, freqs_learned=True)
    ours = build(**how)
    assert torch.equal(ours.rotary["2d-rope"].phase, rotary.phase) and ours.rotary["2d-rope"].log_scale is not None
    auto = build("auto-2d-rope", auto_bias=0.3, **how).auto
    assert auto.grid.proj.bias.tolist() == pytest.approx([0.3]) and torch.equal(auto.rotary.phase, rotary.phase)
    assert auto.rotary.log_scale is not None
    assert AutoGrid(4000).proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    m = Decoder(ModelConfig(n_embd=32, vocab_size=VOCAB, freqs_learned=True), BREAKS)
    assert m.blocks[0].mlp.out.in_features == 128 and not m.rotary["2d-rope"].log_scale.any()


@pytest.mark.parametrize(
    "call, numbers",
    [
        (lambda: build(n_head=4, n_kv_head=3), ("n_head=4", "n_kv_head=3")),
        (lambda: build(n_head=5, n_embd=32, head_dim=None), ("n_embd=32", "n_head=5")),
        (lambda: build(mlp_dim=0), ("mlp_dim=0",)),
        (lambda: build(qk_norm_init=0.0), ("qk_norm_init=0.0",)),
        (lambda: build(shared_embed_init=float("nan")), ("shared_embed_init=nan", "not finite")),
        (lambda: build(auto_bias=float("inf")), ("auto_bias=inf", "not finite")),
        (lambda: build("rope", grid_reset=4), ("grid_reset=4", "'rope'")),
        (lambda: build(freqs="uniform", rope_theta=5.0), ("rope_theta=5.0", "uniform")),
        (lambda: build(vocab_size=VOCAB + 1), (str(VOCAB), str(VOCAB + 1))),
        (lambda: build()(random_tokens(1, 65)), ("65", "64")),
        (lambda: build()(random_tokens(1, 0)), ("no tokens",)),
    ],
)
def test_wrong_values_are_refused_with_their_numbers(call, numbers):
    with pytest.raises(ValueError) as error:
        call()
    assert all(number in str(error.value) for number in numbers), error.value


# The learned grid


@pytest.mark.parametrize("pattern", ["auto-2d-rope", "rope+auto-2d-rope"])
def test_saturating_gates_make_one_grid_of_the_embeddings_whatever_the_layers_are(pattern):
    m, tokens, grids = build(pattern, n_layer=4), random_tokens(2, 30), []
    assert [module for module in m.modules() if isinstance(module, AutoGrid)] == [m.auto.grid]
    m.auto.grid.register_forward_hook(lambda _, got, gave: grids.append(gave[0]))
    before = m(tokens)
    m.init_weights(embedding=False)
    after = m(tokens)
    assert len(grids) == 2 and torch.equal(*grids) and not torch.allclose(before, after)
    state = F.rms_norm(m.embed(tokens), (32,), eps=m.config.norm_eps)
    assert torch.equal(grids[0], m.auto.grid(state, torch.zeros_like(grids[0]) + torch.arange(30))[0])
    assert grids[0][rope2d.ROW].std() > 0.5


def test_the_papers_gates_make_a_grid_in_each_layer_of_its_normed_input():
    m, seen, normed = build("auto-2d-rope sigmoid"), [], []
    assert m.auto is None
    for block in m.blocks:
        block.attention_norm.register_forward_hook(lambda _, got, gave: normed.append(gave))
        block.attention.auto.grid.register_forward_pre_hook(lambda _, got: seen.append(got[0]))
    m(random_tokens(2, 9))
    assert len(seen) == 3 and all(a is b for a, b in zip(seen, normed, strict=True))


def test_a_frozen_grid_is_rounded_and_kept_and_all_else_is_drawn_anew(tmp_path):
    m = build("auto-2d-rope").requires_grad_(True)
    before = {name: p.clone() for name, p in m.named_parameters()}
    loose = m.state_dict()
    m.freeze_grid()
    kept = {name for name, p in m.named_parameters() if torch.equal(p, before[name])}
    assert kept == {"embed.weight", "auto.grid.proj.weight", "auto.grid.proj.bias"}
    assert {name for name, p in m.named_parameters() if not p.requires_grad} == kept - {"embed.weight"}
    checkpoint.save({"model": m.state_dict(), "config": vars(m.config), "step": 1, "data": {}}, tmp_path / "a.pt")
    again = checkpoint.load_model(checkpoint.read(tmp_path / "a.pt"))
    assert again.auto.grid.frozen and not again.auto.grid.proj.weight.requires_grad
    assert not checkpoint.load_model({"model": loose, "config": vars(m.config)}).auto.grid.frozen
    assert again.embed.weight.requires_grad and torch.equal(again(random_tokens(2, 9)), m(random_tokens(2, 9)))
    assert set(again.auto.grid.gates(torch.randn(2, 9, 32))[0].unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("at_once", [2**25, 5 * VOCAB])
def test_loss_is_the_summed_float64_cross_entropy_of_the_targets(at_once, monkeypatch):
    monkeypatch.setitem(model.LOGITS_PER_CHUNK, "cpu", at_once)
    m, tokens, targets = build().requires_grad_(), random_tokens(2, 9), random_tokens(2, 9, seed=1)
    targets[0, :4] = targets[1, 7] = IGNORE
    wanted, right = targets != IGNORE, targets.where(targets != IGNORE, 0)
    log_p = m(tokens).double().log_softmax(-1).gather(2, right[..., None])[..., 0] * wanted
    for weights in (None, torch.rand(2, 9)):
        by_hand = -(log_p if weights is None else log_p * weights).sum().item()
        loss = m(tokens, targets, weights)
        assert loss.item() == pytest.approx(by_hand, rel=1e-6)
        assert ("Chunked" in loss.grad_fn.name()) == (at_once < 2**25)
    assert m(tokens, torch.full((2, 9), IGNORE)).item() == 0


def loss_and_gradients(x, weight, targets, chunk=None, weights=None):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    if chunk is None:
        each = F.cross_entropy((x @ weight.T).float(), targets, ignore_index=IGNORE, reduction="none")
        loss = (each if weights is None else each * weights).sum()
    else:
        loss = model.ChunkedLoss.apply(x, weight, targets, weights, chunk)
    (0.37 * loss).backward()
    return loss.detach(), x.grad, weight.grad


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("ignored", [[], [0, *range(5, 14), 39], range(40)], ids=["none", "some", "all"])
def test_the_chunked_loss_and_its_gradients_are_those_of_the_whole(chunk, ignored):
    g = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(n, 12, generator=g, dtype=torch.float64) for n in (40, 31))
    targets = torch.randint(31, (40,), generator=g)
    targets[list(ignored)] = IGNORE
    for weights in (None, torch.rand(40, generator=g)):
        ours = loss_and_gradients(x.float(), weight.float(), targets, chunk, weights)
        for got, plain in zip(ours, loss_and_gradients(x, weight, targets, None, weights), strict=True):
            torch.testing.assert_close(got.double(), plain.double(), rtol=1e-5, atol=1e-5)


def test_the_chunked_loss_sums_weight_gradients_in_float32_under_autocast():
    g = torch.Generator().manual_seed(3)
    x, weight = torch.randn(4096, 16, generator=g), torch.randn(50, 16, generator=g)
    targets = torch.randint(50, (4096,), generator=g)
    exact = loss_and_gradients(x.double(), weight.double(), targets)
    with torch.autocast("cpu", torch.bfloat16):
        loss, dx, dw = loss_and_gradients(x, weight, targets, 64)
    assert loss.dtype == dx.dtype == dw.dtype == torch.float32
    assert (loss / exact[0] - 1).abs() < 1e-3
    for ours, theirs, error in ((dx, exact[1], 0.01), (dw, exact[2], 0.004)):
        assert (ours - theirs).norm() < error * theirs.norm()  # a sum of 64 chunks in bfloat16 is off by more


def test_without_gradients_the_chunked_loss_makes_none(monkeypatch):
    m, tokens = build().requires_grad_(), random_tokens(3, 20)
    with torch.no_grad():
        plain = m(tokens, tokens)
        monkeypatch.setitem(model.LOGITS_PER_CHUNK, "cpu", 7 * VOCAB)
        monkeypatch.setattr(torch.Tensor, "scatter_add_", lambda *_: pytest.fail("made a gradient"))
        torch.testing.assert_close(m(tokens, tokens), plain)
