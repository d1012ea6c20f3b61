"""What runs by the date: everything gets its turn."""

import daily
import pytest


@pytest.mark.skipif(daily.WHOLE, reason="TABLE=whole: everything runs every day")
@pytest.mark.parametrize("parts", [2, 3, 4, 5, 6])
def test_rows_of_a_table_and_the_third_of_a_day_meet(parts, monkeypatch):
    """A row that a day has runs only where the test of its place is not left out on that day."""
    table, ran = list(range(3 * parts)), set()
    for day in range(740000, 740000 + 6 * 3 * parts):
        monkeypatch.setattr(daily, "_day", lambda day=day: day)
        rows = daily.of_today(table, parts)
        out = daily.left_out_today([f"tests/file.py::{row}" for row in rows])
        ran.update(row for n, row in enumerate(rows) if n not in out)
    assert ran == set(table)
