"""The gradients of float masks and sinks, beside those of query, key and value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError
from ..interop.arrays import import_array
from ..validation.options import Options

OPERANDS = ("query", "key", "value")
DIFFERENTIABLE = (*OPERANDS, "attn_mask", "sinks", "scores")
MOST_TERMS = 64  # of a sum in float32


def split_wrt(wrt: Any, options: Options) -> tuple[list[str], list[Any]]:
    """`wrt` of `numflash.attention_backward`: its names, which are of what was given and has a
    gradient, and the rest, captured arrays that are not checked here.
    """
    allowed = ", ".join(map(repr, DIFFERENTIABLE))
    if isinstance(wrt, str) or not isinstance(wrt, Sequence):
        raise ArgumentTypeError(
            f"wrt: got {wrt!r}; allowed: a tuple of {allowed} and arrays that score_mod has captured"
        )
    names = [x for x in wrt if isinstance(x, str)]
    for name in names:
        if name not in DIFFERENTIABLE:
            raise ArgumentError(f"wrt: got {name!r}; allowed: {allowed}")
        if name in ("attn_mask", "sinks") and getattr(options, name) is None:
            raise ArgumentError(
                f"wrt: got {name!r}, which is None; allowed: what the call was given"
            )
    if "attn_mask" in names and import_array("attn_mask", options.attn_mask).dtype == "bool":
        raise ArgumentError("wrt: got 'attn_mask', which is bool; allowed: a float mask")
    return names, [x for x in wrt if not isinstance(x, str)]


def refuse_on_card(wrt: Sequence[str]) -> None:
    """Raise for gradients that are not computed of arrays on a card."""
    for name in wrt:
        if name not in OPERANDS:
            raise UnsupportedError(
                f"wrt: got {name!r} with arrays on a card; allowed there: {', '.join(map(repr, OPERANDS))}"
            )


def of_mask(scores: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The gradient of a mask of this shape, which was broadcast to (B, H, L, S), from that of the
    scores (B, H, L, S) that it was added to.
    """
    whole = (*(1,) * (scores.ndim - len(shape)), *shape)
    repeated = tuple(n for n, size in enumerate(whole) if size != scores.shape[n])
    with np.errstate(all="ignore"):
        # the first axis has the most numbers and the fewest terms; float64 takes six times as long
        for axis in repeated:
            wide = scores.shape[axis] > MOST_TERMS or scores.dtype == np.float64
            dtype = np.float64 if wide else np.float32
            scores = scores.sum(axis=axis, keepdims=True, dtype=dtype)
        return scores.reshape(shape).astype(np.float32, copy=False)


def of_sinks(
    sinks: np.ndarray,
    grad_out: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    grad_lse: np.ndarray | None,
) -> np.ndarray:
    """(H,) float32 of sinks (H,), from dO and O (B, H, L, Dv), the LSE (B, H, L) and its gradient.

    A sink has the weight exp(sink - LSE) in each row and adds nothing to its output, so that the
    gradient of its score is the weight times 0 - rowsum(dO * O) + dLSE.
    """
    with np.errstate(all="ignore"):
        delta = np.einsum("bhlv,bhlv->bhl", grad_out, out, dtype=np.float64)
        if grad_lse is not None:
            delta -= grad_lse
        weights = np.exp(np.minimum(sinks[:, None] - np.float64(lse), 0))
        return -(weights * delta).sum((0, 2)).astype(np.float32)
