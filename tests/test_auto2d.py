"""Auto-2D-RoPE across rope2d.py, model.py, train.py: scan, gates, settling; learned and partial frequencies, log_n."""

import math
import os
import signal

import pytest
import torch
import torch.nn.functional as F

import checkpoint
import configurator
import data_copy
import rope2d
import train
from model import Decoder, ModelConfig
from rope2d import COL, ROW, AffineScan, AutoGrid, Rotary
from train import TrainConfig

TABLE = rope2d.newline_table(data_copy.TOKEN_BYTES)
TINY = "n_embd=16 head_dim=8 block_size=64 max_length=6 batch_size=8 max_steps=12 warmup_steps=3 device=cpu".split()
TINY += "eval_steps=1 learning_rate=0.01 pos_encoding=auto-2d-rope separator=* grid_steps=5".split()


def run(out, *changes: str) -> dict:
    argv = [f"--{knob}" for knob in (*TINY, f"out_dir={out}", *changes)]
    train.train(*configurator.configure(*train.CONFIGS, argv=argv))
    return torch.load(out / "last.pt")


def plain_scan(a: torch.Tensor, b: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    h = [start]
    for t in range(a.shape[-1]):
        h.append(a[..., t] * h[-1] + b[..., t])
    return torch.stack(h, dim=-1)


@pytest.mark.parametrize("T", [1, 2, 7, 4096])
@pytest.mark.parametrize("low", [0.0, 0.9, 0.999, 1.0])  # 1.0: columns that count to T
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


def test_saturating_gates_give_the_rule_of_line_breaks_shifted_by_the_first_column():
    tokens = torch.randint(0, 4, (3, 50), generator=torch.Generator().manual_seed(0))  # token 0 breaks lines
    gate = AutoGrid(4)
    with torch.no_grad():
        gate.proj.weight.copy_(torch.tensor([[-10.0, 0, 0, 0]]))
        gate.proj.bias.fill_(5.0)
    states = torch.nn.functional.one_hot(tokens, 4).float()
    ruled, _ = rope2d.grid(tokens, torch.tensor([1, 0, 0, 0]))
    learned, end = gate(states, ruled)
    assert torch.equal(learned[ROW], ruled[ROW].double())
    after_break = (ruled[ROW] > 0).double()  # B = 1: a new line begins in column 1, the first in 0
    assert torch.equal(learned[COL], ruled[COL] + after_break)
    assert gate.gates(states)[0].unique().tolist() == [0.0, 1.0] and end.shape == (2, 3)


def test_sigmoid_gates_are_the_papers_recurrence():
    torch.manual_seed(0)
    gate, x = AutoGrid(8, "sigmoid"), torch.randn(1, 20, 8)
    A, B = (gate.proj(x)[0].sigmoid().double()).unbind(-1)
    row = col = torch.zeros((), dtype=torch.float64)
    positions, end = gate(x, torch.zeros(3, 1, 20, dtype=torch.int64))
    for t in range(20):
        assert (positions[ROW, 0, t] - row).abs() < 1e-6 and (positions[COL, 0, t] - col).abs() < 1e-6
        row, col = row + (1 - A[t]), A[t] * col + B[t]
    assert (end[:, 0] - torch.stack([row, col])).abs().max() < 1e-6


def test_real_positions_turn_by_their_float64_angle_and_pass_its_gradient():
    rotary = Rotary("auto-2d-rope", 16, "uniform", seed=3)
    freqs = torch.stack([rope2d.frequencies("uniform", 4, 1.0, seed) for seed in (3, 4)])
    positions = (torch.rand(3, 2, 5, dtype=torch.float64) * 1e6).requires_grad_()
    exact = (positions[1:].movedim(0, -1)[..., None] * freqs).flatten(-2)
    ours = rotary.angles(positions)
    torch.testing.assert_close(ours.cos().double(), exact.cos(), atol=1e-6, rtol=0)
    weight = torch.randn_like(ours)
    ours, theirs = (torch.autograd.grad((w * weight).sum(), positions)[0] for w in (ours, exact))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("pattern", ["auto-2d-rope", "rope+auto-2d-rope"])
def test_saturating_gates_make_one_grid_of_the_embeddings_whatever_the_layers_are(pattern):
    config = ModelConfig(n_layer=4, n_embd=16, vocab_size=len(TABLE), pos_encoding=pattern, zero_init_outputs=False)
    model, tokens, grids = Decoder(config, TABLE), torch.randint(0, 37, (2, 30)), []
    assert [m for m in model.modules() if isinstance(m, AutoGrid)] == [model.auto.grid]
    torch.nn.init.normal_(model.auto.grid.proj.weight)
    model.auto.grid.register_forward_hook(lambda _, got, gave: grids.append(gave[0]))
    before = model(tokens)
    model.init_weights(embedding=False)
    after = model(tokens)
    assert len(grids) == 2 and torch.equal(*grids) and not torch.allclose(before, after)
    state = F.rms_norm(model.embed(tokens), (16,), eps=config.norm_eps)
    assert torch.equal(grids[0], model.auto.grid(state, torch.zeros_like(grids[0]) + torch.arange(30))[0])
    assert grids[0][ROW].std() > 0.5


def test_the_papers_gates_make_a_grid_in_each_layer_of_its_normed_input():
    config = ModelConfig(n_layer=2, n_embd=16, vocab_size=len(TABLE), pos_encoding="auto-2d-rope", auto_gate="sigmoid")
    model, seen, normed = Decoder(config, TABLE), [], []
    assert model.auto is None
    for block in model.blocks:
        block.attention_norm.register_forward_hook(lambda _, got, gave: normed.append(gave))
        block.attention.auto.grid.register_forward_pre_hook(lambda _, got: seen.append(got[0]))
    model(torch.randint(0, 37, (2, 9)))
    assert len(seen) == 2 and all(a is b for a, b in zip(seen, normed, strict=True))


def test_a_settled_grid_is_rounded_fixed_and_all_else_is_drawn_anew():
    config = ModelConfig(n_layer=2, n_embd=16, vocab_size=len(TABLE), pos_encoding="auto-2d-rope")
    model = Decoder(config, TABLE)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01)
    before = {name: p.clone() for name, p in model.named_parameters()}
    model.settle_grid()
    kept = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert kept == {"embed.weight", "auto.grid.proj.weight", "auto.grid.proj.bias"}
    A, B = model.auto.grid.gates(torch.randn(2, 9, 16))
    assert set(A.unique().tolist()) <= {0.0, 1.0} and B.unique().tolist() == [1.0] and not A.requires_grad
    again = checkpoint.load_model({"model": model.state_dict(), "config": vars(config)})
    assert again.auto.grid.settled


