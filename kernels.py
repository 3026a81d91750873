"""Triton kernels: queries and keys rotated in one launch, and the affine scan of Auto-2D. Needs torch and triton alone.

    q, k = rotate_qk(q, k, cos, sin)     # (B, T, H, D), (B, T, Hkv, D); cos, sin (B or 1, T, D/2)
    rotate_qk_(q, k, cos, sin)           # the same in place, where no gradient is wanted
    h = affine_scan(a, b, start)         # h[0] = start, h[t + 1] = a[t] h[t] + b[t]

One program turns a tile of tokens, first the heads of q, then those of k, so that it loads a token's angles once and
sums their gradient over the heads without atomics:

                       0 ...... D/2 ...... D
    token t   head 0   a         | b            a' = a cos - b sin        tile: (tokens, heads, D/2), twice
              head 1   a         | b            b' = b cos + a sin
    token t+1 head 0   a         | b

The functions are operators of torch, so torch.compile, autocast and checkpointing take them as they take its own.
Without triton the file imports and AVAILABLE is False. TRITON_INTERPRET=1, set before the import, runs on CPU tensors.
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
INTERPRETED = AVAILABLE and triton.knobs.runtime.interpret
TILE = 1024  # pairs in a tile: 8 for each of 128 threads, which in bf16 is one 16-byte load for a and one for b
CHUNK = 2048  # tokens that the scan has in registers at a time

jit, constexpr = (triton.jit, tl.constexpr) if AVAILABLE else (lambda function: function, object)


def operator(name: str, mutates_args: tuple[str, ...] = ()):
    """Registers a function with torch under `name`.

    The interpreter is no compiler: it can be traced neither by torch.compile nor on fake tensors. There the operator is
    opaque, and on fake tensors the function only allocates (see `launch`).
    """

    def register(function):
        if AVAILABLE and not INTERPRETED:
            return triton_op(name, function, mutates_args=mutates_args)
        opaque = custom_op(name, function, mutates_args=mutates_args)
        opaque.register_fake(function)
        return opaque

    return register


def is_fake(x: Tensor) -> bool:
    return INTERPRETED and isinstance(x, torch._subclasses.FakeTensor)


# fmt: off
@jit
def _turn(
    x, x_t, x_h, y, y_t, y_h, x0, x0_t, x0_h, cos, sin, dcos, dsin, t, live,
    HEADS: constexpr, HALF: constexpr, BLOCK_H: constexpr, BLOCK_P: constexpr, ANGLES: constexpr,
):
    """Turns all heads of the tokens t, x -> y; returns dcos and dsin with what these heads add to them."""
    p = tl.arange(0, BLOCK_P)[None, None, :]
    for first in range(0, HEADS, BLOCK_H):
        h = (first + tl.arange(0, BLOCK_H)).to(tl.int64)[None, :, None]
        here = live & (h < HEADS)  # (tokens, heads, pairs)
        x_at, y_at = x + t * x_t + h * x_h + p, y + t * y_t + h * y_h + p
        a = tl.load(x_at, mask=here, other=0.0).to(cos.dtype)
        b = tl.load(x_at + HALF, mask=here, other=0.0).to(cos.dtype)
        tl.store(y_at, (a * cos - b * sin).to(y.dtype.element_ty), mask=here)
        tl.store(y_at + HALF, (b * cos + a * sin).to(y.dtype.element_ty), mask=here)
        if ANGLES:
            x0_at = x0 + t * x0_t + h * x0_h + p
            a0 = tl.load(x0_at, mask=here, other=0.0).to(cos.dtype)
            b0 = tl.load(x0_at + HALF, mask=here, other=0.0).to(cos.dtype)
            dcos += tl.sum(a * a0 + b * b0, axis=1)
            dsin += tl.sum(b * a0 - a * b0, axis=1)
    return dcos, dsin


@jit
def _rotate_kernel(
    q, q_b, q_t, q_h, k, k_b, k_t, k_h, out_q, out_q_b, out_q_t, out_q_h, out_k, out_k_b, out_k_t, out_k_h,
    q0, q0_b, q0_t, q0_h, k0, k0_b, k0_t, k0_h, cos, sin, cos_b, dcos, dsin, T,
    H: constexpr, HKV: constexpr, HALF: constexpr, BACK: constexpr, ANGLES: constexpr,
    BLOCK_T: constexpr, BLOCK_H: constexpr, BLOCK_P: constexpr,
):
    """BACK turns back, by the sine negated. With ANGLES, q and k are gradients and q0, k0 what was rotated."""
    blocks = (T + BLOCK_T - 1) // BLOCK_T
    batch = (tl.program_id(0) // blocks).to(tl.int64)
    t = ((tl.program_id(0) % blocks) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)[:, None]
    p = tl.arange(0, BLOCK_P)[None, :]
    live = (t < T) & (p < HALF)  # (tokens, pairs)
    c = tl.load(cos + batch * cos_b + t * HALF + p, mask=live, other=0.0)
    s = tl.load(sin + batch * cos_b + t * HALF + p, mask=live, other=0.0)
    dc, ds = tl.full(c.shape, 0.0, c.dtype), tl.full(c.shape, 0.0, c.dtype)
    if BACK:
        s = -s
    c3, s3, t3, live3 = c[:, None, :], s[:, None, :], t[:, None, :], live[:, None, :]
    dc, ds = _turn(
        q + batch * q_b, q_t, q_h, out_q + batch * out_q_b, out_q_t, out_q_h, q0 + batch * q0_b, q0_t, q0_h,
        c3, s3, dc, ds, t3, live3, H, HALF, BLOCK_H, BLOCK_P, ANGLES,
    )
    dc, ds = _turn(
        k + batch * k_b, k_t, k_h, out_k + batch * out_k_b, out_k_t, out_k_h, k0 + batch * k0_b, k0_t, k0_h,
        c3, s3, dc, ds, t3, live3, HKV, HALF, BLOCK_H, BLOCK_P, ANGLES,
    )
    if ANGLES:
        at = (batch * T + t) * HALF + p
        tl.store(dcos + at, dc, mask=live)
        tl.store(dsin + at, ds, mask=live)
# fmt: on


def launch_rotate(q, k, out_q, out_k, cos, sin, back=False, q0=None, k0=None, dcos=None, dsin=None) -> None:
    """q, k -> out_q, out_k, which may be q, k themselves. With q0 and k0 also dcos, dsin (B, T, D/2)."""
    if is_fake(q):
        return
    B, T = q.shape[:2]
    H, Hkv, D = int(q.shape[2]), int(k.shape[2]), int(q.shape[3])  # under torch.compile constants, even if dynamic
    cos, sin = cos.contiguous(), sin.contiguous()
    cos_b = 0 if cos.shape[0] == 1 else T * (D // 2)
    block_p = triton.next_power_of_2(D // 2)
    block_h = min(triton.next_power_of_2(max(H, Hkv, 1)), max(TILE // block_p, 1))
    block_t = max(TILE // (block_h * block_p), 1)
    angles = q0 is not None
    if not angles:
        q0, k0, dcos, dsin = q, k, cos, sin  # never touched
    strides = [x.stride()[:3] for x in (q, k, out_q, out_k, q0, k0)]
    wrap_triton(_rotate_kernel)[(B * -(-T // block_t),)](
        q, *strides[0], k, *strides[1], out_q, *strides[2], out_k, *strides[3], q0, *strides[4], k0, *strides[5],
        cos, sin, cos_b, dcos, dsin, T,
        H=H, HKV=Hkv, HALF=D // 2, BACK=back, ANGLES=angles,
        BLOCK_T=block_t, BLOCK_H=block_h, BLOCK_P=block_p, num_warps=4,
    )  # fmt: skip


def rows_dense(x: Tensor) -> Tensor:
    """x, copied if its last dimension is not contiguous: the kernels take strides for all the others."""
    return x if x.stride(-1) == 1 else x.contiguous()


@operator("nano2d::rotate_qk")
def _rotate_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    out_q, out_k = q.new_empty(q.shape), k.new_empty(k.shape)
    launch_rotate(rows_dense(q), rows_dense(k), out_q, out_k, cos, sin)
    return out_q, out_k


@operator("nano2d::rotate_qk_", mutates_args=("q", "k"))
def _rotate_qk_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    launch_rotate(q, k, q, k, cos, sin)


@operator("nano2d::rotate_qk_backward")
def _rotate_qk_backward(
    grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, q: Tensor | None, k: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dcos, dsin; the last two are empty without q and k, and of a batch's own whatever cos has."""
    dq, dk = grad_q.new_empty(grad_q.shape), grad_k.new_empty(grad_k.shape)
    grad_q, grad_k = rows_dense(grad_q), rows_dense(grad_k)
    if q is None or k is None:
        launch_rotate(grad_q, grad_k, dq, dk, cos, sin, back=True)
        return dq, dk, cos.new_empty(0), sin.new_empty(0)
    shape = (q.shape[0], *cos.shape[1:])
    dcos, dsin = cos.new_empty(shape), sin.new_empty(shape)
    launch_rotate(grad_q, grad_k, dq, dk, cos, sin, True, rows_dense(q), rows_dense(k), dcos, dsin)
    return dq, dk, dcos, dsin


