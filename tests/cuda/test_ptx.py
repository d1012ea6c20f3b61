"""Every inline PTX operation in the emulator, against NumPy.

The hopper ones are in test_emulator_hopper and test_flash_hopper.
"""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from numflash.cuda import emulate
from numflash.cuda.compile import Source
from numflash.cuda.compile.target import cuda, types
from numflash.cuda.instructions import ptx

u32 = types.uint32
i32 = types.int32
u64 = types.uint64
f32 = types.float32


def array(t, ndim=1):
    return types.Array(t, ndim, "C")


def test_float_arithmetic():
    def kernel(x, y, out):
        i = cuda.grid(1)
        a = x[i]
        b = y[i]
        out[0, i] = ptx.fma(a, b, a)
        out[1, i] = ptx.mul(a, b)
        out[2, i] = ptx.add(a, b)
        out[3, i] = ptx.sub(a, b)
        out[4, i] = ptx.div(a, b)
        out[5, i] = ptx.fmax(a, b)
        out[6, i] = ptx.fmin(a, b)
        out[7, i] = ptx.rcp(a)
        out[8, i] = ptx.from_bits(ptx.bits(a))
        out[9, i] = ptx.half_to_float(ptx.half_bits(a))
        out[10, i] = ptx.ex2(a)
        out[11, i] = ptx.lg2(abs(a))
        out[12, i] = ptx.tanh(a)
        out[13, i] = ptx.fmax_nan(a, b)
        out[14, i] = ptx.fmin_nan(a, b)
        out[15, i] = ptx.fma_saturate(a, b, a)

    rng = np.random.default_rng(0)
    x, y = (
        (rng.standard_normal(256) * 10.0 ** rng.integers(-3, 3, 256)).astype(np.float32)
        for _ in range(2)
    )
    x[0], y[1] = np.nan, np.nan
    y[2:5], x[2:5] = 1, (np.inf, -np.inf, 0.25)
    out = np.zeros((16, 256), np.float32)
    emulate(
        Source(kernel, types.void(array(f32), array(f32), array(f32, 2)), 256), 1, None, [x, y, out]
    )
    with np.errstate(over="ignore"):
        exact = [
            (x.astype(np.float64) * y + x).astype(np.float32),
            x * y,
            x + y,
            x - y,
            x / y,
            np.fmax(x, y),
            np.fmin(x, y),
            1 / x,
            x,
            x.astype(np.float16).astype(np.float32),
        ]
        close = [np.exp2(x), np.log2(np.abs(x)), np.tanh(x)]
        nan = [np.maximum(x, y), np.minimum(x, y), np.nan_to_num(np.clip(exact[0], 0, 1))]
    for k, expected in enumerate(exact):
        assert np.array_equal(out[k], expected, equal_nan=True), k
    for k, expected in enumerate(close):
        assert np.allclose(out[10 + k], expected, rtol=1e-6, equal_nan=True)
    for k, expected in enumerate(nan):
        assert np.array_equal(out[13 + k], expected, equal_nan=True), k


def test_fma_rounds_once():
    """Cases where the exact sum lies on a tie of float32 once rounded to float64."""

    def kernel(x, y, z, out):
        i = cuda.grid(1)
        out[i] = ptx.fma(x[i], y[i], z[i])

    a = np.full(32, 1 + 2.0**-12, np.float32)
    c = np.full(32, 2.0**-60, np.float32)
    c[16:] *= -1
    out = np.zeros(32, np.float32)
    emulate(Source(kernel, types.void(*[array(f32)] * 4), 32), 1, None, [a, a, c, out])
    # a * a = 1 + 2**-11 + 2**-24: a tie between two floats; the tiny c decides
    assert (out[:16] == np.float32(1 + 2.0**-11 + 2.0**-23)).all() and (
        out[16:] == np.float32(1 + 2.0**-11)
    ).all()


