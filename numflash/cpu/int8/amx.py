"""Matrix tiles of Intel AMX (Sapphire Rapids and later).

Both products of the INT8 kernel, 32 rows x 32 columns at a time.

AMX holds eight tiles of 16 rows x 64 bytes. One tdpbusd multiplies 16 rows of 64 bytes by 64 x 16
bytes and adds to 16 x 16 int32 sums: 16,384 products in 16 cycles, 8 times what vpdpbusd does. Its
right operand is what the packed K and V are already: rows of 4-byte groups, one group for each
column. Two by two tiles of sums share their operands: 4 loads for 4 products.

The sums can only leave through memory, so a block has two steps: `multiply` and `save` put the sums
of 32 x 32 into a scratch block in L1, `finish` does with vectors what `microkernels` do in
registers. The two run on different units: where a next block follows, `multiply_beside` interleaves its
products into the `finish` of the last one.

A process must request the tiles from Linux once (`jit.system.tiles_permitted`), a thread must
configure them before it uses them. Source: Intel 64 and IA-32 Architectures Software Developer's
Manual, volume 1, chapter 18 "Programming with Intel AMX"; Linux kernel documentation, "Using XSTATE
features in user space applications".
"""

from __future__ import annotations

import functools

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...jit import target
from ...jit.compiler import inline
from ...tiling import KEY_BLOCK
from ..isa.amx_tiles import BLOCK, LEFT, RIGHT, ROWS, SIDE, SUMS, WIDTH, tile_call
from ..isa.operands import Packed, Rows, flat
from ..isa.vectors import F32, I8, I32, I64, data, load, store
from ..isa.vectors_x86 import AMX_INT8
from . import score_changes

BYTES = I8.as_pointer()
LANES = AMX_INT8.lanes


@intrinsic
def scratch_blocks(typingctx):
    """f(): address of two blocks of sums on the stack of the caller."""

    def codegen(context, b, sig, args):
        with b.goto_entry_block():  # not cgutils.alloca_once, which clears it at every call
            blocks = b.alloca(ir.ArrayType(I32, 2 * BLOCK * BLOCK))
        blocks.align = WIDTH
        return b.ptrtoint(blocks, I64)

    return types.int64(), codegen


def _block(b, scratch, number):
    """Pointer to block `number` mod 2."""
    return b.inttoptr(b.add(scratch, b.mul(b.and_(number, I64(1)), I64(4 * BLOCK * BLOCK))), BYTES)


def _multiply(context, b, instruction, types_, args, step, between=lambda part: None):
    """Adds step number `step` of A.B to the tiles of sums.

    `between` emits what should run beside each of the four products.

    args: a, a_off, a_stride, b, b_off as in `multiply`.
    """
    pa, pb = (b.gep(data(context, b, types_[n], args[n]), [args[n + 1]]) for n in (0, 3))
    a_stride = args[2]
    tile = ROWS * WIDTH
    left = b.gep(pa, [b.mul(step, I64(WIDTH))])
    right = b.gep(pb, [b.mul(step, I64(SIDE * tile))])
    for c in range(SIDE):
        here = b.gep(right, [I64(c * tile)])
        tile_call(b, "tileloadd64", I8(RIGHT[c]), here, I64(WIDTH))
    for r in range(SIDE):
        tile_call(
            b,
            "tileloadd64",
            I8(LEFT[r]),
            b.gep(left, [b.mul(a_stride, I64(r * ROWS))]),
            a_stride,
        )
        for c in range(SIDE):
            tile_call(b, instruction, I8(SUMS[r][c]), I8(LEFT[r]), I8(RIGHT[c]))
            between(SIDE * r + c)


def _clear(b):
    for tile in (t for row in SUMS for t in row):
        tile_call(b, "tilezero", I8(tile))


@functools.cache
def multiply(instruction: str):
    """Intrinsic f(a: Rows, b: Packed, steps).

    The tiles of sums become A.B, over 64 * steps products each.

    a: rows of bytes; b: packed tiles (`packing`), SIDE for every step; instruction "tdpbssd" or
    "tdpbusd".
    """

    @intrinsic
    def run(typingctx, a, b, steps):
        def codegen(context, b, sig, args):
            target.guard("amx_int8", context.codegen())
            types_, args = flat(b, sig, args)
            _clear(b)
            with cgutils.for_range(b, args[5]) as step:
                _multiply(context, b, instruction, types_, args, step.index)
            return context.get_dummy_value()

        return types.void(a, b, steps), codegen

    return run


