"""configurator.py: values and their order, messages, files, help, saving, locks, scripts."""

import errno
import fcntl
import math
import os
import shlex
import stat
import subprocess
import sys
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Literal, Optional

import pytest

import configurator
from configurator import atomic, build, configure, diff, lock, resolve, run_cli, save, write_json

ROOT = Path(configurator.__file__).parent
OldOptional = Optional[str]  # noqa: UP045 (the old spelling must work too)


@dataclass
class Train:
    """Training.

    A second paragraph that help leaves out.
    """

    batch_size: int = 8  # sequences in a step
    learning_rate: float = 1e-3  # peak, per step
    compile: bool = False  # torch.compile
    out_dir: str = "out"  # where a run is written
    # tokens kept back
    # for validation
    holdout: int | None = None
    resume: OldOptional = None  # path of a checkpoint
    lengths: tuple[int, ...] = (20, 320)  # of the source, in tokens
    stops: list[int] = field(default_factory=list)  # token ids "#1"
    betas: tuple[float, float] = (0.9, 0.95)  # of AdamW
    # A heading, which the blank line keeps from being a comment.

    names: tuple[str, ...] = ()
    task: Literal["copy", "pretrain"] = "copy"  # what a batch holds
    depth: int | tuple[int, ...] = 2  # layers, one number or one a stage


@dataclass(frozen=True)
class Model:
    "Model"

    # Not this line: the trailing comment counts.
    n_layer: int = 4  # one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    rope_base: float | int = 10000
    stages: str | tuple[int, ...] = "it's 1, 2"
    stop: str = "\n"
    intervals: tuple[int | str, ...] = (20,)
    level: Literal[0, 1] = 0

    def __post_init__(self):
        n_layer = self.n_layer  # not the field's comment
        if n_layer < 1:
            raise ValueError(f"n_layer = {n_layer}: expected 1 or more")


def train(*argv: str) -> Train:
    return configure(Train, argv=argv)


def one_knob(hint, **default):
    return make_dataclass("One", [("x", hint, field(**default))])


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Writes a file into a fresh working directory; nothing has been said yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/nowhere/train.py"])
    configurator._say_once.cache_clear()

    def write(text: str, name: str = "some.py") -> str:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
        return name

    return write


