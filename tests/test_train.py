"""train.py: what a step computes, the data of its tasks, where it starts, what it refuses, what it writes."""

import copy
import functools
import itertools
import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, SHAPE, computed, configs, files, fresh, log, of_task, pretrained, refused, run
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import checkpoint
import configurator
import data_copy
import data_dclm
import data_text
import hf
import model as decoder
import rope2d
import tasks
import train
from data_copy import IGNORE, CopyConfig
from data_text import TextCopyConfig
from model import Decoder, ModelConfig
from tokenizer import load_tokenizer
from train import TrainConfig

AUTO = of_task("auto-2d-rope")

# What a step computes


@pytest.mark.parametrize("grad_accum, closing_weight, separator", [(1, 1.0, "<n>"), (3, 1.0, "*"), (4, 2.5, "*")])
def test_a_step_is_the_mean_over_all_targets_however_it_is_cut(tmp_path, grad_accum, closing_weight, separator):
    knobs = dict(max_steps=1, grad_clip=0, zero_init_residual=False, init_std=0.2, n_layer=2)
    knobs |= dict(closing_weight=closing_weight, separator=separator)
    state = run(tmp_path, grad_accum=grad_accum, **knobs)["optimizer"]["state"]
    got = [state[i]["exp_avg"] / 0.1 for i in range(len(state))]  # 1 - beta1

    _, copy_config, _, config = configs(**knobs)
    ((tokens, targets),) = data_copy.copy_batch(copy_config, 8, 0, 0)
    model, tokens, targets = fresh(**knobs), torch.from_numpy(tokens), torch.from_numpy(targets)
    losses = F.cross_entropy(model(tokens).mT, targets, reduction="none", ignore_index=IGNORE)
    weights = torch.where(targets == data_copy.SEPARATORS[separator], closing_weight, 1.0)
    loss = (losses * weights).sum() / (targets != IGNORE).sum()
    loss.backward()
    wanted = [p.grad for group in train.make_optimizer(model, config).param_groups for p in group["params"]]
    assert sum((a - b).norm() for a, b in zip(got, wanted, strict=True)) < 1e-6 * sum(b.norm() for b in wanted)
    (line,) = log(tmp_path)
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert line["grad_norm"] == pytest.approx(math.sqrt(sum(g.square().sum() for g in wanted)), rel=1e-6)


def test_clipping_and_second_moments(tmp_path):
    knobs = dict(max_steps=1, zero_init_residual=False, init_std=0.2)
    whole, cut = (run(tmp_path / str(c), grad_clip=c, **knobs)["optimizer"]["state"] for c in (0.0, 0.01))
    gradients = [s["exp_avg"] / 0.1 for s in cut.values()]
    assert sum(g.square().sum() for g in gradients).sqrt() == pytest.approx(0.01, rel=1e-4)
    for s, g in zip(cut.values(), gradients, strict=True):
        torch.testing.assert_close(s["exp_avg_sq"], 0.05 * g.square(), atol=0, rtol=1e-3)  # 1 - beta2
    assert sum((s["exp_avg"] / 0.1).square().sum() for s in whole.values()).sqrt() > 0.1


COSINE = dict(learning_rate=1.0, warmup_steps=10, max_steps=111)
WSD = dict(learning_rate=1.0, warmup_steps=10, max_steps=100, schedule="wsd")
SCHEDULES = [
    (COSINE, {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 35: 0.1 + 0.45 * (1 + math.sqrt(0.5)), 60: 0.55, 110: 0.1}),
    (COSINE | {"min_lr": 0.5}, {0: 0.1, 10: 1.0, 60: 0.75, 110: 0.5}),
    (COSINE | {"min_lr": 0.0, "warmup_steps": 0}, {0: 1.0, 55: 0.5, 110: 0.0}),
    (COSINE | {"max_steps": 1}, {0: 0.1}),
    (COSINE | {"max_steps": 131, "grid_steps": 20}, {0: 0.1, 9: 1.0, 19: 1.0, 20: 0.1, 29: 1.0, 80: 0.55, 130: 0.1}),
    (WSD, {0: 0.1, 9: 1.0, 50: 1.0, 89: 1.0, 90: 0.91, 94: 0.55, 99: 0.1}),
    (WSD | {"grid_steps": 20}, {19: 1.0, 20: 0.1, 29: 1.0, 89: 1.0, 94: 0.55, 99: 0.1}),
]


