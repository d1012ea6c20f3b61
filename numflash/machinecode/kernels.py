"""The kernels whose machine code `codegen.compile_kernel` makes by name, as data.

Those of an instruction set have it in their names, and a CPU without it is refused. The others take
the best that the CPU has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..errors import UnsupportedError
from ..jit import target

INT8_ISAS = ("avx512_vnni", "avx_vnni", "avx2", "neon_dot", "sve")  # of decoding, best first


class Kernel(NamedTuple):
    """A function that ships, or that the course has.

    Where it is, the arguments if a factory makes it (f(CPU, its code generator) -> arguments where
    they depend on the CPU), its types, and CPUs it is meant for.
    """

    module: str
    name: str
    arguments: tuple | Callable[[str, Any], tuple] | None
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


def best(isas: Sequence[str], cpu: str, generator: Any, table: target.Needs = target.ISAS) -> str:
    """The first of `isas` that a CPU has; of float tiles those of its own vector length.

    Raises
    ------
    UnsupportedError
        If it has none of them.
    """
    lengths = {f"sve{bits}" for bits in (128, 256, 512)} - {f"sve{target.vector_bits(generator)}"}
    for isa in isas:
        if isa not in lengths and not target.missing(isa, table, generator):
            return isa
    raise UnsupportedError(
        f"asm: {cpu!r} has no vectors that this kernel is made of; allowed: a CPU with {', '.join(isas)}"
    )


def _types(name: str, *arguments: Any) -> Callable[[], tuple[Any, ...]]:
    """Of `kernel_types`, which imports the kernels' own named tuples, when they are asked for."""

    def found() -> tuple[Any, ...]:
        from . import kernel_types

        return getattr(kernel_types, name)(*arguments)

    return found


def _of(isa: str, table: target.Needs, *more: Any) -> Callable[[str, Any], tuple]:
    """Arguments of a kernel of one instruction set, on a CPU that has it."""

    def arguments(cpu: str, generator: Any) -> tuple:
        return best((isa,), cpu, generator, table), *more

    return arguments


def _fused(isa: str, operand: str, *cpus: str) -> Kernel:
    where = "numflash.cpu.int8.flash_int8", "make_attend"
    return Kernel(
        *where, _of(isa, target.ISAS, "int8"), _types("attend_int8", False, operand), cpus
    )


def _floats(isa: str, kind: str, *cpus: str) -> Kernel:
    where = "numflash.cpu.floats.flash_float", "make_attend"
    made = _of(isa, target.BFLOAT16_ISAS, kind)
    return Kernel(*where, made, _types("attend_floats", kind), cpus)


def _backward(isa: str, *cpus: str) -> Kernel:
    where = "numflash.cpu.backward.flash_backward", "make_backward"
    kind = "bfloat16" if isa.endswith("bf16") else "float32"
    return Kernel(*where, _of(isa, target.BFLOAT16_ISAS), _types("backward", kind), cpus)


def _tile(dtype: str, cpu: str, generator: Any) -> Any:
    from ..cpu.decode import tiles

    isa = best((*INT8_ISAS, "portable"), cpu, generator)
    return tiles.tile(isa, dtype, codegen=generator)


def _decode(dtype: str) -> Kernel:
    def arguments(cpu: str, generator: Any) -> tuple:
        return _tile(dtype, cpu, generator), 4, False, False  # four query rows

    where = "numflash.cpu.decode.flash_decode", "make_decode"
    return Kernel(*where, arguments, _types("decode", dtype))


def _append(dtype: str) -> Kernel:
    module, kind = ("append_int4", "int4") if dtype == "int4" else ("append", "float")
    name = f"make_append_{'int8' if dtype == 'int8' else kind}"

    def arguments(cpu: str, generator: Any) -> tuple:
        return _tile(dtype, cpu, generator), False

    return Kernel(f"numflash.cpu.decode.{module}", name, arguments, _types("append", dtype))


def _exported(name: str, factory: str, parameters: int, isas: Sequence[str]) -> Kernel:
    """A register tile, behind the addresses and sizes that `export` gives it."""
    table = target.FLOAT_ISAS if name.startswith("float") else target.ISAS

    def arguments(cpu: str, generator: Any) -> tuple:
        return (best(isas, cpu, generator, table),)

    signature = f"void({', '.join(['int64'] * parameters)})"
    return Kernel("numflash.machinecode.exported", factory, arguments, signature)


