"""A step of a validation: one problem that is compared, or one timing. Each runs by itself.

What a step launches is known before it runs, so the same list says which kernels are compiled ahead,
which steps a broken kernel takes part in, and what runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ...errors import UnsupportedError
from ..compile import Key
from ..compile.cubins import file_name
from ..device import Device
from ..device.operands import Launch

Row = dict[str, Any]
Rows = Iterator[Row]
# seconds from the first launch of a step to its next row. The longest timing on an H100 takes about 3:
# copies of 1 GB from pageable memory, 0.3 s of launches, and float64 for some rows.
LAUNCHING = 12.0


def nothing() -> Iterable[Key]:
    """No kernels of ours."""
    return ()


class Step(NamedTuple):
    """One problem or one timing.

    name : unique in its family
    kernels : the keys of what it launches, found without a card; raises UnsupportedError where
        there is no kernel for it
    run : its rows, found on a card
    limit : seconds between two rows, before a kernel counts as one that never ends
    """

    name: str
    kernels: Callable[[], Iterable[Key]]
    run: Callable[[Device], Iterable[Row]]
    limit: float = LAUNCHING


def key_of(work: Launch) -> Key:
    """The key of a launch's kernel."""
    return work.factory, work.arch, tuple(sorted(work.constants.items()))


def keys_of(*launches: Launch) -> set[Key]:
    """The keys of launches' kernels."""
    return {key_of(work) for work in launches}


def labels(keys: Iterable[Key]) -> list[str]:
    """What rows call the kernels: the names of their files in a folder of ready cubins."""
    return sorted({file_name(factory, arch, dict(constants)) for factory, arch, constants in keys})


def here_only(key: Key) -> bool:
    """Whether a kernel can be compiled only in the process that planned it: a score function's code
    is known there.
    """
    return bool(dict(key[2]).get("functions"))


def supported(step: Step) -> set[Key] | str:
    """A step's kernels, or why there are none for it."""
    try:
        return set(step.kernels())
    except UnsupportedError as error:
        return str(error)
