"""The woven stream of AMX.

One software-pipelined run over the key blocks that all rows of a query tile attend to and that have
no options.

A matrix unit and the vector units work side by side only if each always finds work in the window of
instructions that the core looks ahead. So the steps of one block (scores, softmax, values) are
spread over two turns and woven into one stream:

    turn u   tile products                      vector work beside them QK 0, 1  scores of keys
    0..63 of block u    last weights of block u-1;    O += values (last two) of block u-2 --
    (check, merge)                     octaves of block u-1: m, l and O shift; stop if int16 did not
    hold them QK 2, 3  scores of keys 64..127 of block u  scores of keys 0..63 of block u to int16
    PV 0, 1  values 0, 1 of block u-1           scores of keys 64..127 of block u to int16 --
    (hide)                             at an edge, scores of keys that a row does not see PV 2...
    the other values of block u-1      first weights of block u;     O += values of block u-1

A product block (QK i, PV i) is 32 rows x 32 columns: 2 x 2 tiles of sums over one or more steps of
64 bytes. Three rules, found by measurement, make its tile instructions cheap:

* Sums leave a tile only in the first step of the next block: store, clear, multiply, tile by tile,
  so that each store hides behind a product. A tile that is stored right after its own product waits
  for it.
* The operands of the next step are loaded as soon as their tile register is free, in snake order
  (00, 01, 11, 10, then 01, 00, 10, 11), so that no product waits for a load.
* About as many rows of vector work follow each product as the matrix unit needs time for it.

The pipeline does not care what the turns belong to: a turn is a row of addresses (`Turn`), and the
stream goes from one query tile into the next without running empty. Two turns of padding before the
real ones fill it, and write to a scratch tile; a turn without scores drains it. The bits are those
of `flash_int8`'s steps: the same operations on every number, in the same order.

The stream is one function in LLVM's language, made for a number of steps and of value blocks;
`address_of` compiles it, `run` calls it. It returns the number of turns that it has finished: fewer
than given if scores left int16.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...fixedpoint import MASKED, P_A, P_B, P_WIDE
from ...jit import target
from ...jit.compiler import bare, kernel
from ...tiling import KEY_BLOCK
from ..isa.amx_tiles import BLOCK, LEFT, RIGHT, ROWS, SIDE, SUMS, VOID, WIDTH
from ..isa.vectors import F32, I8, I16, I32, I64, address, call, constant, pointer, splat, vector
from ..isa.vectors_x86 import AMX_INT8

TILE = ROWS * WIDTH  # bytes
GROUP = 8  # rows whose octaves are found together
# octaves for which int16 scores are exact: as in `flash_int8`
LOWEST = -110
HIGHEST = 127
INTS, FLOATS, WORDS, BYTES = (
    vector(t, 64 // n) for t, n in ((I32, 4), (F32, 4), (I16, 2), (I8, 1))
)


class Turn(NamedTuple):
    """Byte offsets in a row of the table of turns.

    Addresses of one query tile of 32 rows and one key block.
    """

    q: int = 0  # rows of int8, `64 * steps` bytes apart
    cq: int = 8  # their scales
    k: int = 16  # packed keys of the block
    ck: int = 24  # their scales
    v: int = 32  # packed values of the block
    o: int = 40  # rows of O, float32
    m: int = 48  # running octaves of the rows
    l: int = 56  # running sums of the rows
    # the first key that each row attends to, int64; 0 (no address): every row attends to the whole
    # block
    lo: int = 64
    hi: int = 72  # and the key after the last one
    first: int = 80  # the first key of the block: a number


TURN = Turn()
BEFORE = 2
AFTER = 2
FIELDS = len(TURN)
TURNS = 128  # real ones in a table
# key blocks that every row of a query tile attends to before the next ones are read: they stay in
# L2
NEAR = 16


class Scratch(NamedTuple):
    """Byte offsets in the stream's scratch.

    Addresses that are used together differ in their low 12 bits.
    """

    sums: int = 0  # two blocks of sums, `other_sums` apart
    other_sums: int = 4096 + 2048
    scores: int = 12288  # (4, 32, 32) int16: key blocks of 32, rows, keys
    weights: int = 24576  # two blocks of (2, 32, 64) uint8: halves, rows, keys
    other_weights: int = 4096
    octave_words: int = 36864  # (32,) int16 pairs: octaves in Q8.8, twice
    octaves: int = 36864 + 128  # (32,) int32
    scales: int = (
        36864 + 256
    )  # (32,) float32: powers of two that bring a block's sums to the running octave
    totals: int = 36864 + 384  # (32,) int32: sums of the weights
    partial: int = (
        36864 + 512
    )  # (32, 16) int32: partial sums of the weights, then (32,) float32 factors of O
    size: int = 36864 + 512 + 2048


AT = Scratch()


def _at(b, base, offset):
    return b.gep(base, [offset if not isinstance(offset, int) else I64(offset)])


def _load(b, base, ty, offset, align=4):
    x = b.load(b.bitcast(_at(b, base, offset), ty.as_pointer()))
    x.align = align
    return x


def _store(b, x, base, offset, align=4):
    b.store(x, b.bitcast(_at(b, base, offset), x.type.as_pointer())).align = align


def _tile(b, name, *args):
    call(b, f"llvm.x86.{name}", VOID, *args)


def _word(n):
    return constant(WORDS, n if n < 32768 else n - 65536)


def _mixed(*lists):
    """The elements of all lists in one, each list spread evenly."""
    placed = [((i + 0.5) / len(x), n, f) for n, x in enumerate(lists) for i, f in enumerate(x)]
    return [f for _, _, f in sorted(placed, key=lambda place: place[:2])]


def _hide(module) -> ir.Function:
    """f(x, lo, hi, first): scores x of keys that a row does not see become those of weight 0.

    A function of its own, that the turns call at edges only: its constants would take registers
    from them.
    """
    kind = ir.FunctionType(VOID, [I8.as_pointer()] * 3 + [I64])
    function = ir.Function(module, kind, module.get_unique_name("amx.hide"))
    function.linkage = "internal"
    function.attributes.add("noinline")
    b = ir.IRBuilder(function.append_basic_block("entry"))
    x, lo, hi, first = function.args

    def bound(keys, m):
        key = b.sub(_load(b, keys, I64, b.mul(m, I64(8)), 8), first)
        key = call(b, "llvm.smin.i64", I64, key, I64(KEY_BLOCK))
        return splat(b, b.trunc(call(b, "llvm.smax.i64", I64, key, I64(0)), I16), WORDS)

    with cgutils.for_range(b, I64(BLOCK)) as loop:
        start = bound(lo, loop.index)
        stop = bound(hi, loop.index)
        row = _at(b, x, b.mul(loop.index, I64(64)))
        for v in range(KEY_BLOCK // BLOCK):
            keys = ir.Constant(WORDS, list(range(v * BLOCK, (v + 1) * BLOCK)))
            seen = b.and_(b.icmp_signed(">=", keys, start), b.icmp_signed("<", keys, stop))
            y = _load(b, row, WORDS, v * 2048, 64)
            _store(b, b.select(seen, y, constant(WORDS, MASKED)), row, v * 2048, 64)
    b.ret_void()
    return function


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

    def __init__(self, b, scratch, steps: int, values: int) -> None:
        self.b, self.scratch, self.steps, self.values = b, scratch, steps, values
        self.row_bytes = values * BLOCK * 4  # of O

    # ---- tile products
    # -----------------------------------------------------------------------------

    def load_left(self, x: Operands, r: int, k: int) -> None:
        b = self.b
        place = b.add(b.mul(x.stride, I64(r * ROWS)), b.mul(x.step, I64(k)))
        _tile(b, "tileloadd64", I8(LEFT[r]), _at(b, x.left, place), x.stride)

    def load_right(self, x: Operands, c: int, k: int) -> None:
        b = self.b
        _tile(b, "tileloadd64", I8(RIGHT[c]), _at(b, x.right, (k * SIDE + c) * TILE), I64(WIDTH))

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
                    _tile(
                        b,
                        "tilestored64",
                        I8(SUMS[r][c]),
                        _at(b, out, SUMS[r][c] * TILE),
                        I64(WIDTH),
                    )
                    _tile(b, "tilezero", I8(SUMS[r][c]))
                _tile(b, instruction, I8(SUMS[r][c]), I8(LEFT[r]), I8(RIGHT[c]))
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
                out = _at(self.b, self.scratch, AT.other_sums + t * TILE)
                _tile(self.b, "tilestored64", I8(t), out, I64(WIDTH))

    def sums(self, block, m: int, v: int):
        place = (m // ROWS * SIDE + v) * TILE + m % ROWS * WIDTH
        return self.b.sitofp(_load(self.b, block, INTS, place, 64), FLOATS)

    # ---- vector work
    # -------------------------------------------------------------------------------

    def score_rows(self, block, ck, cq, x) -> list:
        """A block of sums to int16 scores x.

        The product with the scales of key and query, rounded.
        """
        b = self.b
        key_scales = [_load(b, ck, FLOATS, v * 64) for v in range(SIDE)]

        def row(m):
            scale = splat(b, _load(b, cq, F32, 4 * m), FLOATS)
            scores = [
                b.fmul(b.fmul(self.sums(block, m, v), key_scale), scale)
                for v, key_scale in enumerate(key_scales)
            ]
            _store(b, AMX_INT8.to_int16(b, *scores), x, m * 64, 64)

        return [functools.partial(row, m) for m in range(BLOCK)]

    def value_rows(self, block, o) -> list:
        """o += sums * scale of the row, a power of two: 32 columns of O."""
        b = self.b

        def row(m):
            scale = splat(b, _load(b, self.scratch, F32, AT.scales + 4 * m), FLOATS)
            for v in range(SIDE):
                place = m * self.row_bytes + v * 64
                old = _load(b, o, FLOATS, place, 64)
                new = AMX_INT8.generic(b, "fma", self.sums(block, m, v), scale, old)
                _store(b, new, o, place, 64)

        return [functools.partial(row, m) for m in range(BLOCK)]

    def softmax_rows(self, first, rows: int, weights) -> list:
        """Octaves, weights and their sums of `rows` rows from `first` on (an IR value), GROUP rows
        at a time.
        """
        b = self.b
        x = _at(b, self.scratch, b.add(I64(AT.scores), b.mul(first, I64(64))))
        p = _at(b, weights, b.mul(first, I64(64)))
        per_row = _at(b, self.scratch, b.mul(first, I64(4)))
        partial = _at(b, self.scratch, b.add(I64(AT.partial), b.mul(first, I64(64))))
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

    def _tops(self, x, rows, tops) -> None:
        """The largest scores of two rows, in every lane."""
        b = self.b
        for r in rows:
            y = [_load(b, x, WORDS, r * 64 + 2048 * v, 64) for v in range(4)]
            y = [AMX_INT8.generic(b, "smax", y[n], y[n + 1]) for n in (0, 2)]
            tops.append(AMX_INT8.generic(b, "smax", *y))

    def _octaves(self, per_row, g, tops) -> None:
        """ceil of the largest score of GROUP rows, and the same in Q8.8, twice in a word."""
        b = self.b
        eight = vector(I32, GROUP)
        top = b.sext(AMX_INT8.fold_rows(b, tops, "smax"), eight)
        octave = b.ashr(b.add(top, constant(eight, 255)), constant(eight, 8))
        _store(b, octave, per_row, AT.octaves + 4 * g)
        q8 = b.shl(octave, constant(eight, 8))
        low = b.and_(q8, constant(eight, 65535))
        _store(b, b.or_(low, b.shl(q8, constant(eight, 16))), per_row, AT.octave_words + 4 * g)

    def _weigh(self, x, p, per_row, partial, r) -> None:
        """Weights of one row, as `microkernels.row_weights` has them."""
        b = self.b
        octave = b.bitcast(splat(b, _load(b, per_row, I32, AT.octave_words + 4 * r), INTS), WORDS)

        def weigh(v):
            y = b.sub(octave, _load(b, x, WORDS, r * 64 + 2048 * v, 64))
            f = b.shl(y, _word(8))
            g = b.sub(_word(P_A), AMX_INT8.multiply_high(b, f, _word(P_B)))
            h = b.sub(_word(P_WIDE), AMX_INT8.multiply_high(b, f, g))
            return b.add(AMX_INT8.shift_right(b, h, b.lshr(y, _word(8))), _word(128))

        total = constant(INTS, 0)
        for v in (0, 2):
            w = AMX_INT8.high_bytes(b, weigh(v), weigh(v + 1))
            _store(b, w, p, r * 64 + 1024 * v, 64)
            total = AMX_INT8.value_dot(b, total, w, constant(BYTES, 1))
        _store(b, total, partial, r * 64, 64)

    def _totals(self, per_row, partial, g) -> None:
        b = self.b
        rows = [_load(b, partial, INTS, (g + r) * 64, 64) for r in range(GROUP)]
        _store(b, AMX_INT8.fold_rows(b, rows, "add"), per_row, AT.totals + 4 * g)

    def left_int16(self):
        """i1: whether int16 does not hold the octave of some row."""
        b = self.b
        found = None
        for h in range(SIDE):
            octave = _load(b, self.scratch, INTS, AT.octaves + 64 * h)
            high = b.icmp_signed(">", octave, constant(INTS, HIGHEST))
            out = b.or_(high, b.icmp_signed("<", octave, constant(INTS, LOWEST)))
            found = out if found is None else b.or_(found, out)
        return b.icmp_unsigned("!=", b.bitcast(found, I16), I16(0))

    def merge(self, o, m_rows, l_rows) -> None:
        """Running octaves m and sums l of a tile take in a block's.

        Rows of O whose octave grows shift by the difference.
        """
        b = self.b
        grown = []

        def power(n):
            """2**-n, by its bits."""
            n = AMX_INT8.generic(b, "smin", n, constant(INTS, 126))
            return b.bitcast(b.shl(b.sub(constant(INTS, 127), n), constant(INTS, 23)), FLOATS)

        for h in range(SIDE):
            octave = _load(b, self.scratch, INTS, AT.octaves + 64 * h)
            total = b.sitofp(_load(b, self.scratch, INTS, AT.totals + 64 * h), FLOATS)
            m = _load(b, m_rows, INTS, 64 * h)
            l = _load(b, l_rows, FLOATS, 64 * h)
            new = AMX_INT8.generic(b, "smax", octave, m)
            shrink = power(b.sub(new, m))
            scale = power(b.sub(new, octave))
            _store(b, shrink, self.scratch, AT.partial + 64 * h)  # partial sums are used up
            _store(b, scale, self.scratch, AT.scales + 64 * h)
            _store(b, new, m_rows, 64 * h)
            _store(b, b.fadd(b.fmul(l, shrink), b.fmul(total, scale)), l_rows, 64 * h)
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
        factor = _load(b, self.scratch, F32, b.add(I64(AT.partial), b.mul(r, I64(4))))
        factor = splat(b, factor, FLOATS)
        row = _at(b, o, b.mul(r, I64(self.row_bytes)))
        for place in range(0, self.row_bytes, 64):
            _store(b, b.fmul(_load(b, row, FLOATS, place, 64), factor), row, place, 64)
        rest = b.and_(now, b.sub(now, I32(1)))
        now.add_incoming(rows, entry)
        now.add_incoming(rest, b.block)
        b.cbranch(b.icmp_unsigned("!=", rest, I32(0)), loop, done)
        b.position_at_end(done)


class Pipeline:
    """Emits one turn from the rows of the table: u-2 to u+1."""

    def __init__(self, b, table, scratch, turn, steps: int, values: int) -> None:
        self.b, self.stream, self.steps, self.values = (
            b,
            Stream(b, scratch, steps, values),
            steps,
            values,
        )
        self.scratch = scratch
        row = _at(b, table, b.mul(turn, I64(8 * FIELDS)))
        self.following, self.now, self.last, self.before = (
            self._turn(row, n) for n in (BEFORE + 1, BEFORE, BEFORE - 1, BEFORE - 2)
        )
        odd = b.and_(turn, I64(1))
        other = b.mul(odd, I64(AT.other_weights))
        self.new_weights = _at(b, scratch, b.add(I64(AT.weights), other))
        self.weights = _at(b, scratch, b.sub(I64(AT.weights + AT.other_weights), other))
        # groups of weights beside PV 2 and on, in order; the rest is left for QK 0 and 1 of the
        # next turn
        self.early = min(BLOCK // GROUP, values - 2)
        self.late = (BLOCK // GROUP - self.early) // 2 * GROUP

    def _turn(self, row, n: int) -> Turn:
        """Row n of the table from `row` on: pointers, but for the last three."""
        b = self.b
        numbers = Turn(*(_load(b, row, I64, 8 * FIELDS * n + place, 8) for place in TURN))
        return Turn._make([*(pointer(b, x) for x in numbers[:-3]), *numbers[-3:]])

    def hide_edges(self) -> None:
        """Whether some row attends only to a part of block u."""
        with self.b.if_then(self.b.icmp_unsigned("!=", self.now.lo, I64(0)), likely=False):
            now = self.now
            x = _at(self.b, self.scratch, AT.scores)
            bounds = (pointer(self.b, keys) for keys in (now.lo, now.hi))
            self.b.call(_hide(self.b.module), [x, *bounds, now.first])

    def scores_of(self, turn: Turn, n) -> Operands:
        """The operands of QK n (an IR value)."""
        right = _at(self.b, turn.k, self.b.mul(n, I64(self.steps * SIDE * TILE)))
        return Operands(turn.q, I64(self.steps * WIDTH), I64(WIDTH), right)

    def values_of(self, n) -> Operands:
        """The operands of PV n of the last turn's block: two steps, halves of the keys."""
        right = _at(self.b, self.last.v, self.b.mul(n, I64(2 * SIDE * TILE)))
        return Operands(self.weights, I64(WIDTH), I64(BLOCK * WIDTH), right)

    def choose(self, t, first: Operands, second: Operands) -> Operands:
        """`first` where t is 0, `second` where it is 1."""
        b = self.b
        test = b.icmp_signed("==", t, I64(0))
        return Operands(*(b.select(test, x, y) for x, y in zip(first, second, strict=True)))

    def sums_of(self, t):
        """Where the sums of an even or odd block are."""
        return _at(self.b, self.scratch, self.b.mul(t, I64(AT.other_sums)))

    def pair(self, emit) -> None:
        """emit(t) for two blocks one after the other, t = 0 and 1."""
        with cgutils.for_range(self.b, I64(2)) as loop:
            emit(loop.index)

    def columns(self, turn: Turn, n):
        """Columns 32 * n and on of a turn's O."""
        return _at(self.b, turn.o, self.b.mul(n, I64(BLOCK * 4)))

    def first_scores(self) -> None:
        """QK 0, 1 beside the last weights of block u-1 and the last values of block u-2."""
        b = self.b
        s = self.stream

        def emit(t):
            other = self.sums_of(b.sub(I64(1), t))
            o = self.columns(self.before, b.add(t, I64(self.values - 2)))
            first = b.add(I64(self.early * GROUP), b.mul(t, I64(self.late)))
            weights = s.softmax_rows(first, self.late, self.weights)
            beside = _mixed(weights, s.value_rows(self.sums_of(t), o))
            now = self.scores_of(self.now, t)
            following = self.scores_of(self.now, b.add(t, I64(1)))
            s.block("tdpbssd", now, following, self.steps, other, beside)

        self.pair(emit)

    def score_work(self, t, n):
        """Sums of QK n to scores."""
        b = self.b
        now = self.now
        ck = _at(b, now.ck, b.mul(n, I64(BLOCK * 4)))
        x = _at(b, self.scratch, b.add(I64(AT.scores), b.mul(n, I64(BLOCK * 64))))
        return self.stream.score_rows(self.sums_of(t), ck, now.cq, x)

    def last_scores(self) -> None:
        """QK 2, 3 beside the scores of QK 0, 1."""
        b = self.b

        def emit(t):
            n = b.add(t, I64(2))
            following = self.choose(t, self.scores_of(self.now, I64(3)), self.values_of(I64(0)))
            other = self.sums_of(b.sub(I64(1), t))
            beside = self.score_work(t, t)
            self.stream.block(
                "tdpbssd", self.scores_of(self.now, n), following, self.steps, other, beside
            )

        self.pair(emit)

    def after_values(self, t, n):
        """The operands that follow PV n: the next values, or the next turn's scores."""
        b = self.b
        if isinstance(n, int) and n + 2 == self.values:
            following = self.scores_of(self.following, I64(0))
            return self.choose(t, self.values_of(I64(n + 1)), following)
        return self.values_of(b.add(t, I64(n + 1)))

    def first_values(self) -> None:
        """PV 0, 1 beside the scores of QK 2, 3."""
        b = self.b

        def emit(t):
            other = self.sums_of(b.sub(I64(1), t))
            beside = self.score_work(t, b.add(t, I64(2)))
            following = self.after_values(t, 0)
            self.stream.block("tdpbusd", self.values_of(t), following, 2, other, beside)

        self.pair(emit)

    def other_values(self, n: int, drained: bool = False) -> None:
        """PV n, n + 1 beside the values two blocks before and weights of block u, if there is one
        (not `drained`).
        """
        b = self.b
        s = self.stream

        def emit(t):
            o = self.columns(self.last, b.add(t, I64(n - 2)))
            beside = s.value_rows(self.sums_of(t), o)
            if n - 2 < self.early and not drained:
                first = b.mul(b.add(t, I64(n - 2)), I64(GROUP))
                beside = _mixed(s.softmax_rows(first, GROUP, self.new_weights), beside)
            other = self.sums_of(b.sub(I64(1), t))
            now = self.values_of(b.add(t, I64(n)))
            s.block("tdpbusd", now, self.after_values(t, n), 2, other, beside)

        self.pair(emit)

    def late_weights(self) -> None:
        """The weights of block u-1 that turn u would find, by themselves."""
        late = I64(self.early * GROUP)
        for work in self.stream.softmax_rows(late, 2 * self.late, self.weights):
            work()

    def drained_values(self) -> None:
        """PV 0, 1 where no scores follow, beside the last values of block u-2."""
        b = self.b
        s = self.stream
        s.prime(self.values_of(I64(0)))

        def emit(t):
            o = self.columns(self.before, b.add(t, I64(self.values - 2)))
            other = self.sums_of(b.sub(I64(1), t))
            following = self.values_of(I64(1) if self.values == 2 else b.add(t, I64(1)))
            beside = s.value_rows(self.sums_of(t), o)
            s.block("tdpbusd", self.values_of(t), following, 2, other, beside)

        self.pair(emit)

    def last_values(self) -> None:
        """What is left after the last turn: the last values of block u-2."""
        self.stream.save()

        def emit(t):
            o = self.columns(self.before, self.b.add(t, I64(self.values - 2)))
            for row in self.stream.value_rows(self.sums_of(t), o):
                row()

        self.pair(emit)


