"""The kernels whose machine code `codegen.compile_kernel` makes by name, as data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba.core import types
from numba.core.types import containers


def _attend_types(portable: bool, operand: str = "int8") -> tuple[Any, ...]:
    """Argument types of the fused INT8 kernels.

    See `make_attend` of `cpu.int8.portable` and of `cpu.int8.flash_int8`.
    """
    from ..cpu.int8.first_keys import FirstKeys
    from ..cpu.int8.packing import PackedKeys
    from ..cpu.semantics import ScoreTiles, Semantics

    def array(dtype: str, ndim: int) -> Any:
        return types.Array(getattr(types, dtype), ndim, "C")

    integer = types.int64
    number = types.float32
    flag = types.boolean
    states, spans = array("uint8", 4), array("int64", 4)
    functions = containers.NamedTuple(
        (*[integer] * 4, states, spans, integer, integer, array("int64", 1)), ScoreTiles
    )
    semantics = containers.NamedTuple(
        (
            integer,
            integer,
            array("int64", 1),
            array("int64", 1),
            flag,
            array("uint8", 4),
            array("float32", 4),
            flag,
            flag,
            number,
            array("float32", 3),
            array("float32", 2),
            flag,
            functions,
        ),
        Semantics,
    )
    if portable:
        packed: tuple[Any, ...] = array("int8", 3), array("float32", 2), array("int8", 4)
    else:
        keys = containers.NamedTuple(
            (array(operand, 2), array("int32", 2), array("float32", 2), array("uint8", 2)),
            PackedKeys,
        )
        packed = keys, array(operand, 2)
    first = containers.NamedTuple(
        (array("int16", 3), array("float32", 2), array("float32", 3), integer), FirstKeys
    )
    return (
        array("int8", 3),
        array("float32", 2),
        *packed,
        first,
        array("float32", 2),
        semantics,
        containers.UniTuple(integer, 3 if portable else 4),
        integer,
        array("int64", 1),
        array("float32", 3),
        array("int32", 2),
        array("float32", 2),
    )


class Kernel(NamedTuple):
    """A function that ships.

    Where it is, the arguments if a factory makes it, its types, and CPUs it is meant for.
    """

    module: str
    name: str
    arguments: tuple | None
    signature: str | Callable[[], tuple[Any, ...]]
    cpus: tuple[str, ...] = (
        "host",
        "a64fx",
        "neoverse-v1",
        "neoverse-v2",
        "neoverse-n1",
        "haswell",
        "znver4",
        "sapphirerapids",
    )


def _fused(isa: str, operand: str, *cpus: str) -> Kernel:
    return Kernel(
        "numflash.cpu.int8.flash_int8",
        "make_attend",
        (isa, "int8"),
        functools.partial(_attend_types, False, operand),
        cpus,
    )


_PORTABLE = "numflash.cpu.int8.portable"
KERNELS = {
    "quantize-rows": Kernel(
        "numflash.quantization",
        "_quantize_rows",
        None,
        "void(float32[:,:,::1], float32[:,::1], int64[::1], int64, int8[:,:,::1], float32[:,::1], "
        "uint8[:,::1], int8[:,:,::1])",
    ),
    "portable": Kernel(_PORTABLE, "make_attend", ("int8",), functools.partial(_attend_types, True)),
    "portable-scores": Kernel(
        _PORTABLE,
        "score_block",
        None,
        "void(int8[:,::1], int8[:,::1], float32[::1], float32[::1], float32[:,::1])",
    ),
    "portable-softmax": Kernel(
        _PORTABLE, "softmax_row", None, "int32(int16[::1], int32, int8[::1])"
    ),
    "portable-values": Kernel(
        _PORTABLE,
        "value_block",
        None,
        "void(int8[:,::1], int8[:,::1], float32[::1], float32[:,::1])",
    ),
    "int8-amx_int8": _fused("amx_int8", "int8", "sapphirerapids"),
    "int8-avx512_vnni": _fused("avx512_vnni", "int8", "znver4", "sapphirerapids"),
    "int8-avx_vnni": _fused("avx_vnni", "int8", "alderlake", "znver4"),
    "int8-avx2": _fused("avx2", "int16", "haswell", "znver4"),
    "int8-sve": _fused("sve", "int8", "a64fx", "neoverse-v1", "neoverse-v2"),
    "int8-neon_dot": _fused("neon_dot", "int8", "neoverse-n1", "neoverse-v1", "neoverse-v2"),
}
