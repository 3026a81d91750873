"""train.py with task = 'finetune': chats, changed encodings, Qwen3 folders; copying in text."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import decoders, models, pre_tokenizers, trainers

import batches
import checkpoint
import configurator
import data_copy
import eval as evaluation
import qwen3
import train
from data_copy import IGNORE, TextCopyConfig
from data_dclm import load_tokenizer
from eval import EvalConfig
from model import Decoder, ModelConfig

ROOT = Path(__file__).resolve().parent.parent
SHAPE = dict(n_embd=32, head_dim=16, n_layer=2, block_size=400, mlp_dim=64, qk_norm=True)
TINY = dict(task="finetune", tokenizer="bytes", text_task="imbalanced", text_max_length=6, batch_size=6, max_steps=4)
TINY |= dict(warmup_steps=2, learning_rate=0.01, device="cpu", eval_steps=1, eval_interval=100, checkpoint_interval=100)
MESSAGES = [{"role": "user", "content": "Copy it:\n01"}, {"role": "assistant", "content": "01"}]


def pretrained(path: Path, encoding: str = "rope", **data) -> Path:
    """A checkpoint as pretraining leaves it, of random weights; a learned grid has settled."""
    tokenizer = load_tokenizer("bytes")
    newlines = torch.tensor([piece.count(b"\n") for piece in tokenizer.token_bytes])
    torch.manual_seed(1)
    config = ModelConfig(**SHAPE, pos_encoding=encoding, vocab_size=257, zero_init_outputs=False, init_std=0.1)
    model = Decoder(config, newlines)
    model.settle_grid()
    about = vars(config) | {"task": "pretrain", "tokenizer": "bytes", "seed": 0}
    data = {"tokenizer": tokenizer.identity} | data
    checkpoint.save({"model": model.state_dict(), "config": about, "step": 9, "data": data}, path / "last.pt")
    return path


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    return pretrained(tmp_path_factory.mktemp("start"))


def flags(out: Path, start: Path, **knobs) -> list[str]:
    return [f"--{name}={value}" for name, value in (TINY | {"init_from": start, "out_dir": out} | knobs).items()]


def run(out: Path, start: Path, **knobs) -> dict:
    """Trains in this process as the command line would; what last.pt holds."""
    argv = flags(out, start, **knobs)
    configs = configurator.configure(*train.CONFIGS, argv=argv)
    configurator.resolve(train.CONFIGS, argv, given := set())
    train.train(*configs, changes=given & vars(ModelConfig()).keys())
    return torch.load(out / "last.pt")


def log(out: Path) -> list[dict]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in ("step", "loss", "lr", "grad_norm")} for line in lines]


# Chats as tokens


def test_a_chat_of_bytes_is_paragraphs_and_the_answer_ends_with_an_end_of_sequence():
    ids, said = load_tokenizer("bytes").chat(MESSAGES)
    assert ids.tolist() == [*b"Copy it:\n01\n\n01", 256]
    assert said.tolist() == [False] * 13 + [True] * 3
    twice, said = load_tokenizer("bytes").chat(MESSAGES * 2)
    assert twice.tolist() == ids.tolist() * 2 and said.sum() == 6


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory) -> Path:
    """A Qwen3 folder with a trained byte-level BPE tokenizer, ChatML's specials, and random weights."""
    folder = tmp_path_factory.mktemp("qwen3")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    split = tokenizers.Regex(r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")
    levels = [
        pre_tokenizers.Split(split, "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Sequence(levels), decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = [template.format("0110 1, 2.50") for template in data_copy.STRING_TEMPLATES + data_copy.LIST_TEMPLATES]
    tokenizer.train_from_iterator(texts * 3, trainer)
    tokenizer.add_special_tokens(specials)
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    size = 128 * (tokenizer.get_vocab_size() // 128 + 1)  # padded, as Qwen3's is
    qwen3.save(Decoder(ModelConfig(**SHAPE, pos_encoding="rope", vocab_size=size), torch.zeros(size)), folder)
    return folder


@pytest.mark.parametrize(
    "text", ["Copy this:\n0110", "über\n\n  naïve\t日本 it's 3.14!!\n", "", " a b a", "<|im_end|>"[:-1]]
)
def test_a_tokenizer_json_gives_the_ids_of_hugging_face(hf_folder, text):
    theirs = tokenizers.Tokenizer.from_file(str(hf_folder / "tokenizer.json"))
    ours = load_tokenizer(str(hf_folder))
    assert ours.encode(text).tolist() == theirs.encode(text).ids
    assert ours.decode(ours.encode(text)) == text and ours.eos == theirs.token_to_id("<|endoftext|>")
    assert ours.token_bytes[ours.encode("\n")[0]] == b"\n" and ours.vocab_size == theirs.get_vocab_size()


def test_a_chat_of_qwen3_is_chatml(hf_folder):
    ours = load_tokenizer(str(hf_folder))
    ids, said = ours.chat(MESSAGES)
    assert ours.decode(ids) == "<|im_start|>user\nCopy it:\n01<|im_end|>\n<|im_start|>assistant\n01<|im_end|>\n"
    assert ours.decode(ids[said]) == "01<|im_end|>"


# Batches and the loss


def test_the_loss_is_on_the_answers_alone_and_padding_changes_nothing(tmp_path, start):
    run(tmp_path / "run", start)
    model = checkpoint.load_model(checkpoint.read(start / "last.pt"))
    losses = []
    for i in range(6):
        record = data_copy.text_example(TextCopyConfig("imbalanced", text_max_length=6), i, 0)
        ids, said = load_tokenizer("bytes").chat(record["messages"])
        tokens = torch.tensor(ids.astype(np.int64))[None]
        nll = F.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:], reduction="none")
        losses.append(nll[torch.tensor(said[1:])])
    assert log(tmp_path / "run")[0]["loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


@pytest.mark.parametrize("encoding", ["rope", "auto-2d-rope"])  # of settled gates nothing is learned
def test_micro_batches_and_two_processes_train_like_one(tmp_path, encoding):
    start = pretrained(tmp_path / "start", encoding)
    run(tmp_path / "one", start)
    run(tmp_path / "cut", start, grad_accum=3)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    launch += flags(tmp_path / "two", start, grad_accum=2)
    done = subprocess.run(launch, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for other in ("cut", "two"):
        for a, b in zip(log(tmp_path / "one"), log(tmp_path / other), strict=True):
            assert a == pytest.approx(b, rel=1e-5)


def test_chats_from_a_file_are_gone_through_in_epochs(tmp_path, start):
    chats = [{"messages": [MESSAGES[0], {"role": "assistant", "content": str(i)}]} for i in range(5)]
    data_copy.write_jsonl(tmp_path / "chats.jsonl", chats)
    argv = flags(tmp_path / "run", start, chats=tmp_path / "chats.jsonl", batch_size=5)
    *_, text_config, text_copy_config, config = configurator.configure(*train.CONFIGS, argv=argv)
    decoder, identity, _ = batches.load_start(config, {})
    data = batches.chat_data(config, text_config, text_copy_config, decoder, identity)
    seen = []
    for step in range(3):
        _, targets = data.batch(step, "train")
        assert (targets != IGNORE).sum() == 10
        seen.append([row[row != IGNORE].tolist() for row in targets])
        assert sorted(seen[-1]) == [[ord(str(i)), 256] for i in range(5)]
    assert seen[0] != seen[1] != seen[2]
    run(tmp_path / "run", start, chats=tmp_path / "chats.jsonl")
    data_copy.write_jsonl(tmp_path / "chats.jsonl", chats[:4])
    with pytest.raises(ValueError, match="train chats: .* there, .* here"):
        run(tmp_path / "run", start, chats=tmp_path / "chats.jsonl")


# Where it starts


def test_the_encoding_stays_or_changes_as_asked_with_the_same_weights(tmp_path, start, capsys):
    before = torch.load(start / "last.pt")
    for name, knobs in (("same", {}), ("2d", {"pos_encoding": "2d-rope"}), ("h", {"pos_encoding": "h-rope"})):
        state = run(tmp_path / name, start, learning_rate=1e-30, min_lr=0, weight_decay=0, **knobs)
        said = capsys.readouterr().out
        assert ("2d-rope, from weights of rope" in said, "h-rope, from" in said) == (name == "2d", name == "h")
        assert state["config"]["pos_encoding"] == knobs.get("pos_encoding", "rope")  # 2d-rope is the default elsewhere
        assert state["config"]["n_layer"] == 2 and state["config"]["qk_norm"]
        for key, p in before["model"].items():
            if "rotary" not in key:
                torch.testing.assert_close(state["model"][key], p)
    assert set(k for k in state["model"] if "rotary" in k) == {"rotary.rope.turns", "rotary.2d-rope.turns"}


def test_a_finetuned_run_goes_on_after_a_stop_and_its_config_file_runs_it_again(tmp_path, start, monkeypatch):
    whole = run(tmp_path / "whole", start, pos_encoding="2d-rope")
    chat_data = train.chat_data

    def stopping(*args):
        data = chat_data(*args)

        def batch(step, stream):
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return data.batch(step, stream)

        return data._replace(batch=batch)

    monkeypatch.setattr(train, "chat_data", stopping)
    with pytest.raises(SystemExit):
        run(tmp_path / "stopped", start, pos_encoding="2d-rope")
    monkeypatch.setattr(train, "chat_data", chat_data)
    stopped = run(tmp_path / "stopped", start, pos_encoding="2d-rope")
    torch.testing.assert_close(stopped["model"], whole["model"], rtol=0, atol=0)
    argv = [str(tmp_path / "whole" / "config.py"), f"--out_dir={tmp_path / 'again'}"]
    configurator.resolve(train.CONFIGS, argv, given := set())
    train.train(*configurator.configure(*train.CONFIGS, argv=argv), changes=given & vars(ModelConfig()).keys())
    torch.testing.assert_close(torch.load(tmp_path / "again" / "last.pt")["model"], whole["model"], rtol=0, atol=0)


@pytest.mark.parametrize(
    "error, match, knobs",
    [
        (ValueError, "needs --init_from=DIR", {"init_from": ""}),
        (FileNotFoundError, "nowhere: no such checkpoint", {"init_from": "nowhere"}),
        (ValueError, "n_layer.*do not fit: .*blocks.2", {"n_layer": 3}),
        (ValueError, "n_embd.*do not fit", {"n_embd": 64}),
        (ValueError, "do not fit: .*grid", {"pos_encoding": "auto-2d-rope"}),
        (ValueError, "example .* tokens: block_size=40 is too short", {"block_size": 40}),
        (FileNotFoundError, "none.jsonl", {"chats": "none.jsonl"}),
    ],
)
def test_what_cannot_be_finetuned_is_refused(tmp_path, start, error, match, knobs):
    with pytest.raises(error, match=match):
        run(tmp_path / "run", start, **knobs)
    assert not (tmp_path / "run" / "log.jsonl").exists() or not log(tmp_path / "run")


def test_a_copy_model_or_another_tokenizer_is_no_start(tmp_path):
    other = {"name": "bytes", "size": 256, "sha256": "0"}
    with pytest.raises(ValueError, match="has another: size: 256 there, 257 here"):
        run(tmp_path / "run", pretrained(tmp_path, tokenizer=other))
    state = torch.load(tmp_path / "last.pt")
    torch.save(state | {"data": {"vocabulary": []}}, tmp_path / "last.pt")
    with pytest.raises(ValueError, match="not trained on text, it has no tokenizer"):
        run(tmp_path / "run", tmp_path)


@pytest.mark.parametrize("encoding", ["rope", "h-rope"])
def test_a_qwen3_folder_is_finetuned_and_evaluated(tmp_path, hf_folder, encoding):
    state = run(tmp_path / "run", hf_folder, tokenizer=hf_folder, pos_encoding=encoding)
    assert state["config"]["pos_encoding"] == encoding and state["config"]["qk_norm"]
    assert state["data"]["tokenizer"]["size"] < state["config"]["vocab_size"]
    config = EvalConfig((str(tmp_path / "run"),), tasks=("imbalanced",), lengths=(4,), samples=(2,), device="cpu")
    rows = evaluation.copy_ladder(config)
    assert [row["kind"] for row in rows] == list(data_copy.KINDS)
    assert {row["mode"] for row in rows} == {"teacher-forced, a lower bound"}


# Copying in text


@pytest.fixture(scope="module")
def finetuned(tmp_path_factory) -> Path:
    """A model that copies strings of up to 3 symbols, some of them."""
    folder = tmp_path_factory.mktemp("finetuned")
    start = pretrained(folder, "2d-rope")
    run(folder / "run", start, text_max_length=3, template_kind="own-line", batch_size=32, max_steps=150)
    return folder / "run"


def rows(finetuned: Path, **knobs) -> list[dict]:
    knobs = dict(tasks=("imbalanced",), lengths=("1-3", 6), samples=(30, 5), device="cpu") | knobs
    return evaluation.copy_ladder(EvalConfig((str(finetuned),), **knobs))


def test_teacher_forcing_in_text_agrees_with_real_decoding(finetuned):
    forced, free = rows(finetuned), rows(finetuned, free_running=True)
    assert {row["mode"] for row in forced} == {"teacher-forced"} and {row["mode"] for row in free} == {"free-running"}
    assert [row["exact_match"] for row in forced] == [row["exact_match"] for row in free]
    assert 0 < forced[0]["exact_match"] and forced[0]["kind"] == "own-line", "the fixture knows nothing, or all"
    assert [row["trained_to"] for row in forced] == [3] * 6


def test_chunks_batches_and_ranks_do_not_change_the_rows(finetuned, tmp_path):
    timeless = [
        [row | {"seconds": 0, "margin": 0, "margins": 0} for row in some]
        for some in (rows(finetuned), rows(finetuned, chunk=7))
    ]
    assert timeless[0] == timeless[1]
    command = [
        f"--runs={finetuned}",
        "--tasks=imbalanced",
        "--lengths=1-3,6",
        "--samples=30,5",
        f"--out_dir={tmp_path}",
    ]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "eval.py", *command]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "imbalanced, mid-sentence" in done.stdout, done.stderr
    written = json.loads((tmp_path / "accuracy.json").read_text())
    assert [row | {"seconds": 0, "margin": 0, "margins": 0} for row in written] == timeless[0]
    assert (tmp_path / "accuracy.png").exists()


def test_answers_are_scored_as_text_when_decoded(finetuned, monkeypatch):
    model, tokenizer = checkpoint.load_model(checkpoint.read(finetuned / "last.pt")).eval(), load_tokenizer("bytes")
    records = list(data_copy.text_examples(TextCopyConfig(text_min_length=3, text_max_length=3), 4, 0, "evaluation"))
    texts = [record["messages"][1]["content"] for record in records]
    flipped = texts[1][0] + {"0": "1", "1": "0"}[texts[1][1]] + texts[1][2]
    answers = [texts[0], flipped, texts[2] + "1", texts[3][:2]]
    written = [[*answer.encode(), 256, 7, 7, 7, 7][:4] for answer in answers]

    def generate(prompts, n):
        assert n == 4 and prompts == [tokenizer.chat(r["messages"])[0][:-4].tolist() for r in records]
        return iter(torch.tensor(written).T)

    monkeypatch.setattr(model, "generate", generate)
    right, wrong, endless, short = evaluation.judge_text(model, tokenizer, records, True, 512)
    assert (right.targets, right.errors, right.first_error) == (4, 0, None)
    assert (wrong.targets, wrong.errors, wrong.first_error) == (4, 1, 1)
    assert endless.errors == 1 and endless.first_error == 3
    assert short.errors >= 1 and short.first_error == 2


@pytest.mark.parametrize(
    "match, knobs",
    [
        ("tasks: 'copy' is not one of imbalanced, .*, lists", {"tasks": ("copy",)}),
        ("kinds=.*expected some of own-line", {"kinds": ("last",)}),
        ("sequence of [0-9]+ tokens is longer than the model's block_size=400", {"lengths": (300,), "samples": (1,)}),
    ],
)
def test_what_cannot_be_evaluated_is_refused(finetuned, match, knobs):
    with pytest.raises(ValueError, match=match):
        rows(finetuned, **knobs)
