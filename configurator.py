"""Defaults of a script + config files + `--name=value`, later ones winning, every value checked.

    python train.py config/toy_copy.py --learning_rate=3e-4 --freqs=mixed   # --help lists them

The knobs are the fields of one or more dataclasses; a field's annotation is its type, its comment is its help:

    @dataclass
    class Train:
        "Training."
        learning_rate: float = 1e-3  # peak, per step
        lengths: tuple[int, ...] = (20, 320)  # of the source, in tokens

    train, model = configure(Train, Model, doc=__doc__)

Types: str, int, float, bool, None, Literal, lists and tuples of these, unions of all. A config file is plain Python
that assigns to knobs and may read what they are so far (and nan and inf); names of its own start with an underscore.
"""

import ast
import contextlib
import difflib
import errno
import functools
import inspect
import json
import math
import os
import shlex
import sys
import textwrap
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

WORDS = {"true": True, "false": False, "nan": math.nan, "inf": math.inf, "-inf": -math.inf}
COMMAND_LINE = "the command line"
NO_FIT = object()  # what _fit returns for a value of another type
NO_FSYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM, errno.EROFS)  # no such thing here


@dataclass
class Knob:
    name: str
    hint: Any  # its type
    default: Any


def configure(
    *classes: type, argv: Sequence[str] | None = None, doc: str | None = None, given: dict[str, str] | None = None
) -> Any:
    """One instance per class, in order (no tuple around a single one); `argv` is sys.argv[1:] where None. The knobs
    that were set are added to `given`, each with where it was set: the command line, or the path of a config file.

    ValueError for an unknown name or a wrong value, FileNotFoundError for a missing config file. --help exits.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(_help(classes, doc), flush=True)
        sys.exit(0)
    values = resolve(classes, argv, given)
    configs = tuple(build(cls, values) for cls in classes)
    return configs[0] if len(configs) == 1 else configs


def resolve(classes: Sequence[type], argv: Sequence[str], given: dict[str, str] | None = None) -> dict[str, Any]:
    """The value of every knob, by name, after `argv` from left to right; `given` and errors as in `configure`."""
    knobs = _knobs(classes)
    values = {name: knob.default for name, knob in knobs.items()}
    given = {} if given is None else given
    for item in argv:
        if not item.startswith("--"):
            values = _run_file(_find(item), values, knobs, given)
            continue
        name, equals, text = item[2:].partition("=")
        if name not in knobs:
            near = _nearest(name, knobs)
            raise ValueError(f"--{name}: unknown name, the nearest known one is --{near}; --help lists all")
        if not equals:
            raise ValueError(f"--{name} has no value: write --{name}=... ({_expected(knobs[name].hint)})")
        values[name] = _check(knobs[name], text, COMMAND_LINE, _readings(text))
        given[name] = COMMAND_LINE
    return values


def build(cls: type, values: Mapping[str, Any], origin: str = "values") -> Any:
    """A `cls` from those `values` that are fields of it; other names are ignored, missing ones keep their default.
    `origin` is where errors say that the values are from."""
    knobs = _knobs([cls])
    return cls(**{name: _check(knob, values.get(name, knob.default), origin) for name, knob in knobs.items()})


def check_used(given: Mapping[str, str], unused: Mapping[str, str], *configs: Any) -> None:
    """ValueError for a knob that the command line took off its default, and that is in `unused`, which says what it is
    for. A config file may set such knobs, since one file serves many runs."""
    for config in configs:
        for name, knob in _knobs([type(config)]).items():
            value = getattr(config, name)
            if name in unused and given.get(name) == COMMAND_LINE and value != knob.default:
                why = f"it is for {unused[name]}: leave it out"
                raise ValueError(f"--{name}={_show(value)} would do nothing here, {why}")


def save(path: str | os.PathLike[str], *configs: Any) -> None:
    """Write a config file that gives the same configs again. Raises as `atomic`."""
    lines = []
    for config in configs:
        for name, knob in _knobs([type(config)]).items():
            lines.append(f"{name} = {_check(knob, getattr(config, name), 'save')!r}\n")
    with atomic(path) as file:
        file.write("".join(lines).encode())


def diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """A line per name whose values differ: `learning_rate: 0.002 there, 0.001 here`; a is there, b is here."""
    there = {name: repr(value) for name, value in a.items()}  # as text: nan is not equal to itself
    here = {name: repr(value) for name, value in b.items()}
    differ = [name for name in {**a, **b} if there.get(name) != here.get(name)]
    return [f"{name}: {there.get(name, 'absent')} there, {here.get(name, 'absent')} here" for name in differ]


@contextlib.contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write, which takes the name `path` when it is whole and on the disk: a kill leaves the old file or the
    new one, and of two processes that write `path` the later one wins. RuntimeError where it cannot be written, as on
    a full disk; the old file is kept then, too."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb", 2**20) as file:
            yield file
            file.flush()
            _fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the name on the disk, too, where folders can be flushed
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            _fsync(folder)
        finally:
            os.close(folder)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as JSON, indented. Raises as `atomic`."""
    with atomic(path) as file:
        file.write(json.dumps(value, indent=1).encode() + b"\n")


