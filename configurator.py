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
that assigns to knobs and may read what they are so far; names of its own start with an underscore.
"""

import ast
import contextlib
import dataclasses
import difflib
import inspect
import io
import math
import os
import shlex
import sys
import textwrap
import tokenize
import traceback
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

WORDS = {"true": True, "false": False, "nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Knob(NamedTuple):
    owner: type
    hint: Any
    default: Any


def configure(
    *classes: type, argv: Sequence[str] | None = None, doc: str | None = None, given: set[str] | None = None
) -> Any:
    """One instance per class, in order (no tuple around a single one); `argv` is sys.argv[1:] where None. The names
    that it assigns go to `given`.

    ValueError for an unknown name or a wrong value, FileNotFoundError for a missing config file. --help exits.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(_help(classes, doc))
        sys.exit(0)
    values = resolve(classes, argv, given)
    configs = tuple(build(cls, values) for cls in classes)
    return configs[0] if len(configs) == 1 else configs


def resolve(classes: Sequence[type], argv: Sequence[str], given: set[str] | None = None) -> dict[str, Any]:
    """The value of every knob, by name, after `argv` from left to right; the names that it assigns go to `given`."""
    knobs = _knobs(classes)
    values = {name: knob.default for name, knob in knobs.items()}
    given = set() if given is None else given
    for item in argv:
        if not item.startswith("--"):
            values = _run_file(_find(item), values, knobs, given)
            continue
        name, equals, text = item[2:].partition("=")
        if name not in knobs:
            raise ValueError(f"--{name}: unknown name, the nearest known one is --{_nearest(name, knobs)}")
        hint = knobs[name].hint
        if not equals:
            forms = ["True", "False"] if bool in (hint, *typing.get_args(hint)) else [_show(knobs[name].default)]
            raise ValueError(f"--{name} has no value: write {' or '.join(f'--{name}={form}' for form in forms)}")
        values[name] = _checked(name, text, hint, "the command line", _readings(text))
        given.add(name)
    return values


def build(cls: type, values: Mapping[str, Any]) -> Any:
    """A `cls` from those `values` that are fields of it; other names are ignored, missing ones keep their default."""
    knobs = _knobs([cls])
    return cls(**{n: _checked(n, values.get(n, knob.default), knob.hint, "values") for n, knob in knobs.items()})


def save(path: str | os.PathLike[str], *configs: Any) -> None:
    """Write a config file that gives the same configs again. Raises as `atomic`."""
    knobs = _knobs([type(config) for config in configs])
    owners = {type(config): config for config in configs}
    values = {n: _checked(n, getattr(owners[knob.owner], n), knob.hint, "save") for n, knob in knobs.items()}
    with atomic(path) as file:
        file.writelines(f"{name} = {_source(value)}\n".encode() for name, value in values.items())


@contextlib.contextmanager
def atomic(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write, which takes the name `path` when it is whole and on the disk: a kill leaves the old file or the
    new one. RuntimeError where it cannot be written, as on a full disk; the old one is kept then, too."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb", 2**20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            reason = error.strerror or error
            message = f"{path}: cannot be written, is the disk full? What was there before is kept ({reason})"
            raise RuntimeError(message) from error
        raise
    with contextlib.suppress(OSError):  # the name on the disk, too, where folders can be flushed
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """A line per name whose values differ: `learning_rate: 0.002 there, 0.001 here`; a is there, b is here."""
    there, here = ({name: repr(value) for name, value in side.items()} for side in (a, b))  # nan differs from nan by ==
    names = [name for name in {**a, **b} if there.get(name) != here.get(name)]
    return [f"{name}: {there.get(name, 'absent')} there, {here.get(name, 'absent')} here" for name in names]


def run_cli(run: Callable[[], None]) -> None:
    """Run a script: its errors become `error: <message>` and exit status 2, or a traceback with NANO2D_TRACEBACK=1."""
    try:
        run()
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError, RuntimeError) as error:
        if os.environ.get("NANO2D_TRACEBACK") == "1":
            raise
        hint = " (NANO2D_TRACEBACK=1 shows where)" if isinstance(error, RuntimeError) else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        sys.exit(2)


