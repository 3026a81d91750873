"""train.py: gradients, schedules, checkpoints under kills and full disks, resuming, refusals."""

import errno
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import checkpoint
import configurator
import data_copy
import rope2d
import train
from data_copy import CopyConfig
from model import Decoder, ModelConfig
from train import TrainConfig

CLASSES = train.CONFIGS
TINY = dict(n_embd=16, head_dim=8, block_size=64, max_length=8, batch_size=8, max_steps=10, warmup_steps=3)
TINY |= dict(device="cpu", learning_rate=0.01, eval_steps=1, eval_interval=1000, checkpoint_interval=1000)
KILLED, STOPPED = -signal.SIGKILL, 128 + signal.SIGTERM

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["pytest", "torch._dynamo", "train"])  # so that a process to kill costs 50 ms, not seconds


def flags(out: Path, **knobs) -> list[str]:
    return [f"--{name}={value}" for name, value in (TINY | {"out_dir": out} | knobs).items()]


def configs(out: Path, **knobs) -> tuple:
    return configurator.configure(*CLASSES, argv=flags(out, **knobs))


def run(out: Path, **knobs) -> dict:
    """Trains in this process; what last.pt holds."""
    train.train(*configs(out, **knobs))
    return torch.load(out / "last.pt")


def in_child(target, *args) -> int:
    """Exit status of target(*args) in a process of its own; minus the number of the signal that killed it."""
    child = forks.Process(target=target, args=args)
    child.start()
    child.join()
    return child.exitcode


def train_until(number: int, at: int, out: Path, knobs: dict) -> None:
    """Trains; signal `number` arrives while step `at` makes its batch."""
    batch = data_copy.batch

    def interrupted(config, n, step, seed, stream):
        if (stream, step) == ("train", at):
            os.kill(os.getpid(), number)
        return batch(config, n, step, seed, stream)

    data_copy.batch = interrupted
    torch.set_num_threads(1)
    train.train(*configs(out, **knobs))


def same_run(a: dict, b: dict) -> None:
    """Weights, optimizer, step and best agree bit for bit."""
    a, b = ([run[name] for name in ("model", "optimizer", "step", "best")] for run in (a, b))
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def log(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in ("step", "loss", "lr", "grad_norm")} for line in lines]


def files(out: Path) -> dict:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in out.iterdir()} if out.exists() else {}


# What a step computes


