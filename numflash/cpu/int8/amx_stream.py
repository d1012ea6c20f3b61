"""The software-pipelined stream of AMX, as `flash_int8` calls it.

One software-pipelined run over the key blocks of one or several query tiles that have no options but
a score function. This module lists those blocks in the table of turns, compiles the stream and calls it:

    amx_stream_data       the table of turns, the scratch, loads and stores as LLVM instructions
    amx_stream_pieces     blocks of tile products; scores, softmax and values as vector work
    amx_stream_pipeline   which vector work runs beside which products, turn by turn

The stream is one function in LLVM's language, made for a number of steps and of value blocks;
`address_of` compiles it, `run` calls it. It returns the number of turns that it has finished: fewer
than given if scores left int16. The bits are those of `flash_int8`'s steps: the same operations on
every number, in the same order.
"""

from __future__ import annotations

import functools

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

from ...jit import target
from ...jit.compiler import bare, kernel
from ...numerics.fixedpoint import FIRST_KEYS
from ...tiling import KEY_BLOCK
from ..isa.amx_tiles import BLOCK, WIDTH
from ..isa.score_calls import batch_of, must_mask
from ..isa.vectors import I8, I64, address, pointer
from .amx_stream_data import (
    AFTER,
    AT,
    BEFORE,
    FIELDS,
    FIRST_EDGE,
    NEAR,
    NO_EDGE,
    NUMBER,
    TURNS,
)
from .amx_stream_pipeline import emit_stream

FUNCTION = ir.FunctionType(I64, [I8.as_pointer(), I64, I8.as_pointer()])


@functools.cache
def _address(steps: int, values: int, changed: bool):
    @intrinsic
    def address(typingctx):
        def codegen(context, b, sig, args):
            target.guard("amx_int8", context.codegen())
            function = ir.Function(b.module, FUNCTION, b.module.get_unique_name("amx.stream"))
            function.linkage = "internal"
            inner = ir.IRBuilder(function.append_basic_block("entry"))
            emit_stream(inner, *function.args, steps, values, changed)
            return b.ptrtoint(function, I64)

        return types.intp(), codegen

    return address


@functools.cache
def _compiled(steps: int, values: int, changed: bool) -> int:
    address = _address(steps, values, changed)

    @kernel
    def stream():
        return address()

    return int(stream())


