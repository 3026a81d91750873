"""README.md: every command parses, every file it names exists, every Python block runs."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
from commonsense import CommonSenseConfig
from configurator import configure
from data_copy import TextCopyConfig, WriteConfig
from data_dclm import BuildConfig
from endpoint import EndpointConfig
from eval import EvalConfig
from maps import MapConfig
from sweep import SweepConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)
COMMENTS = "\n".join(path.read_text() for path in [*ROOT.glob("config/*.py"), *ROOT.glob("*.py")])
SHELL = "\n".join(text for language, text in BLOCKS if language == "sh")
CLASSES = {"train.py": train.CONFIGS, "eval.py": (EvalConfig,)}
CLASSES |= {"maps.py": (MapConfig,), "sweep.py": (SweepConfig,), "data_dclm.py": (BuildConfig,)}
CLASSES |= {"data_copy.py": (WriteConfig, TextCopyConfig), "endpoint.py": (EndpointConfig,)}
CLASSES |= {"commonsense.py": (CommonSenseConfig,)}


def commands(text: str) -> list[str]:
    """Command lines of our scripts, without what a shell comment adds."""
    scripts = "|".join(CLASSES).replace(".", r"\.")
    lines = re.findall(rf"(?:python|torchrun)\b[^\n]*? ((?:{scripts}) [^\n#]*)", text)
    return [line.strip() for line in lines if "..." not in line and "--help" not in line]


@pytest.mark.parametrize("command", dict.fromkeys(commands(SHELL) + commands(COMMENTS)))
def test_a_documented_command_parses(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    script, *argv = shlex.split(command)
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


@pytest.mark.parametrize("anchor", re.findall(r"\]\(#([^)]+)\)", README))
def test_a_link_into_the_page_has_its_heading(anchor):
    headings = re.findall(r"^#+ (.*)", README, re.M)
    assert anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("code", [text for language, text in BLOCKS if language == "python"])
def test_a_python_block_runs(code):
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_there_is_something_to_check():
    assert commands(SHELL) and len(BLOCKS) >= 3


@pytest.fixture
def patched_qwen3():
    """Two Qwen3 with the same weights, the first with the README's patch; token 3 has one line break, 7 two."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,
    )
    ours, theirs = (transformers.Qwen3ForCausalLM(config).eval().requires_grad_(False) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    names = {}
    exec(next(text for language, text in BLOCKS if "class Grid2D" in text), names)
    newlines = torch.zeros(50, dtype=torch.int64)
    newlines[3], newlines[7] = 1, 2
    names["Grid2D"](ours, newlines)
    return ours, theirs


def test_qwen3_with_all_tokens_on_one_row_is_rope_over_the_column_pairs(patched_qwen3):
    ours, theirs = patched_qwen3
    theirs.model.rotary_emb.inv_freq = torch.cat([torch.zeros(4), 1000.0 ** (-torch.arange(4) / 4)])
    tokens = torch.randint(8, 50, (2, 40))
    torch.testing.assert_close(ours(input_ids=tokens).logits, theirs(input_ids=tokens).logits, atol=1e-5, rtol=0)


def test_qwen3_with_line_breaks_generates_with_its_cache_what_it_would_without(patched_qwen3):
    ours, _ = patched_qwen3
    tokens = torch.randint(0, 8, (1, 20))  # many line breaks
    written = ours.generate(tokens, max_new_tokens=20, do_sample=False, eos_token_id=None)
    for _ in range(20):
        logits = ours(input_ids=tokens, use_cache=False).logits[:, -1:]
        tokens = torch.cat([tokens, logits.argmax(-1)], dim=1)
    assert torch.equal(written, tokens)
