"""Rungs 5 to 8 of the ladder, in integers on the package's register tiles.

Unfused, fused, parallel, causal.

One head, with the bits of `reference.integer_model` with `plain=True`. Query rows fill whole tiles and columns whole
vectors (`Operands` pads them); what masks, options and extreme scores need is in `flash_int8`, the
same algorithm without these limits.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numba import prange

from ...errors import ArgumentError
from ...jit.compiler import inline, kernel
from ...jit.memory import empty, zeros
from ...numerics.fixedpoint import MOST_BELOW
from ...numerics.quantization import quantize_problem
from ...numerics.scores import combined_scale
from ...tiling import KEY_BLOCK, tiling
from ...validation import describe
from ...validation.options import Options
from ..int8 import blocks, softmax_vectors
from ..int8.packing import PackedKeys, pack_keys, pack_values
from ..isa.amx_tiles import tile_state
from ..isa.isas import VECTOR_ISAS, lanes_of, padded, running_lanes
from ..isa.operands import KeyRange, Queries
from ..isa.vectors import next_task
from ..semantics import HIDDEN, UNSEEN

F, I = np.float32, np.int32
MOST_OCTAVES = 110  # int16 scores are exact below


class Operands(NamedTuple):
    """One quantised head, padded.

    q (rows, channels) first dot operand, cq (rows,) and ck (1, S) scales, k and v int8 (1, S, D).
    """

    q: np.ndarray
    cq: np.ndarray
    k: np.ndarray
    ck: np.ndarray
    v: np.ndarray
    v_scale: np.ndarray
    length: int
    dv: int


def quantise(isa_name: str, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> Operands:
    """Operands from float32 query (L, D), key (S, D) and value (S, Dv).

    Raises
    ------
    ArgumentError
        No keys, or scores that may leave the range of int16 Q8.8, which `flash_int8` takes another
        path for.
    """
    if not key.shape[0]:
        raise ArgumentError("key: got 0 keys; allowed: 1 or more on the ladder")
    isa, t = VECTOR_ISAS[isa_name], tiling(isa_name)
    q, k, v = (x[None, None] for x in (query, key, value))
    problem = quantize_problem(describe(q, k, v, Options(), "int8"))
    cq, ck = combined_scale(problem.query, problem.key, problem.scale)
    k, v = problem.key.data[0], problem.value.data[0]
    rows = [
        np.linalg.norm(x[0].astype(np.float64), axis=-1) * c[0]
        for x, c in ((problem.query.data[0], cq[0]), (k, ck[0]))
    ]
    if not rows[0].max(initial=0) * rows[1].max() <= 256 * MOST_OCTAVES:
        raise ArgumentError(
            f"query and key: got scores of up to {rows[0].max() * rows[1].max() / 256:.0f} octaves; "
            f"allowed: {MOST_OCTAVES} on the ladder"
        )
    length, channels = query.shape[0], padded(query.shape[1], isa.step)
    whole = padded(length, t.block_q)
    columns = padded(value.shape[1], isa.unit * running_lanes(isa_name))
    q = empty((whole, channels), np.uint8 if isa.group == 4 else np.int16)
    q[:] = isa.q_offset
    q[:length, : query.shape[1]] = problem.query.data[0, 0].astype(np.int16) + isa.q_offset
    factor = np.zeros(whole, F)
    factor[:length] = cq[0, 0]
    wide = np.zeros((1, v.shape[1], columns), np.int8)
    wide[..., : value.shape[1]] = v
    return Operands(
        q,
        factor,
        k,
        np.ascontiguousarray(ck[0]),
        wide,
        problem.value.scale[0, 0, 0],
        length,
        value.shape[1],
    )


@functools.cache
def make_parts(isa_name: str):
    """The four parts of the integer pipeline on one query tile and key block.

    Scores, softmax, merge, values.

    x, p : (block_q, KEY_BLOCK) int16 Q8.8 scores and weights;  row : first row of the tile in q and
        cq;  c : first key
    state : one row of each per query row: octave, octave_q8, total (of the block), m, l (running),
        scale
    """
    block_q, vector_lanes = tiling(isa_name).block_q, lanes_of(isa_name)
    score_block, value_block = blocks.score_block(isa_name), blocks.value_block(isa_name, "int8")
    octaves = softmax_vectors.block_tops(isa_name, KEY_BLOCK)
    weights = softmax_vectors.row_weights(isa_name, KEY_BLOCK)
    totals = softmax_vectors.block_totals(isa_name)

    @inline
    def scores(q, cq, row, keys, c, x):
        """x = Q.K^T, scaled, in Q8.8.

        Keys after the last one and, in a causal tile, after the row are the caller's to hide.
        """
        factor = cq[row : row + block_q]
        queries = Queries(q[row : row + block_q], q.shape[1], factor, block_q)
        score_block(queries, KeyRange(keys.data, keys.start, keys.scale, c, KEY_BLOCK), x)

    @inline
    def softmax(x, octave, octave_q8, p, sums, total):
        """Each row's own octave in the block, its weights below that octave, and their sum."""
        lanes = vector_lanes()
        for i in range(0, block_q, 8):
            octaves(x, i * KEY_BLOCK, KEY_BLOCK, octave, octave_q8, i)
        for i in range(block_q):
            weights(x, i * KEY_BLOCK, octave_q8, i, p, i * KEY_BLOCK, sums, i * lanes)
        for i in range(0, block_q, 8):
            totals(sums, total, i)

    @inline
    def merge(octave, total, m, l, scale, o):
        """Running octave m and sum l; o shrinks by whole octaves where m grows.

        `scale` becomes 2**(octave - m) for this block.
        """
        for i in range(block_q):
            if octave[i] > m[i]:
                shrink, line = F(2.0) ** F(max(m[i] - octave[i], -MOST_BELOW)), o[i]
                for t in range(line.size):
                    line[t] = line[t] * shrink
                l[i], m[i] = l[i] * shrink, octave[i]
            scale[i] = F(2.0) ** F(max(octave[i] - m[i], -MOST_BELOW))
            l[i] = F(l[i] + F(F(total[i]) * scale[i]))

    @inline
    def values(p, v, c, scale, total, o):
        """o += P.V, in integers within the block."""
        value_block(p, v, c, KEY_BLOCK, scale, total, block_q, o)

    return scores, softmax, merge, values


