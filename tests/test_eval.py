"""eval.py: verdicts against plain forwards and real decoding; reports on copies and on text; refusals; memory."""

import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import of_task, on_two_ranks, run
from test_theory import copier

import checkpoint
import configurator
import data_copy
import data_text
import eval as evaluation
import plots
import rope2d
import train
from data_copy import NEWLINE, STAR
from data_dclm import Corpus
from data_text import TextCopyConfig, text_examples
from eval import Cell, EvalConfig, Verdict, copy_accuracy, free_running, judge_text, row_of, teacher_forced
from model import Decoder
from tokenizer import load_tokenizer

BYTES = load_tokenizer("bytes")
NORMS = {"rope": 4.0, "alibi": 0.0, "2d-rope": 0.9, "auto-2d-rope": 0.9, "h-rope": 0.9}  # they are half right


def text_copier() -> Decoder:
    """Copies strings of x and y that stand in a line of their own, or first in the prompt; short ones."""
    writes = {token: token for token in (*b"xy", 10)} | {10: BYTES.eos, 32: BYTES.eos}  # what ends a source
    return copier(0.9, line_offset=(0, -1, 0), token_bytes=BYTES.token_bytes, writes=writes)


def save(path: Path, model: Decoder, **knobs) -> str:
    """A run as train.py leaves it."""
    about = {name: value for part in train.CONFIGS for name, value in asdict(part()).items()}
    about |= asdict(model.config) | {"seed": 3, "max_length": 6} | knobs
    data = {"tokenizer": BYTES.fingerprint} if "tokenizer" in knobs else {"vocabulary": data_copy.VOCAB}
    checkpoint.save({"model": model.state_dict(), "config": about, "step": 80, "data": data}, path / "last.pt")
    return str(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, str]:
    """Runs that are right on short strings, wrong on long ones; the last two are of text."""
    folder = tmp_path_factory.mktemp("runs")
    in_text = dict(task="finetune", tokenizer="bytes", symbols=("x", "y"), text_max_length=7)
    return {
        "2d-rope": save(folder / "2d-rope", copier(0.85)),
        "rope": save(folder / "rope", copier(4.0, "rope"), block_size=45),
        "auto": save(folder / "auto", copier(0.85, "auto-2d-rope", STAR), separator="*"),
        "text": save(folder / "text", text_copier(), **in_text),
        "pretrained": save(folder / "pretrained", text_copier(), **in_text | {"task": "pretrain"}),
    }


def strings(n: int = 8) -> list[np.ndarray]:
    bounds = (("uniform", 1, 6), ("imbalanced", 1, 6), ("uniform", 1, 40), ("imbalanced", 1, 40), ("uniform", 3, 3))
    return [source for task, low, high in bounds for source in data_copy.evaluation_strings(task, low, high, n, 0)]


@pytest.fixture(scope="module", params=NORMS)
def model(request) -> Decoder:
    return copier(NORMS[request.param], request.param)


def flags(*runs: str, **changes) -> list[str]:
    values = dict(tasks="uniform,imbalanced", lengths="3,4-20", samples="10,7", device="cpu", runs=",".join(runs))
    return [f"--{name}={value}" for name, value in (values | changes).items()]


def rows_of(*runs: str, **changes) -> list[dict]:
    return copy_accuracy(configurator.configure(EvalConfig, argv=flags(*runs, **changes)))


def without(rows: list[dict], *names: str) -> list[dict]:
    return [{k: v for k, v in row.items() if k not in ("seconds", *names)} for row in rows]


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
    assert all(math.isnan(v.margin) for v in free)
    assert len({v.first_error for v in forced}) > 4  # or the agreement would say little


@pytest.mark.parametrize("task, offset", [("select", 0), ("middle", 1), ("multiline", 1), ("twice", 1)])
@pytest.mark.parametrize("separator", [NEWLINE, STAR])
def test_copies_at_other_places_get_the_verdicts_of_plain_forwards_and_of_real_decoding(task, offset, separator):
    model = copier(4.0, "2d-rope" if separator == NEWLINE else "auto-2d-rope", separator, (0, -2, offset))
    sources = data_copy.evaluation_strings(task, 1, 9, 20, 0)
    forced, free = (judge(model, sources, separator, task=task) for judge in (teacher_forced, free_running))
    assert [v[:1] + v[2:3] for v in forced] == [v[:1] + v[2:3] for v in free]
    assert len({v.first_error for v in forced}) > 2
    for source, got in zip(sources, forced, strict=True):
        prompt, answer = data_copy.lay_out(source, separator, task)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]]))[0, len(prompt) - 1 : -1]
        wrong = (logits.argmax(1) != torch.from_numpy(answer)).nonzero()[:, 0].tolist()
        assert got[:3] == (len(answer), len(wrong), wrong[0] if wrong else None)


