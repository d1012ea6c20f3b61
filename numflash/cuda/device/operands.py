"""A planned kernel launch, and how operands are described to it.

Padded rows, strides, the band of visible keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...errors import UnsupportedError
from ...numerics import fixedpoint as fx
from ...tiling import CUDA_HEAD_DIMS, Tiling
from ...tiling import padded as smallest
from ...validation import Problem

NO_LIMIT = 1 << 29
MOST_BLOCKS = (1 << 31) - 1, 65535, 65535  # along the axes of a grid
EMULATED_BLOCKS = 4  # persistent ones, as if there were so many multiprocessors
KEPT_IN_L2 = 32 << 20  # bytes of a Hopper card's 50 MB
LARGEST_CAP = 1e4  # of float kernels; with INT8 all devices have the same limit
MMA_ROWS = 64  # so few rows fill no tile of the Hopper kernels: mma.sync has smaller ones
LOG2E = float(fx.LOG2E)

Results = tuple[np.ndarray, np.ndarray] | None


class Parts(NamedTuple):
    """What parts of the keys leave, on the card (`kernels.key_parts`)."""

    number: int
    out: np.ndarray  # (B, H, L, number, Dv) float32
    lse: np.ndarray  # (B, H, L, number) float32


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    `args` holds tuples of arrays, which are passed as addresses, and of numbers. A function among
    them makes an array for a number of persistent blocks.
    """

    factory: Callable
    constants: dict[str, Any]
    arch: str
    grid: tuple[int, int, int]
    args: tuple
    finish: Callable[[], Any]  # the results, once the kernel has run
    resident: frozenset[int] = frozenset()  # ids of the arrays that are on the card already
    persistent: bool = False  # any number of blocks shares the work; more than fit only wait
    cluster: int = 1  # blocks that run together; they divide the grid
    # the arrays that come back to the host; None: every writeable one
    written: tuple[np.ndarray, ...] | None = None

    def flat(self, most: int) -> list[Any]:
        """The arguments in order: arrays, lists of tensor maps, numbers. `most` as for `blocks`."""
        groups = (x if isinstance(x, tuple) else (x,) for x in self.arguments(most))
        return [x for group in groups for x in group]

    def arguments(self, most: int) -> list[Any]:
        """The arguments as the kernel groups them. `most` as for `blocks`."""
        blocks = self.blocks(most)[0]

        def made(x: Any) -> Any:
            return x(blocks) if callable(x) else x

        return [tuple(map(made, x)) if isinstance(x, tuple) else made(x) for x in self.args]

    def blocks(self, most: int) -> tuple[int, int, int]:
        """The grid, for a card that holds `most` persistent blocks at once.

        More batch entries than its last axis takes go along the first one (`make_find_block`).
        """
        if self.persistent:
            clusters = max(1, most // self.cluster)
            return min(self.grid[0], clusters * self.cluster), 1, 1
        tiles, heads, batch = self.grid
        grid = (tiles, heads, batch) if batch <= MOST_BLOCKS[2] else (tiles * batch, heads, 1)
        if any(n > limit for n, limit in zip(grid, MOST_BLOCKS, strict=True)):
            raise UnsupportedError(
                f"query, key: {tiles} tiles of rows, {heads} heads and {batch} batch entries; allowed on a card: "
                f"{MOST_BLOCKS[1]} heads, and a product of the others up to {MOST_BLOCKS[0]}"
            )
        return grid


def folding(batch: int) -> dict[str, bool]:
    """The constant of a kernel whose grid has more batch entries than its last axis takes."""
    return {"folded": True} if batch > MOST_BLOCKS[2] else {}


def padded(d: int) -> int:
    """The smallest head size that a kernel is built for and that holds d."""
    return smallest(d, CUDA_HEAD_DIMS)


def padded_rows(x: np.ndarray, multiple: int = 8) -> np.ndarray:
    """Contiguous at a multiple of 16 bytes, with rows of such multiples: the last axis is padded
    where it is not.
    """
    d = x.shape[-1]
    if d % multiple:
        wide = np.zeros((*x.shape[:-1], -(-d // multiple) * multiple), x.dtype)
        wide[..., :d] = x
        return wide
    x = np.ascontiguousarray(x)
    return x.copy() if x.ctypes.data % 16 else x


def band(problem: Problem) -> tuple[bool, int, int]:
    """Whether rows see only a band of keys, and its two sides."""
    left = problem.left
    right = problem.right
    return (
        left is not None or right is not None,
        NO_LIMIT if left is None else min(left, NO_LIMIT),
        NO_LIMIT if right is None else min(right, NO_LIMIT),
    )


def refuse_bfloat16(problem: Problem, arch: str) -> None:
    """Raise UnsupportedError for bfloat16 where the tensor cores have float16 only."""
    if problem.precision == "bfloat16" and arch == "sm_75":
        raise UnsupportedError("precision: got 'bfloat16'; sm_75 has float16 tensor cores only")


def float_cap(problem: Problem) -> float:
    """The softcap, which float kernels take up to LARGEST_CAP: their tanh is off by about 1e-7 of it.

    Raises UnsupportedError beyond.
    """
    if problem.softcap > LARGEST_CAP:
        raise UnsupportedError(
            f"softcap: got {problem.softcap:g} on a card; allowed there: 0 to {LARGEST_CAP:g}, beyond which its tanh is "
            "inexact; impl 'cpu' takes any"
        )
    return problem.softcap


def scores_unchanged(problem: Problem) -> bool:
    """Whether no option changes the scores or hides single ones: a band, lengths and sinks do not."""
    options = (problem.mask, problem.bias, problem.alibi_slopes, problem.functions)
    return not problem.softcap and all(x is None for x in options)


def option_constants(problem: Problem) -> dict[str, bool]:
    """Which changes of scores a kernel is compiled with."""
    return {
        "mask": problem.mask is not None,
        "bias": problem.bias is not None,
        "softcap": bool(problem.softcap),
        "alibi": problem.alibi_slopes is not None,
    }


def resident_ids(results: tuple | None, *arrays: np.ndarray) -> frozenset[int]:
    """Ids of the arrays on the card: they represent memory that they do not own.

    An array that owns its memory is the host's.
    """
    return (
        frozenset() if results is None else frozenset(id(x) for x in arrays if x.base is not None)
    )


def key_places(problem: Problem, s: int) -> tuple[np.ndarray, np.ndarray]:
    """Diagonal and number of keys of each batch entry, as int32.

    Raises UnsupportedError for sequences so long that sums of positions and sides would leave it.
    """
    length = problem.shape[3]
    if max(length, s) > NO_LIMIT:
        raise UnsupportedError(
            f"query, key: got {length} rows and {s} keys of a head; allowed on a card: {NO_LIMIT}"
        )
    return (
        np.clip(problem.diagonal, -NO_LIMIT, NO_LIMIT).astype(np.int32),
        np.minimum(problem.key_lengths, s).astype(np.int32),
    )


def one_mask(problem: Problem) -> tuple[np.ndarray | None, str]:
    """The mask that a 16-bit kernel reads, and its kind.

    "", "bool" or "float" (a boolean mask then hides by -inf).
    """
    if problem.bias is None:
        return problem.mask, "" if problem.mask is None else "bool"
    return problem.bias if problem.mask is None else np.where(
        problem.mask, problem.bias, np.float32(-np.inf)
    ), "float"


def slopes_of(problem: Problem) -> np.ndarray:
    """Slopes (B x H) as the kernels read them, or one number that nobody reads."""
    if problem.alibi_slopes is None:
        return np.zeros(1, np.float32)
    return np.ascontiguousarray(problem.alibi_slopes, np.float32)


def storage(x: np.ndarray | None, results: tuple | None = None) -> np.ndarray:
    """The memory behind a broadcast view, or one number that nobody reads.

    One element serves every index along an axis of stride 0. On a card without a copy.
    """
    if x is None:
        return np.zeros(1, np.float32)
    part = x[tuple(slice(0, 1) if n == 0 else slice(None) for n in x.strides)]
    return part if results is not None else np.ascontiguousarray(part).view(np.uint8)


def strides_of(x: np.ndarray | None, results: tuple | None = None) -> tuple[int, ...]:
    """Bytes from element to element of `storage`, 0 along the axes where one serves all.

    Zeros without an array.
    """
    if x is None:
        return (0, 0, 0, 0)
    if results is not None:
        return x.strides
    sizes = [1 if n == 0 else size for n, size in zip(x.strides, x.shape, strict=True)]
    return tuple(
        0 if n == 0 else x.itemsize * int(np.prod(sizes[axis + 1 :]))
        for axis, n in enumerate(x.strides)
    )


def steps(*arrays: np.ndarray) -> tuple[int, ...]:
    """Bytes from batch entry to batch entry, head to head and row to row, of each array.

    0 along an axis of one element, whose stride says nothing: copies of rows that do not exist read
    nothing, but from an aligned address (PTX 9.7.9.25.3.1).
    """
    sizes = ((n, size) for x in arrays for n, size in zip(x.strides[:3], x.shape, strict=False))
    return tuple(int(n) if size > 1 else 0 for n, size in sizes)


def rows_per_block(tiling: Tiling, rows: int) -> int:
    """Query rows per tile: the tiling's, or fewer warps where there are few rows."""
    warps = min(tiling.block_q // tiling.mr, max(1, -(-rows // tiling.mr)))
    return tiling.mr * (4 if warps == 3 else warps)


def packed_heads(group: int) -> int:
    """Heads that a Hopper kernel packs into one tile of 128 or 192 rows.

    The largest power of two that divides the group and the rows of a warpgroup.
    """
    return math.gcd(group, 64)


def packed_rows(q: np.ndarray, packed: int) -> np.ndarray:
    """(B, H, L, D) seen as (B, H / packed, L, packed, D).

    Row r of a tile is query r // packed of head r % packed.
    """
    nb, nh, length, d = q.shape
    return q.reshape(nb, nh // packed, packed, length, d).swapaxes(2, 3)


def emulate_launch(launch: Launch, **options: Any) -> Any:
    """Run a launch in the emulator: the report."""
    from ..compile import compiled
    from ..emulator import emulate

    kernel = compiled(launch.factory, launch.arch, "ptx", **launch.constants)
    grid = launch.blocks(EMULATED_BLOCKS)
    return emulate(kernel, grid, None, launch.arguments(EMULATED_BLOCKS), **options)


def emulated(launch: Launch, **options: Any) -> tuple[np.ndarray, np.ndarray, Any]:
    """Run a launch in the emulator: out, lse and the report."""
    report = emulate_launch(launch, **options)
    return (*launch.finish(), report)


def aligned(name: str, x: np.ndarray) -> np.ndarray:
    """x if the kernels can read its rows in place: contiguous rows at multiples of 16 bytes."""
    steps = [n for n, size in zip(x.strides[:3], x.shape[:3], strict=True) if size > 1]
    if (x.strides[3] != x.itemsize and x.shape[3] > 1) or any(
        n % 16 for n in (*steps, x.ctypes.data, x.shape[3] * x.itemsize)
    ):
        raise UnsupportedError(
            f"{name}: got strides {x.strides} bytes for shape {x.shape}; allowed on a card: contiguous rows at "
            "multiples of 16 bytes"
        )
    return x


def mappable(*arrays: np.ndarray) -> bool:
    """Whether tensor maps describe these arrays.

    Strides are positive, which those of broadcast and reversed axes are not, and no axis is empty.
    """
    return all(
        size == 1 or (size and 0 < stride < 1 << 40)
        for x in arrays
        for stride, size in zip(x.strides, x.shape, strict=True)
    )
