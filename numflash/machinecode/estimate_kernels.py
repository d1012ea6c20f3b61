"""Cycles of whole kernels per score, by llvm-mca: what `numflash validate` sets measured times beside.

A key block's parts in one line after the other: what a kernel does between its blocks, and waiting
for memory, is not in them. `measure/data/modelled_cycles.json` holds the figures, since the machines
they are for rarely have llvm-mca; `tools/modelled_cycles.py` writes it.
"""

from __future__ import annotations

from . import estimate, estimate_floats
from .model import Model, bits_of, isa_of

CPUS = ("a64fx", "neoverse-v1", "neoverse-v2", "neoverse-n1")
HEAD_DIMS = (64, 128)
GRADIENT = {"score": 2, "softmax": 1, "value": 3}  # S and dP; the weights; dV, dK and dQ


def cycles_per_score(cpu: str) -> dict[str, dict[str, float]]:
    """{kernel: {head_dim: cycles per score}} of an AArch64 CPU at its own vector length."""
    model, isa, bits = Model(cpu), isa_of(cpu), bits_of(cpu)
    found: dict[str, dict[str, float]] = {}
    for d in HEAD_DIMS:
        parts = {
            "INT8 attention": (
                estimate.tile_parts(isa, cpu, bits, d) if isa else {},
                {"scores": 1, "softmax": 1, "values": 1},
                estimate.ROWS,
            ),
            "float32 attention": (
                estimate_floats.block_parts(cpu, bits, d),
                {"score": 1, "softmax": 1, "value": 1},
                estimate_floats.ROWS,
            ),
        }
        parts["float32 gradient"] = (parts["float32 attention"][0], GRADIENT, estimate_floats.ROWS)
        for kernel, (runs, times, rows) in parts.items():
            cycles = {name: model.cycles(run.trace(*args)) for name, (run, args) in runs.items()}
            scores = rows * estimate.KEY_BLOCK
            total = sum(n * cycles[name] for name, n in times.items())
            found.setdefault(kernel, {})[str(d)] = round(total / scores, 3)
    return found
