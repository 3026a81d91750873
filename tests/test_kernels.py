"""kernels.py against float64 formulas, on a GPU and in Triton's interpreter.

Triton chooses the interpreter when it is imported, for the whole process. So `test_all_in_the_interpreter` runs this
file once more with TRITON_INTERPRET=1: there the tests that run kernels do so on the CPU, elsewhere they need a GPU.
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
from torch._dynamo.backends.common import aot_autograd

pytest.importorskip("triton", reason="triton is not installed: pip install -r requirements-dev.txt (Linux)")

import kernels
import rope2d

ROOT = Path(kernels.__file__).parent
GPU = torch.cuda.is_available() and not kernels.INTERPRETED
DEVICE = "cuda" if GPU else "cpu"
runs_kernels = pytest.mark.skipif(not GPU and not kernels.INTERPRETED, reason="needs a GPU or TRITON_INTERPRET=1")
needs_gpu = pytest.mark.skipif(not GPU, reason="needs a CUDA GPU")
not_interpreted = pytest.mark.skipif(kernels.INTERPRETED, reason="not for the interpreter")

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
# Relative error of rounding, with a little room in float32 and float64. The interpreter truncates to bfloat16.
ROUNDING = {F16: 2**-11, BF16: 2**-7 if kernels.INTERPRETED else 2**-8, F32: 1e-6, F64: 1e-13}


@pytest.fixture
def short_chunks(monkeypatch):
    if kernels.INTERPRETED:  # faster, and few tokens take several chunks; a GPU has more threads than that
        monkeypatch.setattr(kernels, "CHUNK", 8)


def normal(*shape, dtype=F32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(DEVICE, dtype)


def example(shape, dtypes=(F32, F32, F32)):
    """q and k, slices of one projection; cos and sin of unrelated angles; gradients of the results."""
    B, T, H, Hkv, D, table_B = shape
    q, k, _ = normal(B, T, H + 2 * Hkv, D).split([H, Hkv, Hkv], dim=2)
    q, k = q.to(dtypes[0]), k.to(dtypes[1])
    cos = (10 * normal(table_B, T, D // 2, seed=1)).cos().to(dtypes[2])
    sin = (10 * normal(table_B, T, D // 2, seed=2)).sin().to(dtypes[2])
    grads = [normal(*x.shape, dtype=x.dtype, seed=3) for x in (q, k)]
    return [x.requires_grad_() for x in (q, k, cos, sin)], grads


def rotated(x, cos, sin):
    """The formula, in complex numbers."""
    a, b = x.chunk(2, dim=-1)
    z = torch.complex(a, b) * torch.complex(cos, sin)[:, :, None]
    return torch.cat([z.real, z.imag], dim=-1)


def check_rotation(inputs, grads, rotate_qk=kernels.rotate_qk):
    """Compares results and all four gradients with the formula in float64."""
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    q, k, cos, sin = exact_inputs
    exact = rotated(q, cos, sin), rotated(k, cos, sin)
    exact += torch.autograd.grad(exact, exact_inputs, [grad.double() for grad in grads])
    found = rotate_qk(*inputs)
    assert all(x.is_contiguous() for x in found)
    found += torch.autograd.grad(found, inputs, grads)
    atol = 1e-13 if F64 in (inputs[0].dtype, inputs[1].dtype) else 2e-6  # values reach 5
    atols = 4 * [atol] + 2 * [10 * atol]  # cos and sin get sums over batch and heads
    for x, y, wanted, atol in zip((*inputs[:2], *inputs), found, exact, atols, strict=True):
        assert y.dtype == x.dtype
        torch.testing.assert_close(y.double(), wanted, rtol=ROUNDING[x.dtype], atol=atol)


SHAPES = [  # B, T, H, Hkv, D, B of the tables
    (2, 37, 4, 2, 64, 2),  # five programs a sequence, the last one not full
    (1, 1, 3, 1, 12, 1),  # one token; heads and pairs that are no powers of two
    (3, 5, 2, 2, 4, 1),  # tables shared by the batch
    (2, 9, 1, 8, 12, 2),  # more heads in k than in q
    (1, 3, 6, 5, 520, 1),  # three rounds of heads in a program
    (1, 2, 2, 1, 2052, 1),  # a head larger than a tile
]
DTYPES = [(F16, F16, F32), (F64, F64, F64), (F32, F32, F64), (F64, F32, F32), (F32, F64, F32)]  # q, k, tables
CASES = [(shape, (dtype, dtype, F32)) for shape in SHAPES for dtype in (F32, BF16)]
CASES += [((2, 5, 4, 2, 12, 2), dtypes) for dtypes in DTYPES]


@runs_kernels
@pytest.mark.parametrize("shape, dtypes", CASES)
def test_rotation_and_its_gradients_agree_with_float64(shape, dtypes):
    check_rotation(*example(shape, dtypes))


@runs_kernels
def test_compiled_in_one_graph_it_agrees_with_float64():
    compiled = torch.compile(kernels.rotate_qk, backend="inductor" if GPU else "aot_eager", fullgraph=True)
    check_rotation(*example((2, 5, 8, 2, 64, 1)), compiled)


@pytest.mark.parametrize("shape", SHAPES[:3])
def test_the_plain_rotation_agrees_as_well(shape):
    inputs, grads = example(shape)
    check_rotation(inputs, grads, lambda q, k, cos, sin: (rope2d.rotate(q, cos, sin), rope2d.rotate(k, cos, sin)))


@runs_kernels
def test_rotation_takes_any_strides():
    (q, k, cos, sin), _ = example((2, 5, 3, 2, 8, 2))
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # heads first, as attention has them
    k, sin = (torch.stack([x, -x], dim=-1)[..., 1] for x in (k, sin))  # the last dimension is not contiguous
    cos = cos.transpose(0, 1).contiguous().transpose(0, 1)
    inputs = [x.detach().requires_grad_() for x in (q, k, cos, sin)]
    grads = [torch.ones((), device=DEVICE).expand(q.shape), normal(2, 2, 5, 8, seed=4).transpose(1, 2)]
    check_rotation(inputs, grads)


@runs_kernels
@pytest.mark.skipif(GPU, reason="a sparse file stands in for 8 GB of memory")
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_offsets_beyond_2_to_the_31_are_reached(dim, tmp_path):
    step = 2**30  # elements between two indices of dim
    size, stride = [1, 1, 1, 8], [8, 8, 8, 1]
    size[dim], stride[dim] = 3, step
    x = torch.from_file(str(tmp_path / "x"), shared=True, size=2 * step + 8).as_strided(size, stride)
    x.copy_(normal(*size))
    cos, sin = normal(*size[:2], 4, seed=1), normal(*size[:2], 4, seed=2)
    for y in kernels.rotate_qk(x, x, cos, sin):
        torch.testing.assert_close(y, rotated(x.contiguous(), cos, sin), rtol=0, atol=1e-5)
    far, near, start = x.reshape(-1, 8), normal(x.numel() // 8, 8), normal(x.numel() // 8)
    for a, b in ((far, near), (near, far)):
        torch.testing.assert_close(kernels.affine_scan(a, b, start), looped(a, b, start), rtol=1e-5, atol=1e-5)


@runs_kernels
@pytest.mark.parametrize("cos_learns, sin_learns", [(False, False), (True, False), (False, True)])
def test_q_and_k_are_kept_for_backward_only_if_the_angles_learn(cos_learns, sin_learns):
    (q, k, cos, sin), grads = example((1, 3, 2, 1, 8, 1))
    wanted = torch.autograd.grad(rotated(q, cos, sin), q, grads[0])[0]
    kept = set()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.add(x.shape) or x, lambda x: x):
        out = kernels.rotate_qk(q, k, cos.detach().requires_grad_(cos_learns), sin.detach().requires_grad_(sin_learns))
    assert kept == ({cos.shape, q.shape, k.shape} if cos_learns or sin_learns else {cos.shape})
    torch.testing.assert_close(torch.autograd.grad(out, q, grads)[0], wanted, rtol=0, atol=2e-6)


@runs_kernels
@pytest.mark.parametrize("learned", [True, False])
def test_the_operators_keep_what_torch_asks_of_them(learned, short_chunks):
    """Schemas, gradients, fake tensors, and the same results when traced with dynamic shapes."""
    (q, k, cos, sin), _ = example((2, 3, 2, 1, 8, 1))
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # heads first: what comes out is still contiguous
    cos, sin = cos.detach().requires_grad_(learned), sin.detach().requires_grad_(learned)
    torch.library.opcheck(torch.ops.nano2d.rotate_qk.default, (q, k, cos, sin, not learned))
    a, b, start = q[0, 0], q[1, 0], k[0, :2, 0, 0]
    torch.library.opcheck(torch.ops.nano2d.affine_scan.default, (a, b, start, learned))


def looped(a, b, start):
    h = [start]
    for t in range(a.shape[-1]):
        h.append(a[..., t] * h[-1] + b[..., t])
    return torch.stack(h, dim=-1)


@runs_kernels
@pytest.mark.parametrize("rows, tokens", [((3,), 21), ((2, 2), 8), ((), 9), ((1,), 7), ((2,), 1), ((2,), 0)])
@pytest.mark.parametrize("dtype", [F32, F64])
def test_scan_and_its_gradients_agree_with_a_loop(rows, tokens, dtype, short_chunks):
    inputs = [normal(*rows, tokens).sigmoid(), normal(*rows, tokens, seed=1), normal(*rows, seed=2)]
    inputs = [x.to(dtype).requires_grad_() for x in inputs]
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    grad = normal(*rows, tokens + 1, seed=3, dtype=dtype)
    h, exact = kernels.affine_scan(*inputs), looped(*exact_inputs)
    assert h.dtype == dtype
    found = torch.autograd.grad(h, inputs, grad)
    wanted = torch.autograd.grad(exact, exact_inputs, grad.double(), materialize_grads=True)
    for x, y in zip((h, *found), (exact, *wanted), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=0, atol=1e-5 if dtype == F32 else 1e-13)


@runs_kernels
@pytest.mark.parametrize("tokens", [2 * kernels.CHUNK + 3, pytest.param(260_000, marks=needs_gpu)])
def test_scan_counts_over_many_chunks(tokens):
    a = (normal(2, tokens, seed=1) > -3).double()  # counts, and restarts now and then
    inputs = [x.requires_grad_() for x in (a, torch.ones_like(a), a[:, 0].clone())]
    h, plain = kernels.affine_scan(*inputs), rope2d.AffineScan.apply(*inputs)
    assert torch.equal(h, plain) and h.max() > 1000
    found, wanted = (torch.autograd.grad(x.sum(), inputs) for x in (h, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


@runs_kernels
def test_second_derivatives(short_chunks):
    gates, start = normal(2, 6, 2, dtype=F64).requires_grad_(), normal(2, dtype=F64, seed=1).requires_grad_()
    rotation, _ = example((2, 2, 2, 1, 4, 1), (F64, F64, F64))
    assert torch.autograd.gradgradcheck(kernels.rotate_qk, rotation, fast_mode=True)

    def scan(gates, start):  # a and b (B, T) are slices, not contiguous
        return kernels.affine_scan(*gates.unbind(-1), start)

    assert torch.autograd.gradgradcheck(scan, (gates, start), fast_mode=True)


QK, TABLE = torch.zeros(2, 3, 4, 8, device=DEVICE), torch.zeros(2, 3, 4, device=DEVICE)
ROTATE, SCAN = kernels.rotate_qk, kernels.affine_scan


@runs_kernels
@pytest.mark.parametrize(
    "function, inputs, message",
    [
        (ROTATE, (QK, QK[:, :2], TABLE, TABLE), r"k \(2, 2, 4, 8\): expected \(B, T, H, D\), \(B, T, Hkv, D\)"),
        (ROTATE, (QK, QK[..., :6], TABLE, TABLE), r"k \(2, 3, 4, 6\): expected"),
        (ROTATE, (QK[0], QK[0], TABLE, TABLE), r"q \(3, 4, 8\), k"),
        (ROTATE, (QK[..., :7], QK[..., :7], TABLE, TABLE), "an even D"),
        (ROTATE, (QK[..., :0], QK[..., :0], TABLE[..., :0], TABLE[..., :0]), "an even D"),
        (ROTATE, (QK, QK, TABLE[:, :1], TABLE[:, :1]), r"cos \(2, 1, 4\), .*expected \(2 or 1, 3, 4\)"),
        (ROTATE, (QK, QK, TABLE, TABLE[:1]), r"sin \(1, 3, 4\): expected"),
        (ROTATE, (QK, QK, TABLE.bfloat16(), TABLE), "cos torch.bfloat16"),
        (ROTATE, (QK, QK, TABLE, TABLE.half()), "sin torch.float16: expected real q and k, and cos and sin in float32"),
        (ROTATE, (QK.long(), QK, TABLE, TABLE), "q torch.int64"),
        (ROTATE, (QK, QK.long(), TABLE, TABLE), "k torch.int64"),
        (ROTATE, (QK, QK, TABLE, TABLE.to("meta")), "meta: expected one GPU"),
        (SCAN, (TABLE, TABLE[..., :3], TABLE[..., 0]), r"b \(2, 3, 3\), .*expected \(..., T\), \(..., T\), \(...,\)"),
        (SCAN, (TABLE, TABLE, TABLE[:, 0]), r"start \(2, 4\): expected"),
        (SCAN, (TABLE.half(), TABLE.half(), TABLE[..., 0].half()), "a torch.float16"),
        (SCAN, (TABLE, TABLE.double(), TABLE[..., 0]), "b torch.float64, .*expected all float32 or all float64"),
    ],
)
def test_wrong_values_are_refused_by_name(function, inputs, message):
    with pytest.raises(ValueError, match=message):
        function(*inputs)


@not_interpreted
def test_all_in_the_interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--noconftest", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) > 50, run.stdout


@not_interpreted
def test_without_triton_it_imports_in_an_empty_folder_and_says_what_is_missing(tmp_path):
    shutil.copy(kernels.__file__, tmp_path)
    code = "import sys; sys.modules['triton'] = None; import torch, kernels; print(kernels.AVAILABLE)"
    command = [sys.executable, "-c", code + "; kernels.affine_scan(*torch.ones(3, 1))"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.stdout == "False\n" and "RuntimeError: this needs triton: pip install triton" in run.stderr, run


@not_interpreted
def test_cpu_tensors_are_refused_without_the_interpreter():
    with pytest.raises(ValueError, match="tensors on cpu, cpu, cpu: expected one GPU, or .* TRITON_INTERPRET=1"):
        kernels.affine_scan(*torch.ones(3, 1))


@not_interpreted
def test_compiled_for_a_consumer_card_tiles_are_small_and_accesses_are_16_bytes():
    """Compiling for sm_86 (RTX 30) needs no GPU. A block may have 99 KB of shared memory there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def build(kernel, num_warps, pointers, **constants):
        names = kernel.arg_names
        kinds = {n: "constexpr" if n in constants else pointers.get(n, "i32") for n in names}
        aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n not in constants}
        source = ASTSource(kernel, kinds, {(names.index(n),): value for n, value in constants.items()}, aligned)
        return triton.compile(source, target=GPUTarget("cuda", 86, 32), options={"num_warps": num_warps})

    pointers = dict.fromkeys(("q", "k", "out_q", "out_k"), "*bf16") | dict.fromkeys(("cos", "sin"), "*fp32")
    sizes = {"H": 16, "HKV": 8, "HALF": 64, "BLOCK_T": 1, "BLOCK_H": 16, "BLOCK_P": 64}
    rotation = build(kernels._rotate_kernel, 4, pointers, BACK=True, **sizes)
    pointers = dict.fromkeys(("a", "b", "start", "h"), "*fp64")
    scan = build(kernels._scan_kernel, 8, pointers, REVERSE=True, CHUNK=kernels.CHUNK)
    assert max(rotation.metadata.shared, scan.metadata.shared) < 8192
    assert set(re.findall(r"(?:ld|st)\.global\S*", rotation.asm["ptx"])) == {"ld.global.v4.b32", "st.global.v4.b32"}


