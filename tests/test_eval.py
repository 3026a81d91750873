"""eval.py: verdicts against plain forwards and real decoding, reports, refusals, memory."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import configurator
import data_copy
import eval as evaluation
import rope2d
import train
from data_copy import NEWLINE
from eval import EvalConfig, Verdict, copy_ladder, free_running, teacher_forced
from model import Decoder, ModelConfig
from report import table, wilson

TINY = dict(n_layer=2, n_embd=32, head_dim=16, freqs="uniform", block_size=90, max_length=6, batch_size=16)
TINY |= dict(learning_rate=0.01, warmup_steps=10, max_steps=80, eval_interval=1000, device="cpu")
ENCODINGS = ["2d-rope", "auto-2d-rope", "rope", "nope", "alibi", "h-rope"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A half-trained run of each encoding: right on short strings, wrong on long ones."""
    out = {encoding: tmp_path_factory.mktemp("runs") / encoding for encoding in ENCODINGS}
    for encoding, path in out.items():
        argv = [f"--{k}={v}" for k, v in (TINY | {"pos_encoding": encoding, "out_dir": path, "seed": 3}).items()]
        train.train(*configurator.configure(*train.CONFIGS, argv=argv))
    return out


def untrained(encoding: str, **changes) -> Decoder:
    torch.manual_seed(0)
    values = dict(n_layer=2, n_embd=32, head_dim=16, block_size=90, init_std=0.3, zero_init_outputs=False)
    config = ModelConfig(pos_encoding=encoding, vocab_size=len(data_copy.VOCAB), **values | changes)
    return Decoder(config, rope2d.newline_table(data_copy.TOKEN_BYTES)).eval()


def strings(n: int = 8, longest: int = 40) -> list[np.ndarray]:
    tasks = ("uniform", "imbalanced")
    short = [s for task in tasks for s in data_copy.evaluation_strings(task, 1, 6, n, 0)]
    return short + [s for task in tasks for s in data_copy.evaluation_strings(task, 1, longest, n, 0)]


@pytest.fixture(scope="module", params=[*ENCODINGS, "untrained auto-2d-rope", "untrained alibi"])
def model(request, runs) -> Decoder:
    if request.param in runs:
        return evaluation.load_run(str(runs[request.param]), "last", torch.device("cpu"))[0]
    return untrained(request.param.split()[1])


def config_for(*paths: Path, **changes) -> EvalConfig:
    values = dict(tasks=("uniform", "imbalanced"), lengths=(3, "4-20"), samples=(10, 7), device="cpu")
    return EvalConfig(runs=tuple(map(str, paths)), **values | changes)


def without(rows: list[dict], *names: str) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in ("seconds", *names)} for row in rows]


# Verdicts


def test_teacher_forcing_gives_the_verdict_of_a_plain_forward_on_each_string(model):
    for source, got in zip(strings(), teacher_forced(model, strings(), NEWLINE), strict=True):
        n = len(source)
        tokens = torch.tensor([NEWLINE, data_copy.INPUT, *source, NEWLINE, NEWLINE, data_copy.OUTPUT, *source, NEWLINE])
        with torch.no_grad():
            logits = model(tokens[None, :-1])[0, n + 4 :]  # predictions of the copy and the separator
        right = logits.gather(1, tokens[n + 5 :, None])[:, 0]
        lead = right - logits.scatter(1, tokens[n + 5 :, None], -math.inf).amax(1)
        wrong = (logits.argmax(1) != tokens[n + 5 :]).nonzero()[:, 0].tolist()
        assert got[:3] == (n + 1, len(wrong), wrong[0] if wrong else None)
        assert got.margin == pytest.approx(lead.min().item(), abs=1e-4)
        assert lead[got.weakest] == pytest.approx(lead.min().item(), abs=1e-4)
        assert (got.margin < 0) == (got.errors > 0)


def test_teacher_forcing_agrees_with_real_decoding_string_by_string(model):
    forced, free = (decode(model, strings(), NEWLINE) for decode in (teacher_forced, free_running))
    assert [(v.targets, v.first_error) for v in forced] == [(v.targets, v.first_error) for v in free]
    assert [v.errors == 0 for v in forced] == [v.errors == 0 for v in free]