def _knobs(classes: Sequence[type]) -> dict[str, Knob]:
    """Every knob by name, with its default made afresh and checked."""
    knobs: dict[str, Knob] = {}
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for field in (field for field in dataclasses.fields(cls) if field.init):
            name, factory = field.name, field.default_factory
            if name in knobs:
                raise ValueError(f"{name} is in both {knobs[name].owner.__name__} and {cls.__name__}: rename one")
            default = field.default if factory is dataclasses.MISSING else factory()
            knobs[name] = Knob(cls, hints[name], _checked(name, default, hints[name], f"{cls.__name__}'s default"))
    return knobs


def _find(item: str) -> Path:
    """The config file `item`, in the working directory or else in the running script's folder."""
    if not item.endswith(".py"):
        meant = f", did you mean --{item.lstrip('-')}?" if "=" in item else ""
        raise ValueError(f"{item!r} is neither --name=value nor a config file (*.py){meant}")
    tried = list(dict.fromkeys(folder / item for folder in (Path.cwd(), Path(sys.argv[0]).parent.resolve())))
    for path in tried:
        if path.is_file():
            return path
    looked = " and ".join(map(str, tried))
    near = _nearest(Path(item).name, sorted({file.name for path in tried for file in path.parent.glob("*.py")}), 3)
    raise FileNotFoundError(f"no config file {item}: looked for {looked}; near names there: {near}")


class _Space(dict):
    """What a config file runs in; notes the names that it assigns."""

    def __init__(self, names: Mapping[str, Any], assigned: set[str]):
        super().__init__(names)
        self.assigned = assigned

    def __setitem__(self, name: str, value: Any) -> None:
        self.assigned.add(name)
        super().__setitem__(name, value)


def _run_file(path: Path, values: Mapping[str, Any], knobs: Mapping[str, Knob], given: set[str]) -> dict[str, Any]:
    """The values after the config file `path` has run on them; the knobs that it assigns go to `given`."""
    space = _Space({**values, "__file__": str(path)}, assigned := set())
    try:
        exec(compile(path.read_text("utf-8-sig"), str(path), "exec", dont_inherit=True), space)
    except Exception as error:
        at = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = at[-1] if at else getattr(error, "lineno", None)  # a file that does not compile has no frame
        raise ValueError(f"{path}, line {line}: {type(error).__name__}: {error}") from error
    for name in space:
        own = name.startswith("_") or isinstance(space[name], types.ModuleType) or callable(space[name])
        if name not in knobs and not own:
            hint = f"the nearest known one is {_nearest(name, knobs)}; a name of the file's own starts with _"
            raise ValueError(f"{path}: unknown name {name}, {hint}")
    given |= assigned & knobs.keys()
    return {name: _checked(name, space.get(name, values[name]), knob.hint, str(path)) for name, knob in knobs.items()}


def _nearest(name: str, known: Iterable[str], n: int = 1) -> str:
    return ", ".join(difflib.get_close_matches(name.lower(), known, n, cutoff=0.0)) or "none"


def _checked(name: str, value: Any, hint: Any, origin: str, readings: Sequence[Any] = ()) -> Any:
    """`value`, or the first of its `readings`, as the type `hint`."""
    for reading in readings or [value]:
        if fits := _fits(reading, hint):
            return fits[0]
    kind = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")
    raise ValueError(f"{name} = {value!r} (from {origin}): expected {'True or False' if hint is bool else kind}")


