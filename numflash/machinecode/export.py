"""`numflash export`: a kernel for C.

It writes a kernel as assembly, object, C header, and a C program that checks and times it.

The function that Numba makes takes two more pointers (for a result and an exception); the header's
inline function hides them. Code is position independent. Memory of the fused kernel comes from
`runtime.c`, which replaces Numba's allocator.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from numba import types

from ..cpu.isa.isas import VECTOR_ISAS, running_lanes
from ..errors import ArgumentError, UnsupportedError
from ..jit import target
from ..jit.whole import write_whole
from . import codegen, exported, exported_decode, exported_softmax
from .exported import Export, Parameter

EXPORTS = {**exported.EXPORTS, **exported_softmax.EXPORTS, **exported_decode.EXPORTS}

LENGTHS = {"a64fx": 512, "neoverse-v1": 256}  # bits of SVE vectors; 128 elsewhere
C_TYPES = {
    "int8": "int8_t",
    "uint8": "uint8_t",
    "int16": "int16_t",
    "int32": "int32_t",
    "float32": "float",
}


def kernels() -> dict[str, str]:
    """The kernels that can be exported, and what each computes."""
    return {name: entry.text for name, entry in EXPORTS.items()}


def _target(cpu: str) -> codegen.Target:
    return codegen.Target.named(cpu)


def isa_of(entry: Export, kernel: str, cpu: str) -> str:
    """The best instruction set of a CPU that the kernel has.

    Raises
    ------
    ArgumentError
        For an unknown CPU.
    UnsupportedError
        If the CPU has no such vectors.
    """
    where = _target(cpu)
    found = codegen.code_generator(where) if cpu != "host" else None
    table = target.FLOAT_ISAS if entry.floats else target.ISAS
    for isa in entry.isas or table:
        if isa == "portable" or (kernel == "exp2-fexpa" and isa != "sve"):
            continue
        if isa == "amx_int8":  # tiles of matrices: no register tile, and a state of their own
            continue
        if entry.floats and isa.startswith("sve") and isa != f"sve{_bits(cpu)}":
            continue
        if not target.missing(isa, table, found):
            return isa
    raise UnsupportedError(
        f"export: {kernel!r} needs vectors that {where.cpu!r} lacks; allowed: a CPU with "
        + ("SVE" if kernel == "exp2-fexpa" else "AVX2, NEON dot products or SVE")
    )


def _bits(cpu: str) -> int:
    """Vector length of a CPU with SVE."""
    if cpu == "host":
        from ..jit.system import scalable_bits

        return scalable_bits()
    return LENGTHS.get(cpu, 128)


def _lanes(isa: str, cpu: str, floats: bool) -> int:
    if floats:
        return 0  # the float tiles contain theirs
    scalable = VECTOR_ISAS[isa].scalable
    if cpu == "host":
        return running_lanes(isa)
    return _bits(cpu) // 32 if scalable else VECTOR_ISAS[isa].lanes


def _signature(parameters: Sequence[Parameter]) -> tuple[Any, ...]:
    return tuple(types.int64 for _ in parameters)


def _machine_code(
    function: Any, parameters: Sequence[Parameter], symbol: str, cpu: str
) -> tuple[str, bytes]:
    """Assembly text and object of a function, its entry called `symbol`; position independent."""
    where = _target(cpu)
    args = _signature(parameters)
    bitcode, entry = codegen.bitcode_for(function, args, where)
    machine = llvm.Target.from_triple(where.triple).create_target_machine(
        cpu=where.cpu, features=where.features, opt=3, reloc="pic", codemodel="default"
    )

    def module() -> Any:
        found = llvm.parse_bitcode(bitcode)
        found.get_function(entry).name = symbol
        return found

    return machine.emit_assembly(module()), machine.emit_object(module())


def _facts(isa_name: str, lanes: int, floats: bool) -> dict[str, Any]:
    """What the contracts of the parameters name."""
    if floats:
        from ..cpu.floats.float_isas import FLOAT_ISAS

        return {"panel": FLOAT_ISAS[isa_name].panel}
    isa = VECTOR_ISAS[isa_name]
    four = isa.group == 4
    return {
        "operand": ("uint8_t" if isa.q_offset else "int8_t") if four else "int16_t",
        "packed": "int8_t" if four else "int16_t",
        "weight": "uint8_t" if four else "int16_t",
        "group": isa.group,
        "q_offset": isa.q_offset,
        "v_offset": isa.v_offset,
        "panel": isa.nv * lanes,
        "step": isa.step,
        "unit": isa.unit * lanes,
    }


def _symbol(kernel: str) -> str:
    return "numflash_" + kernel.replace("-", "_")


def _header(kernel: str, entry: Export, isa: str, cpu: str, facts: dict[str, Any]) -> str:
    name = _symbol(kernel)
    parameters = [
        (p.kind.format(**facts), p.name, p.contract.format(**facts)) for p in entry.parameters
    ]
    listed = ",\n    ".join(
        f"{kind}{'' if kind.endswith('*') else ' '}{n}" for kind, n, _ in parameters
    )
    contracts = "\n".join(f" *   {n:<12} {text}" for _, n, text in parameters if text)
    return f"""/* {kernel}: {entry.text}.
 * Made by numflash export for {cpu}, instruction set {isa}. Plain C, no other library than libc.
 *
{contracts}
 *
 * Arrays are contiguous and need the alignment of their elements only; 64 bytes (256 on A64FX) are
 * faster. Nothing is kept between calls, and threads may call at once.
 * Returns 0, or not 0 where memory for scratch could not be had.
 */
