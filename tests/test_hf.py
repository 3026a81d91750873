"""hf.py and modeling_nano2d.py: folders in and out, against transformers' own Qwen3 and against our decoder."""

import json
import os
import shutil
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from conftest import pretrained, run
from test_theory import copier

import checkpoint
import configurator
import data_copy
import hf
import rope2d
import tokenizer
from model import Decoder, ModelConfig
from sample import generate
from tokenizer import LLAMA3_PATTERN, LLAMA3_SPECIALS, load_tokenizer

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
tiktoken = pytest.importorskip("tiktoken")

VOCAB, PROMPT = 61, 33
BREAKS = (torch.arange(VOCAB) % 6 == 0).long() + (torch.arange(VOCAB) % 18 == 0)  # many, and some of two
GQA = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)  # heads of 64 in all, width 32
SHAPES = {
    "gqa": GQA,
    "tied": dict(num_attention_heads=4, num_key_value_heads=4, head_dim=8, tie_word_embeddings=True),
    "one kv head": dict(num_attention_heads=3, num_key_value_heads=1, head_dim=6, rope_theta=1e6, rms_norm_eps=1e-5),
    "tied gqa": GQA | dict(tie_word_embeddings=True, intermediate_size=20),
}
QWEN3 = dict(pos_encoding="rope", qk_norm=True, freqs="geometric")  # what is written as Qwen3
MODELS = {
    "rope": dict(pos_encoding="rope"),
    "2d-rope": dict(pos_encoding="2d-rope"),
    "nope": dict(pos_encoding="nope", n_kv_head=None),
    "alibi": dict(pos_encoding="alibi", logit_scale="log_n"),
    "h-rope": dict(pos_encoding="h-rope", logit_scale="log_n", freqs="mixed", rope_theta=77.0, norm_eps=1e-3),
    "rnope": dict(pos_encoding="rnope", freqs="geometric", qk_norm=True),
    "tied": dict(pos_encoding="alibi+2d-rope", tie_weights=True, n_kv_head=1, head_dim=None, grid_reset=7),
    "all": dict(pos_encoding="h-rope", qk_norm=True, tie_weights=True, logit_scale="log_n", freqs="geometric")
    | dict(freqs_learned=True, rotary_fraction=0.6, grid_reset=7, mlp_dim=20),
}
TEXT_MESSAGES = [{"role": "user", "content": "Copy it:\n01 10!"}, {"role": "assistant", "content": "01 10!"}] * 2


