"""hf.py and modeling_nano2d.py: folders in and out, against our decoder and against transformers' own Qwen3."""

import functools
import json
import random
import shutil
import sys
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from conftest import pretrained, run
from test_theory import copier

import checkpoint
import configurator
import data_copy
import hf
import rope2d
from model import Decoder, ModelConfig
from sample import generate
from tokenizer import LLAMA3_PATTERN, Tokenizer, load_tokenizer

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
tiktoken = pytest.importorskip("tiktoken")

VOCAB, PROMPT = 61, 33
LINES = (torch.arange(VOCAB) % 3 == 0).long() + (torch.arange(VOCAB) % 9 == 0)  # many, and some of two
BREAKS = torch.stack([LINES, LINES + (torch.arange(VOCAB) % 7 == 0), LINES + (torch.arange(VOCAB) % 5 == 0)])
HOW = dict(do_sample=False, pad_token_id=0, eos_token_id=VOCAB + 5)  # which never comes
GQA = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)  # heads of 64 in all, width 32
SHAPES = {
    "gqa": GQA,
    "tied": dict(num_attention_heads=4, num_key_value_heads=4, head_dim=8, tie_word_embeddings=True),
    "one kv head": dict(num_attention_heads=3, num_key_value_heads=1, head_dim=6, rope_theta=1e6, rms_norm_eps=1e-5),
    "tied gqa": GQA | dict(tie_word_embeddings=True, intermediate_size=20),
}
MODELS = {
    "rope": dict(pos_encoding="rope"),
    "2d-rope": dict(pos_encoding="2d-rope"),
    "nope": dict(pos_encoding="nope", n_kv_head=1),
    "alibi": dict(pos_encoding="alibi", logit_scale="log_n"),
    "4d-rope": dict(pos_encoding="4d-rope", logit_scale="log_n", freqs="mixed"),
    "bipe": dict(pos_encoding="bipe+hirope+segatron", freqs="uniform", grid_reset=7),
    "h-rope": dict(pos_encoding="h-rope", logit_scale="log_n", freqs="mixed", rope_theta=77.0, norm_eps=1e-3),
    "rnope": dict(pos_encoding="rnope", freqs="geometric", qk_norm=True),
    "tied": dict(pos_encoding="alibi+2d-rope", tie_weights=True, n_kv_head=None, head_dim=None, grid_reset=7),
    "all": dict(pos_encoding="h-rope", qk_norm=True, tie_weights=True, logit_scale="log_n", freqs="geometric")
    | dict(freqs_learned=True, rotary_fraction=0.6, grid_reset=7, mlp_dim=20),
}
CHAT = [{"role": "user", "content": "Copy it:\n01 10!"}, {"role": "assistant", "content": "01 10!"}] * 2


