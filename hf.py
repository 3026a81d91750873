"""Hugging Face folders in and out, for transformers 4.57 and 5. Needs safetensors.

    model = hf.load("Qwen3-0.6B", pos_encoding="h-rope", rope_theta=None)  # RoPE's weights, another encoding
    hf.save(model, "Qwen3-0.6B", "out/h-rope-hf")      # hf.load and --init_from read it, and
    AutoModelForCausalLM.from_pretrained("out/h-rope-hf", trust_remote_code=True)
    python hf.py --run=out/350m --out_dir=out/350m-hf  # from a run of train.py

RoPE with QK-norm is written as Qwen3, which transformers knows; all else with the code that it then runs,
modeling_nano2d.py and rope2d.py. Weights have Qwen3's names: q, k, v are apart, and gate and up; here they are rows of
one matrix.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import checkpoint
import configurator
import rope2d
from model import Decoder, ModelConfig
from sample import tokenizer_of
from tokenizer import load_tokenizer, tokenizer_json

SIZES = {  # ModelConfig's names, and Qwen3's
    "vocab_size": "vocab_size",
    "n_embd": "hidden_size",
    "mlp_dim": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "head_dim": "head_dim",
    "block_size": "max_position_embeddings",
}
QWEN3 = {"qk_norm": True, "freqs": "geometric", "freqs_learned": False, "rotary_fraction": 1.0, "logit_scale": "none"}
# What a config.json of Qwen3 may say, and transformers' values for what it leaves out
KNOWN = {"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0, "use_sliding_window": False}
DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6}


def read_json(path: Path) -> dict[str, Any]:
    """FileNotFoundError, or RuntimeError for a file that holds no JSON object."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected a Hugging Face folder of Qwen3, or one of hf.save")
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise RuntimeError(f"{path}: damaged, expected a JSON object: fetch it again ({error})") from error


