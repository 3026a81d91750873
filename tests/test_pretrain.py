"""train.py with task = 'pretrain', and what eval.py does with the model: losses, text."""

import dataclasses
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import batches
import checkpoint
import configurator
import data_dclm
import eval as evaluation
import train
from data_dclm import BuildConfig, Corpus, load_tokenizer
from eval import EvalConfig
from model import Decoder, ModelConfig

ROOT = Path(__file__).resolve().parent.parent
CLASSES = train.CONFIGS
TINY = dict(task="pretrain", tokenizer="bytes", n_embd=16, head_dim=8, n_layer=2, block_size=64, mlp_dim=32)
TINY |= dict(batch_size=8, max_steps=10, warmup_steps=3, schedule="wsd", learning_rate=0.01, device="cpu")
TINY |= dict(eval_steps=2, eval_interval=5, checkpoint_interval=5)
forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["pytest", "torch._dynamo", "train"])


def build(folder: Path, name: str, seed: int, n: int, tokenizer: str = "bytes") -> Path:
    """Shards of n random documents in folder/name, in several files."""
    chance = random.Random(seed)
    words = "the cat sat on a mat and\nso did the dög\n\n".split(" ")
    documents = [" ".join(chance.choices(words, k=chance.randint(5, 60))) for _ in range(n)]
    source = folder / f"{name}.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    config = dict(sources=(str(source),), tokenizer=tokenizer, length=48, packing="continue", processes=1)
    data_dclm.build(BuildConfig(**config, shard_tokens=4000, out_dir=str(folder / name)))
    return folder / name


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A folder with the corpora train, val and other."""
    folder = tmp_path_factory.mktemp("data")
    for seed, name in enumerate(("train", "val", "other")):
        build(folder, name, seed, 150)
    return folder


def configs(out: Path, data: Path, **knobs):
    knobs = TINY | {"train_data": data / "train", "val_data": data / "val", "out_dir": out} | knobs
    return configurator.configure(*CLASSES, argv=[f"--{name}={value}" for name, value in knobs.items()])


def run(out: Path, data: Path, **knobs) -> dict:
    train.train(*configs(out, data, **knobs))
    return torch.load(out / "last.pt")


def log(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in ("step", "loss", "lr", "grad_norm")} for line in lines]


def refused(out: Path, data: Path, error: type, match: str, **knobs) -> None:
    before = {path: path.read_bytes() for path in out.iterdir()} if out.exists() else {}
    with pytest.raises(error, match=match):
        run(out, data, **knobs)
    assert before == ({path: path.read_bytes() for path in out.iterdir()} if out.exists() else {})


# Batches


def test_a_step_is_one_shuffled_batch_however_many_ranks_and_micro_batches_share_it(data):
    corpus = Corpus(data / "train")
    order = corpus.order(np.arange(24, 32), 0)  # step 3
    _, _, text_config, _, config = configs(data, data)
    batch = batches.text_data(config, text_config, 64).batch(3, "train")
    for world, grad_accum in ((1, 1), (1, 3), (2, 2), (8, 1)):
        seen = []
        for rank in range(world):
            micro = batches.micro_batches(*batch, grad_accum, rank, world)
            assert len(micro) == grad_accum
            seen += [torch.cat([tokens[:, :1], targets], dim=1) for tokens, targets in micro]
            assert all(torch.equal(tokens[:, 1:], targets[:, :-1]) for tokens, targets in micro)
        assert sorted(torch.cat(seen).tolist()) == sorted(corpus.read(order).tolist())


def test_validation_has_windows_of_the_other_corpus_whatever_the_seed(data):
    pairs = []
    for seed in (0, 1):
        _, _, text_config, _, config = configs(data, data, seed=seed)
        batch = batches.text_data(config, text_config, 64).batch
        pairs.append((batch(0, "train")[0], batch(0, "validation")[0]))
    assert (pairs[0][0] != pairs[1][0]).any() and (pairs[0][1] == pairs[1][1]).all()
    corpus = Corpus(data / "val")
    val = {tuple(row[:-1]) for row in corpus.read(np.arange(corpus.rows)).tolist()}
    assert all(tuple(row) in val for row in pairs[0][1].tolist())


def test_the_loss_is_the_mean_over_all_tokens_and_so_is_the_validation_loss(tmp_path, data):
    run(tmp_path, data, max_steps=1, eval_interval=1)
    model_config, _, text_config, _, config = configs(tmp_path, data)
    source = batches.text_data(config, text_config, 64)
    model_config.vocab_size = 257
    torch.manual_seed(0)
    fresh = Decoder(model_config, source.newlines)
    tokens, targets = map(torch.from_numpy, source.batch(0, "train"))
    assert log(tmp_path)[0]["loss"] == pytest.approx(F.cross_entropy(fresh(tokens).mT, targets).item(), rel=1e-6)
    trained = checkpoint.load_model(checkpoint.read(tmp_path / "last.pt"))
    windows = [map(torch.from_numpy, source.batch(i, "validation")) for i in range(2)]
    losses = [F.cross_entropy(trained(tokens).mT, targets).item() for tokens, targets in windows]
    val = json.loads((tmp_path / "validation.jsonl").read_text())
    assert val["val_loss"] == pytest.approx(np.mean(losses), rel=1e-6)


@pytest.mark.parametrize("knobs", [{}, {"dtype": "bfloat16", "recompute": True}], ids=["float32", "bfloat16"])
def test_two_processes_train_like_one(tmp_path, data, knobs):
    run(tmp_path / "one", data, **knobs)
    flags = TINY | {"train_data": data / "train", "val_data": data / "val", "out_dir": tmp_path / "two"} | knobs
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    launch += [f"--{name}={value}" for name, value in (flags | {"grad_accum": 2}).items()]
    done = subprocess.run(launch, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    tolerance = 1e-2 if knobs else 1e-5
    for a, b in zip(log(tmp_path / "one"), log(tmp_path / "two"), strict=True):
        assert a == pytest.approx(b, rel=tolerance)


# Kills


def train_in_child(out: Path, data: Path, knobs: dict) -> None:
    torch.set_num_threads(1)
    train.train(*configs(out, data, **knobs))


def test_ten_kills_at_random_moments_change_no_bit(tmp_path, data):
    knobs, out = dict(max_steps=150, checkpoint_interval=3, eval_interval=20), tmp_path / "killed"
    assert in_child(tmp_path / "whole", data, knobs) == 0
    chance, steps = random.Random(0), []
    for _ in range(10):
        child, began = forks.Process(target=train_in_child, args=(out, data, knobs)), time.time()
        child.start()
        while not (out / "last.pt").exists() or (out / "last.pt").stat().st_mtime < began:  # some steps are safe, then
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.06))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL
        steps.append(torch.load(out / "last.pt")["step"])
    assert steps == sorted(steps) and 0 < steps[-1] < 150
    assert in_child(out, data, knobs) == 0
    whole, killed = (torch.load(tmp_path / name / "last.pt") for name in ("whole", "killed"))
    torch.testing.assert_close(whole["model"], killed["model"], rtol=0, atol=0)
    torch.testing.assert_close(whole["optimizer"], killed["optimizer"], rtol=0, atol=0)
    assert log(tmp_path / "whole") == log(tmp_path / "killed")


def in_child(*args) -> int:
    child = forks.Process(target=train_in_child, args=args)
    child.start()
    child.join()
    return child.exitcode


# Damage and refusals


def test_other_data_or_another_tokenizer_is_refused_and_moved_data_is_not(tmp_path, data):
    out = tmp_path / "run"
    run(out, data, max_steps=10)
    refused(out, data, ValueError, "train corpus: '[0-9a-f]+' there, '[0-9a-f]+' here", train_data=data / "other")
    shutil.copytree(data / "train", tmp_path / "moved")
    state = run(out, data, train_data=tmp_path / "moved")
    assert state["step"] == 10 and state["data"]["tokenizer"]["name"] == "bytes"
    torch.save(state | {"data": state["data"] | {"tokenizer": {"name": "bytes", "size": 256}}}, out / "last.pt")
    refused(out, data, ValueError, "tokenizer: .*256.* there, .*257.* here")


@pytest.mark.parametrize(
    "error, match, knobs",
    [
        (ValueError, "needs --train_data=DIR, a folder of shards: data_dclm.py makes them", {"train_data": ""}),
        (ValueError, "needs --val_data=DIR", {"val_data": ""}),
        (FileNotFoundError, "nowhere", {"train_data": "nowhere"}),
        (ValueError, "has sequences of 48 tokens: block_size=40 is too short", {"block_size": 40}),
        (ValueError, "eval_steps=1000 x batch_size=8: .*val has only [0-9]+ sequences", {"eval_steps": 1000}),
        (ValueError, "vocab_size=300: the data has 257 tokens", {"vocab_size": 300}),
        (FileNotFoundError, "tokenizer='none'", {"tokenizer": "none"}),
        (ValueError, "another tokenizer", {"tokenizer": "other"}),
    ],
)
def test_what_cannot_be_trained_on_is_refused(tmp_path, data, monkeypatch, error, match, knobs):
    if knobs.get("tokenizer") == "other":
        other = SimpleNamespace(identity={"name": "other", "size": 5, "sha256": "0"}, token_bytes=[b"a"] * 5)
        monkeypatch.setattr(batches, "load_tokenizer", lambda name: other)
    refused(tmp_path / "run", data, error, match, **knobs)


def test_a_flipped_byte_stops_the_run_with_file_and_row_and_mended_data_goes_on_bit_for_bit(tmp_path, data):
    shutil.copytree(data / "train", tmp_path / "train")
    whole = run(tmp_path / "whole", data)
    corpus = Corpus(data / "train")
    row = corpus.order(np.arange(56, 57), 0)[0]  # the first of step 7
    shard = int(np.searchsorted(corpus.starts, row, "right") - 1)
    path, at = tmp_path / "train" / f"{shard:06d}.bin", int(row - corpus.starts[shard])
    sound = path.read_bytes()
    damaged = bytearray(sound)
    damaged[data_dclm.HEADER + at * 49 * 2 + 11] ^= 1  # uint16
    path.write_bytes(damaged)
    with pytest.raises(RuntimeError, match=f"{path}, row {at}: damaged"):
        run(tmp_path / "run", data, train_data=tmp_path / "train")
    assert torch.load(tmp_path / "run" / "last.pt")["step"] == 5
    path.write_bytes(sound)
    torch.testing.assert_close(run(tmp_path / "run", data, train_data=tmp_path / "train")["model"], whole["model"])


def test_a_shard_that_one_rank_lacks_ends_all_ranks_with_a_message(tmp_path, data):
    shutil.copytree(data / "train", tmp_path / "train")
    shards = sorted((tmp_path / "train").glob("*.bin"))
    shards[-1].unlink()
    script = tmp_path / "script.py"  # rank 1 sees the folder without the last shard
    script.write_text(
        "import os, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        f"folder = {{'0': {str(data)!r}, '1': {str(tmp_path)!r}}}[os.environ['RANK']]\n"
        "sys.argv.append(f'--train_data={folder}/train')\n"
        "import configurator, train\n"
        "configurator.run_cli(train.main)\n"
    )
    flags = [
        f"--{name}={value}" for name, value in (TINY | {"val_data": data / "val", "out_dir": tmp_path / "o"}).items()
    ]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script), *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and not (tmp_path / "o").exists()
    assert "sees other data than rank" in done.stderr or "build was stopped" in done.stderr


# Costs, logs


def test_flops_are_what_torch_counts():
    config = ModelConfig(n_layer=3, n_head=4, n_kv_head=2, n_embd=32, head_dim=16, vocab_size=50, mlp_dim=80)
    model = Decoder(config, torch.zeros(50))
    tokens = torch.zeros(2, 30, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens).backward()
    assert counter.get_total_flops() == train.flops(model, [(tokens, tokens)])


SIZES = {"350m": (459, 360), "730m": (877, 729), "1.4b": (1613, 1416)}  # millions, with 128,256 and 32,000 tokens


@pytest.mark.parametrize("size", SIZES)
def test_parameters_of_the_sizes(size, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = configurator.configure(*CLASSES, argv=["config/pretrain.py", f"config/{size}.py"])[0]

    def parameters(n_layer: int, vocab_size: int) -> int:
        small = dataclasses.replace(config, n_layer=n_layer, vocab_size=vocab_size)
        return sum(p.numel() for p in Decoder(small, torch.zeros(vocab_size)).parameters())

    one, layer, token = parameters(1, 1), parameters(2, 1) - parameters(1, 1), parameters(1, 2) - parameters(1, 1)
    for vocab_size, millions in zip((128_256, 32_000), SIZES[size], strict=True):
        assert round((one + (config.n_layer - 1) * layer + (vocab_size - 1) * token) / 1e6) == millions


FAKE_WANDB = """
import json, os
def init(**about):
    write(about)
    return __import__(__name__)
