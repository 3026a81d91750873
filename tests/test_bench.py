"""bench.py: the rows it writes, the order it times in, and what it refuses. On shapes that take no time."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import bench

ROOT = Path(bench.__file__).parent
PASSES = ["forward", "backward", "forward+backward"]
ROTARY = ["rotary", "--shape=1,3,2,1,8", "--repeats=3", "--device=cpu", "--variants=ours,plain torch"]


@pytest.fixture(autouse=True)
def same_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(monkeypatch, *argv):
    monkeypatch.setattr(sys, "argv", ["bench.py", *map(str, argv)])
    bench.main()


def test_rows_have_every_variant_pass_and_setting_and_the_machine_stands_once(monkeypatch, tmp_path, capsys):
    file = tmp_path / "new" / "bench.json"
    run(monkeypatch, *ROTARY, f"--json={file}", "--threads=1")
    found = json.loads(file.read_text())
    assert found.keys() == {"machine", "rows"} and found["machine"] == bench.machine()
    assert [(row["pass"], row["variant"]) for row in found["rows"]] == [
        (what, variant) for what in PASSES for variant in ("ours", "plain torch")
    ]
    for row in found["rows"]:
        assert row["name"] == "rotary" and 0 < row["min_s"] <= row["median_s"] <= row["max_s"] < 10
        shape = {"shape": [1, 3, 2, 1, 8], "dtype": "float32"}
        assert row["settings"] == shape | {"device": "cpu", "threads": 1, "repeats": 3}
    printed = capsys.readouterr().out
    assert bench.table(found["rows"]) in printed and found["machine"]["cpu"] in printed


def test_a_file_is_added_to_and_the_same_settings_are_replaced(monkeypatch, tmp_path):
    file = tmp_path / "bench.json"
    run(monkeypatch, *ROTARY, f"--json={file}")
    first = json.loads(file.read_text())["rows"]
    run(monkeypatch, "scan", "--rows=2", "--tokens=5", "--repeats=2", "--device=cpu", f"--json={file}")
    run(monkeypatch, *ROTARY, f"--json={file}")
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == ["scan"] * 6 + ["rotary"] * 6
    assert {row["variant"] for row in rows[:6]} == {"doubling", "loop"}
    assert [row["median_s"] for row in rows[6:]] != [row["median_s"] for row in first]
    run(monkeypatch, *ROTARY, "--repeats=2", f"--json={file}")
    assert len(json.loads(file.read_text())["rows"]) == 18


def test_figures_of_another_machine_are_refused_before_anything_is_timed(monkeypatch, tmp_path):
    file = tmp_path / "bench.json"
    text = json.dumps({"machine": bench.machine() | {"cpu": "Another One"}, "rows": []})
    file.write_text(text)
    monkeypatch.setitem(bench.BENCHMARKS, "rotary", (lambda *_: pytest.fail("timed"), bench.RotaryConfig))
    with pytest.raises(ValueError, match="another machine.*Another One"):
        run(monkeypatch, *ROTARY, f"--json={file}")
    with pytest.raises(ValueError, match="another machine"):
        bench.add(file, [])
    assert file.read_text() == text


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rows": []}', '{"machine": {}, "rows": [{}]}'])
def test_a_damaged_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(RuntimeError, match="bench.json: damaged"):
        bench.read(tmp_path / "bench.json")


@pytest.mark.parametrize(
    "argv, named",
    [
        (["rotari"], "'rotari': expected rotary or scan or "),
        ([], "'': expected rotary or scan or "),
        (["rotary", "--shape=1,2,3"], "shape"),
        (["rotary", "--shape=1,3,2,1,7"], "even D"),
        (["rotary", "--shape=0,3,2,1,8"], "at least 1"),
        ([*ROTARY, "--repeats=0"], "repeats=0"),
        ([*ROTARY, "--variants=ours,theirs"], "theirs on cpu; there are ours, plain torch"),
        (["rotary", "--tokens=5"], "--tokens"),
        (["scan", "--tokens=0"], "tokens=0"),
        (["loss", "--width=0"], "width=0: expected at least 1"),
        (["train_step", "--rows=-1"], "rows=-1: expected at least 1"),
    ],
)
def test_wrong_values_are_refused_by_name(monkeypatch, argv, named):
    with pytest.raises(ValueError, match=named):
        run(monkeypatch, *argv)


def test_an_unknown_benchmark_fails_in_one_line_with_status_2():
    done = subprocess.run([sys.executable, "bench.py", "rotari"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    names = " or ".join(bench.BENCHMARKS)
    assert done.stderr == f"error: benchmark 'rotari': expected {names} first, then its knobs or --help\n"


def test_variants_take_turns_in_changing_order_and_the_median_is_of_their_own_times(monkeypatch):
    order, clock = [], {"a": iter([5.0, 1.0, 2.0, 2.0, 2.0]), "b": iter([9.0, 8.0, 7.0, 8.0, 5.0])}

    def seconds(what, device):
        order.append(what())
        return next(clock[order[-1]])

    monkeypatch.setattr(bench, "seconds", seconds)
    makers = {name: lambda name=name: {"forward": lambda: name} for name in "ab"}
    rows = bench.race("race", makers, bench.BenchConfig(repeats=5), torch.device("cpu"), {"size": 1})
    assert {"".join(order[i : i + 2]) for i in range(0, 10, 2)} == {"ab", "ba"}
    assert [(r["variant"], r["median_s"], r["min_s"], r["max_s"]) for r in rows] == [("a", 2, 1, 5), ("b", 8, 5, 9)]
    rows[1]["facts"] = {"tokens_per_s": 12.5}  # x: the median of 9/5, 8/1, 7/2, 8/2 and 5/2, not 8/2
    printed = ["forward", "b", "8000.000", "5000.000", "9000.000", "3.50", "tokens_per_s", "12.5"]
    assert bench.table(rows).splitlines()[2].split() == printed


def test_a_peer_that_does_not_run_is_left_out_with_the_reason_and_ours_is_not(capsys):
    def fails():
        raise ImportError("no module named peer")

    def rows(**makers):
        return bench.race("race", makers, bench.BenchConfig(repeats=1), torch.device("cpu"), {})

    assert [row["variant"] for row in rows(ours=lambda: {"forward": list}, peer=fails)] == ["ours"]
    assert capsys.readouterr().out == "peer left out: ImportError: no module named peer\n"
    with pytest.raises(ImportError):
        rows(ours=fails)
    only_the_peer = bench.BenchConfig(variants=("peer",))
    with pytest.raises(RuntimeError, match="nothing was timed"):
        bench.race("race", {"ours": fails, "peer": fails}, only_the_peer, torch.device("cpu"), {})


def test_each_pass_does_what_its_name_says():
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    grads = [torch.tensor([1.0, 10.0])]
    made = bench.passes(lambda x: x * x, [x], grads)
    assert list(made) == PASSES
    assert made["forward"]().tolist() == [4, 9] and not made["forward"]().requires_grad
    for what in PASSES[1:]:
        for _ in range(2):
            assert made[what]()[0].tolist() == [4, 60]


def test_peers_compute_what_we_compute(monkeypatch):
    pytest.importorskip("transformers")
    made = {}

    def keep(name, makers, *_):
        made.update({variant: makers[variant]() for variant in ("ours", "plain torch", "hugging face")})
        return [{}]

    monkeypatch.setattr(bench, "race", keep)
    monkeypatch.setattr(torch, "randn", lambda *shape, **like: torch.ones(*shape, **like))
    monkeypatch.setattr(torch, "randn_like", torch.ones_like)
    bench.rotary(bench.BenchConfig(), bench.RotaryConfig(shape=(2, 3, 4, 2, 8)), torch.device("cpu"))
    ours, plain, peer = (made[variant]["forward+backward"]() for variant in made)
    for a, b, c in zip(ours, plain, peer, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c.transpose(1, 2), rtol=0, atol=1e-6)


def test_loss_compares_gradients_and_measures_peaks_in_processes_of_their_own(monkeypatch, tmp_path):
    file = tmp_path / "bench.json"
    sizes = ["--tokens=256", "--width=8", "--vocab_size=60000"]  # a matrix of logits is 61 MB
    run(monkeypatch, "loss", *sizes, "--repeats=1", "--device=cpu", f"--json={file}")
    ours, plain = json.loads(file.read_text())["rows"]
    assert (ours["variant"], plain["variant"]) == ("ours", "plain torch")
    assert ours["facts"]["gradients"] == 0 < plain["facts"]["gradients"] < 1e-5
    if sys.platform == "linux":
        assert plain["peak_bytes"] > 2 * 61e6 and 0 < ours["peak_bytes"] < plain["peak_bytes"]


def test_the_chunked_loss_that_is_timed_is_chunked_as_in_the_model(monkeypatch):
    chunks = []
    monkeypatch.setattr(bench.ChunkedLoss, "apply", lambda x, w, t, chunk: chunks.append(chunk) or (x.sum() + w.sum()))
    cpu, knobs = torch.device("cpu"), bench.LossConfig(tokens=3, width=2, vocab_size=50)
    bench.losses(knobs, cpu)["ours"]()["forward+backward"]()
    assert chunks == [bench.LOGITS_AT_ONCE["cpu"] // 50]


SMALL = ["--layers=2", "--heads=2", "--width=32", "--vocab_size=64", "--device=cpu"]


def test_train_step_follows_transformers_step_by_step(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    file, compiled = tmp_path / "bench.json", []
    monkeypatch.setattr(
        torch, "compile", lambda model: [compiled.append(type(model).__name__), model][1]
    )  # in a moment
    run(monkeypatch, "train_step", *SMALL, "--rows=2", "--tokens=40", "--repeats=20", f"--json={file}")
    rows = {row["variant"]: row for row in json.loads(file.read_text())["rows"]}
    assert list(rows) == ["rope", "2d-rope", "hugging face", "rope compiled", "hugging face compiled"]
    assert compiled == ["Decoder", "Qwen3ForCausalLM"]
    for row in rows.values():
        assert row["pass"] == "step" and row["facts"]["tokens_per_s"] == pytest.approx(80 / row["median_s"])
    for name in ("hugging face", "hugging face compiled"):
        assert rows[name]["facts"]["logits"] < 1e-4 and rows[name]["facts"]["losses"] < 1e-3
    assert rows["2d-rope"]["facts"].keys() == {"tokens_per_s"}


def test_the_steps_that_are_timed_train(monkeypatch):
    losses, forward = [], bench.Decoder.forward
    monkeypatch.setattr(bench.Decoder, "forward", lambda *a: [losses.append(forward(*a)), losses[-1]][1])
    knobs = bench.DecoderConfig(rows=4, tokens=32, layers=1, heads=2, width=32, vocab_size=64)
    only_ours = bench.BenchConfig(repeats=20, variants=("rope",))
    (row,) = bench.train_step(only_ours, knobs, torch.device("cpu"))
    curve = [float(loss.detach()) for loss in losses if loss.dim() == 0]
    assert len(curve) == 21 and sum(curve[-5:]) < 0.95 * sum(curve[:5]) and row["facts"].keys() == {"tokens_per_s"}


@pytest.mark.parametrize("rows", [1, 3])
def test_generate_gives_the_tokens_of_transformers(monkeypatch, tmp_path, rows):
    pytest.importorskip("transformers")
    file = tmp_path / "bench.json"
    run(monkeypatch, "generate", *SMALL, f"--rows={rows}", "--tokens=12", "--repeats=1", f"--json={file}")
    ours, theirs = json.loads(file.read_text())["rows"]
    assert (ours["variant"], theirs["variant"]) == ("ours", "hugging face") and theirs["facts"]["same_tokens"]
    assert theirs["facts"]["tokens_per_s"] == pytest.approx(12 * rows / theirs["median_s"])


@pytest.mark.parametrize("n", [1, 3, 300])
def test_the_copier_copies_strings_of_its_length_but_for_one_token(n):
    model, string = bench.copier(n, torch.device("cpu")), np.arange(n) % bench.UNKNOWN  # all other symbols
    strings = [string, *np.tile(string, (3, 1))]
    for place, flawed in zip((0, n // 2, n - 1), strings[1:], strict=True):
        flawed[place] = bench.UNKNOWN
    verdicts = bench.teacher_forced(model, strings, bench.data_copy.NEWLINE)
    assert [v.first_error for v in verdicts] == [None, 0, n // 2, n - 1]
    assert verdicts[0].margin > 5 and all(v.errors == 1 and v.margin < -5 for v in verdicts[1:])


@pytest.mark.parametrize("shift", [0, 1])
def test_copy_eval_compares_first_errors(monkeypatch, tmp_path, shift):
    pytest.importorskip("transformers")
    file, judge = tmp_path / "bench.json", bench.teacher_forced

    def shifted(*how):
        return [v._replace(first_error=v.first_error and v.first_error + shift) for v in judge(*how)]

    monkeypatch.setattr(bench, "teacher_forced", shifted)
    knobs = ["--length=40", "--strings=5", "--rows=3", "--repeats=1", "--device=cpu"]
    run(monkeypatch, "copy_eval", *knobs, f"--json={file}")
    rows = json.loads(file.read_text())["rows"]
    assert [row["variant"] for row in rows] == ["teacher-forced", "free-running", "hugging face"]
    assert [row["facts"]["same_verdicts"] for row in rows] == [True, not shift, not shift]
    for row in rows:
        assert row["facts"]["right"] == 3 and row["facts"]["tokens_per_s"] == pytest.approx(5 * 41 / row["median_s"])


def test_tokenize_counts_the_same_tokens_everywhere():
    bench_config = bench.BenchConfig(device="cpu", repeats=1)
    rows = bench.tokenize(bench_config, bench.TokenizeConfig(1, "bytes", 2), torch.device("cpu"))
    assert [row["variant"] for row in rows] == ["ours", "tiktoken, one thread", "datasets.map"]
    assert {row["facts"]["tokens"] for row in rows} == {rows[0]["facts"]["tokens"]} and rows[0]["facts"]["tokens"] > 1e6
    assert rows[1]["facts"]["of_cores"] == pytest.approx(rows[1]["x"] / 2)


def test_loader_reads_from_as_many_shards_as_asked():
    rows = bench.loader(bench.BenchConfig(device="cpu", repeats=1), bench.LoaderConfig(7, 16, 64), torch.device("cpu"))
    assert [(row["variant"], row["pass"]) for row in rows] == [
        ("ours", "first batch"),
        ("ours", "later batch"),
        ("one file", "later batch"),
    ]
    assert rows[0]["settings"]["shards"] == 7 + 1  # the last says that the build is complete
    assert all(row["median_s"] > 0 for row in rows)
