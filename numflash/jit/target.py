"""What the code generator may use.

CPU name and features of Numba's target, and the instruction sets that follow.

The decision is made from the target that Numba compiles for, not from the CPU that runs:
`NUMBA_CPU_NAME` and `NUMBA_CPU_FEATURES` are honoured. An operation that the target lacks would
abort the process inside LLVM, so every register-tile kernel is guarded by `require`.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import llvmlite.binding as llvm
from numba.core import config
from numba.core.registry import cpu_target

from ..errors import ArgumentError, UnsupportedError
from .system import scalable_bits, tiles_permitted

Needs = dict[str, tuple[str, ...]]

# For tests: a target with AVX-512 VNNI counts as one with AMX, and each tile instruction becomes a
# call of the function of `cpu.isa.emulated_tiles` whose symbol is this prefix and its name.
EMULATES_AMX = os.environ.get("NUMFLASH_EMULATE_AMX", "") not in ("", "0")
EMULATED_TILES = "numflash_emulated_"
_TILES = frozenset(("amx-tile", "amx-int8", "amx-bf16"))

# Instruction set of the INT8 register tiles -> features of the target that it needs, best first.
ISAS: Needs = {
    "amx_int8": ("amx-tile", "amx-int8", "avx512f", "avx512bw", "avx512vl", "avx512vnni"),
    "avx512_vnni": ("avx512f", "avx512bw", "avx512vl", "avx512vnni"),
    "avx_vnni": ("avx2", "fma", "avxvnni|avx512vnni", "avxvnni|avx512vl"),
    "avx2": ("avx2", "fma"),
    "sve": ("sve",),
    "neon_dot": ("dotprod",),
    "portable": (),
}
# The same for the float register tiles, by the type of their operands.
FLOAT_ISAS: Needs = {
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "avx2": ("avx2", "fma"),
    "sve512": ("sve",),
    "sve256": ("sve",),
    "neon": ("neon",),
    "portable": (),
}
_BF16 = (*FLOAT_ISAS["avx512"], "avx512bf16")
BFLOAT16_ISAS: Needs = {
    "amx_bf16": ("amx-tile", "amx-int8", "amx-bf16", *_BF16, "avx512vnni"),
    "avx512_bf16": _BF16,
    **FLOAT_ISAS,
}

_V3 = "avx avx2 bmi bmi2 f16c fma sse4.2"
_SKX = f"{_V3} avx512f avx512bw avx512cd avx512dq avx512vl"
_ICX = f"{_SKX} avx512vnni avx512vbmi avx512vbmi2 avx512bitalg avx512ifma avx512vpopcntdq gfni"
# Features of a CPU asked for by name alone, with NUMBA_CPU_FEATURES empty: LLVM supports them, but
# offers no query.
CPUS = {
    name: frozenset(features.split())
    for names, features in (
        ("haswell broadwell skylake znver1 znver2 znver3 x86-64-v3", _V3),
        ("alderlake raptorlake sierraforest", f"{_V3} avxvnni"),
        ("skylake-avx512 x86-64-v4", _SKX),
        ("cascadelake", f"{_SKX} avx512vnni"),
        ("cooperlake", f"{_SKX} avx512vnni avx512bf16"),
        ("icelake-client icelake-server tigerlake rocketlake", _ICX),
        ("znver4", f"{_ICX} avx512bf16"),
        ("znver5", f"{_ICX} avx512bf16 avxvnni"),
        (
            "sapphirerapids emeraldrapids graniterapids",
            f"{_ICX} avx512bf16 avxvnni amx-tile amx-int8 amx-bf16",
        ),
    )
    for name in names.split()
}


def cpu_name() -> str:
    """The CPU that Numba generates code for."""
    return config.CPU_NAME or llvm.get_host_cpu_name()


@functools.cache
def _features(codegen: Any) -> frozenset[str]:
    triple, cpu, listed = codegen.magic_tuple()[:3]
    if triple.startswith(("aarch64", "arm64")):
        return _features_by_trial(codegen._tm)
    if not listed:
        return CPUS.get(cpu, frozenset())
    found = frozenset(f[1:] for f in listed.split(",") if f.startswith("+"))
    return found | _TILES if EMULATES_AMX and "avx512vnni" in found else found


# What LLVM lists for an AArch64 machine leaves out what the CPU's name implies (Neoverse N1: no
# word of dotprod), so make code that is valid everywhere and see which instructions it becomes.
_TRIALS = """
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
define i32 @dot(<16 x i8> %x, <16 x i8> %y) {
  %a = sext <16 x i8> %x to <16 x i32>
  %b = sext <16 x i8> %y to <16 x i32>
  %p = mul <16 x i32> %a, %b
  %r = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %p)
  ret i32 %r
}
define <4 x i32> @divide(<4 x i32> %x, <4 x i32> %y) {
  %r = sdiv <4 x i32> %x, %y
  ret <4 x i32> %r
}
"""
_SHOWN_BY = {"dotprod": "sdot\tv", "sve": "sdiv\tz"}


def _features_by_trial(target_machine: Any) -> frozenset[str]:
    code = target_machine.emit_assembly(llvm.parse_assembly(_TRIALS))
    return frozenset(
        {"neon"}.union(feature for feature, instruction in _SHOWN_BY.items() if instruction in code)
    )


def features(codegen: Any = None) -> frozenset[str]:
    """The features that generated code may use.

    Of Numba's CPU target unless another code generator is given.
    """
    return _features(codegen or cpu_target.target_context.codegen())


@functools.cache
def _lacking(needs: tuple[str, ...], codegen: Any) -> list[str]:
    return [need for need in needs if not features(codegen).intersection(need.split("|"))]


def missing(isa: str, isas: Needs = ISAS, codegen: Any = None) -> list[str]:
    """The features that `isa` needs and the target lacks."""
    return _lacking(isas[isa], codegen)


def _granted(isa: str) -> bool:
    """Whether the operating system lets this process use an instruction set that the target has."""
    if isa in ("sve512", "sve256"):  # laid out for this length of the machine's vectors
        return scalable_bits() == int(isa[3:])
    return not isa.startswith("amx") or EMULATES_AMX or tiles_permitted()


# bits of a CPU's scalable vectors, by its name; 128 of those that are not here
SCALABLE_BITS = {"a64fx": 512, "neoverse-v1": 256}


def vector_bits(codegen: Any) -> int:
    """Bits of the scalable vectors of the machine that a code generator makes code for; 0 without.

    This machine's own where the code is for this process, those of the CPU by its name where it is
    not (`machinecode.codegen`, whose generators say `crosses`).
    """
    if missing("sve", codegen=codegen):
        return 0
    if getattr(codegen, "crosses", False):
        return SCALABLE_BITS.get(codegen.magic_tuple()[1], 128)
    return scalable_bits()


def guard(isa: str, codegen: Any, isas: Needs = ISAS) -> None:
    """Raise instead of emitting an operation that the target lacks.

    LLVM would abort the process. What follows a colon is a register tile (`tiling.chosen`).
    """
    lacking = missing(isa.partition(":")[0], isas, codegen)
    if lacking:
        raise UnsupportedError(
            f"isa: {isa!r} needs {', '.join(lacking)}, which the target {codegen.magic_tuple()[1]!r} lacks"
        )


def available(isas: Needs = ISAS) -> list[str]:
    """The instruction sets that the target supports, best first."""
    return [isa for isa in isas if not missing(isa, isas) and _granted(isa)]


@functools.cache
def _best(isas: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    return available(dict(isas))[0]


def require(isa: str | None, isas: Needs = ISAS) -> str:
    """`isa` itself, or the best one for None; an error where the target lacks it."""
    if isa is None:
        return _best(tuple(isas.items()))
    if not isinstance(isa, str) or isa not in isas:
        raise ArgumentError(f"isa: got {isa!r}; allowed: {', '.join(map(repr, isas))}")
    if missing(isa, isas):
        raise UnsupportedError(
            f"isa: {isa!r} needs {', '.join(missing(isa, isas))}, which the target {cpu_name()!r} lacks; "
            f"allowed here: {', '.join(map(repr, available(isas)))}"
        )
    if isa.startswith("sve") and not _granted(isa):
        raise UnsupportedError(
            f"isa: {isa!r} is for vectors of {isa[3:]} bits, this machine's have {scalable_bits()}; allowed here: "
            f"{', '.join(map(repr, available(isas)))}"
        )
    if not _granted(isa):
        raise UnsupportedError(
            f"isa: {isa!r} is refused by the operating system; allowed here: "
            f"{', '.join(map(repr, available(isas)))}"
        )
    return isa