def _fits(value: Any, hint: Any) -> list[Any]:
    """[`value` as the type `hint`], or [] if it is none: ints pass for floats, lists for tuples and the reverse."""
    kind, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (typing.Union, types.UnionType):
        fits = [fit for arg in args for fit in _fits(value, arg)]
        return sorted(fits, key=lambda fit: repr(fit) != repr(value))[:1]  # 3 stays an int under `float | int`
    if kind is typing.Literal:
        return [arg for arg in args if type(arg) is type(value) and arg == value]
    if kind in (tuple, list) and args:
        if not isinstance(value, tuple | list):
            return []
        hints = args if kind is tuple and args[-1] is not ... else args[:1] * len(value)
        fits = [fit for item, arg in zip(value, hints, strict=False) for fit in _fits(item, arg)]
        return [kind(fits)] if len(fits) == len(value) == len(hints) else []
    if kind is types.NoneType:
        return [None] if value is None else []
    if kind not in (str, int, float, bool):
        raise TypeError(f"annotation {hint}: configurator.py does not know this type")
    accepted = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    return [kind(value)] if accepted else []


def _readings(text: str) -> list[Any]:
    """What `text` on a command line may mean, in order: Python, a list of Python, text, a list of texts."""
    inner = text.strip()
    inner = inner[1:-1] if inner[:1] + inner[-1:] in ("()", "[]") else inner
    pieces = [piece.strip() for piece in inner.removesuffix(",").split(",")]
    literals = [_literal(piece) for piece in pieces]
    pairs = list(zip(literals, pieces, strict=True))
    if not text or any(literal == piece and piece.startswith(("'", '"')) for literal, piece in pairs):
        return [_literal(text), text]  # nothing to split, or a comma inside quotes
    return [_literal(text), literals, text, [lit if isinstance(lit, str) else piece for lit, piece in pairs]]


def _literal(text: str) -> Any:
    """The Python value of `text`, or `text` where it has none. Quotes count only if they span all of it."""
    try:
        value = ast.literal_eval(text)
        whole = next(tokenize.generate_tokens(io.StringIO(text).readline)).string == text
        return value if whole or not isinstance(value, str) else text
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return WORDS.get(text, text)


def _source(value: Any) -> str:
    """Python that evaluates to `value`; repr alone would write nan and inf, which are no Python names."""
    if isinstance(value, list):
        return f"[{', '.join(map(_source, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_source, value))}{',' * (len(value) == 1)})"
    return f"float('{value}')" if isinstance(value, float) and not math.isfinite(value) else repr(value)


def _show(value: Any) -> str:
    """`value` as a shell takes it behind `--name=`."""
    text = ",".join(map(str, value)) if isinstance(value, tuple | list) and len(value) > 1 else str(value)
    return shlex.quote(text if text.isprintable() else repr(value))


def _help(classes: Sequence[type], doc: str | None) -> str:
    lines = [inspect.cleandoc(doc)] if doc else []
    left = {name: f"  --{name}={_show(knob.default)}   " for name, knob in _knobs(classes).items()}
    column = min(max(map(len, left.values()), default=0), 44)
    for cls in classes:
        title = inspect.cleandoc(cls.__doc__ or "").split("\n")[0]
        # Without a docstring, dataclass puts a signature there.
        lines += ["", cls.__name__ if title.startswith(f"{cls.__name__}(") else title]
        notes = _comments(cls)
        for name in _knobs([cls]):
            first, rest = left[name].ljust(column), " " * column
            text = textwrap.fill(notes.get(name, ""), 115, initial_indent=first, subsequent_indent=rest)
            lines.append(text or first.rstrip())
    return "\n".join(lines)


def _comments(cls: type) -> dict[str, str]:
    """Each field's trailing comment, or else the comment lines right above it; nothing where there is no source."""
    notes: dict[str, str] = {}
    name, above, trailing = "", [], []
    try:
        for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(cls)).readline):
            if token.type == tokenize.COMMENT:
                (trailing if name else above).append(token.string.lstrip("#").strip())
            elif token.type == tokenize.NEWLINE:
                notes.setdefault(name, " ".join(trailing or above))
                name, above, trailing = "", [], []
            elif token.type == tokenize.NAME:
                name = name or token.string
            elif token.type == tokenize.NL and not token.line.strip():
                above = []
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        pass
    return notes
