"""The ladder: one attention kernel, made faster one decision at a time, each rung checked before it
is counted.

`python -m numflash.cuda.study` builds every rung, runs it in the emulator, checks it against
float64 and prints the table; where there is a card it times them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...errors import DriverError, NumflashError, UnsupportedError
from ..device.operands import LOG2E, Launch


@dataclass(frozen=True)
class Rung:
    """A step of the ladder.

    The factory and its constants, what changed against the rung before, and why. `arch` is the
    oldest architecture that has its instructions; wgmma is Hopper's alone (`runs_on`).
    """

    number: str
    name: str
    why: str
    factory: str
    constants: dict[str, Any] = field(default_factory=dict)
    arch: str = "sm_80"
    tolerance: float = 1.0

    def runs_on(self, arch: str) -> bool:
        """Whether the rung can be built for an architecture."""
        return self.arch in ("sm_75", arch) or (self.arch == "sm_80" and arch != "sm_75")


LADDER = (
    Rung(
        "1",
        "one thread per row",
        "The definition with an online softmax; every thread reads every key from global memory.",
        "one_thread_per_row",
        arch="sm_75",
    ),
    Rung(
        "2",
        "tiles in shared memory",
        "A key is read from global memory once per block of 64 rows, 16 bytes per thread.",
        "shared_tiles",
        arch="sm_75",
    ),
    Rung(
        "3",
        "tensor cores for Q.K^T",
        "Half of the arithmetic moves to m16n8k16 products; the weights "
        "travel through shared memory.",
        "scores_only",
        arch="sm_75",
    ),
    Rung(
        "4",
        "tensor cores for P.V too",
        "The accumulator of the scores is the operand of P.V: weights stay in registers "
        "(FlashAttention-2). Rows of 128 bytes all start in the same bank, so ldmatrix takes 8 passes.",
        "both_products",
        arch="sm_75",
    ),
    Rung(
        "5a",
        "padded rows",
        "16 bytes of padding per row spread the 8 rows of a matrix over the banks.",
        "both_products",
        {"layout": "padded"},
        arch="sm_75",
    ),
    Rung(
        "5b",
        "swizzled rows",
        "An XOR of the chunk number with the row does the same without the padding.",
        "both_products",
        {"layout": "swizzled"},
        arch="sm_75",
    ),
    Rung(
        "6",
        "double buffer",
        "The next tile comes by cp.async while this one is multiplied: one barrier per tile, no registers "
        "in between.",
        "double_buffer",
    ),
    Rung(
        "7a",
        "Q in registers",
        "Q's fragments are loaded once instead of once per tile and key.",
        "register_blocks",
        arch="sm_75",
    ),
    Rung(
        "7b",
        "32 rows per warp",
        "Each fragment of K and V serves four products instead of two, and a block needs half as many "
        "tiles for its rows; it costs registers.",
        "register_blocks",
        {"row_tiles": 2},
        arch="sm_75",
    ),
    Rung(
        "7h",
        "float16 scores",
        "Beside 7a: scores accumulated in float16 take half the registers until they are widened for the "
        "softmax, which saves next to none in all, and cost accuracy: the reason not to.",
        "register_blocks",
        {"half_scores": True},
        tolerance=8.0,
    ),
    Rung(
        "7s",
        "warps that bring, compute or store",
        "Beside 7a: four warps compute, three bring tiles of Q, K and V, one stores. No copy stands in the loop "
        "of the products, but without setmaxnreg all eight have the registers that four need.",
        "specialised",
        arch="sm_80",
    ),
    Rung(
        "8",
        "TMA, wgmma, warp specialisation",
        "One thread feeds two warpgroups whose products read shared memory by themselves "
        "(FlashAttention-3).",
        "flash_hopper",
        {"overlap": False},
        "sm_90a",
    ),
    Rung(
        "9a",
        "softmax beside the products",
        "The next tile's Q.K^T is issued before this tile's P.V is waited for.",
        "flash_hopper",
        {"overlap": True},
        "sm_90a",
    ),
    Rung(
        "9b",
        "ping-pong",
        "Two named barriers make the warpgroups issue products in turns: one's softmax runs beside the other's "
        "products.",
        "flash_hopper",
        {"overlap": True, "ping_pong": True},
        "sm_90a",
    ),
)


def factory(rung: Rung) -> Callable:
    """The module-level function that builds the rung's kernel."""
    from ..kernels import flash_hopper
    from . import scalar, specialised, tensor_cores

    places = (scalar, tensor_cores, specialised, flash_hopper)
    return next(getattr(x, rung.factory) for x in places if hasattr(x, rung.factory))