@pytest.mark.parametrize("fill, margin", [(math.nan, math.nan), (0.0, 0.0)])
def test_a_tie_and_a_model_of_nan_are_wrong_everywhere(fill, margin):
    model = copier(4.0)
    model.head.weight.data.fill_(fill)
    (got,) = teacher_forced(model, [np.zeros(5, np.int64)], NEWLINE)
    assert got[:3] == (6, 6, 0) and got.margin == pytest.approx(margin, nan_ok=True)


@pytest.mark.parametrize("decode", [teacher_forced, free_running])
def test_the_longest_string_that_fits_is_evaluated_and_one_more_token_refused(decode):
    model = copier(4.0)
    model.config.block_size = 45  # 2 x 20 + 5
    assert decode(model, [np.zeros(20, np.int64)], NEWLINE)[0].targets == 21
    with pytest.raises(ValueError, match="longer than the model's block_size=45"):
        decode(model, [np.zeros(21, np.int64)], NEWLINE)


def test_a_prompt_goes_through_in_chunks_and_logits_are_made_at_targets_alone(monkeypatch):
    model, widths, rows, hidden = copier(4.0), [], [], Decoder.hidden
    model.head.register_forward_hook(lambda head, args, logits: rows.append(logits.numel() // logits.shape[-1]))

    def spy(model, tokens, cache, keys_only):
        widths.append((tokens.shape[1], keys_only))
        return hidden(model, tokens, cache, keys_only=keys_only)

    monkeypatch.setattr(Decoder, "hidden", spy)
    (got,) = teacher_forced(model, data_copy.evaluation_strings("uniform", 375, 375, 1, 0), NEWLINE, chunk=64)
    assert widths == [(64, True)] * 5 + [(64, False)] * 6 + [(51, False)]  # the first target is at 379
    assert sum(rows) == 376 and got.errors == 0


@pytest.mark.parametrize("dtype, wrong", [(torch.float64, False), (torch.float32, False), (torch.bfloat16, True)])
def test_rounded_angles(dtype, wrong):
    freqs = torch.stack([rope2d.frequencies("uniform", 32, 1.0, seed) for seed in (0, 1)]).to(dtype)  # rows, columns

    def rounded(rotary, args, exact):
        angles = (args[0][1:3].movedim(0, -1)[..., None].to(dtype) * freqs).flatten(-2).float()  # (B, T, D/2)
        return angles.cos(), angles.sin()

    model = copier(4.0)
    short, long = (data_copy.evaluation_strings("uniform", n, n, 2, 0) for n in (20, 640))
    assert [v.errors for v in teacher_forced(model, short + long, NEWLINE)] == [0] * 4
    model.rotary["2d-rope"].register_forward_hook(rounded)
    assert [v.errors for v in teacher_forced(model, short, NEWLINE)] == [0, 0]
    assert [v.errors > 64 for v in teacher_forced(model, long, NEWLINE)] == [wrong, wrong]


def test_a_row_counts_its_strings():
    made = [(5, 0, None, 0.5, 4), (5, 3, 1, -2.0, 3), (5, 1, 4, -0.25, 4), (9, 2, 0, -1.0, 0)]
    made = [Verdict(*facts) for facts in made]
    row = row_of(Cell("uniform", None, 0.9, 4, 8, 4), "teacher-forced", made)
    wanted = dict(task="uniform", kind=None, repeat_p=None, mode="teacher-forced", length=8, min_length=4, samples=4)
    wanted |= dict(exact_match=0.25, token_error=6 / 24, only_closing_wrong=0.25, first_errors=[None, 1, 4, 0])
    wanted |= dict(lines_right=None, similarity=None, margin=-2.0, margins=[[0.5, 4], [-2.0, 3], [-0.25, 4], [-1.0, 0]])
    low, high = plots.wilson(1, 4)
    assert row == wanted | dict(exact_match_low=low, exact_match_high=high)
    made = [v._replace(margin=math.nan) for v in made]
    row = row_of(Cell("repeat-structure", "first", 0.9, 4, 8, 4), "free-running", made)
    assert (row["kind"], row["repeat_p"], row["margin"], row["margins"]) == ("first", 0.9, None, None)


@pytest.mark.parametrize("name, separator", [("2d-rope", NEWLINE), ("auto", STAR)])
def test_rows_are_of_the_evaluation_strings_of_their_seed_in_the_runs_own_separator(runs, name, separator):
    how = dict(tasks="repeat-structure,uniform", repeat_p="0.5,1", eval_seed=5)
    rows, free = rows_of(runs[name], **how), rows_of(runs[name], **how, free_running=True)
    model, _ = checkpoint.load_run(runs[name])
    wanted = []
    for task, p in (("repeat-structure", 0.5), ("repeat-structure", 1.0), ("uniform", None)):
        for low, high, n in ((3, 3, 10), (4, 20, 7)):
            drawn = data_copy.evaluation_strings(task, low, high, n, 5, p or 0.9)
            errors = [v.first_error for v in teacher_forced(model, drawn, separator)]
            wanted.append([task, p, low, high, n, errors])
    shown = "task", "repeat_p", "min_length", "length", "samples", "first_errors"
    assert wanted == [[row[k] for k in shown] for row in rows] == [[row[k] for k in shown] for row in free]
    assert 0 < rows[-1]["exact_match"] < rows[-2]["exact_match"] == 1
    about = dict(run=runs[name], seed=3, step=80, trained_to=6, dtype="float32", mode="teacher-forced")
    assert all({key: row[key] for key in about} == about and row["seconds"] >= 0 for row in rows)


def test_strings_go_through_the_model_together_up_to_batch_tokens(runs, monkeypatch):
    groups, judge = [], evaluation.judge
    monkeypatch.setattr(evaluation, "judge", lambda model, x, *rest: groups.append(x.shape) or judge(model, x, *rest))
    how = dict(tasks="uniform", lengths="4-20", samples=20)
    whole, small = rows_of(runs["2d-rope"], **how), rows_of(runs["2d-rope"], **how, batch_tokens=140, chunk=5)
    assert [n for n, _ in groups] == [20] + [3] * 6 + [2]  # 3 x 45, the longest string's tokens; shortest first
    assert [T for _, T in groups[1:]] == sorted(T for _, T in groups[1:])
    assert without(whole, "margin", "margins") == without(small, "margin", "margins")
    groups.clear()
    rows_of(runs["text"], tasks="lists", kinds="first", lengths=9, samples=6, batch_tokens=600)
    assert groups and all(n * T <= 600 and n < 6 for n, T in groups)  # 9 points are some 200 bytes


def test_a_run_stops_where_it_is_told(runs):
    how = dict(lengths="3,4-20,40,41", samples="10,7,2,2")
    whole = rows_of(runs["2d-rope"], **how)
    shares = [[row["exact_match"] for row in whole[start : start + 4]] for start in (0, 4)]
    assert all(first == 1 and 0 < second < 1 and rest == [0, 0] for first, second, *rest in shares), shares
    for stop, n in (("never", 4), ("failure", 2), ("zero", 3)):  # of each task
        assert without(rows_of(runs["2d-rope"], stop=stop, **how)) == without(whole[:n] + whole[4 : 4 + n])


@pytest.mark.parametrize("task", data_copy.PLACES)
def test_block_size_and_batch_tokens_hold_for_all_that_the_model_sees_of_a_copy_at_another_place(
    runs, task, monkeypatch
):
    shapes, judge, longest = [], evaluation.judge, data_copy.longest(task, 6)
    monkeypatch.setattr(evaluation, "judge", lambda model, x, *rest: shapes.append(x.shape) or judge(model, x, *rest))
    how = dict(tasks=task, lengths=6, samples=30, batch_tokens=3 * longest)
    (row,) = rows_of(runs["rope"], block_size=longest, **how)
    assert row["samples"] == 30 and [n for n, _ in shapes] == [3] * 10 and max(shapes)[1] == longest
    (decoded,) = rows_of(runs["rope"], block_size=longest, **how, free_running=True)
    assert decoded["first_errors"] == row["first_errors"]
    with pytest.raises(ValueError, match=f"{longest} tokens is longer than the model's block_size={longest - 1}"):
        rows_of(runs["rope"], block_size=longest - 1, **how)


def test_dtype_checkpoint_block_size_and_free_running_are_as_asked(runs, tmp_path):
    how = dict(tasks="uniform", samples=20)
    (a, b), (rough, _) = (rows_of(runs["2d-rope"], dtype=dtype, **how) for dtype in ("float32", "bfloat16"))
    assert rough["dtype"] == "bfloat16" and 1e-6 < abs(rough["margin"] - a["margin"]) < 0.1
    for name, kept in (("last", "rope"), ("best", "2d-rope")):
        (tmp_path / f"{name}.pt").write_bytes(Path(runs[kept], "last.pt").read_bytes())
        assert rows_of(str(tmp_path), checkpoint=name)[0]["pos_encoding"] == kept
    free = rows_of(runs["2d-rope"], free_running=True, **how)
    same = "run", "task", "length", "samples", "exact_match", "first_errors", "only_closing_wrong"
    assert [[row[k] for k in same] for row in free] == [[row[k] for k in same] for row in (a, b)]
    assert {row["mode"] for row in free} == {"free-running"} and 0 < b["exact_match"] < 1
    with pytest.raises(ValueError, match="47 tokens is longer than the model's block_size=45"):
        rows_of(runs["rope"], lengths=21, samples=1)
    assert len(rows_of(runs["rope"], lengths=21, samples=1, block_size=47)) == 2


def script(rank: int, argv: list[str]) -> None:
    sys.argv = ["eval.py", *argv]
    configurator.run_cli(evaluation.main)


def watched_script(rank: int, argv: list[str], folder: Path) -> None:
    judge, n = evaluation.judge, []
    evaluation.judge = lambda model, inputs, *rest: n.append(len(inputs)) or judge(model, inputs, *rest)
    script(rank, argv)
    (folder / f"judged{rank}").write_text(str(sum(n)))


def test_two_ranks_share_the_strings_and_write_the_rows_of_one(runs, tmp_path):
    asked = dict(tasks="uniform", samples="5,1", kinds="own-line")
    argv = flags(runs["2d-rope"], runs["text"], **asked, out_dir=tmp_path)
    assert on_two_ranks(watched_script, argv, tmp_path) == [0, 0]
    assert [(tmp_path / f"judged{rank}").read_text() for rank in (0, 1)] == ["8", "4"]
    one, two = rows_of(runs["2d-rope"], runs["text"], **asked), json.loads((tmp_path / "accuracy.json").read_text())
    assert without(two, "margin", "margins") == without(one, "margin", "margins")
    assert [r["margin"] for r in two] == pytest.approx([r["margin"] for r in one], abs=1e-4)


def test_the_script_prints_the_table_and_writes_rows_before_the_plot(runs, tmp_path, monkeypatch, capsys):
    rows, drawn = rows_of(runs["2d-rope"], runs["rope"]), []
    argv = flags(runs["2d-rope"], runs["rope"], out_dir=tmp_path)

    def draw(given, path):
        drawn.append((without(given), path))
        assert without(json.loads((tmp_path / "accuracy.json").read_text())) == without(given)

    monkeypatch.setattr(plots, "plot", draw)
    monkeypatch.setitem(sys.modules, "tiktoken", None)  # which copies of tokens do without
    script(0, argv)
    assert drawn == [(without(rows), tmp_path / "accuracy.png")] and plots.table(rows) in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(evaluation, "copy_accuracy", lambda _: pytest.fail("worked first"))
    with pytest.raises(SystemExit):
        script(0, argv)
    assert "need matplotlib: pip install matplotlib, or give --plot=False" in capsys.readouterr().err
    monkeypatch.setattr(evaluation, "copy_accuracy", lambda _: rows)
    script(0, [*argv, "--plot=False"])
    assert len(drawn) == 1


def test_rows_of_text_are_of_its_own_symbols_kinds_and_evaluation_stream(runs, monkeypatch):
    model, trained = checkpoint.load_run(runs["text"])
    how = dict(tasks="imbalanced", lengths="1-9,30", samples="20,4", eval_seed=5)
    rows, wanted = rows_of(runs["text"], **how), []
    for kind in data_text.KINDS:
        for low, high, n in ((1, 9, 20), (30, 30, 4)):
            config = TextCopyConfig("imbalanced", ("x", "y"), kind, low, high)
            records = list(text_examples(config, n, 5, "evaluation"))
            wanted.append((kind, high, [v.first_error for v in judge_text(model, BYTES, records, False, 512)]))
    assert [(row["kind"], row["length"], row["first_errors"]) for row in rows] == wanted
    assert rows[0]["exact_match"] > rows[2]["exact_match"] > 0 == rows[4]["exact_match"]
    assert {(row["mode"], row["trained_to"]) for row in rows} == {("teacher-forced", 7)}
    free = rows_of(runs["text"], **how, free_running=True)
    assert [row["exact_match"] for row in free] == [row["exact_match"] for row in rows]
    bound = "teacher-forced, a lower bound"  # other tokens may be as right
    assert rows_of(runs["text"], **how | {"tasks": "lists"})[0]["mode"] == bound
    monkeypatch.setattr(load_tokenizer("bytes"), "name", "other")
    assert rows_of(runs["text"], **how)[0]["mode"] == bound
    for task, longest in (("lists", 150), ("uniform", 1000), ("code", 8)):
        of_task = trained | {"text_task": task, "text_max_length": 0}
        assert evaluation.longest_trained(of_task, task) == longest
        assert evaluation.longest_trained(of_task | {"chats": "file.jsonl"}, task) is None
        other = "lists" if task == "uniform" else "uniform"
        assert evaluation.longest_trained(of_task, other) is None  # its lengths count something else


def test_answers_are_scored_as_text_when_decoded_and_must_end(monkeypatch):
    records = list(text_examples(TextCopyConfig(text_min_length=3, text_max_length=3), 5, 0, "evaluation"))
    texts = [record["messages"][1]["content"] for record in records]
    flipped = texts[1][0] + {"0": "1", "1": "0"}[texts[1][1]] + texts[1][2]
    answers = [[*texts[0].encode(), 256], [*flipped.encode(), 256], [*texts[2].encode(), 49]]
    answers += [[*texts[3][:2].encode(), 256, 7], [*texts[4].encode(), 10]]

    def generate(model, prompts, n, chunk):
        assert n == 4 and prompts == [BYTES.chat(r["messages"])[0][:-4].tolist() for r in records]
        return iter(torch.tensor(answers).T)

    monkeypatch.setattr(evaluation, "generate", generate)
    right, wrong, long, short, endless = judge_text(text_copier(), BYTES, records, True, 512)
    assert right[:3] == (4, 0, None) and wrong[:3] == (4, 1, 1) and long.first_error == 3 and long.errors >= 1
    assert short.first_error == 2 and short.errors >= 1
    assert endless[:3] == (4, 1, 3)  # all symbols are right, but it does not end


def test_an_answer_may_have_as_many_tokens_as_bytes_whoever_is_decoded_beside_it(monkeypatch):
    records = list(text_examples(TextCopyConfig(text_min_length=2, text_max_length=9), 6, 0, "evaluation"))
    limits = [evaluation.answer_limit(record) for record in records]
    assert limits == [len(record["messages"][1]["content"].encode()) + 1 for record in records] and len(set(limits)) > 1
    steps = []

    def generate(model, prompts, n, chunk):
        assert n == max(limits)
        for step in range(n):
            steps.append(step)
            done = [step >= min(limit - 1, 4) for limit in limits]
            yield torch.tensor([BYTES.eos if end else 120 for end in done])

    monkeypatch.setattr(evaluation, "generate", generate)
    judge_text(text_copier(), BYTES, records, True, 512)
    assert len(steps) == 5  # all have ended
    monkeypatch.setattr(evaluation, "generate", lambda *_, **__: iter(torch.full((max(limits), 6), 48)))
    together = judge_text(text_copier(), BYTES, records, True, 512)
    assert together[0].targets == limits[0] and all(v.errors for v in together)
    sizes = evaluation.examples_of("", {}, Cell("imbalanced", None, 0.9, 2, 9, 3), EvalConfig(runs=("x",)))[1]
    assert sizes == [2 * len(s) + 5 for s in data_copy.evaluation_strings("imbalanced", 2, 9, 3, 0)]


def test_without_a_length_nothing_is_evaluated():
    with pytest.raises(ValueError, match="nothing to evaluate: give --lengths"):
        EvalConfig(runs=("x",), lengths=(), val_data="y")


@pytest.mark.parametrize("knob", ["--stop=zero", "--chunk=4", "--windows=4", "--repeat_p=0.5,0.7"])
def test_a_knob_that_would_do_nothing_is_refused(knob, monkeypatch):
    other = "--val_data=x" if knob in ("--stop=zero", "--chunk=4") else "--eval_seed=1"
    monkeypatch.setattr(sys, "argv", ["eval.py", "--runs=x", knob, other])
    with pytest.raises(ValueError, match=f"^{knob} would do nothing here, it is for"):
        evaluation.main()


def test_the_loss_on_text_is_that_of_each_window(start, corpora, tmp_path):
    argv = [f"--runs={start}", f"--val_data={corpora / 'val'}", "--windows=20", "--device=cpu", f"--out_dir={tmp_path}"]
    config = configurator.configure(EvalConfig, argv=argv)
    (row,) = evaluation.text_losses(config)
    (model, _), corpus = checkpoint.load_run(str(start)), Corpus(corpora / "val")
    rows = torch.from_numpy(corpus.read(corpus.order(np.arange(20), 0)))
    with torch.no_grad():
        losses = F.cross_entropy(model(rows[:, :-1]).mT, rows[:, 1:], reduction="none").mean(1).double()
    n_bytes = (rows[:, 1:] < 256).sum().item()  # an end of sequence has none
    facts = dict(run=str(start), pos_encoding="rope", seed=0, step=9, windows=20, tokens=20 * 48)
    assert {name: row[name] for name in facts} == facts
    assert row["loss"] == pytest.approx(losses.mean().item(), rel=1e-6)
    assert row["loss_standard_error"] == pytest.approx(losses.std().item() / math.sqrt(20), rel=1e-5)
    assert row["bits_per_byte"] == pytest.approx(losses.sum().item() * 48 / math.log(2) / n_bytes, rel=1e-6)
    rough = evaluation.text_losses(replace(config, dtype="bfloat16"))[0]["loss"]
    assert 1e-6 < abs(rough - row["loss"]) < 0.02
    assert on_two_ranks(script, argv) == [0, 0]  # no validation.jsonl: the run stopped early
    (two,) = json.loads((tmp_path / "losses.json").read_text())
    assert two | {"loss": 0} == pytest.approx(row | {"loss": 0}) and two["loss"] == pytest.approx(row["loss"])


def test_copies_and_losses_are_reported_together_with_what_the_run_started_from(corpora, start, tmp_path, monkeypatch):
    run(tmp_path / "run", max_steps=2, **of_task("finetune", start=start))
    argv = [f"--runs={tmp_path / 'run'}", "--tasks=imbalanced", "--kinds=first", "--lengths=3", "--samples=2"]
    script(0, [*argv, f"--val_data={corpora / 'val'}", "--windows=4", "--device=cpu", f"--out_dir={tmp_path}"])
    (row,) = json.loads((tmp_path / "accuracy.json").read_text())
    before, after = json.loads((tmp_path / "losses.json").read_text())
    assert (row["run"], row["kind"], row["samples"]) == (str(tmp_path / "run"), "first", 2)
    assert [(r["run"], r["step"]) for r in (before, after)] == [(str(start), 0), (str(tmp_path / "run"), 2)]
    assert after["start"] == str(start)
    config = EvalConfig(
        runs=(str(start), str(tmp_path / "run")), val_data=str(corpora / "val"), windows=4, device="cpu"
    )
    assert [r["loss"] for r in evaluation.text_losses(config)] == [before["loss"], after["loss"]]
    assert before["loss"] != after["loss"] and (tmp_path / "losses.png").exists()


def test_a_lead_stands_before_every_prompt(runs):
    _, trained = checkpoint.load_run(runs["text"])
    plain, led = (
        evaluation.examples_of(
            runs["text"], trained, Cell("uniform", "first", 0.9, 2, 9, 5), EvalConfig(("x",), lead=lead)
        )
        for lead in ("", "Please.\n")
    )
    for chat, other in zip(plain[0], led[0], strict=True):
        assert other["messages"][0]["content"] == "Please.\n" + chat["messages"][0]["content"]
        assert other["messages"][1:] == chat["messages"][1:]
    assert led[1] == [size + 8 for size in plain[1]]


def test_without_tasks_no_knob_of_a_task_is_refused():
    config = EvalConfig(runs=("x",), tasks=())
    assert not evaluation.unused_knobs(config, True).keys() & {"text_source", "repeat_p"}


def test_without_tasks_each_run_is_asked_what_it_was_trained_on(tmp_path):
    in_text = dict(task="finetune", tokenizer="bytes", text_task="recursive-flip", symbols=("x", "y"))
    runs = [save(tmp_path / "twice", copier(0.9), copy_task="twice"), save(tmp_path / "text", text_copier(), **in_text)]
    rows = rows_of(*runs, tasks="()", lengths="3", samples="2", kinds="first")
    assert [row["task"] for row in rows] == ["twice", "recursive-flip"]


def test_passages_are_cut_from_the_runs_source_or_the_one_given_and_scored_by_line_and_edit(tmp_path):
    letters = str.maketrans("01", "xy")
    for name, first in (("one", "x"), ("two", "y")):  # the copier knows these letters alone, and one line
        (tmp_path / f"{name}.txt").write_text(
            "\n".join(first + f"{i % 64:06b}".translate(letters) for i in range(5000))
        )
    knobs = dict(task="finetune", tokenizer="bytes", text_task="prose", text_source=(str(tmp_path / "one.txt"),))
    copies = save(tmp_path / "run", text_copier(), **knobs)
    how = dict(tasks="prose,log", lengths="1,3", samples="4", kinds="own-line")
    rows = rows_of(copies, **how)
    found = [(row["task"], row["length"], row["lines_right"], row["exact_match"]) for row in rows]
    assert found == [("prose", 1, None, 1.0), ("prose", 3, None, 0.0), ("log", 1, None, 0.0), ("log", 3, None, 0.0)]
    assert {row["trained_to"] for row in rows} == {8}
    rows = rows_of(copies, **how, free_running=True)
    assert [(row["lines_right"], row["exact_match"]) for row in rows] == [(1, 1), (0, 0), (0, 0), (0, 0)]
    assert rows[0]["similarity"] == 1.0 and all(0 <= row["similarity"] < 1 for row in rows[1:])
    _, trained = checkpoint.load_run(copies)
    for source, first in (((), "x"), ((str(tmp_path / "two.txt"),), "y")):
        config = EvalConfig(runs=(copies,), text_source=source)
        chats, _ = evaluation.examples_of(copies, trained, Cell("prose", "own-line", 0.9, 2, 2, 5), config)
        assert all(line[0] == first for chat in chats for line in chat["source"].split("\n"))


@pytest.mark.parametrize(
    "run, knob, match",
    [
        ("rope", "runs=()", "nothing to evaluate: give --runs=DIR"),
        ("rope", "lead=Please", "lead='Please': .*rope was trained on strings of tokens, not on text"),
        ("rope", "tokenizer=bytes", "tokenizer='bytes': .*rope was trained on strings of tokens, not on text"),
        ("rope", "lengths=()", "nothing to evaluate: give --lengths=N"),
        ("rope", "tasks=copy", "tasks: 'copy' is not one of imbalanced, .*, twice$"),
        ("text", "tasks=copy", "tasks: 'copy' is not one of imbalanced, .*, lists"),
        ("text", "kinds=last", "kinds=.*expected some of own-line"),
        ("pretrained", "chunk=9", "not finetuned on copying; --val_data, or sample.py, shows what it knows"),
        ("rope", "lengths=3,x", "lengths: 'x' is neither"),
        ("rope", "lengths=3,21", "sequence of 47 tokens is longer than the model's block_size=45"),
        ("text", "lengths=3,21000", "longer than the model's block_size=21000"),
        ("rope", "samples=1,2,3", r"samples=\(1, 2, 3\): expected one number, or one for each of 2 lengths"),
        ("rope", "samples=99999999999", "samples=.*expected 1 to 1,000,000 each"),
        ("rope", f"eval_seed={2**63}", "eval_seed=9223372036854775808: expected 0 to"),
        ("rope", "repeat_p=0.5,1.5", r"repeat_p=\(0.5, 1.5\): expected shares"),
        ("rope", "chunk=0", "chunk=0: expected at least 1"),
        ("rope", "device=cuda", "device='cuda': not on this machine"),
        ("missing", "chunk=9", "missing: no such checkpoint"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_anything_is(runs, monkeypatch, run, knob, match):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(evaluation, "evaluate", lambda *_: pytest.fail("evaluated something before refusing"))
    name, _, value = knob.partition("=")
    with pytest.raises(FileNotFoundError if run == "missing" else ValueError, match=match):
        rows_of(runs.get(run, run), **{name: value})
