"""Faults of Hopper's warpgroup products and tile copies, planted in small kernels next to the
correct version.

The emulator names the rule and the source line.
"""

import inspect

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from emulator_checks import FLOATS, fails, run, run_ptx

from numflash.cuda import emulate
from numflash.cuda.compile.target import cuda, types
from numflash.cuda.emulator import EmulatorError, TensorMap
from numflash.cuda.instructions import ptx

u32 = types.uint32
i32 = types.int32
u64 = types.uint64
f32 = types.float32


def product(wait=True, fence=True, proxy_fence=True, overwrite=False, touch=False, dtype="float16"):
    """One wgmma of a 64 x 32-byte by a 32-byte x 8 tile of ones that the threads write to shared
    memory themselves.
    """
    mma = ptx.wgmma(8, dtype, False)
    pause = ptx.wgmma_wait[0]
    nothing = ptx.wgmma_wait[1]
    kind, ones = (i32, 0x01010101) if dtype == "int8" else (f32, 0x3C003C00)

    def kernel(y):
        shared = cuda.shared.array(4096, u32)
        t = cuda.threadIdx.x
        acc = cuda.local.array(4, kind)
        base = (ptx.shared_address(shared) + u32(1023)) & u32(0xFFFFFC00)
        for i in range(20):
            ptx.store_shared(base + u32((i * 128 + t) * 4), u32(ones))
        if proxy_fence:
            ptx.fence_async()
        cuda.syncthreads()
        a = u64(0x4000004000000000) | u64(base >> u32(4))
        b = u64(0x4000004000000000) | u64((base + u32(8192)) >> u32(4))
        if fence:
            ptx.wgmma_fence()
        if touch:
            for i in range(4):
                acc[i] = kind(y[t])
        mma(acc, 0, a, b, i32(touch))
        ptx.wgmma_commit()
        if wait:
            pause()
        else:
            nothing()
        if overwrite:
            ptx.store_shared_f32(base + u32(t * 4), f32(0))
        y[t] = acc[0]
        pause()

    return kernel


@pytest.mark.parametrize(("dtype", "terms"), [("float16", 16), ("int8", 32)])
def test_product(dtype, terms):
    y = np.zeros(128, np.float32)
    report = run(product(dtype=dtype), y, signature=types.void(FLOATS), threads=128, arch="sm_90a")
    assert (
        (y == terms).all()
        and report.tensor_operations == 4
        and report.tensor_flops == 2 * 64 * 8 * terms
    )


@pytest.mark.parametrize(
    ("kind", "line", "options"),
    [
        ("pending", "y[t] = acc[0]", {"wait": False}),
        ("protocol", "mma(acc, 0, a, b, i32(touch))", {"fence": False}),
        ("protocol", "mma(acc, 0, a, b, i32(touch))", {"touch": True}),
        ("race", "mma(acc, 0, a, b, i32(touch))", {"proxy_fence": False}),
        ("race", "store_shared_f32(base + u32(t * 4), f32(0))", {"wait": False, "overwrite": True}),
        ("pending", "y[t] = acc[0]", {"wait": False, "dtype": "int8"}),
        ("race", "mma(acc, 0, a, b, i32(touch))", {"proxy_fence": False, "dtype": "int8"}),
    ],
)
def test_product_faults(kind, line, options):
    y = np.zeros(128, np.float32)
    fails(
        kind, line, product(**options), y, signature=types.void(FLOATS), threads=128, arch="sm_90a"
    )


