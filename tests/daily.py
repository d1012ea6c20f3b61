"""Tables too long for one run: every day has a part of the rows, TABLE=whole all of them."""

import datetime
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

Row = TypeVar("Row")
WHOLE = os.environ.get("TABLE") == "whole"


def _day() -> int:
    return datetime.date.today().toordinal()


def of_today(rows: Sequence[Row], parts: int) -> Sequence[Row]:
    """Every `parts`-th row, from the date on."""
    return rows if WHOLE else rows[_day() % parts :: parts]


def isas_of_today(isas: Sequence[Row]) -> Sequence[Row]:
    """The widest vectors, plain loops, and half of the instruction sets between."""
    return [*isas[:1], *of_today(isas[1:-1], 2), *isas[1:][-1:]]


def between_slow(isas: Sequence[str]) -> list[Any]:
    """`isas_of_today` as parameters of a test; those between the best one and plain loops are slow."""
    best, *others = isas_of_today(isas)
    slow = [pytest.param(isa, marks=pytest.mark.slow) for isa in others[:-1]]
    return [best, *slow, *others[-1:]]


def left_out_today(names: Sequence[str]) -> set[int]:
    """Places of the names that are left out: of each file's tests two thirds, by the date.

    A test runs on every third day. Every six days its turn moves by one day: otherwise a row of a
    table that `of_today` has every third day would be left out on each of its days.
    """
    if WHOLE:
        return set()
    day, place, found = _day(), Counter[str](), set()
    for n, name in enumerate(names):
        file = name.split("::")[0]
        if (place[file] + day + day // 6) % 3:
            found.add(n)
        place[file] += 1
    return found
