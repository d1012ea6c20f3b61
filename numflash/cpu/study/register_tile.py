"""Register tiles of any shape: mr rows times nv vectors of sums, to see what the shape is worth.

The products are those of `isa.dot_loop`; what ships is 6 x 4 (6 x 2 where there are 16 registers).
"""

from __future__ import annotations

import functools

import numpy as np
from numba import types
from numba.extending import intrinsic

from ...jit import target
from ...jit.compiler import kernel
from ..isa.dot_loop import Panel, dot_loop
from ..isa.isas import VECTOR_ISAS, lanes_of, running_lanes
from ..isa.operands import Rows
from ..isa.vectors import I32, I64, data, store


@functools.cache
def make_tile(isa_name: str, mr: int, nv: int):
    """Intrinsic f(a, a_off, a_stride, b, b_off, groups, c, c_off, c_stride).

    c[mr, nv * lanes] int32 = A.B.
    """
    isa = VECTOR_ISAS[isa_name]

    @intrinsic
    def tile(typingctx, a, a_off, a_stride, b, b_off, groups, c, c_off, c_stride):
        sig = types.void(a, a_off, a_stride, b, b_off, groups, c, c_off, c_stride)

        def codegen(context, builder, sig, args):
            target.guard(isa_name, context.codegen())
            pa, pb, pc = (data(context, builder, sig.args[n], args[n]) for n in (0, 3, 6))
            start = [isa.fill(builder, isa.vector(I32), 0)] * (mr * nv)
            rows = dot_loop(
                builder,
                isa,
                isa.score_dot,
                Rows(pa, args[1], args[2]),
                Panel(pb, args[4]),
                args[5],
                start,
                nv,
            )
            for m, sums in enumerate(rows):
                for n, x in enumerate(sums):
                    where = builder.add(args[7], builder.mul(args[8], I64(m)))
                    store(builder, x, pc, builder.add(where, isa.elements(builder, n)), 4)
            return context.get_dummy_value()

        return sig, codegen

    return tile


@functools.cache
def make_product(isa_name: str, mr: int, nv: int):
    """Kernel f(a, b, c).

    Blocks of c.shape scores of A.B, each into the same c, as the fused kernel does with its scores.

    a (rows, channels) first dot operand, not negative; b (panels, channels * panel) from `pack`; c
    (block_q, keys) int32; rows a multiple of block_q and that of mr, keys of the panel.
    """
    tile = make_tile(isa_name, mr, nv)
    lanes = lanes_of(isa_name)
    group = VECTOR_ISAS[isa_name].group

    @kernel
    def product(a, b, c):
        channels, panel, keys = a.shape[1], nv * lanes(), c.shape[1]
        for row in range(0, a.shape[0], c.shape[0]):
            for first in range(0, b.shape[0] * panel, keys):
                for j in range(0, keys, panel):
                    for i in range(0, c.shape[0], mr):
                        tile(
                            a,
                            (row + i) * channels,
                            channels,
                            b,
                            (first + j) * channels,
                            channels // group,
                            c,
                            i * keys + j,
                            keys,
                        )

    return product


def pack(isa_name: str, k: np.ndarray, nv: int, offset: int = 0) -> np.ndarray:
    """k (keys, channels) int8 as (panels, channels * panel).

    [channel group][key of the panel][channels of the group].

    The first byte is `offset` bytes after a multiple of 64, so that no vector crosses a cache
    line unless asked to.
    """
    isa, panel = VECTOR_ISAS[isa_name], nv * running_lanes(isa_name)
    keys, channels = k.shape
    blocks = k.reshape(keys // panel, panel, channels // isa.group, isa.group).transpose(0, 2, 1, 3)
    operand = np.dtype(np.int8 if isa.group == 4 else np.int16)
    room = np.empty(k.size * operand.itemsize + 128, np.uint8)
    first = -room.ctypes.data % 64 + offset
    packed = (
        room[first : first + k.size * operand.itemsize].view(operand).reshape(keys // panel, -1)
    )
    packed[:] = blocks.reshape(packed.shape)
    return packed
