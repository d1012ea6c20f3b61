"""Instructions that an architecture has not, which ptxas refuses and a card would never get.

As the PTX ISA's "Target ISA Notes" have it, for the instructions that the emulator knows.
"""

from __future__ import annotations

import re

from .errors import EmulatorError
from .parse import Instruction, Program

# operation and modifiers, and the first architecture that has them; of several that fit the latest counts
SINCE: tuple[tuple[str, frozenset[str], int], ...] = tuple(
    (operation, frozenset(modifiers.split()), since)
    for operation, modifiers, since in (
        ("add", "bf16", 90),
        ("add", "bf16x2", 90),
        ("barrier", "cluster", 90),
        ("cp", "async", 80),
        ("cp", "async bulk", 90),
        ("cvt", "bf16", 80),
        ("cvt", "bf16x2", 80),
        ("cvt", "f16x2 f32", 80),
        ("cvt", "tf32", 80),
        ("elect", "", 90),
        ("ex2", "f16", 75),
        ("ex2", "f16x2", 75),
        ("ex2", "bf16", 90),
        ("ex2", "bf16x2", 90),
        ("fence", "mbarrier_init", 90),
        ("fence", "proxy", 90),
        ("fma", "bf16", 80),
        ("fma", "bf16x2", 80),
        ("getctarank", "", 90),
        ("griddepcontrol", "", 90),
        ("ldmatrix", "", 75),
        ("mapa", "", 90),
        ("mbarrier", "", 80),
        ("mbarrier", "try_wait", 90),
        ("mbarrier", "expect_tx", 90),
        ("mma", "", 75),
        ("mma", "m16n8k16", 80),
        ("mma", "m16n8k32", 80),
        ("mma", "bf16", 80),
        ("mma", "tf32", 80),
        ("mul", "bf16", 90),
        ("mul", "bf16x2", 90),
        ("redux", "", 80),
        ("setmaxnreg", "", 90),
        ("stmatrix", "", 90),
        ("tanh", "", 75),
        ("wgmma", "", 90),
    )
)
OWN = ("setmaxnreg", "wgmma")  # only for targets such as sm_90a


def needed(i: Instruction) -> int:
    """The number of the first architecture that has an instruction; 0 for those that all have."""
    fit = [
        since
        for operation, modifiers, since in SINCE
        if operation == i.op and modifiers <= set(i.modifiers)
    ]
    return max(fit, default=0)


def check(program: Program, ptx: str) -> None:
    """Refuse a kernel with instructions that its `.target` has not.

    Raises
    ------
    EmulatorError
        kind "unsupported", with the place of the first one.
    """
    target = re.search(r"^\s*\.target\s+sm_(\d+)([a-z]?)", ptx, re.M)
    if target is None:
        return
    number, own = int(target.group(1)), target.group(2) == "a"
    for i in program.code:
        since, needs_own = needed(i), i.op in OWN
        if number < since or (needs_own and not own):
            message = (
                f"sm_{target.group(1)}{target.group(2)} has no {'.'.join((i.op, *i.modifiers))}; "
                f"it is there from sm_{since}{'a' * needs_own} on"
            )
            raise EmulatorError("unsupported", message, i.line, i.text, i.source)
