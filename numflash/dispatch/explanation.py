"""What a problem will cost before it runs.

Its tiling, bytes in each cache, operations, and the hardware limit (roofline) that bounds it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral, Number
from typing import Any

import numpy as np

from .. import validation
from ..errors import ArgumentError
from ..interop.arguments import choice, emulated_arch, refuse_unknown
from ..jit import target
from ..jit.system import scalable_bits
from ..tiling import Caches, Tiling, cuda_tiling, in_use
from ..validation import Problem
from ..validation.options import IMPLS, NAMES, Options

LARGEST_SIZE = 1 << 31
LARGEST_BATCH = 1 << 20
WEIGHTS = {  # of the second product, by pv
    "int8": "8 bits, exact integers",
    "int16": "15 bits in two bytes, exact integers",
    "bf16": "bfloat16, as the values are; float32 sums, whose last digits depend on the CPU",
    "fp32": "float32, as the values are; float32 sums, whose last digits depend on the CPU",
}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True)
class Explanation:
    """Everything is counted, nothing measured.

    Attributes
    ----------
    shape : B, H, Hkv, L, S, D, Dv
    precision : "int8", "float32", "bfloat16" or "float16": what the problem is computed in
    pv : what the second product of precision "int8" multiplies
    isa, tiling : what the kernels use
    caches : sizes in bytes of the caches that the working set is compared with; on CUDA the shared
        memory of a block
    visible : share of the score matrix that is computed
    operations : multiplications and additions of the two products over the visible part
    traffic : bytes of query, key, value and output, each moved once
    intensity : operations per byte
    scores_bytes : what an unfused implementation would store for its score matrix (float32)
    """

    shape: tuple[int, ...]
    precision: str
    pv: str
    isa: str
    tiling: Tiling
    caches: Caches
    visible: float
    operations: int
    traffic: int
    scores_bytes: int

    @property
    def intensity(self) -> float:
        """Operations per byte of main memory."""
        return self.operations / max(1, self.traffic)

    def roof(self, peak: float, bandwidth: float) -> tuple[float, str]:
        """Attainable operations per second below a peak (op/s) and a memory bandwidth (B/s), and
        which of the two limits.
        """
        memory = self.intensity * bandwidth
        return (peak, "compute") if peak <= memory else (memory, "memory")

    def as_dict(self) -> dict[str, Any]:
        """The same as a dictionary, for --json."""
        d = self.shape[5]
        dv = self.shape[6]
        names = ("batch", "heads", "kv_heads", "length", "keys", "head_dim", "value_dim")
        return {
            "shape": dict(zip(names, self.shape, strict=True)),
            "precision": self.precision,
            "pv": self.pv if self.precision == "int8" else None,
            "isa": self.isa,
            "tiling": self.tiling.name,
            "block_q": self.tiling.block_q,
            "key_block": self.tiling.key_block,
            "register_tile": [self.tiling.mr, self.tiling.nv, self.tiling.lanes],
            "working_set": self.tiling.working_set(d, dv),
            "caches": dict(self.caches.levels()),
            "visible": self.visible,
            "operations": self.operations,
            "traffic": self.traffic,
            "intensity": self.intensity,
            "scores_bytes": self.scores_bytes,
        }

    def __str__(self) -> str:
        b, h, hkv, length, s, d, dv = self.shape
        weights = f"  weights (pv={self.pv!r}): {WEIGHTS[self.pv]}"
        return "\n".join(
            (
                f"attention, precision {self.precision}: batch {b}, heads {h} ({hkv} of keys), {length} queries x {s} keys, "
                f"head_dim {d}{'' if d == dv else f', values {dv}'}",
                self.tiling.explain(d, dv, self.caches),
                *((weights,) if self.precision == "int8" else ()),
                f"  operations: 2 products x 2 x {length} x {s} x {(d + dv) / 2:g} "
                f"x {b * h} heads x {100 * self.visible:.4g} % visible"
                f" = {self.operations / 1e9:.4g} G",
                f"  memory: {self.traffic / 2**20:.4g} MiB for query, key, value and output; the scores would take "
                f"{self.scores_bytes / 2**20:.4g} MiB and are never stored",
                f"  intensity: {self.intensity:.4g} operations per byte",
            )
        )


def visible_share(problem: Problem) -> float:
    """Share of the (B, H, L, S) scores inside the window and the key lengths.

    Masks are not looked into.
    """
    b, _, _, length, s, _, _ = problem.shape
    if not b * length * s:
        return 0.0

    def ramp(n: int) -> int:
        """1 + 2 + ... + n."""
        return n * (n + 1) // 2 if n > 0 else 0

    def up_to(last: int, keys: int) -> int:
        """Pairs of a row i and one of `keys` keys j with j - i <= last, counted without a list of
        the rows.
        """
        return sum(
            sign * (ramp(length + last - over) - ramp(last - over))
            for sign, over in ((1, 0), (-1, keys))
        )

    seen = 0
    for diagonal, keys in zip(problem.diagonal.tolist(), problem.key_lengths.tolist(), strict=True):
        seen += length * keys if problem.right is None else up_to(diagonal + problem.right, keys)
        seen -= 0 if problem.left is None else up_to(diagonal - problem.left - 1, keys)
    return seen / (b * length * s)


def shaped(name: str, shape: Any) -> np.ndarray:
    """Zeros of a shape, that take no memory."""
    sizes = all(
        isinstance(n, Integral) and not isinstance(n, bool) and 0 <= int(n) <= LARGEST_SIZE
        for n in shape
    )
    if not sizes or (len(shape) == 4 and shape[0] > LARGEST_BATCH):
        raise ArgumentError(
            f"{name}: got {shape!r}; allowed: a shape of integers, 0 to {LARGEST_SIZE}, a batch to {LARGEST_BATCH}"
        )
    try:
        return np.broadcast_to(np.float32(0), shape)
    except ValueError as error:
        raise ArgumentError(
            f"{name}: got {shape!r} ({error}); allowed: what NumPy can number"
        ) from None


def on_card(problem: Problem, arch: str) -> Tiling:
    """The tiling of a card's kernel for a problem that its sizes fit."""
    from ..cuda.launch_float import hopper_tiling
    from ..cuda.launch_int8 import choose

    if problem.precision == "int8":
        return choose(problem, arch).tiling
    if arch == "sm_90a" and problem.precision != "float32":
        return hopper_tiling(problem)
    return cuda_tiling(arch, problem.precision, *problem.shape[5:])


