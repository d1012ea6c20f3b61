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

Where values are the first channels of the keys (`shared`), there is no V: `shared_values` makes it
from K, a block at a time. Such a bfloat16 cache stores pairs of channels (group 2), which is the
right operand of AMX's bfloat16 tiles.

INT4 stores codes c from 0 to 15 for the odd numbers 2 c - 15, two codes a byte: the low half is a
step of the layout above, the high half the step behind it, so a vector of bytes becomes the vectors
of two steps by two masks and a shift. Sums of codes are doubled, and 15 * sum(q) or 15 * (sum of the
row's weights) is taken out likewise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import llvmlite.ir as ir
import numpy as np

from ...jit import target
from ...tiling import KEY_BLOCK
from ..floats.float_isas import FLOAT_ISAS
from ..isa.isas import VECTOR_ISAS
from ..isa.score_calls import HIDDEN
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
    splat,
    vector,
)
from ..isa.vectors_arm import SVE_128
from ..isa.vectors_x86 import X86

PORTABLE = Isa("portable", 4, 1, 4, 0)
SCALABLE = ("sve512", "sve256")  # float storage is laid out for vectors of this length
# The scratch of a tile: `work` (scratch rows, 128) int32, scores or weights of its rows and, in the
# row behind them, the state, one 32-bit number for each of up to 8 rows from these columns on; in
# front of them the ratios of the values, for float storage a row's sum.
ROWS = 8
RATIO, V_START, OCTAVE, SCALE, SHRINK, M, L, START, CQ = (
    0,
    *range(KEY_BLOCK - 8 * ROWS, KEY_BLOCK, ROWS),
)
LOW_BITS = 7  # of a query or a weight in the low plane
LOW_PLANE = KEY_BLOCK * 4 // 2  # bytes from a row of weights to its low plane: half a row of `work`
# Bytes of the straight line that are prefetched ahead of the products, by the CPU's name; "" is any
# other. Figures: INT8, D = 128, 4 rows, from memory, unless stated.
#
# Intel's own prefetching falls behind wherever the products pause (softmax, a new page): without
# this, reads run at 55 to 60 % of a plain sum's rate, with it at 75 to 90 % (Granite Rapids; 1 to 8
# KB do about the same).
#
# Zen 5's falls behind more: without this INT8 reads at 50 % of a plain sum's rate, with it at 69 %;
# INT4 takes 9.0 ns a token, 5.8 with 2 KB, 4.9 with 8 KB; bfloat16 28.2, 16.4 with 4 KB, 13.6 with 8
# KB. A cache that is in L2 or L3 pays for it: integers and 16 bits 1 to 4 %, float32 18 %. Models do not leave it
# there, the weights of their other layers pass between two calls.
#
# Zen 4's keeps up by itself, and requests by instruction take its buffers: 56 to 82 % of a plain
# sum's rate, where the same products without them reach 94 %. A skipped line stops it: leaving out
# the 16 lines of scales of 528 a block, or reading them after the keys, costs the products 30 %, a
# plain sum 16 %. Hence every line of the cache is read, in ascending order (`in_order`).
# Other Zens were not measured and are treated as Zen 4.
AHEAD = {"znver5": 8192, "znver": 0, "": 4096}  # a name stands before its own prefixes


def ahead(cpu: str) -> int:
    """Bytes that are prefetched ahead on a CPU, by the first name of `AHEAD` that its name begins with."""
    return next(n for name, n in AHEAD.items() if cpu.startswith(name))


