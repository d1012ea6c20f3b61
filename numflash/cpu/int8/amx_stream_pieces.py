"""The pieces of a turn of AMX's software-pipelined stream.

Blocks of tile products, and the vector work beside them as lists of functions that each emit about
one row.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import llvmlite.ir as ir

from ...numerics import fixedpoint as fx
from ...numerics.fixedpoint import P_A, P_B, P_WIDE
from ...tiling import KEY_BLOCK
from ..isa.amx_tiles import BLOCK, LEFT, RIGHT, ROWS, SIDE, SUMS, WIDTH, tile_call
from ..isa.vectors import (
    F32,
    I8,
    I16,
    I32,
    I64,
    call,
    constant,
    load_at,
    pointer_at,
    splat,
    store_at,
    vector,
)
from ..isa.vectors_x86 import AMX_INT8
from .amx_stream_data import (
    AT,
    BYTES,
    FLOATS,
    GROUP,
    INTS,
    TILE,
    WORDS,
    word,
)
from .rows import HIGHEST, LOWEST, MOST_OCTAVES
from .softmax_vectors import below_octave, power_of_two

STEP = fx.REFERENCE_STEP["int8"]


def spread(*lists):
    """The elements of all lists in one, each list spread evenly."""
    placed = [((i + 0.5) / len(x), n, f) for n, x in enumerate(lists) for i, f in enumerate(x)]
    return [f for _, _, f in sorted(placed, key=lambda place: place[:2])]


class Operands(NamedTuple):
    """The operands of a block of products.

    Left rows `stride` bytes apart, steps of them `step` bytes; right tiles in one piece.
    """

    left: ir.Value
    stride: ir.Value
    step: ir.Value
    right: ir.Value


class Stream:
    """Emits the pieces of a turn.

    Vector work comes as lists of functions, each of which emits a row or so.
    """

    def __init__(self, b, scratch, steps: int, values: int, changed: bool) -> None:
        self.b, self.scratch, self.steps, self.values = b, scratch, steps, values
        self.changed = changed  # whether a function changes the scores
        # bytes from row to row of scores, and from 32 keys to the next
        self.score_row, self.score_step = (256, 64) if changed else (64, 2048)
        self.row_bytes = values * BLOCK * 4  # of O

    # ---- tile products

    def load_left(self, x: Operands, r: int, k: int) -> None:
        b = self.b
        place = b.add(b.mul(x.stride, I64(r * ROWS)), b.mul(x.step, I64(k)))
        tile_call(b, "tileloadd64", I8(LEFT[r]), pointer_at(b, x.left, place), x.stride)

    def load_right(self, x: Operands, c: int, k: int) -> None:
        b = self.b
        tile_call(
            b,
            "tileloadd64",
            I8(RIGHT[c]),
            pointer_at(b, x.right, (k * SIDE + c) * TILE),
            I64(WIDTH),
        )

    def prime(self, x: Operands) -> None:
        """The first operands of the first block."""
        for n in range(SIDE):
            self.load_left(x, n, 0)
            self.load_right(x, n, 0)

    def block(self, instruction, now, following, steps, out, beside) -> None:
        """The products of one block, whose first operands are loaded.

        Those of the following one are, at the end.

        out : where the sums of the block before go;  beside : vector work
        """
        b = self.b
        done = 0
        for k in range(steps):
            odd = k % 2
            snake = ((0, 1), (0, 0), (1, 0), (1, 1)) if odd else ((0, 0), (0, 1), (1, 1), (1, 0))
            last = k + 1 == steps
            source, next_k = (following, 0) if last else (now, k + 1)
            for i, (r, c) in enumerate(snake):
                if k == 0:
                    tile_call(
                        b,
                        "tilestored64",
                        I8(SUMS[r][c]),
                        pointer_at(b, out, SUMS[r][c] * TILE),
                        I64(WIDTH),
                    )
                    tile_call(b, "tilezero", I8(SUMS[r][c]))
                tile_call(b, instruction, I8(SUMS[r][c]), I8(LEFT[r]), I8(RIGHT[c]))
                if i == 1:
                    self.load_left(source, 0, next_k)
                elif i == 2:
                    self.load_right(source, 0 if odd else 1, next_k)
                elif i == 3:
                    self.load_right(source, 1 if odd else 0, next_k)
                    self.load_left(source, 1, next_k)
                wanted = (4 * k + i + 1) * len(beside) // (4 * steps)
                for emit in beside[done:wanted]:
                    emit()
                done = wanted

    def save(self) -> None:
        """The sums that are still in the tiles, when no block follows."""
        for row in SUMS:
            for t in row:
                out = pointer_at(self.b, self.scratch, AT.other_sums + t * TILE)
                tile_call(self.b, "tilestored64", I8(t), out, I64(WIDTH))

    def sums(self, block, m: int, v: int):
        place = (m // ROWS * SIDE + v) * TILE + m % ROWS * WIDTH
        return self.b.sitofp(load_at(self.b, block, INTS, place, 64), FLOATS)

    # ---- vector work

    def score_rows(self, block, ck, cq, x) -> list:
        """A block of sums to int16 scores x, or to float32 ones in the order of the keys.

        The product with the scales of key and query, rounded.
        """
        b = self.b
        key_scales = [load_at(b, ck, FLOATS, v * 64) for v in range(SIDE)]

        def row(m):
            scale = splat(b, load_at(b, cq, F32, 4 * m), FLOATS)
            scores = [
                b.fmul(b.fmul(self.sums(block, m, v), key_scale), scale)
                for v, key_scale in enumerate(key_scales)
            ]
            if self.changed:
                for v, y in enumerate(AMX_INT8.in_order(b, *scores)):
                    store_at(b, y, x, m * 4 * KEY_BLOCK + v * 64, 64)
            else:
                store_at(b, AMX_INT8.to_int16(b, *scores), x, m * 64, 64)

        return [functools.partial(row, m) for m in range(BLOCK)]

    def value_rows(self, block, o) -> list:
        """o += sums * scale of the row: 32 columns of O."""
        b = self.b

        def row(m):
            scale = splat(b, load_at(b, self.scratch, F32, AT.scales + 4 * m), FLOATS)
            for v in range(SIDE):
                place = m * self.row_bytes + v * 64
                old = load_at(b, o, FLOATS, place, 64)
                new = AMX_INT8.generic(b, "fma", self.sums(block, m, v), scale, old)
                store_at(b, new, o, place, 64)

        return [functools.partial(row, m) for m in range(BLOCK)]

    def softmax_rows(self, first, rows: int, weights) -> list:
        """Octaves, weights and their sums of `rows` rows from `first` on (an IR value), GROUP rows
        at a time.
        """
        b = self.b
        x = pointer_at(b, self.scratch, b.add(I64(AT.scores), b.mul(first, I64(self.score_row))))
        p = pointer_at(b, weights, b.mul(first, I64(64)))
        per_row = pointer_at(b, self.scratch, b.mul(first, I64(4)))
        partial = pointer_at(b, self.scratch, b.add(I64(AT.partial), b.mul(first, I64(64))))
        work = []
        for g in range(0, rows, GROUP):
            tops: list = []
            pairs = [(g + r, g + r + 1) for r in range(0, GROUP, 2)]
            work += [functools.partial(self._tops, x, pair, tops) for pair in pairs]
            work.append(functools.partial(self._octaves, per_row, g, tops))
            work += [
                functools.partial(self._weigh, x, p, per_row, partial, g + r) for r in range(GROUP)
            ]
            work.append(functools.partial(self._totals, per_row, partial, g))
        return work

    def _scores(self, x, r: int, v: int):
        """int16 scores of row r and the 32 keys from 32 * v on."""
        return load_at(self.b, x, WORDS, r * self.score_row + v * self.score_step, 64)

    def _tops(self, x, rows, tops) -> None:
        """The largest scores of two rows, in every lane."""
        b = self.b
        for r in rows:
            y = [self._scores(x, r, v) for v in range(4)]
            y = [AMX_INT8.generic(b, "smax", y[n], y[n + 1]) for n in (0, 2)]
            tops.append(AMX_INT8.generic(b, "smax", *y))

    def _octaves(self, per_row, g, tops) -> None:
        """The largest score of GROUP rows in whole octaves, and in eighths, Q8.8, twice in a word."""
        b = self.b
        eight = vector(I32, GROUP)
        best = b.sext(AMX_INT8.fold_rows(b, tops, "smax"), eight)
        octave = b.ashr(b.add(best, constant(eight, 255)), constant(eight, 8))
        store_at(b, octave, per_row, AT.octaves + 4 * g)
        top = b.and_(b.add(best, constant(eight, STEP - 1)), constant(eight, -STEP))
        low = b.and_(top, constant(eight, 65535))
        store_at(b, b.or_(low, b.shl(top, constant(eight, 16))), per_row, AT.top_words + 4 * g)

    def _weigh(self, x, p, per_row, partial, r) -> None:
        """Weights of one row, as `softmax_vectors.row_weights` has them."""
        b = self.b
        top = b.bitcast(splat(b, load_at(b, per_row, I32, AT.top_words + 4 * r), INTS), WORDS)

        def weigh(v):
            y = b.sub(top, self._scores(x, r, v))
            f = b.shl(y, word(8))
            g = b.sub(word(P_A), AMX_INT8.multiply_high(b, f, word(P_B)))
            h = b.sub(word(P_WIDE), AMX_INT8.multiply_high(b, f, g))
            return b.add(AMX_INT8.shift_right(b, h, b.lshr(y, word(8))), word(128))

        total = constant(INTS, 0)
        for v in (0, 2):
            w = AMX_INT8.high_bytes(b, weigh(v), weigh(v + 1))
            store_at(b, w, p, r * 64 + 1024 * v, 64)
            total = AMX_INT8.value_dot(b, total, w, constant(BYTES, 1))
        store_at(b, total, partial, r * 64, 64)

    def _totals(self, per_row, partial, g) -> None:
        b = self.b
        rows = [load_at(b, partial, INTS, (g + r) * 64, 64) for r in range(GROUP)]
        store_at(b, AMX_INT8.fold_rows(b, rows, "add"), per_row, AT.totals + 4 * g)

    def left_int16(self):
        """i1: whether int16 does not hold the octave of some row."""
        b = self.b
        found = None
        for h in range(SIDE):
            octave = load_at(b, self.scratch, INTS, AT.octaves + 64 * h)
            high = b.icmp_signed(">", octave, constant(INTS, HIGHEST))
            out = b.or_(high, b.icmp_signed("<", octave, constant(INTS, LOWEST)))
            found = out if found is None else b.or_(found, out)
        return b.icmp_unsigned("!=", b.bitcast(found, I16), I16(0))

    def block_octaves(self, h: int, base):
        """Octaves of the block, rows 16 * h and on; what a function changed is relative to `base`,
        which becomes these octaves for the next block.
        """
        b = self.b
        octave = load_at(b, self.scratch, INTS, AT.octaves + 64 * h)
        if not self.changed:
            return octave
        octave = b.add(octave, b.ashr(load_at(b, base, INTS, 64 * h), constant(INTS, 8)))
        bound = AMX_INT8.generic(b, "smin", octave, constant(INTS, MOST_OCTAVES))
        bound = AMX_INT8.generic(b, "smax", bound, constant(INTS, -MOST_OCTAVES))
        store_at(b, b.shl(bound, constant(INTS, 8)), base, 64 * h)
        return octave

    def merge(self, o, m_rows, l_rows, base) -> None:
        """Running octaves m and sums l of a tile take in a block's.

        Rows of O whose octave grows shift by the difference.
        """
        b = self.b
        grown = []

        for h in range(SIDE):
            octave = self.block_octaves(h, base)
            top = load_at(b, self.scratch, INTS, AT.top_words + 64 * h)
            total = b.sitofp(load_at(b, self.scratch, INTS, AT.totals + 64 * h), FLOATS)
            m = load_at(b, m_rows, INTS, 64 * h)
            l = load_at(b, l_rows, FLOATS, 64 * h)
            new = AMX_INT8.generic(b, "smax", octave, m)
            shrink = power_of_two(b, b.sub(new, m))
            scale = b.fmul(power_of_two(b, b.sub(new, octave)), below_octave(b, top))
            store_at(b, shrink, self.scratch, AT.partial + 64 * h)  # partial sums are used up
            store_at(b, scale, self.scratch, AT.scales + 64 * h)
            store_at(b, new, m_rows, 64 * h)
            store_at(b, b.fadd(b.fmul(l, shrink), b.fmul(total, scale)), l_rows, 64 * h)
            grown.append(b.zext(b.bitcast(b.icmp_signed(">", octave, m), I16), I32))
        self._shrink(o, b.or_(grown[0], b.shl(grown[1], I32(16))))

    def _shrink(self, o, rows) -> None:
        """The rows of O whose bits are set, times their factor."""
        b = self.b
        entry = b.block
        loop = b.append_basic_block("shrink")
        done = b.append_basic_block("shrunk")
        b.cbranch(b.icmp_unsigned("!=", rows, I32(0)), loop, done)
        b.position_at_end(loop)
        now = b.phi(I32)
        r = b.zext(call(b, "llvm.cttz.i32", I32, now, ir.IntType(1)(1)), I64)
        factor = load_at(b, self.scratch, F32, b.add(I64(AT.partial), b.mul(r, I64(4))))
        factor = splat(b, factor, FLOATS)
        row = pointer_at(b, o, b.mul(r, I64(self.row_bytes)))
        for place in range(0, self.row_bytes, 64):
            store_at(b, b.fmul(load_at(b, row, FLOATS, place, 64), factor), row, place, 64)
        rest = b.and_(now, b.sub(now, I32(1)))
        now.add_incoming(rows, entry)
        now.add_incoming(rest, b.block)
        b.cbranch(b.icmp_unsigned("!=", rest, I32(0)), loop, done)
        b.position_at_end(done)
