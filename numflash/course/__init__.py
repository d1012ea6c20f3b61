"""What the notebooks share.

Exercises with their checks, figures, things that move, and a tracer that counts the memory accesses
of a kernel.

Imported by notebooks only. May import: everything but `commands`.
"""

from .exercises import answer_of, check, hint, solution, yours_or
from .lessons import (
    COLOURS,
    DASHES,
    bars,
    card,
    exact_attention,
    figure,
    machine,
    quantised,
    roof,
    rounds,
    table,
)
from .moving import Frames

__all__ = [
    "COLOURS",
    "DASHES",
    "Frames",
    "answer_of",
    "bars",
    "card",
    "check",
    "exact_attention",
    "figure",
    "hint",
    "machine",
    "quantised",
    "roof",
    "rounds",
    "solution",
    "table",
    "yours_or",
]
