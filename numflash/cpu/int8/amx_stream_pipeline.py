"""The schedule of AMX's software-pipelined stream.

A matrix unit and the vector units work side by side only if each always finds work in the window of
instructions that the core looks ahead. So the steps of one block (scores, softmax, values) are
spread over two turns and interleaved in one stream of instructions:

    turn u   tile products                      vector work beside them
    QK 0, 1  scores of keys 0..63 of block u    last weights of block u-1, then
                                                O += values (last two) of block u-2
    merge                                       octaves of block u-1: m, l and O shift;
                                                the stream ends if int16 did not hold them
    QK 2, 3  scores of keys 64..127 of block u  scores of keys 0..63 of block u to int16
    PV 0, 1  values 0, 1 of block u-1           scores of keys 64..127 of block u to int16
    change                                      where there is one, calls the score function
    hide                                        at an edge, masks scores row by row
    PV 2...  the other values of block u-1      first weights of block u, then
                                                O += values of block u-1

A product block (QK i, PV i) is 32 rows x 32 columns: 2 x 2 tiles of sums over one or more steps of
64 bytes. Three rules, found by measurement, keep the matrix unit busy:

* Sums leave a tile only in the first step of the next block: store, clear, multiply, tile by tile,
  so that a product covers the latency of each store. A tile that is stored right after its own
  product waits for that product.
* The operands of the next step are loaded as soon as their tile register is free, in snake order
  (00, 01, 11, 10, then 01, 00, 10, 11), so that no product waits for a load.
* After each product follow about as many rows of vector work as take the matrix unit's time for it.

A turn is a row of addresses (`Turn`), so the stream continues from one query tile to the next
without draining. Two turns of padding before the real ones fill the pipeline and write to a scratch
tile; a turn without scores drains it.
"""

from __future__ import annotations

import llvmlite.ir as ir
from numba.core import cgutils

from ...numerics.fixedpoint import FIRST_KEYS, LN2_Q8, LOG2E_Q8, MASKED
from ...tiling import KEY_BLOCK
from ..isa.amx_tiles import BLOCK, SIDE, VOID, WIDTH
from ..isa.score_calls import function_type
from ..isa.vectors import (
    F32,
    I8,
    I16,
    I32,
    I64,
    call,
    constant,
    load_at,
    pointer,
    pointer_at,
    splat,
    store_at,
    vector,
)
from .amx_stream_data import (
    ADDRESSES,
    AT,
    BEFORE,
    FIELDS,
    FIRST_EDGE,
    GROUP,
    TILE,
    TURN,
    WORDS,
    Turn,
)
from .amx_stream_pieces import Operands, Stream, spread


