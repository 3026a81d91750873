"""scripts/far.py: the convolution gives the model's own margins, target by target."""

import json

import pytest
import torch
from conftest import run

import checkpoint
import data_copy
from scripts import far

KNOBS = dict(n_layer=1, freqs="uniform", init_std=0.3, zero_init_residual=False, block_size=2000, max_steps=1)


@pytest.mark.parametrize("knobs", [{}, {"qk_norm": True, "n_head": 4}], ids=["plain", "qk_norm"])
def test_margins_are_the_models_own(tmp_path, knobs):
    run(tmp_path, **KNOBS | knobs)
    model, _ = checkpoint.load_run(str(tmp_path))
    for n in (1, 2, 77, 600):
        (source,) = data_copy.evaluation_strings("uniform", n, n, 1, 0)
        inputs, targets = map(torch.from_numpy, data_copy.pack([source], [n]))
        wanted = targets[0, -n - 1 :]
        with torch.no_grad():
            logits = model(inputs)[0, -n - 1 :]
        right = logits.gather(1, wanted[:, None])
        best = logits.scatter(1, wanted[:, None], -torch.inf).amax(1, keepdim=True)
        torch.testing.assert_close(far.margins(model, inputs[0], wanted), (right - best)[:, 0], atol=2e-4, rtol=0)


def test_rows_hold_the_whole_string_and_what_the_model_says_of_its_windows(tmp_path, monkeypatch, capsys):
    run(tmp_path, **KNOBS)
    argv = [f"--runs={tmp_path}", "--tasks=uniform", "--lengths=40,900", "--windows=3", "--window=5"]
    monkeypatch.setattr("sys.argv", ["far.py", *argv, f"--out_dir={tmp_path}"])
    far.main()
    rows = json.loads((tmp_path / "far.json").read_text())
    assert [(row["length"], row["windows"]) for row in rows] == [(40, 15), (900, 15)]
    for row in rows:
        assert row["wrong_tokens"] > 0 > row["margin"] and row["margin"] <= row["windows_margin"]
        assert row["windows_margin"] == pytest.approx(row["of_the_model"], abs=1e-3)
    assert far.windows_of(41, far.FarConfig(runs=("x",), windows=3, window=5)).tolist() == [
        *range(5),
        *range(18, 23),
        *range(36, 41),
    ]
    assert "recursive" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "knobs",
    [dict(n_layer=2), dict(pos_encoding="rope"), dict(logit_scale="log_n"), dict(separator="*"), dict(grid_reset=7)],
)
def test_other_models_are_refused(tmp_path, knobs):
    run(tmp_path, **KNOBS | knobs)
    model, trained = checkpoint.load_run(str(tmp_path))
    with pytest.raises(ValueError, match="expected (one layer of 2d-rope|<n>)"):
        far.check_kind("run", model, trained)


def test_copies_at_other_places_are_refused():
    with pytest.raises(ValueError, match="tasks: 'twice' is not one of imbalanced"):
        far.FarConfig(runs=("x",), tasks=("uniform", "twice"))


def test_a_disagreement_with_the_model_is_an_error(tmp_path, monkeypatch):
    run(tmp_path, **KNOBS)
    model, trained = checkpoint.load_run(str(tmp_path))
    margins = far.margins
    monkeypatch.setattr(far, "margins", lambda *args: margins(*args) + 0.2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="uniform, 40: .* wrong of 41 targets, margin .*; the model itself: "):
            far.evaluate("run", model, trained, "uniform", 40, far.FarConfig(runs=("x",)))
        monkeypatch.setattr(far, "margins", lambda *args: margins(*args) + float("nan"))
