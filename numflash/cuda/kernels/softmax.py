"""The online softmax of float scores, and reductions over the lanes that share a row."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from ..compile.target import device_function, types
from ..instructions import ptx

u32, f32 = types.uint32, types.float32
NEG_INF = f32(-math.inf)


class State(NamedTuple):
    """The online softmax of a thread's two rows: local arrays of two."""

    m: Any  # running maximum
    l: Any  # running sum
    alpha: Any  # what the output so far is multiplied by


@device_function
def quad_max(x):
    """Largest over the four lanes that hold one row of an accumulator."""
    x = ptx.fmax(x, ptx.shuffle_xor(x, u32(1)))
    return ptx.fmax(x, ptx.shuffle_xor(x, u32(2)))


@device_function
def quad_sum(x):
    x = x + ptx.shuffle_xor(x, u32(1))
    return x + ptx.shuffle_xor(x, u32(2))


@device_function
def warp_max(x):
    for n in range(5):
        x = ptx.fmax(x, ptx.shuffle_xor(x, u32(1 << n)))
    return x


@device_function
def warp_sum(x):
    for n in range(5):
        x += ptx.shuffle_xor(x, u32(1 << n))
    return x


@functools.cache
def make_softmax(key_tiles: int):
    """One step of the online softmax on a fragment of scores.

    m, l and alpha hold one value for each of a thread's two rows.
    """

    @device_function
    def softmax(s, m, l, alpha, scale):
        for r in range(2):
            x = m[r]
            for n in range(key_tiles):
                x = ptx.fmax(x, ptx.fmax(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]))
            x = quad_max(x)
            safe = f32(0) if x == NEG_INF else x * scale
            alpha[r] = ptx.ex2(m[r] * scale - safe)
            m[r] = x
            total = l[r] * alpha[r]
            for n in range(key_tiles):
                s[4 * n + 2 * r] = ptx.ex2(ptx.fma(s[4 * n + 2 * r], scale, -safe))
                s[4 * n + 2 * r + 1] = ptx.ex2(ptx.fma(s[4 * n + 2 * r + 1], scale, -safe))
                total += s[4 * n + 2 * r] + s[4 * n + 2 * r + 1]
            l[r] = total

    return softmax


@functools.cache
def make_rescale(value_tiles: int) -> Any:
    """rescale(o, alpha): the outputs of a thread's two rows, each times its row's factor."""

    @device_function
    def rescale(o, alpha):
        for n in range(value_tiles):
            for e in range(4):
                o[4 * n + e] *= alpha[e >> 1]

    return rescale
