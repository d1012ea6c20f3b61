"""Register tiles of decode.

Few query rows against many cached keys, for every storage of the cache and every instruction set.

The query group of a KV head is the row dimension (FlashAttention 2's packing for grouped heads), so
each vector of K and V is read from memory once and multiplied with all rows in registers. The
layout of the cache is the layout that these tiles read in a straight line:

* K of a block of 128 keys: [panel][step][key in panel][group], `panel` = nv * lanes keys side by
  side, `group` channels per step.
* V of a block: [chunk of columns][step][column in chunk][group], `group` keys per step.
* A page of a head is the scales, K and V of its first block, then of the next: one straight line.
  Reading K, V and scales from arrays of their own halves the bandwidth, because the hardware's
  prefetching starts over at each turn.

A token is one lane of K and one byte lane of V, so appending it costs O(D). On VNNI keys are stored
with 128 added: they are the unsigned operand, the query the signed one, and 128 * sum(q) is taken
out by the first value of the sums, one number per row. On AArch64, whose dot instructions take
operands of one kind, the values are: 128 * (sum of the row's weights) is taken out likewise.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

from ...fixedpoint import T_LIMIT
from ...jit import target
from ...tiling import KEY_BLOCK
from ..isa.isas import VECTOR_ISAS
from ..isa.vectors import (
    F32,
    I8,
    I16,
    I32,
    I64,
    Isa,
    call,
    constant,
    in_order,
    load,
    pointer,
    prefetch,
    splat,
    store,
    vector,
)
from ..isa.vectors_arm import SVE_128
from ..isa.vectors_x86 import X86

PORTABLE = Isa("portable", 4, 1, 4, 0)
# The scratch of a tile: `work` (rows + 1, 128) int32, scores or weights of its rows and, in the
# last row, the state, one 32-bit number for each of up to 8 rows from these columns on; in front of
# them the ratios of the values, for float storage a row's sum.
ROWS = 8
RATIO, V_START, OCTAVE, SCALE, SHRINK, M, L, START, CQ = (
    0,
    *range(KEY_BLOCK - 8 * ROWS, KEY_BLOCK, ROWS),
)
HIDDEN = -(1 << 31)  # int32 log2 score of a key that is not seen
# Bytes of the straight line that are asked for ahead of the products. Intel's own prefetching falls
# behind wherever the products pause (softmax, a new page): without this, reads from memory run at
# 55 to 60 % of a plain sum's rate, with it at 75 to 90 % (Granite Rapids; 1 to 8 KB do about the
# same).
#
# Zen's keeps up by itself, and requests by instruction take its buffers: 56 to 82 % of a plain
# sum's rate, where the same products without them reach 94 % (D = 128, 4 rows, INT8, from memory).
# A skipped line stops it: leaving out the 16 lines of scales of 528 a block,
# or reading them after the keys, costs the products 30 %, a plain sum 16 %. Hence every line of the
# cache is read, in ascending order (`in_order`).
AHEAD = 4096


@dataclass(frozen=True)
class Tile:
    """How cached elements of one type are multiplied with the query in the registers of one
    instruction set.

    Attributes
    ----------
    isa : a name of `target.ISAS`
    dtype : "int8", "float32", "bfloat16" or "float16": the storage
    lanes, nv : lanes of a 32-bit vector; vectors side by side in a panel of keys or a chunk of
        columns
    group : elements that one step of a dot product adds into a lane
    q_offset : what is added to stored keys (128 where the dot instruction is unsigned x signed)
    v_offset : what is added to stored values (128 where it is unsigned x unsigned)
    ahead : bytes that the products prefetch ahead; 0 for none
    matrix : whether the products of INT8 take AMX's tiles, see `matrix_tiles`
    """

    isa: str
    dtype: str
    lanes: int
    nv: int
    group: int
    q_offset: int = 0
    v_offset: int = 0
    ahead: int = 0
    matrix: bool = False

    @property
    def panel(self) -> int:
        return self.nv * self.lanes

    @property
    def size(self) -> int:
        """Bytes of a stored element."""
        return {"int8": 1, "float32": 4}.get(self.dtype, 2)

    @property
    def scales(self) -> int:
        """Elements that the scales of a block take: float32 per key, and for INT8 per value."""
        return KEY_BLOCK * 4 // self.size * (2 if self.dtype == "int8" else 1)

    def block(self, channels: int, columns: int) -> int:
        """Elements of a block of 128 keys."""
        return KEY_BLOCK * (channels + columns) + self.scales

    @property
    def sums(self) -> ir.VectorType:
        return vector(I32 if self.dtype == "int8" else F32, self.lanes)

    @property
    def planes(self) -> int:
        """Operands of 8 bits that hold a query or a weight.

        Byte dot products take two, the high one first; wider products take it whole.
        """
        return 2 if self.dtype == "int8" and self.group == 4 else 1

    def width(self, rows: int) -> int:
        """Vectors side by side in a tile of `rows` rows, a divisor of nv.

        16 sums with 32 registers, else 8.
        """
        most = 16 if self.lanes == 16 else 8
        return max(n for n in (1, 2, 4) if n <= self.nv and (n == 1 or n * rows <= most))

    def many(self, b: ir.IRBuilder, base, index):
        """The operand of all lanes at element `index` of the cache."""
        if self.dtype == "float32":
            return in_order(load(b, base, index, self.sums, 4))
        if self.dtype == "int8":
            x = in_order(load(b, base, index, vector(I8, self.lanes * self.group), 1, 1))
            return (
                x
                if self.group == 4
                else b.sext(x, vector(I16 if self.group == 2 else I32, x.type.count))
            )
        x = in_order(load(b, base, index, vector(I16, self.lanes), 2))
        if self.dtype == "bfloat16":
            ints = vector(I32, self.lanes)
            return b.bitcast(b.shl(b.zext(x, ints), constant(ints, 16)), self.sums)
        return b.fpext(b.bitcast(x, vector(ir.HalfType(), self.lanes)), self.sums)

    def one(self, b: ir.IRBuilder, base, index):
        """The 32-bit word `index` of a row, in every lane."""
        if self.dtype != "int8":
            return splat(b, load(b, base, index, F32, 4), self.sums)
        x = splat(b, load(b, base, index, I32, 4, 1), self.sums)
        return (
            x
            if self.group == 1
            else b.bitcast(x, vector(I16 if self.group == 2 else I8, self.lanes * self.group))
        )

    def dot(self, b: ir.IRBuilder, acc, many, one, keys: bool):
        """acc + the products; `keys`: `many` is the unsigned operand, else `one` is."""
        if self.dtype != "int8":
            return call(b, f"llvm.fma.v{self.lanes}f32", self.sums, many, one, acc)
        if self.group == 1:
            return b.add(acc, b.mul(many, one))
        return (
            self.vectors.score_dot(b, acc, many, one)
            if keys
            else self.vectors.value_dot(b, acc, one, many)
        )

    @property
    def vectors(self) -> Isa:
        return SVE_128 if self.isa == "sve" else VECTOR_ISAS.get(self.isa, PORTABLE)

    @property
    def x86(self) -> bool:
        return isinstance(VECTOR_ISAS.get(self.isa), X86)

    def to_int(self, b: ir.IRBuilder, x):
        """float32 to int32, ties to even; NaN gives HIDDEN."""
        ints = vector(I32, self.lanes)
        if self.x86 and self.lanes == 16:
            return call(
                b, "llvm.x86.avx512.mask.cvtps2dq.512", ints, x, constant(ints, 0), I16(-1), I32(4)
            )
        if self.x86:
            return call(b, "llvm.x86.avx.cvt.ps2dq.256", ints, x)
        n = call(b, f"llvm.roundeven.v{self.lanes}f32", x.type, x)
        n = call(b, f"llvm.fptosi.sat.v{self.lanes}i32.v{self.lanes}f32", ints, n)
        return b.select(b.fcmp_unordered("uno", x, x), constant(ints, HIDDEN), n)

    def shift_right(self, b: ir.IRBuilder, x, n):
        """uint16 x >> n per lane; n of 16 or more gives 0."""
        if self.x86:
            return self.vectors.shift_right(b, x, n)
        small = b.icmp_unsigned("<", n, constant(n.type, 16))
        return b.select(
            small, b.lshr(x, b.select(small, n, constant(n.type, 0))), constant(n.type, 0)
        )


def tile(isa: str, dtype: str) -> Tile:
    """The tile of an INT8 instruction set; float storage takes its vector length.

    AArch64 takes 128-bit vectors.
    """
    isa = "avx512_vnni" if isa == "amx_int8" else isa  # the layout of the vectors: `matrix_tiles`
    if isa == "sve" and not target.missing("neon_dot"):
        isa = "neon_dot"
    zen = target.cpu_name().startswith("znver")
    reading: dict[str, Any] = {"ahead": 0 if zen else AHEAD}
    if isa in ("sve", "neon_dot") and dtype == "int8":
        return Tile(isa, dtype, 4, 4, 4, v_offset=128, **reading)
    found = VECTOR_ISAS.get(isa)
    if not isinstance(found, X86):
        return Tile("portable", dtype, 4, 4, 1, **reading)
    if dtype == "int8":
        return Tile(isa, dtype, found.lanes, found.nv, found.group, found.q_offset, **reading)
    return Tile(isa, dtype, found.lanes, found.nv, 1, **reading)


LOW_BITS = 7  # of a query or a weight in the low plane
LOW_PLANE = KEY_BLOCK * 4 // 2  # bytes from a row of weights to its low plane: half a row of `work`


class Walk(NamedTuple):
    """What the products of a tile read.

    one : address of the rows, `one_stride` words apart, their low plane `low` words behind
    many : address of the cached elements, `many_step` elements between two steps
    steps : one or more
    """

    one: ir.Value
    one_stride: ir.Value
    low: ir.Value
    many: ir.Value
    many_step: ir.Value
    steps: ir.Value


def _products(b, tile, walk, first, rows, nv, keys):
    """rows x nv sums in registers: products of all planes, added to `first`, one value a row."""
    start = [x for x in first for _ in range(nv)]
    if tile.planes == 1:
        return _plane(b, tile, walk, start, rows, nv, keys, tile.ahead)
    zero = constant(tile.sums, 0)
    sums = _plane(b, tile, walk, [zero] * len(start), rows, nv, keys, tile.ahead)
    shift = constant(tile.sums, LOW_BITS)
    sums = [b.add(b.shl(x, shift), y) for x, y in zip(sums, start, strict=True)]
    low = walk._replace(one=b.gep(walk.one, [b.mul(walk.low, I64(4))]))
    return _plane(b, tile, low, sums, rows, nv, keys, 0)


def _plane(b, tile, walk, first, rows, nv, keys, prefetched):
    """rows x nv sums over `steps` steps of one plane, from `first`.

    prefetched : bytes ahead that are asked for, 0 for none
    """
    one, one_stride, _, many, many_step, steps = walk
    entry = b.block
    loop = b.append_basic_block("dot")
    done = b.append_basic_block("dot.end")
    b.branch(loop)
    b.position_at_end(loop)
    n = b.phi(I64)
    n.add_incoming(I64(0), entry)
    sums = []
    for x in first:
        sums.append(b.phi(x.type))
        sums[-1].add_incoming(x, entry)
    place = b.mul(n, many_step)
    columns = [
        tile.many(b, many, b.add(place, I64(tile.lanes * tile.group * v))) for v in range(nv)
    ]
    for v in range(nv if prefetched else 0):
        ahead = b.add(
            b.mul(b.add(place, I64(tile.lanes * tile.group * v)), I64(tile.size)), I64(prefetched)
        )
        prefetch(b, b.gep(many, [ahead]))
    out = []
    for m in range(rows):
        word = tile.one(b, one, b.add(n, b.mul(one_stride, I64(m))))
        out += [tile.dot(b, sums[m * nv + v], columns[v], word, keys) for v in range(nv)]
    following = b.add(n, I64(1))
    n.add_incoming(following, loop)
    for phi, x in zip(sums, out, strict=True):
        phi.add_incoming(x, loop)
    b.cbranch(b.icmp_signed("<", following, steps), loop, done)
    b.position_at_end(done)
    return out


def state(rows: int, column: int):
    """The element of `work` that holds a number of the state."""
    return I64(rows * KEY_BLOCK + column)


@functools.cache
def score_tile(tile: Tile, rows: int):
    """Intrinsic f(q, words, k, scales, j, work).

    Scores of a block's keys from j on, `tile.width` vectors of them.

    Addresses: q rows of `tile.planes` planes of `words` words; k the first of these keys; scales
    (128,) float32; work, from which START and CQ are taken. INT8 writes work[row, j + n] =
    round(clip((float32(start + q.k) * scale) * cq)) as int32 Q8.8, HIDDEN where the scale is NaN;
    float storage writes (q.k) * cq as float32.
    """
    nv = tile.width(rows)

    @intrinsic
    def scores(typingctx, q, words, k, scales, j, work):
        sig = types.void(*[types.intp] * 6)

        def codegen(context, b, sig, a):
            target.guard(tile.isa, context.codegen())
            pq, pk, pck, pw = (pointer(b, a[i]) for i in (0, 2, 3, 5))
            floats = vector(F32, tile.lanes)
            exact = tile.dtype == "int8"
            first = [constant(tile.sums, 0.0)] * rows
            if exact:
                first = [
                    splat(b, load(b, pw, state(rows, START + m), I32, 4), tile.sums)
                    for m in range(rows)
                ]
            stride = b.mul(a[1], I64(tile.planes))
            walk = Walk(pq, stride, a[1], pk, I64(tile.panel * tile.group), a[1])
            sums = _products(b, tile, walk, first, rows, nv, True)
            if exact:
                key_scale = [
                    load(b, pck, b.add(a[4], I64(tile.lanes * v)), floats, 4) for v in range(nv)
                ]
            for m in range(rows):
                row_scale = splat(b, load(b, pw, state(rows, CQ + m), F32, 4), floats)
                for v in range(nv):
                    x = sums[m * nv + v]
                    if exact:
                        x = rounded_scores(b, tile, b.sitofp(x, floats), key_scale[v], row_scale)
                    else:
                        x = b.fmul(x, row_scale)
                    store(b, x, pw, b.add(a[4], I64(m * KEY_BLOCK + tile.lanes * v)), 4)
            return context.get_dummy_value()

        return sig, codegen

    return scores


def rounded_scores(b, tile: Tile, x, key_scale, row_scale):
    """float32 sums to int32 Q8.8 scores, HIDDEN where the key's scale is NaN."""
    return tile.to_int(b, _limit(b, b.fmul(b.fmul(x, key_scale), row_scale)))


