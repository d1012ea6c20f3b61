# ruff: noqa: ANN001, ANN202 (arguments of compiled functions)
"""Decoding for C: appending tokens to an INT8 cache, and attention of new tokens over it.

The cache of one sequence is one piece of the caller's memory, without a page table. Its bytes are
what `KVCache` has in a page: the layout of `cpu.decode.tiles`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numba import njit

from .. import reference
from ..cpu.decode import tiles
from ..cpu.decode.append import make_append_int8
from ..cpu.decode.flash_decode import make_decode
from ..cpu.decode.matrix_tiles import SCRATCH_ROWS
from ..cpu.decode.task_data import Scratch, Store, sums_rows
from ..cpu.decode_layout import Layout
from ..jit.memory import array_at, uncleared, zeros
from ..numerics.fixedpoint import LOG2E_Q8
from ..numerics.quantization import quantize
from ..tiling import KEY_BLOCK
from ..validation import NO_LIMIT
from .exported import Export, Parameter

F = np.float32
ROWS = 4  # query rows that share what is loaded of K and V; any number of rows is computed by fours
ISAS = ("avx512_vnni", "avx_vnni", "avx2", "neon_dot", "sve")  # in order of preference
HEADS, HEAD_DIM, VALUE_DIM = 2, 38, 36  # of the examples, in which both are padded


def tile_of(isa: str) -> tiles.Tile:
    """The tile of an instruction set, wherever it is made: 128-bit vectors on AArch64."""
    if isa in ("sve", "neon_dot"):
        return tiles.Tile(isa, "int8", 4, 4, 4, v_offset=128, ahead=tiles.ahead(""))
    return tiles.tile(isa, "int8")


def facts(isa: str, lanes: int) -> dict[str, Any]:
    """What the contracts name."""
    tile = tile_of(isa)
    return {
        "panel": tile.panel,
        "group": tile.group,
        "lanes": tile.lanes,
        "q_offset": tile.q_offset,
        "v_offset": tile.v_offset,
    }


def _decode(isa: str) -> Any:
    tile = tile_of(isa)
    kernel = make_decode(tile, ROWS, False, False)
    planes, group, scales = tile.query_planes, tile.group, tile.scales
    lanes, sums = tile.lanes, sums_rows(tile, ROWS)

    @njit(error_model="numpy")
    def decode(
        q, scale, cache, out, m, l, kv_heads, rows, queries, keys, capacity, window, head_dim, value_dim
    ):  # fmt: skip
        channels = (head_dim + group - 1) // group * group
        columns = (value_dim + lanes - 1) // lanes * lanes
        block = KEY_BLOCK * (channels + columns) + scales
        table, lengths = np.zeros((1, 1), np.int32), np.zeros(1, np.int64)
        lengths[0] = keys
        data = array_at(cache, (1, kv_heads, capacity // KEY_BLOCK * block), np.int8)
        units = kv_heads * ((rows + ROWS - 1) // ROWS)
        scratch = Scratch(
            zeros((1, ROWS, planes, channels // group), np.int32, "query words"),
            zeros((1, SCRATCH_ROWS, KEY_BLOCK), np.int32, "scores"),
            uncleared((1, sums, columns), np.float32, "sums"),
            uncleared((1, 3, head_dim), np.float32, "a query row"),
            uncleared((1, ROWS, 5), np.int64, "edges"),
            uncleared((1, ROWS), np.uint8, "rows that are not finite"),
            uncleared((units, ROWS, columns), np.float32, "outputs"),
            uncleared((units, 8), np.float32, "maxima"),
            uncleared((units, 8), np.float32, "sums of weights"),
            zeros((2,), np.int64, "counters"),
        )
        kernel(
            array_at(q, (1, kv_heads, rows, head_dim), np.float32),
            array_at(scale, (1,), np.float32)[0],
            Store(data, table, lengths),
            scratch,
            (queries, 1, window if window > 0 else NO_LIMIT, 0, NO_LIMIT, capacity, 1),
            array_at(out, (1, kv_heads, rows, value_dim), np.float32),
            array_at(m, (1, kv_heads, rows), np.float32),
            array_at(l, (1, kv_heads, rows), np.float32),
        )

    return decode


def _append(isa: str) -> Any:
    tile = tile_of(isa)
    kernel = make_append_int8(tile, False)
    group, scales, lanes = tile.group, tile.scales, tile.lanes

    @njit(error_model="numpy")
    def append(key, value, offset, cache, kv_heads, tokens, keys, capacity, head_dim, value_dim):
        channels = (head_dim + group - 1) // group * group
        columns = (value_dim + lanes - 1) // lanes * lanes
        block = KEY_BLOCK * (channels + columns) + scales
        table, lengths, counts = np.zeros((1, 1), np.int32), np.zeros(1, np.int64), np.zeros(1, np.int64)  # fmt: skip
        lengths[0], counts[0] = keys, tokens
        sizes = np.zeros(6, np.int64)
        sizes[0], sizes[1], sizes[2] = 0, NO_LIMIT, capacity
        sizes[3], sizes[4], sizes[5] = columns, channels, value_dim
        kernel(
            array_at(key, (1, kv_heads, tokens, head_dim), np.float32),
            array_at(value, (1, kv_heads, tokens, value_dim), np.float32),
            counts,
            array_at(cache, (1, kv_heads, capacity // KEY_BLOCK * block), np.int8),
            table,
            lengths,
            sizes,
            array_at(offset, (1, kv_heads, head_dim), np.float32),
            uncleared((kv_heads, 4, max(channels, value_dim)), np.float32, "rounded rows"),
        )

    return append


def _tokens(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Random keys and values, values of very different size among them."""
    rng = np.random.default_rng(11)
    key, value = (rng.standard_normal((HEADS, count, d), np.float32) for d in (HEAD_DIM, VALUE_DIM))
    value[:, ::3] *= F(1e-3)
    return key, value


