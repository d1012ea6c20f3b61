"""Tile functions of score and mask functions as AArch64 code, executed.

NEON and every SVE length.
"""

import numpy as np
import pytest
from flex import gallery as g
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from numflash.cpu.isa.vectors import address
from numflash.flex import emit_cached
from numflash.flex.emit import Form, emit
from numflash.flex.evaluate import evaluate
from numflash.flex.prepared import Prepared
from numflash.flex.program import Program
from numflash.numerics.fixedpoint import T_LIMIT
from numflash.tiling import KEY_BLOCK

ROWS, COUNT, STRIDE = 3, 41, 48
SHAPE = (2, 4, 150, 150)
AT = (1, 2, 60, 37)  # batch entry, head, first query and key


def caller(program, form):
    """Intrinsic f(frame, x, numbers): the tile function on x, emitted into the caller's module."""

    @intrinsic
    def call(typingctx, frame, x, rows, count, stride, b, h, q, k):
        def codegen(context, builder, sig, a):
            emit(builder.module, "tile", program, form)
            function = builder.module.globals["tile"]
            frame, x = (
                builder.inttoptr(y, kind.type)
                for y, kind in zip(a[:2], function.args[:2], strict=True)
            )
            none = [ir.Constant(x.type, None) for x in function.args[2:4]]
            unit = ir.Constant(ir.FloatType(), 1.0)
            rows, count, stride, *at = a[2:]
            builder.call(function, [frame, x, *none, stride, rows, count, *at, unit, unit])
            return context.get_dummy_value()

        return types.void(*[types.intp] * 9), codegen

    return call


@pytest.mark.parametrize(("cpu", "bits"), [("neoverse-n1", 128), ("a64fx", 512)])
@pytest.mark.parametrize(
    ("score_mod", "mask_mod"),
    [(g.relative_bias, g.documents), (g.distance_wave, g.dilated), (g.softcap, None)],
    ids=lambda f: getattr(f, "__name__", "none"),
)
def test_a_tile_gives_what_numpy_gives(score_mod, mask_mod, cpu, bits):
    pytest.importorskip("unicorn")
    from numflash.machinecode.emulator import Emulated

    prepared = Prepared(score_mod, mask_mod)
    program = Program(prepared.graph, prepared.score, None, prepared.mask, SHAPE)
    call = caller(program, Form(False, 4))
    tables = [np.ascontiguousarray(x) for x in program.arrays]
    places = [program.tables[n].at for n in range(len(tables))]
    first, second = [*places, 0, 0][:2]
    count = len(tables)
    b, h, q, k = AT

    @njit
    def run(frame, x, one, two):
        if count > 0:
            frame[first] = address(one)
        if count > 1:
            frame[second] = address(two)
        call(address(frame), address(x), ROWS, COUNT, STRIDE, b, h, q, k)

    one, two = [*tables, np.zeros(1), np.zeros(1)][:2]
    kinds = [f"{y.dtype}[{', '.join([':'] * (y.ndim - 1) + ['::1'])}]" for y in (one, two)]
    x = np.random.default_rng(2).standard_normal(ROWS * STRIDE).astype(np.float32)
    at = {"b": b, "h": h, "q": np.arange(q, q + ROWS)[:, None], "k": np.arange(k, k + COUNT)}
    at["score"] = x.reshape(ROWS, STRIDE)[:, :COUNT].astype(np.float64)
    (wanted,) = evaluate(prepared.graph, (prepared.score,), at)
    if mask_mod is not None:
        wanted = np.where(evaluate(prepared.graph, (prepared.mask,), at)[0], wanted, -np.inf)
    before = x.reshape(ROWS, STRIDE)[:, COUNT:].copy()
    signature = f"void(int64[::1], float32[::1], {', '.join(kinds)})"
    emulated = Emulated(run, signature, cpu, vector_bits=bits)
    emulated(program.frame(), x, one, two)
    np.testing.assert_allclose(x.reshape(ROWS, STRIDE)[:, :COUNT], wanted, rtol=2e-6, atol=2e-6)
    assert np.array_equal(x.reshape(ROWS, STRIDE)[:, COUNT:], before)
    assert ".4s" in emulated.code.assembly


