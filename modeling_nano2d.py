"""nano2d's decoder for transformers, 4.57 and 5: Qwen3's, with any encoding of rope2d.py, which is beside this file.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)

A token's row and column follow from all tokens before it. So `generate` computes the grid of all ids anew at each step
and takes its end; nothing is kept on the model that beams, a cropped cache or left padding could put out of step.
"""

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, eager_attention_forward

from .rope2d import COL, COL_EMBEDDINGS, INDEX, PLANES, UNITS, Rotary, grid, layer_encodings, rotate, with_alibi

MASK_ARGUMENTS = inspect.signature(create_causal_mask).parameters  # they have other names in 4.57 than in 5


class Nano2DConfig(PretrainedConfig):
    """nano2d's ModelConfig, all of which is in config.json, and transformers' names for some of it."""

    model_type = "nano2d"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
    use_cache = True
    hidden_act = "silu"
    attribute_map = {
        "hidden_size": "n_embd",
        "intermediate_size": "mlp_dim",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_kv_head",
        "max_position_embeddings": "block_size",
        "initializer_range": "init_std",
        "tie_word_embeddings": "tie_weights",
    }

    def __init__(self, tie_weights: bool = False, **values):
        super().__init__(tie_word_embeddings=tie_weights, **values)


def make_rotary(c: Nano2DConfig, encoding: str) -> Rotary:
    with torch.device("cpu"):  # transformers builds models on "meta", where no frequencies can be drawn
        return Rotary(encoding, c.head_dim, c.freqs, c.rope_theta, c.freqs_seed, c.rotary_fraction, c.freqs_learned)


def rms_norm(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    """In x's dtype, which autocast may have made another than the weight's."""
    return F.rms_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.eps).to(x.dtype)


class Nano2DAttention(nn.Module):
    is_causal = True  # transformers' attention functions read this and num_key_value_groups

    def __init__(self, config: Nano2DConfig, layer_idx: int, encoding: str):
        super().__init__()
        self.config, self.layer_idx, self.encoding = config, layer_idx, encoding
        C, H, Hkv, D = config.n_embd, config.n_head, config.n_kv_head, config.head_dim
        self.D, self.scaling, self.num_key_value_groups = D, D**-0.5, H // Hkv
        self.q_proj = nn.Linear(C, H * D, bias=False)
        self.k_proj = nn.Linear(C, Hkv * D, bias=False)
        self.v_proj = nn.Linear(C, Hkv * D, bias=False)
        self.o_proj = nn.Linear(H * D, C, bias=False)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(D, config.norm_eps)
            self.k_norm = nn.RMSNorm(D, config.norm_eps)
        if config.logit_scale == "log_n":
            self.log_n_scale = nn.Parameter(torch.ones(H))

    def forward(self, x: Tensor, positions: Tensor, rotations: dict, mask, cache, cache_position: Tensor, **kwargs):
        B, T, _ = x.shape
        q, k, v = (f(x).view(B, T, -1, self.D) for f in (self.q_proj, self.k_proj, self.v_proj))  # (B, T, heads, D)
        if self.config.qk_norm:
            q, k = rms_norm(q, self.q_norm), rms_norm(k, self.k_norm)
        if self.config.logit_scale == "log_n":
            visible = (positions[INDEX] + 1).clamp(min=1)  # (B, T)
            q = q * (visible.log()[..., None] * self.log_n_scale)[..., None].to(q.dtype)
        if self.encoding in rotations:
            q, k = (rotate(t, *rotations[self.encoding]) for t in (q, k))
        if self.encoding == "alibi":
            q, k, v = with_alibi(q, k, v, positions[INDEX], self.scaling)  # (B, T, heads, D + 8)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, heads, T, D)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx, {"cache_position": cache_position})  # for 4.57's static cache
        attend = ALL_ATTENTION_FUNCTIONS.get(self.config._attn_implementation, eager_attention_forward)
        y, _ = attend(self, q, k, v, mask, dropout=0.0, scaling=self.scaling, **kwargs)  # (B, T, H, D)
        return self.o_proj(y[..., : self.D].reshape(B, T, -1))


class Nano2DDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: Nano2DConfig, layer_idx: int, encoding: str):
        super().__init__()
        self.self_attn = Nano2DAttention(config, layer_idx, encoding)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.n_embd, config.norm_eps)

    def forward(self, x: Tensor, **context) -> Tensor:
        x = x + self.self_attn(rms_norm(x, self.input_layernorm), **context)
        return x + self.mlp(rms_norm(x, self.post_attention_layernorm))


class Nano2DModel(nn.Module):
    """All but the output layer."""

    def __init__(self, config: Nano2DConfig):
        super().__init__()
        self.config = config
        encodings = layer_encodings(config.pos_encoding, config.n_layer)
        rotating = sorted({encoding for encoding in encodings if PLANES[encoding]})
        breaks = torch.zeros(len(UNITS), config.vocab_size, dtype=torch.int64)  # from rope2d.break_table
        self.register_buffer("breaks", breaks)
        self.rotary = nn.ModuleDict({encoding: make_rotary(config, encoding) for encoding in rotating})
        self.embed_tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.col_embed = nn.Embedding(COL_EMBEDDINGS, config.n_embd) if "bipe" in encodings else None
        self.layers = nn.ModuleList([Nano2DDecoderLayer(config, i, name) for i, name in enumerate(encodings)])
        self.norm = nn.RMSNorm(config.n_embd, config.norm_eps)

    def forward(self, input_ids: Tensor, positions: Tensor, attention_mask, cache, **kwargs) -> Tensor:
        """The final states (B, T, C)."""
        x = self.embed_tokens(input_ids)
        if self.col_embed is not None:
            x = x + self.col_embed(positions[COL].clamp(0, COL_EMBEDDINGS - 1))
        seen = 0 if cache is None else cache.get_seq_length()
        cache_position = torch.arange(input_ids.shape[1], device=x.device) + seen
        known = {"input_embeds": x, "inputs_embeds": x, "cache": cache, "past_key_values": cache}
        known["cache_position"] = cache_position
        known = {name: value for name, value in known.items() if name in MASK_ARGUMENTS}
        context = {"positions": positions, "cache": cache, "cache_position": cache_position, **kwargs}
        context["rotations"] = {encoding: rotary(positions) for encoding, rotary in self.rotary.items()}
        context["mask"] = create_causal_mask(config=self.config, attention_mask=attention_mask, **known)
        for layer in self.layers:
            x = layer(x, **context)
        return rms_norm(x, self.norm)


