"""Reading assembly text (AArch64, and x86 in AT&T syntax).

Its functions, its loops, and what their instructions are.

Text in, data out; nothing is compiled here (see `numflash.machinecode.codegen`) and nothing is
printed.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable
from typing import NamedTuple

from ..errors import ArgumentError

_LABEL = re.compile(r'^("?[^\s":]+"?):')
_BRANCH = re.compile(r"^(?:b(?:\.\w+)?|cbn?z|tbn?z|j\w+)\s+(?:.*,\s*)?(\.L\w+)$")
_CALL = re.compile(r"^(?:blr?|callq?)\s")
_STACK = re.compile(
    r"\[sp\b|\[x29\b|\(%rsp\b|\(%rbp\)"
)  # with an index, %rbp is a pointer like any other
_VECTOR = re.compile(r"%[xyz]mm\d|\b(?:z\d+(?:\.[bhsdq])?|v\d+\.\d*[bhsdq]|[qd]\d+)\b")
TILE_DOTS = 12  # of the smallest tile of a product: 6 rows x 2 vectors
_DOT = re.compile(r"(?:\{vex\}\s+)?(?:vpdpbusd|vpmaddwd|[su]+dot\b|tdpb)")
_DIVISION = re.compile(r"^(?:[su]divr?|i?div[bwlq]?)\s")
_FLOAT64_X86 = re.compile(
    r"^v?(?:(?:add|sub|mul|div|sqrt|min|max|fn?m\w+\d+|round|rndscale|u?comi|cmp\w*|scalef)[ps]d"
    r"|cvt\w*[ps]d\w*)\s"
)
_FLOAT64_ARM = re.compile(r"^(?:f(?!mov)\w+|[su]cvtf)\s.*\b(?:d\d+|v\d+\.2d|z\d+\.d)\b")
_LANES64_X86 = re.compile(
    r"^vp(?:add|sub|abs|mull?|mulu?d|mov[sz]x[bwd]|sra|srl|sll|srav|srlv|sllv|max[su]|min[su])q\s"
)
_LANES64_ARM = re.compile(r"\bz\d+\.d\b|\bv\d+\.2d\b")
# these print .d or .2d whatever the lanes are (logic, moves) or widen one value per row
# (reductions)
_LANELESS_ARM = re.compile(
    r"^(?:and|orr|orn|eor3?|bic|bsl|mov|movi|movprfx|not|dup|ld1r?d|ldr|ldp|str|stp|st1d|[us]addv|"
    r"addv|addp|fmov|ext|zip\d|uzp\d|trn\d|tbl|sel|insr?|umov)\s"
)


class Loop(NamedTuple):
    """An innermost loop.

    The symbol that contains it, how many loops surround it (1 = none), and its instructions.
    """

    function: str
    depth: int
    instructions: tuple[str, ...]


def functions(assembly: str) -> dict[str, list[str]]:
    """Split assembly text into its functions.

    Symbol -> lines holding only instructions and local labels.
    """
    found: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for raw in assembly.splitlines():
        line = re.sub(
            r"(//|\s#\s|##).*", "", raw
        ).strip()  # "#64" is an immediate of AArch64, "# " a comment of x86
        label = _LABEL.match(line)
        if label and line.startswith(".Lfunc_end"):
            lines = None
        elif label and not line.startswith(".L"):
            lines = found.setdefault(label.group(1).strip('"'), [])
        elif lines is not None and label:
            lines.append(label.group(1) + ":")
        elif lines is not None and line and not line.startswith((".", "#", "//")):
            lines.append(re.sub(r"\s+", " ", line))
    return {
        name: body for name, body in found.items() if any(not line.endswith(":") for line in body)
    }


def loops(assembly: str) -> list[Loop]:
    """All innermost loops of the text, in order.

    The code between a label and the last branch back to it.
    """
    found = []
    for name, lines in functions(assembly).items():
        labels = {line[:-1]: n for n, line in enumerate(lines) if line.endswith(":")}
        spans: dict[int, int] = {}
        for n, line in enumerate(lines):
            branch = _BRANCH.match(line)
            if branch and labels.get(branch.group(1), n) < n:
                spans[labels[branch.group(1)]] = n
        for start, end in spans.items():
            if any(start <= a and b <= end and (a, b) != (start, end) for a, b in spans.items()):
                continue
            depth = sum(a <= start and end <= b for a, b in spans.items())
            body = tuple(line for line in lines[start : end + 1] if not line.endswith(":"))
            found.append(Loop(name, depth, body))
    return found


def hot_loop(assembly: str) -> Loop:
    """The innermost loop of a product's register tile.

    The loop with the highest share of integer dot products.

    Without any, the loop with the most vector instructions: the unrolled main loop, not its
    remainders.

    Raises
    ------
    ArgumentError
        If the code has no loop.
    """
    found = loops(assembly)
    if not found:
        raise ArgumentError("assembly: the code has no loop")

    def density(loop: Loop) -> float:
        dots = sum(4 if i.startswith("tdp") else is_dot(i) for i in loop.instructions)
        return dots**2 / len(loop.instructions) if dots >= TILE_DOTS else 0.0

    return max(
        found, key=lambda loop: (density(loop), sum(map(is_vector, loop.instructions)), loop.depth)
    )


def histogram(instructions: Iterable[str]) -> dict[str, int]:
    """Count instructions by mnemonic and register kind (``"sdot z.s"``, ``"ld1rw z.s"``,
    ``"vpdpbusd zmm"``).
    """
    return dict(collections.Counter(map(_kind, instructions)).most_common())


def _kind(instruction: str) -> str:
    mnemonic, _, operands = instruction.partition(" ")
    if operands.count("%"):
        widths = re.findall(r"%([xyz]mm)\d", operands)
        return f"{mnemonic} {max(widths)}" if widths else mnemonic
    register = re.search(r"\bz\d+(\.[bhsdq])?|\bv\d+(\.\d*[bhsdq])?|\b([qd])\d+", operands)
    return (
        mnemonic + " " + re.sub(r"(?<=[zvqd])\d+", "", register.group(0), count=1)
        if register
        else mnemonic
    )


def is_vector(instruction: str) -> bool:
    """True if the instruction works on vector registers."""
    return bool(_VECTOR.search(instruction))


def is_dot(instruction: str) -> bool:
    """True for an integer dot product."""
    return bool(_DOT.match(instruction))


def is_integer_division(instruction: str) -> bool:
    """True for an integer division of any width, scalar or vector."""
    return bool(_DIVISION.match(instruction))


def is_float64(instruction: str) -> bool:
    """True for double precision arithmetic or a conversion from or to it (moves and bit logic do
    not count).
    """
    return bool(_FLOAT64_X86.match(instruction) or _FLOAT64_ARM.match(instruction))


def is_lanes64(instruction: str) -> bool:
    """True for vector arithmetic in 64-bit lanes: half the work per instruction of 32-bit ones."""
    if _LANES64_X86.match(instruction):
        return True
    return bool(_LANES64_ARM.search(instruction)) and not _LANELESS_ARM.match(instruction)


def is_call(instruction: str) -> bool:
    """True for a function call."""
    return bool(_CALL.match(instruction))


def is_stack(instruction: str) -> bool:
    """True for an access to the stack: in a hot loop, a spilled register.

    An address alone (lea) touches no memory.
    """
    return not instruction.startswith("lea") and bool(_STACK.search(instruction))


def is_spill(instruction: str) -> bool:
    """True for a vector register that is stored to the stack or loaded from it."""
    return is_stack(instruction) and is_vector(instruction)
