"""Triton kernels: rotate queries and keys in one launch, and the affine scan of Auto-2D. Needs torch and triton alone.

    q, k = rotate_qk(q, k, cos, sin)     # (B, T, H, D), (B, T, Hkv, D); cos, sin (B or 1, T, D/2)
    h = affine_scan(a, b, start)         # h[0] = start, h[t + 1] = a[t] h[t] + b[t]

A head is D/2 pairs of channels, i and i + D/2. One program rotates a tile: all heads of a few tokens, first those of q,
then those of k, so that a token's cos and sin are loaded once.

                       0 ....... D/2 ...... D
    token t   head 0   |    a     |    b    |        a' = a cos - b sin
              head 1   |    a     |    b    |        b' = b cos + a sin
    token t+1 head 0   |    a     |    b    |
              head 1   |    a     |    b    |        the tile is a and b, (tokens, heads, D/2) each

Both functions are torch operators, so torch.compile, autocast and checkpointing work with them. Without triton the file
still imports, and AVAILABLE is False. If TRITON_INTERPRET=1 is set before triton is imported, they run on CPU tensors.
"""

import torch
from torch import Tensor
from torch.library import custom_op, triton_op, wrap_triton

try:
    import triton
    import triton.language as tl
except ImportError:  # no error: transformers imports any module named `kernels` to see whether it is Hugging Face's
    triton = None

AVAILABLE = triton is not None
jit, constexpr = (triton.jit, tl.constexpr) if AVAILABLE else (lambda function: function, object)

TILE = 1024  # pairs in a tile: 8 for each of 128 threads, which in bf16 is one 16-byte load for a and one for b
CHUNK = 2048  # tokens that the scan holds in registers at a time


# fmt: off
@jit
def _rotate_heads(
    x, x_h, y, cos, sin, mask, HEADS: constexpr, HALF: constexpr, BLOCK_H: constexpr, BLOCK_P: constexpr,
):
    """Rotates all heads of a tile's tokens. x, y (tokens, 1, 1): where each token starts in the input and
    in the output. x_h: the stride between heads in x. cos, sin, mask: (tokens, 1, pairs)."""
    p = tl.arange(0, BLOCK_P)[None, None, :]
    for first in range(0, HEADS, BLOCK_H):
        h = (first + tl.arange(0, BLOCK_H)).to(tl.int64)[None, :, None]
        head_mask = mask & (h < HEADS)  # (tokens, heads, pairs)
        x_pairs = x + h * x_h + p
        y_pairs = y + h * (2 * HALF) + p
        a = tl.load(x_pairs, mask=head_mask, other=0.0).to(cos.dtype)
        b = tl.load(x_pairs + HALF, mask=head_mask, other=0.0).to(cos.dtype)
        tl.store(y_pairs, (a * cos - b * sin).to(y.dtype.element_ty), mask=head_mask)
        tl.store(y_pairs + HALF, (b * cos + a * sin).to(y.dtype.element_ty), mask=head_mask)


