"""Chapter 12: the documents' claims."""

from __future__ import annotations

from ..exercises import Exercise


def visited(length: int) -> int:
    """Tiles of 48 x 64 that causal attention visits."""
    return sum(-(-min(length, row + 48) // 64) for row in range(0, length, 48))


def conflict(row_bytes: int) -> int:
    """How many-way the bank conflict of a column is."""
    words = {t * row_bytes // 4 for t in range(32)}
    banks = [word % 32 for word in words]
    return max(map(banks.count, banks))


EXERCISES = {
    "12.1": Exercise(
        "softmax in the document's table, ms and per cent",
        (
            "Elements over elements per second, in ms; the same for the two products.",
            "4.3 G operations at 2900 GOPS take 4.3 / 2900 s. The share is of the sum of all three.",
        ),
        expected=lambda: (
            20.713,
            100 * 20.713 / (20.713 + 1e3 * 4.3e9 / 2900e9 + 1e3 * 4.3e9 / 1850e9),
        ),
        within=0.01,
    ),
    "12.2": Exercise(
        "softmax must be faster by",
        (
            "Take the products' time as 1 unit. If softmax has a share x, its time is x / (1 - x).",
            "Before over after.",
        ),
        expected=(0.636 / 0.364) / (0.03 / 0.97),
        within=0.01,
    ),
    "12.3": Exercise(
        "tiles visited",
        (
            "Go through the tiles of 48 rows. The last row of a tile attends to the most keys.",
            "Row r attends to keys 0 .. r, which are in blocks 0 .. r // 64.",
        ),
        model=visited,
        cases=((48,), (64,), (512,), (4096,)),
        slip=("row + 47", "row"),
    ),
    "12.4": Exercise(
        "how many-way",
        (
            "Which 4-byte word does thread t read, and in which bank (word % 32) is it?",
            "Threads that read the same word do not conflict: count different words per bank.",
        ),
        model=conflict,
        cases=((128,), (132,), (64,), (256,), (136,)),
        slip=("words % 32", "words % 16"),
    ),
}
