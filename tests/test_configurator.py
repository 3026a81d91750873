"""configurator.py: order, types, refusals, files, help, saving. Each test states the value that must come out."""

import math
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Optional

import pytest

import configurator
from configurator import build, configure, diff, resolve, run_cli, save

SOURCE = Path(configurator.__file__)
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
    betas: tuple[float, float] = (
        0.9,
        0.95,
    )  # of AdamW
    # A heading, which the blank line keeps from being a comment.

    names: tuple[str, ...] = ()
    task: Literal["copy", "pretrain"] = "copy"  # what a batch holds
    depth: int | tuple[int, ...] = 2  # layers, one number or one a stage


@dataclass(frozen=True)
class Model:
    """The decoder."""

    # Not this line: the trailing comment counts.
    n_layer: int = 4  # blocks
    rope_base: float | int = 10000  # of the slowest frequency

    def __post_init__(self):
        n_layer = self.n_layer  # not the field's comment
        if n_layer < 1:
            raise ValueError(f"n_layer = {n_layer}: expected 1 or more")


def train(*argv: str) -> Train:
    return configure(Train, argv=argv)


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Writes a config file into a fresh working directory."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "some.py") -> str:
        Path(name).write_text(text)
        return name

    return write


def python(*argv: object, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, *map(str, argv)]
    return subprocess.run(argv, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, timeout=60)


def script(folder: Path, body: str) -> Path:
    """A script beside a copy of configurator.py."""
    folder.mkdir(exist_ok=True)
    shutil.copy(SOURCE, folder)
    path = folder / "script.py"
    path.write_text(body)
    return path


# --- Instances ---


def test_defaults_without_arguments():
    assert train() == Train()


def test_one_instance_per_class_in_order():
    model, tr = configure(Model, Train, argv=["--n_layer=7", "--batch_size=3"])
    assert (model, tr) == (Model(n_layer=7), Train(batch_size=3))


def test_argv_is_the_command_line_by_default(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "--batch_size=5"])
    assert configure(Train).batch_size == 5


def test_resolve_gives_a_flat_dict():
    assert resolve([Model], ["--n_layer=2"]) == {"n_layer": 2, "rope_base": 10000}


def test_calls_share_no_state():
    train().stops.append(1)
    assert train().stops == []


def test_a_file_cannot_change_defaults_in_place(config):
    @dataclass
    class Listed:
        stops: list[int] = field(default_factory=lambda: SHARED)

    SHARED = [1]
    assert configure(Listed, argv=[config("stops.append(2)")]).stops == [1, 2]
    assert SHARED == [1]


def test_post_init_errors_pass_through():
    with pytest.raises(ValueError, match="^n_layer = 0: expected 1 or more$"):
        configure(Model, argv=["--n_layer=0"])


def test_the_same_field_in_two_classes_names_both():
    @dataclass
    class Other:
        n_layer: int = 1

    with pytest.raises(ValueError, match="n_layer is in both Model and Other"):
        configure(Model, Other, argv=[])


def test_defaults_are_checked():
    @dataclass
    class Wrong:
        steps: int = 1.5

    with pytest.raises(ValueError, match=r"steps = 1.5 \(from Wrong's default\): expected int"):
        configure(Wrong, argv=[])


def test_defaults_are_converted():
    @dataclass
    class Whole:
        learning_rate: float = 1

    assert repr(configure(Whole, argv=[])) == repr(build(Whole, {})) == repr(Whole(1.0))


def test_annotations_as_strings():
    @dataclass
    class Stringy:
        steps: "int | None" = None

    assert configure(Stringy, argv=["--steps=3"]).steps == 3


def test_an_annotation_it_does_not_know():
    @dataclass
    class Strange:
        table: dict = field(default_factory=dict)

    with pytest.raises(TypeError, match="dict"):
        configure(Strange, argv=[])


# --- Values on the command line ---