def _filled(
    isa: str, key: np.ndarray, value: np.ndarray, capacity: int
) -> tuple[np.ndarray, Any, Any]:
    """A cache's bytes, written by NumPy, and the quantised tokens."""
    layout = Layout(tile_of(isa), HEADS, HEAD_DIM, VALUE_DIM, capacity)
    k, v = (quantize(x[None]) for x in (key, value))
    store = layout.allocate(1, 1, 1)
    empty = [(0, 0), (0, 0), (0, capacity - key.shape[1]), (0, 0)]
    scales = np.stack([np.pad(x.scale, empty)[0, :, :, 0] for x in (k, v)])
    codes = [np.pad(x.data, empty)[0] for x in (k, v)]
    layout.write(store, np.array([0]), codes[0], codes[1], scales)
    return store.data, k, v


def _decode_example(isa: str, lanes: int) -> list[Any]:
    rows, queries, keys, capacity = 6, 2, 150, 256  # three query heads of a KV head, two new tokens
    scale = HEAD_DIM**-0.5
    key, value = _tokens(keys)
    cache, k, v = _filled(isa, key, value, capacity)
    query = np.random.default_rng(12).standard_normal((HEADS, rows, HEAD_DIM), np.float32)
    q = reference.decode_query(query.reshape(HEADS * rows // queries, queries, HEAD_DIM))
    seen = np.arange(keys)[None] <= np.arange(queries)[:, None] + keys - queries
    k, v = (replace(x, data=x.data[0], scale=x.scale[0]) for x in (k, v))
    out, m, l = reference.integer_decode(q, k, v, scale, seen)
    return [
        query, np.array([scale * LOG2E_Q8], F), cache, out, m, l,
        HEADS, rows, queries, keys, capacity, 0, HEAD_DIM, VALUE_DIM,
    ]  # fmt: skip


def _append_example(isa: str, lanes: int) -> list[Any]:
    key, value = _tokens(KEY_BLOCK)
    cache, _, _ = _filled(isa, key, value, KEY_BLOCK)
    offset = np.zeros((HEADS, HEAD_DIM), F)
    sizes = HEADS, KEY_BLOCK, 0, KEY_BLOCK, HEAD_DIM, VALUE_DIM
    return [key, value, offset, cache, *sizes]


P = Parameter
_CACHE = (
    "[kv_heads][capacity / 128][block]; a block of 128 tokens is 128 float32 scales of keys and 128 of "
    "values, keys as [panel of {panel}][channel group][key][{group} channels], {q_offset} added, values "
    "as [chunk of {panel} columns][key group][column][{group} keys], {v_offset} added; channels are padded "
    "with zeros to a multiple of {group}, columns to one of {lanes}"
)
EXPORTS = {
    "int8-append": Export(
        "tokens rounded to 8 bits into the INT8 cache of one sequence",
        _append,
        (
            P("const float *", "key", "[kv_heads][tokens][head_dim]"),
            P("const float *", "value", "[kv_heads][tokens][value_dim]"),
            P("const float *", "offset", "[kv_heads][head_dim]: subtracted from every key of the sequence (their mean, or zeros)"),
            P("int8_t *", "cache", _CACHE + "; an empty one is zeros", True),
            P("int64_t", "kv_heads", ""),
            P("int64_t", "tokens", "to append"),
            P("int64_t", "keys", "tokens that are in the cache already; keys + tokens at most capacity"),
            P("int64_t", "capacity", "a multiple of 128"),
            P("int64_t", "head_dim", ""),
            P("int64_t", "value_dim", ""),
        ),
        _append_example,
        facts=facts,
        isas=ISAS,
    ),
    "int8-decode": Export(
        "attention of new tokens over an INT8 cache on one thread, with the bits of the integer model",
        _decode,
        (
            P("const float *", "q", "[kv_heads][rows][head_dim]: rows are [query head of the group][new token]"),
            P("const float *", "scale", "1: softmax scale * log2(e) * 256"),
            P("const int8_t *", "cache", _CACHE + ": as int8-append writes it, the new tokens' keys in it"),
            P("float *", "out", "[kv_heads][rows][value_dim]", True),
            P("float *", "m", "[kv_heads][rows]: the octave of each row's maximum", True),
            P("float *", "l", "[kv_heads][rows]: sums of weights, 1.0 being 16320; NaN where a token was not finite", True),
            P("int64_t", "kv_heads", ""),
            P("int64_t", "rows", "a multiple of queries; four at a time share what is loaded"),
            P("int64_t", "queries", "new tokens; the last is at position keys - 1, each attends to the tokens up to its own"),
            P("int64_t", "keys", "tokens in the cache, 1 or more"),
            P("int64_t", "capacity", "a multiple of 128: what the cache has room for"),
            P("int64_t", "window", "newest tokens that a row attends to; 0 for all"),
            P("int64_t", "head_dim", ""),
            P("int64_t", "value_dim", ""),
        ),
        _decode_example,
        facts=facts,
        isas=ISAS,
    ),
}  # fmt: skip
