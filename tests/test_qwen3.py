"""qwen3.py against transformers' own Qwen3, on small random weights: logits, tokens and files, both ways."""

import json
import shutil
import sys

import pytest
import torch

import qwen3
from model import Decoder, ModelConfig

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

VOCAB = 61
GQA = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)  # heads of 64 in all, width 32
SHAPES = {
    "gqa": GQA,
    "tied": dict(num_attention_heads=4, num_key_value_heads=4, head_dim=8, tie_word_embeddings=True),
    "one kv head": dict(num_attention_heads=3, num_key_value_heads=1, head_dim=6, rope_theta=1e6, rms_norm_eps=1e-5),
    "tied gqa": GQA | dict(tie_word_embeddings=True, intermediate_size=20),
}
BYTES = {"Ġ": 0, "Ċ": 1, "a": 2, "ĊĊ": 3, "}Ċ": 4, "Ġa": 5, "\\n": 6}  # byte-level BPE: Ċ is a line break, Ġ a blank


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
    torch.manual_seed(1)
    values = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, head_dim=16, vocab_size=VOCAB, block_size=256)
    values |= dict(pos_encoding="rope", qk_norm=True, zero_init_outputs=False, init_std=0.25) | changes
    model = Decoder(ModelConfig(**values), torch.zeros(VOCAB)).eval().requires_grad_(False)
    for name, p in model.named_parameters():
        if "norm" in name:
            p.uniform_(0.5, 1.5)
    return model


