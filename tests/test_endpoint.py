"""endpoint.py against servers on this machine: what is asked, what is asked again, what is kept, how it is scored."""

import json
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import configurator
import endpoint
from data_copy import KINDS, TextCopyConfig, text_examples, write_jsonl
from endpoint import EndpointConfig, main
from report import wilson

ROOT = Path(endpoint.__file__).parent
KEY = "sk-not-to-be-written-anywhere"
STRINGS = ("0110", "1011", "0001", "111010", "10", "000000")


class Server(ThreadingHTTPServer):
    """`reply(n, body)`: what request n, from 0, gets: a text as the answer, bytes as the whole reply, (status, bytes[,
    headers]), or None: the connection is dropped."""

    daemon_threads, block_on_close, request_queue_size = True, False, 64

    def __init__(self, reply):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply, self.lock, self.bodies, self.headers, self.times = reply, threading.Lock(), [], [], []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def prompts(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.bodies]

    def handle_error(self, *_):
        """Clients that have gone are no news here."""


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        server, body = self.server, json.loads(raw)
        with server.lock:
            n = len(server.bodies)
            server.bodies.append(body)
            server.headers.append(dict(self.headers) | {"path": self.path})
            server.times.append(time.monotonic())
        reply = server.reply(n, body)
        if reply is None:
            self.close_connection = True
            return
        reply = chat(reply) if isinstance(reply, str) else reply
        status, data, headers = (*((200, reply) if isinstance(reply, bytes) else reply), {})[:3]
        self.send_response(status)
        for name, value in ({"Content-Length": len(data)} | headers).items():
            self.send_header(name, str(value))
        self.end_headers()
        for piece in data if isinstance(data, list) else [data]:
            self.wfile.write(piece)
            time.sleep(0.05 if isinstance(data, list) else 0)

    def do_GET(self):
        raise AssertionError("a redirect was followed")

    def log_message(self, *_):
        pass


def chat(text: str | None, finish_reason: str = "stop") -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice], "usage": {"completion_tokens": 7}}).encode()