#ifndef {name.upper()}_H
#define {name.upper()}_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {{
#endif

int32_t {name}_raw(void *result, void **error, {", ".join(kind for kind, _, _ in parameters)});

static inline int {name}(
    {listed})
{{
    int64_t result[8] = {{0}};
    void *error = 0;
    return {name}_raw(result, &error, {", ".join(n for _, n, _ in parameters)});
}}

#ifdef __cplusplus
}}
#endif
#endif
"""


def _number(x: Any) -> str:
    """A value as C writes it."""
    if not isinstance(x, np.floating):
        return str(x)
    return float(x).hex() + "f" if np.isfinite(x) else f"{x}".replace("inf", "INFINITY")


def _values(x: np.ndarray) -> str:
    flat = x.reshape(-1)
    words = [_number(v) for v in flat]
    return ",\n    ".join(", ".join(words[i : i + 12]) for i in range(0, len(words), 12))


def _example(kernel: str, entry: Export, arguments: list[Any]) -> str:
    """`example.h`: operands, and what must come out."""
    lines = [
        f"/* Operands of {kernel}, and its results by NumPy and the integer model. */",
        "#include <math.h>",
        "#include <stdint.h>",
    ]
    for parameter, x in zip(entry.parameters, arguments, strict=True):
        if isinstance(x, np.ndarray):
            kind = C_TYPES[x.dtype.name]
            name = "expected_" + parameter.name if parameter.result else parameter.name
            lines.append(
                f"static {kind} {name}[{x.size}] __attribute__((aligned(256))) = {{\n    {_values(x)}\n}};"
            )
            if parameter.result:
                lines.append(
                    f"static {kind} {parameter.name}[{x.size}] __attribute__((aligned(256)));"
                )
        else:
            lines.append(f"#define EXAMPLE_{parameter.name} {x}")
    return "\n".join(lines) + "\n"


def _driver(kernel: str, entry: Export, arguments: list[Any]) -> str:
    name = _symbol(kernel)
    given = []
    clears, checks = [], []
    for p, x in zip(entry.parameters, arguments, strict=True):
        given.append(p.name if isinstance(x, np.ndarray) else f"EXAMPLE_{p.name}")
        if not p.result:
            continue
        clears.append(f"    memset({p.name}, 0, sizeof {p.name});")
        if entry.tolerance:
            wrong = f"!(fabsf({p.name}[i] - expected_{p.name}[i]) <= {entry.tolerance:g}f * (1 + fabsf(expected_{p.name}[i])))"
        else:
            wrong = f"memcmp(&{p.name}[i], &expected_{p.name}[i], sizeof {p.name}[i])"
        checks.append(f"    for (int64_t i = 0; i < {x.size}; i++) wrong += ({wrong}) != 0;")
    call = f"{name}({', '.join(given)})"
    clear, check = "\n".join(clears), "\n".join(checks)
    how = "" if entry.tolerance else " bit by bit"
    return f"""/* Calls {kernel} on the operands of example.h, compares its results{how}, and times it. */
#define _POSIX_C_SOURCE 199309L
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include "{name}.h"
#include "example.h"

int main(void)
{{
    int64_t wrong = 0;
    const int calls = 200;
    struct timespec begin, end;
{clear}
    if ({call}) {{ puts("{kernel}: out of memory"); return 2; }}
{check}
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int n = 0; n < calls; n++) {call};
    clock_gettime(CLOCK_MONOTONIC, &end);
    printf("{kernel}: %lld results differ, %.0f ns a call\\n", (long long)wrong,
           ((end.tv_sec - begin.tv_sec) * 1e9 + (end.tv_nsec - begin.tv_nsec)) / calls);
    return wrong != 0;
}}
"""


RUNTIME = """/* Replaces what Numba's code needs of its runtime: memory, and one thread. */
#include <stdint.h>
#include <stdlib.h>

