"""Tables too long for one run: every day has a part of the rows, TABLE=whole all of them."""

import datetime
import os
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
