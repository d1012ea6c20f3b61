"""Register tiles and row operations of the floating-point kernels, written once for every vector
length.

Contract (A rows of operands, B packed or in place, `steps` steps of `group` products each):

* `score_tile`: x[rows, nv * lanes] = A.B, float32; the factor of the scores comes with the softmax.
* `value_tile`: o[rows, nv * lanes] += A.B, float32.
* `row_max`, `row_exp`, `row_softcap`, ...: one row of scores, whole vectors at a time.

Everything but the bfloat16 dot product and SVE's exp2 is plain LLVM IR on vectors, so the same
source serves AVX-512, AVX2, NEON and SVE. NaN is kept on purpose: comparisons are written so that a
NaN score stays NaN and reaches the row sum.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..isa.dot_loop import dot_loop
from ..isa.fexpa import exponential
from ..isa.vectors import (
    F32,
    I8,
    I16,
    I32,
    I64,
    Vectors,
    call,
    compare,
    data,
    load,
    shuffle,
    store,
    vector,
)
from ..isa.vectors_arm import ScalableVectors
from . import amx_bfloat16

LOG2E = 1.4426950408889634
MR = 6  # rows of the register tiles of vectors


@dataclass(frozen=True)
class FloatIsa(Vectors):
    """Vectors of one target.

    Attributes
    ----------
    lanes : float32 sums of a vector
    nv : vectors side by side in a register tile, at most
    group : products per lane and instruction: 1 float32, or 2 bfloat16 (vdpbf16ps)
    rows : rows of a register tile
    step : products that a tile takes at a time; channels are padded to whole steps, and so are the
        keys that P.V takes
    unit : keys that a tile of scores is wide at least
    """

    nv: int
    group: int = 1
    rows: int = MR
    step: int = 0
    unit: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", self.step or self.group)
        object.__setattr__(self, "unit", self.unit or self.lanes)

    @property
    def operand(self) -> ir.Type:
        return self.floats if self.group == 1 else vector(I16, 2 * self.lanes)

    @property
    def panel(self) -> int:
        """Keys of one packed panel of K."""
        return self.nv * self.lanes

    @property
    def square(self) -> int:
        """Rows and columns that packing transposes at a time."""
        return self.lanes

    @property
    def floats(self) -> ir.Type:
        return self.vector(F32)

    def dot(self, b, acc, x, y):
        """acc[lane] + the sum over the group of x * y."""
        if self.group == 1:
            return self.fma(b, x, y, acc)
        pairs = vector(I32, self.lanes) if NO_BFLOAT else vector(BF16, 2 * self.lanes)
        x, y = (b.bitcast(z, pairs) for z in (x, y))
        return call(b, f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.lanes}", self.floats, acc, x, y)

    def fma(self, b, x, y, z):
        return self.generic(b, "fma", x, y, z)

    def top(self, b, x):
        """float32: the largest lane of a vector without NaN."""
        return fold(b, x, larger)

    def any_set(self, b, x):
        """Whether any lane of a vector of truth values or bytes is not 0."""
        bits = ir.IntType(self.lanes * (x.type.element.width))
        return b.icmp_unsigned("!=", b.bitcast(x, bits), ir.Constant(bits, 0))


@dataclass(frozen=True)
class SveFloats(ScalableVectors, FloatIsa):
    """SVE's scalable vectors, of `lanes` lanes where `length_known`.

    Packing and buffers are laid out for that length, so a machine with another one must not run the
    code (`jit.target` lets none). `"sve"`, whose length is read when the code runs, serves the INT8
    kernel, which has its own layout: its `value_tile` alone.
    """

    length_known: bool = True

    @property
    def square(self) -> int:
        return 4  # a NEON register

    def elements(self, b, n: int):
        return I64(n * self.lanes) if self.length_known else super().elements(b, n)

    def top(self, b, x):
        return self.reduce(b, "fmax", x, F32)

    def any_set(self, b, x):
        element = x.type.element
        found = call(b, f"llvm.vector.reduce.or.nxv{x.type.count}{element}", element, x)
        return b.icmp_unsigned("!=", found, ir.Constant(element, 0))


class _BFloat16(ir.Type):
    """LLVM's `bfloat`, which llvmlite does not name."""

    def __str__(self) -> str:
        return "bfloat"

    def __hash__(self) -> int:
        return hash(_BFloat16)


BF16 = _BFloat16()
NO_BFLOAT = llvm.llvm_version_info < (
    16,
)  # the instructions were declared for integers: int32 lanes of pairs, int16 lanes


