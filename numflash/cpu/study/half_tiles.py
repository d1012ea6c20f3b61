"""P.V in FP16 on SVE: the A64FX multiplies and adds twice as many halves as float32 in a cycle.

The summary's "Mixed-Precision P@V" (docs/sources.md). Base SVE has no FMLA that widens, so the sums
of a key block are halves too, and are added to float32 O after it. Weights are at most 1 and their
sums at most 128 times a value: no overflow below |v| = 511, and the errors of 128 additions in
eleven bits are the price.

V is packed so that the halves in the even lanes of a vector are its first columns, those in the odd
lanes the next: FCVT widens even lanes, a shift brings the odd ones there.
"""

from __future__ import annotations

import functools
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.extending import intrinsic

from ...jit import target
from ...tiling import KEY_BLOCK
from ..isa.vectors import F32, I16, I32, I64, Scalable, call, data, load, repeat, store
from ..isa.vectors_arm import SVE

F16 = ir.HalfType()
ROWS, VECTORS = 6, 4


def pack(v: np.ndarray, lanes: int) -> np.ndarray:
    """v (keys, columns) float32 as halves (uint16), columns in the order of the tile.

    `lanes` int32 lanes of a vector; columns a multiple of twice as many.
    """
    keys, columns = v.shape
    pairs = v.astype(np.float16).view(np.uint16).reshape(keys, columns // (2 * lanes), 2, lanes)
    return np.ascontiguousarray(pairs.transpose(0, 1, 3, 2)).reshape(keys, columns)


def _halves(b: Any, name: str, *args: Any) -> Any:
    return call(b, f"llvm.{name}.nxv8f16", args[0].type, *args)


@functools.cache
def make_value_tile() -> Any:
    """Intrinsic f(p, p_off, p_stride, v, v_off, v_stride, keys, o, o_off, o_stride).

    o[6, 4 vectors of halves] += P.V, o float32; p, v halves as uint16, v packed by `pack`.
    """
    halves, floats, words = Scalable(F16, 8), SVE.vector(F32), SVE.vector(I32)

    @intrinsic
    def tile(typingctx, p, p_off, p_stride, v, v_off, v_stride, keys, o, o_off, o_stride):
        def codegen(context, b, sig, a):
            target.guard("sve", context.codegen())
            pp, pv, po = (data(context, b, sig.args[n], a[n]) for n in (0, 3, 7))
            mask = Scalable(ir.IntType(1), 4)
            every = call(b, "llvm.aarch64.sve.ptrue.nxv4i1", mask, I32(31))

            def broadcast(x):
                word = call(b, "llvm.aarch64.sve.dup.x.nxv8i16", Scalable(I16, 8), x)
                return b.bitcast(word, halves)

            def body(key, sums):
                row = b.add(a[4], b.mul(a[5], key))
                vs = [
                    load(b, pv, b.add(row, SVE.elements(b, 2 * n)), halves, 2, 2)
                    for n in range(VECTORS)
                ]
                out = []
                for m in range(ROWS):
                    at = b.add(b.add(a[1], b.mul(a[2], I64(m))), key)
                    x = broadcast(load(b, pp, at, I16, 2))
                    out += [
                        _halves(b, "fma", x, vs[n], sums[m * VECTORS + n]) for n in range(VECTORS)
                    ]
                return out

            zero = call(b, "llvm.aarch64.sve.dup.x.nxv8i16", Scalable(I16, 8), I16(0))
            sums = [b.bitcast(zero, halves)] * (ROWS * VECTORS)
            sums = repeat(b, I64(0), a[6], sums, body)
            undefined = ir.Constant(floats, ir.Undefined)
            for m in range(ROWS):
                for n in range(VECTORS):
                    x = sums[m * VECTORS + n]
                    pairs = b.bitcast(x, words)
                    odd = b.bitcast(b.lshr(pairs, SVE.fill(b, words, 16)), halves)
                    for half, bits in enumerate((x, odd)):
                        where = b.add(
                            b.add(a[8], b.mul(a[9], I64(m))), SVE.elements(b, 2 * n + half)
                        )
                        name = "llvm.aarch64.sve.fcvt.f32f16"
                        wide = call(b, name, floats, undefined, every, bits)
                        old = load(b, po, where, floats, 4)
                        store(b, b.fadd(old, wide), po, where, 4)
            return context.get_dummy_value()

        return types.void(p, p_off, p_stride, v, v_off, v_stride, keys, o, o_off, o_stride), codegen

    return tile


def products(a: np.ndarray, b: np.ndarray, chain: int = KEY_BLOCK) -> np.ndarray:
    """a (M, K) times b (K, N) in float64, of halves: sums of `chain` products in FP16, as FMAs one by
    one, added up without error.
    """
    a16, b16 = (x.astype(np.float16).astype(np.float64) for x in (a, b))
    o = np.zeros((a.shape[0], b.shape[1]), np.float64)
    for c in range(0, a.shape[1], chain):
        some = np.zeros(o.shape, np.float16)
        for n in range(c, min(c + chain, a.shape[1])):  # an FMA rounds once
            some = (some.astype(np.float64) + a16[:, n, None] * b16[n]).astype(np.float16)
        o += some
    return o


def relative_error(p: np.ndarray, v: np.ndarray, chain: int = KEY_BLOCK) -> float:
    """Relative L1 error of P.V with FP16 operands and sums of `chain` keys."""
    wanted = p.astype(np.float64) @ v.astype(np.float64)
    return float(np.abs(products(p, v, chain) - wanted).sum() / np.abs(wanted).sum())


def score_error(q: np.ndarray, k: np.ndarray, v: np.ndarray, chain: int) -> tuple[float, float]:
    """Relative L1 error of attention, and of its worst row, where only the sums of Q.K^T are FP16's.

    q, k, v (rows, D) are halves already: storing them costs nothing here.
    """
    q, k, v = (x.astype(np.float16).astype(np.float64) for x in (q, k, v))

    def attend(s: np.ndarray) -> np.ndarray:
        weights = np.exp((s - s.max(1, keepdims=True)) / q.shape[1] ** 0.5)
        return weights @ v / weights.sum(1, keepdims=True)

    exact = attend(q @ k.T)
    off, size = np.abs(attend(products(q, k.T, chain)) - exact).sum(1), np.abs(exact).sum(1)
    return float(off.sum() / size.sum()), float((off / size).max())
