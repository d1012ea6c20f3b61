"""What equal calls of the tiled gradient have in common: shares of the work and scratch memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...jit.scratch import Layout, placed, scratch
from ...jit.threads import restoring_threads
from ...numerics.fixedpoint import LOG2E
from ...validation import Problem
from ..floats.float_isas import FLOAT_ISAS
from ..isa.isas import padded
from ..isa.strided import contiguous_strides
from ..plan import KernelPlan
from ..problem_arrays import at_address, gradient_semantics
from ..semantics import OPTION_NUMBERS, option_numbers
from . import flash_backward
from .call import NUMBERS, PLACES, Numbers, RealNumbers, make_call
from .held import CHUNK
from .operands import KEYS, QUERIES

F = np.float32
TASKS = 16  # shares that a problem is cut into, at least, where it has so many key blocks
FINITE = float(np.finfo(F).max)
Kinds = dict[str, tuple[Any, tuple[int, ...]]]  # names of `Numbers`, dtypes and shapes of arrays
Shape = tuple[int, ...]


class GradientPlan(KernelPlan):
    """Places in scratch memory, options as numbers: equal are calls of the same shapes and options.

    A plan may be used by many threads at a time.

    Parameters
    ----------
    problem : Problem
        Its query, key and value count by their shapes; its masks, lengths and slopes are the plan's
        own.
    isa : str
        An instruction set with register tiles.
    workers : int
        Threads that share the work.
    """

    def __init__(self, problem: Problem, isa: str, workers: int) -> None:
        super().__init__()
        self.problem = problem.without_memory()
        shape = self.shape = problem.shape
        nb, nh, nkv, length, s, d, dv = shape
        blocks = -(-s // flash_backward.keys_of_block(isa))
        splits = max(1, min(-(-TASKS // (nb * nh)), blocks))
        unit = max(FLOAT_ISAS[isa].lanes, FLOAT_ISAS[isa].step)  # whole vectors, steps of products
        columns = padded(length, FLOAT_ISAS[isa].panel), padded(d, unit), padded(dv, unit)
        kinds = found_kinds(shape, columns[0])
        kinds |= scratch_kinds(isa, columns[1:], workers)
        kinds |= prepared_kinds(isa, columns, workers if splits == 1 else nb * nh, splits)
        shared = nb * nh if nh > nkv else 0
        kinds |= {"copies_dk": (F, (shared, s, d)), "copies_dv": (F, (shared, s, dv))}
        kinds |= dense_kinds(workers)
        self.layout = Layout()
        places = places_in(self.layout, kinds)
        numbers = Numbers(*shape, *columns, workers, splits, bounds(problem), **places)
        self.numbers = np.array((*numbers, *(0,) * OPTION_NUMBERS), np.int64)
        self.set_arrays()
        self.reals = real_numbers(problem)
        if shared:  # `add_parts` applies the scale of dK
            self.reals[RealNumbers._fields.index("dk")] = 1
        self.strides = strides_of(shape)
        self.call = make_call(isa)

    def set_arrays(self) -> None:
        """As of `KernelPlan`."""
        self.arrays = gradient_semantics(self.problem)
        self.numbers[NUMBERS:] = option_numbers(self.arrays)

    def run(
        self, operands: Sequence[int], strides: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Gradients of the rows that float32 holds: which rows it does not, and the delta of all.

        operands : addresses of q, k, v, do, out, lse, grad_lse, dq, dk, dv and scores, as `call.make_call`
            takes them
        strides : as `call.make_call` takes them; None where all are contiguous

        Returns
        -------
        skip (N, L) bool, exact_delta (N, L) float64 as in `held.Found`; None where all are held
        """
        with scratch.take(self.layout.nbytes) as room:
            at, numbers = room.address, placed(self.numbers, PLACES, self.layout, room)
            steps = self.strides if strides is None else strides
            if not restoring_threads(self.call, *operands, at, numbers, steps, self.reals):
                return None
            nb, nh, _, length, _, _, _ = self.shape
            skip, delta = (
                at_address(
                    at + int(numbers[Numbers._fields.index(name)]), (nb * nh, length), kind
                ).copy()
                for name, kind in (("skip", "|b1"), ("exact_delta", "=f8"))
            )
            return skip, delta


