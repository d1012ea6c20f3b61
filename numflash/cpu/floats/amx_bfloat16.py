"""The float register tiles of `float_tiles` on AMX: 32 rows of bfloat16, summed in float32.

One tdpbf16ps multiplies 16 rows of 32 bfloat16 by 16 x 16 pairs and adds to 16 x 16 float32 sums:
8,192 products in 16 cycles. Its right operand is what the packed K and V are already: rows of
pairs, one pair for each column. Like vdpbf16ps it takes and gives denormals as zero. Sums are O's
own format, so `value_tile` loads and stores O without reordering.
"""

from __future__ import annotations

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...jit import target
from ..isa.amx_tiles import LEFT, RIGHT, ROWS, SIDE, SUMS, WIDTH, tile_call
from ..isa.vectors import I8, I64, data

PAIRS = 32  # bfloat16 of a tile's row: products of one step


def _tile(b, operation: str, number: int, pointer, stride) -> None:
    tile_call(b, f"{operation}64", I8(number), pointer, stride)


def _multiply(b, pa, a_stride, pb, b_stride, steps, wide: int) -> None:
    """The tiles of sums += A.B, SIDE tiles tall and `wide` wide.

    A and B are byte pointers, strides in bytes.
    """
    tile_rows = b.mul(a_stride, I64(ROWS))
    with cgutils.for_range(b, steps) as step:
        left = b.gep(pa, [b.mul(step.index, I64(WIDTH))])
        right = b.gep(pb, [b.mul(b.mul(step.index, I64(ROWS)), b_stride)])
        for c in range(wide):
            _tile(b, "tileloadd", RIGHT[c], b.gep(right, [I64(c * WIDTH)]), b_stride)
        for r in range(SIDE):
            _tile(b, "tileloadd", LEFT[r], b.gep(left, [b.mul(tile_rows, I64(r))]), a_stride)
            for c in range(wide):
                tile_call(b, "tdpbf16ps", I8(SUMS[r][c]), I8(LEFT[r]), I8(RIGHT[c]))


def _sums(px, x_stride, b, wide: int):
    """(number, pointer) of the tiles of sums over a block of float32 rows."""
    below = b.mul(x_stride, I64(ROWS))
    return [
        (SUMS[r][c], b.gep(px, [b.add(b.mul(below, I64(r)), I64(c * WIDTH))]))
        for r in range(SIDE)
        for c in range(wide)
    ]


def score_tile(isa, nv: int):
    """Intrinsic f(q, q_off, q_stride, k, k_off, steps, x, x_off, x_stride).

    A step is a pair of channels; steps fill whole tiles.
    """

    @intrinsic
    def tile(typingctx, q, q_off, q_stride, k, k_off, steps, x, x_off, x_stride):
        sig = types.void(q, q_off, q_stride, k, k_off, steps, x, x_off, x_stride)

        def codegen(context, b, sig, a):
            target.guard(isa.name, context.codegen(), target.BFLOAT16_ISAS)
            pq, pk, px = (data(context, b, sig.args[n], a[n]) for n in (0, 3, 6))
            q_row = b.mul(a[2], I64(2))
            x_row = b.mul(a[8], I64(4))
            panel = I64(isa.panel * 4)
            for first in range(0, nv, SIDE):
                wide = min(SIDE, nv - first)
                sums = _sums(
                    b.gep(px, [b.mul(b.add(a[7], I64(first * isa.lanes)), I64(4))]), x_row, b, wide
                )
                for number, _ in sums:
                    tile_call(b, "tilezero", I8(number))
                _multiply(
                    b,
                    b.gep(pq, [b.mul(a[1], I64(2))]),
                    q_row,
                    b.gep(pk, [b.add(b.mul(a[4], I64(2)), I64(first * WIDTH))]),
                    panel,
                    b.lshr(a[5], I64(4)),
                    wide,
                )
                for number, pointer in sums:
                    _tile(b, "tilestored", number, pointer, x_row)
            return context.get_dummy_value()

        return sig, codegen

    return tile


def value_tile(isa, nv: int):
    """Intrinsic f(p, p_off, p_stride, v, v_off, v_stride, steps, o, o_off, o_stride).

    A step is a pair of keys; steps fill whole tiles.
    """

    @intrinsic
    def tile(typingctx, p, p_off, p_stride, v, v_off, v_stride, steps, o, o_off, o_stride):
        sig = types.void(p, p_off, p_stride, v, v_off, v_stride, steps, o, o_off, o_stride)

        def codegen(context, b, sig, a):
            target.guard(isa.name, context.codegen(), target.BFLOAT16_ISAS)
            pp, pv, po = (data(context, b, sig.args[n], a[n]) for n in (0, 3, 7))
            o_row = b.mul(a[9], I64(4))
            for first in range(0, nv, SIDE):
                wide = min(SIDE, nv - first)
                sums = _sums(
                    b.gep(po, [b.mul(b.add(a[8], I64(first * isa.lanes)), I64(4))]), o_row, b, wide
                )
                for number, pointer in sums:
                    _tile(b, "tileloadd", number, pointer, o_row)
                left = b.gep(pp, [b.mul(a[1], I64(2))])
                right = b.gep(pv, [b.add(b.mul(a[4], I64(2)), I64(first * WIDTH))])
                _multiply(
                    b,
                    left,
                    b.mul(a[2], I64(2)),
                    right,
                    b.mul(a[5], I64(2)),
                    b.lshr(a[6], I64(4)),
                    wide,
                )
                for number, pointer in sums:
                    _tile(b, "tilestored", number, pointer, o_row)
            return context.get_dummy_value()

        return sig, codegen

    return tile
