"""The scripts as a user runs them: train, stop, go on, evaluate to 100 %; mistakes end in one line and status 2."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ENV, ROOT, STOPPED, log, run_script

import checkpoint
import configurator
import data_text
import eval as evaluation
import train

TOY = ["config/toy_copy.py", "--n_embd=64", "--head_dim=64", "--max_length=6", "--device=cpu", "--max_steps=400"]
TOY += ["--batch_size=32", "--mlp_dim=256", "--learning_rate=4e-3", "--warmup_steps=20", "--eval_interval=1000"]
TOY += ["--checkpoint_interval=1000", "--out_dir=run"]
OPTIONAL = ["tiktoken", "datasets", "zstandard", "pyarrow", "matplotlib", "safetensors", "transformers", "wandb"]
BARE = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({OPTIONAL}))  # as if they were not installed
sys.path.insert(0, {str(ROOT)!r})
runpy.run_path({str(ROOT / "train.py")!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, tuple, subprocess.CompletedProcess]:
    """A folder with run/, stopped by SIGTERM, continued on two ranks without optional packages; what both gave."""
    folder = tmp_path_factory.mktemp("user")
    how = dict(cwd=folder, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first, path = subprocess.Popen([sys.executable, ROOT / "train.py", *TOY], **how), folder / "run" / "log.jsonl"
    while first.poll() is None and not (path.exists() and path.read_text().count("\n") > 200):
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    out, err = first.communicate(timeout=300)
    (folder / "bare.py").write_text(BARE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "bare.py", *TOY]
    return folder, (first.returncode, out, err), subprocess.run(torchrun, timeout=300, **how)


def test_a_stopped_training_says_so_and_goes_on_on_two_processes(trained):
    folder, (status, out, err), again = trained
    assert status == STOPPED and "steps 0 to 400" in out and "signal 15: stopped after step" in err, err
    done = int(err.split("stopped after step ")[1].split(";")[0])
    assert again.returncode == 0 and again.stdout.count(f"steps {done} to 400") == 1, again.stderr
    assert [line["step"] for line in log(folder / "run")] == list(range(400))
    assert json.loads((folder / "run" / "run.json").read_text())["processes"] == 2


def test_2d_rope_copies_strings_five_times_as_long_as_it_was_trained_on(trained, monkeypatch):
    ladder = ["--runs=run", "--lengths=1-6,12,30", "--samples=20", "--device=cpu"]
    done = run_script("eval.py", *ladder, "--out_dir=forced", cwd=trained[0])
    assert done.returncode == 0 and "100% (20/20)" in done.stdout, done.stderr
    assert (trained[0] / "forced" / "accuracy.png").stat().st_size > 10_000
    monkeypatch.chdir(trained[0])
    monkeypatch.setattr(sys, "argv", ["eval.py", *ladder, "--out_dir=free", "--free_running=True", "--plot=False"])
    configurator.run_cli(evaluation.main)
    for mode in ("forced", "free"):
        rows = json.loads((trained[0] / mode / "accuracy.json").read_text())
        wanted = [(task, n, 1.0, 0.0) for task in ("imbalanced", "recursive-flip", "uniform") for n in (6, 12, 30)]
        assert [(r["task"], r["length"], r["exact_match"], r["token_error"]) for r in rows] == wanted


MISTAKES = [
    (train, ["--learning_rat=1e-3"], "--learning_rat: unknown name, the nearest known one is --learning_rate"),
    (train, ["--n_layer=two"], "n_layer = 'two' (from the command line): expected int"),
    (train, ["--pos_encoding=rope3"], "no encoding 'rope3'"),
    (train, ["--n_embd=129"], "set head_dim"),
    (train, ["config/toy_cpy.py"], "toy_copy.py"),
    (
        train,
        ["--task=pretrain", "--tokenizer=gpt2", "--train_data=a", "--val_data=b"],
        "tokenizer='gpt2' needs tiktoken: pip install tiktoken",
    ),
    (evaluation, ["--runs=nowhere"], "nowhere: no such checkpoint"),
    (evaluation, [], "--runs=DIR"),
    (evaluation, ["--runs=nowhere", "--samples=99999999999"], "samples=(99999999999,): expected 1 to"),
    (evaluation, ["--runs=nowhere", f"--eval_seed={2**63}"], f"eval_seed={2**63}: expected 0 to 2^63 - 1"),
    (data_text, ["--show=1", f"--seed={2**64}"], f"seed={2**64}: expected 0 to 2^63 - 1"),
]


@pytest.mark.parametrize("script, argv, words", MISTAKES)
def test_a_mistake_ends_in_one_line_and_leaves_nothing_behind(tmp_path, monkeypatch, capsys, script, argv, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NANO2D_TRACEBACK", raising=False)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.setattr(sys, "argv", [script.__file__, *argv])
    monkeypatch.setattr(script, "configurator", configurator, raising=False)  # data_text.py has it as a script alone
    with pytest.raises(SystemExit) as end:
        configurator.run_cli(script.main)
    out, err = capsys.readouterr()
    assert end.value.code == 2 and out == "" and words in err, err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"] == []


def test_the_recipes_for_text_go_on_top_of_the_large_configs(corpora, tmp_path):
    """Two steps of each, with a small model: pretraining, then finetuning that replays it."""
    small = [
        "n_layer=2",
        "n_embd=32",
        "n_head=2",
        "head_dim=16",
        "mlp_dim=48",
        "pos_encoding=4d-rope",
        "block_size=400",
    ]
    common = ["tokenizer=bytes", "device=cpu", "max_steps=2", "warmup_steps=1", "batch_size=8", "grad_accum=2"]
    common += ["eval_steps=1", "compile=False", f"train_data={corpora / 'train'}"]
    for name, configs, knobs in (
        ("350m", ["pretrain", "350m", "text_recipe"], [*small, f"val_data={corpora / 'val'}"]),
        ("copy", ["finetune_copy", "finetune_recipe"], ["text_max_length=20", f"init_from={tmp_path / '350m'}"]),
    ):
        args = [f"config/{config}.py" for config in configs]
        args += [f"--{knob}" for knob in (*common, *knobs, f"out_dir={tmp_path / name}")]
        done = run_script("train.py", *args)
        assert done.returncode == 0, done.stderr
        config = checkpoint.read(tmp_path / name / "last.pt")["config"]
        assert (config["freqs"], config["shared_embed_init"], config["logit_scale"]) == ("mixed", 1.0, "log_n")
    assert [config[name] for name in ("replay", "text_noise", "text_lead", "first_weight")] == [0.125, 0.4, 0.5, 8.0]
