"""sample.py: greedy text against full forwards, the fast step against the slow one, samples against probabilities."""

import io
import sys

import pytest
import torch
from conftest import pretrained
from test_model import FIXED, build, close, patterns, random_tokens

import checkpoint
import rope2d
import sample
from model import Decoder, ModelConfig
from sample import FastStep, choose_token, generate
from tokenizer import load_tokenizer


@patterns
def test_greedy_generation_is_the_argmax_of_full_forwards(pattern):
    m, prompts = build(pattern, n_kv_head=2), [[7, 1, 2], [4], [1, 2, 7, 7, 5, 6, 8, 1, 0]]
    steps = torch.stack(list(generate(m, prompts, 12)), dim=1)
    assert steps.shape == (3, 12) and steps.dtype == torch.int64
    for prompt, new in zip(prompts, steps.tolist(), strict=True):
        sequence = list(prompt)
        for _ in range(12):
            sequence.append(int(m(torch.tensor([sequence]))[0, -1].argmax()))
        assert new == sequence[len(prompt) :]


SETTINGS = {
    "plain": {},
    "one key head": dict(n_kv_head=1, logit_scale="log_n"),
    "qk_norm": dict(n_kv_head=2, qk_norm=True, tie_weights=True, grid_reset=4),
    "learned": dict(qk_norm=True, freqs="uniform", freqs_learned=True, rotary_fraction=0.5, logit_scale="log_n"),
}


