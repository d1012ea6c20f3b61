"""What the tiled gradient reads and writes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..isa.strided import Strided

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
    """Query and KV heads of a batch, queries L and keys S, shares of a head's keys, workers."""

    heads: int
    kv_heads: int
    length: int
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
    mask, bias (W, KEYS * QUERIES) : uint8 and float32, of the tile (`dense_tiles`)

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
    mask: np.ndarray
    bias: np.ndarray