@pytest.mark.parametrize("weights", [False, True])
def test_product_of_bytes(weights):
    """Every byte in its place.

    A (unsigned from registers, or signed from shared memory) 64 x 32, B 24 x 32, both K-major.
    """
    mma = ptx.wgmma(24, "int8", weights)
    pause = ptx.wgmma_wait[0]

    def kernel(a, b, y):
        shared = cuda.shared.array(4096, u32)
        t = cuda.threadIdx.x
        acc = cuda.local.array(12, i32)
        four = cuda.local.array(4, u32)
        base = (ptx.shared_address(shared) + u32(1023)) & u32(0xFFFFFC00)
        for i in range(4):  # word t % 8 of rows of 128 bytes; chunks of 16 bytes are swizzled
            r = i * 16 + (t >> 3)
            c = t & 7
            at = u32(r * 128 + (((c >> 2) ^ (r & 7)) << 4) + (c & 3) * 4)
            ptx.store_shared(base + at, a[r, c])
            if r < 24:
                ptx.store_shared(base + u32(8192) + at, b[r, c])
        ptx.fence_async()
        cuda.syncthreads()
        r = (t >> 5) * 16 + ((t & 31) >> 2)
        c = t & 3
        for i in range(4):  # PTX 9.7.15.5.1.1: rows r and r + 8, bytes 4 c to 4 c + 3 and 16 beyond
            four[i] = a[r + 8 * (i & 1), c + 4 * (i >> 1)]
        da = u64(0x4000004000000000) | u64(base >> u32(4))
        db = u64(0x4000004000000000) | u64((base + u32(8192)) >> u32(4))
        ptx.wgmma_fence()
        if weights:
            mma(acc, 0, four, 0, db, i32(0))
        else:
            mma(acc, 0, da, db, i32(0))
        ptx.wgmma_commit()
        pause()
        for i in range(12):
            y[r + 8 * ((i >> 1) & 1), 8 * (i >> 2) + 2 * c + (i & 1)] = acc[i]

    rng = np.random.default_rng(0)
    kind = np.uint8 if weights else np.int8
    a = rng.integers(np.iinfo(kind).min, np.iinfo(kind).max + 1, (64, 32)).astype(kind)
    b = rng.integers(-128, 128, (24, 32)).astype(np.int8)
    a[0], b[0] = np.iinfo(kind).max, -128
    y = np.zeros((64, 24), np.int32)
    table = types.Array(u32, 2, "C")
    run(
        kernel,
        a.view(np.uint32),
        b.view(np.uint32),
        y,
        signature=types.void(table, table, types.Array(i32, 2, "C")),
        threads=128,
        arch="sm_90a",
    )
    assert np.array_equal(y, a.astype(np.int64) @ b.astype(np.int64).T)


@pytest.mark.parametrize(
    ("kind", "shape", "registers", "immediates"),
    [
        ("protocol", "m64n40k32.s32.u8.s8", 20, ""),
        ("protocol", "m64n8k32.s32.u8.s8", 2, ""),
        ("protocol", "m64n8k32.s32.u8.s8", 4, ", 1, 1, 0, 0"),
        ("protocol", "m64n8k16.f32.f16.f16", 4, ""),
        ("unsupported", "m64n8k16.s32.u8.s8", 4, ""),
        ("unsupported", "m64n8k32.f32.s8.s8", 4, ""),
        ("unsupported", "m64n8k16.f32.f16.bf16", 4, ", 1, 1, 0, 0"),
        ("unsupported", "m64n8k16.f32.f16.f16", 4, ", -1, 1, 0, 0"),
    ],
)
def test_products_that_do_not_exist(kind, shape, registers, immediates):
    """Of a size, with accumulators or immediates that the instruction does not have (PTX
    9.7.15.5.2).
    """
    d = ", ".join("%r1" for _ in range(registers))
    text = run_ptx(
        f"wgmma.mma_async.sync.aligned.{shape} {{{d}}}, %rd1, %rd1, %p1{immediates};", "sm_90a"
    )
    with pytest.raises(EmulatorError) as caught:
        emulate(
            text.replace(".reg .b32", ".reg .b64 %rd<2>;\n.reg .pred %p<2>;\n.reg .b32"), 1, 128, []
        )
    assert caught.value.kind == kind


def tiles(wait_full=True, wait_empty=True, expect=1024, more=0, fence=True, written=False, at=0):
    """A producer thread loads two tiles into the same place; 32 consumers read both."""

    def kernel(maps, y):
        shared = cuda.shared.array(1024, u32)
        t = cuda.threadIdx.x
        raw = ptx.shared_address(shared)
        base = (raw + u32(1023)) & u32(0xFFFFFC00)
        full = base + u32(1024)
        empty = base + u32(1032)
        if t == 0:
            ptx.mbarrier_init(full, u32(1))
            ptx.mbarrier_init(empty, u32(32))
            if fence:
                ptx.fence_mbarrier_init()
            if written:
                ptx.store_shared_f32(base, f32(0))
        cuda.syncthreads()
        for k in range(2):
            if t == 32:
                if wait_empty:
                    ptx.mbarrier_wait(empty, u32((k & 1) ^ 1))
                if more:
                    ptx.mbarrier_expect_more(full, u32(more))
                ptx.mbarrier_expect(full, u32(expect))
                ptx.tma_load_4d(base + u32(at), maps, i32(0), i32(8 * k), i32(0), i32(0), full)
            if t < 32:
                if wait_full:
                    ptx.mbarrier_wait(full, u32(k & 1))
                y[32 * k + t] = ptx.load_shared_f32(base + u32(t * 32))
                ptx.mbarrier_arrive(empty)

    return kernel