@pytest.fixture(autouse=True, scope="module")
def quiet(tmp_path_factory):
    """transformers keeps the folders' code where the test says, and is silent."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield


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
    values = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, head_dim=16, vocab_size=VOCAB, block_size=999)
    values |= dict(freqs="uniform", zero_init_residual=False, init_std=0.3) | changes
    model = Decoder(ModelConfig(**values), BREAKS).eval().requires_grad_(False)
    for name, p in model.named_parameters():
        if p.dim() == 1 or name.endswith("log_scale"):
            p.uniform_(0.5, 1.5) if p.dim() == 1 else p.normal_(0.0, 0.1)
    return model


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """name in MODELS -> the model, what transformers makes of its folder, and the folder."""

    @functools.cache
    def export(name: str) -> tuple:
        model, folder = ours(**MODELS[name]), tmp_path_factory.mktemp("ours")
        hf.save(model, None, folder)
        return model, reads(folder), folder

    return export


def reads(folder, **how):
    how = dict(trust_remote_code=True, dtype=torch.float32) | how
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **how).eval()


def edit_config(folder, drop=(), **changes) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: v for key, v in config.items() if key not in drop}))


def edit_weights(folder, edit) -> None:
    weights = safetensors_torch.load_file(folder / "model.safetensors")
    edit(weights)
    safetensors_torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def fingerprint(folder) -> dict:
    return load_tokenizer(str(folder)).fingerprint


def random_tokens(B: int, T: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (B, T), generator=torch.Generator().manual_seed(0))


def close(a: torch.Tensor, b: torch.Tensor, by: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, atol=by, rtol=0)


def same_weights(a, b) -> None:
    a, b = a.state_dict(), b.state_dict()
    assert a.keys() == b.keys()
    for name, weight in a.items():
        assert weight.dtype == b[name].dtype and torch.equal(weight, b[name]), name


# Models of ours in transformers


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_ours_and_the_folder_loads_back_bit_for_bit(exported, name):
    model, peer, folder = exported(name)
    tokens, again = random_tokens(2, 200), hf.load(folder)
    expected = model(tokens)
    assert (type(peer).__name__, peer.config.max_position_embeddings) == ("Nano2DForCausalLM", 999)
    assert expected.std() > 1
    close(peer(tokens).logits, expected)
    close(peer(tokens, logits_to_keep=3).logits, expected[:, -3:])
    same_weights(again, model)
    for knob, value in vars(again.config).items():
        assert value == getattr(model.config, knob) or getattr(model.config, knob) is None, knob


@pytest.mark.parametrize("name", MODELS)
def test_greedy_generation_gives_our_tokens_across_many_line_breaks(exported, name):
    model, peer, _ = exported(name)
    prompts = random_tokens(3, PROMPT)
    expected = torch.stack(list(generate(model, prompts.tolist(), 200)), dim=1)  # (3, 200)
    got = peer.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=200, **HOW)
    assert torch.equal(got[:, PROMPT:], expected)
    assert (LINES[expected] > 0).sum() > 100 and len(expected.unique()) > 30


WAYS = [{}, dict(use_cache=False), dict(cache_implementation="static"), dict(prompt_lookup_num_tokens=3)]
WAYS += [dict(prefill_chunk_size=n) for n in (1, 16, 50)]


@pytest.mark.parametrize("name", ["2d-rope", "alibi", "all"])
def test_all_ways_of_generating_give_the_same_tokens(exported, name):
    model, peer, _ = exported(name)
    lengths, rows = [PROMPT, 7, 20, 1, 12], random_tokens(5, PROMPT)
    padded, mask = torch.zeros_like(rows), torch.zeros_like(rows)
    for i, n in enumerate(lengths):
        padded[i, PROMPT - n :], mask[i, PROMPT - n :] = rows[i, :n], 1
    prompts = [row[:n].tolist() for row, n in zip(rows, lengths, strict=True)]
    expected = torch.stack(list(generate(model, prompts, 24)), dim=1)
    for way in WAYS:
        n = 1 if "prompt_lookup_num_tokens" in way else 5  # transformers looks up for one prompt alone
        got = peer.generate(padded[:n], attention_mask=mask[:n], max_new_tokens=24, **HOW | way)
        assert torch.equal(got[:, PROMPT:], expected[:n]), way


@pytest.mark.parametrize("name", ["2d-rope", "all"])
def test_beams_are_those_without_a_cache(exported, name):
    prompt, found = random_tokens(2, PROMPT), []
    how = HOW | dict(num_beams=4, num_return_sequences=4, max_new_tokens=20, attention_mask=torch.ones_like(prompt))
    for cache in (True, False):
        how |= dict(use_cache=cache, return_dict_in_generate=True, output_scores=True)
        found.append(exported(name)[1].generate(prompt, **how))
    assert torch.equal(*(out.sequences for out in found)) and len(found[0].sequences.unique(dim=0)) == 8
    torch.testing.assert_close(*(out.sequences_scores for out in found))


def test_a_cache_is_gone_on_with_where_all_ids_are_given_and_refused_where_not(exported):
    model, peer, _ = exported("2d-rope")
    tokens = random_tokens(1, 60)
    first = peer(tokens[:, :40])
    name = "cache" if "cache" in first else "past_key_values"  # in transformers 5, and in 4.57
    cache, positions = {name: first[name]}, peer.grid(tokens)[..., 40:]
    with pytest.raises(ValueError, match=r"position_ids=None, but rows .* give position_ids=model.grid\(all_ids"):
        peer(tokens[:, 40:], **cache)
    with pytest.raises(ValueError, match=r"position_ids has the shape \(1, 20\): expected \(7, 1, 20\)"):
        peer(tokens[:, 40:], position_ids=positions[0], **cache)
    close(peer(tokens[:, 40:], position_ids=positions, **cache).logits, model(tokens)[:, 40:])
    expected = torch.stack(list(generate(model, tokens.tolist(), 20)), dim=1)
    longer, mask = torch.cat([tokens, expected[:, :1]], dim=1), torch.ones(1, 61)
    assert torch.equal(peer.generate(longer, attention_mask=mask, **cache, max_new_tokens=19, **HOW)[:, 60:], expected)
    with pytest.raises((ValueError, IndexError)):  # only the new ids; 4.57 itself trips over them
        peer.generate(tokens[:, :1], attention_mask=torch.ones(1, 80), **cache, max_new_tokens=1, **HOW)


def test_it_trains_in_transformers_and_what_that_saves_is_read(exported, tmp_path):
    model, _, folder = exported("all")
    tokens, trained, gradients = random_tokens(2, 50), reads(folder).train(), []
    loss = model(tokens[:, :-1], tokens[:, 1:]).item() / 98
    for _ in range(2):
        got = trained(tokens, labels=tokens).loss
        assert got.item() == pytest.approx(loss, rel=1e-5)
        got.backward()
        gradients.append([p.grad.clone() for p in trained.parameters()])
        trained.zero_grad()
        trained.gradient_checkpointing_enable()
    assert all(one.any() and torch.equal(one, other) for one, other in zip(*gradients, strict=True))
    trained.model.norm.weight.data += 1
    trained.save_pretrained(tmp_path)
    again = hf.load(tmp_path)
    assert again.config == hf.load(folder).config and torch.equal(again.norm.weight, model.norm.weight + 1)
    close(reads(tmp_path)(tokens).logits, again(tokens))


def test_new_tokens_end_no_line_and_what_is_not_returned_is_refused(exported, tmp_path):
    model, _, folder = exported("all")
    bigger, size, tokens = reads(folder), model.config.vocab_size, random_tokens(2, 20)
    bigger.resize_token_embeddings(size + 3)
    new = torch.cat([tokens, torch.tensor([[size], [size + 2]]), tokens], dim=1)
    close(bigger(new).logits[:, :20, :size], model(tokens))
    assert torch.equal(bigger.grid(new)[..., :20], bigger.grid(tokens)) and not bigger.model.breaks[:, size:].any()
    bigger.save_pretrained(tmp_path)
    close(reads(tmp_path)(new).logits, bigger(new).logits)
    close(bigger(new, return_dict=False)[0], bigger(new).logits)
    for name in ("output_hidden_states", "output_attentions"):
        with pytest.raises(ValueError, match=f"{name}=True: this model returns logits alone"):
            bigger(new, **{name: True})


def test_other_dtypes_and_attention_functions(exported):
    model, _, folder = exported("all")
    peer, tokens = reads(folder, dtype=torch.bfloat16), random_tokens(1, 200)
    assert {p.dtype for name, p in peer.named_parameters() if "log_scale" not in name} == {torch.bfloat16}
    for encoding, rotary in model.rotary.items():  # in bfloat16 far positions would turn by wrong angles
        assert torch.equal(peer.model.rotary[encoding].scaled_phase(), rotary.scaled_phase())
    assert (peer(tokens).logits - model(tokens)).abs().mean() < 0.1
    close(reads(folder, attn_implementation="eager")(tokens).logits, model(tokens))


def test_frequencies_and_encoding_may_change_when_a_folder_of_ours_is_read(exported):
    model, _, folder = exported("2d-rope")
    changed = hf.load(folder, pos_encoding="h-rope", freqs="geometric", logit_scale="log_n")
    assert changed.config.pos_encoding == "h-rope" and torch.equal(changed.breaks, BREAKS)
    assert torch.equal(changed.rotary["rope"].phase, rope2d.Rotary("rope", 16).phase)
    assert torch.equal(changed.blocks[1].attention.log_n_scale, torch.ones(4))
    assert torch.equal(changed.embed.weight, model.embed.weight)
    assert torch.equal(hf.load(folder, block_size=5).rotary["2d-rope"].phase, model.rotary["2d-rope"].phase)


@pytest.mark.parametrize("encoding", ["auto-2d-rope", "rope+auto-2d-rope"])
def test_a_model_that_learns_its_grid_is_not_written(tmp_path, encoding):
    with pytest.raises(ValueError, match="auto-2d-rope' cannot be exported: .*eval.py and sample.py"):
        hf.save(ours(pos_encoding=encoding), None, tmp_path / "new")
    assert not (tmp_path / "new").exists()


K, N = "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"
FAULTS = [  # what happens to a folder, what load says of it, and what from_pretrained
    (lambda f: (f / "modeling_nano2d.py").unlink(), "", "have a file named modeling_nano2d.py"),
    (lambda f: (f / "rope2d.py").unlink(), "", "No such file.*rope2d.py"),
    (lambda f: (f / "model.safetensors").unlink(), "model.safetensors: no such file", "model.safetensors"),
    (lambda f: (f / "config.json").unlink(), "config.json: no such file", "config.json"),
    (lambda f: (f / "config.json").write_text("{"), "config.json: damaged", "config.json"),
    (lambda f: edit_config(f, n_embd="wide"), "n_embd = 'wide' .from .*config.json.: expected int", "."),
    (lambda f: edit_config(f, pos_encoding="rope"), "2d-rope.phase: .* absent", "unexpected_keys: model.rotary.2d"),
    (lambda f: edit_config(f, n_layer=3), "model.layers.2.*: absent there", "missing_keys: model.layers.2"),
    (lambda f: edit_config(f, rope_theta=7.0), "", "another rope_theta, 7.0"),
    (lambda f: edit_weights(f, lambda w: w.pop(K)), f"{K}: absent there", f"missing_keys: {K}"),
    (lambda f: edit_weights(f, lambda w: w.update(a=w[N] + 1)), "other weights .*: a: .* absent", "unexpected_keys: a"),
    (lambda f: edit_weights(f, lambda w: w.update({N: w[N][1:]})), rf"{N}: '\[31\] .*'\[32\]", "."),
    (lambda f: edit_weights(f, lambda w: w.update({N: w[N].long()})), f"{N}: .*whole numbers' there", None),
]


@pytest.mark.parametrize("edit, here, there", FAULTS)
def test_a_damaged_or_edited_folder_of_ours(tmp_path, edit, here, there):
    folder = tmp_path / "folder"
    hf.save(ours(pos_encoding="h-rope", freqs="geometric"), None, folder)
    edit(folder)
    if here:
        with pytest.raises((ValueError, RuntimeError, FileNotFoundError), match=here):
            hf.load(folder)
    if there is not None:
        with pytest.raises(Exception, match=there):
            reads(folder)


# Qwen3, in and out


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder that transformers wrote, and the model in it. Tests copy what they change."""
    folder, model = tmp_path_factory.mktemp("theirs"), theirs()
    model.save_pretrained(folder)
    return folder, model


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "copy")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_qwen3s_logits_are_those_of_transformers_and_its_weights_come_back(tmp_path, shape):
    peer, tokens = theirs(**shape), random_tokens(2, 200)
    peer.save_pretrained(tmp_path / "a")
    model, expected = hf.load(tmp_path / "a").requires_grad_(False), peer(tokens).logits
    assert expected.std() > 1
    close(model(tokens), expected, 1e-4)
    cache = model.new_cache()
    pieces = [model.head(model.hidden(part, cache)) for part in tokens.split([150, 1, 49], dim=1)]
    close(torch.cat(pieces, 1), expected, 1e-4)
    hf.save(model, None, tmp_path / "b")
    again = reads(tmp_path / "b")
    same_weights(again, peer)
    assert torch.equal(again(tokens).logits, expected)
    for key in ("head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(again.config, key) == getattr(peer.config, key), key


@pytest.mark.parametrize("change", [{}, dict(tie_weights=True, rope_theta=5e5), dict(n_kv_head=None, head_dim=None)])
def test_a_rope_model_of_ours_with_qk_norm_is_a_qwen3(tmp_path, change):
    model, folder = ours(pos_encoding="rope", qk_norm=True, freqs="geometric", **change), tmp_path / "new" / "folder"
    hf.save(model, None, folder)
    again, peer, tokens = hf.load(folder), reads(folder, trust_remote_code=False), random_tokens(2, 50)
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in model.named_parameters())
    close(peer(tokens).logits, model(tokens), 1e-4)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    config = json.loads((folder / "config.json").read_text())
    theta = change.get("rope_theta", 10_000.0)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == theta  # transformers 4 and 5
    assert config["dtype"] == config["torch_dtype"] == "float32"


