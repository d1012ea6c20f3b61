"""The ladder: one attention kernel, made faster one decision at a time, each rung checked before it is counted.

`python -m numflash.cuda.study` builds every rung, runs it in the emulator, checks it against float64 and prints the table.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..forward import LOG2E, Launch


@dataclass(frozen=True)
class Rung:
    """A step of the ladder: the factory and its constants, what changed against the rung before, and why."""

    number: str
    name: str
    why: str
    factory: str
    constants: dict[str, Any] = field(default_factory=dict)
    arch: str = "sm_80"
    tolerance: float = 1.0


LADDER = (
    Rung("1", "one thread per row", "The definition with an online softmax; every thread reads every key from global memory.",
         "one_thread_per_row"),
    Rung("2", "tiles in shared memory", "A key is read from global memory once per block of 64 rows, 16 bytes per thread.",
         "shared_tiles"),
    Rung("3", "tensor cores for Q.K^T", "Half of the arithmetic moves to m16n8k16 products; the weights "
         "travel through shared memory.",
         "tensor_cores", {"scores_only": True}),
    Rung("4", "tensor cores for P.V too", "The accumulator of the scores is the operand of P.V: weights stay in registers "
         "(FlashAttention-2). Rows of 128 bytes all start in the same bank, so ldmatrix takes 8 passes.", "tensor_cores"),
    Rung("5a", "padded rows", "16 bytes of padding per row spread the 8 rows of a matrix over the banks.", "tensor_cores",
         {"layout": "padded"}),
    Rung("5b", "swizzled rows", "An XOR of the chunk number with the row does the same without the padding.", "tensor_cores",
         {"layout": "swizzled"}),
    Rung("6", "double buffer", "The next tile comes by cp.async while this one is multiplied: one barrier per tile, no registers "
         "in between.", "tensor_cores", {"layout": "swizzled", "double_buffer": True}),
    Rung("7", "Q in registers", "Q's fragments are loaded once instead of once per tile and key.", "tensor_cores",
         {"layout": "swizzled", "double_buffer": True, "q_in_registers": True}),
    Rung("7h", "float16 scores", "Accumulating the scores in float16 halves their registers and costs accuracy: the reason not to.",
         "tensor_cores", {"layout": "swizzled", "double_buffer": True, "q_in_registers": True, "half_scores": True}, tolerance=8.0),
    Rung("8", "TMA, wgmma, warp specialisation", "One thread feeds two warpgroups whose products read shared memory by themselves "
         "(FlashAttention-3).", "flash_hopper", {"overlap": False}, "sm_90a"),
    Rung("9", "softmax beside the products", "The next tile's Q.K^T is issued before this tile's P.V is waited for.",
         "flash_hopper",
         {"overlap": True}, "sm_90a"),
)


def factory(rung: Rung) -> Callable:
    """The module-level function that builds the rung's kernel."""
    from ..kernels.flash_hopper import flash_hopper
    from . import scalar, tensor_cores
    known: dict[str, Callable] = {"one_thread_per_row": scalar.one_thread_per_row, "shared_tiles": scalar.shared_tiles,
            "tensor_cores": tensor_cores.tensor_cores, "flash_hopper": flash_hopper}
    return known[rung.factory]


def launch(rung: Rung, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> Launch:
    """The launch of a rung on float16 (L, D) arrays, L a multiple of 64 (of 128 from rung 8 on)."""
    length, d = query.shape
    scale = np.float32(LOG2E / np.sqrt(d))
    out = np.zeros_like(query)
    if rung.arch == "sm_90a":
        from ..tensormap import TensorMap
        lse, place = np.zeros(length, np.float32), np.array([0, key.shape[0]], np.int32)
        maps = [TensorMap(x[None, None], (1, 1, 128, 64)) for x in (query, key, value)]
        args: tuple = ((maps, out, lse, place[:1], place[1:]), (0, 0, 2 * d), (length, 2 * d, 1, 0, 0), scale)
        return Launch(factory(rung), {"d": d, "dv": d, "block_k": 128, **rung.constants}, rung.arch, (length // 128, 1, 1), args,
                      lambda: (out, lse))
    args = (query, key, value, out, key.shape[0], scale)
    return Launch(factory(rung), {"d": d, **rung.constants}, rung.arch, (length // 64, 1, 1), args, lambda: (out, np.zeros(0)))


def climb(length: int = 256, d: int = 64, seed: int = 0) -> list[dict[str, Any]]:
    """Run the ladder in the emulator: one row of figures per rung, in order, each checked against float64 first.

    Registers, stack and machine instructions come from the cubin where the binary utilities are installed, else they are None.
    """
    from ...errors import NumflashError, UnsupportedError
    from ..compile import compiled
    from ..forward import emulated
    from ..sass import resources
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((length, d)).astype(np.float16) for _ in range(3))
    scores = q.astype(np.float64) @ k.T.astype(np.float64) / np.sqrt(d)
    p = np.exp(scores - scores.max(1, keepdims=True))
    expected = p / p.sum(1, keepdims=True) @ v.astype(np.float64)
    rows = []
    for rung in LADDER:
        step = launch(rung, q, k, v)
        out, _, report = emulated(step)
        error = float(np.linalg.norm(out - expected) / np.linalg.norm(expected))
        if not error < 1e-3 * rung.tolerance:
            raise NumflashError(f"rung {rung.number}: relative error {error:.2e} against float64")
        cubin = compiled(step.factory, step.arch, "cubin", **step.constants)
        try:
            made = resources(cubin.code)
            machine: dict[str, Any] = {"registers": made.registers, "stack": made.stack,
                                       "machine_instructions": sum(made.opcodes.values())}
        except UnsupportedError:
            machine = dict.fromkeys(("registers", "stack", "machine_instructions"))
        rows.append({"rung": rung.number, "name": rung.name, "why": rung.why, "error": error, **machine,
                     "shared_bytes": cubin.shared_bytes, "warp_instructions": sum(report.instructions.values()),
                     "instructions": report.instructions, "tensor_operations": report.tensor_operations,
                     "global_bytes": report.global_loaded + report.global_stored, "shared_bytes_read": report.shared_loaded,
                     "shared_wavefronts": report.shared_wavefronts, "shared_conflicts": report.shared_conflicts})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The figures as Markdown. Counts are the emulator's; no time is shown, because none was measured."""
    columns = {"rung": "rung", "name": "what changed", "registers": "registers", "stack": "stack B", "shared_bytes": "shared B",
               "warp_instructions": "warp instr.", "tensor_operations": "tensor op.", "global_bytes": "global B",
               "shared_bytes_read": "shared B read", "shared_wavefronts": "wavefronts", "shared_conflicts": "of them conflicts"}
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join("-" if row[c] is None else str(row[c]) for c in columns) + " |" for row in rows]
    return "\n".join(lines)
