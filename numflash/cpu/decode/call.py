"""One call of the decode kernel with few arguments.

A cache, its scratch memory and the state of its rows stay where they are from call to call. Their
addresses and sizes come as one array of numbers, which `launch_decode.DecodePlan` prepares once: unpacking
seventeen arrays takes as long as attention over 300 tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...jit.compiler import bare, kernel
from ...jit.memory import array_at, unpacked
from ...tiling import KEY_BLOCK
from .changes import ChangedScratch
from .flash_decode import make_decode
from .task_data import Scratch, Sizes, Store
from .tiles import Tile


class Numbers(NamedTuple):
    """What the compiled call reads from one int64 array, in this order.

    See `Store`, `Scratch` and `ChangedScratch` for the arrays, whose addresses these are.
    """

    batch: int
    kv_heads: int
    all_rows: int  # query rows of a KV head
    head_dim: int
    value_dim: int
    queries: int  # from here on `task_data.Sizes`
    splits: int
    window: int
    sinks: int
    ring: int
    page_size: int
    workers: int
    tiles: int  # of all workers
    words: int  # of 32 bits in a row of the query
    work_rows: int
    sums_rows: int
    columns: int
    tasks: int
    most: int  # rows that `m` and `l` have room for
    q: int  # from here on addresses, of `Scratch`
    work: int
    sums: int
    line: int
    edges: int
    spoiled: int
    o: int
    m: int
    l: int
    counter: int
    m_out: int
    l_out: int
    pages: int = 0  # from here on `Store`: pages, elements of a head of a page, pages of a sequence
    elements: int = 0
    width: int = 0
    data: int = 0
    table: int = 0
    lengths: int = 0
    cap: int = 0  # from here on options, see `ChangedScratch`
    shift: int = 0
    slopes: int = 0
    group: int = 0  # slopes of a KV head
    mask: int = 0
    new: int = 0  # rows and columns of the mask
    function: int = 0
    frame: int = 0


NUMBERS = len(Numbers._fields)
SIZES = slice(Numbers._fields.index("queries"), Numbers._fields.index("tiles"))
COUNT = len(Sizes._fields)
STORE = slice(Numbers._fields.index("pages"), Numbers._fields.index("cap"))
OPTIONS = slice(Numbers._fields.index("cap"), Numbers._fields.index("function"))
FUNCTION, FRAME = (Numbers._fields.index(name) for name in ("function", "frame"))


@functools.cache
def make_scratch_at(tile: Tile, rows: int, changed: bool) -> Any:
    """f(p: Numbers) -> `Scratch`, or `ChangedScratch` where there are options."""
    planes = tile.query_planes

    @bare
    def scratch_at(p):
        return Scratch(
            array_at(p.q, (p.tiles, rows, planes, p.words), np.int32),
            array_at(p.work, (p.tiles, p.work_rows, KEY_BLOCK), np.int32),
            array_at(p.sums, (p.workers, p.sums_rows, p.columns), np.float32),
            array_at(p.line, (p.workers, 3, p.head_dim), np.float32),
            array_at(p.edges, (p.tiles, rows, 5), np.int64),
            array_at(p.spoiled, (p.tiles, rows), np.uint8),
            array_at(p.o, (p.tasks, rows, p.columns), np.float32),
            array_at(p.m, (p.tasks, p.most), np.float32),
            array_at(p.l, (p.tasks, p.most), np.float32),
            array_at(p.counter, (2,), np.int64),
        )

    @bare
    def changed_scratch_at(p):
        s = scratch_at(p)
        heads = p.kv_heads if p.group > 0 else 0
        return ChangedScratch(
            s.q,
            s.work,
            s.sums,
            s.line,
            s.edges,
            s.spoiled,
            s.o,
            s.m,
            s.l,
            s.counter,
            array_at(p.cap, (2,), np.float32),
            array_at(p.shift, (p.batch, p.kv_heads, p.all_rows), np.float32),
            array_at(p.slopes, (heads, p.group), np.float32),
            array_at(p.mask, (p.batch if p.new > 0 else 0, p.new, p.new), np.uint8),
            p.function,
            p.frame,
        )

    return changed_scratch_at if changed else scratch_at


@functools.cache
def make_call(tile: Tile, rows: int, changed: bool, parallel: bool) -> Callable[..., bool]:
    """call(query, c, out, numbers) -> whether some row is to be done again in float64.

    query, out : contiguous float32, (B, H, L, D) and (B, H, L, Dv), of any shape of that size
    c : float32 factor of the scores, see `flash_decode`
    numbers : address of int64 `Numbers`: reading an array object takes 0.15 us more
    """
    decode = make_decode(tile, rows, changed, parallel)
    scratch_at = make_scratch_at(tile, rows, changed)
    bits = tile.bits

    @kernel
    def call(query, c, out, numbers):
        given = array_at(numbers, (NUMBERS,), np.int64)
        p = Numbers(*unpacked(given, NUMBERS))
        store = Store(
            array_at(p.data, (p.pages, p.kv_heads, p.elements), bits),
            array_at(p.table, (p.batch, p.width), np.int32),
            array_at(p.lengths, (p.batch,), np.int64),
        )
        heads = (p.batch, p.kv_heads, p.all_rows)
        scratch = scratch_at(p)
        decode(
            array_at(query.ctypes.data, (*heads, p.head_dim), np.float32),
            c,
            store,
            scratch,
            unpacked(given[SIZES], COUNT),
            array_at(out.ctypes.data, (*heads, p.value_dim), np.float32),
            array_at(p.m_out, heads, np.float32),
            array_at(p.l_out, heads, np.float32),
        )
        return scratch.counter[1] != 0

    return call