def test_fma_towards_zero():
    """Against exact arithmetic: never beyond, and an overflow is the largest number.

    Infinity and NaN are themselves.
    """

    def kernel(x, y, z, out):
        i = cuda.grid(1)
        out[i] = ptx.fma_toward_zero(x[i], y[i], z[i])

    rng = np.random.default_rng(0)
    x, y, z = (
        (rng.standard_normal(512) * 10.0 ** rng.integers(-4, 4, 512)).astype(np.float32)
        for _ in range(3)
    )
    x[:4], y[:4], z[:4] = (
        np.float32(1 + 2.0**-12),
        np.float32(1 + 2.0**-12),
        [2.0**-60, -(2.0**-60), -1e-40, 0],
    )
    x[4:9], y[4:9], z[4:9] = (
        [3e38, -3e38, -np.inf, np.nan, 1],
        [2, 2, 1, 1, np.inf],
        [1, 1, 1, 1, 1],
    )
    y[9:12], z[9:12] = 1, [2.0**-30, -(2.0**-30), -(2.0**-60)]
    x[9:12] = 1
    out = np.zeros(512, np.float32)
    emulate(Source(kernel, types.void(*[array(f32)] * 4), 512), 1, None, [x, y, z, out])
    largest = np.finfo(np.float32).max
    assert (
        out[4] == largest
        and out[5] == -largest
        and out[6] == -np.inf
        and np.isnan(out[7])
        and out[8] == np.inf
    )
    for found, *three in zip(out, x, y, z, strict=True):
        if np.isfinite(three).all() and abs(found) < largest:
            a, b, c = (Fraction(float(n)) for n in three)
            exact = a * b + c
            after = np.nextafter(found, np.float32(np.copysign(np.inf, found)))
            assert abs(Fraction(float(found))) <= abs(exact) < abs(Fraction(float(after)))


def test_integer_arithmetic():
    def kernel(x, y, f, out):
        i = cuda.grid(1)
        out[0, i] = u32(ptx.imax(x[i], y[i]))
        out[1, i] = u32(ptx.imin(x[i], y[i]))
        out[2, i] = ptx.umin(u32(x[i]), u32(y[i]))
        out[3, i] = u32(ptx.to_int(f[i]))
        out[4, i] = ptx.bits(ptx.to_float(x[i]))
        out[5, i] = ptx.prmt(u32(x[i]), u32(y[i]), u32(0x9630))
        out[6, i] = ptx_pack(f[i], ptx.to_float(y[i]))
        out[7, i] = ptx_pack_bf16(f[i], ptx.to_float(y[i]))
        out[8, i] = ptx.pack_turing(f[i], ptx.to_float(y[i]))
        both = ptx.words(u32(x[i]), u32(y[i]))
        out[9, i], out[10, i] = u32(both), u32(both >> u64(32))
        out[11, i] = ptx.shift_right(u32(x[i]), u32(y[i]))
        out[12, i] = u32(ptx.dot4(u32(x[i]), u32(y[i]), x[i]))
        out[13, i] = ptx.multiply_add(u32(x[i]), u32(y[i]), u32(77))

    ptx_pack = ptx.pack["float16"]
    ptx_pack_bf16 = ptx.pack["bfloat16"]
    rng = np.random.default_rng(1)
    x, y = (rng.integers(-1000, 1000, 128).astype(np.int32) for _ in range(2))
    f = (rng.standard_normal(128) * 100).astype(np.float32)
    f[:4] = 0.5, 1.5, -2.5, 3e9
    y[:40] = np.arange(40)  # shifts by less than a word, by one, and by more
    out = np.zeros((14, 128), np.uint32)
    emulate(
        Source(kernel, types.void(array(i32), array(i32), array(f32), array(u32, 2)), 128),
        1,
        None,
        [x, y, f, out],
    )
    assert np.array_equal(out[0].view(np.int32), np.maximum(x, y)) and np.array_equal(
        out[1].view(np.int32), np.minimum(x, y)
    )
    assert np.array_equal(out[2], np.minimum(x.view(np.uint32), y.view(np.uint32)))
    assert np.array_equal(
        out[3].view(np.int32),
        np.clip(np.rint(f.astype(np.float64)), -(2**31), 2**31 - 1).astype(np.int32),
    )
    assert np.array_equal(out[4].view(np.float32), x.astype(np.float32))
    assert np.array_equal(out[9].view(np.int32), x) and np.array_equal(out[10].view(np.int32), y)
    both = np.concatenate([x.view(np.uint8).reshape(-1, 4), y.view(np.uint8).reshape(-1, 4)], 1)
    sign = np.where(both[:, 1] & 128, 255, 0)  # selector 9: the sign of byte 1
    assert np.array_equal(
        out[5].view(np.uint8).reshape(-1, 4),
        np.stack([both[:, 0], both[:, 3], both[:, 6], sign], 1),
    )
    for row, kind in ((6, np.float16), (7, ml_dtypes.bfloat16), (8, np.float16)):
        with np.errstate(over="ignore"):
            halves = np.stack([f.astype(kind), y.astype(np.float32).astype(kind)], 1)
        assert np.array_equal(out[row], halves.view(np.uint32)[:, 0])
    assert np.array_equal(out[13].view(np.int32), x * y + 77)
    amount = np.minimum(y.view(np.uint32).astype(np.uint64), 32)
    assert np.array_equal(out[11], x.view(np.uint32).astype(np.uint64) >> amount)
    assert np.array_equal(
        out[12].view(np.int32), (both[:, :4].astype(np.int32) * both[:, 4:]).sum(1) + x
    )