def start(code: str, **env: str) -> subprocess.Popen:
    """Another Python, with the names of configurator."""
    argv = [sys.executable, "-c", f"import os, time\nfrom configurator import *\n{code}"]
    env, pipe = {**os.environ, "PYTHONPATH": str(ROOT), **env}, subprocess.PIPE
    return subprocess.Popen(argv, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_instances(monkeypatch):
    assert train() == Train() == build(Train, {})
    assert configure(Model, Train, argv=["--n_layer=7", "--batch_size=3"]) == (Model(n_layer=7), Train(batch_size=3))
    assert build(Model, {"n_layer": 3, "batch_size": 9}) == Model(n_layer=3)
    monkeypatch.setattr(sys, "argv", ["train.py", "--batch_size=5"])
    assert configure(Train).batch_size == 5
    assert resolve([one_knob("float | None", default=1)], []) == {"x": 1}  # an annotation may be text
    assert repr(build(one_knob(float, default=1), {})) == "One(x=1.0)"


def test_calls_share_no_state(config):
    shared, values = [1], {"stops": [1]}
    assert configure(one_knob(list[int], default_factory=lambda: shared), argv=[config("x.append(2)")]).x == [1, 2]
    build(Train, values).stops.append(2)
    assert (shared, values) == ([1], {"stops": [1]})


GOOD = [
    ("batch_size", {"1_000": 1000, "-3": -3}),
    ("learning_rate", {"3": 3.0, "3e-4": 3e-4, "inf": math.inf, "-inf": -math.inf, "nan": math.nan}),
    ("compile", {"True": True, "true": True, "False": False, "false": False}),
    ("out_dir", {"a b,c=d": "a b,c=d", "--x=1": "--x=1", "": "", "12": "12", "None": "None", "true": "true"}),
    ("out_dir", {"'x'": "x", "'None'": "None", r"'a\nb'": "a\nb", "'x": "'x", "(1, 2)": "(1, 2)"}),
    ("holdout", {"5": 5, "None": None}),
    ("resume", {"last.pt": "last.pt", "None": None, "'None'": "None"}),
    ("lengths", {"1,2": (1, 2), "[1,2]": (1, 2), "(1, 2)": (1, 2), "(1,)": (1,), "1": (1,), "1_000,": (1000,)}),
    ("lengths", {"()": (), "[]": ()}),
    ("stops", {"1,2": [1, 2], "(1,2)": [1, 2], "7": [7]}),
    ("betas", {"0,inf": (0.0, math.inf)}),
    ("names", {"a": ("a",), "1,None": ("1", "None"), "[a, b c]": ("a", "b c"), "'a,b','c'": ("a,b", "c")}),
    ("names", {"'a',b": ("a", "b"), "'a',1": ("a", "1"), "a,": ("a",), " (a, b) ": ("a", "b")}),
    ("task", {"pretrain": "pretrain"}),
    ("depth", {"3": 3, "3,4": (3, 4), "(3,)": (3,)}),
    ("rope_base", {"3": 3, "3.5": 3.5}),
    ("stages", {"20": (20,), "1,2": (1, 2), "all": "all", "'20'": "20"}),
    ("intervals", {"20,26-50": (20, "26-50")}),
    ("level", {"1": 1}),
]


@pytest.mark.parametrize("name, text, value", [(name, *pair) for name, pairs in GOOD for pair in pairs.items()])
def test_value_from_the_command_line(name, text, value):
    assert repr(resolve([Train, Model], [f"--{name}={text}"])[name]) == repr(value)  # 1, 1.0 and True are equal


OWN = "import math\nfrom pathlib import Path\n_x = 3\ndef three(): return _x\nclass C: pass\n"
IN_FILES = {
    "lengths = [1, 2]": (1, 2),
    "stops = (1,)": [1],
    "depth = [1]": (1,),
    "out_dir = 'é'  # run with --pos_encoding=2d-rope": "é",  # which declares no encoding
    "batch_size = 1; del batch_size": 8,
    f"batch_size = 5\n{OWN}batch_size *= three() + math.floor(1.5)": 20,
}


@pytest.mark.parametrize("text, value", IN_FILES.items())
def test_value_from_a_file(config, text, value):
    assert repr(getattr(train(config(text)), text.split()[0])) == repr(value)


def test_later_ones_win(config, tmp_path):
    assert train("--holdout=None", "--holdout=4", "--holdout=5").holdout == 5
    a, b = config("batch_size = 2\nholdout = 2", "a.py"), config("batch_size *= 3\nout_dir = __file__", "b.py")
    got = train("--batch_size=1", a, b, "--holdout=3")
    assert (got.batch_size, got.holdout, got.out_dir) == (6, 3, str(tmp_path / "b.py"))
    text = "n_layer = depth + 2\nfor _i in range(2):\n    batch_size = _i\nlearning_rate *= 1"
    given = {"task": "elsewhere"}
    configure(Model, Train, argv=[config(text), "--compile=False"], given=given)
    assert given.keys() == {"task", "n_layer", "batch_size", "learning_rate", "compile"}  # compile has its default


def test_the_working_directory_comes_before_the_scripts_folder(config, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "scripts" / "train.py")])
    config("batch_size = 1", "scripts/some.py")
    assert train("some.py").batch_size == 1
    assert train(config("batch_size = 2")).batch_size == 2
    monkeypatch.setattr(sys, "argv", ["train.py"])  # they are the same: named once
    with pytest.raises(
        FileNotFoundError, match=f"looked for {tmp_path}/x.py and {ROOT}/x.py; the nearest name there is "
    ):
        train("x.py")
    assert configurator._find("config/toy_copy.py") == ROOT / "config" / "toy_copy.py"  # beside configurator.py


WRONG = [  # knob, what is expected, wrong texts on the command line, wrong Python in a file
    ("batch_size", "int", ["8.0", "1e6", "True", "None", "", "eight", "1,2"], ["True", "1.0", "'8'"]),
    ("learning_rate", "float", ["fast", "True"], ["'1'", "True"]),
    ("compile", "True or False", ["1", "yes"], ["1", "'True'"]),
    ("out_dir", "str", [], ["3", "None"]),
    ("holdout", "int | None", ["none"], ["1.5"]),
    ("lengths", "tuple[int, ...]", ["", "1,x", "1.5", "None"], ["20", "(1, True)"]),
    ("stops", "list[int]", ["1,True"], ["1"]),
    ("betas", "tuple[float, float]", ["0.9", "1,2,3"], ["(1,)"]),
    ("names", "tuple[str, ...]", [""], ["'a'"]),
    ("task", "Literal['copy', 'pretrain']", ["finetune"], ["'finetune'"]),
    ("depth", "int | tuple[int, ...]", ["x"], ["'x'"]),
    ("level", "Literal[0, 1]", ["True"], ["True"]),
]