def _rotate_setup(ctx, inputs, output) -> None:
    q, k, cos, sin = inputs
    learned = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]  # only then are q and k kept
    ctx.save_for_backward(cos, sin, *((q, k) if learned else (None, None)))


def _rotate_backward(ctx, grad_q: Tensor, grad_k: Tensor):
    cos, sin, q, k = ctx.saved_tensors
    dq, dk, dcos, dsin = _rotate_qk_backward(grad_q, grad_k, cos, sin, q, k)
    if q is None:
        return dq, dk, None, None
    if cos.shape[0] == 1:
        dcos, dsin = dcos.sum(0, keepdim=True), dsin.sum(0, keepdim=True)
    return dq, dk, dcos, dsin


_rotate_qk.register_autograd(_rotate_backward, setup_context=_rotate_setup)


def check_rotation(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin in the dtype of the mathematics: float32, float64 if q or k are."""
    check_device(q, k, cos, sin)
    B, T, _, D = q.shape
    if k.shape != (B, T, k.shape[2], D) or D % 2 or D == 0:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)}: expected (B, T, H, D), (B, T, Hkv, D) and an even D")
    if cos.shape != sin.shape or cos.shape not in ((1, T, D // 2), (B, T, D // 2)):
        shapes = f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)}"
        raise ValueError(f"{shapes}: expected ({B} or 1, {T}, {D // 2}) for q {tuple(q.shape)}")
    exact = (torch.float32, torch.float64)
    if cos.dtype not in exact or sin.dtype not in exact or not (q.is_floating_point() and k.is_floating_point()):
        dtypes = f"q {q.dtype}, k {k.dtype}, cos {cos.dtype}, sin {sin.dtype}"
        raise ValueError(f"{dtypes}: expected real q and k, and cosines and sines in float32")
    wide = torch.float64 if torch.float64 in (q.dtype, k.dtype) else torch.float32
    return cos.to(wide), sin.to(wide)


def check_device(first: Tensor, *others: Tensor) -> None:
    if not AVAILABLE:
        raise RuntimeError("this needs triton: pip install triton")
    if any(x.device != first.device for x in others) or first.device.type == "cpu" and not INTERPRETED:
        names = ", ".join(str(x.device) for x in (first, *others))
        raise ValueError(f"tensors on {names}: expected one GPU, or the CPU with TRITON_INTERPRET=1")


def rotate_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turns the pairs (i, i + D/2) of q and k by the angles of cos and sin, in one launch.

    q (B, T, H, D), k (B, T, Hkv, D) bfloat16, float16 or float32, with any strides where the last is 1 (others are
    copied); cos, sin (B or 1, T, D/2) float32, and all mathematics in float32. Returns contiguous tensors of the
    dtypes of q and k. Differentiable once, in all four; q and k are kept for it only if cos or sin need a gradient.
    ValueError for shapes, dtypes or devices that do not fit.
    """
    cos, sin = check_rotation(q, k, cos, sin)
    return _rotate_qk(q, k, cos, sin)


def rotate_qk_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """`rotate_qk` in place. ValueError also where a gradient is wanted, or a last dimension is not contiguous."""
    cos, sin = check_rotation(q, k, cos, sin)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, cos, sin)):
        raise ValueError("in place there is no gradient: expected torch.no_grad(), or rotate_qk")
    if q.stride(3) != 1 or k.stride(3) != 1:
        raise ValueError(f"strides {q.stride()}, {k.stride()}: expected the last dimension of q and k to be contiguous")
    _rotate_qk_(q, k, cos, sin)


