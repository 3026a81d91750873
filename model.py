"""A Qwen3-like decoder whose positional encoding is a setting. Needs rope2d.py beside it.

    model = Decoder(ModelConfig(n_layer=2, vocab_size=64, pos_encoding="2d-rope"), breaks=table)
    loss = model(tokens, targets)          # sum of the negative log-likelihoods, in nats
    logits = model(tokens)                 # (B, T, vocab_size)
    states = model.hidden(tokens, cache)   # (B, T, n_embd), going on from what the KV cache holds

Pre-norm blocks: RMSNorm, grouped-query attention (QK-norm is a switch), RMSNorm, SwiGLU; no biases, no dropout.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import rope2d

IGNORE = -100  # the target of a position that has no loss
LOGITS_PER_CHUNK = {"cpu": 2**25, "mps": 2**25, "cuda": 2**28}  # of the loss, so that memory is bounded


@dataclass
class ModelConfig:
    """Model"""

    n_layer: int = 1  # blocks
    n_head: int = 2  # query heads
    n_kv_head: int | None = None  # key and value heads; None: as many as query heads
    n_embd: int = 128  # width
    head_dim: int | None = None  # size of a head; None: n_embd / n_head
    mlp_dim: int | None = None  # hidden width of the MLP; None: 4 x n_embd
    vocab_size: int | None = None  # tokens; None: as many as the data has
    block_size: int = 1024  # longest sequence in tokens; a bound, it costs nothing
    tie_weights: bool = False  # the output layer is the embedding
    qk_norm: bool = False  # RMSNorm on q and k, as in Qwen3; it bounds the logits, so that copying far needs log_n
    qk_norm_init: float = 1.0  # initial weight of that norm; 0.25: attention starts as flat as without it
    logit_scale: Literal["none", "log_n"] = "none"  # log_n: q times a learned scalar a head times log(visible keys)
    norm_eps: float = 1e-6  # added to the mean square in RMSNorm
    pos_encoding: str = "2d-rope"  # a name in rope2d.PLANES or ALIASES; a+b: layers alternate
    freqs: Literal["geometric", "uniform", "mixed"] = "geometric"  # rotary frequencies (rope2d.frequencies)
    freqs_seed: int = 0  # seed of the frequencies that are drawn
    freqs_learned: bool = False  # multiply each frequency by a learned factor (LeRoPE)
    rotary_fraction: float = 1.0  # share of a head's pairs that rotate; those of the lowest frequencies do not
    rope_theta: float | None = None  # base of geometric frequencies; None: 10,000 for rope, 1,000 for 2d-rope
    auto_gate: Literal["saturating", "sigmoid"] = "saturating"  # auto-2d-rope: one grid; the paper's, one a layer
    auto_bias: float = 0.7  # initial bias of the gates, before the sigmoid
    grid_reset: int | None = None  # token id after which row and column restart; None: never
    init_std: float = 0.02  # standard deviation of the matrices' initial values
    shared_embed_init: float = 0.0  # all embeddings start with one random vector in common, of this many init_std
    zero_init_residual: bool = True  # output matrices of attention and MLP start at 0, so that depth starts at identity

    def __post_init__(self):
        for name in ("n_layer", "n_head", "n_kv_head", "n_embd", "head_dim", "mlp_dim", "vocab_size", "block_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
        if not 0 <= self.freqs_seed < 2**63:
            raise ValueError(f"freqs_seed={self.freqs_seed}: expected 0 to 2^63 - 1")
        if self.n_embd % self.n_head and self.head_dim is None:
            raise ValueError(f"n_embd={self.n_embd} is no multiple of n_head={self.n_head}: set head_dim or change one")
        if self.n_head % self.kv_heads:
            raise ValueError(f"n_head={self.n_head} is not a multiple of n_kv_head={self.n_kv_head}")
        for name in ("qk_norm_init", "norm_eps", "init_std", "rope_theta"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: expected more than 0")
        if not math.isfinite(self.shared_embed_init + self.auto_bias):
            raise ValueError(f"shared_embed_init={self.shared_embed_init}, auto_bias={self.auto_bias}: not finite")
        encodings = set(rope2d.layer_encodings(self.pos_encoding, self.n_layer))
        for encoding in encodings:
            rope2d.check_head_dim(encoding, self.head_size)
        if self.grid_reset is not None and not rope2d.knows_units(self.pos_encoding):
            raise ValueError(f"grid_reset={self.grid_reset}: pos_encoding={self.pos_encoding!r} has no rows")
        if self.rope_theta is not None and self.freqs == "uniform":
            raise ValueError(f"rope_theta={self.rope_theta}: uniform frequencies have no theta; leave it None")

    @property
    def learns_one_grid(self) -> bool:
        """Whether the layers of auto-2d-rope share one learned grid."""
        encodings = rope2d.layer_encodings(self.pos_encoding, self.n_layer)
        return "auto-2d-rope" in encodings and self.auto_gate == "saturating"

    @property
    def head_size(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head


class Cache:
    """Keys and values of the tokens seen so far, and the position of the next one.

    Starts with room for `room` tokens and grows by doubling up to `limit`, so that a short prompt in a model of large
    block_size stays cheap.
    """

    def __init__(self, n_layer: int, limit: int, room: int = 0):
        self.limit, self.room = limit, room
        self.length = 0  # tokens seen
        self.state: Tensor | None = None  # (7, B), from rope2d.grid
        self.pad: Tensor | None = None  # (B,) tokens of left padding
        self.keys: list[Tensor | None] = [None] * n_layer  # (B, Hkv, capacity, D) each
        self.values: list[Tensor | None] = [None] * n_layer
        self.auto_states: list[Tensor | None] = [None] * n_layer  # (2, B) each, from AutoGrid; one grid: the first

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends k, v (B, Hkv, T, D) at self.length; returns all of them so far. `length` is moved on by the model."""
        end = self.length + k.shape[2]
        for store, new in ((self.keys, k), (self.values, v)):
            old = store[layer]
            if old is None or old.shape[2] < end:
                capacity = max(end, self.room) if old is None else min(self.limit, max(end, 2 * old.shape[2]))
                store[layer] = new.new_empty(*new.shape[:2], capacity, new.shape[3])
                if old is not None:
                    store[layer][:, :, : self.length] = old[:, :, : self.length]
            store[layer].narrow(2, self.length, new.shape[2]).copy_(new)
        return self.keys[layer].narrow(2, 0, end), self.values[layer].narrow(2, 0, end)


