"""Kernels that do nothing but tensor-core products: the rate that attention is compared with."""

from __future__ import annotations

from ..compile import Source
from ..compile.target import cuda, types
from ..instructions import ptx
from .hopper import DESCRIPTOR, ahead, descriptor

i32, u32, u64, f32 = types.int32, types.uint32, types.uint64, types.float32
SIGNATURE = types.void(u64)
THREADS = 256
BLOCKS = 2  # per multiprocessor
LOOPS = 2048
SUMS = 8  # independent sums of a warp's mma.sync products
WIDE = 128  # columns of a wgmma product
TILE_BYTES = 64 * 128  # 64 rows of one 128-byte panel


def operations(dtype: str, hopper: bool = False, loops: int = LOOPS) -> int:
    """Multiplications and additions of one block."""
    k = 32 if dtype == "int8" else 16
    if hopper:
        return 2 * 64 * WIDE * k * 4 * loops * (THREADS // 128)
    return 2 * 16 * 8 * k * SUMS * loops * (THREADS // 32)


def product_rate(
    dtype: str, hopper: bool = False, turing: bool = False, loops: int = LOOPS
) -> Source:
    """The kernel for float16 or INT8 products: wgmma from shared memory, or mma.sync.

    Its one argument is the address of an int32 for each thread, which keeps the products alive.
    """
    return _wgmma(dtype, loops) if hopper else _mma(dtype, turing, loops)


def _mma(dtype: str, turing: bool, loops: int) -> Source:
    whole = dtype == "int8"
    mma = ptx.mma_s8 if whole else ptx.products("float16", turing)[0]
    n, kind = 4 * SUMS, i32 if whole else f32

    def product_rate(out):
        a, b = cuda.local.array(4, u32), cuda.local.array(2, u32)
        sums = cuda.local.array(n, kind)
        thread = i32(cuda.threadIdx.x)
        for i in range(4):
            a[i] = u32(0x3C003800) + u32(thread * 64 + i)
        for i in range(2):
            b[i] = u32(0x38003C00) + u32(thread * 64 + i)
        for i in range(n):
            sums[i] = kind(0)
        for _ in range(loops):
            for i in range(SUMS):
                mma(sums, 4 * i, a, 0, b, 0)
        total = kind(0)
        for i in range(n):
            total += sums[i]
        at = out + u64((i32(cuda.blockIdx.x) * THREADS + thread) * 4)
        if whole:
            ptx.store_global(at, u32(total))
        else:
            ptx.store_global_f32(at, total)

    return Source(product_rate, SIGNATURE, THREADS, blocks=BLOCKS)


def _wgmma(dtype: str, loops: int) -> Source:
    whole = dtype == "int8"
    multiply = ptx.wgmma(WIDE, dtype, False)
    n, kind = WIDE // 2, i32 if whole else f32
    fence, wait = ptx.register_fence(n, kind), ptx.wgmma_wait[0]
    words = (TILE_BYTES + 2 * TILE_BYTES) // 4

    def product_rate(out):
        shared = cuda.shared.array(0, u32)
        base = (ptx.shared_address(shared) + u32(1023)) & u32(0xFFFFFC00)
        sums = cuda.local.array(n, kind)
        thread = i32(cuda.threadIdx.x)
        for i in range(words // THREADS):
            word = i32(i * THREADS + thread)
            ptx.store_shared(base + u32(4 * word), (u32(word) * u32(0x9E3779B1)) & u32(0xBBFFBBFF))
        ptx.fence_async()
        cuda.syncthreads()
        for i in range(n):
            sums[i] = kind(0)
        a, b = descriptor(DESCRIPTOR, base), descriptor(DESCRIPTOR, base + u32(TILE_BYTES))
        for _ in range(loops):
            fence(sums, 0)
            ptx.wgmma_fence()
            for step in range(4):
                multiply(sums, 0, ahead(a, 2 * step), ahead(b, 2 * step), i32(1))
            ptx.wgmma_commit()
            wait()
            fence(sums, 0)
        total = kind(0)
        for i in range(n):
            total += sums[i]
        at = out + u64((i32(cuda.blockIdx.x) * THREADS + thread) * 4)
        if whole:
            ptx.store_global(at, u32(total))
        else:
            ptx.store_global_f32(at, total)

    return Source(product_rate, SIGNATURE, THREADS, 3 * TILE_BYTES + 1024, blocks=BLOCKS)