GOOD = [
    ("batch_size=1_000", 1000),
    ("batch_size=-3", -3),
    ("learning_rate=3", 3.0),
    ("learning_rate=3e-4", 3e-4),
    ("learning_rate=inf", math.inf),
    ("learning_rate=-inf", -math.inf),
    ("compile=True", True),
    ("compile=true", True),
    ("compile=False", False),
    ("compile=false", False),
    ("out_dir=a b,c=d", "a b,c=d"),
    ("out_dir=--x=1", "--x=1"),
    ("out_dir=", ""),
    ("out_dir=12", "12"),
    ("out_dir=None", "None"),
    ("out_dir=true", "true"),
    ("out_dir='x'", "x"),
    ("out_dir='None'", "None"),
    (r"out_dir='a\nb'", "a\nb"),
    ("out_dir='x", "'x"),
    ("out_dir='a' 'b'", "'a' 'b'"),
    ("out_dir='a' # b", "'a' # b"),
    ("out_dir=(1, 2)", "(1, 2)"),
    ("holdout=5", 5),
    ("holdout=None", None),
    ("resume=last.pt", "last.pt"),
    ("resume=None", None),
    ("resume='None'", "None"),
    ("lengths=1,2", (1, 2)),
    ("lengths=[1,2]", (1, 2)),
    ("lengths=(1, 2)", (1, 2)),
    ("lengths=(1,)", (1,)),
    ("lengths=1", (1,)),
    ("lengths=1_000,", (1000,)),
    ("lengths=()", ()),
    ("lengths=[]", ()),
    ("stops=1,2", [1, 2]),
    ("stops=(1,2)", [1, 2]),
    ("stops=7", [7]),
    ("betas=0,inf", (0.0, math.inf)),
    ("names=a", ("a",)),
    ("names=1,None", ("1", "None")),
    ("names=[a, b c]", ("a", "b c")),
    ("names='a,b','c'", ("a,b", "c")),
    ("names='a',b", ("a", "b")),
    ("names='a',1", ("a", "1")),
    ("names=a,", ("a",)),
    ("names= (a, b) ", ("a", "b")),
    ("task=pretrain", "pretrain"),
    ("depth=3", 3),
    ("depth=3,4", (3, 4)),
    ("depth=(3,)", (3,)),
]


@pytest.mark.parametrize("item, value", GOOD, ids=[item for item, _ in GOOD])
def test_value_from_the_command_line(item, value):
    got = getattr(train(f"--{item}"), item.split("=")[0])
    assert (got, repr(got)) == (value, repr(value))  # repr: 1, 1.0 and True are equal


def test_nan_from_the_command_line():
    assert math.isnan(train("--learning_rate=nan").learning_rate)


BAD = [
    "batch_size=8.0",
    "batch_size=True",
    "batch_size=None",
    "batch_size=",
    "batch_size=eight",
    "batch_size=1,2",
    "learning_rate=fast",
    "learning_rate=True",
    "compile=1",
    "compile=yes",
    "holdout=none",
    "lengths=",
    "lengths=1,x",
    "lengths=1.5",
    "lengths=None",
    "stops=1,True",
    "betas=0.9",
    "betas=1,2,3",
    "names=",
    "names='a,b',c",
    "task=finetune",
    "depth=x",
]


@pytest.mark.parametrize("item", BAD)
def test_wrong_value_from_the_command_line(item):
    name, _, text = item.partition("=")
    with pytest.raises(ValueError) as caught:
        train(f"--{item}")
    assert str(caught.value).startswith(f"{name} = {text!r} (from the command line): expected ")


def test_wrong_value_says_what_was_expected():
    wanted = {
        "batch_size=x": "int",
        "compile=1": "True or False",
        "holdout=x": "int | None",
        "lengths=x": "tuple[int, ...]",
        "task=x": "Literal['copy', 'pretrain']",
    }
    for item, kind in wanted.items():
        with pytest.raises(ValueError) as caught:
            train(f"--{item}")
        assert str(caught.value).endswith(f": expected {kind}")


def test_a_union_keeps_the_type_that_is_given():
    assert repr(configure(Model, argv=["--rope_base=3"]).rope_base) == "3"


