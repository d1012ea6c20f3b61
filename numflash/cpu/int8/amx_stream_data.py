"""What AMX's software-pipelined stream reads and writes.

The table of turns, the stream's scratch, and loads and stores of both as LLVM instructions.
"""

from __future__ import annotations

from typing import NamedTuple

from ..isa.amx_tiles import ROWS, WIDTH
from ..isa.vectors import F32, I8, I16, I32, constant, signed16, vector

TILE = ROWS * WIDTH  # bytes
GROUP = 8  # rows whose octaves are found together
INTS, FLOATS, WORDS, BYTES = (
    vector(t, 64 // n) for t, n in ((I32, 4), (F32, 4), (I16, 2), (I8, 1))
)


class Turn(NamedTuple):
    """Byte offsets in a row of the table of turns.

    Addresses and numbers of one query tile of 32 rows and one key block.
    """

    q: int = 0  # rows of int8, `64 * steps` bytes apart
    cq: int = 8  # their scales
    k: int = 16  # packed keys of the block
    ck: int = 24  # their scales
    v: int = 32  # packed values of the block
    o: int = 40  # rows of O, float32
    m: int = 48  # running octaves of the rows
    l: int = 56  # running sums of the rows
    # the first key that each row attends to, int64; `NO_EDGE` (no address): every row attends to
    # the whole block; `FIRST_EDGE`: but for the sequence's first keys
    lo: int = 64
    hi: int = 72  # and the key after the last one
    first: int = 80  # the first key of the block, and how many keys it has: numbers
    keys: int = 88
    # the function that changes the scores, its frame (`score_calls`), batch entry and head as it
    # sees them, the first query, and how many there are
    function: int = 96
    frame: int = 104
    batch: int = 112
    head: int = 120
    query: int = 128
    queries: int = 136
    base: int = 144  # what is taken off these scores, int32 of each row (`rows.State`)


TURN = Turn()
NUMBER = Turn(*(offset // 8 for offset in TURN))  # of each field in a row of the table
BEFORE = 2
AFTER = 2
FIELDS = len(TURN)
ADDRESSES = 8  # the first fields of a turn
NO_EDGE, FIRST_EDGE = 0, 1
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
    # (4, 32, 32) int16: key blocks of 32, rows, keys; a function leaves (32, 128)
    scores: int = 12288
    weights: int = 24576  # two blocks of (2, 32, 64) uint8: halves, rows, keys
    other_weights: int = 4096
    top_words: int = 36864  # (32,) int16 pairs: what weights refer to, Q8.8, twice
    octaves: int = 36864 + 128  # (32,) int32
    scales: int = 36864 + 256  # (32,) float32: what brings a block's sums to the running octave
    totals: int = 36864 + 384  # (32,) int32: sums of the weights
    # (32, 16) int32: partial sums of the weights, then (32,) float32 factors of O
    partial: int = 36864 + 512
    floats: int = 36864 + 512 + 2048  # (32, 128) float32 scores that a function changes
    size: int = 36864 + 512 + 2048 + 16384


AT = Scratch()


def word(n):
    """n, 0 to 65535, in every lane of a vector of int16."""
    return constant(WORDS, signed16(n))
