"""Few query rows over many keys on a card: several blocks share the keys of a tile of rows.

One query of 8 heads over 32,768 keys is 8 tiles of rows, one block each; a card has over a hundred
multiprocessors, and a block reads a hundredth of what memory delivers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..tiling import (
    CUDA_PARTS,
    CUDA_RESIDENT,
    CUDA_TILES_TO_SPLIT,
    Tiling,
    split_count,
)
from ..validation import Problem
from .device.operands import (
    MMA_ROWS,
    Launch,
    Parts,
    band,
    key_places,
    mappable,
    packed_heads,
    padded,
    resident_ids,
    rows_per_block,
)
from .launch_float import float_forward, float_tiling, hopper_forward, hopper_tiling

__all__ = ["forward", "parts_of"]
Empty = Callable[[tuple[int, ...], str], np.ndarray]
Results = tuple[np.ndarray, np.ndarray]


def _on_hopper(problem: Problem, arch: str) -> bool:
    """Whether the rows fill tiles of the kernel for sm_90a, and tensor maps describe the arrays."""
    _, nh, nkv, length, *_ = problem.shape
    many = length * (nh // nkv) > MMA_ROWS
    return arch == "sm_90a" and many and mappable(problem.query, problem.key, problem.value)


def _tiles_of_rows(problem: Problem, arch: str) -> tuple[int, Tiling]:
    """How many tiles of rows there are, and the sizes of one."""
    nb, nh, nkv, length, *_ = problem.shape
    if _on_hopper(problem, arch):
        packed, tiling = packed_heads(nh // nkv), hopper_tiling(problem)
        return -(-length * packed // tiling.block_q) * (nh // packed) * nb, tiling
    tiling = float_tiling(problem, arch)
    rows = length * (nh // nkv)
    return -(-rows // rows_per_block(tiling, rows)) * nkv * nb, tiling


def parts_of(problem: Problem, arch: str, multiprocessors: int) -> int:
    """In how many parts the keys of each tile of rows are attended to: 1 where tiles of rows keep
    the card busy.

    A block of the kernel for sm_90a takes a whole multiprocessor, and computes while it loads: only
    where half of the card has nothing to do are its keys split.
    """
    if problem.precision not in ("float16", "bfloat16"):
        return 1
    row_tiles, tiling = _tiles_of_rows(problem, arch)
    resident, busy = CUDA_RESIDENT, multiprocessors
    if _on_hopper(problem, arch):
        resident, busy = 1, multiprocessors // 2 + 1
    key_tiles = -(-_seen(problem) // tiling.key_block)
    if row_tiles >= busy or key_tiles < CUDA_TILES_TO_SPLIT:
        return 1
    return split_count(row_tiles, min(key_tiles // 2, CUDA_PARTS), resident * multiprocessors)


def _seen(problem: Problem) -> int:
    """The most keys that the rows of a head see together."""
    _, left, right = band(problem)
    _, _, _, length, s, *_ = problem.shape
    diagonal, keys = (x.astype(np.int64) for x in key_places(problem, s))
    end = np.minimum(keys, diagonal + length + right)
    return int(np.max(end - np.maximum(diagonal - left, 0), initial=0))


def _memory(problem: Problem, number: int, empty: Empty) -> Parts:
    nb, nh, _, length, _, _, dv = problem.shape
    rows = nb, nh, length, number
    memory = empty((math.prod(rows) * (dv + 1),), "float32")
    out, lse = np.split(memory, [math.prod(rows) * dv])
    return Parts(number, out.reshape(*rows, dv), lse.reshape(rows))


def _merge(problem: Problem, arch: str, parts: Parts, results: Results) -> Launch:
    from .kernels.key_parts import merge_parts

    nb, nh, _, length, _, _, dv = problem.shape
    out, lse = results
    return Launch(
        merge_parts,
        {
            "dv": padded(dv),
            "dtype": problem.precision,
            **({"turing": True} if arch == "sm_75" else {}),
        },
        arch,
        (length, nh, nb),
        ((parts.out, parts.lse, out, lse), out.strides[:3], (nh, length, parts.number, dv)),
        lambda: results,
        resident_ids(results, parts.out, parts.lse, out, lse),
        written=results,
    )


def forward(
    problem: Problem, arch: str, number: int, results: Results, empty: Empty
) -> list[Launch]:
    """The launches that solve a float16 or bfloat16 problem on the card, its keys in `number` parts.

    results, empty : out and lse; what makes memory on the card of a shape and dtype
    """
    parts = _memory(problem, number, empty)
    if _on_hopper(problem, arch):
        attend = hopper_forward(problem, results=results, parts=parts)
    else:
        attend = float_forward(problem, arch, results, parts)
    return [attend, _merge(problem, arch, parts, results)]
