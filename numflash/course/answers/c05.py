"""Chapter 05: how LLVM vectorises it."""

from __future__ import annotations

from ..exercises import Exercise


def has_vector_fma(histogram: dict[str, int]) -> bool:
    """Whether a histogram of instructions has multiply-adds on vectors."""
    return any(
        name.startswith(("vfmadd", "fmla")) and not name.endswith("ss xmm") for name in histogram
    )


def products(instruction: str, bits: int) -> int:
    """Pairs of bytes that one instruction multiplies."""
    return bits // (8 if instruction == "sdot" else 16)


EXERCISES = {
    "05.1": Exercise(
        "vector multiply-adds",
        (
            "Look at the names: print(strict), print(free). A scalar instruction ends in ss.",
            "any(...) over the names that begin with vfmadd or fmla, and whose first word, "
            "name.split()[0], does not end in ss.",
        ),
        model=has_vector_fma,
        cases=(
            ({"vmulss xmm": 1, "vaddss xmm": 1, "vfmadd231ss xmm": 1},),
            ({"vmovups ymm": 4, "vfmadd231ps ymm": 4},),
            ({"ld1w z.s": 8, "fmla z.s": 4},),
            ({},),
        ),
        slip=('.endswith("ss")', '.endswith("ps")'),
    ),
    "05.2": Exercise(
        "products of one instruction",
        (
            "How many numbers of 8 bits are in a vector of `bits` bits? Of 16 bits?",
            "sdot multiplies bytes as they are, vpmaddwd after widening them to 16 bits.",
        ),
        model=products,
        cases=(("sdot", 128), ("sdot", 512), ("vpmaddwd", 512)),
        slip=('"vpmaddwd": 16', '"vpmaddwd": 8'),
    ),
}