@pytest.mark.parametrize("name, kind, texts, lines", WRONG)
def test_wrong_values(config, tmp_path, name, kind, texts, lines):
    cases = [(f"--{name}={text}", f"{text!r} (from the command line)") for text in texts]
    cases += [(config(f"{name} = {line}", f"{line}.py"), f"{line} (from {tmp_path}/{line}.py)") for line in lines]
    for item, shown in cases:
        with pytest.raises(ValueError) as caught:
            resolve([Train, Model], [item])
        assert str(caught.value) == f"{name} = {shown}: expected {kind}"


UNKNOWN, NEITHER = "unknown name, the nearest known one is", "is neither --name=value nor a config file (*.py):"
MESSAGES = [  # the command line, what some.py holds, how the message begins
    ("--batch-size=3", "", f"--batch-size: {UNKNOWN} --batch_size; --help lists all"),
    ("--LENGTHS=3", "", f"--LENGTHS: {UNKNOWN} --lengths; --help lists all"),
    ("--batch_size", "", "--batch_size has no value: write --batch_size=... (int)"),
    ("--compile", "", "--compile has no value: write --compile=... (True or False)"),
    ("-steps=3", "", f"'-steps=3' {NEITHER} did you mean --steps=3?"),
    ("some.yaml", "", f"'some.yaml' {NEITHER} --help lists the names"),
    ("--n_layer=0", "", "n_layer = 0: expected 1 or more"),
    ("soe.py", "", f"no config file soe.py: looked for HERE/soe.py and /nowhere/soe.py and {ROOT}/soe.py; the nearest"),
    ("x/y.py", "", "no config file x/y.py: looked for HERE/x/y.py and /nowhere/x/y.py"),
    ("some.py", "def batch_size(): pass", "batch_size = <function batch_size at "),
    ("some.py", "batch_siz = 1", "HERE/some.py: unknown name batch_siz, the nearest known one is batch_size; a name"),
    ("some.py", "batch_size = 1\nint(\n    'x')", "HERE/some.py, line 2: ValueError: invalid literal for int()"),
    ("some.py", "batch_size = 1\nholdout = = 2", "HERE/some.py, line 2: SyntaxError: "),
]


@pytest.mark.parametrize("item, text, message", MESSAGES)
def test_messages(config, tmp_path, item, text, message):
    config(text)
    with pytest.raises(FileNotFoundError if message.startswith("no config") else ValueError) as caught:
        configure(Train, Model, argv=[item])
    assert str(caught.value).startswith(message.replace("HERE", str(tmp_path)))


def test_messages_for_programmers():
    with pytest.raises(ValueError, match="^x is in One and in a class before it: rename one$"):
        configure(one_knob(int, default=1), one_knob(int, default=1), argv=[])
    with pytest.raises(ValueError, match=r"^x = 1.5 \(from One's default\): expected int$"):
        configure(one_knob(int, default=1.5), argv=[])
    with pytest.raises(ValueError, match=r"^n_layer = '3' \(from values\): expected int$"):
        build(Model, {"n_layer": "3"})
    for unknown in (dict, dict | None):
        with pytest.raises(TypeError, match="dict.*does not know this type"):
            configure(one_knob(unknown, default=None), argv=[])