@pytest.fixture
def serve(monkeypatch):
    """Servers that end with the test, and a client that is quick to try again."""
    monkeypatch.setattr(endpoint, "BACKOFF", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    started = []

    def start(reply) -> Server:
        started.append(Server(reply))
        return started[-1]

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.fixture
def records(tmp_path) -> Path:
    """Prompts that hold not the answer but its place in STRINGS: `right` knows it."""
    write_jsonl(tmp_path / "records.jsonl", [record(i, string) for i, string in enumerate(STRINGS)])
    return tmp_path / "records.jsonl"


def record(i: int, string: str, task: str | None = "uniform", kind: str | None = "first") -> dict:
    about = {"task": task, "kind": kind, "length": len(string), "symbols": ["0", "1"]} if task else {}
    turns = [{"role": "user", "content": f"string {i}"}, {"role": "assistant", "content": string}]
    return {"id": f"r{i}", "messages": turns, "source": string, "metadata": about}


def place(body: dict) -> int:
    return int(body["messages"][-1]["content"].split()[1])


def right(_n: int, body: dict) -> str:
    return STRINGS[place(body)]


def run(server: Server | None, tmp_path: Path, **knobs) -> list[dict]:
    """The rows of a run; on STRINGS unless tasks are given."""
    about = {"out_dir": str(tmp_path / "out"), "plot": False, "timeout": 5.0}
    about |= {"endpoint": server.url, "model": "lab/small-model"} if server else {}
    about |= {} if "tasks" in knobs or "records" in knobs else {"records": str(tmp_path / "records.jsonl")}
    main(EndpointConfig(**about | knobs))
    return json.loads((tmp_path / "out" / "accuracy.json").read_text())


def kept(tmp_path: Path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]


# Rows and scores


def test_the_strings_are_those_of_eval_and_right_answers_are_all_right(serve, tmp_path, capsys):
    bounds = [(3, 3), (5, 9)]
    expected = {}
    for task in ("imbalanced", "lists"):
        for kind in KINDS:
            for (low, high), n in zip(bounds, (2, 3), strict=True):
                about = TextCopyConfig(task, ("a", "b"), kind, low, high)
                for r in text_examples(about, n, 4, "evaluation"):
                    expected[r["messages"][0]["content"]] = r["messages"][1]["content"]
    server = serve(lambda n, body: expected[body["messages"][0]["content"]])
    knobs = {"tasks": ("imbalanced", "lists"), "lengths": (3, "5-9"), "samples": (2, 3), "symbols": ("a", "b")}
    rows = run(server, tmp_path, eval_seed=4, **knobs)
    assert sorted(server.prompts()) == sorted(expected) and len(expected) == 30
    order = [(task, kind, *b) for task in ("imbalanced", "lists") for kind in KINDS for b in bounds]
    assert [(r["task"], r["kind"], r["min_length"], r["length"]) for r in rows] == order
    for row in rows:
        n = 2 if row["length"] == 3 else 3
        assert row["samples"] == n and row["first_errors"] == [None] * n and row["token_error"] == 0
        assert (row["exact_match"], row["exact_match_low"], row["exact_match_high"]) == (1, *wilson(n, n))
        assert (row["mode"], row["failed"], row["cut"], row["margin"]) == ("endpoint", 0, 0, None)
        assert (row["run"], row["seed"], row["trained_to"], row["step"]) == ("lab/small-model", 4, None, None)
        assert row["pos_encoding"] == "lab/small-model" and row["seconds"] >= 0
    out = capsys.readouterr().out
    assert "imbalanced, mid-sentence" in out and "100% (3/3)" in out and "failed" not in out


def test_wrong_answers_are_scored_by_data_copy(serve, records, tmp_path, capsys):
    said = ["0110", "0011", "00010", "1110", "", "0000 00"]  # right, one wrong, too long, cut off, empty, a blank
    reasons = ["stop", "stop", "stop", "length", "length", "stop"]
    server = serve(lambda n, body: chat(said[place(body)] or None, reasons[place(body)]))
    (row,) = run(server, tmp_path)
    assert row["exact_match"] == 1 / 6 and row["first_errors"] == [None, 0, 4, 4, 0, 4]
    wrong = 0 + 1 + 1 + 2 + 2 + 1  # symbols, and the missing end of the string that went on
    assert row["only_closing_wrong"] == 1 / 6
    assert row["token_error"] == wrong / sum(len(string) + 1 for string in STRINGS)
    assert (row["failed"], row["cut"], len(server.bodies)) == (0, 2, 6)  # an empty answer is an answer
    assert "17% (1/6)" in (out := capsys.readouterr().out) and "2 cut at the token limit" in out
    by_id = {line["id"]: line for line in kept(tmp_path)}
    assert by_id["r1"]["answer"] == "0011" and by_id["r3"]["finish_reason"] == "length"
    assert by_id["r1"]["usage"] == {"completion_tokens": 7} and by_id["r4"]["answer"] == ""


def test_several_p_give_a_row_each(serve, tmp_path, capsys):
    answer_to = {}
    for p in (0.5, 1.0):
        for r in text_examples(TextCopyConfig("repeat-structure", ("0", "1"), "first", 99, 99, p), 3, 0, "evaluation"):
            answer_to[r["messages"][0]["content"]] = r["messages"][1]["content"]
    knobs = {"kinds": ("first",), "lengths": (99,), "samples": (3,)}
    server = serve(lambda n, body: answer_to.get(body["messages"][0]["content"], "no"))
    rows = run(server, tmp_path, tasks=("uniform", "repeat-structure"), repeat_p=(0.5, 1.0), plot=True, **knobs)
    assert [(r["task"], r["repeat_p"], r["exact_match"]) for r in rows] == [
        ("uniform", None, 0),
        ("repeat-structure", 0.5, 1),
        ("repeat-structure", 1.0, 1),
    ]
    out = capsys.readouterr().out
    assert "repeat-structure, first, p 0.5" in out and "repeat-structure, first, p 1" in out
    assert (tmp_path / "out" / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    (row,) = run(server, tmp_path, tasks=("repeat-structure",), **knobs)
    assert row["repeat_p"] == 0.9 and row["exact_match"] == 0  # strings of its own


def test_records_of_a_file_go_by_task_and_kind_or_else_by_the_files_name(serve, tmp_path):
    some = [
        record(0, STRINGS[0]),
        record(3, STRINGS[3]),
        record(1, STRINGS[1], kind=None),
        record(2, STRINGS[2], "lists"),
    ]
    some[3] |= {"source": "1, 2", "messages": [some[3]["messages"][0], {"role": "assistant", "content": "[1, 2]"}]}
    some += [record(4, STRINGS[4], task=None), record(5, STRINGS[5], task=None)]
    some[4]["metadata"] = {"length": "short"}
    del some[5]["id"]
    write_jsonl(tmp_path / "mixed.jsonl", some)
    server = serve(lambda n, body: "[1.0, 2]" if place(body) == 2 else right(n, body))
    rows = run(server, tmp_path, records=str(tmp_path / "mixed.jsonl"))
    assert [(r["task"], r["kind"], r["min_length"], r["length"], r["samples"], r["exact_match"]) for r in rows] == [
        ("uniform", "first", 4, 6, 2, 1),
        ("uniform", None, 4, 4, 1, 1),
        ("lists", "first", 4, 4, 1, 1),
        ("mixed", None, 2, 6, 2, 1),
    ]
    assert {line["id"] for line in kept(tmp_path)} == {"r0", "r1", "r2", "r3", "r4", "6"}  # its line


# Requests


def test_a_request_has_what_the_config_says_and_never_the_answer(serve, tmp_path):
    turns = [
        ("system", "Be exact."),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "string 0"),
        ("assistant", "SECRET é"),
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    write_jsonl(tmp_path / "records.jsonl", [{"messages": messages}])
    server = serve(lambda n, body: "SECRET é")
    assert run(server, tmp_path)[0]["exact_match"] == 1
    limit = 2 * len("SECRET é".encode()) + 256
    body = {"model": "lab/small-model", "messages": messages[:4], "temperature": 0, "max_tokens": limit}
    assert server.bodies == [body] and server.headers[0]["path"] == "/v1/chat/completions"
    assert "Authorization" not in server.headers[0]
    extra = '{"max_tokens": null, "max_completion_tokens": 99, "reasoning_effort": "low"}'
    assert configurator.configure(EndpointConfig, argv=["--answers=x", f"--extra={extra}"]).extra == extra
    run(server, tmp_path, temperature=None, extra=extra, endpoint=server.url + "/chat/completions/")
    body = {
        "model": "lab/small-model",
        "messages": messages[:4],
        "max_completion_tokens": 99,
        "reasoning_effort": "low",
    }
    assert server.bodies[1:] == [body] and server.headers[1]["path"] == "/v1/chat/completions"
    run(server, tmp_path, temperature=0.5, max_tokens=3)
    assert (server.bodies[2]["temperature"], server.bodies[2]["max_tokens"]) == (0.5, 3)


def test_the_key_is_sent_and_written_nowhere(serve, records, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OPENAI_API_KEY", KEY + "\n")
    says = {"error": {"message": f"no quota for {KEY}, sorry"}}
    server = serve(lambda n, body: right(n, body) if place(body) else (503, json.dumps(says).encode()))
    run(server, tmp_path, retries=2)
    server.reply = lambda n, body: (403, json.dumps(says).encode())
    with pytest.raises(RuntimeError, match=r"403.*no quota for \[key\], sorry") as refused:
        run(server, tmp_path)
    assert {h["Authorization"] for h in server.headers} == {f"Bearer {KEY}"} and KEY not in str(refused.value)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"answers.jsonl", "accuracy.json"}
    assert not any(KEY in path.read_text() for path in files)
    printed = capfd.readouterr()
    assert "[key]" in printed.err and KEY not in printed.out + printed.err


def test_as_many_requests_are_under_way_as_asked_for_and_no_more(serve, tmp_path):
    write_jsonl(tmp_path / "records.jsonl", [record(i, "01") for i in range(8)])
    together, lock, now = threading.Barrier(4), threading.Lock(), [0, 0]

    def reply(_n, _body):
        with lock:
            now[0] += 1
            now[1] = max(now)
        together.wait(5)  # four, or nobody gets an answer
        time.sleep(0.02)
        with lock:
            now[0] -= 1
        return "01"

    assert run(serve(reply), tmp_path, concurrency=4, retries=1)[0]["exact_match"] == 1
    assert now == [0, 4]


# Failures


FLAWS = {
    "500": (500, b"oops"),
    "503": (503, b""),
    "408": (408, b"{}"),
    "409": (409, b"{}"),
    "429": (429, b"{}", {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
    "dropped": None,
    "dropped halfway": (200, chat("0110")[:30], {"Content-Length": 500}),
    "bad chunks": (200, b"xyz", {"Transfer-Encoding": "chunked"}),
    "no JSON": b"<html>busy</html>",
    "half of it": chat("0110")[:-9],
    "no choices": b'{"error": {"message": "overloaded"}}',
    "empty choices": b'{"choices": []}',
    "no text": b'{"choices": [{"message": {"content": ["0110"]}}]}',
    "a list": b"[]",
    "deep": b"[" * 10**5,
}


class Pauses(list):
    """In place of the event that stops all: notes the pauses, and makes none."""

    def wait(self, seconds: float) -> bool:
        self.append(seconds)
        return False


@pytest.mark.parametrize("flaw", FLAWS)
def test_what_may_go_away_is_asked_again(serve, flaw):
    server = serve(lambda n, body: FLAWS[flaw] if n < 2 else "0110")
    config = EndpointConfig(endpoint=server.url, model="m", retries=3, timeout=5.0)
    answer, why = endpoint.ask(config, record(0, "0110"), Pauses())
    assert answer["answer"] == "0110" and why == "" and len(server.bodies) == 3
    assert server.bodies == [server.bodies[0]] * 3


def test_a_server_that_is_not_there_fails_every_request(tmp_path, records, serve):
    server = serve(right)
    server.shutdown()
    server.server_close()
    (row,) = run(server, tmp_path, retries=2)
    assert (row["failed"], row["exact_match"]) == (6, 0) and kept(tmp_path) == []


def test_retry_after_is_honoured(serve, records, tmp_path):
    server = serve(lambda n, body: (429, b"slow down", {"Retry-After": "1"}) if n == 0 else right(n, body))
    assert run(server, tmp_path, concurrency=1)[0]["exact_match"] == 1
    assert server.times[1] - server.times[0] >= 1


def test_pauses_double_on_top_of_what_the_server_wants(serve, monkeypatch):
    monkeypatch.setattr(endpoint.random, "uniform", lambda low, high: high)
    wants = [{}, {"Retry-After": "2.5"}, {"Retry-After": "soon"}, {}]
    server = serve(lambda n, body: (429, b"", wants[n]))
    config = EndpointConfig(endpoint=server.url, model="m", retries=4)
    answer, why = endpoint.ask(config, record(0, "01"), pauses := Pauses())
    assert answer is None and why.startswith("status 429") and len(server.bodies) == 4
    assert pauses == pytest.approx([0, 0.01, 2.5 + 0.02, 0.04])  # none after the last


@pytest.mark.parametrize("slow", ["all of it", "piece by piece"])
def test_an_answer_beyond_the_timeout_is_asked_again(serve, records, tmp_path, slow):
    gone = threading.Event()

    def reply(n, body):
        if n == 0 and slow == "all of it":
            gone.wait(20)
        elif n == 0:  # each piece in time, all of them not
            return 200, [b" "] * 40 + [chat(right(n, body))], {"Content-Length": 40 + len(chat(right(n, body)))}
        return right(n, body)

    server = serve(reply)
    began = time.monotonic()
    (row,) = run(server, tmp_path, timeout=0.5, concurrency=1)
    gone.set()
    assert time.monotonic() - began < 10
    assert (row["exact_match"], row["failed"], len(server.bodies)) == (1, 0, 7)


def test_a_failure_counts_as_wrong_is_stated_apart_and_tried_again_next_time(serve, records, tmp_path, capfd):
    server = serve(lambda n, body: (503, b"no room") if place(body) == 3 else right(n, body))
    (row,) = run(server, tmp_path, retries=3)
    assert (row["exact_match"], row["failed"], row["samples"], row["first_errors"][3]) == (5 / 6, 1, 6, 0)
    assert server.prompts().count("string 3") == 3 and len(server.bodies) == 8
    printed = capfd.readouterr()
    assert "83% (5/6)" in printed.out and "uniform, first, 2-6: 1 of 6 failed, counted as wrong" in printed.out
    assert "1 failed, the last by status 503: no room" in printed.err
    assert sorted(line["id"] for line in kept(tmp_path)) == ["r0", "r1", "r2", "r4", "r5"]
    server.reply = right
    (row,) = run(server, tmp_path)
    assert (row["exact_match"], row["failed"]) == (1, 0) and server.prompts()[8:] == ["string 3"]


@pytest.mark.parametrize("status", [401, 302])
def test_a_refusal_stops_everything_with_the_servers_words(serve, records, tmp_path, status):
    said = json.dumps({"error": {"message": "no such\nthing here"}}).encode()
    server = serve(lambda n, body: (status, said, {"Location": server.url}) if n == 2 else right(n, body))
    with pytest.raises(RuntimeError, match=rf"{server.url}/chat/completions: status {status}: .*no such.*thing here"):
        run(server, tmp_path, concurrency=1)
    time.sleep(0.05)
    assert len(server.bodies) == 3 and len(kept(tmp_path)) == 2  # nothing after it, nothing lost from before it
    assert not (tmp_path / "out" / "accuracy.json").exists()


@pytest.mark.parametrize("status", [400, 402, 403, 404, 405, 413, 422])
def test_what_will_not_go_away_is_asked_once(serve, status):
    server = serve(lambda n, body: (status, b"not here"))
    with pytest.raises(RuntimeError, match=f"status {status}: not here; are endpoint, model and OPENAI_API_KEY right"):
        endpoint.ask(EndpointConfig(endpoint=server.url, model="m", timeout=5.0), record(0, "0110"), threading.Event())
    assert len(server.bodies) == 1


def test_a_refusal_waits_for_no_other_request(serve, records, tmp_path):
    over = threading.Event()
    server = serve(lambda n, body: (401, b"bad key") if place(body) == 3 else over.wait(20) and None)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="401: bad key"):
        run(server, tmp_path, concurrency=4)
    assert time.monotonic() - began < 5 and len(server.bodies) == 4
    over.set()


# What is kept


def test_a_restart_asks_exactly_what_is_missing(serve, records, tmp_path):
    server = serve(lambda n, body: right(n, body) if n < 3 else None)  # dies after three
    (row,) = run(server, tmp_path, retries=1, concurrency=1)
    assert (row["exact_match"], row["failed"]) == (3 / 6, 3)
    server.reply = right
    (row,) = run(server, tmp_path)
    assert row["exact_match"] == 1 and sorted(server.prompts()[6:]) == ["string 3", "string 4", "string 5"]
    assert run(server, tmp_path) == [row] and len(server.bodies) == 9  # all there: nothing is asked
    assert len(kept(tmp_path)) == len({line["key"] for line in kept(tmp_path)}) == 6


def test_an_example_of_two_rows_is_asked_once_and_other_lengths_and_samples_reuse_it(serve, tmp_path):
    server = serve(lambda n, body: "no")
    knobs = {"tasks": ("uniform",), "kinds": ("first",), "lengths": (4, "4-4"), "samples": (2,)}
    rows = run(server, tmp_path, **knobs)
    assert [row["samples"] for row in rows] == [2, 2] and len(server.bodies) == 2
    run(server, tmp_path, **knobs | {"samples": (3,), "lengths": (4, 5)})
    assert len(server.bodies) == 2 + 1 + 3 and len(set(server.prompts())) == 6


@pytest.mark.parametrize(
    "other",
    [
        {"model": "large"},
        {"temperature": 1.0},
        {"max_tokens": 9},
        {"extra": '{"top_p": 0.9}'},
        "endpoint",
        "prompt",
        "id",
    ],
)
def test_another_config_reuses_no_answer(serve, records, tmp_path, other, capfd):
    server = serve(right)
    run(server, tmp_path)
    capfd.readouterr()
    if other == "prompt":
        write_jsonl(records, [record(i, s) | {"id": f"r{5 - i}"} for i, s in enumerate(STRINGS)])
    elif other == "id":
        write_jsonl(records, [record(i, s) | {"id": f"x{i}"} for i, s in enumerate(STRINGS)])
    elif other == "endpoint":
        server = serve(right)
    (row,) = run(server, tmp_path, **other if isinstance(other, dict) else {})
    assert row["exact_match"] == 1 and len(server.bodies) == (6 if other == "endpoint" else 12)
    assert "0/6" in (bar := capfd.readouterr().err) and "6/6" in bar


def test_damage_to_the_kept_answers_is_named(serve, records, tmp_path):
    server = serve(right)
    run(server, tmp_path)
    path = tmp_path / "out" / "answers.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], '{"key": "1", "answer"\n', *lines[1:]]))
    with pytest.raises(RuntimeError, match=r"answers\.jsonl, line 2: .*mend or delete it"):
        run(server, tmp_path)
    assert len(server.bodies) == 6


@pytest.mark.parametrize("number, code", [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_kill_and_ctrl_c_leave_what_was_answered(serve, records, tmp_path, number, code):
    over = threading.Event()
    server = serve(lambda n, body: right(n, body) if n < 3 else over.wait(20) and None)  # hangs after three
    knobs = {"endpoint": server.url, "model": "lab/small-model", "records": records, "out_dir": tmp_path / "out"}
    command = [
        sys.executable,
        "endpoint.py",
        *(f"--{name}={value}" for name, value in knobs.items()),
        "--concurrency=2",
    ]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE)
    path, deadline = tmp_path / "out" / "answers.jsonl", time.monotonic() + 20
    while time.monotonic() < deadline and (
        not path.exists() or path.read_bytes().count(b"\n") < 3 or len(server.bodies) < 5
    ):
        time.sleep(0.01)
    process.send_signal(number)
    began = time.monotonic()
    errors = process.communicate(timeout=10)[1].decode()
    assert process.returncode == code and time.monotonic() - began < 8, errors
    assert "Traceback" not in errors
    over.set()
    whole = path.read_bytes()
    assert len(kept(tmp_path)) == 3
    path.write_bytes(whole + b'{"id": "r3", "key": "torn", "ans')
    asked = len(server.bodies)
    server.reply = right
    (row,) = run(server, tmp_path)
    assert row["exact_match"] == 1 and len(server.bodies) == asked + 3
    assert path.read_bytes().startswith(whole) and len(kept(tmp_path)) == 6


# Answers from elsewhere


def given(tmp_path: Path, *lines: dict | str) -> str:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (tmp_path / "theirs.jsonl").write_text(text)
    return str(tmp_path / "theirs.jsonl")


def test_answers_from_elsewhere_are_scored_and_missing_ones_have_failed(records, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(endpoint, "OPENER", None)  # no network
    turns = [{"role": "user", "content": "string 3"}, {"role": "assistant", "content": STRINGS[3]}]
    lines = [{"id": "r0", "answer": "0110"}, {"id": "r1", "answer": "1010"}, {"id": "r3", "messages": turns}]
    lines += [{"id": "r5", "answer": "0000", "finish_reason": "length"}]
    (row,) = run(None, tmp_path, answers=given(tmp_path, *lines))
    assert (row["mode"], row["run"], row["pos_encoding"]) == ("answers", "theirs", "theirs")
    assert (row["samples"], row["exact_match"], row["failed"], row["cut"]) == (6, 2 / 6, 2, 1)
    assert row["first_errors"] == [None, 3, 0, None, 0, 4]
    assert "2 of 6 failed, counted as wrong; 1 cut" in capsys.readouterr().out
    assert not (tmp_path / "out" / "answers.jsonl").exists()
    assert run(None, tmp_path, answers=given(tmp_path, *lines), model="GPT")[0]["run"] == "GPT"


def test_answers_to_our_own_strings_need_ids_that_are_their_own(tmp_path):
    knobs = {"tasks": ("uniform",), "lengths": (5,), "samples": (2,)}
    some = list(text_examples(TextCopyConfig("uniform", ("0", "1"), "first", 5, 5), 2, 0, "evaluation"))
    path = given(tmp_path, *({"id": r["id"], "answer": r["source"]} for r in some))
    assert run(None, tmp_path, answers=path, kinds=("first",), **knobs)[0]["exact_match"] == 1
    with pytest.raises(ValueError, match=f"id '{some[0]['id']}' is that of two prompts"):
        run(None, tmp_path, answers=path, **knobs)


@pytest.mark.parametrize(
    "line, named",
    [
        ({"id": "r9", "answer": "0"}, "id 'r9' is that of no prompt"),
        ({"id": "r0", "answer": "0110"}, "id 'r0' is there twice"),
        ({"id": "r1", "answer": None}, "TypeError"),
        ({"id": "r1"}, "KeyError"),
        ({"answer": "0"}, "'id'"),
        ({"id": "r1", "messages": []}, "IndexError"),
        ({"id": "r1", "messages": [{"role": "user", "content": "string 1"}]}, "'user'"),
        ('{"id": "r1", "answer": "10', "JSONDecodeError"),
        ("", "JSONDecodeError"),
        ("[1]", "expected id and answer"),
    ],
)
def test_a_line_of_answers_that_does_not_fit_is_named(records, tmp_path, line, named):
    path = given(tmp_path, {"id": "r0", "answer": "0110"}, line, {"id": "r2", "answer": "0"})
    with pytest.raises(RuntimeError, match=rf"theirs\.jsonl, line 2: .*{named}"):
        run(None, tmp_path, answers=path)


# Config


LOCAL = {"endpoint": "http://localhost:8000/v1", "model": "m"}


@pytest.mark.parametrize(
    "knobs, named",
    [
        ({}, "endpoint='': expected --endpoint=http://host/v1, or --answers=FILE"),
        (LOCAL | {"answers": "a.jsonl"}, "or --answers"),
        ({"endpoint": "http://localhost:8000/v1"}, "--model=NAME"),
        (LOCAL | {"endpoint": "localhost:8000"}, "endpoint='localhost:8000': expected a URL such as http://"),
        (LOCAL | {"endpoint": "ftp://host/v1"}, "endpoint='ftp://host/v1'"),
        (LOCAL | {"endpoint": "http://host:port/v1"}, "endpoint='http://host:port/v1'"),
        (LOCAL | {"endpoint": "http:///v1"}, "endpoint='http:///v1'"),
        (LOCAL | {"tasks": ("list",)}, r"tasks=\('list',\): expected some of imbalanced,.*lists"),
        (LOCAL | {"tasks": ()}, r"tasks=\(\)"),
        (LOCAL | {"kinds": ("last",)}, r"kinds=\('last',\): expected some of own-line"),
        (LOCAL | {"lengths": ()}, r"lengths=\(\)"),
        (LOCAL | {"lengths": ("9-8",)}, "'9-8' is neither"),
        (LOCAL | {"samples": (1, 2, 3)}, r"samples=\(1, 2, 3\)"),
        (LOCAL | {"samples": (0,)}, r"samples=\(0,\)"),
        (LOCAL | {"symbols": ("0", "0")}, "symbols"),
        (LOCAL | {"repeat_p": (0.5,)}, "repeat_p=.*--tasks=repeat-structure"),
        (LOCAL | {"repeat_p": (1.5,), "tasks": ("repeat-structure",)}, "repeat_p=1.5"),
        (LOCAL | {"records": "r.jsonl", "lengths": (3,), "eval_seed": 1}, "records='r.jsonl': .*lengths, eval_seed"),
        (LOCAL | {"concurrency": 0}, "concurrency=0"),
        (LOCAL | {"retries": 0}, "retries=0"),
        (LOCAL | {"timeout": 0.0}, "timeout=0.0"),
        (LOCAL | {"timeout": float("nan")}, "timeout=nan"),
        (LOCAL | {"max_tokens": 0}, "max_tokens=0"),
        (LOCAL | {"extra": "{low}"}, "extra='{low}': expected a JSON object"),
        (LOCAL | {"extra": "[]"}, r"extra='\[\]'"),
        (LOCAL | {"extra": '{"stream": true}'}, "extra=.*without messages, model, stream"),
    ],
)
def test_wrong_knobs_are_refused_by_name(tmp_path, knobs, named):
    with pytest.raises(ValueError, match=named):
        main(EndpointConfig(**knobs, out_dir=str(tmp_path)))


def test_files_that_are_not_there_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl"):
        main(EndpointConfig(**LOCAL, records=str(tmp_path / "nowhere.jsonl"), out_dir=str(tmp_path)))
    with pytest.raises(FileNotFoundError, match="nothing.jsonl"):
        main(EndpointConfig(answers=str(tmp_path / "nothing.jsonl"), kinds=("first",), out_dir=str(tmp_path)))


def test_every_knob_is_explained(capsys):
    with pytest.raises(SystemExit):
        configurator.configure(EndpointConfig, argv=["--help"], doc=endpoint.__doc__)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
    assert len(lines) == len(EndpointConfig.__dataclass_fields__) and all(len(line.split()) > 2 for line in lines)