def test_bfloat16_is_read_as_float32_and_written_as_it_is(tmp_path):
    theirs().bfloat16().save_pretrained(tmp_path / "a")
    model = hf.load(tmp_path / "a")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    hf.save(model.bfloat16(), None, tmp_path / "b")
    same_weights(reads(tmp_path / "b", dtype="auto"), theirs().bfloat16())


def test_sharded_weights_are_the_same_weights(saved, tmp_path):
    saved[1].save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2 and not (tmp_path / "model.safetensors").exists()
    same_weights(hf.load(tmp_path), hf.load(saved[0]))
    shutil.copy(shards[0], shards[1])
    with pytest.raises(RuntimeError, match=f"{tmp_path}: other weights than config.json asks for: .*: absent there"):
        hf.load(tmp_path)
    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match=str(shards[1])):
        hf.load(tmp_path)


def test_both_styles_of_config_give_the_same_model_and_defaults_are_those_of_transformers(folder):
    style = dict(rope_theta=77.0, rope_scaling=None, torch_dtype="bfloat16", sliding_window=None, max_window_layers=28)
    edit_config(folder, drop=("rope_parameters", "dtype", "layer_types", "tie_word_embeddings"), **style)
    old = hf.load(folder)
    edit_config(folder, drop=style, rope_parameters={"rope_theta": 77, "rope_type": "default"}, dtype="bfloat16")
    new = hf.load(folder)
    assert old.config == new.config and new.config.rope_theta == 77.0
    same_weights(old, new)
    defaults = transformers.Qwen3Config()
    assert {name: getattr(defaults, name) for name in hf.DEFAULTS} == hf.DEFAULTS and not defaults.tie_word_embeddings


