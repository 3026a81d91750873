"""Hugging Face Qwen3 folders in and out. Needs model.py beside it, and safetensors.

    model = qwen3.load("Qwen3-0.6B")                                # config.json, model*.safetensors, tokenizer.json
    model = qwen3.load("Qwen3-0.6B", pos_encoding="h-rope", rope_theta=None)  # RoPE's weights, another encoding
    qwen3.save(model, "out/qwen3")                                  # AutoModelForCausalLM.from_pretrained reads it

Hugging Face keeps q, k, v apart, and gate and up: here they are rows of attention.qkv and of mlp.gate_up.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import rope2d
from model import Decoder, ModelConfig

# ModelConfig's names for those of config.json
SIZES = dict(vocab_size="vocab_size", n_embd="hidden_size", mlp_dim="intermediate_size", n_layer="num_hidden_layers")
SIZES |= dict(n_head="num_attention_heads", n_kv_head="num_key_value_heads", head_dim="head_dim")
SIZES |= dict(block_size="max_position_embeddings")
# What Decoder can express of a config.json (None: absent or null), and what config.json can express of a ModelConfig
THEIRS = dict(model_type=("qwen3",), hidden_act=("silu", None), attention_bias=(False, None))
THEIRS |= dict(attention_dropout=(0, None), use_sliding_window=(False, None), quantization_config=(None,))
OURS = dict(qk_norm=True, freqs="geometric", freqs_learned=False, rotary_fraction=1.0, logit_scale="none")
OURS |= dict(grid_reset=None)
# transformers' defaults for what a config.json leaves out
DEFAULTS = dict(num_key_value_heads=32, head_dim=128, max_position_embeddings=32_768, rms_norm_eps=1e-6)
DEFAULTS |= dict(tie_word_embeddings=False)
NEWLINE = chr(0x100 + ord("\n"))  # byte-level BPE writes bytes as visible characters, GPT-2's table: 0-32 from 0x100 on


def read_json(path: Path) -> dict[str, Any]:
    """FileNotFoundError, or RuntimeError for a file that holds no JSON object."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a Hugging Face folder of Qwen3 around it")
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise RuntimeError(f"{path}: damaged, expected a JSON object ({error})") from error


def read_config(path: Path) -> dict[str, Any]:
    """ModelConfig's values in a config.json of either style. ValueError for what Decoder cannot express."""
    config = DEFAULTS | read_json(path)
    for key, known in THEIRS.items():
        if config.get(key) not in known:
            raise ValueError(f"{path}: {key}={config.get(key)!r}: this decoder only knows {known[0]!r}")
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(f"{path}: layer_types={config['layer_types']!r}: this decoder only knows 'full_attention'")
    theta = config.get("rope_theta") or rope2d.THETA["rope"]
    for key in ("rope_scaling", "rope_parameters"):  # the old style and the new
        rope = config.get(key) or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise ValueError(f"{path}: {key}={rope!r}: this decoder only knows rope_type 'default'")
        theta = rope.get("rope_theta", theta)
    for key in SIZES.values():
        nullable = key in ("num_key_value_heads", "head_dim")
        if not isinstance(config.get(key), int) and not (nullable and config[key] is None):
            raise RuntimeError(f"{path}: {key}={config.get(key)!r}: expected a whole number")
    values = {name: config[key] for name, key in SIZES.items()} | {"pos_encoding": "rope", "rope_theta": float(theta)}
    return values | dict(norm_eps=config["rms_norm_eps"], tie_weights=config["tie_word_embeddings"], qk_norm=True)


def newline_table(path: Path, vocab_size: int) -> Tensor:
    """Line breaks in each token (vocab_size,) of a tokenizer.json; ids beyond the tokenizer, with which Qwen3 pads its
    vocabulary, have none. ValueError unless it is byte-level BPE, RuntimeError for an id beyond vocab_size."""
    tokenizer = read_json(path)
    vocab = (tokenizer.get("model") or {}).get("vocab")
    if not isinstance(vocab, dict) or NEWLINE not in vocab or "<0x0A>" in vocab:  # <0x0A>: SentencePiece's bytes
        raise ValueError(f"{path}: expected byte-level BPE, whose model.vocab writes a line break {NEWLINE!r}")
    breaks = {token: piece.count(NEWLINE) for piece, token in vocab.items()}
    breaks |= {added["id"]: added["content"].count("\n") for added in tokenizer.get("added_tokens") or ()}
    if max(breaks) >= vocab_size:
        raise RuntimeError(f"{path}: has token {max(breaks)}, but config.json vocab_size={vocab_size}: they must agree")
    return torch.tensor([breaks.get(token, 0) for token in range(vocab_size)])


