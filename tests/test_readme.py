"""README.md: every command parses, every file it names exists, every Python block runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from configurator import configure
from data_copy import CopyConfig
from eval import EvalConfig
from model import ModelConfig
from train import TrainConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)
COMMENTS = "\n".join(path.read_text() for path in [*ROOT.glob("config/*.py"), ROOT / "train.py", ROOT / "eval.py"])
SHELL = "\n".join(text for language, text in BLOCKS if language == "sh")
CLASSES = {"train.py": (ModelConfig, CopyConfig, TrainConfig), "eval.py": (EvalConfig,)}


def commands(text: str) -> list[str]:
    """Command lines of our scripts, without what a shell comment adds."""
    lines = re.findall(r"(?:python|torchrun)\b[^\n]*? ((?:train|eval)\.py [^\n#]*)", text)
    return [line.strip() for line in lines if "..." not in line]


@pytest.mark.parametrize("command", dict.fromkeys(commands(SHELL) + commands(COMMENTS)))
def test_a_documented_command_parses(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    script, *argv = command.split()
    configure(*CLASSES[script], argv=argv)


@pytest.mark.parametrize("target", dict.fromkeys(re.findall(r"^make (\w+)", SHELL, re.M)))
def test_a_documented_make_target_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)


@pytest.mark.parametrize("name", dict.fromkeys(re.findall(r"`((?:config/|tests/)?\w+\.(?:py|txt))`", README)))
def test_a_named_file_exists(name):
    assert (ROOT / name).is_file()


@pytest.mark.parametrize("image", re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README))
def test_a_shown_image_exists(image):
    assert (ROOT / image).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("code", [text for language, text in BLOCKS if language == "python"])
def test_a_python_block_runs(code):
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_there_is_something_to_check():
    assert commands(SHELL) and len(BLOCKS) >= 3