def lock(folder: str | os.PathLike[str]) -> BinaryIO:
    """Reserve `folder` for this process, and remove the *.tmp files that killed processes left in it.

    Keep the file that is returned: closing it frees the folder, and so does the end of the process, even by kill -9.
    ValueError if another process has the folder, RuntimeError if it cannot be written. Where the file system has no
    locks, that is said once, and the folder is not reserved.
    """
    path = Path(folder) / ".lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+b", buffering=0)
    except OSError as error:
        raise _cannot_write(path, error) from error
    try:
        import fcntl  # POSIX alone has it

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().decode() or "another process"
        file.close()
        advice = "wait for it, stop it, or choose another --out_dir"
        raise ValueError(f"{folder} is in use by {holder}: {advice}") from None
    except (ImportError, OSError) as error:
        _say_once(f"no file locks here ({error}): take care that no two runs have the same --out_dir")
        return file
    for stale in path.parent.glob(f"*.*-{'[0-9a-f]' * 8}.tmp"):  # as `atomic` names them; others are not ours
        with contextlib.suppress(OSError):
            stale.unlink()
    with contextlib.suppress(OSError):  # the disk may be full: the message above does without
        file.truncate(0)
        file.write(f"process {os.getpid()} on {os.uname().nodename}".encode())
    return file


def run_cli(run: Callable[[], None]) -> None:
    """Run a script: its errors become `error: <message>` and exit status 2, or a traceback with NANO2D_TRACEBACK=1."""
    try:
        run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # nobody reads the output any more, as in `python eval.py ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        sys.exit(141)  # as a shell reports it
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        if os.environ.get("NANO2D_TRACEBACK") == "1":
            raise
        message = str(error)
        if isinstance(error, MemoryError):
            message = f"not enough memory: ask for less at once, such as fewer samples or a smaller batch ({error!r})"
        if isinstance(error, RuntimeError | MemoryError):
            message += " (NANO2D_TRACEBACK=1 shows where)"
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def _cannot_write(path: Path, error: OSError) -> RuntimeError:
    advice = "make room or mend that, then run the same command again"
    return RuntimeError(f"{path}: cannot be written ({error}), nothing was replaced: {advice}")


def _fsync(handle: int) -> None:
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_FSYNC:
            raise
        _say_once(f"no fsync on this file system ({error.strerror}): a power cut may lose the newest files")


@functools.cache
def _say_once(message: str) -> None:
    print(message, file=sys.stderr)


def _knobs(classes: Sequence[type]) -> dict[str, Knob]:
    """Every knob by name, with its default made afresh and checked."""
    knobs: dict[str, Knob] = {}
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for field in fields(cls):
            name = field.name
            if name in knobs:
                raise ValueError(f"{name} is in {cls.__name__} and in a class before it: rename one")
            default = field.default if field.default_factory is MISSING else field.default_factory()
            knobs[name] = Knob(name, hints[name], default)
            knobs[name].default = _check(knobs[name], default, f"{cls.__name__}'s default")
    return knobs


def _find(item: str) -> Path:
    """The config file `item`, in the working directory, or else beside the running script or this file."""
    if not item.endswith(".py"):
        hint = f"did you mean --{item.lstrip('-')}?" if "=" in item else "--help lists the names"
        raise ValueError(f"{item!r} is neither --name=value nor a config file (*.py): {hint}")
    tried = [Path.cwd() / item, Path(sys.argv[0]).parent.resolve() / item, Path(__file__).parent / item]
    for path in tried:
        if path.is_file():
            return path
    looked = " and ".join(dict.fromkeys(map(str, tried)))
    near = _nearest(Path(item).name, [file.name for path in tried for file in path.parent.glob("*.py")])
    raise FileNotFoundError(f"no config file {item}: looked for {looked}; the nearest name there is {near}")


def _run_file(path: Path, values: Mapping[str, Any], knobs: Mapping[str, Knob], given: dict) -> dict[str, Any]:
    """The values after the config file `path` has run on them; the knobs that it assigns are added to `given`."""
    space = {**WORDS, **values, "__file__": str(path)}
    try:
        tree = ast.parse(path.read_text("utf-8-sig"), str(path))
        exec(compile(tree, str(path), "exec", dont_inherit=True), space)
    except Exception as error:
        where = f"{path}, line {error.lineno}" if isinstance(error, SyntaxError) else str(path)
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == str(path):
                where = f"{path}, line {frame.lineno}"
        raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
    assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for name, value in space.items():
        own = name.startswith("_") or isinstance(value, types.ModuleType) or callable(value)
        if name not in knobs and name not in WORDS and not own:
            hint = f"the nearest known one is {_nearest(name, knobs)}; a name of the file's own starts with _"
            raise ValueError(f"{path}: unknown name {name}, {hint}")
    given.update(dict.fromkeys(assigned & knobs.keys(), str(path)))
    return {name: _check(knob, space.get(name, values[name]), str(path)) for name, knob in knobs.items()}