HELP = """\
What it does.

Training.
  --batch_size=8             sequences in a step
  --learning_rate=0.001      peak, per step
  --compile=False            torch.compile
  --out_dir=out              where a run is written
  --holdout=None             tokens kept back for validation
  --resume=None              path of a checkpoint
  --lengths=20,320           of the source, in tokens
  --stops='[]'               token ids "#1"
  --betas=0.9,0.95           of AdamW
  --names='()'
  --task=copy                what a batch holds
  --depth=2                  layers, one number or one a stage

Model
  --n_layer=4                one two three four five six seven eight nine ten eleven twelve thirteen fourteen
                             fifteen sixteen
  --rope_base=10000
  --stages='it'"'"'s 1, 2'
  --stop=''"'"'\\n'"'"''
  --intervals='(20,)'
  --level=0
"""


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help(capsys, flag):
    with pytest.raises(SystemExit) as caught:
        configure(Train, Model, argv=["--batch_size=9", flag], doc="  What it does.\n")
    assert (caught.value.code, capsys.readouterr().out) == (0, HELP)
    argv = [shlex.split(line.replace('"#1"', ""))[0] for line in HELP.splitlines() if line.startswith("  --")]
    assert configure(Train, Model, argv=argv) == (Train(), Model())  # a shell reads each value as it is shown
    with pytest.raises(SystemExit):
        configure(one_knob(int, default=1), argv=["-h"])
    assert capsys.readouterr().out.endswith("\n  --x=1\n")  # no source, no comments


SAVED = [Train(out_dir=text, resume=text) for text in ["", 'it\'s "both"', "a\nb\r\t\\", "x=1", "#é\u2028", "None"]]
SAVED += [Train(2, 1e-5, True, "o", 3, "r", (7,), [1, 2], (0.1, math.inf), ("n, 'm'",), "pretrain", (1,))]
SAVED += [Train(learning_rate=math.nan, betas=(-math.inf, math.nan)), Train()]


@pytest.mark.parametrize("before", SAVED)
def test_saved_configs_come_back(config, before):
    save("saved.py", before, Model(n_layer=9))
    after = configure(Train, Model, argv=["--holdout=7", "saved.py"])
    assert repr(after) == repr((before, Model(n_layer=9)))
    assert Path("saved.py").read_text("utf-8").splitlines()[-6:-4] == ["n_layer = 9", "rope_base = 10000"]
    with pytest.raises(ValueError, match=r"^batch_size = 'many' \(from save\): expected int$"):
        save("other.py", Train(batch_size="many"))
    assert os.listdir() == ["saved.py"]


def test_diff_lists_only_what_differs():
    there, here = {"lr": 0.002, "old": 1, "same": math.nan}, {"same": math.nan, "lr": 0.001, "new": "x"}
    lines = ["lr: 0.002 there, 0.001 here", "old: 1 there, absent here", "new: absent there, 'x' here"]
    assert diff(there, here) == lines


CANNOT = "a.json: cannot be written ({}), nothing was replaced: make room or mend that, then run the same command again"
FAILURES = [  # what is raised while a.json is written, what the user reads
    (OSError(errno.ENOSPC, "No space", "x"), CANNOT.format(f"[Errno {errno.ENOSPC}] No space: 'x'")),
    (OSError("of torch"), CANNOT.format("of torch")),
    (KeyboardInterrupt("as it is"), "as it is"),
]


@pytest.mark.parametrize("error, message", FAILURES)
def test_a_failure_leaves_the_old_file(config, monkeypatch, error, message):
    def fail(*_):
        raise error

    write_json("a.json", {"a": [1, "é"]})
    with pytest.raises((RuntimeError, KeyboardInterrupt)) as caught:
        with atomic("a.json") as file:
            file.write(b"new")
            fail()
    assert str(caught.value) == message
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        write_json("a.json", 2)
    assert os.listdir() == ["a.json"] and Path("a.json").read_text() == '{\n "a": [\n  1,\n  "\\u00e9"\n ]\n}\n'


@pytest.mark.parametrize("refused, code", [("all", errno.EINVAL), ("all", errno.ENOTSUP), ("folders", errno.EIO)])
def test_a_file_system_without_fsync(config, monkeypatch, capsys, refused, code):
    flushed = []

    def refuse(handle: int) -> None:
        flushed.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        if refused == "all" or flushed[-1] == "folder":
            raise OSError(code, "Refused")

    monkeypatch.setattr(os, "fsync", refuse)
    write_json("new/a.json", 1)
    write_json("new/a.json", 2)
    assert (Path("new/a.json").read_text(), flushed) == ("2\n", ["file", "folder"] * 2)
    said = "no fsync on this file system (Refused): a power cut may lose the newest files\n"
    assert capsys.readouterr().err == (said if refused == "all" else "")


