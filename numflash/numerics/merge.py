"""Joining attention over disjoint sets of keys.

(out, lse) pairs form a commutative monoid with (0, -inf) as its zero.

out = (e^lse_a out_a + e^lse_b out_b) / (e^lse_a + e^lse_b). The reduce step of the T4 architecture
(docs/sources.md) leaves out the division by the sum of the weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError
from ..interop.arrays import convert, import_array, widen
from ..interop.eager import eager


def weights(lse_a: np.ndarray, lse_b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shares of a and b in the sum, and the LSE of the sum.

    Rows where both are -inf get shares 0.
    """
    with np.errstate(all="ignore"):
        top = np.maximum(lse_a, lse_b)
        shift = np.where(top == -np.inf, 0, top).astype(top.dtype)
        # an LSE of +inf is a sum beyond float32: it outweighs finite ones, and two of them weigh
        # the same
        a, b = (
            np.where((x == top) & (top == np.inf), 1, np.exp(x - shift)) for x in (lse_a, lse_b)
        )
        total = a + b
        return (
            np.where(total == 0, 0, a / total).astype(top.dtype),
            np.where(total == 0, 0, b / total).astype(top.dtype),
            shift + np.log(total),
        )


@eager
def merge_states(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """Attention over the union of two disjoint sets of keys.

    With precision "int8" every set is a sequence of its own, and the first four keys of each are
    the finer ones.

    Parameters
    ----------
    out_a, out_b : (..., Dv) float arrays of one shape and dtype
        Outputs of `attention(..., return_lse=True)` over either set.
    lse_a, lse_b : (...) float32 or float64
        Their log-sum-exps, natural log; -inf where no key was seen.

    Returns
    -------
    out, lse : of the kind, shape and dtype of out_a and lse_a

    Raises
    ------
    ArgumentError, ArgumentTypeError
    """
    taken = {
        n: import_array(n, x)
        for n, x in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b))
    }
    for name, x in taken.items():
        first = taken["out_a" if name.startswith("out") else "lse_a"]
        floats = (
            ("float32", "float64", "float16", "bfloat16")
            if name.startswith("out")
            else ("float32", "float64")
        )
        if x.dtype not in floats:
            raise ArgumentTypeError(f"{name}: got dtype {x.dtype}; allowed: {', '.join(floats)}")
        if x.dtype != first.dtype:
            raise ArgumentTypeError(
                f"{name}: got dtype {x.dtype}; allowed: the other's, {first.dtype}"
            )
        if not first.array.ndim and name == "out_a":
            raise ArgumentError("out_a: got shape (); allowed: (..., Dv)")
        shape = taken["out_a"].array.shape[: None if name.startswith("out") else -1]
        if x.array.shape != shape:
            raise ArgumentError(f"{name}: got shape {x.array.shape}; allowed: {shape}")
    a, b, lse = weights(taken["lse_a"].array, taken["lse_b"].array)
    with np.errstate(all="ignore"):  # infinity less infinity is NaN, as it is in attention
        out = join(widen(taken["out_a"].array), a) + join(widen(taken["out_b"].array), b)
    dtype = taken["out_a"].dtype
    return taken["out_a"].export(convert(out, dtype), dtype), taken["lse_a"].export(lse, "float")


def join(out: np.ndarray, share: np.ndarray) -> np.ndarray:
    """out * share per row; a share of 0 gives 0, also for NaN and infinity."""
    with np.errstate(all="ignore"):  # inf * 0 is computed, and not taken
        weighted = out * share[..., None]
    return np.where(share[..., None] == 0, 0, weighted).astype(np.result_type(out, share))


def apply_sinks(out: np.ndarray, lse: np.ndarray, sinks: np.ndarray) -> None:
    """Merge with the state of one extra key per head, score `sinks[h]`, value 0: out and lse are
    written.

    out (B, H, L, Dv), lse (B, H, L), sinks (H,).
    """
    extra = sinks.astype(lse.dtype)[:, None]
    with np.errstate(all="ignore"):  # infinity times 0 is not taken
        share = 1 / (1 + np.exp(extra - lse))
        np.multiply(out, share[..., None], out=out, casting="same_kind")
        np.logaddexp(lse, extra, out=lse)
    out[share == 0] = 0