def _nearest(name: str, known: Iterable[str]) -> str:
    return "".join(difflib.get_close_matches(name.lower(), known, 1, cutoff=0.0)) or "none"


def _check(knob: Knob, value: Any, origin: str, readings: Sequence[Any] | None = None) -> Any:
    """`value`, or the first of its `readings` that fits, as the knob's type."""
    for reading in [value] if readings is None else readings:
        fit = _fit(reading, knob.hint)
        if fit is not NO_FIT:
            return fit
    raise ValueError(f"{knob.name} = {value!r} (from {origin}): expected {_expected(knob.hint)}")


def _fit(value: Any, hint: Any) -> Any:
    """`value` as the type `hint`, or NO_FIT. An int passes for a float, a list for a tuple and the reverse."""
    kind, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        fits = [_fit(value, arg) for arg in args]
        if type(value) in args:  # 3 stays an int under `float | int`
            return value
        return next((fit for fit in fits if fit is not NO_FIT), NO_FIT)
    if kind is typing.Literal:
        return next((arg for arg in args if type(arg) is type(value) and arg == value), NO_FIT)
    if kind in (tuple, list) and args:
        if not isinstance(value, tuple | list):
            return NO_FIT
        if kind is list or args[-1] is ...:
            args = args[:1] * len(value)
        if len(args) != len(value):
            return NO_FIT
        fits = [_fit(item, arg) for item, arg in zip(value, args, strict=True)]
        return NO_FIT if NO_FIT in fits else kind(fits)
    if kind is types.NoneType:
        return None if value is None else NO_FIT
    if kind not in (str, int, float, bool):
        raise TypeError(f"annotation {hint}: configurator.py does not know this type")
    if isinstance(value, bool) != (kind is bool):  # to Python, a bool is an int
        return NO_FIT
    accepted = (int, float) if kind is float else kind
    return kind(value) if isinstance(value, accepted) else NO_FIT


def _readings(text: str) -> list[Any]:
    """What `text` on a command line may mean, in order: Python, a list of Python, text, a list of texts."""
    if not text:
        return [text]
    inner = text.strip()
    if inner[:1] + inner[-1:] in ("()", "[]"):
        inner = inner[1:-1]
    pieces = [piece.strip() for piece in inner.removesuffix(",").split(",")]
    values = [_literal(piece) for piece in pieces]
    texts = [value if isinstance(value, str) else piece for value, piece in zip(values, pieces, strict=True)]
    return [_literal(text), values, text, texts]


def _literal(text: str) -> Any:
    """The Python value of `text`, or `text` where it has none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return WORDS.get(text, text)


def _expected(hint: Any) -> str:
    if hint is bool:
        return "True or False"
    plain = isinstance(hint, type) and not typing.get_args(hint)
    return hint.__name__ if plain else str(hint).replace("typing.", "")


def _show(value: Any) -> str:
    """`value` as a shell takes it after `--name=`."""
    text = ",".join(map(str, value)) if isinstance(value, tuple | list) and len(value) > 1 else str(value)
    return shlex.quote(text if text.isprintable() else repr(value))


def _help(classes: Sequence[type], doc: str | None) -> str:
    left = {name: f"  --{name}={_show(knob.default)}   " for name, knob in _knobs(classes).items()}
    column = min(max(map(len, left.values()), default=0), 44)
    lines = [inspect.cleandoc(doc)] if doc else []
    for cls in classes:
        title = inspect.cleandoc(cls.__doc__ or "").split("\n")[0]
        lines += ["", title]
        comments = _comments(cls)
        for name in _knobs([cls]):
            first, rest = left[name].ljust(column), " " * column
            text = textwrap.fill(comments.get(name, ""), 115, initial_indent=first, subsequent_indent=rest)
            lines.append(text or first.rstrip())
    return "\n".join(lines)


def _comments(cls: type) -> dict[str, str]:
    """Each field's comment: after it on its line, or else on the lines right above; none where there is no source."""
    try:
        lines = inspect.getsource(cls).splitlines()
    except (OSError, TypeError):
        return {}
    comments, above = {}, []
    for line in map(str.strip, lines):
        if line.startswith("# "):
            above.append(line[2:])
            continue
        name, colon, rest = line.partition(": ")
        if colon:
            comments[name] = rest.partition("  # ")[2] or " ".join(above)
        above = []
    return comments
