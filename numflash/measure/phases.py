"""Where the time of the fused INT8 kernel goes.

The same kernel with one part after the other switched on.

The parts are those of `flash_int8`: scores (Q.K^T with its epilogue), softmax, rescaling (merge of
m, l and O), values (P.V with its epilogue). Each is timed as what it adds, so the parts add up to
the whole; packing is a kernel of its own anyway. Full attention on sizes that fill every tile; the
cost of edges and options is part of the whole kernel's time only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from ..cpu.int8.blocks import score_block, value_block
from ..cpu.int8.packing import pack_keys, pack_values
from ..cpu.int8.softmax import add_sums, grow_rows, top_rows, weigh_rows
from ..cpu.isa.amx_tiles import tile_state
from ..cpu.isa.isas import VECTOR_ISAS, lanes_of, running_lanes
from ..cpu.isa.operands import KeyRange, Queries
from ..errors import ArgumentError
from ..jit.compiler import kernel
from ..jit.memory import empty, zeros
from ..jit.threads import limit
from ..numerics import fixedpoint as fx
from ..numerics.quantization import quantize_problem
from ..numerics.scores import combined_scale
from ..tiling import KEY_BLOCK, tiling
from ..validation import describe
from ..validation.options import Options
from .timing import timed

PARTS = ("scores", "softmax", "rescaling", "values")
F = np.float32
I = np.int32


@functools.cache
def make_phases(isa_name: str, parts: int):
    """Kernel f(q, cq, keys, packed_values, o) of the first `parts` of PARTS over every query tile
    and key block of one head.

    q (L, channels) first dot operand; cq (L,) float32; keys PackedKeys of one head; o (block_q,
    width) float32.
    """
    isa = VECTOR_ISAS[isa_name]
    t = tiling(isa_name)
    scores = score_block(isa_name)
    tops = top_rows(isa_name, "int8")
    weigh = weigh_rows(isa_name, "int8")
    values, (begin, end) = value_block(isa_name, "int8"), tile_state(isa_name)
    block_q = t.block_q
    vector_lanes = lanes_of(isa_name)
    operand = np.uint8 if isa.group == 4 else np.int16
    with_softmax = parts > 1
    with_rescaling = parts > 2
    with_values = parts > 3

    @kernel
    def run(q, cq, keys, packed_values, o):
        begin()
        stride, lanes = q.shape[1], vector_lanes()
        x = zeros((block_q, KEY_BLOCK), np.int16, "scores")
        p = zeros((block_q, KEY_BLOCK), operand, "weights")
        m = np.zeros(block_q, np.int32)
        l = np.zeros(block_q, np.float32)
        scale = np.ones(block_q, np.float32)
        octave = np.zeros(block_q, np.int32)
        total = np.zeros(block_q, np.int32)
        top, sums = np.zeros(block_q, np.int16), np.zeros(block_q * lanes, np.int32)
        k, start, ck, v = keys.data[0], keys.start[0], keys.scale[0], packed_values[0]
        for row in range(0, q.shape[0] - block_q + 1, block_q):
            tile, factor = q[row : row + block_q], cq[row : row + block_q]
            m[:] = I(fx.MIN_OCTAVE)
            l[:] = F(0)
            o[:] = F(0)
            for c in range(0, start.size, KEY_BLOCK):
                keys_here = KeyRange(k, start, ck, c, KEY_BLOCK)
                scores(Queries(tile, stride, factor, block_q), keys_here, x)
                if with_softmax:
                    tops(x, block_q, KEY_BLOCK, octave, top)
                    weigh(x, block_q, KEY_BLOCK, top, scale, p, sums, total)
                if with_rescaling:
                    grow_rows(octave, top, block_q, m, l, scale, o)
                    add_sums(total, block_q, F(1), scale, l)
                if with_values:
                    values(p, v, c, KEY_BLOCK, scale, total, block_q, o)
        end()
        return l[0] + x[0, 0]

    return run


def measure(isa_name: str, length: int, d: int, repeats: int = 5) -> dict[str, float]:
    """Seconds of packing, of every part and of their sum, for full attention of one head on one
    thread.

    A part is the difference of two times, each the fastest of some calls; NaN where it comes out
    negative three times, because other programs took time from one of them.

    Raises
    ------
    ArgumentError
        `length` or `d` does not fill the tiles.
    """
    isa = VECTOR_ISAS[isa_name]
    t = tiling(isa_name)
    panel = isa.nv * running_lanes(isa_name)
    if d % panel or length % KEY_BLOCK:
        raise ArgumentError(
            f"phases: got L = {length}, head_dim = {d}; allowed: multiples of {KEY_BLOCK} and {panel}"
        )
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, length, d), F) for _ in range(3))
    problem = quantize_problem(describe(q, k, v, Options(), "int8"))
    cq, ck = combined_scale(problem.query, problem.key, problem.scale)
    k = problem.key.data[0]
    v = problem.value.data[0]
    scale = np.ascontiguousarray(ck[0])
    q = (problem.query.data[0, 0].astype(np.int16) + isa.q_offset).astype(
        np.uint8 if isa.group == 4 else np.int16
    )
    aligned = empty(q.shape, q.dtype)
    aligned[:] = q
    q = aligned
    keys = pack_keys(isa_name, k, scale)
    values = pack_values(isa_name, v)
    o = empty((t.block_q, d), F)
    with limit(1):
        calls: list[Callable[[], object]] = [
            lambda: (pack_keys(isa_name, k, scale), pack_values(isa_name, v))
        ]
        for n in range(1, len(PARTS) + 1):
            calls.append(functools.partial(make_phases(isa_name, n), q, cq[0, 0], keys, values, o))
        packing, *upto = fastest_times(calls, repeats)
    whole = length / (length // t.block_q * t.block_q)  # the last rows fill no tile
    parts = np.diff([0.0, *upto]) * whole
    found = {part: float(x) if x >= 0 else math.nan for part, x in zip(PARTS, parts, strict=True)}
    return {"packing": packing, **found, "sum": packing + upto[-1] * whole}


def fastest_times(calls: list[Callable[[], object]], repeats: int) -> list[float]:
    """Fastest time of each call.

    All are timed again, up to twice, where the second and later ones do not rise.
    """
    best = [math.inf] * len(calls)
    for _ in range(3):
        best = [min(x, timed(call, repeats).fastest) for x, call in zip(best, calls, strict=True)]
        if best[1:] == sorted(best[1:]):
            break
    return best