@functools.cache
def make_unfused(isa_name: str):
    """Rung 5: register tiles, one pass after the other over the scores and weights of the whole
    problem.

    f(q, cq, keys, n_keys, v, whole, o, l): whole = scores and weights (tiles, blocks, block_q,
    KEY_BLOCK), octaves and totals (tiles, blocks, block_q) int32; o (rows, columns) and l (rows,)
    float32.
    """
    scores, softmax, merge, values = make_parts(isa_name)
    vector_lanes, block_q, (begin, end) = (
        lanes_of(isa_name),
        tiling(isa_name).block_q,
        tile_state(isa_name),
    )

    @kernel
    def unfused(q, cq, keys, n_keys, v, whole, o, l):
        begin()
        x, p, octave, total = whole
        octave_q8, sums = np.zeros(block_q, np.int16), np.zeros(block_q * vector_lanes(), np.int32)
        m, scale = np.zeros(block_q, np.int32), np.zeros(block_q, np.float32)
        tiles, blocks = x.shape[:2]
        for tile in range(tiles):
            for b in range(blocks):
                scores(q, cq, tile * block_q, keys, b * KEY_BLOCK, x[tile, b])
                x[tile, b, :, n_keys - b * KEY_BLOCK :] = HIDDEN
        for tile in range(tiles):
            for b in range(blocks):
                softmax(x[tile, b], octave[tile, b], octave_q8, p[tile, b], sums, total[tile, b])
        for tile in range(tiles):
            part = o[tile * block_q : (tile + 1) * block_q]
            line = l[tile * block_q : (tile + 1) * block_q]
            part[:], line[:], m[:] = F(0), F(0), I(UNSEEN)
            for b in range(blocks):
                merge(octave[tile, b], total[tile, b], m, line, scale, part)
                values(p[tile, b], v, b * KEY_BLOCK, scale, total[tile, b], part)
        end()

    return unfused


@functools.cache
def make_tile(isa_name: str, causal: bool):
    """One query tile against all keys that it attends to, fused.

    f(q, cq, keys, n_keys, v, row, room, o, l).
    """
    scores, softmax, merge, values = make_parts(isa_name)
    block_q = tiling(isa_name).block_q

    @inline
    def tile(q, cq, keys, n_keys, v, row, room, o, l):
        x, p, octave, octave_q8, total, sums, m, scale = room
        # causal: key blocks above the diagonal do not exist
        stop = min(n_keys, row + block_q) if causal else n_keys
        o[:], l[:], m[:] = F(0), F(0), I(UNSEEN)
        for c in range(0, stop, KEY_BLOCK):
            scores(q, cq, row, keys, c, x)
            if c + KEY_BLOCK > n_keys:
                x[:, n_keys - c :] = HIDDEN
            on_diagonal = causal and c + KEY_BLOCK > row + 1
            if on_diagonal:
                for i in range(block_q):
                    x[i, max(row + i + 1 - c, 0) :] = HIDDEN
            softmax(x, octave, octave_q8, p, sums, total)
            if on_diagonal:
                for i in range(c - row):  # rows that see nothing of this block
                    p[i], total[i], octave[i] = 0, I(0), I(UNSEEN)
            merge(octave, total, m, l, scale, o)
            values(p, v, c, scale, total, o)

    return tile