def attention_mask(n_queries: int, n_keys: int, pad: Tensor | None, device: torch.device) -> Tensor | None:
    """Which keys each query may see: bool, (Tq, Tk) or (B, 1, Tq, Tk) with padding; None where `attend` needs no mask.

    The queries are the last of the keys. With 2 queries, 5 keys, and one token of padding:   . # # # _
                                                                                              . # # # #
    """
    if pad is None and (n_queries in (1, n_keys) or device.type == "cpu" and not torch.is_grad_enabled()):
        return None
    query = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None]
    key = torch.arange(n_keys, device=device)
    if pad is None:
        return key <= query
    mask = (key <= query) & (key >= pad[:, None, None, None])
    return mask | (key == query)  # a padding token sees itself, or its softmax would be over nothing


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Attention of q (B, H, Tq, D) to k, v (B, Hkv, Tk, D), to all that `mask` allows; None: causal, the queries being
    the last of the keys.

    A chunk after others has no mask on a CPU, where one halves the speed: what came before, which every query sees, and
    the chunk itself are attended to apart, and weighted by their shares of the softmax.
    """
    T, past, group = q.shape[2], k.shape[2] - q.shape[2], q.shape[1] // k.shape[1]
    if group > 1 and q.is_cuda and (mask is not None or q.dtype == torch.float32):  # no fused kernel has groups there
        k, v, group = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1), 1
    if mask is not None or not past or T == 1:
        how = {"attn_mask": mask, "is_causal": mask is None and T > 1, "enable_gqa": group > 1}
        return F.scaled_dot_product_attention(q, k, v, scale=scale, **how)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # returns the log of the softmax's sum as well
    k, v = (t.repeat_interleave(group, dim=1) if group > 1 else t for t in (k, v))
    own, own_sum = flash(q, k[:, :, past:], v[:, :, past:], is_causal=True, scale=scale)
    before, before_sum = flash(q, k[:, :, :past], v[:, :, :past], scale=scale)
    return own.lerp(before, (before_sum - own_sum).sigmoid()[..., None].to(own.dtype))


def make_rotary(c: ModelConfig, encoding: str) -> rope2d.Rotary:
    return rope2d.Rotary(encoding, c.head_size, c.freqs, c.rope_theta, c.freqs_seed, c.rotary_fraction, c.freqs_learned)


class AttentionContext(NamedTuple):
    """What every layer needs beside its input."""

    positions: Tensor  # (7, B, T), from rope2d.grid
    rotations: dict[str, tuple[Tensor, Tensor]]  # cos, sin (B, T, D/2) of each encoding that layers share
    mask: Tensor | None  # from attention_mask
    pad: Tensor | None  # (B,) left padding among these tokens
    cache: Cache | None
    look: Callable[[int, Tensor, Tensor], None] | None  # see Decoder.hidden


class AutoRotary(nn.Module):
    """auto-2d-rope's rotation, on a grid learned from hidden states. Saturating gates make one grid for all layers,
    from the embeddings, which are kept when the grid is frozen; the paper's make one in each layer, from its input."""

    def __init__(self, config: ModelConfig, layer: int = 0):
        super().__init__()
        self.layer = layer
        self.grid = rope2d.AutoGrid(config.n_embd, config.auto_gate, config.auto_bias)
        self.rotary = make_rotary(config, "auto-2d-rope")

    def forward(self, x: Tensor, context: AttentionContext) -> tuple[Tensor, Tensor]:
        """x (B, T, C), normed -> cos, sin (B, T, D/2)."""
        if context.cache is None:
            positions, _ = self.grid(x, context.positions, None, context.pad)
        else:
            states = context.cache.auto_states
            positions, states[self.layer] = self.grid(x, context.positions, states[self.layer], context.pad)
        return self.rotary(positions)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, encoding: str):
        super().__init__()
        self.layer, self.encoding = layer, encoding
        self.H, self.Hkv, self.D = config.n_head, config.kv_heads, config.head_size
        self.qkv = nn.Linear(config.n_embd, (self.H + 2 * self.Hkv) * self.D, bias=False)
        self.out = nn.Linear(self.H * self.D, config.n_embd, bias=False)
        self.q_norm = nn.RMSNorm(self.D, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(self.D, config.norm_eps) if config.qk_norm else nn.Identity()
        if config.logit_scale == "log_n":
            self.log_n_scale = nn.Parameter(torch.ones(self.H))
        self.log_n = config.logit_scale == "log_n"
        self.auto = AutoRotary(config, layer) if encoding == "auto-2d-rope" and config.auto_gate == "sigmoid" else None

    def forward(self, x: Tensor, context: AttentionContext, keys_only: bool = False) -> Tensor | None:
        """x (B, T, C) -> (B, T, C). With keys_only the cache is filled, nothing is attended to, None is returned."""
        B, T, _ = x.shape
        H, Hkv, D = self.H, self.Hkv, self.D
        q, k, v = self.qkv(x).view(B, T, H + 2 * Hkv, D).split([H, Hkv, Hkv], dim=2)  # (B, T, heads, D)
        if isinstance(self.q_norm, nn.RMSNorm):  # its weight in q's dtype, which autocast may have made bfloat16
            q, k = (
                F.rms_norm(x, (D,), norm.weight.to(x.dtype), norm.eps).to(x.dtype)  # on cuda autocast has float32
                for x, norm in ((q, self.q_norm), (k, self.k_norm))
            )
        if self.log_n:
            visible = (context.positions[rope2d.INDEX] + 1).clamp(min=1)  # (B, T)
            q = q * (visible.log()[..., None] * self.log_n_scale)[..., None].to(q.dtype)
        rotation = self.auto(x, context) if self.auto else context.rotations.get(self.encoding)  # None for nope, alibi
        if rotation is not None:
            q, k = rope2d.rotate_qk(q, k, *rotation)
        scale = 1 / math.sqrt(D)
        if self.encoding == "alibi":
            q, k, v = rope2d.with_alibi(q, k, v, context.positions[rope2d.INDEX], scale)  # (B, T, heads, D + 8)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, heads, T, D)
        if context.cache is not None:
            k, v = context.cache.extend(self.layer, k, v)
        if context.look is not None:
            context.look(self.layer, q, k)
        if keys_only:
            return None
        y = attend(q, k, v, context.mask, scale)
        return self.out(y[..., :D].transpose(1, 2).reshape(B, T, H * D))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        hidden = config.mlp_dim or 4 * config.n_embd
        self.gate_up = nn.Linear(config.n_embd, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.out(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, encoding: str):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.attention = Attention(config, layer, encoding)
        self.mlp_norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, context: AttentionContext, keys_only: bool = False) -> Tensor | None:
        y = self.attention(self.attention_norm(x), context, keys_only)
        if y is None:
            return None
        x = x + y
        return x + self.mlp(self.mlp_norm(x))


class ChunkedLoss(torch.autograd.Function):
    """The summed cross-entropy of x (N, C) through the output layer weight (V, C), targets (N,), IGNORE for none. Each
    counts by its own of `weights` (N,), or all the same.

    For a large vocabulary the (N, V) logits would be most of a step's memory, so they are made in chunks of tokens, in
    the dtype of autocast. The gradients are computed along with the loss, nothing is computed twice.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, weights: Tensor | None, chunk: int) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        loss = torch.zeros((), device=x.device)
        w = weight.to(dtype)
        with torch.autocast(kind, enabled=False):
            for start in range(0, len(x), chunk):
                part = slice(start, start + chunk)
                states, wanted = x[part].to(dtype), targets[part] != IGNORE
                right = targets[part].where(wanted, 0)[:, None]
                wanted = wanted if weights is None else wanted * weights[part]
                log_p = (states @ w.T).float().log_softmax(-1)  # (chunk, V)
                loss -= (log_p.gather(1, right)[:, 0] * wanted).sum()
                if dx is None and dw is None:
                    continue
                d_logits = log_p.exp_()
                d_logits.scatter_add_(1, right, right.new_full(right.shape, -1, dtype=d_logits.dtype))
                d_logits = d_logits.mul_(wanted[:, None]).to(dtype)
                if dx is not None:
                    dx[part] = d_logits @ w
                if dw is not None and dw.dtype == dtype:
                    dw.addmm_(d_logits.T, states)
                elif dw is not None:  # sums stay in float32
                    dw += d_logits.T @ states
        ctx.save_for_backward(dx, dw)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        dx, dw = ctx.saved_tensors
        return dx if dx is None else dx * grad, dw if dw is None else dw * grad, None, None, None


class Decoder(nn.Module):
    recompute = False  # in backward, blocks are computed again from their inputs: a fraction of the memory, more time

    def __init__(self, config: ModelConfig, breaks: Tensor):
        """breaks (3, vocab_size): where units of text end (rope2d.break_table); kept and saved with the model."""
        super().__init__()
        if breaks.shape != (len(rope2d.UNITS), config.vocab_size):
            expected = f"({len(rope2d.UNITS)}, vocab_size={config.vocab_size}), see rope2d.break_table"
            raise ValueError(f"breaks has the shape {tuple(breaks.shape)}: expected {expected}")
        if config.grid_reset is not None and not 0 <= config.grid_reset < config.vocab_size:
            raise ValueError(f"grid_reset={config.grid_reset}: expected a token id, 0 to {config.vocab_size - 1}")
        self.config = config
        self.register_buffer("breaks", breaks.long())
        encodings = rope2d.layer_encodings(config.pos_encoding, config.n_layer)
        shared = [name for name in sorted(set(encodings)) if rope2d.PLANES[name] and name != "auto-2d-rope"]
        self.rotary = nn.ModuleDict({encoding: make_rotary(config, encoding) for encoding in shared})
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.col_embed = nn.Embedding(rope2d.COL_EMBEDDINGS, config.n_embd) if "bipe" in encodings else None
        self.blocks = nn.ModuleList([Block(config, i, encoding) for i, encoding in enumerate(encodings)])
        self.auto = AutoRotary(config) if config.learns_one_grid else None
        self.norm = nn.RMSNorm(config.n_embd, config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.head.weight = self.embed.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self, embedding: bool = True) -> None:
        """Draws all weights; without `embedding`, all but those.

        output layer                  normal, init_std
        embedding                     normal, init_std, plus one normal vector for all, shared_embed_init x init_std
        qkv, gate_up                  normal, init_std
        attention.out, mlp.out        0 with zero_init_residual, else normal, init_std
        norms                         1; of q and k: qk_norm_init
        auto-2d-rope's gates and learned frequencies keep what rope2d.py gave them
        """
        for name, p in self.named_parameters():
            if ".grid." in name or name.endswith(".log_scale") or name == "embed.weight" and not embedding:
                continue
            if p.dim() < 2:
                p.fill_(self.config.qk_norm_init if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0)
            elif name.endswith(".out.weight") and self.config.zero_init_residual:
                p.zero_()
            else:
                p.normal_(0.0, self.config.init_std)
        if embedding:
            self.embed.weight += self.config.init_std * self.config.shared_embed_init * torch.randn(self.config.n_embd)

    def freeze_grid(self) -> None:
        """Rounds and freezes auto-2d-rope's gates, and draws anew all weights but the embedding."""
        for module in self.modules():
            if isinstance(module, rope2d.AutoGrid):
                module.freeze()
        self.init_weights(embedding=False)

    def hidden(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        pad: Tensor | None = None,
        keys_only: bool = False,
        look: Callable[[int, Tensor, Tensor], None] | None = None,
    ) -> Tensor | None:
        """Final states (B, T, C) of tokens (B, T), which come after those in the cache; the cache then holds them too.

        pad (B,): left padding, given with the first chunk. keys_only: fill the cache and return None; the last layer
        then only computes keys and values. look(layer, q, k) is called in each layer with its rotated queries
        (B, H, T, D) and all keys so far (B, Hkv, Tk, D). ValueError for no tokens, and for more than block_size.
        """
        B, T = tokens.shape
        seen = cache.length if cache else 0
        if T == 0:
            raise ValueError("no tokens: expected at least one")
        self.check_length(seen + T)
        if seen and pad is not None:
            raise ValueError("pad belongs to the first chunk, before anything is in the cache")
        all_pad = cache.pad if seen else pad
        pad = None if all_pad is None else (all_pad - seen).clamp(0, T)  # padding may be longer than the first chunk
        state = cache.state if cache else None
        positions, state = rope2d.grid(tokens, self.breaks, state, pad, self.config.grid_reset)
        rotations = {encoding: rotary(positions) for encoding, rotary in self.rotary.items()}
        mask = attention_mask(T, seen + T, all_pad, tokens.device)
        context = AttentionContext(positions, rotations, mask, pad, cache, look)
        x = self.embed(tokens)
        if self.col_embed:
            x = x + self.col_embed(positions[rope2d.COL].clamp(0, rope2d.COL_EMBEDDINGS - 1))
        if self.auto:
            normed = F.rms_norm(x, x.shape[-1:], eps=self.config.norm_eps)
            rotations["auto-2d-rope"] = self.auto(normed, context)
        for i, block in enumerate(self.blocks):
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, context, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, context, keys_only and i == len(self.blocks) - 1)
        if cache is not None:
            cache.length, cache.state, cache.pad = seen + T, state, all_pad
        return None if x is None else self.norm(x)

    def check_length(self, tokens: int) -> None:
        """ValueError for a sequence longer than block_size."""
        if tokens > self.config.block_size:
            given = f"sequence of {tokens} tokens is longer than the model's block_size={self.config.block_size}"
            raise ValueError(f"{given}: make it shorter, or raise that bound with --block_size={tokens}")

    def forward(self, tokens: Tensor, targets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """tokens (B, T) -> logits (B, T, vocab_size); with targets (B, T), IGNORE where there is none, the summed loss.

        A sum, in nats: the caller divides it by all targets of a step. weights (B, T): of targets; None: all 1."""
        x = self.hidden(tokens)
        chunk = max(1, LOGITS_PER_CHUNK[x.device.type] // self.config.vocab_size)
        if targets is None:
            return self.head(x)
        x, targets, weights = x.flatten(0, 1), targets.flatten(), None if weights is None else weights.flatten()
        if targets.numel() > chunk:
            head = self.head.weight if torch.is_grad_enabled() else self.head.weight.detach()  # or it gets a gradient
            return ChunkedLoss.apply(x, head, targets, weights, chunk)
        reduction = "sum" if weights is None else "none"
        loss = F.cross_entropy(self.head(x).float(), targets, ignore_index=IGNORE, reduction=reduction)
        return loss if weights is None else loss @ weights

    def flops(self, tokens: int, pairs: int) -> float:
        """Of forward and backward: 6 a weight of a matrix product and token, 12 T a layer and channel of attention and
        token (PaLM's count, arXiv 2204.02311, appendix B), the embedding for free. pairs: sum of tokens x T."""
        matrices = sum(p.numel() for p in self.blocks.parameters() if p.dim() == 2) + self.head.weight.numel()
        channels = len(self.blocks) * self.config.n_head * self.config.head_size
        return 6 * matrices * tokens + 12 * channels * pairs

    def new_cache(self, room: int = 0) -> Cache:
        return Cache(self.config.n_layer, self.config.block_size, room)

    @torch.inference_mode()
    def prefill(self, tokens: Tensor, cache: Cache, pad: Tensor | None = None, chunk: int = 1024) -> None:
        """Puts tokens (B, T) into the cache, `chunk` at a time, so that memory grows linearly with length."""
        for start in range(0, tokens.shape[1], chunk):
            self.hidden(tokens[:, start : start + chunk], cache, pad if start == 0 else None, keys_only=True)
