"""One token's attention over a KV cache that is spread over ranks.

Each rank attends to its own keys; one reduction merges (out, lse).
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError
from ..interop.arguments import flag, real
from ..interop.arrays import convert, deliver, import_array
from ..numerics.merge import join, weights
from .agreement import agree, communicator, mpi, require_same

F = np.float32


@functools.cache
def reduction(width: int) -> tuple[Any, Any]:
    """The MPI operation that merges two states, and the datatype of one row.

    A row is out (width - 1 numbers) and lse.

    The row is one element, so that no library cuts it. Not declared commutative: then ranks are
    merged in their order, and the bits do not depend on who arrives first.
    """
    from mpi4py import MPI

    def merge(lower: Any, upper: Any, _: Any) -> None:
        a, b = (np.frombuffer(x, F).reshape(-1, width) for x in (lower, upper))
        mine, other, lse = weights(a[:, -1], b[:, -1])
        b[:, :-1] = join(a[:, :-1], mine) + join(b[:, :-1], other)
        b[:, -1] = lse

    return MPI.Op.Create(merge, commute=False), MPI.FLOAT.Create_contiguous(width).Commit()


def split_kv_decode(
    comm: Any, cache: Any, query: Any, *, scale: float | None = None, return_lse: bool = False
) -> Any:
    """Attention of one new token per sequence over the keys of all ranks.

    Each rank's cache holds other tokens of the same sequences, as many as it likes, none included:
    append each new token on one rank only, for instance in turn. The query is the same on all
    ranks. While the local kernel runs, the ranks compare what they were called with; after it, one
    reduction merges their states.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    cache : numflash.KVCache
        The rank's own. Anything with `value_dim` and `decode(query, scale=..., return_lse=True)`
        will do.
    query : (B, H, 1, D) array
    scale : float
        1 / sqrt(D) unless given.
    return_lse : bool

    Returns
    -------
    out : (B, H, 1, Dv), of the kind and dtype of query (float32 for float64), equal bits on all
        ranks
    lse : (B, H, 1) float32; only with `return_lse`

    Raises
    ------
    ArgumentError, ArgumentTypeError
        The same on every rank, naming the rank that met it.
    """
    MPI = mpi("split_kv_decode")
    comm = communicator(comm)
    error = None
    given: dict[str, Any] = {}
    try:
        taken = import_array("query", query)
        return_lse = flag("return_lse", return_lse)
        if not (hasattr(cache, "value_dim") and hasattr(cache, "decode")):
            raise ArgumentTypeError(f"cache: got {type(cache).__name__}; allowed: a KVCache")
        given = {
            "query's shape": taken.array.shape,
            "query's dtype": taken.dtype,
            "scale": None if scale is None else real("scale", scale),
            "cache.value_dim": cache.value_dim,
        }
        if taken.array.ndim != 4 or taken.array.shape[2] != 1:
            raise ArgumentError(
                f"query: got shape {taken.array.shape}; allowed: (B, H, 1, D), one token of each sequence"
            )
    except Exception as raised:
        error = raised
    digest = zlib.crc32(repr(given).encode())
    mine = np.array([digest, -digest, error is not None], np.int64)
    agreed = np.empty(3, np.int64)
    compared = comm.Iallreduce(mine, agreed, MPI.MAX)
    rows = np.empty((0, 1), F)
    if error is None:
        rows, error = local_state(cache, query, scale, taken.array.shape, cache.value_dim)
    compared.Wait()
    if agreed[2] or agreed[0] != -agreed[1]:
        settle(comm, error, given)
    operation, row = reduction(rows.shape[1])
    comm.Allreduce(MPI.IN_PLACE, [rows, len(rows), row], operation)
    if rows[0, -1] != -np.inf:
        settle(comm, error, given)
    lead = taken.array.shape[:3]
    out, lse = rows[1:, :-1].reshape(*lead, cache.value_dim), rows[1:, -1].reshape(lead).copy()
    return deliver(out, lse, taken, return_lse)


def local_state(
    cache: Any, query: Any, scale: float | None, shape: tuple[int, ...], width: int
) -> tuple[np.ndarray, Exception | None]:
    """(1 + B * H, Dv + 1) float32: out and lse of each row.

    The first row has no keys; it has some where decoding failed.
    """
    rows = np.zeros((1 + shape[0] * shape[1], width + 1), F)
    rows[0, -1] = -np.inf
    try:
        out, lse = (
            import_array("out", x).array for x in cache.decode(query, scale=scale, return_lse=True)
        )
        rows[1:, :-1], rows[1:, -1] = convert(out, "float32").reshape(-1, width), lse.reshape(-1)
    except Exception as error:
        rows[:, -1] = 0
        return rows, error
    return rows, None


def settle(comm: Any, error: Exception | None, given: dict[str, Any]) -> None:
    """Raise on all ranks what one of them met, or in what their arguments differ."""

    def check() -> dict[str, Any]:
        if error is not None:
            raise error
        return given

    require_same(agree(comm, check))
