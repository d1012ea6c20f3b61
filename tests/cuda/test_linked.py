"""What a card loads is what the emulator runs.

The emulator runs PTX; the linker optimises the same kernel again, as LTO-IR, and ptxas makes
machine code of the result. Here are three comparisons: the instructions that matter in the PTX
before and after link-time optimisation, in their order; the linked PTX run in the emulator; and the
counts of the linked PTX against the machine code's.
"""

from collections import Counter

import numpy as np
import oracles
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

import backward_checks
import float_checks
import int8_checks
from daily import of_today
from decode_checks import assert_bits, filled, tokens

import numflash.cuda.compile
from numflash.cuda import launch
from numflash.cuda.compile import Source, compiled, sass
from numflash.cuda.compile.target import cuda, types
from numflash.cuda.device import operands, resident
from numflash.cuda.emulator.parse import parse
from numflash.cuda.instructions import ptx
from numflash.cuda.kernels.decode_append import decode_append
from numflash.cuda.kernels.decode_combine import decode_combine
from numflash.cuda.validate.kernels import needed
from numflash.errors import UnsupportedError

# memory, products, copies, what orders them, what lanes exchange, and approximations: all but
# arithmetic in registers, moves and branches
MATTER = {
    *("ld", "st", "atom", "red", "ldmatrix", "cp", "mma", "wgmma"),
    *("mbarrier", "fence", "membar", "bar", "barrier", "setmaxnreg", "elect", "griddepcontrol"),
    *("shfl", "vote", "redux", "activemask", "ex2", "lg2", "rcp", "tanh", "sqrt", "rsqrt"),
}
FLOATS = {"f16", "f32", "f64", "bf16", "f16x2", "bf16x2"}


def name_of(instruction):
    return ".".join((instruction.op, *instruction.modifiers))


def that_matter(program):
    """In their order. Parameters are left out: the linker reads each once and keeps it."""
    return [name_of(i) for i in program.code if i.op in MATTER and "param" not in i.modifiers]


def arithmetic(program):
    """How often each operation on floats occurs: nothing may be contracted or added."""
    return Counter(
        name_of(i) for i in program.code if i.op not in ("mov", *MATTER) and FLOATS & {*i.modifiers}
    )


def heading(text):
    """Target, launch bounds, the types of the parameters, bytes of shared arrays (0: dynamic)."""
    lines = text.split("{", 1)[0].split("\n")
    bounds = [x.strip() for x in lines if x.startswith((".target", ".maxntid", ".minnctapersm"))]
    program = parse(text)
    shared = sorted(n for n, _ in program.shared.values())
    return bounds, [kind for _, kind in program.parameters], shared


def same(before, after):
    """Compare two texts of a kernel; the second one parsed."""
    assert heading(before) == heading(after)
    before, after = parse(before), parse(after)
    assert that_matter(before) == that_matter(after)
    assert not arithmetic(after) - arithmetic(before)
    return after


# what stays one instruction in the machine code, and neither copied nor joined
EXACT = {
    "mma.sync": ("HMMA", "IMMA"),
    "wgmma.mma_async": ("HGMMA", "IGMMA"),
    "wgmma.fence": ("WARPGROUP.ARRIVE",),
    "wgmma.wait_group": ("WARPGROUP.DEPBAR",),
    "cp.async.cg": ("LDGSTS",),
    "cp.async.commit_group": ("LDGDEPBAR",),
    "cp.async.wait_group": ("DEPBAR.LE",),
    "cp.async.bulk.tensor": ("UTMALDG",),
    "bar": ("BAR",),
    "mbarrier.init": ("SYNCS.EXCH",),
    "mbarrier.arrive": ("SYNCS.ARRIVE",),
    "mbarrier.expect_tx": ("SYNCS.ARRIVE.TRANS64.RED.A0TR",),
    "barrier.cluster.arrive": ("UCGABAR_ARV",),
    "barrier.cluster.wait": ("UCGABAR_WAIT",),
    "setmaxnreg": ("USETMAXREG",),
    "atom": ("ATOMG", "RED", "REDG"),
    "ex2": ("MUFU.EX2",),
}
# ptxas may repeat these where it splits a path in two, and drops none
AT_LEAST = {
    "mbarrier.try_wait": ("SYNCS.PHASECHK",),
    "st.global.v4": ("STG.E.128",),
    "st.global": ("STG",),
    "st.shared": ("STS",),
    "lg2": ("MUFU.LG2",),
    "rcp": ("MUFU.RCP",),
}
# it reads once what is read twice with nothing written in between
AT_MOST = {"ldmatrix": ("LDSM",)}


def counted(names, starts):
    return sum(any((x + ".").startswith(s + ".") for s in starts) for x in names)


def machine_code_differs(program, opcodes):
    """The rows of the tables whose counts disagree: {PTX: (there, in the machine code)}."""
    names = [name_of(i) for i in program.code if i.modifiers[:2] != ("warp", "sync")]
    # with a branch to a barrier of the block, for a launch without clusters
    names += ["bar" for x in names if x.startswith("barrier.cluster.wait")]
    # bytes expected without an arrival are an arrival that counts 0
    names += ["mbarrier.arrive" for x in names if x.startswith("mbarrier.expect_tx")]
    found = {}
    for rows, wrong in ((EXACT, int.__ne__), (AT_LEAST, int.__gt__), (AT_MOST, int.__lt__)):
        for there, here in rows.items():
            pair = counted(names, (there,)), counted(opcodes, here)
            if wrong(*pair):
                found[there] = pair
    return found