def address_of(d: int, dv: int, changed: bool = False) -> int:
    """The address of the stream for head sizes d and dv, compiled where it is not yet.

    Of the one that calls a function for each block of scores if they are `changed`. 0 if there is
    none.
    """
    steps = -(-d // WIDTH)
    values = -(-dv // (2 * BLOCK)) * 2
    if steps > MOST_STEPS or values > MOST_VALUES:
        return 0
    return _compiled(steps, values, changed)


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


def table_shape() -> tuple[int, int, int]:
    """Shape of two tables of turns, int64: of the tiles that wait, and of one by itself."""
    return 2, BEFORE + TURNS + AFTER, FIELDS


def scratch_size() -> int:
    """Bytes of scratch; behind them, m, l, base and O of the tile that padding turns write to.

    BLOCK float32 for each column of O.
    """
    return AT.size + 3 * BLOCK * 4


PART, NONE, EDGE, WHOLE = range(4)


@bare
def seen(tile, i, first):
    """What the BLOCK rows from i on see of the block of keys `first`.

    All of it (but for the sequence's first keys), each row some, or none; or only some rows do.

    The bounds of the rows are non-decreasing.
    """
    last, stop = min(i + BLOCK, tile.real) - 1, first + KEY_BLOCK
    if tile.lo[i] >= stop or tile.hi[last] <= first:
        return NONE
    if tile.lo[last] <= max(first, tile.first_keys) and tile.hi[i] >= stop:
        return WHOLE
    if tile.lo[last] < stop and tile.hi[i] > first:
        for r in range(i, last + 1):
            if tile.hi[r] <= tile.lo[r]:
                return PART
        return EDGE
    return PART


@bare
def stream_stop(tile, kv, place, functions, first, stop):
    """The end of the blocks from key `first` on that the stream can take.

    Of finite keys, seen by all rows of a turn or by none, and no mask function to ask.
    """
    masks, last = functions.masked != functions.unmasked, place.row + tile.real - 1
    for c in range(first, stop, KEY_BLOCK):
        if kv.wide[c // KEY_BLOCK] != 0:
            return c
        if masks and must_mask(
            functions, place.b, place.h, place.row, last, c, min(c + KEY_BLOCK, stop)
        ):
            return c
        for i in range(0, tile.real, BLOCK):
            if seen(tile, i, c) == PART:
                return c
    return max(first, (stop + KEY_BLOCK - 1) // KEY_BLOCK * KEY_BLOCK)


@bare
def most_turns(rows, keys):
    """As many turns as a tile of `rows` rows takes at most."""
    return (rows + BLOCK - 1) // BLOCK * ((keys + KEY_BLOCK - 1) // KEY_BLOCK)


@bare
def add_turns(table, count, tile, kv, place, functions, keys, state, first, stop):
    """The turns of all rows of a tile and the key blocks first .. stop, behind the `count` turns that
    the table has; returns how many it has now.

    tile, kv, place, state : as in `flash_int8`;  keys : of the sequence
    """
    stride, width, n = tile.q.shape[1], state.o.shape[1], BEFORE + count
    for near in range(first, stop, NEAR * KEY_BLOCK):
        for i in range(0, tile.rows, BLOCK):
            for c in range(near, min(stop, near + NEAR * KEY_BLOCK), KEY_BLOCK):
                sight = seen(tile, i, c)
                if sight == NONE:
                    continue
                turn = table[n]
                turn[NUMBER.q] = address(tile.q) + i * stride
                turn[NUMBER.cq] = address(tile.scale) + 4 * i
                turn[NUMBER.k] = address(kv.keys) + c * stride
                turn[NUMBER.ck] = address(kv.scale) + 4 * c
                turn[NUMBER.v] = address(kv.values) + c * width
                turn[NUMBER.o] = address(state.o) + i * width * 4
                turn[NUMBER.m] = address(state.m) + 4 * i
                turn[NUMBER.l] = address(state.l) + 4 * i
                turn[NUMBER.lo] = FIRST_EDGE if c < tile.first_keys else NO_EDGE
                if sight == EDGE or 0 < tile.first_keys - c < FIRST_KEYS:
                    turn[NUMBER.lo] = address(tile.lo) + 8 * i
                turn[NUMBER.hi] = address(tile.hi) + 8 * i
                turn[NUMBER.first] = c
                turn[NUMBER.keys] = min(KEY_BLOCK, keys - c)
                turn[NUMBER.function] = functions.unmasked
                turn[NUMBER.frame] = functions.unmasked_frame
                turn[NUMBER.batch] = batch_of(functions, place.b)
                turn[NUMBER.head] = place.h
                turn[NUMBER.query] = place.row + i
                turn[NUMBER.queries] = min(BLOCK, tile.real - i)
                turn[NUMBER.base] = address(state.base) + 4 * i
                n += 1
    return n - BEFORE


@bare
def run_turns(stream, table, count, scratch):
    """The stream over the `count` turns of a table.

    Whether int16 held all scores; else the states of the tiles are void.
    """
    padding, n = address(scratch) + AT.size, BEFORE + count
    for at, like in ((0, BEFORE), (1, BEFORE), (n, n - 1), (n + 1, n - 1)):
        for field in range(FIELDS):
            table[at, field] = table[like, field]
        table[at, NUMBER.m] = padding
        table[at, NUMBER.l] = padding + BLOCK * 4
        table[at, NUMBER.base] = padding + 2 * BLOCK * 4
        table[at, NUMBER.o] = padding + 3 * BLOCK * 4
    return run(stream, address(table), count, address(scratch)) == count


@bare
def stream_blocks(sizes, table, scratch, tile, kv, place, functions, state, first, stop):
    """Key blocks first .. stop into the state (m, l, O) of a tile.

    The key at which the table of turns begins where scores left int16, and the state is void; else
    `stop`.
    """
    most = TURNS // (tile.rows // BLOCK) * KEY_BLOCK
    for c in range(first, stop, most):
        end = min(stop, c + most)
        n = add_turns(table, 0, tile, kv, place, functions, sizes.keys, state, c, end)
        if n > 0 and not run_turns(sizes.stream, table, n, scratch):
            return c
    return stop