def test_while_the_grid_is_sought_embeddings_and_norms_stand_still_and_afterwards_the_gates(tmp_path):
    start = run(tmp_path / "0", "max_steps=6", "grid_steps=6", "init=scratch")  # ends before it settles
    fresh = torch.load(tmp_path / "0" / "best.pt")["model"]
    torch.manual_seed(0)
    drawn = Decoder(ModelConfig(**{k: v for k, v in start["config"].items() if k in vars(ModelConfig())}), TABLE)
    for name, p in drawn.state_dict().items():
        moved = not torch.equal(p, start["model"][name])
        assert moved == (name.endswith(("qkv.weight", "out.weight", "gate_up.weight", "head.weight")) or "proj" in name)
    whole = run(tmp_path / "1")
    assert whole["model"]["auto.grid.settled"] and not fresh["auto.grid.settled"]


@pytest.mark.parametrize("at", [3, 4, 5, 8])  # the grid settles before step 5
def test_a_run_stopped_around_the_settling_goes_on_bit_for_bit(tmp_path, monkeypatch, at):
    whole, batch = run(tmp_path / "whole"), data_copy.batch

    def interrupted(config, n, step, seed, stream):
        if (stream, step) == ("train", at):
            os.kill(os.getpid(), signal.SIGTERM)
        return batch(config, n, step, seed, stream)

    monkeypatch.setattr(data_copy, "batch", interrupted)
    with pytest.raises(SystemExit):
        run(tmp_path / "stopped")
    monkeypatch.setattr(data_copy, "batch", batch)
    stopped = run(tmp_path / "stopped")
    for name, p in whole["model"].items():
        assert torch.equal(p, stopped["model"][name]), name