def reads(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def write_tokenizer(folder, vocab=BYTES, **more) -> None:
    added = [{"id": 58, "content": "<|end|>"}, {"id": 59, "content": "<a>\n\n\n"}]
    contents = {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": added} | more
    (folder / "tokenizer.json").write_text(json.dumps(contents))


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
def test_logits_are_those_of_transformers_with_a_cache_and_without(tmp_path, shape):
    peer, tokens = theirs(**shape), random_tokens(2, 200)
    peer.save_pretrained(tmp_path)
    model, expected = qwen3.load(tmp_path).requires_grad_(False), peer(tokens).logits
    assert expected.std() > 1
    torch.testing.assert_close(model(tokens), expected, atol=1e-4, rtol=0)
    cache = model.new_cache()
    pieces = [model.head(model.hidden(part, cache)) for part in tokens.split([150, 1, 49], dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), expected, atol=1e-4, rtol=0)


def test_greedy_generation_gives_the_tokens_of_transformers(saved):
    prompt = random_tokens(1, 9)
    how = dict(attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0)
    expected = saved[1].generate(prompt, max_new_tokens=200, **how)[0, 9:].tolist()
    assert len(expected) == 200 and len(set(expected)) > 5
    assert [int(token) for token in qwen3.load(saved[0]).generate(prompt.tolist(), 200)] == expected


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_their_weights_come_back_bit_for_bit(tmp_path, shape):
    peer = theirs(**shape)
    peer.save_pretrained(tmp_path / "a")
    qwen3.save(qwen3.load(tmp_path / "a"), tmp_path / "b")
    again = reads(tmp_path / "b")
    same_weights(again, peer)
    for key in ("rope_parameters", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings"):
        assert getattr(again.config, key) == getattr(peer.config, key), key
    assert torch.equal(again(random_tokens(1, 40)).logits, peer(random_tokens(1, 40)).logits)


@pytest.mark.parametrize("change", [{}, dict(tie_weights=True, rope_theta=5e5), dict(n_kv_head=None, head_dim=None)])
def test_our_weights_come_back_bit_for_bit(tmp_path, change):
    model, tokens = ours(**change), random_tokens(2, 50)
    qwen3.save(model, tmp_path / "new" / "folder")
    again = qwen3.load(tmp_path / "new" / "folder")
    same_weights(again, model)
    assert torch.equal(again(tokens), model(tokens))
    torch.testing.assert_close(reads(tmp_path / "new" / "folder")(tokens).logits, model(tokens), atol=1e-4, rtol=0)
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["config.json", "model.safetensors"]


def test_bfloat16_is_read_as_float32_and_written_as_it_is(tmp_path):
    theirs().bfloat16().save_pretrained(tmp_path / "a")
    model = qwen3.load(tmp_path / "a")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    qwen3.save(model.bfloat16(), tmp_path / "b")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype="auto")
    same_weights(again, theirs().bfloat16())


def test_sharded_weights_are_the_same_weights(saved, tmp_path):
    saved[1].save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2 and not (tmp_path / "model.safetensors").exists()
    same_weights(qwen3.load(tmp_path), qwen3.load(saved[0]))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    name = next(name for name, shard in index["weight_map"].items() if shard == shards[1].name)
    shutil.copy(shards[0], shards[1])
    with pytest.raises(RuntimeError, match=f"{shards[1]}: model.* is surplus"):
        qwen3.load(tmp_path)
    safetensors_torch.save_file({}, shards[1])
    with pytest.raises(RuntimeError, match=f"{tmp_path}: no tensor .*{name}"):
        qwen3.load(tmp_path)
    shards[1].unlink()
    with pytest.raises(FileNotFoundError, match=str(shards[1])):
        qwen3.load(tmp_path)


def test_both_styles_of_config_give_the_same_model(saved, folder):
    style = dict(rope_theta=77.0, rope_scaling=None, torch_dtype="bfloat16", sliding_window=None, max_window_layers=28)
    edit_config(folder, drop=("rope_parameters", "dtype", "layer_types"), **style)
    old = qwen3.load(folder)
    edit_config(folder, drop=style, rope_parameters={"rope_theta": 77, "rope_type": "default"}, dtype="bfloat16")
    new = qwen3.load(folder)
    assert old.config == new.config and new.config.rope_theta == 77.0
    same_weights(old, new)
    torch.testing.assert_close(new(random_tokens(1, 30)), reads(folder)(random_tokens(1, 30)).logits, atol=1e-4, rtol=0)


def test_what_we_write_has_theta_and_dtype_in_both_styles(tmp_path):
    qwen3.save(ours(rope_theta=5e5), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 5e5
    assert config["dtype"] == config["torch_dtype"] == "float32" and config["model_type"] == "qwen3"


@pytest.mark.parametrize("encoding", ["2d-rope", "h-rope", "auto-2d-rope", "nope", "alibi"])
def test_rope_weights_go_into_another_encoding(saved, folder, encoding):
    write_tokenizer(folder)
    rope = qwen3.load(folder)
    model = qwen3.load(folder, pos_encoding=encoding, rope_theta=None, block_size=300)
    assert model.config.pos_encoding == encoding and model.config.rope_theta is None
    for name, p in rope.named_parameters():
        assert torch.equal(model.get_parameter(name), p), name
    tokens = random_tokens(1, 300)
    twin = Decoder(model.config, rope.newlines)
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens), twin(tokens))
    assert not torch.allclose(model(tokens[:, :256]), rope(tokens[:, :256]))


def test_line_breaks_are_counted_in_the_tokenizers_bytes(folder):
    write_tokenizer(folder)
    expected = {1: 1, 3: 2, 4: 1, 59: 3}  # beyond the tokenizer there are none
    assert qwen3.load(folder, pos_encoding="2d-rope").newlines.tolist() == [expected.get(i, 0) for i in range(VOCAB)]


def test_without_a_tokenizer_only_encodings_that_need_none(folder):
    assert not qwen3.load(folder, pos_encoding="rnope").newlines.any()
    for encoding in ("2d-rope", "h-rope"):
        with pytest.raises(ValueError, match=f"pos_encoding='{encoding}'.*tokenizer.json"):
            qwen3.load(folder, pos_encoding=encoding)


@pytest.mark.parametrize(
    "tokenizer, error, named",
    [
        (dict(vocab={"▁a": 0, "<0x0A>": 1, "Ċ": 2}), ValueError, "byte-level BPE"),
        (dict(vocab=[["a", 0.0]]), ValueError, "byte-level BPE"),
        (dict(vocab=BYTES | {"b": VOCAB}), RuntimeError, "token 61.*vocab_size=61"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(folder, tokenizer, error, named):
    write_tokenizer(folder, **tokenizer)
    with pytest.raises(error, match=f"tokenizer.json: .*{named}"):
        qwen3.load(folder, pos_encoding="2d-rope")


@pytest.mark.parametrize(
    "key, value",
    [
        ("model_type", "qwen2"),
        ("attention_bias", True),
        ("attention_dropout", 0.1),
        ("use_sliding_window", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "fp8"}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}),
    ],
)
def test_what_the_decoder_cannot_express_is_refused_by_key_and_value(folder, key, value):
    edit_config(folder, **{key: value})
    with pytest.raises(ValueError) as error:
        qwen3.load(folder)
    assert "config.json" in str(error.value) and f"{key}={value!r}" in str(error.value)


@pytest.mark.parametrize("change", [dict(n_embd=64), dict(tie_weights=True), dict(qk_norm=False), dict(mlp_dim=None)])
def test_changes_of_the_weights_shapes_are_refused(folder, change):
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=f"^{name}={value}: .* have {name}="):
        qwen3.load(folder, **change)
    assert qwen3.load(folder, n_embd=32).config.n_embd == 32


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(pos_encoding="2d-rope"), "pos_encoding='2d-rope'"),
        (dict(pos_encoding="h-rope"), "pos_encoding='h-rope'"),
        (dict(qk_norm=False), "qk_norm=False"),
        (dict(freqs="uniform"), "freqs='uniform'"),
        (dict(freqs_learned=True), "freqs_learned=True"),
        (dict(rotary_fraction=0.5), "rotary_fraction=0.5"),
        (dict(logit_scale="log_n"), "logit_scale='log_n'"),
        (dict(grid_reset=3), "grid_reset=3"),
    ],
)
def test_what_qwen3_cannot_express_is_not_written(tmp_path, change, named):
    with pytest.raises(ValueError, match=f"^{named}: Hugging Face's Qwen3 only knows"):
        qwen3.save(ours(**change), tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_files_are_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=str(folder / name)):
        qwen3.load(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '{"model_type": "qwen3", "hidden_size": "wide"}'])
