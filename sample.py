"""Generation over a KV cache: greedy or sampled, one prompt or many of unequal length. As a script: text from a run.

for tokens in generate(model, prompts, max_new_tokens=100):     # (B,) int64, the next token of each prompt
    ...
python sample.py --run=out/pretrain --prompt="import os" --temperature=0.8 --top_p=0.95
cat story.txt | python sample.py --run=out/pretrain --prompt=-  # the prompt from standard input
"""

import codecs
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkpoint
import configurator
import rope2d
from model import Block, Cache, Decoder, attention_mask
from tokenizer import Tokenizer, load_tokenizer


@dataclass
class SampleConfig:
    """Sampling"""

    run: str = ""  # run directory or checkpoint file
    checkpoint: Literal["last", "best"] = "last"  # which of a run directory's
    prompt: str = ""  # text to continue; -: from standard input
    tokenizer: str | None = None  # where the run's tokenizer is now; None: where it was in training
    max_new_tokens: int = 256  # tokens to write
    temperature: float = 0.0  # 0: always the likeliest token
    top_k: int | None = None  # choose among that many likeliest tokens; None: among all
    top_p: float | None = None  # choose among the fewest likeliest tokens that hold this probability; None: among all
    seed: int = 0  # of the choices
    block_size: int | None = None  # longest sequence in tokens; None: the model's own bound
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the matrix products
    device: Literal["auto", "cuda", "mps", "cpu"] = "auto"  # auto: the first of these that there is

    def __post_init__(self):
        checkpoint.check_seeds(seed=self.seed)
        if not self.run:
            raise ValueError("run='': expected a run directory or a checkpoint file, as in --run=out/pretrain")
        check_choice(self.temperature, self.top_k, self.top_p)
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: expected at least 1")


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    chunk: int = 1024,
) -> Iterator[Tensor]:
    """Yields the next token of every prompt, (B,) int64, max_new_tokens times; prompts may differ in length.

    temperature, top_k, top_p, seed: see `choose_token`. chunk: tokens of the prompts that go through the model at a
    time. To stop at a token, leave the loop. ValueError for an empty
    prompt, and for more tokens than the model's block_size.
    """
    device = model.breaks.device
    longest = max(map(len, prompts), default=0)
    if not prompts or min(map(len, prompts)) == 0:
        raise ValueError("an empty prompt: expected at least one token in each")
    model.check_length(longest + max_new_tokens - 1)
    tokens = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)  # left padding
    pad = torch.tensor([longest - len(p) for p in prompts], device=device)
    cache = model.new_cache(longest + max_new_tokens - 1)
    generator = torch.Generator(device).manual_seed(seed)
    model.prefill(tokens[:, :-1], cache, pad if pad.any() else None, chunk)
    step = FastStep(model, cache, len(prompts)) if FastStep.supports(model) else None
    new = tokens[:, -1]
    for _ in range(max_new_tokens):
        states = step(new) if step else model.hidden(new[:, None], cache)[:, 0]
        new = choose_token(model.head(states).float(), temperature, top_k, top_p, generator)
        yield new


def check_choice(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """ValueError for values that keep no token."""
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature={temperature}: expected at least 0")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k}: expected at least 1, or None")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: expected a probability above 0, up to 1, or None")