def launch(
    rung: Rung, query: np.ndarray, key: np.ndarray, value: np.ndarray, arch: str | None = None
) -> Launch:
    """The launch of a rung on float16 (L, D) arrays, L a multiple of 128.

    `arch`: one of those that the rung runs on; None: sm_90a for rungs 8 and 9, else sm_80.
    """
    if rung.factory == "flash_hopper":
        return _hopper_launch(rung, query, key, value)
    arch = arch or "sm_80"
    if rung.factory == "specialised":
        from .specialised import launch as specialised_launch

        step = specialised_launch(query[None], key[None], value[None], arch=arch)
        return replace(step, finish=lambda: (step.finish()[0][0], np.zeros(0)))
    length, d = query.shape
    out = np.zeros_like(query)
    args = (query, key, value, out, key.shape[0], np.float32(LOG2E / np.sqrt(d)))
    rows = 64 * rung.constants.get("row_tiles", 1)
    constants = {"d": d, **rung.constants}
    if arch == "sm_75" and rung.number >= "3":  # its products and copies are other instructions
        constants["turing"] = True
    return Launch(
        factory(rung),
        constants,
        arch,
        (length // rows, 1, 1),
        args,
        lambda: (out, np.zeros(0)),
    )


def _hopper_launch(rung: Rung, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> Launch:
    """Rungs 8 and 9: the shipped kernel, with its tensor maps."""
    from ..instructions.tensormap import TensorMap

    length, d = query.shape
    out, lse = np.zeros_like(query), np.zeros(length, np.float32)
    place = np.array([0, key.shape[0]], np.int32)
    maps = [
        TensorMap(query[None, None, :, None], (1, 1, 128, 1, 64)),
        *(TensorMap(x[None, None], (1, 1, 128, 64)) for x in (key, value)),
    ]
    args: tuple = (
        (maps, out, lse, place[:1], place[1:], *[place] * 4),
        (0, 0, 2 * d, 0, 0, 0, 0),
        (length, 2 * d, 1, 0, 0, length // 128, 1, 1),
        (np.float32(LOG2E / np.sqrt(d)), np.float32(0), np.float32(0)),  # no soft cap
    )
    return Launch(
        factory(rung),
        {"d": d, "dv": d, "block_k": 128, **rung.constants},
        rung.arch,
        (length // 128, 1, 1),
        args,
        lambda: (out, lse),
    )


def problem(length: int, d: int, seed: int, keys: int | None = None) -> tuple[np.ndarray, ...]:
    """Standard normal q, k, v in float16, and the float64 result; as many keys as rows unless given."""
    rng = np.random.default_rng(seed)
    counts = (length, keys or length, keys or length)
    q, k, v = (rng.standard_normal((n, d)).astype(np.float16) for n in counts)
    wide_k, wide_v = k.astype(np.float64), v.astype(np.float64)
    found = []
    for start in range(0, length, 1024):  # scores of all rows at once would take gigabytes
        scores = q[start : start + 1024].astype(np.float64) @ wide_k.T / np.sqrt(d)
        p = np.exp(scores - scores.max(1, keepdims=True))
        found.append(p / p.sum(1, keepdims=True) @ wide_v)
    return q, k, v, np.concatenate(found)


def validated(rung: Rung, out: np.ndarray, expected: np.ndarray) -> float:
    """The relative error against float64; a rung that is wrong is neither counted nor timed."""
    error = float(np.linalg.norm(out - expected) / np.linalg.norm(expected))
    if not error < 1e-3 * rung.tolerance:
        raise NumflashError(f"rung {rung.number}: relative error {error:.2e} against float64")
    return error


def climb(
    length: int = 256,
    d: int = 64,
    seed: int = 0,
    rungs: Sequence[str] | None = None,
    arch: str | None = None,
) -> list[dict[str, Any]]:
    """Run the ladder, or some of its rungs, in the emulator.

    A row of figures per rung, in order, checked against float64 first.

    `arch`: build them for this architecture, and leave out those that it cannot run: rungs 8 and 9
    are Hopper's; 6 and 7s copy by cp.async and 7h adds up float16, for which they need sm_80.

    Registers, stack, spills and machine instructions come from the cubin where the binary utilities
    are installed, else None. Global memory is counted in the 32-byte sectors that each warp's
    access touches, before any cache.
    """
    from ..compile import compiled
    from ..compile.sass import resources
    from ..device.operands import emulated

    q, k, v, expected = problem(length, d, seed)
    rows = []
    for rung in LADDER:
        if rungs is not None and rung.number not in rungs:
            continue
        if arch is not None and not rung.runs_on(arch):
            continue
        step = launch(rung, q, k, v, arch)
        out, _, report = emulated(step)
        error = validated(rung, out, expected)
        cubin = compiled(step.factory, step.arch, "cubin", **step.constants)
        try:
            made = resources(cubin.code)
            machine: dict[str, Any] = {
                "registers": made.registers,
                "stack": made.stack,
                "spills": made.count("LDL") + made.count("STL"),
                "machine_instructions": sum(made.opcodes.values()),
            }
        except UnsupportedError:
            machine = dict.fromkeys(("registers", "stack", "spills", "machine_instructions"))
        rows.append(
            {
                "rung": rung.number,
                "name": rung.name,
                "why": rung.why,
                "error": error,
                **machine,
                "shared_bytes": cubin.shared_bytes,
                "warp_instructions": sum(report.instructions.values()),
                "instructions": report.instructions,
                "tensor_operations": report.tensor_operations,
                "tensor_flops": report.tensor_flops,
                "barriers": report.barriers,
                "global_moved": 32 * (report.global_load_sectors + report.global_store_sectors),
                "shared_bytes_read": report.shared_loaded,
                "shared_wavefronts": report.shared_wavefronts,
                "shared_conflicts": report.shared_conflicts,
            }
        )
    return rows


def clock_rung(rung: Rung, given: tuple[np.ndarray, ...]) -> tuple[float, float | None]:
    """Median seconds of a rung on this machine's card, and with keys and values kept in L2.

    given : of `problem`; the rung is validated before it is timed

    The second figure requests the L2 window that the L4 analysis (docs/sources.md) names
    (`Device.prepared`), on a stream of its own; None where the card or its driver refuses it.
    Raises UnsupportedError where there is no card.
    """
    from ..device import current_device, median_seconds

    device = current_device()
    q, k, v, expected = given
    step = launch(rung, q, k, v, device.arch)
    plain = device.prepared(step, lambda work: median_seconds(device, work))
    validated(rung, step.finish()[0], expected)
    with device.stream() as stream:
        try:
            return plain, device.prepared(
                step,
                lambda work: median_seconds(device, work, stream=stream),
                persist=(k, v),
                stream=stream,
            )
        except DriverError:  # no part of L2 can be set aside, as on a part of a divided card
            return plain, None


def clock(length: int = 4096, d: int = 64, seed: int = 0) -> dict[str, tuple[float, float]]:
    """{rung: `clock_rung`, NaN for None} of those that this machine's card can run."""
    from ..device import current_device

    arch, given = current_device().arch, problem(length, d, seed)
    found = {}
    for rung in LADDER:
        if rung.runs_on(arch):
            plain, kept = clock_rung(rung, given)
            found[rung.number] = plain, float("nan") if kept is None else kept
    return found


MIX = {
    "tensor": ("tensor",),
    "float": ("float",),
    "exp2, 1/x": ("special",),
    "memory, copies": ("memory", "asynchronous"),
    "integer, moves": ("integer", "move", "conversion", "shuffle"),
    "control": ("control",),
}


def table(rows: list[dict[str, Any]], seconds: dict[str, tuple[float, float]] | None = None) -> str:
    """The figures as two Markdown tables: resources and bytes, then the instruction mix.

    Counts are the emulator's.

    Times are shown where a card measured them (`clock`).
    """
    columns = {
        "rung": "rung",
        "name": "what changed",
        "registers": "registers",
        "stack": "stack B",
        "spills": "spills",
        "shared_bytes": "shared B",
        "global_moved": "global B moved",
        "shared_bytes_read": "shared B read",
        "shared_wavefronts": "wavefronts",
        "shared_conflicts": "of them conflicts",
    }
    first = [["-" if row[c] is None else str(row[c]) for c in columns] for row in rows]
    heads = [*columns.values()]
    if seconds is not None:
        heads += ["us", "us with K, V in L2"]
        times = {rung: [f"{1e6 * t:.1f}" for t in pair] for rung, pair in seconds.items()}
        first = [line + times.get(line[0], ["-", "-"]) for line in first]
    second = [
        [
            row["rung"],
            str(row["warp_instructions"]),
            str(row["tensor_operations"]),
            *(
                f"{100 * sum(row['instructions'].get(x, 0) for x in group) / row['warp_instructions']:.1f} %"
                for group in MIX.values()
            ),
        ]
        for row in rows
    ]
    return (
        _markdown(heads, first)
        + "\n\n"
        + _markdown(["rung", "warp instr.", "tensor op.", *MIX], second)
    )


def _markdown(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join(
        "| " + " | ".join(line) + " |" for line in (heads, ["---"] * len(heads), *rows)
    )
