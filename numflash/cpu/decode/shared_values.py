"""Values that are the first channels of the keys: V of a block, made from its K.

A cache of latents (DeepSeek's absorbed attention) stores a token once, as a key. Both products read
whole vectors, the first along the keys, the second along the columns, so V is K transposed: a
square of words at a time, in registers, into scratch memory that all query rows of the block read.
In a word are `group` channels of one key, or `group` keys of one channel:

    K: [panel][step of channels][key in panel][group]
    V: [chunk of columns][step of keys][column in chunk][group]

First the `group` words of neighbouring keys exchange their elements (a shuffle within the vector),
then units of `group` words are transposed by halves.
"""

from __future__ import annotations

import functools

import llvmlite.ir as ir
from numba import types
from numba.extending import intrinsic

from ...jit.compiler import bare
from ...tiling import KEY_BLOCK
from ..isa.transpose import transposed
from ..isa.vectors import I8, I64, constant, load, pointer, prefetch, shuffle, store, vector
from .tiles import Tile


def _exchange(b, x, lanes: int, group: int, element: ir.Type):
    """Words of `group` elements, transposed in squares of group x group elements."""
    if group == 1:
        return x
    elements = b.bitcast(x, vector(element, lanes * group))
    order = [
        first * group + key * group + channel
        for first in range(0, lanes, group)
        for channel in range(group)
        for key in range(group)
    ]
    return b.bitcast(shuffle(b, elements, elements, order), x.type)


@functools.cache
def _square(tile: Tile):
    """Intrinsic f(k, k_step, v, v_step): `square` keys x `square` channels of K, as V.

    Addresses of the first word of either; bytes between two steps of channels, of keys.
    """
    lanes, group = tile.square, tile.group
    element = ir.IntType(8 * tile.size)
    word = ir.IntType(8 * tile.size * group)

    @intrinsic
    def square(typingctx, k, k_step, v, v_step):
        sig = types.void(*[types.intp] * 4)

        def codegen(context, b, sig, a):
            tile.guard(context.codegen())
            pk, pv = pointer(b, a[0]), pointer(b, a[2])
            steps = range(lanes // group)
            rows = []
            for s in steps:
                at = b.gep(pk, [b.mul(a[1], I64(s))])
                if tile.ahead:
                    prefetch(b, b.gep(at, [I64(tile.ahead)]))
                x = load(b, at, I64(0), vector(word, lanes), 1, tile.size)
                if tile.q_offset != tile.v_offset:  # one of them is 128
                    x = b.bitcast(x, vector(I8, lanes * group))
                    x = b.bitcast(b.xor(x, constant(x.type, -128)), vector(word, lanes))
                rows.append(_exchange(b, x, lanes, group, element))
            for s, x in zip(steps, transposed(b, rows, group), strict=True):
                store(b, x, b.gep(pv, [b.mul(a[3], I64(s))]), I64(0), tile.size)
            return context.get_dummy_value()

        return sig, codegen

    return square


@functools.cache
def make_shared_values(tile: Tile):
    """values(place, n, channels, out, columns): V of the first n keys of the block at `place`.

    Addresses of the block and of KEY_BLOCK * columns elements to be written; columns are whole
    vectors, channels at least as many. Keys are taken in pairs of whole vectors.
    """
    square = _square(tile)
    lanes, panel, group, size, scales = tile.square, tile.panel, tile.group, tile.size, tile.scales
    pair = 2 * tile.lanes

    @bare(forceinline=False)
    def values(place, n, channels, out, columns):
        keys = place + scales * size
        stop = (n + pair - 1) // pair * pair
        for first in range(0, stop, panel):  # in the order of the memory
            for c in range(0, columns, lanes):
                chunk = c // panel * panel
                width = min(panel, columns - chunk)
                for j in range(first, min(first + panel, stop), lanes):
                    source = keys + (first * channels + c * panel + (j - first) * group) * size
                    to = out + (chunk * KEY_BLOCK + j * width + (c - chunk) * group) * size
                    square(source, panel * group * size, to, width * group * size)

    return values