def _exp2(name: str, signature: str, *arguments: Any) -> Kernel:
    """A kernel of the exp2 benchmark, by FEXPA where the CPU has it."""

    def made(cpu: str, generator: Any) -> tuple:
        long = target.vector_bits(generator) > 128
        return ("fexpa-quadratic" if long else "accurate", *arguments)

    return Kernel("numflash.cpu.study.exp2_values", name, made, f"void({signature})")


_PORTABLE = "numflash.cpu.int8.portable"
_X86_FLOATS = {"avx512": ("znver4", "sapphirerapids"), "avx2": ("haswell", "znver4")}
_X86_BFLOAT16 = {"avx512_bf16": ("znver4", "sapphirerapids"), "amx_bf16": ("sapphirerapids",)}
_ARM_FLOATS = {"sve512": ("a64fx",), "sve256": ("neoverse-v1",), "neon": ("neoverse-n1",)}
_SCORES, _ROWS, _MATRIX = "int32[:, ::1], float32, float32", "float32[::1]", "float32[:, ::1]"
_TILES = "avx512_vnni", "avx_vnni", "avx2", "sve", "neon_dot"
_FLOAT_TILES = tuple(x for x in target.FLOAT_ISAS if x != "portable")
KERNELS = {
    "quantize-rows": Kernel(
        "numflash.numerics.quantize_kernels",
        "quantize_rows",
        None,
        "void(float32[:,:,::1], float32[:,::1], int64[::1], int64, int8[:,:,::1], float32[:,::1], "
        "uint8[:,::1], int8[:,:,::1])",
    ),
    "portable": Kernel(_PORTABLE, "make_attend", ("int8",), _types("attend_int8", True)),
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
    "portable-floats": Kernel(
        "numflash.cpu.floats.flash_rows", "make_attend_rows", (False,), _types("attend_rows")
    ),
    "int8-amx_int8": _fused("amx_int8", "int8", "sapphirerapids"),
    "int8-avx512_vnni": _fused("avx512_vnni", "int8", "znver4", "sapphirerapids"),
    "int8-avx_vnni": _fused("avx_vnni", "int8", "alderlake", "znver4"),
    "int8-avx2": _fused("avx2", "int16", "haswell", "znver4"),
    "int8-sve": _fused("sve", "int8", "a64fx", "neoverse-v1", "neoverse-v2"),
    "int8-neon_dot": _fused("neon_dot", "int8", "neoverse-n1", "neoverse-v1", "neoverse-v2"),
    **{f"bfloat16-{isa}": _floats(isa, "bfloat16", *cpus) for isa, cpus in _X86_BFLOAT16.items()},
    **{
        f"float32-{isa}": _floats(isa, "float32", *cpus)
        for isa, cpus in (_X86_FLOATS | _ARM_FLOATS).items()
    },
    **{
        f"backward-{isa}": _backward(isa, *cpus)
        for isa, cpus in (_X86_FLOATS | _X86_BFLOAT16 | _ARM_FLOATS).items()
    },
    **{
        f"{job}-{dtype}": make(dtype)
        for job, make in (("decode", _decode), ("append", _append))
        for dtype in ("int8", "int4", "float32", "bfloat16", "float16")
    },
    "int8-scores": _exported("int8-scores", "_scores", 8, _TILES),
    "int8-values": _exported("int8-values", "_values", 6, _TILES),
    "float32-scores": _exported("float32-scores", "_float_scores", 5, _FLOAT_TILES),
    "float32-values": _exported("float32-values", "_float_values", 6, _FLOAT_TILES),
    "exp2-fexpa": _exported("exp2-fexpa", "_exp2", 3, ("sve",)),
    "study-exp2-rows": _exp2("make_exp2_rows", f"{_SCORES}, {_MATRIX}"),
    "study-two-pass": _exp2("make_two_pass", f"{_SCORES}, {_MATRIX}, {_MATRIX}, {_MATRIX}"),
    **{
        f"study-{name}-{way}": _exp2(
            f"make_{name}", f"{_SCORES}, {_MATRIX}, {_ROWS}, {_MATRIX}", way
        )
        for name in ("fused", "fused4")
        for way in ("register", "memory")
    },
}
