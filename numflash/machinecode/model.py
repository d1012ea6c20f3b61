"""llvm-mca, LLVM's model of a CPU: cycles of a straight line of instructions.

No hardware is measured. The ratios are worth reading, not the figures (see `LIMITS`).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence

from ..errors import ArgumentError, UnsupportedError
from ..jit import target
from . import codegen

LIMITS = (
    "a model, no hardware measured: caches never miss, every branch is foreseen and free, TLB, huge pages, threads and\n"
    "memory are left out, and width, latencies and pipes are LLVM's idea of the CPU; read the ratios"
)
ADVISED = 19  # release from which on cycles agree with docs/aarch64.md; 14 is up to 60 % off
_BRANCHES = {
    codegen.AARCH64: re.compile(r"(b|b\.\w+|cbn?z|tbn?z|ret|bl)\b"),
    codegen.X86_64: re.compile(r"(j\w+|retq?|callq?)\b"),
}

# reference counts: LLVM's models of Neoverse lack atomic instructions
_ATOMICS = re.compile(r"(?:ld|st)(?:add|clr|set)\w*\s|(?:swp|cas)\w*\s")


def bits_of(cpu: str) -> int:
    """Bits of an AArch64 CPU's own vectors."""
    return target.SCALABLE_BITS.get(cpu, 128)


def lanes_a_cycle(bits: int) -> float:
    """Lanes of 32 bits that all arithmetic pipes of a modelled CPU take in a cycle.

    Two pipes of vectors of `bits` bits, four of 128 on Neoverse V2.
    """
    return max(2 * bits, 512) / 32


def isa_of(cpu: str) -> str | None:
    """The instruction set of the register tiles on an AArch64 CPU.

    None where there is only the portable kernel.
    """
    allowed = [name for name, triple in codegen.TRIPLES.items() if triple == codegen.AARCH64]
    if cpu not in allowed:
        raise ArgumentError(f"cpu: got {cpu!r}; allowed: {', '.join(map(repr, allowed))}")
    found = codegen.code_generator(codegen.Target.named(cpu))
    return next(
        (isa for isa in ("sve", "neon_dot") if not target.missing(isa, codegen=found)), None
    )


class Model:
    """llvm-mca for one CPU: the newest on PATH.

    Parameters
    ----------
    cpu : LLVM's name of it
    triple : of the instructions
    """

    def __init__(self, cpu: str, triple: str = codegen.AARCH64) -> None:
        names = [f"llvm-mca-{release}" for release in range(40, 10, -1)]
        self.tool = next(filter(None, map(shutil.which, [*names, "llvm-mca"])), "")
        if not self.tool:
            raise UnsupportedError(
                "estimate: llvm-mca is not on PATH; allowed: a machine with LLVM's tools (Debian: apt-get "
                f"install llvm, best of release {ADVISED} or later), or --instructions for the emulator's exact "
                "counts alone"
            )
        self.cpu = cpu
        self.triple = triple
        self.version = re.search(r"version (\S+)", self._run("--version"))[1]  # type: ignore[index]

    @property
    def shown(self) -> str:
        """The release, and whether its cycles differ from those of the pages."""
        old = int(self.version.split(".")[0]) < ADVISED
        return (
            f"{self.version} (take {ADVISED} or later: older ones are off)" if old else self.version
        )

    def _run(self, *options: str, text: str = "") -> str:
        done = subprocess.run([self.tool, *options], input=text, capture_output=True, text=True)
        if done.returncode or "not a recognized processor" in done.stderr:  # which it only warns of
            raise UnsupportedError(
                f"estimate: {self.tool} cannot model {self.cpu!r}, a newer LLVM may, if LLVM has a CPU of that name: "
                f"{done.stderr.strip().splitlines()[0]}"
            )
        return done.stdout

    def cycles(self, instructions: Sequence[str], stores_first: bool = False) -> float:
        """Of a straight line of instructions in steady state; branches and reference counts are left out.

        stores_first : every load waits for the stores before it (one of them may have the loaded
            value); otherwise for none
        """
        branch = _BRANCHES[self.triple]
        kept = (x for x in instructions if not branch.match(x) and not _ATOMICS.match(x))
        text = "\n".join(kept) + "\n"
        options = [f"-mtriple={self.triple.partition('-')[0]}", f"-mcpu={self.cpu}"]
        options += ["-noalias=false"] * stores_first
        said = [self._run(*options, f"-iterations={n}", text=text) for n in (2, 4)]
        two, four = (int(re.search(r"Total Cycles:\s+(\d+)", x)[1]) for x in said)  # type: ignore[index]
        return (four - two) / 2