def _emit(b, table, count, scratch, steps: int, values: int) -> None:
    """The body of f(table, count, scratch) -> turns that are finished, from 0 to count."""

    def pipeline(turn):
        return Pipeline(b, table, scratch, turn, steps, values)

    def merge(p, turn):
        """The state takes in block u-1, whose softmax is complete now.

        Or the stream ends, if scores left int16.
        """
        left = b.and_(p.stream.left_int16(), b.icmp_signed(">", turn, I64(0)))  # turn 0 fills
        with b.if_then(left, likely=False):
            b.ret(b.sub(turn, I64(1)))
        p.stream.merge(p.last.o, p.last.m, p.last.l)

    entry = b.block
    body = b.append_basic_block("turn")
    drain = b.append_basic_block("drain")
    first = pipeline(I64(0))
    first.stream.prime(first.scores_of(first.now, I64(0)))
    b.branch(body)

    b.position_at_end(body)
    turn = b.phi(I64)
    turn.add_incoming(I64(0), entry)
    p = pipeline(turn)
    p.first_scores()
    merge(p, turn)
    p.last_scores()
    p.first_values()
    p.hide_edges()
    for n in range(2, values, 2):
        p.other_values(n)
    following = b.add(turn, I64(1))
    turn.add_incoming(following, b.block)
    b.cbranch(b.icmp_signed("<", following, count), body, drain)

    b.position_at_end(drain)
    p = pipeline(count)
    p.late_weights()
    p.drained_values()
    merge(p, count)
    for n in range(2, values, 2):
        p.other_values(n, drained=True)
    pipeline(b.add(count, I64(1))).last_values()
    b.ret(count)


