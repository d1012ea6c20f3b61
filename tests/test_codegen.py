"""Cross-compilation and reading assembly, on functions whose machine code is known."""

import gc
import importlib
import inspect
import re

import llvmlite.binding as llvm
import numba
import numpy as np
import pytest
from daily import of_today
from numba import extending, njit, prange
from numba.core import types

import numflash
from numflash.cpu import launch_decode
from numflash.cpu.backward.flash_backward import make_backward
from numflash.cpu.decode import register_tiles, tiles
from numflash.errors import ArgumentError, UnsupportedError
from numflash.jit import target
from numflash.machinecode import assembly, codegen, kernel_types
from numflash.machinecode.codegen import Target, compile_for

BYTES = types.Array(types.int8, 1, "C")
DOT = (BYTES, BYTES)
MATRIX = types.Array(types.int8, 2, "C")


@njit
def dot(a, b):
    s = np.int32(0)
    for i in range(a.shape[0]):
        s = np.add(s, np.multiply(np.int32(a[i]), np.int32(b[i])))
    return s


@njit(error_model="numpy")
def calls_dot(a, b):
    return dot(a, b)


@njit
def dot_in_int64(a, b):
    s = 0
    for i in range(a.shape[0]):
        s += a[i] * b[i]
    return s


@njit(parallel=True)
def parallel_negate(a, b):
    for i in prange(a.shape[0]):
        x, y = a[i], b[i]
        for j in range(x.shape[0]):
            y[j] = -x[j]


@njit
def allocates(n):
    return np.zeros(n, np.int32).sum()


@njit(error_model="numpy")
def divides(a, b):
    for i in range(a.shape[0]):
        b[i] = a[i] // (b[i] | 1)


@njit
def doubles(a, b):
    for i in range(a.shape[0]):
        b[i] = a[i] * 0.1


@njit
def without_loop(a, b):
    return a[0] + b[0]


loops_become_dot_products = pytest.mark.skipif(
    llvm.llvm_version_info < (20,), reason="LLVM does so since release 20"
)


def report(function, signature, cpu):
    if cpu != "host" and cpu not in codegen.TRIPLES:
        pytest.skip(f"this LLVM is older than {cpu}")
    return codegen.report(compile_for(function, signature, Target.named(cpu)))


@loops_become_dot_products
@pytest.mark.parametrize("function", [dot, calls_dot, dot.py_func])
@pytest.mark.parametrize(
    ("cpu", "kind"),
    [
        ("a64fx", "sdot z.s"),
        ("neoverse-v2", "sdot"),
        ("neoverse-n1", "sdot v.4s"),
        ("cortex-a72", "smull v.8h"),
        ("haswell", "vpmaddwd"),
        ("znver4", "vpmaddwd"),
    ],
)
def test_int8_dot_product_uses_the_dot_instruction_of_the_cpu(function, cpu, kind):
    found = report(function, DOT, cpu)
    assert any(name.startswith(kind) for name in found["instructions"]), found
    assert (
        found["lanes64"]
        == found["calls"]
        == found["stack"]
        == found["integer_divisions"]
        == found["float64"]
        == 0
    )


@loops_become_dot_products
@pytest.mark.parametrize("cpu", ["a64fx", "neoverse-v1", "neoverse-n1", "haswell", "znver4"])
def test_int64_lanes_are_seen(cpu):
    assert report(dot_in_int64, DOT, cpu)["lanes64"] > 0


@pytest.mark.parametrize("cpu", ["a64fx", "neoverse-n1", "haswell", "sapphirerapids", "host"])
def test_division_and_double_precision_are_seen(cpu):
    ints = types.Array(types.int32, 1, "C")
    floats = types.Array(types.float32, 1, "C")
    assert report(divides, (ints, ints), cpu)["integer_divisions"] > 0
    assert report(divides, (ints, ints), cpu)["float64"] == 0
    assert report(doubles, (floats, floats), cpu)["float64"] > 0
    assert report(doubles, (floats, floats), cpu)["integer_divisions"] == 0


@pytest.mark.parametrize("cpu", ["a64fx", "neoverse-n1", "haswell"])
def test_parallel_functions_compile_with_their_loop(cpu):
    code = compile_for(parallel_negate, (MATRIX, MATRIX), Target.named(cpu))
    assert codegen.report(code)["instructions"]
    assert any("gufunc" in name for name in assembly.functions(code.assembly))


def test_an_allocating_function_links_a_runtime_built_for_the_target():
    code = compile_for(allocates, (types.intp,), Target.named("a64fx"))
    assert "x86" not in code.assembly and code.object[:4] == b"\x7fELF"
    assert int.from_bytes(code.object[18:20], "little") == 183  # e_machine AArch64