FLOAT_ISAS = {
    isa.name: isa
    for isa in (
        FloatIsa("amx_bf16", 16, 4, 2, rows=32, step=32, unit=32),
        FloatIsa("avx512_bf16", 16, 4, 2),
        FloatIsa("avx512", 16, 4),
        FloatIsa("avx2", 8, 2),
        SveFloats("sve512", 16, 4),
        SveFloats("sve256", 8, 4),
        SveFloats("sve", 4, 4, length_known=False),
        FloatIsa("neon", 4, 4),
    )
}


@functools.cache
def score_tile(name: str, nv: int, scaled: bool = False):
    """Intrinsic f(q, q_off, q_stride, k, k_off, steps, x, x_off, x_stride).

    `k` in panels of the full width.

    `scaled` (of vectors only): f(..., steps, c, x, x_off, x_stride), x = (A.B) * c.
    """
    isa = FLOAT_ISAS[name]
    if name == "amx_bf16":
        return amx_bfloat16.score_tile(isa, nv)

    def codegen(context, b, sig, a):
        end = len(a)
        pq, pk, px = (data(context, b, sig.args[n], a[n]) for n in (0, 3, end - 3))
        zero = [isa.fill(b, isa.floats, 0.0)] * (isa.rows * nv)
        c = isa.splat(b, a[6], isa.floats) if scaled else None
        rows = dot_loop(
            b,
            isa,
            isa.dot,
            pq,
            a[1],
            a[2],
            pk,
            a[4],
            a[5],
            zero,
            isa.rows,
            nv,
            isa.elements(b, isa.nv * isa.group),
        )
        for m, acc in enumerate(rows):
            for n in range(nv):
                where = b.add(b.add(a[end - 2], b.mul(a[end - 1], I64(m))), isa.elements(b, n))
                store(b, b.fmul(acc[n], c) if scaled else acc[n], px, where, 4)
        return context.get_dummy_value()

    @intrinsic
    def tile(typingctx, q, q_off, q_stride, k, k_off, steps, x, x_off, x_stride):
        return types.void(q, q_off, q_stride, k, k_off, steps, x, x_off, x_stride), codegen

    @intrinsic
    def scaled_tile(typingctx, q, q_off, q_stride, k, k_off, steps, c, x, x_off, x_stride):
        return types.void(q, q_off, q_stride, k, k_off, steps, c, x, x_off, x_stride), codegen

    return scaled_tile if scaled else tile


@functools.cache
def value_tile(name: str, nv: int):
    """Intrinsic f(p, p_off, p_stride, v, v_off, v_stride, steps, o, o_off, o_stride)."""
    isa = FLOAT_ISAS[name]
    if name == "amx_bf16":
        return amx_bfloat16.value_tile(isa, nv)

    @intrinsic
    def tile(typingctx, p, p_off, p_stride, v, v_off, v_stride, steps, o, o_off, o_stride):
        sig = types.void(p, p_off, p_stride, v, v_off, v_stride, steps, o, o_off, o_stride)

        def codegen(context, b, sig, a):
            pp, pv, po = (data(context, b, sig.args[n], a[n]) for n in (0, 3, 7))
            where = [
                b.add(b.add(a[8], b.mul(a[9], I64(m))), isa.elements(b, n))
                for m in range(isa.rows)
                for n in range(nv)
            ]
            first = [load(b, po, w, isa.floats, 4) for w in where]
            for m, acc in enumerate(
                dot_loop(b, isa, isa.dot, pp, a[1], a[2], pv, a[4], a[6], first, isa.rows, nv, a[5])
            ):
                for n in range(nv):
                    store(b, acc[n], po, where[m * nv + n], 4)
            return context.get_dummy_value()

        return sig, codegen

    return tile


def for_vectors(b, count, lanes, state, body):
    """`for n in range(count)`: body(offset in elements, state) -> state; returns the last state.

    No turn if count is 0.

    The test is at the loop's head, so that LLVM unrolls the loop: with `vectors.repeat` float32
    attention takes 5 to 25 % longer.
    """
    entry = b.block
    head, turn, done = (b.append_basic_block(part) for part in ("row", "row.turn", "row.end"))
    b.branch(head)
    b.position_at_end(head)
    n = b.phi(I64)
    n.add_incoming(I64(0), entry)
    phis = []
    for x in state:
        phis.append(b.phi(x.type))
        phis[-1].add_incoming(x, entry)
    b.cbranch(compare(b, "icmp_signed", "<", n, count), turn, done)
    b.position_at_end(turn)
    after = body(b.mul(n, I64(lanes)), phis)
    n.add_incoming(b.add(n, I64(1)), b.block)
    for phi, x in zip(phis, after, strict=True):
        phi.add_incoming(x, b.block)
    b.branch(head)
    b.position_at_end(done)
    return phis


