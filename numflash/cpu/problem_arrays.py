"""What kernels read of a problem: its options as arrays and limits, its operands by heads."""

from __future__ import annotations

import numpy as np

from ..interop.arrays import ArrayInterface
from ..numerics.fixedpoint import LOG2E
from ..validation import Problem
from .semantics import NO_TILES, KernelArrays, ScoreTiles, Semantics

F = np.float32
Array = np.ndarray
NONE_OF: dict[type, Array] = {dtype: np.zeros((0, 0, 0, 0), dtype) for dtype in (np.uint8, F)}
ONE, ALL = slice(0, 1), slice(None)
NO_SHIFT, NO_SLOPES = np.zeros((0, 0, 0), F), np.zeros((0, 0), F)


def compact(x: np.ndarray | None, dtype: type) -> np.ndarray:
    """A broadcast (B, H, L, S) view without its repetitions, but for the keys.

    Contiguous, empty for None.
    """
    if x is None:
        return NONE_OF[dtype]
    batch, heads, rows = [ONE if step == 0 else ALL for step in x.strides[:3]]
    once = x[batch, heads, rows]
    return np.ascontiguousarray(once).view(dtype)


def edges(problem: Problem) -> tuple[int, int, Array, Array]:
    """Which keys a row attends to: left, right, diagonal and key_lengths."""
    diagonal, key_lengths = problem.diagonal, problem.key_lengths
    return *problem.reach, np.asarray(diagonal, np.int64), np.asarray(key_lengths, np.int64)


def slopes_of(problem: Problem) -> Array:
    """ALiBi's slopes in units of log2, empty for none."""
    slopes = problem.alibi_slopes
    return NO_SLOPES if slopes is None else np.ascontiguousarray(slopes * LOG2E, F)


def edges_and_masks(
    problem: Problem, changed: bool = False
) -> tuple[int, int, Array, Array, bool, Array, Array, bool, bool]:
    """The first fields of `Semantics`, the same for floats and integers.

    changed : whether scores are changed whatever the options are
    """
    return (
        *edges(problem),
        changed or is_general(problem),
        compact(problem.mask, np.uint8),
        compact(problem.bias, F),
        problem.mask is not None,
        problem.bias is not None,
    )


def is_general(problem: Problem) -> bool:
    """Whether masks, bias, softcap or slopes are to be looked at."""
    arrays_given = not problem.mask is problem.bias is problem.alibi_slopes is None
    return arrays_given or bool(problem.softcap)


def kernel_arrays(problem: Problem, slopes: Array) -> KernelArrays:
    """What kernels read of masks, lengths and slopes; the latter in their unit."""
    _, _, diagonal, key_lengths = edges(problem)
    mask, bias = compact(problem.mask, np.uint8), compact(problem.bias, F)
    return KernelArrays(is_general(problem), diagonal, key_lengths, mask, bias, slopes)


def semantics(problem: Problem, double: bool = False) -> Semantics:
    """The options as the float kernels take them: scores in units of log2, dense masks as bytes.

    double : score functions are those of float64
    """
    return Semantics(
        *edges_and_masks(problem),
        F(problem.softcap * LOG2E),
        NO_SHIFT,
        slopes_of(problem),
        functions=functions_of(problem, double),
    )


def gradient_semantics(problem: Problem, double: bool = False) -> Semantics:
    """The same for gradients, with the slopes of score functions."""
    plain = semantics(problem.changed(functions=None))
    return plain._replace(functions=slope_functions(problem, double))


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
    if problem.right is None:
        return problem.key_lengths
    length = problem.query.shape[2]
    return np.minimum(
        np.maximum(problem.diagonal + (length + problem.right), 0), problem.key_lengths
    )


def heads(x: np.ndarray) -> np.ndarray:
    """(B, H, ...) to a contiguous (B * H, ...)."""
    return np.ascontiguousarray(x).reshape(-1, *x.shape[2:])


def at_address(address: int, shape: tuple[int, ...], typestr: str) -> np.ndarray:
    """The array at an address."""
    return np.asarray(ArrayInterface(address, shape, None, typestr))


def in_place(
    address: int, shape: tuple[int, ...], typestr: str, steps: tuple[int, ...]
) -> np.ndarray:
    """The (B, H, L, D) array at an address, `steps` bytes from one batch, head and row to the next."""
    whole = *steps, np.dtype(typestr).itemsize
    return np.asarray(ArrayInterface(address, shape, whole, typestr))