def test_float_options_are_kept():
    """Only a sum that may be reordered becomes vectors of multiply-adds."""

    def total(a, b):
        s = np.float32(0)
        for i in range(a.size):
            s += a[i] * b[i]
        return s

    floats = types.Array(types.float32, 1, "C")
    strict, free = (
        report(numba.njit(fastmath=options)(total), (floats, floats), "haswell")["instructions"]
        for options in (False, {"reassoc", "contract"})
    )
    assert not any(kind.startswith("vfmadd") for kind in strict)
    assert any(kind.startswith("vfmadd") and kind.endswith("ps ymm") for kind in free)


@pytest.mark.parametrize("name", codegen.KERNELS)
def test_every_named_kernel_can_be_made(name):
    entry = codegen.KERNELS[name]
    function = getattr(importlib.import_module(entry.module), entry.name)
    if entry.arguments is not None:
        cpu = next(x for x in entry.cpus if x != "host")
        function = function(*codegen.arguments_of(entry, Target.named(cpu)))
    assert callable(function)
    assert isinstance(entry.signature, str) or entry.signature()


@pytest.mark.slow  # kernels of the host
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_signatures_of_caches_are_those_of_calls(dtype, monkeypatch):
    """What a call of a cache compiles, or loads, is what `asm` shows."""
    made = {}

    def recorded(name, make):
        return lambda *arguments: made.setdefault(name, make(*arguments))

    for name in ("make_call", "make_append_int8", "make_append_int4", "make_append_float"):
        monkeypatch.setattr(launch_decode, name, recorded(name, getattr(launch_decode, name)))
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 4, 16), np.float32)
    cache = numflash.KVCache(1, 2, 16, 128, dtype=dtype)
    cache.append(k, v)
    cache.decode(q)
    call = made.pop("make_call")
    (append,) = made.values()
    njit(call.py_func).compile(call.signatures[0])  # one from the disk knows no types of the inner
    decode = inspect.getclosurevars(call.py_func).nonlocals["decode"]
    assert decode.signatures == [kernel_types.decode(dtype)]
    assert append.signatures == [kernel_types.append(dtype)]


@pytest.mark.slow
@pytest.mark.skipif(
    target.available(target.FLOAT_ISAS)[0] == "portable", reason="no register tiles here"
)
def test_the_signature_of_the_gradient_is_that_of_calls():
    x = np.random.default_rng(0).standard_normal((1, 2, 3, 16), np.float32)
    out, lse = numflash.attention(x, x, x, return_lse=True)
    numflash.attention_backward(out, x, x, x, out, lse)
    kernel = make_backward(target.available(target.FLOAT_ISAS)[0])
    assert kernel_types.backward() in kernel.signatures


def test_the_host_is_left_as_it_was():
    a = np.arange(-50, 50, dtype=np.int8)
    b = np.full(100, 3, np.int8)
    before = calls_dot(a, b)
    overloads = len(dot.overloads)
    compile_for(calls_dot, DOT, Target.named("a64fx"))
    assert len(dot.overloads) == overloads and calls_dot(a, b) == before == int(
        a.astype(int) @ b.astype(int)
    )
    assert (
        numba.njit(lambda n: np.ones(n).sum())(3) == 3
    )  # new functions go to the host's context again


def test_a_method_is_typed_where_it_is_called():
    """Numba's type of a method lives while anything refers to it, and remembers its context."""
    held = []

    @extending.overload_method(types.Integer, "plus")
    def plus(value, other):
        held.extend(x for x in gc.get_objects() if issubclass(type(x), types.BoundFunction))
        return lambda value, other: value + other

    @njit
    def calls(value, other):
        return value.plus(other)

    assert calls(4, 5) == 9 and held  # on the host, of other arguments
    for cpu in ("a64fx", "znver3"):
        compile_for(calls, (types.int64, types.int8), Target.named(cpu))
    assert calls(4, np.int8(3)) == 7


def test_host_target_is_what_numba_compiles_for():
    host = Target.named()
    codegen_of_host = numba.core.registry.cpu_target.target_context.codegen()
    assert (host.cpu, host.features) == codegen_of_host.magic_tuple()[1:3]
    native = next(iter(dot.inspect_asm(sig) for sig in dot.overloads)) if dot.overloads else None
    if native is None:
        dot(np.ones(4, np.int8), np.ones(4, np.int8))
        native = next(iter(dot.inspect_asm().values()))
    assert (
        assembly.histogram(assembly.hot_loop(native).instructions)
        == report(dot, DOT, "host")["instructions"]
    )