@jit
def _rotate_kernel(
    q, q_b, q_t, q_h, k, k_b, k_t, k_h, out_q, out_k, cos, sin, cos_b, T,
    H: constexpr, HKV: constexpr, HALF: constexpr, BACK: constexpr,
    BLOCK_T: constexpr, BLOCK_H: constexpr, BLOCK_P: constexpr,
):
    """q_b, q_t, q_h and so on are strides. out_q, out_k, cos and sin are contiguous; cos_b is 0 if the batch shares its
    angles. BACK: by the negative angles. Indices are int64, because a tensor can have more than 2^31 elements."""
    blocks = (T + BLOCK_T - 1) // BLOCK_T
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    t = ((tl.program_id(0) % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None, None]
    p = tl.arange(0, BLOCK_P)[None, None, :]
    mask = (t < T) & (p < HALF)  # (tokens, 1, pairs)
    c = tl.load(cos + batch * cos_b + t * HALF + p, mask=mask, other=0.0)
    s = tl.load(sin + batch * cos_b + t * HALF + p, mask=mask, other=0.0)
    if BACK:
        s = -s
    q += batch * q_b + t * q_t
    k += batch * k_b + t * k_t
    out_q += (batch * T + t) * (H * 2 * HALF)
    out_k += (batch * T + t) * (HKV * 2 * HALF)
    _rotate_heads(q, q_h, out_q, c, s, mask, H, HALF, BLOCK_H, BLOCK_P)
    _rotate_heads(k, k_h, out_k, c, s, mask, HKV, HALF, BLOCK_H, BLOCK_P)
# fmt: on


@jit
def _compose(a1, b1, a2, b2):
    return a1 * a2, a2 * b1 + b2


@jit
def _scan_kernel(a, a_row, b, b_row, start, h, T, REVERSE: constexpr, CHUNK: constexpr):
    """One program per row, chunk after chunk; REVERSE from the end of the row."""
    row = tl.program_id(0).to(tl.int64)
    h += row * (T + 1)
    lane = tl.arange(0, CHUNK)
    carry = tl.load(start + row)
    tl.store(h + (T if REVERSE else 0), carry)
    for first in range(0, T, CHUNK):
        mask = first + lane < T
        t = T - 1 - first - lane if REVERSE else first + lane
        a_t = tl.load(a + row * a_row + t, mask=mask, other=1.0)
        b_t = tl.load(b + row * b_row + t, mask=mask, other=0.0)
        A, B = tl.associative_scan((a_t, b_t), 0, _compose)
        value = A * carry + B
        tl.store(h + (t if REVERSE else t + 1), value, mask=mask)
        carry = tl.sum(tl.where(lane == CHUNK - 1, value, 0.0))


# jit returns something else under the interpreter. Versions of triton differ in how they read TRITON_INTERPRET.
INTERPRETED = AVAILABLE and not isinstance(_rotate_kernel, triton.JITFunction)
# torch.compile traces a triton_op down to its kernel, a custom_op not at all: the interpreter cannot be traced.
operator = triton_op if AVAILABLE and not INTERPRETED else custom_op


def last_dim_contiguous(x: Tensor) -> Tensor:
    """x, copied if the stride of its last dimension is not 1. The kernels take strides for the other dimensions."""
    return x if x.stride(-1) == 1 else x.contiguous()


@operator("nano2d::rotate_qk", mutates_args=())
def _rotate_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    """The operator behind rotate_qk. back: by the negative angles, which is its gradient."""
    out_q, out_k = q.new_empty(q.shape), k.new_empty(k.shape)
    q, k, cos, sin = last_dim_contiguous(q), last_dim_contiguous(k), cos.contiguous(), sin.contiguous()
    B, T = q.shape[:2]
    H, Hkv, half = int(q.shape[2]), int(k.shape[2]), int(q.shape[3]) // 2  # constants, also where shapes are dynamic
    cos_b = 0 if cos.shape[0] == 1 else T * half
    block_p = triton.next_power_of_2(half)
    block_h = min(triton.next_power_of_2(H), max(TILE // block_p, 1))
    block_t = max(TILE // (block_h * block_p), 1)
    programs = B * ((T + block_t - 1) // block_t)
    wrap_triton(_rotate_kernel)[(programs,)](
        q, *q.stride()[:3], k, *k.stride()[:3], out_q, out_k, cos, sin, cos_b, T,
        H=H, HKV=Hkv, HALF=half, BACK=back, BLOCK_T=block_t, BLOCK_H=block_h, BLOCK_P=block_p, num_warps=4,
    )  # fmt: skip
    return out_q, out_k


@_rotate_qk.register_fake
def _(q, k, cos, sin, back):
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _rotate_save(ctx, inputs, output) -> None:
    q, k, cos, sin, ctx.back = inputs
    learned = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]  # only then are q and k kept
    ctx.save_for_backward(cos, sin, *((q, k) if learned else (None, None)))


def _rotate_backward(ctx, grad_q: Tensor, grad_k: Tensor):
    """The gradient of a rotation is the rotation back. cos and sin get theirs in torch: few models learn angles."""
    cos, sin, q, k = ctx.saved_tensors
    dq, dk = _rotate_qk(grad_q, grad_k, cos, sin, not ctx.back)
    if q is None:
        return dq, dk, None, None, None
    dcos, dsin = 0, 0
    for x, grad in ((q, grad_q), (k, grad_k)):
        (a, b), (da, db) = x.to(cos.dtype).chunk(2, -1), grad.to(cos.dtype).chunk(2, -1)  # (B, T, heads, D/2) each
        dcos = dcos + (da * a + db * b).sum(2)
        dsin = dsin + (db * a - da * b).sum(2)
    if ctx.back:
        dsin = -dsin
    return dq, dk, dcos.sum_to_size(cos.shape), dsin.sum_to_size(sin.shape), None


_rotate_qk.register_autograd(_rotate_backward, setup_context=_rotate_save)


@operator("nano2d::affine_scan", mutates_args=())
def _affine_scan(a: Tensor, b: Tensor, start: Tensor, reverse: bool) -> Tensor:
    """The operator behind affine_scan. reverse: h[T] = start, h[t] = a[t] h[t + 1] + b[t]."""
    N, T = start.numel(), a.shape[-1]
    h = a.new_empty((*a.shape[:-1], T + 1))
    a, b = last_dim_contiguous(a.reshape(N, T)), last_dim_contiguous(b.reshape(N, T))
    wrap_triton(_scan_kernel)[(N,)](
        a, a.stride(0), b, b.stride(0), start.contiguous(), h, T, REVERSE=reverse, CHUNK=CHUNK, num_warps=8
    )
    return h


@_affine_scan.register_fake
def _(a, b, start, reverse):
    return a.new_empty((*a.shape[:-1], a.shape[-1] + 1))


def _scan_save(ctx, inputs, output) -> None:
    a, _, _, ctx.reverse = inputs
    ctx.save_for_backward(a, output)


def _scan_backward(ctx, grad: Tensor):
    """A state's gradient is its own plus a times that of the state after it: the same scan, from the other end."""
    a, h = ctx.saved_tensors
    read, written, first, last = slice(None, -1), slice(1, None), 0, -1  # the states that the steps read and write
    if ctx.reverse:
        read, written, first, last = written, read, last, first
    total = _affine_scan(a, grad[..., read], grad[..., last], not ctx.reverse)  # (..., T + 1)
    return total[..., written] * h[..., read], total[..., written], total[..., first], None


_affine_scan.register_autograd(_scan_backward, setup_context=_scan_save)


def check_device(*tensors: Tensor) -> None:
    if not AVAILABLE:
        raise RuntimeError("this needs triton: pip install triton")
    device = tensors[0].device
    if any(x.device != device for x in tensors) or device.type == "cpu" and not INTERPRETED:
        names = ", ".join(str(x.device) for x in tensors)
        raise ValueError(f"tensors on {names}: expected one GPU, or the CPU with TRITON_INTERPRET=1 in the environment")


def rotate_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates the pairs (i, i + D/2) of q and k by the angles of cos and sin, in one launch.

    q (B, T, H, D), k (B, T, Hkv, D) of any real dtype, with any strides (copied if the last is not 1); cos, sin
    (B or 1, T, D/2) float32 or float64. Computes in float32, or float64 if q or k are. Returns contiguous tensors in
    the dtypes of q and k. Differentiable in all four, any number of times; q and k are kept for it only if cos or sin
    need a gradient. ValueError for shapes, dtypes or devices that do not fit. Formula: RoFormer, arXiv 2104.09864.
    """
    check_device(q, k, cos, sin)
    alike = q.ndim == k.ndim == 4 and q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3]
    if not alike or q.shape[3] % 2 or q.shape[3] == 0:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}"
        raise ValueError(f"{shapes}: expected (B, T, H, D), (B, T, Hkv, D) and an even D")
    B, T, _, D = q.shape
    if cos.shape != sin.shape or cos.shape not in ((1, T, D // 2), (B, T, D // 2)):
        shapes = f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)}"
        raise ValueError(f"{shapes}: expected ({B} or 1, {T}, {D // 2}) for q {tuple(q.shape)}")
    exact = (torch.float32, torch.float64)
    if cos.dtype not in exact or sin.dtype not in exact or not (q.is_floating_point() and k.is_floating_point()):
        dtypes = f"q {q.dtype}, k {k.dtype}, cos {cos.dtype}, sin {sin.dtype}"
        raise ValueError(f"{dtypes}: expected real q and k, and cos and sin in float32 or float64")
    wide = torch.float64 if torch.float64 in (q.dtype, k.dtype) else torch.float32
    return _rotate_qk(q, k, cos.to(wide), sin.to(wide), False)


def affine_scan(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """h[0] = start, h[t + 1] = a[t] h[t] + b[t].

    a, b (..., T) and start (...,), all float32 or all float64, with any strides; returns (..., T + 1) in that dtype.
    Goes over chunks of CHUNK tokens and carries the state from one to the next, so T has no limit; rows run side by
    side. Differentiable, any number of times. ValueError for shapes, dtypes or devices that do not fit.
    """
    check_device(a, b, start)
    if a.shape != b.shape or a.shape[:-1] != start.shape:
        shapes = f"a {tuple(a.shape)}, b {tuple(b.shape)}, start {tuple(start.shape)}"
        raise ValueError(f"{shapes}: expected (..., T), (..., T), (...,)")
    if not (a.dtype == b.dtype == start.dtype and a.dtype in (torch.float32, torch.float64)):
        raise ValueError(f"a {a.dtype}, b {b.dtype}, start {start.dtype}: expected all float32 or all float64")
    return _affine_scan(a, b, start, False)
