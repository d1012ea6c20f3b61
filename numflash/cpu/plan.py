"""What plans of float and of INT8 attention have in common."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np

from ..jit.scratch import Layout
from ..validation import Problem

Own = TypeVar("Own", bound="KernelPlan")


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
    """

    problem: Problem
    numbers: np.ndarray
    layout: Layout

    def with_options(self: Own, fields: dict[str, Any]) -> Own:
        """The plan of a problem whose `fields`, as of `validation.described`, are others."""
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.problem, copy.numbers = self.problem.changed(**fields), self.numbers.copy()
        copy.set_options()
        return copy

    def set_options(self) -> None:
        """Write what depends on masks, lengths and slopes into the numbers."""
        raise NotImplementedError