def test_the_schedule_begins_anew_when_the_grid_has_settled():
    config = TrainConfig(max_steps=50, grid_steps=20, warmup_steps=10, learning_rate=1.0)
    plain = TrainConfig(max_steps=30, warmup_steps=10, learning_rate=1.0)
    rates = [train.learning_rate(config, step) for step in range(50)]
    assert rates[:20] == pytest.approx([min(1, (step + 1) / 10) for step in range(20)])
    assert rates[20:] == pytest.approx([train.learning_rate(plain, step) for step in range(30)])


def test_gates_have_a_rate_of_their_own_and_no_decay():
    model = Decoder(ModelConfig(n_embd=16, vocab_size=len(TABLE), pos_encoding="auto-2d-rope"), TABLE)
    optimizer = train.make_optimizer(model, TrainConfig(gate_lr_scale=7.0, weight_decay=0.5))
    gates = [g for g in optimizer.param_groups if any(p is model.auto.grid.proj.weight for p in g["params"])]
    assert [(g["lr_scale"], g["weight_decay"], len(g["params"])) for g in gates] == [(7.0, 0.0, 2)]


def test_learned_frequencies_start_as_drawn_and_learn_by_the_formula():
    plain, learned = (Rotary("2d-rope", 16, "uniform", learned=flag) for flag in (False, True))
    positions = torch.randint(0, 10**6, (3, 2, 5))
    torch.testing.assert_close(learned.angles(positions).cos(), plain.angles(positions).cos(), atol=1e-6, rtol=0)
    with torch.no_grad():
        learned.log_scale.normal_(0.0, 0.5)
    freqs = torch.stack([rope2d.frequencies("uniform", 4, 1.0, seed) for seed in (0, 1)])
    scale = learned.log_scale.detach().double().requires_grad_()
    small = positions % 1000
    exact = (small[1:].movedim(0, -1)[..., None] * (freqs * scale.exp())).flatten(-2)
    ours = learned.angles(small)
    torch.testing.assert_close(ours.cos().double(), exact.cos(), atol=2e-4, rtol=0)  # exp(s) itself is float32
    weight = torch.randn_like(ours)
    mine = torch.autograd.grad((ours * weight).sum(), learned.log_scale)[0]
    theirs = torch.autograd.grad((exact * weight).sum(), scale)[0]
    torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("fraction, turning", [(1.0, 4), (0.5, 2), (0.3, 2), (0.25, 1)])
def test_rotary_fraction_keeps_the_highest_frequencies(fraction, turning):
    angles = Rotary("2d-rope", 16, "geometric", fraction=fraction).angles(torch.ones(3, 1, 1, dtype=torch.int64))
    expected = torch.tensor([1000 ** (-i / 4) if i < turning else 0.0 for i in range(4)])
    torch.testing.assert_close(angles.view(2, 4), expected.expand(2, 4), atol=1e-6, rtol=1e-6)


def test_log_n_scales_the_logits_by_the_log_of_the_visible_keys():
    config = ModelConfig(n_embd=16, vocab_size=len(TABLE), pos_encoding="nope", logit_scale="log_n", init_std=0.5)
    scaled = Decoder(config, TABLE).eval()
    x, captured = torch.randint(0, 20, (1, 6)), {}
    real = torch.nn.functional.scaled_dot_product_attention

    def spy(q, k, v, **kwargs):
        captured["q"] = q
        return real(q, k, v, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = spy
    try:
        with torch.no_grad():
            scaled.blocks[0].attention.log_n_scale.copy_(torch.tensor([1.0, 2.0]))
            scaled(x)
            states = scaled.blocks[0].attention_norm(scaled.embed(x))
            q = scaled.blocks[0].attention.qkv(states)[..., :16].view(1, 6, 2, 8).transpose(1, 2)
    finally:
        torch.nn.functional.scaled_dot_product_attention = real
    factor = torch.tensor([[s * math.log(n + 1) for n in range(6)] for s in (1.0, 2.0)])[None, ..., None]
    torch.testing.assert_close(captured["q"], q * factor)


@pytest.mark.parametrize("knob", ["rotary_fraction=0", "rotary_fraction=1.5"])
def test_a_share_of_nothing_or_more_than_all_is_refused(knob):
    config = configurator.configure(ModelConfig, argv=[f"--{knob}", "--vocab_size=37"])
    with pytest.raises(ValueError, match="rotary_fraction"):
        Decoder(config, TABLE)