@jit
def _compose(a1, b1, a2, b2):
    return a1 * a2, a2 * b1 + b2


@jit
def _scan_kernel(a, a_row, b, b_row, start, h, T, REVERSE: constexpr, CHUNK: constexpr):
    """One program a row, chunk after chunk. REVERSE starts at the end."""
    row = tl.program_id(0).to(tl.int64)
    h += row * (T + 1)
    lane = tl.arange(0, CHUNK)
    carry = tl.load(start + row)
    tl.store(h + (T if REVERSE else 0), carry)
    for first in range(0, T, CHUNK):
        t = T - 1 - first - lane if REVERSE else first + lane
        live = first + lane < T
        a_t = tl.load(a + row * a_row + t, mask=live, other=1.0)
        b_t = tl.load(b + row * b_row + t, mask=live, other=0.0)
        A, B = tl.associative_scan((a_t, b_t), 0, _compose)
        value = A * carry + B
        tl.store(h + (t if REVERSE else t + 1), value, mask=live)
        carry = tl.sum(tl.where(lane == CHUNK - 1, value, 0.0))


@operator("nano2d::affine_scan")
def _affine_scan(a: Tensor, b: Tensor, start: Tensor, reverse: bool) -> Tensor:
    """reverse: h[T] = start, h[t] = a[t] h[t + 1] + b[t]."""
    N, T = start.numel(), a.shape[-1]
    h = a.new_empty((*a.shape[:-1], T + 1))
    if not is_fake(a):
        a, b, start = rows_dense(a.reshape(N, T)), rows_dense(b.reshape(N, T)), start.contiguous()
        wrap_triton(_scan_kernel)[(N,)](
            a, a.stride(0), b, b.stride(0), start, h, T, REVERSE=reverse, CHUNK=CHUNK, num_warps=8
        )
    return h