def cached_caller(program, form):
    """Intrinsic f(frame, x, shift, scales, rows, count, rounded, b, h, q, k): decoding's tile function."""

    @intrinsic
    def call(typingctx, frame, x, shift, scales, rows, count, rounded, b, h, q, k):
        def codegen(context, builder, sig, a):
            emit_cached.emit(builder.module, "tile", program, form)
            function = builder.module.globals["tile"]
            pointers = (
                builder.inttoptr(y, kind.type)
                for y, kind in zip(a[:4], function.args[:4], strict=True)
            )
            unit = ir.Constant(ir.FloatType(), 1.0)
            return builder.call(function, [*pointers, *a[4:], unit, unit])

        return types.int64(*[types.intp] * 11), codegen

    return call


@pytest.mark.parametrize(("cpu", "bits"), [("neoverse-n1", 128), ("a64fx", 512)])
@pytest.mark.parametrize("kind", ["floats", "integers"])
def test_a_tile_of_decoding_gives_what_numpy_gives(kind, cpu, bits):
    pytest.importorskip("unicorn")
    from numflash.machinecode.emulator import Emulated

    prepared = Prepared(
        lambda score, b, h, q, k: np.where(h == 3, np.nan, score * (h + 1)) + np.sin(0.5 * k),
        lambda b, h, q, k: (k % 3 != 1) & ((q - k) > h),
    )
    program = Program(prepared.graph, prepared.score, None, prepared.mask, SHAPE)
    call = cached_caller(program, Form(False, 4, cached=kind))
    b, h, q, k = AT

    @njit
    def run(frame, x, shift, scales, found):
        found[0] = call(
            address(frame), address(x), address(shift), address(scales), ROWS, COUNT, 1, b, h, q, k
        )

    rng = np.random.default_rng(2)
    dtype = np.float32 if kind == "floats" else np.int32
    x = (1000 * rng.standard_normal((ROWS, KEY_BLOCK))).astype(dtype)
    shift, scales = np.arange(ROWS, dtype=np.float32), np.ones(COUNT, np.float32)
    scales[7] = np.nan  # a key that no row's mask hides
    rows, keys = np.arange(h, h + ROWS)[:, None], np.arange(k, k + COUNT)
    scores = x[:, :COUNT].astype(np.float64)
    scores += shift[:, None] if kind == "integers" else 0
    at = {"b": b, "h": rows, "q": q, "k": keys, "score": np.where(keys == k + 7, np.nan, scores)}
    (wanted,) = evaluate(prepared.graph, (prepared.score,), at)
    wanted = np.where(evaluate(prepared.graph, (prepared.mask,), at)[0], wanted, -np.inf)
    before, found = x[:, COUNT:].copy(), np.zeros(1, np.int64)
    arrays = f"int64[::1], {np.dtype(dtype)}[:, ::1], float32[::1], float32[::1], int64[::1]"
    Emulated(run, f"void({arrays})", cpu, vector_bits=bits)(
        program.frame(), x, shift, scales, found
    )
    bad = np.isnan(wanted)
    rows = sum(1 << r for r in np.flatnonzero(bad.any(1)))
    assert found[0] == rows + (rows << 32 if kind == "floats" else 0)
    assert bad.any(1).tolist() == [True] * ROWS and bad[1].sum() > 1
    hidden, got = np.isneginf(wanted), x[:, :COUNT]
    assert (got[hidden] == (-np.inf if kind == "floats" else -(1 << 31))).all()
    seen = ~(hidden | bad)
    if kind == "floats":
        np.testing.assert_allclose(got[seen], wanted[seen], rtol=2e-6, atol=2e-6)
    else:
        assert np.abs(got[seen] - wanted[seen]).max() <= 0.501
        assert np.abs(got[bad].astype(np.int64)).max() <= T_LIMIT
    assert np.array_equal(x[:, COUNT:], before)