class Nano2DForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = Nano2DConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Nano2DDecoderLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # 4.57 reads the names alone

    def __init__(self, config: Nano2DConfig):
        super().__init__(config)
        self.model = Nano2DModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.freqs_learned:
            self._keep_in_fp32_modules_strict = {"log_scale"}  # in bfloat16, far positions would have wrong angles
        self.post_init()

    @classmethod
    def from_pretrained(cls, folder, *args, output_loading_info: bool = False, **kwargs):
        """RuntimeError for weights that do not fit config.json: transformers would draw what is missing."""
        model, info = super().from_pretrained(folder, *args, output_loading_info=True, **kwargs)
        fault = ""
        for kind in ("missing_keys", "unexpected_keys"):
            if names := sorted(info[kind]):
                fault = f"{kind}: {', '.join(names[:3])}"
        for encoding, rotary in model.model.rotary.items():
            own = make_rotary(model.config, encoding).phase
            if model.config.freqs == "geometric" and ((rotary.phase.cpu() - own).abs() > 2**32).any():  # not rounding
                fault = f"config.json has another rope_theta, {model.config.rope_theta}"
        if fault:
            raise RuntimeError(f"{folder}: its weights do not fit config.json, {fault}: undo what was edited in it")
        return (model, info) if output_loading_info else model

    def resize_token_embeddings(self, *args, **kwargs) -> nn.Embedding:
        """As transformers' own. New tokens end no line, sentence or word."""
        embedding, breaks = super().resize_token_embeddings(*args, **kwargs), self.model.breaks
        self.model.breaks = F.pad(breaks, (0, embedding.num_embeddings - breaks.shape[1]))
        return embedding

    def grid(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Where each token of whole sequences (B, T) stands, as rope2d.grid gives it: (7, B, T), negative on left
        padding, which is where attention_mask (B, T) begins with zeros."""
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            given = f"attention_mask of shape {tuple(attention_mask.shape)}, input_ids of {tuple(input_ids.shape)}"
            raise ValueError(f"{given}: rows and columns follow from all ids, so give all, and a mask of their shape")
        pad = None if attention_mask is None else (attention_mask.cumsum(1) == 0).sum(1)
        return grid(input_ids, self.model.breaks, None, pad, self.config.grid_reset)[0]

    def prepare_inputs_for_generation(self, input_ids: Tensor, position_ids=None, chunk_grid=None, **kwargs) -> dict:
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        seen, new = 0 if cache is None else cache.get_seq_length(), inputs["input_ids"].shape[1]
        if not seen or new < input_ids.shape[1]:  # input_ids are all that there are
            position_ids = self.grid(input_ids, kwargs.get("attention_mask"))[..., -new:]
        elif chunk_grid is not None:
            position_ids = chunk_grid[..., seen : seen + new]
        inputs["position_ids"] = position_ids  # or else those of a chunk of the prompt, which transformers 5 cuts out
        return inputs

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict) -> Tensor:  # 5
        return self.grid(inputs_tensor, model_kwargs.get("attention_mask"))

    def _prefill_chunking(self, input_ids: Tensor, generation_config, **kwargs) -> dict:  # 4.57
        chunk_grid = self.grid(input_ids, kwargs.get("attention_mask"))
        kwargs = super()._prefill_chunking(input_ids, generation_config, chunk_grid=chunk_grid, **kwargs)
        del kwargs["chunk_grid"]
        return kwargs

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache=None,
        past_key_values=None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """position_ids (7, B, T): what `grid` says of these tokens; None where nothing came before them. The cache is
        `cache` in transformers 5, `past_key_values` in 4.57."""
        for name in ("output_hidden_states", "output_attentions"):
            if kwargs.get(name):
                raise ValueError(f"{name}=True: this model returns logits alone")
        cache = past_key_values if cache is None else cache
        if position_ids is None:
            if cache is not None and cache.get_seq_length():
                hint = "give position_ids=model.grid(all_ids, attention_mask)[..., -T:]"
                raise ValueError(f"position_ids=None, but rows depend on the earlier tokens in the cache: {hint}")
            position_ids = self.grid(input_ids, attention_mask)
        if position_ids.shape != (1 + 2 * len(UNITS), *input_ids.shape):
            expected = f"{(1 + 2 * len(UNITS), *input_ids.shape)}, as model.grid gives them"
            raise ValueError(f"position_ids has the shape {tuple(position_ids.shape)}: expected {expected}")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        kwargs.pop("cache_position", None)  # of 4.57; the cache knows it
        x = self.model(input_ids, position_ids, attention_mask, cache, **kwargs)
        logits = self.lm_head(x[:, slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(loss, logits, cache if use_cache else None)
        return output.to_tuple() if kwargs.get("return_dict") is False else output
