"""scripts/endpoint.py against servers on this machine: what is asked, asked again, kept, and how it is scored."""

import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import configurator
from data_text import KINDS, TextCopyConfig, text_examples
from plots import wilson
from scripts import endpoint
from scripts.endpoint import EndpointConfig, key_of, main

KEY = "sk-not-to-be-written-anywhere"
STRINGS = ("0110", "1011", "0001", "111010", "10", "000000")
LOCAL = {"endpoint": "http://localhost:8000/v1", "model": "m", "retries": 1}


def chat(content, finish_reason: str = "stop") -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice], "usage": {"completion_tokens": 7}}).encode()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        assert self.path == "/v1/chat/completions"
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            n = len(self.server.bodies)
            self.server.bodies.append(body)
            self.server.keys.add(self.headers["Authorization"])
        reply = self.server.reply(n, body)
        if reply is None:
            return  # the connection is dropped
        status, data = reply if isinstance(reply, tuple) else (200, reply)
        data = chat(data) if isinstance(data, str) else data
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) + (status == 299)))  # 299: broken off
        self.send_header("Location", self.server.elsewhere)
        self.send_header("Retry-After-Ms", "1")  # so that tests do not wait
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads, block_on_close, request_queue_size = True, False, 64

    def __init__(self, reply, elsewhere: str):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply, self.elsewhere, self.bodies, self.keys, self.lock = reply, elsewhere, [], set(), threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, *_):
        pass


@pytest.fixture
def serve(monkeypatch):
    """serve(reply) starts a server: reply(n, body) to request n is a text, a whole body, or a status and either."""
    pytest.importorskip("openai", reason="requests go through the openai client: pip install openai")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    started = []

    def start(reply, elsewhere=""):
        started.append(Server(reply, elsewhere))
        return started[-1]

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.fixture
def records(tmp_path) -> Path:
    """Prompts that hold not the answer but its place in STRINGS: `right` knows it."""
    write(tmp_path / "records.jsonl", [record(i, string) for i, string in enumerate(STRINGS)])
    return tmp_path / "records.jsonl"


def write(path: Path, lines: list) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def record(i: int, string: str, **metadata) -> dict:
    metadata = {"task": "uniform", "kind": "first", "length": len(string), "symbols": ["0", "1"]} | metadata
    turns = [{"role": "user", "content": f"string {i}"}, {"role": "assistant", "content": string}]
    return {"id": f"r{i}", "messages": turns, "source": string, "metadata": metadata}


def place(body: dict) -> int:
    return int(body["messages"][-1]["content"].split()[1])


def right(_n: int, body: dict) -> str:
    return STRINGS[place(body)]


def run(server, tmp_path: Path, **knobs) -> list[dict]:
    """The rows of a run; on STRINGS unless tasks are given."""
    about = {"out_dir": str(tmp_path / "out"), "plot": False, "timeout": 5.0}
    about |= {"endpoint": server.url, "model": "lab/small"} if server else {}
    about |= {} if "tasks" in knobs else {"records": str(tmp_path / "records.jsonl")}
    main(EndpointConfig(**about | knobs))
    return json.loads((tmp_path / "out" / "accuracy.json").read_text())


def kept(tmp_path: Path) -> dict[str, dict]:
    lines = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    assert len(lines) == len({line["key"] for line in lines})
    return {line["id"]: line for line in lines}