@pytest.mark.parametrize("grad_accum, closing_weight", [(1, 1.0), (3, 1.0), (4, 2.5)])
def test_a_step_is_the_mean_over_all_target_tokens_however_it_is_cut(tmp_path, grad_accum, closing_weight):
    knobs = dict(max_steps=1, grad_clip=0, zero_init_outputs=False, init_std=0.2, n_layer=2)
    knobs["closing_weight"] = closing_weight
    state = run(tmp_path, grad_accum=grad_accum, **knobs)["optimizer"]["state"]
    gradients = [state[i]["exp_avg"] / 0.1 for i in range(len(state))]  # 1 - beta1

    model_config, task, _, _, config = configs(tmp_path, **knobs)
    model_config.vocab_size = len(data_copy.VOCAB)
    torch.manual_seed(config.seed)
    model = Decoder(model_config, rope2d.newline_table(data_copy.TOKEN_BYTES))
    inputs, targets, _ = map(torch.from_numpy, data_copy.batch(task, config.batch_size, 0, config.seed))
    wanted = targets != data_copy.IGNORE
    losses = F.cross_entropy(model(inputs)[wanted], targets[wanted], reduction="none")
    loss = (losses * torch.where(targets[wanted] == data_copy.NEWLINE, closing_weight, 1.0)).mean()
    loss.backward()
    wanted = [p.grad for group in train.make_optimizer(model, config).param_groups for p in group["params"]]
    assert sum((a - b).norm() for a, b in zip(gradients, wanted, strict=True)) < 1e-6 * sum(b.norm() for b in wanted)
    assert log(tmp_path)[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert log(tmp_path)[0]["grad_norm"] == pytest.approx(math.sqrt(sum(g.square().sum() for g in wanted)), rel=1e-6)


@pytest.mark.parametrize(
    "auto", [{}, {"pos_encoding": "auto-2d-rope", "grid_steps": 8}], ids=["2d-rope", "auto-2d-rope"]
)
def test_two_processes_train_like_one(tmp_path, auto):
    knobs = dict(max_steps=20, batch_size=7, eval_interval=10) | auto  # 7 samples in 4 micro-batches: not all of a size
    run(tmp_path / "one", **knobs)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", train.__file__]
    command, folder = launch + flags(tmp_path / "two", grad_accum=2, **knobs), Path(train.__file__).parent
    subprocess.run(command, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, timeout=300)
    one, two = log(tmp_path / "one"), log(tmp_path / "two")
    assert [line["step"] for line in two] == list(range(20))
    for a, b in zip(one, two, strict=True):
        assert b == pytest.approx(a, rel=1e-5)
    best = [torch.load(tmp_path / name / "best.pt")["best"] for name in ("one", "two")]
    assert best[1] == pytest.approx(best[0], rel=1e-5)
    assert json.loads((tmp_path / "two" / "run.json").read_text())["processes"] == 2


def test_a_process_of_torchrun_has_the_gpu_of_its_own(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: current.append(on))
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert train.pick_device("auto") == torch.device("cuda", 3) and current == [torch.device("cuda", 3), False]
    assert train.pick_device("cpu") == torch.device("cpu")


COSINE = dict(learning_rate=1.0, warmup_steps=10, max_steps=111)
WSD = dict(learning_rate=1.0, warmup_steps=10, max_steps=100, schedule="wsd")
SCHEDULES = [
    (COSINE, {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 35: 0.1 + 0.45 * (1 + math.sqrt(0.5)), 60: 0.55, 110: 0.1}),
    (COSINE | {"min_lr": 0.5}, {0: 0.1, 10: 1.0, 60: 0.75, 110: 0.5}),
    (COSINE | {"min_lr": 0.0, "warmup_steps": 0}, {0: 1.0, 55: 0.5, 110: 0.0}),
    (COSINE | {"max_steps": 1}, {0: 0.1}),
    (WSD, {0: 0.1, 9: 1.0, 50: 1.0, 89: 1.0, 94: 0.55, 99: 0.1}),
]


@pytest.mark.parametrize("knobs, rates", SCHEDULES)
def test_learning_rate_is_the_formula(knobs, rates):
    got = {step: train.learning_rate(TrainConfig(**knobs), step) for step in rates}
    assert got == pytest.approx(rates, abs=1e-12)


def test_every_step_runs_at_the_rate_of_the_schedule(tmp_path):
    last = run(tmp_path, learning_rate=0.3)
    rates = [train.learning_rate(configs(tmp_path, learning_rate=0.3)[-1], step) for step in range(10)]
    assert [line["lr"] for line in log(tmp_path)] == rates and rates[0] > 0
    assert [group["lr"] for group in last["optimizer"]["param_groups"]] == [rates[-1]] * 2


@pytest.mark.parametrize("encoding", ["2d-rope", "auto-2d-rope"])
def test_weight_decay_shrinks_matrices_alone_and_no_gates(encoding):
    values = dict(n_embd=16, vocab_size=3, qk_norm=True, zero_init_outputs=False, pos_encoding=encoding)
    model = Decoder(ModelConfig(**values), torch.zeros(3))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = train.make_optimizer(model, TrainConfig(learning_rate=0.1, weight_decay=0.5))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        shrinks = p.dim() == 2 and ".grid." not in name
        torch.testing.assert_close(p.detach(), before[name] * (0.95 if shrinks else 1.0), msg=name)


@pytest.mark.parametrize("eval_interval", [2, 1000])
def test_validation_leaves_training_alone_and_means_the_same_at_any_interval(tmp_path, eval_interval):
    other = run(tmp_path / "other", eval_interval=3, eval_steps=2)
    last = run(tmp_path / "this", eval_interval=eval_interval, eval_steps=2)
    best = torch.load(tmp_path / "this" / "best.pt")
    torch.testing.assert_close(last["model"], other["model"], rtol=0, atol=0)
    model, loss, count = checkpoint.load_model(best), 0.0, 0
    for i in range(2):
        inputs, targets, _ = map(torch.from_numpy, data_copy.batch(CopyConfig(max_length=8), 8, i, 0, "validation"))
        loss, count = loss + model(inputs, targets).item(), count + int((targets != data_copy.IGNORE).sum())
    assert best["best"] == pytest.approx(loss / count, rel=1e-6)


# Kills, resuming, full disks

KILLS = {
    "SIGTERM": [(signal.SIGTERM, 5, STOPPED)],
    "SIGINT": [(signal.SIGINT, 5, 130)],
    "kill -9": [(signal.SIGKILL, 6, KILLED)],
    "many": [(signal.SIGKILL, 2, KILLED), (signal.SIGTERM, 1, STOPPED), (signal.SIGKILL, 8, KILLED)],
    "in the last step": [(signal.SIGTERM, 9, STOPPED)],
    "in the first step after a resume": [(signal.SIGKILL, 6, KILLED), (signal.SIGKILL, 4, KILLED)],
}


@pytest.mark.parametrize("stops", KILLS.values(), ids=KILLS.keys())
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, stops):
    knobs, whole, out = dict(checkpoint_interval=4, eval_interval=4), tmp_path / "whole", tmp_path / "stopped"
    run(whole, **knobs)
    for number, at, status in stops:
        assert in_child(train_until, number, at, out, knobs) == status
    run(out, **knobs)
    for name in ("last.pt", "best.pt"):
        same_run(torch.load(out / name), torch.load(whole / name))
    assert [line["step"] for line in log(out)] == list(range(10))
    assert log(out) == log(whole)
    assert (out / "validation.jsonl").read_text() == (whole / "validation.jsonl").read_text()
    assert [line["step"] for line in map(json.loads, open(out / "validation.jsonl"))] == [4, 8, 10]


