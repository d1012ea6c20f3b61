"""Register tiles of decode: few query rows against many cached keys, for every storage of the cache and every instruction set.

The query group of a KV head is the row dimension (FlashAttention 2's packing for grouped heads), so each vector of K and V is read
from memory once and meets all rows in registers. The layout of the cache is the layout that these tiles read in a straight line:

* K of a block of 128 keys: [panel][step][key in panel][group], `panel` = nv * lanes keys side by side, `group` channels per step.
* V of a block: [chunk of columns][step][column in chunk][group], `group` keys per step.
* A page of a head is K, the scales and V of its first block, then of the next: one straight line. Reading K, V and scales from
  arrays of their own halves the bandwidth, because the hardware's prefetching starts over at each turn.

A token is one lane of K and one byte lane of V, so appending it costs O(D). On VNNI keys are stored with 128 added: they are the
unsigned operand, the query the signed one, and 128 * sum(q) is taken out by the first value of the sums, one number per row. On
AArch64, whose dot instructions take operands of one kind, the values are: 128 * (sum of the row's weights) is taken out likewise.
"""
from __future__ import annotations

import functools
from dataclasses import dataclass

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

from ..fixedpoint import MIN_OCTAVE, P_A, P_B, P_WIDE, T_LIMIT
from ..tiling import KEY_BLOCK
from . import target
from .isas import VECTOR_ISAS
from .vectors import F32, I8, I16, I32, I64, Isa, call, constant, data, load, prefetch, shuffle, splat, store, vector
from .vectors_arm import SVE_128
from .vectors_x86 import X86

HIDDEN = -(1 << 31)                              # int32 log2 score of a key that is not seen
# Bytes of the straight line that are asked for ahead of the products. Intel's own prefetching falls behind wherever the products
# pause (softmax, a new page): without this, reads from memory run at 55 to 60 % of a plain sum's rate, with it at 75 to 90 %
# (Granite Rapids; 1 to 8 KB do about the same). Zen's does not, and requests by instruction wait for the same buffers as its own:
# 70 and 88 % (INT8, float32) without, 59 and 63 % with them (Zen 4; 0.5 to 32 KB, into either cache, or in the pauses alone: none
# is better).
AHEAD = 4096


@dataclass(frozen=True)
class Tile:
    """How cached elements of one type meet the query in the registers of one instruction set.

    Attributes
    ----------
    isa : a name of `target.ISAS`
    dtype : "int8", "float32", "bfloat16" or "float16": the storage
    lanes, nv : lanes of a 32-bit vector; vectors side by side in a panel of keys or a chunk of columns
    group : elements that one step of a dot product adds into a lane
    q_offset : what is added to stored keys (128 where the dot instruction is unsigned x signed)
    v_offset : what is added to stored values (128 where it is unsigned x unsigned)
    ahead : bytes that the products prefetch ahead; 0 for none
    """

    isa: str
    dtype: str
    lanes: int
    nv: int
    group: int
    q_offset: int = 0
    v_offset: int = 0
    ahead: int = 0

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

    def width(self, rows: int) -> int:
        """Vectors side by side in a tile of `rows` rows, a divisor of nv: 16 sums with 32 registers, else 8."""
        most = 16 if self.lanes == 16 else 8
        return max(n for n in (1, 2, 4) if n <= self.nv and (n == 1 or n * rows <= most))

    def many(self, b: ir.IRBuilder, base, index):
        """The operand of all lanes at element `index` of the cache."""
        if self.dtype == "float32":
            return load(b, base, index, self.sums, 4)
        if self.dtype == "int8":
            x = load(b, base, index, vector(I8, self.lanes * self.group), 1, 1)
            return x if self.group == 4 else b.sext(x, vector(I16 if self.group == 2 else I32, x.type.count))
        x = load(b, base, index, vector(I16, self.lanes), 2)
        if self.dtype == "bfloat16":
            ints = vector(I32, self.lanes)
            return b.bitcast(b.shl(b.zext(x, ints), constant(ints, 16)), self.sums)
        return b.fpext(b.bitcast(x, vector(ir.HalfType(), self.lanes)), self.sums)

    def one(self, b: ir.IRBuilder, base, index):
        """The 32-bit word `index` of a row, in every lane."""
        if self.dtype != "int8":
            return splat(b, load(b, base, index, F32, 4), self.sums)
        x = splat(b, load(b, base, index, I32, 4, 1), self.sums)
        return x if self.group == 1 else b.bitcast(x, vector(I16 if self.group == 2 else I8, self.lanes * self.group))

    def dot(self, b: ir.IRBuilder, acc, many, one, keys: bool):
        """acc + the products; `keys`: `many` is the unsigned operand, else `one` is."""
        if self.dtype != "int8":
            return call(b, f"llvm.fma.v{self.lanes}f32", self.sums, many, one, acc)
        if self.group == 1:
            return b.add(acc, b.mul(many, one))
        return self.vectors.score_dot(b, acc, many, one) if keys else self.vectors.value_dot(b, acc, one, many)

    @property
    def vectors(self) -> Isa:
        return SVE_128 if self.isa == "sve" else VECTOR_ISAS[self.isa]

    @property
    def x86(self) -> bool:
        return isinstance(VECTOR_ISAS.get(self.isa), X86)

    def to_int(self, b: ir.IRBuilder, x):
        """float32 to int32, ties to even; NaN gives HIDDEN."""
        ints = vector(I32, self.lanes)
        if self.x86 and self.lanes == 16:
            return call(b, "llvm.x86.avx512.mask.cvtps2dq.512", ints, x, constant(ints, 0), I16(-1), I32(4))
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
        return b.select(small, b.lshr(x, b.select(small, n, constant(n.type, 0))), constant(n.type, 0))


