"""commonsense.py against one text at a time, on tasks and data that the test writes: nothing is fetched."""

import functools
import importlib.util
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers

pytest.importorskip("lm_eval", reason="lm_eval, to which commonsense.py adapts our models, is not installed")

import datasets
from lm_eval import tasks as harness
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

import checkpoint
import commonsense
import qwen3
from commonsense import CommonSenseConfig, OurLM
from data_dclm import load_tokenizer
from model import Decoder, ModelConfig

ROOT = Path(__file__).resolve().parent.parent
EOS, ROOM = 256, 64  # of the tokenizer; tokens that the models have room for
SHAPE = dict(n_layer=2, n_embd=32, head_dim=16, mlp_dim=64, block_size=ROOM, init_std=0.3, zero_init_outputs=False)
TOKENIZER = load_tokenizer("bytes")


def decoder(encoding: str) -> Decoder:
    """Of random weights; it writes ASCII, so that what it writes can be an `until`."""
    torch.manual_seed(1)
    newlines = torch.tensor([piece.count(b"\n") for piece in TOKENIZER.token_bytes])
    model = Decoder(ModelConfig(**SHAPE, pos_encoding=encoding, vocab_size=257), newlines).eval()
    model.head.weight.data[128:EOS] = 0
    return model.requires_grad_(False)


@pytest.fixture(scope="module", params=["rope", "2d-rope"])
def model(request) -> Decoder:
    return decoder(request.param)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Checkpoints as pretraining leaves them."""
    out = {encoding: tmp_path_factory.mktemp("runs") / encoding for encoding in ("rope", "2d-rope")}
    for seed, (encoding, path) in enumerate(out.items()):
        path.mkdir()
        model = decoder(encoding)
        about = vars(model.config) | {"task": "pretrain", "tokenizer": "bytes", "seed": seed}
        state = {"model": model.state_dict(), "config": about, "step": 9, "data": {"tokenizer": TOKENIZER.identity}}
        checkpoint.save(state, path / "last.pt")
    return out


def lm(model: Decoder, batch_tokens: int = 300) -> OurLM:
    return OurLM(model, TOKENIZER, batch_tokens)


def requests(*arguments: tuple) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=args) for args in arguments]


def ids(text: str) -> list[int]:
    return [*text.encode()]


def alone(model: Decoder, question: list[int], answer: list[int]) -> tuple[float, bool]:
    """What a forward on this text, and no other, says of the answer; the softmax in float64."""
    tokens = (question + answer)[-ROOM - 1 :]
    log_p = model(torch.tensor([tokens[:-1]]))[0].double().log_softmax(-1)[-len(answer) :]
    return sum(log_p[k, token].item() for k, token in enumerate(answer)), log_p.argmax(-1).tolist() == answer


def rolling(model: Decoder, text: str) -> float:
    """The log-likelihood of a text in lm_eval's windows."""
    windows = get_rolling_token_windows(ids(text), EOS, ROOM, 1)
    return sum(alone(model, *make_disjoint_window(window))[0] for window in windows)