def same_down_to_machine_code(factory, arch, **constants):
    program = same(*(compiled(factory, arch, kind, **constants).ptx for kind in ("ptx", "linked")))
    try:
        code = sass.instructions(compiled(factory, arch, "cubin", **constants).code)
    except UnsupportedError as error:
        pytest.skip(str(error))
    assert machine_code_differs(program, [opcode for opcode, _ in code if opcode]) == {}


def of_each_factory(arch):
    """Of what `validate` loads: the kernel of each factory with most options, and the others."""
    most = {}
    keys = sorted(needed(arch), key=lambda key: (len(str(key[2])), str(key)))
    most |= {key[0]: key for key in keys}
    return list(most.values()), [key for key in keys if key != most[key[0]]]


@pytest.mark.slow
def test_small_kernels():
    same_down_to_machine_code(decode_combine, "sm_80", dv=64, tile_rows=16, exact=False)
    same_down_to_machine_code(
        decode_append, "sm_90a", d=64, dv=64, source="float32", dtype="int8", paged=True
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(3600)  # with TABLE=whole
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_every_family(arch):
    """Every factory of sm_80, on the others those of their own: half of them by the date; and a few
    more kernels every day.
    """
    largest, others = of_each_factory(arch)
    own = {
        "sm_75": ("flash_float", "flash_int8", "decode_float"),
        "sm_90a": ("flash_hopper", "flash_int8_hopper", "product_rate"),
    }.get(arch)
    chosen = [key for key in largest if own is None or key[0].__name__ in own]
    for factory, _, constants in (*of_today(chosen, 2), *of_today(others, 200)):
        same_down_to_machine_code(factory, arch, **dict(constants))


@pytest.fixture
def linked(monkeypatch):
    """The emulator runs the linked PTX; the kinds that were asked for."""
    asked = Counter()

    def instead(factory, arch, kind, **constants):
        asked[kind] += 1
        return compiled(factory, arch, "linked" if kind == "ptx" else kind, **constants)

    for module in (numflash.cuda.compile, resident):
        monkeypatch.setattr(module, "compiled", instead)
    yield asked
    assert set(asked) == {"ptx"}


@pytest.mark.slow
def test_linked_decode_has_the_bits_of_the_model(linked):
    cache, _, _ = filled(70)
    assert_bits(cache, tokens(1, 7)[0], 2)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_linked_int8_has_the_bits_of_the_model(linked, arch):
    q, k, v = oracles.qkv(1, 4, 37, 150, 64, None, 2)
    int8_checks.same_bits(q, k, v, arch=arch, is_causal=True, alignment="lower_right")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
def test_linked_float16(linked, arch):
    q, k, v = (x.astype(np.float16) for x in oracles.qkv(1, 4, 130, 300, 64, None, 2))
    work = launch.plan(float_checks.problem_of(q, k, v, is_causal=True), arch)
    out, lse, _ = operands.emulated(work)
    float_checks.compare(out, lse, q, k, v, is_causal=True)


@pytest.mark.slow
def test_linked_gradients(linked):
    backward_checks.check(is_causal=True)


def exchange(barrier=True, wide=True, swapped=False, exact=True):
    """Two stores to shared memory and what another thread wrote, with one thing changed."""

    def kernel(x):
        shared = cuda.shared.array(0, types.uint32)
        four = cuda.local.array(4, types.uint32)
        lane = types.int32(cuda.threadIdx.x)
        at = ptx.shared_address(shared)
        here = at + types.uint32(32 * lane)
        y = types.float32(x[lane])
        y = ptx.add(ptx.mul(y, y), y) if exact else ptx.fma(y, y, y)
        if swapped:
            ptx.store_shared_u16(here + types.uint32(16), types.uint32(lane))
            ptx.store_shared_f32(here, y)
        else:
            ptx.store_shared_f32(here, y)
            ptx.store_shared_u16(here + types.uint32(16), types.uint32(lane))
        if barrier:
            cuda.syncthreads()
        there = at + types.uint32(32 * (lane ^ 1))
        if wide:
            ptx.load_shared_v4(four, 0, there)
            x[lane] = four[0]
        else:
            x[lane] = ptx.load_shared_s32(there)

    return Source(kernel, types.void(types.uint32[::1]), 32, 1024)


CHANGED = ({"barrier": False}, {"wide": False}, {"swapped": True}, {"exact": False})


@pytest.mark.parametrize("change", CHANGED, ids=str)
def test_a_changed_kernel_is_seen(change):
    """A barrier less, a narrower load, another order, a contracted product: between the texts."""
    before = compiled(exchange, "sm_80", "ptx").ptx
    same(before, compiled(exchange, "sm_80", "linked").ptx)
    with pytest.raises(AssertionError):
        same(before, compiled(exchange, "sm_80", "linked", **change).ptx)


def test_a_changed_machine_code_is_seen():
    program = parse(compiled(exchange, "sm_80", "linked").ptx)
    stores = ["STS", "STS.U16", "STG.E"]
    assert machine_code_differs(program, [*stores, "BAR.SYNC"]) == {}
    assert machine_code_differs(program, stores) == {"bar": (1, 0)}
    assert machine_code_differs(program, [*stores[1:], "BAR.SYNC"]) == {"st.shared": (2, 1)}