def tile(isa: str, dtype: str) -> Tile:
    """The tile of an INT8 instruction set; float storage takes its vector length. AArch64 takes 128-bit vectors."""
    isa = "avx512_vnni" if isa == "amx_int8" else isa                  # a few query rows fill no matrix tile
    if isa == "sve" and not target.missing("neon_dot"):
        isa = "neon_dot"
    ahead = 0 if target.cpu_name().startswith("znver") else AHEAD
    if isa in ("sve", "neon_dot") and dtype == "int8":
        return Tile(isa, dtype, 4, 4, 4, v_offset=128, ahead=ahead)
    found = VECTOR_ISAS.get(isa)
    if not isinstance(found, X86):
        return Tile("portable", dtype, 4, 4, 1, ahead=ahead)
    if dtype == "int8":
        return Tile(isa, dtype, found.lanes, found.nv, found.group, found.q_offset, ahead=ahead)
    return Tile(isa, dtype, found.lanes, found.nv, 1, ahead=ahead)


def _products(b, tile, one, one_off, one_stride, many, many_off, many_step, steps, first, rows, nv, keys):
    """rows x nv sums in registers over `steps` steps, from `first`; no step if there is none."""
    entry, loop, done = b.block, b.append_basic_block("dot"), b.append_basic_block("dot.end")
    b.cbranch(b.icmp_signed("<", I64(0), steps), loop, done)
    b.position_at_end(loop)
    n = b.phi(I64)
    n.add_incoming(I64(0), entry)
    sums = []
    for x in first:
        sums.append(b.phi(x.type))
        sums[-1].add_incoming(x, entry)
    place = b.add(many_off, b.mul(n, many_step))
    columns = [tile.many(b, many, b.add(place, I64(tile.lanes * tile.group * v))) for v in range(nv)]
    for v in range(nv if tile.ahead else 0):
        ahead = b.add(b.mul(b.add(place, I64(tile.lanes * tile.group * v)), I64(tile.size)), I64(tile.ahead))
        prefetch(b, b.gep(many, [ahead]))
    out = []
    for m in range(rows):
        word = tile.one(b, one, b.add(b.add(one_off, n), b.mul(one_stride, I64(m))))
        out += [tile.dot(b, sums[m * nv + v], columns[v], word, keys) for v in range(nv)]
    following = b.add(n, I64(1))
    n.add_incoming(following, loop)
    for phi, x in zip(sums, out, strict=True):
        phi.add_incoming(x, loop)
    b.cbranch(b.icmp_signed("<", following, steps), loop, done)
    b.position_at_end(done)
    result = []
    for x, y in zip(first, out, strict=True):
        result.append(b.phi(x.type))
        result[-1].add_incoming(x, entry)
        result[-1].add_incoming(y, loop)
    return result