@pytest.mark.parametrize("text, value", [("20", (20,)), ("1,2", (1, 2)), ("all", "all"), ("'20'", "20")])
def test_a_union_with_str_takes_text_last(text, value):
    @dataclass
    class Stages:
        stages: str | tuple[int, ...] = "all"

    assert configure(Stages, argv=[f"--stages={text}"]).stages == value


def test_a_choice_is_of_its_own_type():
    @dataclass
    class Choice:
        level: Literal[0, 1] = 0

    assert configure(Choice, argv=["--level=1"]).level == 1
    with pytest.raises(ValueError, match="expected Literal"):
        configure(Choice, argv=["--level=True"])


def test_a_field_outside_init_is_no_knob():
    @dataclass
    class Derived:
        steps: int = 1
        twice: int = field(init=False, default=2)

    assert resolve([Derived], []) == {"steps": 1}


def test_later_items_win():
    assert train("--batch_size=1", "--batch_size=2").batch_size == 2


def test_none_and_back():
    assert train("--holdout=None", "--holdout=4").holdout == 4


@pytest.mark.parametrize(
    "item, near", [("batchsize=3", "batch_size"), ("batch-size=3", "batch_size"), ("LENGTHS=3", "lengths")]
)
def test_typo_on_the_command_line(item, near):
    with pytest.raises(ValueError, match=f"^--{item.split('=')[0]}: unknown name, the nearest known one is --{near}$"):
        train(f"--{item}")


@pytest.mark.parametrize(
    "name, forms",
    [
        ("batch_size", "--batch_size=8"),
        ("compile", "--compile=True or --compile=False"),
        ("lengths", "--lengths=20,320"),
    ],
)
def test_a_name_without_a_value_shows_the_form(name, forms):
    with pytest.raises(ValueError) as caught:
        train(f"--{name}")
    assert str(caught.value) == f"--{name} has no value: write {forms}"


@pytest.mark.parametrize("item, hint", [("-steps=3", ", did you mean --steps=3?"), ("-x", ""), ("some.yaml", "")])
def test_neither_file_nor_override(item, hint):
    with pytest.raises(ValueError) as caught:
        train(item)
    assert str(caught.value) == f"{item!r} is neither --name=value nor a config file (*.py){hint}"


# --- Config files ---


def test_items_apply_from_left_to_right(config):
    name = config("batch_size = 2\nholdout = 2")
    got = train("--batch_size=1", name, "--holdout=3")
    assert (got.batch_size, got.holdout) == (2, 3)


def test_two_files(config):
    got = train(config("batch_size = 1\nholdout = 1", "a.py"), config("batch_size = 2", "b.py"))
    assert (got.batch_size, got.holdout) == (2, 1)


def test_a_file_computes_from_earlier_values(config):
    assert train("--batch_size=3", config("batch_size *= 2")).batch_size == 6


def test_a_file_knows_its_own_path(config, tmp_path):
    assert train(config("out_dir = __file__")).out_dir == str(tmp_path / "some.py")


def test_a_file_is_read_as_utf8(config, tmp_path):
    (tmp_path / "utf8.py").write_bytes("out_dir = 'é'".encode())
    assert train("utf8.py").out_dir == "é"


OWN = """
import math
from pathlib import Path
_x = 3
def three(): return _x
class C: pass
batch_size = three() + math.floor(1.5)
"""


def test_a_file_has_names_of_its_own(config):
    assert train(config(OWN)).batch_size == 4


@pytest.mark.parametrize(
    "line, value",
    [
        ("learning_rate = 1", 1.0),
        ("lengths = [1, 2]", (1, 2)),
        ("stops = (1,)", [1]),
        ("resume = 'x'", "x"),
        ("depth = [1]", (1,)),
    ],
)
def test_value_from_a_file(config, line, value):
    assert repr(getattr(train(config(line)), line.split()[0])) == repr(value)