FUNCTION = ir.FunctionType(I64, [I8.as_pointer(), I64, I8.as_pointer()])


@functools.cache
def _address(steps: int, values: int):
    @intrinsic
    def address(typingctx):
        def codegen(context, b, sig, args):
            target.guard("amx_int8", context.codegen())
            function = ir.Function(b.module, FUNCTION, b.module.get_unique_name("amx.stream"))
            function.linkage = "internal"
            inner = ir.IRBuilder(function.append_basic_block("entry"))
            _emit(inner, *function.args, steps, values)
            return b.ptrtoint(function, I64)

        return types.intp(), codegen

    return address


@functools.cache
def address_of(d: int, dv: int) -> int:
    """The address of the stream for head sizes d and dv, compiled where it is not yet.

    0 if there is none.
    """
    steps = -(-d // WIDTH)
    values = -(-dv // (2 * BLOCK)) * 2
    if steps > MOST_STEPS or values > MOST_VALUES:
        return 0
    address = _address(steps, values)

    @kernel
    def stream():
        return address()

    return int(stream())


# head sizes up to 256: beyond, a turn is long enough by itself
MOST_STEPS = 4
MOST_VALUES = 8


@intrinsic
def run(typingctx, address, table, count, scratch):
    """f(address, table, count, scratch): the stream at `address` over `count` turns.

    Addresses are integers.
    """

    def codegen(context, b, sig, args):
        function = b.inttoptr(args[0], FUNCTION.as_pointer())
        return b.call(function, [pointer(b, args[1]), args[2], pointer(b, args[3])])

    return types.int64(types.int64, types.int64, types.int64, types.int64), codegen


def table_shape() -> tuple[int, int]:
    """Shape of the table of turns, int64."""
    return BEFORE + TURNS + AFTER, FIELDS


def scratch_size() -> int:
    """Bytes of scratch; behind them, m, l and O of the tile that padding turns write to.

    BLOCK float32 for each column of O.
    """
    return AT.size + 2 * BLOCK * 4


PART, NONE, EDGE, WHOLE = range(4)


@bare
def seen(tile, i, first):
    """What the BLOCK rows from i on see of the block of keys `first`.

    All of it, each row some, or none; or only some rows do.

    The bounds of the rows are non-decreasing.
    """
    last, stop = min(i + BLOCK, tile.real) - 1, first + KEY_BLOCK
    if tile.lo[i] >= stop or tile.hi[last] <= first:
        return NONE
    if tile.lo[last] <= first and tile.hi[i] >= stop:
        return WHOLE
    if tile.lo[last] < stop and tile.hi[i] > first:
        for r in range(i, last + 1):
            if tile.hi[r] <= tile.lo[r]:
                return PART
        return EDGE
    return PART


@bare
def stream_stop(tile, kv, first, stop):
    """The end of the blocks from key `first` on that the stream can take.

    Of finite keys, seen by all rows of a turn or by none.
    """
    for c in range(first, stop, KEY_BLOCK):
        if kv.wide[c // KEY_BLOCK] != 0:
            return c
        for i in range(0, tile.real, BLOCK):
            if seen(tile, i, c) == PART:
                return c
    return max(first, (stop + KEY_BLOCK - 1) // KEY_BLOCK * KEY_BLOCK)


@bare
def fill_turns(table, scratch, tile, kv, state, first, stop):
    """The turns of all rows of a tile and the key blocks first .. stop; returns their number.

    tile, kv, state : as in `flash_int8`
    """
    stride, width, n = tile.q.shape[1], state.o.shape[1], BEFORE
    for near in range(first, stop, NEAR * KEY_BLOCK):
        for i in range(0, tile.rows, BLOCK):
            for c in range(near, min(stop, near + NEAR * KEY_BLOCK), KEY_BLOCK):
                sight = seen(tile, i, c)
                if sight == NONE:
                    continue
                turn = table[n]
                turn[0], turn[1] = address(tile.q) + i * stride, address(tile.scale) + 4 * i
                turn[2], turn[3] = address(kv.keys) + c * stride, address(kv.scale) + 4 * c
                turn[4], turn[5] = address(kv.values) + c * width, address(state.o) + i * width * 4
                turn[6], turn[7] = address(state.m) + 4 * i, address(state.l) + 4 * i
                turn[8] = address(tile.lo) + 8 * i if sight == EDGE else 0
                turn[9], turn[10] = address(tile.hi) + 8 * i, c
                n += 1
    padding = address(scratch) + AT.size
    for at, like in ((0, BEFORE), (1, BEFORE), (n, n - 1), (n + 1, n - 1)):
        for field in range(FIELDS):
            table[at, field] = table[like, field]
        table[at, 5], table[at, 6] = padding + 2 * BLOCK * 4, padding
        table[at, 7] = padding + BLOCK * 4
    return n - BEFORE


@bare
def stream_blocks(stream, table, scratch, tile, kv, state, first, stop):
    """Key blocks first .. stop into the state (m, l, O) of a tile.

    False if scores left int16, and the state is void.
    """
    most = TURNS // (tile.rows // BLOCK) * KEY_BLOCK
    for c in range(first, stop, most):
        n = fill_turns(table, scratch, tile, kv, state, c, min(stop, c + most))
        if n > 0 and run(stream, address(table), n, address(scratch)) < n:
            return False
    return True
