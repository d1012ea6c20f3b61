"""What plans of float and of INT8 attention, and of gradients, have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from ..interop.arrays import address
from ..jit.scratch import Layout
from ..validation import Problem, described
from ..validation.options import OptionArrays
from .array_places import lend_mask, place_of
from .floats.call import addresses
from .semantics import KernelArrays, Semantics

Own = TypeVar("Own", bound="KernelPlan")
MOST_OTHERS = 4  # plans of masks, lengths and slopes that a plan keeps


class KernelPlan:
    """What equal calls have in common, decided once.

    Equal are calls of the same shapes, precision and options; the numbers in masks, lengths and
    slopes may differ. A plan may be used by many threads at a time.

    Attributes
    ----------
    problem : Problem
        Its query, key and value have shapes and no memory; its masks, lengths and slopes are the
        plan's own.
    numbers : int64 array
        What the compiled call reads: `Numbers` of its kernels, and `semantics.OptionNumbers`.
    layout : of scratch memory
    first : the plan that this one is a copy of, or None
        Addresses that the copy did not write anew are those of arrays of `first`, which it keeps alive.
    others : plans of the last masks, lengths and slopes, and their sinks, by alignment and `place_of`
    arrays : KernelArrays or Semantics
        Masks, lengths and slopes, which kernels read in place: their addresses are among the numbers.
    """

    problem: Problem
    numbers: np.ndarray
    layout: Layout
    first: KernelPlan | None = None
    arrays: KernelArrays | Semantics

    def __init__(self) -> None:
        self.others: dict[Any, Any] = {}

    def for_arrays(
        self: Own, arrays: OptionArrays, alignment: str, shape: tuple[int, int, int, int]
    ) -> tuple[Own | None, np.ndarray | None]:
        """The plan for these masks, lengths and slopes, and the sinks, which no plan reads; shape is
        (B, H, L, S). No plan where it needs more scratch memory than this one.

        The layers of a model have one mask: where it lies where an earlier one did, and kernels read it
        there, that one's plan serves again. Nothing that a mask holds is in a plan.
        """
        place = place_of(arrays)
        found: tuple[Own, np.ndarray | None] | None = self.others.get((alignment, place))
        if found is not None:
            return found
        fields = described(arrays, alignment, shape)
        at = place[0][0] if place and place[0] else 0
        in_place = place is not None and (not at or lend_mask(fields, at))
        plan = self.for_options(fields)
        if in_place and plan is not None and plan.mask_at() == at:
            if len(self.others) >= MOST_OTHERS:
                self.others.clear()
            self.others[alignment, place] = plan, fields["sinks"]
        return plan, fields["sinks"]

    def mask_at(self) -> int:
        """Where kernels read the mask, a copy where its rows are not contiguous; 0 for none."""
        mask, bias = self.arrays.mask, self.arrays.bias
        return address(mask if mask.size else bias)

    def for_options(self: Own, fields: dict[str, Any]) -> Own | None:
        """The plan of a problem whose `fields`, as of `validation.described`, are others; None where it
        needs more scratch memory.
        """
        return self.with_options(fields)

    def with_options(self: Own, fields: dict[str, Any]) -> Own:
        """The same, whatever memory it needs."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.problem, copy.numbers = self.problem.changed(**fields), self.numbers.copy()
        copy.first = self
        copy.set_arrays()
        return copy

    def set_arrays(self) -> None:
        """Write what the problem's masks, lengths and slopes decide into the numbers."""
        raise NotImplementedError


class ForwardPlan(KernelPlan):
    """A plan of attention, which reads and writes arrays whose rows are contiguous, anywhere.

    Attributes
    ----------
    strides : of q, k, v and out where these are contiguous
    takes : "float32", "bfloat16" or None
        The dtype of arrays, or tensors, that `run_at` takes as they are.
    narrows : whether `run_at` can write bfloat16
    """

    strides: np.ndarray
    takes: str | None
    narrows: bool = False

    def run(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, lse: np.ndarray | None
    ) -> None:
        """Attend what the plan's `operands` give. out (B, H, L, Dv) float32 whose rows are contiguous, or
        bits of bfloat16 where it `narrows`, and lse (B, H, L), contiguous float32, are written.

        None for no lse.
        """
        places, strides = places_of((q, k, v, out), out if lse is None else lse)
        self.run_at(places, lse is not None, strides, out.dtype == np.uint16)

    def run_at(
        self,
        places: Sequence[int],
        with_lse: bool = True,
        strides: np.ndarray | None = None,
        narrow: bool = False,
    ) -> None:
        """The same for addresses of q, k, v, out and lse.

        strides : of q, k, v and out, as `strided_at` takes them; None where all are contiguous
        narrow : out is bits of bfloat16
        """
        raise NotImplementedError


def places_of(
    arrays: tuple[np.ndarray, ...], last: np.ndarray
) -> tuple[Sequence[int], np.ndarray | None]:
    """Addresses of four (B, H, L, D) arrays whose rows are contiguous and of `last`, and the strides of
    the four, as `strided_at` takes them; None where all are contiguous.
    """
    q, k, v, out = arrays  # a generator for `all` takes twice as long
    together = q.flags.c_contiguous and k.flags.c_contiguous
    if together and v.flags.c_contiguous and out.flags.c_contiguous:
        return addresses(*arrays, last), None
    strides = np.array([step for x in arrays for step in x.strides[:3]], np.int64)
    # the compiled function takes contiguous arrays only, and a fifth of NumPy's time
    turned = [x if x.flags.c_contiguous else x.swapaxes(1, 2) for x in arrays]
    if all(x.flags.c_contiguous for x in turned):
        return addresses(*turned, last), strides
    return [x.ctypes.data for x in (*arrays, last)], strides