@functools.cache
def score_tile(tile: Tile, rows: int):
    """Intrinsic f(q, stride, k, k_off, steps, start, ck, j, cq, t, column): scores of one panel's next `tile.width` vectors.

    q rows of `stride` words; start (rows,) int32; ck float32 from `j` on; cq (rows,) float32. INT8 writes
    t[row, column + n] = round(clip((float32(start + q.k) * ck) * cq)) as int32 Q8.8, HIDDEN where ck is NaN; float storage writes
    (q.k) * cq as float32.
    """
    nv = tile.width(rows)

    @intrinsic
    def scores(typingctx, q, stride, k, k_off, steps, start, ck, j, cq, t, column):
        sig = types.void(q, stride, k, k_off, steps, start, ck, j, cq, t, column)

        def codegen(context, b, sig, a):
            target.guard(tile.isa, context.codegen())
            pq, pk, ps, pck, pcq, pt = (data(context, b, sig.args[i], a[i]) for i in (0, 2, 5, 6, 8, 9))
            floats, exact = vector(F32, tile.lanes), tile.dtype == "int8"
            first = [splat(b, load(b, ps, I64(m), I32, 4), tile.sums) if exact else constant(tile.sums, 0.0) for m in range(rows)]
            step = I64(tile.panel * tile.group)
            first = [x for x in first for _ in range(nv)]
            sums = _products(b, tile, pq, I64(0), a[1], pk, a[3], step, a[4], first, rows, nv, True)
            if exact:
                key_scale = [load(b, pck, b.add(a[7], I64(tile.lanes * v)), floats, 4) for v in range(nv)]
            for m in range(rows):
                row_scale = splat(b, load(b, pcq, I64(m), F32, 4), floats)
                for v in range(nv):
                    x = sums[m * nv + v]
                    if exact:
                        x = b.fmul(b.fmul(b.sitofp(x, floats), key_scale[v]), row_scale)
                        x = tile.to_int(b, _limit(b, x))
                    else:
                        x = b.fmul(x, row_scale)
                    store(b, x, pt, b.add(a[10], I64(m * KEY_BLOCK + tile.lanes * v)), 4)
            return context.get_dummy_value()
        return sig, codegen
    return scores


def _limit(b, x):
    """Scores cut at +-T_LIMIT; NaN stays NaN."""
    for sign, test in ((1.0, ">"), (-1.0, "<")):
        bound = constant(x.type, sign * float(T_LIMIT))
        x = b.select(b.fcmp_ordered(test, x, bound), bound, x)
    return x