def test_strings_are_those_of_eval_asked_once_each_and_right_answers_are_all_right(serve, tmp_path, capsys):
    tasks, wanted, answer_to = (("imbalanced", 0.9), ("lists", 0.9), ("repeat-structure", 0.5)), [], {}
    for task, p in (*tasks, ("repeat-structure", 1.0)):
        for kind in KINDS:
            for low, high, n in ((30, 30, 2), (5, 9, 3), (30, 30, 1)):
                wanted.append((task, kind, p if task == "repeat-structure" else None, low, high, n))
                for r in text_examples(TextCopyConfig(task, ("a", "b"), kind, low, high, p), n, 4, "evaluation"):
                    answer_to[r["messages"][0]["content"]] = r["messages"][1]["content"]
    server = serve(lambda n, body: answer_to[body["messages"][0]["content"]])
    knobs = {"lengths": (30, "5-9", "30-30"), "samples": (2, 3, 1), "symbols": ("a", "b"), "repeat_p": (0.5, 1.0)}
    rows = run(server, tmp_path, tasks=[task for task, _ in tasks], plot=True, eval_seed=4, **knobs)
    asked = [body["messages"][0]["content"] for body in server.bodies]
    assert sorted(asked) == sorted(answer_to) and len(asked) == 60
    about = ("task", "kind", "repeat_p", "min_length", "length", "samples")
    assert [tuple(row[name] for name in about) for row in rows] == wanted
    for row in rows:
        n = row["samples"]
        assert row["first_errors"] == [None] * n and row["token_error"] == row["only_closing_wrong"] == 0
        assert (row["exact_match"], row["exact_match_low"], row["exact_match_high"]) == (1, *wilson(n, n))
        assert (row["mode"], row["refused"], row["failed"], row["cut"]) == ("endpoint", 0, 0, 0)
        assert (row["run"], row["pos_encoding"], row["seed"]) == ("lab/small", "lab/small", 4) and row["seconds"] > 0
        assert row["trained_to"] is row["step"] is row["margin"] is None
    out = capsys.readouterr().out
    assert "imbalanced, mid-sentence" in out and "100% (3/3)" in out and "failed" not in out
    assert (tmp_path / "out" / "accuracy.png").read_bytes().startswith(b"\x89PNG")


def test_a_request_has_what_the_config_says_and_never_the_answer(serve, tmp_path):
    turns = (("system", "Be exact."), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "SECRET é"))
    messages = [{"role": role, "content": content} for role, content in turns]
    write(tmp_path / "records.jsonl", [{"messages": messages}])
    server = serve(lambda n, body: "SECRET é")
    assert run(server, tmp_path)[0]["exact_match"] == 1
    extra = '{"max_tokens": null, "max_completion_tokens": 99, "reasoning_effort": "low"}'
    run(server, tmp_path, temperature=None, extra=extra, endpoint=server.url + "/chat/completions/")
    run(server, tmp_path, temperature=0.5, max_tokens=3)
    always = {"model": "lab/small", "messages": messages[:4]}
    assert server.bodies == [
        always | {"temperature": 0, "max_tokens": 2 * len("SECRET é".encode()) + 256},
        always | {"max_completion_tokens": 99, "reasoning_effort": "low"},
        always | {"temperature": 0.5, "max_tokens": 3},
    ]


