"""The passes over gradients that sm_90a's own kernel computes: which problems, and their launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..tiling import CUDA_NARROW, CUDA_WIDE, gradient_tiling
from ..tiling import padded as smallest
from ..validation import Problem
from .device.arrangement import Arrangement, band_costs
from .device.operands import (
    KEPT_IN_L2,
    LOG2E,
    Launch,
    band,
    key_places,
    mappable,
    scores_unchanged,
)
from .instructions.tensormap import TensorMap
from .kernels.backward_hopper import backward_hopper
from .kernels.backward_hopper_tiles import ROWS
from .kernels.hopper import PANEL

Arrays = tuple[np.ndarray, ...]
ShapeOf = Callable[[str, str, int], dict[str, int]]


class Pass(NamedTuple):
    """The arrays of a pass: of the side that it owns and of the other one (`kernels.backward`)."""

    own: Arrays
    other: Arrays
    sums: Arrays  # the gradients of the own side; in the pass of the queries dq twice

    @property
    def rows(self) -> int:
        """Of a head of the own side."""
        return int(self.own[0].shape[2])

    @property
    def others(self) -> int:
        """Rows of a head of the other side."""
        return int(self.other[0].shape[2])

    @property
    def heads(self) -> int:
        """Of the own side."""
        return int(self.own[0].shape[1])


def pass_of(gradients: str, operands: Arrays, results: Arrays) -> Pass:
    """A pass: "q" owns queries; "kv", "k" and "v" own keys.

    operands : q, k, v, dO;  results : dq, dk, dv first
    """
    (q, k, v, do), (dq, dk, dv) = operands, results[:3]
    if gradients == "q":
        return Pass((q, do), (k, v), (dq, dq))
    return Pass((k, v), (q, do), (dk, dv))


def takes(problem: Problem, arch: str, *operands: np.ndarray) -> bool:
    """Whether the kernel computes the gradients of a 16-bit problem.

    Its scores have a band and lengths alone, keys and values the same padded head size up to 128, and
    tensor maps describe the operands.
    """
    *_, d, dv = problem.shape
    if arch != "sm_90a" or not scores_unchanged(problem):
        return False
    narrow = d <= CUDA_NARROW
    alike = narrow == (dv <= CUDA_NARROW)
    return 0 not in problem.shape and max(d, dv) <= CUDA_WIDE and alike and mappable(*operands)


def shape_of(gradients: str, dtype: str, d: int) -> dict[str, int]:
    """Constants of a pass, "kv" or "q": its tiling, and whether the own rows fit into registers beside
    its sums.
    """
    t = gradient_tiling(gradients, dtype, d)
    columns, held = t.block_q if gradients == "kv" else t.key_block, gradients == "q"
    return {
        "d": smallest(d, t.head_dims),
        "columns": columns,
        "stages": t.stages,
        "held": held or d <= CUDA_NARROW,
    }


def units_together(problem: Problem, gradients: str, others: int) -> int:
    """How many heads of a pass read rows of the other side that L2 holds together."""
    nb, nh, nkv, _, _, d, dv = problem.shape
    group, heads = nh // nkv, nb * (nkv if gradients == "kv" else nh)
    kept = KEPT_IN_L2 // (2 * others * (d + dv))
    return max(1, min(kept // group if gradients == "kv" else kept * group, heads))


def _order(problem: Problem, gradients: str, row_tiles: int, columns: int) -> Arrangement:
    """The order of the tiles of own rows of a pass with a band: keys see queries as these see them."""
    nb, nh, nkv, length, s, *_ = problem.shape
    diagonal, keys = key_places(problem, s)
    _, left, right = band(problem)
    tile = ROWS, columns
    if gradients == "kv":
        queries = np.full(nb, length)
        each = band_costs((s, 1, row_tiles), queries, -diagonal, (right, left), tile)
        return Arrangement(np.repeat(each, nkv, 0), units_together(problem, "kv", length))
    each = band_costs((length, 1, row_tiles), keys, diagonal, (left, right), tile)
    return Arrangement(np.repeat(each, nh, 0), units_together(problem, "q", s))


def hopper_passes(
    problem: Problem,
    operands: Arrays,
    results: Arrays,
    launch: Callable[..., Launch],
    shape_of: ShapeOf = shape_of,
) -> list[Launch]:
    """The launches of both passes.

    Parameters
    ----------
    operands : q, k, v, dO;  results : dq, dk, dv and the statistics
    launch : (factory, constants, grid, arguments, arrays that are written, further fields) -> Launch
    shape_of : (pass, precision, head size) -> its shape
    """
    nb, nh, nkv, _, s, d, _ = problem.shape
    q, _, v, _ = operands
    stats = results[3]
    has_band, left, right = band(problem)
    places = key_places(problem, s)
    factors = np.float32(problem.scale * LOG2E), np.float32(problem.scale)
    common = {"dtype": problem.precision, "group": nh // nkv, "band": has_band}
    found = []
    for which in ("kv", "q"):
        arrays = pass_of(which, operands, results)
        shape = shape_of(which, problem.precision, d)
        columns = shape["columns"]
        maps = [
            *(TensorMap(x, (1, 1, ROWS, PANEL)) for x in arrays.own),
            *(TensorMap(x, (1, 1, columns, PANEL)) for x in arrays.other),
            TensorMap(stats, (1, 1, 2 * columns), swizzle=0),
        ]
        widths = q.shape[-1], v.shape[-1]
        row_tiles, units = -(-arrays.rows // ROWS), arrays.heads * nb
        order = _order(problem, which, row_tiles, columns) if has_band else np.zeros(1, np.int32)
        args = (
            (maps, *arrays.sums, stats, *places, order),
            tuple(int(n) for x in arrays.sums for n in x.strides[:3]),
            (
                *(
                    arrays.rows,
                    arrays.others,
                    *(2 * n for n in widths),
                    nh,
                    left,
                    right,
                    stats.shape[2] // 2,
                ),
                *(row_tiles, units),
            ),
            factors,
        )
        constants: dict[str, Any] = {"gradients": which, **shape, **common}
        grid = row_tiles * units, 1, 1
        found.append(launch(backward_hopper, constants, grid, args, arrays.sums, persistent=True))
    return found
