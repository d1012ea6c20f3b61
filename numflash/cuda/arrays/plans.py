"""Calls with device arrays that were made before: what they launch is decided once, and kept.

Equal calls have arrays that differ in their addresses only, of the same alignment, and the same
options. What small arrays on the host hold is part of the key.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import NumflashError
from ...interop.arrays import import_array
from ...tiling import PlanCache
from ...validation.options import NAMES, Options
from ..device import Device
from ..device.operands import Launch
from .operands import Operands

Made = tuple[int, tuple[int, ...], str]
ARRAYS = ("attn_mask", "key_lengths", "alibi_slopes", "sinks")
_plain = operator.attrgetter(*(name for name in NAMES if name not in ARRAYS))


class LaunchPlan:
    """The launches of equal calls. Holds none of their arrays.

    Parameters
    ----------
    device : that the arrays are on
    launches : in order; of the operands, and of `made`, whose numbers follow theirs
    made : arrays that each call makes: the number of the operand whose kind they are, shape, dtype;
        an attribute too
    """

    def __init__(self, device: Device, launches: Sequence[Launch], made: Sequence[Made]) -> None:
        self._device, self.made = device, tuple(made)
        self._steps = [device.recorded(x) for x in launches]

    def __call__(self, operands: Operands) -> list[Any]:
        """What is made, the launches enqueued on the stream of the first operand's library."""
        found, bases = [], operands.bases()
        for number, shape, dtype in self.made:
            x, there = operands.empty(number, shape, dtype)
            bases.append(there)
            found.append(x)
        stream, *others = operands.streams()
        with self._device.among(stream, others) if others else contextlib.nullcontext():
            self.enqueue(bases, stream)
        return found

    def enqueue(self, bases: Sequence[int], stream: int) -> None:
        """Enqueue the launches on operands and on what was made (`Recorded.enqueue`)."""
        if self._steps:
            self._device.enqueue(self._steps, bases, stream)


plans: PlanCache[LaunchPlan] = PlanCache()


def run(
    operands: Operands,
    small: Sequence[tuple[str, Any]],
    options: Options,
    make: Callable[[], LaunchPlan],
) -> tuple[list[Any], LaunchPlan]:
    """What the plan of a call makes, and the plan: that of an equal call before, or the one that
    `make` gives, which checks the call in full.

    small : names of the arrays on the host, and what was given for them
    options : the others
    """
    call = _key(operands, small, options)
    plan = None if call is None else plans.get(call)
    if plan is not None:
        return plan(operands), plan
    plan = make()
    found = plan(operands)
    if call is not None:
        plans.keep(call, plan)
    return found, plan


def _key(operands: Operands, small: Sequence[tuple[str, Any]], options: Options) -> Any:
    """What equal calls have in common; None for a call that leaves no plan."""
    forms = operands.forms()
    if forms is None:
        return None
    try:
        contents = tuple(None if x is None else _content(name, x) for name, x in small)
        device = operands.device()
    except NumflashError:  # the call is looked at in full, and refused for the first reason
        return None
    return device, forms, contents, _plain(options)


def _content(name: str, x: Any) -> tuple[Any, ...]:
    taken = import_array(name, x)
    return taken.dtype, taken.array.shape, taken.array.tobytes()