@pytest.fixture(autouse=True, scope="module")
def quiet(tmp_path_factory):
    """transformers keeps the code of folders in a folder of the test's, and says nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        transformers.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        yield
    load_tokenizer.cache_clear()


def theirs(seed: int = 0, **changes):
    """A small Qwen3 of transformers, drawn widely enough for its logits to depend on everything, norms too."""
    values = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, rope_theta=10_000.0)
    values |= dict(max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(seed)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**values | GQA | changes)).eval()
    for name, p in model.requires_grad_(False).named_parameters():
        p.uniform_(0.5, 1.5) if "norm" in name else p.normal_(0.0, 0.25)
    return model


def ours(**changes) -> Decoder:
    """A small decoder of ours, drawn as widely."""
    torch.manual_seed(1)
    values = dict(n_layer=3, n_head=4, n_kv_head=2, n_embd=32, head_dim=16, vocab_size=VOCAB, block_size=999)
    values |= dict(freqs="uniform", zero_init_residual=False, init_std=0.2) | changes
    model = Decoder(ModelConfig(**values), BREAKS).eval().requires_grad_(False)
    for name, p in model.named_parameters():
        if p.dim() == 1:
            p.uniform_(0.5, 1.5)
        if name.endswith("log_scale"):
            p.normal_(0.0, 0.1)
    return model


@lru_cache
def exported(name: str) -> tuple[Decoder, torch.nn.Module, Path]:
    """One of MODELS, what transformers makes of its folder, and the folder."""
    model, folder = ours(**MODELS[name]), Path(tempfile.mkdtemp(prefix=f"nano2d-{os.getpid()}-")) / "folder"
    hf.save(model, None, folder)
    return model, reads(folder), folder


def reads(folder, **how):
    how = dict(dtype=torch.float32) | how
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **how).eval()


def edit_config(folder, drop=(), **changes) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: v for key, v in config.items() if key not in drop}))


def edit_weights(folder, edit) -> None:
    weights = safetensors_torch.load_file(folder / "model.safetensors")
    edit(weights)
    safetensors_torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def random_tokens(B: int, T: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (B, T), generator=torch.Generator().manual_seed(0))


def same_weights(a, b) -> None:
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    for name, weight in a.items():
        assert weight.dtype == b[name].dtype and torch.equal(weight, b[name]), name


# Models of ours in transformers


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_ours_and_the_folder_loads_back_bit_for_bit(name):
    model, peer, folder = exported(name)
    tokens, again = random_tokens(2, 200), hf.load(folder)
    expected = model(tokens)
    assert type(peer).__name__ == "Nano2DForCausalLM" and expected.std() > 0.5
    torch.testing.assert_close(peer(tokens).logits, expected, atol=1e-5, rtol=0)
    same_weights(again, model)
    for knob, value in vars(again.config).items():
        assert value == getattr(model.config, knob) or getattr(model.config, knob) is None, knob
    torch.testing.assert_close(peer(tokens, logits_to_keep=3).logits, expected[:, -3:], atol=1e-5, rtol=0)


HOW = dict(do_sample=False, pad_token_id=0, eos_token_id=VOCAB + 5)  # which never comes


@pytest.mark.parametrize("name", MODELS)
def test_greedy_generation_gives_our_tokens_across_many_line_breaks(name):
    model, peer, _ = exported(name)
    prompt = random_tokens(1, PROMPT)
    expected = [int(token) for token in generate(model, prompt.tolist(), 200)]
    got = peer.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=200, **HOW)
    assert got[0, PROMPT:].tolist() == expected
    assert BREAKS[torch.tensor(expected)].sum() > 20 and len(set(expected)) > 20


WAYS = {
    "no cache": dict(use_cache=False),
    "static cache": dict(cache_implementation="static"),
    **{f"chunks of {n}": dict(prefill_chunk_size=n) for n in (1, 16, 32, 50)},
    **{f"look-up of {n}": dict(prompt_lookup_num_tokens=n) for n in (2, 5)},
}


@pytest.mark.parametrize("name", ["2d-rope", "alibi", "all"])
def test_all_ways_of_generating_give_the_same_tokens(name):
    model, peer, _ = exported(name)
    lengths, rows = [PROMPT, 7, 20, 1, 12], random_tokens(5, PROMPT)
    padded, mask = torch.zeros_like(rows), torch.zeros_like(rows)
    for i, n in enumerate(lengths):
        padded[i, PROMPT - n :], mask[i, PROMPT - n :] = rows[i, :n], 1
    prompts = [row[:n].tolist() for row, n in zip(rows, lengths, strict=True)]
    expected = torch.stack(list(generate(model, prompts, 40)), dim=1)
    for way, how in {"plain": {}, **WAYS}.items():
        many = slice(1) if "look-up" in way else slice(5)  # transformers looks up for one prompt alone
        got = peer.generate(padded[many], attention_mask=mask[many], max_new_tokens=40, **HOW | how)
        assert torch.equal(got[:, PROMPT:], expected[many]), way


@pytest.mark.parametrize("name", ["2d-rope", "all"])
def test_beams_are_those_without_a_cache(name):
    _, peer, _ = exported(name)
    prompt = random_tokens(2, PROMPT)
    how = HOW | dict(num_beams=4, num_return_sequences=4, max_new_tokens=30, attention_mask=torch.ones_like(prompt))
    cached, plain = (
        peer.generate(prompt, use_cache=use, return_dict_in_generate=True, output_scores=True, **how)
        for use in (True, False)
    )
    assert torch.equal(cached.sequences, plain.sequences) and len(cached.sequences.unique(dim=0)) == 8
    torch.testing.assert_close(cached.sequences_scores, plain.sequences_scores)