def test_bad_names_are_refused():
    with pytest.raises(ArgumentError, match="cpu: got 'a64'; allowed: 'host', 'a64fx'"):
        Target.named("a64")
    for cpu, features in (
        ("a64fx", "nonsense"),
        ("a64fx", "+sve,"),
        ("a64fx", "+sve,-avx512f"),  # LLVM knows it of other CPUs
        ("haswell", "+avx-vnni"),
        ("host", "-avx2"),
    ):
        with pytest.raises(ArgumentError, match=f"features: got '{re.escape(features)}'"):
            codegen.histogram("quantize-rows", cpu, features)
    with pytest.raises(ArgumentError, match="kernel: got 'nothing'; allowed: "):
        codegen.histogram("nothing", "a64fx")
    for kernel, cpu, needs in (
        ("exp2-fexpa", "haswell", "sve"),
        ("float32-sve512", "haswell", "sve512"),
        ("float32-sve512", "neoverse-v1", "sve512"),  # whose vectors are shorter
        ("bfloat16-amx_bf16", "znver4", "amx_bf16"),
        ("int8-avx512_vnni", "a64fx", "avx512_vnni"),
    ):
        with pytest.raises(UnsupportedError, match=f"'{cpu}' has no vectors .* a CPU with {needs}"):
            codegen.histogram(kernel, cpu)
    with pytest.raises(ArgumentError, match="no loop"):
        report(without_loop, DOT, "a64fx")


# the others take many seconds each
QUICK = (
    "quantize",
    "portable-s",
    "portable-v",
    "int8-scores",
    "int8-values",
    "float32-scores",
)
QUICK += ("float32-values", "exp2-fexpa", "study-two-pass", "study-fused4-register")


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(name, marks=() if name.startswith(QUICK) else pytest.mark.slow)
        for name in codegen.KERNELS
        if name.startswith((*QUICK, "append-int")) or name in ("portable", "float32-neon")
    ],
)
def test_named_kernels_have_a_histogram(kernel):
    found = codegen.histogram(kernel, "a64fx")
    assert found["kernel"] == kernel and found["total"] == sum(found["instructions"].values()) > 0
    marks = {"int8-scores": "sdot", "float32-values": "fmla"}
    kind = marks.get(kernel, "")
    assert any(x.startswith(kind) for x in found["instructions"])
    if kernel.startswith(("float32-s", "float32-v", "study")):  # scalable, not NEON
        assert not any(x == "fmla v.4s" for x in found["instructions"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "cpu", "vectors"),
    of_today(
        [
            ("float32", "a64fx", "z"),
            ("float16", "a64fx", "z"),
            ("bfloat16", "a64fx", "z"),
            ("float32", "neoverse-n1", "v"),
        ],
        2,
    ),
)
def test_float_caches_are_decoded_with_the_longest_vectors(dtype, cpu, vectors):
    code = codegen.compile_kernel(f"decode-{dtype}", cpu).assembly
    assert set(re.findall(r"\tfm(?:la|ad)\t([vz])\d+\.4?s", code)) == {vectors}


def dot_loops(tile, rows):
    """The product loops of a decode tile: of its scores and of its values."""
    scores = register_tiles.score_tile(tile, rows)
    values = register_tiles.value_tile(tile, rows, tile.width(rows))

    @njit
    def score(q, words, k, scales, j, work):
        scores(q, words, k, scales, j, work)

    @njit
    def value(work, v, step, steps, o, column, columns):
        values(work, v, step, steps, o, column, columns)

    for function, count in ((score, 6), (value, 7)):
        text = compile_for(function, (types.int64,) * count, Target.named("host")).assembly
        yield from (loop for loop in assembly.loops(text) if "vpdpbusd" in str(loop.instructions))


@pytest.mark.parametrize(
    ("isa", "dtype"),
    [
        ("avx512_vnni", "int4"),
        ("avx_vnni", "int8"),
        pytest.param("avx512_vnni", "int8", marks=pytest.mark.slow),
        pytest.param("avx_vnni", "int4", marks=pytest.mark.slow),
    ],
)
def test_sums_of_decode_stay_in_registers(isa, dtype):
    """For every number of rows: both planes in one loop where the registers hold all sums."""
    if isa not in target.available():
        pytest.skip(f"the target has no {' '.join(target.missing(isa))}")
    for rows in range(1, tiles.ROWS + 1):
        found = list(dot_loops(tiles.tile(isa, dtype), rows))
        assert len(found) >= 2
        for loop in found:
            spilt = [i for i in loop.instructions if assembly.is_vector(i) and "(%rsp" in i]
            assert not spilt, (rows, spilt)


