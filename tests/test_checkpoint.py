"""checkpoint.py: files that survive kills, stopped runs that go on, ranks."""

import io
import itertools
import json
import math
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import conftest
import pytest
import torch
import torch.distributed as dist
from conftest import KILLED, STOPPED, files, flags, in_child, log, of_task, refused, run, same_run, train_until

import checkpoint
import data_copy
import rope2d

# Files


def payload(n: int) -> dict:
    return {"model": {"x": torch.full((1_000_000,), n, dtype=torch.int32)}, "config": {}, "step": n, "data": {}}


def kill_writers(path: Path) -> None:
    """Forks forty processes that write to `path` for ever and kills them; what they leave must load."""
    torch.set_num_threads(1)  # a process with threads must not fork
    chance, torn = random.Random(0), 0
    for _ in range(40):
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
        for scrap in path.parent.glob("*.tmp"):
            scrap.unlink()
            torn += 1
        whole = checkpoint.read(path)
        assert (whole["model"]["x"] == whole["step"]).all()
    path.with_name("torn").write_text(str(torn))


def test_forty_kills_never_leave_a_torn_checkpoint(tmp_path):
    assert in_child(kill_writers, tmp_path / "last.pt") == 0
    assert int((tmp_path / "torn").read_text()) > 8  # so many kills came in the middle of a write


