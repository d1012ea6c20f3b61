"""The memory that a worker of `flash_int8` needs: for one query tile, or for several in a row."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ...jit.compiler import bare, inline
from ...jit.memory import arrays_together
from ...numerics.fixedpoint import FLOAT_VALUES
from ...tiling import KEY_BLOCK
from ..isa.amx_tiles import BLOCK
from ..isa.isas import VECTOR_ISAS, lanes_of, weight_planes
from . import amx_stream
from .rows import State, Tile
from .wide_rows import floats_of

ROWS = 8  # that the softmax takes at a time


class Scratch(NamedTuple):
    """One allocation for arrays of one dtype: `state_of` and `tile_of` give their rows names.

    `rows` are those of the query tile, in whole groups of `ROWS`: the softmax writes what it computes
    of a whole group, also where fewer rows are left. What a tile keeps from one block of keys to the
    next is there `slots` times, once for each tile that waits: `all_rows` = slots * rows.
    """

    rows: int  # of a tile
    # (all_rows, channels) operands of Q.K^T; channels that Q lacks hold anything: those of K are 0
    q: np.ndarray
    x: np.ndarray  # (rows, KEY_BLOCK) int16 scores, Q8.8
    p: np.ndarray  # (rows, KEY_BLOCK) weights, of two planes the low one beside the high one
    wide: np.ndarray  # (rows, KEY_BLOCK) float32 scores where int16 does not hold them
    o: np.ndarray  # (all_rows, columns) float32
    sums: np.ndarray  # (rows * lanes,) int32 partial sums of the weights
    tops: np.ndarray  # (rows,) int16
    # (5, all_rows) float32: scale of the scores, l, scale of the weights, shift of softcap, numbers
    floats: np.ndarray
    ints: np.ndarray  # (5, all_rows) int32: m, octave, total, base, own
    flags: np.ndarray  # (2, all_rows) uint8: live, spoiled
    bounds: np.ndarray  # (3, all_rows) int64: lo, hi, start
    mask_end: np.ndarray  # (rows * KEY_BLOCK,) uint8, for the last part of a mask's rows
    tasks: np.ndarray  # (slots,) int64, which tiles these are
    turns: np.ndarray  # int64, two tables of what `amx_stream` does one after the other
    stream: np.ndarray  # uint8, its scratch


@bare
def state_of(scratch, slot):
    """The online softmax of the tile in a slot."""
    first, stop = slot * scratch.rows, (slot + 1) * scratch.rows
    floats, ints = scratch.floats, scratch.ints
    return State(
        ints[0, first:stop], floats[1, first:stop], scratch.o[first:stop], ints[1, first:stop],
        scratch.tops, ints[3, first:stop], ints[4, first:stop], ints[2, first:stop],
        floats[2, first:stop], scratch.flags[1, first:stop],
    )  # fmt: skip


@bare
def tile_of(scratch, slot, rows, real, first_keys):
    """`real` query rows, padded to `rows`; `load_rows` fills them in."""
    first, stop = slot * scratch.rows, (slot + 1) * scratch.rows
    bounds = scratch.bounds
    return Tile(
        scratch.q[first:stop], scratch.floats[0, first:stop], bounds[0, first:stop],
        bounds[1, first:stop], bounds[2, first:stop], scratch.flags[0, first:stop],
        rows, real, first_keys,
    )  # fmt: skip


@functools.cache
def make_scratch(isa_name: str, pv: str, block_q: int):
    """f(d, dv, slots): the scratch of `slots` tiles of `block_q` rows for head sizes d and dv."""
    isa = VECTOR_ISAS[isa_name]
    step, columns_unit = isa.step, isa.unit
    vector_lanes = lanes_of(isa_name)
    operand = np.uint8 if isa.group == 4 else np.int16
    weight: type[np.generic] = operand
    if pv in FLOAT_VALUES:
        weight = np.float32 if floats_of(isa_name, pv).group == 1 else np.uint16
    weights_of_row = weight_planes(isa_name, pv) * KEY_BLOCK
    streams = isa.tiled and pv == "int8"
    turns_shape = amx_stream.table_shape() if streams else (2, 1, 1)
    stream_size = amx_stream.scratch_size() if streams else 0
    stream_row = 4 * BLOCK if streams else 0  # and bytes for each column of O

    rows = (block_q + ROWS - 1) // ROWS * ROWS

    @inline
    def scratch(d, dv, slots):
        lanes, all_rows = vector_lanes(), slots * rows
        stride, unit_columns = (d + step - 1) // step * step, columns_unit * lanes
        width = (dv + unit_columns - 1) // unit_columns * unit_columns
        return Scratch(
            rows,
            *arrays_together(
                (all_rows, stride), operand, "INT8 query tile",
                (rows, KEY_BLOCK), np.int16, "INT8 scores",
                (rows, weights_of_row), weight, "INT8 weights",
                (rows, KEY_BLOCK), np.float32, "INT8 wide scores",
                (all_rows, width), np.float32, "INT8 output tile",
                (rows * lanes,), np.int32, "INT8 sums of weights",
                (rows,), np.int16, "INT8 tops",
                (5, all_rows), np.float32, "INT8 float state of rows",
                (5, all_rows), np.int32, "INT8 integer state of rows",
                (2, all_rows), np.uint8, "INT8 flags of rows",
                (3, all_rows), np.int64, "INT8 bounds of rows",
                (rows * KEY_BLOCK,), np.uint8, "INT8 last part of the mask",
                (slots,), np.int64, "INT8 tasks",
                turns_shape, np.int64, "INT8 turns of the AMX stream",
                (stream_size + stream_row * width,), np.uint8, "INT8 scratch of the stream",
            ),
        )  # fmt: skip

    return scratch