typedef struct { int64_t count; void *destroy, *info, *data; int64_t size; void *external, *base; } Memory;

static Memory *allocate(size_t size, unsigned align)
{
    Memory *m = calloc(1, sizeof *m);
    if (!m) return 0;
    if (align < sizeof(void *)) align = sizeof(void *);
    m->base = malloc(size + align);
    if (!m->base) { free(m); return 0; }
    m->count = 1;
    m->size = (int64_t)size;
    m->data = (void *)(((uintptr_t)m->base + align - 1) / align * align);
    return m;
}
Memory *NRT_MemInfo_alloc_aligned(size_t size, unsigned align) { return allocate(size, align); }
Memory *NRT_MemInfo_alloc_safe_aligned(size_t size, unsigned align) { return allocate(size, align); }
void NRT_MemInfo_call_dtor(Memory *m) { free(m->base); free(m); }
int64_t get_num_threads(void) { return 1; }

/* contiguous arrays only, which is all that the kernels reshape */
int numba_attempt_nocopy_reshape(int64_t nd, const int64_t *dims, const int64_t *strides, int64_t new_nd,
                                 const int64_t *new_dims, int64_t *new_strides, int64_t size, int f_order)
{
    (void)f_order;
    int64_t step = size;
    for (int64_t i = nd - 1; i >= 0; i--) { if (dims[i] != 1 && strides[i] != step) return 0; step *= dims[i]; }
    step = size;
    for (int64_t i = new_nd - 1; i >= 0; i--) { new_strides[i] = step; step *= new_dims[i]; }
    return 1;
}
"""


def _makefile(kernel: str, triple: str) -> str:
    name = _symbol(kernel)
    cross = (
        "" if triple.split("-")[0] == platform.machine() else f"{triple.split('-')[0]}-linux-gnu-"
    )
    return f"""# make check: links {name}.o with main.c, runs it; make OBJECT={name}.s assembles the listing instead
CC = {cross}gcc
CFLAGS = -O2 -Wall
OBJECT = {name}.o
RUN =

check: main
\t$(RUN) ./main
main: main.c runtime.c example.h {name}.h $(OBJECT)
\t$(CC) $(CFLAGS) main.c runtime.c $(OBJECT) -o main -lm
clean:
\trm -f main
.PHONY: check clean
"""


def run(kernel: str, cpu: str, to: str | Path) -> dict[str, Any]:
    """Write a kernel for a CPU into a folder; returns the files, instruction set and symbol.

    Raises
    ------
    ArgumentError
        For an unknown kernel or CPU, or a folder that cannot be written.
    UnsupportedError
        If the CPU lacks the kernel's vectors.
    """
    if kernel not in EXPORTS:
        raise ArgumentError(
            f"kernel: got {kernel!r}, which cannot be exported; allowed: {', '.join(map(repr, EXPORTS))}"
        )
    entry = EXPORTS[kernel]
    isa = isa_of(entry, kernel, cpu)
    lanes = _lanes(isa, cpu, entry.floats)
    facts = entry.facts(isa, lanes) if entry.facts else _facts(isa, lanes, entry.floats)
    function = entry.factory(isa)
    arguments = entry.example(isa, lanes)
    name = _symbol(kernel)
    text, code = _machine_code(function, entry.parameters, f"{name}_raw", cpu)
    folder = Path(to)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files: dict[str, str | bytes] = {
            f"{name}.s": text,
            f"{name}.o": code,
            f"{name}.h": _header(kernel, entry, isa, cpu, facts),
            "example.h": _example(kernel, entry, arguments),
            "main.c": _driver(kernel, entry, arguments),
            "runtime.c": RUNTIME,
            "Makefile": _makefile(kernel, _target(cpu).triple),
        }
        for file, content in files.items():
            write_whole(folder / file, content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        raise ArgumentError(
            f"to: cannot write to {str(to)!r}: {error.strerror}; allowed: a folder"
        ) from None
    instructions = sum(bool(re.match(r"\t[a-z]", line)) for line in text.splitlines())
    return {
        "kernel": kernel,
        "cpu": _target(cpu).cpu,
        "isa": isa,
        "symbol": name,
        "instructions": instructions,
        "files": [str(folder / file) for file in files],
    }
