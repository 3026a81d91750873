"""kernels.py: rotation and scan against float64 formulas, under Triton's interpreter, and on a GPU where there is one.

The interpreter is chosen when triton is imported, for the whole process. So what needs it is `interpreted`: it exists
only in the process that `test_everything_under_the_interpreter` starts, whatever the rest of the suite imports.
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.txt (Linux)")

import kernels
import rope2d

ROOT = Path(kernels.__file__).parent
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
# Relative error of rounding, with a little room in float32 and float64. The interpreter truncates to bfloat16.
ROUNDING = {F16: 2**-11, BF16: 2**-7 if kernels.INTERPRETED else 2**-8, F32: 1e-6, F64: 1e-13}
on_gpu = pytest.mark.skipif(kernels.INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA GPU")


def interpreted(test):
    return test if kernels.INTERPRETED else None


def normal(*shape, dtype=F32, seed=0, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(device, dtype)


def rotated(x, cos, sin):
    """In float64, as complex numbers."""
    half = x.shape[-1] // 2
    z = torch.complex(x.double()[..., :half], x.double()[..., half:])
    z = z * torch.complex(cos.double(), sin.double())[:, :, None]
    return torch.cat([z.real, z.imag], dim=-1)


def example(shape, dtype=F32, device="cpu", tables=F32):
    """A fused projection; its slices q and k; cos and sin of unrelated angles; gradients of the results."""
    B, T, H, Hkv, D, table_B = shape
    qkv = normal(B, T, H + 2 * Hkv, D, dtype=dtype, device=device).requires_grad_()
    cos = (10 * normal(table_B, T, D // 2, seed=1)).cos().to(device, tables).requires_grad_()
    sin = (10 * normal(table_B, T, D // 2, seed=2)).sin().to(device, tables).requires_grad_()
    q, k, _ = qkv.split([H, Hkv, Hkv], dim=2)
    grads = [normal(*x.shape, dtype=dtype, seed=seed, device=device) for seed, x in enumerate((q, k), 3)]
    return qkv, q, k, cos, sin, grads


def check_rotation(shape, dtype, device="cpu", tables=F32, rotate_qk=kernels.rotate_qk):
    """Results, and the gradients of the projection and of the tables, against float64."""
    qkv, q, k, cos, sin, grads = example(shape, dtype, device, tables)
    out, exact = rotate_qk(q, k, cos, sin), (rotated(q, cos, sin), rotated(k, cos, sin))
    dqkv, dcos, dsin = torch.autograd.grad(out, (qkv, cos, sin), grads)
    exact_dqkv, *exact_tables = torch.autograd.grad(exact, (qkv, cos, sin), [g.double() for g in grads])
    atol = 1e-13 if dtype == F64 else 2e-6  # of the float32 mathematics, values reach 5
    for found, wanted in [*zip(out, exact, strict=True), (dqkv, exact_dqkv)]:
        assert found.dtype == dtype and found.shape == wanted.shape and found.is_contiguous()
        torch.testing.assert_close(found.double(), wanted.double(), rtol=ROUNDING[dtype], atol=atol)
    for found, wanted in zip((dcos, dsin), exact_tables, strict=True):
        assert found.dtype == tables
        torch.testing.assert_close(found, wanted, rtol=0, atol=10 * atol)  # sums over batch and heads


SHAPES = [  # B, T, H, Hkv, D, B of the tables
    (2, 37, 4, 2, 64, 2),  # five programs a sequence, the last one ragged
    (1, 1, 3, 1, 12, 1),  # one token; heads and pairs that are no powers of two
    (3, 5, 2, 2, 4, 1),  # tables shared by the batch
    (2, 9, 8, 1, 12, 2),
    (1, 3, 6, 5, 520, 1),  # three rounds of heads a program
]


@interpreted
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", SHAPES)
def test_rotation_and_its_gradients_agree_with_float64(shape, dtype):
    check_rotation(shape, dtype)


@interpreted
@pytest.mark.parametrize("dtype, tables", [(F16, F32), (F64, F64), (F32, F64)])
def test_rotation_agrees_in_other_dtypes(dtype, tables):
    check_rotation((2, 5, 4, 2, 12, 2), dtype, tables=tables)


@interpreted
@pytest.mark.parametrize("encoding", ["rope", "2d-rope"])
def test_rotation_equals_the_plain_path_on_an_encoding(encoding):
    tokens = torch.randint(0, 2, (2, 11), generator=torch.Generator().manual_seed(0))
    positions, _ = rope2d.grid(tokens, torch.tensor([0, 1]))
    cos, sin = rope2d.Rotary(encoding, 16)(positions)
    q, k = normal(2, 11, 4, 16), normal(2, 11, 2, 16, seed=1)
    for found, x in zip(kernels.rotate_qk(q, k, cos, sin), (q, k), strict=True):
        torch.testing.assert_close(found, rope2d.rotate(x, cos, sin), rtol=0, atol=1e-6)


@interpreted
def test_the_gradient_of_a_learned_grid_reaches_its_gates():
    torch.manual_seed(0)
    learned, rotary, x = rope2d.AutoGrid(8), rope2d.Rotary("auto-2d-rope", 12, "uniform"), normal(2, 7, 8)
    q, k = normal(2, 7, 4, 12, seed=1), normal(2, 7, 2, 12, seed=2)
    index = torch.zeros(3, 2, 7, dtype=torch.int64)

    def gradient(rotate_qk):
        out = rotate_qk(q, k, *rotary(learned(x, index)[0]))
        return torch.autograd.grad(sum((y * y.roll(1, 1)).sum() for y in out), tuple(learned.parameters()))

    plain = gradient(lambda q, k, cos, sin: (rope2d.rotate(q, cos, sin), rope2d.rotate(k, cos, sin)))
    for found, wanted in zip(gradient(kernels.rotate_qk), plain, strict=True):
        assert wanted.abs().max() > 0.1
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@interpreted
def test_any_strides_go_in():
    q, k, cos, sin = normal(2, 3, 5, 8), normal(2, 1, 5, 8, seed=1), normal(5, 2, 4, seed=2), normal(2, 5, 4, seed=3)
    q, k, cos = q.transpose(1, 2).requires_grad_(), k.transpose(1, 2), cos.transpose(0, 1)  # heads first; tokens first
    k = torch.stack([k, k], dim=-1)[..., 1]  # the last dimension not contiguous
    out = kernels.rotate_qk(q, k, cos, sin)
    for found, x in zip(out, (q, k), strict=True):
        torch.testing.assert_close(found.double(), rotated(x, cos, sin), rtol=0, atol=4e-6)
    weights = normal(2, 3, 5, 8, seed=4).transpose(1, 2)
    for grad in (torch.ones(()).expand(2, 5, 3, 8), weights):  # of stride 0, as from sum(); heads first, as from SDPA
        found = torch.autograd.grad(out[0], q, grad, retain_graph=True)[0]
        wanted = torch.autograd.grad(rotated(q, cos, sin), q, grad.double())[0]
        torch.testing.assert_close(found, wanted, rtol=0, atol=4e-6)


@interpreted
def test_in_place_turns_q_and_k_and_touches_nothing_else():
    canvas = normal(3, 7, 7, 20)
    before = canvas.clone()
    q, k = canvas[1:, 1:6, 1:4, 4:16], canvas[1:, 1:6, 5:6, 4:16]  # inside of it on every side
    cos, sin = normal(2, 5, 6, seed=1), normal(2, 5, 6, seed=2)
    with torch.no_grad():
        kernels.rotate_qk_(q, k, cos, sin)
    for part in (slice(1, 4), slice(5, 6)):
        where = (slice(1, None), slice(1, 6), part, slice(4, 16))
        torch.testing.assert_close(canvas[where], rotated(before[where], cos, sin).float(), rtol=0, atol=4e-6)
        before[where] = canvas[where]
    assert torch.equal(canvas, before)


@interpreted
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_offsets_beyond_2_to_the_31_are_reached(dim):
    step = 2**30  # of each index; the memory between is never touched, so it is never there
    huge = torch.empty(2 * step + 64, dtype=BF16)
    size, stride = [1, 1, 1, 8], [8, 8, 8, 1]
    size[dim], stride[dim] = 3, step
    x = huge.as_strided(size, stride)
    x.copy_(normal(*size))
    B, T = size[:2]
    cos, sin = normal(B, T, 4, seed=1), normal(B, T, 4, seed=2)
    wanted = rotated(x, cos, sin)
    kernels.rotate_qk_(x, x[:, :, :0], cos, sin)
    torch.testing.assert_close(x.double(), wanted, rtol=ROUNDING[BF16], atol=2e-6)


@interpreted
def test_q_and_k_are_kept_for_backward_only_if_the_angles_learn():
    _, q, k, cos, sin, _ = example((1, 3, 2, 1, 8, 1))

    def kept(cos, sin):
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: shapes.append(tuple(x.shape)) or x, lambda x: x):
            out = kernels.rotate_qk(q, k, cos, sin)
        return shapes, torch.autograd.grad(out, q, [torch.ones_like(x) for x in out])[0]

    fixed, gradient = kept(cos.detach(), sin.detach())
    learned, same = kept(cos, sin.detach())
    assert sorted(set(fixed)) == [(1, 3, 4)] and sorted(set(learned)) == [(1, 3, 1, 8), (1, 3, 2, 8), (1, 3, 4)]
    assert torch.equal(gradient, same)


@interpreted
def test_a_result_that_is_not_used_has_no_gradient():
    _, q, k, cos, sin, grads = example((2, 3, 2, 1, 8, 2))
    found = torch.autograd.grad(kernels.rotate_qk(q, k, cos, sin)[0], (q, k, cos), grads[0])
    wanted = torch.autograd.grad(rotated(q, cos, sin), (q, cos), grads[0].double())
    assert not found[1].any()
    torch.testing.assert_close((found[0], found[2]), wanted, rtol=0, atol=1e-5)


@interpreted
@pytest.mark.parametrize("learned", [True, False])
def test_compile_autocast_and_checkpointing_change_nothing(learned):
    qkv, q, k, cos, sin, weights = example((2, 5, 2, 1, 8, 1))
    inputs = (qkv, cos, sin) if learned else (qkv,)
    cos, sin = (cos, sin) if learned else (cos.detach(), sin.detach())

    def gradients(loss):
        q, k, _ = qkv.split([2, 1, 1], dim=2)
        return torch.autograd.grad(loss(q, k, cos, sin), inputs)

    def loss(*inputs):
        return sum((x * weight).sum() for x, weight in zip(kernels.rotate_qk(*inputs), weights, strict=True))

    plain = gradients(loss)
    compiled = gradients(torch.compile(loss, backend="aot_eager", fullgraph=True))
    again = gradients(lambda *inputs: checkpoint(loss, *inputs, use_reentrant=False))
    with torch.autocast("cpu", dtype=BF16):
        assert kernels.rotate_qk(q, k, cos, sin)[0].dtype == F32
        mixed = gradients(loss)
    for other in (compiled, again, mixed):
        for a, b in zip(other, plain, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@interpreted
def test_operators_keep_the_promises_that_torch_asks_of_them():
    _, q, k, cos, sin, _ = example((2, 3, 2, 1, 8, 1))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.nano2d.rotate_qk.default, (q, k, cos, sin), test_utils=tests)
    inputs = [x.detach().clone() for x in (q, k, cos, sin)]
    torch.library.opcheck(torch.ops.nano2d.rotate_qk_.default, inputs, test_utils=tests)
    a, b, start = (normal(2, n, seed=n).requires_grad_() for n in (5, 5, 1))
    torch.library.opcheck(torch.ops.nano2d.affine_scan.default, (a, b, start[:, 0], True), test_utils=tests)


def looped(a, b, start):
    h = [start]
    for t in range(a.shape[-1]):
        h.append(a[..., t] * h[-1] + b[..., t])
    return torch.stack(h, dim=-1)


@interpreted
@pytest.mark.parametrize("rows, tokens", [((3,), 21), ((2, 2), 8), ((), 9), ((1,), 7), ((2,), 1), ((2,), 0)])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_scan_and_its_gradients_agree_with_a_loop_over_tokens(rows, tokens, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "CHUNK", 8)  # so that 21 tokens carry over twice
    a = normal(*rows, tokens).sigmoid().to(dtype).requires_grad_()
    b, start = normal(*rows, tokens, seed=1, dtype=dtype), normal(*rows, seed=2, dtype=dtype)
    inputs, grad = (a, b.requires_grad_(), start.requires_grad_()), normal(*rows, tokens + 1, seed=3)
    h, wanted = kernels.affine_scan(*inputs), looped(*(x.double() for x in inputs))
    assert h.dtype == dtype
    found = torch.autograd.grad(h, inputs, grad.to(dtype))
    exact = torch.autograd.grad(wanted, inputs, grad.double(), materialize_grads=True)
    for x, y in zip((h, *found), (wanted, *exact), strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=0, atol=1e-5 if dtype == F32 else 1e-13)
    plain = rope2d.AffineScan.apply(*inputs)
    torch.testing.assert_close(h, plain, rtol=0, atol=1e-5 if dtype == F32 else 1e-13)


@interpreted
def test_scan_takes_slices_and_has_second_derivatives(monkeypatch):
    monkeypatch.setattr(kernels, "CHUNK", 4)
    gates = normal(2, 6, 2, dtype=F64).requires_grad_()  # (B, T, 2)
    start = normal(2, dtype=F64, seed=1).requires_grad_()

    def scan(gates, start):
        a, b = gates.movedim(-1, 0)  # (B, T) each, tokens not contiguous
        return kernels.affine_scan(a, b, start)

    assert torch.autograd.gradcheck(scan, (gates, start), fast_mode=True)
    assert torch.autograd.gradgradcheck(scan, (gates, start), fast_mode=True)


@interpreted
def test_gradcheck_of_the_rotation():
    q, k = (normal(2, 2, heads, 4, dtype=F64, seed=heads).requires_grad_() for heads in (2, 1))
    cos, sin = (normal(1, 2, 2, dtype=F64, seed=seed).requires_grad_() for seed in (3, 4))
    assert torch.autograd.gradcheck(kernels.rotate_qk, (q, k, cos, sin), fast_mode=True)


QK, TABLE = torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4)


@interpreted
@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: kernels.rotate_qk(QK, QK[:, :2], TABLE, TABLE), r"2, 2, 4, 8"),
        (lambda: kernels.rotate_qk(QK[..., :7], QK[..., :7], TABLE, TABLE), "even D"),
        (lambda: kernels.rotate_qk(QK, QK, TABLE[:, :1], TABLE[:, :1]), r"cos \(2, 1, 4\)"),
        (lambda: kernels.rotate_qk(QK, QK, TABLE, TABLE[:1]), r"sin \(1, 3, 4\)"),
        (lambda: kernels.rotate_qk(QK, QK, TABLE.bfloat16(), TABLE.bfloat16()), "bfloat16"),
        (lambda: kernels.rotate_qk(QK.long(), QK, TABLE, TABLE), "int64"),
        (lambda: kernels.rotate_qk(QK, QK.to("meta"), TABLE, TABLE), "meta"),
        (lambda: kernels.rotate_qk_(QK.clone().requires_grad_(), QK, TABLE, TABLE), "no gradient"),
        (lambda: kernels.rotate_qk_(QK.mT.contiguous().mT, QK, TABLE, TABLE), "contiguous"),
        (lambda: kernels.affine_scan(TABLE, TABLE[..., :3], TABLE[..., 0]), r"2, 3, 3"),
        (lambda: kernels.affine_scan(TABLE, TABLE, TABLE[:, 0]), r"\(2, 4\)"),
        (lambda: kernels.affine_scan(TABLE.half(), TABLE.half(), TABLE[..., 0].half()), "float16"),
    ],
)
def test_wrong_values_are_refused_by_name(call, named):
    with pytest.raises(ValueError, match=named):
        call()


@pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter does take them")
def test_cpu_tensors_are_refused_without_the_interpreter():
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        kernels.rotate_qk(QK, QK, TABLE, TABLE)


@pytest.mark.skipif(kernels.INTERPRETED, reason="under the interpreter already: it would start itself again")
def test_everything_under_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) > 40, run.stdout


@pytest.mark.skipif(kernels.INTERPRETED, reason="under the interpreter already: it would start itself again")
def test_without_triton_the_file_imports_alone_and_says_what_is_missing(tmp_path):
    shutil.copy(kernels.__file__, tmp_path)
    code = """