@functools.cache
def multiply_beside(instruction: str, rows):
    """Intrinsic f(*(as `multiply`), *(as `finish`)).

    Both, the products of one block beside the last rows of another.

    Each product takes 16 cycles of the matrix unit and one slot of the queue, so two rows of vector
    work follow it at once.
    """

    @intrinsic
    def run(typingctx, a, b, steps, scratch, number, s, t, x, changes):
        def codegen(context, b, sig, args):
            target.guard("amx_int8", context.codegen())
            types_, args = flat(b, sig, args)
            row = rows(context, b, types_[6:], args[6:])
            _clear(b)
            mixed = b.select(b.icmp_signed("<", args[5], I64(BLOCK // 8)), args[5], I64(BLOCK // 8))
            with cgutils.for_range(b, mixed) as step:
                first = b.mul(step.index, I64(8))

                def two_rows(part):
                    for m in (2 * part, 2 * part + 1):
                        row(b, b.add(first, I64(m)))

                _multiply(context, b, instruction, types_, args, step.index, two_rows)
            with cgutils.for_range_slice(b, mixed, args[5], I64(1), I64) as (step, _):
                _multiply(context, b, instruction, types_, args, step)
            with cgutils.for_range_slice(b, b.mul(mixed, I64(8)), I64(BLOCK), I64(1), I64) as (
                m,
                _,
            ):
                row(b, m)
            return context.get_dummy_value()

        return types.void(a, b, steps, scratch, number, s, t, x, changes), codegen

    return run


@intrinsic
def save(typingctx, scratch, number):
    """f(scratch, number): the tiles of sums go to block `number` mod 2."""

    def codegen(context, b, sig, args):
        block = _block(b, *args)
        for r in range(SIDE):
            for c in range(SIDE):
                where = b.gep(block, [I64((r * ROWS * SIDE + c) * WIDTH)])
                tile_call(b, "tilestored64", I8(SUMS[r][c]), where, I64(SIDE * WIDTH))
        return context.get_dummy_value()

    return types.void(scratch, number), codegen


@functools.cache
def finish(rows):
    """Intrinsic f(scratch, number, s: Packed, t: Packed, x: Rows, changes).

    The 32 rows of a saved block, by `rows`.
    """

    @intrinsic
    def run(typingctx, scratch, number, s, t, x, changes):
        def codegen(context, b, sig, args):
            row = rows(context, b, *flat(b, sig, args))
            with cgutils.for_range(b, I64(BLOCK)) as m:
                row(b, m.index)
            return context.get_dummy_value()

        return types.void(scratch, number, s, t, x, changes), codegen

    return run


def _sums(b, block, m):
    """Row m of a block, as vectors of int32."""
    return [
        load(b, block, b.add(b.mul(m, I64(SIDE)), I64(v)), AMX_INT8.vector(I32), WIDTH)
        for v in range(SIDE)
    ]


@functools.cache
def score_rows(changed: bool = False, wide: bool = False):
    """Rows of scores x as `microkernels.score_tile` or `finish` has them.

    s : scales of the keys;  t : scales of the queries
    """
    isa = AMX_INT8

    def rows(context, b, types_, args):
        block, (ps, pt, px) = (
            _block(b, args[0], args[1]),
            (data(context, b, types_[n], args[n]) for n in (2, 4, 6)),
        )
        f32s = isa.vector(F32)
        change = None
        if changed:  # a tuple of one; empty: nothing to change
            change = score_changes.changer(
                context, b, isa, types_[9].types[0], b.extract_value(args[9], 0), wide
            )
        key_scale = [load(b, ps, b.add(args[3], I64(v * LANES)), f32s, 4) for v in range(SIDE)]

        def row(b, m):
            row_scale = isa.splat(b, load(b, pt, b.add(args[5], m), F32, 4), f32s)
            scores = [
                b.fmul(b.fmul(b.sitofp(x, f32s), k), row_scale)
                for x, k in zip(_sums(b, block, m), key_scale, strict=True)
            ]
            where = b.add(args[7], b.mul(args[8], m))
            if change:
                change(scores, b.add(args[5], m), args[3], px, where)
            elif wide:
                for v, x in enumerate(isa.in_order(b, *scores)):
                    store(b, x, px, b.add(where, I64(v * LANES)), 4)
            else:
                store(b, isa.to_int16(b, *scores), px, where, 2)

        return row

    return rows


def _value_rows(context, b, types_, args, sums):
    """Rows of O (x) to which `sums(m)` are added as in `microkernels.value_tile`.

    t : scales of the rows; s is not used
    """
    pt, px = (data(context, b, types_[n], args[n]) for n in (4, 6))
    f32s = AMX_INT8.vector(F32)

    def row(b, m):
        scale = AMX_INT8.splat(b, load(b, pt, b.add(args[5], m), F32, 4), f32s)
        for v, x in enumerate(sums(m)):
            x = b.sitofp(x, f32s)
            column = b.add(b.add(args[7], b.mul(args[8], m)), I64(v * LANES))
            store(
                b, AMX_INT8.generic(b, "fma", x, scale, load(b, px, column, f32s, 4)), px, column, 4
            )

    return row


def value_rows(context, b, types_, args):
    """Rows of O with the sums of a block."""
    block = _block(b, args[0], args[1])
    return _value_rows(context, b, types_, args, lambda m: _sums(b, block, m))


def value_rows_of_planes(context, b, types_, args):
    """Rows of O with those of two planes of weights: 256 times block 0, and block 1."""
    high, low = (_block(b, args[0], I64(n)) for n in range(2))
    eight = AMX_INT8.fill(b, AMX_INT8.vector(I32), 8)

    def sums(m):
        pairs = zip(_sums(b, high, m), _sums(b, low, m), strict=True)
        return [b.add(b.shl(x, eight), y) for x, y in pairs]

    return _value_rows(context, b, types_, args, sums)


@functools.cache
def score_block(changed: bool, wide: bool):
    """As `blocks.score_block`."""
    rows_of_x = score_rows(changed, wide)
    first_block = multiply("tdpbssd")
    both = multiply_beside("tdpbssd", rows_of_x)
    last_block = finish(rows_of_x)

    @inline
    def scores(queries, keys, x, *changes):
        q, stride, cq, rows = queries
        k, _, ck, first, columns = keys
        scratch, side, steps = scratch_blocks(), columns // BLOCK, stride // WIDTH
        blocks = (rows + BLOCK - 1) // BLOCK * side
        first_block(Rows(q, 0, stride), Packed(k, first * stride), steps)
        save(scratch, 0)
        for n in range(1, blocks):
            i = n // side * BLOCK
            c = n % side * BLOCK
            at = (n - 1) // side * BLOCK
            old = (n - 1) % side * BLOCK
            row, right = Rows(q, i * stride, stride), Packed(k, (first + c) * stride)
            to = Rows(x, at * KEY_BLOCK + old, KEY_BLOCK)
            key_scales, row_scales = Packed(ck, first + old), Packed(cq, at)
            both(row, right, steps, scratch, n - 1, key_scales, row_scales, to, changes)
            save(scratch, n)
        at, old = (blocks - 1) // side * BLOCK, (blocks - 1) % side * BLOCK
        to = Rows(x, at * KEY_BLOCK + old, KEY_BLOCK)
        last_block(scratch, blocks - 1, Packed(ck, first + old), Packed(cq, at), to, changes)

    return scores


@functools.cache
def value_block(planes: int):
    """f(p, v, first, columns, scale, total, rows, o): o[rows] += P.V.

    For keys first to first + columns - 1; weights of one byte, or of two `planes`.
    """
    if planes == 2:
        return _value_block_of_planes()
    first_block = multiply("tdpbusd")
    both = multiply_beside("tdpbusd", value_rows)
    last_block = finish(value_rows)

    @inline
    def values(p, v, first, columns, scale, total, rows, o):
        scratch, width, steps = scratch_blocks(), o.shape[1], columns // WIDTH
        side = width // BLOCK
        blocks = (rows + BLOCK - 1) // BLOCK * side
        first_block(Rows(p, 0, KEY_BLOCK), Packed(v, first * width), steps)
        save(scratch, 0)
        for n in range(1, blocks):
            i = n // side * BLOCK
            c = n % side * BLOCK
            at = (n - 1) // side * BLOCK
            old = (n - 1) % side * BLOCK
            row, column = (
                Rows(p, i * KEY_BLOCK, KEY_BLOCK),
                Packed(v, first * width + c * KEY_BLOCK),
            )
            to, scales = Rows(o, at * width + old, width), Packed(scale, at)
            both(row, column, steps, scratch, n - 1, Packed(scale, 0), scales, to, ())
            save(scratch, n)
        at, old = (blocks - 1) // side * BLOCK, (blocks - 1) % side * BLOCK
        to, scales = Rows(o, at * width + old, width), Packed(scale, at)
        last_block(scratch, blocks - 1, Packed(scale, 0), scales, to, ())

    return values


def _value_block_of_planes():
    """The same for weights of two bytes, the low ones KEY_BLOCK bytes behind the high ones.

    Two blocks of sums, of the high bytes and of the low ones, are added to O beside the next
    product of high bytes.
    """
    product = multiply("tdpbusd")
    both = multiply_beside("tdpbusd", value_rows_of_planes)
    last_block = finish(value_rows_of_planes)

    @inline
    def values(p, v, first, columns, scale, total, rows, o):
        scratch, width, steps = scratch_blocks(), o.shape[1], columns // WIDTH
        side, size = width // BLOCK, 2 * KEY_BLOCK
        blocks = (rows + BLOCK - 1) // BLOCK * side
        to, scales = Rows(o, 0, width), Packed(scale, 0)
        for n in range(blocks):
            i = n // side * BLOCK
            c = n % side * BLOCK
            column = Packed(v, first * width + c * KEY_BLOCK)
            high = Rows(p, i * size, size)
            if n == 0:
                product(high, column, steps)
            else:
                both(high, column, steps, scratch, 0, Packed(scale, 0), scales, to, ())
            save(scratch, 0)
            product(Rows(p, i * size + KEY_BLOCK, size), column, steps)
            save(scratch, 1)
            to, scales = Rows(o, i * width + c, width), Packed(scale, i)
        last_block(scratch, 0, Packed(scale, 0), scales, to, ())

    return values