def write_tokenizer(folder, more=()) -> None:
    """Byte-level BPE: Ċ is a line break, Ġ a blank."""
    vocab = {piece: i for i, piece in enumerate(("Ġ", "Ċ", "a", "ĊĊ", "}Ċ", "Ġa", "\\n"))}
    added = [{"id": i, "content": content} for i, content in ((58, "<|endoftext|>"), (59, "<a>\n\n\n"), *more)]
    facts = {"model": {"vocab": vocab, "merges": []}, "added_tokens": added}
    facts["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "a"}}
    (folder / "tokenizer.json").write_text(json.dumps(facts))


@pytest.mark.parametrize("encoding", ["2d-rope", "h-rope", "auto-2d-rope", "nope", "alibi", "bipe"])
def test_rope_weights_go_into_another_encoding(folder, encoding):
    write_tokenizer(folder)
    rope = hf.load(folder)
    model = hf.load(folder, pos_encoding=encoding, rope_theta=None, block_size=300, logit_scale="log_n")
    assert (model.config.pos_encoding, model.config.rope_theta, model.config.logit_scale) == (encoding, None, "log_n")
    expected = {1: 1, 3: 2, 4: 1, 59: 3}  # beyond the tokenizer there are no line breaks
    assert model.breaks[0].tolist() == [expected.get(i, 0) for i in range(VOCAB)]
    assert all(torch.equal(model.get_parameter(name), p) for name, p in rope.named_parameters())
    twin, tokens = Decoder(model.config, rope.breaks), random_tokens(1, 300)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens), twin(tokens))
    assert not torch.allclose(model(tokens[:, :256]), rope(tokens[:, :256]))


