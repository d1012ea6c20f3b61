"""Tables and progress on the terminal: rich where it is installed, plain text otherwise.

Progress goes to stderr, always.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

MOST_LINES = 60


def count(n: int, word: str) -> str:
    """A number with its word: "1 thread", "2 threads"."""
    return f"{n} {word}{'s' * (n != 1)}"


@dataclass
class Table:
    """A table to read: numbers are formatted by the caller, `records` keeps them raw for --json."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""

    def add(self, *cells: str, **record: Any) -> None:
        """Add a row, and what --json shows of it."""
        self.rows.append(cells)
        self.records.append(record)

    def plain(self) -> str:
        """The table as aligned plain text."""
        widths = [
            max(len(row[i]) for row in [self.columns, *self.rows]) for i in range(len(self.columns))
        ]

        def line(cells: Sequence[str]) -> str:
            numbers = (c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))
            return "  ".join([cells[0].ljust(widths[0]), *numbers]).rstrip()

        parts = [
            self.title,
            line(self.columns),
            "  ".join("-" * w for w in widths),
            *map(line, self.rows),
        ]
        return "\n".join(parts + ([self.note] if self.note else []))

    def show(self) -> None:
        """Print it: by rich on a terminal that is wide enough, as plain text elsewhere."""
        if not (find_spec("rich") and sys.stdout.isatty() and self._show_by_rich()):
            print(self.plain(), end="\n\n")

    def _show_by_rich(self) -> bool:
        """Print it, unless the terminal is too narrow: rich would cut words and numbers."""
        from rich.console import Console
        from rich.measure import Measurement
        from rich.table import Table as RichTable

        console = Console(markup=False)
        table = RichTable(
            title=self.title,
            title_justify="left",
            caption=self.note or None,
            caption_justify="left",
        )
        for i, column in enumerate(self.columns):
            table.add_column(column, justify="left" if i == 0 else "right", no_wrap=i == 0)
        for row in self.rows:
            table.add_row(*row)
        no_limit = console.options.update(width=10_000)
        fits = Measurement.get(console, no_limit, table).minimum <= console.width
        if fits:
            console.print(table)
        return fits


class Progress:
    """Steps of known number: a bar on a terminal with rich, else one line each.

    Of more than MOST_LINES steps a line a second is printed.

    >>> with Progress("warmup", 2) as progress:
    ...     progress.step("first")
    ...     progress.step("second")
    """

    def __init__(self, title: str, total: int) -> None:
        self.title, self.total, self.done, self.start = title, total, 0, time.perf_counter()
        self.bar: Any = None
        self.printed = -1.0

    def __enter__(self) -> Progress:
        if find_spec("rich") and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress as RichProgress

            self.bar = RichProgress(console=Console(stderr=True), transient=True)
            self.bar.start()
            self.task = self.bar.add_task(self.title, total=self.total)
        return self

    def step(self, what: str) -> None:
        """`what` begins now."""
        self.done += 1
        if self.bar:
            self.bar.update(self.task, completed=self.done - 1, description=f"{self.title}: {what}")
        else:
            seconds = time.perf_counter() - self.start
            if self.total > MOST_LINES and seconds < self.printed + 1:
                return
            self.printed = seconds
            print(
                f"[{seconds:5.1f} s] {self.title} {self.done}/{self.total}: {what}",
                file=sys.stderr,
                flush=True,
            )

    def __exit__(self, *error: Any) -> None:
        if self.bar:
            self.bar.stop()
