"""Arrays of a case.

Numbers of every magnitude in memory of every layout, made again from a few words of JSON.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

DTYPES = {
    "float32": np.float32,
    "float64": np.float64,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
# the largest draw of each storage; products of two of them leave float32
HUGE = {"float32": 1e38, "float64": 1e38, "float16": 6e4, "bfloat16": 1e38}
SUBNORMAL = {"float32": 1e-41, "float64": 1e-41, "float16": 1e-7, "bfloat16": 1e-39}
DRAWS = (
    "normal",
    "peaked",
    "small",
    "mixed",
    "integers",
    "ones",
    "zeros",
    "biased",
    "huge",
    "subnormal",
)
USUAL = ("normal", "normal", "normal", "peaked", "small", "mixed", "integers", "biased")
VIEWS = ("reverse", "step", "axes", "readonly", "misaligned", "broadcast")


def numbers(shape: tuple[int, ...], draw: str, seed: int, dtype: str) -> np.ndarray:
    """Random numbers of one kind, float64 values that `dtype` then rounds."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if draw == "peaked":
        x *= 5
    elif draw == "small":
        x *= 1e-3
    elif draw == "mixed":
        x *= 10.0 ** rng.uniform(-4, 1, shape)
    elif draw == "integers":
        x = np.rint(2 * x)
    elif draw == "ones":
        x = np.ones(shape)
    elif draw == "zeros":
        x = np.zeros(shape)
    elif draw == "biased":
        x += 10 * rng.standard_normal(shape[-1:])
    elif draw == "huge":
        x = np.sign(x) * HUGE[dtype] * rng.uniform(0.5, 1, shape)
    elif draw == "subnormal":
        x *= SUBNORMAL[dtype]
    with np.errstate(over="ignore", under="ignore"):
        return x.astype(DTYPES[dtype])


def put(x: np.ndarray, bad: list[list]) -> None:
    """Set single entries: [[flat position, "nan" | "inf" | "-inf" | number], ...].

    Positions wrap around.
    """
    for position, value in bad:
        if x.size:
            x.reshape(-1)[position % x.size] = float(value)


def laid_out(x: np.ndarray, view: list | None) -> np.ndarray:
    """The same numbers in other memory: view is [name, axis].

    "broadcast" repeats the first entry along the axis.
    """
    if view is None or not x.size:
        return x
    name = view[0]
    axis = view[1] % x.ndim
    if name == "reverse":
        return np.flip(np.flip(x, axis).copy(), axis)
    if name == "step":
        room = np.zeros((*x.shape[:axis], 3 * x.shape[axis], *x.shape[axis + 1 :]), x.dtype)
        found = room[(slice(None),) * axis + (slice(1, None, 3),)]
        found[...] = x
        return found
    if name == "axes":
        return np.ascontiguousarray(np.moveaxis(x, axis, 0)).transpose(
            np.argsort([axis, *(a for a in range(x.ndim) if a != axis)])
        )
    if name == "readonly":
        found = x.copy()
        found.flags.writeable = False
        return found
    if name == "misaligned":
        room = np.zeros(x.nbytes + 1, np.uint8)
        found = room[1:].view(np.uint8)[: x.nbytes].view(x.dtype).reshape(x.shape)
        found[...] = x
        return found
    first = x[(slice(None),) * axis + (slice(0, 1),)]
    return np.broadcast_to(first, x.shape)


def array(shape: list[int] | tuple[int, ...], like: dict, dtype: str) -> np.ndarray:
    """An operand: like = {"draw", "seed", "bad"?, "view"?}."""
    x = numbers(tuple(shape), like["draw"], like["seed"], dtype)
    put(x, like.get("bad", ()))
    return laid_out(x, like.get("view"))