@pytest.mark.parametrize("knobs, rates", SCHEDULES)
def test_the_learning_rate_is_the_formula(knobs, rates):
    got = {step: train.learning_rate(TrainConfig(**knobs), step) for step in rates}
    assert got == pytest.approx(rates, abs=1e-12)


@pytest.mark.parametrize("encoding", ["2d-rope", "auto-2d-rope"])
def test_weight_decay_shrinks_matrices_alone_and_no_gates(encoding):
    values = dict(n_embd=16, vocab_size=3, qk_norm=True, zero_init_residual=False, pos_encoding=encoding)
    model = Decoder(ModelConfig(freqs_learned=True, logit_scale="log_n", **values), torch.zeros(3, 3))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = train.make_optimizer(model, TrainConfig(learning_rate=0.1, weight_decay=0.5))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        shrinks = name.endswith("weight") and "norm" not in name and ".grid." not in name
        torch.testing.assert_close(p.detach(), before[name] * (0.95 if shrinks else 1.0), msg=name)


def test_first_the_grid_is_found_then_all_but_the_embedding_starts_again(tmp_path, monkeypatch):
    knobs = AUTO | dict(gate_lr_scale=7.0, eval_interval=1, weight_decay=0.0)
    states, freeze = [], train.Run.freeze_grid

    def watched(self):
        states.append(copy.deepcopy(self.model.state_dict()))
        freeze(self)
        states.append(copy.deepcopy(self.model.state_dict()))

    monkeypatch.setattr(train.Run, "freeze_grid", watched)
    last = run(tmp_path, **knobs)
    (found, anew), first, model = states, fresh(**knobs).state_dict(), fresh(**knobs)
    torch.manual_seed(0)
    model.freeze_grid()
    wanted = model.state_dict()
    for name, p in found.items():
        if isinstance(p, torch.Tensor):
            stays = "embed" in name or "norm" in name or "phase" in name or name == "breaks"
            assert torch.equal(p, first[name]) == stays, name
            assert torch.equal(anew[name], p if "grid" in name else wanted[name]), name
    assert anew["auto.grid._extra_state"] is True
    rate = train.learning_rate(configs(**knobs)[-1], 9)
    assert [g["lr"] for g in last["optimizer"]["param_groups"]] == pytest.approx([rate, rate, 7 * rate])
    assert {int(s["step"]) for s in last["optimizer"]["state"].values()} == {5}  # the others' are forgotten
    best, losses = torch.load(tmp_path / "best.pt"), [line["val_loss"] for line in log(tmp_path, "validation")]
    assert best["best"] == min(losses[5:]) and best["step"] > 5


def test_the_first_token_of_an_answer_may_count_more(tmp_path, corpora, start):
    knobs = of_task("finetune", start=start) | dict(max_steps=1, replay=0.25, train_data=str(corpora / "train"))
    run(tmp_path, **knobs, first_weight=5.0)
    _, _, _, config = configs(**knobs)
    ((tokens, targets),) = finetuning(**{k: v for k, v in knobs.items() if k != "task"}).batch(0, "train")
    tokens, targets = torch.from_numpy(tokens), torch.from_numpy(targets)
    losses = F.cross_entropy(checkpoint.load_run(str(start))[0](tokens).mT, targets, reduction="none")
    copies = targets[:, 0] == IGNORE  # the others are replayed
    assert copies.sum() == 0.75 * config.batch_size
    first = losses.gather(1, (targets != IGNORE).int().argmax(1, keepdim=True))[copies]
    wanted = (losses.sum() + 4 * first.sum()) / (targets != IGNORE).sum()
    assert log(tmp_path)[0]["loss"] == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("eval_interval", [2, 1000])