def test_memory_and_shuffles():
    def kernel(x, y):
        shared = cuda.shared.array(512, u32)
        t = cuda.threadIdx.x
        four = cuda.local.array(4, u32)
        two = cuda.local.array(2, f32)
        at = ptx.global_address(x) + u64(t * 16)
        here = ptx.shared_address(shared) + u32(t * 16)
        to = ptx.global_address(y) + u64(t * 64)
        ptx.load_global_v4(four, 0, at)
        ptx.store_shared_v4(here, four, 0)
        cuda.syncthreads()
        ptx.load_shared_v4(four, 0, here ^ u32(16))
        ptx.store_global_v4(to, four, 0)
        ptx.load_shared_f32_v2(two, 0, here)
        four[0], four[1] = ptx.bits(two[0]), ptx.bits(two[1])
        ptx.store_global_v2(to + u64(16), four, 0)
        ptx.store_global(to + u64(24), ptx.bits(ptx.load_global_f32(at)))
        ptx.store_global_f32(to + u64(28), ptx.load_shared_f32(here))
        ptx.store_global(to + u64(32), u32(ptx.load_global_s32(at)))
        ptx.store_global(to + u64(36), ptx.load_global_u8(at + u64(1)))
        ptx.store_global(to + u64(40), u32(0))
        ptx.store_global_u16(to + u64(40), u32(0x12345))
        ptx.store_global_f32(to + u64(44), ptx.shuffle_xor(ptx.load_shared_f32(here), u32(5)))
        ptx.store_global(to + u64(48), u32(ptx.shuffle_xor_i32(i32(t), u32(16))))
        ptx.store_global(to + u64(52), u32(ptx.vote_all(i32(t - 32))))
        ptx.store_global(to + u64(56), u32(ptx.vote_all(i32(t + 1))))

    x = np.arange(128 * 4, dtype=np.float32) + 0.5
    y = np.zeros((128, 16), np.uint32)
    emulate(Source(kernel, types.void(array(f32), array(u32, 2)), 128), 1, None, [x, y])
    bits = x.view(np.uint32).reshape(128, 4)
    t = np.arange(128)
    assert np.array_equal(y[:, :4], bits[t ^ 1]) and np.array_equal(y[:, 4:6], bits[:, :2])
    for column in (6, 7, 8):
        assert np.array_equal(y[:, column], bits[:, 0])
    assert np.array_equal(y[:, 9], bits.view(np.uint8)[:, 1]) and (y[:, 10] == 0x2345).all()
    assert np.array_equal(y[:, 11], bits[t ^ 5, 0]) and np.array_equal(y[:, 12], t ^ 16)
    # lane 0 of the second warp alone has 0
    assert np.array_equal(y[:, 13], t // 32 != 1) and (y[:, 14] == 1).all()


def place(which, register, part, per_word, lane):
    """Row and column of one element of a fragment, from the figures of PTX 9.7.14.5."""
    group = lane // 4
    quad = lane % 4
    if which == "c":
        return group + 8 * (register // 2), 2 * quad + register % 2
    column = per_word * quad + part + 4 * per_word * (register // 2 if which == "a" else register)
    return (group + 8 * (register % 2) if which == "a" else group), column


@pytest.mark.parametrize(
    ("operation", "kind", "other", "k", "registers"),
    [
        (ptx.mma["float16"], np.float16, np.float16, 16, (4, 2)),
        (ptx.mma["bfloat16"], ml_dtypes.bfloat16, ml_dtypes.bfloat16, 16, (4, 2)),
        (ptx.mma_turing_f16, np.float16, np.float16, 16, (4, 2)),
        (ptx.mma_s8, np.int8, np.int8, 32, (4, 2)),
        (ptx.mma_u8s8, np.uint8, np.int8, 32, (4, 2)),
        (ptx.mma_s8u8, np.int8, np.uint8, 32, (4, 2)),
        (ptx.mma_turing_s8, np.int8, np.int8, 32, (4, 2)),
        (ptx.mma_turing_u8s8, np.uint8, np.int8, 32, (4, 2)),
        (ptx.mma_turing_s8u8, np.int8, np.uint8, 32, (4, 2)),
        (ptx.mma_tf32, np.float32, np.float32, 8, (4, 2)),
    ],
)
def test_products(operation, kind, other, k, registers):
    integer = k == 32
    result = i32 if integer else f32

    def kernel(a, b, c, out):
        lane = cuda.threadIdx.x
        fa = cuda.local.array(4, u32)
        fb = cuda.local.array(2, u32)
        fc = cuda.local.array(4, result)
        for i in range(na):
            fa[i] = a[lane, i]
        for i in range(nb):
            fb[i] = b[lane, i]
        for i in range(4):
            fc[i] = c[lane, i]
        operation(fc, 0, fa, 0, fb, 0)
        for i in range(4):
            out[lane, i] = fc[i]

    na, nb = registers
    rng = np.random.default_rng(2)
    if integer:
        A, B = (
            rng.integers(np.iinfo(t).min, np.iinfo(t).max + 1, (n, k)).astype(t)
            for n, t in ((16, kind), (8, other))
        )
        C = rng.integers(-(10**6), 10**6, (16, 8)).astype(np.int32)
        expected = A.astype(np.int64) @ B.astype(np.int64).T + C
    else:
        A = rng.standard_normal((16, k)).astype(kind)
        B = rng.standard_normal((8, k)).astype(other)
        C = rng.standard_normal((16, 8)).astype(np.float32)
        if kind == np.float32:  # TF32: 10 bits of fraction are read
            A, B = ((x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for x in (A, B))
        expected = A.astype(np.float64) @ B.astype(np.float64).T + C
    per_word = 4 // A.itemsize
    a = np.zeros((32, na * per_word), kind)
    b = np.zeros((32, nb * per_word), other)
    c = np.zeros((32, 4), C.dtype)
    out = np.zeros((32, 4), C.dtype)
    for lane in range(32):
        for part in range(per_word):
            for i in range(na):
                a[lane, i * per_word + part] = A[place("a", i, part, per_word, lane)]
            for i in range(nb):
                b[lane, i * per_word + part] = B[place("b", i, part, per_word, lane)]
        for i in range(4):
            c[lane, i] = C[place("c", i, 0, 1, lane)]
    arrays = types.void(array(u32, 2), array(u32, 2), array(result, 2), array(result, 2))
    emulate(Source(kernel, arrays, 32), 1, None, [a.view(np.uint32), b.view(np.uint32), c, out])
    got = np.zeros((16, 8))
    for lane in range(32):
        for i in range(4):
            got[place("c", i, 0, 1, lane)] = out[lane, i]
    assert np.array_equal(got, expected) if integer else np.allclose(got, expected, atol=1e-5)


def test_ldmatrix():
    def kernel(x, out):
        shared = cuda.shared.array(512, u32)
        lane = cuda.threadIdx.x
        four = cuda.local.array(4, u32)
        before = ptx.shared_address(shared) + u32(lane * 16)
        here = before + u32(512)
        ptx.load_global_v4(four, 0, ptx.global_address(x) + u64(lane * 16))
        ptx.store_shared_v4(here, four, 0)
        cuda.syncwarp()
        ptx.ldmatrix(four, 0, here)
        for i in range(4):
            out[lane, i] = four[i]
        ptx.ldmatrix_trans(four, 0, here)
        for i in range(4):
            out[lane, 4 + i] = four[i]
        ptx.ldmatrix_ahead(four, 0, before, 512)
        for i in range(4):
            out[lane, 8 + i] = four[i]
        ptx.ldmatrix_trans_ahead(four, 0, before, 512)
        for i in range(4):
            out[lane, 12 + i] = four[i]

    x = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    out = np.zeros((32, 16), np.uint32)
    report = emulate(
        Source(kernel, types.void(array(types.uint16, 3), array(u32, 2)), 32), 1, None, [x, out]
    )
    halves = out.view(np.uint16).reshape(32, 4, 4, 2)
    for lane in range(32):
        for i in range(4):
            assert (
                halves[lane, ::2, i] == x[i, lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2]
            ).all()
            assert (
                halves[lane, 1::2, i] == x[i, 2 * (lane % 4) : 2 * (lane % 4) + 2, lane // 4]
            ).all()
    assert report.shared_conflicts == 0