def _is_shape(x: Any) -> bool:
    """Whether x is a shape, or a list of one's numbers and not of an array's rows."""
    return isinstance(x, tuple) or (isinstance(x, list) and all(isinstance(n, Number) for n in x))


def on_this_cpu(problem: Problem, isa: str | None = None) -> tuple[str, Tiling]:
    """The instruction set that serves a problem on this CPU, and the tiling its next call takes.

    isa : None for the best one
    """
    from ..cpu.launch_float import isa_of, operand_kind

    if problem.precision != "int8":
        isa = isa_of(problem, isa)
        return isa, in_use(isa, operand_kind(isa))
    isa = target.require(isa)
    tiling = in_use(isa)
    if isa == "sve":  # the named tiling has the lanes of 512 bits, the most that the kernel fills
        tiling = replace(tiling, lanes=min(tiling.lanes, scalable_bits() // 32))
    return isa, tiling


def explain_problem(
    query: Any, key: Any = None, value: Any = None, *, impl: str = "auto", **options: Any
) -> Explanation:
    """`numflash.explain`."""
    choice("impl", impl, IMPLS)
    refuse_unknown("explain", options, (*NAMES, "impl"))
    asked = Options(**options)

    def operand(name: str, x: Any) -> Any:
        return shaped(name, x) if _is_shape(x) else x

    query = operand("query", query)
    key = query if key is None else operand("key", key)
    value = key if value is None else operand("value", value)
    operands = validation.import_operands(query, key, value)
    problem = validation.problem_of(operands, asked, convert_operands=False)
    b, h, hkv, length, s, d, dv = problem.shape
    isa = emulated_arch(impl)
    if impl == "cuda" or isa:
        if isa is None:
            from ..cuda.device import current_device

            isa = current_device().arch
        tiling = on_card(problem, isa)
    else:
        isa, tiling = on_this_cpu(problem, "portable" if impl == "portable" else None)
    visible = visible_share(problem)
    size = BYTES[problem.precision]
    return Explanation(
        shape=problem.shape,
        precision=problem.precision,
        pv=problem.pv,
        isa=isa,
        tiling=tiling,
        caches=tiling.caches(isa),
        visible=visible,
        operations=round(2 * b * h * length * s * (d + dv) * visible),
        scores_bytes=4 * b * h * length * s,
        traffic=size * (b * h * length * d + b * hkv * s * (d + dv)) + 4 * b * h * length * dv,
    )
