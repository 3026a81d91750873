"""README.md, docs/results.md and the comments of configs and scripts: every command parses, every file, link and
picture is there, every Python block runs or at least compiles."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import train
from configurator import configure
from data_dclm import BuildConfig
from data_text import TextCopyConfig, WriteConfig
from eval import EvalConfig
from hf import ExportConfig
from sample import SampleConfig
from scripts import bench
from scripts.endpoint import EndpointConfig
from scripts.far import FarConfig
from scripts.local_text import LocalTextConfig
from scripts.maps import MapConfig
from scripts.sweep import SweepConfig

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": ROOT, "docs/results.md": ROOT / "docs"}  # and what their links are relative to
TEXTS = {name: (ROOT / name).read_text() for name in PAGES}
BLOCKS = [(name, *block) for name, text in TEXTS.items() for block in re.findall(r"```(\w+)\n(.*?)```", text, re.S)]
SHELL = "\n".join(text for _, language, text in BLOCKS if language == "sh").replace("\\\n", " ")
SOURCES = [*ROOT.glob("config/*.py"), *ROOT.glob("*.py"), *ROOT.glob("scripts/*.py")]
COMMENTS = "\n".join(path.read_text() for path in SOURCES)
CLASSES = {
    "train.py": train.CONFIGS,
    "eval.py": (EvalConfig,),
    "sample.py": (SampleConfig,),
    "hf.py": (ExportConfig,),
    "data_dclm.py": (BuildConfig,),
    "data_text.py": (WriteConfig, TextCopyConfig),
    "scripts.maps": (MapConfig,),
    "scripts.local_text": (LocalTextConfig,),
    "scripts.sweep": (SweepConfig,),
    "scripts.endpoint": (EndpointConfig,),
    "scripts.far": (FarConfig,),
}


def commands(text: str) -> list[str]:
    """Command lines of our scripts, without what a shell comment adds."""
    scripts = "|".join([*CLASSES, "scripts.bench"]).replace(".", r"\.")
    lines = re.findall(rf"(?:python|torchrun)\b[^\n]*? ((?:{scripts}) [^\n#`]*)", text)
    return [line.strip() for line in lines if "..." not in line and "--help" not in line]


@pytest.mark.parametrize("command", dict.fromkeys(commands(SHELL) + commands(COMMENTS)))
def test_a_documented_command_parses(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    script, *argv = shlex.split(command)
    classes = CLASSES.get(script)
    if script == "scripts.bench":
        name, *argv = argv
        classes = bench.BenchConfig, bench.BENCHMARKS[name][1]
    configure(*classes, argv=argv)


def test_the_documents_have_commands_of_every_script():
    found = {command.split()[0] for command in commands(SHELL)}
    assert found == {*CLASSES, "scripts.bench"} - {"scripts.local_text"}


@pytest.mark.parametrize("target", dict.fromkeys(re.findall(r"^make (\w+)", SHELL, re.M)))
def test_a_documented_make_target_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)


@pytest.mark.parametrize(
    "name", dict.fromkeys(re.findall(r"`((?:[\w.]+/)*\w+\.(?:py|txt|md))\b", "".join(TEXTS.values())))
)
def test_a_named_file_exists(name):
    assert (ROOT / name).is_file() or (ROOT / "scripts" / name).is_file()


@pytest.mark.parametrize("name", re.findall(r"`tests/(\w+\.py::\w+)`", "".join(TEXTS.values())))
def test_a_named_test_exists(name):
    file, function = name.split("::")
    assert f"def {function}(" in (ROOT / "tests" / file).read_text()


LINKS = [(page, link) for page, text in TEXTS.items() for link in re.findall(r"\]\(([^):]+)\)", text)]


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_a_link_leads_somewhere(page, link):
    path, _, anchor = link.partition("#")
    target = PAGES[page] / path if path else ROOT / page
    assert target.is_file()
    if target.suffix == ".png":
        assert target.read_bytes().startswith(b"\x89PNG")
    if anchor:
        headings = re.findall(r"^#+ (.*)", target.read_text(), re.M)
        assert anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_every_picture_is_shown():
    shown = {(PAGES[page] / link).resolve() for page, link in LINKS}
    assert shown >= {*ROOT.glob("docs/*.png")}


@pytest.mark.parametrize("code", [text for _, language, text in BLOCKS if language == "python"])
def test_a_python_block_runs(code):
    compile(code, "block", "exec")
    if "transformers" not in code:  # which needs a folder that another command makes: tests/test_hf.py has it
        ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