def test_a_full_disk_leaves_the_old_checkpoint_and_no_scrap(tmp_path):
    checkpoint.save(payload(1), tmp_path / "last.pt")
    before, limits = files(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(RuntimeError, match=r"last.pt: cannot be written \(.*, nothing was replaced"):
            checkpoint.save(payload(2), tmp_path / "last.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(tmp_path) == before


def zero_weights(data: bytes) -> bytes:
    weights = torch.load(io.BytesIO(data))["model"]["head.weight"].numpy().tobytes()
    return data.replace(weights, bytes(len(weights)))


DAMAGE = {
    "truncated": lambda data: data[: len(data) // 2],
    "text": lambda data: b"not a checkpoint\n" * 100,
    "head lost": lambda data: bytes(4096) + data[4096:],
    "weights zeroed": zero_weights,
    "a name garbled": lambda data: data.replace(b"norm.weight", b"n\xffrm.weight", 1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_kept(tmp_path, start, damage):
    whole = (start / "last.pt").read_bytes()
    broken = DAMAGE[damage](whole)
    assert broken != whole
    (tmp_path / "last.pt").write_bytes(broken)
    refused(RuntimeError, "last.pt: damaged, or not a checkpoint .*: put a copy in its place, or move", tmp_path)
    assert (tmp_path / "last.pt").read_bytes() == broken


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}/last.pt: no such checkpoint"):
        checkpoint.load_run(str(tmp_path))
    torch.save({"model": {}}, tmp_path / "last.pt")
    with pytest.raises(RuntimeError, match="last.pt: not a checkpoint of train.py: expected model, config, step"):
        checkpoint.load_run(str(tmp_path))


# Models


def test_a_model_is_loaded_with_changes(tmp_path):
    start = conftest.pretrained(tmp_path, freqs="uniform", freqs_learned=True, freqs_seed=4)
    saved = checkpoint.read(start / "last.pt")
    saved["model"]["rotary.rope.log_scale"] += 0.5
    same, longer = checkpoint.load_model(saved), checkpoint.load_model(saved, block_size=9000)
    assert longer.config.block_size == 9000
    for name, p in saved["model"].items():
        assert torch.equal(longer.state_dict()[name], p) and torch.equal(same.state_dict()[name], p)
    other = checkpoint.load_model(saved, freqs="geometric", rope_theta=77.0)
    assert torch.equal(other.rotary["rope"].phase, rope2d.Rotary("rope", 16, theta=77.0).phase)
    assert not other.rotary["rope"].log_scale.any()
    assert set(checkpoint.load_model(saved, pos_encoding="h-rope").rotary) == {"rope", "2d-rope"}
    more = checkpoint.load_model(saved, pos_encoding="bipe", logit_scale="log_n")
    assert more.col_embed.weight.std() > 0 and (more.blocks[0].attention.log_n_scale == 1).all()
    with pytest.raises(ValueError, match="n_layer.*the checkpoint's weights do not fit: blocks.2.*absent there"):
        checkpoint.load_model(saved, n_layer=3)
    model, trained = checkpoint.load_run(str(start))
    assert not model.training and (trained["steps_done"], trained["data"]) == (9, saved["data"])
    assert checkpoint.load_run(str(start / "last.pt"))[1]["freqs_seed"] == 4


def test_a_process_of_torchrun_has_the_gpu_of_its_own(monkeypatch):
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert checkpoint.pick_device("auto") == torch.device("cuda", 3) and current == [torch.device("cuda", 3)]
    assert checkpoint.pick_device("cpu") == torch.device("cpu")


# Kills


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that nothing stopped."""
    run(tmp_path_factory.mktemp("whole") / "run", checkpoint_interval=4, eval_interval=4)
    return tmp_path_factory.getbasetemp() / "whole0" / "run"


KILLS = {
    "SIGTERM": [(5, signal.SIGTERM, STOPPED)],
    "SIGINT": [(5, signal.SIGINT, 130)],
    "kill -9": [(6, signal.SIGKILL, KILLED)],
    "many": [(2, signal.SIGKILL, KILLED), (1, signal.SIGTERM, STOPPED), (8, signal.SIGKILL, KILLED)],
    "in the last step": [(9, signal.SIGTERM, STOPPED)],
    "in the first step after a resume": [(6, signal.SIGKILL, KILLED), (4, signal.SIGKILL, KILLED)],
}


@pytest.mark.parametrize("stops", KILLS.values(), ids=KILLS.keys())
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, whole, stops):
    knobs = dict(checkpoint_interval=4, eval_interval=4)
    for step, number, status in stops:
        assert in_child(train_until, step, number, tmp_path, knobs) == status
        if status != KILLED:
            assert torch.load(tmp_path / "last.pt")["step"] == len(log(tmp_path)) == step + 1
    run(tmp_path, **knobs)
    same_run(tmp_path, whole)
    assert [line["step"] for line in log(tmp_path)] == list(range(10))
    assert [line["step"] for line in log(tmp_path, "validation")] == [4, 8, 10]


@pytest.mark.parametrize("task", ["auto-2d-rope", "pretrain", "finetune"])
def test_so_do_the_other_tasks_and_a_learned_grid(tmp_path, corpora, start, task):
    knobs = of_task(task, corpora, start) | dict(checkpoint_interval=4, eval_interval=3)
    run(tmp_path / "whole", **knobs)
    for step, number in ((3, signal.SIGTERM), (6, signal.SIGKILL), (8, signal.SIGTERM)):  # the grid is frozen at 5
        assert in_child(train_until, step, number, tmp_path / "run", knobs) in (KILLED, STOPPED)
    run(tmp_path / "run", **knobs)
    same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize("step, number", [(0, signal.SIGTERM), (3, signal.SIGKILL)])
def test_best_stays_the_best_over_a_stop(tmp_path, step, number):
    wild = dict(learning_rate=0.5, eval_interval=1, checkpoint_interval=1)  # the loss rises after the first steps
    run(tmp_path / "whole", **wild)
    assert in_child(train_until, step, number, tmp_path / "run", wild) in (STOPPED, KILLED)
    run(tmp_path / "run", **wild)
    best = torch.load(tmp_path / "run" / "best.pt")
    lowest = min(log(tmp_path / "run", "validation"), key=lambda line: line["val_loss"])
    assert (best["step"], best["best"]) == (lowest["step"], lowest["val_loss"]) and best["step"] < 4
    same_run(tmp_path / "run", tmp_path / "whole")


def test_a_second_sigterm_changes_nothing_and_a_second_ctrl_c_ends_at_once():
    stop = checkpoint.StopSignal()
    for number in (signal.SIGTERM, signal.SIGTERM):
        os.kill(os.getpid(), number)
        assert stop.number == signal.SIGTERM
    with pytest.raises(SystemExit, match="130"):
        os.kill(os.getpid(), signal.SIGINT)


def test_the_same_command_twice_is_refused_while_the_first_lives(tmp_path, whole):
    knobs = dict(checkpoint_interval=4, eval_interval=4)
    first = conftest.forks.Process(target=train_until, args=(6, signal.SIGSTOP, tmp_path, knobs))
    first.start()
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and not ((tmp_path / "log.jsonl").exists() and len(log(tmp_path)) == 6):
            time.sleep(0.02)
        match = f"{tmp_path} is in use by process {first.pid} .*choose another --out_dir"
        refused(ValueError, match, tmp_path, **knobs)
    finally:
        first.kill()
        first.join()
    (tmp_path / "last.pt.1-0123abcd.tmp").write_text("what a kill left")
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    run(tmp_path, **knobs)
    same_run(tmp_path, whole)
    assert not list(tmp_path.glob("*.tmp"))


def failing_at(at: int):
    real = data_copy.copy_batch

    def copy_batch(config, batch_size, step, seed, stream, *part):
        if (stream, step) == ("train", at):
            raise RuntimeError("row 3: damaged")
        return real(config, batch_size, step, seed, stream, *part)

    return copy_batch


def test_an_error_in_the_data_leaves_the_last_good_step(tmp_path, whole, monkeypatch):
    knobs = dict(checkpoint_interval=4, eval_interval=4)
    with monkeypatch.context() as patch:
        patch.setattr(data_copy, "copy_batch", failing_at(7))
        with pytest.raises(RuntimeError, match="row 3: damaged"):
            run(tmp_path, **knobs)
    assert torch.load(tmp_path / "last.pt")["step"] == 7
    run(tmp_path, **knobs)
    same_run(tmp_path, whole)
    monkeypatch.setattr(data_copy, "copy_batch", failing_at(10))  # of which nothing is needed
    assert run(tmp_path / "other", **knobs)["step"] == 10


# Going on


def test_the_directory_of_another_run_is_refused_with_its_knobs_named(whole):
    for knobs, lines in (
        ({"learning_rate": 0.02}, "learning_rate: 0.01 there, 0.02 here"),
        ({"max_steps": 20, "n_layer": 2}, "n_layer: 1 there, 2 here(.|\n)*max_steps: 10 there, 20 here"),
        ({"seed": 1}, "seed: 0 there, 1 here"),
    ):
        match = rf"holds another run: give its values, choose another --out_dir, or move .* \(mv {whole} (.|\n)*{lines}"
        refused(ValueError, match, whole, **knobs)


def test_init_scratch_refuses_a_run_and_resume_goes_on_with_other_knobs_that_change_no_result(tmp_path):
    out, resume = tmp_path / "run", dict(init="resume", grad_accum=2, checkpoint_interval=2, eval_interval=2)
    refused(FileNotFoundError, "init='resume', but .*last.pt does not exist: leave --init out", out, **resume)
    in_child(train_until, 5, signal.SIGTERM, out, {"init": "scratch"})
    refused(ValueError, "init='scratch', but .*exists: choose another --out_dir", out, init="scratch")
    assert run(out, recompute=True, eval_steps=2, **resume)["step"] == 10


def test_a_finished_wsd_run_goes_on_to_more_steps_as_if_it_had_had_them_from_the_start(tmp_path, capsys):
    wsd, out = dict(schedule="wsd", eval_interval=6, checkpoint_interval=7), tmp_path / "run"
    for max_steps in (10, 14, 25):
        run(out, max_steps=max_steps, **wsd)
    assert "steps 9 to 14" in capsys.readouterr().out
    run(tmp_path / "whole", max_steps=25, **wsd)
    same_run(out, tmp_path / "whole")
    assert torch.load(out / "stable.pt")["step"] == 23
    in_child(train_until, 3, signal.SIGTERM, tmp_path / "stopped", wsd)  # of 10 steps
    run(tmp_path / "stopped", max_steps=25, **wsd)
    same_run(tmp_path / "stopped", tmp_path / "whole")

    match = "step 23.* 18"  # the last tenth of 20 steps
    refused(ValueError, match, out, max_steps=20, **wsd)
    refused(ValueError, "seed: 0 there, 1 here", out, max_steps=30, seed=1, **wsd)
    (out / "stable.pt").unlink()
    refused(ValueError, "no checkpoint from before .* 23(?!.*give a larger)", out, max_steps=40, **wsd)


# Ranks


def rank_functions(rank: int) -> None:
    """What two ranks do together."""
    dist.init_process_group("gloo")
    assert checkpoint.rank_and_world() == (rank, 2) and checkpoint.gather(rank * 7) == [0, 7]
    total = checkpoint.sum_over_ranks(torch.device("cpu"), rank + 1, torch.tensor(2.0**40 + rank, dtype=torch.float64))
    assert total.tolist() == [3, 2**41 + 1]

    assert checkpoint.on_all_ranks(lambda: rank) == rank
    with pytest.raises(ValueError if rank else RuntimeError, match="row 3" if rank else "^rank 1: .*row 3"):
        checkpoint.on_all_ranks(lambda: int("row 3") if rank else 0)
    checkpoint.check_same_ranks({"a": 1, "b": math.nan})
    with pytest.raises(RuntimeError, match="^rank 1 has another config or other data than rank 0: a: 1 there, 0 here"):
        checkpoint.check_same_ranks({"a": rank, "b": 2})
    assert checkpoint.from_rank_0(None) is None
    dist.destroy_process_group()


def test_two_ranks_talk():
    assert conftest.on_two_ranks(rank_functions) == [0, 0]


def of_rank(rank: int, one: int, then, *args) -> None:
    """then(*args) on one rank."""
    if rank == one:
        then(*args)


def break_data(at: int) -> None:
    data_copy.copy_batch = failing_at(at)


@pytest.mark.parametrize("task", ["copy", "auto-2d-rope", "pretrain", "finetune"])
def test_two_ranks_without_a_shared_disk_stop_together_and_go_on_like_one(tmp_path, corpora, start, task):
    if task == "finetune":
        start = conftest.pretrained(tmp_path / "start", "auto-2d-rope")  # of a frozen grid nothing is learned
    knobs = of_task(task, corpora, start) | dict(batch_size=7, eval_interval=4)  # 4 pieces: not all of a size
    one, two, folders = tmp_path / "one", tmp_path / "n0" / "run", [tmp_path / "n0", tmp_path / "n1"]
    run(one, **knobs)
    argv = flags(out_dir="run", grad_accum=2, **knobs)
    ends = conftest.train_on_two_ranks(folders, argv, before=of_rank, args=(1, conftest.signal_at, 6, signal.SIGTERM))
    assert [status for status, _ in ends] == [STOPPED, STOPPED], ends
    assert "signal 15: stopped after step 7; the same command goes on" in ends[0][1]
    assert torch.load(two / "last.pt")["step"] == 7 and not (folders[1] / "run").exists()

    shutil.copytree(one, folders[1] / "run")  # finished: rank 0's is the one that counts
    ends = conftest.train_on_two_ranks(folders, argv)
    assert [status for status, _ in ends] == [0, 0] and "steps 7 to 10" in ends[0][1], ends
    for a, b in zip(conftest.computed(one), conftest.computed(two), strict=True):
        assert b == pytest.approx(a, rel=1e-4)
    for a, b in zip(log(one, "validation"), log(two, "validation"), strict=True):
        assert b == pytest.approx(a, rel=1e-4)
    assert json.loads((two / "run.json").read_text())["processes"] == 2
    if task == "copy":
        for line in log(two):
            batch = data_copy.copy_batch(conftest.configs()[1], 7, line["step"], 0, pieces=4)
            tokens = sum(tokens.size for tokens, _ in batch)
            assert line["tokens_per_s"] * line["ms"] / 1e3 == pytest.approx(tokens, rel=1e-2)
        before = files(two)
        ends = conftest.train_on_two_ranks(folders, argv)
        assert [status for status, _ in ends] == [0, 0] and "all 10 steps are done" in ends[0][1]
        assert files(two) == before and "Warning" not in ends[0][1]


def test_ranks_with_another_config_or_other_data_end_with_one_message(tmp_path, corpora, start):
    folders = [tmp_path / "n0", tmp_path / "n1"]
    for folder, other in zip(folders, ("train", "other"), strict=True):
        folder.mkdir()
        (folder / "data").symlink_to(corpora / other)
    knobs = of_task("pretrain", corpora) | dict(train_data="data")
    cases = {
        "learning_rate: 0.02 there, 0.01 here": [flags(out_dir="a"), flags(out_dir="a", learning_rate=0.02)],
        "eval_interval: 3 there, 1000 here": [flags(out_dir="b"), flags(out_dir="b", eval_interval=3)],
        "train corpus: '[0-9a-f]+' there": [flags(out_dir="c", **knobs)],
    }
    for match, argvs in cases.items():
        ends = conftest.train_on_two_ranks(folders, *argvs)
        for status, text in ends:
            assert status == 2 and text.count("error: ") == 1, ends
            assert f"error: rank 1 has another config or other data than rank 0: {match.split(':')[0]}" in text
        assert not (folders[0] / argvs[0][-1] / "log.jsonl").exists()


def test_a_rank_without_its_next_batch_ends_both_at_the_last_good_step(tmp_path):
    folders = [tmp_path / "n0", tmp_path / "n1"]
    ends = conftest.train_on_two_ranks(folders, flags(out_dir="run"), before=of_rank, args=(1, break_data, 6))
    assert [status for status, _ in ends] == [2, 2], ends
    assert "another rank has no batch for step 6; it says why" in ends[0][1] and "row 3: damaged" in ends[1][1]
    assert torch.load(folders[0] / "run" / "last.pt")["step"] == 6


@pytest.mark.parametrize("damage", ["{}", "[1]", "not json"])
def test_a_damaged_log_is_named_with_its_line(tmp_path, damage):
    (tmp_path / "validation.jsonl").write_text('{"step": 3}\n' + damage + '\n{"step": 9}\n{"step": 10')
    with pytest.raises(RuntimeError, match="validation.jsonl, line 2: damaged .*: delete that line"):
        checkpoint.last_validated(tmp_path)
    (tmp_path / "validation.jsonl").write_text('{"step": 3}\n{"step": 9}\n{"step": 10')  # the last is torn
    assert checkpoint.last_validated(tmp_path) == 9