@pytest.mark.parametrize(
    "line",
    [
        "batch_size = True",
        "batch_size = 1.0",
        "batch_size = '8'",
        "compile = 1",
        "compile = 'True'",
        "learning_rate = '1'",
        "learning_rate = True",
        "out_dir = 3",
        "out_dir = None",
        "lengths = 20",
        "lengths = (1, True)",
        "betas = (1,)",
        "task = 'finetune'",
    ],
)
def test_wrong_value_from_a_file(config, tmp_path, line):
    name, value = line.split(" = ")
    with pytest.raises(ValueError) as caught:
        train(config(line))
    assert str(caught.value).startswith(f"{name} = {eval(value)!r} (from {tmp_path / 'some.py'}): expected ")


def test_a_knob_is_not_a_function(config):
    with pytest.raises(ValueError, match="^batch_size = <function"):
        train(config("def batch_size(): pass"))


def test_typo_in_a_file(config, tmp_path):
    with pytest.raises(ValueError) as caught:
        train(config("learning_rat = 1"))
    hint = "the nearest known one is learning_rate; a name of the file's own starts with _"
    assert str(caught.value) == f"{tmp_path / 'some.py'}: unknown name learning_rat, {hint}"


def test_an_exception_in_a_file_names_its_line(config, tmp_path):
    with pytest.raises(ValueError) as caught:
        train(config("import math\nbatch_size = 1\nmath.floor(\n    'x')\n"))
    assert str(caught.value).startswith(f"{tmp_path / 'some.py'}, line 3: TypeError: ")
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_file_that_does_not_parse_names_its_line(config, tmp_path):
    with pytest.raises(ValueError) as caught:
        train(config("batch_size = 1\nholdout = = 2"))
    assert str(caught.value).startswith(f"{tmp_path / 'some.py'}, line 2: SyntaxError: ")


def test_the_working_directory_comes_before_the_scripts_folder(config, tmp_path, monkeypatch):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "some.py").write_text("batch_size = 1")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "scripts" / "train.py")])
    assert train("some.py").batch_size == 1
    assert train(config("batch_size = 2")).batch_size == 2


def test_a_missing_file_says_where_it_looked_and_what_is_there(config, tmp_path, monkeypatch):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "toy_copy.py").touch()
    monkeypatch.setattr(sys, "argv", ["/nowhere/train.py"])
    with pytest.raises(FileNotFoundError) as caught:
        train("config/toy_cpy.py")
    looked = f"{tmp_path}/config/toy_cpy.py and /nowhere/config/toy_cpy.py"
    assert str(caught.value) == f"no config file config/toy_cpy.py: looked for {looked}; near names there: toy_copy.py"


def test_a_missing_file_names_a_folder_once(config, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(FileNotFoundError) as caught:
        train("x.py")
    assert str(caught.value) == f"no config file x.py: looked for {tmp_path}/x.py; near names there: none"


def test_a_script_finds_its_config_from_another_working_directory(tmp_path):
    body = """
from dataclasses import dataclass
from configurator import configure

@dataclass
class C:
    steps: int = 1

print(configure(C))
"""
    path = script(tmp_path / "repo", body)
    (tmp_path / "repo" / "config").mkdir()
    (tmp_path / "repo" / "config" / "short.py").write_text("steps = 2")
    (tmp_path / "elsewhere").mkdir()
    ran = python(path, "config/short.py", cwd=tmp_path / "elsewhere")
    assert (ran.stdout, ran.stderr) == ("C(steps=2)\n", "")


# --- save, build, diff ---

TEXTS = ["", 'it\'s "both"', "a\nb\r\t\\", "x=1, y=2", "#é\u2028", "None"]


@pytest.mark.parametrize("text", TEXTS)
def test_saved_strings_come_back(config, text):
    save("saved.py", Train(out_dir=text, resume=text, names=(text, text)))
    assert train("saved.py") == Train(out_dir=text, resume=text, names=(text, text))


def test_saved_configs_come_back(config):
    before = Train(2, 1e-5, True, "o", 3, "r", (7,), [1, 2], (0.1, math.inf), ("n",), "pretrain", (1,))
    save("saved.py", before, Model(n_layer=9))
    assert configure(Train, Model, argv=["saved.py"]) == (before, Model(n_layer=9))


def test_saved_none_overrides(config):
    save("saved.py", Train())
    assert train("--holdout=3", "saved.py").holdout is None


def test_saved_nan_comes_back(config):
    save("saved.py", Train(learning_rate=math.nan, betas=(-math.inf, math.nan)))
    assert repr(train("saved.py")) == repr(Train(learning_rate=math.nan, betas=(-math.inf, math.nan)))


def test_saved_file_is_a_line_a_knob(config):
    save("saved.py", Model(n_layer=9))
    assert Path("saved.py").read_text() == "n_layer = 9\nrope_base = 10000\n"


def test_save_refuses_what_could_not_be_read_back(config):
    with pytest.raises(ValueError, match="batch_size"):
        save("saved.py", Train(batch_size="many"))
    assert not Path("saved.py").exists()


def test_save_leaves_the_old_file_when_it_fails(config, monkeypatch):
    save("saved.py", Model(n_layer=1))

    def full(_: int) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RuntimeError, match=r"saved.py: cannot be written.*\(no space\)"):
        save("saved.py", Model(n_layer=2))
    assert os.listdir() == ["saved.py"]
    assert configure(Model, argv=["saved.py"]) == Model(n_layer=1)