def test_the_key_is_sent_to_the_endpoint_alone_and_written_nowhere(serve, records, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OPENAI_API_KEY", KEY + "\n")
    says, other = json.dumps({"error": {"message": f"no quota for {KEY}, sorry", "code": 400}}).encode(), serve(right)
    replies = [(503, says), (400, says), says, "00", (307, b""), STRINGS[5]]
    server = serve(lambda n, body: replies[place(body)], other.url + "/chat/completions")
    (row,) = run(server, tmp_path, retries=2)
    assert (row["refused"], row["failed"], row["samples"], row["exact_match"]) == (1, 2, 3, 2 / 3)
    assert other.keys == {None} and server.keys == {f"Bearer {KEY}"}  # a redirect is followed without the key
    server.reply = lambda n, body: (403, says)
    with pytest.raises(RuntimeError, match=r"403.*no quota for \[key\], sorry") as ended:
        run(server, tmp_path)
    texts = [path.read_text() for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(texts) >= 2 and not any(KEY in text for text in (*texts, str(ended.value), *capfd.readouterr()))
    server.reply = right
    monkeypatch.setenv("OPENAI_API_KEY", "0")  # as good as any for a server of one's own
    assert run(server, tmp_path, max_tokens=9)[0]["exact_match"] == 1
    monkeypatch.setenv("OPENAI_API_KEY", "sk two\nlines")
    with pytest.raises(ValueError, match="OPENAI_API_KEY: expected ASCII characters without blanks"):
        run(server, tmp_path)


PARTS = [{"type": "thinking", "text": "?"}, {"type": "text", "text": "01"}, {"type": "text", "text": "10"}]
NO_CONTENT = b'{"choices": [{"message": {"role": "assistant"}, "finish_reason": "length"}]}'
ANSWERS = [chat(PARTS), chat("0100"), chat("01101"), chat("01", "length"), chat(None, "length"), NO_CONTENT, "01 10"]
REFUSALS = [(400, b"too long"), (413, b"too long"), (422, b"too long"), chat("01", "content_filter")]
BAD = [b"<html>no room</html>", chat("0110")[:-9], b"[]", b"[" * 10**5, chat(110), chat("01", "error"), chat(["0110"])]
BAD += [b'{"choices": []}', b'{"choices": [{"text": "0110"}]}', b'{"error": "no room"}', b'{"choices": null}']
AGAIN = [None, (299, "0110"), *((status, b"no room") for status in (408, 409, 429, 500, 503))]
FAILURES = [*BAD, *AGAIN]


def test_answers_and_refusals_are_final_and_failures_are_asked_again_now_and_next_time(serve, tmp_path, capfd):
    replies, over = [*ANSWERS, *REFUSALS, *FAILURES], threading.Event()
    write(tmp_path / "records.jsonl", [record(i, "0110") for i in range(len(replies))])
    server = serve(lambda n, body: replies[place(body)] or over.wait(9) and None)  # None: silence
    (row,) = run(server, tmp_path, retries=2, timeout=0.5)
    over.set()
    n, final, path = len(ANSWERS), len(ANSWERS + REFUSALS), tmp_path / "out" / "answers.jsonl"
    assert (row["samples"], row["refused"], row["failed"], row["cut"]) == (n, len(REFUSALS), len(FAILURES), 3)
    assert (row["exact_match"], row["first_errors"]) == (1 / 7, [None, 2, 4, 2, 0, 0, 2])
    wrong = 0 + 1 + 1 + 2 + 4 + 4 + 2  # symbols, and the missing end of the string that went on
    assert (row["token_error"], row["only_closing_wrong"]) == (wrong / 35, 1 / 7)
    asked = sorted(place(body) for body in server.bodies)
    assert asked == sorted([*range(len(replies)), *range(final + len(BAD), len(replies))])
    lines = kept(tmp_path)
    assert [lines[f"r{i}"]["answer"] for i in range(n)] == ["0110", "0100", "01101", "01", "", "", "01 10"]
    assert (lines["r3"]["finish_reason"], lines["r3"]["usage"]) == ("length", {"completion_tokens": 7})
    reasons = ["too long", "too long", "too long", "content_filter"]
    assert all(reason in lines[f"r{i}"]["refused"] for i, reason in enumerate(reasons, n)) and len(lines) == final
    out, err = capfd.readouterr()
    assert "14% (1/7)" in out and f"{len(REFUSALS)} of {len(replies)} refused, not counted as wrong" in out
    assert f"status 400: too long; to ask them again, delete their lines in {path}" in out
    assert f"{len(FAILURES)} of {len(replies)} failed, not counted as wrong: " in out
    assert "; the same command asks them again" in out and "cut at the limit of tokens: 3" in out and "no room" in err
    server.reply = lambda n, body: "0110"
    (row,) = run(server, tmp_path)
    assert (row["samples"], row["refused"], row["failed"]) == (n + len(FAILURES), len(REFUSALS), 0)
    assert sorted(place(body) for body in server.bodies[len(asked) :]) == [*range(final, len(replies))]


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_concerns_all_prompts_ends_the_run_at_once(serve, records, tmp_path, status):
    over = threading.Event()
    late = [lambda: over.wait(9) and None] * 2 + [lambda: (status, b"not you")]
    server = serve(lambda n, body: right(n, body) if n < 2 else late[n - 2]())
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=f"{server.url}: .*not you; check --endpoint, --model and OPENAI_API_KEY"):
        run(server, tmp_path, concurrency=3)
    over.set()
    assert time.monotonic() - began < 5 and len(kept(tmp_path)) == 2 and 5 <= len(server.bodies) <= 6
    assert not (tmp_path / "out" / "accuracy.json").exists()


def test_what_is_missing_is_named_before_a_request_and_rows_come_before_pictures(serve, records, tmp_path, monkeypatch):
    server = serve(right)
    for package in ("matplotlib", "openai"):
        with monkeypatch.context() as patch, pytest.raises((ValueError, RuntimeError), match=f"pip install {package}"):
            patch.setitem(sys.modules, package, None)
            run(server, tmp_path, plot=True)
    with configurator.lock(tmp_path / "out"), pytest.raises(ValueError, match="in use by"):
        run(server, tmp_path)
    assert server.bodies == []
    monkeypatch.setattr(endpoint, "plot", lambda rows, path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(server, tmp_path, plot=True)
    report = json.loads((tmp_path / "out" / "accuracy.json").read_text())
    assert report[0]["exact_match"] == 1
    server.shutdown()
    server.server_close()
    with pytest.raises(RuntimeError, match="(?s)no prompt was answered.*6 of 6 failed.*Connection refused"):
        run(server, tmp_path, retries=1, max_tokens=9)
    assert json.loads((tmp_path / "out" / "accuracy.json").read_text()) == report and len(server.bodies) == 6


def test_a_kept_answer_is_that_of_one_request():
    config, asked = EndpointConfig(**LOCAL), record(0, "0110")
    changes = {"model": "large", "temperature": 1.0, "max_tokens": 9, "extra": '{"n": 1}', "endpoint": "http://b/v1"}
    keys = [key_of(config, r) for r in (asked, asked | {"id": "x"}, record(1, "0110") | {"id": "r0"})]
    keys += [key_of(replace(config, **{name: value}), asked) for name, value in changes.items()]
    assert len(set(keys)) == 3 + len(changes)
    assert key_of(replace(config, endpoint=LOCAL["endpoint"] + "/", timeout=1.0, retries=3), asked) == keys[0]


@pytest.mark.parametrize("number, code", [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_kill_and_ctrl_c_leave_what_was_answered(serve, records, tmp_path, number, code):
    over = threading.Event()
    server = serve(lambda n, body: right(n, body) if n < 3 else over.wait(20) and None)  # hangs after three
    knobs = {"endpoint": server.url, "model": "lab/small", "records": records, "out_dir": tmp_path / "out"}
    flags = [f"--{name}={value}" for name, value in (knobs | {"concurrency": 2, "plot": False}).items()]
    command = [sys.executable, "-m", "scripts.endpoint", *flags]
    process = subprocess.Popen(command, cwd=Path(__file__).parent.parent, stderr=subprocess.PIPE)
    path, deadline = tmp_path / "out" / "answers.jsonl", time.monotonic() + 20
    while time.monotonic() < deadline and (len(server.bodies) < 5 or path.read_bytes().count(b"\n") < 3):
        time.sleep(0.01)
    process.send_signal(number)
    errors = process.communicate(timeout=8)[1].decode()
    over.set()
    assert process.returncode == code and "Traceback" not in errors, errors
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id": "r3", "key": "torn", "ans')
    server.reply = right
    assert run(server, tmp_path)[0]["exact_match"] == 1 and len(server.bodies) == 5 + 3
    assert whole.count(b"\n") == 3 and path.read_bytes().startswith(whole) and len(kept(tmp_path)) == 6
    path.write_bytes(b'{"key": "1", "answer"\n' + whole)
    with pytest.raises(RuntimeError, match=r"answers\.jsonl, line 1: .*mend or delete the line"):
        run(server, tmp_path)


LINES = [
    ({"id": "r0", "answer": "0110"}, "id 'r0' is there twice"),
    ({"id": "r1", "answer": None}, "no answer"),
    ({"answer": "0"}, "'id'"),
    ({"id": "r1", "messages": []}, "IndexError"),
    ({"id": "r1", "messages": [{"role": "user", "content": "string 1"}]}, "no answer"),
    ([1], "expected id and answer"),
]


def test_answers_from_elsewhere_to_any_records(tmp_path, capsys):
    some = [record(0, STRINGS[0]), record(3, STRINGS[3]), record(1, STRINGS[1]), record(2, "[1, 2]", task="lists")]
    some += [record(4, STRINGS[4]), record(5, STRINGS[5])]
    del some[4]["metadata"]
    del some[5]["id"], some[5]["metadata"]  # its name is then its line
    write(tmp_path / "records.jsonl", some)
    theirs = tmp_path / "theirs.jsonl"
    turns = [{"role": "user", "content": "string 3"}, {"role": "assistant", "content": STRINGS[3]}]
    lines = [{"id": "r0", "answer": "0101"}, {"id": "r3", "messages": turns}, {"id": "r2", "answer": "[1.0, 2]"}]
    lines += [{"id": "r4", "refused": "too long"}, {"id": "6", "answer": "0", "finish_reason": "length"}]
    write(theirs, [*lines, {"id": "another", "answer": ""}])
    (row,) = run(None, tmp_path, answers=str(theirs), plot=True)
    about = ("task", "kind", "min_length", "length", "samples", "exact_match", "refused", "failed", "cut")
    assert tuple(row[name] for name in about) == ("records", None, 2, 6, 4, 1 / 2, 1, 1, 1)
    about = ("mode", "run", "pos_encoding", "seconds")
    assert tuple(row[name] for name in about) == ("answers", "theirs", "theirs", 0)
    assert "theirs.jsonl; add their answers to" in capsys.readouterr().out
    assert not (tmp_path / "out" / "answers.jsonl").exists()
    assert run(None, tmp_path, answers=str(theirs), model="GPT")[0]["run"] == "GPT"
    for line, named in LINES:
        write(theirs, [lines[0], line])
        with pytest.raises(RuntimeError, match=rf"theirs\.jsonl, line 2: .*{named}"):
            run(None, tmp_path, answers=str(theirs))


def test_answers_to_our_own_strings_need_ids_that_are_their_own(tmp_path):
    knobs = {"tasks": ("uniform",), "lengths": (5,), "samples": (2,), "answers": str(tmp_path / "theirs.jsonl")}
    some = list(text_examples(TextCopyConfig("uniform", ("0", "1"), "first", 5, 5), 2, 0, "evaluation"))
    write(tmp_path / "theirs.jsonl", [{"id": r["id"], "answer": r["source"]} for r in some])
    assert run(None, tmp_path, kinds=("first",), **knobs)[0]["exact_match"] == 1
    with pytest.raises(ValueError, match=f"id '{some[0]['id']}' has two prompts"):
        run(None, tmp_path, **knobs)


KNOBS = [
    ({"model": "", "endpoint": ""}, "endpoint='': expected either --endpoint=http://host/v1 or --answers=FILE"),
    ({"answers": "a.jsonl"}, "or --answers"),
    ({"model": ""}, "--model=NAME"),
    *(({"endpoint": url}, f"endpoint='{url}'") for url in ("host:80", "ftp://host")),
    *(({name: ()}, rf"{name}=\(\): expected at least one") for name in ("tasks", "kinds", "lengths", "repeat_p")),
    ({"tasks": ("list",)}, "task='list': expected one of imbalanced,.*lists"),
    ({"kinds": ("last",)}, "kind='last': expected one of .*own-line"),
    ({"lengths": ("9-8",)}, "'9-8' is neither"),
    ({"lengths": (99999999999,)}, "lengths=.*expected 1 to 1,000,000"),
    *(({"samples": n}, "samples=") for n in ((1, 2, 3), (0,), (99999999999,), ())),
    ({"symbols": ("0", "0")}, "symbols"),
    ({"repeat_p": (0.5,)}, "repeat_p=.*--tasks=repeat-structure"),
    ({"repeat_p": (1.5,), "tasks": ("repeat-structure",)}, "repeat_p=1.5"),
    *(({"records": "r", name: value}, f"leave out --{name}") for name, value in (("lengths", (3,)), ("eval_seed", 1))),
    *(({name: 0}, f"{name}=0") for name in ("concurrency", "retries", "timeout", "max_tokens")),
    ({"timeout": float("nan")}, "timeout=nan"),
    *(({"eval_seed": seed}, f"eval_seed={seed}") for seed in (-1, 2**63)),
    *(({"extra": extra}, "extra=.*expected") for extra in ("{low}", "[]", '{"stream": true}')),
    ({"records": "nowhere.jsonl"}, "nowhere.jsonl"),
    ({"endpoint": "", "answers": "nothing.jsonl", "kinds": ("first",)}, "nothing.jsonl"),
]


@pytest.mark.parametrize("knobs, named", KNOBS)
def test_wrong_knobs_are_refused_by_name(tmp_path, knobs, named):
    with pytest.raises((ValueError, FileNotFoundError), match=named):
        main(EndpointConfig(**LOCAL | knobs, out_dir=str(tmp_path)))
