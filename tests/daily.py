"""Tables too long for one run: every day has a part of the rows, TABLE=whole all of them."""

import datetime
import os
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

Row = TypeVar("Row")
WHOLE = os.environ.get("TABLE") == "whole"


def of_today(rows: Sequence[Row], parts: int) -> Sequence[Row]:
    """Every `parts`-th row, from the date on."""
    return rows if WHOLE else rows[datetime.date.today().toordinal() % parts :: parts]


def isas_of_today(isas: Sequence[Row]) -> Sequence[Row]:
    """The widest vectors, plain loops, and half of the instruction sets between."""
    return [*isas[:1], *of_today(isas[1:-1], 2), *isas[1:][-1:]]


def left_out_today(names: Sequence[str]) -> set[int]:
    """Places of every other name, from the date on: of each file's tests one half, of the next day the other."""
    if WHOLE:
        return set()
    today, place, found = datetime.date.today().toordinal(), Counter[str](), set()
    for n, name in enumerate(names):
        file = name.split("::")[0]
        if (place[file] + today) % 2:
            found.add(n)
        place[file] += 1
    return found