def _scan_setup(ctx, inputs, output) -> None:
    a, _, _, ctx.reverse = inputs
    ctx.save_for_backward(a, output)


def _scan_backward(ctx, grad: Tensor):
    """The gradient of a step is the sum of its own and of what later steps made of it: the same scan, from the end."""
    a, h = ctx.saved_tensors
    first, last = (-1, 0) if ctx.reverse else (0, -1)  # where the recurrence starts and ends
    after, before = (slice(None, -1), slice(1, None)) if ctx.reverse else (slice(1, None), slice(None, -1))
    total = _affine_scan(a, grad[..., before], grad[..., last], not ctx.reverse)  # (..., T + 1)
    return total[..., after] * h[..., before], total[..., after], total[..., first], None


_affine_scan.register_autograd(_scan_backward, setup_context=_scan_setup)


def affine_scan(a: Tensor, b: Tensor, start: Tensor) -> Tensor:
    """h[0] = start, h[t + 1] = a[t] h[t] + b[t]: (..., T + 1) from a, b (..., T) and start (...,), of one dtype.

    float32 or float64, summed in that. Chunks of CHUNK tokens with the state carried over, so T has no limit; rows run
    side by side. Differentiable, any number of times. ValueError for shapes, dtypes or devices that do not fit.
    """
    check_device(a, b, start)
    if a.shape != b.shape or a.shape[:-1] != start.shape:
        raise ValueError(
            f"a {tuple(a.shape)}, b {tuple(b.shape)}, start {tuple(start.shape)}: expected (..., T), (..., T), (...,)"
        )
    if not (a.dtype == b.dtype == start.dtype and a.dtype in (torch.float32, torch.float64)):
        raise ValueError(f"a {a.dtype}, b {b.dtype}, start {start.dtype}: expected all float32 or all float64")
    return _affine_scan(a, b, start, False)
