"""The register tiles and the row softmax of the INT8 kernel as functions of their own, with their
signatures: what the emulator runs.
"""

import functools

import numpy as np
from numba import njit

from numflash.cpu.int8 import float_weights, microkernels, packing, softmax_vectors
from numflash.cpu.int8.score_changes import Changes
from numflash.cpu.isa.dot_loop import BESIDE
from numflash.cpu.isa.isas import lanes_of
from numflash.cpu.isa.operands import Packed, Part, Rows, Scales, Waiting
from numflash.jit.compiler import bare
from numflash.tiling import KEY_BLOCK

STRIDE = KEY_BLOCK
# first key of a changed tile, and the key at distance 0 from its first row
KEY = 256
CENTRE = 290


@functools.cache
def score_function(isa, mr):
    tile = microkernels.score_tile(isa, mr)

    @njit
    def scores(q, k, start, ck, cq, x):
        stride = q.shape[1]
        scales = Scales(start, ck, 0, cq, 0)
        tile(Rows(q, 0, stride), Packed(k, 0), stride // 4, scales, Rows(x, 0, STRIDE))

    return (
        scores,
        "void(int8[:,::1], int8[::1], int32[::1], float32[::1], float32[::1], int16[:,::1])",
    )


@functools.cache
def changed_function(isa, mr, wide, has_cap, has_slope, has_bias, has_mask):
    """A tile of keys KEY and on of a larger problem.

    Only the last row has no bias and no mask of its own.

    Its first rows are changed beside the dot products of the next tile, which is the same, where it
    is not wide.
    """
    tile = microkernels.waiting_tile(isa, mr, not wide)
    room_of = microkernels.waiting_room(isa)
    finish = microkernels.finish(isa, wide)

    @bare
    def changes_of(shift, numbers, base, bias, mask):
        return Changes(
            has_cap,
            has_slope,
            has_bias,
            has_mask,
            shift,
            numbers,
            CENTRE,
            base,
            bias.reshape(bias.size),
            -KEY,
            bias.shape[1],
            mask.reshape(mask.size),
            -KEY,
            mask.shape[1],
            mr - 2,
        )

    @bare
    def wide_scores(q, k, start, ck, cq, x, shift, numbers, base, bias, mask):
        stride, room = q.shape[1], room_of()
        changes = changes_of(shift, numbers, base, bias, mask)
        scales = Scales(start, ck, KEY, cq, 0)
        tile(Rows(q, 0, stride), Packed(k, 0), stride // 4, scales, Waiting(room, 0))
        finish(Waiting(room, 0), Rows(x, 0, STRIDE), changes, 0, Part(mr, 0, KEY))

    @bare
    def scores(q, k, start, ck, cq, x, shift, numbers, base, bias, mask):
        stride, room = q.shape[1], room_of()
        changes = changes_of(shift, numbers, base, bias, mask)
        beside = min(mr, (stride // 4 - 1) // BESIDE)
        row, keys, groups = Rows(q, 0, stride), Packed(k, 0), stride // 4
        scales, to = Scales(start, ck, KEY, cq, 0), Rows(x, 0, STRIDE)
        even, odd = Waiting(room, 0), Waiting(room, 1)
        tile(row, keys, groups, scales, even, to, changes, Part(0, 0, KEY))
        tile(row, keys, groups, scales, odd, to, changes, Part(beside, 0, KEY))
        finish(even, to, changes, beside, Part(mr, 0, KEY))

    return wide_scores if wide else scores, (
        f"void(int8[:,::1], int8[::1], int32[::1], float32[::1], float32[::1], {'float32' if wide else 'int16'}[:,::1], "
        "float32[::1], float32[::1], int32[::1], float32[:,::1], uint8[:,::1])"
    )


@functools.cache
def value_function(isa, mr, nv):
    tile = microkernels.value_tile(isa, mr, nv)

    @njit
    def values(p, v, scale, total, o):
        row, to = Rows(p, 0, STRIDE), Rows(o, 0, o.shape[1])
        tile(row, Packed(v, 0), p.shape[1] // 4, scale, total, 0, to)

    return values, "void(uint8[:,::1], int8[::1], float32[::1], int32[::1], float32[:,::1])"


@functools.cache
def softmax_function(isa, keys):
    octaves = softmax_vectors.block_tops(isa, keys)
    weights = softmax_vectors.row_weights(isa, keys)
    totals = softmax_vectors.block_totals(isa)
    vector_lanes = lanes_of(isa)

    @njit
    def softmax(x, p, octave, octave_q8, sums, total):
        lanes = vector_lanes()
        octaves(x, 0, STRIDE, octave, octave_q8, 0)
        for i in range(x.shape[0]):
            weights(x, i * STRIDE, octave_q8, i, p, i * STRIDE, sums, i * lanes)
        totals(sums, total, 0)

    return (
        softmax,
        "void(int16[:,::1], uint8[:,::1], int32[::1], int16[::1], int32[::1], int32[::1])",
    )


@functools.cache
def precise_function(isa, keys, pv):
    weights = float_weights.row_weights_float(isa, keys, pv)
    vector_lanes = lanes_of(isa)

    @njit
    def softmax(x, octave_q8, scale, p, sums):
        lanes = vector_lanes()
        for i in range(x.shape[0]):
            weights(x, i * STRIDE, octave_q8, i, scale, p, i * STRIDE, sums, i * lanes)

    return softmax, "void(int16[:,::1], int16[::1], float32[::1], float32[:,::1], int32[::1])"


def packed_keys(isa, k, bits):
    return packing.pack_keys(isa, k[None], np.ones((1, len(k)), np.float32), bits // 32)
