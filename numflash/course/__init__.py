"""What the notebooks share.

Checks of exercises, figures, and a tracer that counts the memory accesses of a kernel.

Imported by notebooks only. May import: everything but `commands`.
"""

from .lessons import bars, card, check, figure, roof, rounds, table

__all__ = ["bars", "card", "check", "figure", "roof", "rounds", "table"]