def _limit(b, x):
    """Scores cut at +-T_LIMIT; NaN stays NaN."""
    for sign, test in ((1.0, ">"), (-1.0, "<")):
        bound = constant(x.type, sign * float(T_LIMIT))
        x = b.select(b.fcmp_ordered(test, x, bound), bound, x)
    return x


@functools.cache
def value_tile(tile: Tile, rows: int, nv: int):
    """Intrinsic f(work, v, step, steps, o, column, columns).

    o[rows, column + nv * lanes] += (P.V) * scale.

    Addresses: work, of the weights P and SCALE; v the first of these columns, `step`
    elements between two steps of it; o, rows of `columns` float32. INT8 multiplies and adds in
    float32, each rounded, and where values are stored with an offset its sums begin with V_START;
    float storage starts its sums from o and takes no scale.
    """

    @intrinsic
    def values(typingctx, work, v, step, steps, o, column, columns):
        sig = types.void(*[types.intp] * 7)

        def codegen(context, b, sig, a):
            target.guard(tile.isa, context.codegen())
            pw, pv, po = (pointer(b, a[i]) for i in (0, 1, 4))
            floats = vector(F32, tile.lanes)
            exact = tile.dtype == "int8"
            where = [
                b.add(b.add(a[5], b.mul(a[6], I64(m))), I64(tile.lanes * n))
                for m in range(rows)
                for n in range(nv)
            ]
            walk = Walk(pw, I64(KEY_BLOCK), I64(LOW_PLANE // 4), pv, a[2], a[3])
            if exact:
                first = [constant(tile.sums, 0)] * rows
                if tile.v_offset:
                    first = [
                        splat(b, load(b, pw, state(rows, V_START + m), I32, 4), tile.sums)
                        for m in range(rows)
                    ]
                sums = _products(b, tile, walk, first, rows, nv, False)
            else:
                before = [load(b, po, w, floats, 4) for w in where]
                sums = _plane(b, tile, walk, before, rows, nv, False, tile.ahead)
            for i, (w, x) in enumerate(zip(where, sums, strict=True)):
                if exact:
                    s = splat(b, load(b, pw, state(rows, SCALE + i // nv), F32, 4), floats)
                    x = b.fadd(load(b, po, w, floats, 4), b.fmul(b.sitofp(x, floats), s))
                store(b, x, po, w, 4)
            return context.get_dummy_value()

        return sig, codegen

    return values