def log(line, step):
    write({"step": step} | line)
def write(line):
    with open(os.environ["FAKE_WANDB"], "a") as file:
        print(json.dumps(line), file=file)
"""


def test_wandb_gets_all_losses_in_one_run_that_goes_on(tmp_path, data, monkeypatch):
    refused(tmp_path / "run", data, ValueError, "not installed, pip install wandb", wandb="project")
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("FAKE_WANDB", str(tmp_path / "lines"))
    run(tmp_path / "run", data, wandb="project")
    (tmp_path / "run" / "validation.jsonl").unlink()
    run(tmp_path / "run", data, wandb="project")  # validates once more
    monkeypatch.delitem(sys.modules, "wandb")
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    starts = [line for line in lines if "project" in line]
    assert len(starts) == 2 and starts[0]["id"] == starts[1]["id"] and starts[0]["resume"] == "allow"
    assert [line["step"] for line in lines if "grad_norm" in line] == list(range(10))
    assert [line["step"] for line in lines if "val_loss" in line] == [5, 10, 10]


# What eval.py does with it


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    run(out, data, max_steps=40, checkpoint_interval=100)
    return out


def test_the_loss_on_text_is_that_of_each_window(trained, data, tmp_path):
    config = EvalConfig(runs=(str(trained),), val_data=str(data / "val"), windows=20, device="cpu")
    (row,) = evaluation.text_losses(config)
    model = checkpoint.load_model(checkpoint.read(trained / "last.pt"))
    corpus = Corpus(data / "val")
    rows = torch.from_numpy(corpus.read(corpus.order(np.arange(20), 0)))
    losses = F.cross_entropy(model(rows[:, :-1]).mT, rows[:, 1:], reduction="none").mean(1).double()
    assert row["loss"] == pytest.approx(losses.mean().item(), rel=1e-6) and row["tokens"] == 20 * 48
    assert row["loss_standard_error"] == pytest.approx(losses.std().item() / math.sqrt(20), rel=1e-5)
    rough = evaluation.text_losses(dataclasses.replace(config, dtype="bfloat16"))[0]["loss"]
    assert 1e-6 < abs(rough - row["loss"]) < 0.02
    n_bytes = (rows[:, 1:] < 256).sum().item()  # an end of sequence has none
    assert row["bits_per_byte"] == pytest.approx(losses.sum().item() * 48 / math.log(2) / n_bytes, rel=1e-6)
    flags = [f"--runs={trained}", f"--val_data={data}/val", "--windows=20", f"--out_dir={tmp_path}", "--device=cpu"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "eval.py", *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and f"{row['loss']:.4f}" in done.stdout, done.stderr
    assert json.loads((tmp_path / "losses.json").read_text()) == [pytest.approx(row)]
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flags", [[], ["--temperature=1", "--top_k=20", "--top_p=0.9", "--sample_seed=3"]])
def test_text_is_written_as_the_model_generates_it(trained, flags, capsys):
    config = configurator.configure(EvalConfig, argv=[f"--runs={trained}", "--prompt=the dö", *flags])
    config.max_new_tokens = 30
    evaluation.write_text(config)
    model, tokenizer = checkpoint.load_model(checkpoint.read(trained / "last.pt")).eval(), load_tokenizer("bytes")
    prompt = tokenizer.encode("the dö").tolist()
    new = [
        t.item()
        for t in model.generate([prompt], 30, config.temperature, config.top_k, config.top_p, 3 if flags else 0)
    ]
    new = new[: new.index(tokenizer.eos)] if tokenizer.eos in new else new
    assert capsys.readouterr().out == "the dö" + bytes(new).decode("utf-8", "replace") + "\n"


def test_the_script_reads_a_prompt_from_standard_input_and_streams(trained):
    command = [sys.executable, "eval.py", f"--runs={trained}", "--prompt=-", "--max_new_tokens=8"]
    done = subprocess.run(command, cwd=ROOT, input="a\nmat", capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("a\nmat") and len(done.stdout) > 8, done.stderr


@pytest.mark.parametrize(
    "match, knobs",
    [
        ("give --runs=DIR", {"runs": (), "prompt": "a"}),
        ("prompt of 60 tokens and 256 new ones exceed block_size=64", {"prompt": "a" * 60}),
        ("not finetuned on copying; --val_data or --prompt show what it knows", {}),
        ("windows=0: expected at least 1", {"windows": 0}),
    ],
)
def test_what_cannot_be_evaluated_is_refused(trained, match, knobs):
    with pytest.raises(ValueError, match=match):
        config = EvalConfig(**{"runs": (str(trained),), "device": "cpu"} | knobs)
        evaluation.write_text(config) if config.prompt else evaluation.copy_ladder(config)