@dataclass(frozen=True)
class Tile:
    """How cached elements of one type are multiplied with the query in the registers of one
    instruction set.

    Attributes
    ----------
    isa : a name of `target.ISAS`; of float storage on SVE one of `target.FLOAT_ISAS`
    dtype : "int8", "int4", "float32", "bfloat16" or "float16": the storage
    lanes, nv : lanes of a 32-bit vector; vectors side by side in a panel of keys or a chunk of
        columns
    group : elements that one step of a dot product adds into a lane
    q_offset : what is added to stored keys (128 where the dot instruction is unsigned x signed)
    v_offset : what is added to stored values (128 where it is unsigned x unsigned); of INT4, whose
        codes are half of a number with its offset, both are 15
    ahead : bytes that the products prefetch ahead; 0 for none
    matrix : whether the products take AMX's tiles, see `matrix_tiles` and `matrix_floats`
    shared : whether values are the first channels of the keys, and not stored again
    rotation : most channels of the Hadamard matrices that rows are multiplied by before they are
        rounded (`numflash.numerics.rotation`); 0 where they are not
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
    shared: bool = False
    rotation: int = 0

    @property
    def pairs(self) -> bool:
        """Whether a 32-bit word holds two bfloat16, so that one load serves two steps."""
        return self.dtype == "bfloat16" and self.group == 2

    @property
    def panel(self) -> int:
        return self.nv * self.lanes

    @property
    def exact(self) -> bool:
        """Whether products and sums are exact integers."""
        return self.dtype in ("int8", "int4")

    @property
    def packed(self) -> int:
        """Channels of a token in a stored element."""
        return 2 if self.dtype == "int4" else 1

    @property
    def size(self) -> int:
        """Bytes of a stored element."""
        return {"int8": 1, "int4": 1, "float32": 4}.get(self.dtype, 2)

    @property
    def bits(self) -> type:
        """The type of a stored element in memory."""
        bits = {"int8": np.int8, "int4": np.int8, "float32": np.uint32}
        return bits.get(self.dtype, np.uint16)

    @property
    def scales(self) -> int:
        """Elements that the scales of a block take: float32 per key, and for integers per value."""
        return KEY_BLOCK * 4 // self.size * (2 if self.exact else 1)

    @property
    def unit(self) -> int:
        """Channels that are stored together: those of a key are padded to a multiple of it."""
        return self.group * self.packed

    def block(self, channels: int, columns: int) -> int:
        """Elements of a block of 128 keys."""
        return KEY_BLOCK * (channels + columns) // self.packed + self.scales

    @property
    def sums(self) -> Any:
        return self.vectors.vector(I32 if self.exact else F32)

    @property
    def planes(self) -> int:
        """Operands of 8 bits that hold a query or a weight.

        Byte dot products take two, the high one first; wider products take it whole. For pairs of
        bfloat16 a query has two words of float32, or on matrix tiles one pair.
        """
        if self.pairs:
            return 1 if self.matrix else 2
        return 2 if self.exact and self.group == 4 else 1

    @property
    def query_planes(self) -> int:
        """`planes` of a query. Beside codes one of 8 bits is enough; AMX's tiles have both, one of zeros."""
        return 1 if self.packed == 2 and not self.matrix else self.planes

    def width(self, rows: int) -> int:
        """Vectors side by side in a tile of `rows` rows, a divisor of nv.

        Up to 16 sums of a plane where vectors have 512 bits or SVE's length, else 8.
        """
        most = 16 if self.lanes == 16 or self.isa in SCALABLE else 8
        return max(n for n in (1, 2, 4) if n <= self.nv and (n == 1 or n * rows <= most))

    def together(self, rows: int, vectors: int) -> bool:
        """Whether one loop multiplies both planes of a query or a weight.

        It loads each cached vector once, and few rows have twice as many independent sums. Of 32
        registers 24 sums leave too few: 6 rows of INT8 and 3 of INT4 were spilt. AArch64 takes the limit
        of 16 registers: it was not timed.
        """
        return 2 * rows * vectors <= (20 if self.lanes == 16 else 12)

    def cached_vector(self, b: ir.IRBuilder, base, index):
        """The operand of all lanes at element `index` of the cache."""
        if self.dtype == "float32":
            return in_order(load(b, base, index, self.sums, 4))
        if self.dtype == "int8":
            x = in_order(load(b, base, index, vector(I8, self.lanes * self.group), 1, 1))
            return x if self.group == 4 else b.sext(x, self._widened)
        of = self.vectors
        x = in_order(load(b, base, index, of.vector(I16), 2))
        if self.dtype == "bfloat16":
            ints = of.vector(I32)
            return b.bitcast(b.shl(b.zext(x, ints), of.fill(b, ints, 16)), self.sums)
        return b.fpext(b.bitcast(x, of.vector(ir.HalfType())), self.sums)

    @property
    def _widened(self) -> ir.VectorType:
        """The operand of wider dot products than those of bytes."""
        return vector(I16 if self.group == 2 else I32, self.lanes * self.group)

    def cached_vectors_of_two_steps(self, b: ir.IRBuilder, base, index) -> list:
        """The operands of all lanes of two steps, whose elements begin at `index`.

        INT4 is split into the halves of its bytes, a pair of bfloat16 into those of its word.
        """
        if self.pairs:
            ints = self.vectors.vector(I32)
            x = in_order(load(b, base, index, ints, 2, 2))
            fill = self.vectors.fill
            both = [b.shl(x, fill(b, ints, 16)), b.and_(x, fill(b, ints, -65536))]
            return [b.bitcast(y, self.sums) for y in both]
        x = in_order(load(b, base, index, vector(I8, self.lanes * self.group), 1, 1))
        words = vector(I32, x.type.count // 4)
        x = b.bitcast(x, words)  # there is no shift of bytes
        mask = constant(words, 0x0F0F0F0F)
        both = [b.and_(x, mask), b.and_(b.lshr(x, constant(words, 4)), mask)]
        both = [b.bitcast(y, vector(I8, self.lanes * self.group)) for y in both]
        return both if self.group == 4 else [b.zext(y, self._widened) for y in both]

    def broadcast_word(self, b: ir.IRBuilder, base, index):
        """The 32-bit word `index` of a row, in every lane."""
        if not self.exact:
            return self.vectors.splat(b, load(b, base, index, F32, 4), self.sums)
        x = splat(b, load(b, base, index, I32, 4, 1), self.sums)
        return (
            x
            if self.group == 1
            else b.bitcast(x, vector(I16 if self.group == 2 else I8, self.lanes * self.group))
        )

    def dot(self, b: ir.IRBuilder, acc, cached, word, keys: bool):
        """acc + the products; `keys`: `cached` is the unsigned operand, else `word` is."""
        if not self.exact:
            return self.vectors.generic(b, "fma", cached, word, acc)
        if self.group == 1:
            return b.add(acc, b.mul(cached, word))
        return (
            self.vectors.score_dot(b, acc, cached, word)
            if keys
            else self.vectors.value_dot(b, acc, word, cached)
        )

    @property
    def vectors(self) -> Any:
        if self.isa in SCALABLE:
            return FLOAT_ISAS[self.isa]
        return SVE_128 if self.isa == "sve" else VECTOR_ISAS.get(self.isa, PORTABLE)

    @property
    def float_vectors(self) -> str:
        """The name in `FLOAT_ISAS` of vectors as long as these: what softmax takes."""
        return (
            self.isa if self.isa in SCALABLE else {16: "avx512", 8: "avx2", 4: "neon"}[self.lanes]
        )

    @property
    def square(self) -> int:
        """Rows and columns that are transposed at a time: a fixed vector's lanes."""
        return 4 if self.isa in SCALABLE else self.lanes

    def guard(self, codegen: Any) -> None:
        """Raise where the target lacks the tile's instructions."""
        target.guard(self.isa, codegen, target.FLOAT_ISAS if self.isa in SCALABLE else target.ISAS)

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


def tile(isa: str, dtype: str, shared: bool = False, codegen: Any = None) -> Tile:
    """The tile of an INT8 instruction set; float storage takes its vector length.

    On AArch64 that is the machine's for float storage, where SVE's vectors have more than 128 bits,
    and 128 bits else. `codegen`: of the machine that the tile is for, where it is not this one.
    """
    if shared:
        own = tile(isa, dtype, codegen=codegen)
        return replace(own, shared=True, group=2 if dtype == "bfloat16" else own.group)
    isa = "avx512_vnni" if isa == "amx_int8" else isa  # the layout of the vectors: `matrix_tiles`
    scalable = f"sve{target.vector_bits(codegen)}" if isa in ("sve", "neon_dot") else ""
    if isa == "sve" and not target.missing("neon_dot", codegen=codegen):
        isa = "neon_dot"
    reading: dict[str, Any] = {"ahead": ahead(target.cpu_name())}
    if dtype == "int4":  # the same vectors; codes suit dot products of every kind
        like = tile(isa, "int8", codegen=codegen)
        return replace(like, dtype=dtype, q_offset=15, v_offset=15)
    if isa in ("sve", "neon_dot") and dtype == "int8":
        return Tile(isa, dtype, 4, 4, 4, v_offset=128, **reading)
    if scalable in SCALABLE:
        return Tile(scalable, dtype, FLOAT_ISAS[scalable].lanes, 4, 1, **reading)
    found = VECTOR_ISAS.get(isa)
    if not isinstance(found, X86):
        return Tile("portable", dtype, 4, 4, 1, **reading)
    if dtype == "int8":
        return Tile(isa, dtype, found.lanes, found.nv, found.group, found.q_offset, **reading)
    return Tile(isa, dtype, found.lanes, found.nv, 1, **reading)


def state(rows: int, column: int):
    """The element of `work` that holds a number of the state."""
    return I64(rows * KEY_BLOCK + column)
