"""The matrix tiles of Intel AMX.

Their sizes, what each of the eight is used for, and their configuration.

AMX has eight tile registers of 16 rows x 64 bytes. A process must request them from Linux once
(`jit.system.tiles_permitted`), a thread must configure them before it uses them. Source: Intel 64
and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18 "Programming with Intel
AMX".
"""

from __future__ import annotations

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...jit import target
from .vectors import I8, call

# rows of a tile, and bytes of a row
ROWS = 16
WIDTH = 64
# tiles of sums, of the left and of the right operand
SUMS = ((0, 1), (2, 3))
LEFT = (4, 5)
RIGHT = (6, 7)
VOID = ir.VoidType()
BYTES = I8.as_pointer()
SIDE = 2  # tiles of sums: SIDE x SIDE at a time


BLOCK = SIDE * ROWS  # rows and columns of the sums of a block


def _configuration() -> ir.Constant:
    """Palette 1, all eight tiles of 16 rows x 64 bytes."""
    text = bytearray(64)
    text[0] = 1
    for tile in range(8):
        text[16 + 2 * tile], text[48 + tile] = WIDTH, ROWS
    return ir.Constant(ir.ArrayType(I8, 64), text)


@intrinsic
def configure(typingctx):
    """f(): this thread's tiles become 16 rows x 64 bytes."""

    def codegen(context, b, sig, args):
        target.guard("amx_int8", context.codegen())
        call(
            b,
            "llvm.x86.ldtilecfg",
            VOID,
            b.bitcast(cgutils.global_constant(b, "amx.configuration", _configuration()), BYTES),
        )
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def release(typingctx):
    """f(): this thread's tiles are empty again, so that switching threads need not save them."""

    def codegen(context, b, sig, args):
        call(b, "llvm.x86.tilerelease", VOID)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _nothing(typingctx):
    return types.void(), lambda context, b, sig, args: context.get_dummy_value()


def tile_state(name: str):
    """Intrinsics f() that a thread calls before and after its tiles of instruction set `name`.

    Registers need nothing.
    """
    return (configure, release) if name.startswith("amx") else (_nothing, _nothing)


@intrinsic
def peak_loop(typingctx, n, seed):
    """f(n, seed): n times four products that do not wait for each other, and nothing else.

    Returns the seed.
    """

    def codegen(context, b, sig, args):
        for tile in range(8):
            call(b, "llvm.x86.tilezero", VOID, I8(tile))
        with cgutils.for_range(b, args[0]):
            for r in range(SIDE):
                for c in range(SIDE):
                    call(b, "llvm.x86.tdpbusd", VOID, I8(SUMS[r][c]), I8(LEFT[r]), I8(RIGHT[c]))
        return args[1]

    return types.int32(types.int64, types.int32), codegen


PEAK_OPERATIONS = 2.0 * SIDE * SIDE * ROWS * ROWS * WIDTH  # of one turn