def test_validation_leaves_training_alone_and_counts_all_targets_the_same(tmp_path, eval_interval):
    knobs = dict(eval_steps=2, closing_weight=5.0)
    other = run(tmp_path / "other", eval_interval=3, **knobs)
    last = run(tmp_path / "this", eval_interval=eval_interval, **knobs)
    torch.testing.assert_close(last["model"], other["model"], rtol=0, atol=0)
    model, loss, count = checkpoint.load_model(last), 0.0, 0
    for i in range(2):
        ((tokens, targets),) = data_copy.copy_batch(CopyConfig(max_length=8), 8, i, 0, "validation")
        loss += model(torch.from_numpy(tokens), torch.from_numpy(targets)).item()
        count += (targets != IGNORE).sum()
    assert log(tmp_path / "this", "validation")[-1] == {"step": 10, "val_loss": pytest.approx(loss / count, rel=1e-6)}


def test_compile_recompute_and_dtype_reach_the_model(tmp_path, monkeypatch):
    seen, real = [], decoder.checkpoint
    monkeypatch.setattr(torch, "compile", lambda m: seen.append("compile") or m)
    monkeypatch.setattr(decoder, "checkpoint", lambda *a, **k: seen.append("recompute") or real(*a, **k))
    run(tmp_path / "a", max_steps=2)
    assert seen == []
    run(tmp_path / "b", max_steps=2, compile=True, recompute=True)
    assert seen == ["compile", "recompute", "recompute"] and computed(tmp_path / "a") == computed(tmp_path / "b")
    run(tmp_path / "c", max_steps=2, dtype="bfloat16")
    a, c = (log(tmp_path / name)[1]["loss"] for name in ("a", "c"))
    assert 1e-6 < abs(a - c) < 0.05


def test_a_large_vocabulary_is_compiled_with_its_chunked_loss(tmp_path, monkeypatch):
    graphs, aot = [], torch._dynamo.lookup_backend("aot_eager")  # without C++, which takes minutes
    how = dict(backend=lambda graph, inputs: graphs.append(graph.code) or aot(graph, inputs))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, **how))
    run(tmp_path / "plain", max_steps=1)
    monkeypatch.setitem(decoder.LOGITS_PER_CHUNK, "cpu", 40 * len(data_copy.VOCAB))
    run(tmp_path / "compiled", max_steps=1, compile=True, grad_accum=2)
    assert graphs and all("autograd_function_apply" in code and "cross_entropy" not in code for code in graphs), graphs
    assert computed(tmp_path / "plain")[0] == pytest.approx(computed(tmp_path / "compiled")[0], rel=1e-5)


# Pretraining


def test_text_comes_in_the_order_of_the_seed_and_for_validation_in_one_order(tmp_path, corpora):
    knobs = of_task("pretrain", corpora) | dict(seed=1)
    run(tmp_path, max_steps=1, **knobs)
    model_config = configs(vocab_size=257, **knobs)[0]
    torch.manual_seed(1)
    fresh = Decoder(model_config, rope2d.break_table(load_tokenizer("bytes").token_bytes))
    losses = []
    for model, name, seed in ((fresh, "train", 1), (checkpoint.load_run(str(tmp_path))[0], "val", 0)):
        corpus = data_dclm.Corpus(corpora / name)
        rows = torch.tensor(corpus.read(corpus.order(np.arange(8), seed)))
        losses.append(F.cross_entropy(model(rows[:, :-1]).mT, rows[:, 1:]).item())
    assert log(tmp_path)[0]["loss"] == pytest.approx(losses[0], rel=1e-6)
    assert log(tmp_path, "validation") == [{"step": 1, "val_loss": pytest.approx(losses[1], rel=1e-6)}]


def test_a_run_goes_on_with_data_that_moved_and_not_with_other_data(tmp_path, corpora):
    knobs, out = of_task("pretrain", corpora), tmp_path / "run"
    run(out, **knobs)
    (out / "validation.jsonl").unlink()  # so that there is something left to do
    moved = shutil.copytree(corpora / "train", tmp_path / "moved")
    assert run(out, **knobs | {"train_data": moved})["data"]["tokenizer"] == load_tokenizer("bytes").fingerprint
    other = knobs | {"train_data": corpora / "other"}
    refused(ValueError, "another run: .*mv (.|\n)*train corpus: '[0-9a-f]+' there, '[0-9a-f]+' here", out, **other)
    max(moved.glob("*.bin")).unlink()
    refused(ValueError, "build was stopped", tmp_path / "other", **knobs | {"train_data": moved})


# Finetuning


