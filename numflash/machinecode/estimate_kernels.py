"""Cycles of whole kernels per score, by llvm-mca: what `numflash validate` sets measured times beside.

Of attention and the gradient a key block's parts in one line after the other: what a kernel does
between its blocks is not in them. Waiting for memory is in none. The figures are kept in
`measure/data/modelled_cycles.json`, since the machines they are for rarely have llvm-mca;
`tools/modelled_cycles.py` writes it.
"""

from __future__ import annotations

from . import estimate, estimate_decode, estimate_floats
from .model import Model, bits_of, isa_of

CPUS = ("a64fx", "neoverse-v1", "neoverse-v2", "neoverse-n1")
HEAD_DIMS = (64, 128)
CACHES = {"decoding, INT8 cache": "int8", "decoding, float32 cache": "float32"}
GRADIENT = {"score": 2, "softmax": 1, "value": 3}  # S and dP; the weights; dV, dK and dQ


def cycles_per_score(cpu: str) -> dict[str, dict[str, float]]:
    """{kernel: {head_dim: cycles per score}} of an AArch64 CPU at its own vector length.

    Decoding with four query rows of a KV head.
    """
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
    for name, dtype in CACHES.items():
        each = estimate_decode.cycles_per_score(model, dtype, HEAD_DIMS[-1])
        found[name] = {str(HEAD_DIMS[-1]): round(each, 3)}
    return found