def test_a_second_sigterm_changes_nothing_and_a_second_ctrl_c_ends_at_once(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    stop = train.StopSignal()
    for number in (signal.SIGTERM, signal.SIGTERM):
        stop.note(number, None)
        assert stop.number == signal.SIGTERM
    with pytest.raises(SystemExit, match="130"):
        stop.note(signal.SIGINT, None)


def test_a_stop_leaves_a_checkpoint_of_the_step_it_came_in(tmp_path):
    assert in_child(train_until, signal.SIGTERM, 5, tmp_path, {}) == STOPPED
    assert torch.load(tmp_path / "last.pt")["step"] == len(log(tmp_path)) == 6


@pytest.mark.parametrize("number, at", [(signal.SIGTERM, 0), (signal.SIGKILL, 1)])
def test_best_stays_the_best_over_a_stop(tmp_path, number, at):
    wild = dict(learning_rate=0.5, eval_interval=1, checkpoint_interval=1)  # the loss rises after the first step
    run(tmp_path / "whole", **wild)
    assert in_child(train_until, number, at, tmp_path / "stopped", wild) in (STOPPED, KILLED)
    run(tmp_path / "stopped", **wild)
    same_run(torch.load(tmp_path / "stopped" / "best.pt"), torch.load(tmp_path / "whole" / "best.pt"))


def test_a_torn_last_line_is_dropped(tmp_path):
    in_child(train_until, signal.SIGKILL, 6, tmp_path, {"checkpoint_interval": 4})
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    run(tmp_path, checkpoint_interval=4)
    assert [line["step"] for line in log(tmp_path)] == list(range(10))
    (tmp_path / "short.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"st')
    checkpoint.open_log(tmp_path / "short.jsonl", 5).close()  # torn before the checkpoint: power failed
    assert (tmp_path / "short.jsonl").read_text() == '{"step": 0}\n{"step": 1}\n'


def payload(n: int) -> dict:
    return {"model": {"x": torch.full((1_000_000,), n, dtype=torch.int32)}, "config": {}, "n": n}


def kill_writers(path: Path) -> None:
    """Forks a hundred processes that write to `path` for ever and kills them; what they leave must load."""
    torch.set_num_threads(1)  # a process with threads must not fork
    chance, torn, temporary = random.Random(0), 0, path.with_name("last.pt.tmp")
    for _ in range(100):
        began = time.perf_counter()
        checkpoint.save(payload(-1), path)
        duration = time.perf_counter() - began
        if (writer := os.fork()) == 0:
            try:
                for n in itertools.count():
                    checkpoint.save(payload(n), path)
            finally:
                os._exit(1)
        time.sleep(chance.uniform(0, 3 * duration))
        os.kill(writer, signal.SIGKILL)
        assert os.waitpid(writer, 0)[1] == signal.SIGKILL
        torn += temporary.exists()
        temporary.unlink(missing_ok=True)
        whole = checkpoint.read(path)
        assert (whole["model"]["x"] == whole["n"]).all()
    path.with_name("torn").write_text(str(torn))


def test_a_hundred_kills_never_leave_a_torn_checkpoint(tmp_path):
    assert in_child(kill_writers, tmp_path / "last.pt") == 0
    assert int((tmp_path / "torn").read_text()) >= 20  # so many kills came in the middle of a write


def test_a_checkpoint_is_on_the_disk_before_it_takes_the_name(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, real=real, name=name: calls.append(name) or real(*a))
    checkpoint.save(payload(0), tmp_path / "last.pt")
    assert calls[:2] == ["fsync", "replace"]


def write_half(payload: dict, file) -> None:
    file.write(b"half of it")
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("failure", ["limit on file size", "error half-way"])
def test_a_failing_write_leaves_the_old_checkpoint_and_no_scrap(tmp_path, monkeypatch, failure):
    checkpoint.save(payload(1), tmp_path / "last.pt")
    before, limits = files(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    if failure == "error half-way":
        monkeypatch.setattr(torch, "save", write_half)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(RuntimeError, match=r"last.pt: cannot be written, is the disk full"):
            checkpoint.save(payload(2), tmp_path / "last.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(tmp_path) == before


# Refusals: none of them touches what is there


def refused(out: Path, error: type, match: str, **knobs) -> None:
    before = files(out)
    with pytest.raises(error, match=match):
        run(out, **knobs)
    assert files(out) == before


def test_a_finished_run_returns_at_once_and_changes_nothing(tmp_path, capsys):
    run(tmp_path)
    before = files(tmp_path)
    run(tmp_path)
    assert files(tmp_path) == before and "all 10 steps are done" in capsys.readouterr().out


@pytest.mark.parametrize(
    "knobs, lines",
    [
        ({"learning_rate": 0.02}, ["learning_rate: 0.01 there, 0.02 here"]),
        ({"max_steps": 20, "n_layer": 2}, ["max_steps: 10 there, 20 here", "n_layer: 1 there, 2 here"]),
        ({"max_length": 9}, ["max_length: 8 there, 9 here"]),
        ({"seed": 1}, ["seed: 0 there, 1 here"]),
    ],
)
def test_the_directory_of_another_run_is_refused_with_the_knob_named(tmp_path, knobs, lines):
    run(tmp_path)
    for line in lines:
        refused(tmp_path, ValueError, f"holds another run(.|\n)*{line}", **knobs)


def test_a_run_goes_on_with_other_knobs_that_leave_the_result_alone(tmp_path):
    in_child(train_until, signal.SIGTERM, 5, tmp_path, {})
    assert run(tmp_path, grad_accum=2, checkpoint_interval=2, eval_interval=2, init="resume")["step"] == 10


def test_init_scratch_refuses_a_run_and_resume_wants_one(tmp_path):
    refused(tmp_path / "none", FileNotFoundError, "init='resume'.*last.pt does not exist", init="resume")
    assert not (tmp_path / "none").exists()
    run(tmp_path / "run", init="scratch")
    refused(tmp_path / "run", ValueError, "init='scratch'.*exists", init="scratch")


def zero_weights(data: bytes) -> bytes:
    weights = torch.load(io.BytesIO(data))["model"]["head.weight"].numpy().tobytes()
    return data.replace(weights, bytes(len(weights)))


DAMAGE = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "text": lambda data: b"not a checkpoint\n" * 100,
    "zeros": lambda data: bytes(len(data)),
    "head lost": lambda data: bytes(4096) + data[4096:],
    "tail lost": lambda data: data[:-4096] + bytes(4096),
    "weights zeroed": zero_weights,
    "a name garbled": lambda data: data.replace(b"norm.weight", b"n\xffrm.weight", 1),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_is_refused_and_kept(tmp_path, damage):
    run(tmp_path)
    whole = (tmp_path / "last.pt").read_bytes()
    assert damage(whole) != whole
    (tmp_path / "last.pt").write_bytes(damage(whole))
    refused(tmp_path, RuntimeError, "last.pt: (damaged|not a checkpoint)")


@pytest.mark.parametrize(
    "knobs, match",
    [
        (dict(max_length=30), "max_length=30 makes sequences of 65 tokens: block_size=64"),
        (dict(batch_size=3, grad_accum=4), "batch_size=3: less than grad_accum=4 x 1 processes"),
        (dict(device="cuda"), "device='cuda': not on this machine; it has cpu"),
        (dict(max_steps=0), "max_steps=0: expected at least 1"),
    ],
)
def test_impossible_settings_are_refused_before_anything_is_written(tmp_path, monkeypatch, knobs, match):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    refused(tmp_path / "run", ValueError, match, **knobs)
    assert not (tmp_path / "run").exists()


def test_the_longest_string_that_fits_the_block_trains(tmp_path):
    assert run(tmp_path, max_length=29, block_size=63, max_steps=1)["step"] == 1


def test_a_loss_that_is_not_finite_stops_the_run_with_the_last_checkpoint_intact(tmp_path):
    with pytest.raises(RuntimeError, match=f"step [0-9]: loss .*(nan|inf).*{tmp_path}/last.pt"):
        run(tmp_path, learning_rate=1e30)
    assert torch.load(tmp_path / "last.pt")["step"] == 0 and not (tmp_path / "best.pt").exists()
    last = torch.load(tmp_path / "last.pt")
    last["model"]["norm.weight"][0] = math.nan
    torch.save(last, tmp_path / "last.pt")
    before = (tmp_path / "last.pt").read_bytes()
    with pytest.raises(RuntimeError, match="step 0: loss nan"):
        run(tmp_path, learning_rate=1e30, checkpoint_interval=1, eval_interval=1)
    assert (tmp_path / "last.pt").read_bytes() == before and log(tmp_path) == []


def test_a_gradient_that_is_not_finite_stops_the_run_before_it_reaches_a_checkpoint(tmp_path, monkeypatch):
    make_optimizer, calls = train.make_optimizer, itertools.count()

    def poisoned(model, config):
        model.norm.weight.register_hook(lambda grad: grad * (math.inf if next(calls) == 4 else 1))
        return make_optimizer(model, config)

    monkeypatch.setattr(train, "make_optimizer", poisoned)
    with pytest.raises(RuntimeError, match="step 4"):
        run(tmp_path, checkpoint_interval=1)
    assert torch.load(tmp_path / "last.pt")["step"] == 4
    assert all(p.isfinite().all() for p in torch.load(tmp_path / "last.pt")["model"].values())


def test_the_config_of_a_run_passed_back_in_is_the_run(tmp_path, capsys):
    given = configs(tmp_path, pos_encoding="h-rope", n_layer=2, min_lr=1e-4)
    train.train(*given)
    again = configurator.configure(*CLASSES, argv=[str(tmp_path / "config.py")])
    assert again == given and again[0].vocab_size == len(data_copy.VOCAB)
    train.train(*again)
    assert "all 10 steps are done" in capsys.readouterr().out