import sys
sys.modules["triton"] = None
import torch, kernels
try:
    kernels.affine_scan(*torch.ones(3, 1))
except RuntimeError as error:
    print(kernels.AVAILABLE, error)
"""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "False this needs triton: pip install triton"


@pytest.mark.skipif(kernels.INTERPRETED, reason="the interpreter does not compile")
def test_compiled_for_a_consumer_card_the_tiles_are_small_and_loads_are_16_bytes():
    """Compiling for sm_86 (RTX 30) needs no GPU. 99 KB is the shared memory that a block may have there."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def build(kernel, pointers, constants, num_warps):
        names = kernel.arg_names
        kinds = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in constants}
        source = ASTSource(kernel, kinds, {(names.index(n),): value for n, value in constants.items()}, aligned)
        return triton.compile(source, target=GPUTarget("cuda", 86, 32), options={"num_warps": num_warps})

    import triton

    tensors = dict.fromkeys(("q", "k", "out_q", "out_k", "q0", "k0"), "*bf16")
    tables = dict.fromkeys(("cos", "sin", "dcos", "dsin"), "*fp32")
    sizes = {"H": 16, "HKV": 8, "HALF": 64, "BACK": True, "ANGLES": True, "BLOCK_T": 1, "BLOCK_H": 16, "BLOCK_P": 64}
    rotation = build(kernels._rotate_kernel, tensors | tables, sizes, 4)
    scan = build(
        kernels._scan_kernel,
        dict.fromkeys(("a", "b", "start", "h"), "*fp64"),
        {"REVERSE": True, "CHUNK": kernels.CHUNK},
        8,
    )
    assert max(rotation.metadata.shared, scan.metadata.shared) < 8192
    assert set(re.findall(r"ld\.global\S*", rotation.asm["ptx"])) == {"ld.global.v4.b32"}