@functools.cache
def make_room(isa_name: str):
    """What a worker needs beside o and l.

    The scores and weights of a tile, and a few values per row.
    """
    vector_lanes, block_q = lanes_of(isa_name), tiling(isa_name).block_q
    operand = np.uint8 if VECTOR_ISAS[isa_name].group == 4 else np.int16

    @inline
    def room():
        x = zeros((block_q, KEY_BLOCK), np.int16, "scores")
        p = zeros((block_q, KEY_BLOCK), operand, "weights")
        return (
            x,
            p,
            np.zeros(block_q, np.int32),
            np.zeros(block_q, np.int16),
            np.zeros(block_q, np.int32),
            zeros((block_q * vector_lanes(),), np.int32, "sums"),
            np.zeros(block_q, np.int32),
            np.zeros(block_q, np.float32),
        )

    return room


@functools.cache
def make_fused(isa_name: str):
    """Rung 6: all parts on one tile before the next: f(q, cq, keys, n_keys, v, o, l)."""
    tile, room, block_q = make_tile(isa_name, False), make_room(isa_name), tiling(isa_name).block_q
    begin, end = tile_state(isa_name)

    @kernel
    def fused(q, cq, keys, n_keys, v, o, l):
        begin()
        mine = room()
        for row in range(0, q.shape[0], block_q):
            tile(q, cq, keys, n_keys, v, row, mine, o[row : row + block_q], l[row : row + block_q])
        end()

    return fused


@functools.cache
def make_parallel(isa_name: str, causal: bool):
    """Rungs 7 and 8: threads take the next tile, the longest first.

    f(q, cq, keys, n_keys, v, counter, workers, o, l).
    """
    tile, room, block_q = make_tile(isa_name, causal), make_room(isa_name), tiling(isa_name).block_q
    begin, end = tile_state(isa_name)

    @kernel(parallel=True)
    def parallel(q, cq, keys, n_keys, v, counter, workers, o, l):
        tiles = q.shape[0] // block_q
        for _ in prange(workers):
            begin()
            mine = room()
            while True:
                task = next_task(counter)
                if task >= tiles:
                    break
                row = (tiles - 1 - task) * block_q
                tile(
                    q,
                    cq,
                    keys,
                    n_keys,
                    v,
                    row,
                    mine,
                    o[row : row + block_q],
                    l[row : row + block_q],
                )
            end()

    return parallel


def packed(isa_name: str, x: Operands) -> tuple[PackedKeys, np.ndarray]:
    """K and V in the order in which the register tiles read them.

    The kernels take the arrays of the one head.
    """
    keys = pack_keys(isa_name, x.k, x.ck)
    return PackedKeys(*(array[0] for array in keys)), pack_values(isa_name, x.v)[0]


def finish(x: Operands, o: np.ndarray, l: np.ndarray) -> np.ndarray:
    """O / l in the values' own units, without the padding: (L, Dv) float32."""
    return ((o * (F(1) / l)[:, None])[: x.length, : x.dv] * x.v_scale).astype(F)


def run(rung: str, isa_name: str, x: Operands, workers: int = 1) -> np.ndarray:
    """One rung from packing to the output; rung is "unfused", "fused", "parallel" or "causal"."""
    keys, v = packed(isa_name, x)
    n, block_q = x.k.shape[1], tiling(isa_name).block_q
    o, l = empty((x.q.shape[0], x.v.shape[2]), F), np.empty(x.q.shape[0], F)
    if rung == "unfused":
        shape = x.q.shape[0] // block_q, padded(n, KEY_BLOCK) // KEY_BLOCK, block_q
        scores = empty((*shape, KEY_BLOCK), np.int16)
        weights = empty((*shape, KEY_BLOCK), x.q.dtype)
        whole = scores, weights, np.empty(shape, np.int32), np.empty(shape, np.int32)
        make_unfused(isa_name)(x.q, x.cq, keys, n, v, whole, o, l)
    elif rung == "fused":
        make_fused(isa_name)(x.q, x.cq, keys, n, v, o, l)
    else:
        make_parallel(isa_name, rung == "causal")(
            x.q, x.cq, keys, n, v, np.zeros(1, np.int64), workers, o, l
        )
    return finish(x, o, l)