def read_qwen3(path: Path, found: dict[str, Any]) -> dict[str, Any]:
    """ModelConfig's values in a config.json of Qwen3, of the old style or the new. ValueError for what Decoder cannot
    express."""
    found = {**DEFAULTS, **found}
    if found.get("model_type") != "qwen3":
        raise ValueError(f"{path}: model_type={found.get('model_type')!r}: expected 'qwen3', or 'nano2d' of hf.save")
    for key, only in {**KNOWN, "quantization_config": None}.items():
        if found.get(key) not in (only, None):
            raise ValueError(f"{path}: {key}={found[key]!r}: this decoder only knows {only!r}")
    if set(found.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(f"{path}: layer_types={found['layer_types']!r}: this decoder only knows 'full_attention'")
    theta = found.get("rope_theta") or rope2d.ROPE_THETA
    for key in ("rope_scaling", "rope_parameters"):  # the old style and the new
        rope = found.get(key) or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise ValueError(f"{path}: {key}={rope!r}: this decoder only knows rope_type 'default'")
        theta = rope.get("rope_theta", theta)
    values = {**QWEN3, "pos_encoding": "rope", "rope_theta": float(theta), "norm_eps": found["rms_norm_eps"]}
    values["tie_weights"] = found.get("tie_word_embeddings", False)
    for name, key in SIZES.items():
        if not isinstance(found.get(key), int):
            raise ValueError(f"{path}: {key}={found.get(key)!r}: expected a whole number")
        values[name] = found[key]
    return values


def tensors(model: Decoder) -> dict[str, Tensor]:
    """What a folder holds of a model: views, so that what is copied into them is in the model."""
    found = {"model.embed_tokens.weight": model.embed.weight, "model.norm.weight": model.norm.weight}
    if model.col_embed:
        found["model.col_embed.weight"] = model.col_embed.weight
    if not model.config.tie_weights:
        found["lm_head.weight"] = model.head.weight
    for i, block in enumerate(model.blocks):
        attention, mlp, at = block.attention, block.mlp, f"model.layers.{i}"
        heads = [attention.H, attention.Hkv, attention.Hkv]
        q, k, v = attention.qkv.weight.split([n * attention.D for n in heads])
        gate, up = mlp.gate_up.weight.chunk(2)
        found[f"{at}.self_attn.q_proj.weight"] = q
        found[f"{at}.self_attn.k_proj.weight"] = k
        found[f"{at}.self_attn.v_proj.weight"] = v
        found[f"{at}.self_attn.o_proj.weight"] = attention.out.weight
        if model.config.qk_norm:
            found[f"{at}.self_attn.q_norm.weight"] = attention.q_norm.weight
            found[f"{at}.self_attn.k_norm.weight"] = attention.k_norm.weight
        if attention.log_n:
            found[f"{at}.self_attn.log_n_scale"] = attention.log_n_scale
        found[f"{at}.mlp.gate_proj.weight"] = gate
        found[f"{at}.mlp.up_proj.weight"] = up
        found[f"{at}.mlp.down_proj.weight"] = mlp.out.weight
        found[f"{at}.input_layernorm.weight"] = block.attention_norm.weight
        found[f"{at}.post_attention_layernorm.weight"] = block.mlp_norm.weight
    for name, part in model.state_dict().items():
        if name.startswith(("rotary.", "breaks")):
            found[f"model.{name}"] = part
    return {name: part.detach() for name, part in found.items()}


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors in model.safetensors, or in the shards that its index names. FileNotFoundError for a missing file,
    RuntimeError for a damaged one."""
    safetensors, files, index = import_safetensors(), [folder / "model.safetensors"], "model.safetensors.index.json"
    if not files[0].is_file() and (folder / index).is_file():
        shards = dict(read_json(folder / index).get("weight_map") or {}).values()
        files = [folder / shard for shard in sorted(set(shards))]
    found = {}
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; weights are read from safetensors, whole or sharded")
        try:
            found |= safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise RuntimeError(f"{path}: damaged, or not safetensors: fetch it again ({error})") from error
    return found


def form(part: Tensor) -> str:
    return f"{list(part.shape)} {'real' if part.is_floating_point() else 'whole'} numbers"


def load(folder: str | Path, device: str | torch.device = "cpu", **changes) -> Decoder:
    """The model in a folder of Qwen3 or of `save`, in float32. `changes` replace values of ModelConfig that leave the
    weights' shapes alone; what an encoding adds (gates, frequencies, scales) is as at the start of training. rope_theta
    stays the folder's unless changed: None is the encoding's own.

    ValueError for a config that Decoder cannot express and for a change of shapes, FileNotFoundError for a missing
    file, RuntimeError for a damaged one, and for tensors that are missing, surplus or of another shape.
    """
    folder = Path(folder)
    path = folder / "config.json"
    facts = read_json(path)
    ours = facts.get("model_type") == "nano2d"
    trained = configurator.build(ModelConfig, facts if ours else read_qwen3(path, facts), str(path))
    config = replace(trained, **changes)
    for name in changes.keys() & {*SIZES, "tie_weights", "qk_norm"} - {"block_size"}:
        own = getattr(trained, name)
        if changes[name] != own:
            raise ValueError(f"{name}={changes[name]!r}: the weights in {folder} have {name}={own!r}")
    has_tokenizer = (folder / "tokenizer.json").exists()
    token_bytes = load_tokenizer(str(folder)).token_bytes if has_tokenizer and not ours else []
    if len(token_bytes) > config.vocab_size:
        sizes = f"{len(token_bytes)} tokens, but config.json has vocab_size={config.vocab_size}"
        raise RuntimeError(f"{folder / 'tokenizer.json'}: {sizes}: put the model's own there")
    model = Decoder(config, rope2d.break_table(token_bytes, config.vocab_size))

    changed = {name for name in changes if changes[name] != getattr(trained, name)}

    def starts_anew(name: str) -> bool:
        absent = not ours and ("rotary." in name or name == "model.breaks")
        return absent or checkpoint.starts_anew(name, changed)

    homes = {name: home for name, home in tensors(model).items() if not starts_anew(name)}
    found = {name: part for name, part in read_weights(folder).items() if not starts_anew(name)}
    head = found.pop("lm_head.weight", None) if config.tie_weights else None  # Qwen3-0.6B has it although tied
    there, here = ({name: form(part) for name, part in side.items()} for side in (found, homes))
    if lines := configurator.diff(there, here):
        raise RuntimeError(f"{folder}: other weights than config.json asks for: {'; '.join(lines[:3])}")
    for name, home in homes.items():
        home.copy_(found[name])
    if head is not None and not torch.equal(head, found["model.embed_tokens.weight"]):
        raise RuntimeError(f"{folder}: lm_head.weight differs from the embedding, but config.json says they are tied")
    if rope2d.knows_units(config.pos_encoding) and not model.breaks.any():
        hint = f"put the model's own {folder / 'tokenizer.json'}"
        raise ValueError(f"pos_encoding={config.pos_encoding!r} needs to know line breaks: {hint}")
    if "tokenizer_fingerprint" in facts and has_tokenizer:
        if lines := configurator.diff(facts["tokenizer_fingerprint"], load_tokenizer(str(folder)).fingerprint):
            raise RuntimeError(f"{folder}: tokenizer.json is not the model's: {'; '.join(lines)}: put its own there")
    return model.to(device)


def load_start(path: str, changes: dict[str, Any]) -> tuple[Decoder, dict]:
    """A model to start from, of a run directory, a checkpoint, or a Hugging Face folder, with `changes` of its config;
    and the fingerprint of its tokenizer or vocabulary."""
    folder = Path(path)
    if (folder / "config.json").exists():
        words = read_json(folder / "config.json").get("vocabulary")  # of a copy run
        known = {"vocabulary": words} if words else {"tokenizer": load_tokenizer(path).fingerprint}
        return load(folder, **changes), known
    file = folder / "last.pt" if folder.is_dir() else folder
    if not file.is_file():
        hint = "expected a run's directory, which has last.pt, a checkpoint, or a folder with a config.json"
        raise FileNotFoundError(f"{file}: no such checkpoint; {hint}")
    saved = checkpoint.read(file)
    return checkpoint.load_model(saved, **changes), saved["data"]


def save(model: Decoder, tokenizer: str | list[str] | None, folder: str | Path) -> None:
    """Writes a folder that transformers and `load` read: no file is ever half there, and config.json comes last.

    tokenizer: what load_tokenizer takes, or the words of a copy run's vocabulary; None: none is written. ValueError for
    a model that learns its grid and for a tokenizer that is not the model's, RuntimeError for a file that cannot be
    written.
    """
    safetensors, c, folder = import_safetensors(), model.config, Path(folder)
    encodings = set(rope2d.layer_encodings(c.pos_encoding, c.n_layer))
    if "auto-2d-rope" in encodings:
        hint = "transformers' position ids cannot say what a learned grid is; eval.py and sample.py read the run itself"
        raise ValueError(f"pos_encoding={c.pos_encoding!r} cannot be exported: {hint}")
    qwen3 = (
        encodings == {"rope"}
        and not isinstance(tokenizer, list)
        and all(getattr(c, name) == only for name, only in QWEN3.items())
    )
    files = {} if tokenizer is None else tokenizer_files(tokenizer, model)
    if not qwen3:
        for name in ("modeling_nano2d.py", "rope2d.py"):
            files[name] = Path(__file__).with_name(name).read_bytes()
    weights = {name: part.cpu() for name, part in tensors(model).items() if not qwen3 or name.endswith(".weight")}
    files["model.safetensors"] = safetensors.torch.save(weights, {"format": "pt"})
    for name, content in files.items():
        with configurator.atomic(folder / name) as file:
            file.write(content)
    config = config_json(model, qwen3)
    if isinstance(tokenizer, list):
        config["vocabulary"] = tokenizer
    elif tokenizer is not None:
        load_tokenizer.cache_clear()  # it may know the tokenizer that was here before
        config["tokenizer_fingerprint"] = load_tokenizer(str(folder)).fingerprint
    configurator.write_json(folder / "config.json", config)


def config_json(model: Decoder, qwen3: bool) -> dict[str, Any]:
    values = asdict(model.config)
    values["n_kv_head"], values["head_dim"] = model.config.kv_heads, model.config.head_size
    values["mlp_dim"] = model.blocks[0].mlp.out.in_features
    values["dtype"] = values["torch_dtype"] = str(model.embed.weight.dtype).removeprefix("torch.")  # 4.56 renamed it
    if not qwen3:
        auto = {"AutoConfig": "Config", "AutoModelForCausalLM": "ForCausalLM"}
        values["auto_map"] = {name: f"modeling_nano2d.Nano2D{end}" for name, end in auto.items()}
        return {"architectures": ["Nano2DForCausalLM"], "model_type": "nano2d", **values}
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "sliding_window": None, **KNOWN}
    for name, key in {**SIZES, "norm_eps": "rms_norm_eps", "tie_weights": "tie_word_embeddings"}.items():
        config[key] = values[name]
    config["dtype"] = config["torch_dtype"] = values["dtype"]
    config["initializer_range"] = values["init_std"]
    config["rope_theta"] = values["rope_theta"] or rope2d.ROPE_THETA  # 5 looks in rope_parameters
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    return config


def tokenizer_files(tokenizer: str | list[str], model: Decoder) -> dict[str, bytes]:
    """Contents of tokenizer.json, tokenizer_config.json and generation_config.json."""
    c = model.config
    if isinstance(tokenizer, list):
        token_bytes, template = [b"\n" if word == "<n>" else word.encode() for word in tokenizer], None
        contents, eos, pad = json.dumps(word_level(tokenizer)).encode(), "<n>", "<pad>"  # a copy ends with its line
        ends = [tokenizer.index(eos), tokenizer.index(pad)]
    else:
        ours, own = load_tokenizer(tokenizer), Path(tokenizer) / "tokenizer.json"
        contents = own.read_bytes() if own.is_file() else json.dumps(tokenizer_json(ours)).encode()
        token_bytes, template = ours.token_bytes, ours.chat_template
        eos = pad = ours.decode([ours.eos])
        ends = [ours.eos] if ours.im_end is None else [ours.im_end, ours.eos]
    fits = len(token_bytes) <= c.vocab_size
    if fits and rope2d.knows_units(c.pos_encoding):
        fits = torch.equal(rope2d.break_table(token_bytes, c.vocab_size), model.breaks.cpu())
    if not fits:
        given = f"{len(token_bytes)} tokens for vocab_size={c.vocab_size}, or other breaks than the model's"
        raise ValueError(f"tokenizer={tokenizer!r}: {given}: give the one that it was trained with")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos,
        "pad_token": pad,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_max_length": c.block_size,
        "chat_template": template,
    }
    generation = {"eos_token_id": ends, "pad_token_id": ends[-1]}
    return {
        "tokenizer.json": contents,
        "tokenizer_config.json": json.dumps(settings, indent=1).encode(),
        "generation_config.json": json.dumps(generation).encode(),
    }


def word_level(words: list[str]) -> dict[str, Any]:
    """tokenizer.json for words with blanks between them, as data_copy.text writes them. Another word is an error."""
    model = {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "an unknown word"}
    return {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}


def import_safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise RuntimeError("Hugging Face's weights need safetensors: pip install safetensors") from error
    return safetensors


@dataclass
class ExportConfig:
    """Export"""

    run: str = ""  # run directory or checkpoint file
    checkpoint: Literal["last", "best"] = "last"  # which of a run directory's
    tokenizer: str | None = None  # where the run's tokenizer is now; None: where it was in training
    out_dir: str = ""  # the folder to write


def main() -> None:
    config = configurator.configure(ExportConfig, doc=__doc__)
    if not config.run or not config.out_dir:
        raise ValueError("nothing to do: give --run=out/350m --out_dir=out/350m-hf")
    model, trained = checkpoint.load_run(config.run, config.checkpoint)
    tokenizer = trained["data"].get("vocabulary")  # of a copy run
    if tokenizer is None:
        tokenizer_of(config.run, trained, config.tokenizer)  # ValueError for another than the run's
        tokenizer = config.tokenizer or trained["tokenizer"]
    if Path(config.out_dir, "last.pt").exists():
        raise ValueError(f"{config.out_dir} holds a run, which --init_from would no longer find: choose another folder")
    save(model, tokenizer, config.out_dir)
    print(f"{config.out_dir}: written; transformers reads it, with trust_remote_code=True")


if __name__ == "__main__":
    configurator.run_cli(main)