def chats(path: Path, *answers: str) -> Path:
    """A file of chats."""
    messages = [[{"role": "user", "content": "Say it."}, {"role": "assistant", "content": a}] for a in answers]
    path.write_text("".join(json.dumps({"messages": both}) + "\n" for both in messages))
    return path


def finetuning(**knobs) -> tasks.Task:
    model_config, _, text_config, config = configs(task="finetune", **knobs)
    return tasks.make_task(model_config, CopyConfig(), text_config, config)


def said(task: tasks.Task, step: int, stream: str) -> list[list[int]]:
    """The tokens that the loss counts, of each chat in a batch."""
    return [row[row != IGNORE].tolist() for _, targets in task.batch(step, stream) for row in targets]


def test_the_loss_is_on_the_answers_alone_and_padding_changes_nothing(tmp_path, start):
    run(tmp_path / "run", max_steps=1, **of_task("finetune", start=start))
    model, losses = checkpoint.load_model(checkpoint.read(start / "last.pt")), []
    for i in range(8):
        record = data_text.text_example(TextCopyConfig(text_max_length=6), i, 0)
        ids, loss_mask = map(torch.from_numpy, load_tokenizer("bytes").chat(record["messages"]))
        nll = F.cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="none")
        losses.append(nll[loss_mask[1:]])
    assert log(tmp_path / "run")[0]["loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def test_chats_are_gone_through_in_epochs_and_those_of_validation_are_of_their_file_whatever_the_seed(tmp_path, start):
    knobs = dict(init_from=start, batch_size=5)
    knobs |= dict(chats=chats(tmp_path / "t", *"01234"), val_chats=chats(tmp_path / "v", *"abcdef"))
    task, other = finetuning(**knobs), finetuning(seed=1, **knobs)
    epochs = [said(task, step, "train") for step in range(3)]
    assert all(sorted(epoch) == [[ord(letter), 256] for letter in "01234"] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and said(other, 0, "train") != epochs[0]
    assert said(task, 0, "validation") == said(other, 0, "validation")
    assert {answer[0] for answer in said(task, 0, "validation")} < set(b"abcdef")


@pytest.mark.parametrize("world, pieces", [(1, 1), (2, 2)])
def test_replayed_rows_are_pretraining_in_its_order_and_take_no_chats_place(tmp_path, corpora, world, pieces):
    """A quarter of 8 rows: 2 sequences of the corpus, all of whose tokens are targets, and 6 chats."""
    corpus = data_dclm.Corpus(corpora / "train")
    knobs = dict(init_from="x", seed=3, block_size=400)
    task = finetuning(replay=0.25, train_data=str(corpora / "train"), batch_size=8, **knobs)
    chats, unmixed = finetuning(batch_size=6, **knobs), finetuning(batch_size=8, **knobs)
    for step in (0, 1, 7):
        batch = [piece for rank in range(world) for piece in task.batch(step, "train", rank, world, pieces)]
        rows = [row[row != IGNORE].tolist() for _, targets in batch for row in targets]
        replayed = corpus.read(corpus.order(np.arange(2 * step, 2 * step + 2), 3))[:, 1:].tolist()
        assert sorted(rows) == sorted(replayed + said(chats, step, "train"))
    assert said(task, 0, "validation") == said(unmixed, 0, "validation")
    assert task.fingerprint["train corpus"] == corpus.digest


def test_a_run_goes_on_with_passages_that_moved_and_not_with_other_ones(tmp_path, start):
    for name, word in (("one", "x"), ("two", "y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("\n".join(f"{word} {i}" for i in range(5000)))
    shutil.copytree(tmp_path / "one", tmp_path / "moved")
    knobs, out = (
        of_task("finetune", start=start) | dict(text_task="prose", text_max_length=2, block_size=500),
        tmp_path / "run",
    )
    run(out, **knobs, max_steps=2, schedule="wsd", text_source=tmp_path / "one")
    refused(
        ValueError,
        "holds another run.*\\n.*passages",
        out,
        **knobs,
        max_steps=3,
        schedule="wsd",
        text_source=tmp_path / "two",
    )
    state = run(out, **knobs, max_steps=3, schedule="wsd", text_source=tmp_path / "moved")
    assert state["step"] == 3 and state["config"]["text_source"] == (str(tmp_path / "moved"),)


def test_a_run_goes_on_with_chats_that_were_mended_and_not_with_more_of_them(tmp_path, start):
    knobs, out = dict(task="finetune", init_from=start, chats=chats(tmp_path / "chats", *"01234")), tmp_path / "run"
    run(out, **knobs)
    (out / "validation.jsonl").unlink()
    chats(tmp_path / "chats", *"0123", "mended")
    assert run(out, **knobs)["step"] == 10
    chats(tmp_path / "chats", *"012345")
    refused(ValueError, "train chats: 5 there, 6 here", out, **knobs)


@pytest.mark.parametrize("knob", ["chats", "val_chats"])
def test_chats_that_are_too_long_are_refused_before_the_first_step(tmp_path, start, knob):
    room = 400 - len("Say it.\n\n")  # the end of the answer is only a target
    path = chats(tmp_path / "chats", "0", "1" * room)
    knobs = dict(task="finetune", init_from=start, max_steps=1, batch_size=2) | {knob: path}
    assert run(tmp_path / "run", **knobs)["step"] == 1
    chats(path, *"0" * 43, "1" * (room + 1), "2" * 5000)
    match = f"{path}: 2 of 45 chats have more than block_size=400 tokens, the first: line 44 has 401; shorten or delete"
    refused(RuntimeError, match, tmp_path / "other", **knobs)


def test_examples_that_could_be_too_long_are_refused_before_the_first_step(tmp_path, start):
    lists = dict(init_from=start, text_task="lists", text_min_length=60, text_max_length=60)
    with pytest.raises(ValueError, match="copies of length 60 .* or --block_size=") as error:
        finetuning(block_size=64, val_chats=chats(tmp_path / "chats", "0"), **lists)
    promised = int(str(error.value).rpartition("=")[2])
    task = finetuning(block_size=promised, batch_size=100, seed=1, **lists)
    ((tokens, _),) = task.batch(16, "train")  # one of these is longer than any of the first 200 of seed 0
    assert tokens.shape[1] <= promised


# Where it starts

STILL = dict(learning_rate=1e-30, min_lr=0, weight_decay=0)


def same_weights(state: dict, start: Path) -> None:
    for name, p in torch.load(start / "last.pt")["model"].items():
        if "rotary" not in name:
            torch.testing.assert_close(state["model"][name], p, msg=name)


def test_an_encoding_stays_or_changes_as_asked_with_the_same_weights(tmp_path, start, capsys):
    for name, knobs in (("rope", {}), ("2d-rope", {"pos_encoding": "2d-rope"}), ("h-rope", {"pos_encoding": "h-rope"})):
        state = run(tmp_path / name, **of_task("finetune", start=start), **STILL, **knobs)
        same_weights(state, start)
        assert f"{tmp_path / name}: {name}, " in capsys.readouterr().out
        config = {key: state["config"][key] for key in ("pos_encoding", *SHAPE)}
        assert config == SHAPE | {"pos_encoding": name}  # the default of knobs that were not given is 2d-rope
    assert {key for key in state["model"] if "rotary" in key} == {"rotary.rope.phase", "rotary.2d-rope.phase"}


@pytest.mark.parametrize("task", ["copy", "pretrain"])
def test_other_tasks_start_from_weights_too(tmp_path, corpora, start, task):
    if task == "copy":
        run(tmp_path, n_layer=2, max_steps=2)
    state = run(tmp_path / "run", **of_task(task, corpora), **STILL, init_from=tmp_path if task == "copy" else start)
    same_weights(state, tmp_path if task == "copy" else start)
    assert state["config"]["n_layer"] == 2


def test_a_hugging_face_folder_is_a_start(tmp_path, start, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    saved, asked = checkpoint.read(start / "last.pt"), []

    def load(folder, **changes):
        asked.append((folder, changes))
        return checkpoint.load_model(saved, **changes)

    monkeypatch.setattr(hf, "load", load)
    monkeypatch.setattr(hf, "load_tokenizer", lambda folder: load_tokenizer("bytes"))
    for _ in range(2):  # the second time it is finished
        state = run(tmp_path / "run", **of_task("finetune", start=tmp_path), pos_encoding="h-rope", **STILL)
    same_weights(state, start)
    assert asked == [(tmp_path, {"pos_encoding": "h-rope"})] and state["config"]["pos_encoding"] == "h-rope"


def test_the_config_of_a_run_passed_back_in_is_the_run(tmp_path, capsys):
    start = pretrained(tmp_path / "start", freqs="uniform", freqs_learned=True)
    state = torch.load(start / "last.pt")
    state["model"]["rotary.rope.log_scale"] += 0.1
    torch.save(state, start / "last.pt")
    first = run(tmp_path / "run", **of_task("finetune", start=start))
    for name in ("run", "again"):
        given, argv = {}, [str(tmp_path / "run" / "config.py"), f"--out_dir={tmp_path / name}"]
        train.train(*configurator.configure(*train.CONFIGS, argv=argv, given=given), given=given)
        assert ("all 10 steps are done" in capsys.readouterr().out) == (name == "run")
    again = torch.load(tmp_path / "again" / "last.pt")["model"]
    torch.testing.assert_close(again, first["model"], rtol=0, atol=0)


def test_a_longer_block_size_lets_a_run_go_on(tmp_path):
    saved = run(tmp_path, max_steps=4, block_size=400)
    checkpoint.save(saved | {"step": 2}, tmp_path / "last.pt")
    saved = run(tmp_path, max_steps=4, block_size=500)
    assert (saved["step"], saved["config"]["block_size"]) == (4, 500)


def test_weights_of_another_vocabulary_or_tokenizer_are_no_start(tmp_path, start):
    run(tmp_path / "copies", max_steps=1, block_size=400)
    state = torch.load(start / "last.pt") | {"data": {"tokenizer": {"size": 257, "sha256": "0"}}}
    checkpoint.save(state, tmp_path / "other" / "last.pt")
    for where in (tmp_path / "copies", tmp_path / "other"):
        knobs = of_task("finetune", start=where)
        refused(ValueError, f"{where} was trained with another tokenizer", tmp_path / "run", **knobs)
    match = f"{start} was trained with another vocabulary"
    refused(ValueError, match, tmp_path / "run", init_from=start, **SHAPE)


# What it refuses


IMPOSSIBLE = {
    "copy": [
        (
            dict(max_length=30),
            "max_length=30 makes sequences of 65 tokens, block_size=64 is too short: give --block_size=65",
        ),
        (dict(batch_size=3, grad_accum=4), "batch_size=3: expected at least grad_accum=4 x 1 processes"),
        (dict(device="cuda"), "device='cuda': not on this machine; it has cpu"),
        (dict(vocab_size=30), "vocab_size=30: the data has 42 tokens"),
        (dict(seed=2**63), r"seed=9223372036854775808: expected 0 to 2\^63 - 1"),
        (dict(seed=-1), "seed=-1: expected 0"),
        (dict(freqs="uniform", freqs_seed=2**64), "freqs_seed=18446744073709551616"),
        (dict(grad_clip=-1.0), "grad_clip=-1.0"),
        (dict(out=Path("a,b")), "out_dir='a,b': expected a folder without a comma"),
        # knobs that would do nothing
        (dict(train_data="x"), "train_data='x': task='copy' does not use it, it is for pretrain and finetune"),
        (dict(chats="x"), "chats='x': task='copy' does not use it, it is for finetune"),
        (dict(replay=0.1), "replay=0.1: task='copy' does not use it, it is for finetune"),
        (dict(grid_steps=5), "grid_steps=5 needs .*auto-2d-rope"),
        (AUTO | dict(auto_gate="sigmoid"), "grid_steps=5 needs .*auto-2d-rope"),
        (AUTO | dict(tie_weights=True), "grid_steps=5 with tie_weights=True"),
        (AUTO | dict(grid_steps=10), "grid_steps=10 of max_steps=10"),
    ],
    "pretrain": [
        (dict(train_data=""), "needs --train_data=DIR and --val_data=DIR"),
        (dict(val_chats="x"), "val_chats='x': task='pretrain' does not use it, it is for finetune"),
        (dict(train_data="nowhere"), "no shards .*nowhere"),
        (dict(block_size=40), "has sequences of 48 tokens: give --block_size=48"),
        (dict(eval_steps=1000), "val has [0-9]+ sequences, 8000 are needed: lower eval_steps or batch_size"),
        (dict(vocab_size=200), "vocab_size=200: the data has 257 tokens"),
        (dict(tokenizer="none"), "tokenizer='none'"),
        (dict(tokenizer="other"), "built with another tokenizer, bytes"),
    ],
    "finetune": [
        (dict(init_from=""), "needs --init_from=DIR"),
        (dict(init_from="nowhere"), "nowhere: no such checkpoint"),
        (dict(n_layer=3), "n_layer.*do not fit: .*blocks.2"),
        (dict(n_embd=64), "n_embd.*do not fit"),
        (dict(pos_encoding="auto-2d-rope"), "do not fit: .*grid"),
        (dict(chats="none.jsonl"), "none.jsonl"),
        (dict(replay=0.5), "replay=0.5 with train_data=''"),
        (dict(train_data="x"), "replay=0.0 with train_data='x'"),
        (dict(train_data="x", replay=0.01), "replay=0.01 of batch_size=8 is no whole row"),
        (dict(train_data="x", replay=1.0), "replay=1.0: expected a share"),
        (dict(val_data="x"), "val_data='x': task='finetune' does not use it, it is for pretrain"),
        (AUTO | dict(init_from="auto"), "grid_steps=5 with init_from"),  # it would draw them anew
    ],
}


@pytest.mark.parametrize("task, knobs, match", [(task, *case) for task, cases in IMPOSSIBLE.items() for case in cases])
def test_what_cannot_be_trained_is_refused(tmp_path, monkeypatch, corpora, start, task, knobs, match):
    monkeypatch.chdir(tmp_path)
    if knobs.get("init_from") == "auto":
        pretrained(tmp_path / "auto", "auto-2d-rope")
    if knobs.get("tokenizer") == "other":
        other = SimpleNamespace(fingerprint={"size": 5, "sha256": "0"}, token_bytes=[b"a"] * 5)
        monkeypatch.setattr(tasks, "load_tokenizer", lambda name: other)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    missing = {"nowhere", "none", "none.jsonl"} & set(map(str, knobs.values()))
    knobs = {"out": tmp_path / "run"} | of_task(task, corpora, start) | knobs
    refused(FileNotFoundError if missing else ValueError, match, **knobs)


def test_what_just_fits_is_trained(tmp_path):
    assert run(tmp_path / "a", max_length=29, block_size=63, max_steps=1)["step"] == 1
    assert run(tmp_path / "b", vocab_size=64, max_steps=1)["model"]["embed.weight"].shape == (64, 16)


@pytest.mark.parametrize("at", [0, 4])
def test_a_gradient_that_is_not_finite_stops_the_run_at_the_last_good_step(tmp_path, monkeypatch, at):
    make_optimizer, calls = train.make_optimizer, itertools.count()

    def poisoned(model, config):
        model.norm.weight.register_hook(lambda grad: grad * (math.inf if next(calls) == at else 1))
        return make_optimizer(model, config)

    run(tmp_path / "whole")
    monkeypatch.setattr(train, "make_optimizer", poisoned)
    out = tmp_path / "run"
    with pytest.raises(
        RuntimeError, match=f"step {at}: loss [0-9.]+, gradient norm (nan|inf); .*--init_from={out}/last.pt"
    ):
        run(out, checkpoint_interval=3)
    assert torch.load(out / "last.pt")["step"] == at and not (out / "best.pt").exists()
    monkeypatch.setattr(train, "make_optimizer", make_optimizer)
    torch.testing.assert_close(run(out)["model"], torch.load(tmp_path / "whole" / "last.pt")["model"], rtol=0, atol=0)


# What it writes


def test_the_folder_of_a_run_says_what_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "peak_flops", lambda device: 1e9)
    monkeypatch.setattr(sys, "argv", ["train.py", "--this=that"])
    run(tmp_path, grad_accum=2, eval_interval=4)
    names = ["best.pt", "config.py", "last.pt", "log.jsonl", "run.json", "validation.jsonl"]
    assert sorted(files(tmp_path)) == names
    facts, lines = json.loads((tmp_path / "run.json").read_text()), log(tmp_path)
    state = torch.load(tmp_path / "last.pt")
    model = checkpoint.load_model(state)
    assert (facts["command"], facts["processes"], facts["device"]) == (["train.py", "--this=that"], 1, "cpu")
    assert facts["parameters"] == sum(p.numel() for p in model.parameters())
    assert facts["data"] == state["data"] == {"vocabulary": data_copy.VOCAB} and facts["torch"] == torch.__version__
    assert [line["step"] for line in lines] == list(range(10))
    assert [line["step"] for line in log(tmp_path, "validation")] == [4, 8, 10]
    for line in lines:
        assert line["lr"] == train.learning_rate(configs()[-1], line["step"]) > 0
        batch = data_copy.copy_batch(configs()[1], 8, line["step"], 0, pieces=2)
        tokens, pairs = (sum(t.size * t.shape[1] ** power for t, _ in batch) for power in (0, 1))
        assert line.keys() == {"step", "loss", "lr", "grad_norm", "ms", "tokens_per_s", "mfu"}
        assert line["tokens_per_s"] * line["ms"] / 1e3 == pytest.approx(tokens, rel=1e-2)
        assert line["mfu"] == pytest.approx(model.flops(tokens, pairs) / line["ms"] / 1e6, rel=1e-2)


def test_flops_are_what_torch_counts():
    config = ModelConfig(n_layer=3, n_head=4, n_kv_head=2, n_embd=32, head_dim=16, vocab_size=50, mlp_dim=80)
    model, tokens = Decoder(config, torch.zeros(3, 50)), torch.zeros(2, 30, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens).backward()
    assert counter.get_total_flops() == model.flops(60, 60 * 30)


def test_wandb_gets_all_losses_in_one_run_that_goes_on(tmp_path, monkeypatch):
    knobs, starts, lines = dict(wandb="project", eval_interval=5), [], []
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused(ValueError, "wandb='project': not installed, pip install wandb", tmp_path / "run", **knobs)
    fake = SimpleNamespace(log=lambda line, step: lines.append({"step": step} | line))
    fake.init = lambda **about: starts.append(about["id"]) or fake
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run(tmp_path / "run", **knobs)
    (tmp_path / "run" / "validation.jsonl").unlink()
    run(tmp_path / "run", **knobs)  # validates once more
    assert len(starts) == 2 and starts[0] == starts[1]
    assert [line["step"] for line in lines if "grad_norm" in line] == list(range(10))
    assert [line["step"] for line in lines if "val_loss" in line] == [5, 10, 10]


SIZES = {"350m": (459, 360), "730m": (877, 729), "1.4b": (1613, 1416)}  # millions, with 128,256 and 32,000 tokens


@pytest.mark.parametrize("size", SIZES)
def test_parameters_of_the_sizes(size, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = configurator.configure(*train.CONFIGS, argv=["config/pretrain.py", f"config/{size}.py"])[0]
    for config.vocab_size, millions in zip((128_256, 32_000), SIZES[size], strict=True):
        with torch.device("meta"):
            model = Decoder(config, torch.zeros(3, config.vocab_size))
        assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions


@pytest.mark.parametrize(
    ("task", "knob"),
    [
        ("copy", "--text_max_length=9"),
        ("copy", "--tokenizer=bytes"),
        ("copy", "--repeat_p=0.5"),
        ("copy", "--qk_norm_init=0.5"),
        ("copy", "--auto_bias=2.0"),
        ("pretrain", "--noise=0.5"),
        ("finetune", "--init_std=0.5"),
        ("finetune", "--text_unit=characters"),
        ("finetune --text_task=lists", "--text_noise=0.5"),
        ("finetune --chats=a --val_chats=b", "--text_lead=0.5"),
    ],
)
def test_a_knob_that_would_do_nothing_is_refused_on_the_command_line(task, knob):
    given: dict[str, str] = {}
    argv = [*f"--task={task}".split(), "--init_from=x" if "finetune" in task else "--seed=1", knob]
    parts = configurator.configure(*train.CONFIGS, argv=argv, given=given)
    with pytest.raises(ValueError, match=f"^{knob} would do nothing here, it is for "):
        configurator.check_used(given, train.unused_knobs(*parts), *parts)