def larger(b, x, bound):
    """max(x, bound) that keeps a NaN in x."""
    return b.select(compare(b, "fcmp_ordered", "<", x, bound), bound, x)


# 2**f on [-1/2, 1/2], minimax in relative error with the constant fixed at 1: 9.2e-8
EXP2 = (
    1.0,
    0.6931470036506653,
    0.24022242426872253,
    0.05550733953714371,
    0.009671512991189957,
    0.0013264714507386088,
)
LOWEST = -150.0  # 2**LOWEST is 0 in float32
# the same on [0, 1): 8.2e-8
EXP2_FLOOR = (
    1.0,
    0.6931513118066539,
    0.24016445012995594,
    0.05579991319565182,
    0.009017030193706534,
    0.0018671301307139631,
)


def polynomial(b, isa, coefficients, f):
    """c0 + c1 * f + c2 * f**2 + ..., by Horner's rule."""
    y = isa.fill(b, isa.floats, coefficients[-1])
    for c in coefficients[-2::-1]:
        y = isa.fma(b, y, f, isa.fill(b, isa.floats, c))
    return y


def whole(b, isa, n):
    """A whole float32 number as int32, within its range; NaN becomes 0.

    (fptosi.sat promises as much, and works lane by lane.)
    """
    return b.fptosi(
        b.select(compare(b, "fcmp_ordered", "ord", n, n), n, isa.fill(b, isa.floats, 0.0)),
        isa.vector(I32),
    )


def exp2(b, isa, x):
    """2**x per lane, x <= 127; -inf gives 0 and NaN stays NaN.

    No denormals by AVX-512 (they cost 150 cycles each on Intel) and SVE (FEXPA has none).
    """
    if isa.scalable:
        return exponential(b, isa, x)
    if isa.lanes == 16:
        return exp2_avx512(b, isa, x)
    x = larger(b, x, isa.fill(b, isa.floats, LOWEST))
    n = isa.generic(b, "roundeven", x)
    y = polynomial(b, isa, EXP2, b.fsub(x, n))
    ints = isa.vector(I32)
    n = b.add(whole(b, isa, n), isa.fill(b, ints, 127))
    power = b.bitcast(b.shl(n, isa.fill(b, ints, 23)), isa.floats)
    return b.select(
        compare(b, "icmp_signed", "<", n, isa.fill(b, ints, 1)),
        b.fmul(y, isa.fill(b, isa.floats, 0.0)),
        b.fmul(y, power),
    )


def exp2_avx512(b, isa, x):
    """vreduceps: x - floor(x), of infinity 0; vscalefps.

    y * 2**floor(x), 0 where x is below the normal numbers.
    """
    zero = isa.fill(b, isa.floats, 0.0)
    down = I32(9)
    f = call(b, "llvm.x86.avx512.mask.reduce.ps.512", isa.floats, x, down, zero, I16(-1), I32(4))
    normal = b.bitcast(compare(b, "fcmp_unordered", ">=", x, isa.fill(b, isa.floats, -126.0)), I16)
    return call(
        b,
        "llvm.x86.avx512.mask.scalef.ps.512",
        isa.floats,
        polynomial(b, isa, EXP2_FLOOR, f),
        x,
        zero,
        normal,
        I32(4),
    )


def fold(b, x, combine):
    """All lanes of a vector combined into one scalar, halves first."""
    while x.type.count > 1:
        half = x.type.count // 2
        x = combine(
            b, shuffle(b, x, x, list(range(half))), shuffle(b, x, x, list(range(half, 2 * half)))
        )
    return b.extract_element(x, I32(0))


@functools.cache
def row_max(name: str):
    """Intrinsic f(x, x_off, count) -> the largest score of `count` vectors; NaN does not count."""
    isa = FLOAT_ISAS[name]

    @intrinsic
    def largest(typingctx, x, x_off, count):
        def codegen(context, b, sig, a):
            px = data(context, b, sig.args[0], a[0])

            def body(at, state):
                return [larger(b, state[0], load(b, px, b.add(a[1], at), isa.floats, 4))]

            (top,) = for_vectors(b, a[2], isa.lanes, [isa.fill(b, isa.floats, float("-inf"))], body)
            return isa.top(b, top)

        return types.float32(x, x_off, count), codegen

    return largest


