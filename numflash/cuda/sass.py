"""What ptxas made of a kernel: registers, stack, shared memory, and counts of machine instructions, read from a cubin.

Needs `cuobjdump` and `nvdisasm`: `pip install 'numflash[sass]'`, or a CUDA toolkit on the PATH. A stack of 0 bytes is what says
that fragments stayed in registers: generic loads through a stack pointer show neither as LDL nor as a spill.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ..errors import UnsupportedError


@dataclass(frozen=True)
class Resources:
    """Of one kernel: registers per thread, bytes of stack, local and static shared memory, opcode -> count (with modifiers)."""

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


def resources(cubin: bytes) -> Resources:
    """Read a cubin with one kernel."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = subprocess.run(
            [tool("cuobjdump"), "-res-usage", str(path)], capture_output=True, text=True, check=True
        ).stdout
        listing = subprocess.run(
            [tool("nvdisasm"), "-c", str(path)], capture_output=True, text=True, check=True
        ).stdout
    found = {key: int(n) for key, n in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    # `@!PT` instructions never run
    opcodes = Counter(
        re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\d\s+)?([A-Z][A-Z0-9_.]+)", listing, re.M)
    )
    return Resources(found["REG"], found["STACK"], found["LOCAL"], found["SHARED"], dict(opcodes))