def test_the_half_trained_models_fail_in_many_places_and_all_but_nope_get_some_strings_right(runs):
    for encoding, path in runs.items():  # or the agreement above would say little
        model, _ = evaluation.load_run(str(path), "last", torch.device("cpu"))
        first_errors = {v.first_error for v in teacher_forced(model, strings(), NEWLINE)}
        assert len(first_errors) > 4 and (None in first_errors or encoding == "nope")


@pytest.mark.parametrize("chunk", [2, 7, 64])
def test_chunks_and_batches_do_not_change_verdicts(model, chunk):
    sources = strings(5)
    whole = teacher_forced(model, sources, NEWLINE)
    alone = [teacher_forced(model, [source], NEWLINE, chunk)[0] for source in sources]
    for other in (teacher_forced(model, sources, NEWLINE, chunk), alone):
        assert [v[:3] for v in other] == [v[:3] for v in whole]
        assert [v.margin for v in other] == pytest.approx([v.margin for v in whole], abs=1e-4)


def test_a_model_of_nan_is_wrong_everywhere():
    model = untrained("rope")
    model.norm.weight.data.fill_(math.nan)
    assert all(v.errors == v.targets and v.first_error == 0 for v in teacher_forced(model, strings(2), NEWLINE))


@pytest.mark.parametrize("mode", [True, False])
def test_evaluation_leaves_the_model_alone(mode):
    model = untrained("2d-rope").train(mode)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    teacher_forced(model, strings(2), NEWLINE)
    free_running(model, strings(2), NEWLINE)
    assert model.training == mode and all(p.requires_grad and p.grad is None for p in model.parameters())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("decode", [teacher_forced, free_running])
def test_the_longest_string_that_fits_the_model_is_evaluated_and_one_more_token_refused(decode):
    model = untrained("rope", block_size=45)  # 2 x 20 + 5
    assert decode(model, [np.zeros(20, np.int64)], NEWLINE)[0].targets == 21
    with pytest.raises(ValueError, match="longer than the model's block_size=45"):
        decode(model, [np.zeros(21, np.int64)], NEWLINE)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [t for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, torch.Tensor)]
        self.elements = max([self.elements, *(t.numel() for t in made)])
        return out


