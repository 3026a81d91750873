"""What the tests share: tiny runs, scripts, processes to kill, two ranks, and small data."""

import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import checkpoint
import configurator
import data_copy
import data_dclm
import rope2d
import train
from model import Decoder, ModelConfig
from tokenizer import load_tokenizer

ROOT = Path(train.__file__).parent
TINY = dict(max_steps=10, batch_size=8, warmup_steps=3, learning_rate=0.01, device="cpu")
TINY |= dict(eval_steps=1, eval_interval=1000, checkpoint_interval=1000)
SHAPE = dict(n_layer=2, n_embd=32, head_dim=16, mlp_dim=64, qk_norm=True)  # of `start`
TASKS = {
    "copy": dict(n_embd=16, head_dim=8, block_size=64, max_length=8),
    "pretrain": dict(tokenizer="bytes", schedule="wsd", block_size=64, **SHAPE),
    "finetune": dict(tokenizer="bytes", text_max_length=6),  # its model is that of init_from
}
ENV = {name: value for name, value in os.environ.items() if name != "NANO2D_TRACEBACK"} | {"OMP_NUM_THREADS": "1"}
KILLED, STOPPED = -signal.SIGKILL, 128 + signal.SIGTERM

signal.signal(signal.SIGINT, signal.default_int_handler)  # the background of a script has it ignored
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["pytest", "torch._dynamo", "train"])  # so that a process costs 50 ms, not seconds


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small tensors on a busy machine are five times as fast on one thread; what a test sets is undone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def our_signals():
    """train.train() takes SIGTERM and SIGINT over; pytest gets them back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# Runs


def flags(task: str = "copy", **knobs) -> list[str]:
    """A command line of a tiny run."""
    return [f"--{name}={value}" for name, value in (TINY | TASKS[task] | {"task": task} | knobs).items()]


def configs(**knobs) -> tuple:
    return configurator.configure(*train.CONFIGS, argv=flags(**knobs))


def fresh(**knobs) -> Decoder:
    """The model of a copy run before its first step."""
    config = configs(vocab_size=len(data_copy.VOCAB), **knobs)[0]
    torch.manual_seed(0)
    return Decoder(config, rope2d.break_table(data_copy.TOKEN_BYTES))


def run(out: Path, **knobs) -> dict:
    """Trains in this process, as the command line would; what last.pt holds."""
    given: dict[str, str] = {}
    parts = configurator.configure(*train.CONFIGS, argv=flags(out_dir=out, **knobs), given=given)
    train.train(*parts, given=given)
    return torch.load(out / "last.pt")


def of_task(name: str, corpora: Path | None = None, start: Path | None = None) -> dict:
    """Knobs of a tiny run that other tasks than copying need."""
    if name == "pretrain":
        return dict(task=name, train_data=corpora / "train", val_data=corpora / "val")
    if name == "finetune":
        return dict(task=name, init_from=start)
    return dict(pos_encoding="auto-2d-rope", grid_steps=5) if name == "auto-2d-rope" else {}


def log(out: Path, name: str = "log") -> list[dict]:
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def computed(out: Path) -> list[dict]:
    """The log without its times."""
    return [{name: line[name] for name in ("step", "loss", "lr", "grad_norm")} for line in log(out)]


def same_run(a: Path, b: Path) -> None:
    """Weights, optimizer, step, best and losses agree bit for bit."""
    for name in ("last.pt", "best.pt"):
        one, two = torch.load(a / name), torch.load(b / name)
        for part in ("model", "optimizer", "step", "best"):
            torch.testing.assert_close(one[part], two[part], rtol=0, atol=0)
    assert computed(a) == computed(b) and log(a, "validation") == log(b, "validation")


def files(out: Path) -> dict:
    there = [path for path in out.iterdir() if path.name != ".lock"] if out.exists() else []
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in there}


def refused(error: type, match: str, out: Path, **knobs) -> None:
    """The run raises, and touches nothing that is there."""
    before = files(out)
    with pytest.raises(error, match=match):
        run(out, **knobs)
    assert files(out) == before


# Processes


def run_script(name: str, *args, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """`python name args` in `cwd`; config files are found beside the script."""
    command = [sys.executable, str(ROOT / name), *map(str, args)]
    return subprocess.run(command, cwd=cwd, env=ENV, capture_output=True, text=True, timeout=300)


def in_child(target: Callable, *args) -> int:
    """Exit status of target(*args) in a process of its own; minus the number of the signal that killed it."""
    child = forks.Process(target=target, args=args)
    child.start()
    child.join()
    return child.exitcode


def signal_at(step: int, number: int) -> None:
    """From now on this process gets signal `number` as step `step` begins."""
    rate = train.learning_rate

    def interrupted(config, now):
        if now == step:
            os.kill(os.getpid(), number)
        return rate(config, now)

    train.learning_rate = interrupted


def train_until(step: int, number: int, out: Path, knobs: dict) -> None:
    """Trains; for in_child."""
    torch.set_num_threads(1)
    signal_at(step, number)
    run(out, **knobs)


def on_two_ranks(target: Callable, *args) -> list[int]:
    """Exit statuses of target(rank, *args) in two processes that torchrun might have started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [forks.Process(target=as_rank, args=(rank, port, target, args)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    end = time.monotonic() + 180
    for rank in ranks:
        rank.join(max(0, end - time.monotonic()))
        rank.kill()  # one that waits for the other for ever
        rank.join()
    return [rank.exitcode for rank in ranks]


def as_rank(rank: int, port: int, target: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    about = dict(RANK=rank, LOCAL_RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    os.environ.update({name: str(value) for name, value in about.items()})
    target(rank, *args)


def train_on_two_ranks(folders: list[Path], *argvs: list[str], before: Callable | None = None, args=()) -> list[tuple]:
    """`python train.py argv` on two ranks, each in a folder of its own and with its own argv, or with one for both,
    after before(rank, *args); their exit statuses, and what they print."""
    statuses = on_two_ranks(train_script, folders, argvs, before, args)
    return [(status, (folder / "output").read_text()) for status, folder in zip(statuses, folders, strict=True)]


def train_script(rank: int, folders: list[Path], argvs: tuple, before: Callable | None, args: tuple) -> None:
    folders[rank].mkdir(exist_ok=True)
    os.chdir(folders[rank])
    sys.argv = ["train.py", *argvs[rank % len(argvs)]]
    output = os.open("output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if before:
        before(rank, *args)
    configurator.run_cli(train.main)


# Data


def build(folder: Path, name: str, seed: int, **knobs) -> Path:
    """Shards of 150 random documents in folder/name, in several files."""
    chance = random.Random(seed)
    words = "the cat sat on a mat and\nso did the dög\n\n".split(" ")
    documents = [" ".join(chance.choices(words, k=chance.randint(5, 60))) for _ in range(150)]
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    values = dict(sources=(str(source),), tokenizer="bytes", length=48, packing="continue", threads=1)
    values |= dict(shard_tokens=4000, block_bytes=4000, out_dir=str(folder / name))
    data_dclm.build(data_dclm.BuildConfig(**values | knobs))
    return folder / name


@pytest.fixture(scope="session")
def corpora(tmp_path_factory) -> Path:
    """A folder with the corpora train, val and other: bytes, sequences of 48."""
    folder = tmp_path_factory.mktemp("corpora")
    for seed, name in enumerate(("train", "val", "other")):
        build(folder, name, seed)
    return folder


def pretrained(path: Path, pos_encoding: str = "rope", **changes) -> Path:
    """A run as pretraining leaves it, of random weights; a learned grid is frozen. `changes` of its config."""
    tokenizer = load_tokenizer("bytes")
    values = dict(block_size=400, zero_init_residual=False, init_std=0.1, vocab_size=257, **SHAPE)
    config = ModelConfig(pos_encoding=pos_encoding, **values | changes)
    torch.manual_seed(1)
    model = Decoder(config, rope2d.break_table(tokenizer.token_bytes))
    model.freeze_grid()
    about = vars(config) | {"task": "pretrain", "tokenizer": "bytes", "seed": 0}
    payload = {"model": model.state_dict(), "config": about, "step": 9, "data": {"tokenizer": tokenizer.fingerprint}}
    checkpoint.save(payload, path / "last.pt")
    return path


@pytest.fixture(scope="session")
def start(tmp_path_factory) -> Path:
    return pretrained(tmp_path_factory.mktemp("start"))
