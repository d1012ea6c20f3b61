"""Chapter 20: backward on the GPU."""

from __future__ import annotations

from ..exercises import Exercise


def products(queries: int, keys: int, d: int) -> tuple[int, int]:
    """m16n8k16 products of the pass over keys and the pass over queries."""
    one = 2 * queries * keys * d // 4096
    return 4 * one, 3 * one


def bytes_read(queries: int, keys: int, d: int) -> int:
    """Bytes that the pass over keys reads, 64 keys a block, 64 queries a tile."""
    tile = 2 * 64 * d * 2 + 64 * 8
    return sum(
        2 * 64 * d * 2 + sum(tile for _ in range(0, queries, 64)) for _ in range(0, keys, 64)
    )


def sums(d: int) -> int:
    """Registers of a thread for the sums of dK and dV."""
    return 2 * 16 * d // 32


EXERCISES = {
    "20.1": Exercise(
        "products",
        (
            "One matrix product is queries/16 x keys/8 x d/16 instructions.",
            "The pass over keys needs S, dP, dV, dK; the pass over queries S, dP, dQ.",
        ),
        model=products,
        cases=((256, 256, 64), (64, 128, 128)),
        slip=("3 * one", "4 * one"),
    ),
    "20.2": Exercise(
        "bytes read",
        (
            "A block reads its own 64 rows of K and V once (2 bytes a number) ...",
            "... and for each of queries/64 tiles: Q and dO (2 bytes a number), LSE and D "
            "(two numbers of 4 bytes per row).",
        ),
        model=bytes_read,
        cases=((256, 256, 64), (512, 128, 128)),
        slip=("+ 8)", "+ 4)"),
    ),
    "20.3": Exercise(
        "registers",
        (
            "A warp keeps two sums, dK and dV, each of 16 x d numbers.",
            "32 threads share them.",
        ),
        model=sums,
        cases=((64,), (128,), (256,)),
        slip=("2 * 16", "16"),
    ),
    "20.4": Exercise(
        "does not fit",
        (
            "Exercise 3 gives the registers for a head size. For which multiple of 32 does it first "
            "exceed 255?",
        ),
        expected=256,
    ),
}
