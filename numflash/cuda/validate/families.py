"""The families of a validation, in their order: each runs in a process with a limit."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import decode_cases
from .cases import CASES, GRADIENTS, LENGTHS, LONG_CASES, LONG_GRADIENTS, QUICK_LENGTHS


class Family(NamedTuple):
    """Problems that are compared, and timings of the kernels whose problems agree.

    kind : "forward", "backward", "decode", "rates", "peers", "gradient peers", "variants",
        "gradient variants", "frameworks", "ladder"
    cases : problems of which there are results of the emulator;  long : others
    lengths : L of the timings; decode, rates, variants and ladder have shapes of their own
    """

    name: str
    kind: str
    precision: str = ""
    cases: tuple[Any, ...] = ()
    lengths: tuple[int, ...] = ()
    long: tuple[Any, ...] = ()


def _of(cases: tuple, precision: str, place: int, every: int) -> tuple:
    return tuple(case for case in cases if case[place] == precision)[::every]


def families(
    arch: str, quick: bool = False, lengths: tuple[int, ...] | None = None
) -> list[Family]:
    """What is compared and timed on an architecture, Hopper's forward kernels first.

    quick: every third problem and two lengths.
    """
    every = 3 if quick else 1
    if lengths is None:
        lengths = QUICK_LENGTHS if quick else LENGTHS

    def forward(precision: str, lengths: tuple[int, ...] = ()) -> Family:
        cases = _of(CASES, precision, 2, every)
        long = _of(LONG_CASES, precision, 2, every)
        return Family(f"forward {precision}", "forward", precision, cases, lengths, long)

    def backward(precision: str, lengths: tuple[int, ...] = ()) -> Family:
        cases = _of(GRADIENTS, precision, 2, every)
        long = _of(LONG_GRADIENTS, precision, 2, every)
        return Family(f"backward {precision}", "backward", precision, cases, lengths, long)

    def decoding(dtype: str) -> Family:
        return Family(f"decode {dtype}", "decode", dtype, _of(decode_cases.CASES, dtype, 1, every))

    found = [
        forward("float16", lengths),
        Family("rates", "rates"),
        Family("forward peers", "peers", lengths=lengths),
        forward("int8", lengths),
        decoding("float16"),
        decoding("int8"),
        decoding("int4"),
        backward("float16", lengths),
        Family("backward peers", "gradient peers", lengths=lengths),
        Family("forward variants", "variants"),
        *([Family("backward variants", "gradient variants")] if arch == "sm_90a" else []),
        forward("bfloat16"),
        decoding("bfloat16"),
        backward("bfloat16"),
        forward("float32"),
        backward("float32"),
        Family("frameworks", "frameworks"),
        Family("ladder of the study kernels", "ladder"),
    ]
    without = ("bfloat16",) if arch == "sm_75" else ()
    if not lengths:
        found = [x for x in found if x.cases or x.kind == "frameworks"]
    return [x for x in found if x.precision not in without]