def test_the_prefetch_distance_of_a_cpu():
    """Names that begin with another come first, and any name is found."""
    asked = {"znver5": 8192, "znver4": 0, "znver1": 0, "sapphirerapids": 4096, "a64fx": 4096}
    assert {cpu: tiles.ahead(cpu) for cpu in asked} == asked
    assert list(tiles.AHEAD)[-1] == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "cpu", "dots"),
    of_today(
        [
            ("int8-amx_int8", "sapphirerapids", 4),
            ("int8-avx512_vnni", "znver4", 24),
            ("int8-avx_vnni", "alderlake", 12),
            ("int8-avx2", "haswell", 12),
            ("int8-sve", "a64fx", 24),
            ("int8-neon_dot", "neoverse-n1", 24),
        ],
        2,
    ),
)
def test_product_loops_of_the_fused_kernel(kernel, cpu, dots):
    """The loops of the tallest tiles, unrolled or not, are made of dot products and loads."""
    if cpu not in codegen.TRIPLES:
        pytest.skip(f"this LLVM is older than {cpu}")
    code = codegen.compile_kernel(kernel, cpu)
    found = [
        loop.instructions
        for loop in assembly.loops(code.assembly)
        if sum(map(assembly.is_dot, loop.instructions)) in (dots, 2 * dots)
    ]
    # a product of tiles takes 16 cycles: some more instructions for addresses cost nothing beside it
    most = 4.25 if kernel == "int8-amx_int8" else 3.5  # instructions a product
    dense = [loop for loop in found if len(loop) <= most * sum(map(assembly.is_dot, loop))]
    assert len(dense) >= 2, [len(loop) for loop in found]
    for loop in dense:
        unwanted = (
            assembly.is_lanes64,
            assembly.is_float64,
            assembly.is_integer_division,
            assembly.is_call,
        )
        assert not any(test(i) for test in unwanted for i in loop), assembly.histogram(loop)
    assert sum(map(assembly.is_stack, min(dense, key=len))) <= (6 if kernel == "int8-avx2" else 1)


ARM = """
f:                                      // @f
	mov	x8, xzr
.LBB0_1:                                // outer
	mov	x9, xzr
.LBB0_2:                                // inner
	ld1b	{ z0.b }, p0/z, [x0, x9]
	sdot	z1.s, z0.b, z2.b
	mla	z3.d, p0/m, z0.d, z1.d
	and	z4.d, z4.d, z5.d
	str	z6, [sp, #1, mul vl]
	fmul	d0, d1, d2
	udiv	w1, w2, w3
	bl	memcpy
	b.ne	.LBB0_2
	subs	x8, x8, #1
	b.ne	.LBB0_1
	ret
.Lfunc_end0:
"""
X86 = """
g:
.LBB1_1:
	vpmovsxbq	(%rdi), %zmm0
	vpdpbusd	%zmm1, %zmm2, %zmm3
	vmulsd	%xmm0, %xmm1, %xmm2
	vmovupd	%ymm0, 8(%rsp)
	idivl	%ecx
	callq	*%rax
	jne	.LBB1_1
	retq
.Lfunc_end1:
"""


@pytest.mark.parametrize(
    ("text", "depth", "total", "kinds"),
    [
        (ARM, 2, 9, {"sdot z.s": 1, "mla z.d": 1, "b.ne": 1, "udiv": 1}),
        (X86, 1, 7, {"vpdpbusd zmm": 1, "vpmovsxbq zmm": 1, "idivl": 1}),
    ],
)
def test_reading_of_a_listing(text, depth, total, kinds):
    loop = assembly.hot_loop(text)
    counts = assembly.histogram(loop.instructions)
    assert (loop.depth, len(loop.instructions)) == (depth, total)
    assert kinds.items() <= counts.items()
    for test in (
        assembly.is_integer_division,
        assembly.is_float64,
        assembly.is_lanes64,
        assembly.is_call,
        assembly.is_stack,
    ):
        assert sum(map(test, loop.instructions)) == 1, test.__name__


def test_a_pointer_is_not_the_stack():
    assert assembly.is_stack("vmovups -64(%rbp), %zmm0") and assembly.is_stack(
        "vmovups %zmm0, 64(%rsp)"
    )
    assert not assembly.is_stack("vbroadcastss (%rbp,%rdi,4), %zmm20") and not assembly.is_stack(
        "leaq -64(%rbp), %rax"
    )