def test_without_a_tokenizer_only_encodings_that_need_none(folder):
    assert not hf.load(folder, pos_encoding="rnope").breaks.any()
    for encoding in ("2d-rope", "h-rope"):
        with pytest.raises(ValueError, match=f"pos_encoding='{encoding}'.*tokenizer.json"):
            hf.load(folder, pos_encoding=encoding)
    write_tokenizer(folder, [(VOCAB, "b")])
    with pytest.raises(RuntimeError, match="tokenizer.json: 62 tokens, but config.json has vocab_size=61"):
        hf.load(folder)


REFUSED = dict(model_type="qwen2", attention_bias=True, attention_dropout=0.1, use_sliding_window=True)
REFUSED |= dict(hidden_act="gelu", quantization_config={"quant_method": "fp8"}, layer_types=["sliding_attention"])
REFUSED |= dict(rope_scaling={"type": "linear"}, rope_parameters={"rope_type": "yarn", "rope_theta": 1e6})


@pytest.mark.parametrize("key", REFUSED)
def test_what_the_decoder_cannot_express_is_refused_by_key_and_value(folder, key):
    edit_config(folder, **{key: REFUSED[key]})
    with pytest.raises(ValueError) as error:
        hf.load(folder)
    assert "config.json" in str(error.value) and f"{key}={REFUSED[key]!r}" in str(error.value)


