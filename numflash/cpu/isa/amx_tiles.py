"""The matrix tiles of Intel AMX.

Their sizes, what each of the eight is used for, and their configuration.

AMX has eight tile registers of 16 rows x 64 bytes. A process must request them from Linux once
(`jit.system.tiles_permitted`), a thread must configure them before it uses them. Source: Intel 64
and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18 "Programming with Intel
AMX".
"""

from __future__ import annotations

import functools

import llvmlite.ir as ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...jit import target
from .vectors import I8, I64, call

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


def tile_call(b: ir.IRBuilder, name: str, *args: ir.Value) -> None:
    """One tile instruction, or with `target.EMULATES_AMX` a call of the function that stands for it."""
    if not target.EMULATES_AMX:
        call(b, f"llvm.x86.{name}", VOID, *args)
        return
    words = [b.ptrtoint(x, I64) if x.type.is_pointer else b.zext(x, I64) for x in args]
    call(b, target.EMULATED_TILES + name, VOID, *words)


def _configuration(rows: int) -> ir.Constant:
    """The tile configuration: palette 1, rows of 64 bytes.

    Sums and left operands have `rows` rows, right operands 16.
    """
    text = bytearray(64)
    text[0] = 1
    for tile in range(8):
        text[16 + 2 * tile], text[48 + tile] = WIDTH, ROWS if tile in RIGHT else rows
    return ir.Constant(ir.ArrayType(I8, 64), text)


@functools.cache
def configure_rows(rows: int):
    """Intrinsic f(): this thread's tiles become `rows` rows x 64 bytes, right operands 16 rows."""

    @intrinsic
    def configure(typingctx):
        def codegen(context, b, sig, args):
            target.guard("amx_int8", context.codegen())
            name = f"amx.configuration.{rows}"
            text = cgutils.global_constant(b, name, _configuration(rows))
            tile_call(b, "ldtilecfg", b.bitcast(text, BYTES))
            return context.get_dummy_value()

        return types.void(), codegen

    return configure


configure = configure_rows(ROWS)


@intrinsic
def release(typingctx):
    """f(): this thread's tiles are empty again, so that switching threads need not save them."""

    def codegen(context, b, sig, args):
        tile_call(b, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _nothing(typingctx):
    return types.void(), lambda context, b, sig, args: context.get_dummy_value()


def tile_state(name: str, rows: int = ROWS):
    """Intrinsics f() that a thread calls before and after its tiles of instruction set `name`.

    Registers need nothing. `rows`: of sums and left operands.
    """
    return (configure_rows(rows), release) if name.startswith("amx") else (_nothing, _nothing)


@intrinsic
def peak_loop(typingctx, n, seed):
    """f(n, seed): n times four products that do not wait for each other, and nothing else.

    Returns the seed.
    """

    def codegen(context, b, sig, args):
        for tile in range(8):
            tile_call(b, "tilezero", I8(tile))
        with cgutils.for_range(b, args[0]):
            for r in range(SIDE):
                for c in range(SIDE):
                    tile_call(b, "tdpbusd", I8(SUMS[r][c]), I8(LEFT[r]), I8(RIGHT[c]))
        return args[1]

    return types.int32(types.int64, types.int32), codegen


PEAK_OPERATIONS = 2.0 * SIDE * SIDE * ROWS * ROWS * WIDTH  # of one turn

if target.EMULATES_AMX:
    from . import emulated_tiles  # noqa: F401 (it makes the functions known)
