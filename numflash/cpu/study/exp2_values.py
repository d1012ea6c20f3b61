"""O = exp2(S * scale - max) @ V, the second stage of attention on its own.

The kernels of the exp2 benchmark (docs/sources.md).

S (M, Nc) int32 scores, V (Nc, D) float32, O (M, D) float32, not normalised (`exp2 + FMLA
benchmark`, "Overview"). Every kernel keeps a tile of 4 rows of O in registers and adds one rank-1
product per key: o[i] += p[i, key] * v[key]. They differ in where p comes from:

* `fused`: exp2 of one column of S per key: four values in a register that has room for sixteen.
* `fused4`: four keys at a time, so that exp2 works on sixteen values.
* `two_pass`: exp2 over whole rows of S into P, then the product.
* `gemm`: the product alone, P given: the ceiling of the other three.

and in how a weight reaches all lanes: "register", broadcast from the lane where exp2 left it (its
DUP), or "memory", stored and loaded back with replication (LD1RW; vbroadcastss from memory on x86).
A machine whose registers do not hold 4 x 64 sums works on 32 or 16 columns of O at a time, and
`fused` and `fused4` repeat exp2 for each. On SVE of 256 and 512 bits the code is for that length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from ...jit import target
from ...jit.compiler import inline, kernel
from ...numerics.fixedpoint import QUADRATIC_A, QUADRATIC_B
from ..floats.float_exp2 import EXP2 as POLYNOMIAL
from .registers import (
    at_least,
    floor,
    fma,
    keep_in_memory,
    lane,
    make_fexpa,
    make_load,
    make_load_block,
    make_zeros,
    nearest,
    put,
    subtract,
    times_power,
    whole_registers,
)

F = np.float32
ROWS = 4  # rows of O in a register tile
BEST = target.available(target.FLOAT_ISAS)[0]
COLUMNS = {"avx512": 64, "sve512": 64, "sve256": 32}.get(BEST, 16)  # of a register tile here
LANES = 16  # scores that the vectorised exp2 takes at a time
LOWEST = F(-125)  # a smaller exponent counts as this one: the weight is 2**-125, not 0
C0, C1, C2, C3, C4, C5 = (F(c) for c in POLYNOMIAL)
ONE, QA, QB = F(1), F(QUADRATIC_A), F(QUADRATIC_B)


@inline
def exp2_accurate(x):
    """2**x by a polynomial of degree 5 on [-1/2, 1/2]: as exact as float32."""
    x = at_least(x, LOWEST)
    n = nearest(x)
    f = subtract(x, n)
    y = fma(fma(fma(fma(fma(f, C5, C4), f, C3), f, C2), f, C1), f, C0)
    return times_power(y, n)


@inline
def exp2_fast(x):
    """2**x by the quadratic of `fixedpoint`, continuous at the octave: off by up to 0.27 %."""
    x = at_least(x, LOWEST)
    n = floor(x)
    g = subtract(subtract(n, x), -ONE)  # 2**x = 2**(n + 1) * 2**-g, g in (0, 1]
    return times_power(fma(fma(g, QB, -QA), g, ONE), subtract(n, -ONE))


@inline
def exp2_ultra(x):
    """2**floor(x), its variant "ultra".

    Up to 50 % too small, and every score within an octave weighs the same.
    """
    return times_power(ONE, floor(at_least(x, LOWEST)))


ALL_EXP2: dict[str, Callable] = {
    "accurate": exp2_accurate,
    "fast": exp2_fast,
    "ultra": exp2_ultra,
    "fexpa": make_fexpa("fexpa"),  # SVE's table of 64 steps: `isa.fexpa`
    "fexpa-quadratic": make_fexpa("fexpa-quadratic"),
}
EXP2 = {  # those of this machine
    name: function
    for name, function in ALL_EXP2.items()
    if not name.startswith("fexpa") or not target.missing("sve")
}
load_scores = make_load_block(1, LANES)
load_column, load_4x4 = make_load_block(ROWS, 1), make_load_block(ROWS, ROWS)


@functools.cache
def make_no_sums(columns: int):
    """Inline f() -> four rows of sums, 0."""
    zeros = make_zeros(columns)

    @inline
    def no_sums():
        return zeros(), zeros(), zeros(), zeros()

    return no_sums


@inline
def add_key(o, p, v):
    """o[i] + p[i] * v for the four rows: the rank-1 product of one key."""
    return fma(p[0], v, o[0]), fma(p[1], v, o[1]), fma(p[2], v, o[2]), fma(p[3], v, o[3])


@inline
def put_rows(sums, o, i, c):
    d = o.shape[1]
    put(sums[0], o, i * d + c)
    put(sums[1], o, (i + 1) * d + c)
    put(sums[2], o, (i + 2) * d + c)
    put(sums[3], o, (i + 3) * d + c)


@functools.cache
def make_gemm(columns: int = COLUMNS):
    """Kernel f(p, v, o): O = P @ V, p (M, Nc), v (Nc, D), o (M, D) float32.

    A load replicates each p.
    """
    no_sums, load_v = make_no_sums(columns), make_load(columns)

    @kernel
    def gemm(p, v, o):
        whole_registers()
        nc, d = v.shape
        for c in range(0, d, columns):
            for i in range(0, o.shape[0], ROWS):
                p0, p1, p2, p3 = p[i], p[i + 1], p[i + 2], p[i + 3]
                sums = no_sums()
                for k in range(nc):
                    sums = add_key(sums, (p0[k], p1[k], p2[k], p3[k]), load_v(v, k * d + c))
                put_rows(sums, o, i, c)

    return gemm


gemm = make_gemm()


@functools.cache
def make_exp2_rows(name: str):
    """Kernel f(s, scale, top, p): p (M, Nc) float32 = exp2(s * scale - top), s (M, Nc) int32.

    Sixteen scores at a time.
    """
    exp2 = ALL_EXP2[name]

    @kernel
    def exp2_rows(s, scale, top, p):
        whole_registers()
        for j in range(0, s.size, LANES):
            put(exp2(fma(load_scores(s, j, 0), scale, -top)), p, j)

    return exp2_rows


@functools.cache
def make_two_pass(name: str, columns: int = COLUMNS):
    """Kernel f(s, scale, top, v, p, o).

    p (M, Nc) float32 is scratch, and its final content is P.
    """
    exp2_rows, product = make_exp2_rows(name), make_gemm(columns)

    @kernel
    def two_pass(s, scale, top, v, p, o):
        exp2_rows(s, scale, top, p)
        product(p, v, o)

    return two_pass


@functools.cache
def make_weights(broadcast: str):
    """Inline f(w, p, first, step) -> four weights, from lanes first, first + step and so on.

    They are lanes of w, or are read from p, to which w was stored.
    """

    @inline
    def from_register(w, p, first, step):
        return (
            lane(w, first),
            lane(w, first + step),
            lane(w, first + 2 * step),
            lane(w, first + 3 * step),
        )

    @inline
    def from_memory(w, p, first, step):
        return p[first], p[first + step], p[first + 2 * step], p[first + 3 * step]

    return {"register": from_register, "memory": from_memory}[broadcast]


@functools.cache
def make_fused(name: str, broadcast: str, columns: int = COLUMNS):
    """Kernel f(s, scale, top, v, p, o): one key at a time.

    `p`, 16 float32 of scratch, serves broadcast "memory".
    """
    exp2, weights, through_memory = ALL_EXP2[name], make_weights(broadcast), broadcast == "memory"
    no_sums, load_v = make_no_sums(columns), make_load(columns)

    @kernel
    def fused(s, scale, top, v, p, o):
        whole_registers()
        nc, d = v.shape
        for c in range(0, d, columns):
            for i in range(0, o.shape[0], ROWS):
                sums = no_sums()
                for k in range(nc):
                    w = exp2(fma(load_column(s, i * nc + k, nc), scale, -top))
                    if through_memory:
                        put(w, p, 0)
                        keep_in_memory()
                    sums = add_key(sums, weights(w, p, 0, 1), load_v(v, k * d + c))
                put_rows(sums, o, i, c)

    return fused


@functools.cache
def make_fused4(name: str, broadcast: str, columns: int = COLUMNS):
    """Kernel f(s, scale, top, v, p, o): four keys at a time; arguments as those of `make_fused`."""
    exp2, weights, through_memory = ALL_EXP2[name], make_weights(broadcast), broadcast == "memory"
    no_sums, load_v = make_no_sums(columns), make_load(columns)

    @kernel
    def fused4(s, scale, top, v, p, o):
        whole_registers()
        nc, d = v.shape
        for c in range(0, d, columns):
            for i in range(0, o.shape[0], ROWS):
                sums = no_sums()
                for k in range(0, nc, 4):
                    w = exp2(fma(load_4x4(s, i * nc + k, nc), scale, -top))  # lane 4 * row + key
                    if through_memory:
                        put(w, p, 0)
                        keep_in_memory()
                    sums = add_key(sums, weights(w, p, 0, 4), load_v(v, k * d + c))
                    sums = add_key(sums, weights(w, p, 1, 4), load_v(v, (k + 1) * d + c))
                    sums = add_key(sums, weights(w, p, 2, 4), load_v(v, (k + 2) * d + c))
                    sums = add_key(sums, weights(w, p, 3, 4), load_v(v, (k + 3) * d + c))
                put_rows(sums, o, i, c)

    return fused4