@pytest.mark.parametrize("change", [dict(n_embd=64), dict(tie_weights=True), dict(qk_norm=False), dict(mlp_dim=None)])
def test_changes_of_the_weights_shapes_are_refused(folder, change):
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=f"^{name}={value}: .* have {name}="):
        hf.load(folder, **change)
    assert hf.load(folder, n_embd=32).config.n_embd == 32


def test_damaged_qwen3_folders(folder):
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole = weights.read_bytes()
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        weights.write_bytes(whole[:size])
        with pytest.raises(RuntimeError, match=f"{weights}: damaged"):
            hf.load(folder)
    config.write_text('{"model_type": "qwen3", "hidden_size": "wide"}')
    with pytest.raises(ValueError, match=f"{config}: .*: expected a whole number"):
        hf.load(folder)


def test_an_output_layer_beside_tied_weights_must_be_the_embedding(tmp_path):
    peer = theirs(tie_word_embeddings=True)
    peer.save_pretrained(tmp_path)
    embedding = peer.model.embed_tokens.weight
    edit_weights(tmp_path, lambda weights: weights.update({"lm_head.weight": embedding.clone()}))
    assert torch.equal(hf.load(tmp_path).head.weight, embedding)
    edit_weights(tmp_path, lambda weights: weights.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(RuntimeError, match="lm_head.weight differs"):
        hf.load(tmp_path)


def test_what_cannot_be_written_or_imported(tmp_path, monkeypatch):
    hf.save(ours(), None, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(configurator, "_fsync", Mock(side_effect=OSError("no space left")))
    with pytest.raises(RuntimeError, match="no space left"):
        hf.save(ours(pos_encoding="alibi"), None, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (lambda: hf.load(tmp_path), lambda: hf.save(ours(), None, tmp_path)):
        with pytest.raises(RuntimeError, match="pip install safetensors"):
            call()


# Tokenizers, and what runs on a folder

FUZZ = ["the", " self", "\n", "\n\n", "  ", " ", "\t", "12345", "7", "é", "日本", "'s", "'LL", "!!", "\r\n", "\nxyz\n"]
PATTERNS = dict(bytes=r"[\s\S]", llama3=LLAMA3_PATTERN, chatml=LLAMA3_PATTERN)
PATTERNS["gpt2"] = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
PATTERNS["cl100k"] = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
PATTERNS["cl100k"] += r"|\s*[\r\n]|\s+(?!\S)|\s"


def small(name: str) -> Tokenizer:
    """With one of PATTERNS, a few merges, a word that none makes, and as in cl100k ids that are no token."""
    pieces = b"th,the, t, the,\n\n,  ,12,123,se,el,lf,elf,self,\r\n,xyz".split(b",")
    ranks = {piece: i for i, piece in enumerate([bytes([i]) for i in range(256)] + pieces * (name != "bytes"))}
    end = "<|end_of_text|>" if name == "llama3" else "<|endoftext|>"
    ends = [end, "<|im_start|>", "<|im_end|>"] if name == "chatml" else [end]
    specials = {special: len(ranks) + 3 * (name == "cl100k") + i for i, special in enumerate(ends)}
    encoding = tiktoken.Encoding(name, pat_str=PATTERNS[name], mergeable_ranks=ranks, special_tokens=specials)
    return Tokenizer(encoding, end)


@pytest.mark.parametrize("name", PATTERNS)
def test_autotokenizer_gives_the_tokens_and_the_chats_of_our_tokenizer(name, tmp_path, monkeypatch):
    tokenizer = small(name)
    config = ModelConfig(n_layer=1, n_embd=16, head_dim=8, vocab_size=tokenizer.vocab_size + 3, block_size=99)
    model = Decoder(config, rope2d.break_table(tokenizer.token_bytes, config.vocab_size))
    with monkeypatch.context() as patch:
        patch.setattr(hf, "load_tokenizer", Mock(return_value=tokenizer))
        hf.save(model, name, tmp_path / "a")
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "a")  # 5 asks whether to trust the code, and waits
    chance = random.Random(0)
    for _ in range(100):
        text = "".join(chance.choices(FUZZ, k=30))
        assert found(text)["input_ids"] == tokenizer.encode(text).tolist(), text
        assert found.decode(tokenizer.encode(text).tolist()) == text
    assert (found.eos_token_id, found.padding_side, found.model_max_length) == (tokenizer.eos, "left", 99)
    ids, loss_mask = tokenizer.chat(CHAT)
    prompt = found.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=False)
    assert prompt == ids[: loss_mask.argmax()].tolist()
    if name != "gpt2":  # it cuts "\n\n" before a word where Tokenizer.chat does not
        assert found.apply_chat_template(CHAT, return_dict=False) == ids.tolist()
    ends = json.loads((tmp_path / "a" / "generation_config.json").read_text())["eos_token_id"]
    assert ids[loss_mask][-1] in ends and tokenizer.eos in ends
    if name != "cl100k":  # whose \p{N}{1,3}+ Hugging Face writes otherwise
        assert fingerprint(tmp_path / "a") == tokenizer.fingerprint
    own = tmp_path / "a" / "tokenizer.json"
    own.write_text(json.dumps(json.loads(own.read_text()), indent=2))
    hf.save(model, str(own.parent), tmp_path / "b")
    assert (tmp_path / "b" / "tokenizer.json").read_bytes() == own.read_bytes()


def test_a_run_is_exported_by_the_script_finetuned_and_kept_apart_from_other_tokenizers(tmp_path, monkeypatch):
    folder, source = tmp_path / "hf", pretrained(tmp_path / "run", "h-rope")
    monkeypatch.setattr(sys, "argv", ["hf.py", f"--run={source}", f"--out_dir={folder}"])
    hf.main()
    model, _ = checkpoint.load_run(str(source))
    batch = transformers.AutoTokenizer.from_pretrained(folder)(["a\nb c", "a"], return_tensors="pt", padding=True)
    expected = [model(torch.tensor([[*b"a\nb c"]]))[0, -1], model(torch.tensor([[*b"a"]]))[0, -1]]
    close(reads(folder)(**batch).logits[:, -1], torch.stack(expected))
    last = run(tmp_path / "tuned", task="finetune", init_from=folder, tokenizer=folder, max_steps=1, learning_rate=1e-9)
    torch.testing.assert_close(last["model"], model.state_dict(), atol=1e-6, rtol=0)
    assert last["config"]["pos_encoding"] == "h-rope" and last["data"]["tokenizer"] == fingerprint(folder)
    with pytest.raises(ValueError, match="tokenizer='bytes': 257 tokens for vocab_size=61"):
        hf.save(ours(), "bytes", tmp_path / "new")
    model.breaks[0, 7] = 1
    with pytest.raises(ValueError, match="tokenizer='bytes': .*other breaks than the model's"):
        hf.save(model, "bytes", tmp_path / "new")
    other = shutil.copytree(folder, tmp_path / "other")
    write_tokenizer(other)
    with pytest.raises(RuntimeError, match="other: tokenizer.json is not the model's: size: 257 there, 60 here"):
        hf.load(other)
    hf.save(ours(pos_encoding="nope"), str(other), folder)  # in place of the first
    assert json.loads((folder / "config.json").read_text())["tokenizer_fingerprint"] == fingerprint(other)


def test_a_pipeline_copies_a_string_of_320(tmp_path):
    hf.save(copier(4.0), data_copy.VOCAB, tmp_path)
    pipe = transformers.pipeline("text-generation", str(tmp_path), trust_remote_code=True)
    (source,) = data_copy.evaluation_strings("uniform", 320, 320, 1, 0)
    prompt = f"<n> I: {data_copy.text(source)} <n> <n> O:"
    written = pipe(prompt, max_new_tokens=400, do_sample=False)[0]["generated_text"].removeprefix(prompt)
    assert written.split() == data_copy.text(source).split()
    with pytest.raises(Exception, match="UNK"):
        pipe("Hello")


@pytest.mark.parametrize("encoding", ["rope", "2d-rope"])
def test_an_exported_copy_run_is_a_start_for_another(tmp_path, encoding):
    run(tmp_path / "run", max_steps=1, pos_encoding=encoding, qk_norm=True)
    model, trained = checkpoint.load_run(str(tmp_path / "run"))
    hf.save(model, trained["data"]["vocabulary"], tmp_path / "hf")
    start, known = hf.load_start(str(tmp_path / "hf"), {})
    assert known == {"vocabulary": trained["data"]["vocabulary"]} == {"vocabulary": data_copy.VOCAB}
    assert all(torch.equal(start.state_dict()[name], p) for name, p in model.state_dict().items())
    run(tmp_path / "next", max_steps=2, init_from=str(tmp_path / "hf"))


def test_lm_eval_measures_what_our_decoder_does(tmp_path, monkeypatch):
    tasks = pytest.importorskip("lm_eval.tasks")
    evaluator = pytest.importorskip("lm_eval.evaluator")
    pytest.importorskip("accelerate", reason="lm_eval --model hf needs accelerate")
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", str)
    model, _ = checkpoint.load_run(str(pretrained(tmp_path / "run", "2d-rope", block_size=64)))
    hf.save(model, "bytes", tmp_path / "hf")
    chance = random.Random(1)
    texts = [["".join(chance.choices("ab \n", k=n)) + "." for n in (5 + 8 * i, 3, 4)] for i in range(12)]
    docs = [{"q": q, "choices": choices, "gold": chance.randrange(2)} for q, *choices in texts]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    task = {"task": "choice", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice"}
    task["dataset_kwargs"] = {"data_files": {"test": f"{tmp_path}/docs.jsonl"}, "cache_dir": str(tmp_path)}
    task |= {"doc_to_text": "{{q}}", "doc_to_choice": "choices", "doc_to_target": "gold"}
    (tmp_path / "choice.yaml").write_text(json.dumps(task | {"metric_list": [{"metric": "acc"}]}))
    manager = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    how = dict(model_args=f"pretrained={tmp_path}/hf,trust_remote_code=True", device="cpu", batch_size=5)
    found = evaluator.simple_evaluate("hf", tasks=["choice"], task_manager=manager, bootstrap_iters=0, **how)
    hits = 0
    for doc, sample in zip(docs, found["samples"]["choice"], strict=True):
        nats = []
        for choice in doc["choices"]:
            ids, n = torch.tensor([*f"{doc['q']} {choice}".encode()][-65:]), len(choice) + 1
            nats.append(-F.cross_entropy(model(ids[None, :-1])[0, -n:], ids[-n:], reduction="sum").item())
        assert [nat for ((nat, _),) in sample["resps"]] == pytest.approx(nats, abs=1e-4)
        hits += nats[doc["gold"]] == max(nats)
    assert found["results"]["choice"]["acc,none"] == hits / 12 and 0 < hits < 12
