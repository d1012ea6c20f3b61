"""What the tiled gradient reads and writes, and how the arrays of a problem become it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...jit.compiler import bare, inline, kernel
from ...jit.memory import uncleared
from ...jit.parallel import over_tasks
from ...numerics.fixedpoint import LOG2E
from ...validation import Problem
from ..isa.strided import Strided
from ..problem_arrays import edges, slope_functions, slopes_of
from ..semantics import ScoreTiles

F = np.float32
# keys and queries of a tile: multiples of a vector register tile's rows and of every panel. Matrix
# tiles take the 128 keys that are a multiple of their 32 rows.
KEYS = 144
QUERIES = 64
HIDDEN = F(-np.inf)


class Operands(NamedTuple):
    """float32 arrays of N query heads and Nkv KV heads.

    q (B, H, L, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv), do (B, H, L, Dv)
    skip : (N, L) bool, rows of q and do that may hold anything
    hidden : (Nkv, S) bool, rows of k and v that may
    lse : (N, padded L) in units of log2, +inf for a row that takes no part
    delta : (N, padded L) rowsum(dO * O) - dLSE
    """

    q: Strided
    k: Strided
    v: Strided
    do: Strided
    skip: np.ndarray
    hidden: np.ndarray
    lse: np.ndarray
    delta: np.ndarray


class Prepared(NamedTuple):
    """Query heads in the layout of the products, float32 or bfloat16 bits; dQ. Zeros pad the columns, and
    the rows as far as a register tile reads them.

    One for each worker, which prepares one head after the other, or one for each head where several
    workers share its keys.

    q, do : (heads, padded L, columns), right operands as in `head_rows`
    q_packed, do_packed : (heads, padded L * columns), in panels
    dq : (heads, splits, padded L and a register tile's rows, columns) float32, without the scale
    """

    q: np.ndarray
    q_packed: np.ndarray
    do: np.ndarray
    do_packed: np.ndarray
    dq: np.ndarray


class Factors(NamedTuple):
    """float32: of the scores, in units of log2; of dQ and dK where the kernel stores them."""

    scores: float
    dq: float
    dk: float


class Gradients(NamedTuple):
    """float32: dq (B, H, L, D), which the kernel writes where a head is one share.

    dk, dv (B, Hkv, S, ...), or a copy for each query head of a group: contiguous (B, H, S, ...), without
    the scale. scores (N, L, S), of the scores that a bias was added to; empty where these are not wanted.
    """

    dq: Strided
    dk: Strided
    dv: Strided
    scores: np.ndarray


class Sizes(NamedTuple):
    """Query and KV heads of a batch, keys S, shares of a head's keys, workers."""

    heads: int
    kv_heads: int
    keys: int
    splits: int
    workers: int


class Scratch(NamedTuple):
    """Tiles of W workers, on cache lines, or without the first dimension those of one. The first
    three and the sums are float32.

    scores, slopes (W, KEYS * QUERIES) : see below
    transposed (W, (QUERIES and a register tile's rows) * KEYS)
    p, ds, ds_turned : P^T, dS^T and dS as left operands; empty for float32, which has the first three
    k, v (W, KEYS, columns) : a block's keys and values as left operands
    k_right : its keys as a right operand; empty for float32, which has k
    room (W, KEYS * most columns) float32 : rows on their way to bfloat16, empty for float32
    dk, dv (W, KEYS, columns)

    What the first three hold, step by step (`flash_backward.work_of`):

    =================  ===============  ==================  ======================
    after              scores           slopes              transposed
    =================  ===============  ==================  ======================
    products           S^T              dP^T
    weigh              P^T              dS^T                with a cap or a function: dS^T of the
                                                            scores that the mask was applied to
    add_gradients      P^T              dS^T                dS
    =================  ===============  ==================  ======================

    For float32 `p` is `scores`, `ds` is `slopes`, `ds_turned` is `transposed` and `k_right` is `k`: the
    operands of the last products are where they were computed. For bfloat16 they are rounded copies.
    """

    scores: np.ndarray
    slopes: np.ndarray
    transposed: np.ndarray
    p: np.ndarray
    ds: np.ndarray
    ds_turned: np.ndarray
    k: np.ndarray
    v: np.ndarray
    k_right: np.ndarray
    room: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


class Options(NamedTuple):
    """Which keys a query attends to and how its scores change, in units of log2, transposed like
    the tiles.

    left, right, diagonal, key_lengths : as in `semantics.Semantics`
    mask, bias : (B, H, blocks of L, S, QUERIES) uint8 and float32, empty if none; the first four
        sizes may be 1
    softcap : float32, 0 = none
    slopes : (B, H) float32, empty if none
    functions : score and mask functions; `masked` is their gradient tile, `unmasked` whether scores
        change
    sizes : L, S
    """

    left: int
    right: int
    diagonal: np.ndarray
    key_lengths: np.ndarray
    mask: np.ndarray
    bias: np.ndarray
    softcap: float
    slopes: np.ndarray
    functions: ScoreTiles
    sizes: tuple[int, int]


@bare
def _transpose_squares(rows, square, out):
    """out (S, QUERIES) = rows (up to QUERIES, S) transposed."""
    s = rows.shape[1]
    for first in range(0, s, QUERIES):
        count = min(QUERIES, s - first)
        for r in range(rows.shape[0]):
            source = rows[r, first : first + count]
            for j in range(count):
                square[j, r] = source[j]
        for j in range(count):
            source, target = square[j], out[first + j]
            for r in range(rows.shape[0]):
                target[r] = source[r]


@inline
def _transpose_block(task, x, out):
    n, block, length = task // out.shape[1], task % out.shape[1], x.shape[1]
    # rows of x are often a power of two apart, which is one set of L1: a square of its own is not
    square = uncleared((QUERIES, QUERIES), x.dtype, "square transposed")
    _transpose_squares(
        x[n, block * QUERIES : min((block + 1) * QUERIES, length)], square, out[n, block]
    )


@kernel
def _transpose(x, out):
    """out (N, blocks, S, QUERIES) = x (N, L, S) transposed, by squares.

    Elements beyond L are left unchanged.
    """
    over_tasks(_transpose_block, x.shape[0] * out.shape[1], (x, out))


def transposed(x: np.ndarray | None, dtype: type) -> np.ndarray:
    """A broadcast (B, H, L, S) view as (B, H, blocks of L, S, QUERIES), without its repetitions."""
    if x is None:
        return np.zeros((0, 0, 0, 0, 0), dtype)
    repeated = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.strides)
    once: np.ndarray = np.ascontiguousarray(x[repeated]).view(dtype)
    nb, nh, length, s = once.shape
    out = np.zeros((nb, nh, -(-length // QUERIES), s, QUERIES), dtype)
    if x.strides[2] == 0:
        out[:] = once.reshape(nb, nh, 1, s, 1)
    else:
        _transpose(once.reshape(-1, length, s), out.reshape(-1, *out.shape[2:]))
    return out


def options_of(problem: Problem) -> Options:
    """The options as the kernel takes them."""
    bias = transposed(problem.bias, F)
    mask = (bias != HIDDEN).view(np.uint8) if bias.size else transposed(problem.mask, np.uint8)
    return Options(
        *edges(problem),
        mask,
        bias,
        F(problem.softcap * LOG2E),
        slopes_of(problem),
        slope_functions(problem),
        (problem.shape[3], problem.shape[4]),
    )