def test_a_damaged_config_is_refused_by_name(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(ValueError if text == "{}" else RuntimeError, match="config.json: "):
        qwen3.load(folder)


K_PROJ, O_PROJ = "model.layers.1.self_attn.k_proj.weight", "model.layers.2.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    "edit, named",
    [
        (lambda w: w.pop(K_PROJ), f"no tensor {K_PROJ}"),
        (lambda w: w.update(score=torch.zeros(2, 32)), "score is surplus"),
        (lambda w: w.update({O_PROJ: w[O_PROJ].T.contiguous()}), rf"{O_PROJ} is .*\[64, 32\].*\[32, 64\]"),
        (lambda w: w.update({O_PROJ: w[O_PROJ].long()}), f"{O_PROJ} is torch.int64"),
    ],
)
def test_tensors_that_do_not_fit_are_named_with_their_file(folder, edit, named):
    edit_weights(folder, edit)
    with pytest.raises(RuntimeError, match=f"{folder / 'model.safetensors'}: {named}"):
        qwen3.load(folder)


def test_truncated_weights_are_damaged(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(RuntimeError, match=f"{path}: damaged"):
            qwen3.load(folder)


def test_an_output_layer_beside_tied_weights_must_be_the_embedding(tmp_path):
    peer = theirs(tie_word_embeddings=True)
    peer.save_pretrained(tmp_path)
    embedding = peer.model.embed_tokens.weight
    edit_weights(tmp_path, lambda weights: weights.update({"lm_head.weight": embedding.clone()}))
    assert torch.equal(qwen3.load(tmp_path).head.weight, embedding)
    edit_weights(tmp_path, lambda weights: weights.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(RuntimeError, match="lm_head.weight differs"):
        qwen3.load(tmp_path)


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    qwen3.save(ours(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def half(weights, path, metadata):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(safetensors_torch, "save_file", half)
    with pytest.raises(RuntimeError, match="model.safetensors: cannot be written.*no space left"):
        qwen3.save(ours(rope_theta=5.0), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_without_safetensors_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (lambda: qwen3.load(tmp_path), lambda: qwen3.save(ours(), tmp_path)):
        with pytest.raises(RuntimeError, match="pip install safetensors"):
            call()