@functools.cache
def value_tile(tile: Tile, rows: int, nv: int):
    """Intrinsic f(p, v, v_off, step, steps, start, scale, o, o_off, o_stride): o[rows, nv * lanes] += (P.V) * scale[row].

    `step` elements lie between two steps of V. INT8 multiplies and adds in float32, each rounded, and where values are stored with
    an offset its sums begin with start[row]; float storage starts its sums from o and takes no scale.
    """
    @intrinsic
    def values(typingctx, p, v, v_off, step, steps, start, scale, o, o_off, o_stride):
        sig = types.void(p, v, v_off, step, steps, start, scale, o, o_off, o_stride)

        def codegen(context, b, sig, a):
            target.guard(tile.isa, context.codegen())
            pp, pv, pt, ps, po = (data(context, b, sig.args[i], a[i]) for i in (0, 1, 5, 6, 7))
            floats, exact = vector(F32, tile.lanes), tile.dtype == "int8"
            where = [b.add(b.add(a[8], b.mul(a[9], I64(m))), I64(tile.lanes * n)) for m in range(rows) for n in range(nv)]
            if tile.v_offset:
                first = [x for m in range(rows) for x in [splat(b, load(b, pt, I64(m), I32, 4), tile.sums)] * nv]
            else:
                first = [constant(tile.sums, 0) if exact else load(b, po, w, floats, 4) for w in where]
            sums = _products(b, tile, pp, I64(0), I64(KEY_BLOCK // tile.group), pv, a[2], a[3], a[4], first, rows, nv, False)
            for i, (w, x) in enumerate(zip(where, sums, strict=True)):
                if exact:
                    s = splat(b, load(b, ps, I64(i // nv), F32, 4), floats)
                    x = b.fadd(load(b, po, w, floats, 4), b.fmul(b.sitofp(x, floats), s))
                store(b, x, po, w, 4)
            return context.get_dummy_value()
        return sig, codegen
    return values


@functools.cache
def value_ratios(tile: Tile):
    """Intrinsic f(scales, n, ratio) -> (some token not finite, largest scale of a value), of the first n tokens of a block.

    scales (256,) float32 of the keys, then of the values; ratio (128,) uint16 = min(round(65536 * scale / largest), 65535).
    """
    lanes, vectors = tile.lanes, KEY_BLOCK // tile.lanes
    floats, ints = vector(F32, lanes), vector(I32, lanes)

    @intrinsic
    def ratios(typingctx, scales, n, ratio):
        def codegen(context, b, sig, a):
            ps, pr = data(context, b, sig.args[0], a[0]), data(context, b, sig.args[2], a[2])
            count = splat(b, b.trunc(a[1], I32), ints)
            held = [b.icmp_signed("<", ir.Constant(ints, list(range(lanes * v, lanes * v + lanes))), count) for v in range(vectors)]
            keys, values = ([load(b, ps, I64(first + lanes * v), floats, 4) for v in range(vectors)] for first in (0, KEY_BLOCK))
            bad, top = ir.Constant(held[0].type, None), constant(floats, 0.0)
            for some, key, value in zip(held, keys, values, strict=True):
                bad = b.or_(bad, b.and_(some, b.fcmp_unordered("uno", key, key)))
                value = b.select(some, value, top)
                top = b.select(b.fcmp_ordered(">", value, top), value, top)
            largest = call(b, f"llvm.vector.reduce.fmax.v{lanes}f32", F32, top)
            factor = splat(b, b.fdiv(ir.Constant(F32, 65536.0), largest), floats)
            for v, value in enumerate(values):
                x = call(b, f"llvm.smin.v{lanes}i32", ints, tile.to_int(b, b.fmul(value, factor)), constant(ints, 65535))
                store(b, b.trunc(x, vector(I16, lanes)), pr, I64(lanes * v), 2)
            found = call(b, f"llvm.vector.reduce.or.v{lanes}i1", ir.IntType(1), bad)
            return context.make_tuple(b, sig.return_type, [found, largest])
        return types.Tuple((types.boolean, types.float32))(scales, n, ratio), codegen
    return ratios


@functools.cache
def softmax_int8(tile: Tile):
    """Intrinsic f(t, t_off, ratio, p, p_off) -> (octave, sum, sum of p): the softmax of one row of one key block.

    t int32 Q8.8; octave = ceil(max t), or MIN_OCTAVE where all is hidden. p8 = round(255 * 2**(t - octave)) is summed up; what is
    stored are the weights of the values, p = round(255 * 2**(t - octave) * ratio / 65536): each value's scale against the
    largest one of its block, uint16, folded in before the one rounding. `reference.integer_decode` is the definition.
    """
    lanes, vectors = tile.lanes, KEY_BLOCK // tile.lanes
    i16s, i32s, wide = vector(I16, 2 * lanes), vector(I32, lanes), vector(I32, 2 * lanes)
    side_by_side = list(range(2 * lanes))

    def signed16(n):
        return constant(i16s, n if n < 32768 else n - 65536)

    def multiply_high(b, u, v):                                         # recognised as one instruction (vpmulhuw)
        return b.trunc(b.lshr(b.mul(b.zext(u, wide), b.zext(v, wide)), constant(wide, 16)), i16s)

    @intrinsic
    def softmax(typingctx, t, t_off, ratio, p, p_off):
        sig = types.UniTuple(types.int32, 3)(t, t_off, ratio, p, p_off)

        def codegen(context, b, sig, a):
            pt, pr, pp = (data(context, b, sig.args[i], a[i]) for i in (0, 2, 3))
            ts = [load(b, pt, b.add(a[1], I64(lanes * v)), i32s, 4) for v in range(vectors)]
            tree = ts
            while len(tree) > 1:
                tree = [call(b, f"llvm.smax.v{lanes}i32", i32s, *tree[i:i + 2]) for i in range(0, len(tree), 2)]
            top = call(b, f"llvm.vector.reduce.smax.v{lanes}i32", I32, tree[0])
            octave = b.ashr(b.add(top, I32(255)), I32(8))
            base = splat(b, b.shl(octave, I32(8)), i32s)
            total, weights = constant(i16s, 0), []
            for v in range(0, vectors, 2):
                halves = [call(b, f"llvm.umin.v{lanes}i32", i32s, b.sub(base, x), constant(i32s, 65535)) for x in ts[v:v + 2]]
                y = b.trunc(shuffle(b, *halves, side_by_side), i16s)
                f = b.shl(y, signed16(8))                               # fraction, Q0.16
                h = multiply_high(b, f, b.sub(signed16(P_A), multiply_high(b, f, signed16(P_B))))
                x = tile.shift_right(b, b.sub(signed16(P_WIDE), h), b.lshr(y, signed16(8)))
                total = b.add(total, b.lshr(b.add(x, signed16(128)), signed16(8)))
                r = load(b, pr, I64(lanes * v), i16s, 2)
                weights.append(b.lshr(b.add(multiply_high(b, x, r), signed16(128)), signed16(8)))
            stored = functools.reduce(b.add, weights)                   # 16 weights a lane at most: fits 16 bits
            for v, w in enumerate(weights):
                element = {4: I8, 2: I16, 1: I32}[tile.group]
                if tile.group == 4:
                    w = b.trunc(w, vector(I8, 2 * lanes))
                elif tile.group == 1:
                    w = b.zext(w, wide)
                store(b, w, pp, b.add(a[4], I64(2 * lanes * v)), element.width // 8)
            total, stored = (call(b, f"llvm.vector.reduce.add.v{2 * lanes}i32", I32, b.zext(x, wide)) for x in (total, stored))
            some = b.icmp_signed("!=", top, I32(HIDDEN))
            octave = b.select(some, octave, I32(MIN_OCTAVE))
            return context.make_tuple(b, sig.return_type, [octave, b.select(some, total, I32(0)), stored])
        return sig, codegen
    return softmax