def test_two_writers_of_one_path(config):
    with atomic("a") as one, atomic("a") as two:
        one.write(b"1" * 2**21)
        two.write(b"2" * 2**20)
    code = "for _ in range(30):\n    with atomic('a') as file:\n        file.write(b'%d' * %d)"
    writers = [start(code % (digit, 2**20 + digit)) for digit in (3, 4)]
    wholes = {b"1" * 2**21, b"3" * (2**20 + 3), b"4" * (2**20 + 4)}
    while any(writer.poll() is None for writer in writers):
        assert Path("a").read_bytes() in wholes
    assert [writer.communicate()[1] for writer in writers] == ["", ""] and os.listdir() == ["a"]


def test_a_lock_lasts_as_long_as_its_process(config):
    holder = start("held = lock('run')\nprint(flush=True)\ntime.sleep(60)")
    holder.stdout.readline()
    config("", "run/a.1-0123abcd.tmp")
    config("", "run/my.tmp")
    with pytest.raises(ValueError) as caught:
        lock("run")
    who = f"process {holder.pid} on {os.uname().nodename}"
    assert str(caught.value) == f"run is in use by {who}: wait for it, stop it, or choose another --out_dir"
    assert sorted(os.listdir("run")) == [".lock", "a.1-0123abcd.tmp", "my.tmp"]
    holder.kill()  # -9
    holder.wait()
    with lock("run"):
        assert sorted(os.listdir("run")) == [".lock", "my.tmp"]  # which nobody but `atomic` names so
        with pytest.raises(ValueError, match=f"^run is in use by process {os.getpid()} on .*choose another --out_dir$"):
            lock("run")
    with pytest.warns(ResourceWarning):
        lock("run")  # free again, and once more as nobody keeps it
    lock("run").close()
    holder.communicate()


def test_a_folder_that_cannot_be_locked(config, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(errno.ENOTSUP, "Refused")

    with pytest.raises(RuntimeError, match="^a.tmp/.lock: cannot be written"):
        lock(config("", "a.tmp"))
    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock("."), lock("."):
        assert "a.tmp" in os.listdir()  # it may be another run's
    said = f"no file locks here ([Errno {errno.ENOTSUP}] Refused): take care that no two runs have the same --out_dir\n"
    assert capsys.readouterr().err == said


HINT, ASK = "(NANO2D_TRACEBACK=1 shows where)", "ask for less at once, such as fewer samples or a smaller batch"
ENDINGS = [  # what a script raises, exit status, what is said
    (ValueError("no"), 2, "error: no\n"),
    (RuntimeError("no"), 2, f"error: no {HINT}\n"),
    (MemoryError("9 GiB"), 2, f"error: not enough memory: {ASK} (MemoryError('9 GiB')) {HINT}\n"),
    (KeyboardInterrupt(), 130, ""),
    (ZeroDivisionError("not a user's"), None, ""),
]


@pytest.mark.parametrize("error, status, said", ENDINGS)
def test_run_cli(capsys, monkeypatch, error, status, said):
    def run() -> None:
        raise error

    run_cli(lambda: print("done"))
    monkeypatch.setenv("NANO2D_TRACEBACK", "")
    with pytest.raises(SystemExit if status else ZeroDivisionError) as caught:
        run_cli(run)
    out, err = capsys.readouterr()
    assert (getattr(caught.value, "code", None), out.strip(), err) == (status, "done", said)
    monkeypatch.setenv("NANO2D_TRACEBACK", "1")
    with pytest.raises(SystemExit if status == 130 else type(error)):
        run_cli(run)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("run", ["print('x')", "configure(argv=['-h'], doc='x')"])
def test_output_that_nobody_reads(run, unbuffered):
    code = f"run_cli(lambda: (input(), {run}))"
    with start(code, PYTHONUNBUFFERED=unbuffered, NANO2D_TRACEBACK="") as process:
        process.stdout.close()
        process.stdin.write("now\n")
        process.stdin.close()
        assert (process.wait(60), process.stderr.read()) == (141, "")


def test_a_knob_that_would_do_nothing_is_refused_where_a_person_typed_it(config):
    def used(*argv: str) -> None:
        given: dict[str, str] = {}
        configs = configure(Model, Train, argv=argv, given=given)
        configurator.check_used(given, {"n_layer": "deep models"}, *configs)

    used(config("n_layer = 5"))  # a file serves many runs
    used(f"--n_layer={Model().n_layer}")  # its default
    with pytest.raises(ValueError, match="^--n_layer=5 would do nothing here, it is for deep models: leave it out$"):
        used(config("n_layer = 3"), "--n_layer=5")