def choose_token(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> Tensor:
    """One token for each row of logits (B, vocab_size): (B,). Temperature 0 is greedy; top_k keeps so many likeliest
    tokens, top_p the fewest that hold that probability. ValueError for values that keep no token."""
    check_choice(temperature, top_k, top_p)
    if temperature == 0:
        return logits.argmax(-1)
    logits, order = (logits / temperature).sort(dim=-1, descending=True)
    if top_k is not None:
        logits[:, top_k:] = -math.inf
    if top_p is not None:
        probability = logits.softmax(-1)
        logits[probability.cumsum(-1) - probability >= top_p] = -math.inf  # the first always stays
    choice = torch.multinomial(logits.softmax(-1), 1, generator=generator)
    return order.gather(1, choice)[:, 0]


def fast_norm(weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    """F.rms_norm with this weight, (n,) or (heads, n), without gradients. On a CPU torch 2.13 composes it of ten
    operations, which for a few rows take longer than the matrix products around them; here are four."""
    n = weight.shape[-1]
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        scaled, floor = weight * math.sqrt(n), weight.new_tensor(math.sqrt(n * eps))
        return lambda x: (x / torch.linalg.vector_norm(x, 2, -1, True).hypot_(floor)).mul_(scaled)
    if weight.dim() == 1:
        return lambda x: F.rms_norm(x, (n,), weight, eps)
    return lambda x: F.rms_norm(x, (n,), eps=eps) * weight


class FastLayer(NamedTuple):
    """What FastStep needs of a block: norms as functions, matrices transposed."""

    encoding: str
    norm: Callable[[Tensor], Tensor]
    qkv: Tensor
    qk_norm: Callable[[Tensor], Tensor] | None
    log_n: Tensor | None  # (H,)
    out: Tensor
    mlp_norm: Callable[[Tensor], Tensor]
    gate_up: Tensor
    mlp_out: Tensor

    @classmethod
    def of(cls, block: Block) -> "FastLayer":
        attention, mlp, qk_norm = block.attention, block.mlp, None
        eps = block.mlp_norm.eps
        if isinstance(attention.q_norm, nn.RMSNorm):
            q_weight = attention.q_norm.weight.expand(attention.H, -1)
            k_weight = attention.k_norm.weight.expand(attention.Hkv, -1)
            qk_norm = fast_norm(torch.cat([q_weight, k_weight]), eps)
        return cls(
            encoding=attention.encoding,
            norm=fast_norm(block.attention_norm.weight, eps),
            qkv=attention.qkv.weight.T,
            qk_norm=qk_norm,
            log_n=attention.log_n_scale if attention.log_n else None,
            out=attention.out.weight.T,
            mlp_norm=fast_norm(block.mlp_norm.weight, eps),
            gate_up=mlp.gate_up.weight.T,
            mlp_out=mlp.out.weight.T,
        )


class FastStep:
    """Decoder.hidden for one new token a row, in a third of the time where launching an operation takes longer than
    doing it (scripts/bench.py generate). No modules and no autograd; weights, buffers that layers share, and their
    views are prepared once; q and k are normed and rotated together, whole heads at a time."""

    def __init__(self, model: Decoder, cache: Cache, B: int):
        c, weight = model.config, model.embed.weight
        H, Hkv, D = c.n_head, c.kv_heads, c.head_size
        self.col_embed = model.col_embed
        self.cache, self.embed, self.D, self.scale = cache, weight, D, 1 / math.sqrt(D)
        self.rotary, self.phase = model.rotary, {name: rotary.scaled_phase() for name, rotary in model.rotary.items()}
        self.qkv = weight.new_empty(B, (H + 2 * Hkv) * D)
        heads = self.qkv.view(B, 1, H + 2 * Hkv, D)
        self.qk = heads[:, 0, : H + Hkv]
        self.q_k_v = heads.split([H, Hkv, Hkv], dim=2)  # (B, 1, heads, D) each
        self.group_shape = (B, Hkv, H // Hkv, -1)  # the query heads of a key head stand where queries do
        self.grouped = self.group(*self.q_k_v)
        self.gate_up = weight.new_empty(B, model.blocks[0].mlp.gate_up.out_features)
        self.gate, self.up = self.gate_up.chunk(2, dim=-1)
        self.layers = [FastLayer.of(block) for block in model.blocks]
        self.norm = fast_norm(model.norm.weight, c.norm_eps)
        # What a token does to the state (7, B) of rope2d.grid is affine: keep x state + add. Found by asking grid.
        tokens, breaks = torch.arange(c.vocab_size, device=weight.device)[:, None], model.breaks
        _, self.add = rope2d.grid(tokens, breaks, None, None, c.grid_reset)
        _, ones = rope2d.grid(tokens, breaks, torch.ones_like(self.add), None, c.grid_reset)
        self.keep = ones - self.add
        cache.state = breaks.new_zeros(len(ones), B) if cache.state is None else cache.state

    def group(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, 1, heads, D) each -> (B, Hkv, H / Hkv, D), and (B, Hkv, 1, D) twice."""
        return q.view(self.group_shape), k.transpose(1, 2), v.transpose(1, 2)

    def __call__(self, tokens: Tensor) -> Tensor:
        """tokens (B,) -> final states (B, C); the cache then holds them too."""
        cache, at, qk, D = self.cache, self.cache.state, self.qk, self.D
        rotations = {}
        for encoding, phase in self.phase.items():
            angles = (self.rotary[encoding].places(at) * phase).float().mul_(rope2d.RADIANS_PER_UNIT)  # (B, D/2)
            angles = torch.cat([-angles, angles], dim=-1)[:, None]  # (B, 1, D): sines with the signs of a rotation
            rotations[encoding] = angles.cos(), angles.sin()
        mask = attention_mask(1, cache.length + 1, cache.pad, tokens.device)
        x = self.embed.index_select(0, tokens)  # (B, C)
        if self.col_embed:
            x = x + self.col_embed(at[rope2d.COL].clamp(max=rope2d.COL_EMBEDDINGS - 1))
        for i, layer in enumerate(self.layers):
            torch.mm(layer.norm(x), layer.qkv, out=self.qkv)
            normed = layer.qk_norm(qk) if layer.qk_norm else qk
            if layer.encoding in rotations:
                cos, sin = rotations[layer.encoding]
                torch.addcmul(normed * cos, normed.roll(D // 2, -1), sin, out=qk)
            elif layer.qk_norm:
                qk.copy_(normed)
            if layer.log_n is not None:
                self.q_k_v[0].mul_(((at[rope2d.INDEX] + 1).log()[:, None] * layer.log_n)[:, None, :, None])
            q, k, v = self.grouped
            if layer.encoding == "alibi":
                q, k, v = self.group(*rope2d.with_alibi(*self.q_k_v, at[rope2d.INDEX, :, None], self.scale))
            keys, values = cache.extend(i, k, v)
            y = F.scaled_dot_product_attention(q, keys, values, mask, scale=self.scale)[..., :D]
            x = torch.addmm(x, y.reshape(len(x), -1), layer.out)
            torch.mm(layer.mlp_norm(x), layer.gate_up, out=self.gate_up)
            x = torch.addmm(x, F.silu(self.gate).mul_(self.up), layer.mlp_out)
        cache.length += 1
        cache.state = self.keep.index_select(1, tokens).mul_(at).add_(self.add.index_select(1, tokens))
        return self.norm(x)

    @staticmethod
    def supports(model: Decoder) -> bool:
        """Neither learned grids, which have a state of their own, nor autocast."""
        encodings = {block.attention.encoding for block in model.blocks}
        return "auto-2d-rope" not in encodings and not torch.is_autocast_enabled(model.breaks.device.type)


def tokenizer_of(run: str, trained: dict, name: str | None = None) -> Tokenizer:
    """The tokenizer that a run's model was trained with. ValueError if it had none, or `name` is another."""
    if "tokenizer" not in trained["data"]:
        raise ValueError(f"{run}: not trained on text, so it has no tokenizer")
    tokenizer = load_tokenizer(name or trained["tokenizer"])
    if lines := configurator.diff(trained["data"]["tokenizer"], tokenizer.fingerprint):
        hint = "--tokenizer says where the run's own is now"
        raise ValueError(f"tokenizer={tokenizer.name!r} is not the one that {run} has: {'; '.join(lines)}; {hint}")
    return tokenizer


def main() -> None:
    given: dict[str, str] = {}
    config = configurator.configure(SampleConfig, doc=__doc__, given=given)
    if config.temperature == 0:
        configurator.check_used(given, dict.fromkeys(("top_k", "top_p", "seed"), "--temperature above 0"), config)
    knobs = {"device": checkpoint.pick_device(config.device), "block_size": config.block_size}
    model, trained = checkpoint.load_run(config.run, config.checkpoint, **knobs)
    tokenizer = tokenizer_of(config.run, trained, config.tokenizer)
    prompt = sys.stdin.read() if config.prompt == "-" else config.prompt
    tokens = tokenizer.encode(prompt).tolist() or [tokenizer.eos]  # a text begins after an end of sequence
    model.check_length(len(tokens) + config.max_new_tokens - 1)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may need several tokens
    print(prompt, end="", flush=True)
    with checkpoint.autocast(model.breaks.device, config.dtype):
        for new in generate(
            model, [tokens], config.max_new_tokens, config.temperature, config.top_k, config.top_p, config.seed
        ):
            if new.item() == tokenizer.eos:
                break
            print(decoder.decode(tokenizer.decode_bytes([new.item()])), end="", flush=True)
    print(decoder.decode(b"", final=True))


if __name__ == "__main__":
    configurator.run_cli(main)
