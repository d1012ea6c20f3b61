"""What ptxas made of a kernel.

Registers, stack, shared memory, and counts of machine instructions, read from a cubin.

Needs `cuobjdump` and `nvdisasm`: `pip install 'numflash[sass]'`, or a CUDA toolkit on the PATH. A
stack of 0 bytes is what says that fragments stayed in registers: generic loads through a stack
pointer show neither as LDL nor as a spill.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ...errors import UnsupportedError


@dataclass(frozen=True)
class Resources:
    """Of one kernel: registers per thread, bytes of stack, local and static shared memory, opcode
    -> count (with modifiers).
    """

    registers: int
    stack: int
    local: int
    shared: int
    opcodes: dict[str, int]

    def count(self, prefix: str) -> int:
        """Instructions whose opcode starts with `prefix`, up to a dot: "HMMA", "LDG.E.128"."""
        return sum(n for name, n in self.opcodes.items() if (name + ".").startswith(prefix + "."))


def tool(name: str) -> str:
    """Path of a CUDA binary utility, from the wheels or from the PATH."""
    try:
        import nvidia

        for root in nvidia.__path__:
            for found in sorted(Path(root).glob(f"cu*/bin/{name}")):
                return str(found)
    except ImportError:
        pass
    found_on_path = shutil.which(name)
    if found_on_path is None:
        raise UnsupportedError(f"{name} is not installed: pip install 'numflash[sass]'")
    return found_on_path


def _run(program: str, option: str, cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run(
            [tool(program), option, str(path)], capture_output=True, text=True, check=True
        )
    return done.stdout


def instructions(cubin: bytes) -> list[tuple[str, str]]:
    """(opcode with modifiers, operands) of the kernel in a cubin, in the order of their addresses.

    A label is an entry with an empty opcode. `@!PT` instructions, which never run, are left out.
    """
    found = []
    for label, opcode, operands in re.findall(
        r"^(\.L\w+):|^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d\s+)?([A-Z][A-Z0-9_.]+)([^;\n]*)",
        _run("nvdisasm", "-c", cubin),
        re.M,
    ):
        found.append(("", label) if label else (opcode, operands.strip()))
    return found


def loops(code: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """The loops of a listing: from each label to the last branch back to it, the longest first."""
    places = {operands: n for n, (opcode, operands) in enumerate(code) if not opcode}
    ends: dict[int, int] = {}
    for n, (opcode, operands) in enumerate(code):
        target = re.search(r"\.L\w+", operands) if opcode == "BRA" else None
        if target and places[target.group()] < n:
            ends[places[target.group()]] = n
    return sorted((code[start : end + 1] for start, end in ends.items()), key=len, reverse=True)


def resources(cubin: bytes) -> Resources:
    """Read a cubin with one kernel."""
    usage = _run("cuobjdump", "-res-usage", cubin)
    found = {key: int(n) for key, n in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    opcodes = Counter(opcode for opcode, _ in instructions(cubin) if opcode)
    return Resources(found["REG"], found["STACK"], found["LOCAL"], found["SHARED"], dict(opcodes))
