"""What the judges of CUDA exercises share.

Run a kernel in the emulator, compare, say what is wrong.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numba.core.errors import NumbaError

from ..exercises import at_line

BRANCHES = 20_000  # the solutions take up to 128; an endless loop is found in seconds


def emulated(
    kernel: Any, grid: Any, block: Any, args: Any, seeds: int = 4, **options: Any
) -> tuple[Any, str]:
    """(the last report, "" or what the emulator reports), over several schedules.

    Arrays in `args` are changed by the kernel; each schedule starts from their first contents.
    """
    from ...cuda.emulator import EmulatorError, emulate

    before = [np.array(x) if isinstance(x, np.ndarray) else None for x in args]
    report = None
    for seed in range(seeds):
        for x, first in zip(args, before, strict=True):
            if first is not None:
                x[...] = first
        try:
            report = emulate(kernel, grid, block, args, seed=seed, branches=BRANCHES, **options)
        except EmulatorError as error:
            where = at_line(*error.source) if error.source else ""
            return None, "the emulator reports " + str(error).split("\n")[0].split(" [")[0] + where
        except NumbaError as error:
            return None, not_compiled(error) + _usual_cause(str(error))
    return report, ""


def nothing_stored(report: Any, name: str = "out") -> str:
    """A fault if a kernel stores nothing, "open" if it loads nothing either, else ""."""
    if report.global_stored:
        return ""
    return f"your kernel ran, but stored nothing in `{name}`" if report.global_loaded else "open"


def not_compiled(error: NumbaError) -> str:
    """What the compiler says first, and the line of the kernel."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    said = [x.strip() for x in plain.splitlines() if x.strip() and "pipeline" not in x]
    lines = re.findall(r'(?:"|typing of [\w -]+) at (.+) \((\d+)\)', plain)
    lines = [at for at in lines if "site-packages" not in at[0]]  # not those of Numba itself
    first = said[0] if said else type(error).__name__
    if "No implementation of function" in plain:
        first = _unknown_call(plain)
    elif first.endswith(":"):  # what it is about comes in the next line
        first = " ".join([first, *said[1:2]])
    words = f"it does not compile: {first}"
    return words + (at_line(lines[-1][0], int(lines[-1][1])) if lines else "")


def _unknown_call(plain: str) -> str:
    """A call that Numba has no code for, as the reader wrote it, and why where Numba says it."""
    call, why = (re.search(x, plain) for x in (r">>> (.+)", r"TypingError: (.+)"))
    written = re.sub(r"Literal\[\w+\]\((\w+)\)", r"\1", call[1]) if call else "this call"
    written = re.sub(r"^(npy|array)_", "", written)
    if written.startswith("_"):  # a part of Numba's own
        return why[1] if why else "it makes a new array, by an operator or a function of arrays"
    return f"Numba has no {written}" + (f": {why[1]}" if why else "")


def _usual_cause(said: str) -> str:
    if re.search(r"Function\(<function (shared|local)\.array", said):
        return (
            "\n   The shape of a shared or local array is fixed when the kernel is compiled: write numbers, "
            "as (64, 32)."
        )
    if re.search(r"NRT required|matmul|setitem|getitem|No implementation of function", said):
        return (
            "\n   The usual cause: a kernel computes with single numbers. It cannot assign rows or "
            "slices of an\n   array, nor use `@`, nor NumPy's functions of arrays: give every index, "
            "and loop."
        )
    if "not defined" in said:
        return "\n   A name is misspelt, or used before it is set."
    if re.search(r"No conversion from .* to none", said):
        return "\n   A kernel returns nothing: store into its output array."
    return ""


def wrong_numbers(got: np.ndarray, exact: np.ndarray, name: str, within: float = 1e-3) -> str:
    """Where an array differs from what is exact; "" if it does not."""
    off = np.abs(got.astype(float) - exact) > within * np.abs(exact).max()
    off |= ~np.isfinite(got.astype(float))
    if not off.any():
        return ""
    at = tuple(int(n) for n in np.argwhere(off)[0])
    rows = np.unique(np.nonzero(off)[0])
    return (
        f"no rule is broken, but {off.sum()} of {off.size} numbers of {name} are wrong, "
        f"in rows {rows[0]} to {rows[-1]}; the first at {list(at)}: {float(got[at]):.4g} "
        f"where {float(exact[at]):.4g} is expected"
    )