def test_a_folder_that_cannot_be_flushed_does_no_harm(config, monkeypatch):
    flush = os.fsync

    def files_alone(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError("a folder")
        flush(fd)

    monkeypatch.setattr(os, "fsync", files_alone)
    save("saved.py", Model(n_layer=2))
    assert configure(Model, argv=["saved.py"]) == Model(n_layer=2)


def test_save_leaves_nothing_else(config):
    save("saved.py", Model())
    assert os.listdir() == ["saved.py"]


def test_build_picks_its_own_names():
    assert build(Model, {"n_layer": 3, "batch_size": 9}) == Model(n_layer=3)


def test_build_keeps_defaults_of_missing_names():
    assert build(Model, {}) == Model()


def test_build_checks_types():
    with pytest.raises(ValueError, match=r"n_layer = '3' \(from values\): expected int"):
        build(Model, {"n_layer": "3"})


def test_build_makes_lists_of_its_own():
    values = {"stops": [1]}
    build(Train, values).stops.append(2)
    assert values == {"stops": [1]}


def test_diff_lists_only_what_differs():
    there, here = {"lr": 0.002, "old": 1, "same": math.nan}, {"same": math.nan, "lr": 0.001, "new": "x"}
    lines = ["lr: 0.002 there, 0.001 here", "old: 1 there, absent here", "new: absent there, 'x' here"]
    assert diff(there, here) == lines


# --- Help ---


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_knob_with_default_and_comment(capsys, flag):
    with pytest.raises(SystemExit) as caught:
        configure(Train, Model, argv=["--batch_size=9", flag], doc="  What it does.\n")
    assert caught.value.code == 0
    assert capsys.readouterr().out == HELP


HELP = """\
What it does.

Training.
  --batch_size=8          sequences in a step
  --learning_rate=0.001   peak, per step
  --compile=False         torch.compile
  --out_dir=out           where a run is written
  --holdout=None          tokens kept back for validation
  --resume=None           path of a checkpoint
  --lengths=20,320        of the source, in tokens
  --stops='[]'            token ids "#1"
  --betas=0.9,0.95        of AdamW
  --names='()'
  --task=copy             what a batch holds
  --depth=2               layers, one number or one a stage

The decoder.
  --n_layer=4             blocks
  --rope_base=10000       of the slowest frequency
"""


def test_help_wraps_long_comments_under_their_column(capsys):
    @dataclass
    class Wordy:
        # one two three four five six seven eight nine ten eleven twelve thirteen fourteen
        # fifteen sixteen seventeen
        steps: int = 1

    with pytest.raises(SystemExit):
        configure(Wordy, argv=["-h"])
    *_, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("  --steps=1   one two ") and first.endswith(" sixteen") and len(first) <= 115
    assert second == " " * len("  --steps=1   ") + "seventeen"


def test_help_without_source_has_no_comments(capsys):
    space: dict = {"dataclass": dataclass, "__name__": __name__}
    exec("@dataclass\nclass Made:\n    steps: int = 1  # unseen", space)
    with pytest.raises(SystemExit):
        configure(space["Made"], argv=["-h"])
    assert capsys.readouterr().out == "\nMade\n  --steps=1\n"


def test_help_shows_values_as_a_shell_takes_them(capsys):
    @dataclass
    class Shell:
        prompt: str = "it's 1, 2"
        stop: str = "\n"
        one: tuple[int, ...] = (20,)

    with pytest.raises(SystemExit):
        configure(Shell, argv=["-h"])
    shown = capsys.readouterr().out.splitlines()[2:]
    command = f"printf '%s\\0' {' '.join(shown)}"
    argv = subprocess.run(["bash", "-c", command], capture_output=True, text=True).stdout.split("\0")[:-1]
    assert len(argv) == 3 and configure(Shell, argv=argv) == Shell()


# --- Scripts ---


def test_imports_alone_from_an_empty_folder(tmp_path):
    shutil.copy(SOURCE, tmp_path)
    code = "import sys; sys.path.insert(0, '.'); import configurator; print(configurator.__file__)"
    ran = python("-I", "-S", "-c", code, cwd=tmp_path)  # -S: no site-packages, so the standard library alone
    assert ran.returncode == 0, ran.stderr
    assert Path(ran.stdout.strip()).resolve() == (tmp_path / "configurator.py").resolve()


@pytest.mark.parametrize("error", [ValueError, FileNotFoundError, RuntimeError, PermissionError])
def test_run_cli_turns_errors_into_a_message(capsys, monkeypatch, error):
    monkeypatch.delenv("NANO2D_TRACEBACK", raising=False)

    def run() -> None:
        raise error("no")

    with pytest.raises(SystemExit) as caught:
        run_cli(run)
    hint = " (NANO2D_TRACEBACK=1 shows where)" if error is RuntimeError else ""  # it may be one of torch's
    assert (caught.value.code, capsys.readouterr().err) == (2, f"error: no{hint}\n")


def test_run_cli_raises_on_request(monkeypatch):
    monkeypatch.setenv("NANO2D_TRACEBACK", "1")
    with pytest.raises(ValueError, match="invalid literal"):
        run_cli(lambda: print(int("x")))


def test_run_cli_leaves_other_errors_alone():
    with pytest.raises(ZeroDivisionError):
        run_cli(lambda: print(1 // 0))


def test_run_cli_interrupted():
    def run() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as caught:
        run_cli(run)
    assert caught.value.code == 130


def test_run_cli_runs():
    ran = []
    run_cli(lambda: ran.append(1))
    assert ran == [1]


def test_a_script_exits_with_one_message(tmp_path):
    body = """
from dataclasses import dataclass
from configurator import configure, run_cli

@dataclass
class C:
    steps: int = 1

run_cli(lambda: configure(C))
"""
    ran = python(script(tmp_path, body), "--step=2", cwd=tmp_path, NANO2D_TRACEBACK="")
    message = "error: --step: unknown name, the nearest known one is --steps\n"
    assert (ran.returncode, ran.stdout, ran.stderr) == (2, "", message)


def test_a_comment_about_an_encoding_is_no_declaration_of_one(tmp_path):
    (tmp_path / "c.py").write_text("# run with --pos_encoding=2d-rope\nname = 'ä'\n", encoding="utf-8")

    @dataclass
    class Text:
        name: str = ""

    assert configure(Text, argv=[str(tmp_path / "c.py")]).name == "ä"


def test_what_was_given_is_told_even_where_it_is_the_default(config):
    name = config("n_layer = 4\n_own = 3\nfor _i in range(2):\n    batch_size = _i + 1\nlearning_rate *= 1")
    configure(Model, Train, argv=[name, "--compile=False"], given=(given := set()))
    assert given == {"n_layer", "batch_size", "learning_rate", "compile"}
