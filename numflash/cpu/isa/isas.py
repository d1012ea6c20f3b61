"""The instruction sets that have register tiles, and how many lanes their vectors have where the
code runs.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numba
from numba import types
from numba.extending import intrinsic

from ...errors import UnsupportedError
from ...jit import target
from ...tiling import KEY_BLOCK
from .vectors import Isa
from .vectors_arm import NEON_DOT, SVE
from .vectors_x86 import AMX_INT8, AVX2, AVX512_VNNI, AVX_VNNI


class _Isas(dict[str, Isa]):
    """The instruction sets, and with another register tile as `tiling.chosen` names them."""

    def __missing__(self, name: str) -> Isa:
        """`"avx512_vnni:8x2"`: tiles of 8 rows and 2 vectors, the last rows by fours and twos."""
        isa, _, tile = name.partition(":")
        if not tile:
            raise KeyError(name)
        mr, nv = map(int, tile.split("x"))
        return replace(self[isa], nv=nv, rows=(mr, min(4, mr), 2))


VECTOR_ISAS: dict[str, Isa] = _Isas(
    {isa.name: isa for isa in (AMX_INT8, AVX512_VNNI, AVX_VNNI, AVX2, SVE, NEON_DOT)}
)


def weight_planes(name: str, pv: str) -> int:
    """Dot operands that hold one softmax weight: with pv "int16" two bytes, or one int16."""
    return VECTOR_ISAS[name].group // 2 if pv == "int16" else 1


@functools.cache
def lanes_of(name: str):
    """Intrinsic f() -> int32 lanes of a vector of the instruction set.

    A constant, or read from the machine for SVE.
    """
    isa = VECTOR_ISAS[name]

    @intrinsic
    def lanes(typingctx):
        def codegen(context, b, sig, args):
            target.guard(name, context.codegen())
            return isa.elements(b, 1)

        return types.intp(), codegen

    return lanes


@functools.cache
def running_lanes(name: str) -> int:
    """int32 lanes of a vector of the instruction set on this machine.

    Raises
    ------
    UnsupportedError
        If the machine's vectors are longer than a half key block is wide: 512 bits.
    """
    isa = VECTOR_ISAS[name]
    if not isa.scalable:
        return isa.lanes
    lanes = lanes_of(name)
    found = numba.njit(lambda: lanes())()
    if found * isa.nv > KEY_BLOCK // 2:
        raise UnsupportedError(
            f"isa: {name!r} got vectors of {32 * found} bits; allowed: up to 512 (or impl='portable')"
        )
    return found


@intrinsic
def shares_operands(typingctx):
    """f() -> bool, a constant.

    Whether LLVM makes dot products of plain loops whose products share operands. It does on
    AArch64.
    """

    def codegen(context, b, sig, args):
        return context.get_constant(
            types.boolean, context.codegen().magic_tuple()[0].startswith(("aarch64", "arm64"))
        )

    return types.boolean(), codegen


def padded(n: int, unit: int) -> int:
    """n rounded up to a multiple of `unit`."""
    return -(-n // unit) * unit