@not_interpreted
def test_one_graph_with_two_launches_serves_every_length(monkeypatch):
    """Tracing needs no GPU. Block sizes made of symbolic head sizes once made this hang."""
    graphs = []

    def compiler(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return lambda *inputs: [torch.zeros(1)] * len(graph.graph.output_node().args[0])

    def both(q, k, cos, sin, a):
        return *kernels.rotate_qk(q, k, cos, sin), kernels.affine_scan(a, a, a[:, 0])

    monkeypatch.setattr(kernels, "check_device", lambda *tensors: None)
    compiled = torch.compile(both, backend=aot_autograd(fw_compiler=compiler), fullgraph=True, dynamic=True)
    for B, T in ((5, 37), (3, 53)):  # sizes that no other dimension has, or torch takes them for the same
        qkv, cos, sin = normal(B, T, 8, 64), *normal(2, B, T, 32)
        compiled(qkv[:, :, :4], qkv[:, :, 4:6], cos, sin, normal(B, T))
    assert [sum("triton_kernel" in target for target in graph) for graph in graphs] == [2]


@needs_gpu
def test_rotation_reaches_85_percent_of_the_bandwidth_of_a_copy():
    from scripts.bench import seconds

    (q, k, cos, sin), _ = example((8, 2048, 16, 8, 128, 8), (BF16, BF16, F32))
    source = torch.empty(q.numel() + k.numel(), device=DEVICE, dtype=BF16)
    target = torch.empty_like(source)
    times = {"rotate_qk": [], "copy_": []}
    for _ in range(30):
        times["rotate_qk"].append(seconds(lambda: kernels.rotate_qk(q, k, cos, sin), torch.device(DEVICE)))
        times["copy_"].append(seconds(lambda: target.copy_(source), torch.device(DEVICE)))
    assert statistics.median(times["copy_"]) > 0.85 * statistics.median(times["rotate_qk"]), times