@pytest.mark.skipif(kernels.INTERPRETED, reason="traced as for a GPU")
def test_one_graph_serves_every_length(monkeypatch):
    """Tracing needs no GPU. Block sizes computed from symbolic head sizes once made this hang."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return lambda *inputs: [torch.zeros(1)] * 3

    def both(q, k, cos, sin, a):
        return *kernels.rotate_qk(q, k, cos, sin), kernels.affine_scan(a, a, a[:, 0])

    monkeypatch.setattr(kernels, "check_device", lambda *tensors: None)
    compiled = torch.compile(both, backend=backend, fullgraph=True, dynamic=True)
    for B, T in ((5, 37), (3, 53)):  # sizes that no other dimension has, or torch takes them for the same
        qkv, cos, sin = normal(B, T, 8, 64), *normal(2, B, T, 32)
        compiled(qkv[:, :, :4], qkv[:, :, 4:6], cos, sin, normal(B, T))
    assert len(graphs) == 1


@pytest.mark.parametrize("tables_B", [1, 2])
def test_gradcheck_of_the_plain_rotation(tables_B):
    x = normal(2, 3, 2, 4, dtype=F64).requires_grad_()
    cos, sin = (normal(tables_B, 3, 2, dtype=F64, seed=seed).requires_grad_() for seed in (1, 2))
    assert torch.autograd.gradcheck(rope2d.rotate, (x, cos, sin))
    torch.testing.assert_close(rope2d.rotate(x, cos, sin), rotated(x, cos, sin), rtol=0, atol=1e-14)


def test_gradcheck_of_the_plain_scan():
    inputs = [normal(2, n, dtype=F64, seed=n).requires_grad_() for n in (7, 7, 1)]
    assert torch.autograd.gradcheck(lambda a, b, start: rope2d.AffineScan.apply(a, b, start[:, 0]), inputs)


@on_gpu
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("shape", [*SHAPES, (4, 1000, 16, 8, 128, 1), (2, 77, 2, 2, 512, 2)])
def test_gpu_agrees_with_float64(shape, dtype):
    check_rotation(shape, dtype, "cuda")


@on_gpu
def test_gpu_compiled_in_one_graph_agrees_with_float64():
    check_rotation((2, 77, 8, 2, 64, 1), BF16, "cuda", rotate_qk=torch.compile(kernels.rotate_qk, fullgraph=True))


@on_gpu
@pytest.mark.parametrize("dtype", [F32, F64])
def test_gpu_scans_260_000_tokens(dtype):
    a = (normal(2, 260_000, seed=1) > -3).to("cuda", dtype).requires_grad_()  # counts, and restarts now and then
    inputs = (a, torch.ones_like(a).requires_grad_(), torch.zeros(2, device="cuda", dtype=dtype).requires_grad_())
    h, plain = kernels.affine_scan(*inputs), rope2d.AffineScan.apply(*inputs)
    assert torch.equal(h, plain) and h.max() > 1000
    grads = [torch.autograd.grad(x.sum(), inputs) for x in (h, plain)]
    for found, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0)


@on_gpu
def test_gpu_rotates_at_85_percent_of_the_bandwidth_of_a_copy():
    from bench import seconds

    q, k, _ = torch.randn(8, 2048, 16 + 2 * 8, 128, device="cuda", dtype=BF16).split([16, 8, 8], dim=2)
    cos, sin = torch.randn(2, 8, 2048, 64, device="cuda")
    there = torch.empty(q.numel() + k.numel(), device="cuda", dtype=BF16)
    here = torch.empty_like(there)
    runs = {"ours": lambda: kernels.rotate_qk(q, k, cos, sin), "copy_": lambda: here.copy_(there)}
    times = {name: [] for name in runs}
    for _ in range(30):
        for name, run in runs.items():
            times[name].append(seconds(run, torch.device("cuda")))
    assert statistics.median(times["copy_"]) > 0.85 * statistics.median(times["ours"]), times