def greedy(model: Decoder, prompt: list[int], n: int) -> list[int]:
    """n tokens, without a cache."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(model(torch.tensor([tokens]))[0, -1].argmax().item())
    return tokens[len(prompt) :]


def random_text(rng: np.random.Generator, n: int) -> str:
    return "".join(rng.choice([*"abcdefg   \n"], n))


def agree(got: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> bool:
    assert [hit for _, hit in got] == [hit for _, hit in expected]
    return [nats for nats, _ in got] == pytest.approx([nats for nats, _ in expected], abs=1e-4)


# Log-likelihoods


@pytest.mark.parametrize("batch_tokens", [1, 300, 100_000])
def test_log_likelihoods_are_those_of_each_text_alone(model, batch_tokens):
    rng = np.random.default_rng(0)
    sizes = [(1, 1), (5, 3), (5, 40), (63, 1), (64, 1), (40, 25), (70, 2), (200, 9), (30, 64), (1, 64)]
    asked = [(None, ids(random_text(rng, q)), ids(random_text(rng, a))) for q, a in sizes for _ in range(2)]
    asked += [(None, asked[2][1], [letter]) for letter in b"ABCD"]  # of one question
    for n in (4, 20, 63):  # what greedy decoding writes, and what it does not
        question = ids(random_text(rng, n))
        written = greedy(model, question, min(9, ROOM - n + 1))
        asked += [(None, question, written), (None, question, [*written[:-1], (written[-1] + 1) % 128])]
    got = lm(model, batch_tokens)._loglikelihood_tokens(asked)
    assert agree(got, [alone(model, question, answer) for _, question, answer in asked])
    assert [hit for _, hit in got[-6:]] == [True, False] * 3


def test_batches_fill_the_room_that_they_have(model):
    items = [([0] * n, n) for n in (3, 9, 4, 30, 1, 2, 8)]
    assert [[n for _, n in batch] for batch in lm(model, 20).batches(items)] == [[30], [9, 8], [4, 3, 2, 1]]
    assert [[n for _, n in batch] for batch in lm(model, 20).batches(items, 2)] == [[30], [9], [8, 4], [3, 2, 1]]


def test_the_answers_to_one_question_share_a_forward(model, monkeypatch):
    seen, hidden = [], model.hidden
    monkeypatch.setattr(model, "hidden", lambda tokens: seen.append(tokens.shape) or hidden(tokens))
    lm(model)._loglikelihood_tokens([(None, ids("question"), [letter]) for letter in b"ABCD"])
    assert seen == [(1, 8)]


def test_texts_are_split_as_lm_eval_splits_them(model):
    pairs = [("ab cd", " ef"), ("ab cd  ", "ef"), ("ü", "ß"), ("", "ef\n"), (" \n", "x")]
    split = [(ids("ab cd"), " ef"), (ids("ab cd"), "  ef"), (ids("ü"), "ß"), ([EOS], "ef\n"), ([EOS], " \nx")]
    expected = [alone(model, question, ids(answer)) for question, answer in split]
    assert agree(lm(model).loglikelihood(requests(*pairs)), expected)


def test_rolling_log_likelihoods_are_those_of_lm_evals_windows(model):
    rng = np.random.default_rng(1)
    texts = ["", *(random_text(rng, n) for n in (1, ROOM - 1, ROOM, ROOM + 1, 3 * ROOM, 3 * ROOM + 17))]
    got = lm(model).loglikelihood_rolling(requests(*((text,) for text in texts)))
    assert got == pytest.approx([rolling(model, text) for text in texts], abs=1e-4)
    assert got[0] == 0 and got[2] == pytest.approx(alone(model, [EOS], ids(texts[2]))[0], abs=1e-4)


@pytest.mark.parametrize("answer", [[], [0] * (ROOM + 1)], ids=len)
def test_answers_without_tokens_and_too_long_ones_are_refused(model, answer):
    with pytest.raises(ValueError, match=f"answer of {len(answer)} tokens: expected 1 to block_size=64"):
        lm(model)._loglikelihood_tokens([(None, [1], answer)])


# Texts


PROMPTS = [random_text(np.random.default_rng(n), n) for n in (1, 30, 7, 7, 12, 3, 50, 0, 90)]


@pytest.fixture
def ending(model):
    """The model, but that it ends its text where it would have written the sixth token after the third prompt."""
    sixth, weight = greedy(model, ids(PROMPTS[2]), 6)[5], model.head.weight.data
    kept = weight[EOS].clone()
    weight[EOS] = weight[sixth] * 1.01
    yield model
    weight[EOS] = kept


@pytest.mark.parametrize("batch_tokens", [1, 150])
def test_texts_end_at_until_at_the_end_of_sequence_or_at_the_limit(ending, batch_tokens):
    most, expected, ends = 16, [], set()
    plain = [greedy(ending, (ids(prompt) or [EOS])[-(ROOM - most) :], most) for prompt in PROMPTS]
    texts = [bytes(tokens[: tokens.index(EOS)] if EOS in tokens else tokens).decode() for tokens in plain]
    until = [max(texts, key=len)[5:7], max(texts, key=len)[9:11], "", "never written"]
    for text in texts:
        cut = min([text.index(stop) for stop in until[:2] if stop in text], default=len(text))
        ends.add("until" if cut < len(text) else "eos" if cut < most else "limit")
        expected.append(text[:cut])
    setting = {"until": until, "max_gen_toks": most, "do_sample": False, "temperature": 0.0}
    got = lm(ending, batch_tokens).generate_until(requests(*((prompt, setting) for prompt in PROMPTS)))
    assert got == expected and ends == {"until", "eos", "limit"}


def test_nothing_is_written_after_the_last_text_has_ended(model, monkeypatch):
    steps, generate, written = [], model.generate, greedy(model, ids("abc"), 10)
    stop = bytes(written[5:7]).decode()

    def counted(*args, **knobs):
        for step in generate(*args, **knobs):
            steps.append(step)
            yield step

    monkeypatch.setattr(model, "generate", counted)
    got = lm(model).generate_until(requests(("abc", {"until": stop, "max_gen_toks": 60})))
    assert got == [bytes(written).decode().split(stop)[0]] and len(steps) == 7


def test_sampling_is_by_temperature_and_top_p_and_greedy_without_do_sample(model):
    def texts(n: int, **setting) -> list[str]:
        setting = {"until": [], "max_gen_toks": 12} | setting
        return lm(model).generate_until(requests(*[("ab", setting)] * n))

    plain = texts(1)
    assert plain == [bytes(greedy(model, ids("ab"), 12)).decode()]
    assert texts(1, do_sample=False, temperature=2.0) == texts(1, do_sample=True, temperature=0.0) == plain
    assert texts(1, do_sample=True, temperature=1e-4) == texts(1, do_sample=True, top_p=1e-6) == plain
    assert texts(1, do_sample=True, top_k=1) == texts(1, temperature=1e-4) == plain
    drawn = texts(42, do_sample=True)  # in two batches of 21
    assert len(set(drawn)) == 42 and drawn == texts(42, do_sample=True, temperature=1.0)


def test_requests_with_other_settings_keep_their_places(model):
    asked = [
        ("ab", {"max_gen_toks": 3}),
        ("b", {"max_gen_toks": 3}),
        ("ab", {"max_gen_toks": 5}),
        ("b", {"until": "\n"}),
    ]
    got = lm(model).generate_until(requests(*((text, {"max_gen_toks": 4} | setting) for text, setting in asked)))
    ab, b = (bytes(greedy(model, ids(prompt), 5)).decode() for prompt in ("ab", "b"))
    assert got == [ab[:3], b[:3], ab, b[:4].split("\n")[0]]


@pytest.mark.parametrize(
    "setting, match",
    [
        ({"num_beams": 4}, "generation_kwargs: num_beams is not known here"),
        ({"max_gen_toks": 65}, "prompt of 1 tokens and 65 new ones exceed block_size=64"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(model, setting, match):
    with pytest.raises(ValueError, match=match):
        lm(model).generate_until(requests(("ab", {"until": []} | setting)))


# Tasks

N = 12  # questions
TASK = """
task: {name}
tag: {tag}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl, train: {folder}/{shots}.jsonl}}, cache_dir: {folder}}}
test_split: test
doc_to_text: "{{{{question}}}}"
"""
CHOICE = f"""{TASK}
output_type: multiple_choice
fewshot_split: train
fewshot_config: {{{{sampler: first_n}}}}
doc_to_choice: choices
doc_to_target: gold
metric_list: [{{{{metric: acc}}}}, {{{{metric: acc_norm}}}}]
"""
LAST_WORD = f"""{TASK}
output_type: loglikelihood
doc_to_target: word
metric_list: [{{{{metric: perplexity, aggregation: perplexity}}}}, {{{{metric: acc, aggregation: mean}}}}]
"""
WHOLE = f"""{TASK}
output_type: loglikelihood_rolling
doc_to_target: text
metric_list: [{{{{metric: bits_per_byte}}}}]
"""
WRITE = f"""{TASK}
output_type: generate_until
doc_to_target: answer
generation_kwargs: {{{{until: ["a"], max_gen_toks: 8}}}}
metric_list: [{{{{metric: exact_match, aggregation: mean}}}}]
"""
YAMLS = {"choice": CHOICE, "hellaswag": CHOICE, "last_word": LAST_WORD, "whole": WHOLE, "write": WRITE}
GROUPS = {"both": "aggregate_metric_list: [{metric: acc, weight_by_size: true}]", "loose": ""}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Task YAMLs, and questions in jsonl files, of which RoPE's model knows some."""
    folder, rng, rope = tmp_path_factory.mktemp("tasks"), np.random.default_rng(5), decoder("rope")
    docs = {name: [] for name in (*YAMLS, "shots")}
    for i in range(N):
        for name in ("choice", "hellaswag", "shots"):
            choices = [random_text(rng, n).strip() + "." for n in rng.integers(1, 9, 3)]
            question = random_text(rng, 20 + 5 * i).strip() + "?"
            docs[name].append({"question": question, "choices": choices, "gold": int(rng.integers(3))})
        question = random_text(rng, 10 + i).strip() + ":"
        written = bytes(greedy(rope, ids(question), 8)).decode()
        docs["last_word"].append({"question": question, "word": written[:3] if i % 3 else "abc"})
        docs["write"].append({"question": question, "answer": written.split("a")[0] if i % 2 else "b"})
        docs["whole"].append({"question": "", "text": random_text(rng, 12 * i + 1).strip() + "."})
    for name, lines in docs.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, yaml in YAMLS.items():
        tag, shots = ("tagged", "shots") if yaml == CHOICE else ("other", name)
        (folder / f"{name}.yaml").write_text(yaml.format(name=name, tag=tag, shots=shots, folder=folder))
    for name, metrics in GROUPS.items():
        (folder / f"{name}.yaml").write_text(f"group: {name}\ntask: [choice, hellaswag]\n{metrics}\n")
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Without the seconds that lm_eval needs to find its 14,000 tasks, and torch to describe the machine."""
    monkeypatch.setattr(commonsense, "TaskManager", functools.partial(harness.TaskManager, include_defaults=False))
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", str)


def config(runs: list[Path], folder: Path | None, **changes) -> CommonSenseConfig:
    values = dict(include_path=folder and str(folder), device="cpu", batch_tokens=200)
    return CommonSenseConfig(runs=tuple(map(str, runs)), **values | changes)


def read(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def choose(model: Decoder, docs: list[tuple[list[str], list[str], int]]) -> tuple[float, float]:
    """acc and acc_norm on (questions, answers, the right one's number); a question for each answer."""
    hits = []
    for questions, answers, gold in docs:
        nats = [alone(model, ids(q), ids(f" {a}"))[0] for q, a in zip(questions, answers, strict=True)]
        by_length = [x / len(a) for x, a in zip(nats, answers, strict=True)]
        hits.append((np.argmax(nats) == gold, np.argmax(by_length) == gold))
    return tuple(np.mean(hits, axis=0).tolist())


def by_hand(folder: Path, model: Decoder, shots: str = "", limit: int = N) -> dict[str, float]:
    """The tasks' results from one text at a time."""
    found = {}
    for name in ("choice", "hellaswag"):
        docs = read(folder, name)[:limit]
        acc, acc_norm = choose(model, [([shots + d["question"]] * 3, d["choices"], d["gold"]) for d in docs])
        found |= {name: acc if name == "choice" else acc_norm, f"{name} acc": acc, f"{name} acc_norm": acc_norm}
    words = [alone(model, ids(doc["question"]), ids(doc["word"])) for doc in read(folder, "last_word")]
    found["last_word"] = np.mean([hit for _, hit in words])
    found["perplexity"] = math.exp(-np.mean([nats for nats, _ in words]))
    texts = [doc["text"] for doc in read(folder, "whole")]
    found["whole"] = -sum(rolling(model, text) for text in texts) / math.log(2) / len("".join(texts))
    docs = read(folder, "write")
    written = [bytes(greedy(model, ids(doc["question"]), 8)).decode().split("a")[0] for doc in docs]
    return found | {"write": np.mean([text == doc["answer"] for text, doc in zip(written, docs, strict=True)])}


def test_the_command_line_writes_what_one_computes_by_hand(tmp_path, runs, folder, monkeypatch, capsys):
    tasks = ("choice", "hellaswag", "last_word", "write", "whole")
    flags = [f"--runs={runs['rope']},{runs['2d-rope']}/last.pt", f"--tasks={','.join(tasks)}", "--device=cpu"]
    flags += [f"--include_path={folder}", f"--out_dir={tmp_path}/out", "--batch_tokens=200"]
    monkeypatch.setattr(sys, "argv", ["commonsense.py", *flags])
    commonsense.main()
    rows = json.loads((tmp_path / "out" / "commonsense.json").read_text())
    assert [row["task"] for row in rows] == [*tasks] * 2 and {row["samples"] for row in rows} == {N}
    for seed, (encoding, run) in enumerate(runs.items()):
        own = {row["task"]: row for row in rows if row["pos_encoding"] == encoding}
        assert {row["run"] for row in own.values()} == {str(run) if seed == 0 else f"{run}/last.pt"}
        assert {(row["seed"], row["step"]) for row in own.values()} == {(seed, 9)}
        metrics = {"choice": "acc", "hellaswag": "acc_norm", "last_word": "acc", "write": "exact_match"}
        assert {task: row["metric"] for task, row in own.items()} == metrics | {"whole": "bits_per_byte"}
        expected = by_hand(folder, decoder(encoding))
        assert {task: row["value"] for task, row in own.items()} == pytest.approx({t: expected[t] for t in tasks})
        assert own["choice"]["all"] == {
            f"{m},none": pytest.approx(expected[f"choice {m}"]) for m in ("acc", "acc_norm")
        }
        assert own["last_word"]["all"]["perplexity,none"] == pytest.approx(expected["perplexity"], rel=1e-4)
        p = expected["choice"]
        assert own["choice"]["stderr"] == pytest.approx(math.sqrt(p * (1 - p) / (N - 1))) and not own["whole"]["stderr"]
    assert 0 < rows[2]["value"] < 1 and 0 < rows[3]["value"] < 1  # RoPE's model knows some
    printed = capsys.readouterr().out.splitlines()
    assert printed[-4].split() == list(tasks) and printed[-1] == f"rows: {tmp_path}/out/commonsense.json"
    for line, own in zip(printed[-3:-1], (rows[:5], rows[5:]), strict=True):
        run, *cells, bits = line.replace(" ± ", "±").split()
        assert run == own[0]["run"] and bits == f"{own[4]['value']:.4g}"
        assert cells == [f"{100 * r['value']:.1f}±{196 * r['stderr']:.1f}" for r in own[:4]]


def test_a_mean_is_over_all_tasks_and_a_group_is_one_of_them(runs, folder):
    both, word, mean = commonsense.common_sense(config([runs["2d-rope"]], folder, tasks=("both", "last_word")))
    expected = by_hand(folder, decoder("2d-rope"))
    assert both["value"] == pytest.approx((expected["choice acc"] + expected["hellaswag acc"]) / 2)
    assert (both["task"], both["metric"], both["samples"]) == ("both", "acc", 2 * N)
    assert (mean["task"], mean["metric"], mean["samples"]) == ("mean", "acc", 3 * N)
    assert mean["value"] == pytest.approx((both["value"] + word["value"]) / 2)
    assert mean["stderr"] == pytest.approx(math.sqrt(both["stderr"] ** 2 + word["stderr"] ** 2) / 2)


@pytest.mark.parametrize("name", ["tagged", "loose"])
def test_a_tag_and_a_group_without_a_metric_are_their_tasks(runs, folder, name):
    rows = commonsense.common_sense(config([runs["rope"]], folder, tasks=(name,), limit=1))
    assert [row["task"] for row in rows] == ["choice", "hellaswag", "mean"]


def test_shots_come_before_the_question_and_limit_takes_the_first(runs, folder):
    row, _ = commonsense.common_sense(config([runs["rope"]], folder, tasks=("choice",), num_fewshot=1, limit=7))
    shot = read(folder, "shots")[0]
    shot = f"{shot['question']} {shot['choices'][shot['gold']]}\n\n"
    expected = by_hand(folder, decoder("rope"), shot, 7)
    assert row["samples"] == 7
    assert row["all"] == pytest.approx({f"{m},none": expected[f"choice {m}"] for m in ("acc", "acc_norm")})


def test_one_run_twice_gives_the_same_rows(runs, folder):
    asked = config([runs["rope"]] * 2, folder, tasks=("choice", "write"), num_fewshot=2, limit=4)
    rows = commonsense.common_sense(asked)
    assert len(rows) == 6 and rows[:3] == rows[3:]


def test_the_eight_tasks_are_lm_evals(runs, monkeypatch):
    rng, n, model = np.random.default_rng(7), 20, decoder("2d-rope")
    texts = [[random_text(rng, k).replace("  ", "x").strip() + "." for k in rng.integers(2, 15, n)] for _ in range(6)]
    a, b, c, d, e, f = texts
    four, gold = [list(x) for x in zip(a, b, c, d, strict=True)], rng.integers(2, size=n).tolist()
    labels = [{"text": x, "label": [*"ABCD"]} for x in four]
    gaps = [f"{x} _ {y}" for x, y in zip(e, f, strict=True)]
    data = {  # columns as on the hub
        "allenai/ai2_arc": {"question": e, "choices": labels, "answerKey": ["AB"[g] for g in gold]},
        "Rowan/hellaswag": {"ctx_a": e, "ctx_b": f, "activity_label": a, "endings": four, "label": [*map(str, gold)]},
        "allenai/winogrande": {"sentence": gaps, "option1": a, "option2": b, "answer": [str(g + 1) for g in gold]},
        "cais/mmlu": {"question": e[:1], "choices": four[:1], "answer": gold[:1]},
        "EleutherAI/lambada_openai": {"text": [f"{x} {y[:1]}" for x, y in zip(e, f, strict=True)]},
        "baber/piqa": {"goal": e, "sol1": a, "sol2": b, "label": gold},
        "aps/super_glue": {"passage": e, "question": f, "label": gold},
    }
    data = {path: datasets.Dataset.from_dict(columns) for path, columns in data.items()}
    splits = ("train", "validation", "test", "dev")
    monkeypatch.setattr(datasets, "load_dataset", lambda path, **_: dict.fromkeys(splits, data[path]))
    root, finder = Path(harness.__file__).parent, commonsense.TaskManager
    homes = [root / name for name in "arc hellaswag winogrande mmlu/default lambada piqa super_glue".split()]
    monkeypatch.setattr(commonsense, "TaskManager", lambda include_path: finder(include_path=homes))

    *rows, mean = commonsense.common_sense(config([runs["2d-rope"]], None))
    found = {row["task"]: row for row in rows}
    assert tuple(found) == commonsense.EIGHT and (mean["task"], mean["samples"]) == ("mean", 7 * n + 57)
    assert mean["value"] == pytest.approx(np.mean([row["value"] for row in rows]))
    assert {task: row["samples"] for task, row in found.items()} == dict.fromkeys(found, n) | {"mmlu": 57}
    assert [task for task, row in found.items() if row["metric"] != "acc"] == ["arc_challenge", "hellaswag"]

    def judged(questions: list[list[str]], answers: list[list[str]]) -> tuple[float, float]:
        return choose(model, list(zip(questions, answers, gold, strict=True)))

    two, ask = [list(x) for x in zip(a, b, strict=True)], [[f"Question: {x}\nAnswer:"] for x in e]
    arc, piqa = judged([x * 4 for x in ask], four), judged([x * 2 for x in ask], two)
    hellaswag = judged([[f"{z}: {x} {y.capitalize()}"] * 4 for x, y, z in zip(e, f, a, strict=True)], four)
    winogrande = judged([[f"{x} {z}" for z in both] for x, both in zip(e, two, strict=True)], [[y] * 2 for y in f])
    boolq = judged([[f"{x}\nQuestion: {y}?\nAnswer:"] * 2 for x, y in zip(e, f, strict=True)], [["no", "yes"]] * n)
    letters = "".join(f"\n{letter}. {x}" for letter, x in zip("ABCD", four[0], strict=True))
    mmlu = choose(model, [([f"{e[0]}{letters}\nAnswer:"] * 4, [*"ABCD"], gold[0])])
    lambada = np.mean([alone(model, ids(x), ids(f" {y[:1]}"))[1] for x, y in zip(e, f, strict=True)])
    expected = [arc[0], arc[1], hellaswag[1], winogrande[0], mmlu[0], lambada, piqa[0], boolq[0]]
    assert [row["value"] for row in rows] == pytest.approx(expected)


def test_a_folder_of_qwen3_is_evaluated_with_its_own_tokenizer(tmp_path, folder):
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = tokenizers.Tokenizer(models.BPE(letters, []))
    split = pre_tokenizers.Split(tokenizers.Regex(r"\s+|\S+"), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    torch.manual_seed(0)
    model = Decoder(ModelConfig(**SHAPE, pos_encoding="rope", qk_norm=True, vocab_size=300), torch.zeros(300))
    model.head.weight.data[260:] *= 9  # ids that the tokenizer does not have
    qwen3.save(model, tmp_path)
    words, texts = commonsense.common_sense(config([tmp_path], folder, tasks=("last_word", "write")))[:2]
    assert [(row["pos_encoding"], row["seed"], row["step"]) for row in (words, texts)] == [("rope", None, None)] * 2
    encode, docs = load_tokenizer(str(tmp_path)).encode, read(folder, "last_word")
    nats = [alone(model, encode(doc["question"]).tolist(), encode(doc["word"]).tolist())[0] for doc in docs]
    assert words["all"]["perplexity,none"] == pytest.approx(math.exp(-np.mean(nats)), rel=1e-4)


# Refusals


@pytest.mark.parametrize(
    "error, match, changes",
    [
        (ValueError, "give --runs=DIR", {"runs": ()}),
        (ValueError, "at least one of tasks", {"tasks": ()}),
        (ValueError, "num_fewshot=-1: expected at least 0", {"num_fewshot": -1}),
        (ValueError, "limit=0: expected at least 1", {"limit": 0}),
        (ValueError, "batch_tokens=0: expected at least 1", {"batch_tokens": 0}),
        (FileNotFoundError, "include_path='nowhere': no such folder", {"include_path": "nowhere"}),
        (ValueError, "'last_wrod' is none of .* the nearest are last_word", {"tasks": ("choice", "last_wrod")}),
        (FileNotFoundError, "no such checkpoint", {"runs": ("nowhere",)}),
        (FileNotFoundError, "best.pt: no such checkpoint", {"checkpoint": "best"}),
        (ValueError, "tokenizer='gpt2': .* has another", {"tokenizer": "gpt2"}),
    ],
)
def test_what_cannot_be_evaluated_is_refused(runs, folder, monkeypatch, error, match, changes):
    other = SimpleNamespace(name="gpt2", identity={"name": "gpt2", "size": 50_257, "sha256": "0"})
    monkeypatch.setattr("eval.load_tokenizer", lambda name: other if name == "gpt2" else load_tokenizer(name))
    values = dict(runs=(str(runs["rope"]),), include_path=str(folder), tasks=("choice",), device="cpu") | changes
    with pytest.raises(error, match=match):
        commonsense.common_sense(CommonSenseConfig(**values))


def test_a_run_that_was_not_trained_on_text_is_refused(tmp_path, runs, folder):
    state = torch.load(runs["rope"] / "last.pt")
    checkpoint.save(state | {"data": {}}, tmp_path / "last.pt")
    with pytest.raises(ValueError, match="not trained on text, it has no tokenizer"):
        commonsense.common_sense(config([runs["rope"], tmp_path], folder, tasks=("choice",)))


def test_data_that_cannot_be_fetched_is_named(runs, folder, monkeypatch):
    def load_dataset(path, **_):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        RuntimeError, match="no data for task choice .*Couldn't reach the Hub.* point HF_HOME at a cache"
    ):
        commonsense.common_sense(config([runs["rope"]], folder, tasks=("choice",)))


def test_without_lm_eval_the_file_can_be_imported_and_says_what_to_install(runs, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    spec = importlib.util.spec_from_file_location("without_lm_eval", ROOT / "commonsense.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "without_lm_eval", module)
    spec.loader.exec_module(module)
    pin = next(line for line in (ROOT / "requirements-dev.txt").read_text().splitlines() if line.startswith("lm_eval"))
    with pytest.raises(ValueError, match=f"pip install {pin}$"):
        module.common_sense(module.CommonSenseConfig(runs=(str(runs["rope"]),)))
    assert f"pip install {pin}\n" in commonsense.__doc__