@functools.cache
def row_exceeds(name: str):
    """Intrinsic f(x, x_off, count, c, bound) -> whether any score times c of a row is above the
    bound, or NaN.
    """
    isa = FLOAT_ISAS[name]

    @intrinsic
    def exceeds(typingctx, x, x_off, count, c, bound):
        def codegen(context, b, sig, a):
            px = data(context, b, sig.args[0], a[0])
            c = isa.splat(b, a[3], isa.floats)
            bound = isa.splat(b, a[4], isa.floats)

            def body(at, state):
                return [
                    b.or_(
                        state[0],
                        compare(
                            b,
                            "fcmp_unordered",
                            ">",
                            b.fmul(load(b, px, b.add(a[1], at), isa.floats, 4), c),
                            bound,
                        ),
                    )
                ]

            none = ir.Constant(isa.vector(ir.IntType(1)), None)
            (above,) = for_vectors(b, a[2], isa.lanes, [none], body)
            return isa.any_set(b, above)

        return types.boolean(x, x_off, count, c, bound), codegen

    return exceeds


def _weigh(context, b, isa, sig, a, change):
    """p = 2**change(x), as operands of `value_tile`, and l, one vector, += p.

    The last four arguments are p, p_off, l, l_off.
    """
    end = len(a)
    px, pp, pl = (data(context, b, sig.args[n], a[n]) for n in (0, end - 4, end - 2))

    def body(at, state):
        x = change(load(b, px, b.add(a[1], at), isa.floats, 4))
        y = exp2(b, isa, x)
        store(
            b, y if isa.group == 1 else narrow(b, isa, y), pp, b.add(a[end - 3], at), 4 // isa.group
        )
        return [b.fadd(state[0], y)]

    (total,) = for_vectors(b, a[2], isa.lanes, [load(b, pl, a[end - 1], isa.floats, 4)], body)
    store(b, total, pl, a[end - 1], 4)
    return context.get_dummy_value()


@functools.cache
def row_exp(name: str):
    """Intrinsic f(x, x_off, count, m, p, p_off, l, l_off).

    p = 2**(x - m), as operands of `value_tile`; l, one vector, += p.
    """
    isa = FLOAT_ISAS[name]

    @intrinsic
    def weights(typingctx, x, x_off, count, m, p, p_off, l, l_off):
        def codegen(context, b, sig, a):
            m = isa.splat(b, a[3], isa.floats)
            return _weigh(context, b, isa, sig, a, lambda x: b.fsub(x, m))

        return types.void(x, x_off, count, m, p, p_off, l, l_off), codegen

    return weights


@functools.cache
def row_weights(name: str):
    """Intrinsic f(x, x_off, count, c, m, p, p_off, l, l_off).

    `row_exp` of scores that still lack their factor: 2**(x * c - m).
    """
    isa = FLOAT_ISAS[name]

    @intrinsic
    def weights(typingctx, x, x_off, count, c, m, p, p_off, l, l_off):
        def codegen(context, b, sig, a):
            c = isa.splat(b, a[3], isa.floats)
            below = isa.splat(b, b.fneg(a[4]), isa.floats)
            return _weigh(context, b, isa, sig, a, lambda x: isa.fma(b, x, c, below))

        return types.void(x, x_off, count, c, m, p, p_off, l, l_off), codegen

    return weights


def narrow(b, isa, x):
    """float32 to bfloat16, ties to even."""
    x = call(
        b,
        f"llvm.x86.avx512bf16.cvtneps2bf16.{32 * isa.lanes}",
        vector(I16 if NO_BFLOAT else BF16, isa.lanes),
        x,
    )
    return b.bitcast(x, vector(I16, isa.lanes))


def row_change(name: str, more: int, change):
    """Intrinsic f(x, x_off, count, ...) of `more` (1 or 2) arguments.

    x = change(context, b, isa, sig, args, x, offset).
    """
    isa = FLOAT_ISAS[name]

    def codegen(context, b, sig, a):
        px = data(context, b, sig.args[0], a[0])

        def body(at, state):
            where = b.add(a[1], at)
            store(
                b,
                change(context, b, isa, sig, a, load(b, px, where, isa.floats, 4), at),
                px,
                where,
                4,
            )
            return []

        for_vectors(b, a[2], isa.lanes, [], body)
        return context.get_dummy_value()

    @intrinsic
    def with_one(typingctx, x, x_off, count, y):
        return types.void(x, x_off, count, y), codegen

    @intrinsic
    def with_two(typingctx, x, x_off, count, y, z):
        return types.void(x, x_off, count, y, z), codegen

    return with_one if more == 1 else with_two


@functools.cache
def row_scale(name: str):
    """Intrinsic f(x, x_off, count, c): x *= c."""

    def change(context, b, isa, sig, a, x, at):
        return b.fmul(x, isa.splat(b, a[3], isa.floats))

    return row_change(name, 1, change)