def test_memory_grows_linearly_with_length_and_logits_are_made_at_targets_alone():
    model, largest, rows = untrained("2d-rope", n_layer=1, block_size=10_000), {}, []
    model.head.register_forward_hook(lambda head, args, logits: rows.append(logits.numel() // logits.shape[-1]))
    for n in (375, 3000):
        with Largest() as largest[n]:
            teacher_forced(model, data_copy.evaluation_strings("uniform", n, n, 1, 0), NEWLINE, chunk=64)
    assert largest[375].elements > 700 * 32 and largest[3000].elements < 9 * largest[375].elements  # 64 if quadratic
    assert sum(rows) == 376 + 3001


@pytest.mark.parametrize("encoding", ["rope", "2d-rope", "h-rope"])
@pytest.mark.parametrize(("dtype", "first_wrong"), [(torch.float32, 200_000), (torch.bfloat16, 300)])
def test_rounded_angles_are_right_at_small_positions_and_wrong_at_large_ones(encoding, dtype, first_wrong):
    model, rounded = untrained(encoding, freqs="uniform"), untrained(encoding, freqs="uniform")
    evaluation.round_angles(rounded, dtype)
    for place, right in ((3, True), (first_wrong, False)):
        positions = torch.full((3, 1, 4), place) + torch.arange(4)
        for name, rotary in model.rotary.items():
            apart = (rotary(positions)[0] - rounded.rotary[name](positions)[0]).abs().max()
            assert (apart < (1e-5 if dtype == torch.float32 else 0.1)) == right


# The report


def test_a_row_counts_its_strings(monkeypatch):
    made = [Verdict(5, 0, None, 0.5, 4), Verdict(5, 3, 1, -2.0, 3), Verdict(5, 1, 4, -0.25, 4)]
    made.append(Verdict(5, 0, None, 0.125, 0))
    monkeypatch.setattr(evaluation, "teacher_forced", lambda model, group, *_: made[: len(group)])
    row = evaluation.evaluate(None, {"separator": "<n>"}, "uniform", None, (4, 4), 4, EvalConfig())
    wanted = dict(task="uniform", length=4, min_length=4, samples=4, exact_match=0.5, token_error=4 / 20, margin=-2.0)
    wanted |= dict(only_closing_wrong=0.25, first_errors=[None, 1, 4, None])
    wanted["margins"] = [[0.5, 4], [-2.0, 3], [-0.25, 4], [0.125, 0]]
    assert {name: row[name] for name in wanted} == wanted
    assert (row["exact_match_low"], row["exact_match_high"]) == wilson(2, 4)


def test_rows_do_not_depend_on_chunk_or_batch(runs):
    rows, small = (copy_ladder(config_for(runs["rope"], **how)) for how in ({}, dict(chunk=5, batch_tokens=1)))
    assert without(rows, "margin", "margins") == without(small, "margin", "margins")
    assert [r["margin"] for r in small] == pytest.approx([r["margin"] for r in rows], abs=1e-4)
    assert [(r["task"], r["min_length"], r["length"], r["samples"]) for r in rows] == [
        (task, low, high, n) for task in ("uniform", "imbalanced") for low, high, n in ((3, 3, 10), (4, 20, 7))
    ]
    model, _ = evaluation.load_run(str(runs["rope"] / "last.pt"), "last", torch.device("cpu"))
    verdicts = teacher_forced(model, data_copy.evaluation_strings("imbalanced", 4, 20, 7, 0), NEWLINE)
    assert rows[3]["first_errors"] == [v.first_error for v in verdicts]


def test_a_ladder_stops_where_it_is_told(runs):
    lengths = dict(lengths=(3, "4-20", 40, 41), samples=(10, 7, 2, 2), tasks=("uniform",))
    whole = copy_ladder(config_for(runs["2d-rope"], **lengths))
    shares = [row["exact_match"] for row in whole]
    assert shares[1] not in (0, 1) and shares[2:] == [0, 0], "the half-trained model is no longer half right"
    for stop, n in (("never", 4), ("failure", 1 + shares.index(next(s for s in shares if s < 1))), ("zero", 3)):
        rows = copy_ladder(config_for(runs["2d-rope"], stop=stop, **lengths))
        assert without(rows) == without(whole[:n])


def test_bfloat16_verdicts_are_close_to_those_in_float32(runs):
    rows, half = (
        copy_ladder(config_for(runs["2d-rope"], lengths=("1-4",), samples=(20,), dtype=dtype))
        for dtype in ("float32", "bfloat16")
    )
    assert {row["dtype"] for row in half} == {"bfloat16"} and without(half, "dtype") != without(rows, "dtype")
    for a, b in zip(rows, half, strict=True):
        assert b["exact_match"] == pytest.approx(a["exact_match"], abs=0.1)
        assert b["margin"] == pytest.approx(a["margin"], abs=0.3)


def test_repeat_structure_is_tried_at_every_p(runs):
    how = dict(tasks=("repeat-structure", "uniform"), lengths=(20,), samples=(6,), repeat_p=(0.5, 1.0))
    rows = copy_ladder(config_for(runs["2d-rope"], **how))
    assert [(row["task"], row["repeat_p"]) for row in rows] == [
        ("repeat-structure", 0.5),
        ("repeat-structure", 1.0),
        ("uniform", None),
    ]
    model, _ = evaluation.load_run(str(runs["2d-rope"]), "last", torch.device("cpu"))
    for row, p in zip(rows, (0.5, 1.0), strict=False):
        verdicts = teacher_forced(model, data_copy.evaluation_strings("repeat-structure", 20, 20, 6, 0, p), NEWLINE)
        assert row["first_errors"] == [v.first_error for v in verdicts]
    kept = data_copy.evaluation_strings("repeat-structure", 20, 20, 6, 0, 1.0)
    assert all(any((s[base:] == s[:-base]).all() for base in range(4, 11)) for s in kept)  # nothing flipped at p = 1


def test_last_and_best_are_told_apart(runs, tmp_path):
    for name, run in (("last", "rope"), ("best", "2d-rope")):
        (tmp_path / f"{name}.pt").write_bytes((runs[run] / "last.pt").read_bytes())
        assert copy_ladder(config_for(tmp_path, checkpoint=name))[0]["pos_encoding"] == run


def test_free_running_gives_the_same_exact_match(runs):
    forced, free = (copy_ladder(config_for(*runs.values(), free_running=f, samples=(8,))) for f in (False, True))
    same = "run", "task", "length", "samples", "exact_match", "first_errors", "only_closing_wrong"
    assert [[row[k] for k in same] for row in forced] == [[row[k] for k in same] for row in free]
    assert {row["mode"] for row in forced} == {"teacher-forced"} and {row["mode"] for row in free} == {"free-running"}


def test_two_processes_give_the_rows_of_one(runs, tmp_path):
    config = config_for(runs["2d-rope"], samples=(5, 1))  # the second process has nothing to do at length 20
    argv = [f"--{k}={','.join(map(str, getattr(config, k)))}" for k in ("runs", "tasks", "lengths", "samples")]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", evaluation.__file__]
    subprocess.run(
        [*launch, *argv, "--device=cpu", f"--out_dir={tmp_path}", "--plot=False"],
        cwd=Path(evaluation.__file__).parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=True,
        timeout=300,
    )
    one, two = copy_ladder(config), json.loads((tmp_path / "accuracy.json").read_text())
    assert without(two, "margin", "margins") == without(one, "margin", "margins")
    assert [r["margin"] for r in two] == pytest.approx([r["margin"] for r in one], abs=1e-4)


def test_the_script_writes_rows_and_plot_and_prints_the_table(runs, tmp_path, monkeypatch, capsys):
    argv = [f"--runs={runs['2d-rope']},{runs['rope']}", "--lengths=3,4-20", "--samples=8", "--tasks=uniform"]
    monkeypatch.setattr(sys, "argv", ["eval.py", *argv, "--device=cpu", f"--out_dir={tmp_path}"])
    evaluation.main()
    rows = json.loads((tmp_path / "accuracy.json").read_text())
    for row, encoding, length in zip(rows, ["2d-rope"] * 2 + ["rope"] * 2, [3, 20] * 2, strict=True):
        about = dict(pos_encoding=encoding, seed=3, trained_to=6, step=80, task="uniform", length=length, samples=8)
        assert {name: row[name] for name in about} == about and row["run"] == str(runs[encoding])
        assert row["exact_match"] == row["first_errors"].count(None) / 8
        assert (row["token_error"] > 0) == (row["exact_match"] < 1)
    assert table(rows) in capsys.readouterr().out
    assert matplotlib.image.imread(tmp_path / "accuracy.png").std() > 0


# Refusals


@pytest.mark.parametrize(
    "changes, error, match",
    [
        (dict(runs=()), ValueError, "nothing to evaluate: give --runs=DIR"),
        (dict(tasks=()), ValueError, "nothing to evaluate"),
        (dict(lengths=()), ValueError, "nothing to evaluate"),
        (dict(tasks=("uniform", "copy")), ValueError, "tasks: 'copy' is not one of imbalanced, recursive-flip"),
        (dict(lengths=("x",)), ValueError, "lengths: 'x' is neither"),
        (dict(samples=()), ValueError, r"samples=\(\): expected one number >= 1, or one for each of 2 lengths"),
        (dict(samples=(1, 2, 3)), ValueError, r"samples=\(1, 2, 3\): expected one number"),
        (dict(samples=(4, 0)), ValueError, r"samples=\(4, 0\): expected one number >= 1"),
        (dict(lengths=(3, 43)), ValueError, "sequence of 91 tokens is longer than the model's block_size=90"),
        (dict(runs=("out/missing",)), FileNotFoundError, "out/missing: no such checkpoint"),
        (dict(repeat_p=()), ValueError, r"repeat_p=\(\): expected shares"),
        (dict(repeat_p=(0.5, 1.5)), ValueError, r"repeat_p=\(0.5, 1.5\): expected shares"),
        (dict(angles="float32", free_running=True), ValueError, "angles='float32': decoding has exact angles"),
        (dict(chunk=0), ValueError, "chunk=0"),
        (dict(chunk=-4), ValueError, "chunk=-4"),
        (dict(device="cuda"), ValueError, "device='cuda': not on this machine"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(runs, monkeypatch, changes, error, match):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(evaluation, "evaluate", lambda *_: pytest.fail("evaluated something before refusing"))
    values = dict(runs=(str(runs["rope"]),), lengths=(3, 20), samples=(1,), device="cpu") | changes
    with pytest.raises(error, match=match):
        copy_ladder(EvalConfig(**values))


def test_a_run_without_the_checkpoint_or_with_a_damaged_one_is_refused(runs, tmp_path):
    with pytest.raises(FileNotFoundError, match="last.pt: no such checkpoint"):
        copy_ladder(config_for(tmp_path))
    (tmp_path / "last.pt").write_bytes((runs["rope"] / "last.pt").read_bytes()[:10_000])
    with pytest.raises(RuntimeError, match="last.pt: damaged, or not a checkpoint"):
        copy_ladder(config_for(tmp_path))