def tensors(model: Decoder) -> dict[str, Tensor]:
    """The weights under Hugging Face's names: views, so that what is copied into them is in the model."""
    found = {"model.embed_tokens": model.embed.weight, "model.norm": model.norm.weight, "lm_head": model.head.weight}
    if model.config.tie_weights:
        del found["lm_head"]
    for i, block in enumerate(model.blocks):
        attention, mlp, layer = block.attention, block.mlp, f"model.layers.{i}."
        q, k, v = attention.qkv.weight.split([heads * attention.D for heads in (attention.H, *2 * [attention.Hkv])])
        gate, up = mlp.gate_up.weight.chunk(2)
        parts = {"q_proj": q, "k_proj": k, "v_proj": v, "o_proj": attention.out.weight}
        parts |= {"q_norm": attention.q_norm.weight, "k_norm": attention.k_norm.weight}
        found |= {f"{layer}self_attn.{name}": part for name, part in parts.items()}
        parts = {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": mlp.out.weight}
        parts |= {"input_layernorm": block.attention_norm.weight, "post_attention_layernorm": block.mlp_norm.weight}
        found |= {layer + name: part for name, part in parts.items()}
    return {f"{name}.weight": part.detach() for name, part in found.items()}


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that its index names. FileNotFoundError for one that is missing."""
    files, index = [folder / "model.safetensors"], folder / "model.safetensors.index.json"
    if not files[0].is_file() and index.is_file():
        files = [folder / shard for shard in sorted(set(dict(read_json(index).get("weight_map") or {}).values()))]
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; weights are read from safetensors, whole or sharded")
    return files


def load(folder: str | Path, device: str | torch.device = "cpu", **changes) -> Decoder:
    """The model in a Qwen3 folder, in float32. `changes` replace values of ModelConfig that leave the weights' shapes
    alone; what an encoding adds (gates, learned frequencies) is as at the start of training. rope_theta stays the
    folder's unless changed: None is the encoding's own.

    ValueError for a config that Decoder cannot express and for a change of shapes, FileNotFoundError for a missing
    file, RuntimeError for a damaged one, and for tensors that are missing, surplus or of another shape.
    """
    safetensors, folder = import_safetensors(), Path(folder)
    values, tokenizer = read_config(folder / "config.json"), folder / "tokenizer.json"
    for name in changes.keys() & {*SIZES, "tie_weights", "qk_norm"} - {"block_size"}:
        if changes[name] != values[name]:
            raise ValueError(f"{name}={changes[name]!r}: the weights in {folder} have {name}={values[name]!r}")
    config, files = ModelConfig(**values | changes), weight_files(folder)
    if tokenizer.exists():
        newlines = newline_table(tokenizer, config.vocab_size)
    elif "2d-rope" in rope2d.layer_encodings(config.pos_encoding, config.n_layer):
        raise ValueError(f"pos_encoding={config.pos_encoding!r} needs to know line breaks: put the model's {tokenizer}")
    else:
        newlines = torch.zeros(config.vocab_size)
    model = Decoder(config, newlines)
    left = tensors(model)
    head = left.setdefault("lm_head.weight", torch.empty_like(model.embed.weight))  # Qwen3-0.6B has it although tied
    for path in files:
        try:
            with safetensors.safe_open(path, "pt") as file:
                for name in file.keys():
                    found, home = file.get_tensor(name), left.pop(name, None)
                    if home is None:
                        raise RuntimeError(f"{path}: {name} is surplus, or there twice: config.json asks for no such")
                    if home.shape != found.shape or not found.is_floating_point():
                        kind = f"{found.dtype} {list(found.shape)}: expected real numbers, {list(home.shape)}"
                        raise RuntimeError(f"{path}: {name} is {kind}")
                    home.copy_(found)
        except safetensors.SafetensorError as error:
            raise RuntimeError(f"{path}: damaged, or not safetensors ({error})") from error
    if config.tie_weights and left.pop("lm_head.weight", None) is None and not torch.equal(head, model.embed.weight):
        raise RuntimeError(f"{folder}: lm_head.weight differs from the embedding, but tie_word_embeddings is true")
    if left:
        raise RuntimeError(f"{files[0] if len(files) == 1 else folder}: no tensor {', '.join(left)} in it")
    return model.to(device)


def save(model: Decoder, folder: str | Path) -> None:
    """Writes config.json and model.safetensors, without a tokenizer; a kill leaves no half file under these names.

    ValueError where Qwen3 in Hugging Face cannot express the model, RuntimeError where a file cannot be written.
    """
    safetensors, c, folder = import_safetensors(), model.config, Path(folder)
    if set(rope2d.layer_encodings(c.pos_encoding, c.n_layer)) != {"rope"}:
        raise ValueError(f"pos_encoding={c.pos_encoding!r}: Hugging Face's Qwen3 only knows 'rope'")
    for name, only in OURS.items():
        if getattr(c, name) != only:
            raise ValueError(f"{name}={getattr(c, name)!r}: Hugging Face's Qwen3 only knows {only!r}")
    values = vars(c) | dict(n_kv_head=c.kv_heads, head_dim=c.head_size, mlp_dim=model.blocks[0].mlp.out.in_features)
    theta, dtype = c.rope_theta or rope2d.THETA["rope"], str(model.embed.weight.dtype).removeprefix("torch.")
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    config |= {key: values[name] for name, key in SIZES.items()}
    config |= dict(rms_norm_eps=c.norm_eps, tie_word_embeddings=c.tie_weights, initializer_range=c.init_std)
    config |= dict(hidden_act="silu", attention_bias=False, use_sliding_window=False, sliding_window=None)
    config |= dict(dtype=dtype, rope_parameters={"rope_type": "default", "rope_theta": theta})
    config |= dict(torch_dtype=dtype, rope_theta=theta)  # transformers before 4.56 and before 5 know only these
    weights = {name: part.cpu() for name, part in tensors(model).items()}
    write_weights = safetensors.torch.save_file
    folder.mkdir(parents=True, exist_ok=True)
    replace(folder / "model.safetensors", lambda path: write_weights(weights, path, metadata={"format": "pt"}))
    replace(folder / "config.json", lambda path: path.write_text(json.dumps(config, indent=2) + "\n"))


def replace(path: Path, write: Callable[[Path], Any]) -> None:
    """write(temporary), flushed to disk, then renamed to `path`. RuntimeError where that fails."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except Exception as error:  # safetensors' own error for a full disk names no file
        raise RuntimeError(f"{path}: cannot be written, what was there before is kept ({error})") from error
    finally:
        temporary.unlink(missing_ok=True)


def import_safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise RuntimeError("Qwen3 weights need safetensors: pip install safetensors") from error
    return safetensors