@functools.cache
def row_softcap(name: str, hidden: bool = False):
    """Intrinsic f(x, x_off, count, cap): x = cap * tanh(x / cap), exact also where x is small.

    hidden : -inf stays -inf
    """

    def change(context, b, isa, sig, a, x, at):
        cap = isa.splat(b, a[3], isa.floats)
        part = isa.splat(b, b.fdiv(F32(1.0), a[3]), isa.floats)
        sign = isa.vector(I32)
        bits = b.bitcast(b.fmul(x, part), sign)
        magnitude = b.bitcast(b.and_(bits, isa.fill(b, sign, 0x7FFFFFFF)), isa.floats)
        y = b.fmul(magnitude, isa.fill(b, isa.floats, 2 * LOG2E))
        y = b.select(
            compare(b, "fcmp_ordered", ">", y, isa.fill(b, isa.floats, 30.0)),
            isa.fill(b, isa.floats, 30.0),
            y,
        )
        n = isa.generic(b, "roundeven", y)
        f = b.fsub(y, n)
        g = polynomial(b, isa, EXP2[1:], f)
        power = b.bitcast(
            b.shl(b.add(whole(b, isa, n), isa.fill(b, sign, 127)), isa.fill(b, sign, 23)),
            isa.floats,
        )
        e = isa.fma(b, b.fmul(f, g), power, b.fsub(power, isa.fill(b, isa.floats, 1.0)))  # 2**y - 1
        t = b.fdiv(e, b.fadd(e, isa.fill(b, isa.floats, 2.0)))
        t = b.or_(b.bitcast(t, sign), b.and_(bits, isa.fill(b, sign, -0x80000000)))
        capped = b.fmul(cap, b.bitcast(t, isa.floats))
        if not hidden:
            return capped
        lowest = isa.fill(b, isa.floats, float("-inf"))
        return b.select(compare(b, "fcmp_ordered", "==", x, lowest), lowest, capped)

    return row_change(name, 1, change)


@functools.cache
def row_alibi(name: str):
    """Intrinsic f(x, x_off, count, slope, centre): x -= slope * |centre - column|."""

    def change(context, b, isa, sig, a, x, at):
        ints = isa.vector(I32)
        column = b.add(isa.splat(b, b.trunc(at, I32), ints), isa.index(b))
        away = b.sub(isa.splat(b, b.trunc(a[4], I32), ints), column)
        away = b.select(
            compare(b, "icmp_signed", "<", away, isa.fill(b, ints, 0)),
            b.sub(isa.fill(b, ints, 0), away),
            away,
        )
        return isa.fma(b, b.fneg(isa.splat(b, a[3], isa.floats)), b.sitofp(away, isa.floats), x)

    return row_change(name, 2, change)


@functools.cache
def row_bias(name: str):
    """Intrinsic f(x, x_off, count, bias, off): x += bias * log2(e).

    a bias of -inf hides even a NaN.
    """

    def change(context, b, isa, sig, a, x, at):
        bias = load(b, data(context, b, sig.args[3], a[3]), b.add(a[4], at), isa.floats, 4)
        hidden = isa.fill(b, isa.floats, float("-inf"))
        return b.select(
            compare(b, "fcmp_ordered", "==", bias, hidden),
            hidden,
            isa.fma(b, bias, isa.fill(b, isa.floats, LOG2E), x),
        )

    return row_change(name, 2, change)


@functools.cache
def row_mask(name: str):
    """Intrinsic f(x, x_off, count, mask, off): x = -inf where the uint8 mask is 0."""

    def change(context, b, isa, sig, a, x, at):
        seen = load(b, data(context, b, sig.args[3], a[3]), b.add(a[4], at), isa.vector(I8), 1)
        return b.select(
            compare(b, "icmp_unsigned", "!=", seen, isa.fill(b, seen.type, 0)),
            x,
            isa.fill(b, isa.floats, float("-inf")),
        )

    return row_change(name, 2, change)


@functools.cache
def any_byte(name: str):
    """Intrinsic f(mask, off, count) -> whether any byte of `count` vectors is not 0."""
    isa = FLOAT_ISAS[name]

    @intrinsic
    def found(typingctx, mask, off, count):
        def codegen(context, b, sig, a):
            pm = data(context, b, sig.args[0], a[0])
            bytes_ = isa.vector(I8)

            def body(at, state):
                return [b.or_(state[0], load(b, pm, b.add(a[1], at), bytes_, 1))]

            (seen,) = for_vectors(b, a[2], isa.lanes, [isa.fill(b, bytes_, 0)], body)
            return isa.any_set(b, seen)

        return types.boolean(mask, off, count), codegen

    return found