def hide(module, row_bytes: int, step: int) -> ir.Function:
    """f(x, lo, hi, first): scores x of keys that a row does not see become those of weight 0.

    row_bytes, step : from row to row, and from 32 keys to the next

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
        key = b.sub(load_at(b, keys, I64, b.mul(m, I64(8)), 8), first)
        key = call(b, "llvm.smin.i64", I64, key, I64(KEY_BLOCK))
        return splat(b, b.trunc(call(b, "llvm.smax.i64", I64, key, I64(0)), I16), WORDS)

    with cgutils.for_range(b, I64(BLOCK)) as loop:
        start = bound(lo, loop.index)
        stop = bound(hi, loop.index)
        row = pointer_at(b, x, b.mul(loop.index, I64(row_bytes)))
        for v in range(KEY_BLOCK // BLOCK):
            keys = ir.Constant(WORDS, list(range(v * BLOCK, (v + 1) * BLOCK)))
            seen = b.and_(b.icmp_signed(">=", keys, start), b.icmp_signed("<", keys, stop))
            y = load_at(b, row, WORDS, v * step, 64)
            store_at(b, b.select(seen, y, constant(WORDS, MASKED)), row, v * step, 64)
    b.ret_void()
    return function


class Pipeline:
    """Emits one turn from the rows of the table: u-2 to u+1."""

    def __init__(self, b, table, scratch, turn, steps: int, values: int, changed: bool) -> None:
        self.b, self.stream, self.steps, self.values = (
            b,
            Stream(b, scratch, steps, values, changed),
            steps,
            values,
        )
        self.scratch = scratch
        row = pointer_at(b, table, b.mul(turn, I64(8 * FIELDS)))
        self.following, self.now, self.last, self.before = (
            self._turn(row, n) for n in (BEFORE + 1, BEFORE, BEFORE - 1, BEFORE - 2)
        )
        odd = b.and_(turn, I64(1))
        other = b.mul(odd, I64(AT.other_weights))
        self.new_weights = pointer_at(b, scratch, b.add(I64(AT.weights), other))
        self.weights = pointer_at(b, scratch, b.sub(I64(AT.weights + AT.other_weights), other))
        # groups of weights beside PV 2 and on, in order; the rest is left for QK 0 and 1 of the
        # next turn
        self.early = min(BLOCK // GROUP, values - 2)
        self.late = (BLOCK // GROUP - self.early) // 2 * GROUP

    def _turn(self, row, n: int) -> Turn:
        """Row n of the table from `row` on: pointers, but for the last fields."""
        b = self.b
        numbers = Turn(*(load_at(b, row, I64, 8 * FIELDS * n + place, 8) for place in TURN))
        addresses = (pointer(b, x) for x in numbers[:ADDRESSES])
        return Turn._make([*addresses, *numbers[ADDRESSES:]])

    def change_scores(self) -> None:
        """The function takes float32 scores of block u to int16; rows that do not exist get 0."""
        b, now = self.b, self.now
        floats = b.bitcast(pointer_at(b, self.scratch, AT.floats), F32.as_pointer())
        scores = pointer_at(b, self.scratch, AT.scores)
        function = b.inttoptr(now.function, function_type(F32).as_pointer())
        b.call(
            function,
            [
                pointer(b, now.frame), floats, b.bitcast(scores, F32.as_pointer()),
                b.bitcast(pointer(b, now.base), I32.as_pointer()), I64(KEY_BLOCK),
                now.queries, now.keys, now.batch, now.head, now.query, now.first,
                ir.Constant(F32, float(LN2_Q8)), ir.Constant(F32, float(LOG2E_Q8)),
            ],
        )  # fmt: skip
        with cgutils.for_range_slice(b, now.queries, I64(BLOCK), I64(1), I64) as (row, _):
            to = pointer_at(b, scores, b.mul(row, I64(self.stream.score_row)))
            for v in range(KEY_BLOCK // BLOCK):
                store_at(b, constant(WORDS, 0), to, v * self.stream.score_step, 64)

    def hide_edges(self) -> None:
        """Hide what the rows of block u do not attend to, where some attend only to a part of it."""
        lo = self.now.lo
        with self.b.if_then(self.b.icmp_unsigned("==", lo, I64(FIRST_EDGE)), likely=False):
            self.hide_first()
        with self.b.if_then(self.b.icmp_unsigned(">", lo, I64(FIRST_EDGE)), likely=False):
            now = self.now
            x = pointer_at(self.b, self.scratch, AT.scores)
            bounds = (pointer(self.b, keys) for keys in (now.lo, now.hi))
            places = self.stream.score_row, self.stream.score_step
            self.b.call(hide(self.b.module, *places), [x, *bounds, now.first])

    def hide_first(self) -> None:
        """Scores of the sequence's first keys become those of weight 0."""
        b = self.b
        x = pointer_at(b, self.scratch, AT.scores)
        seen = ir.Constant(vector(ir.IntType(1), BLOCK), [j >= FIRST_KEYS for j in range(BLOCK)])
        with cgutils.for_range(b, I64(BLOCK)) as loop:
            row = pointer_at(b, x, b.mul(loop.index, I64(self.stream.score_row)))
            y = load_at(b, row, WORDS, 0, 64)
            store_at(b, b.select(seen, y, constant(WORDS, MASKED)), row, 0, 64)

    def scores_of(self, turn: Turn, n) -> Operands:
        """The operands of QK n (an IR value)."""
        right = pointer_at(self.b, turn.k, self.b.mul(n, I64(self.steps * SIDE * TILE)))
        return Operands(turn.q, I64(self.steps * WIDTH), I64(WIDTH), right)

    def values_of(self, n) -> Operands:
        """The operands of PV n of the last turn's block: two steps, halves of the keys."""
        right = pointer_at(self.b, self.last.v, self.b.mul(n, I64(2 * SIDE * TILE)))
        return Operands(self.weights, I64(WIDTH), I64(BLOCK * WIDTH), right)

    def choose(self, t, first: Operands, second: Operands) -> Operands:
        """`first` where t is 0, `second` where it is 1."""
        b = self.b
        test = b.icmp_signed("==", t, I64(0))
        return Operands(*(b.select(test, x, y) for x, y in zip(first, second, strict=True)))

    def sums_of(self, t):
        """Where the sums of an even or odd block are."""
        return pointer_at(self.b, self.scratch, self.b.mul(t, I64(AT.other_sums)))

    def pair(self, emit) -> None:
        """emit(t) for two blocks one after the other, t = 0 and 1."""
        with cgutils.for_range(self.b, I64(2)) as loop:
            emit(loop.index)

    def columns(self, turn: Turn, n):
        """Columns 32 * n and on of a turn's O."""
        return pointer_at(self.b, turn.o, self.b.mul(n, I64(BLOCK * 4)))

    def first_scores(self) -> None:
        """QK 0, 1 beside the last weights of block u-1 and the last values of block u-2."""
        b = self.b
        s = self.stream

        def emit(t):
            other = self.sums_of(b.sub(I64(1), t))
            o = self.columns(self.before, b.add(t, I64(self.values - 2)))
            first = b.add(I64(self.early * GROUP), b.mul(t, I64(self.late)))
            weights = s.softmax_rows(first, self.late, self.weights)
            beside = spread(weights, s.value_rows(self.sums_of(t), o))
            now = self.scores_of(self.now, t)
            following = self.scores_of(self.now, b.add(t, I64(1)))
            s.block("tdpbssd", now, following, self.steps, other, beside)

        self.pair(emit)

    def score_work(self, t, n):
        """Sums of QK n to scores."""
        b = self.b
        now = self.now
        ck = pointer_at(b, now.ck, b.mul(n, I64(BLOCK * 4)))
        at, step = (AT.floats, 4 * BLOCK) if self.stream.changed else (AT.scores, BLOCK * 64)
        x = pointer_at(b, self.scratch, b.add(I64(at), b.mul(n, I64(step))))
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
                beside = spread(s.softmax_rows(first, GROUP, self.new_weights), beside)
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


def emit_stream(b, table, count, scratch, steps: int, values: int, changed: bool) -> None:
    """The body of f(table, count, scratch) -> turns that are finished, from 0 to count.

    changed : whether a function changes the scores
    """

    def pipeline(turn):
        return Pipeline(b, table, scratch, turn, steps, values, changed)

    def merge(p, turn):
        """The state takes in block u-1, whose softmax is complete now.

        Or the stream ends, if scores left int16.
        """
        left = b.and_(p.stream.left_int16(), b.icmp_signed(">", turn, I64(0)))  # turn 0 fills
        with b.if_then(left, likely=False):
            b.ret(b.sub(turn, I64(1)))
        p.stream.merge(p.last.o, p.last.m, p.last.l, pointer(b, p.last.base))

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
    if changed:
        p.change_scores()
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