def tile_arguments():
    x = np.arange(16 * 32, dtype=np.float32).reshape(1, 1, 16, 32)
    return [TensorMap(x, (1, 1, 8, 32), swizzle=0)], np.zeros(64, np.float32)


def test_a_tile_of_another_rank():
    maps, y = tile_arguments()
    maps = [TensorMap(maps[0].array[None], (1, *maps[0].box), swizzle=0)]
    fails(
        "protocol",
        "tma_load_4d",
        tiles(),
        maps,
        y,
        signature=types.void(u64, FLOATS),
        arch="sm_90a",
    )


@pytest.mark.parametrize("more", [0, 512])  # announced apart from the arrival
def test_tiles(more):
    maps, y = tile_arguments()
    run(
        tiles(expect=1024 - more, more=more),
        maps,
        y,
        signature=types.void(u64, FLOATS),
        arch="sm_90a",
    )
    assert np.array_equal(y, np.arange(0, 512, 8, dtype=np.float32))


@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        ("pending uninitialised race", {"wait_full": False}),
        ("race pending protocol", {"wait_empty": False}),
        ("deadlock", {"expect": 2048}),
        ("deadlock", {"more": 512}),
        ("protocol", {"fence": False}),  # the copy engine may not know the mbarrier
        ("race", {"written": True}),  # by a thread, without a proxy fence before the copy
        ("misaligned", {"at": 64}),
    ],
)
def test_tile_faults(kinds, options):
    signature = types.void(u64, FLOATS)
    fails(kinds, None, tiles(**options), *tile_arguments(), signature=signature, arch="sm_90a")


def test_a_deadlock_says_who_waits_for_what():
    """A barrier that was promised more bytes than come: both sides, each with what is missing."""
    kernel = tiles(expect=2048)
    source, first = inspect.getsourcelines(kernel)
    at = {
        name: first
        + next(n for n, text in enumerate(source) if f"ptx.mbarrier_wait({name}" in text)
        for name in ("full", "empty")
    }
    said = (
        f"warp 0 at line {at['full']} for parity 0 of the mbarrier at shared byte 1024 "
        r"\(bytes missing: 1024\); "
        f"warp 1 at line {at['empty']} for parity 0 of the mbarrier at shared byte 1032 "
        r"\(arrivals missing: 32\)"
    )
    signature = types.void(u64, FLOATS)
    fails(
        "deadlock", None, kernel, *tile_arguments(), said=said, signature=signature, arch="sm_90a"
    )


@pytest.mark.parametrize(
    ("array", "box", "said"),
    [
        (np.zeros((1, 1, 16, 30), np.float32), (1, 1, 8, 32), "strides of"),
        (np.zeros((1, 1, 16, 32), np.float32)[:, :, :, ::2], (1, 1, 8, 16), "not contiguous"),
        (np.zeros((1, 1, 17, 36), np.float32)[:, :, :, 1:33], (1, 1, 8, 32), "its array is at"),
        (np.broadcast_to(np.zeros(32, np.float32), (1, 1, 16, 32)), (1, 1, 8, 32), "strides of"),
        (np.zeros((1, 1, 512, 32), np.float32), (1, 1, 257, 32), "extents from 1 to 256"),
        (np.zeros((1, 1, 16, 34), np.int8)[..., :32], (1, 1, 8, 32), "strides of"),
        (np.zeros((1, 1, 16, 32), np.float32), (1, 1, 8, 2), "box rows of 8 bytes"),
    ],
)
def test_tensor_maps_that_the_driver_refuses(array, box, said):
    with pytest.raises(EmulatorError, match=said) as caught:
        emulate(run_ptx("").replace("k()", "k(.param .u64 p)"), 1, 32, [[TensorMap(array, box, 0)]])
    assert caught.value.kind == "protocol"