def places_in(layout: Layout, kinds: Kinds) -> dict[str, int]:
    """Where arrays start in scratch memory, by name."""
    sizes = {name: math.prod(of) * np.dtype(kind).itemsize for name, (kind, of) in kinds.items()}
    return layout.add_all(**sizes)


def real_numbers(problem: Problem) -> np.ndarray:
    """The `RealNumbers` of a problem whose kernel scales dK itself."""
    factor, scale = (min(max(x, -FINITE), FINITE) for x in (problem.scale * LOG2E, problem.scale))
    cap = float(F(problem.softcap * LOG2E))
    return np.array((factor, scale, scale, largest_scale(problem), cap), np.float64)


def strides_of(shape: Shape) -> np.ndarray:
    """The strides that `call.make_call` takes where all arrays of a problem's shape are contiguous."""
    nb, nh, nkv, length, s, d, dv = shape
    operands = (nb, nh, length, d), (nb, nkv, s, d), (nb, nkv, s, dv)
    shapes = *operands, *[(nb, nh, length, dv)] * 2, *operands
    return contiguous_strides(*((x, F().itemsize) for x in shapes))


def largest_scale(problem: Problem) -> float:
    """What products of rows are multiplied by at most, at least 1, as `held.Given` takes it."""
    return max(1.0, abs(problem.scale))


def bounds(problem: Problem) -> bool:
    """Whether a key that is not finite may have a finite score, as `held.Given` takes it."""
    changed = problem.functions is not None and problem.functions.changes_scores
    return bool(problem.softcap) or changed


def found_kinds(shape: Shape, high: int) -> Kinds:
    """The arrays of `held.Found`, and the counter of the shares."""
    nb, nh, nkv, length, s, _, _ = shape
    n, n_kv = nb * nh, nb * nkv
    return {
        "skip": (np.bool_, (n, length)),
        "hidden": (np.bool_, (n_kv, s)),
        "lse": (F, (n, high)),
        "delta": (F, (n, high)),
        "exact_delta": (np.float64, (n, length)),
        "largest": (np.int32, (n_kv, -(-s // CHUNK), 2)),
        "counter": (np.int64, (1,)),
    }


def scratch_kinds(isa: str, columns: Shape, workers: int) -> Kinds:
    """The arrays of `Scratch`; float32 has no memory of its own for some."""
    tiles, (wide, of_values) = FLOAT_ISAS[isa], columns
    narrow = workers if tiles.group == 2 else 0
    operand = np.uint16 if narrow else F
    tile, turned = KEYS * QUERIES, (QUERIES + tiles.rows) * KEYS
    return {
        "scores": (F, (workers, tile)),
        "slopes": (F, (workers, tile)),
        "transposed": (F, (workers, turned)),
        "p": (operand, (narrow, tile)),
        "ds": (operand, (narrow, tile)),
        "ds_turned": (operand, (narrow, turned)),
        "k": (operand, (workers, KEYS, wide)),
        "v": (operand, (workers, KEYS, of_values)),
        "k_right": (operand, (narrow, KEYS, wide)),
        "room": (F, (narrow, KEYS * max(wide, of_values))),
        "dk": (F, (workers, KEYS, wide)),
        "dv": (F, (workers, KEYS, of_values)),
    }


def dense_kinds(workers: int) -> Kinds:
    """The last arrays of `Scratch`, whose pages a call without mask and bias does not touch."""
    tile = workers, KEYS * QUERIES
    return {"mask": (np.uint8, tile), "bias": (F, tile)}


def prepared_kinds(isa: str, sizes: Shape, slots: int, splits: int) -> Kinds:
    """The arrays of `Prepared`, for so many heads at a time; sizes: padded L, columns."""
    tiles, (high, wide, columns) = FLOAT_ISAS[isa], sizes
    operand = np.uint16 if tiles.group == 2 else F
    return {
        "q": (operand, (slots, high, wide)),
        "q_packed": (operand, (slots, high * wide)),
        "do": (operand, (slots, high, columns)),
        "do_packed": (operand, (slots, high * columns)),
        "dq": (F, (slots, splits, high + tiles.rows, wide)),
    }