@pytest.mark.parametrize("pattern", [*FIXED, "alibi+rope"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_fast_step_gives_the_states_of_the_full_forward(pattern, settings):
    if not rope2d.knows_units(pattern):
        settings = {name: value for name, value in settings.items() if name != "grid_reset"}
    m, tokens, pad = build(pattern, **settings), random_tokens(3, 30), torch.tensor([0, 9, 4])
    for prompt, padding, atol in ((12, pad, 1e-4), (0, None, 1e-4), (12, pad, 2e-6)):
        m = m.double() if atol < 1e-4 else m
        cache, other = m.new_cache(30), m.new_cache()
        expected = m.hidden(tokens, other, padding)
        m.prefill(tokens[:, :prompt], cache, padding)
        with torch.inference_mode():
            step = FastStep(m, cache, 3)
            states = torch.stack([step(token) for token in tokens[:, prompt:].unbind(1)], 1)
        close(states, expected[:, prompt:], atol)
        assert cache.length == 30 and torch.equal(cache.state, other.state)
        for mine, theirs in zip(cache.keys + cache.values, other.keys + other.values, strict=True):
            close(mine[0, :, :30], theirs[0, :, :30], atol)


@pytest.mark.parametrize("pattern", [*FIXED, "auto-2d-rope", "auto-2d-rope sigmoid"])
@pytest.mark.parametrize("autocast", [False, True])
def test_generation_takes_fast_steps_wherever_they_fit(pattern, autocast, monkeypatch):
    m, seen, hidden = build(pattern, n_kv_head=2), [], Decoder.hidden

    def spy(model, tokens, cache, pad=None, keys_only=False):
        seen.append((tokens.shape[1], keys_only))
        return hidden(model, tokens, cache, pad, keys_only)

    monkeypatch.setattr(Decoder, "hidden", spy)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert len(list(generate(m, [[7, 1, 2], [4]], 5))) == 5
    assert seen == [(2, True)] + ([(1, False)] * 5 if autocast or "auto" in pattern else [])


def test_generation_makes_room_once_and_never_copies_its_cache(monkeypatch):
    m, caches, places, new_cache = build(), [], set(), Decoder.new_cache
    monkeypatch.setattr(Decoder, "new_cache", lambda *a: [caches.append(new_cache(*a)), caches[-1]][1])
    for _ in generate(m, [[7, 1, 2]], 40):
        places.add((*(t.data_ptr() for t in caches[0].keys + caches[0].values), caches[0].keys[0].shape[2]))
    assert len(places) == 1 and places.pop()[-1] == 42  # the last token needs no place
    assert len(list(generate(m, [[1] * 60, [1]], 5))) == 5  # nor does it count towards block_size=64


def test_generation_is_a_function_of_its_seed_and_of_top_k():
    m, prompts = build(), [[1, 2, 3], [4]]

    def run(**how):
        return torch.stack(list(generate(m, prompts, 15, **how))).tolist()

    assert run(temperature=2.0, seed=1) == run(temperature=2.0, seed=1) != run(temperature=2.0, seed=2)
    assert run(temperature=2.0, top_k=1, seed=1) == run(temperature=2.0, top_p=1e-9) == run()


@pytest.mark.parametrize(
    "temperature, top_k, top_p, kept",
    [
        (1.0, None, None, 5),
        (2.5, None, None, 5),
        (0.5, 3, None, 3),
        (1.0, None, 0.65, 2),  # 0.4 + 0.3 reaches 0.65
        (1.0, None, 0.71, 3),
        (1.0, None, 1e-9, 1),
        (1.0, 4, 0.75, 3),  # top_p of what top_k leaves: 0.4 + 0.3 of 0.95 is below 0.75
    ],
)
def test_samples_follow_the_truncated_distribution(temperature, top_k, top_p, kept):
    n, p = 20_000, torch.tensor([0.15, 0.4, 0.05, 0.3, 0.1], dtype=torch.float64)
    drawn = choose_token(p.log().float().expand(n, -1), temperature, top_k, top_p, torch.Generator().manual_seed(3))
    expected = p ** (1 / temperature)
    expected[p.argsort(descending=True)[kept:]] = 0
    expected /= expected.sum()
    share = torch.bincount(drawn, minlength=5) / n
    assert ((share - expected).abs() <= 5 * (expected * (1 - expected) / n).sqrt() + 1e-9).all(), share


@pytest.mark.parametrize(
    "prompts, n, how, named",
    [
        ([[1]], 2, dict(top_p=0.0), "top_p=0.0"),
        ([[1]], 2, dict(top_p=1.5), "top_p=1.5"),
        ([[1]], 2, dict(top_k=0), "top_k=0"),
        ([[1]], 2, dict(temperature=-1.0), "temperature=-1.0"),
        ([[1] * 60, [1]], 6, {}, "65 tokens .* block_size=64"),
        ([[1], []], 5, {}, "an empty prompt"),
        ([], 5, {}, "an empty prompt"),
    ],
)
def test_what_cannot_be_generated_is_refused(prompts, n, how, named):
    with pytest.raises(ValueError, match=named):
        list(generate(build(), prompts, n, **{"temperature": 1.0} | how))


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A run of a model of bytes that knows one text: an end of sequence, "Hi é" and a line break, the end again."""
    out, text = tmp_path_factory.mktemp("runs") / "chain", [256, *"Hi é\n".encode()]
    saved = torch.load(pretrained(out, zero_init_residual=True) / "last.pt")  # blocks are the identity
    saved["model"]["head.weight"][[*text[1:], text[0]]] = 3 * saved["model"]["embed.weight"][text]
    checkpoint.save(saved, out / "last.pt")
    saved["model"]["head.weight"].zero_()
    checkpoint.save(saved, out / "best.pt")
    return out


def written(chain, monkeypatch, capsys, *flags: str, stdin: str = "") -> str:
    monkeypatch.setattr(sys, "argv", ["sample.py", f"--run={chain}", "--device=cpu", *flags])
    monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
    sample.main()
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, stdin, text",
    [
        (["--prompt=say H"], "", "say Hi é\n\n"),  # it ends at the end of the text
        ([], "", "Hi é\n\n"),  # and begins after one
        (["--prompt=-"], "a\nH", "a\nHi é\n\n"),
        (["--prompt=H", "--max_new_tokens=3"], "", "Hi \ufffd\n"),  # half a character
        (["--prompt=H", "--max_new_tokens=2", "--checkpoint=best"], "", "H\0\0\n"),  # all tokens are as likely
        (["--prompt=H", "--dtype=bfloat16"], "", "Hi é\n\n"),
    ],
)
def test_text_is_written_from_a_checkpoint(chain, monkeypatch, capsys, flags, stdin, text):
    assert written(chain, monkeypatch, capsys, *flags, stdin=stdin) == text


def test_the_knobs_are_those_of_generation(chain, monkeypatch, capsys):
    seen = []

    def spy(model, prompts, *how):
        seen.append((model.training, prompts, *how, torch.is_autocast_enabled("cpu")))
        return iter(())

    monkeypatch.setattr(sample, "generate", spy)
    flags = ["--temperature=0.5", "--top_k=3", "--top_p=0.9", "--seed=4", "--max_new_tokens=7", "--dtype=bfloat16"]
    written(chain, monkeypatch, capsys, "--prompt=é", *flags)
    written(chain, monkeypatch, capsys)
    written(chain, monkeypatch, capsys, "--prompt=" + 150 * "a", "--block_size=405")
    assert seen[0] == (False, [[0xC3, 0xA9]], 7, 0.5, 3, 0.9, 4, True) and seen[1][1] == [[256]]


@pytest.mark.parametrize(
    "error, match, flags",
    [
        (ValueError, "run='': expected a run directory", ["--run="]),
        (ValueError, "seed=-1", ["--seed=-1"]),
        (ValueError, "sequence of 405 tokens .* block_size=400", ["--prompt=" + 150 * "a"]),
        (FileNotFoundError, "no such checkpoint", ["--run=out/none"]),
        (ValueError, "--top_p=0.5 would do nothing here, it is for --temperature above 0", ["--top_p=0.5"]),
    ],
)
def test_what_cannot_be_written_is_refused(chain, monkeypatch, capsys, error, match, flags):
    with pytest.raises(error, match=match):
        written(chain, monkeypatch, capsys, *flags)
    assert capsys.readouterr().out == ""  # not even the prompt


def test_the_tokenizer_is_that_of_the_run():
    bytes_tokenizer = load_tokenizer("bytes")
    known = {"tokenizer": "moved away", "data": {"tokenizer": bytes_tokenizer.fingerprint}}
    assert sample.tokenizer_of("out/a", known, "bytes") is bytes_tokenizer
    with pytest.raises(
        ValueError, match="'bytes' is not the one that out/a has: size: 9 there, 257 here; .*--tokenizer"
    ):
        sample.tokenizer_of("out/a", {"tokenizer": "bytes", "data": {"tokenizer": {"size": 9}}})
    with pytest.raises(ValueError, match="out/a: not trained on text, so it has no tokenizer"):
        sample.tokenizer_of("out/a", {"data": {"vocabulary": []}})


def test_a_new_encoding_is_a_line_in_the_table_of_planes(monkeypatch):
    pairs = (lambda positions: positions[rope2d.INDEX] // 2, lambda positions: positions[rope2d.INDEX] % 2)
    monkeypatch.setitem(rope2d.PLANES, "pairs", pairs)
    config = ModelConfig(n_embd=32, vocab_size=37, pos_encoding="pairs+2d-rope", n_layer=2)
    model = Decoder(config, (torch.arange(37) % 5).expand(3, 37))
    positions, _ = rope2d.grid(torch.arange(37)[None], model.breaks)
    freqs = rope2d.frequencies("geometric", 4, 10_000.0, 0)
    expected = torch.cat([(positions[0] // 2)[..., None] * freqs, (positions[0] % 2)[..., None] * freqs], -1)
    torch.testing.assert_close(model.rotary["pairs"](positions)[0], expected.cos().float(), atol=1e-6, rtol=0)
    for p in model.parameters():
        p.data.normal_(0, 0.3)
    tokens = [3, 1, 4, 5, 9, 2, 6]
    (written,) = torch.stack([*generate(model.eval(), [tokens], 12)], 1).tolist()
    with torch.no_grad():
        for _ in range(12):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert tokens[7:] == written
