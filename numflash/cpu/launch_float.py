"""From a validated problem to the floating-point kernels: packing, options as arrays, and the rows that float32 cannot hold."""

from __future__ import annotations

import numba
import numpy as np

from ..interop import widen
from ..jit import target
from ..jit.memory import fresh
from ..tiling import Tiling, tiling
from ..validation import Problem
from .floats.flash_float import make_attend
from .floats.flash_rows import make_attend_rows
from .floats.float_packing import pack_keys, pack_values
from .isa.isas import padded
from .semantics import NO_TILES, ScoreTiles, Semantics

F = np.float32
LOG2E = 1 / np.log(2.0)
NO_LIMIT = 1 << 40
TASKS = 4  # query tiles for each thread, at least
LARGEST = 2.0**120  # scores and their sums stay below
Results = (
    tuple[np.ndarray, np.ndarray] | None
)  # contiguous float32 arrays of the caller to be written, or None


def compact(x: np.ndarray | None, dtype: type) -> np.ndarray:
    """A broadcast (B, H, L, S) view without its repetitions, but for the keys; contiguous, empty for None."""
    if x is None:
        return np.zeros((0, 0, 0, 0), dtype)
    once = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.strides[:3])]
    return np.ascontiguousarray(once).view(dtype)


def semantics(problem: Problem, double: bool = False) -> Semantics:
    """The options as the float kernels take them: scores in units of log2, dense masks as bytes.

    double : score functions are those of float64
    """
    has_mask, has_bias, slopes = (
        problem.mask is not None,
        problem.bias is not None,
        problem.alibi_slopes,
    )
    return Semantics(
        NO_LIMIT if problem.left is None else problem.left,
        NO_LIMIT if problem.right is None else problem.right,
        np.asarray(problem.diagonal, np.int64),
        np.asarray(problem.key_lengths, np.int64),
        has_mask or has_bias or bool(problem.softcap) or slopes is not None,
        compact(problem.mask, np.uint8),
        compact(problem.bias, F),
        has_mask,
        has_bias,
        F(problem.softcap * LOG2E),
        np.zeros((0, 0, 0), F),
        np.zeros((0, 0), F) if slopes is None else np.ascontiguousarray(slopes * LOG2E, F),
        functions=functions_of(problem, double),
    )


def functions_of(problem: Problem, double: bool = False) -> ScoreTiles:
    """The score and mask functions as kernels call them."""
    if problem.functions is None:
        return NO_TILES
    nb, nh, _, length, s, _, _ = problem.shape
    return problem.functions.tiles((nb, nh, length, s), double)


def slope_functions(problem: Problem, double: bool = False) -> ScoreTiles:
    """The same for gradients."""
    if problem.functions is None:
        return NO_TILES
    nb, nh, _, length, s, _, _ = problem.shape
    return problem.functions.slopes((nb, nh, length, s), double)


def seen_keys(problem: Problem) -> np.ndarray:
    """(B,) int64: keys of each batch that some row can see."""
    length, s = problem.shape[3:5]
    if problem.right is None:
        return problem.key_lengths
    return np.minimum(
        np.maximum(problem.diagonal + (length + problem.right), 0), problem.key_lengths
    )


def heads(x: np.ndarray) -> np.ndarray:
    """(B, H, ...) to a contiguous (B * H, ...)."""
    return np.ascontiguousarray(x).reshape(-1, *x.shape[2:])


def rows_per_task(tile: Tiling, n: int, length: int, workers: int) -> int:
    """Rows of a query tile: the tiling's, or fewer for short queries, and where several threads would have too few tiles.

    Always whole groups of rows, so that the bits do not depend on the number of threads.
    """
    rows = tile.block_q
    while workers > 1 and rows > 4 * tile.mr and n * -(-length // rows) < TASKS * workers:
        rows = rows // 2 // tile.mr * tile.mr
    return min(rows, padded(length, tile.mr))


def run_rows(
    problem: Problem,
    options: Semantics,
    double: bool,
    todo: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
) -> None:
    """Rows `todo` one at a time, in plain loops."""
    q, k, v = (heads(np.asarray(widen(x), F)) for x in (problem.query, problem.key, problem.value))
    _, nh, nkv, _, s, _, _ = problem.shape
    make_attend_rows(double)(
        q,
        k,
        v,
        todo,
        problem.scale * LOG2E,
        options,
        (nh, nkv, numba.get_num_threads()),
        s,
        np.zeros(1, np.int64),
        out,
        lse,
    )


def results_of(problem: Problem, given: Results) -> tuple[np.ndarray, np.ndarray]:
    """out (B, H, L, Dv) and lse (B, H, L) float32 to be written: the caller's, or new ones."""
    nb, nh, _, length, _, _, dv = problem.shape
    return (fresh((nb, nh, length, dv), F), fresh((nb, nh, length), F)) if given is None else given


def may_overflow(problem: Problem) -> np.ndarray:
    """(B * H, L) bool: rows in whose scores a partial sum may leave float32, which could cancel into a finite number or -inf."""
    _, nh, nkv, _, _, d, _ = problem.shape

    def largest(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        size = np.abs(np.asarray(widen(x), F))
        return size.max(axes, where=np.isfinite(size), initial=0).astype(np.float64)

    of_keys = np.repeat(largest(problem.key, (2, 3)), nh // nkv, 1)[:, :, None]
    product = largest(problem.query, (3,)) * of_keys * d * max(1.0, abs(problem.scale * LOG2E))
    return (product > LARGEST).reshape(-1, problem.shape[3])


def run(
    problem: Problem, isa: str | None = None, results: Results = None
) -> tuple[np.ndarray, np.ndarray]:
    """out (B, H, L, Dv) and lse (B, H, L), both float32, sinks not applied; `results` if these are given."""
    bfloat16 = problem.precision == "bfloat16"
    isa = target.require(isa, target.BFLOAT16_ISAS if bfloat16 else target.FLOAT_ISAS)
    nb, nh, nkv, length, s, d, dv = problem.shape
    n, options = nb * nh, semantics(problem)
    whole = results_of(problem, results)
    out, lse, redo = (
        whole[0].reshape(n, length, dv),
        whole[1].reshape(n, length),
        np.zeros((n, length), np.uint8),
    )
    counter = np.zeros(2, np.int64)
    if isa == "portable":
        run_rows(problem, options, False, np.arange(n * length), out, lse)
        redo[:] = ~(np.isfinite(out).all(-1) & (lse > -1e37)) | may_overflow(problem)
        counter[1] = redo.any()
    else:
        native = isa in ("amx_bf16", "avx512_bf16")
        q, k, v = (
            x if native else np.asarray(widen(x), F)
            for x in (problem.query, problem.key, problem.value)
        )
        stops, c = seen_keys(problem), problem.scale * LOG2E
        keys, most = pack_keys(isa, k, stops)
        values, columns = pack_values(isa, v, stops, length * nh // nkv)
        with np.errstate(divide="ignore", over="ignore"):
            limits = (LARGEST / (most.astype(np.float64) * d * max(1.0, abs(c)))).astype(F)
        kind, workers = "bfloat16" if native else "float32", numba.get_num_threads()
        block_q = rows_per_task(tiling(isa, kind), n, length, workers)
        make_attend(isa, kind)(
            heads(q),
            keys,
            limits,
            values,
            columns,
            F(c),
            options,
            (nh, nkv, workers),
            block_q,
            s,
            counter,
            out,
            lse,
            redo,
        )
    if counter[1]:
        if problem.functions is not None:
            options = semantics(problem, double=True)
        run_rows(problem, options, True, np.flatnonzero(redo), out, lse)
    return whole
